"""What the mask playground keeps of a mask: a small tree for the expression, bits for the painted cells.

A tree is a list, plain JSON, of a factory's name and its arguments:

    causal()                            ["causal"]
    prefix(3) & ~padding([9])           ["&", ["prefix", 3], ["~", ["padding", [9], "right"]]]
    from_dense(a 12 x 12 grid)          ["from_dense", 12, "<base64>"]

playground_rules.js reads the same trees; `labkit.masks` defines what they mean.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit import masks
from labkit.errors import MaskError
from labkit.masks import Mask

MOST_TOKENS = 512  # a grid of more cells is neither legible nor quick to paint
WORDS = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")  # a word, with what an apostrophe joins to it, or one other sign
MAKERS = {
    "&": lambda a, b: mask_of(a) & mask_of(b),
    "|": lambda a, b: mask_of(a) | mask_of(b),
    "~": lambda inner: ~mask_of(inner),
    "causal": masks.causal,
    "bidirectional": masks.bidirectional,
    "sliding_window": lambda w, one_sided: masks.sliding_window(w, causal=one_sided),
    "prefix": masks.prefix,
    "hybrid": masks.hybrid,
    "segments": lambda ids, inside, fuse_from: masks.segments(ids, inside=inside, fuse_from=fuse_from),
    "padding": lambda lengths, side: masks.padding(lengths, side=side),
    "from_dense": lambda n, text: masks.from_dense(bits(text, n * n).reshape(n, n)),
}


def tree_of(mask) -> list:
    """The tree of a mask.

    Raises:
        MaskError: not a mask, or one for a batch of several rows: the playground shows one sentence.
    """
    if not isinstance(mask, Mask):
        raise MaskError(f"expected a labkit Mask, such as masks.causal(), not {type(mask).__name__}")
    if mask.batch_size not in (None, 1):
        raise MaskError(f"{mask} is for a batch of {mask.batch_size} rows, and the playground shows one sentence")

    def tree(kind: str, *arguments) -> list:
        if kind in ("&", "|", "~"):
            return [kind, *(tree(*part) for part in arguments)]
        if kind == "from_dense":
            shape, cells = arguments
            return [kind, shape[-1], packed(np.frombuffer(cells, dtype=bool))]
        return [kind, *(list(value) if isinstance(value, tuple) else value for value in arguments)]

    return tree(*mask.identity)


def mask_of(tree: Sequence) -> Mask:
    """The mask that a tree describes, the same expression as the one it was made of.

    Raises:
        MaskError: a tree that describes no mask.
    """
    try:
        kind, *arguments = tree or [None]
        return MAKERS[kind](*arguments)
    except (KeyError, TypeError):
        raise MaskError(f"{tree!r} describes no mask: expected a list such as ['prefix', 3]") from None


def fitted(tree: Sequence, n: int, before: int) -> list:
    """The same mask for a sentence of `n` tokens instead of `before`.

    Padding keeps its number of pads; the last segment and a painted grid grow with the sentence (new cells closed).
    """
    match tree:
        case ["&" | "|" | "~" as sign, *parts]:
            return [sign, *(fitted(part, n, before) for part in parts)]
        case ["segments", ids, inside, None] if len(ids) < n:
            return ["segments", [*ids, *[ids[-1]] * (n - len(ids))], inside, None]
        case ["padding", [length], side]:
            return ["padding", [max(0, n - max(0, before - length))], side]
        case ["from_dense", size, text] if size < n:
            return ["from_dense", n, packed(np.pad(bits(text, size * size).reshape(size, size), (0, n - size)))]
    return list(tree)


def dense_of(mask: Mask, n: int) -> np.ndarray:
    """The cells of a mask for one sentence of `n` tokens, bool (n, n)."""
    return mask.dense(n).numpy().reshape(n, n)


def painted_cells(painted: dict[str, Any], n: int) -> np.ndarray:
    """Which cells were painted, and as what: bool (2, n, n). `painted` is {} or {"n": n, "cells": base64}.

    Raises:
        MaskError: painted cells of a sentence of another length.
    """
    if not painted:
        return np.zeros((2, n, n), dtype=bool)
    if painted.get("n") != n:
        raise MaskError(f"the cells were painted on {painted.get('n')} tokens, and the sentence has {n}")
    return bits(painted["cells"], 2 * n * n).reshape(2, n, n)


def painted_state(which: np.ndarray, value: np.ndarray) -> dict[str, Any]:
    """The way back: {} where nothing is painted."""
    return {"n": len(which), "cells": packed(np.stack([which, value & which]))} if which.any() else {}


def moved(painted: dict[str, Any], n: int) -> dict[str, Any]:
    """Painted cells in a sentence of `n` tokens: each stays in its row and column, if that still exists."""
    if not painted or painted["n"] == n:
        return painted
    kept = painted_cells(painted, painted["n"])[:, :n, :n]  # (2, at most n, at most n)
    return painted_state(*np.pad(kept, [(0, 0), *[(0, n - kept.shape[-1])] * 2]))


def packed(cells: np.ndarray) -> str:
    """Bits as base64, eight to a byte, the first one the highest."""
    return base64.b64encode(np.packbits(cells.astype(bool))).decode("ascii")


def bits(text: str, count: int) -> np.ndarray:
    """The way back: bool (count,).

    Raises:
        MaskError: text that does not hold so many bits.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise MaskError("the painted cells are not base64") from None
    if len(data) != -(-count // 8):
        raise MaskError(f"{count} cells were expected, and {len(data)} bytes hold {8 * len(data)}")
    return np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count).astype(bool)


def split_words(sentence: str) -> list[str]:
    """The sentence without a tokenizer: words and signs, as the browser splits it too."""
    return WORDS.findall(sentence)


def checked_tokens(tokens: Sequence[str]) -> list[str]:
    """`tokens` as a list of text.

    Raises:
        MaskError: no token, or more than the playground can show.
    """
    if not tokens:
        raise MaskError("there is no token to show: give a sentence of at least one word")
    if len(tokens) > MOST_TOKENS:
        raise MaskError(f"{len(tokens)} tokens are too many: the playground shows at most {MOST_TOKENS}")
    return [str(token) for token in tokens]
