"""Read text, JSON and tables record by record, so that one bad record does not hide the others.

`json_records` and `table_records` give (place, record): the number of the line or a name such as "row 3", and the
record, or the ValueError that says why it cannot be read.
"""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.errors import DataError

LINE_END = re.compile(r"\r*\n|\r")  # Unix, Windows (also converted twice) and old Mac
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # JSON can hold it; no tokenizer reads it, and no file can be written

Records = Iterable[tuple[int | str, Any]]


@dataclass
class Scan:
    """The content of one source: its examples, and a fault for each record that cannot be read."""

    path: str
    examples: list[Any] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def all(self, skip_bad_rows: bool | None = None) -> list[Any]:
        """The examples. Raises DataError with the first fault, or if there is no row.

        `skip_bad_rows` leaves out what cannot be read, with a warning that counts it; None offers no choice.
        """
        if self.faults:
            total = len(self.examples) + len(self.faults)
            message = f"{self.faults[0]} ({len(self.faults):,} of {total:,} rows cannot be read"
            if not skip_bad_rows or not self.examples:
                advice = "; labkit data check lists them, and --skip-bad-rows leaves them out"
                raise DataError(f"{message}{'' if skip_bad_rows is None else advice})")
            warnings.warn(f"{message} and are skipped)", stacklevel=3)
        if not self.examples:
            raise DataError(f"{self.path} holds no row")
        return self.examples


def collect(path: str | Path, records: Records, make: Callable[[dict[str, Any], str], Any]) -> Scan:
    """The examples `make(record, id)`; `id` is for a record without one. A ValueError or a repeated id is a fault."""
    scan, place_of = Scan(str(path)), {}
    for place, record in records:
        try:
            if isinstance(record, ValueError):
                raise record
            if not isinstance(record, dict):
                raise ValueError(f"holds {shown(record)}; expected an object with fields")
            if HALF_A_PAIR.search(json.dumps(record, ensure_ascii=False, default=str)):
                raise ValueError("holds half of a surrogate pair, which is not a character")
            example = make(record, str(place))
            id = getattr(example, "id", place)
            if id in place_of:
                raise ValueError(f"has the id {shown(id)}, which another row has ({place_of[id]}); ids must differ")
        except ValueError as error:
            scan.faults.append(str(fault(path, place, error)))
        else:
            place_of[id] = place
            scan.examples.append(example)
    return scan


def fault(path: str | Path, place: int | str, what: object) -> DataError:
    """The error that names a file, a place in it (a number is a line) and what is wrong there."""
    return DataError(printable(f"{path}, {f'line {place}' if isinstance(place, int) else place}: {what}"))


def printable(text: str) -> str:
    """The text with escapes for control characters, line ends and characters that cannot be encoded."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def shown(value: Any, width: int = 60) -> str:
    """A value as an error message shows it: cut if it is long."""
    text = repr(value[: width + 1] if isinstance(value, str | list) else value)
    return text if len(text) <= width else text[: width - 3] + "..."


def path_of(source: str | Path) -> Path:
    """The path that a user gave, ~ expanded. Raises DataError if the file system refuses it, such as a long name."""
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{shown(str(source))} cannot be opened: {why}") from error
    return path


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file without a byte order mark; line ends stay as they are.

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
    """The value of a JSON text. Raises ValueError if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read as JSON: {str(error).replace('line 1 column', 'column')}") from error


def json_records(path: str | Path) -> Iterator[tuple[int | str, Any]]:
    """The records of a JSON file: a list, an object with a list as its data, or JSON lines."""
    text = read_text(path)
    if path_of(path).suffix.lower() != ".jsonl":
        try:
            content = parse_json(text)
        except ValueError as error:
            if "Extra data" not in str(error):  # JSON lines under the name .json, as `datasets` writes them
                raise DataError(printable(f"{path} {error}")) from error
        else:
            rows = content.get("data") if isinstance(content, dict) else content
            if not isinstance(rows, list):
                raise DataError(f"{path} is not SQuAD, which is an object with a list called data, nor a list of rows")
            yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
            return
    for number, line in enumerate(LINE_END.split(text), 1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                yield number, error


def table_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """The rows of a CSV or TSV file with a header, as {column: cell}, separated as the header is."""
    text = read_text(path)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # the default refuses cells of 131,072 characters
    lines = io.StringIO(text, newline="").readlines()
    header = re.sub(r'"[^"]*"', "", lines[0])
    separator = max(",;\t|", key=header.count)
    reader = csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=f"{separator} " in header)
    columns: list[str] = []
    while True:
        number = reader.line_num + 1  # of the first line of the row
        try:
            cells = next(reader, None)
        except csv.Error as error:
            what = "a quote is opened and never closed" if "unexpected end" in str(error) else error
            yield number, ValueError(f"is not CSV ({what})")
            continue
        if cells is None:
            return
        if not columns:
            columns = cells
            names = [name.strip().lower() for name in cells if name.strip()]
            if len(set(names)) < len(names):
                raise fault(path, number, f"has a column twice: {', '.join(names)}")
        elif len(cells) != len(columns) and any(cells):
            yield number, ValueError(f"has {len(cells)} cells, and the header has {len(columns)}")
        elif any(cell.strip() for cell in cells):
            yield number, dict(zip(columns, cells, strict=True))


def json_lines(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """(number of its line or row, object) of each record. Raises DataError if one is not an object."""
    return collect(path, json_records(path), _numbered).all()


def csv_rows(path: str | Path) -> list[tuple[int, dict[str, str]]]:
    """(line number, {column: cell}) of the rows of a CSV or TSV file. Raises DataError if a row is bad."""
    return collect(path, table_records(path), _numbered).all()


def _numbered(record: dict[str, Any], id: str) -> tuple[int, dict[str, Any]]:
    return int(id.removeprefix("row ")), record
