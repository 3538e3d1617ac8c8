"""Answer the questions of a data set with one method, and write a Feather file with the answers and their settings.

    answers = run(Settings(model="gemma3-270m", num_paraphrases=5), "out.feather")
    summary(answers)["accuracy"]                       # labkit.fusion.scores

A prompt is few-shot examples ("Question: ...", "Answer: ..."), a line "Question: ..." for each paraphrase, and the cue.
After each batch the answers so far are written to a journal beside the file, which is a Feather file too
(`out.feather.part`). An interrupted run continues from it. When the output is written, the journal is removed.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from labkit import __version__
from labkit.datasets.paraphrases import KNOWN_FACTS, ParaphrasedQuestion, read_known_facts, read_paraphrases, sample
from labkit.errors import DataError
from labkit.files import is_stream, require_writable
from labkit.fusion.generation import generate
from labkit.fusion.layout import SEPARATOR
from labkit.fusion.methods import Settings
from labkit.fusion.scores import (
    Answers,
    first_line,
    judged,
    load_lemmatizer,
    read_answers,
    require_packages,
    write_answers,
)
from labkit.models import Loaded, load
from labkit.run_folder import changes

QUESTION, CUE = "Question: ", "Answer:"
FIXED = ("settings", "data", "versions", "model")  # the parts of the header that a resumed run must share


def run(settings: Settings, output: str | Path, *, resume: bool = False, lm: Loaded | None = None) -> Answers:
    """Answer all questions and write the file `output`; with `resume`, continue an interrupted run.

    `lm` is the result of `load_model(settings)`, to share a model between runs. Questions without accepted answers are
    answered but not scored. Standard output or a pipe cannot be resumed.

    Raises:
        DataError, ModelError: invalid settings, data or model; nothing is written. An existing file without `resume`,
            or one of other settings, data, versions or weights; it is not changed. Prompts that do not fit.
    """
    require_packages()
    output = Path(output).expanduser()
    if is_stream(output):
        if resume:
            raise DataError(f"{output} is not a regular file, so it has no journal; give a file to resume")
        with tempfile.TemporaryDirectory(prefix="labkit-fuse-") as folder:
            answers = run(settings, Path(folder, "answers.feather"), lm=lm)
        write_answers(answers, output)
        return replace(answers, path=output)
    require_writable(output)
    journal = journal_of(output)
    for path in (output, journal):
        if path.is_dir() or (path.exists() and not resume):
            raise DataError(f"{path} exists already: continue that run with --resume, or give another output")
    lemmatizer = load_lemmatizer(settings.lemmatizer) if settings.lemmatizer else None
    about, planned = plan(settings)
    if output.exists():
        answers = read_answers(output)
        _require_same(output, answers.about, about)
        journal.unlink(missing_ok=True)
        return answers
    lm = lm or load_model(settings)
    about["model"] = _model_facts(lm)
    rows: list[dict[str, Any]] = []
    if journal.exists():
        begun = read_answers(journal)
        _require_same(journal, begun.about, about)
        rows = begun.rows
    for begin in tqdm(range(len(rows), len(planned), settings.batch_size), unit="batch", disable=None, leave=False):
        rows += _answered(lm, settings, about["prefix"], planned[begin : begin + settings.batch_size])
        write_answers(Answers(journal, rows, about), journal)
    answers = judged(Answers(output, rows, about), lemmatizer)
    write_answers(answers, output)
    journal.unlink(missing_ok=True)
    return answers


def plan(settings: Settings) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the data set and draw examples and questions, without a model; DataError if no question is left.

    Returns the facts for the header, and for each question its row without the answer.
    """
    everything = read_paraphrases(settings.dataset, settings.pairs, unanswered=True)
    shots, rest = take_shots(everything, settings)
    questions = [question for question in rest if len(question.paraphrases) >= settings.least]
    left_out = len(rest) - len(questions)
    if not questions:
        raise DataError(f"none of the {len(rest):,} questions has {settings.least} paraphrases; use fewer")
    if settings.max_questions:
        questions = sample(questions, settings.max_questions, settings.seed)
    rows = []
    for question in questions:
        paraphrases = list(question.paraphrases)
        if settings.order_seed is not None:
            random.Random(f"{settings.order_seed} paraphrases of {question.id}").shuffle(paraphrases)
        paraphrases = settings.chosen(paraphrases)
        read = paraphrases[:1] if settings.method == "single" else paraphrases
        rows.append({
            "id": question.id,
            "relation": question.relation,
            "paraphrases": paraphrases,
            "prompt": [f"{QUESTION}{text}{SEPARATOR}" for text in read],
            "answers": list(question.answers),
            "method": settings.method,
        })  # fmt: skip
    about = {
        "settings": json.loads(json.dumps(asdict(settings))),  # as it reads back: tuples are lists
        "data": {"questions_sha256": hashlib.sha256(repr(everything).encode()).hexdigest()},
        "versions": {"labkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "prefix": prefix_of(shots, settings.seed),
        "cue": CUE,
        "few_shot_ids": [shot.id for shot in shots],
        "questions": len(questions),
        "left_out": left_out,  # questions with too few paraphrases
        "taken_out": len(everything) - len(rest),  # examples, and questions that share a text with one
        "natural": sum(question.natural for question in questions),
    }
    return about, rows


def take_shots(
    questions: Sequence[ParaphrasedQuestion], settings: Settings
) -> tuple[list[ParaphrasedQuestion], list[ParaphrasedQuestion]]:
    """(examples for the prefix, the remaining questions); no question shares a text with an example.

    For the embedded facts and for a user's file, the examples are the embedded facts that are set apart for it. For
    other data sets, or with `few_shot_from_data`, they are questions with an answer, balanced over relations.
    Raises DataError if there are too few examples, or no question is left.
    """
    dataset, count, seed = settings.dataset, settings.few_shot, settings.seed
    if count == 0:
        return [], list(questions)
    is_file = Path(dataset).expanduser().is_file()
    separate = dataset in (KNOWN_FACTS, f"{KNOWN_FACTS}:test") or (is_file and not settings.few_shot_from_data)
    pool = read_known_facts("shots") if separate else [question for question in questions if question.answers]
    if count > len(pool):
        raise DataError(f"{count} few-shot examples were requested, but there are {len(pool)}")
    shots = sample(pool, count, seed)
    random.Random(f"{seed} order").shuffle(shots)

    def folded(question: ParaphrasedQuestion) -> set[str]:
        return {" ".join(text.casefold().split()) for text in question.paraphrases}

    texts = set().union(*map(folded, shots))
    rest = [question for question in questions if texts.isdisjoint(folded(question))]
    if not rest:
        raise DataError(f"no question is left when {count} few-shot examples are taken out of {len(questions)}")
    return shots, rest


def prefix_of(shots: Sequence[ParaphrasedQuestion], seed: int) -> str:
    """The examples as text, each with one of its paraphrases, drawn with `seed`, and its first answer."""
    texts = [random.Random(f"{seed} {shot.id}").choice(shot.paraphrases) for shot in shots]
    pairs = zip(texts, shots, strict=True)
    return "".join(f"{QUESTION}{text}{SEPARATOR}{CUE} {shot.answers[0]}\n\n" for text, shot in pairs)


def load_model(settings: Settings) -> Loaded:
    """The model of the settings. Raises ModelError, or DataError if there is no such device."""
    device = settings.device
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) or ("cuda" in device and not torch.cuda.is_available()):
        raise DataError(f"the device is {device!r}; give auto, cpu, or on a machine with a CUDA GPU cuda or cuda:1")
    return load(settings.model, dtype=settings.dtype, device=None if device == "auto" else device)


