"""A3, leakage and masked-language modelling: what its checks ask, and the wrong values of typical mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.course.answers import Answer
from labkit.course.exercises import Assignment
from labkit.course.mistakes import expect, expect_equal, expect_tensor, lacks_cells
from labkit.course.variant import Variant

ASSIGNMENT = A3 = Assignment("a3", "Leakage and masked-language modelling", minutes=80)
A3.exercise("a3_next_token_loss", "One step apart", "next_token_loss", difficulty=2, minutes=10)
A3.exercise("a3_proof", "A loss that proves a leak", "proof_threshold", difficulty=2, minutes=9)
A3.exercise("a3_leak_table", "The leak finder", "leak_table", difficulty=3, minutes=17)
A3.exercise("a3_corrupt", "Eighty, ten, ten", "corrupt", difficulty=4, minutes=18)
A3.exercise("a3_mntp_loss", "Named from the seat before", "mntp_loss", difficulty=3, minutes=12)
A3.exercise("a3_pseudo_perplexity", "How surprising?", "pseudo_perplexity", difficulty=3, minutes=13)

SCENES = (
    "man sat by the river", "seal swam to the rock", "ship lay off the coast", "girl slept under the tree",
    "bell hung over the gate", "fox ran into the wood", "clerk stood behind the desk", "goat grazed near the fence",
    "child hid beneath the table", "kite flew across the field",
)  # fmt: skip
ADJECTIVES = ("old", "small", "grey", "quiet", "tired", "lost")
KINDS = ("cell", "one ahead", "late layer", "honest")
IGNORE, MASK_ID, VOCABULARY, SPECIAL = -100, 11, 12, [0, 5, 11]
ORDINARY = torch.tensor([i for i in range(VOCABULARY) if i not in SPECIAL])


def scenes(variant: Variant) -> list[str]:
    start = variant.choose("a3 scenes", range(len(SCENES)))
    return [*SCENES, *SCENES][start : start + 6]


def sentence(variant: Variant) -> str:
    return f"the {variant.choose('a3 adjective', ADJECTIVES)} {scenes(variant)[0]}"


A3.drawn |= {"scenes": scenes, "sentence": sentence}
A3.shows("colleagues", ([1, 3, 4, 2], [6, 5, 8, 7], [4, 7, 9, 2], [2, 4, 11, 5], [9, 8, 6, 3]))  # one of each of KINDS


# -- the models --------------------------------------------------------------------------------------------------------
def planted(kind: str, seed: int, n: int, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """Ids (batch, n) -> logits (batch, n, vocab): two layers that mix fixed shares; row by row, so equal to the bit."""
    rng = generator(seed)
    embed, place, *matrices, head, announced = (
        torch.randn(*shape, generator=rng, dtype=torch.float64)
        for shape in ((vocab_size, 8), (n, 8), (8, 8), (8, 8), (8, vocab_size), (8,))
    )
    shares = [mask / mask.sum(-1, keepdim=True) for mask in _masks(kind, seed, n)]

    def row_logits(row: Tensor) -> Tensor:
        m = len(row)
        x = embed[row] + place[:m]
        if kind == "rare":  # one word of the vocabulary is announced to the position before it
            x[:-1] += (row[1:] == vocab_size - 1)[:, None] * announced
        for share, matrix in zip(shares, matrices, strict=True):
            x = x + torch.tanh(share[:m, :m] @ x @ matrix / 8**0.5)
        return x @ head

    return lambda ids: torch.stack([row_logits(row) for row in ids])


def mystery(number: int, n: int, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """The model of colleague `number`, honest or not."""
    return planted(KINDS[number % len(KINDS)], number, n, vocab_size)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on_model(answer: Callable, settings: dict[str, Any], *arguments: Any) -> Any:
    """What the answer returns for a model; called where the answer is."""
    return answer(planted(**settings), *arguments)


def on_ids(answer: Callable, ids: Tensor, rate: float, seed: int) -> tuple[Any, Tensor]:
    """What was returned, and the ids as they are afterwards."""
    return answer(ids, SPECIAL, MASK_ID, VOCABULARY, rate, generator(seed)), ids


def _masks(kind: str, seed: int, n: int) -> list[Tensor]:
    """What each of two layers mixes, (n, n): above the diagonal lies the leak."""
    causal, i = torch.ones(n, n, dtype=torch.float64).tril(), seed % (n - 2)
    first, last = causal.clone(), causal.clone()
    if kind in ("open", "one ahead"):
        first = last = torch.ones_like(causal).tril(n if kind == "open" else 1)
    elif kind == "late layer":
        last[i, i + 1 :] = 1.0
    elif kind == "cell":
        first[i, i + 2] = 1.0
    elif kind == "faint":
        first[i, i + 1] = 1e-9
    return [first, last]


def _leaks(kind: str, seed: int, n: int) -> Tensor:
    """By paths through the masks: which position's output a later token reaches."""
    if kind == "rare":
        return torch.ones(n, n).tril(1).triu(1).bool()
    first, last = _masks(kind, seed, n)
    return (last @ first > 0).triu(1)


