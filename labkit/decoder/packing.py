"""Train and predict without computing padding: the texts of a batch stand side by side in fewer, full rows.

    with packed(model):
        loss = model(input_ids, attention_mask=attention_mask, labels=labels).loss

The caller passes ordinary padded batches and gets ordinary padded states, so collators, heads, losses and decoding
stay as they are. In between, on the layer stack, each row holds several texts without padding, `position_ids` begin at
0 with each of them, and every layer has its own mask within each text. No text attends to another, and the numbers are
those of the padded batch, up to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import CACHE_NAMES, FULL, SLIDING, Decoder, backend_of, decoder_or_none, find_decoder
from labkit.decoder.hooks import LayerMasks, one_by_one, opened_otherwise
from labkit.decoder.text_by_text import TextMask
from labkit.errors import ConversionError

ATTRIBUTE = "_labkit_packing"  # where a layer stack keeps its packing
MARK = "labkit_attention"  # where a conversion is recorded in the config (labkit.convert)
BACKENDS = ("eager", "sdpa", "flex_attention", "flash")
WITHOUT_POSITIONS = ("gpt_bigcode", "persimmon")  # they pass no position_ids, which isolate texts, to the flash kernel
PACKED_ALIKE = ("input_ids", "token_type_ids")  # one number per token
GROWTH = (1.0, 1.25, 1.5, 2.0)  # lengths of a row that are weighed, in longest texts of the batch
KEYS_AS_DEAR_AS_A_TOKEN = 4  # times the width: so many keys cost as much as all else that a layer does for a token
CALL_IN_TOKENS = 2  # what one more call of the attention kernel costs, in tokens


@contextmanager
def packed(model: nn.Module, row_length: int | None = None) -> Iterator[nn.Module]:
    """Run `model` on padded batches without their padding; the model is as it was on exit.

    Padding may be on either side. States at padding are zeros. A batch without padding goes through as it is. With
    gradient checkpointing, call `backward` inside. Dropout draws other random numbers than in the padded batch.

    Args:
        row_length: tokens per row, or the length of the longest text if that is longer. None: the cheapest of a few
            lengths, or, with sdpa on a CPU, one row of texts attended to one after the other
            (`labkit.decoder.text_by_text`). With flash attention all texts are in one row.

    Contexts nest; the innermost row length counts. `labkit.masked` may be entered outside or inside.

    Raises:
        ConversionError: the model cannot be packed (see `why_not`); a call with a cache, with position_ids or
            inputs_embeds, with a mask that is not (batch, sequence), or one that asks for attention weights.
    """
    if (reason := why_not(model)) is not None:
        raise ConversionError(f"{type(model).__name__} cannot be packed: {reason}")
    if row_length is not None and row_length < 1:
        raise ConversionError(f"row_length is {row_length} tokens; it must be at least 1")
    packing = _Packing.on(find_decoder(model))
    packing.row_lengths.append(row_length)
    try:
        yield model
    finally:
        packing.row_lengths.pop()
        packing.remove_if_idle()


def why_not(model: nn.Module) -> str | None:
    """What keeps `packed` from working with this model, in one clause; None if nothing does."""
    decoder = decoder_or_none(model)
    if decoder is None:
        return "it holds no decoder that labkit knows"
    config, whole = decoder.config, getattr(model, "config", None)
    if hasattr(whole, "get_text_config") and whole.get_text_config(decoder=True) is not whole:
        return "it hands its decoder embeddings and masks of its own, as multimodal models do"
    if not decoder.takes_positions:
        return f"{type(decoder.stack).__name__} takes no position_ids, so texts in one row cannot each begin at 0"
    if getattr(config, "alibi", False):
        return "its positions (ALiBi) are counted along the row, not from position_ids"
    if decoder.backend not in BACKENDS:
        return f"labkit does not know the attention backend {decoder.backend!r}: load it with attn='sdpa'"
    if backend_of(config) == "flash" and config.model_type in WITHOUT_POSITIONS:
        return f"{config.model_type} passes no positions on to the flash kernel: load it with attn='sdpa'"
    if foreign := sorted(set(decoder.layer_types) - {FULL, SLIDING}):
        return f"it has layers of the type {foreign[0]!r}, in which labkit cannot keep texts apart"
    opened = getattr(config, MARK, None) is None and opened_otherwise(config)
    if opened or not any(attention.is_causal for attention in decoder.attentions):
        return "its causal mask was removed by other means than labkit.to_bidirectional, so its mask is not known"
    return None


@dataclass(frozen=True)
class _Layout:
    """Where the real tokens of a padded batch stand in the packed rows.

    Attributes:
        batch: (rows, width) of the caller's padded batch; packed: of the rows that are computed.
        real: (tokens,) their places in the flattened batch; slots: (tokens,) in the flattened packed rows.
        positions: (rows, width), from 0 in each text, 0 in every slot that is left over, which is a text of its own.
        padded: (rows, width) 1 = real token, if each text has a row to itself; None = the rows are packed.
    """

    batch: tuple[int, int]
    packed: tuple[int, int]
    real: Tensor
    slots: Tensor
    positions: Tensor
    padded: Tensor | None

    def pack(self, tokens: Tensor) -> Tensor:
        """(batch, seq) -> (rows, width), 0 in what is left over."""
        rows = tokens.new_zeros(self.packed[0] * self.packed[1])
        return rows.index_copy(0, self.slots, tokens.flatten()[self.real]).view(self.packed)

    def unpack(self, states: Tensor) -> Tensor:
        """(rows, width, dim) -> (batch, seq, dim), zeros at padding."""
        ours = states.flatten(0, 1).index_select(0, self.slots)  # (tokens, dim)
        whole = states.new_zeros(self.batch[0] * self.batch[1], states.shape[-1])
        return whole.index_copy(0, self.real, ours).view(*self.batch, -1)


class _Packing:
    """The hooks of `packed` on one layer stack, around those of its LayerMasks."""

    def __init__(self, decoder: Decoder):
        self.decoder, self.row_lengths = decoder, []
        self.layout: _Layout | None = None  # of the forward pass that is running
        self.names = list(inspect.signature(decoder.stack.forward).parameters)
        self.layer_masks = LayerMasks.on(decoder)
        self.layer_masks.isolating = True
        stack = decoder.stack
        self._handles = [stack.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)]
        self._handles.append(stack.register_forward_pre_hook(self._before_masks_are_built, with_kwargs=True))
        self._handles.append(stack.register_forward_hook(self._after, always_call=True))

    @classmethod
    def on(cls, decoder: Decoder) -> _Packing:
        existing = getattr(decoder.stack, ATTRIBUTE, None)
        if existing is None:
            existing = cls(decoder)
            setattr(decoder.stack, ATTRIBUTE, existing)
        return existing

    def remove_if_idle(self) -> None:
        if not self.row_lengths:
            for handle in self._handles:
                handle.remove()
            delattr(self.decoder.stack, ATTRIBUTE)
            self.layer_masks.isolating = False
            self.layer_masks.remove_if_idle()

    def _before(self, stack: nn.Module, args: tuple, kwargs: dict):
        if not self.layer_masks.contexts_apply:
            return args, kwargs
        given = dict(zip(self.names, args, strict=False)) | kwargs
        _require_plain(given, self.decoder)
        mask = given.get("attention_mask")
        lengths = [] if mask is None else mask.bool().sum(-1).tolist()
        if mask is None or min(lengths) == mask.shape[1]:
            return args, kwargs
        if not any(lengths):
            raise ConversionError("the batch has no real token: every number of its attention_mask is 0")
        self.layout = layout = _layout(mask, lengths, self._rows_of(lengths, mask.device))
        given |= {name: layout.pack(given[name]) for name in PACKED_ALIKE if given.get(name) is not None}
        given |= {"attention_mask": layout.padded, "position_ids": layout.positions, "use_cache": False}
        return (), given

    def _before_masks_are_built(self, stack: nn.Module, args: tuple, kwargs: dict):
        """Keep transformers from building a mask that no layer would use: it passes on one of four dimensions."""
        call = self.layer_masks.call
        if self.layout is None or call is None or call.documents is None or backend_of(stack.config) == "flash":
            return args, kwargs
        rows, width = self.layout.packed
        return args, kwargs | {"attention_mask": TextMask.of(None, [width], call.documents.device, rows)}

    def _rows_of(self, lengths: Sequence[int], device: torch.device) -> list[list[int]]:
        config, row_length = self.decoder.config, self.row_lengths[-1]
        if backend_of(config) == "flash":  # keeps texts apart by position_ids in a batch of one row only
            return [[text for text, length in enumerate(lengths) if length]]
        alone = row_length is None and one_by_one(config, torch.empty(1, 0, device=device))
        return arrange(lengths, row_length, float(KEYS_AS_DEAR_AS_A_TOKEN * config.hidden_size), alone)

    def _after(self, stack: nn.Module, args: tuple, output: Any):
        layout, self.layout = self.layout, None
        if layout is None or output is None:  # None: the forward pass has failed
            return output
        if isinstance(output, tuple):
            return _unpacked(output, layout)
        for name, value in list(output.items()):
            output[name] = _unpacked(value, layout)
        return output


def arrange(
    lengths: Sequence[int],
    row_length: int | None = None,
    dear_keys: float = float("inf"),
    one_by_one: bool = False,
) -> list[list[int]]:
    """Rows for texts of these lengths: lists of their numbers. A text of length 0 is in none.

    First-fit decreasing: the longest text first, each into the first row with room. Of several row lengths, and a row
    for each text, the one is chosen whose slots cost least, where `dear_keys` keys cost as much as all else that is
    computed for a slot. `one_by_one`: texts in a single row are attended to one after the other, which costs no keys of
    other texts, but a kernel call per text.
    """
    if row_length is not None:
        dear_keys = float("inf")  # it was chosen: only the slots count
    texts = sorted((text for text, length in enumerate(lengths) if length), key=lambda text: -lengths[text])
    longest = lengths[texts[0]]
    widths = [int(longest * growth) for growth in GROWTH] if row_length is None else [max(row_length, longest)]
    choices = [[[text] for text in sorted(texts)], *(_first_fit(lengths, texts, room) for room in widths)]
    if one_by_one:
        choices.append([texts])

    def cost(rows: list[list[int]]) -> float:
        if one_by_one and len(rows) == 1:
            return sum(lengths[text] * (1 + lengths[text] / dear_keys) + CALL_IN_TOKENS for text in rows[0])
        width = max(sum(lengths[text] for text in row) for row in rows)
        return len(rows) * width * (1 + width / dear_keys)

    return min(choices, key=cost)  # of equal ones the first


def _first_fit(lengths: Sequence[int], texts: Sequence[int], room: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for text in texts:
        row = next((row for row, left in enumerate(free) if left >= lengths[text]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(room)
        rows[row].append(text)
        free[row] -= lengths[text]
    return rows


def _layout(mask: Tensor, lengths: Sequence[int], rows: list[list[int]]) -> _Layout:
    """The layout of `rows` for the padding `mask` (batch, seq), whose rows have these lengths."""
    width = max(sum(lengths[text] for text in row) for row in rows)
    starts = [0] * len(lengths)  # of each text in the flattened packed rows
    for number, row in enumerate(rows):
        at = number * width
        for text in row:
            starts[text] = at
            at += lengths[text]
    counts = torch.tensor(lengths)
    first = counts.cumsum(0) - counts  # of each text's tokens among all tokens
    within = torch.arange(int(counts.sum())) - first.repeat_interleave(counts)  # (tokens,)
    slots = torch.tensor(starts).repeat_interleave(counts) + within
    positions = torch.zeros(len(rows) * width, dtype=torch.long).index_copy(0, slots, within).view(len(rows), width)
    padded = None
    if all(len(row) == 1 for row in rows) and len(slots) < positions.numel():
        padded = torch.zeros(positions.numel(), dtype=torch.long).index_fill(0, slots, 1).view_as(positions)
    device = mask.device
    return _Layout(
        batch=(mask.shape[0], mask.shape[1]),
        packed=(len(rows), width),
        real=mask.flatten().nonzero().squeeze(1),
        slots=slots.to(device),
        positions=positions.to(device),
        padded=None if padded is None else padded.to(device),
    )


def _unpacked(value: Any, layout: _Layout) -> Any:
    if isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == layout.packed:
        return layout.unpack(value)
    return tuple(_unpacked(part, layout) for part in value) if isinstance(value, tuple) else value


def _require_plain(given: dict[str, Any], decoder: Decoder) -> None:
    """Raise if the call brings something that has no meaning once its texts stand elsewhere."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    unfit = [name for name in CACHE_NAMES if given.get(name) is not None]
    for name, value in given.items():
        if name not in (*PACKED_ALIKE, "attention_mask") and isinstance(value, Tensor) and value.ndim > 1:
            unfit.append(name)
    if given.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
        unfit.append("output_attentions")
    if unfit:
        raise ConversionError(
            f"packed() takes input_ids and a padding mask, and the call brings {unfit[0]}: leave it out, or call the "
            "model outside of packed()"
        )
    if ids is None or (mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape)):
        raise ConversionError(
            "packed() takes input_ids (batch, sequence), and a padding mask of the same shape or none"
        )
