"""Scores of generated answers, against sums done by hand, enumerations and resampling written out."""

import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from labkit.datasets.paraphrases import ParaphrasedQuestion
from labkit.errors import DataError, ModelError
from labkit.fusion.scores import (
    Scored,
    accuracy,
    accuracy_by_relation,
    difference,
    exact_match,
    first_line,
    holds_answer,
    lemmatised_match,
    load_lemmatizer,
    macro_accuracy,
    mcnemar,
    score,
    starts_with_answer,
)


def scored(correct, relations=()):
    return Scored(tuple(str(i) for i in range(len(correct))), tuple(bool(each) for each in correct), tuple(relations))


def shared_out(both, only_one, only_other, neither):
    one = [1] * both + [1] * only_one + [0] * only_other + [0] * neither
    other = [1] * both + [0] * only_one + [1] * only_other + [0] * neither
    return scored(one), scored(other)


# ---- one answer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [(" Paris\nQuestion: ...", "Paris"), ("\n\n Paris \r\nLyon", "Paris"), ("Paris", "Paris"), (" \n ", ""), ("", "")],
)
def test_first_line_is_the_first_that_is_not_empty(text, line):
    assert first_line(text) == line


@pytest.mark.parametrize(
    ("prediction", "exact", "begins"),
    [
        ("the Côte d'Ivoire.", True, True),
        ("Ivory  coast", True, True),
        ("Ivory Coast, of course", False, True),
        ("Ivory Coastline", False, False),  # whole words only
        ("In Ivory Coast", False, False),
        ("Ivory", False, False),
        ("", False, False),
        ("the", False, False),
    ],
)
def test_exact_match_takes_any_alias_and_the_looser_rule_takes_what_begins_with_one(prediction, exact, begins):
    answers = ["Côte d'Ivoire", "Ivory Coast", "?"]
    assert exact_match(prediction, answers) is exact
    assert starts_with_answer(prediction, answers) is begins


def test_answer_that_normalises_to_nothing_is_compared_as_it_is_and_never_to_nothing():
    assert exact_match("the the", ["The The"])
    assert not exact_match("", ["The The"]) and not exact_match("A", ["The The"]) and not exact_match("", [])


@pytest.mark.parametrize(
    ("question", "holds"),
    [
        ("Joseph Wright of Derby died in ____.", True),
        ("Who works at the DERBY?", True),
        ("New-York style (derby).", True),
        ("Joseph Wright of Derbyshire died in ____.", False),  # whole words only
        ("Is Ivory from the Coast?", True),  # articles do not count in answers either
        ("Is the ivory coast there?", True),
        ("Is Ivory from another Coast?", False),
        ("What?", False),
    ],
)
def test_a_question_holds_an_answer_that_stands_in_it_in_whole_words(question, holds):
    assert holds_answer(question, ["Derby", "Ivory Coast", "from the coast", "?"]) is holds


def test_one_text_in_place_of_a_list_of_answers_is_refused():
    for match in (exact_match, starts_with_answer, holds_answer):
        with pytest.raises(DataError, match="the answers are one text, 'Paris'; give a list of texts"):
            match("P", "Paris")


words = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=12)


@given(words, st.lists(words, max_size=3))
def test_what_matches_exactly_matches_by_lemmas_and_loosely(prediction, answers):
    assume(prediction.strip())
    answers = [*answers, prediction.upper()]
    assume(exact_match(prediction, answers))  # not of all letters is the small one of the large one the same
    assert starts_with_answer(prediction, answers)
    assert lemmatised_match(prediction, answers, lambda text: [text[::-1]])


# ---- lemmas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "answer", "same"),
    [
        ("Cities", "the city", True),
        ("red wolves", "Red Wolf", True),
        ("children", "child.", True),
        ("Paris", "paris", True),
        ("Paris", "Rome", False),
        ("city", "city hall", False),
        ("", "city", False),
    ],
)
def test_words_are_compared_in_their_dictionary_form(prediction, answer, same):
    assert lemmatised_match(prediction, ["nothing of it", answer], load_lemmatizer()) is same


