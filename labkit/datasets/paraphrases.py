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

"id" (else the number of the row), "relation" and "natural" (else true) are optional. A CSV has lists as JSON in its
cells. Your own rows need no "answers" if they are only to be answered (`unanswered=True`).
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from labkit.datasets.files import (
    Fault,
    Record,
    collect,
    csv_records,
    json_lines,
    json_records,
    parse_json,
    path_of,
    shown,
)
from labkit.datasets.rows import id_of, text_of
from labkit.errors import DataError
from labkit.files import folder

BLANK = "____"  # stands in a statement where the answer belongs
KNOWN_FACTS = "known-facts"
SPLITS = ("shots", "test")
PATTERNS, PAIRS = "graphs_json", "trex_lms_vocab"  # the folders of ParaRel
NOT_SHIPPED = {
    "webqa": "webqa:FILE, with a JSON file of github.com/brmson/dataset-factoid-webquestions",
    "lama": f"lama:FOLDER, with data/pattern_data/{PATTERNS} of github.com/yanaiela/pararel as the folder, and its "
    f"data/{PAIRS} as the folder of pairs",
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
_SPACE_BEFORE = re.compile(r"\s+(?=[.,](\s|$))")


@dataclass(frozen=True)
class ParaphrasedQuestion:
    """One question in several wordings.

    Attributes:
        id: unique in its set.
        paraphrases: at least one, none empty, none twice; each is a whole question, or a statement with `BLANK`.
        answers: the accepted ones, none empty, the usual one first; () where none is known: it cannot be scored then.
        relation: the kind of fact, for scores per relation; None where the set has no relations.
        natural: False where stated templates made the paraphrases from one wording.

    Raises:
        DataError: paraphrases or answers of another form.
    """

    id: str
    paraphrases: tuple[str, ...]
    answers: tuple[str, ...]
    relation: str | None = None
    natural: bool = True

    def __post_init__(self) -> None:
        if not self.paraphrases:
            raise DataError(f"question {self.id!r} has no paraphrase; give at least one")
        for name, texts in (("paraphrase", self.paraphrases), ("answer", self.answers)):
            if not all(text.strip() for text in texts):
                raise DataError(f"question {self.id!r} has an empty {name}; take it out")
        text, count = Counter(self.paraphrases).most_common(1)[0]
        if count > 1:
            raise DataError(f"question {self.id!r} has the paraphrase {text!r} twice; take one of them out")


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
    path = path_of(rest if kind in NOT_SHIPPED else name_or_path)
    is_pararel = kind == "lama" or (path / PATTERNS).is_dir() and (path / PAIRS).is_dir()
    if pairs is not None and not is_pararel:
        raise DataError(f"{name_or_path} needs no folder of pairs; only lama:FOLDER takes one")
    if kind == KNOWN_FACTS:
        return read_known_facts(rest or "test")
    if kind in NOT_SHIPPED and not rest:
        raise DataError(f"{kind} names no data, and labkit does not ship any: give {NOT_SHIPPED[kind]}")
    if is_pararel:
        return _pararel(path, pairs)
    if not path.is_file():
        forms = f"{KNOWN_FACTS}, webqa:FILE, lama:FOLDER, or a .jsonl, .csv or .json file"
        raise DataError(f"{name_or_path} is no file and no known set; give one of: {forms}")
    if path.suffix.lower() not in (".jsonl", ".csv", ".json"):
        raise DataError(f"{path} ends in {path.suffix or 'nothing'}; the file must be .jsonl, .csv or .json")
    if path.suffix.lower() == ".csv":
        records = (Record(f"line {line}", str(line), row) for line, row in csv_records(path))
    else:
        records = json_records(path)
    first = next(records, Record("", "", {}))
    records = chain([first] if first.id else [], records)
    fields = set() if isinstance(first.row, Fault) else first.row.keys()
    if fields >= {"uuid", "template", "sub_ent"}:
        return _myriad_lama(path, records)
    if kind == "webqa" or ("answers" in fields and fields & {"qText", "question"}):
        return _questions(path, records, _webquestion)
    return _questions(path, records, _own, unanswered)


def read_known_facts(split: str = "test") -> list[ParaphrasedQuestion]:
    """The embedded facts of one split, in the order of the file (data/known_facts): "test" to score, "shots" to prompt.

    Raises:
        DataError: no such split, or a damaged file.
    """
    if split not in SPLITS:
        raise DataError(f"{KNOWN_FACTS} has no split {split!r}; choose one of {', '.join(SPLITS)}")
    path = folder("data") / "known_facts" / "facts.jsonl"
    rows = ((line, row) for line, row in json_lines(path) if row["split"] == split)
    return _questions(path, (Record(f"line {line}", str(line), row) for line, row in rows), _own)


def sample(questions: Sequence[ParaphrasedQuestion], n: int, seed: int = 0) -> list[ParaphrasedQuestion]:
    """At most `n` of the questions, drawn with `seed`, in their order; equally many of each relation where possible.

    The sample does not depend on the order of the questions, and a smaller one is part of a larger one with the same
    seed: methods measured on 150 and on 500 questions of a set share the 150.

    Raises:
        DataError: `n` below 1.
    """
    if n < 1:
        raise DataError(f"{n} questions were asked for; ask for at least 1")
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


def _questions(
    path: Path, records: Iterable[Record], make: Callable[..., ParaphrasedQuestion], unanswered: bool = False
) -> list[ParaphrasedQuestion]:
    def checked(row: dict[str, Any], id: str) -> ParaphrasedQuestion:
        question = make(row, id)
        if not question.answers and not unanswered:
            raise ValueError(f"question {question.id!r} has no answer; give at least one")
        return question

    return collect(path, records, checked).all("question")


def _own(row: dict[str, Any], id: str) -> ParaphrasedQuestion:
    row = {name: value for name, value in row.items() if value not in ("", None)}  # empty cells of a table
    if "answer" in row and "answers" not in row:
        raise ValueError(f"has the field answer; write answers, a list of texts, such as [{str(row['answer'])!r}]")
    answers = tuple(dict.fromkeys(_texts(row, "answers"))) if "answers" in row else ()
    relation = text_of(row, "relation").strip() if "relation" in row else None
    id, wordings = id_of(row, id, "id"), _texts(row, "paraphrases")
    return ParaphrasedQuestion(id, wordings, answers, relation, _truth(row, "natural"))


def _webquestion(row: dict[str, Any], id: str) -> ParaphrasedQuestion:
    """Results on the paraphrases of `TEMPLATES` (`natural` is False) do not transfer to real paraphrases."""
    question = text_of(row, "qText", "question").strip()
    id = id_of(row, id, "qId", "id", "url")
    answers = tuple(dict.fromkeys(_texts(row, "answers")))
    if "paraphrases" not in row:
        wordings = tuple(template.format(question=question) for template in TEMPLATES)
        return ParaphrasedQuestion(id, wordings, answers, natural=False)
    wordings = _texts(row, "paraphrases")
    if not wordings:
        raise ValueError("has an empty list of paraphrases; without the field they are made by templates")
    return ParaphrasedQuestion(id, tuple(dict.fromkeys((question, *wordings))), answers)


def _texts(row: dict[str, Any], name: str) -> tuple[str, ...]:
    """The texts of a list, which a table has as JSON, without white space around them."""
    if name not in row:
        raise ValueError(f"has no {name} (fields: {', '.join(map(str, row)) or 'none'})")
    texts = _list(row[name])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'has {shown(texts)} as its {name}; write a list of texts, such as ["Paris"]')
    return tuple(text.strip() for text in texts)


