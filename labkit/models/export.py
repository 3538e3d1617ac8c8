"""Write a converted model as a folder that others can load, with a card that says what was done to it.

The folder is what `save_pretrained` writes, so plain transformers loads it. Where plain transformers cannot express
what was done (a mask for some layers only), the card says so, and `labkit.load` is the way in.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from labkit import __version__
from labkit.errors import LabkitError
from labkit.files import require_writable, write_folder
from labkit.models.registry import NOTICES, REGISTRY
from labkit.progress import bars_on_terminals_only

WINDOWS = ("keep", "halve", "global")


def export(lm: Any, output_dir: str | Path, *, window: str, layers: list[int] | None) -> Path:
    """Save the converted model `lm` (a `labkit.Loaded`), its tokenizer and a card into `output_dir`, or nothing.

    `window` and `layers` (None: all) are those of the conversion, for the card. Raises LabkitError if `output_dir` is a
    file or a folder that holds anything, and OSError if it cannot be written.
    """
    target = Path(output_dir).expanduser().absolute()
    require_free(target)
    write_folder(target, lambda folder: _write(lm, folder, window, layers))
    return target


def require_free(target: str | Path) -> None:
    """Raise LabkitError unless `target` does not exist or is an empty folder, and OSError if it cannot be written."""
    target = Path(target).expanduser()
    require_writable(target)
    if target.is_dir() and any(target.iterdir()):
        raise LabkitError(f"{target} is not empty; give --output-dir a new folder, or empty this one yourself")
    if target.exists() and not target.is_dir():
        raise LabkitError(f"{target} is a file; give --output-dir a folder that does not exist yet")


def choose_layers(choice: str, count: int) -> list[int] | None:
    """The layers meant by `choice` in a model of `count` layers, None for all of them; else LabkitError.

    "all", "middle-third", "0,1,2", or a share from one side: "below-1/3" (next to the embeddings), "above-2/3" (next to
    the output), "middle-1/3"; rounded to whole layers.
    """
    if choice == "all":
        return None
    if choice == "middle-third":
        return list(range(count // 3, count - count // 3))
    if share := re.fullmatch(r"(below|middle|above)-(\d+)/(\d+)", choice):
        return _share_of_layers(share[1], int(share[2]), int(share[3]), count)
    try:
        layers = sorted({int(part) for part in choice.split(",")})
    except ValueError:
        raise LabkitError(
            f"layers are {choice!r}; give all, middle-third, a share such as below-1/3 or numbers such as 0,1,2"
        ) from None
    if layers[0] < 0 or layers[-1] >= count:
        raise LabkitError(f"layers are {choice!r}, but the model has layers 0 to {count - 1}")
    return None if len(layers) == count else layers


def _share_of_layers(side: str, above: int, below: int, count: int) -> list[int] | None:
    chosen = round(count * above / below) if 0 < above <= below else 0
    if not chosen:
        raise LabkitError(f"{above}/{below} of {count} layers is no share to unmask; give one such as 1/3")
    first = {"below": 0, "middle": (count - chosen) // 2, "above": count - chosen}[side]
    return None if chosen == count else list(range(first, first + chosen))


def describe(lm: Any, *, window: str, layers: list[int] | None) -> str:
    """The card (README.md) of an exported model: what was done, from what, which licence, and who can load it."""
    config = lm.model.config.get_text_config()
    depth = config.num_hidden_layers
    which = f"all {depth} layers"
    if layers is not None:
        which = f"layers {', '.join(map(str, layers))} of {depth}, while the others stay causal"
    name = shown_name(lm)
    texts = ", ".join(licence_files(lm))
    return _CARD.format(
        name=name,
        version=__version__,
        which=which,
        window=_window_sentence(config, window),
        source=lm.source.replace(lm.name, name),
        licence=licence_name(lm),
        texts=f" ({texts} in this folder)" if texts else "",
        loading=_SUBSET if layers is not None else _UNIFORM if is_for_all(lm.model, layers) else _DEAF,
    )


def is_for_all(model: Any, layers: list[int] | None) -> bool:
    """Whether plain transformers gives a converted model its mask: in all layers, and none keeps the switch."""
    from labkit.decoder.anatomy import find_decoder

    return layers is None and not find_decoder(model).deaf_layers()


def _write(lm: Any, folder: Path, window: str, layers: list[int] | None) -> None:
    with bars_on_terminals_only():
        lm.model.save_pretrained(folder)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(folder)
    for name, content in licence_files(lm).items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text(describe(lm, window=window, layers=layers), encoding="utf-8")


def shown_name(lm: Any) -> str:
    """The model's name without the path that leads to it on this machine."""
    return lm.name if lm.name in REGISTRY or not Path(lm.name).expanduser().is_dir() else Path(lm.name).resolve().name


