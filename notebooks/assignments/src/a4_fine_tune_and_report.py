# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A4 · Fine-tune and report
#
# **Is Gemma better at tagging names with its causal mask or without it?** You convert Gemma, fine-tune it with both masks and several seeds, and turn the predictions into a report: the difference in F1, its confidence interval, and what may be claimed.
#
# | | |
# |---|---|
# | **You need** | lessons 07, 09, 10 and 12 |
# | **Time and points** | about 85 minutes without the training, 21 points |
# | **Training** | 12 minutes on one CPU core (measured on an Intel Xeon); needs 4 GB of memory |
# | **Hand in** | this notebook **and** `a4_predictions.json`, in one folder |
#
# Each exercise has a check, which states what was expected, what your function returned, and the probable cause. Cells with `check.look` show what your function returns, once you have written it. You can skip an exercise and come back.
#
# The grader recomputes all numbers from `a4_predictions.json`. It cannot check that the predictions come from your own training runs.

# %%
import json
from pathlib import Path

import torch
from tqdm.auto import tqdm

import labkit
from labkit import profile, viz
from labkit.datasets import embedded
from labkit.datasets.examples import entities_in

# %% [markdown]
# ## The data
#
# **Field Notes** are short passages about an invented world, so Gemma has never read them. Every word has a BIO tag (lesson 10), with the kinds PER, LOC, ORG, DATE and MISC. Your version of this assignment tests on 20 of the 25 test passages:

# %%
left_out = ["fn-003"]  # drawn: left_out
train_set = embedded.read("ner", "field-notes", "train")
dev_set = embedded.read("ner", "field-notes", "dev")[:40]
test_set = [sentence for sentence in embedded.read("ner", "field-notes", "test") if sentence.group not in left_out]
print(len(train_set), "sentences for training,", len(dev_set), "for dev,", len(test_set), "for the test")


# %%
def by_passage(tags):
    """The tags of the test sentences as {passage: ["B-PER I-PER O ...", one text for each sentence]}."""
    passages = {}
    for sentence, of_sentence in zip(test_set, tags, strict=True):
        passages.setdefault(sentence.group, []).append(" ".join(of_sentence))
    return passages


gold = by_passage([sentence.tags for sentence in test_set])
print(f"{len(gold)} passages; the tags of the first one:", *list(gold.values())[0], sep="\n")

# %% [markdown] exercise="a4_counts"
# The report needs three numbers: how many predicted entities are **correct**, how many were **predicted**, and how many are in **gold**. Counts for each kind also show which names are difficult.
#
# `gold` and `predicted` are lists of sentences; a sentence is a list of tags. A predicted entity is correct if gold has an entity in the same sentence with the same first word, last word and kind. An `I-` that does not continue an entity of its own kind **begins** one. (Lesson 10 leaves such entities out.)
#
# Return `{kind: [correct, predicted, gold]}` with every kind that occurs in gold or in the predictions. Example:
#
# ```python
# count_entities([["B-LOC", "I-LOC", "O"]], [["B-LOC", "O", "I-PER"]])  # {"LOC": [0, 1, 1], "PER": [0, 1, 0]}
# ```

# %% [markdown] hint="a4_counts"
# Write a helper that turns all sentences into a set of (number of the sentence, first word, last word, kind). Remember where the current entity begins. A `B-` ends it and begins one, an `O` ends it; what does an `I-` of another kind do? The correct entities are the intersection of two sets.


# %% answer="a4_counts"
def count_entities(gold, predicted):
    """Two lists of sentences, each a list of BIO tags -> {kind: [correct, predicted, gold]}."""
    ### BEGIN SOLUTION

    def entities(sentences):
        found = set()
        for number, tags in enumerate(sentences):
            first = None  # the first word of the current entity
            for k, tag in enumerate([*tags, "O"]):
                continues = first is not None and tag == f"I-{tags[first][2:]}"
                if first is not None and not continues:
                    found.add((number, first, k, tags[first][2:]))
                    first = None
                if tag != "O" and not continues:
                    first = k
        return found

    true, guessed = entities(gold), entities(predicted)
    counts = {kind: [0, 0, 0] for kind in sorted({entity[-1] for entity in true | guessed})}
    for place, some in enumerate((true & guessed, guessed, true)):
        for *_, kind in some:
            counts[kind][place] += 1
    return counts
    ### END SOLUTION


