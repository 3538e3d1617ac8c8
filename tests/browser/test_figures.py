"""Saved figures and texts in a real browser with the network blocked: all are drawn, and sliders work."""

import numpy as np
import pytest

from labkit import masks, viz

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TOKENS = ["the", '<b>&"', "bank", "river"]
CAUSAL = np.tri(4, dtype=bool)
TEXT = "Marie Curie met Pierre <b>Curie</b> in Paris."
WORDS = ["causal", "bidirectional", "—", "leak"]
PREDICTED = [(token, 0.5) for token in TOKENS]
EXAMPLE = {"name": "MLM", "inputs": ["the", "[MASK]", "bank", "river"], "targets": [None, TOKENS[1], None, None]}
INTERVALS = {"qa": {"causal": (1.0, 0.5, 2.0), "b": (1.0, None, None)}}


def softmax(*shape):
    weights = np.exp(np.random.default_rng(0).normal(size=shape) * 2)
    return weights / weights.sum(-1, keepdims=True)


FIGURES = {
    "mask": lambda: viz.mask_figure(CAUSAL, TOKENS, "<b>", expected=np.eye(4, dtype=bool)),
    "masks": lambda: viz.mask_figure({"a": CAUSAL, "b": ~CAUSAL}, TOKENS),
    "attention": lambda: viz.attention_figure(softmax(5, 4, 4), TOKENS),
    "attention_512": lambda: viz.attention_figure(softmax(512, 512)),
    "values": lambda: viz.values_figure(softmax(6, 4), TOKENS, name="share"),
    "categories": lambda: viz.category_figure({"layer": WORDS}, TOKENS),
    "curves": lambda: viz.curves_figure(range(1, 6), {"a": softmax(3, 5)}, floor=0.3, log_x=True),
    "curves_slider": lambda: viz.curves_slider(range(4), {"a": softmax(3, 4)}, {"a": TOKENS}),
    "stacked": lambda: viz.stacked_slider({"m": {"1": {"full": {"w": 1.0}}}}, "title", "rows", "GB"),
    "forest": lambda: viz.forest_figure(INTERVALS, marks={"claim": 5}),
    "objectives": lambda: viz.objectives_figure(TOKENS, [EXAMPLE] * 2),
    "walk": lambda: viz.walk_figure(TOKENS, CAUSAL, PREDICTED, [*TOKENS[1:], None]),
    "fill_ins": lambda: viz.fill_ins_figure(TOKENS, 1, {"a": PREDICTED, "b": []}, TOKENS[1]),
    "windows": lambda: viz.windows_figure([(0, 9), (5, 14)], (8, 9), 15),
}


SHOWS = """([plot, cells]) => {
    const drawn = plot.calcdata.find(([trace]) => trace.z)[0].z.map((row) => Array.from(row));
    return JSON.stringify(drawn) === JSON.stringify(cells);
}"""


@pytest.fixture
def opened(open_page, tmp_path):
    """Save figures as a page, open the file from disk, and return the page."""

    def opened(*figures):
        figures[0].write_html(tmp_path / "first.html", include_plotlyjs="directory")  # and plotly.min.js beside it
        parts = [figure.to_html(full_html=False, include_plotlyjs=False) for figure in figures]
        library = '<!doctype html><meta charset="utf-8"><script src="plotly.min.js"></script>'
        (tmp_path / "page.html").write_text(library + "".join(parts), encoding="utf-8")
        page = open_page(width=1000, height=1200)
        page.goto((tmp_path / "page.html").as_uri())
        page.locator(".js-plotly-plot .main-svg:first-child").nth(len(figures) - 1).wait_for(timeout=30_000)
        return page

    return opened


def test_every_figure_is_drawn_from_disk_without_a_network(opened):
    figures = {name: make() for name, make in FIGURES.items()}
    page = opened(*figures.values())
    for (name, figure), plot in zip(figures.items(), page.locator(".js-plotly-plot").all(), strict=True):
        size = plot.locator(".main-svg").first.evaluate("svg => [svg.clientWidth, svg.clientHeight]")
        assert size == [figure.layout.width, figure.layout.height], name
        widths = plot.locator(".heatmaplayer image").evaluate_all("all => all.map(i => i.getAttribute('width'))")
        shown = [trace for trace in figure.data if trace.type == "heatmap" and trace.visible is not False]
        assert len(widths) == len(shown) and all(float(width) > 0 for width in widths), name
    page.shoot("figures")


