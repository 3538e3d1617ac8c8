"""How good the ways to answer from several paraphrases are: all asked the same questions, resumable to the question.

    study = Study(("gemma3-270m",), (data_named("known-facts"),), num_paraphrases=(1, 2, 5))
    run_study(study, "runs/fusion")
    report(["runs/fusion"])                      # labkit.bench.fusion_report

What a method is compared with is the mean of the single prompts that it is made of: `single` is asked once for each
place. Of one paraphrase every method is `single`, so nothing else is asked for N = 1. Only questions with as many
paraphrases as the largest N are asked, so that every N is measured on the same ones; a smaller sample, for dear
methods, is part of the larger one. The paraphrases of each question stand in an order drawn from the study's seed and
the question's id (`labkit.fusion.runs.drawn_order`), the same for all methods and N: N = 2 then differs from N = 5 in
how many are read, and not in where they stood in the set.

    study.json                            what all cells share, the sets, and the cells
    MODEL/DATA/fuse_n5.feather            a cell: a file of labkit.fusion.runs
    MODEL/DATA/single_i3.feather          the paraphrase at place 3 alone
    MODEL/DATA/fuse_i0x5.feather          the repeat control: the first paraphrase, 5 times
    failures.json                         what failed in the last pass, and why
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from labkit.bench import folders
from labkit.datasets.paraphrases import KNOWN_FACTS
from labkit.errors import DataError, LabkitError, TrainingError
from labkit.fusion import runs
from labkit.fusion.answers import Answers, require_pyarrow, summary
from labkit.fusion.few_shot import Choice
from labkit.fusion.methods import GIVEN, method_named
from labkit.run_folder import read_json

KIND = "fusion quality"
SINGLE, AVERAGE = "single", "logit-average"
DEFAULT = (SINGLE, "concat", "fuse", AVERAGE)
UNMOVED = ("fuse", AVERAGE)  # by identity: copies of one paraphrase are that paraphrase, whatever the model
REPEATED = ("concat", "isolate+restart", *UNMOVED)  # the first two read copies as more text, and may answer otherwise
ORDER = "drawn for each question from the seed"  # of the paraphrases, as study.json states it
SHARED = (
    "at_least", "engine", "few_shot", "max_new_tokens", "batch_size", "device", "dtype", "lemmatizer", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Data:
    """A set of questions under a short name; `dataset` and `pairs` as for `labkit.datasets.paraphrases`."""

    name: str
    dataset: str
    pairs: str | None = None


@dataclass(frozen=True)
class Cell:
    """One file of answers: a model, a set, a method, and what it reads of each question.

    Attributes:
        first: the first so many paraphrases. place: that one alone. repeat: the first one, so many times.
        max_questions: of the sample; None: all of the set.
    """

    model: str
    data: str
    method: str
    first: int | None = None
    place: int | None = None
    repeat: int | None = None
    max_questions: int | None = None

    @property
    def places(self) -> tuple[int, ...] | None:
        if self.repeat is not None:
            return (0,)
        return None if self.place is None else (self.place,)

    @property
    def file(self) -> Path:
        """Where it lies within the study's folder."""
        what = f"{self.method}_{Choice(self.first, self.places, self.repeat).label}.feather"
        return Path(*(folders.slug(part) for part in (self.model, self.data, what)))

    @property
    def reads(self) -> str:
        """What of each question: "N = 5", "place 3", "the first one 5 times"."""
        if self.repeat is not None:
            return f"the first one {self.repeat} times"
        return f"N = {self.first}" if self.place is None else f"place {self.place}"

    def __str__(self) -> str:
        return f"{self.model}, {self.data}, {self.method}, {self.reads}"


