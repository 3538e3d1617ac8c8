# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A1 · Masks and attention by hand
#
# **Seven functions, and you have attention.** You write the table that says who may attend to whom, then the scores, the weights and the heads that obey it, and at the end you find out who hears of whom when layers are stacked: that is where masks that look harmless leak.
#
# Each exercise has a check. It calls your function and says what was expected, what came, and what the likely cause is. Nothing stops you: skip an exercise and come back.

# %%
import torch

from labkit.viz import mask_figure

# %% [markdown]
# One sentence accompanies us. A mask is a table over it: row = the token that looks (the **query**), column = the token that is looked at (the **key**), `True` = may look.

# %%
sentence = "the old seal swam to the rock"  # drawn: sentence
tokens = sentence.split()
n = len(tokens)
n

# %% [markdown] exercise="a1_causal_mask"
# A language model that writes may attend to what has been said, itself included, and at nothing that comes later. Return that table for `n` tokens: booleans, shape `(n, n)`, `True` = may look.

# %% [markdown] hint="a1_causal_mask"
# `torch.tril` and `torch.triu` keep one triangle of a matrix. Ask yourself which triangle holds row 3, column 0: the fourth token looking at the first.


# %% answer="a1_causal_mask"
def causal_mask(n):
    """Bool (query, key): may query i look at key j?"""
    ### BEGIN SOLUTION
    return torch.ones(n, n).tril().bool()
    ### END SOLUTION


# %% look="a1_causal_mask"
mask_figure(causal_mask(n), tokens)

# %% [markdown] exercise="a1_window_mask"
# Long texts are dear, so many models let most of their layers look back only a little: the token itself and the `w - 1` tokens before it, `w` in all. Return that table: booleans, shape `(n, n)`.
#
# *Predict first:* with a window of 3 over this sentence ("{{sentence}}"), how many tokens does the last one see? And the first?

# %% [markdown] hint="a1_window_mask"
# With `i` as a column of numbers and `j` as a row of numbers, `i - j` is a table that says how far back each key lies. Which distances are allowed?


# %% answer="a1_window_mask"
def window_mask(n, w):
    """Bool (query, key): may query i look at key j, if it sees itself and the w - 1 tokens before it?"""
    ### BEGIN SOLUTION
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    return (j <= i) & (i - j < w)
    ### END SOLUTION


# %% look="a1_window_mask"
mask_figure(window_mask(n, 3), tokens)

# %% [markdown] exercise="a1_padded_mask"
# Sentences of a batch have different lengths, so the shorter ones are filled up with pads **at the end**. A pad says nothing, so nobody may attend to one. Given the real lengths (a list of whole numbers), return the causal tables of the whole batch: booleans, shape `(batch, n, n)`, with no pad as a key.
#
# Close the pad keys in **every** row, those of the pads (as queries) included; beyond that, leave these rows as the causal table has them. (With pads at the end, the causal table hides them from every real token already. In A2, where models look both ways, it no longer does.)

# %% [markdown] hint="a1_padded_mask"
# A key is real in row `b` of the batch if its position is below `lengths[b]`. That is a table of shape `(batch, n)`: put in a dimension so that it becomes one over keys, for every query.


# %% answer="a1_padded_mask"
def padded_mask(lengths, n):
    """Bool (batch, query, key): causal, and no key at or beyond lengths[b]."""
    ### BEGIN SOLUTION
    real = torch.arange(n)[None, :] < torch.tensor(lengths)[:, None]  # (batch, key)
    return causal_mask(n)[None] & real[:, None, :]
    ### END SOLUTION


# %% look="a1_padded_mask"
padded_mask([3, n], n).int()[0]

# %% [markdown] exercise="a1_scores"
# Now the numbers. Each token has a query vector and a key vector of size `d`; the **score** of a pair is their dot product, divided by the square root of `d`. Return the scores, shape `(..., n, n)`, query by key.
#
# *Why the division?* A dot product of two vectors of `d` random numbers grows like the square root of `d`, and large scores make the softmax pick one token and forget the rest.

