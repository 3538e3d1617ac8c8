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
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from labkit.decoder.anatomy import find_decoder
from labkit.decoder.limits import require_positions
from labkit.decoder.packing import require_plain
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
    decoder, places = find_decoder(model), torch.empty(0)

    def before(stack: nn.Module, args: tuple, kwargs: dict):
        nonlocal places
        given = decoder.arguments(args, kwargs)
        require_plain(given, decoder, "repeated()")
        ids, real = given["input_ids"], given.get("attention_mask")
        real = torch.ones_like(ids) if real is None else real.long()
        if bool((real[:, 1:] > real[:, :-1]).any()):
            raise ConversionError("a repeated reading needs the padding on the right")
        repeated_ids, counted, places = _repeated(decoder.config, ids, real, times)
        cure = f"give a shorter text, which is read {times} times"
        require_positions(repeated_ids.shape[1], decoder.config, refusal=ConversionError, cure=cure)
        return (), given | {"input_ids": repeated_ids, "attention_mask": counted, "use_cache": False}

    def after(stack: nn.Module, args: tuple, output: Any):
        states = output.last_hidden_state  # (batch, longest, width)
        index = places[..., None].expand(-1, -1, states.shape[-1])
        output.last_hidden_state = states.gather(1, index)  # (batch, seq, width)
        return output

    with ExitStack() as hooks:
        hooks.callback(decoder.stack.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        hooks.callback(decoder.stack.register_forward_hook(after).remove)
        yield model


def _repeated(config: Any, ids: Tensor, real: Tensor, times: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids and mask (batch, longest) of the repeated rows, and the place (batch, seq) of each token's last reading.

    A padded token gets the place of the row's first token, because its state is never used.
    """
    rows, places = [], torch.zeros_like(ids)
    for place, row, length in zip(places, ids, real.sum(1).tolist(), strict=True):
        head = int(length > 1 and int(row[0]) == _id(config, "bos"))
        tail = int(length > 1 + head and int(row[length - 1]) == _id(config, "eos"))
        text = row[head : length - tail]
        rows.append(torch.cat([row[:head], text.repeat(times), row[length - tail : length]]))
        place[:length] = torch.arange(length)
        place[head:length] += (times - 1) * len(text)
    counted = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)  # (batch, longest)
    return pad_sequence(rows, batch_first=True), counted, places


def _id(config: Any, name: str) -> int | None:
    """The id of a special token, of several (Gemma's list of eos) the first; None if the model has none."""
    value = getattr(config, f"{name}_token_id", None)
    return value[0] if isinstance(value, list) else value
