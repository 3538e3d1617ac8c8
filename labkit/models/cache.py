"""The cache of converted models: written once, whole or not at all, and checked against sha256 at every load.

An entry is a folder `<cache>/models/<name>`. Its manifest.json holds the origin of the weights, and the size and sha256
of each file. The cache is where the operating system keeps such files, or where LABKIT_CACHE points. One lock lets one
process write while others wait; a complete entry is read without it.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import ModelError
from labkit.files import WRITING, os_error_in, sha256, write_folder

FORMAT = 1  # raise it when the manifest or the conversion changes, so that older entries are converted again
MANIFEST = "manifest.json"
OUTDATED = "it was converted by another version of labkit, or from another release of the weights"


@dataclass(frozen=True)
class CacheEntry:
    """One cached model: `state` is "ready", "damaged" or "outdated"; `problem` gives the cause of the latter two."""

    name: str
    path: Path
    bytes: int
    state: str
    problem: str | None = None


def cache_dir() -> Path:
    """Where labkit keeps converted models: $LABKIT_CACHE, or the user's cache folder of the operating system."""
    if chosen := os.environ.get("LABKIT_CACHE"):
        return Path(chosen).expanduser().resolve()
    from platformdirs import user_cache_path

    return user_cache_path("labkit", appauthor=False)


def obtain(name: str, origin: dict[str, str], build: Callable[[Path], dict]) -> Path:
    """The verified folder of the cached model `name`.

    Args:
        origin: identifies the weights; an entry that was made from other weights is made again.
        build: fills an empty folder where there is no sound entry, and returns facts for the manifest.

    Raises:
        ModelError: the cache cannot be written.
    """
    path = _models_dir() / name
    if _problem(path, origin) is None:
        return path
    with _locked():
        problem = _problem(path, origin)  # another process may have written it in the meantime
        if problem is None:
            return path
        if path.exists():
            warnings.warn(f"the cached copy of {name} cannot be used: {problem}; it is built again", stacklevel=2)
        write_folder(path, lambda folder: _write(folder, origin, build))
    return path


def read_manifest(folder: Path) -> dict:
    """The manifest of a verified entry: `origin`, `facts`, `files`, `format`."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def entries() -> list[CacheEntry]:
    """All cached models, each checked against its sha256 (about half a second per GB)."""
    listed = []
    for path in sorted(path for path in _models_dir().glob("[!.]*") if path.is_dir()):
        problem = _problem(path)
        state = {None: "ready", OUTDATED: "outdated"}.get(problem, "damaged")
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        listed.append(CacheEntry(path.name, path, size, state, problem))
    return listed


def looks_ready(name: str, origin: dict[str, str]) -> bool:
    """Whether every file of the entry is there in its recorded size; `obtain` checks the content."""
    return _problem(_models_dir() / name, origin, content=False) is None


def clear(name: str | None = None) -> list[CacheEntry]:
    """Delete one cached model, or all of them, and return the deleted entries."""
    chosen = [entry for entry in entries() if name in (None, entry.name)]
    with _locked():
        for entry in chosen:
            shutil.rmtree(entry.path)
    return chosen


def _models_dir() -> Path:
    return cache_dir() / "models"


def _problem(path: Path, origin: dict[str, str] | None = None, *, content: bool = True) -> str | None:
    """What is wrong with the entry at `path`, or None; `origin` None accepts any, `content` False trusts the sizes."""
    try:
        manifest = read_manifest(path)
        if manifest["format"] != FORMAT or origin not in (None, manifest["origin"]):
            return OUTDATED
        for name, recorded in manifest["files"].items():
            file = path / name
            if file.stat().st_size != recorded["bytes"] or (content and sha256(file) != recorded["sha256"]):
                return f"{name} is not the file that was written"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def _write(folder: Path, origin: dict[str, str], build: Callable[[Path], dict]) -> None:
    facts = build(folder)
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "origin": origin, "facts": facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


@contextmanager
def _locked() -> Iterator[None]:
    """The cache for this process alone; what killed processes left half-written is removed first."""
    from filelock import FileLock

    folder = _models_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for leftover in folder.glob(f"{WRITING}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            yield
    except Exception as error:
        if (cause := os_error_in(error)) is None:
            raise
        raise ModelError(
            f"the cache {folder} cannot be written ({cause.strerror}): free some space, or set LABKIT_CACHE to another "
            "folder"
        ) from error
