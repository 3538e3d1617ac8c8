"""Questions in several wordings: `read_paraphrases("questions.jsonl")`, whatever their form.

known-facts        the embedded facts for testing; "known-facts:shots" those for few-shot examples
webqa:FILE         WebQuestions (Berant et al. 2013): {"qId", "qText", "answers"} as a JSON list or one a line
                   (github.com/brmson/dataset-factoid-webquestions); "id" or "url" and "question" as on the hub
lama:FOLDER        ParaRel's patterns (Elazar et al. 2021) over LAMA's facts (Petroni et al. 2019), one file for each
                   relation, as in github.com/yanaiela/pararel: graphs_json/P36.jsonl with "pattern", and
                   trex_lms_vocab/P36.jsonl with "sub_label", "obj_label" and "uuid"
FILE               .jsonl, .csv or .json, recognised by the fields of the first row: WebQuestions; MyriadLAMA (Zhao et
                   al. 2024; hub: iszhaoxin/MyriadLAMA, saved with `to_json`), a row per fact and template
                   with "uuid", "rel_uri", "sub_ent", "obj_ents", "obj_aliases", "template" and "is_manual"; or your
                   own rows:

    {"id": "fr", "paraphrases": ["What is the capital of France?", "France's capital is ____."], "answers": ["Paris"]}

"id" (else the line) and "relation" are optional. A CSV has lists as JSON in its
cells. Your own rows need no "answers" if they are only to be answered (`unanswered=True`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from labkit.datasets.files import (
    Records,
    collect,
    json_lines,
    json_records,
    parse_json,
    path_of,
    shown,
    table_records,
)
from labkit.datasets.records import id_of, text_of
from labkit.errors import DataError, require_one_of
from labkit.files import folder

BLANK = "____"  # stands in a statement where the answer belongs
KNOWN_FACTS = "known-facts"
SPLITS = ("shots", "test")
PATTERNS, PAIRS = "graphs_json", "trex_lms_vocab"  # the folders of ParaRel
NOT_SHIPPED = {
    "webqa": "webqa:FILE, with a JSON file of github.com/brmson/dataset-factoid-webquestions",
    "lama": f"lama:FOLDER, with the folders {PATTERNS} and {PAIRS} of github.com/yanaiela/pararel in it",
}
TEMPLATES = (  # the wordings of a WebQuestion without paraphrases, the question itself first
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
_SLOT = re.compile(r"\[([XY])\]")


@dataclass(frozen=True)
class ParaphrasedQuestion:
    """One question in several wordings.

    Attributes:
        id: unique in its set.
        paraphrases: at least one, none empty, none twice; each is a whole question, or a statement with `BLANK`.
        answers: the accepted ones, none empty, the usual one first; () where none is known: it cannot be scored then.
        relation: the kind of fact, for scores per relation; None where the set has no relations.
        natural: False where stated templates made the paraphrases from one wording.
    """

    id: str
    paraphrases: tuple[str, ...]
    answers: tuple[str, ...]
    relation: str | None = None
    natural: bool = True

    def __post_init__(self) -> None:
        if not self.paraphrases or not all(text.strip() for text in (*self.paraphrases, *self.answers)):
            raise DataError(f"question {self.id!r} has no paraphrase, or an empty paraphrase or answer")
        if len(set(self.paraphrases)) < len(self.paraphrases):
            raise DataError(f"question {self.id!r} has a paraphrase twice; take one of them out")


def read_paraphrases(
    name_or_path: str | Path, pairs: str | Path | None = None, *, unanswered: bool = False
) -> list[ParaphrasedQuestion]:
    """The questions of a set by its name, or of a file or folder; see above for the forms.

    Args:
        pairs: the folder of pairs, if `lama:FOLDER` is the folder of patterns only.
        unanswered: whether your own rows may lack answers; such questions cannot be scored.

    Raises:
        DataError: no such set or file, or a row of another form; the message names file and place.
    """
    kind, _, rest = str(name_or_path).partition(":")
    if pairs is not None and kind != "lama":
        raise DataError(f"{name_or_path} needs no folder of pairs; only lama:FOLDER takes one")
    if kind == KNOWN_FACTS:
        return read_known_facts(rest or "test")
    if kind in NOT_SHIPPED and not rest:
        raise DataError(f"{kind} names no data, and labkit does not ship any: give {NOT_SHIPPED[kind]}")
    path = path_of(rest if kind in NOT_SHIPPED else name_or_path)
    if kind == "lama" or (path / PATTERNS).is_dir():
        return _pararel(path / PATTERNS, path / PAIRS) if pairs is None else _pararel(path, path_of(pairs))
    readers = {".jsonl": json_records, ".json": json_records, ".csv": table_records}
    if not path.is_file() or path.suffix.lower() not in readers:
        forms = f"{KNOWN_FACTS}, webqa:FILE, lama:FOLDER, or a .jsonl, .csv or .json file"
        raise DataError(f"{name_or_path} is no file and no known set that can be read; give one of: {forms}")
    rows = list(readers[path.suffix.lower()](path))
    fields = next((row.keys() for _, row in rows if isinstance(row, dict)), set())
    if fields >= {"uuid", "template", "sub_ent"}:
        return _myriad_lama(path, rows)
    is_own = kind != "webqa" and not ("answers" in fields and fields & {"qText", "question"})

    def question_of(row: dict[str, Any], id: str) -> ParaphrasedQuestion:
        question = _own(row, id) if is_own else _webquestion(row, id)
        if not question.answers and not (is_own and unanswered):
            raise ValueError(f"question {question.id!r} has no answers; write a list of texts")
        return question

    return collect(path, rows, question_of).all()


def read_known_facts(split: str = "test") -> list[ParaphrasedQuestion]:
    """The embedded facts (data/known_facts) of one split, in their order: "test" to score, "shots" to prompt."""
    require_one_of(f"the split of {KNOWN_FACTS}", split, SPLITS)
    rows = json_lines(folder("data") / "known_facts" / "facts.jsonl")
    return [_own(row, str(line)) for line, row in rows if row["split"] == split]


def sample(questions: Sequence[ParaphrasedQuestion], n: int, seed: int = 0) -> list[ParaphrasedQuestion]:
    """At most `n` of the questions, drawn with `seed`, in their order; equally many of each relation where possible.

    The sample does not depend on the order of the questions, and a smaller one is part of a larger one with the same
    seed: methods measured on 150 and on 500 questions of a set share the 150.
    """
    queues: dict[str, list[str]] = {}
    for question in sorted(questions, key=lambda question: question.id):
        queues.setdefault(question.relation or "", []).append(question.id)
    relations = sorted(queues)
    random.Random(seed).shuffle(relations)
    for relation in relations:
        random.Random(f"{seed} {relation}").shuffle(queues[relation])
    rounds = zip_longest(*(queues[relation] for relation in relations))  # one question of each relation a round
    chosen = {*[id for round in rounds for id in round if id is not None][:n]}
    return [question for question in questions if question.id in chosen]


def _own(row: dict[str, Any], id: str) -> ParaphrasedQuestion:
    relation = text_of(row, "relation").strip() if row.get("relation") else None
    answers = _texts(row, "answers") if row.get("answers") else ()
    return ParaphrasedQuestion(id_of(row, id, "id"), _texts(row, "paraphrases", unique=False), answers, relation)


def _webquestion(row: dict[str, Any], id: str) -> ParaphrasedQuestion:
    """Results on the paraphrases of `TEMPLATES` (`natural` is False) do not transfer to real paraphrases."""
    question = text_of(row, "qText", "question").strip()
    is_natural = "paraphrases" in row
    wordings = _texts(row, "paraphrases") if is_natural else [text.format(question=question) for text in TEMPLATES]
    wordings = tuple(dict.fromkeys((question, *wordings)))
    return ParaphrasedQuestion(id_of(row, id, "qId", "id", "url"), wordings, _texts(row, "answers"), None, is_natural)


def _texts(row: dict[str, Any], *names: str, unique: bool = True) -> tuple[str, ...]:
    """The texts in the lists (or lists of lists) of these fields. A table has a list as JSON."""
    texts: list[Any] = []
    for name in names:
        value = row.get(name)
        try:
            entries = parse_json(value) if isinstance(value, str) else value
            if not isinstance(entries, list):
                raise TypeError
            texts += [text.strip() for entry in entries for text in (entry if isinstance(entry, list) else [entry])]
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f'has {shown(value)} as its {name}; write a list of texts, such as ["Paris"]') from error
    return tuple(dict.fromkeys(texts)) if unique else tuple(texts)


# ---- facts and templates: ParaRel and MyriadLAMA ---------------------------------------------------------------------


def filled(template: str, subject: str) -> str:
    """A template about a subject: [X] becomes it, [Y] a blank, and no space stands before a stop or a comma."""
    if missing := {"X", "Y"} - set(_SLOT.findall(template)):
        raise ValueError(f"has the template {template!r} without [{min(missing)}]")
    subject = " ".join(subject.split())
    template = re.sub(r"\s+(?=[.,](\s|$))", "", template)
    if subject.endswith("."):
        template = template.replace("[X].", "[X]")  # "Warner Bros." ends the sentence too
    text = _SLOT.sub(lambda slot: subject if slot[1] == "X" else BLANK, template)
    return " ".join(text.split())


def _pararel(patterns: Path, pairs: Path) -> list[ParaphrasedQuestion]:
    """The facts of all relations that have at least two patterns, by relation, each in the order of its file.

    Pairs of one relation with the same subject are one question whose answers are all their objects; its id is the
    relation and the uuid of the first. A relation with pairs but without patterns is left out.

    Known faults of the data: T-REx does not list all objects of a subject, so a right answer may count as wrong; about
    one subject in eight holds its object ("Microsoft Windows"), which `labkit.fusion.scores.holds_answer` finds; "a
    ____" and "an ____" both occur.
    """

    def pattern(row: dict[str, Any], id: str) -> str:
        filled(text_of(row, "pattern"), "a subject")  # raises ValueError
        return row["pattern"]

    def fact(row: dict[str, Any], id: str) -> ParaphrasedQuestion:
        subject, answer, uuid = (text_of(row, name).strip() for name in ("sub_label", "obj_label", "uuid"))
        wordings = tuple(dict.fromkeys(filled(template, subject) for template in templates))
        return ParaphrasedQuestion(f"{file.stem}-{uuid}", wordings, (answer,), file.stem)

    questions: dict[tuple[str, ...], ParaphrasedQuestion] = {}
    for file in sorted(patterns.glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem)):  # P17 before P101
        templates = collect(file, json_records(file), pattern).all()
        facts = collect(pairs / file.name, json_records(pairs / file.name), fact).all()
        for question in facts if len(facts[0].paraphrases) > 1 else ():
            key = (file.stem, *question.paraphrases)
            first = questions.setdefault(key, question)
            questions[key] = replace(first, answers=tuple(dict.fromkeys(first.answers + question.answers)))
    if not questions:
        raise DataError(f"{patterns} holds no relation with 2 patterns and pairs; give {NOT_SHIPPED['lama']}")
    return list(questions.values())


def _myriad_lama(path: Path, rows: Records) -> list[ParaphrasedQuestion]:
    """The facts of a file, in the order of their first rows; templates by people come first, and each counts once.

    The names of the columns come from public programs that read the set, not from the set itself.
    """
    facts: dict[str, tuple[str, tuple[str, ...]]] = {}  # by uuid: relation, answers
    wordings: dict[str, tuple[list[str], list[str]]] = {}  # by uuid: by people, rewritten

    def add(row: dict[str, Any], id: str) -> None:
        uuid, subject, relation = (text_of(row, name).strip() for name in ("uuid", "sub_ent", "rel_uri"))
        fact = relation, _texts(row, *(name for name in ("obj_ents", "obj_aliases") if row.get(name)))
        if not fact[1] or facts.setdefault(uuid, fact) != fact:
            raise ValueError("has no obj_ents or obj_aliases, or others than an earlier row with the same uuid")
        is_rewritten = str(row.get("is_manual")).lower() not in ("true", "1")
        wordings.setdefault(uuid, ([], []))[is_rewritten].append(filled(text_of(row, "template"), subject))

    collect(path, rows, add).all()
    return [
        ParaphrasedQuestion(f"{relation}-{uuid}", tuple(dict.fromkeys(chain(*wordings[uuid]))), answers, relation)
        for uuid, (relation, answers) in facts.items()
    ]
