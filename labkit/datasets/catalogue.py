"""The data sets and checkpoints that labkit ships: a list, and a check of each against its form and its card.

A card, README.md beside the records, lists the sha256 of every other file as `sha256sum` prints it, so that

    cd data/field_notes && grep -E '^[0-9a-f]{64}' README.md | sha256sum --check

says the same without labkit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labkit.datasets import field_notes
from labkit.errors import DataError
from labkit.resources import folder
from labkit.run_folder import sha256_of_files

CARD = "README.md"


@dataclass(frozen=True)
class EmbeddedData:
    """One embedded data set, or checkpoint. `file`, inside the folder `data`, holds its records, or its weights."""

    name: str
    what: str
    licence: str
    file: str
    validate: Callable[[Path], list[str]]

    @property
    def path(self) -> Path:
        return folder("data") / self.file

    @property
    def count(self) -> int | None:
        """How many records it has, None for weights. Raises DataError where the file is missing."""
        if self.path.suffix != ".jsonl":
            return None
        try:
            return self.path.read_bytes().count(b"\n")
        except OSError as error:
            raise DataError(f"{self.path} could not be read ({error.strerror or error}); reinstall labkit") from error


CATALOGUE = (
    EmbeddedData(
        name="field-notes",
        what="short English prose passages about an invented world",
        licence="CC0-1.0",
        file="field_notes/passages.jsonl",
        validate=field_notes.validate,
    ),
    EmbeddedData(
        name="gpt2-mini",
        what="a GPT-2 of 5.9 M parameters, trained by this project",
        licence="Apache-2.0",
        file="checkpoints/gpt2-mini/model.safetensors",
        validate=lambda path: [],  # that it is the file of its card says all
    ),
)


def check(data: EmbeddedData) -> list[str]:
    """What is wrong with a data set, its form first, then its card; [] if all is well."""
    return [*data.validate(data.path), *card_faults(data.path.parent)]


def card_faults(place: Path) -> list[str]:
    """What is wrong with the card in the folder `place`: a file it does not list, or lists with another sha256."""
    card = place / CARD
    if not card.is_file():
        return [f"{card}: is missing; every data set has a card"]
    listed = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", card.read_text("utf-8"), re.M)}
    present = sha256_of_files(file for file in sorted(place.iterdir()) if file.is_file() and file != card)
    faults = [f"{card}: lists {name}, which is not there" for name in listed if name not in present]
    for name, digest in present.items():
        if name not in listed:
            faults.append(f"{card}: does not list the sha256 of {name}, which is {digest}")
        elif digest != listed[name]:
            faults.append(f"{place / name}: is not the file of the card (sha256 {digest}, the card has {listed[name]})")
    return faults
