"""A5, fusion or future attention: what its checks ask, and the engines and models that attack the students' tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.course.answers import Answer
from labkit.course.exercises import Assignment, randn
from labkit.course.mistakes import expect, expect_equal, expect_tensor, not_finite
from labkit.course.variant import Variant

ASSIGNMENT = A5 = Assignment("a5", "Fusion or future attention", minutes=90)
A5.exercise("a5_segment_mask", "Blocks that do not meet", "segment_mask", difficulty=2, minutes=10)
A5.exercise("a5_merge", "Two results, one softmax", "merged", difficulty=4, minutes=15)
A5.exercise("a5_positions", "Each begins anew", "positions", difficulty=2, minutes=6, track="fusion")
A5.exercise("a5_key_bias", "N copies are one", "key_bias", difficulty=3, minutes=10, track="fusion")
A5.exercise("a5_two_ways", "Average or fuse", "two_ways", difficulty=4, minutes=14, track="fusion")
A5.exercise("a5_joined_cache", "Caches side by side", "joined", difficulty=3, minutes=12, track="fusion")
A5.exercise("a5_identity", "A test that can fail", "is_sound", difficulty=5, minutes=23, track="fusion")
A5.exercise("a5_columns", "Fewer at the end", "columns", difficulty=2, minutes=8, track="future")
A5.exercise("a5_parameters", "What columns cost", "column_cost", difficulty=3, minutes=9, track="future")
A5.exercise("a5_targets", "Two definitions of the future", "targets", difficulty=4, minutes=15, track="future")
A5.exercise("a5_losses", "A target holds still", "future_losses", difficulty=3, minutes=11, track="future")
A5.exercise("a5_causality", "Catch who peeks", "is_causal", difficulty=5, minutes=20, track="future")
WORDINGS = (
    ["Spain's capital is ?", "From which city is Spain governed ?", "The king's town ?"],
    ["Who wrote Hamlet ?", "Hamlet is a play by which author ?", "The pen behind Hamlet ?"],
    ["Where ends the Nile ?", "Into which sea does the Nile flow ?", "The Nile's mouth ?"],
    ["What do bees make ?", "Which sweet food is made by bees ?", "The product of a hive ?"],
    ["Gold has which symbol ?", "In chemistry how is gold written ?", "Gold's two letters ?"],
)
A5.shows("wordings", WORDINGS)
A5.shows("seed", range(3, 13))

VOCABULARY, CONTEXT, WIDTH, AHEAD = 40, 48, 16, 4  # of the toy models; the last: columns


# -- the engines and models --------------------------------------------------------------------------------------------
def engine(kind: str, seed: int) -> Callable[[list, list, list], Tensor]:
    """(prefix, segments, cue), all token ids -> the logits of the next token: fusion, with a fault or without."""
    run = _toy(seed)

    def fuse(prefix: list[int], segments: list[list[int]], cue: list[int]) -> Tensor:
        prefix = prefix[:1] * (kind == "one more") + prefix
        if kind in ("sorted", "longest"):
            segments = sorted(segments, key=lambda ids: (len(ids), ids))[-1 if kind == "longest" else 0 :]
        lengths = [len(ids) for ids in segments]
        group, mask, places, bias = layout(len(prefix), lengths, len(cue))
        of_cue = (group > len(lengths))[:, None]
        if kind in ("causal", "sorted"):
            mask = torch.ones_like(mask).tril()
        if kind == "last":
            mask = mask & (~of_cue | (group == 0) | (group >= len(lengths)))
        if kind == "go on":
            places = torch.arange(len(group))
        if kind == "first end":
            places[len(group) - len(cue) :] += lengths[0] - max(lengths)
        bias = {"no bias": 0.0 * bias, "last": 0.0 * bias, "half": bias.sign() * math.log(2)}.get(kind, bias)
        ids = torch.tensor([*prefix, *sum(segments, []), *cue])
        return run(ids, places, mask, bias * of_cue)[-1]  # within a segment nothing is biased: it is alone there

    return fuse


def model(kind: str, seed: int) -> Callable[[Tensor], Tensor]:
    """Ids (batch, n) -> logits (batch, n, vocabulary): a causal language model, or one that peeks."""
    run = _toy(seed)

    def logits(ids: Tensor) -> Tensor:
        n = ids.shape[-1]
        at = torch.arange(n)
        ahead = at - at[:, None]
        peeks = {"next": ahead == 1, "far": ahead == 12, "third": (at[:, None] == 0) & (at == 2)}
        mask = (ahead <= 0) | peeks.get(kind, False) | (ahead == 1) & (kind == "some") & (ids % 4 == 0)[..., None, :]
        columns = torch.ones(n, CONTEXT).triu(1).tril(AHEAD).bool()
        columns[:, {"columns": CONTEXT, "length": n}.get(kind, 0) :] = False
        outputs = run(ids, at, mask, columns=columns)
        return outputs + 1e-6 * run(ids, at, mask | True) if kind == "faint" else outputs

    return logits


def _toy(seed: int) -> Callable[..., Tensor]:
    """Two random layers in float64, under any mask, with a bias on keys, and with columns beside the past."""
    rng = torch.Generator().manual_seed(seed)
    words, places, ahead = torch.randn(3, CONTEXT, WIDTH, generator=rng, dtype=torch.float64)
    layers = torch.randn(2, 4, WIDTH, WIDTH, generator=rng, dtype=torch.float64) / WIDTH**0.5
    words = words[:VOCABULARY]

    def run(ids: Tensor, at: Tensor, mask: Tensor, bias: Tensor | float = 0.0, columns: Tensor | None = None) -> Tensor:
        x = words[ids] + places[at]
        columns = torch.zeros(len(at), CONTEXT).bool() if columns is None else columns
        mask = torch.cat([mask, columns.expand(*mask.shape[:-1], CONTEXT)], dim=-1)
        for q, k, v, o in layers:
            query = x @ q / WIDTH**0.5
            scores = torch.cat([query @ (x @ k).mT + bias, query @ ahead.T], dim=-1)
            past, future = _softmax_over(scores, mask).split([len(at), CONTEXT], dim=-1)
            x = F.layer_norm(x + torch.tanh((past @ (x @ v) + future @ ahead) @ o), (WIDTH,))
        return x @ words.T

    return run


def layout(prefix: int, lengths: list[int], tail: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(group: 0 prefix, 1.. segments, one more the tail; mask; positions; bias)"""
    sizes, begins = [prefix, *lengths, tail], [0] + [prefix] * len(lengths) + [prefix + max(lengths)]
    group = torch.tensor([i for i, size in enumerate(sizes) for _ in range(size)])
    places = torch.tensor([begin + i for begin, size in zip(begins, sizes, strict=True) for i in range(size)])
    in_segment = (group > 0) & (group <= len(lengths))
    mask = torch.ones(len(group), len(group)).tril().bool()
    mask &= ~in_segment | ~in_segment[:, None] | (group[:, None] == group)
    return group, mask, places, in_segment.double() * -math.log(len(lengths))


