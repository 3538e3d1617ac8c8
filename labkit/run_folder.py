"""The folder a training run leaves behind, and its promise: killed at any moment, it resumes and ends the same.

    config.json          all that is needed to repeat the run; a resumed run must ask for the same
    checkpoints/         checkpoint-<step>/, each sealed with the sha256 of its files once it is whole
    trainer_state.json   the loss curve
    metrics.json         written last: a run that has it is finished
    model/               the trained model, as transformers saves it

A checkpoint without a seal was being written when the run was killed; it is passed over and removed. So is whatever
begins with `.writing-`. While one command is at work on a run, a second one is refused (`.lock`). Where several
processes train together (`accelerate launch`, torchrun), the first one writes.
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
from labkit.files import WRITING, os_error_in, require_writable, sha256, write_folder, write_whole

LONGEST_WAIT = timedelta(hours=12)  # of one process for another
SEAL = "sealed.json"
LOCK = ".lock"
COSTS_ONLY = ("gradient_checkpointing",)  # changes what a run takes, not what it computes


class RunFolder:
    """One run's folder. `RunFolder.alone` is the way in."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    @contextmanager
    def alone(cls, path: str | Path, config: dict, *, resume: bool) -> Iterator[RunFolder]:
        """The run that `open` gives, for this process, or those that train together, alone while the block lasts.

        Raises:
            TrainingError: another process is at work in the folder, and what `open` raises. Nothing in it is touched.
        """
        run = cls.check(path, config, resume=resume)
        with held(run.path) if is_first_process() else nullcontext():
            yield cls.open(path, config, resume=resume)

    @classmethod
    def open(cls, path: str | Path, config: dict, *, resume: bool) -> RunFolder:
        """A new run in `path`, or the one begun there if `resume`.

        Raises:
            TrainingError: the folder is in use and `resume` was not asked for, or the run in it was begun with another
                configuration (in more than `COSTS_ONLY`). Nothing in the folder is touched then.
        """
        with first_process_first() as first:
            run = cls.check(path, config, resume=resume)
            if first:
                run._begin(config)
        return run

    @classmethod
    def check(cls, path: str | Path, config: dict, *, resume: bool) -> RunFolder:
        """The same run and the same errors as from `open`, but nothing is written: for what must be known before."""
        run = cls(Path(path).expanduser().absolute())
        begun = read_json(run.path / "config.json")
        if begun is None:
            require_writable(run.path / "config.json")
            if run.path.is_dir() and any(not file.name.startswith((WRITING, LOCK)) for file in run.path.iterdir()):
                raise TrainingError(
                    f"{run.path} is not empty and holds no run of labkit; give --output-dir a new folder"
                )
            return run
        if not resume and is_first_process():  # the others join the run that the first has begun
            raise TrainingError(
                f"{run.path} holds a run already: --resume goes on with it, or give another --output-dir"
            )
        was, now = _flat(begun), _flat(_read_back(config))
        free = {key for key in now if key.rpartition(".")[2] in COSTS_ONLY}
        if changed := sorted(key for key in {**was, **now}.keys() - free if was.get(key) != now.get(key)):
            differences = "; ".join(f"{key} was {was.get(key)!r}, now {now.get(key)!r}" for key in changed)
            raise TrainingError(f"the run in {run.path} was begun with another configuration: {differences}")
        return run

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def metrics(self) -> dict | None:
        """The metrics of a finished run, else None."""
        return read_json(self.path / "metrics.json")

    @property
    def begun_in(self) -> str | None:
        """The dtype of the newest whole checkpoint, if there is one that says it."""
        sealed, _ = self._checkpoints()
        return sealed[-1][1].get("dtype") if sealed else None

    def write_json(self, name: str, value: Any) -> None:
        """Write `name` whole or not at all."""
        if is_first_process():
            self.write_text(name, _as_json(value))

    def write_text(self, name: str, content: str) -> None:
        """The same with text."""
        with self.failures_explained():
            write_whole(self.path / name, content)

    def write_folder(self, name: str, fill: Callable[[Path], Any]) -> Path:
        """The folder `name`, filled by `fill(folder)` beside its place and moved there once it is whole."""
        if is_first_process():
            with self.failures_explained():
                write_folder(self.path / name, fill)
        return self.path / name

    def seal(self, step: int, **facts: Any) -> None:
        """Declare checkpoint-`step` whole, with the sha256 of its files and `facts` that a resumed run wants back."""
        folder = self.checkpoints / f"checkpoint-{step}"
        files = {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.is_file() and p.name != SEAL}
        write_whole(folder / SEAL, json.dumps({"step": step, "files": files, **facts}, indent=1) + "\n")

    def latest_checkpoint(self) -> tuple[Path, dict] | None:
        """The newest whole checkpoint and its seal, or None; half-written ones are removed.

        Raises:
            TrainingError: a file of the newest one is not what was written (damaged disk, edited by hand).
        """
        sealed, unsealed = self._checkpoints()
        if sealed:
            self.require_whole(sealed[-1][0])
        for folder in unsealed:
            shutil.rmtree(folder)
        return sealed[-1] if sealed else None

    def require_whole(self, checkpoint: Path) -> None:
        """Raise TrainingError unless every file of a sealed checkpoint is there, and is what was written."""
        seal = read_json(checkpoint / SEAL)
        if seal is None:
            raise TrainingError(f"{checkpoint} is missing, or was never whole; start the run again in a new folder")
        files = {checkpoint / name: digest for name, digest in seal["files"].items()}
        if altered := [file.name for file, digest in files.items() if not file.is_file() or sha256(file) != digest]:
            raise TrainingError(
                f"{checkpoint}: {', '.join(altered)} is not what was saved (sha256 differs); delete that folder to "
                "resume from the checkpoint before it"
            )

    def remove_checkpoints_but(self, newest: int, best: Path | None = None) -> None:
        """Remove all but `best` and the `newest` whole checkpoints, each beginning with its seal."""
        for folder, _ in self._checkpoints()[0][:-newest]:
            if folder != best:
                (folder / SEAL).unlink()
                shutil.rmtree(folder)

    @contextmanager
    def failures_explained(self, folder: Path | None = None) -> Iterator[None]:
        """Raise TrainingError if the block cannot write, for example on a full disk, and remove `folder` then."""
        try:
            yield
        except Exception as error:
            if (cause := os_error_in(error)) is None:
                raise
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise TrainingError(
                f"{folder or cause.filename} could not be written: {cause.strerror}; mend that (free space on a full "
                f"disk), then continue the run with --resume ({self.last_whole()})"
            ) from error

    def last_whole(self) -> str:
        """In words, what a resumed run begins with."""
        sealed, _ = self._checkpoints()
        if not sealed:
            return "no checkpoint is whole yet"
        return f"the last whole checkpoint is of step {sealed[-1][1]['step']:,}"

    def _begin(self, config: dict) -> None:
        for left in self.path.glob(WRITING + "*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if read_json(self.path / "config.json") != _read_back(config):
            write_whole(self.path / "config.json", _as_json(config))

    def _checkpoints(self) -> tuple[list[tuple[Path, dict]], list[Path]]:
        """The whole ones with their seals, oldest first, and the others."""
        seals = {
            folder: read_json(folder / SEAL) for folder in self.checkpoints.glob("checkpoint-*") if folder.is_dir()
        }
        sealed = sorted((each for each in seals.items() if each[1] is not None), key=lambda each: each[1]["step"])
        return sealed, [folder for folder, seal in seals.items() if seal is None]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder, made where it is missing, for this process alone; a process that is killed lets go of it.

    On the rare file system that cannot lock a file it depends on filelock: newer versions leave a file that says who is
    at work, and that has to be deleted by hand after a kill; older ones let a second process in.

    Raises:
        TrainingError: another process is at work in it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise TrainingError(
            f"another process is at work in {folder}; wait for it, or end it. If there is none, delete {lock.lock_file}"
        ) from None
    except NotImplementedError:  # the file system cannot
        pass
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no file that is open
            (folder / LOCK).unlink()
        lock.release()


@contextmanager
def first_process_first() -> Iterator[bool]:
    """What is in the block is done by the first process, then by the others; yields whether this is the first."""
    if (processes := _processes()) is None:
        yield True
        return
    with processes.main_process_first():
        yield processes.is_main_process


def is_first_process() -> bool:
    """True unless this is a process that another one of the same training leads."""
    return (processes := _processes()) is None or processes.is_main_process


def process_count() -> int:
    """How many processes train together."""
    return 1 if (processes := _processes()) is None else processes.num_processes


def read_json(path: Path) -> dict | None:
    """The JSON object in `path`, or None if there is no such file. Raises TrainingError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"{path} is damaged ({error}); restore it, or start a new run elsewhere") from error


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def _read_back(config: dict) -> dict:
    """As its file gives it back: a tuple is a list there, a path text."""
    return json.loads(json.dumps(config, default=str))


def _flat(tree: dict, above: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) and value else {f"{above}{key}": value}
    return flat


def _processes() -> Any | None:
    """accelerate's view of the processes that train together; None without accelerate: then there is one."""
    import torch

    try:
        from accelerate import PartialState
    except ImportError:
        return None
    # this is what opens the group of the processes; by default those that wait for an evaluation give up in minutes
    return PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
