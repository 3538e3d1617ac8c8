"""A3, leakage and masked-language modelling: what its checks ask, and the wrong values of typical mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.course.answers import Answer
from labkit.course.exercises import Assignment
from labkit.course.mistakes import expect_tensor, lacks_cells
from labkit.course.variant import Variant

ASSIGNMENT = A3 = Assignment("a3", "Leakage and masked-language modelling", minutes=80)
A3.exercise("a3_packed_loss", "The loss of packed rows", "packed_loss", difficulty=2, minutes=10)
A3.exercise("a3_proof", "A loss that proves a leak", "proof_threshold", difficulty=3, minutes=10)
A3.exercise("a3_document_leaks", "Leaks between documents", "document_leaks", difficulty=3, minutes=17)
A3.exercise("a3_infill", "Predict spans at the end", "infill", difficulty=3, minutes=15)
A3.exercise("a3_order_masks", "Masks for another order", "order_masks", difficulty=3, minutes=12)
A3.exercise("a3_word_perplexity", "Words of several tokens", "word_perplexity", difficulty=3, minutes=14)

SCENES = [
    "sat by the river", "swam to the rock", "lay on the sand", "slept under the tree", "leaned over the gate",
    "ran into the wood", "stood behind the desk", "waited near the fence", "hid beneath the table",
    "walked across the field",
]  # fmt: skip
NAMES = ["Mar ##tha", "Ol ##af", "In ##grid", "Ed ##win", "Jo ##nas", "Hel ##en", "Vic ##tor", "Sig ##rid"]
KINDS = ("late layer", "boundary", "cell", "honest")
IGNORE, MASK_ID, VOCABULARY = -100, 11, 12


def _six(name: str, options: list[str]) -> Callable[[Variant], list[str]]:
    def drawn(variant: Variant) -> list[str]:
        start = variant.choose(f"a3 {name}", range(len(options)))
        return [*options, *options][start : start + 6]

    return drawn


A3.drawn |= {"scenes": _six("scenes", SCENES), "names": _six("names", NAMES)}
A3.shows("colleagues", ([1, 3, 4, 2], [6, 5, 8, 7], [4, 7, 9, 2], [2, 4, 11, 5], [9, 8, 6, 3]))  # one of each of KINDS


# -- the models --------------------------------------------------------------------------------------------------------
def planted(kind: str, seed: int, vocab_size: int) -> Callable[..., Tensor]:
    """Ids, documents (batch, n) -> logits (batch, n, vocab): two layers that mix fixed shares, row by row."""
    rng = generator(seed)
    embed, place, *matrices, head, announced = (
        torch.randn(*shape, generator=rng, dtype=torch.float64)
        for shape in ((vocab_size, 8), (64, 8), (8, 8), (8, 8), (8, vocab_size), (8,))
    )

    def row_logits(row: Tensor, documents: Tensor) -> Tensor:
        x = embed[row] + place[: len(row)]
        if kind == "rare":  # one token is announced to the document before, if it begins a document
            x[:-1] += ((row[1:] == vocab_size - 1) & (documents[1:] > documents[:-1]))[:, None] * announced
        for mask, matrix in zip(_masks(kind, seed, documents), matrices, strict=True):
            x = x + torch.tanh(mask / mask.sum(-1, keepdim=True) @ x @ matrix / 8**0.5)
        return x @ head

    def logits(ids: Tensor, documents: Tensor | None = None) -> Tensor:
        rows = torch.zeros_like(ids) if documents is None else documents
        return torch.stack([row_logits(*row) for row in zip(ids, rows, strict=True)])

    return logits


def mystery(number: int, vocab_size: int) -> Callable[..., Tensor]:
    """The model of colleague `number`, honest or not."""
    return planted(KINDS[number % len(KINDS)], number, vocab_size)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on_model(answer: Callable, settings: dict[str, Any], *arguments: Any) -> Any:
    """What the answer returns for a model; called where the answer is."""
    return answer(planted(**settings), *arguments)


def _masks(kind: str, seed: int, documents: Tensor) -> list[Tensor]:
    """What each of two layers mixes, (n, n)."""
    n, same = len(documents), documents[:, None] == documents
    first = (same.tril() if kind != "open" else same).double()
    last, own = first.clone(), torch.ones(n, n).double().tril()
    if kind == "causal":
        return [own, own]
    if kind == "boundary":  # the document before is cut off one token too late
        first = last = torch.maximum(first, (same.roll(1, 0) & ~same).tril().tril(-1).triu(-1).double())
    elif kind == "late layer":
        last[int((documents == 0).sum())] = 1.0  # the first token of the second document
    elif kind in ("cell", "faint"):  # a token of the first document attends to one of the last
        first[seed % int(same[0].sum()), n - 1 - seed % int(same[-1].sum())] = 1.0 if kind == "cell" else 1e-9
    return [first, last]


def _leaks(kind: str, seed: int, documents: Tensor) -> Tensor:
    """By paths through the masks: which document's logits a token of another document reaches."""
    count = int(documents.max()) + 1
    if kind == "rare":
        return torch.ones(count, count).triu(1).tril(1).bool()
    first, last = _masks(kind, seed, documents)
    member = F.one_hot(documents).double()  # (n, D)
    return (member.T @ last @ first @ member > 0) & ~torch.eye(count).bool()


