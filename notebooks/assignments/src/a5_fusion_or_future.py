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
# **Two ideas bend attention, and both rest on one softmax over two kinds of keys.** *Fusion* reads one question in several wordings, kept apart, and answers once. *Future attention* gives every position learned columns that stand for the words to come, and never lets it see them.
#
# Exercises 1 and 2 are for all. Then **choose a track**: *fusion*, exercises 3 to 7, or *future*, exercises 8 to 12. Both give the same points. Try both if you like: the better one counts. Either ends with a test that you write yourself, and that we then attack.

# %%
import math

import torch

from labkit import masks
from labkit.course.a5 import engine, model
from labkit.viz import mask_figure

# %% [markdown]
# One question in three wordings goes with us, between a shared **prefix** and a **cue**, after which the answer begins. Each wording is a **segment**:

# %%
wordings = ["Spain's capital is ?", "From which city is Spain governed ?"]  # drawn: wordings
seed = 3  # drawn: seed

prefix, cue = ["In", "brief", ":"], ["Answer", ":"]
segments = [wording.split() for wording in wordings]
lengths = [len(segment) for segment in segments]
tokens = [*prefix, *sum(segments, []), *cue]
len(prefix), lengths, len(cue)

# %% [markdown] exercise="a5_segment_mask"
# Lay all tokens in one row: the prefix, then the segments one after the other, then the tail (our cue). Who may attend to whom?
#
# - The **prefix** is plain causal text.
# - A **segment** sees the prefix and itself, causally, and no other segment.
# - The **tail** sees the prefix, all segments, and itself, causally.
#
# Given the number of tokens of each, return the table: booleans, shape `(n, n)` with `n = prefix + sum(lengths) + tail`, row = query, `True` = may look.
#
# *Predict first:* how many keys does the first token of the second segment see?

# %% [markdown] hint="a5_segment_mask"
# Every table here is causal, with holes. Begin with the causal one: which rectangles must be emptied? A segment that begins at `start` and has `length` tokens owns the rows `start : start + length`. Which columns of these rows are other segments?


# %% answer="a5_segment_mask"
def segment_mask(prefix, lengths, tail):
    """Whole numbers, with a list of lengths -> bool (n, n): may query i look at key j?"""
    ### BEGIN SOLUTION
    n, start = prefix + sum(lengths) + tail, prefix
    mask = torch.ones(n, n).tril().bool()
    for length in lengths:
        mask[start : start + length, prefix:start] = False  # the segments before it
        start += length
    return mask
    ### END SOLUTION


# %% look="a5_segment_mask"
mask_figure(segment_mask(len(prefix), lengths, len(cue)), tokens)

# %% [markdown]
# The tail has a mixed crowd of keys before it. Suppose that each group of them has been looked at **by itself**, as if the others were not there. `attend` gives what such a look gives: the output, and with it the logarithm of the sum that the softmax divided by, the **log-sum-exp** (`lse`): how much the group weighed before it was scaled to one. (In `attend` and in the fusion track, queries are divided by $\sqrt d$ already.)


# %%
def attend(query, key, value, bias=0.0):
    """(..., n, d), (..., m, d), (..., m, e) -> output (..., n, e) and lse (..., n)"""
    scores = query @ key.transpose(-2, -1) + bias  # (..., n, m)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


# %% [markdown] exercise="a5_merge"
# From two such results, `(output, lse)` of one group and `(output, lse)` of another, make the `(output, lse)` of **one softmax over both groups together**, without seeing a single key. Outputs have the shape `(..., n, e)`, each `lse` has `(..., n)`.
#
# It must hold for large scores, too: an `lse` may be 1000, and $e^{1000}$ is beyond any number that a computer holds. And a group may be **without keys** for a query: then its `lse` is minus infinity and its output 0. Where both groups are without keys, so is the result: its `lse` is minus infinity, its output 0.
#
# *Predict first:* one group has one key with a score of 2, the other five keys with a score of 0. Which gets more of the weight?

