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
# **Seven functions, and you have attention.** After a warm-up, you write masks that the lessons do not contain, then scores, weights and heads under such masks. At the end you compute how far information travels through a stack of layers with different masks.
#
# | | |
# |---|---|
# | **You need** | lessons 00 and 01; for the heads, lesson 02, section 3 |
# | **Time and points** | about 75 minutes, 23 points |
#
# Each exercise has a check. It calls your function and states what was expected, what your function returned, and the likely cause of a mistake. Cells with `check.look` show what your function returns, once you have written it. You can skip an exercise and come back.

# %%
import torch

from labkit.viz import mask_figure, values_figure

# %% [markdown]
# We use one sentence throughout. In a mask, each row is a **query** (the token that attends), each column is a **key** (the token that it attends to), and `True` means "may attend".

# %%
sentence = "the old seal swam to the rock"  # drawn: sentence
tokens = sentence.split()
n = len(tokens)
n

# %% [markdown] exercise="a1_causal_mask"
# This is the warm-up. A model that generates text uses the causal mask of lesson 01: a token attends to itself and to all tokens before it. Return this mask for `n` tokens: booleans, shape `(n, n)`.

# %% [markdown] hint="a1_causal_mask"
# `torch.tril` and `torch.triu` keep one triangle of a matrix. Which triangle contains row 3, column 0: the fourth token attends to the first?


# %% answer="a1_causal_mask"
def causal_mask(n):
    """Bool (query, key): may query i attend to key j?"""
    ### BEGIN SOLUTION
    return torch.ones(n, n).tril().bool()
    ### END SOLUTION


# %% look="a1_causal_mask"
mask_figure(causal_mask(n), tokens)

# %% [markdown] exercise="a1_window_mask"
# In a sliding window of `w`, a token attends to itself and to the `w - 1` tokens before it. Trained heads often put much of their weight on the first tokens of a text, called *sinks*. In a long text these leave the window, and the model gets worse. So we keep them (Xiao et al. 2024): each token attends to its window **and** to the first `sinks` tokens, but never to a later token.
#
# Return this mask: booleans, shape `(n, n)`. With `n = 6`, `w = 2` and `sinks = 1`, the last row allows tokens 0, 4 and 5.

# %% [markdown] hint="a1_window_mask"
# With `i` as a column of numbers and `j` as a row of numbers, `i - j` is a table of distances. Write the three conditions as tables: not later, inside the window, a sink. Combine them with `&` and `|`.


# %% answer="a1_window_mask"
def window_mask(n, w, sinks):
    """Bool (query, key): itself, the w - 1 tokens before it, and the first `sinks` tokens, none of them later."""
    ### BEGIN SOLUTION
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    return (j <= i) & ((i - j < w) | (j < sinks))
    ### END SOLUTION


# %% look="a1_window_mask"
mask_figure(window_mask(n, 2, 1), tokens)

# %% [markdown] exercise="a1_prefix_mask"
# A prefix language model reads the question in both directions and generates the answer causally. Batches are padded **on the left**, because each answer grows on the right. A causal mask does not hide this padding.
#
# Row `b` has `lengths[b]` real tokens, and the first `prefixes[b]` of them are the question. Return the masks: booleans, `(batch, n, n)`. A query may attend to a key if
#
# - the key is a real token, **and**
# - the key is not later than the query, **or** it belongs to the question.
#
# The same rule holds for queries that are padding. With `n = 5`, `lengths = [3]` and `prefixes = [2]`, the question is at 2 and 3, and query 2 may attend to both.

# %% [markdown] hint="a1_prefix_mask"
# The first real token of row `b` is at `n - lengths[b]`. Make two tables of shape `(batch, n)`: is this key real, and does it belong to the question? Insert an axis for the queries before you combine them with the causal mask.


# %% answer="a1_prefix_mask"
def prefix_mask(lengths, prefixes, n):
    """Two lists of whole numbers, one for each row -> bool (batch, query, key); padding is on the left."""
    ### BEGIN SOLUTION
    start = n - torch.tensor(lengths)[:, None]  # (batch, 1), the first real token
    real = torch.arange(n) >= start  # (batch, key)
    question = torch.arange(n) < start + torch.tensor(prefixes)[:, None]  # (batch, key)
    return real[:, None, :] & (causal_mask(n) | question[:, None, :])
    ### END SOLUTION


# %% look="a1_prefix_mask"
mask_figure(dict(zip(["2 pads, question of 3", "question of 2"], prefix_mask([n - 2, n], [3, 2], n), strict=True)))

# %% [markdown] exercise="a1_scores"
# Each token has a query vector and a key vector of size `d`. The score of a pair is their dot product, divided by the square root of `d`. ALiBi (Press et al. 2022) uses no position table. It subtracts a penalty from each score, `slope` times the distance, so a head prefers near tokens. Each head has its own slope. (ALiBi is causal; with `|i - j|` the penalty also works without a causal mask.)
#
# `q` and `k` have the shape `(heads, n, d)`, `slopes` has the shape `(heads,)`. Return the scores, `(heads, n, n)`, query by key.
#
# Example: with a dot product of 6, `d = 4`, slope 0.5 and distance 2, the score is 6 / 2 - 0.5 * 2 = 2. A mask is the extreme case: an infinite penalty.

# %% [markdown] hint="a1_scores"
# `q @ k.transpose(-2, -1)` has queries as rows. Make the table of distances, `(n, n)`. To multiply it by one slope for each head, give `slopes` two more axes.


