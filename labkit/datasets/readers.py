"""One door to labelled data: `read("qa", "dev.json")`, whatever the form of the file, or a hub name.

.json             SQuAD 1.1 or 2.0 (questions)
.conll .txt .tsv .bio .iob ...   word and tag columns (entities)
.jsonl .csv .tsv  rows with named fields (`labkit.datasets.rows`)
squad_v2          a hub name, through `datasets`, in its parquet version; "squad_v2:validation" names the split, and
                  "wikiann/en:train" the configuration
field-notes:dev   the embedded data, with their split
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.datasets.files import csv_rows, each_made, json_lines, read_text
from labkit.datasets.rows import MAKERS, NAMES
from labkit.datasets.tags import parts, scheme_of, to_bio
from labkit.errors import DataError

TASKS = tuple(MAKERS)
COLUMNS = (".conll", ".bio", ".iob", ".iob2", ".txt", ".tsv", ".annotated", ".data")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*){0,2}")  # data, owner/data, owner/data/configuration


def read(task: str, source: str | Path) -> list[Any]:
    """The examples of one file, or of one split of an embedded or a hub data set.

    Args:
        task: "qa" (Question), "ner" (Sentence), "classify" (Labelled) or "embed" (Pair).

    Raises:
        DataError: no such file or data set, or a line that does not have the form; the message names file and line.
    """
    if task not in MAKERS:
        raise DataError(f"the task is {task!r}; choose one of {', '.join(TASKS)}")
    path = Path(source).expanduser()
    if path.is_file():
        return _read_file(task, path)
    name, _, split = str(source).partition(":")
    from labkit.datasets import hub

    if hub.is_folder(name) or (_HUB_NAME.fullmatch(name) and not path.suffix):
        return hub.read(task, name, split or "train")
    raise DataError(f"{source} does not exist; give a file, or the name of a data set (squad_v2, wnut_17:train)")


def _read_file(task: str, path: Path) -> list[Any]:
    suffix = path.suffix.lower()
    if suffix == ".json" and task == "qa":
        from labkit.datasets.squad import read_squad

        return read_squad(path)
    if task == "ner" and _is_columns(path):
        from labkit.datasets.conll import read_conll

        return read_conll(path)
    return made(task, _rows(task, path), path)


def tags_as_given(path: str | Path) -> list[Sequence[str]]:
    """The tags of each sentence of a file as they stand there, before they are made BIO; raises as `read` does."""
    path = Path(path).expanduser()
    if _is_columns(path):
        from labkit.datasets.conll import columns

        return [tags for _, _, tags in columns(path)]
    return [each.tags for each in as_given("ner", _rows("ner", path), path)]


def _is_columns(path: Path) -> bool:
    """Whether a file has word and tag columns; a .tsv may be a table with a header, which names both."""
    if path.suffix.lower() != ".tsv":
        return path.suffix.lower() in COLUMNS
    header = read_text(path).split("\n", 1)[0].strip().split("\t")
    return not (set(header) & {*NAMES["words"]} and set(header) & {*NAMES["tags"]})


def _rows(task: str, path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return json_lines(path)
    if suffix in (".csv", ".tsv"):
        return csv_rows(path)
    others = {"qa": ".json (SQuAD), ", "ner": ".conll (columns), "}.get(task, "")
    raise DataError(f"{path} ends in {suffix or 'nothing'}; for {task} give a file in {others}.jsonl or .csv")


def made(task: str, numbered: Any, path: Any) -> list[Any]:
    """Examples from (line number, row) pairs, tags in BIO; a row without a meaning, or with the id of another, is named
    by its line.
    """
    found = as_given(task, numbered, path)
    if task != "ner":
        return found
    scheme = scheme_of(each.tags for each in found)
    return [replace(each, tags=tuple(to_bio(each.tags, scheme))) for each in found]


def as_given(task: str, numbered: Any, path: Any) -> list[Any]:
    """As `made`, with the tags in the scheme that they came in."""

    def one(row: Any, line: int) -> Any:
        example = MAKERS[task](row, line)
        for tag in example.tags if task == "ner" else ():
            parts(tag)  # a tag without a meaning is a ValueError
        return example

    return each_made(path, numbered, one, "example", task)
