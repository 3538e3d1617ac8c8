"""What labkit's widgets share: their JavaScript, the figure beside them, and an HTML page with one widget.

The page opens from disk, needs no kernel, and requests nothing from the network. `embedded` is the widget alone, for a
page that runs page.js itself: the site does.
"""

from __future__ import annotations

import json
from base64 import b64encode
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from anywidget import AnyWidget
from ipywidgets import DOMWidget
from ipywidgets.widgets.widget import _remove_buffers

from labkit.files import write_whole


def page(widget: AnyWidget, title: str, path: str | Path | None = None, **values: Any) -> str:
    """The page of `widget`; if a `path` is given, the page is also written there.

    `values` replace values of the widget's state.
    """
    parts = {"widget": embedded(widget, **values), "script": joined("page.js")}
    text = joined("page.html").format(title=escape(title), **parts)
    if path is not None:
        write_whole(path, text)
    return text


def embedded(widget: AnyWidget, **values: Any) -> str:
    """`widget` as HTML: the element in which page.js draws the widget, and the widget's state."""
    state, paths, buffers = _remove_buffers(own_state(widget) | values)
    encoded = [
        {"path": path, "encoding": "base64", "data": b64encode(data).decode()}
        for path, data in zip(paths, buffers, strict=True)
    ]
    states = {"state": {"widget": {"state": state, "buffers": encoded}}}
    # In HTML, "<" could end the script element early.
    text = json.dumps(states, ensure_ascii=False).replace("<", "\\u003c")
    kind = "application/vnd.jupyter.widget-state+json"
    fallback = "<noscript>This page needs JavaScript.</noscript>"
    return f'<div data-widget="widget">{fallback}</div>\n<script type="{kind}">{text}</script>'


def own_state(widget: AnyWidget) -> dict[str, Any]:
    """The values that `widget` shares with the browser, its module and style among them; not those of all widgets."""
    return widget.get_state(set(widget.keys) - set(DOMWidget.class_trait_names(sync=True)))


def joined(*parts: str) -> str:
    """The text of several files of labkit.viz, such as one module of JavaScript."""
    return "\n".join(files(__package__).joinpath(part).read_text(encoding="utf-8") for part in parts)


def with_figure(bundle: tuple | None, figure: go.Figure) -> tuple[dict[str, object], dict[str, object]]:
    """The MIME bundle of a widget, and beside it a figure for pages that only render the notebook."""
    data, metadata = bundle or ({}, {})
    return {**data, **figure._repr_mimebundle_()}, metadata
