"""What `labkit demo` shows: two tabs, the mask playground and the attention explorer, on one model."""

from __future__ import annotations

import os
from html import escape
from typing import Any

import ipywidgets

import labkit
from labkit import masks
from labkit.attention_maps import attention_maps
from labkit.demo import MODEL, VARIABLE
from labkit.errors import LabkitError
from labkit.viz.explorer import attention_explorer
from labkit.viz.mask_playground import playground

SENTENCE = "The old man sat by the river"


def app(model: str | None = None) -> ipywidgets.Tab:
    """The app on `model`, by default the one that `labkit demo` was given."""
    lm = labkit.load(model or os.environ.get(VARIABLE, MODEL))
    tabs = {"Mask playground": playground(SENTENCE).attach(lm, wait=False), "Attention explorer": SentenceExplorer(lm)}
    return ipywidgets.Tab(list(tabs.values()), titles=list(tabs))


class SentenceExplorer(ipywidgets.VBox):
    """The attention explorer below a field for its text: `.sentence`, and `.notice` for what is wrong with the text."""

    def __init__(self, lm: Any, sentence: str = SENTENCE) -> None:
        self.lm = lm
        wide = ipywidgets.Layout(width="100%", max_width="820px")
        self.sentence = ipywidgets.Text(sentence, description="Text", continuous_update=False, layout=wide)
        self.notice = ipywidgets.HTML()
        super().__init__([self.sentence, self.notice, self.explorer()])
        self.sentence.observe(self._look_again, "value")

    def explorer(self) -> ipywidgets.DOMWidget:
        """The explorer of the text in the field, under the causal mask and under none."""
        before, after = (
            attention_maps(self.lm, self.sentence.value, mask) for mask in (masks.causal(), masks.bidirectional())
        )
        return attention_explorer(before, after)

    def _look_again(self, _change) -> None:
        try:
            self.children = [self.sentence, self.notice, self.explorer()]
            self.notice.value = ""
        except LabkitError as error:
            self.notice.value = f'<p role="alert">{escape(str(error))}</p>'
