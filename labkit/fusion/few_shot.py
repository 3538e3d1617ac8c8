"""Few-shot examples, and the text of a prompt: examples with answers, one segment for each paraphrase, and the cue.

Question: Which city is the capital of Japan?     prefix: examples with their answers
Answer: Tokyo

Question: What city is France's capital?          segments, each with its line end
Question: The capital of France is ____.
Answer:                                           cue
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from labkit.datasets.paraphrases import KNOWN_FACTS, ParaphrasedQuestion, read_known_facts, sample
from labkit.errors import DataError

CUE = "Answer:"
SEPARATOR = "\n"


def examples_for(dataset: str) -> str | None:
    """The default source of examples, as in `take_shots`: known facts for a user's file, so that it loses no question;
    otherwise the data set itself (None).
    """
    kind = dataset.partition(":")[0]
    own = kind not in (KNOWN_FACTS, "webqa", "lama") and Path(dataset).expanduser().is_file()
    return KNOWN_FACTS if own else None


def take_shots(
    dataset: str, questions: Sequence[ParaphrasedQuestion], k: int, seed: int, examples: str | None = None
) -> tuple[list[ParaphrasedQuestion], list[ParaphrasedQuestion]]:
    """(k examples for the prefix, the remaining questions); no question shares a text with an example.

    The embedded facts have a split of examples. From other data sets examples are drawn with `seed`, balanced over
    relations, among the questions with an answer, and removed from the questions.

    Args:
        examples: "known-facts": from the embedded facts, for any data set. None: from the data set.

    Raises:
        DataError: fewer examples than `k`, or no question left.
    """
    if k == 0:
        return [], list(questions)
    separate = KNOWN_FACTS in (examples, dataset) or dataset == f"{KNOWN_FACTS}:test"
    pool = read_known_facts("shots") if separate else [question for question in questions if question.answers]
    if k > len(pool):
        raise DataError(f"{k} few-shot examples were requested, but there are {len(pool)}")
    shots = sample(pool, k, seed)
    random.Random(f"{seed} order").shuffle(shots)
    ids = set() if separate else {shot.id for shot in shots}
    texts = {_folded(text) for shot in shots for text in shot.paraphrases}
    rest = [q for q in questions if q.id not in ids and texts.isdisjoint(map(_folded, q.paraphrases))]
    if not rest:
        raise DataError(f"no question is left when {k} few-shot examples are taken out of {len(questions)}")
    return shots, rest


def prefix_of(shots: Sequence[ParaphrasedQuestion], seed: int) -> str:
    """The examples as text, each with one of its paraphrases, drawn with `seed`, and its first answer."""
    texts = [random.Random(f"{seed} {shot.id}").choice(shot.paraphrases) for shot in shots]
    pairs = zip(texts, shots, strict=True)
    return "".join(f"{asked(text)}{SEPARATOR}{CUE} {shot.answers[0]}\n\n" for text, shot in pairs)


def asked(paraphrase: str) -> str:
    """The segment of a paraphrase, without its separator."""
    return f"Question: {paraphrase}"


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
