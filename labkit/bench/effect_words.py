"""The report of a comparison in words: what the numbers say, and what they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from labkit.bench.arms import ADAPTED, REFERENCE, arm
from labkit.bench.effect_gaps import (
    Told,
    counted,
    differences,
    pairs_of,
    points,
    sorted_out,
    verdict,
    verdict_together,
)  # fmt: skip
from labkit.bench.effect_series_words import along

FEW = 3  # seeds: Student's t of two degrees of freedom, whose tails are long
KINDS = {"mlm": "adaptation by MLM", "mntp": "adaptation by MNTP", "encoder": "a model that was made bidirectional"}
TASKS = {"qa": "questions", "ner": "entities", "classify": "sentences"}
SERIES = {"adaptation": "a curve over the steps of adaptation", "size": "a curve over the size of the training set"}
NEARLY = "widened by their half-widths"
CLAIM = 5.0  # points: "bidirectional attention gives +5 to 10 %", found in many READMEs, and without a source


def paragraphs(found: dict[str, Any]) -> list[str]:
    """When the mask helps and by how much, what the controls say, what is not known; from the numbers alone."""
    conditions = _named_apart(found["conditions"])
    told = [*_in_short(conditions), _removed(conditions), *_unlearned(conditions), *_uneven(conditions)]
    told += [text for text in (_repeated(conditions), _adapted(conditions), _others(conditions)) if text]
    told += along(conditions, found.get("orders", ()))
    told += [text for text in (_diagnostic(conditions), _claim(conditions)) if text]
    return [*told, _unknown(conditions, found["curves"]), *_unfinished(found.get("unfinished", ()))]


def _in_short(conditions: Sequence[dict]) -> list[str]:
    """When does the mask help, by how much, what does the control say, what is not known: one plain paragraph."""
    removed = differences(conditions, "bidirectional")
    if all(each.gap["low"] is None for each in removed):
        return []
    told = [f"**In short.** A model whose mask was removed, and nothing else done, {_did(removed, ' conditions')}."]
    if twice := differences(conditions, "repeated"):
        told.append(f"One that kept its mask and read the input twice {_did(twice)}.")
    if both := pairs_of(conditions, "bidirectional", "repeated"):
        told.append(f"Set against each other, the unmasked one {counted(both, '', 'was better', 'was worse')}.")
    if repaired := [each for kind in ADAPTED for each in pairs_of(conditions, kind, "bidirectional")]:
        better = counted(repaired, " comparisons", "was better for it", "was worse for it")
        told.append(f"One that filled gaps before the task {better}.")
    told += [text for each in conditions if (text := _with_few(each))]
    models = sorted({each["model"] for each in conditions})
    told.append(
        f"This is of {' and '.join(models)} alone: whether it holds for other models, and for longer training, is not "
        "known."
    )
    return [" ".join(told)]


def _with_few(condition: dict[str, Any]) -> str:
    """What the number of training examples changes, where it is shown to: with the fewest, and with all."""
    if not condition.get("sizes"):
        return ""
    few, whole = condition["sizes"][0], condition["sizes"][-1]
    open_ = few["arms"].get("bidirectional", {})
    if "growth" not in open_ or verdict(open_["growth"]) == "open":
        return ""
    text = (
        f"On {condition['name']} the difference of the unmasked one is, with {few['size']:,} examples, "
        f"{points(open_['difference'])}; with {whole['size']:,}, {points(whole['arms']['bidirectional']['difference'])}"
    )
    repaired = [
        pair
        for pair in few.get("pairs", ())
        if pair["other"] == "bidirectional" and verdict(pair["difference"]) != "open"
    ]
    for pair in sorted(repaired, key=lambda pair: arm(pair["one"]).steps)[:1]:  # the fewest steps that are shown to
        text += f"; {pair['one']} less bidirectional, with {few['size']:,}, {points(pair['difference'])}"
    return text + "."


def _did(told: Sequence[Told], things: str = "") -> str:
    return counted(told, things, "beat the causal one", "lost to it")


def _named_apart(conditions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conditions, with the model in the name of those that several models or methods have learned."""
    count = Counter(each["name"] for each in conditions)
    return [
        each | {"name": f"{each['name']} ({each['model']}, {each['method']})"} if count[each["name"]] > 1 else each
        for each in conditions
    ]


