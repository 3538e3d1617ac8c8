"""The journal of a run that is not finished: a header, then one line per answered question, each kept as it comes.

What stands behind the last line end was being written when the run was interrupted, and does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.errors import DataError, FusionError

HEADER = ("settings", "versions", "dataset_sha256")  # among what the header holds: what a resumed run must share
LINE = ("id", "generation", "engine", "seconds", "votes")


def journal_of(output: str | Path) -> Path:
    """Where the answers of an unfinished run are kept."""
    output = Path(output).expanduser()
    return output.with_name(output.name + ".jsonl")


def read_journal(path: Path) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]], int]:
    """(its header, its lines by id, the bytes of its whole lines); (None, {}, 0) if nothing was kept.

    What stands behind the last line end was being written when the run was interrupted: it does not count.

    Raises:
        DataError: a whole line of it is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None, {}, 0
    except OSError as error:
        raise DataError(f"{path} could not be read: {error.strerror or error}") from error
    whole = content.rfind(b"\n") + 1
    lines = []
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            lines.append(json.loads(line))
            _ = [lines[-1][name] for name in (HEADER if number == 1 else LINE)]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number} is damaged; delete the file and begin the run again") from error
    if not lines:
        return None, {}, 0
    return lines[0], {line["id"]: line for line in lines[1:]}, whole


@contextmanager
def alone(output: str | Path) -> Iterator[None]:
    """For the block, this process alone is at work on `output`. Raises FusionError if another one is."""
    from filelock import FileLock, Timeout

    lock = Path(f"{journal_of(output)}.lock")
    made = [folder for folder in lock.parents if not folder.exists()]  # the innermost first
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
                for folder in made:
                    if not any(folder.iterdir()):  # nothing was written
                        folder.rmdir()
    except Timeout:
        raise FusionError(f"another process is answering into {output}; wait for it, or give another output") from None


class Journal:
    """Appends lines to a journal, made with its header when the first are there, each flushed to the disk."""

    def __init__(self, path: Path, about: dict[str, Any], whole: int):
        self.path, self.about, self.whole, self.file = path, about, whole, None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        try:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = self.path.open("ab")
                self.file.truncate(self.whole)  # a line that was being written goes
                if not self.whole:
                    text = json.dumps(self.about, ensure_ascii=False) + "\n" + text
            self.file.write(text.encode())
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise FusionError(
                f"{self.path} could not be written: {error.strerror or error}; what it holds is kept: resume goes on"
            ) from error
