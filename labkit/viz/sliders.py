"""Several figures behind one slider: it works without a kernel, on saved pages too."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from labkit.errors import MaskError
from labkit.viz.style import escape

ROOM = 94  # pixels, the height of a slider


def slider(figures: Mapping[str, go.Figure], name: str, start: int = 0) -> go.Figure:
    """One figure with a slider over `figures`, `{label: figure}`, called `name`; it begins at number `start`.

    The result holds the traces of all figures, and each step shows those of one of them, with its layout. All need
    the same number of panels.

    Raises:
        MaskError: no figures, a start without a figure, or figures with different numbers of panels.
    """
    if not 0 <= start < len(figures):
        raise MaskError(f"there is no figure {start}: slider takes {{label: figure}} and the number of one of them")
    owner = [number for number, figure in enumerate(figures.values()) for _ in figure.data]
    layouts = [{"shapes": [], "annotations": []} | figure.to_dict()["layout"] for figure in figures.values()]
    panels = {
        label: sum(key.startswith("xaxis") for key in layout) for label, layout in zip(figures, layouts, strict=True)
    }
    if len(set(panels.values())) > 1:
        raise MaskError(f"figures behind one slider need the same number of panels, and these have {panels}")
    steps = []
    for number, (label, layout) in enumerate(zip(figures, layouts, strict=True)):
        # The slider is above the title, so that it stays in its place where figures differ in height.
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
    first = dict(steps[start]["args"][1])
    same = [key for key in first if all(step["args"][1].get(key) == first[key] for step in steps)]
    for step in steps:  # what all figures share is stored once, which makes a saved notebook much smaller
        step["args"][1] = {key: value for key, value in step["args"][1].items() if key not in same}
    result = go.Figure([trace for figure in figures.values() for trace in figure.data])
    for trace, number in zip(result.data, owner, strict=True):
        trace.visible = number == start
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
