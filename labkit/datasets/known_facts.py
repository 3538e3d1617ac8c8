"""What is wrong with a file of Known facts, questions of common knowledge in five wordings each (CC0-1.0), in words.

    validate("data/known_facts/facts.jsonl")     -> "<file>, line <n>: <what>", line after line; [] if all is well

What the card promises and a program can see is a rule here: the form, the counts, that no question holds its answer,
that an answer may name what is counted ("8 legs"), and that the wordings differ, measured as shared words (`overlap`)
within a fact and as shared frames (`frame`) within a relation. Whether an answer is true is for a reader to say. The
card is data/known_facts/README.md.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

from labkit.datasets.files import json_lines
from labkit.errors import DataError

SPLITS = ("shots", "test")
AT_LEAST_FACTS, AT_LEAST_RELATIONS, FACTS_OF_A_RELATION = 150, 12, 10
SHOTS = 2  # of each relation, no more and no fewer
PARAPHRASES = 5  # of a fact
QUESTION_WORDS = (3, 20)
ANSWER_WORDS, ALIAS_WORDS = 3, 5  # at most
MEAN_OVERLAP, PAIR_OVERLAP = 0.28, 0.65  # at most, of the ten pairs of a fact, of any pair
FRAME_SHARE = 0.25  # of the facts of a relation, at most, that share a frame
COUNTS = "how-many"  # the relation whose answers are numbers

_COUNTED = re.compile(r"\b(?:how many|number of) (\w+)")  # "legs" in "how many legs"
_KEYS = ("id", "split", "relation", "subject", "paraphrases", "answers")


def validate(path: str | Path) -> list[str]:
    """What is wrong with each line, each relation, and the whole; a line that is no JSON object ends the reading."""
    path, rows, faults = Path(path), [], []
    try:
        for line, row in json_lines(path):
            if tuple(row) != _KEYS:
                faults.append((line, f"has the keys {', '.join(row)}; expected {', '.join(_KEYS)}"))
            elif unfit := [key for key in _KEYS if not _is_filled(row[key], key in ("paraphrases", "answers"))]:
                faults.append((line, f"{unfit[0]} should be text, or a list of texts, and not empty"))
            else:
                rows.append((line, row))
    except DataError as error:
        return [str(error)]
    first: dict[tuple[str, ...], int] = {}  # what may not stand twice -> the line that has it first
    for line, row in rows:
        faults += [(line, what) for what in _faults(row)]
        unique = [("id", row["id"]), ("subject", row["subject"], row["relation"])]
        for kind, value, *rest in unique + [("question", question) for question in row["paraphrases"]]:
            if first.setdefault((kind, value.casefold(), *rest), line) != line:
                faults.append((line, f"has the {kind} {value!r} of line {first[kind, value.casefold(), *rest]} again"))
    told = [f"{path}, line {line}: {what}" for line, what in sorted(faults, key=lambda each: each[0])]
    return told + [f"{path}, {what}" for what in _at_large([row for _, row in rows])]


def overlap(one: str, other: str, subject: str) -> float:
    """Shared words of two questions, of all their words, those of the subject left out (Jaccard): 0.0 to 1.0."""
    a, b = (set(re.findall(r"\w+", _named(subject).sub(" ", text.casefold()))) for text in (one, other))
    return len(a & b) / (len(a | b) or 1)


def frame(question: str, subject: str) -> str:
    """The question in lower case with X for its subject, article and plural included: what two facts may share."""
    return re.sub(r"\b(?:an?|the) X", "X", _named(subject).sub("X", question.casefold()))


def _faults(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with one fact, seen alone."""
    questions, answers, subject = row["paraphrases"], row["answers"], row["subject"]
    if not re.fullmatch(rf"{re.escape(row['relation'])}-\d\d", row["id"]):
        yield f"the id is {row['id']!r}; expected {row['relation']}-01 or the like"
    if row["split"] not in SPLITS:
        yield f"the split is {row['split']!r}; expected {', '.join(SPLITS)}"
    if len(questions) != PARAPHRASES or len({text.casefold() for text in questions}) != len(questions):
        yield f"has {len({text.casefold() for text in questions})} different paraphrases; expected {PARAPHRASES}"
    for text in questions:
        if not re.fullmatch(r"[A-Z][ -~]*[!-~]\?", text) or "  " in text or text.count("?") > 1:
            yield f"{text!r} should be one question in printable ASCII: a capital first, one question mark, at the end"
        if not QUESTION_WORDS[0] <= (count := len(text.split())) <= QUESTION_WORDS[1]:
            yield f"{text!r} has {count} words; expected {QUESTION_WORDS[0]} to {QUESTION_WORDS[1]}"
        if not _named(subject).search(text.casefold()):
            yield f"{text!r} does not name its subject, {subject!r}"
        if told := [answer for answer in answers if _named(answer).search(text.casefold())]:
            yield f"{text!r} holds its answer, {told[0]!r}"
    for answer, most in zip(answers, [ANSWER_WORDS] + [ALIAS_WORDS] * len(answers), strict=False):
        if answer != " ".join(answer.split()) or not unicodedata.is_normalized("NFC", answer):
            yield f"the answer {answer!r} has a space too many, or is not in Unicode's normal form NFC"
        if (count := len(answer.split())) > most:
            yield f"the answer {answer!r} has {count} words; expected {most} at most"
    if len({answer.casefold() for answer in answers}) != len(answers):
        yield "has an answer twice"
    if row["relation"] == COUNTS:
        yield from _uncounted(questions, [answer.casefold() for answer in answers])
    shared = [overlap(one, other, subject) for one, other in combinations(questions, 2)]
    if shared and (mean(shared) > MEAN_OVERLAP or max(shared) > PAIR_OVERLAP):
        found = f"{mean(shared):.2f} on average, {max(shared):.2f} in one pair"
        yield f"its paraphrases share too many words: {found}; expected at most {MEAN_OVERLAP} and {PAIR_OVERLAP}"


