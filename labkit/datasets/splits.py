"""A part held out, and k folds, with the examples of one `group` (a passage, an article, a post) kept together.

An example without a group is its own. The result depends on the seed and the groups, not on the order of the examples.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from labkit.errors import DataError

_NUMBERED = re.compile(r"(sentence|document|article) \d+")  # groups that the readers count where a file names none


def held_out(examples: Sequence[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """(the rest, about `share` of the examples), by groups; both in the order of `examples` and neither empty.

    Raises:
        DataError: a share outside (0, 1), or all examples are of one group.
    """
    groups = _shuffled_groups(examples, seed)
    if not 0 < share < 1:
        raise DataError(f"the share to hold out is {share}; it must be between 0 and 1")
    if len(groups) < 2:
        raise DataError(f"all {len(examples)} examples belong to one group (passage, article): none can be held out")
    chosen: set[str] = set()
    count = 0
    for name, size in groups[:-1]:
        if count + size / 2 <= share * len(examples):
            chosen.add(name)
            count += size
    chosen = chosen or {min(groups, key=lambda group: group[1])[0]}
    return [e for e in examples if group_of(e) not in chosen], [e for e in examples if group_of(e) in chosen]


def folds(examples: Sequence[Any], k: int, seed: int) -> list[list[Any]]:
    """The examples in `k` parts of about equal size; every group is in one part. Parts keep the examples' order.

    scikit-learn's GroupKFold balances the sizes only without a seed.

    Raises:
        DataError: fewer than 2 folds, or fewer groups than folds.
    """
    groups = _shuffled_groups(examples, seed)
    if k < 2 or len(groups) < k:
        raise DataError(f"{k} folds of {len(groups)} groups (passages, articles): give from 2 to {len(groups)}")
    part_of: dict[str, int] = {}
    sizes = [0] * k
    for name, size in sorted(groups, key=lambda group: -group[1]):  # the largest first, each to the smallest part
        part_of[name] = sizes.index(min(sizes))
        sizes[part_of[name]] += size
    return [[example for example in examples if part_of[group_of(example)] == part] for part in range(k)]


def group_of(example: Any) -> str:
    """The name of the group, or of the example where it has none."""
    return f"group {example.group}" if example.group else f"example {example.id}"


def has_name(example: Any) -> bool:
    """Whether the file named the example's group: a name means the same in every file, "document 1" does not."""
    return bool(example.group) and not _NUMBERED.fullmatch(example.group)


def _shuffled_groups(examples: Sequence[Any], seed: int) -> list[tuple[str, int]]:
    """(name, number of examples) of each group."""
    groups = sorted(Counter(map(group_of, examples)).items())
    random.Random(seed).shuffle(groups)
    return groups
