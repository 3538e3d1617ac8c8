"""What figures share: heat maps beside each other (masks, attention, tables, token rows), and a slider over figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from textwrap import wrap

import numpy as np
import plotly.graph_objects as go

from labkit.attention.plain import clean, short
from labkit.errors import MaskError
from labkit.viz.style import GREY, INK, PAPER, escape, titled

WIDEST = 820  # pixels: what a notebook shows beside an open file browser
LETTER = 7  # pixels, the width of a letter of a label
LABEL = 13  # pixels from one label to the next
HEADING = 17  # pixels, the height of a line of a heading
GAP = 14  # pixels between panels
AXIS = 17  # pixels, the title of an axis
ROOM, MENU = 94, 50  # pixels, the heights of a slider and of a menu
SMALL = {"size": 11, "color": GREY}


@dataclass
class Panel:
    """One heat map of a figure."""

    heading: str  # above the map; its first line is bold
    values: np.ndarray  # (rows, columns); NaN is left empty
    rows: Sequence[str]  # labels
    columns: Sequence[str]
    colours: list  # plotly's colour scale from `low` to `high`
    low: float = 0.0
    high: float = 1.0
    texts: np.ndarray | None = None  # (rows, columns) str, written into the cells where there is room
    hover: np.ndarray | None = None  # (rows, columns) str, shown on hovering; None: the value
    tokens: bool = True  # rows and columns are tokens: long ones are cut, and a stepped line marks the diagonal
    on_top: bool = False  # the labels of the columns are above the cells
    scale: str | None = None  # the title of the colour bar; None: no bar
    words: str = ""  # what the map shows, below the heading

    def shown(self, labels: Sequence[str]) -> list[str]:
        """Labels as they are written at an axis."""
        return [short(clean(label)) if self.tokens else label.strip(" ") for label in labels]

    def column_labels(self, cell: int) -> tuple[bool, int]:
        """Whether the labels of the columns are written upright, and the pixels that they take."""
        labels = [label.split("\n") for label in self.shown(self.columns)]
        longest = max(len(line) for lines in labels for line in lines) * LETTER
        if longest > cell - 4:
            return True, longest + 12
        return False, 8 + 15 * max(map(len, labels))


def drawn(
    panels: Sequence[Panel], title: str | None, subtitle: str = "", wide: int | None = None, high: int | None = None
) -> go.Figure:
    """The panels in rows as wide as a notebook, in squares; or one below the other, in cells `wide` x `high`."""
    left = max(len(label) for panel in panels for label in panel.shown(panel.rows)) * LETTER + 12
    left += AXIS * any(panel.tokens for panel in panels)
    bar = 80 * any(panel.scale for panel in panels)
    n_columns = max(len(panel.columns) for panel in panels)
    largest = 600 if len(panels) == 1 else 480
    inner = max(150, min(largest, (WIDEST - bar) // min(len(panels), 4) - left - GAP))
    cell = wide or max(1, min(44, inner // n_columns))
    per_row = 1 if wide else min(len(panels), max(1, (WIDEST - bar) // (left + cell * n_columns + GAP)))
    per_row = -(-len(panels) // -(-len(panels) // per_row))  # rows of equal length
    if cell < LABEL <= ((WIDEST - bar) // per_row - left - GAP) // n_columns:
        cell = LABEL  # the row has room for every label
    high = high or cell
    step = left + cell * n_columns + GAP
    letters = max(24, (step - GAP if per_row > 1 else WIDEST) // LETTER)
    headings = [
        [line for part in (panel.heading, panel.words) for line in wrap(part, letters, break_long_words=False)]
        for panel in panels
    ]
    tops, y = [], 0  # where the heading and where the cells of each panel begin
    for first in range(0, len(panels), per_row):
        row = range(first, min(first + per_row, len(panels)))
        rooms = {i: panels[i].column_labels(cell)[1] for i in row}
        above = max(HEADING * len(headings[i]) + rooms[i] * panels[i].on_top for i in row)
        below = max(rooms[i] * (not panels[i].on_top) + AXIS * panels[i].tokens for i in row)
        tops += [(y, y + above)] * len(row)
        y += above + high * max(len(panels[i].rows) for i in row) + below + 16
    lefts = [i % per_row * step + left for i in range(len(panels))]
    ends = [x + cell * len(panel.columns) for x, panel in zip(lefts, panels, strict=True)]
    longest = max(len(line) * LETTER for lines in headings for line in [*lines, ""])
    width, height = max(max(ends) + GAP + bar, longest), y
    figure = go.Figure()
    for i, (panel, x, (top, first)) in enumerate(zip(panels, lefts, tops, strict=True)):
        across = [x / width, (x + cell * len(panel.columns)) / width]
        down = [max(0, 1 - (first + high * len(panel.rows)) / height), 1 - first / height]
        _add(figure, panel, "" if i == 0 else str(i + 1), across, down, cell, high)
        lines = [f"<b>{escape(line)}</b>" if number == 0 else escape(line) for number, line in enumerate(headings[i])]
        place = {"x": (x - left + 6) / width, "y": 1 - top / height, "xref": "paper", "yref": "paper"}
        look = {"xanchor": "left", "yanchor": "top", "align": "left", "showarrow": False, "font": {"size": 12}}
        if lines:
            figure.add_annotation(text="<br>".join(lines), **place, **look)
    figure.update_traces(colorbar_x=(max(ends) + GAP) / width)
    return titled(figure, title, subtitle, max(width, 420), height, l=0, r=max(width, 420) - width, b=0)


def _add(figure: go.Figure, panel: Panel, number: str, across: list, down: list, cell: int, high: int) -> None:
    """The panel's heat map, its two axes, and the stepped line."""
    texts = [] if panel.texts is None else panel.texts.flat
    parts = [part for text in texts for part in unescape(text.replace("<br>", "\n")).split("\n")]
    roomy = bool(parts) and max(map(len, parts)) * LETTER <= cell + 4
    heat = go.Heatmap(
        z=panel.values.astype(np.uint8) if panel.values.dtype.kind in "bui" else np.round(panel.values, 4),
        x=_unique(panel.columns),
        y=_unique(panel.rows),
        xaxis=f"x{number}",
        yaxis=f"y{number}",
        colorscale=panel.colours,
        zmin=panel.low,
        zmax=panel.high,
        showscale=panel.scale is not None,
        xgap=1 if cell >= 6 else 0,
        ygap=1 if high >= 6 else 0,
        text=panel.texts if roomy else None,
        texttemplate="%{text}" if roomy else None,
        textfont={"size": 12},
        customdata=panel.hover if panel.hover is not None and panel.hover.size <= 4096 else None,
        hovertemplate=("%{y}, %{x}: " + ("%{z:.3f}" if panel.hover is None else "%{customdata}")) + "<extra></extra>",
        hoverongaps=False,
    )
    if panel.scale:
        bar = {"title": {"text": panel.scale, "side": "right", "font": {"size": 12}}, "thickness": 12}
        bar |= {"tickfont": {"size": 11}, "y": 1, "yanchor": "top"}
        heat.colorbar = {**bar, "lenmode": "pixels", "len": max(90, min(180, high * len(panel.rows)))}
    figure.add_trace(heat)
    bare = {"type": "category", "showgrid": False, "zeroline": False, "ticks": "", "tickfont": {"size": 12}}
    columns = _ticks(panel.shown(panel.columns), cell) | {"domain": across, "anchor": f"y{number}"}
    columns |= {"side": "top" if panel.on_top else "bottom", "range": [-0.5, len(panel.columns) - 0.5]}
    columns["tickangle"] = -90 if panel.column_labels(cell)[0] else 0
    rows = _ticks(panel.shown(panel.rows), high) | {"domain": down, "anchor": f"x{number}"}
    rows["range"] = [len(panel.rows) - 0.5, -0.5]
    if panel.tokens:
        columns["title"] = {"text": "key", "font": SMALL, "standoff": 2}
        rows["title"] = {"text": "query", "font": SMALL, "standoff": 2}
    figure.update_layout({f"xaxis{number}": bare | columns, f"yaxis{number}": bare | rows})
    if panel.tokens:
        q_len, kv_len = panel.values.shape
        path = f"M {kv_len - q_len + 0.5},-0.5" + "".join(
            f" L {j + 0.5},{i + 0.5} L {j + 1.5},{i + 0.5}" for i, j in enumerate(range(kv_len - q_len, kv_len - 1))
        )
        path += f" L {kv_len - 0.5},{q_len - 0.5}"
        for colour, wider in ((PAPER, 2), (INK, 0)):  # dark on a light edge, visible on every colour
            line = {"color": colour, "width": (1.5 if cell >= 6 else 1) + wider}
            figure.add_shape(type="path", path=path, line=line, xref=f"x{number}", yref=f"y{number}")


