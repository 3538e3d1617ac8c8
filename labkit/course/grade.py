"""Grading: each submission runs in a process of its own, and its answers are judged outside it, one by one.

    labkit course grade submissions/ --output-dir grades        # a folder, in parallel; a killed run continues

writes for each student a JSON file and an HTML page to hand back, and for the class grades.csv and class.html. A
submission is not run again if its files and labkit's checks have not changed since.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from tqdm import tqdm

from labkit import __version__
from labkit.course import CHECKS
from labkit.course.exercises import NAMES, assignment
from labkit.course.grades import Grade, read_grades, short, student_name, write_pages
from labkit.course.mistakes import clean
from labkit.course.predictions import read_beside, read_regular
from labkit.course.sandbox import Limits, Sandbox, require_hidden
from labkit.course.variant import PUBLIC, Variant
from labkit.errors import CourseError, LabkitError
from labkit.files import write_whole
from labkit.models.tiny import build_tiny_model

LEFT_OUT = (".", "__MACOSX")  # how names begin that nobody hands in, such as .ipynb_checkpoints
DEEPEST = 8  # folders inside a student's folder
MOST_BYTES = 20 * 2**20  # of a notebook


def find_submissions(path: str | Path, output_dir: Path) -> dict[str, Path]:
    """{student: notebook} of a notebook or a folder: `alice.ipynb`, or a folder per student, `alice/a1.ipynb`.

    A link, and a file or folder without a notebook, is listed itself: `grade` refuses it, as that student's submission.
    What lies in `output_dir` is left out. Raises CourseError where there is no notebook, or a student has several.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return {student_name(path.stem): path}
    if not path.is_dir():
        raise CourseError(f"{path} is neither a notebook nor a folder of notebooks")
    folder, output, submissions, others = path.resolve(), output_dir.resolve(), {}, {}
    for entry in sorted(path.iterdir()):
        if entry.name.startswith(LEFT_OUT) or output.is_relative_to(folder / entry.name):
            continue
        student = student_name(entry.name if entry.is_dir() else entry.stem)
        others[student] = entry
        for notebook in _notebooks(entry):
            if student in submissions:
                raise CourseError(f"{student} has two notebooks, {submissions[student]} and {notebook}: keep one")
            submissions[student] = notebook
    if not submissions:
        raise CourseError(f"{path} holds no notebook")
    return submissions if output == folder else others | submissions


def _notebooks(entry: Path) -> list[Path]:
    """The entry itself if it is a notebook, or the notebooks in that folder. Links to folders are not followed."""
    if entry.is_symlink() or not entry.is_dir():
        return [entry] if entry.suffix.lower() == ".ipynb" else []
    notebooks = []
    for folder, folders, names in os.walk(entry):
        too_deep = len(Path(folder).relative_to(entry).parts) == DEEPEST
        folders[:] = [name for name in folders if not (too_deep or name.startswith(LEFT_OUT))]
        notebooks += [Path(folder, name) for name in names if not name.startswith(LEFT_OUT)]
    return [notebook for notebook in notebooks if notebook.suffix.lower() == ".ipynb"]


@cache
def _labkit() -> str:
    """labkit's version and a digest of the checks: what an update of labkit changes in a grade."""
    paths = sorted([*Path(__file__).parent.glob("*.py"), *CHECKS.glob("*.py")])
    sources = b"".join(path.read_bytes() for path in paths)
    return f"{__version__} {hashlib.sha256(sources).hexdigest()[:12]}"