# %%
def counts_of(run, kind=None):
    """(passages, 3): correct, predicted and gold entities of a run, of one kind or of all kinds together."""
    rows = []
    for passage, sentences in gold.items():
        sides = [[tags.split() for tags in side] for side in (sentences, run["tags"][passage])]
        counts = count_entities(*sides)
        rows.append([sum(counts[k][i] for k in counts if kind in (k, None)) for i in range(3)])
    return torch.tensor(rows)


# %% look="a4_counts"
count_entities(
    [list(s.tags) for s in test_set], [["O"] * len(s.tags) for s in test_set]
)  # a tagger that predicts only O

# %% [markdown]
# ## Fine-tune Gemma
#
# A training **run** has a mask and a seed. For each seed there are two runs, which start with the same head and the same adapters, and read the same sentences in the same order. Only their masks differ.
#
# `finetune` (lesson 12) converts the model if `mask="bidirectional"`, measures the mask with `labkit.audit` before the first step, and trains adapters (LoRA) and a head. In the middle and at the end of the run it computes the F1 on dev, and it uses the better one of these two checkpoints.

# %%
SEEDS = (0, 1, 2)  # drawn: seeds
on_gpu = profile.current().name in ("colab", "gpu")
SEEDS, STEPS = (SEEDS, 200) if on_gpu else (SEEDS[:2], 100)


# %%
def train(mask, seed, log):
    """Train one run, unless its folder has it, and return its settings and its predictions."""
    from labkit.tasks.finetune import finetune
    from labkit.training import preset

    settings = preset(
        "gemma", max_steps=STEPS, num_train_epochs=1000.0, eval_steps=STEPS // 2, learning_rate=1.5e-3, seed=seed,
        per_device_train_batch_size=8, per_device_eval_batch_size=16, gradient_accumulation_steps=1,
    )  # fmt: skip
    options = {"settings": settings, "mask": mask, "method": "lora", "rank": 4, "keep_model": False, "log": log}
    folder = Path("a4_runs", f"{mask}-seed{seed}-{STEPS}steps")
    options |= {"dev": dev_set, "test": test_set, "resume": folder.exists()}
    metrics = finetune("ner", "gemma3-270m", train_set, folder, **options)  # a finished run is not trained again
    predictions = [json.loads(line) for line in (folder / "predictions.test.jsonl").read_text().splitlines()]
    return {
        "mask": mask, "measured": metrics["mask"]["measured"], "seed": seed, "steps": metrics["steps"],
        "sentences": metrics["n_train"], "tags": by_passage([sentence["tags"] for sentence in predictions]),
    }  # fmt: skip


# %%
def train_all():
    """Convert Gemma once and audit it, then train a run for each seed and mask."""
    lm = labkit.load("gemma3-270m")
    labkit.to_bidirectional(lm.model)
    print(labkit.audit(lm.model, quick=True))
    del lm
    runs, todo = [], [(mask, seed) for seed in SEEDS for mask in ("causal", "bidirectional")]
    for mask, seed in (bar := tqdm(todo, unit="run")):
        runs.append(train(mask, seed, bar.set_postfix_str))
    return runs


# %% [markdown]
# The next cell trains all runs and writes `a4_predictions.json` beside this notebook. If the file exists, nothing is trained. You can read exercises 2 to 5 in the meantime. After an interruption, run the cell again: finished runs are kept in `a4_runs`, and an unfinished one continues. `labkit notebooks run` stops a cell after 10 minutes, so give it `--timeout 3600`. At least two of the `SEEDS` of this notebook and 20 steps are accepted. To train with other settings, delete `a4_predictions.json` and the folder `a4_runs` first. On Colab, first run `labkit.colab.setup(drive=True)`; otherwise both are lost when the machine is released.

# %%
runs = check.predictions("a4", train_all)
if not all(gold.keys() <= run["tags"].keys() for run in runs):
    raise ValueError("a4_predictions.json has other test passages: delete it, and run this cell again")
for run in runs:
    print({name: value for name, value in run.items() if name != "tags"})

# %% [markdown]
# The next figure shows two predictions for one sentence, from the first run of each mask. We chose the sentence with the most entities among those on which the two runs differ. Gold entities are underlined, predicted ones are shaded.

# %%
first = {mask: next(run for run in runs if run["mask"] == mask) for mask in ("causal", "bidirectional")}
predicted = {mask: [tags.split() for passage in gold for tags in run["tags"][passage]] for mask, run in first.items()}
differ = [i for i in range(len(test_set)) if predicted["causal"][i] != predicted["bidirectional"][i]]
number = max(differ or range(len(test_set)), key=lambda i: sum(tag[0] == "B" for tag in test_set[i].tags))


