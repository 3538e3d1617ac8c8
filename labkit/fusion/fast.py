"""The fast engine: segments are read as one batch with ordinary attention, and their keys and values joined once.

    prefix      read once
    segments    one batch, each behind the prefix, each at its own positions; none can see another, being in another row
    joined      per row: the prefix's keys, then those of its segments, side by side
    cue, answer ordinary decoding over the joined cache; a segment's weight is a number added to the scores of its keys

The mask is made from positions, not from places in the cache, so a local layer sees as far as it would in one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import FusionError
from labkit.fusion.engine import additive, averaged, fusable_decoder, handed_over, in_float, rows_of, states_changed
from labkit.fusion.layout import Prompts, Segment

BACKENDS = ("eager", "sdpa")
TOKENS_AT_ONCE = 8192  # slots of a batch of segments that are read in one forward pass


@dataclass
class _Joined:
    """The keys that the next token may look at, side by side.

    Attributes:
        cache: per layer (rows, heads, keys, dim). positions, bias: (rows, keys). there: (rows, keys), False: padding.
        next_position: (rows,), where the next token stands.
    """

    cache: Any
    positions: Tensor
    bias: Tensor
    there: Tensor
    next_position: Tensor


class FastEngine:
    """Reads `prompts` and goes on from there; the model is only called, never changed.

    Args:
        averaged_layer: the layer whose states the rows of a question share from the cue on; None: none.

    Raises:
        FusionError: a model that cannot be fused, or one whose attention takes no mask with numbers.
    """

    name = "fast"

    def __init__(self, model: nn.Module, prompts: Prompts, averaged_layer: int | None = None):
        self.model, self.prompts, self.decoder = model, prompts, fusable_decoder(model)
        self.averaged_layer, self.counts = averaged_layer, list(prompts.counts)
        if self.decoder.backend not in BACKENDS:
            raise FusionError(
                f"the fast engine adds numbers to attention scores, which the backend {self.decoder.backend!r} does "
                "not take: load the model with attn='sdpa', or ask for engine='reference'"
            )
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    def start(self) -> Tensor:
        self.joined = self._read()
        cue = torch.tensor(self.prompts.cue, device=self.device)
        return self._extend(cue.expand(len(self.prompts.rows), -1))

    def step(self, tokens: Tensor) -> Tensor:
        return self._extend(tokens.to(self.device)[:, None])

    def select(self, questions: Sequence[int]) -> None:
        joined = self.joined
        rows = torch.tensor(rows_of(questions, self.counts), device=self.device)
        self.counts = [self.counts[question] for question in questions]
        joined.cache.batch_select_indices(rows)
        for name in ("positions", "bias", "there", "next_position"):
            setattr(joined, name, getattr(joined, name)[rows])

    def _extend(self, ids: Tensor) -> Tensor:
        """Read `ids` (rows, new) behind all that is there; the logits of the last of them, (rows, vocab)."""
        joined, new = self.joined, ids.shape[1]
        queries = joined.next_position[:, None] + torch.arange(new, device=self.device)
        joined.positions = torch.cat([joined.positions, queries], 1)
        joined.bias = torch.cat([joined.bias, joined.bias.new_zeros(queries.shape)], 1)
        joined.there = torch.cat([joined.there, joined.there.new_ones(queries.shape)], 1)
        joined.next_position = joined.next_position + new
        total = joined.positions.shape[1]
        places = torch.arange(total, device=self.device)
        earlier = places <= places[-new:, None]  # (new, keys): no token sees a later one

        def mask(window: int | None) -> Tensor:
            allowed = earlier & joined.there[:, None, :]
            if window is not None:
                allowed = allowed & (queries[:, :, None] - joined.positions[:, None, :] < window)
            return additive(allowed, joined.bias[:, None, :], self.dtype)

        with states_changed(self.decoder, self.averaged_layer, lambda hidden: averaged(hidden, self.counts)):
            output = self.model(
                input_ids=ids,
                attention_mask=handed_over(self.decoder, mask),
                position_ids=queries,
                past_key_values=joined.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return in_float(output.logits[:, -1])

    def _read(self) -> _Joined:
        """Prefix and segments of all rows, read and laid side by side."""
        prompts, device = self.prompts, self.device
        begin, rows = len(prompts.prefix), prompts.rows
        width = begin + max(sum(len(segment.ids) for segment in row.segments) for row in rows)
        shape = (len(rows), width)
        positions = torch.zeros(shape, dtype=torch.long, device=device)
        bias = torch.zeros(shape, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32, device=device)
        there = torch.zeros(shape, dtype=torch.bool, device=device)
        positions[:, :begin], there[:, :begin] = torch.arange(begin, device=device), True
        placed: list[tuple[Segment, int]] = []  # and the place of its first token in the flattened rows
        for number, row in enumerate(rows):
            at = begin
            for segment in row.segments:
                end = at + len(segment.ids)
                positions[number, at:end] = segment.start + torch.arange(end - at, device=device)
                bias[number, at:end], there[number, at:end] = segment.bias, True
                placed.append((segment, number * width + at))
                at = end
        prefix = self._read_prefix()
        keys_and_values: list[list[Tensor]] = []  # per layer two, (rows * width, heads, dim)
        for batch in _batches(placed, begin):
            cache, length = self._read_segments([segment for segment, _ in batch], prefix)
            lengths = torch.tensor([len(segment.ids) for segment, _ in batch], device=device)
            within = torch.arange(length, device=device).expand(len(batch), -1)
            real = (within < lengths[:, None]).flatten()
            to = (torch.tensor([place for _, place in batch], device=device)[:, None] + within).flatten()[real]
            if not keys_and_values:
                keys_and_values = [[_empty(each, shape) for each in layer] for layer in _pairs(cache)]
            for joined, layer in zip(keys_and_values, _pairs(cache), strict=True):
                for whole, part in zip(joined, layer, strict=True):
                    whole.index_copy_(0, to, part[:, :, begin:].transpose(1, 2).flatten(0, 1)[real])
        joined = _plain_cache()
        for layer in range(len(keys_and_values)):
            keys, values = (each.view(*shape, *each.shape[1:]) for each in keys_and_values.pop(0))  # the cache copies
            if prefix is not None:
                for whole, part in zip((keys, values), _pairs(prefix)[layer], strict=True):
                    whole[:, :begin] = part.transpose(1, 2)
            joined.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
        return _Joined(joined, positions, bias, there, torch.tensor([row.cue_start for row in rows], device=device))

    def _read_prefix(self) -> Any | None:
        """The cache of the shared prefix, of one row; None if there is none."""
        if not self.prompts.prefix:
            return None
        ids = torch.tensor([self.prompts.prefix], device=self.device)
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        return self._read_through(ids, positions, positions, torch.ones_like(ids, dtype=torch.bool), _plain_cache())

    def _read_segments(self, segments: Sequence[Segment], prefix: Any | None) -> tuple[Any, int]:
        """The cache of `segments`, one row each, behind the prefix, padded on the right; and their longest length."""
        length, begin = max(len(segment.ids) for segment in segments), len(self.prompts.prefix)
        ids = torch.zeros(len(segments), length, dtype=torch.long)
        real = torch.zeros(len(segments), begin + length, dtype=torch.bool)
        real[:, :begin] = True
        for row, segment in enumerate(segments):
            ids[row, : len(segment.ids)] = torch.tensor(segment.ids)
            real[row, begin : begin + len(segment.ids)] = True
        starts = torch.tensor([segment.start for segment in segments], device=self.device)
        last = torch.tensor([len(segment.ids) - 1 for segment in segments], device=self.device)
        within = torch.minimum(torch.arange(length, device=self.device), last[:, None])  # padding stands where it may
        queries = starts[:, None] + within
        before = torch.arange(begin, device=self.device).expand(len(segments), -1)
        cache = _plain_cache()
        if prefix is not None:
            for layer, (keys, values) in enumerate(_pairs(prefix)):
                cache.update(*(each.expand(len(segments), -1, -1, -1) for each in (keys, values)), layer)
        keys = torch.cat([before, queries], 1)
        return self._read_through(ids.to(self.device), queries, keys, real.to(self.device), cache), length

    def _read_through(self, ids: Tensor, queries: Tensor, keys: Tensor, real: Tensor, cache: Any) -> Any:
        """The layer stack on `ids` (rows, q) with causal attention; the positions of queries and keys are given."""
        length, total = ids.shape[1], keys.shape[1]
        places = torch.arange(total, device=self.device)
        earlier = places <= places[total - length :, None]  # (q, keys)
        nothing = torch.zeros((), device=self.device)

        def mask(window: int | None) -> Tensor:
            allowed = earlier & real[:, None, :]
            if window is not None:
                allowed = allowed & (queries[:, :, None] - keys[:, None, :] < window)
            itself = places == places[total - length :, None]
            return additive(allowed | itself, nothing, self.dtype)  # padding sees itself, so that no row is empty

        self.decoder.stack(
            input_ids=ids,
            attention_mask=handed_over(self.decoder, mask),
            position_ids=queries,
            past_key_values=cache,
            use_cache=True,
        )
        return cache


def _plain_cache() -> Any:
    """A cache that keeps every key: made with a config, its local layers would let go of those behind their window."""
    from transformers import DynamicCache

    return DynamicCache()


def _pairs(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, (rows, heads, tokens, dim)."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def _empty(like: Tensor, shape: tuple[int, int]) -> Tensor:
    """Zeros (rows * width, heads, dim) for what `like` (rows, heads, tokens, dim) holds."""
    return like.new_zeros(shape[0] * shape[1], like.shape[1], like.shape[3])


def _batches(placed: Sequence[tuple[Segment, int]], begin: int) -> Iterator[list[tuple[Segment, int]]]:
    """Segments of like length together, as many as fit into TOKENS_AT_ONCE slots, the prefix's among them."""
    batch: list[tuple[Segment, int]] = []
    for each in sorted(placed, key=lambda pair: len(pair[0].ids)):
        if batch and (len(batch) + 1) * (begin + len(each[0].ids)) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(each)
    yield batch
