"""SQuAD 1.1 and 2.0 JSON (Rajpurkar et al. 2016, 2018): read, checked, written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.datasets.examples import Answer, Question
from labkit.datasets.files import fault, read_text, write_whole
from labkit.errors import DataError


def read_squad(path: str | Path) -> list[Question]:
    """The questions of a SQuAD file; `group` is the article's title. Each answer must stand where the file says.

    Raises:
        DataError: not JSON, not of this form, or an answer that its context does not hold at its offset. The message
            names the question.
    """
    text = read_text(path)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise fault(path, error.lineno, f"is not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands
        raise DataError(f"{path} is not JSON that can be read ({error})") from error
    found, ids = [], set()
    try:
        for number, article in enumerate(content["data"]):
            group = str(article.get("title") or f"article {number}")
            for paragraph in article["paragraphs"]:
                found += [_question(qa, paragraph["context"], group, path) for qa in paragraph["qas"]]
    except KeyError as error:
        raise DataError(f"{path} is not SQuAD (data -> paragraphs -> qas -> answers): {error} is missing") from error
    except (TypeError, AttributeError) as error:
        raise DataError(f"{path} is not SQuAD (data -> paragraphs -> qas -> answers): {error}") from error
    if not found:
        raise DataError(f"{path} holds no question")
    for each in found:
        if each.id in ids:
            raise DataError(f"{path}, question {each.id!r}: another question has this id")
        ids.add(each.id)
    return found


def write_squad(path: str | Path, questions: Sequence[Question], version: str = "v2.0") -> Path:
    """Write a SQuAD 2.0 file: one article per group, one paragraph per context."""
    articles: dict[str, dict[str, list[Question]]] = {}
    for each in questions:
        articles.setdefault(each.group, {}).setdefault(each.context, []).append(each)
    data = [
        {
            "title": group,
            "paragraphs": [{"context": c, "qas": [_row(q) for q in asked]} for c, asked in contexts.items()],
        }
        for group, contexts in articles.items()
    ]
    content = json.dumps({"version": version, "data": data}, ensure_ascii=False, indent=1)
    return write_whole(path, content + "\n")


def _question(qa: Any, context: Any, group: str, path: str | Path) -> Question:
    where = f"{path}, question {qa['id']!r}"
    for text in (qa["question"], context):
        if not isinstance(text, str):
            raise DataError(f"{where}: {text!r} stands where text was expected")
    impossible = qa.get("is_impossible", False)
    if impossible not in (None, True, False):
        raise DataError(f"{where}: is_impossible is {impossible!r}; expected true or false")
    listed = [] if impossible else [(answer["text"], answer["answer_start"]) for answer in qa["answers"]]
    for text, start in listed:
        if not isinstance(text, str) or not isinstance(start, int):
            raise DataError(f"{where}: the answer {text!r} at {start!r} is no text and its place")
    answers = tuple(dict.fromkeys(Answer(text, start) for text, start in listed))
    require_spans(context, answers, where)
    if not answers and not impossible and "is_impossible" in qa:
        raise DataError(f"{where}: has no answer and is not marked is_impossible")
    return Question(str(qa["id"]), qa["question"], context, answers, group)


def require_spans(context: str, answers: Sequence[Answer], where: str) -> None:
    """Raise DataError unless each answer stands in the context where it says it does."""
    for answer in answers:
        stands = context[answer.start : answer.end] if answer.start >= 0 else ""
        if stands != answer.text or not answer.text:
            hint = _where_else(context, answer)
            raise DataError(
                f"{where}: the answer {answer.text!r} is not at {answer.start}, where {stands!r} stands{hint}"
            )


def _where_else(context: str, answer: Answer) -> str:
    if not answer.text or answer.text not in context:
        return "; the context does not hold it at all"
    near = min(
        (i for i in range(len(context)) if context.startswith(answer.text, i)), key=lambda i: abs(i - answer.start)
    )
    return f"; it is at {near}"


def _row(question: Question) -> dict[str, Any]:
    answers = [{"text": a.text, "answer_start": a.start} for a in question.answers]
    return {
        "id": question.id,
        "question": question.question,
        "answers": answers,
        "is_impossible": not answers,
    }