def test_missing_lemmatisers_are_named_with_their_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplemma", None)
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(ModelError, match=r'pip install "labkit-bidirectional\[fusion\]"'):
        load_lemmatizer()
    with pytest.raises(ModelError, match="pip install spacy"):
        load_lemmatizer("spacy:en_core_web_sm")
    for name in ("spacy", "porter", "simplemma:de"):
        with pytest.raises(DataError, match=f"the lemmatiser is '{name}'; choose one of simplemma, spacy:MODEL"):
            load_lemmatizer(name)


# ---- all answers ---------------------------------------------------------------------------------------------------

QUESTIONS = [
    ParaphrasedQuestion("fr", ("q",), ("Paris",), "capital"),
    ParaphrasedQuestion("jp", ("q",), ("Tokyo", "Edo"), "capital"),
]


def test_score_judges_each_question_by_its_prediction_whatever_their_order():
    result = score(QUESTIONS, {"jp": "edo", "fr": "Lyon"})
    assert result == Scored(("fr", "jp"), (False, True), ("capital", "capital"))
    assert score(QUESTIONS, {"jp": "Edo or so", "fr": "Lyon"}, starts_with_answer).correct == (False, True)


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        ({"fr": "Paris"}, "question 'jp' has no prediction"),
        ({"fr": "Paris", "jp": "Tokyo", "de": "Berlin"}, "question 'de' has a prediction but was not asked"),
    ],
)
def test_score_needs_one_prediction_for_each_question(predictions, message):
    with pytest.raises(DataError, match=message):
        score(QUESTIONS, predictions)
    with pytest.raises(DataError, match="there is no question to score"):
        score([], {})
    with pytest.raises(DataError, match="question 'fr' was scored twice"):
        Scored(("fr", "jp", "fr"), (True, True, True))


def binomial_quantile(n, share, level):
    """The smallest k / n whose cumulative probability reaches the level: what a bootstrap of shares tends to."""
    total = 0.0
    for k in range(n + 1):
        total += math.comb(n, k) * share**k * (1 - share) ** (n - k)
        if total >= level:
            return k / n
    return 1.0


@pytest.mark.parametrize(("right", "n"), [(15, 20), (3, 50), (320, 500)])
def test_interval_of_accuracy_is_that_of_all_resamples(right, n):
    result = accuracy(scored([1] * right + [0] * (n - right)), draws=40_000)
    assert result.value == right / n and result.n == n
    assert result.low == pytest.approx(binomial_quantile(n, right / n, 0.025), abs=1.01 / n)
    assert result.high == pytest.approx(binomial_quantile(n, right / n, 0.975), abs=1.01 / n)


def test_interval_of_a_difference_is_that_of_all_resamples_of_five_questions():
    one, other = scored([1, 1, 1, 1, 0]), scored([0, 1, 0, 0, 1])
    gaps = [1, 0, 1, 1, -1]
    means = [sum(resample) / 5 for resample in itertools.product(gaps, repeat=5)]  # all 3125, equally likely
    result = difference(one, other, draws=100_000)
    assert result.value == pytest.approx(0.4)
    assert (result.low, result.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))


def test_pairing_is_by_id_and_narrows_the_difference():
    rng = np.random.default_rng(0)
    one = rng.random(400) < 0.5
    other = np.where(rng.random(400) < 0.05, ~one, one)  # the same answers but for a few
    first, second = scored(one), scored(other)
    shuffled = rng.permutation(400)
    moved = Scored(*(tuple(values[i] for i in shuffled) for values in (second.ids, second.correct)))
    assert difference(first, moved) == difference(first, second)
    paired, apart = difference(first, second), accuracy(first)
    assert paired.high - paired.low < 0.6 * (apart.high - apart.low)


