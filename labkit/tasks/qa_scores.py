"""Scores of extractive question answering, as SQuAD's official scripts compute them (Rajpurkar et al. 2016, 2018).

All scores are in percent. Prediction and gold answers are compared normalised, and the gold answer that fits best
counts; a question without answers is answered rightly by "".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from labkit.datasets.examples import Question
from labkit.tasks.qa import Prediction

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")


def normalize(text: str) -> str:
    """Lower case, then without ASCII punctuation, then without English articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """100 if the prediction is one of the answers, both normalised, else 0. No answers: 100 for ""."""
    return 100.0 * _best(_same, prediction, answers)


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over normalised words, of the answer it fits best; 100 for "" if none."""
    return 100.0 * _best(_overlap, prediction, answers)


def scores(questions: Sequence[Question], predictions: Sequence[Prediction]) -> dict[str, float | int]:
    """`exact_match`, `f1` and `n`; with unanswerable questions also each for both kinds, "HasAns_..." and "NoAns_...".

    There is one prediction for each question, by id.
    """
    lines = judged(questions, predictions)
    found = _means(lines, "")
    if not all(line["answerable"] for line in lines):
        for prefix, answerable in (("HasAns_", True), ("NoAns_", False)):
            kind = [line for line in lines if line["answerable"] is answerable]
            found |= _means(kind, prefix) if kind else {}
    return found


def judged(questions: Sequence[Question], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """One line per question: `f1` and `exact_match` in [0, 100], whose means are those of `scores`.

    And what is known of it: `id`, `group`, `answerable`, and `position`, where in the context the first answer begins,
    in [0, 1) (None without one).
    """
    lines = []
    for question, each in _paired(questions, predictions):
        first = question.answers[0].start / max(len(question.context), 1) if question.answers else None
        found = {"f1": f1(each.text, _texts(question)), "exact_match": exact_match(each.text, _texts(question))}
        facts = {"id": question.id, "group": question.group, "answerable": bool(question.answers), "position": first}
        lines.append(facts | found)
    return lines


def best_threshold(questions: Sequence[Question], predictions: Sequence[Prediction]) -> tuple[float, float]:
    """The `null_threshold` that gives the best F1 on these questions, and that F1.

    Decoding with it gives this F1: of questions with the same score all are answered or none, and where it is best to
    answer none, the threshold does that. `find_best_thresh` of the official script, otherwise the same, parts questions
    with the same score, and returns 0 for none. Like there, any span is wrong for a question without answers, though
    `scores` accepts one that normalises to nothing ("The"). A threshold chosen on the same questions is optimistic.
    """
    pairs = sorted(_paired(questions, predictions), key=lambda pair: pair[1].null_score_diff)
    lowest = pairs[0][1].null_score_diff
    total = best = sum(not question.answers for question in questions)  # with none answered
    threshold = 0.0 if lowest > 0 else lowest - 1.0
    for diff, equals in groupby(pairs, key=lambda pair: pair[1].null_score_diff):
        for question, prediction in equals:  # these are answered too, once the threshold is `diff`
            total += _best(_overlap, prediction.best_span.text, _texts(question)) if question.answers else -1
        if total > best:
            best, threshold = total, diff
    return threshold, 100.0 * best / len(pairs)


def lexical_overlap(question: Question) -> str:
    """A baseline that understands nothing: the sentence of the context that shares the most words with the question.

    Words are compared normalised, each counts once, and the first of equal sentences is taken. Where this scores well,
    the questions repeat the wording of their contexts.
    """
    asked = set(normalize(question.question).split())
    sentences = [each for each in _SENTENCE_END.split(question.context.strip()) if each]
    return max(sentences, key=lambda each: len(asked & set(normalize(each).split())))


def _texts(question: Question) -> list[str]:
    return [answer.text for answer in question.answers]


def _paired(questions: Sequence[Question], predictions: Sequence[Prediction]) -> list[tuple[Question, Prediction]]:
    by_id = {each.id: each for each in predictions}
    return [(question, by_id[question.id]) for question in questions]


def _means(lines: Sequence[dict[str, Any]], prefix: str) -> dict[str, float | int]:
    means = {f"{prefix}{name}": sum(line[name] for line in lines) / len(lines) for name in ("exact_match", "f1")}
    return means | {f"{prefix}n": len(lines)}


def _best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    """The best in [0, 1] over the answers of which something is left when they are normalised; "" if there is none."""
    return max(score(prediction, answer) for answer in [each for each in answers if normalize(each)] or [""])


def _same(prediction: str, answer: str) -> float:
    return float(normalize(prediction) == normalize(answer))


def _overlap(prediction: str, answer: str) -> float:
    said, gold = normalize(prediction).split(), normalize(answer).split()
    if not said or not gold:
        return float(said == gold)
    shared = sum((Counter(said) & Counter(gold)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(gold)
    return 2 * precision * recall / (precision + recall)
