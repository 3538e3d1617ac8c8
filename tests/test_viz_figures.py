"""Figures against independent oracles: the cells, values and marks that are drawn are those that were given."""

import re
from collections import Counter
from html import unescape
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import masks, viz
from labkit.errors import MaskError
from labkit.viz.heat import pooled
from labkit.viz.predictions import HIDDEN, NOT_ATTENDED, PLAIN, RIGHT, WRONG
from labkit.viz.style import BIDIRECTIONAL, CAUSAL, MASKED, OPEN
from labkit.viz.style import WRONG as RED

TOKENS = ["the", "bank", "by", "the", "<bos>", "<b>x</b>"]
N = len(TOKENS)
CELLS = masks.causal().dense(N)
TEXT = 'Marie Curie & Pierre <b>Curie</b>\nwent to "Paris" and Warsaw.'


def weights(*shape):
    values = np.exp(np.random.default_rng(0).normal(size=shape))
    return values / values.sum(-1, keepdims=True)


def colours_of(heat):
    """The colours of the cells of a heat map whose scale has steps; None where a cell is empty."""
    colours = [colour for _, colour in heat.colorscale[1::2]]
    place = (np.asarray(heat.z, dtype=float) - heat.zmin) / (heat.zmax - heat.zmin) * len(colours)
    return [[None if np.isnan(x) else colours[min(int(x), len(colours) - 1)] for x in row] for row in place]


def shown(figure, step):
    """The traces and the layout that a step of the slider shows."""
    traces, layout = figure.layout.sliders[0].steps[step].args
    return [trace for trace, visible in zip(figure.data, traces["visible"], strict=True) if visible], layout


@pytest.mark.parametrize(
    ("q_len", "kv_len", "as_given"),
    [(6, 6, torch.Tensor.numpy), (2, 6, torch.Tensor.tolist), (1, 6, torch.Tensor.int), (512, 512, torch.Tensor.bool)],
)
def test_open_cells_are_blue_and_the_line_separates_past_and_future(q_len, kv_len, as_given):
    cells = torch.rand(q_len, kv_len, generator=torch.Generator().manual_seed(0)) < 0.5
    figure = viz.mask_figure(as_given(cells))
    assert colours_of(figure.data[0]) == [[OPEN if cell else MASKED for cell in row] for row in cells.tolist()]
    corners = [tuple(map(float, pair.split(","))) for pair in figure.layout.shapes[0].path[2:].split(" L ")]
    for query in range(q_len):
        (edge,) = {a for (a, y), (b, z) in pairwise(corners) if a == b and y < query < z}
        assert [key < edge for key in range(kv_len)] == [key <= kv_len - q_len + query for key in range(kv_len)]
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]  # the first query is at the top


def test_expected_marks_the_cells_that_differ_and_no_others():
    measured = CELLS.clone()
    measured[0, 4], measured[4, 1] = True, False
    figure = viz.mask_figure({"declared": CELLS, "measured": measured}, TOKENS, expected=CELLS)
    declared, heat = figure.data
    red = np.array(colours_of(heat)) == RED
    assert np.array_equal(red, (measured != CELLS).numpy()) and RED not in sum(colours_of(declared), [])
    assert heat.text[0, 4] == "×" and heat.text[4, 1] == "○" and (heat.text[~red] == "").all()


def test_equal_tokens_stay_apart_and_markup_in_tokens_is_text():
    figure = viz.mask_figure(masks.causal().dense(2, N), TOKENS)
    axis, names = figure.layout.xaxis, figure.data[0].x
    assert len(set(names)) == N and [unescape(name).strip("\u200b\u200c") for name in names] == TOKENS
    assert [unescape(name) for name in axis.ticktext + figure.layout.yaxis.ticktext] == TOKENS + TOKENS[-2:]
    assert not [name for name in (*names, *axis.ticktext) if "<" in name]


def test_attention_maps_hold_the_weights_on_one_scale_from_zero_and_cells_their_numbers():
    heads = torch.tensor(weights(3, 2, 6)).bfloat16()
    drawn = viz.attention_figure(heads, TOKENS).data
    assert np.allclose([heat.z for heat in drawn], heads.float(), atol=6e-5)
    assert {(heat.zmin, heat.zmax) for heat in drawn} == {(0, float(heads.max()))}
    values = [[0.0, 0.25, 7.5, -0.5, 10.05]]
    heat = viz.values_figure(values, list("abcde")).data[0]
    assert heat.z.tolist() == values and np.abs(heat.text.astype(float) - values).max() <= 0.05


