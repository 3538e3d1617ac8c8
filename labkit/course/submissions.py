"""Submissions: notebooks of students as files, and the cells in them that count."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from labkit.course.exercises import NAMES
from labkit.course.variant import PUBLIC
from labkit.errors import CourseError

LEFT_OUT = {".ipynb_checkpoints", "__MACOSX"}
MOST_BYTES = 20 * 2**20
RESERVED = {"class", "grades"}  # the names of the files for the class
LONGEST = 150  # bytes of a student's name


@dataclass(frozen=True)
class Submission:
    """One notebook that somebody has handed in. `digest`: of the file, so that a grade can be told to be its."""

    student: str
    path: Path
    digest: str
    assignment: str
    variant_key: str
    cells: tuple[str, ...]  # code that is run, in order: checks and empty cells are left out


def find(path: str | Path) -> dict[str, Path]:
    """{student: notebook} of a notebook or a folder: `alice.ipynb`, or a folder per student, `alice/a1.ipynb`.

    Raises:
        CourseError: there is no notebook, or a student has several.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return {_name(path.stem): path}
    if not path.is_dir():
        raise CourseError(f"{path} is neither a notebook nor a folder of notebooks")
    found: dict[str, Path] = {}
    for notebook in sorted(path.rglob("*.ipynb")):
        inner = notebook.relative_to(path)
        if LEFT_OUT.intersection(inner.parts):
            continue
        student = _name(inner.parts[0] if len(inner.parts) > 1 else notebook.stem)
        if student in found:
            raise CourseError(f"{student} has handed in two notebooks, {found[student]} and {notebook}: keep one")
        found[student] = notebook
    if not found:
        raise CourseError(f"{path} holds no notebook")
    return found


def _name(given: str) -> str:
    """The student's name as files and tables can hold it: whole characters, no more than LONGEST bytes."""
    name = given.encode("utf-8", "replace").decode().replace("\\", "_")
    if name in RESERVED or len(name.encode()) > LONGEST:
        kept = name.encode()[:LONGEST].decode("utf-8", "ignore")
        name = f"{kept}-{hashlib.sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"
    return name


def read(student: str, path: Path, assignment: str | None = None) -> Submission:
    """The submission in a file. `assignment`: for notebooks that have lost their metadata.

    Raises:
        CourseError: no notebook, no code, or of no assignment that labkit knows.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CourseError(f"{path} could not be read: {error.strerror or error}") from error
    if len(content) > MOST_BYTES:
        raise CourseError(f"{path} has {len(content) / 2**20:.0f} MB; clear its outputs, at most 20 are read")
    try:
        notebook = json.loads(content.decode("utf-8-sig"))
        about = notebook.get("metadata", {}).get("labkit", {})
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        texts = [("".join(cell["source"]), cell.get("metadata", {}).get("tags", [])) for cell in cells]
        name, key = assignment or about.get("assignment"), about.get("variant", PUBLIC)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CourseError(f"{path} cannot be read as a notebook of version 4: {error}") from error
    if name not in NAMES:
        raise CourseError(f"{path} does not say which assignment it is; give --assignment, one of {', '.join(NAMES)}")
    sources = tuple(text for text, tags in texts if text.strip() and not _only_checks(text, tags))
    if not sources:
        raise CourseError(f"{path} holds no code")
    return Submission(student, path, hashlib.sha256(content).hexdigest(), name, str(key), sources)


def _only_checks(text: str, tags: list[str]) -> bool:
    """True for a cell that does nothing but ask labkit's checks: graders ask their own."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return all(line.startswith("check.") for line in lines)
