"""Orders of rows: every example once per pass, the same for everybody who asks, like lengths side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.tasks.order import length_grouped_order, shuffled_order, token_batches


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=300), batch=st.integers(1, 33), seed=st.integers(0, 5)
)
def test_every_pass_has_every_example_once(lengths, batch, seed):
    order = length_grouped_order(lengths, batch, seed)
    n = len(lengths)
    for number in range(3):
        assert sorted(order(k) for k in range(number * n, (number + 1) * n)) == list(range(n))


@pytest.mark.end_to_end
def test_a_row_is_the_same_in_whatever_order_rows_are_asked_for():
    lengths = [(7 * k) % 50 + 1 for k in range(203)]
    forward = [length_grouped_order(lengths, 8, 3)(k) for k in range(700)]
    backward = length_grouped_order(lengths, 8, 3)
    assert [backward(k) for k in reversed(range(700))] == forward[::-1]


def test_another_seed_and_another_pass_are_another_order():
    lengths = list(range(1, 101))
    order = length_grouped_order(lengths, 4, 0)
    first, second = ([order(k) for k in range(100 * e, 100 * e + 100)] for e in (0, 1))
    assert first != second
    assert first != [length_grouped_order(lengths, 4, 1)(k) for k in range(100)]


@pytest.mark.parametrize("batch", [4, 7, 16])
def test_batches_on_the_grid_save_nearly_all_padding_and_are_mixed(batch):
    lengths = [(37 * k) % 300 + 10 for k in range(1000)]

    def padded(order) -> int:
        rows = [lengths[order(k)] for k in range(3000)]
        return sum(max(rows[at : at + batch]) * len(rows[at : at + batch]) for at in range(0, 3000, batch))

    real = 3 * sum(lengths)
    waste = padded(length_grouped_order(lengths, batch, 0)) - real
    assert waste < 0.15 * (padded(shuffled_order(1000, 0)) - real)
    order = length_grouped_order(lengths, batch, 0)
    firsts = [lengths[order(k)] for k in range(0, 900, batch)]
    assert firsts != sorted(firsts) and max(firsts[: len(firsts) // 4]) > 200 > 100 > min(firsts[: len(firsts) // 4])


def test_fewer_examples_than_a_batch_are_no_trouble():
    order = length_grouped_order([3, 1, 2], 8, 0)
    for number in range(4):
        assert sorted(order(k) for k in range(3 * number, 3 * number + 3)) == [0, 1, 2]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 100), st.integers(0, 5))
def test_batches_of_tokens_hold_every_example_once_a_pass_and_no_more_tokens_than_fit(lengths, tokens, seed):
    batch, count = token_batches(lengths, tokens, seed)
    first = [batch(k) for k in range(count)]
    assert sorted(example for each in first for example in each) == list(range(len(lengths)))
    for each in first:
        assert len(each) == 1 or sum(lengths[example] for example in each) <= tokens
    for one, following in zip(first, first[1:], strict=False):  # none could have held one more
        assert sum(lengths[example] for example in one) + lengths[following[0]] > tokens
    assert [example for each in first for example in each] == [
        shuffled_order(len(lengths), seed)(k) for k in range(len(lengths))
    ]


def test_a_batch_of_tokens_is_the_same_whoever_asks_first():
    lengths = [3, 9, 4, 7, 5, 2, 8]
    in_turn, _ = token_batches(lengths, 12, 3)
    expected = [in_turn(k) for k in range(30)]
    assert [token_batches(lengths, 12, 3)[0](k) for k in (29, 3, 0, 17)] == [expected[k] for k in (29, 3, 0, 17)]
