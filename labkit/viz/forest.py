"""Forest plots: values with their 95 % intervals, in groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from labkit.errors import MaskError
from labkit.viz.style import GREY, INK, RULE, escape, meaning, titled

ROW = 21  # pixels


def forest_figure(
    groups: Mapping[str, Mapping[str, Sequence[float | None]]],
    title: str | None = None,
    x_name: str = "difference",
    marks: Mapping[str, float] | None = None,
    zero: bool = True,
) -> go.Figure:
    """One row per arm: a point on its 95 % interval, and both as numbers on the right.

    Args:
        groups: `{group: {arm: (value, low, high)}}`; low and high are None without an interval (one seed).
        x_name: the quantity with its unit, such as "difference to causal, points of F1".
        marks: `{name: x}`, dashed lines such as chance or a claim.
        zero: whether the values are differences: the axis includes 0, with a line, and only points whose interval
            excludes 0 are filled.

    Raises:
        MaskError: no arm, or a value that is not finite.
    """
    labels, points = [], []  # a label for each row; (row, arm, value, low, high)
    for group, arms in groups.items():
        labels.append(f"<b>{escape(str(group))}</b>")
        for arm, (value, low, high) in arms.items():
            bare = low is None or math.isnan(low)
            points.append((len(labels), str(arm), float(value), *((math.nan, math.nan) if bare else (low, high))))
            labels.append("")
    if not points or not all(math.isfinite(value) for _, _, value, *_ in points):
        raise MaskError("forest_figure takes {group: {arm: (value, low, high)}} with finite values")
    ends = [x for point in points for x in point[2:] if math.isfinite(x)] + list((marks or {}).values()) + [0.0] * zero
    write = _writer(max(map(abs, ends)), zero)
    texts = [
        write(value) + (f"  [{write(low)}, {write(high)}]" if low == low else "") for *_, value, low, high in points
    ]
    figure = go.Figure(
        go.Scatter(
            x=[value for _, _, value, *_ in points],
            y=[row for row, *_ in points],
            mode="markers",
            marker={
                "color": [meaning(arm) or GREY for _, arm, *_ in points],
                "symbol": ["circle" if not zero or low > 0 or high < 0 else "circle-open" for *_, low, high in points],
                "size": 9,
            },
            error_x={
                "array": [None if high != high else high - value for *_, value, _, high in points],
                "arrayminus": [None if low != low else value - low for *_, value, low, _ in points],
                "color": GREY,
                "width": 4,
            },
            customdata=[f"{escape(arm)}: {text}" for (_, arm, *_), text in zip(points, texts, strict=True)],
            hovertemplate="%{customdata}<extra></extra>",
        )
    )
    left = max(90, 16 + 7 * max(len(arm) for _, arm, *_ in points))
    beside = {"xref": "paper", "xanchor": "left", "showarrow": False, "font": {"size": 12}}
    notes = [{"text": text, "x": 1, "y": row, "xshift": 8} for (row, *_), text in zip(points, texts, strict=True)]
    notes += [{"text": label, "x": 0, "y": row, "xshift": 8 - left} for row, label in enumerate(labels) if label]
    figure.update_layout(annotations=[note | beside for note in notes])
    if zero:
        figure.add_vline(0, line={"color": INK, "width": 1})
    for name, x in (marks or {}).items():
        dashed = {"color": GREY, "width": 1, "dash": "dash"}
        figure.add_vline(
            x, line=dashed, annotation={"text": escape(name), "font": {"size": 11}}, annotation_position="top"
        )
    margin = 0.06 * (max(ends) - min(ends) or 1)
    rows = {"tickvals": [row for row, *_ in points], "ticktext": [escape(arm) for _, arm, *_ in points], "ticks": ""}
    figure.update_layout(
        xaxis={"title": escape(x_name), "range": [min(ends) - margin, max(ends) + margin], "zeroline": False},
        yaxis={**rows, "range": [len(labels) - 0.4, -0.6], "showgrid": False, "zeroline": False, "gridcolor": RULE},
    )
    clear = sum(low > 0 or high < 0 for *_, low, high in points)
    measured = sum(low == low for *_, low, _ in points)
    words = f"{clear} of {measured} intervals exclude 0 (filled)." if zero else "Points with their 95 % intervals."
    right = 24 + 7 * max(map(len, texts))
    return titled(figure, title, words, 820, ROW * len(labels) + 60, l=left, r=right, t=16 * bool(marks))


def _writer(largest: float, signed: bool):
    """A function that writes numbers with as many digits as values up to `largest` need."""
    digits = min(4, max(0, 2 - math.floor(math.log10(largest or 1))))
    return lambda value: f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "−")
