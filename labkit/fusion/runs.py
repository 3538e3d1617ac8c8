"""Answer the questions of a set with one method, into one Feather file that explains itself.

    answers = run(Settings("known-facts", "gemma3-270m", method="fuse", num_paraphrases=5), "out.feather")
    summary(answers)["accuracy"]                       # labkit.fusion.answers

Answers are kept as they come, in a journal beside the file (`out.feather.jsonl`: a header, then one line per question).
A run that is interrupted goes on from there; a line that was being written is dropped. The file is written at the end,
whole or not at all, and then the journal goes.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from labkit.datasets.paraphrases import KNOWN_FACTS, ParaphrasedQuestion, read_paraphrases, sample
from labkit.errors import FusionError
from labkit.files import is_regular, is_standard_output, require_writable, sha256
from labkit.fusion import scores
from labkit.fusion.answers import Answers, judged, read_answers, require_pyarrow, write_answers
from labkit.fusion.few_shot import CUE, SEPARATOR, Choice, asked, prefix_of, take_shots
from labkit.fusion.generation import ENGINES, generate
from labkit.fusion.journal import Journal, alone, journal_of, read_journal
from labkit.fusion.methods import GIVEN, method_named
from labkit.fusion.sameness import fingerprint, require_same, versions
from labkit.models import Loaded, load
from labkit.resources import folder


@dataclass(frozen=True)
class Settings:
    """All that decides what a run writes; a run can only be resumed with the same.

    Attributes:
        dataset, pairs: as for `labkit.datasets.paraphrases.read_paraphrases`. model: as for `labkit.load`.
        num_paraphrases, indexes, repeat, at_least: which paraphrases (`labkit.fusion.few_shot.Choice`).
        weights: for the method "weighted", one for each chosen paraphrase. layer: for "hidden-average".
        few_shot: examples in the prefix; examples: where they are from, as for `labkit.fusion.few_shot.take_shots`.
        seed: of the draws of examples and questions.
        stop: texts that end an answer; (): the end of its first line that is not empty.
        lemmatizer: for `labkit.fusion.scores.load_lemmatizer`; None: exact match only.
        order_seed: with it each question's paraphrases stand in `drawn_order`; None: in the order of their set.

    Raises:
        FusionError: an unknown method or engine, or a choice of paraphrases that has no meaning.
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
        if (method_named(self.method).weights == GIVEN) == (self.weights is None):
            wanted = "needs a weight for each paraphrase" if self.weights is None else "takes no weights"
            raise FusionError(f"the method {self.method!r} {wanted}")
        if self.engine not in ENGINES:
            raise FusionError(f"the fusion engine is {self.engine!r}; choose one of {', '.join(ENGINES)}")
        _ = self.choice

    @property
    def choice(self) -> Choice:
        return Choice(self.num_paraphrases, self.indexes, self.repeat, self.at_least)


