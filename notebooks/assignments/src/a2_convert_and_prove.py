# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A2 · Convert GPT-2 and prove it
#
# **Is this model bidirectional now? Whoever sells you the conversion says yes.** You write the instrument that finds out: it changes a token, looks who notices, and believes no flag. Then you convert GPT-2 with a mask of your own. At the end we attack your instrument with models that look converted and are not.
#
# Each exercise has a check. It calls your function and says what was expected, what came, and what the likely cause is. Nothing stops you: skip an exercise and come back. Notebooks 04 and 03 are good company.

# %%
import copy

import torch

import labkit
from labkit import masks, pitfalls, viz

# %% [markdown]
# One sentence goes with us: **{{sentence}}** Read it slowly. Sentences like this one lead you astray at first: the ending changes what you made of the beginning. A causal model cannot go back; a bidirectional one could.
#
# The model is gpt2-mini, a small GPT-2 that comes with this lab.

# %%
lm = labkit.load("gpt2-mini", device="cpu")
model, tokenizer = lm.model, lm.tokenizer
sentence = "The old man the boat."  # drawn: sentence
word = " ship"  # drawn: word
pads = 3  # drawn: pads

# %%
ids = torch.tensor([tokenizer(sentence).input_ids])  # (1, n)
other = tokenizer(word).input_ids[0]
n = ids.shape[1]
tokens = [tokenizer.decode([i]) for i in ids[0]]
print(n, tokens)

# %% [markdown]
# **How we measure.** Run the model, change one token, run it again. `model(input_ids=ids).logits` has shape `(1, n, vocabulary)`: one row of numbers for each **output** position. Where a row has changed, that output has *noticed* the change.
#
# What a mask closes gets a weight of exactly zero. So there is nothing to round and no threshold to choose: an output that does not notice is the same **to the last bit**. Here is one and the same sentence twice, and no number differs:

# %%
with torch.no_grad():
    once, again = model(input_ids=ids).logits, model(input_ids=ids).logits
print("logits", tuple(once.shape), "equal to the last bit:", torch.equal(once, again))

# %% [markdown]
# All models of this assignment are GPT-2s from transformers. They have no dropout, so that they are exact in training mode, too:

# %%
model.config.embd_pdrop, model.config.attn_pdrop, model.config.resid_pdrop

# %% [markdown] exercise="a2_noticed"
# Put the token `other` in the place of token `j`, and return who notices: booleans, shape `(n,)`, `True` at `i` if **any** of the numbers of output `i` has changed. `ids` is `(1, n)`; leave it as it is.
#
# *Predict first:* the token before the full stop of "{{sentence}}" is exchanged for "{{word}}". Which outputs of a causal model notice?

# %% [markdown] hint="a2_noticed"
# `ids.clone()` before you write. Two tensors of logits give a table of True and False by `!=`; which dimension holds the vocabulary, and what does `any` do there?


# %% answer="a2_noticed"
def who_notices(model, ids, j, other):
    """ids (1, n), position j, a token id -> bool (n,): the outputs that change when token j becomes `other`."""
    ### BEGIN SOLUTION
    changed = ids.clone()
    changed[0, j] = other
    with torch.no_grad():
        before, after = model(input_ids=ids).logits, model(input_ids=changed).logits  # (1, n, vocabulary)
    return (before != after).any(-1)[0]
    ### END SOLUTION


# %% look="a2_noticed"
[tokens[i] for i in range(n) if who_notices(model, ids, n - 2, other)[i]]

# %% [markdown] exercise="a2_influence"
# Now for every token. Return the **influence matrix**: booleans, shape `(n, n)`, `True` at `[i, j]` if output `i` notices when token `j` (and no other) is changed.
#
# Which token do you put there? Two can be alike to a model. In our models a token may have up to **two twins**, other ids with exactly its vector. So say that nobody notices only when you have tried **three different others**. The ids go from 0 to `model.config.vocab_size - 1`.

# %% [markdown] hint="a2_influence"
# One column per token: what does `who_notices` give you for token `j`? Several tries make one column by `|`. And `(id + step) % vocabulary` never leaves the vocabulary.