@pytest.mark.parametrize(("n", "size"), [(7, 3), (33, 32), (6, 6), (5, 9)])
def test_pooling_adds_up_the_keys_and_averages_the_queries(n, size):
    ends, place = np.arange(min(n, size) + 1) * n // min(n, size), np.arange(n)
    member = np.array([(a <= place) & (place < b) for a, b in pairwise(ends)], dtype=float)
    expected = member / member.sum(1, keepdims=True) @ weights(n, n) @ member.T
    assert pooled(weights(n, n), size) == pytest.approx(expected, abs=1e-6) and np.allclose(expected.sum(1), 1)


def test_causal_and_bidirectional_have_their_colours_in_every_function():
    row = ["causal", "bidirectional", "leak", "—", "local"]
    heat = viz.category_figure({"a": row}, list("12345"), colours={"local": "#123456"}).data[0]
    assert colours_of(heat) == [[CAUSAL, BIDIRECTIONAL, RED, None, "#123456"]] and list(heat.text[0]) == row
    names = ["causal, 4 layers", "causal", "bidirectional", "other"]
    lines = viz.curves_figure([1, 2], {name: [[0.0, 1.0]] for name in names}).data[1::2]
    points = viz.forest_figure({"task": dict.fromkeys(names, (1.0, 0.5, 2.0))}).data[0]
    for colours in ([line.line.color for line in lines], points.marker.color):
        assert list(colours[:3]) == [CAUSAL, CAUSAL, BIDIRECTIONAL] and colours[3] not in (CAUSAL, BIDIRECTIONAL, RED)
    assert lines[0].line.dash != lines[1].line.dash


def test_curves_are_means_with_bands_and_gaps_are_left_out():
    seeds = np.array([[3.0, np.nan, 1.0], [5.0, np.nan, 1.5], [4.0, np.nan, np.nan]])
    figure = viz.curves_figure([0, 50, 100], {"causal": seeds, "b": [[1, 2, 3]]}, floor=0.7, at=100)
    band, mean, _, other = figure.data
    assert list(mean.x) == [0, 100] and list(mean.y) == [4, 1.25] and list(other.y) == [1, 2, 3]
    assert list(band.x) == [0, 100, 100, 0] and list(band.y) == [5, 1.5, 1, 3]
    lines = [(shape.x0, shape.x1, shape.y0, shape.y1) for shape in figure.layout.shapes]
    assert lines == [(0, 1, 0.7, 0.7), (100, 100, 0, 1)]
    shorter = viz.curves_figure([0, 50, 100], {"a": [[3, 2, 1]], "b": [[4, 3, np.nan]]}).layout.title.text
    assert "a: 1.00 (at 100); b: 3.00 (at 50)" in shorter  # not the values at 100, where b was not measured
    texts = ["zq", "the <b>", "a dog"]
    figure = viz.curves_slider([0, 50, 100], {"causal": [[3, 2, 1]]}, {"causal": texts}, at=50)
    written = [unescape(shown(figure, step)[1]["annotations"][-1]["text"]) for step in range(3)]
    assert written == [f"<b>causal:</b> {text}" for text in texts]
    assert figure.layout.sliders[0].active == 1 and "the &lt;b" in figure.layout.annotations[-1].text


def test_stacked_bars_change_with_the_menu_and_the_slider_and_show_their_totals():
    groups = {
        "small": {"1": {"full": {"w": 1.0, "a": 2.0}}, "8": {"full": {"w": 1.0, "a": 16.0}}},
        "large": {"1": {"full": {"w": 5.0, "a": 3.0}}, "8": {"full": {"w": 5.0, "a": 24.0}}},
    }
    figure = viz.stacked_slider(groups, "Memory", "rows", "GB", start=1)
    assert [list(trace.x) for trace in figure.data] == [[1], [16], [17], [5], [24], [29]]
    assert [trace.visible for trace in figure.data] == [True] * 3 + [False] * 3
    assert list(figure.data[2].text) == [" 17.0 GB"]
    steps, buttons = figure.layout.sliders[0].steps, figure.layout.updatemenus[0].buttons
    assert list(steps[0].args[0]["x"]) == [[1], [2], [3], [5], [3], [8]]
    assert list(buttons[1].args[0]["visible"]) == [False] * 3 + [True] * 3


