"""Plain text as training material: files and folders in, cleaned documents out.

A file from Project Gutenberg is recognised by its markers: its header, licence and hard line breaks are taken out.
Every other file is taken as it stands, byte for byte, so that losses per byte compare with other people's.
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
    found = [(base, file) for path in paths for base, file in _text_files(path_of(path))]
    if not found:
        raise DataError("no text was given: name text files, or folders that hold some")
    files: dict[Path, tuple[Path, Path]] = {}
    for base, file in found:
        files.setdefault(file.resolve(), (base, file))  # a file named twice is read once
    named = [(file.relative_to(base).as_posix(), file) for base, file in files.values()]
    twice = {name for name, count in Counter(name for name, _ in named).items() if count > 1}
    return [_document(file, file.as_posix() if name in twice else name) for name, file in named]


def _text_files(path: Path) -> list[tuple[Path, Path]]:
    """(folder, file): each text file, and the folder that its name is relative to."""
    if path.is_file():
        return [(path.parent, path)]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give a text file, or a folder of {', '.join(SUFFIXES)} files")
    found = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()]
    if not found:
        raise DataError(f"{path} holds no text: no file in it ends in {', '.join(SUFFIXES)}")
    return [(path, file) for file in sorted(found, key=lambda file: file.as_posix())]


def _document(file: Path, name: str) -> Document:
    try:
        text = file.read_bytes().decode("utf-8")  # read_text would turn \r\n into \n
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise DataError(f"{file} could not be read: {error.strerror or error}") from error
    if book := _GUTENBERG.search(text):
        text = _unwrapped(book[1].translate(_QUOTES))
    if not text.strip():
        raise DataError(f"{file} is empty")
    return Document(name, text)


def _unwrapped(text: str) -> str:
    """Paragraphs of one line each: within a block of prose a line break is a space; short lines (verse, lists) stay."""
    text = "\n".join(re.split(r"\r\n|\r|\n", text)).strip()
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n", text)]
    return "\n\n".join(_one_paragraph(block) for block in blocks if block.strip()) + "\n"


def _one_paragraph(block: str) -> str:
    lines = [line.strip() for line in block.split("\n")]
    prose = len(lines) > 1 and all(len(line) > 50 for line in lines[:-1])
    return re.sub(r" {2,}", " ", " ".join(lines)) if prose else "\n".join(lines)
