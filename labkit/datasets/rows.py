"""Rows with named fields, from JSONL, CSV or a hub data set, made into examples: what each task needs, and other names.

    question answering    question, context; answers: [{text, start}], or {"text": [...], "answer_start": [...]} as the
                          hub's squad has them, or the columns answer and answer_start
    named entities        words and tags; or text and entities: [{start, end, label}]
    classification        text and label
    embedding             first and second, and perhaps score

A row that cannot be understood is a ValueError in words; whoever reads the file adds where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.datasets.examples import Answer, Entity, Labelled, Pair, Question, Sentence
from labkit.datasets.words import tags_over, words_of

NAMES = {  # other names that files have for a field
    "question": ("question", "query"),
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
    if given is None:
        raise ValueError("has neither answers nor answer; an unanswerable question has an empty list")
    if isinstance(given, dict):  # as the hub's parquet files have them
        given = [{"text": t, "start": s} for t, s in zip(given["text"], given["answer_start"], strict=True)]
    elif isinstance(given, str):  # as a table has it: one answer, or an empty cell
        given = [{"text": given, "start": row.get("answer_start", row.get("start", ""))}] if given else []
    for answer in given:
        start = answer.get("start", answer.get("answer_start"))
        answers.append(Answer(answer["text"], _place(answer["text"], start, context)))
    return Question(
        _id(row, number),
        text_in(row, "question"),
        context,
        tuple(dict.fromkeys(answers)),
        str(field(row, "group") or ""),
    )


def sentence(row: dict[str, Any], number: int) -> Sentence:
    id, group = _id(row, number), str(field(row, "group") or "")
    if isinstance(entities := row.get("entities"), list):
        text = text_in(row, "text")
        found = [Entity(int(e["start"]), int(e["end"]), str(e["label"])) for e in entities]
        words = words_of(text)
        tags = tags_over(words, found, text)
        return Sentence(id, text, tuple(text[a:b] for a, b in words), tuple(words), tuple(tags), group)
    words, tags = field(row, "words"), field(row, "tags")
    if isinstance(words, str) and isinstance(tags, str):  # cells of a table
        words, tags = words.split(), tags.split()
    if not isinstance(words, Sequence) or not isinstance(tags, Sequence):
        raise ValueError("has neither words and tags, nor text and entities")
    if len(words) != len(tags):
        raise ValueError(f"has {len(words)} words and {len(tags)} tags")
    return Sentence.of_words(id, [str(w) for w in words], [str(t) for t in tags], group)


def labelled(row: dict[str, Any], number: int) -> Labelled:
    label = field(row, "label")
    if label is None or label == "":
        raise ValueError("has no label")
    return Labelled(_id(row, number), text_in(row, "text"), str(label), str(field(row, "group") or ""))


def pair(row: dict[str, Any], number: int) -> Pair:
    score = field(row, "score")
    try:
        score = None if score in (None, "") else float(score)
    except (TypeError, ValueError):
        raise ValueError(f"has the score {score!r}, which is no number") from None
    return Pair(_id(row, number), text_in(row, "first"), text_in(row, "second"), score, str(field(row, "group") or ""))


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


def _id(row: dict[str, Any], number: int) -> str:
    given = field(row, "id")
    return str(number) if given in (None, "") else str(given)


def _place(answer: str, start: Any, context: str) -> int:
    """Where the answer stands; it is looked for only where the row does not say and there is one place."""
    if start in (None, ""):
        if (count := context.count(answer)) != 1:
            raise ValueError(f"has the answer {answer!r} without its start, and the context holds it {count} times")
        return context.index(answer)
    try:
        start = int(start)
    except (TypeError, ValueError):
        raise ValueError(f"has the answer start {start!r}, which is no number") from None
    if start < 0 or context[start : start + len(answer)] != answer or not answer:
        stands = context[max(start, 0) : max(start, 0) + len(answer)]
        raise ValueError(f"has the answer {answer!r} at {start}, where {stands!r} stands")
    return start