# %% answer="a2_influence"
def influence(model, ids):
    """ids (1, n) -> bool (n, n): does output i notice a change of token j?"""
    ### BEGIN SOLUTION
    n, vocabulary = ids.shape[1], model.config.vocab_size
    seen = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for step in (1, 7, 29):
            seen[:, j] |= who_notices(model, ids, j, (ids[0, j] + step) % vocabulary)
    return seen
    ### END SOLUTION


# %% look="a2_influence"
viz.mask_figure(influence(model, ids), tokens)

# %% [markdown] exercise="a2_verdict"
# A picture is for people; a proof needs a word. Given an influence matrix, booleans `(n, n)` with `n` at least 2, return
#
# - `"causal"` if each output notices its own token and **all** before it, and no later one,
# - `"bidirectional"` if each output notices **all** tokens,
# - `"mixed"` for anything else.

# %% [markdown] hint="a2_verdict"
# You know what the two matrices look like, cell by cell. When are two tables of booleans the same? `torch.equal` says it in a word.


# %% answer="a2_verdict"
def verdict(seen):
    """bool (n, n) -> "causal", "bidirectional" or "mixed"."""
    ### BEGIN SOLUTION
    full = torch.ones_like(seen)
    if torch.equal(seen, full):
        return "bidirectional"
    return "causal" if torch.equal(seen, full.tril()) else "mixed"
    ### END SOLUTION


# %% look="a2_verdict"
verdict(influence(model, ids))

# %% [markdown]
# ## The silent failure
#
# Now somebody converts the model, and it takes two lines:

# %%
print(pitfalls.get("layer-flag-off").code)
flagged = pitfalls.get("layer-flag-off").apply(copy.deepcopy(model))  # the same two lines, on GPT-2's layers

# %% [markdown]
# **Predict** what your `verdict` says of it. Then run the next cell (it needs exercises 2 and 3).

# %% look="a2_verdict"
verdict(influence(flagged, ids))

# %% [markdown]
# Case closed? A sentence is seldom alone. It comes in a batch, beside shorter ones that are filled up with **pads**; `attention_mask`, of shape `(batch, n)`, has 1 for what is real and 0 for pads.

# %% [markdown] exercise="a2_padding"
# Measure the influence in a batch of **two rows**. Row 0 is the sentence, `ids`. Row 1 is the same sentence, but its last `pads` tokens are pads: id 0, with 0 in the attention mask. Return booleans, shape `(2, n, n)`: in row `r`, does output `i` notice a change of what stands at `j`?
#
# The two rows and their attention mask are laid out for you: `rows` and `real`, both `(2, n)`. They go through the model **together**. The pads are columns like all others: put other ids there too (what does a real token care?). As *outputs* pads interest nobody: let their rows be `False`. Try three others at each place, as before.

# %% [markdown] hint="a2_padding"
# `who_notices` for a batch: change place `j` in both rows at once, since rows do not mix. It is the pad's *id* that you change; the attention mask goes on saying that it is a pad.


# %% answer="a2_padding"
def influence_padded(model, ids, pads):
    """ids (1, n), a number of pads below n -> bool (2, n, n): row 0 whole, row 1 with its last tokens padded."""
    n, vocabulary = ids.shape[1], model.config.vocab_size
    rows, real = ids.repeat(2, 1), torch.ones(2, n, dtype=torch.long)
    rows[1, n - pads :], real[1, n - pads :] = 0, 0  # row 1 ends with pads

    ### BEGIN SOLUTION
    @torch.no_grad()
    def logits(rows):
        return model(input_ids=rows, attention_mask=real).logits  # (2, n, vocabulary)

    before, seen = logits(rows), torch.zeros(2, n, n, dtype=torch.bool)
    for j in range(n):
        for step in (1, 7, 29):
            changed = rows.clone()
            changed[:, j] = (rows[:, j] + step) % vocabulary
            seen[:, :, j] |= (logits(changed) != before).any(-1)
    return seen & real.bool()[:, :, None]
    ### END SOLUTION


# %%
def in_company(model):
    """A verdict on the whole row and on the real tokens of the padded one; and are pads heard?"""
    seen, real = influence_padded(model, ids, pads), n - pads
    heard = bool(seen[1, :real, real:].any())
    return {"whole row": verdict(seen[0]), "padded row": verdict(seen[1, :real, :real]), "pads heard": heard}


