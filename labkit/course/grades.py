"""A grade and its JSON file, which is not trusted when it is read: it may come out of a submission's container."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from labkit import __version__
from labkit.course.judging import SIGNS, Outcome
from labkit.course.mistakes import clean
from labkit.course.submissions import read_regular, student_name
from labkit.errors import CourseError

MOST_BYTES = 2**20
MOST_TROUBLES = 20


@dataclass(frozen=True)
class Grade:
    """What was found of a submission.

    `failure`: why it could not be graded; then `points` and `out_of` are None. `trouble`: cells that failed or were
    stopped. `isolation`: "bubblewrap" or "none". `settings`: what a grade depends on beside the file.
    """

    student: str
    assignment: str
    variant: str
    digest: str
    points: int | None
    out_of: int | None
    outcomes: list
    trouble: list
    failure: str
    isolation: str = ""
    seconds: float | int = 0.0
    labkit: str = __version__
    settings: dict = field(default_factory=dict)

    @property
    def score(self) -> str:
        return "not graded" if self.failure else f"{self.points} of {self.out_of}"

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__ | {"outcomes": [outcome.to_dict() for outcome in self.outcomes]}


def short(troubles: list[str]) -> list[str]:
    """A message for each trouble, of at most MOST_TROUBLES lines and some hundred characters."""
    kept = [clean(trouble, 400, 5) for trouble in troubles[:MOST_TROUBLES]]
    return kept + [f"... and {len(troubles) - len(kept)} more"] * (len(troubles) > len(kept))


def read_grades(folder: str | Path) -> Iterator[Grade]:
    """The grades in a folder, in the order of the students' names. Raises CourseError for a damaged one."""
    for path in sorted(Path(folder).expanduser().glob("*.json")):
        try:
            values = json.loads(read_regular(path, MOST_BYTES))
            values["outcomes"] = [_outcome(outcome) for outcome in values["outcomes"]]
            values["trouble"] = short([str(trouble) for trouble in values["trouble"]])
            grade = _typed(Grade, values)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CourseError(
                f"{path} is not a grade that this version of labkit has written ({clean(error, 200)}); remove it, or "
                "choose another folder"
            ) from error
        if not grade.failure and None in (grade.points, grade.out_of):
            raise CourseError(f"{path} has neither points nor a reason why it could not be graded; remove it")
        yield replace(grade, student=student_name(path.stem))  # not what it calls itself


def _outcome(values: dict[str, Any]) -> Outcome:
    if values["status"] not in SIGNS:
        raise ValueError("an unknown status")
    return _typed(Outcome, values | {"failed": tuple(clean(part, 100) for part in values["failed"][:50])})


def _typed(kind: type, values: dict[str, Any]) -> Any:
    """An instance of a dataclass, its texts cleaned. Raises TypeError for a field of another type."""
    for name, hint in get_type_hints(kind).items():
        if not isinstance(values[name], hint):
            raise TypeError(f"{name} is a {type(values[name]).__name__}")
        if isinstance(values[name], str):
            values[name] = clean(values[name])
    return kind(**values)
