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
# **Is this model bidirectional now?** You write an audit that measures the mask instead of reading flags, and you convert GPT-2 with your own mask. At the end, your audit is tested on models that only seem to be converted. Exercises 1 and 2 are a warm-up: they rebuild the probe of lesson 03. Exercise 3 extends it to padding.
#
# | | |
# |---|---|
# | **You need** | lesson 03; lesson 02 for the parts of GPT-2 |
# | **Time and points** | about 110 minutes with reading, 30 points |
#
# Each exercise has a check. It states what was expected, what was returned, and the likely cause of a mistake. In most exercises the check covers only a part of the points, because graders also test other models. Cells with `check.look` show what your function returns, once you have written it.

# %%
import copy

import torch

import labkit
from labkit import masks, pitfalls, viz

# %% [markdown]
# We use one sentence throughout: **{{sentence}}** Its ending changes how you read its beginning. The model is gpt2-mini, a small GPT-2 that comes with this lab.

# %%
lm = labkit.load("gpt2-mini", device="cpu")
model, tokenizer = lm.model, lm.tokenizer
sentence = "The old man the boat."  # drawn: sentence
pads = 3  # drawn: pads
ids = torch.tensor([tokenizer(sentence).input_ids])  # (1, n)
n = ids.shape[1]
tokens = [tokenizer.decode([i]) for i in ids[0]]
print(n, tokens)

# %% [markdown]
# **How we measure.** We run the model, replace one token, and run it again. `model(input_ids=ids).logits` has the shape `(1, n, vocabulary)`: one row of logits for each position. If any logit of a row changes, this output depends on the token.
#
# A closed cell of a mask gives a weight of exactly 0. So an output that does not depend on a token stays equal **to the last bit**, and we need no threshold. Compare only runs with inputs of the same shape: in a larger batch, the last bits can differ. In training mode, two runs of `gpt2-mini` differ, because its dropout is 0.1. So we measure it in evaluation mode. We run the same sentence twice:

# %%
with torch.no_grad():
    once, again = model(input_ids=ids).logits, model(input_ids=ids).logits
print("logits", tuple(once.shape), "equal to the last bit:", torch.equal(once, again))

# %% [markdown] exercise="a2_influence"
# Return the **influence matrix**: booleans, shape `(n, n)`, `True` at `[i, j]` if any logit of output `i` changes when token `j`, and no other, is replaced by another token.
#
# Token ids go from 0 to `model.config.vocab_size - 1`. `ids` is `(1, n)`; leave it as it is. Leave the mode of the model as it is, too.

# %% [markdown] hint="a2_influence"
# Use `ids.clone()` before you write into it, and start from the original sentence for each column. `(id + 1) % vocabulary` is always a valid other id. In `before != after`, which axis holds the vocabulary, and what does `any` do there?


# %% answer="a2_influence"
def influence(model, ids):
    """ids (1, n) -> bool (n, n): does output i change when token j is replaced?"""

    ### BEGIN SOLUTION
    @torch.no_grad()
    def logits(ids):
        return model(input_ids=ids).logits[0]  # (n, vocabulary)

    before, columns = logits(ids), []
    for j in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, j] = (ids[0, j] + 1) % model.config.vocab_size
        columns.append((logits(changed) != before).any(-1))
    return torch.stack(columns, dim=1)
    ### END SOLUTION


# %% look="a2_influence"
viz.mask_figure(influence(model, ids), tokens, "Which token (column) changes which output (row)")

# %% [markdown] exercise="a2_verdict"
# A test needs one word instead of a picture. From an influence matrix, booleans `(n, n)` with `n >= 2`, return
#
# - `"causal"` if each output depends on its own token and on **all** tokens before it, and on no later one,
# - `"bidirectional"` if each output depends on **all** tokens,
# - `"mixed"` for any other matrix.

# %% [markdown] hint="a2_verdict"
# You know all cells of the two matrices. `torch.equal` compares two tensors.


