"""The folder of a fine-tuned model: weights, tokenizer, licence files, and a card that says what it scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit import __version__
from labkit.models.export import licence_files, licence_name, shown_name
from labkit.progress import bars_on_terminals_only
from labkit.run_folder import RunFolder

_SHOWN = ("f1", "best_f1", "exact_match", "precision", "recall", "token_accuracy", "accuracy")
_SHOWN += ("spearman", "mean_reciprocal_rank")


def save(lm: Any, run: RunFolder, metrics: dict[str, Any], config: dict[str, Any]) -> Path:
    """Write `model/` of the run, whole or not at all."""

    def fill(folder: Path) -> None:
        lm.model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
        for name, content in licence_files(lm).items():
            (folder / name).write_bytes(content)
        (folder / "README.md").write_text(card(lm, metrics, config), encoding="utf-8")

    with bars_on_terminals_only():
        return run.write_folder("model", fill)


def card(lm: Any, metrics: dict[str, Any], config: dict[str, Any]) -> str:
    """README.md: from what, on what, with which mask, and the scores beside the baselines."""
    texts = ", ".join(licence_files(lm))
    plan = config["plan"]
    return _CARD.format(
        licence=licence_name(lm),
        texts=f" ({texts} in this folder)" if texts else "",
        name=shown_name(lm),
        task=metrics["task"],
        version=__version__,
        mask=metrics["mask"]["measured"],
        method=metrics["method"],
        steps=metrics["steps"],
        best=metrics.get("best_step"),
        rate=plan["learning_rate"],
        seed=plan["seed"],
        n=metrics["n_train"],
        metric=metrics["metric"],
        labels=", ".join(metrics["labels"]) or "none",
        table=_table(metrics),
    )


def _table(metrics: dict[str, Any]) -> str:
    sides = [side for side in ("dev", "test") if side in metrics]
    names = [name for name in _SHOWN if name in metrics[sides[0]]] if sides else []
    lines = ["| | " + " | ".join(f"{side} (n = {metrics[f'n_{side}']:,})" for side in sides) + " |"]
    lines.append("|---|" + "---:|" * len(sides))
    for name in names:
        cells = " | ".join(f"{metrics[side][name]:.3f}" if name in metrics[side] else "" for side in sides)
        lines.append(f"| {name.replace('_', ' ')} | {cells} |")
    for name in metrics["baselines"].get(sides[0], {}) if sides else ():
        cells = " | ".join(f"{metrics['baselines'][side][name]:.3f}" for side in sides)
        lines.append(f"| baseline: {name.replace('_', ' ')} | {cells} |")
    return "\n".join(lines)


_CARD = """\
---
license: other
license_name: {licence}
library_name: transformers
---
# {name}, fine-tuned: {task}

Made with labkit {version} (`labkit train {task}`).

- **Mask, as measured before training:** {mask}
- **Trained:** {method}, {steps:,} steps on {n:,} examples, learning rate {rate:g}, seed {seed};
  the weights are those of step {best} (best {metric} on dev)
- **Labels:** {labels}
- **Licence:** {licence}{texts}. It applies to this folder as it does to the original.

## Scores

{table}

The dev set chose the checkpoint, so its scores are optimistic. One seed; see the spread over seeds before you conclude.

## Loading

    pipe = labkit.pipeline("THIS_FOLDER")        # or: labkit predict {task} --model THIS_FOLDER --input texts.jsonl
    lm = labkit.load("THIS_FOLDER")              # the model with its head, and its mask put in force

Plain transformers finds the backbone in this folder (`AutoModel.from_pretrained`), and not the head.
"""
