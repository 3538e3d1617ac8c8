"""Text fields and a button: the reader's own text, and the figure that a function makes of it."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import ipywidgets

from labkit.errors import LabkitError

WIDE = ipywidgets.Layout(width="620px")


class Ask(ipywidgets.VBox):
    """Fields to type in, with their first texts, and a button; `answer(**texts)` gives the HTML that is shown below.

    Where widgets cannot run, the first answer is shown.
    """

    def __init__(self, answer: Callable[..., str], **fields: str):
        self.answer, self.button = answer, ipywidgets.Button(description="Answer")
        self.fields = {name: ipywidgets.Text(text, description=name, layout=WIDE) for name, text in fields.items()}
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
