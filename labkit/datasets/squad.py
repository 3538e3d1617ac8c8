"""Labelled JSON files: SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018), and lists of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.datasets.examples import Question
from labkit.datasets.files import (
    Fault,
    Record,
    collect,
    json_records,
    object_or_fault,
    parse_json,
    read_text,
    shown,
)
from labkit.datasets.rows import question
from labkit.errors import DataError


def read_squad(path: str | Path) -> list[Question]:
    """The questions of a SQuAD file; `group` is the article's title. Each answer must be in its context.

    Raises:
        DataError: not JSON, not of this form, or an answer that its context does not hold at its offset. The message
            names the question.
    """
    return collect(path, records(path), question).all("question")


def records(path: str | Path) -> Iterator[Record]:
    """The rows of a JSON file: SQuAD, a list of rows, an object with such a list as its data, or JSON lines."""
    text = read_text(path)
    try:
        content = parse_json(text)
    except ValueError as error:
        if "Extra data" not in str(error):
            raise DataError(f"{path} {error}") from error
        for line, row in json_records(path):  # JSON lines under the name .json, as `datasets` writes them
            yield Record(f"line {line}", str(line), row)
        return
    if isinstance(content, dict):
        content = content.get("data")
    if not isinstance(content, list):
        raise DataError(f"{path} is not SQuAD, which is an object with a list called data, nor a list of rows")
    for number, item in enumerate(content, 1):
        if isinstance(item, dict) and "paragraphs" in item:
            yield from _questions(item, number)
        else:
            named = f" ({shown(item['id'])})" if isinstance(item, dict) and "id" in item else ""
            yield Record(f"row {number}{named}", str(number), object_or_fault(item))


def _questions(article: dict[str, Any], number: int) -> Iterator[Record]:
    where, place = f"article {number}", str(number)
    paragraphs = article["paragraphs"]
    if not isinstance(paragraphs, list):
        yield Record(where, place, _structure(article, "paragraphs"))
        return
    for count, paragraph in enumerate(paragraphs, 1):
        within, part = f"{where}, paragraph {count}", f"{place}-{count}"
        if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
            yield Record(within, part, _structure(paragraph, "qas"))
            continue
        of_all = {"context": paragraph.get("context"), "group": str(article.get("title") or f"article {number - 1}")}
        for index, asked in enumerate(paragraph["qas"], 1):
            row = object_or_fault(asked)
            id = asked.get("id") if isinstance(asked, dict) else None
            name = f"{within}, question {index}" if id is None else f"question {shown(id)}"
            yield Record(name, f"{part}-{index}", row if isinstance(row, Fault) else row | of_all)


def _structure(given: Any, name: str) -> Fault:

    return Fault(f"is {shown(given)}; expected an object with a list called {name}")