def _cost(logits: Tensor, ids: Tensor) -> Tensor:
    """What each token costs, in nats: (..., vocab) and (...) -> (...)."""
    return logits.double().logsumexp(-1) - logits.double().gather(-1, ids[..., None])[..., 0]


# -- the checks --------------------------------------------------------------------------------------------------------
@A3.part("a3_next_token_loss", points=1, hidden=True, cases=("with a row of one token", "of very sure logits"))
@A3.part("a3_next_token_loss", points=2, cases=("of a padded batch",))
def the_shift(answer: Answer, variant: Variant, case: str) -> None:
    rng, v = generator(variant.seed(f"loss {case}")), 9
    lengths = torch.tensor({"with a row of one token": [6, 1, 4]}.get(case, [variant.whole("length", 3, 5), 8, 2]))
    logits = (400.0 if "sure" in case else 2.0) * torch.randn(3, 8, v, generator=rng)
    ids, real = torch.randint(v, (3, 8), generator=rng), torch.arange(8) < lengths[:, None]
    costs, counted = _cost(logits[:, :-1], ids[:, 1:]), real[:, 1:]
    own, before, twice = _cost(logits, ids), _cost(logits[:, 1:], ids[:, :-1]), _cost(logits[:, :-2], ids[:, 2:])
    loss, total = costs[counted].mean(), costs[counted].sum()
    rows = [row[keep].mean() for row, keep in zip(costs, counted, strict=True)]
    suspects = {
        "Each position is asked for the token that it reads, so a model learns to copy. Did you shift?": own[
            real
        ].mean(),
        "Each position is asked for what it reads. You cut the last column, and nothing more.": own[:, :-1][
            counted
        ].mean(),
        "Each position is asked for the token before it. Did you cut the other ends?": before[counted].mean(),
        "Each position names the token after the next. Did you shift twice?": twice[real[:, 2:]].mean(),
        "Your mean counts the pads. Where does `real` enter?": costs.mean(),
        "The last real tokens are asked for a pad. Which token of a pair must be real?": costs[real[:, :-1]].mean(),
        "Your loss is a mean of row means. Every token is to count the same.": torch.stack(rows).mean(),
        "Your loss is a sum. Did you divide by the number of counted tokens?": total,
        "Your loss is divided by all positions, pads included.": total / counted.numel(),
        "Your loss is in bits. Did you take the natural logarithm?": loss / math.log(2),
        "Your loss has the wrong sign: a cost is positive.": -loss,
        "Your softmax gave exactly 0, whose logarithm is infinite. Is there another way to it?": math.inf,
    }
    expect_tensor(answer(logits, ids, real), loss, f"the mean loss {case}", suspects)


@A3.part("a3_proof", points=1, hidden=True, cases=("certain", "one token"))
@A3.part("a3_proof", points=2, cases=("usual",))
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
        "Your threshold is cut off at 0. Below 0, it means that so few tokens prove nothing.": max(0.0, threshold),
        "Your threshold is the floor itself. How far may an honest model fall below it by luck?": floor,
        "Your threshold lies above the floor. Which way does luck have to push?": floor + luck / count,
        "Your margin is that of the whole sum, and the loss is a mean. Did you divide?": floor - luck,
        "Your margin shrinks like the root of count. Did you turn the sum into a mean?": floor - luck / count**0.5,
        "Your logarithm of `chance` has base 10. Losses are in nats.": floor - luck / math.log(10) / count,
        "Your floor is in bits. Losses are in nats.": math.log2(v) - luck / count,
        "Your margin is the chance itself. Which function turns it into nats?": floor - chance / count,
    }
    expect_tensor(answer(v, count, chance), threshold, f"proof_threshold({v}, {count}, {chance:g})", suspects)


