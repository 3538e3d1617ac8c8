"""A3, leakage and masked-language modelling: what its checks ask, and what they say to typical mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.course.answers import Answer, Given
from labkit.course.exercises import Assignment
from labkit.course.mistakes import expect, expect_number, expect_tensor
from labkit.course.variant import Variant

ASSIGNMENT = A3 = Assignment("a3", "Leakage and masked-language modelling", minutes=80)

SCENES = (
    "man sat by the river", "seal swam to the rock", "ship lay off the coast", "girl slept under the tree",
    "bell hung over the gate", "fox ran into the wood", "clerk stood behind the desk", "goat grazed near the fence",
    "child hid beneath the table", "kite flew across the field",
)  # fmt: skip
ADJECTIVES = ("old", "small", "grey", "quiet", "tired", "lost")
KINDS = ("cell", "one ahead", "late layer", "honest")
IGNORE, MASK_ID, VOCABULARY, SPECIAL = -100, 11, 12, [0, 5, 11]
ORDINARY = torch.tensor([i for i in range(VOCABULARY) if i not in SPECIAL])


@A3.draws("scenes")
def scenes(variant: Variant) -> list[str]:
    start = variant.choose("a3 scenes", range(len(SCENES)))
    return [*SCENES[start:], *SCENES[:start]][:6]


@A3.draws("sentence")
def sentence(variant: Variant) -> str:
    return f"the {variant.choose('a3 adjective', ADJECTIVES)} {scenes(variant)[0]}"


@A3.draws("colleagues")
def colleagues(variant: Variant) -> list[int]:
    drawn = ([1, 3, 4, 2], [6, 5, 8, 7], [4, 7, 9, 2], [2, 4, 11, 5], [9, 8, 6, 3])  # one of each of KINDS
    return variant.choose("a3 colleagues", drawn)


@A3.given("model")
def planted(kind: str, seed: int, n: int, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """Ids (batch, n) -> logits (batch, n, vocab): two layers that mix fixed shares; row by row, so equal to the bit."""
    rng = generator(seed)
    embed, place, *matrices, head, told = (
        torch.randn(*shape, generator=rng, dtype=torch.float64)
        for shape in ((vocab_size, 8), (n, 8), (8, 8), (8, 8), (8, vocab_size), (8,))
    )
    shares = [mask / mask.sum(-1, keepdim=True) for mask in _masks(kind, seed, n)]

    def row_logits(row: Tensor) -> Tensor:
        m = len(row)
        x = embed[row] + place[:m]
        if kind == "rare":  # one word of the vocabulary is announced to the position before it
            x[:-1] += (row[1:] == vocab_size - 1)[:, None] * told
        for share, matrix in zip(shares, matrices, strict=True):
            x = x + torch.tanh(share[:m, :m] @ x @ matrix / 8**0.5)
        return x @ head

    return lambda ids: torch.stack([row_logits(row) for row in ids])


def mystery(number: int, n: int, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """The model of colleague `number`, honest or not."""
    return planted(KINDS[number % len(KINDS)], number, n, vocab_size)


@A3.given("generator")
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@A3.observer("corrupted")
def corrupted(result: Any, ids: Tensor, *_: Any) -> tuple[Any, Tensor]:
    """What was returned, and the ids as they are afterwards."""
    return result, ids


def _masks(kind: str, seed: int, n: int) -> list[Tensor]:
    """What each of two layers mixes, (n, n): above the diagonal lies the leak."""
    causal, i = torch.ones(n, n, dtype=torch.float64).tril(), seed % (n - 2)
    first, last = causal.clone(), causal.clone()
    if kind in ("open", "one ahead"):
        first = last = torch.ones_like(causal).tril(n if kind == "open" else 1)
    elif kind == "late layer":
        last[i, i + 1 :] = 1.0
    elif kind in ("cell", "faint"):
        first[i, i + 2] = 1.0 if kind == "cell" else 1e-9
    return [first, last]


def _seen_later(kind: str, seed: int, n: int) -> Tensor:
    """By paths through the masks: which position's output a later token reaches."""
    if kind == "rare":
        return torch.ones(n, n).tril(1).triu(1).bool()
    first, last = (mask > 0 for mask in _masks(kind, seed, n))
    return torch.stack([first[last[i]].any(0) for i in range(n)]).triu(1)


