"""Copying loses nobody's work; running says where it failed; setting up is safe to repeat."""

import json
import os
import sys
import types

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import notebooks, resources
from labkit.errors import LabkitError, NotebookError

pytestmark = pytest.mark.end_to_end


def write(path, *cells):
    """A notebook of code cells; a (source, tag) pair is a tagged one."""
    made = [new_markdown_cell("# Title")]
    for cell in cells:
        source, tags = (cell, []) if isinstance(cell, str) else (cell[0], [cell[1]])
        made.append(new_code_cell(source, metadata={"tags": tags}))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=made, metadata={"kernelspec": kernel}), path)
    return path


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A small installation: two notebooks out of order, an assignment, a stray checkpoint."""
    folder = tmp_path / "an installation" / "notebooks"
    write(folder / "01_second.ipynb", "print('two')")
    write(folder / "00_first.ipynb", "print('one')")
    write(folder / "assignments" / "a1.ipynb", "print('homework')")
    write(folder / ".ipynb_checkpoints" / "00_first-checkpoint.ipynb", "print('old')")
    (folder / "README.md").write_text("hello")
    monkeypatch.setattr(resources, "folder", lambda name: folder)
    return folder


# ---- list and copy -------------------------------------------------------------------------------------------------


def test_tour_is_listed_in_order_without_assignments_and_checkpoints(shipped):
    assert [p.name for p in notebooks.list_notebooks()] == ["00_first.ipynb", "01_second.ipynb"]


def test_copy_brings_everything_but_checkpoints(shipped, tmp_path):
    written = notebooks.copy(tmp_path / "mine")
    expected = {"00_first.ipynb", "01_second.ipynb", "assignments/a1.ipynb".replace("/", os.sep), "README.md"}
    assert set(contents(tmp_path / "mine")) == expected
    assert len(written) == 4
    assert (tmp_path / "mine/00_first.ipynb").read_bytes() == (shipped / "00_first.ipynb").read_bytes()


def test_copying_again_writes_nothing(shipped, tmp_path):
    notebooks.copy(tmp_path / "mine")
    assert notebooks.copy(tmp_path / "mine") == []


def test_changed_file_stops_the_copy_before_anything_is_written(shipped, tmp_path):
    mine = tmp_path / "mine"
    notebooks.copy(mine)
    (mine / "01_second.ipynb").write_text("my work")
    (mine / "00_first.ipynb").unlink()  # would be copied again, if the copy went ahead
    (mine / "thesis.txt").write_text("my other work")
    before = contents(mine)
    with pytest.raises(NotebookError, match="01_second.ipynb.*force"):
        notebooks.copy(mine)
    assert contents(mine) == before


def test_force_replaces_the_changed_file_and_nothing_else(shipped, tmp_path):
    mine = tmp_path / "mine"
    notebooks.copy(mine)
    (mine / "01_second.ipynb").write_text("my work")
    (mine / "thesis.txt").write_text("my other work")
    assert [p.name for p in notebooks.copy(mine, force=True)] == ["01_second.ipynb"]
    assert (mine / "01_second.ipynb").read_bytes() == (shipped / "01_second.ipynb").read_bytes()
    assert (mine / "thesis.txt").read_text() == "my other work"


def test_disk_that_fills_up_halfway_leaves_the_folder_as_it_was(shipped, tmp_path, full_disk):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("my work")
    size = max(len(content) for content in contents(shipped).values())
    with full_disk(after=size - 1), pytest.raises(OSError, match="mine"):
        notebooks.copy(mine)
    assert contents(mine) == {"thesis.txt": b"my work"}


@pytest.mark.parametrize("force", [False, True])
def test_folder_in_the_place_of_a_notebook_is_never_removed(shipped, tmp_path, force):
    (tmp_path / "mine/00_first.ipynb").mkdir(parents=True)
    with pytest.raises(NotebookError, match="00_first.ipynb"):
        notebooks.copy(tmp_path / "mine", force=force)
    assert contents(tmp_path / "mine") == {}


def test_destination_that_is_a_file_is_refused(shipped, tmp_path):
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(NotebookError, match="is a file"):
        notebooks.copy(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "a file"


# ---- run -----------------------------------------------------------------------------------------------------------


def test_run_executes_the_tour_in_this_python_in_the_notebooks_folder_under_the_profile(shipped, tmp_path, capsys):
    write(
        shipped / "00_first.ipynb",
        "import os, sys; print(sys.executable); print(os.getcwd()); print(os.environ['LABKIT_PROFILE'])",
        ("raise SystemError('left out')", "nbval-skip"),
        ("1 / 0", "raises-exception"),
    )
    results = notebooks.run(output_dir=tmp_path / "out", profile="gpu")
    assert [(r.path.name, r.cells) for r in results] == [("00_first.ipynb", 2), ("01_second.ipynb", 1)]
    executed = nbformat.read(tmp_path / "out/00_first.ipynb", as_version=4)
    python, folder, profile = executed.cells[1].outputs[0].text.split("\n")[:3]
    assert os.path.realpath(python) == os.path.realpath(sys.executable)
    assert os.path.samefile(folder, shipped)
    assert profile == "gpu"
    assert executed.cells[2].execution_count is None
    assert executed.metadata.kernelspec.name == "python3"
    progress = capsys.readouterr()
    assert "[1/2] 00_first.ipynb" in progress.err and "[2/2] 01_second.ipynb" in progress.err
    assert progress.out == ""


def test_run_without_output_dir_leaves_no_trace(shipped):
    before = contents(shipped)
    (result,) = notebooks.run(["01_second"])
    assert (result.cells, result.output) == (1, None)
    assert contents(shipped) == before


@pytest.mark.parametrize("source", ["print('well')", "1 / 0"])
def test_no_kernel_is_left_running(shipped, source):
    import psutil

    write(shipped / "00_first.ipynb", source)
    before = set(psutil.Process().children(recursive=True))
    try:
        notebooks.run(["00_first"])
    except NotebookError:
        pass
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_executed_again_the_file_is_the_same(shipped, tmp_path):
    once = notebooks.run(["00_first"], output_dir=tmp_path / "a")[0].output
    twice = notebooks.run([once], output_dir=tmp_path / "b")[0].output
    assert twice.read_bytes() == once.read_bytes()


def test_failure_names_notebook_cell_and_exception_and_stops_there(shipped, tmp_path):
    write(shipped / "00_first.ipynb", "x = 1", "raise ValueError('a wrong mask')\nx = 2", "x = 3")
    with pytest.raises(NotebookError) as caught:
        notebooks.run(output_dir=tmp_path / "out")
    message = str(caught.value)
    assert all(part in message for part in ("00_first.ipynb", "cell 3", "ValueError: a wrong mask"))
    assert "\n" not in message
    assert not (tmp_path / "out").exists()


def test_cell_that_takes_too_long_is_named(shipped):
    write(shipped / "00_first.ipynb", "import time", "time.sleep(60)")
    with pytest.raises(NotebookError, match=r"00_first.ipynb, cell 3 .*TimeoutError"):
        notebooks.run(["00_first"], timeout=2)


def test_kernel_that_dies_is_named(shipped):
    write(shipped / "00_first.ipynb", "import os; os._exit(1)")
    with pytest.raises(NotebookError, match=r"00_first.ipynb, cell 2 .*kernel died"):
        notebooks.run(["00_first"])


def test_unknown_notebook_lists_the_known_ones(shipped):
    with pytest.raises(NotebookError, match="09_missing.*00_first, 01_second"):
        notebooks.run(["09_missing"])


def test_unknown_profile_is_refused_before_a_kernel_starts(shipped, monkeypatch):
    monkeypatch.setattr(notebooks, "_execute", lambda *_: pytest.fail("a notebook was executed"))
    with pytest.raises(LabkitError, match="laptop"):
        notebooks.run(profile="desktop")


def test_file_that_is_no_notebook_is_a_clear_error(shipped, tmp_path):
    (tmp_path / "broken.ipynb").write_text("{")
    with pytest.raises(NotebookError, match=r"broken.ipynb cannot be read"):
        notebooks.run([tmp_path / "broken.ipynb"])


# ---- setup and the first cell; the cell in Colab: test_colab.py ---------------------------------------------------


@pytest.fixture
def laptop(monkeypatch):
    monkeypatch.setenv("LABKIT_PROFILE", "laptop")
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.setenv("PLOTLY_RENDERER", "")  # so that what setup() sets is undone after the test
    monkeypatch.delenv("PLOTLY_RENDERER")
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    return monkeypatch


@pytest.fixture
def colab(laptop):
    """A stand-in for Colab's own package; `.calls` notes what was asked of it."""
    package = types.ModuleType("google.colab")
    calls = []
    package.output = types.SimpleNamespace(enable_custom_widget_manager=lambda: calls.append("widgets"))
    package.calls = calls
    laptop.setitem(sys.modules, "google", types.ModuleType("google"))
    laptop.setitem(sys.modules, "google.colab", package)
    return package


