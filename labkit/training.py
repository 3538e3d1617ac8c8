"""Train with transformers.Trainer: our loss, our evaluation, rows in an order drawn once; resumable after a kill.

Hyperparameters are those of `transformers.TrainingArguments`, under their names, plus `OURS`. A preset is a dictionary
of them. With more than one GPU, start the same command with `torchrun` or `accelerate launch`.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from labkit.decoder.running import evaluating, random_state_kept
from labkit.errors import TrainingError, require_one_of
from labkit.files import quiet_libraries
from labkit.models import precision
from labkit.objectives import generator
from labkit.run_folder import Log, RunFolder, failures_explained, process_count, to_stderr

DTYPES = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
SORTED_BATCHES = 50  # rows of so many batches are sorted by length together: less padding, still shuffled
SCHEDULES = {  # of the learning rate, with the arguments that transformers requires
    "linear": {}, "cosine": {}, "cosine_with_restarts": {}, "cosine_with_min_lr": {"min_lr_rate": 0.1}, "constant": {},
    "constant_with_warmup": {}, "inverse_sqrt": {},
}  # fmt: skip
OURS = {
    "dtype": "auto",  # of the computation: auto, float32, bfloat16 or float16; trained weights stay float32
    "patience": 0,  # end after so many evaluations without a better metric; 0: never
    "batch_tokens": None,  # with packing: rows of at most so many tokens together make a batch
}
DEFAULTS = OURS | {
    "num_train_epochs": 5.0, "max_steps": -1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 4, "learning_rate": 2e-5, "lr_scheduler_type": "linear",
    "warmup_steps": 0.1, "weight_decay": 0.01, "adam_beta2": 0.999, "eval_steps": None, "save_steps": None,
    "save_total_limit": 3, "gradient_checkpointing": False, "seed": 0, "report_to": "none",
}  # fmt: skip
PRESETS = {
    "gemma": DEFAULTS | {"patience": 20},
    "mini": DEFAULTS  # gpt2-mini and other models of a few million parameters
    | {"num_train_epochs": 10.0, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 32}
    | {"gradient_accumulation_steps": 1, "learning_rate": 5e-4, "patience": 20},
    "quick": DEFAULTS  # minutes on a CPU, with LoRA's rate
    | {"num_train_epochs": 3.0, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    | {"learning_rate": 3e-4, "patience": 20},
    "lm": DEFAULTS  # language modelling: `labkit train lm`, `labkit pretrain`
    | {"num_train_epochs": None, "max_steps": 2000, "per_device_train_batch_size": 8, "learning_rate": 5e-4}
    | {"gradient_accumulation_steps": 1, "warmup_steps": 0.05, "weight_decay": 0.1, "adam_beta2": 0.95}
    | {"lr_scheduler_type": "cosine_with_min_lr"},
}
KNOWN = {field.name for field in fields(TrainingArguments)} | OURS.keys()
POSITIVE = ("num_train_epochs", "learning_rate")  # other numbers may be 0


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """The hyperparameters of a preset with changes; a change that is None is not one."""
    require_one_of("the preset", name, PRESETS, TrainingError)
    settings = PRESETS[name] | {key: value for key, value in changes.items() if value is not None}
    if unknown := sorted(settings.keys() - KNOWN):
        raise TrainingError(f"{unknown[0]} is not a hyperparameter: give a field of transformers.TrainingArguments")
    for key, value in settings.items():
        allowed = not isinstance(value, int | float) or key == "max_steps" or 0 <= value < 2**32
        if not allowed or (key in POSITIVE and value == 0):
            least = "above" if key in POSITIVE else "at least"
            raise TrainingError(f"{key} is {value}; it must be {least} 0, below {2**32}")
    if settings["num_train_epochs"] is None and settings["max_steps"] < 1:
        raise TrainingError(f"max_steps is {settings['max_steps']} without num_train_epochs; give one of them")
    require_one_of("the schedule", settings["lr_scheduler_type"], SCHEDULES, TrainingError)
    require_one_of("dtype", settings["dtype"], ("auto", *DTYPES), TrainingError)
    return settings


def settled(settings: dict[str, Any], model_type: str, log: Log) -> dict[str, Any]:
    """The hyperparameters with what "auto" means for this model on this machine, and the trackers as a list.

    `log` receives the reason for the dtype.
    """
    trackers = [name for name in map(str.strip, settings["report_to"].split(",")) if name not in ("", "none")]
    installed = get_available_reporting_integrations()
    if missing := [name for name in trackers if name not in installed]:
        raise TrainingError(f"the tracker {missing[0]!r} is not installed; those are: {', '.join(installed) or 'none'}")
    chosen = precision.choose(model_type, precision.here(), settings["dtype"])
    if precision.here() is not None and chosen.why != precision.AS_ASKED:
        log(f"computing in {chosen.dtype}: {chosen.why}")
    return settings | {"dtype": chosen.dtype, "tf32": chosen.tf32, "report_to": trackers}


def per_step(settings: dict[str, Any]) -> int:
    """The items that all processes together read in an optimiser step."""
    batch = 1 if settings["batch_tokens"] else settings["per_device_train_batch_size"]
    return batch * settings["gradient_accumulation_steps"] * process_count()


def steps(items: int, settings: dict[str, Any]) -> int:
    """The optimiser steps of a run on so many items per epoch; `max_steps` ends it earlier."""
    limits = [settings["max_steps"]] if settings["max_steps"] > 0 else []
    if settings["num_train_epochs"] is not None:
        limits.append(max(1, math.ceil(settings["num_train_epochs"] * items / per_step(settings))))
    return min(limits)


def draw(lengths: Sequence[int], settings: dict[str, Any], *, packed: bool = False) -> list[list[int]]:
    """The rows of all steps and processes in their order, drawn from the seed: a list of row numbers per item.

    Rows of similar `lengths`, in tokens, share a batch, unless they are packed, which computes no padding. With
    `batch_tokens` an item is a whole batch: as many rows as fit.
    """
    tokens, batch = settings["batch_tokens"], settings["per_device_train_batch_size"] * process_count()
    items: list[list[int]] = []
    for number in count():
        rows = torch.randperm(len(lengths), generator=generator(settings["seed"], number)).tolist()
        if not (packed or tokens):
            begun = -len(items) % batch  # rows that complete the last batch of the pass before
            end = begun + max(0, len(rows) - begun) // batch * batch
            shuffle = generator(settings["seed"], -1 - len(items))
            rows[begun:end] = _by_length(rows[begun:end], lengths, batch, shuffle)
        one_pass = _filled(rows, lengths, tokens) if tokens else [[row] for row in rows]
        if number == 0:
            total = steps(len(one_pass), settings) * per_step(settings)
        items += one_pass
        if len(items) >= total:
            return items[:total]


def _by_length(rows: list[int], lengths: Sequence[int], batch: int, shuffle: torch.Generator) -> list[int]:
    """The rows in batches of similar length; the batches are shuffled."""
    window = batch * SORTED_BATCHES
    windows = [sorted(rows[at : at + window], key=lambda row: lengths[row]) for at in range(0, len(rows), window)]
    near = [row for window_rows in windows for row in window_rows]
    starts = (torch.randperm(len(rows) // batch, generator=shuffle) * batch).tolist()
    return [row for start in starts for row in near[start : start + batch]]


def _filled(order: list[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The rows in batches of at most `tokens` tokens; a longer row has a batch of its own."""
    batches: list[list[int]] = []
    room = 0
    for row in order:
        if not batches or lengths[row] > room:
            batches.append([])
            room = tokens
        batches[-1].append(row)
        room -= lengths[row]
    return batches


