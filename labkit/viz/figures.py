"""Interactive figures of masks, attention and influence: plain arrays in, a plotly `Figure` out.

Rows are queries (who looks), columns are keys (who is looked at). The upper triangle, a token's future, is always
shown; a thin staircase separates it from the past. The text equivalent of a figure is `alt_text(figure)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import (
    ALLOWED,
    DISAGREES,
    MASKED,
    attention_in_words,
    bool_grid,
    mask_in_words,
    token_labels,
    weight_grids,
)
from labkit.viz.panels import (
    cell_side,
    heatmap,
    mask_heatmap,
    panels,
    same_shape,
    sentences,
    weight_heatmap,
    weights_kept,
)
from labkit.viz.themes import DIFFERENCE, INK, finished

if TYPE_CHECKING:
    import plotly.graph_objects as go


def mask_figure(cells, tokens: Sequence[str] | None = None, title: str | None = None) -> go.Figure:
    """A mask: `cells` bool (q_len, kv_len), True = may attend; `tokens` one for each key."""
    cells = bool_grid(cells)
    queries, keys = token_labels(tokens, *cells.shape)
    figure = panels([mask_heatmap(cells, queries, keys)], [None], queries, keys, title)
    return finished(figure, mask_in_words(cells, queries, keys, title))


def masks_side_by_side(masks: Mapping[str, object], tokens: Sequence[str] | None = None) -> go.Figure:
    """Several masks of one shape, `{title: cells}`, beside each other."""
    if not isinstance(masks, Mapping) or not masks:
        raise MaskError("masks_side_by_side takes a dictionary {title: cells} with at least one mask")
    grids = {str(title): bool_grid(cells, f"the cells of {title!r}") for title, cells in masks.items()}
    first = next(iter(grids.values()))
    for title, cells in grids.items():
        same_shape(cells, first, f"the mask {title!r}")
    queries, keys = token_labels(tokens, *first.shape)
    figure = panels([mask_heatmap(cells, queries, keys) for cells in grids.values()], list(grids), queries, keys)
    words = [mask_in_words(cells, queries, keys, name, len(grids) == 1) for name, cells in grids.items()]
    return finished(figure, " ".join(words))


def influence_figure(influence, said=None, tokens: Sequence[str] | None = None, title: str | None = None) -> go.Figure:
    """The measured influence, bool (q_len, kv_len), True = changing the key changed the query's output.

    With the mask that was `said`, the cells that disagree stand out in a third colour and carry a sign: a cross where a
    masked key had influence (a leak), a ring where an allowed key had none.
    """
    influence, said, queries, keys = _both(influence, said, tokens)
    return _with_signs(
        [_influence_heatmap(influence, said, queries, keys)], [None], influence, said, queries, keys, title
    )


def said_and_measured(said, influence, tokens: Sequence[str] | None = None, title: str | None = None) -> go.Figure:
    """The mask that was said, and beside it the influence that was measured; both bool (q_len, kv_len).

    On the right, what disagrees is marked as in `influence_figure`.
    """
    influence, said, queries, keys = _both(influence, bool_grid(said, "the said mask"), tokens)
    heatmaps = [mask_heatmap(said, queries, keys), _influence_heatmap(influence, said, queries, keys)]
    return _with_signs(heatmaps, ["said", "measured"], influence, said, queries, keys, title)


def attention_figure(weights, tokens: Sequence[str] | None = None, title: str | None = None) -> go.Figure:
    """Attention weights, (q_len, kv_len) or (heads, q_len, kv_len): one map per head, on one scale from 0."""
    maps = weight_grids(weights)
    queries, keys = token_labels(tokens, *maps.shape[1:])
    names = [None] if len(maps) == 1 else [f"head {i}" for i in range(len(maps))]
    top = max(float(maps.max()), 1e-9)
    heatmaps = [weight_heatmap(grid, queries, keys, top, i == 0, maps.size) for i, grid in enumerate(maps)]
    figure = panels(heatmaps, names, queries, keys, title, scale=True)
    return finished(figure, attention_in_words(maps, queries, keys, title))


def attention_pair(
    before,
    after,
    tokens: Sequence[str] | None = None,
    names: tuple[str, str] = ("causal", "bidirectional"),
    title: str | None = None,
) -> go.Figure:
    """One attention map (q_len, kv_len) before and after a change of mask, and the difference after - before."""
    first, second = weight_grids(before, "the weights before"), weight_grids(after, "the weights after")
    if len(first) != 1 or len(second) != 1:
        raise MaskError("attention_pair compares one head with one head: pass weights of shape (queries, keys)")
    first, second = first[0], second[0]
    same_shape(second, first, "the weights after")
    queries, keys = token_labels(tokens, *first.shape)
    top, change = max(float(first.max()), float(second.max()), 1e-9), second - first
    most, cells = max(float(np.abs(change).max()), 1e-9), 3 * first.size
    said = sentences(queries, keys, lambda q, k, i, j: f"{q} looks at {k}: {change[i, j]:+.3f}", change.shape, cells)
    kept = weights_kept(change, said is None, -most, most, "change", DIFFERENCE, {"x": 1.1})
    heatmaps = [
        weight_heatmap(first, queries, keys, top, True, cells),
        weight_heatmap(second, queries, keys, top, False, cells),
        heatmap(**kept, sentences=said),
    ]
    figure = panels(heatmaps, [*names, "difference"], queries, keys, title, scale=True, bars=2)
    maps = np.stack([first, second])
    alt = attention_in_words(maps, queries, keys, title or f"Attention, {names[0]} and {names[1]}")
    return finished(figure, f"{alt} The largest change of a weight is {most:.2f}.")


def alt_text(figure: go.Figure) -> str:
    """The text equivalent of a figure made here."""
    meta = figure.layout.meta
    if not isinstance(meta, Mapping) or "alt" not in meta:
        raise MaskError("this figure carries no text equivalent: it was not made by labkit.viz.figures")
    return meta["alt"]


# ------------------------------------------------------------------------------------------------------ influence
def _both(influence, said, tokens: Sequence[str] | None):
    influence = bool_grid(influence, "influence")
    said = None if said is None else bool_grid(said, "the said mask")
    if said is not None:
        same_shape(said, influence, "the said mask")
    return influence, said, *token_labels(tokens, *influence.shape)


def _influence_heatmap(influence: np.ndarray, said: np.ndarray | None, queries: list[str], keys: list[str]):
    said = influence if said is None else said
    words = np.select(
        [influence & ~said, ~influence & said, influence],
        ["reaches {q}, though the mask forbids it", "does not reach {q}, though the mask allows it", "reaches {q}"],
        "does not reach {q}",
    )
    codes = np.where(influence ^ said, 2, influence).astype(np.uint8)
    shown = sentences(queries, keys, lambda q, k, i, j: f"{k} {words[i, j].format(q=q)}", influence.shape)
    colours = [[0, MASKED], [1 / 3, MASKED], [1 / 3, ALLOWED], [2 / 3, ALLOWED], [2 / 3, DISAGREES], [1, DISAGREES]]
    return heatmap(codes, shown, colorscale=colours, zmin=0, zmax=2, showscale=False)


def _with_signs(heatmaps, names, influence, said, queries, keys, title: str | None) -> go.Figure:
    """The panels, and on the last of them a sign in each cell that disagrees."""
    import plotly.graph_objects as go

    verdict, signs = "", {}
    if said is not None:
        signs = {"leak": ("x-thin", influence & ~said), "no influence": ("circle-open", ~influence & said)}
        leaks, losses = (int(where.sum()) for _, where in signs.values())
        verdict = f"{leaks + losses} of {influence.size} cells disagree with the said mask"
    wrong = any(where.any() for _, where in signs.values())
    headings = [heading for heading in (title, verdict) if heading]
    figure = panels(heatmaps, names, queries, keys, *headings, legend=wrong)
    cell = cell_side(figure)
    colour, size = ("white", min(16, cell // 2)) if cell >= 8 else (DISAGREES, 7)  # beside small cells, not in them
    if cell < 8:
        figure.update_layout(legend={"bgcolor": "rgba(0,0,0,0)", "font": {"color": INK}})
    axes = {} if len(heatmaps) == 1 else {"xaxis": "x2", "yaxis": "y2"}
    for name, (symbol, where) in signs.items():
        rows, columns = np.nonzero(where)
        if len(rows):
            marker = {"symbol": symbol, "size": size, "color": colour, "line": {"width": 2, "color": colour}}
            places = {"x": columns.astype(np.int16), "y": rows.astype(np.int16)}
            figure.add_trace(go.Scatter(**places, **axes, mode="markers", marker=marker, name=name, hoverinfo="skip"))
    alt = mask_in_words(influence, queries, keys, title or "Measured influence")
    alt += f" {verdict}: {leaks} leaks, {losses} without influence." if verdict else ""
    return finished(figure, alt)
