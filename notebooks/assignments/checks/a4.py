"""A4, fine-tune and report: what its checks ask, and the wrong values of typical mistakes.

src/a4_predictions.json, for the solution, was made by the master's training cell on one CPU core, with left_out = [].
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from labkit.course.answers import Answer
from labkit.course.exercises import Assignment
from labkit.course.mistakes import Mistake, clean, expect, expect_equal, expect_tensor
from labkit.course.predictions import file_name
from labkit.course.variant import Variant
from labkit.datasets import embedded
from labkit.datasets.examples import entities_of
from labkit.errors import CourseError

ASSIGNMENT = A4 = Assignment("a4", "Fine-tune and report", minutes=85)
A4.exercise("a4_counts", "Entities of each kind", "count_entities", difficulty=3, minutes=18)
A4.exercise("a4_faults", "Is the comparison valid?", "faults", difficulty=2, minutes=12)
A4.exercise("a4_compare", "Two F1 scores and an interval", "compare_arms", difficulty=4, minutes=15)
A4.exercise("a4_report", "The report", "report", difficulty=3, minutes=12)
A4.exercise("a4_not_shown", "What the report does not show", "not_shown", difficulty=3, minutes=10)

FILE = file_name("a4")
MASKS, KINDS = ("bidirectional", "causal"), ("DATE", "LOC", "MISC", "ORG", "PER")
TAGS = {"O", *(f"{letter}-{kind}" for kind in KINDS for letter in "BI")}
MOST_RUNS, LEAST_STEPS, DRAWS = 40, 20, 200
TEST_SET = embedded.read("ner", "field-notes", "test")
PASSAGES = sorted({sentence.group for sentence in TEST_SET})
A4.shows("left_out", [sorted(random.Random(i).sample(PASSAGES, 5)) for i in range(40)])
A4.shows("seeds", [tuple(range(first, first + 3)) for first in range(0, 3000, 3)])

Run = dict[str, Any]


@cache
def _gold(variant: Variant) -> dict[str, list[str]]:
    """The tags of the passages that the variant tests, a text for each sentence."""
    left_out, gold = A4.drawn["left_out"](variant), {}
    for sentence in TEST_SET:
        if sentence.group not in left_out:
            gold.setdefault(sentence.group, []).append(" ".join(sentence.tags))
    return gold


@A4.part("a4_counts", points=3)
def the_counts(answer: Answer, variant: Variant) -> None:
    rng, wrong = variant.rng("entities"), {}
    while len({*map(str, wrong.values())}) < 9:  # until no two mistakes give the same counts
        gold, predicted = ([*side] for side in zip(*(_tagged(rng) for _ in range(3)), strict=True))
        wrong = _miscounts(gold, predicted)
    _expect_counts(answer, gold, predicted, wrong)


@A4.part("a4_counts", points=1, hidden=True)
def neighbours_and_nothing(answer: Answer, variant: Variant) -> None:
    kind, other = variant.rng("kinds").sample(KINDS, 2)
    b, i, begun, stray = f"B-{kind}", f"I-{kind}", f"B-{other}", f"I-{other}"
    two, third = "A B always begins an entity, also right after another one.", "An I of another kind begins an entity."
    cases = ([b, b, "O"], [b, i, "O"], two), ([b, begun], [b, stray], third), (["O", "O"], ["O", "O"], None)
    for gold, predicted, likely in cases:
        _expect_counts(answer, [gold], [predicted], likely)


def _expect_counts(answer: Answer, gold: list, predicted: list, suspects: dict | str | None) -> None:
    actual, right = answer(gold, predicted), _counts(_entities(gold), _entities(predicted))
    expect(isinstance(actual, dict), "a dictionary {kind: [correct, predicted, gold]}", f"{actual!r:.200}")
    shown = ("; ".join(map(" ".join, side)) for side in (predicted, gold))
    expect_equal(_listed(actual), _listed(right), "the counts of ({}) for gold ({})".format(*shown), suspects)


def _listed(counts: dict) -> list[list]:
    return [[kind, *torch.as_tensor(counts[kind]).tolist()] for kind in sorted(counts)]


def _tagged(rng: random.Random) -> tuple[list[str], list[str]]:
    """Gold tags of a sentence with three entities, and what a model could predict for them."""
    gold, predicted = [], []
    for _ in range(3):
        n, kind = rng.choice((1, 2)), rng.choice(("PER", "LOC"))
        true, other = ([f"B-{name}", f"I-{name}"][:n] for name in (kind, "ORG"))
        begun, short = [f"I-{kind}"] * n, [*true[:1], "O"][:n]
        gold += [*true, "O"]
        predicted += [*rng.choice((true, true, begun, short, other, ["O"] * n)), "O"]
    end = rng.choice((-1, None))  # -1: the last entity ends the sentence
    return gold[:end], predicted[:end]


def _entities(sentences: Sequence[list[str]], strays: bool = True, numbered: bool = True) -> set[tuple]:
    return {
        (number * numbered, *entity)
        for number, tags in enumerate(sentences)
        for entity in entities_of(tags)
        if strays or tags[entity[0]].startswith("B")
    }


def _counts(true: set[tuple], guessed: set[tuple], correct: set[tuple] | None = None) -> dict[str, list[int]]:
    counts = {kind: [0, 0, 0] for *_, kind in true | guessed}
    for place, entities in enumerate((true & guessed if correct is None else correct, guessed, true)):
        for *_, kind in entities:
            counts[kind][place] += 1
    return counts


def _miscounts(gold: Sequence[list[str]], predicted: Sequence[list[str]]) -> dict[str, list]:
    """What each mistake computes; the right counts under ""."""
    both, spans = (gold, predicted), {entity[:3] for entity in _entities(gold)}
    true, guessed = map(_entities, both)
    right = _counts(true, guessed)
    words = ({(n, k, tag[2:]) for n, s in enumerate(side) for k, tag in enumerate(s) if tag != "O"} for side in both)
    overlapping = {
        (n, start, end, kind)
        for n, start, end, kind in guessed
        if any((n, kind) == (m, other) and a < end and start < b for m, a, b, other in true)
    }
    counts = {
        "": right,
        "You count words with a tag; an entity of two words is one entity.": _counts(*words),
        "You ignore the kind: a place tagged as a person is not correct.": _counts(
            true, guessed, {entity for entity in guessed if entity[:3] in spans}
        ),
        "An overlap is not enough: the first and the last word must be the same.": _counts(true, guessed, overlapping),
        "Your entities have lost their sentence: an equal one in another sentence counts.": _counts(
            *(_entities(side, numbered=False) for side in both)
        ),
        "An I that continues nothing begins an entity; you leave it out.": _counts(
            *(_entities(side, strays=False) for side in both)
        ),
        "An entity at the end of a sentence is missing.": _counts(
            *({entity for entity in _entities(side) if entity[2] < len(side[entity[0]])} for side in both)
        ),
        "Your order is [correct, gold, predicted].": {kind: [c, g, p] for kind, (c, p, g) in right.items()},
        "A kind that was predicted and is not in gold is missing.": {k: n for k, n in right.items() if n[2]},
    }
    return {message: _listed(wrong) for message, wrong in counts.items()}


def _all(**changes: Any) -> Callable[[list, list], Any]:
    return lambda one, other: [run.update(changes) for run in other]


CHANGES = {  # name of the case: what is changed in valid arms, and the probable cause of a wrong answer
    "the seeds in another order": (lambda one, other: other.reverse(), "The order of the runs does not matter."),
    "other steps in the last run": (
        lambda one, other: other[-1].update(steps=999), "Do you compare all runs, or only the first one of each arm?"
    ),
    "both masks measured as bidirectional": (
        _all(measured="bidirectional"), "You compare `mask`, which was asked for. What was measured?"
    ),
    "one more seed in the second arm": (
        lambda one, other: other.append(other[0] | {"seed": 50}), "The second arm has more seeds. Do you compare all?"
    ),
    "a single seed": (
        lambda one, other: [arm.__delitem__(slice(1, None)) for arm in (one, other)], "A single seed is not a fault."
    ),
    "other sentences and passages": (_all(sentences=100, tags={}), "Return all faults, not only the first one."),
    "other predictions for the same passages": (
        _all(tags={"fn-1": ["B-LOC O"], "fn-2": ["O"]}), "Compare the keys of `tags`; the predicted tags may differ."
    ),
    "one run measured otherwise": (
        lambda one, other: one[1].update(measured="causal"), "One run of an arm has another measured mask."
    ),
    "one seed twice in both arms": (
        lambda one, other: [arm[2].update(seed=arm[0]["seed"]) for arm in (one, other)],
        "A seed that occurs twice is one run, counted twice.",
    ),
    "as many passages with other names": (
        _all(tags={"fn-3": ["O O"], "fn-4": ["B-PER"]}), "The number of passages is the same, but not their names."
    ),
    "two arms without a mask": (
        _all(mask="bidirectional", measured="bidirectional"), "All runs have the same mask, so it is not compared."
    ),
    "runs of both masks in the first arm": (
        lambda one, other: one[0].update(mask="causal", measured="causal"), "A mask may occur in one arm only."
    ),
    "the two masks exchanged in what was measured": (
        lambda one, other: [run.update(measured=MASKS[run["mask"] == MASKS[0]]) for run in (*one, *other)],
        "No run has the mask that was asked for. Do you compare `measured` with `mask`?",
    ),
    "the passages in another order": (
        lambda one, other: one[0].update(tags=dict(reversed(one[0]["tags"].items()))),
        "The order of the passages does not matter.",
    ),
}  # fmt: skip


@A4.part("a4_faults", points=1, hidden=True, cases=list(CHANGES)[-7:])
@A4.part("a4_faults", points=3, cases=list(CHANGES)[:-7])
def the_faults(answer: Answer, variant: Variant, case: str) -> None:
    rng, (change, likely) = variant.rng(case), CHANGES[case]
    seeds, settings = rng.sample(range(50), 3), {"steps": rng.randint(40, 90), "sentences": rng.randint(200, 900)}
    settings["tags"] = {"fn-1": ["O O"], "fn-2": ["B-PER"]}
    one, other = ([{"mask": m, "measured": m, "seed": seed} | settings for seed in seeds] for m in MASKS)
    change(one, other)
    expect_equal(sorted(answer(one, other)), _faults(one, other), f"the faults with {case}", likely)


@A4.part("a4_compare", points=1, hidden=True, cases=[2])
@A4.part("a4_compare", points=3, cases=[3])
def the_interval(answer: Answer, variant: Variant, seeds: int) -> None:
    rng, arms = torch.Generator().manual_seed(variant.seed("counts")), []
    gold = torch.randint(2, 16, (12,), generator=rng)  # short passages and long ones
    for share, n in ((0.8, 3), (0.6, seeds)):
        correct = (gold * (share + 0.15 * torch.randn(n, 12, generator=rng))).round().long().clamp(0).minimum(gold)
        spurious = torch.randint(0, 5, (n, 12), generator=rng)
        arms.append(torch.stack([correct, correct + spurious, gold.expand(n, 12)], -1))
    draws = torch.randint(12, (DRAWS, 12), generator=rng)
    (one, other), pooled = arms, [arm.sum(0, keepdim=True) for arm in arms]
    right = _compared(one, other, draws)
    alone = (_f1(one[:, draws]).mean(0) - _f1(other).mean()).quantile(torch.tensor([0.025, 0.975]).double())

    def passage_f1(counts: Tensor) -> Tensor:
        return _f1(counts[..., None, :]).mean(-1)

    suspects = {
        "You average the F1 of the passages; add up their counts first.": _compared(*arms, draws, passage_f1),
        "You add up the counts of the seeds; compute one F1 for each seed, then the mean.": _compared(*pooled, draws),
        "Your interval is of `other` minus `one`.": torch.stack([*right[:2], -right[3], -right[2]]),
        "You draw passages for one arm only; both arms need the same ones.": torch.cat([right[:2], alone]),
        "You leave out 5 % on each side; for a 95 % interval it is 2.5 %.": _compared(one, other, draws, out=0.05),
        "Your interval reaches from the smallest to the largest draw.": _compared(one, other, draws, out=0.0),
        "Your F1 is a share; it should be in points, from 0 to 100.": right / 100,
        "The first two numbers are the F1 of `one` and of `other`, not their difference.": torch.cat(
            [right[:1] - right[1:2], right[2:]]
        ),
        "Your two F1 scores are right and your interval is not. Do both arms get the same passages in each draw?": (
            lambda actual: actual.shape == right.shape and torch.allclose(actual[:2], right[:2], rtol=1e-4)
        ),
    }
    numbers = torch.tensor([float(number) for number in answer(one, other, draws)], dtype=torch.float64)
    expect_tensor(numbers, right, "(F1 of one, F1 of other, low, high)", suspects, 1e-4)


def _f1(counts: Tensor) -> Tensor:
    """(..., passages, 3) -> (...): F1 in points over all passages together."""
    correct, predicted, gold = counts.double().sum(-2).unbind(-1)
    return 200 * correct / (predicted + gold)


def _compared(one: Tensor, other: Tensor, draws: Tensor, f1: Callable = _f1, out: float = 0.025) -> Tensor:
    """F1 of one and of other, and the interval of the difference: (4,)."""
    drawn = f1(one[:, draws]).mean(0) - f1(other[:, draws]).mean(0)
    edges = drawn.quantile(torch.tensor([out, 1 - out], dtype=drawn.dtype))
    return torch.cat([torch.stack([f1(one).mean(), f1(other).mean()]), edges])


REPORTS = {  # name of the case: the arm that is significantly better
    "bidirectional is better": "bidirectional", "causal is better": "causal", "an interval that contains 0": None,
    "runs of unequal steps": "bidirectional",
}  # fmt: skip


@A4.part("a4_report", points=2, cases=list(REPORTS)[:2])
def the_fields(answer: Answer, variant: Variant, case: str) -> None:
    rng, draws, runs = variant.rng(case), _draws(variant), []
    share = {mask: 0.75 if REPORTS[case] == mask else 0.55 for mask in MASKS}
    while not runs or _report(runs, draws, variant)["significant"] != REPORTS[case]:
        runs = [_planted(rng, variant, mask, seed, share[mask]) for seed in rng.sample(range(50), 2) for mask in MASKS]
    if case == "runs of unequal steps":
        runs[0]["steps"] *= 2
    _expect_report(answer, runs, draws, variant, f" of made-up runs ({case})")


@A4.part("a4_report", points=2)
def your_own_runs(answer: Answer, variant: Variant) -> None:
    runs, given = _handed_in(answer, variant), A4.drawn["seeds"](variant)
    seeds = {mask: {run["seed"] for run in runs if run["mask"] == mask} for mask in MASKS}
    enough = min(len(of & {*given}) for of in seeds.values()) > 1 and min(run["steps"] for run in runs) >= LEAST_STEPS
    came = ", ".join(f"{run['mask']} seed {run['seed']} ({run['steps']} steps)" for run in runs)
    expected = f"two seeds for each mask, of {', '.join(map(str, given))}, and {LEAST_STEPS} steps, or more"
    likely = "Train with the given SEEDS and STEPS."
    if not any(of & {*given} for of in seeds.values()):
        likely = f"{FILE} was made in another version of this assignment. Delete it, and train with your own SEEDS."
    expect(enough, expected, came, likely)
    _expect_report(answer, runs, _draws(variant), variant, " of your own runs")


A4.part("a4_report", points=2, cases=list(REPORTS)[2:], hidden=True)(the_fields)


def _expect_report(answer: Answer, runs: list[Run], draws: Tensor, variant: Variant, what: str) -> None:
    right, fields = _report(runs, draws, variant), answer(runs, draws)
    names = ("f1", "difference", "low", "high", "faults", "claim")
    form = isinstance(fields, dict) and set(fields) == set(names) and isinstance(fields["f1"], dict)
    expect(form, f"a dictionary with the fields {', '.join(names)}", f"{fields!r:.200}")
    b, c, difference, low, high = numbers = [*right["f1"].values(), right["difference"], right["low"], right["high"]]
    suspects = {
        "Your two F1 scores are exchanged.": [c, b, difference, low, high],
        "Your difference and interval are of causal minus bidirectional.": [b, c, -difference, -high, -low],
        "Your difference is causal minus bidirectional.": [b, c, -difference, low, high],
        "Your interval is of causal minus bidirectional.": [b, c, difference, -high, -low],
        "Your two arms are exchanged: `one` is bidirectional, `other` is causal.": (
            lambda actual: torch.allclose(actual[:2].double(), torch.tensor([c, b]).double(), rtol=1e-4)
        ),
        "Are exercises 1 to 3 right? Their functions compute these numbers.": lambda _: True,
    }
    actual = [fields["f1"][mask] for mask in MASKS] + [fields[name] for name in names[1:4]]
    order = f"[F1 of bidirectional, F1 of causal, difference, low, high]{what}"
    expect_tensor([float(number) for number in actual], torch.tensor(numbers), order, suspects, 1e-4)
    expect_equal(sorted(fields["faults"]), right["faults"], f"the faults{what}", "Compare the two arms with `faults`.")
    likely = "The claim is the better arm if the whole interval is above 0, or below 0."
    if right["faults"] or right["significant"] is None:
        reason = "the comparison has a fault" if right["faults"] else "the interval contains 0"
        likely = f"One arm has the higher F1, but {reason}: nothing may be claimed."
    suspects = {"If nothing may be claimed, the claim is None, not False.": lambda claim: claim is False}
    expect_equal(fields["claim"], right["claim"], f"the claim{what}", suspects | {likely: lambda _: True})


def _report(runs: list[Run], draws: Tensor, variant: Variant) -> dict[str, Any]:
    arms = {mask: [run for run in runs if run["mask"] == mask] for mask in MASKS}
    counts = {mask: torch.stack([_counts_of(run, _gold(variant)) for run in arms[mask]]) for mask in MASKS}
    one, other, low, high = _compared(*counts.values(), draws).tolist()
    significant = "bidirectional" if low > 0 else "causal" if high < 0 else None
    faults = _faults(*arms.values())
    return {
        "f1": dict(zip(MASKS, (one, other), strict=True)), "difference": one - other, "low": low, "high": high,
        "faults": faults, "claim": None if faults else significant, "significant": significant,
    }  # fmt: skip


def _faults(one: list[Run], other: list[Run]) -> list[str]:
    runs, measured = [*one, *other], [{run["measured"] for run in arm} for arm in (one, other)]
    seeds = [sorted(run["seed"] for run in arm) for arm in (one, other)]
    faults = {
        "mask": any(run["measured"] != run["mask"] for run in runs) or bool(measured[0] & measured[1]),
        "passages": any(run["tags"].keys() != runs[0]["tags"].keys() for run in runs),
        "seeds": seeds[0] != seeds[1] or len(set(seeds[0])) < len(seeds[0]),
    } | {name: len({run[name] for run in runs}) > 1 for name in ("steps", "sentences")}
    return sorted(name for name, is_fault in faults.items() if is_fault)


def _counts_of(run: Run, gold: dict[str, list[str]]) -> Tensor:
    """(passages, 3): correct, predicted and gold entities."""
    rows = []
    for passage, sentences in gold.items():
        true, guessed = (_entities([tags.split() for tags in side]) for side in (sentences, run["tags"][passage]))
        rows.append([len(true & guessed), len(guessed), len(true)])
    return torch.tensor(rows)


def _draws(variant: Variant) -> Tensor:
    n = len(_gold(variant))
    return torch.randint(n, (DRAWS, n), generator=torch.Generator().manual_seed(variant.seed("draws")))


def _planted(rng: random.Random, variant: Variant, mask: str, seed: int, share: float) -> Run:
    """A run that finds this share of the entities."""
    tags: dict[str, list[str]] = {}
    for passage, sentences in _gold(variant).items():
        for sentence in sentences:
            words = sentence.split()
            for start, end, _ in entities_of(words):
                if rng.random() > share:
                    words[start:end] = ["O"] * (end - start)
            tags.setdefault(passage, []).append(" ".join(words))
    return {"mask": mask, "measured": mask, "seed": seed, "steps": 40, "sentences": 1209, "tags": tags}


def _handed_in(answer: Answer, variant: Variant) -> list[Run]:
    """The runs in the student's file, a stranger's. Raises Mistake if it is missing or has another form."""
    try:
        content = answer.predictions()
        likely = "Run the training cell, which writes the file. Hand it in, too."
        expect(content is not None, f"{FILE} beside the notebook", "no such file", likely)
        runs = [_checked(run, _gold(variant)) for run in json.loads(content)]
        if not 0 < len(runs) <= MOST_RUNS:
            raise ValueError(f"{len(runs)} runs")
    except (CourseError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        came = clean(f"{type(error).__name__}: {error}", 200)
        likely = f"Was {FILE} changed? Delete it, and run the training cell again."
        raise Mistake(f"{FILE} as the training cell writes it", came, likely) from None
    return runs


def _checked(run: Any, gold: dict[str, list[str]]) -> Run:
    checked = {name: str(run[name])[:20] for name in ("mask", "measured")}
    checked |= {name: int(run[name]) for name in ("seed", "steps", "sentences")}
    if checked["mask"] not in MASKS:
        raise ValueError(f"the mask {checked['mask']}")
    for passage, sentences in gold.items():
        tags = [sentence.split() for sentence in run["tags"][passage]]
        if [len(words) for words in tags] != [len(sentence.split()) for sentence in sentences]:
            raise ValueError(f"{passage}: not one tag for each word")
        if unknown := {tag for words in tags for tag in words} - TAGS:
            raise ValueError(f"{passage}: the tag {min(unknown)}")
    return checked | {"tags": {passage: run["tags"][passage] for passage in gold}}


NEVER = {  # the codes of statements that no report shows, and why
    "equal": "An interval that contains 0 does not show that the masks are equally good.",
    "seeds": "Only passages are drawn, so the interval does not show how much the seeds matter.",
    "steps": "No run had more steps, so nothing is known about them.",
    "texts": "All test passages are from Field Notes; no newspaper article was tested.",
    "reason": "F1 shows which arm makes more mistakes, not why.",
}
FIELDS = {  # name of the case: low, high and the faults
    "an interval above 0": (2, 9, []), "an interval that contains 0": (-3, 6, []), "an interval below 0": (-9, -2, []),
    "a fault": (2, 9, ["steps"]),
}  # fmt: skip


@A4.part("a4_not_shown", points=1, cases=list(FIELDS)[2:], hidden=True)
@A4.part("a4_not_shown", points=2, cases=list(FIELDS)[:2])
def the_statements(answer: Answer, variant: Variant, case: str) -> None:
    low, high, faults = FIELDS[case]
    shift = variant.rng(case).random()
    low, high, significant = low + shift, high + shift, low > 0 or high < 0
    difference, claim = (low + high) / 2, None if faults or not significant else MASKS[high < 0]
    f1 = {"bidirectional": 70 + difference, "causal": 70.0}
    fields = {"f1": f1, "difference": difference, "low": low, "high": high, "faults": faults, "claim": claim}
    right = {*NEVER, *(() if significant else ("significant",)), *(() if claim else ("mask",))}
    reasons = NEVER | {
        "measured": "The first statement only repeats what was measured.",
        "significant": f"The interval {'excludes' if significant else 'contains'} 0: is the difference significant?",
        "mask": "Two things must be true: the difference is significant, and `faults` is empty.",
    }
    actual = answer(fields)
    for code, reason in reasons.items():
        expected, came = (f'"{code}" {"" if code in codes else "not "}in the list' for codes in (right, actual))
        expect(expected == came, f"{expected}, for a report with {case}", came, reason)
    expect_equal(len(actual), len(right), "the number of codes", "Return each code once, and no other text.")
