"""Turn a finished `labkit train ... --method lora` run into an adapter that labkit ships: bf16 weights, card, sha256.

    python scripts/ship_adapter.py RUN data/checkpoints/gemma3-270m-field-notes-qa

Every number in the card comes from the run's config.json and metrics.json. The folder is replaced whole or not at all.
"""

# ruff: noqa: E501  (the card is text, its lines are not code)
from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from labkit.files import sha256
from labkit.models.registry import NOTICES, REGISTRY
from labkit.run_folder import read_json

SHOWN = ("f1", "best_f1", "exact_match", "HasAns_f1", "NoAns_f1", "token_accuracy", "accuracy")
CARD = """---
license: other
license_name: {licence}
language: en
library_name: peft
base_model: {base}
---
# {name}

Low-rank adapters (rank {rank}) and a head for {task} on `{base}`, trained by labkit for its lessons: {trained:.1f} M of {parameters:.0f} M
parameters. `labkit.load("{folder}")` puts them on the base model, which is not in this folder.

- Mask, measured before training: **{mask}**.
- Data: {data}, {n_train:,} examples; the dev split chose the checkpoint (step {best_step} of {steps}).
- AdamW, {schedule} schedule, peak learning rate {learning_rate:g}, batches of {rows} rows, {epochs:g} epochs, {dtype}, seed {seed};
  {minutes:.0f} minutes on {machine}, which was busy with other work.

```
{command}
```

## Scores

{table}

One seed, {n_test} test examples: a demonstration, not a measurement. F1 and exact match in percent.

## Licence

{licence}, as the base model, whose package carries their text. {notice}.

## Files

Weights are bfloat16.

```
{files}
```
"""


def main(run: Path, target: Path, machine: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    config, metrics, record = (
        read_json(path) for path in (run / "config.json", run / "metrics.json", run / "adapter" / "labkit_adapter.json")
    )
    if metrics is None or record is None:
        sys.exit(f"{run} holds no finished run with an adapter")
    plan, licence = config["plan"], REGISTRY[record["base"]].licence
    with tempfile.TemporaryDirectory(prefix=".shipping-", dir=target.parent) as beside:
        new = Path(beside) / "new"
        shutil.copytree(run / "adapter", new)
        weights = {
            name: tensor.to(torch.bfloat16) for name, tensor in load_file(new / "adapter_model.safetensors").items()
        }
        save_file(weights, new / "adapter_model.safetensors", metadata={"format": "pt"})
        if licence in NOTICES:
            (new / "NOTICE.txt").write_text(NOTICES[licence] + "\n", encoding="utf-8")
        for file in new.iterdir():
            file.chmod(0o644)
        files = "\n".join(f"{sha256(file)}  {file.name}" for file in sorted(new.iterdir()))
        options = [
            ("model", config["model"]),
            ("mask", config["mask"]),
            ("method", config["method"]),
            ("rank", config["rank"]),
        ]
        options += [
            (name, plan[name])
            for name in ("epochs", "batch_size", "gradient_accumulation", "learning_rate", "dtype", "seed")
        ]
        options += [("max_length", config["options"]["max_length"])]
        command = f"labkit train {metrics['task']} " + " \\\n  ".join(
            f"--{n.replace('_', '-')} {v}" for n, v in options
        )
        card = CARD.format(
            licence=licence, base=record["base"], name=target.name, rank=config["rank"], task=record["head"]["task"],
            trained=metrics["trained_parameters"] / 1e6, parameters=metrics["parameters"] / 1e6, folder=target.name,
            mask=metrics["mask"]["measured"], data="the embedded data of the task", n_train=metrics["n_train"],
            best_step=metrics["best_step"], steps=metrics["steps"], schedule=plan["schedule"],
            learning_rate=plan["learning_rate"], rows=plan["batch_size"] * plan["gradient_accumulation"],
            epochs=plan["epochs"], dtype=metrics["dtype"], seed=plan["seed"], minutes=metrics["seconds"] / 60,
            machine=machine, command=command, table=table(metrics), n_test=metrics["n_test"],
            notice=NOTICES.get(licence, ""), files=files,
        )  # fmt: skip
        (new / "README.md").write_text(card, encoding="utf-8")
        if target.exists():
            target.rename(Path(beside) / "old")
        new.rename(target)


def table(metrics: dict) -> str:
    lines = [f"| | dev (n = {metrics['n_dev']}) | test (n = {metrics['n_test']}) |", "|---|---:|---:|"]
    for name in SHOWN:
        if name in metrics["dev"]:
            cells = [f"{metrics[side][name]:.1f}" if name in metrics[side] else "" for side in ("dev", "test")]
            lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    for name in metrics["baselines"]["dev"]:
        cells = [f"{metrics['baselines'][side][name]:.1f}" for side in ("dev", "test")]
        lines.append(f"| baseline: {name.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) == 4 else "2 CPU cores")
