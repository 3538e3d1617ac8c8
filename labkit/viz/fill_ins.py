"""A sentence with one token hidden, and what several models name in its place: picture, and widget to click in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED
from labkit.viz.svg import INK, PAGE, Svg, _svg
from labkit.viz.tokens import (
    GREY,
    HIGH,
    LINE,
    PALE,
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
    told_apart,
    visible,
    words,
)

if TYPE_CHECKING:
    from labkit.viz.frames import Frames

BEST = 5  # answers shown of each model
ROW, GAP, EDGE = 26, 24, 12  # pixels: one answer; between two models; around the picture
LETTERS = 104  # pixels kept for the token of an answer
RANKS = ("first", "second", "third", "fourth", "fifth")


def fill_ins_svg(tokens: Sequence[str], position: int, answers: Mapping[str, Sequence], truth: str) -> Svg:
    """The sentence with the token at `position` hidden, and below it each model's five best answers.

    Args:
        tokens: the sentence; what it holds at `position` is not shown there.
        answers: `{model: [(token, probability), ...]}`; no answers: the model cannot name this one.
        truth: the hidden token; marked where a model names it.

    Raises:
        MaskError: no tokens, a position outside of them, no model, or a probability that is none.
    """
    tokens = token_list(tokens, "fill_ins")
    position = position_in(tokens, position)
    columns = _checked(answers)
    sentence, high = _sentence(tokens, position, truth)
    below, low = _columns(columns, truth, high)
    return _svg(sentence + below, PAGE, low, _in_words(tokens, position, columns, truth))


def fill_ins_clicks(
    tokens: Sequence[str], answers_by_position: Mapping[str, Sequence[Sequence]], position: int = 0
) -> Frames:
    """A sentence of buttons: the token that is clicked (or reached with Tab and pressed with Enter) is hidden.

    `answers_by_position`: `{model: for each token, what the model names when it is hidden}`; an empty list where the
    model cannot name it (MNTP has no position before the first token). Begins with `position` hidden.

    Raises:
        MaskError: a model without answers for every token, and whatever `fill_ins_svg` refuses.
    """
    from labkit.viz.frames import Frames

    tokens = token_list(tokens, "fill_ins")
    position = position_in(tokens, position)
    if not isinstance(answers_by_position, Mapping):
        raise MaskError("fill_ins_clicks takes a dictionary {model: a list of answers for each token}")
    for model, answers in answers_by_position.items():
        if len(answers) != len(tokens):
            raise MaskError(
                f"{model!r} has answers for {len(answers)} of {len(tokens)} tokens: give a list for each, empty where "
                "there is no answer"
            )
    pictures, shown, sentences = [], [], []
    for i, truth in enumerate(tokens):
        columns = _checked({model: answers[i] for model, answers in answers_by_position.items()})
        alt = _in_words(tokens, i, columns, truth)
        pictures.append(fill_ins_svg(tokens, i, columns, truth))
        body, low = _columns(columns, truth, 4)
        shown.append(_svg(body, PAGE, low, alt))
        sentences.append(f"Hidden: {quoted(truth)}. " + " ".join(_verdicts(columns, truth)))
    labels = [visible(token) for token in tokens]
    return Frames(pictures, "which token is hidden", labels, sentences, position, buttons=True, shown=shown)


# ---------------------------------------------------------------------------------------------------- what is given
def _checked(answers: Mapping[str, Sequence]) -> dict[str, list[tuple[str, float]]]:
    """Each model's best answers, the most probable first."""
    if not isinstance(answers, Mapping) or not answers:
        raise MaskError("fill_ins takes a dictionary {model: [(token, probability), ...]} with at least one model")
    columns = {}
    for model, given in answers.items():
        pairs = [named(answer, f"the answers of {model!r}") for answer in given]
        if sum(share for _, share in pairs) > 1.001:
            raise MaskError(
                f"the probabilities of {model!r} add up to {sum(p for _, p in pairs):.2f}, which is above 1"
            )
        columns[clean(str(model))] = sorted(pairs, key=lambda pair: -pair[1])[:BEST]
    return columns


