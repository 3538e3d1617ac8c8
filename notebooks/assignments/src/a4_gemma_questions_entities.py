# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A4 · Gemma for questions and entities
#
# **From a converted Gemma to a claim you can defend.** You write what its layers see once it reads both ways, and how its heads share keys. Then you put it to work on a real text: tags on the right tokens, entities counted whole, a long text in windows, an answer in characters. And at the end two readers with five seeds each: may you say that one is better?
#
# Each exercise has a check. It calls your function and says what was expected, what came, and what the likely cause is. Nothing stops you: skip an exercise and come back.

# %%
import torch
from transformers import Gemma3TextConfig

import labkit
from labkit import results
from labkit.datasets import embedded
from labkit.datasets.examples import entities_of
from labkit.tasks import qa
from labkit.viz import answer_figure, attention_figure, category_figure, forest_figure, mask_figure
from labkit.viz.style import OTHERS

# %% [markdown]
# One question accompanies us, with the passage that answers it. It is from Field Notes, a data set about an invented world, so that no model can know the answer by heart.

# %%
question_id = "fn-058-1"  # drawn: question
question = next(each for each in embedded.read("qa", "field-notes", "test") if each.id == question_id)
gold = question.answers[0]
print(question.context)
print("\nQ:", question.question)
print("A:", gold.text, (gold.start, gold.end))

# %% [markdown]
# And the sentence of that passage with the most names in it, word by word, each with its tag: `B-` begins an entity, `I-` goes on with it, `O` is none.

# %%
sentences = [each for each in embedded.read("ner", "field-notes", "test") if each.group == question.group]
sentence = max(sentences, key=lambda each: len(entities_of(each.tags)))
print(*zip(sentence.words, sentence.tags, strict=True), sep="\n")

# %% [markdown]
# ## The model
#
# The layers of Gemma 3 are of two kinds. This is how its configuration lays out 18 of them:

# %%
names = {"sliding_attention": "local", "full_attention": "global"}
kinds = [names[kind] for kind in Gemma3TextConfig(num_hidden_layers=18).layer_types]
category_figure({"layer": kinds}, list(map(str, range(18))), colours={"local": OTHERS[1], "global": OTHERS[0]})

# %% [markdown] exercise="a4_layer_mask"
# As it was trained, a **local** layer with a window of `w` sees `w` tokens: the token itself and the `w - 1` before it. Now the model is to read both ways, and each layer keeps the distance it was trained to look, on **either** side. A **global** layer then sees everything.
#
# Return the mask of layer number `layer` (the first is 0), where every `every`-th layer is global: the last of each group, as in the picture above. Booleans, shape `(n, n)`, row = query, `True` = may look.
#
# *Predict first:* with a window of 8, how many tokens does a token in the middle of a long text see? It was 8 before.

# %% [markdown] hint="a4_layer_mask"
# The distance between query `i` and key `j` is `|i - j|`. How far back lies the farthest token that a causal window of 1 shows? And of 2? For the layers: which numbers are global if `every` is 6? Look at the picture, and count from 0.


# %% answer="a4_layer_mask"
def layer_mask(n, w, layer, every):
    """Bool (n, n): what a layer of a bidirectional Gemma sees, if its causal window held w tokens."""
    ### BEGIN SOLUTION
    if (layer + 1) % every == 0:
        return torch.ones(n, n, dtype=torch.bool)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    return (i - j).abs() < w
    ### END SOLUTION


# %% look="a4_layer_mask"
mask_figure(layer_mask(len(sentence.words), 4, 0, 6), list(sentence.words))

# %% [markdown]
# Does a real conversion do that? The tiny Gemma 3 has random weights, and is wired like the big one: a local layer, then a global one. The audit shakes its input and measures how far each layer sees, to the left and to the right (`None`: no end was met).