# %% look="a2_padding"
{"as it came": in_company(model), "flagged": in_company(flagged)}

# %% [markdown]
# Compare the flagged model's first entry with its verdict alone. The same sentence, the same weights: with one pad in the batch **the whole row has changed its nature, and nothing said so.** Without padding transformers hands the kernel no mask, and the flag counts; with padding it builds a mask, which is causal, and nobody asks the flag. Whoever tested with one sentence has shipped a causal model.
#
# ## What cannot be seen from outside
#
# The next conversion has opened the first layer, and forgot the loop:

# %%
print(pitfalls.get("first-layer-only").code)
half = pitfalls.get("first-layer-only").apply(copy.deepcopy(model))

# %% look="a2_padding"
in_company(half)

# %% [markdown]
# **Predict** why the causal layers above it cannot be seen here. (What has the last layer's input heard of, once the first layer has let it in?)
#
# So we go inside. A GPT-2 block, `model.transformer.h[layer]`, is handed the hidden states `(batch, n, width)` as its first argument. In it, the heads work apart, are put **side by side** in a tensor `(batch, n, width)`, and only then mixed by `attn.c_proj`. What `c_proj` is handed shows each head alone:

# %%
handed = []
hook = model.transformer.h[0].attn.c_proj.register_forward_pre_hook(lambda module, args: handed.append(args[0]))
with torch.no_grad():
    model(input_ids=ids)
hook.remove()
print("c_proj of layer 0 is handed", tuple(handed[0].shape), "for", model.config.n_head, "heads")

# %% [markdown] exercise="a2_heads"
# Return the influence **within one layer**, for each head: booleans, shape `(heads, n, n)`. `True` at `[h, i, j]`: if the hidden state at `j` changes **on its way into block `layer`**, then what head `h` of that block gives at `i` changes. The layers below stay as they are.
#
# The number of heads is `model.config.n_head`; head `h` has the `h`-th run of neighbouring columns. Take away every hook that you register, as in the cell above. And mind the size of a change: the same number added to all of a state is none, as the block's LayerNorm takes it away and leaves but rounding.

# %% [markdown] hint="a2_heads"
# Two hooks. A forward **pre**-hook on the block may return other arguments: `return (hidden, *args[1:])`. One on `attn.c_proj` writes down what it is handed. Change a state by a random vector: a block begins with a LayerNorm, and that takes away whatever is the same in all numbers. `try` ... `finally` removes hooks for certain.


# %% answer="a2_heads"
def head_influence(model, ids, layer):
    """ids (1, n), a layer's number -> bool (heads, n, n): within the layer, does head h at i notice the state at j?"""
    ### BEGIN SOLUTION
    block, n, heads = model.transformer.h[layer], ids.shape[1], model.config.n_head
    push = torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def by_head(j=None):
        found = []

        def change(block, args):
            hidden = args[0].clone()
            if j is not None:
                hidden[:, j] += push
            return (hidden, *args[1:])

        hooks = [block.register_forward_pre_hook(change)]
        hooks += [block.attn.c_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))]
        try:
            model(input_ids=ids)
        finally:
            for hook in hooks:
                hook.remove()
        return found[0][0].view(n, heads, -1)  # (n, width) -> (n, heads, width / heads)

    before = by_head()
    columns = [(by_head(j) != before).any(-1) for j in range(n)]  # n times (n, heads)
    return torch.stack(columns, dim=-1).transpose(0, 1)  # (n, heads, n) -> (heads, n, n)
    ### END SOLUTION


# %%
def by_layer(model):
    """One line per layer: the verdicts on its heads."""
    layers = range(model.config.n_layer)
    found = [[verdict(head) for head in head_influence(model, ids, layer)] for layer in layers]
    return "\n".join(f"layer {layer}: {', '.join(words)}" for layer, words in enumerate(found))


# %% look="a2_heads"
print(by_layer(half))

# %% [markdown]
# ## The mask is right, and the model is wrecked
#
# Some conversions write attention anew. This one forgets to scale the scores:

