"""Mask building: what makes the mask, or hands it to a layer, is replaced; the flag beside it is forgotten."""

import sys
from typing import Any

from torch import nn

from labkit.decoder.anatomy import find_decoder
from labkit.pitfalls.exhibit import Pitfall
from labkit.pitfalls.interventions import (
    TEXT_FAMILIES,
    WINDOWED_FAMILIES,
    Batch,
    rebind_forward,
    replace_mask,
)


def _forward_with_patched_builder(stack: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The stack's own forward, with its module's `create_causal_mask` exchanged for the time of this one call.

    A real patch stays in the module and converts, or breaks, every other model of the family in the process as well.
    """
    from transformers.masking_utils import create_bidirectional_mask

    modeling = sys.modules[type(stack).__module__]
    original = modeling.create_causal_mask
    modeling.create_causal_mask = create_bidirectional_mask
    try:
        return type(stack).forward(stack, *args, **kwargs)
    finally:
        modeling.create_causal_mask = original


def _patched_mask_builder(model: nn.Module) -> None:
    rebind_forward(find_decoder(model).stack, _forward_with_patched_builder)


def _attention_without_mask(attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kwargs["attention_mask"] = None
    return type(attn).forward(attn, *args, **kwargs)


def _none_mask_in_attention(model: nn.Module) -> None:
    for attn in find_decoder(model).attentions:
        rebind_forward(attn, _attention_without_mask)


def _copied_hybrid(batch: Batch) -> Any:
    real_keys, n = batch.real_keys, batch.query_length // 2
    return batch.mask(lambda row, head, q, kv: real_keys[row, kv] & ((kv <= q) | (q >= n) | (kv >= n)))


def _windows_without_abs(model: nn.Module) -> None:
    window = find_decoder(model).config.sliding_window

    def masks_per_layer_type(batch: Batch) -> dict[str, Any]:
        real_keys = batch.real_keys
        return {
            "full_attention": batch.mask(lambda row, head, q, kv: real_keys[row, kv]),
            "sliding_attention": batch.mask(lambda row, head, q, kv: real_keys[row, kv] & (q - kv < window)),
        }

    replace_mask(model, masks_per_layer_type)


EXHIBITS = (
    Pitfall(
        name="patched-mask-builder",
        title="Exchanging the function that builds the mask",
        code="from transformers.masking_utils import create_bidirectional_mask\n"
        "import transformers.models.llama.modeling_llama as modeling\n"
        "modeling.create_causal_mask = create_bidirectional_mask",
        story="""This goes to the root: the function that makes the causal mask now makes a bidirectional one,
            padding included. It is even frugal: when nothing has to be hidden it returns no mask at all. But "no
            mask" is a message to the kernel, and SDPA reads it together with the layer's flag, which nobody has
            touched: no mask, causal layer, so causal attention.""",
        takes_effect_when="""Under eager and FlexAttention always, under SDPA only when some row of the batch is
            padded; an unpadded batch is causal. In Gemma 2 and 3 the local layers have a builder of their own and
            stay causal on every backend.""",
        families=TEXT_FAMILIES,
        symptom="padding-flips-mask",
        install=_patched_mask_builder,
    ),
    Pitfall(
        name="none-mask-in-attention",
        title="attention_mask = None inside every attention layer",
        code="def forward(self, hidden_states, attention_mask=None, **kwargs):\n"
        "    return original_forward(self, hidden_states, attention_mask=None, **kwargs)",
        story="""If the mask is what forbids, then taking it away at the last moment allows everything. Under eager
            that is so, and what it allows includes the pads and everything outside the window. Under SDPA no mask
            means "use the flag", and the flag says causal: there the wrapper has removed the padding and kept the
            triangle.""",
        takes_effect_when="""Under eager and FlexAttention for an unpadded batch in models without local layers.
            Under SDPA never: causal, with or without padding, and left pads are seen by all. In Gemma 2 and 3 the
            local layers lose their window.""",
        families=TEXT_FAMILIES,
        symptom="pad-leak",
        install=_none_mask_in_attention,
    ),
    Pitfall(
        name="copied-hybrid-mask",
        title="The hybrid mask whose square is too small",
        code="mask = torch.zeros(batch, 1, length, length)\n"
        'mask[:, :, :n, :n] = torch.full((n, n), float("-inf")).triu(1)',
        story="""The plan: the first n tokens look only to the left, the rest see everything. The code puts its
            triangle into the square of the first n queries and first n *keys*, and the columns from n on stay open.
            So the first n tokens cannot see their next neighbour and can see the end of the text. With two layers
            even that is blurred, since any token relays what it saw: only a look at one layer at a time shows the
            hole.""",
        takes_effect_when="""Never as meant, on any backend: the rows of the first n tokens need the whole width,
            `mask[:, :, :n, :]`. The part for later tokens is right, except that local layers of Gemma 2 and 3
            become global.""",
        families=TEXT_FAMILIES,
        symptom="other",
        install=lambda model: replace_mask(model, _copied_hybrid),
    ),
    Pitfall(
        name="window-without-abs",
        title="A window that only ends on the left",
        code="near = (q[:, None] - k[None, :]) < window   # |q - k| was meant\n"
        "masks = {'full_attention': full, 'sliding_attention': full & near}",
        story="""In a causal model `q - k < W` is the whole definition of a window, for keys to the right never come
            up. Take the triangle away and the same line has no right end: local layers look W-1 tokens back and all
            the way forward. On texts that fit into the window it is even a correct conversion.""",
        takes_effect_when="""On every backend and with any padding, as long as the text is no longer than the
            window. Beyond it the local layers are lopsided, and the global layers cover up for them in any
            whole-model test.""",
        families=WINDOWED_FAMILIES,
        symptom="one-sided-window",
        install=_windows_without_abs,
    ),
)
