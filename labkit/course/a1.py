"""A1, masks and attention by hand: what its checks ask, and what they say to typical mistakes."""

from __future__ import annotations

import torch

from labkit import masks
from labkit.course.answers import Answer
from labkit.course.exercises import Assignment
from labkit.course.mistakes import expect, expect_tensor
from labkit.course.variant import Variant

ASSIGNMENT = A1 = Assignment("a1", "Masks and attention by hand", minutes=75)

SENTENCES = (
    "the old seal swam to the rock",
    "a letter reached the island late",
    "the bell rang before the ship left",
    "she lent me the map of her town",
    "no train stops at the small station",
)
CELL = ("query", "key")


@A1.draws("sentence")
def sentence(variant: Variant) -> str:
    return variant.choose("a1 sentence", SENTENCES)


@A1.exercise("a1_causal_mask", "Who may look back", answer="causal_mask", points=2, difficulty=1, minutes=6)
def the_table(answer: Answer, variant: Variant) -> None:
    n = variant.whole("causal", 4, 9)
    wanted = masks.causal().dense(n)
    found = answer(n)
    suspects = {
        f"Your mask lets position 0 see position {n - 1}: rows are queries. Did you keep the upper triangle?": wanted.T,
        "No token sees itself, and the first one sees nothing. Is the diagonal in?": wanted.tril(-1),
        "True and False are the other way round: True means that the key may be looked at.": ~wanted,
        "Those are numbers to be added to scores; a table of True and False is asked for.": (
            torch.zeros(n, n).masked_fill(~wanted, float("-inf"))
        ),
        "A table of 0 and 1 is nearly it: make it booleans.": wanted.float(),
    }
    expect_tensor(found, wanted, f"causal_mask({n})", suspects, names=CELL)


@A1.exercise("a1_window_mask", "A short memory", answer="window_mask", points=2, difficulty=2, minutes=8)
def the_window(answer: Answer, variant: Variant) -> None:
    n = variant.whole("window tokens", 6, 10)
    w = variant.whole("window", 2, 4)
    back = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    wanted = (back >= 0) & (back < w)
    suspects = {
        f"A window of {w} reaches {w - 1} tokens back, as the token itself counts. Yours reaches {w}: <= or <?": (
            (back >= 0) & (back <= w)
        ),
        f"A window of {w} holds {w} tokens, the token itself included. Yours holds {w - 1}.": (back >= 0)
        & (back < w - 1),
        "Your window also opens to the right: what comes later must stay hidden.": back.abs() < w,
        "This is the window, turned over: rows are queries. Is it i - j or j - i?": (back <= 0) & (back > -w),
        "It looks back without an end: where does w enter?": back >= 0,
    }
    expect_tensor(answer(n, w), wanted, f"window_mask({n}, {w})", suspects, names=CELL)


@A1.also("a1_window_mask", points=1)
def a_window_beyond_the_text(answer: Answer, variant: Variant) -> None:
    n = variant.whole("short text", 2, 4)
    expect_tensor(
        answer(n, n + 5), masks.causal().dense(n), f"window_mask({n}, {n + 5}), wider than the text,", names=CELL
    )


@A1.exercise("a1_padded_mask", "Nobody looks at a pad", answer="padded_mask", points=3, difficulty=2, minutes=10)
def the_batch(answer: Answer, variant: Variant) -> None:
    rng = variant.rng("padding")
    n = rng.randint(5, 8)
    lengths = [rng.randint(2, n - 2), n, rng.randint(2, n - 1)]
    real = torch.arange(n)[None, :] < torch.tensor(lengths)[:, None]
    causal = masks.causal().dense(n)
    wanted = causal[None] & real[:, None, :]
    suspects = {
        "Your table empties the rows of the pads, as queries. It is as keys that nobody may look at them.": (
            causal[None] & real[:, :, None]
        ),
        "The pads are masked, but the future is open: where is the causal table?": real[:, None, :].expand(-1, n, -1),
        "This masks the real tokens and leaves the pads. Is the comparison the right way round?": (
            causal[None] & ~real[:, None, :]
        ),
        "The pads stand at the end of a row. Your table has them in front.": causal[None] & real.flip(-1)[:, None, :],
        "The pads are still looked at: where do the lengths enter?": causal[None].expand(len(lengths), -1, -1),
    }
    expect_tensor(
        answer(lengths, n), wanted, f"padded_mask({lengths}, {n})", suspects, names=("sentence", "query", "key")
    )


