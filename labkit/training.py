"""The one training entry: transformers' Trainer, on one device or several, resumable after a kill at any moment.

A run is described by `Settings`, by a `RunFolder`, and by rows that are a function of their number: row k of a run is
the same whoever asks for it, so an interrupted run goes on with the rows that it had not seen. What is learned is given
as `loss(model, batch)`; how well, as `evaluate(model)`.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.running import evaluating
from labkit.errors import DivergedError, TrainingError, is_out_of_memory
from labkit.models import precision
from labkit.progress import bars_on_terminals_only, transformers_errors_only
from labkit.run_folder import RunFolder, first_process_first
from labkit.training_settings import DTYPES, MIXED, Settings, require, settled

__all__ = ["Rows", "Settings", "evaluating", "peak_memory", "random_state_kept", "require", "save_model", "train"]


class Rows(torch.utils.data.Dataset):
    """The rows of a run: `make(k)` gives row k, whatever came before it."""

    def __init__(self, count: int, make: Callable[[int], Any]):
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        return {"row": row, "ids": self.make(row)}


def train(
    model: nn.Module,
    make_row: Callable[[int], Any],
    *,
    collate: Callable[[list], dict[str, Tensor]],
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    settings: Settings,
    run: RunFolder,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> dict[str, Any]:
    """Train `model` in place and return what it cost: seconds, tokens_per_second, peak_memory_bytes, seed, history.

    Goes on from the newest whole checkpoint in `run` if there is one. Under `accelerate launch` or torchrun it runs on
    every device they start. `evaluate` is called now and then and at the end, on the first process; its numbers enter
    the history. With `settings.metric` the model is at the end as it was at its best evaluation, and the result has
    `best_step` too. `steps` are those taken, fewer than asked for if its patience ran out. The random state outside is
    left as it was.

    Raises:
        TrainingError: the loss is no number any more, a checkpoint was altered, the disk or the memory is full, or
            there are more or fewer processes, or other numbers, than before. The last whole checkpoint stays.
        ModelError: accelerate is not installed.
    """
    from tqdm import tqdm

    require(settings)
    if settings.metric is not None and evaluate is None:
        raise TrainingError(f"the best model by {settings.metric} is wanted, and there is no evaluation")
    with first_process_first() as first:
        resumed = run.latest_checkpoint()
    before = resumed[1] if resumed else {"step": 0, "seconds": 0.0, "tokens": 0}
    settings = settled(settings, model, say, begun=before.get("dtype"))
    if before.get("dtype", settings.dtype) != settings.dtype:
        raise TrainingError(f"this run was begun in {before['dtype']}, now it is {settings.dtype}")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if compiles_attention(model):  # or what the proof of its mask compiled takes the places of what training needs
        torch.compiler.reset()
    with random_state_kept(), bars_on_terminals_only(), _local_stores(run), precision.kernels(settings.tf32):
        arguments = _arguments(settings, run)
        if before.get("processes", arguments.world_size) != arguments.world_size:
            raise TrainingError(
                f"this run was begun on {before['processes']} processes, now it is {arguments.world_size}"
            )
        trainer = _trainer_class()(
            model,
            arguments,
            rows=Rows(settings.max_steps * settings.rows_per_step * arguments.world_size, make_row),
            collate=collate,
            loss=loss,
            evaluate=evaluate,
            settings=settings,
            run=run,
            before=before,
        )
        if resumed and first:
            say(f"resuming from step {before['step']:,} of {settings.max_steps:,}")
        hidden = None if first else True  # None: shown on a terminal only
        with tqdm(total=settings.max_steps, initial=before["step"], unit="step", disable=hidden) as bar:
            trainer.bar = bar
            trainer.add_callback(_watch(trainer, settings, say, bar))
            with transformers_errors_only(), _too_little_memory_explained(settings):
                if before.get("stopped") and settings.metric is not None:
                    trainer.finish_again(resumed[0])
                else:
                    trainer.train(resume_from_checkpoint=str(resumed[0]) if resumed else None)
        seconds = trainer.seconds
    return {
        "seconds": seconds,
        "tokens_per_second": trainer.tokens / seconds,
        "peak_memory_bytes": peak_memory(),
        "seed": settings.seed,
        "steps": trainer.state.global_step,
        **({"best_step": trainer.state.best_global_step} if settings.metric is not None else {}),
        # Trainer ends it with a summary of its own, which counts nothing before a resume
        "history": [entry for entry in trainer.state.log_history if "train_runtime" not in entry],
    }


def peak_memory() -> int:
    """The most memory this process has held, in bytes: of the GPU if torch uses one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    if sys.platform.startswith("linux"):  # getrusage's figure there begins with what the parent process held
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _arguments(settings: Settings, run: RunFolder) -> Any:
    from transformers import TrainingArguments

    decay = {"lr_scheduler_type": "linear"}
    if settings.schedule == "cosine":
        decay = {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": settings.final_share},
        }
    best = {}
    if settings.metric is not None:
        best = {
            "eval_strategy": "steps",
            "eval_steps": settings.evaluating_steps,
            "metric_for_best_model": settings.metric,
            "greater_is_better": True,
            "load_best_model_at_end": True,
            "restore_callback_states_from_checkpoint": True,  # of the patience
        }
    memory = {}
    if settings.gradient_checkpointing:
        named = {field.name for field in fields(TrainingArguments)}
        option = "activation_checkpointing" if "activation_checkpointing" in named else "gradient_checkpointing"
        memory |= {option: True, f"{option}_kwargs": {"use_reentrant": False}}
    arguments = TrainingArguments(
        output_dir=str(run.checkpoints),
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        warmup_steps=math.ceil(settings.warmup * settings.max_steps),
        weight_decay=settings.weight_decay,
        adam_beta2=settings.beta2,
        logging_steps=settings.logging_steps,
        logging_nan_inf_filter=False,  # it would show a mean of earlier losses in place of a NaN
        save_steps=settings.saving_steps,
        seed=settings.seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        disable_tqdm=True,  # ours shows the loss and the speed
        ddp_find_unused_parameters=False,  # a decoder uses all it has; torch warns on every run that looks for more
        report_to=settings.trackers or "none",
        **decay,
        **best,
        **memory,
        **DTYPES[settings.dtype],
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process, one GPU: several are for torchrun, not for DataParallel
    arguments.mixed_precision = MIXED[settings.dtype]  # or "float32" gives way to what `accelerate config` has chosen
    return arguments


def _trainer_class() -> type:
    """Our Trainer, defined on first use: transformers' takes seconds to import, and needs accelerate."""
    from transformers import EarlyStoppingCallback, Trainer, TrainerState
    from transformers.trainer_callback import PrinterCallback

    class RowTrainer(Trainer):
        """Rows in their order, our loss and evaluation, sealed checkpoints."""

        def __init__(self, model, arguments, *, rows, collate, loss, evaluate, settings, run, before):
            nothing = Rows(0, rows.make)  # Trainer wants a set to evaluate on; our evaluation has its own
            super().__init__(
                model=model, args=arguments, train_dataset=rows, eval_dataset=nothing, data_collator=collate
            )
            self.remove_callback(PrinterCallback)
            if settings.patience:
                self.add_callback(EarlyStoppingCallback(settings.patience))
            self.model_accepts_loss_kwargs = False  # our loss is a mean; Trainer divides by the accumulation steps
            self.accelerator.gradient_accumulation_steps = 1  # or transformers 5.3 divides by them twice
            self.row_loss, self.measure, self.settings, self.run = loss, evaluate, settings, run
            self.started, self.seconds_before = time.perf_counter(), before["seconds"]
            self.counted: int | torch.Tensor = before["tokens"]  # where the model is: to read it is to wait for the GPU

        @property
        def seconds(self) -> float:
            return self.seconds_before + time.perf_counter() - self.started

        @property
        def tokens(self) -> int:
            return int(self.counted)

        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.counted = self.counted + inputs["attention_mask"].sum() * self.args.world_size
            return self.row_loss(model, inputs)

        def evaluate(self, *_, **__):
            """What the first process measures, told to all: they stop together, and agree on the best."""
            numbers = {}
            with random_state_kept(), self.bar.external_write_mode():
                if self.is_world_process_zero():
                    with evaluating(self.accelerator.unwrap_model(self.model)) as model:
                        numbers = self.measure(model)
                if self.args.world_size > 1:
                    from accelerate.utils import broadcast_object_list

                    (numbers,) = broadcast_object_list([numbers])
            if (metric := self.settings.metric) is not None and metric not in numbers:
                raise TrainingError(
                    f"the best model by {metric} is wanted; measured are {', '.join(numbers) or 'none'}"
                )
            if numbers:
                self.log(dict(numbers))
            worst = -sys.float_info.max  # a score that is not defined (NaN) is no better than any other
            measured = {f"eval_{name}": worst if value != value else value for name, value in numbers.items()}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, measured)
            return measured

        def _save_checkpoint(self, model, trial):
            _require_numbers(
                "some weights are", self.model.parameters(), self.state.global_step, self.settings, self.run
            )
            with self.run.failures_explained(self.checkpoint(self.state.global_step)):
                super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # each process leaves its random state in the checkpoint
            if self.args.should_save:
                facts = {"seconds": self.seconds, "tokens": self.tokens, "processes": self.args.world_size}
                facts |= {"dtype": self.settings.dtype, "stopped": self.control.should_training_stop}
                with self.run.failures_explained(self.checkpoint(self.state.global_step)):
                    self.run.seal(self.state.global_step, **facts)
                best = self.checkpoint(self.state.best_global_step) if self.settings.metric is not None else None
                self.run.remove_checkpoints_but(self.settings.keep, best)

        def checkpoint(self, step: int) -> Path:
            return self.run.checkpoints / f"checkpoint-{step}"

        def finish_again(self, checkpoint: Path) -> None:
            """The end of a run that had stopped, and was killed before its best model was written."""
            self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            self.accelerator.prepare_model(self.model, evaluation_mode=True)  # it computes as it did when it trained
            self._load_best_model()

        def _load_best_model(self):
            best = self.checkpoint(self.state.best_global_step)
            self.run.require_whole(best)
            self.state.best_model_checkpoint = str(best)  # where the run's folder is now
            super()._load_best_model()

    return RowTrainer


