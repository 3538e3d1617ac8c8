"""Differences as a report holds them: found by arm and by pair, sorted by what they show, and written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

BINS = ("helps", "harms", "open", "unlearned")


class Told(NamedTuple):
    """A difference of a condition; `learned`: whether the arm that is judged by it has learned the task."""

    condition: dict[str, Any]
    gap: dict[str, Any]
    learned: bool = True

    @property
    def bin(self) -> str:
        """One of BINS. What a model loses that has not learned the task is no effect of its mask."""
        return verdict(self.gap) if self.learned else "unlearned"


def has_learned(estimate: Mapping[str, Any], baselines: Mapping[str, float | int]) -> bool:
    """Whether a score is shown to be over every baseline that needs no model: the lower end of its interval is."""
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
        Told(each, one["difference"], one["learned"])
        for each in conditions
        for one in each["arms"]
        if one["name"] == name and "difference" in one
    ]


def pairs_of(conditions: Sequence[dict], one: str, other: str) -> list[Told]:
    """Of all pairs of the arms `one` (its name, or that without its steps) and `other`."""
    found = []
    for each in conditions:
        learned = {arm["name"]: arm["learned"] for arm in each["arms"]}
        for pair in each["pairs"]:
            if one in (pair["one"], pair["one"].partition(":")[0]) and pair["other"] == other:
                found.append(Told(each, pair["difference"], learned.get(pair["one"], True)))
    return found


def sorted_out(told: Sequence[Told], helps: str = "helps", harms: str = "harms") -> str:
    """helps in 1 of 3 (a: +3.0 [1.0, 5.0]), harms in 1 (...), shows no clear difference in 1 (...)"""
    if not told:
        return "has no finished run"
    said = []
    for name, word in zip(BINS, (helps, harms, "shows no clear difference", "has not learned the task"), strict=True):
        if those := [each for each in told if each.bin == name]:
            listed = "; ".join(f"{each.condition['name']} {points(each.gap)}" for each in those)
            said.append(f"{word} in {len(those)}{'' if said else f' of {len(told)}'} ({listed})")
    return ", ".join(said)


def counted(told: Sequence[Told], things: str = "", helped: str = "helped", harmed: str = "harmed") -> str:
    """helped in 1 of 8 conditions (by 5.9 points), harmed in 2 (by 8.1 to 12.6 points), made no clear difference in 3,
    and in 2 it had not learned the task; of those with an interval.
    """
    told = [each for each in told if each.gap["low"] is not None]
    said = []
    for name, word in zip(BINS, (helped, harmed, "made no clear difference", ""), strict=True):
        sizes = sorted(abs(each.gap["mean"]) for each in told if each.bin == name)
        if name == "unlearned":
            said += [f"and had not learned the task in {len(sizes)}"] if sizes else []
            continue
        by = f" (by {_between(sizes)} points)" if sizes and name != "open" else ""
        said.append(f"{word} in {len(sizes) or 'none'}{'' if said else f' of {len(told)}{things}'}{by}")
    return ", ".join(said)


def _between(sizes: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{size:.1f}" for size in (sizes[0], sizes[-1])))
