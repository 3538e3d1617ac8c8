"""Fill-ins hide one token, show each model's answers by probability, mark the right one, and refuse bad input."""

from xml.etree import ElementTree

import pytest

from labkit import viz
from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED

SVG = "{http://www.w3.org/2000/svg}"
TOKENS = ["The", " bank", " of", " the", " <river>"]
ANSWERS = {
    "causal": [(" money", 0.2), (" bank", 0.03), (" house", 0.1)],
    "adapted & trained": [(" bank", 0.625), (" mill", 0.0004)],
    "unmasked": [("the", 0.5), (" the", 0.2), (".", 0.1), (" of", 0.05), (" a", 0.01), (" bank", 0.009)],
}
BY_POSITION = {
    "causal": [[], *([(token, 0.25), ("x", 0.5)] for token in TOKENS[1:])],
    "adapted": [[(token, 0.9)] for token in TOKENS],
}


def texts(picture):
    return [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_the_hidden_token_is_not_in_the_sentence_but_named_below_it():
    shown = texts(viz.fill_ins_svg(TOKENS, 1, {"m": [(" mill", 0.5)]}, " bank"))
    assert shown[:7] == ["The", "?", "of", "the", "<river>", "hidden:", "bank"]


def test_each_model_shows_its_five_best_answers_the_most_probable_first():
    shown = texts(viz.fill_ins_svg(TOKENS, 1, ANSWERS, " bank"))
    causal, adapted, unmasked = (shown.index(name) for name in ANSWERS)
    assert shown[causal + 1 : causal + 7] == ["money", "20%", "house", "10%", "bank", "3.0%"]
    assert shown[adapted + 1 : adapted + 5] == ["bank", "62%", "mill", "<0.1%"]
    assert shown[unmasked + 1 :][:10:2] == ["the", "␣the", ".", "of", "a"]  # told apart only where they look alike


def test_bars_are_as_long_as_the_probabilities():
    root = ElementTree.fromstring(viz.fill_ins_svg(["a", "b"], 0, {"m": [("x", 0.75), ("y", 0.25)]}, "x"))
    bars = [g.findall(f"{SVG}rect") for g in root.iter(f"{SVG}g") if len(g.findall(f"{SVG}rect")) == 2]
    shares = [int(bar.get("width")) / int(track.get("width")) for track, bar in bars]
    assert shares == pytest.approx([0.75, 0.25], abs=0.02)
    assert [bar.get("fill") == ALLOWED for _, bar in bars] == [True, False]  # the right one by colour ...


def test_the_right_answer_is_marked_by_a_sign_and_in_words():
    picture = viz.fill_ins_svg(TOKENS, 1, ANSWERS, " bank")
    assert picture.count("l4 4l7 -9") == 2  # ... and by a tick, in the two models that name it
    assert {'"bank" is third, with 3.0%', '"bank" is first, with 62%', '"bank" is not among them'} <= set(
        texts(picture)
    )


def test_the_text_equivalent_holds_the_sentence_and_every_answer():
    alt = viz.fill_ins_svg(TOKENS, 1, ANSWERS, " bank").alt
    assert alt.startswith('"The ___ of the <river>": the hidden token is "bank". causal: "money" 20%, "house" 10%,')
    assert 'adapted & trained: "bank" 62%, "mill" <0.1%.' in alt


@pytest.mark.parametrize("nasty", ["<script>", "a\x00b", "\ud800", "\n", "", " ", "\"&'", "漢字かな交じり文"])
def test_any_token_leaves_a_well_formed_picture(nasty):
    picture = viz.fill_ins_svg([nasty, "b"], 1, {nasty: [(nasty, 0.5)]}, nasty)
    ElementTree.fromstring(picture)
    assert "<script>" not in picture
    assert len(picture) < 6_000


def test_a_long_sentence_wraps_and_everything_lies_inside_the_picture():
    root = ElementTree.fromstring(viz.fill_ins_svg(["token"] * 60, 3, ANSWERS | {"fourth": [], "fifth": []}, "token"))
    wide, high = int(root.get("width")), int(root.get("height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert 0 <= x and x + w <= wide and 0 <= y and y + h <= high
    assert all(int(text.get("y")) <= high for text in root.iter(f"{SVG}text"))
    assert wide <= 820


# ---------------------------------------------------------------------------------------------------------- clicks
def test_there_is_a_button_and_a_picture_for_each_token():
    widget = viz.fill_ins_clicks(TOKENS, BY_POSITION, position=1)
    assert widget.buttons and widget.index == 1
    assert widget.labels == ["The", "bank", "of", "the", "<river>"]
    widget.index = 4
    answers = {name: answers[4] for name, answers in BY_POSITION.items()}
    assert widget.picture == viz.fill_ins_svg(TOKENS, 4, answers, " <river>")
    assert widget.sentences[4] == 'Hidden: "<river>". causal: "<river>" is second, with 25%. adapted: "<river>" is ' + (
        "first, with 90%."
    )
    assert "http" not in widget._esm and "import" not in widget._esm


def test_below_the_buttons_the_sentence_is_not_repeated():
    widget = viz.fill_ins_clicks(TOKENS, BY_POSITION, position=1)
    shown = texts("\n".join(widget.lines[i] for i in widget.frames[1]))
    assert shown[0] == "causal" and "?" not in shown
    assert "?" in texts(widget.picture)  # but where widgets do not run, it is


def test_a_position_without_answers_says_so():
    widget = viz.fill_ins_clicks(TOKENS, BY_POSITION)
    assert texts(widget.picture).count("cannot name this one") == 1
    assert "causal: cannot name this one." in widget.sentences[0]


def test_clicks_leave_a_picture_where_widgets_do_not_run():
    widget = viz.fill_ins_clicks(TOKENS, BY_POSITION, position=2)
    bundle, _ = widget._repr_mimebundle_()
    assert bundle["image/svg+xml"] == str(widget.picture)
    assert bundle["text/plain"].startswith('Picture: "The bank ___ the <river>"')


CANNOT_BE_SHOWN = {
    "no tokens": lambda: viz.fill_ins_svg([], 0, ANSWERS, "a"),
    "a text as tokens": lambda: viz.fill_ins_svg("the bank", 0, ANSWERS, "the"),
    "a position outside": lambda: viz.fill_ins_svg(TOKENS, 5, ANSWERS, "a"),
    "a negative position": lambda: viz.fill_ins_svg(TOKENS, -1, ANSWERS, "a"),
    "no model": lambda: viz.fill_ins_svg(TOKENS, 0, {}, "a"),
    "answers without probability": lambda: viz.fill_ins_svg(TOKENS, 0, {"m": ["bank"]}, "a"),
    "a probability above 1": lambda: viz.fill_ins_svg(TOKENS, 0, {"m": [("a", 1.5)]}, "a"),
    "a NaN": lambda: viz.fill_ins_svg(TOKENS, 0, {"m": [("a", float("nan"))]}, "a"),
    "logits": lambda: viz.fill_ins_svg(TOKENS, 0, {"m": [("a", 0.9), ("b", 0.8)]}, "a"),
    "clicks without models": lambda: viz.fill_ins_clicks(TOKENS, {}),
    "answers for too few positions": lambda: viz.fill_ins_clicks(TOKENS, {"m": [[("a", 0.5)]]}),
    "clicks that begin nowhere": lambda: viz.fill_ins_clicks(TOKENS, BY_POSITION, position=9),
}


@pytest.mark.parametrize("make", CANNOT_BE_SHOWN.values(), ids=CANNOT_BE_SHOWN.keys())
def test_what_cannot_be_shown_is_refused_with_a_sentence(make):
    with pytest.raises(MaskError) as refusal:
        make()
    assert len(str(refusal.value).split()) >= 6