@dataclass(frozen=True)
class Study:
    """What is compared, and on what; the cells are all combinations.

    Attributes:
        models: registered names, hub ids or folders. data: the sets, each under a name of its own.
        methods: by name; `single` is asked in any case. few_methods: dear ones, on `few_questions` of the questions.
        num_paraphrases: the N; at least one of them 2 or more.
        repeat_control: also `REPEATED` with the first paraphrase as often as the largest N: in `UNMOVED` a check of the
            implementation, in the others what more text gives.
        at_least: only questions with so many paraphrases; None: the largest N, or what the study was begun with.
        The rest is as in `labkit.fusion.runs.Settings`.

    Raises:
        DataError, FusionError: nothing to compare, one thing twice, or an unknown method.
    """

    models: tuple[str, ...]
    data: tuple[Data, ...]
    methods: tuple[str, ...] = DEFAULT
    num_paraphrases: tuple[int, ...] = (1, 2, 5)
    few_methods: tuple[str, ...] = ()
    few_questions: int = 150
    repeat_control: bool = False
    at_least: int | None = None
    few_shot: int = 5
    max_questions: int | None = None
    max_new_tokens: int = 12
    batch_size: int = 16
    engine: str = "fast"
    device: str = "auto"
    dtype: str | None = None
    lemmatizer: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        given = {
            "models": self.models, "sets of questions": tuple(each.name for each in self.data),
            "methods": (*self.methods, *self.few_methods), "numbers of paraphrases": self.num_paraphrases,
        }  # fmt: skip
        for what, values in given.items():
            if not values or len(set(values)) < len(values):
                raise DataError(f"the {what} are {', '.join(map(str, values)) or 'none'}; give some, and none twice")
        for name in given["methods"]:
            if method_named(name).weights == GIVEN:
                raise DataError(f"the method {name!r} needs weights for each question; labkit fuse takes them")
        if min(self.num_paraphrases) < 1 or self.largest < 2:
            raise DataError(
                f"the numbers of paraphrases are {', '.join(map(str, self.num_paraphrases))}; give numbers from 1, and "
                "one of at least 2: of one paraphrase every method is single"
            )
        if self.at_least is not None and self.at_least < self.largest:
            raise DataError(
                f"N = {self.largest} needs questions with {self.largest} paraphrases, and those with {self.at_least} "
                "are asked; take a smaller N, or begin another study with --at-least for the largest N it is to have"
            )
        if self.few_methods and self.max_questions is not None and self.few_questions > self.max_questions:
            raise DataError(
                f"{self.few_questions} questions for the few methods are more than the {self.max_questions} for the "
                "others; give fewer"
            )
        for cell in self.cells:
            _ = self.settings(cell)

    @property
    def largest(self) -> int:
        return max(self.num_paraphrases)

    @property
    def cells(self) -> list[Cell]:
        """All of them, in the order in which they are asked: model by model, what is compared soon together."""
        return [
            replace(cell, model=model, data=data.name)
            for model in self.models
            for data in self.data
            for cell in self._cells_of_a_set()
        ]

    def settings(self, cell: Cell) -> runs.Settings:
        """What the cell's file is made with."""
        data = next(each for each in self.data if each.name == cell.data)
        shared = {name: getattr(self, name) for name in SHARED} | {"at_least": self.at_least or self.largest}
        return runs.Settings(
            data.dataset, cell.model, cell.method, num_paraphrases=cell.first, indexes=cell.places, repeat=cell.repeat,
            max_questions=cell.max_questions, pairs=data.pairs, order_seed=self.seed, **shared,
        )  # fmt: skip

    def _cells_of_a_set(self) -> list[Cell]:
        found, many, few = [], self.max_questions, self.few_questions
        asked = 0
        for n in sorted(self.num_paraphrases):
            found += [Cell("", "", SINGLE, place=place, max_questions=many) for place in range(asked, n)]
            asked = n
            if n > 1:
                found += [Cell("", "", m, first=n, max_questions=many) for m in self.methods if m != SINGLE]
        if self.repeat_control:
            found += [Cell("", "", method, repeat=self.largest, max_questions=many) for method in REPEATED]
        several = [n for n in sorted(self.num_paraphrases) if n > 1]
        return found + [
            Cell("", "", method, first=n, max_questions=few)
            for n in several
            for method in self.few_methods
            if method != SINGLE
        ]


def data_named(text: str, pairs: str | None = None) -> Data:
    """[NAME=]DATASET as a set under a name: `pararel=lama:FOLDER`; by default the file's or folder's own name.

    Raises:
        DataError: no name, or no set.
    """
    name, given, dataset = text.partition("=") if re.match(r"[\w.+-]*=", text) else ("", "", text)
    kind, _, rest = dataset.partition(":")
    if (given and not name) or not dataset:
        raise DataError(f"--dataset is {text!r}; give [NAME=]DATASET, such as pararel=lama:FOLDER")
    own = dataset if kind == KNOWN_FACTS else Path(rest if kind in ("webqa", "lama") else dataset).stem
    return Data(name or own, dataset, pairs if kind == "lama" else None)


