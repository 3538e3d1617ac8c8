"""Several figures behind one slider, as plotly frames: they work without a kernel, on saved pages too."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from labkit.errors import MaskError
from labkit.viz.style import escape

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
    # All frames share their margins: plotly keeps the clipping and the slider of the first one.
    top = max(figure.layout.margin.t or 0 for figure in figures.values())
    bottom = shown.layout.margin.b or 0
    area = max(figure.layout.height - (figure.layout.margin.t or 0) for figure in figures.values()) - bottom
    size = {"height": top + area + bottom + ROOM}
    margin = {"t": top, "b": bottom + ROOM, "autoexpand": False}
    frames = []
    for label, figure in zip(labels, figures.values(), strict=True):
        layout = figure.to_dict()["layout"]
        layout |= size | {"margin": layout["margin"] | margin}
        layout.pop("template")
        frames.append(go.Frame(name=label, data=figure.data, layout=layout))
    jump = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    steps = [{"method": "animate", "label": escape(label), "args": [[label], jump]} for label in labels]
    # The slider's own height does not scale with the figure: its place is given from the lower edge of the plot.
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
    return shown.update_layout(size, margin=margin, sliders=[control])
