"""labkit.objectives: the targets, that no position attends to its target, batches and the loss."""

import math

import pytest
import torch
from torch.utils.data import DataLoader

import labkit
from labkit import masks, objectives
from labkit.errors import DataError
from labkit.objectives import (
    IGNORE,
    OBJECTIVES,
    Collator,
    Corruption,
    corruption_for,
    word_starts,
)

THE, CAT, SAT, DOWN, M, PAD = 10, 11, 12, 13, 1, 0
TEXT = torch.tensor([THE, CAT, SAT, DOWN])
V = 100  # vocabulary; ids 0 to 4 are protected
SPECIAL = (0, 1, 2, 3, 4)
HIDE_ALL = Corruption(M, V, rate=1.0, protected=SPECIAL, replace=(1.0, 0.0))
HIDE_SAT = Corruption(M, V, protected=(*SPECIAL, THE, CAT, DOWN), replace=(1.0, 0.0))
HIDE_SOME = Corruption(M, V, rate=0.4, protected=SPECIAL, replace=(1.0, 0.0))
BERT = Corruption(M, V, rate=0.3, protected=SPECIAL)
EVERY = tuple(OBJECTIVES)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def texts(count, seed=0, shortest=2, longest=12):
    """Rows as a data set gives them, of different lengths, a special token here and there."""
    lengths = torch.randint(shortest, longest + 1, (count,), generator=rng(seed)).tolist()
    drawn = [torch.randint(3, V, (n,), generator=rng(1000 + seed + i)).tolist() for i, n in enumerate(lengths)]
    return [{"row": i, "ids": ids} for i, ids in enumerate(drawn)]


def example(objective, ids, corruption, seed=0, n=None):
    """An Example of any objective, and the length of its prefix or causal part."""
    n = int(torch.randint(0, len(ids), (), generator=rng(seed))) if n is None else n
    return {
        "next": lambda: objectives.next_token(ids),
        "mlm": lambda: objectives.masked_lm(ids, corruption, rng(seed)),
        "mntp": lambda: objectives.mntp(ids, corruption, rng(seed)),
        "prefix": lambda: objectives.prefix_lm(ids, n),
        "hybrid": lambda: objectives.hybrid_lm(ids, n, corruption, rng(seed)),
    }[objective]()


# ---- inputs and targets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "n", "corruption", "inputs", "targets", "mask"),
    [
        ("next", None, None, [THE, CAT, SAT, DOWN], [CAT, SAT, DOWN, -100], masks.causal()),
        ("mlm", None, HIDE_SAT, [THE, CAT, M, DOWN], [-100, -100, SAT, -100], masks.bidirectional()),
        ("mlm", None, HIDE_ALL, [M, M, M, M], [THE, CAT, SAT, DOWN], masks.bidirectional()),
        ("mntp", None, HIDE_SAT, [THE, CAT, M, DOWN], [-100, SAT, -100, -100], masks.bidirectional()),
        ("mntp", None, HIDE_ALL, [THE, M, M, M], [CAT, SAT, DOWN, -100], masks.bidirectional()),
        ("prefix", 0, None, [THE, CAT, SAT, DOWN], [CAT, SAT, DOWN, -100], masks.prefix(0)),
        ("prefix", 1, None, [THE, CAT, SAT, DOWN], [CAT, SAT, DOWN, -100], masks.prefix(1)),
        ("prefix", 2, None, [THE, CAT, SAT, DOWN], [-100, SAT, DOWN, -100], masks.prefix(2)),
        ("hybrid", 2, HIDE_ALL, [THE, CAT, M, M], [CAT, SAT, DOWN, -100], masks.hybrid(2)),
        ("hybrid", 2, HIDE_SAT, [THE, CAT, M, DOWN], [CAT, SAT, -100, -100], masks.hybrid(2)),
        ("hybrid", 0, HIDE_SAT, [THE, CAT, M, DOWN], [-100, SAT, -100, -100], masks.hybrid(0)),
    ],
)
def test_example_worked_by_hand(objective, n, corruption, inputs, targets, mask):
    made = example(objective, TEXT, corruption, n=n)
    assert (made.inputs.tolist(), made.targets.tolist(), made.mask) == (inputs, targets, mask)


@pytest.mark.parametrize("objective", EVERY)
def test_a_target_is_the_original_token_and_never_in_sight_at_any_depth(objective):
    for seed, row in enumerate(texts(200)):
        ids = torch.tensor(row["ids"])
        made = example(objective, ids, HIDE_SOME, seed)
        n, seen = len(ids), torch.eye(len(ids)) + made.mask.dense(len(ids)).float()
        reaches = torch.linalg.matrix_power(seen, n) > 0  # through any number of layers
        for i in (made.targets != IGNORE).nonzero()[:, 0].tolist():
            k = i if objective == "mlm" else i + 1
            assert made.targets[i] == ids[k]
            assert made.inputs[k] == M or not reaches[i, k], f"position {i} sees token {k}, which it has to name"