# %% [markdown] hint="a5_merge"
# An `lse` is a score: that of the group as a whole. What turns two scores into two shares that sum to one? (`torch.stack` makes one dimension of two tensors, `torch.logaddexp` adds in the exponent without leaving it, `nan_to_num` replaces what is no number.)


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
def prediction(scores=((2.0,), (0.0,) * 5)):
    """The share of each group: all values of the first are 1, those of the second 0."""
    query = torch.ones(1, 1)
    groups = [
        attend(query, torch.tensor(each)[:, None], torch.full((len(each), 1), 1.0 - i)) for i, each in enumerate(scores)
    ]
    share = merged(*groups)[0].item()
    return f"one key of score 2: {share:.2f}, five of score 0: {1 - share:.2f}"


# %% look="a5_merge"
prediction()

# %% [markdown]
# **Remember this one.** In the fusion track the groups are segments, in the future track they are the past and the columns. (The same identity lets FlashAttention read keys block by block: Dao et al. 2022, arXiv 2205.14135.)
#
# # Track: fusion
#
# The mask keeps the wordings apart. Two more things are needed before several wordings make one answer: where they **stand**, and what they **weigh**.

# %% [markdown] exercise="a5_positions"
# A key carries its position with it, so nothing forbids that several tokens stand at the same one. No wording shall be nearer to the prefix than another for no reason but its place in our list: **every segment begins where the prefix ends**. The tail begins after the end of the **longest** segment, and goes on from there. Return the positions of the row of exercise 1: a tensor of `n` whole numbers, from 0.

# %% [markdown] hint="a5_positions"
# `torch.arange(a, b)` counts from `a` to `b - 1`, `torch.cat` puts rows of numbers one after the other. How many blocks are there, and which number does each begin with?


# %% answer="a5_positions"
def positions(prefix, lengths, tail):
    """Whole numbers, with a list of lengths -> long (n,)"""
    ### BEGIN SOLUTION
    end = prefix + max(lengths)
    inside = [torch.arange(prefix, prefix + length) for length in lengths]
    return torch.cat([torch.arange(prefix), *inside, torch.arange(end, end + tail)])
    ### END SOLUTION


# %% look="a5_positions"
list(zip(tokens, positions(len(prefix), lengths, len(cue)).tolist(), strict=True))

# %% [markdown] exercise="a5_key_bias"
# If all `N` segments are copies of one text, they say no more than one. Yet each of their keys is there `N` times, so the prefix loses by it. Return what must be **added to the scores of each key when the tail looks at it**, `(n,)` in `float64` and in the order of exercise 1, so that `N` copies weigh exactly what one weighs: 0 for the keys of prefix and tail, and the same number for the keys of all segments. (Within a segment nothing is added: there it is alone.)
#
# With `weights`, a list of one positive number for each segment, segments shall weigh in that proportion, and all together still what one weighs: with `[2, 1]` and segments A, B it is as if A, A, B had been read, each at a third. The weights need not sum to one.

# %% [markdown] hint="a5_key_bias"
# A key of score $s$ enters the softmax as $e^{s}$. You want $\frac{1}{N} e^{s}$ instead. Which number, added to $s$, does that? And if the share of a segment is not $\frac{1}{N}$, but some other number?


# %% answer="a5_key_bias"
def key_bias(prefix, lengths, tail, weights=None):
    """-> float64 (n,), to be added to the scores of the keys"""
    ### BEGIN SOLUTION
    weights = weights or [1.0] * len(lengths)
    bias = [0.0] * prefix
    for weight, length in zip(weights, lengths, strict=True):
        bias += [math.log(weight / sum(weights))] * length
    return torch.tensor(bias + [0.0] * tail, dtype=torch.float64)
    ### END SOLUTION


# %% [markdown]
# The proof is a number. One query of the tail looks at a prefix of 2 keys and at `N` copies of a segment of 3; the query, keys and values are random. How far is the output from that of one copy, in double precision?


# %%
def gap(copies, bias):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (1, 5, 5))
    one, _ = attend(query, key, value)
    copied = [torch.cat([each[:2], each[2:].repeat(copies, 1)]) for each in (key, value)]
    return (attend(query, *copied, bias)[0] - one).abs().max().item()


