"""Dividing examples so that what belongs together stays together: a part held out, and k folds.

Examples of one `group` (a passage, an article, a post) never stand on two sides; an example without a group is its own.
What is drawn depends on the seed and on the groups, not on the order in which the examples came.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from labkit.errors import DataError

_NUMBERED = re.compile(r"(sentence|document|article) \d+")  # groups that the readers count where a file names none


def held_out(examples: Sequence[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """(the rest, about `share` of the examples), by groups; both in the order of `examples` and neither empty.

    Raises:
        DataError: a share outside (0, 1), or all examples are of one group.
    """
    if not 0 < share < 1:
        raise DataError(f"the share to hold out is {share}; it lies between 0 and 1")
    groups = _shuffled_groups(examples, seed)
    if len(groups) < 2:
        raise DataError("all examples are of one group (one passage, one article): nothing can be held out")
    chosen: set[str] = set()
    count = 0
    for name, members in groups[:-1]:
        if chosen and count + len(members) / 2 > share * len(examples):
            break
        chosen.add(name)
        count += len(members)
    return [e for e in examples if group_of(e) not in chosen], [e for e in examples if group_of(e) in chosen]


def folds(examples: Sequence[Any], k: int, seed: int) -> list[list[Any]]:
    """The examples in `k` parts of about one size; every group is in one part, whole. Parts keep the examples' order.

    Groups are dealt largest first, each to the smallest part: with passages that have different numbers of questions
    the parts are as even as that allows.

    Raises:
        DataError: fewer than 2 folds, or fewer groups than folds.
    """
    groups = _shuffled_groups(examples, seed)
    if k < 2 or len(groups) < k:
        raise DataError(f"{k} folds of {len(groups)} groups (passages, articles): give from 2 to {len(groups)}")
    part_of: dict[str, int] = {}
    sizes = [0] * k
    for name, members in sorted(groups, key=lambda group: -len(group[1])):  # stable: among equals as shuffled
        smallest = min(range(k), key=lambda part: sizes[part])
        part_of[name] = smallest
        sizes[smallest] += len(members)
    return [[example for example in examples if part_of[group_of(example)] == part] for part in range(k)]


def group_of(example: Any) -> str:
    """The name of the group, or of the example where it has none."""
    return f"group {example.group}" if example.group else f"example {example.id}"


def has_name(example: Any) -> bool:
    """Whether the file named the example's group: a name means the same in every file, "document 1" does not."""
    return bool(example.group) and not _NUMBERED.fullmatch(example.group)


def _shuffled_groups(examples: Sequence[Any], seed: int) -> list[tuple[str, list[Any]]]:
    members: dict[str, list[Any]] = defaultdict(list)
    for example in examples:
        members[group_of(example)].append(example)
    groups = sorted(members.items())
    random.Random(seed).shuffle(groups)
    return groups