# %% answer="a2_verdict"
def verdict(matrix):
    """bool (n, n) -> "causal", "bidirectional" or "mixed"."""
    ### BEGIN SOLUTION
    full = torch.ones_like(matrix)
    if torch.equal(matrix, full):
        return "bidirectional"
    return "causal" if torch.equal(matrix, full.tril()) else "mixed"
    ### END SOLUTION


# %% look="a2_verdict"
verdict(influence(model, ids))

# %% [markdown]
# ## The silent failure
#
# Now we convert the model with a popular recipe. The second cell below prints your verdict on the result.

# %%
print(pitfalls.get("layer-flag-off").code)
flagged = pitfalls.get("layer-flag-off").apply(copy.deepcopy(model))  # the same recipe, for GPT-2's layers

# %% look="a2_verdict"
verdict(influence(flagged, ids))

# %% [markdown] exercise="a2_padding"
# A model must be tested on batches, too. Measure the influence in **every row of a batch**. `rows` and `real` are `(batch, n)`; `real` is the attention mask, 1 for real tokens and 0 for padding, which can be on either side.
#
# Return booleans, `(batch, n, n)`: in row `r`, does output `i` change when the token at `j` is replaced? All rows go through the model **together**, with `attention_mask=real`.
#
# - Replace the ids of padding, too: no real token may depend on them. Do not change `real`.
# - The outputs of padding are never used: set their rows to `False`.

# %% [markdown] hint="a2_padding"
# Rows do not mix, so you can replace the token at `j` in all rows at once. Set only the rows of padding outputs to `False`, with `real` in the shape `(batch, n, 1)`. Keep the columns: an influence of padding must stay visible.


# %% answer="a2_padding"
def influence_in_batch(model, rows, real):
    """rows and real (batch, n) -> bool (batch, n, n): does output i of a row change when its token j is replaced?"""

    ### BEGIN SOLUTION
    @torch.no_grad()
    def logits(rows):
        return model(input_ids=rows, attention_mask=real).logits  # (batch, n, vocabulary)

    before, columns = logits(rows), []
    for j in range(rows.shape[1]):
        changed = rows.clone()
        changed[:, j] = (rows[:, j] + 1) % model.config.vocab_size
        columns.append((logits(changed) != before).any(-1))
    return torch.stack(columns, dim=-1) & real.bool()[:, :, None]
    ### END SOLUTION


# %% [markdown]
# The next batch has two rows: the sentence, and the sentence with padding in place of its last tokens.

# %%
rows, real = ids.repeat(2, 1), torch.ones(2, n, dtype=torch.long)
rows[1, n - pads :], real[1, n - pads :] = 0, 0


def batch_verdicts(model):
    """The verdicts on both rows (of the padded one, on its real tokens), and whether padding has any influence."""
    (full, padded), length = influence_in_batch(model, rows, real), n - pads
    padding = bool(padded[:, length:].any())
    return {"full row": verdict(full), "padded row": verdict(padded[:length, :length]), "padding open": padding}


# %% look="a2_padding"
{"unchanged": batch_verdicts(model), "recipe": batch_verdicts(flagged)}

# %% [markdown]
# Compare the recipe's verdict on the full row with your earlier verdict on the same sentence alone. The sentence and the weights are the same, but with a padded row in the batch the model is causal again (lesson 03, section 3).
#
# ## One open layer
#
# The next recipe was meant for all layers, and converts only the first:

# %%
print(pitfalls.get("first-layer-only").code)
half = pitfalls.get("first-layer-only").apply(copy.deepcopy(model))

# %% look="a2_padding"
batch_verdicts(half)

# %% [markdown]
# The outputs of the model do not show the causal layers, because the states that these layers receive already depend on all tokens. So we measure inside the model.
#
# A block, `model.transformer.h[layer]`, receives the hidden states `(batch, n, width)` as its first argument. Its attention puts the heads **side by side** in a tensor `(batch, n, width)`, and then `attn.c_proj` mixes them. So the input of `c_proj` shows each head separately:


