"""Text files become documents: nothing is changed unnoticed, and every refusal names the file."""

from __future__ import annotations

import pytest

from labkit.datasets.text import Document, read_documents
from labkit.errors import DataError
from tests.data_files import write

BOOK = (
    "\r\n\r\nA WALK\r\n\r\nby Nobody\r\n\r\n\r\n"
    "It was “quite” a _long_ way—so we said—and the road that led us over\r\n"
    "the hill  was stonier than any of us had believed when we set out.\r\n\r\n"
    "    O hill, O stone,\r\n    O heel, O bone!\r\n\r\n"
)
CLEAN_BOOK = (
    "A WALK\n\nby Nobody\n\n"
    'It was "quite" a long way - so we said - and the road that led us over the hill was stonier than any of us had '
    "believed when we set out.\n\n"
    "O hill, O stone,\nO heel, O bone!\n"
)
MARKER = "*** {} OF THE PROJECT GUTENBERG EBOOK A WALK,\r\nOR A STROLL ***"


@pytest.mark.parametrize("marker", [MARKER, "***{} OF THIS PROJECT GUTENBERG EBOOK A WALK***"])
@pytest.mark.parametrize("line_end", ["\r\n", "\n"])
def test_only_the_book_of_a_gutenberg_file_remains_without_hard_line_breaks(tmp_path, marker, line_end):
    content = f"\ufeffTitle: A Walk\r\n\r\n{marker.format('START')}{BOOK}{marker.format('END')}\r\n\r\nTerms of Use\r\n"
    (document,) = read_documents([write(tmp_path / "walk.txt", content.replace("\r\n", line_end))])
    assert document.text == CLEAN_BOOK


@pytest.mark.parametrize(
    "text",
    [
        "one\r\ntwo\rthree  \t, “curly” — _underscored_ 🙂, 漢字, a null \0 and a missing last line end",
        MARKER.format("START") + BOOK,  # a book that breaks off has no end marker
    ],
)
def test_every_other_file_is_kept_byte_for_byte(tmp_path, text):
    assert read_documents([write(tmp_path / "a.txt", text)])[0].text == text


def test_a_split_loses_nothing_and_is_nanogpts_of_tiny_shakespeare():
    train, held = Document("t", "äbc" * 17).split(1 / 3)
    assert train + held == "äbc" * 17 and len(held) == 17
    assert len(Document("t", "a" * 1_115_394).split(0.1)[0]) == 1_003_854


def test_files_and_folders_give_each_text_once_in_one_order(tmp_path):
    for name in ["b.txt", "a/z.md", "a/B.TXT", "c/d/e.text", "a.py", "README"]:
        write(tmp_path / "texts" / name, f"I am {name}")
    documents = read_documents([tmp_path / "texts" / "a.py", tmp_path / "texts", tmp_path / "texts/c/../b.txt"])
    assert [document.name for document in documents] == ["a.py", "a/B.TXT", "a/z.md", "b.txt", "c/d/e.text"]
    assert all(document.text == f"I am {document.name}" for document in documents)
    same = read_documents([write(tmp_path / folder / "a.txt", folder) for folder in ("one", "two")])
    assert len({document.name for document in same}) == 2 and [document.text for document in same] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "caf\xe9".encode("latin-1"), r"latin\.txt, line 1: is not UTF-8"),
        ("image.png", "text of another kind", r"texts does not exist, or is a folder without files that end in \.txt"),
    ],
)
def test_what_cannot_be_read_as_text_is_refused(tmp_path, name, content, message):
    write(tmp_path / "texts" / name, content)
    with pytest.raises(DataError, match=message):
        read_documents([tmp_path / "texts"])


def test_no_text_at_all_is_refused(tmp_path):
    for paths in ([], [tmp_path / "nowhere"]):
        with pytest.raises(DataError, match="no text was given|nowhere does not exist"):
            read_documents(paths)
