"""What A5's tests are attacked with, engines and models right and wrong; its oracles and their arguments."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.course.mistakes import expect
from labkit.course.variant import Variant
from labkit.future_attention import Future, FutureGPT
from labkit.gpt import GPT, GPTConfig

WORDINGS = (
    ["Spain's capital is ?", "From which city is Spain governed ?", "The king's town ?"],
    ["Who wrote Hamlet ?", "Hamlet is a play by which author ?", "The pen behind Hamlet ?"],
    ["Where ends the Nile ?", "Into which sea does the Nile flow ?", "The Nile's mouth ?"],
    ["What do bees make ?", "Which sweet food is made by bees ?", "The product of a hive ?"],
    ["Gold has which symbol ?", "In chemistry how is gold written ?", "Gold's two letters ?"],
)
VOCABULARY, CONTEXT, WIDTH, AHEAD = 40, 48, 16, 4  # of the toy models; the last: columns
LEAKS = {  # what a model does: what to say of a test that lets it through, or that accuses an honest one
    "causal": "You accuse an honest model. Where may a change show, and how near is near enough?",
    "columns": "You accuse an honest model: its columns stand for later positions, and are made of no token.",
    "next": "Your test lets a model through that reads the next token. Does it look at every output before the change?",
    "third": "Only the first position peeks here, at the third token. Which tokens, and which outputs, do you try?",
    "far": "This one reads the token 12 places ahead, and none nearer. How long are your texts?",
    "faint": "What leaks here is faint, a millionth. A leak has no size below which training would not find it.",
    "length": "This one sees no later token, but how many there are. Are your texts all of one length?",
    "some": "This one reads the next token only if its id is a multiple of 4. Is one kind of change enough?",
}
FAULTS = {  # the same of fusion engines
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


def engine(kind: str, seed: int) -> Any:
    """(prefix, segments, cue), all token ids -> the logits of the next token: fusion, with a fault or without."""
    run = toy(seed)

    def fuse(prefix: list[int], segments: list[list[int]], cue: list[int]) -> Tensor:
        prefix = prefix[:1] * (kind == "one more") + prefix
        if kind in ("sorted", "longest"):
            segments = sorted(segments, key=lambda ids: (len(ids), ids))[-1 if kind == "longest" else 0 :]
        lengths = [len(ids) for ids in segments]
        group, mask, places, bias = layout(len(prefix), lengths, len(cue))
        if kind in ("causal", "sorted"):
            mask = torch.ones_like(mask).tril()
        ends = (group > len(lengths))[:, None]  # the rows of the cue
        if kind == "last":
            mask = mask & (~ends | (group == 0) | (group >= len(lengths)))
        if kind == "go on":
            places = torch.arange(len(group))
        if kind == "first end":
            places[len(group) - len(cue) :] += lengths[0] - max(lengths)
        bias = {"no bias": 0.0 * bias, "last": 0.0 * bias, "half": bias.sign() * math.log(2)}.get(kind, bias)
        ids = torch.tensor([*prefix, *sum(segments, []), *cue])
        return run(ids, places, mask, bias * ends)[-1]  # within a segment nothing is biased: it is alone there

    return fuse


def model(kind: str, seed: int) -> Any:
    """ids (batch, n) -> logits (batch, n, vocabulary): a causal language model, or one that peeks."""
    run = toy(seed)

    def logits(ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[-1])
        ahead = at - at[:, None]
        peeks = {"next": ahead == 1, "far": ahead == 12, "third": (at[:, None] == 0) & (at == 2)}
        mask = (ahead <= 0) | peeks.get(kind, False) | (ahead == 1) & (kind == "some") & (ids % 4 == 0)[..., None, :]
        columns = torch.ones(len(at), CONTEXT).triu(1).tril(AHEAD).bool()
        columns[:, {"columns": CONTEXT, "length": len(at)}.get(kind, 0) :] = False
        found = run(ids, at, mask, columns=columns)
        return found + 1e-6 * run(ids, at, mask | True) if kind == "faint" else found

    return logits


def leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_()


def losses_and_gradients(result: Any, guess: Tensor, truth: Tensor) -> list:
    """[MSE, cosine, and of each: the size of its gradients into prediction and target]"""
    found = [torch.as_tensor(each) for each in pair_of(result)]

    def sizes(loss: Tensor) -> list[float]:
        into = (
            torch.autograd.grad(loss, [guess, truth], allow_unused=True, retain_graph=True)
            if loss.requires_grad
            else ()
        )
        return [0.0 if each is None else float(each.abs().sum()) for each in into or (None, None)]

    return [*(each.item() for each in found), *(sizes(each) for each in found)]


def toy(seed: int) -> Any:
    """Two random layers in float64, under any mask, with a bias on keys, and with columns beside the past."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    words, places, ahead = draw(VOCABULARY, WIDTH), draw(CONTEXT, WIDTH), draw(CONTEXT, WIDTH)
    layers = [draw(4, WIDTH, WIDTH) / WIDTH**0.5 for _ in range(2)]

    def run(ids: Tensor, at: Tensor, mask: Tensor, bias: Tensor | float = 0.0, columns: Tensor | None = None) -> Tensor:
        x = words[ids] + places[at]
        columns = torch.zeros(len(at), CONTEXT).bool() if columns is None else columns
        mask = torch.cat([mask, columns.expand(*mask.shape[:-1], CONTEXT)], dim=-1)
        for q, k, v, o in layers:
            query = x @ q / WIDTH**0.5
            scores = torch.cat([query @ (x @ k).transpose(-2, -1) + bias, query @ ahead.T], dim=-1)
            past, future = softmax_over(scores, mask).split([len(at), CONTEXT], dim=-1)
            x = F.layer_norm(x + torch.tanh((past @ (x @ v) + future @ ahead) @ o), (WIDTH,))
        return x @ words.T

    return run