def test_forest_draws_values_and_intervals_and_none_without_seeds():
    groups = {"qa": {"causal": (1.0, 0.25, 3.0), "b": (-2.0, None, None)}, "ner": {"causal": (4.0, -1.0, 5.0)}}
    figure = viz.forest_figure(groups, marks={"chance": 9.0})
    points = figure.data[0]
    assert list(points.x) == [1, -2, 4] and list(points.y) == [1, 2, 4]  # rows 0 and 3 are the names of the groups
    assert np.array_equal(points.error_x.arrayminus, [0.75, np.nan, 5], equal_nan=True)
    assert np.array_equal(points.error_x.array, [2, np.nan, 1], equal_nan=True)
    low, high = figure.layout.xaxis.range
    assert {shape.x0 for shape in figure.layout.shapes} == {0, 9.0} and low < -2 and high > 9
    assert {"+1.00  [+0.25, +3.00]", "−2.00"} <= {note.text for note in figure.layout.annotations}
    scores = viz.forest_figure({"": {"a": (0.7, 0.6, 0.8)}}, zero=False).layout
    assert scores.xaxis.range[0] > 0 and not scores.shapes
    long = {"a group with a very long name": {"a": (7, None, None)}}  # no interval, and a mark beside the name
    plain, marked = (viz.forest_figure(long, zero=False, marks=marks).layout for marks in (None, {"chance": 5}))
    assert "interval" not in str(plain.title) and plain.margin.l < marked.margin.l


def test_a_slider_shows_one_figure_at_each_step_and_starts_where_it_was_told():
    grids = {str(w): masks.sliding_window(w).dense(N) for w in (1, 3, 5)}
    figure = viz.slider({w: viz.mask_figure(grid, TOKENS, f"window {w}") for w, grid in grids.items()}, "window", 1)
    for step, (w, grid) in enumerate(grids.items()):
        (heat,), layout = shown(figure, step)
        assert np.array_equal(heat.z, grid) and layout["title"]["text"] == f"window {w}"
        assert heat.visible == (step == 1) and figure.layout.sliders[0].steps[step].label == w
    assert figure.layout.sliders[0].active == 1 and figure.layout.title.text == "window 3"


def test_a_menu_instead_of_a_slider_shows_the_same_figures():
    figures = {arm: viz.forest_figure({"": {arm: (1.0, 0.5, 1.5)}}, arm) for arm in ("a", "an arm with a long name")}
    figure, slider = viz.slider(figures, "arm", 1, menu=True), viz.slider(figures, "arm", 1)
    (menu,) = figure.layout.updatemenus
    assert not figure.layout.sliders and menu.active == 1 and figure.layout.title.text == "an arm with a long name"
    for button, step in zip(menu.buttons, slider.layout.sliders[0].steps, strict=True):
        assert button.label == step.label and button.args[0] == step.args[0]


def test_the_walk_shades_the_attended_past_and_future():
    cells, truth = masks.hybrid(3).dense(N), [*TOKENS[1:], None]
    figure = viz.walk_figure(TOKENS, cells, [("bank", 0.5)] * N, truth, start=2)
    for here in range(N):
        (boxes,), _ = shown(figure, here)
        past = [RIGHT if cell else NOT_ATTENDED for cell in cells[here, : here + 1]]
        future = [WRONG if cell else NOT_ATTENDED for cell in cells[here, here + 1 :]]
        assert list(boxes.z[0]) == past + future
        verdicts = [RIGHT if i == 0 else WRONG for i in range(here + 1) if truth[i] is not None]
        assert list(boxes.z[2]) == verdicts + [PLAIN] * (N - len(verdicts))
        assert boxes.visible == (here == 2)


