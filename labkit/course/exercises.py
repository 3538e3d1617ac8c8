"""Assignments: exercises with a name, points and minutes, each judged by one check or several.

    A1.exercise("a1_window_mask", "A sliding window", "window_mask", difficulty=2, minutes=8)

    @A1.part("a1_window_mask", points=1, cases=(1, 99), hidden=True)  # for graders only
    @A1.part("a1_window_mask", points=2, cases=(2, 3))
    def the_window(answer: Answer, variant: Variant, w: int) -> None:
        expect_tensor(answer(9, w), masks.sliding_window(w).dense(9), f"window_mask(9, {w})", suspects={...})

A check calls the answer as often as it likes and raises `Mistake` at the first value that is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from labkit.course.answers import Answer
from labkit.course.mistakes import Mistake, NotBegun, clean
from labkit.course.variant import Variant
from labkit.errors import CourseError, require_one_of

NAMES = ("a1", "a2", "a3", "a4", "a5")
ROUNDS = 3  # of draws that graders ask; a self-check asks one
SIGNS = {"right": "✔", "partly": "◐", "wrong": "✘", "not begun": "○"}  # by status
COLOURS = {"right": "#1a7f37", "not begun": "#6e7781"}

Check = Callable[..., None]  # of an Answer, a Variant, and a case where there are cases


@dataclass(frozen=True)
class Part:
    """One check of an exercise, which asks about each of the cases. It gives all of its points or none."""

    name: str
    points: int
    check: Check
    hidden: bool
    cases: tuple

    def mistake(self, answer: Answer, variant: Variant) -> Mistake | None:
        """The mistake in the first case that is wrong, or None. Raises NotBegun."""
        mistakes: dict[int, Mistake] = {}
        # The order of asking is drawn, so that an answer cannot count the calls.
        for i in variant.rng(f"order of {self.name}").sample(range(len(self.cases)), len(self.cases)):
            try:
                self.check(answer, variant, *self.cases[i])
            except Mistake as mistake:
                mistakes[i] = mistake
                if mistake.came.startswith("no answer"):  # within the time limit: every other case may take as long
                    break
            except (NotBegun, ImportError, MemoryError, OSError):  # a fault of this machine is no mistake
                raise
            except Exception as error:  # the check compared what cannot be compared: the answer has another form
                came = f"one that cannot be compared ({type(error).__name__}: {error})"
                mistakes[i] = Mistake("an answer of the form that the task asks for", came)
        return mistakes[min(mistakes)] if mistakes else None


@dataclass(frozen=True, repr=False)
class Outcome:
    """The result of an exercise, as a notebook shows it.

    `status`: one of SIGNS. `message`: the first mistake. `likely`: the cause in it that labkit names. `failed`: the
    names of the parts that gave no points. `later`: the points of hidden parts, which only graders ask.
    """

    exercise: str
    status: str
    points: int
    out_of: int
    message: str = ""
    likely: str = ""
    failed: list = field(default_factory=list)
    later: int = 0

    def __repr__(self) -> str:
        later = f"; {self.later} more when it is graded" if self.later else ""
        head = f"{SIGNS[self.status]} {self.exercise}: {self.status} ({self.points} of {self.out_of} points{later})"
        failed = f"Not passed: {', '.join(self.failed)}" if self.status == "partly" else ""
        return "\n".join(filter(None, (head, failed, self.message)))

    def _repr_html_(self) -> str:
        head, _, message = repr(self).partition("\n")
        return (
            f'<div style="border-left: 4px solid {COLOURS.get(self.status, "#b35900")}; padding: 2px 10px">'
            f'<b>{escape(head)}</b><pre style="margin: 2px 0; white-space: pre-wrap; background: none">'
            f"{escape(message)}</pre></div>"
        )

    def graded(self) -> float:
        """The points, for the last line of an nbgrader test cell. Prints what is wrong, for nbgrader's feedback."""
        print(self)
        return float(self.points)


@dataclass
class Exercise:
    """One task for the student, who defines an object called `answer`; difficulty from 1 to 5.

    `track`: the one of several ways through the assignment that it belongs to; None belongs to all.
    """

    name: str
    title: str
    answer: str
    difficulty: int
    minutes: int
    track: str | None = None
    parts: list[Part] = field(default_factory=list)

    @property
    def points(self) -> int:
        return sum(part.points for part in self.parts)

    def judge(self, answer: Answer, variant: Variant, *, hidden: bool) -> Outcome:
        """Ask the open parts in one round of draws; with `hidden` all parts, in several rounds."""
        parts = [part for part in self.parts if hidden or not part.hidden]
        rounds = [replace(variant, round=i) for i in range(ROUNDS if hidden else 1)]
        out_of, failed, first = sum(part.points for part in parts), [], None
        later = self.points - out_of
        for part in parts:
            try:
                mistake = next(filter(None, (part.mistake(answer, draws) for draws in rounds)), None)
            except NotBegun:
                if part is parts[0]:
                    return Outcome(self.name, "not begun", 0, out_of, failed=[part.name for part in parts], later=later)
                mistake = f"Not begun: {part.name}."
            if mistake:
                failed.append(part)
                first = first or mistake
        points = out_of - sum(part.points for part in failed)
        status = "right" if not failed else "partly" if points else "wrong"
        message, likely = clean(first or ""), getattr(first, "likely", None) or ""
        return Outcome(self.name, status, points, out_of, message, likely, [part.name for part in failed], later)


@dataclass
class Assignment:
    """Exercises in their order. `drawn`: what the master's `{{name}}` and `# drawn: name` stand for in a variant."""

    name: str
    title: str
    minutes: int
    exercises: dict[str, Exercise] = field(default_factory=dict)
    drawn: dict[str, Callable[[Variant], Any]] = field(default_factory=dict)

    @property
    def points(self) -> int:
        """The maximum on one track."""
        return self.best({name: exercise.points for name, exercise in self.exercises.items()})

    def best(self, points: dict[str, int]) -> int:
        """The sum of the points, {exercise: points}, on the track where it is largest."""
        by_track: Counter[str | None] = Counter()
        for name, exercise in self.exercises.items():
            by_track[exercise.track] += points[name]
        return by_track.pop(None, 0) + max(by_track.values(), default=0)

    def shows(self, name: str, options: Sequence) -> None:
        """Registers a value of the master, one of the options."""
        self.drawn[name] = lambda variant: variant.choose(f"{self.name} {name}", options)

    def exercise(self, name: str, title: str, answer: str, **settings: Any) -> None:
        """Registers an exercise; `settings`: the other fields of Exercise."""
        self.exercises[name] = Exercise(name, title, answer, **settings)

    def part(self, name: str, points: int, cases: Sequence = (), hidden: bool = False) -> Callable[[Check], Check]:
        """Registers the decorated check as a part of the exercise `name`; only graders ask a hidden one."""

        def register(check: Check) -> Check:
            title = check.__name__.replace("_", " ") + " (hidden)" * hidden
            arguments = tuple((case,) for case in cases) or ((),)
            self.exercises[name].parts.append(Part(title, points, check, hidden, arguments))
            return check

        return register


def randn(variant: Variant, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of normal numbers, drawn under this name."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(variant.seed(name)), dtype=dtype)


def assignment(name: str) -> Assignment:
    """The assignment called `name`, a1 to a5. Raises CourseError for another name."""
    require_one_of("the assignment", name, NAMES, CourseError)
    return import_module(f"labkit.course.{name}").ASSIGNMENT
