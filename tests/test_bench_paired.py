"""Scores as ratios of sums, and the interval of a difference: against other implementations and planted effects."""

from dataclasses import replace

import numpy as np
import pytest

from labkit.bench.paired import Counted, contrast, counted, difference, mean, where_counted
from labkit.datasets.embedded import read
from labkit.datasets.tags import to_bio
from labkit.errors import DataError
from labkit.tasks import ner, ner_counts, qa, qa_scores
from labkit.viz.intervals import student_t


def runs(chances, seeds=5, examples=300, group=1, rng=None, shift=0.0):
    """Right or wrong by the chance of each example, the same for all seeds but for a shift of each seed."""
    rng = rng or np.random.default_rng(0)
    per_seed = rng.normal(0, shift, size=(seeds, 1))
    right = rng.random((seeds, examples)) < np.clip(chances + per_seed, 0, 1)
    ids = tuple(str(i) for i in range(examples))
    return Counted(
        tuple(range(seeds)), right.astype(float), np.ones_like(right, float), np.arange(examples) // group, ids
    )


def test_counts_of_entities_add_up_to_the_f1_of_seqeval():
    sentences = read("ner", "field-notes", "dev")[:60]
    rng = np.random.default_rng(1)
    tags = ["O", "B-PER", "I-PER", "B-ORG", "B-LOC", "I-LOC"]
    said = [
        to_bio([t if rng.random() < 0.8 else str(rng.choice(tags)) for t in each.tags], "BIO") for each in sentences
    ]
    tagged = [
        ner.Tagged(each.id, tuple(s), tuple(s), (None,) * len(s), tuple(ner.entities_in(each.spans, s)), ())
        for each, s in zip(sentences, said, strict=True)
    ]
    lines = ner_counts.judged(sentences, tagged)
    expected = ner.scores(sentences, said)
    assert counted({0: lines}, "ner").scores[0] == pytest.approx(expected["f1"], abs=1e-12)
    for kind, of_kind in expected["by_kind"].items():
        assert counted({0: lines}, "ner", kind).scores[0] == pytest.approx(of_kind["f1"], abs=1e-12)


def test_lines_of_questions_have_the_official_scores_as_their_means():
    questions = read("qa", "field-notes", "dev")[:50]
    rng = np.random.default_rng(2)
    said = []
    for each in questions:
        text = each.answers[0].text if each.answers and rng.random() < 0.5 else " ".join(each.context.split()[:3])
        said.append(qa.Prediction(each.id, text if rng.random() < 0.8 else "", 0, 0, 1.0, (), 0.0))
    lines, expected = qa_scores.judged(questions, said), qa_scores.scores(questions, said)
    for name in ("f1", "exact_match"):
        assert np.mean([line[name] for line in lines]) == pytest.approx(expected[name])
    assert 100 * counted({3: lines}, "qa").scores[0] == pytest.approx(expected["f1"])
    assert all((line["position"] is None) == (not line["answerable"]) for line in lines)


@pytest.mark.end_to_end
def test_a_planted_effect_is_found_with_its_size():
    rng = np.random.default_rng(3)
    hard = rng.random(600) * 0.6
    found = difference(runs(hard + 0.2, examples=600, rng=rng), runs(hard, examples=600, rng=rng))
    assert found.differs and found.low < 0.2 < found.high and found.high - found.low < 0.12
    assert found.mean == pytest.approx(0.2, abs=0.05)


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("seeds", "groups", "size", "own", "most"),
    [(5, 120, 1, 0.0, 15), (3, 30, 4, 0.0, 15), (3, 12, 25, 0.3, 15), (5, 36, 3, 0.3, 15), (5, 4, 50, 0.3, 15)],
)
def test_a_planted_null_is_not_found_more_often_than_chance_allows(seeds, groups, size, own, most):
    """Two arms that are as good as each other on texts of this kind; `own`: how far they differ from group to group."""
    rng = np.random.default_rng(4)
    false = 0
    for _ in range(150):
        hard = rng.random(groups)  # what is hard in a group is hard for both arms
        one, other = (
            runs(np.repeat(hard + rng.normal(0, own, groups), size), seeds, groups * size, size, rng, shift=0.05)
            for _ in range(2)
        )
        false += difference(one, other, draws=400).differs
    assert false <= most  # of 150; 5 % are 7.5, and 15 or fewer come up with a chance of 99.5 %


