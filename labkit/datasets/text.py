"""Plain text as training material: files and folders in, cleaned documents out.

A file from Project Gutenberg is recognised by its markers: its header, licence and hard line breaks are taken out.
Every other file is taken as it stands, byte for byte, so that losses per byte compare with other people's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import DataError

SUFFIXES = (".txt", ".md", ".text")
_GUTENBERG = re.compile(
    r"\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG.*?\*\*\*(.*)\*\*\* ?END OF TH(?:E|IS) PROJECT", re.S
)
_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": " - ", "\ufeff": None, "_": None})


@dataclass(frozen=True)
class Document:
    """One text and where it came from. `cleaned` says what was done to it, "" if nothing."""

    name: str
    text: str
    cleaned: str = ""

    def split(self, held_out: float) -> tuple[str, str]:
        """The text without its last share of characters, and that share: nanoGPT's split of tiny Shakespeare."""
        cut = int(len(self.text) * (1 - held_out))
        return self.text[:cut], self.text[cut:]


def read_documents(paths: Sequence[str | Path]) -> list[Document]:
    """The text files named, and those inside the folders named (.txt, .md, .text; at any depth), in sorted order.

    Raises:
        DataError: no such path, no text file in a folder, a file that is not UTF-8, or one without a word in it.
    """
    files = [file for path in paths for file in _text_files(Path(path).expanduser())]
    if not files:
        raise DataError("no text was given: name text files, or folders that hold some")
    return [_document(file) for file in dict.fromkeys(files)]


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give a text file, or a folder of {', '.join(SUFFIXES)} files")
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise DataError(f"{path} holds no text: no file in it ends in {', '.join(SUFFIXES)}")
    return found


def _document(file: Path) -> Document:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise DataError(f"{file} could not be read: {error.strerror or error}") from error
    if not text.strip():
        raise DataError(f"{file} is empty")
    if book := _GUTENBERG.search(text):
        return Document(file.name, _unwrapped(book[1].translate(_QUOTES)), "header and hard line breaks taken out")
    return Document(file.name, text)


def _unwrapped(text: str) -> str:
    """Paragraphs of one line each: within a block of prose a line break is a space; short lines (verse, lists) stay."""
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n", text.strip())]
    return "\n\n".join(_one_paragraph(block) for block in blocks if block.strip()) + "\n"


def _one_paragraph(block: str) -> str:
    lines = [line.strip() for line in block.split("\n")]
    prose = len(lines) > 1 and all(len(line) > 50 for line in lines[:-1])
    return re.sub(r" {2,}", " ", " ".join(lines)) if prose else "\n".join(lines)
