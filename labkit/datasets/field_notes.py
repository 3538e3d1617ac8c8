"""Field Notes, short English prose passages about an invented world (CC0-1.0): the reader and the validator.

    passages("train")                -> the training passages, in the order of the file
    validate("my/passages.jsonl")    -> what is wrong with a file of this form, in words; [] if nothing is

The card, with the counts and the sha256, lies beside the file: data/field_notes/README.md.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from labkit.errors import DataError
from labkit.resources import folder

SPLITS = ("train", "dev", "test")
WORDS = (80, 180)  # of a text, as `str.split` counts them
AT_LEAST = 120  # passages
GENRES, GENRES_PER_SPLIT = 8, 5  # at least
SAME_OPENING = 2  # passages at most that begin with the same three words
SHARED_WORDS = 8  # so many words in a row, in two passages, betray a template

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_SENTENCE = re.compile(r"[^\n]+?[.!?](?=[\"')]*(?:\s|\Z))")
_LABEL = re.compile(r"[a-z]+(?:[ -][a-z]+)*")
_FOREIGN = re.compile(r"[^\n -~£€°½¼¾×²³]")  # besides these: Latin letters
_MARKDOWN = re.compile(r"[*_`#|\\<>\[\]{}~^]|--|^- ", re.M)
_STRAY_SPACE = re.compile(r"\A\s|\s\Z|  | \n|\n |\n{3}")


@dataclass(frozen=True)
class Passage:
    """One passage. The fields, in this order, are the keys of its line in the file."""

    id: str
    split: str
    region: str
    genre: str
    title: str
    text: str


_FIELDS = [field.name for field in fields(Passage)]


def passages(split: str | None = None) -> list[Passage]:
    """The passages of one split ("train", "dev" or "test"), or all of them, in the order of the file.

    Raises:
        DataError: no such split, or the file is missing or damaged; the message names the file and the line.
    """
    if split not in (None, *SPLITS):
        raise DataError(f"Field Notes has no split {split!r}; it has {', '.join(SPLITS)}, or None for all")
    path, found = folder("data") / "field_notes" / "passages.jsonl", []
    for number, line in enumerate(_lines(path), 1):
        try:
            found.append(_parse(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}; reinstall labkit, or restore the file") from error
    return [passage for passage in found if split in (None, passage.split)]


def validate(path: str | Path) -> list[str]:
    """What is wrong with a file of passages, as "<file>, line <n>: <what>", line after line; [] if all is well."""
    found: dict[int, Passage] = {}
    faults: list[tuple[int, str]] = []
    try:
        lines = _lines(Path(path))
    except DataError as error:
        return [str(error)]
    for number, line in enumerate(lines, 1):
        try:
            found[number] = _parse(line)
        except ValueError as error:
            faults.append((number, str(error)))
        else:
            if json.dumps(asdict(found[number]), ensure_ascii=False) != line.decode("utf-8"):
                keys = ", ".join(_FIELDS)
                faults.append((number, f"is not written as json.dumps writes it (keys in the order {keys}; no \\u)"))
            faults += [(number, fault) for fault in _faults(found[number])]
    faults += _repetitions(found)
    whole = [f"{path}: {fault}" for fault in _shortages(list(found.values()))]
    return [f"{path}, line {number}: {fault}" for number, fault in sorted(faults, key=lambda each: each[0])] + whole


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().removesuffix(b"\n").split(b"\n")  # only \n ends a line, whatever else a text may hold
    except OSError as error:
        raise DataError(f"{path}: could not be read ({error.strerror or error})") from error


def _parse(line: bytes) -> Passage:
    """The passage on one line. Raises ValueError, in words, if it holds none."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"is not a JSON object but {line[:20].decode(errors='replace')!r}")
    if missing := [name for name in _FIELDS if name not in row]:
        raise ValueError(f"lacks {', '.join(missing)}")
    if unknown := [name for name in row if name not in _FIELDS]:
        raise ValueError(f"has unknown fields: {', '.join(unknown)}")
    if unfit := [name for name in _FIELDS if not (isinstance(row[name], str) and row[name].strip())]:
        raise ValueError(f"{', '.join(unfit)} should be text, and not empty")
    if row["split"] not in SPLITS:
        raise ValueError(f"the split is {row['split']!r}; expected {', '.join(SPLITS)}")
    return Passage(**row)


