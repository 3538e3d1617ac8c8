"""A model that answers questions about a sentence, under its own mask and under the one that is painted.

The model that was handed in is never touched. The answers come from a copy of its modules that shares all weights with
it, so masks, hooks and attention backends are set on the copy alone, and the original may be used at the same time.
"""

from __future__ import annotations

import base64
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.attention.maps import attention_maps
from labkit.attention.plain import visible
from labkit.auditing.measure import composed, mask_verdict
from labkit.auditing.probe import AttentionCall, attention_influence, attention_influence_by_row, recorded_calls
from labkit.auditing.report import layer_list
from labkit.decoder.anatomy import find_decoder
from labkit.decoder.hooks import masked
from labkit.decoder.limits import require_positions
from labkit.decoder.running import Runner, evaluating, without_mlps
from labkit.errors import DataError, MaskError, require_one_of
from labkit.masks import Mask, self_for_empty_rows
from labkit.objectives import logits_at
from labkit.viz.mask_state import MOST_TOKENS, checked_tokens, dense_of

BEST = 5  # predictions that are shown
MOST_MAPPED = 256  # tokens up to which attention maps travel with the widget: two maps of 64 KB
MOST_PERTURBED = 24  # columns that are measured of a longer sentence
KEPT = 6  # results kept, so that another head, or the mask of a moment ago, costs nothing