def licence_name(lm: Any) -> str:
    return REGISTRY[lm.name].licence if lm.name in REGISTRY else lm.licence


def licence_files(lm: Any) -> dict[str, bytes]:
    """What has to go along with a copy: the licence's text and its notice, by file name."""
    files, card = {}, REGISTRY.get(lm.name)
    if card and card.package and (terms := card.package.terms_path()):
        files[terms.name] = terms.read_bytes()
    if (folder := Path(lm.name).expanduser()).is_dir() and card is None:
        for pattern in ("LICEN[SC]E*", "NOTICE*", "*TERMS*"):
            files |= {file.name: file.read_bytes() for file in sorted(folder.glob(pattern)) if file.is_file()}
    if notice := NOTICES.get(licence_name(lm)):
        files.setdefault("NOTICE.txt", f"{notice}\n".encode())
    return files


def _window_sentence(config: Any, window: str) -> str:
    local = [kind for kind in getattr(config, "layer_types", None) or [] if kind == "sliding_attention"]
    if window == "global" or not local:
        return f"none, every layer sees the whole text (`--window {window}`)"
    reach = "as far to the right as the causal model looks to the left, W - 1 tokens each way"
    if window == "halve":
        reach = "the causal window split over both sides, as EmbeddingGemma does"
    return f"{reach} (`--window {window}`), in the {len(local)} local layers"


_CARD = """\
---
license: other
license_name: {licence}
library_name: transformers
---
# {name}, made bidirectional

Made with labkit {version} (`labkit convert`). The weights are unchanged; only which token may attend to which is.

- **Bidirectional:** {which}
- **Window of local layers:** {window}
- **From:** {source}
- **Licence:** {licence}{texts}. It applies to this folder as it does to the original.

A model made bidirectional was not trained to continue a text (its next-token predictions are worse), and removing the
mask alone does not make it a better encoder: it has to be trained on with its new mask.

## Loading

{loading}

Check what you loaded, in either case: `labkit audit THIS_FOLDER`.
"""

_UNIFORM = """\
Plain transformers (5.3 or newer) loads it, and it is then bidirectional, because `config.is_causal` is false:

    AutoModel.from_pretrained("THIS_FOLDER")

Two things to know about plain transformers here (`labkit.load` takes care of both):
- under flash attention a window reaches one token less far than under the other backends;
- several documents packed into one row (restarted `position_ids`, no mask) see each other once it is bidirectional."""

_DEAF = """\
Plain transformers loads the folder, but the layers of this family keep its switch from their attention:
**without labkit this model may be causal**, under sdpa wherever no row is padded. Load it with

    labkit.load("THIS_FOLDER")

which puts the conversion that is recorded in `config.json` (`labkit_attention`) in force again."""

_SUBSET = """\
Plain transformers loads the folder but cannot express a mask for some layers only: **without labkit this model is
causal in every layer.** Load it with

    labkit.load("THIS_FOLDER")

which puts the conversion that is recorded in `config.json` (`labkit_attention`) in force again."""