def unit(conditions: Sequence[dict[str, Any]]) -> str:
    """Of the differences of these conditions: points of F1, points of accuracy, or what both are."""
    metrics = {"F1" if each["metric"] == "f1" else each["metric"] for each in conditions}
    return f"points of {metrics.pop()}" if len(metrics) == 1 else "points"


def _removed(conditions: Sequence[dict]) -> str:
    gaps = differences(conditions, "bidirectional")
    if not gaps:
        return "**Removing the mask** was not measured: the arm bidirectional has no finished run."
    text = f"**Removing the mask, and nothing else,** {sorted_out(gaps)}."
    for each in conditions:
        halves = _halves(each, "bidirectional")
        if halves:
            told = "; ".join(f"where {name} it {_verb(gap)} ({points(gap)})" for name, gap in halves)
            text += f" {each['name']} is two sets in one: {told}."
    return text


def _halves(condition: dict[str, Any], arm: str) -> list[tuple[str, dict]]:
    """(name, difference to the reference) of the halves of Which way round; [] elsewhere."""
    parts = [part for part in condition["parts"] if part["name"].endswith(" decides")]
    return [(part["name"], gap) for part in parts if (gap := part["arms"].get(arm, {}).get("difference"))]


def _verb(gap: dict[str, Any]) -> str:
    return {"open": "shows no clear difference"}.get(verdict(gap), verdict(gap))


def learned(condition: dict[str, Any]) -> bool:
    """Whether some arm is shown to be better than everything that needs no model."""
    return any(one["learned"] for one in condition["arms"])


def _unlearned(conditions: Sequence[dict]) -> list[str]:
    told = []
    if names := [each["name"] for each in conditions if not learned(each)]:
        told.append(
            f"**Not learned:** in {', '.join(names)} no arm is shown to be better than a baseline that needs no model. "
            "Differences there are between models that fail, and say nothing of the mask."
        )
    below = [
        f"{one['name']} on {each['name']} ({_score(one)}, baseline {max(each['baselines'].values()):.1f})"
        for each in conditions
        if learned(each)
        for one in each["arms"]
        if not one["learned"]
    ]
    if below:
        told.append(
            f"**Not shown to be better than what needs no model:** {'; '.join(below)}. These have not learned the task "
            "at this budget: their gap says that they did not get started, and not what the mask is worth to a model "
            "that has."
        )
    return told


def _score(one: dict[str, Any]) -> str:
    ends = "" if one["low"] is None else f" [{one['low']:.1f}, {one['high']:.1f}]"
    return f"{one['mean']:.1f}{ends}"


def _uneven(conditions: Sequence[dict]) -> list[str]:
    """Arms that had fewer rates to choose from than the others."""
    failed = [
        f"{one['name']} on {each['name']}, rate {rate} ({reason})"
        for each in conditions
        for one in each["arms"]
        for rate, reason in one["failed_rates"].items()
    ]
    return [f"**A smaller grid than the others:** {'; '.join(failed)}."] if failed else []


def _unfinished(found: Sequence[dict]) -> list[str]:
    told = []
    for each in found:
        model = f" ({each['model']}, {each['method']})" if "model" in each else ""
        text = f"{each['name']}{model}, {each['done']} of {each['planned']} runs"
        if each["without"]:
            text += f" (none of {', '.join(each['without'])}"
            text += "; so nothing of it can be compared)" if REFERENCE in each["without"] else ")"
        told.append(text)
    return [f"**Unfinished:** {'; '.join(told)}."] if told else []


