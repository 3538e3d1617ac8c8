"""Read data files row by row, so that one bad row does not hide the others."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from labkit.errors import DataError

LINE_END = re.compile(r"\r*\n|\r")  # Unix, Windows (also converted twice) and old Mac


class Fault(str):
    """Why a row cannot be read. It takes the place of the row."""


class Record(NamedTuple):
    """One row of a file: its place ("line 3"), the id for an example whose row has none, and the row or its Fault."""

    where: str
    id: str
    row: Any


@dataclass
class Reading:
    """The content of one file: `examples`, the `faults` of the rows that cannot be read, and how many are `skipped`.

    `notes` say what is unusual in the file, `layout` which columns of a column file were read. `tags` are those of each
    sentence in the file's own scheme.
    """

    path: str
    examples: list[Any] = field(default_factory=list)
    skipped: int = 0
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layout: str = ""
    tags: list[tuple[str, ...]] = field(default_factory=list)

    def all(self, what: str = "example", advice: str = "") -> list[Any]:
        """The examples. Raises DataError with the first fault, or if there is no example."""
        if self.faults:
            count = f"{self.skipped:,} of {len(self.examples) + self.skipped:,} rows cannot be read"
            raise DataError(f"{self.faults[0]} ({count}{advice if self.examples else ''})")
        if not self.examples:
            raise DataError(f"{self.path} holds no {what}")
        return self.examples


def collect(path: str | Path, records: Iterable[Record], make: Callable[[Any, str], Any]) -> Reading:
    """`make(row, id)` of each record. A ValueError that it raises, and an id that occurs twice, becomes a fault."""
    reading, place_of, bad = Reading(str(path)), {}, set()
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
    """The text with escapes for control characters, line ends and characters that cannot be encoded."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def shown(value: Any, width: int = 60) -> str:
    """A value as an error message shows it: cut if it is long."""
    text = repr(value[: width + 1] if isinstance(value, str | list) else value)
    return text if len(text) <= width else text[: width - 3] + "..."


def path_of(source: str | Path) -> Path:
    """The path that a user gave, ~ expanded. Raises DataError if the file system refuses it."""
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # the name is too long, a permission or the user of ~user is missing
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{shown(str(source))} cannot be opened: {reason}") from error
    return path


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file without a byte order mark.

    Raises:
        DataError: the file cannot be read, is empty, or is not UTF-8; the message names the line.
    """
    path = path_of(path)
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} could not be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise fault(path, content[: error.start].count(b"\n") + 1, "is not UTF-8; convert the file") from error
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError: not JSON, or a key occurs twice in one object."""

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = Counter(key for key, _ in pairs)
        if len(keys) < len(pairs):  # a dict would silently keep the last value
            raise ValueError(f"the key {shown(keys.most_common(1)[0][0])} occurs twice in one object")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read as JSON: {str(error).replace('line 1 column', 'column')}") from error


def object_or_fault(value: Any) -> Any:
    """A JSON object, or the Fault that the value is not one."""
    return value if isinstance(value, dict) else Fault(f"holds {shown(value)}; expected an object with fields")


def json_records(path: str | Path) -> Iterator[Record]:
    """The rows of a JSON file: a list of objects, an object with such a list as its data, or JSON lines."""
    rows = None
    if path_of(path).suffix.lower() != ".jsonl":
        text = read_text(path)
        try:
            content = parse_json(text)
        except ValueError as error:
            if "Extra data" not in str(error):  # JSON lines under the name .json, as `datasets` writes them
                raise DataError(printable(f"{path} {error}")) from error
        else:
            rows = content.get("data") if isinstance(content, dict) else content
            if not isinstance(rows, list):
                raise DataError(f"{path} is not SQuAD, which is an object with a list called data, nor a list of rows")
    if rows is None:
        yield from (Record(f"line {line}", str(line), row) for line, row in _json_lines(path))
        return
    for number, row in enumerate(rows, 1):
        name = f" ({shown(row['id'])})" if isinstance(row, dict) and "id" in row else ""
        yield Record(f"row {number}{name}", str(number), object_or_fault(row))


def _json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(LINE_END.split(read_text(path)), 1):
        if line.strip():
            try:
                yield number, object_or_fault(parse_json(line))
            except ValueError as error:
                yield number, Fault(error)


def json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty. Raises DataError at the first that is not an object."""
    return _without_faults(path, _json_lines(path))


def csv_rows(path: str | Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, {column: cell}) of a CSV or TSV file. Raises DataError at the first bad line."""
    return _without_faults(path, csv_records(path))


def csv_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, {column: cell} or Fault) of a table with a header.

    The separator is the one that a first line "sep=;" names, as Excel writes it, or else the most frequent in the
    header.
    """
    text = read_text(path)
    lines = io.StringIO(text, newline="").readlines()
    named = re.fullmatch(r"(?i:sep)=([^\w\r\n\"])\r?\n?", lines[0])
    start = 1 if named else 0  # the number of lines before the next row
    header = re.sub(r'"[^"]*"', "", lines[start]) if lines[start:] else ""
    separator = named[1] if named else max(",;\t|", key=header.count)
    dialect = {"delimiter": separator, "strict": True, "skipinitialspace": f"{separator} " in header}
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # the default refuses cells of 131,072 characters
    columns: list[str] | None = None
    while start < len(lines):
        first, reader = start, csv.reader(islice(lines, start, None), **dialect)
        try:
            for cells in reader:
                start = first + reader.line_num
                if not any(cell.strip() for cell in cells):
                    continue
                if columns is None:
                    columns = cells
                    names = [name.strip().lower() for name in columns]
                    if twice := [name for i, name in enumerate(names) if name and name in names[:i]]:
                        raise fault(path, start, f"has the column {twice[0]!r} twice")
                elif len(cells) != len(columns):
                    yield start, Fault(f"has {len(cells)} cells, and the header has {len(columns)}")
                else:
                    yield start, dict(zip(columns, cells, strict=True))
            return
        except csv.Error as error:
            if columns is None:
                raise fault(path, start + 1, f"is not a header of CSV ({error})") from error
            what = "a quote is opened and never closed" if "unexpected end" in str(error) else error
            start += 1  # an open quote takes the following lines into its cell: read them again
            yield start, Fault(f"is not CSV ({what})")


def _without_faults(path: str | Path, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    for number, row in rows:
        if isinstance(row, Fault):
            raise fault(path, number, row)
        yield number, row
