"""Heatmaps over queries and keys beside each other: the drawing that the figures of masks and attention share."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, DISAGREES, MASKED, label_step, short
from labkit.viz.themes import BETWEEN, PAPER, PRESENT, WEIGHTS

if TYPE_CHECKING:
    import plotly.graph_objects as go

WIDEST = 1000  # pixels for panels beside each other: what a notebook shows without scrolling
TOP_LEFT = {"x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 8}}
HOVER_SENTENCES = 4096  # up to so many cells each has a sentence of its own to show on hovering
FINE = 10_000  # beyond them, weights are kept as whole ten-thousandths: two bytes a cell


# ------------------------------------------------------------------------------------------------------ one panel
def mask_heatmap(
    cells: np.ndarray, queries: list[str], keys: list[str], verbs=("may look at", "may not look at"), total: int = 0
):
    """`verbs`: what a cell says that is True, and one that is False; `total`: as `cells` of `weight_heatmap`."""

    def sentence(query: str, key: str, i: int, j: int) -> str:
        return f"{query} {verbs[0] if cells[i, j] else verbs[1]} {key}"

    two = [[0, MASKED], [0.5, MASKED], [0.5, ALLOWED], [1, ALLOWED]]
    shown = sentences(queries, keys, sentence, cells.shape, total)
    return heatmap(cells.astype(np.uint8), shown, colorscale=two, zmin=0, zmax=1, showscale=False)


def weight_heatmap(
    weights: np.ndarray,
    queries: list[str],
    keys: list[str],
    top: float,
    scale: bool,
    cells: int = 0,
    name: str = "weight",
    verb: str = "looks at",
):
    """`cells`: how many the whole figure has, where there are several maps in it; `name` stands at the scale."""

    def sentence(query: str, key: str, i: int, j: int) -> str:
        return f"{query} {verb} {key}: {weights[i, j]:.3f}"

    shown = sentences(queries, keys, sentence, weights.shape, cells)
    return heatmap(**weights_kept(weights, shown is None, 0.0, top, name), sentences=shown, showscale=scale)


def weights_kept(
    weights: np.ndarray, many: bool, low: float, high: float, name: str, colours=WEIGHTS, bar: dict | None = None
) -> dict:
    """The options of a heatmap that hold its weights: as they are, or of `many` cells as whole ten-thousandths."""
    from labkit.viz.curves import round_ticks

    bar = {"title": {"text": name}, "len": 0.8, "thickness": 12, **(bar or {})}
    many = many and max(-low, high) * FINE < 2**15
    if not many:
        return {"values": weights.astype(np.float32), "colorscale": colours, "zmin": low, "zmax": high, "colorbar": bar}
    if low == 0:  # most weights among many tokens are small: colours by their root, so that those are seen
        colours = [[stop**2, colour] for stop, colour in colours]
        bar["title"] = {"text": f"{name}<br>(root scale)"}
    low, high = min(low, -2 / FINE) if low else 0.0, max(high, 2 / FINE)
    ticks = round_ticks(low, high, 6)
    bar |= {"tickvals": [tick * FINE for tick in ticks], "ticktext": [f"{tick:g}" for tick in ticks]}
    whole = np.rint(weights * FINE).astype(np.int16 if low else np.uint16)
    return {"values": whole, "colorscale": colours, "zmin": low * FINE, "zmax": high * FINE, "colorbar": bar}


def sentences(
    queries: list[str], keys: list[str], sentence: Callable, shape: tuple[int, int], cells: int = 0
) -> list[list[str]] | None:
    """One for each cell; None where the figure has too many of them."""
    if (cells or shape[0] * shape[1]) > HOVER_SENTENCES:
        return None
    return [
        [sentence(quoted(query), quoted(key), i, j) for j, key in enumerate(keys)] for i, query in enumerate(queries)
    ]


def heatmap(values: np.ndarray, sentences: list[list[str]] | None, **options):
    import plotly.graph_objects as go

    if sentences is None:
        value = {"u2": "%{z:,} of 10,000", "i2": "%{z:+,} of 10,000"}.get(values.dtype.str[1:], "%{z}")
        hover = {"hovertemplate": f"query %{{y}}, key %{{x}}: {value}<extra></extra>"}
    else:
        hover = {"hovertext": sentences, "hovertemplate": "%{hovertext}<extra></extra>"}
    gap = 1 if values.shape[1] <= 128 else 0
    return go.Heatmap(z=values, xgap=gap, ygap=gap, **hover, **options)


# ------------------------------------------------------------------------------------------------ the whole figure
def panels(
    heatmaps: list,
    names: list[str | None],
    queries: list[str],
    keys: list[str],
    title: str | None = None,
    subtitle: str | None = None,
    scale: bool = False,
    bars: int = 1,
    legend: bool = False,
) -> go.Figure:
    """The heatmaps in rows of up to four, square cells, tokens on both axes, and the staircase of the present."""
    from plotly.subplots import make_subplots

    q_len, kv_len = len(queries), len(keys)
    longest = 7 * max(len(short(token)) for token in keys)  # pixels, as are all lengths here
    columns = min(len(heatmaps), 4, max(1, (WIDEST + 200) // (kv_len + longest + 30)))  # no cell below one pixel
    rows = -(-len(heatmaps) // columns)
    least, room = (2, 704) if columns == 1 else (1, WIDEST // columns - longest - 30)
    cell = max(least, min(44, room // kv_len))
    panel_wide, panel_high = cell * kv_len + longest + 30, cell * q_len + longest + 50
    above = 30 * (title is not None) + 20 * (subtitle is not None)
    right = 20 + bars * 75 * scale
    wide, high = columns * panel_wide + 10 + right, rows * panel_high + above
    inner_wide, inner_high = wide - longest - 40 - right, high - longest - 50 - above

    figure = make_subplots(
        rows,
        columns,
        horizontal_spacing=(longest + 30) / inner_wide if columns > 1 else 0,
        vertical_spacing=(longest + 50) / inner_high if rows > 1 else 0,
    )
    for i, (trace, name) in enumerate(zip(heatmaps, names, strict=True)):
        where = {"row": i // columns + 1, "col": i % columns + 1}
        figure.add_trace(trace, **where)
        figure.update_xaxes(title=text(name or "looked at (key)"), **ticks(keys, cell), side="top", **where)
        figure.update_yaxes(**ticks(queries, cell), scaleanchor=f"x{i + 1 if i else ''}", **where)
        figure.update_xaxes(
            range=[-0.5, kv_len - 0.5], constrain="domain", tickangle=-45 if cell >= 24 else -90, **where
        )
        figure.update_yaxes(range=[q_len - 0.5, -0.5], constrain="domain", **where)
        figure.add_shape(type="path", path=staircase(q_len, kv_len), line={"width": 1.5, "color": PRESENT}, **where)
    figure.update_yaxes(title=text("looks (query)"), row=1, col=1)
    figure.update_layout(
        width=wide,
        height=high + 40 * legend,
        margin={"l": longest + 40, "r": right, "t": longest + 40 + above, "b": 10 + 40 * legend},
        title={**text(title or ""), "subtitle": text(subtitle or ""), **TOP_LEFT},
        showlegend=legend,
        legend={"orientation": "h", "y": -0.02, "yanchor": "top", "bgcolor": DISAGREES, "font": {"color": "black"}},
        plot_bgcolor=BETWEEN if scale else PAPER,
        font={"size": 13},
    )
    return figure


def cell_side(figure: go.Figure) -> float:
    """Pixels of a cell's side in the first panel of a figure made by `panels`."""
    layout = figure.layout
    low, high = layout.xaxis.domain
    inner = layout.width - layout.margin.l - layout.margin.r
    return inner * (high - low) / (layout.xaxis.range[1] - layout.xaxis.range[0])


