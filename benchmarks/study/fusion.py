"""Compare the methods that answer a question from several paraphrases, all on the same questions.

    python benchmarks/study/fusion.py --model gemma3-270m --num-paraphrases 1,2,5 --output-dir runs/fusion

`single` is asked once for each paraphrase, and a method is compared with the mean of the single prompts that it reads
together. Only questions with as many paraphrases as the largest N are asked, in an order of the paraphrases that is
drawn for each question from the seed. The same command again continues a study, to the question; it can also add
models, data sets, methods, and values of N up to --at-least.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from benchmarks.study import report, runner  # noqa: E402
from benchmarks.study.runner import listed, option, slug  # noqa: E402
from labkit.datasets.paraphrases import KNOWN_FACTS  # noqa: E402
from labkit.errors import DataError, TrainingError  # noqa: E402
from labkit.fusion import runs  # noqa: E402
from labkit.fusion.methods import Settings  # noqa: E402
from labkit.fusion.scores import Answers, holds_answer, read_answers, summary  # noqa: E402
from labkit.run_folder import read_json  # noqa: E402

SINGLE = "single"
REPEATED = ("concat", "isolate+restart", "fuse", "logit-average")  # copies must not change the last two
SHARED = ("engine", "few_shot", "max_new_tokens", "batch_size", "device", "dtype", "lemmatizer")
GROWING = ("models", "data", "methods", "few_methods", "num_paraphrases")
ANSWERS = "answers.feather"


@dataclass(frozen=True)
class Study:
    """What is compared. The rest is as in `labkit.fusion.methods.Settings`. data: {name: (dataset, pairs or None)}."""

    models: tuple[str, ...] = option(("gemma3-270m",), "names, hub ids or folders", listed(), name="--model")
    data: dict[str, tuple[str, str | None]] = field(default_factory=lambda: {KNOWN_FACTS: (KNOWN_FACTS, None)})
    methods: tuple[str, ...] = option((SINGLE, "concat", "fuse", "logit-average"), "single is always asked", listed())
    num_paraphrases: tuple[int, ...] = option((1, 2, 5), "values of N", listed(int))
    few_methods: tuple[str, ...] = option((), "slow methods, which get only --few-questions", listed())
    few_questions: int = option(150, "questions for --few-methods")
    repeat_control: bool = option(False, "also read one paraphrase as often as the largest N", action="store_true")
    at_least: int | None = option(None, "only questions with so many paraphrases; default: the largest N", int)
    few_shot: int = option(5, "answered examples in the prompt")
    max_questions: int | None = option(None, "size of a random sample of the questions; default: all", int)
    max_new_tokens: int = option(12, "of an answer")
    batch_size: int = option(16, "questions per batch")
    engine: str = option("fast", "fast, reference, dense or cacheless: the same answers")
    device: str = option("auto", "auto, cpu or cuda")
    dtype: str | None = option(None, "float32, bfloat16 or float16; default: as stored", str)
    lemmatizer: str | None = option(None, "simplemma or spacy:MODEL: also count lemmatised answers that match", str)
    seed: int = option(0, "of examples, questions and the order of paraphrases")

    def __post_init__(self) -> None:
        if not self.num_paraphrases or min(self.num_paraphrases) < 1 or max(self.num_paraphrases) < 2:
            raise DataError(f"the numbers of paraphrases are {self.num_paraphrases}; give 1 or more, and one above 1")
        if self.at_least is None:
            object.__setattr__(self, "at_least", max(self.num_paraphrases))


@dataclass(frozen=True)
class Cell:
    """One file of answers: what a method reads of each question.

    Attributes:
        first: the first so many paraphrases. place: the paraphrase at this place alone.
        repeat: the first paraphrase, so many times. max_questions: the size of the sample; None: all questions.
    """

    model: str
    data: str
    method: str
    first: int | None = None
    place: int | None = None
    repeat: int | None = None
    max_questions: int | None = None

    @property
    def folder(self) -> Path:
        reads = f"n{self.first}" if self.first else f"first-x{self.repeat}" if self.repeat else f"place{self.place}"
        return Path(slug(self.model), slug(self.data), f"{slug(self.method)}_{reads}")

    def __str__(self) -> str:
        return f"{self.model}, {self.data}, {self.folder.name}"

    def settings(self, study: Study) -> Settings:
        dataset, pairs = study.data[self.data]
        places = (0,) if self.repeat else None if self.place is None else (self.place,)
        return Settings(
            dataset, pairs, self.model, self.method, num_paraphrases=self.first, indexes=places, repeat=self.repeat,
            at_least=study.at_least, few_shot_from_data=True, max_questions=self.max_questions, seed=study.seed,
            order_seed=study.seed, **{name: getattr(study, name) for name in SHARED},
        )  # fmt: skip


def cells(study: Study) -> list[Cell]:
    """All cells, model by model, so that each model is loaded once."""
    several = sorted({n for n in study.num_paraphrases if n > 1})
    methods = [method for method in study.methods if method != SINGLE]
    reads = [{"method": SINGLE, "place": place} for place in range(max(several))]
    reads += [{"method": method, "first": n} for n in several for method in methods]
    if study.repeat_control:
        reads += [{"method": method, "repeat": max(several)} for method in REPEATED]
    reads = [read | {"max_questions": study.max_questions} for read in reads]
    few = {"max_questions": study.few_questions}
    reads += [{"method": method, "first": n} | few for n in several for method in study.few_methods]
    return [Cell(model, data, **read) for model in study.models for data in study.data for read in reads]


def run_study(study: Study, folder: str | Path, **options: Any) -> dict[str, str]:
    """Answer what is missing of the study in `folder`. Returns {cell: reason} of the cells that failed."""
    facts = {}
    for cell in cells(study):
        settings = cell.settings(study)  # a method that does not exist is an error before anything is asked
        if cell.data not in facts:
            about, rows = runs.plan(replace(settings, max_questions=None))
            facts[cell.data] = {
                "dataset": study.data[cell.data][0],
                "sha256": about["data"]["questions_sha256"],
                "questions": len(rows),
            }
    settings = asdict(study) | {"data": facts}
    del settings["repeat_control"]
    path = runner.begun(folder, settings, GROWING)
    lm = None

    def answer(cell: Cell) -> dict[str, Any]:
        nonlocal lm
        if lm is None or lm.name != cell.model:
            lm = None  # one model at a time: together they may not fit
            lm = runs.load_model(cell.settings(study))
        answers = runs.run(cell.settings(study), path / cell.folder / ANSWERS, resume=True, lm=lm)
        templates = answers.about["natural"] < answers.about["questions"]
        metrics = {"cell": asdict(cell), "templates": templates} | summary(answers)
        runner.write_json(path / cell.folder / "metrics.json", metrics)
        return metrics

    return runner.run_all(cells(study), answer, path, score=_score, **options)


def tables(folder: str | Path, reference: str = SINGLE, lemmatised: bool = False) -> pd.DataFrame:
    """The finished cells of the study in `folder`: one row for each method, model, set and number of paraphrases.

    The reference `single` is the mean of the single prompts that a method reads together. Sets are also scored without
    the questions that contain their answer, and with copies of one paraphrase in place of several.
    """
    path = Path(folder).expanduser()
    runner.read_study(path)
    finished: dict[tuple[str, str], dict[Cell, Answers]] = {}
    templates = {}
    for file in sorted(path.glob("*/*/*/metrics.json")):
        metrics = read_json(file)
        cell = Cell(**metrics["cell"])
        finished.setdefault((cell.model, cell.data), {})[cell] = read_answers(file.parent / ANSWERS)
        templates[cell.data] = metrics["templates"]
    if not finished:
        raise TrainingError(f"{folder}: no cell is finished yet")
    parts = []
    for (model, data), files in finished.items():
        revealed = {
            row["id"]
            for answers in files.values()
            for row in answers.rows
            if any(holds_answer(text, row["answers"]) for text in row["paraphrases"])
        }
        for name, left_out in ((data, set()), (f"{data}, answer not in the question", revealed)):
            if left_out or name == data:
                about = {"condition": name, "model": model, "templates": templates[data]}
                parts += _compared(files, left_out, reference, lemmatised, about)
    return pd.concat(parts, ignore_index=True)


def scores(files: list[Answers], lemmatised: bool = False) -> report.Scores:
    """Accuracy by question, the mean of these files on the questions of all of them; relations are the groups."""
    correct = pd.DataFrame([answers.correct(lemmatised) for answers in files]).dropna(axis=1)  # (files, questions)
    ids = list(correct)
    above = correct.astype(float).mean().to_numpy()[None]
    relations = {row["id"]: row.get("relation") for row in files[0].rows}
    groups = np.array([relations[name] or f"question {name}" for name in ids])
    return report.Scores(above, np.ones_like(above), groups, tuple(ids), None)


def _compared(
    files: dict[Cell, Answers], left_out: set[str], reference: str, lemmatised: bool, about: dict[str, Any]
) -> Iterator[pd.DataFrame]:
    """The tables of one model on one set, one for each number of paraphrases and sample of the questions."""
    singles = {cell.place: answers for cell, answers in files.items() if cell.place is not None}
    numbers = sorted({1, *(cell.first for cell in files if cell.first)})
    variants = [(n, n, {cell: own for cell, own in files.items() if cell.first == n}, "") for n in numbers]
    for n in sorted({cell.repeat for cell in files if cell.repeat}):
        variants.append((n, 1, {cell: own for cell, own in files.items() if cell.repeat == n}, ", copies"))
    for n, read_alone, own, suffix in variants:
        arms = {cell.method: scores([answers], lemmatised) for cell, answers in own.items()}
        if all(place in singles for place in range(read_alone)):
            arms = {SINGLE: scores([singles[place] for place in range(read_alone)], lemmatised)} | arms
        arms = {name: arm.only(set(arm.ids) - left_out) for name, arm in arms.items()}
        seconds = {cell.method: median(row["seconds"] for row in answers.rows) for cell, answers in own.items()}
        for ids in filter(None, dict.fromkeys(arm.ids for arm in arms.values())):
            sample = {name: arm for name, arm in arms.items() if arm.ids == ids}
            if reference in arms and set(ids) <= set(arms[reference].ids):
                sample = {reference: arms[reference].only(set(ids))} | sample
            where = about | {"condition": about["condition"] + suffix, "paraphrases": n}
            rows = report.table(sample, reference, **where)
            yield rows.assign(seconds=rows["arm"].map(seconds))


def _score(cell: Cell, metrics: dict[str, Any]) -> str:
    return f"accuracy {metrics['accuracy']['value']:.3f}, n = {metrics['accuracy']['n']:,}"


def named(text: str, pairs: str | None = None) -> tuple[str, tuple[str, str | None]]:
    """[NAME=]DATASET as (name, (dataset, pairs)): pararel=lama:FOLDER; by default the name of the file or folder."""
    name, _, dataset = text.partition("=") if re.match(r"[\w.+-]+=", text) else ("", "", text)
    kind, _, rest = dataset.partition(":")
    own = dataset if kind == KNOWN_FACTS else Path(rest if kind in ("webqa", "lama") else dataset).stem
    return name or own, (dataset, pairs if kind == "lama" else None)


def _run(options: argparse.Namespace) -> dict[str, str]:
    data = dict(named(text, options.pairs) for text in options.dataset or [KNOWN_FACTS])
    return run_study(Study(**runner.given(options, Study), data=data), options.output_dir, until=options.until)


def main() -> None:
    parser = runner.parser(__doc__, SINGLE, Study)
    datasets = "[NAME=]known-facts, webqa:FILE, lama:FOLDER, or a file; may be repeated"
    parser.add_argument("--dataset", action="append", help=datasets)
    parser.add_argument("--pairs", help="folder of subject-object pairs, if lama:FOLDER contains none")
    parser.add_argument("--lemmatised", action="store_true", help="score the lemmatised answers in the table")
    runner.main(
        parser,
        _run,
        lambda options: tables(options.output_dir, options.reference, options.lemmatised),
        unit="points of accuracy",
    )


if __name__ == "__main__":
    main()
