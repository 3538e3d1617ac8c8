"""One door to questions in several wordings: `read_paraphrases("questions.jsonl")`, whatever their form.

known-facts        the embedded facts, those to test with; "known-facts:shots" those for few-shot examples
webqa:FILE         WebQuestions, with its own paraphrases or those that templates make (`labkit.datasets.webquestions`)
lama:FOLDER        ParaRel's patterns over LAMA's facts (`labkit.datasets.pararel`)
FILE               .jsonl, .csv or .json, by what its first row holds: MyriadLAMA (`labkit.datasets.myriad_lama`),
                   WebQuestions, or rows of your own:

    {"id": "fr", "paraphrases": ["What is the capital of France?", "France's capital is ____."], "answers": ["Paris"]}

where "id" (else the line number), "relation" and "natural" (else true) may be left out; a CSV has the two lists as JSON
in their cells. Rows of your own that are only to be answered need no "answers" (`unanswered=True`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from labkit.datasets import myriad_lama
from labkit.datasets.files import csv_rows, json_lines
from labkit.datasets.paraphrased_question import (
    ParaphrasedQuestion,
    id_of,
    list_in,
    questions_of,
    text_of,
    texts_of,
    truth_of,
)
from labkit.datasets.pararel import is_pararel, read_pararel
from labkit.datasets.webquestions import json_entries, read_webquestions
from labkit.errors import DataError
from labkit.resources import folder

KNOWN_FACTS = "known-facts"
SPLITS = ("shots", "test")
FORMS = f"{KNOWN_FACTS}, webqa:FILE, lama:FOLDER, or a .jsonl, .csv or .json file"
NOT_SHIPPED = {  # by kind: what to give, and where it is to be had
    "webqa": "webqa:FILE, with a JSON file of github.com/brmson/dataset-factoid-webquestions",
    "lama": "lama:FOLDER, with data/pattern_data/graphs_json of github.com/yanaiela/pararel as the folder, and its "
    "data/trex_lms_vocab as the folder of pairs",
}


def read_paraphrases(
    name_or_path: str | Path, pairs: str | Path | None = None, *, unanswered: bool = False
) -> list[ParaphrasedQuestion]:
    """The questions of a set by its name, or of a file or folder by what is in it; see above for the forms.

    Args:
        pairs: the folder of pairs, where `lama:FOLDER` is the folder of patterns only.
        unanswered: whether rows of your own may be without answers; they can be asked, and not scored.

    Raises:
        DataError: no such set or file, or a line that has not the form; the message names file and line.
    """
    kind, _, rest = str(name_or_path).partition(":")
    is_lama = kind == "lama" or (kind not in ("webqa", KNOWN_FACTS) and is_pararel(name_or_path))
    if pairs is not None and not is_lama:
        raise DataError(f"{name_or_path} needs no folder of pairs; only lama:FOLDER takes one")
    if kind == KNOWN_FACTS:
        return read_known_facts(rest or "test")
    if kind in ("webqa", "lama") and not rest:
        raise DataError(f"{kind} names no data, and labkit does not ship any: give {NOT_SHIPPED[kind]}")
    if kind == "webqa":
        return read_webquestions(rest)
    if is_lama:
        return read_pararel(rest if kind == "lama" else name_or_path, pairs)
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise DataError(f"{name_or_path} is no file and no known set; give one of: {FORMS}")
    return _read_file(path, unanswered)


def read_known_facts(split: str = "test") -> list[ParaphrasedQuestion]:
    """The embedded facts of one split, in the order of the file (data/known_facts): "test" to score, "shots" to prompt.

    Raises:
        DataError: no such split, or a damaged file.
    """
    if split not in SPLITS:
        raise DataError(f"{KNOWN_FACTS} has no split {split!r}; choose one of {', '.join(SPLITS)}")
    path = folder("data") / "known_facts" / "facts.jsonl"
    return questions_of(path, ((line, row) for line, row in json_lines(path) if row["split"] == split), _own)


def sample(questions: Sequence[ParaphrasedQuestion], n: int, seed: int = 0) -> list[ParaphrasedQuestion]:
    """At most `n` of the questions, drawn with `seed`, as many of each relation as can be; in their order.

    Relations are served in turn, so their numbers differ by one at most, but for those that have run out. The draw does
    not depend on the order of the questions, and a smaller one is part of a larger one with the same seed: methods
    measured on 150 and on 500 of a set share the 150.

    Raises:
        DataError: `n` below 1.
    """
    if n < 1:
        raise DataError(f"{n} questions were asked for; ask for at least 1")
    queues: dict[str, list[str]] = {}
    for each in sorted(questions, key=lambda each: each.id):
        queues.setdefault(each.relation or "", []).append(each.id)
    order = sorted(queues)
    random.Random(seed).shuffle(order)
    for relation in order:
        random.Random(f"{seed} {relation}").shuffle(queues[relation])
    longest = max((len(queue) for queue in queues.values()), default=0)
    in_turn = [queues[relation][turn] for turn in range(longest) for relation in order if turn < len(queues[relation])]
    chosen = set(in_turn[:n])
    return [each for each in questions if each.id in chosen]


def _read_file(path: Path, unanswered: bool) -> list[ParaphrasedQuestion]:
    rows = _rows(path)
    head = list(islice(rows, 1))
    first, rows = head[0][1] if head else {}, chain(head, rows)
    if all(name in first for name in myriad_lama.FIELDS):
        return myriad_lama.read_myriad_lama(path, rows)
    if path.suffix.lower() != ".csv" and "answers" in first and ("qText" in first or "question" in first):
        return read_webquestions(path)
    return questions_of(path, rows, _own, unanswered)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".json"):
        return json_entries(path)
    if suffix == ".csv":
        return csv_rows(path)
    raise DataError(f"{path} ends in {suffix or 'nothing'}; the file must be .jsonl, .csv or .json")


def _own(row: dict[str, Any], line: str) -> ParaphrasedQuestion:
    """A row as the module's docstring says; a table has its lists as text, and empty cells for what is left out."""
    row = {name: value for name, value in row.items() if value not in ("", None)}
    row |= {name: list_in(row[name]) for name in ("paraphrases", "answers") if isinstance(row.get(name), str)}
    relation = text_of(row, "relation") if "relation" in row else None
    if "answer" in row and "answers" not in row:
        raise ValueError(f"has the field answer; write answers, a list of texts, such as [{str(row['answer'])!r}]")
    answers = tuple(dict.fromkeys(texts_of(row, "answers"))) if "answers" in row else ()
    id, paraphrases = id_of(row, line), texts_of(row, "paraphrases")
    return ParaphrasedQuestion(id, paraphrases, answers, relation, truth_of(row, "natural"))
