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

from labkit.datasets import embedded
from labkit.datasets.files import json_lines
from labkit.files import folder

CARD = "README.md"


@dataclass(frozen=True)
class Shipped:
    """One data set or checkpoint.

    `files`, inside the folder `data`, is the file of its records or weights, or a pattern of several. Several sets may
    share a folder and its card.
    """

    name: str
    what: str
    files: str
    licence: str = "CC0-1.0"

    @property
    def path(self) -> Path:
        """The file, or, where the set has several, their folder."""
        path = folder("data") / self.files
        return path.parent if "*" in self.files else path

    @property
    def count(self) -> int | None:
        """The number of records, None for weights. Raises DataError where a file is missing or cannot be read."""
        task = {".json": "qa", ".conll": "ner"}.get(Path(self.files).suffix)
        if task:
            return sum(len(embedded.read(task, "field-notes", split)) for split in embedded.SPLITS)
        return sum(1 for _ in json_lines(self.path)) if self.files.endswith(".jsonl") else None


CATALOGUE = (
    Shipped("field-notes", "short English prose passages about an invented world", "field_notes/passages.jsonl"),
    Shipped("field-notes-questions", "questions on them; a fifth has no answer", "field_notes/questions.*.json"),
    Shipped("field-notes-entities", "their sentences with named entities", "field_notes/entities.*.conll"),
    Shipped("evidence", "invented posts; the sentence that supports a criterion, or none", "evidence/posts.jsonl"),
    Shipped("which-way-round", "names whose kind one side of them determines", "which_way_round/items.jsonl"),
    Shipped("known-facts", "well-known facts, each asked in five ways", "known_facts/facts.jsonl"),
    Shipped("gpt2-mini", "a GPT-2 of 5.9 M parameters", "checkpoints/gpt2-mini/model.safetensors", "Apache-2.0"),
)


def check(data: Shipped) -> list[str]:
    """Which files of a data set differ from its card, one message each; [] if none does."""
    file = folder("data") / data.files
    is_shared = sum(Path(other.files).parent == Path(data.files).parent for other in CATALOGUE) > 1
    return card_faults(file.parent, file.name if is_shared else "*")


def card_faults(place: Path, pattern: str = "*") -> list[str]:
    """The same for the files in the folder `place` that match `pattern`."""
    card = place / CARD
    if not card.is_file():
        return [f"{card} is missing; every data set has a card"]
    listed = re.findall(r"^([0-9a-f]{64})  (\S+)$", card.read_text(encoding="utf-8"), re.M)
    chosen = [(expected, place / name) for expected, name in listed if fnmatchcase(name, pattern)]
    faults = [] if chosen else [f"{card} lists no sha256 of {pattern}"]
    for expected, file in chosen:
        if not file.is_file():
            faults.append(f"{file} is missing; {CARD} lists it")
            continue
        with file.open("rb") as content:
            actual = hashlib.file_digest(content, "sha256").hexdigest()
        if actual != expected:
            faults.append(f"{file} is not the file of the card: its sha256 is {actual}, the card has {expected}")
    return faults
