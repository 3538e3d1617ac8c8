"""The data sets and checkpoints that labkit ships: a list, and a comparison of their files with their card.

A card, README.md beside the records, lists the sha256 of every other file as `sha256sum` prints it, so that

    cd data/field_notes && grep -E '^[0-9a-f]{64}' README.md | sha256sum --check

does the same without labkit.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from labkit.files import folder


@dataclass(frozen=True)
class Shipped:
    """One data set or checkpoint; `count` is its number of records, None for weights.

    `files`, inside the folder `data`, is its file or a pattern of several.
    """

    name: str
    what: str
    files: str
    count: int | None
    licence: str = "CC0-1.0"

    @property
    def path(self) -> Path:
        """The file, or, where the set has several, their folder."""
        path = folder("data") / self.files
        return path.parent if "*" in self.files else path


CATALOGUE = (
    Shipped("field-notes", "short English prose passages about an invented world", "field_notes/passages.jsonl", 168),
    Shipped("field-notes-questions", "questions on them; a fifth has no answer", "field_notes/questions.*.json", 672),
    Shipped("field-notes-entities", "their sentences with named entities", "field_notes/entities.*.conll", 1746),
    Shipped("evidence", "invented posts; the sentence that supports a criterion, or none", "evidence/posts.jsonl", 216),
    Shipped("which-way-round", "names whose kind one side of them determines", "which_way_round/items.jsonl", 432),
    Shipped("known-facts", "well-known facts, each asked in five ways", "known_facts/facts.jsonl", 192),
    Shipped("gpt2-mini", "a GPT-2 of 5.9 M parameters", "checkpoints/gpt2-mini/*", None, "Apache-2.0"),
)


def check(data: Shipped) -> list[str]:
    """Which files of a data set differ from its card, one message each; [] if none does."""
    files = folder("data") / data.files
    return card_faults(files.parent, files.name)


def card_faults(place: Path, pattern: str = "*") -> list[str]:
    """The same for the files in the folder `place` that match `pattern`."""
    card = place / "README.md"
    listed = re.findall(r"^([0-9a-f]{64})  (\S+)$", card.read_text(encoding="utf-8"), re.M) if card.is_file() else []
    chosen = [(expected, place / name) for expected, name in listed if fnmatchcase(name, pattern)]
    faults = [] if chosen else [f"{card} is missing, or lists no sha256 of {pattern}"]
    for expected, file in chosen:
        if not file.is_file():
            faults.append(f"{file} is missing; its card lists it")
            continue
        with file.open("rb") as content:
            actual = hashlib.file_digest(content, "sha256").hexdigest()
        if actual != expected:
            faults.append(f"{file} is not the file of its card: its sha256 is {actual}, the card has {expected}")
    return faults
