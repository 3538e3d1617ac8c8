"""The folder a training run leaves behind, and its promise: killed at any moment, it resumes and ends the same.

    config.json          all that is needed to repeat the run; a resumed run must ask for the same
    checkpoints/         checkpoint-<step>/, each sealed with the sha256 of its files once it is whole
    trainer_state.json   the loss curve
    metrics.json         written last: a run that has it is finished
    model/               the trained model, as transformers saves it

A checkpoint without a seal was being written when the run was killed; it is passed over and removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from labkit.errors import TrainingError

SEAL = "sealed.json"


class RunFolder:
    """One run's folder. `RunFolder.open` is the way in."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def open(cls, path: str | Path, config: dict, *, resume: bool) -> RunFolder:
        """A new run in `path`, or the one begun there if `resume`.

        Raises:
            TrainingError: the folder is in use and `resume` was not asked for, or the run in it was begun with another
                configuration. Nothing in the folder is touched then.
        """
        run = cls(Path(path).expanduser().absolute())
        if run.path.is_file():
            raise TrainingError(f"{run.path} is a file; give --output-dir a folder")
        config = json.loads(json.dumps(config, default=str))  # as it reads back
        begun = read_json(run.path / "config.json")
        if begun is None:
            if run.path.is_dir() and any(run.path.iterdir()):
                raise TrainingError(
                    f"{run.path} is not empty and holds no run of labkit; give --output-dir a new folder"
                )
            run.write_json("config.json", config)
            return run
        if not resume:
            raise TrainingError(
                f"{run.path} holds a run already: --resume goes on with it, or give another --output-dir"
            )
        if changed := [key for key in {**begun, **config} if begun.get(key) != config.get(key)]:
            differences = "; ".join(f"{key} was {begun.get(key)!r}, now {config.get(key)!r}" for key in sorted(changed))
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

    def write_json(self, name: str, value: Any) -> None:
        """Write `name` whole or not at all."""
        write_whole(self.path / name, json.dumps(value, indent=1, default=str) + "\n")

    def write_folder(self, name: str, fill: Callable[[Path], Any]) -> Path:
        """The folder `name`, filled by `fill(folder)` beside its place and moved there once it is whole."""
        target = self.path / name
        with tempfile.TemporaryDirectory(prefix=f".{name}.writing-", dir=self.path) as beside:
            new = Path(beside) / "new"
            new.mkdir()
            fill(new)
            if target.exists():
                target.rename(Path(beside) / "old")
            new.rename(target)
        return target

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
        sealed = []
        for folder in self.checkpoints.glob("checkpoint-*"):
            seal = read_json(folder / SEAL)
            if seal is None:
                shutil.rmtree(folder)
            else:
                sealed.append((seal["step"], folder, seal))
        if not sealed:
            return None
        _, folder, seal = max(sealed, key=lambda each: each[0])
        altered = [
            n for n, digest in seal["files"].items() if not (folder / n).is_file() or sha256(folder / n) != digest
        ]
        if altered:
            raise TrainingError(
                f"{folder}: {', '.join(altered)} is not what was saved (sha256 differs); delete that folder to resume "
                "from the checkpoint before it"
            )
        return folder, seal


def read_json(path: Path) -> dict | None:
    """The JSON object in `path`, or None if there is no such file. Raises TrainingError if it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise TrainingError(f"{path} is damaged ({error}); restore it, or start a new run elsewhere") from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all: a temporary file beside it, then a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str:
    """The sha256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_files(paths: Iterable[Path]) -> dict[str, str]:
    """File name -> sha256."""
    return {path.name: sha256(path) for path in paths}
