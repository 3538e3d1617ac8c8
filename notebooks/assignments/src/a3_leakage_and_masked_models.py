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
# **No prediction may depend on what it must predict.** You apply this rule where the lessons did not: to packed rows, to spans that are moved to the end of a text, to tokens in another order, and to words of several tokens.
#
# You build a loss for packed rows, a threshold that proves a leak, a test that finds which document leaks into which, two objectives, and a score for masked models.
#
# | | |
# |---|---|
# | **You need** | lessons `05_next_token_leakage` and `06_new_objectives` |
# | **Time and points** | about 80 minutes, 24 points, six exercises |
#
# After each exercise, a check calls your function and states the probable cause of a mistake. You can skip an exercise. Cells with `check.look` show what your function returns, once you have written it.

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
# We use a tiny language: one of six names, then one of six scenes. A name has two tokens; `##` marks a token that continues a word.

# %%
names = ["Mar ##tha", "Ol ##af", "In ##grid"]  # drawn: names
scenes = ["sat by the river", "swam to the rock", "lay on the sand"]  # drawn: scenes
specials = ["[SEP]", "[MASK]", "[A]", "[B]"]  # end of a text, hidden token, and two for exercise 4
ordinary = sorted(set(" ".join(names + scenes).split()))
vocabulary = specials + ordinary
SEP, MASK, A, B = range(4)
W, V = len(ordinary), len(vocabulary)


def encode(text):
    return torch.tensor([*(vocabulary.index(token) for token in text.split()), SEP])


def decode(ids):
    return [vocabulary[i] for i in ids]


# %%
texts = [f"{name} {scene}" for name, scene in zip(names[:3], scenes[:3], strict=True)]
ids = encode(texts[0])  # (n,)
n = len(ids)
packed = torch.cat([encode(text) for text in texts])  # three documents in one row, (3 n,)
documents = torch.arange(3).repeat_interleave(n)  # the document of each token, (3 n,)
print(f"{W} ordinary tokens, {V} in the vocabulary;", decode(ids))

# %% [markdown] exercise="a3_packed_loss"
# To save padding, short documents are **packed** into one row, one after the other. Each document should be learned as if it were alone, so no token has to be predicted from another document.
#
# - `logits` is `(batch, n, vocab)`, float; the logits at position `i` predict the token at `i + 1`.
# - `ids` is `(batch, n)`, int64.
# - `documents` is `(batch, n)`, int64: the number of a token's document, from 0 in each row; -1 for padding.
#
# A pair of neighbours counts if **both tokens belong to the same document**. Return the mean of $-\ln p$, in nats, over all pairs of the batch that count; each pair has the same weight. With `documents = [[0, 0, 0, 1, 1, -1, -1]]`, three pairs count.

# %% [markdown] hint="a3_packed_loss"
# Compare `documents[:, :-1]` with `documents[:, 1:]`: position by position, they are the two tokens of a pair. Padding has a number too, and two neighbours of it are equal.


# %% answer="a3_packed_loss"
def packed_loss(logits, ids, documents):
    """(batch, n, vocab), int (batch, n), int (batch, n) -> the mean in nats over the pairs inside documents."""
    ### BEGIN SOLUTION
    targets, here, after = ids[:, 1:], documents[:, :-1], documents[:, 1:]  # (batch, n - 1)
    counted = (here == after) & (after >= 0)
    return F.cross_entropy(logits[:, :-1][counted], targets[counted])
    ### END SOLUTION


# %% [markdown]
# If all logits are equal, the loss is the logarithm of the size of the vocabulary:

# %% look="a3_packed_loss"
[float(packed_loss(torch.zeros(1, 3 * n, V), packed[None], documents[None])), math.log(V)]

# %% [markdown] exercise="a3_proof"
# On random tokens, no causal model has an **expected** loss below $\ln V$ (lesson 05). On a few tokens, its loss can be lower by luck. How low must it be to prove a leak?
#
# A text of `count` random tokens, each of $V$ = `vocab_size` equally likely, has the probability $P = V^{-\text{count}}$. A causal model gives the text $x$ the probability $Q(x)$; its mean loss is $-\ln Q(x)$ divided by `count`. The mean of $Q/P$ over all texts is
#
# $$\sum_x P \cdot \frac{Q(x)}{P} = \sum_x Q(x) = 1.$$
#
# So $Q/P \ge 1/c$ has a probability of **at most** $c$: otherwise the mean would be larger than $c \cdot \frac1c = 1$ (Markov's inequality).
#
# Return the mean loss at which $Q/P$ is exactly $1/c$, where $c$ = `chance` is above 0 and at most 1. A causal model has this loss or a lower one with a probability of at most `chance`.

