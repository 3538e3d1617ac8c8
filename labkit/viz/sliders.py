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
    if not 0 <= start < len(figures):
        raise MaskError(f"there is no figure {start}: slider takes {{label: figure}} and the number of one of them")
    owner = [number for number, figure in enumerate(figures.values()) for _ in figure.data]
    steps = []
    for number, (label, figure) in enumerate(figures.items()):
        # The slider is above the title, so that it stays in its place where figures differ in height.
        layout = {"shapes": [], "annotations": []} | figure.to_dict()["layout"]
        layout.pop("template")
        layout["height"] += ROOM
        layout["sliders[0].pad.b"] = layout["margin"]["t"] + 10
        layout["margin"]["t"] += ROOM
        layout["title"]["pad"]["t"] += ROOM
        steps.append(
            {
                "method": "update",
                "label": escape(str(label)),
                "args": [{"visible": [i == number for i in owner]}, layout],
            }
        )
    result = go.Figure([trace for figure in figures.values() for trace in figure.data])
    for trace, number in zip(result.data, owner, strict=True):
        trace.visible = number == start
    first = dict(steps[start]["args"][1])
    labels = [step["label"] for step in steps]
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