def _repeated(conditions: Sequence[dict]) -> str:
    gaps = differences(conditions, "repeated")
    if not gaps:
        return ""
    text = f"**The control: mask left in place, input read twice.** It {sorted_out(gaps)}."
    if against := pairs_of(conditions, "bidirectional", "repeated"):
        text += f" Against it, the unmasked model {sorted_out(against, 'is better', 'is worse')}."
    return text


def _adapted(conditions: Sequence[dict]) -> str:
    names = {one["name"] for each in conditions for one in each["arms"] if one["name"].startswith(("mntp:", "mlm:"))}
    told = []
    for name in sorted(names, key=lambda each: (each.partition(":")[0], int(each.partition(":")[2]))):
        objective, _, steps = name.partition(":")
        text = f"**After {steps} steps of {objective.upper()}** the unmasked model "
        text += sorted_out(differences(conditions, name))
        if against := pairs_of(conditions, name, f"next:{steps}"):
            told_apart = sorted_out(against, "is better", "is worse")
            text += f"; against the causal model with as many steps of next-token prediction it {told_apart}"
        if repaired := pairs_of(conditions, name, "bidirectional"):
            told_apart = sorted_out(repaired, "is better", "is worse")
            text += f"; against the unmasked model without these steps it {told_apart}"
        told.append(text + ".")
    return " ".join(told)


def _others(conditions: Sequence[dict]) -> str:
    names = dict.fromkeys(one["name"] for each in conditions for one in each["arms"])
    told = [
        f"{name} {sorted_out(differences(conditions, name))}"
        for name in names
        if name not in (REFERENCE, "bidirectional", "repeated") and name.partition(":")[0] not in ADAPTED
    ]
    return f"**Other arms.** {'; '.join(told)}." if told else ""


def _diagnostic(conditions: Sequence[dict]) -> str:
    those = [each for each in conditions if "diagnostic" in each]
    told = []
    for each in those:
        by_arm = [_over_the_ceiling(name, halves["after"]) for name, halves in each["diagnostic"].items()]
        told.append((f"{each['name']}: " if len(those) > 1 else "") + "; ".join(by_arm))
    if not told:
        return ""
    return (
        "**Sanity check** (Which way round, the names that only what follows can tell; a model that has not seen it is "
        f"right on one of three at most), right by seed: {'. '.join(told)}."
    )


def _over_the_ceiling(name: str, after: dict[str, Any]) -> str:
    right = ", ".join(str(n) for n in after["right"])
    runs = sum(n > after["ceiling"] for n in after["right"])
    triples = f"{after['triples_over']} of {after['ceiling'] * len(after['right'])} triples"
    return (
        f"{name} {right} of {after['of']} (more than {after['ceiling']} in {runs} of {len(after['right'])} runs, "
        f"over one of three in {triples})"
    )


def _claim(conditions: Sequence[dict]) -> str:
    known = [each for each in conditions if _both_learned(each)]
    left_out = [each["name"] for each in conditions if not _both_learned(each)]
    gaps = [each.gap for each in differences(known, "bidirectional") if each.gap["low"] is not None]
    if not gaps:
        return ""
    below, above = sum(gap["high"] < CLAIM for gap in gaps), sum(gap["low"] >= CLAIM for gap in gaps)
    text = (
        f"**The common claim, +{CLAIM:.0f} to {2 * CLAIM:.0f} points from removing the mask:** of {len(gaps)} "
        f"conditions with an interval it is ruled out at this budget in {below}, borne out in {above}, and open in "
        f"{len(gaps) - below - above}."
    )
    return text + (f" Left out, as one of the two has not learned: {', '.join(left_out)}." if left_out else "")


def _both_learned(condition: dict[str, Any]) -> bool:
    return all(one["learned"] for one in condition["arms"] if one["name"] in (REFERENCE, "bidirectional"))


