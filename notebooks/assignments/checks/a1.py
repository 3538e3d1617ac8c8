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
    "a letter reached the island late",
    "the bell rang before the ship left",
    "she lent me the map of her town",
    "no train stops at the small station",
)
ASSIGNMENT = A1 = Assignment("a1", "Masks and attention by hand", minutes=75)
A1.exercise("a1_causal_mask", "Who may look back", "causal_mask", difficulty=1, minutes=6)
A1.exercise("a1_window_mask", "A short memory", "window_mask", difficulty=2, minutes=8)
A1.exercise("a1_padded_mask", "Nobody looks at a pad", "padded_mask", difficulty=2, minutes=10)
A1.exercise("a1_scores", "Scores", "scores_of", difficulty=2, minutes=8)
A1.exercise("a1_weights", "Weights under a mask", "weights_of", difficulty=3, minutes=12)
A1.exercise("a1_attention", "Heads", "attention", difficulty=4, minutes=18)
A1.exercise("a1_who_hears", "Stacked layers", "who_hears", difficulty=4, minutes=13)
A1.shows("sentence", SENTENCES)


@A1.part("a1_causal_mask", points=2)
def the_table(answer: Answer, variant: Variant) -> None:
    n = variant.whole("causal", 4, 9)
    causal = masks.causal().dense(n)
    suspects = {
        f"Position 0 attends to position {n - 1}: rows are queries. Did you keep the upper triangle?": causal.T,
        "No token attends to itself, and the first one attends to nothing. Is the diagonal in?": causal.tril(-1),
        "True and False are the other way round: True means that the query may attend to the key.": ~causal,
        "Those are numbers to be added to scores; a table of True and False is asked for.": causal.float().log(),
        "A table of 0 and 1 is nearly it: make it booleans.": causal.float(),
    }
    expect_tensor(answer(n), causal, f"causal_mask({n})", suspects)


@A1.part("a1_window_mask", points=2)
def the_window(answer: Answer, variant: Variant) -> None:
    n, w = variant.whole("window tokens", 6, 10), variant.whole("window", 2, 4)
    causal = masks.causal().dense(n)
    window = causal.triu(1 - w)
    suspects = {
        f"A window of {w} reaches {w - 1} tokens back, as the token itself counts. Is it <= or <?": causal.triu(-w),
        f"A window of {w} holds {w} tokens, the token itself included. Yours holds {w - 1}.": causal.triu(2 - w),
        "Your window also opens to the right: what comes later must stay hidden.": window | window.T,
        "This is the window, turned over: rows are queries. Is it i - j or j - i?": window.T,
        "It reaches back without an end: where does w enter?": causal,
    }
    expect_tensor(answer(n, w), window, f"window_mask({n}, {w})", suspects)


@A1.part("a1_window_mask", points=1)
def a_window_beyond_the_text(answer: Answer, variant: Variant) -> None:
    n = variant.whole("short text", 2, 4)
    expect_tensor(answer(n, n + 5), masks.causal().dense(n), f"window_mask({n}, {n + 5})")


@A1.part("a1_padded_mask", points=3)
def the_batch(answer: Answer, variant: Variant) -> None:
    rng = variant.rng("padding")
    n = rng.randint(5, 8)
    lengths = [rng.randint(2, n - 2), n, rng.randint(2, n - 1)]
    real, causal = torch.arange(n) < torch.tensor(lengths)[:, None], masks.causal().dense(n)
    keys = real[:, None, :]
    suspects = {
        "Your table empties the rows of pads, as queries. Close their columns, as keys.": causal & real[:, :, None],
        "The pads are masked, but the future is open: where is the causal table?": keys.expand(3, n, n),
        "This masks the real tokens and leaves the pads. Is the comparison the right way round?": causal & ~keys,
        "The pads are at the end of a row. Your table has them in front.": causal & keys.flip(-1),
        "The pads are still attended to: where do the lengths enter?": causal.expand(3, n, n),
    }
    expect_tensor(answer(lengths, n), causal & keys, f"padded_mask({lengths}, {n})", suspects)


@A1.part("a1_scores", points=2)
def the_scores(answer: Answer, variant: Variant) -> None:
    n, d = variant.whole("scores n", 3, 6), variant.whole("scores d", 7, 12)
    q, k = (randn(variant, f"scores {name}", 2, n, d) for name in "qk")
    product = q @ k.mT
    suspects = {
        "These are the bare dot products: what are they divided by?": product,
        "They are divided by d. It is its square root that keeps the scores of one size.": product / d,
        "They are divided by the root of the number of tokens. The size of a vector counts.": product / n**0.5,
        "Keys are rows here. Queries are to be rows.": product.mT / d**0.5,
        "They are multiplied by the square root.": product * d**0.5,
    }
    expect_tensor(answer(q, k), product / d**0.5, f"the scores of vectors of shape {tuple(q.shape)}", suspects)


@A1.part("a1_weights", points=2)
def the_weights(answer: Answer, variant: Variant) -> None:
    n = variant.whole("weights n", 4, 7)
    scores, mask = 2 * randn(variant, "weights", n, n), masks.causal().dense(n)
    masked, turned = scores.masked_fill(~mask, -torch.inf), scores.masked_fill(mask, -torch.inf)
    suspects = {
        "The mask came after the softmax: forbidden keys have taken their share.": scores.softmax(-1) * mask,
        "A score of zero is no ban: e to the 0 is 1, so forbidden keys get weight.": (scores * mask).softmax(-1),
        "These weights sum to one over the queries. Each query shares out one: which dim?": masked.softmax(-2),
        "The keys that may be attended to are the ones you banned.": turned.softmax(-1).nan_to_num(0.0),
        "There is no trace of the mask.": scores.softmax(-1),
        "Forbidden scores are lower, and still get weight. What becomes exactly zero?": (scores + mask).softmax(-1),
    }
    expect_tensor(answer(scores, mask), masked.softmax(-1), "the weights under a causal mask", suspects)


