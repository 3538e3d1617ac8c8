"""What an assignment is: exercises with a name, points and minutes, each judged by one check or several.

    A1.exercise("a1_window_mask", "A short memory", "window_mask", difficulty=2, minutes=8)

    @A1.part("a1_window_mask", points=1, cases=(1, 99), hidden=True)  # for graders only
    @A1.part("a1_window_mask", points=2, cases=(2, 3))
    def the_window(answer: Answer, variant: Variant, w: int) -> None:
        expect_tensor(answer(9, w), masks.sliding_window(w).dense(9), f"window_mask(9, {w})", suspects={...})

A check calls the answer as often as it likes and raises `Mistake` at the first thing that is wrong. The answer may run
in another process (labkit.course.answers), so arguments and results are plain values, tensors, and what the assignment
makes by name (`givens`, `observers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from labkit.course.mistakes import Mistake
from labkit.course.variant import Variant
from labkit.errors import CourseError

NAMES = ("a1", "a2", "a3", "a4", "a5")

Check = Callable[..., None]  # of an Answer, a variant, and a case where there are cases


@dataclass(frozen=True)
class Part:
    """One check of an exercise: it gives all of its points or none."""

    name: str
    points: int
    judge: Check
    hidden: bool
    cases: tuple

    def ask(self, answer: Any, variant: Variant) -> None:
        """Raises the first case's Mistake; the order of asking is drawn, so that no answer can count along."""
        mistakes: dict[int, Mistake] = {}
        for i in variant.rng(f"order of {self.name}").sample(range(len(self.cases)), len(self.cases)):
            try:
                self.judge(answer, variant, *self.cases[i])
            except Mistake as mistake:
                mistakes[i] = mistake
                if mistake.came == "no answer":  # within the time limit: every other case may take as long
                    break
        if mistakes:
            raise mistakes[min(mistakes)]


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


@dataclass
class Assignment:
    """Exercises in their order, and what has a name.

    `drawn`: what the master's `{{name}}` and `# drawn: name` stand for in a variant, a plain value. `givens`: makers of
    what cannot travel, such as a model; a check passes `Given("a2", name, {...})`. `observers`: for results that cannot
    travel; called with (result, *arguments) in the process of the answer.
    """

    name: str
    title: str
    minutes: int
    exercises: dict[str, Exercise] = field(default_factory=dict)
    drawn: dict[str, Callable[[Variant], Any]] = field(default_factory=dict)
    givens: dict[str, Callable[..., Any]] = field(default_factory=dict)
    observers: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def tracks(self) -> list[str | None]:
        """The ways through the assignment, [None] where there is only one."""
        return list({exercise.track: None for exercise in self.exercises.values() if exercise.track}) or [None]

    @property
    def points(self) -> int:
        """The maximum on one track."""
        return self.best({name: exercise.points for name, exercise in self.exercises.items()})

    def best(self, points: dict[str, int]) -> int:
        """The sum on the track where it is largest; a missing exercise counts nothing."""
        of = {name: exercise.track for name, exercise in self.exercises.items()}
        return max(sum(points.get(name, 0) for name in of if of[name] in (None, track)) for track in self.tracks)

    def shows(self, name: str, options: Sequence) -> None:
        """Registers a value of the master, one of the options."""
        self.drawn[name] = lambda variant: variant.choose(f"{self.name} {name}", options)

    def exercise(self, name: str, title: str, answer: str, **about: Any) -> None:
        """Registers an exercise; `about`: the other fields of Exercise."""
        self.exercises[name] = Exercise(name, title, answer, **about)

    def part(self, name: str, points: int, cases: Sequence = (), hidden: bool = False) -> Callable[[Check], Check]:
        """Registers the decorated function as a part of the exercise `name`, which asks about each of the cases.

        A hidden part is judged by graders only.
        """

        def register(judge: Check) -> Check:
            words = judge.__name__.replace("_", " ") + " (hidden)" * hidden
            arguments = tuple((case,) for case in cases) or ((),)
            self.exercises[name].parts.append(Part(words, points, judge, hidden, arguments))
            return judge

        return register


def randn(variant: Variant, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of normal numbers, drawn under this name."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(variant.seed(name)), dtype=dtype)


@cache
def assignment(name: str) -> Assignment:
    """The assignment called `name`, a1 to a5. Raises CourseError for another name."""
    if name not in NAMES:
        raise CourseError(f"there is no assignment {name!r}; there is {', '.join(NAMES)}")
    return import_module(f"labkit.course.{name}").ASSIGNMENT


def exercise(name: str) -> Exercise:
    """The exercise called `name`, such as "a1_causal_mask". Raises CourseError, with the closest names, for another."""
    exercises = assignment(name[:2]).exercises if name[:2] in NAMES else {}
    if name not in exercises:
        close = get_close_matches(name, exercises, 3, 0.4)
        raise CourseError(f"there is no exercise {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
    return exercises[name]