print({n: f"{gap(n, 0.0):.0e}" for n in (1, 2, 5)}, "copies, no bias")

# %% look="a5_key_bias"
print({n: f"{gap(n, key_bias(2, [3] * n, 0)):.0e}" for n in (1, 2, 5)}, "copies, your bias")

# %% [markdown] exercise="a5_two_ways"
# There is a simpler rival: ask each wording in a prompt of its own, and **average the logits**. Does fusing give anything else? Look at one query and one layer of attention, whose output is read by a matrix:
#
# - `query` is `(d,)`; `prefix` is a pair of keys `(p, d)` and values `(p, d)`; `segments` is a list of such pairs, of different lengths; `readout` is `(d, vocab)`; all in `float64`.
# - **averaged**: for each segment, attend to the prefix and to that segment alone, and read out the logits `(vocab,)`. Then take the mean over segments.
# - **fused**: one softmax over the prefix and all segments, where N copies would weigh as one; then read out.
#
# Return the pair `(averaged, fused)`, each `(vocab,)`.

# %% [markdown] hint="a5_two_ways"
# `attend(query[None], keys, values)` takes and gives one more dimension in front. The fused answer needs the keys of all in one tensor, and a bias for each of them: you have written that function.


# %% answer="a5_two_ways"
def two_ways(query, prefix, segments, readout):
    """-> (averaged logits (vocab,), fused logits (vocab,))"""

    ### BEGIN SOLUTION
    def logits(groups, bias=0.0):
        keys, values = (torch.cat(each) for each in zip(*groups, strict=True))
        return (attend(query[None], keys, values, bias)[0] @ readout)[0]

    averaged = torch.stack([logits([prefix, segment]) for segment in segments]).mean(0)
    bias = key_bias(len(prefix[0]), [len(keys) for keys, _ in segments], 0)
    return averaged, logits([prefix, *segments], bias)
    ### END SOLUTION


# %% [markdown]
# Now a case that we can follow by hand. Every group has one key, and its value says who it is. The prefix has a score of 1, the three wordings have 1, 3 and 1: the second one fits the query best. **Predict:** which way listens to it more?


# %%
def who_is_heard(scores=(1.0, 1.0, 3.0, 1.0)):
    eye = torch.eye(4, dtype=torch.float64)
    groups = [(score * eye[[0]], eye[[i]]) for i, score in enumerate(scores)]
    averaged, fused = two_ways(eye[0], groups[0], groups[1:], eye)
    alone = [
        attend(eye[[0]], torch.cat([groups[0][0], key]), torch.cat([groups[0][1], value])) for key, value in groups[1:]
    ]
    shares = torch.cat([lse for _, lse in alone]).softmax(0)  # (3 wordings,)
    by_shares = shares @ torch.cat([output for output, _ in alone])
    print(f"{'':21}{'prefix':>8}{'1':>8}{'2':>8}{'3':>8}")
    rows = {
        "averaged": averaged,
        "fused": fused,
        "softmax of the lse": [None, *shares],
        "averaged with these": by_shares,
    }
    for way, heard in rows.items():
        print(f"{way:21}" + "".join(" " * 8 if each is None else f"{float(each):8.2f}" for each in heard))


# %% look="a5_two_ways"
who_is_heard()

# %% [markdown]
# The second row and the last are the same: fusing *is* an average of the separate answers. But the shares are not 1/N. They are the softmax of the prompts' `lse`, so each query listens most to the wording that has most to say to it. (Exercise 2, read backwards.) Whether that makes better answers is another question. On two models and two sets of facts, `fuse` was nowhere told apart from `logit-average` when relations and questions are drawn anew: see the repository's `benchmarks/results/fusion_quality.md`.

