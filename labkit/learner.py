"""The boxes of the notebooks: a question, and its answer after the reader has committed.

    from labkit.learner import predict

    predict("Which words change?", choices=["all five", "only river"], answer="only river", why="The mask is causal.")
    predict("What share of the tags is right?", answer="90 %.", why="Most words are outside of every name.")

A box is HTML with a small script, not a Jupyter widget: where an output holds both, JupyterLab shows the widget, which
is an error message once its kernel has gone. Where no script runs (GitHub, a notebook that is not trusted), the box
shows the question, the choices and a folded answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from labkit.errors import DataError


@dataclass(frozen=True)
class Box:
    """A box that asks for a prediction before the result is shown; Jupyter displays it.

    `choices` become buttons that say at once whether they were right, and `answer` is the right one of them. Without
    choices the reader writes a text, and a button then shows the answer, if there is one. `why` is the explanation,
    shown with the answer. Raises DataError if the answer is not one of the choices.
    """

    question: str
    choices: Sequence[str] | None = None
    answer: str | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        if self.choices is not None and self.answer not in self.choices:
            raise DataError(f"{self.question!r}: the answer {self.answer!r} is not one of {list(self.choices)}")

    def __repr__(self) -> str:
        return "\n".join([f"Predict: {self.question}", *(f"  - {choice}" for choice in self.choices or ())])

    def _repr_html_(self) -> str:
        choices = "".join(f"<li>{escape(choice)}</li>" for choice in self.choices or ())
        answer = "".join(f"<p>{escape(text)}</p>" for text in (self.answer, self.why) if text)
        return (
            # The attribute keeps JupyterLab from taking the keys that are pressed in the box for its own shortcuts.
            '<div class="labkit-box" data-lm-suppress-shortcuts="true">'
            f'<p class="labkit-question"><b>Predict.</b> {escape(self.question)}</p>'
            + (f"<ul>{choices}</ul>" if choices else "")
            + (f"<details><summary>Answer</summary>{answer}</details>" if answer else "")
            + f"</div>\n{files('labkit').joinpath('learner_box.html').read_text(encoding='utf-8')}"
        )


predict = Box
