"""Judging an answer: the parts of an exercise, one after the other, and what is said of the first that fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.course.answers import Answer
from labkit.course.exercises import Exercise, Part
from labkit.course.mistakes import Mistake, NotBegun
from labkit.course.variant import Variant

ROUNDS = 3  # of draws that graders ask; a self-check asks one


@dataclass(frozen=True)
class Outcome:
    """What became of an exercise.

    status: "right", "partly", "wrong" or "not begun". `message`: the first mistake, in words. `failed`: the parts that
    gave no points. Points count the parts that were judged; those of hidden parts only where they were.
    """

    exercise: str
    status: str
    points: int
    out_of: int
    message: str = ""
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        sign = {"right": "✔", "not begun": "○"}.get(self.status, "✘")
        head = f"{sign} {self.exercise}: {self.status} ({self.points} of {self.out_of} points)"
        return f"{head}\n{self.message}" if self.message else head

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "failed": list(self.failed)}


def judged(exercise: Exercise, answer: Answer, variant: Variant, *, hidden: bool) -> Outcome:
    """Judges the open parts, one round of draws; with `hidden` all parts, in several rounds."""
    parts = [part for part in exercise.parts if hidden or not part.hidden]
    rounds = [variant] + [variant.another_round(i) for i in range(1, ROUNDS if hidden else 1)]
    points, failed, message = 0, [], ""
    for part in parts:
        try:
            found = _first_mistake(part, answer, rounds)
        except NotBegun:
            if part is not parts[0]:
                failed.append(part.name)
                message = message or f"Not begun: {part.name}."
                continue
            return Outcome(
                exercise.name, "not begun", 0, sum(p.points for p in parts), "", tuple(p.name for p in parts)
            )
        if found is None:
            points += part.points
        else:
            failed.append(part.name)
            message = message or str(found)
    message = clean(message)
    status = "right" if not failed else "partly" if points else "wrong"
    return Outcome(exercise.name, status, points, sum(p.points for p in parts), message, tuple(failed))


def clean(text: str) -> str:
    """The text without halves of characters, which no file can be written with."""
    return text.encode("utf-8", "replace").decode()


def _first_mistake(part: Part, answer: Answer, rounds: list[Variant]) -> Mistake | None:
    for variant in rounds:
        try:
            part.judge(answer, variant)
        except Mistake as mistake:
            return mistake
        except (NotBegun, ImportError, MemoryError, OSError):  # of this machine, no mistake of the answer's
            raise
        except Exception as error:  # the check has compared what cannot be: the form of the answer is not the task's
            came = f"one that cannot be compared ({type(error).__name__}: {error})"
            return Mistake("an answer of the form that the task asks for", came)
    return None
