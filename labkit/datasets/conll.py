"""CoNLL column files: a word and its tag per line, an empty line between sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from labkit.datasets.examples import NO_TAG, Sentence
from labkit.datasets.files import LINE_END, Fault, Reading, Record, collect, read_text, shown
from labkit.datasets.tags import TAG_FORM, parts, scheme_of, to_bio
from labkit.errors import DataError

_NAMED_COMMENT = re.compile(r"# (\w+|newdoc id) ?= ?(.*)")  # "# id = fn-001", as in CoNLL-U
_PART = re.compile(r"\d+[-.]\d+")  # CoNLL-U: "3-4" is divided into the lines 3 and 4, "8.1" is not in the text
_CHUNKS = set("NP VP PP ADVP ADJP SBAR PRT CONJP INTJ LST UCP NC VC PC".split())  # of CoNLL-2000 and German texts

Line = tuple[int, list[str]]  # (line number, its columns)


def read_conll(path: str | Path) -> list[Sentence]:
    """The sentences of a column file with BIO tags. Raises DataError, with the line, for whatever `scan` reports."""
    return in_bio(scan(path).all("sentence"))


def in_bio(sentences: list[Sentence]) -> list[Sentence]:
    """The sentences of a whole file with their tags in BIO."""
    scheme = scheme_of(sentence.tags for sentence in sentences)
    return [replace(sentence, tags=tuple(to_bio(sentence.tags, scheme))) for sentence in sentences]


def scan(path: str | Path, tag_column: int | None = None) -> Reading:
    """The sentences with the tags of the file's own scheme, and the faults of the lines that cannot be read.

    The first column is the word, the last its tag. Tabs separate the columns if the line has one, otherwise spaces. A
    first column that numbers the words is skipped. `group` is the document; "-DOCSTART-" or a comment
    "# document = NAME" begins one.

    Args:
        tag_column: the number of the column that holds the tags; the first is 1.

    Raises:
        DataError: two columns of tags and no `tag_column`, or one that the file does not have.
    """
    sentences, comments = _sentences(path)
    word, tag, width = _columns(path, [lines for _, lines in sentences], tag_column)
    reading = collect(path, _records(Path(path).stem, sentences, word, tag, width), lambda sentence, id: sentence)
    if word:
        reading.notes.append("column 1 numbers the words and is skipped")
    if comments:
        reading.notes.append(f"comment lines that were skipped: {len(comments):,}, the first is line {comments[0]}")
    if width > 2:
        reading.layout = f"column {word + 1} of {width} is the word, column {tag + 1} its tag"
        if tag != width - 1 and tag_column is None:
            reading.notes.append(reading.layout)
    return reading


def _sentences(path: str | Path) -> tuple[list[tuple[str, list[Line]]], list[int]]:
    """(document, lines) of each sentence, and the numbers of the comment lines without a key."""
    lines = [(number, line, _cells(line)) for number, line in enumerate(LINE_END.split(read_text(path)), 1)]
    widths = {len(cells) for _, line, cells in lines if not line.startswith("#")} - {0, 1}
    sentences: list[tuple[str, list[Line]]] = []
    comments: list[int] = []
    document, documents, is_between = "", 0, True
    for number, line, cells in lines:
        if not cells:
            is_between = True
        elif line.startswith("-DOCSTART-"):
            documents += 1
            document, is_between = f"document {documents}", True
        elif comment := _NAMED_COMMENT.fullmatch(line):
            document, is_between = comment[2] if comment[1] in ("document", "newdoc id") else document, True
        elif (
            is_between
            and line[0] == "#"  # "# O" and "#tag B-X" are words if other lines are as wide
            and (len(cells) not in widths or (line[1:2] in " \t" and not _is_tag(cells[-1])))
        ):
            comments.append(number)
        else:
            if is_between:
                sentences.append((document, []))
                is_between = False
            sentences[-1][1].append((number, cells))
    return sentences, comments


def _cells(line: str) -> list[str]:
    line = line.rstrip(" \t")
    return [cell.strip(" ") for cell in line.split("\t")] if "\t" in line else [c for c in line.split(" ") if c]


def _is_tag(cell: str) -> bool:
    try:
        return bool(parts(cell))
    except ValueError:
        return False


def _columns(path: str | Path, sentences: list[list[Line]], tag_column: int | None) -> tuple[int, int, int]:
    """The column of the words and that of the tags, both counted from 0, and the number of columns of most lines."""
    widths = Counter(len(cells) for lines in sentences for _, cells in lines)
    width = widths.most_common(1)[0][0] if widths else 0
    rows = [[(number, cells) for number, cells in lines if len(cells) == width] for lines in sentences]
    word = int(width > 2 and _numbers_words(rows))
    if tag_column is not None:
        if not word + 1 < tag_column <= width:
            raise DataError(f"{path}: the column of the tags is {tag_column}; choose one from {word + 2} to {width}")
        return word, tag_column - 1, width
    lines = [line for lines in rows for line in lines if not (word and _PART.fullmatch(line[1][0]))]
    choices: dict[int, str] = {}  # columns of entity tags, each with an example
    for column in range(word + 1, width):
        tags = [(number, cells[column]) for number, cells in lines if _is_tag(cells[column])]
        entities = [(number, tag) for number, tag in tags if tag != NO_TAG]
        chunks = sum(parts(tag)[1] in _CHUNKS for _, tag in entities)
        only_outside = not entities and column == width - 1 and choices
        if 2 * len(tags) > len(lines) and (2 * chunks < len(entities) or only_outside):
            number, tag = (entities or tags)[0]
            choices[column] = f"{tag} in line {number}"
    if len(choices) > 1:
        named = " and ".join(f"column {column + 1} ({example})" for column, example in choices.items())
        example = max(choices) + 1
        raise DataError(
            f"{path} has tags in more than one column: {named}; choose one by its number, such as "
            f"--tag-column {example}, in Python tag_column={example}"
        )
    return word, next(iter(choices), width - 1), width


def _numbers_words(sentences: list[list[Line]]) -> bool:
    """Whether most cells of the first column are one more than the one before, or begin a sentence with 0 or 1."""
    before, counted, total = None, 0, 0
    for lines in sentences:
        numbers = [cells[0] for _, cells in lines if not _PART.fullmatch(cells[0])]
        for i, cell in enumerate(numbers):
            value = int(cell) if re.fullmatch(r"[0-9]{1,9}", cell) else None
            counted += value is not None and (value - 1 == before or (i == 0 and value in (0, 1)))
            before = value
        total += len(numbers)
    return 2 * counted > total


def _records(stem: str, sentences: list[tuple[str, list[Line]]], word: int, tag: int, width: int) -> Iterator[Record]:
    """Each sentence as a record, or one record for each of its bad lines."""
    for i, (document, lines) in enumerate(sentences):
        id, words, tags, faults = f"{stem}-{i}", [], [], []
        for number, cells in lines:
            if word and _PART.fullmatch(cells[0]):
                continue
            if len(cells) < 2:
                what = f"has one column ({shown(cells[0])}); expected a word and its tag"
            elif len(cells) != width:
                what = f"has {len(cells)} columns, and the other lines have {width}"
            elif word and not cells[0].isdecimal():
                what = f"has {shown(cells[0])} in column 1, which numbers the words in the other lines"
            elif not cells[word]:
                what = f"column {word + 1} is empty; expected a word"
            elif not _is_tag(cells[tag]):
                what = f"has the tag {shown(cells[tag])}{f' in column {tag + 1}' if width > 2 else ''}; {TAG_FORM}"
            else:
                words.append(cells[word])
                tags.append(cells[tag])
                continue
            faults.append(Record(f"line {number}", id, Fault(what)))
        yield from faults
        if words and not faults:
            yield Record(f"line {lines[0][0]}", id, Sentence.of_words(id, words, tags, document or f"sentence {i}"))