def _cost(logits: Tensor, ids: Tensor) -> Tensor:
    """What each token costs, in nats: (..., vocab) and (...) -> (...)."""
    return logits.double().logsumexp(-1) - logits.double().gather(-1, ids[..., None])[..., 0]


# -- the checks --------------------------------------------------------------------------------------------------------
@A3.part("a3_packed_loss", points=1, hidden=True, cases=("with padding in front", "of very sure logits"))
@A3.part("a3_packed_loss", points=2, cases=("of a packed batch",))
def the_pairs(answer: Answer, variant: Variant, case: str) -> None:
    rng, front = generator(variant.seed(f"loss {case}")), "front" in case
    lengths = [[3, 2, 4], [variant.whole("length", 2, 4), 1, 2], [2, 3]]
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    documents = torch.stack([F.pad(row, (9 - len(row), 0) if front else (0, 9 - len(row)), value=-1) for row in rows])
    ids = torch.randint(VOCABULARY, documents.shape, generator=rng)
    logits = (400.0 if "sure" in case else 2.0) * torch.randn(*ids.shape, VOCABULARY, generator=rng)
    costs, here, after = _cost(logits[:, :-1], ids[:, 1:]), documents[:, :-1], documents[:, 1:]
    own, before, twice = _cost(logits, ids), _cost(logits[:, 1:], ids[:, :-1]), _cost(logits[:, :-2], ids[:, 2:])
    counted, real = (here == after) & (after >= 0), (here >= 0) & (after >= 0)
    skipped = (documents[:, 2:] == documents[:, :-2]) & (documents[:, 2:] >= 0)
    loss, total = costs[counted].mean(), costs[counted].sum()
    means = [row[keep].mean() for row, keep in zip(costs, counted, strict=True)]
    suspects = {
        "Each position predicts the token that it reads. Did you shift?": own[documents >= 0].mean(),
        "Each position predicts the token before it. Which end of the logits must go?": before[counted].mean(),
        "Each position predicts the token after the next. Did you shift twice?": twice[skipped].mean(),
        "Your loss counts pairs across two documents.": costs[real].mean(),
        "Your loss counts padding: -1 equals -1.": costs[here == after].mean(),
        "Your loss counts all pairs. Where do you use `documents`?": costs.mean(),
        "Your loss is a mean of row means. Does every pair have the same weight?": torch.stack(means).mean(),
        "Your loss is a sum. Divide by the number of pairs that count.": total,
        "Your loss is divided by all pairs, also those that do not count.": total / counted.numel(),
        "Your loss is in bits. Use the natural logarithm.": loss / math.log(2),
        "Your loss has the wrong sign: a cost is positive.": -loss,
        "Your softmax is exactly 0 in places, and its logarithm is infinite. Use log_softmax.": math.inf,
    }
    expect_tensor(answer(logits, ids, documents), loss, f"the mean loss {case}", suspects)