def layout(prefix: int, lengths: list[int], tail: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(group: 0 prefix, 1.. segments, one more the tail; mask; positions; bias)"""
    sizes, begins = [prefix, *lengths, tail], [0] + [prefix] * len(lengths) + [prefix + max(lengths)]
    group = torch.tensor([i for i, size in enumerate(sizes) for _ in range(size)])
    places = torch.tensor([begin + i for begin, size in zip(begins, sizes, strict=True) for i in range(size)])
    apart = (group[:, None] > group) & (group > 0) & (group[:, None] <= len(lengths))
    bias = ((group > 0) & (group <= len(lengths))).double() * math.log(1 / len(lengths))
    return group, torch.ones(apart.shape).tril().bool() & ~apart, places, bias


def true_targets(scores: Tensor, value: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """By loops; the difference by what the past loses: it keeps 1 - share of the causal output."""
    joint, difference = torch.zeros_like(value), torch.zeros_like(value)
    for i in range(value.shape[-2]):
        weights = scores[..., i, : i + 1 + dim].exp()
        part = (weights[..., i + 1 :, None] * value[..., i + 1 : i + 1 + dim, :]).sum(-2)
        past = (weights[..., : i + 1, None] * value[..., : i + 1, :]).sum(-2) / weights[..., : i + 1].sum(-1)[..., None]
        joint[..., i, :] = part / weights.sum(-1)[..., None]
        difference[..., i, :] = joint[..., i, :] - past * (weights[..., i + 1 :].sum(-1) / weights.sum(-1))[..., None]
    return joint, difference


def side_by_side(cache: Tensor, prefix: int, lengths: list[int]) -> Tensor:
    real = [row[:, [at]] for row, n in zip(cache, lengths, strict=True) for at in range(prefix, prefix + n)]
    return torch.cat([cache[0, :, :prefix], *real], dim=1)[None]


def counted_cost(context: int, width: int, layers: int, dim: int) -> tuple[int, int]:
    """On models that are made for it: with columns, and with a wider MLP."""
    config = GPTConfig(vocab_size=8, context=context, width=width, layers=layers, heads=2, inner=width)
    with torch.random.fork_rng(devices=[]):
        made = FutureGPT(config, Future(dim)), GPT(config), GPT(replace(config, inner=width + 1))
    columns, plain, wider = (sum(p.numel() for p in model.parameters()) for model in made)
    cost = columns - plain
    return cost, min(range(2 * context), key=lambda more: abs(more * (wider - plain) - cost))


def softmax_over(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)


def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.transpose(-2, -1)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def some_lengths(variant: Variant, name: str) -> list[int]:
    """Four different lengths; the second is the longest."""
    return [*(lengths := variant.rng(name).sample(range(2, 6), 3))[:1], 6, *lengths[1:]]


def model_size(variant: Variant, nearest: str = "") -> tuple[int, int, int, int]:
    """(context, width, layers, dim); `nearest`, "above" or "below": where the whole number of new units lies."""
    rng = variant.rng(f"model size {nearest}")
    while True:
        context, width = rng.choice((40, 48, 56)), rng.choice((8, 12, 16))
        where = "above" if 2 * context * width / (2 * width + 1) % 1 > 0.5 else "below"
        if nearest in ("", where):
            return context, width, rng.randint(3, 5), rng.randint(6, 9)


def in_part(found: Any) -> float:
    """What was found, if it is a number that is not whole; otherwise nan, which equals nothing."""
    number = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    return number if isinstance(number, float) and number % 1 else math.nan


def likely_of_nan(found: Any) -> dict[str, Tensor]:
    """Targets (..., n, d) with a nan, under its likely cause: it shows in which positions have one."""
    if not isinstance(found, Tensor) or found.ndim < 2 or not found.isnan().any():
        return {}
    places = found.isnan().any(-1).reshape(-1, found.shape[-2]).any(0).nonzero()[:, 0].tolist()
    likely = "Minus infinity times 0 is nan. Is it weights that you set to 0, after the softmax, or scores?"
    if places == [found.shape[-2] - 1]:
        likely = "Your last position is nan: it has no future, and nothing can be divided by a weight of 0."
    if places == [0]:
        likely = "Your first position is nan: its past is the position itself, and without that there is none."
    return {likely: found}


def squares_and_cosines(guess: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    unit = [each / each.norm(dim=-1, keepdim=True).clamp_min(1e-8) for each in (guess, truth)]
    return (guess - truth).pow(2), (unit[0] * unit[1]).sum(-1)


def padded_caches(variant: Variant, prefix: int, lengths: list[int]) -> list[Tensor]:
    """Keys and values of a batch, padded on the right with large numbers."""
    caches = [drawn(variant, f"cache {name}", len(lengths), 2, prefix + max(lengths), 3) for name in "kv"]
    for cache in caches:
        cache[:, :, :prefix] = cache[:1, :, :prefix]
        for row, length in zip(cache, lengths, strict=True):
            row[:, prefix + length :] = 99.0
    return caches


def two_groups(variant: Variant, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Attention to each of two groups of keys, and to both: (output, lse)."""
    query, key, value = (drawn(variant, f"merge {name}", 2, n, 4) for name, n in (("q", 3), ("k", 7), ("v", 7)))
    return [attend(scale * query, key[:, cut], value[:, cut]) for cut in (slice(2), slice(2, 7), slice(7))]


def a_question(variant: Variant, lengths: list[int], prefix: int) -> tuple:
    query, readout = drawn(variant, "ways query", 4), 3 * drawn(variant, "readout", 4, 6)
    groups = [(drawn(variant, f"k{i}", n, 4), drawn(variant, f"v{i}", n, 4)) for i, n in enumerate([prefix, *lengths])]
    return query, groups[0], groups[1:], readout


def drawn(variant: Variant, name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(variant.seed(name))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def pair_of(found: Any) -> tuple:
    expect(isinstance(found, tuple | list) and len(found) == 2, "two results", f"a {type(found).__name__}")
    return tuple(found)
