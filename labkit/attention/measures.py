"""What an attention map does, in one number: where it attends, how sharply, how far, and how much of it is the future.

Every measure takes weights of shape (..., q, k), such as `attention_maps(...).weights` (layers, heads, q, k), and gives
one number per map, shape (...): the mean over its queries. The queries are the last q of the k positions.

    future_mass(maps.weights)[3, 2]                      # layer 3, head 2: the share of its attention on later tokens

Attention shows where a head attends, not what the model's answer rests on (Jain and Wallace 2019, "Attention is not
Explanation"; Wiegreffe and Pinter 2019, "Attention is not not Explanation").
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from labkit.attention.plain import weight_array
from labkit.errors import MaskError


def entropy(weights) -> np.ndarray:
    """How widely a query spreads its attention: -sum w ln w, in nats. 0: all on one key; ln k: evenly on all k keys.

    Used to tell broad heads from focused ones by Clark et al. 2019, "What Does BERT Look At?".
    """
    # 0 ln 0 is 0; adding 0.0 turns -0.0 into 0.
    return _per_map(weights, lambda w: -(w * np.log(w, out=np.zeros_like(w), where=w > 0)).sum(-1).mean() + 0.0)


def mean_distance(weights) -> np.ndarray:
    """How many tokens away a query attends on average, on either side: sum w |key - query|.

    Source: Vig and Belinkov 2019, "Analyzing the Structure of Attention in a Transformer Language Model".
    """
    return _per_map(weights, lambda w: (w * np.abs(_offsets(w))).sum(-1).mean())


def future_mass(weights) -> np.ndarray:
    """The share of attention above the diagonal, on tokens after the query: 0 for every causal map."""
    return _per_map(weights, lambda w: w[_offsets(w) > 0].sum() / len(w))


def first_token_mass(weights) -> np.ndarray:
    """The mean weight on the first key, over the queries after it: near 1 for a head parked on an attention sink.

    Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks". The first query is left out: a
    causal one has no other key.
    """
    if weight_array(weights).shape[-1] < 2:
        raise MaskError("first_token_mass needs a query after the first token, and this map has one token")
    return _per_map(weights, lambda w: w[_offsets(w)[:, 0] < 0, 0].mean())


def _per_map(weights, measure: Callable[[np.ndarray], float]) -> np.ndarray:
    """`measure` of each map, one at a time in float64: many maps of a long text would not fit so into memory."""
    maps = weight_array(weights)
    flat = maps.reshape(-1, *maps.shape[-2:])
    return np.array([measure(weights.astype(np.float64)) for weights in flat]).reshape(maps.shape[:-2])


def _offsets(w: np.ndarray) -> np.ndarray:
    """The position of each key minus that of each query, (q, k): above 0 in the future."""
    q, k = w.shape
    return np.arange(k)[None, :] - np.arange(k - q, k)[:, None]
