"""CoNLL column files: a word and its tag per line, an empty line between sentences."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.datasets.examples import TAG, parts
from labkit.datasets.files import LINE_END, read_text, shown
from labkit.errors import DataError

SUFFIXES = (".conll", ".conllu", ".bio", ".iob", ".iob2", ".txt", ".tsv", ".annotated", ".data")
_KEY = re.compile(r"# (\w+|newdoc id) ?= ?(.*)")  # "# id = fn-001", as in CoNLL-U
_CHUNKS = set("NP VP PP ADVP ADJP SBAR PRT CONJP INTJ LST UCP NC VC PC".split())  # of CoNLL-2000 and German texts


def column_records(path: Path, tag_column: int | None = None) -> Iterator[tuple[int, Any]]:
    """(line, record with id, words, tags and group) of each sentence, or the line of its first fault and a ValueError.

    The first column is the word; the tag is in the column that holds entity tags, or else in the last. Tabs separate
    the columns if the line has one, otherwise spaces. A first column that numbers the words is skipped with a warning.
    `group` is the document; "-DOCSTART-" or a comment "# document = NAME" begins one. Between sentences, a line
    "# key = value", and one that begins with # and has another number of columns than most lines, is a comment.

    Args:
        tag_column: the number of the column that holds the tags; the first is 1.

    Raises:
        DataError: two columns of tags and no `tag_column`, or one that the file does not have.
    """
    lines = [(number, line, _cells(line)) for number, line in enumerate(LINE_END.split(read_text(path)), 1)]
    widths = Counter(len(cells) for _, line, cells in lines if cells and not line.startswith(("#", "-DOCSTART-")))
    width = widths.most_common(1)[0][0] if widths else 0
    rows = [cells for _, line, cells in lines if len(cells) == width and not line.startswith(("# ", "-DOCSTART-"))]
    numbers = [row for row in rows if width > 2 and re.fullmatch(r"\d+([-.]\d+)?", row[0])]
    word = 1 if 2 * len(numbers) > len(rows) else 0
    if word:
        warnings.warn(f"{path}: column 1 numbers the words and is skipped", stacklevel=2)
    if tag_column is None:
        tag = _tag_column(path, rows, word + 1, width)
    elif word + 1 < tag_column <= width:
        tag = tag_column - 1
    else:
        raise DataError(f"{path}: the column of the tags is {tag_column}; choose one from {word + 2} to {width}")
    is_between, document, documents = True, "", 0
    sentences: list[tuple[str, list[tuple[int, list[str]]]]] = []  # (document, numbered lines)
    for number, line, cells in lines:
        if line.startswith("-DOCSTART-"):
            documents += 1
            document, is_between = f"document {documents}", True
        elif comment := _KEY.fullmatch(line):
            document, is_between = comment[2] if comment[1] in ("document", "newdoc id") else document, True
        elif not cells:
            is_between = True
        elif not (is_between and line.startswith("#") and len(cells) != width):
            if is_between:
                sentences.append((document, []))
            sentences[-1][1].append((number, cells))
            is_between = False
    for i, (document, numbered) in enumerate(sentences):
        record = {"id": f"{path.stem}-{i}", "words": [], "tags": [], "group": document or f"sentence {i}"}
        try:
            for number, cells in numbered:  # noqa: B007, the error below is about this line
                if len(cells) != width or width < 2 or not cells[word]:
                    raise ValueError(f"has the columns {shown(cells)}; expected {max(width, 2)}, a word and its tag")
                parts(cells[tag])  # raises ValueError
                record["words"].append(cells[word])
                record["tags"].append(cells[tag])
            yield numbered[0][0], record
        except ValueError as error:
            yield number, error


def _cells(line: str) -> list[str]:
    line = line.rstrip(" \t")
    return [cell.strip(" ") for cell in line.split("\t")] if "\t" in line else [c for c in line.split(" ") if c]


def _tag_column(path: str | Path, rows: list[list[str]], first: int, width: int) -> int:
    """The column, counted from 0, whose cells are mostly entity tags; the last if there is none."""
    choices = []
    for column in range(first, width):
        kinds = [row[column][2:] for row in rows if TAG.fullmatch(row[column])]
        chunks = sum(kind in _CHUNKS for kind in kinds)
        if 2 * len(kinds) > len(rows) and 2 * chunks <= sum(map(bool, kinds)):
            choices.append(column)
    if len(choices) > 1:
        columns = " and ".join(f"column {column + 1}" for column in choices)
        choice = f"--tag-column {choices[-1] + 1}, in Python tag_column={choices[-1] + 1}"
        raise DataError(f"{path} has tags in more than one column: {columns}; choose one, such as {choice}")
    return choices[0] if choices else width - 1
