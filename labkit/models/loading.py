"""`load(name)` for every model: in a package, shipped, made in code, in a folder or on the hub.

lm = labkit.load("gemma3-270m")          # real weights, no network, no token
lm.model, lm.tokenizer, lm.name, lm.source, lm.licence
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from labkit.errors import ModelError, reading
from labkit.files import sha256
from labkit.models.registry import (
    REGISTRY,
    Checkpoint,
    FolderPackage,
    GgufPackage,
    Hub,
    InCode,
    ModelCard,
    closest_names,
)

if TYPE_CHECKING:
    from labkit.models.heads import Head

ATTENTION_BACKENDS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


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
        parameters = sum(p.numel() for p in self.model.parameters())
        return (
            f"Loaded({self.name!r}: {type(self.model).__name__}, {parameters / 1e6:,.1f} M parameters)\n{self.source}"
        )


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
        be an encoder; "token-classification", "question-answering", "sequence-classification" or "embedding" for a
        head of labkit's, or a `labkit.models.heads.Head` that also gives labels, pooling, dropout and initialisation.

    The first load of a model from a GGUF package converts it once, into the user's cache. A conversion that labkit
    recorded in a saved folder is applied again. Raises `labkit.errors.ModelError`, whose message says what to do.
    """
    import torch

    name = str(name_or_path)
    if attn not in (None, *ATTENTION_BACKENDS):
        raise ModelError(f"attn is {attn!r}; choose one of {', '.join(ATTENTION_BACKENDS)}")
    asked = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(asked, torch.dtype) and asked.is_floating_point):
        raise ModelError(f"dtype is {dtype!r}; choose float32, bfloat16 or float16")
    options = _Options(attn, asked, str(device or ("cuda" if torch.cuda.is_available() else "cpu")), task)
    card = REGISTRY.get(name) or _unregistered(name)
    return _LOADERS[type(card.origin)](card, options)


def available() -> list[dict[str, Any]]:
    """One row per registered model: name, family, parameters, layers, window, licence, origin, ready, note.

    `ready` is True if it loads without a network; `note` says what is missing, or that the first load converts.
    """
    columns = ("name", "family", "parameters", "layers", "window", "licence")
    rows = []
    for card in REGISTRY.values():
        ready, note = card.origin.readiness(card.name)
        rows.append(
            {column: getattr(card, column) for column in columns}
            | {"origin": str(card.origin), "ready": ready, "note": note}
        )
    return rows


@dataclass(frozen=True)
class _Options:
    """The arguments of `load`, checked; None where the model decides."""

    attn: str | None
    dtype: Any
    device: str
    task: str | Head | None


@dataclass(frozen=True)
class _Folder:
    path: Path


@dataclass(frozen=True)
class _Adapter:
    path: Path


def _unregistered(name: str) -> ModelCard:
    """A card for a folder, an adapter or a hub id. Raises ModelError, with similar names, for anything else."""
    from labkit.models import adapters

    folder = Path(name).expanduser()
    if folder.is_dir():
        origin = _Adapter(folder) if adapters.is_adapter(folder) else _Folder(folder)
        return ModelCard(name, "", 0, 0, None, _licence_in(folder), origin)
    if name.count("/") == 1 and not name.startswith((".", "~", "/")) and not name.endswith("/"):
        return ModelCard(name, "", 0, 0, None, "", Hub((name,)))
    similar = closest_names(name)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "`labkit models` lists the names that labkit knows"
    raise ModelError(
        f"no model is called {name!r}: it is neither a registered name, nor a folder, nor a hub id (owner/name); {hint}"
    )


# ---- one loader for each kind of origin ------------------------------------------------------------------------------


def _load_gguf(card: ModelCard, options: _Options) -> Loaded:
    from labkit.models import cache

    package: GgufPackage = card.origin
    folder = cache.obtain(card.name, package.identity, lambda folder: _convert(card, folder))
    stored_as = cache.read_manifest(folder)["facts"]["stored_as"]
    shares = sorted(((n / sum(stored_as.values()), kind) for kind, n in stored_as.items()), reverse=True)
    source = (
        f"{package.original}, rebuilt in bfloat16 from the {package.quantisation} quantised weights in the package "
        f"{package.distribution} (parameters stored as "
        f"{', '.join(f'{share:.0%} {kind}' for share, kind in shares if share >= 0.01)}): close to the original "
        "release but not bit-equal to it, so do not quote its scores as those of the original"
    )
    return _read_folder(folder, card.name, source, _licence_text(card), options)


