"""Convert a causal decoder to bidirectional attention and back, in place; measured before the function returns.

The route is `config.is_causal = False`: transformers (5.3 and later, for every family) then builds bidirectional masks
*and* passes the flag to the kernels, so the conversion holds with and without padding, on every backend, and in a saved
folder. labkit adds what that flag leaves open: the exact window of local layers, packed documents, learned positions
under left padding, a chosen subset of layers, and a proof.

What was done is recorded in the text config as `labkit_attention`, so that `save_pretrained` and `labkit.load` keep it.
Once this module is imported, a model that is built from a config with such a record is converted at once. A converted
model has config objects of its own: another model built from the original config is not changed.
"""

from __future__ import annotations

import copy
import functools
import re
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from numbers import Integral

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from labkit.auditing import proof
from labkit.decoder.anatomy import CONVERSION, Decoder, decoder_or_none, find_decoder
from labkit.decoder.hooks import ATTRIBUTE, LayerMasks, declared_mask, masked, set_windows
from labkit.decoder.running import replaced
from labkit.errors import ConversionError

__all__ = [
    "ConversionError", "choose_layers", "conversion_of", "masked", "prove_conversion", "to_bidirectional", "to_causal",
]  # fmt: skip

WINDOWS = ("keep", "halve", "global")
FLAGS = ("is_causal", "use_bidirectional_attention")  # of the config, which a conversion changes
_ABSENT = "absent"
_BUILT: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # the models that were built in this process


def to_bidirectional(model: nn.Module, *, window: str = "keep", layers=None) -> nn.Module:
    """Make a causal decoder bidirectional, in place; returns `model`.

    Covers every decoder whose mask transformers can open (GPT-2, Gemma, Llama and its relatives, ...), also in a task
    head, a multimodal model or a PEFT wrapper, on eager, sdpa, flex and flash attention. Calling it again with the same
    choices changes nothing and proves the conversion again; with other choices it starts from the causal model.
    `masked` and `packed` contexts are set aside for the proof.

    Args:
        window: what a local layer with a causal window of W tokens (itself and W-1 before) attends to afterwards.
            "keep": W-1 tokens on either side. "halve": W//2 on either side, as EmbeddingGemma was trained
            (transformers, `Gemma3TextConfig.use_bidirectional_attention`). "global": everything.
        layers: distinct indices of the layers to convert, or None for all. The others stay causal. Plain transformers
            cannot express that, so a saved folder needs `labkit.load`. The same is true of StableLM and Nemotron:
            they do not pass the flag on to their attention, so labkit passes them an explicit mask.

    Raises:
        ConversionError: a wrong argument, or the measured mask is not the intended one. The model is then as it was.
        ModelError: there is no decoder that labkit knows in this model.
    """
    decoder = find_decoder(model)
    chosen = _checked_layers(layers, len(decoder.layers))
    if window not in WINDOWS:
        raise ConversionError(f"window must be one of {', '.join(map(repr, WINDOWS))}, not {window!r}")
    earlier = decoder.conversion
    try:
        if earlier is None or (earlier["window"], earlier["layers"]) != (window, chosen):
            _own_configs(model, decoder)
            if earlier is not None:
                _undo(model, decoder)
            _record(decoder, window, chosen)
        _put_in_force(model, decoder)
        _prove(decoder, "bidirectional")
    except BaseException as error:
        if decoder.conversion is not None:
            _undo(model, decoder)
        if earlier is not None:
            _record(decoder, earlier["window"], earlier["layers"])
            _put_in_force(model, decoder)
        if isinstance(error, ConversionError):
            raise ConversionError(f"{error} The model was put back as it was.") from error
        raise
    return model


def to_causal(model: nn.Module) -> nn.Module:
    """Undo `to_bidirectional`, in place: the same logits bit for bit as before it, and `generate()` works again.

    A model that was never converted is left untouched, and must be causal.

    Raises:
        ConversionError: the measured mask is not causal: the model is bidirectional by other means (PaliGemma, or a
            flag in its config). The conversion is then undone all the same.
    """
    decoder = find_decoder(model)
    converted = decoder.conversion is not None
    if converted:
        _own_configs(model, decoder)
        _undo(model, decoder)
    try:
        _prove(decoder, "causal")
    except ConversionError as error:
        what = "The conversion was undone: this was so before it." if converted else "labkit has not converted it."
        raise ConversionError(f"{error} {what}") from error
    return model


def prove_conversion(model: nn.Module) -> nn.Module:
    """Measure that the conversion which `model.config` records is in force, after `from_pretrained`; returns `model`.

    Raises ConversionError if it is not. `labkit.load` calls this function.
    """
    decoder = find_decoder(model)
    if decoder.conversion is not None:
        _prove(decoder, "bidirectional")
    return model


def conversion_of(model: nn.Module) -> dict | None:
    """What labkit did to this model: {"window", "layers", "sliding_window", "original"}, or None if nothing."""
    return find_decoder(model).conversion


