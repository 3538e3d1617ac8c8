"""The layout of a fused prompt: prefix, segments, cue, each with its positions, and the mask over them.

    prefix        few-shot examples, instructions: all tokens attend to it, and it is encoded once
    segments      the paraphrases, each with the line break that ends it
    cue           "Answer:": attends to the prefix and all segments, so the first generated token is fused as well

Each piece is tokenised once, and the ids are put side by side; nothing is decoded and tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from labkit import masks
from labkit.errors import DataError
from labkit.fusion.methods import Method

SEPARATOR = "\n"  # ends each segment
PREFIX, PADDING, CUE = 0, -1, -2  # owners of tokens; the segments of a row are 1, 2, ...


class Tokens(NamedTuple):
    """Tables of the tokens of one row, (tokens,), or of several, (rows, tokens).

    `owners` are PREFIX, the number of a segment from 1, CUE (for the answer too) or PADDING. `bias` is added to the
    attention scores of a token's key, when the cue and the answer attend to it.
    """

    ids: Tensor
    positions: Tensor
    owners: Tensor
    bias: Tensor

    def __getitem__(self, where: Any) -> Tokens:
        return Tokens(*(table[where] for table in self))

    def then(self, new: Tokens) -> Tokens:
        return Tokens(*(torch.cat(pair, -1) for pair in zip(self, new, strict=True)))


@dataclass(frozen=True)
class Prompts:
    """What an engine reads: the rows of each question, prefix and segments, and the ids of the cue behind them."""

    questions: tuple[tuple[Tokens, ...], ...]
    cue: tuple[int, ...]

    @property
    def rows(self) -> list[Tokens]:
        return list(chain(*self.questions))

    @property
    def counts(self) -> list[int]:
        """The number of rows of each question."""
        return list(map(len, self.questions))


def mask_of(owners: Sequence[int]) -> masks.Mask:
    """The mask of a row whose tokens have these owners, PREFIX or a segment, with whatever follows them."""
    end, prefix = len(owners), list(owners).count(PREFIX)
    isolated = masks.segments(owners, fuse_from=end)
    if not prefix:
        return isolated
    behind_the_prefix = masks.segments([0] * prefix + [1] * (end - prefix), fuse_from=end)
    return isolated | (masks.causal() & ~behind_the_prefix)


def token_ids(
    tokenizer: Any, questions: Sequence[Sequence[str]], prefix: str, cue: str
) -> tuple[list[int], list[list[list[int]]], list[int]]:
    """(prefix ids, for each question the ids of its paraphrases, cue ids).

    If the tokenizer adds a beginning-of-sequence token, it belongs to the prefix. Raises DataError without a
    tokenizer, a question or a cue, or if a text is empty.
    """
    if tokenizer is None:
        raise DataError("the model has no tokenizer, so no text can be read: add its tokenizer files")
    if not questions or not cue:
        raise DataError("there is no question, or the cue is empty; the cue attends to all paraphrases of a question")
    for number, paraphrases in enumerate(questions):
        if isinstance(paraphrases, str) or not paraphrases or not all(text.strip() for text in paraphrases):
            raise DataError(
                f"question {number} is {paraphrases!r}; give a list of its paraphrases, at least one and none empty"
            )

    def tokenised(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    begin = [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]
    segments = [[tokenised(text + SEPARATOR) for text in paraphrases] for paraphrases in questions]
    return begin + tokenised(prefix), segments, tokenised(cue)


def prompts(
    method: Method,
    prefix: Sequence[int],
    segments: Sequence[Sequence[Sequence[int]]],
    cue: Sequence[int],
    weights: Sequence[Sequence[float]] | None = None,
) -> Prompts:
    """The rows of `method`; `segments` contains, for each question, the ids of its paraphrases.

    Raises DataError unless there are weights, one positive number per paraphrase, for the method that takes them.
    """
    method.require_weights(weights is not None)
    if weights is not None and len(weights) != len(segments):
        raise DataError(f"there are weights for {len(weights)} questions, but {len(segments)} questions")
    questions = []
    for number, pieces in enumerate(segments):
        if method.name == "single":
            pieces = pieces[:1]
        elif not method.isolated:
            pieces = [list(chain(*pieces))]
        shares = np.ones(len(pieces)) if weights is None else np.asarray(weights[number], dtype=float)
        if shares.shape != (len(pieces),) or not ((shares > 0) & np.isfinite(shares)).all():
            raise DataError(
                f"question {number} has {len(pieces)} paraphrases and the weights {shares.tolist()}; give one positive "
                "number for each"
            )
        biases = np.log(shares / shares.sum()) if method.has_weights else np.zeros(len(pieces))
        rows = [pieces] if method.combine is None else [[piece] for piece in pieces]
        questions.append(tuple(_row(prefix, row, biases, method.restart) for row in rows))
    return Prompts(tuple(questions), tuple(cue))


def _row(prefix: Sequence[int], pieces: Sequence[Sequence[int]], biases: np.ndarray, restart: bool) -> Tokens:
    lengths = torch.tensor([len(prefix), *map(len, pieces)])
    starts = lengths.cumsum(0) - lengths  # places in the row
    places = torch.arange(int(lengths.sum()))
    positions = torch.where(places < len(prefix), places, places - starts.repeat_interleave(lengths) + len(prefix))
    return Tokens(
        torch.tensor([*prefix, *chain(*pieces)]),
        positions if restart else places,
        torch.arange(len(lengths)).repeat_interleave(lengths),
        torch.tensor([0.0, *biases[: len(pieces)]], dtype=torch.float64).repeat_interleave(lengths),
    )
