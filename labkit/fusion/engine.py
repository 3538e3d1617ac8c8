"""The fast engine, the interface of both engines, and the models that can be fused.

    prefix        read once
    segments      one batch, each behind the prefix and at its own positions; short segments share a row under a mask
    joined        per row: the keys of the prefix, then those of its segments, side by side
    cue, answer   ordinary decoding over the joined cache; log(weight) is added to the scores of a segment's keys

Masks are made from positions, not from places in the cache, so a sliding window has its usual length in a fused row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from labkit.decoder.anatomy import CACHE, FULL, SLIDING, Decoder, decoder_or_none
from labkit.decoder.limits import require_memory, require_positions
from labkit.decoder.packing import MARK
from labkit.errors import DataError, ModelError
from labkit.fusion.layout import Prompts, Segment

BACKENDS = ("eager", "sdpa")  # those that take a mask of numbers
# Tokens in one forward pass, copies of the prefix included. On a CPU this is small enough for the hidden states to stay
# in its cache, so that the time is linear in the number of segments.
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 8192}
PREFIX, PADDING, CUE = 0, -1, -2  # owners of tokens; the segments of a row are 1, 2, ...


@runtime_checkable
class Engine(Protocol):
    """Reads prompts and continues them.

    Attributes:
        name: what the result reports. counts: how many rows each question has; they are adjacent.
    """

    name: str
    counts: list[int]

    def start(self) -> Tensor:
        """Read the prompts, cue included; returns the logits of the first new token, (rows, vocab)."""

    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, (rows,); returns the logits of the next one, (rows, vocab)."""

    def select(self, questions: Sequence[int]) -> None:
        """Continue with these questions in this order; one may be repeated (beams)."""


# ---- what a model must offer ---------------------------------------------------------------------------------------


def fusable_decoder(model: nn.Module) -> Decoder:
    """The decoder of a causal model. Raises ModelError with the reason if the model cannot be fused."""
    decoder, reason = decoder_or_none(model), None
    parameters = inspect.signature(decoder.stack.forward).parameters if decoder else {}
    config = decoder.config if decoder else None
    if decoder is None:
        reason = "it contains no decoder that labkit knows"
    elif foreign := sorted(set(decoder.layer_types) - {FULL, SLIDING}):
        reason = f"it has layers of the type {foreign[0]!r}, which keep no keys that could be joined"
    elif getattr(config, "alibi", False) or "position_ids" not in parameters:
        reason = "its positions are counted along the row, so segments cannot share positions"
    elif getattr(config, MARK, None) is not None:
        reason = "it is bidirectional and cannot generate: call labkit.to_causal first"
    elif getattr(config, "is_causal", None) is False or getattr(config, "use_bidirectional_attention", None) is True:
        reason = "its configuration declares it bidirectional, so it cannot generate"
    elif not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        reason = "it has no language-model head"
    if reason is not None:
        raise ModelError(f"{type(model).__name__} cannot be fused: {reason}")
    return decoder


def require_room(model: nn.Module, prompts: Prompts, batch_size: int, new_tokens: int, beams: int = 1) -> None:
    """Raise DataError if a position exceeds the model's limit, or the cache of a batch the free memory."""
    decoder, parameter = fusable_decoder(model), next(model.parameters())
    config = decoder.config
    last = max(row.cue_start for row in prompts.rows) + len(prompts.cue) + new_tokens - 1
    cure = "use fewer or shorter paraphrases, fewer examples or new tokens, or a method that restarts positions"
    require_positions(last, config, refusal=DataError, cure=cure)
    longest = len(prompts.prefix) + max(row.length for row in prompts.rows) + len(prompts.cue) + new_tokens
    tokens = max(prompts.counts) * min(batch_size, len(prompts.counts)) * beams * longest
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    needed = 2 * len(decoder.layers) * heads * head_dim * parameter.dtype.itemsize * tokens
    cure = "use a smaller batch_size, or fewer paraphrases"
    require_memory(f"the cache of {tokens:,} tokens", needed, str(parameter.device), cure=cure, refusal=DataError)


# ---- the fast engine -----------------------------------------------------------------------------------------------


@dataclass
class _Context:
    """The tokens that have been read: cache per layer (rows, heads, keys, head_dim), the other tables (rows, keys)."""

    cache: DynamicCache
    positions: Tensor
    owners: Tensor
    bias: Tensor


