"""Deliver a Mask to each decoder layer, whatever the attention backend: the machinery under `masked` and `convert`.

A hook on the layer stack reads the padding, the packing and the cache of a call; a hook on every decoder layer then
replaces the mask that the layer was handed. The hooks sit on the *layers*, not on their attention modules, so
gradient checkpointing recomputes with the mask of its own forward pass.

Positions in a mask are positions in the **text**: pads are not counted, and each packed document starts at 0. So a
`prefix(3)` opens the first three real tokens of each row, on whichever side the padding is.

Packed documents are recognised by their `position_ids`, which restart, with or without a 2-D padding mask.
(transformers itself detects packed documents only where no mask is given: pull request 46634.)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labkit import masks
from labkit.decoder.anatomy import CACHE_NAMES, FULL, SLIDING, Decoder, find_decoder
from labkit.decoder.running import replaced
from labkit.errors import ConversionError, MaskError
from labkit.masks import Mask

ATTRIBUTE = "_labkit_layer_masks"  # where a layer stack keeps its LayerMasks
TABLES = ("wpe", "embed_positions", "pos_encoding")  # of positions, not rotated in (RoPE): GPT-2, OPT, CTRL
NO_WINDOW = 2**30  # a window no sequence reaches; the mask builder of a local layer needs a number


@contextmanager
def masked(model: nn.Module, mask) -> Iterator[nn.Module]:
    """Run `model` with `mask` in force in its attention layers; what was in force before returns on exit.

    Args:
        model: any model with a transformers decoder inside, on eager, sdpa or flex attention.
        mask: one Mask for every layer, or one per layer: a list (None = leave the layer as it is) or a dict by layer.
            It replaces the layer's own mask, the window of a local layer included. Padding (a 2-D attention_mask) and
            packed documents (restarting position_ids), or both together, stay isolated on top of it, in every layer.

    Contexts nest; the innermost mask given for a layer counts. With gradient checkpointing, call `backward`
    inside. With a KV cache, mind that transformers' default one keeps no keys of a local layer beyond its window; a
    mask that opens them needs `cache=DynamicCache()`, made without a config.

    Raises:
        MaskError: not a mask, or not one per layer. ConversionError: a backend, a model (Falcon with ALiBi) or an input
            that cannot carry a mask, packed documents with a cache, or a cache that has let go of keys which the mask
            opens.
    """
    decoder = find_decoder(model)
    chosen = _per_layer(mask, len(decoder.layers))
    layer_masks = LayerMasks.on(decoder)
    layer_masks.overrides.append(chosen)
    try:
        yield model
    finally:
        layer_masks.overrides.pop()
        layer_masks.remove_if_idle()


def declared_mask(decoder: Decoder, layer: int) -> Mask:
    """The mask that this layer is meant to have: the causal one, or what the recorded conversion makes of it."""
    return _windowed(decoder.declared_window(layer), causal=layer not in decoder.converted_layers)


def set_windows(decoder: Decoder) -> None:
    """Give every local layer its declared window."""
    local = [i for i, layer_type in enumerate(decoder.layer_types) if layer_type == SLIDING]
    for i in local:
        if hasattr(decoder.attentions[i], "sliding_window"):  # read by flash attention
            decoder.attentions[i].sliding_window = decoder.declared_window(i)
    if local:
        decoder.config.sliding_window = decoder.causal_window(local[0])
    if layer_masks := getattr(decoder.stack, ATTRIBUTE, None):
        layer_masks.window = decoder.converted_window(local[0]) if local and decoder.conversion else None
        layer_masks.set_config_window()


@contextmanager
def shrunken_windows(decoder: Decoder, by: int) -> Iterator[None]:
    """For the block every local window is shorter by `by` tokens, so that a short sequence reaches past it."""
    windows = [(holder, "sliding_window") for holder in (decoder.config, *decoder.attentions)]
    windows.append((getattr(decoder.stack, ATTRIBUTE, None), "window"))
    with ExitStack() as stack:
        for holder, name in windows:
            if size := getattr(holder, name, None):
                stack.enter_context(replaced(holder, **{name: size - by}))
        yield


@dataclass
class _Call:
    """The padding, packing and cache of one forward pass. Shapes: real (batch, kv_len), documents (batch, q_len)."""

    real: Tensor | None = None  # True = a real token; None = no padding
    documents: Tensor | None = None  # number of the packed document of each token; None = one document per row
    cache: object | None = None
    masks: dict[int, Mask] = field(default_factory=dict)  # what each layer was to get when the pass began
    built: dict = field(default_factory=dict)  # rendered masks, shared by the layers with the same mask


class LayerMasks:
    """The hooks of one decoder: they put a recorded conversion and the `masked` and `packed` contexts in force."""

    def __init__(self, decoder: Decoder):
        self.decoder, self.stack, self.layers = decoder, decoder.stack, decoder.layers
        self.overrides: list[dict[int, Mask]] = []  # of `masked`; for each layer the last one counts
        self.packings: list = []  # of `labkit.decoder.packing.packed`; the last one counts
        self.window: int | None = None  # of a converted local layer: the token itself and the tokens on one side
        self.without_flag = decoder.layers_ignoring_is_causal()  # the flag does not reach their attention
        self.has_position_table = decoder.takes_positions and any(hasattr(self.stack, name) for name in TABLES)
        self.call: _Call | None = None
        self._callers: list[nn.Module] = []  # models around the stack that are watched
        self._given_outside: list = []  # the masks that those of them were given which are running, outermost first
        self._layer_names = list(inspect.signature(self.layers[0].forward).parameters)
        self._handles = [self.stack.register_forward_pre_hook(self._before_stack, with_kwargs=True)]
        self._handles.append(self.stack.register_forward_hook(self._after_stack, always_call=True))
        for index, layer in enumerate(self.layers):
            hook = functools.partial(self._before_layer, index)  # no closure: a hooked model can be copied and pickled
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

    @classmethod
    def on(cls, decoder: Decoder) -> LayerMasks:
        """The LayerMasks of this decoder; made and hooked in at the first call."""
        existing = getattr(decoder.stack, ATTRIBUTE, None)
        if existing is None:
            existing = cls(decoder)
            setattr(decoder.stack, ATTRIBUTE, existing)
        for caller in decoder.callers:
            existing._watch(caller)
        return existing

    def remove_if_idle(self) -> None:
        """Take the hooks away when neither a conversion nor a context (`masked`, `packed`) needs them."""
        if not self.overrides and not self.packings and not self.decoder.converted_layers:
            for handle in self._handles:
                handle.remove()
            delattr(self.stack, ATTRIBUTE)

    def set_config_window(self) -> None:
        """Set `config.sliding_window` to the number with which the backend in use gives exactly the converted window.

        transformers counts a bidirectional window inclusively when it builds a mask (|q - k| <= window), exclusively
        when it hands the window to flash attention. Called before each forward pass, because the backend can be
        switched. (If a later transformers counts otherwise, the proof of a conversion fails.)
        """
        if not self.decoder.converted_by_flag or SLIDING not in self.decoder.layer_types:
            return
        number = NO_WINDOW
        if self.window is not None:
            number = self.window if self.decoder.backend == "flash" else self.window - 1
        if self.decoder.config.sliding_window != number:  # torch.compile would trace an assignment
            self.decoder.config.sliding_window = number

    def mask_for(self, index: int, packed: bool, from_outside: bool) -> Mask | None:
        """The mask that has to be delivered to this layer in the current call; None = leave it alone.

        Args:
            from_outside: a multimodal model built the masks of this call. It may cut a causal window out of them
                (Gemma 3 with token_type_ids), so local layers are given theirs.
        """
        for override in reversed(self.overrides):
            if index in override:
                return override[index]
        kind = self.decoder.layer_types[index]
        if index in self.decoder.converted_layers:
            cut = from_outside and kind == SLIDING
            if self.decoder.converted_by_flag and not (packed or cut or index in self.without_flag):
                return None
            return _windowed(self.window if kind == SLIDING else None, causal=False)
        if not packed or self.decoder.backend == "flash":  # whose kernel isolates texts by their position_ids
            return None
        if kind not in (FULL, SLIDING) or opened_otherwise(self.decoder.config):
            raise ConversionError(
                f"packed documents (restarting position_ids) cannot be kept apart in layer {index} ({kind}): labkit "
                "does not know its mask. Give each document its own row, or convert the model with to_bidirectional"
            )
        return _windowed(self.decoder.causal_window(index), causal=True)

    # -- the hooks ----------------------------------------------------------------------------------------------------

    def _before_stack(self, stack: nn.Module, args: tuple, kwargs: dict):
        self.set_config_window()
        given = self.decoder.arguments(args, kwargs)
        attention_mask, positions = given.get("attention_mask"), given.get("position_ids")
        cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
        from_outside = not _is_padding(attention_mask) and bool(self._given_outside)
        if from_outside:
            attention_mask = self._given_outside[0]  # from which a multimodal model built the masks of this call
        if not _is_padding(attention_mask):
            if self.overrides or (self.decoder.converted_layers and not self.decoder.converted_by_flag):
                raise ConversionError(
                    "labkit sets the mask of this model's layers, and the call brings masks of its own: pass the 2-D "
                    "padding mask of shape (batch, sequence), or none"
                )
            self.call = _Call(cache=cache)  # the caller's own masks are used as they are
            return args, kwargs
        real = None if attention_mask is None else attention_mask.bool()
        if real is not None and positions is None and self.has_position_table and self.decoder.converted_layers:
            # the positions of a table, converted, are counted from the first real token
            past = 0 if cache is None else cache.get_seq_length()
            kwargs = {**kwargs, "position_ids": (real.long().cumsum(-1) - 1).clamp(min=0)[:, past:]}
        real = None if real is None or (not torch.compiler.is_compiling() and bool(real.all())) else real
        documents = _documents(positions, real)
        mixes_otherwise = not all(kind.endswith("attention") for kind in self.decoder.layer_types)
        if documents is not None and (cache is not None or mixes_otherwise):
            raise ConversionError(
                "position_ids restart within a row (packed documents), and a key-value cache is given, or some layers "
                "mix tokens by other means than attention: masks cannot keep the documents apart. Give each document "
                "its own row, or leave out the cache"
            )
        self.call = _Call(real=real, documents=documents, cache=cache)
        for i in range(len(self.layers)):
            if (mask := self.mask_for(i, documents is not None, from_outside)) is not None:
                self.call.masks[i] = mask
        return args, kwargs

    def _after_stack(self, *_) -> None:
        self.call = None  # its masks can be large

    def _watch(self, caller: nn.Module) -> None:
        """Note the padding mask that a multimodal model is called with: it hands its stack masks of its own."""
        names, config = list(inspect.signature(caller.forward).parameters), getattr(caller, "config", self.stack.config)
        multimodal = config is not self.stack.config and not getattr(config, "is_encoder_decoder", False)
        if "attention_mask" not in names or not multimodal or any(caller is watched for watched in self._callers):
            return
        self._callers.append(caller)
        before = functools.partial(self._before_caller, names)
        self._handles.append(caller.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(caller.register_forward_hook(self._after_caller, always_call=True))

    def _before_caller(self, names: list[str], caller: nn.Module, args: tuple, kwargs: dict) -> None:
        self._given_outside.append((dict(zip(names, args, strict=False)) | kwargs).get("attention_mask"))

    def _after_caller(self, *_) -> None:
        del self._given_outside[-1:]

    def _before_layer(self, index: int, layer: nn.Module, args: tuple, kwargs: dict):
        hidden = args[0] if args else kwargs["hidden_states"]
        call = self._call_of(layer, hidden)
        if call is None or index not in call.masks:
            return None
        mask, backend = call.masks[index], self.decoder.backend
        family = self.decoder.config.model_type
        if backend == "flash":
            if self.overrides or index in self.without_flag:
                raise ConversionError(
                    f"flash attention takes no mask, and {family} needs one here ({mask}): load the model with "
                    "attn='sdpa' or attn='eager'"
                )
            if call.documents is not None and (call.real is not None or hidden.shape[-3] > 1):
                raise ConversionError(
                    "flash attention keeps packed documents (restarting position_ids) apart only in a batch of one row "
                    "without padding: lay the documents in one row, or load the model with attn='sdpa'"
                )
            return args, {**kwargs, "is_causal": False}  # its padding or packing reaches the kernel as it is
        kwargs = dict(zip(self._layer_names[1:], args[1:], strict=False)) | kwargs
        given = kwargs.get("attention_mask")
        overridden = any(index in override for override in self.overrides)
        if given is not None and self.decoder.converted_by_flag and index in self.without_flag:
            if call.documents is None and not overridden:
                return None  # the mask that transformers built is this layer's, maybe with a bias (ALiBi in Falcon)
        if isinstance(given, Tensor) and getattr(self.stack.config, "alibi", False):
            raise ConversionError(
                f"{family} with ALiBi has the distances of its tokens in the mask that transformers builds: {mask} in "
                "its place would take them away"
            )
        # DeepSeek V3.2 needs a mask where it came with one, and not for its window.
        needs_mask = given is not None and backend == "sdpa" and self.decoder.layer_types[index] != SLIDING
        by_flag = index not in self.without_flag and not needs_mask
        rendered = _render(mask, call, index, hidden, backend, by_flag=by_flag)
        return args[:1], {**kwargs, "is_causal": False, "attention_mask": rendered}

    def _call_of(self, layer: nn.Module, hidden: Tensor) -> _Call | None:
        """The forward pass that this layer call belongs to; under gradient checkpointing maybe not the latest one."""
        if not (layer.training and getattr(layer, "gradient_checkpointing", False)) or torch.compiler.is_compiling():
            return self.call
        if torch._C._current_graph_task_id() == -1:  # not within a backward pass
            hidden._labkit_call = self.call
            return self.call
        call = getattr(hidden, "_labkit_call", None)  # recomputing (some transformers versions run hooks again)
        if call is None:
            raise ConversionError(
                "gradient checkpointing recomputes a layer on a copy of its input, and the mask of that forward pass "
                "is lost: call gradient_checkpointing_enable({'use_reentrant': False})"
            )
        return call


def opened_otherwise(config) -> bool:
    """Whether the causal mask was removed by a flag of the config; for models that labkit has not converted."""
    flag = getattr(config, "use_bidirectional_attention", None)  # in Gemma 4 a word: "vision" concerns images alone
    return getattr(config, "is_causal", True) is False or flag in (True, "all")


def _windowed(window: int | None, *, causal: bool) -> Mask:
    """A mask with this window, or without one; it counts the token itself and the tokens on one side."""
    if window is not None:
        return masks.sliding_window(window, causal=causal)
    return masks.causal() if causal else masks.bidirectional()


def _per_layer(mask, n: int) -> dict[int, Mask]:
    """`mask` as {layer index: Mask}, checked, for a model of n layers."""
    if isinstance(mask, Mask):
        return dict.fromkeys(range(n), mask)
    if isinstance(mask, Mapping):
        chosen = dict(mask)
    elif isinstance(mask, Sequence) and len(mask) == n:
        chosen = {i: m for i, m in enumerate(mask) if m is not None}
    else:
        raise MaskError(f"expected a Mask, a list of {n} (one per layer) or a dict by layer, not {mask!r}")
    for i, m in chosen.items():
        if i not in range(n):
            raise MaskError(f"there is no layer {i!r}: the model has layers 0 to {n - 1}")
        if not isinstance(m, Mask):
            raise MaskError(f"layer {i}: expected a labkit Mask, not {type(m).__name__} (see masks.from_dense)")
    return chosen


def _render(mask: Mask, call: _Call, index: int, hidden: Tensor, backend: str, by_flag: bool):
    """The mask as this backend takes it: bool (sdpa), float (eager), BlockMask (flex); None if a flag opens all."""
    q_len = hidden.shape[-2]  # (batch, q_len, dim); in Gemma 3n (copies, batch, q_len, dim)
    past, kv_len = _cache_lengths(call.cache, index, q_len)
    open_to_all = mask == masks.bidirectional() and call.real is None and call.documents is None and past == 0
    if by_flag and open_to_all and kv_len == q_len and backend != "eager":
        return None
    key = (mask, q_len, past, kv_len, hidden.dtype, backend)
    if key not in call.built:
        cells = _cells(mask, call, q_len, past, kv_len, hidden.device)  # (batch or 1, q_len, kv_len)
        if backend == "eager":
            call.built[key] = masks.additive_of(cells, hidden.dtype)[:, None]
        elif backend == "sdpa":
            call.built[key] = cells[:, None]
        elif backend == "flex_attention":
            call.built[key] = masks.block_mask_of(cells)
        else:
            raise ConversionError(f"labkit cannot give a mask to the attention backend {backend!r}: use eager or sdpa")
    return call.built[key]


def _cells(mask: Mask, call: _Call, q_len: int, past: int, kv_len: int, device) -> Tensor:
    """Bool (batch or 1, q_len, kv_len): the mask, with the padding and the packed documents of this call."""
    total = past + q_len
    real = None if call.real is None else call.real[:, :total].to(device)  # (batch, total)
    documents = None if call.documents is None else call.documents.to(device)  # (batch or 1, total), without a cache
    positions = _text_positions(documents, real, total, device)  # (batch or 1, total)
    if mask.batch_size not in (None, len(positions)) and (real is not None or documents is not None):
        raise MaskError(f"{mask} is for a batch of {mask.batch_size} rows, and this batch has {len(positions)}")
    n = max(int(positions.max()) + 1, mask.needs)
    mask.dense(1, n)  # raises if the mask is not defined for so many tokens
    rows = torch.arange(mask.batch_size or len(positions), device=device)[:, None, None]
    cells = mask.predicate(rows, positions[:, past:, None], positions[:, None, :], n)
    cells = cells.expand(len(cells), q_len, total)  # (batch or 1, q_len, total)
    if documents is not None:  # no document attends to another
        cells = cells & (documents[:, :, None] == documents[:, None, :])
    cells = masks.self_for_empty_rows(cells if real is None else cells & real[:, None, :])
    if kv_len > total:  # a static cache: slots that are not filled yet
        return nn.functional.pad(cells, (0, kv_len - total))
    dropped = total - kv_len  # the cache of a local layer lets go of the oldest keys
    if dropped and bool(cells[..., :dropped].any()):
        raise ConversionError(
            f"{mask} opens keys that the cache of this local layer has let go of (it kept {kv_len} of {total}): pass "
            "cache=transformers.DynamicCache(), made without a config, which keeps them all"
        )
    return cells[..., dropped:]


def _text_positions(documents: Tensor | None, real: Tensor | None, total: int, device) -> Tensor:
    """The position of each token within its document, (batch or 1, total), pads not counted."""
    if real is None:
        counted = torch.arange(total, device=device)[None]
    else:
        counted = real.long().cumsum(-1) - 1
    if documents is not None:  # positions restart with each document
        first = torch.diff(documents, prepend=documents[:, :1], dim=-1) != 0
        counted = counted - torch.where(first, counted, 0).cummax(-1).values
    return counted.clamp(min=0)


def _documents(positions: Tensor | None, real: Tensor | None) -> Tensor | None:
    """The packed document of each token, (batch, q_len), numbered from 0, if position_ids restart in a row; else None.

    A document starts at a real token whose position is not greater than that of the real token before it. Qwen-VL
    counts time, height and width, (3, batch, q_len), maybe after the position in the text: one of them grows.
    """
    if positions is None or positions.ndim not in (2, 3) or positions.shape[-1] < 2:
        return None
    axes = positions if positions.ndim == 3 else positions[None]
    q_len = axes.shape[-1]
    real = torch.ones_like(axes[0], dtype=torch.bool) if real is None else real[:, -q_len:].to(axes.device)
    axes = axes.expand(-1, len(real), -1)  # (axes, batch, q_len)
    latest = torch.where(real, torch.arange(q_len, device=axes.device), -1).cummax(-1).values  # place of the latest one
    before = nn.functional.pad(latest[:, :-1], (1, 0), value=-1)  # of the one before this token; -1 = none
    grows = (axes > axes.gather(-1, before.clamp(min=0).expand_as(axes))).any(0)
    starts = real & (before >= 0) & ~grows
    return None if not torch.compiler.is_compiling() and not bool(starts.any()) else starts.long().cumsum(-1)


def _is_padding(mask) -> bool:
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)


def _cache_lengths(cache, index: int, q_len: int) -> tuple[int, int]:
    """(tokens before this call, keys that the attention of this layer will be given)."""
    if cache is None:
        return 0, q_len
    past = int(cache.get_seq_length(index))
    try:
        kv_len, _ = cache.get_mask_sizes(q_len, index)
    except AttributeError:  # older transformers: takes the positions of the queries, not their number
        kv_len, _ = cache.get_mask_sizes(torch.arange(past, past + q_len), index)
    return past, int(kv_len)
