# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A3 · Leakage and masked-language modelling
#
# **A model that sees its answer learns nothing but to copy.** You write the loss that asks for the next token, find out which loss is too good to be true, and build the instrument that finds the leak. Then the other half: without a causal mask a model needs another question, so you hide words, ask for them from the right place, and measure how surprising a sentence is to a reader who looks both ways.
#
# Six exercises, six functions. Each has a check that says what was expected, what came, and what the likely cause is. Nothing stops you: skip an exercise and come back. The notebooks behind it are `05_next_token_leakage` and `06_new_objectives`.

# %%
import math
import random

import torch
import torch.nn.functional as F

from labkit import masks
from labkit.course.a3 import mystery
from labkit.gpt import GPT, GPTConfig
from labkit.objectives import Collator, Corruption
from labkit.viz import mask_figure

torch.set_num_threads(1)  # our models are tiny

# %% [markdown]
# A language small enough to know by heart: six scenes, each with one of six adjectives. Who appears decides what happens and where; the adjective is anybody's guess.

# %%
sentence = "the old man sat by the river"  # drawn: sentence
scenes = ["man sat by the river", "seal swam to the rock", "ship lay off the coast"]  # drawn: scenes
adjectives = ["old", "small", "grey", "quiet", "tired", "lost"]

specials = ["[CLS]", "[SEP]", "[MASK]"]  # before a sentence, after it, and in place of a hidden word
words = sorted({"the", *adjectives, *" ".join(scenes).split()})
vocabulary = specials + words
CLS, SEP, MASK = special = [0, 1, 2]
W, V = len(words), len(vocabulary)


def encode(text):
    return torch.tensor([CLS, *(vocabulary.index(word) for word in text.split()), SEP])


ids = encode(sentence)  # (n,)
tokens, n = [vocabulary[i] for i in ids.tolist()], len(ids)
print(f"{W} words, {V} tokens in the vocabulary, {n} in our sentence: {tokens}")

# %% [markdown] exercise="a3_next_token_loss"
# The question of every language model: at each position, **what comes next?** Its loss is the mean of what the right answers cost, `-ln p` in **nats** (natural logarithm).
#
# Given are `logits` `(batch, n, vocab)`, float; `ids` `(batch, n)`, int64; and `real` `(batch, n)`, bool: True for a token, False for a pad. Pads stand at the end of a row. The logits at position `i` are to name the token at `i + 1`. Count a pair **if the token to be named is real**, and return the mean over all counted pairs of the whole batch, in which each pair counts the same.
#
# *Predict first:* in how many ways can you be off by one here, and which of them gives a loss near 0 after training?

# %% [markdown] hint="a3_next_token_loss"
# Write down for a row of four tokens which position is asked for which token. Who is asked nothing, and who is asked for by nobody? Those two ends have to go: one from the logits, another one from the ids. `real` loses the same end as what it speaks of.


# %% answer="a3_next_token_loss"
def next_token_loss(logits, ids, real):
    """(batch, n, vocab), int (batch, n), bool (batch, n) -> the mean in nats over the tokens that are asked for."""
    ### BEGIN SOLUTION
    named, counted = ids[:, 1:], real[:, 1:]  # (batch, n - 1)
    return F.cross_entropy(logits[:, :-1][counted], named[counted])
    ### END SOLUTION


# %% [markdown]
# A model that knows nothing gives every token the same logit. Predict its loss before you run this.

# %% look="a3_next_token_loss"
[float(next_token_loss(torch.zeros(1, n, V), ids[None], torch.ones(1, n).bool())), math.log(V)]

# %% [markdown]
# <details><summary>Your prediction: in how many ways off by one?</summary>
#
# In four. Without a shift, each position is asked for the token that **it reads**. With the ends cut the wrong way round, it is asked for the token **before** it; with two shifts, for the token **after the next**. And with the right shift, `real` can lose the wrong end: then the last real token of a row is asked for a pad.
#
# The first two lead to a loss near 0: what is asked for stands in the text that the position may attend to, and copying is learned quickly. The other two do not give themselves away like that. The token after the next is an honest question, only not yours.
#
# </details>

