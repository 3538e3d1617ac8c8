"""A4, Gemma for questions and entities: what its checks ask, and what they say to typical mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, scaled_dot_product_attention

from labkit import masks
from labkit.course.answers import Answer
from labkit.course.exercises import Assignment
from labkit.course.mistakes import Mistake, expect, expect_equal, expect_number, expect_tensor
from labkit.course.variant import Variant
from labkit.datasets.examples import Question
from labkit.datasets.tags import entities_of
from labkit.tasks import qa

ASSIGNMENT = A4 = Assignment("a4", "Gemma for questions and entities", minutes=90)

LONG = [("Ak", "por", "rel"), ("Ad", "der", "wen"), ("Za", "l", "tane")]  # words as a tokenizer cuts them
MIDDLE = [("Sen", "nan"), ("man", "aged"), ("La", "cey"), ("Bath", "s"), ("Fl", "ora"), ("har", "bour")]
SHORT = [("has",), ("in",), ("since",), ("2002",), ("the",)]
NUMBERS = {label: k for k, label in enumerate(("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"))}
IGNORED, LONGEST = -100, 3  # a label that counts nowhere; tokens of an answer


@A4.draws("question")
def the_question(variant: Variant) -> str:
    return variant.choose("a4 question", ("fn-058-1", "fn-003-3", "fn-106-4", "fn-117-3", "fn-127-1"))


@A4.exercise("a4_layer_mask", "A window on both sides", answer="layer_mask", points=2, difficulty=2, minutes=9)
def each_layer(answer: Answer, variant: Variant) -> None:
    rng = variant.rng("layers")
    w, every = rng.choice((4, 6, 8)), rng.randint(3, 6)
    for layer in (1, 0, every - 1, every, 2 * every - 1):
        _judge_layer(answer, 2 * w + 3, w, layer, every)


@A4.also("a4_layer_mask", points=1, hidden=True)
def odd_short_and_alternating(answer: Answer, variant: Variant) -> None:
    for n, w, layer, every in ((9, 5, 0, 6), (4, 1, 3, 6), (3, 6, 1, 3), (5, 2, 1, 2), (5, 2, 2, 2), (5, 2, 0, 1)):
        _judge_layer(answer, n, w, layer, every)


@A4.exercise("a4_grouped", "Four heads ask, two answer", answer="grouped_attention", points=3, difficulty=3, minutes=12)
def the_groups(answer: Answer, variant: Variant) -> None:
    rng, generator = variant.rng("groups"), torch.Generator().manual_seed(variant.seed("heads"))
    for groups, each in ((2, rng.choice((2, 3))), (1, 4), (3, 1)):
        n, d, heads = rng.randint(5, 7), rng.randint(4, 6), groups * each
        q, k, v = (torch.randn(rows, n, d, generator=generator) for rows in (heads, groups, groups))
        mask, scalar = masks.sliding_window(3, causal=False).dense(n), 2 * d + 3
        turned, mean = [x.repeat(each, 1, 1) for x in (k, v)], [x.mean(0, keepdim=True) for x in (k, v)]
        suspects = {
            "Your query heads take the key heads in turn (0, 1, 0, 1). A group are neighbours (0, 0, 1, 1).": turned,
            "Your query heads all ask the first key head. Each group has its own.": (k[:1], v[:1]),
            "You take the mean of the key heads. They are shared, not mixed.": mean,
        }
        suspects = {text: _grouped(q, *shared, mask, scalar) for text, shared in suspects.items()} | {
            "You divide by the root of the head's size. Where is `scalar`?": _grouped(q, k, v, mask, d),
            "You divide by `scalar` itself. It is its square root that is meant.": _grouped(q, k, v, mask, scalar**2),
            "Your mask is not in force.": _grouped(q, k, v, torch.ones_like(mask), scalar),
        }
        what, found = f"attention of {heads} query and {groups} key heads", answer(q, k, v, mask, scalar)
        expect_tensor(found, _grouped(q, k, v, mask, scalar), what, suspects, 1e-4, ("head", "token", "column"))


@A4.exercise("a4_token_labels", "A tag, and where it stands", answer="token_labels", points=3, difficulty=3, minutes=12)
def on_the_last(answer: Answer, variant: Variant) -> None:
    rng = variant.rng("labels")
    words = [*rng.sample(MIDDLE, 1), *rng.sample(SHORT, 1), *rng.sample(LONG, 2), *rng.sample(SHORT, 2)]
    text, offsets, spans = _laid_out(words)
    offsets, tags = [(0, 0), *offsets, (0, 0)], ["B-PER", "O", "B-LOC", "I-LOC", "B-ORG", "O"]
    held = [[t for t, (a, b) in enumerate(offsets) if a < end and b > start] for start, end in spans]
    within = [[t for t, (a, b) in enumerate(offsets) if start <= a < b <= end][-1:] for start, end in spans]

    def placed(places: list[list[int]], numbers: list[int]) -> list[int]:
        at = {t: number for tokens, number in zip(places, numbers, strict=True) for t in tokens}
        return [at.get(t, IGNORED) for t in range(len(offsets))]

    numbers = [NUMBERS[each] for each in tags]
    wanted, on_first = placed([each[-1:] for each in held], numbers), placed([each[:1] for each in held], numbers)
    full = [NUMBERS["O"] if each == IGNORED else each for each in wanted]
    suspects = {
        "Your labels stand on the first token of a word. A causal model has not read the word there yet.": on_first,
        "Your words have a label on each of their tokens: long words count more.": placed(held, numbers),
        f"Your tokens without a label count as O. They are to count nowhere: {IGNORED}.": full,
        "You ask for tokens that lie wholly within a word. The first one may hold a space.": placed(within, numbers),
        "Your labels are one too far left: the first token of the row stands for no character.": [*wanted[1:], IGNORED],
    }
    expect_equal(_plain(answer(offsets, spans, tags, NUMBERS)), wanted, f"the labels of {text!r}", suspects)


@A4.also("a4_token_labels", points=1, hidden=True)
def a_shared_letter_and_a_cut_row(answer: Answer, variant: Variant) -> None:
    offsets, spans = [(0, 2), (2, 3), (2, 3), (3, 8)], [(0, 3), (4, 8)]  # two tokens for the last letter of a word
    suspects = {"Two tokens of one letter both have the label: only the last of a word is to.": [IGNORED, 1, 1, 3]}
    found, wanted = _plain(answer(offsets, spans, ["B-PER", "B-LOC"], NUMBERS)), [IGNORED, IGNORED, 1, 3]
    expect_equal(found, wanted, f"the labels over {offsets}, where two tokens share a letter,", suspects)
    words = variant.rng("cut").sample([*LONG, *MIDDLE, *SHORT], 4)
    _, offsets, spans = _laid_out(words)
    first, second = len(words[0]), len(words[1])
    wanted = [IGNORED] * (first - 1) + [1] + [IGNORED] * (second - 1) + [2]
    found = answer(offsets[: first + second], spans, ["B-PER", "I-PER", "O", "O"], NUMBERS)
    expect_equal(_plain(found), wanted, "the labels of a row that was cut after two of four words")


@A4.exercise("a4_entity_f1", "Whole entities", answer="entity_f1", points=3, difficulty=3, minutes=13)
def found_whole(answer: Answer, variant: Variant) -> None:
    def drawn(rng: random.Random) -> tuple[tuple, Any, dict[str, Any]]:
        gold, said = map(list, zip(*(_said(rng) for _ in range(4)), strict=True))
        there, given = _found(gold), _found(said)
        words = [pair for each in zip(gold, said, strict=True) for pair in zip(*each, strict=True)]
        same, tagged = sum(a == b for a, b in words), sum((a != "O") + (b != "O") for a, b in words)
        both = sum(a == b != "O" for a, b in words)
        by_text = sum(_f1([a], [b]) for a, b in zip(gold, said, strict=True)) / len(gold)
        precision, recall = (len(there & given) / max(len(each), 1) for each in (given, there))
        suspects = {
            "You count words. Most words are O, so a model that finds nothing looks good.": same / len(words),
            "You count tags. Half a name is then half right; it has to be found whole.": 2 * both / max(tagged, 1),
            "Your entities have no kind: a place taken for a person counts as found.": _f1(gold, said, kinds=False),
            "You take the mean over sentences. Add up what was found in all, and divide once.": by_text,
            "Your entities have lost their sentence: one of another sentence counts.": _f1(gold, said, numbered=False),
            "This is your precision: what was missed costs nothing.": precision,
            "This is your recall: what was invented costs nothing.": recall,
            "An I with nothing of its kind before it begins an entity. Yours is lost.": _f1(gold, said, strays=False),
        }
        return (gold, said), _f1(gold, said), suspects

    (gold, said), score, suspects = _told_apart(variant, "entities", drawn)
    expect_number(answer(gold, said), score, f"the F1 of the entities of {len(gold)} sentences", suspects)


@A4.also("a4_entity_f1", points=1, hidden=True)
def neighbours_and_nothing(answer: Answer, variant: Variant) -> None:
    kind, other = variant.rng("kinds").sample(("PER", "LOC", "ORG"), 2)
    b, i, begun, stray = f"B-{kind}", f"I-{kind}", f"B-{other}", f"I-{other}"
    suspects = {"Your B goes on with a name before it. Two names in a row are two entities.": 1.0}
    expect_number(answer([[b, b, "O"]], [[b, i, "O"]]), 0.0, f"the F1 of {[b, i]} where {[b, b]} is right", suspects)
    suspects = {"Your I of another kind goes on with the name before it. It begins an entity of its own.": 0.0}
    expect_number(answer([[b, begun]], [[b, stray]]), 1.0, f"the F1 of {[b, stray]} for {[b, begun]}", suspects)
    for gold in ([b, i, "O"], ["O", "O", "O"]):
        expect_number(answer([gold], [["O"] * 3]), 0.0, f"the F1 where nothing was found of {gold}")


@A4.exercise("a4_windows", "A long text, in windows", answer="windows", points=2, difficulty=3, minutes=10)
def the_overlap(answer: Answer, variant: Variant) -> None:
    rng = variant.rng("windows")
    room, step = rng.randint(9, 14), rng.choice((3, 4))
    n = room + rng.randint(3, 8) * step + rng.randint(1, step - 1)
    wanted, full, all_ = _windows(n, room, step), range(0, n - room + 1, step), range(0, n, step)
    suspects = {
        "Your windows share `step` tokens. It says how far on the next one starts.": _windows(n, room, room - step),
        "Your last window is missing, and with it the end of the text.": [(a, a + room) for a in full],
        "Your last windows hold nothing new: stop once one reaches the end.": [(a, min(a + room, n)) for a in all_],
        "Your last window ends beyond the text.": [(a, a + room) for a, _ in wanted],
        "You have moved the last window back. Let it be shorter.": [*wanted[:-1], (n - room, n)],
        "Your second number is the last token. It is to be the one after it.": [(a, b - 1) for a, b in wanted],
        "Your windows have no token in common: where does `step` enter?": _windows(n, room, room),
    }
    expect_equal(_plain(answer(n, room, step)), wanted, f"windows({n}, {room}, {step})", suspects)


@A4.also("a4_windows", points=1, hidden=True)
def short_and_exact(answer: Answer, variant: Variant) -> None:
    room = variant.whole("room", 5, 9)
    for n, step in ((room, 2), (room - 2, 2), (room + 4, 2), (room + 4, 4), (3 * room, room), (3 * room + 1, room)):
        expect_equal(_plain(answer(n, room, step)), _windows(n, room, step), f"windows({n}, {room}, {step})")


@A4.exercise("a4_best_answer", "The answer, in characters", answer="best_answer", points=3, difficulty=5, minutes=22)
def one_window(answer: Answer, variant: Variant) -> None:
    def drawn(rng: random.Random) -> tuple[tuple, Any, dict[str, Any]]:
        text, rows = _rows(rng, nulls=(-9.0,))
        offsets, start, end = rows[0]
        here = [t for t, place in enumerate(offsets) if place]
        t = rng.randint(4, len(here) - 12)  # where each of the mistakes is to find something better
        for at, more, scores in ((0, 8, start), (12, 9, start), (2, 8, end), (3, 9, end), (9, 11, end)):
            scores[t + at] += more

        best = {}  # by how many tokens it may have
        for longest in (LONGEST - 1, LONGEST, LONGEST + 1, len(offsets)):
            pairs = [(i, j) for i in here for j in here if i <= j < i + longest]
            best[longest] = max(pairs, key=lambda pair: start[pair[0]] + end[pair[1]])
        by_start, by_end = max(here, key=lambda t: start[t]), max(here, key=lambda t: end[t])
        after = max((t for t in here if by_start <= t < by_start + LONGEST), key=lambda t: end[t])
        tokens = {
            "You take the best start and the best end. Do they fit each other?": (by_start, by_end),
            "You take the best start, and then an end for it. A better pair may begin elsewhere.": (by_start, after),
            "Your answer is too long: `longest` counts the first and the last token, too.": best[LONGEST + 1],
            "Your longest answer is a token short: from i to j there are j - i + 1 tokens.": best[LONGEST - 1],
            "Your answer is as long as it likes: where does `longest` enter?": best[len(offsets)],
            "": best[LONGEST],
        }
        begins = {said: offsets[i][0] for said, (i, _) in tokens.items()}
        suspects = {said: (a + text[a].isspace(), offsets[tokens[said][1]][1]) for said, a in begins.items()}
        wanted = suspects.pop("")
        suspects["Your answer begins with a space, which its first token holds."] = (begins[""], wanted[1])
        suspects["Your numbers are those of tokens. Characters of the text are asked for."] = best[LONGEST]
        suspects["You say that there is no answer, where one scores higher. Or is there no return?"] = None
        return (text, rows), wanted, suspects

    (text, rows), _, suspects = _told_apart(variant, "one window", drawn)
    expect_equal(_answered(answer, text, rows), _decoded(text, rows), f"best_answer({text!r}, ...)", suspects)


@A4.also("a4_best_answer", points=1)
def no_answer(answer: Answer, variant: Variant) -> None:
    text, rows = _rows(variant.rng("no answer"), nulls=(9.0,))
    found, likely = _answered(answer, text, rows), "You always answer. The last token of a row stands for no answer."
    expect(found is None, "None where no answer scores highest", repr(found), likely)
    text, rows = _rows(variant.rng("an answer"), nulls=(-9.0,))
    found, likely = _answered(answer, text, rows), "You never answer."
    expect(found is not None, "an answer where one scores highest", "None", likely)


@A4.also("a4_best_answer", points=1, hidden=True)
def several_windows(answer: Answer, variant: Variant) -> None:
    text, rows = _rows(variant.rng("several"), nulls=(30.0, 0.5, 12.0))
    t = variant.whole("where", 4, 7)  # in the second row, which has three tokens of a question first
    rows[1][1][t], rows[1][2][t + 1] = 9.0, 8.0
    likely = "A window without the answer rightly says so. Only the lowest `no answer` of all windows counts."
    expect_equal(_answered(answer, text, rows), _decoded(text, rows), "the answer in window 2 of 3", {likely: None})
    rows[1][1][-1] = rows[1][2][-1] = 15.0
    found = _answered(answer, text, rows)
    expect(found is None, "None where every window says that there is no answer", repr(found))


@A4.exercise("a4_compare", "What may be claimed", answer="compare", points=2, difficulty=4, minutes=12)
def the_interval(answer: Answer, variant: Variant) -> None:
    one, other, seeds, texts = _results(variant, "interval", gap := 0.03)
    gaps, apart = _gaps(one, other, seeds, texts), one - other
    wanted = (gap, *_edges(gaps))
    alone = [float(one[s][:, t].mean() - other.mean()) for s, t in zip(seeds, texts, strict=True)]
    only_texts, only_seeds = apart.mean(0)[texts].mean(1), apart.mean(1)[seeds].mean(1)
    suspects = {
        "Your signs are turned over: it is `one` minus `other`.": (-gap, -wanted[2], -wanted[1]),
        "Only your texts are drawn. With other seeds you would have other models.": (gap, *_edges(only_texts)),
        "Only your seeds are drawn. Other texts would be easier or harder.": (gap, *_edges(only_seeds)),
        "Your `other` is not drawn along: the same text and the same seed, in both.": (gap, *_edges(alone)),
        "Your interval leaves out 5 % on each side. For 95 % it is 2.5 %.": (gap, *_edges(gaps, 0.05)),
        "Your interval goes from the smallest to the largest draw: one odd draw decides.": (gap, *_edges(gaps, 0.0)),
        "Your gap is the mean of the draws. It is to be the observed one.": (float(gaps.mean()), *wanted[1:]),
    }
    found = _compared(answer, one, other, seeds, texts)
    likely = next((text for text, each in suspects.items() if np.allclose(found[:3], each, 0, 1e-6)), None)
    for name, came, right in zip(("gap", "low", "high"), found[:3], wanted, strict=True):
        expect(abs(came - right) < 1e-6, f"the {name} to be {right:.6g}", f"{came:.6g}", likely)


@A4.also("a4_compare", points=1)
def what_is_claimed(answer: Answer, variant: Variant) -> None:
    over = "You name the larger mean. With zero inside the interval, the next runs may turn it over."
    end = "You look at one end of the interval only: wholly below zero is a result, too."
    for gap, wanted, likely in ((0.004, None, over), (0.2, "one", None), (-0.2, "other", end)):
        results = _results(variant, f"claim {gap}", gap)
        low, high = _edges(_gaps(*results))
        claim = _compared(answer, *results)[3]
        if claim not in ("one", "other", None):
            likely = 'The claim is the string "one" or "other", or None itself.'
        expect(claim == wanted, f"the claim {wanted!r} from {low:.3f} to {high:.3f}", repr(claim), likely)


@A4.also("a4_compare", points=1, hidden=True)
def an_end_at_zero(answer: Answer, variant: Variant) -> None:
    one, _, seeds, texts = _results(variant, "touches", 0.0)
    better = one + 0.5 * (torch.arange(40) == 0)  # on one text of many: some draws do not hold it, and their gap is 0
    claim = _compared(answer, better, one, seeds, texts)[3]
    expect(claim is None, "None to be claimed of an interval that begins at 0", repr(claim), "Zero is inside: < or <=?")


def _told_apart(variant: Variant, name: str, draw: Callable) -> tuple[tuple, Any, dict[str, Any]]:
    """The first drawn case in which the right value and those of all suspects differ."""
    rng = variant.rng(name)
    while True:
        case, wanted, suspects = draw(rng)
        said = [repr(round(each, 5) if isinstance(each, float) else each) for each in (wanted, *suspects.values())]
        if len(set(said)) == len(said):
            return case, wanted, suspects


def _judge_layer(answer: Answer, n: int, w: int, layer: int, every: int) -> None:
    back = (torch.arange(n)[:, None] - torch.arange(n)[None, :]).abs()
    whole, local = masks.bidirectional().dense(n), masks.sliding_window(w, causal=False).dense(n)
    wanted = whole if layer % every == every - 1 else local
    suspects = {
        f"Your window reaches {w} to a side. The causal one held {w} tokens, itself counted.": back <= w,
        "Your mask is causal still: where is the right side?": wanted.tril(),
        "Your window has shrunk: a local layer is to look as far as before, now to both sides.": back <= w // 2,
        f"Your layer {layer} is global. In a group of layers the global one comes last.": whole if layer != 1 else None,
        "Your local layers have lost their window.": whole,
        "Your global layer has a window. Count the layers again, from 0.": local,
    }
    what = f"layer_mask({n}, {w}, layer={layer}, every={every})"
    expect_tensor(answer(n, w, layer, every), wanted, what, suspects, names=("query", "key"))


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scalar: int) -> Tensor:
    how = {"attn_mask": mask, "scale": scalar**-0.5, "enable_gqa": True}
    return scaled_dot_product_attention(q[None], k[None], v[None], **how)[0]


def _laid_out(words: list[tuple[str, ...]]) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
    """A text, where its tokens stand (the first of a word with the space before it), and where its words stand."""
    text, offsets, spans = "", [], []
    for pieces in words:
        spans.append((len(text) + bool(text), len(text) + bool(text) + len("".join(pieces))))
        for piece in (" " * bool(text) + pieces[0], *pieces[1:]):
            offsets.append((len(text), len(text) + len(piece)))
            text += piece
    return text, offsets, spans


def _said(rng: random.Random) -> tuple[list[str], list[str]]:
    """Tags of a sentence, and what a model makes of them."""
    gold = []
    for _ in range(rng.randint(4, 6)):
        kind = rng.choice(("PER", "LOC"))
        gold += rng.choice((["O"], [f"B-{kind}"], [f"B-{kind}", f"I-{kind}"]))
    wrong = {tag: ["O", f"I{tag[1:]}", f"{tag[:2]}ORG"] if tag != "O" else ["B-PER"] for tag in gold}
    return gold, [rng.choice(wrong[tag]) if rng.random() < 0.3 else tag for tag in gold]


def _found(texts: list[list[str]], kinds: bool = True, strays: bool = True, numbered: bool = True) -> set[tuple]:
    all_ = [(k, tags, entity) for k, tags in enumerate(texts) for entity in entities_of(tags)]
    kept = [(k, entity) for k, tags, entity in all_ if strays or tags[entity[0]].startswith("B")]
    return {(k * numbered, start, end, kind * kinds) for k, (start, end, kind) in kept}


def _f1(gold: list[list[str]], said: list[list[str]], **how: bool) -> float:
    there, given = _found(gold, **how), _found(said, **how)
    return 2 * len(there & given) / max(len(there) + len(given), 1)


def _windows(n: int, room: int, step: int) -> list[tuple[int, int]]:
    """By their number, and not by going along: another way than the solution's."""
    return [(k * step, min(k * step + room, n)) for k in range(1 - (-max(n - room, 0) // step))]


def _rows(rng: random.Random, nulls: tuple[float, ...]) -> tuple[str, list[tuple]]:
    """A text, and rows of it: a question of three tokens, which scores high, a piece of the text, and "no answer"."""
    text, offsets, _ = _laid_out(rng.sample([*LONG, *MIDDLE, *SHORT], 14))
    pieces = [offsets] if len(nulls) == 1 else [offsets[:7], offsets[4:11], offsets[8:]]
    rows = []
    for piece, null in zip(pieces, nulls, strict=True):
        start, end = ([rng.gauss(4 * (t < 3), 2) for t in range(len(piece) + 3)] + [null] for _ in range(2))
        rows.append(([None] * 3 + piece + [None], start, end))
    return text, rows


def _decoded(text: str, rows: list[tuple]) -> tuple[int, int] | None:
    """What labkit's own decoder says, which weighs all spans at once."""
    windows = [qa.Window((0,) * len(row[0]), 0, tuple(row[0]), 0, 0, len(row[0]) - 1) for row in rows]
    starts, ends = ([np.array(row[k]) for row in rows] for k in (1, 2))
    found = qa.decode(windows, starts, ends, [Question("q", "?", text)], max_answer_tokens=LONGEST)[0]
    return (found.start, found.end) if found.text else None


def _answered(answer: Answer, text: str, rows: list[tuple]) -> Any:
    try:
        found = _plain(answer(text, rows, LONGEST))
    except Mistake as mistake:
        likely = "Your span begins or ends at a token that is not of the context: its offset is None."
        raise Mistake(mistake.expected, mistake.came, likely if "NoneType" in mistake.came else None) from None
    found = tuple(found) if isinstance(found, list) else found
    pair = isinstance(found, tuple) and len(found) == 2 and all(isinstance(each, int | float) for each in found)
    likely = "Asked for are two numbers and nothing beside them, or None itself."
    if isinstance(found, str):
        likely = "You return the words. Asked for is where they stand in the text, from a to b."
    expect(pair or found is None, "a pair (a, b) of places in the text, or None", repr(found)[:200], likely)
    return found


def _results(variant: Variant, name: str, gap: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (4 seeds, 40 texts) of two arms whose means lie `gap` apart, and which seeds and texts are drawn."""
    generator = torch.Generator().manual_seed(variant.seed(name))
    sizes = ((4, 40), (4, 1), (4, 40), (4, 1), (1, 40))
    noise = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    one, other = (0.5 + 0.2 * noise[4] + 0.1 * noise[k] + 0.03 * noise[k + 1] for k in (0, 2))
    drawn = (torch.randint(n, (200, n), generator=generator) for n in (4, 40))
    return one + gap - (one - other).mean(), other, *drawn


def _gaps(one: Tensor, other: Tensor, seeds: Tensor, texts: Tensor) -> np.ndarray:
    """By how often each seed and each text was drawn: another way than the solution's."""
    often = [one_hot(drawn, drawn.shape[1]).double().mean(1) for drawn in (seeds, texts)]
    return torch.einsum("ds,st,dt->d", often[0], one - other, often[1]).numpy()


def _edges(gaps: Any, left_out: float = 0.025) -> tuple[float, float]:
    return tuple(float(each) for each in np.quantile(np.asarray(gaps), (left_out, 1 - left_out)))


def _compared(answer: Answer, *results: Tensor) -> tuple:
    found = answer(*results)
    if not isinstance(found, list | tuple) or len(found) != 4:
        raise Mistake("compare(...) to return (gap, low, high, claim)", repr(found)[:200])
    return (*(float(each) for each in found[:3]), found[3])


def _plain(found: Any) -> Any:
    """Lists for tensors, arrays and tuples, with tuples inside."""
    if isinstance(found, list | tuple):
        found = [each.tolist() if isinstance(each, Tensor | np.ndarray) else each for each in found]
    found = found.tolist() if isinstance(found, Tensor | np.ndarray) else found
    return [tuple(each) if isinstance(each, list) else each for each in found] if isinstance(found, list) else found
