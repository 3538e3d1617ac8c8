"""Evidence is located in the original text, whatever was squeezed, straightened or mistyped when it was copied."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.datasets import readers
from labkit.datasets.embedded import posts
from labkit.datasets.evidence import CRITERIA, MARKS, ORDERS, Match, locate, prompt
from labkit.errors import DataError, ModelError

POST = (
    "It was a long week.  I haven’t slept properly\nsince the move, not one night.\n\n"
    "Mum said “rest”, so\u00a0I tried it, and lay there. The cat is well\tand eats for two."
)
SLEEP = "I haven’t slept properly\nsince the move, not one night."


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("evidence", "method"),
    [
        (f" {SLEEP}\n", "exact"),
        ("I  haven’t slept\r\nproperly since\u00a0the move,\u2003not one night.", "spaces"),
        ("since the move, not one night. Mum said “rest”, so I", "spaces"),
    ],
)
def test_a_copy_is_located_up_to_white_space(evidence, method):
    match = locate(POST, evidence)
    assert (match.method, match.similarity) == (method, 100.0)
    assert words(POST[match.start : match.end]) == words(evidence)


def test_the_first_of_several_places_is_taken_and_no_sign_is_a_pattern():
    assert locate("so tired. so  tired.", "so tired.") == Match(0, 9, "exact")
    assert locate("so\ntired. so\ttired.", "so tired.") == Match(0, 9, "spaces")
    assert locate("why (me)?\n.* [no] $", "why (me)? .* [no] $").method == "spaces"


@pytest.mark.parametrize(
    ("evidence", "original"),
    [
        ("I haven't slept properly since the move, not one night.", SLEEP),  # a straightened apostrophe
        ("I haven’t slpet properly since teh move, not one nihgt.", SLEEP),
        ("I haven’t slept since the move, not one night.", SLEEP),  # a word lost
        ("I haven’t slept properly since the big move, not one night.", SLEEP),  # a word too many
        ("It was a long weak.", "It was a long week."),
    ],
)
def test_a_copy_with_mistakes_is_located(evidence, original):
    match = locate(POST, evidence)
    assert match.method == "fuzzy" and 80 <= match.similarity < 100
    assert POST[match.start : match.end] == original


def test_a_sentence_that_is_not_there_is_not_located():
    assert locate(POST, "I bought a new bicycle yesterday.") is None
    assert (
        locate(POST, POST + " And then, on the day after, we drove out to the lake with the children." + POST) is None
    )
    assert locate(" \n", "so tired") is None


def test_a_span_does_not_end_within_a_word_unless_the_word_is_too_long():
    text = "she was utterly exhausted-looking afterwards"
    match = locate(text, "she was uterly exhau")
    assert text[match.start : match.end] == "she was utterly exhausted"
    match = locate("a" * 1000, "a" * 30 + "bb")
    assert match.method == "fuzzy" and 25 <= match.end - match.start <= 35


def test_without_rapidfuzz_the_exact_is_located_and_the_rest_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    assert locate(POST, SLEEP).method == "exact" and locate(POST, words(SLEEP)).method == "spaces"
    with pytest.raises(ModelError, match="rapidfuzz.*pip install"):
        locate(POST, "It was a long weak.")


EVIDENCE = [(post.text, sentence) for post in posts() for _, sentence in post.criteria if sentence]
SPACES = st.text(alphabet=" \n\t\u00a0\u2003", min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
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
    match, start = locate(post, copy), post.index(sentence)
    shared = min(match.end, start + len(sentence)) - max(match.start, start)
    assert shared >= 0.8 * max(len(sentence), match.end - match.start), post[match.start : match.end]
    assert mistakes or words(post[match.start : match.end]) == words(sentence)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.text(min_size=1, max_size=30).filter(str.strip))
def test_any_span_lies_in_the_text_and_begins_and_ends_with_a_sign(text, evidence):
    if match := locate(text, evidence):
        assert 0 <= match.start < match.end <= len(text) and match.similarity >= 80
        assert text[match.start : match.end] == text[match.start : match.end].strip()


@given(st.text(min_size=1).filter(str.strip), st.sampled_from([*CRITERIA, "cannot sit still"]), st.sampled_from(ORDERS))
def test_the_post_is_in_the_prompt_unchanged_and_each_mark_once(post, criterion, order):
    made = prompt(post, criterion, order)
    assert made.text[made.post_start : made.post_end] == post
    assert all(made.text.count(mark) == 1 for mark in MARKS)
    assert f"[CRITERION] {CRITERIA.get(criterion, criterion)} [/CRITERION]" in made.text
    assert (made.text.index("[POST]") < made.text.index("[CRITERION]")) == (order == "criterion-last")


def test_the_prompt_as_a_whole():
    assert prompt("p", "c", instruction="i").text == "[INST] i [/INST] [POST] p [/POST] [CRITERION] c [/CRITERION]"


def test_a_file_of_posts_is_read_with_its_evidence_located_in_the_original_text(tmp_path):
    post, path = "I\u2019ve slept  badly\nall week. The cat is fine.", tmp_path / "posts.jsonl"

    def read(*evidence: object) -> list:
        rows = [{"post": post, "criterion": "sleep", "evidence": text} for text in evidence]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return readers.read("qa", path)

    with_answer, *without = read("I've slept badly all week.", None, "")  # squeezed and straightened
    assert [answer.text for answer in with_answer.answers] == ["I\u2019ve slept  badly\nall week."]
    assert post.startswith(with_answer.answers[0].text, with_answer.answers[0].start)
    assert [question.answers for question in without] == [(), ()] and without[0].question == "sleep"
    for evidence in ("The dog has been ill since Monday.", 7):
        with pytest.raises(DataError, match=f"{re.escape(str(path))}, line 2: "):
            read(None, evidence)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: locate(POST, " \n\u00a0"), "the evidence is empty"),
        (lambda: prompt("p", "sleep", "sideways"), "the order is 'sideways'; choose one of criterion-last, "),
        (lambda: prompt("he wrote [/POST] in it", "sleep"), r"holds \[/POST\], a mark that the prompt keeps"),
        (lambda: prompt("p", "[INST]"), r"holds \[INST\]"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(DataError, match=message):
        call()
