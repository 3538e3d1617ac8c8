"""Grades as tables: one for the class, and what the gradebooks of Canvas and Moodle import.

A gradebook identifies its students in its own way. With the roster that it exported, its rows are kept as they are, and
the points go in where a student's file was named after one of the columns that identify.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from labkit.course.grades import Grade
from labkit.datasets.files import csv_rows
from labkit.errors import CourseError

FORMULA = re.compile(r"[\s\x00-\x1f\u200b-\u200f\ufeff]*[=+\-@＝＋－＠]")
# https://community.canvaslms.com (Import grades in the Gradebook), https://docs.moodle.org (Grade import)
CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE = ("Email address", "ID number")
IDENTITIES = {
    "canvas": ("SIS Login ID", "SIS User ID", "ID", "Student"),
    "moodle": ("Username", "ID number", "Email address", "Identifier", "Full name"),
}


def class_csv(grades: Iterable[Grade]) -> str:
    """student, assignment, one column per exercise, points, out_of, percent, cells_in_trouble, failure."""
    grades = list(grades)
    exercises = list(dict.fromkeys(outcome.exercise for grade in grades for outcome in grade.outcomes))
    rows = []
    for grade in grades:
        points = {outcome.exercise: outcome.points for outcome in grade.outcomes}
        percent = f"{100 * grade.points / grade.out_of:.1f}" if grade.out_of else ""
        total = [grade.points, grade.out_of, percent, len(grade.trouble), grade.failure]
        rows.append([grade.student, grade.assignment, *(points.get(name, "") for name in exercises), *total])
    header = ["student", "assignment", *exercises, "points", "out_of", "percent", "cells_in_trouble", "failure"]
    return _csv(header, rows)


def gradebook_csv(grades: Iterable[Grade], kind: str, roster: str | Path | None = None) -> tuple[str, list[str]]:
    """The text of a file that Canvas or Moodle imports, and the students for whom the roster has no row.

    Without a roster the student's name is put where one identifies: SIS Login ID (Canvas), Email address (Moodle).

    Raises:
        CourseError: another kind, no grade, grades of several assignments, or a roster that identifies nobody.
    """
    if kind not in IDENTITIES:
        raise CourseError(f"there is no gradebook {kind!r}; there is {', '.join(IDENTITIES)}")
    by_student = {grade.student: grade for grade in grades}
    names = sorted({grade.assignment for grade in by_student.values() if grade.assignment})
    if len(names) != 1:
        raise CourseError(f"a gradebook takes the grades of one assignment; these are of {', '.join(names) or 'none'}")
    column = names[0].upper()
    out_of = max(grade.out_of or 0 for grade in by_student.values())
    if roster is None:
        return _without_roster(by_student, kind, column, out_of), []
    rows = [row for _, row in csv_rows(roster)]
    if not rows:
        raise CourseError(f"{roster} lists no students")
    identities = [name for name in IDENTITIES[kind] if name in rows[0]]
    if not identities:
        raise CourseError(
            f"{roster} has none of the columns {', '.join(IDENTITIES[kind])}; it has {', '.join(rows[0])}"
        )
    place = _place(rows[0], column, kind)
    by_identity = (_rows_of(rows, name) for name in identities)
    rows_of = max(by_identity, key=lambda rows_of: len(rows_of.keys() & by_student.keys()))
    graded = {id(rows_of[student]): grade for student, grade in by_student.items() if student in rows_of}
    for row in rows:
        if (grade := graded.get(id(row))) is not None:
            row[place] = _points(grade, kind)
        else:
            row.setdefault(place, str(out_of) if row.get("Student", "").strip() == "Points Possible" else "")
    header = list(dict.fromkeys([*rows[0], place]))
    text = _csv(header, [[row.get(name, "") for name in header] for row in rows])
    return text, sorted(by_student.keys() - rows_of.keys())


def _rows_of(rows: list[dict[str, str]], column: str) -> dict[str, dict[str, str]]:
    """{value of the column: its row}, without values that occur twice: no row is guessed."""
    values = Counter(row[column].strip() for row in rows)
    return {value: row for row in rows if values[value := row[column].strip()] == 1 and value}


def _without_roster(by_student: dict[str, Grade], kind: str, column: str, out_of: int) -> str:
    if kind == "canvas":
        rows = [["Points Possible", "", "", "", "", str(out_of)]]
        rows += [[name, "", "", name, "", _points(grade, kind)] for name, grade in by_student.items()]
        return _csv([*CANVAS, column], rows)
    return _csv([*MOODLE, column], [[name, name, _points(grade, kind)] for name, grade in by_student.items()])


def _place(row: dict[str, str], column: str, kind: str) -> str:
    """The roster's own column for this assignment, which Canvas writes as "A1 (12345)"; a new one where it has none."""
    return next((name for name in row if name == column or name.startswith(f"{column} (")), column)


def _points(grade: Grade, kind: str) -> str:
    return "" if grade.failure else str(grade.points)  # what could not be graded is not a zero


def _csv(header: list[str], rows: list[list]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([[_inert(cell) for cell in row] for row in [header, *rows]])
    return out.getvalue()


def _inert(cell: object) -> object:
    """A text that a spreadsheet would take for a formula, with ' in front. A number stays a number, - stays empty."""
    if not isinstance(cell, str) or cell.strip() == "-" or re.fullmatch(r"\s*[+-]?\d+([.,]\d+)?\s*", cell):
        return cell
    return f"'{cell}" if FORMULA.match(cell) else cell
