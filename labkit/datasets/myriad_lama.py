"""MyriadLAMA (Zhao et al. 2024): facts of T-REx in five templates written by people and many rewritten from those.

Read from the hub's data set (iszhaoxin/MyriadLAMA) saved with `to_json` or `to_csv`: one row per fact and template.

    uuid                  of the fact; its rows need not stand together
    rel_uri               the relation, such as "P36"
    sub_ent               the subject
    obj_ents, obj_aliases lists, the objects and all their accepted names; one of the two is enough
    template              with [X] and [Y]
    is_manual             whether people wrote the template; without the column the order of the rows stands

These names were taken from public programs that read the set, not from the set itself. The other columns (sub_uri,
obj_uris, ...) are not read. A CSV must hold its lists as JSON or as Python writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labkit.datasets.files import fault
from labkit.datasets.paraphrased_question import ParaphrasedQuestion, list_in, text_of, truth_of
from labkit.datasets.pararel import filled
from labkit.errors import DataError

FIELDS = ("uuid", "template", "sub_ent")  # by which the form is known


def read_myriad_lama(path: str | Path, rows: Iterable[tuple[int, dict[str, Any]]]) -> list[ParaphrasedQuestion]:
    """The facts of the (line, row) of a file, in the order of their first rows; the templates by people come first.

    A template that a fact has twice counts once. `natural` is True: no wording is made from another by a fixed frame.

    Raises:
        DataError: a field missing, or rows of one fact that differ in what they say; the message names file and line.
    """
    facts: dict[str, _Fact] = {}
    for line, row in rows:
        try:
            uuid, subject, relation = (text_of(row, name) for name in ("uuid", "sub_ent", "rel_uri"))
            answers = _answers(row)
            fact = facts.setdefault(uuid, _Fact(line, subject, relation, answers))
            if (fact.subject, fact.relation, fact.answers) != (subject, relation, answers):
                raise ValueError(
                    f"differs from line {fact.line}, which has the same uuid, in subject, relation or objects"
                )
            fact.templates[not truth_of(row, "is_manual")][filled(text_of(row, "template"), subject)] = None
        except ValueError as error:
            raise fault(path, line, str(error)) from error
    if not facts:
        raise DataError(f"{path} holds no question")
    return [fact.question(uuid) for uuid, fact in facts.items()]


class _Fact:
    """What the rows of one uuid have in common, and their paraphrases: those by people, and the others."""

    def __init__(self, line: int, subject: str, relation: str, answers: tuple[str, ...]) -> None:
        self.line, self.subject, self.relation, self.answers = line, subject, relation, answers
        self.templates: tuple[dict[str, None], dict[str, None]] = ({}, {})

    def question(self, uuid: str) -> ParaphrasedQuestion:
        paraphrases = tuple(self.templates[0] | self.templates[1])
        return ParaphrasedQuestion(f"{self.relation}-{uuid}", paraphrases, self.answers, relation=self.relation)


def _answers(row: dict[str, Any]) -> tuple[str, ...]:
    """The objects by their own names, then by all others; each once."""
    names: dict[str, None] = {}
    for field in ("obj_ents", "obj_aliases"):
        value = row.get(field)
        value = list_in(value) if isinstance(value, str) and value.strip() else value or []
        if not isinstance(value, list):
            raise ValueError(f"has {value!r} as its {field}, where a list of texts was expected")
        for each in value:
            for name in each if isinstance(each, list) else [each]:  # the aliases of each object, or of all
                if not isinstance(name, str) or not name.strip():
                    raise ValueError(f"has {name!r} among its {field}, where text was expected")
                names[name.strip()] = None
    if not names:
        raise ValueError("has neither obj_ents nor obj_aliases; one of them must list the answers")
    return tuple(names)
