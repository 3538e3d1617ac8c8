"""Colours, the plotly template of all figures, and the checks of their arguments.

Each colour has one meaning, in every figure and every notebook. Importing this module makes the template plotly's
default, so figures that a notebook makes itself look the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape as html_escape
from textwrap import wrap

import numpy as np
import plotly.graph_objects as go
import plotly.io

from labkit.attention.plain import plain_array
from labkit.errors import MaskError

# Okabe and Ito's palette, and Paul Tol's red: the colours differ with every kind of colour vision.
OPEN = "#0072B2"  # a cell that the mask leaves open; attention, from nearly white to dark blue
MASKED = "#E2E4E7"  # a cell that the mask closes
WRONG = "#CC3311"  # a leak, a cell that differs from the mask that was declared, a wrong answer
CAUSAL, BIDIRECTIONAL = "#E69F00", "#009E73"
OTHERS = ("#CC79A7", "#56B4E9", "#5B6670", "#882255", "#999933", "#332288")  # all other models and arms
PAPER, INK, GREY, RULE = "#FFFFFF", "#222222", "#5B6670", "#E1E6EA"
WEIGHTS = [[0, "#F7FBFF"], [0.25, "#C6DBEF"], [0.5, "#6BAED6"], [0.75, "#2171B5"], [1, "#08306B"]]
LIGHT_OPEN, LIGHT_WRONG = "#D6E9F5", "#F8DAD4"
DASHES = ("solid", "dash", "dot", "dashdot")
MEANINGS = {
    "causal": CAUSAL, "bidirectional": BIDIRECTIONAL, "unmasked": BIDIRECTIONAL, "open": BIDIRECTIONAL,
    "MNTP": OTHERS[3],  # without its mask, and adapted
}  # fmt: skip

_AXIS = {"gridcolor": RULE, "zerolinecolor": RULE, "linecolor": GREY, "tickcolor": GREY}
_AXIS["title"] = {"font": {"size": 13}, "standoff": 8}
_TITLE = {"font": {"size": 15}, "x": 0.01, "y": 1, "yanchor": "top", "subtitle": {"font": {"color": GREY}}}
plotly.io.templates["labkit"] = go.layout.Template(
    layout={
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"family": "sans-serif", "color": INK, "size": 13},
        "colorway": OTHERS,
        "colorscale": {"sequential": WEIGHTS},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "hoverlabel": {"align": "left"},
        "legend": {"title": {"font": {"size": 13}}},
        "title": _TITLE | {"pad": {"t": 6}},
    }
)
plotly.io.templates.default = "labkit"


def line_styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """{name: (colour, dash)}; names of one colour differ in their dash."""
    others, used, styles = iter(OTHERS * 4), [], {}
    for name in names:
        colour = meaning(name) or next(others)
        styles[name] = (colour, DASHES[used.count(colour) % len(DASHES)])
        used.append(colour)
    return styles


def meaning(name: str) -> str | None:
    """The colour of a causal or a bidirectional model or arm, by the first word of its name."""
    return MEANINGS.get(name.split()[0].strip(",:;()")) if name.strip() else None


def escape(text: str) -> str:
    """`text` for a figure: plotly reads `&lt;`, `&gt;` and `&amp;`, and would show `&quot;` as it is."""
    return html_escape(text, quote=False)


def percent(share: float) -> str:
    """A probability with enough digits to tell it apart from 0 and from 1."""
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:.1%}" if 0 < share < 0.0995 or 0.99 <= share < 0.9995 else f"{share:.0%}"


def titled(figure: go.Figure, title: str | None, subtitle: str = "", width: int = 800, height: int = 400, **margin):
    """`figure` in its size, with the title above and, in grey, what the figure shows in words."""
    letters = max(20, width // 8)
    above, below = wrap(title or "", letters), wrap(subtitle, letters)
    top = 22 * len(above) + 17 * len(below) + (14 if above and below else 8) * bool(above or below)
    small = {"color": GREY, "size": 12.5}
    main, sub = (above, below) if above else (below, [])
    margin = {"l": 60, "r": 20, "t": 0, "b": 50} | margin
    figure.update_layout(
        width=width,
        height=height + top,
        margin={**margin, "t": margin["t"] + top},
        title={
            "text": "<br>".join(map(escape, main)),
            "font": {"size": 15} if above else small,
            "pad": {"t": 18 if len(main) > 1 else 6},
            "subtitle": {"text": "<br>".join(map(escape, sub)), "font": small},
        },
    )
    return figure


def token_labels(tokens: Sequence[str] | None, q_len: int, kv_len: int) -> tuple[list[str], list[str]]:
    """The tokens of the queries and of the keys; the queries are the last `q_len`. None: their positions."""
    if isinstance(tokens, str):
        raise MaskError(f"tokens must be a list of tokens, not one text: pass {tokens!r}.split() or the tokenizer's")
    labels = [str(i) for i in range(kv_len)] if tokens is None else [str(token) for token in tokens]
    if len(labels) != kv_len:
        raise MaskError(f"{len(labels)} tokens were given for {kv_len} keys: one token for each key")
    return labels[kv_len - q_len :], labels


def bool_grid(cells, what: str) -> np.ndarray:
    """`cells` as a bool array (q_len, kv_len), True = may attend. Takes tensors, arrays and lists; bool, or 0 and 1."""
    if hasattr(cells, "dense"):
        raise MaskError(f"{what} must be a grid of True and False: pass `mask.dense(n)` rather than the mask {cells!r}")
    array = plain_array(cells, what)
    if array.dtype.kind not in "bui" or not np.isin(array, (0, 1)).all():
        raise MaskError(f"{what} must be True or False (or 1 and 0) in every cell: for weights use attention_figure")
    if array.ndim != 2 or array.size == 0 or array.shape[0] > array.shape[1]:
        raise MaskError(f"{what} must be of one text, (queries, keys) with a key for each query, not {array.shape}")
    return array.astype(bool)


def future_of(q_len: int, kv_len: int) -> np.ndarray:
    """Bool (q_len, kv_len): the keys after each query."""
    return np.triu(np.ones((q_len, kv_len), dtype=bool), k=kv_len - q_len + 1)