# %%
def head_outputs(model, ids, layer):
    """What `c_proj` of this layer receives, (n, width): the outputs of all heads, side by side."""
    received, projection = [], model.transformer.h[layer].attn.c_proj
    hook = projection.register_forward_pre_hook(lambda module, args: received.append(args[0]))
    try:
        with torch.no_grad():
            model(input_ids=ids)
    finally:  # also after an error
        hook.remove()
    return received[0][0]


print(tuple(head_outputs(model, ids, layer=0).shape), "for", model.config.n_head, "heads")

# %% [markdown] exercise="a2_heads"
# Return the influence **within one layer**, for each head: booleans, `(heads, n, n)`. `True` at `[h, i, j]` means: if the hidden state at `j` changes **at the input of block `layer`**, the output of head `h` at `i` changes. Do not change the layers below.
#
# `head_outputs` returns what you must compare. Head 0 has the first `width / heads` columns, head 1 the next ones, and so on. Remove every hook that you register. Change a state by a **random** vector: the LayerNorm of the block removes a number that is added to all components.

# %% [markdown] hint="a2_heads"
# A forward **pre**-hook on the block can return other arguments: `return (hidden, *args[1:])`. Register one for each `j`, call `head_outputs`, and remove it.


# %% answer="a2_heads"
def head_influence(model, ids, layer):
    """ids (1, n), a layer's number -> bool (heads, n, n): in this layer, does head h at i depend on the state at j?"""
    ### BEGIN SOLUTION
    n, heads = ids.shape[1], model.config.n_head
    push = torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(0))

    def outputs_after_change(j):
        def change(block, args):
            hidden = args[0].clone()
            hidden[:, j] += push
            return (hidden, *args[1:])

        hook = model.transformer.h[layer].register_forward_pre_hook(change)
        try:
            return head_outputs(model, ids, layer)
        finally:
            hook.remove()

    before = head_outputs(model, ids, layer)
    columns = [(outputs_after_change(j) != before).view(n, heads, -1).any(-1) for j in range(n)]  # n times (n, heads)
    return torch.stack(columns, dim=-1).transpose(0, 1)  # (n, heads, n) -> (heads, n, n)
    ### END SOLUTION


# %%
def by_layer(model):
    """One line for each layer: the verdicts on its heads."""
    lines = []
    for layer in range(model.config.n_layer):
        verdicts = [verdict(head) for head in head_influence(model, ids, layer)]
        lines.append(f"layer {layer}: {', '.join(verdicts)}")
    return "\n".join(lines)


# %% look="a2_heads"
print(by_layer(half))

# %% [markdown]
# ## The mask is right, and the model is broken
#
# Some recipes rewrite the attention. This one forgets to scale the scores:

# %%
print(pitfalls.get("forgets-scaling").code)
broken = pitfalls.get("forgets-scaling").apply(copy.deepcopy(model))

# %% look="a2_padding"
batch_verdicts(broken)

# %% [markdown] exercise="a2_difference"
# Every cell of that mask is right, but the model does not compute what GPT-2 computes. To find such a fault, put **the causal mask** back into `converted`; then its states must equal those of `original`, which is causal. Return **where they first differ**.
#
# With `output_hidden_states=True` a model also returns `hidden_states`: number 0 is the sum of the two embeddings, number `k` is the state after `k` blocks, and the last one has also passed the final LayerNorm. Return the smallest number at which any component differs by more than `1e-4`, or `None` if there is none. (Smaller differences are rounding: the same sum in another order.)
#
# `with labkit.masked(model, masks.causal()):` makes all layers use this mask inside the block.

# %% [markdown] hint="a2_difference"
# Which of the two calls needs the mask? Go through the pairs of states with `enumerate(zip(...))`. `torch.allclose` has an argument `atol`.


