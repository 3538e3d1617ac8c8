"""Text files become documents: nothing is changed unnoticed, and every refusal names the file."""

from __future__ import annotations

import os

import pytest

from labkit.datasets.text import Document, read_documents
from labkit.errors import DataError

HEADER = "The Project Gutenberg eBook of A Walk\r\n\r\nThis eBook is for the use of anyone anywhere.\r\n\r\n"
LICENCE = "\r\n\r\nUpdated editions will replace the previous one.\r\n\r\nSection 1. General Terms of Use\r\n"
BOOK = (
    "\r\n\r\nA WALK\r\n\r\nby Nobody\r\n\r\n\r\n"
    "It was “quite” a _long_ way—so we said—and the road that led us over\r\n"
    "the hill  was stonier than any of us had believed when we set out, but\r\n"
    "nobody’s boots were lost.\r\n\r\n"
    "    O hill, O stone,\r\n    O heel, O bone!\r\n\r\n"
    "The end.\r\n\r\n"
)
CLEAN_BOOK = (
    "A WALK\n\nby Nobody\n\n"
    'It was "quite" a long way - so we said - and the road that led us over the hill was stonier than any of us had '
    "believed when we set out, but nobody's boots were lost.\n\n"
    "O hill, O stone,\nO heel, O bone!\n\n"
    "The end.\n"
)
MARKERS = [
    "*** {} OF THE PROJECT GUTENBERG EBOOK A WALK ***",
    "*** {} OF THE PROJECT GUTENBERG EBOOK A WALK,\r\nOR A STROLL ***",
    "***{} OF THIS PROJECT GUTENBERG EBOOK A WALK***",
]


def write(path, text: str | bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("line_end", ["\r\n", "\n"])
def test_only_the_book_of_a_gutenberg_file_remains_without_hard_line_breaks(tmp_path, marker, line_end):
    content = "\ufeff" + HEADER + marker.format("START") + BOOK + marker.format("END") + LICENCE
    (document,) = read_documents([write(tmp_path / "walk.txt", content.replace("\r\n", line_end))])
    assert document.text == CLEAN_BOOK


@pytest.mark.parametrize(
    "text",
    [
        "one\r\ntwo\rthree  \t and a missing last line end",
        "\ufeff“curly” — _underscored_ ’tis left as it is\n\n\n\n",
        "emoji 🙂, 漢字, a null \0 and a form feed \f\n",
        HEADER + MARKERS[0].format("START") + BOOK,  # a book that breaks off has no end marker
    ],
)
def test_every_other_file_is_kept_byte_for_byte(tmp_path, text):
    file = write(tmp_path / "a.txt", text)
    assert read_documents([file])[0].text.encode() == file.read_bytes()


@pytest.mark.parametrize("held_out", [0.0, 0.001, 0.1, 1 / 3, 0.999])
def test_a_split_loses_nothing_and_holds_out_the_share(held_out):
    for length in range(50):
        train, held = Document("t", ("äbc" * 17)[:length]).split(held_out)
        assert train + held == ("äbc" * 17)[:length] and abs(len(held) - held_out * length) <= 1


def test_the_split_is_nanogpts_of_tiny_shakespeare():
    assert len(Document("t", "a" * 1_115_394).split(0.1)[0]) == 1_003_854


def test_a_folder_gives_its_text_files_at_any_depth_in_one_order(tmp_path):
    for name in ["b.txt", "a/z.md", "a/B.TXT", "c/d/e.text", "a.py", "notes.json", "README"]:
        write(tmp_path / "texts" / name, f"I am {name}")
    documents = read_documents([tmp_path / "texts"])
    assert [document.name for document in documents] == ["a/B.TXT", "a/z.md", "b.txt", "c/d/e.text"]
    assert all(document.text == f"I am {document.name}" for document in documents)


def test_named_files_are_read_once_in_their_order_whatever_their_suffix(tmp_path, monkeypatch):
    files = [write(tmp_path / "texts" / name, name) for name in ("z.rst", "a.txt", "m.txt")]
    monkeypatch.chdir(tmp_path)
    documents = read_documents([*files, tmp_path / "texts", "texts/a.txt", tmp_path / "texts" / ".." / "texts/a.txt"])
    assert [document.name for document in documents] == ["z.rst", "a.txt", "m.txt"]


def test_files_of_one_name_in_two_folders_have_different_names(tmp_path):
    documents = read_documents([write(tmp_path / folder / "a.txt", folder) for folder in ("one", "two")])
    assert len({document.name for document in documents}) == 2
    assert [document.text for document in documents] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "caf\xe9".encode("latin-1"), r"latin\.txt is not UTF-8 text \(byte 3\)"),
        ("empty.txt", "", r"empty\.txt is empty"),
        ("blank.txt", " \n\t\r\n", r"blank\.txt is empty"),
        ("walk.txt", MARKERS[0].format("START") + "\r\n" + MARKERS[0].format("END"), "walk.txt is empty"),
        ("image.png", "text of another kind", r"texts holds no text: no file in it ends in \.txt"),
    ],
)
def test_a_folder_that_cannot_be_read_as_text_is_refused(tmp_path, name, content, message):
    write(tmp_path / "texts" / name, content)
    with pytest.raises(DataError, match=message):
        read_documents([tmp_path / "texts"])


def test_no_path_or_one_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        read_documents([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="no text was given"):
        read_documents([])


@pytest.mark.skipif(os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    file = write(tmp_path / "secret.txt", "text")
    file.chmod(0)
    with pytest.raises(DataError, match="secret.txt could not be read"):
        read_documents([file])
