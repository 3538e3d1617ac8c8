"""Several figures behind one slider: it works without a kernel, on saved pages too."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from labkit.errors import MaskError
from labkit.viz.style import escape

ROOM = 94  # pixels, the height of a slider and the room above it


def slider(figures: Mapping[str, go.Figure], name: str, start: int = 0) -> go.Figure:
    """One figure with a slider over `figures`, `{label: figure}`, called `name`; it begins at number `start`.

    The result holds the traces of all figures, and each step shows those of one of them, with its layout.

    Raises:
        MaskError: no figures, or a start without a figure.
    """
    labels = list(map(str, figures))
    if not 0 <= start < len(labels):
        raise MaskError(
            f"there is no figure {start}: slider takes a dictionary {{label: figure}} and one of its numbers"
        )
    height = max(figure.layout.height for figure in figures.values())
    owner = [number for number, figure in enumerate(figures.values()) for _ in figure.data]
    steps = []
    for number, (label, figure) in enumerate(zip(labels, figures.values(), strict=True)):
        # Every figure keeps its own size, and the slider stays in its place below the tallest one.
        below = 8 + (figure.layout.margin.b or 0) + height - figure.layout.height
        layout = {"shapes": [], "annotations": []} | figure.to_dict()["layout"]
        layout |= {"height": height + ROOM, "margin": layout["margin"] | {"b": below - 8 + ROOM}}
        layout["sliders[0].pad.t"] = below
        layout.pop("template")
        shown = {"visible": [one == number for one in owner]}
        steps.append({"method": "update", "label": escape(label), "args": [shown, layout]})
    traces = [trace for figure in figures.values() for trace in figure.data]
    result = go.Figure(traces, list(figures.values())[start].layout)
    for trace, one in zip(result.data, owner, strict=True):
        trace.visible = one == start
    below = steps[start]["args"][1]["sliders[0].pad.t"]
    control = {
        "active": start,
        "currentvalue": {"prefix": f"{escape(name)}: ", "font": {"size": 13}},
        "steps": steps,
        "x": 0,
        "len": 1,
        "y": 0,
        "pad": {"t": below, "l": max(24, 4 * len(labels[0])), "r": max(24, 4 * len(labels[-1]))},
    }
    return result.update_layout(height=height + ROOM, margin_b=below - 8 + ROOM, sliders=[control])
