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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from labkit.errors import TrainingError
from labkit.files import WRITING, os_error_in, require_writable, write_folder, write_whole

LONGEST_WAIT = timedelta(hours=12)  # of one process for another
LOCK = ".lock"
STATE = "trainer_state.json"
FREE = ("gradient_checkpointing", "tf32")  # may change when a run is resumed: memory and rounding, not what is computed


class RunFolder:
    """One run's folder."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser().absolute()

    @classmethod
    def check(cls, path: str | Path, config: dict[str, Any], *, resume: bool) -> RunFolder:
        """The folder for a run with this configuration, before anything is written.

        Raises:
            TrainingError: the folder is in use and `resume` is False, or its run has another configuration.
            OSError: it cannot be written.
        """
        run = cls(path)
        stored = read_json(run.path / "config.json")
        if stored is None:
            require_writable(run.path / "config.json")
            if run.path.is_dir() and any(not file.name.startswith((WRITING, LOCK)) for file in run.path.iterdir()):
                raise TrainingError(f"{run.path} is not empty and contains no run; give --output-dir a new folder")
            return run
        if not resume and is_first_process():  # the others join the run that the first has begun
            raise TrainingError(
                f"{run.path} contains a run already: continue it with --resume, or give another --output-dir"
            )
        before, now = _flat(stored), _flat(json.loads(_as_json(config)))
        names = {name for name in {**before, **now} if name.rpartition(".")[2] not in FREE}
        if changed := sorted(name for name in names if before.get(name) != now.get(name)):
            changes = "; ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in changed)
            raise TrainingError(
                f"the run in {run.path} was begun with other settings: {changes}; give the same or another --output-dir"
            )
        return run

    @classmethod
    @contextmanager
    def alone(cls, path: str | Path, config: dict[str, Any], *, resume: bool) -> Iterator[RunFolder]:
        """The run in `path`, begun or to be continued, for this command alone while the block lasts.

        Raises:
            TrainingError: another command works in the folder; and as `check`.
        """
        run = cls.check(path, config, resume=resume)
        with _locked(run.path) if is_first_process() else nullcontext():
            with first_process_first() as first:
                run = cls.check(path, config, resume=resume)
                if first:
                    for rest in run.path.glob(WRITING + "*"):
                        shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
                    write_whole(run.path / "config.json", _as_json(config))
            yield run

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> dict[str, Any] | None:
        """The metrics of a finished run, else None."""
        return read_json(self.path / "metrics.json")

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"checkpoint-{step}"

    def latest_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its Trainer state, or None. The first process removes half-written ones."""
        whole: dict[int, tuple[Path, dict[str, Any]]] = {}
        for folder in self.checkpoints.glob("checkpoint-*"):
            try:
                state = json.loads((folder / STATE).read_text(encoding="utf-8"))
                whole[state["global_step"]] = folder, state
            except (OSError, ValueError, KeyError):
                if is_first_process():
                    shutil.rmtree(folder)
        return whole[max(whole)] if whole else None

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole or not at all."""
        self.write_text(name, _as_json(value))

    def write_text(self, name: str, content: str) -> None:
        """Write a text file whole or not at all."""
        if is_first_process():
            with self.failures_explained():
                write_whole(self.path / name, content)

    def write_folder(self, name: str, fill: Callable[[Path], Any]) -> Path:
        """The folder `name`, written by `fill(folder)` beside its place and moved there once it is whole."""
        if is_first_process():
            with self.failures_explained():
                write_folder(self.path / name, fill)
        return self.path / name

    @contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Raise TrainingError if the block cannot write, for example because the disk is full."""
        try:
            yield
        except Exception as error:
            if (cause := os_error_in(error)) is None:
                raise
            latest = self.latest_checkpoint()  # this frees the space of a half-written one
            raise TrainingError(
                f"{cause.filename or self.path} could not be written: {cause.strerror}; free some space, then continue "
                f"with --resume ({described(latest)})"
            ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; a process that is killed releases it."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise TrainingError(
            f"another process works in {folder}; wait for it, or end it. If there is none, delete {lock.lock_file}"
        ) from None
    except NotImplementedError:  # the file system cannot lock
        pass
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove an open file
            (folder / LOCK).unlink()
        lock.release()


@contextmanager
def first_process_first() -> Iterator[bool]:
    """The block runs in the first process, then in the others; yields whether this is the first."""
    if (processes := _processes()) is None:
        yield True
        return
    with processes.main_process_first():
        yield processes.is_main_process


def is_first_process() -> bool:
    """False in a process that trains together with another one and does not lead."""
    return (processes := _processes()) is None or processes.is_main_process


def process_count() -> int:
    """The number of processes that train together."""
    return 1 if (processes := _processes()) is None else processes.num_processes


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None if there is no such file. Raises TrainingError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"{path} is damaged ({error}); restore it, or start a new run in another folder") from error


def described(checkpoint: tuple[Path, dict[str, Any]] | None) -> str:
    if checkpoint is None:
        return "no checkpoint is whole yet"
    return f"the last whole checkpoint is of step {checkpoint[1]['global_step']:,}"


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def _flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) and value else {f"{above}{key}": value}
    return flat


def _processes() -> Any | None:
    """accelerate's view of the processes that train together; None without accelerate, where there is one."""
    import torch

    try:
        from accelerate import PartialState
    except ImportError:
        return None
    # the first call opens the process group; its default timeout ends processes that wait for a long evaluation
    return PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
