"""The record of what a learner did, the boxes that write into it, the hook on the kernel, and `labkit progress`."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labkit import notebooks
from labkit.errors import LearnerError
from labkit.learner import explain, predict, record, summary, watching


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """The file of a learner who has done nothing yet."""
    path = tmp_path / "home" / "progress.json"
    monkeypatch.setenv(record.VARIABLE, str(path))
    return path


def labkit(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "labkit", *arguments], capture_output=True, text=True, **options)


# ------------------------------------------------------------------------------------------------------------ record
def test_what_is_written_is_there_again(kept):
    record.change(lambda it: it.wrote("00-padding", "prediction", "nobody\nnotices"))
    record.change(lambda it: it.ran("00_start_here", "s014"))
    record.change(lambda it: it.ran("00_start_here", "s014"))
    found = record.read()
    assert found.boxes["00-padding"]["prediction"] == "nobody\nnotices"
    assert found.boxes["00-padding"]["prediction_at"].startswith("20")
    assert found.cells == {"00_start_here": ["s014"]}
    assert [path.name for path in kept.parent.iterdir() if not path.name.endswith(".lock")] == ["progress.json"]


def test_an_emptied_box_is_forgotten(kept):
    record.change(lambda it: it.wrote("00-padding", "prediction", "nobody"))
    record.change(lambda it: it.wrote("00-padding", "prediction", "  "))
    assert record.read() == record.Record()


@pytest.mark.parametrize(("name", "profile"), [("off", "laptop"), ("", "ci")])
def test_nothing_is_kept_where_nobody_learns(name, profile, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv(record.VARIABLE, name)
    monkeypatch.setenv("LABKIT_PROFILE", profile)
    record.change(lambda it: it.ran("00_start_here", "s014"))
    assert record.place() is None
    assert not list(tmp_path.iterdir())


def test_by_default_the_users_data_folder_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv(record.VARIABLE, raising=False)
    monkeypatch.setenv("LABKIT_PROFILE", "laptop")
    assert record.place().name == "progress.json"
    if sys.platform == "linux":
        assert record.place() == tmp_path / "data" / "labkit" / "progress.json"


@pytest.mark.parametrize("content", ["{", "[]", '{"labkit_progress": 1}', '{"labkit_progress": 1, "cells": 3}'])
def test_a_file_that_is_none_of_ours_is_named_and_left_alone(kept, content):
    kept.parent.mkdir()
    kept.write_text(content)
    with pytest.raises(LearnerError, match="progress.json is (damaged|no record)"):
        record.change(lambda it: it.ran("00_start_here", "s014"))
    assert kept.read_text() == content


def _run_cells(path: str, numbers: range) -> None:
    import os

    os.environ[record.VARIABLE] = path
    for number in numbers:
        record.change(lambda it, number=number: it.ran("00_start_here", f"s{number}"))


@pytest.mark.end_to_end
def test_two_kernels_lose_nothing_of_each_other(kept):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_run_cells, args=(str(kept), range(a, a + 25))) for a in (0, 25)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert sorted(record.read().cells["00_start_here"]) == sorted(f"s{number}" for number in range(50))


def test_of_two_records_the_later_text_and_the_better_points_stay():
    mine, other = record.Record(), record.Record()
    mine.wrote("00-padding", "prediction", "older", at="2026-01-01T00:00:00+00:00")
    other.wrote("00-padding", "prediction", "newer", at="2026-01-02T00:00:00+00:00")
    mine.wrote("00-padding", "explanation", "kept", at="2026-01-03T00:00:00+00:00")
    other.wrote("00-padding", "explanation", "dropped", at="2026-01-02T00:00:00+00:00")
    mine.checked("a1_causal_mask", 2, 3)
    other.checked("a1_causal_mask", 1, 3)
    mine.merge(other)
    assert [mine.boxes["00-padding"][which] for which in record.TEXTS] == ["newer", "kept"]
    assert mine.exercises["a1_causal_mask"]["points"] == 2


# ------------------------------------------------------------------------------------------------------------- boxes
def test_a_prediction_is_shown_where_it_is_explained(kept):
    box = predict("00-padding", "Who notices now?")
    box.text = "Nobody, I think."
    again = explain("00-padding")
    assert again.prediction == "Nobody, I think."
    again.text = "The mask is built for the whole batch."
    assert predict("00-padding", "Who notices now?").text == "Nobody, I think."
    assert explain("00-padding").text == "The mask is built for the whole batch."
    assert "labkit progress" in box.kept


def test_a_box_that_cannot_keep_says_so_and_goes_on(kept):
    kept.parent.mkdir()
    kept.write_text("{")
    with pytest.warns(UserWarning, match="keeps no record") if not record._warned else _nothing():
        box = predict("00-padding", "Who notices now?")
        box.text = "Nobody."
    assert box.kept.startswith("Not kept: ") and "damaged" in box.kept


def _nothing():
    from contextlib import nullcontext

    return nullcontext()


def test_a_box_where_progress_is_off_says_so(monkeypatch):
    monkeypatch.setenv(record.VARIABLE, "off")
    box = predict("00-padding", "Who notices now?")
    box.text = "Nobody."
    assert box.kept == "Not kept: progress is switched off here."


@pytest.mark.parametrize("name", ["padding", "0-padding", "00_padding", "00-", "00-Padding", ""])
def test_a_name_without_its_notebook_is_refused(name):
    with pytest.raises(LearnerError, match="give the notebook's number"):
        predict(name, "Who notices now?")


def test_where_widgets_do_not_run_the_question_stands():
    bundle, _ = predict("00-padding", "Is 1 < 2?")._repr_mimebundle_()
    assert bundle["text/html"] == "<p><b>Predict.</b> Is 1 &lt; 2?</p>"
    assert bundle["text/plain"] == "Predict: Is 1 < 2?"


# ---------------------------------------------------------------------------------------------------------- watching
def test_a_cell_is_known_by_its_id_or_else_by_its_source():
    name, cells = next(iter(watching.code_cells().items()))
    cell, source = next(iter(cells.items()))
    assert watching.cell_of("edited by the reader", cell, name) == (name, cell)
    assert watching.cell_of("edited by the reader", cell, None) is None
    assert watching.cell_of(f"\n{source}\n", "an id of Colab's", None) == (name, cell)
    assert watching.cell_of("1 + 1", "s014", "my_own_notebook") is None


@pytest.mark.end_to_end
def test_a_kernel_keeps_the_cells_that_ran_to_their_end(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_PROFILE", "laptop")
    name, cells = next(iter(watching.code_cells().items()))
    good = next(cell for cell, source in cells.items() if source.startswith("import torch"))
    setup = "import labkit.colab\n\nlabkit.colab.setup()"
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(source) for source in (setup, "1 / 0", cells[good], "1 + 1")]
    book.cells[1].metadata.tags = ["raises-exception"]
    nbformat.write(book, tmp_path / f"{name}.ipynb")
    execute = (
        "import nbformat, nbclient; "
        f"nbclient.NotebookClient(nbformat.read('{tmp_path / name}.ipynb', 4), kernel_name='python3').execute()"
    )
    subprocess.run([sys.executable, "-c", execute], check=True)
    assert record.read().cells == {name: [good]}


@pytest.mark.end_to_end
def test_running_notebooks_without_a_reader_is_no_progress(kept, tmp_path):
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(source) for source in ("import labkit.colab\n\nlabkit.colab.setup()", "1")]
    nbformat.write(book, tmp_path / "00_start_here.ipynb")
    notebooks.run([tmp_path / "00_start_here.ipynb"])
    assert not kept.exists()


# ----------------------------------------------------------------------------------------------------------- summary
def test_a_notebook_is_as_far_as_its_cells_and_boxes():
    done = record.Record()
    name = next(name for name, boxes in summary.questions().items() if len(boxes) > 1)
    cells, boxes = watching.code_cells()[name], list(summary.questions()[name])
    for cell in list(cells)[:3]:
        done.ran(name, cell)
    done.ran(name, "a cell of an older version")
    done.wrote(boxes[0], "prediction", "a")
    done.wrote(boxes[0], "explanation", "b")
    done.wrote(boxes[1], "prediction", "c")
    found = next(each for each in summary.notebooks(done) if each.name == name)
    assert (found.cells_run, found.cells) == (3, len(cells))
    assert (found.predicted, found.explained, found.boxes) == (2, 1, len(boxes))
    assert found.share == pytest.approx(3 / len(cells))
    assert summary.going_on(summary.notebooks(done)) == found


def test_every_box_of_the_tour_is_asked_once_and_explained_once():
    stems = [path.stem for path in notebooks.list_notebooks()]
    boxes = {name: list(found) for name, found in summary.questions().items()}
    assert list(boxes) == stems
    for stem in stems:
        sources = list(watching.code_cells()[stem].values())
        asked = [name for source in sources for which, name, _ in summary.boxes_in(source) if which == "predict"]
        explained = [name for source in sources for which, name, _ in summary.boxes_in(source) if which == "explain"]
        assert len(asked) >= 2, stem
        assert asked == explained, stem
        assert len(set(asked)) == len(asked)
        assert all(name.startswith(f"{stem[:2]}-") for name in asked)


def test_between_a_prediction_and_its_explanation_a_result_is_folded():
    for path in notebooks.list_notebooks():
        cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        for number, cell in enumerate(cells):
            for which, name, _ in summary.boxes_in(cell.source):
                if which == "predict":
                    result = cells[number + 1]
                    assert result.metadata.get("jupyter", {}).get("outputs_hidden"), f"{path.name}, {name}: not folded"
                    assert result.outputs, f"{path.name}, {name}: no result"


def test_the_journal_tells_question_prediction_and_explanation():
    done = record.Record()
    name, boxes = next(iter(summary.questions().items()))
    box, question = next(iter(boxes.items()))
    done.wrote(box, "prediction", "two\nlines")
    done.checked("a1_causal_mask", 1, 2)
    text = summary.as_markdown(done)
    assert f"**{question}**\n\n- Predicted: two\n  lines\n- Explained: nothing" in text
    assert "A1 · " in text


# ------------------------------------------------------------------------------------------------------ command line
@pytest.mark.end_to_end
def test_progress_is_shown_exported_taken_over_and_cleared(kept, tmp_path):
    record.change(lambda it: it.ran("00_start_here", next(iter(watching.code_cells()["00_start_here"]))))
    record.change(lambda it: it.checked("a1_causal_mask", 2, 3))
    shown = labkit("progress")
    assert shown.returncode == 0, shown.stderr
    assert "00_start_here" in shown.stdout and "1 of " in shown.stdout and "Next: notebooks/00_start" in shown.stdout
    said = json.loads(labkit("progress", "--json").stdout)
    assert said["notebooks"][0]["cells_run"] == 1 and said["assignments"][0]["points"] == 2
    assert labkit("progress", "--export", "mine.json", cwd=tmp_path).returncode == 0
    assert labkit("progress", "--export", "mine.md", cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine.md").read_text().startswith("# What I predicted")
    assert labkit("progress", "--clear", "--yes").returncode == 0
    assert record.read() == record.Record()
    assert labkit("progress", "--import", "mine.json", cwd=tmp_path).returncode == 0
    assert record.read().exercises["a1_causal_mask"]["points"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--import", "nothing.json"], "is no file"),
        (["--export", "mine.txt"], "must end in .json"),
        (["--export", "mine.json", "--clear"], "one of --export, --import and --clear"),
        (["--yes"], "--yes answers the question of --clear"),
    ],
)
def test_bad_input_of_progress_gets_one_line(kept, tmp_path, arguments, said):
    done = labkit("progress", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not any(path.name.startswith("mine") for path in tmp_path.iterdir())


def test_clearing_asks_first(kept, tmp_path):
    record.change(lambda it: it.ran("00_start_here", "s014"))
    refused = labkit("progress", "--clear", input="n\n")
    assert refused.returncode == 2
    assert record.read().cells == {"00_start_here": ["s014"]}
