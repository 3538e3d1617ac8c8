"""A simulated Colab: its package versions, a stand-in for google.colab, a pip that notes or resolves, no network.

What Colab has installed is in colab_packages.txt. What labkit asks for is in pyproject.toml; what those packages ask
for in turn is read from the ones that these tests run with, which also stand in for the package index.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import types
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import labkit
from labkit import colab, notebooks
from labkit.errors import LabkitError
from labkit.notebooks import DISTRIBUTION, FIRST_CELL, first_cell

pytestmark = pytest.mark.end_to_end  # processes with a stubbed Colab, and pip

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LISTED = (ROOT / "tests" / "colab_packages.txt").read_text(encoding="utf-8").splitlines()
COLAB = dict(line.split("==") for line in LISTED if not line.startswith("#"))
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
    "google/colab/userdata.py": """
        import os
        class SecretNotFoundError(Exception): pass
        class NotebookAccessError(Exception): pass
        def get(key):
            if "SECRET" not in os.environ:
                raise SecretNotFoundError(key)
            return os.environ["SECRET"]
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

sys.path[:] = [p for p in sys.path if os.path.realpath(p or ".") != os.environ["CHECKOUT"]]
assert util.find_spec("labkit") is None, "a fresh Colab has no labkit"
installed = {"torch": "2.11.0+cu128", "numpy": "2.0.2"}
version = metadata.version
metadata.version = lambda name: installed.get(name) or version(name)
told = []

def pip(line):
    told.append(line)
    sys.path.append(os.environ["CHECKOUT"])

shell = InteractiveShell.instance()
shell.register_magic_function(pip, "line", "pip")
for cell in json.load(sys.stdin):
    shell.run_cell(cell).raise_error()
