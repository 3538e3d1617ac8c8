"""A file of answers: Feather, one row per question, with all that says how it was made; and what it amounts to.

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

ABOUT = b"labkit"  # the key of the schema's metadata under which a file says how it was made
NEEDED = ("id", "answers", "prediction")  # columns that scores are made of


@dataclass(frozen=True)
class Answers:
    """A file of answers: its rows, one per question, and how it was made ({} if it does not say)."""

    path: Path
    rows: list[dict[str, Any]]
    about: dict[str, Any]

    def scored(self, lemmatised: bool = False) -> scores.Scored:
        """Which questions are answered rightly, as the rows say; those without accepted answers are left out.

        Raises:
            DataError: none has any.
        """
        rows = [row for row in self.rows if row["answers"]]
        relations = tuple(row.get("relation") for row in rows)
        correct = tuple(bool(row["correct_lemmatised" if lemmatised else "correct"]) for row in rows)
        return scores.Scored(tuple(row["id"] for row in rows), correct, relations if any(relations) else ())


def read_answers(path: str | Path) -> Answers:
    """The rows of a file that `run` wrote, or of another one with the columns that scores are made of.

    Raises:
        DataError: no such file, no Feather file, or without those columns.
    """
    require_pyarrow()
    import pyarrow
    from pyarrow import feather

    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path} is no file; give a Feather file that labkit fuse wrote")
    with reading(f"the Feather file {path}", DataError):
        table = feather.read_table(path)
    if missing := [name for name in NEEDED if name not in table.column_names]:
        raise DataError(f"{path} has no column {missing[0]!r}; a file of answers has {', '.join(NEEDED)}")
    rows = table.to_pylist()
    for number, row in enumerate(rows):
        named = [row["id"], row["prediction"], row.get("relation") or ""]
        if not (_texts(named) and _texts(row["answers"])):
            raise DataError(f"{path}, row {number}: id, prediction and relation must be texts, answers a list of texts")
    with reading(f"a column of {path}", DataError):
        pyarrow.Table.from_pylist(rows, _schema())
    rows = [row | ({"votes": dict(row["votes"])} if row.get("votes") else {}) for row in rows]
    with reading(str(path), DataError):
        about = json.loads((table.schema.metadata or {}).get(ABOUT, "{}"))
        _ = [about["settings"][name] for name in ("method", "model", "dataset") if about != {}]
    return Answers(path, rows, about)


def write_answers(answers: Answers, path: str | Path) -> None:
    """Write the file whole or not at all (`labkit.files`)."""
    require_pyarrow()
    import pyarrow
    from pyarrow import feather

    schema = _schema().with_metadata({ABOUT: json.dumps(answers.about, ensure_ascii=False)})
    rows = [row | {"votes": list((row.get("votes") or {}).items()) or None} for row in answers.rows]
    content = pyarrow.BufferOutputStream()
    feather.write_feather(pyarrow.Table.from_pylist(rows, schema=schema), content)
    write_whole(path, content.getvalue().to_pybytes())


def judged(answers: Answers, lemmatizer: scores.Lemmatizer | None = None) -> Answers:
    """The same answers, with `correct` from their predictions anew, and `correct_lemmatised` (None without one).

    Both are None where there is no accepted answer to compare with.
    """
    rows = []
    for row in answers.rows:
        pair = row["prediction"], row["answers"]
        exact = scores.exact_match(*pair) if row["answers"] else None
        lemmatised = scores.lemmatised_match(*pair, lemmatizer) if row["answers"] and lemmatizer else None
        rows.append(row | {"correct": exact, "correct_lemmatised": lemmatised})
    return Answers(answers.path, rows, answers.about)


def summary(answers: Answers, lemmatised: bool = False) -> dict[str, Any]:
    """n, accuracy with its interval, that of each relation, seconds per question; ready for JSON.

    `without_answers` counts the questions that have no accepted answer and are not among the n; accuracy is None if
    that are all.
    """
    seconds = [row["seconds"] for row in answers.rows if row.get("seconds") is not None]
    without = sum(not row["answers"] for row in answers.rows)
    found: dict[str, Any] = {
        "n": len(answers.rows) - without,
        "without_answers": without,
        "accuracy": None,
        "seconds_per_question": sum(seconds) / len(seconds) if seconds else None,
    }
    if not found["n"] and without:
        return found
    scored = answers.scored(lemmatised)
    found["accuracy"] = asdict(scores.accuracy(scored))
    if scored.relations and None not in scored.relations:
        found["macro_accuracy"] = asdict(scores.macro_accuracy(scored))
        found["by_relation"] = {name: asdict(each) for name, each in scores.accuracy_by_relation(scored).items()}
    return found


def comparison(one: Answers, other: Answers, lemmatised: bool = False) -> dict[str, Any]:
    """Accuracy of `one` minus that of `other` with its interval, and McNemar's test; ready for JSON.

    Raises:
        DataError: they did not answer the same questions.
    """
    accepted = {row["id"]: row["answers"] for row in other.rows}
    for row in one.rows:
        if accepted.get(row["id"], row["answers"]) != row["answers"]:
            raise DataError(
                f"question {row['id']!r} has other accepted answers in {other.path} than in {one.path}: "
                "they are not of one set"
            )
    pair = one.scored(lemmatised), other.scored(lemmatised)
    return {"difference": asdict(scores.difference(*pair)), "mcnemar": asdict(scores.mcnemar(*pair))}


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


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ModelError('files of answers need pyarrow: pip install "labkit-bidirectional[fusion]"') from None