# %% [markdown] hint="a1_scores"
# `q @ k.transpose(-2, -1)` has queries as rows. What is `d` when there are more dimensions in front?


# %% answer="a1_scores"
def scores_of(q, k):
    """(..., n, d) and (..., n, d) -> (..., n, n): scaled dot products, query by key."""
    ### BEGIN SOLUTION
    return q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    ### END SOLUTION


# %% [markdown] exercise="a1_weights"
# Weights are what a softmax makes of the scores in each row, **among the keys that may be looked at**: zero for all others, and a sum of one. Where a row may attend to nothing at all, let its weights be zero, and not `nan`. It must hold for scores of any size, also of -10 000.

# %% [markdown] hint="a1_weights"
# A forbidden score must not take part in the softmax: what number, put in its place, becomes exactly zero there? And what does the softmax of a row make of nothing but such numbers? `masked_fill` puts numbers where a table is True.


# %% answer="a1_weights"
def weights_of(scores, mask):
    """(..., n, n) scores and a bool mask that broadcasts to them -> weights of the same shape."""
    ### BEGIN SOLUTION
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights.nan_to_num(0.0)
    ### END SOLUTION


# %% [markdown] exercise="a1_attention"
# All together, with heads. `x` is `(n, width)`; the three matrices are `(width, width)`: queries are `x @ w_q`, keys `x @ w_k`, values `x @ w_v`. Cut queries, keys and values into `heads` of `width // heads` **neighbouring** columns each, attend in each head under the mask, put the heads side by side again. Use your functions.

# %% [markdown] hint="a1_attention"
# `(n, width)` → `(n, heads, d)` is a `view`; the heads must then come to the front, before the scores, and go back behind the tokens at the end. A `view` alone cannot swap two dimensions.


# %% answer="a1_attention"
def attention(x, w_q, w_k, w_v, heads, mask):
    """(n, width) -> (n, width): multi-head attention under a bool mask (n, n), without an output matrix."""
    ### BEGIN SOLUTION
    n, width = x.shape

    def split(y):
        return y.view(n, heads, width // heads).transpose(0, 1)  # (heads, n, d)

    q, k, v = (split(x @ w) for w in (w_q, w_k, w_v))
    mixed = weights_of(scores_of(q, k), mask) @ v  # (heads, n, d)
    return mixed.transpose(0, 1).reshape(n, width)
    ### END SOLUTION


# %% [markdown] exercise="a1_who_hears"
# One layer with a window of 2 sees one token back. But its neighbour has heard of *its* neighbour in the layer before. Return the table of who can be **influenced** by whom after `layers` layers of the same mask, booleans `(n, n)`: row = who hears, column = of whom. Every token keeps what it knows (the residual connection), in each layer.

# %% [markdown] hint="a1_who_hears"
# After two layers, i hears of j if i may attend to some k that has heard of j. Over all k, "and" and then "any" is a product of matrices. Count how often you multiply.


# %% answer="a1_who_hears"
def who_hears(mask, layers):
    """Bool (n, n) -> bool (n, n): after this many layers, can j have influenced i?"""
    ### BEGIN SOLUTION
    step = (mask | torch.eye(len(mask), dtype=torch.bool)).float()
    heard = torch.eye(len(mask))
    for _ in range(layers):
        heard = (step @ heard > 0).float()
    return heard.bool()
    ### END SOLUTION


# %% look="a1_who_hears"
mask_figure(who_hears(window_mask(n, 2), 3), tokens)

# %% [markdown]
# **What you have now.** A model reads what its masks allow *together*: three layers of a window of 2 reach three tokens back, and one layer that looks ahead is enough to spoil a causal model. That is why `labkit.audit` shakes the input of a whole model and looks at what comes out. In A2 you write that audit yourself.
