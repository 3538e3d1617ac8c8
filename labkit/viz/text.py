"""Text with marks, as HTML: answers, entities, the words that decide, generations with the uncertainty of each token.

Only the probe has a script and a style sheet. The letters have the page's own colour, and the marks are readable on
light and dark pages. Every mark has a sign or a line besides its colour.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import ipywidgets

from labkit.attention.plain import clean, visible
from labkit.errors import LabkitError, MaskError
from labkit.viz.page import joined
from labkit.viz.style import OPEN, OTHERS, WRONG, bool_grid, percent

STROKES, LINES = ("solid", "dashed", "dotted", "double"), (OPEN, *OTHERS[:5])
LANE = 6  # pixels from one underline to the one below it
MOST_SHOWN = 8  # answers that are drawn
KINDS = {  # outcome of an entity -> (sign, colour); each colour has a contrast of at least 3:1 to white and to black
    "right": ("✓", OPEN),
    "wrong label": ("≠", "#B8860B"),
    "wrong boundary": ("↔", "#A8568A"),
    "wrong boundary and label": ("×", "#8A6FBF"),
    "missed": ("○", WRONG),
    "spurious": ("+", "#C0392B"),
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
        printer.text(self.alt)


def answer_figure(text: str, spans: Sequence) -> TextFigure:
    """Answers in a text, `[(start, end, probability)]` in characters (end exclusive), the 8 likeliest underlined.

    Spans that overlap are underlined at different depths; each has its rank and probability, and a list below repeats
    them with the answers.

    Raises:
        MaskError: an empty span, or one outside the text.
    """
    ranked = sorted(((*_span(span, text), span[2]) for span in spans), key=lambda span: -span[2])[:MOST_SHOWN]
    marks, ends, lanes, items = [], {}, [], []
    for i, (start, end, share) in enumerate(ranked):
        # the first depth at which nothing overlaps it
        taken = {lane for lane, (a, b, _) in zip(lanes, ranked, strict=False) if a < end and start < b}
        lanes.append(next(lane for lane in range(MOST_SHOWN) if lane not in taken))
        line = f"border-bottom:3px {STROKES[i % 4]} {LINES[i % 6]}"
        marks.append((start, end, f"{line};padding-bottom:{2 + LANE * lanes[-1]}px"))
        ends.setdefault(end, []).append(_chip(f"{i + 1}: {percent(share)}", LINES[i % 6]))
        items.append(f'<li><span style="{line}">{escape(text[start:end])}</span> {percent(share)}</li>')
    high = 1.5 + LANE * (max(lanes, default=0) + 1) / 15
    body = f'<p style="margin:0;line-height:{high:.2f};white-space:pre-wrap">{_marked(text, marks, ends)}</p>'
    body += f'<ol style="margin:10px 0 0">{"".join(items)}</ol>'
    alt = "; ".join(f'"{text[a:b]}" {percent(share)}' for a, b, share in ranked) or "none"
    return _figure(body, f"Answers: {alt}.")


def entities_figure(text: str, gold: Sequence | None, predicted: Sequence) -> TextFigure:
    """Entities, `[(start, end, label)]` in characters (end exclusive): gold underlined, predicted shaded.

    Each entity has a sign and a colour for its outcome: right, wrong label, wrong boundary, both, missed, or spurious.
    A legend gives their counts. A gold entity is paired with one predicted entity at most. `gold` is None where no one
    has labelled the text: then the predicted entities have one colour and no outcome.
    """
    predicted = [(*_span(entity, text), str(entity[2])) for entity in predicted]
    if gold is None:
        outcomes = [(None, None, entity) for entity in predicted]
    else:
        outcomes = _compared([(*_span(entity, text), str(entity[2])) for entity in gold], predicted)
    marks, ends, counts = [], {}, Counter(kind for kind, *_ in outcomes)
    for kind, true, guess in outcomes:
        sign, colour = KINDS.get(kind, ("", LINES[0]))
        if guess:
            marks.append((*guess[:2], f"background:{colour}40;padding:2px 0;border-radius:3px"))
        if true:
            line = f"dashed {colour}" if kind == "missed" else "solid currentColor"
            marks.append((*true[:2], f"border-bottom:2px {line}"))
        label = f"{guess[2]}, gold {true[2]}" if true and guess and true[2] != guess[2] else (true or guess)[2]
        chip = _chip(f"{sign} {label}".strip(), colour)
        ends.setdefault(max(span[1] for span in (true, guess) if span), []).append(chip)
    body = f'<p style="margin:0;line-height:2;white-space:pre-wrap">{_marked(text, marks, ends)}</p>'
    if gold is None:
        return _figure(body, f"Entities: {', '.join(f'{text[a:b]} {label}' for a, b, label in predicted) or 'none'}.")
    counted = [kind for kind in KINDS if counts[kind]]
    legend = " · ".join(f"{_chip(*KINDS[kind])} {kind}: <b>{counts[kind]}</b>" for kind in counted)
    body += (
        f'<p style="margin:10px 0 0">{legend}</p>'
        '<p style="margin:4px 0 0"><span style="border-bottom:2px solid currentColor">underlined</span>: gold · '
        '<span style="background:#7F7F7F55;border-radius:3px">shaded</span>: predicted</p>'
    )
    return _figure(body, f"Entities: {', '.join(f'{counts[kind]} {kind}' for kind in counted) or 'none'}.")


def generation_figure(rows: Sequence[Mapping]) -> TextFigure:
    """Prompts continued by several models; the darker a token's ground, the less certain the model was.

    `rows`: `{"name": ..., "prompt": ..., "tokens": the generated tokens, "entropy": nats before each}` for each model.
    All rows share one scale, from 0 to the largest entropy. Hovering gives a token's entropy.
    """
    top = max(max(map(float, row["entropy"])) for row in rows) or 1.0
    scale = " ".join(_ground(f"{top * i / 4:.1f}", i / 4) for i in range(5))
    body, alts = f'<p style="margin:0 0 10px"><small>entropy in nats: {scale}</small></p>', []
    for row in rows:
        mean = sum(row["entropy"]) / len(row["entropy"])
        tokens = [visible(token) for token in row["tokens"]]
        marked = " ".join(
            _ground(token, nats / top, f"{nats:.2f} nats") for token, nats in zip(tokens, row["entropy"], strict=True)
        )
        body += (
            f'<p style="margin:0 0 10px;line-height:1.9"><b>{escape(row["name"])}</b> <small>mean entropy {mean:.2f} '
            f"nats</small><br>{escape(clean(row['prompt']))} {marked}</p>"
        )
        alts.append(f"{row['name']}: {row['prompt']} {' '.join(tokens)} (mean entropy {mean:.2f} nats).")
    return _figure(body, " ".join(alts))


def words_figure(words: Sequence[tuple[str, float]], heading: str = "") -> TextFigure:
    """Words with a number each: the ground is blue for a positive and red for a negative one.

    The colour is full at the largest number. Hovering gives the number.
    """
    most = max(abs(value) for _, value in words) or 1.0
    spans = " ".join(_ground(word, value / most, f"{value:+.2f}") for word, value in words)
    alt = ", ".join(f"{word} {value:+.2f}" for word, value in sorted(words, key=lambda word: -abs(word[1]))[:3])
    first = f"<b>{escape(heading)}</b><br>" if heading else ""
    return _figure(f'<p style="margin:0;line-height:1.8">{first}{spans}</p>', f"{heading} {alt}")


def stacked(figures: Mapping[str, TextFigure]) -> TextFigure:
    """Several text figures below each other, `{heading: figure}`."""
    parts = [f'<div style="margin:0 0 18px"><b>{escape(name)}</b>{figure}</div>' for name, figure in figures.items()]
    return TextFigure("".join(parts), " ".join(f"{name}: {figure.alt}" for name, figure in figures.items()))


def probe_figure(words: Sequence[str], measured: Mapping[str, Mapping[str, Any]]) -> TextFigure:
    """Buttons for the models and batches of `measured`, and for the word that is replaced; the changed states are blue.

    It begins with the first model and batch and the last word. It needs no kernel; where no script runs, it shows this
    first state.

    Args:
        words: the words of the text, (n,).
        measured: {model: {batch: (n, n) bool}}, where [i, j] tells whether replacing word j changes state i.
    """
    grids = {
        model: {batch: bool_grid(cells, f"{model}, {batch}").tolist() for batch, cells in batches.items()}
        for model, batches in measured.items()
    }
    batches = next(iter(grids.values()))
    changed = [row[-1] for row in next(iter(batches.values()))]
    states = "".join(
        f'<span class="labkit-state{" labkit-changed" * now}">{escape(word)}</span>'
        for word, now in zip(words, changed, strict=True)
    )
    names = [word for word, now in zip(words, changed, strict=True) if now]
    line = f"{words[-1]} is replaced: {len(names)} of {len(words)} states change ({', '.join(names)})."
    body = (
        _buttons("Model", list(grids), 0)
        + _buttons("Batch", list(batches), 0)
        + _buttons("Replace the word", words, len(words) - 1)
        + f'<fieldset><legend>Changed states</legend>{states}</fieldset><div role="status">{escape(line)}</div>'
    )
    data = escape(json.dumps({"words": list(words), "measured": grids}))
    card = f'<div class="labkit-probe" data-lm-suppress-shortcuts="true" data-probe="{data}">{body}</div>'
    return TextFigure(f"{card}\n{joined('probe.html')}", clean(line))


class Ask(ipywidgets.VBox):
    """Fields to type in, with their first texts, and a button; `answer(**texts)` gives the HTML that is shown below.

    Where widgets cannot run, the first answer is shown.
    """

    def __init__(self, answer: Callable[..., str], **fields: str):
        self.answer, self.button = answer, ipywidgets.Button(description="Answer")
        wide = {"width": "620px"}
        self.fields = {name: ipywidgets.Text(text, description=name, layout=wide) for name, text in fields.items()}
        first = answer(**fields)
        self.shown, self.alt = ipywidgets.HTML(first), getattr(first, "alt", "Fields to type in, and an answer.")
        super().__init__([*self.fields.values(), self.button, self.shown])
        self.button.on_click(self._update)

    def _update(self, _: ipywidgets.Button) -> None:
        texts = {name: field.value.strip() for name, field in self.fields.items()}
        try:
            self.shown.value = self.answer(**texts) if all(texts.values()) else "Fill in all fields."
        except LabkitError as error:
            self.shown.value = f"<p>{escape(str(error))}</p>"

    def _repr_mimebundle_(self, **options):
        return super()._repr_mimebundle_(**options) | {"text/html": self.shown.value, "text/plain": self.alt}


ask = Ask


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


def _buttons(legend: str, names: Sequence[str], pressed: int) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(number == pressed).lower()}">{escape(name)}</button>'
        for number, name in enumerate(names)
    )
    return f"<fieldset><legend>{escape(legend)}</legend>{buttons}</fieldset>"


def _compared(gold: list[tuple], predicted: list[tuple]) -> list[tuple[str, tuple | None, tuple | None]]:
    """The outcome of each entity, `(kind, gold, predicted)`, in the order of the text; best matches first."""
    kinds = {3: "right", 2: "wrong label", 1: "wrong boundary", 0: "wrong boundary and label"}
    pairs = []
    for i, true in enumerate(gold):
        for j, guess in enumerate(predicted):
            common = min(true[1], guess[1]) - max(true[0], guess[0])
            if common > 0:
                pairs.append((-2 * (true[:2] == guess[:2]) - (true[2] == guess[2]), -common, i, j))
    outcomes, gold_left, predicted_left = [], set(range(len(gold))), set(range(len(predicted)))
    for rank, _, i, j in sorted(pairs):
        if i in gold_left and j in predicted_left:
            outcomes.append((kinds[-rank], gold[i], predicted[j]))
            gold_left.remove(i)
            predicted_left.remove(j)
    outcomes += [("missed", gold[i], None) for i in gold_left]
    outcomes += [("spurious", None, predicted[j]) for j in predicted_left]
    return sorted(outcomes, key=lambda outcome: min(span[:2] for span in outcome[1:] if span))


def _span(span: Sequence, text: str) -> tuple[int, int]:
    start, end = int(span[0]), int(span[1])
    if not 0 <= start < end <= len(text):
        raise MaskError(f"the span {start} to {end} is not in the text, which has characters 0 to {len(text)}")
    return start, end
