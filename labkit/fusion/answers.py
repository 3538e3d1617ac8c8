"""Feather files of answers: one row per question, and how they were made; with their scores.

answers = read_answers("out.feather")
summary(judged(answers))["accuracy"]
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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

    def scored(self, lemmatised: bool = False) -> scores.Scored:
        """Which questions are answered correctly. Those without accepted answers are left out; DataError if all are."""
        rows = [row for row in self.rows if row["answers"]]
        relations = tuple(row.get("relation") for row in rows)
        correct = tuple(bool(row["correct_lemmatised" if lemmatised else "correct"]) for row in rows)
        return scores.Scored(tuple(row["id"] for row in rows), correct, relations if any(relations) else ())


def read_answers(path: str | Path) -> Answers:
    """The answers in a Feather file of `labkit fuse`, or in one with at least the columns `NEEDED`.

    Raises:
        DataError: no such file, not a Feather file, or columns that are missing or of another type.
    """
    require_pyarrow()
    import pyarrow
    from pyarrow import feather

    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path} is not a file; give a Feather file of labkit fuse")
    with reading(f"the Feather file {path}", DataError):
        table = feather.read_table(path)
        about = json.loads((table.schema.metadata or {}).get(ABOUT, "{}"))
        rows = table.to_pylist()
        pyarrow.Table.from_pylist(rows, _schema())
    if missing := [name for name in NEEDED if name not in table.column_names]:
        raise DataError(f"{path} has no column {missing[0]!r}; a file of answers has {', '.join(NEEDED)}")
    rows = [row | ({"votes": dict(row["votes"])} if row.get("votes") else {}) for row in rows]
    return Answers(path, rows, about)


def write_answers(answers: Answers, path: str | Path) -> None:
    """Write the file whole or not at all."""
    require_pyarrow()
    import pyarrow
    from pyarrow import feather

    schema = _schema().with_metadata({ABOUT: json.dumps(answers.about, ensure_ascii=False)})
    rows = [row | {"votes": list((row.get("votes") or {}).items()) or None} for row in answers.rows]
    content = pyarrow.BufferOutputStream()
    feather.write_feather(pyarrow.Table.from_pylist(rows, schema=schema), content)
    write_whole(path, content.getvalue().to_pybytes())


def judged(answers: Answers, lemmatizer: scores.Lemmatizer | None = None) -> Answers:
    """The answers with `correct` and, with a lemmatiser, `correct_lemmatised`; None if there is no accepted answer."""
    rows = []
    for row in answers.rows:
        pair = row["prediction"], row["answers"]
        exact = scores.exact_match(*pair) if row["answers"] else None
        lemmatised = scores.lemmatised_match(*pair, lemmatizer) if row["answers"] and lemmatizer else None
        rows.append(row | {"correct": exact, "correct_lemmatised": lemmatised})
    return Answers(answers.path, rows, answers.about)


def summary(answers: Answers, lemmatised: bool = False) -> dict[str, Any]:
    """n, accuracy with its interval, that of each relation, and seconds per question; ready for JSON.

    `without_answers` counts the questions without an accepted answer, which are not part of n.
    """
    seconds = [row["seconds"] for row in answers.rows if row.get("seconds") is not None]
    without = sum(not row["answers"] for row in answers.rows)
    result: dict[str, Any] = {
        "n": len(answers.rows) - without,
        "without_answers": without,
        "accuracy": None,
        "seconds_per_question": sum(seconds) / len(seconds) if seconds else None,
    }
    if not result["n"] and without:
        return result
    scored = answers.scored(lemmatised)
    result["accuracy"] = asdict(scores.accuracy(scored))
    if scored.relations and None not in scored.relations:
        by_relation = scores.accuracy_by_relation(scored)
        result["macro_accuracy"] = asdict(scores.macro_accuracy(scored))
        result["by_relation"] = {name: asdict(estimate) for name, estimate in by_relation.items()}
    return result


def comparison(one: Answers, other: Answers, lemmatised: bool = False) -> dict[str, Any]:
    """Accuracy of `one` minus that of `other` with its interval, and McNemar's test; ready for JSON.

    Raises:
        DataError: they did not answer the same questions.
    """
    accepted = {row["id"]: row["answers"] for row in other.rows}
    for row in one.rows:
        if accepted.get(row["id"], row["answers"]) != row["answers"]:
            raise DataError(f"question {row['id']!r} has different accepted answers in {one.path} and {other.path}")
    pair = one.scored(lemmatised), other.scored(lemmatised)
    return {"difference": asdict(scores.difference(*pair)), "mcnemar": asdict(scores.mcnemar(*pair))}


def require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ModelError('files of answers need pyarrow: pip install "labkit-bidirectional[fusion]"') from None


def _schema() -> Any:
    import pyarrow as pa

    texts = pa.list_(pa.string())
    kinds = {
        "id": pa.string(), "relation": pa.string(), "paraphrases": texts, "prompt": texts, "answers": texts,
        "generation": pa.string(), "prediction": pa.string(), "correct": pa.bool_(), "correct_lemmatised": pa.bool_(),
        "method": pa.string(), "engine": pa.string(), "seconds": pa.float64(),
        "votes": pa.map_(pa.string(), pa.int32()),
    }  # fmt: skip
    return pa.schema(list(kinds.items()))
