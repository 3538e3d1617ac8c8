"""What a learner has done: cells run, predictions and explanations written, exercises checked.

One JSON file in the user's data folder, changed under a lock and written whole. Nothing reads it but `labkit progress`
and the boxes, and nothing sends it anywhere. `LABKIT_PROGRESS` names another file, or switches it off ("off"); in the
profile "ci", where nobody learns, it is off unless a file is named.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.errors import LearnerError
from labkit.profile import VARIABLE as PROFILE

VARIABLE = "LABKIT_PROGRESS"
OFF = "off"
LOCK_SECONDS = 5.0
TEXTS = ("prediction", "explanation")  # what a box keeps


@dataclass
class Record:
    """All that is kept.

    Attributes:
        cells: notebook (its file name without the ending) -> ids of the cells that ran to their end, in order.
        boxes: name -> {"prediction": text, "prediction_at": time, "explanation": ..., "explanation_at": ...}.
        exercises: name of a check -> {"points": int, "out_of": int, "at": time}, the best so far.
    """

    cells: dict[str, list[str]] = field(default_factory=dict)
    boxes: dict[str, dict[str, str]] = field(default_factory=dict)
    exercises: dict[str, dict[str, Any]] = field(default_factory=dict)

    def ran(self, notebook: str, cell: str) -> None:
        done = self.cells.setdefault(notebook, [])
        if cell not in done:
            done.append(cell)

    def wrote(self, name: str, which: str, text: str, at: str | None = None) -> None:
        """`which`: one of `TEXTS`. An empty text takes away what was there."""
        box = self.boxes.setdefault(name, {})
        if text.strip():
            box |= {which: text, f"{which}_at": at or _now()}
        else:
            box.pop(which, None)
            box.pop(f"{which}_at", None)
        if not box:
            del self.boxes[name]

    def checked(self, name: str, points: int, out_of: int, at: str | None = None) -> None:
        if points >= self.exercises.get(name, {}).get("points", 0):
            self.exercises[name] = {"points": points, "out_of": out_of, "at": at or _now()}

    def merge(self, other: Record) -> None:
        """Take over what `other` has beyond this one; of two texts of one box the later stays."""
        for notebook, cells in other.cells.items():
            for cell in cells:
                self.ran(notebook, cell)
        for name, box in other.boxes.items():
            for which in TEXTS:
                if which in box and box.get(f"{which}_at", "") > self.boxes.get(name, {}).get(f"{which}_at", ""):
                    self.wrote(name, which, box[which], box[f"{which}_at"])
        for name, each in other.exercises.items():
            self.checked(name, each["points"], each["out_of"], each["at"])

    def to_json(self) -> str:
        return json.dumps({"labkit_progress": 1, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"


def place() -> Path | None:
    """The file that is kept, whether it exists yet or not; None: nothing is kept."""
    named = os.environ.get(VARIABLE, "")
    if named == OFF or (not named and os.environ.get(PROFILE) == "ci"):
        return None
    if named:
        return Path(named).expanduser().absolute()
    from platformdirs import user_data_path

    return user_data_path("labkit", appauthor=False) / "progress.json"


def read(path: Path | None = None) -> Record:
    """What is kept in `path` (by default at `place()`), or an empty record.

    Raises:
        LearnerError: the file cannot be read, or is no such file.
    """
    path = place() if path is None else path
    if path is None:
        return Record()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Record()
    except OSError as error:
        raise LearnerError(f"{path} could not be read: {error.strerror or error}") from error
    except ValueError as error:
        raise LearnerError(f"{path} is damaged ({error}); mend it, or move it away to begin anew") from error
    try:
        assert found.get("labkit_progress") == 1
        record = Record()
        record.merge(Record(**{each.name: found[each.name] for each in fields(Record)}))
    except (AssertionError, AttributeError, KeyError, TypeError) as error:
        raise LearnerError(f"{path} is no record of labkit's: give a file that `labkit progress` wrote") from error
    return record


def change(update: Callable[[Record], None]) -> None:
    """Let `update` change what is kept, if anything is; other processes wait meanwhile.

    Raises:
        LearnerError: the file cannot be read or written.
    """
    path = place()
    if path is None:
        return
    from filelock import FileLock, Timeout

    from labkit.writing import write_whole

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            record = read(path)
            before = record.to_json()
            update(record)
            if (after := record.to_json()) != before:
                write_whole(path, after)
    except Timeout:
        raise LearnerError(f"{path} has been locked by another process for {LOCK_SECONDS:g} s") from None
    except OSError as error:
        raise LearnerError(f"{path} could not be written: {error.strerror or error}") from error


def try_to_change(update: Callable[[Record], None]) -> str | None:
    """As `change`, for use in a lesson, which it never stops: returns what went wrong, and warns of it once."""
    global _warned
    try:
        change(update)
    except LearnerError as error:
        if not _warned:
            warnings.warn(f"labkit keeps no record of this session: {error}", stacklevel=2)
        _warned = True
        return str(error)
    return None


_warned = False


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
