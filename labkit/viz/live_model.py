"""A model that answers while its mask is painted: one worker thread, and only the latest question counts.

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
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.attention.maps import attention_maps
from labkit.auditing.measure import composed, mask_verdict
from labkit.auditing.probe import AttentionCall, attention_influence, attention_influence_by_row, recorded_calls
from labkit.auditing.report import layer_list
from labkit.decoder.anatomy import find_decoder
from labkit.decoder.hooks import masked
from labkit.decoder.limits import require_positions
from labkit.decoder.running import Runner, evaluating, without_mlps
from labkit.errors import DataError, LabkitError, MaskError
from labkit.masks import Mask, recognise, self_for_empty_rows
from labkit.objectives import logits_at
from labkit.viz.labels import quoted
from labkit.viz.mask_state import MOST_TOKENS, checked_tokens

BEST = 5  # predictions that are shown
MOST_MAPPED = 256  # tokens up to which attention maps travel with the widget: two maps of 64 KB
MOST_PERTURBED = 24  # columns that are measured of a longer sentence
COLUMNS_AT_ONCE = 8  # perturbed before the next check whether the question still counts
KEPT = 6  # results kept, so that another head, or the mask of a moment ago, costs nothing


@dataclass(frozen=True)
class Question:
    """Which token comes after the one at `place` ("next"), or which one is hidden there ("fill-in")?"""

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
        if reads not in ("before", "same"):
            raise MaskError(f"reads is {reads!r}; give 'same' (MLM) or 'before' (MNTP and next-token models)")
        self.lm = SimpleNamespace(model=sharing_weights(lm.model), tokenizer=lm.tokenizer, name=lm.name)
        self.decoder = find_decoder(self.lm.model)
        self.layers, self.heads = len(self.decoder.layers), int(self.decoder.config.num_attention_heads)
        self._reads, self._tell = reads, tell
        self._lock = threading.Lock()
        self._waiting: Question | None = None
        self._cancelled = False
        self._worker: threading.Thread | None = None
        for layer in self.decoder.layers:
            layer.register_forward_pre_hook(lambda *_: self._require_latest())
        keep = lru_cache(KEPT)
        self._next, self._maps, self._verdict = keep(self._probabilities), keep(self._attention), keep(self._measured)

    def tokens(self, sentence: str) -> tuple[list[int], list[str]]:
        """The ids of a sentence and each as text, special tokens that the tokenizer adds included.

        Raises:
            MaskError: no token, or more than the playground can show or the model has positions for.
        """
        ids = self.lm.tokenizer(sentence, verbose=False)["input_ids"] if sentence.strip() else []
        if len(ids) <= MOST_TOKENS:  # more are refused below, whatever the model
            require_positions(len(ids), self.decoder.config, refusal=MaskError, cure="give a shorter text")
        return list(ids), checked_tokens([self.lm.tokenizer.decode([i]) for i in ids])

    def require(self, q: Question) -> None:
        """Raises MaskError unless the question can be asked of this model."""
        if q.kind not in ("next", "fill-in"):
            raise MaskError(f"question is {q.kind!r}; give 'next' or 'fill-in'")
        chosen = {"layer": (q.layer, self.layers), "head": (q.head, self.heads), "token": (q.place, len(q.ids))}
        for name, (value, count) in chosen.items():
            if not 0 <= value < count:
                raise MaskError(f"there is no {name} {value}: {self.lm.name} has {name}s 0 to {count - 1} here")

    # ------------------------------------------------------------------------------------------------- the worker
    def ask(self, question: Question) -> None:
        """Answer this one instead of any that is waiting or being answered; returns at once."""
        with self._lock:
            self._waiting = question
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="labkit-live-model", daemon=True)
                self._worker.start()

    def cancel(self) -> None:
        """Drop the question that is waiting, and stop the one that is being answered before its next layer."""
        with self._lock:
            self._waiting, self._cancelled = None, True

    def wait(self, seconds: float | None = None) -> bool:
        """Block until no question is waiting or being answered; False if that takes longer."""
        worker = self._worker
        if worker is None or worker is threading.current_thread():
            return True
        worker.join(seconds)
        return not worker.is_alive()

    def close(self) -> None:
        """Stop the worker; the question that is being answered is dropped."""
        self.cancel()
        self.wait(10)

    def _work(self) -> None:
        while True:
            with self._lock:
                question, self._waiting, self._cancelled = self._waiting, None, False
                if question is None:
                    self._worker = None  # the next question starts another: a waiting thread would keep the model alive
                    return
            try:
                self.answer(question)
            except Superseded:
                continue

    def _require_latest(self) -> None:
        if self._waiting is not None or self._cancelled:
            raise Superseded

    # ------------------------------------------------------------------------------------------------ one question
    def answer(self, question: Question) -> None:
        """Answer in the calling thread: tells "answer", "attention" and "verdict", or an "answer" with its "error"."""
        try:
            self._answer(question)
        except Superseded:
            raise
        except Exception as error:  # whatever a model raises must reach the page as a sentence, not freeze it
            text = str(error).strip()
            if not isinstance(error, LabkitError):
                text = f"The model could not answer ({type(error).__name__}): {text.split(chr(10))[0] or 'no message'}"
            text = text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
            self._tell("answer", {"number": question.number, "error": text})

    def _answer(self, q: Question) -> None:
        began = time.perf_counter()
        tokens = [self.lm.tokenizer.decode([i]) for i in q.ids]
        ids, at, right, description = self._input(q, tokens)
        answer = {
            "number": q.number,
            "question": q.kind,
            "how": description,
            "truth": None if right is None else self.lm.tokenizer.decode([right]),
            "before": self._best(self._next(ids, at, None), right),
            "after": self._best(self._next(ids, at, q.mask), right),
            "leak": self._leak(q, tokens) if q.kind == "next" else None,
        }
        self._tell("answer", answer | {"seconds": round(time.perf_counter() - began, 3)})
        if len(ids) > MOST_MAPPED:
            note = f"Attention is drawn for up to {MOST_MAPPED} tokens; this sentence has {len(ids)}."
            self._tell("attention", {"number": q.number, "note": note})
        else:
            attention = {"number": q.number, "n": len(ids), "layer": q.layer, "head": q.head}
            attention["tokens"] = [self.lm.tokenizer.decode([i]) for i in ids]
            for name, mask in (("before", None), ("after", q.mask)):  # bytes, 255 = all attention of a row
                weights = self._maps(ids, mask)[q.layer, q.head].astype(np.float32)
                shades = np.round(weights * 255).astype(np.uint8)
                attention[name] = base64.b64encode(shades.tobytes()).decode("ascii")
            self._tell("attention", attention)
        self._tell("verdict", {"number": q.number} | self._verdict(ids, q.mask))

    def _input(self, q: Question, tokens: list[str]) -> tuple[tuple[int, ...], int, int | None, str]:
        """(the ids that the model reads, the position whose logits answer, the right id, all this in words)."""
        self.require(q)
        here = quoted(tokens[q.place])
        if q.kind == "next":
            right = q.ids[q.place + 1] if q.place + 1 < len(q.ids) else None
            return q.ids, q.place, right, f"Which token comes after {here}? Read at {here}."
        at = q.place - int(self._reads == "before")
        if at < 0:
            raise DataError(
                "the first token cannot be hidden: this model predicts a hidden token at the position before it, and "
                "there is none"
            )
        mask_id = hiding_token(self.lm)
        ids = (*q.ids[: q.place], mask_id, *q.ids[q.place + 1 :])
        name = self.lm.tokenizer.convert_ids_to_tokens(mask_id)
        where = "at its place" if at == q.place else f"at {quoted(tokens[at])}, the position before it"
        return ids, at, q.ids[q.place], f"{here} is replaced by {name}; the answer is read {where}."

    @torch.no_grad()
    def _probabilities(self, ids: tuple[int, ...], at: int, mask: Mask | None) -> Tensor:
        """What the model predicts at position `at`, (vocabulary,)."""
        model = self.lm.model
        row = torch.tensor([ids], device=model.device)
        chosen = torch.zeros(row.shape, dtype=torch.bool, device=model.device)
        chosen[0, at] = True
        with evaluating(model), nullcontext() if mask is None else masked(model, mask):
            return logits_at(model, row, None, chosen)[0].float().softmax(-1).cpu()

    def _best(self, p: Tensor, right: int | None) -> dict[str, Any]:
        """The likeliest tokens, and the rank of the right one among all: {"top": [[token, p]], "rank", "p"}."""
        best = p.topk(min(BEST, len(p)))
        likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top = [[self.lm.tokenizer.decode([i]), value] for i, value in likeliest]
        if right is None:
            return {"top": top, "rank": None, "p": None}
        return {"top": top, "rank": int((p > p[right]).sum()) + 1, "p": float(p[right])}

    def _leak(self, q: Question, tokens: list[str]) -> str | None:
        """A warning if, under the mask, information about the next token reaches the position that predicts it."""
        n, here = len(q.ids), q.place
        if here + 1 >= n:
            return None
        cells = self_for_empty_rows(q.mask.dense(n).reshape(n, n))
        if not bool(composed([cells] * self.layers, n)[here, here + 1]):
            return None
        way = "" if bool(cells[here, here + 1]) else ", through other tokens and several layers"
        return (
            f"Leak: under this mask {quoted(tokens[here])} sees {quoted(tokens[here + 1])}{way}, and just that token "
            "is asked for. The answer after says nothing about how well the model predicts."
        )

    def _attention(self, ids: tuple[int, ...], mask: Mask | None) -> np.ndarray:
        """float16 (layers, heads, n, n) of all layers, so that another layer or head needs no further run."""
        return attention_maps(self.lm, list(ids), mask).weights

    def _measured(self, ids: tuple[int, ...], mask: Mask) -> dict[str, Any]:
        """What `labkit.audit` does, on this sentence and under this mask: {"text", "agrees"}."""
        n = len(ids)
        columns = list(range(n)) if n <= MOST_PERTURBED else [round(i) for i in np.linspace(0, n - 1, MOST_PERTURBED)]
        declared = self_for_empty_rows(mask.dense(n).reshape(n, n))
        others = ~torch.eye(n, dtype=torch.bool)[:, columns]  # a token influences itself whatever the mask is

        def wrong(cells: Tensor) -> int:
            return int(((cells != declared[:, columns]) & others).sum())

        # One row of the batch for each key that is changed, so that a layer is replayed once.
        calls = self._calls(mask, torch.tensor([ids] * len(columns)))
        counts = [wrong(attention_influence_by_row(call, columns).T) for call in calls]
        if any(counts):  # a single perturbation can miss a weak connection
            counts = [wrong(self._influence(call, columns)) for call in self._calls(mask, torch.tensor([ids]))]
        pairs = int(others.sum())
        sample = "" if len(columns) == n else f", those of {len(columns)} keys spread over the sentence"
        if any(counts):
            where = layer_list([i for i, count in enumerate(counts) if count])
            counted = f"up to {max(counts)} of {pairs} pairs of tokens{sample}"
            return {"text": f"Measured: not what the mask says in {where} ({counted}).", "agrees": False}
        verdict, named = mask_verdict(declared), recognise(declared)
        name = "" if named is None or named.identity == (verdict,) else f", {named}"
        text = f"Measured: all {len(counts)} layers look where the mask says, and nowhere else ({pairs} pairs{sample})."
        return {"text": f"{text} The audit's verdict: {verdict}{name}.", "agrees": True}

    def _calls(self, mask: Mask, rows: Tensor) -> list[AttentionCall]:
        """What every attention module is called with, for rows of ids, under the mask."""
        model = self.lm.model
        with evaluating(model), without_mlps(self.decoder), masked(model, mask):
            with recorded_calls(self.decoder.attentions) as calls:
                Runner(model, self.decoder).run(rows)
        return calls

    def _influence(self, call: AttentionCall, columns: Sequence[int]) -> Tensor:
        """bool (n, columns), in parts, between which a later question can supersede this one."""
        parts = []
        for first in range(0, len(columns), COLUMNS_AT_ONCE):
            self._require_latest()
            parts.append(attention_influence(call, columns[first : first + COLUMNS_AT_ONCE])[0])
        return torch.cat(parts, dim=-1)


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of the model's modules, hooks and configuration that holds the very same weights and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def hiding_token(lm: Any) -> int:
    """The id that hides a token: the tokenizer's mask token, or the placeholder that Gemma keeps for such a use.

    Raises:
        DataError: there is neither; the message says how to get one.
    """
    token = lm.tokenizer.mask_token_id
    token = lm.tokenizer.get_vocab().get("<unused0>") if token is None else token
    if token is None or token >= lm.model.get_input_embeddings().num_embeddings:
        raise DataError(
            f"{lm.name} has no mask token to hide a word with: call labkit.tasks.lm.ensure_mask_token(lm.model, "
            "lm.tokenizer) and attach it again, or ask for the next token"
        )
    return token