@A3.part("a3_leak_table", points=1, hidden=True, cases=("faint",))
@A3.part("a3_leak_table", points=1, cases=("rare",))
@A3.part("a3_leak_table", points=3, cases=KINDS)
def models_that_leak(answer: Answer, variant: Variant, kind: str) -> None:
    seed, n, v = variant.seed(f"table {kind}"), variant.whole("table n", 6, 8), 10
    ids = torch.randint(v - 1, (n,), generator=generator(seed))
    leaks, later = _leaks(kind, seed, n), torch.ones(n, n).triu(1).bool()
    missed = {
        "rare": "Your table misses a leak of one word only. Which words did you put in?",
        "faint": "Your table misses a leak that is small. Did you leave a tolerance?",
    }.get(kind, "Your table misses leaks. Which tokens, positions, logits are left out?")
    suspects = {
        "Your rows are the tokens that are changed. Row = the position that sees.": leaks.T,
        "Your table holds the past too, which every position may see. Did you keep j > i only?": leaks | ~later,
        "Your table holds each token itself. Did you keep j > i only?": leaks | torch.eye(n).bool(),
        "Everything is seen in your table. Did you put each token back? `b = a` is no copy.": later,
        "Your table holds the next token alone. A leak may reach further.": leaks & ~later.triu(2),
        missed: lacks_cells(leaks),
    }
    settings = {"kind": kind, "seed": seed, "n": n, "vocab_size": v}
    expect_tensor(answer(settings, ids, v, function="on_model"), leaks, f'the table of a model ("{kind}")', suspects)


@A3.part("a3_corrupt", points=2)
def what_is_counted(answer: Answer, variant: Variant) -> None:
    seed = variant.seed("corrupt")
    ids = _text(seed + 2, 200, 0.3)
    first, again, other = (_corrupted(answer, ids, 0.5, seed) for seed in (seed, seed, seed + 1))
    likely = "Your draws are not made with `rng`. Did you hand over generator=rng everywhere, and never seed it?"
    expect(torch.equal(torch.stack(first), torch.stack(again)), "the same draws with the same seed", "others", likely)
    expect(not torch.equal(first[1], other[1]), "other draws with another seed", "the same", likely)


@A3.part("a3_corrupt", points=2)
def the_shares(answer: Answer, variant: Variant) -> None:
    seed = variant.seed("shares")
    ids = _text(seed + 1, 60_000, 0.05)
    inputs, targets = _corrupted(answer, ids, 0.3, seed)
    counted = targets != IGNORE
    masked, kept = ((inputs == of)[counted].double().mean() for of in (torch.tensor(MASK_ID), ids))
    chosen = counted[torch.isin(ids, ORDINARY)].double().mean()
    suspects = {
        "All chosen tokens are masked. Where are the other two ways?": [0.3, 1.0, 0.0, 0.0],
        "Your targets leave out the chosen tokens that stay. They are asked for too.": [0.267, 0.9, 0.1, 0.0],
        "Your 10 % are a share of what the masks left over, and not of all.": [0.3, 0.8, 0.018, 0.182],
        "None of your chosen tokens becomes a random one.": [0.3, 0.8, 0.0, 0.2],
        "None of your chosen tokens stays as it was.": [0.3, 0.8, 0.178, 0.022],
        "Your shares have changed places: which of them is for the mask?": [0.3, 0.1, 0.089, 0.811],
    }
    shares, right = torch.stack([chosen, masked, 1 - masked - kept, kept]), torch.tensor([0.3, 0.8, 0.089, 0.111])
    expect_tensor(shares, right, "the shares chosen, and of these masked, changed, kept,", suspects, 0.0125)
    drawn = set(inputs[counted & (inputs != MASK_ID) & (inputs != ids)].tolist())
    likely = "Your random tokens come from the whole vocabulary. Special tokens are never put in."
    expect(not drawn & set(SPECIAL), "random tokens that are ordinary", f"{sorted(drawn)}", likely)
    never = set(ORDINARY.tolist()) - drawn
    likely = "Is the end of your range left out, or one token drawn for the whole row?"
    expect(not never, "every ordinary token among the random ones", f"{sorted(never)} never", likely)
    counts = {int((_corrupted(answer, ids[:40], 0.3, seed + i)[1] != IGNORE).sum()) for i in range(8)}
    likely = "You choose a fixed number of tokens. Here every ordinary token has a coin of its own."
    expect(len(counts) > 1, "rows that differ in how many are chosen", f"{max(counts)} in every row", likely)


