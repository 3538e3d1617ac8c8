"""Which generated answers are correct, how certain an accuracy and a difference are, and the files of answers.

    answers = read_answers("out.feather")
    summary(judged(answers))["accuracy"]

An answer is the first line of what was generated. It is compared with the accepted answers as in SQuAD (`exact_match`),
or by the lemmas of its words (`lemmatised_match`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from labkit.errors import DataError, ModelError, needs_extra, reading
from labkit.files import write_whole
from labkit.tasks.qa_scores import normalize as normalised

ABOUT = b"labkit"  # key of the schema's metadata that describes how a file was made
NEEDED = ("id", "answers", "prediction")  # the columns that a file of answers must have
Lemmatizer = Callable[[str], list[str]]  # the lemmas of a text's words
Correct = Mapping[str, bool]  # by question: whether one method answered it correctly


# ---- one answer ------------------------------------------------------------------------------------------------------


def first_line(text: str) -> str:
    """The first line that is not empty, without spaces around it; "" if there is none."""
    return next(iter(text.strip().splitlines()), "").strip()


def comparable(text: str) -> str:
    """The text as SQuAD normalises it, or, if nothing is left of it ("?", "The The"), in lower case."""
    return normalised(text) or " ".join(text.lower().split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether the prediction is one of the answers, both `comparable`; an empty prediction never is."""
    return comparable(prediction) in _accepted(answers)


