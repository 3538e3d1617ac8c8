"""Scores of generated answers, against sums done by hand and enumerations."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import DataError, ModelError
from labkit.fusion.scores import (
    Answers,
    accuracy,
    comparison,
    exact_match,
    holds_answer,
    judged,
    lemmatised_match,
    load_lemmatizer,
    paired,
    summary,
)


def scored(correct):
    return {str(number): bool(value) for number, value in enumerate(correct)}


@pytest.mark.parametrize(
    ("prediction", "exact", "holds"),
    [
        ("the Côte d'Ivoire.", True, True),
        ("Ivory  coast", True, True),
        ("Ivory Coast, of course", False, True),
        ("Ivory Coastline", False, False),  # whole words only
        ("In Ivory Coast", False, True),
        ("", False, False),
        ("the", False, False),
    ],
)
def test_exact_match_takes_any_alias_and_a_text_holds_whole_words_only(prediction, exact, holds):
    answers = ["Côte d'Ivoire", "Ivory Coast", "?"]
    assert exact_match(prediction, answers) is exact
    assert holds_answer(prediction, answers) is holds


def test_an_answer_that_normalises_to_nothing_is_compared_as_it_is_and_never_to_nothing():
    assert exact_match("the the", ["The The"])
    assert not exact_match("", ["The The"]) and not exact_match("A", ["The The"]) and not exact_match("", [])


def test_words_are_compared_in_their_dictionary_form():
    lemmatizer = load_lemmatizer()
    for prediction, answer in (("Cities", "the city"), ("red wolves", "Red Wolf"), ("children", "child.")):
        assert lemmatised_match(prediction, ["nothing of it", answer], lemmatizer)
    for prediction, answer in (("Paris", "Rome"), ("city", "city hall"), ("", "city")):
        assert not lemmatised_match(prediction, ["nothing of it", answer], lemmatizer)


@pytest.mark.parametrize(("right", "n"), [(0, 6), (59, 59), (15, 20), (320, 500)])
def test_at_the_bounds_of_an_accuracy_the_observed_number_has_a_tail_of_2_5_percent(right, n):
    from scipy.stats import binom

    value, low, high, total = accuracy([True] * right + [False] * (n - right)).values()
    assert (value, total) == (right / n, n)
    assert low == 0 if right == 0 else binom.sf(right - 1, n, low) == pytest.approx(0.025)
    assert high == 1 if right == n else binom.cdf(right, n, high) == pytest.approx(0.025)


def test_the_interval_of_a_difference_is_that_of_all_resamples_of_five_questions():
    one, other = scored([1, 1, 1, 1, 0]), scored([0, 1, 0, 0, 1])
    gaps = [1, 0, 1, 1, -1]
    means = [sum(resample) / 5 for resample in itertools.product(gaps, repeat=5)]  # all 3125, equally likely
    result = paired(one, other)
    low, high = np.quantile(means, [0.025, 0.975])
    assert result["difference"] == pytest.approx({"value": 0.4, "low": low, "high": high, "n": 5})
    shuffled = dict(sorted(other.items(), reverse=True))  # pairs are made by id
    assert paired(one, shuffled) == result


@pytest.mark.parametrize("n", [1, 59])
def test_the_interval_of_equal_differences_allows_for_questions_that_were_not_seen(n):
    bound = accuracy([False] * n)["high"]
    alike = paired(scored([1] * n), scored([1] * n))["difference"]
    assert alike == pytest.approx({"value": 0.0, "low": -bound, "high": bound, "n": n})
    assert paired(scored([1] * n), scored([0] * n))["difference"]["low"] == pytest.approx(1 - 2 * bound)


@pytest.mark.parametrize(
    ("only_one", "only_other", "p"),
    [
        (5, 1, 14 / 64),  # 2 (C(6,0) + C(6,1)) / 2^6 = 2 (1 + 6) / 64
        (3, 3, 1.0),  # 2 (1 + 6 + 15 + 20) / 64 is above 1
        (0, 0, 1.0),
    ],
)
def test_mcnemar_by_hand(only_one, only_other, p):
    one = scored([1] * 4 + [1] * only_one + [0] * only_other + [0] * 7)
    other = scored([1] * 4 + [0] * only_one + [1] * only_other + [0] * 7)
    counts = {"both": 4, "only_one": only_one, "only_other": only_other, "neither": 7}
    assert paired(one, other)["mcnemar"] == pytest.approx(counts | {"p": p})


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
@settings(max_examples=30)
def test_exchanging_the_methods_turns_the_difference_round_and_leaves_p(pairs):
    one, other = (scored(correct) for correct in zip(*pairs, strict=True))
    forth, back = paired(one, other), paired(other, one)
    value, low, high, _ = forth["difference"].values()
    gap = accuracy(one.values())["value"] - accuracy(other.values())["value"]
    assert value == pytest.approx(-back["difference"]["value"]) == pytest.approx(gap)
    assert low - 1e-9 <= value <= high + 1e-9
    assert forth["mcnemar"]["p"] == back["mcnemar"]["p"]


def test_summary_and_comparison_by_hand():
    def file(name, correct):
        rows = [
            {"id": str(n), "relation": "ab"[n % 2], "answers": ["cities"], "prediction": "city" if ok else "town"}
            for n, ok in enumerate(correct)
        ]
        return judged(Answers(Path(name), [*rows, rows[0] | {"id": "open", "answers": []}], {}), load_lemmatizer())

    one, other = file("one", [1, 1, 1, 0, 1, 0, 1, 1]), file("other", [1, 0, 0, 1, 0, 0, 1, 0])
    assert summary(one)["accuracy"]["value"] == 0.0  # "city" is not "cities" ...
    lemmatised = summary(one, True)  # ... but a form of it
    assert (lemmatised["accuracy"]["value"], lemmatised["n"], lemmatised["without_answers"]) == (6 / 8, 8, 1)
    assert lemmatised["by_relation"]["b"]["value"] == 2 / 4
    result = comparison(one, other, True)
    assert result["difference"]["value"] == 3 / 8
    assert (result["mcnemar"]["only_one"], result["mcnemar"]["only_other"]) == (4, 1)
    other.rows[0]["answers"] = ["villages"]
    with pytest.raises(DataError, match="has different accepted answers"):
        comparison(one, other)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (paired, ({"0": True, "1": True}, {"0": True, "2": True}), "2 have one answer only, such as '1'"),
        (paired, ({}, {}), "there is no question to score"),
        (load_lemmatizer, ("spacy",), "the lemmatiser is 'spacy'; choose one of simplemma, spacy:MODEL"),
        (load_lemmatizer, ("simplemma",), r'pip install "labkit-bidirectional\[lab\]"'),
        (load_lemmatizer, ("spacy:en_core_web_sm",), "pip install spacy"),
    ],
)
def test_invalid_input_and_missing_packages_are_refused(call, arguments, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "simplemma", None)
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises((DataError, ModelError), match=message):
        call(*arguments)
