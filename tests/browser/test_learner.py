"""The boxes for predictions in an exported page and in JupyterLab, in a real browser with the network blocked."""

import json
from pathlib import Path

import nbformat
import pytest
from ipywidgets import embed
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labkit import pages
from labkit.learner import explain, predict, record, watching
from labkit.pages.page import WIDGET_STATE
from tests.browser.servers import Notebook, jupyter

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A page with a prediction, a folded result, and the explanation."""
    folder = tmp_path_factory.mktemp("boxes")
    boxes = [predict("00-padding", "Who notices now?"), explain("00-padding")]
    outputs = [new_output("display_data", box._repr_mimebundle_()[0]) for box in boxes]
    cells = [new_code_cell("box", execution_count=1, outputs=[output]) for output in outputs]
    result = new_code_cell("noticed", execution_count=1, outputs=[new_output("stream", text="only the new word")])
    result.metadata["jupyter"] = {"outputs_hidden": True}
    state = embed.embed_data(boxes, drop_defaults=False)["manager_state"]
    notebook = new_notebook(cells=[cells[0], result, cells[1]], metadata={"widgets": {WIDGET_STATE: state}})
    nbformat.write(notebook, folder / "boxes.ipynb")
    return pages.export([folder / "boxes.ipynb"], folder)[0].path


@pytest.mark.parametrize("width", [1280, 390])
def test_what_is_predicted_stays_in_the_browser_and_the_result_is_folded(open_page, exported, width):
    page = open_page(width=width)
    page.goto(exported.as_uri())
    prediction, explanation = page.get_by_label("Who notices now?"), page.get_by_label("Were you right?")
    result = page.get_by_text("only the new word")
    assert not result.is_visible()
    assert page.get_by_text("You have written no prediction for this.").is_visible()
    prediction.fill("Nobody.")
    assert page.get_by_text("You predicted: Nobody.").is_visible()
    assert page.get_by_role("status").first.inner_text() == "Kept in this browser only."
    page.get_by_text("The result").click()
    assert result.is_visible()
    explanation.fill("One padded row does it.")
    page.shoot(f"learner_page_{width}")
    page.reload()
    assert page.get_by_label("Who notices now?").input_value() == "Nobody."
    assert page.get_by_label("Were you right?").input_value() == "One padded row does it."
    page.get_by_label("Who notices now?").fill("")
    page.reload()
    assert page.get_by_text("You have written no prediction for this.").is_visible()


def test_in_jupyterlab_a_prediction_is_kept_shown_again_and_counted(open_page, tmp_path, monkeypatch):
    kept = tmp_path / "progress.json"
    monkeypatch.setenv(record.VARIABLE, str(kept))
    sources = [
        "import labkit.colab\n\nlabkit.colab.setup()",
        "from labkit.learner import explain, predict",
        'predict("00-padding", "Who notices now?")',
        'print("only the new word")',
        'explain("00-padding")',
    ]
    cells = [new_code_cell(source) for source in sources]
    cells[3].outputs = [new_output("stream", text="saved before")]
    cells[3].metadata["jupyter"] = {"outputs_hidden": True}
    cells[3].id = list(watching.code_cells()["00_start_here"])[4]  # a cell of the tour, changed by the reader
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    (tmp_path / "notebooks").mkdir()
    nbformat.write(new_notebook(cells=cells, metadata=python), tmp_path / "notebooks" / "00_start_here.ipynb")
    with jupyter("lab", tmp_path) as lab:
        page = open_page(1280, 1000)
        notebook = Notebook(page, lab, "00_start_here.ipynb")
        for cell in range(3):
            notebook.run(cell)
        page.get_by_label("Who notices now?").wait_for()
        assert not page.get_by_text("saved before").is_visible()  # folded, and without its first line
        page.shoot("learner_lab_folded")
        page.get_by_label("Who notices now?").fill("Nobody.")
        page.keyboard.press("Tab")
        page.get_by_text("Kept on this machine only").wait_for()
        assert json.loads(kept.read_text())["boxes"]["00-padding"]["prediction"] == "Nobody."
        assert "only the new word" in notebook.run(3)
        assert page.get_by_text("only the new word", exact=True).is_visible()  # run, it unfolds
        notebook.run(4)
        page.get_by_text("You predicted: Nobody.").wait_for()
        page.shoot("learner_lab")
        assert json.loads(kept.read_text())["cells"] == {"00_start_here": [cells[3].id]}
        assert notebook.complaints() == []
        page.goto("about:blank")  # before its server is stopped


def test_in_jupyterlab_a_saved_box_that_no_python_hears_says_so(open_page, tmp_path, monkeypatch):
    kept = tmp_path / "progress.json"
    monkeypatch.setenv(record.VARIABLE, str(kept))
    box = predict("00-padding", "Who notices now?")
    cell = new_code_cell("box", execution_count=1, outputs=[new_output("display_data", box._repr_mimebundle_()[0])])
    state = embed.embed_data([box], drop_defaults=False)["manager_state"]
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    (tmp_path / "notebooks").mkdir()
    saved = new_notebook(cells=[cell], metadata=python | {"widgets": {WIDGET_STATE: state}})
    nbformat.write(saved, tmp_path / "notebooks" / "00_start_here.ipynb")
    with jupyter("lab", tmp_path) as lab:
        page = open_page(1280, 1000)
        prediction = page.get_by_label("Who notices now?")
        Notebook(page, lab, "00_start_here.ipynb").wait_for_saved(prediction)
        prediction.fill("Nobody.")
        page.keyboard.press("Tab")
        note = page.locator(".labkit-note", has_text="Not kept")
        note.wait_for()
        assert note.inner_text() == "Not kept: no Python listens. Run this cell, then write."
        assert not kept.exists()  # the box says the truth
        page.goto("about:blank")
