"""The mask playground: compose a mask, paint it, follow which tokens attend to which, and what a model predicts.

    p = labkit.viz.playground("the cat sat on the mat")     # in a notebook: the last line of a cell shows it
    p.mask                                                  # the mask that is shown, composed and painted
    p.mask = masks.prefix(2) & ~masks.padding([6])          # ... and the other way round
    p.attach(labkit.load("gpt2-mini"))                      # the mask is really applied, and the model answers

All cells are computed in the browser (playground.js and its parts), so sliders and paint need no kernel; `to_html`
gives one page that stays interactive without any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from labkit import masks
from labkit.errors import LabkitError, MaskError
from labkit.viz.heat import mask_figure
from labkit.viz.live_model import LiveModel
from labkit.viz.mask_state import checked_tokens, dense_of, fitted, mask_of, painted_cells, split_words, tree_of
from labkit.viz.page import joined, page, with_figure

SENTENCE = "the cat sat on the mat"


class Superseded(Exception):
    """The question that is being answered no longer counts. Never leaves this module."""


class Playground(anywidget.AnyWidget):
    """A widget to compose and paint the attention mask of a sentence, or of a list of tokens; `mask` is shown first.

    Raises MaskError: no token or more than 512, or a mask that is not for one sentence of this length.

    Attributes:
        mask: the Mask that is shown; can be set. The expression that was composed, or `from_dense` where painted cells
            change it.
        sentence: can be set; it is split into words and signs, or by the tokenizer of the model that is attached.
        tokens: what the mask is of.
        focus: the row whose attended tokens are marked, -1 for none.
        question ("next" or "fill-in"), place, layer, head: what an attached model is asked, and which head is drawn.
    """

    _parts = (f"playground_{part}.js" for part in ("rules", "grid", "controls", "panel"))
    _esm = joined("widget.js", *_parts, "playground.js")
    _css = joined("widget.css", "playground.css")

    sentence = traitlets.Unicode().tag(sync=True)
    tokens = traitlets.List(traitlets.Unicode()).tag(sync=True)
    expression = traitlets.List().tag(sync=True)  # see mask_state
    painted = traitlets.Dict().tag(sync=True)
    focus = traitlets.Int(-1).tag(sync=True)
    notice = traitlets.Unicode().tag(sync=True)  # why a sentence that was typed is not shown
    live = traitlets.Bool(True).tag(sync=True)  # False in a page that has no Python behind it

    model_name = traitlets.Unicode().tag(sync=True)
    layers = traitlets.Int(0).tag(sync=True)
    heads = traitlets.Int(0).tag(sync=True)
    question = traitlets.Enum(["next", "fill-in"], "next").tag(sync=True)
    place = traitlets.Int(0).tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)
    head = traitlets.Int(0).tag(sync=True)
    asked = traitlets.Int(0).tag(sync=True)  # number of the latest question, counted up by whoever asks
    received = traitlets.Int(0).tag(sync=True)  # the latest one that has reached Python
    cancelled = traitlets.Int(-1).tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)
    attention = traitlets.Dict().tag(sync=True)
    verdict = traitlets.Dict().tag(sync=True)

    def __init__(self, tokens: str | Sequence[str] = SENTENCE, mask: masks.Mask | None = None) -> None:
        self._live: LiveModel | None = None
        self._worker = ThreadPoolExecutor(1, "labkit-playground")
        self._waiting: list[Future] = []  # the latest question, once there is one
        self._answering = 0  # number of the question that the worker answers
        self._ids: tuple[int, ...] = ()
        self._holding = False  # several values change: the model is asked once they all have
        sentence = tokens if isinstance(tokens, str) else " ".join(map(str, tokens))
        shown = checked_tokens(split_words(tokens) if isinstance(tokens, str) else list(tokens))
        super().__init__(sentence=sentence, tokens=shown, expression=["causal"], place=len(shown) - 1)
        if mask is not None:
            self.mask = mask
        self.observe(self._on_sentence, "sentence")
        self.observe(self._on_change, ["expression", "painted", "question", "place", "layer", "head"])

    @property
    def mask(self) -> masks.Mask:
        mask, cells = mask_of(self.expression), self.cells
        return mask if np.array_equal(cells, dense_of(mask, len(cells))) else masks.from_dense(cells)

    @mask.setter
    def mask(self, mask) -> None:
        tree = tree_of(mask)
        dense_of(mask, len(self.tokens))  # MaskError if it is not defined here
        with self._together():
            self.painted, self.expression = {}, tree

    @property
    def cells(self) -> np.ndarray:
        """The cells that are shown, bool (n, n), True = may attend; painted ones included."""
        n = len(self.tokens)
        which, value = painted_cells(self.painted, n)
        return np.where(which, value, dense_of(mask_of(self.expression), n))

    def attach(self, lm: Any, *, reads: str = "before") -> Playground:
        """Let a model answer under the mask that is shown: its five likeliest tokens and one head's attention, before
        and after, and what was measured of the mask that is really in force. Returns the playground once the first
        answer is there.

        The model itself is not changed: a copy that shares its weights is asked, as the model is now. After converting
        it, attach it again. What is asked can be set: `question`, `place`, `layer`, `head`.

        Args:
            lm: what `labkit.load` gives.
            reads: where a hidden token is read, see `labkit.tasks.lm.fill_in`.

        Raises:
            MaskError: no tokenizer, or a sentence that is too long. ModelError: no decoder that labkit knows.
        """
        live = LiveModel(lm, self._require_latest, reads)
        live.tokens(self.sentence)  # MaskError before anything changes
        self._live = live
        with self._together():
            self._split(self.sentence)
            self.question, self.layer, self.head = "next", live.layers // 2, 0
            self.place = len(self.tokens) - 1
            self.layers, self.heads, self.model_name = live.layers, live.heads, str(lm.name)
            self.answer, self.attention, self.verdict = {}, {}, {}
        self.wait()
        return self

    def close(self) -> None:
        """Let the model's worker end, and take the widget off every page."""
        self._answering = -1
        self._worker.shutdown(wait=False, cancel_futures=True)
        super().close()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the model has answered the latest question; False if that took longer than `seconds`."""
        return not wait(self._waiting, seconds).not_done

    def to_html(self, path: str | Path | None = None, title: str = "Mask playground") -> str:
        """One page that needs no kernel and no network. The mask stays interactive; an attached model shows its last
        answers. If a `path` is given, the page is also written there."""
        return page(self, title, path)

    # ---------------------------------------------------------------------------------------------------- changes
    def set_state(self, sync_data: dict) -> None:
        """What the page has changed, at once. It numbers its questions itself."""
        self._holding = True
        try:
            super().set_state(sync_data)
        except MaskError as error:
            self.notice = str(error)
        finally:
            self._holding = False
        self._ask()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Send the changes of the block to the page at once, and ask the model once."""
        before, self._holding = self._holding, True
        try:
            with self.hold_sync():
                yield
        finally:
            self._holding = before
        self._on_change()

    def _on_sentence(self, change) -> None:
        with self._together():
            self._split(change.new)

    def _split(self, sentence: str) -> None:
        """The mask follows the sentence; the browser may have done it already."""
        ids, tokens = self._live.tokens(sentence) if self._live else ((), checked_tokens(split_words(sentence)))
        self._ids, n, before = ids, len(tokens), len(self.tokens)
        self.notice = ""
        if tokens != self.tokens:
            self.tokens, self.expression = tokens, fitted(self.expression, n, before)
            self.focus = min(self.focus, n - 1)
            self.place = n - 1 if self.question == "next" else min(self.place, n - 1)

    def _on_change(self, _change=None) -> None:
        if self._live is not None and not self._holding:
            self.asked += 1
            self._ask()

    # -------------------------------------------------------------------------------------------------- questions
    def _ask(self) -> None:
        """Hand the latest question to the worker, unless that was done before, or it was cancelled."""
        if self._live is not None and self.asked not in (self.received, self.cancelled):
            self.received = self.asked
            question = (self._ids, self.mask, self.question, self.place, self.layer, self.head)
            self._waiting = [self._worker.submit(self._work, self.asked, question)]

    def _work(self, number: int, question: tuple) -> None:
        """In the worker: the values "answer", "attention" and "verdict", with the number of their question."""
        self._answering = number
        try:
            self._require_latest()
            for name, value in self._live.answers(*question):
                setattr(self, name, {"number": number} | value)
        except Superseded:
            return
        except Exception as error:  # whatever a model raises must reach the page as a sentence, not freeze it
            text = str(error).strip()
            if not isinstance(error, LabkitError):
                text = f"The model could not answer ({type(error).__name__}): {text.partition(chr(10))[0]}"
            self.answer = {"number": number, "error": f"{text[:1].upper()}{text[1:].rstrip('.')}."}

    def _require_latest(self) -> None:
        """Called before each layer: end the answer to a question that was cancelled, or asked before the latest."""
        if self._answering != self.asked or self._answering == self.cancelled:
            raise Superseded

    def _repr_mimebundle_(self, **options) -> tuple[dict[str, object], dict[str, object]]:
        figure = mask_figure(self.cells, self.tokens, repr(self.mask))
        return with_figure(super()._repr_mimebundle_(**options), figure)


playground = Playground
