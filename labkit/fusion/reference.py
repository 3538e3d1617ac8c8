"""The reference engine: every row in one piece, under a mask that can be read, one row after the other.

The mask is an expression of labkit's own algebra (`mask_of`), the positions and the weights are tables beside it. Two
renderings: FlexAttention's mask_mod and score_mod, compiled on a GPU, and one 4-D tensor of numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from labkit import masks
from labkit.errors import FusionError
from labkit.fusion.engine import additive, averaged, fusable_decoder, handed_over, in_float, rows_of, states_changed
from labkit.fusion.fast import BACKENDS
from labkit.fusion.layout import Prompts, Row
from labkit.masks import Mask, block_mask_of

FLEX = "labkit_fusion_flex"  # the name under which transformers finds `_attention`


def mask_of(row: Row, prefix: int) -> Mask:
    """What sees what in a row: segments are apart, all see the prefix, and what comes behind them sees everything."""
    numbers = [0] * prefix + [n for n, segment in enumerate(row.segments, 1) for _ in segment.ids]
    end = len(numbers)
    apart = masks.segments(numbers, fuse_from=end)
    if not prefix:
        return apart
    behind_the_prefix = masks.segments([0] * prefix + [1] * (end - prefix), fuse_from=end)
    return apart | (masks.causal() & ~behind_the_prefix)


class ReferenceEngine:
    """Reads `prompts` row by row; slower than the fast engine, and made to be believed.

    Args:
        rendering: "flex" or "dense". cached: keep keys and values; otherwise all is read again for each token.

    Raises:
        FusionError: a model that cannot be fused, or, for "dense", whose attention takes no mask with numbers.
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
        AttentionInterface.register(FLEX, _attention)
        if rendering == "dense" and self.decoder.backend not in BACKENDS:
            raise FusionError(
                f"a mask with numbers is not taken by the backend {self.decoder.backend!r}: load it with attn='sdpa'"
            )
        compiled = ", compiled" if rendering == "flex" and _compiles(next(model.parameters()).device) else ""
        self.name = f"reference ({rendering}{compiled}{'' if cached else ', without cache'})"

    def start(self) -> Tensor:
        self.sequences = [RowState(row, self.prompts, self.cached) for row in self.prompts.rows]
        return self._logits([list(self.prompts.cue)] * len(self.sequences))

    def step(self, tokens: Tensor) -> Tensor:
        return self._logits([[token] for token in tokens.tolist()])

    def select(self, questions: Sequence[int]) -> None:
        self.sequences = [self.sequences[row].copy() for row in rows_of(questions, self.counts)]
        self.counts = [self.counts[question] for question in questions]

    def _logits(self, new: list[list[int]]) -> Tensor:
        with attention_backend(self.model, FLEX) if self.rendering == "flex" else nullcontext():
            states = self._shared_states(new) if self.averaged_layer is not None else [None] * len(new)
            return torch.cat([self._read(*each) for each in zip(self.sequences, new, states, strict=True)])

    def _mask(self, sequence: RowState) -> Mask:
        return mask_of(sequence.row, len(self.prompts.prefix))

    def _shared_states(self, new: list[list[int]]) -> Sequence[Tensor]:
        """What each row is to have in the averaged layer, (tokens behind the segments, dim), found in its own pass."""
        found = []

        def keep(hidden: Tensor) -> Tensor:
            found.append(hidden)
            return hidden

        for sequence, tokens in zip(self.sequences, new, strict=True):
            with states_changed(self.decoder, self.averaged_layer, keep):
                self._read(twin := sequence.copy(), tokens)
            found[-1] = found[-1][:, -min(len(twin.ids) - twin.end, found[-1].shape[1]) :]
        return list(averaged(torch.cat(found), self.counts))

    def inputs_of(self, sequence: RowState, new: list[int]) -> dict[str, Any]:
        """What the model is called with to read `new` behind a row, and what of the row it has not read yet."""
        ids, cache = sequence.extended(new)
        device = next(self.model.parameters()).device
        positions = torch.tensor(sequence.positions, device=device)
        bias = torch.tensor(sequence.bias, device=device, dtype=self.model.dtype)
        q_len, total, mask = len(ids), len(positions), self._mask(sequence)

        def rendered(window: int | None) -> Any:
            if self.rendering == "flex":
                return block_mask(mask, sequence.end, positions, bias, window, q_len)
            queries = positions[total - q_len :]
            allowed = mask.dense(q_len, total, device=device)
            if window is not None:
                allowed = allowed & (queries[:, None] - positions < window)
            fused = torch.arange(total - q_len, total, device=device) >= sequence.end
            return additive(allowed[None], fused[:, None] * bias, self.model.dtype)

        return {
            "input_ids": torch.tensor([ids], device=device),
            "attention_mask": handed_over(self.decoder, rendered),
            "position_ids": positions[None, total - q_len :],
            "past_key_values": cache,
            "use_cache": self.cached,
            "logits_to_keep": 1,
        }

    def _read(self, sequence: RowState, new: list[int], states: Tensor | None = None) -> Tensor:
        """The logits behind `new`, (1, vocab); `states` take the place of what the averaged layer gives."""
        inputs = self.inputs_of(sequence, new)

        def replaced(hidden: Tensor) -> Tensor:
            return torch.cat([hidden[:, : hidden.shape[1] - len(states)], states[None]], 1)

        with states_changed(self.decoder, None if states is None else self.averaged_layer, replaced):
            return in_float(self.model(**inputs).logits[:, -1])