def _cost(logits: Tensor, ids: Tensor) -> Tensor:
    """What each token costs, in nats: (..., vocab) and (...) -> (...)."""
    return logits.double().logsumexp(-1) - logits.double().gather(-1, ids[..., None])[..., 0]


@A3.exercise("a3_next_token_loss", "One step apart", answer="next_token_loss", points=2, difficulty=2, minutes=10)
def the_shift(answer: Answer, variant: Variant) -> None:
    rng = variant.rng("loss")
    _expect_loss(answer, variant, [rng.randint(3, 5), 8, rng.randint(2, 6)], 2.0, "of a padded batch")


@A3.also("a3_next_token_loss", points=1, hidden=True)
def hard_rows(answer: Answer, variant: Variant) -> None:
    _expect_loss(answer, variant, [6, 1, 4], 2.0, "with a row of one token")
    _expect_loss(answer, variant, [6, 5], 400.0, "of very sure logits")


def _expect_loss(answer: Answer, variant: Variant, lengths: list[int], size: float, which: str) -> None:
    rng, n, v = generator(variant.seed(f"loss {which}")), max(lengths), 9
    logits = size * torch.randn(len(lengths), n, v, generator=rng)
    ids = torch.randint(v, (len(lengths), n), generator=rng)
    real = torch.arange(n) < torch.tensor(lengths)[:, None]
    costs, counted = _cost(logits[:, :-1], ids[:, 1:]), real[:, 1:]
    total = sum(float(costs[b, i]) for b, length in enumerate(lengths) for i in range(length - 1))
    own, before, twice = _cost(logits, ids), _cost(logits[:, 1:], ids[:, :-1]), _cost(logits[:, :-2], ids[:, 2:])
    unshifted = "Your positions are asked for the token that they read, so a model learns to copy. Did you shift?"
    rows = [row[keep].mean() for row, keep in zip(costs, counted, strict=True)]
    suspects = {
        unshifted: own[real].mean(),
        unshifted + " The last column is cut, no more.": own[:, :-1][counted].mean(),
        "Your positions are asked for the token before them. Did you cut the other ends?": before[counted].mean(),
        "Your positions name the token after the next. Did you shift twice?": twice[real[:, 2:]].mean(),
        "Your mean counts the pads. Where does `real` enter?": costs.mean(),
        "Your last real tokens are asked for a pad. Which token of a pair must be real?": costs[real[:, :-1]].mean(),
        "Your loss is a mean of row means. Every token is to count the same, in any row.": torch.stack(rows).mean(),
        "Your loss is a sum. Did you divide by the number of counted tokens?": total,
        "Your loss is divided by all positions, pads included.": total / counted.numel(),
        "Your loss is in bits. Did you take the natural logarithm?": total / int(counted.sum()) / math.log(2),
        "Your loss has the wrong sign: a cost is positive.": -total / int(counted.sum()),
        "Your softmax gave exactly 0, whose logarithm is no number. Is there another way to it?": math.inf,
    }  # fmt: skip
    likely = {text: float(each) for text, each in suspects.items()}
    expect_number(answer(logits, ids, real), total / int(counted.sum()), f"the mean loss {which}", likely)


@A3.exercise("a3_proof", "A loss that proves a leak", answer="proof_threshold", points=2, difficulty=2, minutes=9)
def the_threshold(answer: Answer, variant: Variant) -> None:
    rng = variant.rng("proof")
    _expect_threshold(answer, rng.randint(20, 60), rng.randint(20, 60), rng.choice((0.05, 0.02, 0.01)))


@A3.also("a3_proof", points=1, hidden=True)
def the_extremes(answer: Answer, variant: Variant) -> None:
    _expect_threshold(answer, 50257, variant.whole("many", 10_000, 99_999), 1.0)
    _expect_threshold(answer, variant.whole("few words", 2, 5), 1, 1e-6)


