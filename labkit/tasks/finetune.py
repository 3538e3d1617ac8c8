"""Fine-tune a causal decoder, with its mask or without, on a task: one entry for all tasks, resumable.

    train = labkit.datasets.readers.read("qa", "field-notes:train")
    metrics = finetune("qa", "gemma3-270m", train, "runs/qa", dev=dev, test=test, mask="bidirectional")
    labkit.pipeline("runs/qa/model")(question="Who ...?", context="...")

What a twin (another `mask`, the same seed) sees is the same: the same rows in the same order, the same start of the
head. The mask that is really in force is measured before the first step, and a run that would train another than the
one asked for does not begin.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit.datasets import splits
from labkit.datasets.checks import require_characters
from labkit.datasets.evidence import MARKS
from labkit.decoder.packing import why_not
from labkit.decoder.running import evaluating
from labkit.errors import DataError, TrainingError
from labkit.models import precision
from labkit.models.adapters import TASK
from labkit.models.adapters import save as save_adapter
from labkit.run_folder import RunFolder, is_first_process, process_count
from labkit.tasks import adapters, task_card
from labkit.tasks.in_force import in_force, require_mask
from labkit.tasks.lm import pad_id
from labkit.tasks.needs import room_for
from labkit.tasks.order import trained_order
from labkit.tasks.plans import Plan
from labkit.tasks.recipes import Options, Recipe, by_name, require_positions
from labkit.tasks.special_tokens import add_tokens
from labkit.training import require, train
from labkit.training_settings import computing_in

NARROW = 0.9  # mean cosine of unrelated texts, from which on nearest neighbours say little
HELD_OUT = 0.1  # of the training examples, where no dev set is given


def finetune(
    task: str,
    model: str | Path,
    train_examples: Sequence[Any],
    output_dir: str | Path,
    *,
    dev: Sequence[Any] = (),
    test: Sequence[Any] = (),
    plan: Plan | None = None,
    options: Options | None = None,
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
    known_as: str | None = None,
    head_dtype: str | None = None,
    skipped: dict[str, int] | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> dict[str, Any]:
    """Train `model` (a registered name, a hub id or a folder) on a task; leaves a run folder and returns its metrics.

    Args:
        task: "qa", "ner", "classify" or "embed"; the examples are those of `labkit.datasets.readers.read(task, ...)`.
        dev: chooses the best checkpoint. Without it a tenth of the training examples is held out, by groups.
        test: scored once, at the end.
        plan: how long and how hard, see `labkit.tasks.plans`. options: of the task, see `labkit.tasks.recipes`.
        mask: "bidirectional" removes the causal mask (`window`, `layers` as for `labkit.to_bidirectional`), "causal"
            leaves the model as it is, "right-to-left" is a control (`labkit.tasks.in_force`).
        readings: how often every row is read; 2 is the control of `labkit.decoder.repetition`.
        method: "full", "lora" (of this `rank`) or "frozen".
        head: changes to the head, as the fields of `labkit.models.heads.Head`: {"dropout": 0.2, "init": "zeros"}.
        packing: several rows in the place of one, without padding, in training and evaluation: the
            same batches cost less. Where the model or its attention cannot, `say` is told, and rows of one length are
            batched together, as without it.
        keep_model: False leaves no `model/` behind, for runs of which only the scores are wanted; the controls can
            only be run so.
        known_as: what the run's config.json calls the model, in place of a path that may change.
        head_dtype: in which a new head is drawn; None: in that of the model. With "full" it is float32 in any case. For
            twins that begin with models stored in different ones.
        skipped: how many rows of each side could not be read and were left out; the metrics record it.

    The folder: `model/` with a card, with LoRA also `adapter/`, predictions.dev.jsonl and
    predictions.test.jsonl, judged.dev.jsonl and judged.test.jsonl (what is right, example by example), metrics.json,
    trainer_state.json, `checkpoints/`. The metrics: `dev` and `test` with the scores of the best checkpoint,
    `baselines`, `mask` as it was measured, `head_start` (the sha256 of the head before the first step),
    `adapters_start` (with LoRA, of all that is trained), `data_order` (that of the rows' numbers in the order they were
    trained in: twins have the same), and those of `labkit.training.train`.

    Raises:
        DataError, TrainingError, ModelError: each with one clear sentence, before anything is written where
            that is possible.
    """
    recipe, plan = by_name(task), plan or Plan()
    options = (options or Options()).filled(recipe)
    say = say if is_first_process() else (lambda text: None)
    require_mask(mask, layers, readings, kept=keep_model)
    if not train_examples:
        raise DataError("there are no training examples")
    require_characters(task, [*train_examples, *dev, *test])
    config = {
        "command": f"train {task}", "model": known_as or str(model), "mask": mask, "window": window, "layers": layers,
        "readings": readings, "packing": packing, "keep_model": keep_model, "method": method, "rank": rank,
        "head": head or {}, "attn": attn, "plan": asdict(plan),
        "options": asdict(options), "train": digest(train_examples), "dev": digest(dev), "test": digest(test),
    }  # fmt: skip
    finished = RunFolder.check(output_dir, config, resume=resume)
    if finished.metrics is not None:
        say(f"{finished.path} is finished: {finished.metrics['steps']:,} steps")
        return finished.metrics
    if not dev:
        train_examples, dev = splits.held_out(train_examples, HELD_OUT, plan.seed)
        say(f"no dev set: {len(dev):,} examples are held out, {len(train_examples):,} are trained on")
    require_apart(train_examples, dev, test)

    lm, labels = _model(recipe, model, train_examples, options, head or {}, method, plan, attn, head_dtype)
    start_of_head = lm.model.head_sha256() if hasattr(lm.model, "head_sha256") else None  # an encoder's own has none
    rows = recipe.features(lm.tokenizer, train_examples, labels, options, say)
    chosen = computing_in(lm.model.config.get_text_config().model_type, plan.dtype, say, finished.begun_in)
    metric = recipe.metric(dev, options)
    if test and task == "embed" and recipe.metric(test, options) != metric:
        raise DataError(
            "of dev and test one has pairs with scores and the other pairs without: they cannot be compared"
        )
    require_positions(recipe, lm, [*train_examples, *dev, *test], options, readings)
    recipe.features(
        lm.tokenizer, [*dev, *test], recipe.labels([*train_examples, *dev, *test]), options, lambda text: None
    )
    # fail before training, not after it, if dev or test cannot be scored
    sides = {"dev": dev, "test": test} if test else {"dev": dev}
    baselines = {name: recipe.baselines(train_examples, examples) for name, examples in sides.items()}
    if task == "classify" and "bag_of_words" not in baselines["dev"]:
        say("the training texts hold no word, so there is no bag of words to compare with")
    processes = process_count()
    lengths = [recipe.length_of(row) for row in rows]
    packs = packing and (reason := why_not(lm.model)) is None
    if packing and not packs:
        say(f"rows are not packed but grouped by length: {reason}")
    if plan.batch_tokens and not packs:
        raise TrainingError(f"batches of {plan.batch_tokens:,} tokens are for packed rows, and these are not packed")
    if plan.batch_tokens and task == "embed" and any(row.score is None for row in rows):
        raise TrainingError(
            f"a batch of {plan.batch_tokens:,} tokens may hold one pair alone, which has no other to be told apart "
            "from; give a batch size instead"
        )
    items, count = trained_order(
        lengths, batch=plan.batch_size * processes, seed=plan.seed, packed=packs, tokens=plan.batch_tokens
    )
    settings = plan.settings(count, metric, dtype=chosen.dtype, tf32=chosen.tf32, processes=processes)
    require(settings)
    seen = {"window": window, "layers": layers, "readings": readings, "packing": packs}
    with ExitStack() as until_the_end:
        until_the_end.enter_context(precision.kernels(chosen.tf32))
        with in_force(lm.model, mask, **seen) as measured:
            trained = adapters.trained_part(lm.model, method, rank=rank, dtype=chosen.dtype, seed=plan.seed)
            start_of_adapters = adapters.start_sha256(trained) if method == "lora" else None
            some, all_ = adapters.trainable(trained)
            say(
                f"{task}: {len(train_examples):,} examples in {len(rows):,} rows, {settings.max_steps:,} steps; "
                f"{mask} mask (measured); {some / 1e6:,.1f} of {all_ / 1e6:,.1f} M parameters are trained"
            )

            longest = sorted(range(len(rows)), key=lambda row: -lengths[row])[: min(2, plan.batch_size)]
            collate = recipe.collator(pad_id(lm.tokenizer))
            trial = collate([{"row": row, "ids": rows[row]} for row in longest])
            share = plan.batch_size / len(longest)
            if plan.batch_tokens:
                share = max(1.0, plan.batch_tokens / sum(lengths[row] for row in longest))
            say(room_for(trained, recipe.loss, trial, plan, share=share, dtype=chosen.dtype))

            run = until_the_end.enter_context(RunFolder.alone(output_dir, config, resume=resume))
            if run.metrics is not None:  # another command has finished it since
                return run.metrics

            def measure(model: Any, examples: Sequence[Any], options: Options) -> tuple[dict[str, Any], list[Any]]:
                return recipe.measure(model, lm.tokenizer, examples, labels, options, plan.eval_batch_size)

            outcome = train(
                trained,
                lambda k: [rows[each] for each in items(k)],
                collate=_of_items(collate),
                loss=recipe.loss,
                settings=settings,
                run=run,
                evaluate=lambda model: numbers(measure(model, dev, options)[0]),
                say=say,
            )
            run.write_json("trainer_state.json", {"log_history": outcome.pop("history")})
            taken = settings.max_steps * settings.rows_per_step * processes
            metrics = {
                "task": task, "metric": metric, "labels": list(labels), "mask": measured, "method": method,
                "packing": packs, "head_start": start_of_head, "adapters_start": start_of_adapters,
                "data_order": digest([each for k in range(taken) for each in items(k)]),
            }  # fmt: skip
            if is_first_process():
                with evaluating(trained) as best:
                    scored, options = _scored(recipe, lambda *each: measure(best, *each), options, dev, test, run)
                metrics |= scored | {"baselines": baselines}
                metrics["beats_baselines"] = beats_baselines(metrics, say)
                if (cone := metrics["dev"].get("anisotropy", 0.0)) > NARROW:
                    say(
                        f"unrelated texts have a mean cosine of {cone:.2f}: the vectors collapse; "
                        "try a lower learning rate"
                    )
                setattr(lm.model.config, TASK, {"task": task, "options": asdict(options)})
                if method == "lora" and keep_model:
                    marks = MARKS if options.prompt == "evidence" else ()
                    facts = {"base": str(model), "task": getattr(lm.model.config, TASK), "marks": marks}
                    run.write_folder("adapter", lambda folder: save_adapter(trained, folder, **facts))
        counts = {"n_train": len(train_examples), "n_dev": len(dev), "n_test": len(test), "n_rows": len(rows)}
        counts |= {} if skipped is None else {"n_skipped": skipped}
        metrics |= outcome | counts | {"dtype": chosen.dtype, "trained_parameters": some, "parameters": all_}
        if keep_model:
            lm.model = adapters.whole(trained, method)
            task_card.save(lm, run, metrics, config)
        run.write_json("metrics.json", metrics)
        return metrics


def beats_baselines(metrics: dict[str, Any], say: Callable[[str], None]) -> bool | None:
    """Whether the model is better than all that needs no model, on test if there is one; said where it is not.

    None where the task has no baseline.
    """
    side = "test" if "test" in metrics else "dev"
    name = metrics["metric"] if metrics["metric"] in metrics[side] else metrics["metric"].removeprefix("best_")
    if not (baselines := metrics["baselines"].get(side)):
        return None
    best = max(baselines, key=baselines.__getitem__)
    if metrics[side][name] > baselines[best]:
        return True
    say(
        f"on {side} the model has {name} {metrics[side][name]:.3f}, no more than {baselines[best]:.3f} of the baseline "
        f"{best.replace('_', ' ')!r}: it has learned nothing of use; more data, more steps or a larger model may help"
    )
    return False


def require_apart(train_examples: Sequence[Any], dev: Sequence[Any], test: Sequence[Any]) -> None:
    """Raise DataError if a group stands on two sides: then the scores would be of what was learned by heart.

    So if two sides are one: examples without names have no groups to tell it by.
    """
    sides = {"train": train_examples, "dev": dev, "test": test}
    for first, second in (("train", "dev"), ("train", "test"), ("dev", "test")):
        if sides[first] and list(sides[first]) == list(sides[second]):
            raise DataError(f"{first} and {second} are the same {len(sides[first]):,} examples")
    groups = {
        name: {splits.group_of(each) for each in examples if splits.has_name(each)} for name, examples in sides.items()
    }
    for first, second in (("train", "dev"), ("train", "test"), ("dev", "test")):
        if both := sorted(groups[first] & groups[second]):
            raise DataError(f"{len(both):,} groups are in {first} and in {second} too, {both[0]!r} for one")


def write_predictions(
    run: RunFolder, name: str, recipe: Recipe, examples: Sequence[Any], predictions: Sequence[Any]
) -> None:
    """`predictions.<name>.jsonl`, and `judged.<name>.jsonl` where the task can: one line per example."""
    run.write_text(f"predictions.{name}.jsonl", lines(recipe.record(each) for each in predictions))
    if recipe.judge is not None:
        run.write_text(f"judged.{name}.jsonl", lines(recipe.judge(examples, predictions)))


def lines(rows: Iterable[dict[str, Any]]) -> str:
    """As JSONL."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def numbers(scores: dict[str, Any]) -> dict[str, float]:
    """Those of the scores that are single numbers and no counts."""
    return {
        name: float(value)
        for name, value in scores.items()
        if isinstance(value, (int, float)) and not (name == "n" or name.endswith("_n") or name.startswith("n_"))
    }


