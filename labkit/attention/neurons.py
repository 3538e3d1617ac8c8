"""Queries and keys behind the attention maps of a model: the vectors whose products the softmax was taken of.

    maps = neuron_maps(labkit.load("gpt2-mini"), "the cat sat", masks.bidirectional())
    maps.queries[layer][head] @ maps.keys[layer][head].T     # the scores, times the square root of the vectors' length

They are taken at the door of the attention computation itself (transformers' attention interface), after rotary
embedding and query-key norms, so the same few lines serve every family; and they are checked to explain the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.decoder.anatomy import find_decoder
from labkit.errors import ModelError

__all__ = ["NeuronMaps", "neuron_maps"]

TOLERANCE = 0.002  # between a weight and what its vectors give; the maps are float16, exact to 0.0005
TOLERANCE_OF_HALF_PRECISION = 0.03  # where scores were rounded to bfloat16 or float16 before their softmax


@dataclass(frozen=True, eq=False)
class NeuronMaps:
    """Attention weights of one text with the vectors that they come from.

    Attributes:
        attention: the weights, (layers, heads, queries, keys), with tokens, layers and mask.
        queries: (layers, heads, queries, dim), scaled so that `q @ k / sqrt(dim)` is the score before the mask,
            whatever the model's own scale is.
        keys: (layers, heads, keys, dim); heads that share their keys (grouped queries) show the same ones.
    """

    attention: AttentionMaps
    queries: Float32[np.ndarray, "layers heads query dim"]
    keys: Float32[np.ndarray, "layers heads key dim"]


def neuron_maps(lm, text, mask=None, *, layers: Sequence[int] | None = None) -> NeuronMaps:
    """Queries, keys and weights of every layer and head of a model on one text; arguments as `attention_maps`.

    Raises:
        MaskError: as `attention_maps`. ModelError: an attention that does not go through transformers'
            interface, or one whose weights are not the softmax of the masked products alone (a softcap that
            bites, attention sinks, a position bias).
    """
    attentions = find_decoder(lm.model).attentions
    with _door_watched(set(attentions)) as seen:
        attention = attention_maps(lm, text, mask, layers=layers)
    queries, keys = [], []
    for weights, i in zip(attention.weights, attention.layers, strict=True):
        if attentions[i] not in seen:
            raise ModelError(
                f"{lm.name}: layer {i} ({type(attentions[i]).__name__}) computes its attention by itself, so its "
                "queries and keys cannot be taken; attention_maps shows its weights"
            )
        q, k = seen[attentions[i]].vectors(weights.shape[0])
        tolerance = TOLERANCE if seen[attentions[i]].exact else TOLERANCE_OF_HALF_PRECISION
        _require_that_they_explain(weights, q, k, seen[attentions[i]].mask, tolerance, f"{lm.name}, layer {i}")
        queries.append(q.numpy())
        keys.append(k.numpy())
    return NeuronMaps(attention, np.stack(queries), np.stack(keys))


@dataclass(frozen=True)
class _Seen:
    """What one attention module handed over: query (heads, q, dim), key (kv_heads, k, dim), mask (1 or heads, q, k)."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scaling: float
    exact: bool  # computed in float32 or better

    def vectors(self, heads: int) -> tuple[Tensor, Tensor]:
        """Queries and keys (heads, seq, dim), so scaled that q @ k / sqrt(dim) is the score."""
        dim = self.query.shape[-1]
        return self.query * (self.scaling * dim**0.5), self.key.repeat_interleave(heads // len(self.key), dim=0)


@contextmanager
def _door_watched(modules: set[nn.Module]) -> Iterator[dict[nn.Module, _Seen]]:
    """What each of these modules last handed to eager attention while the block ran; the computation is its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: dict[nn.Module, _Seen] = {}

    def watch(module, query, key, value, attention_mask, *args, **kwargs):
        if module in modules and len(query) == 1:
            scaling = kwargs.get("scaling")
            seen[module] = _Seen(
                query[0].detach().float().cpu(),
                key[0].detach().float().cpu(),
                None if attention_mask is None else attention_mask[0].detach().float().cpu(),
                query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                exact=torch.finfo(query.dtype).bits >= 32,
            )
        return _eager_of(module)(module, query, key, value, attention_mask, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["eager"] = watch  # what eager modules look up before they fall back to their own function
    try:
        yield seen
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]


def _eager_of(module: nn.Module) -> Callable:
    """The function that this module would have used."""
    for kind in type(module).__mro__:
        if found := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None):
            return found
    raise ModelError(f"{type(module).__name__} has no eager attention that labkit can find")


def _require_that_they_explain(
    weights: np.ndarray, q: Tensor, k: Tensor, mask: Tensor | None, tolerance: float, where: str
) -> None:
    """softmax(q @ k / sqrt(dim) + mask) must be the weights (heads, q, k), to the precision they were computed in."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask[..., : scores.shape[-1]]
    off = float((scores.softmax(-1) - torch.from_numpy(weights.astype(np.float32))).abs().max())
    if off > tolerance:
        raise ModelError(
            f"{where}: the attention weights are not the softmax of query times key (they differ by up to {off:.2g}): "
            "this model adds something in between, such as a softcap or attention sinks, which a neuron view cannot "
            "show; use the head view"
        )