def _ticks(labels: Sequence[str], cell: int) -> dict:
    """As many labels as there is room for."""
    places = range(0, len(labels), -(-LABEL // cell))
    texts = ["<br>".join(map(escape, labels[i].split("\n"))) for i in places]
    return {"tickmode": "array", "tickvals": list(places), "ticktext": texts}


def _unique(labels: Sequence[str]) -> list[str]:
    """Names of a category axis: full tokens. An invisible number, of zero-width characters, keeps equal ones apart."""
    names = [escape(clean(label.replace("\n", " "))) for label in labels]
    digits = str.maketrans("01", "\u200b\u200c")
    return [name + f"{names[: i + 1].count(name):b}".translate(digits) for i, name in enumerate(names)]


def steps(*colours: str) -> list:
    """A colour scale of equal steps without transitions."""
    n = len(colours)
    return [[edge, colour] for i, colour in enumerate(colours) for edge in (i / n, (i + 1) / n)]


def slider(figures: Mapping[str, go.Figure], name: str, start: int = 0, menu: bool = False) -> go.Figure:
    """One figure with a slider over `figures`, `{label: figure}`, called `name`; it begins at number `start`.

    `menu` draws a menu instead of the slider, for labels that have no order. The result holds the traces of all
    figures, and each step shows those of one of them, with its layout. All need the same number of panels.
    """
    owner = [number for number, figure in enumerate(figures.values()) for _ in figure.data]
    layouts = [{"shapes": [], "annotations": []} | figure.to_dict()["layout"] for figure in figures.values()]
    panels = [sum(key.startswith("xaxis") for key in layout) for layout in layouts]
    if len(set(panels)) > 1:
        raise MaskError(f"figures behind one slider need the same number of panels; these have {panels}")
    names = [escape(str(label)) for label in figures]
    begin = max(layout["margin"]["l"] for layout in layouts) + max(24, 4 * len(names[0]))
    end = min(layout["width"] - layout["margin"]["r"] for layout in layouts) - max(24, 4 * len(names[-1]))
    steps = []
    for number, (label, layout) in enumerate(zip(names, layouts, strict=True)):
        # The control is above the title, and its ends at the same pixels, so that it stays in its place where figures
        # differ in height or in their margins.
        layout.pop("template")
        control, room = ("updatemenus[0]", MENU) if menu else ("sliders[0]", ROOM)
        layout["height"] += room
        layout[f"{control}.pad.b"] = layout["margin"]["t"] + 10
        layout[f"{control}.pad.l"] = (10 if menu else begin) - layout["margin"]["l"]
        layout[f"{control}.pad.r"] = layout["width"] - layout["margin"]["r"] - end
        layout["margin"]["t"] += room
        layout["title"]["pad"]["t"] += room
        steps.append(
            {
                "method": "update",
                "label": label,
                "args": [{"visible": [i == number for i in owner]}, layout],
            }
        )
    first = dict(steps[start]["args"][1])
    shared = [key for key in first if all(step["args"][1].get(key) == first[key] for step in steps)]
    for step in steps:  # what all figures share is stored once, which makes a saved notebook much smaller
        step["args"][1] = {key: value for key, value in step["args"][1].items() if key not in shared}
    result = go.Figure([trace for figure in figures.values() for trace in figure.data])
    for trace, number in zip(result.data, owner, strict=True):
        trace.visible = number == start
    pad = {"t": 0} | {side: first.pop(f"{control}.pad.{side}") for side in "blr"}
    place = {"active": start, "x": 0, "y": 1, "yanchor": "bottom", "pad": pad}
    if menu:
        return result.update_layout(first, updatemenus=[place | {"buttons": steps, "xanchor": "left"}])
    shown = {"prefix": f"{escape(name)}: ", "font": {"size": 13}}
    return result.update_layout(first, sliders=[place | {"steps": steps, "len": 1, "currentvalue": shown}])
