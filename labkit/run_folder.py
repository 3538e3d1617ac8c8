"""The folder of a training run, which a killed run can continue from and then ends like an uninterrupted one.

    config.json          all that is needed to repeat the run; a resumed run must ask for the same
    checkpoints/         as transformers.Trainer writes them; trainer_state.json is the last file of a whole checkpoint
    trainer_state.json   the log of the training
    metrics.json         written last: a run that has it is finished
    model/               the trained model, as transformers saves it

While one command works in a folder, a second one is refused (`.lock`). Where several processes train together
(`accelerate launch`, torchrun), the first one writes.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from labkit.errors import TrainingError, is_out_of_memory, needs_extra
from labkit.files import WRITING, os_error_in, require_writable, write_folder, write_whole

LONGEST_WAIT = timedelta(hours=12)  # of one process for another
LOCK = ".lock"
FREE = ("gradient_checkpointing", "tf32")  # may change when a run is resumed: memory and rounding, not what is computed


Log = Callable[[str], None]  # receives what a run reports, line by line


def to_stderr(text: str) -> None:
    """The default `Log`: the first of the processes that train together prints."""
    if processes().is_main_process:
        print(text, file=sys.stderr)


def silent(text: str) -> None:
    """A `Log` that reports nothing."""


class RunFolder:
    """One run's folder."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser().absolute()
        self.checkpoints = self.path / "checkpoints"

    @classmethod
    def check(cls, path: str | Path, config: dict[str, Any], *, resume: bool) -> RunFolder:
        """The folder for a run with this configuration, which may be finished (`metrics`); nothing is written.

        Raises TrainingError if it contains a run and `resume` is False, or a run with another configuration.
        """
        run = cls(path)
        stored = read_json(run.path / "config.json")
        if stored is None:
            if run.path.is_file():
                raise TrainingError(f"{run.path} is a file; give --output-dir a folder")
            require_writable(run.path / "config.json")
            if run.path.is_dir() and any(not file.name.startswith((WRITING, LOCK)) for file in run.path.iterdir()):
                raise TrainingError(f"{run.path} is not empty and contains no run; give --output-dir a new folder")
            return run
        if not resume and processes().is_main_process:  # the others join the run that the first has begun
            raise TrainingError(
                f"{run.path} contains a run already: continue it with --resume, or give another --output-dir"
            )
        if changed := changes(stored, config):
            raise TrainingError(
                f"the run in {run.path} was begun with other settings: {changed}; give the same or another --output-dir"
            )
        return run

    @classmethod
    @contextmanager
    def alone(cls, path: str | Path, config: dict[str, Any], *, resume: bool) -> Iterator[RunFolder]:
        """The run in `path`, begun or to be continued, for this command alone while the block lasts.

        What a killed command has left half-written is removed. Raises as `check`, or if another command works there.
        """
        run = cls.check(path, config, resume=resume)
        with ExitStack() as stack:
            if processes().is_main_process:
                run.path.mkdir(parents=True, exist_ok=True)
                try:
                    stack.enter_context(FileLock(run.path / LOCK, timeout=0))
                except Timeout:
                    raise TrainingError(f"another process works in {run.path}; wait for it, or end it") from None
                for leftover in run.path.glob(WRITING + "*"):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                for checkpoint in run.checkpoints.glob("checkpoint-*"):
                    try:
                        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
                    except (OSError, ValueError):  # the file that is written last
                        shutil.rmtree(checkpoint)
                write_whole(run.path / "config.json", _as_json(config))
            processes().wait_for_everyone()
            yield run

    @property
    def metrics(self) -> dict[str, Any] | None:
        """The metrics of a finished run, else None."""
        return read_json(self.path / "metrics.json")

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, _as_json(value))

    def write(self, name: str, content: str | Callable[[Path], Any]) -> None:
        """Write a text, or a folder that `content(folder)` fills, whole or not at all."""
        if processes().is_main_process:
            with failures_explained(self.path):
                (write_folder if callable(content) else write_whole)(self.path / name, content)


@contextmanager
def failures_explained(folder: Path) -> Iterator[None]:
    """Turn a full disk or memory in the block into a TrainingError that says how to continue."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            cures = "continue with --resume --gradient-checkpointing, or begin another run with a smaller --batch-size"
            raise TrainingError(f"out of memory: {cures} or --max-length, or with --method lora") from error
        if (cause := os_error_in(error)) is None:
            raise
        what = f"{cause.filename or folder} could not be written: {cause.strerror}"
        raise TrainingError(f"{what}; free some space and continue with --resume") from error


def process_count() -> int:
    """The number of processes that train together."""
    return processes().num_processes


def processes() -> Any:
    """accelerate's view of the processes that train together; the one with `is_main_process` writes and reports."""
    import torch

    with needs_extra():
        from accelerate import PartialState
    # the first call opens the process group; its default timeout ends processes that wait for a long evaluation
    return PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise TrainingError(f"{path} is damaged ({error}); restore it, or start a new run in another folder") from error


def changes(stored: dict[str, Any], config: dict[str, Any]) -> str:
    """How a configuration differs from a stored one, as "settings.seed was 0, now 1; ..."; "" if it does not."""
    before, now = _flat(stored), _flat(json.loads(_as_json(config)))
    changed = sorted(name for name in before | now if before.get(name) != now.get(name))
    return "; ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in changed)


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """{"settings": {"seed": 0}} as {"settings.seed": 0}, without what may change when a run is resumed."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if name.rpartition(".")[2] not in FREE}