@dataclass(frozen=True)
class Plan:
    """What will be asked: questions with their chosen paraphrases, behind one prefix.

    Attributes:
        texts: of each question, its chosen paraphrases. shots: the examples of the prefix.
        left_out: questions with too few paraphrases. taken_out: questions that are examples, or share a text with one.
        sha256: of the set's file; of a folder, of the list of its files with their sha256.
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
    """Answer all questions, and write the file; with `resume`, go on with a run that was interrupted.

    Args:
        output: the file; by default `default_output(settings)`. What is not a regular file gets the bytes at the end,
            and cannot be resumed.
        lm: the model that the settings name, as `load_model` gives it, for runs that share one; by default it is loaded
            if a question is left to ask.
        unanswered: whether rows of a file of one's own may be without answers: they are asked, and not scored.

    Raises:
        FusionError, DataError, ModelError: what cannot be asked, read or loaded; nothing is written then. A file or a
            journal that is there without `resume`, or is of other settings, or of a model with other weights, dtype or
            device; or another process is at it; nothing is changed then.
    """
    require_pyarrow()
    output = Path(output or default_output(settings)).expanduser()
    if is_standard_output(output) or not is_regular(output):
        if resume:
            raise FusionError(f"{output} is not a regular file, so no journal lies beside it; give a file to resume")
        with tempfile.TemporaryDirectory(prefix="labkit-fuse-") as beside:
            answers = run(settings, Path(beside, "answers.feather"), lm=lm, unanswered=unanswered)
        write_answers(answers, output)
        return replace(answers, path=output)
    lemmatizer = scores.load_lemmatizer(settings.lemmatizer) if settings.lemmatizer else None
    made = plan(settings, unanswered)
    asked_for = {"settings": _as_json(asdict(settings)), "versions": versions(), "dataset_sha256": made.sha256}
    _require_free(output, resume)
    if output.exists():
        finished = read_answers(output)
        require_same(output, finished.about, asked_for)
        journal_of(output).unlink(missing_ok=True)
        return finished
    with alone(output):
        about, said, whole = read_journal(journal_of(output))
        if about is not None:
            require_same(journal_of(output), about, asked_for)
        if about is None or any(question.id not in said for question in made.questions):
            lm = lm or load_model(settings)
            _require_fit(lm, settings, made)
            now = asked_for | _facts(settings, made, lm)
            if about is not None:
                models = [{"settings": each["model"]} for each in (about, now)]
                require_same(journal_of(output), *models, "another model of that name")
            about = about or now
            with Journal(journal_of(output), about, whole) as journal:
                _answer_all(lm, settings, made, said, journal)
        rows = [_row(settings, *each, said[each[0].id]) for each in zip(made.questions, made.texts, strict=True)]
        answers = judged(Answers(output, rows, about), lemmatizer)
        write_answers(answers, output)
        journal_of(output).unlink()
    return answers


def plan(settings: Settings, unanswered: bool = False) -> Plan:
    """Read the set, and draw examples and questions, without any model; `unanswered` as for `run`.

    Raises:
        DataError, FusionError: no such set; no question with so many paraphrases; no question left.
    """
    choice = settings.choice
    found = read_paraphrases(settings.dataset, settings.pairs, unanswered=unanswered)
    shots, rest = take_shots(settings.dataset, found, settings.few_shot, settings.seed, settings.examples)
    able = choice.able(rest)
    questions = sample(able, settings.max_questions, settings.seed) if settings.max_questions else able
    if settings.order_seed is not None:
        questions = [drawn_order(question, settings.order_seed) for question in questions]
    texts = tuple(choice.of(question) for question in questions)
    prefix = prefix_of(shots, settings.seed)
    left_out, taken_out = len(rest) - len(able), len(found) - len(rest)
    return Plan(tuple(questions), texts, tuple(shots), prefix, left_out, taken_out, _dataset_sha256(settings))


def drawn_order(question: ParaphrasedQuestion, seed: int) -> ParaphrasedQuestion:
    """The question with its paraphrases in an order that `seed` and its id decide, and nothing else."""
    texts = list(question.paraphrases)
    random.Random(f"{seed} paraphrases of {question.id}").shuffle(texts)
    return replace(question, paraphrases=tuple(texts))


def load_model(settings: Settings) -> Loaded:
    """The model that the settings name. Raises ModelError, or FusionError if it cannot read text or has no device."""
    lm = load(settings.model, dtype=settings.dtype, device=device_named(settings.device))
    if lm.tokenizer is None:
        raise FusionError(f"{settings.model} holds no tokenizer, so no text can be read; add its tokenizer files")
    return lm


def default_output(settings: Settings) -> Path:
    """runs/fuse/known-facts_gemma3-270m_fuse_n5_5-shot.feather"""
    kind, _, rest = settings.dataset.partition(":")
    data = Path(rest).stem if rest and kind != KNOWN_FACTS else Path(settings.dataset).stem
    method = settings.method if settings.engine == "fast" else f"{settings.method}-{settings.engine}"
    parts = (data, Path(settings.model).name, method, settings.choice.label, f"{settings.few_shot}-shot")
    return Path("runs", "fuse", "_".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts) + ".feather")


# ---- asking --------------------------------------------------------------------------------------------------------


def _answer_all(lm: Loaded, settings: Settings, made: Plan, said: dict[str, dict[str, Any]], journal: Journal) -> None:
    """Ask what `said` does not hold, batch by batch; the batches are those of a run that was not interrupted."""
    from tqdm import tqdm

    numbers, size = range(len(made.questions)), settings.batch_size
    done = sum(question.id in said for question in made.questions)
    with tqdm(total=len(numbers), initial=done, unit="question", disable=None, leave=False) as bar:  # on a terminal
        for batch in (numbers[begin : begin + size] for begin in range(0, len(numbers), size)):
            missing = [number for number in batch if made.questions[number].id not in said]
            if not missing:
                continue
            new = _answered(lm, settings, made.prefix, [made.texts[number] for number in missing])
            lines = [{"id": made.questions[n].id, **line} for n, line in zip(missing, new, strict=True)]
            journal.add(lines)
            said |= {line["id"]: line for line in lines}
            bar.update(len(lines))


def _answered(lm: Loaded, settings: Settings, prefix: str, texts: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """What a journal keeps of each question of one batch, its id apart."""
    result = generate(
        lm, [[asked(text) for text in each] for each in texts], settings.method, settings.engine, prefix=prefix,
        cue=CUE, separator=SEPARATOR, weights=settings.weights and [settings.weights] * len(texts),
        layer=settings.layer, max_new_tokens=settings.max_new_tokens, stop=settings.stop,
        first_line=not settings.stop, batch_size=len(texts),
    )  # fmt: skip
    return [
        {"generation": text, "engine": result.engine, "seconds": result.seconds / len(texts), "votes": vote}
        for text, vote in zip(result.texts, result.votes or [None] * len(texts), strict=True)
    ]


def _row(
    settings: Settings, question: ParaphrasedQuestion, texts: tuple[str, ...], said: dict[str, Any]
) -> dict[str, Any]:
    """One row of the file but for what is right in it; `said` is the question's line of the journal."""
    read = texts[:1] if settings.method == "single" else texts
    text = said["generation"]
    return {
        "id": question.id,
        "relation": question.relation,
        "paraphrases": list(texts),
        "prompt": [asked(each) + SEPARATOR for each in read],
        "answers": list(question.answers),
        "generation": text,
        "prediction": text.strip() if settings.stop else scores.first_line(text),
        "method": settings.method,
        "engine": said["engine"],
        "seconds": said["seconds"],
        "votes": said["votes"],
    }