def figure_of(sentence, tags):
    sides = (entities_in(sentence.spans, side) for side in (sentence.tags, tags))
    return viz.entities_figure(sentence.text, *([(e.start, e.end, e.label) for e in side] for side in sides))


viz.stacked({mask: figure_of(test_set[number], tags[number]) for mask, tags in predicted.items()})

# %% [markdown] exercise="a4_faults"
# A difference between two **arms** (lists of runs) shows an effect of the mask only if the runs are alike in everything else. `faults` returns the names of what is wrong, in any order; an empty list means that the comparison is valid:
#
# - `"mask"`: a run whose measured mask (`"measured"`) is not the one that was asked for (`"mask"`), or a measured mask that occurs in both arms
# - `"seeds"`: the arms do not have the same seeds, or an arm has a seed twice. The order does not matter.
# - `"steps"`: the numbers of training steps differ
# - `"sentences"`: the numbers of training sentences differ
# - `"passages"`: not all runs predicted the same test passages (the keys of `"tags"`)
#
# Two arms of lesson 12 were trained for 400 and 700 steps, so `faults` returns `["steps"]` for them. A single seed is not a fault here.

# %% [markdown] hint="a4_faults"
# `{run["steps"] for run in [*one, *other]}` is a set. How many elements may it have? Seeds are compared between the arms: sort them first.


# %% answer="a4_faults"
def faults(one, other):
    """Two lists of runs -> a list of names, such as ["seeds", "steps"]."""
    ### BEGIN SOLUTION
    both = [*one, *other]
    found = [name for name in ("steps", "sentences") if len({run[name] for run in both}) > 1]
    if len({frozenset(run["tags"]) for run in both}) > 1:
        found.append("passages")
    seeds = [sorted(run["seed"] for run in arm) for arm in (one, other)]
    if seeds[0] != seeds[1] or len(set(seeds[0])) < len(seeds[0]):
        found.append("seeds")
    measured = [{run["measured"] for run in arm} for arm in (one, other)]
    if any(run["mask"] != run["measured"] for run in both) or measured[0] & measured[1]:
        found.append("mask")
    return found
    ### END SOLUTION


# %% [markdown] exercise="a4_compare"
# With other test passages, the difference between two arms would have another value. The **paired bootstrap** imitates this: draw as many passages as there are, with repetition, and compute the difference again, **with the same passages for both arms**.
#
# `one` and `other` are the counts of two arms, shape `(seeds, passages, 3)`: correct, predicted, gold. `draws` has shape `(n, passages)`; each row holds the passages of one draw. The F1 of a run is 200 · correct / (predicted + gold), in points, with the counts of all its passages added up. The F1 of an arm is the mean over its seeds.
#
# Return `(f1_one, f1_other, low, high)`: the F1 of both arms on all passages, and the 2.5 % and 97.5 % quantiles (`torch.quantile`) of the differences `one` minus `other` over the draws. The arms may have different numbers of seeds.

# %% [markdown] hint="a4_compare"
# Write a helper that computes the F1 of an arm from its counts; `counts.sum(1)` adds up the passages. `one[:, draw]` selects the passages of one draw, some of them several times. A loop over the draws is fast enough.


# %% answer="a4_compare"
def compare_arms(one, other, draws):
    """(seeds, passages, 3) twice, (n, passages) -> (f1_one, f1_other, low, high), in points of F1."""
    ### BEGIN SOLUTION

    def f1(counts):
        correct, predicted, gold = counts.sum(1).unbind(-1)  # (seeds,) each
        return (200 * correct / (predicted + gold)).mean()

    differences = torch.stack([f1(one[:, draw]) - f1(other[:, draw]) for draw in draws])
    low, high = (torch.quantile(differences, share).item() for share in (0.025, 0.975))
    return f1(one).item(), f1(other).item(), low, high
    ### END SOLUTION