# %%
tiny = labkit.load("tiny-gemma3").model
print("window:", tiny.config.sliding_window)
for window in ("keep", "halve"):
    labkit.to_bidirectional(tiny, window=window)
    print(f"{window:6}", [layer.reach for layer in labkit.audit(tiny).layers])

# %% [markdown]
# `keep` is what you wrote. `halve` is another choice, the one EmbeddingGemma was trained with (`labkit.to_bidirectional` names the source): `w // 2` to a side, so that a token sees about as many as before. Neither is *the* window, so say which one you took. And plain transformers, with its own switch and nothing else?

# %%
raw = labkit.load("tiny-gemma3").model
raw.config.is_causal = False
print([layer.reach for layer in labkit.audit(raw).layers])

# %% [markdown]
# One token more than the model was ever trained to see, on either side.

# %% [markdown] exercise="a4_grouped"
# In Gemma several query heads share one key head and one value head: **grouped-query attention**. The heads of a group are **neighbours**: with 4 query heads and 2 key heads, queries 0 and 1 ask key head 0, queries 2 and 3 ask key head 1.
#
# `q` is `(heads, n, d)`; `k` and `v` are `(groups, n, d)`, and `heads` is a multiple of `groups`; `mask` is bool `(n, n)`, `True` = may look, and every token sees itself. Scores are divided by the **square root of `scalar`**, a number in Gemma's configuration (`query_pre_attn_scalar`) that need not be `d`. Return what the heads mix, shape `(heads, n, d)`.

# %% [markdown] hint="a4_grouped"
# Begin with the heads alone: for 6 query heads and 2 key heads, write down which key head each query head asks. Then give keys and values as many heads as there are queries, in just this order. torch repeats in two ways, `repeat` and `repeat_interleave`; try both on `torch.tensor([0, 1])`, and mind that yours are to be repeated along one dimension only.
#
# From there on it is attention as in A1, with a dimension of heads in front: scores `(heads, n, n)`, the mask before the softmax, the values last. What the scores are divided by is not the size of a head.


# %% answer="a4_grouped"
def grouped_attention(q, k, v, mask, scalar):
    """(heads, n, d), twice (groups, n, d), bool (n, n), a number -> (heads, n, d)."""
    ### BEGIN SOLUTION
    each = len(q) // len(k)
    k, v = k.repeat_interleave(each, dim=0), v.repeat_interleave(each, dim=0)  # (heads, n, d)
    scores = q @ k.transpose(-2, -1) / scalar**0.5  # (heads, n, n)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights @ v
    ### END SOLUTION


# %% [markdown]
# With the unit vectors as values, what comes out *is* the weights. Two query heads, equal to each other, and one key head: equal pictures.

# %%
generator = torch.Generator().manual_seed(0)
query, key = torch.randn(1, 6, 4, generator=generator), torch.randn(1, 6, 4, generator=generator)
units, everything = torch.eye(6)[None], torch.ones(6, 6, dtype=torch.bool)

# %% look="a4_grouped"
attention_figure(grouped_attention(query.repeat(2, 1, 1), key, units, everything, 4))

# %% [markdown]
# ## Entities
#
# A tokenizer, here that of a small GPT-2, cuts words into pieces, and says where each piece stands in the text: its **offsets**, first character and the one after the last. Look for two things: who holds the space between two words, and what stands at `(0, 0)`?

# %%
tokenizer = labkit.load("gpt2-mini").tokenizer
encoded = tokenizer(sentence.text, add_special_tokens=False, return_offsets_mapping=True)
offsets = [(0, 0), *encoded["offset_mapping"]]  # a row begins with a mark that stands for no character
for start, end in offsets[:8]:
    print((start, end), repr(sentence.text[start:end]))