def journal_of(output: str | Path) -> Path:
    """The journal of an unfinished run: the answers so far, as a file of answers."""
    output = Path(output).expanduser()
    return output.with_name(output.name + ".part")


def _answered(lm: Loaded, settings: Settings, prefix: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `plan`, with their answers."""
    result = generate(
        lm, [[QUESTION + text for text in row["paraphrases"]] for row in rows], settings.method, settings.engine,
        prefix=prefix, cue=CUE, layer=settings.layer,
        weights=settings.weights and [settings.weights] * len(rows), max_new_tokens=settings.max_new_tokens,
        stop=settings.stop or (), first_line=not settings.stop, batch_size=settings.batch_size,
    )  # fmt: skip
    return [
        row
        | {
            "generation": text,
            "prediction": text.strip() if settings.stop else first_line(text),
            "engine": result.engine,
            "seconds": result.seconds / len(rows),
            "votes": json.dumps(votes) if votes else None,
        }
        for row, text, votes in zip(rows, result.texts, result.votes or [None] * len(rows), strict=True)
    ]


def _model_facts(lm: Loaded) -> dict[str, Any]:
    weights = lm.model.state_dict().values()
    numbers = [weight.flatten()[:: max(1, weight.numel() // 1000)].tolist() for weight in weights]  # enough to compare
    return {
        "source": lm.source,
        "licence": lm.licence,
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "device": lm.model.device.type,
        "attention": lm.model.config._attn_implementation,
        "weights": hashlib.sha256(repr(numbers).encode()).hexdigest(),
    }


def _require_same(path: Path, recorded: dict[str, Any], about: dict[str, Any]) -> None:
    parts = [part for part in FIXED if part in about]
    if changed := changes({part: recorded.get(part) for part in parts}, {part: about[part] for part in parts}):
        raise DataError(f"{path} was begun with other settings: {changed}; give the same, or another output")
