"""Evidence is located in the original text, whatever was squeezed, straightened or mistyped when it was copied."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.datasets import readers
from labkit.datasets.embedded import read
from labkit.datasets.evidence import locate
from labkit.errors import DataError, ModelError
from tests.data_files import write

POST = (
    "It was a long week.  I haven’t slept properly\nsince the move, not one night.\n\n"
    "Mum said “rest”, so\u00a0I tried it, and lay there. The cat is well\tand eats for two."
)
SLEEP = "I haven’t slept properly\nsince the move, not one night."


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "evidence", "match"),
    [
        (POST, f" {SLEEP}\n", (21, 76)),
        (POST, "I  haven’t slept\r\nproperly since\u00a0the move,\u2003not one night.", (21, 76)),
        ("so tired. so  tired.", "so tired.", (0, 9)),  # the first of several places
        ("so\ntired. so\ttired.", "so tired.", (0, 9)),
        ("why (me)?\n.* [no] $", "why (me)? .* [no] $", (0, 19)),  # no sign is a pattern
        (POST, "I bought a new bicycle yesterday.", None),
        (POST, f"{POST} And then, on the day after, we drove out to the lake with the children. {POST}", None),
        (" \n", "so tired", None),
    ],
)
def test_a_copy_is_located_exactly_or_up_to_white_space_or_not_at_all(text, evidence, match):
    assert locate(text, evidence) == match


@pytest.mark.parametrize(
    ("text", "evidence", "original"),
    [
        (POST, "I haven't slept properly since the move, not one night.", SLEEP),  # a straightened apostrophe
        (POST, "I haven’t slpet properly since teh move, not one nihgt.", SLEEP),
        (POST, "I haven’t slept since the move, not one night.", SLEEP),  # a word lost
        (POST, "I haven’t slept properly since the big move, not one night.", SLEEP),  # a word too many
        ("she was utterly exhausted-looking", "she was uterly exhau", "she was utterly exhausted"),  # up to whole words
    ],
)
def test_a_copy_with_mistakes_is_located(text, evidence, original):
    assert text[slice(*locate(text, evidence))] == original


def test_without_rapidfuzz_the_exact_is_located_and_the_rest_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    assert locate(POST, SLEEP) == locate(POST, words(SLEEP)) == (21, 76)
    with pytest.raises(ModelError, match="rapidfuzz.*pip install"):
        locate(POST, "It was a long weak.")


EVIDENCE = [(q.context, answer.text) for q in read("qa", "evidence", "train") for answer in q.answers]
SPACES = st.text(alphabet=" \n\t\u00a0\u2003", min_size=1, max_size=3)


@given(st.data(), st.sampled_from(EVIDENCE), st.booleans())
def test_white_space_and_a_mistake_in_20_letters_leave_four_fifths_of_the_true_sentence(data, example, mistakes):
    post, sentence = example
    copy = "".join(data.draw(SPACES) if letter.isspace() else letter for letter in sentence)
    for _ in range(data.draw(st.integers(1, max(1, len(sentence) // 20))) if mistakes else 0):
        at = data.draw(st.integers(1, len(copy) - 2))
        one, two = copy[at], copy[at : at + 2]
        edits = [(one, ""), (one, one * 2), (two, two[::-1]), (one, "e"), (one, f"{one} ")]
        old, new = data.draw(st.sampled_from(edits))
        copy = copy[:at] + new + copy[at + len(old) :]
    (start, end), true_start = locate(post, copy), post.index(sentence)
    shared = min(end, true_start + len(sentence)) - max(start, true_start)
    assert shared >= 0.8 * max(len(sentence), end - start), post[start:end]
    assert mistakes or words(post[start:end]) == words(sentence)


def test_a_file_of_posts_is_read_with_its_evidence_located_in_the_original_text(tmp_path):
    row, path = {"post": POST, "criterion": "sleep"}, tmp_path / "posts.jsonl"
    copies = (words(SLEEP).replace("’", "'"), None, "")  # squeezed and straightened, or none
    first, *without = readers.read("qa", write(path, [row | {"evidence": text} for text in copies]))
    (answer,) = first.answers
    assert answer.text == SLEEP and POST.startswith(answer.text, answer.start) and first.question == "sleep"
    assert [question.answers for question in without] == [(), ()]
    for evidence in ("The dog has been ill since Monday.", 7):
        with pytest.raises(DataError, match=r"posts\.jsonl, line 2: "):
            readers.read("qa", write(path, [row | {"evidence": None}, row | {"evidence": evidence}]))
    with pytest.raises(DataError, match="the evidence is empty"):
        locate(POST, " \n\u00a0")