def test_moving_a_slider_changes_the_drawn_cells_and_leaves_the_plot_where_it_is(opened):
    grids = {str(w): masks.sliding_window(w).dense(6) for w in (1, 3, 6)}
    page = opened(viz.slider({w: viz.mask_figure(grid) for w, grid in grids.items()}, "window", 1))
    image, rail = page.locator(".heatmaplayer image"), page.locator(".slider-rail-touch-rect")
    places = [image.bounding_box()]
    for step, w in enumerate(grids):
        before = image.get_attribute("href")
        rail.click(position={"x": max(1, rail.bounding_box()["width"] * step / 2 - 1), "y": 2})
        page.get_by_text(f"window: {w}", exact=True).wait_for()
        cells = [page.locator(".js-plotly-plot").element_handle(), grids[w].int().tolist()]
        page.wait_for_function(SHOWS, arg=cells, timeout=10_000)  # the cells follow the label
        page.wait_for_function("([i, old]) => i.getAttribute('href') !== old", arg=[image.element_handle(), before])
        places.append(image.bounding_box())
    assert places == places[:1] * 4


def test_hovering_over_a_cell_shows_its_tokens_and_its_weight(opened):
    weights = softmax(4, 4)
    page = opened(viz.attention_figure(weights, TOKENS))
    box = page.locator(".heatmaplayer image").bounding_box()
    x, y = box["x"] + box["width"] * 1.5 / 4, box["y"] + box["height"] * 3.5 / 4  # the last query, the second key
    page.mouse.move(x - 2, y - 2)
    page.mouse.move(x, y)
    label = page.locator(".hoverlayer .hovertext")
    label.wait_for(timeout=10_000)
    text = label.text_content().translate({0x200B: None, 0x200C: None})
    assert text == f'river, <b>&": {weights[3, 1]:.3f}'


@pytest.mark.parametrize(("theme", "ink"), [("light", "rgb(0, 0, 0)"), ("dark", "rgb(255, 255, 255)")])
def test_texts_wrap_and_have_the_colour_of_the_page(open_page, theme, ink):
    answers = viz.answer_figure(TEXT * 20, [(0, 11, 0.6), (6, 11, 0.3), (0, 40, 0.1)])
    entities = viz.entities_figure(TEXT, [(0, 11, "PER"), (39, 44, "LOC")], [(0, 11, "PER"), (16, 22, "PER")])
    page = open_page(390, 900, theme)
    outputs = viz.stacked({"a": answers, "e": entities})
    page.set_content(f'<meta name="color-scheme" content="light dark">{outputs}')
    for paragraph in page.locator("[role=figure] p").all():
        assert paragraph.evaluate("p => p.scrollWidth <= p.clientWidth && p.clientWidth <= 820")
        assert paragraph.evaluate("p => getComputedStyle(p).color") == ink
    page.shoot(f"figure_text_{theme}")


def test_a_probe_shows_the_states_of_the_chosen_model_batch_and_word(open_page):
    measured = {"causal": {"alone": CAUSAL, "padded": CAUSAL}, "open": {"alone": CAUSAL | True, "padded": CAUSAL}}
    page = open_page(900, 400)
    page.set_content(viz.probe_figure(TOKENS, measured))
    chosen = {"model": "causal", "batch": "alone", "word": 3}

    def changed():
        return [state.inner_text() for state in page.locator(".labkit-changed").all()]

    assert changed() == [TOKENS[3]]
    for name, value in [("model", "open"), ("batch", "padded"), ("word", 1), ("model", "causal"), ("batch", "alone")]:
        chosen[name] = value
        text = TOKENS[value] if name == "word" else value
        page.locator("button", has_text=text).first.click()
        cells = measured[chosen["model"]][chosen["batch"]][:, chosen["word"]]
        assert changed() == [token for token, is_changed in zip(TOKENS, cells, strict=True) if is_changed]
