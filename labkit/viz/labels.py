"""Checked arrays and readable tokens: what every figure of queries and keys begins with. Needs numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.attention.plain import clean, plain_array
from labkit.errors import MaskError


def quoted(token: str) -> str:
    """A token in running words."""
    return f'"{clean(token).strip(" ") or clean(token)}"'


def percent(share: float) -> str:
    """A probability with enough digits to tell it apart from 0 and from 1."""
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:.1%}" if 0 < share < 0.0995 or 0.99 <= share < 0.9995 else f"{share:.0%}"


def token_labels(tokens: Sequence[str] | None, q_len: int, kv_len: int) -> tuple[list[str], list[str]]:
    """The tokens of the queries and of the keys; the queries are the last `q_len`. None: their positions."""
    if isinstance(tokens, str):
        raise MaskError(f"tokens must be a list of tokens, not one text: pass {tokens!r}.split() or the tokenizer's")
    labels = [str(i) for i in range(kv_len)] if tokens is None else [str(token) for token in tokens]
    if len(labels) != kv_len:
        raise MaskError(f"{len(labels)} tokens were given for {kv_len} keys: one token for each key")
    return labels[kv_len - q_len :], labels


def bool_grid(cells, what: str = "cells") -> np.ndarray:
    """`cells` as a bool array (q_len, kv_len), True = may attend. Takes tensors, arrays and lists; bool, or 0 and 1.

    Raises:
        MaskError: anything else; the message says what was given.
    """
    if hasattr(cells, "dense"):
        raise MaskError(f"{what} must be a grid of True and False: pass `mask.dense(n)` rather than the mask {cells!r}")
    array = plain_array(cells, what)
    if array.dtype.kind not in "bui" or not np.isin(array, (0, 1)).all():
        raise MaskError(f"{what} must be True or False (or 1 and 0) in every cell: for weights use attention_figure")
    if array.ndim != 2 or array.size == 0:
        raise MaskError(f"{what} must have shape (queries, keys), not {array.shape}: of a batched mask pick one row")
    if array.shape[0] > array.shape[1]:
        raise MaskError(f"{what} have {array.shape[0]} queries and {array.shape[1]} keys: one key for each query")
    return array.astype(bool)


def weight_grids(weights, what: str = "weights") -> np.ndarray:
    """`weights` as floats (heads, q_len, kv_len), from (q_len, kv_len) or (heads, q_len, kv_len).

    Raises:
        MaskError: NaN (a row without any key), negative numbers (scores before their softmax), or another shape.
    """
    array = plain_array(weights, what)
    if array.dtype.kind not in "fbui":
        raise MaskError(f"{what} must be numbers, not {array.dtype}")
    array = array.astype(float)
    array = array[None] if array.ndim == 2 else array
    if array.ndim != 3 or 0 in array.shape:
        raise MaskError(
            f"{what} must have shape (queries, keys) or (heads, queries, keys), not {array.shape}: "
            "pick one layer and one sentence first"
        )
    if np.isnan(array).any():
        head, query, _ = np.argwhere(np.isnan(array))[0]
        raise MaskError(f"{what} hold NaN (head {head}, query {query}): did a mask leave that query without any key?")
    if (array < 0).any() or np.isinf(array).any():
        raise MaskError(f"{what} must be at least 0 and finite, like the output of a softmax: scores are not weights")
    return array


def future_of(q_len: int, kv_len: int) -> np.ndarray:
    """Bool (q_len, kv_len): the keys after each query."""
    return np.triu(np.ones((q_len, kv_len), dtype=bool), k=kv_len - q_len + 1)
