"""A text as it is written: by several models beside each other, with how sure they are; and position by position."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, bool_grid
from labkit.viz.svg import INK, LETTER, PAGE, SHADES, Svg, _shade, _svg
from labkit.viz.tokens import (
    GREY,
    HIGH,
    LINE,
    WRONG_INK,
    box,
    box_width,
    clean,
    mono,
    named,
    percent,
    position_in,
    quoted,
    rows_of,
    sign,
    token_list,
    visible,
    words,
)

if TYPE_CHECKING:
    from labkit.viz.frames import Frames

EDGE, GAP = 12, 4  # pixels: around the picture, between two tokens
TALL = 38  # pixels: a box that holds a token and a number
LIT, FUTURE = "#D6E9F5", "#FBE3D3"  # what a position sees: before it and itself, after it


def generation_svg(rows: Sequence[Mapping]) -> Svg:
    """One prompt continued by several models, a row for each; the darker a token, the less sure the model was.

    `rows`: for each model `{"name": ..., "prompt": ..., "tokens": what it wrote, "entropy": nats before each}`. Below
    each token stands its entropy; all rows share one scale, from 0 to the largest.

    Raises:
        MaskError: no rows, a row that lacks one of these, or whose numbers of tokens and entropies differ.
    """
    if isinstance(rows, Mapping) or not len(rows):
        raise MaskError("generation_svg takes a list of rows, each a dictionary {name, prompt, tokens, entropy}")
    checked = [_checked(row) for row in rows]
    top = max(max(entropy) for _, _, _, entropy in checked) or 1.0
    body, y, alts = _legend(top), 44, []
    for name, prompt, tokens, entropy in checked:
        mean = sum(entropy) / len(entropy)
        body.append(
            f'<text x="{EDGE}" y="{y + 14}" font-size="14"><tspan font-weight="bold">{escape(name)}</tspan>'
            f'<tspan font-size="12" fill="{GREY}" dx="10">mean entropy {mean:.2f} nats</tspan></text>'
        )
        written, y = _written(prompt, tokens, entropy, top, y + 24)
        body += written
        text = " ".join(visible(token) for token in tokens)
        alts.append(
            f'{name} continues "{prompt}" with "{text}", mean entropy {mean:.2f} nats, at most {max(entropy):.2f}.'
        )
    return _svg(body, PAGE, y - 8, " ".join(alts))


def _checked(row: Mapping) -> tuple[str, str, list[str], list[float]]:
    missing = [key for key in ("name", "prompt", "tokens", "entropy") if key not in row]
    if missing:
        raise MaskError(f"a row needs name, prompt, tokens, entropy, and this one has no {' and no '.join(missing)}")
    name, tokens = clean(str(row["name"])), token_list(row["tokens"], f"the row {row['name']!r}")
    entropy = [float(nats) for nats in row["entropy"]]
    if len(entropy) != len(tokens):
        raise MaskError(f"row {name!r} has {len(tokens)} tokens and {len(entropy)} entropies: give one for each token")
    if not all(math.isfinite(nats) and nats >= -1e-6 for nats in entropy):
        raise MaskError(f"the entropies of {name!r} must be finite numbers of nats, at least 0: {entropy}")
    return name, clean(row["prompt"]), tokens, [max(nats, 0.0) for nats in entropy]


def _written(prompt: str, tokens: list[str], entropy: list[float], top: float, y: int) -> tuple[list[str], int]:
    """The prompt in grey, the tokens in boxes, on as many lines as it takes; and where they end."""
    said = prompt.split() or ["(no prompt)"]
    widths = [box_width(word, 0) - 8 for word in said] + [box_width(token, 30) for token in tokens]
    places, body = rows_of(widths, PAGE - 2 * EDGE, GAP), []
    for i, (wide, (x, row)) in enumerate(zip(widths, places, strict=True)):
        x, top_edge = x + EDGE, y + row * (TALL + 6)
        if i < len(said):
            body.append(mono(visible(said[i]), x, top_edge + 18, GREY, "start"))
            continue
        token, nats = tokens[i - len(said)], entropy[i - len(said)]
        level = round(nats / top * SHADES)
        ink = "#FFFFFF" if level > SHADES * 0.63 else "#000000"  # whichever has the stronger contrast
        tip = f"{quoted(token)}: entropy {nats:.3f} nats"
        body.append(box("", x, top_edge, wide, _shade(level), stroke="#B9C6D2", tip=tip, high=TALL))
        body.append(mono(visible(token), x + wide // 2, top_edge + 17, ink))
        body.append(words(f"{nats:.1f}", x + wide // 2, top_edge + 31, ink, "middle", 11))
    return body, y + (places[-1][1] + 1) * (TALL + 6) + 18


def _legend(top: float) -> list[str]:
    """The scale of shades, from sure to unsure."""
    x, wide, body = EDGE + 214, 160, [words("entropy of each step, in nats:", EDGE, 22, GREY)]
    for i in range(16):
        shade = _shade(round(i / 15 * SHADES))
        body.append(f'<rect x="{x + i * wide // 16}" y="11" width="{wide // 16 + 1}" height="14" fill="{shade}"/>')
    body.append(f'<rect x="{x}.5" y="10.5" width="{wide}" height="15" fill="none" stroke="#B9C6D2"/>')
    body.append(words("0, sure", x - 6, 22, INK, "end"))
    body.append(words(f"{top:.1f}, unsure", x + wide + 8, 22))
    return body


# ------------------------------------------------------------------------------------- one position after another
def walk_svg(tokens: Sequence[str], sees, predicts: Sequence, truth: Sequence, position: int) -> Svg:
    """One position of a short sentence: what it may see, what it must name, and what it does name.

    The lit tokens are those that the position sees: blue up to itself, orange in its future. The rows below hold what
    must be named and what is named, up to this position.

    Args:
        tokens: what is read.
        sees: the mask, bool (tokens, tokens): row looks at column.
        predicts: what each position names, `(token, probability)`.
        truth: what each position must name; None: not counted.

    Raises:
        MaskError: lengths that do not match, or a position outside of the sentence.
    """
    tokens, cells, answers, truth = _checked_walk(tokens, sees, predicts, truth)
    position = position_in(tokens, position)
    widths = [
        max(box_width(token, 52), box_width(answers[i][0]), box_width(truth[i] or "-"))
        for i, token in enumerate(tokens)
    ]
    left = EDGE + 88
    columns = [left + sum(widths[:i]) + 8 * i for i in range(len(tokens))]
    middles = [x + wide // 2 for x, wide in zip(columns, widths, strict=True)]
    row = 98  # the upper edge of the tokens
    body = _arcs(cells[position], middles, position, row)
    for text, y in (("reads", row), ("must name", row + 56), ("names", row + 56 + HIGH + 10)):
        body.append(words(text, EDGE, y + 17, GREY))
    for i, (token, x, wide) in enumerate(zip(tokens, columns, widths, strict=True)):
        body += _lit(token, x, row, wide, bool(cells[position, i]), i - position)
        if i <= position:
            body += _named(answers[i], truth[i], x, row + 56, wide, i == position)
    note, ink = _note(tokens, cells, truth, position)
    right = max(columns[-1] + widths[-1] + EDGE, EDGE + len(note) * LETTER + EDGE)
    low = row + 56 + 2 * HIGH + 62
    body.append(words(note, EDGE, low, ink, size=13, bold=ink == WRONG_INK))
    return _svg(body, max(right, 420), low + 14, _walk_in_words(tokens, cells, answers, truth, position))


def walk_slider(tokens: Sequence[str], sees, predicts: Sequence, truth: Sequence, position: int = 0) -> Frames:
    """`walk_svg` with a slider over the positions of the sentence, beginning at `position`."""
    from labkit.viz.frames import Frames

    names, cells, answers, asked = _checked_walk(tokens, sees, predicts, truth)
    position = position_in(names, position)
    pictures = [walk_svg(names, cells, answers, asked, i) for i in range(len(names))]
    sentences = [_walk_in_words(names, cells, answers, asked, i) for i in range(len(names))]
    labels = [f"{i}: {visible(token)}" for i, token in enumerate(names)]
    return Frames(pictures, "position", labels, sentences, position)


def _checked_walk(tokens: Sequence[str], sees, predicts: Sequence, truth: Sequence):
    tokens = token_list(tokens, "walk")
    cells = bool_grid(sees, "what the positions see")
    if cells.shape != (len(tokens), len(tokens)):
        raise MaskError(f"what the positions see has shape {cells.shape}, and the sentence has {len(tokens)} tokens")
    for what, given in (("predictions", predicts), ("true tokens", truth)):
        if isinstance(given, str) or len(given) != len(tokens):
            raise MaskError(f"a walk over {len(tokens)} tokens needs as many {what}, not {given!r}")
    answers = [named(answer, "walk") for answer in predicts]
    return tokens, cells, answers, [None if token is None else str(token) for token in truth]


def _arcs(sees, middles: list[int], position: int, row: int) -> list[str]:
    """From the position to each token that it sees; those to its future in orange and dashed."""
    start, span, body = middles[position], max(middles[-1] - middles[0], 1), []
    for i, middle in enumerate(middles):
        if i == position or not sees[i]:
            continue
        up = row - 8 - 24 - round(62 * abs(middle - start) / span)
        look = f'stroke="{WRONG_INK}" stroke-dasharray="5 3"' if i > position else f'stroke="{ALLOWED}"'
        body.append(
            f'<path d="M{start} {row - 2}C{start} {up} {middle} {up} {middle} {row - 5}" fill="none" {look} '
            'stroke-width="1.8"/>'
        )
        body.append(f'<circle cx="{middle}" cy="{row - 4}" r="3.5" fill="{WRONG_INK if i > position else ALLOWED}"/>')
    return body


def _lit(token: str, x: int, y: int, wide: int, seen: bool, ahead: int) -> list[str]:
    """A token as the position sees it: lit, or dark."""
    if not seen:
        text = "not seen"
        body = [box(visible(token), x, y, wide, "#FFFFFF", "#66717B", "#DDE2E7", ' stroke-dasharray="3 3"', tip=text)]
    else:
        fill, stroke = (FUTURE, "#D55E00") if ahead > 0 else (LIT, ALLOWED)
        body = [box(visible(token), x, y, wide, fill, INK, stroke, tip="seen")]
    if ahead == 0:
        body.append(
            f'<rect x="{x - 2}" y="{y - 2}" width="{wide + 4}" height="{HIGH + 4}" rx="7" fill="none" '
            f'stroke="{INK}" stroke-width="2.5"/>'
        )
        body.append(f'<path d="M{x + wide // 2} {y + HIGH + 4}v14" stroke="{INK}" stroke-width="2"/>')
        body.append(f'<path d="M{x + wide // 2 - 5} {y + HIGH + 17}h10l-5 8z" fill="{INK}"/>')
    return body


def _named(answer: tuple[str, float], truth: str | None, x: int, y: int, wide: int, now: bool) -> list[str]:
    """What must be named, what is named, with which probability, and whether they agree; pale for earlier positions."""
    token, share = answer
    below, right = y + HIGH + 10, token == truth
    if truth is None:
        body = [mono("-", x + wide // 2, y + 17, GREY)]
        body.append(box(visible(token), x, below, wide, "#FFFFFF", GREY, "#DDE2E7"))
    else:
        colour = ALLOWED if right else "#D55E00"
        fill = (LIT if right else FUTURE) if now else "#FFFFFF"
        body = [box(visible(truth), x, y, wide, "#FFFFFF", INK, INK if now else LINE)]
        body.append(box(visible(token), x, below, wide, fill, "#00527F" if right else WRONG_INK, colour))
    tip = f"{quoted(token)}: {share:.4f}"
    shown, middle = percent(share), x + wide // 2 + (0 if truth is None else 7)
    body.append(f"<g>{words(shown, middle, below + HIGH + 17, INK, 'middle', 12, now)}<title>{escape(tip)}</title></g>")
    if truth is not None:
        body.append(sign(right, middle - len(shown) * LETTER // 2 - 17, below + HIGH + 17))
    return body


def _in_sight(tokens: list[str], cells, truth: list[str | None], i: int) -> bool:
    """Whether position i must name the token after it, and sees that token."""
    return i + 1 < len(tokens) and truth[i] == tokens[i + 1] and bool(cells[i, i + 1])


def _note(tokens: list[str], cells, truth: list[str | None], i: int) -> tuple[str, str]:
    seen = int(cells[i].sum())
    ahead = int(cells[i, i + 1 :].sum())
    text = f"Position {i} sees {seen} of {len(tokens)} tokens, {ahead or 'none'} of them in its future"
    if _in_sight(tokens, cells, truth, i):
        return f"{text}: the answer is in sight.", WRONG_INK
    return f"{text}." + (" It is not counted." if truth[i] is None else ""), GREY


def _walk_in_words(tokens: list[str], cells, answers: list[tuple[str, float]], truth: list[str | None], i: int) -> str:
    seen = ", ".join(quoted(token) for token, may in zip(tokens, cells[i], strict=True) if may) or "nothing"
    asked = "is not counted" if truth[i] is None else f"must name {quoted(truth[i])}"
    token, share = answers[i]
    sight = " The answer is in sight." if _in_sight(tokens, cells, truth, i) else ""
    named_now = f"names {quoted(token)} with {percent(share)}"
    return clean(f"Position {i}, {quoted(tokens[i])}, sees {seen}; it {asked}, and {named_now}.{sight}")
