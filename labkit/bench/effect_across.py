"""What a report tells across its conditions: by the order of question and context, and over the steps of the task.

Made of what reports hold, the scores of the seeds, so that studies of several machines go together; its intervals are
for other seeds on these very texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from labkit.bench.arms import REFERENCE
from labkit.bench.effect_names import HARMLESS, agree, are_as_many, grouped, of, settings, shared
from labkit.bench.paired import LEVEL
from labkit.viz.intervals import student_t

LONGER = ("max_steps", "epochs", HARMLESS)  # what may differ where a set is learned for longer
FIRST, LAST = "/question-first", "/question-last"


def orders(conditions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where both orders of question and context were asked, arm by arm: the score with the question last less first.

    [{"name", "model", "method", "settings", "arms": {arm: {"first", "last", "difference"}}}, ...]
    """
    found = []
    for last in (each for each in conditions if each["name"].endswith(LAST)):
        name, model, method = last["name"].removesuffix(LAST), last["model"], last["method"]
        if first := _asked_first((name + FIRST, model, method), last, conditions):
            arms = [_by_name(each) for each in (first, last)]
            crossed = {arm: _crossed(arms[0][arm], arms[1][arm]) for arm in arms[1] if arm in arms[0]}
            of_both = {"name": name, "model": model, "method": method, "settings": settings(last)}
            found.append(of_both | {"arms": crossed})
    return found


def _asked_first(
    wanted: tuple[str, str, str], last: dict[str, Any], conditions: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """The condition that was learned with as much and with the same settings, and is asked first: of several the one
    that has most of them written down, and was evaluated as often.
    """
    fits = [each for each in conditions if of(each) == wanted and are_as_many(each, last)]
    fits = [each for each in fits if agree(each, last, but=(HARMLESS,))]
    known = settings(last).keys()
    return max(fits, key=lambda each: (agree(each, last), len(known & settings(each).keys())), default=None)


def budgets(conditions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a model has learned a set several times, which differ by nothing but how long: arm by arm, shortest first.

    [{"name", "model", "method", "settings", "metric", "arms": {arm: {"at": [{"steps", "passes", "scores", "mean",
    "learned", "difference"}, ...], "rise", "growth"}}}, ...]: `rise` is the arm's own score with the most steps less
    that with the fewest, `growth` the same of its difference to the reference. An arm with one budget is left out.
    """
    found = []
    for together in _longer_and_longer(conditions):
        names = dict.fromkeys(one["name"] for each in together for one in each["arms"])
        arms = {name: _over_steps(name, together) for name in names}
        arms = {name: one for name, one in arms.items() if len(one["at"]) > 1}
        if REFERENCE in arms:
            name, model, method = of(together[0])
            made_with = {"settings": shared(together), "metric": together[0]["metric"]}
            found.append({"name": name, "model": model, "method": method, **made_with, "arms": arms})
    return found


def curve_over_steps(budget: dict[str, Any]) -> dict[str, Any]:
    """One of `budgets` as a curve of a report: the test scores of the seeds over the steps of the task."""
    metric = "F1" if budget["metric"] == "f1" else budget["metric"]
    lines = {name: [(at["steps"], at["scores"]) for at in arm["at"]] for name, arm in budget["arms"].items()}
    where = {key: budget[key] for key in ("model", "method", "settings")} | {"condition": budget["name"]}
    return where | {"kind": "budget", "x": "steps of the task", "y": f"test {metric}", "log_x": False, "lines": lines}


def _longer_and_longer(conditions: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The conditions that differ by how long was learned alone, those of one set together and the shortest first."""
    found = grouped(conditions, is_alike)
    return [sorted(group, key=steps_of) for group in found if len({steps_of(each) for each in group}) > 1]


def is_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the two differ by nothing but how long was learned, as far as both reports have written it down."""
    return of(one) == of(other) and are_as_many(one, other) and agree(one, other, but=LONGER)


def steps_of(condition: dict[str, Any]) -> float | int:
    """The training steps that the reference took at most, of its seeds the median; 0 where a report has not kept it."""
    return _by_name(condition).get(REFERENCE, {}).get("steps", 0)


def _over_steps(name: str, together: Sequence[dict[str, Any]]) -> dict[str, Any]:
    at, scores, gaps = [], [], []
    for each in together:
        arms = _by_name(each)
        if name in arms:
            one = arms[name]
            keys = ("scores", "mean", "learned", "difference")
            at.append({"steps": steps_of(each), "passes": each["passes"]} | {k: one[k] for k in keys if k in one})
            scores.append(_by_seed(one))
            gaps.append(_less(scores[-1], _by_seed(arms[REFERENCE])))
    found: dict[str, Any] = {"at": at}
    if len(at) > 1 and (rise := _less(scores[-1], scores[0])):
        found["rise"] = _over_seeds(list(rise.values()))
    if len(at) > 1 and name != REFERENCE and (growth := _less(gaps[-1], gaps[0])):
        found["growth"] = _over_seeds(list(growth.values()))
    return found


def _crossed(first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    gaps = _less(_by_seed(last), _by_seed(first))
    gap = _over_seeds(list(gaps.values())) if gaps else _unknown(last["mean"] - first["mean"])
    return {"first": first["mean"], "last": last["mean"], "difference": gap}


def _by_name(condition: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in condition["arms"]}


def _by_seed(one: dict[str, Any]) -> dict[int, float]:
    return dict(zip(one["seeds"], one["scores"], strict=True))


def _less(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """The differences by seed, of the seeds that both have."""
    return {seed: one[seed] - other[seed] for seed in one if seed in other}


def _over_seeds(gaps: Sequence[float]) -> dict[str, Any]:
    """Their mean with Student's interval; without one where there is one seed."""
    gap = _unknown(fmean(gaps)) | {"n_seeds": len(gaps)}
    if len(gaps) > 1:
        half = student_t(len(gaps) - 1, LEVEL) * stdev(gaps) / len(gaps) ** 0.5
        gap |= {"low": gap["mean"] - half, "high": gap["mean"] + half}
    return gap


def _unknown(mean: float) -> dict[str, Any]:
    return {"mean": mean, "low": None, "high": None, "n_seeds": 0}