def test_an_interval_is_made_of_texts_and_of_seeds():
    """Where the seeds agree to the letter only the texts are left, and where all texts are alike only the seeds."""
    rng = np.random.default_rng(6)
    same = np.repeat(runs(rng.random(200), seeds=1, examples=200, rng=rng).above, 5, axis=0)
    ids, ones = tuple(map(str, range(200))), np.ones((5, 200))
    agreed = difference(
        Counted(tuple(range(5)), same, ones, np.arange(200), ids),
        Counted(tuple(range(5)), np.roll(same, 1, axis=1), ones, np.arange(200), ids),
    )
    assert agreed.of_seeds == 0 and agreed.of_texts == pytest.approx((agreed.high - agreed.low) / 2, rel=1e-6)
    alike = np.repeat(rng.random((5, 1)), 200, axis=1)
    by_seed = difference(
        Counted(tuple(range(5)), alike, ones, np.arange(200), ids),
        Counted(tuple(range(5)), alike * 0, ones, np.arange(200), ids),
    )
    assert by_seed.of_texts == pytest.approx(0, abs=1e-12)
    assert by_seed.of_seeds == pytest.approx(
        mean(Counted(tuple(range(5)), alike, ones, np.arange(200), ids)).high - by_seed.mean, rel=0.1
    )


def test_an_interval_for_several_at_once_is_wider():
    rng = np.random.default_rng(7)
    one, other = (runs(rng.random(300), rng=rng) for _ in range(2))
    alone, among = (difference(one, other, together=count, draws=20_000) for count in (1, 10))
    assert (alone.low_together, alone.high_together) == (alone.low, alone.high)
    assert (among.low, among.high) == (alone.low, alone.high)
    assert 1.2 < (among.high_together - among.low_together) / (alone.high - alone.low) < 2.2


@pytest.mark.parametrize(("groups", "together"), [(12, 10), (25, 13)])
def test_an_interval_for_several_at_once_is_as_sure_as_it_says_where_groups_are_few(groups, together):
    """As many texts that differ by a normal chance as there are groups: then the right interval is Student's."""
    gaps, seeds = np.random.default_rng(8).normal(0, 0.1, groups), 4
    one, other = (
        Counted(tuple(range(seeds)), np.tile(each, (seeds, 1)), np.ones((seeds, groups)), np.arange(groups), ids)
        for ids in [tuple(map(str, range(groups)))]
        for each in (gaps, gaps * 0)
    )
    found = difference(one, other, together=together)
    error = gaps.std(ddof=1) / groups**0.5
    for low, high, level in (("low", "high", 0.95), ("low_together", "high_together", 1 - 0.05 / together)):
        half = (getattr(found, high) - getattr(found, low)) / 2
        assert half == pytest.approx(student_t(groups - 1, level) * error, rel=0.06), level


