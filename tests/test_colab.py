"""A simulated Colab: stand-ins for google.colab and the GPU, a pip that only notes what it is asked for, no network."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import plotly.io
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import labkit
from labkit import colab, notebooks
from labkit.errors import LabkitError
from labkit.notebooks import DISTRIBUTION, FIRST_CELL, first_cell

ROOT = Path(__file__).resolve().parent.parent
INDEX = f"{DISTRIBUTION}[colab]"
WHEEL = f"labkit_bidirectional-{labkit.__version__}-py3-none-any.whl"
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
    (tmp_path / WHEEL).touch()
    version, find_spec = metadata.version, importlib.util.find_spec
    installed = {"torch": "2.11.0+cu128", "numpy": "2.0.2"}
    monkeypatch.setattr(metadata, "version", lambda name: installed.get(name) or version(name))
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


@pytest.mark.parametrize(
    ("cell", "requirement", "gpu"), [(FIRST_CELL, f"{WHEEL}[colab]", False), (first_cell(INDEX), INDEX, True)]
)
def test_the_setup_cell_run_twice_installs_once_and_prints_twice_what_it_runs_on(session, cell, requirement, gpu):
    show = "import os; print(os.environ.get('LABKIT_PROFILE'), os.environ['PLOTLY_RENDERER'])"
    printed, requests = session(cell, cell, show, gpu=gpu)
    line = WITH_GPU if gpu else WITHOUT
    assert printed == ["widgets on", line, "widgets on", line, f"{None if gpu else 'laptop'} colab"]
    assert requests == [f'install -q "{requirement}" torch==2.11.0+cu128 numpy==2.0.2']


def test_without_the_wheel_the_cell_says_what_to_upload(session):
    Path(WHEEL).unlink()
    with pytest.raises(AssertionError, match="Upload labkit's wheel"):
        session(FIRST_CELL)


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
