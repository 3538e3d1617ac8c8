"""A model that answers while somebody paints its mask: one worker thread, and only the latest question counts.

The model that was handed in is never touched. The worker has a copy of its modules that shares all weights with it, so
masks, hooks and attention backends are set on the copy alone, and the original may be used at the same time.
"""

from __future__ import annotations

import base64
import copy
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.attention.maps import attention_maps
from labkit.auditing.measure import composed, layer_list, mask_verdict
from labkit.auditing.probe import AttentionCall, attention_influence, attention_influence_by_row, recorded_calls
from labkit.decoder.anatomy import find_decoder
from labkit.decoder.hooks import masked
from labkit.decoder.limits import require_positions
from labkit.decoder.running import Runner, evaluating, without_mlps
from labkit.errors import DataError, LabkitError, MaskError
from labkit.masks import Mask, recognise, self_for_empty_rows
from labkit.objectives import logits_at
from labkit.viz.labels import quoted
from labkit.viz.mask_state import MOST_TOKENS, checked_tokens

QUESTIONS = ("next", "fill-in")
READS = ("before", "same")
BEST = 5
MOST_MAPPED = 256  # tokens up to which attention maps travel with the widget: two maps of 64 KB
MOST_PERTURBED = 24  # columns that are measured of a longer sentence
COLUMNS_AT_ONCE = 8  # between two looks at whether the question still counts
IDLE = 30  # seconds without a question, after which the worker ends
KEPT = 6  # answers kept, so that another head, or the mask of a moment ago, costs nothing


@dataclass(frozen=True)
class Question:
    """What is asked: `number` says which question it is, `place` which token is hidden, or after which one is asked."""

    number: int
    ids: tuple[int, ...]
    mask: Mask
    kind: str = "next"
    place: int = 0
    layer: int = 0
    head: int = 0


class Superseded(Exception):
    """The question that is being answered no longer counts. Never leaves this module."""


