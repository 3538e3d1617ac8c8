"""Write a converted model as a folder that others can load, with a card that says what was done to it.

The folder is what `save_pretrained` writes, so plain transformers loads it. Where plain transformers cannot express
what was done (a mask for some layers only), the card says so, and `labkit.load` is the way in.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from labkit import __version__
from labkit.errors import LabkitError
from labkit.progress import bars_on_terminals_only

WINDOWS = ("keep", "halve", "global")


def export(lm: Any, output_dir: str | Path, *, window: str, layers: list[int] | None) -> Path:
    """Save the converted model `lm` (a `labkit.Loaded`), its tokenizer and a card into `output_dir`, or nothing.

    `window` and `layers` (None: all) are those of the conversion, for the card. Raises LabkitError, and touches
    nothing, if `output_dir` is a file or a folder that holds anything; the folder appears only once everything in it
    is written.
    """
    target = Path(output_dir).expanduser().absolute()
    require_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.writing-", dir=target.parent))
    try:
        with bars_on_terminals_only():
            lm.model.save_pretrained(temporary)
        if lm.tokenizer is not None:
            lm.tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(describe(lm, window=window, layers=layers), encoding="utf-8")
        for file in temporary.rglob("*"):
            file.chmod(
                0o755 if file.is_dir() else 0o644
            )  # the safetensors writer makes files that only their owner may read
        temporary.chmod(0o755)
        if target.exists():
            target.rmdir()  # empty, or this fails and nothing is lost
        temporary.rename(target)
    except OSError as error:
        raise LabkitError(
            f"{target} could not be written: {error.strerror or error}; nothing was left behind"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def require_free(target: str | Path) -> None:
    """Raise LabkitError unless `target` does not exist or is an empty folder."""
    target = Path(target).expanduser()
    if target.is_file():
        raise LabkitError(f"{target} is a file; give --output-dir a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()):
        raise LabkitError(f"{target} is not empty; give --output-dir a new folder, or empty this one yourself")


def choose_layers(choice: str, count: int) -> list[int] | None:
    """The layers meant by "all" (None), "middle-third" or "0,1,2" in a model of `count` layers; else LabkitError."""
    if choice == "all":
        return None
    if choice == "middle-third":
        return list(range(count // 3, count - count // 3))
    try:
        layers = sorted({int(part) for part in choice.split(",")})
    except ValueError:
        raise LabkitError(f"layers are {choice!r}; give all, middle-third or numbers such as 0,1,2") from None
    if layers[0] < 0 or layers[-1] >= count:
        raise LabkitError(f"layers are {choice!r}, but the model has layers 0 to {count - 1}")
    return None if len(layers) == count else layers


def describe(lm: Any, *, window: str, layers: list[int] | None) -> str:
    """The card (README.md) of an exported model: what was done, from what, which licence, and who can load it."""
    config = lm.model.config.get_text_config()
    depth = config.num_hidden_layers
    which = f"all {depth} layers"
    if layers is not None:
        which = f"layers {', '.join(map(str, layers))} of {depth}, while the others stay causal"
    return _CARD.format(
        name=lm.name,
        version=__version__,
        which=which,
        window=_window_sentence(config, window),
        source=lm.source,
        licence=lm.licence,
        loading=_SUBSET if layers is not None else _UNIFORM,
    )


def _window_sentence(config: Any, window: str) -> str:
    local = [kind for kind in getattr(config, "layer_types", None) or [] if kind == "sliding_attention"]
    if window == "global" or not local:
        return f"none, every layer sees the whole text (`--window {window}`)"
    reach = "as far to the right as the causal model looks to the left, W - 1 tokens each way"
    if window == "halve":
        reach = "the causal window split over both sides, as EmbeddingGemma does"
    return f"{reach} (`--window {window}`), in the {len(local)} local layers"


_CARD = """\
# {name}, made bidirectional

Made with labkit {version} (`labkit convert`). The weights are unchanged; only which token may attend to which is.

- **Bidirectional:** {which}
- **Window of local layers:** {window}
- **From:** {source}
- **Licence:** {licence}. It applies to this folder as it does to the original.

A model made bidirectional cannot continue a text any more (`generate()` gives nonsense), and removing the mask alone
does not make it a better encoder: it has to be trained on with its new mask.

## Loading

{loading}

Check what you loaded, in either case: `labkit audit THIS_FOLDER`.
"""

_UNIFORM = """\
Plain transformers (5.2 or newer) loads it, and it is then bidirectional, because `config.is_causal` is false:

    AutoModel.from_pretrained("THIS_FOLDER")

Two things to know about plain transformers here (`labkit.load` takes care of both):
- under flash attention a window reaches one token less far than under the other backends;
- several documents packed into one row (restarted `position_ids`, no mask) see each other once it is bidirectional."""

_SUBSET = """\
Plain transformers loads the folder but cannot express a mask for some layers only: **without labkit this model is
causal in every layer.** Load it with

    labkit.load("THIS_FOLDER")

which puts the conversion that is recorded in `config.json` (`labkit_attention`) in force again."""
