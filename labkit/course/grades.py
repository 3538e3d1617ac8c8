"""The grade of a submission, and how it is written: JSON, pages for students and the class, files for gradebooks.

A grade's JSON file is not trusted when it is read, because it may come out of a submission's container.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import quote

import pandas as pd

from labkit.course.judging import SIGNS, Outcome
from labkit.course.mistakes import clean
from labkit.datasets.files import csv_rows
from labkit.errors import CourseError
from labkit.files import write_whole

MOST_BYTES = 2**20
MOST_TROUBLES = 20
LONGEST = 150  # bytes of a student's name
FORMULA = re.compile(r"[\s\x00-\x1f\u200b-\u200f\ufeff]*[=+\-@＝＋－＠]")
NUMBER = re.compile(r"\s*([+-]?\d+([.,]\d+)?|-)\s*")  # a lone - is how Moodle writes an empty cell
IDENTITIES = {
    "canvas": ("SIS Login ID", "SIS User ID", "ID", "Student"),
    "moodle": ("Username", "ID number", "Email address", "Identifier", "Full name"),
}
# https://community.canvaslms.com (Import grades in the Gradebook), https://docs.moodle.org (Grade import)
COLUMNS = {
    "canvas": ("Student", "ID", "SIS User ID", "SIS Login ID", "Section"),
    "moodle": ("Email address", "ID number"),
}
PAGE = """<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color-scheme: light dark; }}
table {{ border-collapse: collapse; width: 100%; margin: 1rem 0; }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem; border-top: 1px solid; white-space: pre-wrap; }}
</style><h1>{title}</h1><p>{lead}</p>{body}</html>"""


@dataclass(frozen=True)
class Grade:
    """What is known of a submission.

    `failure`: why it could not be graded; `points` and `out_of` are then None. `trouble`: the cells that failed or were
    stopped. `basis`: what the grade depends on: the file, the variant, the limits, the version of labkit.
    """

    student: str
    assignment: str
    points: int | None = None
    out_of: int | None = None
    outcomes: list = field(default_factory=list)  # of Outcome
    trouble: list = field(default_factory=list)  # of texts
    failure: str = ""
    seconds: float | int = 0.0
    basis: dict = field(default_factory=dict)

    @property
    def score(self) -> str:
        return "not graded" if self.failure else f"{self.points} of {self.out_of}"


def read_grades(folder: str | Path) -> list[Grade]:
    """The grades in a folder, in the order of the students' names. Raises CourseError for a damaged one."""
    grades = []
    for path in sorted(Path(folder).expanduser().glob("*.json")):
        try:
            values = json.loads(read_regular(path, MOST_BYTES))
            parts = [outcome | {"failed": tuple(short(outcome["failed"]))} for outcome in values["outcomes"]]
            values |= {"outcomes": [_typed(Outcome, part) for part in parts], "trouble": short(values["trouble"])}
            grade = _typed(Grade, values)
            if not grade.failure and None in (grade.points, grade.out_of):
                raise ValueError("neither points nor a reason why there are none")
            if any(outcome.status not in SIGNS for outcome in grade.outcomes):
                raise ValueError("an unknown status")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CourseError(
                f"{path} is not a grade that this version of labkit has written ({clean(error, 200)}); remove it, or "
                "choose another folder"
            ) from error
        grades.append(replace(grade, student=student_name(path.stem)))  # not what it calls itself
    return grades


def write_student(grade: Grade, folder: Path) -> None:
    """NAME.html, the page that the student gets back."""
    lead = f"This could not be graded: {grade.failure}" if grade.failure else f"{grade.score} points."
    if grade.points != sum(outcome.points for outcome in grade.outcomes) and not grade.failure:
        lead += " Only the track with more points counts."
    rows = []
    for outcome in grade.outcomes:
        failed = f"Not passed: {', '.join(outcome.failed)}.\n" if outcome.status == "partly" else ""
        status, points = f"{SIGNS[outcome.status]} {outcome.status}", f"{outcome.points} of {outcome.out_of}"
        rows.append((outcome.exercise, status, points, failed + outcome.message))
    tables = {
        ("exercise", "answer", "points", "result"): rows,
        ("cells that did not run",): [(trouble,) for trouble in grade.trouble],
    }
    _write_page(folder / f"{grade.student}.html", f"{grade.assignment.upper()}: {grade.student}", lead, tables)


def write_class(grades: list[Grade], folder: Path) -> None:
    """class.html and grades.csv: points, how often each exercise is right, and the most frequent mistakes."""
    grades = sorted(grades, key=lambda grade: grade.student)
    outcomes = [outcome for grade in grades for outcome in grade.outcomes]
    judged = Counter(outcome.exercise for outcome in outcomes)
    right = Counter(outcome.exercise for outcome in outcomes if outcome.status == "right")
    likely = Counter(outcome.message.partition("Likely:")[2].strip() for outcome in outcomes)
    del likely[""]
    students = [(grade.student, grade.score, grade.failure or str(len(grade.trouble))) for grade in grades]
    tables = {
        ("student", "points", "cells that did not run"): students,
        ("exercise", "right"): [(name, f"{right[name]} of {judged[name]}") for name in judged],
        ("most frequent mistakes", "students"): [(text, str(count)) for text, count in likely.most_common(12)],
    }
    _write_page(folder / "class.html", "Grades", "", tables)
    table = [
        {
            "student": grade.student, "assignment": grade.assignment, "points": grade.points, "out_of": grade.out_of,
            "percent": f"{100 * grade.points / grade.out_of:.1f}" if grade.out_of else None,
            "cells_in_trouble": len(grade.trouble), "failure": grade.failure,
        } | {outcome.exercise: outcome.points for outcome in grade.outcomes}
        for grade in grades
    ]  # fmt: skip
    write_whole(folder / "grades.csv", _csv(pd.DataFrame(table, dtype=object)))


