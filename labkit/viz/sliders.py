"""Several figures behind one slider: it works without a kernel, on saved pages too."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from labkit.errors import MaskError
from labkit.viz.style import escape

ROOM = 94  # pixels, the height of a slider


def slider(figures: Mapping[str, go.Figure], name: str, start: int = 0) -> go.Figure:
    """One figure with a slider over `figures`, `{label: figure}`, called `name`; it begins at number `start`.

    The result holds the traces of all figures, and each step shows those of one of them, with its layout.

    Raises:
        MaskError: no figures, or a start without a figure.
    """
    labels = list(map(str, figures))
    if not 0 <= start < len(labels):
        raise MaskError(f"there is no figure {start}: slider takes {{label: figure}} and the number of one of them")
    owner = [number for number, figure in enumerate(figures.values()) for _ in figure.data]
    steps = []
    for number, (label, figure) in enumerate(zip(labels, figures.values(), strict=True)):
        # The slider is above the title, so that it stays in its place where figures differ in height.
        layout = {"shapes": [], "annotations": []} | figure.to_dict()["layout"]
        top, title = layout["margin"]["t"], layout["title"]
        layout |= {
            "height": layout["height"] + ROOM,
            "margin": layout["margin"] | {"t": top + ROOM},
            "title": title | {"pad": {"t": title["pad"]["t"] + ROOM}},
            "sliders[0].pad.b": top + 10,
        }
        layout.pop("template")
        shown = {"visible": [owned_by == number for owned_by in owner]}
        steps.append({"method": "update", "label": escape(label), "args": [shown, layout]})
    traces = [trace for figure in figures.values() for trace in figure.data]
    result = go.Figure(traces, list(figures.values())[start].layout)
    for trace, number in zip(result.data, owner, strict=True):
        trace.visible = number == start
    first = dict(steps[start]["args"][1])
    sides = {"l": max(24, 4 * len(labels[0])), "r": max(24, 4 * len(labels[-1]))}
    control = {
        "active": start,
        "currentvalue": {"prefix": f"{escape(name)}: ", "font": {"size": 13}},
        "steps": steps,
        "x": 0,
        "len": 1,
        "y": 1,
        "yanchor": "bottom",
        "pad": {"t": 0, "b": first.pop("sliders[0].pad.b"), **sides},
    }
    return result.update_layout(first, sliders=[control])
