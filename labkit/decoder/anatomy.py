"""Where things are in a decoder: its layer stack, its attention modules, its backend, and which layers are local.

Converting, masking and measuring all take from here how transformers builds a decoder.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from torch import nn

from labkit.errors import LabkitError, ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
CACHE_NAMES = ("cache", "past_key_values")  # the key-value cache; a call may use either name in newer transformers
CACHE = CACHE_NAMES[Version(transformers.__version__) < Version("5.24.0")]  # as models call it in this transformers
CONVERSION = "labkit_attention"  # the attribute of the text config in which a conversion is recorded


@dataclass(frozen=True)
class Decoder:
    """The part of a model that turns embeddings into hidden states.

    Attributes:
        stack: the module that builds the masks and runs the layers (`GPT2Model`, `Gemma3TextModel`, `LlamaModel`, ...).
        layers: its decoder layers, first to last.
        attentions: the self-attention module of each layer.
        names: the path of each attention module inside the model that was searched.
        callers: the modules that hold the stack, outermost first (a language-model head, PEFT, a multimodal model).
        layer_types: "full_attention" or "sliding_attention", per layer.
    """

    stack: nn.Module
    layers: tuple[nn.Module, ...]
    attentions: tuple[nn.Module, ...]
    names: tuple[str, ...]
    callers: tuple[nn.Module, ...] = ()

    @property
    def config(self):
        """The text config: the one that the masks are built from (never the outer one of a multimodal model)."""
        return self.stack.config

    @property
    def layer_types(self) -> tuple[str, ...]:
        types = getattr(self.config, "layer_types", None)
        if types:
            return tuple(types[: len(self.layers)])
        return (SLIDING if getattr(self.config, "sliding_window", None) else FULL,) * len(self.layers)

    @property
    def conversion(self) -> dict | None:
        """What `to_bidirectional` recorded: {"window", "layers", "sliding_window", "original"}; None: not converted."""
        return getattr(self.config, CONVERSION, None)

    @property
    def converted_layers(self) -> frozenset[int]:
        """The layers that the recorded conversion made bidirectional."""
        if self.conversion is None:
            return frozenset()
        layers = self.conversion["layers"]
        return frozenset(range(len(self.layers)) if layers is None else layers)

    @property
    def converted_by_flag(self) -> bool:
        """Whether transformers itself opens the layers, by `config.is_causal`; otherwise labkit hands them masks."""
        return self.conversion is not None and self.conversion["layers"] is None

    def causal_window(self, layer: int) -> int | None:
        """The window of a layer in the causal model: the token itself and those before it; None: it has none."""
        if self.layer_types[layer] != SLIDING:
            return None
        return self.conversion["sliding_window"] if self.conversion else getattr(self.config, "sliding_window", None)

    def converted_window(self, layer: int) -> int | None:
        """The window that the recorded conversion gives a layer: the token itself and those on one side; None: none."""
        window, choice = self.causal_window(layer), self.conversion["window"]
        if window is None or choice == "global":
            return None
        return window if choice == "keep" else window // 2 + 1

    def declared_window(self, layer: int) -> int | None:
        """The window that a layer is meant to have: the converted one in a converted layer, else the causal one."""
        return self.converted_window(layer) if layer in self.converted_layers else self.causal_window(layer)

    @property
    def backend(self) -> str:
        """The attention backend in use, as `backend_of` names it."""
        return backend_of(self.config)

    def arguments(self, args: tuple, kwargs: dict) -> dict:
        """All arguments of a call of the stack, by name."""
        if not args:
            return kwargs
        return dict(zip(inspect.signature(self.stack.forward).parameters, args, strict=False)) | kwargs

    def layers_ignoring_is_causal(self) -> frozenset[int]:
        """Layers that do not pass `is_causal` on to their attention (StableLM, Nemotron): tried, once per class."""
        kinds = [(type(layer), type(attention)) for layer, attention in zip(self.layers, self.attentions, strict=True)]
        first = {kind: kinds.index(kind) for kind in kinds}
        passes = {kind: _passes_is_causal(self.layers[i], self.attentions[i]) for kind, i in first.items()}
        return frozenset(i for i, kind in enumerate(kinds) if not passes[kind])

    @property
    def takes_positions(self) -> bool:
        """Whether a call can give position_ids; BART's decoder counts positions by itself, pads included."""
        return "position_ids" in inspect.signature(self.stack.forward).parameters


