"""Train and predict without computing padding: the texts of a batch stand side by side in fewer, full rows.

    with packed(model):
        loss = model(input_ids, attention_mask=attention_mask, labels=labels).loss

The caller passes ordinary padded batches and gets ordinary padded states, so collators, heads, losses and decoding
stay as they are. In between, on the layer stack, each row holds several texts without padding, `position_ids` begin at
0 with each of them, and every layer has its own mask within each text. No text attends to another, and the numbers are
those of the padded batch, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import CACHE_NAMES, FULL, SLIDING, Decoder, decoder_or_none, find_decoder
from labkit.decoder.hooks import LayerMasks, opened_otherwise
from labkit.errors import ConversionError

BACKENDS = ("eager", "sdpa", "flex_attention", "flash")
WITHOUT_POSITIONS = ("gpt_bigcode", "persimmon")  # they pass no position_ids, which isolate texts, to the flash kernel
PACKED_ALIKE = ("input_ids", "token_type_ids")  # one number per token
GROWTH = (1.0, 1.25, 1.5, 2.0)  # lengths of a row that are compared, in longest texts of the batch
KEYS_PER_TOKEN = 4  # times the width: the number of keys that cost as much as all else that a layer does for a token


@contextmanager
def packed(model: nn.Module) -> Iterator[nn.Module]:
    """Run `model` on padded batches without their padding; the model is as it was on exit.

    Padding may be on either side. States at padding are zeros. A batch without padding goes through as it is. With
    gradient checkpointing, call `backward` inside. Dropout draws other random numbers than in the padded batch.

    Rows have the cheapest of a few lengths. With flash attention all texts are in one row. Contexts nest, and
    `labkit.masked` may be entered outside or inside.

    Raises:
        ConversionError: the model cannot be packed (see `why_not`); a call with a cache, with position_ids or
            inputs_embeds, with a mask that is not (batch, sequence), or one that asks for attention weights.
    """
    if (reason := why_not(model)) is not None:
        raise ConversionError(f"{type(model).__name__} cannot be packed: {reason}")
    decoder = find_decoder(model)
    layer_masks = LayerMasks.on(decoder)
    packing = _Packing(decoder, layer_masks)
    before = decoder.stack.register_forward_pre_hook(packing.before, with_kwargs=True, prepend=True)
    after = decoder.stack.register_forward_hook(packing.after, always_call=True)
    layer_masks.packings.append(packing)
    try:
        yield model
    finally:
        before.remove()
        after.remove()
        layer_masks.packings.remove(packing)
        layer_masks.remove_if_idle()


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
    if decoder.backend == "flash" and config.model_type in WITHOUT_POSITIONS:
        return f"{config.model_type} passes no positions on to the flash kernel: load it with attn='sdpa'"
    if foreign := sorted(set(decoder.layer_types) - {FULL, SLIDING}):
        return f"it has layers of the type {foreign[0]!r}, in which labkit cannot keep texts apart"
    opened = decoder.conversion is None and opened_otherwise(config)
    if opened or not any(attention.is_causal for attention in decoder.attentions):
        return "its causal mask was removed by other means than labkit.to_bidirectional, so its mask is not known"
    return None


class _Layout:
    """Where the real tokens of a padded batch are in `rows`, lists of its texts, which have these `lengths`."""

    def __init__(self, mask: Tensor, lengths: Sequence[int], rows: Sequence[Sequence[int]]):
        width = max(sum(lengths[text] for text in row) for row in rows)
        starts = torch.zeros(len(lengths), 1, dtype=torch.long)  # of each text in the flattened packed rows
        for number, row in enumerate(rows):
            starts[row, 0] = number * width + torch.tensor([0, *(lengths[text] for text in row[:-1])]).cumsum(0)
        self.batch, self.packed = tuple(mask.shape), (len(rows), width)
        self.real = mask.flatten().nonzero().squeeze(1)  # (tokens,) their places in the flattened batch
        self.within = mask.long().cumsum(-1) - 1  # (batch, seq) the position of each token in its text
        self.slots = (starts.to(mask.device) + self.within).flatten()[self.real]  # (tokens,) in the flattened rows

    def pack(self, tokens: Tensor) -> Tensor:
        """(batch, seq) -> (rows, width), 0 in what is left over."""
        rows = tokens.new_zeros(self.packed[0] * self.packed[1])
        return rows.index_copy(0, self.slots, tokens.flatten()[self.real]).view(self.packed)

    def unpack(self, value: Any) -> Any:
        """States (rows, width, dim) -> (batch, seq, dim), zeros at padding; also in tuples. Other values stay."""
        if isinstance(value, tuple):
            return tuple(self.unpack(part) for part in value)
        if not (isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == self.packed):
            return value
        states = value.flatten(0, 1).index_select(0, self.slots)  # (tokens, dim)
        batch = value.new_zeros(self.batch[0] * self.batch[1], value.shape[-1])
        return batch.index_copy(0, self.real, states).view(*self.batch, -1)


class _Packing:
    """The hooks of one `packed` context on a layer stack, around those of its LayerMasks."""

    def __init__(self, decoder: Decoder, layer_masks: LayerMasks):
        self.decoder, self.layer_masks = decoder, layer_masks
        self.layout: _Layout | None = None  # of the forward pass that is running

    def before(self, stack: nn.Module, args: tuple, kwargs: dict):
        if self.layer_masks.packings[-1:] != [self]:  # a context inside this one packs, or a conversion proves itself
            return args, kwargs
        given = self.decoder.arguments(args, kwargs)
        require_plain(given, self.decoder, "packed()")
        mask = given.get("attention_mask")
        lengths = [] if mask is None else mask.bool().sum(-1).tolist()
        if mask is None or min(lengths) == mask.shape[1]:
            return args, kwargs
        if not any(lengths):
            raise ConversionError("the batch has no real token: every number of its attention_mask is 0")
        if self.decoder.backend == "flash":  # keeps texts apart by position_ids in a batch of one row only
            rows = [[text for text, length in enumerate(lengths) if length]]
        else:
            rows = arrange(lengths, keys_per_token=KEYS_PER_TOKEN * self.decoder.config.hidden_size)
        self.layout = layout = _Layout(mask, lengths, rows)
        in_rows = {name: layout.pack(given[name]) for name in PACKED_ALIKE if given.get(name) is not None}
        positions = layout.pack(layout.within)  # each slot that is left over is a text of its own
        return (), given | in_rows | {"attention_mask": None, "position_ids": positions, "use_cache": False}

    def after(self, stack: nn.Module, args: tuple, output: Any):
        layout, self.layout = self.layout, None
        if layout is None or output is None:  # None: the forward pass has failed
            return output
        if isinstance(output, tuple):
            return layout.unpack(output)
        for name, value in list(output.items()):
            output[name] = layout.unpack(value)
        return output


def arrange(
    lengths: Sequence[int], row_length: int | None = None, keys_per_token: float = float("inf")
) -> list[list[int]]:
    """Rows for texts of these lengths: lists of their numbers. A text of length 0 is in none.

    First-fit decreasing: the longest text first, each into the first row with room. Without a `row_length`, the one of
    several is chosen whose slots cost least: a slot costs 1, and 1 more for each `keys_per_token` keys in its row.
    """
    texts = sorted((text for text, length in enumerate(lengths) if length), key=lambda text: -lengths[text])
    longest = lengths[texts[0]]
    if row_length is not None:
        return _first_fit(lengths, texts, max(row_length, longest))

    def cost(rows: list[list[int]]) -> float:
        width = max(sum(lengths[text] for text in row) for row in rows)
        return len(rows) * width * (1 + width / keys_per_token)

    return min((_first_fit(lengths, texts, int(longest * growth)) for growth in GROWTH), key=cost)


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


def require_plain(given: dict[str, Any], decoder: Decoder, context: str) -> None:
    """Raise if the call brings something that has no meaning once its texts are elsewhere, as within the `context`."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    unfit = [name for name in CACHE_NAMES if given.get(name) is not None]
    for name, value in given.items():
        if name not in (*PACKED_ALIKE, "attention_mask") and isinstance(value, Tensor) and value.ndim > 1:
            unfit.append(name)
    if given.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
        unfit.append("output_attentions")
    if unfit:
        raise ConversionError(
            f"{context} takes input_ids and a padding mask, and the call brings {unfit[0]}: leave it out, or call the "
            f"model outside of {context}"
        )
    if ids is None or (mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape)):
        raise ConversionError(
            f"{context} takes input_ids (batch, sequence), and a padding mask of the same shape or none"
        )
