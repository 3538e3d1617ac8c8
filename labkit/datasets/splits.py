"""The train, dev and test sides of a data set: from a name or files, by holding a part out, or as k folds.

Examples of one `group` (a passage, an article, a post) stay together; an example without a group is its own. What is
held out depends on the seed and the groups, not on the order of the examples.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from labkit.datasets import embedded, readers
from labkit.errors import DataError

DEV_NAMES = ("dev", "validation", "valid", "eval")  # the names that data sets give to the side for model selection
_NUMBERED = re.compile(r"(sentence|document|article) \d+")  # groups that the readers count where a file names none


def sides(
    task: str,
    data: str | None = None,
    *,
    train_file: str | None = None,
    dev_file: str | None = None,
    test_file: str | None = None,
    max_train: int | None = None,
    max_eval: int | None = None,
    seed: int = 0,
    tag_column: int | None = None,
    skipped: dict[str, int] | None = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """(train, dev, test) examples; dev and test are empty where there are none.

    Args:
        data: an embedded data set, a hub name, or a folder with the hub's layout, instead of files. Without either, the
            first of the embedded data sets that is for the task.
        max_train, max_eval: the largest number of examples. Those of train are drawn with `seed`; those of dev and test
            are the same for all seeds, so that runs with several seeds are scored on the same examples.
        tag_column: of column files, the number of the column that holds the tags.
        skipped: rows that cannot be read are left out, with a warning, and counted here by side. None: they are errors.

    Raises:
        DataError: files and a name at once, no training side, or a fault of the data.
    """
    sources = (train_file, dev_file, test_file)
    if any(sources):
        if data:
            raise DataError("give the name of a data set, or files, not both")
        if not train_file:
            raise DataError("there is no training file beside the others; give --train-file")
    else:
        name = data or next(name for name, tasks in embedded.TASKS.items() if task in tasks)
        splits = embedded.splits_of(name) if name in embedded.TASKS else readers.split_names(name)
        if "train" not in splits:
            raise DataError(f"{name} has no split called train, only {', '.join(splits)}; give files instead")
        dev = next((split for split in DEV_NAMES if split in splits), None)
        sources = [f"{name}:{split}" if split in splits else None for split in ("train", dev, "test")]
    parts = []
    for side, source, limit in zip(("train", "dev", "test"), sources, (max_train, max_eval, max_eval), strict=True):
        examples = []
        if source:
            scan = readers.scan(task, source, tag_column)
            examples = scan.all(skip_bad_rows=skipped is not None)
            if skipped is not None:
                skipped[side] = len(scan.faults)
        parts.append(drawn(examples, limit, seed if side == "train" else 0))
    return tuple(parts)


def drawn(examples: list[Any], limit: int | None, seed: int) -> list[Any]:
    """At most `limit` of the examples, drawn with `seed`, in their order."""
    if limit is None or limit >= len(examples):
        return examples
    return [examples[i] for i in sorted(random.Random(seed).sample(range(len(examples)), limit))]


def held_out(examples: Sequence[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """(the rest, about `share` of the examples), by groups; both in the order of `examples` and neither empty."""
    groups = _shuffled_groups(examples, seed)
    if len(groups) < 2:
        raise DataError(
            f"all {len(examples)} examples belong to one group (passage, article), so none can be held out: give a dev "
            "set, such as --dev-file"
        )
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


def require_apart(train: Sequence[Any], dev: Sequence[Any], test: Sequence[Any]) -> None:
    """Raise DataError if two sides share a group, or are the same: scores would then measure memorisation."""
    for (first, examples), (second, others) in combinations({"train": train, "dev": dev, "test": test}.items(), 2):
        if examples and list(examples) == list(others):
            raise DataError(f"{first} and {second} are the same {len(examples):,} examples")
        if both := sorted(named_groups(examples) & named_groups(others)):
            raise DataError(f"{len(both):,} groups are in {first} and in {second} too, for example {both[0]!r}")


def named_groups(examples: Sequence[Any]) -> set[str]:
    """The groups that a file names; "document 1" is a number that another file may have too."""
    return {example.group for example in examples if example.group and not _NUMBERED.fullmatch(example.group)}


def group_of(example: Any) -> str:
    """The name of the group, or of the example where it has none."""
    return f"group {example.group}" if example.group else f"example {example.id}"


def _shuffled_groups(examples: Sequence[Any], seed: int) -> list[tuple[str, int]]:
    """(name, number of examples) of each group."""
    groups = sorted(Counter(map(group_of, examples)).items())
    random.Random(seed).shuffle(groups)
    return groups
