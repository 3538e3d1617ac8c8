"""A table of verdicts as a picture: a row per model or recipe, a column per condition, a word and sign per cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, DISAGREES, MASKED
from labkit.viz.svg import INK, LETTER, Svg

NOTHING = "—"  # the word of a cell that does not exist: this model does not run under that condition
WHITE = "#FFFFFF"
HIGH, GAP = 22, 2  # pixels: a row, and the space between two cells


def verdicts_svg(rows: Mapping[str, Sequence[str]], columns: Sequence[str]) -> Svg:
    """A table `{name of the row: one word per column}`; a line break in a column's name starts a second line.

    "bidirectional" is blue with a full square, "causal" grey with a triangle, "—" an empty cell; every other word is
    orange with an exclamation mark. So a cell can be read by its word, by its sign and by its colour.

    Raises:
        MaskError: no row, or a row with more or fewer words than there are columns.
    """
    if not rows:
        raise MaskError("verdicts_svg takes a dictionary {name: words} with at least one row, and got an empty one")
    for name, words in rows.items():
        if isinstance(words, str) or len(words) != len(columns):
            raise MaskError(f"row {name!r} needs one word for each of the {len(columns)} columns, and has {words!r}")
    heads = [str(column).splitlines() or [""] for column in columns]
    left = max(len(name) for name in rows) * LETTER + 12
    wide = max(len(text) for texts in (*heads, *rows.values()) for text in texts) * LETTER + 40
    top = max(len(lines) for lines in heads) * 15 + 8

    body = []
    for column, lines in enumerate(heads):
        for line, text in enumerate(lines):
            x, y = left + column * wide + 4, 15 + 15 * line
            weight = ' font-weight="bold"' if line == 0 else ""
            body.append(f'<text x="{x}" y="{y}"{weight}>{escape(text)}</text>')
    for line, (name, words) in enumerate(rows.items()):
        y = top + line * HIGH
        body.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for column, word in enumerate(words):
            body += _cell(left + column * wide, y, wide - GAP, str(word))
    return _table(body, left + len(columns) * wide, top + len(rows) * HIGH + 4, rows, heads)


def _cell(x: int, y: int, wide: int, word: str) -> list[str]:
    if word == NOTHING:
        return [f'<text x="{x + 24}" y="{y + 15}">{NOTHING}</text>']
    fill, ink = {"bidirectional": (ALLOWED, WHITE), "causal": (MASKED, INK)}.get(word, (DISAGREES, WHITE))
    signs = {
        "bidirectional": f'<path d="M{x + 8} {y + 5}h10v10h-10z" fill="{ink}"/>',
        "causal": f'<path d="M{x + 8} {y + 5}l10 10h-10z" fill="{ink}"/>',
    }
    return [
        f'<rect x="{x}" y="{y}" width="{wide}" height="{HIGH - GAP}" fill="{fill}"/>',
        signs.get(word, f'<text x="{x + 11}" y="{y + 15}" font-weight="bold" fill="{ink}">!</text>'),
        f'<text x="{x + 24}" y="{y + 15}" fill="{ink}">{escape(word)}</text>',
    ]


def _table(body: list[str], width: int, height: int, rows: Mapping[str, Sequence[str]], heads: list[list[str]]) -> Svg:
    names = ", ".join(" ".join(lines) for lines in heads)
    alt = f"A table of {len(rows)} rows; columns: {names}. "
    alt += " ".join(f"{name}: {', '.join(map(str, words))}." for name, words in rows.items())
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(alt)}" font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="{WHITE}"/>'
    return Svg("\n".join([opening, paper, *body, "</svg>"]), alt)
