"""A fine-tuned adapter as a small folder: low-rank matrices and a head, and what they are put on.

    adapter_model.safetensors, adapter_config.json    as peft saves them
    labkit_adapter.json                               the base model by name, the head, the conversion, the task

`labkit.load(folder)` loads the base, puts head and mask on it, and merges the matrices in. The base is named, not
carried along: whoever gets the folder needs it too, under its own licence.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit.errors import HeadError, reading
from labkit.models.heads import Head, head_in
from labkit.models.peft_library import peft_for

RECORD = "labkit_adapter.json"
TASK = "labkit_task"  # in the config: what `labkit.pipeline` needs to know


def is_adapter(folder: Path) -> bool:
    return (folder / RECORD).is_file()


def save(adapted: Any, folder: Path, *, base: str, task: dict[str, Any], marks: tuple[str, ...] = ()) -> None:
    """Write the adapters of a peft model with a labkit head into `folder`, which exists.

    Args:
        base: the name that `labkit.load` knows the base model by. task: as in the config, see `TASK`.
        marks: tokens that were added to the tokenizer.
    """
    from labkit.convert import conversion_of

    adapted.save_pretrained(folder)
    own = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    own["base_model_name_or_path"] = base  # where it lay on this machine is nobody's business
    (folder / "adapter_config.json").write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").unlink(missing_ok=True)  # peft's, an empty form
    mark = conversion_of(adapted)
    record = {
        "base": base,
        "head": asdict(head_in(adapted.config)),
        "conversion": mark and {name: mark[name] for name in ("window", "layers")},
        "task": task,
        "marks": list(marks),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read(folder: Path, *, attn: str | None, dtype: Any, device: str, task: str | Head | None) -> Any:
    """The base model of the adapter in `folder` with its head, its mask and its matrices: a `labkit.Loaded`.

    Raises:
        HeadError: another task or other labels are asked for than the adapter has. ModelError: the folder is damaged.
        MissingPackageError: peft is not installed. And what `labkit.load` raises for the base.
    """
    import labkit
    from labkit.tasks.special_tokens import add_tokens

    with reading(f"the adapter in {folder}"):
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        head, base = Head(**record["head"]), str(record["base"])
        _require_same(head, task, folder)
        with peft_for("an adapter needs") as peft:
            lm = labkit.load(base, attn=attn, dtype=dtype, device=device, task=head)
            add_tokens(lm.model, lm.tokenizer, record["marks"])
            if record["conversion"]:
                labkit.to_bidirectional(lm.model, **record["conversion"])
            adapted = peft.PeftModel.from_pretrained(lm.model, str(folder))
        lm.model = adapted.merge_and_unload().requires_grad_(True).eval()  # peft had frozen what it adapted
        setattr(lm.model.config, TASK, record["task"])
    lm.source = f"{lm.source.split('; its head is new')[0].rstrip('.')}; with the adapter {folder.name}."
    return lm


def _require_same(head: Head, task: str | Head | None, folder: Path) -> None:
    asked = Head(task, labels=head.labels) if isinstance(task, str) else task
    if asked is not None and any(getattr(asked, name) != getattr(head, name) for name in ("task", "labels", "pooling")):
        raise HeadError(
            f"the adapter in {folder} is for {head.task} ({', '.join(head.labels) or 'no labels'}), not for "
            f"{asked.task} ({', '.join(asked.labels) or 'no labels'})"
        )
