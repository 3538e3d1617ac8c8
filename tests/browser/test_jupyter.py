"""A student's way through widgets, views and boxes in real JupyterLab and Jupyter Notebook, by mouse and keyboard, with
the network blocked: painted in the page, read in Python, and back; and notebooks of the tour as they were saved."""

import json
import re
import shutil
import time

import numpy as np
import pytest

from labkit import masks
from tests.browser.servers import ROOT, Notebook, jupyter, write_notebook
from tests.browser.stand_in import paint
from tests.browser.test_figures import SHOWS

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
BOXES = [
    "from labkit.learner import predict",
    'predict("Is 1 < 2?", choices=["yes", "no"], answer="yes", why="Because 2 - 1 > 0.")',
    'predict("Is 2 > 1?", choices=["yes", "no"], answer="yes")',
    'predict("How many?", answer="Three.", why="Count them.")',
]
TOUR = {"01_attention_and_masks": ".labkit-playground", "08_attention_maps": ".labkit-explorer"}  # with its widget
IN_LAB = pytest.mark.parametrize("front_end", ["lab"], indirect=True)


@pytest.fixture(scope="module", params=["lab", "notebook"])
def front_end(request, tmp_path_factory):
    """JupyterLab and Jupyter Notebook, each on a folder with the notebooks of these tests."""
    pytest.importorskip({"lab": "jupyterlab", "notebook": "notebook"}[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    for name, cells in {"student": STUDENT, "views": VIEWS, "boxes": BOXES}.items():
        write_notebook(folder / "notebooks" / f"{name}.ipynb", *cells)
    for name in TOUR:
        shutil.copy(ROOT / "notebooks" / f"{name}.ipynb", folder / "notebooks")
    with jupyter(request.param, folder) as started:
        yield started


@pytest.fixture
def open_notebook(open_page, front_end):
    """open_notebook(name): a page of Jupyter with this notebook; at the end, no cell has written to standard error."""
    opened = []

    def open_notebook(name):
        opened.append(Notebook(open_page(1400, 1400), front_end, f"{name}.ipynb"))
        return opened[-1].page, opened[-1]

    yield open_notebook
    assert [notebook.complaints() for notebook in opened] == [[]] * len(opened)
    for notebook in opened:
        notebook.page.goto("about:blank")  # before its server is stopped


def test_a_student_paints_the_mask_and_the_model_follows(open_notebook, front_end):
    page, notebook = open_notebook("student")
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
    cells = np.tril(np.ones((6, 6), bool)) | (np.arange(6) < 2)
    cells[:4, 5] = True
    notebook.run_until(1, repr(masks.from_dense(cells)))
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
    paint(page, (last, 0), (last, last - 1))  # the last token may now attend to itself alone
    _, under = eventually(page, lambda usual, under: usual != under)
    notebook.run_until(4, json.dumps(under))
    page.locator(".pg-verdict[data-agrees=true]").wait_for()
    page.shoot(f"{front_end.app}_model")

    notebook.save()
    assert (front_end.folder / "student.ipynb").stat().st_size < SAVED_AT_MOST


@IN_LAB
def test_views_and_figures_are_drawn_without_a_network(open_notebook, front_end):
    page, notebook = open_notebook("views")
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


@IN_LAB
def test_the_answer_of_a_box_comes_after_the_choice_and_after_the_text(open_notebook):
    page, notebook = open_notebook("boxes")
    for cell in range(4):
        notebook.run(cell)
    first, second, third = (page.locator(".labkit-box").nth(box) for box in range(3))
    status = [box.get_by_role("status") for box in (first, second, third)]
    assert not any(word in box.inner_text() for box in (first, third) for word in ("Because", "Three", "Count"))

    first.get_by_role("button", name="no").focus()
    page.keyboard.press("Enter")  # which JupyterLab must not take for a shortcut
    assert status[0].inner_text().split("\n\n") == ["✗ Not right. The answer: yes", "Because 2 - 1 > 0."]
    first.get_by_role("button", name="yes").click(force=True)  # the choice stays
    assert "Not right" in status[0].inner_text()
    second.get_by_role("button", name="yes").click()
    assert status[1].inner_text().startswith("✓ Right.")

    written, show = third.get_by_label("How many?"), third.get_by_role("button", name="Show the answer")
    assert show.is_disabled()
    written.click()
    page.keyboard.type("a dozen, dd")  # letters that are shortcuts outside of a text
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert re.split(r"\s*\n\s*", status[2].inner_text()) == ["Three.", "Count them."]
    assert written.input_value() == "a dozen, dd"
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == 4  # "dd" has deleted no cell
    page.shoot("learner_lab")

    notebook.save()
    notebook.open()  # again, without running a cell
    first.get_by_role("button", name="yes").click()
    assert status[0].inner_text().startswith("✓ Right.")
    assert page.get_by_text("Error displaying").count() == 0


@IN_LAB
@pytest.mark.parametrize("name", TOUR)
def test_a_saved_notebook_shows_its_widgets_and_sliders_before_anything_is_run(open_notebook, name):
    page, notebook = open_notebook(name)
    page.locator(TOUR[name]).first.scroll_into_view_if_needed()
    canvas = page.locator(f"{TOUR[name]} canvas").first
    canvas.wait_for()
    page.shoot(f"saved_{name}", full_page=False)
    drawn = "canvas => new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size"
    assert canvas.evaluate(drawn) > 2  # more than one colour: a picture, not an empty square
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for index in [
        i for i, source in enumerate(sources) if "masks.sliding_window" in source and "viz.slider(" in source
    ]:
        cell = notebook.cell(index)
        cell.scroll_into_view_if_needed()  # JupyterLab draws a cell only once it is near the screen
        # JupyterLab shows the PNG until the mouse is on it.
        cell.locator(".jp-OutputArea-output").hover(position={"x": 100, "y": 200})
        plot, rail = cell.locator(".js-plotly-plot"), cell.locator(".slider-rail-touch-rect")
        for width in (5, 1):
            x = max(1, rail.bounding_box()["width"] * (width - 1) / 5 - 1)
            rail.click(position={"x": x, "y": 2})
            plot.get_by_text(f"width of the window: {width}", exact=True).wait_for()
            grid = masks.sliding_window(width).dense(6).int().tolist()
            page.wait_for_function(SHOWS, arg=[plot.element_handle(), grid])


def eventually(page, holds, seconds: float = 15) -> list[list[str]]:
    """The model's five most likely words, as it is and under the mask on show, once they are so."""
    end = time.monotonic() + seconds
    while True:
        columns = [page.locator(".pg-column").nth(i).locator(".pg-token").all_inner_texts() for i in (0, 1)]
        usual, under = words = [[text.strip("␣ ") for text in column] for column in columns]
        if page.locator(".pg-status").inner_text().startswith("answered in") and holds(usual, under):
            return words
        assert time.monotonic() < end, words
        page.wait_for_timeout(100)