# %% [markdown] exercise="a3_proof"
# When is a loss too good? Take a text of words drawn at random, each of $V$ = `vocab_size` equally likely. Nobody can know the next one, so an honest model pays ln V on average at least. But luck exists: on `count` tokens it may pay a little less. **How much less proves a leak?**
#
# Let $Q$ be the probability that an honest model gives to all `count` tokens together, and $P = V^{-\text{count}}$ their true one. Averaged over such texts, $Q/P$ is at most 1, and so, by Markov's inequality, $Q/P$ reaches $1/c$ with a chance of at most $c$. Your loss is $-\ln Q$ divided by `count`.
#
# Return the mean loss, in nats per token, at which $Q/P$ is exactly $1/c$ for `chance` $= c$ (above 0, at most 1). At or below it, an honest model would have needed luck that comes with a chance of `chance` at most.

# %% [markdown] hint="a3_proof"
# Take the logarithm of $Q/P = 1/c$. You get two terms with `count`, one without it. Solve for the mean loss. Try `chance=1`: no luck at all is called for, so where must the threshold lie?


# %% answer="a3_proof"
def proof_threshold(vocab_size, count, chance):
    """The mean loss (nats per token, a float) that an honest model passes with probability `chance` at most."""
    ### BEGIN SOLUTION
    return math.log(vocab_size) - math.log(1 / chance) / count
    ### END SOLUTION


# %% [markdown]
# With our `W` words and a chance of one in a million: which of these mean losses, on so many tokens, prove a leak?

# %%
reports = [(0.2, 3), (0.2, 9), (3.1, 20), (3.1, 20_000)]  # (nats per token, tokens)

# %% look="a3_proof"
[(loss, count, "a leak" if loss <= proof_threshold(W, count, 1e-6) else "no proof") for loss, count in reports]

# %% [markdown]
# **What it means:** many tokens make the threshold sharp, and a few prove nothing, however low their loss. Now two models are trained on random words, from the same weights, on the same rows. One has the causal mask, the other has none. *Predict the loss of each in the end.*


# %%
def random_rows(step):
    rng = random.Random(step)
    return [[rng.randrange(len(specials), V) for _ in range(n)] for _ in range(16)]


def trained(objective, mask, rows, steps):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=V, context=16, width=48, layers=2, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batches = Collator(objective, pad_id=SEP, corruption=Corruption(MASK, V, rate=0.2, protected=tuple(special)))
    losses = []
    for step in range(steps):
        batch = batches([{"row": 16 * step + k, "ids": row} for k, row in enumerate(rows(step))])
        loss = model.loss(batch["input_ids"], batch["labels"], mask)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"{objective:5} {mask!r:16} first {losses[0]:.2f}, mean of the last ten {sum(losses[-10:]) / 10:.2f}")
    return model.eval()


# %%
print(f"ln {W} = {math.log(W):.2f}")
for mask in (masks.causal(), masks.bidirectional()):
    trained("next", mask, random_rows, 80)

# %% [markdown] exercise="a3_leak_table"
# A loss says *that* something leaks. Now find out *where*: change one token, and see whose output moves.
#
# `model` is a function: ids `(batch, n)` → logits `(batch, n, vocab_size)`. It has no randomness, and the same row gives the same logits to the last bit. `ids` is one row, `(n,)`, int64, of ids below `vocab_size`. Return booleans `(n, n)`: **True at `[i, j]` if `j > i` and the logits at `i` change, be it by one bit, when the token at `j` is exchanged for some other**, all else as in `ids`. False everywhere else. The vocabularies are small: you can afford to try every token.
#
# *Predict first:* in an honest model, how many cells are True?

# %% [markdown] hint="a3_leak_table"
# Three loops: over the positions `j`, over the tokens you put there, and over the positions `i` before `j` (the last one can be one comparison, `!=` and `any` over the vocabulary). Is the row as it was before you make the next change? And is one other token enough, if the model should notice a certain word only?


# %% answer="a3_leak_table"
def leak_table(model, ids, vocab_size):
    """Bool (position, later token): does the output at i depend on the token at j > i?"""
    ### BEGIN SOLUTION
    n = len(ids)
    base = model(ids[None])[0]  # (n, vocab)
    table = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for other in range(vocab_size):
            changed = ids.clone()
            changed[j] = other
            moved = (model(changed[None])[0] != base).any(-1)  # (n,)
            table[:j, j] |= moved[:j]
    return table
    ### END SOLUTION


# %% [markdown]
# Four colleagues hand you their models. All say that theirs is causal.

# %%
colleagues = [1, 3, 4, 2]  # drawn: colleagues
models = [mystery(number, n, V) for number in colleagues]

# %% look="a3_leak_table"
{f"colleague {k}": int(leak_table(model, ids, V).sum()) for k, model in enumerate(models)}

