"""The train, dev and test sides of a data set, by its name or by files."""

from __future__ import annotations

import random
from typing import Any

from labkit.datasets import embedded, readers
from labkit.errors import DataError

DEFAULTS = {"qa": "field-notes", "ner": "field-notes", "classify": "which-way-round", "embed": "field-notes"}
DEV_NAMES = ("dev", "validation", "valid", "eval")  # the names that data sets give to the side for model selection


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
            embedded data of the task.
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
        name = data or DEFAULTS[task]
        splits = embedded.SPLITS if name in embedded.NAMES else readers.split_names(name)
        if "train" not in splits:
            raise DataError(f"{name} has no split called train, only {', '.join(splits)}; give files instead")
        dev = next((split for split in DEV_NAMES if split in splits), None)
        sources = [f"{name}:{split}" if split in splits else None for split in ("train", dev, "test")]
    parts = []
    for side, source, limit in zip(("train", "dev", "test"), sources, (max_train, max_eval, max_eval), strict=True):
        examples = []
        if source:
            reading = readers.scan(task, source, tag_column)
            examples = reading.all(skip_bad_rows=skipped is not None)
            if skipped is not None:
                skipped[side] = len(reading.faults)
        parts.append(drawn(examples, limit, seed if side == "train" else 0))
    return tuple(parts)


def drawn(examples: list[Any], limit: int | None, seed: int) -> list[Any]:
    """At most `limit` of the examples, drawn with `seed`, in their order."""
    if limit is None or limit >= len(examples):
        return examples
    return [examples[i] for i in sorted(random.Random(seed).sample(range(len(examples)), limit))]
