"""The data sets and checkpoints that labkit ships: a list, and a check of each against its form and its card.

A card, README.md beside the records, lists the sha256 of every other file as `sha256sum` prints it, so that

    cd data/field_notes && grep -E '^[0-9a-f]{64}' README.md | sha256sum --check

says the same without labkit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from labkit.datasets import embedded_checks, field_notes, known_facts
from labkit.datasets.conll import read_conll
from labkit.datasets.embedded import SPLITS
from labkit.datasets.squad import read_squad
from labkit.errors import DataError
from labkit.resources import folder
from labkit.run_folder import sha256_of_files

CARD = "README.md"


@dataclass(frozen=True)
class EmbeddedData:
    """One embedded data set, or checkpoint.

    `place`, inside the folder `data`, holds it; `files` names the file of its records, or its weights, or is a pattern
    of several. Several sets may share a place, and its card. `validate` and `records` (how many there are) are given
    `path`.
    """

    name: str
    what: str
    licence: str
    place: str
    files: str
    validate: Callable[[Path], list[str]]
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
        name="field-notes",
        what="short English prose passages about an invented world",
        licence="CC0-1.0",
        place="field_notes",
        files="passages.jsonl",
        validate=field_notes.validate,
        records=_lines,
    ),
    EmbeddedData(
        name="field-notes-questions",
        what="questions on these passages, a fifth without an answer",
        licence="CC0-1.0",
        place="field_notes",
        files="questions.*.json",
        validate=embedded_checks.validate_questions,
        records=_questions,
    ),
    EmbeddedData(
        name="field-notes-entities",
        what="sentences of these passages with their named entities",
        licence="CC0-1.0",
        place="field_notes",
        files="entities.*.conll",
        validate=embedded_checks.validate_entities,
        records=_sentences,
    ),
    EmbeddedData(
        name="evidence",
        what="invented posts; the sentence that supports a criterion, or none",
        licence="CC0-1.0",
        place="evidence",
        files="posts.jsonl",
        validate=embedded_checks.validate_posts,
        records=_lines,
    ),
    EmbeddedData(
        name="which-way-round",
        what="sentences with a name whose kind only one side of it tells",
        licence="CC0-1.0",
        place="which_way_round",
        files="items.jsonl",
        validate=embedded_checks.validate_items,
        records=_lines,
    ),
    EmbeddedData(
        name="known-facts",
        what="facts that everybody knows, each asked in five ways",
        licence="CC0-1.0",
        place="known_facts",
        files="facts.jsonl",
        validate=known_facts.validate,
        records=_lines,
    ),
    EmbeddedData(
        name="gpt2-mini",
        what="a GPT-2 of 5.9 M parameters, trained by this project",
        licence="Apache-2.0",
        place="checkpoints/gpt2-mini",
        files="model.safetensors",
        validate=lambda path: [],  # that it is the file of its card says all
    ),
)


def check(data: EmbeddedData) -> list[str]:
    """What is wrong with a data set, its form first, then its part of the card; [] if all is well."""
    place = folder("data") / data.place
    return [*data.validate(data.path), *(what for name, what in _card_faults(place) if _answers_for(data, name))]


def card_faults(place: Path) -> list[str]:
    """What is wrong with the card in the folder `place`: a file it does not list, or lists with another sha256."""
    return [what for _, what in _card_faults(place)]


def _answers_for(data: EmbeddedData, name: str) -> bool:
    """Whether this set is the one to tell a fault of the file `name`: its own, or, if it is the first, nobody's."""
    sharing = [each for each in CATALOGUE if each.place == data.place]
    return data == next((each for each in sharing if fnmatchcase(name, each.files)), sharing[0])


def _card_faults(place: Path) -> Iterator[tuple[str, str]]:
    """(file name, what is wrong with it)"""
    card = place / CARD
    if not card.is_file():
        yield CARD, f"{card}: is missing; every data set has a card"
        return
    listed = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", card.read_text("utf-8"), re.M)}
    present = sha256_of_files(file for file in sorted(place.iterdir()) if file.is_file() and file != card)
    for name in listed:
        if name not in present:
            yield name, f"{card}: lists {name}, which is not there"
    for name, digest in present.items():
        if name not in listed:
            yield name, f"{card}: does not list the sha256 of {name}, which is {digest}"
        elif digest != listed[name]:
            yield name, f"{place / name}: is not the file of the card (sha256 {digest}, the card has {listed[name]})"