def find_decoder(model: nn.Module) -> Decoder:
    """The decoder inside `model`, through any wrapper (a language-model head, PEFT, a multimodal model).

    Raises:
        ModelError: no decoder stack as transformers builds them; the message names what was given. LabkitError: not a
            torch module, such as the `Loaded` of `labkit.load` in place of its `model`.
    """
    if not isinstance(model, nn.Module):
        raise LabkitError(f"expected a torch module, not {type(model).__name__}; of labkit.load give `.model`")
    decoders = []
    for path, module in model.named_modules():
        container = "layers" if isinstance(getattr(module, "layers", None), nn.ModuleList) else "h"
        layers = getattr(module, container, None)
        if not isinstance(layers, nn.ModuleList) or not len(layers) or not hasattr(module, "config"):
            continue
        named = [_self_attention(layer) for layer in layers]
        if None in named:
            continue
        prefix = f"{path}." if path else ""
        names = tuple(f"{prefix}{container}.{i}.{name}" for i, (name, _) in enumerate(named))
        parts = path.split(".") if path else []
        callers = tuple(model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
        decoders.append(Decoder(module, tuple(layers), tuple(attention for _, attention in named), names, callers))
    if len(decoders) > 1 and (config := getattr(model, "config", None)) is not None:  # images or sound have theirs
        config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        of_text = [decoder for decoder in decoders if decoder.config is config]
        decoders = of_text[:1] or [decoder for decoder in decoders if decoder.attentions[0].is_causal]
    if len(decoders) == 1:
        return decoders[0]
    raise ModelError(
        f"{type(model).__name__} holds no decoder that labkit knows: expected a transformers decoder, that is a "
        "module with a config and a list of layers (`layers` or `h`), each with a self-attention that has `is_causal`"
    )


def decoder_or_none(model: nn.Module) -> Decoder | None:
    """The decoder inside `model` as `find_decoder` finds it, or None for a model built otherwise."""
    try:
        return find_decoder(model)
    except ModelError:
        return None


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Modules of a foreign model that look like self-attention: named so, called with hidden states, not nested."""
    named = [m for m in model.modules() if "attention" in type(m).__name__.lower()]
    outer = {id(child) for m in named for child in m.modules() if child is not m}
    return [m for m in named if id(m) not in outer and not isinstance(m, nn.MultiheadAttention)]


def backend_of(config) -> str:
    """ "eager", "sdpa", "flex_attention" or "flash" (any flash attention): what this config selects at present."""
    name = config._attn_implementation or "eager"
    return "flash" if "flash" in name else name


def _passes_is_causal(layer: nn.Module, attention: nn.Module) -> bool:
    """Whether `is_causal`, given to a decoder layer, arrives at its attention, tried on one token.

    Where it cannot be tried, it counts as arriving: a conversion that depends on it is refused by its proof.
    """
    arrived = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        arrived.append("is_causal" in kwargs)

    _, _, *others = inspect.signature(type(layer).forward).parameters.values()  # self and the hidden states come first
    needed = [p.name for p in others if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    handle = attention.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            weight = next(weight for weight in layer.parameters() if weight.is_floating_point())
            hidden = weight.new_zeros(1, 1, attention.config.hidden_size)
            type(layer).forward(layer, hidden, **dict.fromkeys(needed), is_causal=False)
    except Exception:  # the layer needs more than its hidden states; its attention may have been called nevertheless
        pass
    finally:
        handle.remove()
    return all(arrived)


def _self_attention(layer: nn.Module) -> tuple[str, nn.Module] | None:
    for name, child in layer.named_children():
        is_self = not getattr(child, "is_cross_attention", False) and "cross" not in name and "encoder" not in name
        if type(child).__name__.endswith("Attention") and is_self and hasattr(child, "is_causal"):
            return name, child
    return None
