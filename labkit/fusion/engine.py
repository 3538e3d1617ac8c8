"""The two engines, and the models that can be fused.

The fast engine:

    prefix        read once
    segments      one batch, each behind the prefix and at its own positions; short segments share a row under a mask
    joined        per row: the keys of the prefix, then those of its segments, side by side
    cue, answer   ordinary decoding over the joined cache; log(weight) is added to the scores of a segment's keys

The reference engine reads each row in one piece under a mask of labkit's algebra (`layout.mask_of`), which is easier to
verify: with FlexAttention (mask_mod and score_mod), compiled on a GPU, or with a 4-D tensor of numbers.

Sliding windows are measured in positions, not in places in the cache, so they have their usual length in a fused row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, DynamicCache

from labkit.decoder.anatomy import CACHE, FULL, SLIDING, Decoder, decoder_or_none
from labkit.decoder.limits import require_positions
from labkit.errors import DataError, ModelError
from labkit.fusion.layout import CUE, PADDING, PREFIX, Prompts, Tokens, mask_of
from labkit.masks import block_mask_of

FLEX = "labkit_fusion_flex"  # the name under which transformers finds `_flex_attention`
BACKENDS = ("eager", "sdpa")  # those that take a mask of numbers
# Tokens in one forward pass, copies of the prefix included. On a CPU this is small enough for the hidden states to stay
# in its cache, so that the time is linear in the number of segments.
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 8192}


class Engine:
    """Reads prompts and continues them; the model is only called, never changed.

    Attributes:
        name: what the result reports. counts: how many rows each question has; they are adjacent.
        averaged_layer: the layer whose hidden states the rows of a question share from the cue on; None: none.

    Raises ModelError for a model that cannot be fused, DataError for an attention backend without masks of numbers.
    """

    name, rendering = "fast", "dense"

    def __init__(self, model: nn.Module, prompts: Prompts, averaged_layer: int | None = None):
        self.model, self.prompts, self.decoder = model, prompts, fusable_decoder(model)
        self.averaged_layer, self.counts, self.device = averaged_layer, prompts.counts, model.device
        if self.rendering == "dense" and self.decoder.backend not in BACKENDS:
            raise DataError(
                f"this engine adds numbers to attention scores, which the backend {self.decoder.backend!r} does not "
                "support: load the model with attn='sdpa', or use engine='reference'"
            )

    @torch.no_grad()
    def start(self) -> Tensor:
        """Read the prompts, cue included; returns the logits of the first new token, (rows, vocab)."""
        rows = self.prompts.rows
        positions = [int(row.positions.max()) + 1 for row in rows]  # of the cue, behind the longest segment
        self.next_position = torch.tensor(positions, device=self.device)  # (rows,)
        self._prepare(rows)
        self.end = self.context.ids.shape[1] + self.unread.ids.shape[1]  # the cue begins at this place of all rows
        return self._extend(torch.tensor(self.prompts.cue, device=self.device).expand(len(rows), -1))

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, (rows,); returns the logits of the next one, (rows, vocab)."""
        return self._extend(tokens.to(self.device)[:, None])

    def select(self, questions: Sequence[int]) -> list[int]:
        """Continue with these questions in this order; one may be repeated (beams). Returns their rows."""
        places = torch.arange(sum(self.counts)).split(self.counts)
        rows = torch.cat([places[question] for question in questions]).to(self.device)
        self.counts = [self.counts[question] for question in questions]
        self.next_position = self.next_position[rows]
        self.context, self.unread = self.context[rows], self.unread[rows]
        if self.cache is not None:
            self.cache.batch_select_indices(rows)
        return rows.tolist()

    def _prepare(self, rows: list[Tokens]) -> None:
        """Set `context`, the tokens in `cache`, and `unread`, the tokens to be read with the cue."""
        raise NotImplementedError

    def _extend(self, ids: Tensor) -> Tensor:
        """Read `ids` (rows, new) of cue or answer; returns the logits of the last one, (rows, vocab)."""
        positions = self.next_position[:, None] + torch.arange(ids.shape[1], device=self.device)  # (rows, new)
        self.next_position = self.next_position + ids.shape[1]
        owners, bias = torch.full_like(ids, CUE), self.unread.bias.new_zeros(ids.shape)
        new = self.unread.then(Tokens(ids, positions, owners, bias))
        length = new.ids.shape[1]
        with self._averaged(min(length, self.context.ids.shape[1] + length - self.end)):
            logits = self._read(self.model, self.context, new, self.cache, logits_to_keep=1).logits[:, -1]
        if self.cache is None:
            self.unread = new
        else:
            self.context, self.unread = self.context.then(new), new[:, :0]
        # Half precision is too coarse to add up log-probabilities.
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _read(self, module: nn.Module, context: Tokens, new: Tokens, cache: DynamicCache | None, **options: Any) -> Any:
        """Call `module` on the tokens `new` behind `context`, whose keys and values are in `cache`."""
        keys = context.then(new)
        allowed = self._allowed(new, keys)  # (rows, new, keys)
        bias = (new.owners == CUE)[:, :, None] * keys.bias[:, None, :]
        window = getattr(self.decoder.config, "sliding_window", None)
        masks = {}
        for kind in sorted(set(self.decoder.layer_types)):
            # transformers would measure a sliding window along the cache, where segments lie side by side.
            near = new.positions[:, :, None] - keys.positions[:, None, :] < window if kind == SLIDING else True
            masks[kind] = self._mask(allowed & near, bias)
        return module(
            input_ids=new.ids,
            attention_mask=masks if len(masks) > 1 else masks[kind],
            position_ids=new.positions,
            use_cache=cache is not None,
            **{CACHE: cache},
            **options,
        )

    def _allowed(self, new: Tokens, keys: Tokens) -> Tensor:
        """(rows, new, keys) bool: a token attends to earlier tokens of its owner and of the prefix.

        A token of cue or answer attends to all earlier tokens but padding.
        """
        queries, owners = new.owners[:, :, None], keys.owners[:, None, :]
        places = torch.arange(owners.shape[-1], device=self.device)
        earlier = places <= places[-queries.shape[1] :, None]  # (new, keys)
        return earlier & ((queries == owners) | (owners == PREFIX) | ((queries == CUE) & (owners != PADDING)))

    def _mask(self, allowed: Tensor, bias: Tensor) -> Any:
        """(rows, new, keys) each -> the mask that eager and sdpa add, (rows, 1, new, keys)."""
        dtype = self.model.dtype
        return bias.to(dtype).masked_fill(~allowed, torch.finfo(dtype).min)[:, None]

    def _table(self, rows: list[Tokens]) -> Tokens:
        """Rows (tokens,) as one table (rows, tokens) on the model's device, padded on the right."""
        columns = zip(zip(*rows, strict=True), (0, 0, PADDING, 0), strict=True)
        table = Tokens(*(pad_sequence(column, True, padding).to(self.device) for column, padding in columns))
        return table._replace(bias=table.bias.to(torch.promote_types(self.model.dtype, torch.float32)))

    @contextmanager
    def _averaged(self, count: int) -> Iterator[None]:
        """For the block, the rows of a question share the mean of the last `count` states of the averaged layer."""
        if self.averaged_layer is None:
            yield
            return

        def hook(module: nn.Module, args: tuple, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output  # (rows, tokens, dim)
            shared = hidden.clone()
            for rows in shared.split(self.counts):
                rows[:, -count:] = rows[:, -count:].mean(0)
            return (shared, *output[1:]) if isinstance(output, tuple) else shared

        handle = self.decoder.layers[self.averaged_layer].register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


class FastEngine(Engine):
    """Reads the prefix once and the segments as a batch, and joins their keys and values."""

    def _prepare(self, rows: list[Tokens]) -> None:
        segments = [row[row.owners == owner] for row in rows for owner in row.owners.unique() if owner != PREFIX]
        # Segments of several questions can share a row of the batch, so each is an owner of its own.
        segments = [s._replace(owners=torch.full_like(s.owners, n)) for n, s in enumerate(segments, 1)]
        prefix = self._table(rows[:1])[:, rows[0].owners == PREFIX]
        begin, prefix_cache = prefix.ids.shape[1], DynamicCache()
        if begin:
            self._read(self.decoder.stack, prefix[:, :0], prefix, prefix_cache)
        whole = self._table(rows)[:, begin:]  # (rows, length)
        lengths = [len(segment.ids) for segment in segments]
        places = (whole.owners != PADDING).flatten().nonzero()[:, 0].split(lengths)  # of each segment's tokens
        layers: list[list[Tensor]] = []  # keys and values of each layer, (rows * length, heads, head_dim)
        packed_rows = packed(lengths)
        at_once = max(1, TOKENS_AT_ONCE.get(self.device.type, TOKENS_AT_ONCE["cuda"]) // (begin + max(lengths)))
        for first in range(0, len(packed_rows), at_once):
            batch = packed_rows[first : first + at_once]
            new = self._table([functools.reduce(Tokens.then, [segments[n] for n in row]) for row in batch])
            cache = _copies(prefix_cache, len(batch))
            self._read(self.decoder.stack, prefix[[0] * len(batch)], new, cache)
            source, destination = new.owners.flatten() != PADDING, torch.cat([places[n] for row in batch for n in row])
            for number, layer in enumerate(cache.layers):
                parts = [side[:, :, begin:].transpose(1, 2).flatten(0, 1) for side in (layer.keys, layer.values)]
                if number == len(layers):
                    layers.append([part.new_zeros(whole.ids.numel(), *part.shape[1:]) for part in parts])
                for side, part in zip(layers[number], parts, strict=True):
                    side[destination] = part[source]
        self.cache = _copies(prefix_cache, len(rows))
        for number in range(len(layers)):
            sides = layers.pop(0)  # frees each layer as soon as it is in the cache
            self.cache.update(*(side.unflatten(0, whole.ids.shape).transpose(1, 2) for side in sides), number)
        self.context, self.unread = self._table(rows), whole[:, :0]


def packed(lengths: Sequence[int]) -> list[list[int]]:
    """Rows of segments, by number, none longer than the longest segment (first fit decreasing)."""
    rows: list[list[int]] = []
    for segment in sorted(range(len(lengths)), key=lambda segment: -lengths[segment]):
        room = max(lengths) - lengths[segment]
        row = next((row for row in rows if sum(lengths[other] for other in row) <= room), None)
        if row is None:
            rows.append([segment])
        else:
            row.append(segment)
    return rows


def _copies(cache: DynamicCache, rows: int) -> DynamicCache:
    """The cache of one row, for `rows` rows."""
    copies = DynamicCache()  # without a config, which would make it drop the keys behind a sliding window
    for number, layer in enumerate(cache.layers):
        copies.update(*(side.expand(rows, -1, -1, -1) for side in (layer.keys, layer.values)), number)
    return copies


class ReferenceEngine(Engine):
    """Reads each row of `prompts` in one piece, its prefix included.

    Args:
        rendering: "flex" or "dense". cached: keep keys and values; otherwise everything is read again for each token.
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
        self.rendering, self.cached = rendering, cached
        super().__init__(model, prompts, averaged_layer)
        AttentionInterface.register(FLEX, _flex_attention)
        compiled = ", compiled" if rendering == "flex" and model.device.type == "cuda" else ""
        self.name = f"reference ({rendering}{compiled}{'' if cached else ', without cache'})"

    def select(self, questions: Sequence[int]) -> list[int]:
        rows = super().select(questions)
        self.masks = [self.masks[row] for row in rows]
        return rows

    def _prepare(self, rows: list[Tokens]) -> None:
        self.unread = self._table(rows)
        self.context = self.unread[:, :0]
        self.cache = DynamicCache() if self.cached else None
        self.masks = [mask_of(row.owners.tolist()) for row in rows]

    def _allowed(self, new: Tokens, keys: Tokens) -> Tensor:
        """(rows, new, keys) bool: the mask of each row at the places of its tokens; padding attends to itself."""
        length = keys.ids.shape[1]
        begin = length - new.ids.shape[1]
        allowed = torch.eye(length, dtype=torch.bool, device=self.device)[begin:].repeat(len(keys.ids), 1, 1)
        for cells, mask, owners in zip(allowed, self.masks, keys.owners, strict=True):
            places = (owners != PADDING).nonzero()[:, 0]
            queries = places[places >= begin]
            cells[queries[:, None] - begin, places] = mask.dense(len(queries), len(places), device=self.device)
        return allowed

    def _read(self, *tokens: Any, **options: Any) -> Any:
        with attention_backend(self.model, FLEX) if self.rendering == "flex" else nullcontext():
            return super()._read(*tokens, **options)

    def _mask(self, allowed: Tensor, bias: Tensor) -> Any:
        """(rows, new, keys) each: for "flex" a BlockMask that carries the bias as its score_mod."""
        if self.rendering == "dense":
            return super()._mask(allowed, bias)
        bias = bias.to(self.model.dtype)

        @no_type_check
        def score_mod(score, batch, head, query, key):
            return score + bias[batch, query, key]

        block_mask = block_mask_of(allowed)
        block_mask.labkit_score_mod = score_mod
        block_mask.ndim = 4  # GPT-2 reads this attribute of its mask
        return block_mask


@contextmanager
def attention_backend(model: nn.Module, name: str) -> Iterator[None]:
    """For the block, use the attention backend `name`; afterwards, also after an exception, the previous one."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _flex_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """FlexAttention under a mask of `_mask`; query (rows, heads, q, head_dim) -> (rows, q, heads, head_dim)."""
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


def fusable_decoder(model: nn.Module) -> Decoder:
    """The decoder of a causal model. Raises ModelError with the reason if the model cannot be fused."""
    decoder, reason = decoder_or_none(model), None
    config = decoder.config if decoder else None
    if decoder is None:
        reason = "it contains no decoder that labkit knows"
    elif foreign := sorted(set(decoder.layer_types) - {FULL, SLIDING}):
        reason = f"it has layers of the type {foreign[0]!r}, which keep no keys that could be joined"
    elif getattr(config, "alibi", False) or "position_ids" not in inspect.signature(decoder.stack.forward).parameters:
        reason = "its positions are counted along the row, so segments cannot share positions"
    elif decoder.conversion is not None:
        reason = "it is bidirectional and cannot generate: call labkit.to_causal first"
    elif getattr(config, "is_causal", None) is False or getattr(config, "use_bidirectional_attention", None) is True:
        reason = "its configuration declares it bidirectional, so it cannot generate"
    elif not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        reason = "it has no language-model head"
    if reason is not None:
        raise ModelError(f"{type(model).__name__} cannot be fused: {reason}")
    return decoder


def require_positions_for(model: nn.Module, prompts: Prompts, new_tokens: int) -> None:
    """Raise DataError if a position of the prompts or of an answer exceeds the model's limit."""
    last = max(int(row.positions.max()) for row in prompts.rows) + len(prompts.cue) + new_tokens
    cure = "use fewer or shorter paraphrases, fewer examples or new tokens, or a method that restarts positions"
    require_positions(last, fusable_decoder(model).config, refusal=DataError, cure=cure)
