# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A5 · Fusion or future attention
#
# **Two methods change which keys a query attends to, and both compute one softmax over two kinds of keys.** *Fusion* reads one question in several wordings and answers once. *Future attention* gives each position learned columns in place of later tokens.
#
# Do exercises 1 and 2, then **choose a track**: *fusion* (3 to 7) or *future* (8 to 12). If you do both, the better one counts. You build a mask, use an identity of softmax, write the parts of one method, and a test for it that we attack with faulty implementations.
#
# | | |
# |---|---|
# | **You need** | lesson `15_paraphrase_fusion` (fusion) or `16_future_attention` (future) |
# | **Time and points** | 90 minutes, 30 points, seven exercises on each track |
#
# After each exercise, a check states the probable cause of a mistake. Cells with `check.look` show what your function returns, once you have written it.

# %%
import math

import torch

from labkit.course.a5 import engine, model
from labkit.viz import mask_figure

# %% [markdown]
# One instruction, two wordings of one question, and a beginning of an answer after each wording. These are the five **segments** of a tree:

# %%
wordings = ["Spain's capital is ?", "From which city is Spain governed ?"]  # drawn: wordings
seed = 3  # drawn: seed

segments = ["In brief :", wordings[0], wordings[1], "Answer :", "Answer :"]
parents = [-1, 0, 0, 1, 2]  # the segment that each segment continues; -1: none
lengths = [len(segment.split()) for segment in segments]
tokens = " ".join(segments).split()
list(zip(segments, parents, lengths, strict=True))

# %% [markdown] exercise="a5_tree_mask"
# Prompts often share their beginning: one text, several questions about it, several answers to each question. In a **tree** of segments, a shared beginning is computed only once (Miao et al. 2024, SpecInfer).
#
# All segments are in one row, in the order of their numbers. Segment `s` has `lengths[s]` tokens and continues its parent, the segment `parents[s]`, which has a smaller number; -1 means that it continues none. A token attends to
#
# - its own segment, up to itself,
# - all tokens of the parent of its segment, of the parent's parent, and so on,
# - nothing else.
#
# Return booleans `(n, n)` with `n = sum(lengths)`; row = query, True = may attend. Example: with `parents = [-1, 0, 0, 1]` and `lengths = [2, 1, 1, 1]`, the last token attends to tokens 0, 1, 2 and 4.

# %% [markdown] hint="a5_tree_mask"
# First make a table of segments: which segments does segment `s` attend to? Those of its parent, and itself. Because parents come first, one loop is enough. Then index the table with the segment of each token, and keep the causal triangle.


# %% answer="a5_tree_mask"
def tree_mask(parents, lengths):
    """Two lists of whole numbers, one for each segment -> bool (n, n): may query i attend to key j?"""
    ### BEGIN SOLUTION
    reach = torch.eye(len(parents)).bool()  # (segments, segments)
    for segment, parent in enumerate(parents):
        if parent >= 0:
            reach[segment] |= reach[parent]
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))  # (n,)
    return reach[owner][:, owner].tril()
    ### END SOLUTION


# %% look="a5_tree_mask"
mask_figure(tree_mask(parents, lengths), tokens)

# %% [markdown]
# Now let one query attend to several groups of keys, each group **by itself**. `attend` returns the output and the logarithm of the sum in the denominator of the softmax, the **log-sum-exp** (`lse`). (In `attend` and in the fusion track, queries are already divided by $\sqrt d$.)


# %%
def attend(query, key, value, bias=0.0):
    """(..., n, d), (..., m, d), (..., m, e) -> output (..., n, e) and lse (..., n)"""
    scores = query @ key.transpose(-2, -1) + bias  # (..., n, m)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


# %% [markdown] exercise="a5_merge"
# You get `(output, lse)` of one group of keys and `(output, lse)` of another. Return the `(output, lse)` of **one softmax over both groups together**, without the keys. Outputs are `(..., n, e)`, each `lse` is `(..., n)`.
#
# - Scores may be large: an `lse` can be 1000, and $e^{1000}$ overflows.
# - A group can be **without keys** for a query: then its `lse` is minus infinity and its output 0. If both groups are without keys, so is the result.
#
# *Predict first:* one group has one key with a score of 2, the other has five keys with a score of 0. Which group gets more weight?
#
# *Why it matters:* FlashAttention computes attention in this way, block by block (Dao et al. 2022).