def gradebook_csv(grades: Sequence[Grade], kind: str, roster: str | Path | None = None) -> tuple[str, list[str]]:
    """The text of a file that Canvas or Moodle imports, and the students for whom the roster has no row.

    A gradebook identifies its students in its own way. The rows of the roster that it exported are kept as they are,
    and the points go in where a student's file was named after one of the columns that identify. Without a roster the
    names are taken for SIS Login IDs (Canvas) or email addresses (Moodle).
    Raises CourseError for another kind, grades of no or several assignments, or a roster that identifies nobody.
    """
    if kind not in IDENTITIES:
        raise CourseError(f"there is no gradebook {kind!r}; there is {', '.join(IDENTITIES)}")
    names = sorted({grade.assignment for grade in grades if grade.assignment})
    if len(names) != 1:
        raise CourseError(f"a gradebook takes the grades of one assignment; these are of {', '.join(names) or 'none'}")
    points = {grade.student: "" if grade.failure else str(grade.points) for grade in grades}  # a failure is not a zero
    column, out_of = names[0].upper(), str(max(grade.out_of or 0 for grade in grades))
    if roster is None:
        rows = [{"Student": "Points Possible", column: out_of}] if kind == "canvas" else []
        filled = ("Student", "SIS Login ID") if kind == "canvas" else COLUMNS[kind]
        rows += [dict.fromkeys(filled, student) | {column: points[student]} for student in points]
        return _csv(pd.DataFrame(rows, columns=[*COLUMNS[kind], column], dtype=object)), []
    table = pd.DataFrame([row for _, row in csv_rows(roster)], dtype=object)
    identities = [table[name].str.strip() for name in IDENTITIES[kind] if name in table]
    if not identities:
        raise CourseError(f"{roster} has none of the columns {', '.join(IDENTITIES[kind])}; it has {', '.join(table)}")
    column = next((name for name in table if name == column or name.startswith(f"{column} (")), column)
    if column not in table:
        table[column] = ""
        table.loc[table.get("Student", table[column]).str.strip() == "Points Possible", column] = out_of
    # No row is guessed: a value that occurs twice identifies nobody, and one column identifies all students.
    matches = [keys[keys.isin(list(points)) & ~keys.duplicated(keep=False)] for keys in identities]
    students = max(matches, key=len)
    table.loc[students.index, column] = students.map(points)
    return _csv(table), sorted(points.keys() - set(students))


def student_name(given: str) -> str:
    """The student's name as files, tables and terminals can hold it: at most LONGEST bytes, no control characters."""
    name = clean(given, LONGEST).replace("\\", "_")
    if name != given or name in ("class", "grades") or len(name.encode()) > LONGEST:  # the files for the class
        kept = name.encode()[:LONGEST].decode("utf-8", "ignore")
        name = f"{kept}-{hashlib.sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"
    return name


def short(troubles: list) -> list[str]:
    """Each trouble in a few lines and some hundred characters, and at most MOST_TROUBLES of them."""
    kept = [clean(trouble, 400, 5) for trouble in troubles[:MOST_TROUBLES]]
    return kept + [f"... and {len(troubles) - len(kept)} more"] * (len(troubles) > len(kept))


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file that a stranger has named. Raises CourseError for a link, a pipe, a larger file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as opened:
            regular = stat.S_ISREG(os.fstat(file).st_mode)
            content = opened.read(most_bytes + 1) if regular else b""
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise CourseError(f"{path} could not be read: {error.strerror or error}") from error
        regular, content = False, b""
    if not regular:
        raise CourseError(f"{path} is not a regular file (a link, a folder, a pipe or a device), and is not read")
    if len(content) > most_bytes:
        raise CourseError(f"{path} has more than {most_bytes / 2**20:.0f} MB and is not read; clear its outputs")
    return content


def _typed(kind: type, values: dict[str, Any]) -> Any:
    """An instance of a dataclass, its texts cleaned. Raises TypeError for a field of another type."""
    for name, hint in get_type_hints(kind).items():
        if not isinstance(values[name], hint):
            raise TypeError(f"{name} is a {type(values[name]).__name__}")
        if isinstance(values[name], str):
            values[name] = clean(values[name])
    return kind(**values)


def _write_page(path: Path, title: str, lead: str, tables: dict[tuple[str, ...], list[tuple[str, ...]]]) -> None:
    """An HTML page with tables, {header: rows}; a student's name links to the page of that student."""
    lines = []
    for header, rows in tables.items():
        lines += ["<table><tr>", *(f"<th scope=col>{name}" for name in header)]
        for row in rows:
            cells = [escape(cell) for cell in row]
            if header[0] == "student":
                cells[0] = f'<a href="{quote(row[0])}.html">{cells[0]}</a>'
            lines += ["<tr>", *(f"<td>{cell}" for cell in cells)]
        lines.append("</table>")
    write_whole(path, PAGE.format(title=escape(title), lead=escape(lead), body="".join(lines)))


def _csv(table: pd.DataFrame) -> str:
    inert = table.fillna("").map(_inert).rename(columns=_inert)
    return inert.to_csv(index=False, quoting=csv.QUOTE_ALL, lineterminator="\n")


def _inert(cell: Any) -> Any:
    """A text that a spreadsheet would take for a formula, with ' in front."""
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) and not NUMBER.fullmatch(cell) else cell