def _expect_threshold(answer: Answer, v: int, count: int, chance: float) -> None:
    floor, luck = math.log(v), -math.log(chance)
    wanted = math.log(v * chance ** (1 / count))
    suspects = {
        "Your threshold is cut off at 0. Below 0 it says something too: so few tokens prove nothing.": max(0.0, wanted),
        "Your threshold is the floor itself. An honest model may fall a little below it by luck: how far?": floor,
        "Your threshold lies above the floor. Which way does luck have to push?": floor + luck / count,
        "Your margin is that of the whole sum, and the loss is a mean. Did you divide?": floor - luck,
        "Your margin shrinks like the root of count. Did you turn the sum into a mean?": floor - luck / count**0.5,
        "Your logarithm of `chance` has base 10. Losses are in nats.": floor - luck / math.log(10) / count,
        "Your floor is in bits. Losses are in nats.": math.log2(v) - luck / count,
        "Your margin is the chance itself. Which function turns it into nats?": floor - chance / count,
    }  # fmt: skip
    expect_number(answer(v, count, chance), wanted, f"proof_threshold({v}, {count}, {chance:g})", suspects)


@A3.exercise("a3_leak_table", "The leak finder", answer="leak_table", points=3, difficulty=3, minutes=17)
def four_models(answer: Answer, variant: Variant) -> None:
    for kind in KINDS:
        _expect_table(answer, variant, kind, "Your table misses leaks. Which tokens, positions, logits are left out?")


@A3.also("a3_leak_table", points=1)
def one_word_only(answer: Answer, variant: Variant) -> None:
    _expect_table(answer, variant, "rare", "Your table misses a leak of one word only. Which words did you put in?")


@A3.also("a3_leak_table", points=1, hidden=True)
def a_faint_one(answer: Answer, variant: Variant) -> None:
    _expect_table(answer, variant, "faint", "Your table misses a leak that is small. Did you leave a tolerance?")


def _expect_table(answer: Answer, variant: Variant, kind: str, missed: str) -> None:
    seed, n, v = variant.seed(f"table {kind}"), variant.whole("table n", 6, 8), 10
    ids = torch.randint(v - 1, (n,), generator=generator(seed))
    wanted, later = _seen_later(kind, seed, n), torch.ones(n, n).triu(1).bool()
    found = answer(Given("a3", "model", {"kind": kind, "seed": seed, "n": n, "vocab_size": v}), ids, v)
    suspects = {
        "Your rows are the tokens that are changed. Row = the position that sees.": wanted.T,
        "Your table holds the past too, which everybody may see. Did you keep j > i only?": wanted | ~later,
        "Your table holds each token itself. Did you keep j > i only?": wanted | torch.eye(n).bool(),
        "Your table says that everything is seen. Did you put each token back? `b = a` is no copy.": later,
        "Your table looks at the next token alone. A leak may reach further.": wanted & ~later.triu(2),
    }
    if isinstance(found, Tensor) and found.shape == wanted.shape and not (found.bool() & ~wanted).any():
        suspects = {missed: found} | suspects if kind in ("rare", "faint") else suspects | {missed: found}
    expect_tensor(found, wanted, f'the table of a model ("{kind}")', suspects, names=("position", "later token"))


@A3.exercise("a3_corrupt", "Eighty, ten, ten", answer="corrupt", points=2, difficulty=4, minutes=18)
def what_is_counted(answer: Answer, variant: Variant) -> None:
    for i in range(5):
        seed = variant.seed(f"corrupt {i}")
        ids = _text(seed, 60, 0.3)
        first, again, other = (_corrupted(answer, ids, 0.5, each) for each in (seed, seed, seed + 1))
        same = torch.equal(torch.stack(first), torch.stack(again))
        expect(same, "the same draws with the same seed", "others", "Some of your draws are not made with `rng`.")
        likely = "Your draws are not made with `rng`. Did you hand over generator=rng, or seed it yourself?"
        expect(not torch.equal(first[1], other[1]), "other draws with another seed", "the same", likely)


