"""Curves over training steps or another quantity: a line for the mean of the seeds, a band for their range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

import numpy as np
import plotly.graph_objects as go

from labkit.attention.plain import clean
from labkit.errors import MaskError
from labkit.viz.sliders import slider
from labkit.viz.style import GREY, INK, RULE, escape, line_styles, titled


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
        MaskError: lists that do not match `x`, an arm with no number at all, or an `at` that is not in `x`.
    """
    x = [float(value) for value in x]
    values = {str(name): _seeds(name, seeds, len(x)) for name, seeds in arms.items()}
    if at is not None and at not in x:
        raise MaskError(f"nothing was measured at {at}: one of {', '.join(f'{value:g}' for value in x)}")
    figure, styles = go.Figure(), line_styles(values)
    for name, seeds in values.items():
        colour, dash = styles[name]
        measured = np.isfinite(seeds).any(0)
        xs, seeds = np.asarray(x)[measured], seeds[:, measured]
        low, mean, high = np.nanmin(seeds, 0), np.nanmean(seeds, 0), np.nanmax(seeds, 0)
        of_seeds = [f"{a:.3f} to {b:.3f}" for a, b in zip(low, high, strict=True)] if len(seeds) > 1 else None
        line = {"color": colour, "width": 2.5, "dash": dash}
        hover = "%{x}: %{y:.3f}" + (", seeds %{customdata}" if of_seeds else "") + f"<extra>{escape(name)}</extra>"
        band = {"x": np.r_[xs, xs[::-1]], "y": np.r_[high, low[::-1]], "fill": "toself", "hoverinfo": "skip"}
        figure.add_scatter(**band, fillcolor=_faint(colour), line_width=0, mode="lines", showlegend=False)
        mode = "lines+markers" if len(xs) < 30 else "lines"
        figure.add_scatter(
            x=xs, y=mean, mode=mode, line=line, name=escape(name), customdata=of_seeds, hovertemplate=hover
        )
    if floor is not None:
        figure.add_hline(
            floor, line={"color": GREY, "dash": "dash"}, annotation_text=f"{escape(floor_name)} = {floor:.3f}"
        )
    if at is not None:
        figure.add_vline(at, line={"color": INK, "width": 1})
    last = x.index(at) if at is not None else len(x) - 1
    n = {int(count) for seeds in values.values() for count in np.isfinite(seeds).sum(0) if count}
    words = f"At {x_name} {x[last]:g}: " + ", ".join(
        f"{name} {np.nanmean(seeds[:, last]):.2f}"
        for name, seeds in values.items()
        if np.isfinite(seeds[:, last]).any()
    )
    words += f". Mean and range of {'up to ' * (len(n) > 1)}{max(n)} seeds." if max(n) > 1 else "."
    figure.update_layout(
        xaxis={
            "title": {"text": escape(x_name), "standoff": 8},
            "type": "log" if log_x else "linear",
            "dtick": 1 if log_x and max(x) > 10 * min(x) else None,
            "zeroline": False,
        },
        yaxis={"title": escape(y_name), "gridcolor": RULE, "zeroline": False},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
    )
    return titled(figure, title, words, 800, 360, t=30)


def curves_slider(
    x: Sequence[float], arms: Mapping[str, object], samples: Mapping[str, Sequence[str]] | None = None, **options
) -> go.Figure:
    """`curves_figure` with a slider over `x`, and below it what each arm wrote at that time.

    Args:
        samples: `{arm: one text for each x}`.
        options: those of `curves_figure`; `at` is where the slider begins.
    """
    at = options.pop("at", None)
    texts = [_samples(samples or {}, i) for i in range(len(x))]
    room = 17 * max(map(len, texts)) + 16 if samples else 0
    place = {"x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top", "yshift": -64}
    figures = {}
    for value, lines in zip(x, texts, strict=True):
        figure = curves_figure(x, arms, at=value, **options)
        figure.add_annotation(text="<br>".join(lines), align="left", font_size=12, showarrow=False, **place)
        figures[f"{value:g}"] = figure.update_layout(height=figure.layout.height + room, margin_b=50 + room)
    if at is not None and at not in x:
        raise MaskError(f"nothing was measured at {at}: one of {', '.join(figures)}")
    return slider(figures, options.get("x_name", "training step"), 0 if at is None else list(x).index(at))


def _samples(samples: Mapping[str, Sequence[str]], i: int) -> list[str]:
    """The lines of text number `i` of each arm, its name in bold."""
    lines = []
    for name, texts in samples.items():
        first, *rest = map(escape, wrap(f"{name}: {clean(texts[i])}", 105)[:4])
        bold = len(escape(name)) + 1
        lines += [f"<b>{first[:bold]}</b>{first[bold:]}", *rest]
    return lines


def _seeds(name, seeds, n: int) -> np.ndarray:
    """Float (seeds, n)."""
    array = np.asarray(seeds.detach().cpu() if hasattr(seeds, "detach") else [list(map(float, row)) for row in seeds])
    if array.ndim != 2 or array.shape[1] != n or not np.isfinite(array).any():
        raise MaskError(f"{name!r} must be lists of {n} numbers, one list for each seed, not shape {array.shape}")
    return array.astype(float)


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"
