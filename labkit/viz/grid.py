"""What every picture of a query x key grid shares: checked arrays, token labels, sizes, colours, text equivalents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.errors import MaskError

# Okabe and Ito's palette: told apart with every kind of colour vision, and in grey.
ALLOWED = "#0072B2"
MASKED = "#E6E6E6"
DISAGREES = "#D55E00"

SHORT_LABEL = 12  # longer tokens are cut in labels, never in hover text
WORDS_LIMIT = 12  # up to so many tokens the text equivalent names every row


def bool_grid(cells, what: str = "cells") -> np.ndarray:
    """`cells` as a bool array (q_len, kv_len), True = may attend. Takes tensors, arrays and lists; bool, or 0 and 1.

    Raises:
        MaskError: anything else, with a sentence that says what was given.
    """
    if hasattr(cells, "dense"):
        raise MaskError(f"{what} must be a grid of True and False: pass `mask.dense(n)` rather than the mask {cells!r}")
    array = plain_array(cells, what)
    if array.dtype.kind == "f":
        raise MaskError(f"{what} must be True or False, not numbers with a point: for weights use attention_figure")
    if array.dtype.kind not in "bui" or not np.isin(array, (0, 1)).all():
        raise MaskError(f"{what} must be True or False (or 1 and 0) in every cell")
    return _two_dimensional(array.astype(bool), what)


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
    _two_dimensional(array[0], what)
    return array


def token_labels(tokens: Sequence[str] | None, q_len: int, kv_len: int) -> tuple[list[str], list[str]]:
    """The tokens of the queries and of the keys; the queries are the last `q_len`. None: their positions."""
    if isinstance(tokens, str):
        raise MaskError(f"tokens must be a list of tokens, not one text: pass {tokens!r}.split() or the tokenizer's")
    labels = [str(i) for i in range(kv_len)] if tokens is None else [str(token) for token in tokens]
    if len(labels) != kv_len:
        raise MaskError(f"{len(labels)} tokens were given for {kv_len} keys: one token for each key")
    return labels[kv_len - q_len :], labels


def short(token: str) -> str:
    """A token as an axis label: visible white space, at most SHORT_LABEL characters."""
    token = token.replace("\n", "⏎").replace("\t", "⇥")
    token = "␣" * len(token) if token and not token.strip() else token
    return token if len(token) <= SHORT_LABEL else token[: SHORT_LABEL - 1] + "…"


def cell_pixels(n: int, widest: int = 704) -> int:
    """Side of a cell, so that `n` of them are at most `widest` wide and a few are not huge."""
    return max(2, min(44, widest // n))


def label_step(cell: int) -> int:
    """Every how many-th token gets a label, so that labels of 11 pixels do not overlap."""
    return -(-11 // cell)


def mask_in_words(
    cells: np.ndarray, queries: list[str], keys: list[str], title: str | None = None, every_row: bool = True
) -> str:
    """The text equivalent of a picture of a mask, for people who do not see it; of few tokens with every row."""
    future = np.triu(np.ones(cells.shape, dtype=bool), k=cells.shape[1] - cells.shape[0] + 1)
    words = (
        f"{title or 'Attention mask'}: {len(queries)} queries and {len(keys)} keys, {int(cells.sum())} of {cells.size} "
        f"cells allowed, {int((cells & future).sum())} of them in the future."
    )
    if not every_row or len(keys) > WORDS_LIMIT:
        return words
    names, rows = _told_apart(keys), []
    for query, row in zip(names[-len(queries) :], cells, strict=True):
        seen = [key for key, allowed in zip(names, row, strict=True) if allowed]
        rows.append(f"{query} may look at {', '.join(seen) or 'nothing'}.")
    return " ".join([words, *rows])


def attention_in_words(
    weights: np.ndarray, queries: list[str], keys: list[str], title: str | None = None, every_row: bool = True
) -> str:
    """The text equivalent of attention maps (heads, q_len, kv_len): where queries look most, the future's share."""
    heads, q_len, kv_len = weights.shape
    future = np.triu(np.ones((q_len, kv_len), dtype=bool), k=kv_len - q_len + 1)
    words = f"{title or 'Attention weights'}: {heads} head{'s' * (heads > 1)}, {q_len} queries and {kv_len} keys."
    shares = [f"{head[future].sum() / q_len:.0%}" for head in weights]
    words += f" Share of attention on the future: {', '.join(shares)}."
    if not every_row or heads > 1 or kv_len > WORDS_LIMIT:
        return words
    names = _told_apart(keys)
    most = [
        f"{query} looks most at {names[row.argmax()]} ({row.max():.2f})."
        for query, row in zip(names[-q_len:], weights[0], strict=True)
    ]
    return " ".join([words, *most])


def _told_apart(tokens: list[str]) -> list[str]:
    """The tokens in quotes; one that occurs twice also with its position."""
    return [f'"{t}"' if tokens.count(t) == 1 else f'"{t}" ({i})' for i, t in enumerate(tokens)]


def plain_array(array, what: str) -> np.ndarray:
    if hasattr(array, "detach"):  # a tensor, without importing torch
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() else array).numpy()  # numpy has no bfloat16
    try:
        return np.asarray(array)
    except ValueError:
        raise MaskError(f"{what} must be a grid: every row needs the same number of cells") from None


def _two_dimensional(array: np.ndarray, what: str) -> np.ndarray:
    if array.ndim != 2 or array.size == 0:
        raise MaskError(f"{what} must have shape (queries, keys), not {array.shape}: of a batched mask pick one row")
    if array.shape[0] > array.shape[1]:
        raise MaskError(
            f"{what} have {array.shape[0]} queries and {array.shape[1]} keys: there is a key for each query"
        )
    return array