# %% [markdown] exercise="a4_report"
# Now put the parts together. `runs` is a list of runs like yours, with both masks; `draws` are the draws of passages. Return a dictionary with these fields:
#
# | field | value |
# |---|---|
# | `"f1"` | `{"causal": ..., "bidirectional": ...}`: the F1 of each arm, in points |
# | `"difference"` | bidirectional minus causal |
# | `"low"`, `"high"` | the 95 % interval of the difference |
# | `"faults"` | what `faults` finds |
# | `"claim"` | `"bidirectional"` or `"causal"` if that arm is significantly better (the interval excludes 0) and the comparison has no fault, otherwise `None` |
#
# (With two seeds, a claim holds for these seeds: see exercise 5.)
#
# `counts_of(run)` (above) returns the counts of a run, `(passages, 3)`. The check calls your function with made-up runs, then with your own runs from `a4_predictions.json`.

# %% [markdown] hint="a4_report"
# Sort the runs into two lists by `run["mask"]`. `torch.stack` makes `(seeds, passages, 3)` of the counts of an arm. Do not call a variable `faults`: it would hide your function.


# %% answer="a4_report"
def report(runs, draws):
    """A list of runs, (n, passages) -> {"f1", "difference", "low", "high", "faults", "claim"}."""
    ### BEGIN SOLUTION
    arms = [[run for run in runs if run["mask"] == mask] for mask in ("bidirectional", "causal")]
    counts = [torch.stack([counts_of(run) for run in arm]) for arm in arms]
    bidirectional, causal, low, high = compare_arms(*counts, draws)
    better = "bidirectional" if low > 0 else "causal" if high < 0 else None
    found = faults(*arms)
    return {
        "f1": {"causal": causal, "bidirectional": bidirectional}, "difference": bidirectional - causal,
        "low": low, "high": high, "faults": found, "claim": None if found else better,
    }  # fmt: skip
    ### END SOLUTION


# %%
draws = torch.randint(len(gold), (1000, len(gold)), generator=torch.Generator().manual_seed(0))

# %% look="a4_report"
report(runs, draws)

# %% [markdown]
# Did both models learn the task? Without a model, giving each word its most frequent tag reaches an F1 of 36.5 on all 25 test passages (lesson 12).
#
# The next figure shows the difference for each kind of entity, too. (MISC occurs in too few passages.) Even if the masks are equally good, each of these five intervals excludes 0 in more than one study of twenty: it ignores the variation between seeds, and with few passages the bootstrap is too narrow (lesson 14 corrects both). So decide **before** you look which one you report: here it is *all kinds*.


# %%
def interval_of(kind):
    arms = [[counts_of(run, kind) for run in runs if run["mask"] == mask] for mask in ("bidirectional", "causal")]
    one, other, low, high = compare_arms(*map(torch.stack, arms), draws)
    return one - other, low, high


# %% look="a4_report"
viz.forest_figure(
    {f"{len(gold)} passages": {kind or "all kinds": interval_of(kind) for kind in (None, "PER", "LOC", "ORG", "DATE")}},
    "Bidirectional minus causal, by kind of entity",
    "difference in points of F1",
)

# %% [markdown] exercise="a4_not_shown"
# Which of these statements does a report **not** show? `fields` is what `report` returns. Return a list of codes. Some answers depend on the fields.
#
# | code | statement |
# |---|---|
# | `"measured"` | In these runs, on these passages, the F1 of the two arms differs by `difference` points. |
# | `"significant"` | The difference is significant. |
# | `"mask"` | The difference is significant, and `faults` is empty. |
# | `"equal"` | The two masks are equally good. |
# | `"seeds"` | The interval also covers how much the F1 varies between seeds. |
# | `"steps"` | After ten times as many steps, the same arm has the higher F1. |
# | `"texts"` | On newspaper articles, the same arm has the higher F1. |
# | `"reason"` | The arm with the lower F1 fails at names whose evidence comes later. |

# %% [markdown] hint="a4_not_shown"
# What was drawn to get the interval? What did all of your runs have in common? Two statements depend on `low`, `high` and `faults`.


# %% answer="a4_not_shown"
def not_shown(fields):
    """The dictionary of `report` -> the codes of the statements that it does not show."""
    ### BEGIN SOLUTION
    codes = ["equal", "seeds", "steps", "texts", "reason"]
    if fields["low"] <= 0 <= fields["high"]:
        codes += ["significant", "mask"]
    elif fields["faults"]:
        codes += ["mask"]
    return codes
    ### END SOLUTION


# %% look="a4_not_shown"
not_shown(report(runs, draws))

# %% [markdown]
# **What you have now.** You have fine-tuned a converted Gemma with both masks, stored predictions that anyone can score again, and written a report that states how certain the difference is and what it does not show. Hand in this notebook and `a4_predictions.json`. Lesson 14 has the same comparison with more steps, more seeds and controls.
