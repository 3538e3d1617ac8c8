"""The checks of the assignments, one function per exercise: `check.a1_causal_mask(causal_mask)`.

Each calls the answer, says what is wrong and why that may be, and never stops a notebook: the result is shown, and an
exercise can be skipped. `.require()` turns a wrong answer into an AssertionError, for tests of one's own.

    from labkit.course import check
    check.a1_causal_mask(causal_mask)
    check.progress()                     # all exercises of this notebook that were checked so far
"""

from __future__ import annotations

import os
from collections.abc import Callable
from html import escape
from typing import Any

from labkit.course.answers import LocalAnswer, TooSlow, time_limit
from labkit.course.exercises import NAMES, assignment, exercise
from labkit.course.judging import Outcome, judged
from labkit.course.variant import Variant
from labkit.errors import CourseError

LOOK_SECONDS = 30.0
NBGRADER = "NBGRADER_EXECUTION"  # nbgrader sets it to "autograde" or "validate" where it runs a notebook

_variant = Variant()
_seen: dict[str, Outcome] = {}  # the latest outcome of each exercise in this process


class CheckFailed(AssertionError):
    """An answer that was required to be right is not; the message is the check's."""


class Shown:
    """The outcome of a check, as a notebook shows it."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome

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
        """The points, 0.0 included, for the last line of an nbgrader test cell: it takes that number as the score.

        Prints what is wrong, for nbgrader's feedback.
        """
        print(self.outcome)
        return float(self.outcome.points)

    def require(self) -> int:
        """The points. Raises CheckFailed unless all parts that were judged are right."""
        if self.outcome.status != "right":
            raise CheckFailed(str(self.outcome))
        return self.outcome.points


def __getattr__(name: str) -> Callable[..., Shown]:
    if name.partition("_")[0] not in NAMES:
        raise AttributeError(f"labkit.course.check has no {name!r}; its checks are named as the exercises: a1_...")
    try:
        found = exercise(name)
    except CourseError as error:
        raise AttributeError(str(error)) from None

    def check(answer: Any, *, hidden: bool = False, key: str | None = None, salt: str = "") -> Shown:
        variant = _variant if key is None else Variant(key, salt)
        local = LocalAnswer(found.answer, answer, name.partition("_")[0])
        outcome = judged(found, local, variant, hidden=hidden)
        if not hidden:
            _seen[name] = outcome
        if outcome.status != "right" and os.environ.get(NBGRADER) == "validate":
            raise CheckFailed(str(outcome))  # its Validate button knows errors only
        return Shown(outcome)

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"{found.title}: is `{found.answer}` right?"
    return check


def __dir__() -> list[str]:
    return ["look", "progress", "use", *(name for each in NAMES for name in assignment(each).exercises)]


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
    return None


def progress() -> str:
    """What was checked in this notebook so far, with points."""
    if not _seen:
        return "Nothing has been checked yet."
    width = max(map(len, _seen))
    lines = [f"{name:<{width}}  {each.status:<9}  {each.points} of {each.out_of}" for name, each in _seen.items()]
    points, out_of = (sum(getattr(each, what) for each in _seen.values()) for what in ("points", "out_of"))
    return "\n".join([*lines, f"{'so far':<{width}}  {'':<9}  {points} of {out_of}"])
