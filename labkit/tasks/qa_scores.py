"""Scores of extractive question answering, as SQuAD's official scripts compute them (Rajpurkar et al. 2016, 2018).

All scores are in percent. Predictions and answers are normalized before they are compared, and the answer that fits
best counts. The right prediction for a question without answers is "". Predictions (`labkit.tasks.qa.Prediction`) are
in the order of their questions.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.datasets.examples import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")


def normalize(text: str) -> str:
    """Lower case, then without ASCII punctuation, then without English articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """100 if the normalized prediction is one of the normalized answers, else 0. Without answers: 100 for ""."""
    return 100.0 * (normalize(prediction) in _normalized(answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over normalized words, for the answer that fits best."""
    words = normalize(prediction).split()
    return 100.0 * max(_overlap(words, answer.split()) for answer in _normalized(answers))


def scores(questions: Sequence[Question], predictions: Sequence[Any]) -> dict[str, float | int]:
    """`exact_match`, `f1` and `n`; if some questions have no answer, also of each kind: "HasAns_...", "NoAns_..."."""
    lines = judged(questions, predictions)
    kinds = {"": lines}
    if not all(line["answerable"] for line in lines):
        kinds["HasAns_"] = [line for line in lines if line["answerable"]]
        kinds["NoAns_"] = [line for line in lines if not line["answerable"]]
    return {
        f"{prefix}{name}": len(kind) if name == "n" else sum(line[name] for line in kind) / len(kind)
        for prefix, kind in kinds.items()
        if kind
        for name in ("exact_match", "f1", "n")
    }


def judged(questions: Sequence[Question], predictions: Sequence[Any]) -> list[dict[str, Any]]:
    """One line per question: `f1` and `exact_match`, whose means are those of `scores`; `id`, `group`, `answerable`."""
    lines = []
    for question, prediction in zip(questions, predictions, strict=True):
        answers = [answer.text for answer in question.answers]
        facts = {"id": question.id, "group": question.group, "answerable": bool(answers)}
        right = {"f1": f1(prediction.text, answers), "exact_match": exact_match(prediction.text, answers)}
        lines.append(facts | right)
    return lines


def best_threshold(questions: Sequence[Question], predictions: Sequence[Any]) -> tuple[float, float]:
    """The `null_threshold` with the best F1 on these questions, and that F1, which decoding with it reproduces.

    Unlike in the official script, questions with equal scores are all answered or none, the threshold lies in the
    middle between two scores, and if it is best to answer none, it does that (the script returns 0).
    """
    gains = [  # of answering a question
        f1(prediction.best_span.text, [answer.text for answer in question.answers]) if question.answers else -100.0
        for question, prediction in zip(questions, predictions, strict=True)
    ]
    diffs, group = np.unique([prediction.null_score_diff for prediction in predictions], return_inverse=True)
    totals = np.cumsum([100.0 * sum(not question.answers for question in questions), *np.bincount(group, gains)])
    between = (diffs[:-1] + diffs[1:]) / 2  # as far as possible from the questions on either side
    thresholds = [min(0.0, diffs[0] - 1.0), *between, diffs[-1]]  # below the lowest no question is answered
    best = int(totals.argmax())
    return float(thresholds[best]), float(totals[best]) / len(questions)


def lexical_overlap(question: Question) -> str:
    """A baseline without a model: the sentence of the context that shares the most words with the question.

    Words are normalized, each counts once, and of equal sentences the first is taken. If this scores well, the
    questions repeat the wording of their contexts.
    """
    words = set(normalize(question.question).split())
    sentences = [sentence for sentence in _SENTENCE_END.split(question.context.strip()) if sentence]
    return max(sentences, key=lambda sentence: len(words & set(normalize(sentence).split())))


def _normalized(answers: Sequence[str]) -> list[str]:
    """The answers that are not empty when they are normalized; "" if there is none."""
    return [text for answer in answers if (text := normalize(answer))] or [""]


def _overlap(prediction: Sequence[str], answer: Sequence[str]) -> float:
    """F1 in [0, 1] of two lists of words; 1 if both are empty."""
    shared = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * shared / (len(prediction) + len(answer)) if prediction or answer else 1.0
