"""What the mask playground keeps of a mask: a small tree for the expression, bits for the painted cells.

A tree is a list, plain JSON, of a factory's name and its arguments:

    causal()                            ["causal"]
    prefix(3) & ~padding([9])           ["&", ["prefix", 3], ["~", ["padding", [9], "right"]]]
    from_dense(a 12 x 12 grid)          ["from_dense", 12, "<base64>"]

playground_rules.js reads the same trees; `labkit.masks` defines what they mean.
"""

from __future__ import annotations

import base64
import operator
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit import masks
from labkit.errors import MaskError
from labkit.masks import Mask

MOST_TOKENS = 512  # a grid of more cells is neither legible nor quick to paint
WORDS = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")  # a word, with what an apostrophe joins to it, or one other sign
SIGNS = {"&": operator.and_, "|": operator.or_, "~": operator.invert}


def tree_of(mask: Mask) -> list:
    """The tree of a mask. MaskError: not a mask, or one for a batch of several rows."""
    if not isinstance(mask, Mask) or mask.batch_size not in (None, 1):
        raise MaskError(f"the playground shows a labkit Mask for one sentence, such as masks.causal(), not {mask!r}")

    def tree(kind: str, *arguments) -> list:
        if kind in SIGNS:
            return [kind, *(tree(*part) for part in arguments)]
        if kind == "from_dense":
            shape, cells = arguments
            return [kind, shape[-1], packed(np.frombuffer(cells, dtype=bool))]
        return [kind, *(list(value) if isinstance(value, tuple) else value for value in arguments)]

    return tree(*mask.identity)


def mask_of(tree: Sequence) -> Mask:
    """The mask that a tree describes."""
    match tree:
        case ["&" | "|" | "~" as sign, *parts]:
            return SIGNS[sign](*map(mask_of, parts))
        case ["from_dense", size, text]:
            return masks.from_dense(bits(text, size * size).reshape(size, size))
        case [kind, *arguments]:
            return getattr(masks, kind)(*arguments)


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
    """Which cells were painted, and as what, in a sentence of `n` tokens now: bool (2, n, n).

    `painted` is {} or {"n": tokens when they were painted, "cells": base64}. A cell stays in its row and column.
    """
    size = painted.get("n", 0)
    cells = bits(painted.get("cells", ""), 2 * size * size).reshape(2, size, size)[:, :n, :n]
    return np.pad(cells, [(0, 0), *[(0, n - cells.shape[-1])] * 2])


def packed(cells: np.ndarray) -> str:
    """Bits as base64, eight to a byte, the first one the highest."""
    return base64.b64encode(np.packbits(cells.astype(bool))).decode("ascii")


def bits(text: str, count: int) -> np.ndarray:
    """What `packed` has packed: bool (count,)."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), dtype=np.uint8), count=count).astype(bool)


def split_words(sentence: str) -> list[str]:
    """The sentence without a tokenizer: words and signs, as the browser splits it too."""
    return WORDS.findall(sentence)


def checked_tokens(tokens: Sequence[str]) -> list[str]:
    """`tokens` as a list of text. MaskError: no token, or more than the playground can show."""
    if not tokens:
        raise MaskError("there is no token to show: give a sentence of at least one word")
    if len(tokens) > MOST_TOKENS:
        raise MaskError(f"{len(tokens)} tokens are too many: the playground shows at most {MOST_TOKENS}")
    return list(map(str, tokens))