# %% [markdown] exercise="a5_joined_cache"
# A fast engine needs no mask between segments. It reads the rows `prefix + segment` as a **batch**, in which no row sees another anyway, padded at the end to the same length. Then it lays their keys and values side by side, once, for the tail to look at.
#
# `keys` and `values` are `(N, heads, prefix + longest, d)`; row `b` holds the prefix (the same in each row), then `lengths[b]` tokens of its segment, then pads. Return `(keys, values)`, each `(1, heads, prefix + sum(lengths), d)`: the prefix **once**, then the segments in order, no pads.

# %% [markdown] hint="a5_joined_cache"
# Cut each row before you put it in: from where to where are its segment's tokens? Then `torch.cat`, along which dimension?


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
# Mask, positions, bias, cue: each can be wrong without any error. So write the test, `is_sound(engine, model)`, a boolean: `True` for an engine that fuses as described above, `False` for one that does not. You get
#
# - `engine(prefix, segments, cue)`: lists of token ids, `segments` a list of lists → the logits of the next token, `(vocab,)`;
# - `model(ids)`: the plain causal model under it, whole numbers `(1, n)` → logits `(1, n, vocab)`.
#
# Ids run from 0 to 39; prefix, segments and cue need a token each at least, and all together at most 48. Everything is computed in float64: what is less than `1e-9` apart is the same, and what a fault changes is far more. Nine faulty engines are waiting for you, and a sound one that must not be accused.

# %% [markdown] hint="a5_identity"
# What do you know of a right answer without computing it? What must come out for one segment? For copies, two or five? For the same segments in another order? And what must *not* stay the same? Choose segments of different lengths.


# %% answer="a5_identity"
def is_sound(engine, model):
    """Does this engine fuse? -> True or False"""
    ### BEGIN SOLUTION
    prefix, cue = [1, 2, 3], [4, 5]
    segments = [[11, 7], [30, 8, 22, 9], [17, 6, 25]]

    def same(one, other):
        return bool((one - other).abs().max() < 1e-9)

    for each in segments:
        plain = model(torch.tensor([[*prefix, *each, *cue]]))[0, -1]
        if not all(same(engine(prefix, [each] * copies, cue), plain) for copies in (1, 2, 5)):
            return False
    together = engine(prefix, segments, cue)
    if not same(engine(prefix, segments[::-1], cue), together) or not same(
        engine(prefix, segments[1:] + segments[:1], cue), together
    ):
        return False
    for i, each in enumerate(segments):  # every one of them matters
        changed = [*segments[:i], [(token + 1) % 40 for token in each], *segments[i + 1 :]]
        if same(engine(prefix, changed, cue), together):
            return False
    return True
    ### END SOLUTION


# %% [markdown]
# Try it on some engines, and on one that is no fusion at all: it **averages** the logits of separate prompts. **Predict:** does your test notice?


# %%
def averaging(prefix, segments, cue):
    plain = model("causal", seed)
    return torch.stack([plain(torch.tensor([[*prefix, *each, *cue]]))[0, -1] for each in segments]).mean(0)


def verdicts():
    engines = {kind: engine(kind, seed) for kind in ("right", "causal", "go on", "no bias")}
    tried = engines | {"averaging": averaging}
    return {kind: is_sound(each, model("causal", seed)) for kind, each in tried.items()}


# %% look="a5_identity"
verdicts()

# %% [markdown]
# <details><summary>Your prediction: does your test notice?</summary>
#
# Not the experiments of the hint. Averaging gives one prompt's logits for one segment, and the same for its copies; no order changes a mean; and every segment has its part in it. So a test made of these says `True`.
#
# What gives it away is where it differs from fusing (exercise 5): its shares are always 1/N. So for two **different** segments its answer is exactly the mean of what `model` says of each alone; that of a fused answer is not, as there each query listens most to the wording that has most to say to it. One more experiment, then, and this rival is caught. Only this one: whoever takes other shares, but still those of whole prompts, comes through again.
#
# </details>
#
# **What you have now.** Averaging is right about one prompt, about copies and about order, and the test of our solution lets it pass. Does yours? Identities are what a right engine must satisfy, and not what makes it right: no list of them is ever complete. That is why labkit's tests of its engines also measure the hidden states inside the model. Notebook 15 lists the faults of the public experiment behind this idea.
#
# # Track: future
#
# A causal position has few keys at the beginning of a text, and none ahead. Give it learned keys and values that **stand for** the next `dim` positions, the *columns*: one for each absolute position, made of no token. One softmax runs over the past and the columns.