# %% [markdown] hint="a3_proof"
# Take the logarithm of $Q/P = 1/c$: two of the three terms contain `count` once you write $\ln Q$ with the mean loss. Solve for the mean loss. With `chance=1`, the threshold must be $\ln V$.


# %% answer="a3_proof"
def proof_threshold(vocab_size, count, chance):
    """The mean loss in nats per token, a float, that a causal model reaches with probability `chance` at most."""
    ### BEGIN SOLUTION
    return math.log(vocab_size) - math.log(1 / chance) / count
    ### END SOLUTION


# %% [markdown]
# The step $\sum_x Q(x) = 1$ needs a causal model: $Q$ is then a product of probabilities, each given the tokens before. A model that attends to its target can give every text a probability near 1.
#
# Which of these reports prove a leak, with a `chance` of one in a million? The texts are random, each of the `W` ordinary tokens equally likely.

# %%
reports = [(0.2, 3), (0.2, 9), (3.1, 20), (3.1, 20_000)]  # (nats per token, number of tokens)

# %% look="a3_proof"
[(loss, count, "leak" if loss <= proof_threshold(W, count, 1e-6) else "no proof") for loss, count in reports]

# %% [markdown]
# On a few tokens, even a very low loss proves nothing. On many tokens, a small difference is enough.
#
# Web text contains many duplicates. So we train on rows in which one document of six random tokens occurs **twice**: once with the plain causal mask, and once with a mask that keeps documents apart. *Predict for both masks:* what is the loss on the first and on the second document?