# %% [markdown]
# Who is honest? Look at one of the others (change the 0): what kind of mistake makes such a pattern? The past is drawn in, so all above the staircase is leak.

# %% look="a3_leak_table"
mask_figure(leak_table(models[0], ids, V) | torch.ones(n, n).tril().bool(), tokens)

# %% [markdown] exercise="a3_corrupt"
# A model that looks both ways cannot be asked for the next token. So we **hide** some words and ask for those (masked-language modelling, Devlin et al. 2019, BERT). If it only ever had to answer at a `[MASK]`, it could ignore all other positions; so some hidden words are swapped, and some left as they are:
#
# - `ids` is one row, `(n,)`, int64; `special` a list of ids, `mask_id` among them. All ids from 0 to `vocab_size - 1` that are not in `special` are **ordinary**.
# - Every ordinary token of the row is **chosen** by a coin of its own, with probability `rate`. Special tokens never are. If the coins choose nobody, and the row has an ordinary token, one of them is chosen at random, all equally likely. A row without any stays as it is.
# - What becomes of a chosen token: with probability 0.8 `mask_id`; with 0.1 a random ordinary id, all equally likely (it may happen to be the same); with 0.1 it stays.
# - Return `(inputs, targets)`, both `(n,)`, int64: what the model reads; and the original token at **every chosen** position, `-100` elsewhere. Leave `ids` as it is.
# - `rng` is a `torch.Generator`. Draw everything with it: `torch.rand(n, generator=rng)`, `torch.randint(..., generator=rng)`.

# %% [markdown] hint="a3_corrupt"
# One draw of `torch.rand(n)` decides who is chosen, another one what becomes of each: cut the line from 0 to 1 into three pieces. Make the targets while you still have the original. Random ordinary ids: draw places in a list of them, and not ids.


# %% answer="a3_corrupt"
def corrupt(ids, special, mask_id, vocab_size, rate, rng):
    """One row (n,) -> inputs (n,), targets (n,): 80/10/10, targets -100 where nothing is asked."""
    ### BEGIN SOLUTION
    ordinary = torch.tensor([i for i in range(vocab_size) if i not in special])
    may = torch.isin(ids, ordinary)
    chosen = (torch.rand(len(ids), generator=rng) < rate) & may
    if may.any() and not chosen.any():
        places = may.nonzero()[:, 0]
        chosen[places[torch.randint(len(places), (), generator=rng)]] = True
    targets = torch.where(chosen, ids, -100)
    fate = torch.rand(len(ids), generator=rng)
    randoms = ordinary[torch.randint(len(ordinary), (len(ids),), generator=rng)]
    inputs = torch.where(chosen & (fate < 0.8), mask_id, ids)
    inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), randoms, inputs)
    return inputs, targets
    ### END SOLUTION


# %% look="a3_corrupt"
[[vocabulary[i] for i in corrupt(ids, special, MASK, V, 0.3, torch.Generator().manual_seed(s))[0]] for s in range(5)]

# %% [markdown] exercise="a3_mntp_loss"
# Who names a hidden token? BERT: the position where it stands. A decoder has never named a token anywhere but **from the position before it**, so LLM2Vec (BehnamGhader et al. 2024) asks there: masked next-token prediction, MNTP.
#
# Given are `logits` `(batch, n, vocab)`, float, and `targets` `(batch, n)`, int64, as `corrupt` makes them: the hidden token at its own place, `-100` elsewhere. Return the mean loss in nats over all hidden tokens, each named by the logits at the position before it, each counting the same. A hidden **first** token cannot be named by anybody, and is not counted. If nothing is left to be counted, the loss is 0.
#
# *Predict first:* which tokens would a model find in its input if you asked hidden positions for the token **after** them?

# %% [markdown] hint="a3_mntp_loss"
# It is the shift of exercise 1, with other targets. `torch.roll` goes round in a circle; cutting does not. And what does a mean make of nothing at all?


# %% answer="a3_mntp_loss"
def mntp_loss(logits, targets):
    """(batch, n, vocab), int (batch, n) with -100 -> mean nats of the hidden tokens, named from the position before."""
    ### BEGIN SOLUTION
    named = targets[:, 1:]
    counted = named != -100
    if not counted.any():
        return logits.sum() * 0.0  # still a number with a gradient
    return F.cross_entropy(logits[:, :-1][counted], named[counted])
    ### END SOLUTION


