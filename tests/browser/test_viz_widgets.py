"""The widgets that choose among pictures, dragged, clicked and typed at in a real browser, with no kernel behind them.

A stand-in for the widget's model is enough: the module asks it for values and tells it the choice.
"""

import json

import pytest

from labkit import viz

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TOKENS = ["the", "cat", "<sat>", "down"]
CAUSAL = [[key <= query for key in range(4)] for query in range(4)]
NAMES = ("index", "control", "labels", "sentences", "buttons", "lines", "frames")
PAGE = """<!doctype html><body style="background: BACKGROUND"><style>CSS</style><div id="here"></div>
<script type="module">
const heard = {};
window.state = STATE;
window.saved = 0;
const model = {
  get: (name) => state[name],
  set: (name, value) => { state[name] = value; (heard["change:" + name] ?? []).forEach((call) => call()); },
  save_changes: () => { window.saved += 1; },
  on: (event, call) => { (heard[event] ??= []).push(call); },
  off: (event, call) => { heard[event] = heard[event].filter((other) => other !== call); },
};
window.model = model;
const module = await import(URL.createObjectURL(new Blob([MODULE], { type: "text/javascript" })));
window.leave = module.default.render({ model, el: document.getElementById("here") });
window.ready = true;
</script>"""


@pytest.fixture
def page(open_page):
    return open_page(width=920, height=800)


@pytest.mark.parametrize("background", ["white", "#111111"])
def test_the_curves_follow_the_slider_by_mouse_and_by_keyboard(page, background):
    arms = {"as built": [[4.4, 4.2, 4.17, 4.16]], "unmasked": [[4.5, 2.0, 0.5, 0.02]]}
    samples = {"unmasked": ["zq ml", "the a", "the the", "the the the"]}
    widget = viz.leak_curves_slider([0, 50, 100, 150], arms, 4.16, samples=samples, at=0)
    _show(page, widget, background)
    slider, picture = page.get_by_role("slider", name="training step"), page.locator("svg[role=img]")
    assert slider.get_attribute("aria-valuetext") == "step 0"

    where = slider.bounding_box()
    page.mouse.move(where["x"] + 10, where["y"] + where["height"] / 2)
    page.mouse.down()
    page.mouse.move(where["x"] + where["width"] * 0.68, where["y"] + where["height"] / 2, steps=8)
    page.mouse.up()
    page.wait_for_function("state.index === 2 && saved > 0")
    assert "At step 100: as built 4.17, unmasked 0.50." in picture.get_attribute("aria-label")
    assert picture.get_by_text("the the", exact=True).count() == 1
    assert page.locator("output").inner_text() == slider.get_attribute("aria-valuetext") == "step 100"

    slider.press("ArrowRight")
    assert "unmasked 0.02." in picture.get_attribute("aria-label")
    slider.press("Home")
    assert page.locator("[aria-live=polite]").text_content() == "step 0: as built 4.40, unmasked 4.50."
    assert slider.get_attribute("data-lm-suppress-shortcuts") == "true"  # or JupyterLab takes the arrow keys
    page.shoot(f"curves_{background.strip('#')}")


def test_a_click_hides_a_token_and_so_does_enter(page):
    answers = {"causal": [[], *([(token, 0.25)] for token in TOKENS[1:])], "adapted": [[(t, 0.9)] for t in TOKENS]}
    _show(page, viz.fill_ins_clicks(TOKENS, answers, position=1), "#111111")
    picture, pressed = page.locator("svg[role=img]"), page.locator("button[aria-pressed=true]")
    assert pressed.get_attribute("aria-label") == "hide cat"

    page.get_by_role("button", name="hide <sat>").click()
    assert picture.get_attribute("aria-label").startswith('"the cat ___ down": the hidden token is "<sat>".')
    assert pressed.get_attribute("aria-label") == "hide <sat>" and pressed.count() == 1
    assert picture.get_by_text("<sat>", exact=True).count() == 2  # both models name it

    page.keyboard.press("ArrowRight")  # moves on, hides nothing yet
    assert pressed.get_attribute("aria-label") == "hide <sat>"
    page.keyboard.press("Enter")
    assert picture.get_attribute("aria-label").startswith('"the cat <sat> ___"')
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    assert page.evaluate("state.index") == 0 and picture.get_by_text("cannot name this one").count() == 1
    page.shoot("fill_ins")


def test_the_walk_goes_position_by_position_and_follows_python(page):
    predicts, truth = [("dog", 0.25), ("<sat>", 0.5), ("down", 0.9), (".", 0.4)], ["cat", "<sat>", "down", None]
    _show(page, viz.walk_slider(TOKENS, CAUSAL, predicts, truth), "white")
    picture, slider = page.locator("svg[role=img]"), page.get_by_role("slider", name="position")
    assert picture.get_attribute("aria-label").startswith('Position 0, "the", sees "the"; it must name "cat"')
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    assert picture.get_attribute("aria-label").startswith('Position 2, "<sat>", sees "the", "cat", "<sat>";')
    page.evaluate("model.set('index', 3)")  # as when `widget.index = 3` is run in a cell
    assert picture.get_attribute("aria-label").startswith('Position 3, "down"')
    assert slider.input_value() == "3"
    page.evaluate("leave(); model.set('index', 0)")  # a view that was closed no longer listens
    assert slider.input_value() == "3"
    page.shoot("walk")


def _show(page, widget, background: str) -> None:
    def literal(value) -> str:
        return json.dumps(value).replace("</", "<\\/")

    state = literal({name: getattr(widget, name) for name in NAMES})
    html = PAGE.replace("BACKGROUND", background).replace("CSS", widget._css)
    page.set_content(html.replace("MODULE", literal(widget._esm)).replace("STATE", state))
    page.wait_for_function("window.ready")