# %%
print(pitfalls.get("forgets-scaling").code)
wrecked = pitfalls.get("forgets-scaling").apply(copy.deepcopy(model))

# %% look="a2_padding"
in_company(wrecked)

# %% [markdown]
# Every cell is as it should be, and this is not GPT-2 any more. A mask test looks at *who* is listened to, never at *how*. For that we need the original: with **the same mask in force** in both, both must compute the same.

# %% [markdown] exercise="a2_same"
# Put the causal mask back into `converted`, and say whether its logits for `ids`, shape `(1, n)`, are those of `original`, which is causal: `True` or `False`. `labkit.masked(model, masks.causal())` is a context manager; inside its block all layers have that mask.
#
# The same sum in another order differs in its last bits, so let equal mean: within `1e-4`, everywhere.

# %% [markdown] hint="a2_same"
# `with labkit.masked(...):` around one of the two calls. `torch.allclose` has an `atol`. The mask holds inside the block only: which of the two calls belongs there?


# %% answer="a2_same"
def same_computation(original, converted, ids):
    """Two models, ids (1, n) -> True or False: the same logits, with the causal mask put back into `converted`?"""
    ### BEGIN SOLUTION
    with torch.no_grad():
        wanted = original(input_ids=ids).logits
        with labkit.masked(converted, masks.causal()):
            found = converted(input_ids=ids).logits
    return torch.allclose(found, wanted, atol=1e-4)
    ### END SOLUTION


# %% look="a2_same"
{"flagged": same_computation(model, flagged, ids), "wrecked": same_computation(model, wrecked, ids)}

# %% [markdown]
# ## Convert it yourself
#
# GPT-2 takes a mask of **four** dimensions, and passes it through to every layer as it is. With attention `"eager"` and `"sdpa"` alike a mask of real numbers is *added* to the scores (notebook 03, section 4).

# %% [markdown] exercise="a2_full_mask"
# From an attention mask, whole numbers `(batch, n)`, 1 = real, 0 = pad, make the mask that lets every token look at **all real tokens and at no pad**: `torch.float32`, shape `(batch, 1, n, n)`, query by key, to be added to the scores. What it makes of pads as queries does not matter, as long as no `nan` comes of it.
#
# Scores can be large. What you add to the score of a pad must hide it whatever its score is.

# %% [markdown] hint="a2_full_mask"
# What is added to a score that shall stay as it is? For the others, what is the lowest number of this dtype (`torch.finfo`)? Real or not is a question about **keys**: which of the two last dimensions is theirs? `expand` makes the shape.


# %% answer="a2_full_mask"
def full_mask(attention_mask):
    """(batch, n), 1 = real, 0 = pad -> float32 (batch, 1, n, n), to be added to scores (query by key)."""
    ### BEGIN SOLUTION
    batch, n = attention_mask.shape
    pad = (attention_mask == 0)[:, None, None, :].expand(batch, 1, n, n)  # the same for every query
    return torch.zeros(batch, 1, n, n).masked_fill(pad, torch.finfo(torch.float32).min)
    ### END SOLUTION


# %% [markdown]
# Your mask against labkit's own conversion, on the sentence beside its padded copy. How far are the logits of real tokens apart?

# %%
real = torch.ones(2, n, dtype=torch.long)
real[1, n - pads :] = 0
theirs = labkit.to_bidirectional(copy.deepcopy(model))


@torch.no_grad()
def distance():
    by_you = model(input_ids=ids.repeat(2, 1), attention_mask=full_mask(real)).logits
    by_labkit = theirs(input_ids=ids.repeat(2, 1), attention_mask=real).logits
    return f"largest difference {(by_you - by_labkit)[real.bool()].abs().max():.1e}"


# %% look="a2_full_mask"
distance()

# %% [markdown]
# You have converted GPT-2 with one tensor. And what do your instruments say of labkit's conversion?

# %% look="a2_same"
print(in_company(theirs), by_layer(theirs), same_computation(model, theirs, ids), sep="\n")