class LiveModel:
    """Answers questions about one model, each under its own mask and under the one that is asked about.

    Args:
        lm: what `labkit.load` gives, with a tokenizer.
        tell: called in the worker thread as `tell(name, value)` with "answer", then "attention", then "verdict", each
            value plain JSON with the number of its question.
        reads: where a hidden token is read: "before" (MNTP, and a model that only knows the next token), "same" (MLM).

    Raises:
        MaskError: no tokenizer. ModelError: no decoder that labkit knows.
    """

    def __init__(self, lm: Any, tell: Callable[[str, dict], None], reads: str = "before") -> None:
        if getattr(lm, "tokenizer", None) is None:
            raise MaskError("the playground needs a tokenizer: attach what labkit.load gives, such as a Loaded")
        if reads not in READS:
            raise MaskError(f"reads is {reads!r}; give 'same' (MLM) or 'before' (MNTP and next-token models)")
        self.lm = SimpleNamespace(model=sharing_weights(lm.model), tokenizer=lm.tokenizer, name=lm.name)
        self.decoder = find_decoder(self.lm.model)
        self.layers, self.heads = len(self.decoder.layers), int(self.decoder.config.num_attention_heads)
        self.reads, self._tell = reads, tell
        self._kept: dict[tuple, Any] = {}
        self._changed = threading.Condition()
        self._waiting: Question | None = None
        self._answering: Question | None = None
        self._stopped = self._closed = False
        self._thread: threading.Thread | None = None
        for layer in self.decoder.layers:
            layer.register_forward_pre_hook(lambda *_: self._still_counts())

    def tokens(self, sentence: str) -> tuple[list[int], list[str]]:
        """The ids of a sentence and each as text, special tokens that the tokenizer adds included.

        Raises:
            MaskError: no token, or more than the playground can show or the model has positions for.
        """
        ids = self.lm.tokenizer(sentence, verbose=False)["input_ids"] if sentence.strip() else []
        if len(ids) <= MOST_TOKENS:  # more are refused below, whatever the model
            require_positions(len(ids), self.decoder.config, refusal=MaskError, cure="give a shorter text")
        return list(ids), checked_tokens([self.lm.tokenizer.decode([i]) for i in ids])

    # ------------------------------------------------------------------------------------------------- the worker
    def ask(self, question: Question) -> None:
        """Answer this one, in place of any that is waiting or being answered; returns at once."""
        with self._changed:
            self._waiting, self._stopped = question, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="labkit-live-model", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self) -> None:
        """Drop what is waiting, and stop what is being answered before its next layer."""
        with self._changed:
            self._waiting, self._stopped = None, True
            self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until nothing is waiting or being answered; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._answering is None, seconds)

    def close(self) -> None:
        """Stop the worker; what is being answered is dropped."""
        with self._changed:
            self._closed, self._waiting, self._stopped = True, None, True
            self._changed.notify_all()
        worker = self._thread
        if worker is not None and worker is not threading.current_thread():
            worker.join(timeout=10)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._answering = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None or self._closed, IDLE)
                if self._waiting is None:
                    self._thread = None  # the next question starts another; a thread would keep the model alive
                    return
                question, self._waiting = self._waiting, None
                self._answering, self._stopped = question, False
            try:
                self.answer(question)
            except Superseded:
                continue

    def _still_counts(self) -> None:
        if self._waiting is not None or self._stopped:
            raise Superseded

    # ------------------------------------------------------------------------------------------------ one question
    def answer(self, question: Question) -> None:
        """Answer in the calling thread: tells "answer", "attention" and "verdict", or an "answer" with its "error"."""
        try:
            self._answer(question)
        except Superseded:
            raise
        except LabkitError as error:
            self._tell("answer", {"number": question.number, "error": _sentence(str(error))})
        except Exception as error:  # whatever a model raises must reach the page as a sentence, not freeze it
            first = (str(error).strip().splitlines() or ["no message"])[0]
            text = f"The model could not answer ({type(error).__name__}): {first}"
            self._tell("answer", {"number": question.number, "error": _sentence(text)})

    def _answer(self, q: Question) -> None:
        began = time.perf_counter()
        tokens = [self.lm.tokenizer.decode([i]) for i in q.ids]
        ids, at, right, how = self._posed(q, tokens)
        before, after = (self._best(ids, at, right, mask) for mask in (None, q.mask))
        answer = {
            "number": q.number,
            "question": q.kind,
            "how": how,
            "truth": None if right is None else self.lm.tokenizer.decode([right]),
            "before": before,
            "after": after,
            "leak": self._leak(q, tokens, at),
        }
        self._tell("answer", answer | {"seconds": round(time.perf_counter() - began, 3)})
        maps = [self._maps(ids, mask) for mask in (None, q.mask)] if len(ids) <= MOST_MAPPED else None
        self._tell("attention", self._attention(q, tokens, ids, maps))
        measured = self._keep(("verdict", ids, q.mask), lambda: self._measured(q, ids))
        self._tell("verdict", {"number": q.number} | measured)

    def _posed(self, q: Question, tokens: list[str]) -> tuple[tuple[int, ...], int, int | None, str]:
        """(the ids as the model reads them, the position whose logits answer, the right id, all this in words)."""
        if q.kind not in QUESTIONS:
            raise DataError(f"the question is {q.kind!r}; give 'next' or 'fill-in'")
        if not 0 <= q.place < len(q.ids):
            raise DataError(f"there is no token {q.place}: the sentence has tokens 0 to {len(q.ids) - 1}")
        if not 0 <= q.layer < self.layers or not 0 <= q.head < self.heads:
            raise MaskError(
                f"there is no layer {q.layer} with a head {q.head}: the model has {self.layers} layers "
                f"of {self.heads} heads"
            )
        here = quoted(tokens[q.place])
        if q.kind == "next":
            right = q.ids[q.place + 1] if q.place + 1 < len(q.ids) else None
            return q.ids, q.place, right, f"Which token comes after {here}? Read at {here}."
        at = q.place - int(self.reads == "before")
        if at < 0:
            raise DataError(
                "the first token cannot be hidden: this model says a hidden token at the position before it, and there "
                "is none"
            )
        mask_id = hiding_token(self.lm)
        ids = (*q.ids[: q.place], mask_id, *q.ids[q.place + 1 :])
        name = self.lm.tokenizer.convert_ids_to_tokens(mask_id)
        where = "at its place" if at == q.place else f"at {quoted(tokens[at])}, the position before it"
        return ids, at, q.ids[q.place], f"{here} is replaced by {name}; the answer is read {where}."

    def _best(self, ids: tuple[int, ...], at: int, right: int | None, mask: Mask | None) -> dict[str, Any]:
        """The likeliest tokens, and where the right one stands among all: {"top": [[token, p]], "rank", "p"}."""
        p = self._keep(("next", ids, at, mask), lambda: self._probabilities(ids, at, mask))
        best = p.topk(min(BEST, len(p)))
        likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top = [[self.lm.tokenizer.decode([i]), value] for i, value in likeliest]
        if right is None:
            return {"top": top, "rank": None, "p": None}
        return {"top": top, "rank": int((p > p[right]).sum()) + 1, "p": float(p[right])}

    @torch.no_grad()
    def _probabilities(self, ids: tuple[int, ...], at: int, mask: Mask | None) -> Tensor:
        model = self.lm.model
        row = torch.tensor([ids], device=model.device)
        chosen = torch.zeros(row.shape, dtype=torch.bool, device=model.device)
        chosen[0, at] = True
        with evaluating(model), _under(model, mask):
            return logits_at(model, row, None, chosen)[0].float().softmax(-1).cpu()

    def _maps(self, ids: tuple[int, ...], mask: Mask | None) -> np.ndarray:
        """float16 (layers, heads, n, n), of all layers: another layer or head is then a look, not a run."""
        return self._keep(("maps", ids, mask), lambda: attention_maps(self.lm, list(ids), mask).weights)

    def _attention(self, q: Question, tokens: list[str], ids: tuple[int, ...], maps) -> dict[str, Any]:
        """The two maps of the chosen head as bytes, 255 = all attention of a row."""
        if maps is None:
            note = f"Attention is drawn for up to {MOST_MAPPED} tokens; this sentence has {len(ids)}."
            return {"number": q.number, "note": note}
        chosen = (weights[q.layer, q.head].astype(np.float32) for weights in maps)
        before, after = (np.round(weights * 255).astype(np.uint8) for weights in chosen)
        if q.kind == "fill-in":
            tokens = [*tokens[: q.place], self.lm.tokenizer.decode([ids[q.place]]), *tokens[q.place + 1 :]]
        return {
            "number": q.number,
            "n": len(ids),
            "tokens": tokens,
            "layer": q.layer,
            "head": q.head,
            "before": base64.b64encode(before.tobytes()).decode("ascii"),
            "after": base64.b64encode(after.tobytes()).decode("ascii"),
        }

    def _leak(self, q: Question, tokens: list[str], at: int) -> str | None:
        """Whether, under the mask, the position that answers has seen the token it is to name."""
        n = len(q.ids)
        if q.kind != "next" or at + 1 >= n:
            return None
        cells = self_for_empty_rows(q.mask.dense(n).reshape(n, n))
        if not bool(composed([cells] * self.layers, n)[at, at + 1]):
            return None
        way = "" if bool(cells[at, at + 1]) else ", through other tokens and several layers"
        return (
            f"Leak: under this mask {quoted(tokens[at])} sees {quoted(tokens[at + 1])}{way}, and just that token is "
            "asked for. The answer after says nothing about how well the model predicts."
        )

    def _measured(self, q: Question, ids: tuple[int, ...]) -> dict[str, Any]:
        """What `labkit.audit` does, on this sentence and under this mask: {"text", "agrees"}."""
        n = len(ids)
        columns = list(range(n)) if n <= MOST_PERTURBED else [round(i) for i in np.linspace(0, n - 1, MOST_PERTURBED)]
        said = self_for_empty_rows(q.mask.dense(n).reshape(n, n))
        other = ~torch.eye(n, dtype=torch.bool)[:, columns]  # a token's own cell cannot be told from outside
        # One row of the batch for each key that is changed, so that a layer is replayed once.
        layers = [
            attention_influence_by_row(call, columns).T
            for call in self._calls(q.mask, torch.tensor([ids] * len(columns)))
        ]
        if any(bool(((cells != said[:, columns]) & other).any()) for cells in layers):  # then with more perturbations
            layers = [self._influence(call, columns) for call in self._calls(q.mask, torch.tensor([ids]))]
        wrong = [int(((cells != said[:, columns]) & other).sum()) for cells in layers]
        pairs = int(other.sum())
        sample = "" if len(columns) == n else f", those of {len(columns)} keys spread over the sentence"
        if any(wrong):
            where = layer_list([i for i, count in enumerate(wrong) if count])
            counted = f"up to {max(wrong)} of {pairs} pairs of tokens{sample}"
            return {"text": f"Measured: not what the mask says in {where} ({counted}).", "agrees": False}
        text = f"Measured: all {len(layers)} layers look where the mask says, and nowhere else ({pairs} pairs{sample})."
        return {"text": f"{text} {_verdict(said)}", "agrees": True}

    def _calls(self, mask: Mask, rows: Tensor) -> list[AttentionCall]:
        """What every attention module is called with, for rows of ids, under the mask."""
        model = self.lm.model
        with evaluating(model), without_mlps(self.decoder), masked(model, mask):
            with recorded_calls(self.decoder.attentions) as calls:
                Runner(model, self.decoder).run(rows)
        return calls

    def _influence(self, call, columns: Sequence[int]) -> Tensor:
        """bool (n, columns), looking up between a few columns and the next."""
        parts = []
        for first in range(0, len(columns), COLUMNS_AT_ONCE):
            self._still_counts()
            parts.append(attention_influence(call, columns[first : first + COLUMNS_AT_ONCE])[0])
        return torch.cat(parts, dim=-1)

    def _keep(self, key: tuple, make: Callable[[], Any]) -> Any:
        """`make()`, or what it gave lately for the same key; of each kind the last few are kept."""
        if key not in self._kept:
            self._kept[key] = make()
            for old in [k for k in self._kept if k[0] == key[0]][:-KEPT]:
                del self._kept[old]
        return self._kept[key]


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of the model's modules, hooks and configuration that holds the very same weights and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def hiding_token(lm: Any) -> int:
    """The id that hides a token: the tokenizer's mask token, or the placeholder that Gemma keeps for such a use.

    Raises:
        DataError: there is neither; the message says how to get one.
    """
    known = lm.model.get_input_embeddings().num_embeddings
    found = lm.tokenizer.mask_token_id
    found = lm.tokenizer.get_vocab().get("<unused0>") if found is None else found
    if found is None or found >= known:
        raise DataError(
            f"{lm.name} has no mask token to hide a word with: call labkit.tasks.lm.ensure_mask_token(lm.model, "
            "lm.tokenizer) and attach it again, or ask for the next token"
        )
    return found


def _under(model: nn.Module, mask: Mask | None):
    return nullcontext() if mask is None else masked(model, mask)


def _verdict(cells: Tensor) -> str:
    """The audit's word for this mask, and its name where it has one."""
    word, named = mask_verdict(cells), recognise(cells)
    name = "" if named is None or named.identity == (word,) else f", {named}"
    return f"The audit's verdict: {word}{name}."


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
