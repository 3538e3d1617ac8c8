"""Convert a causal decoder to bidirectional attention and back, in place; measured before the function returns.

The route is `config.is_causal = False`: transformers (5.3 and later, for every family) then builds bidirectional masks
*and* passes the flag to the kernels, so the conversion holds with and without padding, on every backend, and in a saved
folder. labkit adds what that switch leaves open: the exact window of local layers, packed documents, learned positions
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
from labkit.decoder.anatomy import SLIDING, Decoder, backend_of, decoder_or_none, find_decoder
from labkit.decoder.hooks import ATTRIBUTE, LayerMasks, layer_mask, masked
from labkit.errors import ConversionError
from labkit.masks import causal
from labkit.masks import sliding_window as sliding

__all__ = ["ConversionError", "choose_layers", "conversion_of", "masked", "restore", "to_bidirectional", "to_causal"]

MARK = "labkit_attention"  # the record of a conversion, in the text config
WINDOWS = ("keep", "halve", "global")
NO_WINDOW = 2**30  # a window no sequence reaches; the mask builder of a local layer needs a number
_ABSENT = "absent"
_BUILT: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # the models that were built in this process


def to_bidirectional(model: nn.Module, *, window: str = "keep", layers=None) -> nn.Module:
    """Make a causal decoder bidirectional, in place; returns `model`.

    Covers every decoder that transformers can switch (GPT-2, Gemma 1, 2 and 3, Llama and its relatives, ...), also in
    a task head, a multimodal model or a PEFT wrapper, on eager, sdpa, flex and flash attention. Calling it again with
    the same choices changes nothing and proves the conversion again; with other choices it starts from the causal
    model. `masked` and `packed` contexts are set aside for the proof.

    Args:
        window: what a local layer with a causal window of W tokens (itself and W-1 before) attends to afterwards.
            "keep": W-1 tokens on either side. "halve": W//2 on either side, as EmbeddingGemma was trained
            (transformers, `Gemma3TextConfig.use_bidirectional_attention`). "global": everything.
        layers: distinct indices of the layers to convert, or None for all. The others stay causal. Plain transformers
            cannot express that, so a saved folder needs `labkit.load`. The same is true of StableLM and Nemotron:
            they do not pass the switch on to their attention, so labkit passes them an explicit mask.

    Raises:
        ConversionError: a wrong argument, or the measured mask is not the intended one. The model is then as it was.
        ModelError: there is no decoder that labkit knows in this model.
    """
    decoder = find_decoder(model)
    chosen = _checked_layers(layers, len(decoder.layers))
    if window not in WINDOWS:
        raise ConversionError(f"window must be one of {', '.join(map(repr, WINDOWS))}, not {window!r}")
    earlier = conversion_of(model)
    try:
        if earlier is not None and (earlier["window"], earlier["layers"]) != (window, chosen):
            _own_configs(model, decoder)
            _undo(model, decoder)
        if conversion_of(model) is None:
            _own_configs(model, decoder)
            _record(decoder, window, chosen)
        _put_in_force(model, decoder)
        _prove(decoder, "bidirectional")
    except BaseException as error:
        if conversion_of(model) is not None:
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
            switch in its config). The conversion is then undone all the same.
    """
    decoder = find_decoder(model)
    mark = conversion_of(model)
    if mark is not None:
        _own_configs(model, decoder)
        _undo(model, decoder)
    try:
        _prove(decoder, "causal")
    except ConversionError as error:
        what = "labkit has not converted it." if mark is None else "The conversion was undone: this was so before it."
        raise ConversionError(f"{error} {what}") from error
    return model


def restore(model: nn.Module) -> nn.Module:
    """Prove that the conversion which `model.config` records is in force, after `from_pretrained`; `load` does so."""
    decoder = find_decoder(model)
    if conversion_of(model) is not None:
        _put_in_force(model, decoder)
        _prove(decoder, "bidirectional")
    return model


def conversion_of(model: nn.Module) -> dict | None:
    """What labkit did to this model: {"window", "layers", "sliding_window", "original"}, or None if nothing."""
    return getattr(find_decoder(model).config, MARK, None)


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


def _record(decoder: Decoder, window: str, chosen: list[int] | None) -> None:
    config = decoder.config
    names = ("is_causal", "sliding_window", "use_bidirectional_attention")
    original = {name: copy.copy(getattr(config, name, _ABSENT)) for name in names}
    sliding_window = getattr(config, "sliding_window", None)
    setattr(config, MARK, {"window": window, "layers": chosen, "sliding_window": sliding_window, "original": original})


def _put_in_force(model: nn.Module, decoder: Decoder) -> None:
    """Config, hooks, windows and the guard on generate(), from the record in the config."""
    config, mark = decoder.config, getattr(decoder.config, MARK)
    layer_masks = LayerMasks.on(decoder)
    layer_masks.positions_from_mask = decoder.has_position_table and decoder.takes_positions
    if mark["layers"] is None:
        config.is_causal = False
        layer_masks.where_none = layer_masks.without_flag
        if switch := getattr(config, "use_bidirectional_attention", None):  # one switch in force, not two that add up
            config.use_bidirectional_attention = False if switch is True else None  # in Gemma 4 it is a word, or None
    else:
        layer_masks.always = frozenset(mark["layers"])
    _set_windows(decoder, mark["sliding_window"])
    for module in _generators(model, decoder):
        module.generate = functools.partial(_generate_if_allowed, module)


