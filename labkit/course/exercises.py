"""What an assignment is: exercises with a name, points and minutes, each judged by one check or several.

    A1 = Assignment("a1", "Masks and attention by hand", minutes=75)

    @A1.exercise("a1_causal_mask", "The causal mask", answer="causal_mask", points=2, difficulty=1, minutes=8)
    def the_cells(answer: Answer, variant: Variant) -> None:
        n = variant.whole("length", 3, 9)
        expect_tensor(answer(n), masks.causal().dense(n), f"causal_mask({n})", suspects={...})

    @A1.also("a1_causal_mask", points=1, hidden=True)   # a second part, for graders only
    def one_token(answer, variant): ...

A check calls the answer as often as it likes and raises `Mistake` (labkit.course.mistakes) at the first thing that is
wrong. It runs in the grader's process, the answer perhaps in another (labkit.course.answers): so it may hand over and
get back only plain values, tensors, masks, and what the assignment has under a name (`given`, `observer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from labkit.errors import CourseError

if TYPE_CHECKING:
    from labkit.course.answers import Answer
    from labkit.course.variant import Variant

NAMES = ("a1", "a2", "a3", "a4", "a5")

Judge = Callable[["Answer", "Variant"], None]


@dataclass(frozen=True)
class Part:
    """One check of an exercise: its points are given or not, as a whole."""

    name: str
    points: int
    judge: Judge
    hidden: bool


@dataclass
class Exercise:
    """One task for the student, who defines an object called `answer`; difficulty from 1 to 5.

    `track`: the one of several ways through the assignment that it belongs to; None is for all.
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
    """Exercises in their order; what the masters draw; and what checks may name without sending it."""

    name: str
    title: str
    minutes: int
    exercises: dict[str, Exercise] = field(default_factory=dict)
    drawn: dict[str, Callable[[Variant], Any]] = field(default_factory=dict)
    givens: dict[str, Callable[..., Any]] = field(default_factory=dict)
    observers: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def tracks(self) -> list[str | None]:
        """The ways through the assignment, [None] where there is but one."""
        return list(dict.fromkeys(each.track for each in self.exercises.values() if each.track)) or [None]

    @property
    def points(self) -> int:
        """What can be had on one track: the exercises for all, and its own."""
        return self.of_track({name: each.points for name, each in self.exercises.items()}, self.tracks[0])

    def of_track(self, points: dict[str, int], track: str | None) -> int:
        """The sum over the exercises for all and those of the track; an exercise that is missing counts nothing."""
        chosen = [name for name, each in self.exercises.items() if each.track in (None, track)]
        return sum(points.get(name, 0) for name in chosen)

    def best(self, points: dict[str, int]) -> int:
        """The sum on the track where it is largest: whoever tries both loses nothing."""
        return max(self.of_track(points, track) for track in self.tracks)

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
    ) -> Callable[[Judge], Judge]:
        """Registers an exercise, with the decorated function as its first part."""
        self.exercises[name] = Exercise(name, title, answer, difficulty, minutes, track=track)
        return self.also(name, points=points)

    def also(self, name: str, *, points: int, hidden: bool = False) -> Callable[[Judge], Judge]:
        """Registers a further part of the exercise `name`; a hidden one is judged by graders only."""

        def register(judge: Judge) -> Judge:
            title = judge.__name__.strip("_").replace("_", " ")
            self.exercises[name].parts.append(Part(title, points, judge, hidden))
            return judge

        return register

    def draws(self, name: str) -> Callable[[Callable[[Variant], Any]], Callable[[Variant], Any]]:
        """Registers what the master's `{{name}}` and `# drawn: name` stand for in a variant: a plain value."""
        return _registering(self.drawn, name)

    def given(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a maker of what cannot be sent, such as a model: a check hands over `Given("a2", name, {...})`."""
        return _registering(self.givens, name)

    def observer(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a look at what an answer has returned and was given, where that cannot be sent.

        It is called with (result, *arguments) in the process of the answer, and returns what can.
        """
        return _registering(self.observers, name)


@cache
def assignment(name: str) -> Assignment:
    """The assignment called `name`, a1 to a5. Raises CourseError for another name."""
    if name not in NAMES:
        raise CourseError(f"there is no assignment {name!r}; there is {', '.join(NAMES)}")
    return import_module(f"labkit.course.{name}").ASSIGNMENT


def exercise(name: str) -> Exercise:
    """The exercise called `name`, such as "a1_causal_mask". Raises CourseError, with the closest names, for another."""
    from difflib import get_close_matches

    prefix = name.partition("_")[0]
    known = assignment(prefix).exercises if prefix in NAMES else {}
    if name not in known:
        close = get_close_matches(name, known or [e for each in NAMES for e in assignment(each).exercises], 3, 0.4)
        raise CourseError(f"there is no exercise {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
    return known[name]


def _registering(where: dict[str, Any], name: str) -> Callable[[Any], Any]:
    def register(made: Any) -> Any:
        where[name] = made
        return made

    return register