def _unknown(conditions: Sequence[dict], curves: Sequence[dict]) -> str:
    models = sorted({f"{each['model']} ({each['method']})" for each in conditions})
    arms = [(each, one) for each in conditions for one in each["arms"]]
    seeds = sorted({one["n_seeds"] for _, one in arms})
    smaller = [int(size["steps"]) for each in conditions for size in each.get("sizes", ())]
    steps = sorted({*smaller, *(int(one["steps"]) for _, one in arms)})
    passes = sorted({round(each["passes"], 1) for each in conditions})
    text = (
        f"**Not known:** other models than {', '.join(models)}; larger budgets than {_range(steps)} steps, which are "
        f"{_range(passes)} passes over the training rows; more than {_range(seeds)} seeds; other training sets, splits "
        "and draws of these data."
    )
    if missing := _not_measured(conditions, curves):
        text += f" Not measured here at all: {', '.join(missing)}."
    return text + _of_rates(conditions) + _by_chance(conditions) + _older_intervals(conditions)


def _of_rates(conditions: Sequence[dict]) -> str:
    few = dict.fromkeys(each["name"] for each in conditions if 1 < len(each["learning_rates"]) < 3)
    edge = [
        f"{one['name']} on {each['name']} ({one['rate']:g})"
        for each in conditions
        if each["name"] not in few
        for one in each["arms"]
        if one["edge"]
    ]
    text = f" Only two rates were tried on {', '.join(few)}." if few else ""
    if edge:
        text += (
            f" The best rate is at an end of the grid for {'; '.join(edge)}: with a wider grid these may be better. "
            "Every rate was tried with one seed."
        )
    return text


def _by_chance(conditions: Sequence[dict]) -> str:
    """How many differences are told here, and how many would leave out zero if nothing differed."""
    told = [one["difference"] for each in conditions for one in each["arms"] if "difference" in one]
    smaller = [size for each in conditions for size in each.get("sizes", ())[:-1]]  # the last is the full set
    told += [pair["difference"] for each in [*conditions, *smaller] for pair in each.get("pairs", ())]
    of_sizes = [one for size in smaller for one in size["arms"].values()]
    told += [one[key] for one in of_sizes for key in ("difference", "growth") if key in one]
    told += [gap for each in conditions for _, gap in _halves(each, "bidirectional")]
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
        f" Of {len(told)} differences that are told here, {len(clear)} leave out zero, each by itself; "
        f"{0.05 * len(told):.1f} would on average if nothing differed. Those of one condition share their causal runs "
        f"and their test set. {len(barely)} of the {len(clear)} no longer leave it out where all of a kind are taken "
        "together (Bonferroni; the kinds: a condition's differences to causal, its pairs, its halves, and each of "
        f"these with as many training examples): they are marked 'barely'.{more} Those by kind of entity or place of "
        "the answer, in the tables, are not corrected."
    )


def _widening(gap: dict[str, Any]) -> float:
    """How many times as wide the interval is that holds for all of a kind."""
    return (gap["high_together"] - gap["low_together"]) / (gap["high"] - gap["low"])


def _older_intervals(conditions: Sequence[dict]) -> str:
    """Of conditions that come from earlier reports, whose runs may be gone."""
    older = [each["name"] for each in conditions if "intervals" not in each]
    near = [each["name"] for each in conditions if each.get("intervals") == NEARLY]
    text = f" The intervals of {', '.join(older)} are not widened for few groups." if older else ""
    if near:
        text += (
            f" The runs of {', '.join(near)} were not kept: their intervals were widened for few groups by the two "
            "half-widths alone."
        )
    return text


def _not_measured(conditions: Sequence[dict], curves: Sequence[dict]) -> list[str]:
    """What `labkit bench mask-effect` can ask and these studies did not."""
    names = {one["name"].partition(":")[0] for each in conditions for one in each["arms"]}
    missing = [told for kind, told in KINDS.items() if kind not in names]
    tasks, names_of_data = {each["task"] for each in conditions}, {each["name"] for each in conditions}
    missing += [told for task, told in TASKS.items() if task not in tasks]
    if "qa" in tasks and not any("/question-last" in name for name in names_of_data):
        missing.append("the question after the context")
    kinds = {curve["kind"] for curve in curves}
    return missing + [told for kind, told in SERIES.items() if kind not in kinds]


def _range(values: Sequence[int | float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
