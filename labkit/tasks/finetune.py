"""Fine-tune a causal decoder on a task, with its mask or without; one function for all tasks, resumable.

    train = readers.read("qa", "train.json")
    metrics = finetune("qa", "gemma3-270m", train, "runs/qa", dev=dev, test=test, mask="bidirectional")
    labkit.pipeline("runs/qa")(question="Who ...?", context="...")

Two runs with the same seed that differ only in the mask read the same rows in the same order and start with the same
head. The mask in force is measured before the first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.datasets import splits
from labkit.datasets.evidence import MARKS
from labkit.decoder.limits import require_memory_for_training, require_positions
from labkit.decoder.packing import why_not
from labkit.decoder.running import evaluating, random_state_kept
from labkit.errors import DataError, TrainingError, require_one_of
from labkit.models import adapters, cards, load, precision
from labkit.models.adapters import TASK
from labkit.models.heads import sha256_of
from labkit.models.registry import REGISTRY
from labkit.models.special_tokens import add_tokens
from labkit.run_folder import Log, RunFolder, process_count, processes, to_stderr
from labkit.tasks.base import Task, get, json_lines, pad_id
from labkit.tasks.in_force import MASKS, RIGHT_TO_LEFT, in_force
from labkit.training import draw, preset, settled, steps, train

HELD_OUT = 0.1  # of the training examples, if there is no dev set
EVALUATE_EVERY = 500  # steps, or one epoch if that is shorter
SMALL = 20_000_000  # parameters


def finetune(
    task: str | Task,
    model: str | Path,
    train_examples: Sequence[Any],
    output_dir: str | Path,
    *,
    dev: Sequence[Any] = (),
    test: Sequence[Any] = (),
    settings: dict[str, Any] | None = None,
    mask: str = "bidirectional",
    window: str = "keep",
    layers: str = "all",
    readings: int = 1,
    method: str = "full",
    rank: int = 16,
    head: dict[str, Any] | None = None,
    attn: str | None = None,
    packing: bool = False,
    keep_model: bool = True,
    model_name: str | None = None,
    head_dtype: str | None = None,
    skipped: dict[str, int] | None = None,
    resume: bool = False,
    log: Log = to_stderr,
) -> dict[str, Any]:
    """Train `model` (a registered name, a hub id or a folder) on a task; leaves a run folder and returns its metrics.

    Args:
        task: "qa", "ner", "classify" or "embed", or a `Task` with options.
        dev: chooses the best checkpoint. Without it a tenth of the training examples is held out, by groups.
        test: scored once, at the end.
        settings: hyperparameters of `labkit.training.preset`; by default those of `default_preset(model)`.
        mask, window, layers, readings: what the model attends to, see `labkit.tasks.in_force`.
        method, rank: see `labkit.models.adapters`. head: changes to the fields of its `Head`: {"dropout": 0.2}.
        packing: several texts share a row and no padding is computed, unless the model or its attention cannot.
        keep_model: False saves no model; only scores and predictions remain.
        model_name: what config.json calls the model, in place of a path that may change.
        head_dtype: in which a new head is drawn; for pairs of runs that begin with models stored in different ones.
        skipped: how many rows of each side could not be read; the metrics record it.

    The folder also holds `model/` with a card, with LoRA `adapter/`, predictions.<side>.jsonl and judged.<side>.jsonl
    (what is right in each example). The metrics: `dev` and `test` with the scores of the best checkpoint, `baselines`,
    the measured `mask`, `head_start` and `adapters_start` (sha256 before the first step), and those of `train`. Input
    that cannot be trained on is refused before anything is written.
    """
    task = get(task) if isinstance(task, str) else task
    settings = settings or preset(default_preset(str(model)))
    require_one_of("the mask", mask, MASKS if keep_model else (*MASKS, RIGHT_TO_LEFT), TrainingError)
    if keep_model and readings > 1:
        raise TrainingError("a saved model does not repeat its input, a control for comparisons: give keep_model=False")
    require_one_of("the method", method, adapters.METHODS, TrainingError)
    if not resume and processes().is_main_process:
        RunFolder.check(output_dir, {}, resume=False)  # before the model is loaded, which may take long
    if not train_examples:
        raise DataError("there are no training examples")
    config = {
        "command": f"train {task.name}", "model": model_name or str(model), "mask": mask, "window": window,
        "layers": layers, "readings": readings, "packing": packing, "keep_model": keep_model, "method": method,
        "rank": rank, "head": head or {}, "attn": attn, "options": asdict(task), "train": digest(train_examples),
        "dev": digest(dev), "test": digest(test), "processes": process_count(),
    }  # fmt: skip
    if not dev:
        train_examples, dev = splits.held_out(train_examples, HELD_OUT, settings["seed"])
        log(f"no dev set: {len(dev):,} examples are held out, {len(train_examples):,} are trained on")
    splits.require_apart(train_examples, dev, test)
    sides = {"dev": dev, "test": test} if test else {"dev": dev}
    metric, labels = task.metric(dev), task.labels(train_examples)
    if test and task.name == "embed" and task.metric(test) != metric:
        raise DataError("of dev and test one has pairs with scores and the other pairs without: give both alike")
    with random_state_kept(settings["seed"]):
        dtype = "float32" if method == "full" else None  # small updates are lost in weights of 16 bits
        lm = load(model, task=task.head(labels, **head or {}), attn=attn, dtype=dtype)
        if lm.model.head_is_new:
            torch.manual_seed(settings["seed"])  # whatever was drawn while loading
            lm.model.start_head(getattr(torch, head_dtype) if head_dtype and method != "full" else None)
    if marks := MARKS if getattr(task, "prompt", None) == "evidence" else ():
        add_tokens(lm.model, lm.tokenizer, marks)
    config["settings"] = settings = settled(settings, lm.model.config.get_text_config().model_type, log)
    if (done := RunFolder.check(output_dir, config, resume=resume).metrics) is not None:
        return done

    rows = task.rows(lm.tokenizer, train_examples, labels, log)
    rows_of = {side: task.rows(lm.tokenizer, examples, labels) for side, examples in sides.items()}
    lengths = [len(row.ids) for row in rows]
    longest = max(len(ids) for some in (rows, *rows_of.values()) for row in some for ids in task.sequences(row))
    begin = int(rows[0].ids[0] == lm.tokenizer.bos_token_id)  # bos occurs once, however often the row is read
    cure = f"give a --max-length so that {readings} readings fit" if readings > 1 else None
    require_positions((longest - begin) * readings + begin, lm.model.config, refusal=DataError, cure=cure)
    reason = why_not(lm.model) if packing else None
    packs = packing and reason is None
    if reason:
        log(f"rows are not packed but grouped by length: {reason}")
    if settings["batch_tokens"] and not (packs and task.split_by_tokens):
        reason = "they are not packed" if not packs else "a batch of one pair has nothing to compare it with"
        raise TrainingError(f"batch_tokens {settings['batch_tokens']} cannot be used for these rows: {reason}")
    order = draw(lengths, settings, packed=packs)
    items = sum(lengths) // settings["batch_tokens"] if settings["batch_tokens"] else len(rows)
    per_epoch = steps(max(1, items), settings | {"num_train_epochs": 1.0, "max_steps": -1})
    settings = settings | {"eval_steps": settings["eval_steps"] or min(EVALUATE_EVERY, per_epoch)}
    metrics = {
        "task": task.name, "metric": metric, "labels": list(labels), "method": method, "packing": packs,
        "head_start": lm.model.head_sha256(), "data_order": digest(order), "n_train": len(train_examples),
        "n_dev": len(dev), "n_test": len(test), "n_rows": len(rows), "n_skipped": skipped, "dtype": settings["dtype"],
        "baselines": {side: task.baselines(train_examples, examples) for side, examples in sides.items()},
    }  # fmt: skip
    asked = {"window": window, "layers": layers, "readings": readings, "packing": packs}
    with precision.kernels(settings["tf32"]), in_force(lm.model, mask, **asked) as metrics["mask"]:
        trained = adapters.trained_part(lm.model, method, rank=rank, dtype=settings["dtype"], seed=settings["seed"])
        weights = (weight for weight in trained.parameters() if weight.requires_grad)
        metrics["adapters_start"] = sha256_of(weights) if method == "lora" else None
        metrics["trained_parameters"], metrics["parameters"] = adapters.trainable(trained)
        log(
            f"{task.name}: {len(train_examples):,} examples in {len(rows):,} rows; {mask} mask (measured); "
            f"{metrics['trained_parameters'] / 1e6:,.1f} of {metrics['parameters'] / 1e6:,.1f} M parameters are trained"
        )
        log(require_memory_for_training(trained, settings, max(lengths) * readings, process_count()))
        setattr(lm.model.config, TASK, {"task": task.name, "options": asdict(task)})

        def measure(model: Any, side: str, task: Task) -> tuple[dict[str, Any], list[Any]]:
            options = {"rows": rows_of[side], "batch_size": settings["per_device_eval_batch_size"]}
            predictions = task.predict(model, lm.tokenizer, sides[side], labels, **options)
            return task.score(sides[side], predictions), predictions

        with RunFolder.alone(output_dir, config, resume=resume) as run:
            outcome = train(
                trained,
                [[rows[row] for row in item] for item in order],
                collate=lambda items: task.collate([row for item in items for row in item], pad_id(lm.tokenizer)),
                loss=task.loss,
                settings=settings,
                run=run,
                tokens=lambda k: readings * sum(lengths[row] for row in order[k]),
                evaluate=lambda model: numbers(measure(model, "dev", task)[0]),
                metric=metric,
                tokenizer=lm.tokenizer,
                log=log,
            )
            tuned = task
            with evaluating(trained) as best:
                for side, examples in sides.items():
                    metrics[side], predictions = measure(best, side, tuned)
                    if side == "dev":
                        tuned = task.tuned(metrics["dev"])
                    run.write(f"predictions.{side}.jsonl", json_lines(map(tuned.record, predictions)))
                    if (judged := tuned.judge(examples, predictions)) is not None:
                        run.write(f"judged.{side}.jsonl", json_lines(judged))
            metrics |= outcome
            if keep_model:
                record = {"task": task.name, "options": asdict(tuned)}
                setattr(lm.model.config, TASK, record)
                if method == "lora":
                    facts = {"base": config["model"], "task": record, "marks": marks}
                    run.write("adapter", lambda folder: adapters.save(trained, folder, **facts))
                    lm.model = trained.merge_and_unload().requires_grad_(True)
                files = cards.of_fine_tuned(lm, metrics, config)
                run.write("model", lambda folder: cards.save(folder, lm.model, lm.tokenizer, files))
            run.write_json("metrics.json", metrics)
            return metrics


def crossvalidate(
    task: str | Task,
    model: str | Path,
    examples: Sequence[Any],
    output_dir: str | Path,
    *,
    k: int = 5,
    settings: dict[str, Any] | None = None,
    skipped: dict[str, int] | None = None,
    resume: bool = False,
    log: Log = to_stderr,
    **choices: Any,
) -> dict[str, Any]:
    """Fine-tune `k` times, each time tested on another part; no group (passage) is in two parts.

    The checkpoint of a fold is chosen on a tenth held out of its training part. Leaves fold-1/ to fold-k/, each a run
    folder, and metrics.json: for every score its value per fold, the mean, and half the width of the 95 % interval
    (Student's t over folds; their training parts overlap, so it is a little too narrow: Bengio and Grandvalet 2004).
    """
    from scipy import stats

    task = get(task) if isinstance(task, str) else task
    settings = settings or preset(default_preset(str(model)))
    parts = splits.folds(examples, k, settings["seed"])
    config = {
        "command": f"train {task.name} --folds", "folds": k, "settings": settings, "examples": digest(examples),
        "model": str(model), "options": asdict(task), "choices": {key: str(value) for key, value in choices.items()},
    }  # fmt: skip
    if (done := RunFolder.check(output_dir, config, resume=resume).metrics) is not None:
        return done
    with RunFolder.alone(output_dir, config, resume=resume) as run:
        scores = []
        for number, part in enumerate(parts, 1):
            log(f"fold {number} of {k}: {len(part):,} examples are tested, {len(examples) - len(part):,} trained on")
            rest = [example for other in parts if other is not part for example in other]
            folder = run.path / f"fold-{number}"
            options = choices | {"settings": settings, "resume": folder.exists(), "log": log}
            scores.append(numbers(finetune(task, model, rest, folder, test=part, **options)["test"]))
        summary = {}
        for name in [name for name in scores[0] if all(name in fold for fold in scores)]:
            values = [fold[name] for fold in scores]
            half = float(stats.t.ppf(0.975, k - 1) * stats.sem(values))
            summary[name] = {"mean": float(np.mean(values)), "half_width_95": half, "folds": values}
        metrics = {
            "task": task.name, "folds": k, "n": len(examples), "n_per_fold": [len(part) for part in parts],
            "n_skipped": skipped, "seed": settings["seed"], "scores": summary,
        }  # fmt: skip
        run.write_json("metrics.json", metrics)
        return metrics


def default_preset(model: str) -> str:
    """ "mini" for the models of a few million parameters that labkit ships, "gemma" for all others."""
    return "mini" if model in REGISTRY and (REGISTRY[model].parameters or SMALL) < SMALL else "gemma"


def numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The scores that are single numbers and not counts."""
    return {
        name: float(value)
        for name, value in scores.items()
        if isinstance(value, (int, float)) and not (name == "n" or name.endswith("_n") or name.startswith("n_"))
    }


def digest(examples: Sequence[Any]) -> str:
    """The sha256 of the examples, in their order."""
    together = hashlib.sha256()
    for example in examples:
        together.update(repr(example).encode() + b"\0")
    return together.hexdigest()
