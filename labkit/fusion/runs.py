"""Answer the questions of a data set with one method, and write a Feather file with the answers and their settings.

    answers = run(Settings("known-facts", "gemma3-270m", method="fuse", num_paraphrases=5), "out.feather")
    summary(answers)["accuracy"]                       # labkit.fusion.answers

Each answer is appended to a journal beside the file (`out.feather.jsonl`: a header, then one line per question). An
interrupted run continues from it and ignores an incomplete last line. The Feather file is written at the end, whole or
not at all, and then the journal is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from labkit import __version__
from labkit.datasets.paraphrases import KNOWN_FACTS, ParaphrasedQuestion, read_paraphrases, sample
from labkit.errors import DataError
from labkit.files import is_regular, is_standard_output, require_writable, write_whole
from labkit.fusion.answers import Answers, judged, read_answers, require_pyarrow, write_answers
from labkit.fusion.few_shot import CUE, SEPARATOR, asked, prefix_of, take_shots
from labkit.fusion.generation import FusionResult, generate, require_engine
from labkit.fusion.methods import GIVEN, method_named
from labkit.fusion.scores import first_line, load_lemmatizer
from labkit.models import Loaded, load


@dataclass(frozen=True)
class Settings:
    """All that decides what a run writes; a run can only be resumed with the same settings.

    Attributes:
        dataset, pairs: as for `labkit.datasets.paraphrases.read_paraphrases`. model: as for `labkit.load`.
        num_paraphrases: the first N of each question. indexes: those at these places, from 0, instead. repeat: the
            first chosen one, this many times, as a control. at_least: leave out questions with fewer paraphrases; by
            default with fewer than are needed.
        weights: for the method "weighted", one for each chosen paraphrase. layer: for "hidden-average".
        few_shot: number of examples in the prefix; examples: their source, as for `few_shot.take_shots`.
        seed: for drawing examples and questions.
        stop: texts that end an answer; (): the end of its first line that is not empty.
        lemmatizer: for `labkit.fusion.scores.load_lemmatizer`; None: exact match only.
        order_seed: shuffle the paraphrases of each question with it (`drawn_order`); None: keep their order.

    Raises:
        DataError: an unknown method or engine, or settings that exclude each other.
    """

    dataset: str
    model: str
    method: str = "fuse"
    engine: str = "fast"
    num_paraphrases: int | None = None
    indexes: tuple[int, ...] | None = None
    repeat: int | None = None
    at_least: int | None = None
    weights: tuple[float, ...] | None = None
    layer: int | None = None
    few_shot: int = 5
    seed: int = 0
    max_questions: int | None = None
    max_new_tokens: int = 12
    stop: tuple[str, ...] = ()
    batch_size: int = 16
    device: str = "auto"
    dtype: str | None = None
    pairs: str | None = None
    lemmatizer: str | None = None
    order_seed: int | None = None
    examples: str | None = None

    def __post_init__(self) -> None:
        require_engine(self.engine)
        if (method_named(self.method).weights == GIVEN) == (self.weights is None):
            problem = "needs a weight for each paraphrase" if self.weights is None else "takes no weights"
            raise DataError(f"the method {self.method!r} {problem}")
        if self.num_paraphrases is not None and (self.indexes is not None or self.repeat is not None):
            raise DataError("give num_paraphrases, or indexes and repeat, not both")
        if self.indexes is not None and (not self.indexes or min(self.indexes) < 0):
            raise DataError(f"the indexes are {list(self.indexes)}; give places from 0, such as 0,2,4")
        if self.indexes is not None and len(set(self.indexes)) < len(self.indexes):
            raise DataError(f"the indexes {list(self.indexes)} contain a place twice; use repeat for that")
        if self.num_paraphrases is None and self.at_least is not None and self.at_least < self.needed:
            raise DataError(f"at_least is {self.at_least}, but index {self.needed - 1} needs {self.needed}")

    @property
    def needed(self) -> int:
        """How many paraphrases a question needs."""
        if self.indexes is None:
            return self.num_paraphrases or 1
        return (self.indexes[0] if self.repeat else max(self.indexes)) + 1

    def chosen(self, question: ParaphrasedQuestion) -> tuple[str, ...]:
        """The paraphrases of a question that are read."""
        texts = question.paraphrases
        chosen = texts[: self.num_paraphrases] if self.indexes is None else tuple(texts[i] for i in self.indexes)
        return chosen[:1] * self.repeat if self.repeat else chosen


@dataclass(frozen=True)
class Plan:
    """The questions of a run and their prefix.

    Attributes:
        texts: for each question its chosen paraphrases. shots: the examples of the prefix.
        left_out: questions with too few paraphrases. taken_out: examples, and questions that share a text with one.
        sha256: of all questions of the data set.
    """

    questions: tuple[ParaphrasedQuestion, ...]
    texts: tuple[tuple[str, ...], ...]
    shots: tuple[ParaphrasedQuestion, ...]
    prefix: str
    left_out: int
    taken_out: int
    sha256: str


def run(
    settings: Settings,
    output: str | Path | None = None,
    *,
    resume: bool = False,
    lm: Loaded | None = None,
    unanswered: bool = False,
) -> Answers:
    """Answer all questions and write the file; with `resume`, continue an interrupted run.

    Args:
        output: the file; by default `default_output(settings)`. Standard output or a pipe cannot be resumed.
        lm: the result of `load_model(settings)`, to share a model between runs; by default it is loaded.
        unanswered: whether rows of a user's file may have no answers; they are answered but not scored.

    Raises:
        DataError, ModelError: invalid settings, data or model, or prompts that do not fit; nothing is
            written. An existing file without `resume`, or one of other settings, data, versions or weights; it is not
            changed.
    """
    require_pyarrow()
    output = Path(output or default_output(settings)).expanduser()
    if is_standard_output(output) or not is_regular(output):
        if resume:
            raise DataError(f"{output} is not a regular file, so it has no journal; give a file to resume")
        with tempfile.TemporaryDirectory(prefix="labkit-fuse-") as folder:
            answers = run(settings, Path(folder, "answers.feather"), lm=lm, unanswered=unanswered)
        write_answers(answers, output)
        return replace(answers, path=output)
    require_writable(output)
    if output.is_dir():
        raise DataError(f"{output} is a folder; give a file, such as {output / 'out.feather'}")
    journal = journal_of(output)
    if output.exists() and not resume:
        raise DataError(f"{output} exists already; give another output, or --rescore it")
    if journal.exists() and not resume:
        raise DataError(f"{journal} contains an interrupted run: continue it with --resume, or give another file")
    lemmatizer = load_lemmatizer(settings.lemmatizer) if settings.lemmatizer else None
    planned = plan(settings, unanswered)
    fixed = _fixed(settings, planned)
    if output.exists():
        answers = read_answers(output)
        _require_same(output, answers.about, fixed)
        journal.unlink(missing_ok=True)
        return answers
    lm = lm or load_model(settings)
    fixed |= {"model": _model_facts(lm)}
    header, lines = read_journal(journal)
    if header is not None:
        _require_same(journal, header, fixed)
    if [line["id"] for line in lines] != [question.id for question in planned.questions[: len(lines)]]:
        raise DataError(f"{journal} is damaged: its questions are not those of this run; delete it and start again")
    about = header or fixed | _plan_facts(planned)
    lines = lines[: len(lines) // settings.batch_size * settings.batch_size]  # the batches of an uninterrupted run
    if lines:
        write_whole(journal, _json_lines([about, *lines]))
    else:
        journal.unlink(missing_ok=True)
    lines += _answer(lm, settings, planned, len(lines), journal, about)
    rows = [_row(settings, *row) for row in zip(planned.questions, planned.texts, lines, strict=True)]
    answers = judged(Answers(output, rows, about), lemmatizer)
    write_answers(answers, output)
    journal.unlink(missing_ok=True)
    return answers


def plan(settings: Settings, unanswered: bool = False) -> Plan:
    """Read the data set and draw examples and questions; no model is needed. `unanswered` as for `run`.

    Raises:
        DataError: no such data set, no question with enough paraphrases, or no question left.
    """
    everything = read_paraphrases(settings.dataset, settings.pairs, unanswered=unanswered)
    shots, rest = take_shots(settings.dataset, everything, settings.few_shot, settings.seed, settings.examples)
    least = settings.at_least or settings.needed
    questions = [question for question in rest if len(question.paraphrases) >= least]
    if not questions:
        most = max(len(question.paraphrases) for question in rest)
        what = f"index {least - 1}" if settings.indexes and not settings.at_least else f"{least} paraphrases"
        raise DataError(f"{what}: none of the {len(rest):,} questions has enough paraphrases; the maximum is {most}")
    left_out, taken_out = len(rest) - len(questions), len(everything) - len(rest)
    if settings.max_questions:
        questions = sample(questions, settings.max_questions, settings.seed)
    if settings.order_seed is not None:
        questions = [drawn_order(question, settings.order_seed) for question in questions]
    texts = tuple(settings.chosen(question) for question in questions)
    prefix = prefix_of(shots, settings.seed)
    sha256 = hashlib.sha256(repr(everything).encode()).hexdigest()
    return Plan(tuple(questions), texts, tuple(shots), prefix, left_out, taken_out, sha256)


def drawn_order(question: ParaphrasedQuestion, seed: int) -> ParaphrasedQuestion:
    """The question with its paraphrases in an order that depends on `seed` and its id only."""
    texts = list(question.paraphrases)
    random.Random(f"{seed} paraphrases of {question.id}").shuffle(texts)
    return replace(question, paraphrases=tuple(texts))


def load_model(settings: Settings) -> Loaded:
    """The model of the settings. Raises ModelError, or DataError if there is no such device."""
    return load(settings.model, dtype=settings.dtype, device=device_named(settings.device))


def device_named(name: str) -> str | None:
    """The device argument of `labkit.load` for a name on the command line; DataError if there is no such device."""
    import torch

    if name == "auto":
        return None
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise DataError(f"the device is {name!r}; give auto, cpu, cuda or cuda:1") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise DataError(f"the device is {name!r}, but there is no CUDA GPU; give cpu or auto")
    return name


def default_output(settings: Settings) -> Path:
    """runs/fuse/known-facts_gemma3-270m_fuse_n5_5-shot.feather"""
    kind, _, rest = settings.dataset.partition(":")
    data = Path(rest).stem if rest and kind != KNOWN_FACTS else Path(settings.dataset).stem
    method = settings.method if settings.engine == "fast" else f"{settings.method}-{settings.engine}"
    if settings.repeat:
        choice = f"i{(settings.indexes or (0,))[0]}x{settings.repeat}"
    elif settings.indexes is not None:
        choice = "i" + "-".join(map(str, settings.indexes))
    else:
        choice = f"n{settings.num_paraphrases}" if settings.num_paraphrases else "all"
    parts = (data, Path(settings.model).name, method, choice, f"{settings.few_shot}-shot")
    return Path("runs", "fuse", "_".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts) + ".feather")


# ---- the journal ---------------------------------------------------------------------------------------------------


def journal_of(output: str | Path) -> Path:
    """The journal of an unfinished run."""
    output = Path(output).expanduser()
    return output.with_name(output.name + ".jsonl")


def read_journal(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """(header, one line per answered question), without an incomplete last line; (None, []) if there is no header.

    Raises:
        DataError: a complete line is damaged.
    """
    content = path.read_bytes() if path.exists() else b""
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            lines.append(json.loads(text))
            _ = [lines[-1][name] for name in (("settings",) if number == 1 else ("id", "generation"))]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number} is damaged; delete the file and start the run again") from error
    return (lines[0], lines[1:]) if lines else (None, [])


def _answer(
    lm: Loaded, settings: Settings, planned: Plan, done: int, journal: Path, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Answer all questions but the first `done`, and append the answers of each batch to the journal."""
    from tqdm import tqdm

    ids, texts = [question.id for question in planned.questions[done:]], planned.texts[done:]
    lines: list[dict[str, Any]] = []
    if not ids:
        return lines

    def keep(batch: FusionResult) -> None:
        votes = batch.votes or [None] * len(batch.texts)
        seconds = batch.seconds / len(batch.texts)
        new = [
            {"id": id, "generation": text, "engine": batch.engine, "seconds": seconds, "votes": tally}
            for id, text, tally in zip(ids[len(lines) :], batch.texts, votes, strict=False)
        ]
        journal.parent.mkdir(parents=True, exist_ok=True)
        with journal.open("a", encoding="utf-8") as file:
            file.write(_json_lines(new if file.tell() else [about, *new]))
            file.flush()
            os.fsync(file.fileno())
        lines.extend(new)
        bar.update(len(new))

    with tqdm(total=done + len(ids), initial=done, unit="question", disable=None, leave=False) as bar:
        generate(
            lm, [[asked(text) for text in chosen] for chosen in texts], settings.method, settings.engine,
            prefix=planned.prefix, cue=CUE, separator=SEPARATOR, layer=settings.layer,
            weights=settings.weights and [settings.weights] * len(texts), max_new_tokens=settings.max_new_tokens,
            stop=settings.stop, first_line=not settings.stop, batch_size=settings.batch_size, on_batch=keep,
        )  # fmt: skip
    return lines


