"""The reference engine: each row in one piece under a mask of labkit's algebra (`layout.mask_of`), row after row.

It has two renderings: FlexAttention with mask_mod and score_mod, compiled on a GPU, and a 4-D tensor of numbers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from labkit.decoder.anatomy import CACHE
from labkit.errors import ModelError
from labkit.fusion.engine import (
    additive,
    averaged,
    for_layers,
    fusable_decoder,
    last_logits,
    require_mask_of_numbers,
    rows_of,
    states_changed,
)
from labkit.fusion.layout import Prompts, Row, mask_of
from labkit.masks import Mask, block_mask_of

FLEX = "labkit_fusion_flex"  # the name under which transformers finds `_attention`


class RowState:
    """One row as it grows: its ids, positions, score biases of its keys, and its cache (None: nothing is kept)."""

    def __init__(self, row: Row, prompts: Prompts, cached: bool):
        begin = len(prompts.prefix)
        self.row = row
        self.ids = [*prompts.prefix, *(token for segment in row.segments for token in segment.ids)]
        self.positions = [*range(begin), *(s.start + i for s in row.segments for i in range(len(s.ids)))]
        self.bias = [0.0] * begin + [segment.bias for segment in row.segments for _ in segment.ids]
        self.end = len(self.ids)  # of the prefix and the segments
        self.next_position = row.cue_start
        self.cache = DynamicCache() if cached else None

    def extend(self, new: Sequence[int]) -> list[int]:
        """Append `new`; returns the ids that are not in the cache yet."""
        cached = self.cache.get_seq_length() if self.cache is not None else 0
        self.ids += new
        self.positions += range(self.next_position, self.next_position + len(new))
        self.bias += [0.0] * len(new)
        self.next_position += len(new)
        return self.ids[cached:]


class ReferenceEngine:
    """Reads `prompts` row by row; slower than the fast engine and easier to verify.

    Args:
        rendering: "flex" or "dense". cached: keep keys and values; otherwise everything is read again for each token.

    Raises:
        ModelError: a model that cannot be fused, or, for "dense", whose backend takes no mask of numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Prompts,
        averaged_layer: int | None = None,
        *,
        rendering: str = "flex",
        cached: bool = True,
    ):
        self.model, self.prompts, self.decoder = model, prompts, fusable_decoder(model)
        self.averaged_layer, self.counts = averaged_layer, list(prompts.counts)
        self.rendering, self.cached = rendering, cached
        if rendering == "dense":
            require_mask_of_numbers(self.decoder, "the dense engine")
        AttentionInterface.register(FLEX, _attention)
        compiled = ", compiled" if rendering == "flex" and model.device.type == "cuda" else ""
        self.name = f"reference ({rendering}{compiled}{'' if cached else ', without cache'})"

    def start(self) -> Tensor:
        self.sequences = [RowState(row, self.prompts, self.cached) for row in self.prompts.rows]
        return self._logits([list(self.prompts.cue)] * len(self.sequences))

    def step(self, tokens: Tensor) -> Tensor:
        return self._logits([[token] for token in tokens.tolist()])

    def select(self, questions: Sequence[int]) -> None:
        self.sequences = [copy.deepcopy(self.sequences[row]) for row in rows_of(questions, self.counts)]
        self.counts = [self.counts[question] for question in questions]

    @torch.no_grad()
    def _logits(self, new: list[list[int]]) -> Tensor:
        with attention_backend(self.model, FLEX) if self.rendering == "flex" else nullcontext():
            states = [None] * len(new) if self.averaged_layer is None else self._shared_states(new)
            return torch.cat([self._read(*row) for row in zip(self.sequences, new, states, strict=True)])

    def _read(self, sequence: RowState, new: list[int], states: Tensor | None = None) -> Tensor:
        """The logits behind `new`, (1, vocab). `states` (tokens, dim) replace the last states of the averaged layer."""
        inputs = self.inputs_of(sequence, new)

        def replaced(hidden: Tensor) -> Tensor:
            return torch.cat([hidden[:, : hidden.shape[1] - len(states)], states[None]], 1)

        with states_changed(self.decoder, None if states is None else self.averaged_layer, replaced):
            return last_logits(self.model(**inputs))

    def _shared_states(self, new: list[list[int]]) -> Sequence[Tensor]:
        """For each row the averaged states behind its segments, (tokens, dim), measured in a separate pass."""
        outputs = []

        def keep(hidden: Tensor) -> Tensor:
            outputs.append(hidden)
            return hidden

        for sequence, tokens in zip(self.sequences, new, strict=True):
            trial = copy.deepcopy(sequence)
            with states_changed(self.decoder, self.averaged_layer, keep):
                self._read(trial, tokens)
            outputs[-1] = outputs[-1][:, -min(len(trial.ids) - trial.end, outputs[-1].shape[1]) :]
        return list(averaged(torch.cat(outputs), self.counts))

    def mask(self, sequence: RowState) -> Mask:
        return mask_of(sequence.row, len(self.prompts.prefix))

    def inputs_of(self, sequence: RowState, new: Sequence[int]) -> dict[str, Any]:
        """The model's arguments to read `new` behind a row, and what of the row is not in its cache."""
        ids, device = sequence.extend(new), self.model.device
        positions = torch.tensor(sequence.positions, device=device)  # (keys,)
        bias = torch.tensor(sequence.bias, device=device, dtype=self.model.dtype)
        keys, mask = len(positions), self.mask(sequence)
        queries = torch.arange(keys - len(ids), keys, device=device)
        fused = (queries >= sequence.end)[:, None] * bias  # (queries, keys)

        def rendered(window: int | None) -> Any:
            allowed = mask.dense(len(ids), keys, device=device)
            if window is not None:
                allowed = allowed & (positions[queries][:, None] - positions < window)
            if self.rendering == "flex":
                return _block_mask(allowed, fused)
            return additive(allowed[None], fused, self.model.dtype)

        return {
            "input_ids": torch.tensor([ids], device=device),
            "attention_mask": for_layers(self.decoder, rendered),
            "position_ids": positions[None, queries],
            CACHE: sequence.cache,
            "use_cache": self.cached,
            "logits_to_keep": 1,
        }


# ---- FlexAttention -------------------------------------------------------------------------------------------------


@contextmanager
def attention_backend(model: nn.Module, name: str) -> Iterator[None]:
    """For the block, use the attention backend `name`; afterwards, also after an exception, the previous one."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _block_mask(allowed: Tensor, bias: Tensor):
    """(queries, keys) each: a BlockMask that carries the bias as its score_mod."""

    @no_type_check
    def score_mod(score, batch, head, query, key):
        return score + bias[query, key]

    block_mask = block_mask_of(allowed[None])
    block_mask.labkit_score_mod = score_mod
    block_mask.ndim = 4  # GPT-2 reads this attribute of its mask
    return block_mask


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """FlexAttention under a mask of `_block_mask`; query (1, heads, q, head_dim) -> (1, q, heads, head_dim)."""
    if kwargs.get("s_aux") is not None:
        raise ModelError("the reference engine does not support attention sinks: use engine='dense'")
    cap = None if softcap is None else torch.tensor(softcap, device=query.device)  # a plain float does not compile

    @no_type_check
    def score_mod(score, batch, head, q, k):
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return attention_mask.labkit_score_mod(score, batch, head, q, k)

    out = _flex(query.device.type == "cuda")(
        query, key, value, score_mod=score_mod, block_mask=attention_mask, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


@functools.cache
def _flex(compiled: bool):
    """Not compiled on a CPU: inductor's C++ does not build for every shape of such a mask (torch 2.13)."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
