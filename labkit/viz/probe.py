"""Which states change when a word is replaced? A figure with buttons for the model, the batch and the word."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from labkit.attention.plain import clean
from labkit.viz.style import bool_grid
from labkit.viz.text import TextFigure


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
    template = files("labkit").joinpath("viz", "probe.html").read_text(encoding="utf-8")
    card = f'<div class="labkit-probe" data-lm-suppress-shortcuts="true" data-probe="{data}">{body}</div>'
    return TextFigure(f"{card}\n{template}", clean(line))


def _buttons(legend: str, names: Sequence[str], pressed: int) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(number == pressed).lower()}">{escape(name)}</button>'
        for number, name in enumerate(names)
    )
    return f"<fieldset><legend>{escape(legend)}</legend>{buttons}</fieldset>"