def _json_lines(values: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


def _row(settings: Settings, question: ParaphrasedQuestion, texts: tuple[str, ...], line: dict[str, Any]) -> dict:
    """One row of the Feather file, not judged yet."""
    read = texts[:1] if settings.method == "single" else texts
    text = line["generation"]
    return line | {
        "relation": question.relation,
        "paraphrases": list(texts),
        "prompt": [asked(paraphrase) + SEPARATOR for paraphrase in read],
        "answers": list(question.answers),
        "prediction": text.strip() if settings.stop else first_line(text),
        "method": settings.method,
    }


# ---- what makes a run the same -------------------------------------------------------------------------------------


def _fixed(settings: Settings, planned: Plan) -> dict[str, dict[str, Any]]:
    """What a resumed run must share, apart from the model."""
    import torch
    import transformers

    return {
        "settings": json.loads(json.dumps(asdict(settings))),  # as it reads back: tuples are lists
        "data": {"questions_sha256": planned.sha256},
        "versions": {"labkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def _model_facts(lm: Loaded) -> dict[str, Any]:
    weights = hashlib.sha256()
    for name, weight in lm.model.state_dict().items():  # a thousand numbers of each tell models apart
        numbers = weight.detach().flatten()[:: max(1, weight.numel() // 1000)]
        weights.update(f"{name} {tuple(weight.shape)} ".encode() + numbers.double().cpu().numpy().tobytes())
    return {
        "class": type(lm.model).__name__,
        "source": lm.source,
        "licence": lm.licence,
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "device": lm.model.device.type,
        "attention": lm.model.config._attn_implementation,
        "weights": weights.hexdigest(),
    }


def _plan_facts(planned: Plan) -> dict[str, Any]:
    return {
        "prefix": planned.prefix,
        "cue": CUE,
        "separator": SEPARATOR,
        "few_shot_ids": [shot.id for shot in planned.shots],
        "questions": len(planned.questions),
        "left_out": planned.left_out,
        "taken_out": planned.taken_out,
        "natural": sum(question.natural for question in planned.questions),
    }


def _require_same(path: Path, recorded: dict[str, Any], fixed: dict[str, dict[str, Any]]) -> None:
    """Raise DataError with every difference if the run recorded in `path` is not this one."""
    changes = []
    for part, facts in fixed.items():
        was = recorded.get(part) or {}
        changes += [
            f"{name} was {was.get(name)!r}, now {fact!r}" for name, fact in facts.items() if was.get(name) != fact
        ]
    if changes:
        raise DataError(f"{path} was begun with other settings: {'; '.join(changes)}")