def digest(examples: Sequence[Any]) -> str:
    """The sha256 of the examples, in their order."""
    together = hashlib.sha256()
    for each in examples:
        together.update(repr(each).encode() + b"\0")
    return together.hexdigest()


def _scored(
    recipe: Recipe,
    measure: Callable[..., Any],
    options: Options,
    dev: Sequence[Any],
    test: Sequence[Any],
    run: RunFolder,
) -> tuple[dict[str, Any], Options]:
    """The scores on dev and test with what was said written down, and the options with what dev has chosen."""
    found = {}
    found["dev"], said = measure(dev, options)
    options = recipe.tuned(options, found["dev"])
    write_predictions(run, "dev", recipe, dev, said)
    if test:
        found["test"], said = measure(test, options)
        write_predictions(run, "test", recipe, test, said)
    return found, options


def _of_items(collate: Callable[[list], dict[str, Any]]) -> Callable[[list], dict[str, Any]]:
    """The collator for items that are lists of rows (`labkit.tasks.order.trained_order`)."""
    return lambda items: collate([{"row": item["row"], "ids": row} for item in items for row in item["ids"]])


def _model(
    recipe: Recipe,
    model: str | Path,
    examples: Sequence[Any],
    options: Options,
    head: dict[str, Any],
    method: str,
    plan: Plan,
    attn: str | None,
    head_dtype: str | None,
) -> tuple[Any, Sequence[str]]:
    """The model with the task's head on it, and the labels in the order of its logits; seeded by the plan."""
    import torch

    import labkit
    from labkit.training import random_state_kept

    labels = recipe.labels(examples)
    dtype = "float32" if method == "full" else None
    with random_state_kept():
        torch.manual_seed(plan.seed)
        lm = labkit.load(model, task=recipe.head(labels, options, **head), attn=attn, dtype=dtype)
        if getattr(lm.model, "head_is_new", False):  # whatever was drawn on the way: twins begin alike
            torch.manual_seed(plan.seed)
            lm.model.start_head(getattr(torch, head_dtype) if head_dtype and method != "full" else None)
        if options.prompt == "evidence":
            add_tokens(lm.model, lm.tokenizer, MARKS)
    return lm, labels
