"""Submissions: the notebooks of students as files, and the cells in them that count."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labkit.course.exercises import NAMES
from labkit.course.mistakes import clean
from labkit.course.variant import PUBLIC
from labkit.errors import CourseError

LEFT_OUT = {".ipynb_checkpoints", "__MACOSX"}
MOST_BYTES = 20 * 2**20
RESERVED = {"class", "grades"}  # the names of the files for the class
LONGEST = 150  # bytes of a student's name


@dataclass(frozen=True)
class Submission:
    """One notebook that a student has handed in. `digest`: of the file, which identifies what a grade belongs to."""

    student: str
    path: Path
    digest: str
    assignment: str
    variant_key: str
    cells: tuple[str, ...]  # code that is run, in order: checks and empty cells are left out


def find(path: str | Path) -> dict[str, Path]:
    """{student: notebook} of a notebook or a folder: `alice.ipynb`, or a folder per student, `alice/a1.ipynb`.

    Links are listed and never followed: `read` refuses them, as that student's submission.

    Raises:
        CourseError: there is no notebook, or a student has several.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return {student_name(path.stem): path}
    if not path.is_dir():
        raise CourseError(f"{path} is neither a notebook nor a folder of notebooks")
    notebooks: dict[str, Path] = {}
    for notebook in _notebooks(path):
        student = student_name(notebook.relative_to(path).parts[0].removesuffix(".ipynb"))
        if student in notebooks:
            raise CourseError(f"{student} has handed in two notebooks, {notebooks[student]} and {notebook}: keep one")
        notebooks[student] = notebook
    if not notebooks:
        raise CourseError(f"{path} holds no notebook")
    return notebooks


def read(student: str, path: Path, assignment: str | None = None) -> Submission:
    """The submission in a file. `assignment`: for notebooks that have lost their metadata.

    Raises:
        CourseError: not a regular file, not a notebook, no code, or an assignment that labkit does not know.
    """
    content = read_regular(path, MOST_BYTES)
    try:
        notebook = json.loads(content.decode("utf-8-sig"))
        about = notebook.get("metadata", {}).get("labkit", {})
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        sources = tuple(source for cell in cells if _counts(source := "".join(cell["source"])))
        name, key = assignment or about.get("assignment"), about.get("variant", PUBLIC)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CourseError(f"{path} cannot be read as a notebook of version 4: {clean(error, 200)}") from error
    if name not in NAMES:
        raise CourseError(f"{path} does not say which assignment it is; give --assignment, one of {', '.join(NAMES)}")
    if not sources:
        raise CourseError(f"{path} holds no code")
    return Submission(student, path, hashlib.sha256(content).hexdigest(), name, clean(key, 40), sources)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file that a stranger has named. Raises CourseError for a link, a pipe, a larger file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as opened:
            regular = stat.S_ISREG(os.fstat(file).st_mode)
            content = opened.read(most_bytes + 1) if regular else b""
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise CourseError(f"{path} could not be read: {error.strerror or error}") from error
        regular, content = False, b""
    if not regular:
        raise CourseError(f"{path} is not a regular file (a link, a folder, a pipe or a device), and is not read")
    if len(content) > most_bytes:
        raise CourseError(f"{path} has more than {most_bytes / 2**20:.0f} MB and is not read; clear its outputs")
    return content


def _notebooks(path: Path) -> Iterator[Path]:
    unreadable: list[OSError] = []
    for folder, folders, files in os.walk(path, onerror=unreadable.append):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        linked = [name for name in folders if Path(folder) == path and Path(folder, name).is_symlink()]
        for name in sorted(linked + [name for name in files if name.endswith(".ipynb")]):
            yield Path(folder, name)
    for error in unreadable:
        if error.filename == str(path):
            raise error
        yield Path(error.filename)


def student_name(given: str) -> str:
    """The student's name as files, tables and terminals can hold it: at most LONGEST bytes, no control characters."""
    name = clean(given, LONGEST).replace("\\", "_")
    if name != given or name in RESERVED or len(name.encode()) > LONGEST:
        kept = name.encode()[:LONGEST].decode("utf-8", "ignore")
        name = f"{kept}-{hashlib.sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"
    return name


def _counts(source: str) -> bool:
    """False for an empty cell, and for one that only asks labkit's checks: graders ask their own."""
    lines = [line.strip() for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]
    return not all(line.startswith("check.") for line in lines)
