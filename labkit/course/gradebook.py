"""Grades as tables: one of our own for the class, and what the gradebooks of Canvas and Moodle import.

A gradebook knows its students by identities of its own. Give it the roster it has exported: its rows are kept as they
are, and the points go in where a student's file was named after one of the columns that identify.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.datasets.files import csv_rows
from labkit.errors import CourseError

if TYPE_CHECKING:
    from labkit.course.grade import Grade

# https://community.canvaslms.com (Import grades in the Gradebook), https://docs.moodle.org (Grade import)
CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE = ("Email address", "ID number")
IDENTITIES = {
    "canvas": ("SIS Login ID", "SIS User ID", "ID", "Student"),
    "moodle": ("Username", "ID number", "Email address", "Identifier", "Full name"),
}


def class_csv(grades: Iterable[Grade]) -> str:
    """student, one column per exercise, points, out_of, percent, trouble, failure."""
    grades = list(grades)
    exercises = list(dict.fromkeys(outcome.exercise for grade in grades for outcome in grade.outcomes))
    rows = []
    for grade in grades:
        points = {outcome.exercise: outcome.points for outcome in grade.outcomes}
        percent = f"{100 * grade.points / grade.out_of:.1f}" if grade.out_of else ""
        each = [points.get(name, "") for name in exercises]
        total = [grade.points, grade.out_of, percent, len(grade.trouble), grade.failure]
        rows.append([grade.student, grade.assignment, *each, *total])
    header = ["student", "assignment", *exercises, "points", "out_of", "percent", "cells_in_trouble", "failure"]
    return _written(header, rows)


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
    out_of = max(grade.out_of for grade in by_student.values())
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
    rows_of = max(
        (_by_identity(rows, name) for name in identities), key=lambda each: len(each.keys() & by_student.keys())
    )
    graded = {id(rows_of[student]): grade for student, grade in by_student.items() if student in rows_of}
    for row in rows:
        if (grade := graded.get(id(row))) is not None:
            row[place] = _points(grade, kind)
        else:
            row.setdefault(place, str(out_of) if row.get("Student", "").strip() == "Points Possible" else "")
    header = list(dict.fromkeys([*rows[0], place]))
    return _written(header, [[row.get(name, "") for name in header] for row in rows]), sorted(
        by_student.keys() - rows_of.keys()
    )


def _by_identity(rows: list[dict[str, str]], column: str) -> dict[str, dict[str, str]]:
    """{what stands in the column: its row}, without what stands there twice: nobody is guessed."""
    values = Counter(row[column].strip() for row in rows)
    return {value: row for row in rows if values[value := row[column].strip()] == 1 and value}


def _without_roster(by_student: dict[str, Grade], kind: str, column: str, out_of: int) -> str:
    if kind == "canvas":
        rows = [["Points Possible", "", "", "", "", str(out_of)]]
        rows += [[name, "", "", name, "", _points(grade, kind)] for name, grade in by_student.items()]
        return _written([*CANVAS, column], rows)
    return _written([*MOODLE, column], [[name, name, _points(grade, kind)] for name, grade in by_student.items()])


def _place(row: dict[str, str], column: str, kind: str) -> str:
    """The roster's own column for this assignment, which Canvas writes as "A1 (12345)"; a new one where it has none."""
    return next((name for name in row if name == column or name.startswith(f"{column} (")), column)


def _points(grade: Grade, kind: str) -> str:
    return "" if grade.failure else str(grade.points)  # what could not be graded is no zero


def _written(header: list[str], rows: list[list]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_plain(cell) for cell in row] for row in rows)
    return out.getvalue()


def _plain(cell: object) -> object:
    """A student's name that begins like a formula stays a name when a spreadsheet opens the file."""
    if not isinstance(cell, str) or cell[:1] not in ("=", "+", "-", "@", "\t") or cell == "-" or _is_number(cell):
        return cell
    return f"'{cell}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
