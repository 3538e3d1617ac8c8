"""Copying overwrites no work; a run reports where it failed; the shipped folders are found."""

import os
import sys

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import files, notebooks
from labkit.errors import DataError, LabkitError

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
    monkeypatch.setattr(files, "folder", lambda name: folder)
    return folder


# ---- list and copy -------------------------------------------------------------------------------------------------


def test_copy_brings_everything_but_checkpoints_and_overwrites_work_only_when_forced(shipped, tmp_path):
    mine = tmp_path / "mine"
    assert [p.name for p in notebooks.list_notebooks()] == ["00_first.ipynb", "01_second.ipynb"]
    written = notebooks.copy(mine)
    expected = {name: content for name, content in contents(shipped).items() if "checkpoint" not in name}
    assert contents(mine) == expected and len(written) == len(expected) == 3
    assert notebooks.copy(mine) == []
    (mine / "01_second.ipynb").write_text("my work")
    (mine / "00_first.ipynb").unlink()  # would be copied again, if the copy went ahead
    (mine / "thesis.txt").write_text("my other work")
    before = contents(mine)
    with pytest.raises(DataError, match="01_second.ipynb.*force"):
        notebooks.copy(mine)
    assert contents(mine) == before
    assert [p.name for p in notebooks.copy(mine, force=True)] == ["00_first.ipynb", "01_second.ipynb"]
    assert contents(mine) == expected | {"thesis.txt": b"my other work"}


@pytest.mark.parametrize("force", [False, True])
def test_what_is_in_the_place_of_a_file_or_folder_is_never_removed(shipped, tmp_path, force):
    (tmp_path / "mine/00_first.ipynb").mkdir(parents=True)
    with pytest.raises(DataError, match="00_first.ipynb"):
        notebooks.copy(tmp_path / "mine", force=force)
    assert contents(tmp_path / "mine") == {}
    (tmp_path / "file").write_text("a file")
    with pytest.raises(DataError, match="is a file"):
        notebooks.copy(tmp_path / "file", force=force)


# ---- run -----------------------------------------------------------------------------------------------------------


def test_run_executes_the_tour_in_this_python_in_the_notebooks_folder_under_the_profile(shipped, tmp_path, capsys):
    write(
        shipped / "00_first.ipynb",
        "import os, sys; print(sys.executable); print(os.getcwd()); print(os.environ['LABKIT_PROFILE'])",
        ("raise SystemError('left out')", "nbval-skip"),
        ("1 / 0", "raises-exception"),
        notebooks.FIRST_CELL,
    )
    before, running = contents(shipped), set(psutil.Process().children(recursive=True))
    results = notebooks.run(output_dir=tmp_path / "out", profile="gpu")
    assert [(r.path.name, r.cells) for r in results] == [("00_first.ipynb", 3), ("01_second.ipynb", 1)]
    executed = nbformat.read(tmp_path / "out/00_first.ipynb", as_version=4)
    python, folder, profile = executed.cells[1].outputs[0].text.split("\n")[:3]
    assert os.path.realpath(python) == os.path.realpath(sys.executable)
    assert os.path.samefile(folder, shipped)
    assert profile == "gpu" and executed.cells[4].outputs[0].text.strip().endswith("profile gpu")
    assert executed.cells[2].execution_count is None
    assert executed.metadata.kernelspec.name == "python3"
    progress = capsys.readouterr()
    assert "[1/2] 00_first.ipynb" in progress.err and "[2/2] 01_second.ipynb" in progress.err
    assert progress.out == "" and contents(shipped) == before
    left = set(psutil.Process().children(recursive=True)) - running
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    once = results[1].output  # executed again, the file is the same
    assert notebooks.run([once], output_dir=tmp_path / "again")[0].output.read_bytes() == once.read_bytes()


@pytest.mark.parametrize(
    ("cells", "cause"),
    [
        (["x = 1", "raise ValueError('a wrong mask')\nx = 2", "x = 3"], "cell 3 .*ValueError: a wrong mask"),
        (["import time", "time.sleep(60)"], "cell 3 .*TimeoutError"),
        (["import os; os._exit(1)"], "cell 2 .*kernel died"),
    ],
)
def test_a_failure_names_notebook_cell_and_exception_and_stops_there(shipped, tmp_path, cells, cause):
    write(shipped / "00_first.ipynb", *cells)
    with pytest.raises(LabkitError, match=f"00_first.ipynb, {cause}") as raised:
        notebooks.run(output_dir=tmp_path / "out", timeout=5)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("paths", "profile", "problem"),
    [
        (["09_missing"], None, "09_missing.*00_first, 01_second"),
        (["{folder}"], None, "folder"),
        (["{broken}"], None, "broken.ipynb cannot be read"),
        (None, "desktop", "laptop"),
    ],
)
def test_bad_input_is_one_clear_error(shipped, tmp_path, paths, profile, problem):
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.ipynb").write_text("{")
    places = {"folder": tmp_path / "folder", "broken": tmp_path / "broken.ipynb"}
    with pytest.raises(LabkitError, match=problem):
        notebooks.run(paths and [path.format(**places) for path in paths], profile=profile)


def test_a_packed_folder_is_found_in_an_installed_wheel_and_no_other_folder_beside_it(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "labkit"
    (package / "_notebooks").mkdir(parents=True)
    (tmp_path / "site-packages" / "data").mkdir()  # of another package
    monkeypatch.setattr(files, "files", lambda name: package)
    assert files.folder("notebooks") == package / "_notebooks"
    with pytest.raises(LabkitError, match="installation is incomplete"):
        files.folder("data")