# %% [markdown] hint="a5_merge"
# An `lse` is the score of a group as a whole. What turns two scores into two shares that sum to one? (`torch.stack` makes one tensor of two, `torch.logaddexp` adds two numbers that are given as logarithms, `nan_to_num` replaces nan.)


# %% answer="a5_merge"
def merged(first, second):
    """((..., n, e), (..., n)) twice -> (output (..., n, e), lse (..., n)) of one softmax over both groups"""
    ### BEGIN SOLUTION
    (one, a), (two, b) = first, second
    shares = torch.stack([a, b]).softmax(0).nan_to_num(0.0)  # (2, ..., n)
    output = shares[0, ..., None] * one + shares[1, ..., None] * two
    return output, torch.logaddexp(a, b)
    ### END SOLUTION


# %%
def share_of_first(scores=((2.0,), (0.0,) * 5)):
    """All values of the first group are 1, those of the second 0, so the output is the share of the first."""
    keys = [torch.tensor(group)[:, None] for group in scores]
    one, two = (attend(torch.ones(1, 1), key, torch.full_like(key, 1.0 - i)) for i, key in enumerate(keys))
    return round(merged(one, two)[0].item(), 2)


# %% look="a5_merge"
share_of_first()

# %% [markdown]
# In the fusion track, the groups are segments. In the future track, they are the past and the future.
#
# # Track: fusion
#
# The fused prompt of lesson 15 is a prefix, N segments (the wordings) and a cue. A segment attends to the prefix and to itself, and begins at the position where the prefix ends. The cue attends to everything before it, and begins after the longest segment. For the cue, log(1/N) is added to the scores of the segments' keys.

# %% [markdown] exercise="a5_tree_positions"
# In a tree, a segment should have the positions that it would have in a prompt of its own, with nothing but the segments that it continues. So **each segment begins at the position after the end of its parent**; a segment with the parent -1 begins at 0. Return the positions of all tokens of the row of exercise 1, `(n,)`, whole numbers.
#
# Example: with `parents = [-1, 0, 0, 1]` and `lengths = [2, 3, 1, 1]`, the positions are 0 1, 2 3 4, 2, 5.

# %% [markdown] hint="a5_tree_positions"
# Keep a list with the end of each segment: where it begins, plus its length. The parent's end is already in it.


# %% answer="a5_tree_positions"
def tree_positions(parents, lengths):
    """Two lists of whole numbers, one for each segment -> long (n,)"""
    ### BEGIN SOLUTION
    ends, positions = [], []
    for parent, length in zip(parents, lengths, strict=True):
        start = ends[parent] if parent >= 0 else 0
        ends.append(start + length)
        positions.append(torch.arange(start, start + length))
    return torch.cat(positions)
    ### END SOLUTION


# %% look="a5_tree_positions"
list(zip(tokens, tree_positions(parents, lengths).tolist(), strict=True))

# %% [markdown] exercise="a5_tree_bias"
# After the tree comes a cue that attends to **all** of its segments. In lesson 15, the bias log(1/N) makes N copies of a segment weigh as much as one. Do the same for a tree:
#
# - Segment 0 is the only one with the parent -1. Its keys have the weight 1.
# - The segments that continue the same segment share **its** weight equally.
#
# Return the logarithm of the weight of each key, `(n,)` in `float64`: the number that is added to its score. Example: with `parents = [-1, 0, 0, 1, 1]`, the weights of the segments are 1, 1/2, 1/2, 1/4, 1/4.
#
# *Why it matters:* if all branches are copies, the cue must compute exactly what it computes after one branch.

# %% [markdown] hint="a5_tree_bias"
# `parents.count(parents[s])` is the number of segments that share with segment `s`. A loop from the first segment to the last finds each weight from the weight of the parent.


# %% answer="a5_tree_bias"
def tree_bias(parents, lengths):
    """Two lists of whole numbers, one for each segment -> float64 (n,), to be added to the scores of the keys"""
    ### BEGIN SOLUTION
    weights = []
    for parent in parents:
        weights.append(weights[parent] / parents.count(parent) if parent >= 0 else 1.0)
    return torch.tensor(weights, dtype=torch.float64).log().repeat_interleave(torch.tensor(lengths))
    ### END SOLUTION