# %% answer="a2_difference"
def first_difference(original, converted, ids):
    """Two models, ids (1, n) -> the number of the first hidden state that differs under the causal mask, or None."""
    ### BEGIN SOLUTION
    with torch.no_grad():
        expected = original(input_ids=ids, output_hidden_states=True).hidden_states
        with labkit.masked(converted, masks.causal()):
            states = converted(input_ids=ids, output_hidden_states=True).hidden_states
    for k, (a, b) in enumerate(zip(states, expected, strict=True)):
        if not torch.allclose(a, b, atol=1e-4):
            return k
    return None
    ### END SOLUTION


# %% look="a2_difference"
print("recipe:", first_difference(model, flagged, ids), "| forgets-scaling:", first_difference(model, broken, ids))

# %% [markdown]
# ## Convert it yourself
#
# GPT-2 takes a mask of **four** dimensions and passes it to every layer as it is. With eager attention and with SDPA, a mask of floats is *added* to the scores (lesson 03, section 9).

# %% [markdown] exercise="a2_packed"
# Short documents can share one row. `documents` is `(batch, n)`, for example `[4, 4, 4, 2, 2, 0]`: the number of each token's document, 0 for padding. Return two tensors with which GPT-2 reads each document **in both directions, as if it were alone in its row**:
#
# - the mask, `torch.float32`, `(batch, 1, n, n)`: each token attends to its whole document, and to no other token,
# - the `position_ids`, whole numbers, `(batch, n)`: GPT-2 has learned positions, so each document starts at 0.
#
# Scores can be large: what you add must hide a key whatever its score is. The values for padding can be anything valid (no NaN, no position below 0).

# %% [markdown] hint="a2_packed"
# First make a table of booleans, `(batch, n, n)`: are both tokens in the same document? The mask follows with `masked_fill` and `torch.finfo`. The position of a token is the number of tokens of its document before it, and that is a sum over a part of the same table.


# %% answer="a2_packed"
def packed_inputs(documents):
    """(batch, n), 0 = padding -> a mask to be added to the scores, (batch, 1, n, n), and positions, (batch, n)."""
    ### BEGIN SOLUTION
    same = documents[:, :, None] == documents[:, None, :]  # (batch, n, n); padding attends to padding only
    mask = torch.zeros(same.shape).masked_fill(~same, torch.finfo(torch.float32).min)
    return mask[:, None], same.tril(-1).sum(-1)
    ### END SOLUTION


# %% [markdown]
# The next cell compares the sentence twice in one row, under your mask, with the sentence alone under labkit's conversion:

# %%
theirs = labkit.to_bidirectional(copy.deepcopy(model))


@torch.no_grad()
def distance():
    mask, positions = packed_inputs(torch.tensor([[1] * n + [2] * n]))
    packed = model(input_ids=ids.repeat(1, 2), attention_mask=mask, position_ids=positions).logits[0]  # (2 n, ...)
    alone = theirs(input_ids=ids).logits[0]  # (n, vocabulary)
    return f"largest difference of a logit: {(packed - alone.repeat(2, 1)).abs().max():.1e}"


# %% look="a2_packed"
distance()

# %% [markdown]
# You have converted GPT-2 with two tensors. Now measure labkit's conversion:

# %% look="a2_difference"
print(batch_verdicts(theirs), by_layer(theirs), f"first difference: {first_difference(model, theirs, ids)}", sep="\n")

# %% [markdown]
# ## The audit
#
# An audit must test both modes of a model. This helper runs tests in both, and restores the mode:


# %%
def in_both_modes(model, tests):
    """Do all tests, functions without arguments, return True in evaluation mode and in training mode?"""
    mode = model.training
    try:
        for training in (False, True):
            model.train(training)
            if not all(test() for test in tests):
                return False
        return True
    finally:
        model.train(mode)


test_rows = torch.arange(20, 26).repeat(2, 1)  # ids that every model here has
test_real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])