class LiveModel:
    """Answers questions about one model.

    Args:
        lm: what `labkit.load` gives, with a tokenizer.
        before_layer: called before each layer computes; it may raise to end the answer.
        reads: where a hidden token is read: "before" (MNTP and next-token models) or "same" (MLM).
    """

    def __init__(self, lm: Any, before_layer: Callable[[], None], reads: str = "before") -> None:
        if lm.tokenizer is None:
            raise MaskError("the playground needs a tokenizer: attach a model that was loaded with one")
        require_one_of("reads", reads, ("before", "same"), MaskError)
        shared = {id(tensor): tensor for tensor in (*lm.model.parameters(), *lm.model.buffers())}
        self.lm = SimpleNamespace(model=copy.deepcopy(lm.model, shared), tokenizer=lm.tokenizer, name=lm.name)
        self.decoder = find_decoder(self.lm.model)
        self.layers, self.heads = len(self.decoder.layers), int(self.decoder.config.num_attention_heads)
        self._reads, self._before_layer = reads, before_layer
        for layer in self.decoder.layers:
            layer.register_forward_pre_hook(lambda *_: before_layer())
        self._next, self._verdict = lru_cache(KEPT)(self._probabilities), lru_cache(KEPT)(self._measured)
        self._maps = lru_cache(KEPT)(lambda ids, mask: attention_maps(self.lm, list(ids), mask).weights)

    def tokens(self, sentence: str) -> tuple[tuple[int, ...], list[str]]:
        """The ids of a sentence and each as text, special tokens that the tokenizer adds included."""
        ids = self.lm.tokenizer(sentence, verbose=False)["input_ids"] if sentence.strip() else []
        if len(ids) <= MOST_TOKENS:  # more are refused below, whatever the model
            require_positions(len(ids), self.decoder.config, refusal=MaskError, cure="give a shorter text")
        return tuple(ids), checked_tokens(self._texts(ids))

    def _texts(self, ids) -> list[str]:
        return [self.lm.tokenizer.decode([i]) for i in ids]

    def answers(
        self, ids: tuple[int, ...], mask: Mask, kind: str = "next", place: int = 0, layer: int = 0, head: int = 0
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """("answer", ...), then ("attention", ...) of one head, then ("verdict", ...) on the mask; plain JSON.

        `kind`: which token comes after the one at `place` ("next"), or which one is hidden there ("fill-in")?
        Raises LabkitError for a token, layer or head that does not exist, and where a hidden token cannot be asked for.
        """
        began, tokens = time.perf_counter(), self._texts(ids)
        choices = {"layer": (layer, self.layers), "head": (head, self.heads), "token": (place, len(ids))}
        for name, (value, count) in choices.items():
            if not 0 <= value < count:
                raise MaskError(f"there is no {name} {value}: {self.lm.name} has {name}s 0 to {count - 1} here")
        leak = self._leak(ids, mask, place, tokens) if kind == "next" else None
        ids, at, right, description = self._input(ids, kind, place, tokens)
        answer = {"question": kind, "how": description, "leak": leak}
        sides = {"before": None, "after": mask}  # the model's own mask, and the one that is asked about
        answer |= {side: self._best(self._next(ids, at, m), right) for side, m in sides.items()}
        answer |= {"truth": None if right is None else self._texts([right])[0]}
        yield "answer", answer | {"seconds": round(time.perf_counter() - began, 3)}
        attention = {"note": f"Attention is drawn for up to {MOST_MAPPED} tokens, not {len(ids)}."}
        if len(ids) <= MOST_MAPPED:
            attention = {"n": len(ids), "layer": layer, "head": head, "tokens": self._texts(ids)}
            for side, m in sides.items():  # bytes, 255 = all attention of a row
                shades = np.round(self._maps(ids, m)[layer, head].astype(np.float32) * 255).astype(np.uint8)
                attention[side] = base64.b64encode(shades.tobytes()).decode("ascii")
        yield "attention", attention
        yield "verdict", self._verdict(ids, mask)

    def _input(self, ids, kind: str, place: int, tokens: list[str]) -> tuple[tuple[int, ...], int, int | None, str]:
        """(the ids that the model reads, the position whose logits answer, the right id, all this in words)."""
        here = _quoted(tokens[place])
        if kind == "next":
            right = ids[place + 1] if place + 1 < len(ids) else None
            return ids, place, right, f"Which token comes after {here}? Read at {here}."
        at = place - int(self._reads == "before")
        if at < 0:
            raise DataError("the first token cannot be hidden: this model predicts it at the position before it")
        tokenizer = self.lm.tokenizer
        mask_id = tokenizer.mask_token_id
        if mask_id is None:  # Gemma's placeholder for such a use
            mask_id = tokenizer.get_vocab().get("<unused0>")
        if mask_id is None or mask_id >= self.lm.model.get_input_embeddings().num_embeddings:
            raise DataError(
                f"{self.lm.name} has no mask token: call labkit.tasks.lm.ensure_mask_token(lm.model, lm.tokenizer) and "
                "attach it again, or ask for the next token"
            )
        name = tokenizer.convert_ids_to_tokens(mask_id)
        description = f"{here} is replaced by {name}; the answer is read at position {at}, {_quoted(tokens[at])}."
        return (*ids[:place], mask_id, *ids[place + 1 :]), at, ids[place], description

    @torch.no_grad()
    def _probabilities(self, ids: tuple[int, ...], at: int, mask: Mask | None) -> Tensor:
        """What the model predicts at position `at`, (vocabulary,)."""
        model = self.lm.model
        row = torch.tensor([ids], device=model.device)
        chosen = torch.arange(len(ids), device=model.device)[None] == at  # (1, seq)
        with evaluating(model), nullcontext() if mask is None else masked(model, mask):
            return logits_at(model, row, None, chosen)[0].float().softmax(-1).cpu()

    def _best(self, p: Tensor, right: int | None) -> dict[str, Any]:
        """The likeliest tokens, and the rank of the right one among all: {"top": [[token, p]], "rank", "p"}."""
        best = p.topk(min(BEST, len(p)))
        top = list(map(list, zip(self._texts(best.indices.tolist()), best.values.tolist(), strict=True)))
        if right is None:
            return {"top": top, "rank": None, "p": None}
        return {"top": top, "rank": int((p > p[right]).sum()) + 1, "p": float(p[right])}

    def _leak(self, ids: tuple[int, ...], mask: Mask, here: int, tokens: list[str]) -> str | None:
        """A warning if, under the mask, information about the next token reaches the position that predicts it."""
        n, cells = len(ids), _cells_in_force(mask, len(ids))
        if here + 1 == n or not composed([cells] * self.layers, n)[here, here + 1]:
            return None
        way = "" if cells[here, here + 1] else ", through other tokens and several layers"
        where, right = _quoted(tokens[here]), _quoted(tokens[here + 1])
        return f"Leak: under this mask {where} attends to {right}{way}, and {right} is what must be predicted there."

    def _measured(self, ids: tuple[int, ...], mask: Mask) -> dict[str, Any]:
        """What `labkit.audit` does, on this sentence and under this mask: {"text", "agrees"}."""
        n, declared = len(ids), _cells_in_force(mask, len(ids))
        columns = sorted({round(i) for i in np.linspace(0, n - 1, MOST_PERTURBED)})
        others = ~torch.eye(n, dtype=torch.bool)[:, columns]  # a token influences itself whatever the mask is

        def wrong(cells: Tensor) -> int:
            return int(((cells != declared[:, columns]) & others).sum())

        def calls(rows: list) -> list[AttentionCall]:
            model, decoder = self.lm.model, self.decoder
            with evaluating(model), without_mlps(decoder), masked(model, mask):
                with recorded_calls(decoder.attentions) as recorded:
                    Runner(model, decoder).run(torch.tensor(rows))
            return recorded

        # One row of the batch for each key that is changed, so that a layer is replayed once: three times as fast.
        counts = [wrong(attention_influence_by_row(call, columns).T) for call in calls([ids] * len(columns))]
        if any(counts):  # a single perturbation can miss a weak connection
            counts = []
            for call in calls([ids]):
                self._before_layer()
                counts.append(wrong(attention_influence(call, columns)[0]))
        pairs = f"{int(others.sum())} pairs of tokens" + (f", of {len(columns)} keys" if len(columns) < n else "")
        if any(counts):
            where = layer_list([i for i, count in enumerate(counts) if count])
            return {"text": f"Measured: not what the mask says in {where} ({max(counts)} of {pairs}).", "agrees": False}
        text = f"Measured: all {len(counts)} layers attend where the mask says, and nowhere else ({pairs})."
        return {"text": f"{text} The audit's verdict: {mask_verdict(declared)}.", "agrees": True}


def _cells_in_force(mask: Mask, n: int) -> Tensor:
    """Bool (n, n); a query without a key attends to itself."""
    return self_for_empty_rows(torch.from_numpy(dense_of(mask, n)))


def _quoted(token: str) -> str:
    return f'"{visible(token, longest=100)}"'
