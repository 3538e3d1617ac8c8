"""Attention maps of a model, captured once and kept small: the weight of each query on each key, by layer and head.

    lm = labkit.load("gpt2-mini")
    before = attention_maps(lm, "the cat sat", masks.causal())
    after = attention_maps(lm, "the cat sat", masks.bidirectional())
    before.weights                                       # float16 (layers, heads, queries, keys), rows sum to 1

Only eager attention computes these weights (a fused kernel returns none), so it is in force during the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float16, Int
from torch import Tensor, nn

from labkit.attention.plain import visible
from labkit.decoder.anatomy import Decoder, find_decoder
from labkit.decoder.hooks import masked
from labkit.decoder.limits import require_positions
from labkit.decoder.running import Runner, evaluating, replaced
from labkit.errors import MaskError, ModelError

__all__ = ["AttentionMaps", "attention_maps"]


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMaps:
    """The attention weights of one text.

    Attributes:
        weights: (layers, heads, queries, keys); a row sums to 1 to the precision of float16. Heads are query heads,
            also where several of them share their keys.
        tokens: the tokens as they are shown, one for each position.
        layers: which layers of the model these are; `weights[i]` is layer `layers[i]`.
        mask: the mask that was given, as Python, or "the model's own".
        name: the model.
    """

    weights: Float16[np.ndarray, "layers heads query key"]
    tokens: list[str]
    layers: tuple[int, ...]
    mask: str
    name: str

    def __repr__(self) -> str:
        layers, heads, n, _ = self.weights.shape
        return f"AttentionMaps({self.name!r}: {layers} layers x {heads} heads, {n} tokens, mask: {self.mask})"


def attention_maps(lm, text, mask=None, *, layers=None) -> AttentionMaps:
    """The attention weights of every layer and head of a model on one text.

    A query that may attend to nothing attends to itself alone, as everywhere in labkit (`masks.self_for_empty_rows`).

    Args:
        lm: what `labkit.load` gives.
        text: a string, or the ids of its tokens: a list, or a tensor of shape (seq,) or (1, seq).
        mask: a labkit Mask to put in force (`labkit.masked` says what else it may be). None: what is in force already,
            the causal mask of a decoder, or what a conversion or a surrounding `masked` has set.
        layers: indices of the layers to keep, in this order; None for all.

    Raises:
        MaskError: no text, more tokens than the model has positions for, a layer the model does not have, or a mask for
            more than one row. ModelError: a model whose attention modules give no weights.
    """
    decoder = find_decoder(lm.model)
    n_layers = len(decoder.layers)
    chosen = tuple(range(n_layers)) if layers is None else tuple(map(int, layers))
    if not chosen or not set(chosen) <= set(range(n_layers)):
        raise MaskError(f"layers={layers!r}: expected a list of layers from 0 to {n_layers - 1}, or None for all")
    if getattr(mask, "batch_size", None) not in (None, 1):
        raise MaskError(f"{mask} is for a batch of {mask.batch_size} rows, and attention maps are of one text")
    ids = _token_ids(lm, text, decoder)  # (1, seq)
    if lm.tokenizer is None:
        tokens = [str(i) for i in ids[0].tolist()]
    else:  # as a figure shows them, except that long ones are not cut
        tokens = [visible(lm.tokenizer.decode([i]), longest=10_000) for i in ids[0].tolist()]
    with masked(lm.model, mask) if mask is not None else nullcontext():
        weights = _captured(lm, decoder, chosen, ids)
    name = "the model's own" if mask is None else repr(mask)
    return AttentionMaps(np.stack([weights[i] for i in chosen]), tokens, chosen, name, lm.name)


def _token_ids(lm, text, decoder: Decoder) -> Int[Tensor, "1 seq"]:
    if isinstance(text, str):
        if lm.tokenizer is None:
            raise MaskError(f"{lm.name} came without a tokenizer: pass the ids of the tokens instead of a text")
        text = lm.tokenizer(text)["input_ids"] if text else []
    ids = torch.as_tensor(text)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or len(ids) != 1 or not ids.numel():
        shape = f"ids of shape {(*ids.shape,)}"
        raise MaskError(f"attention maps are of one text: expected a text that is not empty, or its ids, not {shape}")
    require_positions(ids.shape[1], decoder.config, refusal=MaskError, cure="give a shorter text")
    vocabulary = decoder.config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise MaskError(f"the token ids of {lm.name} are 0 to {vocabulary - 1}, and one of these is not among them")
    return ids.long()


def _captured(lm, decoder: Decoder, chosen: tuple[int, ...], ids: Int[Tensor, "1 seq"]) -> dict[int, np.ndarray]:
    """One forward pass in eager attention; {layer: float16 (heads, q, k)}."""
    weights: dict[int, np.ndarray] = {}

    def keep(index: int, module: nn.Module, args, output) -> None:
        given = output[1] if isinstance(output, (tuple, list)) and len(output) > 1 else None
        if isinstance(given, Tensor) and given.ndim == 4:
            weights[index] = given[0].to(torch.float16).cpu().numpy()

    with ExitStack() as hooks, evaluating(lm.model), _eager(decoder):
        for i in chosen:
            hooks.callback(decoder.attentions[i].register_forward_hook(partial(keep, i)).remove)
        Runner(lm.model, decoder).run(ids)
    n = ids.shape[1]
    for i in chosen:
        if i not in weights or weights[i].shape[1:] != (n, n):
            given = f"of shape {weights[i].shape}" if i in weights else "none"
            raise ModelError(
                f"{lm.name}: expected attention weights (heads, {n}, {n}) from {decoder.names[i]} "
                f"({type(decoder.attentions[i]).__name__}) under eager attention, and got {given}"
            )
    return weights


@contextmanager
def _eager(decoder: Decoder) -> Iterator[None]:
    """Eager attention for the block.

    The configs are set directly, because `set_attn_implementation` may load kernels and changes all parts of a
    multimodal model. Their window is restored too: a converted model adapts it to the backend in use.
    """
    configs = (decoder.config, *(getattr(attention, "config", decoder.config) for attention in decoder.attentions))
    with ExitStack() as stack:
        for config in {id(config): config for config in configs}.values():
            window = {"sliding_window": config.sliding_window} if hasattr(config, "sliding_window") else {}
            stack.enter_context(replaced(config, _attn_implementation_internal="eager", **window))
        yield
