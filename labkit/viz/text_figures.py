"""Spans over a text that is read: answers with their probabilities, entities found and missed. As HTML, which wraps.

No script, no style sheet: letters in the page's own ink, colours that read on white and on black, so light and dark
pages need nothing. Every mark has a sign or a line of its own besides its colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from labkit.errors import MaskError
from labkit.viz.themes import LINES
from labkit.viz.tokens import clean, percent

STROKES = ("solid", "dashed", "dotted", "double")
LANE = 6  # pixels from one underline to the one below it
MOST_SHOWN = 8  # so many answers are drawn; the rest is said to be left out
# kind -> (sign, colour, what it means); the colours stand on white and on black, more than 3:1 on both
KINDS = {
    "right": ("✓", "#0072B2", "span and label are right"),
    "wrong label": ("≠", "#B8860B", "right span, another label"),
    "wrong boundary": ("↔", "#A8568A", "right label, another span"),
    "wrong boundary and label": ("×", "#8A6FBF", "overlaps, another label and span"),
    "missed": ("○", "#D55E00", "gold, not found"),
    "spurious": ("+", "#C0392B", "found, not gold"),
}


class TextFigure(str):
    """A text with marks, as HTML. A notebook shows it; `alt` is its text equivalent."""

    alt: str

    def __new__(cls, markup: str, alt: str) -> TextFigure:
        self = super().__new__(cls, markup)
        self.alt = alt
        return self

    def _repr_html_(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(f"Picture: {self.alt}")


def answer_figure(text: str, spans: Sequence, gold: Sequence | None = None, question: str | None = None) -> TextFigure:
    """Answers in a text, `[(start, end, probability)]` in characters (end exclusive), the likeliest underlined.

    Spans that overlap are underlined at different depths; each carries its rank, and below the text stand rank, answer
    and probability. `gold`, `(start, end)` or a list of such, is overlined. Of more than 8 spans the first 8 are drawn.

    Raises:
        MaskError: a span outside the text or empty, or a probability that is none.
    """
    text = _text(text)
    ranked = sorted((_probable(span, text) for span in spans), key=lambda span: -span[2])
    gold = [] if gold is None else [gold] if len(gold) == 2 and not hasattr(gold[0], "__len__") else list(gold)
    gold = [_span(span, text, "a gold span") for span in gold]
    shown, left_out = ranked[:MOST_SHOWN], ranked[MOST_SHOWN:]
    lanes = _lanes([span[:2] for span in shown])
    styles = [
        f"border-bottom:3px {STROKES[i % 4]} {LINES[i % 6]};padding-bottom:{2 + LANE * lane}px"
        for i, lane in enumerate(lanes)
    ]
    marks = [(*span[:2], styles[i]) for i, span in enumerate(shown)]
    marks += [(*span, "border-top:2px solid currentColor;padding-top:2px") for span in gold]
    ends: dict[int, list[str]] = {}
    for i, (_, end, share) in enumerate(shown):
        ends.setdefault(end, []).append(_chip(f"{i + 1}: {percent(share)}", LINES[i % 6]))
    high = 1.5 + LANE * (max(lanes, default=0) + 1) / 15
    asked = f'<p style="margin:0 0 6px"><b>{escape(question)}</b></p>' if question else ""
    body = asked + f'<p style="margin:0;line-height:{high:.2f};white-space:pre-wrap">{_marked(text, marks, ends)}</p>'
    rows = [
        f'<tr><td style="{_CELL}"><span style="border-bottom:3px {STROKES[i % 4]} {LINES[i % 6]}">{i + 1}</span></td>'
        f'<td style="{_CELL}">{escape(text[start:end])}</td><td style="{_CELL};text-align:right">{percent(share)}</td>'
        f'<td style="{_CELL}">{_bar(share, LINES[i % 6])}{" gold" * ((start, end) in gold)}</td></tr>'
        for i, (start, end, share) in enumerate(shown)
    ]
    if left_out:
        total = percent(min(1.0, sum(share for *_, share in left_out)))
        rows.append(f'<tr><td colspan="4" style="{_CELL}">and {len(left_out)} more spans, together {total}</td></tr>')
    body += f'<table style="border-collapse:collapse;margin:10px 0 0">{"".join(rows)}</table>' * bool(rows)
    if gold:
        said = "; ".join(escape(text[start:end]) for start, end in gold)
        body += f'<p style="margin:8px 0 0"><span style="border-top:2px solid currentColor">gold</span>: {said}</p>'
    return _figure(body, _answers_in_words(text, shown, left_out, gold, question))


def entities_figure(text: str, gold: Sequence, predicted: Sequence) -> TextFigure:
    """Entities, `[(start, end, label)]` in characters (end exclusive): gold underlined, predicted shaded.

    Each entity carries a sign and a colour for what became of it: right, wrong label, wrong boundary, both, missed, or
    spurious. A legend names them with their counts. A gold entity is paired with one predicted entity at most.

    Raises:
        MaskError: a span outside the text or empty, or two entities of one list that overlap.
    """
    text = _text(text)
    gold, predicted = _entities(gold, text, "gold"), _entities(predicted, text, "predicted")
    found = _compared(gold, predicted)
    marks, ends = [], {}
    for kind, true, guess in found:
        sign, colour, _ = KINDS[kind]
        if guess:
            marks.append((*guess[:2], f"background:{colour}40;padding:2px 0;border-radius:3px"))
        if true:
            missed = "dashed" if kind == "missed" else "solid"
            marks.append((*true[:2], f"border-bottom:2px {missed} {colour if kind == 'missed' else 'currentColor'}"))
        end = max(span[1] for span in (true, guess) if span)
        ends.setdefault(end, []).append(_chip(f"{sign} {_labels(kind, true, guess)}", colour))
    counts = {kind: sum(one == kind for one, *_ in found) for kind in KINDS}
    legend = "".join(
        f'<li style="display:inline-block;margin:0 18px 2px 0">{_chip(sign, colour)} {kind}: <b>{counts[kind]}</b>'
        f'<span style="opacity:.75"> ({meaning})</span></li>'
        for kind, (sign, colour, meaning) in KINDS.items()
        if counts[kind] or kind != "wrong boundary and label"
    )
    body = f'<p style="margin:0;line-height:2;white-space:pre-wrap">{_marked(text, marks, ends)}</p>'
    body += f'<ul style="list-style:none;margin:10px 0 0;padding:0">{legend}</ul>'
    body += (
        '<p style="margin:4px 0 0"><span style="border-bottom:2px solid currentColor">underlined</span>: gold · '
        '<span style="background:#7F7F7F55;border-radius:3px">shaded</span>: predicted</p>'
    )
    return _figure(body, _entities_in_words(text, found, counts))


# -------------------------------------------------------------------------------------------------- the whole figure
_CELL = "padding:1px 12px 1px 0;text-align:left;border:0;background:none"


def _figure(body: str, alt: str) -> TextFigure:
    style = "max-width:820px;margin:0;font:15px/1.5 sans-serif;color:inherit"
    return TextFigure(f'<div role="figure" aria-label="{escape(alt)}" style="{style}">{body}</div>', alt)


def _marked(text: str, marks: list[tuple[int, int, str]], ends: dict[int, list[str]]) -> str:
    """`text` cut at every border of a mark, each piece in the marks that cover it, with the chips where spans end."""
    cuts = sorted({0, len(text), *(start for start, *_ in marks), *(end for _, end, _ in marks)})
    pieces = []
    for start, end in pairwise(cuts):
        piece = escape(_printable(text[start:end]))
        for first, last, style in marks:
            if first <= start and end <= last:
                piece = f'<span style="{style}">{piece}</span>'
        pieces.append(piece + "".join(ends.get(end, [])))
    return "".join(pieces)


def _chip(words: str, colour: str) -> str:
    """A small label in a frame; in the page's own ink, so that it reads in every theme."""
    style = f"font-size:11px;border:1.5px solid {colour};border-radius:6px;padding:0 3px;margin:0 2px"
    return f'<span style="{style};white-space:nowrap;vertical-align:1px;line-height:1.2">{escape(words)}</span>'


