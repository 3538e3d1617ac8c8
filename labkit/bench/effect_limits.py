"""What a report cannot say: the limits of its models, budgets, seeds, rates and intervals, in words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from labkit.bench.arms import arm
from labkit.bench.effect_gaps import bullets, halves, verdict, verdict_together

FEW = 3  # seeds: Student's t of two degrees of freedom, whose tails are long
KINDS = {"mlm": "adaptation by MLM", "mntp": "adaptation by MNTP", "encoder": "a model that was made bidirectional"}
TASKS = {"qa": "questions", "ner": "entities", "classify": "sentences"}
SERIES = {"adaptation": "a curve over the steps of adaptation", "size": "a curve over the size of the training set"}


def still_learning(arms: Sequence[dict]) -> str:
    """In how many of their runs dev was at its best at the end, in half a sentence; empty where none had several
    evaluations.
    """
    last, several = _best_was_last(arms)
    return f", and in {last} of these {several} runs dev was at its best at the end" if several else ""


def _best_was_last(arms: Sequence[dict]) -> tuple[int, int]:
    """In how many runs of the full sets the best evaluation was the last, of how many that had several."""
    counts = [one["best_was_last"] for one in arms if "best_was_last" in one]
    return sum(last for last, _ in counts), sum(several for _, several in counts)


def unknown(conditions: Sequence[dict], curves: Sequence[dict]) -> str:
    models = sorted({f"{each['model']} ({each['method']})" for each in conditions})
    arms = [(each, one) for each in conditions for one in each["arms"]]
    seeds = sorted({one["n_seeds"] for _, one in arms})
    smaller = [int(size["steps"]) for each in conditions for size in each.get("sizes", ())]
    steps = sorted({*smaller, *(int(one["steps"]) for _, one in arms)})
    passes = sorted({round(each["passes"], 1) for each in conditions})
    lead = (
        f"**Not known:** other models than {', '.join(models)}; larger budgets than {_range(steps)} steps, which are "
        f"{_range(passes)} passes over the training rows; more than {_range(seeds)} seeds; other training sets, splits "
        "and draws of these data."
    )
    told = []
    if missing := _not_measured(conditions, curves):
        told.append(f"Not measured here at all: {', '.join(missing)}.")
    last, several = _best_was_last([one for _, one in arms])
    if several:
        told.append(
            f"In {last} of {several} runs with several evaluations (all training examples) the best on dev was the "
            "last: where that is most, differences are of how fast a task is learned, and not of how well it can be."
        )
    told += [_of_seeds(conditions), *_of_rates(conditions), _of_adaptations(conditions), _by_chance(conditions)]
    told += [_older_intervals(conditions), _older_baselines(conditions)]
    return bullets(lead, [each for each in told if each])


def _of_seeds(conditions: Sequence[dict]) -> str:
    """Where arms of one condition have different numbers of seeds."""
    told = []
    for each in conditions:
        by_count: dict[int, list[str]] = {}
        for one in each["arms"]:
            by_count.setdefault(one["n_seeds"], []).append(one["name"])
        if len(by_count) > 1:
            counts = " and ".join(f"{n} for {', '.join(names)}" for n, names in sorted(by_count.items(), reverse=True))
            told.append(f"{each['name']} ({counts})")
    if not told:
        return ""
    return (
        f"Seeds differ in number on {'; '.join(told)}: where more were run because the first had left a sign open, "
        "intervals are a little too narrow."
    )


def _of_adaptations(conditions: Sequence[dict]) -> str:
    """The training before the task has settings that nothing has chosen."""
    rates = {
        each["settings"]["adaptation_rate"]
        for each in conditions
        if each.get("settings", {}).get("adaptation_rate") and any(arm(one["name"]).objective for one in each["arms"])
    }
    if not rates:
        return ""
    told = " and ".join(f"{rate:g}" for rate in sorted(rates))
    return f"Before the task (mntp, mlm, next) one learning rate was used, {told}, untuned."


def _of_rates(conditions: Sequence[dict]) -> list[str]:
    two = [each for each in conditions if 1 < len(each["learning_rates"]) < 3]
    few = {each["name"]: ", ".join(_at_upper_end(each)) for each in two}
    edge = [
        f"{one['name']} on {each['name']} ({one['rate']:g})"
        for each in conditions
        if each["name"] not in few
        for one in each["arms"]
        if one["edge"]
    ]
    named = [name + (f" (the larger was the better for {arms})" if arms else "") for name, arms in few.items()]
    told = [f"Only two rates were tried on {', '.join(named)}: each arm's is at an end."] if few else []
    if edge:
        told.append(
            f"The best rate is at an end of the grid for {'; '.join(edge)}: with a wider grid these may be better. "
            "Every rate was tried with one seed."
        )
    return told


def _at_upper_end(condition: dict[str, Any]) -> list[str]:
    return [one["name"] for one in condition["arms"] if one["rate"] == max(condition["learning_rates"])]


def _by_chance(conditions: Sequence[dict]) -> str:
    """How many differences are told here, and how many would leave out zero if nothing differed."""
    told = [one["difference"] for each in conditions for one in each["arms"] if "difference" in one]
    smaller = [size for each in conditions for size in each.get("sizes", ())[:-1]]  # the last is the full set
    told += [pair["difference"] for each in [*conditions, *smaller] for pair in each.get("pairs", ())]
    of_sizes = [one for size in smaller for one in size["arms"].values()]
    told += [one[key] for one in of_sizes for key in ("difference", "growth") if key in one]
    told += [pair["beyond"] for each in [*conditions, *smaller] for pair in each.get("pairs", ()) if "beyond" in pair]
    told += [gap for each in conditions for one in each["arms"] for _, gap in halves(each, one["name"])]
    told = [gap for gap in told if gap["low"] is not None]
    clear = [gap for gap in told if verdict(gap) != "open"]
    corrected = [gap for gap in clear if "together" in gap]
    barely = [gap for gap in corrected if verdict_together(gap) == "open"]
    more = ""
    if few := [_widening(gap) for gap in barely if gap["n_seeds"] <= FEW]:
        more += (
            f" {len(few)} of these have {FEW} seeds or fewer, where such an interval is {median(few):.1f} times as "
            "wide as the one by itself: that says more of the number of seeds than of the effect."
        )
    if unknown := len(clear) - len(corrected):
        more += f" For {unknown} of the {len(clear)} that is not known: their runs were not kept."
    return (
        f"Of {len(told)} differences that are told here, {len(clear)} leave out zero, each by itself; "
        f"{0.05 * len(told):.1f} would on average if nothing differed. Those of one condition share their causal runs "
        f"and their test set. {len(barely)} of the {len(clear)} no longer leave it out where all of a kind are taken "
        "together (Bonferroni; the kinds: a condition's differences to causal, its pairs, what is beyond the mask "
        "alone, its halves, and each of these with as many training examples): they are marked 'barely'."
        f"{more} Those by kind of entity or place of "
        "the answer, in the tables, are not corrected."
    )


def _widening(gap: dict[str, Any]) -> float:
    """How many times as wide the interval is that holds for all of a kind."""
    return (gap["high_together"] - gap["low_together"]) / (gap["high"] - gap["low"])


def _older_intervals(conditions: Sequence[dict]) -> str:
    """Of conditions that come from earlier reports, whose runs may be gone."""
    older = [each["name"] for each in conditions if "intervals" not in each]
    return f"The intervals of {', '.join(older)} are not widened for few groups." if older else ""


def _older_baselines(conditions: Sequence[dict]) -> str:
    """Of conditions in which what needs no model was not judged text by text."""
    older = [each["name"] for each in conditions if not any("over_baseline" in one for one in each["arms"])]
    if not older:
        return ""
    return (
        f"On {', '.join(older)} the baselines' answers were not kept: there an arm has learned if its interval over "
        "the seeds is above the baseline's score on these texts, which on others would be another."
    )


def _not_measured(conditions: Sequence[dict], curves: Sequence[dict]) -> list[str]:
    """What `labkit bench mask-effect` can ask and these studies did not."""
    by_task: dict[str, set[str]] = {}
    for each in conditions:
        by_task.setdefault(each["task"], set()).update(one["name"].partition(":")[0] for one in each["arms"])
    missing = []
    for kind, told in KINDS.items():
        without = [TASKS[task] for task, names in by_task.items() if kind not in names]
        some = len(without) < len(by_task)
        missing += [f"{told} on {' and '.join(without)}" if some else told] if without else []
    tasks, names_of_data = {each["task"] for each in conditions}, {each["name"] for each in conditions}
    missing += [told for task, told in TASKS.items() if task not in tasks]
    if "qa" in tasks and not any("/question-last" in name for name in names_of_data):
        missing.append("the question after the context")
    kinds = {curve["kind"] for curve in curves}
    return missing + [told for kind, told in SERIES.items() if kind not in kinds]


def _range(values: Sequence[int | float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
