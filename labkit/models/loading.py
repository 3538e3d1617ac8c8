"""`load(name)`: one door to every model of the lab, embedded in a package, made in code, in a folder or on the hub.

lm = labkit.load("gemma3-270m")          # real weights, no network, no token
lm.model, lm.tokenizer, lm.name, lm.source, lm.licence
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import HubUnreachableError, MissingPackageError, ModelError, UnknownModelError, reading
from labkit.models import adapter_folders
from labkit.models.registry import REGISTRY, ModelCard, closest_names

if TYPE_CHECKING:
    from labkit.models.heads import Head

__all__ = ["ATTENTION_BACKENDS", "REGISTRY", "Loaded", "ModelCard", "available", "load"]

ATTENTION_BACKENDS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


@dataclass
class Loaded:
    """A model ready to use: in eval mode, its tokenizer padding on the right.

    `model` is a transformers PreTrainedModel. `source` says where the weights come from and every choice that was
    made for you; `licence` names the licence and where its text is. `tokenizer` is None only for a folder that holds
    none.
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
        for a family that loses its softcap in sdpa (Gemma 2), and `source` says so.
    dtype: a torch dtype or its name. None means float32 for tiny models and gpt2-mini, else as stored: bfloat16 for
        Gemma and SmolLM2. A processor that has no bfloat16 is several times as fast in float32 (`labkit doctor` says).
    device: "cpu", "cuda", "cuda:1"; None means the GPU if torch can use one, else the CPU.
    task: None for a language model, or for what a folder was saved as; "base" for the model without a head, which may
        be an encoder;
        "token-classification", "question-answering", "sequence-classification" or "embedding" for a head of labkit's,
        or a `labkit.models.heads.Head` that says more of it (labels, pooling, dropout, how it starts).

    The first load of an embedded model converts it once, into the user's cache. A conversion that labkit recorded in
    a saved folder is put in force again. Raises a subclass of `labkit.errors.ModelError` that says what to do.
    """
    import torch

    name = str(name_or_path)
    if attn not in (None, *ATTENTION_BACKENDS):
        raise ModelError(f"attn is {attn!r}; choose one of {', '.join(ATTENTION_BACKENDS)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = _Wanted(attn, _as_dtype(dtype), str(device), task)
    card, folder = REGISTRY.get(name), Path(name).expanduser()
    if card is None:
        if adapter_folders.is_adapter(folder):
            return replace(_load_adapter(folder, wanted), name=name)
        if folder.is_dir():
            return _load_folder(folder, name, f"the folder {name}", _licence_in(folder), wanted)
        return _load_from_hub(name, (name,), None, wanted)
    if card.package:
        return _load_embedded(card, wanted)
    if card.folder_package:
        from labkit.models.embedded import packaged_folder

        package = card.folder_package
        source = f"{package.original}, the files of its release, in the package {package.distribution}"
        return _load_folder(packaged_folder(card), name, source, card.licence, wanted)
    if card.hub_ids:
        return _load_from_hub(name, card.hub_ids, card.licence, wanted)
    if card.checkpoint:
        return _load_checkpoint(card, wanted)
    return _load_tiny(card, wanted)


def available() -> list[dict[str, Any]]:
    """One row per registered model: name, family, parameters, layers, window, licence, origin, ready, note.

    `ready` is True if it loads without a network; `note` says what is missing, or that the first load converts.
    """
    columns = ("name", "family", "parameters", "layers", "window", "licence", "origin")
    rows = []
    for card in REGISTRY.values():
        ready, note = _readiness(card)
        rows.append({column: getattr(card, column) for column in columns} | {"ready": ready, "note": note})
    return rows


@dataclass(frozen=True)
class _Wanted:
    """What the caller of `load` asked for, checked; None where the model decides."""

    attn: str | None
    dtype: Any
    device: str
    task: str | Head | None

    @property
    def may_be_encoder(self) -> bool:
        """Whether it need not be a decoder: a head of labkit's was asked for, or the body alone."""
        from labkit.models.heads import TASKS, Head

        return isinstance(self.task, Head) or self.task in ("base", *TASKS)