# %% [markdown] exercise="a2_audit"
# Put the instruments together. `audit(converted, original)` returns `True` if you vouch for `converted`, and `False` if not. Choose the token ids yourself, at least 6 of them. Vouch for it exactly if, alone **and** beside a padded row, in evaluation **and** in training mode,
#
# - every real token notices all real tokens, in every head of every layer, and no pad, however faintly,
# - it has the weights and the arithmetic of `original`, which is causal: so its logits are those of `original` under a full mask (within `1e-4`).
#
# Then the models are to be as you found them: mode, hooks, weights.
#
# The check attacks with honest conversions and with faulty ones. Your notebook shows some kinds of attack; your grader knows more.

# %% [markdown] hint="a2_audit"
# List the ways in which a conversion can be wrong, and write beside each which instrument would see it. One thing none of the matrices can see: a future that is heard everywhere, but too faintly. Which of your functions tells you what the logits *ought* to be? Compare real tokens only. `model.training` says the mode, `model.train(mode)` sets it.


# %% answer="a2_audit"
def audit(converted, original):
    """Two models -> True or False: is `converted` an honest bidirectional conversion of `original`?"""
    ### BEGIN SOLUTION
    ids, pads = torch.arange(20, 26)[None], 2
    n, mode = ids.shape[1], converted.training
    alone, beside = torch.ones(1, n, dtype=torch.long), torch.ones(2, n, dtype=torch.long)
    beside[1, n - pads :] = 0

    def masks_are_full():
        seen = influence_padded(converted, ids, pads)
        wanted = (beside[:, :, None] & beside[:, None, :]).bool()  # real by real: no pad is heard
        heads = [head_influence(converted, ids, layer) for layer in range(converted.config.n_layer)]
        words = [verdict(head) for layer in heads for head in layer] + [verdict(influence(converted, ids))]
        return torch.equal(seen, wanted) and set(words) == {"bidirectional"}

    @torch.no_grad()
    def logits_are_right(real):
        rows = ids.repeat(len(real), 1)
        wanted = original(input_ids=rows, attention_mask=full_mask(real)).logits
        found = converted(input_ids=rows, attention_mask=real).logits
        return torch.allclose(found[real.bool()], wanted[real.bool()], atol=1e-4)

    try:
        for training in (False, True):
            converted.train(training)
            if not (masks_are_full() and logits_are_right(alone) and logits_are_right(beside)):
                return False
        return same_computation(original, converted, ids)
    finally:
        converted.train(mode)
    ### END SOLUTION


# %% [markdown]
# Your audit on the museum of notebook 03, those of its exhibits that are about GPT-2, installed on a tiny one with random weights; labkit's conversion is the last line. **Predict** which exhibits you will vouch for.

# %%
exhibits = [pitfall for pitfall in pitfalls.ALL if "gpt2" in pitfall.families]
tiny = labkit.load("tiny-gpt2", device="cpu").model


def opinion(converted):
    try:
        return "vouched for" if audit(converted, tiny) else "refused"
    except labkit.LabkitError as error:  # an exhibit that brings a mask of its own cannot be given another
        return f"refused ({type(error).__name__})"


def museum():
    for pitfall in exhibits:
        print(f"{pitfall.name:32}", opinion(pitfall.apply(copy.deepcopy(tiny))))
    print(f"{'labkit.to_bidirectional':32}", opinion(labkit.to_bidirectional(copy.deepcopy(tiny))))


# %% look="a2_audit"
museum()

# %% [markdown]
# A `ConversionError` means that the exhibit brings a mask of its own to every call, so that no causal mask can be put back: what cannot be tested gets no voucher.
#
# **What you have now.** An instrument that believes nothing: it changes a token and looks who notices, alone and in company, from outside and head by head, and holds the arithmetic against the original.
#
# And it has its limits, as every instrument has. An exhibit that you vouch for is right *under the conditions that you have tried*. labkit's own audit also tries packed texts, left padding, and the bare stack inside the model. What does it say of these three?

# %%
for name in ("config-flag-alone", "left-padding-without-positions", "top-forward-only"):
    report = labkit.audit(pitfalls.get(name).apply(copy.deepcopy(tiny)), reference=tiny)
    print(f"{name:32}", report.verdict, sorted(report.problem_kinds()))

# %% [markdown]
# A proof names its conditions. Whoever packs, pads on the left, or calls `model.transformer` must try that, too: that is what `labkit.audit` is for.
