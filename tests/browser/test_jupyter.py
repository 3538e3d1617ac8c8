"""A student's way through the widgets in real JupyterLab and Jupyter Notebook, by mouse and keyboard, with the network
blocked: painted in the page, read in Python, and back."""

import json
import re
import time

import numpy as np
import pytest

from labkit import masks
from tests.browser.servers import Notebook, jupyter, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

SAVED_AT_MOST = 300_000  # bytes, of a notebook with the playground and its last answers
STUDENT = [
    """import labkit
from labkit import masks, viz
playground = viz.playground("the cat sat on the mat")
playground""",
    "print(playground.mask)",
    "playground.mask = masks.hybrid(4)",
    "playground.attach(labkit.load('tiny-gpt2', device='cpu')); print('attached')",
    "import json; print(json.dumps([word.strip() for word, _ in playground.answer['after']['top']]))",
]
VIEWS = [
    """import labkit
from labkit import masks, viz
lm, text = labkit.load("gpt2-mini", device="cpu"), "The old man said that the king looked at sea."
viz.bertviz_head_view(lm, text, masks.bidirectional())""",
    "viz.bertviz_model_view(lm, text, layers=[0, 1])",
    "viz.bertviz_neuron_view(lm, text, masks.bidirectional(), layers=[0])",
    """explorer = labkit.explore_attention(lm, text)
explorer""",
    "print(explorer.layer, explorer.head, explorer.query, explorer.view)",
    "viz.mask_figure(masks.sliding_window(3).dense(10), text.split())",
]


@pytest.fixture(scope="module", params=["lab", "notebook"])
def front_end(request, tmp_path_factory):
    """JupyterLab and Jupyter Notebook, each on a folder with the notebooks of these tests."""
    pytest.importorskip({"lab": "jupyterlab", "notebook": "notebook"}[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    write_notebook(folder / "notebooks" / "student.ipynb", *STUDENT)
    write_notebook(folder / "notebooks" / "views.ipynb", *VIEWS)
    with jupyter(request.param, folder) as started:
        yield started


def test_a_student_paints_the_mask_and_the_model_follows(open_page, front_end):
    page = open_page(1400, 1500)
    notebook = Notebook(page, front_end, "student.ipynb")
    notebook.run(0)
    page.locator(".labkit-playground canvas").first.wait_for()

    # A slider, by mouse and by keyboard, is read back in Python ...
    page.get_by_role("combobox", name="mask A").select_option("prefix")
    slider = page.get_by_role("slider", name="prefix of A")
    where = slider.bounding_box()
    page.mouse.move(where["x"] + where["width"] / 2, where["y"] + where["height"] / 2)
    page.mouse.down()
    page.mouse.move(where["x"] + 2, where["y"] + where["height"] / 2, steps=6)
    page.mouse.up()
    for _ in range(2):
        slider.press("ArrowRight")
    notebook.run_until(1, "prefix(2)")
    # ... and so is what is painted, and what Python sets is shown.
    paint(page, (0, 5), (3, 5))
    seen = np.tril(np.ones((6, 6), bool)) | (np.arange(6) < 2)
    seen[:4, 5] = True
    notebook.run_until(1, repr(masks.from_dense(seen)))
    page.get_by_role("button", name=re.compile("^Clear")).click()
    notebook.run(2)
    page.get_by_text("masks.hybrid(4)", exact=True).wait_for()
    page.shoot(f"{front_end.app}_painted")

    # A model: its five most likely words under the mask that is in the page.
    assert "attached" in notebook.run(3)
    page.get_by_role("combobox", name="mask A").select_option("causal")
    eventually(page, lambda usual, under: usual == under != [])  # the mask that the model has anyway
    last = page.locator(".pg-chip").count() - 1
    page.get_by_label("which token").select_option(str(last))
    paint(page, (last, 0), (last, last - 1))  # the last token may now look at itself alone
    _, under = eventually(page, lambda usual, under: usual != under)
    notebook.run_until(4, json.dumps(under))
    page.locator(".pg-verdict[data-agrees=true]").wait_for()
    page.shoot(f"{front_end.app}_model")

    notebook.save()
    page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    saved = front_end.folder / "student.ipynb"
    assert saved.stat().st_size < SAVED_AT_MOST
    assert notebook.complaints() == []


def test_views_and_figures_are_drawn_without_a_network(open_page, front_end):
    page = open_page(1400, 1400)
    notebook = Notebook(page, front_end, "views.ipynb")
    for index, least in ((0, 100), (1, 500), (2, 100)):  # lines of attention
        notebook.run(index)
        drawn = notebook.cell(index).locator("[data-labkit-drawn] svg")
        drawn.first.wait_for()
        assert drawn.locator("line").count() > least
        page.shoot(f"{front_end.app}_view_{index}", full_page=False)

    notebook.run(3)
    explorer = notebook.cell(3).locator(".labkit-explorer")
    explorer.wait_for()
    explorer.get_by_role("slider", name="layer").press("ArrowRight")
    explorer.get_by_role("slider", name="head").press("ArrowRight")
    explorer.get_by_role("slider", name="head").press("ArrowRight")
    explorer.get_by_role("button", name="king", exact=True).click()
    explorer.get_by_role("radio", name="bidirectional").check()
    explorer.get_by_text("layer 1 head 2, bidirectional").wait_for()
    notebook.run_until(4, "1 2 6 after")
    page.shoot(f"{front_end.app}_explorer", full_page=False)

    notebook.run(5)
    notebook.cell(5).locator(".js-plotly-plot .heatmaplayer image").wait_for()
    page.shoot(f"{front_end.app}_figure", full_page=False)
    assert notebook.complaints() == []


def paint(page, start: tuple[int, int], end: tuple[int, int]) -> None:
    """Drag over the cells of the mask from one (query, key) to another."""
    grid = page.get_by_role("grid", name=re.compile("^attention mask"))
    grid.scroll_into_view_if_needed()
    box, n = grid.bounding_box(), page.locator(".pg-chip").count()
    at = [(box["x"] + (k + 0.5) * box["width"] / n, box["y"] + (q + 0.5) * box["height"] / n) for q, k in (start, end)]
    page.mouse.move(*at[0])
    page.mouse.down()
    page.mouse.move(*at[1], steps=4)
    page.mouse.up()


def eventually(page, holds, seconds: float = 15) -> list[list[str]]:
    """The model's five most likely words, as it is and under the mask on show, once they are so."""
    end = time.monotonic() + seconds
    while True:
        columns = [page.locator(".pg-column").nth(i).locator(".pg-token").all_inner_texts() for i in (0, 1)]
        usual, under = found = [[text.strip("␣ ") for text in column] for column in columns]
        if page.locator(".pg-status").inner_text().startswith("answered in") and holds(usual, under):
            return found
        assert time.monotonic() < end, found
        page.wait_for_timeout(100)