def grade(
    student: str,
    notebook: Path,
    limits: Limits,
    variant: Variant | None = None,
    *,
    assignment_name: str | None = None,
    trusted: bool = False,
    earlier: Grade | None = None,
    cancelled: threading.Event | None = None,
) -> Grade:
    """Run a notebook that a student has handed in and judge its answers, with the predictions that lie beside it.

    `variant`: the one to judge by; None takes the notebook's own, without its secret, and leaves out the hidden parts.
    `assignment_name`: for notebooks that have lost their metadata. `trusted`: the code runs as you, without isolation.
    `earlier`: a grade of this student, which is returned if nothing has changed since and no time limit was reached.

    Raises CourseError for what cannot be read or run, or is of another variant; never for what a student's code does.
    """
    if notebook.suffix.lower() != ".ipynb":
        raise CourseError(f"{notebook} holds no .ipynb file in {DEEPEST} levels of folders; links are not followed")
    began, content = time.monotonic(), read_regular(notebook, MOST_BYTES)
    try:
        read = json.loads(content.decode("utf-8-sig"))
        about = (read.get("metadata") or {}).get("labkit") or {}
        sources = ["".join(cell["source"]) for cell in read["cells"] if cell["cell_type"] == "code"]
        prose = ["".join(cell["source"]) for cell in read["cells"] if cell["cell_type"] != "code"]
        prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in prose]  # folded solutions, examples
        name, own = assignment_name or about.get("assignment"), variant.key if variant else PUBLIC
        key = clean(about.get("variant") or own, 40)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CourseError(f"{notebook} cannot be read as a notebook of version 4: {clean(error, 200)}") from error
    if name not in NAMES:
        raise CourseError(f"{notebook} has no assignment in its metadata; give --assignment, one of {', '.join(NAMES)}")
    # A cell counts if it has a line of code that is not a check: graders ask their own checks.
    cells = [source for source in sources if re.search(r"^(?![ \t]*(#|check\.|$)).", source, re.MULTILINE)]
    if not cells:
        raise CourseError(f"{notebook} holds no code")
    hidden, variant = variant is not None, variant or Variant(key)
    if key != variant.key:
        raise CourseError(f"{notebook} is of another variant, {key}, not {variant.key}; give --variant with its secret")
    basis = {"sha256": hashlib.sha256(content).hexdigest(), "variant": key, "labkit": _labkit(), "trusted": trusted}
    predictions = read_beside(notebook.parent, name)
    basis |= asdict(limits) | {"predictions": predictions and hashlib.sha256(predictions).hexdigest()}
    if earlier and not earlier.timed_out and (earlier.assignment, earlier.basis) == (name, basis):
        return earlier
    of, trouble, outcomes = assignment(name), [], []
    broken = dict.fromkeys(_defined(prose), "it is not a code cell: change its type to Code")
    with Sandbox(name, limits, trusted=trusted, cancelled=cancelled, predictions=predictions) as sandbox:
        for number, source in enumerate(cells, 1):
            if error := sandbox.run(source):
                first_line = source.strip().partition("\n")[0][:80]
                trouble.append(f"code cell {number} (`{first_line}`): {error}")
                broken |= dict.fromkeys(_defined([source]), error)
        for exercise in of.exercises.values():
            outcome = exercise.judge(sandbox.answer(exercise.answer), variant, hidden=hidden)
            if outcome.status == "not begun" and exercise.answer in broken:
                message = clean(f"The cell does not run: {broken[exercise.answer]}")
                outcome = replace(outcome, status="wrong", message=message)
            outcomes.append(outcome)
    seconds = round(time.monotonic() - began, 2)
    return Grade.of(student, of, outcomes, short(trouble), seconds, sandbox.timed_out, basis)


def _defined(sources: list[str]) -> list[str]:
    """The names of the functions that the sources define, also where they cannot be parsed."""
    return re.findall(r"^[ \t]*def +(\w+)", "\n".join(sources), re.MULTILINE)


def grade_all(
    path: str | Path,
    output_dir: str | Path,
    variant: Variant,
    limits: Limits,
    *,
    assignment_name: str | None = None,
    jobs: int | None = None,
    again: bool = False,
    trusted: bool = False,
) -> list[Grade]:
    """Grade a notebook or a folder of them into `output_dir`; one broken submission never stops the others.

    `jobs`: processes at a time, the number of cores by default. `again`: also grade those that have a grade of the same
    file, variant, limits and checks. The pages of the class hold all grades in `output_dir`, those of
    earlier runs included. Raises CourseError for no submissions, several of one student, or no isolation.
    """
    output_dir = Path(output_dir).expanduser()
    notebooks = find_submissions(path, output_dir)
    if output_dir.is_file():
        raise CourseError(f"{output_dir} is a file; give --output-dir a folder")
    if not trusted:
        require_hidden(Path(path), output_dir)
        with Sandbox(NAMES[0], limits) as sandbox:  # which raises here, once, where this machine cannot isolate
            sandbox.start()
    output_dir.mkdir(parents=True, exist_ok=True)
    grades = {grade.student: grade for grade in read_grades(output_dir)}
    # What checks import when they are first asked is imported before there are threads: imports race.
    for name in ("tiny-gpt2", "tiny-gemma3"):
        build_tiny_model(name, attn="sdpa")
    for name in NAMES:
        assignment(name)
    cancelled = threading.Event()

    def graded(student: str, notebook: Path) -> Grade:
        earlier = None if again else grades.get(student)
        try:
            result = grade(
                student, notebook, limits, variant,
                assignment_name=assignment_name, trusted=trusted, earlier=earlier, cancelled=cancelled,
            )  # fmt: skip
        except Exception as error:  # the class is graded all the same, and the message says what to look at
            fault = "" if isinstance(error, LabkitError) else f"labkit could not grade this: {type(error).__name__}: "
            result = Grade(student, assignment_name or "", failure=clean(f"{fault}{error}"))
        if result is not earlier:
            write_whole(output_dir / f"{student}.json", json.dumps(asdict(result), indent=1))
        return result

    with ThreadPoolExecutor(max_workers=jobs or os.cpu_count() or 1) as pool:
        running = [pool.submit(graded, student, notebook) for student, notebook in notebooks.items()]
        try:
            for done in tqdm(as_completed(running), total=len(running), unit="submission", disable=None, leave=False):
                grades[done.result().student] = done.result()
        except BaseException:
            cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise
    write_pages(list(grades.values()), output_dir)
    return [grades[student] for student in sorted(notebooks)]
