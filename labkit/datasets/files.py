"""Reading data files so that a fault is named by file and line, and writing them whole or not at all."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from labkit import run_folder
from labkit.errors import DataError


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, without a byte order mark; DataError names the file, and the line that is not UTF-8."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file in it")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} could not be read: {error.strerror or error}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}: is not UTF-8 (byte {error.start + 1} of the file); convert it"
        ) from error
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def fault(path: str | Path, line: int, what: str) -> DataError:
    """The one way a faulty line is named."""
    return DataError(f"{path}, line {line}: {' '.join(what.splitlines())}")


def each_made(
    path: str | Path, rows: Iterable[tuple[int, Any]], make: Callable[[Any, int], Any], what: str, form: str
) -> list[Any]:
    """`make(row, line)` of each (line, row) of a file; what is made has an `id`, and no two have the same.

    Raises:
        DataError: what `make` raised as a ValueError in words, a row that is not of the `form`, or an id twice, with
            file and line; or no row at all: "holds no `what`".
    """
    found: list[Any] = []
    first_at: dict[str, int] = {}
    for line, row in rows:
        try:
            one = make(row, line)
        except ValueError as error:  # a DataError is one
            raise fault(path, line, str(error)) from error
        except (KeyError, TypeError, AttributeError) as error:
            raise fault(path, line, f"is not of the form for {form}: {error}") from error
        if one.id in first_at:
            raise fault(path, line, f"has the id {one.id!r}, as line {first_at[one.id]} has; ids must differ")
        first_at[one.id] = line
        found.append(one)
    if not found:
        raise DataError(f"{path} holds no {what}")
    return found


def json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty."""
    for number, line in enumerate(read_text(path).split("\n"), 1):  # only \n ends a line, whatever a text may hold
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise fault(path, number, f"is not JSON ({error.msg}, column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands
            raise fault(path, number, f"is not JSON that can be read ({error})") from error
        if not isinstance(row, dict):
            raise fault(path, number, f"holds a {type(row).__name__}, not an object with fields")
        yield number, row


def csv_rows(path: str | Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, {column: cell}) of a CSV or TSV file with a header; the separator is seen from the header."""
    text = read_text(path)
    header = text.split("\n", 1)[0]
    separator = max(",;\t", key=header.count)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # else a cell of 131,072 characters is an error
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        columns = next(reader)
        if twice := [column for i, column in enumerate(columns) if column in columns[:i]]:
            raise fault(path, 1, f"has the column {twice[0]!r} twice")
        for row in reader:
            if not row:
                continue
            if len(row) != len(columns):
                raise fault(path, reader.line_num, f"has {len(row)} cells, and the header has {len(columns)}")
            yield reader.line_num, dict(zip(columns, row, strict=True))
    except csv.Error as error:
        raise fault(path, reader.line_num, f"is not CSV ({error})") from error


def write_whole(path: str | Path, text: str) -> Path:
    """Write a UTF-8 file, whole or not at all."""
    path = Path(path).expanduser().absolute()
    run_folder.write_whole(path, text)
    return path