class RowState:
    """One row as it grows: its ids, positions, what is added to the scores of each key, and its cache."""

    def __init__(self, row: Row, prompts: Prompts, cached: bool):
        begin = len(prompts.prefix)
        self.row = row
        self.ids, self.positions, self.bias = list(prompts.prefix), list(range(begin)), [0.0] * begin
        for segment in row.segments:
            self.ids += segment.ids
            self.positions += range(segment.start, segment.start + len(segment.ids))
            self.bias += [segment.bias] * len(segment.ids)
        self.end = len(self.ids)  # of what does not see everything before it
        self.next_position = row.cue_start
        self.cache = DynamicCache() if cached else None

    def extended(self, new: list[int]) -> tuple[list[int], Any]:
        """Append `new`; what has to be read for it, and the cache of what has been read."""
        seen = self.cache.get_seq_length() if self.cache is not None else 0
        self.ids += new
        self.positions += range(self.next_position, self.next_position + len(new))
        self.bias += [0.0] * len(new)
        self.next_position += len(new)
        return self.ids[seen:], self.cache

    def copy(self) -> RowState:
        twin = object.__new__(RowState)
        twin.__dict__ = dict(self.__dict__)
        twin.ids, twin.positions, twin.bias = list(self.ids), list(self.positions), list(self.bias)
        if self.cache is not None:
            twin.cache = type(self.cache)()
            for number, layer in enumerate(self.cache.layers):
                twin.cache.update(layer.keys.clone(), layer.values.clone(), number)
        return twin


def block_mask(mask: Mask, end: int, positions: Tensor, bias: Tensor, window: int | None, q_len: int):
    """`mask`, windows in positions, and weights, for FlexAttention: a BlockMask that carries its score_mod."""
    total = len(positions)
    before = total - q_len  # what the cache holds
    cells = mask.dense(q_len, total, device=positions.device)
    if window is not None:
        cells &= positions[before:, None] - positions < window

    @no_type_check
    def score_mod(score, batch, head, query, key):
        return score + torch.where(query + before >= end, bias[key], 0.0)

    made = block_mask_of(cells[None])
    made.labkit_score_mod = score_mod
    made.ndim = 4  # GPT-2 asks the mask it is given
    return made


@contextmanager
def attention_backend(model: nn.Module, name: str) -> Iterator[None]:
    """For the block, the model's attention is that of `name`; afterwards, also after an exception, what it was."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """FlexAttention under a mask of `block_mask`; query (1, heads, q, dim) -> (1, q, heads, dim)."""
    if kwargs.get("s_aux") is not None:
        raise FusionError("attention sinks are not part of labkit's FlexAttention: ask for engine='dense'")

    cap = None if softcap is None else torch.tensor(softcap, device=query.device)  # a plain float does not compile

    @no_type_check
    def score_mod(score, batch, head, q, k):
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return attention_mask.labkit_score_mod(score, batch, head, q, k)

    flex = _compiled() if _compiles(query.device) else _plain()
    groups = query.shape[1] != key.shape[1]
    out = flex(query, key, value, score_mod=score_mod, block_mask=attention_mask, scale=scaling, enable_gqa=groups)
    return out.transpose(1, 2).contiguous(), None


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda"  # inductor's C++ does not build for every shape of such a mask (torch 2.13)


@functools.cache
def _compiled():
    return torch.compile(_plain(), dynamic=True)


def _plain():
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention
