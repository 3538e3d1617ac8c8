"""The one training entry: transformers' Trainer, on one device or several, resumable after a kill at any moment.

A run is described by `Settings`, by a `RunFolder`, and by rows that are a function of their number: row k of a run is
the same whoever asks for it, so an interrupted run goes on with the rows that it had not seen. What is learned is given
as `loss(model, batch)`; how well, as `evaluate(model)`.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import MissingPackageError, TrainingError
from labkit.progress import bars_on_terminals_only, transformers_errors_only
from labkit.run_folder import RunFolder, first_process_first

DTYPES = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True}}


@dataclass(frozen=True)
class Settings:
    """How a run is optimised: AdamW, linear warm-up, cosine decay to `final_share` of the peak.

    Attributes:
        max_steps: optimiser steps.
        batch_size: rows per device and forward pass; `gradient_accumulation` passes make one step.
        learning_rate: the peak, reached after the share `warmup` of all steps.
        dtype: "float32", or autocast in "bfloat16" or "float16" (weights stay as they are).
        evaluate_every, save_every: in steps; 0 = a tenth of the run. `log_every` likewise, 0 = a hundredth. The last
            step is always logged, evaluated and saved.
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
        for name in ("evaluate_every", "save_every", "log_every"):
            if getattr(self, name) < 0:
                raise TrainingError(f"{name.replace('_', ' ')} is {getattr(self, name)} steps; it must be 0 or more")
        if not self.learning_rate > 0 or not 0 <= self.warmup < 1:
            raise TrainingError(f"learning rate {self.learning_rate} must be positive, warm-up {self.warmup} in [0, 1)")
        if self.dtype not in DTYPES:
            raise TrainingError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")

    @property
    def rows_per_step(self) -> int:
        """On one device."""
        return self.batch_size * self.gradient_accumulation

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
        TrainingError: the loss is no number any more, a checkpoint was altered, or there are more or fewer processes
            than before.
        MissingPackageError: accelerate is not installed.
    """
    from tqdm import tqdm

    require(settings)
    with first_process_first() as first:
        resumed = run.latest_checkpoint()
    before = resumed[1] if resumed else {"step": 0, "seconds": 0.0, "tokens": 0}
    with random_state_kept(), bars_on_terminals_only():
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
            settings=settings,
            run=run,
            before=before,
        )
        if resumed and first:
            say(f"resuming from step {before['step']:,} of {settings.max_steps:,}")
        hidden = None if first else True  # None: shown on a terminal only
        with tqdm(total=settings.max_steps, initial=before["step"], unit="step", disable=hidden) as bar:
            trainer.add_callback(_watch(trainer, settings, evaluate, say, bar))
            with transformers_errors_only():  # it would miss a head that is tied to the embedding
                trainer.train(resume_from_checkpoint=str(resumed[0]) if resumed else None)
        seconds = trainer.seconds
    return {
        "seconds": seconds,
        "tokens_per_second": trainer.tokens / seconds,
        "peak_memory_bytes": peak_memory(),
        "seed": settings.seed,
        # Trainer ends it with a summary of its own, which counts nothing before a resume
        "history": [entry for entry in trainer.state.log_history if "train_runtime" not in entry],
    }


def require(settings: Settings) -> None:
    """Raise, before anything is written, if this machine cannot train with `settings`.

    Raises:
        MissingPackageError: accelerate or the tracker is not installed. TrainingError: float16 without a GPU.
    """
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise MissingPackageError('training needs accelerate: pip install "labkit-bidirectional[train]"') from None
    if settings.dtype == "float16" and not torch.cuda.is_available():
        raise TrainingError("float16 needs a GPU, and there is none here; choose bfloat16 or float32")
    if settings.report_to != "none":
        from transformers.integrations import get_available_reporting_integrations

        if settings.report_to not in (ready := get_available_reporting_integrations()):
            choices = ", ".join(["none", *ready])
            raise MissingPackageError(f"{settings.report_to!r} is not installed, or no tracker at all; here: {choices}")


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

    arguments = TrainingArguments(
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
        logging_nan_inf_filter=False,  # it would show a mean of earlier losses in place of a NaN
        save_steps=settings.saving_steps,
        seed=settings.seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        disable_tqdm=True,  # ours shows the loss and the speed
        ddp_find_unused_parameters=False,  # a decoder uses all it has; torch warns on every run that looks for more
        report_to=settings.report_to,
        **DTYPES[settings.dtype],
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process, one GPU: several are for torchrun, not for DataParallel
    return arguments


def _trainer_class() -> type:
    """Our Trainer, defined on first use: transformers' takes seconds to import, and needs accelerate."""
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback

    class RowTrainer(Trainer):
        """Rows in their order, our loss, sealed checkpoints."""

        def __init__(self, model, arguments, *, rows, collate, loss, settings, run, before):
            super().__init__(model=model, args=arguments, train_dataset=rows, data_collator=collate)
            self.remove_callback(PrinterCallback)
            self.model_accepts_loss_kwargs = False  # our loss is a mean; Trainer divides by the accumulation steps
            self.accelerator.gradient_accumulation_steps = 1  # or transformers 5.3 divides by them twice
            self.row_loss, self.settings, self.run = loss, settings, run
            self.started, self.seconds_before, self.tokens = time.perf_counter(), before["seconds"], before["tokens"]

        @property
        def seconds(self) -> float:
            return self.seconds_before + time.perf_counter() - self.started

        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.tokens += int(inputs["attention_mask"].sum()) * self.args.world_size
            return self.row_loss(model, inputs)

        def _save_checkpoint(self, model, trial):
            _require_numbers("some weights are", self.model.parameters(), self.state.global_step, self.settings)
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # each process leaves its random state in the checkpoint
            if self.args.should_save:
                facts = {"seconds": self.seconds, "tokens": self.tokens, "processes": self.args.world_size}
                self.run.seal(self.state.global_step, **facts)
                self.run.remove_checkpoints_but(2)

    return RowTrainer


