"""What the mask buys: the same task learned by arms that differ in what they may see, over seeds, resumable run by run.

    found = conditions(["ner:field-notes"])
    run_study(Study("gpt2-mini", arms=("causal", "bidirectional", "repeated")), found, "runs/effect")
    report("runs/effect")                        # labkit.bench.effect_report

Three stages, and the order is the point of them:

1. tuning   every arm is trained with every learning rate of the same grid, with a seed of its own, and scored on dev
2. frozen   the best rate of each arm is written to frozen.json; nothing has seen a test set so far
3. runs     every arm is trained with its rate, one run per seed, and scored on test

Every run is a folder of `labkit.tasks.finetune`, so each number can be followed to the predictions it was made of.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from labkit import precision
from labkit.bench import folders
from labkit.bench.arms import DEFAULT, Arm, arms
from labkit.bench.conditions import Condition
from labkit.bench.jobs import side_by_side
from labkit.errors import DataError, DivergedError, LabkitError
from labkit.export import choose_layers
from labkit.run_folder import read_json
from labkit.tasks.adapters import METHODS
from labkit.tasks.finetune import finetune
from labkit.tasks.lm import train_lm
from labkit.tasks.plans import Plan
from labkit.tasks.recipes import Options, by_name, require_positions
from labkit.training_settings import Settings, require

NOT_TUNED = "its learning rate is not chosen: some of the grid failed (tuning/, above); --resume tries them again"
TUNING_SEED = 1000  # none of those that are reported


@dataclass(frozen=True)
class Study:
    """What is compared, and with which budget; the same for all arms.

    Attributes:
        model: a registered name, a hub id or a folder. arms: by name (`labkit.bench.arms`).
        learning_rates: the grid of stage 1; with one there is nothing to choose, and stage 1 trains nothing.
        seeds: of the runs that are reported: head, order, dropout, and the adaptation before.
        sizes: of the training set, for a curve; None is all of it. The rate is that of the full size.
        plan: how long and how hard; its learning rate and seed are not used.
        method, rank, attn, window: as in `labkit.tasks.finetune.finetune`.
        max_length: tokens per row, with a stride of a quarter of it at most; None: the tasks' own.
        adaptation_rate, adaptation_batch, adaptation_length: of the steps in arms such as mntp:200.
    """

    model: str
    arms: tuple[str, ...] = DEFAULT
    learning_rates: tuple[float, ...] = (2e-4, 5e-4, 1e-3)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    sizes: tuple[int | None, ...] = (None,)
    plan: Plan = field(default_factory=Plan)
    method: str = "full"
    rank: int = 16
    attn: str | None = None
    window: str = "keep"
    max_length: int | None = None
    adaptation_rate: float = 5e-4
    adaptation_batch: int = 8
    adaptation_length: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "arms", tuple(each.name for each in arms(self.arms)))
        for name in ("learning_rates", "seeds", "sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise DataError(f"{name.replace('_', ' ')} are {values}; give at least one, and none twice")
        if wrong := [rate for rate in (*self.learning_rates, self.adaptation_rate) if not 0 < rate < 1]:
            raise DataError(f"the learning rate {wrong[0]:g} cannot be used; give numbers between 0 and 1")
        if None not in self.sizes:
            raise DataError("the sizes leave out the whole training set, on which the rates are chosen; add all")
        if small := [size for size in self.sizes if size is not None and size < 1]:
            raise DataError(f"a training set of {small[0]} examples was asked for; give 1 or more, or all")
        if self.method not in METHODS:
            raise DataError(f"the method is {self.method!r}; choose one of {', '.join(METHODS)}")
        if self.rank < 1:
            raise DataError(f"the rank is {self.rank}; it must be at least 1")
        if TUNING_SEED in self.seeds:
            raise DataError(f"the seed {TUNING_SEED} is that of the tuning; take others")
        if wrong := [seed for seed in self.seeds if not 0 <= seed < 2**32]:
            raise DataError(f"the seed {wrong[0]} cannot be used; give numbers from 0 to {2**32 - 1}")


@dataclass(frozen=True)
class Run:
    """One training of the study; `rate` is None until it is frozen."""

    condition: Condition
    arm: Arm
    seed: int
    size: int | None = None
    rate: float | None = None
    tuning: bool = False

    @property
    def folder(self) -> Path:
        """Where it lies within the study's folder."""
        if self.tuning:
            return folders.tuning_folder(self.condition.name, self.arm.name, self.rate)
        return folders.run_folder(Path(), self.condition.name, self.arm.name, self.size, self.seed)

    def work(self, plan: Plan) -> float:
        """In characters that are read, those trained on counted three times; only good to guess the time left."""
        rows = self.condition.smaller(self.size)
        trained = plan.epochs * len(rows)
        if plan.max_steps is not None:
            trained = min(trained, plan.max_steps * plan.batch_size * plan.gradient_accumulation)
        texts = texts_of(self.condition)
        letters = sum(map(len, texts)) / len(texts)
        scored = 0 if self.tuning else len(self.condition.test)
        return letters * self.arm.readings * (3 * trained + 3 * len(self.condition.dev) + scored)

    def __str__(self) -> str:
        size = f", {self.size} examples" if self.size else ""
        return f"{self.condition.name}, {self.arm.name}{size}, " + (
            f"rate {self.rate:g}" if self.tuning else f"seed {self.seed}"
        )


