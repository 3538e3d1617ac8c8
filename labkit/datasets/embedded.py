"""The embedded labelled data: Field Notes with questions and entities, Evidence, and Which way round.

read("qa", "field-notes", "dev")      questions on invented passages, a fifth of them without an answer
read("embed", "field-notes", "dev")   the title of each passage and its text, a pair to be found again
read("ner", "field-notes", "dev")     their people, organisations, places, dates and other names
read("qa", "evidence", "dev")         posts and criteria, as questions
read("ner", "which-way-round", "dev") one name per sentence, whose kind only the words on one side tell
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.datasets import field_notes
from labkit.datasets.conll import read_conll
from labkit.datasets.evidence import CRITERIA
from labkit.datasets.examples import Answer, Entity, Labelled, Pair, Question, Sentence
from labkit.datasets.files import json_lines
from labkit.datasets.squad import read_squad
from labkit.datasets.words import tags_over, words_of
from labkit.errors import DataError
from labkit.resources import folder

SPLITS = field_notes.SPLITS
NAMES = ("field-notes", "evidence", "which-way-round")


@dataclass(frozen=True)
class Item:
    """A sentence of Which way round: the kind of text[start:end] is told only by what comes `direction` it.

    The three items of one `group` share the name, and everything on the other side of it.
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
    reader = _READERS.get((task, name))
    if reader is None:
        tasks = sorted(t for t, n in _READERS if n == name)
        raise DataError(f"{name} has nothing for the task {task!r}; it is for {', '.join(tasks)}")
    return reader(split)


def posts(split: str | None = None) -> list[Post]:
    """The posts of Evidence of one split, or all of them, in the order of the file."""
    found = []
    for _, row in json_lines(folder("data") / "evidence" / "posts.jsonl"):
        criteria = tuple((each["criterion"], each["evidence"]) for each in row["criteria"])
        found.append(Post(row["id"], row["split"], row["post"], criteria))
    return [post for post in found if split in (None, post.split)]


def which_way_round(split: str | None = None) -> list[Item]:
    """The sentences of one split, or all of them, in the order of the file."""
    found = [Item(**row) for _, row in json_lines(folder("data") / "which_way_round" / "items.jsonl")]
    return [item for item in found if split in (None, item.split)]


def _evidence_questions(split: str) -> list[Question]:
    found = []
    for post in posts(split):
        for criterion, sentence in post.criteria:
            answers = () if sentence is None else (Answer(sentence, post.text.index(sentence)),)
            found.append(Question(f"{post.id}-{criterion}", CRITERIA[criterion], post.text, answers, post.id))
    return found


def _which_way_sentences(split: str) -> list[Sentence]:
    found = []
    for item in which_way_round(split):
        spans = words_of(item.text)
        tags = tags_over(spans, [Entity(item.start, item.end, item.label)], item.text)
        words = tuple(item.text[a:b] for a, b in spans)
        found.append(Sentence(item.id, item.text, words, tuple(spans), tuple(tags), item.group))
    return found


_READERS: dict[tuple[str, str], Callable[[str], list[Any]]] = {
    ("qa", "field-notes"): lambda split: read_squad(folder("data") / "field_notes" / f"questions.{split}.json"),
    ("ner", "field-notes"): lambda split: read_conll(folder("data") / "field_notes" / f"entities.{split}.conll"),
    ("embed", "field-notes"): lambda split: [
        Pair(each.id, each.title, each.text, None, each.id) for each in field_notes.passages(split)
    ],
    ("qa", "evidence"): _evidence_questions,
    ("ner", "which-way-round"): _which_way_sentences,
    ("classify", "which-way-round"): lambda split: [
        Labelled(item.id, item.text, item.label, item.group) for item in which_way_round(split)
    ],
}