def _watch(trainer: Any, settings: Settings, say: Callable[[str], None], bar: Any) -> Any:
    """The callback that shows progress, asks for evaluations, and stops a run whose loss is no number before a save."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            trainer.started = self.then = time.perf_counter()
            self.tokens_then = trainer.tokens
            if settings.metric is not None and state.best_global_step:  # the folder may have been moved since
                state.best_model_checkpoint = str(trainer.checkpoint(state.best_global_step))

        def on_step_end(self, args, state, control, **_):
            bar.update(state.global_step - bar.n)
            self.due = state.global_step % settings.evaluating_steps == 0 or state.global_step == state.max_steps
            control.should_log = self.due or state.global_step % settings.logging_steps == 0
            control.should_evaluate = self.due and trainer.measure is not None

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" not in (logs or {}):
                return
            self.loss = float(logs["loss"])
            _require_numbers("the loss is", [torch.tensor(self.loss)], state.global_step, settings, trainer.run)
            now = time.perf_counter()
            speed = (trainer.tokens - self.tokens_then) / max(now - self.then, 1e-9)
            self.tokens_then, self.then = trainer.tokens, now
            bar.set_postfix_str(f"loss {self.loss:.3f}, {speed:,.0f} tokens/s")
            if self.due and trainer.measure is None:
                self.tell(state, {})

        def on_evaluate(self, args, state, control, metrics=None, **_):
            self.tell(state, {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()})

        def tell(self, state, numbers):
            if state.is_world_process_zero:
                shown = ", ".join(f"{name} {value:.3f}" for name, value in ({"loss": self.loss} | numbers).items())
                with bar.external_write_mode():
                    say(f"step {state.global_step:,} of {state.max_steps:,}: {shown}")

    return Watch()


@contextmanager
def _local_stores(run: RunFolder) -> Iterator[None]:
    """Trackers write into the run's folder, unless the environment says where."""
    stores = {
        "TENSORBOARD_LOGGING_DIR": str(run.path / "tensorboard"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{(run.path / 'mlflow.db').as_posix()}",
        "MLFLOW_EXPERIMENT_NAME": "labkit",
        "TRACKIO_DIR": str(run.path / "trackio"),
    }
    ours = {name: value for name, value in stores.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _too_little_memory_explained(settings: Settings) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        on = "where there is more" if settings.gradient_checkpointing else "with gradient checkpointing"
        cures = ["fewer tokens to a batch, if rows are packed"]
        if settings.batch_size > 1:
            half, twice = settings.batch_size // 2, settings.gradient_accumulation * 2
            cures = [f"batch size {half} and gradient accumulation {twice} (as many rows to a step)"]
        cures += ["shorter rows", "LoRA"] + (["bfloat16"] if settings.dtype == "float32" else [])
        raise TrainingError(
            f"the memory is full; --resume goes on from the last checkpoint {on}; or begin anew in another folder, "
            f"with one or more of: {'; '.join(cures)}"
        ) from error


def compiles_attention(model: nn.Module) -> bool:
    """Whether its attention is FlexAttention, which is compiled for each kind of call, up to a limit."""
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "_attn_implementation", None) == "flex_attention"


def _require_numbers(what: str, numbers: Iterable[Tensor], step: int, settings: Settings, run: RunFolder) -> None:
    for each in numbers:
        if not bool(each.isfinite().all()):
            rate = f"lower the learning rate ({settings.learning_rate:g})"
            instead = "" if settings.dtype == "float32" else f", or use float32 instead of {settings.dtype}"
            raise DivergedError(
                f"{what} no number any more (NaN or infinite) at step {step}: {rate}{instead} ({run.last_whole()})"
            )


@contextmanager
def random_state_kept(seed: int | None = None) -> Iterator[None]:
    """Whatever draws random numbers in the block (torch on every device, numpy, Python), none are missing after it.

    With `seed` torch draws the same ones in every such block.
    """
    import random

    import numpy

    python, arrays = random.getstate(), numpy.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


def save_model(model: Any, tokenizer: Any, run: RunFolder) -> Path:
    """The trained model and its tokenizer in `run.model`, whole or not at all."""

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    with bars_on_terminals_only():
        return run.write_folder("model", fill)
