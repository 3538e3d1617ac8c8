"""Generated texts show each token with its entropy; the walk shows what a position sees, must name and names."""

import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

from labkit import viz
from labkit.errors import MaskError
from labkit.viz.svg import SHADES, _shade

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    {"name": "causal", "prompt": "The <old> bank", "tokens": [" was", "\n", " &"], "entropy": [2.0, 0.5, 4.0]},
    {"name": "unmasked", "prompt": "The <old> bank", "tokens": [" the"] * 40, "entropy": [0.0] * 40},
]
TOKENS = ["the", "cat", "sat", "down"]
TRUTH = ["cat", "sat", "down", None]
PREDICTS = [("dog", 0.25), ("sat", 0.5), ("down", 0.991), (".", 0.0001)]
CAUSAL, FULL = torch.ones(4, 4).tril().bool(), torch.ones(4, 4).bool()


def root_of(picture):
    return ElementTree.fromstring(picture)


def texts(picture):
    return ["".join(element.itertext()) for element in root_of(picture).iter(f"{SVG}text")]


def boxes(picture):
    return [g for g in root_of(picture).iter(f"{SVG}g") if g.find(f"{SVG}rect") is not None]


# ------------------------------------------------------------------------------------------------------ generation
def test_every_token_stands_with_its_entropy_after_the_prompt():
    shown = texts(viz.generation_svg(ROWS[:1]))
    assert shown[-9:] == ["The", "<old>", "bank", "was", "2.0", "⏎", "0.5", "&", "4.0"]
    assert "causalmean entropy 2.17 nats" in shown


