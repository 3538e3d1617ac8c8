"""What each training objective asks of one sentence: what is read, what must be named where, and who sees whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, MASKED, bool_grid
from labkit.viz.svg import INK, Svg, _svg
from labkit.viz.tokens import GREY, HIGH, LINE, box, box_width, clean, mono, quoted, token_list, visible, words

LEFT, EDGE, GAP = 92, 10, 6  # pixels: the names of the rows; around the picture; between two tokens
DOWN = 26  # pixels between what is read and what must be named: room for the arrows
NAMED = "#DCEBF5"  # the box of a token that must be named
KEYS = ("name", "inputs", "targets", "cells")


def objectives_svg(tokens: Sequence[str], examples: Sequence[Mapping]) -> Svg:
    """One panel for each objective, all of one sentence.

    A panel shows what the model reads (hidden tokens on black), under it what the logits at each position must name
    ("-" where nothing is counted), with an arrow to the token that is meant, and beside it the mask: row looks at
    column, blue = may.

    Args:
        tokens: the sentence.
        examples: for each objective `{"name": ..., "inputs": what is read, one token for each of the sentence,
            "targets": what must be named at each position, or None, "cells": bool (tokens, tokens)}`.

    Raises:
        MaskError: an example without one of these, or of another length than the sentence.
    """
    tokens = token_list(tokens, "objectives_svg")
    if isinstance(examples, Mapping) or not len(examples):
        raise MaskError("objectives_svg takes a list of examples, each a dictionary {name, inputs, targets, cells}")
    panels = [_checked(example, tokens) for example in examples]
    widths = [
        max(
            box_width(text)
            for text in (token, *(p["inputs"][i] for p in panels), *(p["targets"][i] or "-" for p in panels))
        )
        for i, token in enumerate(tokens)
    ]
    columns = [LEFT + sum(widths[:i]) + GAP * i for i in range(len(tokens) + 1)]
    grid, cell = columns[-1] + 34, max(11, min(17, 112 // len(tokens)))  # where the mask begins, and its cells
    high = max(30 + 2 * HIGH + DOWN, 30 + cell * len(tokens)) + 26
    wide = grid + cell * len(tokens) + EDGE
    body = []
    for number, panel in enumerate(panels):
        y = number * high + EDGE
        if number:
            body.append(f'<path d="M{EDGE} {y - 9.5}h{wide - 2 * EDGE}" stroke="{LINE}"/>')
        body += _rows(panel, tokens, columns, widths, y)
        body += _grid(panel["cells"], tokens, grid, y + 30, cell)
    body.append(words("mask: row sees column", grid + cell * len(tokens), EDGE + 18, GREY, "end", 11))
    return _svg(body, wide, len(panels) * high + EDGE - 12, " ".join(_in_words(panel, tokens) for panel in panels))


def _checked(example: Mapping, tokens: list[str]) -> dict:
    missing = [key for key in KEYS if key not in example]
    if missing:
        raise MaskError(f"an example needs {', '.join(KEYS)}, and this one has no {' and no '.join(missing)}")
    name = clean(str(example["name"]))
    for key in ("inputs", "targets"):
        given = example[key]
        if isinstance(given, str) or len(given) != len(tokens):
            raise MaskError(
                f"the {key} of {name!r} must be {len(tokens)}, one for each token of the sentence: {given!r}"
            )
    cells = bool_grid(example["cells"], f"the cells of {name!r}")
    if cells.shape != (len(tokens), len(tokens)):
        raise MaskError(f"the cells of {name!r} have shape {cells.shape}, and the sentence has {len(tokens)} tokens")
    inputs = [str(token) for token in example["inputs"]]
    targets = [None if token is None else str(token) for token in example["targets"]]
    return {"name": name, "inputs": inputs, "targets": targets, "cells": cells}


# ------------------------------------------------------------------------------------------------------- one panel
def _rows(panel: dict, tokens: list[str], columns: list[int], widths: list[int], y: int) -> list[str]:
    """The heading, what is read, what must be named, and the arrows from there to what is meant."""
    inputs, targets = panel["inputs"], panel["targets"]
    read, name, counted = y + 32, y + 32 + HIGH + DOWN, sum(target is not None for target in targets)
    body = [
        f'<text x="{EDGE}" y="{y + 18}" font-size="14"><tspan font-weight="bold">{escape(panel["name"])}</tspan>'
        f'<tspan font-size="12" fill="{GREY}" dx="10">{counted} of {len(tokens)} positions count</tspan></text>',
        words("reads", EDGE, read + 17, GREY),
        words("must name", EDGE, name + 17, GREY),
    ]
    for i, (token, target, x, wide) in enumerate(zip(inputs, targets, columns, widths, strict=False)):
        hidden = token != tokens[i]
        tip = f"position {i} reads {quoted(token)}" + (f" in place of {quoted(tokens[i])}" if hidden else "")
        colours = (INK, "#FFFFFF", INK) if hidden else ("#FFFFFF", INK, LINE)
        body.append(box(visible(token), x, read, wide, *colours, tip=tip))
        if target is None:
            body.append(mono("-", x + wide // 2, name + 17, GREY))
            continue
        tip = f"the logits at position {i} must name {quoted(target)}"
        body.append(box(visible(target), x, name, wide, NAMED, "#00527F", ALLOWED, tip=tip))
        body += _arrow(_meant(panel, tokens, i), i, columns, widths, read + HIGH, name)
    return body


def _meant(panel: dict, tokens: list[str], i: int) -> int | None:
    """Where in the sentence the token is that position i must name: there, or one further on."""
    for shift in (1, 0):
        counted = [j for j, target in enumerate(panel["targets"]) if target is not None]
        if all(j + shift < len(tokens) and panel["targets"][j] == tokens[j + shift] for j in counted):
            return i + shift
    return next((j for j in (i + 1, i) if j < len(tokens) and panel["targets"][i] == tokens[j]), None)


def _arrow(meant: int | None, i: int, columns: list[int], widths: list[int], top: int, bottom: int) -> list[str]:
    if meant is None:
        return []
    start, end = columns[i] + widths[i] // 2, columns[meant] + widths[meant] // 2
    if meant != i:  # from the near side of one box to the near side of the next
        start, end = columns[i] + widths[i] - 10, columns[meant] + 10
    bend = (top + bottom) // 2
    return [
        f'<path d="M{start} {bottom}C{start} {bend} {end} {bend} {end} {top + 7}" fill="none" stroke="{ALLOWED}" '
        f'stroke-width="1.6"/><path d="M{end - 4} {top + 8}l4 -6l4 6z" fill="{ALLOWED}"/>'
    ]


def _grid(cells: np.ndarray, tokens: list[str], x: int, y: int, cell: int) -> list[str]:
    body = []
    for (i, j), may in np.ndenumerate(cells):
        tip = escape(f"{quoted(tokens[i])} {'may' if may else 'may not'} look at {quoted(tokens[j])}")
        body.append(
            f'<rect x="{x + j * cell}" y="{y + i * cell}" width="{cell - 2}" height="{cell - 2}" rx="2" '
            f'fill="{ALLOWED if may else MASKED}"><title>{tip}</title></rect>'
        )
    steps = f"v{cell}h{cell}" * (len(tokens) - 1)
    body.append(f'<path d="M{x + cell - 1} {y - 1}{steps}" fill="none" stroke="{INK}" stroke-width="1.2"/>')
    return body


def _in_words(panel: dict, tokens: list[str]) -> str:
    hidden = [quoted(token) for token, read in zip(tokens, panel["inputs"], strict=True) if token != read]
    asked = [f"{i} must name {quoted(target)}" for i, target in enumerate(panel["targets"]) if target is not None]
    future = np.triu(panel["cells"], k=1).sum()
    text = f"{panel['name']}: reads {' '.join(clean(visible(token)) for token in panel['inputs'])}"
    text += f" (hidden: {', '.join(hidden)})" if hidden else ""
    text += f". Position {', '.join(asked)}." if asked else ". No position counts."
    return f"{text} {int(panel['cells'].sum())} of {panel['cells'].size} cells allowed, {int(future)} in the future."