def run_study(
    study: Study,
    folder: str | Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> dict[str, str]:
    """Answer what is missing of the study in `folder`; returns what failed, {cell: reason}.

    Each model is loaded once. A cell that fails is noted, and the others go on. Killed at any moment it goes on with
    `resume`; then models, sets, methods and N may have been added, and what is done stays.

    Raises:
        DataError, FusionError, ModelError: a set, a choice of paraphrases or a model that there is not.
        TrainingError: the folder holds something else, or a study with other settings. Nothing is written then.
    """
    require_pyarrow()
    path = Path(folder).expanduser().absolute()
    if resume and study.at_least is None:
        study = replace(study, at_least=(read_json(path / "study.json") or {}).get("settings", {}).get("at_least"))
    study = replace(study, at_least=study.at_least or study.largest)
    facts = {data.name: _facts(study, data) for data in study.data}
    missing = [cell for cell in study.cells if not (path / cell.file).exists()]
    lm = _require_models(study, missing)
    with folders.claimed(path, resume=resume) as (path, begun):
        wanted = {
            "kind": KIND, "settings": {name: getattr(study, name) for name in SHARED} | {"order": ORDER},
            "data": facts, "cells": [asdict(cell) for cell in study.cells],
        }  # fmt: skip
        folders.write_json(path / "study.json", wanted if begun is None else _grown(begun, wanted, path))
        say(f"{len(study.cells):,} cells, {len(study.cells) - len(missing):,} of them done")
        failures: dict[str, str] = {}
        for number, cell in enumerate(missing, 1):
            if lm.name != cell.model:
                lm = None  # one at a time: together they may not fit
                lm = runs.load_model(study.settings(cell))
            began = time.perf_counter()
            try:
                told = _told(runs.run(study.settings(cell), path / cell.file, resume=True, lm=lm))
            except LabkitError as error:
                failures[cell.file.as_posix()] = str(error)
                told = f"failed: {error}"
            say(f"{number} of {len(missing)}: {cell}: {told} ({time.perf_counter() - began:,.0f} s)")
        folders.write_failures(path, failures)
    return failures


def read_study(path: Path) -> tuple[dict[str, Any], list[Cell]]:
    """study.json and its cells. TrainingError where there is none, or one of another kind or order of paraphrases."""
    found = read_json(path / "study.json")
    if found is None or found.get("kind") != KIND:
        raise TrainingError(
            f"{path} holds no study of fusion methods; labkit bench fusion --output-dir {path} makes one"
        )
    _require_order(found, path)
    return found, [Cell(**cell) for cell in found["cells"]]


def _facts(study: Study, data: Data) -> dict[str, Any]:
    """What is said of a set in study.json. Raises DataError or FusionError where it cannot be asked."""
    cell = next(cell for cell in study.cells if cell.data == data.name)
    made = runs.plan(replace(study.settings(cell), max_questions=None))
    return {
        "dataset": data.dataset, "pairs": data.pairs, "sha256": made.sha256, "questions": len(made.questions),
        "left_out": made.left_out, "taken_out": made.taken_out, "few_shot_ids": [each.id for each in made.shots],
        "templates": not all(question.natural for question in made.questions),
    }  # fmt: skip


def _require_models(study: Study, missing: Sequence[Cell]) -> Any:
    """The first model that is needed, loaded; None if none is. The others are tried: a wrong name is an error now."""
    first_of = {cell.model: cell for cell in reversed(missing)}
    lm = None
    for model in reversed([model for model in study.models if model in first_of]):
        lm = None
        lm = runs.load_model(study.settings(first_of[model]))
    return lm


def _grown(begun: dict[str, Any], wanted: dict[str, Any], path: Path) -> dict[str, Any]:
    """The study that was begun with what was added to it. TrainingError where something else has changed."""
    if begun.get("kind") != KIND:
        raise TrainingError(f"{path} holds a study of another kind; give --output-dir a new folder")
    _require_order(begun, path)
    was, now = begun["settings"], wanted["settings"]
    if changed := [name for name in now if was.get(name) != now[name]]:
        told = "; ".join(f"{name} was {was.get(name)!r}, now {now[name]!r}" for name in changed)
        raise TrainingError(f"the study in {path} was begun with other settings: {told}")
    sets = dict(begun["data"])
    for name, each in wanted["data"].items():
        old = sets.setdefault(name, each)
        if changed := [key for key in each if old.get(key) != each[key]]:
            raise TrainingError(
                f"{name} is not the set that the study in {path} was begun with: {changed[0]} was "
                f"{old.get(changed[0])!r}, now {each[changed[0]]!r}; give it another name"
            )
    cells = {Cell(**cell).file: cell for cell in begun["cells"]}
    for cell in wanted["cells"]:
        old = cells.setdefault(Cell(**cell).file, cell)
        if old != cell:
            each, told = Cell(**cell), [one["max_questions"] or "all" for one in (old, cell)]
            raise TrainingError(
                f"{each} was begun with {told[0]} questions in {path}, and is now to have {told[1]}; "
                "give the numbers it was begun with"
            )
    return begun | {"data": sets, "cells": list(cells.values())}


def _require_order(study: dict[str, Any], path: Path) -> None:
    """TrainingError if the study read paraphrases in another order: its N and places are not those of now."""
    if study["settings"].get("order") != ORDER:
        raise TrainingError(
            f"the study in {path} read the paraphrases in the order of their set, so that N = 2 was always the first "
            f"two; the order is now {ORDER}: begin the study again in a new folder"
        )


def _told(answers: Answers) -> str:
    found = summary(answers)["accuracy"]
    return f"{100 * found['value']:.1f} % of {found['n']:,} right"
