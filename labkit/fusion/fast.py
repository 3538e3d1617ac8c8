"""The fast engine: segments are read as one batch with ordinary attention, and their keys and values joined once.

    prefix      read once
    segments    one batch, each behind the prefix, each at its own positions; short ones share a row, where the mask
                keeps them apart, so that nothing is padded that need not be
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
# Slots of the rows that one forward pass reads, their keys of the prefix included. On a CPU so few that the states
# stay in its cache: the time then grows with the number of segments, and not faster.
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 8192}
PREFIX, PADDING = 0, -1  # owners of keys; segments of a row are 1, 2, ...

_Shared = list[tuple[Segment, int]]  # the segments of a row, each with its place in the joined rows


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
        for batch in _batches(placed, begin, TOKENS_AT_ONCE.get(device.type, TOKENS_AT_ONCE["cuda"])):
            cache, length = self._read_segments([[segment for segment, _ in row] for row in batch], prefix)
            there_now, joined_at = _slots(batch, length)
            source, to = torch.tensor(there_now, device=device), torch.tensor(joined_at, device=device)
            if not keys_and_values:
                keys_and_values = [[_empty(each, shape) for each in layer] for layer in _pairs(cache)]
            for joined, layer in zip(keys_and_values, _pairs(cache), strict=True):
                for whole, part in zip(joined, layer, strict=True):
                    whole.index_copy_(0, to, part[:, :, begin:].transpose(1, 2).flatten(0, 1)[source])
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
        return self._read_through(ids, positions, positions, torch.zeros_like(ids), _plain_cache())

    def _read_segments(self, rows: Sequence[Sequence[Segment]], prefix: Any | None) -> tuple[Any, int]:
        """The cache of `rows` of segments behind the prefix, padded on the right; and the length of the longest row."""
        length, begin = max(_length(row) for row in rows), len(self.prompts.prefix)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        positions = torch.zeros(len(rows), begin + length, dtype=torch.long)  # padding: where any text may stand
        owners = torch.full((len(rows), begin + length), PADDING)
        positions[:, :begin], owners[:, :begin] = torch.arange(begin), PREFIX
        for number, row in enumerate(rows):
            at = 0
            for owner, segment in enumerate(row, PREFIX + 1):
                end = at + len(segment.ids)
                ids[number, at:end] = torch.tensor(segment.ids)
                positions[number, begin + at : begin + end] = segment.start + torch.arange(end - at)
                owners[number, begin + at : begin + end] = owner
                at = end
        cache = _plain_cache()
        if prefix is not None:
            for layer, (keys, values) in enumerate(_pairs(prefix)):
                cache.update(*(each.expand(len(rows), -1, -1, -1) for each in (keys, values)), layer)
        ids, positions, owners = (each.to(self.device) for each in (ids, positions, owners))
        return self._read_through(ids, positions[:, begin:], positions, owners, cache), length

    def _read_through(self, ids: Tensor, queries: Tensor, keys: Tensor, owners: Tensor, cache: Any) -> Any:
        """The layer stack on `ids` (rows, q): causal, and of what is not the prefix's a token sees its owner's only.

        queries, keys: their positions, (rows, q) and (rows, k). owners: of the keys, (rows, k).
        """
        length, total = ids.shape[1], keys.shape[1]
        places = torch.arange(total, device=self.device)
        earlier = places <= places[total - length :, None]  # (q, keys)
        own = owners[:, total - length :, None] == owners[:, None, :]  # (rows, q, keys)
        nothing = torch.zeros((), device=self.device)

        def mask(window: int | None) -> Tensor:
            allowed = earlier & (own | (owners == PREFIX)[:, None, :])
            if window is not None:
                allowed = allowed & (queries[:, :, None] - keys[:, None, :] < window)
            return additive(allowed, nothing, self.dtype)  # a token always sees itself: no row is empty

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


def _length(row: Sequence[Segment]) -> int:
    return sum(len(segment.ids) for segment in row)


def _batches(placed: Sequence[tuple[Segment, int]], begin: int, slots: int) -> Iterator[list[_Shared]]:
    """Rows of segments, as many as fit into `slots`, their keys of the prefix among them.

    The longest segment of a batch makes the length of its rows; what is shorter fills what is left of them (first fit,
    the longest first), so that segments of one length have a row each, and others leave little padding.
    """
    batch: list[_Shared] = []
    length, room = 0, []
    for each in sorted(placed, key=lambda pair: len(pair[0].ids), reverse=True):
        size = len(each[0].ids)
        row = next((number for number, left in enumerate(room) if size <= left), None)
        if row is None and batch and (len(batch) + 1) * (begin + length) > slots:
            yield batch
            batch, room = [], []
        if row is None:
            length = length if batch else size
            batch.append([each])
            room.append(length - size)
        else:
            batch[row].append(each)
            room[row] -= size
    yield batch


def _slots(batch: Sequence[_Shared], length: int) -> tuple[list[int], list[int]]:
    """For every token of a batch its place in the batch's rows, flattened, and its place in the joined ones."""
    source: list[int] = []
    to: list[int] = []
    for number, row in enumerate(batch):
        at = number * length
        for segment, place in row:
            source += range(at, at + len(segment.ids))
            to += range(place, place + len(segment.ids))
            at += len(segment.ids)
    return source, to
