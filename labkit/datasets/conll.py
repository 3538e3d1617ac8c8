"""CoNLL column files: a word and its tag per line, an empty line between sentences; IO, IOB1, BIO or BIOES."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from labkit.datasets.examples import Sentence
from labkit.datasets.files import fault, read_text, write_whole
from labkit.datasets.tags import SCHEMES, parts, scheme_of, to_bio
from labkit.errors import DataError

# "# id = fn-001", as CoNLL-U has them; "# O" and "#a=b O" are a word and its tag.
_COMMENT = re.compile(r"# (\w+|newdoc id) ?= ?(.*)")
_DOCUMENTS = ("document", "newdoc id")
_DOCUMENT = "-DOCSTART-"


def read_conll(path: str | Path, *, scheme: str | None = None) -> list[Sentence]:
    """The sentences of a column file, their tags in BIO: the first column is the word, the last its tag.

    `group` is the document: "-DOCSTART-" begins one, and so does a comment "# document = NAME". Columns are separated
    by tabs if the line has one, else by spaces.

    Args:
        scheme: "BIO", "IOB1", "BIOES" or "IO"; None sees it from the whole file.

    Raises:
        DataError: a line of one column, or with a tag of no scheme; the message names file and line.
    """
    if scheme is not None and scheme not in SCHEMES:
        raise DataError(f"the tag scheme is {scheme!r}; choose one of {', '.join(SCHEMES)}, or None to see it")
    raw = columns(path)
    scheme = scheme or scheme_of(tags for _, _, tags in raw)
    return [
        Sentence.of_words(f"{Path(path).stem}-{i}", words, to_bio(tags, scheme), document or f"sentence {i}")
        for i, (document, words, tags) in enumerate(raw)
    ]


def columns(path: str | Path) -> list[tuple[str, list[str], list[str]]]:
    """(document, words, tags) of each sentence as the file has them; raises as `read_conll` does."""
    raw: list[tuple[str, list[str], list[str]]] = []
    document, number_of_documents = "", 0
    words: list[str] = []
    tags: list[str] = []

    def end() -> None:
        if words:
            raw.append((document, words.copy(), tags.copy()))
            words.clear()
            tags.clear()

    for number, line in enumerate(read_text(path).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip(" \t"):
            end()
        elif line.startswith(_DOCUMENT):
            end()
            number_of_documents += 1
            document = f"document {number_of_documents}"
        elif comment := _COMMENT.fullmatch(line):
            end()
            if comment[1] in _DOCUMENTS:
                document = comment[2]
        else:
            cells = line.split("\t") if "\t" in line else line.split(" ")
            cells = [cell.strip(" ") for cell in cells if cell.strip(" ")]
            if len(cells) < 2:
                raise fault(path, number, f"has one column ({line.strip()!r}); expected a word and its tag")
            try:
                parts(cells[-1])
            except ValueError as error:
                raise fault(path, number, str(error)) from error
            words.append(cells[0])
            tags.append(cells[-1])
    end()
    if not raw:
        raise DataError(f"{path} holds no sentence")
    return raw


def write_conll(path: str | Path, sentences: Sequence[Sentence]) -> Path:
    """Write sentences as "word<TAB>tag" lines in BIO, with a comment where a document begins.

    Raises:
        DataError: a sentence, word, tag or group that such a file would not give back. Nothing is written.
    """
    lines, document = [], None
    for each in sentences:
        if not each.words or each.group != " ".join(each.group.split()):
            what = f"the group {each.group!r} of {each.id}" if each.words else f"{each.id}, which has no word,"
            raise DataError(f"{what} cannot stand in a column file")
        if each.group != document:
            document = each.group
            lines.append(f"# document = {document}")
        for word, tag in zip(each.words, each.tags, strict=True):
            for cell in (word, tag):
                if not cell or re.search(r"\s", cell) or cell.startswith(_DOCUMENT):
                    raise DataError(f"{cell!r} in {each.id} cannot stand in a column file")
            lines.append(f"{word}\t{tag}")
        lines.append("")
    return write_whole(path, "\n".join(lines))