def _faults(passage: Passage) -> Iterator[str]:
    """What is wrong with one passage, seen alone."""
    if not re.fullmatch(r"fn-[0-9]{3}", passage.id):
        yield f"the id is {passage.id!r}; expected the form fn-001"
    for name in ("region", "genre"):
        if not _LABEL.fullmatch(label := getattr(passage, name)):
            yield f"the {name} is {label!r}; expected lower-case words"
    if not WORDS[0] <= (count := len(passage.text.split())) <= WORDS[1]:
        yield f"the text has {count} words; expected {WORDS[0]} to {WORDS[1]}"
    if "\n" in passage.title:
        yield "the title has more than one line"
    for name, text in (("title", passage.title), ("text", passage.text)):
        if foreign := dict.fromkeys(c for c in _FOREIGN.findall(text) if not _is_latin(c)):
            names = ", ".join(unicodedata.name(c, f"U+{ord(c):04X}") for c in foreign)
            yield f"the {name} holds {names}; expected Latin letters, digits and plain ASCII punctuation"
        if not unicodedata.is_normalized("NFC", text):
            yield f"the {name} is not in Unicode's normal form NFC"
        if mark := _MARKDOWN.search(text):
            yield f"the {name} holds markdown: {mark[0]!r}"
        if _STRAY_SPACE.search(text):
            yield f"the {name} has a space or line break too many"


def _is_latin(character: str) -> bool:
    return unicodedata.name(character, "").startswith("LATIN ") or unicodedata.category(character) == "Mn"


def _repetitions(found: dict[int, Passage]) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) for what may not stand twice: the later line has the fault, the earlier is named."""
    first: dict[tuple[str, str], int] = {}  # (what kind of thing, the thing) -> the line that has it first
    openings: Counter[str] = Counter()
    for number, passage in found.items():
        for kind in ("id", "title"):
            value = getattr(passage, kind)
            if (line := first.setdefault((kind, value.lower()), number)) != number:
                yield number, f"the {kind} {value!r} stands in line {line} already"
        for sentence in _SENTENCE.findall(passage.text):
            words = _WORD.findall(sentence.lower())
            if len(words) > 1 and (line := first.get(("sentence", " ".join(words)))):
                yield number, f"the sentence {sentence.strip()!r} stands in line {line} already"
            first.setdefault(("sentence", " ".join(words)), number)
        words = _WORD.findall(passage.text.lower())
        shared: dict[int, str] = {}  # the earlier line -> the first words in common with it
        for start in range(len(words) - SHARED_WORDS + 1):
            row = " ".join(words[start : start + SHARED_WORDS])
            if (line := first.setdefault(("row of words", row), number)) != number:
                shared.setdefault(line, row)
        for line, row in shared.items():
            yield number, f"shares {SHARED_WORDS} words in a row with line {line}: {row!r}"
        opening = " ".join(words[:3])
        openings[opening] += 1
        if openings[opening] > SAME_OPENING:
            yield number, f"begins with {opening!r}, as {openings[opening] - 1} passages before it do"


def _shortages(found: list[Passage]) -> Iterator[str]:
    """What the file as a whole has too little of."""
    if len(found) < AT_LEAST:
        yield f"holds {len(found)} passages; expected at least {AT_LEAST}"
    if (genres := len({passage.genre for passage in found})) < GENRES:
        yield f"holds {genres} genres; expected at least {GENRES}"
    for split in SPLITS:
        genres = len({passage.genre for passage in found if passage.split == split})
        if genres < GENRES_PER_SPLIT:
            yield f"the split {split} has passages of {genres} genres; expected at least {GENRES_PER_SPLIT}"