# %%
text = segments[1]  # the second wording goes with us
n = len(text)
text

# %% [markdown] exercise="a5_columns"
# Which columns does a position have? Position `i` has those of the `dim` positions **after** it, `i + 1` to `i + dim`, as far as there are any: the columns end with the **context**, the longest text that the model can read. They do *not* end with the text at hand. A position that could count its columns would know how much text is to come, and that is a look into the future.
#
# Return the table for a text of `n` tokens: booleans, shape `(n, context)`, row = query, column = the position that it stands for.
#
# *Predict first:* the text fills the context. How many columns has its last position?

# %% [markdown] hint="a5_columns"
# `torch.arange(context) - torch.arange(n)[:, None]` says for each square how far ahead it lies. Which distances are meant?


# %% answer="a5_columns"
def columns(n, context, dim):
    """-> bool (n, context): does query i have the column of position j?"""
    ### BEGIN SOLUTION
    ahead = torch.arange(context) - torch.arange(n)[:, None]
    return (ahead > 0) & (ahead <= dim)
    ### END SOLUTION


# %% look="a5_columns"
mask_figure({"the past": masks.causal().dense(n), "columns, dim 2": columns(n, n, 2)}, text)

# %% [markdown] exercise="a5_parameters"
# Columns are parameters. In each of the `layers` layers, every position of the context has a free key and a free value, of `width` numbers each (all heads together). If the model gets better, was it the columns, or would any parameters have done? A fair baseline is a plain model of the same size: widen the hidden layer of each of its MLPs. One more unit there has `width` weights in, a bias, and `width` weights out.
#
# Return a pair of whole numbers: how many parameters the columns have, in all layers; and by how many units **each** MLP must be widened so that the plain model comes as near as it can to the same number.

# %% [markdown] hint="a5_parameters"
# Does the number of free columns depend on `dim`? The position 7 has one column: who looks at it? For the second number, compute what one more unit in every layer costs. Nearest may be above or below.


# %% answer="a5_parameters"
def column_cost(context, width, layers, dim):
    """-> (parameters of all columns, units by which each MLP is wider)"""
    ### BEGIN SOLUTION
    parameters = layers * 2 * context * width
    return parameters, round(parameters / (layers * (2 * width + 1)))
    ### END SOLUTION


# %% look="a5_parameters"
column_cost(context=1024, width=256, layers=6, dim=50)

# %% [markdown] exercise="a5_targets"
# What should the columns contribute? What the future itself would have contributed, had it been seen: at training time we have the text, and can compute it with the mask opened for `dim` positions ahead. Two definitions are in use:
#
# - **joint**: one softmax over the past (the position itself included) and the `dim` positions ahead. The target is the future's **part** of its output: the sum over the positions ahead alone, with the weights that they have in that softmax.
# - **difference**: the whole output of that same softmax, less the output of plain causal attention.
#
# `scores` is `(..., n, n)`, query by key, before any mask; `value` is `(..., n, d)`. Return `(joint, difference)`, each `(..., n, d)`. The last position has no future: both are 0 there.
#
# *Predict first:* can the two point in different directions?

# %% [markdown] hint="a5_targets"
# Two softmaxes are enough, with minus infinity wherever a query may not look. For one of the targets, set some weights to 0 **after** the softmax, and do not scale the rest. `triu` and `tril` take a second number: the diagonal to begin at.


# %% answer="a5_targets"
def targets(scores, value, dim):
    """(..., n, n), (..., n, d) -> (joint (..., n, d), difference (..., n, d))"""
    ### BEGIN SOLUTION
    past = torch.ones(scores.shape[-2:]).tril().bool()
    open_cells = torch.ones(scores.shape[-2:]).tril(dim).bool()
    both = scores.masked_fill(~open_cells, -torch.inf).softmax(-1)
    causal = scores.masked_fill(~past, -torch.inf).softmax(-1)
    return both.masked_fill(past, 0.0) @ value, (both - causal) @ value
    ### END SOLUTION


