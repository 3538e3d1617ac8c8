"""Grades as pages: what a student gets back, and the class at a glance."""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path
from urllib.parse import quote

from labkit.course.exercises import NAMES, assignment
from labkit.course.gradebook import class_csv
from labkit.course.grades import Grade
from labkit.course.judging import SIGNS
from labkit.files import write_whole

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #b35900; --dim: #6e7781; }
@media (prefers-color-scheme: dark) { :root { --good: #4fbf6b; --bad: #e8985e; --dim: #9aa4ad; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid var(--line); }
pre { white-space: pre-wrap; margin: 0; font-size: .9em; }
.right { color: var(--good); } .wrong, .partly { color: var(--bad); } .not { color: var(--dim); }
"""


def write_student(grade: Grade, folder: Path) -> None:
    """NAME.html."""
    write_whole(folder / f"{grade.student}.html", student_page(grade))


def write_class(grades: list[Grade], folder: Path) -> None:
    """class.html and grades.csv."""
    grades = sorted(grades, key=lambda grade: grade.student)
    write_whole(folder / "class.html", class_page(grades))
    write_whole(folder / "grades.csv", class_csv(grades))


def student_page(grade: Grade) -> str:
    """What the student is told: points, and the message of the check for each exercise."""
    title = f"{grade.assignment.upper()}: {grade.student}"
    if grade.failure:
        return _page(title, f"<p>This could not be graded.</p><pre>{escape(grade.failure)}</pre>")
    of = assignment(grade.assignment) if grade.assignment in NAMES else None
    rows = []
    for outcome in grade.outcomes:
        known = of.exercises.get(outcome.exercise) if of else None
        track = f" ({known.track})" if known and known.track else ""
        failed = f"Not passed: {', '.join(outcome.failed)}.\n" if outcome.status == "partly" else ""
        name = f"{known.title if known else ''}{track}\n{outcome.exercise}"
        rows.append((name, _status(outcome.status), f"{outcome.points} of {outcome.out_of}", failed + outcome.message))
    body = f"<p><b>{grade.score} points</b></p>"
    if of and len(of.tracks) > 1:
        body += f"<p>Of the tracks {' and '.join(map(str, of.tracks))}, only the one with more points counts.</p>"
    body += _table(("exercise", "answer", "points", "result"), rows)
    if grade.trouble:
        body += f"<h2>Cells that did not run</h2>{_table((), [(trouble,) for trouble in grade.trouble])}"
    return _page(title, body)


def class_page(grades: list[Grade]) -> str:
    """The class: the points of each student, how often each exercise is right, and the most frequent mistakes."""
    rows = [
        (_link(grade.student), grade.score, grade.failure or f"{len(grade.trouble) or ''}")
        for grade in grades
    ]  # fmt: skip
    outcomes = [outcome for grade in grades for outcome in grade.outcomes]
    seen = Counter(outcome.exercise for outcome in outcomes)
    right = Counter(outcome.exercise for outcome in outcomes if outcome.status == "right")
    likely = Counter(outcome.message.partition("Likely:")[2].strip() for outcome in outcomes)
    del likely[""]
    return _page(
        "Grades",
        _table(("student", "points", "cells that did not run"), rows)
        + "<h2>Exercises</h2>"
        + _table(("exercise", "right"), [(name, f"{right[name]} of {seen[name]}") for name in seen])
        + "<h2>Most frequent mistakes</h2>"
        + _table(("students", "mistake"), [(str(count), text) for text, count in likely.most_common(12)]),
    )


class _Html(str):
    """Text that is markup already."""


def _link(student: str) -> _Html:
    return _Html(f'<a href="{quote(student)}.html">{escape(student)}</a>')


def _status(status: str) -> _Html:
    return _Html(f"<span class={status.split()[0]}>{SIGNS[status]} {status}</span>")


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th scope=col>{name}" for name in header)
    cells = [
        "".join(f"<td>{cell if isinstance(cell, _Html) else f'<pre>{escape(cell)}</pre>'}" for cell in row)
        for row in rows
    ]
    return f"<table><tr>{head}{''.join(f'<tr>{row}' for row in cells)}</table>"


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>{body}</html>"
    )
