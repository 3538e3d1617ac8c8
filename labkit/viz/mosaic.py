"""Many maps of queries and keys in rows and columns, small, on one pair of axes: fast where panels would be slow.

Each cell is at least one pixel. Where there is no room for that, neighbouring tokens share a cell, and the figure says
so: a cell then holds the share of attention on its keys, averaged over its queries, so rows still sum to what they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from labkit.viz.grid import ALLOWED, MASKED, short
from labkit.viz.panels import HOVER_SENTENCES, TOP_LEFT, WIDEST, quoted, staircase, text, weights_kept
from labkit.viz.themes import BETWEEN, PRESENT
from labkit.viz.tokens import clean

if TYPE_CHECKING:
    import plotly.graph_objects as go

LABEL = 14  # pixels from one label to the next
LABELLED = 100  # pixels: tiles as wide as this carry labels
INFLUENCE = [[0, MASKED], [1, ALLOWED]]


@dataclass(frozen=True)
class Tile:
    """One map: weights (q_len, kv_len), its name above it, the row's name left of it, and what hovering calls it."""

    weights: np.ndarray
    above: str
    hover: str
    left: str = ""
    influence: bool = False


def mosaic(
    tiles: Sequence[Tile],
    columns: int,
    queries: list[str],
    keys: list[str],
    title: str | None = None,
    name: str = "weight",
    widest_tile: int = 300,
) -> go.Figure:
    """The tiles in rows of `columns`, on one scale from 0; without theme and text equivalent.

    Hovering names the query, the key and the value, exact to 1/10,000. Labels thin out as tokens become many.
    """
    import plotly.graph_objects as go

    rows, (q_len, kv_len) = -(-len(tiles) // columns), tiles[0].weights.shape
    side = max(16, min(widest_tile, (WIDEST - 100) // columns - 10))  # pixels for a tile
    each = -(-kv_len // side)  # tokens in a cell
    cell = max(1, min(44, side // -(-kv_len // each)))
    key_edges = np.arange(0, kv_len, each)
    query_edges = np.unique(np.maximum(0, np.arange(-(-kv_len // each)) * each - (kv_len - q_len)))
    wide, high = len(key_edges) * cell, len(query_edges) * cell  # pixels of a tile
    gap, head = (16 if wide >= LABELLED else 8), 20 if any(tile.above for tile in tiles[columns:]) else 0
    across, down = (wide + gap) / cell, (high + gap + head) / cell  # from one tile to the next, in cells

    shrunk = [_shrunk(tile.weights, query_edges, key_edges, kv_len) for tile in tiles]
    top = max([float(w.max()) for w, tile in zip(shrunk, tiles, strict=True) if not tile.influence], default=1.0)
    many = sum(w.size for w in shrunk) > HOVER_SENTENCES
    figure, border = go.Figure(), []
    for i, (tile, weights) in enumerate(zip(tiles, shrunk, strict=True)):
        row, column = divmod(i, columns)
        kept = weights_kept(weights, many, 0.0, max(top, 1e-9), name)
        if tile.influence:
            kept |= {"colorscale": INFLUENCE, "zmax": kept["zmax"] / max(top, 1e-9)}
        z = kept.pop("values")
        value = "%{z:,} of 10,000" if z.dtype == np.uint16 else "%{z:.3f}"
        hover = f"{escape(tile.hover)}<br>%{{y}} looks at %{{x}}: {value}<extra></extra>"
        place = {"x0": column * across, "y0": row * down, "dx": 1, "dy": 1, "showscale": i == 0}
        lines = {"xgap": 1, "ygap": 1} if cell >= 6 else {}
        figure.add_trace(go.Heatmap(z=z, hovertemplate=hover, **place, **lines, **kept))
        if cell >= 6:  # weights of 0 are nearly white: what shows between the cells tells them from the paper
            box = {"x0": column * across - 0.5, "y0": row * down - 0.5, "layer": "below", "line": {"width": 0}}
            box |= {"x1": box["x0"] + wide / cell, "y1": box["y0"] + high / cell, "fillcolor": BETWEEN}
            figure.add_shape(type="rect", **box)
        border.append(_border(q_len, kv_len, column * across, row * down, each, cell))
    figure.add_shape(type="path", path=" ".join(border), line={"width": 1.5 if cell >= 3 else 1, "color": PRESENT})

    longest = 7 * max(len(short(token)) for token in keys)
    left = 7 * max(len(tile.left) for tile in tiles) + longest + 24
    note = _note(each)
    above = 30 * (title is not None) + 20 * bool(note) + 30
    area_wide, area_high = columns * (wide + gap) - gap, rows * (high + gap + head) - gap - head
    x_all = _labels(keys, key_edges, each)
    y_all = _labels(queries, query_edges, each, kv_len - q_len)
    _axes(figure, "x", x_all, [across * c for c in range(columns)], area_wide / cell, cell, gap)
    _axes(figure, "y", y_all, [down * r for r in range(rows)], area_high / cell, cell, gap + head)
    for i, tile in enumerate(tiles):
        row, column = divmod(i, columns)
        where = {"showarrow": False, "font": {"size": 12}}
        if tile.above:
            spot = {"x": column * across + len(key_edges) / 2 - 0.5, "y": row * down - 0.5, "yanchor": "bottom"}
            figure.add_annotation(text=escape(tile.above), **spot, **where)
        if tile.left and column == 0:
            spot = {"xref": "paper", "x": 0, "xanchor": "right", "xshift": -longest - 16}
            figure.add_annotation(text=escape(tile.left), y=row * down + len(query_edges) / 2 - 0.5, **spot, **where)
    figure.update_layout(
        width=max(420, left + area_wide + 100),
        height=max(240, above + area_high + longest + 30),
        margin={"l": left, "r": max(420, left + area_wide + 100) - left - area_wide, "t": above},
        title={**text(title or ""), "subtitle": text(note), **TOP_LEFT},
        showlegend=False,
    )
    figure.update_layout(margin={"b": figure.layout.height - above - area_high})
    return figure


def _shrunk(weights: np.ndarray, query_edges: np.ndarray, key_edges: np.ndarray, kv_len: int) -> np.ndarray:
    """Sums over the keys of a cell, means over its queries."""
    if len(key_edges) == kv_len:
        return weights
    summed = np.add.reduceat(np.add.reduceat(weights, key_edges, axis=1), query_edges, axis=0)
    return summed / np.diff(np.append(query_edges, len(weights)))[:, None]


def _note(each: int) -> str:
    if each == 1:
        return ""
    return f"each cell stands for {each} × {each} tokens: the share of attention on its keys, averaged over its queries"


def _border(q_len: int, kv_len: int, x: float, y: float, each: int, cell: int) -> str:
    """The staircase; where its steps would be smaller than 3 pixels, the straight line through them."""
    if each == 1 and cell >= 3:
        return staircase(q_len, kv_len, x, y)
    return (
        f"M {x + (kv_len - q_len + 1) / each - 0.5:g},{y - 0.5:g} L {x + kv_len / each - 0.5:g},"
        f"{y + (q_len - 1) / each - 0.5:g}"
    )


def _labels(tokens: list[str], edges: np.ndarray, each: int, shift: int = 0) -> list[str]:
    """What hovering calls a row or a column: the token in full with its position, or the positions it stands for."""
    if each == 1:
        return [f"{quoted(clean(tokens[i]))} ({i + shift})" for i in edges]
    ends = [*edges[1:], len(tokens)]
    return [f"tokens {i + shift} to {end - 1 + shift}" for i, end in zip(edges, ends, strict=True)]


def _axes(figure: go.Figure, axis: str, names: list[str], starts: list[float], length: float, cell: int, gap: int):
    """One axis that knows every name, for hovering, under another that writes as many as there is room for."""
    import plotly.graph_objects as go

    n = len(names)
    spots = [start + i for start in starts for i in range(n)]
    span = [-0.5, length - 0.5] if axis == "x" else [length - 0.5, -0.5]
    plain = {"range": span, "showgrid": False, "zeroline": False, "showline": False, "ticks": "", "tickmode": "array"}
    side = "bottom" if axis == "x" else "left"
    figure.update_layout({f"{axis}axis": {**plain, "tickvals": spots, "ticktext": names * len(starts)}})
    figure.update_layout({f"{axis}axis": {"showticklabels": False}})
    step = -(-LABEL // cell)
    shown = range(0, n, step) if n * cell >= LABELLED else range(0)
    written = [names[i].rpartition(" (")[0][1:-1] if names[i].endswith(")") else names[i].split()[1] for i in shown]
    figure.update_layout(
        {
            f"{axis}axis2": {
                **plain,
                "overlaying": axis,
                "side": side,
                "tickvals": [start + i for start in starts for i in shown],
                "ticktext": [_cut(name) for name in written] * len(starts),
                "tickfont": {"size": 11},
                "tickangle": -90 if axis == "x" else 0,
            }
        }
    )
    if axis == "y":  # an axis without anything on it is not drawn
        hidden = {"mode": "markers", "opacity": 0, "hoverinfo": "skip", "xaxis": "x2", "yaxis": "y2"}
        figure.add_trace(go.Scatter(x=[0], y=[0], **hidden))


def _cut(name: str) -> str:
    from html import unescape

    return escape(short(unescape(name)), quote=False)
