"""Differences as a report holds them: found by arm and by pair, sorted by what they show, and written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from labkit.bench.arms import REFERENCE
from labkit.bench.effect_across import is_alike, steps_of
from labkit.bench.effect_names import grouped

TO_BASELINE = "as far as a baseline that needs no model"
NOTHING = "has no run to compare: none on all examples with a seed that the other arm has, too"
BINS = ("helps", "harms", "fell", "open", "unlearned")


class Told(NamedTuple):
    """A difference of a condition; `learned`, `other_learned`: whether the `arm` that is judged by it has learned the
    task, and the one that it is set against.
    """

    condition: dict[str, Any]
    gap: dict[str, Any]
    learned: bool = True
    other_learned: bool = True
    arm: str = ""

    @property
    def bin(self) -> str:
        """One of BINS. "fell": it lost so much to one that has learned the task that it is not shown to have itself."""
        if self.learned:
            return verdict(self.gap)
        return "fell" if self.other_learned and verdict(self.gap) == "harms" else "unlearned"

    @property
    def beat_a_beginner(self) -> bool:
        """Whether it helps beside one that is not shown to have learned the task, so that much of it is that."""
        return self.bin == "helps" and not self.other_learned


def has_learned(estimate: Mapping[str, Any], baselines: Mapping[str, float | int]) -> bool:
    """Whether a score is shown to be over every baseline that needs no model.

    By its difference to the best of them, paired by example, where that is known (`over_baseline`). Of older studies
    the lower end of its interval has to be above, which is for other seeds on these very texts alone.
    """
    if gap := estimate.get("over_baseline"):
        return (gap["mean"] if gap["low"] is None else gap["low"]) > 0
    score = estimate["mean"] if estimate["low"] is None else estimate["low"]
    return score > max(baselines.values(), default=float("-inf"))


def verdict(gap: Mapping[str, Any]) -> str:
    """ "helps", "harms", or "open": the interval has zero in it, or there is none."""
    if gap["low"] is None or gap["low"] <= 0 <= gap["high"]:
        return "open"
    return "helps" if gap["mean"] > 0 else "harms"


def verdict_together(gap: Mapping[str, Any]) -> str:
    """As `verdict`, by the interval that holds at once for all that are told beside it (`together`)."""
    if "low_together" not in gap:
        return verdict(gap)
    return verdict({**gap, "low": gap["low_together"], "high": gap["high_together"]})


def points(gap: Mapping[str, Any]) -> str:
    """+3.2 [1.1, 5.3]; "barely" if the interval that holds for all that are told beside it has zero in it."""
    if gap["low"] is None:
        return f"{gap['mean']:+.1f} ({'one seed' if gap.get('n_seeds', 1) == 1 else 'no interval'})"
    barely = ", barely" if verdict(gap) != "open" and verdict_together(gap) == "open" else ""
    return f"{gap['mean']:+.1f} [{gap['low']:.1f}, {gap['high']:.1f}]{barely}"


def differences(conditions: Sequence[dict], name: str) -> list[Told]:
    """Wherever the arm has a difference to the reference."""
    return [
        Told(each, one["difference"], one["learned"], _learned(each)[REFERENCE], name)
        for each in conditions
        for one in each["arms"]
        if one["name"] == name and "difference" in one
    ]


def pairs_of(conditions: Sequence[dict], one: str, other: str) -> list[Told]:
    """Of all pairs of the arms `one` (its name, or that without its steps) and `other`."""
    found = []
    for each in conditions:
        learned = _learned(each)
        for pair in each["pairs"]:
            if one in (pair["one"], pair["one"].partition(":")[0]) and pair["other"] == other:
                both = (learned.get(pair[side], True) for side in ("one", "other"))
                found.append(Told(each, pair["difference"], *both, pair["one"]))
    return found


def _learned(condition: dict[str, Any]) -> dict[str, bool]:
    return {arm["name"]: arm["learned"] for arm in condition["arms"]}


def halves(condition: dict[str, Any], arm: str) -> list[tuple[str, dict]]:
    """(name, difference to the reference) of the halves of Which way round; [] elsewhere."""
    parts = [part for part in condition["parts"] if part["name"].endswith(" decides")]
    return [(part["name"], gap) for part in parts if (gap := part["arms"].get(arm, {}).get("difference"))]


def sorted_out(told: Sequence[Told], helps: str = "helps", harms: str = "harms") -> str:
    """helps in 1 of 3 (a: +3.0 [1.0, 5.0]), harms in 1 (...), shows no clear difference in 1 (...)"""
    if not told:
        return NOTHING
    said = []
    words = (helps, harms, f"falls {TO_BASELINE}", "shows no clear difference", "is not shown to have learned the task")
    for name, word in zip(BINS, words, strict=True):
        if those := [each for each in told if each.bin == name]:
            listed = "; ".join(
                f"{each.condition['name']} {points(each.gap)}{', to one that has not learned' * each.beat_a_beginner}"
                for each in those
            )
            said.append(f"{word} in {len(those)}{'' if said else f' of {len(told)}'} ({listed})")
    return ", ".join(said)


def bullets(lead: str, told: Sequence[str]) -> str:
    """A paragraph and a list in Markdown: what is told of several things is looked up, and not read through."""
    return "\n".join([lead, "", *(f"- {each}" for each in told)]) if told else lead


def counted(told: Sequence[Told], things: str = "", helped: str = "helped", harmed: str = "harmed") -> str:
    """helped in 1 of 8 conditions (by 5.9 points), harmed in 2 (by 8.1 to 12.6 points), made no clear difference in 3,
    and was not shown to have learned the task in 2; of those with an interval, and of several budgets the longest.
    """
    told = longest(told)
    said = []
    words = (
        helped,
        harmed,
        f"fell {TO_BASELINE}",
        "made no clear difference",
        "was not shown to have learned the task",
    )
    for name, word in zip(BINS, words, strict=True):
        sizes = sorted(abs(each.gap["mean"]) for each in told if each.bin == name)
        if name in ("fell", "open", "unlearned") and not sizes:
            continue
        beginners = sum(each.beat_a_beginner for each in told if each.bin == name)
        over = f"; in {beginners} of them from one that has not learned the task" if beginners else ""
        by = f" (by {_between(sizes)} points{over})" if sizes and name not in ("open", "unlearned") else ""
        said.append(f"{word} in {len(sizes) or 'none'}{'' if said else f' of {len(told)}{things}'}{by}")
    return ", ".join(said)


def longest(told: Sequence[Told]) -> list[Told]:
    """Those with an interval; of a set that an arm has learned several times the one with the most steps alone, as it
    would count twice. An arm that was adapted is one, however many steps that took.
    """
    known = [each for each in told if each.gap["low"] is not None]
    found: list[Told] = []
    for group in grouped(known, _are_of_one_set):
        counts = max(group, key=lambda each: steps_of(each.condition)).condition
        found += [each for each in group if each.condition is counts]
    return found


def _are_of_one_set(one: Told, other: Told) -> bool:
    arms = [each.arm.partition(":")[0] for each in (one, other)]
    return arms[0] == arms[1] and is_alike(one.condition, other.condition)


def _between(sizes: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{size:.1f}" for size in (sizes[0], sizes[-1])))
