"""The light and the dark theme of the plotly figures.

A figure is drawn in the colours of the light theme, on white paper of its own, which reads on any page. The dark theme
is the same figure with every colour exchanged for its counterpart in `DARK`, so the two cannot drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, DISAGREES, MASKED

if TYPE_CHECKING:
    import plotly.graph_objects as go

PAPER, INK, GREY, RULE = "#FFFFFF", "#222222", "#5B6670", "#E1E6EA"
BETWEEN = "#D0D0D0"  # shows between the cells of a map of weights, so that weights of 0 are seen as cells
PRESENT = "#333333"  # the staircase between past and future
WEIGHTS = [[0, "#F7FBFF"], [0.25, "#C6DBEF"], [0.5, "#6BAED6"], [0.75, "#2171B5"], [1, "#08306B"]]  # 0 is nearly white
DIFFERENCE = [[0, "#B35806"], [0.5, "#F7F7F7"], [1, "#542788"]]  # less (orange), same (white), more (purple)
LINES = (ALLOWED, DISAGREES, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's palette

DARK = {
    PAPER: "#111111",
    INK: "#E8EAED",
    GREY: "#A9B4BE",
    RULE: "#343B41",
    BETWEEN: "#4D555C",
    PRESENT: "#F2F2F2",
    "#F7FBFF": "#15191D",  # weights: the more, the brighter
    "#C6DBEF": "#17324A",
    "#6BAED6": "#1F6FA8",
    "#2171B5": "#62B2E6",
    "#08306B": "#E3F2FD",
    "#B35806": "#F5A14B",
    "#F7F7F7": "#1D2124",
    "#542788": "#B59BEF",
    MASKED: "#33393E",
    ALLOWED: "#56B4E9",
    DISAGREES: "#E8702A",
    "#009E73": "#2CC99A",
    "#CC79A7": "#E6A3CA",
    "#E69F00": "#F0C24B",
    "#56B4E9": "#F0E442",
}
_EXCHANGED = {"dark": DARK, "light": {dark: light for light, dark in DARK.items()}}
_in_use = "light"


def use_theme(name: str) -> None:
    """From now on every figure is made in the theme `name`, "light" or "dark". At first it is light.

    Raises:
        MaskError: another name.
    """
    global _in_use
    _in_use = _known(name)


def in_theme(figure: go.Figure, name: str) -> go.Figure:
    """The same figure in the theme `name`, "light" or "dark", as a new one.

    Raises:
        MaskError: another name, or a figure that was not made here.
    """
    import plotly.graph_objects as go

    meta = figure.layout.meta
    if not isinstance(meta, dict) or "theme" not in meta:
        raise MaskError("this figure has no theme to change: it was not made by labkit.viz")
    if meta["theme"] == _known(name):
        return go.Figure(figure)
    data = [_recoloured(trace.to_plotly_json(), _EXCHANGED[name]) for trace in figure.data]
    layout = _recoloured(figure.layout.to_plotly_json(), _EXCHANGED[name])
    return go.Figure(data, {**layout, "meta": {**meta, "theme": name}})


def finished(figure: go.Figure, words: str) -> go.Figure:
    """`figure` with its text equivalent, in the theme in use: the last step of every figure."""
    figure.update_layout(template=_template(), meta={"alt": words, "theme": "light"})
    return figure if _in_use == "light" else in_theme(figure, _in_use)


def faint(colour: str, alpha: float) -> str:
    """A colour that lets through what lies under it, as plotly writes it; the dark theme exchanges it too."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _template() -> dict:
    """What plotly calls a template: paper, letters, axes."""
    axis = {"gridcolor": RULE, "zerolinecolor": RULE, "linecolor": GREY, "tickcolor": GREY, "automargin": False}
    return {
        "layout": {
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "font": {"family": "sans-serif", "color": INK, "size": 13},
            "colorway": list(LINES),
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"align": "left"},
            "title": {"subtitle": {"font": {"color": GREY}}},
        }
    }


def _known(name: str) -> str:
    if name not in _EXCHANGED:
        raise MaskError(f"unknown theme {name!r}: choose 'light' or 'dark'")
    return name


def _recoloured(part, colours: dict[str, str], key: str = ""):
    """A copy of a figure's dictionary; only what is a colour changes, never a token that looks like one."""
    if isinstance(part, dict):
        return {name: _recoloured(value, colours, name) for name, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_recoloured(value, colours, key) for value in part]
    if not isinstance(part, str) or not (key.endswith("color") or key in ("colorscale", "colorway")):
        return part
    if part.startswith("rgba("):
        *rgb, alpha = part[5:-1].split(",")
        solid = "#" + "".join(f"{int(value):02X}" for value in rgb)
        return faint(colours[solid], float(alpha)) if solid in colours else part
    return colours.get(part, part)
