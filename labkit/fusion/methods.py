"""The twelve methods of answering from several paraphrases of one question, and the engines, as data.

Joined methods put the paraphrases of a question side by side in one row. They differ in the mask, the positions and the
weights of the paraphrases. The other methods give each paraphrase its own row and combine what the rows predict.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import DataError

ENGINES = {
    "fast": "segments read as one batch, keys and values joined once, ordinary decoding over them",
    "reference": "each row in one piece under FlexAttention",
    "dense": "each row in one piece under a 4-D mask",
    "cacheless": "as dense, but everything is read again for each token, as in the public experiment",
}
UNIFORM, GIVEN = "uniform", "given"  # weights of paraphrases: 1 / N each, or the caller's
VOTE = "vote"  # each row generates its own answer, and the answers are counted


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        meaning: what it does, as a sentence without a subject.
        isolated: no paraphrase attends to another. restart: each paraphrase begins at the position behind the prefix.
        weights: UNIFORM, GIVEN or None. The logarithm of a weight is added to the attention scores of the paraphrase's
            keys, when the cue and the answer attend to them.
        combine: None: the paraphrases are joined in one row. Otherwise each has its own row, and this is VOTE or the
            rule by which the rows agree on the next token (`labkit.fusion.decoding.combine`).
        averages_states: the rows of a question share the mean of their hidden states in one layer.
    """

    name: str
    meaning: str
    isolated: bool = True
    restart: bool = True
    weights: str | None = None
    combine: str | None = None
    averages_states: bool = False

    def require_weights(self, are_given: bool) -> None:
        """Raise DataError if the method needs weights that are not given, or takes none."""
        if (self.weights == GIVEN) != are_given:
            problem = "takes no weights: use 'weighted'" if are_given else "needs a weight for each paraphrase"
            raise DataError(f"the method {self.name!r} {problem}")


METHODS = {
    method.name: method
    for method in (
        Method("single", "answers the first paraphrase alone"),
        Method("concat", "reads all paraphrases as one text", isolated=False, restart=False),
        Method("isolate", "isolates the paraphrases; positions continue from one to the next", restart=False),
        Method("isolate+restart", "isolates the paraphrases, and each begins at the same position"),
        Method("fuse", "as isolate+restart, and each paraphrase weighs 1/N", weights=UNIFORM),
        Method("weighted", "as fuse, with a weight for each paraphrase", weights=GIVEN),
        Method("logit-average", "averages the logits over the paraphrases", combine="average"),
        Method("logit-max", "takes the highest logit of each token over the paraphrases", combine="max"),
        Method(
            "confidence-average",
            "averages log-probabilities, weighted by the probability of each paraphrase's best token",
            combine="confidence-average",
        ),
        Method(
            "confidence-max",
            "takes the highest probability of each token, times the probability of that paraphrase's best token",
            combine="confidence-max",
        ),
        Method("majority-vote", "answers each paraphrase and counts the answers", combine=VOTE),
        Method(
            "hidden-average",
            "averages one layer's hidden states over the paraphrases, then the logits",
            combine="average",
            averages_states=True,
        ),
    )
}
