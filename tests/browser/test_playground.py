"""The mask playground in a real browser, with no kernel behind it: painted, typed at, composed; and its rules,
held against labkit.masks.

The playground draws in the frame after a change. Here its frames come late, so that a test that reads the page before
it is drawn fails every time, and not only on a busy machine.
"""

import base64
import json
import random
import re

import numpy as np
import pytest

from labkit import masks, viz
from labkit.viz.mask_state import dense_of, fitted, mask_of, packed, painted_cells, split_words, tree_of
from tests.browser.stand_in import drawn, paint, press, show_widget
from tests.test_viz_playground import random_mask

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = [pytest.mark.browser, pytest.mark.slow]

CAT = "the cat sat on the mat"
CARD = "rgb(255, 255, 255)"
RULES = "window.rules = { cellsOf, codeOf, meaningOf, fitted, slotsOf, treeOfSlots, splitWords, packed };"
LATE_FRAMES = """{
  const ask = window.requestAnimationFrame.bind(window), cancel = window.cancelAnimationFrame.bind(window), asked = {};
  window.requestAnimationFrame = (call) => {
    const id = setTimeout(() => { asked[id] = ask(call); }, 80);
    return id;
  };
  window.cancelAnimationFrame = (id) => { clearTimeout(id); cancel(asked[id] ?? 0); };
}"""


@pytest.fixture
def page(open_page):
    page = open_page(width=820, height=1000)
    page.add_init_script(LATE_FRAMES)
    page.goto("about:blank")
    return page


# --------------------------------------------------------------------------------------------- the rules
def test_the_rules_of_the_page_are_those_of_labkit_on_500_random_masks(page):
    _show(page, viz.playground(CAT))
    rng = random.Random(11)
    asked, expected = [], []
    for _ in range(500):
        n = rng.randint(1, 24)
        mask, longer = random_mask(rng, n), rng.randint(1, 24)
        tree = tree_of(mask)
        grown = fitted(tree, longer, n)
        asked.append([tree, n, longer])
        cells = [packed(dense_of(m, size)) for m, size in ((mask, n), (mask_of(grown), longer))]
        expected.append([*cells, grown, repr(mask), mask.meaning, tree])
    computed = page.evaluate(
        """(asked) => asked.map(([tree, n, longer]) => {
          const grown = rules.fitted(tree, longer, n);
          return [rules.packed(rules.cellsOf(tree, n)), rules.packed(rules.cellsOf(grown, longer)), grown,
            rules.codeOf(tree).replaceAll("masks.", ""), rules.meaningOf(tree), rules.treeOfSlots(rules.slotsOf(tree))];
        })""",
        asked,
    )
    for question, ours, theirs in zip(asked, expected, computed, strict=True):
        assert theirs == ours, question
    assert len({str(question) for question in asked}) > 400  # they are not all the same one


def test_the_page_splits_a_sentence_as_python_does(page):
    _show(page, viz.playground(CAT))
    sentence = "Don't stop, O’Neil! naïve_x 3.5% — “ok”\t日本語\ntext a''b 'quoted' é🙂!? <b>&\"</b>"
    assert page.evaluate("rules.splitWords(" + json.dumps(sentence) + ")") == split_words(sentence)


# ------------------------------------------------------------------------------------------------ the mask
def test_cells_are_painted_by_dragging_and_taken_back(page):
    _show(page, viz.playground(CAT), "#111418")
    assert page.evaluate("getComputedStyle(document.querySelector('.labkit-playground')).backgroundColor") == CARD
    expect(page.get_by_text("21 of 36 cells are open, 0 of them in the future.")).to_have_count(1)
    _drag(page, (0, 3), (2, 5), steps=2)  # two jumps of the mouse: no cell on the way may be left out
    cells = _cells(page, masks.causal(), 6)
    assert sorted(map(tuple, np.argwhere(cells != np.tril(np.ones((6, 6), bool))))) == [(0, 3), (1, 4), (2, 5)]
    assert page.evaluate("saved") == 1  # a stroke is told once, when it ends
    _drag(page, (2, 5), (0, 3), steps=2)  # begun on an open cell, it closes
    assert page.evaluate("state.painted") == {}  # painted back is not painted
    page.get_by_role("button", name="Undo").click()
    assert _cells(page, masks.causal(), 6).sum() == 24
    page.get_by_role("combobox", name="mask A").select_option("prefix")
    assert _cells(page, masks.causal(), 6).sum() == 24  # painted cells stay when the mask below them changes
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="Clear 3 painted").click()
    assert page.evaluate("state.painted") == {}
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="Undo").click()
    assert page.evaluate("state.painted") == {}
    page.shoot("playground_dark")


