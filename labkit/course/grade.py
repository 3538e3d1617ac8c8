"""Grading: each submission runs in a process of its own, and its answers are judged outside it, one by one.

    labkit course grade submissions/ --output-dir grades        # a folder, in parallel; a killed run continues

writes for each student a JSON file and an HTML page to hand back, and for the class grades.csv and class.html. A
submission whose file has not changed since is not run again.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path

from labkit import __version__
from labkit.course import submissions
from labkit.course.exercises import NAMES, Exercise, assignment
from labkit.course.grades import Grade, read_grades, short
from labkit.course.judging import Outcome, judged
from labkit.course.mistakes import clean
from labkit.course.pages import write_class, write_student
from labkit.course.sandbox import Limits, Sandbox, require_isolation
from labkit.course.submissions import Submission
from labkit.course.variant import Variant
from labkit.errors import CourseError, LabkitError
from labkit.files import write_whole


def grade(
    submission: Submission,
    variant: Variant | None = None,
    limits: Limits | None = None,
    *,
    hidden: bool = True,
    trusted: bool = False,
    cancelled: threading.Event | None = None,
) -> Grade:
    """Run a submission and judge its answers, hidden parts included unless told otherwise.

    `variant`: the one it is judged by; None is the public one. `trusted`: its code runs as you, without isolation.
    Never raises for what a student has done.

    Raises:
        CourseError: the process could not be started, or the submission was made for another variant.
    """
    variant, limits = variant or Variant(), limits or Limits()
    if submission.variant_key != variant.key:
        raise CourseError(
            f"{submission.path} is of another variant (key {submission.variant_key}, this one's is {variant.key}); "
            "give --variant with the secret that it was built with"
        )
    of, began = assignment(submission.assignment), time.monotonic()
    errors: dict[str, str] = {}  # by the source of the cell
    trouble: list[str] = []
    with Sandbox(of.name, limits, trusted=trusted, cancelled=cancelled) as sandbox:
        for number, source in enumerate(submission.cells, 1):
            if error := sandbox.run(source):
                errors[source] = error
                trouble.append(f"code cell {number} (`{source.strip().splitlines()[0][:80]}`): {error}")
        outcomes = [
            _explained(judged(exercise, sandbox.answer(exercise.answer), variant, hidden=hidden), exercise, errors)
            for exercise in of.exercises.values()
        ]
    return Grade(
        submission.student, of.name, variant.key, submission.digest,
        points=of.best({outcome.exercise: outcome.points for outcome in outcomes}),
        out_of=of.best({outcome.exercise: outcome.out_of for outcome in outcomes}),
        outcomes=outcomes, trouble=short(trouble), failure="", isolation="none" if trusted else "bubblewrap",
        seconds=round(time.monotonic() - began, 2), settings=_settings(limits, hidden, trusted),
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
    trusted: bool = False,
    on_grade: Callable[[Grade, bool], None] = lambda grade, kept: None,
) -> list[Grade]:
    """Grade a notebook or a folder of them into `output_dir`; one broken submission never stops the others.

    `jobs`: processes at a time, the number of cores by default. `again`: also grade those that have a grade of the same
    file, variant, limits and version of labkit. `on_grade(grade, kept)` is called for each. The pages of the class hold
    all grades in `output_dir`, those of earlier runs included.

    Raises:
        CourseError: no submissions, several of one student, no isolation, or an output folder with other files in it.
    """
    variant, limits, output_dir = variant or Variant(), limits or Limits(), Path(output_dir).expanduser()
    notebooks = submissions.find(path)
    if output_dir.is_file():
        raise CourseError(f"{output_dir} is a file; give --output-dir a folder")
    if not trusted:
        require_isolation([Path(path), output_dir])
    output_dir.mkdir(parents=True, exist_ok=True)
    earlier = {grade.student: grade for grade in read_grades(output_dir)}
    _import_for_judges()
    settings, cancelled = _settings(limits, True, trusted), threading.Event()

    def one(student: str, notebook: Path) -> tuple[Grade, bool]:
        known, failure = earlier.get(student), ""
        try:
            submission = submissions.read(student, notebook, assignment_name)
            of = (submission.digest, submission.assignment, variant.key, __version__, settings)
            if known and not again and of == (
                known.digest, known.assignment, known.variant, known.labkit, known.settings
            ):  # fmt: skip
                return known, True
            result = grade(submission, variant, limits, trusted=trusted, cancelled=cancelled)
        except LabkitError as error:
            failure = str(error)
        except Exception as error:  # the class is graded all the same, and the message says what to look at
            failure = f"labkit could not grade this: {type(error).__name__}: {error}"
        if failure:
            result = Grade(student, assignment_name or "", variant.key, "", None, None, [], [], clean(failure))
        write_student(result, output_dir)
        write_whole(output_dir / f"{student}.json", json.dumps(result.to_dict(), indent=1))  # the last: all is there
        return result, False

    grades = {}
    with ThreadPoolExecutor(max_workers=jobs or os.cpu_count() or 1) as pool:
        running = [pool.submit(one, student, notebook) for student, notebook in notebooks.items()]
        try:
            for done in as_completed(running):
                result, kept = done.result()
                on_grade(result, kept)
                grades[result.student] = result
        except BaseException:
            cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise
    write_class(list((earlier | grades).values()), output_dir)
    return [grades[student] for student in sorted(grades)]


def _explained(outcome: Outcome, exercise: Exercise, errors: dict[str, str]) -> Outcome:
    """An answer that is missing because its cell does not run is wrong, and the message says why it does not run."""
    defines = re.compile(rf"^\s*((def|class)\s+{exercise.answer}\b|{exercise.answer}\s*=)", re.MULTILINE)
    error = next((error for source, error in errors.items() if defines.search(source)), None)
    if outcome.status != "not begun" or error is None:
        return outcome
    return replace(outcome, status="wrong", message=clean(f"The cell does not run: {error}"))


def _settings(limits: Limits, hidden: bool, trusted: bool) -> dict:
    return asdict(limits) | {"hidden": hidden, "trusted": trusted}


def _import_for_judges() -> None:
    """What checks import when they are first asked, imported before there are threads: imports race."""
    from labkit.models.tiny import build_tiny_model

    for name in ("tiny-gpt2", "tiny-gemma3"):
        build_tiny_model(name, attn="sdpa")
    for name in NAMES:
        assignment(name)