def test_a_kind_is_measured_by_the_texts_in_which_it_stands():
    rng = np.random.default_rng(10)
    below = np.zeros((3, 60))
    below[:, :12] = 1.0  # of groups 0 to 3; the rest of them hold none
    one, other = (
        Counted((0, 1, 2), below * (rng.random((3, 60)) < 0.5), below, np.arange(60) // 4, tuple(map(str, range(60))))
        for _ in range(2)
    )
    found = where_counted([one, other])
    assert [len(each.ids) for each in found] == [12, 12] and set(found[0].groups) == {0, 1, 2}
    assert found[0].scores == pytest.approx(one.scores) and difference(*found).mean == difference(one, other).mean
    half, all_ = (each.high - each.low for each in (difference(*found), difference(one, other)))
    assert half > 1.3 * all_  # Student's t of 3 groups, and not of 15
    below[:, 12] = 1.0
    assert [len(each.ids) for each in where_counted([one, replace(other, below=below)])] == [16, 16]


@pytest.mark.end_to_end
def test_an_interval_does_not_hang_on_the_draws():
    rng = np.random.default_rng(9)
    one, other = (runs(np.full(300, chance), seeds=3, rng=rng, shift=0.05) for chance in (0.6, 0.5))
    found = [difference(one, other, together=20, seed=seed) for seed in range(4)]
    for low, high in (("low", "high"), ("low_together", "high_together")):  # with two degrees of freedom tails are long
        width = getattr(found[0], high) - getattr(found[0], low)
        for end in (low, high):
            assert np.ptp([getattr(each, end) for each in found]) < 0.01 * width


def test_of_texts_that_are_all_alike_an_interval_is_students():
    above = np.repeat(np.array([[0.5], [0.6], [0.9]]), 40, axis=1)
    one = Counted((0, 1, 2), above, np.ones_like(above), np.arange(40), tuple(map(str, range(40))))
    found = difference(one, replace(one, above=np.full_like(above, 0.5)), together=4)
    half = np.std([0.0, 0.1, 0.4], ddof=1) / 3**0.5
    for low, high, t in ((found.low, found.high, 4.302653), (found.low_together, found.high_together, 8.860229)):
        assert (high - low) / 2 == pytest.approx(t * half, rel=1e-5) and (high + low) / 2 == pytest.approx(1 / 6)
    assert found.of_texts == pytest.approx(0.0, abs=1e-12) and found.of_seeds == pytest.approx(
        4.302653 * half, rel=1e-5
    )


@pytest.mark.end_to_end
def test_a_difference_of_differences_is_found_where_there_is_one():
    rng = np.random.default_rng(8)
    low, high, higher = (runs(np.full(300, chance), rng=rng) for chance in (0.4, 0.5, 0.8))
    grown = contrast([(1, higher), (-1, low), (-1, high), (1, low)])
    assert grown.low > 0.2 and grown.mean == pytest.approx(difference(higher, high).mean)
    same = contrast([(1, higher), (-1, low), (-1, higher), (1, low)])
    assert same.mean == same.low == same.high == 0.0


def test_one_seed_has_a_difference_and_no_interval():
    one, other = runs(np.full(50, 0.9), seeds=1, examples=50), runs(np.full(50, 0.1), seeds=1, examples=50)
    found = difference(one, other)
    assert found.mean > 0.5 and found.low is None and not found.differs
    assert mean(one).low is None


def test_one_group_of_texts_has_a_difference_and_no_interval():
    rng = np.random.default_rng(9)
    one, other = (runs(np.full(50, chance), examples=50, group=50, rng=rng) for chance in (0.9, 0.1))
    found = difference(one, other)
    assert found.mean > 0.5 and found.low is None and found.seeds == 5


def test_groups_are_added_up_whatever_their_numbers_are():
    rng = np.random.default_rng(10)
    one, other = (runs(rng.random(60), examples=60, group=3, rng=rng) for _ in range(2))
    part = np.arange(60) >= 30  # groups 10 to 19 are left
    renumbered = [replace(each.only(part), groups=each.groups[part] - 10) for each in (one, other)]
    assert difference(one.only(part), other.only(part)) == difference(*renumbered)


def test_only_shared_seeds_are_compared():
    one, other = runs(np.full(80, 0.5), seeds=5, examples=80), runs(np.full(80, 0.5), seeds=3, examples=80)
    assert difference(one, other).seeds == 3


def test_arms_judged_on_other_examples_are_not_compared():
    with pytest.raises(DataError, match="different examples"):
        difference(runs(np.full(50, 0.5), examples=50), runs(np.full(60, 0.5), examples=60))


def test_the_interval_of_the_mean_is_students():
    above = np.array([[0.6], [0.7], [0.8]])
    found = mean(Counted((0, 1, 2), above, np.ones((3, 1)), np.zeros(1, int), ("a",)))
    assert found.mean == pytest.approx(0.7)
    assert found.high - found.mean == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)
