"""Turn a finished `labkit pretrain` run into a checkpoint that labkit ships: fp16 weights, card, sha256.

    python scripts/ship_checkpoint.py RUN data/checkpoints/gpt2-mini

Every number in the card comes from the run's config.json and metrics.json. The folder is replaced whole or not at all.
"""

# ruff: noqa: E501  (the card is text, its lines are not code)
from __future__ import annotations

import math
import sys
from pathlib import Path

from labkit.cli.train import HYPERPARAMETERS, OF_PRETRAINING
from labkit.files import sha256, write_folder
from labkit.run_folder import read_json

CARD = """---
license: apache-2.0
language: en
library_name: transformers
tags: [gpt2, causal-lm, teaching]
---
# {name}

A GPT-2 small enough to ship and large enough to have learned something: {parameters:.1f} M parameters, {layers} layers
of width {width}, context {context}, a byte-level BPE of {vocab_size:,} tokens with an end, a pad and an (untrained) mask
token. Trained from nothing by labkit, for lessons on attention masks. It writes in the manner of its texts and knows
nothing.

## Training
- Texts, in the public domain: {texts}.
  Of each, the last {held_out:.0%} was held out. Where a text came from Project Gutenberg, its header, licence and hard line
  breaks were taken out first.
- {steps:,} steps of {rows} rows of {context} tokens ({tokens:.1f} M tokens, {passes:.0f} passes over {n_train:,} tokens),
  AdamW, cosine schedule, peak learning rate {learning_rate:g}, dropout {dropout:g}, {dtype} autocast, seed {seed};
  {minutes:.0f} minutes on {machine}.
- The first half of the training read pieces of {first_length} tokens, then longer ones, and whole rows in the last fifth. At first
  {repeats:.0%} of the pieces said a passage of 4 to 64 tokens again and again, half of these passages of random tokens; the
  share fell to a tenth of that by the middle. So induction heads form in a training this short: they are partly taught,
  not found.
- The command that made it:

```
{command}
```

## Measured on the held-out parts
| text | bits per byte | nats per byte |
|---|---|---|
{scores}

For comparison: nanoGPT quotes 1.4697 nats per character for its
character-level model on tiny Shakespeare's validation split (trained on a GPU), and 1.88 for its CPU preset; a character
is a byte there. Those models read tiny Shakespeare alone, so the figures are a mark to reach and no contest. Windows of
{context} tokens advance by half of that, so each token has half a context before it.

## Files
Weights are float16 (labkit computes with them in float32). Licence of the weights: Apache-2.0.

## sha256

```
{files}
```
"""


def main(run: Path, target: Path, machine: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    metrics, config = read_json(run / "metrics.json"), read_json(run / "config.json")
    if metrics is None or config is None:
        sys.exit(f"{run} is no finished run of labkit pretrain")

    def fill(folder: Path) -> None:
        AutoModelForCausalLM.from_pretrained(run / "model").half().save_pretrained(folder)
        AutoTokenizer.from_pretrained(run / "model").save_pretrained(folder)
        digests = {file.name: sha256(file) for file in sorted(folder.iterdir())}
        (folder / "README.md").write_text(card(target.name, config, metrics, digests, machine), encoding="utf-8")

    write_folder(target, fill)
    print(f"{target}: {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.1f} MB")


def card(name: str, config: dict, metrics: dict, digests: dict, machine: str) -> str:
    shape, settings = config["shape"], config["settings"]
    rows = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    tokens = metrics["steps"] * rows * shape["context"]
    scores = [f"| {text} | {bits:.3f} | {bits * math.log(2):.3f} |" for text, bits in metrics["bits_per_byte"].items()]
    return CARD.format(
        name=name, parameters=metrics["parameters"] / 1e6, texts=", ".join(config["texts"]),
        held_out=config["held_out"],
        steps=metrics["steps"], rows=rows, tokens=tokens / 1e6, passes=tokens / metrics["n_train"],
        n_train=metrics["n_train"], learning_rate=settings["learning_rate"], dtype=settings["dtype"],
        seed=settings["seed"], minutes=metrics["seconds"] / 60, machine=machine, repeats=config["repeats"],
        first_length=config["first_length"] or shape["context"], command=command(config), scores="\n".join(scores),
        files="\n".join(f"{digest}  {file}" for file, digest in digests.items()),
        **{key: shape[key] for key in ("layers", "width", "context", "vocab_size", "dropout")},
    )  # fmt: skip


def command(config: dict) -> str:
    shape, settings = config["shape"], config["settings"]
    hyperparameters = {option: settings[HYPERPARAMETERS[option][0]] for option in OF_PRETRAINING}
    del hyperparameters["report_to"], hyperparameters["gradient_checkpointing"]
    options = shape | hyperparameters | {key: config[key] for key in ("held_out", "repeats", "first_length")}
    flags = [f"--{key.replace('_', '-')} {value}" for key, value in options.items() if value is not None]
    return " \\\n  ".join([f"labkit pretrain {' '.join(config['texts'])} --output-dir run", *flags])


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) == 4 else "2 CPU cores")