@A1.exercise("a1_scores", "Scores", answer="scores_of", points=2, difficulty=2, minutes=8)
def the_scores(answer: Answer, variant: Variant) -> None:
    n, d = variant.whole("scores n", 3, 6), variant.whole("scores d", 7, 12)
    q, k = (_drawn(variant, f"scores {name}", 2, n, d) for name in "qk")
    product = q @ k.transpose(-2, -1)
    wanted = product / d**0.5
    suspects = {
        "These are the bare dot products: what are they divided by?": product,
        "They are divided by d. It is its square root that keeps the scores of one size.": product / d,
        "They are divided by the square root of the number of tokens. It is the size of a vector that counts.": (
            product / n**0.5
        ),
        "Keys are rows here. Queries are to be rows.": wanted.transpose(-2, -1),
        "They are multiplied by the square root.": product * d**0.5,
    }
    what = f"the scores of queries and keys of shape {tuple(q.shape)}"
    expect_tensor(answer(q, k), wanted, what, suspects, names=("batch", *CELL))


@A1.exercise("a1_weights", "Weights under a mask", answer="weights_of", points=2, difficulty=3, minutes=12)
def the_weights(answer: Answer, variant: Variant) -> None:
    n = variant.whole("weights n", 4, 7)
    scores = 2 * _drawn(variant, "weights", n, n)
    mask = masks.causal().dense(n)
    masked, after = scores.masked_fill(~mask, float("-inf")), scores.softmax(-1) * mask
    zeroed, lowered = (scores * mask).softmax(-1), (scores - (~mask).float()).softmax(-1)
    turned, columns = scores.masked_fill(mask, float("-inf")).softmax(-1).nan_to_num(0.0), masked.softmax(-2)
    wanted = masked.softmax(-1)
    suspects = {
        "The mask came after the softmax: forbidden keys have taken their share, so a row sums to less than 1.": after,
        "A score of zero is no ban: e to the 0 is 1, so the forbidden keys still get weight.": zeroed,
        "These weights sum to one over the queries (a column). Each query shares out one whole: which dim?": columns,
        "The keys that may be looked at are the ones you banned.": turned,
        "There is no trace of the mask.": scores.softmax(-1),
        "Forbidden scores are made smaller, and still get weight: what number becomes exactly zero?": lowered,
    }
    expect_tensor(answer(scores, mask), wanted, "the weights under a causal mask", suspects, names=CELL)


@A1.also("a1_weights", points=1)
def a_row_that_sees_nothing(answer: Answer, variant: Variant) -> None:
    scores = _drawn(variant, "nothing", 3, 3)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    found = answer(scores, mask)
    expect(
        not torch.isnan(torch.as_tensor(found)).any(),
        "weights of zero in the row that may look at nothing",
        "nan",
        "A softmax of nothing but minus infinity divides zero by zero.",
    )
    wanted = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    equal = wanted.clone()
    equal[1] = 1 / 3
    suspects = {"The row that may look at nothing shares its weight among keys it may not see.": equal}
    expect_tensor(found, wanted, "the weights, with a row that may look at nothing,", suspects, names=CELL)


@A1.also("a1_weights", points=1, hidden=True)
def large_scores(answer: Answer, variant: Variant) -> None:
    scores = 200 * _drawn(variant, "large", 5, 5) - 1e4
    mask = masks.causal().dense(5)
    wanted = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    raised = scores.exp() * mask
    likely = {
        "With scores this low, -1e4 in the place of a forbidden one is no ban.": scores.masked_fill(
            ~mask, -1e4
        ).softmax(-1),
        "e to a very low score is 0 for all keys. Is there a softmax that knows this?": raised
        / raised.sum(-1, keepdim=True),
    }
    expect_tensor(answer(scores, mask), wanted, "the weights of very low scores", likely, names=CELL)


