"""Which generated answers are correct, and how certain an accuracy and a difference between two methods are.

An answer is the first line of what was generated. It is compared with the accepted answers as in SQuAD (`exact_match`),
by the lemmas of its words (`lemmatised_match`), or loosely (`starts_with_answer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.datasets.paraphrases import ParaphrasedQuestion
from labkit.errors import DataError, ModelError
from labkit.tasks.qa_scores import normalize as normalised

Lemmatizer = Callable[[str], list[str]]  # the lemmas of a text's words
Match = Callable[[str, Iterable[str]], bool]  # (prediction, answers)
DRAWS = 4000  # bootstrap resamples
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval, and the number of questions."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Scored:
    """Which questions one method answered correctly.

    Attributes:
        ids, correct: (questions,). relations: (questions,), or () if there are none.

    Raises:
        DataError: no question, or one twice.
    """

    ids: tuple[str, ...]
    correct: tuple[bool, ...]
    relations: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.ids:
            raise DataError("there is no question to score")
        if len(set(self.ids)) < len(self.ids):
            twice = next(id for number, id in enumerate(self.ids) if id in self.ids[:number])
            raise DataError(f"question {twice!r} was scored twice; keep one answer of each method")


@dataclass(frozen=True)
class McNemar:
    """Questions by which of two methods answered them correctly, and the p-value of McNemar's exact test."""

    both: int
    only_one: int
    only_other: int
    neither: int
    p: float


# ---- one answer ----------------------------------------------------------------------------------------------------


def first_line(text: str) -> str:
    """The first line that is not empty, without spaces around it; "" if there is none."""
    return next(iter(text.strip().splitlines()), "").strip()


