"""The grade of a submission, and how it is written: JSON, pages for students and the class, files for gradebooks.

A grade's JSON file is not trusted when it is read, because it may come out of a submission's container.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from labkit.course.exercises import SIGNS, Assignment, Outcome, assignment
from labkit.course.mistakes import clean
from labkit.course.predictions import read_regular
from labkit.datasets.files import csv_rows
from labkit.errors import CourseError, needs_extra, require_one_of
from labkit.files import write_whole

with needs_extra("course"):
    import pandas as pd

MOST_BYTES = 2**20  # of a grade's JSON file
MOST_TROUBLES = 20
LONGEST = 150  # bytes of a student's name
FORMULA = re.compile(r"[\s\x00-\x1f\u200b-\u200f\ufeff]*[=+\-@＝＋－＠]")
NUMBER = re.compile(r"\s*([+-]?\d+([.,]\d+)?|-)\s*")  # a lone - is how Moodle writes an empty cell
# https://community.canvaslms.com (Import grades in the Gradebook), https://docs.moodle.org (Grade import)
IDENTITIES = {  # columns that identify a student, the best one first
    "canvas": ("SIS Login ID", "SIS User ID", "ID", "Student"),
    "moodle": ("Username", "ID number", "Email address", "Identifier", "Full name"),
}
COLUMNS = {  # of a file without a roster
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
    """The result of a submission.

    `failure`: why it could not be graded; `points` and `out_of` are then None. `trouble`: the cells that failed or were
    stopped. `timed_out`: a time limit was reached, so that another run may give more points. `basis`: what the grade
    depends on: the file, the variant, the limits, labkit's checks.
    """

    student: str
    assignment: str
    points: int | None = None
    out_of: int | None = None
    outcomes: list = field(default_factory=list)  # of Outcome
    trouble: list = field(default_factory=list)  # of texts
    seconds: float = 0.0
    timed_out: bool = False
    basis: dict = field(default_factory=dict)
    failure: str = ""

    @classmethod
    def of(cls, student: str, assignment: Assignment, outcomes: list[Outcome], *others: Any) -> Grade:
        """The grade with the points of these outcomes, one of each exercise; `others`: the fields after them."""
        points = assignment.best({outcome.exercise: outcome.points for outcome in outcomes})
        out_of = assignment.best({outcome.exercise: outcome.out_of for outcome in outcomes})
        return cls(student, assignment.name, points, out_of, outcomes, *others)

    @property
    def score(self) -> str:
        return "not graded" if self.failure else f"{self.points} of {self.out_of}"

    @property
    def remark(self) -> str:
        """What a table of the class notes beside the score."""
        return self.failure or ("a time limit was reached; the next run grades it again" if self.timed_out else "")


def read_grades(folder: str | Path) -> list[Grade]:
    """The grades in a folder, by student. A damaged or forged file is a grade with a failure."""
    grades = []
    for path in sorted(Path(folder).expanduser().glob("*.json")):
        student = student_name(path.stem)  # not what the file calls the student
        try:
            grades.append(_checked_grade(student, json.loads(read_regular(path, MOST_BYTES))))
        except Exception as error:  # whatever is wrong with a file, it does not stop the class
            reason = f"{path} is not a grade that this version of labkit has written: {clean(error, 200)}"
            grades.append(Grade(student, "", failure=clean(reason)))
    return grades


def write_pages(grades: Sequence[Grade], folder: Path) -> None:
    """NAME.html for each student; class.html and grades.csv with the points and the most frequent mistakes of all."""
    grades = sorted(grades, key=lambda grade: grade.student)
    for grade in grades:
        lead = f"This could not be graded: {grade.failure}" if grade.failure else f"{grade.score} points."
        if grade.points != sum(outcome.points for outcome in grade.outcomes) and not grade.failure:
            lead += " Only the track with more points counts."
        body = "".join(outcome._repr_html_() for outcome in grade.outcomes)
        if grade.trouble:
            body += _table(("cells that did not run",), [(escape(trouble),) for trouble in grade.trouble])
        _write_page(folder / f"{grade.student}.html", f"{grade.assignment.upper()}: {grade.student}", lead, body)
    outcomes = [outcome for grade in grades for outcome in grade.outcomes]
    judged = Counter(outcome.exercise for outcome in outcomes)
    right = Counter(outcome.exercise for outcome in outcomes if outcome.status == "right")
    likely = Counter(outcome.likely for outcome in outcomes if outcome.likely)
    students = [
        (f'<a href="{quote(grade.student)}.html">{escape(grade.student)}</a>', grade.score, escape(grade.remark))
        for grade in grades
    ]
    body = _table(("student", "points", ""), students)
    body += _table(("exercise", "right"), [(name, f"{right[name]} of {judged[name]}") for name in judged])
    causes = [(escape(cause), count) for cause, count in likely.most_common(12)]
    _write_page(folder / "class.html", "Grades", "", body + _table(("most frequent mistakes", "students"), causes))
    table = [
        {
            "student": grade.student, "assignment": grade.assignment, "points": grade.points, "out_of": grade.out_of,
            "percent": f"{100 * grade.points / grade.out_of:.1f}" if grade.out_of else None,
            "cells_in_trouble": len(grade.trouble), "failure": grade.failure, "timed_out": grade.timed_out,
        } | {outcome.exercise: outcome.points for outcome in grade.outcomes}
        for grade in grades
    ]  # fmt: skip
    write_whole(folder / "grades.csv", _csv(pd.DataFrame(table, dtype=object)))


def gradebook_csv(
    grades: Sequence[Grade], kind: str, roster: str | Path | None = None
) -> tuple[str, list[str], list[str]]:
    """The text of a file that Canvas or Moodle imports, the students without a row in the roster, and without a grade.

    A gradebook identifies its students in its own way. The rows of the roster that it exported are kept as they are,
    and the points go in where a student's file was named after one of the columns that identify. Without a roster the
    names are taken for SIS Login IDs (Canvas) or email addresses (Moodle).
    Raises CourseError for another kind, grades of no or several assignments, or a roster that identifies nobody.
    """
    require_one_of("the gradebook", kind, IDENTITIES, CourseError)
    names = {grade.assignment: grade.student for grade in grades if not grade.failure}
    if len(names) != 1:
        listed = ", ".join(f"{name} ({student})" for name, student in names.items()) or "none"
        raise CourseError(f"a gradebook takes the grades of one assignment; these are of {listed}")
    points = {grade.student: "" if grade.failure else str(grade.points) for grade in grades}  # a failure is not a zero
    if roster is None:
        filled = ("Student", "SIS Login ID") if kind == "canvas" else COLUMNS[kind]
        rows = [{"Student": "Points Possible"}] if kind == "canvas" else []
        rows += [dict.fromkeys(filled, student) for student in points]
        table = pd.DataFrame(rows, columns=COLUMNS[kind], dtype=object).fillna("")
    else:
        table = pd.DataFrame([row for _, row in csv_rows(roster)], dtype=object)
    identities = [table[name].str.strip() for name in IDENTITIES[kind] if name in table]
    if not identities:
        raise CourseError(f"{roster} has none of the columns {', '.join(IDENTITIES[kind])}; it has {', '.join(table)}")
    column = next(iter(names)).upper()
    column = next((name for name in table if name == column or name.startswith(f"{column} (")), column)
    if column not in table:
        table[column] = ""
        possible = table.get("Student", table[column]).str.strip() == "Points Possible"
        table.loc[possible, column] = str(max(grade.out_of or 0 for grade in grades))
    # No row is guessed: a value that occurs twice identifies nobody, and one column identifies all students.
    matches = [keys[keys.isin(list(points)) & ~keys.duplicated(keep=False)] for keys in identities]
    students = max(matches, key=len)
    table.loc[students.index, column] = students.map(points)
    others = identities[[len(match) for match in matches].index(len(students))].drop(students.index)
    ungraded = [name for name in others if name not in ("", "Points Possible")]
    return _csv(table), sorted(points.keys() - set(students)), ungraded


def student_name(given: str) -> str:
    """The student's name as files, tables and terminals can hold it: one line of at most LONGEST bytes."""
    name = clean(given, LONGEST, lines=1).replace("\\", "_")
    if name != given or name in ("class", "grades") or len(name.encode()) > LONGEST:  # the files for the class
        kept = name.encode()[:LONGEST].decode("utf-8", "ignore")
        name = f"{kept}-{hashlib.sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"
    return name