def _convert(card: ModelCard, folder: Path) -> dict[str, Any]:
    """Convert the GGUF file of a package, in one piece or joined from its parts, into `folder`."""
    package: GgufPackage = card.origin
    if not package.is_installed():
        raise _not_installed(card)
    from labkit.models.gguf import convert_gguf

    parts = package.part_paths()
    print(f"labkit: converting {card.name}, once. Its licence: {_licence_text(card)}", file=sys.stderr, flush=True)
    with TemporaryDirectory(dir=folder.parent) if len(parts) > 1 else nullcontext() as temporary:
        file = parts[0]
        if temporary:
            file = Path(temporary, "joined.gguf")
            with file.open("wb") as whole:
                for part in parts:
                    with part.open("rb") as piece:
                        shutil.copyfileobj(piece, whole, 16 << 20)
        _require_sha256(file, package.sha256, package)
        return {"stored_as": convert_gguf(file, folder)}


def _load_packaged(card: ModelCard, options: _Options) -> Loaded:
    package: FolderPackage = card.origin
    folder = package.path()
    if folder is None:
        raise _not_installed(card)
    for name, recorded in package.sha256.items():
        _require_sha256(folder / name, recorded, package)
    source = f"{package.original}, the files of its release, in the package {package.distribution}"
    return _read_folder(folder, card.name, source, card.licence, options)


def _load_hub(card: ModelCard, options: _Options) -> Loaded:
    """Fetch the configuration, check that it is supported and fits, and only then fetch the weights."""
    import torch

    from labkit.decoder import limits
    from labkit.models import hub

    folder = hub.fetch(card.origin.ids, weights=False)
    with reading(card.name):
        config = hub.read_config(folder, card.name, encoders=options.task is not None)
        kind, config = hub.class_for(config, options.task, card.name)
        choose_attention(kind, config, options.attn, card.name)
        dtype = options.dtype or config.dtype or torch.float32
        limits.require_memory_for_model(card.name, limits.configured_parameters(config, kind), dtype, options.device)
    folder = hub.fetch(card.origin.ids, weights=True)
    source = f"hub model {card.origin.ids[0]}, revision {folder.name[:12]}"
    return _read_folder(folder, card.name, source, card.licence or _licence_in(folder), options)


def _load_checkpoint(card: ModelCard, options: _Options) -> Loaded:
    import torch

    from labkit.datasets.catalogue import card_faults

    folder = card.origin.path()
    if not folder.is_dir():
        raise ModelError(f"{folder} is missing: the installation is incomplete; reinstall labkit")
    if faults := card_faults(folder):
        raise ModelError(f"{faults[0]}; restore it from the repository, or reinstall labkit")
    # stored in half the space; CPUs are slow in float16, or have no kernels for it
    options = replace(options, dtype=options.dtype or torch.float32)
    source = f"{card.name}, trained by this project (card: {folder / 'README.md'})"
    return _read_folder(folder, card.name, source, card.licence, options)


def _load_in_code(card: ModelCard, options: _Options) -> Loaded:
    from labkit.models import hub, tiny

    kind, config = hub.class_for(tiny.tiny_config(card.name), options.task, card.name)
    attn, remarks = choose_attention(kind, config, options.attn, card.name)
    model = tiny.build_tiny_model(card.name, attn=attn, dtype=options.dtype, kind=kind, config=config)
    source = f"random weights, drawn in code from seed {tiny.SEED}: {card.name} is untrained and shows mechanism only"
    source = "; ".join([source, *remarks]) + "."
    return Loaded(model.to(options.device), tiny.build_tiny_tokenizer(), card.name, source, card.licence)


def _load_folder(card: ModelCard, options: _Options) -> Loaded:
    return _read_folder(card.origin.path, card.name, f"the folder {card.name}", card.licence, options)


def _load_adapter(card: ModelCard, options: _Options) -> Loaded:
    from labkit.models import adapters

    chosen = {"task": options.task, "attn": options.attn, "dtype": options.dtype, "device": options.device}
    lm = adapters.read(card.origin.path, load, **chosen)
    return replace(lm, name=card.name)


