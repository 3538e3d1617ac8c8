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


def save(folder: Path, model: Any, tokenizer: Any, files: Mapping[str, bytes] | None = None) -> None:
    """Write a model, its tokenizer (if it is not None) and other files by name into `folder`, which exists."""
    with quiet_libraries():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)


def of_converted(lm: Any, layers: list[int] | None) -> dict[str, bytes]:
    """The card and licence files, by name, of the converted model `lm`; `layers`: of the conversion."""
    decoder = find_decoder(lm.model)
    local = [i for i in decoder.converted_layers if decoder.layer_types[i] == SLIDING]
    window = decoder.converted_window(local[0]) if local else None
    reach = "to the whole text" if window is None else f"to {window - 1} tokens on either side"
    plain = "it cannot express its masks: **without labkit this model may be causal**"
    if loads_in_transformers(lm.model, layers):
        plain = "version 5.3 or newer loads it as bidirectional; only labkit handles windows under flash attention, "
        plain += "and keeps documents packed into one row apart"
    facts = {
        "Bidirectional layers": "all" if layers is None else f"{layers}; the others stay causal",
        "Attention of local layers": f"{reach} (`--window {decoder.conversion['window']}`)",
        "Training with this mask": "none, so it predicts worse than before and is not a better encoder yet",
        "Weights": f"unchanged; {lm.source}",
        "Plain transformers": plain,
        "Check": "`labkit audit THIS_FOLDER` measures the mask",
    }
    return _files(lm, "made bidirectional", "convert", facts)


def of_fine_tuned(lm: Any, metrics: dict[str, Any], config: dict[str, Any]) -> dict[str, bytes]:
    """The same for a fine-tuned model, from the metrics and the config of its run: mask, training and scores."""
    m, rate = metrics, config["settings"]["learning_rate"]
    facts = {
        "Mask, as measured before training": m["mask"]["measured"],
        "Training": f"{m['method']}, {m['steps']:,} steps on {m['n_train']:,} examples, learning rate {rate:g}, seed "
        f"{m['seed']}; the weights are those of step {m['best_step']} (best {m['metric']} on dev)",
        "Labels": ", ".join(m["labels"]) or "none",
    }
    for side in (side for side in ("dev", "test") if side in m):
        scores = m[side] | {f"baseline: {name}": value for name, value in m["baselines"][side].items()}
        numbers = [f"{name.replace('_', ' ')} {v:.3f}" for name, v in scores.items() if isinstance(v, float)]
        facts[f"Scores on {side} (n = {m[f'n_{side}']:,})"] = ", ".join(numbers)
    facts["Caution"] = "dev chose the checkpoint, so its scores are optimistic; one seed does not show the spread"
    facts["Plain transformers"] = "finds the backbone in this folder, and not the head"
    return _files(lm, f"fine-tuned: {m['task']}", f"train {m['task']}", facts)


def loads_in_transformers(model: Any, layers: list[int] | None) -> bool:
    """Whether plain transformers applies the mask of a converted model: in all layers, by `is_causal` alone."""
    return layers is None and not find_decoder(model).layers_ignoring_is_causal()


def _files(lm: Any, title: str, command: str, facts: dict[str, str]) -> dict[str, bytes]:
    """The card with these facts and the licence files; they contain no path of this machine."""
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
    facts["Licence"] = f"{licence}, which applies to this folder, too; its files are {', '.join(files) or 'not here'}"
    data = ModelCardData(license="other", license_name=licence, library_name="transformers")
    text = f"""\
---
{data}
---
# {name}, {title}

Made with labkit {__version__} (`labkit {command}`). `labkit.load("THIS_FOLDER")` loads it and puts its mask in force.

"""
    lines = "".join(f"- **{fact}:** {value.replace(lm.name, name)}\n" for fact, value in facts.items())
    return files | {"README.md": (text + lines).encode()}
