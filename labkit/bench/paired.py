"""Scores of several runs on the same test set, and what is known of their difference.

A score here is a ratio of sums over examples: F1 of entities is 2 found / (said + there), F1 of answers and accuracy
are means. So each example gives a numerator and a denominator, and any set of examples has a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from labkit.errors import DataError
from labkit.viz.intervals import student_below, student_t

DRAWS = 100_000  # of the texts; an end of an interval then moves by less than a hundredth of it if others are drawn
LARGEST = 2 * 10**8  # numbers in all draws: of more than 2,000 groups there are fewer draws
BLOCK = 5000  # draws at a time, for memory
LEVEL = 0.95


@dataclass(frozen=True)
class Counted:
    """Runs of one arm on one test set.

    Attributes:
        seeds: of the runs.
        above, below: (seeds, examples), numerators and denominators; a score is sum(above) / sum(below), in [0, 1].
        groups: (examples,), the number of the group that each example is of.
        ids: of the examples.
    """

    seeds: tuple[int, ...]
    above: np.ndarray
    below: np.ndarray
    groups: np.ndarray
    ids: tuple[str, ...]

    @property
    def scores(self) -> np.ndarray:
        """(seeds,): the score of each run."""
        return _ratio(self.above.sum(1), self.below.sum(1))

    def only(self, chosen: np.ndarray) -> Counted:
        """The same runs on the examples where `chosen`, (examples,), is True."""
        ids = tuple(np.array(self.ids, dtype=object)[chosen])
        return Counted(self.seeds, self.above[:, chosen], self.below[:, chosen], self.groups[chosen], ids)


@dataclass(frozen=True)
class Estimate:
    """A number and the 95 % interval around it; None of both where there is one seed, or one group of texts, only.

    Attributes:
        seeds, n: how many runs and examples it is of.
        of_texts, of_seeds: of a difference: half the width that the interval had if only the texts, or only the seeds,
            were others.
        low_together, high_together: the wider interval that holds for several differences at once (Bonferroni's).
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    n: int
    of_texts: float | None = None
    of_seeds: float | None = None
    low_together: float | None = None
    high_together: float | None = None

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and (self.low > 0 or self.high < 0)


def where_counted(arms: Sequence[Counted]) -> list[Counted]:
    """The arms on the examples of those groups in which at least one of them has something that counts.

    A kind of entity that stands in few texts is measured by as few groups, and not by all that could hold it.
    """
    groups = arms[0].groups
    there = np.isin(groups, groups[np.any([each.below.any(0) for each in arms], axis=0)])
    return [each.only(there) for each in arms]


def counted(judged: dict[int, list[dict[str, Any]]], task: str, kind: str | None = None) -> Counted:
    """The runs whose judged lines (`labkit.tasks.recipes.Recipe.judge`) are given by seed; one entity kind, or all.

    Raises:
        DataError: no run, or runs on different examples.
    """
    if not judged:
        raise DataError("there is no run to count")
    seeds = tuple(sorted(judged))
    ids = [line["id"] for line in judged[seeds[0]]]
    for seed in seeds:
        if [line["id"] for line in judged[seed]] != ids:
            raise DataError(f"the runs of seeds {seeds[0]} and {seed} were judged on different examples")
    pairs = np.array([[_counts(line, task, kind) for line in judged[seed]] for seed in seeds], dtype=float)
    names = [line["group"] or f"example {line['id']}" for line in judged[seeds[0]]]
    _, groups = np.unique(names, return_inverse=True)
    return Counted(seeds, pairs[..., 0], pairs[..., 1], groups, tuple(ids))


def mean(arm: Counted) -> Estimate:
    """The mean over the seeds, with Student's interval for the mean of such runs on this very test set."""
    values = arm.scores
    n = len(arm.ids)
    if len(values) < 2:
        return Estimate(float(values.mean()), None, None, len(values), n)
    half = student_t(len(values) - 1, LEVEL) * float(values.std(ddof=1)) / len(values) ** 0.5
    return Estimate(float(values.mean()), float(values.mean() - half), float(values.mean() + half), len(values), n)


def difference(one: Counted, other: Counted, *, together: int = 1, draws: int | None = None, seed: int = 0) -> Estimate:
    """Mean score of `one` minus that of `other`, over the seeds that both have; paired by seed and by example.

    The interval is for new runs, and for new test texts of this kind; the training set, the split and the learning
    rates are these. The texts enter by a bootstrap that draws groups of examples (questions of one article are not
    independent), the same for both arms, and is too narrow where groups are few: its deviations are widened as
    Student's t of as many groups is wider than the normal distribution (the expanded percentile interval; Hesterberg
    2015, doi:10.1080/00031305.2015.1089789). The runs enter by Student's t of the gaps of the single seeds. What is
    chance in a single answer enters both ways, so where that is most of it the interval is too wide. With one seed, or
    one group, there is no interval. `together`: how many differences like this one the wider interval is to hold for.
    `draws`: of the bootstrap, `DRAWS` where none are given.

    Raises:
        DataError: no seed in common, or other examples.
    """
    return contrast([(1, one), (-1, other)], together=together, draws=draws, seed=seed)


def contrast(
    terms: Sequence[tuple[float | int, Counted]], *, together: int = 1, draws: int | None = None, seed: int = 0
) -> Estimate:
    """A weighted sum of mean scores on one test set, with the interval of `difference`.

    With weights 1, -1, -1, 1 it tells whether one difference is larger than another, such as that of two arms with many
    training examples and with few.

    Raises:
        DataError: no seed that all have, or other examples.
    """
    arms = [each for _, each in terms]
    if any(each.ids != arms[0].ids for each in arms):
        raise DataError("the arms were judged on different examples")
    shared = [s for s in arms[0].seeds if all(s in each.seeds for each in arms)]
    if not shared:
        raise DataError(f"the arms share no seed: {' and '.join(str(each.seeds) for each in arms)}")
    per_arm = [(weight, *_by_group(each, [each.seeds.index(s) for s in shared])) for weight, each in terms]
    observed = sum(weight * _ratio(above.sum(1), below.sum(1)) for weight, above, below in per_arm)  # (seeds,)
    gap = float(observed.mean())
    n, groups = len(arms[0].ids), per_arm[0][1].shape[1]
    if len(shared) < 2 or groups < 2:
        return Estimate(gap, None, None, len(shared), n)
    draws = min(DRAWS if draws is None else draws, LARGEST // groups)
    gaps = np.concatenate(
        [_weighted(block.astype(float), per_arm) for block in _drawn(groups, draws, seed)]
    )  # (draws,)
    by_seed = float(observed.std(ddof=1)) / len(shared) ** 0.5

    def interval(level: float) -> tuple[np.ndarray, list[float]]:
        """The draws, widened for it, and its ends."""
        wider, tail = gap + (gaps - gap) * expansion(groups, level), (1 - level) / 2
        return wider, _ends(wider, by_seed, len(shared) - 1, [tail, 1 - tail])

    wider, (low, high) = interval(LEVEL)
    all_ = [low, high] if together == 1 else interval(1 - (1 - LEVEL) / together)[1]
    of_texts = float(np.ptp(np.quantile(wider, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))) / 2
    of_seeds = student_t(len(shared) - 1, LEVEL) * by_seed
    return Estimate(gap, low, high, len(shared), n, of_texts, of_seeds, *all_)


def _ends(draws: np.ndarray, scale: float, degrees: int, shares: Sequence[float]) -> list[float]:
    """The quantiles of a draw plus scale times Student's T: no T is drawn, whose tails are long, but its distribution
    taken, so that an end does not hang on chance.

    Between its outermost thousands the draws are taken a hundred at a time, by their mean.
    """
    draws = np.sort(draws)
    if scale == 0:
        return [float(end) for end in np.quantile(draws, shares)]
    outer = min(1000, len(draws) // 3)
    middle = draws[outer : len(draws) - outer]
    parts = np.array_split(middle, max(1, len(middle) // 100))
    values = np.concatenate([draws[:outer], [part.mean() for part in parts], draws[len(draws) - outer :]])
    weights = np.concatenate([np.ones(outer), [len(part) for part in parts], np.ones(outer)]) / len(draws)
    found = []
    for share in shares:
        reach = scale * student_t(degrees, abs(2 * share - 1))
        low, high = values[0] - reach, values[-1] + reach
        for _ in range(60):
            at = (low + high) / 2
            below = float(weights @ student_below((at - values) / scale, degrees))
            low, high = (at, high) if below < share else (low, at)
        found.append(float(at))
    return found


@lru_cache(maxsize=2)
def _drawn(groups: int, draws: int, seed: int) -> tuple[np.ndarray, ...]:
    """How often each group is in each bootstrap sample: blocks of (samples, groups); one condition needs them often."""
    rng, whole = np.random.default_rng(seed), np.full(groups, 1 / groups)
    sizes = [min(BLOCK, draws - start) for start in range(0, draws, BLOCK)]
    return tuple(rng.multinomial(groups, whole, size=size).astype(np.min_scalar_type(groups)) for size in sizes)


def expansion(groups: int, level: float = LEVEL) -> float:
    """By how much an interval of a bootstrap over so few groups is too narrow: n for n - 1, and the normal for t.

    The tails of t are the heavier the further out one looks: an interval for many differences at once needs more.
    """
    return (groups / (groups - 1)) ** 0.5 * student_t(groups - 1, level) / NormalDist().inv_cdf((1 + level) / 2)


def _weighted(drawn: np.ndarray, per_arm: Sequence[tuple[float | int, np.ndarray, np.ndarray]]) -> np.ndarray:
    """(samples,): the weighted sum of the arms' mean scores in each bootstrap sample."""
    columns = np.concatenate([part for _, *both in per_arm for part in both])
    sums = (drawn @ columns.T).reshape(len(drawn), len(per_arm), 2, -1)  # one product: the draws are much to read
    return sum(weight * _ratio(sums[:, i, 0], sums[:, i, 1]) for i, (weight, *_) in enumerate(per_arm)).mean(1)


def _by_group(arm: Counted, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators (seeds, groups), added up within each group."""
    there, member = np.unique(arm.groups, return_inverse=True)  # of a part of the examples, some groups may be gone
    return tuple(
        np.stack([np.bincount(member, each[row], len(there)) for row in rows]) for each in (arm.above, arm.below)
    )


def _counts(line: dict[str, Any], task: str, kind: str | None) -> tuple[float, float]:
    if task == "qa":
        return line["f1"] / 100, 1.0
    if task == "classify":
        return float(line["correct"]), 1.0
    found, said, there = (
        sum(n for name, n in line[key].items() if kind in (None, name)) for key in ("found", "said", "there")
    )
    return 2.0 * found, float(said + there)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """What is divided by nothing is 0."""
    return np.divide(above, below, out=np.zeros_like(above, dtype=float), where=below > 0)
