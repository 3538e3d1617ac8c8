"""The checks of the assignments, one function per exercise: `check.a1_causal_mask(causal_mask)`.

Each check calls the answer and shows what is wrong and the likely cause. It never stops a notebook, so that an exercise
can be skipped.

    from labkit.course import check
    check.a1_causal_mask(causal_mask)
    check.progress()                     # all exercises of this notebook that were checked so far
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from labkit.course.answers import TooSlow, local_answer, time_limit
from labkit.course.exercises import NAMES, assignment, exercise
from labkit.course.judging import Outcome, judged
from labkit.course.variant import Variant
from labkit.errors import CourseError

LOOK_SECONDS = 30.0

_variant = Variant()
_outcomes: dict[str, Outcome] = {}  # the latest outcome of each exercise in this process


@dataclass(frozen=True, repr=False)
class Shown:
    """The outcome of a check, as a notebook shows it."""

    outcome: Outcome

    def __repr__(self) -> str:
        return str(self.outcome)

    def _repr_html_(self) -> str:
        colour = {"right": "#1a7f37", "not begun": "#6e7781"}.get(self.outcome.status, "#b35900")
        first, _, rest = str(self.outcome).partition("\n")
        return (
            f'<div style="border-left: 4px solid {colour}; padding: 2px 10px"><b>{escape(first)}</b>'
            f'<pre style="margin: 2px 0; white-space: pre-wrap; background: none">{escape(rest)}</pre></div>'
        )

    def graded(self) -> float:
        """The points, for the last line of an nbgrader test cell. Prints what is wrong, for nbgrader's feedback."""
        print(self.outcome)
        return float(self.outcome.points)


def __getattr__(name: str) -> Callable[..., Shown]:
    try:
        task = exercise(name)
    except CourseError as error:
        raise AttributeError(str(error)) from None

    def check(answer: Any, *, hidden: bool = False, key: str | None = None, salt: str = "") -> Shown:
        variant = _variant if key is None else Variant(key, salt)
        outcome = judged(task, local_answer(task.answer, answer, name[:2]), variant, hidden=hidden)
        if not hidden:
            _outcomes[name] = outcome
        if outcome.status != "right" and os.environ.get("NBGRADER_EXECUTION") == "validate":
            raise AssertionError(str(outcome))  # nbgrader's Validate button recognises only errors
        return Shown(outcome)

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"{task.title}: is `{task.answer}` right?"
    return check


def __dir__() -> list[str]:
    return ["look", "progress", "use", *(task for name in NAMES for task in assignment(name).exercises)]


def use(key: str) -> None:
    """Ask as the variant with this key does; the setup cell of a private variant's notebook calls it."""
    global _variant
    _variant = Variant(key)


def look(show: Callable[[], Any]) -> Any:
    """What `show` returns, or a line instead while the exercise that it shows is not begun, or does not end."""
    try:
        with time_limit(LOOK_SECONDS):
            return show()
    except NotImplementedError as error:
        print(f"There will be something to see here once {error} is done.")
    except TooSlow:
        print(f"Nothing to see within {LOOK_SECONDS:g} seconds: a loop that does not end?")


def progress() -> str:
    """The exercises checked in this notebook so far, with points; only the track with more points counts."""
    if not _outcomes:
        return "Nothing has been checked yet."
    rows = [(name, outcome.status, outcome.points, outcome.out_of) for name, outcome in _outcomes.items()]
    for name in dict.fromkeys(task[:2] for task in _outcomes):
        points = assignment(name).best({task: outcome.points for task, outcome in _outcomes.items()})
        out_of = assignment(name).best({task: outcome.out_of for task, outcome in _outcomes.items()})
        rows.append((f"{name} so far", "", points, out_of))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:<{width}}  {status:<9}  {points} of {out_of}" for name, status, points, out_of in rows)
