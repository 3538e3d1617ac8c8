"""A question in several wordings with its accepted answers, and how the rows of a file become such questions."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.datasets.files import Record, collect
from labkit.errors import DataError

BLANK = "____"  # stands in a statement where the answer belongs

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class ParaphrasedQuestion:
    """One question, asked in several ways.

    Attributes:
        id: unique in its set.
        paraphrases: at least one, none empty, none twice; each is a whole question, or a statement with `BLANK`.
        answers: the accepted ones, none empty, the usual one first; () where none is known: it cannot be scored then.
        relation: what kind of fact is asked for, for scores per relation; None where the set has no relations.
        natural: False where the paraphrases were made by stated templates around one and the same wording.

    Raises:
        DataError: when made otherwise; the message names the question.
    """

    id: str
    paraphrases: tuple[str, ...]
    answers: tuple[str, ...]
    relation: str | None = None
    natural: bool = True

    def __post_init__(self) -> None:
        for name, texts in (("paraphrase", self.paraphrases), ("answer", self.answers)):
            if not texts and name == "paraphrase":
                raise DataError(f"question {self.id!r} has no {name}; give at least one")
            if not all(text.strip() for text in texts):
                raise DataError(f"question {self.id!r} has an empty {name}; take it out")
        if twice := repeated(self.paraphrases):
            raise DataError(f"question {self.id!r} has the paraphrase {twice!r} twice; take one of them out")


def questions_of(
    path: str | Path,
    rows: Iterable[tuple[int, Any]],
    make: Callable[[dict[str, Any], str], ParaphrasedQuestion],
    unanswered: bool = False,
) -> list[ParaphrasedQuestion]:
    """`make(row, id)` of each (line, row) of a file; what it raises as a ValueError is a DataError with file and line.

    A question without an answer is an error too, unless it may be `unanswered`.
    """

    def checked(row: dict[str, Any], id: str) -> ParaphrasedQuestion:
        question = make(row, id)
        if not question.answers and not unanswered:
            raise ValueError(f"question {question.id!r} has no answer; give at least one")
        return question

    records = (Record(f"line {line}", str(line), row) for line, row in rows)
    return collect(path, records, checked).all("question")


def text_of(row: dict[str, Any], *names: str) -> str:
    """The text under the first of these names that the row has, without spaces around it; ValueError in words."""
    name = next((each for each in names if each in row), None)
    if name is None:
        raise ValueError(f"has no {' or '.join(names)} (fields: {', '.join(map(str, row)) or 'none'})")
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"has {row[name]!r} as its {name}, where text was expected")
    return row[name].strip()


def texts_of(row: dict[str, Any], name: str) -> tuple[str, ...]:
    """The texts of a list, without spaces around them; ValueError in words if it is no list, or not of texts."""
    if name not in row:
        raise ValueError(f"has no {name} (fields: {', '.join(map(str, row)) or 'none'})")
    value = row[name]
    if not isinstance(value, list | tuple):
        raise ValueError(f'has {value!r} as its {name}; write a list of texts, such as ["Paris"]')
    if not_text := [each for each in value if not isinstance(each, str)]:
        raise ValueError(f"has {not_text[0]!r} among its {name}, which is no text; write it in quotes")
    return tuple(each.strip() for each in value)


def id_of(row: dict[str, Any], line: str, name: str = "id") -> str:
    """The id of a row, text or a whole number; where there is none, the number of its line."""
    given = row.get(name)
    if given is None or given == "":
        return line
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise ValueError(f"has {given!r} as its {name}, where text was expected")
    return str(given).strip()


def truth_of(row: dict[str, Any], name: str) -> bool:
    """Whether a row says yes to a name, as JSON or a table says it; without the name it does. ValueError in words."""
    truth = _TRUTH.get(str(row.get(name, True)).strip().lower())
    if truth is None:
        raise ValueError(f"has {row[name]!r} as {name}; write true or false")
    return truth


def list_in(cell: str) -> list[Any]:
    """The list that a cell of a table holds as JSON or as Python writes it; ValueError in words.

    A list without commas, as numpy prints an array, is refused: Python would join its texts to one.
    """
    try:
        value = json.loads(cell)
    except ValueError:
        value = _python_list(cell)
    if not isinstance(value, list):
        raise ValueError(f'has the cell {cell[:60]!r} where a list was expected, such as ["Paris", "City of Paris"]')
    return value


def repeated(texts: Iterable[str]) -> str | None:
    """The first text that was there before, or None."""
    seen: set[str] = set()
    for text in texts:
        if text in seen:
            return text
        seen.add(text)
    return None


def _python_list(cell: str) -> Any:
    try:
        value = ast.literal_eval(cell.strip())
        kinds = [each.type for each in tokenize.generate_tokens(io.StringIO(cell.strip()).readline)]
    except (ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return None
    kinds = [kind for kind in kinds if kind not in (tokenize.NL, tokenize.NEWLINE)]
    if any(one == other == tokenize.STRING for one, other in zip(kinds, kinds[1:], strict=False)):
        raise ValueError(f"has a list without commas, {cell[:60]!r}, as numpy prints an array; write the file as JSONL")
    return value
