"""From questions to what a model reads: answered examples, one segment for each paraphrase, and the cue.

    Question: Which city is the capital of Japan?     prefix: examples with their answers, seen by all paraphrases
    Answer: Tokyo

    Question: What city is France's capital?          segments, each with the line end that belongs to it
    Question: The capital of France is ____.
    Answer:                                           cue

The prefix ends with an empty line, which belongs to the example above it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.datasets.paraphrases import KNOWN_FACTS, ParaphrasedQuestion, read_known_facts, sample
from labkit.errors import DataError, FusionError

CUE = "Answer:"
SEPARATOR = "\n"


@dataclass(frozen=True)
class Choice:
    """Which paraphrases of a question are read; by default all.

    Attributes:
        first: the first so many. places: those at these places, from 0, in this order.
        repeat: the first chosen one, so many times: a control, since it says nothing new.
        at_least: questions with fewer paraphrases are left out; None: with fewer than the choice needs. Below `first`,
            of some questions fewer than `first` are read.

    Raises:
        FusionError: numbers that have no meaning, alone or together.
    """

    first: int | None = None
    places: tuple[int, ...] | None = None
    repeat: int | None = None
    at_least: int | None = None

    def __post_init__(self) -> None:
        if self.first is not None and (self.places is not None or self.repeat is not None):
            other = "their places" if self.places is not None else "how often one is repeated"
            raise FusionError(f"give the number of paraphrases or {other}, not both")
        if self.places is not None:
            if not self.places or min(self.places) < 0:
                raise FusionError(f"the indexes are {list(self.places)}; give places from 0, such as 0,2,4")
            if len(set(self.places)) < len(self.places):
                raise FusionError(f"the indexes {list(self.places)} name a place twice; to read one often use repeat")
        if self.first is None and self.at_least is not None and self.at_least < self.needed:
            raise FusionError(
                f"at_least is {self.at_least}, and index {self.needed - 1} needs {self.needed} paraphrases: give more"
            )

    @property
    def needed(self) -> int:
        """How many paraphrases a question must have for all of the choice."""
        if self.places is None:
            return self.first or 1
        return (self.places[0] if self.repeat else max(self.places)) + 1

    @property
    def label(self) -> str:
        """A few letters for a file name: "n5", "i0-2-4", "i0x5", "all"."""
        if self.repeat:
            return f"i{self.places[0] if self.places else 0}x{self.repeat}"
        if self.places is not None:
            return "i" + "-".join(map(str, self.places))
        return f"n{self.first}" if self.first else "all"

    def of(self, question: ParaphrasedQuestion) -> tuple[str, ...]:
        """The chosen paraphrases of a question that has enough of them."""
        texts = question.paraphrases
        chosen = texts[: self.first] if self.places is None else tuple(texts[place] for place in self.places)
        return chosen[:1] * self.repeat if self.repeat else chosen

    def able(self, questions: Sequence[ParaphrasedQuestion]) -> list[ParaphrasedQuestion]:
        """The questions that have enough paraphrases. Raises FusionError if there are none."""
        fewest = self.at_least or self.needed
        found = [each for each in questions if len(each.paraphrases) >= fewest]
        if not found:
            most = max((len(each.paraphrases) for each in questions), default=0)
            asked = f"index {fewest - 1}" if self.places is not None and not self.at_least else f"{fewest} paraphrases"
            raise FusionError(
                f"{asked}: none of the {len(questions):,} questions has as many; the most that one has is {most} "
                f"(index 0 to {most - 1})"
            )
        return found


def examples_for(dataset: str) -> str | None:
    """Where the examples for a set come from unless somebody says otherwise: `take_shots` on `examples`.

    For a file of one's own from the facts set apart, so that no question of it is lost; else from the set (None).
    """
    kind = dataset.partition(":")[0]
    own = kind not in (KNOWN_FACTS, "webqa", "lama") and Path(dataset).expanduser().is_file()
    return KNOWN_FACTS if own else None


def take_shots(
    dataset: str, questions: Sequence[ParaphrasedQuestion], k: int, seed: int, examples: str | None = None
) -> tuple[list[ParaphrasedQuestion], list[ParaphrasedQuestion]]:
    """(k examples for the prefix, the questions that remain), no text of an example being a text of those.

    The examples of the embedded facts are the split made for it. From any other set they are drawn, with `seed`, as
    many of each relation as can be, of those with an answer, and taken out. The same set, `k` and `seed` give the same
    examples, whatever the choice of paraphrases.

    Args:
        examples: "known-facts": from the embedded facts, whatever the set. None: from the set.

    Raises:
        DataError: fewer examples than `k`, or no question left.
    """
    if k == 0:
        return [], list(questions)
    apart = examples == KNOWN_FACTS or dataset in (KNOWN_FACTS, f"{KNOWN_FACTS}:test")
    pool = read_known_facts("shots") if apart else [each for each in questions if each.answers]
    if k > len(pool):
        raise DataError(f"{k} few-shot examples were asked for, and there are {len(pool)} to take them from")
    shots = sample(pool, k, seed)
    random.Random(f"{seed} order").shuffle(shots)
    ids = set() if apart else {each.id for each in shots}
    texts = {_folded(text) for each in shots for text in each.paraphrases}
    rest = [each for each in questions if each.id not in ids and texts.isdisjoint(map(_folded, each.paraphrases))]
    if not rest:
        raise DataError(f"no question is left once {k} few-shot examples are taken out of {len(questions)}")
    return shots, rest


def prefix_of(shots: Sequence[ParaphrasedQuestion], seed: int) -> str:
    """The examples as text, each in one of its wordings (drawn with `seed`) and with its usual answer."""
    chosen = [(random.Random(f"{seed} {each.id}").choice(each.paraphrases), each.answers[0]) for each in shots]
    return "".join(f"{asked(text)}{SEPARATOR}{CUE} {answer}\n\n" for text, answer in chosen)


def asked(paraphrase: str) -> str:
    """The segment of a paraphrase, without its separator; a statement keeps its blank."""
    return f"Question: {paraphrase}"


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