# %% [markdown] exercise="a4_token_labels"
# A word has one tag, and may have several tokens. Put its label on its **last** token, and `-100`, which the loss leaves out, on all others. A token belongs to a word if it holds at least one of its characters: `start` and `end` of the word, `end` not included. A token at `(0, 0)` belongs to none, and so does one that holds nothing but space. No two words share a token here. A word without a token (rows get cut) has no label.
#
# `offsets`: a list of pairs, in order; `spans`: a pair for each word; `tags`: a tag for each word; `numbers`: `{"O": 0, "B-PER": 1, ...}`. Return a list of whole numbers, one for each token.
#
# *Predict first:* why the last and not the first? Think of a causal model, and of what it has read by then.

# %% [markdown] hint="a4_token_labels"
# Two stretches `(a, b)` and `(start, end)` have a character in common if each begins before the other ends. Collect the tokens of a word first, then take one of them. What if there are none?


# %% answer="a4_token_labels"
def token_labels(offsets, spans, tags, numbers):
    """One label for each token: the number of the tag on the last token of a word, -100 elsewhere."""
    ### BEGIN SOLUTION
    labels = [-100] * len(offsets)
    for (start, end), tag in zip(spans, tags, strict=True):
        held = [t for t, (a, b) in enumerate(offsets) if a < end and start < b]
        if held:
            labels[held[-1]] = numbers[tag]
    return labels
    ### END SOLUTION


# %%
kinds = ("PER", "LOC", "ORG", "DATE", "MISC")
numbers = {label: k for k, label in enumerate(["O", *(f"{letter}-{kind}" for kind in kinds for letter in "BI")])}
pieces = [sentence.text[start:end] for start, end in offsets]

# %% look="a4_token_labels"
list(zip(pieces, token_labels(offsets, sentence.spans, sentence.tags, numbers), strict=True))

# %% [markdown]
# Now a model has answered, and we count. Here is one that finds every entity, and stops a word too early wherever it has more than one:

# %%
following = [*sentence.tags[1:], "O"]
hasty = ["O" if tag[0] == "I" and after[0] != "I" else tag for tag, after in zip(sentence.tags, following, strict=True)]
right = sum(a == b for a, b in zip(sentence.tags, hasty, strict=True))
print(f"right tags: {right} of {len(hasty)}")

# %% [markdown] exercise="a4_entity_f1"
# Not bad? It has not one name of several words right. So we count **entities**: one is found if sentence, first word, last word and kind are all the same. An `I-` that does not go on with an entity of its own kind begins one.
#
# `gold` and `predicted` are lists of sentences, each a list of tags. Over all sentences together, return F1 = 2 · found / (entities in gold + entities predicted), a number between 0 and 1; where there is none in either, 0.
#
# *Predict first:* what is the F1 of the hasty reader on our sentence?

# %% [markdown] hint="a4_entity_f1"
# Write a helper that turns the tags of one sentence into a set of (first word, last word, kind). Go through the tags and remember the entity that is open: `B-` closes it and opens one, `O` closes it, and `I-` of another kind? Add the number of the sentence, and F1 is about two sets.


# %% answer="a4_entity_f1"
def entity_f1(gold, predicted):
    """Two lists of sentences, each a list of BIO tags -> F1 of whole entities, 0 to 1."""
    ### BEGIN SOLUTION

    def entities(texts):
        found = set()
        for number, tags in enumerate(texts):
            first = None  # of the entity that is open
            for k, tag in enumerate([*tags, "O"]):
                goes_on = first is not None and tag == f"I-{tags[first][2:]}"
                if first is not None and not goes_on:
                    found.add((number, first, k, tags[first][2:]))
                    first = None
                if tag != "O" and not goes_on:
                    first = k
        return found

    there, said = entities(gold), entities(predicted)
    return 2 * len(there & said) / max(len(there) + len(said), 1)
    ### END SOLUTION


# %% look="a4_entity_f1"
entity_f1([list(sentence.tags)], [hasty])

# %% [markdown]
# ## Questions
#
# A passage is often longer than what a model reads at once. Suppose that a row holds 60 tokens. How long is this passage?

# %%
context = tokenizer(question.context, add_special_tokens=False)["input_ids"]
print(len(context), "tokens")

