"""bertviz's three views in a real browser with the network cut: they draw what the model computed.

Needs the libraries in labkit/_browser (scripts/fetch_browser_libraries.py).
"""

import numpy as np
import pytest

import labkit
from labkit import masks, viz
from labkit.attention.maps import attention_maps
from labkit.attention.neurons import neuron_maps
from labkit.viz import bertviz

pytest.importorskip("bertviz")

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TEXT = "The old man said that the king looked at sea."


@pytest.fixture
def page(open_page):
    if not all((bertviz.FOLDER / name).is_file() for name in bertviz.NAMES):
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


def opacities(place, lines: str = "svg #attention line") -> np.ndarray:
    """The stroke opacity of every line."""
    read = "all => all.map(line => +line.getAttribute('stroke-opacity'))"
    return np.array(place.locator(lines).evaluate_all(read))


def weights_of(lm, mask) -> np.ndarray:
    return attention_maps(lm, TEXT, mask).weights.astype(float)


def test_head_views_beside_each_other_draw_every_weight_of_the_same_layer(page, tmp_path, lm):
    document(page, tmp_path, viz.bertviz_compare(lm, TEXT), name="compare")
    left, right = page.get_by_role("combobox", name="layer").all()
    assert left.bounding_box()["y"] == right.bounding_box()["y"]
    for layer in (3, 4):
        right.select_option(str(layer))
        assert left.input_value() == str(layer)
        for root, mask in zip(
            page.locator('[id^="bertviz-"]').all(), (masks.causal(), masks.bidirectional()), strict=True
        ):
            weights = weights_of(lm, mask)[layer]
            assert np.abs(opacities(root).reshape(weights.shape) - weights / len(weights)).max() < 1e-3
    assert not page.locator("[data-labkit-still]").is_visible()


def test_model_view_draws_a_thumbnail_for_every_layer_and_head_and_opens_one(page, tmp_path, lm):
    view = viz.bertviz_model_view(lm, TEXT, masks.bidirectional(), layers=[1, 4])
    document(page, tmp_path, view, name="model")
    weights = weights_of(lm, masks.bidirectional())[[1, 4]]
    assert np.abs(opacities(page, "svg line").reshape(weights.shape) - weights).max() < 1e-3
    assert {"1", "4"} <= set(page.locator("svg text").all_text_contents())
    page.locator("#attn_background_1_2").locator("..").locator("rect").last.click()
    assert page.get_by_text("Layer 4, Head 2").count() == 1


@pytest.mark.parametrize(("mask", "products"), [(masks.causal(), 5), (masks.bidirectional(), 11)], ids=repr)
def test_neuron_view_shows_the_products_with_the_future_where_the_mask_opens_it(page, tmp_path, lm, mask, products):
    views = [viz.bertviz_neuron_view(lm, TEXT, m, layers=[2, 3]) for m in (masks.causal(), mask)]
    document(page, tmp_path, *views)  # the second one: its neighbour must stay as it is
    first, second = page.locator("[data-labkit-view]").all()
    assert second.get_by_role("combobox", name="layer").locator("option").all_inner_texts() == ["2", "3"]
    token = second.locator("#collapsed #leftText > g").nth(4)
    token.locator("text").hover()
    sign = token.locator(".plus-sign").bounding_box()
    page.mouse.click(sign["x"] + 7, sign["y"] + 7)
    second.locator("#expanded #leftText text").nth(4).hover()
    assert second.locator("#expanded").is_visible() and not first.locator("#expanded").is_visible()
    boxes = second.locator("#dotproducts rect")
    shown = boxes.evaluate_all("all => all.filter(box => getComputedStyle(box).opacity === '1').length")
    assert (boxes.count(), shown) == (11, products)
    _, queries, keys = neuron_maps(lm, TEXT, mask, layers=[2])
    scores = keys[0, 0] @ queries[0, 0, 4] / keys.shape[-1] ** 0.5
    drawn = boxes.evaluate_all("all => all.map(box => +box.dataset.value)")
    assert np.abs(np.array(drawn) - scores).max() < 0.02
    page.shoot(f"bertviz_neuron_{products}")


def test_a_page_with_other_scripts_and_the_same_output_twice_draws_both(page, tmp_path, lm):
    """As in an exported notebook, where require.js is in the page: d3 and jQuery would register with it instead."""
    loader = "<script>window.define = () => { throw new Error('define'); }; window.define.amd = {};</script>"
    output = viz.bertviz_head_view(lm, TEXT)
    document(page, tmp_path, loader, output, output)
    assert page.locator("[data-labkit-drawn] svg").count() == 2
    assert page.evaluate("[typeof window.d3, typeof window.$, typeof window.jQuery]") == ["undefined"] * 3


def test_a_view_that_fails_to_draw_says_so(page, tmp_path, lm):
    html = viz.bertviz_head_view(lm, TEXT).replace("requirejs([", "throw 'on purpose'; requirejs([")
    document(page, tmp_path, html)
    assert "bertviz could not draw this view: on purpose" in page.locator("[data-labkit-why]").inner_text()
    page.failures.clear()  # it is in the console too
