"""Grading: each submission runs in a process of its own, its answers are judged from outside it, one by one.

    labkit course grade submissions/ --output-dir grades        # a folder, in parallel; a killed run goes on

leaves for each student a JSON file with all that was found, and an HTML page to hand back; and for the class grades.csv
with what the gradebooks of Canvas and Moodle import. A submission whose file has not changed since is not run again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labkit import __version__
from labkit.course import submissions
from labkit.course.exercises import NAMES, assignment
from labkit.course.grade_pages import class_page, student_page
from labkit.course.gradebook import class_csv
from labkit.course.judging import Outcome, clean, judged
from labkit.course.sandbox import Limits, Sandbox, SandboxAnswer
from labkit.course.submissions import Submission
from labkit.course.variant import Variant
from labkit.errors import CourseError, LabkitError
from labkit.files import write_whole


@dataclass(frozen=True)
class Grade:
    """What was found of a submission. `trouble`: cells that failed or were stopped; `failure`: why it did not run."""

    student: str
    assignment: str
    variant: str
    digest: str
    points: int
    out_of: int
    outcomes: list[Outcome]
    trouble: list[str]
    failure: str
    in_force: list[str]
    seconds: float
    labkit: str = __version__
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__ | {"outcomes": [outcome.to_dict() for outcome in self.outcomes]}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Grade:
        outcomes = [Outcome(**each | {"failed": tuple(each["failed"])}) for each in found["outcomes"]]
        return cls(**found | {"outcomes": outcomes})


def grade(
    submission: Submission,
    variant: Variant | None = None,
    limits: Limits | None = None,
    *,
    hidden: bool = True,
    unseen: tuple[Path, ...] = (),
) -> Grade:
    """Runs a submission and judges its answers, hidden parts included unless told otherwise.

    `variant`: the one it is judged by; None is the public one. `unseen`: folders that the submission is not to see,
    where the system can hide them. Never raises for what a student has done.

    Raises:
        CourseError: the process could not be started, or the submission was made for another variant.
    """
    variant, limits = variant or Variant(), limits or Limits()
    if submission.variant_key != variant.key:
        raise CourseError(
            f"{submission.path} is of another variant (key {submission.variant_key}, this one's is {variant.key}); "
            "give the --variant that it was built with"
        )
    of, began = assignment(submission.assignment), time.monotonic()
    trouble: list[str] = []
    with Sandbox(of.name, limits, unseen) as sandbox:
        for number, source in enumerate(submission.cells, 1):
            if error := sandbox.run(source):
                first = next(iter(source.strip().splitlines()), "")
                trouble.append(clean(f"code cell {number} (`{first[:80]}`): {error}"))
        outcomes = [
            judged(exercise, SandboxAnswer(sandbox, exercise.answer), variant, hidden=hidden)
            for exercise in of.exercises.values()
        ]
        in_force = sandbox.in_force
    points = of.best({outcome.exercise: outcome.points for outcome in outcomes})
    out_of = of.best({outcome.exercise: outcome.out_of for outcome in outcomes})
    return Grade(
        submission.student, of.name, variant.key, submission.digest, points, out_of, outcomes, trouble, "", in_force,
        round(time.monotonic() - began, 2), settings=_settings(limits, hidden),
    )  # fmt: skip


def grade_all(
    path: str | Path,
    output_dir: str | Path,
    *,
    variant: Variant | None = None,
    limits: Limits | None = None,
    assignment_name: str | None = None,
    jobs: int | None = None,
    again: bool = False,
    on_grade: Callable[[Grade, bool], None] = lambda grade, kept: None,
) -> list[Grade]:
    """Grades a notebook or a folder of them into `output_dir`; one broken submission never stops the others.

    `jobs`: processes at a time, the number of cores by default. `again`: also those that have a grade of the same file,
    variant and version of labkit. `on_grade(grade, kept)` is called as each is there.

    Raises:
        CourseError: no submissions, several of one student, or an output folder that is a file.
    """
    variant, limits = variant or Variant(), limits or Limits()
    found = submissions.find(path)
    output_dir = Path(output_dir).expanduser()
    if output_dir.is_file():
        raise CourseError(f"{output_dir} is a file; give --output-dir a folder")
    output_dir.mkdir(parents=True, exist_ok=True)
    _import_for_judges()

    def one(student: str, notebook: Path) -> tuple[Grade, bool]:
        unseen = tuple(folder for folder in (Path(path).expanduser(), output_dir) if folder.is_dir())
        return _graded(student, notebook, output_dir, variant, limits, assignment_name, again, unseen)

    grades = []
    with ThreadPoolExecutor(max_workers=jobs or os.cpu_count() or 1) as pool:
        running = [pool.submit(one, student, notebook) for student, notebook in found.items()]
        try:
            for done in as_completed(running):
                result, kept = done.result()
                on_grade(result, kept)
                grades.append(result)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    grades.sort(key=lambda each: each.student)
    _write_class(grades, output_dir)
    return grades


def _import_for_judges() -> None:
    """What checks import when they are first asked, imported before there are threads: imports race."""
    from labkit.models.tiny import build_tiny_model

    for name in ("tiny-gpt2", "tiny-gemma3"):
        build_tiny_model(name, attn="sdpa")
    for name in NAMES:
        assignment(name)


def read_grades(folder: str | Path) -> Iterator[Grade]:
    """The grades that lie in a folder, in the order of the students' names. Raises CourseError for a damaged one."""
    for path in sorted(Path(folder).glob("*.json")):
        try:
            yield Grade.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise CourseError(f"{path} is no grade that labkit has written: {error}") from error


def _graded(
    student: str,
    notebook: Path,
    output_dir: Path,
    variant: Variant,
    limits: Limits,
    name: str | None,
    again: bool,
    unseen: tuple[Path, ...],
) -> tuple[Grade, bool]:
    target = output_dir / f"{student}.json"
    try:
        submission = submissions.read(student, notebook, name)
        if not again and (kept := _kept(target, submission, variant, _settings(limits, True))):
            return kept, True
        result = grade(submission, variant, limits, unseen=unseen)
    except LabkitError as error:
        result = _failed(student, name, variant, str(error))
    except Exception as error:  # the class is graded all the same, and the line says what is to be looked at
        result = _failed(student, name, variant, f"labkit could not grade this: {type(error).__name__}: {error}")
    write_whole(output_dir / f"{student}.html", student_page(result))
    write_whole(target, json.dumps(result.to_dict(), indent=1))  # last: whoever has it has all
    return result, False


def _settings(limits: Limits, hidden: bool) -> dict[str, Any]:
    """What a grade depends on beside the submission, in the words of JSON."""
    return asdict(limits) | {"hidden": hidden}


def _kept(target: Path, submission: Submission, variant: Variant, settings: dict[str, Any]) -> Grade | None:
    """The grade that is there already, if it is of this very file, assignment, variant, labkit and limits."""
    try:
        found = Grade.from_dict(json.loads(target.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    one = (found.digest, found.assignment, found.variant, found.labkit, found.settings)
    other = (submission.digest, submission.assignment, variant.key, __version__, settings)
    return found if one == other and not found.failure else None


def _failed(student: str, name: str | None, variant: Variant, why: str) -> Grade:
    out_of = assignment(name).points if name else 0
    return Grade(student, name or "", variant.key, "", 0, out_of, [], [], why, [], 0.0)


def _write_class(grades: list[Grade], output_dir: Path) -> None:
    write_whole(output_dir / "grades.csv", class_csv(grades))
    write_whole(output_dir / "class.html", class_page(grades))
