"""A simulated Colab: a stand-in for google.colab, a pip that only notes what it is asked for, no network."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import plotly.io
import pytest

import labkit
from labkit import colab, notebooks
from labkit.errors import LabkitError
from labkit.notebooks import DISTRIBUTION, FIRST_CELL, first_cell

pytestmark = pytest.mark.end_to_end  # processes with a stubbed Colab

ROOT = Path(__file__).resolve().parent.parent
INDEX = f"{DISTRIBUTION}[colab]"
WHEEL = f"labkit_bidirectional-{labkit.__version__}-py3-none-any.whl"
WITH_GPU = f"labkit {labkit.__version__}, profile colab, Tesla T4 with 16 GB"
WITHOUT = f"labkit {labkit.__version__}, profile laptop, {colab.NO_GPU}"


# ---- the setup cell, in a session that takes itself for Colab ------------------------------------------------------

STAND_INS = {  # torch: no stand-in for the lab, but setup() asks it for nothing else than the GPU
    "google/colab/__init__.py": "",
    "google/colab/output.py": "def enable_custom_widget_manager():\n    print('widgets on')\n",
    "google/colab/drive.py": """
        from pathlib import Path
        def mount(place):
            (Path(place) / "MyDrive").mkdir(parents=True)
            print("Mounted at", place)
        """,
    "torch/__init__.py": """
        import os, types
        cuda = types.SimpleNamespace(
            is_available=lambda: os.environ["GPU"] == "1",
            get_device_properties=lambda i: types.SimpleNamespace(name="Tesla T4", total_memory=15_828_320_256),
        )
        """,
}

SESSION = """
import json, os, sys
import google.colab  # Colab's kernel has imported it before any cell
from importlib import metadata, util
from IPython.core.interactiveshell import InteractiveShell

sys.path[:] = [p for p in sys.path if not os.path.exists(os.path.join(p or ".", "labkit", "__init__.py"))]
assert util.find_spec("labkit") is None, "a fresh Colab has no labkit"
installed = {"torch": "2.11.0+cu128", "numpy": "2.0.2"}
version = metadata.version
metadata.version = lambda name: installed.get(name) or version(name)
installs = []

def pip(line):
    installs.append(line)
    sys.path.append(os.environ["CHECKOUT"])

shell = InteractiveShell.instance()
shell.register_magic_function(pip, "line", "pip")
for cell in json.load(sys.stdin):
    shell.run_cell(cell).raise_error()
