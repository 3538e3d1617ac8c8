"""Curves over training steps or another quantity: a line for the mean of the seeds, a band for their range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

import numpy as np
import plotly.graph_objects as go

from labkit.attention.plain import clean, plain_array
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
    if at is not None and at not in x:
        raise MaskError(f"nothing was measured at {at}: one of {', '.join(f'{value:g}' for value in x)}")
    last = len(x) - 1 if at is None else x.index(at)
    figure, styles, means, n_seeds = go.Figure(), line_styles(map(str, arms)), [], 1
    for name, seeds in arms.items():
        seeds = plain_array(seeds, f"the seeds of {name!r}").astype(float)  # (seeds, x)
        if seeds.ndim != 2 or seeds.shape[1] != len(x) or not np.isfinite(seeds).any():
            raise MaskError(f"{name!r} must be lists of {len(x)} numbers, one list for each seed, not {seeds.shape}")
        if np.isfinite(seeds[:, last]).any():
            means.append(f"{name} {np.nanmean(seeds[:, last]):.2f}")
        n_seeds = max(n_seeds, len(seeds))
        measured = np.isfinite(seeds).any(0)
        xs, seeds = np.asarray(x)[measured], seeds[:, measured]
        low, high = np.nanmin(seeds, 0), np.nanmax(seeds, 0)
        colour, dash = styles[str(name)]
        band = {"x": np.r_[xs, xs[::-1]], "y": np.r_[high, low[::-1]], "fill": "toself", "fillcolor": colour}
        figure.add_scatter(**band, opacity=0.18, line_width=0, mode="lines", hoverinfo="skip", showlegend=False)
        figure.add_scatter(
            x=xs,
            y=np.nanmean(seeds, 0),
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
    words = f"At {x_name} {x[last]:g}: {', '.join(means)}."
    words += f" Mean and range of up to {n_seeds} seeds." * (n_seeds > 1)
    horizontal = {"title": {"text": escape(x_name), "standoff": 8}, "zeroline": False}
    if log_x:
        horizontal |= {"type": "log", "dtick": 1 if max(x) > 10 * min(x) else None}
    figure.update_layout(
        xaxis=horizontal,
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
    start = options.pop("at", x[0])
    texts = [[line for name in samples or {} for line in _lines(name, samples[name][i])] for i in range(len(x))]
    room = 17 * max(map(len, texts)) + 16 if samples else 0
    place = {"x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top", "yshift": -64}
    figures = {}
    for value, lines in zip(x, texts, strict=True):
        figure = curves_figure(x, arms, at=value, **options)
        figure.add_annotation(text="<br>".join(lines), align="left", font_size=12, showarrow=False, **place)
        figures[f"{value:g}"] = figure.update_layout(height=figure.layout.height + room, margin_b=50 + room)
    if start not in x:
        raise MaskError(f"nothing was measured at {start}: one of {', '.join(figures)}")
    return slider(figures, options.get("x_name", "training step"), list(x).index(start))


def _lines(name: str, text: str) -> list[str]:
    """The first lines of a text, after the name of its arm in bold."""
    first, *rest = map(escape, wrap(f"{name}: {clean(text)}", 105)[:4])
    bold = len(escape(name)) + 1
    return [f"<b>{first[:bold]}</b>{first[bold:]}", *rest]