def holds_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether a text, such as a question, contains an answer in whole words: "of Derby" contains "Derby", not "Der"."""
    return any(f" {answer} " in f" {comparable(text)} " for answer in _accepted(answers))


def lemmatised_match(prediction: str, answers: Iterable[str], lemmatizer: Lemmatizer) -> bool:
    """`exact_match`, also with the words of both in their dictionary form ("cities" is "city")."""

    def lemmas(text: str) -> str:
        return comparable(" ".join(lemmatizer(text)))

    return exact_match(prediction, answers) or lemmas(prediction) in _accepted(answers, lemmas)


def _accepted(answers: Iterable[str], form: Callable[[str], str] = comparable) -> list[str]:
    return [text for text in map(form, answers) if text]


def load_lemmatizer(name: str = "simplemma") -> Lemmatizer:
    """The lemmatiser "simplemma" (English, word by word), or "spacy:en_core_web_sm" (in context)."""
    kind, _, model = name.partition(":")
    if kind not in ("simplemma", "spacy") or (kind == "spacy") != bool(model):
        raise DataError(f"the lemmatiser is {name!r}; choose one of simplemma, spacy:MODEL")
    if kind == "simplemma":
        with needs_extra("lab"):
            import simplemma
        return lambda text: [simplemma.lemmatize(word, lang="en") for word in normalised(text).split()]
    try:
        import spacy

        pipeline = spacy.load(model, exclude=["ner", "parser"])
    except ImportError:
        raise ModelError("spaCy is not installed: pip install spacy") from None
    except OSError:
        raise ModelError(f"spaCy has no model {model!r} here: python -m spacy download {model}") from None
    return lambda text: [token.lemma_ or token.text for token in pipeline(text) if not token.is_punct]


# ---- all answers -----------------------------------------------------------------------------------------------------


def accuracy(correct: Iterable[bool]) -> dict[str, float]:
    """The share of correct answers, in [0, 1], with the exact binomial interval (Clopper and Pearson 1934)."""
    from scipy.stats import binomtest

    correct = list(correct)
    interval = binomtest(sum(correct), len(correct)).proportion_ci()
    return _estimate(np.mean(correct), interval.low, interval.high, len(correct))


def paired(one: Correct, other: Correct) -> dict[str, dict[str, float]]:
    """Compare two methods on the same questions; ready for JSON.

    difference: accuracy of `one` minus that of `other`, with a percentile bootstrap over questions. If the difference
        is the same for all questions, so are all resamples; then the interval allows for as many unobserved other
        questions as the exact binomial one.
    mcnemar: the numbers of questions that `both`, `only_one`, `only_other` and `neither` answered correctly, and `p` of
        McNemar's exact test: is it chance which of the two answered the questions that only one answered correctly?

    Raises DataError unless both answered the same questions.
    """
    from scipy.stats import binomtest, bootstrap

    if not one:
        raise DataError("there is no question to score")
    if unpaired := set(one) ^ set(other):
        few = f"{len(unpaired)} have one answer only, such as {min(unpaired)!r}"
        raise DataError(f"the methods did not answer the same questions: {few}; compare them on the same set")
    first = np.array(list(one.values()), dtype=int)  # (questions,)
    second = np.array([other[id] for id in one], dtype=int)
    gaps = (first - second).astype(float)
    if np.ptp(gaps) == 0:
        unseen = binomtest(0, len(gaps)).proportion_ci().high
        low, high = gaps[0] - unseen * (gaps[0] + 1), gaps[0] + unseen * (1 - gaps[0])
    else:
        resampled = bootstrap((gaps,), np.mean, n_resamples=4000, batch=500, method="percentile", random_state=0)
        low, high = resampled.confidence_interval
    neither, only_other, only_one, both = np.bincount(2 * first + second, minlength=4).tolist()
    p = float(binomtest(only_one, only_one + only_other).pvalue) if only_one + only_other else 1.0
    return {
        "difference": _estimate(gaps.mean(), low, high, len(gaps)),
        "mcnemar": {"both": both, "only_one": only_one, "only_other": only_other, "neither": neither, "p": p},
    }


def _estimate(value: float, low: float, high: float, n: int) -> dict[str, float]:
    """A number, its 95 % interval, and the number of questions."""
    return {"value": float(value), "low": float(low), "high": float(high), "n": n}


# ---- files of answers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """Answers to questions: one row per question, and how they were made ({} if unknown)."""

    path: Path
    rows: list[dict[str, Any]]
    about: dict[str, Any]

    def correct(self, lemmatised: bool = False) -> dict[str, bool]:
        """By question whether its answer is correct. Those without accepted answers are left out."""
        column = "correct_lemmatised" if lemmatised else "correct"
        return {row["id"]: bool(row[column]) for row in self.rows if row["answers"]}


def read_answers(path: str | Path) -> Answers:
    """The answers in a Feather file of `labkit fuse`, or in one with the columns `NEEDED`; DataError for any other."""
    require_packages()
    from pyarrow import feather

    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path} does not exist, or is a folder; give a Feather file that labkit fuse wrote")
    with reading(f"the Feather file {path}", DataError):
        table = feather.read_table(path)
    if not set(NEEDED) <= set(table.column_names):
        raise DataError(f"{path} has the columns {table.column_names}; a file of answers has {', '.join(NEEDED)}")
    return Answers(path, table.to_pylist(), json.loads((table.schema.metadata or {}).get(ABOUT, "{}")))


def write_answers(answers: Answers, path: str | Path) -> None:
    """Write the file whole or not at all."""
    import pyarrow
    from pyarrow import feather

    content = pyarrow.BufferOutputStream()
    about = json.dumps(answers.about, ensure_ascii=False)
    table = pyarrow.Table.from_pylist(answers.rows).replace_schema_metadata({ABOUT: about})
    feather.write_feather(table, content)
    write_whole(path, content.getvalue().to_pybytes())


def judged(answers: Answers, lemmatizer: Lemmatizer | None = None) -> Answers:
    """The answers with `correct` and, with a lemmatiser, `correct_lemmatised`; None if there is no accepted answer."""
    rows = []
    for row in answers.rows:
        pair, exact, lemmatised = (row["prediction"], row["answers"]), None, None
        if row["answers"]:
            exact = exact_match(*pair)
            lemmatised = lemmatised_match(*pair, lemmatizer) if lemmatizer else None
        rows.append(row | {"correct": exact, "correct_lemmatised": lemmatised})
    return replace(answers, rows=rows)


def summary(answers: Answers, lemmatised: bool = False) -> dict[str, Any]:
    """n, accuracy with its interval, that of each relation, and seconds per question; ready for JSON.

    `without_answers` counts the questions without an accepted answer, which are not part of n.
    """
    correct = answers.correct(lemmatised)
    relation_of = {row["id"]: row.get("relation") for row in answers.rows}
    seconds = [row["seconds"] for row in answers.rows if row.get("seconds") is not None]
    result = {
        "n": len(correct),
        "without_answers": len(answers.rows) - len(correct),
        "accuracy": accuracy(correct.values()) if correct else None,
        "seconds_per_question": mean(seconds) if seconds else None,
    }
    relations = {relation_of[id] for id in correct}
    if correct and None not in relations:
        result["by_relation"] = {
            name: accuracy(right for id, right in correct.items() if relation_of[id] == name)
            for name in sorted(relations)
        }
    return result


def comparison(one: Answers, other: Answers, lemmatised: bool = False) -> dict[str, Any]:
    """`paired` for two files; DataError unless they answered the same questions and accept the same answers."""
    accepted = {row["id"]: row["answers"] for row in other.rows}
    for row in one.rows:
        if accepted.get(row["id"], row["answers"]) != row["answers"]:
            raise DataError(f"question {row['id']!r} has different accepted answers in {one.path} and {other.path}")
    return paired(one.correct(lemmatised), other.correct(lemmatised))


def require_packages() -> None:
    """Raise ModelError without pyarrow and scipy, before a run and not after it."""
    with needs_extra("lab"):
        import pyarrow  # noqa: F401
        import scipy  # noqa: F401
