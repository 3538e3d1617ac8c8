"""The attention explorer in a real browser: moved, clicked and typed at, with and without Python behind it.

What the page sets reaches a real Explorer, and what that sets and sends comes back.
"""

import numpy as np
import pytest

from labkit.viz.explorer import NAMES, Explorer
from labkit.viz.page import page as page_of
from tests.browser.stand_in import plain, press, show_widget
from tests.test_viz_explorer import random_maps

pytestmark = [pytest.mark.browser, pytest.mark.slow]

WORDS = ["the", "bank", "by", '<b>&"', "extraordinarilylong", "river", "⏎", "flooded"]
OPEN_WITHIN = 2000  # milliseconds


@pytest.fixture
def page(open_page):
    return open_page(width=1010, height=900)


def explorer(layers=3, heads=4, n=8):
    tokens = [WORDS[i % len(WORDS)] for i in range(n)]
    maps = [random_maps(layers, heads, n, causal, tokens) for causal in (True, False)]
    return Explorer(*maps)


def test_sliders_show_the_head_and_the_tooltip_its_exact_weights(page):
    widget = show(page, explorer(), "#111111")
    page.get_by_role("slider", name="layer").press("ArrowRight")
    page.get_by_role("slider", name="layer").press("ArrowRight")
    head = page.get_by_role("slider", name="head")
    box = head.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    page.wait_for_function("state.held[0].layer === 2 && state.held[0].head === 3")
    assert (widget.layer, widget.head) == (2, 3)
    assert head.get_attribute("aria-valuetext") == "head 3"
    wait_until_exact(page)
    for q, k in ((0, 0), (5, 2), (2, 7), (7, 7)):
        before, after = widget.weights[:, 2, 3, q, k].astype(float)
        tip = hover(page, 8, q, k)
        assert tip[0].startswith(f'"{WORDS[q]}" ({q}) attends to "{WORDS[k]}" ({k})')
        assert tip[0].endswith(", its future") == (k > q)
        assert number_in(tip[1], "causal ") == pytest.approx(before, rel=1e-3)
        assert number_in(tip[2], "bidirectional ") == pytest.approx(after, rel=1e-3)
        assert number_in(tip[3], "change ") == pytest.approx(after - before, rel=1e-3, abs=1e-6)
    page.shoot("explorer_dark")