def test_everything_is_done_from_the_keyboard(page):
    _show(page, viz.playground(CAT))
    grid = page.get_by_role("grid", name="attention mask: rows are queries, columns are keys")
    expect(grid).to_have_attribute("aria-rowcount", "6")
    grid.focus()
    press(page, "ArrowRight")
    cell = page.get_by_role("gridcell")
    expect(cell).to_have_attribute("aria-label", "the may not attend to cat")
    expect(cell).to_have_attribute("aria-selected", "false")
    assert grid.get_attribute("aria-activedescendant") == cell.get_attribute("id")
    press(page, "Space")
    expect(cell).to_have_attribute("aria-label", "the may attend to cat, painted")
    press(page, "Shift+ArrowRight Shift+ArrowDown")  # carries the open cell along
    cells = _cells(page, masks.causal(), 6)
    assert [tuple(at) for at in np.argwhere(cells & ~np.tril(np.ones((6, 6), bool)))] == [(0, 1), (0, 2), (1, 2)]
    press(page, "Control+End")
    expect(cell).to_have_attribute("aria-label", "mat may attend to mat")
    press(page, "Control+z Control+z")
    page.wait_for_function("state.painted.n === undefined")
    live = page.locator(".pg-words")
    expect(live).to_have_attribute("aria-live", "polite")
    expect(live).to_contain_text('"mat" attends to "the" (0), "cat", "sat", "on", "the" (4), "mat" (6 of 6).')
    for name in ("sentence", "mask A", "how A and B are combined"):  # every control has a name
        expect(page.get_by_label(name, exact=True)).to_have_count(1)
    expect(page.locator(".labkit-playground")).to_have_attribute("data-lm-suppress-shortcuts", "true")


def test_two_presets_are_composed_with_and_or_not(page):
    _show(page, viz.playground(CAT))
    page.get_by_role("combobox", name="mask A").select_option("prefix")
    slider = page.get_by_role("slider", name="prefix of A")
    expect(slider).to_have_attribute("aria-valuetext", "3 tokens")
    slider.press("ArrowRight")
    assert _mask(page) == masks.prefix(4)
    expect(slider).to_have_attribute("aria-valuetext", "4 tokens")
    page.get_by_label("how A and B are combined").select_option("&")
    page.get_by_role("combobox", name="mask B").select_option("padding")
    page.get_by_role("button", name="not B").click()
    assert _mask(page) == masks.prefix(4) & ~masks.padding([4])
    expect(page.locator("code")).to_have_text("masks.prefix(4) & ~masks.padding([4])")
    page.get_by_label("side of B").select_option("left")
    page.get_by_role("slider", name="pads of B").press("Home")
    page.get_by_label("how A and B are combined").select_option("|")
    assert _mask(page) == masks.prefix(4) | ~masks.padding([6], side="left")
    page.get_by_role("combobox", name="mask A").select_option("segments")
    page.get_by_label("segment of each token of A").fill("0 0 1")
    page.get_by_label("inside of A").select_option("bidirectional")
    page.get_by_label("how A and B are combined").select_option("")
    assert _mask(page) == masks.segments([0, 0, 1, 1, 1, 1], inside="bidirectional")
    page.get_by_label("segment of each token of A").fill("0 zero")
    expect(page.get_by_label("segment of each token of A")).to_have_attribute("aria-invalid", "true")
    assert _mask(page) == masks.segments([0, 0, 1, 1, 1, 1], inside="bidirectional")  # left as it was
    page.get_by_role("slider", name="fuse from of A").press("ArrowLeft")
    assert _mask(page) == masks.segments([0, 0, 1, 1, 1, 1], inside="bidirectional", fuse_from=5)
    page.get_by_role("combobox", name="mask A").select_option("sliding_window")
    page.get_by_label("sides of A").select_option("both sides")
    assert _mask(page) == masks.sliding_window(3, causal=False)


def test_a_drag_of_a_slider_is_one_step_to_undo(page):
    _show(page, viz.playground(CAT, masks.prefix(1)))
    slider = page.get_by_role("slider", name="prefix of A")
    where = slider.bounding_box()
    page.mouse.move(where["x"] + where["width"] / 6, where["y"] + where["height"] / 2)
    page.mouse.down()
    page.mouse.move(where["x"] + where["width"] - 4, where["y"] + where["height"] / 2, steps=8)
    page.mouse.up()
    assert _mask(page) == masks.prefix(6)
    page.get_by_role("button", name="Undo").click()
    assert _mask(page) == masks.prefix(1)


