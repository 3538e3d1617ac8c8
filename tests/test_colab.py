"""A simulated Colab: stand-ins for google.colab and the GPU, a pip that only notes what it is asked for, no network."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import plotly.io
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import labkit
from labkit import colab, notebooks
from labkit.errors import LabkitError
from labkit.notebooks import FIRST_CELL
from scripts.notebook_heads import head_of, with_head

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/owner/name"
WITH_GPU = f"labkit {labkit.__version__}, profile colab, Tesla T4 with 16 GB"
WITHOUT = f"labkit {labkit.__version__}, profile laptop, {colab.NO_GPU}"


# ---- the setup cell, in a session that takes itself for Colab ------------------------------------------------------


@pytest.fixture
def session(tmp_path, monkeypatch, capsys):
    """session(*cells, gpu=...) runs cells in a shell that takes itself for Colab: (printed lines, requests to pip)."""

    def mount(place):
        (Path(place) / "MyDrive").mkdir(parents=True)
        print("Mounted at", place)

    output = SimpleNamespace(enable_custom_widget_manager=lambda: print("widgets on"))
    google = ModuleType("google.colab")
    google.output, google.drive = output, SimpleNamespace(mount=mount)
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", google)
    monkeypatch.setattr(plotly.io.renderers, "default", "browser")
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    for name in ("LABKIT_PROFILE", "PLOTLY_RENDERER"):
        monkeypatch.setenv(name, "")  # so that it is as it was at the end of the test
    monkeypatch.chdir(tmp_path)
    find_spec = importlib.util.find_spec
    card = SimpleNamespace(name="Tesla T4", total_memory=15_828_320_256)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)

    def run(*cells, gpu=True):
        requests = []
        for name in ("LABKIT_PROFILE", "PLOTLY_RENDERER"):
            os.environ.pop(name, None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: find_spec(name) if name != "labkit" or requests else None
        )
        shell = InteractiveShell()
        shell.register_magic_function(requests.append, "line", "pip")
        capsys.readouterr()
        for cell in cells:
            shell.run_cell(cell).raise_error()
        return capsys.readouterr().out.splitlines(), requests

    return run


@pytest.mark.parametrize(("source", "gpu"), [(REPOSITORY, False), ("index", True)])
def test_the_setup_cell_run_twice_installs_once_and_prints_twice_what_it_runs_on(session, source, gpu):
    cell, _ = head_of(ROOT / "notebooks" / "00_start_here.ipynb", source)
    show = "import os; print(os.environ.get('LABKIT_PROFILE'), os.environ['PLOTLY_RENDERER'])"
    printed, requests = session(cell, cell, show, gpu=gpu)
    line = WITH_GPU if gpu else WITHOUT
    assert printed == ["widgets on", line, "widgets on", line, f"{None if gpu else 'laptop'} colab"]
    package = "labkit-bidirectional[colab]" + (f" @ git+{REPOSITORY}@main" if source == REPOSITORY else "")
    assert requests == [f'install -q "{package}"']


def test_without_the_setting_a_missing_labkit_is_an_error_that_says_what_to_read(session):
    with pytest.raises(ModuleNotFoundError, match=r"docs/colab\.md"):
        session(FIRST_CELL)
    assert (ROOT / "docs" / "colab.md").is_file()
    assert session("%pip install labkit", FIRST_CELL)[0][-1] == WITH_GPU  # as docs/colab.md advises


def test_files_on_drive_are_there_after_the_machine_was_lost(session, tmp_path, monkeypatch):
    drive = tmp_path / "drive"
    monkeypatch.setattr(colab, "DRIVE", drive)
    mount = "import labkit.colab; labkit.colab.setup(drive=True)"
    kept = f"{WITH_GPU}, files are kept in {drive / 'MyDrive' / 'labkit'}"
    printed, _ = session(mount, "import os; os.mkdir('runs')", mount)
    assert printed == ["widgets on", f"Mounted at {drive}", kept, "widgets on", kept]
    os.chdir(tmp_path)  # another machine, the same Drive
    printed, _ = session(mount, "import os; print(os.path.isdir('runs'))")
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
    words = r"transformers: found 4.57.1, needed >=5.2.*%pip install 'transformers>=5.2'"
    with pytest.raises(LabkitError, match=words):
        colab.setup()


# ---- the heads of the notebooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["00_start_here.ipynb", "assignments/student/a1_masks_and_attention.ipynb"])
def test_a_head_is_written_once_and_taken_back_without_a_trace(path):
    path = ROOT / "notebooks" / path
    bare = with_head(path.read_text(encoding="utf-8"), *head_of(path, ""))
    new = with_head(bare, *head_of(path, f"{REPOSITORY}.git"))
    assert with_head(new, *head_of(path, REPOSITORY)) == new != bare
    assert with_head(new, *head_of(path, "")) == bare
    changed = [a for a, b in zip(json.loads(new)["cells"], json.loads(bare)["cells"], strict=True) if a != b]
    prose, code = ("".join(cell["source"]) for cell in changed)
    place = path.relative_to(ROOT).as_posix()
    assert prose.count(f"https://colab.research.google.com/github/owner/name/blob/main/{place}") == 1
    assert notebooks.is_setup_cell(code) and "git+https://github.com/owner/name@main" in code


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
