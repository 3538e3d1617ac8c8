"""The data that labkit ships: a list, the labelled sets by task, and a comparison of the files with their cards.

read("qa", "field-notes", "dev")      questions on invented passages, a fifth of them without an answer
read("embed", "field-notes", "dev")   the title of each passage and its text, a positive pair
read("ner", "field-notes", "dev")     their people, organisations, places, dates and other names
read("qa", "evidence", "dev")         posts and criteria, as questions
read("qa", "xquad", "test")           questions on Wikipedia articles; there is no other split
read("ner", "which-way-round", "dev") one name per sentence, whose kind only the words on one side determine

The card of a set, README.md beside its files, lists the sha256 of every other file as `sha256sum` prints it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from labkit.datasets.evidence import CRITERIA
from labkit.datasets.files import json_lines
from labkit.datasets.records import example, scan_file
from labkit.errors import DataError, require_one_of
from labkit.files import folder, sha256

SPLITS = ("train", "dev", "test")
TASKS = {
    "field-notes": ("embed", "ner", "qa"), "evidence": ("qa",), "which-way-round": ("classify", "ner"), "xquad": ("qa",)
}  # fmt: skip


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


ADAPTERS = {  # what each of them does; `labkit.load` takes the name, which begins with that of its base model
    "gpt2-mini-mntp": "it fills in masked tokens",
    "gemma3-270m-mntp": "low-rank adapters of Gemma 3 270M, bidirectional: it fills in masked tokens",
    "gemma3-270m-qa-causal": "the same, causal: it answers questions",
    "gemma3-270m-qa-bidirectional": "bidirectional: it answers few questions",
    "gemma3-270m-qa-mntp": "bidirectional, after MNTP: it answers questions",
    "gemma3-270m-ner-causal": "causal: it tags entities",
    "gemma3-270m-ner-bidirectional": "bidirectional: it tags entities",
    "gemma3-270m-ner-mntp": "bidirectional, after MNTP: it tags entities",
}
SHIPPED = (
    Shipped("field-notes", "short English prose passages about an invented world", "field_notes/passages.jsonl", 168),
    Shipped("field-notes-questions", "questions on them; a fifth has no answer", "field_notes/questions.*.json", 672),
    Shipped("field-notes-entities", "their sentences with named entities", "field_notes/entities.*.conll", 1746),
    Shipped("evidence", "invented posts; the sentence that supports a criterion, or none", "evidence/posts.jsonl", 216),
    Shipped("which-way-round", "names whose kind one side of them determines", "which_way_round/items.jsonl", 432),
    Shipped("known-facts", "well-known facts, each asked in five ways", "known_facts/facts.jsonl", 192),
    Shipped("xquad", "questions on four Wikipedia articles", "xquad/questions.test.json", 111, "CC-BY-SA-4.0"),
    Shipped("gpt2-mini", "a GPT-2 of 5.9 M parameters", "checkpoints/gpt2-mini/*", None, "Apache-2.0"),
    *(
        Shipped(name, what, f"adapters/{name}/*", None, "Gemma Terms of Use" if "gemma" in name else "Apache-2.0")
        for name, what in ADAPTERS.items()
    ),
)


def passages(split: str | None = None) -> list[SimpleNamespace]:
    """The passages of Field Notes of one split ("train", "dev", "test"), or all; DataError for another split.

    A passage has the keys of its line in the file: id, split, region, genre, title and text.
    """
    return [SimpleNamespace(**row) for row in _lines("field_notes/passages.jsonl", split)]


def which_way_round(split: str | None = None) -> list[SimpleNamespace]:
    """The sentences of one split, or all of them, in the order of the file.

    A sentence has an id, a split, a text, and a name, text[start:end], whose kind `label` only the words in the
    `direction` "before" or "after" it determine. The three sentences of one `group` share the name and everything on
    its other side.
    """
    return [SimpleNamespace(**row) for row in _lines("which_way_round/items.jsonl", split)]


def read(task: str, name: str, split: str) -> list[Any]:
    """The examples of one split of an embedded data set; DataError if it has no such task or split."""
    if task not in TASKS[name]:
        raise DataError(f"{name} has nothing for the task {task!r}; it is for {', '.join(TASKS[name])}")
    require_one_of(f"the split of {name}", split, splits_of(name))
    if task == "embed":
        rows = [{"id": note.id, "first": note.title, "second": note.text, "group": note.id} for note in passages(split)]
    elif name == "evidence":
        rows = [
            {"id": f"{row['id']}-{label['criterion']}", "criterion": CRITERIA[label["criterion"]], "post": row["post"]}
            | {"evidence": label["evidence"], "group": row["id"]}
            for row in _lines("evidence/posts.jsonl", split)
            for label in row["criteria"]
        ]
    elif name == "which-way-round":
        rows = [row | {"entities": [row]} for row in _lines("which_way_round/items.jsonl", split)]
    else:
        file = {"qa": f"questions.{split}.json", "ner": f"entities.{split}.conll"}[task]
        return scan_file(task, folder("data") / name.replace("-", "_") / file).all()
    return [example(task, row, row["id"]) for row in rows]


def splits_of(name: str) -> tuple[str, ...]:
    """The splits of an embedded data set."""
    return ("test",) if name == "xquad" else SPLITS


def check(data: Shipped) -> list[str]:
    """Which files of a data set differ from its card, one message each; [] if none does."""
    path = folder("data") / data.files
    return card_faults(path.parent, path.name)


def card_faults(place: Path, pattern: str = "*") -> list[str]:
    """The same for the files in the folder `place` that match `pattern`."""
    card = place / "README.md"
    listed = re.findall(r"^([0-9a-f]{64})  (\S+)$", card.read_text(encoding="utf-8"), re.M) if card.is_file() else []
    chosen = [(expected, place / name) for expected, name in listed if fnmatchcase(name, pattern)]
    faults = [] if chosen else [f"{card} is missing, or lists no sha256 of {pattern}"]
    for expected, file in chosen:
        if not file.is_file():
            faults.append(f"{file} is missing; its card lists it")
        elif (actual := sha256(file)) != expected:
            faults.append(f"{file} is not the file of its card: its sha256 is {actual}, the card has {expected}")
    return faults


def _lines(file: str, split: str | None) -> list[dict[str, Any]]:
    if split is not None:
        require_one_of(f"the split of {file}", split, SPLITS)
    return [row for _, row in json_lines(folder("data") / file) if split in (None, row["split"])]