print("told", json.dumps(told))
"""


@pytest.fixture
def session(tmp_path):
    """session(*cells, gpu=...) runs cells in a new Python on a Colab of its own: (printed lines, what pip was told)."""
    for name, source in STAND_INS.items():
        file = tmp_path / "stand_ins" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source), encoding="utf-8")
    content = tmp_path / "content"
    content.mkdir()
    (content / WHEEL).touch()

    def run(*cells, gpu=True, **more):
        left_out = ("LABKIT_PROFILE", "PLOTLY_RENDERER", "HF_TOKEN", "PYTHONPATH")
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
        *printed, told = done.stdout.splitlines()
        return printed, json.loads(told.removeprefix("told "))

    run.content = content
    run.on_drive = (
        f"import labkit.colab\nfrom pathlib import Path\nlabkit.colab.DRIVE = Path({str(tmp_path / 'drive')!r})"
    )
    return run


@pytest.mark.parametrize("gpu", [True, False])
def test_setup_cell_run_twice_installs_once_and_says_twice_what_it_runs_on(session, gpu):
    tell = "import os; print(os.environ.get('LABKIT_PROFILE'), os.environ['PLOTLY_RENDERER'])"
    printed, told = session(FIRST_CELL, FIRST_CELL, tell, gpu=gpu)
    line = WITH_GPU if gpu else WITHOUT
    assert printed == ["widgets on", line, "widgets on", line, f"{None if gpu else 'laptop'} colab"]
    assert told == [f'install -q "{WHEEL}[colab]" torch==2.11.0+cu128 numpy==2.0.2']


def test_a_profile_of_your_own_is_kept_without_a_gpu(session):
    printed, _ = session(FIRST_CELL, gpu=False, LABKIT_PROFILE="ci")
    assert printed[-1].startswith(f"labkit {labkit.__version__}, profile ci, no GPU")


def test_without_the_wheel_the_cell_says_what_to_upload_and_asks_pip_for_nothing(session):
    (session.content / WHEEL).unlink()
    with pytest.raises(RuntimeError, match="Upload labkit's wheel") as raised:
        session(FIRST_CELL)
    assert "told" not in str(raised.value).splitlines()[-1]


def test_cell_asks_for_the_package_from_wherever_the_setting_says(session):
    address = f"{DISTRIBUTION}[colab] @ git+https://github.com/owner/name@main"
    for requirement in (f"{DISTRIBUTION}[colab]", address):
        assert session(first_cell(requirement))[1] == [f'install -q "{requirement}" torch==2.11.0+cu128 numpy==2.0.2']


def test_setup_cell_of_any_source_and_age_is_known_for_one():
    for cell in (FIRST_CELL, first_cell("x"), "import labkit.notebooks\n\nlabkit.notebooks.setup()\n"):
        assert notebooks.is_setup_cell(cell)
    assert notebooks.is_setup_cell(FIRST_CELL.replace("setup()", "setup(drive=True)"))
    assert not notebooks.is_setup_cell("import torch\n\nimport labkit.notebooks")
    assert not notebooks.is_setup_cell(f"{FIRST_CELL}\nprint(1)")


def test_old_setup_cell_still_works(session):
    printed, _ = session("%pip install whatever", "import labkit.notebooks\n\nlabkit.notebooks.setup()")
    assert printed == ["widgets on", f"labkit {labkit.__version__}, profile colab"]


def test_a_run_on_drive_goes_on_after_the_machine_was_lost(session, tmp_path):
    begin = """
        from labkit.run_folder import RunFolder
        run = RunFolder.open("runs/ner", {"steps": 6}, resume=True)
        found = run.latest_checkpoint()
        print("from", found[0].name if found else "the beginning")
    """
    saved = """
        (run.checkpoints / "checkpoint-3").mkdir(parents=True)
        (run.checkpoints / "checkpoint-3" / "weights").write_text("...")
        run.seal(3)
    """
    cells = [FIRST_CELL, session.on_drive, "labkit.colab.setup(drive=True)", textwrap.dedent(begin)]
    printed, _ = session(*cells, "labkit.colab.setup(drive=True)", textwrap.dedent(saved))
    folder = tmp_path / "drive" / "MyDrive" / "labkit"
    kept = f"{WITH_GPU}, files are kept in {folder}"
    assert printed[2:] == [
        "widgets on",
        f"Mounted at {tmp_path / 'drive'}",
        kept,
        "from the beginning",
        "widgets on",
        kept,
    ]
    assert (folder / "runs" / "ner" / "checkpoints" / "checkpoint-3").is_dir()
    printed, _ = session(*cells)  # another machine, the same Drive
    assert printed[-1] == "from checkpoint-3"


def test_a_secret_of_colab_becomes_the_token_and_is_never_printed(session):
    ask = "token = labkit.colab.token('google/gemma-2-9b')\nimport os; print(os.environ['HF_TOKEN'] == token)"
    printed, _ = session(FIRST_CELL, ask, SECRET="hf_secret")
    assert printed[-1] == "True" and "hf_secret" not in "\n".join(printed)
    with pytest.raises(RuntimeError, match="gemma-2-9b is gated.*click the key on the left"):
        session(FIRST_CELL, ask, HF_HOME=str(session.content))


# ---- setup(), and what it does not do outside Colab ----------------------------------------------------------------


@pytest.fixture
def laptop(monkeypatch):
    monkeypatch.setenv("LABKIT_PROFILE", "laptop")
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    monkeypatch.setenv("PLOTLY_RENDERER", "json")
    return monkeypatch


def test_outside_colab_setup_prints_what_the_notebooks_setup_prints(laptop, capsys):
    notebooks.setup()
    colab.setup()
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == f"labkit {labkit.__version__}, profile laptop"


def test_outside_colab_drive_changes_nothing_and_says_so(laptop, capsys, tmp_path):
    laptop.chdir(tmp_path)
    colab.setup(drive=True)
    assert "without Google Drive" in capsys.readouterr().out
    assert os.path.samefile(os.getcwd(), tmp_path)


def test_outside_colab_a_missing_token_is_explained_for_this_machine(laptop):
    laptop.delenv("HF_TOKEN", raising=False)
    laptop.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(LabkitError, match="https://huggingface.co/google/gemma-2-9b.*hf auth login"):
        colab.token("google/gemma-2-9b")
    laptop.setattr("huggingface_hub.get_token", lambda: "hf_of_a_login")
    laptop.setenv("HF_TOKEN", "")  # undone after the test
    assert colab.token() == os.environ["HF_TOKEN"] == "hf_of_a_login"


def test_a_drive_that_is_refused_is_an_error_that_helps(laptop, tmp_path):
    def refuse(place):
        raise ValueError("mount failed")

    package = types.ModuleType("google.colab")
    package.drive = types.SimpleNamespace(mount=refuse)
    laptop.setitem(sys.modules, "google.colab", package)
    laptop.setattr(colab, "DRIVE", tmp_path / "drive")
    with pytest.raises(LabkitError, match="mount failed.*without drive=True"):
        colab.work_on_drive()


def test_what_was_loaded_before_pip_replaced_it_asks_for_a_restart(laptop):
    old = types.SimpleNamespace(__version__="5.24.1")
    laptop.setitem(sys.modules, "plotly", old)
    laptop.setattr(colab.metadata, "version", lambda name: "6.5.0")
    laptop.setattr(colab, "in_colab", lambda: True)
    laptop.setattr(colab, "_IMPORTED_EARLY", ("plotly",))
    with pytest.raises(LabkitError, match="plotly 6.5.0.*loaded 5.24.1.*Restart session"):
        colab.setup()


# ---- what pip would do to Colab's own packages ---------------------------------------------------------------------


def described(name, version, requires=(), extras=()):
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join(
        [*lines, *(f"Provides-Extra: {e}" for e in extras), *(f"Requires-Dist: {r}" for r in requires), ""]
    )


def pack(folder, name, version, requires=(), extras=()):
    """A wheel without contents: pip resolves by what it says of itself."""
    stem = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", described(name, version, requires, extras))
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture(scope="module")
def resolve(tmp_path_factory):
    """resolve("[colab]", ...) -> {package: version} that pip would install into Colab for labkit's wheel."""
    folder = tmp_path_factory.mktemp("colab")
    index, machine = folder / "index", folder / "machine"
    index.mkdir()
    for found in metadata.distributions():
        if canonicalize_name(found.metadata["Name"]) != DISTRIBUTION:
            pack(index, found.metadata["Name"], found.version, found.requires or ())
    project, extras = PYPROJECT["project"], PYPROJECT["project"]["optional-dependencies"]
    pack(index, "torch", "2.9.0")
    requires = project["dependencies"] + [f"{line} ; extra == '{e}'" for e, lines in extras.items() for line in lines]
    wheel = pack(folder, DISTRIBUTION, labkit.__version__, requires, extras)
    venv.create(machine, with_pip=False)
    python = machine / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    for name, version in COLAB.items():
        made = packages / f"{canonicalize_name(name).replace('-', '_')}-{version}.dist-info"
        made.mkdir()
        (made / "METADATA").write_text(described(name, version))

    def run(extra, *more):
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--dry-run", "--report", "-"]
        command += ["--no-index", "--find-links", index, f"{wheel}{extra}", *more]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PIP_CONFIG_FILE": os.devnull})
        if done.returncode:
            raise RuntimeError(done.stderr)
        report = json.loads(done.stdout[done.stdout.index("{") :])
        return {canonicalize_name(i["metadata"]["name"]): i["metadata"]["version"] for i in report["install"]}

    return run