def short(troubles: list) -> list[str]:
    """Each trouble in a few lines and some hundred characters; in place of those after MOST_TROUBLES their number."""
    kept = [clean(trouble, 400, 5) for trouble in troubles[: MOST_TROUBLES + 1]]
    if (left := len(troubles) - MOST_TROUBLES) > 1:
        kept[-1] = f"... and {left} more"
    return kept


def _checked_grade(student: str, values: dict[str, Any]) -> Grade:
    """The grade of a JSON file. Raises ValueError, KeyError or TypeError for values that no grading gives."""
    if values["failure"]:
        return Grade(student, clean(values["assignment"]), failure=clean(values["failure"]))
    of, outcomes = assignment(values["assignment"]), []
    for outcome in (Outcome(**outcome) for outcome in values["outcomes"]):
        most = of.exercises[outcome.exercise].points
        if outcome.status not in SIGNS or not 0 <= outcome.points <= outcome.out_of <= most:
            raise ValueError(f"{outcome.points} points of {most} for {outcome.exercise}, {outcome.status}")
        texts = {"message": clean(outcome.message), "likely": clean(outcome.likely)}
        texts["failed"] = short(list(outcome.failed))
        outcomes.append(replace(outcome, points=int(outcome.points), out_of=int(outcome.out_of), **texts))
    trouble, seconds = short(list(values["trouble"])), float(values["seconds"])
    return Grade.of(student, of, outcomes, trouble, seconds, bool(values["timed_out"]), dict(values["basis"]))


def _write_page(path: Path, title: str, lead: str, body: str) -> None:
    write_whole(path, PAGE.format(title=escape(title), lead=escape(lead), body=body))


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """An HTML table of cells that are HTML."""
    lines = ["".join(f"<th scope=col>{name}" for name in header)]
    lines += ["".join(f"<td>{cell}" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}' for line in lines)}</table>"


def _csv(table: pd.DataFrame) -> str:
    inert = table.fillna("").map(_inert).rename(columns=_inert)
    return inert.to_csv(index=False, quoting=csv.QUOTE_ALL, lineterminator="\n")


def _inert(cell: Any) -> Any:
    """A text that a spreadsheet would take for a formula, with ' in front."""
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) and not NUMBER.fullmatch(cell) else cell