@A1.part("a1_weights", points=1)
def a_row_that_sees_nothing(answer: Answer, variant: Variant) -> None:
    scores, mask = randn(variant, "nothing", 3, 3), torch.tensor([[True], [False], [True]]).expand(3, 3)
    suspects = {
        "A softmax of nothing but minus infinity divides zero by zero.": not_finite,
        "The row that may attend to nothing shares its weight among all.": scores.where(mask, 0.0).softmax(-1),
    }
    weights = scores.softmax(-1) * mask
    expect_tensor(answer(scores, mask), weights, "the weights where row 1 may attend to nothing", suspects)


@A1.part("a1_weights", points=1, hidden=True)
def large_scores(answer: Answer, variant: Variant) -> None:
    scores, mask = 200 * randn(variant, "large", 5, 5) - 1e4, masks.causal().dense(5)
    suspects = {
        "With scores this low, -1e4 in a forbidden place is no ban.": scores.masked_fill(~mask, -1e4).softmax(-1),
        "e to a very low score is 0 for all keys. Is there a softmax that avoids this?": torch.zeros(5, 5),
    }
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expect_tensor(answer(scores, mask), weights, "the weights of very low scores", suspects)


@A1.part("a1_attention", points=4)
def the_heads(answer: Answer, variant: Variant) -> None:
    n, heads, d = variant.whole("heads n", 4, 6), variant.whole("heads", 2, 3), variant.whole("heads d", 4, 5)
    width, causal = heads * d, masks.causal().dense(n)
    x = randn(variant, "x", n, width)
    q, k, v = matrices = [randn(variant, f"w {name}", width, width) / width**0.5 for name in "qkv"]

    def attention(q: Tensor = q, k: Tensor = k, v: Tensor = v, heads=heads, mask: Tensor = causal, back=True) -> Tensor:
        q, k, v = ((x @ w).view(n, heads, width // heads).transpose(0, 1) for w in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (mixed.transpose(0, 1) if back else mixed).reshape(n, width)

    viewed = [(x @ w).view(heads, n, d) for w in matrices]
    in_steps = torch.arange(width).view(d, heads).T.flatten()  # column 0, heads, 2 * heads, ...
    suspects = {
        "A view alone does not bring the heads to the front: it mixes tokens with heads.": (
            scaled_dot_product_attention(*viewed, attn_mask=causal).reshape(n, width)
        ),
        "The heads are put together in the wrong order: swap back before the last reshape.": attention(back=False),
        "This is one head of the whole width. Where are the columns cut?": attention(heads=1),
        "The mask is not in force: a token mixes in what comes later.": attention(mask=causal | True),
        "You divide by the root of the whole width; a head has width // heads.": attention(q / heads**0.5),
        "The columns of a head are to be neighbours; yours are taken in steps.": (
            attention(q[:, in_steps], k[:, in_steps], v[:, in_steps])[:, in_steps.argsort()]
        ),
        "Your matrices are transposed: it is x @ w.": attention(q.T, k.T, v.T),
        "Keys and queries have changed places.": attention(k, q),
    }
    expect_tensor(answer(x, *matrices, heads, causal), attention(), f"attention with {heads} heads", suspects, 1e-4)


@A1.part("a1_who_hears", points=3)
def the_stack(answer: Answer, variant: Variant) -> None:
    mask = masks.sliding_window(2).dense(variant.whole("hears n", 7, 9))
    suspects = {
        "This is one layer. What has my neighbour heard in the layer before?": _heard(mask, 1),
        "One layer too many: how often do you multiply?": _heard(mask, 4),
        "One layer too few: how often do you multiply?": _heard(mask, 2),
        "Who hears and who is heard have changed places.": _heard(mask, 3).T,
    }
    expect_tensor(answer(mask, 3), _heard(mask, 3), "who hears of whom after 3 layers, window 2,", suspects)


@A1.part("a1_who_hears", points=1)
def a_mask_without_itself(answer: Answer, variant: Variant) -> None:
    mask = masks.sliding_window(2).dense(variant.whole("strict n", 5, 7)).tril(-1)
    plain = torch.linalg.matrix_power(mask.float(), 2) > 0
    suspects = {"A token that may not attend to itself still keeps what it has: the residual connection.": plain}
    expect_tensor(answer(mask, 2), _heard(mask, 2), "who hears of whom without the diagonal", suspects)


@A1.part("a1_who_hears", points=1, hidden=True)
def any_mask(answer: Answer, variant: Variant) -> None:
    mask = randn(variant, "any mask", 8, 8) > 0.8
    expect_tensor(answer(mask, 3), _heard(mask, 3), "who hears of whom under a random mask")


def _heard(mask: Tensor, layers: int) -> Tensor:
    """By paths, and not by products: another way than the solution's."""
    n = len(mask)
    heard = [{i} for i in range(n)]
    for _ in range(layers):
        heard = [heard[i].union(*(heard[j] for j in range(n) if mask[i, j])) for i in range(n)]
    return torch.tensor([[j in heard[i] for j in range(n)] for i in range(n)])