def test_the_shade_of_a_token_is_its_entropy_on_one_scale_for_all_rows():
    fills = [box.find(f"{SVG}rect").get("fill") for box in boxes(viz.generation_svg(ROWS))]
    assert fills[:3] == [_shade(SHADES // 2), _shade(SHADES // 8), _shade(SHADES)]
    assert set(fills[3:]) == {_shade(0)}


def test_the_legend_gives_both_ends_of_the_scale():
    assert {"0, sure", "4.0, unsure"} <= set(texts(viz.generation_svg(ROWS)))


def test_long_rows_wrap_and_nothing_leaves_the_picture():
    picture = viz.generation_svg(ROWS)
    root = root_of(picture)
    wide, high = int(root.get("width")), int(root.get("height"))
    assert wide <= 820 and len({box.find(f"{SVG}rect").get("y") for box in boxes(picture)[3:]}) > 1
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x + w <= wide and y + h <= high


def test_certainty_everywhere_is_drawn_too():
    certain = viz.generation_svg(ROWS[1:])
    assert len(boxes(certain)) == len(ROWS[1]["tokens"])
    assert "nan" not in str(certain).lower()


def test_the_text_equivalent_holds_prompt_text_and_entropy():
    alt = viz.generation_svg(ROWS).alt
    assert alt.startswith('causal continues "The <old> bank" with "was ⏎ &", mean entropy 2.17 nats, at most 4.00.')


@pytest.mark.parametrize("nasty", ["<script>", "\x00", "\ud800", "", "漢字", "\u202e\xa0"])
def test_any_text_leaves_a_well_formed_picture(nasty):
    picture = viz.generation_svg([{"name": nasty, "prompt": nasty, "tokens": [nasty], "entropy": [1.0]}])
    walk = viz.walk_svg([nasty], [[True]], [(nasty, 1.0)], [nasty], 0)
    for svg in (picture, walk):
        ElementTree.fromstring(svg)
        assert "<script>" not in svg and len(svg) < 5_000


# ------------------------------------------------------------------------------------------------------------ walk
def lit(picture):
    """What hovering says of each token that is read: seen or not."""
    tips = [box.find(f"{SVG}title").text for box in boxes(picture) if box.find(f"{SVG}title") is not None]
    return [tip for tip in tips if tip in ("seen", "not seen")]


@pytest.mark.parametrize("position", range(4))
def test_exactly_the_tokens_that_the_mask_allows_are_lit(position):
    for cells in (CAUSAL, FULL):
        picture = viz.walk_svg(TOKENS, cells, PREDICTS, TRUTH, position)
        assert lit(picture) == ["seen" if may else "not seen" for may in cells[position].tolist()]
        assert len(list(root_of(picture).iter(f"{SVG}circle"))) == int(cells[position].sum()) - 1  # arcs, but to itself


def test_what_is_named_is_shown_up_to_the_position_and_no_further():
    shown = texts(viz.walk_svg(TOKENS, CAUSAL, PREDICTS, TRUTH, 1))
    assert "dog" in shown and "25%" in shown and "50%" in shown and "99.1%" not in shown


def test_right_and_wrong_are_told_apart_by_sign():
    picture = viz.walk_svg(TOKENS, CAUSAL, PREDICTS, TRUTH, 3)
    assert picture.count("l4 4l7 -9") == 2 and picture.count("l8 8m0 -8l-8 8") == 1  # the last is not counted
    assert "99.1%" in texts(picture) and "<0.1%" in texts(picture)


def test_an_answer_in_sight_is_said():
    seen = viz.walk_svg(TOKENS, FULL, PREDICTS, TRUTH, 1)
    assert "Position 1 sees 4 of 4 tokens, 2 of them in its future: the answer is in sight." in texts(seen)
    assert "in sight" not in viz.walk_svg(TOKENS, CAUSAL, PREDICTS, TRUTH, 1)
    assert "in sight" not in viz.walk_svg(["the", "cat", "[M]", "down"], FULL, PREDICTS, [None, "sat", None, None], 1)


def test_the_text_equivalent_of_a_step_tells_what_is_seen_asked_and_named():
    assert viz.walk_svg(TOKENS, CAUSAL, PREDICTS, TRUTH, 1).alt == (
        'Position 1, "cat", sees "the", "cat"; it must name "sat", and names "sat" with 50%.'
    )
    assert "it is not counted, and names" in viz.walk_svg(TOKENS, CAUSAL, PREDICTS, TRUTH, 3).alt


def test_the_walk_has_a_picture_for_each_position_all_of_one_size():
    slider = viz.walk_slider(TOKENS, FULL, PREDICTS, TRUTH, position=2)
    assert slider.index == 2 and slider.control == "position"
    assert slider.labels == ["0: the", "1: cat", "2: sat", "3: down"]
    assert slider.pictures == [viz.walk_svg(TOKENS, FULL, PREDICTS, TRUTH, i) for i in range(4)]
    assert slider.sentences[1] == slider.pictures[1].alt
    assert len({root_of(picture).get("height") for picture in slider.pictures}) == 1
    assert sum(map(len, slider.lines)) < 20_000
    assert "http" not in slider._esm and "import" not in slider._esm
    bundle, _ = slider._repr_mimebundle_()
    assert bundle["image/svg+xml"] == str(slider.picture)


def test_pictures_need_no_widget_package():
    code = "import sys; from labkit.viz import leak_curves_svg, fill_ins_svg, objectives_svg, walk_svg; "
    code += "print({'anywidget', 'ipywidgets', 'torch', 'plotly'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


CANNOT_BE_SHOWN = {
    "no rows": lambda: viz.generation_svg([]),
    "a row without entropy": lambda: viz.generation_svg([{"name": "a", "prompt": "b", "tokens": ["c"]}]),
    "a row of nothing": lambda: viz.generation_svg([ROWS[0] | {"tokens": [], "entropy": []}]),
    "entropies of another length": lambda: viz.generation_svg([ROWS[0] | {"entropy": [1.0]}]),
    "a NaN": lambda: viz.generation_svg([ROWS[0] | {"entropy": [1.0, float("nan"), 1.0]}]),
    "a negative entropy": lambda: viz.generation_svg([ROWS[0] | {"entropy": [1.0, -1.0, 1.0]}]),
    "a walk over nothing": lambda: viz.walk_svg([], CAUSAL, [], [], 0),
    "a mask of another length": lambda: viz.walk_svg(TOKENS, CAUSAL[:3, :3], PREDICTS, TRUTH, 0),
    "too few predictions": lambda: viz.walk_svg(TOKENS, CAUSAL, PREDICTS[1:], TRUTH, 0),
    "too few true tokens": lambda: viz.walk_svg(TOKENS, CAUSAL, PREDICTS, TRUTH[1:], 0),
    "a prediction without probability": lambda: viz.walk_svg(TOKENS, CAUSAL, TOKENS, TRUTH, 0),
    "a position outside": lambda: viz.walk_svg(TOKENS, CAUSAL, PREDICTS, TRUTH, 4),
    "a slider that begins nowhere": lambda: viz.walk_slider(TOKENS, CAUSAL, PREDICTS, TRUTH, 4),
}


@pytest.mark.parametrize("make", CANNOT_BE_SHOWN.values(), ids=CANNOT_BE_SHOWN.keys())
def test_what_cannot_be_shown_is_refused_with_a_sentence(make):
    with pytest.raises(MaskError) as refusal:
        make()
    assert len(str(refusal.value).split()) >= 6
