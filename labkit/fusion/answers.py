"""Feather files of answers: one row per question, and how they were made; with their scores.

answers = read_answers("out.feather")
summary(judged(answers))["accuracy"]
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from labkit.errors import DataError, ModelError, reading
from labkit.files import write_whole
from labkit.fusion import scores

ABOUT = b"labkit"  # key of the schema's metadata that describes how the file was made
NEEDED = ("id", "answers", "prediction")


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
    require_pyarrow()
    from pyarrow import feather

    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path} is not a file; give a Feather file of labkit fuse")
    with reading(f"the Feather file {path}", DataError):
        table = feather.read_table(path)
    if missing := [name for name in NEEDED if name not in table.column_names]:
        raise DataError(f"{path} has no column {missing[0]!r}; a file of answers has {', '.join(NEEDED)}")
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


def judged(answers: Answers, lemmatizer: scores.Lemmatizer | None = None) -> Answers:
    """The answers with `correct` and, with a lemmatiser, `correct_lemmatised`; None if there is no accepted answer."""
    rows = []
    for row in answers.rows:
        pair = row["prediction"], row["answers"]
        exact = scores.exact_match(*pair) if row["answers"] else None
        lemmatised = scores.lemmatised_match(*pair, lemmatizer) if row["answers"] and lemmatizer else None
        rows.append(row | {"correct": exact, "correct_lemmatised": lemmatised})
    return replace(answers, rows=rows)


def summary(answers: Answers, lemmatised: bool = False) -> dict[str, Any]:
    """n, accuracy with its interval, that of each relation, and seconds per question; ready for JSON.

    `without_answers` counts the questions without an accepted answer, which are not part of n.
    """
    correct = answers.correct(lemmatised)
    relations = {row["id"]: row.get("relation") for row in answers.rows if row["answers"]}
    seconds = [row["seconds"] for row in answers.rows if row.get("seconds") is not None]
    result = {
        "n": len(correct),
        "without_answers": len(answers.rows) - len(correct),
        "accuracy": asdict(scores.accuracy(correct)) if correct else None,
        "seconds_per_question": sum(seconds) / len(seconds) if seconds else None,
    }
    if correct and None not in relations.values():
        result["by_relation"] = {
            relation: asdict(scores.accuracy({id: correct[id] for id in correct if relations[id] == relation}))
            for relation in sorted(set(relations.values()))
        }
    return result


def comparison(one: Answers, other: Answers, lemmatised: bool = False) -> dict[str, Any]:
    """Accuracy of `one` minus that of `other` with its interval, and McNemar's test; ready for JSON.

    Raises DataError unless they answered the same questions and accept the same answers.
    """
    accepted = {row["id"]: row["answers"] for row in other.rows}
    for row in one.rows:
        if accepted.get(row["id"], row["answers"]) != row["answers"]:
            raise DataError(f"question {row['id']!r} has different accepted answers in {one.path} and {other.path}")
    pair = one.correct(lemmatised), other.correct(lemmatised)
    return {"difference": asdict(scores.difference(*pair)), "mcnemar": scores.mcnemar(*pair)}


def require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ModelError('files of answers need pyarrow: pip install "labkit-bidirectional[fusion]"') from None
