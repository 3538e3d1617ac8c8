"""Rows with named fields, from JSON, JSONL, CSV or a hub data set, made into examples. Each task needs these fields:

    question answering    question, context, and answers: [{text, start}], {"text": [...], "answer_start": [...]} as in
                          the hub's squad, or the columns answer and answer_start of a table; is_impossible is optional
    evidence              criterion, post, evidence: a sentence copied from the post, or null
    named entities        words and tags; or text and entities: {start, end, label}, {start_offset, end_offset, label}
                          (doccano) or [start, end, label] (spaCy)
    classification        text and label
    embedding             first and second; score is optional

`NAMES` lists other names of these fields. Letter case and white space around a name do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit.datasets.evidence import locate
from labkit.datasets.examples import Answer, Entity, Labelled, Pair, Question, Sentence
from labkit.datasets.files import Fault, Record, collect, json_records, object_or_fault, shown
from labkit.datasets.tags import parts, tags_over, words_of

NAMES = {
    "question": ("question", "query", "criterion"),
    "context": ("context", "passage", "document", "post"),
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


def example(task: str, row: dict[str, Any], id: str) -> Any:
    """The example of a row; `id` is for a row that has none. A row without the fields of the task is a ValueError."""
    fields = {str(name).strip().lower(): value for name, value in row.items()}
    if len(fields) < len(row):
        raise ValueError(f"has fields of one name but for case and white space: {', '.join(row)}")
    group = field(fields, "group")
    return MAKERS[task](fields, id_of(fields, id, *NAMES["id"]), "" if group is None else str(group))


def read_squad(path: str | Path) -> list[Question]:
    """The questions of a SQuAD file (1.1 or 2.0); `group` is the article's title.

    Raises:
        DataError: another form, or an answer that its context does not hold at its offset; the message names the
            question.
    """
    return collect(path, records(path), lambda row, id: example("qa", row, id)).all("question")


def records(path: str | Path) -> Iterator[Record]:
    """The rows of a JSON file; an article of SQuAD is divided into its questions."""
    for record in json_records(path):
        if isinstance(record.row, dict) and "paragraphs" in record.row:
            yield from _questions_of(record.row, int(record.id))
        else:
            yield record


def _questions_of(article: dict[str, Any], number: int) -> Iterator[Record]:
    paragraphs = article["paragraphs"]
    for i, paragraph in enumerate(paragraphs if isinstance(paragraphs, list) else [paragraphs], 1):
        where, id = f"article {number}, paragraph {i}", f"{number}-{i}"
        if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
            yield Record(where, id, Fault(f"is {shown(paragraph)}; expected an object with a list called qas"))
            continue
        shared = {"context": paragraph.get("context"), "group": str(article.get("title") or f"article {number - 1}")}
        for k, question in enumerate(paragraph["qas"], 1):
            is_named = isinstance(question, dict) and question.get("id") is not None
            name = f"question {shown(question['id'])}" if is_named else f"{where}, question {k}"
            row = question | shared if isinstance(question, dict) else object_or_fault(question)
            yield Record(name, f"{id}-{k}", row)


def _question(row: dict[str, Any], id: str, group: str) -> Question:
    context = text_of(row, *NAMES["context"])
    answers = []
    for number, answer in enumerate(_answers(row, context)):
        where = f"answers[{number}]"
        if not isinstance(answer, dict):
            raise ValueError(f"{where} is {shown(answer)}; expected an object with text and answer_start")
        text, start = answer.get("text"), answer.get("start", answer.get("answer_start"))
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}.text is {shown(text)}; expected a text")
        if text not in context:
            raise ValueError(f"the answer {shown(text)} is not in the context")
        if start is None or start == "":
            if (count := context.count(text)) > 1:
                raise ValueError(f"answer_start is missing, and the context holds {shown(text)} {count} times")
            start = context.index(text)
        start = _whole_number(start, "answer_start")
        if start < 0 or not context.startswith(text, start):
            places = (i for i in range(len(context)) if context.startswith(text, i))
            nearest = min(places, key=lambda i: abs(i - start))
            raise ValueError(f"answer_start is {start}, but {shown(text)} is at {nearest}")
        answers.append(Answer(text, start))
    return Question(id, text_of(row, *NAMES["question"]), context, tuple(dict.fromkeys(answers)), group)


def _answers(row: dict[str, Any], context: str) -> list[Any]:
    """The answers of a row as a list of objects; [] where the question is unanswerable."""
    name = next((name for name in ("answers", "answer", "evidence") if row.get(name) is not None), None)
    answers = row[name] if name else None
    if name == "evidence" and answers != "":
        match = locate(context, text_of(row, "evidence"))
        if match is None:
            raise ValueError(f"has evidence that is nowhere in its text: {shown(answers)}")
        answers = [{"text": context[match.start : match.end], "start": match.start}]
    elif isinstance(answers, str):  # a cell of a table
        answers = [{"text": answers, "start": row.get("answer_start", row.get("start"))}] if answers.strip() else []
    elif isinstance(answers, dict) and isinstance(answers.get("text"), str):
        answers = [answers]
    elif isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise ValueError(f"{name} is {shown(answers)}; expected text and answer_start, two lists of one length")
        answers = [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]
    impossible = row.get("is_impossible")
    if isinstance(impossible, str):
        impossible = {"": None, "true": True, "false": False}.get(impossible.strip().lower(), impossible)
    if impossible not in (None, True, False):
        raise ValueError(f"is_impossible is {shown(impossible)}; expected true or false")
    if answers is None and (impossible or "evidence" in row):
        answers = []
    if not isinstance(answers, list):
        expected = f"expected a list, which is empty for an unanswerable question (fields: {', '.join(row)})"
        raise ValueError(f"{name or 'answers'} is {shown(answers)}; {expected}")
    if impossible and answers:
        raise ValueError(f"is_impossible is true, but there is the answer {shown(answers[0])}")
    if impossible is False and not answers:
        raise ValueError("has no answer, but is_impossible is false")
    return answers


def _sentence(row: dict[str, Any], id: str, group: str) -> Sentence:
    words, tags = field(row, "words"), field(row, "tags")
    is_spans = "text" in row and (words is None or tags is None) and field(row, "entities") is not None
    if "entities" in row or is_spans:
        name = next(name for name in NAMES["entities"] if name in row)
        text = text_of(row, *NAMES["text"])
        spans = words_of(text)
        tags = tags_over(spans, _entities(row[name], name), text)
        return Sentence(id, text, tuple(text[start:end] for start, end in spans), tuple(spans), tuple(tags), group)
    if isinstance(words, str) and isinstance(tags, str):  # cells of a table
        words, tags = words.split(), tags.split()
    if not isinstance(words, list) or not isinstance(tags, list):
        raise ValueError(f"has neither words and tags, nor text and entities, as lists (fields: {', '.join(row)})")
    if not words or len(words) != len(tags):
        raise ValueError(f"has {len(words)} words and {len(tags)} tags; expected as many, and at least one")
    for word, tag in zip(words, tags, strict=True):
        if not isinstance(word, str) or not isinstance(tag, str):
            raise ValueError(f"has the word {shown(word)} with the tag {shown(tag)}; expected texts, such as B-PER")
        parts(tag)  # raises ValueError
    return Sentence.of_words(id, words, tags, group)


def _entities(entities: Any, name: str) -> list[Entity]:
    if not isinstance(entities, list):
        raise ValueError(f"{name} is {shown(entities)}; expected a list, which is empty for a text without entities")
    made = []
    for number, entity in enumerate(entities):
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
        start, end = _whole_number(start, f"{where}: the start"), _whole_number(end, f"{where}: the end")
        made.append(Entity(start, end, label.strip()))
    return made


def _labelled(row: dict[str, Any], id: str, group: str) -> Labelled:
    name, label = _named(row, NAMES["label"])
    if not isinstance(label, str | int | float) or label != label or not str(label).strip():  # NaN is not itself
        raise ValueError(f"{name} is {shown(label)}; expected a text or a number")
    return Labelled(id, text_of(row, *NAMES["text"]), str(label).strip(), group)


def _pair(row: dict[str, Any], id: str, group: str) -> Pair:
    score = field(row, "score")
    try:
        number = None if score in (None, "") else float(score)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise ValueError(f"score is {shown(score)}; expected a number")
    return Pair(id, text_of(row, *NAMES["first"]), text_of(row, *NAMES["second"]), number, group)


MAKERS: dict[str, Callable[[dict[str, Any], str, str], Any]] = {
    "qa": _question,
    "ner": _sentence,
    "classify": _labelled,
    "embed": _pair,
}


def field(row: dict[str, Any], name: str) -> Any:
    """The value of a field under any of its `NAMES`, or None."""
    return next((row[known] for known in NAMES[name] if known in row), None)


def text_of(row: dict[str, Any], *names: str) -> str:
    """The text under the first of these names that the row has. Raises ValueError if there is none, or it is blank."""
    name, value = _named(row, names)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {shown(value)}; expected a text")
    return value


def id_of(row: dict[str, Any], default: str, *names: str) -> str:
    """The id of a row under the first of these names that it has, else the default."""
    id = next((row[name] for name in names if name in row), None)
    if isinstance(id, list | dict):
        raise ValueError(f"id is {shown(id)}; expected a text or a number")
    return default if id in (None, "") else str(id)


def _named(row: dict[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    for name in names:
        if name in row:
            return name, row[name]
    other = f", or {', '.join(names[1:])}" if names[1:] else ""
    raise ValueError(f"has no {names[0]}{other} (fields: {', '.join(map(str, row)) or 'none'})")


def _whole_number(value: Any, what: str) -> int:
    """A whole number, which a table has as text."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, bool) or (isinstance(value, float) and number != value):
        raise ValueError(f"{what} is {shown(value)}; expected a whole number")
    return number
