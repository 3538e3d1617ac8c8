"""Grades as pages: one for each student, to hand back, and one of the class for whoever teaches. Open from disk."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

from labkit.course.exercises import NAMES, assignment

if TYPE_CHECKING:
    from labkit.course.grade import Grade

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #b35900; --dim: #6e7781; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #f0a35e; --dim: #9aa4ae; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { white-space: pre-wrap; margin: 0; font-size: .9em; }
.right { color: var(--good); } .wrong, .partly { color: var(--bad); } .none { color: var(--dim); }
.scroll { overflow-x: auto; }
"""
SIGNS = {"right": "✔ right", "partly": "◐ partly right", "wrong": "✘ wrong", "not begun": "○ not begun"}


def student_page(grade: Grade) -> str:
    """What the student is told: points, and for each exercise what the check has said."""
    title = f"{grade.assignment.upper()}: {grade.student}"
    if grade.failure:
        return _page(title, f"<p>This could not be graded.</p><pre>{escape(grade.failure)}</pre>")
    known = assignment(grade.assignment).exercises if grade.assignment in NAMES else {}
    rows = []
    for outcome in grade.outcomes:
        name = known[outcome.exercise].title if outcome.exercise in known else outcome.exercise
        failed = f"<p>Not passed: {escape(', '.join(outcome.failed))}.</p>" if outcome.status == "partly" else ""
        rows.append(
            f"<tr><th scope=row>{escape(name)}<br><code>{escape(outcome.exercise)}</code></th>"
            f"<td class={outcome.status.split()[0].replace('not', 'none')}>{SIGNS[outcome.status]}</td>"
            f"<td class=number>{outcome.points} of {outcome.out_of}</td>"
            f"<td>{failed}<pre>{escape(outcome.message)}</pre></td></tr>"
        )
    head = "<th scope=col>exercise<th scope=col>answer<th scope=col class=number>points<th scope=col>what was found"
    table = f"<div class=scroll><table><tr>{head}</tr>{''.join(rows)}</table></div>"
    body = f"<p><b>{grade.points} of {grade.out_of} points</b></p>{table}"
    if grade.trouble:
        items = "".join(f"<li><pre>{escape(each)}</pre></li>" for each in grade.trouble)
        body += f"<h2>Cells that did not run</h2><ul>{items}</ul>"
    return _page(title, body)


def class_page(grades: list[Grade]) -> str:
    """The class: who has how much, and which exercise and which mistake came how often."""
    rows = "".join(
        f'<tr><th scope=row><a href="{quote(grade.student)}.html">{escape(grade.student)}</a></th>'
        f"<td class=number>{'not graded' if grade.failure else f'{grade.points} of {grade.out_of}'}</td>"
        f"<td>{escape(grade.failure) or _cells(len(grade.trouble))}</td></tr>"
        for grade in grades
    )
    head = "<tr><th scope=col>student<th scope=col class=number>points<th scope=col>trouble</tr>"
    right = Counter(o.exercise for grade in grades for o in grade.outcomes if o.status == "right")
    seen = Counter(o.exercise for grade in grades for o in grade.outcomes)
    likely = Counter(_likely(o.message) for grade in grades for o in grade.outcomes if _likely(o.message))
    exercises = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td class=number>{right[name]} of {seen[name]}</td></tr>"
        for name in seen
    )
    mistakes = "".join(f"<li>{count} × {escape(text)}</li>" for text, count in likely.most_common(12))
    return _page(
        "Grades",
        f"<div class=scroll><table>{head}{rows}</table></div><h2>Exercises</h2><table>"
        f"<tr><th scope=col>exercise<th scope=col class=number>wholly right</tr>{exercises}</table>"
        f"<h2>What went wrong most often</h2><ul>{mistakes or '<li>nothing that is known</li>'}</ul>",
    )


def _cells(count: int) -> str:
    return f"{count} cell{'s' if count > 1 else ''} did not run" if count else ""


def _likely(message: str) -> str:
    return message.partition("Likely:")[2].strip()


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>{body}</html>"
    )
