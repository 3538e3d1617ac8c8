"""Files: those that come with labkit, and writing whole or not at all.

A file is written beside its place and renamed once it is whole, so a full disk or a kill leaves the old file or none.
A symbolic link is followed. A device, a pipe or a terminal receives the bytes and stays what it is, and `-` is standard
output. Writing raises an OSError that names the place that could not be written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError

PLACES = {"data": "data", "notebooks": "notebooks", "results": "benchmarks/results"}  # in the checkout
WRITING = ".writing-"  # how the names of half-written files and folders begin


def folder(name: str) -> Path:
    """The folder `name`, one of `PLACES`, that comes with labkit: in the checkout, or packed into the wheel as `_name`.

    Raises LabkitError where it is missing.
    """
    package = Path(str(files("labkit")))
    packed, checkout = package / f"_{name}", package.parent / PLACES[name]
    if packed.is_dir():
        return packed
    if (package.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    raise LabkitError(f"{packed} is missing: the installation is incomplete; reinstall labkit")


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8), or write through to standard output, a device or a pipe."""
    content = content.encode() if isinstance(content, str) else content
    if is_standard_output(path):
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
    elif is_stream(path):
        Path(path).write_bytes(content)
    else:
        with _beside(path) as new:
            new.write_bytes(content)


def write_folder(path: str | Path, fill: Callable[[Path], Any]) -> None:
    """Let `fill(new folder)` write beside `path`, and move the new folder there in place of an old one."""
    with _beside(path) as new:
        new.mkdir()
        fill(new)
        for file in new.rglob("*"):
            if file.is_file():  # the safetensors writer lets only the owner read
                file.chmod(0o666 & new.stat().st_mode)


def require_writable(path: str | Path) -> None:
    """Raise the OSError of writing a file or folder at `path` before the work whose result is to go there."""
    if is_stream(path):
        return
    path = Path(path).expanduser().absolute()
    with _naming(path), suppress(FileNotFoundError):
        os.stat(os.path.realpath(path))  # raises for a file among the parents, or a name that is too long
    with _naming(path):
        innermost = next(folder for folder in Path(os.path.realpath(path)).parents if folder.is_dir())
        tempfile.TemporaryFile(dir=path if path.is_dir() else innermost).close()


@contextmanager
def _beside(path: str | Path) -> Iterator[Path]:
    """A free place beside `path`, for what takes the place of `path` at the end of the block."""
    path = Path(path).expanduser().absolute()
    with _naming(path):
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=WRITING, dir=target.parent) as folder:
            yield Path(folder, "new")
            if target.is_dir():
                target.rename(Path(folder, "old"))
            os.replace(Path(folder, "new"), target)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError in the block, or what a library raises in its place, names `path` and not a file beside it."""
    try:
        yield
    except Exception as error:
        if (cause := os_error_in(error)) is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def sha256(path: Path) -> str:
    """The sha256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_standard_output(path: str | Path) -> bool:
    """Whether `path` is `-`, or is the same file, pipe or terminal as standard output (/dev/stdout)."""
    with suppress(OSError, ValueError):
        return str(path) == "-" or os.path.samestat(os.stat(path), os.fstat(1))
    return False


def is_stream(path: str | Path) -> bool:
    """Whether `path` is standard output, a device or a pipe, which is written through and not replaced."""
    exists, regular = os.path.exists(path), os.path.isfile(path) or os.path.isdir(path)
    return is_standard_output(path) or (exists and not regular)


def os_error_in(error: BaseException) -> OSError | None:
    """The OSError behind what a library raises if it cannot write or read a file; None for any other error.

    safetensors and tokenizers state the number of the system's error in their text, and torch.save states none.
    """
    if isinstance(error, OSError):
        return error if error.errno is not None else None
    if stated := re.search(r"\(os error (\d+)\)", str(error)):
        return OSError(int(stated[1]), os.strerror(int(stated[1])))
    if "PytorchStreamWriter" in str(error) or "inline_container" in str(error):
        return OSError(errno.EIO, "torch could not write it (is the disk full?)")
    return None


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show no remarks of transformers below errors and, off a terminal, no progress bars of it or of the hub client."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
