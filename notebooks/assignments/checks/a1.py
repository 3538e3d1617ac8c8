"""A1, masks and attention by hand: what its checks ask, and the wrong values of typical mistakes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labkit import masks
from labkit.course.answers import Answer
from labkit.course.exercises import Assignment, randn
from labkit.course.mistakes import expect_tensor, not_finite
from labkit.course.variant import Variant

SENTENCES = (
    "the old seal swam to the rock",
    "a small letter reached the island late",
    "the bell rang before the ship left",
    "she lent me the map of town",
    "no train stops at the small station",
)
ASSIGNMENT = A1 = Assignment("a1", "Masks and attention by hand", minutes=75)
A1.exercise("a1_causal_mask", "The causal mask", "causal_mask", difficulty=1, minutes=5)
A1.exercise("a1_window_mask", "A window with sinks", "window_mask", difficulty=2, minutes=8)
A1.exercise("a1_prefix_mask", "A prefix, with padding on the left", "prefix_mask", difficulty=3, minutes=12)
A1.exercise("a1_scores", "Scores with a distance penalty", "biased_scores", difficulty=2, minutes=10)
A1.exercise("a1_weights", "Weights under a mask", "masked_weights", difficulty=3, minutes=10)
A1.exercise("a1_attention", "Heads with their own masks", "multi_head", difficulty=4, minutes=15)
A1.exercise("a1_stack", "Layers with different masks", "layers_needed", difficulty=4, minutes=15)
A1.shows("sentence", SENTENCES)


@A1.part("a1_causal_mask", points=2)
def the_mask(answer: Answer, variant: Variant) -> None:
    n = variant.whole("causal", 4, 9)
    causal = masks.causal().dense(n)
    suspects = {
        f"Position 0 attends to position {n - 1}: rows are queries. Did you keep the upper triangle?": causal.T,
        "No token attends to itself, and the first one attends to nothing. Is the diagonal in?": causal.tril(-1),
        "True and False are the other way round: True means that the query may attend to the key.": ~causal,
        "These are numbers to be added to scores; a table of True and False is expected.": causal.float().log(),
        "A table of 0 and 1 is nearly right: make it booleans.": causal.float(),
    }
    expect_tensor(answer(n), causal, f"causal_mask({n})", suspects)


@A1.part("a1_window_mask", points=2)
def the_window(answer: Answer, variant: Variant) -> None:
    n, w, sinks = variant.whole("window tokens", 7, 10), variant.whole("window", 2, 3), 2
    causal, sink = masks.causal().dense(n), torch.arange(n) < sinks
    near, wide, narrow = (causal.triu(1 - width) for width in (w, w + 1, w - 1))
    window = causal & (near | sink)
    suspects = {
        f"A window of {w} includes the token itself, so it reaches {w - 1} back. Is it <= or <?": causal
        & (wide | sink),
        f"A window of {w} has {w} tokens, including the token itself. Yours has {w - 1}.": causal & (narrow | sink),
        "Token 0 attends to token 1, which is later: sinks must be causal, too.": near | sink,
        "The window is also open to the right, where later tokens are.": near | near.T | sink,
        "The window is right, but the first tokens are closed. Where is `sinks` used?": near,
        "This is the transposed mask: rows are queries. Is it i - j or j - i?": window.T,
        "The window has no end on the left. Where is `w` used?": causal,
    }
    expect_tensor(answer(n, w, sinks), window, f"window_mask({n}, {w}, {sinks})", suspects)


@A1.part("a1_window_mask", points=1, cases=("no sinks", "all in the window"))
def the_limits(answer: Answer, variant: Variant, case: str) -> None:
    n = variant.whole("short text", 3, 5)
    w, sinks, mask = (2, 0, masks.sliding_window(2)) if case == "no sinks" else (n + 4, n + 1, masks.causal())
    expect_tensor(answer(n, w, sinks), mask.dense(n), f"window_mask({n}, {w}, {sinks})")


@A1.part("a1_prefix_mask", points=3)
def the_batch(answer: Answer, variant: Variant) -> None:
    rng = variant.rng("prefix")
    n = rng.randint(6, 9)
    lengths, prefixes = [n - 2, n, n - 1], [rng.randint(2, n - 3), rng.randint(2, n - 1), 0]
    length, prefix, key = torch.tensor(lengths)[:, None], torch.tensor(prefixes)[:, None], torch.arange(n)
    causal, start = masks.causal().dense(n), n - length
    real, question = (key >= start)[:, None], (key < start + prefix)[:, None]  # (batch, 1, key) each
    right = (key < length)[:, None] & (causal | (key < prefix)[:, None])
    suspects = {
        "The question starts at the first real token, not at position 0.": real & (causal | (key < prefix)[:, None]),
        "Your padding is on the right. Real tokens are the last ones of a row.": right,
        "The padding is open as a key. Where are the lengths used?": causal | question,
        "The question is still causal. Where are the prefixes used?": real & causal,
        "Everything is bidirectional. The answer must stay causal.": real.expand(3, n, n),
        "Padding is also closed as a query. Only keys are closed.": real & real.mT & (causal | question),
    }
    what = f"prefix_mask({lengths}, {prefixes}, {n})"
    expect_tensor(answer(lengths, prefixes, n), real & (causal | question), what, suspects)


@A1.part("a1_scores", points=2)
def the_scores(answer: Answer, variant: Variant) -> None:
    n, d, heads = variant.whole("scores n", 4, 6), variant.whole("scores d", 7, 12), 3
    q, k = (randn(variant, f"scores {name}", heads, n, d) for name in "qk")
    slopes, ahead = torch.tensor([0.5, 0.25, 0.125]), torch.arange(n)[:, None] - torch.arange(n)
    product, penalty = q @ k.mT, slopes[:, None, None] * ahead.abs()
    scaled, signed = product / d**0.5, slopes[:, None, None] * ahead
    suspects = {
        "The dot products are not divided by anything.": product - penalty,
        "The penalty is divided, too. Only the dot product is divided.": (product - penalty) / d**0.5,
        "The dot products are divided by d instead of its square root.": product / d - penalty,
        "Distant tokens get higher scores. Is the penalty subtracted?": scaled + penalty,
        "Later tokens get a bonus instead of a penalty. Is the distance absolute?": scaled - signed,
        "These scores have no penalty.": scaled,
    }
    what = f"the scores of {heads} heads of {n} tokens, d = {d},"
    expect_tensor(answer(q, k, slopes), scaled - penalty, what, suspects)


@A1.part("a1_weights", points=2)
def the_weights(answer: Answer, variant: Variant) -> None:
    n = variant.whole("weights n", 4, 7)
    scores, mask = 2 * randn(variant, "weights", 2, n, n), masks.causal().dense(n)
    masked, turned = (scores.masked_fill(cells, -torch.inf) for cells in (~mask, mask))
    suspects = {
        "The mask came after the softmax: forbidden keys have taken their part.": scores.softmax(-1) * mask,
        "A score of 0 does not forbid a key: e to the power of 0 is 1.": (scores * mask).softmax(-1),
        "These weights sum to 1 over the queries. They must sum to 1 over the keys: which dim?": masked.softmax(-2),
        "The keys that are allowed have no weight. Is the mask inverted?": turned.softmax(-1),
        "These are the weights without a mask.": scores.softmax(-1),
        "Forbidden keys have lower scores, but still get weight. What becomes exactly 0?": (scores + mask).softmax(-1),
    }
    expect_tensor(answer(scores, mask), masked.softmax(-1), "the weights under a causal mask", suspects)


@A1.part("a1_weights", points=1)
def a_query_without_a_key(answer: Answer, variant: Variant) -> None:
    n, empty = 5, variant.whole("empty", 2, 4)
    scores, itself = randn(variant, "nothing", n, n), torch.eye(n, dtype=torch.bool)
    mask = masks.causal().dense(n).tril(-1)  # earlier tokens only, so the first query has no key
    mask[empty] = False
    closed = ~mask.any(-1, keepdim=True)
    own = scores.masked_fill(~(mask | itself), -torch.inf).softmax(-1)
    weights = scores.masked_fill(~(mask | itself & closed), -torch.inf).softmax(-1)
    suspects = {
        "A softmax of nothing but minus infinity divides zero by zero.": not_finite,
        "The weights of a closed row are 0. By the rule, the query attends to itself.": weights * ~closed,
        "A closed row has equal weights on forbidden keys, as with finfo.min.": weights.where(~closed, 1 / n),
        "All queries attend to themselves. The rule is for those that may attend to nothing.": own,
    }
    what = f"the weights where queries 0 and {empty} may attend to nothing"
    expect_tensor(answer(scores, mask), weights, what, suspects)


@A1.part("a1_weights", points=1, hidden=True)
def large_scores(answer: Answer, variant: Variant) -> None:
    scores, mask = 200 * randn(variant, "large", 5, 5) - 1e4, masks.causal().dense(5)
    suspects = {
        "With scores this low, a score of -1e4 does not forbid a key.": scores.masked_fill(~mask, -1e4).softmax(-1),
        "The exponential of a very low score is 0 for all keys. Is there a softmax that avoids this?": not_finite,
    }
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expect_tensor(answer(scores, mask), weights, "the weights of very low scores", suspects)


@A1.part("a1_attention", points=4)
def the_heads(answer: Answer, variant: Variant) -> None:
    n, heads, d = variant.whole("heads n", 4, 6), variant.whole("heads", 2, 3), variant.whole("heads d", 4, 5)
    width, slopes = heads * d, torch.tensor([0.5, 0.25, 0.125])[:heads]
    mask = torch.stack([masks.sliding_window(2).dense(n), *[masks.causal().dense(n)] * (heads - 1)])
    x = randn(variant, "x", n, width)
    q, k, v = matrices = [randn(variant, f"w {name}", width, width) / width**0.5 for name in "qkv"]
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()

    def attention(q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Tensor = mask, heads=heads, back=True) -> Tensor:
        parts = ((x @ w).view(n, heads, width // heads).transpose(0, 1) for w in (q, k, v))
        mixed = attend(*parts, mask, slopes[:heads])
        return (mixed.transpose(0, 1) if back else mixed).reshape(n, width)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
        added = (-slopes[:, None, None] * distance).masked_fill(~mask, -torch.inf)
        return scaled_dot_product_attention(q, k, v, attn_mask=added)

    mixed_up = attend(*((x @ w).view(heads, n, d) for w in matrices), mask, slopes)
    suspects = {
        "A view does not bring the heads to the front: it mixes tokens with heads.": mixed_up.reshape(n, width),
        "The heads are put together in the wrong order. Are the axes swapped back?": attention(back=False),
        "This is one head of the whole width. Where are the columns cut?": attention(mask=mask[:1], heads=1),
        "All heads use the mask of the first one.": attention(mask=mask[:1].expand_as(mask)),
        "The masks are not used: tokens attend to later tokens.": attention(mask=mask | True),
        "You divide by the root of the whole width; a head has width // heads.": attention(q / heads**0.5),
        "Your matrices are transposed: it is x @ w.": attention(q.T, k.T, v.T),
        "Keys and queries have changed places.": attention(k, q),
    }
    expect_tensor(answer(x, *matrices, slopes, mask), attention(), f"attention with {heads} heads", suspects, 1e-4)


@A1.part("a1_stack", points=3)
def the_stack(answer: Answer, variant: Variant) -> None:
    n = variant.whole("stack n", 7, 9)
    stack = _stack(n)
    needed, first = _needed(stack), (stack.long().argmax(0) + 1).fill_diagonal_(0)
    suspects = {
        "Only direct attention counts here. What has a key received earlier?": first.where(stack.any(0), -1),
        "All layers use the mask of the first one.": _needed(stack[:1].expand_as(stack)),
        "The layers are in reverse order: the first mask is that of the first layer.": _needed(stack.flip(0)),
        "The product has its factors in the wrong order: the query is in the latest layer.": _needed(stack, True),
        "Rows and columns have changed places: row i is the influenced token.": needed.T,
        "The layers are counted from 0. Direct influence in the first layer needs 1.": needed - (needed > 0).long(),
        "Later layers overwrite the first time. Which cells are new?": torch.where(needed >= 0, len(stack), -1),
    }
    expect_tensor(answer(stack), needed, "layers_needed of two local layers and a third one", suspects)


@A1.part("a1_stack", points=1)
def masks_without_the_diagonal(answer: Answer, variant: Variant) -> None:
    n = variant.whole("strict n", 6, 8)
    stack = _stack(n)[1:].tril(-1)
    two = stack[1].float() @ stack[0].float() > 0
    plain = torch.where(stack[0], 1, torch.where(two, 2, -1)).fill_diagonal_(0)
    suspects = {"A token that may not attend to itself still keeps what it has: the residual connection.": plain}
    expect_tensor(answer(stack), _needed(stack), "layers_needed of masks without the diagonal", suspects)


@A1.part("a1_stack", points=1, hidden=True)
def any_masks(answer: Answer, variant: Variant) -> None:
    stack = randn(variant, "any masks", 4, 8, 8) > 1.2
    expect_tensor(answer(stack), _needed(stack), "layers_needed of four random masks")


def _stack(n: int) -> Tensor:
    """Two layers with a window of 2, and one in which a token attends to itself and to every third token before it."""
    local, causal = masks.sliding_window(2).dense(n), masks.causal().dense(n)
    third = causal & ((torch.arange(n) % 3 == 0) | torch.eye(n, dtype=torch.bool))
    return torch.stack([local, local, third])


def _needed(stack: Tensor, swapped: bool = False) -> Tensor:
    """By sets instead of products, which is another way than the solution's. `swapped`: products in the wrong order."""
    n = stack.shape[-1]
    reached, needed = [{i} for i in range(n)], torch.eye(n).long() - 1
    for layer, mask in enumerate(stack, start=1):
        keys = [set(row.nonzero().flatten().tolist()) for row in mask]
        through = [[keys[k] for k in reached[i]] if swapped else [reached[k] for k in keys[i]] for i in range(n)]
        reached = [reached[i].union(*through[i]) for i in range(n)]
        for i in range(n):
            for j in reached[i]:
                needed[i, j] = layer if needed[i, j] < 0 else needed[i, j]
    return needed