# ---- which tokens are hidden, and by what --------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.5, 1.0])
def test_exactly_the_rate_is_chosen_and_one_at_least(rate):
    corruption = Corruption(M, V, rate=rate, protected=SPECIAL)
    for seed, row in enumerate(texts(100, longest=60)):
        ids, first = torch.tensor(row["ids"]), seed % 2
        candidates = sum(i not in SPECIAL for i in row["ids"][first:])
        chosen = corruption.choose(ids, rng(seed), first=first)
        assert int(chosen.sum()) == min(candidates, max(1, round(rate * candidates)))
        assert not chosen[:first].any()


def test_every_candidate_is_chosen_equally_often():
    ids, draws = torch.arange(3, 23), 4000  # two protected ones, then 18 candidates, of which 5 are chosen
    often = sum(BERT.choose(ids, rng(seed)) for seed in range(draws)).float() / draws
    assert not often[:2].any()
    share = 5 / 18
    assert (often[2:] - share).abs().max() < 4 * math.sqrt(share * (1 - share) / draws)


def test_of_the_chosen_8_in_10_become_the_mask_1_another_token_and_1_stays():
    ids, n = torch.full((50_000,), 50), 50_000
    hidden = BERT.hide(ids, torch.ones(n, dtype=torch.bool), rng())
    others = V - len(SPECIAL)
    shares = {"mask": (hidden == M, 0.8), "same": (hidden == 50, 0.1 + 0.1 / others)}
    shares["random"] = ((hidden != M) & (hidden != 50), 0.1 * (1 - 1 / others))
    for name, (drawn, share) in shares.items():
        assert abs(drawn.float().mean() - share) < 4 * math.sqrt(share * (1 - share) / n), name
    drawn = hidden[(hidden != M) & (hidden != 50)].unique().tolist()
    assert drawn == [i for i in range(5, V) if i != 50]  # all that may be drawn, and nothing else


@pytest.mark.parametrize("objective", ["mlm", "mntp", "hybrid"])
def test_a_protected_token_is_never_hidden_counted_or_drawn(objective):
    always_random = Corruption(M, V, rate=0.9, protected=SPECIAL, replace=(0.0, 1.0))
    for seed in range(100):
        ids = torch.randint(0, 9, (30,), generator=rng(seed))
        made = example(objective, ids, always_random, seed, n=2)
        protected = torch.isin(ids, torch.tensor(SPECIAL))
        assert torch.equal(made.inputs[protected], ids[protected])
        assert not torch.isin(made.inputs[~protected], torch.tensor(SPECIAL)).any()
        assert not torch.isin(made.targets[2:], torch.tensor(SPECIAL)).any()


def test_whole_words_are_chosen_whole_and_no_more_than_needed():
    starts = torch.rand(V, generator=rng()) < 0.4
    corruption = Corruption(M, V, rate=0.3, word_starts=starts, replace=(1.0, 0.0))
    together = 0
    for seed, row in enumerate(texts(200, longest=40)):
        ids = torch.tensor(row["ids"])
        words = []
        for position, token in enumerate(row["ids"]):
            if starts[token] or not words:
                words.append([])
            words[-1].append(position)
        chosen = corruption.choose(ids, rng(seed)).tolist()
        hidden = [word for word in words if any(chosen[i] for i in word)]
        assert all(chosen[i] for word in hidden for i in word)
        budget = max(1, round(0.3 * len(ids)))
        assert budget <= sum(chosen) < budget + max(len(word) for word in hidden)
        together += any(len(word) > 1 for word in hidden)
    assert together > 100


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def test_corruption_for_a_tokenizer_protects_its_special_tokens(tiny):
    tokenizer = tiny("tiny-gpt2").tokenizer
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    special = tuple(sorted(map(tokenizer.convert_tokens_to_ids, ("<pad>", "<eos>", "<bos>", "<mask>"))))
    assert corruption_for(tokenizer, rate=0.25) == Corruption(len(tokenizer) - 1, len(tokenizer), 0.25, special)
    ids = torch.tensor(tokenizer("<bos> the cat sat on a xylophone<eos>")["input_ids"])
    made = objectives.masked_lm(ids, corruption_for(tokenizer, rate=0.01, whole_words=True), rng(4))
    assert tokenizer.decode(ids[made.targets != IGNORE]) in (" the", " cat", " sat", " on", " a", " xylophone")


def test_a_word_begins_at_a_space_a_line_a_sign_or_a_digit_and_goes_on_with_letters(tiny):
    tokenizer = tiny("tiny-gpt2").tokenizer
    words = "The| cat| |(and| xylophones|,| |2|4| sat|:|\r|\n|\tis|-bank|\nfoo".split("|")
    starts, split = word_starts(tokenizer), [""]
    for token in tokenizer("".join(words))["input_ids"]:
        split = [*split, ""] if starts[token] and split[-1] else split
        split[-1] += tokenizer.decode([token])
    assert split == words


