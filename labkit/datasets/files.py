"""Read data files row by row, so that one bad row hides no other."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from labkit.errors import DataError

_LINE_END = re.compile(r"\r*\n|\r")  # Unix, Windows (also converted twice) and old Mac
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of a byte that is not UTF-8
_SEPARATORS = ",;\t|"  # of tables


class Fault(str):
    """What is wrong with a row. It takes the place of a row that cannot be read."""


class Record(NamedTuple):
    """One row of a file: where it is ("line 3"), the id that it gets if it has none, and the row or its Fault."""

    where: str
    id: str
    row: Any


@dataclass
class Reading:
    """What one file holds.

    Attributes:
        examples: of the rows that can be read. skipped: how many cannot. faults: why, each with file and place.
        notes: what is unusual in how the file was read. layout: which columns of a column file were read.
        tags: of each sentence, in the file's own scheme.
    """

    path: str
    examples: list[Any] = field(default_factory=list)
    skipped: int = 0
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layout: str = ""
    tags: list[tuple[str, ...]] = field(default_factory=list)

    def all(self, what: str = "example", advice: str = "") -> list[Any]:
        """The examples. DataError if there is none, or if a row cannot be read: the first fault, how many, `advice`."""
        if self.faults:
            count = f"{self.skipped:,} of {len(self.examples) + self.skipped:,} rows cannot be read"
            raise DataError(f"{self.faults[0]} ({count}{advice if self.examples else ''})")
        if not self.examples:
            raise DataError(f"{self.path} holds no {what}")
        return self.examples


def collect(path: str | Path, records: Iterable[Record], make: Callable[[Any, str], Any]) -> Reading:
    """`make(row, id)` of each record. What it raises as a ValueError, and an id that another row has, is a fault."""
    reading = Reading(str(path))
    place_of: dict[str, str] = {}
    bad = set()
    for where, id, row in records:
        try:
            if isinstance(row, Fault):
                raise ValueError(row)
            example = make(row, id)
            if example.id in place_of:
                raise ValueError(f"has the id {shown(example.id)}, as {place_of[example.id]} has; ids must differ")
        except ValueError as error:
            reading.faults.append(str(fault(path, where, str(error))))
            bad.add(id)
        else:
            place_of[example.id] = where
            reading.examples.append(example)
    reading.skipped = len(bad)
    return reading


def fault(path: str | Path, where: int | str, what: str) -> DataError:
    """The error that names a file, a place in it (a number is a line) and what is wrong there."""
    place = f"line {where}" if isinstance(where, int) else where
    return DataError(printable(f"{path}, {place}: {what}"))


def printable(text: str) -> str:
    """The text with escapes for line ends, for other control characters, and for what cannot be encoded."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def shown(value: Any, width: int = 60) -> str:
    """A value as an error message shows it: cut if it is long."""
    text = repr(value[: width + 1] if isinstance(value, str | list) else value)
    return text if len(text) <= width else text[: width - 3] + "..."


def path_of(source: str | Path) -> Path:
    """The path that a user gave, ~ expanded; DataError if it cannot even be looked up."""
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # the name is too long, the user of ~user or the permission is missing
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{shown(str(source))} cannot be opened: {reason}") from error
    return path


def read_text(path: str | Path, errors: str = "strict") -> str:
    """The text of a UTF-8 file, without a byte order mark; DataError names the file, and the line that is not UTF-8."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file in it")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} could not be read: {error.strerror or error}") from error
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise fault(path, 1, "is not UTF-8 but UTF-16; convert it")
    try:
        text = content.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise fault(path, line, f"is not UTF-8 (byte {error.start + 1} of the file); convert it") from error
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def lines_of(path: str | Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of a UTF-8 file. A line that is not UTF-8 is a Fault."""
    for number, line in enumerate(_LINE_END.split(read_text(path, "surrogateescape")), 1):
        yield number, Fault("is not UTF-8; convert it") if _NOT_UTF8.search(line) else line


def parse_json(text: str) -> Any:
    """The value of a JSON text; a ValueError says what is wrong with it."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except KeyTwiceError:
        raise
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise ValueError(f"is not JSON ({error.msg}, {line}column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("is not JSON that can be read: a number is too long, or brackets are too deep") from error


class KeyTwiceError(ValueError):
    """A JSON object has a key two times. A dict would hold the last value only."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise KeyTwiceError(f"has the key {shown(twice)} twice in one object; take one out")
    return found


def object_or_fault(value: Any) -> Any:
    """A row from `parse_json`, or the Fault that it is not an object."""
    return value if isinstance(value, dict) else Fault(f"holds {shown(value)}; expected an object with fields")


def json_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, object or Fault) of each line that is not empty."""
    for number, line in lines_of(path):
        if not isinstance(line, Fault):
            if not line.strip():
                continue
            try:
                line = object_or_fault(parse_json(line))
            except ValueError as error:
                line = Fault(error)
        yield number, line


def json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty; DataError at the first that holds none."""
    return _without_faults(path, json_records(path))


def csv_rows(path: str | Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, {column: cell}) of a CSV or TSV file; DataError at the first line that has another form."""
    return _without_faults(path, csv_records(path))


def _without_faults(path: str | Path, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    for number, row in rows:
        if isinstance(row, Fault):
            raise fault(path, number, row)
        yield number, row


def csv_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, {column: cell} or Fault) of a table with a header.

    The separator is the one that a first line "sep=;" names, as Excel writes it, or else the commonest in the header.
    """
    text = read_text(path, "surrogateescape")
    lines = io.StringIO(text, newline="").readlines()
    named = re.fullmatch(r"(?i:sep)=([^\w\r\n\"])\r?\n?", lines[0])
    at = 1 if named else 0
    header = re.sub(r'"[^"]*"', "", lines[at]) if lines[at:] else ""
    separator = named[1] if named else max(_SEPARATORS, key=header.count)
    form = {"delimiter": separator, "strict": True, "skipinitialspace": f"{separator} " in header}
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # else a cell of 131,072 characters is an error
    reader = csv.reader(iter(lines[at:]), **form)
    columns: list[str] | None = None
    while True:
        first = at + reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if columns is None:
                raise fault(path, first, f"is not a header of CSV ({error})") from error
            closed = "unexpected end" not in str(error)
            yield first, Fault(f"is not CSV ({error if closed else 'a quote is opened and never closed'})")
            at = first  # a quote that is not closed takes the lines that follow into its cell: read them again
            reader = csv.reader((lines[i] for i in range(at, len(lines))), **form)
            continue
        if not any(cell.strip() for cell in row):
            continue
        if columns is None:
            columns = row
            if _NOT_UTF8.search("".join(columns)):
                raise fault(path, first, "is not UTF-8; convert it")
            names = [name.strip().lower() for name in columns]
            if twice := [name for i, name in enumerate(names) if name and name in names[:i]]:
                raise fault(path, first, f"has the column {twice[0]!r} twice")
        elif len(row) != len(columns):
            yield at + reader.line_num, Fault(f"has {len(row)} cells, and the header has {len(columns)}")
        elif _NOT_UTF8.search("".join(row)):
            yield at + reader.line_num, Fault("is not UTF-8; convert it")
        else:
            yield at + reader.line_num, dict(zip(columns, row, strict=True))
