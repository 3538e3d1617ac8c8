"""Which weights of a model with a task head are trained: all of them, low-rank adapters, or the head alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from labkit.decoder.anatomy import decoder_or_none
from labkit.errors import TrainingError
from labkit.models.adapters import peft_for
from labkit.training import random_state_kept

METHODS = ("full", "lora", "frozen")


def trained_part(model: Any, method: str, *, rank: int = 16, dtype: str = "float32", seed: int = 0) -> Any:
    """What to hand to the training.

    "full": every weight. "lora": adapters of `rank` on every matrix of the layers (Hu et al. 2021), the head and what
    it pools with whole. "frozen": the head and the pooling. What is trained is float32, as small updates are lost in 16
    bits; a backbone that is not is kept in `dtype`. New adapters start from `seed`, whatever was drawn before.

    Raises:
        TrainingError: no such method, or nothing would be left to train. ModelError: peft is not installed.
    """
    if method == "full":
        return model
    own = [name for name, child in model.named_children() if child is not model.backbone and list(child.parameters())]
    weights_to(model.backbone, getattr(torch, dtype))
    for name in own:
        getattr(model, name).to(torch.float32)
    if method == "frozen":
        if not own:
            raise TrainingError("frozen: this head has no weights of its own, so there is nothing to train; take lora")
        model.backbone.requires_grad_(False)
        return model
    decoder = decoder_or_none(model)
    layers = [model.backbone] if decoder is None else decoder.layers
    inside = {id(module) for layer in layers for module in layer.modules()}
    matrices = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and id(module) in inside
    ]
    adapted = with_lora(model, seed, rank=rank, target_modules=matrices, modules_to_save=own)
    # or peft saves the embeddings whole where marks were added, whose rows are not trained and can be made again
    adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)
    return adapted


def with_lora(model: Any, seed: int, *, rank: int = 16, target_modules: Any = "all-linear", **choices: Any) -> Any:
    """Low-rank adapters on matrices of the layers (Hu et al. 2021), which start from `seed`; the rest is frozen.

    `choices`: other fields of peft.LoraConfig.
    """
    transposed = any(isinstance(module, Conv1D) for module in model.modules())  # as GPT-2 stores its matrices
    with peft_for("LoRA needs") as peft, random_state_kept(seed):
        choices |= {"r": rank, "lora_alpha": 2 * rank, "target_modules": target_modules, "fan_in_fan_out": transposed}
        return peft.get_peft_model(model, peft.LoraConfig(lora_dropout=0.0, **choices))


def weights_to(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """The weights in `dtype`; `model.to(dtype)` would round the buffers, too, such as the frequencies of RoPE."""
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def trainable(model: Any) -> tuple[int, int]:
    """(trained, all) parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad), sum(p.numel() for p in model.parameters())
