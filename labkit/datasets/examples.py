"""What a task learns from, whatever file it came from: a question, a tagged sentence, a labelled text, a pair of texts.

Offsets are characters of the unchanged text, half open: text[start:end]. `group` names the source of an example (a
passage, an article); a split keeps the examples of a group together.
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
    """An extractive question. Without answers, the context does not answer it (SQuAD 2.0)."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    group: str = ""


@dataclass(frozen=True)
class Sentence:
    """Words with BIO tags ("B-PER", "I-PER", "O"), and the span of each word in `text`."""

    id: str
    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    tags: tuple[str, ...]
    group: str = ""

    @classmethod
    def of_words(cls, id: str, words: list[str], tags: list[str], group: str = "") -> Sentence:
        """A sentence whose text is its words, joined by single spaces."""
        spans, start = [], 0
        for word in words:
            spans.append((start, start + len(word)))
            start += len(word) + 1
        return cls(id, " ".join(words), tuple(words), tuple(spans), tuple(tags), group)


@dataclass(frozen=True)
class Entity:
    """A named span of a text."""

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
    """Two texts and the similarity of their meaning, or None for a positive pair without a score."""

    id: str
    first: str
    second: str
    score: float | None = None
    group: str = ""
