"""Scores as ratios of sums, and the interval of a difference: against other implementations and planted effects."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks.study import report
from benchmarks.study.report import Scores, difference, forest, judged, mean, table, to_markdown
from labkit.datasets.embedded import read
from labkit.datasets.examples import to_bio
from labkit.errors import DataError
from labkit.tasks import ner, qa, qa_scores


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def of(above, group=1):
    """Scores with the denominator 1 for each example; `group` examples are one group."""
    seeds, examples = above.shape
    ids = tuple(map(str, range(examples)))
    return Scores(above, np.ones_like(above), np.arange(examples) // group, ids, tuple(range(seeds)))


def runs(chances, rng, seeds=5, group=1, shift=0.0):
    """Right or wrong by the chance of each example, the same for all seeds but for a shift of each seed."""
    right = rng.random((seeds, len(chances))) < np.clip(chances + rng.normal(0, shift, size=(seeds, 1)), 0, 1)
    return of(right.astype(float), group)


def test_counts_of_entities_add_up_to_the_f1_of_seqeval(rng):
    sentences, tagged = read("ner", "field-notes", "dev")[:60], []
    tags = ["O", "B-PER", "I-PER", "B-ORG", "B-LOC", "I-LOC"]
    for sentence in sentences:
        predicted = to_bio([tag if rng.random() < 0.8 else str(rng.choice(tags)) for tag in sentence.tags])
        tagged.append(ner.Tagged(sentence.id, [], predicted, [None] * len(predicted)))
    scores = judged({0: ner.NamedEntities().judge(sentences, tagged)}, "ner").by_seed()
    expected = ner.scores(sentences, [prediction.tags for prediction in tagged])["f1"]
    assert scores[0] == pytest.approx(expected, abs=1e-12)


def test_judged_questions_have_the_official_f1_as_their_mean(rng):
    questions, predicted = read("qa", "field-notes", "dev")[:50], []
    for question in questions:
        is_right = question.answers and rng.random() < 0.5
        text = question.answers[0].text if is_right else " ".join(question.context.split()[:3])
        predicted.append(qa.Prediction(question.id, text if rng.random() < 0.8 else "", 0, 0, 1.0, (), 0.0))
    scores = judged({3: qa_scores.judged(questions, predicted)}, "qa").by_seed()
    assert 100 * scores[0] == pytest.approx(qa_scores.scores(questions, predicted)["f1"])


def test_a_planted_effect_is_measured_with_its_size(rng):
    difficulty = rng.random(600) * 0.6
    value, low, high = difference(runs(difficulty + 0.2, rng), runs(difficulty, rng))
    assert 0 < low < 0.2 < high and high - low < 0.15 and value == pytest.approx(0.2, abs=0.05)


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("seeds", "groups", "size", "own"), [(5, 120, 1, 0.0), (3, 30, 4, 0.0), (3, 12, 25, 0.3), (5, 4, 50, 0.3)]
)
def test_a_planted_null_is_not_significant_more_often_than_chance_allows(seeds, groups, size, own, monkeypatch, rng):
    """Two arms that are equally good on such examples; `own`: by how much they differ from group to group."""
    monkeypatch.setattr(report, "DRAWS", 400)
    false = 0
    for _ in range(150):
        chances = rng.random(groups)  # what is hard in a group is hard for both arms
        arms = [np.repeat(chances + rng.normal(0, own, groups), size) for _ in range(2)]
        _, low, high = difference(*(runs(arm, rng, seeds, size, shift=0.05) for arm in arms))
        false += low > 0 or high < 0
    assert false <= 15  # of 150; 5 % are 7.5, and 15 or fewer have a probability of 99.5 %


@pytest.mark.parametrize(("groups", "level"), [(12, 0.95), (12, 0.995), (25, 0.95)])
def test_where_only_examples_differ_the_interval_is_students_of_the_groups(groups, level):
    gaps = np.random.default_rng(8).normal(0, 0.1, groups)
    one, other = (of(np.tile(values, (4, 1))) for values in (gaps, gaps * 0))
    _, low, high = difference(one, other, level)
    expected = stats.t.interval(level, groups - 1, gaps.mean(), stats.sem(gaps))
    assert (high - low) / 2 == pytest.approx((expected[1] - expected[0]) / 2, rel=0.06)


@pytest.mark.parametrize("level", [0.95, 0.99])
def test_where_only_seeds_differ_the_interval_is_students_of_the_seeds(level):
    above = np.repeat(np.array([[0.5], [0.6], [0.9]]), 40, axis=1)
    value, *interval = difference(of(above), of(np.full_like(above, 0.5)), level)
    gaps = [0.0, 0.1, 0.4]
    assert interval == pytest.approx(list(stats.t.interval(level, 2, np.mean(gaps), stats.sem(gaps))), rel=1e-4)
    assert value == pytest.approx(1 / 6)


def test_the_interval_of_a_mean_is_students():
    value, low, high = mean(of(np.array([[0.6], [0.7], [0.8]])))
    assert value == pytest.approx(0.7) and high - value == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)
    assert value - low == pytest.approx(high - value)


def test_without_seeds_the_interval_is_for_examples(rng):
    right = (rng.random((1, 400)) < 0.3).astype(float)
    alone = replace(of(right), seeds=None)
    value, low, high = mean(alone)
    expected = stats.binomtest(int(right.sum()), 400).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.01) and value == right.mean()
    assert difference(alone, alone) == (0.0, None, None)  # nothing varies: not a certainty


def test_one_seed_or_one_group_has_no_interval(rng):
    for options in ({"seeds": 1}, {"group": 50}):
        one, other = (runs(np.full(50, chance), rng, **options) for chance in (0.9, 0.1))
        assert difference(one, other)[0] > 0.5 and difference(one, other)[1] is None


def test_only_shared_seeds_and_the_same_examples_are_compared(rng):
    one, other = runs(np.full(80, 0.5), rng), runs(np.full(80, 0.4), rng, seeds=3)
    assert difference(one, other) == difference(one.of([0, 1, 2]), other)
    with pytest.raises(DataError, match="different examples"):
        difference(one, runs(np.full(60, 0.5), rng))
    with pytest.raises(DataError, match="no seed in common"):
        difference(one, replace(other.of([0]), seeds=(9,)))


def test_the_table_and_the_forest_plot_have_the_planted_differences(rng):
    arms = {name: runs(np.full(300, chance), rng) for name, chance in [("a", 0.5), ("b", 0.8), ("c", 0.5)]}
    rows = table(arms, condition="planted").set_index("arm")
    assert rows.loc["b", "difference"] == pytest.approx(100 * difference(arms["b"], arms["a"])[0])
    assert rows.loc["b", "difference_low"] > 0 > rows.loc["c", "difference_low"]
    assert rows.loc["b", "all_low"] < rows.loc["b", "difference_low"]  # an interval for both differences is wider
    assert np.isnan(rows.loc["a", "difference"]) and list(rows["n_seeds"]) == [5, 5, 5]
    assert f"{rows.loc['b', 'difference']:+.1f} [" in to_markdown(rows.reset_index())
    (marks,) = forest(rows.reset_index(), "points", "a").data
    assert list(marks.x) == list(rows["difference"].dropna())
    assert list(marks.marker.symbol) == ["circle", "circle-open"]
    twice = pd.concat([table(arms, condition="planted", paraphrases=n) for n in (2, 5)])
    (marks,) = forest(twice, "points", "a").data
    assert len(set(marks.y)) == 4
