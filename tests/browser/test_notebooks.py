"""Notebooks of the tour in JupyterLab, in a real browser, with the network blocked: as they were saved, and run."""

import shutil
from pathlib import Path

import pytest

from tests.browser.servers import PATIENCE, Notebook, jupyter

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


def test_arrow_keys_on_the_slider_redraw_the_mask(open_page, lab):
    page = open_page(1280, 1000)
    notebook = Notebook(page, lab, "01_attention_and_masks.ipynb")
    notebook.run_all()
    widget = page.locator(".widget-vbox").first
    _bring_into_view(page, widget)
    picture = widget.locator("svg[role=img]")
    handle = widget.locator(".noUi-handle")

    assert picture.get_attribute("aria-label").startswith("sliding_window(3): 6 queries and 6 keys, 15 of 36 cells")
    page.shoot("slider_before", full_page=False)
    handle.focus()
    handle.press("ArrowRight")
    handle.press("ArrowRight")
    widget.locator("svg[aria-label^='sliding_window(5): 6 queries and 6 keys, 20 of 36']").wait_for(timeout=10_000)
    assert _squares(picture) == {"#0072B2": 20, "#E6E6E6": 16}
    assert "itself and the 4 tokens before it" in widget.inner_text()

    widget.locator("select").select_option("hybrid")
    widget.locator("svg[aria-label^='hybrid(5): 6 queries and 6 keys, 21 of 36']").wait_for(timeout=10_000)
    handle.focus()
    for _ in range(3):
        handle.press("ArrowLeft")
    widget.locator("svg[aria-label^='hybrid(2): 6 queries and 6 keys, 27 of 36']").wait_for(timeout=10_000)
    assert _squares(picture) == {"#0072B2": 27, "#E6E6E6": 9}
    page.shoot("slider_after", full_page=False)
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


def _squares(picture) -> dict[str, int]:
    """How many cells are drawn in which colour."""
    counts = "svg => [...svg.querySelectorAll('g[fill]')].map(g => [g.getAttribute('fill'), g.children.length])"
    return dict(picture.evaluate(counts))


def _bring_into_view(page, widget) -> None:
    """JupyterLab draws a cell only once it is near the screen: scroll down until the last cells are there."""
    for _ in range(60):
        if widget.locator("svg[role=img]").count() and widget.locator(".noUi-handle").count():
            break
        page.locator(".jp-WindowedPanel-outer").first.evaluate("panel => panel.scrollBy(0, 1500)")
        page.wait_for_timeout(500)
    widget.locator(".noUi-handle").scroll_into_view_if_needed(timeout=PATIENCE)