def ticks(tokens: list[str], cell: int) -> dict:
    step = label_step(cell)
    shown = range(0, len(tokens), step)
    return {
        "tickmode": "array",
        "tickvals": list(shown),
        "ticktext": [escape(short(tokens[i]), quote=False) for i in shown],
        "tickfont": {"size": max(8, min(13, cell * step - 1))},
        "showgrid": False,
        "zeroline": False,
    }


def staircase(q_len: int, kv_len: int, x: float = 0, y: float = 0, scale: float = 1) -> str:
    """The border between a token's past and its future, as an SVG path in cells; its square begins at (x, y)."""
    first = kv_len - q_len
    corners = [(first + 0.5, -0.5)]
    for i in range(q_len):
        corners.append((first + i + 0.5, i + 0.5))
        if i + 1 < q_len:
            corners.append((first + i + 1.5, i + 0.5))
    moved = [f"{x + (a + 0.5) * scale - 0.5:g},{y + (b + 0.5) * scale - 0.5:g}" for a, b in corners]
    return "M " + " L ".join(moved)


def text(words: str) -> dict:
    return {"text": escape(words, quote=False)}


def quoted(token: str) -> str:
    return f'"{escape(token, quote=False)}"'


def same_shape(array: np.ndarray, reference: np.ndarray, what: str) -> None:
    if array.shape != reference.shape:
        raise MaskError(f"{what} has shape {array.shape}, and the one beside it {reference.shape}: they must be equal")