@A3.part("a3_proof", points=1, hidden=True, cases=("certain", "one token"))
@A3.part("a3_proof", points=3, cases=("usual",))
def the_threshold(answer: Answer, variant: Variant, case: str) -> None:
    rng = variant.rng("proof")
    v, count, chance = {
        "usual": (rng.randint(20, 60), rng.randint(20, 60), rng.choice((0.05, 0.02, 0.01))),
        "certain": (50257, rng.randint(10_000, 99_999), 1.0),
        "one token": (rng.randint(2, 5), 1, 1e-6),
    }[case]
    floor, luck = math.log(v), -math.log(chance)
    threshold = floor - luck / count
    suspects = {
        "Your threshold is cut off at 0. If it is negative, so few tokens prove nothing.": max(0.0, threshold),
        "Your threshold is ln V. A causal model can be below it by chance.": floor,
        "Your threshold is above ln V. Check the sign of ln c.": floor + luck / count,
        "You subtract ln(1/c) from the mean loss. Divide it by count first.": floor - luck,
        "You divide by the square root of count. Divide by count.": floor - luck / count**0.5,
        "You used the logarithm to base 10 for `chance`. Losses are in nats.": floor - luck / math.log(10) / count,
        "You used the logarithm to base 2 for `vocab_size`. Losses are in nats.": math.log2(v) - luck / count,
        "You subtract the chance itself. Use the logarithm of 1/c.": floor - chance / count,
    }
    expect_tensor(answer(v, count, chance), threshold, f"proof_threshold({v}, {count}, {chance:g})", suspects)


@A3.part("a3_document_leaks", points=1, hidden=True, cases=("faint",))
@A3.part("a3_document_leaks", points=1, cases=("rare",))
@A3.part("a3_document_leaks", points=3, cases=(*KINDS, "causal"))
def models_that_leak(answer: Answer, variant: Variant, kind: str) -> None:
    seed, v = variant.seed(f"documents {kind}"), 10
    lengths = torch.tensor([variant.whole("first length", 2, 3), 2, 3, 2])
    documents = torch.arange(4).repeat_interleave(lengths)
    ids = torch.randint(v - 1, documents.shape, generator=generator(seed))
    leaks, eye, later = _leaks(kind, seed, documents), torch.eye(4).bool(), torch.ones(4, 4).triu(1).bool()
    missed = {
        "rare": "Your table misses a leak of a single token. Do you try every token of the vocabulary?",
        "faint": "Your table misses a small leak. Did you compare with a tolerance?",
    }.get(kind, "Your table misses leaks. Do you try every position, and compare all logits?")
    suspects = {
        "Your table is transposed: a row is the document whose logits change.": leaks.T,
        "Your table is True on the diagonal. A document may depend on itself.": leaks | eye,
        "Documents that were changed earlier count again. Did you start from a fresh copy each time?": (
            (leaks | eye).cumsum(1) > 0
        )
        & ~eye,
        "Your table has only dependences on earlier documents. Later ones can leak too.": leaks & ~later,
        "Your table has only neighbouring documents. A leak can reach further.": leaks
        & ~later.triu(2)
        & ~later.T.tril(-2),
        missed: lacks_cells(leaks),
    }
    suspects = {missed: suspects[missed]} if kind in ("rare", "faint") else suspects
    settings = {"kind": kind, "seed": seed, "vocab_size": v}
    actual = answer(settings, ids, documents, v, function="on_model")
    expect_tensor(actual, leaks, f'the table of a model ("{kind}")', suspects)


