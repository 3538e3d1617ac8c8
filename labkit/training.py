"""The one training entry: transformers' Trainer, on one device or several, resumable after a kill at any moment.

A run is described by `Settings`, by a `RunFolder`, and by rows that are a function of their number: row k of a run is
the same whoever asks for it, so an interrupted run goes on with the rows that it had not seen. What is learned is given
as `loss(model, batch)`; how well, as `evaluate(model)`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import MissingPackageError, TrainingError
from labkit.progress import bars_on_terminals_only
from labkit.run_folder import RunFolder

DTYPES = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True}}


@dataclass(frozen=True)
class Settings:
    """How a run is optimised: AdamW, linear warm-up, cosine decay to `final_share` of the peak.

    Attributes:
        max_steps: optimiser steps.
        batch_size: rows per device and forward pass; `gradient_accumulation` passes make one step.
        learning_rate: the peak, reached after the share `warmup` of all steps.
        dtype: "float32", or autocast in "bfloat16" or "float16" (weights stay as they are).
        dropout: None leaves the model's own.
        evaluate_every, save_every: in steps; 0 = a tenth of the run. `log_every` likewise, 0 = a hundredth.
        report_to: a tracker that transformers knows ("tensorboard", "wandb", ...), or "none".
    """

    max_steps: int
    batch_size: int = 8
    gradient_accumulation: int = 1
    learning_rate: float = 5e-4
    warmup: float = 0.05
    final_share: float = 0.1
    weight_decay: float = 0.1
    dtype: str = "float32"
    seed: int = 0
    evaluate_every: int = 0
    save_every: int = 0
    log_every: int = 0
    report_to: str = "none"

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "gradient_accumulation"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}")
        if not self.learning_rate > 0 or not 0 <= self.warmup < 1:
            raise TrainingError(f"learning rate {self.learning_rate} must be positive, warm-up {self.warmup} in [0, 1)")
        if self.dtype not in DTYPES:
            raise TrainingError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")

    @property
    def logging_steps(self) -> int:
        return self.log_every or max(1, self.max_steps // 100)

    @property
    def saving_steps(self) -> int:
        """A multiple of the logging steps: a loss is averaged between logs, and a resume must not cut one in two."""
        wanted = self.save_every or max(1, self.max_steps // 10)
        return max(1, round(wanted / self.logging_steps)) * self.logging_steps

    @property
    def evaluating_steps(self) -> int:
        return self.evaluate_every or max(1, self.max_steps // 10)


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
    the history. The random state outside is left as it was.

    Raises:
        TrainingError: the loss is no number any more, or a checkpoint was altered.
        MissingPackageError: accelerate is not installed.
    """
    trainer_class = _trainer_class()
    resumed = run.latest_checkpoint()
    with _random_state_kept(), bars_on_terminals_only():
        trainer = trainer_class(
            model,
            _arguments(settings, run),
            rows=Rows(
                settings.max_steps * settings.batch_size * settings.gradient_accumulation * _world_size(), make_row
            ),
            collate=collate,
            loss=loss,
            run=run,
            seconds_before=resumed[1]["seconds"] if resumed else 0.0,
            tokens_before=resumed[1]["tokens"] if resumed else 0,
        )
        trainer.add_callback(_Watch(trainer, settings, evaluate, say))
        if resumed:
            say(f"resuming from step {resumed[1]['step']} of {settings.max_steps}")
        trainer.train(resume_from_checkpoint=str(resumed[0]) if resumed else None)
    return {
        "seconds": trainer.seconds,
        "tokens_per_second": trainer.tokens / trainer.seconds,
        "peak_memory_bytes": peak_memory(),
        "seed": settings.seed,
        "history": trainer.state.log_history,
    }


def peak_memory() -> int:
    """The most memory this process has held, in bytes: of the GPU if torch uses one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _arguments(settings: Settings, run: RunFolder) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(run.checkpoints),
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.final_share},
        warmup_steps=math.ceil(settings.warmup * settings.max_steps),
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        logging_steps=settings.logging_steps,
        save_steps=settings.saving_steps,
        save_total_limit=2,  # the older one stays until the newer is whole
        seed=settings.seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        disable_tqdm=True,  # ours shows the loss and the speed
        report_to=settings.report_to,
        **DTYPES[settings.dtype],
    )


def _trainer_class() -> type:
    """Our Trainer, defined on first use: transformers' takes seconds to import, and needs accelerate."""
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise MissingPackageError('training needs accelerate: pip install "labkit-bidirectional[train]"') from None
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback

    class RowTrainer(Trainer):
        """Rows in their order, our loss, sealed checkpoints."""

        def __init__(self, model, arguments, *, rows, collate, loss, run, seconds_before, tokens_before):
            super().__init__(model=model, args=arguments, train_dataset=rows, data_collator=collate)
            self.remove_callback(PrinterCallback)
            self.model_accepts_loss_kwargs = False  # our loss is a mean; Trainer divides by the accumulation steps
            self.row_loss, self.run = loss, run
            self.started, self.seconds_before, self.tokens = time.perf_counter(), seconds_before, tokens_before

        @property
        def seconds(self) -> float:
            return self.seconds_before + time.perf_counter() - self.started

        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.tokens += int(inputs["attention_mask"].sum()) * self.args.world_size
            return self.row_loss(model, inputs)

        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                self.run.seal(self.state.global_step, seconds=self.seconds, tokens=self.tokens)

    return RowTrainer


def _Watch(trainer: Any, settings: Settings, evaluate: Callable | None, say: Callable[[str], None]) -> Any:
    """The callback that shows progress, evaluates, and stops a run whose loss is no number."""
    from tqdm import tqdm
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            trainer.started = time.perf_counter()
            hidden = None if state.is_world_process_zero else True  # None: shown on a terminal only
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=hidden)
            self.tokens_then, self.then = trainer.tokens, time.perf_counter()

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" not in (logs or {}):
                return
            if not math.isfinite(float(logs["loss"])):
                raise TrainingError(
                    f"the loss is {logs['loss']} at step {state.global_step}: lower the learning rate "
                    f"({settings.learning_rate:g}), or use float32 instead of {settings.dtype}"
                )
            now = time.perf_counter()
            speed = (trainer.tokens - self.tokens_then) / max(now - self.then, 1e-9)
            self.tokens_then, self.then = trainer.tokens, now
            self.bar.set_postfix_str(f"loss {float(logs['loss']):.3f}, {speed:,.0f} tokens/s")

        def on_step_end(self, args, state, control, **_):
            self.bar.update(state.global_step - self.bar.n)
            due = state.global_step % settings.evaluating_steps == 0 or state.global_step == state.max_steps
            if evaluate is None or not due or not state.is_world_process_zero:
                return
            with evaluating(trainer.accelerator.unwrap_model(trainer.model)) as model, _random_state_kept():
                numbers = evaluate(model)
            trainer.log(dict(numbers))
            shown = ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())
            with self.bar.external_write_mode():
                say(f"step {state.global_step:,} of {state.max_steps:,}: {shown}")

        def on_train_end(self, args, state, control, **_):
            self.bar.close()

    return Watch()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """`model` in eval mode and without gradients, put back as it was on exit."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        model.train(training)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    import random

    import numpy

    python, arrays = random.getstate(), numpy.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


def _world_size() -> int:
    import os

    return int(os.environ.get("WORLD_SIZE", "1"))


def save_model(model: Any, tokenizer: Any, run: RunFolder) -> Path:
    """The trained model and its tokenizer in `run.model`, whole or not at all."""

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    with bars_on_terminals_only():
        return run.write_folder("model", fill)
