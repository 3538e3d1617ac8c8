"""One door to labelled data: `read("qa", "dev.json")`, whatever the form of the file, or a hub name.

.json             SQuAD 1.1 or 2.0 (questions)
.conll .txt .tsv .bio .iob ...   word and tag columns (entities)
.jsonl .csv       rows with named fields (`labkit.datasets.rows`)
squad_v2          a hub name, through `datasets`, in its parquet version; "squad_v2:validation" names the split, and
                  "wikiann/en:train" the configuration
field-notes:dev   the embedded data, with their split
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.datasets.files import csv_rows, fault, json_lines
from labkit.datasets.rows import MAKERS
from labkit.errors import DataError

TASKS = tuple(MAKERS)
COLUMNS = (".conll", ".bio", ".iob", ".iob2", ".txt", ".tsv", ".annotated", ".data")


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
    if Path(name).expanduser().is_dir() or (name.count("/") <= 1 and not path.suffix):
        from labkit.datasets import hub

        return hub.read(task, name, split or "train")
    raise DataError(f"{source} does not exist; give a file, or the name of a data set (squad_v2, wnut_17:train)")


def _read_file(task: str, path: Path) -> list[Any]:
    suffix = path.suffix.lower()
    if suffix == ".json" and task == "qa":
        from labkit.datasets.squad import read_squad

        return read_squad(path)
    if suffix in COLUMNS and task == "ner":
        from labkit.datasets.conll import read_conll

        return read_conll(path)
    if suffix == ".jsonl":
        return made(task, json_lines(path), path)
    if suffix in (".csv", ".tsv"):
        return made(task, csv_rows(path), path)
    others = {"qa": ".json (SQuAD), ", "ner": ".conll (columns), "}.get(task, "")
    raise DataError(f"{path} ends in {suffix or 'nothing'}; for {task} give a file in {others}.jsonl or .csv")


def made(task: str, numbered: Any, path: Any) -> list[Any]:
    """Examples from (line number, row) pairs; a row without a meaning is named by its line, an id given twice too."""
    found: list[Any] = []
    first_at: dict[str, int] = {}
    for line, row in numbered:
        try:
            example = MAKERS[task](row, line)
        except ValueError as error:
            raise fault(path, line, str(error)) from error
        except (KeyError, TypeError, AttributeError) as error:
            raise fault(path, line, f"is not of the form for {task}: {error}") from error
        if example.id in first_at:
            raise fault(path, line, f"has the id {example.id!r}, as line {first_at[example.id]} has")
        first_at[example.id] = line
        found.append(example)
    if not found:
        raise DataError(f"{path} holds no example")
    if task == "ner":
        return _in_bio(found, path)
    return found


def _in_bio(sentences: list[Any], path: Any) -> list[Any]:
    from dataclasses import replace

    from labkit.datasets.tags import scheme_of, to_bio

    try:
        scheme = scheme_of(each.tags for each in sentences)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    return [replace(each, tags=tuple(to_bio(each.tags, scheme))) for each in sentences]
