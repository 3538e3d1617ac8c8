"""The fusion view: which generated token looks at which paraphrase, as a map of tokens and as shares of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import plain_array, short, token_labels
from labkit.viz.panels import TOP_LEFT, heatmap, sentences, text, ticks, weights_kept
from labkit.viz.themes import GREY, INK, LINES, finished

if TYPE_CHECKING:
    import plotly.graph_objects as go

MAP_WIDE, BARS_WIDE, GAP = 660, 260, 40  # pixels
BEFORE = "tokens generated before"
HATCHES = ("", "/", ".", "x", "\\", "+")


def fusion_figure(
    weights,
    context_tokens: Sequence[str],
    segments: Sequence,
    generated_tokens: Sequence[str],
    names: Mapping | None = None,
    title: str | None = None,
) -> go.Figure:
    """Attention of generated tokens on the paraphrases they were given, weights (generated, context).

    Left the map, rows are generated tokens, columns the context, with a line where a segment ends; right, for each
    generated token, its share of attention on each segment as a stacked bar. What a row lacks to 1 is its attention on
    the tokens generated before, shown in grey.

    Args:
        segments: one id for each context token; None for a token of no paraphrase, such as a shared prefix.
        names: `{id: name}` of the segments; by default "paraphrase 0" and so on, "shared" for None.

    Raises:
        MaskError: lengths that do not match, rows above 1, or numbers that are no weights.
    """
    import plotly.graph_objects as go

    grid, context, generated, segments = _checked(weights, context_tokens, segments, generated_tokens)
    shares = {id_: grid[:, [s == id_ for s in segments]].sum(1) for id_ in dict.fromkeys(segments)}
    called = {id_: str((names or {}).get(id_, "shared" if id_ is None else f"paraphrase {id_}")) for id_ in shares}
    rest = np.clip(1 - grid.sum(1), 0, 1)

    rows, columns = grid.shape
    cell = max(1, min(32, MAP_WIDE // columns))
    row_high = max(4, min(28, 560 // rows))
    wide, high = max(cell * columns, 160), max(row_high * rows, 80)
    left = 7 * max(len(short(token)) for token in generated) + 46
    above = 7 * max(len(short(token)) for token in context) + 62 + 30 * (title is not None)
    inner = wide + GAP + BARS_WIDE

    def sentence(query: str, key: str, i: int, j: int) -> str:
        return f"{query} looks at {key} of {escape(called[segments[j]])}: {grid[i, j]:.3f}"

    shown = sentences(generated, context, sentence, grid.shape)
    kept = weights_kept(grid, shown is None, 0.0, max(float(grid.max()), 1e-9), "weight")
    kept["colorbar"] |= {"x": 1.01, "len": 1.0, "lenmode": "fraction"}
    figure = go.Figure(heatmap(**kept, sentences=shown))
    for end in [j + 0.5 for j in range(columns - 1) if segments[j] != segments[j + 1]]:
        line = {"color": INK, "width": 2}
        figure.add_shape(type="line", x0=end, x1=end, y0=-0.5, y1=rows - 0.5, line=line)
    colours = {id_: LINES[i % 6] for i, id_ in enumerate(shares)}
    for start, end in _stretches(segments):
        strip = {"ysizemode": "pixel", "yref": "paper", "yanchor": 0, "y0": -4, "y1": -10, "line": {"width": 0}}
        box = {"x0": start - 0.45, "x1": end - 0.55, "fillcolor": colours[segments[start]]}
        figure.add_shape(type="rect", **strip, **box)  # the segment in the colour of its bar
        if (end - start) * cell >= 7 * len(called[segments[start]]):
            where = {"x": (start + end - 1) / 2, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
            figure.add_annotation(text=escape(called[segments[start]]), **where, yshift=above - 44 - 30 * bool(title))
    bars = [(called[i], share, colours[i], HATCHES[n // 6 % 6]) for n, (i, share) in enumerate(shares.items())]
    bars += [(BEFORE, rest, GREY, "")] if rest.max() > 1e-3 else []
    for name, share, colour, hatch in bars:
        hover = [
            f"{escape(token)}: {value:.1%} on {escape(name)}" for token, value in zip(generated, share, strict=True)
        ]
        figure.add_trace(
            go.Bar(
                x=share.astype(np.float32),
                y=np.arange(rows),
                orientation="h",
                xaxis="x2",
                yaxis="y2",
                name=escape(name),
                marker={"color": colour, "pattern": {"shape": hatch}, "line": {"width": 0}},
                hovertext=hover,
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    across = {**ticks(context, cell), "side": "top", "tickangle": -90, "range": [-0.5, columns - 0.5]}
    down = {**ticks(generated, row_high), "range": [rows - 0.5, -0.5]}
    figure.update_layout(
        width=left + inner + 90,
        height=above + high + 70,
        margin={"l": left, "r": 90, "t": above, "b": 70},
        title={**text(title or ""), **TOP_LEFT},
        barmode="stack",
        bargap=0.15,
        xaxis={**across, "domain": [0, wide / inner]},
        yaxis={**down, "title": text("generated")},
        xaxis2={
            "title": text("share of attention"),
            "domain": [1 - BARS_WIDE / inner, 1],
            "range": [0, 1],
            "tickformat": ".0%",
            "side": "top",
            "anchor": "y2",
        },
        yaxis2={**down, "showticklabels": False, "anchor": "x2"},
        legend={
            "orientation": "h",
            "x": 1,
            "xanchor": "right",
            "y": -16 / high,
            "yanchor": "top",
            "traceorder": "normal",
        },
        showlegend=True,
    )
    return finished(figure, _in_words(title, generated, called, shares, rest))


def _checked(weights, context_tokens, segments, generated_tokens):
    grid = plain_array(weights, "weights")
    if grid.ndim != 2 or 0 in grid.shape or grid.dtype.kind not in "fiu":
        raise MaskError(f"weights must be numbers of shape (generated, context), not {grid.shape}: pick one head first")
    grid = grid.astype(float)
    if not np.isfinite(grid).all() or (grid < 0).any():
        raise MaskError("weights must be at least 0 and finite, like the output of a softmax: scores are not weights")
    _, context = token_labels(context_tokens, 1, grid.shape[1])
    _, generated = token_labels(generated_tokens, 1, grid.shape[0])
    segments = list(segments)
    if len(segments) != len(context):
        raise MaskError(f"{len(segments)} segment ids were given for {len(context)} context tokens: one for each")
    if (grid.sum(1) > 1.01).any():
        raise MaskError("a generated token's weights sum to more than 1: pass one head, or the mean over the heads")
    return grid, context, generated, segments


def _stretches(segments: list) -> list[tuple[int, int]]:
    """Where one segment follows another: (first, last + 1) of each stretch."""
    edges = [0, *(j + 1 for j in range(len(segments) - 1) if segments[j] != segments[j + 1]), len(segments)]
    return list(zip(edges, edges[1:], strict=False))


def _in_words(title: str | None, generated: list[str], called: dict, shares: dict, rest: np.ndarray) -> str:
    mean = ", ".join(f"{called[id_]} {share.mean():.0%}" for id_, share in shares.items())
    words = f"{title or 'Attention of generated tokens on the paraphrases'}: {len(generated)} generated tokens. "
    words += f"Mean share of attention: {mean}, {BEFORE} {rest.mean():.0%}."
    if len(generated) > 12:
        return words
    names, all_shares = [*called.values(), BEFORE], np.array([*shares.values(), rest])
    return words + "".join(
        f' "{token}" looks most at {names[row.argmax()]} ({row.max():.0%}).'
        for token, row in zip(generated, all_shares.T, strict=True)
    )