# %% [markdown] exercise="a4_windows"
# So it is read in **windows** that overlap, lest an answer is cut in two. A window holds `room` tokens; the next one starts `step` tokens after this one (`1 <= step <= room`); the first one starts at 0. Stop at the first window that reaches the end of the text; it may be shorter. Return a list of pairs `(first, stop)`, with `stop` not included, for a text of `n >= 1` tokens.
#
# *A trap in the names:* this `step` is the *doc stride* of BERT's script. What transformers' tokenizers call `stride` is the part that two windows **share**.

# %% [markdown] hint="a4_windows"
# Go along: note the window that starts here, cut at `n`. Did it reach `n`? Then it was the last one.


# %% answer="a4_windows"
def windows(n, room, step):
    """[(first, stop), ...]: tokens of each window, overlapping, the last one reaching n."""
    ### BEGIN SOLUTION
    found, first = [], 0
    while True:
        found.append((first, min(first + room, n)))
        if first + room >= n:
            return found
        first += step
    ### END SOLUTION


# %% look="a4_windows"
windows(len(context), 60, 40)

# %% [markdown] exercise="a4_best_answer"
# A model for questions gives each token two scores: that the answer **starts** here, and that it **ends** here. Find the answer.
#
# - `rows`: one for each window, `(offsets, start, end)`, each a list over the tokens of that row. `offsets` are pairs in the characters of the whole `text`, and `None` for a token that is not of the text (the question, the marks). Tokens of the text stand side by side, at least one in each row, and none of them is all space. `start` and `end` are numbers.
# - An answer goes from token `i` to token `j` of the text, both in the same row, `i <= j`, and has at most `longest` tokens, both included. Its score is `start[i] + end[j]`. The best one of all windows counts.
# - The **last** token of a row stands for *no answer in here*: its `start + end`. Of all windows, the **lowest** of these counts. If it is greater than the score of the best answer, return `None`.
# - Otherwise return `(a, b)`: `text[a:b]` is the answer. A token may hold the space before its word; the answer does not begin with it.
#
# *Predict first:* why the lowest? Think of three windows, and of an answer that stands in the second.

# %% [markdown] hint="a4_best_answer"
# Two loops, over `i` and over the few `j` that it may go with, and a best one to remember, with its characters. The best start and the best end, taken each for itself, need not even be in this order. For the space: compare `text[a:b]` with what `lstrip` leaves of it.


# %% answer="a4_best_answer"
def best_answer(text, rows, longest):
    """The characters (a, b) of the best answer over all rows, or None where no answer scores higher."""
    ### BEGIN SOLUTION
    best, place, nothing = float("-inf"), None, float("inf")
    for offsets, start, end in rows:
        nothing = min(nothing, start[-1] + end[-1])
        for i in range(len(offsets)):
            for j in range(i, min(i + longest, len(offsets))):
                if offsets[i] is None or offsets[j] is None:
                    continue
                if start[i] + end[j] > best:
                    best, place = start[i] + end[j], (offsets[i][0], offsets[j][1])
    if nothing > best:
        return None
    a, b = place
    return b - len(text[a:b].lstrip()), b
    ### END SOLUTION


# %% [markdown]
# No reader is trained here, so we plant one: noise for scores, and a bump where the answer starts and ends. The rows are those that labkit makes, with a window of tokens that is too short for the passage. A row without the answer has its bump on its last token: not in here.

# %%
rows = qa.windows(tokenizer, [question], max_length=96, doc_stride=32)
generator = torch.Generator().manual_seed(int(question_id[3:6]))
planted = []
for row in rows:
    start, end = torch.randn(2, len(row.ids), generator=generator)
    start[row.start] += 8
    end[row.end] += 8
    planted.append((list(row.offsets), start.tolist(), end.tolist()))
print("rows:", len(rows), " with the answer:", sum(row.start != row.null for row in rows))

# %% look="a4_best_answer"
answer_figure(question.context, [(*best_answer(question.context, planted, 30), 1.0)], [(gold.start, gold.end)])

