"""Whether a generated answer is right, and how sure one can be of an accuracy and of a difference between two methods.

An answer is the first line of what was generated. It is compared with the accepted answers as SQuAD compares them
(`exact_match`), word by word in its dictionary form (`lemmatised_match`), or loosely (`starts_with_answer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.datasets.paraphrases import ParaphrasedQuestion
from labkit.errors import DataError, ModelError
from labkit.tasks.qa_scores import normalize as normalised

LEMMATIZERS = ("simplemma", "spacy:MODEL")

Lemmatizer = Callable[[str], list[str]]  # the lemmas of a text's words
Match = Callable[[str, Iterable[str]], bool]  # (prediction, answers)
DRAWS = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval, and the number of questions that it comes from."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Scored:
    """Which questions one method answered rightly.

    Attributes:
        ids, correct: (questions,). relations: (questions,), or () where none is known.

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
    """How two methods fared on the same questions, and McNemar's exact p-value.

    `p` is the probability, were both equally good, that the questions only one of them answered are shared out at least
    as unevenly as they are: a two-sided binomial test of 1/2.
    """

    both: int
    only_one: int
    only_other: int
    neither: int
    p: float


# ---- one answer ----------------------------------------------------------------------------------------------------


def first_line(text: str) -> str:
    """The first line of a generation that is not empty, without spaces around it; "" if there is none."""
    return next(iter(text.strip().splitlines()), "").strip()


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether the prediction is one of the answers, both normalised; an empty prediction never is.

    What normalises to nothing ("The The", "?") is compared as it is, in lower case.
    """
    said = comparable(prediction)
    return bool(said) and said in [comparable(answer) for answer in _listed(answers)]


def starts_with_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether the first line begins with one of the answers, word by word, both normalised.

    Looser than `exact_match`: "Paris, of course" counts for "Paris", and "York Minster" for "York" too.
    """
    said = comparable(first_line(text)).split()
    return any(
        said[: len(words)] == words for words in (comparable(answer).split() for answer in _listed(answers)) if words
    )


def holds_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether a text, such as a question, contains one of the answers as whole words in a row, both normalised.

    "Joseph Wright of Derby died in ____" contains "Derby", and not "Der".
    """
    said = f" {comparable(text)} "
    return any(f" {words} " in said for words in map(comparable, _listed(answers)) if words)


def lemmatised_match(prediction: str, answers: Iterable[str], lemmatizer: Lemmatizer) -> bool:
    """Whether the prediction is one of the answers, the words of both in their dictionary form ("cities" is "city").

    All that `exact_match` counts, this counts.
    """
    answers = _listed(answers)
    if exact_match(prediction, answers):
        return True
    said = _lemmas(prediction, lemmatizer)
    return bool(said) and said in [_lemmas(answer, lemmatizer) for answer in answers]


def load_lemmatizer(name: str = "simplemma") -> Lemmatizer:
    """What gives the lemmas of a text: "simplemma" (English, word by word), or "spacy:en_core_web_sm" (in context).

    Raises:
        DataError: no such lemmatiser. ModelError: it, or its model, is not installed.
    """
    kind, _, model = name.partition(":")
    if kind == "simplemma" and not model:
        return _simplemma()
    if kind == "spacy" and model:
        return _spacy(model)
    raise DataError(f"the lemmatiser is {name!r}; choose one of {', '.join(LEMMATIZERS)}")


# ---- all answers of a method ---------------------------------------------------------------------------------------


def score(
    questions: Sequence[ParaphrasedQuestion], predictions: Mapping[str, str], match: Match = exact_match
) -> Scored:
    """The questions with their predictions, by id, judged by `match`.

    Raises:
        DataError: not one prediction for each question.
    """
    asked = {question.id for question in questions}
    for id in [*(each.id for each in questions), *predictions]:
        if id not in predictions or id not in asked:
            raise DataError(
                f"question {id!r} has {'no prediction' if id in asked else 'a prediction and is not asked'}"
            )
    correct = tuple(match(predictions[each.id], each.answers) for each in questions)
    return Scored(tuple(each.id for each in questions), correct, tuple(each.relation for each in questions))


def accuracy(scored: Scored, *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """The share of right answers, in [0, 1]; the interval is a bootstrap over questions (percentiles).

    Where all answers are right, or none, each resample is the same; the interval then is the exact binomial one.
    """
    return _over_questions(np.array(scored.correct, dtype=float), (0.0, 1.0), draws, seed)


def accuracy_by_relation(scored: Scored, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Estimate]:
    """`accuracy` of each relation, by its name in alphabetical order. Every question has a relation."""
    return {name: _over_questions(values, (0.0, 1.0), draws, seed) for name, values in _by_relation(scored).items()}


def macro_accuracy(scored: Scored, *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """The mean of the relations' accuracies, each relation counting alike.

    The interval is for other relations of this kind, and other questions of them: a bootstrap that draws relations, and
    the questions within each. It is wider than that of `accuracy`. Every question has a relation.
    """
    groups = list(_by_relation(scored).values())
    sizes = np.array([len(values) for values in groups])
    shares = np.array([values.mean() for values in groups])
    if np.all(shares == shares[0]) and shares[0] in (0.0, 1.0):
        low, high = _constant(float(shares[0]), len(groups), (0.0, 1.0))
        return Estimate(float(shares[0]), low, high, len(scored.ids))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(groups), size=(draws, len(groups)))
    right = rng.binomial(sizes[drawn], shares[drawn])  # so many of a resample of that relation's questions are right
    low, high = _percentiles((right / sizes[drawn]).mean(1))
    return Estimate(float(shares.mean()), low, high, len(scored.ids))


def difference(one: Scored, other: Scored, *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Accuracy of `one` minus that of `other`; the interval is a bootstrap over questions, the same for both methods.

    Where no question tells them apart each resample is the same; the interval then is what so many questions without a
    difference leave open.

    Raises:
        DataError: they did not answer the same questions.
    """
    first, second = _same_questions(one, other)
    return _over_questions(first.astype(float) - second.astype(float), (-1.0, 1.0), draws, seed)