@pytest.mark.parametrize("n", [8, 40])
def test_the_switch_redraws_every_cell_in_the_colour_of_its_weight(page, n):
    widget = show(page, explorer(n=n))
    assert widget.lifted == (n > 32)
    before, after = widget.weights[:, 0, 0].astype(float)
    for view, values in (("causal", before), ("bidirectional", after), ("difference", after - before)):
        page.get_by_role("radio", name=view).check()
        settled(page)
        assert widget.view == {"causal": "before", "bidirectional": "after"}.get(view, view)
        top = np.abs(values).max() if view == "difference" else max(before.max(), after.max())
        for q, k in ((0, 0), (3, 1), (1, 3), (n - 1, n - 1), (n // 2, n - 2)):
            depth = abs(values[q, k]) / top
            depth = depth**0.5 if widget.lifted else depth
            light, dark = (247, 251, 255), (8, 48, 107)
            if view == "difference":
                light, dark = (247, 247, 247), (84, 39, 136) if values[q, k] > 0 else (179, 88, 6)
            expected = [round(a + (b - a) * depth) for a, b in zip(light, dark, strict=True)]
            assert np.abs(np.subtract(pixel(page, n, q, k), expected)).max() <= 1
    page.get_by_role("checkbox", name="lift small weights").click()
    settled(page)
    assert widget.lifted == (n <= 32)


def test_a_click_on_a_token_follows_it_and_another_click_lets_go(page):
    widget = show(page, explorer())
    line = page.locator(".ex-line")
    assert line.inner_text().startswith("layer 0 head 0, causal: entropy") and "Click a token" in line.inner_text()
    page.get_by_role("radio", name="bidirectional").check()
    token = page.locator(".ex-token").nth(5)
    token.click()
    settled(page)
    assert widget.query == 5 and token.get_attribute("aria-pressed") == "true"
    row = widget.weights[1, 0, 0, 5].astype(float)
    most = f'attends most to "{WORDS[row.argmax()]}" ({row.max():.2f})'
    assert line.inner_text().startswith(f'layer 0 head 0, bidirectional, query "river": {most}')
    assert line.inner_text().endswith(f"future mass {row[6:].sum():.2f}.")
    shades = [page.locator(".ex-token").nth(i).evaluate("e => getComputedStyle(e).backgroundColor") for i in range(8)]
    blue = [int(shade.split("(")[1].split(",")[0]) for shade in shades]
    assert np.argsort(blue).tolist() == np.argsort(-row, kind="stable").tolist()  # the more, the darker

    page.get_by_role("radio", name="difference").check()
    change = row - widget.weights[0, 0, 0, 5].astype(float)
    assert f'most gained "{WORDS[change.argmax()]}" (+{change.max():.2f})' in line.inner_text()
    assert f"future mass 0.00 → {row[6:].sum():.2f}." in line.inner_text()
    token.click()
    settled(page)
    assert widget.query is None and "Click a token" in line.inner_text()
    assert page.locator("b").count() == 0  # the token <b>&" is text
    page.shoot("explorer_query")


def test_small_pictures_are_sorted_by_the_measure_of_the_view(page):
    widget = show(page, explorer())
    assert places(page) == [f"{layer}·{head}" for layer in range(3) for head in range(4)]
    sorts = {"entropy": "entropy", "future": "future mass", "distance": "mean distance"}
    for sort, (measure, name) in enumerate(sorts.items()):
        view = ["causal", "bidirectional", "difference"][sort]
        page.get_by_role("radio", name=view).check()
        page.get_by_role("combobox").select_option(label=name)
        before, after = np.array(widget.measures[measure])
        values = [before, after, after - before][sort]
        for direction, order in (("highest first", -values), ("lowest first", values)):
            order = np.argsort(order, kind="stable")
            assert page.locator(".ex-rising").inner_text() == direction
            assert places(page) == [f"{i // 4}·{i % 4}" for i in order]
            shown = page.locator(".ex-value").all_inner_texts()
            assert [float(value.replace("−", "-")) for value in shown] == pytest.approx(values[order], abs=0.006)
            page.locator(".ex-rising").click()
        settled(page)
        assert widget.sort == measure and not widget.rising
    page.get_by_role("option", name="layer 2 head 1").click()
    page.wait_for_function("state.held[0].layer === 2 && state.held[0].head === 1")
    assert page.locator("[aria-selected=true]").get_attribute("aria-label").startswith("layer 2 head 1, ")
    assert page.get_by_role("slider", name="layer").input_value() == "2"


def test_everything_can_be_done_with_the_keyboard(page):
    widget = show(page, explorer())
    page.get_by_role("slider", name="layer").focus()
    press(page, "End Tab ArrowRight Tab ArrowRight")
    page.wait_for_function("state.view === 'after' && state.held[0].layer === 2 && state.held[0].head === 1")
    press(page, "Tab ArrowRight Enter")  # the tokens: one stop, the arrows move within
    settled(page)
    assert widget.query == 1
    page.locator(".ex-line", has_text=", query ").wait_for()  # only the exact weights name a query
    press(page, "Tab ArrowRight ArrowRight ArrowDown")  # the map
    weight = widget.weights[1, 2, 1, 2, 2]
    spoken = page.locator(".lk-hidden").text_content()
    assert spoken.startswith('"by" (2) attends to "by" (2); causal ') and f"bidirectional {weight:.4g};" in spoken
    press(page, "Enter")
    settled(page)
    assert widget.query == 2
    press(page, "Escape")
    assert page.locator(".ex-tip").is_hidden()
    press(page, "Tab Tab Tab")  # to the small pictures
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 2 head 1"
    press(page, "ArrowRight Enter")
    page.wait_for_function("state.held[0].layer === 2 && state.held[0].head === 2")
    assert page.locator(".labkit-explorer").get_attribute("data-lm-suppress-shortcuts") == "true"


def test_a_large_model_opens_at_once_and_is_coarse_until_python_has_sent_the_weights(page, open_page):
    widget = show(page, explorer(12, 12, 128))
    assert page.evaluate("performance.now() - began") <= OPEN_WITHIN
    assert page.locator(".ex-picture").count() == 144 and page.locator(".ex-note").is_hidden()
    assert tip_shows(page, widget, 0, 0, 0, 100, 17)
    page.get_by_role("option", name="layer 7 head 5").click()
    page.wait_for_function("state.held[0].layer === 7 && state.held[0].head === 5")
    wait_until_exact(page)
    assert tip_shows(page, widget, 1, 7, 5, 30, 90)
    page.shoot("explorer_128")

    page = open_page(width=1010, height=900)
    widget = show(page, explorer(2, 2, 512))
    assert widget.held[0]["size"] < 512  # what a notebook keeps
    wait_until_exact(page)
    assert all(tip_shows(page, widget, 1, 0, 0, q, k) for q, k in ((511, 0), (300, 299), (4, 500)))
    page.get_by_role("slider", name="head").press("End")
    page.wait_for_function("state.held[0].head === 1")
    wait_until_exact(page)
    assert tip_shows(page, widget, 0, 0, 1, 9, 9)


def test_a_page_without_python_is_exact_where_it_can_be_and_says_where_it_is_coarse(page, tmp_path):
    widget = explorer(2, 8, 64)
    saved, whole = tmp_path / "saved.html", tmp_path / "whole.html"
    page_of(widget, "As a saved notebook, which holds one head", saved)
    widget.to_html(whole)
    page.goto(whole.as_uri())
    page.wait_for_selector("[data-ready]")
    page.get_by_role("option", name="layer 1 head 7").click()
    assert tip_shows(page, widget, 0, 1, 7, 40, 3)
    page.goto(saved.as_uri())
    page.wait_for_selector("[data-ready]")
    assert tip_shows(page, widget, 0, 0, 0, 40, 3)
    assert page.locator(".ex-note").is_hidden()

    page.get_by_role("slider", name="layer").press("End")
    page.get_by_role("slider", name="head").press("End")
    page.locator(".ex-note").wait_for(state="visible")
    assert "A coarse picture" in page.locator(".ex-note").inner_text()
    size = widget.pictures["size"]
    tip = hover(page, 64, 63, 0)
    assert tip[0].startswith("tokens ") and tip[1].startswith("causal about ")
    ends = [i * 64 // size for i in range(size + 1)]
    share = widget.weights[1, 1, 7, ends[-2] :, : ends[1]].astype(float).sum(-1).mean()
    assert float(tip[2].removeprefix("bidirectional about ").replace("<", "")) == pytest.approx(share, abs=0.015)
    assert page.locator(".ex-line").inner_text().startswith("layer 1 head 7, causal: entropy")
    page.shoot("explorer_page")


def test_the_page_follows_python_and_a_closed_view_listens_no_more(page):
    show(page, explorer())
    page.evaluate("receive('view', 'difference'); receive('query', 3); receive('layer', 1)")
    assert page.get_by_role("radio", name="difference").is_checked()
    assert page.get_by_role("slider", name="layer").input_value() == "1"
    assert page.locator(".ex-token").nth(3).get_attribute("aria-pressed") == "true"
    page.evaluate("leave(); receive('layer', 2)")
    assert page.get_by_role("slider", name="layer").input_value() == "1"


# ------------------------------------------------------------------------------------------------------------ helpers
def show(page, widget, background="white"):
    """Open the widget, with `widget` itself as its Python."""

    def python(values, content):
        sent = []
        widget.send = lambda content, buffers: sent.append([content, buffers[0]])
        if content:
            widget._handle_custom_msg(content, [])
            return plain(sent[0])
        held = widget.held
        widget.set_state(values)
        return plain(widget.held) if widget.held is not held else None

    page.expose_function("python", python)
    show_widget(page, widget, background, width=980)
    page.wait_for_selector("[data-ready]")
    return widget


def settled(page):
    """Once Python has heard all that the page has said."""
    page.wait_for_function("pending === 0")


def wait_until_exact(page):
    """Until the tooltip of the first cell names one query, not a block of them."""
    page.wait_for_function(
        """() => {
          const surface = document.querySelector(".ex-surface");
          surface.focus();
          surface.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
          surface.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp" }));
          return document.querySelector(".ex-tip").textContent.includes(" attends to ");
        }"""
    )
    page.locator(".ex-surface").press("Escape")


def middle(page, n, q, k):
    """The middle of a cell in pixels, from the corner of the canvas."""
    size, side = page.locator(".ex-base").bounding_box(), max(1, min(40, 448 // n))
    return size["width"] - 2 - side * (n - k - 0.5), size["height"] - 2 - side * (n - q - 0.5)


def hover(page, n, q, k):
    """The lines of the tooltip of a cell."""
    page.locator(".ex-surface").scroll_into_view_if_needed()
    (x, y), corner = middle(page, n, q, k), page.locator(".ex-base").bounding_box()
    page.mouse.move(corner["x"] + x, corner["y"] + y)
    return page.locator(".ex-tip div").all_inner_texts()


def tip_shows(page, widget, of, layer, head, q, k):
    """Whether the tooltip of a cell holds the exact weight of the set `of`: 0 before, 1 after."""
    line = hover(page, len(widget.tokens), q, k)[1 + of]
    return number_in(line, f"{NAMES[of]} ") == pytest.approx(widget.weights[of, layer, head, q, k], rel=1e-3)


def pixel(page, n, q, k):
    """The colour in the middle of a cell of the map."""
    read = "(canvas, at) => [...canvas.getContext('2d').getImageData(...at, 1, 1).data.slice(0, 3)]"
    return page.locator(".ex-base").evaluate(read, [int(place) for place in middle(page, n, q, k)])


def number_in(line, name):
    assert line.startswith(name)
    return float(line.removeprefix(name).replace("−", "-"))


def places(page):
    return page.locator(".ex-where").all_inner_texts()
