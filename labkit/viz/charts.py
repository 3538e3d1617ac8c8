"""Curves over training steps or another quantity, and forest plots: values with their 95 % intervals, in groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from labkit.attention.plain import clean, plain_array
from labkit.errors import MaskError
from labkit.viz.panels import slider
from labkit.viz.style import GREY, INK, OTHERS, PAPER, RULE, escape, line_styles, meaning, titled

ROW = 21  # pixels, of a forest plot


def curves_figure(
    x: Sequence[float],
    arms: Mapping[str, object],
    title: str | None = None,
    x_name: str = "training step",
    y_name: str = "loss in nats per token",
    floor: float | None = None,
    floor_name: str = "floor",
    log_x: bool = False,
    at: float | None = None,
) -> go.Figure:
    """A line for each arm: the mean of its seeds, with a band from the lowest to the highest seed.

    Args:
        x: ascending, such as training steps.
        arms: `{name: one list for each seed}`, one number for each `x`; NaN where an arm was not measured.
        floor: a dashed line that no honest arm can be below, called `floor_name`.
        log_x: a logarithmic axis.
        at: one of `x`, marked with a line and the mean of each arm.

    Raises:
        MaskError: lists that do not match `x`, or an arm with no number at all.
    """
    x = [float(value) for value in x]
    shown = x[-1] if at is None else at  # where the means are written out
    figure, styles, means, last, n_seeds = go.Figure(), line_styles(map(str, arms)), [], [], []
    for name, seeds in arms.items():
        seeds = plain_array(seeds, f"the seeds of {name!r}").astype(float)  # (seeds, x)
        if seeds.ndim != 2 or seeds.shape[1] != len(x) or not np.isfinite(seeds).any():
            raise MaskError(f"{name!r} must be lists of {len(x)} numbers, one list for each seed, not {seeds.shape}")
        n_seeds.append(len(seeds))
        runs = pd.DataFrame(seeds, columns=x).dropna(axis="columns", how="all")
        xs, mean, low, high = runs.columns.to_numpy(), runs.mean(), runs.min(), runs.max()
        if shown in mean:
            means.append(f"{name}: {mean[shown]:.2f}")
        last.append(f"{name}: {mean.iloc[-1]:.2f} (at {xs[-1]:g})")
        colour, dash = styles[str(name)]
        band = {"x": np.r_[xs, xs[::-1]], "y": np.r_[high, low[::-1]], "fill": "toself", "fillcolor": colour}
        figure.add_scatter(**band, opacity=0.18, line_width=0, mode="lines", hoverinfo="skip", showlegend=False)
        figure.add_scatter(
            x=xs,
            y=mean.to_numpy(),
            mode="lines+markers" if len(xs) < 30 else "lines",
            line={"color": colour, "width": 2.5, "dash": dash},
            name=escape(str(name)),
            customdata=[f"{a:.3f} to {b:.3f}" for a, b in zip(low, high, strict=True)],
            hovertemplate="%{x}: %{y:.3f}, seeds %{customdata}<extra>" + escape(str(name)) + "</extra>",
        )
    if floor is not None:
        dashed = {"color": GREY, "dash": "dash"}
        figure.add_hline(floor, line=dashed, annotation_text=f"{escape(floor_name)} = {floor:.3f}")
    if at is not None:
        figure.add_vline(at, line={"color": INK, "width": 1})
    words = f"At {x_name} = {shown:g}: {'; '.join(means)}."
    if at is None and len(means) < len(arms):  # some arms end earlier
        words = f"Last value of each arm: {'; '.join(last)}."
    if max(n_seeds, default=1) > 1:
        few, many = min(n_seeds), max(n_seeds)
        words += f" Lines: mean of {many if few == many else f'{few} to {many}'} seeds; bands: lowest to highest seed."
    horizontal = {"title": {"text": escape(x_name), "standoff": 8}, "zeroline": False}
    if log_x:
        horizontal |= {"type": "log", "dtick": 1 if max(x) > 10 * min(x) else None}
    figure.update_layout(
        xaxis=horizontal,
        yaxis={"title": escape(y_name), "gridcolor": RULE, "zeroline": False},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
    )
    legend_rows = 1 + sum(60 + 7 * len(str(name)) for name in arms) // 720
    return titled(figure, title, words, 800, 360, t=8 + 22 * legend_rows)


def curves_slider(
    x: Sequence[float], arms: Mapping[str, object], samples: Mapping[str, Sequence[str]] | None = None, **options
) -> go.Figure:
    """`curves_figure` with a slider over `x`, and below it what each arm wrote at that time.

    Args:
        samples: `{arm: one text for each x}`.
        options: those of `curves_figure`; `at` is where the slider begins.
    """
    start, samples = options.pop("at", x[0]), samples or {}
    texts = [[line for name, wrote in samples.items() for line in _lines(name, wrote[i])] for i in range(len(x))]
    room = 17 * max(map(len, texts)) + 16 if samples else 0
    place = {"x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top", "yshift": -64}
    figures = {}
    for value, lines in zip(x, texts, strict=True):
        figure = curves_figure(x, arms, at=value, **options)
        figure.add_annotation(text="<br>".join(lines), align="left", font_size=12, showarrow=False, **place)
        figures[f"{value:g}"] = figure.update_layout(height=figure.layout.height + room, margin_b=50 + room)
    return slider(figures, options.get("x_name", "training step"), list(x).index(start))


def _lines(name: str, text: str) -> list[str]:
    """The first lines of a text, after the name of its arm in bold."""
    first, *rest = map(escape, wrap(f"{name}: {clean(text)}", 105)[:4])
    bold = len(escape(name)) + 1
    return [f"<b>{first[:bold]}</b>{first[bold:]}", *rest]


def stacked_slider(
    groups: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]],
    title: str,
    name: str,
    unit: str,
    start: int = 0,
) -> go.Figure:
    """Stacked bars with their totals, a menu for the group, and a slider over the steps, called `name`.

    `groups` is `{group: {step: {bar: {part: number}}}}`, with the same steps, bars and parts in each group.
    """
    first = next(iter(groups.values()))
    bars = next(iter(first.values()))
    parts = list(next(iter(bars.values())))
    figure = go.Figure()
    for group in groups:
        shown = {"y": list(bars), "visible": group == next(iter(groups))}
        for part, colour in zip(parts, OTHERS, strict=False):
            figure.add_bar(orientation="h", name=part, marker_color=colour, textposition="none", **shown)
        total = {"mode": "text", "textposition": "middle right", "cliponaxis": False, "hoverinfo": "skip"}
        figure.add_scatter(**total, showlegend=False, **shown)
    steps = []
    for step in first:
        rows = [[list(bar.values()) for bar in by_step[step].values()] for by_step in groups.values()]
        x = [numbers for row in rows for numbers in (*map(list, zip(*row, strict=True)), [sum(bar) for bar in row])]
        texts = [[f" {number:.1f} {unit}" for number in numbers] for numbers in x]  # only the totals show theirs
        steps.append({"method": "restyle", "label": step, "args": [{"x": x, "text": texts}]})
    for trace, x, text in zip(figure.data, *steps[start]["args"][0].values(), strict=True):
        trace.update(x=x, text=text)
    buttons = [
        {"method": "restyle", "label": group, "args": [{"visible": [group == g for g in groups for _ in (*parts, 0)]}]}
        for group in groups
    ]
    slide = {"active": start, "steps": steps, "currentvalue": {"prefix": f"{name}: "}, "y": -0.3, "pad": {"r": 30}}
    figure.update_layout(
        barmode="stack",
        xaxis_title=unit,
        yaxis={"autorange": "reversed", "automargin": True},
        legend={"orientation": "h", "x": 0, "y": -0.18, "yanchor": "top", "traceorder": "normal"},
        updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.03, "yanchor": "bottom"}],
        sliders=[slide],
    )
    return titled(figure, title, width=800, height=470, t=50, b=150, r=80)


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
    names = [*labels, *map(str, groups)] if marks else labels  # a mark could cross a heading that is in the plot
    left = max(90, 16 + 7 * max(map(len, names)))
    for row, heading in headings.items():  # above the plot's rows, so that a long one takes no room from the plot
        figure.add_annotation(text=heading, y=row, bgcolor=PAPER, **beside | {"x": 0, "xshift": 8 - left})
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
    words = "Points with their 95 % intervals." if points.low.notna().any() else ""
    if zero:
        words = f"{clear.sum()} of {points.low.notna().sum()} intervals exclude 0 (filled)."
    right = 24 + 7 * max(map(len, texts))
    return titled(figure, title, words, 820, ROW * len(labels) + 60, l=left, r=right, t=16 * bool(marks))
