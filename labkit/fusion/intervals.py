"""How sure one can be of a mean over questions: 95 % intervals by bootstrap, over questions or over their relations.

Questions of one relation may share their wordings, as those of ParaRel share their templates; then what holds of one
tends to hold of all, and questions are not independent. What is to hold for other relations and their wordings draws
relations first (`over_relations`); an interval over questions alone is for these wordings only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval, and the number of questions that it comes from."""

    value: float
    low: float
    high: float
    n: int

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def over_questions(values: np.ndarray, ends: tuple[float, float], draws: int, seed: int) -> Estimate:
    """The mean of one value per question, (questions,), each within `ends`; resamples draw questions.

    The values are few (right or not), so a resample is told by how often each of them is drawn: a multinomial draw.
    """
    kinds, counts = np.unique(values, return_counts=True)
    n = len(values)
    if len(kinds) == 1:
        return Estimate(float(kinds[0]), *constant(float(kinds[0]), n, ends), n)
    drawn = np.random.default_rng(seed).multinomial(n, counts / n, size=draws)  # (draws, kinds)
    return Estimate(float(values.mean()), *percentiles(drawn @ kinds / n), n)


def over_relations(
    values: np.ndarray, relations: Sequence[str], ends: tuple[float, float], draws: int, seed: int
) -> Estimate:
    """The mean of `over_questions`, each question counting alike; resamples draw relations, then questions of each.

    A relation that is drawn brings as many questions as it has, so resamples differ in their number of questions.
    """
    groups = _groups(values, relations)
    mean = float(values.mean())
    if len(np.unique(values)) == 1:
        return Estimate(mean, *constant(mean, len(groups), ends), len(values))
    drawn, means = _resampled(groups, draws, seed)
    sizes = np.array([len(group) for group in groups])[drawn]  # (draws, relations)
    return Estimate(mean, *percentiles((means * sizes).sum(1) / sizes.sum(1)), len(values))


def mean_of_relations(
    values: np.ndarray, relations: Sequence[str], ends: tuple[float, float], draws: int, seed: int
) -> Estimate:
    """The mean of the relations' means, each relation counting alike; resamples as those of `over_relations`."""
    groups = _groups(values, relations)
    mean = float(np.mean([group.mean() for group in groups]))
    if len(np.unique(values)) == 1:
        return Estimate(mean, *constant(mean, len(groups), ends), len(values))
    return Estimate(mean, *percentiles(_resampled(groups, draws, seed)[1].mean(1)), len(values))


def constant(value: float, n: int, ends: tuple[float, float]) -> tuple[float, float]:
    """The interval of a mean of which `n` observations were all `value`.

    Other values could still have a share of up to 1 - 0.025^(1/n), the exact binomial bound of Clopper and Pearson
    (1934), and lie at either end.
    """
    unseen = 1 - ((1 - LEVEL) / 2) ** (1 / n)
    return value - unseen * (value - ends[0]), value + unseen * (ends[1] - value)


def percentiles(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _groups(values: np.ndarray, relations: Sequence[str]) -> list[np.ndarray]:
    """The values of each relation, by its name in alphabetical order."""
    names = np.array(relations)
    return [values[names == name] for name in sorted(set(relations))]


def _resampled(groups: Sequence[np.ndarray], draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(which relations were drawn, the means of the questions drawn within them), both (draws, relations)."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(groups), size=(draws, len(groups)))
    means = np.empty(drawn.shape)
    for number, group in enumerate(groups):
        kinds, counts = np.unique(group, return_counts=True)
        here = drawn == number
        means[here] = rng.multinomial(len(group), counts / len(group), size=int(here.sum())) @ kinds / len(group)
    return drawn, means
