"""Small static pictures as SVG: without JavaScript, so they show in every notebook, and where one is only rendered.

Every function returns an `Svg`: a string (put it into HTML as it is) that a notebook draws, with its text equivalent in
`.alt`, in the picture's `aria-label`, and in the notebook's plain text output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import (
    ALLOWED,
    MASKED,
    WORDS_LIMIT,
    attention_in_words,
    bool_grid,
    cell_pixels,
    label_step,
    mask_in_words,
    short,
    token_labels,
    weight_grids,
)

INK = "#222222"
LETTER = 7  # pixels, width of a letter at font size 12
WEIGHTS = ((247, 251, 255), (8, 48, 107))  # from 0, nearly white, to the largest weight, dark blue
SHADES = 32
PAGE = 820  # pixels, the width of a notebook beside an open file browser


class Svg(str):
    """An SVG picture as text. A notebook draws it; `alt` is its text equivalent."""

    alt: str

    def __new__(cls, markup: str, alt: str) -> Svg:
        self = super().__new__(cls, markup)
        self.alt = alt
        return self

    def _repr_svg_(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(f"Picture: {self.alt}")


def mask_svg(cells, tokens: Sequence[str] | None = None, title: str | None = None) -> Svg:
    """A mask: `cells` bool (q_len, kv_len), True = may attend (blue); rows are queries, columns are keys."""
    return masks_svg({title or "": cells}, tokens)


def masks_svg(masks: Mapping[str, object], tokens: Sequence[str] | None = None) -> Svg:
    """Several masks, `{title: cells}`, beside each other."""
    if not isinstance(masks, Mapping) or not masks:
        raise MaskError("masks_svg takes a dictionary {title: cells} with at least one mask")
    panels, words = [], []
    for title, cells in masks.items():
        grid = bool_grid(cells, f"the cells of {title!r}" if title else "cells")
        queries, keys = token_labels(tokens, *grid.shape)

        def sentence(i: int, j: int, grid=grid, queries=queries, keys=keys) -> str:
            return f'"{queries[i]}" {"may" if grid[i, j] else "may not"} look at "{keys[j]}"'

        colours = np.where(grid, ALLOWED, MASKED)
        panels.append(_Panel(colours, queries, keys, str(title), sentence, beside=len(masks)))
        words.append(mask_in_words(grid, queries, keys, str(title) or None, every_row=len(masks) == 1))
    return _picture(panels, " ".join(words))


def attention_svg(weights, tokens: Sequence[str] | None = None, title: str | None = None) -> Svg:
    """Attention weights (q_len, kv_len) or (heads, q_len, kv_len), or `{title: weights}`: darker is more, white is 0.

    All maps share one scale, from 0 to the largest weight. Up to 8 tokens, each cell holds its number.
    """
    if isinstance(weights, Mapping):
        grids = [weight_grids(grid, f"the weights of {name!r}") for name, grid in weights.items()]
        if not grids or any(len(grid) != 1 for grid in grids):
            raise MaskError("attention_svg takes one map of shape (queries, keys) for each title")
        names, maps = [str(name) for name in weights], [grid[0] for grid in grids]
    else:
        maps = list(weight_grids(weights))
        names = [title or ""] if len(maps) == 1 else [f"head {i}" for i in range(len(maps))]
    top = max(max(float(grid.max()) for grid in maps), 1e-9)
    panels, words = [], []
    for name, grid in zip(names, maps, strict=True):
        queries, keys = token_labels(tokens, *grid.shape)

        def sentence(i: int, j: int, grid=grid, queries=queries, keys=keys) -> str:
            return f'"{queries[i]}" looks at "{keys[j]}": {grid[i, j]:.3f}'

        shades = np.round(grid / top * SHADES).astype(int)
        colours = np.vectorize(_shade, otypes=[object])(shades)
        numbers = grid if grid.shape[1] <= 8 else None
        panels.append(_Panel(colours, queries, keys, name, sentence, numbers, shades > SHADES // 2, len(maps)))
        words.append(attention_in_words(grid[None], queries, keys, name or None, every_row=len(maps) == 1))
    return _picture(panels, " ".join(words))


def road_svg(steps: Sequence[tuple[int, str]], here: int | None = None) -> Svg:
    """The road ahead: notebooks as steps, `(number, title)`, four in a row; `here` is the number of the present one."""
    steps = [(int(number), str(title)) for number, title in steps]
    if not steps:
        raise MaskError("road_svg takes a list of (number, title) with at least one step")
    wide, high, gap = 180, 64, 24
    body = []
    for i, (number, title) in enumerate(steps):
        x, y = 10 + (i % 4) * (wide + gap), 10 + (i // 4) * (high + gap)
        if i % 4:
            body.append(f'<path d="M{x - gap} {y + high // 2}h{gap - 5}" stroke="{INK}" fill="none"/>')
            body.append(f'<path d="M{x - 7} {y + high // 2 - 4}l7 4l-7 4z" fill="{INK}"/>')
        fill, ink = (ALLOWED, "#FFFFFF") if number == here else (MASKED, INK)
        body.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="8" fill="{fill}"/>')
        body.append(
            f'<text x="{x + 12}" y="{y + 38}" font-size="18" font-weight="bold" fill="{ink}">{number:02d}</text>'
        )
        lines = _wrapped(title, 18)[:3]
        for line, words in enumerate(lines):
            down = y + high // 2 + 5 + round((line - (len(lines) - 1) / 2) * 16)
            body.append(f'<text x="{x + 46}" y="{down}" fill="{ink}">{escape(words)}</text>')
    rows, columns = -(-len(steps) // 4), min(4, len(steps))
    alt = "The road ahead: " + ", ".join(f"{n:02d} {t}{' (you are here)' if n == here else ''}" for n, t in steps) + "."
    return _svg(body, 20 + columns * (wide + gap) - gap, 20 + rows * (high + gap) - gap, alt)


# ---------------------------------------------------------------------------------------------------- one grid
class _Panel:
    """One grid with its labels, one of so many `beside` each other: knows its size, and draws itself at (x, y)."""

    def __init__(
        self,
        colours: np.ndarray,
        queries: list[str],
        keys: list[str],
        title: str,
        sentence: Callable[[int, int], str],
        numbers: np.ndarray | None = None,
        dark: np.ndarray | None = None,
        beside: int = 1,
    ) -> None:
        self.colours, self.queries, self.keys, self.title = colours, queries, keys, title
        self.sentence, self.numbers, self.dark = sentence, numbers, dark
        q_len, kv_len = colours.shape
        self.left = max(len(short(token)) for token in queries) * LETTER + 10
        self.cell = cell_pixels(kv_len, 704 if beside == 1 else PAGE // min(beside, 4) - self.left - 24)
        widest = max(len(short(token)) for token in keys) * LETTER
        self.upright = widest > self.cell - 4  # labels that do not fit above their column stand on end
        self.top = (22 if title else 0) + (widest + 8 if self.upright else 20)
        self.width = max(self.left + kv_len * self.cell + 4, len(title) * LETTER + 8)
        self.height = self.top + q_len * self.cell + 4

    def draw(self, x: int, y: int) -> list[str]:
        body = []
        if self.title:
            body.append(f'<text x="{x + 4}" y="{y + 15}" font-weight="bold">{escape(self.title)}</text>')
        body += self._labels(x, y)
        x, y = x + self.left, y + self.top
        small = self.colours.shape[1] <= WORDS_LIMIT
        body += self._cells_with_sentences(x, y) if small else self._cells_in_runs(x, y)
        body.append(f'<path d="{self._staircase(x, y)}" fill="none" stroke="{INK}" stroke-width="1.5"/>')
        return body

    def _labels(self, x: int, y: int) -> list[str]:
        step, cell, body = label_step(self.cell), self.cell, []
        size = min(12, max(8, cell * step - 1))
        for i in range(0, len(self.queries), step):
            middle = round(y + self.top + (i + 0.5) * cell + size / 3)
            body.append(_label(self.queries[i], x + self.left - 6, middle, size, "end"))
        for j in range(0, len(self.keys), step):
            middle = round(x + self.left + (j + 0.5) * cell)
            if self.upright:
                body.append(_label(self.keys[j], middle + size // 3, y + self.top - 6, size, "start", turn=True))
            else:
                body.append(_label(self.keys[j], middle, y + self.top - 6, size, "middle"))
        return body

    def _cells_with_sentences(self, x: int, y: int) -> list[str]:
        """Few cells: each a square of its own, which says in words what it means when the mouse rests on it."""
        side, squares, numbers = self.cell - 2, {}, []
        for (i, j), colour in np.ndenumerate(self.colours):
            left, top = x + j * self.cell + 1, y + i * self.cell + 1
            hover = f"<title>{escape(self.sentence(i, j))}</title>"
            squares.setdefault(str(colour), []).append(f'<path d="M{left} {top}h{side}v{side}h-{side}z">{hover}</path>')
            if self.numbers is not None and self.cell >= 22:
                ink = ' fill="#FFFFFF"' if self.dark[i, j] else ""
                middle, baseline = left + side // 2, top + side // 2 + 4
                numbers.append(f'<text x="{middle}" y="{baseline}"{ink}>{_weight(self.numbers[i, j])}</text>')
        body = [f'<g fill="{colour}" stroke="#D0D0D0">{"".join(paths)}</g>' for colour, paths in squares.items()]
        return body + ['<g font-size="11" text-anchor="middle" pointer-events="none">', *numbers, "</g>"] * bool(
            numbers
        )

    def _cells_in_runs(self, x: int, y: int) -> list[str]:
        """Many cells: one path for each colour, of horizontal runs; a few KB where single cells would take hundreds."""
        runs, cell = {}, self.cell
        for i, row in enumerate(self.colours):
            start = 0
            for colour, group in groupby(row):
                length = len(list(group))
                runs.setdefault(str(colour), []).append(
                    f"M{x + start * cell} {y + i * cell}h{length * cell}v{cell}h-{length * cell}z"
                )
                start += length
        body = [f'<path d="{"".join(pieces)}" fill="{colour}"/>' for colour, pieces in runs.items()]
        if self.cell >= 6:  # thin lines between the cells
            q_len, kv_len = self.colours.shape
            lines = [f"M{x + j * cell} {y}v{q_len * cell}" for j in range(1, kv_len)]
            lines += [f"M{x} {y + i * cell}h{kv_len * cell}" for i in range(1, q_len)]
            body.append(f'<path d="{"".join(lines)}" stroke="#D0D0D0" fill="none"/>')
        return body

    def _staircase(self, x: int, y: int) -> str:
        """The border between a token's past and its future."""
        (q_len, kv_len), cell = self.colours.shape, self.cell
        start = x + (kv_len - q_len + 1) * cell
        return f"M{start} {y}" + f"v{cell}h{cell}" * (q_len - 1) + f"v{cell}"


