"""How much memory a fine-tuning needs, measured on one row before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder import limits as memory
from labkit.errors import TrainingError, is_out_of_memory
from labkit.run_folder import process_count
from labkit.tasks.plans import Plan
from labkit.training import random_state_kept

# torch itself, by what it is built for
BASE = {"cpu": 0.5 * memory.GB, "cuda": 0.8 * memory.GB}
OPTIMISER = 1.2  # short-lived copies in the optimiser's step, as a share of weights, gradients and moments
BACKWARD = 1.7  # and in the backward pass, of the activations; both measured on a CPU, gpt2-mini and gemma3-270m


@dataclass(frozen=True)
class Need:
    """Bytes: of the weights, of what is kept per trained weight (gradient, two moments), of the activations.

    Attributes:
        copies: bytes of the weights' copies in 16 bits that autocast makes and the backward pass needs, as large for
            one row as for many. tokens: of a batch of packed rows, None where a batch is a number of rows.
    """

    weights: int
    training: int
    activations: int
    base: int
    batch_size: int
    length: int
    copies: int = 0
    tokens: int | None = None

    @property
    def total(self) -> int:
        kept = OPTIMISER * (self.weights + self.training) + BACKWARD * self.activations
        return int(self.base + kept + self.copies)

    def to_try(self, device: str) -> int:
        """What has to be there for the training to be tried: the total, or on a GPU all but its short-lived copies.

        They were measured on a CPU, where a process that takes too much is killed. A GPU that is full is an error that
        a run can be gone on from, so there what may fit is tried.
        """
        lasting = self.base + self.weights + self.training + self.activations + self.copies
        return lasting if device.startswith("cuda") else self.total

    def sentence(self, free: int) -> str:
        """needs about 11.0 GB at batch 8 x 512, 15.2 GB are free"""
        batch = f"{self.batch_size} x {self.length}" if self.tokens is None else f"{self.tokens:,} tokens"
        return f"needs about {self.total / memory.GB:.1f} GB at batch {batch}, {free / memory.GB:.1f} GB are free"


def measured_need(
    model: nn.Module,
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    batch: dict[str, Tensor],
    *,
    share: float,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    tokens: int | None = None,
) -> Need:
    """What a training step needs, from what one forward pass of `batch` (its longest row) keeps for its backward pass.

    Args:
        batch: the longest row or two, as the collator makes it. share: how many times as many are in a real batch.
        dtype: of the autocast. tokens: of a real batch, if that is what it is made of.

    The model is left as it was; nothing is trained.
    """
    kept: dict[int, int] = {}
    copies: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in own and at not in kept and at not in copies:
            (copies if is_copy(tensor) else kept)[at] = storage.nbytes()
            alive.append(storage)  # or another tensor could get the same address
        return tensor.detach()  # a node that kept its own output would never be freed, and the model with it

    alive: list[Any] = []
    is_copy = _copies_of(model)
    device = next(model.parameters()).device
    training = model.training
    autocast = torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")
    with random_state_kept(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        model.train()
        try:
            value = loss(model, {name: each.to(device) for name, each in batch.items()})
        finally:
            model.train(training)
    del value
    activations = sum(kept.values())
    if gradient_checkpointing:  # one layer at a time with its gradients, and the states between the layers
        config = model.config.get_text_config()
        states = batch["input_ids"].numel() * config.hidden_size * 4 * config.num_hidden_layers
        activations = 2 * activations // config.num_hidden_layers + states
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    base = int(BASE["cuda" if torch.version.cuda or torch.version.hip else "cpu"])
    rows, length = batch["input_ids"].shape
    return Need(
        weights,
        (12 if process_count() == 1 else 16) * trained,
        int(activations * share),
        base,
        int(rows * share),
        length,
        sum(copies.values()),
        tokens,
    )


def _copies_of(model: nn.Module) -> Callable[[Tensor], bool]:
    """Tells whether a tensor is the copy of a weight that autocast made: the weight's numbers, rounded to its dtype."""
    by_size: dict[int, list[Tensor]] = {}
    for parameter in model.parameters():
        by_size.setdefault(parameter.numel(), []).append(parameter.detach())

    @torch.no_grad()
    def is_copy(tensor: Tensor) -> bool:
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            return False
        storage = tensor.untyped_storage()
        alike = by_size.get(storage.nbytes() // tensor.element_size(), ())
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage) if alike else tensor
        return any(torch.equal(whole, weight.to(tensor.dtype).flatten()) for weight in alike)

    return is_copy


def room_for(
    model: nn.Module, loss: Callable[..., Tensor], trial: dict[str, Tensor], plan: Plan, *, share: float, dtype: str
) -> str:
    """What this training needs and what there is, in a sentence; `trial`, `share`, `dtype` as for `measured_need`.

    Raises:
        TrainingError: with advice, if it will not fit, or if not even the trial does. A training that computes its
            activations anew needs less than the trial, which keeps them: where that is too much it is still tried.
    """
    try:
        need = measured_need(
            model, loss, trial, share=share, dtype=dtype,
            gradient_checkpointing=plan.gradient_checkpointing, tokens=plan.batch_tokens,
        )  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows, length = trial["input_ids"].shape
        found = f"the memory is full with the forward pass of {rows} x {length}"
        if not plan.gradient_checkpointing:
            raise TrainingError(f"{found}; try {_cures(plan, model)}") from error
    else:
        return require_room(need, model, plan)
    return f"{found}, so what this training needs is not known; it is tried"


def require_room(need: Need, model: nn.Module, plan: Plan) -> str:
    """The sentence that says what is needed and what there is; TrainingError with advice if it will not fit.

    The model is in memory already, so its weights do not count against what is free.
    """
    device, there = str(next(model.parameters()).device), need.weights + need.base
    free = memory.available_bytes(device) + there
    sentence = need.sentence(free)
    if need.to_try(device) <= free:
        return sentence if need.total <= free else f"{sentence}: it may not fit"
    raise TrainingError(f"this training {sentence}; try {_cures(plan, model)}")


def _cures(plan: Plan, model: nn.Module) -> str:
    cures = []
    if plan.batch_tokens:
        cures.append(f"--batch-tokens {plan.batch_tokens // 2}")
    elif plan.batch_size > 1:
        cures.append(f"--batch-size {plan.batch_size // 2} --gradient-accumulation {plan.gradient_accumulation * 2}")
    cures += [] if plan.gradient_checkpointing else ["--gradient-checkpointing"]
    full = all(parameter.requires_grad for parameter in model.parameters())
    cures += ["a smaller --max-length"] + (["--method lora"] if full else [])
    return ", ".join(cures)