def _load_folder(
    folder: Path, name: str, source: str, licence: str, wanted: _Wanted, *, tokenizer: Any = None
) -> Loaded:
    """The model in `folder`, with its own tokenizer unless one is given."""
    from labkit.decoder import limits as memory
    from labkit.models import hub as hub_models

    with reading(name):
        config = hub_models.read_config(folder, name, encoders=wanted.may_be_encoder)
        kind, config = hub_models.class_for(config, wanted.task, name)
        attn, remarks = _choose_attention(kind, config, wanted.attn, name)
        hub_models.require_weights(folder, name)
        stored = memory.stored_parameters(folder)
        memory.require_memory(name, sum(stored.values()), wanted.dtype or memory.main_dtype(stored), wanted.device)
        model, remark = hub_models.read_model(folder, name, kind, config, attn=attn, dtype=wanted.dtype or "auto")
        remarks.append(remark)
        if tokenizer is None:
            tokenizer, remark = hub_models.read_tokenizer(folder, name)
            remarks.append(remark)
        model = model.to(wanted.device)
        if getattr(model.config.get_text_config(), "labkit_attention", None) is not None:  # a recorded conversion
            from labkit.convert import restore

            model = restore(model)
    return Loaded(model, tokenizer, name, "; ".join(filter(None, [source, *remarks])) + ".", licence)


def _load_embedded(card: ModelCard, wanted: _Wanted) -> Loaded:
    from labkit.models import embedded as embedded_models

    folder = embedded_models.cached_folder(card)
    source, licence = embedded_models.source_sentence(card, folder), embedded_models.licence_text(card)
    tokenizer = embedded_models.read_tokenizer(folder)
    return _load_folder(folder, card.name, source, licence, wanted, tokenizer=tokenizer)


def _load_from_hub(name: str, hub_ids: tuple[str, ...], licence: str | None, wanted: _Wanted) -> Loaded:
    """Fetch the configuration, see that it is supported and fits, and only then fetch the weights."""
    import torch

    from labkit.decoder import limits as memory
    from labkit.models import hub as hub_models

    if name not in REGISTRY:
        require_possible_hub_id(name)
    try:
        folder = hub_models.fetch(hub_ids, weights=False)
    except HubUnreachableError as error:
        close = [each for each in closest_names(name) if each != name]
        raise HubUnreachableError(f"{error}; similar names: {', '.join(close)}" if close else str(error)) from error
    with reading(name):
        config = hub_models.read_config(folder, name, encoders=wanted.may_be_encoder)
        kind, config = hub_models.class_for(config, wanted.task, name)
        _choose_attention(kind, config, wanted.attn, name)
        parameters = memory.configured_parameters(config, kind)
        memory.require_memory(name, parameters, wanted.dtype or config.dtype or torch.float32, wanted.device)
    folder = hub_models.fetch(hub_ids, weights=True)
    source = f"hub model {hub_ids[0]}, revision {folder.name[:12]}"
    return _load_folder(folder, name, source, licence or _licence_in(folder), wanted)


def _load_checkpoint(card: ModelCard, wanted: _Wanted) -> Loaded:
    import torch

    from labkit.datasets.catalogue import card_faults

    folder = _shipped(card)
    if folder is None:
        raise ModelError(
            f"the checkpoint of {card.name} is not shipped in this version of labkit; take gemma3-270m or smollm2-135m "
            "for real weights, or tiny-gpt2 for the GPT-2 architecture"
        )
    if faults := card_faults(folder):
        raise ModelError(f"{faults[0]}; restore it from the repository, or reinstall labkit")
    if adapter_folders.is_adapter(folder):
        return replace(_load_adapter(folder, wanted), name=card.name, licence=card.licence)
    if wanted.dtype is None:  # stored in half the space; CPUs are slow in float16, or cannot
        wanted = replace(wanted, dtype=torch.float32)
    source = f"{card.name}, trained by this project (card: {folder / 'README.md'})"
    return _load_folder(folder, card.name, source, card.licence, wanted)