def choose_layers(choice: str, count: int) -> list[int] | None:
    """The layers of a model of `count` that `choice` names, None for all: the `layers` of `to_bidirectional`.

    "all", "0,1,2", or a share rounded to whole layers: "below-1/3" (next to the embeddings), "above-2/3" (next to the
    output), "middle-1/3" or "middle-third". Raises ConversionError for anything else.
    """
    if choice == "all":
        return None
    if share := re.fullmatch(r"(below|middle|above)-(\d+)/([1-9]\d*)", choice.replace("third", "1/3")):
        size = round(count * int(share[2]) / int(share[3]))
        first = {"below": 0, "middle": (count - size) // 2, "above": count - size}[share[1]]
        layers = list(range(first, first + size))
    elif re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", choice):
        layers = sorted({int(part) for part in choice.split(",")})
    else:
        raise ConversionError(
            f"layers are {choice!r}; give all, middle-third, a share such as below-1/3 or numbers such as 0,1,2"
        )
    return _checked_layers(layers, count)


def _own_configs(model: nn.Module, decoder: Decoder) -> None:
    """Give the model copies of its configs, so that no model which shares only these changes with it."""
    copies: dict = {}  # by the identity of the original: what was one config stays one
    for module in _modules_around(model, decoder):
        for name, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def _modules_around(model: nn.Module, decoder: Decoder) -> set[nn.Module]:
    """The modules of all models that hold this stack: `model` may be a part of one, or share the stack with one."""
    holders = [built for built in list(_BUILT) if any(module is decoder.stack for module in built.modules())]
    return {module for holder in (model, *holders) for module in holder.modules()}


def _generators(model: nn.Module, decoder: Decoder) -> list[nn.Module]:
    modules = _modules_around(model, decoder)
    return [m for m in modules if callable(getattr(type(m), "generate", None)) and hasattr(m, "generation_config")]


def _record(decoder: Decoder, window: str, layers: list[int] | None) -> None:
    config = decoder.config
    conversion = {
        "window": window,
        "layers": layers,
        "sliding_window": getattr(config, "sliding_window", None),
        "original": {name: copy.copy(getattr(config, name, _ABSENT)) for name in FLAGS},
    }
    setattr(config, CONVERSION, conversion)


def _put_in_force(model: nn.Module, decoder: Decoder) -> None:
    """Set the flags, the hooks, the windows and the guard on generate() as the config records the conversion."""
    config = decoder.config
    LayerMasks.on(decoder)
    if decoder.converted_by_flag:
        config.is_causal = False
        if flag := getattr(config, "use_bidirectional_attention", None):  # one flag in force, not two that add up
            config.use_bidirectional_attention = False if flag is True else None  # in Gemma 4 it is a word, or None
    set_windows(decoder)
    for module in _generators(model, decoder):
        module.generate = functools.partial(_generate_if_allowed, module)


def _undo(model: nn.Module, decoder: Decoder) -> None:
    config, conversion = decoder.config, decoder.conversion
    for name, value in conversion["original"].items():
        if value == _ABSENT:
            vars(config).pop(name, None)
        else:
            setattr(config, name, value)
    if hasattr(config, "sliding_window"):
        config.sliding_window = conversion["sliding_window"]
    delattr(config, CONVERSION)
    if (layer_masks := getattr(decoder.stack, ATTRIBUTE, None)) is not None:
        layer_masks.remove_if_idle()
    set_windows(decoder)
    for module in _generators(model, decoder):
        vars(module).pop("generate", None)


def _prove(decoder: Decoder, target: str) -> None:
    """Measure every layer's mask, with windows shrunk for the moment, and compare; raises ConversionError."""
    config, conversion = decoder.config, decoder.conversion
    windows = [window for i in range(len(decoder.layers)) if (window := decoder.causal_window(i)) is not None]
    shrunk = {"sliding_window": min(windows[0], proof.WINDOW)} if windows else {}
    if conversion is not None:
        shrunk = {CONVERSION: conversion | shrunk}
    layer_masks = getattr(decoder.stack, ATTRIBUTE, None)
    # `masked` and `packed` contexts are set aside: what is measured is the conversion alone
    alone = replaced(layer_masks, overrides=[], packings=[]) if layer_masks else nullcontext()
    try:
        with replaced(config, **shrunk), alone:
            set_windows(decoder)
            intended = [declared_mask(decoder, i) for i in range(len(decoder.layers))]
            proof.prove(decoder, intended, target)
    finally:
        set_windows(decoder)


def _checked_layers(layers, n: int) -> list[int] | None:
    if layers is None:
        return None
    given = list(layers) if isinstance(layers, Iterable) else []
    integers = all(isinstance(i, Integral) and not isinstance(i, bool) and 0 <= i < n for i in given)
    if not given or not integers or len(set(given)) != len(given):
        raise ConversionError(
            f"layers={layers!r}: expected None for all layers, or at least one of the indices 0 to {n - 1}, each once"
        )
    return None if len(given) == n else sorted(int(i) for i in given)


def _generate_if_allowed(module: nn.Module, *args, allow_bidirectional: bool = False, **kwargs):
    """`generate` of a converted model: refused, or with `allow_bidirectional=True` run without a cache."""
    if not allow_bidirectional:
        raise ConversionError(
            "this model is bidirectional: it was not trained to predict the next token from states that depend on "
            "later tokens, and each new token changes all earlier states, so its predictions are worse and a cache "
            "would be wrong. Call labkit.to_causal(model) first, or generate(..., allow_bidirectional=True) to try it"
        )
    kwargs.setdefault("use_cache", False)
    return type(module).generate(module, *args, **kwargs)


def _convert_when_built(post_init):
    """`post_init`, which transformers calls at the end of each model's constructor, and then the recorded conversion.

    Without it, a model built from a converted model's config would be half converted: its masks bidirectional, but
    packed documents not isolated and generate() not guarded.
    """

    @functools.wraps(post_init)
    def wrapped(model: PreTrainedModel) -> None:
        post_init(model)
        _BUILT.add(model)
        if getattr(model.config.get_text_config(decoder=True), CONVERSION, None) is None:
            return
        if (decoder := decoder_or_none(model)) is not None:
            _put_in_force(model, decoder)

    return wrapped


PreTrainedModel.post_init = _convert_when_built(PreTrainedModel.post_init)
