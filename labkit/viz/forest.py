"""Forest plots: values with their 95 % intervals, in groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
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
    marks = marks or {}
    labels, points, headings = [], [], {}  # a label for each row of the plot; {row: name} of the groups
    for group, arms in groups.items():
        headings[len(labels)] = f"<b>{escape(str(group))}</b>"
        labels.append("")
        for arm, interval in arms.items():
            points.append((len(labels), str(arm), *interval))
            labels.append(escape(str(arm)))
    points = pd.DataFrame(points, columns=["row", "arm", "value", "low", "high"])
    points = points.astype({"value": float, "low": float, "high": float})
    if not len(points) or not np.isfinite(points.value).all():
        raise MaskError("forest_figure takes {group: {arm: (value, low, high)}} with finite values")
    ends = [*points[["value", "low", "high"]].stack().dropna(), *marks.values(), *([0.0] * zero)]
    digits = min(4, max(0, 2 - math.floor(math.log10(max(map(abs, ends)) or 1))))
    number = f"{{:{'+' if zero else ''}.{digits}f}}".format
    texts = [
        (number(value) + ("" if math.isnan(low) else f"  [{number(low)}, {number(high)}]")).replace("-", "−")
        for value, low, high in zip(points.value, points.low, points.high, strict=True)
    ]
    clear = (points.low > 0) | (points.high < 0)
    figure = go.Figure(
        go.Scatter(
            x=points.value,
            y=points.row,
            mode="markers",
            marker={
                "color": [meaning(arm) or GREY for arm in points.arm],
                "symbol": np.where(clear | (not zero), "circle", "circle-open"),
                "size": 9,
            },
            error_x={"array": points.high - points.value, "arrayminus": points.value - points.low, "color": GREY},
            customdata=[f"{escape(arm)}: {text}" for arm, text in zip(points.arm, texts, strict=True)],
            hovertemplate="%{customdata}<extra></extra>",
        )
    )
    beside = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 8, "showarrow": False, "font": {"size": 12}}
    for row, text in zip(points.row, texts, strict=True):
        figure.add_annotation(text=text, y=row, **beside)
    left = max(90, 16 + 7 * max(map(len, labels)))
    for row, heading in headings.items():  # above the plot's rows, so that a long one takes no room from the plot
        figure.add_annotation(text=heading, y=row, **beside | {"x": 0, "xshift": 8 - left})
    if zero:
        figure.add_vline(0, line={"color": INK, "width": 1})
    for name, x in marks.items():
        note = {"text": escape(name), "font": {"size": 11}}
        dashed = {"color": GREY, "width": 1, "dash": "dash"}
        figure.add_vline(x, line=dashed, annotation=note, annotation_position="top")
    margin = 0.06 * (max(ends) - min(ends) or 1)
    ticks = {"tickvals": list(range(len(labels))), "ticktext": labels, "ticks": ""}
    figure.update_layout(
        xaxis={"title": escape(x_name), "range": [min(ends) - margin, max(ends) + margin], "zeroline": False},
        yaxis={**ticks, "range": [len(labels) - 0.4, -0.6], "showgrid": False, "zeroline": False, "gridcolor": RULE},
    )
    measured = points.low.notna().sum()
    words = (
        f"{clear.sum()} of {measured} intervals exclude 0 (filled)." if zero else "Points with their 95 % intervals."
    )
    right = 24 + 7 * max(map(len, texts))
    return titled(figure, title, words, 820, ROW * len(labels) + 60, l=left, r=right, t=16 * bool(marks))
