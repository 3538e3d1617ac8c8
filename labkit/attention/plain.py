"""Tokens as figures show them, and tensors as plain arrays. Needs numpy only."""

from __future__ import annotations

import numpy as np

from labkit.errors import MaskError

SHORT_LABEL = 12  # longer tokens are cut in labels, never in hover text

# Control characters are shown as their pictures, and what is not a character as the replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(32)} | {0x7F: 0x2421, 0xFFFE: 0xFFFD, 0xFFFF: 0xFFFD}
_VISIBLE |= {ord("\n"): "⏎", ord("\t"): "⇥"} | dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


def clean(text: str) -> str:
    """`text` on one line, without control characters."""
    return str(text).translate(_VISIBLE)


def visible(token: str, longest: int = SHORT_LABEL) -> str:
    """A token as it is drawn: without the space before a word, with visible white space where there is no word."""
    token = str(token).replace("\xa0", " ")
    return short(clean(token.strip(" ") or token), longest) or "∅"


def short(token: str, longest: int = SHORT_LABEL) -> str:
    """A clean token as an axis label: visible white space, at most `longest` characters."""
    token = "␣" * len(token) if token and not token.strip() else token
    return token if len(token) <= longest else token[: longest - 1] + "…"


def plain_array(array, what: str) -> np.ndarray:
    """A tensor, array or list as a numpy array."""
    if hasattr(array, "detach"):  # a tensor, without importing torch
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() else array).numpy()  # numpy has no bfloat16
    try:
        return np.asarray(array)
    except ValueError:
        raise MaskError(f"{what} must be a grid: every row needs the same number of cells") from None


def weight_array(weights, what: str = "attention weights", dims: tuple[int, ...] | None = None) -> np.ndarray:
    """Attention weights (..., queries, keys) as an array; `dims`: the numbers of dimensions that are allowed."""
    array = plain_array(weights, what)
    if array.dtype.kind not in "fbui" or array.ndim < 2 or (dims and array.ndim not in dims) or 0 in array.shape:
        raise MaskError(f"{what} must be numbers of shape (..., queries, keys), not {array.dtype} of {array.shape}")
    if array.shape[-2] > array.shape[-1]:
        raise MaskError(f"{what} have {array.shape[-2]} queries and {array.shape[-1]} keys: one key for each query")
    if not np.isfinite(array).all() or (array < 0).any():
        raise MaskError(
            f"{what} must be at least 0 and finite, like the output of a softmax: scores are not weights, and NaN "
            "means that a mask left a query without any key"
        )
    return array