@A3.part("a3_corrupt", points=1)
def at_least_one(answer: Answer, variant: Variant) -> None:
    ids, chosen = torch.tensor([0, 3, 7, 8, 5]), []
    for i in range(40):
        targets = _corrupted(answer, ids, 0.02, variant.seed(f"short {i}"))[1]
        likely = "Your coins may all fall on the same side. A row that asks nothing teaches nothing."
        expect((targets != IGNORE).any(), "a counted token in every row of three words", "a row with none", likely)
        chosen += (targets != IGNORE).nonzero()[:, 0].tolist()
    likely = "Where no coin falls, your choice is always the same. Did you let chance choose?"
    expect(len(set(chosen)) == 3, "each of three words chosen at times", f"only position {set(chosen)}", likely)


@A3.part("a3_corrupt", points=1, hidden=True)
def a_row_without_words(answer: Answer, variant: Variant) -> None:
    ids = torch.tensor([0, 5, 5, 0])
    inputs, targets = _corrupted(answer, ids, 0.9, variant.seed("no words"))
    expect_equal([inputs, targets], [ids, [IGNORE] * 4], "inputs and targets of a row without a word")


def _text(seed: int, n: int, share_special: float) -> Tensor:
    rng = generator(seed)
    words = ORDINARY[torch.randint(len(ORDINARY), (n,), generator=rng)]
    return torch.where(torch.rand(n, generator=rng) < share_special, torch.tensor([0, 5]).repeat(n)[:n], words)


