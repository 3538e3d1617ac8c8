"""Notebooks of the tour in JupyterLab, in a real browser, with the network blocked, as they were saved."""

import json
import shutil
from pathlib import Path

import pytest

from labkit import masks
from tests.browser.servers import Notebook, jupyter

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
GIVEN = ("01_attention_and_masks", "07_attention_maps")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on copies of the notebooks."""
    pytest.importorskip("jupyterlab")
    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").mkdir()
    for name in GIVEN:
        shutil.copy(NOTEBOOKS / f"{name}.ipynb", folder / "notebooks")
    with jupyter("lab", folder) as started:
        yield started


def test_a_slider_over_masks_redraws_them_without_a_kernel(open_page, lab):
    page = open_page(1280, 1000)
    notebook = Notebook(page, lab, "01_attention_and_masks.ipynb")
    cells = json.loads((NOTEBOOKS / "01_attention_and_masks.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    cell = notebook.cell(next(i for i, source in enumerate(code) if "viz.slider(" in source))
    cell.scroll_into_view_if_needed()  # JupyterLab draws a cell only once it is near the screen
    # JupyterLab shows the PNG until the mouse is on it.
    cell.locator(".jp-OutputArea-output").hover(position={"x": 100, "y": 200})
    plot = cell.locator(".js-plotly-plot")
    shows = """([plot, cells]) => {
        const drawn = plot.calcdata.find(([trace]) => trace.z)[0].z.map((row) => Array.from(row));
        return JSON.stringify(drawn) === JSON.stringify(cells);
    }"""
    rail = plot.locator(".slider-rail-touch-rect")
    for step in (5, 1):
        x = max(1, rail.bounding_box()["width"] * (step - 1) / 5 - 1)
        rail.click(position={"x": x, "y": 2})
        plot.get_by_text(f"width of the window: {step}", exact=True).wait_for()
        cells = masks.sliding_window(step).dense(6).int().tolist()
        page.wait_for_function(shows, arg=[plot.element_handle(), cells])
        page.shoot(f"slider_{step}", full_page=False)
    assert notebook.complaints() == []


@pytest.mark.parametrize(
    ("name", "widget"), [(GIVEN[0], ".labkit-playground"), (GIVEN[1], ".labkit-explorer")], ids=GIVEN
)
def test_a_saved_notebook_shows_its_widgets_before_anything_is_run(open_page, lab, name, widget):
    page = open_page(1280, 1000)
    notebook = Notebook(page, lab, f"{name}.ipynb")
    page.locator(widget).first.scroll_into_view_if_needed()
    canvas = page.locator(f"{widget} canvas").first
    canvas.wait_for()
    page.shoot(f"saved_{name}", full_page=False)
    drawn = "canvas => new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size"
    assert canvas.evaluate(drawn) > 2  # more than one colour: a picture, not an empty square
    assert notebook.complaints() == []