@pytest.mark.parametrize("shift", [0, 1])  # to the token that is meant: hidden tokens, and the next token
def test_objectives_hide_tokens_and_point_to_the_one_that_is_meant(shift):
    tokens, counted = list("abcdef"), [1, 3]
    inputs = ["[MASK]" if i - shift in counted else token for i, token in enumerate(tokens)]
    targets = [tokens[i + shift] if i in counted else None for i in range(6)]
    figure = viz.objectives_figure(tokens, [{"name": "one", "inputs": inputs, "targets": targets}] * 2)
    for axis, heat in zip(("x", "x2"), figure.data, strict=True):
        assert list(np.flatnonzero(heat.z[0] == HIDDEN)) == [i + shift for i in counted]
        assert list(np.flatnonzero(heat.z[2] == RIGHT)) == counted
        arrows = [(note.ax, note.x) for note in figure.layout.annotations if note.axref == axis and note.showarrow]
        assert arrows == [(i, i + shift) for i in counted]


def test_answers_in_a_gap_mark_the_truth_and_windows_those_with_the_answer():
    answers = {"causal": [], "adapted": [("mat", 0.25), ("cat", 0.5)]}
    none, bars = viz.fill_ins_figure(["the", "cat", "sat"], 1, answers, "cat").data
    assert list(none.text) == ["no prediction"] and list(bars.x) == [0.25, 0.5]
    assert [colour == OPEN for colour in bars.marker.color] == [False, True]
    windows = viz.windows_figure([(0, 9), (5, 14), (9, 18)], (8, 9), 20).data[0]
    assert list(windows.base) == [0, 5, 9] and list(windows.marker.color) == [OPEN, OPEN, MASKED]


def read(figure):
    """The styles over each letter of a text figure, and how many letters precede the label at the end of each span."""
    letters, ends, styles = "", [], []
    over, body = [], re.search("pre-wrap[^>]*>(.*?)</p>", figure, re.DOTALL)[1]
    for tag, text in re.findall("(<[^>]*>)|([^<]+)", body):
        if tag:
            styles = styles[:-1] if tag == "</span>" else [*styles, tag]
        elif styles and "border-radius:6px" in styles[-1]:
            ends.append(len(letters))
        else:
            letters += unescape(text)
            over += [" ".join(styles)] * len(unescape(text))
    assert letters == TEXT
    return over, ends


SPAN = st.tuples(st.integers(0, len(TEXT) - 1), st.integers(1, 12)).map(lambda s: (s[0], min(len(TEXT), sum(s))))
ENTITIES = st.lists(st.tuples(SPAN, st.sampled_from("AB")).map(lambda e: (*e[0], e[1])), max_size=5)


def lie_over(mark, styles, spans):
    return [style.count(mark) for style in styles] == [sum(a <= i < b for a, b, *_ in spans) for i in range(len(TEXT))]


@given(st.lists(SPAN, max_size=8))
def test_each_letter_of_an_answer_is_underlined_however_answers_overlap(spans):
    styles, ends = read(viz.answer_figure(TEXT, [(*span, 0.9 - i / 10) for i, span in enumerate(spans)]))
    assert lie_over("padding-bottom", styles, spans)
    assert ends == sorted(end for _, end in spans)
    depths = [re.findall(r"padding-bottom:\d+", style) for style in styles]
    assert all(len(lines) == len(set(lines)) for lines in depths)  # lines that overlap are drawn at different depths


@given(ENTITIES, ENTITIES)
def test_every_entity_is_marked_and_each_right_one_counts_once(gold, predicted):
    figure = viz.entities_figure(TEXT, gold, predicted)
    styles, ends = read(figure)
    assert lie_over("border-bottom", styles, gold) and lie_over("background", styles, predicted)
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z ]+)", figure.alt)}
    right = (Counter(gold) & Counter(predicted)).total()
    assert counts.get("right", 0) == right
    assert sum(counts.values()) == len(ends) == len(gold) + counts.get("spurious", 0)
    assert len(predicted) == len(gold) - counts.get("missed", 0) + counts.get("spurious", 0)


@pytest.mark.parametrize(
    ("gold", "predicted", "outcomes"),
    [
        ([(0, 5, "A")], [(0, 5, "B"), (0, 4, "A")], "1 wrong label, 1 spurious"),  # equal spans count more than labels
        ([(0, 5, "A")], [(3, 9, "A"), (4, 5, "B")], "1 wrong boundary, 1 spurious"),
        ([(0, 5, "A"), (4, 9, "A")], [(3, 5, "B")], "1 wrong boundary and label, 1 missed"),
        ([(0, 5, "A"), (6, 9, "A")], [(0, 9, "A"), (6, 9, "A")], "1 right, 1 wrong boundary"),
    ],
)
def test_entities_are_paired_with_the_best_match_that_is_left(gold, predicted, outcomes):
    assert viz.entities_figure(TEXT, gold, predicted).alt == f"Entities: {outcomes}."


