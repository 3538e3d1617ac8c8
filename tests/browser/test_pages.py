"""Exported pages opened from disk, and the app of `labkit demo`, in a real browser with the network blocked."""

import json
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labkit import pages, viz
from tests.browser.servers import PATIENCE, free_port, server

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
PLOTLY = "application/vnd.plotly.v1+json"


@pytest.fixture(params=["light", "dark"])
def page(open_page, request):
    return open_page(width=1280, theme=request.param)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Pages of notebooks 01 and 04, of one with plotly figures, and of one with the playground and the explorer."""
    folder = tmp_path_factory.mktemp("site")
    causal = np.tril(np.ones((8, 8), bool))
    figures = [viz.mask_figure(causal), viz.influence_figure(causal, said=np.ones((8, 8), bool))]
    outputs = [new_output("display_data", {PLOTLY: json.loads(figure.to_json())}) for figure in figures]
    cells = [new_code_cell("show()", execution_count=1, outputs=[output]) for output in outputs]
    nbformat.write(new_notebook(cells=cells), folder / "figures.ipynb")
    _write_widgets(folder / "widgets.ipynb", viz.playground("the cat sat"), viz.attention_explorer(causal / 8.0))
    given = [NOTEBOOKS / "01_attention_and_masks.ipynb", NOTEBOOKS / "04_next_token_leakage.ipynb"]
    return {p.path.stem: p for p in pages.export([*given, folder], folder)}


def test_plotly_figures_are_drawn_and_answer_to_the_mouse(page, site):
    page.goto(site["figures"].path.as_uri())
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert page.locator(".js-plotly-plot").count() == site["figures"].figures == 2
    assert page.locator(".js-plotly-plot .heatmaplayer image").count() == 2
    where = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    page.mouse.move(where["x"] + where["width"] / 4, where["y"] + where["height"] * 0.8, steps=4)
    page.locator(".hoverlayer .hovertext").first.wait_for(timeout=10_000)
    page.shoot(f"page_figures_{page.theme}")


def test_widgets_that_need_no_kernel_answer_and_others_are_pictures(page, site):
    made = site["04_next_token_leakage"]
    page.goto(made.path.as_uri())
    frames, boxes = page.locator(".labkit-frames"), page.locator(".labkit-box")
    frames.nth(4).wait_for()
    boxes.nth(7).wait_for()
    assert (frames.count(), boxes.count()) == (5, 8)
    assert made.live == made.widgets == 13
    slider = page.get_by_role("slider", name="position").first
    picture = page.locator(".labkit-frames").first.locator("svg[role=img]")
    before = picture.get_attribute("aria-label")
    slider.press("ArrowRight")
    assert picture.get_attribute("aria-label") != before
    assert page.locator("math").count() == 4
    page.shoot(f"page_04_{page.theme}")

    page.goto(site["01_attention_and_masks"].path.as_uri())
    still = page.locator(".widget svg[role=img]")
    assert still.get_attribute("aria-label").startswith("sliding_window(3): 6 queries and 6 keys")
    assert still.bounding_box()["width"] > 100
    assert page.get_by_text("in the running notebook it can be moved").is_visible()


def test_playground_and_explorer_answer_in_a_page_without_a_kernel(page, site):
    assert site["widgets"].live == site["widgets"].widgets == 2
    page.goto(site["widgets"].path.as_uri())
    playground, explorer = page.locator(".labkit-playground"), page.locator(".labkit-explorer")
    playground.get_by_label("mask A", exact=True).and_(page.locator("select")).select_option("bidirectional")
    playground.get_by_text("masks.bidirectional()", exact=True).wait_for()
    assert playground.get_by_text("9 of 9 cells are open, 3 of them in the future").is_visible()
    assert "layer 0 head 0" in explorer.inner_text()
    explorer.get_by_role("button", name="2", exact=True).click()
    explorer.get_by_text("looks most at").first.wait_for()
    page.shoot(f"page_widgets_{page.theme}")


@pytest.mark.parametrize("width", [360, 1280])
def test_page_fits_its_window_and_stays_readable(page, site, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(site["04_next_token_leakage"].path.as_uri())
    page.locator(".labkit-frames").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark == (page.theme == "dark")
    page.get_by_role("link", name="4. Real text").click()
    heading = page.get_by_role("heading", name="4. Real text")
    assert 0 <= heading.bounding_box()["y"] < 200
    page.shoot(f"page_{width}_{page.theme}")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    pytest.importorskip("voila", reason="voila is not installed: pip install voila")
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    command = ["labkit", "demo", "--no-browser", "--model", "tiny-gpt2", "--port", str(port)]
    with server(*command, says=address, log=tmp_path_factory.mktemp("demo") / "server.log"):
        yield address


@pytest.mark.timeout(600)
def test_demo_shows_the_playground_and_the_explorer_without_a_network(page, demo):
    page.set_default_timeout(PATIENCE)
    page.goto(demo, wait_until="load", timeout=PATIENCE)
    playground = page.locator(".labkit-playground")
    playground.get_by_label("mask A", exact=True).and_(page.locator("select")).select_option("bidirectional")
    playground.get_by_text("masks.bidirectional()", exact=True).wait_for()
    playground.get_by_text(re.compile("^answered in")).wait_for()
    assert playground.get_by_text("Live model: tiny-gpt2").is_visible()
    page.shoot(f"demo_playground_{page.theme}")

    page.get_by_role("tab", name="Attention explorer").click()
    explorer = page.locator(".labkit-explorer")
    explorer.wait_for()
    before = explorer.inner_text()
    assert "layer 0 head 0, causal" in before and "future mass 0.00" in before
    explorer.get_by_role("slider", name="head").press("ArrowRight")
    explorer.get_by_role("radio", name="bidirectional").check()
    explorer.get_by_text("layer 0 head 1, bidirectional").wait_for()
    assert "future mass 0.00" not in explorer.inner_text()

    field = page.get_by_role("textbox", name="Text")
    field.fill("the cat")
    field.press("Enter")
    page.locator(".labkit-explorer").get_by_role("button", name="cat").wait_for()
    page.shoot(f"demo_explorer_{page.theme}")


def _write_widgets(path: Path, *widgets) -> None:
    """A notebook as Jupyter saves it: each widget in an output of its own, and their state in the metadata."""
    from ipywidgets import embed

    kept = embed.embed_data(widgets, drop_defaults=False)["manager_state"]
    outputs = [new_output("display_data", widget._repr_mimebundle_()[0]) for widget in widgets]
    cells = [new_code_cell("widget", execution_count=1, outputs=[output]) for output in outputs]
    metadata = {"widgets": {"application/vnd.jupyter.widget-state+json": kept}}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
