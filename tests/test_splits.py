"""Held-out parts and folds: no group on two sides, nothing lost, even parts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.datasets.examples import Labelled
from labkit.datasets.splits import folds, held_out, sides
from labkit.errors import DataError


def examples(groups: list[str]) -> list[Labelled]:
    return [Labelled(f"e{k}", f"text {k}", "a", group) for k, group in enumerate(groups)]


GROUPS = st.lists(st.sampled_from(["", *"abcdefghij"]), min_size=12, max_size=80)


@given(GROUPS, st.integers(2, 5), st.floats(0.05, 0.5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_no_group_is_on_two_sides_no_example_is_lost_and_their_order_does_not_matter(groups, k, share, seed, rng):
    everything = examples([*groups, *"klmno"])
    mixed = rng.sample(everything, len(everything))
    for divide, size in ((folds, k), (held_out, share)):
        parts = divide(everything, size, seed)
        assert all(parts)
        assert sorted((e for part in parts for e in part), key=lambda e: int(e.id[1:])) == everything
        names = [{example.group or example.id for example in part} for part in parts]
        assert sum(map(len, names)) == len(set().union(*names))
        assert [set(part) for part in parts] == [set(part) for part in divide(mixed, size, seed)]


@pytest.mark.parametrize("groups", [["large"] * 900 + [""] * 100, ["large"] * 990 + ["small"] * 10])
def test_a_large_group_is_not_held_out_where_a_small_one_can_be(groups):
    for seed in range(10):
        rest, held = held_out(examples(groups), 0.1, seed)
        assert 10 <= len(held) <= 110 and "large" not in {example.group for example in held}


def test_parts_are_as_even_as_the_groups_allow_and_depend_on_the_seed():
    passages = examples([f"passage {k // 4}" for k in range(400)])  # 100 passages of 4 questions
    assert [len(part) for part in folds(passages, 5, 0)] == [80] * 5 and folds(passages, 5, 0) != folds(passages, 5, 1)
    assert [len(part) for part in held_out(passages, 0.1, 0)] == [360, 40]
    uneven = examples([f"p{k}" for k, size in enumerate([9, 7, 5, 3, 3, 2, 1]) for _ in range(size)])
    assert [len(part) for part in folds(random.Random(1).sample(uneven, 30), 3, 0)] == [10, 10, 10]


@pytest.mark.parametrize(("divide", "size", "group"), [(held_out, 0.1, "p"), (folds, 5, "p"), (folds, 1, "")])
def test_what_cannot_be_divided_is_refused(divide, size, group):
    with pytest.raises(DataError, match="one group|folds of"):
        divide(examples([group] * 10), size, 0)


def test_runs_with_several_seeds_are_scored_on_the_same_examples():
    one, other = (sides("ner", max_train=9, max_eval=7, seed=seed) for seed in (0, 3))
    assert one[1:] == other[1:] and [len(side) for side in other] == [9, 7, 7]
    assert one[0] != other[0]
