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
MARKERS = {
    "of today": (
        "*** START OF THE PROJECT GUTENBERG EBOOK A WALK ***",
        "*** END OF THE PROJECT GUTENBERG EBOOK A WALK ***",
    ),
    "on two lines": (
        "*** START OF THE PROJECT GUTENBERG EBOOK A WALK,\r\nOR A STROLL ***",
        "*** END OF THE PROJECT GUTENBERG EBOOK A WALK,\r\nOR A STROLL ***",
    ),
    "of old": (
        "***START OF THIS PROJECT GUTENBERG EBOOK A WALK***",
        "***END OF THIS PROJECT GUTENBERG EBOOK A WALK***",
    ),
}


def write(path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


@pytest.mark.parametrize("markers", MARKERS)
@pytest.mark.parametrize("line_end", ["\r\n", "\n"])
def test_of_a_gutenberg_file_the_book_remains_and_its_paragraphs_have_no_hard_line_breaks(tmp_path, markers, line_end):
    start, end = MARKERS[markers]
    file = write(tmp_path / "walk.txt", ("\ufeff" + HEADER + start + BOOK + end + LICENCE).replace("\r\n", line_end))
    (document,) = read_documents([file])
    assert document.text == CLEAN_BOOK


def test_a_gutenberg_file_with_nothing_between_its_markers_is_empty(tmp_path):
    start, end = MARKERS["of today"]
    with pytest.raises(DataError, match="walk.txt is empty"):
        read_documents([write(tmp_path / "walk.txt", HEADER + start + "\r\n\r\n" + end + LICENCE)])


@pytest.mark.parametrize(
    "text",
    [
        "one\r\ntwo\r\n",
        "one\rtwo",
        "\ufeffwith a byte-order mark\n",
        "  spaces \t and a missing last line end",
        "“curly” — _underscored_ ’tis left as it is\n\n\n\n",
        "emoji 🙂, 漢字, a null \0 and a form feed \f\n",
        HEADER + MARKERS["of today"][0] + BOOK,  # a book that breaks off has no end marker: it is taken as it stands
    ],
)
def test_every_other_file_is_taken_byte_for_byte(tmp_path, text):
    file = write(tmp_path / "a.txt", text)
    (document,) = read_documents([file])
    assert document.text.encode() == file.read_bytes()


def test_the_last_tenth_is_held_out_where_nanogpt_cuts_tiny_shakespeare(tmp_path):
    for length in [1, 9, 10, 11, 999, 1_115_394]:  # the last: tiny Shakespeare, which nanoGPT cuts at 1,003,854
        text = "ab" * (length // 2) + "c" * (length % 2)
        train, held_out = Document("t", text).split(0.1)
        assert train + held_out == text
        assert len(train) == int(length * 0.9)
    assert len(train) == 1_003_854


@pytest.mark.parametrize("held_out", [0.0, 0.001, 1 / 3, 0.5, 0.999])
def test_a_split_loses_nothing_and_holds_out_the_share_to_the_letter(held_out):
    for length in range(50):
        train, held = Document("t", "äbc"[:length] + "x" * (length - 3)).split(held_out)
        assert len(train + held) == length
        assert abs(len(held) - held_out * length) <= 1


def test_without_a_held_out_share_everything_is_trained_on():
    assert Document("t", "some text").split(0.0) == ("some text", "")


def test_a_folder_gives_its_text_files_at_any_depth_in_one_order(tmp_path):
    for name in ["b.txt", "a/z.md", "a/B.TXT", "c/d/e.text", "a.py", "notes.json", "README"]:
        write(tmp_path / "texts" / name, f"I am {name}")
    documents = read_documents([tmp_path / "texts"])
    assert [document.name for document in documents] == ["a/B.TXT", "a/z.md", "b.txt", "c/d/e.text"]
    assert all(document.text == f"I am {document.name}" for document in documents)


def test_a_file_that_is_named_is_read_whatever_its_suffix(tmp_path):
    (document,) = read_documents([write(tmp_path / "poem.rst", "text")])
    assert document.name == "poem.rst"


def test_a_file_named_twice_is_read_once(tmp_path, monkeypatch):
    file = write(tmp_path / "texts" / "a.txt", "text")
    monkeypatch.chdir(tmp_path)
    assert (
        len(read_documents([file, tmp_path / "texts", "texts/a.txt", tmp_path / "texts" / ".." / "texts" / "a.txt"]))
        == 1
    )


def test_files_are_taken_in_the_order_in_which_they_were_named(tmp_path):
    files = [write(tmp_path / name, name) for name in ("z.txt", "a.txt", "m.txt")]
    assert [document.name for document in read_documents([*files, files[1]])] == ["z.txt", "a.txt", "m.txt"]


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path):
    first, second = (write(tmp_path / folder / "a.txt", folder) for folder in ("one", "two"))
    documents = read_documents([first, second])
    assert len({document.name for document in documents}) == 2
    assert [document.text for document in documents] == ["one", "two"]


def not_utf8(folder):
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))


def binary_after_text(folder):
    (folder / "half.txt").write_bytes(b"good so far\n" + bytes(range(128, 140)))


def empty(folder):
    write(folder / "empty.txt", "")


def blank(folder):
    write(folder / "blank.txt", " \n\t\r\n")


def no_text(folder):
    write(folder / "image.png", "text of another kind")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (not_utf8, r"latin\.txt is not UTF-8 text \(byte 3\)"),
        (binary_after_text, r"half\.txt is not UTF-8 text \(byte 12\)"),
        (empty, r"empty\.txt is empty"),
        (blank, r"blank\.txt is empty"),
        (no_text, r"texts holds no text: no file in it ends in \.txt"),
        (lambda folder: None, r"texts holds no text"),
    ],
)
def test_a_folder_that_cannot_be_read_as_text_is_named_with_the_cause(tmp_path, content, complaint):
    (tmp_path / "texts").mkdir()
    content(tmp_path / "texts")
    with pytest.raises(DataError, match=complaint):
        read_documents([tmp_path / "texts"])


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        read_documents([tmp_path / "nowhere"])


def test_no_path_at_all_is_an_error():
    with pytest.raises(DataError, match="no text was given"):
        read_documents([])


@pytest.mark.skipif(os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    file = write(tmp_path / "secret.txt", "text")
    file.chmod(0)
    with pytest.raises(DataError, match="secret.txt could not be read"):
        read_documents([file])
