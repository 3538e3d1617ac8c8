"""bertviz's three views in a real browser with the network cut: they draw, and share one copy of d3 and jQuery.

Needs the libraries in labkit/_browser (scripts/fetch_browser_libraries.py).
"""

from html import unescape

import numpy as np
import pytest

import labkit
from labkit import masks, viz
from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.attention.neurons import NeuronMaps, neuron_maps
from labkit.viz import bertviz, browser_libraries

pytest.importorskip("bertviz")

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TEXT = "The old man said that the king looked at sea."
BROUGHT = "shared.jquery = jquery.exports"


@pytest.fixture
def page(open_page):
    if not browser_libraries.are_installed():
        pytest.skip("d3 and jQuery are not there: python scripts/fetch_browser_libraries.py")
    return open_page(width=1060, height=800)


@pytest.fixture(scope="module")
def lm():
    return labkit.load("gpt2-mini", device="cpu")


def document(page, tmp_path, *html: str, name: str = "page") -> None:
    """Open a page from disk that holds these outputs one below the other."""
    file = tmp_path / "page.html"
    file.write_text(f'<!doctype html><meta charset="utf-8"><body>{"<hr>".join(html)}</body>', encoding="utf-8")
    page.goto(file.as_uri())
    page.shoot(f"bertviz_{name}")


def opacities(page, lines: str) -> np.ndarray:
    """The stroke opacity of every line that the selector finds."""
    return np.array(page.eval_on_selector_all(lines, "all => all.map(line => +line.getAttribute('stroke-opacity'))"))


@pytest.mark.parametrize("mask", [masks.causal(), masks.bidirectional()], ids=repr)
def test_head_view_draws_every_weight_of_the_layer(page, tmp_path, lm, mask):
    view = viz.bertviz_head_view(lm, TEXT, mask, layer=3)
    document(page, tmp_path, view.html(), name=f"head_{mask!r}")
    weights = weights_of(lm, mask)[3]
    heads, n, _ = weights.shape
    assert page.locator("svg text").count() == 2 * n
    drawn = opacities(page, "svg #attention line").reshape(heads, n, n)
    assert np.abs(drawn - weights / heads).max() < 1e-3
    assert (np.triu(drawn, k=1).max() > 0) == (mask == masks.bidirectional())
    assert not page.locator("[data-labkit-still]").is_visible() and page.outside == []
    page.get_by_role("combobox", name="layer").select_option("5")
    assert (
        np.abs(opacities(page, "svg #attention line").reshape(heads, n, n) - weights_of(lm, mask)[5] / heads).max()
        < 1e-3
    )


def test_model_view_draws_a_thumbnail_for_every_layer_and_head_and_opens_one(page, tmp_path, lm):
    view = viz.bertviz_model_view(lm, TEXT, masks.bidirectional(), layers=[1, 4])
    document(page, tmp_path, view.html(), name="model")
    weights = weights_of(lm, masks.bidirectional())[[1, 4]]
    assert np.abs(opacities(page, "svg line").reshape(weights.shape) - weights).max() < 1e-3
    assert {"1", "4"} <= set(page.locator("svg text").all_text_contents())
    page.locator("#attn_background_1_2").locator("..").locator("rect").last.click()
    assert page.get_by_text("Layer 4, Head 2").count() == 1
    assert page.outside == []


@pytest.mark.parametrize(("mask", "products"), [(masks.causal(), 5), (masks.bidirectional(), 11)], ids=repr)
def test_neuron_view_shows_the_products_with_the_future_where_the_mask_opens_it(page, tmp_path, lm, mask, products):
    views = [viz.bertviz_neuron_view(lm, TEXT, m, layers=[2, 3]) for m in (masks.causal(), mask)]
    document(page, tmp_path, *(view.html() for view in views))  # the second one: its neighbour must stay as it is
    first, second = page.locator("[data-labkit-view]").all()
    assert second.get_by_role("combobox", name="layer").locator("option").all_inner_texts() == ["2", "3"]
    token = second.locator("#collapsed #leftText > g").nth(4)
    token.locator("text").hover()
    sign = token.locator(".plus-sign").bounding_box()
    page.mouse.click(sign["x"] + 7, sign["y"] + 7)
    second.locator("#expanded #leftText text").nth(4).hover()
    assert second.locator("#expanded").is_visible() and not first.locator("#expanded").is_visible()
    boxes = second.locator("#dotproducts rect")
    seen = boxes.evaluate_all("all => all.filter(box => getComputedStyle(box).opacity === '1').length")
    assert (boxes.count(), seen) == (11, products)
    maps = neuron_maps(lm, TEXT, mask, layers=[2])
    scores = maps.keys[0, 0] @ maps.queries[0, 0, 4] / maps.keys.shape[-1] ** 0.5
    shown = boxes.evaluate_all("all => all.map(box => +box.dataset.value)")
    assert np.abs(np.array(shown) - scores).max() < 0.02
    page.shoot(f"bertviz_neuron_{products}")
    assert page.outside == []


