"""The model card of a fine-tuned model."""

from __future__ import annotations

from typing import Any

from labkit import __version__
from labkit.models.export import licence_files, licence_name, shown_name

_SHOWN = ("f1", "best_f1", "exact_match", "precision", "recall", "token_accuracy", "accuracy")
_SHOWN += ("spearman", "mean_reciprocal_rank")


def files(lm: Any, metrics: dict[str, Any], config: dict[str, Any]) -> list[tuple[str, bytes]]:
    """README.md (from what, on what, with which mask, and the scores beside the baselines) and the licence files."""
    licences = licence_files(lm)
    text = _CARD.format(
        licence=licence_name(lm),
        texts=f" ({', '.join(licences)} in this folder)" if licences else "",
        name=shown_name(lm),
        version=__version__,
        measured=metrics["mask"]["measured"],
        rate=config["settings"]["learning_rate"],
        names=", ".join(metrics["labels"]) or "none",
        table=_table(metrics),
        **metrics,
    )
    return [*licences.items(), ("README.md", text.encode())]


def _table(metrics: dict[str, Any]) -> str:
    sides = [side for side in ("dev", "test") if side in metrics]
    rows = {name: [metrics[side].get(name) for side in sides] for name in _SHOWN if name in metrics["dev"]}
    rows |= {
        f"baseline: {name}": [metrics["baselines"][s][name] for s in sides] for name in metrics["baselines"]["dev"]
    }
    lines = ["| | " + " | ".join(f"{side} (n = {metrics[f'n_{side}']:,})" for side in sides) + " |"]
    lines.append("|---|" + "---:|" * len(sides))
    for name, scores in rows.items():
        cells = " | ".join("" if score is None else f"{score:.3f}" for score in scores)
        lines.append(f"| {name.replace('_', ' ')} | {cells} |")
    return "\n".join(lines)


_CARD = """\
---
license: other
license_name: {licence}
library_name: transformers
---
# {name}, fine-tuned: {task}

Made with labkit {version} (`labkit train {task}`).

- **Mask, as measured before training:** {measured}
- **Trained:** {method}, {steps:,} steps on {n_train:,} examples, learning rate {rate:g}, seed {seed};
  the weights are those of step {best_step} (best {metric} on dev)
- **Labels:** {names}
- **Licence:** {licence}{texts}. It applies to this folder as it does to the original.

## Scores

{table}

The dev set chose the checkpoint, so its scores are optimistic. One seed; see the spread over seeds before you conclude.

## Loading

    pipe = labkit.pipeline("THIS_FOLDER")        # or: labkit predict {task} --model THIS_FOLDER --input texts.jsonl
    lm = labkit.load("THIS_FOLDER")              # the model with its head, and its mask put in force

Plain transformers finds the backbone in this folder (`AutoModel.from_pretrained`), and not the head.
"""