needs_everything = pytest.mark.skipif(
    any(not list(metadata.distributions(name=name)) for name in ("bertviz", "gguf", "seqeval", "simplemma")),
    reason="the packages that labkit's extras ask for are not installed, so pip has nothing to resolve with",
)
KEEP = [f"{name}=={COLAB[name]}" for name in ("torch", "numpy")]
KERNEL = {
    "ipykernel",
    "ipython",
    "ipywidgets",
    "jupyter-client",
    "notebook",
    "pandas",
    "requests",
    "tornado",
    "traitlets",
}


@needs_everything
@pytest.mark.end_to_end
def test_pip_leaves_torch_numpy_and_colabs_kernel_alone(resolve):
    new = resolve("[colab]", *KEEP)
    assert {DISTRIBUTION, "jaxtyping", "bertviz", "gguf", "seqeval", "simplemma"} <= set(new)
    assert set(new) & {canonicalize_name(name) for name in COLAB} == {"plotly"}  # Colab's is older than labkit needs


@needs_everything
@pytest.mark.end_to_end
def test_the_extra_for_a_laptop_would_replace_colabs_kernel(resolve):
    """So that the test above is known to see it, and nobody puts viz back into the setup cell."""
    assert {"ipykernel", "ipywidgets"} <= KERNEL & set(resolve("[viz]", *KEEP))


@needs_everything
@pytest.mark.end_to_end
def test_pip_stops_rather_than_replace_a_torch_that_is_too_old(resolve):
    with pytest.raises(RuntimeError, match="ResolutionImpossible|conflict"):
        resolve("[colab]", "torch==2.9.0")


def test_colabs_listed_versions_are_new_enough_for_labkit():
    from packaging.requirements import Requirement

    needed = {canonicalize_name(r.name): r for r in map(Requirement, PYPROJECT["project"]["dependencies"])}
    there = {canonicalize_name(name): version for name, version in COLAB.items()}
    assert {"torch", "numpy", "transformers", "tokenizers", "huggingface-hub"} <= set(needed) & set(there)
    for name in set(needed) & set(there):
        assert needed[name].specifier.contains(there[name]), name


# ---- the heads of the notebooks ------------------------------------------------------------------------------------


@pytest.fixture
def heads():
    import importlib.util

    spec = importlib.util.spec_from_file_location("notebook_heads", ROOT / "scripts" / "notebook_heads.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["notebook_heads"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ADDRESS = "https://github.com/owner/name"


def notebook(prose="# Title\n\n**A question.**", setup=FIRST_CELL):
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": prose.splitlines(keepends=True)},
        {
            "cell_type": "code",
            "execution_count": 1,
            "id": "b",
            "metadata": {},
            "outputs": [{"name": "stdout", "output_type": "stream", "text": ["labkit 0.1.0, profile ci\n"]}],
            "source": setup.splitlines(keepends=True),
        },
        {"cell_type": "code", "execution_count": 2, "id": "c", "metadata": {}, "outputs": [], "source": "x = 'ä'"},
    ]
    made = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def test_committed_notebooks_have_the_heads_that_the_settings_ask_for():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/notebook_heads.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, f"run scripts/notebook_heads.py:\n{done.stdout}{done.stderr}"


