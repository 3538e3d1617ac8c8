"""The ways to answer from several paraphrases of one question, as data.

Joined methods lay the paraphrases side by side in one row, and differ in what sees what, where positions begin, and how
much a paraphrase weighs. The others give each paraphrase a row for itself and put together what the rows say.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import FusionError

NONE, UNIFORM, GIVEN = "none", "uniform", "given"  # where the weights of the paraphrases come from


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        meaning: what it does, as a sentence without a subject.
        joined: one row per question, the paraphrases side by side in it; otherwise one row per paraphrase.
        isolated: no paraphrase sees another. restart: each begins at the position behind the prefix.
        weights: what the keys of a paraphrase weigh: NONE, each 1; UNIFORM, 1 / N; GIVEN, the caller's. The logarithm
            of a weight is added to the attention scores of the paraphrase's keys.
        combine: how the rows of a question agree on the next token (`labkit.fusion.combine`); None where there is one.
        votes: whether each row writes an answer of its own and the answers are counted.
        averages_states: whether the rows of a question share the mean of their hidden states in one layer.
    """

    name: str
    meaning: str
    joined: bool
    isolated: bool = True
    restart: bool = True
    weights: str = NONE
    combine: str | None = None
    votes: bool = False
    averages_states: bool = False


_ALL = (
    Method("single", "answers the first paraphrase alone", joined=True),
    Method("concat", "reads all paraphrases as one text", joined=True, isolated=False, restart=False),
    Method(
        "isolate", "lets no paraphrase see another; positions go on from one to the next", joined=True, restart=False
    ),
    Method("isolate+restart", "lets none see another, and each begins at the same position", joined=True),
    Method("fuse", "as isolate+restart, and each paraphrase weighs 1/N", joined=True, weights=UNIFORM),
    Method("weighted", "as fuse, with a weight for each paraphrase", joined=True, weights=GIVEN),
    Method("logit-average", "averages the logits of the next token over the paraphrases", False, combine="average"),
    Method("logit-max", "takes the highest logit that any paraphrase gives a token", False, combine="max"),
    Method(
        "confidence-average",
        "averages log-probabilities, weighted by how sure of its best token each paraphrase is",
        False,
        combine="confidence-average",
    ),
    Method(
        "confidence-max",
        "takes the highest probability that any paraphrase gives a token, times how sure that paraphrase is",
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

METHODS = {method.name: method for method in _ALL}


def method_named(name: str) -> Method:
    """The method called so. Raises FusionError with all names if there is none."""
    if name not in METHODS:
        raise FusionError(f"the fusion method is {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]