def mcnemar(one: Scored, other: Scored) -> McNemar:
    """McNemar's exact test of two methods on the same questions; DataError if they are not the same."""
    from scipy.stats import binomtest

    first, second = _same_questions(one, other)
    only_one, only_other = int((first & ~second).sum()), int((second & ~first).sum())
    n = only_one + only_other
    p = float(binomtest(only_one, n).pvalue) if n else 1.0
    return McNemar(int((first & second).sum()), only_one, only_other, int((~first & ~second).sum()), p)


def comparable(text: str) -> str:
    """The text as SQuAD normalises it, or, if nothing is left of it ("?", "The The"), in lower case."""
    return normalised(text) or " ".join(text.lower().split())


def _listed(answers: Iterable[str]) -> list[str]:
    if isinstance(answers, str):
        raise DataError(f"the answers are one text, {answers!r}; give a list of texts")
    return list(answers)


def _lemmas(text: str, lemmatizer: Lemmatizer) -> str:
    return comparable(" ".join(lemmatizer(text)))


def _simplemma() -> Lemmatizer:
    try:
        import simplemma
    except ImportError:
        raise ModelError('lemmas need simplemma: pip install "labkit-bidirectional[fusion]"') from None
    return lambda text: [simplemma.lemmatize(word, lang="en") for word in normalised(text).split()]


def _spacy(model: str) -> Lemmatizer:
    try:
        import spacy
    except ImportError:
        raise ModelError("lemmas in context need spaCy, which is not installed: pip install spacy") from None
    try:
        pipeline = spacy.load(model, exclude=["ner", "parser"])
    except OSError:
        raise ModelError(
            f"spaCy has no model {model!r} here: python -m spacy download {model}; or use simplemma, which needs none"
        ) from None
    if not pipeline("cities")[0].lemma_:
        raise DataError(
            f"spaCy's model {model!r} gives no lemmas; choose one with a lemmatiser, such as en_core_web_sm"
        )
    return lambda text: [token.lemma_ or token.text for token in pipeline(text) if not token.is_punct]


def _by_relation(scored: Scored) -> dict[str, np.ndarray]:
    groups: dict[str, list[float]] = {}
    for relation, correct in zip(scored.relations, scored.correct, strict=True):
        groups.setdefault(relation, []).append(float(correct))
    return {name: np.array(groups[name]) for name in sorted(groups)}


def _same_questions(one: Scored, other: Scored) -> tuple[np.ndarray, np.ndarray]:
    """Which of the questions each answered rightly, (questions,) bool, both in the order of `one`."""
    if strangers := set(one.ids) ^ set(other.ids):
        raise DataError(
            f"the methods did not answer the same questions: {len(strangers)} have one answer only, such as "
            f"{min(strangers)!r}; compare them on the same set"
        )
    of_other = dict(zip(other.ids, other.correct, strict=True))
    return np.array(one.correct, dtype=bool), np.array([of_other[id] for id in one.ids], dtype=bool)


def _over_questions(values: np.ndarray, ends: tuple[float, float], draws: int, seed: int) -> Estimate:
    """The mean of one value per question, (questions,), each within `ends`; resamples draw questions.

    The values are few (right or not), so a resample is told by how often each of them is drawn: a multinomial draw.
    """
    kinds, counts = np.unique(values, return_counts=True)
    n = len(values)
    if len(kinds) == 1:
        return Estimate(float(kinds[0]), *_constant(float(kinds[0]), n, ends), n)
    drawn = np.random.default_rng(seed).multinomial(n, counts / n, size=draws)  # (draws, kinds)
    return Estimate(float(values.mean()), *_percentiles(drawn @ kinds / n), n)


def _constant(value: float, n: int, ends: tuple[float, float]) -> tuple[float, float]:
    """The interval of a mean of which `n` observations were all `value`.

    Other values could still have a share of up to 1 - 0.025^(1/n), the exact binomial bound of Clopper and Pearson
    (1934), and lie at either end.
    """
    unseen = 1 - ((1 - LEVEL) / 2) ** (1 / n)
    return value - unseen * (value - ends[0]), value + unseen * (ends[1] - value)


def _percentiles(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