@pytest.mark.parametrize("n", [1, 5, 59])
def test_interval_of_answers_that_are_all_alike_is_not_without_width(n):
    """By the definition of the exact bound: with a share of `bound` of others, n alike would have a chance of 2.5 %."""
    bound = accuracy(scored([0] * n)).high
    assert (1 - bound) ** n == pytest.approx(0.025)
    assert accuracy(scored([0] * n)).low == 0.0
    assert (accuracy(scored([1] * n)).low, accuracy(scored([1] * n)).high) == pytest.approx((1 - bound, 1.0))
    alike = difference(scored([1] * n), scored([1] * n))
    assert (alike.value, alike.low, alike.high) == pytest.approx((0.0, -bound, bound))
    assert difference(scored([1] * n), scored([0] * n)).low == pytest.approx(1 - 2 * bound)


def test_accuracy_by_relation_and_its_macro_average_by_hand():
    some = scored([1, 1, 1, 0, 0, 0, 1, 0], ["b", "b", "b", "b", "a", "a", "a", "c"])
    by_relation = accuracy_by_relation(some)
    assert list(by_relation) == ["a", "b", "c"]
    assert [each.value for each in by_relation.values()] == pytest.approx([1 / 3, 3 / 4, 0])
    assert [each.n for each in by_relation.values()] == [3, 4, 1]
    assert accuracy(some).value == 1 / 2
    assert macro_accuracy(some).value == pytest.approx((1 / 3 + 3 / 4) / 3)
    assert macro_accuracy(some).n == 8


def test_interval_of_the_macro_average_is_that_of_drawing_relations_and_then_questions():
    rng = np.random.default_rng(1)
    groups = [rng.random(size) < share for size, share in ((8, 0.2), (30, 0.9), (15, 0.5), (15, 0.6), (4, 0.3))]
    means = []
    for _ in range(4000):  # the two draws written out
        drawn = [groups[i] for i in rng.integers(5, size=5)]
        means.append(np.mean([group[rng.integers(len(group), size=len(group))].mean() for group in drawn]))
    relations = [f"r{number}" for number, group in enumerate(groups) for _ in group]
    result = macro_accuracy(scored(np.concatenate(groups), relations), draws=20_000)
    assert (result.low, result.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.02)


# ---- McNemar -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only_one", "only_other", "p"),
    [
        (5, 1, 14 / 64),  # 2 (C(6,0) + C(6,1)) / 2^6 = 2 (1 + 6) / 64
        (2, 8, 112 / 1024),  # 2 (1 + 10 + 45) / 1024
        (10, 0, 2 / 1024),
        (1, 0, 1.0),
        (3, 3, 1.0),  # 2 (1 + 6 + 15 + 20) / 64 is above 1
        (0, 0, 1.0),
    ],
)
def test_mcnemar_by_hand(only_one, only_other, p):
    result = mcnemar(*shared_out(4, only_one, only_other, 7))
    assert (result.both, result.only_one, result.only_other, result.neither) == (4, only_one, only_other, 7)
    assert result.p == pytest.approx(p)


pairs = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40)


@given(pairs)
@settings(max_examples=50)
def test_exchanging_the_methods_turns_the_difference_round_and_leaves_p(pairs):
    one, other = (scored(each) for each in zip(*pairs, strict=True))
    forth, back = difference(one, other), difference(other, one)
    assert forth.value == pytest.approx(-back.value) == pytest.approx(accuracy(one).value - accuracy(other).value)
    assert forth.low - 1e-9 <= forth.value <= forth.high + 1e-9
    assert mcnemar(one, other).p == mcnemar(other, one).p


def test_methods_on_other_questions_are_not_compared():
    for compare in (difference, mcnemar):
        with pytest.raises(DataError, match="2 have one answer only, such as '1'; compare them on the same set"):
            compare(Scored(("0", "1"), (True, True)), Scored(("0", "2"), (True, True)))