# %% [markdown]
# <details><summary>Your prediction: which tokens would it find?</summary>
#
# All that are not hidden themselves. Each ordinary token has a coin of its own, so beside a hidden token there mostly stands one that is not: without a causal mask the model reads it there, one place to the right, and copies. Its loss would be good for the wrong reason. Asked from the position **before**, it has to name the hidden token itself, and that one is out of its sight, but for the few that `corrupt` leaves as they were.
#
# </details>
#
# Now the other half of the story: the mask is off, and this model is asked for hidden words of our language, at their own place (MLM). Beside it, its twin with a causal mask, asked for the next word, on the same sentences. *Predict:* which of the two can know the word after the adjective?


# %%
def sentence_rows(step):
    rng = random.Random(step)
    return [encode(f"the {rng.choice(adjectives)} {rng.choice(scenes)}").tolist() for _ in range(16)]


writer = trained("next", masks.causal(), sentence_rows, 80)
reader = trained("mlm", masks.bidirectional(), sentence_rows, 200)

# %%
hidden = ids.clone()
hidden[3] = MASK
with torch.no_grad():
    guesses = {
        "the reader, from both sides": reader(hidden[None], masks.bidirectional())[0, 3],
        "the writer, from the left": writer(ids[None, :3], masks.causal())[0, 2],
    }
print(" ".join(vocabulary[i] for i in hidden.tolist()))
for who, logits in guesses.items():
    best = logits.softmax(-1).topk(3)
    shown = [f"{vocabulary[i]} {p:.0%}" for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
    print(f"{who:28} {', '.join(shown)}")

# %% [markdown] exercise="a3_pseudo_perplexity"
# How surprising is a sentence to a model that looks both ways? It gives no probability to a sentence as a whole, so Salazar et al. (2020) hide **one word at a time**, all others in sight, and ask for it.
#
# - `model` is a function: ids `(batch, n)` → logits `(batch, n, vocab)`. `ids` is one row, `(n,)`, int64; `mask_id` an id; `special` a list of ids, `mask_id` among them.
# - A **word** is a position whose token is not in `special`; there is at least one. A token that occurs twice is two words. Special tokens are neither hidden nor counted, but stay in the input.
# - For each word: put `mask_id` in its place, leave all others as they are, and run the model. The word costs `-ln p`, where `p` is the probability that the logits **at this very place** give to the word that stood there. (This is MLM. The seat before, as in exercise 5, is MNTP.)
# - The **pseudo-perplexity** is *e* to the **mean** of these costs. Return it, a number: 1 if the model is sure of every word and right, `vocab` if to it all tokens are equally likely.

# %% [markdown] hint="a3_pseudo_perplexity"
# A loop over the words: copy the row, hide one, run the model on `hidden[None]` (it wants a batch), note the cost. `log_softmax` over the vocabulary gives ln p. Or a batch with one row per hidden word. Once all costs are there, two steps are left: which one comes first?


# %% answer="a3_pseudo_perplexity"
def pseudo_perplexity(model, ids, mask_id, special):
    """A function ids -> logits, one row (n,) -> e to the mean cost of its words, each hidden alone."""
    ### BEGIN SOLUTION
    costs = []
    for i in range(len(ids)):
        if int(ids[i]) not in special:
            hidden = ids.clone()
            hidden[i] = mask_id
            costs.append(-model(hidden[None])[0, i].log_softmax(-1)[ids[i]])
    return torch.stack(costs).mean().exp()
    ### END SOLUTION


# %% [markdown]
# Our sentence, one that begins with our scene and ends with another, and the words in reverse order. *Predict the order of the three.*


# %%
@torch.no_grad()
def read(ids):
    return reader(ids, masks.bidirectional())


mixed = " ".join([*sentence.split()[:3], *scenes[-1].split()[1:]])
texts = [sentence, mixed, " ".join(reversed(sentence.split()))]

# %% look="a3_pseudo_perplexity"
{text: round(float(pseudo_perplexity(read, encode(text), MASK, special)), 1) for text in texts}

# %% [markdown]
# Read the numbers as "as if it had to guess among so many words". Our sentence costs little: only its adjective is anybody's guess. In the second one each end speaks against the other, so the reader is surprised at both. In the third hardly a word stands where the reader has ever met it: it is sure of other words, and does worse than somebody who guesses among the whole vocabulary.
#
# **What you have now.** A loss that asks the right question at the right place; a threshold below which a loss is a proof, and no praise; a table that shows where the future gets in; and a way to train without a causal mask in which the answer is out of sight. The reader knows who did it because it has seen what was done and where. It was never asked to continue a text, and nothing here says that it could. That trade is what the rest of the course is about.
