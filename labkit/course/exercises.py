"""What an assignment is: exercises with a name, points and minutes, each judged by one check or several.

    A1 = Assignment("a1", "Masks and attention by hand", minutes=75)

    @A1.exercise("a1_causal_mask", "The causal mask", answer="causal_mask", points=2, difficulty=1, minutes=8)
    def the_cells(answer: Answer, variant: Variant) -> None:
        n = variant.whole("length", 3, 9)
        expect_tensor(answer(n), masks.causal().dense(n), f"causal_mask({n})", suspects={...})

    @A1.also("a1_causal_mask", points=1, hidden=True)   # a second part, for graders only
    def one_token(answer, variant): ...

A check calls the answer as often as it likes and raises `Mistake` (labkit.course.mistakes) at the first thing that is
wrong. The answer may live in another process (labkit.course.answers), so arguments and results are plain values,
tensors, and what the assignment has under a name (`given`, `observer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

from labkit.course.variant import Variant
from labkit.errors import CourseError

NAMES = ("a1", "a2", "a3", "a4", "a5")

Check = Callable[[Any, Variant], None]  # of an Answer and a variant
Decorator = Callable[[Callable], Callable]


@dataclass(frozen=True)
class Part:
    """One check of an exercise: it gives all of its points or none."""

    name: str
    points: int
    judge: Check
    hidden: bool


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
    what cannot travel, such as a model; a check hands over `Given("a2", name, {...})`. `observers`: for results that
    cannot travel; called with (result, *arguments) in the process of the answer.
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
        return list(dict.fromkeys(exercise.track for exercise in self.exercises.values() if exercise.track)) or [None]

    @property
    def points(self) -> int:
        """The maximum on one track."""
        return self.best({name: exercise.points for name, exercise in self.exercises.items()})

    def best(self, points: dict[str, int]) -> int:
        """The sum on the track where it is largest; an exercise that is missing counts nothing."""
        return max(
            sum(points.get(name, 0) for name, exercise in self.exercises.items() if exercise.track in (None, track))
            for track in self.tracks
        )

    def exercise(
        self,
        name: str,
        title: str,
        *,
        answer: str,
        points: int,
        difficulty: int,
        minutes: int,
        track: str | None = None,
    ) -> Decorator:
        """Registers an exercise, with the decorated function as its first part."""
        self.exercises[name] = Exercise(name, title, answer, difficulty, minutes, track)
        return self.also(name, points=points)

    def also(self, name: str, *, points: int, hidden: bool = False) -> Decorator:
        """Registers a further part of the exercise `name`; a hidden one is judged by graders only."""

        def register(judge: Check) -> Check:
            self.exercises[name].parts.append(Part(judge.__name__.replace("_", " "), points, judge, hidden))
            return judge

        return register

    def draws(self, name: str) -> Decorator:
        return _registering(self.drawn, name)

    def given(self, name: str) -> Decorator:
        return _registering(self.givens, name)

    def observer(self, name: str) -> Decorator:
        return _registering(self.observers, name)


@cache
def assignment(name: str) -> Assignment:
    """The assignment called `name`, a1 to a5. Raises CourseError for another name."""
    if name not in NAMES:
        raise CourseError(f"there is no assignment {name!r}; there is {', '.join(NAMES)}")
    return import_module(f"labkit.course.{name}").ASSIGNMENT


def exercise(name: str) -> Exercise:
    """The exercise called `name`, such as "a1_causal_mask". Raises CourseError, with the closest names, for another."""
    prefix = name.partition("_")[0]
    known = assignment(prefix).exercises if prefix in NAMES else {}
    if name not in known:
        close = get_close_matches(name, known or [e for name in NAMES for e in assignment(name).exercises], 3, 0.4)
        raise CourseError(f"there is no exercise {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
    return known[name]


def _registering(registry: dict[str, Any], name: str) -> Decorator:
    def register(function: Callable) -> Callable:
        registry[name] = function
        return function

    return register
