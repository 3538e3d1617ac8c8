"""Figures beside each other hold what they were given, stay small, and change theme without changing anything else."""

import json

import numpy as np
import pytest

from labkit import viz
from labkit.errors import MaskError
from labkit.viz import themes
from labkit.viz.panels import FINE, HOVER_SENTENCES

TOKENS = ["the", '<b>&"', "bank", "#0072B2", "flooded"]
N = len(TOKENS)
CAUSAL = np.tri(N, dtype=bool)


def softmax(*shape, causal=False, seed=0):
    scores = np.random.default_rng(seed).normal(size=shape) * 3
    if causal:
        scores = np.where(np.tri(*shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def heatmaps(figure):
    return [trace for trace in figure.data if trace.type == "heatmap"]


# ------------------------------------------------------------------------------------------- said beside measured
def test_the_said_mask_stands_beside_the_measured_influence_with_the_leak_marked_on_the_measured_one():
    measured = CAUSAL.copy()
    measured[0, 3], measured[4, 1] = True, False
    figure = viz.said_and_measured(CAUSAL, measured, TOKENS, "layer 3")
    said, found = heatmaps(figure)
    assert np.array_equal(said.z, CAUSAL)
    assert np.array_equal(found.z == 2, measured ^ CAUSAL) and np.array_equal((found.z == 1), measured & CAUSAL)
    signs = {t.name: (t.xaxis, t.yaxis, list(t.x), list(t.y)) for t in figure.data if t.type == "scatter"}
    assert signs == {"leak": ("x2", "y2", [3], [0]), "no influence": ("x2", "y2", [1], [4])}
    assert [figure.layout.xaxis.title.text, figure.layout.xaxis2.title.text] == ["said", "measured"]
    assert found.hovertext[0][3] == '"#0072B2" reaches "the", though the mask forbids it'
    assert "1 leaks, 1 without influence" in viz.alt_text(figure)


def test_one_leak_among_512_tokens_is_seen_beside_its_tiny_cell():
    said = np.tri(512, dtype=bool)
    measured = said.copy()
    measured[100, 300] = True
    figure = viz.said_and_measured(said, measured)
    (sign,) = [trace for trace in figure.data if trace.type == "scatter"]
    assert (sign.x[0], sign.y[0]) == (300, 100)
    assert sign.marker.size >= 6 and sign.marker.color == themes.LINES[1]  # white would be lost on the pale cells
    assert figure.layout.width < 1200


# ------------------------------------------------------------------------------------------------- 512 tokens
def test_weights_of_512_tokens_take_two_bytes_each_and_stay_right_to_a_ten_thousandth():
    weights = softmax(512, 512, causal=True)
    figure = viz.attention_figure(weights)
    (heatmap,) = heatmaps(figure)
    assert heatmap.z.dtype == np.uint16 and heatmap.hovertext is None
    assert np.abs(heatmap.z / FINE - weights).max() <= 0.5 / FINE + 1e-9
    assert heatmap.zmax == pytest.approx(weights.max() * FINE)
    assert [tick / FINE for tick in heatmap.colorbar.tickvals] == pytest.approx(
        [float(text) for text in heatmap.colorbar.ticktext]
    )
    assert len(figure.to_json()) < 900_000


def test_a_pair_of_512_tokens_keeps_the_sign_of_every_change():
    before, after = softmax(512, 512, causal=True), softmax(512, 512, seed=1)
    figure = viz.attention_pair(before, after)
    change = heatmaps(figure)[2]
    assert change.z.dtype == np.int16 and change.zmin == -change.zmax
    assert np.abs(change.z / FINE - (after - before)).max() <= 0.5 / FINE + 1e-9
    assert figure.layout.width < 1400 and len(figure.to_json()) < 3 * 900_000


def test_masks_of_512_tokens_take_one_byte_a_cell_and_no_cell_is_below_a_pixel():
    figure = viz.masks_side_by_side({name: np.tri(512, dtype=bool) for name in "abc"})
    assert all(heatmap.z.dtype == np.uint8 for heatmap in heatmaps(figure))
    assert len(figure.to_json()) < 3 * 400_000
    layout = figure.layout
    inner = layout.width - layout.margin.l - layout.margin.r
    assert inner * (layout.xaxis.domain[1] - layout.xaxis.domain[0]) >= 510
    assert layout.width < 1200


def test_sentences_are_kept_for_few_cells_of_the_whole_figure_only():
    n = 40
    assert 2 * n * n < HOVER_SENTENCES < 3 * n * n
    assert heatmaps(viz.attention_figure(softmax(2, n, n)))[0].hovertext is not None
    assert heatmaps(viz.attention_figure(softmax(3, n, n)))[0].hovertext is None


# ------------------------------------------------------------------------------------------------------- themes
@pytest.fixture
def theme_put_back():
    yield
    viz.use_theme("light")


def colours(part, key=""):
    """Every colour a figure names."""
    if isinstance(part, dict):
        return {found for name, value in part.items() for found in colours(value, name)}
    if isinstance(part, (list, tuple)):
        return {found for value in part for found in colours(value, key)}
    return {part} if isinstance(part, str) and (key.endswith("color") or key.startswith("color")) else set()


def brightness(colour):
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    bright, dark = sorted((brightness(one), brightness(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_the_dark_theme_exchanges_colours_and_nothing_else():
    light = viz.attention_pair(softmax(N, N, causal=True), softmax(N, N), TOKENS)
    dark = viz.in_theme(light, "dark")
    assert dark.layout.template.layout.paper_bgcolor == "#111111" != light.layout.template.layout.paper_bgcolor
    assert list(dark.layout.xaxis.ticktext) == list(light.layout.xaxis.ticktext)  # with the token "#0072B2"
    assert np.array_equal(heatmaps(dark)[0].z, heatmaps(light)[0].z)
    assert viz.alt_text(dark) == viz.alt_text(light)
    assert not colours(dark.to_plotly_json()) & (set(themes.DARK) - set(themes.DARK.values()))
    assert json.loads(viz.in_theme(dark, "light").to_json()) == json.loads(light.to_json())
    assert json.loads(viz.in_theme(dark, "dark").to_json()) == json.loads(dark.to_json())


def test_see_through_colours_change_with_the_theme():
    figure = viz.runs_figure({"a": [[1.0, 2.0], [2.0, 2.5]]}, [0, 1])
    dark = viz.in_theme(figure, "dark")
    assert figure.data[0].fillcolor == themes.faint(themes.LINES[0], 0.22)
    assert dark.data[0].fillcolor == themes.faint(themes.DARK[themes.LINES[0]], 0.22)


def test_the_theme_in_use_is_that_of_every_new_figure(theme_put_back):
    viz.use_theme("dark")
    assert viz.mask_figure(CAUSAL).layout.meta["theme"] == "dark"
    viz.use_theme("light")
    assert viz.mask_figure(CAUSAL).layout.meta["theme"] == "light"


def test_every_colour_of_the_dark_theme_leads_back_to_one_of_the_light_theme():
    assert len(set(themes.DARK.values())) == len(themes.DARK)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_letters_and_lines_are_read_on_their_paper(theme):
    shown = (lambda colour: colour) if theme == "light" else themes.DARK.__getitem__
    paper = shown(themes.PAPER)
    assert contrast(shown(themes.INK), paper) >= 7 and contrast(shown(themes.GREY), paper) >= 4.5
    for line in themes.LINES[:3]:
        assert contrast(shown(line), paper) >= 3
    assert len({shown(line) for line in themes.LINES}) == 6


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_more_weight_is_further_from_the_paper(theme):
    scale = [colour if theme == "light" else themes.DARK[colour] for _, colour in themes.WEIGHTS]
    steps = np.diff([brightness(colour) for colour in scale])
    assert (steps < 0).all() if theme == "light" else (steps > 0).all()


@pytest.mark.parametrize("make", [lambda: viz.use_theme("sepia"), lambda: viz.in_theme(viz.mask_figure(CAUSAL), "x")])
def test_unknown_themes_are_refused(make):
    with pytest.raises(MaskError, match="'light' or 'dark'"):
        make()


def test_a_foreign_figure_has_no_theme_to_change():
    import plotly.graph_objects as go

    with pytest.raises(MaskError, match="not made by labkit"):
        viz.in_theme(go.Figure(), "dark")


def test_said_and_measured_of_different_shape_are_refused():
    with pytest.raises(MaskError, match="must be equal"):
        viz.said_and_measured(CAUSAL, CAUSAL[:3, :3])
