"""The cache of converted models: written once, whole or not at all, and checked against sha256 at every load.

An entry is a folder `<cache>/models/<name>`. Its manifest.json holds the origin of the weights and the sha256 of each
file. One lock lets one process write while others wait; a sound entry is read without it.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.errors import ModelError
from labkit.files import WRITING, sha256, write_folder

FORMAT = 2  # raise it when the manifest or the conversion changes, so that older entries are converted again
MANIFEST = "manifest.json"


def cache_dir() -> Path:
    """Where labkit keeps converted models: $LABKIT_CACHE, or the user's cache folder of the operating system."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("LABKIT_CACHE")
    return Path(chosen).expanduser().resolve() if chosen else user_cache_path("labkit", appauthor=False)


def obtain(name: str, origin: dict[str, str], build: Callable[[Path], None]) -> Path:
    """The folder of the cached model `name`, filled by `build(empty folder)` if there is no sound one from `origin`."""
    from filelock import FileLock

    def write(new: Path) -> None:
        build(new)
        written = {file.name: {"sha256": sha256(file)} for file in sorted(new.iterdir())}
        manifest = {"format": FORMAT, "origin": origin, "files": written}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    path = cache_dir() / "models" / name
    if _problem(path, origin) is None:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / ".lock"):
            for leftover in path.parent.glob(f"{WRITING}*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            if problem := _problem(path, origin):  # None if another process has written it in the meantime
                if path.exists():
                    warnings.warn(f"the cached copy of {name} is built again: {problem}", stacklevel=2)
                write_folder(path, write)
    except OSError as error:
        text = f"the cache {path.parent} cannot be written ({error.strerror}): free some space, or set LABKIT_CACHE"
        raise ModelError(f"{text} to another folder") from error
    return path


def entries() -> list[dict[str, Any]]:
    """name, path, bytes and problem of each cached model: why the next load builds it again, None if it is sound.

    All files are checked against their sha256, at about half a second per GB.
    """
    return [
        {
            "name": path.name,
            "path": path,
            "bytes": sum(f.stat().st_size for f in path.iterdir()),
            "problem": _problem(path),
        }
        for path in sorted((cache_dir() / "models").glob("[!.]*"))
        if path.is_dir()
    ]


def clear(name: str | None = None) -> list[dict[str, Any]]:
    """Delete one cached model, or all of them, and return the deleted entries."""
    chosen = [entry for entry in entries() if name in (None, entry["name"])]
    for entry in chosen:
        shutil.rmtree(entry["path"])
    return chosen


def _problem(path: Path, origin: dict[str, str] | None = None) -> str | None:
    """What is wrong with the entry at `path`, or None; with `origin` None, whatever it was made from."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or origin not in (None, manifest["origin"]):
            return "it was converted by another version of labkit, or from another release of the weights"
        damaged = [name for name, file in manifest["files"].items() if sha256(path / name) != file["sha256"]]
        return f"{damaged[0]} is not the file that was written" if damaged else None
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read"
    except (ValueError, KeyError):
        return f"{MANIFEST} is damaged"