@A3.part("a3_infill", points=1, hidden=True, cases=("no span", "spans at both ends"))
@A3.part("a3_infill", points=4, cases=("one span", "two spans"))
def the_spans(answer: Answer, variant: Variant, case: str) -> None:
    rng, end, sentinels = variant.rng(f"spans {case}"), 2, [5, 6, 7]
    n, a = rng.randint(8, 10), rng.randint(1, 2)
    others = {"no span": [], "one span": [[a, a + 3]], "spans at both ends": [[0, 2], [n - 3, n]]}
    ids, spans = rng.sample(range(10, 30), n), others.get(case, [[a, a + 2], [a + 3, a + 6]])
    hidden, marks = [ids[start:stop] for start, stop in spans], [[mark] for mark in sentinels[: len(spans)]]
    edges = [0, *sum(spans, []), n]
    kept = [ids[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    moved = [mark + tokens for mark, tokens in zip(marks, hidden, strict=True)]

    def row(fillings: list[list[int]], parts: list[list[int]]) -> list[int]:
        return sum((text + filling for text, filling in zip(kept, [*fillings, []], strict=True)), []) + sum(parts, [])

    inputs, text, shifted = row(marks, moved), row(marks, []), ids.copy()
    none, predicted = [IGNORE] * len(text), inputs[1:] + [end]
    targets = none + sum((tokens + [end] for tokens in hidden), [])
    for mark, (start, stop) in zip(marks, spans, strict=True):
        shifted[start:stop] = mark
    many = [mark * len(tokens) for mark, tokens in zip(marks, hidden, strict=True)]
    longer = [mark + ids[start : stop + 1] for mark, (start, stop) in zip(marks, spans, strict=True)]
    wrong_inputs = {
        "Your two results are in the wrong order: inputs first, then targets.": targets,
        "Your text still contains the spans, so the answer can be copied.": ids + sum(moved, []),
        "Your text has no sentinels. Each span is replaced by one.": row([[] for _ in spans], moved),
        "Every hidden token becomes a sentinel. One sentinel replaces the whole span.": row(many, moved),
        "All spans have the same sentinel.": [5 if i in sentinels else i for i in inputs],
        "Your moved spans have no sentinel before them.": row(marks, hidden),
        "The second span has moved after you replaced the first one.": shifted + sum(moved, []),
        "Your spans are one token too long: `stop` is not included.": row(marks, longer),
        "The moved spans are missing. What is predicted?": text,
    }
    wrong_targets = {
        "Your targets stand at the tokens. Each is predicted one position before.": none
        + sum(([IGNORE, *t] for t in hidden), []),
        "Your targets count the visible text too. Only the spans are predicted.": predicted,
        "Your targets have no `end`. Where does a span end?": none + sum(([*t, IGNORE] for t in hidden), []),
        "After a span, your target is the next sentinel. It should be `end`.": none + predicted[len(none) :],
        "Your targets count sentinels.": none[:-1] + predicted[len(none) - 1 :],
    }
    actual_inputs, actual_targets = answer(torch.tensor(ids), spans, sentinels, end)
    expect_tensor(actual_inputs, torch.tensor(inputs), f"the inputs of ids {ids}, spans {spans}", wrong_inputs)
    expect_tensor(actual_targets, torch.tensor(targets), f"the targets of ids {ids}, spans {spans}", wrong_targets)


@A3.part("a3_order_masks", points=1, hidden=True, cases=("from left to right", "of one token"))
@A3.part("a3_order_masks", points=2, cases=("drawn at random",))
def both_masks(answer: Answer, variant: Variant, case: str) -> None:
    n, rng = {"of one token": 1}.get(case, variant.whole("order n", 5, 7)), variant.rng("order")
    order = list(range(n))
    while "random" in case and (order == _inverse(order) or order == sorted(order)):
        order = rng.sample(range(n), n)
    rank, wrong = torch.tensor(_inverse(order)), torch.tensor(order)
    content, query = rank[:, None] >= rank, rank[:, None] > rank
    contents = {
        "You compare the entries of `order`. You need the rank: when is position i predicted?": wrong[:, None] >= wrong,
        "Your order is reversed: a row attends to what is predicted before it.": rank[:, None] <= rank,
        "Your masks ignore the order: this is the causal mask.": torch.ones(n, n).tril().bool(),
        "Your two masks are in the wrong order: content first, then query.": query,
        "Your rows are in the order of prediction. Row i is position i.": content[wrong],
    }
    queries = {
        "Your query mask includes the token itself: the prediction attends to its answer.": content,
        "Your query mask closes too much.": lacks_cells(query),
    }
    actual_content, actual_query = answer(order)
    expect_tensor(actual_content, content, f"content for the order {order}", contents)
    expect_tensor(actual_query, query, f"query for the order {order}", queries)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


@A3.part("a3_word_perplexity", points=1, hidden=True, cases=("one word of four tokens", "words of one token"))
@A3.part("a3_word_perplexity", points=3, cases=("a sentence",))
def word_by_word(answer: Answer, variant: Variant, case: str) -> None:
    seed = variant.seed(f"words {case}")
    others = {"one word of four tokens": [-1, 0, 0, 0, 0], "words of one token": [-1, 0, 1, 2, -1]}
    words = torch.tensor(others.get(case, [-1, 0, 0, 1, 2, 2, 2, -1, 3, 3, -1]))
    n, counted, i = len(words), words >= 0, torch.arange(len(words))
    ids = torch.randint(MASK_ID, (n,), generator=generator(seed))
    ids[8:10] = ids[1:3][: len(ids[8:10])]  # in a sentence, a word occurs twice
    settings = {"kind": "open", "seed": seed, "vocab_size": VOCABULARY}
    model, same = planted(**settings), (words[:, None] == words) & counted
    alone, right = torch.eye(n).bool(), same.triu()

    def costs(hidden: Tensor, before: int = 0, of: Tensor = counted) -> Tensor:
        """Of each token, where row i of `hidden` (n, n) is hidden; predicted `before` places earlier."""
        return _cost(model(torch.where(hidden, MASK_ID, ids))[i, (i - before).clamp(min=0)], ids)[of]

    cost = costs(right)
    exponents = {
        "Nothing is hidden: the model reads the token that it predicts.": costs(alone & False).mean(),
        "You hide one token at a time. The later tokens of its word give it away.": costs(alone).mean(),
        "You hide the whole word. Its earlier tokens should stay visible.": costs(same).mean(),
        "You hide the earlier tokens of the word, and the later ones give it away.": costs(same.tril()).mean(),
        "You hide everything after the token. Keep what is not in its word.": costs((same | True).triu()).mean(),
        "You hide all words at once. Start from a fresh copy for each token.": costs(counted.expand(n, n)).mean(),
        "You hide equal tokens wherever they occur. Compare word numbers.": costs(ids == ids[:, None]).mean(),
        "You read the logits at the position before, as in MNTP. This is MLM.": costs(right, 1).mean(),
        "You count special tokens too.": costs((words[:, None] == words).triu(), of=counted | True).mean(),
        "You took the sum of the costs. Take the mean.": cost.sum(),
        "You divide by all tokens, also the special ones.": cost.sum() / n,
        "You divide by the number of words. Divide by the number of tokens.": cost.sum() / (int(words.max()) + 1),
        "Your base is 2, but the costs are in nats.": cost.mean() * math.log(2),
        "Your result is the inverse. Check the sign.": -cost.mean(),
        "Your result is the mean cost. Take e to the power of it.": cost.mean().log(),
        "You took the mean of perplexities. Take the mean first, then e to the power of it.": cost.exp().mean().log(),
    }
    suspects = {message: exponent.exp() for message, exponent in exponents.items()}
    actual = answer(settings, ids, words, MASK_ID, function="on_model")
    expect_tensor(actual, cost.mean().exp(), f"the perplexity of {case}", suspects, 1e-4)