# %% [markdown]
# A random query attends to a tree: segment 0 with 2 keys, `N` copies of a segment of 3 keys, and `M` copies of a segment of 2 keys after each of them. How far is the output from that of one branch, without a bias and with yours?


# %%
def gap(N, M, with_bias):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (1, 7, 7))
    parents, lengths = [-1] + [0] * N + [1 + i // M for i in range(N * M)], [2] + [3] * N + [2] * N * M
    bias = tree_bias(parents, lengths) if with_bias else 0.0
    tree = [torch.cat([x[:2], x[2:5].repeat(N, 1), x[5:].repeat(N * M, 1)]) for x in (key, value)]
    return (attend(query, *tree, bias)[0] - attend(query, key, value)[0]).abs().max().item()


# %% look="a5_tree_bias"
{(N, M): [f"{gap(N, M, with_bias):.0e}" for with_bias in (False, True)] for N, M in [(1, 1), (3, 1), (3, 2)]}

# %% [markdown] exercise="a5_two_ways"
# The alternative to fusion reads each wording in a prompt of its own and **averages the logits**. Compare the two in the smallest case: one query, and one layer of attention whose output is multiplied by a matrix.
#
# - `query` is `(d,)`; `prefix` is a pair of keys `(p, d)` and values `(p, d)`; `segments` is a list of such pairs, of different lengths; `readout` is `(d, vocab)`; all in `float64`.
# - **averaged**: for each segment, attend to the prefix and to this segment only, and compute the logits `(vocab,)`. Return their mean.
# - **fused**: one softmax over the prefix and all segments, with the bias log(1/N) for the keys of the segments; then the logits.
#
# Return `(averaged, fused)`, each `(vocab,)`.

# %% [markdown] hint="a5_two_ways"
# `attend(query[None], keys, values)` needs and returns one more dimension in front. For the fused answer, concatenate the keys of all groups. You have written a function for the bias: the prefix is segment 0, and all others continue it.


# %% answer="a5_two_ways"
def two_ways(query, prefix, segments, readout):
    """-> (averaged logits (vocab,), fused logits (vocab,))"""

    ### BEGIN SOLUTION
    def logits(groups, bias=0.0):
        keys, values = (torch.cat(parts) for parts in zip(*groups, strict=True))
        return (attend(query[None], keys, values, bias)[0] @ readout)[0]

    averaged = torch.stack([logits([prefix, segment]) for segment in segments]).mean(0)
    bias = tree_bias([-1] + [0] * len(segments), [len(prefix[0]), *(len(keys) for keys, _ in segments)])
    return averaged, logits([prefix, *segments], bias)
    ### END SOLUTION


# %% [markdown]
# A case that you can check by hand: each group has one key, and its value is a unit vector, so an output shows the weights of the groups. The prefix has a score of 1, the three wordings have 1, 3 and 1. *Predict:* which method gives wording 2 more weight?


# %%
def weights_of_groups(scores=(1.0, 1.0, 3.0, 1.0)):
    eye = torch.eye(4, dtype=torch.float64)
    groups = [(score * eye[[0]], eye[[i]]) for i, score in enumerate(scores)]
    alone = [attend(eye[[0]], *map(torch.cat, zip(groups[0], group, strict=True))) for group in groups[1:]]
    shares = torch.cat([lse for _, lse in alone]).softmax(0)  # of the three prompts
    rows = dict(zip(["averaged", "fused"], two_ways(eye[0], groups[0], groups[1:], eye), strict=True))
    rows |= {"shares": shares, "with these shares": shares @ torch.cat([output for output, _ in alone])}
    for name, row in rows.items():
        print(f"{name:18}", [round(weight, 2) for weight in row.tolist()])


# %% look="a5_two_ways"
weights_of_groups()

# %% [markdown]
# Each row has the weights of the prefix and of wordings 1 to 3; *shares* is the softmax of the `lse` of the three prompts. An average of the separate outputs *with these shares* is equal to *fused*. So fusion in one layer **is** an average, but its shares are not 1/N: each query gives more weight to the wording that fits it better. This does not mean better answers: in lesson 15, fusion and averaged logits do not differ significantly.

# %% [markdown] exercise="a5_joined_cache"
# A fast engine needs no mask between segments. It reads the rows `prefix + segment` as a **batch**, where rows do not attend to each other, with padding at the end. Then it joins their keys and values into one cache, to which the cue attends.
#
# `keys` and `values` are `(N, heads, prefix + longest, d)`. Row `b` has the prefix (the same in each row), then the `lengths[b]` tokens of its segment, then padding. Return `(keys, values)`, each `(1, heads, prefix + sum(lengths), d)`: the prefix **once**, then the segments in order, without padding.

# %% [markdown] hint="a5_joined_cache"
# Cut each row before you join: from where to where are the tokens of its segment? Then use `torch.cat`. Along which dimension?


# %% answer="a5_joined_cache"
def joined(keys, values, prefix, lengths):
    """Two (N, heads, prefix + longest, d) -> two (1, heads, prefix + sum(lengths), d)"""

    ### BEGIN SOLUTION
    def side_by_side(cache):
        parts = [cache[:1, :, :prefix]]
        parts += [cache[[b], :, prefix : prefix + length] for b, length in enumerate(lengths)]
        return torch.cat(parts, dim=2)

    return side_by_side(keys), side_by_side(values)
    ### END SOLUTION


# %% [markdown] exercise="a5_identity"
# Mask, positions, bias and cue can each be wrong without an error. Write the test `is_sound(engine, model)`: it returns True for an engine that computes the fused prompt (see the beginning of this track), and False for one that does not. You get
#
# - `engine(prefix, segments, cue)`: lists of token ids, `segments` a list of lists → the logits of the next token, `(vocab,)`;
# - `model(ids)`: the plain causal model that it uses, whole numbers `(1, n)` → logits `(1, n, vocab)`.
#
# Ids are 0 to 39. Prefix, cue and each segment need at least one token; all together at most 48. In float64, results that differ by less than `1e-9` are equal; a fault changes results by far more. Your test must reject nine faulty engines and accept a sound one.

# %% [markdown] hint="a5_identity"
# What must the result be for one segment? For two or five copies of it? For the same segments in another order? And what must *not* stay the same? Choose segments of different lengths.


# %% answer="a5_identity"
def is_sound(engine, model):
    """Does this engine compute the fused prompt? -> True or False"""
    ### BEGIN SOLUTION
    prefix, cue = [1, 2, 3], [4, 5]
    segments = [[11, 7], [30, 8, 22, 9], [17, 6, 25]]

    def same(one, other):
        return bool((one - other).abs().max() < 1e-9)

    for segment in segments:
        plain = model(torch.tensor([[*prefix, *segment, *cue]]))[0, -1]
        if not all(same(engine(prefix, [segment] * copies, cue), plain) for copies in (1, 2, 5)):
            return False
    together = engine(prefix, segments, cue)
    if not same(engine(prefix, segments[::-1], cue), together) or not same(
        engine(prefix, segments[1:] + segments[:1], cue), together
    ):
        return False
    for i, segment in enumerate(segments):  # the result depends on every segment
        changed = [*segments[:i], [(token + 1) % 40 for token in segment], *segments[i + 1 :]]
        if same(engine(prefix, changed, cue), together):
            return False
    return True
    ### END SOLUTION


# %% [markdown]
# Try your test on a sound engine, on three faulty ones, and on one that does not fuse: it **averages** the logits of separate prompts. *Predict:* does your test reject it?


# %%
def averaging(prefix, segments, cue):
    rows = [torch.tensor([[*prefix, *segment, *cue]]) for segment in segments]
    return torch.stack([model("causal", seed)(row)[0, -1] for row in rows]).mean(0)


engines = {kind: engine(kind, seed) for kind in ("right", "causal", "go on", "no bias")} | {"averaging": averaging}

# %% look="a5_identity"
{kind: is_sound(each, model("causal", seed)) for kind, each in engines.items()}

# %% [markdown]
# <details><summary>Your prediction: does your test reject it?</summary>
#
# Not with the experiments of the hint. Averaging gives the logits of one prompt for one segment and for its copies, does not depend on the order, and depends on every segment. To reject it, test a difference: for two **different** segments, its result is exactly the mean of the two results of `model`, and a fused result is not (exercise 5).
#
# </details>
#
# **What you have now.** A sound engine satisfies these properties, but an engine that satisfies them need not be sound: averaging passes the test of our solution. That is why labkit's own tests also measure the hidden states inside the model.
#
# # Track: future
#
# Lesson 16 gives each position learned keys and values, the *columns*, in place of the next `dim` tokens. One softmax runs over the past and the columns.

# %%
text = wordings[1].split()
n = len(text)
text

# %% [markdown] exercise="a5_block_columns"
# One column represents a **block** of positions, to save parameters: the context (the longest text that the model can read) is cut into blocks of `size` positions, and block `b` begins at `b * size`. `context` is a multiple of `size`.
#
# Position `i` attends to the columns of the next `dim` blocks that **begin after** `i`, as far as the context has them. This must not depend on what comes after `i`.
#
# Return booleans `(n, context // size)` for a text of `n` tokens; row = query, column = block. Example: with `context = 12`, `size = 3`, `dim = 2`, positions 0, 1 and 2 attend to blocks 1 and 2, and position 9 attends to none.

# %% [markdown] hint="a5_block_columns"
# `i // size` is the block of position `i`. How many blocks is block `b` ahead of it, and which differences are meant? The length `n` of the text is needed for one thing only.


# %% answer="a5_block_columns"
def block_columns(n, context, size, dim):
    """-> bool (n, context // size): does query i attend to the column of block b?"""
    ### BEGIN SOLUTION
    ahead = torch.arange(context // size) - torch.arange(n)[:, None] // size
    return (ahead > 0) & (ahead <= dim)
    ### END SOLUTION


# %% look="a5_block_columns"
torch.as_tensor(block_columns(n, 12, 2, 2)).int()

# %% [markdown] exercise="a5_parameters"
# Columns are parameters. In each of the `layers` layers, every block of the context (also block 0, which no position attends to) has a learned key and a learned value of `width` numbers each, all heads together; `dim` is the one of exercise 8. If the model gets better, are the columns the reason, or only the additional parameters? A fair baseline is a plain model of the same size, with wider MLPs. One more hidden unit of an MLP has `width` weights into it, a bias, and `width` weights out of it.
#
# Return a pair of whole numbers: the number of parameters of the columns in all layers, and the number of units by which **each** MLP must be widened so that the plain model has a number of parameters that is as near as possible.

# %% [markdown] hint="a5_parameters"
# Does the number of learned columns depend on `dim`? For the second number, compute what one more unit in every layer costs. The nearest whole number may be above or below the quotient.


# %% answer="a5_parameters"
def column_cost(context, size, width, layers, dim):
    """-> (parameters of all columns, units by which each MLP is wider)"""
    ### BEGIN SOLUTION
    parameters = layers * 2 * (context // size) * width
    return parameters, round(parameters / (layers * (2 * width + 1)))
    ### END SOLUTION


# %% look="a5_parameters"
{size: column_cost(context=1024, size=size, width=256, layers=6, dim=4) for size in (1, 16)}

# %% [markdown] exercise="a5_targets"
# Lesson 16 computes the target of the columns from the attention weights. Fast kernels such as FlashAttention return only `(output, lse)`. That is enough. You get two results for the same queries:
#
# - `past`: causal attention;
# - `both`: one softmax over the past and some positions ahead, which differ from query to query.
#
# Outputs are `(..., n, d)`, each `lse` is `(..., n)`, and an `lse` can be 1000. Return `(joint, difference)`, each `(..., n, d)`:
#
# - **joint**, the target of lesson 16: the part of the output of `both` that comes from the positions ahead, with the weights that they have in that softmax;
# - **difference**, another definition: the output of `both` minus the output of `past`.
#
# The last query has no position ahead and gets 0 for both. *Predict first:* can the two targets have different directions?

# %% [markdown] hint="a5_targets"
# The output of `both` has two parts. The part of the past is the output of `past`, times the share of the past in the softmax of `both`. A share is a quotient of two sums, and you have the logarithms of both sums.


# %% answer="a5_targets"
def targets(both, past):
    """((..., n, d), (..., n)) twice -> (joint (..., n, d), difference (..., n, d))"""
    ### BEGIN SOLUTION
    (output, total), (causal, part) = both, past
    share = (part - total).exp()[..., None]  # of the past
    return output - share * causal, output - causal
    ### END SOLUTION


# %% [markdown]
# Random queries, keys and values for our text, with two positions ahead. For each position but the last: the cosine between the two targets.


# %%
def directions(dim=2):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n, 8, generator=generator) for _ in range(3))
    closed = [torch.zeros(n, n).masked_fill(torch.ones(n, n).triu(1 + ahead) > 0, -math.inf) for ahead in (dim, 0)]
    joint, difference = targets(*(attend(query / 8**0.5, key, value, bias) for bias in closed))
    cosines = torch.cosine_similarity(joint, difference, dim=-1).tolist()
    return {token: round(cosine, 2) for token, cosine in list(zip(text, cosines, strict=True))[:-1]}


# %% look="a5_targets"
directions()

# %% [markdown]
# They differ. If the future has a share $m$ of the weight, the past loses this share: the difference is the joint target minus $m$ times the causal output. So two reports on "the contribution of the future" can mean different things.

# %% [markdown] exercise="a5_control_loss"
# The control of lesson 16 trains columns on the future of **another text**. Here, the texts have different lengths. `guess` (the prediction) and `truth` (the target) are `(batch, n, d)`; `lengths` is a list; padding is at the end. A position has a future if its text has a next token.
#
# Return two losses, tensors of one number: the mean of $(1 - \cos) / 2$ over all positions of the batch that count, each with the same weight.
#
# - **own**: the guess of a text and its own target. A position counts if it has a future.
# - **other**: the guess of text `b` and the target of text `b - 1` (for text 0: of the last text). A position counts if it has a future in **both** texts.
#
# The losses train `guess`: **no gradient** may reach `truth`.

# %% [markdown] hint="a5_control_loss"
# Make a table `(batch, n)` of the positions that have a future. `roll(1, 0)` gives each text the row of the text before it, for the targets and for the table. `torch.cosine_similarity` has a `dim`. `detach()` makes a tensor a constant.


# %% answer="a5_control_loss"
def control_loss(guess, truth, lengths):
    """(batch, n, d) twice, and a list -> (loss with the own future, loss with another text's future)"""
    ### BEGIN SOLUTION
    truth = truth.detach()
    future = torch.arange(guess.shape[1]) < torch.tensor(lengths)[:, None] - 1  # (batch, n)

    def loss(truth, counted):
        near = torch.cosine_similarity(guess, truth, dim=-1)
        return ((1 - near) / 2)[counted].mean()

    return loss(truth, future), loss(truth.roll(1, 0), future & future.roll(1, 0))
    ### END SOLUTION


# %% [markdown] exercise="a5_causality"
# A leaking model has a low loss and generates bad text, so test a model before you train it. Write `is_causal(model)`. It returns True if **nothing** that comes after a position changes the output there, neither the later tokens nor their number; otherwise False. `model(ids)` takes whole numbers `(batch, n)`, from 0 to 39, with `n` from 1 to 48, and gives logits `(batch, n, vocab)`. It has no randomness.
#
# Everything is computed in float64: outputs that differ by less than `1e-9` are equal. Your test must reject six leaking models (some leaks are small, far ahead or rare), and accept two causal ones.

# %% [markdown] hint="a5_causality"
# Change one token: which outputs may change, and which may not? Do it at every position, in texts that are long and varied. And what must the outputs of the first tokens be if you cut off the rest?


# %% answer="a5_causality"
def is_causal(model):
    """Does no output depend on what comes after it? -> True or False"""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(40, (8, 40), generator=generator)
    before = model(ids)
    for place in range(1, 40):
        changed = ids.clone()
        changed[:, place] = (ids[:, place] + torch.randint(1, 40, (8,), generator=generator)) % 40
        for outputs in (model(changed), model(ids[:, :place])):
            if (outputs[:, :place] - before[:, :place]).abs().max() > 1e-9:
                return False
    return True
    ### END SOLUTION


# %% look="a5_causality"
{kind: is_causal(model(kind, seed)) for kind in ("causal", "columns", "next", "length")}

# %% [markdown]
# **What you have now.** In the model `length`, the columns end with the text. No output depends on a later token, but on the number of later tokens, so a test that only replaces tokens accepts it. One of the two experiments of the hint finds all six leaks. Which one, and why?
#
# <details><summary>Answer</summary>Cutting off the rest. It removes the later tokens and changes their number, so both kinds of leak show, if the text contains the tokens that leak.</details>