def _undo(model: nn.Module, decoder: Decoder) -> None:
    config, mark = decoder.config, getattr(decoder.config, MARK)
    for name, value in mark["original"].items():
        if value == _ABSENT:
            vars(config).pop(name, None)
        else:
            setattr(config, name, value)
    delattr(config, MARK)
    _set_windows(decoder, mark["sliding_window"])
    layer_masks = getattr(decoder.stack, ATTRIBUTE, None)
    if layer_masks is not None:
        layer_masks.converted, layer_masks.always, layer_masks.where_none = {}, frozenset(), frozenset()
        layer_masks.positions_from_mask, layer_masks.window_of_backend = False, None
        layer_masks.remove_if_idle()
    for module in _generators(model, decoder):
        vars(module).pop("generate", None)


def _set_windows(decoder: Decoder, sliding_window: int | None) -> None:
    """Give every layer its window, for a causal window of this many tokens: converted layers as their record says."""
    config, mark, types = decoder.config, conversion_of(decoder.stack), decoder.layer_types
    reach, converted = _reach(sliding_window, mark), _converted_layers(decoder)
    for i, attention in enumerate(decoder.attentions):
        if types[i] == SLIDING and hasattr(attention, "sliding_window"):  # read by flash attention
            after = None if reach is None else reach + 1
            attention.sliding_window = after if i in converted else sliding_window
    if mark:
        LayerMasks.on(decoder).converted = {i: layer_mask(reach, types[i]) for i in converted}
    if SLIDING not in types:
        return
    if mark and mark["layers"] is None:
        LayerMasks.on(decoder).window_of_backend = _WindowOfBackend(decoder.stack, reach)
        LayerMasks.on(decoder).window_of_backend.apply()
    else:
        config.sliding_window = sliding_window


def _prove(decoder: Decoder, what: str) -> None:
    """Measure every layer's mask, with windows shrunk for the moment, and compare; raises ConversionError."""
    mark, converted = conversion_of(decoder.stack), _converted_layers(decoder)
    sliding_window = mark["sliding_window"] if mark else getattr(decoder.config, "sliding_window", None)
    shrunk = None if sliding_window is None else min(sliding_window, proof.WINDOW)
    intended = []
    for i, layer_type in enumerate(decoder.layer_types):
        if i in converted:
            intended.append(layer_mask(_reach(shrunk, mark), layer_type))
        else:
            intended.append(causal() if layer_type != SLIDING or shrunk is None else causal() & sliding(shrunk))
    layer_masks = getattr(decoder.stack, ATTRIBUTE, None)
    try:
        _set_windows(decoder, shrunk)
        with layer_masks.contexts_set_aside() if layer_masks else nullcontext():
            proof.prove(decoder, intended, what)
    finally:
        _set_windows(decoder, sliding_window)


def _converted_layers(decoder: Decoder) -> frozenset[int]:
    mark = conversion_of(decoder.stack)
    if mark is None:
        return frozenset()
    return frozenset(range(len(decoder.layers)) if mark["layers"] is None else mark["layers"])


def _reach(sliding_window: int | None, mark: dict | None) -> int | None:
    """Tokens on either side that a converted local layer attends to; None = no window."""
    if mark is None or sliding_window is None or mark["window"] == "global":
        return None
    return sliding_window - 1 if mark["window"] == "keep" else sliding_window // 2


class _WindowOfBackend:
    """Keeps `config.sliding_window` at the number with which the backend in use gives exactly `reach` on either side.

    transformers counts a bidirectional window inclusively when it builds a mask (|q - k| <= window), exclusively when
    it hands the window to flash attention. Called before each forward pass, because the backend can be switched.
    """

    def __init__(self, stack: nn.Module, reach: int | None):
        self.stack, self.reach, self.excluded = stack, reach, _excluded_by_builder()

    def apply(self) -> None:
        config, number = self.stack.config, NO_WINDOW
        if self.reach is not None:
            number = self.reach + (1 if backend_of(config) == "flash" else self.excluded)
        if config.sliding_window != number:  # torch.compile would trace an assignment
            config.sliding_window = number


@functools.cache
def _excluded_by_builder() -> int:
    """0 if a built bidirectional window of w reaches w tokens to a side, 1 if w - 1. Measured, not assumed."""
    import torch
    from transformers.masking_utils import sliding_window_bidirectional_mask_function

    allowed = sliding_window_bidirectional_mask_function(3)
    query, *keys = (torch.tensor(place, device="cpu") for place in (0, *range(6)))  # models may be built on "meta"
    return 3 - max(distance for distance, key in enumerate(keys) if bool(allowed(0, 0, query, key)))


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
            "this model is bidirectional: it was not trained to predict the next token from states that see both ways, "
            "and each new token changes the states of all before it, so its predictions are worse and a cache would be "
            "wrong. Call labkit.to_causal(model) first, or generate(..., allow_bidirectional=True) to try it anyway"
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
        if getattr(model.config.get_text_config(decoder=True), MARK, None) is None:
            return
        if (decoder := decoder_or_none(model)) is not None:
            _put_in_force(model, decoder)

    return wrapped


PreTrainedModel.post_init = _convert_when_built(PreTrainedModel.post_init)