print("installs", json.dumps(installs))
"""


@pytest.fixture
def session(tmp_path):
    """session(*cells, gpu=...) runs cells in a Python on a Colab of its own: (printed lines, requests to pip)."""
    for name, source in STAND_INS.items():
        file = tmp_path / "stand_ins" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source), encoding="utf-8")
    content = tmp_path / "content"
    content.mkdir()
    (content / WHEEL).touch()

    def run(*cells, gpu=True, **more):
        left_out = ("LABKIT_PROFILE", "PLOTLY_RENDERER", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= {"PYTHONPATH": str(tmp_path / "stand_ins"), "CHECKOUT": str(ROOT), "GPU": str(int(gpu))}
        environment |= {"COLAB_RELEASE_TAG": "release-colab", "IPYTHONDIR": str(tmp_path / "ipython"), **more}
        done = subprocess.run(
            [sys.executable, "-c", SESSION],
            input=json.dumps(cells),
            cwd=content,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        *printed, installs = done.stdout.splitlines()
        return printed, json.loads(installs.removeprefix("installs "))

    run.content = content
    return run


@pytest.mark.parametrize(
    ("cell", "requirement", "gpu"),
    [(FIRST_CELL, f"{WHEEL}[colab]", False), (first_cell(INDEX), INDEX, True)],
)
def test_the_setup_cell_run_twice_installs_once_and_prints_twice_what_it_runs_on(session, cell, requirement, gpu):
    show = "import os; print(os.environ.get('LABKIT_PROFILE'), os.environ['PLOTLY_RENDERER'])"
    printed, installed = session(cell, cell, show, gpu=gpu)
    line = WITH_GPU if gpu else WITHOUT
    assert printed == ["widgets on", line, "widgets on", line, f"{None if gpu else 'laptop'} colab"]
    assert installed == [f'install -q "{requirement}" torch==2.11.0+cu128 numpy==2.0.2']


def test_without_the_wheel_the_cell_says_what_to_upload(session):
    (session.content / WHEEL).unlink()
    with pytest.raises(RuntimeError, match="Upload labkit's wheel"):
        session(FIRST_CELL)


def test_files_on_drive_are_there_after_the_machine_was_lost(session, tmp_path):
    drive = tmp_path / "drive"
    point = f"import labkit.colab\nfrom pathlib import Path\nlabkit.colab.DRIVE = Path({str(drive)!r})"
    cells = [FIRST_CELL, point, "labkit.colab.setup(drive=True)"]
    kept = f"{WITH_GPU}, files are kept in {drive / 'MyDrive' / 'labkit'}"
    printed, _ = session(*cells, "Path('runs').mkdir()", "labkit.colab.setup(drive=True)")
    assert printed[2:] == ["widgets on", f"Mounted at {drive}", kept, "widgets on", kept]
    printed, _ = session(*cells, "print(Path('runs').is_dir())")  # another machine, the same Drive
    assert printed[-1] == "True"


# ---- setup(), and what it does not do outside Colab ----------------------------------------------------------------


@pytest.mark.parametrize("own", [None, "json"])
def test_outside_colab_setup_prints_one_line_and_makes_plotly_send_data(monkeypatch, capsys, own):
    monkeypatch.setenv("LABKIT_PROFILE", "laptop")
    monkeypatch.setattr(plotly.io.renderers, "default", "browser")
    monkeypatch.setenv("PLOTLY_RENDERER", own or "")
    if own is None:
        monkeypatch.delenv("PLOTLY_RENDERER")
    for _ in range(2):
        colab.setup()
        assert capsys.readouterr().out == f"labkit {labkit.__version__}, profile laptop\n"
    assert plotly.io.renderers.default == os.environ["PLOTLY_RENDERER"] == (own or "plotly_mimetype")


def test_setup_refuses_a_package_older_than_labkit_needs_with_the_cure(monkeypatch):
    needs = ["transformers>=5.2", "nbval>=0.11; extra == 'dev'"]
    monkeypatch.setattr(colab.metadata, "requires", lambda name: needs)
    monkeypatch.setattr(colab.metadata, "version", lambda name: "4.57.1")
    with pytest.raises(
        LabkitError, match=r"transformers: found 4.57.1, needed >=5.2.*%pip install 'transformers>=5.2'"
    ):
        colab.setup()


# ---- the heads of the notebooks ------------------------------------------------------------------------------------


@pytest.fixture
def heads():
    spec = importlib.util.spec_from_file_location("notebook_heads", ROOT / "scripts" / "notebook_heads.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["notebook_heads"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_committed_notebooks_have_the_heads_that_the_settings_ask_for():
    command = [sys.executable, ROOT / "scripts/notebook_heads.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"run scripts/notebook_heads.py:\n{done.stdout}{done.stderr}"


def test_a_head_is_written_once_and_taken_back_without_a_trace(heads):
    path = sorted((ROOT / "notebooks").glob("*.ipynb"))[0]
    old = path.read_text(encoding="utf-8")
    table = {"repository": "https://github.com/owner/name.git", "colab-source": "repository"}
    setup, badge = heads.head_of(path, heads.Heads.of(table))
    new = heads.with_head(old, setup, badge)
    assert heads.with_head(new, setup, badge) == new != old
    assert heads.with_head(new, *heads.head_of(path, heads.Heads())) == old
    changed = [a for a, b in zip(json.loads(new)["cells"], json.loads(old)["cells"], strict=True) if a != b]
    prose, code = ("".join(cell["source"]) for cell in changed)
    assert prose.count(f"https://colab.research.google.com/github/owner/name/blob/main/notebooks/{path.name}") == 1
    assert "git+https://github.com/owner/name@main" in code and notebooks.is_setup_cell(code)


# ---- Binder, dev container -----------------------------------------------------------------------------------------


def test_binder_and_the_dev_container_install_what_exists():
    script = ROOT / "binder" / "postBuild"
    (extras,) = re.findall(r'-e "\.\[([\w,]+)\]"', script.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    target = container["postCreateCommand"].removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    if os.name != "nt":
        for file in (script, ROOT / "binder" / "start"):
            assert os.access(file, os.X_OK)
            subprocess.run(["bash", "-n", file], check=True)
