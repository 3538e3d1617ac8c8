"""The layout of a fused prompt: prefix, segments, cue, each with its positions, and the mask over them.

    prefix        few-shot examples, instructions: all tokens attend to it, and it is encoded once
    segments      the paraphrases, each with the separator that ends it
    cue           "Answer:": attends to the prefix and all segments, so the first generated token is fused as well

Each piece is tokenised once, and the ids are put side by side; nothing is decoded and tokenised again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from labkit import masks
from labkit.errors import DataError
from labkit.fusion.methods import GIVEN, UNIFORM, Method

Weights = Sequence[float] | np.ndarray | Tensor  # one number for each paraphrase of a question
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Token ids, the position of the first one, and the number added to the attention scores of its keys."""

    ids: Ids
    start: int
    bias: float = 0.0


@dataclass(frozen=True)
class Row:
    """One sequence: segments behind the shared prefix, and the position at which its cue begins."""

    segments: tuple[Segment, ...]
    cue_start: int

    @property
    def length(self) -> int:
        """Tokens of all segments."""
        return sum(len(segment.ids) for segment in self.segments)


@dataclass(frozen=True)
class Prompts:
    """What an engine reads. The rows of a question are adjacent; question i has counts[i] rows."""

    prefix: Ids
    cue: Ids
    rows: tuple[Row, ...]
    counts: tuple[int, ...]


def mask_of(row: Row, prefix: int) -> masks.Mask:
    """The mask of a row behind a prefix of `prefix` tokens, with whatever follows its segments."""
    segment_ids = [0] * prefix + [n for n, segment in enumerate(row.segments, 1) for _ in segment.ids]
    end = len(segment_ids)
    isolated = masks.segments(segment_ids, fuse_from=end)
    if not prefix:
        return isolated
    behind_the_prefix = masks.segments([0] * prefix + [1] * (end - prefix), fuse_from=end)
    return isolated | (masks.causal() & ~behind_the_prefix)


def token_ids(
    tokenizer: Any, questions: Sequence[Sequence[str]], prefix: str, cue: str, separator: str
) -> tuple[Ids, list[list[Ids]], Ids]:
    """(prefix ids, for each question the ids of its paraphrases, cue ids).

    If the tokenizer adds a beginning-of-sequence token, it belongs to the prefix. The separator belongs to the segment
    that it ends.

    Raises:
        DataError: no tokenizer, no question, a question without paraphrases, an empty paraphrase, or no cue.
    """
    if tokenizer is None:
        raise DataError("the model has no tokenizer, so no text can be read: add its tokenizer files")
    if isinstance(questions, str) or not questions:
        raise DataError("there is no question; give a list of questions, each a list of its paraphrases")
    for number, paraphrases in enumerate(questions):
        if isinstance(paraphrases, str):
            raise DataError(f"question {number} is a text; give a list of its paraphrases, such as [{paraphrases!r}]")
        if not paraphrases:
            raise DataError(f"question {number} has no paraphrase; it needs at least one")
        for place, text in enumerate(paraphrases):
            if not text.strip():
                raise DataError(f"paraphrase {place} of question {number} is empty")

    def tokenised(text: str) -> Ids:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    cue_ids = tokenised(cue)
    if not cue_ids:
        raise DataError("the cue is empty; it attends to all paraphrases, so it needs at least one token")
    first = tuple(tokenizer("")["input_ids"][:1])
    begin = first if first and first[0] == tokenizer.bos_token_id else ()
    segments = [[tokenised(text + separator) for text in paraphrases] for paraphrases in questions]
    return begin + tokenised(prefix), segments, cue_ids


def prompts(
    method: Method,
    prefix: Ids,
    segments: Sequence[Sequence[Ids]],
    cue: Ids,
    weights: Sequence[Weights] | None = None,
) -> Prompts:
    """The rows of `method`; `segments` contains, for each question, the ids of its paraphrases.

    Raises:
        DataError: weights for a method that takes none, missing weights, or not one positive number per paraphrase.
    """
    if (weights is None) == (method.weights == GIVEN):
        problem = "needs a weight for each paraphrase" if weights is None else "takes no weights: use 'weighted'"
        raise DataError(f"the method {method.name!r} {problem}")
    if weights is not None and len(weights) != len(segments):
        raise DataError(f"there are weights for {len(weights)} questions, but {len(segments)} questions")
    rows, counts, begin = [], [], len(prefix)
    for number, pieces in enumerate(segments):
        shares = [1.0] * len(pieces)
        if method.weights == UNIFORM:
            shares = [1 / len(pieces)] * len(pieces)
        elif weights is not None:
            shares = _normalised(weights[number], len(pieces), number)
        if method.name == "single":
            pieces, shares = pieces[:1], shares[:1]
        elif not method.isolated:
            pieces, shares = [tuple(token for piece in pieces for token in piece)], [1.0]
        if method.joined:
            rows.append(_joined_row(pieces, shares, begin, method.restart))
        else:
            rows += [_joined_row([piece], [1.0], begin, True) for piece in pieces]
        counts.append(1 if method.joined else len(pieces))
    return Prompts(prefix, cue, tuple(rows), tuple(counts))


def _joined_row(pieces: Sequence[Ids], shares: Sequence[float], begin: int, restart: bool) -> Row:
    segments, start = [], begin
    for piece, share in zip(pieces, shares, strict=True):
        segments.append(Segment(piece, start, math.log(share)))
        start += 0 if restart else len(piece)
    return Row(tuple(segments), max(segment.start + len(segment.ids) for segment in segments))


def _normalised(weights: Weights, count: int, number: int) -> list[float]:
    if len(weights) != count:
        raise DataError(f"question {number} has {count} paraphrases and {len(weights)} weights; give one for each")
    numbers = weights.tolist() if hasattr(weights, "tolist") else list(weights)  # an array, or a tensor
    if not all(0 < weight < math.inf for weight in numbers):
        raise DataError(f"the weights of question {number} are {numbers}; each must be a positive number")
    total = math.fsum(numbers)
    return [weight / total for weight in numbers]
