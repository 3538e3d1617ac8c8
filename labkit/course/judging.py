"""Judge an answer: the parts of an exercise, one after the other, and the message of the first that fails."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from labkit.course.answers import Answer
from labkit.course.exercises import Exercise, Part
from labkit.course.mistakes import Mistake, NotBegun, clean
from labkit.course.variant import Variant

ROUNDS = 3  # of draws that graders ask; a self-check asks one
SIGNS = {"right": "✔", "partly": "◐", "wrong": "✘", "not begun": "○"}  # the values of a status


@dataclass(frozen=True)
class Outcome:
    """The result of an exercise.

    `status`: one of SIGNS. `message`: the first mistake. `failed`: the parts that gave no points. Only the parts that
    were judged count: hidden ones count where graders ask.
    """

    exercise: str
    status: str
    points: int
    out_of: int
    message: str = ""
    failed: tuple = ()

    def __str__(self) -> str:
        head = f"{SIGNS[self.status]} {self.exercise}: {self.status} ({self.points} of {self.out_of} points)"
        return f"{head}\n{self.message}" if self.message else head

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"failed": list(self.failed)}


def judged(exercise: Exercise, answer: Answer, variant: Variant, *, hidden: bool) -> Outcome:
    """Judge the open parts in one round of draws; with `hidden` all parts, in several rounds."""
    parts = [part for part in exercise.parts if hidden or not part.hidden]
    rounds = [variant] + [variant.another_round(i) for i in range(1, ROUNDS if hidden else 1)]
    out_of = sum(part.points for part in parts)
    failed, mistakes = [], []
    for part in parts:
        try:
            mistake = _first_mistake(part, answer, rounds)
        except NotBegun:
            if part is parts[0]:
                return Outcome(exercise.name, "not begun", 0, out_of, "", tuple(part.name for part in parts))
            mistake = f"Not begun: {part.name}."
        if mistake is not None:
            failed.append(part)
            mistakes.append(clean(mistake))
    points = out_of - sum(part.points for part in failed)
    status = "right" if not failed else "partly" if points else "wrong"
    return Outcome(exercise.name, status, points, out_of, "".join(mistakes[:1]), tuple(part.name for part in failed))


def _first_mistake(part: Part, answer: Answer, rounds: list[Variant]) -> Mistake | None:
    try:
        for variant in rounds:
            part.ask(answer, variant)
    except Mistake as mistake:
        return mistake
    except (NotBegun, ImportError, MemoryError, OSError):  # this machine's fault, not a mistake of the answer
        raise
    except Exception as error:  # the check compared what cannot be compared: the answer has another form
        came = f"one that cannot be compared ({type(error).__name__}: {error})"
        return Mistake("an answer of the form that the task asks for", came)
    return None
