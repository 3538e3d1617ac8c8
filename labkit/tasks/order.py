"""In which order examples are trained on: endless passes, each shuffled anew, with rows of one length side by side."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from labkit.objectives import generator

WINDOW = 50  # batches that are sorted by length together: enough to save the padding, few enough to stay shuffled


def shuffled_order(count: int, seed: int) -> Callable[[int], int]:
    """`order(k)`: which of `count` examples is row k. Each pass is another permutation that depends on `seed` alone."""

    @lru_cache(maxsize=2)
    def one_pass(number: int) -> list[int]:
        return torch.randperm(count, generator=generator(seed, -1 - number)).tolist()

    def order(row: int) -> int:
        number, place = divmod(row, count)
        return one_pass(number)[place]

    return order


def length_grouped_order(lengths: Sequence[int], batch: int, seed: int) -> Callable[[int], int]:
    """As `shuffled_order`, and every `batch` rows that are computed together are of nearly one length.

    Batches lie on the grid of the rows' numbers (rows 0 to batch-1, ...), across the borders of the passes. In a pass
    the examples are shuffled, sorted by length within `WINDOW` batches, and the batches shuffled again; every example
    comes once per pass.

    Args:
        lengths: of the examples, in tokens. batch: rows that are computed together, on all devices.
    """
    count, shuffled = len(lengths), shuffled_order(len(lengths), seed)

    @lru_cache(maxsize=2)
    def one_pass(number: int) -> list[int]:
        first = number * count
        order = [shuffled(first + place) for place in range(count)]
        lead = min(-first % batch, count)  # rows that still belong to a batch of the pass before
        full = (count - lead) // batch
        body, rest = order[lead : lead + full * batch], order[lead + full * batch :]
        batches = []
        for start in range(0, len(body), batch * WINDOW):
            window = sorted(body[start : start + batch * WINDOW], key=lambda example: lengths[example])
            batches += [window[at : at + batch] for at in range(0, len(window), batch)]
        mixed = torch.randperm(len(batches), generator=generator(seed, 1 + number)).tolist()
        return order[:lead] + [example for place in mixed for example in batches[place]] + rest

    def order(row: int) -> int:
        number, place = divmod(row, count)
        return one_pass(number)[place]

    return order


def trained_order(
    lengths: Sequence[int], *, batch: int, seed: int, packed: bool, tokens: int | None = None
) -> tuple[Callable[[int], list[int]], int]:
    """(`items(k)`, how many items the first pass has): the examples that item k of a training stands for.

    One example each, with rows of one length side by side unless they are packed, which saves the padding by itself; or
    with `tokens` a whole batch of packed rows.
    """
    if tokens is not None:
        return token_batches(lengths, tokens, seed)
    order = shuffled_order(len(lengths), seed) if packed else length_grouped_order(lengths, batch, seed)
    return lambda k: [order(k)], len(lengths)


def token_batches(lengths: Sequence[int], tokens: int, seed: int) -> tuple[Callable[[int], list[int]], int]:
    """(`batch(k)`, how many batches the first pass has): the examples of batch k, as many as fit into `tokens`.

    They are those of `shuffled_order`, one after the other, and every pass begins a new batch; an example longer than
    `tokens` has a batch for itself. For packed rows, whose cost is their tokens: all batches cost about the same.
    """
    shuffled, starts = shuffled_order(len(lengths), seed), [0]

    @lru_cache(maxsize=2)
    def one_pass(number: int) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0
        for place in range(len(lengths)):
            example = shuffled(number * len(lengths) + place)
            if not batches or lengths[example] > room:
                batches.append([])
                room = tokens
            batches[-1].append(example)
            room -= lengths[example]
        return batches

    def batch(k: int) -> list[int]:
        while starts[-1] <= k:
            starts.append(starts[-1] + len(one_pass(len(starts) - 1)))
        number = bisect_right(starts, k) - 1
        return one_pass(number)[k - starts[number]]

    return batch, len(one_pass(0))