# %% [markdown]
# ## A fair comparison
#
# Two readers, causal and bidirectional, five seeds each, scored on the same 60 texts. We *plant* the truth: **they are equally good**. Texts are easy or hard, and a seed is lucky or not:

# %%
generator = torch.Generator().manual_seed(int(question_id[3:6]))
easy = 0.5 + 0.2 * torch.randn(1, 60, generator=generator)


def trained():
    """Scores (5 seeds, 60 texts) of a reader."""
    luck, chance = torch.randn(5, 1, generator=generator), torch.randn(5, 60, generator=generator)
    return easy + 0.03 * luck + 0.1 * chance


one, other = trained(), trained()
print("one less other, seed by seed:", [round(gap, 3) for gap in (one - other).mean(1).tolist()])

# %% [markdown] exercise="a4_compare"
# Whoever trains one seed reports one of these numbers. With all of them there is a mean, the **gap**: `one` minus `other`. And there is an **interval**: what could the gap have been with other seeds and other texts? The *bootstrap* draws seeds and texts again, with repetition, and looks.
#
# `one` and `other` are `(n_seeds, n_texts)`. The draws are given: `seeds` is `(draws, n_seeds)` and `texts` is `(draws, n_texts)`, whole numbers that say which rows and which columns draw number `d` takes. It is **paired**: the same seeds and texts for both readers. The gap of a draw is the mean of `one` less `other` over all its seeds and texts. Return
#
# `(gap, low, high, claim)`: the observed gap, the 2.5 % and the 97.5 % quantile of the gaps of the draws (with `torch.quantile`, as it is), and `"one"` if the whole interval is above zero, `"other"` if it is below, `None` if zero is inside or at its edge: then **nothing** may be claimed.

# %% [markdown] hint="a4_compare"
# Subtract first: what is paired stays paired. For one draw, take rows, then columns: `x[rows][:, columns]`. Then a loop over the draws.


# %% answer="a4_compare"
def compare(one, other, seeds, texts):
    """(n_seeds, n_texts) twice, (draws, n_seeds) and (draws, n_texts) indices -> (gap, low, high, claim)."""
    ### BEGIN SOLUTION
    apart = one - other  # (n_seeds, n_texts)
    gaps = torch.stack([apart[rows][:, columns].mean() for rows, columns in zip(seeds, texts, strict=True)])
    low, high = torch.quantile(gaps, 0.025).item(), torch.quantile(gaps, 0.975).item()
    claim = "one" if low > 0 else "other" if high < 0 else None
    return apart.mean().item(), low, high, claim
    ### END SOLUTION


# %%
seeds, texts = (torch.randint(size, (1000, size), generator=generator) for size in (5, 60))

# %% look="a4_compare"
compare(one, other, seeds, texts)

# %% [markdown]
# Where zero is inside, the honest sentence is "we have not shown a difference", and not "there is none". And if the interval leaves zero out although we planted none? That happens in a share of all worlds; an interval is a bet, not a proof.
#
# Two things make a real comparison stricter. Texts of one group (questions on one passage) are not independent, so groups are drawn. And a bootstrap of so few seeds is too narrow, so the stored study lets the seeds enter by Student's t. This is what it has measured for entities, with controls such as reading the text twice (`repeated`):

# %%
stored = results.load("mask_effect").query("task == 'ner' and part == 'all'")
unit = "difference to causal, points of F1"
forest_figure(results.by_label(stored), "Named entities: each arm minus the causal one", unit)

# %% [markdown]
# Each row is an arm minus the causal one, in points of F1, with its 95 % interval. If the interval contains 0, the difference is not significant, however large it is.
#
# **What you have now.** What a layer of a bidirectional Gemma sees, and how its heads share; labels where a model can know them; scores that count what was asked for; answers in the words of the text; and a comparison that does not mistake luck for a mask. `09_question_answering` and `10_named_entities` train readers; here we only planted them.
