"""Where every token of a fused prompt stands: prefix, segments, cue; each with its positions and its weight.

    prefix        few-shot examples, instructions: seen by all, encoded once
    segments      the paraphrases, each with the separator that ends it
    cue           "Answer:": sees prefix and all segments, so that the first generated token is fused like all others

Pieces are made of token ids once and laid side by side; nothing is decoded and read again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from labkit.errors import FusionError
from labkit.fusion.methods import GIVEN, UNIFORM, Method

Weights = Sequence[float] | np.ndarray | Tensor  # one number for each paraphrase of a question


@dataclass(frozen=True)
class Segment:
    """Token ids, the position of the first of them, and what is added to the attention scores of its keys."""

    ids: tuple[int, ...]
    start: int
    bias: float = 0.0


@dataclass(frozen=True)
class Row:
    """One sequence: segments behind the shared prefix, and the position at which its cue begins."""

    segments: tuple[Segment, ...]
    cue_start: int


@dataclass(frozen=True)
class Prompts:
    """What an engine is given.

    Attributes:
        prefix, cue: token ids, the same for all rows. rows: those of a question stand one behind the other.
        counts: how many rows each question has.
    """

    prefix: tuple[int, ...]
    cue: tuple[int, ...]
    rows: tuple[Row, ...]
    counts: tuple[int, ...]

    @property
    def last_position(self) -> int:
        """The highest position that the prompts need, the cue included."""
        return max(row.cue_start for row in self.rows) + len(self.cue) - 1

    @property
    def longest_row(self) -> int:
        """Tokens in the longest row, prefix and cue included."""
        within = max(sum(len(segment.ids) for segment in row.segments) for row in self.rows)
        return len(self.prefix) + within + len(self.cue)


def token_ids(
    tokenizer: Any, questions: Sequence[Sequence[str]], prefix: str, cue: str, separator: str
) -> tuple[tuple[int, ...], list[list[tuple[int, ...]]], tuple[int, ...]]:
    """(prefix ids, for each question the ids of its paraphrases, cue ids).

    A beginning-of-sequence token, where the tokenizer has one, is the prefix's; the separator belongs to the segment
    that it ends.

    Raises:
        FusionError: no tokenizer, no question, a question without paraphrases, an empty paraphrase, or no cue.
    """
    if tokenizer is None:
        raise FusionError("the model came without a tokenizer, so no text can be read: add its tokenizer files")
    if isinstance(questions, str) or not questions:
        raise FusionError("give a list of questions, each a list of its paraphrases; there is none")

    def plain(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    segments = []
    for number, paraphrases in enumerate(questions):
        if isinstance(paraphrases, str):
            raise FusionError(f"question {number} is a text; give a list of its paraphrases, [{paraphrases!r}] for one")
        if not paraphrases:
            raise FusionError(f"question {number} has no paraphrase; it needs at least one")
        for place, text in enumerate(paraphrases):
            if not text.strip():
                raise FusionError(f"paraphrase {place} of question {number} is empty")
        segments.append([plain(text + separator) for text in paraphrases])
    cue_ids = plain(cue)
    if not cue_ids:
        raise FusionError("the cue is empty: it is what sees all paraphrases, so it must have at least one token")
    special = tokenizer("")["input_ids"]
    begins = (
        tuple(special[:1]) if tokenizer.bos_token_id is not None and special[:1] == [tokenizer.bos_token_id] else ()
    )
    return begins + plain(prefix), segments, cue_ids


def prompts(
    method: Method,
    prefix: tuple[int, ...],
    segments: Sequence[Sequence[tuple[int, ...]]],
    cue: tuple[int, ...],
    weights: Sequence[Weights] | None = None,
) -> Prompts:
    """The rows that `method` asks for; `segments` holds, for each question, the ids of its paraphrases.

    Raises:
        FusionError: weights given to a method that takes none, or lacking, or not one positive number per paraphrase.
    """
    if (weights is None) == (method.weights == GIVEN):
        wanted = "needs a weight for each paraphrase" if weights is None else "takes no weights: use 'weighted'"
        raise FusionError(f"the method {method.name!r} {wanted}")
    if weights is not None and len(weights) != len(segments):
        raise FusionError(f"there are weights for {len(weights)} questions, and {len(segments)} questions")
    rows, counts = [], []
    for number, ids in enumerate(segments):
        own = None if weights is None else _normalised(weights[number], len(ids), number)
        made = _rows(method, len(prefix), ids, own)
        rows += made
        counts.append(len(made))
    return Prompts(prefix, cue, tuple(rows), tuple(counts))


def _rows(method: Method, begin: int, ids: Sequence[tuple[int, ...]], weights: list[float] | None) -> list[Row]:
    if method.name == "single":
        ids = ids[:1]
    if not method.joined:
        return [Row((Segment(each, begin),), begin + len(each)) for each in ids]
    if not method.isolated:
        whole = tuple(token for each in ids for token in each)
        return [Row((Segment(whole, begin),), begin + len(whole))]
    if method.weights == UNIFORM:
        weights = [1 / len(ids)] * len(ids)
    made, start = [], begin
    for each, weight in zip(ids, weights or [1.0] * len(ids), strict=True):
        made.append(Segment(each, start, math.log(weight)))
        start += 0 if method.restart else len(each)
    end = max(segment.start + len(segment.ids) for segment in made)
    return [Row(tuple(made), end)]


def _normalised(weights: Weights, count: int, number: int) -> list[float]:
    if len(weights) != count:
        raise FusionError(f"question {number} has {count} paraphrases and {len(weights)} weights; give one for each")
    numbers = weights.tolist() if hasattr(weights, "tolist") else list(weights)  # an array, or a tensor
    if not all(0 < weight < math.inf for weight in numbers):
        raise FusionError(f"the weights of question {number} are {numbers}; each must be a positive number")
    total = math.fsum(numbers)
    return [weight / total for weight in numbers]