def test_the_ground_of_a_word_follows_its_entropy_or_weight():
    row = {"name": "<i>", "prompt": "<u>", "tokens": ["a", "<s>"], "entropy": [1.0, 2.0]}
    figure = viz.stacked({"h": viz.generation_figure([row]), "w": viz.words_figure([("<q>", -0.5), ("b", 1.0)])})
    opacity = {unescape(word): float(x) for x, word in re.findall(r"rgba\([\d,]+,([\d.]+)\)[^>]*>([^<]+)<", figure)}
    assert opacity["<s>"] == 2 * opacity["a"] and opacity["b"] == 2 * opacity["<q>"]
    assert not re.search("<[iusq]>", figure) and "mean entropy 1.50" in figure.alt


BATCH, LONG, TWO = masks.padding([2, 3]).dense(3), CELLS.repeat(2, 1), viz.mask_figure({"a": CELLS, "b": CELLS})
REFUSED = [
    (viz.mask_figure, [masks.causal()]), (viz.mask_figure, [weights(6, 6)]), (viz.mask_figure, [BATCH]),
    (viz.mask_figure, [LONG]), (viz.mask_figure, [CELLS, TOKENS[1:]]), (viz.mask_figure, [CELLS, "abcdef"]),
    (viz.mask_figure, [CELLS, TOKENS, "title", CELLS[:3, :3]]), (viz.attention_figure, [[[np.nan]]]),
    (viz.attention_figure, [[[-1.0]]]), (viz.attention_figure, [{"a": weights(2, 4, 4)}]),
    (viz.values_figure, [[[1.0, 2.0]], ["a"]]), (viz.category_figure, [{"a": ["causal"]}, ["1", "2"]]),
    (viz.curves_figure, [[1], {"a": [[np.nan]]}]), (viz.curves_figure, [[1, 2], {"a": [[1.0]]}]),
    (viz.forest_figure, [{"a": {"b": (np.inf, 0, 1)}}]),
    (viz.slider, [{"1": viz.mask_figure(CELLS), "2": TWO}, "window"]),
    (viz.answer_figure, ["abc", [(0, 4, 0.5)]]),
    (viz.entities_figure, ["abc", [(1, 1, "A")], []]),
]  # fmt: skip


@pytest.mark.parametrize(("draw", "given"), REFUSED)
def test_what_cannot_be_drawn_is_refused_with_a_sentence(draw, given):
    with pytest.raises(MaskError) as refusal:
        draw(*given)
    assert len(str(refusal.value).split()) >= 6


def test_a_probe_begins_with_the_first_model_and_the_last_word_and_refuses_other_grids():
    grid = masks.causal().dense(N)
    figure = viz.probe_figure(TOKENS, {"causal": {"alone": grid}, "open": {"alone": grid | True}})
    assert figure.alt == f"{TOKENS[-1]} is replaced: 1 of {N} states change ({TOKENS[-1]})."
    assert figure.count('class="labkit-state labkit-changed"') == 1
    with pytest.raises(MaskError, match="open, alone"):
        viz.probe_figure(TOKENS, {"open": {"alone": [0.5]}})


def test_a_field_shows_the_answer_to_its_text_and_the_error_of_an_invalid_one():
    def letters(text):
        if text == "<bad>":
            raise MaskError("<bad> is not a text")
        return f"{len(text)} letters"

    box = viz.ask(letters, text="four")
    assert "4 letters" in box._repr_mimebundle_()["text/html"]
    for text, shown in {"three": "5 letters", " ": "Fill in", "<bad>": "&lt;bad&gt; is not a text"}.items():
        box.fields["text"].value = text
        box.button.click()
        assert shown in box.shown.value
    assert viz.entities_figure("a b", [], []).alt == "Entities: none."
    assert viz.entities_figure("Ada left.", None, [(0, 3, "PER")]).alt == "Entities: Ada PER."
