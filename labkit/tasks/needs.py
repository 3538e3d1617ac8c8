"""How much memory a fine-tuning needs, measured on one row before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit import memory
from labkit.errors import TrainingError
from labkit.tasks.plans import Plan
from labkit.training import random_state_kept

BASE = {"cpu": 0.5 * memory.GB, "cuda": 0.8 * memory.GB}  # torch and its libraries themselves
OPTIMISER = 1.2  # short-lived copies in the optimiser's step, as a share of weights, gradients and moments
BACKWARD = 1.7  # and in the backward pass, of the activations; both measured on a CPU, gpt2-mini and gemma3-270m


@dataclass(frozen=True)
class Need:
    """Bytes: of the weights, of what is kept per trained weight (gradient, two moments), of the activations."""

    weights: int
    training: int
    activations: int
    base: int
    batch_size: int
    length: int

    @property
    def total(self) -> int:
        return int(self.base + OPTIMISER * (self.weights + self.training) + BACKWARD * self.activations)

    def sentence(self, free: int) -> str:
        """needs about 11.0 GB at batch 8 x 512, 15.2 GB are free"""
        return (
            f"needs about {self.total / memory.GB:.1f} GB at batch {self.batch_size} x {self.length}, "
            f"{free / memory.GB:.1f} GB are free"
        )


def measured_need(
    model: nn.Module,
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    batch: dict[str, Tensor],
    *,
    share: float,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
) -> Need:
    """What a training step needs, from what one forward pass of `batch` (its longest row) keeps for its backward pass.

    Args:
        batch: the longest row or two, as the collator makes it. share: how many times as many are in a real batch.
        dtype: of the autocast. The model is left as it was; nothing is trained.
    """
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)  # or another tensor could get the same address
        return tensor.detach()  # a node that kept its own output would never be freed, and the model with it

    alive: list[Any] = []
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
    base = int(BASE["cuda" if device.type == "cuda" else "cpu"])
    rows, length = batch["input_ids"].shape
    return Need(weights, 12 * trained, int(activations * share), base, int(rows * share), length)


def require_room(need: Need, model: nn.Module, plan: Plan) -> str:
    """The sentence that says what is needed and what there is; TrainingError with advice if it will not fit.

    The model is in memory already, so its weights do not count against what is free.
    """
    there = need.weights + need.base
    free = memory.available_bytes(str(next(model.parameters()).device)) + there
    sentence = need.sentence(free)
    if need.total <= free:
        return sentence
    cures = []
    if plan.batch_size > 1:
        cures.append(f"--batch-size {plan.batch_size // 2} --gradient-accumulation {plan.gradient_accumulation * 2}")
    cures += [] if plan.gradient_checkpointing else ["--gradient-checkpointing"]
    full = all(parameter.requires_grad for parameter in model.parameters())
    cures += ["a smaller --max-length"] + (["--method lora"] if full else [])
    raise TrainingError(f"this training {sentence}; try {', '.join(cures)}")