_LOADERS: dict[type, Callable[[ModelCard, _Options], Loaded]] = {
    GgufPackage: _load_gguf,
    FolderPackage: _load_packaged,
    Hub: _load_hub,
    Checkpoint: _load_checkpoint,
    InCode: _load_in_code,
    _Folder: _load_folder,
    _Adapter: _load_adapter,
}


# ---- what they share -------------------------------------------------------------------------------------------------


def _read_folder(folder: Path, name: str, source: str, licence: str, options: _Options) -> Loaded:
    from labkit.decoder import limits
    from labkit.models import hub

    with reading(name):
        config = hub.read_config(folder, name, encoders=options.task is not None)
        kind, config = hub.class_for(config, options.task, name)
        attn, remarks = choose_attention(kind, config, options.attn, name)
        hub.require_weights(folder, name)
        parameters, stored = limits.stored_weights(folder)
        limits.require_memory_for_model(name, parameters, options.dtype or stored, options.device)
        model, head_remark = hub.read_model(folder, name, kind, config, attn=attn, dtype=options.dtype or "auto")
        tokenizer, tokenizer_remark = hub.read_tokenizer(folder, name)
        model = model.to(options.device)
        if getattr(model.config.get_text_config(), "labkit_attention", None) is not None:  # a recorded conversion
            from labkit.convert import restore

            model = restore(model)
    source = "; ".join(filter(None, [source, *remarks, head_remark, tokenizer_remark])) + "."
    return Loaded(model, tokenizer, name, source, licence)


def choose_attention(model_class: type, config: Any, attn: str | None, name: str) -> tuple[str, list[str]]:
    """The attention backend, and a remark if it is not the default.

    torch's sdpa has no softcap: older releases of transformers ignore it without a warning, newer ones refuse.
    """
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    supported = {
        "eager": True,
        "sdpa": getattr(model_class, "_supports_sdpa", False) and not softcap,
        "flex_attention": getattr(model_class, "_supports_flex_attn", False),
    }
    if attn is None:
        if supported["sdpa"]:
            return "sdpa", []
        cause = "its softcap is lost in sdpa" if softcap else f"{model_class.__name__} has no sdpa"
        return "eager", [f"eager attention, as {cause}"]
    if not supported.get(attn, True):
        others = " or ".join(backend for backend, works in supported.items() if works)
        cause = ", which would lose its softcap" if softcap and attn == "sdpa" else ""
        raise ModelError(f"{name} ({model_class.__name__}) cannot use attn={attn!r}{cause}; take {others}")
    if attn == "flash_attention_2" and find_spec("flash_attn") is None:
        raise ModelError(
            f"attn={attn!r} needs a CUDA GPU and the package flash-attn, which is not installed: "
            "pip install flash-attn; or take attn='sdpa'"
        )
    return attn, []


def _not_installed(card: ModelCard) -> ModelError:
    return ModelError(
        f"the weights of {card.name}, or the package that reads them, are not installed; run: "
        f"{card.origin.pip_command}",
        kind="not installed",
    )


def _require_sha256(file: Path, recorded: str, package: GgufPackage | FolderPackage) -> None:
    if not file.is_file() or sha256(file) != recorded:
        problem = "is missing" if not file.is_file() else "has another sha256 than its release"
        raise ModelError(
            f"the weights in {package.distribution} are damaged ({file.name} {problem}); reinstall them: "
            f"{package.pip_command} --force-reinstall"
        )


def _licence_text(card: ModelCard) -> str:
    """The licence's name, and where its text is on this machine."""
    terms = card.origin.terms_path()
    return f"{card.licence}; full text in {terms}" if terms else card.licence


def _licence_in(folder: Path) -> str:
    """The licence of a model folder: `license_name` or `license` of its card, or the name of the licence file."""
    card = folder / "README.md"
    if card.is_file():
        lines = card.read_text(encoding="utf-8", errors="replace").splitlines()[:60]
        for key in ("license_name:", "license:"):
            if line := next((line for line in lines if line.startswith(key)), None):
                return line.removeprefix(key).strip()
    files = sorted(file.name for file in folder.glob("LICEN[SC]E*"))
    return f"see {files[0]} in the folder" if files else "not stated in the folder; ask whoever made it"
