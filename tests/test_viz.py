"""Pictures hold what they were given, show the future, say it in words, and refuse what they cannot show."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from labkit import masks, viz
from labkit.errors import LabkitError, MaskError
from labkit.viz.grid import ALLOWED, MASKED, short
from labkit.viz.widgets import KINDS, MaskSlider

TOKENS = ["the", "bank", "by", "the", "river", "flooded"]
N = len(TOKENS)
CAUSAL = masks.causal().dense(N)


def weights(*heads, causal=False):
    scores = torch.randn(*heads, N, N, generator=torch.Generator().manual_seed(0))
    return (scores + (masks.causal().additive(N) if causal else 0)).softmax(-1)


def heatmaps(figure):
    return [trace for trace in figure.data if trace.type == "heatmap"]


# ------------------------------------------------------------------------------------------------ plotly figures
@pytest.mark.parametrize("as_given", [lambda m: m, lambda m: m.numpy(), lambda m: m.tolist(), lambda m: m.int()])
def test_mask_figure_holds_the_cells_and_the_tokens(as_given):
    figure = viz.mask_figure(as_given(CAUSAL), TOKENS, "causal()")
    (heatmap,) = heatmaps(figure)
    assert np.array_equal(heatmap.z, CAUSAL.int().numpy())
    assert list(figure.layout.xaxis.ticktext) == list(figure.layout.yaxis.ticktext) == TOKENS
    assert figure.layout.title.text == "causal()"
    assert heatmap.hovertext[2][4] == '"by" may not look at "river"'
    assert heatmap.hovertext[4][2] == '"river" may look at "by"'


def test_the_first_query_is_on_top_and_the_upper_triangle_is_shown():
    figure = viz.mask_figure(CAUSAL, TOKENS)
    (heatmap,) = heatmaps(figure)
    assert tuple(figure.layout.yaxis.range) == (N - 0.5, -0.5)  # runs downwards
    assert tuple(figure.layout.xaxis.range) == (-0.5, N - 0.5)
    assert np.isfinite(np.asarray(heatmap.z, dtype=float)).all()  # no hole where the future is
    assert {colour for _, colour in heatmap.colorscale} == {MASKED, ALLOWED}
    assert figure.layout.yaxis.scaleanchor == "x"  # square cells


def test_tokens_that_repeat_or_look_like_markup_keep_their_place():
    figure = viz.mask_figure(CAUSAL, ["<bos>", "a", "a", "a", " ", "supercalifragilistic"])
    assert list(figure.layout.xaxis.tickvals) == list(range(N))
    assert list(figure.layout.xaxis.ticktext) == ["&lt;bos&gt;", "a", "a", "a", "␣", "supercalifr…"]
    assert '"supercalifragilistic"' in heatmaps(figure)[0].hovertext[5][5]


@pytest.mark.parametrize("n", [6, 64, 65, 128, 512])
def test_labels_thin_out_only_beyond_64_tokens_and_never_overlap(n):
    figure = viz.mask_figure(masks.causal().dense(n))
    shown, margin = figure.layout.xaxis.tickvals, figure.layout.margin
    assert len(shown) == n or n > 64
    assert (figure.layout.width - margin.l - margin.r) / len(shown) >= 9  # pixels for each label
    assert figure.layout.width < 1200
    assert len(figure.to_json()) < 4_000_000


def test_cached_decoding_labels_the_queries_with_the_last_tokens():
    figure = viz.mask_figure(masks.causal().dense(2, N), TOKENS)
    assert list(figure.layout.yaxis.ticktext) == ["river", "flooded"]
    assert list(figure.layout.xaxis.ticktext) == TOKENS


def test_masks_side_by_side_shows_each_under_its_own_title():
    said = {repr(m): m.dense(N) for m in (masks.causal(), masks.prefix(2) & masks.hybrid(3), masks.bidirectional())}
    figure = viz.masks_side_by_side(said, TOKENS)
    for heatmap, cells in zip(heatmaps(figure), said.values(), strict=True):
        assert np.array_equal(heatmap.z, cells.int().numpy())
    titles = [figure.layout[axis].title.text for axis in ("xaxis", "xaxis2", "xaxis3")]
    assert titles == ["causal()", "prefix(2) &amp; hybrid(3)", "bidirectional()"]


def test_influence_marks_leaks_and_losses_by_colour_and_by_sign():
    measured = CAUSAL.clone()
    measured[0, 4], measured[4, 1] = True, False
    figure = viz.influence_figure(measured, CAUSAL, TOKENS, "layer 3")
    (heatmap,) = heatmaps(figure)
    expected = CAUSAL.int().numpy().copy()
    expected[0, 4] = expected[4, 1] = 2
    assert np.array_equal(heatmap.z, expected)
    signs = {trace.name: (trace.marker.symbol, list(zip(trace.y, trace.x, strict=True))) for trace in figure.data[1:]}
    assert signs == {"leak": ("x-thin", [(0, 4)]), "no influence": ("circle-open", [(4, 1)])}
    assert "2 of 36 cells disagree" in figure.layout.title.subtitle.text
    assert "1 leaks, 1 without influence" in viz.alt_text(figure)


def test_influence_that_agrees_carries_no_sign():
    figure = viz.influence_figure(CAUSAL, CAUSAL, TOKENS)
    assert len(figure.data) == 1
    assert "0 of 36 cells disagree" in figure.layout.title.text


def test_attention_is_drawn_from_zero_on_one_scale():
    given = weights(3)
    figure = viz.attention_figure(given, TOKENS, "three heads")
    for head, heatmap in zip(given, heatmaps(figure), strict=True):
        assert np.allclose(heatmap.z, head)
        assert heatmap.zmin == 0 and heatmap.zmax == pytest.approx(given.max().item())
    assert [figure.layout[f"xaxis{i}"].title.text for i in ("", 2, 3)] == ["head 0", "head 1", "head 2"]


def test_attention_of_one_head_may_come_with_or_without_a_head_axis():
    one = weights()
    assert np.array_equal(heatmaps(viz.attention_figure(one))[0].z, heatmaps(viz.attention_figure(one[None]))[0].z)
    half = one.to(torch.bfloat16).requires_grad_()  # numpy knows no bfloat16
    assert np.allclose(heatmaps(viz.attention_figure(half))[0].z, one, atol=1e-2)


def test_attention_pair_holds_before_after_and_their_difference():
    before, after = weights(causal=True), weights()
    figure = viz.attention_pair(before, after, TOKENS)
    first, second, change = heatmaps(figure)
    assert np.allclose(first.z, before) and np.allclose(second.z, after) and np.allclose(change.z, after - before)
    assert first.zmin == second.zmin == 0 and first.zmax == second.zmax
    assert change.zmin == -change.zmax  # white means no change
    assert [figure.layout[f"xaxis{i}"].title.text for i in ("", 2, 3)] == ["causal", "bidirectional", "difference"]


def test_figures_say_in_words_what_they_show():
    words = viz.alt_text(viz.mask_figure(masks.prefix(2).dense(3), ["I", "saw", "I"], "prefix(2)"))
    assert words.startswith("prefix(2): 3 queries and 3 keys, 7 of 9 cells allowed, 1 of them in the future.")
    assert '"I" (0) may look at "I" (0), "saw".' in words  # a token that occurs twice is told apart
    words = viz.alt_text(viz.attention_figure(torch.eye(3).roll(1, 1), ["I", "saw", "her"]))
    assert "Share of attention on the future: 67%" in words
    assert '"I" looks most at "saw" (1.00).' in words


def test_alt_text_of_a_foreign_figure_is_refused():
    import plotly.graph_objects as go

    with pytest.raises(MaskError, match="no text equivalent"):
        viz.alt_text(go.Figure())


# ------------------------------------------------------------------------------------------------------------ svg
def drawn_sentences(svg):
    return re.findall(r"<title>(.*?)</title>", svg)


def test_mask_svg_draws_every_cell_in_its_colour():
    mask = masks.causal() & masks.sliding_window(2)
    svg = viz.mask_svg(mask.dense(N), TOKENS, repr(mask))
    tree = ElementTree.fromstring(svg)
    squares = {g.get("fill"): len(g) for g in tree.iter("{http://www.w3.org/2000/svg}g")}
    assert squares == {ALLOWED: 11, MASKED: 25}
    assert len(drawn_sentences(svg)) == N * N
    assert '"bank" may not look at "river"' in [s.replace("&quot;", '"') for s in drawn_sentences(svg)]
    assert tree.get("role") == "img" and tree.get("aria-label") == svg.alt
    assert svg.alt.startswith("causal() & sliding_window(2): 6 queries")
    assert len(svg) < 8_000


def test_svg_of_many_tokens_stays_small_and_covers_the_square():
    mask = masks.prefix(20)
    svg = viz.mask_svg(mask.dense(64))
    runs = re.findall(r"h(\d+)v11h-", svg)
    assert sum(map(int, runs)) == 64 * 64 * 11
    assert len(svg) < 30_000


def test_attention_svg_writes_the_weights_of_few_tokens():
    given = weights(causal=True)
    svg = viz.attention_svg({"causal": given, "bidirectional": weights()}, TOKENS)
    texts = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("0") == 15  # the upper triangle, written out
    assert f"{given[5, 0]:.2f}"[1:] in texts
    assert "Share of attention on the future: 0%" in svg.alt


def test_an_svg_is_drawn_by_a_notebook_and_read_as_words():
    from IPython.core.formatters import DisplayFormatter

    svg = viz.mask_svg(CAUSAL, TOKENS)
    bundle, _ = DisplayFormatter().format(svg)
    assert bundle["image/svg+xml"] == str(svg)
    assert bundle["text/plain"] == f"Picture: {svg.alt}"


def test_svg_text_from_tokens_is_escaped():
    svg = viz.mask_svg(CAUSAL, ["<script>", '"', "&", "'", "<", ">"])
    ElementTree.fromstring(svg)
    assert "<script>" not in svg


def test_road_shows_the_steps_and_where_the_reader_is():
    svg = viz.road_svg([(0, "Start here"), (1, "Attention & masks")], here=1)
    texts = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["00", "Start here", "01", "Attention & masks"]
    assert svg.alt.endswith("01 Attention & masks (you are here).")


@pytest.mark.parametrize(
    ("token", "label"),
    [("cat", "cat"), (" ", "␣"), ("\n", "⏎"), ("a" * 12, "a" * 12), ("a" * 13, "a" * 11 + "…"), ("", "")],
)
def test_labels_show_white_space_and_cut_long_tokens(token, label):
    assert short(token) == label


# --------------------------------------------------------------------------------------------------------- slider
def test_moving_the_slider_redraws_the_mask_and_its_words():
    slider = viz.mask_slider(TOKENS, kind="sliding window", number=2)
    assert isinstance(slider, MaskSlider)
    before = slider.picture.value
    slider.number.value = 4
    assert slider.mask == masks.sliding_window(4)
    assert slider.picture.value != before
    assert slider.picture.value == str(viz.mask_svg(slider.mask.dense(N), TOKENS, "sliding_window(4)"))
    assert "the 3 tokens before it" in slider.words.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(N + 1))
def test_every_position_of_the_controls_draws_a_mask(kind, number):
    slider = viz.mask_slider(TOKENS)
    slider.number.value = number
    slider.kind.value = kind
    factory, name, least = KINDS[kind]
    expected = factory() if name is None else factory(max(number, least))
    assert slider.mask == expected
    assert slider.number.disabled == (name is None)


def test_the_slider_leaves_a_picture_where_widgets_do_not_run():
    slider = viz.mask_slider(TOKENS, kind="hybrid", number=2)
    bundle = slider._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["image/svg+xml"] == slider.picture.value
    assert bundle["text/plain"].startswith("Picture: hybrid(2): 6 queries")


# ------------------------------------------------------------------------------------------------------ bad input
CANNOT_BE_SHOWN = {
    "a Mask instead of its cells": lambda: viz.mask_figure(masks.causal()),
    "weights as a mask": lambda: viz.mask_figure(weights()),
    "an additive mask": lambda: viz.mask_svg(masks.causal().additive(N)),
    "a batched mask": lambda: viz.mask_figure(masks.padding([2, 3]).dense(3)),
    "a mask of nothing": lambda: viz.mask_figure(torch.ones(0, 0).bool()),
    "a ragged grid": lambda: viz.mask_figure([[True], [True, False]]),
    "text": lambda: viz.mask_figure("causal"),
    "more queries than keys": lambda: viz.mask_figure(torch.ones(3, 2).bool()),
    "too few tokens": lambda: viz.mask_figure(CAUSAL, TOKENS[:-1]),
    "a text as tokens": lambda: viz.mask_figure(CAUSAL, "abcdef"),
    "no masks beside each other": lambda: viz.masks_side_by_side({}),
    "masks of different shape": lambda: viz.masks_side_by_side({"a": CAUSAL, "b": CAUSAL[:3, :3]}),
    "a said mask of another shape": lambda: viz.influence_figure(CAUSAL, CAUSAL[:3, :3]),
    "NaN weights": lambda: viz.attention_figure(torch.full((2, 2), float("nan"))),
    "scores for weights": lambda: viz.attention_figure(torch.tensor([[1.0, -1.0], [0.0, 1.0]])),
    "weights of a whole batch": lambda: viz.attention_figure(weights(2, 3)),
    "several heads in a pair": lambda: viz.attention_pair(weights(2), weights(2)),
    "a pair of different shape": lambda: viz.attention_pair(weights(), weights()[:3, :3]),
    "a road without steps": lambda: viz.road_svg([]),
    "a slider without tokens": lambda: viz.mask_slider([]),
    "a slider over a text": lambda: viz.mask_slider("the cat"),
    "a slider of an unknown kind": lambda: viz.mask_slider(TOKENS, kind="diagonal"),
}


@pytest.mark.parametrize("make", CANNOT_BE_SHOWN.values(), ids=CANNOT_BE_SHOWN.keys())
def test_what_cannot_be_shown_is_refused_with_a_sentence(make):
    with pytest.raises(MaskError) as refusal:
        make()
    assert isinstance(refusal.value, LabkitError)
    assert len(str(refusal.value).split()) >= 6


def test_importing_viz_loads_neither_plotly_nor_widgets():
    code = "import sys, labkit.viz.figures, labkit.viz.svg; print({'plotly', 'ipywidgets', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
