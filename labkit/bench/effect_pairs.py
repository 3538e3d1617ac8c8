"""Which arms are compared with each other, beside the difference of every arm to the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.bench.arms import Arm
from labkit.bench.effect_data import Cell, gap_in_points

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
    asked = [
        (one, other)
        for one in cells.values()
        for other in cells.values()
        if _belong_together(one.arm, other.arm) and set(one.judged) & set(other.judged)
    ]
    gaps = [gap_in_points(one.counted(), other.counted(), together=len(asked)) for one, other in asked]
    names = [{"one": one.arm.name, "other": other.arm.name} for one, other in asked]
    return [each | {"difference": gap} for each, gap in zip(names, gaps, strict=True)]


def _belong_together(first: Arm, second: Arm) -> bool:
    kinds = first.name.partition(":")[0], second.name.partition(":")[0]
    if kinds in PAIRS and (first.steps == second.steps or kinds[1] in UNADAPTED):
        return True
    sides = first.share, second.share  # as many layers unmasked on another side
    return None not in sides and sides[0] < sides[1] and sides[0][1] == sides[1][1]