def comparable(text: str) -> str:
    """The text as SQuAD normalises it, or, if nothing is left of it ("?", "The The"), in lower case."""
    return normalised(text) or " ".join(text.lower().split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether the prediction is one of the answers, both `comparable`; an empty prediction never is."""
    predicted = comparable(prediction)
    return bool(predicted) and predicted in [comparable(answer) for answer in _listed(answers)]


def starts_with_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether the first line begins with the words of an answer.

    Looser than `exact_match`: "Paris, of course" counts for "Paris", but so does "York Minster" for "York".
    """
    words = comparable(first_line(text)).split()
    accepted = [comparable(answer).split() for answer in _listed(answers)]
    return any(answer and words[: len(answer)] == answer for answer in accepted)


def holds_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether a text, such as a question, contains an answer in whole words: "of Derby" contains "Derby", not "Der"."""
    words = f" {comparable(text)} "
    return any(answer and f" {answer} " in words for answer in map(comparable, _listed(answers)))


def lemmatised_match(prediction: str, answers: Iterable[str], lemmatizer: Lemmatizer) -> bool:
    """`exact_match`, also with the words of both in their dictionary form ("cities" is "city")."""
    answers = _listed(answers)

    def lemmas(text: str) -> str:
        return comparable(" ".join(lemmatizer(text)))

    if exact_match(prediction, answers):
        return True
    predicted = lemmas(prediction)
    return bool(predicted) and predicted in [lemmas(answer) for answer in answers]


def load_lemmatizer(name: str = "simplemma") -> Lemmatizer:
    """The lemmatiser "simplemma" (English, word by word), or "spacy:en_core_web_sm" (in context).

    Raises:
        DataError: no such lemmatiser. ModelError: it, or its model, is not installed.
    """
    kind, _, model = name.partition(":")
    if kind not in ("simplemma", "spacy") or (kind == "spacy") != bool(model):
        raise DataError(f"the lemmatiser is {name!r}; choose one of simplemma, spacy:MODEL")
    try:
        if kind == "simplemma":
            import simplemma

            return lambda text: [simplemma.lemmatize(word, lang="en") for word in normalised(text).split()]
        import spacy

        pipeline = spacy.load(model, exclude=["ner", "parser"])
    except ImportError:
        command = 'pip install "labkit-bidirectional[fusion]"' if kind == "simplemma" else "pip install spacy"
        raise ModelError(f"{kind} is not installed: {command}") from None
    except OSError:
        raise ModelError(f"spaCy has no model {model!r} here: python -m spacy download {model}") from None
    if not pipeline("cities")[0].lemma_:
        raise DataError(f"spaCy's model {model!r} gives no lemmas; choose one that does, such as en_core_web_sm")
    return lambda text: [token.lemma_ or token.text for token in pipeline(text) if not token.is_punct]


def _listed(answers: Iterable[str]) -> list[str]:
    if isinstance(answers, str):
        raise DataError(f"the answers are one text, {answers!r}; give a list of texts")
    return list(answers)


# ---- all answers of a method ---------------------------------------------------------------------------------------


def score(
    questions: Sequence[ParaphrasedQuestion], predictions: Mapping[str, str], match: Match = exact_match
) -> Scored:
    """The questions judged by `match`; `predictions` by question id. Raises DataError unless each question has one."""
    asked = {question.id for question in questions}
    for id in sorted(asked ^ set(predictions)):
        raise DataError(f"question {id!r} has {'no prediction' if id in asked else 'a prediction but was not asked'}")
    correct = tuple(match(predictions[question.id], question.answers) for question in questions)
    return Scored(tuple(q.id for q in questions), correct, tuple(q.relation for q in questions))


def accuracy(scored: Scored, *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """The share of correct answers, in [0, 1], with a percentile bootstrap over questions.

    If all answers are correct, or none, all resamples are equal; then the interval is the exact binomial one.
    """
    return _mean(np.array(scored.correct, dtype=float), (0.0, 1.0), draws, seed)


def accuracy_by_relation(scored: Scored, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Estimate]:
    """`accuracy` of each relation, sorted by name. Every question has a relation."""
    return {name: _mean(values, (0.0, 1.0), draws, seed) for name, values in _by_relation(scored).items()}


def macro_accuracy(scored: Scored, *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """The mean of the relations' accuracies. Every question has a relation.

    The bootstrap draws relations, and questions within them, so the interval is wider than that of `accuracy`.
    """
    groups = list(_by_relation(scored).values())
    sizes, shares = (np.array([measure(group) for group in groups]) for measure in (len, np.mean))
    if np.all(shares == shares[0]) and shares[0] in (0.0, 1.0):
        return Estimate(float(shares[0]), *_constant(shares[0], len(groups), (0.0, 1.0)), len(scored.ids))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(groups), size=(draws, len(groups)))
    correct = rng.binomial(sizes[drawn], shares[drawn])  # a resample of a relation's questions, (draws, relations)
    return Estimate(float(shares.mean()), *_percentiles((correct / sizes[drawn]).mean(1)), len(scored.ids))


def difference(one: Scored, other: Scored, *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Accuracy of `one` minus that of `other`, with a bootstrap over questions, paired.

    Raises:
        DataError: they did not answer the same questions.
    """
    first, second = _paired(one, other)
    return _mean(first.astype(float) - second, (-1.0, 1.0), draws, seed)


def mcnemar(one: Scored, other: Scored) -> McNemar:
    """McNemar's exact test: is it chance which of the two answered the questions that only one answered correctly?

    Raises:
        DataError: they did not answer the same questions.
    """
    from scipy.stats import binomtest

    first, second = _paired(one, other)
    only_one, only_other = int((first & ~second).sum()), int((second & ~first).sum())
    p = float(binomtest(only_one, only_one + only_other).pvalue) if only_one + only_other else 1.0
    return McNemar(int((first & second).sum()), only_one, only_other, int((~first & ~second).sum()), p)


def _by_relation(scored: Scored) -> dict[str, np.ndarray]:
    relations, correct = np.array(scored.relations), np.array(scored.correct, dtype=float)
    return {str(name): correct[relations == name] for name in np.unique(relations)}


def _paired(one: Scored, other: Scored) -> tuple[np.ndarray, np.ndarray]:
    """Which questions each answered correctly, (questions,) bool, both in the order of `one`."""
    if unpaired := set(one.ids) ^ set(other.ids):
        raise DataError(
            f"the methods did not answer the same questions: {len(unpaired)} have one answer only, such as "
            f"{min(unpaired)!r}; compare them on the same set"
        )
    of_other = dict(zip(other.ids, other.correct, strict=True))
    return np.array(one.correct, dtype=bool), np.array([of_other[id] for id in one.ids], dtype=bool)


def _mean(values: np.ndarray, limits: tuple[float, float], draws: int, seed: int) -> Estimate:
    """The mean of (questions,) values between `limits`, with a percentile bootstrap.

    There are at most three different values, so a resample is a multinomial draw of how often each occurs.
    """
    kinds, counts = np.unique(values, return_counts=True)
    n = len(values)
    if len(kinds) == 1:
        return Estimate(float(kinds[0]), *_constant(kinds[0], n, limits), n)
    drawn = np.random.default_rng(seed).multinomial(n, counts / n, size=draws)  # (draws, kinds)
    return Estimate(float(values.mean()), *_percentiles(drawn @ kinds / n), n)


def _constant(value: float, n: int, limits: tuple[float, float]) -> tuple[float, float]:
    """The interval of a mean of `n` equal values: others can have a share of 1 - 0.025^(1/n) (Clopper-Pearson 1934)."""
    unseen = 1 - ((1 - LEVEL) / 2) ** (1 / n)
    return float(value - unseen * (value - limits[0])), float(value + unseen * (limits[1] - value))


def _percentiles(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
