"""Save a model as a folder: weights, tokenizer, a card (README.md) and the licence files that a copy includes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from labkit import __version__
from labkit.decoder.anatomy import SLIDING, find_decoder
from labkit.files import quiet_libraries
from labkit.models.registry import NOTICES, REGISTRY, Package

WINDOWS = {
    "keep": "as far to the right as the causal model has to the left, W - 1 tokens each way, in {} layers",
    "halve": "the causal window split over both sides, as EmbeddingGemma does, in {} layers",
    "global": "none, every layer attends to the whole text",
}


def save(folder: Path, model: Any, tokenizer: Any, files: Mapping[str, bytes] | None = None) -> None:
    """Write a model, its tokenizer (if it is not None) and other files by name into `folder`, which exists."""
    with quiet_libraries():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)


def of_converted(lm: Any, window: str, layers: list[int] | None) -> dict[str, bytes]:
    """The card and licence files, by name, of the converted model `lm`; `window`, `layers`: of the conversion."""
    decoder = find_decoder(lm.model)
    count, local = len(decoder.layers), decoder.layer_types.count(SLIDING)
    name, licence, terms, files = _origin(lm)
    which = f"all {count} layers" if layers is None else f"layers {layers} of {count}; the others stay causal"
    plain = "Plain transformers loads it, but cannot express its masks: **without labkit this model may be causal**."
    if loads_in_transformers(lm.model, layers):
        plain = """\
Plain transformers (5.3 or newer) loads the folder too, and the model is then bidirectional, because `config.is_causal`
is false. Only labkit handles windows under flash attention, and several documents packed into one row."""
    text = f"""\
# {name}, made bidirectional

Made with labkit {__version__} (`labkit convert`). The weights are unchanged; only which token may attend to which is.

- **Bidirectional:** {which}
- **Window of local layers:** {WINDOWS[window if local else "global"].format(local)} (`--window {window}`)
- **From:** {lm.source.replace(lm.name, name)}
- **Licence:** {terms}. It applies to this folder as it does to the original.

The model was not trained with this mask. Its next-token predictions are worse than before, and it is not a better
encoder until it is trained with the new mask.

## Loading

`labkit.load("THIS_FOLDER")` applies the conversion that is recorded in `config.json` (`labkit_attention`) again.
{plain}

Check what you loaded, in either case: `labkit audit THIS_FOLDER`.
"""
    return files | _card(licence, text)


def of_fine_tuned(lm: Any, metrics: dict[str, Any], config: dict[str, Any]) -> dict[str, bytes]:
    """The same for a fine-tuned model, from the metrics and the config of its run: mask, training and scores."""
    sides = [side for side in ("dev", "test") if side in metrics]
    scores = [metrics[side] | {f"baseline: {k}": v for k, v in metrics["baselines"][side].items()} for side in sides]
    rows = [["", *(f"{side} (n = {metrics[f'n_{side}']:,})" for side in sides)], ["---", *["---:"] * len(sides)]]
    for name in [name for name, value in scores[0].items() if isinstance(value, float)]:
        rows.append([name.replace("_", " "), *(f"{of[name]:.3f}" if name in of else "" for of in scores)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    name, licence, terms, files = _origin(lm)
    m, rate = metrics, config["settings"]["learning_rate"]
    text = f"""\
# {name}, fine-tuned: {m["task"]}

Made with labkit {__version__} (`labkit train {m["task"]}`).

- **Mask, as measured before training:** {m["mask"]["measured"]}
- **Trained:** {m["method"]}, {m["steps"]:,} steps on {m["n_train"]:,} examples, learning rate {rate:g},
  seed {m["seed"]}; the weights are those of step {m["best_step"]} (best {m["metric"]} on dev)
- **Labels:** {", ".join(m["labels"]) or "none"}
- **Licence:** {terms}. It applies to this folder as it does to the original.

## Scores

{table}

The dev set chose the checkpoint, so its scores are optimistic. One seed; see the spread over seeds before you conclude.

## Loading

    pipe = labkit.pipeline("THIS_FOLDER")    # or: labkit predict {m["task"]} --model THIS_FOLDER --input texts.jsonl
    lm = labkit.load("THIS_FOLDER")          # the model with its head, and its mask put in force

Plain transformers finds the backbone in this folder (`AutoModel.from_pretrained`), and not the head.
"""
    return files | _card(licence, text)


def loads_in_transformers(model: Any, layers: list[int] | None) -> bool:
    """Whether plain transformers applies the mask of a converted model: in all layers, by `is_causal` alone."""
    return layers is None and not find_decoder(model).layers_ignoring_is_causal()


def _origin(lm: Any) -> tuple[str, str, str, dict[str, bytes]]:
    """The model's name without a path of this machine, its licence, the same with its files, and these."""
    name, licence, files, folder = lm.name, lm.licence, {}, Path(lm.name).expanduser()
    if registered := REGISTRY.get(lm.name):
        licence = registered.licence
        if isinstance(registered.origin, Package) and (terms := registered.origin.terms_path()):
            files[terms.name] = terms.read_bytes()
    elif folder.is_dir():
        name = folder.resolve().name
        for file in sorted(folder.iterdir()):
            if re.match("LICEN[SC]E|NOTICE|.*TERMS", file.name) and file.is_file():
                files[file.name] = file.read_bytes()
    if notice := NOTICES.get(licence):
        files.setdefault("NOTICE.txt", f"{notice}\n".encode())
    return name, licence, f"{licence} ({', '.join(files)} in this folder)" if files else licence, files


def _card(licence: str, text: str) -> dict[str, bytes]:
    data = ModelCardData(license="other", license_name=licence, library_name="transformers")
    return {"README.md": f"---\n{data}\n---\n{text}".encode()}
