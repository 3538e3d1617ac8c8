"""Write a converted model as a folder that others can load, with a card that describes the conversion.

Plain transformers loads the folder. Where it cannot express the conversion (a mask for some layers only), the card
refers to `labkit.load`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from labkit import __version__
from labkit.errors import LabkitError
from labkit.files import quiet_libraries, require_writable, write_folder
from labkit.models.registry import NOTICES, REGISTRY, Package

WINDOWS = {
    "keep": "as far to the right as the causal model has to the left, W - 1 tokens each way",
    "halve": "the causal window split over both sides, as EmbeddingGemma does",
    "global": "none, every layer attends to the whole text",
}


def export(lm: Any, output_dir: str | Path, *, window: str, layers: list[int] | None) -> Path:
    """Save the converted model `lm` (a `labkit.Loaded`), its tokenizer and a card into `output_dir`, or nothing.

    `window` and `layers` (None: all) are those of the conversion, for the card. Raises LabkitError if `output_dir` is a
    file or a folder that is not empty, and OSError if it cannot be written.
    """
    target = Path(output_dir).expanduser().absolute()
    require_free(target)

    def write(folder: Path) -> None:
        with quiet_libraries():
            lm.model.save_pretrained(folder)
        if lm.tokenizer is not None:
            lm.tokenizer.save_pretrained(folder)
        for name, content in licence_files(lm).items():
            (folder / name).write_bytes(content)
        (folder / "README.md").write_text(_card(lm, window, layers), encoding="utf-8")

    write_folder(target, write)
    return target


def require_free(target: str | Path) -> None:
    """Raise LabkitError unless `target` does not exist or is an empty folder, and OSError if it cannot be written."""
    target = Path(target).expanduser()
    require_writable(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise LabkitError(f"{target} exists and is not empty; give --output-dir a new or an empty folder")


def choose_layers(choice: str, count: int) -> list[int] | None:
    """The layers meant by `choice` in a model of `count` layers, None for all of them; else LabkitError.

    "all", "middle-third", "0,1,2", or a share from one side: "below-1/3" (next to the embeddings), "above-2/3" (next to
    the output), "middle-1/3"; rounded to whole layers.
    """
    if choice == "all":
        return None
    if choice == "middle-third":
        layers = list(range(count // 3, count - count // 3))
    elif share := re.fullmatch(r"(below|middle|above)-(\d+)/(\d+)", choice):
        size = round(count * int(share[2]) / max(int(share[3]), 1))
        first = {"below": 0, "middle": (count - size) // 2, "above": count - size}[share[1]]
        layers = list(range(first, first + size))
    elif re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", choice):
        layers = sorted({int(part) for part in choice.split(",")})
    else:
        raise LabkitError(
            f"layers are {choice!r}; give all, middle-third, a share such as below-1/3 or numbers such as 0,1,2"
        )
    if not layers or layers[0] < 0 or layers[-1] >= count:
        raise LabkitError(f"layers are {choice!r}, but the model has layers 0 to {count - 1}")
    return None if len(layers) == count else layers


def loads_in_transformers(model: Any, layers: list[int] | None) -> bool:
    """Whether plain transformers applies the mask of a converted model: in all layers, by `is_causal` alone."""
    from labkit.decoder.anatomy import find_decoder

    return layers is None and not find_decoder(model).layers_ignoring_is_causal()


def shown_name(lm: Any) -> str:
    """The model's name without the path of its folder on this machine."""
    return lm.name if lm.name in REGISTRY or not Path(lm.name).expanduser().is_dir() else Path(lm.name).resolve().name


def licence_name(lm: Any) -> str:
    return REGISTRY[lm.name].licence if lm.name in REGISTRY else lm.licence


def licence_files(lm: Any) -> dict[str, bytes]:
    """The files that every copy has to include: the licence's text and its notice, by file name."""
    files, card = {}, REGISTRY.get(lm.name)
    if card is None and (folder := Path(lm.name).expanduser()).is_dir():
        for pattern in ("LICEN[SC]E*", "NOTICE*", "*TERMS*"):
            files |= {file.name: file.read_bytes() for file in sorted(folder.glob(pattern)) if file.is_file()}
    elif card and isinstance(card.origin, Package) and (terms := card.origin.terms_path()):
        files[terms.name] = terms.read_bytes()
    if notice := NOTICES.get(licence_name(lm)):
        files.setdefault("NOTICE.txt", f"{notice}\n".encode())
    return files


def _card(lm: Any, window: str, layers: list[int] | None) -> str:
    """The card (README.md) of an exported model: the conversion, the original, the licence, and how to load it."""
    config, name, texts = lm.model.config.get_text_config(), shown_name(lm), ", ".join(licence_files(lm))
    which = f"all {config.num_hidden_layers} layers"
    if layers is not None:
        which = f"layers {', '.join(map(str, layers))} of {config.num_hidden_layers}; the others stay causal"
    local = (getattr(config, "layer_types", None) or []).count("sliding_attention")
    windows = (
        WINDOWS["global"] if window == "global" or not local else f"{WINDOWS[window]}, in the {local} local layers"
    )
    data = ModelCardData(license="other", license_name=licence_name(lm), library_name="transformers")
    return str(
        ModelCard.from_template(
            data, template_str=_CARD, name=name, version=__version__, which=which, windows=windows, window=window,
            source=lm.source.replace(lm.name, name), licence=licence_name(lm),
            texts=f" ({texts} in this folder)" if texts else "",
            loading=_PLAIN if loads_in_transformers(lm.model, layers) else _LABKIT,
        )
    )  # fmt: skip


_CARD = """\
---
{{ card_data }}
---
# {{ name }}, made bidirectional

Made with labkit {{ version }} (`labkit convert`). The weights are unchanged; only which token may attend to which is.

- **Bidirectional:** {{ which }}
- **Window of local layers:** {{ windows }} (`--window {{ window }}`)
- **From:** {{ source }}
- **Licence:** {{ licence }}{{ texts }}. It applies to this folder as it does to the original.

The model was not trained with this mask. Its next-token predictions are worse than before, and it is not a better
encoder until it is trained with the new mask.

## Loading

{{ loading }}

Check what you loaded, in either case: `labkit audit THIS_FOLDER`.
"""

_PLAIN = """\
Plain transformers (5.3 or newer) loads it, and it is then bidirectional, because `config.is_causal` is false:

    AutoModel.from_pretrained("THIS_FOLDER")

`labkit.load` also handles two cases that plain transformers does not:
- under flash attention a window reaches one token less far than under the other backends;
- several documents packed into one row (restarted `position_ids`, no mask) attend to each other."""

_LABKIT = """\
Plain transformers loads the folder, but cannot express its masks: **without labkit this model may be causal**.
Load it with

    labkit.load("THIS_FOLDER")

which applies the conversion that is recorded in `config.json` (`labkit_attention`) again."""
