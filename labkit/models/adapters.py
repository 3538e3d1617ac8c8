"""A fine-tuned adapter as a small folder: low-rank matrices, a head, and the name of the model that they are put on.

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
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit.errors import ModelError, reading
from labkit.models.heads import Head, head_in

RECORD = "labkit_adapter.json"
TASK = "labkit_task"  # in the config: what `labkit.pipeline` needs to know


@contextmanager
def peft_for(what: str) -> Iterator[ModuleType]:
    """The package `peft`, for `what` ("LoRA needs", "an adapter needs"). Raises ModelError if it is not installed."""
    try:
        import peft
    except ImportError:
        raise ModelError(f'{what} peft: pip install "labkit-bidirectional[train]"') from None
    with warnings.catch_warnings():  # peft asks transformers for gradient checkpointing by a deprecated name
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        yield peft


def save(adapted: Any, folder: Path, *, base: str, task: dict[str, Any], marks: tuple[str, ...] = ()) -> None:
    """Write the adapters of a peft model with a labkit head into `folder`, which exists.

    `base` is the name that `labkit.load` has for the base model, `task` goes into the config under `TASK`, and `marks`
    are the tokens that were added to the tokenizer.
    """
    from labkit.convert import conversion_of

    adapted.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base  # not its path on this machine
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").unlink(missing_ok=True)  # peft's, an empty form
    conversion = conversion_of(adapted)
    record = {
        "base": base,
        "head": asdict(head_in(adapted.config)),
        "conversion": conversion and {name: conversion[name] for name in ("window", "layers")},
        "task": task,
        "marks": list(marks),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read(folder: Path, name: str, load: Callable[..., Any], *, task: str | Head | None, **options: Any) -> Any:
    """The base model of the adapter in `folder` with its head, its mask and its matrices: a `labkit.Loaded`.

    `load` is `labkit.load`, and `options` are its options for the base. Raises ModelError if the folder is damaged, or
    another task or other labels are asked for than the adapter has, or peft is not installed.
    """
    from labkit.convert import to_bidirectional
    from labkit.models.special_tokens import add_tokens

    with reading(f"the adapter in {folder}"), peft_for("an adapter needs") as peft:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        head = Head(**record["head"])
        asked = Head(task, labels=head.labels) if isinstance(task, str) else task or head
        if (asked.task, asked.labels, asked.pooling) != (head.task, head.labels, head.pooling):
            raise ModelError(
                f"the adapter in {folder} is for {head.task} ({', '.join(head.labels) or 'no labels'}), not for "
                f"{asked.task} ({', '.join(asked.labels) or 'no labels'})"
            )
        lm = load(record["base"], task=head, **options)
        add_tokens(lm.model, lm.tokenizer, record["marks"])
        if record["conversion"]:
            to_bidirectional(lm.model, **record["conversion"])
        adapted = peft.PeftModel.from_pretrained(lm.model, str(folder))
        lm.model = adapted.merge_and_unload().requires_grad_(True).eval()  # peft had frozen what it adapted
        setattr(lm.model.config, TASK, record["task"])
    lm.name = name
    lm.source = f"{lm.source.split('; its head is new')[0].rstrip('.')}; with the adapter {folder.name}."
    return lm
