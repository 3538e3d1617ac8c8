"""One function for labelled data: `read("qa", "dev.json")`, whatever the form of the file, or a hub name.

.json             SQuAD 1.1 or 2.0, or a list of rows
.conll .txt .tsv .bio .iob ...   word and tag columns (entities)
.jsonl .csv .tsv  rows with named fields (`labkit.datasets.rows`)
squad_v2          a hub name, through `datasets`, in its parquet version; "squad_v2:validation" names the split, and
                  "wikiann/en:train" the configuration
field-notes:dev   the embedded data, with their split
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.datasets import conll, embedded, hub, squad
from labkit.datasets.files import Fault, Reading, Record, collect, csv_records, json_records, path_of, read_text
from labkit.datasets.rows import MAKERS, NAMES, NEEDED
from labkit.datasets.tags import in_bio
from labkit.errors import DataError

TASKS = tuple(MAKERS)
COLUMNS = (".conll", ".conllu", ".bio", ".iob", ".iob2", ".txt", ".tsv", ".annotated", ".data")
_FILES = (*COLUMNS, ".json", ".jsonl", ".csv", ".parquet", ".xlsx", ".xml", ".zip", ".gz")  # never names on the hub
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*){0,2}")  # data, owner/data, owner/data/configuration


def read(task: str, source: str | Path, *, tag_column: int | None = None, skip_bad_rows: bool = False) -> list[Any]:
    """The examples of one file, or of one split of an embedded or a hub data set.

    Args:
        task: "qa" (Question), "ner" (Sentence), "classify" (Labelled) or "embed" (Pair).
        tag_column: of a column file, the number of the column that holds the tags; the first is 1.
        skip_bad_rows: leave out the rows that cannot be read, with a warning that says how many.

    Raises:
        DataError: no such file or data set, or a row that does not have the form; the message names file and place, and
            how many rows cannot be read.
    """
    return accepted(scan(task, source, tag_column), skip_bad_rows)


def accepted(reading: Reading, skip_bad_rows: bool = False) -> list[Any]:
    """The examples of a reading, as `read` gives them; its notes become warnings."""
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
        DataError: no such source, or one of which no row can be told, such as text that is not JSON.
    """
    if task not in MAKERS:
        raise DataError(f"the task is {task!r}; choose one of {', '.join(TASKS)}")
    path = path_of(source)
    columns = task == "ner" and path.is_file() and _is_columns(path)
    if tag_column is not None and not columns:
        raise DataError(f"{source} is not a column file: leave the tag column out")
    if columns:
        reading = conll.scan(path, tag_column)
    elif path.is_file():
        reading = collect(path, _records(task, path), _maker(task))
    else:
        name, _, split = str(source).partition(":")
        is_name = _HUB_NAME.fullmatch(name) and Path(name).suffix.lower() not in _FILES
        if not is_name and not hub.is_folder(name):
            raise DataError(
                f"{source} does not exist; give a file, or the name of a data set (squad_v2, wnut_17:train)"
            )
        split = split or "train"
        if name in embedded.NAMES:
            reading = Reading(f"{name}:{split}", embedded.read(task, name, split))
        else:
            reading = collect(f"{name}:{split}", hub.records(name, split), _maker(task))
    if task == "ner":
        reading.tags = [sentence.tags for sentence in reading.examples]
        reading.examples = in_bio(reading.examples)
    return reading


def _maker(task: str) -> Any:
    """The function that makes an example of a row whose fields may be called "Text" or " text "."""

    def make(row: dict[str, Any], id: str) -> Any:
        fields = {str(name).strip().lower(): value for name, value in row.items()}
        if len(fields) < len(row):
            raise ValueError(f"has fields of one name but for case and white space: {', '.join(row)}")
        return MAKERS[task](fields, id)

    return make


def _records(task: str, path: Path) -> Iterator[Record]:
    suffix = path.suffix.lower()
    if suffix == ".json":
        yield from squad.records(path)
    elif suffix == ".jsonl":
        yield from (Record(f"line {line}", str(line), row) for line, row in json_records(path))
    elif suffix in (".csv", ".tsv"):
        header = None
        for line, row in csv_records(path):
            if header is None and not isinstance(row, Fault):
                header = list(row)
                _require_columns(task, header, path)
            yield Record(f"line {line}", str(line), row)
    else:
        others = {"qa": "SQuAD as .json, ", "ner": "columns as .conll, "}.get(task, "")
        raise DataError(f"{path} ends in {suffix or 'nothing'}; for {task} give {others}rows as .json, .jsonl or .csv")


def _require_columns(task: str, header: list[str], path: Path) -> None:
    fields = {name.strip().lower() for name in header}
    for needed in NEEDED[task]:
        if not fields & {*NAMES[needed]}:
            known = ", ".join(NAMES[needed])
            raise DataError(
                f"{path}: the header has no {needed} (called {known}); it has {', '.join(map(repr, header))}"
            )


def _is_columns(path: Path) -> bool:
    """Whether a file has word and tag columns. A .tsv may also be a table with a header, which names both."""
    if path.suffix.lower() != ".tsv":
        return path.suffix.lower() in COLUMNS
    header = read_text(path, "surrogateescape").split("\n", 1)[0]
    names = {name.strip().lower() for name in header.split("\t")}
    return not (names & {*NAMES["words"]} and names & {*NAMES["tags"]})
