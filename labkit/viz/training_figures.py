"""Figures of training runs over seeds: curves and final scores, with 95 % intervals by Student's t.

Plain numbers in, a plotly `Figure` out. A single seed has no interval, and the figure says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import MaskError
from labkit.viz.intervals import mean_interval
from labkit.viz.panels import TOP_LEFT, text
from labkit.viz.themes import GREY, INK, LINES, RULE, faint, finished

if TYPE_CHECKING:
    import plotly.graph_objects as go

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


def runs_figure(
    runs: Mapping[str, object], steps: Sequence, metric: str = "loss", title: str | None = None
) -> go.Figure:
    """Training runs compared: `{name: (seeds, steps)}` values of `metric`, measured after `steps`.

    The mean over the seeds is a thick line in a band, its 95 % interval at each step; each seed is a thin line. Runs
    differ in colour and in dash.

    Raises:
        MaskError: numbers that do not fit the steps, are not finite, or no run.
    """
    return _curves(runs, steps, metric, title)


def leak_curves_figure(
    steps: Sequence,
    arms: Mapping[str, object],
    floor: float | int | None = None,
    floor_name: str = "ln V",
    title: str | None = None,
) -> go.Figure:
    """The loss of several arms over training, `{name: (seeds, steps)}` in nats per token, as in `runs_figure`.

    `floor` is what no honest model gets below: a dashed line, called `floor_name`, over a tinted ground.

    Raises:
        MaskError: numbers that do not fit the steps, are not finite, or no arm.
    """
    if floor is not None and not math.isfinite(floor):
        raise MaskError(f"the floor must be a finite number of nats, not {floor}")
    return _curves(arms, steps, "loss, nats per token", title, floor, floor_name)


def scores_figure(scores: Mapping[str, object], metric: str = "score", title: str | None = None) -> go.Figure:
    """Final scores compared: `{run: one value per seed}`, each seed a point, the mean with its 95 % interval beside.

    With values as `{seed: value}`, runs are matched by seed; lists of the same length by their order. A second panel
    then shows each run's differences to the first run, seed by seed, with the mean difference and its interval: seeds
    that are good or bad for every run drop out of it.

    Raises:
        MaskError: no run, a run without values, or a value that is no finite number.
    """
    import plotly.graph_objects as go

    runs = _checked_scores(scores)
    first = next(iter(runs))
    paired = {name: _paired(run, runs[first]) for name, run in runs.items() if name != first}
    paired = {name: differences for name, differences in paired.items() if len(differences)}
    figure, parts = go.Figure(), []
    for i, (name, run) in enumerate(runs.items()):
        parts.append(_points(figure, np.array(list(run.values())), _label(name, run), i, list(run)))
    for name, differences in paired.items():
        label = f"{_short(name)} − {_short(first)} (n = {len(differences)})"
        said = _points(figure, differences, label, list(runs).index(name), None, "x2", "y2")
        parts.append(said.replace(label, f"{name} minus {first}, seed by seed (n = {len(differences)})"))
    rows, below = len(runs), len(paired)
    left = 12 + 8 * max(len(_label(name, run)) for name, run in runs.items())
    left = max(left, 12 + 8 * max((len(f"{_short(name)} − {_short(first)} (n = 99)") for name in paired), default=0))
    above, high = 40 + 20 * (title is not None), 46
    split = rows / (rows + below + 2) if below else 1
    total = high * (rows + (below + 2 if below else 0))
    axis = {"showgrid": True, "gridcolor": RULE, "zeroline": False}
    names = {"autorange": "reversed", "showgrid": False, "type": "category"}
    figure.update_layout(
        width=820,
        height=above + total + 60,
        margin={"l": left, "r": 30, "t": above, "b": 60},
        title={**text(title or ""), **TOP_LEFT},
        showlegend=False,
        xaxis={**axis, "title": text(metric), "anchor": "y"},
        yaxis={**names, "domain": [1 - split, 1], "anchor": "x"},
    )
    if below:
        figure.update_layout(
            xaxis2={
                **axis,
                "title": text(f"difference in {metric}"),
                "anchor": "y2",
                "range": _span_with_zero(figure, "x2"),
            },
            yaxis2={**names, "domain": [0, below / (rows + below + 2)], "anchor": "x2"},
        )
        line = {"color": INK, "width": 1, "dash": "dash"}
        figure.add_shape(type="line", x0=0, x1=0, xref="x2", y0=0, y1=1, yref="y2 domain", line=line)
    return finished(figure, f"{title or f'Final {metric}'}: " + " ".join(parts))


# ---------------------------------------------------------------------------------------------------------- curves
def _curves(
    runs: Mapping[str, object],
    steps: Sequence,
    metric: str,
    title: str | None,
    floor: float | int | None = None,
    floor_name: str = "",
) -> go.Figure:
    import plotly.graph_objects as go

    steps, runs = _checked_curves(runs, steps)
    figure, words = go.Figure(), []
    for i, (name, values) in enumerate(runs.items()):
        mean, half = mean_interval(values)
        colour, dash = LINES[i % len(LINES)], DASHES[i % len(DASHES)]
        label, group = f"{_short(name)} ({_seeds(len(values))})", f"run {i}"
        shared = {"x": steps, "legendgroup": group, "showlegend": False}
        if half is not None:
            there, back = np.concatenate([steps, steps[::-1]]), np.concatenate([mean + half, (mean - half)[::-1]])
            band = {"fill": "toself", "fillcolor": faint(colour, 0.22), "line": {"width": 0}, "hoverinfo": "skip"}
            figure.add_trace(go.Scatter(**shared | {"x": there}, y=back, mode="lines", name=f"interval {i}", **band))
            for seed, curve in enumerate(values):
                thin = {"line": {"width": 0.8, "color": faint(colour, 0.75)}, "hoverinfo": "skip"}
                figure.add_trace(go.Scatter(**shared, y=curve, mode="lines", name=f"seed {seed} of {i}", **thin))
        hover = [
            f"{escape(name)}, step {step}: {_with_half(value, None if half is None else half[j])}"
            for j, (step, value) in enumerate(zip(steps, mean, strict=True))
        ]
        figure.add_trace(
            go.Scatter(
                **shared | {"showlegend": True},
                y=mean,
                mode="lines+markers" if len(steps) <= 30 else "lines",
                name=escape(label),
                line={"width": 2.5, "color": colour, "dash": dash},
                marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 7, "color": colour},
                hovertext=hover,
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
        words.append(
            f"{name} ({_seeds(len(values))}): {_with_half(mean[0], None if half is None else half[0])} at first, "
            f"{_with_half(mean[-1], None if half is None else half[-1])} at the end."
        )
    if floor is not None:
        figure.add_hline(y=floor, line={"color": INK, "width": 1.5, "dash": "6px,4px"})
        figure.add_hrect(y0=0, y1=floor, fillcolor=faint(GREY, 0.09), line_width=0, layer="below")
        label = {"text": f"{escape(floor_name)} = {floor:.2f}", "xref": "paper", "x": 1, "xanchor": "right"}
        figure.add_annotation(**label, y=floor, yanchor="top", showarrow=False)
        words.append(f"The floor, {floor_name}, is {floor:.2f}; below it only with the answer in sight.")
    seeds = {len(values) for values in runs.values()}
    note = "one seed" if seeds == {1} else "mean over seeds, band: its 95 % interval, thin lines: single seeds"
    lowest = 0.0 if floor is not None else None
    figure.update_layout(
        width=820,
        height=440,
        margin={"l": 70, "r": 20, "t": 60 + 10 * (title is not None), "b": 60 + 22 * -(-len(runs) // 3)},
        title={**text(title or ""), "subtitle": text(note), **TOP_LEFT},
        xaxis={"title": text("training step"), "showgrid": False, "zeroline": False},
        yaxis={"title": text(metric), "zeroline": False, "range": [lowest, None] if floor is not None else None},
        legend={"orientation": "h", "y": -0.16, "yanchor": "top", "itemwidth": 60},
        hovermode="closest",
    )
    what = title or f"{metric[:1].upper()}{metric[1:]}"
    return finished(figure, f"{what} from training step {steps[0]} to {steps[-1]}, {note}. " + " ".join(words))


def _checked_curves(runs: Mapping[str, object], steps: Sequence) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    steps = np.asarray(list(steps))
    if len(steps) < 2 or steps.dtype.kind not in "iuf" or (np.diff(steps) <= 0).any():
        raise MaskError(f"curves need at least two steps in ascending order, and got {steps.tolist()}")
    if not isinstance(runs, Mapping) or not runs:
        raise MaskError("curves come as a dictionary {name: one list of values for each seed} with at least one run")
    checked = {}
    for name, curves in runs.items():
        values = _numbers(curves, f"run {str(name)!r}")
        if values.ndim != 2 or values.shape[1] != len(steps) or not len(values):
            raise MaskError(
                f"run {str(name)!r} must have shape (seeds, steps) with {len(steps)} steps, not {values.shape}: "
                "of one seed, pass [values]"
            )
        checked[str(name)] = values
    return steps, checked


def _numbers(values, what: str) -> np.ndarray:
    try:
        array = np.asarray([np.asarray(row, dtype=float) for row in values])
    except (TypeError, ValueError):
        raise MaskError(f"{what} must hold numbers, and as many for each seed") from None
    if not np.isfinite(array).all():
        raise MaskError(f"{what} holds a value that is no finite number: did the training diverge?")
    return array


# ---------------------------------------------------------------------------------------------------------- scores
def _points(figure: go.Figure, values: np.ndarray, label: str, i: int, seeds, x: str = "x", y: str = "y") -> str:
    """The seeds as points, over them the mean with its interval; and that in words."""
    import plotly.graph_objects as go

    colour, axes = LINES[i % len(LINES)], {"xaxis": x, "yaxis": y}
    mean, half = (None if part is None else float(part) for part in mean_interval(values))
    names = [f"seed {seed}: {value:.4g}" for seed, value in zip(seeds or range(len(values)), values, strict=True)]
    figure.add_trace(
        go.Scatter(
            **axes,
            x=values,
            y=[escape(label)] * len(values),
            mode="markers",
            marker={"symbol": f"{SYMBOLS[i % len(SYMBOLS)]}-open", "size": 9, "color": colour, "line": {"width": 1.5}},
            hovertext=names,
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    bar = None if half is None else {"type": "data", "array": [half], "color": INK, "thickness": 2, "width": 8}
    said = _with_half(mean, half) + (" (one seed: no interval)" if half is None else "")
    figure.add_trace(
        go.Scatter(
            **axes,
            x=[mean],
            y=[escape(label)],
            mode="markers+text",
            marker={"symbol": "line-ns", "size": 18, "line": {"width": 3, "color": INK}, "color": INK},
            error_x=bar,
            text=[said],
            textposition="top center",
            hovertemplate=f"mean {said}<extra></extra>",
            cliponaxis=False,
        )
    )
    return f"{label}: {said}."


def _checked_scores(scores: Mapping[str, object]) -> dict[str, dict]:
    if not isinstance(scores, Mapping) or not scores:
        raise MaskError("scores come as a dictionary {run: one value per seed} with at least one run")
    runs = {}
    for name, given in scores.items():
        if not isinstance(given, Mapping) and (isinstance(given, str) or not hasattr(given, "__len__")):
            raise MaskError(f"the scores of {str(name)!r} must be a list, one value per seed, not {given!r}")
        values = given if isinstance(given, Mapping) else dict(enumerate(given))
        array = _numbers([list(values.values())], f"run {str(name)!r}")[0]
        if not len(array):
            raise MaskError(f"run {str(name)!r} has no values: give one for each seed")
        runs[str(name)] = dict(zip(values, array, strict=True))
        runs[str(name)] = _Run(runs[str(name)], isinstance(given, Mapping))
    return runs


class _Run(dict):
    """Values by seed; `named` says whether the seeds were given, or are only places in a list."""

    def __init__(self, values: dict, named: bool) -> None:
        super().__init__(values)
        self.named = named


def _paired(run: _Run, first: _Run) -> np.ndarray:
    """The differences where seeds match; none where lists differ in length, or only one side names its seeds."""
    if run.named != first.named or (not run.named and len(run) != len(first)):
        return np.array([])
    return np.array([run[seed] - first[seed] for seed in first if seed in run])


def _with_half(mean: float | int, half: float | int | None) -> str:
    """A mean and half its interval, as many digits as the interval leaves any meaning."""
    if half is None or not half > 0:
        return f"{mean:.4g}" + ("" if half is None else " ± 0")
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def _span_with_zero(figure: go.Figure, axis: str) -> list[float]:
    """The range of all points and intervals of an axis, with 0 and a margin."""
    ends = [0.0]
    for trace in figure.data:
        if trace.xaxis == axis:
            half = max(trace.error_x.array) if trace.error_x.array is not None else 0
            ends += [min(trace.x) - half, max(trace.x) + half]
    margin = 0.06 * (max(ends) - min(ends) or 1)
    return [float(min(ends) - margin), float(max(ends) + margin)]


def _label(name: str, run: Mapping) -> str:
    return f"{_short(name)} (n = {len(run)})"


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"n = {n}"


def _short(name: str) -> str:
    return name if len(name) <= 28 else name[:27] + "…"
