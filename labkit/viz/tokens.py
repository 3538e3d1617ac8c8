"""Tokens in a picture: what of them is visible, how wide that is, the box around it; and how numbers are written."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, DISAGREES, short
from labkit.viz.svg import INK

MONO = "ui-monospace,Menlo,Consolas,monospace"  # every letter of a token is as wide as the next
SIZE = 13  # pixels, the height of a token's letters
HIGH = 26  # pixels, the height of a token's box
GREY = "#5B6670"  # words of lesser weight, 6:1 on white
LINE = "#C4CBD2"
PALE = "#EEF1F4"
WRONG_INK = "#A84300"  # DISAGREES, dark enough for letters: 5.9:1 on white

# What XML does not allow at all is shown as the picture of the control character, or as the sign for "no character".
_VISIBLE = {code: 0x2400 + code for code in range(32)} | {0x7F: 0x2421, 0xFFFE: 0xFFFD, 0xFFFF: 0xFFFD}
_VISIBLE |= {ord("\n"): "⏎", ord("\t"): "⇥"} | dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


def clean(text: str) -> str:
    """`text` on one line, with nothing in it that an SVG must not hold."""
    return str(text).translate(_VISIBLE)


def visible(token: str) -> str:
    """A token as it is drawn: without the space before a word, with white space visible where there is no word."""
    token = str(token).replace("\xa0", " ")
    return short(clean(token.strip(" ") or token)) or "∅"


def told_apart(tokens: Sequence[str]) -> list[str]:
    """The tokens as they are drawn; where two would look alike, with the space before the word."""
    drawn = [visible(token) for token in tokens]
    return [
        short(clean(token.replace(" ", "␣"))) if drawn.count(text) > 1 and token.strip() else text
        for token, text in zip(tokens, drawn, strict=True)
    ]


def quoted(token: str) -> str:
    """A token in running words."""
    return f'"{clean(token).strip(" ") or clean(token)}"'


def width(text: str, size: int = SIZE) -> int:
    """Pixels that `text` takes in MONO; Chinese, Japanese and Korean letters and emoji are two letters wide."""
    letters = sum(2 if unicodedata.east_asian_width(c) in "WF" else unicodedata.combining(c) == 0 for c in text)
    return -(-round(letters * size * 61) // 100)


def box_width(token: str, least: int = 26) -> int:
    return max(least, width(visible(token)) + 14)


def box(
    text: str,
    x: int,
    y: int,
    wide: int,
    fill: str = PALE,
    ink: str = INK,
    stroke: str = LINE,
    extra: str = "",
    tip: str = "",
    high: int = HIGH,
) -> str:
    """A token (or what stands for it) in a box; `extra` are attributes of the box, `tip` is said on hovering."""
    letters = mono(text, x + wide // 2, y + high // 2 + 5, ink) if text else ""
    said = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<g><rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="5" fill="{fill}" stroke="{stroke}"{extra}/>'
        f"{letters}{said}</g>"
    )


def mono(
    text: str, x: int, y: int, ink: str = INK, anchor: str = "middle", size: int = SIZE, bold: bool = False
) -> str:
    """A token's letters, without a box."""
    weight = ' font-weight="bold"' * bold
    return (
        f'<text x="{x}" y="{y}" font-family="{MONO}" font-size="{size}" text-anchor="{anchor}" fill="{ink}"'
        f"{weight}>{escape(text)}</text>"
    )


def words(text: str, x: int, y: int, ink: str = INK, anchor: str = "start", size: int = 12, bold: bool = False) -> str:
    """Ordinary words, such as a heading or a note."""
    weight = ' font-weight="bold"' * bold
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{ink}"{weight}>'
        f"{escape(clean(text))}</text>"
    )


def sign(right: bool, x: int, y: int) -> str:
    """A tick or a cross, 10 pixels wide, its lower edge at y."""
    if right:
        return f'<path d="M{x} {y - 5}l4 4l7 -9" fill="none" stroke="{ALLOWED}" stroke-width="2.4"/>'
    return f'<path d="M{x + 1} {y - 9}l8 8m0 -8l-8 8" fill="none" stroke="{DISAGREES}" stroke-width="2.4"/>'


def percent(share: float) -> str:
    """A probability as few digits as tell it apart from 0 and from 1."""
    if share == 0:
        return "0%"
    if share < 0.001:
        return "<0.1%"
    return f"{share:.1%}" if share < 0.0995 or 0.99 <= share < 0.9995 else f"{share:.0%}"


def rows_of(widths: Sequence[int], page: int, gap: int) -> list[tuple[int, int]]:
    """Where boxes of these widths go, `(x, row)`, when they are set like words on lines `page` pixels wide."""
    places, x, row = [], 0, 0
    for wide in widths:
        if x and x + wide > page:
            x, row = 0, row + 1
        places.append((x, row))
        x += wide + gap
    return places


# ---------------------------------------------------------------------------------------------------- what is given
def token_list(tokens: Sequence[str], who: str) -> list[str]:
    """The tokens of a sentence as a list. Raises MaskError for one text, for none, and for what holds no text."""
    if isinstance(tokens, (str, Mapping)) or not len(tokens):
        raise MaskError(f"{who} takes a list of tokens with at least one, such as ['the', 'cat'], and got {tokens!r}")
    return [str(token) for token in tokens]


def position_in(tokens: list[str], position: int) -> int:
    if not 0 <= position < len(tokens):
        raise MaskError(
            f"there is no position {position} in a sentence of {len(tokens)} tokens: give 0 to {len(tokens) - 1}"
        )
    return int(position)


def named(answer, who: str) -> tuple[str, float]:
    """One answer, `(token, probability)`. Raises MaskError for anything else."""
    try:
        token, share = answer
        share = float(share)
    except (TypeError, ValueError):
        raise MaskError(
            f"{who}: an answer is a pair (token, probability), such as ('bank', 0.6), not {answer!r}"
        ) from None
    if not 0 <= share <= 1 + 1e-6:
        raise MaskError(f"{who}: the probability of {str(token)!r} must be from 0 to 1, and is {share}")
    return str(token), min(share, 1.0)
