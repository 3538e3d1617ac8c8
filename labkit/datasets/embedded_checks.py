"""What is wrong with a copy of the embedded labelled data: one validator for each set, path -> faults in words.

    validate_questions("data/field_notes")                  questions.*.json against passages.jsonl beside them
    validate_entities("data/field_notes")                   entities.*.conll against passages.jsonl beside them
    validate_posts("data/evidence/posts.jsonl")             Evidence
    validate_items("data/which_way_round/items.jsonl")      Which way round

Each fault is one line, "<file>, <line, question, document or group>: <what>"; [] if nothing is wrong. What the cards
promise and a program can see is a rule here; whether a label is right is for a reader to say.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from labkit.datasets.conll import read_conll
from labkit.datasets.embedded import DIRECTIONS, SPLITS
from labkit.datasets.evidence import CRITERIA, MARKS
from labkit.datasets.examples import NO_TAG, Question
from labkit.datasets.files import json_lines, read_text
from labkit.datasets.squad import read_squad
from labkit.datasets.words import words_of
from labkit.errors import DataError

AT_LEAST_QUESTIONS, AT_LEAST_POSTS, AT_LEAST_ITEMS = 600, 200, 400
UNANSWERABLE = (0.15, 0.25)  # share of all questions
ANSWER_WORDS = 12  # at most, as `str.split` counts them
ENTITY_KINDS = ("PER", "ORG", "LOC", "DATE", "MISC")
ITEM_KINDS = ("PER", "LOC", "ORG")
CRITERIA_PER_POST = 3
POST_WORDS = (50, 140)
WITH_EVIDENCE = (0.4, 0.6)  # share of the labels of a split

_PASSAGE = {"id": str, "split": str, "region": str, "genre": str, "title": str, "text": str}
_POST = {"id": str, "split": str, "post": str, "criteria": list}
_ITEM = {
    "id": str, "split": str, "direction": str, "group": str, "text": str, "start": int, "end": int, "label": str,
}  # fmt: skip


# ---- Field Notes: questions ------------------------------------------------------------------------------------------


def validate_questions(place: str | Path) -> list[str]:
    """What is wrong with questions.train.json, .dev.json and .test.json in the folder `place`, and with the three."""
    place = Path(place)
    try:
        passages = _passages(place)
    except DataError as error:
        return [str(error)]
    faults: list[str] = []
    found: list[Question] = []
    first_in: dict[str, str] = {}  # id -> the file that has it first
    for split in SPLITS:
        path = place / f"questions.{split}.json"
        try:
            questions = read_squad(path)
            marked = {str(qa["id"]): qa for qa in _raw_questions(path)}
        except DataError as error:
            faults.append(str(error))
            continue
        asked: set[tuple[str, str]] = set()
        for each in questions:
            here = list(_question_faults(each, marked[each.id], passages, split))
            if (key := (each.group, each.question.casefold())) in asked:
                here.append(f"asks of {each.group} what another question asks: {each.question!r}")
            asked.add(key)
            if each.id in first_in:
                here.append(f"has an id that a question in {first_in[each.id]} has already")
            first_in.setdefault(each.id, path.name)
            faults += [f"{path}, question {each.id!r}: {what}" for what in here]
        groups = {each.group for each in questions}
        without = [id for id, row in passages.items() if row["split"] == split and id not in groups]
        faults += [f"{path}, passage {id}: has no question" for id in without]
        found += questions
    return faults + [f"{place}, all splits: {what}" for what in _questions_at_large(found)]


def _raw_questions(path: Path) -> Iterator[dict[str, Any]]:
    """The questions as they are written; for a file that `read_squad` could read."""
    for article in json.loads(read_text(path))["data"]:
        for paragraph in article["paragraphs"]:
            yield from paragraph["qas"]


def _question_faults(
    question: Question, written: dict[str, Any], passages: dict[str, dict[str, Any]], split: str
) -> Iterator[str]:
    passage = passages.get(question.group)
    if passage is None:
        yield f"its title is {question.group!r}, which is the id of no passage"
    elif passage["split"] != split:
        yield f"{question.group} is a passage of the split {passage['split']}"
    if passage is not None and question.context != passage["text"]:
        yield f"its context is not the text of {question.group}"
    marked, answers = written.get("is_impossible"), written.get("answers") or []
    if marked is not (not answers):
        yield f"is_impossible is {marked!r}, and the question has {len(answers)} answers"
    if question.question != question.question.strip() or not question.question.endswith("?"):
        yield f"{question.question!r} should end with a question mark, without white space around it"
    for answer in question.answers:
        if answer.text != answer.text.strip():
            yield f"the answer {answer.text!r} has white space around it"
        if (words := len(answer.text.split())) > ANSWER_WORDS:
            yield f"the answer {answer.text!r} has {words} words; expected {ANSWER_WORDS} at most"


def _questions_at_large(found: list[Question]) -> Iterator[str]:
    if len(found) < AT_LEAST_QUESTIONS:
        yield f"hold {len(found)} questions; expected at least {AT_LEAST_QUESTIONS}"
    share = sum(not each.answers for each in found) / max(len(found), 1)
    if not UNANSWERABLE[0] <= share <= UNANSWERABLE[1]:
        yield f"{share:.0%} of the questions have no answer; expected {UNANSWERABLE[0]:.0%} to {UNANSWERABLE[1]:.0%}"


# ---- Field Notes: entities -------------------------------------------------------------------------------------------


def validate_entities(place: str | Path) -> list[str]:
    """What is wrong with entities.train.conll, .dev.conll and .test.conll in the folder `place`."""
    place = Path(place)
    try:
        passages = _passages(place)
    except DataError as error:
        return [str(error)]
    faults: list[str] = []
    for split in SPLITS:
        path = place / f"entities.{split}.conll"
        try:
            read_conll(path)
            faults += [f"{path}, {what}" for what in _column_faults(read_text(path), passages, split)]
        except DataError as error:
            faults.append(str(error))
    return faults


def _column_faults(text: str, passages: dict[str, dict[str, Any]], split: str) -> Iterator[str]:
    """ "line 7: ..." for what is wrong with a line, then "document fn-001: ..." for what is wrong with a passage."""
    documents: dict[str, list[tuple[str, str]]] = {}  # id -> (word, tag) of its lines
    current: list[tuple[str, str]] | None = None
    before = NO_TAG
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            before = NO_TAG
        elif line.startswith("# document = "):
            name, before = line.removeprefix("# document = "), NO_TAG
            if name in documents:
                yield f"line {number}: the document {name} began before"
            current = documents.setdefault(name, [])
        elif current is None:
            yield f"line {number}: stands before the first document"
        elif line.count("\t") != 1:
            yield f"line {number}: is {line!r}; expected a word, one tab and its tag"
        else:
            word, tag = line.split("\t")
            if what := _tag_fault(tag, before):
                yield f"line {number}: {what}"
            current.append((word, tag))
            before = tag
    for name, columns in documents.items():
        if (passage := passages.get(name)) is None:
            yield f"document {name}: is the id of no passage"
            continue
        if passage["split"] != split:
            yield f"document {name}: is a passage of the split {passage['split']}"
        expected = [passage["text"][start:end] for start, end in words_of(passage["text"])]
        pairs = zip_longest((word for word, _ in columns), expected)
        for place, (word, passage_word) in enumerate(pairs, 1):
            if word != passage_word:
                yield f"document {name}: word {place} is {word!r}, and the passage has {passage_word!r}"
                break
        if all(tag == NO_TAG for _, tag in columns):
            yield f"document {name}: has no entity"
    for name, passage in passages.items():
        if passage["split"] == split and name not in documents:
            yield f"document {name}: is missing"


def _tag_fault(tag: str, before: str) -> str | None:
    """What is wrong with a tag that follows the tag `before` (O at the start of a sentence)."""
    letter, _, kind = tag.partition("-")
    if tag == NO_TAG:
        return None
    if letter not in ("B", "I"):
        return f"the tag is {tag!r}; expected O, B- or I-"
    if kind not in ENTITY_KINDS:
        return f"the kind is {kind!r}; expected {', '.join(ENTITY_KINDS)}"
    if letter == "I" and before not in (f"B-{kind}", f"I-{kind}"):
        return f"the tag {tag} follows {before}; an entity begins with B-{kind}"
    return None


# ---- Evidence --------------------------------------------------------------------------------------------------------


def validate_posts(path: str | Path) -> list[str]:
    """What is wrong with a file of posts, line after line, then with the file as a whole."""
    rows, faults = _rows(path, _POST)
    faults += _twice(rows, "id") + _twice(rows, "post")
    labels: dict[str, list[bool]] = defaultdict(list)  # split -> whether there is evidence
    for line, row in rows:
        faults += [(line, what) for what in _post_faults(row)]
        labels[row["split"]] += [each["evidence"] is not None for each in row["criteria"] if _is_criterion(each)]
    whole = [f"holds {len(rows)} posts; expected at least {AT_LEAST_POSTS}"] if len(rows) < AT_LEAST_POSTS else []
    for split in SPLITS:
        share = sum(labels[split]) / max(len(labels[split]), 1)
        if not labels[split]:
            whole.append(f"has no post of the split {split}")
        elif not WITH_EVIDENCE[0] <= share <= WITH_EVIDENCE[1]:
            bounds = f"{WITH_EVIDENCE[0]:.0%} to {WITH_EVIDENCE[1]:.0%}"
            whole.append(f"{share:.0%} of the labels of {split} have evidence; expected {bounds}")
    return _told(path, faults, [f"{path}, whole file: {what}" for what in whole])


def _post_faults(row: dict[str, Any]) -> Iterator[str]:
    post, criteria, given = row["post"], set(), set()
    yield from _split_faults(row)
    if post != post.strip():
        yield "the post has white space around it"
    if not POST_WORDS[0] <= (count := len(post.split())) <= POST_WORDS[1]:
        yield f"the post has {count} words; expected {POST_WORDS[0]} to {POST_WORDS[1]}"
    if held := [mark for mark in MARKS if mark in post]:
        yield f"the post holds the mark {held[0]}, which a prompt keeps for itself"
    if len(row["criteria"]) != CRITERIA_PER_POST:
        yield f"has {len(row['criteria'])} criteria; expected {CRITERIA_PER_POST}"
    for each in row["criteria"]:
        if not _is_criterion(each):
            yield f"has among its criteria {each!r}; expected an object of criterion and evidence (a text, or null)"
            continue
        criterion, evidence = each["criterion"], each["evidence"]
        if criterion not in CRITERIA:
            yield f"the criterion is {criterion!r}; expected {', '.join(CRITERIA)}"
        if criterion in criteria:
            yield f"has the criterion {criterion} twice"
        criteria.add(criterion)
        if evidence is not None:
            yield from _evidence_faults(post, evidence, criterion)
            if evidence in given:
                yield f"has the same evidence for {criterion} and for another criterion: {evidence!r}"
            given.add(evidence)


def _is_criterion(each: Any) -> bool:
    if not isinstance(each, dict) or set(each) != {"criterion", "evidence"}:
        return False
    return isinstance(each["criterion"], str) and isinstance(each["evidence"], str | None)


def _evidence_faults(post: str, evidence: str, criterion: str) -> Iterator[str]:
    said = f"the evidence for {criterion}, {evidence!r},"
    if not evidence or evidence != evidence.strip():
        yield f"{said} should be a sentence without white space around it"
    elif (count := post.count(evidence)) != 1:
        yield f"{said} stands {count} times in the post; expected once"
    else:
        start = post.index(evidence)
        if not (_is_boundary(post, start) and _is_boundary(post, start + len(evidence))):
            yield f"{said} is not a whole sentence of the post"


def _is_boundary(text: str, place: int) -> bool:
    """Whether one sentence may end at `place` and another begin: at either end, a line break, a mark with a space."""
    left, right = text[:place], text[place:]
    if not left.strip() or not right.strip():
        return True
    space = left[len(left.rstrip()) :] + right[: len(right) - len(right.lstrip())]
    last = left.rstrip()[-1]
    return "\n" in space or bool(space and not last.isalnum() and last not in ",;-")


# ---- Which way round -------------------------------------------------------------------------------------------------


def validate_items(path: str | Path) -> list[str]:
    """What is wrong with a file of items, line after line, then group after group, then with the file as a whole."""
    rows, faults = _rows(path, _ITEM)
    faults += _twice(rows, "id") + _twice(rows, "text")
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line, row in rows:
        faults += [(line, what) for what in _item_faults(row)]
        groups[row["group"]].append(row)
    whole, group_of = [], {}
    for group, items in groups.items():
        here = list(_group_faults(items))
        for name in {item["text"][item["start"] : item["end"]] for item in items}:
            if (other := group_of.setdefault(name, group)) != group:
                here.append(f"has the name {name!r}, as the group {other} has")
        whole += [f"{path}, group {group}: {what}" for what in here]
    if len(rows) < AT_LEAST_ITEMS:
        whole.append(f"{path}, whole file: holds {len(rows)} items; expected at least {AT_LEAST_ITEMS}")
    counted = Counter((row["split"], row["direction"], row["label"]) for _, row in rows)
    for split in SPLITS:
        for direction in DIRECTIONS:
            each = [counted[split, direction, kind] for kind in ITEM_KINDS]
            if len(set(each)) > 1 or not each[0]:
                told = ", ".join(f"{n} {kind}" for n, kind in zip(each, ITEM_KINDS, strict=True))
                whole.append(f"{path}, {split}, {direction}: holds {told}; expected as many of each kind, and some")
    return _told(path, faults, whole)


def _item_faults(row: dict[str, Any]) -> Iterator[str]:
    text, start, end = row["text"], row["start"], row["end"]
    yield from _split_faults(row)
    if row["direction"] not in DIRECTIONS:
        yield f"the direction is {row['direction']!r}; expected {', '.join(DIRECTIONS)}"
    if row["label"] not in ITEM_KINDS:
        yield f"the label is {row['label']!r}; expected {', '.join(ITEM_KINDS)}"
    if not (text.isascii() and text.isprintable()):
        yield "the text holds other characters than printable ASCII"
    if text != text.strip() or not text.endswith("."):
        yield "the text should end with a full stop, without white space around it"
    if (start, end) not in words_of(text):
        yield f"text[{start}:{end}] is {text[max(start, 0) : max(end, 0)]!r}, which is not one word"
    elif (count := text.count(text[start:end])) != 1:
        yield f"the name {text[start:end]!r} stands {count} times in the text; expected once"


def _group_faults(items: list[dict[str, Any]]) -> Iterator[str]:
    labels = [item["label"] for item in items]
    if sorted(labels) != sorted(ITEM_KINDS):
        yield f"has the labels {', '.join(labels)}; expected one each of {', '.join(ITEM_KINDS)}"
    for key in ("split", "direction"):
        if len(values := sorted({item[key] for item in items})) > 1:
            yield f"lies in more than one {key}: {', '.join(values)}"
    after = items[0]["direction"] == "after"  # the words after the name tell; what comes before it is shared
    sides = {item["text"][: item["end"]] if after else item["text"][item["start"] :] for item in items}
    if len(sides) > 1:
        yield f"should have one text {'up to' if after else 'from'} the name, and has {len(sides)}"


# ---- what they share -------------------------------------------------------------------------------------------------


def _passages(place: Path) -> dict[str, dict[str, Any]]:
    """id -> the passage. Raises DataError for a line that holds none; `field_notes.validate` says all of it."""
    path = place / "passages.jsonl"
    rows, faults = _rows(path, _PASSAGE)
    if faults:
        raise DataError(_told(path, faults, [])[0])
    return {row["id"]: row for _, row in rows}


def _rows(path: str | Path, form: dict[str, type]) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str]]]:
    """(line, row) of the rows that have the keys and types of `form`, and (line, what is wrong) of the others.

    A line that is no JSON object ends the reading: its fault, told in full, has the line 0.
    """
    rows, faults = [], []
    try:
        for line, row in json_lines(path):
            unfit = [key for key in form if key in row and type(row[key]) is not form[key]]
            if set(row) != set(form):
                faults.append((line, f"has the keys {', '.join(row)}; expected {', '.join(form)}"))
            elif unfit:
                faults.append((line, f"{unfit[0]} should be of the type {form[unfit[0]].__name__}"))
            else:
                rows.append((line, row))
    except DataError as error:
        faults.append((0, str(error)))
    return rows, faults


def _twice(rows: list[tuple[int, dict[str, Any]]], key: str) -> list[tuple[int, str]]:
    """The lines whose value of `key`, letter case and white space aside, stands in an earlier line."""
    first: dict[str, int] = {}
    seen = [(line, first.setdefault(re.sub(r"\s+", " ", row[key]).casefold(), line)) for line, row in rows]
    return [(line, f"has the {key} of line {earlier} again") for line, earlier in seen if line != earlier]


def _split_faults(row: dict[str, Any]) -> Iterator[str]:
    if row["split"] not in SPLITS:
        yield f"the split is {row['split']!r}; expected {', '.join(SPLITS)}"


def _told(path: str | Path, faults: list[tuple[int, str]], whole: list[str]) -> list[str]:
    """All faults as lines of text, those of single lines first and in their order."""
    ordered = sorted(faults, key=lambda each: each[0])
    return [f"{path}, line {line}: {what}" if line else what for line, what in ordered] + whole
