"""How a run is optimised, and whether this machine can do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from labkit.errors import ModelError, TrainingError
from labkit.models import precision

DTYPES = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True}}
MIXED = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
SCHEDULES = ("cosine", "linear")


@dataclass(frozen=True)
class Settings:
    """How a run is optimised: AdamW, linear warm-up, then a decay.

    Attributes:
        max_steps: optimiser steps.
        batch_size: rows per device and forward pass; `gradient_accumulation` passes make one step.
        learning_rate: the peak, reached after the share `warmup` of all steps.
        schedule: "cosine" down to `final_share` of the peak, or "linear" down to 0.
        dtype: "float32", or autocast in "bfloat16" or "float16" (weights stay as they are); "auto": the rule of
            `labkit.models.precision` for the model and this machine, which chooses tf32 too.
        evaluate_every, save_every: in steps; 0 = a tenth of the run. `log_every` likewise, 0 = a hundredth. The last
            step is always logged, evaluated and saved.
        keep: how many checkpoints stay, besides the best one.
        metric: what the evaluation calls the number by which the best checkpoint is chosen, the higher the better; it
            is loaded at the end. None: the model at the end is the last one. With it, every evaluation is saved.
        patience: stop after so many evaluations in a row without a better `metric`; 0 = never.
        gradient_checkpointing: compute activations twice rather than keep them: less memory, about a third slower.
        tf32: matrix products of float32 with 10 bits of mantissa, on GPUs from Ampere on.
        report_to: a tracker that transformers knows ("tensorboard", "mlflow", "trackio", ...), several with commas
            between them, or "none".
    """

    max_steps: int
    batch_size: int = 8
    gradient_accumulation: int = 1
    learning_rate: float = 5e-4
    warmup: float = 0.05
    schedule: str = "cosine"
    final_share: float = 0.1
    weight_decay: float = 0.1
    beta2: float = 0.95
    dtype: str = "float32"
    seed: int = 0
    evaluate_every: int = 0
    save_every: int = 0
    log_every: int = 0
    keep: int = 2
    metric: str | None = None
    patience: int = 0
    gradient_checkpointing: bool = False
    tf32: bool = False
    report_to: str = "none"

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "gradient_accumulation", "keep"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}")
        for name in ("evaluate_every", "save_every", "log_every"):
            if getattr(self, name) < 0:
                raise TrainingError(f"{name.replace('_', ' ')} is {getattr(self, name)} steps; it must be 0 or more")
        if not self.learning_rate > 0 or not 0 <= self.warmup < 1:
            raise TrainingError(f"learning rate {self.learning_rate} must be positive, warm-up {self.warmup} in [0, 1)")
        if not 0 <= self.seed < 2**32:
            raise TrainingError(f"the seed is {self.seed}; give a number from 0 to {2**32 - 1}")
        if not self.weight_decay >= 0:
            raise TrainingError(f"the weight decay is {self.weight_decay}; it must be 0 or more")
        for name, known in (("dtype", ("auto", *DTYPES)), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise TrainingError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}")
        if self.patience < 0 or (self.patience and self.metric is None):
            raise TrainingError(f"patience is {self.patience} evaluations; it must be 0 or more, and needs a metric")
        if self.metric is not None and self.save_every not in (0, self.evaluate_every):
            raise TrainingError(
                f"with a metric every evaluation is saved: give save every {self.save_every} and evaluate every "
                f"{self.evaluate_every} the same number of steps"
            )

    @property
    def rows_per_step(self) -> int:
        """On one device."""
        return self.batch_size * self.gradient_accumulation

    @property
    def logging_steps(self) -> int:
        return self.log_every or max(1, self.max_steps // 100)

    @property
    def saving_steps(self) -> int:
        """A multiple of the logging steps, or every evaluation, which is logged too: a loss is averaged between logs,
        and a resume must not cut one in two."""
        if self.metric is not None:
            return self.evaluating_steps
        wanted = self.save_every or max(1, self.max_steps // 10)
        return max(1, round(wanted / self.logging_steps)) * self.logging_steps

    @property
    def evaluating_steps(self) -> int:
        return self.evaluate_every or max(1, self.max_steps // 10)

    @property
    def trackers(self) -> list[str]:
        return [name.strip() for name in self.report_to.split(",") if name.strip() not in ("", "none")]


def require(settings: Settings) -> None:
    """Raise, before anything is written, if this machine cannot train with `settings`.

    Raises:
        ModelError: accelerate or a tracker is not installed. TrainingError: float16 without a GPU.
    """
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise ModelError('training needs accelerate: pip install "labkit-bidirectional[train]"') from None
    if settings.dtype == "float16" and not torch.cuda.is_available():
        raise TrainingError("float16 needs a GPU, and there is none here; choose bfloat16 or float32")
    if settings.trackers:
        from transformers.integrations import get_available_reporting_integrations

        ready = get_available_reporting_integrations()
        for name in settings.trackers:
            if name not in ready:
                choices = ", ".join(["none", *ready])
                raise ModelError(f"{name!r} is not installed, or no tracker at all; here: {choices}")


def settled(settings: Settings, model: Any, say: Callable[[str], None], begun: str | None = None) -> Settings:
    """`settings` with the numbers to compute with on this machine; `begun` as for `computing_in`."""
    family = getattr(getattr(model, "config", None), "model_type", None) or ""
    if settings.dtype != "auto":
        precision.choose(family, precision.here(), settings.dtype)  # refuses what cannot work
        return settings
    chosen = computing_in(family, "auto", say, begun)
    return replace(settings, dtype=chosen.dtype, tf32=chosen.tf32)


def computing_in(family: str, wanted: str, say: Callable[[str], None], begun: str | None = None) -> precision.Precision:
    """The numbers for a model of this type on this machine: those `wanted`, or for "auto" the rule's, with its reason.

    `begun`: the numbers that a run to go on with was begun in. "auto" keeps to them where the rule has others for the
    card that it is on now.

    Raises:
        TrainingError: the model, or this machine, cannot compute in them.
    """
    chosen = precision.choose(family, precision.here(), wanted)
    if wanted == "auto" and begun not in (None, chosen.dtype):
        rule = chosen
        if begun == "float16" and precision.here() is None:
            raise TrainingError(
                "this run was begun in float16, which needs a GPU, and there is none here: go on where there is one, "
                "or begin anew in another folder"
            )
        # the rule never takes float32 where there is TF32, so a run that was begun in it was begun without
        chosen = replace(precision.choose(family, precision.here(), begun), tf32=False)
        slow = "" if chosen.why == precision.AS_ASKED else f" ({chosen.why})"
        say(f"computing in {begun}, as this run was begun; on this machine a new one would take {rule.dtype}{slow}")
    elif precision.here() is not None and chosen.why != precision.AS_ASKED:
        say(f"computing in {chosen.dtype}: {chosen.why}")
    return chosen
