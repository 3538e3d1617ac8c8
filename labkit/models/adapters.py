"""Which weights of a model are trained (all, low-rank adapters, or the head alone), and adapters as a small folder.

    adapter_model.safetensors, adapter_config.json    as peft saves them
    labkit_adapter.json                               the base model by name, the head, the conversion, the task

`labkit.load(folder)` loads the base, puts head and mask on it, and merges the matrices in. The folder does not contain
the base model, which has a licence of its own.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from labkit.convert import conversion_of, to_bidirectional
from labkit.decoder.running import random_state_kept
from labkit.errors import ModelError, TrainingError, needs_extra, reading
from labkit.models.heads import Head, head_in
from labkit.models.special_tokens import add_tokens, ensure_mask_token

METHODS = ("full", "lora", "frozen")
RECORD = "labkit_adapter.json"
TASK = "labkit_task"  # in the config: what `labkit.pipeline` needs to know


def trained_part(model: Any, method: str, *, rank: int = 16, dtype: str = "float32", seed: int = 0) -> Any:
    """The model to train, whose other weights are frozen.

    "full": every weight. "lora": adapters of `rank` on every matrix of the backbone, and the whole head and pooling.
    "frozen": the head and the pooling. Trained weights are float32, because small updates are lost in 16 bits; a
    backbone that is not trained is kept in `dtype`. Raises TrainingError if nothing would be left to train.
    """
    if method == "full":
        return model
    own = [name for name, child in model.named_children() if child is not model.backbone and list(child.parameters())]
    weights_to(model.backbone, getattr(torch, dtype))
    for name in own:
        getattr(model, name).to(torch.float32)
    if method == "lora":
        return with_lora(model, seed, rank=rank, modules_to_save=own)
    if not own:
        raise TrainingError("frozen: this head has no weights of its own, so there is nothing to train; take lora")
    model.backbone.requires_grad_(False)
    return model


def with_lora(model: Any, seed: int, *, rank: int = 16, target_modules: Any = "all-linear", **choices: Any) -> Any:
    """Low-rank adapters (Hu et al. 2021), which depend on `seed` alone; `choices`: other fields of peft.LoraConfig."""
    transposed = any(isinstance(module, Conv1D) for module in model.modules())  # as GPT-2 stores its matrices
    with peft() as library, random_state_kept(seed):
        choices |= {"r": rank, "lora_alpha": 2 * rank, "target_modules": target_modules, "fan_in_fan_out": transposed}
        adapted = library.get_peft_model(model, library.LoraConfig(lora_dropout=0.0, **choices))
    # or peft saves the embeddings whole where tokens were added, whose rows are not trained and can be made again
    adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)
    return adapted


def weights_to(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """The weights in `dtype`; `model.to(dtype)` would round the buffers, too, such as the frequencies of RoPE."""
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def trainable(model: Any) -> tuple[int, int]:
    """(trained, all) parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad), sum(p.numel() for p in model.parameters())


def save(
    adapted: Any,
    folder: Path,
    *,
    base: str,
    task: dict[str, Any] | None = None,
    marks: tuple[str, ...] = (),
    mask_token: bool = False,
) -> None:
    """Write the adapters of a peft model into `folder`, which exists.

    `base`: the name that `labkit.load` has for the base model. `task`: goes into the config under `TASK`; None for a
    language model. `marks`: the tokens that were added to the tokenizer.
    """
    adapted.active_peft_config.base_model_name_or_path = base  # not its path on this machine
    adapted.save_pretrained(folder)
    conversion, head = conversion_of(adapted), head_in(adapted.config)
    record = {
        "base": base,
        "head": head and asdict(head),
        "conversion": conversion and {name: conversion[name] for name in ("window", "layers")},
        "task": task,
        "marks": list(marks),
        "mask_token": mask_token,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").unlink(missing_ok=True)  # peft's, an empty form


def read(folder: Path, name: str, load: Callable[..., Any], *, task: str | Head | None, **options: Any) -> Any:
    """The base model of the adapter in `folder` with its head, its mask and its matrices: a `labkit.Loaded`.

    The adapter of a language model may get a new head (`task`); one with a head keeps it. `load` is `labkit.load`, and
    `options` are its options for the base.
    """
    with reading(f"the adapter in {folder}"), peft() as library:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if head := record["head"] and Head(**record["head"]):
            asked = Head(task, labels=head.labels) if isinstance(task, str) else task or head
            if (asked.task, asked.labels, asked.pooling) != (head.task, head.labels, head.pooling):
                raise ModelError(
                    f"the adapter in {folder} is for {head.task} ({', '.join(head.labels) or 'no labels'}), not for "
                    f"{asked.task} ({', '.join(asked.labels) or 'no labels'})"
                )
        lm = load(record["base"], task=head or task, **options)
        add_tokens(lm.model, lm.tokenizer, record["marks"])
        if record["mask_token"]:
            ensure_mask_token(lm.model, lm.tokenizer)
        if record["conversion"]:
            to_bidirectional(lm.model, **record["conversion"])
        adapted = library.PeftModel.from_pretrained(lm.model, str(folder))
        lm.model = adapted.merge_and_unload().requires_grad_(True).eval()  # peft had frozen what it adapted
        if head:
            lm.model.head_is_new = False
        if record["task"]:
            setattr(lm.model.config, TASK, record["task"])
    lm.name = name
    lm.source = f"{lm.source.split('; its head is new')[0].rstrip('.')}; with the adapter {folder.name}."
    return lm


@contextmanager
def peft() -> Iterator[ModuleType]:
    """The package `peft`."""
    with needs_extra():
        import peft
    with warnings.catch_warnings():  # peft asks transformers for gradient checkpointing by a deprecated name
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        yield peft