def train(
    model: nn.Module,
    items: Sequence[Any],
    *,
    collate: Callable[[list], dict[str, Tensor]],
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    settings: dict[str, Any],
    run: RunFolder,
    tokens: Callable[[int], int],
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    metric: str | None = None,
    tokenizer: Any = None,
    log: Log = to_stderr,
) -> dict[str, Any]:
    """Train `model` in place, from the newest checkpoint in `run` if there is one, and keep the global random state.

    Args:
        items: of the whole run, in order, for `collate`; their number gives the number of steps. Anything with
            `len()` that gives item k, whatever came before it.
        loss: the mean over those of the batch's `labels` that are not -100; a step has the mean over all its labels.
        settings: of `preset`, after `settled`. By default the run is evaluated and saved ten times.
        tokens: the number of real tokens of item k.
        metric: the number of `evaluate` that chooses the best checkpoint, which is loaded at the end; higher is better.

    Writes trainer_state.json, the log. Returns seconds, tokens_per_second, peak_memory_bytes, seed, steps and, with a
    metric, best_step. Raises TrainingError if the loss becomes NaN or infinite, or the disk or memory is full.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "flex_attention":
        torch.compiler.reset()  # what the proof of the mask compiled counts towards torch's limit
    callbacks: list[TrainerCallback] = [_Watch(log)]
    patience = settings["patience"] if metric else 0
    if patience:
        callbacks.append(EarlyStoppingCallback(patience))
    with (
        random_state_kept(), quiet_libraries(), precision.kernels(settings["tf32"]),
        failures_explained(run.path),
    ):  # fmt: skip
        arguments = _arguments(settings, len(items), run, metric, evaluate is not None)
        trainer = _Trainer(
            model, arguments, train_dataset=items, eval_dataset=[], data_collator=collate, processing_class=tokenizer,
            callbacks=callbacks, loss=loss, scores=evaluate,
        )  # fmt: skip
        checkpoint = get_last_checkpoint(run.checkpoints) if run.checkpoints.is_dir() else None
        if checkpoint:
            state = TrainerState.load_from_json(Path(checkpoint, "trainer_state.json"))
            log(f"resuming from step {state.global_step:,} of {arguments.max_steps:,}")
        if checkpoint and patience and state.global_step - state.best_global_step >= patience * arguments.eval_steps:
            trainer.state = state  # it had stopped early
            state.best_model_checkpoint = str(run.checkpoints / f"checkpoint-{state.best_global_step}")
            trainer.accelerator.prepare_model(model, evaluation_mode=True)  # it computes as it did in training
            trainer._load_best_model()
        else:
            trainer.train(resume_from_checkpoint=checkpoint)
    state = trainer.state
    history = [entry for entry in state.log_history if "train_runtime" not in entry]  # Trainer's own summary
    seconds = max(entry.get("seconds", 0.0) for entry in history)
    trained = sum(map(tokens, range(state.global_step * len(items) // arguments.max_steps)))
    run.write_json("trainer_state.json", {"log_history": history})
    return {
        "seconds": seconds, "tokens_per_second": trained / seconds, "peak_memory_bytes": peak_memory(),
        "seed": settings["seed"], "steps": state.global_step,
        **({"best_step": state.best_global_step} if metric else {}),
    }  # fmt: skip


def _arguments(
    settings: dict[str, Any], items: int, run: RunFolder, metric: str | None, evaluates: bool
) -> TrainingArguments:
    """The TrainingArguments of a run over so many items."""
    given = {name: settings[name] for name in settings.keys() - OURS - {"tf32"} if settings[name] is not None}
    mixed = DTYPES[settings["dtype"]]
    max_steps = items // per_step(settings)
    eval_steps = min(settings["eval_steps"] or max(1, max_steps // 10), max_steps)
    given |= {"per_device_train_batch_size": 1} if settings["batch_tokens"] else {}
    given |= {
        "output_dir": str(run.checkpoints), "max_steps": max_steps,
        "lr_scheduler_kwargs": SCHEDULES[settings["lr_scheduler_type"]],
        "train_sampling_strategy": "sequential", "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": eval_steps, "save_steps": eval_steps if metric else settings["save_steps"] or eval_steps,
        "logging_steps": max(1, max_steps // 100), "logging_nan_inf_filter": False, "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(), "dataloader_pin_memory": torch.cuda.is_available(),
        "remove_unused_columns": False, "average_tokens_across_devices": True, "ddp_find_unused_parameters": False,
        "bf16": mixed == "bf16", "fp16": mixed == "fp16",
    }  # fmt: skip
    if metric:
        given |= {"metric_for_best_model": metric, "greater_is_better": True, "load_best_model_at_end": True}
        given |= {"restore_callback_states_from_checkpoint": True}
    if given.pop("gradient_checkpointing"):
        option = "activation_checkpointing" if "activation_checkpointing" in KNOWN else "gradient_checkpointing"
        given |= {option: True, f"{option}_kwargs": {"use_reentrant": False}}
    arguments = TrainingArguments(**given)
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one GPU per process: several are for torchrun, not for DataParallel
    arguments.mixed_precision = mixed  # an `accelerate config` file must not change it
    return arguments


class _Trainer(Trainer):
    """Trainer with a loss that is a mean over labels, and an evaluation that decodes."""

    def __init__(self, *args: Any, loss: Callable, scores: Callable | None, **options: Any):
        super().__init__(*args, **options)
        self.loss, self.scores = loss, scores
        self.remove_callback(PrinterCallback)
        self.accelerator.gradient_accumulation_steps = 1  # or transformers 5.3 divides by them once more
        self.model_accepts_loss_kwargs = True  # count the labels of a step; `compute_loss` divides by their number
        self._loss_shifts_labels = False  # labels[i] belongs to the logits at i

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        value = self.loss(model, inputs)
        if num_items_in_batch is not None:  # of all accumulated batches of all processes, whose gradients average
            counted = inputs["labels"].ne(-100).sum()
            value = value * counted / num_items_in_batch * self.args.world_size
        return value

    def evaluate(self, *_, **__):
        """Every process computes the scores, so that sharded models work; those of the first one count."""
        with random_state_kept(), evaluating(self.model_wrapped if self.is_fsdp_enabled else self.model) as model:
            scores = self.scores(model)
        if self.args.world_size > 1:
            from accelerate.utils import broadcast_object_list

            (scores,) = broadcast_object_list([scores])
        self.log(dict(scores))
        worst = -sys.float_info.max  # a score that is not defined (NaN) is worse than any other
        measured = {f"eval_{name}": worst if math.isnan(value) else value for name, value in scores.items()}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, measured)
        return measured


class _Watch(TrainerCallback):
    """Progress bar, one line per evaluation, elapsed seconds in the log, and an end if the loss is NaN."""

    def __init__(self, log: Log):
        self.log = log

    def on_train_begin(self, args, state, control, **_):
        self.before = max((entry.get("seconds", 0.0) for entry in state.log_history), default=0.0)
        self.started = time.perf_counter()
        hidden = None if state.is_world_process_zero else True  # None: shown on a terminal only
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=hidden)
        if state.best_global_step:  # the folder may have been moved since
            state.best_model_checkpoint = str(Path(args.output_dir, f"checkpoint-{state.best_global_step}"))

    def on_step_end(self, args, state, control, **_):
        self.bar.update(state.global_step - self.bar.n)
        if control.should_save or control.should_evaluate:
            control.should_log = True  # a resumed run could not complete the mean loss since the last log

    def on_log(self, args, state, control, logs, **_):
        state.log_history[-1]["seconds"] = self.before + time.perf_counter() - self.started
        if "loss" not in logs:
            return
        self.loss = float(logs["loss"])
        for name in ["loss"] if args.fp16 else ["loss", "grad_norm"]:  # float16 skips steps that overflow
            if not math.isfinite(logs.get(name, 0.0)):
                instead = ", or use float32" if args.bf16 or args.fp16 else ""
                error = TrainingError(
                    f"{name} is NaN or infinite at step {state.global_step}: lower the learning rate "
                    f"({args.learning_rate:g}){instead} and train in another folder"
                )
                error.diverged = True
                raise error
        self.bar.set_postfix_str(f"loss {self.loss:.3f}")

    def on_evaluate(self, args, state, control, metrics, **_):
        scores = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        shown = ", ".join(f"{name} {value:.3f}" for name, value in ({"loss": self.loss} | scores).items())
        with self.bar.external_write_mode():
            self.log(f"step {state.global_step:,} of {state.max_steps:,}: {shown}")

    def on_train_end(self, args, state, control, **_):
        self.bar.close()


def peak_memory() -> int:
    """The most memory this process has held, in bytes: of the GPU if torch uses one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text()  # getrusage's figure begins with what the parent process held
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024
