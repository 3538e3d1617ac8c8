"""The box in which a reader writes a prediction, and the one in which it is explained.

With a kernel what is written goes into the record (`labkit.learner.record`); on a page without one, into the storage
of the reader's browser.
"""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files

import anywidget
import traitlets

from labkit.errors import LearnerError
from labkit.learner import record

NAME = re.compile(r"\d\d-[a-z0-9]+(-[a-z0-9]+)*")
KEPT = "Kept on this machine only. In a terminal, labkit progress shows it."
NOT_KEPT = "Not kept: progress is switched off here."


class Box(anywidget.AnyWidget):
    """What `labkit.learner.predict` and `explain` return.

    Attributes:
        name: of the prediction. stage: "predict" or "explain". question: above the place to write in.
        text: what was written. prediction: what the box "explain" shows. kept: where the text is kept, or why not;
        answers: how often Python has dealt with a new text. live: whether there may be a Python.
    """

    _esm = files(__package__).joinpath("boxes.js").read_text(encoding="utf-8")
    _css = files(__package__).joinpath("boxes.css").read_text(encoding="utf-8")

    name = traitlets.Unicode().tag(sync=True)
    stage = traitlets.Enum(("predict", "explain")).tag(sync=True)
    question = traitlets.Unicode().tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)
    prediction = traitlets.Unicode().tag(sync=True)
    kept = traitlets.Unicode().tag(sync=True)
    answers = traitlets.Int(0).tag(sync=True)
    live = traitlets.Bool(True).tag(sync=True)

    def __init__(self, name: str, stage: str, question: str) -> None:
        if not NAME.fullmatch(name):
            raise LearnerError(
                f"{name!r} is no name of a prediction: give the notebook's number, a hyphen and a word, as '00-padding'"
            )
        self._which = "prediction" if stage == "predict" else "explanation"
        box, fault = _kept_of(name)
        super().__init__(
            name=name,
            stage=stage,
            question=question,
            text=box.get(self._which, ""),
            prediction=box.get("prediction", ""),
            kept=fault or (KEPT if record.place() else NOT_KEPT),
        )
        self.observe(self._keep, "text")

    def _keep(self, change) -> None:
        fault = record.try_to_change(lambda kept: kept.wrote(self.name, self._which, change.new))
        self.kept = f"Not kept: {fault}" if fault else KEPT if record.place() else NOT_KEPT
        self.answers += 1

    def _repr_mimebundle_(self, **options) -> tuple[dict[str, object], dict[str, object]]:
        """The widget, and beside it the question, for where widgets do not run."""
        bundle, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        title = "Predict" if self.stage == "predict" else "Explain"
        still = {
            "text/html": f"<p><b>{title}.</b> {escape(self.question)}</p>",
            "text/plain": f"{title}: {self.question}",
        }
        return {**bundle, **still}, metadata


def _kept_of(name: str) -> tuple[dict[str, str], str]:
    """What is kept under `name`, and what went wrong ("": nothing)."""
    try:
        return record.read().boxes.get(name, {}), ""
    except LearnerError as error:
        return {}, f"Not kept: {error}"
