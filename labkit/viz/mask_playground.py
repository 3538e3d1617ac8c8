"""The mask playground: compose a mask, paint it, see which tokens attend to which, and how a model predicts under it.

    p = labkit.viz.playground("the cat sat on the mat")     # in a notebook: the last line of a cell shows it
    p.mask                                                  # the mask that is shown, composed and painted
    p.mask = masks.prefix(2) & ~masks.padding([6])          # ... and the other way round
    p.attach(labkit.load("gpt2-mini"))                      # the mask is really applied, and the model answers

All cells are computed in the browser (playground.js and its parts), so sliders and paint need no kernel; `to_html`
gives one page that stays interactive without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from labkit import masks
from labkit.errors import LabkitError, MaskError
from labkit.viz.heat import mask_figure
from labkit.viz.live_model import LiveModel, Question
from labkit.viz.mask_state import checked_tokens, dense_of, fitted, mask_of, moved, painted_cells, split_words, tree_of
from labkit.viz.page import joined, page, with_figure

SENTENCE = "the cat sat on the mat"
ASKS = ("expression", "painted", "question", "place", "layer", "head")  # what a model's answer depends on


def playground(tokens: str | Sequence[str] = SENTENCE, mask: masks.Mask | None = None) -> Playground:
    """A widget to compose and paint the attention mask of a sentence, or of a list of tokens; `mask` is shown first.

    Raises:
        MaskError: no token or more than 512, or a mask that is not for one sentence of this length.
    """
    return Playground(tokens, mask)


class Playground(anywidget.AnyWidget):
    """What `playground` returns.

    Attributes:
        mask: the Mask that is shown; can be set. The expression that was composed, or `from_dense` where painted cells
            change it.
        sentence, tokens: what the mask is of; can be set. A sentence is split into words and signs, or by the
            tokenizer of the model that is attached.
        focus: the row whose attended tokens are marked, -1 for none.
        question ("next" or "fill-in"), place, layer, head: what an attached model is asked, and which head is drawn.
    """

    _esm = joined(
        "playground_rules.js", "playground_grid.js", "playground_controls.js", "playground_panel.js", "playground.js"
    )
    _css = joined("playground.css")

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
    heard = traitlets.Int(0).tag(sync=True)  # the latest one that has reached Python
    cancelled = traitlets.Int(-1).tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)
    attention = traitlets.Dict().tag(sync=True)
    verdict = traitlets.Dict().tag(sync=True)

    def __init__(self, tokens: str | Sequence[str] = SENTENCE, mask: masks.Mask | None = None) -> None:
        self._live: LiveModel | None = None
        self._ids: tuple[int, ...] = ()
        self._from_page = False  # whether the values that change were sent by the page
        self._silent = False  # whether the model is not to be asked yet
        sentence = tokens if isinstance(tokens, str) else " ".join(str(token) for token in tokens)
        shown = checked_tokens(split_words(tokens) if isinstance(tokens, str) else list(tokens))
        expression = _tree_for(masks.causal() if mask is None else mask, len(shown))
        super().__init__(sentence=sentence, tokens=shown, expression=expression, place=len(shown) - 1)
        self.observe(self._on_sentence, "sentence")
        self.observe(self._on_tokens, "tokens")
        self.observe(self._on_change, list(ASKS))
        self.observe(self._on_cancel, "cancelled")

    # --------------------------------------------------------------------------------------------------- the mask
    @property
    def mask(self) -> masks.Mask:
        mask, cells = mask_of(self.expression), self.cells
        return mask if np.array_equal(cells, dense_of(mask, len(cells))) else masks.from_dense(cells)

    @mask.setter
    def mask(self, mask) -> None:
        expression = _tree_for(mask, len(self.tokens))
        with self.hold_sync():
            self.painted = {}
            self.expression = expression

    @property
    def cells(self) -> np.ndarray:
        """The cells that are shown, bool (n, n), True = may attend; painted ones included."""
        n = len(self.tokens)
        which, value = painted_cells(self.painted, n)
        return np.where(which, value, dense_of(mask_of(self.expression), n))

    @traitlets.validate("tokens", "expression")
    def _checked(self, proposal) -> list:
        try:
            if proposal.trait.name == "tokens":
                return checked_tokens(proposal.value)
            return tree_of(mask_of(proposal.value))
        except MaskError as error:
            if not self._from_page:
                raise
            raise traitlets.TraitError(str(error)) from error  # traitlets then undoes all that the page sent with it

    # ------------------------------------------------------------------------------------------------ the sentence
    def _on_sentence(self, change) -> None:
        if self._from_page and self._live is None:
            return  # the browser has split it already
        try:
            ids, tokens = self._live.tokens(change.new) if self._live else ([], checked_tokens(split_words(change.new)))
        except LabkitError as error:
            if not self._from_page:
                raise
            self.notice = str(error)
            return
        self._ids = tuple(ids)
        with self.hold_sync():
            self.notice = ""
            self.tokens = tokens

    def _on_tokens(self, change) -> None:
        """The mask follows the sentence. The browser does the same by itself, and then nothing is left to do here."""
        n, before = len(change.new), len(change.old)
        with self.hold_sync():
            if self._live is None and not self._from_page and list(change.new) != split_words(self.sentence):
                self.unobserve(self._on_sentence, "sentence")
                self.sentence = " ".join(change.new)
                self.observe(self._on_sentence, "sentence")
            if not (self._from_page and self._live is None):
                self.painted = moved(self.painted, n)
                self.expression = fitted(self.expression, n, before)
            self.focus = min(self.focus, n - 1)
            self.place = n - 1 if self.question == "next" else min(self.place, n - 1)
        self._on_change(None)

    # --------------------------------------------------------------------------------------------------- the model
    def attach(
        self,
        lm: Any,
        *,
        question: str = "next",
        reads: str = "before",
        place: int | None = None,
        layer: int | None = None,
        head: int = 0,
        wait: bool = True,
    ) -> Playground:
        """Let a model answer under the mask that is shown: its five likeliest tokens and one head's attention, before
        and after, and what was measured of the mask that is really in force. Returns the playground.

        The model itself is not changed: a copy that shares its weights is asked, as the model is now. After converting
        it, attach it again.

        Args:
            lm: what `labkit.load` gives.
            question: "next": which token comes after the one at `place`; "fill-in": which one is hidden there.
            reads: where a hidden token is read, see `labkit.tasks.lm.fill_in`.
            place: None for the last token.
            layer: whose attention is drawn; None for the middle one.
            wait: return when the first answer is there, so that a notebook that was executed shows it.

        Raises:
            MaskError: no tokenizer; a place, layer or head that does not exist; or a sentence that is too long.
            ModelError: no decoder that labkit knows.
        """
        live = LiveModel(lm, lambda name, value: setattr(self, name, value), reads)  # "answer", "attention", "verdict"
        ids, tokens = live.tokens(self.sentence)
        layer, place = live.layers // 2 if layer is None else layer, len(ids) - 1 if place is None else place
        live.require(Question(0, tuple(ids), masks.causal(), question, place, layer, head))
        self.detach()
        self._ids, self._live = tuple(ids), live
        self._silent = True
        with self.hold_sync():
            self.tokens = tokens
            self.question, self.place, self.layer, self.head = question, place, layer, head
            self.layers, self.heads, self.model_name = live.layers, live.heads, str(lm.name)
            self.answer, self.attention, self.verdict = {}, {}, {}
        self._silent = False
        self._on_change(None)
        if wait:
            self.wait()
        return self

    def detach(self) -> Playground:
        """Take the model away and let its worker end; the sentence is split into words again."""
        if self._live is not None:
            self._live.close()
            self._live, self._ids = None, ()
            with self.hold_sync():
                self.model_name = ""
                self.answer, self.attention, self.verdict = {}, {}, {}
                self.tokens = checked_tokens(split_words(self.sentence) or list(self.tokens))
        return self

    def close(self) -> None:
        """Let the model's worker end, and take the widget off every page."""
        if self._live is not None:
            self._live.close()
        super().close()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the model has answered the latest question; False if that took longer than `seconds`."""
        return self._live is None or self._live.wait(seconds)

    def set_state(self, sync_data: dict) -> None:
        """What the page has changed, at once; the model is then asked once."""
        self._from_page = True
        try:
            super().set_state(sync_data)
        finally:
            self._from_page = False
        self._ask()

    def _on_change(self, _change) -> None:
        if self._live is not None and not self._from_page and not self._silent:
            self.asked += 1
            self._ask()

    def _on_cancel(self, change) -> None:
        if self._live is not None and change.new == self.asked:
            self._live.cancel()

    def _ask(self) -> None:
        """Hand the latest question on, unless that was done before, or it was cancelled."""
        if self._live is None or self.asked in (self.heard, self.cancelled):
            return
        self.heard = self.asked
        self._live.ask(Question(self.asked, self._ids, self.mask, self.question, self.place, self.layer, self.head))

    # ------------------------------------------------------------------------------------------------ without Python
    def to_html(self, path: str | Path | None = None, title: str = "Mask playground") -> str:
        """One page that needs no kernel and no network. The mask stays interactive; an attached model shows its last
        answers. If a `path` is given, the page is also written there."""
        return page(self, title, path=path)

    def _repr_mimebundle_(self, **options) -> tuple[dict[str, object], dict[str, object]]:
        figure = mask_figure(self.cells, self.tokens, repr(self.mask))
        return with_figure(super()._repr_mimebundle_(**options), figure)


def _tree_for(mask, n: int) -> list:
    """The tree of a mask that can be shown on `n` tokens; MaskError if it is not defined there."""
    tree = tree_of(mask)
    dense_of(mask, n)
    return tree
