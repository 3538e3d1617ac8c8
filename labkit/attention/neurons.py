"""Queries and keys behind the attention maps of a model: the vectors whose products the softmax was taken of.

    maps, queries, keys = neuron_maps(labkit.load("gpt2-mini"), "the cat sat", masks.bidirectional())
    queries[layer][head] @ keys[layer][head].T     # the scores, times the square root of the vectors' length

They are taken where the attention computation begins (transformers' attention interface), after rotary embedding and
query-key norms, so the same few lines serve every family; and they are checked to explain the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from labkit.attention.maps import AttentionMaps, attention_maps
from labkit.decoder.anatomy import find_decoder
from labkit.errors import ModelError

TOLERANCE = 0.002  # between a weight and what its vectors give; the maps are float16, exact to 0.0005
TOLERANCE_OF_HALF_PRECISION = 0.03  # where scores were rounded to bfloat16 or float16 before their softmax


def neuron_maps(
    lm, text, mask=None, *, layers: Sequence[int] | None = None
) -> tuple[AttentionMaps, Float32[np.ndarray, "layers heads query dim"], Float32[np.ndarray, "layers heads key dim"]]:
    """(weights, queries, keys) of every layer and head of a model on one text; arguments as `attention_maps`.

    Queries are scaled so that `q @ k / sqrt(dim)` is the score before the mask, whatever the model's own scale is.
    Heads that share their keys (grouped queries) have the same ones.

    Raises:
        MaskError: as `attention_maps`. ModelError: an attention that does not go through transformers'
            interface, or one whose weights are not the softmax of the masked products alone (a softcap that
            bites, attention sinks, a position bias).
    """
    attentions = find_decoder(lm.model).attentions
    with _eager_watched() as inputs:
        attention = attention_maps(lm, text, mask, layers=layers)
    queries, keys = [], []
    for weights, i in zip(attention.weights, attention.layers, strict=True):
        if attentions[i] not in inputs:
            raise ModelError(
                f"{lm.name}: layer {i} ({type(attentions[i]).__name__}) computes its attention by itself, so its "
                "queries and keys cannot be taken; attention_maps shows its weights"
            )
        query, key, mask_of_scores, scaling = inputs[attentions[i]]
        q = query[0].float().cpu()  # (heads, q, dim)
        q = q if scaling is None else q * (scaling * q.shape[-1] ** 0.5)
        k = key[0].float().cpu().repeat_interleave(len(q) // key.shape[1], dim=0)  # (heads, k, dim)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # (heads, q, k)
        if mask_of_scores is not None:
            scores = scores + mask_of_scores[0, ..., : scores.shape[-1]].float().cpu()
        gap = float((scores.softmax(-1) - torch.from_numpy(weights.astype(np.float32))).abs().max())
        if gap > (TOLERANCE if query.dtype.itemsize >= 4 else TOLERANCE_OF_HALF_PRECISION):
            raise ModelError(
                f"{lm.name}, layer {i}: the attention weights are not the softmax of query times key (they differ by "
                f"up to {gap:.2g}): this model adds something in between, such as a softcap or attention sinks, which "
                "a neuron view cannot show; use the head view"
            )
        queries.append(q.numpy())
        keys.append(k.numpy())
    return attention, np.stack(queries), np.stack(keys)


@contextmanager
def _eager_watched() -> Iterator[dict[nn.Module, tuple[Tensor, Tensor, Tensor | None, float | None]]]:
    """(query, key, mask, scaling) that each module last gives to eager attention, which computes what it always does.

    Shapes: (1, heads, q, dim), (1, key heads, k, dim), (1, 1 or heads, q, k).
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inputs: dict[nn.Module, tuple] = {}

    def watch(module, query, key, value, attention_mask, *args, **kwargs):
        inputs[module] = (query, key, attention_mask, kwargs.get("scaling"))
        for kind in type(module).__mro__:  # the function that this module would have used
            if function := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None):
                return function(module, query, key, value, attention_mask, *args, **kwargs)
        raise ModelError(f"{type(module).__name__} has no eager attention that labkit can find")

    ALL_ATTENTION_FUNCTIONS["eager"] = watch  # what eager modules look up before they fall back to their own function
    try:
        yield inputs
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]
