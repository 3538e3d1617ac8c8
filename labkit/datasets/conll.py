"""CoNLL column files: a word and its tag per line, an empty line between sentences; IO, IOB1, BIO, BIOES or BILOU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from labkit.datasets.examples import NO_TAG, Sentence
from labkit.datasets.files import Fault, Reading, Record, collect, lines_of, shown
from labkit.datasets.tags import TAG_FORM, in_bio, parts
from labkit.errors import DataError

_NAMED_COMMENT = re.compile(r"# (\w+|newdoc id) ?= ?(.*)")  # "# id = fn-001", as in CoNLL-U
_DOCUMENTS = ("document", "newdoc id")
_DOCUMENT = "-DOCSTART-"
_PART = re.compile(r"\d+[-.]\d+")  # of CoNLL-U: "3-4" is divided by the lines 3 and 4, "8.1" is not in the text
_CHUNKS = set("NP VP PP ADVP ADJP SBAR PRT CONJP INTJ LST UCP NC VC PC".split())  # of CoNLL-2000 and German texts

Line = tuple[int, list[str]]  # (line number, its columns; a Fault alone where it cannot be read)


def read_conll(path: str | Path, *, tag_column: int | None = None) -> list[Sentence]:
    """The sentences of a column file, their tags in BIO. The first column is the word, the last its tag.

    Columns are separated by tabs if the line has one, else by spaces. A first column that numbers the words is skipped.
    `group` is the document: "-DOCSTART-" begins one, and so does a comment "# document = NAME".

    Args:
        tag_column: the number of the column that holds the tags; the first is 1.

    Raises:
        DataError: a line that has no such columns, or a tag of no scheme; two columns of tags and no `tag_column`. The
            message names file and line.
    """
    return in_bio(scan(path, tag_column).all("sentence"))


def scan(path: str | Path, tag_column: int | None = None) -> Reading:
    """The sentences with their tags as the file has them, and the faults of the lines that cannot be read."""
    sentences, comments = _sentences(path)
    word, tag, width = _layout(path, [lines for _, lines in sentences], tag_column)
    records = _records(Path(path).stem, sentences, word, tag, width)
    reading = collect(path, records, lambda sentence, id: sentence)
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
    """(document, lines) of each sentence, and the numbers of the lines that are comments without a key."""
    lines = [(n, line, [line] if isinstance(line, Fault) else _columns(line)) for n, line in lines_of(path)]
    widths = {len(cells) for _, line, cells in lines if not line.startswith("#")} - {0, 1}
    sentences: list[tuple[str, list[Line]]] = []
    comments: list[int] = []
    document, documents, between = "", 0, True
    for number, line, cells in lines:
        if not cells:
            between = True
        elif line.startswith(_DOCUMENT):
            documents += 1
            document, between = f"document {documents}", True
        elif comment := _NAMED_COMMENT.fullmatch(line):
            document, between = comment[2] if comment[1] in _DOCUMENTS else document, True
        elif between and line[0] == "#" and _is_comment(cells, line, widths):
            comments.append(number)
        else:
            if between:
                sentences.append((document, []))
                between = False
            sentences[-1][1].append((number, cells))
    return sentences, comments


def _is_comment(columns: list[str], line: str, widths: set[int]) -> bool:
    """Whether a line that begins with # is a comment. "# O" and "#tag B-X" are words if other lines are as wide."""
    return len(columns) not in widths or (line[1:2] in " \t" and not _is_tag(columns[-1]))


def _columns(line: str) -> list[str]:
    line = line.rstrip(" \t")
    return [cell.strip(" ") for cell in line.split("\t")] if "\t" in line else [c for c in line.split(" ") if c]


def _is_tag(cell: str) -> bool:
    try:
        return bool(parts(cell))
    except ValueError:
        return False


