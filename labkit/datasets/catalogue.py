"""The data sets and checkpoints that labkit ships: a list, and a comparison of their files with their card.

A card, README.md beside the records, lists the sha256 of every other file as `sha256sum` prints it, so that

    cd data/field_notes && grep -E '^[0-9a-f]{64}' README.md | sha256sum --check

does the same without labkit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from labkit.datasets.conll import read_conll
from labkit.datasets.embedded import SPLITS
from labkit.datasets.squad import read_squad
from labkit.errors import DataError
from labkit.files import sha256
from labkit.resources import folder

CARD = "README.md"


@dataclass(frozen=True)
class EmbeddedData:
    """One embedded data set, or checkpoint.

    `place`, inside the folder `data`, holds it; `files` names the file of its records, or its weights, or is a pattern
    of several. Several sets may share a place, and its card. `records` counts the records at `path`.
    """

    name: str
    what: str
    licence: str
    place: str
    files: str
    records: Callable[[Path], int] | None = None

    @property
    def path(self) -> Path:
        """The file, or, where the set has several, their folder."""
        place = folder("data") / self.place
        return place if "*" in self.files else place / self.files

    @property
    def count(self) -> int | None:
        """How many records it has, None for weights. Raises DataError where a file is missing or cannot be read."""
        return None if self.records is None else self.records(self.path)


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError as error:
        raise DataError(f"{path} could not be read ({error.strerror or error}); reinstall labkit") from error


def _questions(place: Path) -> int:
    return sum(len(read_squad(place / f"questions.{split}.json")) for split in SPLITS)


def _sentences(place: Path) -> int:
    return sum(len(read_conll(place / f"entities.{split}.conll")) for split in SPLITS)


CATALOGUE = (
    EmbeddedData(
        "field-notes", "short English prose passages about an invented world", "CC0-1.0",
        "field_notes", "passages.jsonl", _lines,
    ),
    EmbeddedData(
        "field-notes-questions", "questions on these passages, a fifth without an answer", "CC0-1.0",
        "field_notes", "questions.*.json", _questions,
    ),
    EmbeddedData(
        "field-notes-entities", "sentences of these passages with their named entities", "CC0-1.0",
        "field_notes", "entities.*.conll", _sentences,
    ),
    EmbeddedData(
        "evidence", "invented posts; the sentence that supports a criterion, or none", "CC0-1.0",
        "evidence", "posts.jsonl", _lines,
    ),
    EmbeddedData(
        "which-way-round", "sentences with a name whose kind only one side of it tells", "CC0-1.0",
        "which_way_round", "items.jsonl", _lines,
    ),
    EmbeddedData(
        "known-facts", "facts that everybody knows, each asked in five ways", "CC0-1.0",
        "known_facts", "facts.jsonl", _lines,
    ),
    EmbeddedData(
        "gpt2-mini", "a GPT-2 of 5.9 M parameters, trained by this project", "Apache-2.0",
        "checkpoints/gpt2-mini", "model.safetensors",
    ),
)  # fmt: skip


def check(data: EmbeddedData) -> list[str]:
    """Which files of a data set differ from its card, one message each; [] if none does."""
    is_shared = sum(each.place == data.place for each in CATALOGUE) > 1
    return card_faults(folder("data") / data.place, data.files if is_shared else "*")


def card_faults(place: Path, pattern: str = "*") -> list[str]:
    """The same for the files in the folder `place` that match `pattern`."""
    card = place / CARD
    if not card.is_file():
        return [f"{card} is missing; every data set has a card"]
    listed = re.findall(r"^([0-9a-f]{64})  (\S+)$", card.read_text(encoding="utf-8"), re.M)
    chosen = [(digest, name) for digest, name in listed if fnmatchcase(name, pattern)]
    faults = [] if chosen else [f"{card} lists no sha256 of {pattern}"]
    for digest, name in chosen:
        if not (place / name).is_file():
            faults.append(f"{place / name} is missing; {CARD} lists it")
        elif (found := sha256(place / name)) != digest:
            faults.append(f"{place / name} is not the file of the card: its sha256 is {found}, the card has {digest}")
    return faults
