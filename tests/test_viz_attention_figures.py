"""Figures of all heads, all layers, rollout, numbers per head and fusion hold the data given and say what they show."""

import numpy as np
import pytest
import torch

from labkit import viz
from labkit.errors import MaskError
from labkit.viz.panels import FINE

TOKENS = ["the", '<b>&"', "\n", "river", "supercalifragilistic"]
N = len(TOKENS)
CAUSAL = np.tri(N, dtype=bool)


def softmax(*shape, causal=False, seed=0):
    scores = np.random.default_rng(seed).normal(size=shape) * 2
    if causal:
        scores = np.where(np.tri(*shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def heatmaps(figure):
    return [trace for trace in figure.data if trace.type == "heatmap"]


def hovered(figure, trace, row, column):
    """What hovering over a cell says, put together as the browser does: from the axes' own names of the places."""
    x_names = dict(zip(figure.layout.xaxis.tickvals, figure.layout.xaxis.ticktext, strict=True))
    y_names = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    words = trace.hovertemplate.replace("%{x}", x_names[trace.x0 + column]).replace("%{y}", y_names[trace.y0 + row])
    return words.replace("%{z:.3f}", f"{trace.z[row, column]:.3f}").replace("%{z:,}", f"{trace.z[row, column]:,}")


# ---------------------------------------------------------------------------------------------------- all heads
def test_head_grid_places_every_head_in_its_layers_row_on_one_scale():
    weights = softmax(2, 3, N, N)
    figure = viz.head_grid(weights, TOKENS)
    traces = heatmaps(figure)
    assert len(traces) == 6
    for trace, head in zip(traces, weights.reshape(6, N, N), strict=True):
        assert np.allclose(trace.z, head, atol=1e-6)
        assert trace.zmin == 0 and trace.zmax == pytest.approx(weights.max())
    rows, columns = [trace.y0 for trace in traces], [trace.x0 for trace in traces]
    assert rows[:3] == [rows[0]] * 3 and rows[3] >= rows[0] + N  # below, without overlap
    assert columns[0] + N <= columns[1] and columns[1] + N <= columns[2] and columns[3:] == columns[:3]
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]  # the first query is on top
    shown = [annotation.text for annotation in figure.layout.annotations]
    assert shown == ["head 0", "layer 0", "head 1", "head 2", "layer 1"]


def test_hovering_over_a_head_names_it_and_both_tokens_and_the_exact_weight():
    weights = softmax(2, 3, N, N)
    figure = viz.head_grid(weights, TOKENS)
    words = hovered(figure, heatmaps(figure)[4], 3, 1)
    start = 'layer 1, head 1<br>"river" (3) looks at "&lt;b&gt;&amp;"" (1): '
    assert words == f"{start}{weights[1, 1, 3, 1]:.3f}<extra></extra>"
    assert '"⏎" (2)' in hovered(figure, heatmaps(figure)[0], 2, 2)


def test_twelve_layers_of_twelve_heads_of_64_tokens_stay_exact_and_small():
    weights = softmax(12, 12, 64, 64, causal=True)
    figure = viz.head_grid(torch.from_numpy(weights))
    for trace, head in zip(heatmaps(figure), weights.reshape(144, 64, 64), strict=True):
        assert np.abs(trace.z / FINE - head).max() <= 0.501 / FINE
    assert "of 10,000" in hovered(figure, heatmaps(figure)[143], 63, 0)
    assert len(figure.to_json()) < 2_000_000 and figure.layout.width <= 1150
    assert figure.layout.title.subtitle.text == ""  # nothing was left out


def test_tokens_that_share_a_cell_keep_their_attention_and_the_figure_says_so():
    weights = softmax(1, 4, 500, 500, causal=True)
    figure = viz.head_grid(weights)
    assert figure.layout.title.subtitle.text.startswith("each cell stands for 3 × 3 tokens")
    z = heatmaps(figure)[2].z / FINE
    assert z.shape == (167, 167)  # 500 / 3, the last cell stands for two
    assert np.allclose(z.sum(1), 1, atol=167 * 0.5 / FINE)  # rows still sum to 1
    assert z[10, 4] == pytest.approx(weights[0, 2, 30:33, 12:15].sum(1).mean(), abs=1 / FINE)
    assert z[166, 166] == pytest.approx(weights[0, 2, 498:, 498:].sum(1).mean(), abs=1 / FINE)
    assert (z[np.triu_indices(167, 1)] == 0).all()
    assert "tokens 30 to 32 looks at tokens 12 to 14" in hovered(figure, heatmaps(figure)[2], 10, 4)


@pytest.mark.parametrize("n", [5, 64, 512])
def test_labels_of_a_strip_thin_out_and_do_not_overlap(n):
    figure = viz.layer_strip(softmax(3, n, n))
    axis, layout = figure.layout.xaxis2, figure.layout
    pixels = (layout.width - layout.margin.l - layout.margin.r) / (axis.range[1] - axis.range[0])
    assert len(axis.tickvals) >= 3 * 5
    assert np.diff(sorted(axis.tickvals)).min() * pixels >= 12
    assert len(figure.to_json()) < 600_000


def test_the_alt_text_says_where_the_future_is_seen():
    weights = softmax(2, 2, N, N, causal=True)
    weights[1, 0] = np.roll(np.eye(N), 1, 1)  # every token looks at the next, the last at the first
    alt = viz.alt_text(viz.head_grid(weights))
    assert "2 layers of 2 heads, 5 queries and 5 keys" in alt
    assert "most in layer 1, head 0 (80%). By layer: 0%, 40%." in alt


def test_cached_decoding_draws_the_last_queries():
    figure = viz.head_grid(softmax(1, 2, 2, N), TOKENS)
    assert heatmaps(figure)[0].z.shape == (2, N)
    assert '"river" (3) looks at "the" (0)' in hovered(figure, heatmaps(figure)[0], 0, 0)


# --------------------------------------------------------------------------------------------------- all layers
def test_layer_strip_is_one_map_per_layer_and_of_heads_their_mean():
    weights = softmax(4, 3, N, N)
    figure = viz.layer_strip(weights, TOKENS)
    for trace, layer in zip(heatmaps(figure), weights.mean(1), strict=True):
        assert np.allclose(trace.z, layer, atol=1e-6)
    assert "4 layers, mean over the heads" in viz.alt_text(figure)
    single = viz.layer_strip(weights[:, 0], TOKENS)
    assert np.allclose(heatmaps(single)[3].z, weights[3, 0], atol=1e-6)
    assert "mean over" not in viz.alt_text(single)


def test_rollout_stands_beside_the_measured_influence():
    rollout, influence = softmax(N, N, causal=True), CAUSAL.copy()
    influence[0, 3] = True
    figure = viz.rollout_figure(rollout, TOKENS, influence)
    first, second = heatmaps(figure)
    assert np.allclose(first.z, rollout, atol=1e-6) and np.array_equal(second.z, influence)
    assert first.hovertext[3][0].startswith('"river" draws on "the": 0.')
    assert second.hovertext[0][3] == '"the" is reached by "river"'
    assert "all layers together" in viz.alt_text(figure) and "1 of them in the future" in viz.alt_text(figure)


def test_rollout_layer_by_layer_ends_with_the_influence():
    rollout = softmax(3, N, N, causal=True)
    figure = viz.rollout_figure(rollout, TOKENS, CAUSAL)
    *layers, influence = heatmaps(figure)
    for trace, layer in zip(layers, rollout, strict=True):
        assert np.allclose(trace.z, layer, atol=1e-6)
    assert np.array_equal(influence.z, CAUSAL) and influence.zmax == pytest.approx(1)
    assert [a.text for a in figure.layout.annotations][-1] == "influence"
    assert len(heatmaps(viz.rollout_figure(rollout))) == 3


# ------------------------------------------------------------------------------------------------ numbers per head
def test_future_mass_before_and_after_are_maps_on_one_scale_and_lines_by_layer():
    before, after = np.zeros((4, 3)), np.random.default_rng(0).uniform(0, 0.5, size=(4, 3))
    after[2, 1] = 0.9
    figure = viz.future_mass_figure({"causal": before, "bidirectional": after})
    first, second = heatmaps(figure)
    assert np.allclose(first.z, before) and np.allclose(second.z, after)
    assert (first.zmin, first.zmax) == (second.zmin, second.zmax) == (0, 1)
    assert second.hovertext[2][1] == "layer 2, head 1: 0.900"
    lines = {trace.name: trace.x for trace in figure.data if trace.type == "scatter" and "lines" in trace.mode}
    assert np.allclose(lines["bidirectional"], after.mean(1)) and (lines["causal"] == 0).all()
    spots = [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "markers"]
    assert np.allclose(spots[1].x, after.ravel()) and list(spots[1].y) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    alt = viz.alt_text(figure)
    assert "causal: 0 in every head." in alt and "most 0.90 in layer 2, head 1" in alt


def test_entropy_is_scaled_to_its_largest_and_names_its_unit():
    entropy = np.array([[0.0, 1.5], [3.0, 0.5]])
    figure = viz.entropy_figure(entropy, unit="bits")
    (heatmap,) = heatmaps(figure)
    assert np.allclose(heatmap.z, entropy) and heatmap.zmax == 3
    assert heatmap.colorbar.title.text == "entropy, bits"
    assert list(heatmap.text[0]) == ["0", "1.5"]
    assert "Mean 1.25, most 3.00 in layer 1, head 0" in viz.alt_text(figure)


# ------------------------------------------------------------------------------------------------------------ fusion
FUSED = np.array([[0.1, 0.2, 0.3, 0.0, 0.1, 0.3], [0.0, 0.0, 0.1, 0.1, 0.1, 0.1]])
SEGMENTS = [None, 0, 0, 1, 1, 1]


def test_fusion_sums_each_generated_tokens_attention_by_paraphrase():
    figure = viz.fusion_figure(FUSED, list("sabcde"), SEGMENTS, ["Paris", "<b>"])
    (heatmap,) = heatmaps(figure)
    assert np.allclose(heatmap.z, FUSED)
    bars = {trace.name: trace.x for trace in figure.data if trace.type == "bar"}
    assert list(bars) == ["shared", "paraphrase 0", "paraphrase 1", "tokens generated before"]
    assert np.allclose(bars["shared"], [0.1, 0]) and np.allclose(bars["paraphrase 0"], [0.5, 0.1])
    assert np.allclose(bars["paraphrase 1"], [0.4, 0.3]) and np.allclose(bars["tokens generated before"], [0, 0.6])
    assert np.allclose(sum(bars.values()), 1)
    assert heatmap.hovertext[1][3] == '"&lt;b&gt;" looks at "c" of paraphrase 1: 0.100'
    ends = [shape.x0 for shape in figure.layout.shapes if shape.type == "line"]
    assert ends == [0.5, 2.5]  # where one segment follows another
    alt = viz.alt_text(figure)
    assert '"Paris" looks most at paraphrase 0 (50%).' in alt
    assert '"<b>" looks most at tokens generated before (60%).' in alt


def test_more_generated_tokens_than_context_and_names_of_segments():
    figure = viz.fusion_figure(softmax(9, 4), list("abcd"), ["x", "x", "y", "y"], list("123456789"), {"x": "Who?"})
    bars = [trace.name for trace in figure.data if trace.type == "bar"]
    assert bars == ["Who?", "paraphrase y"]


def test_many_segments_differ_in_colour_or_hatching():
    figure = viz.fusion_figure(softmax(2, 16), list("abcdefghijklmnop"), [i // 2 for i in range(16)], ["a", "b"])
    looks = {(trace.marker.color, trace.marker.pattern.shape) for trace in figure.data if trace.type == "bar"}
    assert len(looks) == 8


# ------------------------------------------------------------------------------------------------------ bad input
CANNOT_BE_SHOWN = {
    "a head grid of one layer's shape": lambda: viz.head_grid(softmax(3, N, N)),
    "a head grid of a batch": lambda: viz.head_grid(softmax(1, 2, 2, N, N)),
    "scores for weights": lambda: viz.head_grid(np.random.default_rng(0).normal(size=(2, 2, N, N))),
    "NaN": lambda: viz.layer_strip(np.full((2, N, N), np.nan)),
    "a strip of a single map": lambda: viz.layer_strip(softmax(N, N)),
    "too few tokens": lambda: viz.head_grid(softmax(1, 1, N, N), TOKENS[1:]),
    "influence of another shape": lambda: viz.rollout_figure(softmax(N, N), None, CAUSAL[:3, :3]),
    "weights as influence": lambda: viz.rollout_figure(softmax(N, N), None, softmax(N, N)),
    "masses above 1": lambda: viz.future_mass_figure([[0.2, 1.7]]),
    "a negative entropy": lambda: viz.entropy_figure([[-1.0, 1.0]]),
    "NaN entropy": lambda: viz.entropy_figure([[float("nan"), 1.0]]),
    "one number for each layer": lambda: viz.entropy_figure([1.0, 2.0]),
    "maps of different shape": lambda: viz.entropy_figure({"a": [[1.0]], "b": [[1.0, 2.0]]}),
    "nothing to compare": lambda: viz.future_mass_figure({}),
    "too few segments": lambda: viz.fusion_figure(FUSED, list("sabcde"), [0, 1], ["a", "b"]),
    "too few generated tokens": lambda: viz.fusion_figure(FUSED, list("sabcde"), SEGMENTS, ["a"]),
    "rows above 1": lambda: viz.fusion_figure(FUSED * 2, list("sabcde"), SEGMENTS, ["a", "b"]),
    "fusion of several heads": lambda: viz.fusion_figure(FUSED[None], list("sabcde"), SEGMENTS, ["a", "b"]),
    "negative fusion weights": lambda: viz.fusion_figure(-FUSED, list("sabcde"), SEGMENTS, ["a", "b"]),
}


@pytest.mark.parametrize("make", CANNOT_BE_SHOWN.values(), ids=CANNOT_BE_SHOWN.keys())
def test_what_cannot_be_shown_is_refused_with_a_sentence(make):
    with pytest.raises(MaskError) as refusal:
        make()
    assert len(str(refusal.value).split()) >= 6
