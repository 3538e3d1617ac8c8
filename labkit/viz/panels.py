"""Heat maps beside each other: the drawing that masks, attention maps, tables and token rows share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from textwrap import wrap

import numpy as np
import plotly.graph_objects as go

from labkit.attention.plain import clean, short
from labkit.viz.style import INK, PAPER, escape, titled

WIDEST = 820  # pixels: what a notebook shows beside an open file browser
LETTER = 7  # pixels, the width of a letter of a label
LABEL = 13  # pixels from one label to the next


@dataclass
class Panel:
    """One heat map of a figure.

    Attributes:
        heading: above the map; a line break starts a second line.
        values: (rows, columns); NaN is left empty.
        rows, columns: the labels.
        colours: plotly's colour scale from `low` to `high`.
        texts: (rows, columns) str, written into the cells; None: nothing.
        hover: (rows, columns) str, shown on hovering; None: the value.
        stairs: whether the stepped line of the diagonal is drawn.
        on_top: whether the labels of the columns are above the cells.
        scale: the title of the colour bar; None: no bar.
        cell: pixels, the width of its cells where it differs from the other panels.
    """

    heading: str
    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    colours: list
    low: float = 0.0
    high: float = 1.0
    texts: np.ndarray | None = None
    hover: np.ndarray | None = None
    stairs: bool = True
    on_top: bool = False
    scale: str | None = None
    cell: int | None = None


def drawn(
    panels: Sequence[Panel], title: str | None, subtitle: str = "", wide: int | None = None, high: int | None = None
):
    """The panels in rows as wide as a notebook; cells are `wide` and `high` pixels, or squares that fit."""
    left = max(len(label) for panel in panels for label in _shown(panel.rows, panel.stairs)) * LETTER + 12
    bar = 80 * any(panel.scale for panel in panels)
    n_columns = max(len(panel.columns) for panel in panels)
    largest = min(44, (600 if len(panels) == 1 else 480) // n_columns)

    def cell_of(per_row: int) -> int:
        return wide or max(1, min(largest, ((WIDEST - bar) // per_row - left - 14) // n_columns))

    for per_row in range(min(len(panels), 4), 1, -1):  # as many beside each other as have cells of a good size
        inner = cell_of(per_row) * n_columns
        good = inner >= (110 if inner >= 12 * n_columns else 150)
        if good and per_row * (left + inner + 14) <= WIDEST - bar:
            break
    else:
        per_row = 1
    per_row = -(-len(panels) // -(-len(panels) // per_row))  # rows of equal length
    cell = cell_of(per_row)
    high = high or cell
    letters = max(24, (left + cell * n_columns if per_row > 1 else WIDEST) // LETTER)
    heads = [
        [
            f"<b>{escape(line)}</b>" if i == 0 else escape(line)
            for i, part in enumerate(panel.heading.split("\n"))
            for line in wrap(part, letters, break_long_words=False)
        ]
        for panel in panels
    ]
    places, tops, y = [], [], 0
    for first in range(0, len(panels), per_row):
        row = range(first, min(first + per_row, len(panels)))
        rooms = [_label_room(panels[i], panels[i].cell or cell) for i in row]
        above = max(17 * len(heads[i]) + room * panels[i].on_top for i, room in zip(row, rooms, strict=True))
        below = max(room * (not panels[i].on_top) for i, room in zip(row, rooms, strict=True))
        places += [((i - first) * (left + cell * n_columns + 14) + left, y + above) for i in row]
        tops += [y] * len(row)
        y += above + high * max(len(panels[i].rows) for i in row) + below + 16
    across = (
        max(x + (panel.cell or cell) * len(panel.columns) for panel, (x, _) in zip(panels, places, strict=True)) + 14
    )
    longest = max(len(line) * LETTER for lines in heads for line in [*lines, ""])
    width, height = max(across + bar, longest), y
    figure = go.Figure()
    for i, (panel, (x, y)) in enumerate(zip(panels, places, strict=True)):
        side = panel.cell or cell
        domain = (x / width, y / height, side * len(panel.columns) / width, high * len(panel.rows) / height)
        _add(figure, panel, "" if i == 0 else str(i + 1), domain, side, high)
        for line, words in enumerate(heads[i]):
            figure.add_annotation(
                text=words,
                font={"size": 12},
                x=(x - left + 6) / width,
                y=1 - (tops[i] + 17 * line) / height,
                xref="paper",
                yref="paper",
                xanchor="left",
                yanchor="top",
                showarrow=False,
            )
    figure.update_traces(colorbar_x=across / width)
    return titled(figure, title, subtitle, max(width, 420), height, l=0, r=max(width, 420) - width, b=0)


def _add(figure: go.Figure, panel: Panel, number: str, domain: tuple, cell: int, high: int) -> None:
    """The panel's heat map, its two axes, and the stepped line."""
    x, y, across, down = domain
    codes = panel.values.dtype.kind in "bui"
    texts = [] if panel.texts is None else panel.texts.flat
    parts = [part for text in texts for part in unescape(text.replace("<br>", "\n")).split("\n")]
    roomy = bool(parts) and max(map(len, parts)) * LETTER <= cell + 4
    heat = go.Heatmap(
        z=panel.values.astype(np.uint8) if codes else np.round(panel.values, 4),
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
        bar = {"title": {"text": panel.scale, "side": "right"}, "thickness": 12, "y": 1, "yanchor": "top"}
        heat.colorbar = {**bar, "lenmode": "pixels", "len": max(90, min(180, high * len(panel.rows)))}
    figure.add_trace(heat)
    bare = {"type": "category", "showgrid": False, "zeroline": False, "ticks": "", "tickfont": {"size": 12}}
    figure.update_layout(
        {
            f"xaxis{number}": {
                **bare,
                **_ticks(_shown(panel.columns, panel.stairs), cell),
                "domain": [x, x + across],
                "anchor": f"y{number}",
                "side": "top" if panel.on_top else "bottom",
                "tickangle": -90 if _upright(panel, cell) else 0,
                "range": [-0.5, len(panel.columns) - 0.5],
            },
            f"yaxis{number}": {
                **bare,
                **_ticks(_shown(panel.rows, panel.stairs), high),
                "domain": [max(0, 1 - y - down), 1 - y],
                "anchor": f"x{number}",
                "range": [len(panel.rows) - 0.5, -0.5],
            },
        }
    )
    if panel.stairs:
        q_len, kv_len = panel.values.shape
        path = f"M {kv_len - q_len + 0.5},-0.5" + "".join(
            f" L {j + 0.5},{i + 0.5} L {j + 1.5},{i + 0.5}" for i, j in enumerate(range(kv_len - q_len, kv_len - 1))
        )
        width = 1.5 if cell >= 6 else 1
        path += f" L {kv_len - 0.5},{q_len - 0.5}"
        for colour, wider in ((PAPER, 2), (INK, 0)):  # dark on a light edge, to be seen on every colour
            line = {"color": colour, "width": width + wider}
            figure.add_shape(type="path", path=path, line=line, xref=f"x{number}", yref=f"y{number}")


def _ticks(labels: Sequence[str], cell: int) -> dict:
    """As many labels as there is room for."""
    places = range(0, len(labels), -(-LABEL // cell))
    texts = ["<br>".join(map(escape, labels[i].split("\n"))) for i in places]
    return {"tickmode": "array", "tickvals": list(places), "ticktext": texts}


def _shown(labels: Sequence[str], tokens: bool) -> list[str]:
    """Labels as they are written at an axis: tokens are cut, names are not."""
    return [short(clean(label)) if tokens else label.strip(" ") for label in labels]


def _upright(panel: Panel, cell: int) -> bool:
    labels = _shown(panel.columns, panel.stairs)
    return max(len(line) for label in labels for line in label.split("\n")) * LETTER > cell - 4


def _label_room(panel: Panel, cell: int) -> int:
    """Pixels for the labels of the columns."""
    lines = [label.split("\n") for label in _shown(panel.columns, panel.stairs)]
    if _upright(panel, cell):
        return max(len(line) for label in lines for line in label) * LETTER + 12
    return 8 + 15 * max(map(len, lines))


def _unique(labels: Sequence[str]) -> list[str]:
    """Names of a category axis: full tokens. An invisible number, of zero-width characters, keeps equal ones apart."""
    counts: dict[str, int] = {}
    names = []
    for label in labels:
        label = escape(clean(label.replace("\n", " ")))
        counts[label] = counts.get(label, 0) + 1
        names.append(label + f"{counts[label]:b}".translate({ord("0"): "\u200b", ord("1"): "\u200c"}))
    return names


def steps(*colours: str) -> list:
    """A colour scale of equal steps without transitions."""
    n = len(colours)
    return [[edge, colour] for i, colour in enumerate(colours) for edge in (i / n, (i + 1) / n)]
