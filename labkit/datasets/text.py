"""Plain text as training material: files and folders in, documents out.

The header, licence and hard line breaks of a Project Gutenberg file, recognised by its markers, are removed. Any other
file is kept as it is, so that losses per byte are comparable with other people's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.datasets.files import path_of, read_text
from labkit.errors import DataError

SUFFIXES = (".txt", ".md", ".text")
_GUTENBERG = re.compile(
    r"\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG.*?\*\*\*(.*)\*\*\* ?END OF TH(?:E|IS) PROJECT", re.S
)
_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": " - ", "_": None})


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
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES]
        if not files:
            raise DataError(f"{path} does not exist, or is a folder without files that end in {', '.join(SUFFIXES)}")
        for file in sorted(files, key=Path.as_posix):
            name = path.name if file == path else file.relative_to(path).as_posix()
            names.setdefault(file.resolve(), (name, file))
    counts = Counter(name for name, _ in names.values())
    return [Document(name if counts[name] == 1 else file.as_posix(), _text(file)) for name, file in names.values()]


def _text(file: Path) -> str:
    text = read_text(file)
    if not (book := _GUTENBERG.search(text)):
        return text
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", re.sub(r"\r\n?", "\n", book[1].translate(_QUOTES)).strip()):
        lines = [line.strip() for line in paragraph.split("\n")]
        is_prose = all(len(line) > 50 for line in lines[:-1])  # the short lines of verse and lists stay
        paragraphs.append(re.sub(r" {2,}", " ", " ".join(lines)) if is_prose else "\n".join(lines))
    return "\n\n".join(paragraphs) + "\n"