@A3.also("a3_corrupt", points=2)
def the_shares(answer: Answer, variant: Variant) -> None:
    seed = variant.seed("shares")
    ids = _text(seed, 6000, 0.05)
    inputs, targets = _corrupted(answer, ids, 0.3, seed)
    counted, ordinary = targets != IGNORE, torch.isin(ids, ORDINARY)
    parts = (ordinary, torch.ones_like(ordinary)), (counted, inputs == MASK_ID), (counted, inputs == ids)
    share, masked, kept = (float((counted & part)[of].double().mean()) for of, part in parts)
    swapped = 1 - masked - kept
    likely = {
        "Your chosen tokens are all masked. Where are the other two ways?": masked > 0.97 and share > 0.27,
        "Your targets leave out the chosen tokens that stay. They are asked for too.": kept < 0.001 and masked > 0.85,
        "Your 10 % are a share of what the masks left over. They are one of all chosen tokens.": 0.005 < swapped < 0.04,
        "None of your chosen tokens becomes a random one.": swapped < 0.005,
        "None of your chosen tokens stays as it was.": kept < 0.04,
        "Your shares have changed places: which of them is for the mask?": masked < 0.2,
    }
    held = abs(share - 0.3) < 0.05 and abs(masked - 0.8) < 0.05 and abs(kept - 0.105) < 0.04
    expected = "at a rate of 0.3, about 30 % chosen, of these 80 % masked, 10 % random, 10 % as they were"
    came = f"{share:.0%} chosen, of these {masked:.0%} masked, {swapped:.0%} random, {kept:.0%} as they were"
    expect(held, expected, came, next((text for text, told in likely.items() if told), None))
    drawn = set(inputs[counted & (inputs != MASK_ID) & (inputs != ids)].tolist())
    never = set(ORDINARY.tolist()) - drawn
    likely = "Your random tokens come from the whole vocabulary. Special tokens are never put in."
    expect(not drawn & set(SPECIAL), "random tokens that are ordinary", f"{sorted(drawn)}", likely)
    likely = "Is the end of your range left out, or one token drawn for the whole row?"
    expect(not never, "every ordinary token among the random ones", f"{sorted(never)} never", likely)
    counts = {int((_corrupted(answer, ids[:40], 0.3, seed + i)[1] != IGNORE).sum()) for i in range(8)}
    likely = "You choose a fixed number of tokens. Here every ordinary token has a coin of its own."
    expect(len(counts) > 1, "rows that differ in how many are chosen", f"{max(counts)} in every row", likely)


@A3.also("a3_corrupt", points=1)
def at_least_one(answer: Answer, variant: Variant) -> None:
    chosen = []
    for i in range(40):
        seed = variant.seed(f"short {i}")
        ids = torch.tensor([0, *ORDINARY[torch.randperm(len(ORDINARY), generator=generator(seed))[:3]], 5])
        found = (_corrupted(answer, ids, 0.02, seed)[1] != IGNORE).nonzero()[:, 0].tolist()
        likely = "Your coins may all fall on the same side. A row that asks nothing teaches nothing."
        expect(len(found) > 0, "a counted token in every row of three words", "a row with none", likely)
        chosen += found
    likely = "Where no coin falls, your choice is always the same. Did you let chance choose?"
    expect(len(set(chosen)) == 3, "each of three words chosen at times", f"only position {set(chosen)}", likely)


@A3.also("a3_corrupt", points=1, hidden=True)
def rows_of_few_words(answer: Answer, variant: Variant) -> None:
    for i in range(4):
        ids = torch.tensor([0, 5, variant.rng(f"few {i}").choice(ORDINARY.tolist()), 0])
        targets = _corrupted(answer, ids, 0.1, variant.seed("few") + i)[1]
        expect(int(targets[2]) == int(ids[2]), "the one word of a row to be counted", f"targets {targets.tolist()}")
    inputs, targets = _corrupted(answer, ids := torch.tensor([0, 5, 5, 0]), 0.9, variant.seed("few"))
    held = torch.equal(inputs, ids) and bool((targets == IGNORE).all())
    expect(held, "a row without a word to stay as it is, nothing counted", f"{inputs.tolist()}, {targets.tolist()}")


def _text(seed: int, n: int, share_special: float) -> Tensor:
    rng = generator(seed)
    words = ORDINARY[torch.randint(len(ORDINARY), (n,), generator=rng)]
    return torch.where(torch.rand(n, generator=rng) < share_special, torch.tensor([0, 5]).repeat(n)[:n], words)


