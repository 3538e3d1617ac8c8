"""What a task learns from, whatever file it came from: a question, a tagged sentence, a labelled text, a pair of texts.

Offsets are characters of the unchanged text, half open: text[start:end]. `group` names the source of an example (a
passage, an article); a split keeps the examples of a group together.

Entity tags are BIO, which is IOB2 (Tjong Kim Sang and Veenstra 1999). `to_bio` rewrites other schemes: IOB1 (Ramshaw
and Marcus 1995) has B only where two entities of one kind touch, IO never; BILOU (Ratinov and Roth 2009) is BIOES with
other letters. One rule tells for all of them where an entity begins, so the scheme of a file need not be known.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from labkit.datasets.files import shown

NO_TAG = "O"
TAG = re.compile("O|([BIESLU])-(.+)", re.S)


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
        """A sentence whose text is its words, joined by single spaces; the tags may be of any scheme."""
        spans, start = [], 0
        for word in words:
            spans.append((start, start + len(word)))
            start += len(word) + 1
        return cls(id, " ".join(words), tuple(words), tuple(spans), tuple(to_bio(tags)), group)


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


# ---- words and tags --------------------------------------------------------------------------------------------------

# A possessive 's stands alone, as the name before it may be an entity. Zero-width characters, variation selectors and
# skin tones stay with the sign before them, so that an emoji is one word; combining marks stay with their letter.
_JOINERS = "\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff\u00ad"
_SKIN_TONES = "\U0001f3fb-\U0001f3ff"
_MARKS = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M") + _SKIN_TONES
_LETTERS = rf"[^\W_]+(?:[{_MARKS}]+[^\W_]*)*"
_WORD = re.compile(
    rf"""
      (?:[A-Z]\.){{2,}}                                               # U.S., J.S.
    | (?<=[\w{_MARKS}])['’][sS]\b                                     # Brill's
    | \d+(?:[.,:]\d+)+                                                # 1,200 and 3.5 and 14:30
    | {_LETTERS}(?:(?:[-\u200c\u200d]|['’](?![sS]\b)){_LETTERS})*     # O'Neil-Smith
    | [\U0001f1e6-\U0001f1ff]{{2}}                                    # a flag
    | [^\s{_JOINERS}][{_MARKS}]*(?:[{_JOINERS}]+[^\s\w{_JOINERS}][{_MARKS}]*)*[{_JOINERS}]*  # any other sign
    """,
    re.VERBOSE,
)


def words_of(text: str) -> list[tuple[int, int]]:
    """(start, end) of each word of a text, in order. Only white space and joiners lie between two words."""
    return [match.span() for match in _WORD.finditer(text)]


def tags_over(words: Sequence[tuple[int, int]], entities: Iterable[Entity], text: str) -> list[str]:
    """BIO tags of the words of a text. Raises ValueError if an entity overlaps another or is not made of words."""
    tags = [NO_TAG] * len(words)
    for entity in entities:
        inside = [i for i, (start, end) in enumerate(words) if start < entity.end and end > entity.start]
        where = f"has an entity from {entity.start} to {entity.end} of the text, which"
        if not inside or entity.start < 0 or entity.end > len(text):
            raise ValueError(f"{where} contains no word or lies outside of its {len(text)} characters")
        start, end = words[inside[0]][0], words[inside[-1]][1]
        if start < entity.start or end > entity.end:
            raise ValueError(f"{where} cuts through {shown(text[start:end])}")
        if any(tags[i] != NO_TAG for i in inside):
            raise ValueError(f"{where} overlaps another")
        for i in inside:
            tags[i] = f"{'B' if i == inside[0] else 'I'}-{entity.label}"
    return tags


def entities_in(words: Sequence[tuple[int, int]], tags: Sequence[str]) -> list[Entity]:
    """The entities of words with BIO tags, as spans of the text."""
    return [Entity(words[first][0], words[end - 1][1], kind) for first, end, kind in entities_of(tags)]


def entities_of(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first word, word after the last, kind) of each entity in BIO tags.

    An I that does not continue an entity of its kind begins one (the default of seqeval and conlleval).
    """
    entities: list[tuple[int, int, str]] = []
    for i, tag in enumerate(to_bio(tags)):
        letter, kind = parts(tag)
        if letter == "B":
            entities.append((i, i + 1, kind))
        elif letter == "I":
            entities[-1] = (entities[-1][0], i + 1, kind)
    return entities


def to_bio(tags: Sequence[str]) -> list[str]:
    """The same entities in BIO, from BIO, IO, IOB1, BIOES or BILOU; an entity that begins with I begins with B instead.

    Raises ValueError for a tag of no scheme.
    """
    bio = []
    for before, tag in zip((NO_TAG, *tags), tags, strict=False):
        (before_letter, before_kind), (letter, kind) = parts(before), parts(tag)
        begins = letter in ("B", "S", "U") or before_letter in ("E", "L", "S", "U") or before_kind != kind
        bio.append(NO_TAG if letter == NO_TAG else f"{'B' if begins else 'I'}-{kind}")
    return bio


@lru_cache(maxsize=1024)  # called for every word, and a data set has few tags
def parts(tag: str) -> tuple[str, str]:
    """("B", "PER") of "B-PER"; ("O", "") of "O". Raises ValueError for anything else."""
    match = TAG.fullmatch(tag)
    if match is None:
        raise ValueError(f"has the tag {shown(tag)}; expected O, or B-, I-, E-, L-, S-, U- and a kind, as in B-PER")
    return (NO_TAG, "") if tag == NO_TAG else match.groups()
