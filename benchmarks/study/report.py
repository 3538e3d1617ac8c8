"""Compare the arms of a study: a table with 95 % intervals and paired differences, and a forest plot.

    rows = table({"causal": judged(runs, "ner"), "bidirectional": judged(others, "ner")}, condition="wikigold")
    print(to_markdown(rows))
    forest(rows, unit="F1")

A score is a ratio of sums over examples: F1 of entities is 2 found / (predicted + correct), accuracy is a mean. Each
example therefore gives a numerator and a denominator, and every set of examples has a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import optimize, stats

from labkit.errors import DataError

if TYPE_CHECKING:
    import plotly.graph_objects as go

LEVEL = 0.95
MEASURED = ("mean", "low", "high", "difference", "difference_low", "difference_high", "all_low", "all_high")
DRAWS = 20_000  # of the test examples
BLOCK = 5_000  # draws at a time, to bound the memory
LARGEST = 10**8  # numbers in all draws: more than 5,000 groups get fewer draws


@dataclass(frozen=True)
class Scores:
    """The runs of one arm on one test set.

    Attributes:
        above, below: (seeds, examples), numerators and denominators: a score is sum(above) / sum(below).
        groups: (examples,), the group of each example, such as its article; examples of a group are not independent.
        ids: (examples,), their names. seeds: of the runs; None where no seed enters: then there is one run.
    """

    above: np.ndarray
    below: np.ndarray
    groups: np.ndarray
    ids: tuple[str, ...]
    seeds: tuple[int, ...] | None

    def by_seed(self) -> np.ndarray:
        """(seeds,): the score of each run."""
        return _ratio(self.above.sum(1), self.below.sum(1))

    def only(self, ids: set[str]) -> Scores:
        """The same runs on these examples."""
        chosen = np.array([name in ids for name in self.ids])
        names = tuple(name for name in self.ids if name in ids)
        return Scores(self.above[:, chosen], self.below[:, chosen], self.groups[chosen], names, self.seeds)

    def of(self, seeds: Sequence[int] | None) -> Scores:
        """The runs of these seeds; None: all."""
        if seeds is None:
            return self
        rows = [self.seeds.index(seed) for seed in seeds]
        return Scores(self.above[rows], self.below[rows], self.groups, self.ids, tuple(seeds))


def judged(runs: Mapping[int, list[dict[str, Any]]], task: str) -> Scores:
    """The runs of an arm, {seed: lines of judged.test.jsonl}. DataError if they were judged on different examples."""
    seeds = tuple(sorted(runs))
    ids = tuple(line["id"] for line in runs[seeds[0]])
    if any(tuple(line["id"] for line in runs[seed]) != ids for seed in seeds):
        raise DataError("the runs were judged on different examples")
    counts = np.array([[_counts(line, task) for line in runs[seed]] for seed in seeds], dtype=float)
    groups = np.array([line["group"] or f"example {line['id']}" for line in runs[seeds[0]]])
    return Scores(counts[..., 0], counts[..., 1], groups, ids, seeds)


def mean(arm: Scores) -> tuple[float, float | None, float | None]:
    """(mean, low, high): the mean over seeds and Student's interval for more such runs on the same test set.

    Without seeds, the interval is for more such examples. One seed has no interval, nor have scores that are all equal.
    """
    if arm.seeds is None:
        return _interval([(1, arm)], LEVEL)
    scores = arm.by_seed()
    value = float(scores.mean())
    if len(scores) < 2 or np.ptp(scores) == 0:
        return value, None, None
    return value, *map(float, stats.t.interval(LEVEL, len(scores) - 1, value, stats.sem(scores)))


def difference(one: Scores, other: Scores, level: float = LEVEL) -> tuple[float, float | None, float | None]:
    """(mean of `one` minus mean of `other`, low, high), paired by seed and by example, over the seeds of both.

    The interval is for new seeds and new test examples; training set and learning rates are given. Examples enter by a
    bootstrap over groups. It is too narrow for few groups, so its deviations are expanded by the ratio of Student's t
    and the normal quantile (Hesterberg 2015, doi:10.1080/00031305.2015.1089789). Seeds enter by Student's t of the
    differences of the single seeds. One seed, one group, or equal results for all examples have no interval.
    """
    if not _comparable(one, other):
        raise DataError("the arms were judged on different examples, or have no seed in common")
    shared = None if one.seeds is None else [seed for seed in one.seeds if seed in other.seeds]
    return _interval([(1, one.of(shared)), (-1, other.of(shared))], level)


def table(arms: Mapping[str, Scores], reference: str | None = None, scale: float = 100.0, **about: Any) -> pd.DataFrame:
    """One row for each arm: `about`, arm, n, n_seeds, mean, low, high, and its difference to `reference`.

    `reference` is the first arm by default. `all_low` and `all_high` are the ends of the wider interval that holds for
    all differences of the table at once (Bonferroni). All scores are multiplied by `scale`.
    """
    reference = reference or next(iter(arms))
    compared = sum(_comparable(arm, arms.get(reference)) for arm in arms.values()) - 1
    rows = []
    for name, arm in arms.items():
        gap = together = (None, None, None)
        if name != reference and _comparable(arm, arms.get(reference)):
            gap = difference(arm, arms[reference])
            together = difference(arm, arms[reference], 1 - (1 - LEVEL) / compared)
        numbers = zip(MEASURED, (*mean(arm), *gap, *together[1:]), strict=True)
        seeds = 1 if arm.seeds is None else len(arm.seeds)
        rows.append(about | {"arm": name, "n": len(arm.ids), "n_seeds": seeds} | dict(numbers))
    table = pd.DataFrame(rows).astype(dict.fromkeys(MEASURED, float))
    table[list(MEASURED)] *= scale
    return table


def to_markdown(rows: pd.DataFrame, digits: int = 1) -> str:
    """The table for people: each value with its interval in one column."""

    def cell(row: pd.Series, name: str, low: str, high: str) -> str:
        if pd.isna(row[name]):
            return ""
        sign = "+" if name == "difference" else ""
        ends = "" if pd.isna(row[low]) else f" [{row[low]:{sign}.{digits}f}, {row[high]:{sign}.{digits}f}]"
        return f"{row[name]:{sign}.{digits}f}{ends}"

    shown = rows.drop(columns=[name for name in MEASURED if name not in ("mean", "difference")])
    for name, *ends in (("mean", "low", "high"), ("difference", "difference_low", "difference_high")):
        shown[name] = [cell(row, name, *ends) for _, row in rows.iterrows()]
    shown = shown.astype(object).where(shown.notna(), None)
    return shown.to_markdown(index=False, missingval="", floatfmt=".4g")


def forest(rows: pd.DataFrame, unit: str, reference: str) -> go.Figure:
    """The differences with their intervals.

    Each group of rows is named by the columns before `arm` that are not the same in all rows.
    """
    from labkit.viz import forest_figure

    rows = rows.dropna(subset="difference")
    about = list(rows.columns[: rows.columns.get_loc("arm")])
    varying = [name for name in about if name == "condition" or rows[name].nunique() > 1]
    shown = {"condition": "", "model": ""}
    groups: dict[str, dict[str, tuple]] = {}
    for _, row in rows.iterrows():
        group = ", ".join(f"{shown.get(name, f'{name} ')}{row[name]}" for name in varying)
        groups.setdefault(group, {})[row["arm"]] = (row["difference"], row["difference_low"], row["difference_high"])
    title = f"Difference to {reference}, with 95 % intervals"
    return forest_figure(groups, title, f"{unit}, difference to {reference}")


def write(rows: pd.DataFrame, folder: Path, *, unit: str, reference: str, digits: int = 1) -> None:
    """Print the table; write report.md, report.csv with all digits, and report.html (a forest plot) with plotly."""
    text = to_markdown(rows, digits)
    print(text)
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    rows.to_csv(folder / "report.csv", index=False)
    if rows["difference"].notna().any() and find_spec("plotly"):
        forest(rows, unit, reference).write_html(folder / "report.html", include_plotlyjs="directory")


def _interval(terms: Sequence[tuple[int, Scores]], level: float) -> tuple[float, float | None, float | None]:
    """A weighted sum of mean scores, and its interval for new seeds (where there are any) and new examples."""
    sums = [(weight, *_by_group(arm)) for weight, arm in terms]
    observed = sum(weight * _ratio(above.sum(1), below.sum(1)) for weight, above, below in sums)  # (seeds,)
    value, seeds, groups = float(observed.mean()), len(observed), sums[0][1].shape[1]
    has_seeds = terms[0][1].seeds is not None
    if groups < 2 or (has_seeds and seeds < 2):
        return value, None, None
    drawn = np.concatenate([_resampled(block, sums) for block in _draws(groups, min(DRAWS, LARGEST // groups))])
    error = float(stats.sem(observed)) if has_seeds and np.ptp(observed) else 0.0
    if error == 0 and np.ptp(drawn) == 0:
        return value, None, None
    tail = (1 + level) / 2
    expansion = (groups / (groups - 1)) ** 0.5 * stats.t.ppf(tail, groups - 1) / stats.norm.ppf(tail)
    drawn = value + (drawn - value) * expansion
    return value, *(_quantile(drawn, error, seeds - 1, share) for share in (1 - tail, tail))


def _quantile(drawn: np.ndarray, error: float, degrees: int, share: float) -> float:
    """The quantile of a draw plus `error` times Student's T.

    T is not drawn, because its tails are long and the quantile would depend on chance: its distribution is used.
    """
    if error == 0:
        return float(np.quantile(drawn, share))
    reach = error * stats.t.ppf(1 - min(share, 1 - share) / 2, degrees)
    return optimize.brentq(
        lambda x: stats.t.cdf((x - drawn) / error, degrees).mean() - share, drawn.min() - reach, drawn.max() + reach
    )


@lru_cache(maxsize=1)
def _draws(groups: int, draws: int) -> tuple[np.ndarray, ...]:
    """How often each group is in each bootstrap sample: blocks of (samples, groups), the same for all arms."""
    rng, chances = np.random.default_rng(0), np.full(groups, 1 / groups)
    sizes = [min(BLOCK, draws - start) for start in range(0, draws, BLOCK)]
    return tuple(rng.multinomial(groups, chances, size=size).astype(np.uint16) for size in sizes)


def _resampled(drawn: np.ndarray, sums: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> np.ndarray:
    """(samples,): the weighted sum of the mean scores in each bootstrap sample."""
    drawn = drawn.astype(float)
    return sum(weight * _ratio(drawn @ above.T, drawn @ below.T).mean(1) for weight, above, below in sums)


def _by_group(arm: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators, (seeds, groups), added up within each group."""
    names, member = np.unique(arm.groups, return_inverse=True)
    return tuple(np.stack([np.bincount(member, row, len(names)) for row in part]) for part in (arm.above, arm.below))


def _comparable(arm: Scores, reference: Scores | None) -> bool:
    if reference is None or arm.ids != reference.ids:
        return False
    return arm.seeds == reference.seeds or bool(set(arm.seeds or ()) & set(reference.seeds or ()))


def _counts(line: dict[str, Any], task: str) -> tuple[float, float]:
    if task == "qa":
        return line["f1"] / 100, 1.0
    if task == "classify":
        return float(line["correct"]), 1.0
    correct, predicted, gold = (sum(line[key].values()) for key in ("correct", "predicted", "gold"))
    return 2.0 * correct, float(predicted + gold)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """0 where nothing can be found."""
    return np.divide(above, below, out=np.zeros_like(above, dtype=float), where=below > 0)
