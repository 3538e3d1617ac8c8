"""The two engines, and the models that can be fused.

The fast engine:

    prefix        read once
    segments      one batch, each behind the prefix and at its own positions; short ones share a row under a mask
    joined        per row: the keys of the prefix, then those of its segments, side by side
    cue, answer   ordinary decoding over the joined cache; log(weight) is added to the scores of a segment's keys

The reference engine reads each row in one piece under a mask of labkit's algebra (`layout.mask_of`), which is easier to
verify: with FlexAttention, compiled on a GPU, or with the attention of the model. Both add the mask as a 4-D tensor.

Sliding windows are measured in positions, not in places in the cache, so they have their usual length in a fused row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from functools import cache, partial
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, DynamicCache

from labkit.decoder.anatomy import CACHE, FULL, SLIDING, Decoder, find_decoder
from labkit.decoder.running import replaced
from labkit.errors import DataError, ModelError
from labkit.fusion.layout import CUE, PADDING, PREFIX, Prompts, Tokens, mask_of

FLEX = "labkit_fusion_flex"  # the name under which transformers finds `_flex_attention`
BACKENDS = ("eager", "sdpa")  # those that take a mask of numbers
# Tokens in one forward pass on a CPU and on a GPU, copies of the prefix included. On a CPU this is small enough for the
# hidden states to stay in its cache, so that the time is linear in the number of segments.
TOKENS_AT_ONCE = 2048, 8192
SHARED_ROW = 128  # tokens: short segments share a row, which needs less padding and fewer copies of the prefix


class Engine:
    """Reads prompts and continues them; the model is only called, never changed.

    Attributes:
        kind: its name in `ENGINES`. counts: how many rows each question has; they are adjacent.
        averaged_layer: the layer whose hidden states the rows of a question share from the cue on; None: none.

    Raises ModelError for a model that cannot be fused, DataError for an attention backend without masks of numbers.
    """

    def __init__(self, kind: str, model: nn.Module, prompts: Prompts, averaged_layer: int | None = None):
        self.kind, self.model, self.prompts, self.decoder = kind, model, prompts, fusable_decoder(model)
        self.averaged_layer, self.counts, self.device = averaged_layer, prompts.counts, model.device
        if kind != "reference" and self.decoder.backend not in BACKENDS:
            raise DataError(
                f"this engine adds numbers to attention scores, which the backend {self.decoder.backend!r} does not "
                "support: load the model with attn='sdpa', or use engine='reference'"
            )

    @property
    def name(self) -> str:
        """What the result reports."""
        flex = "flex, compiled" if self.device.type == "cuda" else "flex"
        paths = {"reference": flex, "dense": "dense", "cacheless": "dense, without cache"}
        return "fast" if self.kind == "fast" else f"reference ({paths[self.kind]})"

    @torch.no_grad()
    def start(self) -> Tensor:
        """Read the prompts, cue included; returns the logits of the first new token, (rows, vocab)."""
        unread = self._prepare(self._table(self.prompts.rows))
        return self._extend(unread, torch.tensor(self.prompts.cue, device=self.device).repeat(len(unread.ids), 1))

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, (rows,); returns the logits of the next one, (rows, vocab)."""
        return self._extend(self.context[:, :0], tokens.to(self.device)[:, None])

    def select(self, questions: Sequence[int]) -> None:
        """Continue with these questions in this order; one may be repeated (beams)."""
        places = torch.arange(sum(self.counts)).split(self.counts)
        rows = torch.cat([places[question] for question in questions]).to(self.device)
        self.counts = [self.counts[question] for question in questions]
        self.context = self.context[rows]
        if self.cache is not None:
            self.cache.batch_select_indices(rows)

    def _prepare(self, table: Tokens) -> Tokens:
        """Set `cache` and `context`, the tokens of the prompts that are in it; returns those to be read with the cue.

        Without a cache (None), all tokens of `context` are read again each time.
        """
        raise NotImplementedError

    def _extend(self, unread: Tokens, ids: Tensor) -> Tensor:
        """Read `unread` and `ids` (rows, new) of cue or answer; returns the logits of the last one, (rows, vocab)."""
        last = self.context.then(unread).positions.amax(-1, keepdim=True)  # (rows, 1), in the longest segment at first
        positions = last + torch.arange(1, ids.shape[1] + 1, device=self.device)  # (rows, new)
        owners, bias = torch.full_like(ids, CUE), unread.bias.new_zeros(ids.shape)
        new = unread.then(Tokens(ids, positions, owners, bias))
        context, self.context = self.context, self.context.then(new)
        if self.cache is None:
            context, new = context[:, :0], self.context
        with ExitStack() as hooks:
            if self.averaged_layer is not None:
                behind = int((new.owners[0] == CUE).sum())  # the tokens of cue and answer, the last ones of each row
                layer = self.decoder.layers[self.averaged_layer]
                hooks.callback(layer.register_forward_hook(partial(self._share, behind)).remove)
            logits = self._read(self.model, context, new, self.cache, logits_to_keep=1).logits[:, -1]
        # Half precision is too coarse to add up log-probabilities.
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _read(self, module: nn.Module, context: Tokens, new: Tokens, cache: DynamicCache | None, **options: Any) -> Any:
        """Call `module` on the tokens `new` behind `context`, whose keys and values are in `cache`."""
        keys = context.then(new)
        allowed = self._allowed(new, keys)  # (rows, new, keys)
        bias = ((new.owners == CUE)[:, :, None] * keys.bias[:, None, :]).to(self.model.dtype)
        window = getattr(self.decoder.config, "sliding_window", None)
        masks = {}
        for kind in set(self.decoder.layer_types):
            # transformers would measure a sliding window along the cache, where segments lie side by side.
            near = new.positions[:, :, None] - keys.positions[:, None, :] < window if kind == SLIDING else True
            mask = bias.masked_fill(~(allowed & near), torch.finfo(bias.dtype).min)
            masks[kind] = mask[:, None]  # (rows, 1, new, keys), added to the attention scores
        with replaced(self.decoder.config, _attn_implementation=FLEX) if self.kind == "reference" else nullcontext():
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

    def _table(self, rows: list[Tokens]) -> Tokens:
        """Rows (tokens,) as one table (rows, tokens) on the model's device, padded on the right."""
        columns = zip(zip(*rows, strict=True), (0, 0, PADDING, 0), strict=True)
        return Tokens(*(pad_sequence(column, True, padding).to(self.device) for column, padding in columns))

    def _share(self, count: int, layer: nn.Module, args: tuple, output: Any) -> Any:
        """Hook of the averaged layer: the rows of a question share the mean of the last `count` states."""
        hidden = output[0] if isinstance(output, tuple) else output  # (rows, tokens, dim)
        shared = hidden.clone()
        for rows in shared.split(self.counts):
            rows[:, -count:] = rows[:, -count:].mean(0)
        return (shared, *output[1:]) if isinstance(output, tuple) else shared


