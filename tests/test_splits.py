"""Holding out and folds: no group on two sides, nothing lost, even parts."""

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


@given(groups=GROUPS, k=st.integers(2, 5), seed=st.integers(0, 3))
def test_folds_are_disjoint_in_groups_and_lose_nothing(groups, k, seed):
    given = examples([*groups, *"klmno"])
    parts = folds(given, k, seed)
    assert len(parts) == k and all(parts)
    assert sorted(each.id for part in parts for each in part) == sorted(each.id for each in given)
    names = [{group_of(each) for each in part} for part in parts]
    assert sum(len(each) for each in names) == len(set().union(*names))


def test_folds_are_as_even_as_the_groups_allow():
    given = examples([f"passage {k // 4}" for k in range(400)])  # 100 passages of 4 questions
    assert [len(part) for part in folds(given, 5, 0)] == [80] * 5
    uneven = examples([f"p{k}" for k, size in enumerate([9, 7, 5, 3, 3, 2, 1]) for _ in range(size)])
    assert sorted(len(part) for part in folds(uneven, 3, 0)) == [10, 10, 10]


@given(groups=GROUPS, share=st.floats(0.05, 0.5), seed=st.integers(0, 3))
def test_what_is_held_out_shares_no_group_with_the_rest(groups, share, seed):
    given = examples([*groups, *"klmno"])
    rest, part = held_out(given, share, seed)
    assert rest and part
    assert not {group_of(each) for each in rest} & {group_of(each) for each in part}
    assert sorted(rest + part, key=lambda e: int(e.id[1:])) == given


def test_a_tenth_is_about_a_tenth():
    rest, part = held_out(examples([f"p{k // 4}" for k in range(400)]), 0.1, 0)
    assert len(part) == 40 and len(rest) == 360


def test_the_division_depends_on_the_seed_and_not_on_the_order_of_the_examples():
    given = examples([f"p{k // 3}" for k in range(90)])
    mixed = random.Random(1).sample(given, len(given))

    def named(parts):
        return [{each.id for each in part} for part in parts]

    assert named(folds(given, 4, 0)) == named(folds(mixed, 4, 0))
    assert named(folds(given, 4, 0)) != named(folds(given, 4, 1))
    assert named(held_out(given, 0.2, 0)) == named(held_out(mixed, 0.2, 0))


def test_what_cannot_be_divided_is_said():
    one = examples(["p"] * 10)
    with pytest.raises(DataError, match="all examples are of one group"):
        held_out(one, 0.1, 0)
    with pytest.raises(DataError, match="5 folds of 1 groups"):
        folds(one, 5, 0)
    with pytest.raises(DataError, match="1 folds of 10 groups"):
        folds(examples([""] * 10), 1, 0)
    with pytest.raises(DataError, match="share to hold out is 1.0"):
        held_out(examples([""] * 10), 1.0, 0)


def test_runs_of_several_seeds_are_judged_on_the_same_examples():
    one, other = (sides("ner", max_train=9, max_eval=7, seed=seed) for seed in (0, 3))
    assert one[1:] == other[1:] and [len(side) for side in other] == [9, 7, 7]
    assert one[0] != other[0]
