"""ParaRel (Elazar et al. 2021): the facts of LAMA's T-REx (Petroni et al. 2019), each relation in several patterns.

A folder of patterns and a folder of pairs, with one file per relation in each, as github.com/yanaiela/pararel has them:
graphs_json/P36.jsonl     {"pattern": "The capital of [X] is [Y].", "lemma", "extended_lemma", "tense"}
trex_lms_vocab/P36.jsonl  {"sub_label": "France", "obj_label": "Paris", "uuid"}
"""

from __future__ import annotations

import re
from pathlib import Path

from labkit.datasets.files import fault, json_lines
from labkit.datasets.paraphrased_question import BLANK, ParaphrasedQuestion, text_of
from labkit.errors import DataError

PATTERNS, PAIRS = "graphs_json", "trex_lms_vocab"
FEWEST_PATTERNS = 2  # one alone has no paraphrase

_SLOT = re.compile(r"\[([XY])\]")
_SPACE_BEFORE = re.compile(r"\s+(?=[.,](\s|$))")


def is_pararel(folder: str | Path) -> bool:
    """Whether a folder is laid out as ParaRel is: patterns and pairs in two folders under it."""
    return all((Path(folder).expanduser() / name).is_dir() for name in (PATTERNS, PAIRS))


def read_pararel(folder: str | Path, pairs: str | Path | None = None) -> list[ParaphrasedQuestion]:
    """The facts of all relations that have at least two patterns, by relation, each in the order of its file.

    Each pattern is a paraphrase: [X] is the subject and [Y] a blank. They were written by people, so `natural` is True.
    Pairs of one relation with the same subject are one question whose answers are all their objects; its id is the
    relation and the uuid of the first. A relation that has pairs and no patterns is left out.

    Known of the data, and left as it is: T-REx does not list all objects of a subject, so a right answer may count as
    wrong; about one subject in eight holds its object ("Microsoft Windows"), which `labkit.fusion.scores.holds_answer`
    finds; "a ____" and "an ____" both occur.

    Args:
        folder: holds both folders, or the patterns where `pairs` is given.

    Raises:
        DataError: not this layout, or a line without its form; the message names file and line.
    """
    patterns, pairs = _folders(Path(folder).expanduser(), pairs)
    found: list[ParaphrasedQuestion] = []
    for file in sorted(patterns.glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem)):  # P17 before P101
        templates = _templates(file)
        if len(templates) < FEWEST_PATTERNS:
            continue
        if not (facts := pairs / file.name).is_file():
            raise DataError(f"{file} has patterns, and there are no pairs for them; put {facts.name} into {pairs}")
        found += _facts(facts, file.stem, templates)
    if not found:
        raise DataError(f"{patterns} holds no relation with {FEWEST_PATTERNS} patterns; give ParaRel's {PATTERNS}")
    return found


def filled(template: str, subject: str) -> str:
    """A template about a subject: [X] becomes it, [Y] a blank, and no space stands before a stop or a comma.

    Raises:
        ValueError: the template has no [X] or no [Y]; in words.
    """
    if missing := {"X", "Y"} - set(_SLOT.findall(template)):
        raise ValueError(f"has the template {template!r} without [{min(missing)}]")
    subject = " ".join(subject.split())
    if subject.endswith("."):
        template = template.replace("[X].", "[X]").replace("[X] .", "[X]")  # "Warner Bros." ends the sentence too
    text = _SLOT.sub(lambda slot: subject if slot[1] == "X" else BLANK, _SPACE_BEFORE.sub("", template))
    return " ".join(text.split())


def _folders(folder: Path, pairs: str | Path | None) -> tuple[Path, Path]:
    patterns, pairs = (folder, Path(pairs).expanduser()) if pairs is not None else (folder / PATTERNS, folder / PAIRS)
    for each, what in ((patterns, "patterns"), (pairs, "pairs")):
        if not each.is_dir():
            raise DataError(
                f"{each} is no folder; the {what} of ParaRel were expected there, one file per relation "
                f"(give the folder that holds {PATTERNS} and {PAIRS}, or both folders)"
            )
    return patterns, pairs


def _templates(file: Path) -> list[str]:
    templates: dict[str, None] = {}  # in order, each once
    for line, row in json_lines(file):
        try:
            template = text_of(row, "pattern")
            filled(template, "a subject")
        except ValueError as error:
            raise fault(file, line, str(error)) from error
        templates[" ".join(_SPACE_BEFORE.sub("", template).split())] = None
    return list(templates)


def _facts(file: Path, relation: str, templates: list[str]) -> list[ParaphrasedQuestion]:
    objects: dict[str, dict[str, None]] = {}  # of each subject, in order, each once
    ids: dict[str, str] = {}
    first_lines: dict[str, int] = {}
    for line, row in json_lines(file):
        try:
            subject, answer, uuid = (text_of(row, name) for name in ("sub_label", "obj_label", "uuid"))
        except ValueError as error:
            raise fault(file, line, str(error)) from error
        if uuid in first_lines:
            raise fault(file, line, f"has the uuid {uuid!r}, as line {first_lines[uuid]} has; each pair needs its own")
        first_lines[uuid] = line
        objects.setdefault(subject, {})[answer] = None
        ids.setdefault(subject, f"{relation}-{uuid}")
    return [
        ParaphrasedQuestion(
            ids[subject], tuple(filled(each, subject) for each in templates), tuple(answers), relation=relation
        )
        for subject, answers in objects.items()
    ]