def _truth(row: dict[str, Any], name: str) -> bool:
    truth = {"true": True, "1": True, "false": False, "0": False}.get(str(row.get(name, True)).strip().lower())
    if truth is None:
        raise ValueError(f"has {shown(row[name])} as {name}; write true or false")
    return truth


def _list(value: Any) -> Any:
    """A value, or the JSON list that a cell of a table holds."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ValueError(
                f'has the cell {shown(value)} where a JSON list was expected, such as ["Paris"]'
            ) from error
    return value


# ---- facts and templates: ParaRel and MyriadLAMA ---------------------------------------------------------------------


def filled(template: str, subject: str) -> str:
    """A template about a subject: [X] becomes it, [Y] a blank, and no space stands before a stop or a comma.

    Raises:
        ValueError: the template has no [X] or no [Y].
    """
    if missing := {"X", "Y"} - set(_SLOT.findall(template)):
        raise ValueError(f"has the template {template!r} without [{min(missing)}]")
    subject = " ".join(subject.split())
    if subject.endswith("."):
        template = template.replace("[X].", "[X]").replace("[X] .", "[X]")  # "Warner Bros." ends the sentence too
    text = _SLOT.sub(lambda slot: subject if slot[1] == "X" else BLANK, _SPACE_BEFORE.sub("", template))
    return " ".join(text.split())


def _pararel(patterns: Path, pairs: str | Path | None) -> list[ParaphrasedQuestion]:
    """The facts of all relations that have at least two patterns, by relation, each in the order of its file.

    Pairs of one relation with the same subject are one question whose answers are all their objects; its id is the
    relation and the uuid of the first. A relation with pairs but without patterns is left out.

    Known faults of the data: T-REx does not list all objects of a subject, so a right answer may count as wrong; about
    one subject in eight holds its object ("Microsoft Windows"), which `labkit.fusion.scores.holds_answer` finds; "a
    ____" and "an ____" both occur.
    """
    patterns, pairs = (patterns / PATTERNS, patterns / PAIRS) if pairs is None else (patterns, Path(pairs).expanduser())
    for place, what in ((patterns, "patterns"), (pairs, "pairs")):
        if not place.is_dir():
            raise DataError(
                f"{place} is no folder; the {what} of ParaRel were expected there, one file per relation "
                f"(give the folder that holds {PATTERNS} and {PAIRS}, or both folders)"
            )

    def pattern(row: dict[str, Any], id: str) -> Record:
        template = " ".join(_SPACE_BEFORE.sub("", text_of(row, "pattern")).split())
        filled(template, "a subject")  # raises ValueError
        return Record("", id, template)

    def fact(row: dict[str, Any], id: str) -> ParaphrasedQuestion:
        subject, answer, uuid = (text_of(row, name).strip() for name in ("sub_label", "obj_label", "uuid"))
        wordings = tuple(filled(template, subject) for template in templates)
        return ParaphrasedQuestion(f"{relation}-{uuid}", wordings, (answer,), relation)

    questions: dict[tuple[str, ...], ParaphrasedQuestion] = {}
    for file in sorted(patterns.glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem)):  # P17 before P101
        relation = file.stem
        rows = collect(file, json_records(file), pattern).all("pattern")
        templates = dict.fromkeys(row.row for row in rows)
        if len(templates) < 2:  # one alone has no paraphrase
            continue
        for question in collect(pairs / file.name, json_records(pairs / file.name), fact).all("pair"):
            first = questions.setdefault((relation, *question.paraphrases), question)
            answers = tuple(dict.fromkeys(first.answers + question.answers))
            questions[relation, *question.paraphrases] = replace(first, answers=answers)
    if not questions:
        raise DataError(f"{patterns} holds no relation with 2 patterns; give ParaRel's {PATTERNS}")
    return list(questions.values())


def _myriad_lama(path: Path, records: Iterable[Record]) -> list[ParaphrasedQuestion]:
    """The facts of a file, in the order of their first rows; templates by people come first, and each counts once.

    The names of the columns come from public programs that read the set, not from the set itself.
    """
    facts: dict[str, tuple[str, str, tuple[str, ...]]] = {}  # by uuid: subject, relation, answers
    by_people, rewritten = defaultdict(dict), defaultdict(dict)

    def add(row: dict[str, Any], id: str) -> Record:
        uuid, subject, relation = (text_of(row, name).strip() for name in ("uuid", "sub_ent", "rel_uri"))
        fact = subject, relation, _objects(row)
        if facts.setdefault(uuid, fact) != fact:
            raise ValueError("differs from an earlier row with the same uuid in subject, relation or objects")
        wordings = by_people if _truth(row, "is_manual") else rewritten
        wordings[uuid][filled(text_of(row, "template"), subject)] = None
        return Record("", id, uuid)

    collect(path, records, add).all("question")
    return [
        ParaphrasedQuestion(f"{relation}-{uuid}", tuple(by_people[uuid] | rewritten[uuid]), answers, relation)
        for uuid, (_, relation, answers) in facts.items()
    ]


def _objects(row: dict[str, Any]) -> tuple[str, ...]:
    """The objects by their own names, then their aliases, which are one list or one list for each object."""
    names: dict[str, None] = {}
    for column in ("obj_ents", "obj_aliases"):
        value = _list(row.get(column) or [])
        if not isinstance(value, list):
            raise ValueError(f"has {shown(value)} as its {column}, where a list of texts was expected")
        for entry in value:
            for name in entry if isinstance(entry, list) else [entry]:
                if not isinstance(name, str) or not name.strip():
                    raise ValueError(f"has {shown(name)} among its {column}, where text was expected")
                names[name.strip()] = None
    if not names:
        raise ValueError("has neither obj_ents nor obj_aliases; one of them must list the answers")
    return tuple(names)