def _bar(share: float, colour: str) -> str:
    wide = max(1, round(share * 160))
    style = f"display:inline-block;width:{wide}px;height:9px;background:{colour};border-radius:2px"
    return f'<span aria-hidden="true" style="{style}"></span>'


def _lanes(spans: Iterable[tuple[int, int]]) -> list[int]:
    """How deep each span is underlined: the first depth at which nothing overlaps it."""
    taken: list[list[tuple[int, int]]] = []
    lanes = []
    for start, end in spans:
        lane = next((i for i, row in enumerate(taken) if all(end <= a or b <= start for a, b in row)), len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((start, end))
        lanes.append(lane)
    return lanes


# ---------------------------------------------------------------------------------------------- gold and predicted
def _compared(gold: list[tuple], predicted: list[tuple]) -> list[tuple[str, tuple | None, tuple | None]]:
    """What became of each entity, `(kind, gold, predicted)`, in the order of the text; the best match goes first."""
    pairs = []
    for i, true in enumerate(gold):
        for j, guess in enumerate(predicted):
            common = min(true[1], guess[1]) - max(true[0], guess[0])
            if common > 0:
                same_span, same_label = true[:2] == guess[:2], true[2] == guess[2]
                pairs.append((-(2 * same_span + same_label), -common, i, j))
    names = {-3: "right", -2: "wrong label", -1: "wrong boundary", 0: "wrong boundary and label"}
    found, used_gold, used_predicted = [], set(), set()
    for rank, _, i, j in sorted(pairs):
        if i not in used_gold and j not in used_predicted:
            found.append((names[rank], gold[i], predicted[j]))
            used_gold.add(i)
            used_predicted.add(j)
    found += [("missed", true, None) for i, true in enumerate(gold) if i not in used_gold]
    found += [("spurious", None, guess) for j, guess in enumerate(predicted) if j not in used_predicted]
    return sorted(found, key=lambda one: min(span[:2] for span in one[1:] if span))


def _labels(kind: str, true: tuple | None, guess: tuple | None) -> str:
    if true and guess and true[2] != guess[2]:
        return f"{guess[2]}, gold {true[2]}"
    return (true or guess)[2]


# ------------------------------------------------------------------------------------------------------------ words
def _answers_in_words(text: str, shown: list, left_out: list, gold: list, question: str | None) -> str:
    words = f'Answers to "{question}"' if question else "Answers"
    words += f" in a text of {len(text)} characters: "
    words += "; ".join(f'{i + 1}. "{text[a:b]}" {percent(share)}' for i, (a, b, share) in enumerate(shown)) or "none"
    words += f"; and {len(left_out)} more" if left_out else ""
    words += "." + (" Gold: " + "; ".join(f'"{text[a:b]}"' for a, b in gold) + "." if gold else "")
    return clean(words)


def _entities_in_words(text: str, found: list, counts: dict[str, int]) -> str:
    words = "Entities, gold against predicted: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()) + "."
    for kind, true, guess in found:
        start, end, _ = true or guess
        words += f' "{text[start:end]}" {_labels(kind, true, guess)}: {kind}.'
    return clean(words)


# ---------------------------------------------------------------------------------------------------- what is given
def _text(text: str) -> str:
    if not isinstance(text, str) or not text:
        raise MaskError(f"the spans need the text that they lie in, and got {text!r}")
    return text


def _printable(text: str) -> str:
    """Line ends and tabs as they are, other control characters as their pictures."""
    return "\n".join("\t".join(clean(part) for part in line.split("\t")) for line in text.split("\n"))


def _span(span, text: str, what: str) -> tuple[int, int]:
    try:
        start, end = (int(place) for place in tuple(span)[:2])
    except (TypeError, ValueError):
        raise MaskError(f"{what} is given as (start, end) in characters, and got {span!r}") from None
    if not 0 <= start < end <= len(text):
        raise MaskError(f"{what}, {start} to {end}, lies not in the text, which has characters 0 to {len(text)}")
    return start, end


def _probable(span, text: str) -> tuple[int, int, float]:
    try:
        *place, share = span
        share = float(share)
    except (TypeError, ValueError):
        raise MaskError(f"an answer is given as (start, end, probability), and got {span!r}") from None
    if not 0 <= share <= 1 + 1e-6:
        raise MaskError(f"the probability of an answer must be from 0 to 1, and is {share}")
    return *_span(place, text, "an answer"), min(share, 1.0)


def _entities(entities: Sequence, text: str, what: str) -> list[tuple[int, int, str]]:
    checked = []
    for entity in entities:
        if isinstance(entity, str) or not hasattr(entity, "__len__") or len(entity) != 3:
            raise MaskError(f"a {what} entity is given as (start, end, label), and got {entity!r}")
        checked.append((*_span(entity, text, f"a {what} entity"), str(entity[2])))
    checked.sort()
    for first, second in pairwise(checked):
        if second[0] < first[1]:
            raise MaskError(f"two {what} entities overlap: {first} and {second}")
    return checked
