"""What a pretraining reads: a text's tokens in rows, cut into pieces that grow, some of them a passage said again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.objectives import generator


@dataclass(frozen=True)
class Curriculum:
    """How the rows of a training change as it goes on.

    What short rows teach a model (to look one token back, to find an earlier occurrence), long ones teach it many times
    slower. Li et al. 2022, "The Stability-Efficiency Dilemma", warm up the length for another reason.

    Args:
        rows: of the whole training.
        context: tokens per row.
        first_length: each row is cut into pieces of this many tokens, which do not see each other, for the first half
            of the training; the pieces then double in equal stages, and are whole rows in the last fifth.
        repeats: share of pieces that say one passage again and again. It falls evenly to a tenth by the middle of the
            training and stays there.
    """

    rows: int
    context: int
    first_length: int | None = None
    repeats: float = 0.0

    def length(self, row: int) -> int:
        """Tokens per piece of row number `row`."""
        first, done = self.first_length or self.context, row / self.rows
        doublings = math.ceil(math.log2(self.context / first)) if first < self.context else 0
        if done >= 0.8 or not doublings:
            return self.context
        stage = 0 if done < 0.5 or doublings == 1 else 1 + int((done - 0.5) / 0.3 * (doublings - 1))
        return first * 2**stage

    def share_of_repeats(self, row: int) -> float:
        return self.repeats * max(0.1, 1 - 2 * row / self.rows)


def row_maker(ids: Tensor, curriculum: Curriculum, seed: int) -> Callable[[int], Tensor]:
    """`make(k)`: row k of the training, a pure function of (seed, k).

    Each pass cuts the line of ids into rows at another offset and goes through them in another order, so that every
    token is seen once per pass and never with the same neighbours at its row's ends.
    """
    length = curriculum.context
    per_pass = (len(ids) - 1) // length
    known = ids.unique()
    orders: dict[int, tuple[int, Tensor]] = {}

    def of_pass(number: int) -> tuple[int, Tensor]:
        if number not in orders:
            rng = generator(seed, -1 - number)
            slack = len(ids) - per_pass * length
            offset = int(torch.randint(slack, (), generator=rng))
            orders.clear()
            orders[number] = offset, torch.randperm(per_pass, generator=rng)
        return orders[number]

    def make(row: int) -> Tensor:
        offset, order = of_pass(row // per_pass)
        start = offset + int(order[row % per_pass]) * length
        rng = generator(seed + 1, row)
        pieces = ids[start : start + length].split(curriculum.length(row))
        repeated = torch.rand(len(pieces), generator=rng) < curriculum.share_of_repeats(row)
        return torch.cat([_said_again(p, known, rng) if r else p for p, r in zip(pieces, repeated, strict=True)])

    return make


def in_pieces(collate: Callable[[list[dict]], Any], curriculum: Curriculum) -> Callable[[list[dict]], Any]:
    """`collate`, given each row's pieces in place of the row."""

    def collated(rows: list[dict]) -> Any:
        length = curriculum.length(min(row["row"] for row in rows))
        return collate([{"row": row["row"], "ids": piece} for row in rows for piece in row["ids"].split(length)])

    return collated


def _said_again(piece: Tensor, known: Tensor, rng: torch.Generator) -> Tensor:
    """One passage of 4 to 64 tokens (up to 3/8 of the piece) again and again: the text's, or random known tokens.

    Only random tokens make a head look for what followed the last time; in a text there are easier ways to guess.
    """
    longest = max(1, min(64, 3 * len(piece) // 8))
    length = int(torch.randint(min(4, longest), longest + 1, (), generator=rng))
    drawn = known[torch.randint(len(known), (length,), generator=rng)]
    passage = drawn if float(torch.rand((), generator=rng)) < 0.5 else piece[:length]
    return passage.repeat(len(piece) // length + 1)[: len(piece)]