# %% answer="a1_scores"
def biased_scores(q, k, slopes):
    """(heads, n, d), (heads, n, d), (heads,) -> (heads, n, n): scaled dot products minus slope times distance."""
    ### BEGIN SOLUTION
    position = torch.arange(q.shape[-2])
    distance = (position[:, None] - position).abs()  # (n, n)
    return q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    ### END SOLUTION


# %% [markdown] exercise="a1_weights"
# Turn scores into weights: in each row a softmax over the keys that the mask allows, and exactly 0 for the others. It must hold for scores of any size, also around -10,000.
#
# Some queries may attend to nothing, such as a padding token in exercise 3 if the question is empty. Apply the rule of lesson 01, section 11: **a query that may attend to nothing attends to itself alone.** Without this rule the row becomes NaN, zeros or equal weights, depending on the backend and on the number that closes a key. With it, the result is never NaN and is the same on every backend.

# %% [markdown] hint="a1_weights"
# Change the mask first: `any` finds the rows without a key, and `torch.eye` has each query's own cell. Then `masked_fill` replaces the forbidden scores. Which number becomes exactly 0 in a softmax?


# %% answer="a1_weights"
def masked_weights(scores, mask):
    """(..., n, n) scores and a bool mask that broadcasts to them -> weights of the same shape; each row sums to 1."""
    ### BEGIN SOLUTION
    itself = torch.eye(scores.shape[-1], dtype=torch.bool)
    mask = mask | (itself & ~mask.any(-1, keepdim=True))
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    ### END SOLUTION


# %% [markdown] exercise="a1_attention"
# In lesson 02 all heads share one mask. Here **each head has its own**: some heads can be local and others global, in the same layer.
#
# `x` is `(n, width)`. The three matrices are `(width, width)`: queries are `x @ w_q`, keys `x @ w_k`, values `x @ w_v`. Cut each into heads of `width // heads` **neighbouring** columns; `slopes` is `(heads,)` and `masks` is `(heads, n, n)`. Each head computes its scores, its weights and its weighted sums of the values. Put the results side by side again, `(n, width)`. Use your functions.

# %% [markdown] hint="a1_attention"
# `(n, width)` → `(n, heads, d)` is a `view`. Then the axis of the heads must come to the front, before the scores, and go back behind the tokens at the end. A `view` alone cannot swap two axes.


# %% answer="a1_attention"
def multi_head(x, w_q, w_k, w_v, slopes, masks):
    """(n, width) -> (n, width): attention with a slope and a bool mask for each head, without an output matrix."""
    ### BEGIN SOLUTION
    (n, width), heads = x.shape, len(slopes)

    def split(y):
        return y.view(n, heads, width // heads).transpose(0, 1)  # (heads, n, d)

    q, k, v = (split(x @ w) for w in (w_q, w_k, w_v))
    mixed = masked_weights(biased_scores(q, k, slopes), masks) @ v  # (heads, n, d)
    return mixed.transpose(0, 1).reshape(n, width)
    ### END SOLUTION


# %% [markdown] exercise="a1_stack"
# Five of six layers of Gemma 3 are local. How does the last token still get information from the first?
#
# In a layer, token `j` influences `i` if `i` attends to `j`, or to a token that `j` has influenced in an **earlier** layer. A token also keeps what it has (the residual connection). `masks` is `(layers, n, n)`, booleans, and its first mask is that of the first layer. Return after how many layers `j` influences `i` for the first time: whole numbers, `(n, n)`, 0 on the diagonal, -1 for never.
#
# Example: for two layers with a window of 2 and `n = 4`, the last row is `[-1, 2, 1, 0]`.

# %% [markdown] hint="a1_stack"
# Keep a table of which tokens have influenced which so far; at first it is the diagonal. In each layer, a product of two matrices finds all paths through one more token. Which of the two is the mask of the layer, and in which order do you multiply?


# %% answer="a1_stack"
def layers_needed(masks):
    """Bool (layers, n, n) -> whole numbers (n, n): after how many layers does token j first influence token i?"""
    ### BEGIN SOLUTION
    reached = torch.eye(masks.shape[-1], dtype=torch.bool)
    needed = reached.long() - 1  # 0 on the diagonal, -1 elsewhere
    for layer, mask in enumerate(masks, start=1):
        reached = reached | (mask.float() @ reached.float() > 0)
        needed[reached & (needed < 0)] = layer
    return needed
    ### END SOLUTION


# %% [markdown]
# The next cell compares three stacks of four layers. *Local* is a window of 2, *global* is the causal mask. It shows after how many layers each token influences the last one.

# %% look="a1_stack"
values_figure(
    [
        layers_needed(torch.stack(stack))[-1]
        for local, whole in [(window_mask(n, 2, 0), causal_mask(n))]
        for stack in ([local] * 4, [local] * 3 + [whole], [whole] + [local] * 3)
    ],
    [f"{token} {i}" for i, token in enumerate(tokens)],
    "Layers until a token influences the last one (-1 is never)",
    "number of layers",
    ["4 local", "3 local, 1 global", "1 global, 3 local"],
)

# %% [markdown]
# **What you have now.** Four local layers with a window of 2 reach four tokens back. One global layer gives the last token the whole text, and its place in the stack decides how many later layers can use it. In the same way, one cell open to the future in one layer is enough to make a model non-causal. So `labkit.audit` also changes the input of the whole model and compares its outputs. In A2 you write such an audit.