def run_study(
    study: Study,
    conditions: Sequence[Condition],
    folder: str | Path,
    *,
    resume: bool = False,
    jobs: int = 1,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> dict[str, str]:
    """Run what is missing of the study in `folder`, `jobs` runs at a time; returns what failed, {run: reason}.

    A run that fails is noted, and the others go on. Killed at any moment it goes on with `resume`; then arms, seeds,
    sizes and conditions may have been added, and what is done stays. How many run at a time changes nothing but the
    seconds (`labkit.bench.jobs`).

    Raises:
        DataError, TrainingError, ModelError: nothing to compare, the folder holds another study, or there is no such
            model. Nothing is written then.
    """
    if not conditions:
        raise DataError("there is no data to compare the arms on")
    import labkit

    _require_folders_apart(study, conditions)
    lm = labkit.load(study.model, attn=study.attn, device="cpu")  # a wrong name is an error now, not one of every run
    for each in arms(study.arms):
        if each.model is not None:
            labkit.load(each.model, task="base", attn=study.attn, device="cpu")
    _require_plan(study, lm)
    _require_layers(study, lm)
    _require_positions(study, conditions, lm)
    for condition in conditions:
        if large := [size for size in study.sizes if size is not None and size >= len(condition.train)]:
            named = ", ".join(map(str, large))
            say(f"{condition.name} has {len(condition.train):,} training examples: no run with {named}")
    stored = str(lm.model.dtype).removeprefix("torch.")
    del lm
    with folders.opened(folder, study, conditions, resume=resume) as path:
        progress = _Progress(path, study.plan, say)
        train = partial(_train, study, path, stored)
        tuning = list(_tuning(study, conditions, path))
        reported = list(_reported(study, conditions))
        progress.plan([*tuning, *reported])
        for run in (*tuning, *reported):  # of one that was killed after its scores were written
            if progress.is_done(run):
                shutil.rmtree(path / run.folder / "checkpoints", ignore_errors=True)
        try:
            progress.do(tuning, train, jobs)
            frozen = folders.freeze(path, study, conditions, progress.diverged)
            rated = []
            for run in reported:
                rate = frozen.get(run.condition.name, {}).get(run.arm.name, {}).get("learning_rate")
                if rate is None:
                    progress.failures[str(run.folder)] = NOT_TUNED
                else:
                    rated.append(replace(run, rate=rate))
            if rated:
                _write_baselines(study, conditions, path, say)
            progress.do(rated, train, jobs)
        finally:
            folders.write_failures(path, progress.failures)
    return progress.failures


def _write_baselines(study: Study, conditions: Sequence[Condition], path: Path, say: Callable[[str], None]) -> None:
    """What needs no model, judged on the test set text by text, where it is not written yet."""
    for condition in conditions:
        for size in folders.sizes(study.sizes, len(condition.train)):
            file = folders.baselines_file(path, condition.name, size)
            if not file.exists():
                try:
                    lines = by_name(condition.task).baseline_lines(condition.smaller(size), condition.test)
                except LabkitError as error:  # of very few examples, or without scikit-learn
                    say(f"{condition.name}: its baselines are not judged text by text ({error})")
                else:
                    folders.write_json(file, lines)


def _require_folders_apart(study: Study, conditions: Sequence[Condition]) -> None:
    """DataError if the runs of two conditions, or arms, would lie in one folder; some disks know no capitals."""
    for names in ([each.name for each in conditions], study.arms):
        places: dict[str, str] = {}
        for name in names:
            if (other := places.setdefault(folders.slug(name).lower(), name)) != name:
                raise DataError(f"{other!r} and {name!r} would share a folder; give one of them another name")


def _require_plan(study: Study, lm: Any) -> None:
    """TrainingError for a budget that no run could have, and for numbers that this machine cannot compute in."""
    family = lm.model.config.get_text_config().model_type
    chosen = precision.choose(family, precision.here(), study.plan.dtype)
    require(study.plan.settings(1, "f1", dtype=chosen.dtype, tf32=False))


def _require_layers(study: Study, lm: Any) -> None:
    """LabkitError if an arm unmasks layers that the model does not have."""
    for each in arms(study.arms):
        choose_layers(each.layers, lm.model.config.get_text_config().num_hidden_layers)


def _require_positions(study: Study, conditions: Sequence[Condition], lm: Any) -> None:
    """DataError if a row, read as often as an arm reads it, is longer than the model has positions."""
    most = max(arms(study.arms), key=lambda each: each.readings)
    who, more = (f"{most.name}: ", ", which is for all arms, or leave out the arm") if most.readings > 1 else ("", "")
    for condition in conditions:
        recipe = by_name(condition.task)
        options = Options(**condition.options, **_lengths(study, condition)).filled(recipe)
        examples = [*condition.train, *condition.dev, *condition.test]  # of the last their lengths alone
        of = f" of {condition.name}"
        require_positions(recipe, lm, examples, options, most.readings, who=who, of=of, more=more)


def _tuning(study: Study, conditions: Sequence[Condition], path: Path) -> Iterator[Run]:
    """The runs of stage 1 of arms that are not frozen yet."""
    if len(study.learning_rates) == 1:
        return
    frozen = folders.frozen(path)
    for condition in conditions:
        for arm in arms(study.arms):
            if arm.name not in frozen.get(condition.name, {}):
                for rate in study.learning_rates:
                    yield Run(condition, arm, TUNING_SEED, rate=rate, tuning=True)


def _reported(study: Study, conditions: Sequence[Condition]) -> Iterator[Run]:
    """The runs of stage 3, seed by seed, so that what there is can be compared at any time."""
    for seed in study.seeds:
        for condition in conditions:
            for size in folders.sizes(study.sizes, len(condition.train)):
                for arm in arms(study.arms):
                    yield Run(condition, arm, seed, size)


def _train(study: Study, path: Path, stored: str, run: Run) -> dict[str, Any]:
    """One run, from its adaptation to its scores. Its checkpoints are of no use once it is done.

    `stored`: the dtype that the study's model is stored in, which an adapted one may not be.
    """
    with folders.alone(path, run.folder):
        return _finetuned(study, path, stored, run)


def _finetuned(study: Study, path: Path, stored: str, run: Run) -> dict[str, Any]:
    start, adapted = run.arm.model or study.model, {}
    folder = path / run.folder
    if run.arm.objective:
        start = str(_adapted(study, path, run))
        adapted = {"known_as": _known_as(Path(start), path, folder), "head_dtype": stored}
    metrics = finetune(
        run.condition.task,
        start,
        run.condition.smaller(run.size),
        folder,
        dev=run.condition.dev,
        test=() if run.tuning else run.condition.test,
        plan=replace(study.plan, learning_rate=run.rate, seed=run.seed),
        options=Options(**run.condition.options, **_lengths(study, run.condition)),
        window=study.window,
        method=study.method,
        rank=study.rank,
        attn=study.attn,
        packing=True,
        keep_model=False,
        resume=folder.exists(),
        say=lambda text: None,
        **run.arm.seeing,
        **adapted,
    )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return metrics


def _known_as(adapted: Path, path: Path, run: Path) -> str:
    """What a run calls the adapted model that it begins with: its place in the study, which may be moved.

    Earlier versions wrote down the whole path; a run that was begun so keeps it.
    """
    place = adapted.relative_to(path).as_posix()
    begun = (read_json(run / "config.json") or {}).get("model", "")
    return begun if begun.replace("\\", "/").endswith(f"/{place}") else place


def _lengths(study: Study, condition: Condition) -> dict[str, int]:
    """Tokens per row and between two windows, where the study says how many."""
    if study.max_length is None:
        return {}
    defaults = by_name(condition.task).defaults
    stride = {"doc_stride": min(defaults["doc_stride"], study.max_length // 4)} if "doc_stride" in defaults else {}
    return {"max_length": study.max_length} | stride


def _adapted(study: Study, path: Path, run: Run) -> Path:
    """The model that has been trained on the condition's training texts, without their labels, before the task.

    Several runs begin with the same one; the first of them makes it. So does the first that is added to a study that
    was kept without its models.
    """
    arm = run.arm
    folder = folders.adapted_folder(path, run.condition.task, run.condition.name, arm.name, run.seed)
    every = max(1, arm.steps // 4)
    begun = read_json(folder / "config.json")  # by an earlier version perhaps, which had not left it to the rule
    dtype = begun["settings"]["dtype"] if begun else study.plan.dtype
    settings = Settings(
        max_steps=arm.steps, batch_size=study.adaptation_batch, learning_rate=study.adaptation_rate, weight_decay=0.01,
        warmup=0.1, dtype=dtype, seed=run.seed,
        evaluate_every=every, save_every=every,
    )  # fmt: skip
    with folders.alone(path, folder.relative_to(path)):
        if (folder / "metrics.json").exists() and not (folder / "model").exists():
            shutil.rmtree(folder)
        train_lm(
            study.model,
            texts_of(run.condition),
            folder,
            objective=arm.objective,
            settings=settings,
            max_length=study.adaptation_length,
            window=study.window,
            lora=study.method == "lora",
            attn=study.attn,
            resume=folder.exists(),
            say=lambda text: None,
        )
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return folder / "model"


def texts_of(condition: Condition) -> list[str]:
    """The texts of the training side, each once: contexts, sentences. Labels and questions are not among them."""
    name = "context" if condition.task == "qa" else "text"
    return list(dict.fromkeys(getattr(each, name) for each in condition.train))


class _Progress:
    """What is done and what is left, said run by run; a run that fails is noted."""

    def __init__(self, path: Path, budget: Plan, say: Callable[[str], None]):
        self.path, self.budget, self.say = path, budget, say
        self.failures: dict[str, str] = {}
        self.diverged: dict[str, str] = {}  # those of them that no other hour and no other machine would mend
        self.number = self.count = 0
        self.left = self.done = 0.0
        self.began = time.perf_counter()

    def plan(self, runs: Sequence[Run]) -> None:
        todo = [run for run in runs if not self.is_done(run)]
        self.count, self.left = len(todo), sum(run.work(self.budget) for run in todo)
        self.say(f"{len(runs):,} runs, {len(runs) - self.count:,} of them done")

    def do(self, runs: Sequence[Run], train: Callable[[Run], dict[str, Any]], jobs: int) -> None:
        for run, metrics, error, seconds in side_by_side(train, [r for r in runs if not self.is_done(r)], jobs):
            if error is not None:
                self.failures[str(run.folder)] = str(error)
                if isinstance(error, DivergedError):
                    self.diverged[str(run.folder)] = str(error)
                told = f"failed: {error}"
            else:
                side = "dev" if run.tuning else "test"
                name = metrics["metric"] if run.tuning else metrics["metric"].removeprefix("best_")
                told = f"{side} {name.replace('_', ' ')} {metrics[side][name]:.3f}"
            work = run.work(self.budget)
            self.number, self.done, self.left = self.number + 1, self.done + work, self.left - work
            rest = (time.perf_counter() - self.began) / self.done * max(self.left, 0.0)
            self.say(f"{self.number} of {self.count}: {run}: {told} ({seconds:,.0f} s; about {_span(rest)} left)")

    def is_done(self, run: Run) -> bool:
        return (self.path / run.folder / "metrics.json").exists()


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"
