"""Evidence is found in the text as it was given, whatever was squeezed, straightened or mistyped in the copying."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.datasets import readers
from labkit.datasets.embedded import posts
from labkit.datasets.evidence import CRITERIA, INSTRUCTION, MARKS, ORDERS, Found, locate, prompt
from labkit.errors import DataError, ModelError

POST = (
    "It was a long week.  I haven’t slept properly\nsince the move, not one night.\n\n"
    "Mum said “rest”, so\u00a0I tried it, and lay there. The cat is well\tand eats for two."
)
SLEEP = "I haven’t slept properly\nsince the move, not one night."


def words(text: str) -> str:
    return " ".join(text.split())


# ---- exact, white space --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evidence", [SLEEP, f" {SLEEP}\n", "Mum said “rest”, so\u00a0I tried it, and lay there."])
def test_an_exact_copy_is_found_to_the_letter(evidence):
    found = locate(POST, evidence)
    assert (found.how, found.alike) == ("exact", 100.0)
    assert POST[found.start : found.end] == evidence.strip()


@pytest.mark.parametrize(
    "evidence",
    [
        "I haven’t slept properly since the move, not one night.",
        "I  haven’t slept\r\nproperly since\u00a0the move,\u2003not one night.",
        "It was a long week. I haven’t slept properly",
        "Mum said “rest”, so I tried it, and lay there.",
        "since the move, not one night. Mum said “rest”, so I",
        "The cat is well and\neats for two.",
    ],
)
def test_other_white_space_is_no_difference(evidence):
    found = locate(POST, evidence)
    assert (found.how, found.alike) == ("spaces", 100.0)
    assert POST[found.start : found.end] != evidence and words(POST[found.start : found.end]) == words(evidence)


def test_signs_of_a_pattern_are_letters_like_others():
    assert locate("why (me)?\n.* [no] $", "why (me)? .* [no] $").how == "spaces"
    assert locate("whyme no and on and so forth", "why (me)? .* [no]") is None


def test_the_first_of_several_places_is_taken():
    assert locate("so tired. so  tired.", "so tired.") == Found(0, 9, "exact")
    assert locate("so\ntired. so\ttired.", "so tired.") == Found(0, 9, "spaces")


# ---- fuzzy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "stands"),
    [
        ("I haven't slept properly since the move, not one night.", SLEEP),  # a straightened apostrophe
        ('Mum said "rest", so I tried it, and lay there.', "Mum said “rest”, so\u00a0I tried it, and lay there."),
        ("I haven’t slpet properly since teh move, not one nihgt.", SLEEP),
        ("I haven’t slept since the move, not one night.", SLEEP),  # a word lost
        ("I haven’t slept properly since the big move, not one night.", SLEEP),  # a word too many
        ("It was a long weak.", "It was a long week."),
    ],
)
def test_a_copy_with_slips_is_found_and_the_original_sliced(evidence, stands):
    found = locate(POST, evidence)
    assert found.how == "fuzzy" and 80 <= found.alike < 100
    got, start = POST[found.start : found.end], POST.index(stands)
    both = min(found.end, start + len(stands)) - max(found.start, start)
    assert both >= 0.9 * max(len(got), len(stands)), got


@pytest.mark.parametrize(
    "evidence",
    [
        "I bought a new bicycle yesterday.",
        "He would not stop laughing at the wedding, it was lovely.",
        POST + " And then, on the day after, we drove out to the lake with all of the children." + POST,
    ],
)
def test_what_is_not_there_is_not_found(evidence):
    assert locate(POST, evidence) is None


def test_a_text_of_white_space_holds_nothing():
    assert locate(" \n", "so tired") is None and locate("", "so tired") is None


def test_a_span_does_not_end_within_a_word():
    found = locate("she was utterly exhausted-looking afterwards", "she was uterly exhau")
    assert found.how == "fuzzy"
    assert "she was utterly exhausted-looking afterwards"[found.start : found.end] == "she was utterly exhausted"


def test_a_word_without_end_is_cut_where_the_evidence_ends():
    found = locate("a" * 1000, "a" * 30 + "bb")
    assert found.how == "fuzzy" and 25 <= found.end - found.start <= 35


@pytest.mark.parametrize("evidence", ["", " \n\u00a0"])
def test_empty_evidence_is_refused(evidence):
    with pytest.raises(DataError, match="the evidence is empty"):
        locate(POST, evidence)


def test_without_rapidfuzz_the_exact_is_found_and_the_rest_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    assert locate(POST, SLEEP).how == "exact" and locate(POST, words(SLEEP)).how == "spaces"
    with pytest.raises(ModelError, match="rapidfuzz.*pip install"):
        locate(POST, "It was a long weak.")


EVIDENCE = [
    (post.text, sentence)
    for post in posts()
    for _, sentence in post.criteria
    if sentence and post.text.count(sentence) == 1
]
SPACES = st.text(alphabet=" \n\t\u00a0\u2003", min_size=1, max_size=3)
FEW = 20  # one slip in so many letters, and one white space too many


@st.composite
def spoiled(draw, slips: bool) -> tuple[str, str, str]:
    """(post, true sentence, a copy of it with other white space and, if asked, slips of the keyboard)."""
    post, sentence = draw(st.sampled_from(EVIDENCE))
    copy = "".join(draw(SPACES) if letter.isspace() else letter for letter in sentence)
    for _ in range(draw(st.integers(1, max(1, len(sentence) // FEW))) if slips else 0):
        at = draw(st.integers(1, len(copy) - 2))
        change = draw(st.sampled_from(["drop", "double", "swap", "other", "space"]))
        if change == "swap":
            copy = copy[:at] + copy[at + 1] + copy[at] + copy[at + 2 :]
        else:
            put = {
                "drop": "",
                "double": copy[at] * 2,
                "other": draw(st.sampled_from("aeinrst")),
                "space": copy[at] + " ",
            }
            copy = copy[:at] + put[change] + copy[at + 1 :]
    return post, sentence, copy


@settings(max_examples=150, deadline=None)
@given(spoiled(slips=True))
def test_white_space_and_a_few_slips_leave_four_fifths_of_the_true_sentence(drawn):
    post, sentence, copy = drawn
    found, start = locate(post, copy), post.index(sentence)
    assert found is not None
    both = min(found.end, start + len(sentence)) - max(found.start, start)
    assert both >= 0.8 * len(sentence), post[found.start : found.end]
    assert both >= 0.8 * (found.end - found.start), post[found.start : found.end]


@settings(max_examples=100, deadline=None)
@given(spoiled(slips=False))
def test_white_space_alone_leaves_all_of_the_sentence(drawn):
    post, sentence, copy = drawn
    found = locate(post, copy)
    assert words(post[found.start : found.end]) == words(sentence)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.text(min_size=1, max_size=30).filter(str.strip))
def test_any_span_lies_in_the_text_and_begins_and_ends_with_a_sign(text, evidence):
    if found := locate(text, evidence):
        assert 0 <= found.start < found.end <= len(text)
        assert text[found.start : found.end] == text[found.start : found.end].strip()
        assert found.alike >= 80
        if found.how != "fuzzy":
            assert words(text[found.start : found.end]) == words(evidence)


# ---- the prompt ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", [*CRITERIA, "cannot sit still"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_post_stands_in_the_prompt_unchanged(order, criterion):
    made = prompt(POST, criterion, order)
    assert made.text[made.post_start : made.post_end] == POST
    assert all(made.text.count(mark) == 1 for mark in MARKS)
    assert f"[CRITERION] {CRITERIA.get(criterion, criterion)} [/CRITERION]" in made.text


def test_the_order_is_that_of_its_name():
    order = {
        "criterion-last": "[INST] [/INST] [POST] [/POST] [CRITERION] [/CRITERION]",
        "criterion-first": "[INST] [/INST] [CRITERION] [/CRITERION] [POST] [/POST]",
    }
    for name, marks in order.items():
        assert re.findall(r"\[/?[A-Z]+\]", prompt(POST, "sleep", name).text) == marks.split()
    assert prompt("p", "c").text == f"[INST] {INSTRUCTION} [/INST] [POST] p [/POST] [CRITERION] c [/CRITERION]"
    assert (
        prompt("p", "c", "criterion-first", "i").text == "[INST] i [/INST] [CRITERION] c [/CRITERION] [POST] p [/POST]"
    )


@given(st.text(min_size=1).filter(str.strip), st.sampled_from(ORDERS))
def test_any_post_is_found_in_its_prompt(post, order):
    made = prompt(post, "sleep", order)
    assert made.text[made.post_start : made.post_end] == post


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p", "sleep", "sideways"), "the order is 'sideways'; choose one of criterion-last, criterion-first"),
        (("he wrote [/POST] in it", "sleep"), r"holds \[/POST\], a mark that the prompt keeps for itself"),
        (("p", "[INST]"), r"holds \[INST\]"),
        (("p", "sleep", "criterion-last", "read [POST]"), r"holds \[POST\]"),
    ],
)
def test_a_prompt_that_could_not_be_taken_apart_is_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        prompt(*arguments)


def test_a_file_of_posts_is_read_with_its_evidence_located_in_the_original_text(tmp_path):
    post = "I\u2019ve slept  badly\nall week. The cat is fine."
    rows = [
        {"post": post, "criterion": "sleep", "evidence": "I've slept badly all week."},  # squeezed and straightened
        {"post": post, "criterion": "appetite", "evidence": None},
    ]
    path = tmp_path / "posts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found, none = readers.read("qa", path)
    assert [answer.text for answer in found.answers] == ["I\u2019ve slept  badly\nall week."]
    assert post[found.answers[0].start : found.answers[0].end] == found.answers[0].text
    assert none.answers == () and none.question == "appetite"


@pytest.mark.parametrize("evidence", ["The dog has been ill since Monday.", 7])
def test_evidence_that_is_nowhere_in_its_post_is_named_by_its_line_and_not_dropped(tmp_path, evidence):
    path = tmp_path / "posts.jsonl"
    good = {"post": "I slept badly.", "criterion": "sleep", "evidence": "I slept badly."}
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {"evidence": evidence}) + "\n")
    with pytest.raises(DataError, match=r"posts.jsonl.*line 2.*evidence"):
        readers.read("qa", path)