def test_a_mask_that_python_sets_is_shown_and_kept_whole(page):
    mask = ~(masks.causal() & masks.prefix(2)) | masks.from_dense(np.eye(6, dtype=bool))
    _show(page, viz.playground(CAT))
    page.evaluate("(tree) => model.set('expression', tree)", tree_of(mask))
    expect(page.locator("code")).to_contain_text("~(masks.causal() & masks.prefix(2))")
    expect(page.get_by_role("combobox", name="mask A")).to_have_value("custom")
    page.get_by_role("button", name="not A").click()
    assert _mask(page) == (masks.causal() & masks.prefix(2)) | masks.from_dense(np.eye(6, dtype=bool))
    page.evaluate("leave(); model.set('expression', ['causal'])")  # a view that was closed no longer listens


# --------------------------------------------------------------------------------------------- the sentence
def test_a_sentence_is_typed_and_everything_follows(page):
    _show(page, viz.playground("a b c d", masks.causal() & masks.padding([3])))
    _drag(page, (0, 1), (0, 1))
    box = page.get_by_label("sentence", exact=True)
    box.fill('<b>a & "b"</b>')
    page.wait_for_function("state.tokens.length === 12")
    tokens = split_words('<b>a & "b"</b>')
    assert page.evaluate("state.tokens") == tokens
    expect(page.locator(".pg-chip")).to_have_text(tokens)
    assert _mask(page) == masks.causal() & masks.padding([11])
    assert _cells(page, _mask(page), 12)[0, 1]
    box.fill("  ")
    expect(page.get_by_text("Type at least one word.")).to_have_count(1)
    assert page.evaluate("state.tokens.length") == 12
    box.fill("word " * 513)
    expect(page.get_by_text("513 tokens are too many: the playground shows at most 512.")).to_have_count(1)
    box.fill("one")
    page.wait_for_function("state.tokens.length === 1")
    expect(page.get_by_text("too many")).to_have_count(0)


def test_what_a_row_attends_to_and_what_attends_to_it_is_marked_and_written(page):
    _show(page, viz.playground(CAT))
    page.locator(".pg-chip").nth(1).hover()
    keys, queries = '"the" (0), "cat" (2 of 6)', '"cat", "sat", "on", "the" (4), "mat" (5 of 6)'
    words = page.locator(".pg-words")
    expect(words).to_have_text(f'"cat" attends to {keys}. It is attended to by {queries}.')
    states = page.locator(".pg-chip").evaluate_all("(chips) => chips.map((chip) => chip.dataset.state.trim())")
    assert states == ["attends", "attends attended self", *["attended"] * 4]
    page.mouse.move(5, 5)
    expect(words).to_contain_text("21 of 36")
    page.evaluate("model.set('focus', 2)")  # as when `playground.focus = 2` is run in a cell
    expect(words).to_contain_text('"sat" attends to')
    page.evaluate("(tree) => model.set('expression', tree)", tree_of(~masks.causal()))  # the last row has no key
    expect(page.get_by_text("may attend to nothing, so it attends to itself alone")).to_have_count(1)
    page.locator(".pg-chip").nth(5).hover()
    expect(words).to_have_text(re.compile('^"mat".*attends to itself alone'))


# ------------------------------------------------------------------------------------------------ the model
def test_the_panel_asks_shows_waits_cancels_and_says_what_went_wrong(page):
    _show(page, viz.playground(CAT))
    panel = page.get_by_role("region", name="live model")
    expect(panel).to_have_count(0)
    _attach(page)
    expect(panel).to_contain_text("Live model: stand-in")
    expect(page.get_by_text("rank 2, 20 %")).to_have_count(2)
    expect(panel.get_by_text("Leak: it is read.")).to_have_count(1)
    expect(panel.get_by_text("Measured: as said.")).to_have_count(1)

    page.get_by_role("combobox", name="mask A").select_option("bidirectional")
    assert page.evaluate("state.asked") == 2
    panel.get_by_text("computing …").wait_for()
    panel.get_by_role("button", name="Cancel").wait_for()
    page.get_by_role("slider").count()  # the page goes on meanwhile
    page.get_by_role("combobox", name="mask A").select_option("hybrid")
    assert page.evaluate("state.asked") == 3
    _answer(page, 2)
    drawn(page)
    expect(panel.get_by_text("computing …")).to_have_count(1)  # an answer to an older question does not end the waiting
    expect(page.locator(".pg-elapsed")).to_contain_text(" s")
    panel.get_by_role("button", name="Cancel").click()
    assert page.evaluate("state.cancelled") == 3
    expect(panel.get_by_text("Cancelled.")).to_have_count(1)
    panel.get_by_role("button", name="Ask again").click()
    assert page.evaluate("state.asked") == 4
    _answer(page, 4)
    expect(page.locator(".pg-status")).to_contain_text("answered in")

    panel.get_by_label("head", exact=True).select_option("1")
    panel.get_by_label("which token").select_option("2")
    panel.get_by_label("what the model is asked").select_option("fill-in")
    assert page.evaluate("[state.head, state.place, state.question, state.asked]") == [1, 2, "fill-in", 7]
    page.evaluate("model.set('answer', { number: 7, error: 'There is no mask token.' })")
    expect(page.get_by_role("alert")).to_have_text("There is no mask token.")
    _drag(page, (5, 0), (5, 0))
    assert page.evaluate("state.asked") == 8  # a stroke asks once
    page.wait_for_function("document.querySelector('.pg-status').textContent.startsWith('Python has not answered')")
    page.shoot("playground_panel")