@A1.exercise("a1_attention", "Heads", answer="attention", points=4, difficulty=4, minutes=18)
def the_heads(answer: Answer, variant: Variant) -> None:
    n, heads, d = variant.whole("heads n", 4, 6), variant.rng("heads").choice((2, 3)), variant.whole("heads d", 4, 5)
    width = heads * d
    x = _drawn(variant, "x", n, width)
    matrices = [_drawn(variant, f"w {name}", width, width) / width**0.5 for name in "qkv"]
    mask = masks.causal().dense(n)
    wanted = _attention(x, matrices, heads, mask)
    q, k, v = matrices
    suspects = {
        "A view alone does not bring the heads to the front: it mixes tokens with heads.": _viewed(
            x, matrices, heads, mask
        ),
        "The heads are put together in the wrong order: swap the dimensions back before the last reshape.": (
            _split_attention(x, matrices, heads, mask).reshape(n, width)
        ),
        "This is one head of the whole width. Where are the columns cut?": _attention(x, matrices, 1, mask),
        "The mask is not in force: a token mixes in what comes later.": _attention(
            x, matrices, heads, torch.ones_like(mask)
        ),
        "The scores are divided by the root of the whole width; a head has width // heads columns.": (
            _attention(x, [q / heads**0.5, k, v], heads, mask)
        ),
        "The columns of a head are to be neighbours; yours are taken in steps.": _strided(x, matrices, heads, mask),
        "Your matrices are transposed: it is x @ w.": _attention(x, [w.T for w in matrices], heads, mask),
        "Keys and queries have changed places.": _attention(x, [k, q, v], heads, mask),
    }
    expect_tensor(answer(x, *matrices, heads, mask), wanted, f"attention with {heads} heads", suspects, 1e-4)


@A1.exercise("a1_who_hears", "Stacked layers", answer="who_hears", points=3, difficulty=4, minutes=13)
def the_stack(answer: Answer, variant: Variant) -> None:
    n, layers = variant.whole("hears n", 7, 9), variant.whole("hears layers", 2, 3)
    mask = masks.sliding_window(2).dense(n)
    wanted = _heard(mask, layers)
    suspects = {
        "This is one layer. What has my neighbour heard in the layer before?": _heard(mask, 1),
        "One layer too many: how often do you multiply?": _heard(mask, layers + 1),
        "One layer too few: how often do you multiply?": _heard(mask, layers - 1),
        "Who hears and who is heard have changed places.": wanted.T,
    }
    what = f"who hears of whom after {layers} layers with a window of 2"
    expect_tensor(answer(mask, layers), wanted, what, suspects, names=CELL)


@A1.also("a1_who_hears", points=1)
def a_mask_without_itself(answer: Answer, variant: Variant) -> None:
    n = variant.whole("strict n", 5, 7)
    mask = masks.causal().dense(n).tril(-1) & masks.sliding_window(2).dense(n)
    plain = torch.linalg.matrix_power(mask.float(), 2) > 0
    suspects = {"A token that may not look at itself still keeps what it knows: the residual connection.": plain}
    expect_tensor(
        answer(mask, 2), _heard(mask, 2), "who hears of whom, where a mask shows no token itself,", suspects, names=CELL
    )


@A1.also("a1_who_hears", points=1, hidden=True)
def any_mask(answer: Answer, variant: Variant) -> None:
    generator = torch.Generator().manual_seed(variant.seed("any mask"))
    mask = torch.rand(8, 8, generator=generator) < 0.2
    expect_tensor(answer(mask, 3), _heard(mask, 3), "who hears of whom under a random mask", names=CELL)


def _drawn(variant: Variant, name: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(variant.seed(name)))


def _heard(mask: torch.Tensor, layers: int) -> torch.Tensor:
    """By paths, and not by products: another way than the solution's."""
    n = len(mask)
    heard = [{i} for i in range(n)]
    for _ in range(layers):
        heard = [set().union(heard[i], *(heard[j] for j in range(n) if mask[i, j])) for i in range(n)]
    return torch.tensor([[j in heard[i] for j in range(n)] for i in range(n)])


def _attention(x: torch.Tensor, matrices: list[torch.Tensor], heads: int, mask: torch.Tensor) -> torch.Tensor:
    return _split_attention(x, matrices, heads, mask).transpose(0, 1).reshape(x.shape)


def _split_attention(x: torch.Tensor, matrices: list[torch.Tensor], heads: int, mask: torch.Tensor) -> torch.Tensor:
    n, width = x.shape
    q, k, v = ((x @ w).view(n, heads, width // heads).transpose(0, 1) for w in matrices)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _viewed(x: torch.Tensor, matrices: list[torch.Tensor], heads: int, mask: torch.Tensor) -> torch.Tensor:
    n, width = x.shape
    q, k, v = ((x @ w).view(heads, n, width // heads) for w in matrices)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(n, width)


def _strided(x: torch.Tensor, matrices: list[torch.Tensor], heads: int, mask: torch.Tensor) -> torch.Tensor:
    n, width = x.shape
    q, k, v = ((x @ w).view(n, width // heads, heads).permute(2, 0, 1) for w in matrices)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return mixed.permute(1, 2, 0).reshape(n, width)
