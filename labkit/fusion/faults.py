"""Six ways to get fusion wrong, each a runnable engine: the faults of the public experiment behind the idea.

Each computes something that looks like fusion, and no exception tells. `labkit.fusion.proofs.prove` catches them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit import masks
from labkit.fusion.engine import Engine
from labkit.fusion.layout import Prompts, Segment
from labkit.fusion.reference import ReferenceEngine, RowState


@dataclass(frozen=True)
class Fault:
    """A fault: its name, what happens, the engine that has it, and the proof that must fail."""

    name: str
    story: str
    engine: Callable[[nn.Module, Prompts], Engine]
    caught_by: str


class _Dense(ReferenceEngine):
    def __init__(self, model: nn.Module, prompts: Prompts):
        super().__init__(model, prompts, rendering="dense")
        self.name = "faulty"


class _FirstTokenUnfused(_Dense):
    """The cue belongs to the last paraphrase, and the first token is chosen by what that one saw."""

    def __init__(self, model: nn.Module, prompts: Prompts):
        rows = []
        for row in prompts.rows:
            *others, last = row.segments
            rows.append(replace(row, segments=(*others, replace(last, ids=last.ids + prompts.cue))))
        grown = tuple(replace(row, cue_start=row.cue_start + len(prompts.cue)) for row in rows)
        super().__init__(model, replace(prompts, rows=grown, cue=()))

    def start(self) -> Tensor:
        self.sequences = [RowState(row, self.prompts, cached=True) for row in self.prompts.rows]
        return self._logits([[] for _ in self.sequences])


class _Retokenised(_Dense):
    """Decoded and read again, the ids begin with one more token; the mask does not know.

    The token is put there by hand, as a tokenizer that adds a first one would, so that no tokenizer hides the fault.
    """

    def start(self) -> Tensor:
        self.sequences = [RowState(row, self.prompts, cached=True) for row in self.prompts.rows]
        new = []
        for sequence in self.sequences:
            *ids, pushed_out = [sequence.ids[0], *sequence.ids]
            sequence.ids = ids
            new.append([pushed_out, *self.prompts.cue])
        return self._logits(new)


class _SilentlyCausal(_Dense):
    """`except:` and then the plain causal mask."""

    def _mask(self, sequence: RowState) -> masks.Mask:
        return masks.causal()


class _SeparatorsApart(_Dense):
    """The last token of each paraphrase is in no segment. All its keys get the lowest number there is, so the softmax
    gives every key of the row the same weight: those of other paraphrases, and of what comes later.
    """

    def inputs_of(self, sequence: RowState, new: list[int]) -> dict[str, Any]:
        inputs = super().inputs_of(sequence, new)
        first, at, apart = len(sequence.positions) - inputs["input_ids"].shape[1], len(self.prompts.prefix), []
        for segment in sequence.row.segments:
            at += len(segment.ids)
            apart += [at - 1 - first] if at > first else []
        given = inputs["attention_mask"]
        for mask in given.values() if isinstance(given, dict) else [given]:
            mask[:, :, apart] = torch.finfo(mask.dtype).min
        return inputs


def _sequential(model: nn.Module, prompts: Prompts) -> Engine:
    rows = []
    for row in prompts.rows:
        start, moved = len(prompts.prefix), []
        for segment in row.segments:
            moved.append(Segment(segment.ids, start, segment.bias))
            start += len(segment.ids)
        rows.append(replace(row, segments=tuple(moved), cue_start=start))
    return _Dense(model, replace(prompts, rows=tuple(rows)))


def _cacheless(model: nn.Module, prompts: Prompts) -> Engine:
    return ReferenceEngine(model, prompts, rendering="dense", cached=False)


ALL: tuple[Fault, ...] = (
    Fault(
        "first token not fused",
        "the answer's first token is chosen at the last token of the prompt, which saw the last paraphrase only",
        _FirstTokenUnfused,
        "the first token sees every paraphrase",
    ),
    Fault(
        "decoded and read again",
        "the ids are decoded and tokenised again, which puts a token in front: mask and positions are off by one",
        _Retokenised,
        "one paraphrase is the plain prompt",
    ),
    Fault(
        "silently causal",
        "where the mask cannot be built, an `except:` takes the plain causal one",
        _SilentlyCausal,
        "no paraphrase sees another",
    ),
    Fault(
        "separators in no segment",
        "the separators belong to no paraphrase: nothing is allowed in their rows, so they look at everything alike",
        _SeparatorsApart,
        "no paraphrase sees another",
    ),
    Fault(
        "no cache",
        "everything is read again for each new token",
        _cacheless,
        "what has been read is not read again",
    ),
    Fault(
        "positions go on",
        "positions are counted along the row, so each paraphrase stands somewhere else",
        _sequential,
        "copies are one",
    ),
)
