"""The cache of converted models: each is written once, whole or not at all.

An entry is a folder `<cache>/models/<name>`. Its manifest.json holds the origin of the weights and the names of the
files. One lock lets one process write while others wait; a complete entry is read without it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.errors import ModelError
from labkit.files import WRITING, write_folder

FORMAT = 2  # raise it when the manifest or the conversion changes, so that older entries are converted again
MANIFEST = "manifest.json"


def cache_dir() -> Path:
    """Where labkit keeps converted models: $LABKIT_CACHE, or the user's cache folder of the operating system."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("LABKIT_CACHE")
    return Path(chosen).expanduser().resolve() if chosen else user_cache_path("labkit", appauthor=False)


def obtain(name: str, origin: dict[str, str], build: Callable[[Path], None]) -> Path:
    """The folder of the cached model `name`, filled by `build(empty folder)` if there is none from `origin`."""
    from filelock import FileLock

    def write(new: Path) -> None:
        build(new)
        written = sorted(file.name for file in new.iterdir())
        manifest = {"format": FORMAT, "origin": origin, "files": written}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    path = cache_dir() / "models" / name
    if _is_complete(path, origin):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / ".lock"):
            for leftover in path.parent.glob(f"{WRITING}*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            if not _is_complete(path, origin):  # another process may have written it in the meantime
                write_folder(path, write)
    except OSError as error:
        text = f"the cache {path.parent} cannot be written ({error.strerror}): free some space, or set LABKIT_CACHE"
        raise ModelError(f"{text} to another folder") from error
    return path


def entries() -> list[dict[str, Any]]:
    """name, path and bytes of each cached model."""
    folders = [path for path in sorted((cache_dir() / "models").glob("[!.]*")) if path.is_dir()]
    return [{"name": p.name, "path": p, "bytes": sum(f.stat().st_size for f in p.iterdir())} for p in folders]


def clear(name: str | None = None) -> list[dict[str, Any]]:
    """Delete one cached model, or all of them, and return the deleted entries."""
    chosen = [entry for entry in entries() if name in (None, entry["name"])]
    for entry in chosen:
        shutil.rmtree(entry["path"])
    return chosen


def _is_complete(path: Path, origin: dict[str, str]) -> bool:
    """Whether the entry at `path` was made from `origin` by this form of conversion, and has all its files."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    of_this = (manifest["format"], manifest["origin"]) == (FORMAT, origin)
    return of_this and all((path / name).is_file() for name in manifest["files"])