def _layout(path: str | Path, sentences: list[list[Line]], tag_column: int | None) -> tuple[int, int, int]:
    """The column of the words and that of the tags, both counted from 0, and the number of columns of most lines."""
    widths = Counter(len(cells) for lines in sentences for _, cells in lines)
    width = widths.most_common(1)[0][0] if widths else 0
    rows = [[(number, cells) for number, cells in lines if len(cells) == width] for lines in sentences]
    word = int(width > 2 and _numbers_words(rows))
    if tag_column is not None:
        if not word + 1 < tag_column <= width:
            raise DataError(f"{path}: the column of the tags is {tag_column}; choose one from {word + 2} to {width}")
        return word, tag_column - 1, width
    choices = _tag_columns(
        [line for lines in rows for line in lines if not (word and _PART.fullmatch(line[1][0]))], word
    )
    if len(choices) > 1:
        named = (f"column {column + 1} ({example})" for column, example in choices.items())
        raise DataError(
            f"{path} has tags in more than one column: {' and '.join(named)}; choose one by its number, such as "
            f"--tag-column {max(choices) + 1}, in Python tag_column={max(choices) + 1}"
        )
    return word, next(iter(choices), width - 1), width


def _tag_columns(lines: list[Line], word: int) -> dict[int, str]:
    """The columns of entity tags, each with an example: not of chunks, nor of O alone unless it is the last."""
    choices: dict[int, str] = {}
    last = len(lines[0][1]) - 1 if lines else 0
    for column in range(word + 1, last + 1):
        tags = [(number, cells[column]) for number, cells in lines if _is_tag(cells[column])]
        entities = [(number, tag) for number, tag in tags if tag != NO_TAG]
        chunks = sum(parts(tag)[1] in _CHUNKS for _, tag in entities)
        outside = not entities and column == last and choices
        if 2 * len(tags) > len(lines) and (2 * chunks < len(entities) or outside):
            number, tag = (entities or tags)[0]
            choices[column] = f"{tag} in line {number}"
    return choices


def _numbers_words(sentences: list[list[Line]]) -> bool:
    """Whether the first column counts: most cells are one more than the one before, or begin a sentence with 0 or 1."""
    before, counted, total = None, 0, 0
    for lines in sentences:
        first = True
        for _, cells in lines:
            if _PART.fullmatch(cells[0]):
                continue
            value = int(cells[0]) if re.fullmatch(r"[0-9]{1,9}", cells[0]) else None
            counted += value is not None and (value - 1 == before or first and value in (0, 1))
            before, first, total = value, False, total + 1
    return 2 * counted > total


def _records(stem: str, sentences: list[tuple[str, list[Line]]], word: int, tag: int, usual: int) -> Iterator[Record]:
    plain = word == 0 and tag == usual - 1
    for i, (document, lines) in enumerate(sentences):
        id, words, tags, faults = f"{stem}-{i}", [], [], []
        widths = {len(cells) for _, cells in lines}
        width = widths.pop() if plain and len(widths) == 1 < len(lines) else usual
        for number, cells in lines:
            if word and _PART.fullmatch(cells[0]):
                continue
            try:
                if len(cells) < 2:
                    one = f"has one column ({shown(cells[0])}); expected a word and its tag"
                    raise ValueError(cells[0] if isinstance(cells[0], Fault) else one)
                if len(cells) != width:
                    raise ValueError(f"has {len(cells)} columns, and the other lines have {width}")
                if word and not cells[0].isdecimal():
                    raise ValueError(f"has {shown(cells[0])} in column 1, which numbers the words in the other lines")
                if not cells[word]:
                    raise ValueError(f"column {word + 1} is empty; expected a word")
                label = cells[-1 if plain else tag]
                if not _is_tag(label):
                    where = f" in column {tag + 1}" if width > 2 else ""
                    raise ValueError(f"has the tag {shown(label)}{where}; {TAG_FORM}")
            except ValueError as error:
                faults.append(Record(f"line {number}", id, Fault(error)))
            else:
                words.append(cells[word])
                tags.append(label)
        yield from faults
        if words and not faults:
            yield Record(f"line {lines[0][0]}", id, Sentence.of_words(id, words, tags, document or f"sentence {i}"))
