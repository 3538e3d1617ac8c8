"""Several figures behind one slider, as plotly frames: they work without a kernel, on saved pages too."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import plotly.graph_objects as go

from labkit.errors import MaskError

ROOM = 86  # pixels, the height of a slider


def slider(figures: Mapping[str, go.Figure], name: str, start: int = 0) -> go.Figure:
    """One figure with a slider over `figures`, `{label: figure}`, called `name`; it begins at number `start`.

    All figures need the same number of traces: those of one function for several inputs have it.

    Raises:
        MaskError: no figures, figures with different numbers of traces, or a start without a figure.
    """
    labels = list(map(str, figures))
    if not labels or len({len(figure.data) for figure in figures.values()}) > 1:
        raise MaskError("slider takes a dictionary {label: figure} whose figures have the same number of traces")
    if not 0 <= start < len(labels):
        raise MaskError(f"there is no figure {start}: the number is from 0 to {len(labels) - 1}")
    shown = go.Figure(list(figures.values())[start])
    height = max(figure.layout.height for figure in figures.values())
    frames = []
    for label, figure in zip(labels, figures.values(), strict=True):
        layout = figure.to_dict()["layout"] | {"height": height + ROOM}
        layout.pop("template")
        frames.append(go.Frame(name=label, data=figure.data, layout=layout))
    jump = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    steps = [{"method": "animate", "label": escape(label), "args": [[label], jump]} for label in labels]
    bottom = shown.layout.margin.b or 0
    # The slider's own height does not scale with the figure: its place is given from the lower edge of the plot.
    area = height - (shown.layout.margin.t or 0) - bottom
    control = {
        "active": start,
        "currentvalue": {"prefix": f"{escape(name)}: ", "font": {"size": 13}},
        "steps": steps,
        "x": 0,
        "len": 1,
        "y": -bottom / area,
        "pad": {"t": 4, "l": 24, "r": 24},
    }
    shown.frames = frames
    return shown.update_layout(height=height + ROOM, margin_b=bottom + ROOM, sliders=[control])
