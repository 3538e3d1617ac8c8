"""Interactive figures of masks, attention and influence: plain arrays in, a plotly `Figure` out.

Rows are queries (who looks), columns are keys (who is looked at). The upper triangle, a token's future, is always
shown; a thin staircase separates it from the past. The text equivalent of a figure is `alt_text(figure)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import (
    ALLOWED,
    DISAGREES,
    MASKED,
    attention_in_words,
    bool_grid,
    cell_pixels,
    label_step,
    mask_in_words,
    short,
    token_labels,
    weight_grids,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

WEIGHTS = "Blues"  # from 0, nearly white, to dark blue
DIFFERENCE = [[0, "#B35806"], [0.5, "#F7F7F7"], [1, "#542788"]]  # less (orange), same (white), more (purple)
WIDEST = 1000  # pixels for panels beside each other: what a notebook shows without scrolling
TOP_LEFT = {"x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 8}}
HOVER_SENTENCES = 4096  # up to so many cells each has a sentence of its own to show on hovering


def mask_figure(cells, tokens: Sequence[str] | None = None, title: str | None = None) -> go.Figure:
    """A mask: `cells` bool (q_len, kv_len), True = may attend; `tokens` one for each key."""
    cells = bool_grid(cells)
    queries, keys = token_labels(tokens, *cells.shape)
    figure = _panels([_mask_heatmap(cells, queries, keys)], [None], queries, keys, title)
    return _with_alt(figure, mask_in_words(cells, queries, keys, title))


def masks_side_by_side(masks: Mapping[str, object], tokens: Sequence[str] | None = None) -> go.Figure:
    """Several masks of one shape, `{title: cells}`, beside each other."""
    if not isinstance(masks, Mapping) or not masks:
        raise MaskError("masks_side_by_side takes a dictionary {title: cells} with at least one mask")
    grids = {str(title): bool_grid(cells, f"the cells of {title!r}") for title, cells in masks.items()}
    first = next(iter(grids.values()))
    for title, cells in grids.items():
        _same_shape(cells, first, f"the mask {title!r}")
    queries, keys = token_labels(tokens, *first.shape)
    figure = _panels([_mask_heatmap(cells, queries, keys) for cells in grids.values()], list(grids), queries, keys)
    words = [mask_in_words(cells, queries, keys, name, len(grids) == 1) for name, cells in grids.items()]
    return _with_alt(figure, " ".join(words))


def influence_figure(influence, said=None, tokens: Sequence[str] | None = None, title: str | None = None) -> go.Figure:
    """The measured influence, bool (q_len, kv_len), True = changing the key changed the query's output.

    With the mask that was `said`, the cells that disagree stand out in a third colour and carry a sign: a cross where a
    masked key had influence (a leak), a ring where an allowed key had none.
    """
    import plotly.graph_objects as go

    influence = bool_grid(influence, "influence")
    said_cells = influence if said is None else bool_grid(said, "the said mask")
    _same_shape(said_cells, influence, "the said mask")
    queries, keys = token_labels(tokens, *influence.shape)
    leaks, losses = influence & ~said_cells, ~influence & said_cells
    codes = np.where(influence ^ said_cells, 2, influence).astype(int)
    words = np.select(
        [leaks, losses, influence],
        ["reaches {q}, though the mask forbids it", "does not reach {q}, though the mask allows it", "reaches {q}"],
        "does not reach {q}",
    )
    sentences = [
        [f"{_quoted(key)} {cell.format(q=_quoted(query))}" for key, cell in zip(keys, row, strict=True)]
        for query, row in zip(queries, words.tolist(), strict=True)
    ]
    colours = [[0, MASKED], [1 / 3, MASKED], [1 / 3, ALLOWED], [2 / 3, ALLOWED], [2 / 3, DISAGREES], [1, DISAGREES]]
    heatmap = _heatmap(codes, sentences, colorscale=colours, zmin=0, zmax=2, showscale=False)

    wrong = int(leaks.sum() + losses.sum())
    verdict = "" if said is None else f"{wrong} of {influence.size} cells disagree with the said mask"
    headings = [heading for heading in (title, verdict) if heading]
    figure = _panels([heatmap], [None], queries, keys, *headings, legend=wrong > 0)
    size = max(4, min(16, cell_pixels(len(keys)) // 2))
    for where, symbol, name in ((leaks, "x-thin", "leak"), (losses, "circle-open", "no influence")):
        rows, columns = np.nonzero(where)
        if len(rows):
            marker = {"symbol": symbol, "size": size, "line": {"width": 2, "color": "white"}, "color": "white"}
            figure.add_trace(go.Scatter(x=columns, y=rows, mode="markers", marker=marker, name=name, hoverinfo="skip"))
    alt = mask_in_words(influence, queries, keys, title or "Measured influence")
    alt += f" {verdict}: {int(leaks.sum())} leaks, {int(losses.sum())} without influence." if verdict else ""
    return _with_alt(figure, alt)


def attention_figure(weights, tokens: Sequence[str] | None = None, title: str | None = None) -> go.Figure:
    """Attention weights, (q_len, kv_len) or (heads, q_len, kv_len): one map per head, on one scale from 0."""
    maps = weight_grids(weights)
    queries, keys = token_labels(tokens, *maps.shape[1:])
    names = [None] if len(maps) == 1 else [f"head {i}" for i in range(len(maps))]
    top = max(float(maps.max()), 1e-9)
    heatmaps = [_weight_heatmap(grid, queries, keys, top, scale=i == 0) for i, grid in enumerate(maps)]
    figure = _panels(heatmaps, names, queries, keys, title, scale=True)
    return _with_alt(figure, attention_in_words(maps, queries, keys, title))


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
    _same_shape(second, first, "the weights after")
    queries, keys = token_labels(tokens, *first.shape)
    top, change = max(float(first.max()), float(second.max()), 1e-9), second - first
    most = max(float(np.abs(change).max()), 1e-9)
    sentences = _sentences(queries, keys, lambda q, k, i, j: f"{q} looks at {k}: {change[i, j]:+.3f}", change.shape)
    bar = {"title": {"text": "change"}, "len": 0.8, "thickness": 12, "x": 1.1}
    heatmaps = [
        _weight_heatmap(first, queries, keys, top, scale=True),
        _weight_heatmap(second, queries, keys, top, scale=False),
        _heatmap(change, sentences, colorscale=DIFFERENCE, zmin=-most, zmax=most, colorbar=bar),
    ]
    figure = _panels(heatmaps, [*names, "difference"], queries, keys, title, scale=True, bars=2)
    maps = np.stack([first, second])
    alt = attention_in_words(maps, queries, keys, title or f"Attention, {names[0]} and {names[1]}")
    return _with_alt(figure, f"{alt} The largest change of a weight is {most:.2f}.")


def alt_text(figure: go.Figure) -> str:
    """The text equivalent of a figure made here."""
    meta = figure.layout.meta
    if not isinstance(meta, Mapping) or "alt" not in meta:
        raise MaskError("this figure carries no text equivalent: it was not made by labkit.viz.figures")
    return meta["alt"]


# ------------------------------------------------------------------------------------------------------ one panel
def _mask_heatmap(cells: np.ndarray, queries: list[str], keys: list[str]):
    def sentence(query: str, key: str, i: int, j: int) -> str:
        return f"{query} {'may' if cells[i, j] else 'may not'} look at {key}"

    two = [[0, MASKED], [0.5, MASKED], [0.5, ALLOWED], [1, ALLOWED]]
    sentences = _sentences(queries, keys, sentence, cells.shape)
    return _heatmap(cells.astype(int), sentences, colorscale=two, zmin=0, zmax=1, showscale=False)


def _weight_heatmap(weights: np.ndarray, queries: list[str], keys: list[str], top: float, scale: bool):
    def sentence(query: str, key: str, i: int, j: int) -> str:
        return f"{query} looks at {key}: {weights[i, j]:.3f}"

    bar = {"title": {"text": "weight"}, "len": 0.8, "thickness": 12}
    sentences = _sentences(queries, keys, sentence, weights.shape)
    return _heatmap(weights, sentences, colorscale=WEIGHTS, zmin=0, zmax=top, showscale=scale, colorbar=bar)


def _sentences(queries: list[str], keys: list[str], sentence, shape: tuple[int, int]) -> list[list[str]] | None:
    if shape[0] * shape[1] > HOVER_SENTENCES:
        return None
    return [
        [sentence(_quoted(query), _quoted(key), i, j) for j, key in enumerate(keys)] for i, query in enumerate(queries)
    ]


def _heatmap(values: np.ndarray, sentences: list[list[str]] | None, **options):
    import plotly.graph_objects as go

    if sentences is None:
        hover = {"hovertemplate": "query %{y}, key %{x}: %{z}<extra></extra>"}
    else:
        hover = {"hovertext": sentences, "hovertemplate": "%{hovertext}<extra></extra>"}
    gap = 1 if values.shape[1] <= 128 else 0
    return go.Heatmap(z=values, xgap=gap, ygap=gap, **hover, **options)


# ------------------------------------------------------------------------------------------------ the whole figure
def _panels(
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

    columns = min(len(heatmaps), 4)
    rows = -(-len(heatmaps) // columns)
    q_len, kv_len = len(queries), len(keys)
    longest = 7 * max(len(short(token)) for token in keys)  # pixels, as are all lengths here
    cell = cell_pixels(kv_len, 704 if columns == 1 else WIDEST // columns - longest - 30)
    panel_wide, panel_high = cell * kv_len + longest + 30, cell * q_len + longest + 50
    above = 30 * (title is not None) + 20 * (subtitle is not None)
    right = 20 + bars * 75 * scale
    wide, high = columns * panel_wide + right, rows * panel_high + above
    inner_wide, inner_high = wide - longest - 40 - right, high - longest - 50 - above

    figure = make_subplots(
        rows,
        columns,
        horizontal_spacing=(longest + 30) / inner_wide if columns > 1 else 0,
        vertical_spacing=(longest + 50) / inner_high if rows > 1 else 0,
    )
    for i, (heatmap, name) in enumerate(zip(heatmaps, names, strict=True)):
        where = {"row": i // columns + 1, "col": i % columns + 1}
        figure.add_trace(heatmap, **where)
        figure.update_xaxes(title=_text(name or "looked at (key)"), **_ticks(keys, cell), side="top", **where)
        figure.update_yaxes(**_ticks(queries, cell), scaleanchor=f"x{i + 1 if i else ''}", **where)
        figure.update_xaxes(
            range=[-0.5, kv_len - 0.5], constrain="domain", tickangle=-45 if cell >= 24 else -90, **where
        )
        figure.update_yaxes(range=[q_len - 0.5, -0.5], constrain="domain", **where)
        figure.add_shape(type="path", path=_staircase(q_len, kv_len), line={"width": 1.5, "color": "#333333"}, **where)
    figure.update_yaxes(title=_text("looks (query)"), row=1, col=1)
    figure.update_layout(
        template="plotly_white",
        width=wide,
        height=high + 40 * legend,
        margin={"l": longest + 40, "r": right, "t": longest + 40 + above, "b": 10 + 40 * legend},
        title={**_text(title or ""), "subtitle": _text(subtitle or ""), **TOP_LEFT},
        showlegend=legend,
        legend={"orientation": "h", "y": -0.02, "yanchor": "top", "bgcolor": DISAGREES, "font": {"color": "#000000"}},
        plot_bgcolor="#D0D0D0"
        if scale
        else "#FFFFFF",  # shows between the cells, so that weights of 0 are seen as cells
        font={"size": 13},
    )
    return figure


def _ticks(tokens: list[str], cell: int) -> dict:
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


def _staircase(q_len: int, kv_len: int) -> str:
    """The border between a token's past and its future, as an SVG path in cells."""
    first = kv_len - q_len
    corners = [f"M {first + 0.5},-0.5"]
    for i in range(q_len):
        corners.append(f"L {first + i + 0.5},{i + 0.5}")
        if i + 1 < q_len:
            corners.append(f"L {first + i + 1.5},{i + 0.5}")
    return " ".join(corners)


def _text(text: str) -> dict:
    return {"text": escape(text, quote=False)}


def _quoted(token: str) -> str:
    return f'"{escape(token, quote=False)}"'


def _same_shape(array: np.ndarray, reference: np.ndarray, what: str) -> None:
    if array.shape != reference.shape:
        raise MaskError(f"{what} has shape {array.shape}, and the one beside it {reference.shape}: they must be equal")


def _with_alt(figure: go.Figure, words: str) -> go.Figure:
    figure.update_layout(meta={"alt": words})
    return figure
