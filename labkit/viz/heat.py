"""Heat maps: masks, attention, numbers per layer, verdicts. Arrays in, plotly figures out.

Rows are queries and columns are keys. The upper triangle, a token's future, is always shown, and a stepped line
separates it from the past. Hovering names the row, the column and the exact value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from labkit.attention.plain import clean, plain_array, weight_array
from labkit.errors import MaskError
from labkit.viz import style
from labkit.viz.panels import LETTER, WIDEST, Panel, drawn, steps
from labkit.viz.style import WEIGHTS, WRONG, bool_grid, future_of, token_labels


def mask_figure(masks, tokens: Sequence[str] | None = None, title: str | None = None, expected=None) -> go.Figure:
    """A mask, or several beside each other: an open cell (query may attend to key) is blue, a closed one grey.

    Args:
        masks: bool (q_len, kv_len), True = may attend; or `{heading: mask}`.
        tokens: one for each key.
        expected: bool (q_len, kv_len); cells that differ from it are red, with × where a cell is open that should be
            closed, and ○ where one is closed that should be open.

    Raises:
        MaskError: anything that is not a grid of True and False, or tokens that do not fit it.
    """
    grids = masks if isinstance(masks, Mapping) else {"": masks}
    colours = steps(style.MASKED, style.OPEN, WRONG)
    panels = []
    for heading, cells in grids.items():
        grid = bool_grid(cells, f"the mask {heading!r}" if heading else "the mask")
        ahead = (grid & future_of(*grid.shape)).sum() or "none"
        words = f"{grid.sum()} of {grid.size} cells open, {ahead} in the future"
        wrong = np.zeros_like(grid)
        if expected is not None:
            wrong = bool_grid(expected, "the expected mask")
            if wrong.shape != grid.shape:
                raise MaskError(f"the expected mask has shape {wrong.shape}, and the mask {grid.shape}")
            wrong = grid ^ wrong
            words += f"; {wrong.sum()} not as expected" if wrong.any() else "; all as expected"
        codes = np.where(wrong, 2, grid)
        panel = Panel(str(heading), codes, *token_labels(tokens, *grid.shape), colours, high=2, words=words)
        panel.texts = np.select([wrong & grid, wrong], ["×", "○"], "") if wrong.any() else None
        panel.hover = np.array(["closed", "open", "not as expected"])[codes]
        panels.append(panel)
    return _one_or_several(panels, title, "Attention mask")


def attention_figure(
    weights, tokens: Sequence[str] | None = None, title: str | None = None, name: str = "weight"
) -> go.Figure:
    """Attention weights on one colour scale from 0: darker is more. Up to 8 keys, each cell holds its number.

    `weights`: (q_len, kv_len), (heads, q_len, kv_len), or `{heading: (q_len, kv_len)}`. `name` is the quantity, if it
    is not attention: a rollout or a measured influence.

    Raises:
        MaskError: scores, NaN, or another shape.
    """
    if isinstance(weights, Mapping):
        maps = {str(name): weight_array(grid, f"the weights of {name!r}", (2,)) for name, grid in weights.items()}
    else:
        grids = weight_array(weights, dims=(2, 3))
        grids = grids[None] if grids.ndim == 2 else grids
        maps = {f"head {i}" if len(grids) > 1 else "": grid for i, grid in enumerate(grids)}
    top = max((float(grid.max()) for grid in maps.values()), default=0.0) or 1e-9
    panels = []
    for heading, grid in maps.items():
        words = f"{grid[future_of(*grid.shape)].sum() / len(grid):.0%} on the future"
        numbers = _numbers(grid) if grid.shape[1] <= 8 else None
        labels = token_labels(tokens, *grid.shape)
        panels.append(Panel(heading, grid.astype(float), *labels, WEIGHTS, 0, top, numbers, words=words))
    panels[0].scale = name
    return _one_or_several(panels, title, "Attention")


def values_figure(
    values, columns: Sequence[str], title: str | None = None, name: str = "value", rows: Sequence[str] | None = None
) -> go.Figure:
    """Numbers per layer and token (or head): `values` (rows, columns), from nearly white (0) to dark blue.

    `name` is the quantity, with its unit. `rows`: None numbers them "layer 0", "layer 1", and so on.
    """
    grid = plain_array(values, "values").astype(float)
    if grid.ndim != 2 or grid.shape[1] != len(columns) or not np.isfinite(grid).all():
        raise MaskError(f"values must be finite numbers of shape (rows, {len(columns)}), not {grid.shape}")
    rows = [f"layer {i}" for i in range(len(grid))] if rows is None else list(rows)
    low, high = min(0.0, float(grid.min())), max(float(grid.max()), 1e-9)
    panel = Panel("", grid, rows, columns, WEIGHTS, low, high, tokens=False)
    i, j = np.unravel_index(grid.argmax(), grid.shape)
    words = f"Largest {name}: {grid.max():.2f}, {rows[i]}, {clean(columns[j]).strip()}."
    if grid.shape[1] > 16:
        panel.scale = name
    else:  # the cells have room for their numbers
        panel.texts, words = _numbers(grid), f"In the cells: {name}."
    longest = max(len(text.strip()) for text in [*columns, *(panel.texts.flat if panel.texts is not None else [])])
    wide = max(36, 6 + LETTER * longest, min(80, 560 // len(columns)))
    wide = wide if wide * len(columns) < WIDEST - 200 else None
    return drawn([panel], title, words, wide=wide, high=20 if panel.scale else 28)


def category_figure(
    rows: Mapping[str, Sequence[str]],
    columns: Sequence[str],
    title: str | None = None,
    colours: Mapping[str, str] | None = None,
) -> go.Figure:
    """A table of words in colour: `{row: one word per column}`. "—" and "" are empty cells.

    "causal" and "bidirectional" have their own colours, `colours` names others, all other words are red. So that no
    one depends on colours, the words are in the cells where there is room, and on hovering.
    """
    palette = {"causal": style.CAUSAL, "bidirectional": style.BIDIRECTIONAL} | dict(colours or {})
    table = [list(map(str, words)) for words in rows.values()]
    if not table or any(len(words) != len(columns) for words in table):
        raise MaskError(f"category_figure needs one word for each of the {len(columns)} columns in every row")
    words = sorted({word for row in table for word in row} - {"—", ""}, key=lambda word: (word not in palette, word))
    codes = np.array([[words.index(word) if word in words else np.nan for word in row] for row in table], dtype=float)
    scale = steps(*(palette.get(word, WRONG) for word in words))
    panel = Panel("", codes, list(map(str, rows)), columns, scale, -0.5, len(words) - 0.5, tokens=False, on_top=True)
    panel.hover = np.array(table)
    longest = max([*map(len, words), *(len(line) for name in columns for line in name.split("\n"))])
    cell = max(26, longest * LETTER + 12)
    if cell * len(columns) <= WIDEST:
        panel.texts = panel.hover
        return drawn([panel], title, wide=cell, high=22)
    figure = drawn([panel], title, wide=26, high=22)  # a legend instead of words
    for word in words:
        marker = {"symbol": "square", "size": 11, "color": palette.get(word, WRONG)}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=word)
    legend = {"orientation": "h", "y": 0, "yanchor": "top", "x": 0}
    return figure.update_layout(showlegend=True, legend=legend, margin_b=34, height=figure.layout.height + 24)


def pooled(maps: np.ndarray, size: int) -> np.ndarray:
    """Maps (..., n, n) in at most `size` x `size` cells: sums over a cell's keys, means over its queries."""
    n = maps.shape[-1]
    if n <= size:
        return maps
    starts = np.arange(size) * n // size
    counts = np.diff(np.append(starts, n))
    summed = np.add.reduceat(np.add.reduceat(maps.astype(np.float32), starts, axis=-1), starts, axis=-2)
    return summed / counts[:, None]


def _one_or_several(panels: Sequence[Panel], title: str | None, name: str) -> go.Figure:
    """Panels beside each other; a single one has its heading, or else `name`, above the whole figure."""
    if len(panels) > 1:
        return drawn(panels, title)
    (panel,) = panels
    return drawn([replace(panel, heading="", words="")], title or panel.heading or name, f"{panel.words}.")


def _numbers(grid: np.ndarray) -> np.ndarray:
    def number(value: float) -> str:
        if abs(value) < 0.005:
            return "0"
        return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3g}"

    return np.vectorize(number)(grid)