def test_compared_views_stand_beside_each_other_and_show_the_same_layer(page, tmp_path, lm):
    document(page, tmp_path, viz.bertviz_compare(lm, TEXT).html(), name="compare")
    left, right = page.get_by_role("combobox", name="layer").all()
    assert left.bounding_box()["y"] == right.bounding_box()["y"]
    right.select_option("4")
    assert left.input_value() == "4"
    drawn = [opacities(page, f"#{root} #attention line") for root in page.eval_on_selector_all(ROOTS, IDS)]
    for each, mask in zip(drawn, (masks.causal(), masks.bidirectional()), strict=True):
        expected = weights_of(lm, mask)[4]
        assert np.abs(each.reshape(expected.shape) - expected / len(expected)).max() < 1e-3


ROOTS, IDS = '[id^="bertviz-"]', "all => all.map(root => root.id)"


def test_views_share_one_copy_in_whatever_order_they_come(page, tmp_path, lm):
    view = viz.bertviz_head_view(lm, TEXT)
    outputs = [view.html(libraries=False), view.html(libraries=True), view.html(libraries=False)]
    assert [BROUGHT in output for output in outputs] == [False, True, False]
    outputs += outputs[-1:]  # a cell copied with its output
    document(page, tmp_path, *outputs)
    assert page.locator("[data-labkit-drawn] svg").count() == 4
    assert len(set(page.eval_on_selector_all(ROOTS, IDS))) == 4
    assert page.evaluate("[typeof window.d3, typeof window.$, typeof window.jQuery]") == ["undefined"] * 3


def test_a_view_without_its_libraries_tells_what_to_run(page, tmp_path, lm):
    document(page, tmp_path, viz.bertviz_head_view(lm, TEXT).html(libraries=False), name="still")
    still = page.locator("[data-labkit-still]")
    assert still.is_visible() and "Run that cell again" in still.inner_text()


def test_a_page_with_a_module_loader_of_its_own_changes_nothing(page, tmp_path, lm):
    """As in an exported notebook, where require.js is in the page: d3 and jQuery would register with it instead."""
    loader = "<script>window.define = () => { throw new Error('define'); }; window.define.amd = {};</script>"
    document(page, tmp_path, loader, viz.bertviz_head_view(lm, TEXT).html())
    assert page.locator("[data-labkit-drawn] svg").count() == 1


def test_a_view_that_fails_to_draw_says_so(page, tmp_path, lm):
    html = viz.bertviz_head_view(lm, TEXT).html().replace("requirejs([", "throw 'on purpose'; requirejs([")
    document(page, tmp_path, html)
    assert "bertviz could not draw this view: on purpose" in page.locator("[data-labkit-why]").inner_text()
    page.failures.clear()  # it is in the console too


def test_tokens_are_drawn_as_they_are(page, tmp_path):
    tokens = ["<b>bold</b>", "</script>", "<!--", '"&amp;"', "a\nb", "\\x3c"]
    maps = AttentionMaps(np.full((1, 1, 6, 6), 1 / 6, dtype=np.float16), tokens, (0,), "causal()", "m")
    document(page, tmp_path, bertviz.head_view(maps).html(), name="tokens")
    drawn = page.locator("svg #left text").all_text_contents()
    assert [text.replace("⏎", "\n") for text in drawn] == tokens


@pytest.mark.parametrize("view", ["head", "model", "neuron"])
def test_the_size_that_a_view_is_refused_by_is_what_the_browser_draws(page, tmp_path, view):
    n, dim = 40, 64
    layers, heads = {"head": (1, 12), "model": (6, 4), "neuron": (1, 1)}[view]
    weights = np.full((layers, heads, n, n), 1 / n, dtype=np.float16)
    maps = AttentionMaps(weights, [f"t{i}" for i in range(n)], tuple(range(layers)), "causal()", "m")
    if view == "neuron":
        vectors = np.ones((layers, heads, n, dim), dtype=np.float32)
        maps = NeuronMaps(maps, vectors, vectors)
    document(page, tmp_path, getattr(bertviz, f"{view}_view")(maps).html())
    drawn = page.evaluate("document.querySelectorAll('svg *').length")
    expected = bertviz.elements(view, layers, heads, n, dim)
    assert expected <= drawn <= 1.15 * expected


def test_an_exported_notebook_draws_from_disk(page, tmp_path):
    nbclient, nbconvert = pytest.importorskip("nbclient"), pytest.importorskip("nbconvert")
    import nbformat

    lines = ["import labkit; from labkit import viz; lm = labkit.load('gpt2-mini', device='cpu')"]
    lines += [f"viz.bertviz_{view}(lm, {TEXT!r}, layers=[0, 1])" for view in ("head_view", "model_view", "neuron_view")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(line) for line in lines])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    plain, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    nbclient.NotebookClient(notebook, timeout=240).execute()
    html, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert unescape(html).count(BROUGHT) == 1
    for name, content in (("plain", plain), ("views", html)):
        (tmp_path / f"{name}.html").write_text(content, encoding="utf-8")
    page.goto((tmp_path / "plain.html").as_uri())
    usual, stumbles = set(page.outside), set(page.failures)  # nbconvert's own page asks for MathJax and the like
    page.goto((tmp_path / "views.html").as_uri())
    page.wait_for_function("document.querySelectorAll('[data-labkit-drawn] svg').length === 3")
    assert set(page.outside) <= usual and page.locator("[data-labkit-drawn] svg line").count() > 1000
    assert set(page.failures) <= stumbles
    page.outside.clear()
    page.failures.clear()
    page.shoot("bertviz_exported")


def weights_of(lm, mask) -> np.ndarray:
    return attention_maps(lm, TEXT, mask).weights.astype(float)
