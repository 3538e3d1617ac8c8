"""Records with named fields, from a file of any form or a hub data set, made into examples. The fields of each task:

    question answering    question, context, and answers: [{text, start}], {"text": [...], "answer_start": [...]} as in
                          the hub's squad, or the columns answer and answer_start of a table
    evidence              criterion, post, evidence: a sentence copied from the post, or null
    named entities        words (tokens) and tags (ner_tags, labels); or text and entities (label): {start, end, label},
                          {start_offset, end_offset, label} (doccano) or [start, end, label] (spaCy)
    classification        text (sentence, content) and label (class, category)
    embedding             first and second (sentence1 and sentence2, anchor and positive, ...); score is optional

id and group (title, document_id) are optional. Letter case and white space around a name do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from labkit.datasets.conll import SUFFIXES, column_records
from labkit.datasets.evidence import locate
from labkit.datasets.examples import Answer, Entity, Labelled, Pair, Question, Sentence, tags_over, words_of
from labkit.datasets.files import Scan, collect, json_records, read_text, shown, table_records
from labkit.errors import DataError


def scan_file(task: str, path: Path, tag_column: int | None = None) -> Scan:
    """The examples of a file, and a fault for each record that cannot be read."""
    suffix = path.suffix.lower()
    is_columns = task == "ner" and suffix in SUFFIXES and not (suffix == ".tsv" and _has_header(path))
    if tag_column is not None and not is_columns:
        raise DataError(f"{path} is not a column file: leave the tag column out")
    if is_columns:
        content = column_records(path, tag_column)
    elif suffix in (".json", ".jsonl"):
        content = _json_content(path)
    elif suffix in (".csv", ".tsv"):
        content = table_records(path)
    else:
        others = {"qa": "SQuAD as .json, ", "ner": "columns as .conll, "}.get(task, "")
        raise DataError(f"{path} ends in {suffix or 'nothing'}; for {task} give {others}rows as .json, .jsonl or .csv")
    return collect(path, content, partial(example, task))


def example(task: str, record: dict[str, Any], id: str) -> Any:
    """The example of a record; `id` is for one without. A record without the fields of the task is a ValueError."""
    fields = {str(name).strip().lower(): value for name, value in record.items()}
    group = field(fields, "group", "title", "document_id")
    return MAKERS[task](fields, id_of(fields, id, "id", "guid"), "" if group is None else str(group))


def _has_header(path: Path) -> bool:
    """Whether the first line of a .tsv file names words and tags, in quotes or not."""
    header = {name.strip(' "\r').lower() for name in read_text(path).split("\n", 1)[0].split("\t")}
    return bool(header & {"words", "tokens"} and header & {"tags", "ner_tags", "labels"})


def _json_content(path: Path) -> Iterator[tuple[int | str, Any]]:
    """The records of a JSON file; an article of SQuAD is divided into its questions."""
    for number, (place, record) in enumerate(json_records(path), 1):
        if not isinstance(record, dict) or not isinstance(record.get("paragraphs"), list):
            yield place, record
            continue
        group = str(record.get("title") or f"article {number - 1}")
        for i, paragraph in enumerate(record["paragraphs"], 1):
            place = f"article {number}, paragraph {i}"
            questions = paragraph.get("qas") if isinstance(paragraph, dict) else None
            if not isinstance(questions, list):
                yield place, ValueError(f"is {shown(paragraph)}; expected an object with a list called qas")
                continue
            for k, question in enumerate(questions, 1):
                name = f"{place}, question {k}"
                if isinstance(question, dict):
                    name = f"question {shown(question['id'])}" if "id" in question else name
                    question = question | {"context": paragraph.get("context"), "group": group}
                yield name, question


def _question(record: dict[str, Any], id: str, group: str) -> Question:
    context = text_of(record, "context", "passage", "document", "post")
    answers = []
    for answer in _answers(record, context):
        text = answer.get("text") if isinstance(answer, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"has the answer {shown(answer)}; expected an object with text and answer_start")
        if text not in context:
            raise ValueError(f"the answer {shown(text)} is not in the context")
        start = field(answer, "start", "answer_start")
        if start in (None, ""):
            if (count := context.count(text)) > 1:
                raise ValueError(f"answer_start is missing, and the context holds {shown(text)} {count} times")
            start = context.index(text)
        start = int(_number(start, "answer_start", whole=True))
        if start < 0 or not context.startswith(text, start):
            places = (i for i in range(len(context)) if context.startswith(text, i))
            nearest = min(places, key=lambda i: abs(i - start))
            raise ValueError(f"answer_start is {start}, but {shown(text)} is at {nearest}")
        answers.append(Answer(text, start))
    return Question(
        id, text_of(record, "question", "query", "criterion"), context, tuple(dict.fromkeys(answers)), group
    )


def _answers(record: dict[str, Any], context: str) -> list[Any]:
    """The answers of a record as a list of objects; [] where the question is unanswerable."""
    answers = field(record, "answers", "answer", "evidence")
    if answers is None and "evidence" in record or isinstance(answers, str) and not answers.strip():
        answers = []
    elif isinstance(answers, str) and "evidence" in record:
        match = locate(context, answers)
        if match is None:
            raise ValueError(f"has evidence that is nowhere in its text: {shown(answers)}")
        answers = [{"text": context[slice(*match)], "start": match[0]}]
    elif isinstance(answers, str):  # a cell of a table
        answers = [{"text": answers, "start": record.get("answer_start")}]
    elif isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise ValueError(f"answers is {shown(answers)}; expected text and answer_start, two lists of one length")
        answers = [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list):
        expected = f"expected a list, which is empty for an unanswerable question (fields: {', '.join(record)})"
        raise ValueError(f"answers is {shown(answers)}; {expected}")
    if answers and record.get("is_impossible") is True:
        raise ValueError(f"is_impossible is true, but there is the answer {shown(answers[0])}")
    return answers


def _sentence(record: dict[str, Any], id: str, group: str) -> Sentence:
    words, tags = field(record, "words", "tokens"), field(record, "tags", "ner_tags", "labels")
    entities = field(record, "entities", "label", "labels")
    if isinstance(words, str) and isinstance(tags, str):  # cells of a table
        words, tags = words.split(), tags.split()
    if isinstance(words, list) and isinstance(tags, list):
        if not words or len(words) != len(tags):
            raise ValueError(f"has {len(words)} words and {len(tags)} tags; expected as many, and at least one")
        for word, tag in zip(words, tags, strict=True):
            if not isinstance(word, str) or not word.strip() or not isinstance(tag, str):
                raise ValueError(f"has the word {shown(word)} with the tag {shown(tag)}; expected texts, such as B-PER")
        return Sentence.of_words(id, words, tags, group)  # raises ValueError for a tag of no scheme
    if not isinstance(entities, list):
        raise ValueError(f"has neither words and tags, nor text and entities, as lists (fields: {', '.join(record)})")
    text = text_of(record, "text", "sentence", "content")
    spans = words_of(text)
    tags = tags_over(spans, list(map(_entity, entities)), text)
    return Sentence(id, text, tuple(text[start:end] for start, end in spans), tuple(spans), tuple(tags), group)


def _entity(entity: Any) -> Entity:
    if isinstance(entity, list) and len(entity) == 3:
        entity = dict(zip(("start", "end", "label"), entity, strict=True))
    if not isinstance(entity, dict) or not isinstance(entity.get("label"), str) or not entity["label"].strip():
        raise ValueError(f"has the entity {shown(entity)}; expected start, end and label, as an object or a list")
    start, end = field(entity, "start", "start_offset"), field(entity, "end", "end_offset")
    span = (int(_number(place, "the start or end of an entity", whole=True)) for place in (start, end))
    return Entity(*span, entity["label"].strip())


def _labelled(record: dict[str, Any], id: str, group: str) -> Labelled:
    label = field(record, "label", "class", "category")
    if not isinstance(label, str | int | float) or label != label or not str(label).strip():  # NaN is not itself
        raise ValueError(f"label is {shown(label)}; expected a text or a number (fields: {', '.join(record)})")
    return Labelled(id, text_of(record, "text", "sentence", "content"), str(label).strip(), group)


def _pair(record: dict[str, Any], id: str, group: str) -> Pair:
    score = field(record, "score", "similarity_score")
    number = None if score in (None, "") else _number(score, "score")
    return Pair(
        id,
        text_of(record, "first", "text_a", "sentence1", "anchor", "query"),
        text_of(record, "second", "text_b", "sentence2", "positive"),
        number,
        group,
    )


def field(record: dict[str, Any], *names: str) -> Any:
    """The value of the first of these fields that the row has, or None."""
    return next((record[name] for name in names if name in record), None)


def text_of(record: dict[str, Any], *names: str) -> str:
    """The text of the first of these fields that the row has. Raises ValueError if there is none, or it is blank."""
    value = field(record, *names)
    if not isinstance(value, str) or not value.strip():
        has = f"{' or '.join(names)} is {shown(value)}" if value is not None else f"has no {' or '.join(names)}"
        raise ValueError(f"{has}; expected a text (fields: {', '.join(map(str, record)) or 'none'})")
    return value


def id_of(record: dict[str, Any], default: str, *names: str) -> str:
    """The id of a record under the first of these names that it has, else the default."""
    id = field(record, *names)
    return default if id in (None, "") else str(id)


def _number(value: Any, name: str, whole: bool = False) -> float:
    """A number, which a table has as text. Raises ValueError if it is not one."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number) or (whole and not number.is_integer()):
        raise ValueError(f"{name} is {shown(value)}; expected a {'whole ' if whole else ''}number")
    return number


MAKERS = {"qa": _question, "ner": _sentence, "classify": _labelled, "embed": _pair}