# ---- batches -------------------------------------------------------------------------------------------------------


def unpadded(batch):
    """The rows of a batch as lists, without their padding."""
    rows = []
    for b, n in enumerate(batch["attention_mask"].sum(1).tolist()):
        row = {name: batch[name][b, :n].tolist() for name in ("input_ids", "labels")}
        rows.append(row | ({"length": int(batch["lengths"][b])} if "lengths" in batch else {}))
    return rows


@pytest.mark.parametrize("objective", EVERY)
def test_a_row_is_the_same_in_every_batch_order_and_worker(objective):
    rows, collator = texts(24), Collator(objective, PAD, BERT, seed=7)
    alone = [unpadded(collator([row]))[0] for row in rows]
    assert objective == "next" or alone != unpadded(Collator(objective, PAD, BERT, seed=8)(rows))
    assert unpadded(collator(rows)) == alone
    assert unpadded(collator(rows[::-1])) == alone[::-1]
    assert unpadded(collator(rows[5:9])) == alone[5:9]  # as after a resume
    for workers in (0, 2):
        loader = DataLoader(rows, batch_size=5, collate_fn=collator, num_workers=workers)
        assert [row for batch in loader for row in unpadded(batch)] == alone


# ---- the loss ------------------------------------------------------------------------------------------------------


def readied(loaded, objective):
    """The model with the attention that this objective needs."""
    return labkit.to_bidirectional(loaded.model) if OBJECTIVES[objective].attention == "bidirectional" else loaded.model


@pytest.mark.parametrize("longest", [12, 2], ids=["padded", "equal lengths"])
@pytest.mark.parametrize("objective", EVERY)
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_loss_and_gradients_are_those_of_full_logits_row_by_row_without_padding(tiny, name, objective, longest):
    rows = texts(6, longest=longest) if longest > 2 else texts(6, shortest=9, longest=9)
    batch = Collator(objective, PAD, BERT)(rows)
    assert bool(batch["attention_mask"].all()) == (longest == 2)
    model = readied(tiny(name), objective)
    loss = objectives.loss(model, batch, objective)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    terms = []
    for row in unpadded(batch):
        inputs = torch.tensor([row["input_ids"]])
        if "length" in row:
            with labkit.masked(model, getattr(masks, objective)(row["length"])):
                logits = model(inputs).logits[0]
        else:
            logits = model(inputs).logits[0]
        terms += [-logits[i].log_softmax(-1)[t] for i, t in enumerate(row["labels"]) if t != IGNORE]
    expected = torch.stack(terms).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-4)


def test_the_head_computes_the_chosen_positions_only_and_is_left_as_it_was(tiny):
    model, batch = tiny("tiny-gpt2").model, Collator("mlm", PAD, BERT)(texts(6))
    counted, rows = batch["labels"] != IGNORE, []
    watching = model.lm_head.register_forward_hook(lambda _, args, out: rows.append(out.shape[:-1].numel()))
    chosen = objectives.logits_at(model, batch["input_ids"], batch["attention_mask"], counted)
    with pytest.raises(IndexError):
        objectives.logits_at(model, batch["input_ids"] + 10_000, None, counted)
    watching.remove()
    assert rows == [int(counted.sum())] and not model.lm_head._forward_pre_hooks
    torch.testing.assert_close(
        chosen, model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[counted]
    )


# ---- what makes no sense -------------------------------------------------------------------------------------------


NOTHING_COUNTED = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.full((1, 4), IGNORE)}


def tiny_tokenizer():
    return labkit.load("tiny-gpt2", device="cpu").tokenizer


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Collator("bert", PAD), "'bert'; choose one of next, mlm, mntp, prefix, hybrid"),
        (lambda: Collator("mntp", PAD), "mntp hides tokens and needs a Corruption"),
        (lambda: Corruption(M, V, rate=0.0), "above 0 and at most 1, not 0.0"),
        (lambda: Corruption(V, V), "mask token 100 is outside the vocabulary of 100"),
        (lambda: Collator("next", PAD)([{"row": 3, "ids": [7]}]), r"row 3 has 1 token\(s\)"),
        (lambda: objectives.prefix_lm(TEXT, 4), "a prefix of 4 tokens leaves nothing to predict in a row of 4"),
        (lambda: objectives.hybrid_lm(TEXT, 4, BERT, rng()), "a causal part of 4 tokens leaves nothing"),
        (lambda: corruption_for(tiny_tokenizer()), "has no mask token.*ensure_mask_token"),
        (lambda: objectives.loss(torch.nn.Linear(1, 1), NOTHING_COUNTED, "mlm"), "nothing to predict"),
    ],
)
def test_a_mistake_is_explained(mistake, message):
    with pytest.raises(DataError, match=message):
        mistake()
