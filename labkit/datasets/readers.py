"""One function for labelled data: `read("qa", "dev.json")`, whatever the form of the file, or a hub name.

.json             SQuAD 1.1 or 2.0, or a list of rows
.conll .txt .tsv .bio .iob ...   word and tag columns (entities)
.jsonl .csv .tsv  records with named fields (`labkit.datasets.records`)
squad_v2          a hub name; "squad_v2:validation" names the split, and "wikiann/en:train" the configuration; a local
                  folder with the hub's layout also works. `datasets` reads parquet files, so no code of theirs is run.
field-notes:dev   the embedded data, with their split
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from labkit.datasets import conll, embedded, records
from labkit.datasets.files import Scan, collect, path_of
from labkit.errors import DataError, needs_extra, reading, require_one_of

TASKS = tuple(records.MAKERS)
# suffixes that are never part of a name on the hub
_FILES = (*conll.SUFFIXES, ".json", ".jsonl", ".csv", ".parquet", ".xlsx", ".xml", ".zip", ".gz")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*){0,2}")  # data, owner/data, owner/data/configuration
_HUB = {  # short name -> repository on the hub, where the short name alone no longer loads
    "squad": "rajpurkar/squad",
    "squad_v2": "rajpurkar/squad_v2",
    "wnut_17": "leondz/wnut_17",
    "wikiann": "unimelb-nlp/wikiann",
    "conll2003": "eriktks/conll2003",
}
_REVISIONS = dict.fromkeys(("leondz/wnut_17", "eriktks/conll2003"), "refs/convert/parquet")


def read(task: str, source: str | Path, *, tag_column: int | None = None, skip_bad_rows: bool = False) -> list[Any]:
    """The examples of one file, or of one split of an embedded or a hub data set.

    Args:
        task: "qa" (Question), "ner" (Sentence), "classify" (Labelled) or "embed" (Pair).
        tag_column: of a column file, the number of the column that holds the tags; the first is 1.
        skip_bad_rows: leave out the rows that cannot be read, with a warning that counts them.

    Raises:
        DataError: no such file or data set, or a row of another form; the message names file and place, and counts the
            rows that cannot be read.
    """
    return scan(task, source, tag_column).all(skip_bad_rows=skip_bad_rows)


def scan(task: str, source: str | Path, tag_column: int | None = None) -> Scan:
    """The examples of a source and the faults of the records that cannot be read.

    Raises:
        DataError: no such source, or a file whose rows cannot be told apart, such as text that is not JSON.
    """
    require_one_of("the task", task, TASKS)
    path = path_of(source)
    if path.is_file():
        return records.scan_file(task, path, tag_column)
    if tag_column is not None:
        raise DataError(f"{source} is not a column file: leave the tag column out")
    name, _, split = str(source).partition(":")
    split = split or "train"
    if name in embedded.TASKS:
        return Scan(f"{name}:{split}", embedded.read(task, name, split))
    if not path_of(name).is_dir() and (not _HUB_NAME.fullmatch(name) or Path(name).suffix.lower() in _FILES):
        raise DataError(f"{path} does not exist; give a file, or the name of a data set (squad_v2, wnut_17:train)")
    return collect(f"{name}:{split}", _hub_records(name, split), partial(records.example, task))


# ---- the hub ---------------------------------------------------------------------------------------------------------


def split_names(name: str) -> list[str]:
    """The splits of a hub data set, or of a folder with its layout."""
    return list(_call_datasets("get_dataset_split_names", name))


def _hub_records(name: str, split: str) -> Iterator[tuple[str, Any]]:
    """The rows of one split, with the names of tags and labels, which are stored as integers (-1 where missing)."""
    table = _call_datasets("load_dataset", name, split=split)
    classes = {}
    for column, feature in table.features.items():
        inner = getattr(feature, "feature", feature)
        if hasattr(inner, "names"):
            classes[column] = dict(enumerate(inner.names))
    for number, row in enumerate(table, 1):
        for column, names in classes.items():
            value = row[column]
            row[column] = [names.get(i) for i in value] if isinstance(value, list) else names.get(value)
        yield f"row {number}", row


def _call_datasets(function: str, name: str, **options: Any) -> Any:
    """The result of a function of `datasets` for a data set; whatever it raises becomes a DataError."""
    with needs_extra():
        import datasets
    path, configuration = str(path_of(name)), None
    if is_hub := not path_of(name).is_dir():
        first, *rest = name.split("/")
        names = [*_HUB.get(first, first).split("/"), *rest]
        path, configuration = "/".join(names[:2]), "/".join(names[2:]) or None
    what = " ".join([path, *(f"({option} {value})" for option, value in options.items())])
    with reading(what, DataError):
        try:
            return getattr(datasets, function)(path, configuration, revision=_REVISIONS.get(path), **options)
        except OSError as error:  # of a name that the hub does not have, too
            if not is_hub:
                raise
            ours = ", ".join(embedded.TASKS)
            raise DataError(
                f"{name} is not a file or a folder, nor one of labkit's data sets ({ours}), and the hub has no {path}, "
                "or cannot be reached: check the name, connect to the network, or give a file"
            ) from error
