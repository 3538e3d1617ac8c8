"""Plain text as training material: files and folders in, documents out.

The header, licence and hard line breaks of a Project Gutenberg file, recognised by its markers, are removed. Any other
file is kept byte for byte, so that losses per byte are comparable with other people's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.datasets.files import path_of
from labkit.errors import DataError

SUFFIXES = (".txt", ".md", ".text")
_GUTENBERG = re.compile(
    r"\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG.*?\*\*\*(.*)\*\*\* ?END OF TH(?:E|IS) PROJECT", re.S
)
_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": " - ", "\ufeff": None, "_": None})


@dataclass(frozen=True)
class Document:
    """One text. `name` is its file's, within the folder given."""

    name: str
    text: str

    def split(self, held_out: float) -> tuple[str, str]:
        """The text without its last share of characters, and that share: nanoGPT's split of tiny Shakespeare."""
        cut = int(len(self.text) * (1 - held_out))
        return self.text[:cut], self.text[cut:]


def read_documents(paths: Sequence[str | Path]) -> list[Document]:
    """The text files named, and those inside the folders named (.txt, .md, .text; at any depth), in sorted order.

    Raises:
        DataError: no such path, no text file in a folder, a file that is not UTF-8, or one without a word in it.
    """
    if not paths:
        raise DataError("no text was given: name text files, or folders that hold some")
    names: dict[Path, tuple[str, Path]] = {}  # a file that is named twice is read once
    for path in map(path_of, paths):
        if path.is_file():
            names.setdefault(path.resolve(), (path.name, path))
            continue
        if not path.is_dir():
            raise DataError(f"{path} does not exist; give a text file, or a folder of {', '.join(SUFFIXES)} files")
        files = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()]
        if not files:
            raise DataError(f"{path} holds no text: no file in it ends in {', '.join(SUFFIXES)}")
        for file in sorted(files, key=Path.as_posix):
            names.setdefault(file.resolve(), (file.relative_to(path).as_posix(), file))
    counts = Counter(name for name, _ in names.values())
    return [Document(name if counts[name] == 1 else file.as_posix(), _text(file)) for name, file in names.values()]


def _text(file: Path) -> str:
    try:
        text = file.read_bytes().decode("utf-8")  # Path.read_text would turn \r\n into \n
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise DataError(f"{file} could not be read: {error.strerror or error}") from error
    if book := _GUTENBERG.search(text):
        text = _unwrapped(book[1].translate(_QUOTES))
    if not text.strip():
        raise DataError(f"{file} is empty")
    return text


def _unwrapped(text: str) -> str:
    """The text with each paragraph of prose on one line. Short lines (verse, lists) stay."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", "\n".join(re.split(r"\r\n|\r|\n", text)).strip()):
        lines = [line.strip() for line in block.strip("\n").split("\n")]
        is_prose = len(lines) > 1 and all(len(line) > 50 for line in lines[:-1])
        paragraphs.append(re.sub(r" {2,}", " ", " ".join(lines)) if is_prose else "\n".join(lines))
    return "\n\n".join(filter(None, paragraphs)) + "\n"
