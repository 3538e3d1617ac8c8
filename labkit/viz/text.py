"""Text with marks, as HTML: answers, entities, the words that decide, generations with the uncertainty of each token.

No script and no style sheet. The letters have the page's own colour, and the marks are readable on light and dark
pages. Every mark has a sign or a line besides its colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from labkit.attention.plain import clean, visible
from labkit.errors import MaskError
from labkit.viz.labels import percent
from labkit.viz.style import OPEN, OTHERS, WRONG

STROKES = ("solid", "dashed", "dotted", "double")
LINES = (OPEN, *OTHERS[:5])
LANE = 6  # pixels from one underline to the one below it
MOST_SHOWN = 8  # answers that are drawn
# kind -> (sign, colour, meaning); each colour has a contrast of at least 3:1 to white and to black
KINDS = {
    "right": ("✓", OPEN, "span and label are right"),
    "wrong label": ("≠", "#B8860B", "right span, another label"),
    "wrong boundary": ("↔", "#A8568A", "right label, another span"),
    "wrong boundary and label": ("×", "#8A6FBF", "overlaps, another label and span"),
    "missed": ("○", WRONG, "gold, not found"),
    "spurious": ("+", "#C0392B", "found, not gold"),
}
_CELL = "padding:1px 12px 1px 0;text-align:left;border:0;background:none"


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
        printer.text(self.alt)


def answer_figure(text: str, spans: Sequence, gold: Sequence = (), question: str | None = None) -> TextFigure:
    """Answers in a text, `[(start, end, probability)]` in characters (end exclusive), the likeliest underlined.

    Spans that overlap are underlined at different depths; each has its rank, and a table below gives rank, answer and
    probability. `gold`, a list of `(start, end)`, is overlined. The 8 likeliest spans are drawn.

    Raises:
        MaskError: an empty span, or one outside the text.
    """
    ranked = sorted(((*_span(span, text), span[2]) for span in spans), key=lambda span: -span[2])
    shown, left_out = ranked[:MOST_SHOWN], ranked[MOST_SHOWN:]
    gold = [_span(span, text) for span in gold]
    lanes = _lanes(shown)
    styles = [f"3px {STROKES[i % 4]} {LINES[i % 6]}" for i in range(len(shown))]
    marks = [
        (start, end, f"border-bottom:{style};padding-bottom:{2 + LANE * lane}px")
        for (start, end, _), style, lane in zip(shown, styles, lanes, strict=True)
    ]
    marks += [(*span, "border-top:2px solid currentColor;padding-top:2px") for span in gold]
    ends: dict[int, list[str]] = {}
    rows = []
    for i, (start, end, share) in enumerate(shown):
        ends.setdefault(end, []).append(_chip(f"{i + 1}: {percent(share)}", LINES[i % 6]))
        cells = [f'<span style="border-bottom:{styles[i]}">{i + 1}</span>', escape(text[start:end]), percent(share)]
        rows.append([*cells, "gold" * ((start, end) in gold)])
    if left_out:
        rows.append(["", f"and {len(left_out)} more", percent(min(1.0, sum(share for *_, share in left_out))), ""])
    high = 1.5 + LANE * (max(lanes, default=0) + 1) / 15
    body = f'<p style="margin:0 0 6px"><b>{escape(question)}</b></p>' if question else ""
    body += f'<p style="margin:0;line-height:{high:.2f};white-space:pre-wrap">{_marked(text, marks, ends)}</p>'
    body += _table(rows)
    if gold:
        named = "; ".join(escape(text[start:end]) for start, end in gold)
        body += f'<p style="margin:8px 0 0"><span style="border-top:2px solid currentColor">gold</span>: {named}</p>'
    alt = "; ".join(f'"{text[a:b]}" {percent(share)}' for a, b, share in shown) or "none"
    return _figure(body, f"Answers: {alt}.")


def entities_figure(text: str, gold: Sequence, predicted: Sequence) -> TextFigure:
    """Entities, `[(start, end, label)]` in characters (end exclusive): gold underlined, predicted shaded.

    Each entity has a sign and a colour for its outcome: right, wrong label, wrong boundary, both, missed, or spurious.
    A legend gives their counts. A gold entity is paired with one predicted entity at most.

    Raises:
        MaskError: an empty span, or one outside the text.
    """
    gold = [(*_span(entity, text), str(entity[2])) for entity in gold]
    predicted = [(*_span(entity, text), str(entity[2])) for entity in predicted]
    outcomes = _compared(gold, predicted)
    marks, ends = [], {}
    for kind, true, guess in outcomes:
        sign, colour, _ = KINDS[kind]
        if guess:
            marks.append((*guess[:2], f"background:{colour}40;padding:2px 0;border-radius:3px"))
        if true:
            line = f"dashed {colour}" if kind == "missed" else "solid currentColor"
            marks.append((*true[:2], f"border-bottom:2px {line}"))
        label = f"{guess[2]}, gold {true[2]}" if true and guess and true[2] != guess[2] else (true or guess)[2]
        ends.setdefault(max(span[1] for span in (true, guess) if span), []).append(_chip(f"{sign} {label}", colour))
    counts = {kind: sum(outcome == kind for outcome, *_ in outcomes) for kind in KINDS}
    legend = "".join(
        f'<li style="display:inline-block;margin:0 18px 2px 0">{_chip(sign, colour)} {kind}: <b>{counts[kind]}</b>'
        f'<span style="opacity:.75"> ({meaning})</span></li>'
        for kind, (sign, colour, meaning) in KINDS.items()
        if counts[kind]
    )
    body = f'<p style="margin:0;line-height:2;white-space:pre-wrap">{_marked(text, marks, ends)}</p>'
    body += f'<ul style="list-style:none;margin:10px 0 0;padding:0">{legend}</ul>'
    body += (
        '<p style="margin:4px 0 0"><span style="border-bottom:2px solid currentColor">underlined</span>: gold · '
        '<span style="background:#7F7F7F55;border-radius:3px">shaded</span>: predicted</p>'
    )
    return _figure(body, "Entities: " + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) + ".")


def generation_figure(rows: Sequence[Mapping]) -> TextFigure:
    """Prompts continued by several models; the darker a token's ground, the less certain the model was.

    `rows`: `{"name": ..., "prompt": ..., "tokens": the generated tokens, "entropy": nats before each}` for each model.
    All rows share one scale, from 0 to the largest entropy. Hovering gives a token's entropy.
    """
    top = max(max(map(float, row["entropy"])) for row in rows) or 1.0
    parts, alts = [], []
    for row in rows:
        mean = sum(row["entropy"]) / len(row["entropy"])
        tokens = [
            _ground(visible(token), nats / top, f"{nats:.2f} nats")
            for token, nats in zip(row["tokens"], row["entropy"], strict=True)
        ]
        parts.append(
            f'<p style="margin:0 0 10px;line-height:1.9"><b>{escape(row["name"])}</b> <small>mean entropy {mean:.2f} '
            f"nats</small><br>{escape(clean(row['prompt']))} {' '.join(tokens)}</p>"
        )
        text = " ".join(map(visible, row["tokens"]))
        alts.append(f"{row['name']}: {row['prompt']} {text} (mean entropy {mean:.2f} nats).")
    scale = " ".join(_ground(f"{top * i / 4:.1f}", i / 4) for i in range(5))
    return _figure(
        f'<p style="margin:0 0 10px"><small>entropy in nats: {scale}</small></p>' + "".join(parts), " ".join(alts)
    )


def words_figure(words: Sequence[tuple[str, float]], heading: str = "", most: float | None = None) -> TextFigure:
    """Words with a number each: the ground is blue for a positive and red for a negative one.

    The colour is full at the number `most`; None: the largest. Hovering gives the number.
    """
    most = most or max(abs(value) for _, value in words) or 1.0
    spans = " ".join(_ground(word, value / most, f"{value:+.2f}") for word, value in words)
    alt = ", ".join(f"{word} {value:+.2f}" for word, value in sorted(words, key=lambda word: -word[1])[:3])
    first = f"<b>{escape(heading)}</b><br>" if heading else ""
    return _figure(f'<p style="margin:0;line-height:1.8">{first}{spans}</p>', f"{heading} {alt}")


def stacked(figures: Mapping[str, TextFigure]) -> TextFigure:
    """Several text figures below each other, `{heading: figure}`."""
    parts = [f'<div style="margin:0 0 18px"><b>{escape(name)}</b>{figure}</div>' for name, figure in figures.items()]
    return TextFigure("".join(parts), " ".join(f"{name}: {figure.alt}" for name, figure in figures.items()))


# ---------------------------------------------------------------------------------------------------------- drawing
def _figure(body: str, alt: str) -> TextFigure:
    style = "max-width:820px;margin:0;font:15px/1.5 sans-serif;color:inherit"
    return TextFigure(f'<div role="figure" aria-label="{escape(clean(alt))}" style="{style}">{body}</div>', clean(alt))


def _marked(text: str, marks: list[tuple[int, int, str]], ends: dict[int, list[str]]) -> str:
    """`text` cut at every border of a mark, each piece in the marks that cover it, with the chips where spans end."""
    cuts = sorted({0, len(text), *(start for start, *_ in marks), *(end for _, end, _ in marks)})
    pieces = []
    for start, end in pairwise(cuts):
        piece = escape(text[start:end])
        for first, last, style in marks:
            if first <= start and end <= last:
                piece = f'<span style="{style}">{piece}</span>'
        pieces.append(piece + "".join(ends.get(end, [])))
    return "".join(pieces)


def _chip(words: str, colour: str) -> str:
    style = f"font-size:11px;border:1.5px solid {colour};border-radius:6px;padding:0 3px;margin:0 2px"
    return f'<span style="{style};white-space:nowrap;vertical-align:1px;line-height:1.2">{escape(words)}</span>'


def _ground(word: str, weight: float, tip: str = "") -> str:
    red, green, blue = (0, 114, 178) if weight >= 0 else (204, 51, 17)
    style = f"background:rgba({red},{green},{blue},{min(abs(weight), 1) * 0.6:.2f});border-radius:3px;padding:1px 3px"
    return f'<span title="{escape(tip)}" style="{style}">{escape(word)}</span>'


def _table(rows: list[list[str]]) -> str:
    lines = ["<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>" for row in rows]
    style = "border-collapse:collapse;margin:10px 0 0;color:inherit"
    return f'<table style="{style}">{"".join(lines)}</table>' if rows else ""


def _lanes(spans: Sequence[tuple]) -> list[int]:
    """How deep each span is underlined: the first depth at which nothing overlaps it."""
    taken: list[list[tuple]] = []
    lanes = []
    for start, end, *_ in spans:
        lane = next((i for i, row in enumerate(taken) if all(end <= a or b <= start for a, b in row)), len(taken))
        taken += [[]] * (lane == len(taken))
        taken[lane] = [*taken[lane], (start, end)]
        lanes.append(lane)
    return lanes


def _compared(gold: list[tuple], predicted: list[tuple]) -> list[tuple[str, tuple | None, tuple | None]]:
    """The outcome of each entity, `(kind, gold, predicted)`, in the order of the text; best matches first."""
    pairs = []
    for i, true in enumerate(gold):
        for j, guess in enumerate(predicted):
            common = min(true[1], guess[1]) - max(true[0], guess[0])
            if common > 0:
                pairs.append((-2 * (true[:2] == guess[:2]) - (true[2] == guess[2]), -common, i, j))
    names = {-3: "right", -2: "wrong label", -1: "wrong boundary", 0: "wrong boundary and label"}
    outcomes, used_gold, used_predicted = [], set(), set()
    for rank, _, i, j in sorted(pairs):
        if i not in used_gold and j not in used_predicted:
            outcomes.append((names[rank], gold[i], predicted[j]))
            used_gold.add(i)
            used_predicted.add(j)
    outcomes += [("missed", true, None) for i, true in enumerate(gold) if i not in used_gold]
    outcomes += [("spurious", None, guess) for j, guess in enumerate(predicted) if j not in used_predicted]
    return sorted(outcomes, key=lambda outcome: min(span[:2] for span in outcome[1:] if span))


def _span(span: Sequence, text: str) -> tuple[int, int]:
    start, end = int(span[0]), int(span[1])
    if not 0 <= start < end <= len(text):
        raise MaskError(f"the span {start} to {end} is not in the text, which has characters 0 to {len(text)}")
    return start, end
