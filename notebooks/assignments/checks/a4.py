"""A4, Gemma for questions and entities: what its checks ask, and the wrong values of typical mistakes."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, scaled_dot_product_attention

from labkit import masks
from labkit.course.answers import Answer
from labkit.course.exercises import Assignment, randn
from labkit.course.mistakes import Mistake, expect, expect_equal, expect_tensor
from labkit.course.variant import Variant
from labkit.datasets.examples import entities_of

ASSIGNMENT = A4 = Assignment("a4", "Gemma for questions and entities", minutes=90)
A4.exercise("a4_layer_mask", "A window on both sides", "layer_mask", difficulty=2, minutes=9)
A4.exercise("a4_grouped", "Four heads ask, two answer", "grouped_attention", difficulty=3, minutes=12)
A4.exercise("a4_token_labels", "A tag, and where it stands", "token_labels", difficulty=3, minutes=12)
A4.exercise("a4_entity_f1", "Whole entities", "entity_f1", difficulty=3, minutes=13)
A4.exercise("a4_windows", "A long text, in windows", "windows", difficulty=3, minutes=10)
A4.exercise("a4_best_answer", "The answer, in characters", "best_answer", difficulty=5, minutes=22)
A4.exercise("a4_compare", "What may be claimed", "compare", difficulty=4, minutes=12)
A4.shows("question", ("fn-058-1", "fn-003-3", "fn-106-4", "fn-117-3", "fn-127-1"))

CUT = [  # words as a tokenizer cuts them
    (" Ak", "por", "rel"), (" Ad", "der", "wen"), (" Za", "l", "tane"), (" Sen", "nan"), (" Fl", "ora"),
]  # fmt: skip
WORDS = "the keeper of this harbour has seen many ships since 2002 and writes down every name that he can read".split()
NUMBERS = {label: k for k, label in enumerate(("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"))}
IGNORED, LONGEST = -100, 3  # a label that counts nowhere; tokens of an answer


@A4.part("a4_layer_mask", points=1, hidden=True, cases=((9, 5, 0, 6), (4, 1, 3, 6), (5, 2, 1, 2), (5, 2, 0, 1)))
@A4.part("a4_layer_mask", points=2, cases=((15, 6, 1, 4), (15, 6, 0, 4), (11, 4, 3, 4), (11, 4, 4, 4), (13, 5, 9, 5)))
def each_layer(answer: Answer, variant: Variant, case: tuple) -> None:
    n, w, layer, every = case
    whole, local = masks.bidirectional().dense(n), masks.sliding_window(w, causal=False).dense(n)
    expected = whole if layer % every == every - 1 else local
    comes_last = f"Your layer {layer} is global. In a group of layers the global one comes last."
    suspects = {
        f"Your window reaches {w} to a side. The causal one held {w} tokens, itself counted.": whole.tril(w).triu(-w),
        "Your mask is still causal: where is the right side?": expected.tril(),
        "Your window has shrunk: it is to reach as far as before, to both sides.": whole.tril(w // 2).triu(-(w // 2)),
        "Your local layers have lost their window." if layer == 1 else comes_last: whole,
        "Your global layer has a window. Count the layers again, from 0.": local,
    }
    expect_tensor(answer(n, w, layer, every), expected, f"layer_mask({n}, {w}, layer={layer}, every={every})", suspects)


@A4.part("a4_grouped", points=3, cases=((2, 2), (2, 3), (1, 4), (3, 1)))
def the_groups(answer: Answer, variant: Variant, case: tuple) -> None:
    (groups, each), n, d = case, variant.whole("groups n", 5, 7), variant.whole("groups d", 4, 6)
    q = randn(variant, "q", groups * each, n, d)
    k, v = (randn(variant, name, groups, n, d) for name in "kv")
    mask, scalar = masks.sliding_window(3, causal=False).dense(n), 2 * d + 3

    def attention(k: Tensor = k, v: Tensor = v, mask: Tensor = mask, scalar: int = scalar) -> Tensor:
        how = {"attn_mask": mask, "scale": scalar**-0.5, "enable_gqa": True}
        return scaled_dot_product_attention(q[None], k[None], v[None], **how)[0]

    turned, mean = [x.repeat(each, 1, 1) for x in (k, v)], [x.mean(0, keepdim=True) for x in (k, v)]
    suspects = {
        "Your query heads take the key heads in turn (0, 1, 0, 1). Neighbours share (0, 0, 1, 1).": attention(*turned),
        "Your query heads all ask the first key head. Each group has its own.": attention(k[:1], v[:1]),
        "You take the mean of the key heads. They are shared, not mixed.": attention(*mean),
        "You divide by the root of the head's size. Where is `scalar`?": attention(scalar=d),
        "You divide by `scalar` itself. It is its square root that is meant.": attention(scalar=scalar**2),
        "Your mask is not in force.": attention(mask=mask | True),
    }
    what = f"attention of {groups * each} query and {groups} key heads"
    expect_tensor(answer(q, k, v, mask, scalar), attention(), what, suspects, 1e-4)


@A4.part("a4_token_labels", points=3)
def on_the_last(answer: Answer, variant: Variant) -> None:
    rng = variant.rng("labels")
    pieces = [piece for word in [*rng.sample(CUT, 4), (" has",), (" in",)] for piece in word]
    text, offsets = "".join(pieces), [(0, 0), *_spans(pieces), (0, 0)]
    spans = [(match.start(), match.end()) for match in re.finditer(r"\S+", text)]
    tags = [*rng.sample(["B-PER", "B-LOC", "I-LOC", "B-ORG"], 4), "O", "O"]
    tokens = [[t for t, (a, b) in enumerate(offsets) if a < end and b > start] for start, end in spans]
    within = [[t for t, (a, b) in enumerate(offsets) if start <= a < b <= end] for start, end in spans]

    def labels(tokens: list[list[int]], chosen: slice = slice(-1, None), rest: int = IGNORED) -> list[int]:
        at = {t: NUMBERS[tag] for word, tag in zip(tokens, tags, strict=True) for t in word[chosen]}
        return [at.get(t, rest) for t in range(len(offsets))]

    suspects = {
        "Labels are on the first token of a word. A causal model has not read the word yet.": labels(tokens, slice(1)),
        "Your words have a label on each of their tokens: long words count more.": labels(tokens, slice(99)),
        f"Your tokens without a label count as O. They are to count nowhere: {IGNORED}.": labels(tokens, rest=0),
        "You ask for tokens that lie wholly within a word. The first one may hold a space.": labels(within),
        "Your labels are one too far left: the first token holds no character.": [*labels(tokens)[1:], IGNORED],
    }
    expect_equal(answer(offsets, spans, tags, NUMBERS), labels(tokens), f"the labels of {text!r}", suspects)


@A4.part("a4_token_labels", points=1, hidden=True)
def a_shared_letter_and_a_cut_row(answer: Answer, variant: Variant) -> None:
    offsets, spans, tags = [(0, 2), (2, 3), (2, 3), (3, 8)], [(0, 3), (4, 8), (9, 12)], ["B-PER", "B-LOC", "B-ORG"]
    suspects = {"Two tokens of one letter both have the label: only the last of a word is to.": [IGNORED, 1, 1, 3]}
    what = f"the labels over {offsets}, where two tokens share a letter and a word is cut off,"
    expect_equal(answer(offsets, spans, tags, NUMBERS), [IGNORED, IGNORED, 1, 3], what, suspects)


@A4.part("a4_entity_f1", points=3)
def found_whole(answer: Answer, variant: Variant) -> None:
    rng, scores = variant.rng("entities"), {}
    while len(set(scores.values())) < 9:  # until no two mistakes have the same score
        gold, predicted = zip(*(_tagged(rng) for _ in range(4)), strict=True)
        scores = _scores(gold, predicted)
    expect_tensor(answer(list(gold), list(predicted)), scores.pop(""), "the F1 of the entities of 4 sentences", scores)


def _tagged(rng: random.Random) -> tuple[list[str], list[str]]:
    """Tags of a sentence, and what a model makes of them."""
    gold = [tag for _ in range(4) for tag in rng.choice((["O"], ["B-PER"], ["B-LOC", "I-LOC"], ["B-PER", "I-PER"]))]
    wrong = {tag: ["O", f"I{tag[1:]}", f"{tag[:2]}ORG"] if tag != "O" else ["B-PER"] for tag in gold}
    return gold, [rng.choice(wrong[tag]) if rng.random() < 0.3 else tag for tag in gold]


def _scores(gold: Sequence[list[str]], predicted: Sequence[list[str]]) -> dict[str, float]:
    """What each mistake computes; the right F1 under ""."""
    pairs = [pair for texts in zip(gold, predicted, strict=True) for pair in zip(*texts, strict=True)]
    same, tags = [a for a, b in pairs if a == b], [tag for pair in pairs for tag in pair if tag != "O"]
    there, given = _entities(gold), _entities(predicted)
    by_sentence = [_f1([a], [b]) for a, b in zip(gold, predicted, strict=True)]
    scores = {
        "": _f1(gold, predicted),
        "You count words. Most are O, so a model that finds nothing looks good.": len(same) / len(pairs),
        "You count tags. Half a name is then half right.": 2 * len([a for a in same if a != "O"]) / max(len(tags), 1),
        "Your entities have no kind: a place taken for a person counts as right.": _f1(gold, predicted, kinds=False),
        "You take the mean over sentences. Add up all of them, and divide once.": sum(by_sentence) / len(by_sentence),
        "Your entities have lost their sentence: one of another sentence counts.": _f1(gold, predicted, numbered=False),
        "This is your precision: what was missed costs nothing.": len(there & given) / max(len(given), 1),
        "This is your recall: what was invented costs nothing.": len(there & given) / max(len(there), 1),
        "An I with nothing of its kind before it begins an entity. Yours is lost.": _f1(gold, predicted, strays=False),
    }
    return {message: round(score, 6) for message, score in scores.items()}


@A4.part("a4_entity_f1", points=1, hidden=True)
def neighbours_and_nothing(answer: Answer, variant: Variant) -> None:
    kind, other = variant.rng("kinds").sample(("PER", "LOC", "ORG"), 2)
    b, i, begun, stray = f"B-{kind}", f"I-{kind}", f"B-{other}", f"I-{other}"
    cases = (
        ([b, b, "O"], [b, i, "O"], 0.0, "Your B goes on with a name before it. Two names in a row are two entities."),
        ([b, begun], [b, stray], 1.0, "Your I of another kind goes on with the name before it. It begins an entity."),
        (["O", "O", "O"], ["O", "O", "O"], 0.0, None),
    )
    for gold, predicted, score, likely in cases:
        expect_tensor(answer([gold], [predicted]), score, f"the F1 of {predicted} for {gold}", likely)


@A4.part("a4_windows", points=1, cases=((7, 7, 2), (5, 7, 2), (11, 7, 4), (21, 7, 7), (22, 7, 7)), hidden=True)
@A4.part("a4_windows", points=2, cases=((3, 1), (5, 2), (8, 3)))
def the_overlap(answer: Answer, variant: Variant, case: tuple) -> None:
    room, step = variant.whole("room", 9, 14), variant.whole("step", 3, 4)
    n, room, step = case if len(case) == 3 else (room + case[0] * step + case[1], room, step)
    right, on = _windows(n, room, step), range(0, n, step)
    suspects = {
        "Your windows share `step` tokens. It is how far on the next one starts.": _windows(
            n, room, max(room - step, 1)
        ),
        "Your last window is missing, and with it the end of the text.": right[:-1],
        "Your last windows hold nothing new: stop once one reaches the end.": [(a, min(a + room, n)) for a in on],
        "Your last window ends beyond the text.": [(a, a + room) for a, _ in right],
        "You have moved the last window back. Let it be shorter.": [*right[:-1], (n - room, n)],
        "Your second number is the last token. It is to be the one after it.": [(a, b - 1) for a, b in right],
        "Your windows have no token in common: where does `step` enter?": _windows(n, room, room),
    }
    expect_equal(answer(n, room, step), right, f"windows({n}, {room}, {step})", suspects)


@A4.part("a4_best_answer", points=3)
def one_window(answer: Answer, variant: Variant) -> None:
    text, rows = _rows(variant, nulls=(-9.0,))
    offsets, start, end = rows[0]
    t = variant.whole("best", 4, 7)  # the best span begins here; each mistake finds something better
    for scores, at, more in ((start, 0, 8), (start, 12, 9), (end, 2, 8), (end, 3, 9), (end, 9, 11)):
        scores[t + at] += more
    too_long, too_short, endless = (_right(text, rows, longest) for longest in (LONGEST + 1, LONGEST - 1, 99))
    end_of_start = max(range(t + 12, t + 15), key=lambda j: end[j])
    by_start = _characters(text, offsets, t + 12, end_of_start)
    suspects = {
        "You take the best start and the best end. Do they fit each other?": _characters(text, offsets, t + 12, t + 9),
        "You take the best start, and then an end. A better pair may begin elsewhere.": by_start,
        "Your answer is too long: `longest` counts the first and the last token, too.": too_long,
        "Your longest answer is a token short: from i to j there are j - i + 1 tokens.": too_short,
        "Your answer is as long as it likes: where does `longest` enter?": endless,
        "Your answer begins with a space, which its first token holds.": (offsets[t][0], offsets[t + 2][1]),
        "Your numbers are those of tokens. Characters of the text are asked for.": (t, t + 2),
        "There is an answer, but you return none. Or is there no return?": None,
        "You return the words. Asked for is where they stand in the text, from a to b.": text[
            slice(*_right(text, rows))
        ],
    }
    _expect_answer(answer, text, rows, f"best_answer({text!r}, ...)", suspects)


@A4.part("a4_best_answer", points=1)
def no_answer(answer: Answer, variant: Variant) -> None:
    likely = "You always answer. The last token of a row stands for no answer."
    _expect_answer(answer, *_rows(variant, nulls=(30.0,)), "the answer where none scores highest", likely)


@A4.part("a4_best_answer", points=1, hidden=True)
def several_windows(answer: Answer, variant: Variant) -> None:
    text, rows = _rows(variant, nulls=(30.0, 0.5, 12.0))
    t = variant.whole("where", 4, 7)  # in the second row, which has three tokens of a question first
    rows[1][1][t], rows[1][2][t + 1] = 9.0, 8.0
    likely = "A window without the answer rightly has none. Only the lowest `no answer` of all windows counts."
    _expect_answer(answer, text, rows, "the answer in window 2 of 3", {likely: None})
    rows[1][1][-1] = rows[1][2][-1] = 15.0
    _expect_answer(answer, text, rows, "the answer where every window has none", None)


@A4.part("a4_compare", points=2)
def the_interval(answer: Answer, variant: Variant) -> None:
    one, other, seeds, texts = _results(variant, "interval", 0.03)
    gaps, apart = _gaps(one, other, seeds, texts), one - other
    alone = [one[s][:, t].mean() - other.mean() for s, t in zip(seeds, texts, strict=True)]
    gap, low, high = right = _interval(0.03, gaps)
    suspects = {
        "Your signs are turned over: it is `one` minus `other`.": torch.stack([-gap, -high, -low]),
        "Only your texts are drawn. With other seeds you would have other models.": (
            _interval(gap, apart.mean(0)[texts].mean(1))
        ),
        "Only your seeds are drawn. Other texts would be easier or harder.": _interval(
            gap, apart.mean(1)[seeds].mean(1)
        ),
        "Your `other` is not drawn along: the same text and seed, in both.": _interval(gap, torch.stack(alone)),
        "Your interval leaves out 5 % on each side. For 95 % it is 2.5 %.": _interval(gap, gaps, 0.05),
        "Your interval goes from the smallest to the largest draw: one odd draw decides.": _interval(gap, gaps, 0.0),
        "Your gap is the mean of the draws. It is to be the observed one.": _interval(gaps.mean(), gaps),
    }
    result = answer(one, other, seeds, texts)
    expect_tensor(result[:3], right, "[gap, low, high]", suspects, 1e-6)


@A4.part("a4_compare", points=1)
def what_is_claimed(answer: Answer, variant: Variant) -> None:
    over = "You name the larger mean. With zero inside the interval, the next runs may turn it over."
    end = "You look at one end of the interval only: wholly below zero is a result, too."
    form = 'The claim is the string "one" or "other", or None itself.'
    for gap, claim, likely in ((0.004, None, over), (0.2, "one", None), (-0.2, "other", end)):
        result = answer(*_results(variant, f"claim {gap}", gap))[3]
        likely = likely if result in ("one", "other", None) else form
        expect_equal(result, claim, f"the claim for a gap of {gap}", likely)


@A4.part("a4_compare", points=1, hidden=True)
def an_end_at_zero(answer: Answer, variant: Variant) -> None:
    one, _, seeds, texts = _results(variant, "touches", 0.0)
    better = one + 0.5 * (torch.arange(40) == 0)  # on one text of many: some draws do not hold it, and their gap is 0
    result = answer(better, one, seeds, texts)
    expect_equal(result[3], None, "the claim of an interval that begins at 0", "Zero is inside: < or <=?")


def _spans(pieces: Iterable[str]) -> list[tuple[int, int]]:
    """Where each piece stands in the text that all of them make."""
    ends = list(itertools.accumulate(len(piece) for piece in pieces))
    return list(zip([0, *ends], ends, strict=False))


def _entities(texts: Sequence[list[str]], kinds: bool = True, strays: bool = True, numbered: bool = True) -> set[tuple]:
    return {
        (number * numbered, start, end, kind * kinds)
        for number, tags in enumerate(texts)
        for start, end, kind in entities_of(tags)
        if strays or tags[start].startswith("B")
    }


def _f1(gold: Sequence[list[str]], predicted: Sequence[list[str]], **how: bool) -> float:
    there, given = _entities(gold, **how), _entities(predicted, **how)
    return 2 * len(there & given) / max(len(there) + len(given), 1)


def _windows(n: int, room: int, step: int) -> list[tuple[int, int]]:
    """By their number, and not by going along: another way than the solution's."""
    return [(k * step, min(k * step + room, n)) for k in range(1 - (-max(n - room, 0) // step))]


def _rows(variant: Variant, nulls: tuple[float, ...]) -> tuple[str, list[tuple]]:
    """A text, and rows of it: a question of three tokens, which scores high, a piece of the text, and "no answer"."""
    rng = variant.rng(f"rows {nulls}")
    text = " ".join(rng.sample(WORDS, len(WORDS)))
    offsets = _spans(re.findall(r"\s*\S+", text))
    pieces = [offsets] if len(nulls) == 1 else [offsets[:7], offsets[4:11], offsets[8:]]
    rows = []
    for piece, null in zip(pieces, nulls, strict=True):
        start, end = ([4.0 * (t < 3) + rng.random() for t in range(len(piece) + 3)] + [null] for _ in range(2))
        rows.append(([None] * 3 + piece + [None], start, end))
    return text, rows


def _right(text: str, rows: list[tuple], longest: int = LONGEST) -> tuple[int, int] | None:
    """The answer, by comparing all spans."""
    score, offsets, i, j = max(
        (start[i] + end[j], offsets, i, j)
        for offsets, start, end in rows
        for i in range(3, len(offsets) - 1)
        for j in range(i, min(i + longest, len(offsets) - 1))
    )
    return None if min(start[-1] + end[-1] for _, start, end in rows) > score else _characters(text, offsets, i, j)


def _characters(text: str, offsets: list, i: int, j: int) -> tuple[int, int]:
    a = offsets[i][0]
    return a + text[a].isspace(), offsets[j][1]


def _expect_answer(answer: Answer, text: str, rows: list[tuple], what: str, suspects: Any) -> None:
    try:
        actual = answer(text, rows, LONGEST)
    except Mistake as mistake:
        likely = "Your span begins or ends at a token that is not of the context: its offset is None."
        raise Mistake(mistake.expected, mistake.came, likely if "NoneType" in mistake.came else None) from None
    likely = "Asked for are two numbers and nothing beside them, or None itself."
    expect(not isinstance(actual, tuple) or len(actual) == 2, "a pair (a, b), or None", f"{actual!r:.200}", likely)
    expect_equal(actual, _right(text, rows), what, suspects)


def _results(variant: Variant, name: str, gap: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (4 seeds, 40 texts) of two arms whose means lie `gap` apart, and which seeds and texts are drawn."""
    rng = torch.Generator().manual_seed(variant.seed(name))
    text, luck, chance = (torch.randn(size, generator=rng).double() for size in ((40,), (2, 4, 1), (2, 4, 40)))
    one, other = 0.5 + 0.2 * text + 0.03 * luck + 0.1 * chance
    seeds, texts = (torch.randint(n, (200, n), generator=rng) for n in (4, 40))
    return one + gap - (one - other).mean(), other, seeds, texts


def _gaps(one: Tensor, other: Tensor, seeds: Tensor, texts: Tensor) -> Tensor:
    """By how often each seed and each text was drawn: another way than the solution's."""
    often = [one_hot(drawn, drawn.shape[1]).double().mean(1) for drawn in (seeds, texts)]
    return torch.einsum("ds,st,dt->d", often[0], one - other, often[1])


def _interval(gap: Any, gaps: Tensor, left_out: float = 0.025) -> Tensor:
    edges = gaps.quantile(torch.tensor([left_out, 1 - left_out], dtype=gaps.dtype))
    return torch.cat([torch.as_tensor([gap], dtype=gaps.dtype), edges])
