"""Measure the effect of the causal mask on a task: the same fine-tuning by arms that differ in what they may attend to.

    python benchmarks/study/mask_effect.py --data ner:field-notes --arms causal,bidirectional,repeated \\
        --output-dir runs/fx

Three stages, in this order:
1. tuning: every arm is trained with every learning rate of the same grid, with a seed of its own, and scored on dev
2. frozen.json: the best rate of each arm, written before the first test set is read
3. runs: every arm is trained with its rate, one run per seed and size, and scored on test

The same command again continues a study, or adds arms, seeds, sizes and data. Several processes may work in the same
folder, on one GPU or each with its own CUDA_VISIBLE_DEVICES; the arms that need an adaptation (such as mntp:200) begin
first, since their runs wait for it. Arms: see benchmarks/study/arms.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from benchmarks.study import report, runner  # noqa: E402
from benchmarks.study.arms import DEFAULT, REFERENCE, Arm, arm, arms, named  # noqa: E402
from benchmarks.study.conditions import ORDERS, Condition, conditions  # noqa: E402
from benchmarks.study.runner import listed, option, slug  # noqa: E402
from labkit.datasets.files import read_text  # noqa: E402
from labkit.errors import DataError, TrainingError  # noqa: E402
from labkit.models import adapters, load  # noqa: E402
from labkit.run_folder import read_json  # noqa: E402
from labkit.tasks.base import Task, get  # noqa: E402
from labkit.tasks.finetune import default_preset, digest, finetune  # noqa: E402
from labkit.tasks.lm import train_lm  # noqa: E402
from labkit.training import PRESETS, preset  # noqa: E402

TUNING_SEED = 1000  # is not among the reported seeds
BUDGET = {  # option: its type, and its name in labkit.training.preset
    "epochs": (float, "num_train_epochs"), "max_steps": (int, "max_steps"),
    "batch_size": (int, "per_device_train_batch_size"), "gradient_accumulation": (int, "gradient_accumulation_steps"),
    "evaluate_every": (int, "eval_steps"), "dtype": (str, "dtype"),
}  # fmt: skip
GROWING = ("arms", "seeds", "sizes", "conditions")
SAME_START = ("data_order", "head_start", "adapters_start", "dtype")


@dataclass(frozen=True)
class Study:
    """What is compared, and with which budget; the same for all arms.

    `settings` are hyperparameters of `labkit.training.preset`; the learning rate and the seed are not used.
    """

    model: str = option("gpt2-mini", "a registered name, a hub id or a local folder")
    arms: tuple[str, ...] = option(DEFAULT, "what is compared", named)
    learning_rates: tuple[float, ...] = option((2e-4, 5e-4, 1e-3), "the grid of stage 1; one rate: none", listed(float))
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "of the reported runs: head, rows, dropout", listed(int))
    sizes: tuple[int | None, ...] = option(
        (None,), "of the training set; default: all of it, which the rates are chosen with",
        listed(lambda part: None if part == "all" else int(part)),
    )  # fmt: skip
    settings: dict[str, Any] = field(default_factory=lambda: preset("mini", patience=0))
    method: str = option("full", "which weights are trained", choices=adapters.METHODS)
    rank: int = option(16, "of the LoRA adapters")
    attn: str | None = option(None, "eager, sdpa or flex_attention", str, name="--attn-implementation")
    max_length: int | None = option(None, "tokens per row; default: that of the task", int)
    adaptation_rate: float = option(5e-4, "learning rate of mntp, mlm and next")
    adaptation_batch: int = option(8, "rows per step of mntp, mlm and next")
    adaptation_length: int = option(128, "tokens per row of mntp, mlm and next")
    adaptation_texts: tuple[str, ...] = option(
        (), "text files for mntp, mlm and next, one paragraph a line, read once for all seeds and conditions; default: "
        "the training texts of each condition, once for each seed", listed(),
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "arms", tuple(one.name for one in arms(self.arms)))
        for name in ("learning_rates", "seeds", "sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise DataError(f"{name.replace('_', ' ')} are {values}; give at least one, and none twice")
        if None not in self.sizes:
            raise DataError("the sizes lack the whole training set, on which the rates are chosen; add all")
        if TUNING_SEED in self.seeds:
            raise DataError(f"{TUNING_SEED} is the seed of the tuning; choose other seeds")


@dataclass(frozen=True)
class Run:
    """One training run. In the tuning the seed is TUNING_SEED."""

    condition: Condition
    arm: Arm
    seed: int
    rate: float
    size: int | None = None

    @property
    def is_tuning(self) -> bool:
        return self.seed == TUNING_SEED

    @property
    def folder(self) -> Path:
        if self.is_tuning:
            return Path("tuning", slug(self.condition.name), slug(self.arm.name), f"rate-{self.rate!r}")
        return run_folder(self.condition.name, self.arm.name, self.size, self.seed)

    def __str__(self) -> str:
        size = f", {self.size} examples" if self.size else ""
        return f"{self.condition.name}, {self.arm.name}{size}, rate {self.rate:g}, seed {self.seed}"


def run_study(
    study: Study, data: Sequence[Condition], folder: str | Path, rates: dict[str, Any] | None = None, **options: Any
) -> dict[str, str]:
    """Run what is missing of the study in `folder`. Returns {run: reason} of the runs that failed.

    `rates`: the frozen.json of another study; the arms in it are not tuned again.
    """
    if not data:
        raise DataError("there is no data to compare the arms on")
    stored = str(load(study.model, attn=study.attn, device="cpu").model.dtype).removeprefix("torch.")
    lines = [line for file in study.adaptation_texts for line in read_text(file).split("\n")]
    texts = [line.strip() for line in lines if line.strip() and not line.startswith(" = ")]  # no headings of WikiText
    settings = asdict(study) | {"conditions": {condition.name: condition.facts for condition in data}}
    if texts:  # study.json names the files, and recognises their content
        settings["adaptation_texts"] = [Path(file).name for file in study.adaptation_texts] + [digest(texts)]
    path = runner.begun(folder, settings, GROWING)
    train = partial(_train, study, path, stored, texts)
    # adaptations begin first, since other runs wait for them
    in_order = sorted(arms(study.arms), key=lambda one: one.objective is None)
    if rates and not (path / "frozen.json").exists():
        runner.write_json(path / "frozen.json", rates)
    frozen = read_json(path / "frozen.json") or {}
    tuning = [
        Run(condition, one, TUNING_SEED, rate)
        for condition in data
        for one in in_order
        for rate in study.learning_rates
        if len(study.learning_rates) > 1 and one.name not in frozen.get(condition.name, {})
    ]
    failures = runner.run_all(tuning, train, path, score=_score, **options)
    rates = freeze(path, study, data)
    reported = [
        Run(condition, one, seed, rates[condition.name][one.name]["learning_rate"], size)
        for seed in study.seeds
        for condition in data
        for size in study.sizes
        for one in in_order
        if one.name in rates[condition.name] and (size is None or size < len(condition.train))
    ]
    return failures | runner.run_all(reported, train, path, score=_score, **options)


def freeze(path: Path, study: Study, data: Sequence[Condition]) -> dict[str, dict[str, dict[str, Any]]]:
    """Choose the rate of each arm that has none, on dev; what is frozen stays.

    {condition: {arm: {"learning_rate", "dev": {rate: score, None if training diverged}}}}. An arm is not frozen before
    all of its rates have been tried.
    """
    with runner.alone(Path("frozen"), path):
        frozen = read_json(path / "frozen.json") or {}
        for condition in data:
            chosen = frozen.setdefault(condition.name, {})
            for one in arms(study.arms):
                if one.name in chosen:
                    continue
                if len(study.learning_rates) == 1:
                    chosen[one.name] = {"learning_rate": study.learning_rates[0], "dev": {}}
                    continue
                runs = {rate: Run(condition, one, TUNING_SEED, rate) for rate in study.learning_rates}
                tried = {rate: read_json(path / run.folder / "metrics.json") for rate, run in runs.items()}
                scores = {rate: _dev_score(metrics) for rate, metrics in tried.items() if metrics is not None}
                usable = {rate: score for rate, score in scores.items() if score is not None}
                if usable and len(scores) == len(runs):
                    best = max(usable, key=usable.__getitem__)
                    dev = {repr(rate): score for rate, score in scores.items()}
                    chosen[one.name] = {"learning_rate": best, "dev": dev}
        runner.write_json(path / "frozen.json", frozen)
    return frozen


def tables(folder: str | Path, reference: str = REFERENCE) -> pd.DataFrame:
    """The finished runs of the study in `folder`, one row for each arm of each condition and size."""
    path, study = Path(folder).expanduser(), runner.read_study(folder)
    frozen, parts = read_json(path / "frozen.json") or {}, []
    for name, facts in study["conditions"].items():
        for size in study["sizes"]:
            runs, scores = {}, {}
            for one in study["arms"]:
                where = {seed: path / run_folder(name, one, size, seed) for seed in study["seeds"]}
                done = {seed: run for seed, run in where.items() if (run / "metrics.json").exists()}
                if done:
                    runs[one] = {seed: read_json(run / "metrics.json") for seed, run in done.items()}
                    lines = {seed: _lines(run / "judged.test.jsonl") for seed, run in done.items()}
                    scores[one] = report.judged(lines, facts["task"])
            _require_same_start(name, runs)
            if scores:
                about = {"condition": name, "model": study["model"], "n_train": size or facts["n_train"]}
                in_order = dict(sorted(scores.items(), key=lambda item: item[0] != reference))
                rows = report.table(in_order, reference, **about)
                rows["learning_rate"] = [frozen[name][one]["learning_rate"] for one in rows["arm"]]
                rows["baseline"] = [_baseline(next(iter(runs[one].values())), facts["task"]) for one in rows["arm"]]
                parts.append(rows)
    if not parts:
        raise TrainingError(f"{folder}: no reported run is finished yet")
    return pd.concat(parts, ignore_index=True)


def run_folder(condition: str, arm: str, size: int | None, seed: int) -> Path:
    """The folder of a reported run, in the folder of its study."""
    return Path("runs", slug(condition), slug(arm), f"size-{size or 'all'}", f"seed-{seed}")


def _train(study: Study, path: Path, stored: str, texts: Sequence[str], run: Run) -> dict[str, Any]:
    """One run, from its adaptation to its scores. A rate of the grid at which training diverges is done, with no score.

    `stored`: the dtype of the study's model, in which every head is drawn; an adapted model may have another.
    `texts`: of the adaptation, if they are not those of the condition.
    """
    folder, start, more = path / run.folder, run.arm.model or study.model, {}
    if run.arm.objective:
        adapted = _adapted(study, path, texts, run)
        start, more = str(adapted), {"model_name": adapted.relative_to(path).as_posix(), "head_dtype": stored}
    try:
        metrics = finetune(
            _task(study, run.condition),
            start,
            run.condition.smaller(run.size),
            folder,
            dev=run.condition.dev,
            test=() if run.is_tuning else run.condition.test,
            settings=study.settings | {"learning_rate": run.rate, "seed": run.seed},
            mask=run.arm.mask,
            layers=run.arm.layers,
            readings=run.arm.readings,
            method=study.method,
            rank=study.rank,
            attn=study.attn,
            packing=True,
            keep_model=False,
            resume=folder.exists(),
            log=lambda text: None,
            **more,
        )
    except TrainingError as error:
        if not (error.diverged and run.is_tuning):
            raise
        metrics = {"diverged": str(error)}
        runner.write_json(folder / "metrics.json", metrics)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return metrics


def _adapted(study: Study, path: Path, texts: Sequence[str], run: Run) -> Path:
    """The model trained on texts before the task; the runs that need it share it.

    Raises filelock.Timeout while another process is training it.
    """
    data = "texts" if texts else f"{run.condition.task}--{slug(run.condition.name.split('/')[0])}"
    seed = 0 if texts else run.seed
    folder = Path("adapted", data, slug(run.arm.name), f"seed-{seed}")
    every = max(1, run.arm.steps // 4)
    settings = preset(
        "lm", max_steps=run.arm.steps, per_device_train_batch_size=study.adaptation_batch, save_steps=every,
        learning_rate=study.adaptation_rate, weight_decay=0.01, warmup_steps=0.1, dtype=study.settings["dtype"],
        seed=seed,
    )  # fmt: skip
    with runner.alone(folder, path, timeout=0):
        train_lm(
            study.model,
            texts or run.condition.texts(),
            path / folder,
            objective=run.arm.objective,
            settings=settings,
            max_length=study.adaptation_length,
            lora=study.method == "lora",
            attn=study.attn,
            resume=(path / folder).exists(),
            log=lambda text: None,
        )
    return path / folder / "model"


def _task(study: Study, condition: Condition) -> Task:
    task = get(condition.task, max_length=study.max_length, **condition.options)
    if study.max_length is not None and hasattr(task, "doc_stride"):
        task = replace(task, doc_stride=min(task.doc_stride, study.max_length // 4))
    return task


def _score(run: Run, metrics: dict[str, Any]) -> str:
    side = "dev" if run.is_tuning else "test"
    name = metrics.get("metric", "")
    name = name if name in metrics.get(side, ()) else name.removeprefix("best_")
    return f"{side} {name} {metrics[side][name]:.3f}" if side in metrics else "diverged"


def _dev_score(metrics: dict[str, Any]) -> float | None:
    """None if training diverged or the score is NaN."""
    score = metrics["dev"][metrics["metric"]] if "dev" in metrics else None
    return None if score is None or score != score else score


def _require_same_start(condition: str, runs: dict[str, dict[int, dict[str, Any]]]) -> None:
    """All arms of a seed must have read the same rows in the same order, and started with the same head."""
    for key in SAME_START:
        starts: dict[int, dict[Any, str]] = {}
        for name, by_seed in runs.items():
            if arm(name).model is None:  # another tokenizer makes other rows, another width another head
                for seed, metrics in by_seed.items():
                    starts.setdefault(seed, {}).setdefault(metrics.get(key), name)
        for seed, names in starts.items():
            if len(names) > 1:
                raise TrainingError(f"{condition}, seed {seed}: {key} differs between {' and '.join(names.values())}")


def _baseline(metrics: dict[str, Any], task: str) -> float | None:
    """The best score that needs no model, in points."""
    scores = metrics.get("baselines", {}).get("test", {}).values()
    return max(scores, default=None) and max(scores) * (1 if task == "qa" else 100)


def _lines(path: Path) -> list[dict[str, Any]]:
    # not splitlines(): a name may contain a line separator of Unicode, which JSON leaves as it is
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _run(options: argparse.Namespace) -> dict[str, str]:
    chosen = {field: getattr(options, name) for name, (_, field) in BUDGET.items()}
    study = Study(**runner.given(options, Study))
    settings = preset(options.preset or default_preset(study.model), patience=0, **chosen)
    study = replace(study, settings=settings)
    data = conditions(
        options.data or ("ner:field-notes", "ner:which-way-round"), orders=options.orders,
        max_train=options.max_train, max_eval=options.max_eval,
    )  # fmt: skip
    rates = json.loads(options.rates.read_text(encoding="utf-8")) if options.rates else None
    return run_study(study, data, options.output_dir, rates, until=options.until)


def main() -> None:
    parser = runner.parser(__doc__, REFERENCE, Study)
    add = parser.add_argument
    add("--data", action="append", help="[NAME=]TASK:DATA, may be repeated; see benchmarks/study/conditions.py")
    add("--rates", type=Path, help="frozen.json of another study: its rates, in place of a tuning")
    add("--orders", type=listed(), default=ORDERS, help="position of the question (qa)")
    add("--preset", choices=tuple(PRESETS), help="default: depends on the model")
    for name, (kind, _) in BUDGET.items():
        add(f"--{name.replace('_', '-')}", type=kind)
    add("--max-train", type=int, help="at most so many training examples")
    add("--max-eval", type=int, help="at most so many dev and so many test examples")
    runner.main(parser, _run, lambda options: tables(options.output_dir, options.reference), unit="points")


if __name__ == "__main__":
    main()