def _corrupted(answer: Answer, ids: Tensor, rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, of which everything holds that is true of every draw."""
    (inputs, targets), after = answer(ids, rate, seed, function="on_ids")
    forms = f"{inputs.shape}, {targets.shape}, {inputs.dtype}, {targets.dtype}"
    form = f"{ids.shape}, {ids.shape}, {ids.dtype}, {ids.dtype}"
    expect(forms == form, f"inputs and targets of {form}", forms)
    expect(torch.equal(after, ids), "ids that are left alone", "changed ones", "Did you write into the argument?")
    counted, changed, special = targets != IGNORE, inputs != ids, torch.isin(ids, torch.tensor(SPECIAL))
    wrong, loose = counted & (targets != ids), changed & ~counted
    causes = {
        "Your two results have changed places: what the model reads comes first, then the targets.": (
            IGNORE in inputs and MASK_ID in targets and IGNORE not in targets
        ),
        "Your targets count every position. What was not chosen is in the input, and is copied.": counted.all(),
        "Your -100 stands at what was hidden. It means: do not count.": loose.any() and not (changed & counted).any(),
        "Your special tokens are chosen too. Did you take them out before?": ((counted | changed) & special).any(),
        "Your targets hold what the model reads. Was the text overwritten first?": (
            wrong.any() and not (counted & (targets != inputs)).any()
        ),
        "Your replacements hit tokens that were not chosen.": loose.any(),
    }
    came = f"for ids {ids[:9].tolist()}.. inputs {inputs[:9].tolist()}.., targets {targets[:9].tolist()}.."
    expected = "targets: the chosen ordinary tokens, -100 elsewhere; inputs: unchanged where nothing is chosen"
    likely = next((message for message, holds in causes.items() if holds), None)
    expect(not (wrong | loose | (counted & special)).any(), expected, came, likely)
    return inputs, targets


@A3.part("a3_mntp_loss", points=1, hidden=True, cases=(", first tokens hidden too",))
@A3.part("a3_mntp_loss", points=2, cases=("",))
def the_seats(answer: Answer, variant: Variant, case: str) -> None:
    rng, first = generator(variant.seed(f"seats {case}")), bool(case)
    ids, chosen = torch.randint(1, VOCABULARY, (3, 9), generator=rng), torch.rand(3, 9, generator=rng) < 0.2
    chosen[:, :6] = torch.tensor([[first, 0, 0, 0, 1, 0], [first, 0, 1, 1, 1, 0], [first, 0, 0, 0, 1, 1]]).bool()
    logits, targets = 2 * torch.randn(3, 9, VOCABULARY, generator=rng), torch.where(chosen, ids, IGNORE)
    costs, own, after = _cost(logits[:, :-1], ids[:, 1:]), _cost(logits, ids), _cost(logits[:, 1:], ids[:, :-1])
    rolled, zeroed = _cost(logits.roll(1, 1), ids), _cost(logits[:, :-1], targets[:, 1:].clamp(min=0))
    named = chosen[:, 1:]
    loss, total = costs[named].mean(), costs[named].sum()
    rows = [row[keep].mean() for row, keep in zip(costs, named, strict=True)]
    suspects = {
        "Your tokens are named where they stand. A decoder names from the seat before.": own[chosen].mean(),
        "Your tokens are named from the seat after them.": after[chosen[:, :-1]].mean(),
        "Your first token is named from the last seat. Who sits before the first?": rolled[chosen].mean(),
        "Your -100 counts as a token. Which positions are left out?": zeroed.mean(),
        "Your mean is one over all positions. How many are counted?": total / chosen.numel(),
        "Your mean is one over all pairs of neighbours. How many are counted?": total / named.numel(),
        "Your mean divides by all targets. Is the first token one that can be named?": total / chosen.sum(),
        "Your loss is a sum. Did you divide by the number of counted positions?": total,
        "Your loss is a mean of row means. Every hidden token is to count the same.": torch.stack(rows).mean(),
        "Your loss has the wrong sign: a cost is positive.": -loss,
    }
    expect_tensor(answer(logits, targets), loss, f"the loss{case}", suspects)


@A3.part("a3_mntp_loss", points=1)
def nothing_hidden(answer: Answer, variant: Variant) -> None:
    loss = answer(torch.zeros(2, 5, VOCABULARY), torch.full((2, 5), IGNORE))
    likely = "Your mean over nothing divides 0 by 0, and one such batch turns all weights into nan."
    expect_tensor(loss, 0.0, "the loss of a batch that hides nothing", {likely: math.nan})


@A3.part("a3_pseudo_perplexity", points=1, hidden=True, cases=("a single word", "words with a pad between them"))
@A3.part("a3_pseudo_perplexity", points=2, cases=("a sentence",))
def one_at_a_time(answer: Answer, variant: Variant, case: str) -> None:
    seed = variant.seed(f"reader {case}")
    words = _text(seed, 5, 0.0).tolist()
    sentences = {"a sentence": [0, *words, words[1], 5], "a single word": [0, words[0], 5]}
    ids = torch.tensor(sentences.get(case, [*words[:3], 5, *words[3:]]))
    n, ordinary = len(ids), torch.isin(ids, ORDINARY)
    settings = {"kind": "open", "seed": seed, "n": n, "vocab_size": VOCABULARY}
    model, alone, up_to = planted(**settings), torch.eye(n).bool(), torch.ones(n, n).tril().bool()

    def costs(hidden: Tensor, before: int = 0, of: Tensor = ordinary) -> Tensor:
        """Of each word, where row i of `hidden` (n, n) is hidden; named `before` places earlier."""
        i = torch.arange(n)
        return _cost(model(torch.where(hidden, MASK_ID, ids))[i, (i - before).clamp(min=0)], ids)[of]

    right = costs(alone)
    exponents = {
        "Your model reads the word that it names: nothing was hidden.": costs(alone & False).mean(),
        "Your masks pile up. Is each word put back before the next is hidden?": costs(up_to & ordinary).mean(),
        "Your words are all hidden at once. One at a time!": costs(ordinary.expand(n, n)).mean(),
        "Your model sees nothing after the hidden word. It reads both ways here.": costs(up_to.T).mean(),
        "Your word is named from the position before, as in MNTP. This is MLM.": costs(alone, 1).mean(),
        "Your mean counts special tokens. Only words are asked for.": costs(alone, of=ordinary | True).mean(),
        "Your word is hidden wherever it occurs. One position at a time!": costs(ids == ids[:, None]).mean(),
        "Your exponent is a sum. Did you take the mean?": right.sum(),
        "Your exponent is divided by all tokens. How many are words?": right.sum() / n,
        "Your base is 2, and the exponent is in nats.": right.mean() * math.log(2),
        "Your answer is one over it. Is there a sign missing?": -right.mean(),
        "Your answer is the mean in nats. Of what is that the logarithm?": right.mean().log(),
        "Your answer is a mean of perplexities. Mean first, and then?": right.exp().mean().log(),
    }
    suspects = {message: exponent.exp() for message, exponent in exponents.items()}
    actual = answer(settings, ids, MASK_ID, SPECIAL, function="on_model")
    expect_tensor(actual, right.mean().exp(), f"the pseudo-perplexity of {case}", suspects, 1e-4)
