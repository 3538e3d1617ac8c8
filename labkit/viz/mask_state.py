"""What the mask playground keeps of a mask: a small tree for the expression, bits for the painted cells.

A tree is a list, plain JSON, and says what the mask's factory was given:

    causal()                            ["causal"]
    prefix(3) & ~padding([9])           ["&", ["prefix", 3], ["~", ["padding", [9], "right"]]]
    from_dense(a 12 x 12 grid)          ["from_dense", 12, "<base64>"]

playground_rules.js reads the same trees; `labkit.masks` stays the one that says what they mean.
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
COMPOSITIONS = {"&": lambda a, b: a & b, "|": lambda a, b: a | b}


def tree_of(mask) -> list:
    """The tree of a mask.

    Raises:
        MaskError: not a mask, or one for a batch of several rows: the playground shows one sentence.
    """
    if not isinstance(mask, Mask):
        raise MaskError(f"expected a labkit Mask, such as masks.causal(), not {type(mask).__name__}")
    if mask.batch_size not in (None, 1):
        raise MaskError(f"{mask} is for a batch of {mask.batch_size} rows, and the playground shows one sentence")
    return _tree(mask.identity)


def mask_of(tree: Sequence) -> Mask:
    """The mask that a tree describes, the same expression as the one it was made of.

    Raises:
        MaskError: a tree that describes no mask.
    """
    match tree:
        case ["&" | "|" as sign, first, second]:
            return COMPOSITIONS[sign](mask_of(first), mask_of(second))
        case ["~", inner]:
            return ~mask_of(inner)
        case ["causal"]:
            return masks.causal()
        case ["bidirectional"]:
            return masks.bidirectional()
        case ["sliding_window", w, one_sided]:
            return masks.sliding_window(w, causal=one_sided)
        case ["prefix", n]:
            return masks.prefix(n)
        case ["hybrid", n]:
            return masks.hybrid(n)
        case ["segments", ids, inside, fuse_from]:
            return masks.segments(ids, inside=inside, fuse_from=fuse_from)
        case ["padding", lengths, side]:
            return masks.padding(lengths, side=side)
        case ["from_dense", n, text] if isinstance(n, int) and isinstance(text, str):
            return masks.from_dense(bits(text, n * n).reshape(n, n))
    raise MaskError(f"{tree!r} describes no mask: expected a list such as ['prefix', 3], made with tree_of(mask)")


def fitted(tree: Sequence, n: int, before: int) -> list:
    """The same mask for a sentence of `n` tokens in place of `before`.

    Padding keeps its number of pads; the last segment and a painted grid grow with the sentence (new cells closed).
    """
    match tree:
        case ["&" | "|" as sign, first, second]:
            return [sign, fitted(first, n, before), fitted(second, n, before)]
        case ["~", inner]:
            return ["~", fitted(inner, n, before)]
        case ["segments", ids, inside, None] if len(ids) < n:
            return ["segments", [*ids, *[ids[-1]] * (n - len(ids))], inside, None]
        case ["padding", [length], side]:
            return ["padding", [max(0, n - max(0, before - length))], side]
        case ["from_dense", size, text] if size < n:
            grown = np.zeros((n, n), dtype=bool)
            grown[:size, :size] = bits(text, size * size).reshape(size, size)
            return ["from_dense", n, packed(grown)]
    return list(tree)


def dense_of(mask: Mask, n: int) -> np.ndarray:
    """The cells of a mask for one sentence of `n` tokens, bool (n, n)."""
    return mask.dense(n).numpy().reshape(n, n)


def painted_cells(painted: dict[str, Any], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Which cells were painted, and as what: two bool arrays (n, n). `painted` is {} or {"n": n, "cells": base64}.

    Raises:
        MaskError: painted cells of a sentence of another length.
    """
    if not painted:
        return np.zeros((n, n), dtype=bool), np.zeros((n, n), dtype=bool)
    if painted.get("n") != n:
        raise MaskError(f"the cells were painted on {painted.get('n')} tokens, and the sentence has {n}")
    which, value = bits(painted["cells"], 2 * n * n).reshape(2, n, n)
    return which, value


def painted_state(which: np.ndarray, value: np.ndarray) -> dict[str, Any]:
    """The way back: {} where nothing is painted."""
    return {"n": len(which), "cells": packed(np.stack([which, value & which]))} if which.any() else {}


def moved(painted: dict[str, Any], n: int) -> dict[str, Any]:
    """Painted cells in a sentence of `n` tokens: each stays in its row and column, if there still is one."""
    if not painted or painted["n"] == n:
        return painted
    grids = [np.zeros((n, n), dtype=bool) for _ in range(2)]
    for new, old in zip(grids, painted_cells(painted, painted["n"]), strict=True):
        kept = min(n, painted["n"])
        new[:kept, :kept] = old[:kept, :kept]
    return painted_state(*grids)


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
    """`tokens` as a list of text, if the playground can show it; MaskError says why not."""
    if not tokens:
        raise MaskError("there is no token to show: give a sentence of at least one word")
    if len(tokens) > MOST_TOKENS:
        raise MaskError(f"{len(tokens)} tokens are too many: the playground shows at most {MOST_TOKENS}")
    return [str(token) for token in tokens]


def _tree(identity: tuple) -> list:
    kind, *rest = identity
    if kind == "from_dense":
        shape, cells = rest
        return [kind, shape[-1], packed(np.frombuffer(cells, dtype=bool))]
    if kind in ("&", "|", "~"):
        return [kind, *(_tree(part) for part in rest)]
    return [kind, *(list(value) if isinstance(value, tuple) else value for value in rest)]