def on_engine(answer: Callable, kind: str, seed: int) -> Any:
    """What the answer returns for an engine and its model; called where the answer is."""
    return answer(engine(kind, seed), model("causal", seed))


def on_model(answer: Callable, kind: str, seed: int) -> Any:
    """What the answer returns for a model; called where the answer is."""
    return answer(model(kind, seed))


def losses_and_gradients(answer: Callable, *arguments: Tensor) -> list[list[float]]:
    """Of each of two losses: its value, and the size of its gradients into prediction and target."""
    leaves, rows = [values.clone().requires_grad_() for values in arguments], []
    for loss in answer(*leaves):
        gradients: Any = (None, None)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        rows.append([loss.item(), *(0.0 if g is None else float(g.abs().sum()) for g in gradients)])
    return rows


def _softmax_over(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _drawn(variant: Variant, name: str, *shape: int) -> Tensor:
    return randn(variant, name, *shape, dtype=torch.float64)


def _lengths(variant: Variant) -> list[int]:
    """Four different lengths; the second is the longest."""
    first, *others = variant.rng("lengths").sample(range(2, 6), 3)
    return [first, 6, *others]


# -- for both tracks ---------------------------------------------------------------------------------------------------
@A5.part("a5_segment_mask", points=1, cases=((0, [2, 3], 1), (2, [4], 2), (0, [3], 0)), hidden=True)
@A5.part("a5_segment_mask", points=3)
def the_blocks(answer: Answer, variant: Variant, case: tuple | None = None) -> None:
    case = case or (variant.whole("mask prefix", 2, 3), _lengths(variant), 3)
    group, mask, *_ = layout(*case)
    past, block, prefix = torch.ones(mask.shape).tril().bool(), group[:, None] == group, group == 0
    of_tail = (group == group.max())[:, None]
    suspects = {
        "Your segments see one another: this is the plain causal table.": past,
        "Your segments do not see the prefix. All that comes after it may attend to it.": past & (block | of_tail),
        "Your tail sees no segment. It is the place where all segments meet.": past & (block | prefix),
        "Your tail sees the last segment alone.": past & (block | prefix | of_tail & (group >= group.max() - 1)),
        "Your tokens see what comes later in their own block. Is it causal inside a block?": block | prefix | of_tail,
        "Your tail sees its own future. It is text like the rest.": past & (block | prefix) | of_tail,
        "This is the table turned over: rows are queries.": mask.T,
    }
    expect_tensor(answer(*case), mask, f"segment_mask{case}", suspects)


@A5.part("a5_merge", points=3)
def the_union(answer: Answer, variant: Variant) -> None:
    (one, a), (two, b), (output, lse) = _two_groups(variant)
    share, heavier = (a / (a + b))[..., None], (a > b)[..., None]
    outputs = {
        "Your groups count alike. A group that weighed more before its softmax counts more.": (one + two) / 2,
        "You added the outputs. The weights of each sum to one, so those of both to two.": one + two,
        "Your shares are those of the logarithms, and not of the weights.": share * one + (1 - share) * two,
        "Your shares have changed places: the heavier group counts less.": one + two - output,
        "You took the heavier group alone, but the lighter one has a share, too.": torch.where(heavier, one, two),
    }
    sums = {
        "You added the logarithms, which multiplies what should be added.": a + b,
        "Your lse is the larger of the two. Both together weigh more than either.": torch.maximum(a, b),
        "Your lse is the mean of the two. Both together weigh more than either.": (a + b) / 2,
        "Your lse is the sum of the weights, without the logarithm.": lse.exp(),
    }
    actual_output, actual_lse = answer((one, a), (two, b))
    expect_tensor(actual_output, output, "the merged output", outputs, 1e-4)
    expect_tensor(actual_lse, lse, "the merged lse", sums, 1e-4)


@A5.part("a5_merge", points=2, cases=("a group without keys",), hidden=True)
@A5.part("a5_merge", points=1, cases=("large scores",))
def the_edges(answer: Answer, variant: Variant, case: str) -> None:
    if case == "large scores":
        merges = [_two_groups(variant, scale=1000.0)]
        likely = "e to the 1000 is more than a number holds. Does anything but the distance of the two lse matter?"
    else:
        (output, lse), *_ = some, *_ = _two_groups(variant)
        none = torch.zeros_like(output), torch.full_like(lse, -math.inf)
        merges = [[some, none, some], [none, some, some], [none, none, none]]
        likely = "Minus infinity minus minus infinity is nan. What is the share of a group that weighs nothing?"
    for first, second, both in merges:
        for actual, right in zip(answer(first, second), both, strict=True):
            expect_tensor(actual, right, f"what is merged of {case}", {likely: not_finite}, 1e-3)


def _two_groups(variant: Variant, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """Attention to each of two groups of keys, and to both: (output, lse)."""
    query, key, value = (_drawn(variant, f"merge {name}", 2, n, 4) for name, n in (("q", 3), ("k", 7), ("v", 7)))
    return [_attend(scale * query, key[:, cut], value[:, cut]) for cut in (slice(2), slice(2, 7), slice(7))]


# -- track: fusion -----------------------------------------------------------------------------------------------------
@A5.part("a5_positions", points=3, cases=(None, (0, [2, 5, 3], 2), (3, [4], 1)))
def the_places(answer: Answer, variant: Variant, case: tuple | None) -> None:
    prefix, lengths, tail = case = case or (variant.whole("places prefix", 2, 4), _lengths(variant), 3)

    def placed(starts: list[int], end: int) -> Tensor:
        blocks = [(0, prefix), *zip(starts, lengths, strict=True), (end, tail)]
        return torch.cat([torch.arange(start, start + length) for start, length in blocks])

    on, anew, total = [prefix + sum(lengths[:i]) for i in range(len(lengths))], [prefix] * len(lengths), sum(lengths)
    suspects = {
        "Your positions go on along the row. Where would a segment be if it were alone?": placed(on, prefix + total),
        "Your tail counts all segments before it, and these lie over one another.": placed(anew, prefix + total),
        "Your tail begins behind the last segment. A longer one reaches beyond.": placed(anew, prefix + lengths[-1]),
        "Your tail begins anew, too. It comes after the segments.": placed(anew, prefix),
        "Your segments begin at 0, where the prefix is.": placed([0] * len(lengths), max(lengths)),
    }
    expect_tensor(answer(*case), layout(*case)[2], f"positions{case}", suspects)


@A5.part("a5_key_bias", points=2)
def the_weight_of_copies(answer: Answer, variant: Variant) -> None:
    lengths, own = _lengths(variant), math.log(1 / 4)
    group, _, _, bias = layout(2, lengths, 3)
    suspects = {
        "Your copies weigh N times more, and should weigh less.": -bias,
        "You add the weight itself. Scores are exponents: what multiplies by 1/N?": (bias != 0) / 4,
        "You bias all keys alike, and a softmax does not change by that.": torch.full_like(bias, own),
        "Your prefix is biased, too. It is there once.": own * (group < group.max()),
        "Your tail is biased, too. It is there once.": own * (group > 0),
        "You count tokens. It is copies that are too many, however long.": -torch.tensor([1, *lengths, 1])[group].log(),
        "There is no bias: N copies shout the prefix down.": 0.0 * bias,
    }
    expect_tensor(answer(2, lengths, 3), bias, f"key_bias(2, {lengths}, 3)", suspects)


@A5.part("a5_key_bias", points=1, hidden=True)
def weights_of_your_own(answer: Answer, variant: Variant) -> None:
    weights = torch.tensor([2.0, 1.0, 5.0])
    biases = {
        "Your weights do not sum to one: copies of one segment would not be one.": weights.log(),
        "Where do the weights enter?": torch.full((3,), 1 / 3).log(),
        "You passed the weights through a softmax. They are weights already.": weights.log_softmax(0),
        "": (weights / 8).log(),
    }
    suspects = {message: F.pad(bias[[0, 0, 1, 2]], (1, 1)) for message, bias in biases.items()}
    actual = answer(1, [2, 1, 1], 1, weights.tolist())
    expect_tensor(actual, suspects.pop(""), "key_bias(1, [2, 1, 1], 1, [2, 1, 5])", suspects)


@A5.part("a5_two_ways", points=1, cases=("five copies",), hidden=True)
@A5.part("a5_two_ways", points=3, cases=("three segments",))
def both_answers(answer: Answer, variant: Variant, case: str) -> None:
    query, readout = _drawn(variant, "ways query", 4), 3 * _drawn(variant, "readout", 4, 6)
    prefix, *segments = (
        (_drawn(variant, f"k{i}", n, 4), _drawn(variant, f"v{i}", n, 4)) for i, n in enumerate([2, 2, 4, 3])
    )
    segments = [segments[0]] * 5 if case == "five copies" else segments

    def attend(*groups: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return _attend(query, *map(torch.cat, zip(*groups, strict=True)))

    alone = [attend(prefix, segment) for segment in segments]
    logits = torch.stack([output for output, _ in alone]) @ readout
    average = logits.mean(0)
    fused = torch.stack([lse for _, lse in alone]).softmax(0) @ logits  # an average, whose shares the query chooses
    averages = {
        "You averaged probabilities. It is logits that are averaged.": logits.softmax(-1).mean(0),
        "You took the highest logit of each word.": logits.amax(0),
        "You added the logits up.": logits.sum(0),
        "Your prompts have no prefix.": torch.stack([attend(segment)[0] for segment in segments]).mean(0) @ readout,
        "Your two results have changed places.": fused,
    }
    fusions = {
        "Your fused answer is the average once more. One softmax runs over all keys.": average,
        "In your softmax N segments, each at full weight, face one prefix.": attend(prefix, *segments)[0] @ readout,
        "Your fused answer has lost the prefix.": attend(*segments)[0] @ readout,
    }
    actual_average, actual_fused = answer(query, prefix, segments, readout)
    expect_tensor(actual_average, average, f"the averaged logits of {case}", averages, 1e-4)
    expect_tensor(actual_fused, fused, f"the fused logits of {case}", fusions, 1e-4)


@A5.part("a5_joined_cache", points=1, cases=((0, [2, 4]), (2, [3])), hidden=True)
@A5.part("a5_joined_cache", points=3, cases=((2, [3, 5, 2]), (3, [3, 5, 2])))
def the_joined_cache(answer: Answer, variant: Variant, case: tuple) -> None:
    prefix, lengths = case
    caches = [_drawn(variant, f"cache {name}", len(lengths), 2, prefix + max(lengths), 3) for name in "kv"]
    for cache in caches:
        cache[:, :, :prefix] = cache[:1, :, :prefix]
    for name, cache, actual in zip(("keys", "values"), caches, answer(*caches, prefix, lengths), strict=True):
        once, rows = cache[0, :, :prefix], list(zip(cache, lengths, strict=True))
        right = [once, *(row[:, prefix : prefix + n] for row, n in rows)]
        suspects = {
            "Your prefix is there once for every row. It is shared.": [row[:, : prefix + n] for row, n in rows],
            "Your pads are in it still: the rows have their own lengths.": [once, *cache[:, :, prefix:]],
            "You cut each row as if it had no prefix.": [once, *(row[:, :n] for row, n in rows)],
            "You lost the prefix.": right[1:],
            "Your rows are mixed: a reshape alone takes heads for tokens.": [cache.reshape(2, -1, cache.shape[-1])],
        }
        suspects = {message: torch.cat(parts, dim=1)[None] for message, parts in suspects.items()}
        expect_tensor(actual, torch.cat(right, dim=1)[None], f"the joined {name}", suspects)


FAULTS = {  # what an engine does: what is said to a test that lets it through, or that accuses the sound one
    "right": "You accuse a sound engine. Sums in another order differ in the last bits: how near is near enough?",
    "causal": "Its segments see one another, in order. Which experiment of yours would notice?",
    "go on": "Its positions go on along the row. Which experiment of yours would notice?",
    "no bias": "It has no bias, so N copies shout. Which experiment of yours would notice?",
    "last": "Its cue sees the last segment alone. Copies look alike, whichever is read: what tells them apart?",
    "one more": "It puts one more token in front, always. Compared with itself it is right. What else is there?",
    "half": "Its bias is log(1/2), however many segments there are. What numbers of copies do you try?",
    "first end": "Its cue begins where the first segment ends. That is right for equal lengths: are yours equal?",
    "longest": "It reads the longest segment only. Nothing you ask needs the others: does each one matter?",
    "sorted": "It sorts the segments, and the later ones see the earlier. No order shows that: what does?",
}


@A5.part("a5_identity", points=3, cases=("right", "half", "first end", "longest", "sorted"), hidden=True)
@A5.part("a5_identity", points=3, cases=("right", "causal", "go on", "no bias", "last", "one more"))
def faulty_engines(answer: Answer, variant: Variant, kind: str) -> None:
    seed, honest = variant.seed("toys"), kind == "right"
    judgement = answer(kind, seed, function="on_engine")
    expect_equal(judgement, honest, f"is_sound of {'an honest' if honest else 'a faulty'} engine", FAULTS[kind])


# -- track: future -----------------------------------------------------------------------------------------------------
@A5.part("a5_columns", points=3, cases=((6, 10, 2), (8, 12, 3), (5, 5, 2), (4, 5, 9)))
def the_columns(answer: Answer, variant: Variant, case: tuple) -> None:
    n, context, dim = case
    table = torch.ones(n, context).bool()
    right = table.triu(1).tril(dim)
    suspects = {
        "Your columns end with the text: their number tells what is to come.": right & (torch.arange(context) < n),
        "Your position has a column for itself, which it sees already.": table.triu().tril(dim - 1),
        "Yours are one too few: the position itself is not counted.": table.triu(1).tril(dim - 1),
        "Yours reach one too far: < or <=?": table.triu(1).tril(dim + 1),
        "Your positions see columns of the past, where there are real keys.": table.tril(dim),
        "Your columns go on to the end of the context: where does dim enter?": table.triu(1),
        "All positions see all of yours: that is a memory.": table,
    }
    expect_tensor(answer(*case), right, f"columns{case}", suspects)


SIZES = {"rounded up": ((40, 8), (40, 16), (56, 12)), "rounded down": ((40, 12), (48, 12), (56, 16))}


def _size(variant: Variant, case: str) -> tuple[int, int, int, int]:
    """(context, width, layers, dim), where the nearest number of units is rounded up or down."""
    return *variant.rng(f"size {case}").choice(SIZES[case]), variant.whole("layers", 3, 4), variant.whole("dim", 6, 9)


@A5.part("a5_parameters", points=2, cases=tuple(SIZES))
def the_parameters(answer: Answer, variant: Variant, case: str) -> None:
    n, width, layers, dim = size = _size(variant, case)
    suspects = {
        "You counted keys or values, and a column has both.": n * width * layers,
        "You counted one layer.": 2 * n * width,
        "You counted dim columns. Free columns are as many as there are absolute positions.": 2 * dim * width * layers,
        "You counted dim columns for each position, but positions share them.": 2 * n * dim * width * layers,
    }
    expect_equal(answer(*size)[0], 2 * n * width * layers, f"the parameters of column_cost{size}", suspects)


@A5.part("a5_parameters", points=1, cases=tuple(SIZES))
def the_fair_baseline(answer: Answer, variant: Variant, case: str) -> None:
    n, width, layers, _ = size = _size(variant, case)
    exact = 2 * n * width / (2 * width + 1)
    suspects = {
        "You forgot the bias of a new unit.": n,
        "You widened one MLP for the columns of all layers.": round(layers * exact),
        "You counted the weights into a unit. There are as many out of it.": round(2 * n * width / (width + 1)),
        "You rounded down, and the number above comes nearer.": math.floor(exact),
        "You rounded up, and the number below comes nearer.": math.ceil(exact),
        "There is no part of a unit. Which whole number comes nearest?": exact,
    }
    expect_equal(answer(*size)[1], round(exact), f"the wider MLP of column_cost{size}", suspects)


@A5.part("a5_targets", points=1, cases=((3, 5),), hidden=True)
@A5.part("a5_targets", points=3, cases=((7, 2), (9, 2)))
def the_targets(answer: Answer, variant: Variant, case: tuple) -> None:
    n, dim = case
    scores, value = 1.5 * _drawn(variant, "scores", 2, n, n), _drawn(variant, "value", 2, n, 3)
    past = torch.ones(n, n).tril().bool()
    ahead = past.tril(-1).T.tril(dim)
    whole, both, causal, alone = (_softmax_over(scores, seen) for seen in (past | True, past | ahead, past, ahead))
    joint, difference = (both * ahead) @ value, (both - causal) @ value
    joints = {
        "Your target is nan. Weights are to be set to 0 after the softmax; do not divide by them.": not_finite,
        "Your weights of the future sum to one. It is one softmax, the past included.": alone @ value,
        "Yours is the whole future: where does dim enter?": whole.triu(1) @ value,
        "Your softmax runs over the whole text. Which positions are in it?": (whole * ahead) @ value,
        "Yours is the past's part of the softmax.": (both * past) @ value,
        "Yours is all that attention to both gives. Which part of it is the future's?": both @ value,
        "Your two targets have changed places.": difference,
    }
    differences = {
        "Your difference is nan. Does each row of a softmax have a position to attend to?": not_finite,
        "Your difference has the other sign.": -difference,
        "Your two targets are one, and they differ: the future takes weight from the past.": joint,
        "Yours is full attention, with nothing taken away.": both @ value,
        "Your full attention sees the whole future: where does dim enter?": (whole - causal) @ value,
    }
    actual_joint, actual_difference = answer(scores, value, dim)
    expect_tensor(actual_joint, joint, "the joint target", joints, 1e-4)
    expect_tensor(actual_difference, difference, "the difference target", differences, 1e-4)


@A5.part("a5_losses", points=2)
def the_losses(answer: Answer, variant: Variant) -> None:
    guess, truth, (mse, *_), (cosine, *_) = _losses(answer, variant)
    whole, (guess, truth) = (guess, truth), (guess[:, :, :-1], truth[:, :, :-1])
    last = "The last position has no future to be compared with, and yours counts."
    square = F.mse_loss(guess, truth)
    suspects = {
        last: F.mse_loss(*whole),
        "You added the squares up. Asked for: their mean.": F.mse_loss(guess, truth, reduction="sum"),
        "You took the root as well.": square.sqrt(),
    }
    expect_tensor(mse, square, "the MSE", suspects)
    near = F.cosine_similarity(guess, truth, dim=-1).mean()
    at_once = F.cosine_similarity(guess.flatten(), truth.flatten(), dim=0)
    heads, places = (F.cosine_similarity(guess, truth, dim=dim).mean() for dim in (1, 2))
    suspects = {
        last: (1 - F.cosine_similarity(*whole, dim=-1).mean()) / 2,
        "Your loss runs from 0 to 2.": 1 - near,
        "Yours is smallest for opposite directions.": (1 + near) / 2,
        "That is the cosine itself: a loss falls as the prediction gets better.": near,
        "Yours is one cosine of all numbers at once, and no mean over positions and heads.": (1 - at_once) / 2,
        "Your cosine runs along the heads: torch takes `dim` as 1, unless you name another.": (1 - heads) / 2,
        "Your cosine runs along the positions. Which dimension holds the numbers of one vector?": (1 - places) / 2,
    }
    expect_tensor(cosine, (1 - near) / 2, "the cosine loss", suspects)


@A5.part("a5_losses", points=2)
def the_gradients(answer: Answer, variant: Variant) -> None:
    _, _, *losses = _losses(answer, variant)
    for _, into_guess, into_truth in losses:
        likely = "Your target is drawn to the prediction. Made easy, it teaches nothing."
        expect(into_truth == 0, "no gradient into the target", f"one of size {into_truth:.3g}", likely)
        likely = "Nothing can learn from this: was it the prediction that you cut off?"
        expect(into_guess > 0, "a gradient into the prediction", "none", likely)


def _losses(answer: Answer, variant: Variant) -> tuple:
    """A prediction, a target, and of each loss its value and the size of its gradients into both."""
    guess, truth = (_drawn(variant, name, 2, 3, 5, 4) for name in ("guess", "truth"))
    truth[:, :, -1] = 0.0
    losses = answer(guess, truth, function="losses_and_gradients")
    return guess, truth, *losses


LEAKS = {  # what a model does: what is said to a test that lets it through, or that accuses an honest one
    "causal": "You accuse an honest model. Where may a change show, and how near is near enough?",
    "columns": "You accuse an honest model: its columns stand for later positions, and are made of no token.",
    "next": "Your test lets a model through that reads the next token. Does it look at every output before the change?",
    "third": "Only the first position peeks here, at the third token. Which tokens, and which outputs, do you try?",
    "far": "This one reads the token 12 places ahead, and none nearer. How long are your texts?",
    "faint": "What leaks here is faint, a millionth. A leak has no size below which training would not find it.",
    "length": "This one sees no later token, but how many there are. Are your texts all of one length?",
    "some": "This one reads the next token only if its id is a multiple of 4. Is one kind of change enough?",
}


@A5.part("a5_causality", points=3, cases=("columns", "faint", "some", "length"), hidden=True)
@A5.part("a5_causality", points=3, cases=("causal", "next", "third", "far"))
def models_that_peek(answer: Answer, variant: Variant, kind: str) -> None:
    honest = kind in ("causal", "columns")
    judgement = answer(kind, variant.seed("toys"), function="on_model")
    expect_equal(judgement, honest, f"is_causal of {'an honest' if honest else 'a faulty'} model", LEAKS[kind])
