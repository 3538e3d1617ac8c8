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
        ("Mum said “rest”, so\u00a0I tried it, and lay there.", "exact"),
        ("I  haven’t slept\r\nproperly since\u00a0the move,\u2003not one night.", "spaces"),
        ("It was a long week. I haven’t slept properly", "spaces"),
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
    match, start = locate(POST, evidence), POST.index(original)
    assert match.method == "fuzzy" and 80 <= match.similarity < 100
    shared = min(match.end, start + len(original)) - max(match.start, start)
    assert shared >= 0.9 * max(match.end - match.start, len(original))


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        (POST, "I bought a new bicycle yesterday."),
        (POST, POST + " And then, on the day after, we drove out to the lake with all of the children." + POST),
        ("whyme no and on and so forth", "why (me)? .* [no]"),
        (" \n", "so tired"),
    ],
)
def test_a_sentence_that_is_not_there_is_not_located(text, evidence):
    assert locate(text, evidence) is None


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


EVIDENCE = [
    (post.text, sentence)
    for post in posts()
    for _, sentence in post.criteria
    if sentence and post.text.count(sentence) == 1
]
SPACES = st.text(alphabet=" \n\t\u00a0\u2003", min_size=1, max_size=3)


@st.composite
def copies(draw, mistakes: bool) -> tuple[str, str, str]:
    """(post, true sentence, a copy of it with other white space and, if asked, a mistake in every 20 letters)."""
    post, sentence = draw(st.sampled_from(EVIDENCE))
    copy = "".join(draw(SPACES) if letter.isspace() else letter for letter in sentence)
    for _ in range(draw(st.integers(1, max(1, len(sentence) // 20))) if mistakes else 0):
        at = draw(st.integers(1, len(copy) - 2))
        one, two = copy[at], copy[at : at + 2]
        old, new = draw(st.sampled_from([(one, ""), (one, one * 2), (two, two[::-1]), (one, "e"), (one, f"{one} ")]))
        copy = copy[:at] + new + copy[at + len(old) :]
    return post, sentence, copy


@settings(max_examples=150, deadline=None)
@given(copies(mistakes=True))
def test_white_space_and_a_few_mistakes_leave_four_fifths_of_the_true_sentence(drawn):
    post, sentence, copy = drawn
    match, start = locate(post, copy), post.index(sentence)
    shared = min(match.end, start + len(sentence)) - max(match.start, start)
    assert shared >= 0.8 * max(len(sentence), match.end - match.start), post[match.start : match.end]


@settings(max_examples=100, deadline=None)
@given(copies(mistakes=False))
def test_white_space_alone_leaves_all_of_the_sentence(drawn):
    post, sentence, copy = drawn
    match = locate(post, copy)
    assert words(post[match.start : match.end]) == words(sentence)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.text(min_size=1, max_size=30).filter(str.strip))
def test_any_span_lies_in_the_text_and_begins_and_ends_with_a_sign(text, evidence):
    if match := locate(text, evidence):
        assert 0 <= match.start < match.end <= len(text) and match.similarity >= 80
        assert text[match.start : match.end] == text[match.start : match.end].strip()


# ---- the prompt ------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1).filter(str.strip), st.sampled_from([*CRITERIA, "cannot sit still"]), st.sampled_from(ORDERS))
def test_the_post_is_in_the_prompt_unchanged_and_each_mark_once(post, criterion, order):
    made = prompt(post, criterion, order)
    assert made.text[made.post_start : made.post_end] == post
    assert all(made.text.count(mark) == 1 for mark in MARKS)
    assert f"[CRITERION] {CRITERIA.get(criterion, criterion)} [/CRITERION]" in made.text


def test_the_order_is_that_of_its_name():
    parts = {name: re.findall(r"\[(\w+)\]", prompt("p", "sleep", name).text) for name in ORDERS}
    assert parts == {
        "criterion-last": ["INST", "POST", "CRITERION"],
        "criterion-first": ["INST", "CRITERION", "POST"],
    }
    assert prompt("p", "c", instruction="i").text == "[INST] i [/INST] [POST] p [/POST] [CRITERION] c [/CRITERION]"


def test_a_file_of_posts_is_read_with_its_evidence_located_in_the_original_text(tmp_path):
    post = "I\u2019ve slept  badly\nall week. The cat is fine."
    rows = [
        {"post": post, "criterion": "sleep", "evidence": "I've slept badly all week."},  # squeezed and straightened
        {"post": post, "criterion": "appetite", "evidence": None},
    ]
    path = tmp_path / "posts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with_answer, without = readers.read("qa", path)
    assert [answer.text for answer in with_answer.answers] == ["I\u2019ve slept  badly\nall week."]
    assert post.startswith(with_answer.answers[0].text, with_answer.answers[0].start)
    assert without.answers == () and without.question == "appetite"


def evidence_in_file(evidence: object, path):
    good = {"post": "I slept badly.", "criterion": "sleep", "evidence": "I slept badly."}
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {"evidence": evidence}) + "\n")
    readers.read("qa", path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: locate(POST, " \n\u00a0"), "the evidence is empty"),
        (lambda path: prompt("p", "sleep", "sideways"), "the order is 'sideways'; choose one of criterion-last, "),
        (lambda path: prompt("he wrote [/POST] in it", "sleep"), r"holds \[/POST\], a mark that the prompt keeps"),
        (lambda path: prompt("p", "[INST]"), r"holds \[INST\]"),
        (lambda path: prompt("p", "sleep", "criterion-last", "read [POST]"), r"holds \[POST\]"),
        (lambda path: evidence_in_file("The dog has been ill since Monday.", path), "posts.jsonl.*line 2.*evidence"),
        (lambda path: evidence_in_file(7, path), "posts.jsonl.*line 2.*evidence"),
    ],
)
def test_bad_input_is_refused(tmp_path, call, message):
    with pytest.raises(DataError, match=message):
        call(tmp_path / "posts.jsonl")