# %% [markdown]
# Random queries, keys and values for our text. For each position: the cosine between the two targets (1: the same direction, -1: opposite).


# %%
def directions(dim=2):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n, 8, generator=generator) for _ in range(3))
    scores = query @ key.T / 8**0.5
    joint, difference = targets(scores, value, dim)
    cosines = torch.cosine_similarity(joint, difference, dim=-1)
    print({token: round(cosine, 2) for token, cosine in list(zip(text, cosines.tolist(), strict=True))[:-1]})
    past = torch.ones(n, n).tril()
    both = scores.exp() * torch.ones(n, n).tril(dim)
    share = 1 - (both * past).sum(1, keepdim=True) / both.sum(1, keepdim=True)  # m, of the future
    causal = (both * past) @ value / (both * past).sum(1, keepdim=True)
    print(f"difference against joint - m * causal: {(difference - (joint - share * causal)).abs().max():.0e} apart")


# %% look="a5_targets"
directions()

# %% [markdown]
# They are not the same. Where the future takes a share $m$ of the weight, the past loses it: as the last line says, the difference is the joint part **less** $m$ times the causal output. Two reports that say "the contribution of the future" may mean different things, so ask which.

# %% [markdown] exercise="a5_losses"
# How far is a prediction from its target? Return two losses, tensors of one number each, of `guess` and `truth`, both `(batch, heads, n, d)`:
#
# - **MSE**: the mean of the squared differences, over all numbers;
# - **cosine**: $(1 - \cos) / 2$ of each vector of size `d`, from 0 (the same direction) to 1 (opposite), and the mean over all of them.
#
# The last position has no future, so it is left out of both. And a target is what one aims at: the losses shall teach `guess`, and **no gradient** may flow into `truth`, although it comes out of the same model and may require one.

# %% [markdown] hint="a5_losses"
# `torch.nn.functional` has `mse_loss` and `cosine_similarity` (mind its `dim`). A tensor has a method that gives the same numbers without their history.


# %% answer="a5_losses"
def future_losses(guess, truth):
    """(batch, heads, n, d) twice -> (MSE, cosine loss), without the last position, with no gradient into truth"""
    ### BEGIN SOLUTION
    guess, truth = guess[:, :, :-1], truth[:, :, :-1].detach()
    near = torch.nn.functional.cosine_similarity(guess, truth, dim=-1)
    return torch.nn.functional.mse_loss(guess, truth), ((1 - near) / 2).mean()
    ### END SOLUTION


# %% [markdown] exercise="a5_causality"
# A model that peeks gets a wonderful loss, and writes nonsense. So write the test, `is_causal(model)`, a boolean: `True` if **nothing** of what comes after a position, neither the later tokens nor how many there are, changes the output there; `False` if anything does. `model(ids)` takes whole numbers `(batch, n)`, from 0 to 39, with `n` from 1 to 48, and gives logits `(batch, n, vocab)`. There is nothing random in it.
#
# Everything is computed in float64: outputs less than `1e-9` apart are the same. Six models that peek are waiting for you, some of them faintly, far ahead or seldom, and two honest ones that must not be accused.

# %% [markdown] hint="a5_causality"
# Change one token: which outputs may change, and which must not? Do it at every place, in texts that are long enough and not all of one kind. And what should come out for the first tokens of a text, if you cut off the rest?


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


# %%
def judged(kinds=("causal", "columns", "next", "length")):
    return {kind: is_causal(model(kind, seed)) for kind in kinds}


# %% look="a5_causality"
judged()

# %% [markdown]
# **What you have now.** `length` is the model whose columns end with the text. It never sees a later token, and it is not causal: a test that only changes tokens overlooks it. (One of the two experiments of the hint is enough for all of them. Which one, and why?) Notebook 16 goes on from here: the whole block, its controls, and a comparison whose intervals decide. A first comparison is there (columns help a little, and the future has no part in it): see `docs/future_attention.md`.