class FastEngine(Engine):
    """Reads the prefix once and the segments as a batch, and joins their keys and values."""

    def _prepare(self, table: Tokens) -> Tokens:
        rows = self.prompts.rows
        segments = [row[row.owners == owner] for row in rows for owner in row.owners.unique() if owner != PREFIX]
        longest = max(SHARED_ROW, *(len(segment.ids) for segment in segments))
        packed: list[Tokens] = []  # rows of adjacent segments, each of them an owner
        for number, segment in enumerate(segments, 1):
            segment = segment._replace(owners=torch.full_like(segment.owners, number))
            if packed and len(packed[-1].ids) + len(segment.ids) <= longest:
                packed[-1] = packed[-1].then(segment)
            else:
                packed.append(segment)
        prefix = table[:1, table.owners[0] == PREFIX]
        begin = prefix.ids.shape[1]
        prefix_cache = DynamicCache()  # a config would make it drop the keys behind a sliding window
        if begin:
            self._read(self.decoder.stack, prefix[:, :0], prefix, prefix_cache)
        at_once = max(1, TOKENS_AT_ONCE[self.device.type == "cuda"] // (begin + longest))
        sides = defaultdict(list)  # by (layer, "keys" or "values"), of all segments, each (tokens, heads, head_dim)
        for first in range(0, len(packed), at_once):
            new = self._table(packed[first : first + at_once])
            cache = _repeated(prefix_cache, len(new.ids))
            self._read(self.decoder.stack, prefix[[0] * len(new.ids)], new, cache)
            for number, layer in enumerate(cache.layers):
                for side in ("keys", "values"):
                    states = getattr(layer, side)[:, :, begin:].transpose(1, 2)  # (rows, tokens, heads, head_dim)
                    sides[number, side].append(states[new.owners != PADDING])
        places = table.owners[:, begin:] != PADDING  # (rows, length), true for the tokens of all segments

        def joined(parts: list[Tensor]) -> Tensor:
            """(rows, heads, length, head_dim)"""
            table = parts[0].new_zeros(*places.shape, *parts[0].shape[1:])
            table[places] = torch.cat(parts)
            return table.transpose(1, 2)

        self.context, self.cache = table, _repeated(prefix_cache, len(rows))
        for number in range(len(sides) // 2):
            self.cache.update(*(joined(sides.pop((number, side))) for side in ("keys", "values")), number)
        return table[:, :0]


def _repeated(cache: DynamicCache, rows: int) -> DynamicCache:
    """A copy of the cache of one row, for `rows` rows."""
    repeated = deepcopy(cache)
    repeated.batch_repeat_interleave(rows)
    return repeated


class ReferenceEngine(Engine):
    """Reads each row of `prompts` in one piece, its prefix included: "reference", "dense" and "cacheless"."""

    def _prepare(self, table: Tokens) -> Tokens:
        self.context, self.cache = table[:, :0], None if self.kind == "cacheless" else DynamicCache()
        return table

    def _allowed(self, new: Tokens, keys: Tokens) -> Tensor:
        """(rows, new, keys) bool: the mask of each row at the places of its tokens."""
        begin = keys.ids.shape[1] - new.ids.shape[1]
        allowed = torch.zeros(*new.ids.shape, keys.ids.shape[1], dtype=torch.bool, device=self.device)
        for cells, owners in zip(allowed, keys.owners, strict=True):
            mask = mask_of(owners[owners >= PREFIX].tolist())
            places = (owners != PADDING).nonzero()[:, 0]
            queries = places[places >= begin]
            cells[queries[:, None] - begin, places] = mask.dense(len(queries), len(places), device=self.device)
        return allowed


def _flex_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """FlexAttention with a mask of numbers; query (rows, heads, q, head_dim) -> (rows, q, heads, head_dim)."""
    if kwargs.get("s_aux") is not None:
        raise ModelError("the reference engine does not support attention sinks: use engine='dense'")
    cap = None if softcap is None else torch.tensor(softcap, device=query.device)  # a plain float does not compile

    @no_type_check
    def score_mod(score, batch, head, q, k):
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score + attention_mask[batch, 0, q, k]

    # Not compiled on a CPU: inductor's C++ does not build for every shape of such a mask (torch 2.13).
    attend = _compiled_flex() if query.device.type == "cuda" else flex_attention
    grouped = query.shape[1] != key.shape[1]
    out = attend(query, key, value, score_mod=score_mod, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(FLEX, _flex_attention)


@cache
def _compiled_flex():
    return torch.compile(flex_attention, dynamic=True)


def fusable_decoder(model: nn.Module) -> Decoder:
    """The decoder of a causal model. Raises ModelError with the reason if the model cannot be fused."""
    decoder = find_decoder(model)
    config = decoder.config
    foreign = set(decoder.layer_types) - {FULL, SLIDING}
    is_bidirectional = decoder.conversion is not None or getattr(config, "is_causal", None) is False
    output = getattr(model, "get_output_embeddings", None)
    reasons = {
        f"its layers of the type {min(foreign, default='')!r} keep no keys that could be joined": foreign,
        "its positions are counted along the row, so segments cannot share positions": (
            getattr(config, "alibi", False) or not decoder.takes_positions
        ),
        "it is bidirectional and cannot generate; if labkit converted it, call labkit.to_causal first": (
            is_bidirectional or getattr(config, "use_bidirectional_attention", None) is True
        ),
        "it has no language-model head": output is None or output() is None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelError(f"{type(model).__name__} cannot be fused: {reason}")
    return decoder