class FastEngine:
    """Reads `prompts` and continues them; the model is only called, never changed.

    Args:
        averaged_layer: the layer whose hidden states the rows of a question share from the cue on; None: none.

    Raises:
        ModelError: a model that cannot be fused, or whose attention backend takes no mask of numbers.
    """

    name = "fast"

    def __init__(self, model: nn.Module, prompts: Prompts, averaged_layer: int | None = None):
        self.model, self.prompts, self.decoder = model, prompts, fusable_decoder(model)
        self.averaged_layer, self.counts = averaged_layer, list(prompts.counts)
        require_mask_of_numbers(self.decoder, "the fast engine")
        self.device, self.dtype = model.device, model.dtype

    @torch.no_grad()
    def start(self) -> Tensor:
        self.next_position = torch.tensor([row.cue_start for row in self.prompts.rows], device=self.device)  # (rows,)
        self.context = self._joined()
        cue = torch.tensor(self.prompts.cue, device=self.device)
        return self._extend(cue.expand(len(self.prompts.rows), -1))

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        return self._extend(tokens.to(self.device)[:, None])

    def select(self, questions: Sequence[int]) -> None:
        rows = torch.tensor(rows_of(questions, self.counts), device=self.device)
        self.counts = [self.counts[question] for question in questions]
        self.next_position = self.next_position[rows]
        self.context.cache.batch_select_indices(rows)
        for table in ("positions", "owners", "bias"):
            setattr(self.context, table, getattr(self.context, table)[rows])

    def _extend(self, ids: Tensor) -> Tensor:
        """Read `ids` (rows, new) of cue or answer; returns the logits of the last one, (rows, vocab)."""
        positions = self.next_position[:, None] + torch.arange(ids.shape[1], device=self.device)  # (rows, new)
        self.next_position = self.next_position + ids.shape[1]
        with states_changed(self.decoder, self.averaged_layer, lambda hidden: averaged(hidden, self.counts)):
            output = self._read(
                self.model, self.context, ids, positions, torch.full_like(positions, CUE), logits_to_keep=1
            )
        return last_logits(output)

    def _read(self, module: nn.Module, context: _Context, ids: Tensor, positions: Tensor, owners: Tensor, **more: Any):
        """Call `module` on `ids` (rows, new) behind `context`, which grows; positions, owners: (rows, new).

        A token attends to earlier tokens of its owner and of the prefix; a token of the cue, to all but padding.
        """
        context.positions = torch.cat([context.positions, positions], 1)  # (rows, keys)
        context.owners = torch.cat([context.owners, owners], 1)
        context.bias = nn.functional.pad(context.bias, (0, ids.shape[1]))
        queries, keys = owners[:, :, None], context.owners[:, None, :]  # (rows, new, 1), (rows, 1, keys)
        places = torch.arange(keys.shape[-1], device=self.device)
        earlier = places <= places[-ids.shape[1] :, None]  # (new, keys)
        visible = earlier & ((queries == keys) | (keys == PREFIX) | ((queries == CUE) & (keys != PADDING)))
        bias = (queries == CUE) * context.bias[:, None, :]  # (rows, new, keys)

        def mask(window: int | None) -> Tensor:
            if window is None:
                return additive(visible, bias, self.dtype)
            near = positions[:, :, None] - context.positions[:, None, :] < window
            return additive(visible & near, bias, self.dtype)

        return module(
            input_ids=ids,
            attention_mask=for_layers(self.decoder, mask),
            position_ids=positions,
            use_cache=True,
            **{CACHE: context.cache},
            **more,
        )

    def _joined(self) -> _Context:
        """Prefix and segments of all rows, read and put side by side."""
        rows, begin = [row.segments for row in self.prompts.rows], len(self.prompts.prefix)
        empty = torch.zeros(1, 0, dtype=torch.long, device=self.device)
        prefix = _Context(DynamicCache(), empty, empty, empty.to(torch.promote_types(self.dtype, torch.float32)))
        if begin:
            positions = torch.arange(begin, device=self.device)[None]  # (1, prefix)
            ids = torch.tensor([self.prompts.prefix], device=self.device)
            self._read(self.decoder.stack, prefix, ids, positions, torch.full_like(positions, PREFIX))
        _, positions, owners, bias = self._side_by_side(rows)  # (rows, length)
        tokens = (owners != PADDING).flatten().nonzero()[:, 0]  # (tokens of all segments,), their places in the rows
        segments = [segment for row in rows for segment in row]
        placed = list(zip(segments, accumulate((len(segment.ids) for segment in segments), initial=0), strict=False))
        joined: list[list[Tensor]] = []  # per layer keys and values, (rows * length, heads, head_dim)
        for batch in packed(placed, begin, TOKENS_AT_ONCE.get(self.device.type, TOKENS_AT_ONCE["cuda"])):
            ids, where, owner, _ = self._side_by_side([[segment for segment, _ in row] for row in batch])
            context = _repeated(prefix, len(batch))
            self._read(self.decoder.stack, context, ids, where, owner)
            order = [first + i for row in batch for segment, first in row for i in range(len(segment.ids))]
            destination, source = tokens[order], (owner != PADDING).flatten()
            for number, layer in enumerate(context.cache.layers):
                parts = [side[:, :, begin:].transpose(1, 2).flatten(0, 1) for side in (layer.keys, layer.values)]
                if number == len(joined):
                    joined.append([part.new_zeros(owners.numel(), *part.shape[1:]) for part in parts])
                for whole, part in zip(joined[number], parts, strict=True):
                    whole[destination] = part[source]
        context = _repeated(prefix, len(rows))
        for number in range(len(joined)):
            keys, values = joined.pop(0)
            context.cache.update(*(side.unflatten(0, owners.shape).transpose(1, 2) for side in (keys, values)), number)
        tables = zip((context.positions, context.owners, context.bias), (positions, owners, bias), strict=True)
        return _Context(context.cache, *(torch.cat(pair, 1) for pair in tables))

    def _side_by_side(self, rows: Sequence[Sequence[Segment]]) -> list[Tensor]:
        """Ids, positions, owners and biases of segments side by side, padded on the right, (rows, length) each."""
        length = max(sum(len(segment.ids) for segment in row) for row in rows)
        ids, positions = torch.zeros(2, len(rows), length, dtype=torch.long)
        owners, bias = torch.full_like(ids, PADDING), torch.zeros(len(rows), length, dtype=torch.float64)
        for number, row in enumerate(rows):
            at = 0
            for owner, segment in enumerate(row, 1):
                place = (number, slice(at, at + len(segment.ids)))
                ids[place] = torch.tensor(segment.ids)
                positions[place] = segment.start + torch.arange(len(segment.ids))
                owners[place], bias[place] = owner, segment.bias
                at += len(segment.ids)
        bias = bias.to(torch.promote_types(self.dtype, torch.float32))
        return [table.to(self.device) for table in (ids, positions, owners, bias)]