def test_the_attention_of_a_row_is_read_under_the_pointer(page):
    _show(page, viz.playground(CAT))
    _attach(page)
    maps = page.get_by_role("grid", name="attention after")
    maps.scroll_into_view_if_needed()
    where = maps.bounding_box()
    page.mouse.move(where["x"] + where["width"] * 1.5 / 6, where["y"] + where["height"] * 2.5 / 6)
    weights = 'Layer 1, head 0: "sat" attends to "cat" with weight 0.33 before and 0.17 after.'
    expect(page.locator(".pg-weight")).to_have_text(weights)
    maps.focus()
    press(page, "ArrowDown")
    cell = page.get_by_role("gridcell", name="cat attends to the: 0.17")
    expect(cell).to_have_count(1)
    assert maps.get_attribute("aria-activedescendant") == cell.get_attribute("id") != ""


# ---------------------------------------------------------------------------------------------- the static page
def test_the_exported_page_stays_interactive_and_keeps_the_last_answers(page, tmp_path):
    import labkit

    lm = labkit.load("tiny-gpt2", device="cpu")
    playground = viz.playground("The cat sat on the mat", masks.bidirectional()).attach(lm)
    playground.to_html(tmp_path / "page.html", title="A page")
    playground.close()
    page.goto((tmp_path / "page.html").as_uri())
    panel = page.get_by_role("region", name="live model")
    expect(panel).to_contain_text("there is no Python behind it")
    expect(panel).to_contain_text("Measured: all 2 layers")
    page.get_by_role("combobox", name="mask A").select_option("causal")
    expect(page.locator(".pg-words")).to_contain_text("21 of 36")
    page.get_by_label("sentence", exact=True).fill("one two three")
    expect(page.locator(".pg-chip")).to_have_count(3)
    expect(panel).not_to_contain_text("computing")
    assert page.locator(".pg-chip").all_inner_texts() == ["one", "two", "three"]
    page.shoot("playground_static")


# ------------------------------------------------------------------------------------------------------- helpers
def _show(page, widget, background: str = "white") -> None:
    show_widget(page, widget, background, exposed=RULES)


def _set(page, values: dict) -> None:
    """Set these values of the widget, as Python would."""
    page.evaluate("(values) => { for (const [name, value] of Object.entries(values)) model.set(name, value); }", values)


def _attach(page) -> None:
    _set(page, {"model_name": "stand-in", "layers": 2, "heads": 2, "asked": 1, "layer": 1, "place": 2})
    _answer(page, 1)


def _answer(page, number: int) -> None:
    before = [round(255 / (q + 1)) if k <= q else 0 for q in range(6) for k in range(6)]
    maps = {"before": before, "after": [43] * 36}
    maps = {side: base64.b64encode(bytes(weights)).decode() for side, weights in maps.items()}
    top = [["on", 0.5], ["dog", 0.2], ["<b>", 0.1], ["\n", 0.05], ["", 0.0001]]
    side = {"top": top, "rank": 2, "p": 0.2}
    answer = {"number": number, "question": "next", "how": "Which?", "truth": "dog", "before": side, "after": side}
    attention = {"number": number, "n": 6, "tokens": CAT.split(), "layer": 1, "head": 0, **maps}
    values = {"answer": answer | {"leak": "Leak: it is read.", "seconds": 0.1}, "attention": attention}
    verdict = {"number": number, "text": "Measured: as said.", "agrees": True}
    _set(page, values | {"received": number, "verdict": verdict})
    page.wait_for_function("(n) => state.answer.number === n && document.querySelector('.pg-answer')", arg=number)


def _drag(page, start: tuple[int, int], end: tuple[int, int], steps: int = 1) -> None:
    paint(page, start, end, steps)
    page.mouse.move(5, 5)
    drawn(page)


def _mask(page) -> masks.Mask:
    return mask_of(page.evaluate("state.expression"))


def _cells(page, mask: masks.Mask, n: int) -> np.ndarray:
    """The cells on show, as Python reads what the page has saved."""
    which, value = painted_cells(page.evaluate("state.painted"), n)
    return np.where(which, value, dense_of(mask, n))