def _load_adapter(folder: Path, wanted: _Wanted) -> Loaded:
    return adapter_folders.read(folder, attn=wanted.attn, dtype=wanted.dtype, device=wanted.device, task=wanted.task)


def _load_tiny(card: ModelCard, wanted: _Wanted) -> Loaded:
    from labkit.models import hub as hub_models
    from labkit.models import tiny as tiny_models

    config = tiny_models.tiny_config(card.name)
    kind, config = hub_models.class_for(config, wanted.task, card.name)
    attn, remarks = _choose_attention(kind, config, wanted.attn, card.name)
    model = tiny_models.build_tiny_model(card.name, attn=attn, dtype=wanted.dtype, kind=kind, config=config)
    source = (
        f"random weights, drawn in code from seed {tiny_models.SEED}: {card.name} knows nothing and shows mechanism"
    )
    tokenizer = tiny_models.build_tiny_tokenizer()
    return Loaded(model.to(wanted.device), tokenizer, card.name, "; ".join([source, *remarks]) + ".", card.licence)


def _choose_attention(model_class: type, config: Any, attn: str | None, name: str) -> tuple[str, list[str]]:
    """The attention backend, and a remark where it is not the usual one.

    torch's sdpa has no softcap: older releases of transformers drop it without a word, newer ones refuse.
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
        raise MissingPackageError(
            f"attn={attn!r} needs a CUDA GPU and the package flash-attn, which is not installed: "
            "pip install flash-attn; or take attn='sdpa'"
        )
    return attn, []


def require_possible_hub_id(name: str) -> None:
    """Raise UnknownModelError, with the closest registered names, unless `name` has the form owner/name."""
    if name.count("/") == 1 and not name.startswith((".", "~", "/")) and not name.endswith("/"):
        return
    close = closest_names(name)
    hint = f"did you mean {' or '.join(close)}?" if close else "`labkit models` lists the names that labkit knows"
    raise UnknownModelError(
        f"no model is called {name!r}: it is neither a registered name, nor a folder, nor a hub id (owner/name); {hint}"
    )


def _readiness(card: ModelCard) -> tuple[bool, str]:
    from labkit.models import embedded as embedded_models

    if card.package:
        if embedded_models.is_cached(card):
            return True, "converted"
        command = embedded_models.missing(card)
        return (False, f"run: {command}") if command else (True, "the first load converts it")
    if card.folder_package:
        there = card.folder_package.path() is not None
        return (True, "in its package") if there else (False, f"run: {card.folder_package.pip_command}")
    if card.hub_ids:
        from labkit.models.hub import cached_config

        return (True, "in the hub cache") if cached_config(card.hub_ids) else (False, "needs a network")
    if card.checkpoint:
        return (True, "shipped") if _shipped(card) else (False, "comes with a later version")
    return True, "made in code"


def _shipped(card: ModelCard) -> Path | None:
    from labkit import resources

    folder = resources.folder("data") / str(card.checkpoint).removeprefix("data/")
    whole = (folder / "config.json").is_file() or adapter_folders.is_adapter(folder)
    return folder if whole else None


def _licence_in(folder: Path) -> str:
    """What a model folder says of its licence: `license_name` or `license` of its card, or the licence file's name."""
    card = folder / "README.md"
    if card.is_file():
        lines = card.read_text(encoding="utf-8", errors="replace").splitlines()[:60]
        for key in ("license_name:", "license:"):
            if line := next((line for line in lines if line.startswith(key)), None):
                return line.removeprefix(key).strip()
    files = sorted(file.name for file in folder.glob("LICEN[SC]E*"))
    return f"see {files[0]} in the folder" if files else "not stated in the folder; ask whoever made it"


def _as_dtype(dtype: Any) -> Any:
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ModelError(f"dtype is {dtype!r}; choose float32, bfloat16 or float16")
    return found
