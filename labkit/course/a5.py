"""A5, fusion or future attention: what its checks ask, and what they say to typical mistakes."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.course.a5_toys import (
    FAULTS,
    LEAKS,
    WORDINGS,
    a_question,
    attend,
    counted_cost,
    drawn,
    engine,
    in_part,
    layout,
    leaf,
    likely_of_nan,
    losses_and_gradients,
    model,
    model_size,
    padded_caches,
    pair_of,
    side_by_side,
    softmax_over,
    some_lengths,
    squares_and_cosines,
    true_targets,
    two_groups,
)
from labkit.course.answers import Answer, Given
from labkit.course.exercises import Assignment
from labkit.course.mistakes import expect, expect_all, expect_equal, expect_number, expect_tensor
from labkit.course.variant import Variant

ASSIGNMENT = A5 = Assignment("a5", "Fusion or future attention", minutes=90)
fusion, future = partial(A5.exercise, track="fusion"), partial(A5.exercise, track="future")
hidden = partial(A5.also, hidden=True)
for made in (engine, model, leaf):
    A5.given(made.__name__)(made)
A5.observer("losses")(losses_and_gradients)

CELL = ("query", "key")


@A5.draws("wordings")
def wordings(variant: Variant) -> list[str]:
    return variant.choose("a5 wordings", WORDINGS)


@A5.draws("seed")
def seed(variant: Variant) -> int:
    return variant.choose("a5 seed", range(3, 13))


@A5.exercise("a5_segment_mask", "Blocks that do not meet", answer="segment_mask", points=3, difficulty=2, minutes=10)
def the_blocks(answer: Answer, variant: Variant) -> None:
    case = variant.whole("mask prefix", 2, 3), some_lengths(variant, "mask"), 3
    group, wanted, *_ = layout(*case)
    past, same, seen = torch.ones(wanted.shape).tril().bool(), group[:, None] == group, group == 0
    ends = (group == group.max())[:, None]
    suspects = {
        "Your segments see one another: this is the plain causal table.": past,
        "Your segments do not see the prefix. Everybody behind it may look at it.": past & (same | ends),
        "Your tail sees no segment. It is the place where all segments meet.": past & (same | seen),
        "Your tail sees the last segment alone.": past & (same | seen | ends & (group >= group.max() - 1)),
        "Your tokens see what comes later in their own block. Is it causal inside a block?": same | seen | ends,
        "Your tail sees its own future. It is text like the rest.": past & (same | seen) | ends,
        "This is the table turned over: rows are queries.": wanted.T,
    }
    expect_tensor(answer(*case), wanted, f"segment_mask{case}", suspects, names=CELL)


@hidden("a5_segment_mask", points=1)
def nothing_to_keep_apart(answer: Answer, variant: Variant) -> None:
    for case in ((0, [2, 3], 1), (2, [4], 2), (0, [3], 0)):
        expect_tensor(answer(*case), layout(*case)[1], f"segment_mask{case}", names=CELL)


@A5.exercise("a5_merge", "Two results, one softmax", answer="merged", points=3, difficulty=4, minutes=15)
def the_union(answer: Answer, variant: Variant) -> None:
    (one, a), (two, b), (wanted, total) = two_groups(variant, 1.0)
    share, heavier = (a / (a + b))[..., None], (a > b)[..., None]
    found = pair_of(answer((one, a), (two, b)))
    suspects = {
        "Your groups count alike. A group that weighed more before its softmax counts more.": (one + two) / 2,
        "You added the outputs. The weights of each sum to one, so those of both to two.": one + two,
        "Your shares are those of the logarithms, and a logarithm is no weight.": share * one + (1 - share) * two,
        "Your shares have changed places: the heavier group counts less.": one + two - wanted,
        "You took the heavier group alone, but the lighter one has a share, too.": torch.where(heavier, one, two),
    }
    expect_tensor(found[0], wanted, "the merged output", suspects, 1e-4)
    suspects = {
        "You added the logarithms, which multiplies what should be added.": a + b,
        "Your lse is the larger of the two. Both together weigh more than either.": torch.maximum(a, b),
        "Your lse is the mean of the two. Both together weigh more than either.": (a + b) / 2,
        "Your lse is the sum of the weights, without the logarithm.": total.exp(),
    }
    expect_tensor(found[1], total, "the merged lse", suspects, 1e-4)


@A5.also("a5_merge", points=1)
def large_scores(answer: Answer, variant: Variant) -> None:
    first, second, wanted = two_groups(variant, 1000.0)
    likely = "e to the 1000 is more than a number holds. Does anything but the distance of the two lse matter?"
    for found, right in zip(pair_of(answer(first, second)), wanted, strict=True):
        suspects = {likely: torch.where(torch.isfinite(found), right, found)} if isinstance(found, Tensor) else {}
        expect_tensor(found, right, "what is merged of large scores", suspects, 1e-3)


@hidden("a5_merge", points=2)
def a_group_without_keys(answer: Answer, variant: Variant) -> None:
    part = two_groups(variant, 1.0)[0]
    nothing = torch.zeros_like(part[0]), torch.full_like(part[1], -math.inf)
    likely = "Minus infinity less minus infinity is nan. What is the share of a group that weighs nothing?"
    for first, second, wanted in ((part, nothing, part), (nothing, part, part), (nothing, nothing, nothing)):
        for found, right in zip(pair_of(answer(first, second)), wanted, strict=True):
            suspects = {likely: torch.full_like(right, math.nan)}
            expect_tensor(found, right, "what is merged where a group has no key", suspects)


@fusion("a5_positions", "Each begins anew", answer="positions", points=3, difficulty=2, minutes=6)
def the_places(answer: Answer, variant: Variant) -> None:
    prefix, lengths, tail = case = variant.whole("places prefix", 2, 4), some_lengths(variant, "places"), 3

    def placed(starts: list[int], end: int) -> Tensor:
        blocks = [(0, prefix), *zip(starts, lengths, strict=True), (end, tail)]
        return torch.cat([torch.arange(start, start + length) for start, length in blocks])

    on, anew, total = [prefix + sum(lengths[:i]) for i in range(4)], [prefix] * 4, prefix + sum(lengths)
    suspects = {
        "Your positions go on along the row. Where would a segment stand if it were alone?": placed(on, total),
        "Your tail counts all segments before it, and these lie over one another.": placed(anew, total),
        "Your tail begins behind the last segment. A longer one reaches beyond.": placed(anew, prefix + lengths[-1]),
        "Your tail begins anew, too. It comes after the segments.": placed(anew, prefix),
        "Your segments begin at 0, where the prefix stands.": placed([0] * 4, max(lengths)),
    }
    expect_tensor(answer(*case), layout(*case)[2], f"positions{case}", suspects)
    for case in ((0, [2, 5, 3], 2), (3, [4], 1)):
        expect_tensor(answer(*case), layout(*case)[2], f"positions{case}")


@fusion("a5_key_bias", "N copies are one", answer="key_bias", points=2, difficulty=3, minutes=10)
def the_weight_of_copies(answer: Answer, variant: Variant) -> None:
    lengths = some_lengths(variant, "bias")
    group, _, _, wanted = layout(2, lengths, 3)
    segment, own = (wanted != 0).float(), math.log(1 / 4)
    suspects = {
        "Your copies weigh N times more, and should weigh less.": -wanted,
        "You add the weight itself. Scores are exponents: what must be added to multiply by 1/N?": segment / 4,
        "You bias all keys alike, and a softmax does not notice that.": torch.full_like(wanted, own),
        "Your prefix is biased, too. It is there once.": own * (group < group.max()),
        "Your tail is biased, too. It is there once.": own * (group > 0),
        "You count tokens. It is copies that are too many, however long.": -torch.tensor([1, *lengths, 1])[group].log(),
        "There is no bias: N copies shout the prefix down.": torch.zeros_like(wanted),
    }
    expect_tensor(answer(2, lengths, 3), wanted, f"key_bias(2, {lengths}, 3)", suspects)


@hidden("a5_key_bias", points=1)
def weights_of_your_own(answer: Answer, variant: Variant) -> None:
    weights, third = torch.tensor([2.0, 1.0, 5.0]), torch.full((3,), 1 / 3).log()
    suspects = {
        "Your weights do not sum to one: copies of one segment would not be one.": weights.log(),
        "Where do the weights enter?": third,
        "You passed the weights through a softmax. They are weights already.": weights.log_softmax(0),
    }
    suspects = {text: F.pad(each[[0, 0, 1, 2]], (1, 1)) for text, each in suspects.items()}
    wanted = F.pad((weights / 8).log()[[0, 0, 1, 2]], (1, 1))
    expect_tensor(answer(1, [2, 1, 1], 1, weights.tolist()), wanted, "key_bias(1, [2, 1, 1], 1, [2, 1, 5])", suspects)


@fusion("a5_two_ways", "Average or fuse", answer="two_ways", points=3, difficulty=4, minutes=14)
def both_answers(answer: Answer, variant: Variant) -> None:
    query, prefix, segments, readout = case = a_question(variant, [2, 4, 3], 2)
    everything = [torch.cat(each) for each in zip(prefix, *segments, strict=True)]
    alone = [attend(query, *map(torch.cat, zip(prefix, each, strict=True))) for each in segments]
    logits = torch.stack([output for output, _ in alone]) @ readout
    average = logits.mean(0)
    fused = torch.stack([lse for _, lse in alone]).softmax(0) @ logits  # an average, whose shares the query chooses
    found = pair_of(answer(*case))
    suspects = {
        "You averaged probabilities. It is logits that are averaged.": logits.softmax(-1).mean(0),
        "You took the highest logit of each word.": logits.amax(0),
        "You added the logits up.": logits.sum(0),
        "Your prompts have no prefix.": torch.stack([attend(query, *each)[0] for each in segments]).mean(0) @ readout,
        "Your two results have changed places.": fused,
    }
    expect_tensor(found[0], average, "the averaged logits", suspects, 1e-4)
    segments_only = [torch.cat(each) for each in zip(*segments, strict=True)]
    suspects = {
        "Your fused answer is the average once more. One softmax runs over all keys.": average,
        "In your softmax N segments, each at full weight, face one prefix.": attend(query, *everything)[0] @ readout,
        "Your fused answer has lost the prefix.": attend(query, *segments_only)[0] @ readout,
    }
    expect_tensor(found[1], fused, "the fused logits", suspects, 1e-4)


@hidden("a5_two_ways", points=1)
def copies_of_one_segment(answer: Answer, variant: Variant) -> None:
    query, prefix, (first, _), readout = a_question(variant, [3, 2], 2)
    wanted = attend(query, *map(torch.cat, zip(prefix, first, strict=True)))[0] @ readout
    for name, found in zip(("averaged", "fused"), pair_of(answer(query, prefix, [first] * 5, readout)), strict=True):
        expect_tensor(found, wanted, f"the {name} logits of five copies", about=1e-4)


@fusion("a5_joined_cache", "Caches side by side", answer="joined", points=3, difficulty=3, minutes=12)
def the_joined_cache(answer: Answer, variant: Variant) -> None:
    prefix, lengths = variant.whole("cache prefix", 2, 3), [3, 5, 2]
    keys, values = caches = padded_caches(variant, prefix, lengths)
    found = pair_of(answer(*caches, prefix, lengths))
    for name, cache, each in zip(("keys", "values"), (keys, values), found, strict=True):
        rows = list(zip(cache, lengths, strict=True))
        padded = torch.cat([cache[0, :, :prefix], *cache[:, :, prefix:]], dim=1)
        suspects = {
            "Your prefix is there once for every row. It is shared.": [row[:, : prefix + n] for row, n in rows],
            "Your pads are in it still: the rows have their own lengths.": [padded],
            "You cut each row as if it had no prefix.": [cache[0, :, :prefix], *(row[:, :n] for row, n in rows)],
            "You lost the prefix.": [row[:, prefix : prefix + n] for row, n in rows],
            "Your rows are mixed: a reshape alone takes heads for tokens.": [cache.reshape(2, -1, cache.shape[-1])],
        }
        suspects = {text: torch.cat(parts, dim=1)[None] for text, parts in suspects.items()}
        expect_tensor(each, side_by_side(cache, prefix, lengths), f"the joined {name}", suspects)


@hidden("a5_joined_cache", points=1)
def no_prefix_or_one_row(answer: Answer, variant: Variant) -> None:
    for prefix, lengths in ((0, [2, 4]), (2, [3])):
        caches = padded_caches(variant, prefix, lengths)
        for cache, each in zip(caches, pair_of(answer(*caches, prefix, lengths)), strict=True):
            what = f"joined, with a prefix of {prefix} and lengths {lengths},"
            expect_tensor(each, side_by_side(cache, prefix, lengths), what)


@fusion("a5_identity", "A test that can fail", answer="is_sound", points=3, difficulty=5, minutes=23)
def faulty_engines(answer: Answer, variant: Variant) -> None:
    _attack(answer, variant, "engine", ("right", "causal", "go on", "no bias", "last", "one more"), FAULTS)


@hidden("a5_identity", points=3)
def subtle_engines(answer: Answer, variant: Variant) -> None:
    _attack(answer, variant, "engine", ("right", "half", "first end", "longest", "sorted"), FAULTS)


@future("a5_columns", "Fewer at the end", answer="columns", points=3, difficulty=2, minutes=8)
def the_columns(answer: Answer, variant: Variant) -> None:
    n, dim = variant.whole("columns n", 6, 8), variant.whole("columns dim", 2, 3)
    table = torch.ones(n, n + 4)
    wanted = table.triu(1).tril(dim)
    suspects = {
        "Your columns end with the text: their number tells what is to come.": wanted * (torch.arange(n + 4) < n),
        "Your position has a column for itself, which it sees already.": table.triu().tril(dim - 1),
        "Yours are one too few: the position itself is not counted.": table.triu(1).tril(dim - 1),
        "Yours reach one too far: < or <=?": table.triu(1).tril(dim + 1),
        "Your positions see columns of the past, which real keys stand for.": table.tril(dim),
        "Your columns go on to the end of the context: where does dim enter?": table.triu(1),
        "All positions see all of yours: that is a memory.": table,
    }
    suspects = {text: each.bool() for text, each in suspects.items()}
    expect_tensor(answer(n, n + 4, dim), wanted.bool(), f"columns({n}, {n + 4}, {dim})", suspects, names=CELL)
    for n, context, dim in ((5, 5, 2), (4, 5, 9)):
        wanted = torch.ones(n, context).triu(1).tril(dim).bool()
        expect_tensor(answer(n, context, dim), wanted, f"columns({n}, {context}, {dim})", names=CELL)


@future("a5_parameters", "What columns cost", answer="column_cost", points=2, difficulty=3, minutes=9)
def the_parameters(answer: Answer, variant: Variant) -> None:
    n, width, layers, dim = case = model_size(variant)
    suspects = {
        "You counted keys or values, and a column has both.": n * width * layers,
        "You counted one layer.": 2 * n * width,
        "You counted dim columns. Free columns are as many as there are absolute positions.": 2 * dim * width * layers,
        "You counted dim columns for each position, but positions share them.": 2 * n * dim * width * layers,
    }
    expect_equal(pair_of(answer(*case))[0], counted_cost(*case)[0], f"the parameters of column_cost{case}", suspects)


@A5.also("a5_parameters", points=1)
def the_fair_baseline(answer: Answer, variant: Variant) -> None:
    for nearest in ("above", "below"):
        n, width, layers, _ = case = model_size(variant, nearest)
        exact, found = 2 * n * width / (2 * width + 1), pair_of(answer(*case))[1]
        suspects = {
            "You forgot the bias of a new unit.": n,
            "You widened one MLP for the columns of all layers.": round(layers * exact),
            "You counted the weights into a unit. There are as many out of it.": round(2 * n * width / (width + 1)),
            "You rounded down, and the number above comes nearer.": math.floor(exact),
            "You rounded up, and the number below comes nearer.": math.ceil(exact),
            "There is no part of a unit. Which whole number comes nearest?": in_part(found),
        }
        expect_equal(found, counted_cost(*case)[1], f"the wider MLP of column_cost{case}", suspects)


@future("a5_targets", "Two definitions of the future", answer="targets", points=3, difficulty=4, minutes=15)
def the_targets(answer: Answer, variant: Variant) -> None:
    n, dim = variant.whole("targets n", 7, 9), 2
    scores, value = 1.5 * drawn(variant, "scores", 2, n, n), drawn(variant, "value", 2, n, 3)
    joint, difference = true_targets(scores, value, dim)
    past = torch.ones(n, n).tril().bool()
    ahead = past.tril(-1).T.tril(dim)
    whole, both, causal, alone = (softmax_over(scores, seen) for seen in (past | True, past | ahead, past, ahead))
    found = pair_of(answer(scores, value, dim))
    suspects = {
        "Your weights of the future sum to one by themselves. It is one softmax, the past included.": alone @ value,
        "Your last position has no future, and its weights are nan. It is one softmax, the past included.": (
            scores.masked_fill(~ahead, -torch.inf).softmax(-1) @ value
        ),
        "Yours is the whole future: where does dim enter?": whole.triu(1) @ value,
        "Your softmax runs over the whole text. Which positions are in it?": (whole * ahead) @ value,
        "Yours is the past's part of the softmax.": (both * past) @ value,
        "Yours is all that attention to both gives. Which part of it is the future's?": both @ value,
        "Your two targets have changed places.": difference,
    } | likely_of_nan(found[0])
    expect_tensor(found[0], joint, "the joint target", suspects, 1e-4)
    suspects = {
        "Your difference has the other sign.": -difference,
        "Your two targets are one, and they differ: the past has less weight where there is a future.": joint,
        "Yours is full attention, with nothing taken away.": both @ value,
        "Your full attention sees the whole future: where does dim enter?": (whole - causal) @ value,
    } | likely_of_nan(found[1])
    expect_tensor(found[1], difference, "the difference target", suspects, 1e-4)


@hidden("a5_targets", points=1)
def a_short_text(answer: Answer, variant: Variant) -> None:
    scores, value = drawn(variant, "short scores", 3, 3), drawn(variant, "short value", 3, 2)
    for found, wanted in zip(pair_of(answer(scores, value, 5)), true_targets(scores, value, 5), strict=True):
        expect_tensor(found, wanted, "a target in a text of 3 tokens, with 5 ahead,", likely_of_nan(found), 1e-4)


@future("a5_losses", "A target holds still", answer="future_losses", points=2, difficulty=3, minutes=11)
def the_losses(answer: Answer, variant: Variant) -> None:
    guess, truth = (drawn(variant, name, 2, 3, 5, 4) for name in ("guess", "truth"))
    truth[:, :, -1] = 0.0
    cut, found = (guess[:, :, :-1], truth[:, :, :-1]), _observed(answer, guess, truth)
    (square, near), (all_squares, all_near) = squares_and_cosines(*cut), squares_and_cosines(guess, truth)
    heads, places = (F.cosine_similarity(*cut, dim=dim).mean() for dim in (1, 2))
    at_once = F.cosine_similarity(cut[0].flatten(), cut[1].flatten(), dim=0)
    last = "The last position has no future to be compared with, and yours counts."
    suspects = {last: all_squares.mean(), "You added the squares up. Asked for: their mean.": square.sum()}
    suspects["You took the root as well."] = square.mean().sqrt()
    expect_number(found[0], float(square.mean()), "the MSE", suspects)
    suspects = {
        last: (1 - all_near.mean()) / 2,
        "Your loss runs from 0 to 2.": 1 - near.mean(),
        "Yours is smallest for opposite directions.": (1 + near.mean()) / 2,
        "That is the cosine itself: a loss falls as the prediction gets better.": near.mean(),
        "Yours is one cosine of all numbers at once, and no mean over positions and heads.": (1 - at_once) / 2,
        "Your cosine runs along the heads: torch takes `dim` as 1, unless you name another.": (1 - heads) / 2,
        "Your cosine runs along the positions. Which dimension holds the numbers of one vector?": (1 - places) / 2,
    }
    expect_number(found[1], float((1 - near.mean()) / 2), "the cosine loss", suspects)


@A5.also("a5_losses", points=2)
def the_gradients(answer: Answer, variant: Variant) -> None:
    _, _, *gradients = _observed(answer, drawn(variant, "guess", 2, 3, 5, 4), drawn(variant, "truth", 2, 3, 5, 4))
    for name, (into_guess, into_truth) in zip(("MSE", "cosine"), gradients, strict=True):
        likely = "Your target is drawn to the prediction. Made easy, it teaches nothing."
        expect(
            into_truth == 0, f"no gradient of the {name} loss into the target", f"one of size {into_truth:.3g}", likely
        )
        likely = "Nothing can learn from this: was it the prediction that you cut off?"
        expect(into_guess > 0, f"a gradient of the {name} loss into the prediction", "none", likely)


@future("a5_causality", "Catch who peeks", answer="is_causal", points=3, difficulty=5, minutes=20)
def models_that_peek(answer: Answer, variant: Variant) -> None:
    _attack(answer, variant, "model", ("causal", "next", "third", "far"), LEAKS)


@hidden("a5_causality", points=3)
def models_that_hide_it(answer: Answer, variant: Variant) -> None:
    _attack(answer, variant, "model", ("columns", "faint", "some", "length"), LEAKS)


def _attack(answer: Answer, variant: Variant, given: str, kinds: tuple[str, ...], likely: dict[str, str]) -> None:
    seed = variant.seed("toys")
    honest = Given("a5", "model", {"kind": "causal", "seed": seed})

    def ask(kind: str) -> None:
        attacked = Given("a5", given, {"kind": kind, "seed": seed})
        wanted = kind in ("right", "causal", "columns") if given == "model" else kind == "right"
        found = answer(attacked, honest) if given == "engine" else answer(attacked)
        what = f"{answer.name} of {'an honest' if wanted else 'a faulty'} {given}"
        expect_equal(found, wanted, what, {likely[kind]: not wanted})

    expect_all(kinds, ask, variant.rng(f"order of {kinds}"))


def _observed(answer: Answer, guess: Tensor, truth: Tensor) -> list:
    return answer.observed("losses", *(Given("a5", "leaf", {"values": each}) for each in (guess, truth)))
