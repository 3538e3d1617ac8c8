"""WebQuestions (Berant et al. 2013): short questions about entities of Freebase, with all their answers.

The file is JSON, a list of {"qId", "qText", "answers"} (github.com/brmson/dataset-factoid-webquestions), or the same
objects one a line; "id" or "url" and "question" are understood as well, as the hub's web_questions names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.datasets.files import fault, json_lines, read_text
from labkit.datasets.paraphrased_question import ParaphrasedQuestion, id_of, questions_of, text_of, texts_of

TEMPLATES = (  # the question itself comes first; none adds to what is asked
    "{question}",
    "Please answer: {question}",
    "I would like to know: {question}",
    "Let me ask you this: {question}",
    "Can you tell me this: {question}",
    "Here is a question for you: {question}",
    "Answer the following question: {question}",
    "Do you know the answer to this one: {question}",
    "I have a question: {question}",
    "Somebody asked me: {question}",
    "Give a short answer to this: {question}",
    "Tell me, please: {question}",
    "What would you reply to this: {question}",
    "This is the question: {question}",
    "{question} Please tell me.",
    "{question} Do you know?",
    "{question} That is what I would like to know.",
    "{question} What is the answer?",
    "{question} Can you answer that?",
    "{question} Give a short answer.",
)


def read_webquestions(path: str | Path) -> list[ParaphrasedQuestion]:
    """The questions of one file, in its order; there are no relations.

    The paraphrases are the question and what the row lists as "paraphrases"; `natural` is True. A row without that
    field has those that `TEMPLATES` make of the question, 20, and `natural` is False: results on them say
    nothing about real paraphrases, and belong in a table of their own.

    Raises:
        DataError: not this form; the message names file and line.
    """
    return questions_of(path, json_entries(path), _question)


def json_entries(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line where it begins, object) of each entry of a JSON list, or of JSON lines."""
    text = read_text(path)
    if not text.lstrip().startswith("["):
        yield from json_lines(path)
        return
    try:
        json.loads(text)  # finds all that is wrong with the JSON, before anything is handed out
    except json.JSONDecodeError as error:
        raise fault(path, error.lineno, f"is not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands
        raise fault(path, 1, f"is not JSON that can be read ({error})") from error
    decoder, line = json.JSONDecoder(), 1
    end, at = 0, _entry_after(text, text.index("[") + 1)
    while text[at] != "]":
        line += text.count("\n", end, at)
        entry, end = decoder.raw_decode(text, at)
        if not isinstance(entry, dict):
            raise fault(path, line, f"holds a {type(entry).__name__} in its list, not an object with fields")
        yield line, entry
        line, at = line + text.count("\n", at, end), _entry_after(text, end)


def _entry_after(text: str, at: int) -> int:
    """Where the next entry of a JSON list begins, or its bracket."""
    while text[at] in " \t\r\n,":
        at += 1
    return at


def _question(row: dict[str, Any], line: str) -> ParaphrasedQuestion:
    asked = text_of(row, "qText", "question")
    id = id_of(row, line, next((name for name in ("qId", "id", "url") if name in row), "qId"))
    answers = tuple(dict.fromkeys(texts_of(row, "answers")))
    if "paraphrases" not in row:
        return ParaphrasedQuestion(id, tuple(t.format(question=asked) for t in TEMPLATES), answers, natural=False)
    own = texts_of(row, "paraphrases")
    if not own:
        raise ValueError("has an empty list of paraphrases; without the field they are made by templates")
    return ParaphrasedQuestion(id, tuple(dict.fromkeys((asked, *own))), answers)