def test_setup_gives_one_line_with_version_and_profile_however_often(laptop):
    import labkit

    assert notebooks.make_ready() == notebooks.make_ready() == f"labkit {labkit.__version__}, profile laptop"


def test_setup_makes_plotly_send_data_not_scripts_whether_imported_before_or_after(laptop):
    import plotly.io

    laptop.setattr(plotly.io.renderers, "default", "browser")
    notebooks.make_ready()
    assert plotly.io.renderers.default == "plotly_mimetype"
    assert os.environ["PLOTLY_RENDERER"] == "plotly_mimetype"


def test_setup_respects_a_renderer_the_user_has_set(laptop):
    laptop.setenv("PLOTLY_RENDERER", "json")
    notebooks.make_ready()
    assert os.environ["PLOTLY_RENDERER"] == "json"


def test_setup_in_colab_turns_widgets_and_colabs_renderer_on(colab):
    notebooks.make_ready()
    assert colab.calls == ["widgets"]
    assert os.environ["PLOTLY_RENDERER"] == "colab"


def test_setup_refuses_a_package_older_than_labkit_needs_with_the_cure(laptop):
    needs = ["transformers>=5.2", "nbval>=0.11; extra == 'dev'", "absent>=1; python_version < '3'"]
    laptop.setattr(notebooks.metadata, "requires", lambda name: needs)
    laptop.setattr(notebooks.metadata, "version", lambda name: "4.57.1")
    with pytest.raises(
        LabkitError, match=r"transformers: found 4.57.1, needed >=5.2.*%pip install 'transformers>=5.2'"
    ):
        notebooks.make_ready()


