"""What a task learns from, whatever file it came in: a question, a tagged sentence, a labelled text, a pair of texts.

Offsets are always characters of the text as it was given, half open: text[start:end]. `group` names what an example was
taken from (a passage, an article): examples of one group belong on the same side of a split.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_TAG = "O"


@dataclass(frozen=True)
class Answer:
    """A span of the context: text == context[start : start + len(text)]."""

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True)
class Question:
    """An extractive question. No answers means that the context does not answer it (SQuAD 2.0)."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    group: str = ""


@dataclass(frozen=True)
class Sentence:
    """Words and their tags in BIO ("B-PER", "I-PER", "O"), and where each word stands in `text`."""

    id: str
    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]  # of the words
    tags: tuple[str, ...]
    group: str = ""

    @classmethod
    def of_words(cls, id: str, words: list[str], tags: list[str], group: str = "") -> Sentence:
        """A sentence that came as words only: its text is the words with one space between them."""
        spans, at = [], 0
        for word in words:
            spans.append((at, at + len(word)))
            at += len(word) + 1
        return cls(id, " ".join(words), tuple(words), tuple(spans), tuple(tags), group)


@dataclass(frozen=True)
class Entity:
    """A named span of a text: text[start:end] is of the kind `label`."""

    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Labelled:
    """A text and its class."""

    id: str
    text: str
    label: str
    group: str = ""


@dataclass(frozen=True)
class Pair:
    """Two texts and how alike they are in meaning, or None for a positive pair without a number."""

    id: str
    first: str
    second: str
    score: float | None = None
    group: str = ""