# %% [markdown] exercise="a2_audit"
# Combine your functions. `audit(converted, original)` returns `True` exactly if three tests succeed in both modes:
#
# - **Mask:** for the first row of `test_rows` alone and for both rows together, each real token depends on all real tokens. It must not depend on padding, not even a little.
# - **Heads:** for the first row alone, every head of every layer depends on all tokens.
# - **Logits:** for the same two inputs, the logits of real tokens are those of `original` (causal) under a full mask, within `1e-4`.
#
# Write each test as a function without arguments, and give all three to `in_both_modes`. Leave both models as you found them.
#
# The models that you get have no dropout. Some conversions are correct, others are faulty. Graders use more kinds of fault than your notebook shows.

# %% [markdown] hint="a2_audit"
# Mask: which matrix do you expect from `influence_in_batch`? `real[:, :, None] & real[:, None, :]` is 1 where both tokens are real. Logits: which `documents` make a full mask of `packed_inputs`? Each test finds faults that the others miss.


# %% answer="a2_audit"
def audit(converted, original):
    """Two models -> True or False: is `converted` a correct bidirectional conversion of `original`?"""
    ### BEGIN SOLUTION
    batches = [(test_rows[:1], test_real[:1]), (test_rows, test_real)]  # a row alone, and beside a padded row

    def mask_is_full():
        for rows, real in batches:
            both_real = (real[:, :, None] & real[:, None, :]).bool()
            if not torch.equal(influence_in_batch(converted, rows, real), both_real):
                return False
        return True

    def heads_are_open():
        layers = [head_influence(converted, test_rows[:1], layer) for layer in range(converted.config.n_layer)]
        return all(verdict(head) == "bidirectional" for layer in layers for head in layer)

    @torch.no_grad()
    def logits_are_right():
        for rows, real in batches:
            mask, _ = packed_inputs(real)  # all real tokens are one document
            expected = original(input_ids=rows, attention_mask=mask).logits[real.bool()]
            logits = converted(input_ids=rows, attention_mask=real).logits[real.bool()]
            if not torch.allclose(logits, expected, atol=1e-4):
                return False
        return True

    return in_both_modes(converted, [mask_is_full, heads_are_open, logits_are_right])
    ### END SOLUTION


# %% [markdown]
# Now run your audit on the museum of false conversions (lesson 03): all its recipes for GPT-2, applied to a tiny GPT-2 with random weights, and labkit's conversion.

# %%
exhibits = [pitfall for pitfall in pitfalls.ALL if "gpt2" in pitfall.families]
tiny = labkit.load("tiny-gpt2", device="cpu").model


def opinion(converted):
    try:
        return "accepted" if audit(converted, tiny) else "rejected"
    except labkit.LabkitError as error:  # from `first_difference`, if your audit uses it
        return f"rejected ({type(error).__name__})"


def museum():
    for pitfall in exhibits:
        print(f"{pitfall.name:32}", opinion(pitfall.apply(copy.deepcopy(tiny))))
    print(f"{'labkit.to_bidirectional':32}", opinion(labkit.to_bidirectional(copy.deepcopy(tiny))))


# %% look="a2_audit"
museum()

# %% [markdown]
# Your audit should accept labkit's conversion and five recipes. Two of them, `bool-mask-under-eager` and `query-rows-masked`, are correct with SDPA, the backend used here. If your audit calls `first_difference`, it rejects these two with a `ConversionError`, because they pass their own mask in every call.
#
# **What you have now.** Your audit measures the mask of a model alone and in a batch, from its outputs and head by head, and compares its logits with the original.
#
# A recipe that it accepts is right *under the conditions that you tested*. `labkit.audit` tests more conditions. Here is its report on the five recipes:

# %%
accepted = "bool-mask-under-eager query-rows-masked left-padding-without-positions config-flag-alone top-forward-only"
for name in accepted.split():
    report = labkit.audit(pitfalls.get(name).apply(copy.deepcopy(tiny)), reference=tiny)
    print(f"{name:32}", report.verdict, sorted(report.problem_kinds()))

# %% [markdown]
# If you use another attention backend, pack documents, pad on the left, or call `model.transformer`, test that, too. `labkit.audit` does.
