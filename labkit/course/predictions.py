"""NAME_predictions.json: what a student's trained models predicted, handed in beside the notebook.

The student's notebook writes it once. A grader reads it as data, and trains nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from labkit.errors import CourseError

MOST_BYTES = 2 * 2**20
GRADING = "LABKIT_GRADING"  # the variable of a submission's process
GRADERS = (GRADING, "NBGRADER_EXECUTION")  # where one of these is set, nothing is trained


def file_name(assignment: str) -> str:
    """The name of the file of an assignment."""
    return f"{assignment}_predictions.json"


def missing(assignment: str) -> str:
    """What a student is told whose file is missing."""
    return f"{file_name(assignment)} is missing: hand it in beside the notebook"


def read_beside(folder: Path, assignment: str) -> bytes | None:
    """The file in the folder, or None if it is missing. Raises CourseError for a link, a pipe, or a larger file."""
    path = folder / file_name(assignment)
    return read_regular(path, MOST_BYTES) if os.path.lexists(path) else None


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file that a stranger has named. Raises CourseError for a link, a pipe, a larger file."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("it is a pipe or a device")
            content = file.read(most_bytes + 1)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror or error
        raise CourseError(f"{path} could not be read as a regular file: {reason}") from error
    if len(content) > most_bytes:
        cure = "; clear its outputs" if path.suffix.lower() == ".ipynb" else ""
        raise CourseError(f"{path} has more than {most_bytes / 2**20:.0f} MB and is not read{cure}")
    return content