def test_first_cell_runs_in_a_real_kernel_and_prints_the_one_line(tmp_path):
    path = write(tmp_path / "10_own.ipynb", notebooks.FIRST_CELL)
    (result,) = notebooks.run([path], output_dir=tmp_path / "out", profile="ci")
    (output,) = json.loads(result.output.read_text())["cells"][1]["outputs"]
    assert output["name"] == "stdout"
    assert "".join(output["text"]).strip().endswith("profile ci")


# ---- resources -----------------------------------------------------------------------------------------------------


def test_packed_folder_is_found_in_an_installed_wheel(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "labkit"
    (package / "_notebooks").mkdir(parents=True)
    monkeypatch.setattr(resources, "files", lambda name: package)
    assert resources.folder("notebooks") == package / "_notebooks"
    with pytest.raises(LabkitError, match="installation is incomplete"):
        resources.folder("data")


def test_stranger_beside_an_installed_wheel_is_not_taken_for_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "labkit"
    package.mkdir(parents=True)
    (tmp_path / "site-packages" / "data").mkdir()
    monkeypatch.setattr(resources, "files", lambda name: package)
    with pytest.raises(LabkitError, match="installation is incomplete"):
        resources.folder("data")


def test_unknown_folder_is_refused_with_the_choices():
    with pytest.raises(LabkitError, match="'weights'.*data, notebooks"):
        resources.folder("weights")