def _watch(trainer: Any, settings: Settings, evaluate: Callable | None, say: Callable[[str], None], bar: Any) -> Any:
    """The callback that shows progress, evaluates, and stops a run whose loss is no number, before it is saved."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            trainer.started = self.then = time.perf_counter()
            self.tokens_then, self.numbers = trainer.tokens, {}

        def on_step_end(self, args, state, control, **_):
            bar.update(state.global_step - bar.n)
            self.due = state.global_step % settings.evaluating_steps == 0 or state.global_step == state.max_steps
            if self.due and evaluate is not None and state.is_world_process_zero:
                bare = trainer.accelerator.unwrap_model(trainer.model)
                with evaluating(bare) as model, random_state_kept(), bar.external_write_mode():
                    self.numbers = evaluate(model)
                if self.numbers:
                    trainer.log(dict(self.numbers))
            # after trainer.log, which takes a pending request to log the loss for served
            control.should_log = self.due or state.global_step % settings.logging_steps == 0

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" not in (logs or {}):
                return
            _require_numbers("the loss is", [torch.tensor(logs["loss"])], state.global_step, settings)
            now = time.perf_counter()
            speed = (trainer.tokens - self.tokens_then) / max(now - self.then, 1e-9)
            self.tokens_then, self.then = trainer.tokens, now
            bar.set_postfix_str(f"loss {float(logs['loss']):.3f}, {speed:,.0f} tokens/s")
            if self.due and state.is_world_process_zero:
                numbers = {"loss": float(logs["loss"])} | self.numbers
                shown = ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())
                with bar.external_write_mode():
                    say(f"step {state.global_step:,} of {state.max_steps:,}: {shown}")

    return Watch()


def _require_numbers(what: str, numbers: Iterable[Tensor], step: int, settings: Settings) -> None:
    for each in numbers:
        if not bool(each.isfinite().all()):
            rate = f"lower the learning rate ({settings.learning_rate:g})"
            instead = "" if settings.dtype == "float32" else f", or use float32 instead of {settings.dtype}"
            raise TrainingError(f"{what} no number any more (NaN or infinite) at step {step}: {rate}{instead}")


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
def random_state_kept() -> Iterator[None]:
    """Whatever draws random numbers in the block (torch on every device, numpy, Python), none are missing after it."""
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


def save_model(model: Any, tokenizer: Any, run: RunFolder) -> Path:
    """The trained model and its tokenizer in `run.model`, whole or not at all."""

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    with bars_on_terminals_only():
        return run.write_folder("model", fill)