def _uncounted(questions: list[str], answers: list[str]) -> Iterator[str]:
    """What a fact that is a number lacks: the number in digits and in words, alone and with each noun that is counted.

    The noun is the word after "how many" or "number of"; a number is an answer that does not begin with another one.
    """
    numbers = [answer for answer in answers if not answer.startswith(tuple(f"{other} " for other in answers))]
    if len({number.isdecimal() for number in numbers}) < 2:
        yield f"the answers have no number in {'words' if numbers[0].isdecimal() else 'digits'}"
    asked = {noun: text for text in questions for noun in _COUNTED.findall(text.casefold())}
    for noun, text in asked.items():
        if lacking := [f"{number} {noun}" for number in numbers if f"{number} {noun}" not in answers]:
            yield f"{text!r} asks for {noun}, and {lacking[0]!r} is no answer"


def _at_large(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with a relation, or with the file as a whole."""
    facts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        facts[row["relation"]].append(row)
    for relation, here in facts.items():
        if len(here) < FACTS_OF_A_RELATION:
            yield f"relation {relation}: has {len(here)} facts; expected at least {FACTS_OF_A_RELATION}"
        if (shots := sum(row["split"] == "shots" for row in here)) != SHOTS:
            yield f"relation {relation}: has {shots} facts in the split shots; expected {SHOTS}"
        users: dict[str, set[str]] = defaultdict(set)
        for row in here:
            for text in row["paraphrases"]:
                users[frame(text, row["subject"])].add(row["id"])
        for each, ids in users.items():
            if len(ids) > FRAME_SHARE * len(here):
                yield f"relation {relation}: {len(ids)} of {len(here)} facts share the frame {each!r}"
    for what, count, least in (("facts", len(rows), AT_LEAST_FACTS), ("relations", len(facts), AT_LEAST_RELATIONS)):
        if count < least:
            yield f"whole file: holds {count} {what}; expected at least {least}"


@cache
def _named(words: str) -> re.Pattern[str]:
    """Finds these words in a text in lower case, in the singular or with a plural s."""
    return re.compile(rf"(?<!\w){re.escape(words.casefold())}(?:e?s)?(?!\w)")


def _is_filled(value: Any, several: bool) -> bool:
    texts = (value if isinstance(value, list) else []) if several else [value]
    return bool(texts) and all(isinstance(text, str) and text.strip() for text in texts)