# %%
def trained(batch, mask, steps):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=V, context=16, width=48, layers=2, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    for step in range(steps):
        loss = model.loss(*batch(step), mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def twice(seed, rows=16):
    document = torch.randint(len(specials), V, (rows, 6), generator=torch.Generator().manual_seed(seed))
    targets = F.pad(document[:, 1:], (0, 1), value=-100)  # no pair across the two documents
    return document.repeat(1, 2), targets.repeat(1, 2)  # 2 x (rows, 12)


# %%
fresh, targets = twice(1_000_000, rows=320)
count, measured = 320 * 5, {}  # 5 predicted tokens in each document
for name, mask in {"plain causal": masks.causal(), "documents apart": masks.segments([0] * 6 + [1] * 6)}.items():
    model = trained(twice, mask, 300)
    with torch.no_grad():
        costs = F.cross_entropy(model(fresh, mask).transpose(1, 2), targets, reduction="none")  # (320, 12)
    measured[name] = costs[:, :6].sum().item() / count, costs[:, 6:].sum().item() / count
    print(
        f"{name:15} first document {measured[name][0]:.2f}, second {measured[name][1]:.2f}; ln {W} = {math.log(W):.2f}"
    )

# %% look="a3_proof"
{name: second <= proof_threshold(W, count, 1e-6) for name, (_, second) in measured.items()}

# %% [markdown]
# With the plain causal mask, the second document is copied from the first one. No token attends to a later token, and still the loss does not measure what the model has learned about language. (The threshold is used on the second documents only, because a row with both is not a text of random tokens.)

# %% [markdown] exercise="a3_document_leaks"
# The loss shows *that* something leaks. Now find out **which document leaks into which**.
#
# - `model(ids, documents)` takes two tensors `(batch, n)` and gives logits `(batch, n, vocab_size)`. It has no randomness: equal rows give equal logits, bit for bit.
# - `ids` is one packed row, `(n,)`, int64, with ids below `vocab_size`; `documents` is `(n,)`, from 0 for the first document to `D - 1`. There is no padding.
#
# Return booleans `(D, D)`: **True at `[a, b]` if `a` and `b` differ and some logits of document `a` change, by even one bit, when one token of document `b` is replaced by another token**. Try all positions and all tokens: the vocabulary is small.
#
# *Predict first:* which cells are True for a model with the plain causal mask?

# %% [markdown] hint="a3_document_leaks"
# Loop over the positions `j` and over the tokens that you put there, each time in a fresh copy of `ids`. Compare the logits of all positions with `!=` and `any(-1)`. Which documents have a changed position?


# %% answer="a3_document_leaks"
def document_leaks(model, ids, documents, vocab_size):
    """Bool (D, D): do the logits of document a depend on a token of another document b?"""
    ### BEGIN SOLUTION
    count = int(documents.max()) + 1
    base = model(ids[None], documents[None])[0]  # (n, vocab_size)
    table = torch.zeros(count, count, dtype=torch.bool)
    for j in range(len(ids)):
        for token in range(vocab_size):
            changed = ids.clone()
            changed[j] = token
            moved = (model(changed[None], documents[None])[0] != base).any(-1)  # (n,)
            table[documents[moved], documents[j]] = True
    return table.fill_diagonal_(False)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Your prediction: which cells?</summary>
#
# All cells below the diagonal: each document depends on every earlier one.
#
# </details>
#
# Four colleagues give you their models. Each of them claims to keep the documents apart. How many cells are True?

# %%
colleagues = [1, 3, 4, 2]  # drawn: colleagues
models = [mystery(number, V) for number in colleagues]

# %% look="a3_document_leaks"
{f"colleague {k}": int(document_leaks(model, packed, documents, V).sum()) for k, model in enumerate(models)}

# %% [markdown]
# One of them is right. Read the tables of the others (replace the 0): a row is the document that depends, a column the document that it depends on. Which bug can make such a table?

# %% look="a3_document_leaks"
torch.as_tensor(document_leaks(models[0], packed, documents, V)).int()

# %% [markdown]
# <details><summary>Answer</summary>
#
# - Each document depends on the one before it: the boundary between two documents is off by one.
# - One document depends on all others: one row of the mask is open in one layer.
# - A single cell: one position attends to one token of another document.
#
# </details>

# %% [markdown] exercise="a3_infill"
# A causal model can use the right context **without losing its mask**: move a span to the end of the row, and predict it there, after all the rest (Aghajanyan et al. 2022, CM3; Fried et al. 2023, InCoder).
#
# - `ids` is `(n,)`, int64. `spans` is a list of `(start, stop)` from left to right, not touching; `stop` is not included.
# - `sentinels` is a list of ids, one for each span or more; `end` is an id.
# - **Inputs**: the text with one sentinel in place of each span; then, for each span, its sentinel again and its tokens.
# - **Targets** (`targets[i]` is predicted at position `i`): the tokens of each span, and `end` after its last one; `end` occurs only here. All other positions get -100.
#
# Return `(inputs, targets)`. Example: for `ids` 5 6 7 8 9, spans `[(1, 3)]`, sentinels `[1]` and `end` 0, the inputs are 5 1 8 9 1 6 7; the targets are four times -100, then 6 7 0.

# %% [markdown] hint="a3_infill"
# Build two lists, one for the text and one for the moved spans, in a loop over `zip(spans, sentinels)`. Remember where the text goes on after a span. The moved part of a span is `[sentinel, *tokens]`, and its targets are `[*tokens, end]`.


# %% answer="a3_infill"
def infill(ids, spans, sentinels, end):
    """One row (n,) -> inputs and targets of a causal model, two rows of the same length."""
    ### BEGIN SOLUTION
    ids, text, moved, targets, last = ids.tolist(), [], [], [], 0
    for (start, stop), sentinel in zip(spans, sentinels, strict=False):
        text += [*ids[last:start], sentinel]
        moved += [sentinel, *ids[start:stop]]
        targets += [*ids[start:stop], end]
        last = stop
    text += ids[last:]
    return torch.tensor(text + moved), torch.tensor([-100] * len(text) + targets)
    ### END SOLUTION


# %% [markdown]
# The inputs, and the tokens that are predicted:

# %% look="a3_infill"
[" ".join(decode(i for i in row if i >= 0)) for row in infill(ids, [(0, 2), (5, 6)], [A, B], SEP)]

# %% [markdown] exercise="a3_order_masks"
# **Permutation language modelling** (Yang et al. 2019, XLNet) predicts the tokens of a text in any order, so each token can have context on both sides. `order` lists the positions as they are predicted: with `[2, 0, 1]`, position 2 is first, then 0, then 1.
#
# Token `i` is predicted **at position `i`**. So each position has two states, with a mask each:
#
# - **content** attends to the tokens that are predicted earlier, and to its own token. Other positions use this state.
# - **query** attends to the tokens that are predicted earlier only. The logits are computed from this state.
#
# Return `(content, query)`, both booleans `(n, n)`: row = the position that attends, True = may attend. Example: with `[2, 0, 1]`, row 0 of content is True at 0 and 2, row 0 of query only at 2.

# %% [markdown] hint="a3_order_masks"
# You need the **rank** of each position: when is it predicted? `order` is the inverse of that: `rank[order[k]] = k`. Then compare `rank[:, None]` with `rank`.


# %% answer="a3_order_masks"
def order_masks(order):
    """A permutation of 0 .. n - 1 -> (content, query), both bool (n, n)."""
    ### BEGIN SOLUTION
    rank = torch.empty(len(order), dtype=torch.long)
    rank[torch.tensor(order)] = torch.arange(len(order))
    return rank[:, None] >= rank, rank[:, None] > rank
    ### END SOLUTION


# %%
order = random.Random(1).sample(range(n), n)
print("order:", [decode(ids)[i] for i in order])

# %% look="a3_order_masks"
mask_figure(dict(zip(["content", "query"], order_masks(order), strict=True)), decode(ids))

# %% [markdown]
# This does not leak in deeper layers either: if `k` is predicted before `j`, and `j` before `i`, then `k` is predicted before `i`. With the order 0, 1, 2, ... content is the causal mask.

# %% [markdown] exercise="a3_word_perplexity"
# The pseudo-perplexity of lesson 06 hides **one token at a time**. Inside a word, that is a leak: a model can predict `Mar` from `##tha`, and `##tha` from `Mar`. Kauf and Ivanova (2023) therefore hide a token **together with the later tokens of its word**.
#
# - `model(ids)` takes `(batch, n)` and gives logits `(batch, n, vocab)`. `ids` is one row, `(n,)`, int64; `mask_id` is an id.
# - `words` is `(n,)`, int64: the number of a token's word, or -1 for a token that is neither hidden nor counted. The tokens of a word are neighbours.
# - For each token with a word: put `mask_id` in its place and in the places of the **later tokens of its word**. All others stay. The cost is $-\ln p$, where $p$ is the probability of the token in the logits **at its own position**.
#
# Return *e* to the power of the **mean** cost, a number.

# %% [markdown] hint="a3_word_perplexity"
# Loop over the positions `i` with `words[i] >= 0`. The places to hide: `words == words[i]` and not before `i`. `log_softmax(-1)` of the logits at `i` gives $\ln p$.


# %% answer="a3_word_perplexity"
def word_perplexity(model, ids, words, mask_id):
    """A function ids -> logits, and one row (n,) with its words (n,) -> e to the mean cost of its tokens."""
    ### BEGIN SOLUTION
    costs = []
    for i in range(len(ids)):
        if words[i] >= 0:
            hide = (words == words[i]) & (torch.arange(len(ids)) >= i)
            hidden = torch.where(hide, mask_id, ids)
            costs.append(-model(hidden[None])[0, i].log_softmax(-1)[ids[i]])
    return torch.stack(costs).mean().exp()
    ### END SOLUTION


# %% [markdown]
# We train a bidirectional model on our language with MLM. Each name and each scene is equally likely. *Predict:* which of the two scores is lower?


# %%
collate = Collator("mlm", pad_id=SEP, corruption=Corruption(MASK, V, rate=0.5, protected=(SEP, MASK, A, B)))


def hidden_words(step):
    rng = random.Random(step)
    rows = [encode(f"{rng.choice(names)} {rng.choice(scenes)}").tolist() for _ in range(16)]
    batch = collate([{"row": 16 * step + k, "ids": row} for k, row in enumerate(rows)])
    return batch["input_ids"], batch["labels"]


reader = trained(hidden_words, masks.bidirectional(), 350)


@torch.no_grad()
def read(ids):
    return reader(ids, masks.bidirectional())


# %%
scores = {"each token alone": [0, 1], "word by word": [0, 0]}  # the words of the name; nothing else is scored
scored = {kind: torch.tensor(words + [-1] * (n - 2)) for kind, words in scores.items()}

# %% look="a3_word_perplexity"
{kind: round(float(word_perplexity(read, ids, words, MASK)), 2) for kind, words in scored.items()}

# %% [markdown]
# Nothing in the text shows which of the six names it is. The right probabilities cost $\ln 6$ nats for the first token of the name and 0 for the second: a score of $e^{(\ln 6) / 2} \approx 2.4$. Token by token, the score is near 1, because each half of the name can be predicted from the other half. (After so few steps, our model is a little worse than that.)
#
# **What you have now.** You have applied the rule of lesson 05 in six forms: which pairs count in a packed row, how low a loss may be by luck, which document leaks into which, an objective that keeps the causal mask, one that replaces it by any order, and a score in which no part of a word is predicted from its later parts.
