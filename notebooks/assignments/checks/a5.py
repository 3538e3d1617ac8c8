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
A5.exercise("a5_tree_mask", "The mask of a tree", "tree_mask", difficulty=3, minutes=12)
A5.exercise("a5_merge", "Two results, one softmax", "merged", difficulty=4, minutes=15)
A5.exercise("a5_tree_positions", "Positions in a tree", "tree_positions", difficulty=2, minutes=6, track="fusion")
A5.exercise("a5_tree_bias", "Copies in a tree", "tree_bias", difficulty=3, minutes=10, track="fusion")
A5.exercise("a5_two_ways", "Average or fuse", "two_ways", difficulty=4, minutes=13, track="fusion")
A5.exercise("a5_joined_cache", "One cache from several rows", "joined", difficulty=3, minutes=12, track="fusion")
A5.exercise("a5_identity", "A test for fusion", "is_sound", difficulty=5, minutes=22, track="fusion")
A5.exercise("a5_block_columns", "Columns for blocks", "block_columns", difficulty=2, minutes=8, track="future")
A5.exercise("a5_parameters", "A baseline of the same size", "column_cost", difficulty=3, minutes=9, track="future")
A5.exercise("a5_targets", "Targets without weights", "targets", difficulty=4, minutes=12, track="future")
A5.exercise("a5_control_loss", "Another text's future", "control_loss", difficulty=3, minutes=14, track="future")
A5.exercise("a5_causality", "A test for causality", "is_causal", difficulty=5, minutes=20, track="future")
WORDINGS = (
    ["Spain's capital is ?", "From which city is Spain governed ?", "The king's town ?"],
    ["Who wrote Hamlet ?", "Hamlet is a play by which author ?", "The pen behind Hamlet ?"],
    ["Where does the Nile end ?", "Into which sea does the Nile flow ?", "The Nile's mouth ?"],
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
    """Ids (batch, n) -> logits (batch, n, vocabulary): a causal language model, or one that leaks."""
    run = _toy(seed)

    def logits(ids: Tensor) -> Tensor:
        n = ids.shape[-1]
        at = torch.arange(n)
        ahead = at - at[:, None]
        later = {"next": ahead == 1, "far": ahead == 12, "third": (at[:, None] == 0) & (at == 2)}
        mask = (ahead <= 0) | later.get(kind, False) | (ahead == 1) & (kind == "some") & (ids % 4 == 0)[..., None, :]
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


def losses_and_gradients(answer: Callable, *arguments: Any) -> list[list[float]]:
    """Of each of two losses: its value, and the size of its gradients into prediction and target."""
    leaves, rows = [values.clone().requires_grad_() for values in arguments[:2]], []
    for loss in answer(*leaves, *arguments[2:]):
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


TREES = {  # parents and lengths of the segments
    "a tree": ([-1, 0, 1, 0, 3, 1, 0], [2, 3, 1, 2, 3, 2, 1]),
    "a single segment": ([-1], [4]),
    "two trees": ([-1, -1, 0, 1, 1], [2, 3, 1, 2, 1]),
    "a chain": ([-1, 0, 1, 2], [1, 2, 3, 1]),
}


def _tree(variant: Variant, case: str) -> tuple[list[int], list[int], Tensor, Tensor]:
    """(parents, lengths, the segment of each token, which segments each segment attends to)"""
    parents, lengths = TREES[case]
    if case == "a tree":
        lengths = [variant.whole("root", 2, 4), *lengths[1:]]
    paths = torch.eye(len(parents)).bool()
    for segment, parent in enumerate(parents):
        if parent >= 0:
            paths[segment] |= paths[parent]
    return parents, lengths, torch.arange(len(parents)).repeat_interleave(torch.tensor(lengths)), paths


# -- for both tracks ---------------------------------------------------------------------------------------------------
@A5.part("a5_tree_mask", points=1, cases=("two trees", "a single segment"), hidden=True)
@A5.part("a5_tree_mask", points=3, cases=("a tree",))
def the_tree(answer: Answer, variant: Variant, case: str) -> None:
    parents, lengths, owner, paths = _tree(variant, case)
    parent, own = torch.tensor(parents), torch.eye(len(parents)).bool()
    step, root = own | (parent[:, None] == torch.arange(len(own))), own | (torch.arange(len(own)) == 0)
    siblings = paths.long() @ (parent[:, None] == parent).long() > 0

    def of_tokens(table: Tensor) -> Tensor:
        return table[owner][:, owner]

    suspects = {
        "Your segments attend to all segments before them: the plain causal mask.": of_tokens(paths | True).tril(),
        "Your segments attend to their parent, but not to the parent of their parent.": of_tokens(step).tril(),
        "Your segments attend to themselves only.": of_tokens(own).tril(),
        "Your segments attend to segment 0 and to themselves only.": of_tokens(root).tril(),
        "Your segments attend to segments with the same parent.": of_tokens(siblings).tril(),
        "Your tokens attend to later tokens of their own segment.": of_tokens(paths),
        "Your table is transposed: a row is a query.": of_tokens(paths).tril().T,
    }
    expect_tensor(answer(parents, lengths), of_tokens(paths).tril(), f"tree_mask({parents}, {lengths})", suspects)


@A5.part("a5_merge", points=3)
def the_union(answer: Answer, variant: Variant) -> None:
    (one, a), (two, b), (output, lse) = _two_groups(variant)
    share, heavier = (a / (a + b))[..., None], (a > b)[..., None]
    outputs = {
        "Your groups have equal shares. A group with a larger lse has a larger share.": (one + two) / 2,
        "You added the outputs. The weights then sum to two.": one + two,
        "You used the lse as weights, but they are logarithms of weights.": share * one + (1 - share) * two,
        "You swapped the two shares.": one + two - output,
        "You took the group with the larger lse only. The other group has a share too.": torch.where(heavier, one, two),
    }
    sums = {
        "You added the two lse. Adding logarithms multiplies the sums.": a + b,
        "Your lse is the larger of the two. The sum over both groups is larger than that.": torch.maximum(a, b),
        "Your lse is the mean of the two. The sum over both groups is larger than each of the two.": (a + b) / 2,
        "Your lse is the sum itself. Take its logarithm.": lse.exp(),
    }
    actual_output, actual_lse = answer((one, a), (two, b))
    expect_tensor(actual_output, output, "the merged output", outputs, 1e-4)
    expect_tensor(actual_lse, lse, "the merged lse", sums, 1e-4)


@A5.part("a5_merge", points=2, cases=("a group without keys",), hidden=True)
@A5.part("a5_merge", points=1, cases=("large scores",))
def the_edges(answer: Answer, variant: Variant, case: str) -> None:
    if case == "large scores":
        merges = [_two_groups(variant, scale=1000.0)]
        likely = "e to the power of 1000 overflows. The shares depend only on the difference of the two lse."
    else:
        (output, lse), *_ = some, *_ = _two_groups(variant)
        none = torch.zeros_like(output), torch.full_like(lse, -math.inf)
        merges = [[some, none, some], [none, some, some], [none, none, none]]
        likely = "Minus infinity minus minus infinity is nan. The share of a group without keys is 0."
    for first, second, both in merges:
        for actual, right in zip(answer(first, second), both, strict=True):
            expect_tensor(actual, right, f"the result for {case}", {likely: not_finite}, 1e-3)


def _two_groups(variant: Variant, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """Attention to each of two groups of keys, and to both: (output, lse)."""
    query, key, value = (_drawn(variant, f"merge {name}", 2, n, 4) for name, n in (("q", 3), ("k", 7), ("v", 7)))
    return [_attend(scale * query, key[:, cut], value[:, cut]) for cut in (slice(2), slice(2, 7), slice(7))]


# -- track: fusion -----------------------------------------------------------------------------------------------------
@A5.part("a5_tree_positions", points=3, cases=("a tree", "two trees", "a chain"))
def the_positions(answer: Answer, variant: Variant, case: str) -> None:
    parents, lengths, owner, paths = _tree(variant, case)
    size, parent = torch.tensor(lengths), torch.tensor(parents)
    starts, inside = paths.long() @ size - size, torch.arange(len(owner)) - (size.cumsum(0) - size)[owner]
    wrong_starts = {
        "Your positions go on along the row. Each segment begins where its parent ends.": size.cumsum(0) - size,
        "Your segments all begin at 0.": 0 * size,
        "Your segments all begin after segment 0. Is it always the parent?": torch.where(parent >= 0, size[0], 0),
        "You use the length of the parent. Add where it begins.": torch.where(parent >= 0, size[parent], 0),
        "Your segments leave a gap. They begin right after their parent.": starts + paths.sum(1) - 1,
    }
    suspects = {message: start[owner] + inside for message, start in wrong_starts.items()}
    actual = answer(parents, lengths)
    expect_tensor(actual, starts[owner] + inside, f"tree_positions({parents}, {lengths})", suspects)


@A5.part("a5_tree_bias", points=1, cases=("a chain", "a single segment"), hidden=True)
@A5.part("a5_tree_bias", points=2, cases=("a tree",))
def the_weight_of_copies(answer: Answer, variant: Variant, case: str) -> None:
    parents, lengths, owner, paths = _tree(variant, case)
    sharing = torch.tensor([parents.count(parent) for parent in parents]).double().log()
    bias, depth = -(paths.double() @ sharing), paths.sum(1)
    suspects = {
        "Your bias has the wrong sign: it increases the weight of copies.": -bias,
        "Your result is the weight. Return its logarithm, because scores are logarithms.": bias.exp(),
        "You count only the segments with the same parent. They share its weight, not 1.": -sharing,
        "You divide by the number of segments at the same depth.": -(depth[:, None] == depth).sum(1).double().log(),
        "All segments but the first have the same weight.": -math.log(max(1, len(depth) - 1)) * (depth > 1).double(),
        "You divide by the number of tokens.": -torch.tensor(lengths).double().log(),
        "There is no bias: N copies weigh N times as much as one.": 0.0 * bias,
    }
    suspects = {message: wrong[owner] for message, wrong in suspects.items()}
    expect_tensor(answer(parents, lengths), bias[owner], f"tree_bias({parents}, {lengths})", suspects)


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
        "You averaged probabilities. Average the logits.": logits.softmax(-1).mean(0),
        "You took the largest logits. Average them.": logits.amax(0),
        "You added the logits. Average them.": logits.sum(0),
        "Your prompts have no prefix.": torch.stack([attend(segment)[0] for segment in segments]).mean(0) @ readout,
        "Your two results are in the wrong order.": fused,
    }
    fusions = {
        "Your fused logits are an average too. Use one softmax over all keys.": average,
        "There is no bias: N segments have N times the weight of one.": attend(prefix, *segments)[0] @ readout,
        "Your fused logits do not use the prefix.": attend(*segments)[0] @ readout,
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
            "Your cache has the prefix of every row. It should be there once.": [
                row[:, : prefix + n] for row, n in rows
            ],
            "Your cache has padding. Cut each row at its own length.": [once, *cache[:, :, prefix:]],
            "You cut each row as if it had no prefix.": [once, *(row[:, :n] for row, n in rows)],
            "Your cache has no prefix.": right[1:],
            "Your reshape mixes heads and tokens.": [cache.reshape(2, -1, cache.shape[-1])],
        }
        suspects = {message: torch.cat(parts, dim=1)[None] for message, parts in suspects.items()}
        expect_tensor(actual, torch.cat(right, dim=1)[None], f"the joined {name}", suspects)


FAULTS = {  # what an engine does: the message for a test that accepts it, or that rejects the sound one
    "right": "You reject a sound engine. Sums in another order differ in the last bits: do you allow a difference?",
    "causal": "Its segments attend to earlier segments. Which experiment of yours would show that?",
    "go on": "Its positions go on along the row. Which experiment of yours would show that?",
    "no bias": "It has no bias, so N copies weigh too much. Which experiment of yours would show that?",
    "last": "Its cue attends to the last segment only. With copies, this makes no difference: what does?",
    "one more": "It always adds one token in front. Do you compare it with the plain model?",
    "half": "Its bias is log(1/2) for any number of segments. What numbers of copies do you try?",
    "first end": "Its cue begins where the first segment ends. Do your segments have different lengths?",
    "longest": "It uses the longest segment only. Do you test that each segment matters?",
    "sorted": "It sorts the segments, and later ones attend to earlier ones. Reordering does not show that: what does?",
}


@A5.part("a5_identity", points=3, cases=("right", "half", "first end", "longest", "sorted"), hidden=True)
@A5.part("a5_identity", points=3, cases=("right", "causal", "go on", "no bias", "last", "one more"))
def faulty_engines(answer: Answer, variant: Variant, kind: str) -> None:
    sound = kind == "right"
    judgement = answer(kind, variant.seed("toys"), function="on_engine")
    expect_equal(judgement, sound, f"is_sound of a {'sound' if sound else 'faulty'} engine", FAULTS[kind])


# -- track: future -----------------------------------------------------------------------------------------------------
@A5.part("a5_block_columns", points=3, cases=((7, 24, 2, 3), (8, 24, 3, 3), (12, 12, 3, 2), (5, 8, 4, 9)))
def the_columns(answer: Answer, variant: Variant, case: tuple) -> None:
    n, context, size, dim = case
    block, i, positions = torch.arange(context // size), torch.arange(n)[:, None], torch.ones(n, context).bool()
    ahead = block - i // size
    right = (ahead > 0) & (ahead <= dim)
    suspects = {
        "Your columns end with the text, so they depend on what comes later: a leak.": right & (block * size < n),
        "Your position attends to the column of its own block, which it has partly read.": (ahead >= 0) & (ahead < dim),
        "Your positions have one column too few.": (ahead > 0) & (ahead < dim),
        "Your positions have one column too many. Is it < or <=?": (ahead > 0) & (ahead <= dim + 1),
        "Your positions attend to the columns of earlier blocks.": ahead <= dim,
        "Your positions attend to all later blocks. Where do you use dim?": ahead > 0,
        "You count dim in positions. It is a number of blocks.": (block * size > i) & (block * size <= i + dim),
        "You have a column for each position. There is one for each block.": positions.triu(1).tril(dim),
    }
    expect_tensor(answer(*case), right, f"block_columns{case}", suspects)


SIZES = {"rounded up": ((40, 8), (40, 16), (56, 12)), "rounded down": ((40, 12), (48, 12), (56, 16))}  # blocks, width


def _sizes(variant: Variant, case: str) -> tuple[int, int, int, int, int]:
    """(context, size, width, layers, dim), where the nearest number of units is rounded up or down."""
    blocks, width = variant.rng(f"size {case}").choice(SIZES[case])
    size = variant.whole("block", 3, 5)
    return blocks * size, size, width, variant.whole("layers", 3, 4), variant.whole("dim", 6, 9)


@A5.part("a5_parameters", points=2, cases=tuple(SIZES))
def the_parameters(answer: Answer, variant: Variant, case: str) -> None:
    context, size, width, layers, dim = sizes = _sizes(variant, case)
    one = 2 * width * layers  # of one column
    suspects = {
        "You counted keys or values. A column has both.": context // size * one // 2,
        "You counted one layer.": context // size * one // layers,
        "Block 0 has a column, too.": (context // size - 1) * one,
        "You counted a column for each position. There is one for each block.": context * one,
        "You counted dim columns. There is one for each block of the context.": dim * one,
        "You counted dim columns for each block. Positions share the columns.": dim * context // size * one,
    }
    expect_equal(answer(*sizes)[0], context // size * one, f"the parameters of column_cost{sizes}", suspects)


@A5.part("a5_parameters", points=1, cases=tuple(SIZES))
def the_fair_baseline(answer: Answer, variant: Variant, case: str) -> None:
    context, size, width, layers, _ = sizes = _sizes(variant, case)
    blocks = context // size
    exact = 2 * blocks * width / (2 * width + 1)
    suspects = {
        "You forgot the bias of a unit.": blocks,
        "You compare one MLP with the columns of all layers.": round(layers * exact),
        "You counted the weights into a unit. There are as many out of it.": round(2 * blocks * width / (width + 1)),
        "You rounded down. The next whole number is nearer.": math.floor(exact),
        "You rounded up. The whole number below is nearer.": math.ceil(exact),
        "Round to the nearest whole number of units.": lambda units: units != int(units),
    }
    expect_equal(answer(*sizes)[1], round(exact), f"the wider MLP of column_cost{sizes}", suspects)


@A5.part("a5_targets", points=1, cases=("large scores",), hidden=True)
@A5.part("a5_targets", points=3, cases=("a text", "a longer text"))
def the_targets(answer: Answer, variant: Variant, case: str) -> None:
    n = {"a longer text": 9}.get(case, 7)
    scores, value = 1.5 * _drawn(variant, "scores", 2, n, n), _drawn(variant, "value", 2, n, 3)
    scores = scores + 1000.0 if case == "large scores" else scores
    seen = [scores.masked_fill(torch.ones(n, n).triu(1 + ahead).bool(), -math.inf) for ahead in (2, 0)]
    (output, total), (causal, part) = both, past = [(s.softmax(-1) @ value, s.logsumexp(-1)) for s in seen]
    share, softmax = (part - total).exp()[..., None], (part - total).sigmoid()[..., None]
    joint, difference = output - share * causal, output - causal
    joints = {
        "Your target is not finite: e to the power of a large lse overflows. Subtract first.": not_finite,
        "Your joint target is the whole output of `both`. Subtract the part of the past.": output,
        "Your joint target is the part of the past.": share * causal,
        "You subtract the whole output of `past`. In `both`, the past has only a share of the weight.": difference,
        "You multiply by the share of the future. Multiply by that of the past.": output - (1 - share) * causal,
        "You used the softmax of exercise 2. Here the past is a part of `both`.": output - softmax * causal,
        "Your share is the inverse: it is above 1.": output - causal / share,
    }
    differences = {
        "Your difference has the wrong sign.": -difference,
        "Your two targets are equal. The second one subtracts the whole output of `past`.": joint,
        "Your difference is the output of `both`. Subtract the output of `past`.": output,
    }
    actual_joint, actual_difference = answer(both, past)
    expect_tensor(actual_joint, joint, "the joint target", joints, 1e-4)
    expect_tensor(actual_difference, difference, "the difference target", differences, 1e-4)


@A5.part("a5_control_loss", points=2)
def the_losses(answer: Answer, variant: Variant) -> None:
    guess, truth, lengths, (own, *_), (other, *_) = _losses(answer, variant)
    size, i = torch.tensor(lengths)[:, None], torch.arange(guess.shape[1])
    near, counted = F.cosine_similarity(guess, truth, dim=-1), i < size - 1
    cosine = near[counted].mean()
    by_text = torch.stack([row[keep].mean() for row, keep in zip(near, counted, strict=True)])
    shared = counted & counted.roll(1, 0)

    def loss(target: Tensor, counts: Tensor) -> Tensor:
        return (1 - F.cosine_similarity(guess, target, dim=-1)[counts].mean()) / 2

    right = loss(truth.roll(1, 0), shared)
    suspects = {
        "You count the last token of a text, which has no future.": (1 - near[i < size].mean()) / 2,
        "You count the padding.": (1 - near.mean()) / 2,
        "Your loss is a mean of the means of texts. Each position has the same weight.": (1 - by_text.mean()) / 2,
        "Your loss is not divided by 2: it runs from 0 to 2.": 1 - cosine,
        "Your loss is smallest for opposite directions.": (1 + cosine) / 2,
        "Your cosine runs along the positions. Pass dim=-1.": (1 - F.cosine_similarity(guess, truth, dim=1).mean()) / 2,
        "Your two losses are in the wrong order.": right,
    }
    expect_tensor(own, (1 - cosine) / 2, "the loss with the own future", suspects)
    suspects = {
        "Your target is still that of the own text.": loss(truth, shared),
        "Your target is that of text b + 1.": loss(truth.roll(-1, 0), counted & counted.roll(-1, 0)),
        "You moved the targets along the positions. Move them along the batch.": loss(truth.roll(1, 1), counted),
        "You count positions that have no future in the other text.": loss(truth.roll(1, 0), counted),
        "You count positions that have no future in the own text.": loss(truth.roll(1, 0), counted.roll(1, 0)),
    }
    expect_tensor(other, right, "the loss with another text's future", suspects)


@A5.part("a5_control_loss", points=2)
def the_gradients(answer: Answer, variant: Variant) -> None:
    *_, own, other = _losses(answer, variant)
    for _, into_guess, into_truth in (own, other):
        likely = "Your loss trains the target too. A target that becomes easy to predict teaches nothing."
        expect(into_truth == 0, "no gradient into the target", f"one of size {into_truth:.3g}", likely)
        likely = "Your loss trains nothing: the prediction is a constant."
        expect(into_guess > 0, "a gradient into the prediction", "none", likely)


def _losses(answer: Answer, variant: Variant) -> tuple:
    """A prediction, a target, the lengths, and of each loss its value and the size of its gradients into both."""
    guess, truth = (_drawn(variant, name, 4, 7, 4) for name in ("guess", "truth"))
    lengths = [3, 7, 2, 5]
    return guess, truth, lengths, *answer(guess, truth, lengths, function="losses_and_gradients")


LEAKS = {  # what a model does: the message for a test that accepts it, or that rejects a causal one
    "causal": "You reject a causal model. Which outputs may change, and do you allow differences of rounding?",
    "columns": "You reject a causal model. It has columns for later positions, but they are made from no token.",
    "next": "You accept a model that attends to the next token. Do you compare every output before the change?",
    "third": "Only the first position leaks here, from the third token. Which tokens and outputs do you try?",
    "far": "This model attends to the token 12 places ahead, and to none nearer. How long are your texts?",
    "faint": "This leak is of the size of a millionth. Training finds small leaks too: is your tolerance 1e-9?",
    "length": "This model uses no later token, but the number of later tokens. Do your texts differ in length?",
    "some": "This model attends to the next token only if its id is a multiple of 4. Do you try several tokens?",
}


@A5.part("a5_causality", points=3, cases=("columns", "faint", "some", "length"), hidden=True)
@A5.part("a5_causality", points=3, cases=("causal", "next", "third", "far"))
def models_that_leak(answer: Answer, variant: Variant, kind: str) -> None:
    causal = kind in ("causal", "columns")
    judgement = answer(kind, variant.seed("toys"), function="on_model")
    expect_equal(judgement, causal, f"is_causal of a {'causal' if causal else 'leaking'} model", LEAKS[kind])
