"""Held-out parts and folds: no group on two sides, nothing lost, even parts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.datasets.examples import Labelled
from labkit.datasets.sources import sides
from labkit.datasets.splits import folds, group_of, held_out
from labkit.errors import DataError


def examples(groups: list[str]) -> list[Labelled]:
    return [Labelled(f"e{k}", f"text {k}", "a", group) for k, group in enumerate(groups)]


GROUPS = st.lists(st.sampled_from(["", *"abcdefghij"]), min_size=12, max_size=80)


@given(groups=GROUPS, k=st.integers(2, 5), share=st.floats(0.05, 0.5), seed=st.integers(0, 3))
def test_no_group_is_on_two_sides_and_no_example_is_lost(groups, k, share, seed):
    everything = examples([*groups, *"klmno"])
    for parts in (folds(everything, k, seed), held_out(everything, share, seed)):
        assert all(parts)
        assert sorted((e for part in parts for e in part), key=lambda e: int(e.id[1:])) == everything
        names = [{group_of(example) for example in part} for part in parts]
        assert sum(map(len, names)) == len(set().union(*names))


def test_parts_are_as_even_as_the_groups_allow():
    passages = examples([f"passage {k // 4}" for k in range(400)])  # 100 passages of 4 questions
    assert [len(part) for part in folds(passages, 5, 0)] == [80] * 5
    assert [len(part) for part in held_out(passages, 0.1, 0)] == [360, 40]
    uneven = examples([f"p{k}" for k, size in enumerate([9, 7, 5, 3, 3, 2, 1]) for _ in range(size)])
    assert [len(part) for part in folds(uneven, 3, 0)] == [10, 10, 10]


def test_the_division_depends_on_the_seed_and_not_on_the_order_of_the_examples():
    everything = examples([f"p{k // 3}" for k in range(90)])
    mixed = random.Random(1).sample(everything, len(everything))

    def ids(parts):
        return [{example.id for example in part} for part in parts]

    assert ids(folds(everything, 4, 0)) == ids(folds(mixed, 4, 0)) != ids(folds(everything, 4, 1))
    assert ids(held_out(everything, 0.2, 0)) == ids(held_out(mixed, 0.2, 0))


@pytest.mark.parametrize(
    ("divide", "groups", "message"),
    [
        (lambda e: held_out(e, 0.1, 0), "p", "all examples are of one group"),
        (lambda e: held_out(e, 1.0, 0), "", "share to hold out is 1.0"),
        (lambda e: folds(e, 5, 0), "p", "5 folds of 1 groups"),
        (lambda e: folds(e, 1, 0), "", "1 folds of 10 groups"),
    ],
)
def test_a_division_that_is_not_possible_is_refused(divide, groups, message):
    with pytest.raises(DataError, match=message):
        divide(examples([groups] * 10))


def test_runs_with_several_seeds_are_scored_on_the_same_examples():
    one, other = (sides("ner", max_train=9, max_eval=7, seed=seed) for seed in (0, 3))
    assert one[1:] == other[1:] and [len(side) for side in other] == [9, 7, 7]
    assert one[0] != other[0]
