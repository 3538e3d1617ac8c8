"""The rows of a pretraining: every token once a pass, in pieces that grow, some of them a passage said again."""

from __future__ import annotations

import math
import random

import pytest
import torch

from labkit.objectives import Collator
from labkit.pretraining_rows import Curriculum, in_pieces, row_maker

LINE = torch.arange(1000, 1337)  # every token is its own position


def plain_rows(length: int, seed: int = 3):
    return row_maker(LINE, Curriculum(10**6, length), seed)


def repeating(length: int, share: float = 1.0, rows: int = 10**6):
    """Rows of which this share repeats; it falls over `rows`."""
    return row_maker(LINE, Curriculum(rows, length, repeats=share), 3)


@pytest.mark.parametrize("length", [2, 8, 31, 32, 168, 336])
def test_each_pass_sees_every_token_once_but_for_the_ends(length):
    make, per_pass = plain_rows(length), 336 // length
    for number in range(4):
        rows = torch.stack([make(number * per_pass + k) for k in range(per_pass)])
        assert rows.shape == (per_pass, length)
        assert bool((rows.diff(dim=1) == 1).all())  # a stretch of the text
        seen = rows.flatten().sort().values
        assert len(seen.unique()) == len(seen)
        assert int(seen[-1] - seen[0]) == len(seen) - 1  # all but what is left at the ends,
        assert 337 - len(seen) <= length  # less than a row and one token


def test_each_pass_cuts_elsewhere_and_goes_in_another_order():
    make = plain_rows(32)
    starts = [[int(make(number * 10 + k)[0]) for k in range(10)] for number in range(12)]
    assert len({min(each) for each in starts}) > 5
    assert len({tuple(sorted(range(10), key=each.__getitem__)) for each in starts}) == 12


@pytest.mark.parametrize(
    "curriculum", [Curriculum(40, 32), Curriculum(40, 32, repeats=0.8), Curriculum(40, 32, first_length=8, repeats=0.8)]
)
def test_row_k_depends_on_the_seed_and_on_k_alone(curriculum):
    in_order = row_maker(LINE, curriculum, 3)
    expected = [in_order(k) for k in range(40)]
    another = row_maker(LINE, curriculum, 3)
    torch.manual_seed(9)
    for k in random.Random(0).sample(range(40), 40):
        assert torch.equal(another(k), expected[k])
        assert torch.equal(row_maker(LINE, curriculum, 3)(k), expected[k])
    other_seed = row_maker(LINE, curriculum, 4)
    assert sum(torch.equal(other_seed(k), expected[k]) for k in range(40)) < 10


def said_again(row: torch.Tensor) -> int | None:
    """The length of the passage that `row` says over and over; None if of none."""
    lengths = range(1, len(row) // 2 + 1)
    return next((n for n in lengths if torch.equal(row[:n].repeat(len(row) // n + 1)[: len(row)], row)), None)


def test_about_the_share_asked_for_says_a_passage_again_half_of_them_passages_of_the_text():
    rows = 600
    plain, make = plain_rows(96), repeating(96, 0.3)
    again = {k: length for k in range(rows) if (length := said_again(make(k)))}
    assert abs(len(again) - 0.3 * rows) < 4 * math.sqrt(rows * 0.3 * 0.7)
    assert all(torch.equal(make(k), plain(k)) for k in range(rows) if k not in again)
    assert 4 <= min(again.values()) < 8 and 32 < max(again.values()) <= 36  # from 4 tokens to 3/8 of the row
    of_the_text = sum(torch.equal(make(k)[:length], plain(k)[:length]) for k, length in again.items())
    assert abs(of_the_text - len(again) / 2) < 4 * math.sqrt(len(again) / 4)
    assert all(bool(torch.isin(make(k), LINE).all()) for k in again)  # tokens that occur in the text, and no others


def test_a_passage_said_again_is_no_longer_than_64_tokens():
    make = repeating(300)
    assert max(said_again(make(k)) for k in range(60)) <= 64


def test_rows_that_repeat_grow_fewer_and_a_tenth_of_their_share_remains():
    plain, make = plain_rows(32), repeating(32, 1.0, rows=2000)
    again = [not torch.equal(make(k), plain(k)) for k in range(3000)]
    for first, share in ((0, 0.95), (450, 0.5), (1000, 0.1), (2900, 0.1)):
        count = sum(again[first : first + 100])
        assert abs(count - 100 * share) < 4 * math.sqrt(100 * share * (1 - share)) + 1, first


@pytest.mark.parametrize(("repeats", "share"), [(0.0, 0), (1.0, 50)])
def test_no_row_or_every_row_repeats_at_the_ends_of_the_range(repeats, share):
    make = repeating(32, repeats)
    assert sum(said_again(make(k)) is not None for k in range(50)) == share


def test_a_row_of_two_tokens_can_repeat():
    assert repeating(2)(0).shape == (2,)


@pytest.mark.parametrize(
    ("context", "first", "stages"),
    [
        (512, 64, [(0, 64), (499, 64), (500, 128), (649, 128), (650, 256), (799, 256), (800, 512), (999, 512)]),
        (100, 30, [(0, 30), (499, 30), (500, 60), (799, 60), (800, 100), (999, 100)]),  # 30, 60, and then all
        (64, 32, [(0, 32), (799, 32), (800, 64)]),  # one doubling: there is nothing between
        (64, 64, [(0, 64), (999, 64)]),
        (64, None, [(0, 64), (999, 64)]),
    ],
)
def test_pieces_grow_from_the_first_length_to_the_whole_row(context, first, stages):
    curriculum = Curriculum(1000, context, first)
    assert [(row, curriculum.length(row)) for row, _ in stages] == stages
    lengths = [curriculum.length(row) for row in range(1000)]
    assert lengths == sorted(lengths)


def test_each_piece_by_itself_is_the_text_or_a_passage_said_again():
    make = row_maker(LINE, Curriculum(1000, 96, first_length=24, repeats=0.9), 3)
    pieces = [piece for k in range(50) for piece in make(k).split(24)]
    again = [said_again(piece) is not None for piece in pieces]
    as_it_is = [bool((piece.diff() == 1).all()) for piece in pieces]
    assert all(a != b for a, b in zip(again, as_it_is, strict=True))
    assert 0.75 < sum(again) / 200 < 0.97


def test_a_batch_holds_the_rows_pieces_in_order_and_every_token_once():
    curriculum = Curriculum(100, 32, first_length=8)
    rows = [{"row": k, "ids": torch.arange(32) + 100 * k} for k in (3, 4)]
    batch = in_pieces(Collator("next", pad_id=1, seed=0), curriculum)(rows)
    assert batch["input_ids"].shape == (8, 8)
    assert torch.equal(batch["input_ids"].flatten(), torch.cat([row["ids"] for row in rows]))
    assert bool(batch["attention_mask"].all())
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])  # no piece is asked for the next one's
    late = in_pieces(Collator("next", pad_id=1, seed=0), curriculum)([row | {"row": 99} for row in rows])
    assert late["input_ids"].shape == (2, 32)


def test_a_batch_over_the_border_of_two_stages_takes_the_shorter_pieces():
    curriculum = Curriculum(100, 32, first_length=8)
    assert (curriculum.length(49), curriculum.length(50)) == (8, 16)
    rows = [{"row": k, "ids": torch.arange(32)} for k in (50, 49)]
    assert in_pieces(lambda pieces: [len(p["ids"]) for p in pieces], curriculum)(rows) == [8] * 8
