"""The checks of the assignments, one function per exercise: `check.a1_causal_mask(causal_mask)`.

Each check calls the answer and shows what is wrong and the likely cause. It never stops a notebook, so that an exercise
can be skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from labkit.course.answers import TooSlow, local_answer, time_limit
from labkit.course.exercises import NAMES, Outcome, assignment
from labkit.course.predictions import GRADERS, file_name, missing, read_beside
from labkit.course.variant import Variant
from labkit.errors import CourseError
from labkit.files import write_whole

LOOK_SECONDS = 30.0

_variant = Variant()
_outcomes: dict[str, Outcome] = {}  # the latest outcome of each exercise in this process


def __getattr__(name: str) -> Callable[..., Outcome]:
    exercises = assignment(name[:2]).exercises if name[:2] in NAMES else {}
    if (task := exercises.get(name)) is None:
        close = " or ".join(get_close_matches(name, exercises, 3, 0.4))
        raise AttributeError(f"there is no exercise {name!r}" + (f"; did you mean {close}?" if close else ""))

    def check(answer: Any, *, hidden: bool = False, key: str | None = None, salt: str = "") -> Outcome:
        variant = _variant if key is None else Variant(key, salt)
        outcome = task.judge(local_answer(task.answer, answer, name[:2]), variant, hidden=hidden)
        _outcomes[name] = outcome
        if outcome.status != "right" and os.environ.get("NBGRADER_EXECUTION") == "validate":
            raise AssertionError(str(outcome))  # nbgrader's Validate button recognises only errors
        return outcome

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"{task.title}: is `{task.answer}` right?"
    return check


def __dir__() -> list[str]:
    return ["look", "predictions", "progress", "use", *(task for name in NAMES for task in assignment(name).exercises)]


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


def predictions(assignment: str, make: Callable[[], Any]) -> Any:
    """What NAME_predictions.json beside this notebook holds. If it is missing, `make()` makes it, and it is written.

    Raises CourseError if it is missing where a grader runs the notebook, which is to train nothing.
    """
    content = read_beside(Path(), assignment)
    if content is None:
        if any(name in os.environ for name in GRADERS):
            raise CourseError(missing(assignment))
        content = json.dumps(make()).encode()
        write_whole(file_name(assignment), content)
    return json.loads(content)


def progress() -> None:
    """Print the exercises that were checked in this notebook so far, with points."""
    for outcome in _outcomes.values():
        print(str(outcome).partition("\n")[0])
    print(f"{len(_outcomes)} exercises checked so far")