def _repeated(context: _Context, rows: int) -> _Context:
    """The context of one row, for `rows` rows."""
    cache = DynamicCache()  # without a config, which would make it drop the keys behind a sliding window
    for number, layer in enumerate(context.cache.layers):
        cache.update(*(side.expand(rows, -1, -1, -1) for side in (layer.keys, layer.values)), number)
    return _Context(cache, *(table.expand(rows, -1) for table in (context.positions, context.owners, context.bias)))


_Packed = list[tuple[Segment, int]]  # the segments of a row, each with its place


def packed(placed: Sequence[tuple[Segment, int]], begin: int, tokens: int) -> Iterator[list[_Packed]]:
    """Batches of rows of segments, of at most `tokens` tokens with `begin` of the prefix in each row.

    The longest segment of a batch decides the length of its rows, and shorter ones fill what is left (first fit
    decreasing): segments of one length have a row each, and others leave little padding.
    """
    batch: list[_Packed] = []
    room: list[int] = []  # what is left of each row
    length = 0
    for segment, place in sorted(placed, key=lambda pair: len(pair[0].ids), reverse=True):
        size = len(segment.ids)
        row = next((number for number, left in enumerate(room) if size <= left), None)
        if row is None:
            if batch and (len(batch) + 1) * (begin + length) > tokens:
                yield batch
                batch, room = [], []
            length = length if batch else size
            row = len(batch)
            batch.append([])
            room.append(length)
        batch[row].append((segment, place))
        room[row] -= size
    yield batch


# ---- what both engines share ---------------------------------------------------------------------------------------


def rows_of(questions: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The numbers of the rows of `questions`, one question after the other."""
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return [starts[number] + row for number in questions for row in range(counts[number])]


def require_mask_of_numbers(decoder: Decoder, engine: str) -> None:
    if decoder.backend not in BACKENDS:
        raise DataError(
            f"{engine} adds numbers to attention scores, which the backend {decoder.backend!r} does not support: load "
            "the model with attn='sdpa', or use engine='reference'"
        )


def for_layers(decoder: Decoder, make: Callable[[int | None], Any]) -> Any:
    """The masks `make(window)` in the form that the layer stack takes: one, or one for each type of layer.

    transformers would measure a sliding window along the cache, where segments lie side by side.
    """
    window = getattr(decoder.config, "sliding_window", None)
    made = {kind: make(window if kind == SLIDING else None) for kind in sorted(set(decoder.layer_types))}
    return made if len(made) > 1 else next(iter(made.values()))


def additive(allowed: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, q, k) bool, and a bias that broadcasts to it -> the mask that eager and sdpa add, (rows, 1, q, k)."""
    return bias.to(dtype).expand(allowed.shape).masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


@contextmanager
def states_changed(decoder: Decoder, layer: int | None, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """For the block, the output of `layer`, (rows, q, dim), goes through `change`. None: no layer."""
    if layer is None:
        yield
        return

    def hook(module: nn.Module, args: tuple, output: Any):
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    handle = decoder.layers[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def averaged(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """(rows, q, dim): each row is replaced by the mean over the rows of its question."""
    return torch.cat([rows.mean(0, keepdim=True).expand_as(rows) for rows in hidden.split(list(counts))])


def last_logits(output: Any) -> Tensor:
    """(rows, vocab), at least in float32: half precision is too coarse to add up log-probabilities."""
    logits = output.logits[:, -1]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
