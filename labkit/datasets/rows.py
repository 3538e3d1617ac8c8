"""Rows with named fields, from JSON, JSONL, CSV or a hub data set, made into examples. Each task needs these fields:

    question answering    question, context, and answers: [{text, start}], {"text": [...], "answer_start": [...]} as in
                          the hub's squad, or the columns answer and answer_start of a table; is_impossible is optional
    evidence              criterion, post, evidence: a sentence copied from the post, or null
    named entities        words and tags; or text and entities: {start, end, label}, {start_offset, end_offset, label}
                          (doccano) or [start, end, label] (spaCy)
    classification        text and label
    embedding             first and second; score is optional

`NAMES` lists other names of these fields. Letter case and white space around a name do not matter. A row that cannot be
understood is a ValueError; the reader of the file adds file and place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from labkit.datasets.evidence import locate
from labkit.datasets.examples import Answer, Entity, Labelled, Pair, Question, Sentence
from labkit.datasets.files import shown
from labkit.datasets.tags import parts
from labkit.datasets.words import tags_over, words_of

NAMES = {
    "question": ("question", "query", "criterion"),
    "context": ("context", "passage", "document", "post"),
    "answers": ("answers", "answer", "evidence"),
    "words": ("words", "tokens"),
    "tags": ("tags", "ner_tags", "labels"),
    "entities": ("entities", "spans", "label", "labels"),
    "text": ("text", "sentence", "content"),
    "label": ("label", "class", "category"),
    "first": ("first", "text_a", "sentence1", "anchor", "query"),
    "second": ("second", "text_b", "sentence2", "positive"),
    "score": ("score", "similarity_score"),
    "group": ("group", "title", "document_id"),
    "id": ("id", "guid"),
}
NEEDED = {  # fields without which no row of a table has a meaning
    "qa": ("question", "context", "answers"),
    "ner": ("words", "tags"),
    "classify": ("text", "label"),
    "embed": ("first", "second"),
}


def question(row: dict[str, Any], id: str) -> Question:
    context = text_in(row, "context")
    answers = []
    for number, answer in enumerate(_answers(row, context)):
        where = f"answers[{number}]"
        if not isinstance(answer, dict):
            raise ValueError(f"{where} is {shown(answer)}; expected an object with text and answer_start")
        text, start = answer.get("text"), answer.get("start", answer.get("answer_start"))
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}.text is {shown(text)}; expected a text")
        if start is None or start == "":
            if (count := context.count(text)) != 1:
                raise ValueError(f"answer_start is missing, and the context holds {shown(text)} {count} times")
            start = context.index(text)
        answers.append(Answer(text, _whole(start, "answer_start")))
        if wrong := misplaced(context, answers[-1]):
            raise ValueError(wrong)
    return Question(_id(row, id), text_in(row, "question"), context, tuple(dict.fromkeys(answers)), _group(row))


def _answers(row: dict[str, Any], context: str) -> list[Any]:
    """The answers of a row as a list; [] where the question is unanswerable."""
    name = next((known for known in ("answers", "answer") if known in row), None)
    given = row.get(name)
    if given is None and "evidence" in row:
        given = _located(context, row["evidence"])
    if isinstance(given, str):  # a cell of a table
        given = [{"text": given, "start": row.get("answer_start", row.get("start"))}] if given.strip() else []
    elif isinstance(given, dict):
        texts, starts = given.get("text"), given.get("answer_start")
        if isinstance(texts, str):
            given = [given]
        elif isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            given = [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]
        else:
            raise ValueError(f"{name} is {shown(given)}; expected text and answer_start, two lists of one length")
    impossible = row.get("is_impossible")
    if isinstance(impossible, str):
        impossible = {"": None, "true": True, "false": False}.get(impossible.strip().lower(), impossible)
    if impossible not in (None, True, False):
        raise ValueError(f"is_impossible is {shown(impossible)}; expected true or false")
    if given is None and impossible:
        return []
    if name is None and given is None:
        raise ValueError(f"has no answers (fields: {', '.join(row)}); an unanswerable question has an empty list")
    if not isinstance(given, list):
        raise ValueError(f"{name} is {shown(given)}; expected a list of answers, which is empty if there is none")
    if impossible and given:
        raise ValueError(f"is_impossible is true, but there is the answer {shown(given[0])}")
    if impossible is False and not given:
        raise ValueError("has no answer, but is_impossible is false")
    return given


def _located(context: str, evidence: Any) -> list[dict[str, Any]]:
    """Where a sentence copied from the context is in it; [] for no evidence (null, "")."""
    if evidence is None or evidence == "":
        return []
    if not isinstance(evidence, str):
        raise ValueError(f"evidence is {shown(evidence)}; expected a text")
    place = locate(context, evidence)
    if place is None:
        raise ValueError(f"has evidence that is nowhere in its text: {shown(evidence)}")
    return [{"text": context[place.start : place.end], "start": place.start}]


def misplaced(context: str, answer: Answer) -> str:
    """What is wrong with the place of an answer, or ""."""
    if answer.text and answer.start >= 0 and context[answer.start : answer.end] == answer.text:
        return ""
    if not answer.text or answer.text not in context:
        return f"the answer {shown(answer.text)} is not in the context"
    places = (i for i in range(len(context)) if context.startswith(answer.text, i))
    nearest = min(places, key=lambda i: abs(i - answer.start))
    return f"answer_start is {answer.start}, but {shown(answer.text)} is at {nearest}"


def sentence(row: dict[str, Any], id: str) -> Sentence:
    words, tags = field(row, "words"), field(row, "tags")
    if "entities" in row or ("text" in row and (words is None or tags is None) and field(row, "entities") is not None):
        name = next(name for name in NAMES["entities"] if name in row)
        text = text_in(row, "text")
        spans = words_of(text)
        tags = tags_over(spans, _entities(row[name], name), text)
        return Sentence(_id(row, id), text, tuple(text[a:b] for a, b in spans), tuple(spans), tuple(tags), _group(row))
    if isinstance(words, str) and isinstance(tags, str):  # cells of a table
        words, tags = words.split(), tags.split()
    if not isinstance(words, list) or not isinstance(tags, list):
        raise ValueError(f"has neither words and tags, nor text and entities, as lists (fields: {', '.join(row)})")
    if len(words) != len(tags):
        raise ValueError(f"has {len(words)} words and {len(tags)} tags")
    if not words:
        raise ValueError("has no words")
    for word, tag in zip(words, tags, strict=True):
        if not isinstance(word, str):
            raise ValueError(f"has the word {shown(word)}; expected a text")
        if not isinstance(tag, str):
            raise ValueError(f"has the tag {shown(tag)}; expected its name, such as B-PER")
        parts(tag)  # a tag without a meaning is a ValueError
    return Sentence.of_words(_id(row, id), words, tags, _group(row))


def _entities(given: Any, name: str) -> list[Entity]:
    if not isinstance(given, list):
        raise ValueError(f"{name} is {shown(given)}; expected a list, which is empty for a text without entities")
    entities = []
    for number, entity in enumerate(given):
        where = f"{name}[{number}]"
        if isinstance(entity, dict):
            start, end = (entity.get(side, entity.get(f"{side}_offset")) for side in ("start", "end"))
            label = entity.get("label")
        elif isinstance(entity, list) and len(entity) == 3:
            start, end, label = entity
        else:
            raise ValueError(f"{where} is {shown(entity)}; expected start, end and label, as an object or a list")
        if not isinstance(label, str) or not label.strip():
            raise ValueError(f"{where}: the label is {shown(label)}; expected a text")
        start, end = _whole(start, f"{where}: the start"), _whole(end, f"{where}: the end")
        entities.append(Entity(start, end, label.strip()))
    return entities


def labelled(row: dict[str, Any], id: str) -> Labelled:
    name, label = _named(row, "label")
    if not isinstance(label, str | int | float) or label != label or not str(label).strip():  # NaN is not itself
        raise ValueError(f"{name} is {shown(label)}; expected a text or a number")
    return Labelled(_id(row, id), text_in(row, "text"), str(label).strip(), _group(row))


def pair(row: dict[str, Any], id: str) -> Pair:
    score = field(row, "score")
    try:
        number = None if score in (None, "") else float(score)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise ValueError(f"score is {shown(score)}; expected a number")
    return Pair(_id(row, id), text_in(row, "first"), text_in(row, "second"), number, _group(row))


MAKERS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "qa": question,
    "ner": sentence,
    "classify": labelled,
    "embed": pair,
}


def field(row: dict[str, Any], name: str) -> Any:
    """The value of a field under any of its names, or None."""
    return next((row[known] for known in NAMES[name] if known in row), None)


def text_in(row: dict[str, Any], name: str) -> str:
    """A field that must be text with something in it."""
    known, value = _named(row, name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{known} is {shown(value)}; expected a text")
    return value


def _named(row: dict[str, Any], name: str) -> tuple[str, Any]:
    """The name under which a row has a field, and its value; ValueError if it has none."""
    for known in NAMES[name]:
        if known in row:
            return known, row[known]
    raise ValueError(f"has no {name} (fields: {', '.join(row) or 'none'})")


def _group(row: dict[str, Any]) -> str:
    given = field(row, "group")
    return "" if given is None else str(given)


def _id(row: dict[str, Any], id: str) -> str:
    given = field(row, "id")
    if isinstance(given, list | dict):
        raise ValueError(f"id is {shown(given)}; expected a text or a number")
    return id if given in (None, "") else str(given)


def _whole(value: Any, what: str) -> int:
    """A count of characters, which a table has as text."""
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or isinstance(value, bool) or isinstance(value, float) and whole != value:
        raise ValueError(f"{what} is {shown(value)}; expected a whole number")
    return whole
