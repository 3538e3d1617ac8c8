"""How long and how hard a task is trained: named presets, in epochs, and the `Settings` in steps that follow from them.

gemma   the recipe that people know from Gemma: 5 epochs, batches of 4 (8 to evaluate), 4 of them to a step, 2e-5,
        linear, warm-up 0.1, decay 0.01, evaluated and saved every 500 steps, 3 kept, the best by F1 loaded at the end,
        patience 20
mini    for gpt2-mini and other models of a few million parameters: more epochs, a rate that such models want
quick   minutes on a CPU, to see that everything works: LoRA's rate, one short run
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from labkit.errors import TrainingError
from labkit.training_settings import Settings

EVALUATE_EVERY = 500  # steps


@dataclass(frozen=True)
class Plan:
    """A training, in passes over the data. `max_steps` ends it earlier.

    Attributes:
        batch_tokens: a batch is as many rows as fit into so many tokens, instead of `batch_size`; for packed rows only.
        evaluate_every: steps between evaluations, which are saved too. None: 500, or one pass where that is shorter.
        patience: evaluations without a better score after which the run ends; 0 = never.
        others: as in `labkit.training_settings.Settings`.
    """

    epochs: float = 5.0
    batch_size: int = 4
    batch_tokens: int | None = None
    eval_batch_size: int = 8
    gradient_accumulation: int = 4
    learning_rate: float = 2e-5
    schedule: str = "linear"
    warmup: float = 0.1
    weight_decay: float = 0.01
    beta2: float = 0.999
    evaluate_every: int | None = None
    keep: int = 3
    patience: int = 20
    max_steps: int | None = None
    gradient_checkpointing: bool = False
    dtype: str = "auto"
    seed: int = 0
    report_to: str = "none"

    def __post_init__(self) -> None:
        """TrainingError for what no number of rows can make sense of, before a model is loaded."""
        if math.isinf(self.epochs):
            raise TrainingError("epochs are infinite; give a number, or max steps")
        Settings(
            1, learning_rate=self.learning_rate, warmup=self.warmup, weight_decay=self.weight_decay, seed=self.seed
        )

    def settings(self, rows: int, metric: str, *, dtype: str, tf32: bool, processes: int = 1) -> Settings:
        """The settings of a run on `rows` rows: steps of the whole run, and the precision that was chosen.

        With `batch_tokens` the rows of the settings are batches, one to a pass.
        """
        if not self.epochs > 0 or (self.max_steps is not None and self.max_steps < 1):
            raise TrainingError(f"epochs are {self.epochs} and max steps {self.max_steps}: both must be positive")
        batch_size = 1 if self.batch_tokens else self.batch_size
        per_epoch = max(1, math.ceil(rows / (batch_size * self.gradient_accumulation * processes)))
        steps = max(1, math.ceil(self.epochs * rows / (batch_size * self.gradient_accumulation * processes)))
        steps = min(steps, self.max_steps or steps)
        every = min(self.evaluate_every or min(EVALUATE_EVERY, per_epoch), steps)
        return Settings(
            max_steps=steps, batch_size=batch_size, gradient_accumulation=self.gradient_accumulation,
            learning_rate=self.learning_rate, schedule=self.schedule, warmup=self.warmup,
            weight_decay=self.weight_decay, beta2=self.beta2, dtype=dtype, tf32=tf32, seed=self.seed,
            evaluate_every=every, keep=self.keep, metric=metric, patience=self.patience,
            gradient_checkpointing=self.gradient_checkpointing, report_to=self.report_to,
        )  # fmt: skip


SMALL = 20_000_000  # parameters

PRESETS = {
    "gemma": Plan(),
    "mini": Plan(epochs=10.0, batch_size=16, eval_batch_size=32, gradient_accumulation=1, learning_rate=5e-4),
    "quick": Plan(epochs=3.0, batch_size=8, gradient_accumulation=1, learning_rate=3e-4),
}


def preset(name: str, **changes: object) -> Plan:
    """The preset called `name`, with the changes that are not None. Raises TrainingError if there is none."""
    if name not in PRESETS:
        raise TrainingError(f"the preset is {name!r}; choose one of {', '.join(PRESETS)}")
    return replace(PRESETS[name], **{key: value for key, value in changes.items() if value is not None})


def default_preset(model: str) -> str:
    """ "mini" for the models of a few million parameters that labkit ships, "gemma" for all others."""
    from labkit.models.registry import REGISTRY

    card = REGISTRY.get(model)
    return "mini" if card is not None and card.parameters and card.parameters < SMALL else "gemma"
