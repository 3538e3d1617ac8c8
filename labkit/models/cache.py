"""The cache of converted models: built once, written whole or not at all, checked against sha256 at every use.

An entry is a folder `<cache>/models/<name>` with a `manifest.json` that says where it came from, what made it, and
the size and sha256 of each file. The cache lies where the operating system keeps such things, or where LABKIT_CACHE
points. A lock file beside each entry lets one process build while others wait; readers of a good entry take no lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import CacheError
from labkit.files import os_error_in

FORMAT = 1  # raised when the manifest or the way of converting changes, so that older entries are built anew
MANIFEST = "manifest.json"


class DamagedCacheWarning(UserWarning):
    """A cached model was found truncated or altered; the message names the file, and the model is built anew."""


@dataclass(frozen=True)
class CacheEntry:
    """One cached model: `state` is "ready", "damaged" or "outdated", `problem` says why in the latter two cases."""

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


def obtain(name: str, origin: dict, build: Callable[[Path], dict | None], *, bytes_needed: int = 0) -> Path:
    """The verified folder of the cached model `name`; `build(folder)` makes it if it is absent, damaged or outdated.

    `origin` identifies the source (package, version, sha256): an entry made from another origin is outdated. `build`
    fills an empty folder and may return facts to be kept in the manifest. Raises CacheError if the cache cannot be
    written or the built entry does not verify.
    """
    path = _models_dir() / name
    if _problem(path, origin) is None:
        return path
    with _lock(name):
        problem = _problem(path, origin)  # another process may have built it while this one waited
        if problem is None:
            return path
        if path.exists():
            warnings.warn(
                f"the cached copy of {name} cannot be used: {problem}; it is built anew",
                DamagedCacheWarning,
                stacklevel=2,
            )
        _require_space(name, bytes_needed)
        _build_whole(name, path, origin, build)
        if problem := _problem(path, origin):
            raise CacheError(
                f"{name} was written to {path} but reads back wrongly ({problem}); check the disk or set LABKIT_CACHE"
            )
    return path


def read_manifest(folder: Path) -> dict:
    """The manifest of a verified entry: `origin`, `facts`, `files`, `format`."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def entries() -> list[CacheEntry]:
    """All cached models, each verified by sha256 (a few tenths of a second per GB)."""
    found = []
    for path in sorted(_models_dir().glob("*")):
        if path.is_dir() and not path.name.startswith("."):
            problem = _problem(path, origin=None)
            state = "ready" if problem is None else "outdated" if problem.startswith("it was made by") else "damaged"
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append(CacheEntry(path.name, path, size, state, problem))
    return found


def looks_ready(name: str, origin: dict) -> bool:
    """Whether the entry is there with every file in its right size; the content is checked when it is loaded."""
    return _problem(_models_dir() / name, origin, hash_files=False) is None


def clear(name: str | None = None) -> list[CacheEntry]:
    """Delete one cached model, or all of them, with leftovers of interrupted builds; returns what was deleted."""
    gone = [entry for entry in entries() if name in (None, entry.name)]
    for entry in gone:
        with _lock(entry.name):
            shutil.rmtree(entry.path, ignore_errors=True)
            _remove_leftovers(entry.name)
        if entry.path.exists():
            raise CacheError(
                f"{entry.path} could not be deleted; check that it is yours and that no program has it open"
            )
    return gone


def _models_dir() -> Path:
    return cache_dir() / "models"


def _problem(path: Path, origin: dict | None, *, hash_files: bool = True) -> str | None:
    """What is wrong with the entry at `path` in a few words, or None. `origin` None accepts any origin."""
    try:
        manifest = read_manifest(path)
        files = {file: (facts["bytes"], facts["sha256"]) for file, facts in manifest["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is unreadable"

    if manifest.get("format") != FORMAT:
        return "it was made by another version of labkit"
    if origin is not None and manifest.get("origin") != origin:
        return "it was made by conversion of another release of the weights"
    try:
        for file, (size, _) in files.items():
            if (found := (path / file).stat().st_size) != size:
                return f"{file} has {found:,} bytes instead of {size:,}"
        if hash_files:
            with ThreadPoolExecutor(max_workers=2) as pool:
                digests = pool.map(lambda file: _sha256(path / file), files)
                for (file, (_, expected)), digest in zip(files.items(), digests, strict=True):
                    if digest != expected:
                        return f"the content of {file} has changed (its sha256 is not the recorded one)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read ({error.strerror})"
    return None


def _build_whole(name: str, path: Path, origin: dict, build: Callable[[Path], dict | None]) -> None:
    """Build beside the target, then swap: whoever looks sees the old entry, the new one or none, never half of one."""
    _remove_leftovers(name)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.building-", dir=path.parent))
    try:
        facts = build(temporary) or {}
        _write_manifest(temporary, origin, facts)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{name}.old-", dir=path.parent))
            path.rename(old / "entry")
        temporary.rename(path)
    except Exception as error:
        if (cause := os_error_in(error)) is None:
            raise
        raise CacheError(
            f"{name} could not be written to {path}: {cause.strerror}; free some space, or set LABKIT_CACHE to another "
            "folder"
        ) from error
    finally:
        _remove_leftovers(name)


def _write_manifest(folder: Path, origin: dict, facts: dict) -> None:
    folder.chmod(0o755)
    files = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        file.chmod(0o644)  # the safetensors writer makes private files; a cache may be shared
        files[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    manifest = {"format": FORMAT, "origin": origin, "facts": facts, "files": files}

    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _remove_leftovers(name: str) -> None:
    """Delete what interrupted builds of `name` left behind; only ever called while holding its lock."""
    for kind in ("building", "old"):
        for folder in _models_dir().glob(f".{name}.{kind}-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _require_space(name: str, needed: int) -> None:
    free = shutil.disk_usage(_models_dir()).free
    if free < needed:
        raise CacheError(
            f"converting {name} needs {needed / 1e9:.1f} GB on the disk of {cache_dir()}, which has {free / 1e9:.1f} "
            "GB free; free some space, or set LABKIT_CACHE to a folder on another disk"
        )


def _lock(name: str):
    from filelock import FileLock

    folder = _models_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise CacheError(
            f"the cache folder {folder} cannot be written ({error.strerror}); set LABKIT_CACHE to one that can"
        ) from error
    return FileLock(folder / f".{name}.lock")


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
