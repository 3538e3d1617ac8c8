"""One function for labelled data: `read("qa", "dev.json")`, whatever the form of the file, or a hub name.

.json             SQuAD 1.1 or 2.0, or a list of rows
.conll .txt .tsv .bio .iob ...   word and tag columns (entities)
.jsonl .csv .tsv  rows with named fields (`labkit.datasets.rows`)
squad_v2          a hub name; "squad_v2:validation" names the split, and "wikiann/en:train" the configuration; a local
                  folder with the hub's layout also works. `datasets` reads parquet files, so no code of theirs is run.
field-notes:dev   the embedded data, with their split
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from labkit.datasets import conll, embedded, rows
from labkit.datasets.files import Reading, Record, collect, csv_records, path_of, read_text
from labkit.errors import DataError, ModelError

TASKS = tuple(rows.MAKERS)
COLUMNS = (".conll", ".conllu", ".bio", ".iob", ".iob2", ".txt", ".tsv", ".annotated", ".data")
_FILES = (*COLUMNS, ".json", ".jsonl", ".csv", ".parquet", ".xlsx", ".xml", ".zip", ".gz")  # never names on the hub
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
    return accepted(scan(task, source, tag_column), skip_bad_rows)


def accepted(reading: Reading, skip_bad_rows: bool = False) -> list[Any]:
    """The examples of a reading, as `read` returns them; its notes become warnings."""
    for note in reading.notes:
        warnings.warn(f"{reading.path}: {note}", stacklevel=3)
    if skip_bad_rows and reading.faults and reading.examples:
        total = len(reading.examples) + reading.skipped
        more = f" (and {len(reading.faults) - 1:,} more)" if len(reading.faults) > 1 else ""
        what = f"{reading.skipped:,} of {total:,} rows are skipped: {reading.faults[0]}{more}"
        warnings.warn(f"{reading.path}: {what}", stacklevel=3)
        return reading.examples
    return reading.all(
        advice="; labkit data check lists them, and --skip-bad-rows, in Python skip_bad_rows=True, leaves them out"
    )


def scan(task: str, source: str | Path, tag_column: int | None = None) -> Reading:
    """The examples of a source and the faults of the rows that cannot be read.

    Raises:
        DataError: no such source, or a file whose rows cannot be told apart, such as text that is not JSON.
    """
    if task not in TASKS:
        raise DataError(f"the task is {task!r}; choose one of {', '.join(TASKS)}")
    path, make = path_of(source), partial(rows.example, task)
    name, _, split = str(source).partition(":")
    split = split or "train"
    has_columns = task == "ner" and path.is_file() and _has_columns(path)
    if tag_column is not None and not has_columns:
        raise DataError(f"{source} is not a column file: leave the tag column out")
    if has_columns:
        reading = conll.scan(path, tag_column)
    elif path.is_file():
        reading = collect(path, _records(task, path), make)
    elif name in embedded.NAMES:
        reading = Reading(f"{name}:{split}", embedded.read(task, name, split))
    elif _is_local(name) or (_HUB_NAME.fullmatch(name) and Path(name).suffix.lower() not in _FILES):
        reading = collect(f"{name}:{split}", _hub_records(name, split), make)
    else:
        raise DataError(f"{source} does not exist; give a file, or the name of a data set (squad_v2, wnut_17:train)")
    if task == "ner":
        reading.tags = [sentence.tags for sentence in reading.examples]
        reading.examples = conll.in_bio(reading.examples)
    return reading


def _records(task: str, path: Path) -> Iterator[Record]:
    suffix = path.suffix.lower()
    if suffix in (".json", ".jsonl"):
        yield from rows.records(path)
    elif suffix in (".csv", ".tsv"):
        yield from (Record(f"line {line}", str(line), row) for line, row in csv_records(path))
    else:
        others = {"qa": "SQuAD as .json, ", "ner": "columns as .conll, "}.get(task, "")
        raise DataError(f"{path} ends in {suffix or 'nothing'}; for {task} give {others}rows as .json, .jsonl or .csv")


def _has_columns(path: Path) -> bool:
    """Whether a file has word and tag columns. A .tsv may also be a table with a header, which names both."""
    if path.suffix.lower() != ".tsv":
        return path.suffix.lower() in COLUMNS
    header = read_text(path).split("\n", 1)[0]
    names = {name.strip().lower() for name in header.split("\t")}
    return not (names & {*rows.NAMES["words"]} and names & {*rows.NAMES["tags"]})


# ---- the hub ---------------------------------------------------------------------------------------------------------


def split_names(name: str) -> list[str]:
    """The splits of a hub data set, or of a folder with its layout.

    Raises:
        ModelError: `datasets` is not installed. DataError: the data set cannot be reached.
    """
    return list(_call_datasets("get_dataset_split_names", name))


def _hub_records(name: str, split: str) -> Iterator[Record]:
    """The rows of one split, with the names of tags and labels, which are stored as integers (-1 where missing)."""
    table = _call_datasets("load_dataset", name, split=split)
    classes = {}
    for column, feature in table.features.items():
        inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) else feature)
        if hasattr(inner, "names"):
            classes[column] = dict(enumerate(inner.names))
    for number, row in enumerate(table, 1):
        for column, names in classes.items():
            value = row[column]
            row[column] = [names.get(i) for i in value] if isinstance(value, list) else names.get(value)
        yield Record(f"row {number}", str(number), row)


def _is_local(name: str) -> bool:
    """Whether `name` is a local folder, or "folder/configuration" as the card of that folder lists it."""
    place = Path(name).expanduser()
    card = place.parent / "README.md"
    listed = rf"^\s*-?\s*config_name:\s*[\"']?{re.escape(place.name)}[\"']?\s*$"
    return place.is_dir() or (card.is_file() and bool(re.search(listed, card.read_text("utf-8", "replace"), re.M)))


def _call_datasets(function: str, name: str, **options: Any) -> Any:
    """The result of a function of `datasets` for a data set; whatever it raises becomes a DataError."""
    try:
        import datasets
    except ImportError:
        raise ModelError(
            f'{name} is no file; reading it from the hub needs datasets: pip install "labkit-bidirectional[train]"'
        ) from None
    place = Path(name).expanduser()
    first, *rest = name.split("/")
    if place.is_dir():
        path, configuration = str(place), None
    elif _is_local(name):
        path, configuration = str(place.parent), place.name
    elif first in _HUB:
        path, configuration = _HUB[first], "/".join(rest) or None
    else:
        path, configuration = "/".join([first, *rest[:1]]), "/".join(rest[1:]) or None
    try:
        return getattr(datasets, function)(path, configuration, revision=_REVISIONS.get(path), **options)
    except Exception as error:  # datasets, huggingface_hub, fsspec and pyarrow each raise their own
        what = " ".join([path, *(f"({option} {value})" for option, value in options.items())])
        cause = f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' ...')}"
        raise DataError(
            f"{what} could not be loaded: {cause}; connect to the network, or give a file or a folder"
        ) from error
