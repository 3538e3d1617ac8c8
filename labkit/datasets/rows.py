"""Rows with named fields, from JSONL, CSV or a hub data set, made into examples: what each task needs, and other names.

    evidence              criterion, post, evidence: a sentence as it was copied, found by `evidence.locate`, or null
    question answering    question, context; answers: [{text, start}], or {"text": [...], "answer_start": [...]} as the
                          hub's squad has them, or the columns answer and answer_start
    named entities        words and tags; or text and entities: [{start, end, label}]
    classification        text and label
    embedding             first and second, and perhaps score

A row that cannot be understood is a ValueError in words; whoever reads the file adds where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from labkit.datasets.evidence import locate
from labkit.datasets.examples import Answer, Entity, Labelled, Pair, Question, Sentence
from labkit.datasets.words import tags_over, words_of

NAMES = {  # other names that files have for a field
    "question": ("question", "query", "criterion"),
    "context": ("context", "passage", "document", "post"),
    "words": ("words", "tokens"),
    "tags": ("tags", "ner_tags", "labels"),
    "text": ("text", "sentence", "content"),
    "label": ("label", "class", "category"),
    "first": ("first", "text_a", "sentence1", "anchor", "query"),
    "second": ("second", "text_b", "sentence2", "positive"),
    "score": ("score", "similarity_score"),
    "group": ("group", "title", "document_id"),
    "id": ("id", "guid"),
}


def question(row: dict[str, Any], number: int) -> Question:
    context, answers = text_in(row, "context"), []
    given = row.get("answers", row.get("answer"))
    if given is None and "evidence" in row:
        given = _located(context, row["evidence"])
    if given is None:
        raise ValueError("has neither answers nor answer; an unanswerable question has an empty list")
    if isinstance(given, dict):  # as the hub's parquet files have them
        texts, starts = given["text"], given["answer_start"]
        if len(texts) != len(starts):
            raise ValueError(f"has {len(texts)} answers and {len(starts)} starts")
        given = [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]
    elif isinstance(given, str):  # as a table has it: one answer, or an empty cell
        given = [{"text": given, "start": row.get("answer_start", row.get("start", ""))}] if given else []
    for answer in given:
        if not isinstance(text := answer["text"], str) or not text.strip():
            raise ValueError(f"has the answer {text!r}, which is no text")
        start = answer.get("start", answer.get("answer_start"))
        answers.append(Answer(text, _place(text, start, context)))
    return Question(
        _id(row, number),
        text_in(row, "question"),
        context,
        tuple(dict.fromkeys(answers)),
        _group(row),
    )


def _located(context: str, evidence: Any) -> list[dict[str, Any]]:
    """Where a sentence, copied out of the context by somebody, stands in it; [] for no evidence (null, "").

    What is nowhere in the context is an error, not a row without evidence.
    """
    if evidence is None or evidence == "":
        return []
    if not isinstance(evidence, str):
        raise ValueError(f"has the evidence {evidence!r}, which is no text")
    place = locate(context, evidence)
    if place is None:
        raise ValueError(f"has evidence that is nowhere in its text: {evidence!r}")
    return [{"text": context[place.start : place.end], "start": place.start}]


def sentence(row: dict[str, Any], number: int) -> Sentence:
    id, group = _id(row, number), _group(row)
    if isinstance(entities := row.get("entities"), list):
        text = text_in(row, "text")
        found = [Entity(_whole(e["start"], "start"), _whole(e["end"], "end"), str(e["label"])) for e in entities]
        words = words_of(text)
        tags = tags_over(words, found, text)
        return Sentence(id, text, tuple(text[a:b] for a, b in words), tuple(words), tuple(tags), group)
    words, tags = field(row, "words"), field(row, "tags")
    if isinstance(words, str) and isinstance(tags, str):  # cells of a table
        words, tags = words.split(), tags.split()
    if any(not isinstance(each, Sequence) or isinstance(each, str) for each in (words, tags)):
        raise ValueError("has neither words and tags, nor text and entities")
    if len(words) != len(tags):
        raise ValueError(f"has {len(words)} words and {len(tags)} tags")
    if not words:
        raise ValueError("has no words")
    if not_text := [word for word in words if not isinstance(word, str)]:
        raise ValueError(f"has the word {not_text[0]!r}, which is no text")
    return Sentence.of_words(id, list(words), [str(t) for t in tags], group)


def labelled(row: dict[str, Any], number: int) -> Labelled:
    label = field(row, "label")
    if label is None or label == "":
        raise ValueError("has no label")
    if not isinstance(label, (str, int, float)) or label != label:  # the last: no number
        raise ValueError(f"has the label {label!r}; expected a text or a number")
    return Labelled(_id(row, number), text_in(row, "text"), str(label), _group(row))


def pair(row: dict[str, Any], number: int) -> Pair:
    score = field(row, "score")
    try:
        number_given = None if score in (None, "") else float(score)
    except (TypeError, ValueError, OverflowError):
        number_given = math.nan
    if number_given is not None and not math.isfinite(number_given):
        raise ValueError(f"has the score {score!r}, which is no number")
    group = _group(row)
    return Pair(_id(row, number), text_in(row, "first"), text_in(row, "second"), number_given, group)


MAKERS: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "qa": question,
    "ner": sentence,
    "classify": labelled,
    "embed": pair,
}


def field(row: dict[str, Any], name: str) -> Any:
    """The value of a field under any of its names, or None."""
    return next((row[each] for each in NAMES[name] if each in row), None)


def text_in(row: dict[str, Any], name: str) -> str:
    """A field that must be text with something in it."""
    value = field(row, name)
    if value is None:
        raise ValueError(f"has no {name} (fields: {', '.join(map(str, row)) or 'none'})")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"has {value!r} as its {name}, where text was expected")
    return value


def _group(row: dict[str, Any]) -> str:
    given = field(row, "group")
    return "" if given is None else str(given)


def _id(row: dict[str, Any], number: int) -> str:
    given = field(row, "id")
    return str(number) if given in (None, "") else str(given)


def _place(answer: str, start: Any, context: str) -> int:
    """Where the answer stands; it is looked for only where the row does not say and there is one place."""
    if start in (None, ""):
        if (count := context.count(answer)) != 1:
            raise ValueError(f"has the answer {answer!r} without its start, and the context holds it {count} times")
        return context.index(answer)
    start = _whole(start, "answer start")
    if start < 0 or context[start : start + len(answer)] != answer or not answer:
        stands = context[max(start, 0) : max(start, 0) + len(answer)]
        raise ValueError(f"has the answer {answer!r} at {start}, where {stands!r} stands")
    return start


def _whole(value: Any, what: str) -> int:
    """A count of characters, which a table has as text."""
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or isinstance(value, bool | float) and (isinstance(value, bool) or whole != value):
        raise ValueError(f"has the {what} {value!r}, which is no whole number")
    return whole
