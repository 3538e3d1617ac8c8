"""Field Notes, short English prose passages about an invented world (CC0-1.0). Card: data/field_notes/README.md."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.datasets.files import json_lines
from labkit.errors import DataError
from labkit.files import folder

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Passage:
    """One passage. The fields are the keys of its line in the file."""

    id: str
    split: str
    region: str
    genre: str
    title: str
    text: str


def passages(split: str | None = None) -> list[Passage]:
    """The passages of one split ("train", "dev" or "test"), or all of them. Raises DataError for any other split."""
    if split not in (None, *SPLITS):
        raise DataError(f"Field Notes has no split {split!r}; it has {', '.join(SPLITS)}, or None for all")
    rows = json_lines(folder("data") / "field_notes" / "passages.jsonl")
    return [Passage(**row) for _, row in rows if split in (None, row["split"])]