def test_without_an_address_there_is_no_badge_and_labkit_comes_from_the_wheel(heads):
    assert heads.Heads.of({}) == heads.Heads("", "wheel") == heads.Heads.of({"repository": "", "colab-source": "wheel"})
    assert heads.head_of(ROOT / "notebooks/00_x.ipynb", heads.Heads()) == (FIRST_CELL, "")


def test_heads_are_written_once_and_nothing_else_changes(heads):
    old = notebook(setup="import labkit.notebooks\n\nlabkit.notebooks.setup()")
    set_ = heads.Heads.of({"repository": f"{ADDRESS}.git", "colab-source": "repository"})
    head = heads.head_of(ROOT / "notebooks" / "00_x.ipynb", set_)
    new = heads.with_head(old, *head)
    assert heads.with_head(new, *head) == new
    cells = json.loads(new)["cells"]
    prose, setup = "".join(cells[0]["source"]), "".join(cells[1]["source"])
    link = "https://colab.research.google.com/github/owner/name/blob/main/notebooks/00_x.ipynb"
    assert re.fullmatch(rf"# Title\n\n\[!\[[^\n]*\]\({re.escape(link)}\)\n\n\*\*A question\.\*\*", prose)
    assert "git+https://github.com/owner/name@main" in setup and notebooks.is_setup_cell(setup)
    cells[0]["source"], cells[1]["source"] = (json.loads(old)["cells"][i]["source"] for i in (0, 1))
    assert cells == json.loads(old)["cells"]
    assert heads.with_head(new, FIRST_CELL, "") == notebook()  # the address taken back: no trace of the badge


def test_a_badge_of_another_address_is_replaced(heads):
    first, second = (heads.Heads(each, "wheel").badge("notebooks/00_x.ipynb") for each in ("owner/name", "other/place"))
    prose = "# Title\n\nText."
    assert heads.with_badge(heads.with_badge(prose, first), second) == heads.with_badge(prose, second)
    assert heads.with_badge("# Title", first).count("colab-badge") == 1
    assert heads.with_badge(heads.with_badge("# Title", first), "") == "# Title"


def test_a_first_cell_that_is_no_setup_cell_is_left_to_the_rules_that_name_it(heads):
    assert heads.with_head(notebook(setup="import labkit"), FIRST_CELL, "") == notebook(setup="import labkit")


def test_a_file_that_would_be_rewritten_whole_is_refused(heads):
    with pytest.raises(ValueError, match="other lines would change"):
        heads.with_head(notebook(setup=first_cell("x")).replace(": ", ":  ", 1), FIRST_CELL, "")


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"repository": "https://example.org/owner/name"}, "OWNER/NAME"),
        ({"colab-source": "disk"}, "wheel, index, repository"),
        ({"colab-source": "repository"}, "repository is empty"),
    ],
)
def test_settings_that_make_no_sense_are_named(heads, table, problem):
    with pytest.raises(SystemExit, match=problem):
        heads.Heads.of(table)


def test_the_package_knows_nothing_of_the_address():
    address = PYPROJECT["tool"]["labkit"]["repository"] or "tool.labkit"
    assert not [file for file in (ROOT / "labkit").rglob("*.py") if address in file.read_text(encoding="utf-8")]


# ---- estimates, Binder, dev container ------------------------------------------------------------------------------


def test_every_notebook_of_the_tour_has_its_estimate_in_the_docs():
    table = re.findall(r"^\| `(\w+)` \|.*\| (none|[\d.]+) \| (\d+) \|$", (ROOT / "docs/colab.md").read_text(), re.M)
    assert [name for name, _, _ in table] == [path.stem for path in notebooks.list_notebooks()]
    assert all(room == "none" or float(room) < 15 for _, room, _ in table)


def test_binder_installs_what_exists():
    script = (ROOT / "binder" / "postBuild").read_text(encoding="utf-8")
    (extras,) = re.findall(r'-e "\.\[([\w,]+)\]"', script)
    assert set(extras.split(",")) <= set(PYPROJECT["project"]["optional-dependencies"])
    assert re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    for name in ("postBuild", "start"):
        if os.name != "nt":
            assert os.access(ROOT / "binder" / name, os.X_OK)
            subprocess.run(["bash", "-n", ROOT / "binder" / name], check=True)


def test_dev_container_is_set_up_by_a_target_of_the_makefile():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    target = container["postCreateCommand"].removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