def _require_fit(lm: Loaded, settings: Settings, made: Plan) -> None:
    """FusionError unless all prompts fit the model, so that a run does not end halfway."""
    from labkit.fusion.engine import require_room
    from labkit.fusion.layout import prompts, token_ids

    texts = [[asked(text) for text in chosen] for chosen in made.texts]
    begins, ids, ends = token_ids(lm.tokenizer, texts, made.prefix, CUE, SEPARATOR)
    weights = settings.weights and [settings.weights] * len(ids)
    whole = prompts(method_named(settings.method), begins, ids, ends, weights)
    require_room(lm.model, whole, settings.batch_size, settings.max_new_tokens)


def device_named(name: str) -> str | None:
    """What `labkit.load` takes for a name on the command line. Raises FusionError if there is no such device."""
    import torch

    if name == "auto":
        return None
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise FusionError(f"the device is {name!r}; give auto, cpu, cuda or cuda:1") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise FusionError(f"the device is {name!r}, and torch sees no CUDA GPU here; give cpu or auto")
    return name


# ---- what a file says of itself ------------------------------------------------------------------------------------


def _facts(settings: Settings, made: Plan, lm: Loaded) -> dict[str, Any]:
    """What is known once the model is there, beside what was asked for."""
    return {
        "prefix": made.prefix,
        "cue": CUE,
        "separator": SEPARATOR,
        "few_shot_ids": [each.id for each in made.shots],
        "questions": len(made.questions),
        "left_out": made.left_out,
        "taken_out": made.taken_out,
        "natural": sum(each.natural for each in made.questions),
        "model": {
            "class": type(lm.model).__name__,
            "source": lm.source,
            "licence": lm.licence,
            "dtype": str(lm.model.dtype).removeprefix("torch."),
            "device": lm.model.device.type,
            "attention": lm.model.config._attn_implementation,
            "weights": fingerprint(lm.model),
        },
    }


def _dataset_sha256(settings: Settings) -> str:
    kind, _, rest = settings.dataset.partition(":")
    if kind == KNOWN_FACTS:
        return sha256(folder("data") / "known_facts" / "facts.jsonl")
    places = [rest if kind in ("webqa", "lama") else settings.dataset, *([settings.pairs] if settings.pairs else [])]
    paths = [Path(place).expanduser() for place in places]
    if paths[0].is_file():
        return sha256(paths[0])
    listed = "".join(
        f"{sha256(file)}  {file.relative_to(path).as_posix()}\n"
        for path in paths
        for file in sorted(path.rglob("*.jsonl"))
    )
    return hashlib.sha256(listed.encode()).hexdigest()


def _require_free(output: Path, resume: bool) -> None:
    require_writable(output)
    if output.is_dir():
        raise FusionError(f"{output} is a folder; give a file, such as {output / 'out.feather'}")
    if resume:
        return
    if output.exists():
        raise FusionError(f"{output} exists already; give another output, or --rescore it")
    if (journal := journal_of(output)).exists():
        raise FusionError(f"{journal} holds a run that was interrupted: --resume goes on with it, or give another file")


def _as_json(value: Any) -> Any:
    """As it reads back: tuples are lists."""
    return json.loads(json.dumps(value))