def _corrupted(answer: Answer, ids: Tensor, rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, of which everything holds that is true of every draw."""
    made = Given("a3", "generator", {"seed": seed})
    found, after = answer.observed("corrupted", ids, SPECIAL, MASK_ID, VOCABULARY, rate, made)
    pair = found if isinstance(found, tuple | list) else ()
    came = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in pair]
    expect(came == [(tuple(ids.shape), ids.dtype)] * 2, f"inputs and targets, int64, {tuple(ids.shape)}", f"{came}")
    expect(torch.equal(after, ids), "ids that are left alone", "changed ones", "Did you write into the argument?")
    inputs, targets = found
    counted, changed, special = targets != IGNORE, inputs != ids, torch.isin(ids, torch.tensor(SPECIAL))
    wrong, loose, read = counted & (targets != ids), changed & ~counted, not (counted & (targets != inputs)).any()
    turned = IGNORE in inputs and MASK_ID in targets and IGNORE not in targets
    likely = {
        "Your two results have changed places: what the model reads comes first, then the targets.": turned,
        "Your targets count every position. What was not chosen stands in the input, and is copied.": counted.all(),
        "Your -100 stands at what was hidden. It says: do not count.": loose.any() and not (changed & counted).any(),
        "Your special tokens are chosen too. Did you take them out before?": ((counted | changed) & special).any(),
        "Your targets hold what the model reads. Was the text overwritten first?": wrong.any() and read,
        "Your replacements hit tokens that were not chosen.": loose.any(),
    }
    came = f"for ids {ids[:9].tolist()}.. inputs {inputs[:9].tolist()}.., targets {targets[:9].tolist()}.."
    held = not bool((wrong | loose | (counted & special)).any())
    expected = "targets: the chosen ordinary tokens, -100 elsewhere; inputs: unchanged where nothing is chosen"
    expect(held, expected, came, next((text for text, told in likely.items() if told), None))
    return inputs, targets


@A3.exercise("a3_mntp_loss", "Named from the seat before", answer="mntp_loss", points=2, difficulty=3, minutes=12)
def the_seats(answer: Answer, variant: Variant) -> None:
    _expect_mntp(answer, variant, first=False)


@A3.also("a3_mntp_loss", points=1)
def nothing_hidden(answer: Answer, variant: Variant) -> None:
    found = answer(torch.zeros(2, 5, VOCABULARY), torch.full((2, 5), IGNORE))
    likely = "Your mean over nothing divides 0 by 0, and one such batch turns all weights into nan."
    held = found is None or not torch.as_tensor(found).isnan().any()
    expect(held, "a loss of 0 for a batch that hides nothing", "nan", likely)
    expect_number(found, 0.0, "the loss of a batch that hides nothing")


@A3.also("a3_mntp_loss", points=1, hidden=True)
def the_first_token(answer: Answer, variant: Variant) -> None:
    _expect_mntp(answer, variant, first=True)


def _expect_mntp(answer: Answer, variant: Variant, first: bool) -> None:
    rng = generator(variant.seed(f"seats {first}"))
    ids, chosen = torch.randint(1, VOCABULARY, (3, 9), generator=rng), torch.rand(3, 9, generator=rng) < 0.2
    chosen[:, :6] = torch.tensor([[first, 0, 0, 0, 1, 0], [first, 0, 1, 1, 1, 0], [first, 0, 0, 0, 1, 1]]).bool()
    logits, targets = 2 * torch.randn(3, 9, VOCABULARY, generator=rng), torch.where(chosen, ids, IGNORE)
    costs, own, after = _cost(logits[:, :-1], ids[:, 1:]), _cost(logits, ids), _cost(logits[:, 1:], ids[:, :-1])
    rolled, zeroed = _cost(logits.roll(1, 1), ids), _cost(logits[:, :-1], targets[:, 1:].clamp(min=0))
    named, count = chosen[:, 1:], int(chosen[:, 1:].sum())
    rows = [row[keep].mean() for row, keep in zip(costs, named, strict=True)]
    total = sum(float(costs[b, i - 1]) for b, i in chosen.nonzero().tolist() if i)
    suspects = {
        "Your tokens are named where they stand. A decoder names from the seat before.": own[chosen].mean(),
        "Your tokens are named from the seat after them.": after[chosen[:, :-1]].mean(),
        "Your first token is named from the last seat. Who sits before the first?": rolled[chosen].mean(),
        "Your -100 counts as a token. Which positions are left out?": zeroed.mean(),
        "Your mean is one over all positions. How many are counted?": total / chosen.numel(),
        "Your mean is one over all pairs of neighbours. How many are counted?": total / named.numel(),
        "Your mean divides by all targets. Is the first token one that can be named?": total / int(chosen.sum()),
        "Your loss is a sum. Did you divide by the number of counted positions?": total,
        "Your loss is a mean of row means. Every hidden token is to count the same.": torch.stack(rows).mean(),
        "Your loss has the wrong sign: a cost is positive.": -total / count,
    }
    likely = {text: float(each) for text, each in suspects.items()}
    expect_number(answer(logits, targets), total / count, f"the loss{', first tokens hidden too' * first}", likely)


@A3.exercise("a3_pseudo_perplexity", "How surprising?", answer="pseudo_perplexity", points=2, difficulty=3, minutes=13)
def one_at_a_time(answer: Answer, variant: Variant) -> None:
    words = _text(variant.seed("pseudo"), 5, 0.0).tolist()
    _expect_pseudo(answer, variant, [0, *words, words[1], 5], "a sentence")


@A3.also("a3_pseudo_perplexity", points=1, hidden=True)
def one_word_and_sure_ones(answer: Answer, variant: Variant) -> None:
    words = _text(variant.seed("pseudo hidden"), 6, 0.0).tolist()
    _expect_pseudo(answer, variant, [0, words[0], 5], "a single word")
    _expect_pseudo(answer, variant, [*words[:3], 5, *words[3:]], "words with a pad between them")


def _expect_pseudo(answer: Answer, variant: Variant, tokens: list[int], which: str) -> None:
    ids, n, seed = torch.tensor(tokens), len(tokens), variant.seed(f"reader {which}")
    given = {"kind": "open", "seed": seed, "n": n, "vocab_size": VOCABULARY}
    model, ordinary, alone = planted(**given), torch.isin(ids, ORDINARY), torch.eye(n).bool()
    up_to = torch.ones(n, n).tril().bool()

    def nats(hide: Tensor, before: int = 0) -> Tensor:
        """What each token costs where row i of `hide` (n, n) says what is hidden; named `before` places earlier."""
        places = torch.arange(n)
        return _cost(model(torch.where(hide, MASK_ID, ids))[places, (places - before).clamp(min=0)], ids)

    costs = nats(alone)[ordinary]
    suspects = {
        "Your model reads the word that it names: nothing was hidden.": nats(~alone & alone)[ordinary],
        "Your masks pile up. Is each word put back before the next is hidden?": nats(up_to & ordinary)[ordinary],
        "Your words are all hidden at once. One at a time!": nats(ordinary.expand(n, n))[ordinary],
        "Your model sees nothing after the hidden word. It reads both ways here.": nats(up_to.T)[ordinary],
        "Your word is named from the position before, as in MNTP. This is MLM.": nats(alone, 1)[ordinary],
        "Your mean counts special tokens. Only words are asked for.": nats(alone),
        "Your word is hidden wherever it occurs. One position at a time!": nats(ids == ids[:, None])[ordinary],
        "Your exponent is a sum. Did you take the mean?": costs * len(costs),
        "Your exponent is divided by all tokens. How many are words?": costs * len(costs) / n,
        "Your base is 2, and the exponent is in nats.": costs * math.log(2),
        "Your answer is one over it. Is there a sign missing?": -costs,
    }
    suspects = {text: float(each.mean().exp()) for text, each in suspects.items()}
    suspects["Your answer is the mean in nats. Of what is that the logarithm?"] = float(costs.mean())
    suspects["Your answer is a mean of perplexities. Mean first, and then?"] = float(costs.exp().mean())
    found = answer(Given("a3", "model", given), ids, MASK_ID, SPECIAL)
    expect_number(found, float(costs.mean().exp()), f"the pseudo-perplexity of {which}", suspects, 1e-4)