# -------------------------------------------------------------------------------------------- the whole picture
def _picture(panels: list[_Panel], alt: str) -> Svg:
    """The panels in rows, as many beside each other as the page is wide."""
    body, x, y, widest, tallest = [], 4, 4, 0, 0
    for panel in panels:
        if x > 4 and x + panel.width > PAGE:
            x, y, tallest = 4, y + tallest + 20, 0
        body += panel.draw(x, y)
        x += panel.width + 20
        widest, tallest = max(widest, x - 20), max(tallest, panel.height)
    return _svg(body, widest + 4, y + tallest + 4, alt)


def _svg(body: list[str], width: int, height: int, alt: str) -> Svg:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(alt)}" font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>'
    return Svg("\n".join([opening, paper, *body, "</svg>"]), alt)


def _label(token: str, x: int, y: int, size: int, anchor: str, turn: bool = False) -> str:
    rotate = f' transform="rotate(-90 {x} {y})"' if turn else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{rotate}>{escape(short(token))}</text>'


def _shade(level: int) -> str:
    low, high = WEIGHTS
    return "#" + "".join(f"{round(a + (b - a) * level / SHADES):02X}" for a, b in zip(low, high, strict=True))


def _weight(value: float) -> str:
    return "0" if value == 0 else f"{value:.2f}".replace("0.", ".", 1) if value < 0.995 else f"{value:.1f}"


def _wrapped(text: str, width: int) -> list[str]:
    from textwrap import wrap

    return wrap(text, width) or [""]
