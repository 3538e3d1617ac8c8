"""The embedded labelled data: Field Notes with questions and entities, Evidence, and Which way round.

read("qa", "field-notes", "dev")      questions on invented passages, a fifth of them without an answer
read("embed", "field-notes", "dev")   the title of each passage and its text, a positive pair
read("ner", "field-notes", "dev")     their people, organisations, places, dates and other names
read("qa", "evidence", "dev")         posts and criteria, as questions
read("ner", "which-way-round", "dev") one name per sentence, whose kind only the words on one side determine
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.datasets import field_notes
from labkit.datasets.evidence import CRITERIA
from labkit.datasets.examples import Answer, Labelled, Pair, Question
from labkit.datasets.files import json_lines
from labkit.datasets.rows import example, scan_file
from labkit.errors import DataError
from labkit.files import folder

SPLITS = field_notes.SPLITS
NAMES = ("field-notes", "evidence", "which-way-round")


@dataclass(frozen=True)
class Item:
    """A sentence of Which way round: only the words `direction` the name text[start:end] determine its kind.

    `direction` is "before" or "after". The three items of one `group` share the name and everything on its other side.
    """

    id: str
    split: str
    direction: str
    group: str
    text: str
    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Post:
    """A post of Evidence; `criteria` holds (criterion, sentence or None), the sentence an exact part of `text`."""

    id: str
    split: str
    text: str
    criteria: tuple[tuple[str, str | None], ...]


def read(task: str, name: str, split: str) -> list[Any]:
    """The examples of one split of an embedded data set; DataError if it has no such task or split."""
    if split not in SPLITS:
        raise DataError(f"{name} has no split {split!r}; it has {', '.join(SPLITS)}")
    place = folder("data") / "field_notes"
    match task, name:
        case "qa", "field-notes":
            return scan_file(task, place / f"questions.{split}.json").all()
        case "ner", "field-notes":
            return scan_file(task, place / f"entities.{split}.conll").all()
        case "embed", "field-notes":
            return [Pair(note.id, note.title, note.text, None, note.id) for note in field_notes.passages(split)]
        case "qa", "evidence":
            return [_question(post, *criterion) for post in posts(split) for criterion in post.criteria]
        case "ner", "which-way-round":
            items = which_way_round(split)
            return [example("ner", vars(item) | {"entities": [vars(item)]}, item.id) for item in items]
        case "classify", "which-way-round":
            return [Labelled(item.id, item.text, item.label, item.group) for item in which_way_round(split)]
    tasks = {"field-notes": "embed, ner, qa", "evidence": "qa", "which-way-round": "classify, ner"}
    raise DataError(f"{name} has nothing for the task {task!r}; it is for {tasks[name]}")


def posts(split: str | None = None) -> list[Post]:
    """The posts of Evidence of one split, or all of them, in the order of the file."""
    rows = [row for _, row in json_lines(folder("data") / "evidence" / "posts.jsonl") if split in (None, row["split"])]
    pairs = [tuple((label["criterion"], label["evidence"]) for label in row["criteria"]) for row in rows]
    return [Post(row["id"], row["split"], row["post"], labels) for row, labels in zip(rows, pairs, strict=True)]


def which_way_round(split: str | None = None) -> list[Item]:
    """The sentences of one split, or all of them, in the order of the file."""
    items = [Item(**row) for _, row in json_lines(folder("data") / "which_way_round" / "items.jsonl")]
    return [item for item in items if split in (None, item.split)]


def _question(post: Post, criterion: str, sentence: str | None) -> Question:
    answers = () if sentence is None else (Answer(sentence, post.text.index(sentence)),)
    return Question(f"{post.id}-{criterion}", CRITERIA[criterion], post.text, answers, post.id)
