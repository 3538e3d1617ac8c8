"""Which arms are compared with each other, beside the difference of every arm to the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.bench.arms import REFERENCE, Arm
from labkit.bench.effect_data import Cell, estimate_in_points, gap_in_points
from labkit.bench.paired import Counted, contrast

PAIRS = (
    ("bidirectional", "repeated"),
    ("mntp", "next"),
    ("mlm", "next"),
    ("mntp", "repeated"),
    ("mlm", "repeated"),
    ("mntp", "bidirectional"),
    ("mlm", "bidirectional"),
    ("mlm", "mntp"),
    ("encoder", "bidirectional"),
    ("encoder", "repeated"),
)
UNADAPTED = ("repeated", "bidirectional")  # these are set against an adaptation of any number of steps, or an encoder


def pairs(cells: Mapping[str, Cell]) -> list[dict[str, Any]]:
    """Differences of arms that answer a question with each other, such as mntp:200 and next:200.

    [{"one", "other", "difference"}, ...]; of an adaptation and its control also `beyond`: how much of the difference
    is not that of removing the mask alone.
    """
    asked = [
        (one, other)
        for one in cells.values()
        for other in cells.values()
        if _belong_together(one.arm, other.arm) and set(one.judged) & set(other.judged)
    ]
    found = {
        (one.arm.name, other.arm.name): {
            "one": one.arm.name,
            "other": other.arm.name,
            "difference": gap_in_points(one.counted(), other.counted(), together=len(asked)),
        }
        for one, other in asked
    }
    beyond = {key: four for key in found if (four := _four(*key, cells))}
    for key, four in beyond.items():
        gap = estimate_in_points(contrast(four, together=len(beyond)))
        found[key]["beyond"] = gap | {"together": len(beyond)}
    return list(found.values())


def _four(one: str, other: str, cells: Mapping[str, Cell]) -> list[tuple[int, Counted]]:
    """What an adaptation adds to the open model, less what its control adds to the causal one; [] of other pairs.

    Of mntp:200 less next:200 the rest is the mask alone: bidirectional less causal.
    """
    if other.partition(":")[0] != "next" or not {"bidirectional", REFERENCE} <= set(cells):
        return []
    weights = {one: 1, "bidirectional": -1, other: -1, REFERENCE: 1}
    four = [(weight, cells[name].counted()) for name, weight in weights.items()]
    return four if set.intersection(*(set(each.seeds) for _, each in four)) else []


def _belong_together(first: Arm, second: Arm) -> bool:
    kinds = first.name.partition(":")[0], second.name.partition(":")[0]
    if kinds in PAIRS and (first.steps == second.steps or kinds[1] in UNADAPTED):
        return True
    sides = first.share, second.share  # as many layers unmasked on another side
    return None not in sides and sides[0] < sides[1] and sides[0][1] == sides[1][1]
