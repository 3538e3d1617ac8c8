"""Which arms are compared with each other, beside the difference of every arm to the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.bench.arms import Arm
from labkit.bench.effect_data import Cell, estimate_in_points
from labkit.bench.paired import difference

PAIRS = (
    ("bidirectional", "repeated"),
    ("mntp", "next"),
    ("mlm", "next"),
    ("mntp", "repeated"),
    ("mntp", "bidirectional"),
    ("mlm", "bidirectional"),
)
UNADAPTED = ("repeated", "bidirectional")  # these are compared with an adaptation of any number of steps


def pairs(cells: Mapping[str, Cell]) -> list[dict[str, Any]]:
    """Differences of arms that answer a question with each other, such as mntp:200 and next:200."""
    found = []
    for first in cells.values():
        for second in cells.values():
            if _belong_together(first.arm, second.arm) and set(first.judged) & set(second.judged):
                gap = estimate_in_points(difference(first.counted(), second.counted()))
                found.append({"one": first.arm.name, "other": second.arm.name, "difference": gap})
    return found


def _belong_together(first: Arm, second: Arm) -> bool:
    kinds = first.name.partition(":")[0], second.name.partition(":")[0]
    if kinds in PAIRS and (first.steps == second.steps or kinds[1] in UNADAPTED):
        return True
    sides = first.share, second.share  # as many layers unmasked on another side
    return None not in sides and sides[0] < sides[1] and sides[0][1] == sides[1][1]
