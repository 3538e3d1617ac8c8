"""Saved figures, opened from disk in a real browser with the network blocked: drawn, explorable, without an error."""

import numpy as np
import pytest

from labkit import viz

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TOKENS = ["the", '<b>&"', "bank", "river"]
CAUSAL = np.tri(4, dtype=bool)
TEXT = "Marie Curie met Pierre <b>Curie</b> in Paris."


def softmax(*shape):
    weights = np.exp(np.random.default_rng(0).normal(size=shape) * 2)
    return weights / weights.sum(-1, keepdims=True)


FIGURES = {
    "mask": lambda: viz.mask_figure(CAUSAL, TOKENS),
    "masks": lambda: viz.masks_side_by_side({"a": CAUSAL, "b": ~CAUSAL | np.eye(4, dtype=bool)}, TOKENS),
    "said_and_measured": lambda: viz.said_and_measured(CAUSAL, CAUSAL | np.eye(4, k=1, dtype=bool), TOKENS),
    "attention": lambda: viz.attention_figure(softmax(2, 4, 4), TOKENS),
    "attention_512": lambda: viz.attention_figure(softmax(512, 512)),
    "pair": lambda: viz.attention_pair(np.eye(4), softmax(4, 4), TOKENS),
    "head_grid": lambda: viz.head_grid(softmax(12, 12, 64, 64)),
    "layer_strip": lambda: viz.layer_strip(softmax(6, 4, 4), TOKENS),
    "rollout": lambda: viz.rollout_figure(softmax(3, 4, 4), TOKENS, CAUSAL),
    "entropy": lambda: viz.entropy_figure(softmax(4, 3)),
    "future_mass": lambda: viz.future_mass_figure({"before": np.zeros((4, 3)), "after": softmax(4, 3)}),
    "fusion": lambda: viz.fusion_figure(softmax(3, 4), TOKENS, [None, 0, 1, 1], ["a", "b", "c"]),
    "runs": lambda: viz.runs_figure({"a": softmax(3, 5), "b": softmax(2, 5)}, range(5)),
    "leak_curves": lambda: viz.leak_curves_figure(range(5), {"a": softmax(3, 5)}, 0.3),
    "scores": lambda: viz.scores_figure({"a": [0.1, 0.2, 0.4], "b": [0.3, 0.2, 0.5]}),
}


@pytest.fixture
def opened(open_page, tmp_path):
    """Saves a figure and opens the file."""

    def opened(figure, name, theme="light"):
        page = open_page(width=1300, height=1200, theme=theme)
        page.goto(viz.save(figure, tmp_path / f"{name}.html").as_uri())
        return page

    return opened


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_from_disk_without_a_network(opened, name, theme):
    figure = viz.in_theme(FIGURES[name](), theme)
    page = opened(figure, name, theme)
    plot = page.locator(".js-plotly-plot .main-svg").first
    plot.wait_for(timeout=30_000)
    assert plot.evaluate("svg => [svg.clientWidth, svg.clientHeight]") == [figure.layout.width, figure.layout.height]
    maps = sum(trace.type == "heatmap" for trace in figure.data)
    assert page.locator(".heatmaplayer image").count() == maps
    assert all(page.locator(".heatmaplayer image").evaluate_all("all => all.map(i => i.getAttribute('width') > 0)"))
    paper = page.locator(".main-svg").first.evaluate("svg => getComputedStyle(svg).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 17, 17)"}[theme]
    assert page.locator("figure > [role=img]").get_attribute("aria-label") == viz.alt_text(figure)
    page.shoot(f"figure_{name}_{theme}")


def test_hovering_over_the_grid_of_heads_names_head_tokens_and_weight(opened):
    weights = softmax(2, 2, 4, 4)
    figure = viz.head_grid(weights, TOKENS)
    page = opened(figure, "grid")
    page.locator(".heatmaplayer image").nth(3).wait_for(timeout=30_000)
    box = page.locator(".heatmaplayer image").nth(3).bounding_box()  # layer 1, head 1
    x, y = box["x"] + box["width"] * 0.375, box["y"] + box["height"] * 0.875  # the second key, the last query
    page.mouse.move(x - 2, y - 2)
    page.mouse.move(x, y)
    label = page.locator(".hoverlayer .hovertext")
    label.wait_for(timeout=10_000)
    said = label.evaluate("node => node.textContent")
    assert said == f'layer 1, head 1"river" (3) looks at "<b>&"" (1): {weights[1, 1, 3, 1]:.3f}'


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_with_spans_wrap_and_read_on_light_and_dark_pages(opened, theme):
    answers = viz.answer_figure(TEXT * 20, [(0, 11, 0.6), (6, 11, 0.3), (0, 40, 0.1)], (0, 11))
    entities = viz.entities_figure(TEXT, [(0, 11, "PER"), (39, 44, "LOC")], [(0, 11, "PER"), (16, 22, "PER")])
    for name, figure in (("answers", answers), ("entities", entities)):
        page = opened(figure, name, theme)
        paragraph = page.locator("[role=figure] p").first
        assert paragraph.evaluate("p => p.scrollWidth <= p.clientWidth && p.clientWidth <= 820")
        ink = paragraph.evaluate("p => getComputedStyle(p).color")
        assert ink == {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}[theme]
        page.shoot(f"figure_{name}_{theme}")
