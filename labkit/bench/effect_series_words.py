"""The words of a report on what runs along a quantity: training examples, steps of adaptation, steps of the task; and
on both orders of question and context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from labkit.bench.arms import ADAPTED, OBJECTIVES, REFERENCE, arm
from labkit.bench.effect_gaps import bullets, points, verdict
from labkit.bench.effect_names import methods_apart

RISES = {"rise": "the score", "growth": "the difference"}


def along(conditions: Sequence[dict], orders: Sequence[dict[str, Any]], budgets: Sequence[dict[str, Any]]) -> list[str]:
    """A paragraph for each quantity along which something was measured."""
    return [text for text in (_sizes(conditions), _steps(conditions), _budgets(budgets), _orders(orders)) if text]


def _sizes(conditions: Sequence[dict]) -> str:
    told = []
    for each in conditions:
        sizes = each.get("sizes", ())
        names = dict.fromkeys(n for size in sizes for n, one in size["arms"].items() if "difference" in one)
        for name in names:
            there = [size for size in sizes if "difference" in size["arms"].get(name, {})]
            gaps = ", ".join(_at_size(size, name) for size in there)
            text = f"{name} on {each['name']}: {gaps}"
            if growth := there[0]["arms"][name].get("growth"):
                text += (
                    f"; on the {growth['n_seeds']} seeds of both, with {sizes[-1]['size']:,} rather than "
                    f"{there[0]['size']:,} examples the difference moves by {points(growth)}"
                )
            told.append(text)
        told += [
            f"{pair['one']} less {pair['other']} on {each['name']}: {points(pair['difference'])} with {size['size']:,}"
            + (f", of which {points(pair['beyond'])} beyond the mask alone" if "beyond" in pair else "")
            for size in sizes[:-1]
            for pair in size.get("pairs", ())
            if (pair["other"], pair["one"].partition(":")[0]) not in _along_steps(size["arms"])
        ]
    if not told:
        return ""
    sized = [name for each in conditions for size in each.get("sizes", ()) for name in size["arms"]]
    adapted = any(name.partition(":")[0] in OBJECTIVES for name in sized)
    unlabelled = "; an adaptation reads the texts of all, without labels" if adapted else ""
    return bullets(
        "**Over the number of training examples** (difference to causal, each with as many; the rates are those of the "
        f"full set; fewer examples are fewer steps too, and the same examples for every seed{unlabelled}; † causal has "
        "not learned):",
        told,
    )


def _at_size(size: dict[str, Any], name: str) -> str:
    mark = "" if size["arms"][REFERENCE]["learned"] else " †"
    gap = size["arms"][name]["difference"]
    return f"{points(gap)} with {size['size']:,} ({size['steps']:.0f} steps, {gap['n_seeds']} seeds){mark}"


def _steps(conditions: Sequence[dict]) -> str:
    """How many steps of adaptation turn the sign, wherever several numbers of steps were tried."""
    told = []
    for each in conditions:
        for size, arms, pairs in _levels(each):
            for _, objective in sorted(_along_steps(arms)):
                where = each["name"] if size == each["n_train"] else f"{each['name']} with {size:,} examples"
                told.append(f"{where}, {objective.upper()}: {_one_series(objective, arms, pairs)}")
    if not told:
        return ""
    return bullets(
        "**Over the steps of adaptation** (difference to causal without any; in brackets behind it, to the unmasked "
        "model without these steps; † it has not learned the task):",
        told,
    )


def _levels(condition: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any], Sequence[dict[str, Any]]]]:
    """(training examples, arms, pairs), the smaller sets first."""
    for size in condition.get("sizes", ())[:-1]:
        yield size["size"], size["arms"], size.get("pairs", ())
    yield condition["n_train"], {one["name"]: one for one in condition["arms"]}, condition["pairs"]


def _along_steps(arms: dict[str, Any]) -> set[tuple[str, str]]:
    """("bidirectional", objective) of each objective that was tried with several numbers of steps."""
    tried = [name.partition(":")[0] for name, one in arms.items() if "difference" in one]
    return {("bidirectional", objective) for objective in ADAPTED if tried.count(objective) > 1}


def _one_series(objective: str, arms: dict[str, Any], pairs: Sequence[dict[str, Any]]) -> str:
    """none -18.1 [-31.5, -5.1], 50 steps +1.0 [-2.0, 4.0] (+19.1 [9.0, 29.0]), ...; and where the sign turns."""
    unadapted = {pair["one"]: pair["difference"] for pair in pairs if pair["other"] == "bidirectional"}
    found = {0: arms["bidirectional"]["difference"]} if "difference" in arms.get("bidirectional", {}) else {}
    told = {0: f"none {points(found[0])}" + ("" if arms["bidirectional"]["learned"] else " †")} if found else {}
    for name, one in arms.items():
        if name.startswith(f"{objective}:") and "difference" in one:
            steps = arm(name).steps
            found[steps] = one["difference"]
            told[steps] = f"{steps:,} steps {points(found[steps])}"
            told[steps] += f" ({points(unadapted[name])})" if name in unadapted else ""
            told[steps] += "" if one["learned"] else " †"
    ordered = sorted(found)
    said = ", ".join(told[steps] for steps in ordered)
    if len({gap["n_seeds"] for gap in found.values()}) > 1:
        counts = ", ".join(f"{found[steps]['n_seeds']}" for steps in ordered)
        return f"{said}; of {counts} seeds, so it is not said from which number of steps on it is better"
    since = _since(ordered, [verdict(found[steps]) != "harms" for steps in ordered])
    better = _since(ordered, [verdict(found[steps]) == "helps" for steps in ordered])
    return f"{said}; {_worse(since, ordered[0])} and {_better(better)}"


def _worse(since: int | None, first: int) -> str:
    if since is None:
        return "still shown to be worse than causal after the most steps"
    return (
        "never shown to be worse"
        if since == first
        else f"no longer shown to be worse than causal from {since:,} steps on"
    )


def _better(since: int | None) -> str:
    return "not shown to be better after the most" if since is None else f"shown to be better from {since:,} on"


def _since(steps: Sequence[int], holds: Sequence[bool]) -> int | None:
    """The first of the steps from which on it holds at every one; None if it does not at the last."""
    first = None
    for at, true in zip(steps, holds, strict=True):
        first = (at if first is None else first) if true else None
    return first


def _budgets(found: Sequence[dict[str, Any]]) -> str:
    """What learning for longer changes, wherever a set was learned for several numbers of steps."""
    told = []
    for each, apart in zip(found, methods_apart(found), strict=True):
        where = f"{each['name']}, {each['model']}{apart}"
        told += [_for_longer(f"{name} on {where}", one) for name, one in each["arms"].items()]
    if not told:
        return ""
    return bullets(
        "**Over the steps of the task** (each a study of its own, its rates chosen anew; in brackets to causal after "
        "as many; by how much a score or a difference moves is for other seeds on these very texts; † it has not "
        "learned the task):",
        told,
    )


def _for_longer(name: str, one: dict[str, Any]) -> str:
    """causal on a: 48.2 after 200 steps, 1.1 passes; 65.0 after 600 steps, 3.2 passes; it moves by +16.8 [...]"""
    at = []
    for each in one["at"]:
        text = f"{each['mean']:.1f}" + ("" if each["learned"] else " †")
        text += f" ({points(each['difference'])})" if "difference" in each else ""
        at.append(f"{text} after {each['steps']:,.0f} steps, {each['passes']:.1f} passes")
    moves = [f"{what} moves by {points(one[key])}" for key, what in RISES.items() if key in one]
    return f"{name}: {'; '.join([*at, *moves])}"


def _orders(found: Sequence[dict[str, Any]]) -> str:
    told = []
    for each, apart in zip(found, methods_apart(found), strict=True):
        where = f"{each['name']}, {each['model']}{apart}"
        told += [
            f"{name} on {where}: {one['first']:.1f} with the question first, {one['last']:.1f} "
            f"with the question last ({points(one['difference'])})"
            for name, one in each["arms"].items()
        ]
    if not told:
        return ""
    return bullets(
        "**Where the question stands** (a causal model cannot know in the context what is asked after it; intervals "
        "for other seeds on these very texts):",
        told,
    )