# ------------------------------------------------------------------------------------------------------ the picture
def _sentence(tokens: list[str], position: int, truth: str) -> tuple[list[str], int]:
    """The sentence, and the height that it takes."""
    widths = [box_width(token) for token in tokens]
    places, body = rows_of(widths, PAGE - 2 * EDGE, 6), []
    for i, (token, wide, (x, row)) in enumerate(zip(tokens, widths, places, strict=True)):
        x, y = x + EDGE, row * (HIGH + 6) + EDGE
        if i == position:
            body.append(box("?", x, y, wide, INK, "#FFFFFF", INK, tip=f"hidden: {quoted(truth)}"))
        else:
            body.append(box(visible(token), x, y, wide))
    low = EDGE + (places[-1][1] + 1) * (HIGH + 6) + 18
    body.append(words("hidden:", EDGE + 2, low, GREY))
    body.append(mono(visible(truth), EDGE + 54, low, "#00629B", "start", bold=True))
    return body, low + 20


def _columns(columns: dict[str, list[tuple[str, float]]], truth: str, y: int) -> tuple[list[str], int]:
    """The models beside each other, up to three in a row; and where they end."""
    beside = 2 if len(columns) == 4 else min(len(columns), 3)
    wide = min(340, (PAGE - 2 * EDGE - GAP * (beside - 1)) // beside)
    body, each = [], 30 + BEST * ROW + 28
    for i, (model, answers) in enumerate(columns.items()):
        body += _column(model, answers, truth, EDGE + i % beside * (wide + GAP), y + i // beside * (each + 12), wide)
    rows = -(-len(columns) // beside)
    return body, y + rows * each + (rows - 1) * 12 + 2


def _column(model: str, answers: list[tuple[str, float]], truth: str, x: int, y: int, wide: int) -> list[str]:
    letters = wide // 9
    body = [
        words(model if len(model) <= letters else model[: letters - 1] + "…", x, y + 14, bold=True, size=14),
        f'<path d="M{x} {y + 23.5}h{wide}" stroke="{INK}"/>',
    ]
    if not answers:
        body.append(words("cannot name this one", x, y + 48, GREY))
        return body
    start, track = x + LETTERS + 6, wide - LETTERS - 6 - 68
    drawn = told_apart([token for token, _ in answers])
    for row, (token, share) in enumerate(answers):
        top, right = y + 30 + row * ROW, token == truth
        long = max(1, round(track * share))
        if right:
            body.append(f'<rect x="{x}" y="{top}" width="{wide}" height="{ROW}" rx="4" fill="#E3F0F8"/>')
            body.append(sign(True, x + wide - 18, top + 18))
        fill, behind = (ALLOWED, "#FFFFFF") if right else ("#8D99A5", PALE)
        body.append(
            f"<g><title>{escape(f'{quoted(token)}: {share:.4f}')}</title>"
            f'<rect x="{start}" y="{top + 5}" width="{track}" height="16" rx="3" fill="{behind}"/>'
            f'<rect x="{start}" y="{top + 5}" width="{long}" height="16" rx="{min(3, long // 2)}" fill="{fill}"/></g>'
        )
        body.append(mono(drawn[row], x + LETTERS, top + 18, "#00629B" if right else INK, "end", bold=right))
        ink = "#00629B" if right else INK
        body.append(words(percent(share), start + track + 8, top + 18, ink, bold=right, size=13))
    low = y + 30 + BEST * ROW + 20
    body.append(f'<path d="M{x} {low - 15.5}h{wide}" stroke="{LINE}"/>')
    body.append(words(_outcome(answers, truth), x, low, WRONG_INK if _rank(answers, truth) is None else GREY))
    return body


# --------------------------------------------------------------------------------------------------------- in words
def _rank(answers: list[tuple[str, float]], truth: str) -> int | None:
    return next((i for i, (token, _) in enumerate(answers) if token == truth), None)


def _outcome(answers: list[tuple[str, float]], truth: str) -> str:
    rank = _rank(answers, truth)
    if rank is None:
        return f"{quoted(visible(truth))} is not among them"
    return f"{quoted(visible(truth))} is {RANKS[rank]}, with {percent(answers[rank][1])}"


def _verdicts(columns: dict[str, list[tuple[str, float]]], truth: str) -> list[str]:
    return [
        f"{model}: {_outcome(answers, truth) if answers else 'cannot name this one'}."
        for model, answers in columns.items()
    ]


def _in_words(tokens: list[str], position: int, columns: dict[str, list[tuple[str, float]]], truth: str) -> str:
    sentence = " ".join("___" if i == position else visible(token) for i, token in enumerate(tokens))
    text = f'"{sentence}": the hidden token is {quoted(truth)}.'
    for model, answers in columns.items():
        listed = ", ".join(f"{quoted(token)} {percent(share)}" for token, share in answers)
        text += f" {model}: {listed or 'cannot name this one'}."
    return clean(text)
