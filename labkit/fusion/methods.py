"""The twelve methods of answering from several paraphrases of one question, as data.

Joined methods put the paraphrases of a question side by side in one row. They differ in the mask, the positions and the
weights of the paraphrases. The other methods give each paraphrase its own row and combine what the rows predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.errors import DataError

UNIFORM, GIVEN = "uniform", "given"  # weights of paraphrases: 1 / N each, or the caller's


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        meaning: what it does, as a sentence without a subject.
        joined: one row per question; otherwise one row per paraphrase.
        isolated: no paraphrase attends to another. restart: each paraphrase begins at the position behind the prefix.
        weights: UNIFORM, GIVEN or None. The logarithm of a weight is added to the attention scores of the paraphrase's
            keys, when the cue and the answer attend to them.
        combine: rule by which the rows of a question agree on the next token (`combine`).
        votes: each row generates its own answer, and the answers are counted.
        averages_states: the rows of a question share the mean of their hidden states in one layer.
    """

    name: str
    meaning: str
    joined: bool = True
    isolated: bool = True
    restart: bool = True
    weights: str | None = None
    combine: str | None = None
    votes: bool = False
    averages_states: bool = False


METHODS = {
    method.name: method
    for method in (
        Method("single", "answers the first paraphrase alone"),
        Method("concat", "reads all paraphrases as one text", isolated=False, restart=False),
        Method("isolate", "isolates the paraphrases; positions continue from one to the next", restart=False),
        Method("isolate+restart", "isolates the paraphrases, and each begins at the same position"),
        Method("fuse", "as isolate+restart, and each paraphrase weighs 1/N", weights=UNIFORM),
        Method("weighted", "as fuse, with a weight for each paraphrase", weights=GIVEN),
        Method("logit-average", "averages the logits over the paraphrases", False, combine="average"),
        Method("logit-max", "takes the highest logit of each token over the paraphrases", False, combine="max"),
        Method(
            "confidence-average",
            "averages log-probabilities, weighted by the probability of each paraphrase's best token",
            False,
            combine="confidence-average",
        ),
        Method(
            "confidence-max",
            "takes the highest probability of each token, times the probability of that paraphrase's best token",
            False,
            combine="confidence-max",
        ),
        Method("majority-vote", "answers each paraphrase and counts the answers", False, votes=True),
        Method(
            "hidden-average",
            "averages one layer's hidden states over the paraphrases, then the logits",
            False,
            combine="average",
            averages_states=True,
        ),
    )
}


def method_named(name: str) -> Method:
    """The method with this name. Raises DataError with all names if there is none."""
    if name not in METHODS:
        raise DataError(f"the fusion method is {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def combine(rule: str | None, logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Logits (rows, vocab) -> scores (questions, vocab); question i has counts[i] rows. None: one row per question."""
    if rule is None:
        return logits
    return torch.stack([_combine_rows(rule, rows) for rows in logits.split(list(counts))])


def _combine_rows(rule: str, logits: Tensor) -> Tensor:
    """(rows, vocab) -> (vocab,)"""
    if rule == "average":
        return logits.mean(0)
    if rule == "max":
        return logits.amax(0)
    log_probs = logits.log_softmax(-1)
    confidence = log_probs.amax(-1, keepdim=True)  # (rows, 1), of the best token
    if rule == "confidence-average":
        return (confidence.softmax(0) * log_probs).sum(0)
    return (log_probs + confidence).amax(0)
