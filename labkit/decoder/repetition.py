"""Let a causal model read its input twice: the control that every claim about an unmasked model has to face.

    with repeated(model):
        model(input_ids, attention_mask=real)       # the states are those of the second reading

In the second reading every token comes after the whole text, so its state can depend on all of it, though no layer is
bidirectional. If that does as well as removing the mask, the missing context mattered and not the mask. The price is
twice the tokens. (Input repetition for sequence labelling: Findings of EACL 2026; as an embedding: Springer et al.,
arXiv 2402.15449.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from labkit.decoder.anatomy import CACHE_NAMES, Decoder, find_decoder
from labkit.decoder.limits import require_positions
from labkit.errors import ConversionError


@contextmanager
def repeated(model: nn.Module, times: int = 2) -> Iterator[nn.Module]:
    """Within the block, `model` reads every row `times` times and gives the states of the last reading.

    The caller passes (batch, seq) token ids, padded on the right, with their 2-D attention_mask, and gets states of
    that shape. A bos at the row's beginning and an eos at its end stay single: [bos] text text [eos]. Positions go on
    through all readings.

    Raises:
        ConversionError: fewer than 1 readings; padding on the left, a KV cache, or positions or embeddings of the
            caller's own; more tokens than the model has positions.
    """
    if times < 1:
        raise ConversionError(f"a text can be read once or more often, not {times} times")
    decoder = find_decoder(model)
    reading = _Reading(decoder, times)
    before = decoder.stack.register_forward_pre_hook(reading.before, with_kwargs=True, prepend=True)
    after = decoder.stack.register_forward_hook(reading.after)
    try:
        yield model
    finally:
        before.remove()
        after.remove()


class _Reading:
    """The two hooks of one context: the input is repeated, and of the output the last reading is kept."""

    def __init__(self, decoder: Decoder, times: int):
        self.times, self.decoder, self.config = times, decoder, decoder.config
        self.places: Tensor | None = None  # (batch, seq): the place of each token in its last reading

    def before(self, stack: nn.Module, args: tuple, kwargs: dict):
        given = self.decoder.arguments(args, kwargs)
        for name in ("position_ids", *CACHE_NAMES, "inputs_embeds"):
            if given.get(name) is not None:
                raise ConversionError(f"a repeated reading takes token ids and a padding mask, but {name} was given")
        ids, real = given["input_ids"], given.get("attention_mask")
        real = torch.ones_like(ids) if real is None else real
        if real.ndim != 2 or bool((real[:, 1:].bool() & ~real[:, :-1].bool()).any()):
            raise ConversionError("a repeated reading needs a 2-D attention_mask with the padding on the right")
        repeated_ids, counted, self.places = self._repeated(ids, real.long())
        cure = f"give a shorter text, which is read {self.times} times"
        require_positions(repeated_ids.shape[1], self.config, refusal=ConversionError, cure=cure)
        return (), given | {"input_ids": repeated_ids, "attention_mask": counted, "use_cache": False}

    def after(self, stack: nn.Module, args: tuple, output: Any):
        states = output.last_hidden_state  # (batch, longest, width)
        index = self.places[..., None].expand(-1, -1, states.shape[-1])
        output.last_hidden_state = states.gather(1, index)  # (batch, seq, width)
        return output

    def _repeated(self, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids and mask (batch, longest) of the repeated rows, and the place (batch, seq) of each token's last reading.

        A padded token gets the place of the row's first token, because its state is never used.
        """
        bos, eos, pad = (_id(self.config, name) for name in ("bos", "eos", "pad"))
        rows, places = [], torch.zeros_like(ids)
        for place, row, length in zip(places, ids, real.sum(1).tolist(), strict=True):
            head = int(length > 1 and row[0] == bos)
            tail = int(length > 1 + head and row[length - 1] == eos)
            text = row[head : length - tail]
            rows.append(torch.cat([row[:head], text.repeat(self.times), row[length - tail : length]]))
            place[:length] = torch.arange(length)
            place[head:length] += (self.times - 1) * len(text)
        lengths = torch.tensor([len(row) for row in rows], device=ids.device)
        repeated_ids = pad_sequence(rows, batch_first=True, padding_value=max(pad, 0))  # (batch, longest)
        counted = torch.arange(repeated_ids.shape[1], device=ids.device) < lengths[:, None]
        return repeated_ids, counted.long(), places


def _id(config: Any, name: str) -> int:
    """The id of a special token, of several (Gemma's list of eos) the first; -1 if the model has none."""
    value = getattr(config, f"{name}_token_id", None)
    value = value[0] if isinstance(value, list) else value
    return -1 if value is None else value
