"""Intervals of accuracies and differences, over questions and over relations, against resampling written out."""

from dataclasses import replace

import numpy as np
import pytest

from labkit.errors import DataError
from labkit.fusion import scores
from labkit.fusion.scores import Scored


def three_methods(n=300, seed=0):
    """One method and two others on the same questions, some hard for all; five relations of unlike size."""
    rng = np.random.default_rng(seed)
    ids = tuple(f"q{number}" for number in range(n))
    relations = tuple(f"r{int(r)}" for r in np.minimum(rng.geometric(0.4, n), 5))
    hard = rng.random(n)
    return [
        Scored(ids, tuple(bool(x) for x in 0.5 * hard + 0.5 * rng.random(n) < share), relations)
        for share in (0.6, 0.45, 0.5)
    ]


def test_the_difference_to_a_mean_has_the_interval_of_paired_questions():
    one, *others = three_methods()
    values = np.array(one.correct, dtype=float) - np.mean([each.correct for each in others], axis=0)
    found = scores.difference_to_mean(one, others)
    assert found.value == pytest.approx(values.mean()) and found.n == 300
    half = 1.96 * values.std() / np.sqrt(len(values))  # of a normal mean; the bootstrap must come near
    assert found.low == pytest.approx(values.mean() - half, abs=0.01)
    assert found.high == pytest.approx(values.mean() + half, abs=0.01)
    assert scores.difference_to_mean(one, others[:1]) == scores.difference(one, others[0])
    assert scores.mean_accuracy([one]) == scores.accuracy(one)
    assert scores.mean_accuracy(others).value == pytest.approx(np.mean([each.correct for each in others]))


def written_out(one, others, mean):
    """(gaps of each relation's questions, 95 % of `mean` of relations drawn and questions drawn within them)"""
    values = np.array(one.correct, dtype=float) - np.mean([each.correct for each in others], axis=0)
    groups = [values[np.array(one.relations) == name] for name in sorted(set(one.relations))]
    rng, means = np.random.default_rng(1), []
    for _ in range(2000):
        drawn = [groups[g] for g in rng.integers(len(groups), size=len(groups))]
        means.append(mean([rng.choice(group, len(group)) for group in drawn]))
    return groups, np.quantile(means, [0.025, 0.975])


def test_the_interval_over_relations_is_that_of_a_bootstrap_written_out():
    one, *others = three_methods()
    groups, (low, high) = written_out(one, others, lambda drawn: np.mean([group.mean() for group in drawn]))
    found = scores.macro_difference_to_mean(one, others)
    assert found.value == pytest.approx(np.mean([group.mean() for group in groups]))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)
    macro, mean = scores.macro_accuracy(one), scores.macro_mean_accuracy([one])
    assert (mean.value, mean.low, mean.high) == pytest.approx((macro.value, macro.low, macro.high), abs=0.02)


def test_the_interval_of_clustered_questions_is_that_of_a_bootstrap_written_out():
    one, *others = three_methods()
    _, (low, high) = written_out(one, others, lambda drawn: np.concatenate(drawn).mean())
    found = scores.clustered_difference_to_mean(one, others)
    assert found.value == scores.difference_to_mean(one, others).value  # each question counts alike
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)
    alone = scores.clustered_mean_accuracy([one])
    assert alone.value == scores.accuracy(one).value and alone.n == 300
    with pytest.raises(DataError, match="question 'q0' has no relation"):
        scores.clustered_difference_to_mean(replace(one, relations=()), others)


def test_a_large_relation_weighs_by_its_questions_and_not_as_one_of_five():
    """80 right in one relation, 5 wrong in each of four: a resample with k times the large one has 80 k right."""
    relations = ("large",) * 80 + tuple(f"r{number // 5}" for number in range(20))
    found = scores.clustered_mean_accuracy(
        [Scored(tuple(map(str, range(100))), (True,) * 80 + (False,) * 20, relations)]
    )
    times = np.random.default_rng(1).binomial(5, 1 / 5, size=20_000)
    shares = 80 * times / (80 * times + 5 * (5 - times))
    assert found.value == 0.8
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(shares, [0.025, 0.975])), abs=0.001)


def test_the_clustered_interval_is_that_of_relations_where_all_questions_of_one_agree():
    """20 relations of 5 alike questions are 20 observations, and not 100."""
    relations = tuple(f"r{number:02}" for number in range(20) for _ in range(5))
    ids = tuple(map(str, range(100)))
    right = Scored(ids, tuple(number < 10 for number in range(20) for _ in range(5)), relations)
    found, alone = scores.clustered_mean_accuracy([right]), scores.accuracy(right)
    half = 1.96 * 0.5 / 20**0.5
    assert found.value == 0.5 and (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.04)
    assert found.high - found.low > 2 * (alone.high - alone.low)
    single = Scored(ids, right.correct, ("r",) * 100)
    of_one, of_questions = scores.clustered_mean_accuracy([single]), scores.accuracy(single)
    assert (of_one.low, of_one.high) == pytest.approx((of_questions.low, of_questions.high), abs=0.02)


def test_scores_are_shared_by_the_questions_that_all_answered_in_one_order():
    one = Scored(("a", "b", "c"), (True, False, True), ("x", "y", "x"))
    other = Scored(("c", "d", "a"), (False, True, True), ("x", "z", "x"))
    first, second = scores.shared([one, other])
    assert (first.ids, first.correct, first.relations) == (("a", "c"), (True, True), ("x", "x"))
    assert (second.ids, second.correct) == (("a", "c"), (True, False))
    with pytest.raises(DataError, match="no question to score"):
        scores.shared([one, Scored(("z",), (True,))])
    with pytest.raises(DataError, match="question 'z' has no relation; scores per relation need one for each question"):
        scores.macro_mean_accuracy([Scored(("z",), (True,))])
