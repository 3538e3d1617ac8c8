"""The cache of converted models: written once, whole or not at all, and checked against sha256 at every load.

An entry is a folder `<cache>/models/<name>`. Its manifest.json holds the origin of the weights and the sha256 of each
file. The cache is where the operating system keeps such files, or where LABKIT_CACHE points. One lock lets one process
write while others wait; a sound entry is read without it.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import ModelError
from labkit.files import WRITING, os_error_in, sha256, write_folder

FORMAT = 1  # raise it when the manifest or the conversion changes, so that older entries are converted again
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class CacheEntry:
    """One cached model; `problem` says why the next load builds it again, None for a sound entry."""

    name: str
    path: Path
    bytes: int
    problem: str | None


def cache_dir() -> Path:
    """Where labkit keeps converted models: $LABKIT_CACHE, or the user's cache folder of the operating system."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("LABKIT_CACHE")
    return Path(chosen).expanduser().resolve() if chosen else user_cache_path("labkit", appauthor=False)


def obtain(name: str, origin: dict[str, str], build: Callable[[Path], None]) -> Path:
    """The folder of the cached model `name`, which is sound.

    `origin` identifies the weights: an entry that was made from others is made again. `build` fills an empty folder.
    Raises ModelError if the cache cannot be written.
    """
    from filelock import FileLock

    def write(new: Path) -> None:
        build(new)
        written = {file.name: {"sha256": sha256(file)} for file in sorted(new.iterdir())}
        manifest = {"format": FORMAT, "origin": origin, "files": written}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    folder = cache_dir() / "models"
    path = folder / name
    try:
        if _problem(path, origin) is None:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for leftover in folder.glob(f"{WRITING}*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            if (problem := _problem(path, origin)) is None:  # another process has written it in the meantime
                return path
            if path.exists():
                text = f"the cached copy of {name} cannot be used: {problem}; it is built again"
                warnings.warn(text, stacklevel=2)
            write_folder(path, write)
            return path
    except Exception as error:
        if (cause := os_error_in(error)) is None:
            raise
        text = f"the cache {folder} cannot be written ({cause.strerror}): free some space, or set LABKIT_CACHE"
        raise ModelError(f"{text} to another folder") from error


def entries() -> list[CacheEntry]:
    """All cached models, each checked against its sha256 (about half a second per GB)."""
    return [
        CacheEntry(path.name, path, sum(file.stat().st_size for file in path.iterdir()), _problem(path))
        for path in sorted((cache_dir() / "models").glob("[!.]*"))
        if path.is_dir()
    ]


def clear(name: str | None = None) -> list[CacheEntry]:
    """Delete one cached model, or all of them, and return the deleted entries."""
    chosen = [entry for entry in entries() if name in (None, entry.name)]
    for entry in chosen:
        shutil.rmtree(entry.path)
    return chosen


def _problem(path: Path, origin: dict[str, str] | None = None) -> str | None:
    """What is wrong with the entry at `path`, or None; with `origin` None, whatever it was made from."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or origin not in (None, manifest["origin"]):
            return "it was converted by another version of labkit, or from another release of the weights"
        for name, file in manifest["files"].items():
            if sha256(path / name) != file["sha256"]:
                return f"{name} is not the file that was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{Path(getattr(error, 'filename', None) or MANIFEST).name} cannot be read ({type(error).__name__})"
    return None
