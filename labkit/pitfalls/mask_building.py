"""Mask building: the recipe replaces the code that builds a mask or passes it to a layer, and forgets the flag."""

import sys
from typing import Any

from torch import nn

from labkit.decoder.anatomy import find_decoder
from labkit.pitfalls.exhibit import WINDOWED_FAMILIES, Pitfall
from labkit.pitfalls.interventions import Batch, rebind_forward, replace_mask


def _forward_with_patched_builder(stack: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The stack's own forward, with `create_causal_mask` of its module replaced during this call alone."""
    from transformers.masking_utils import create_bidirectional_mask

    modeling = sys.modules[type(stack).__module__]
    original = modeling.create_causal_mask
    modeling.create_causal_mask = create_bidirectional_mask
    try:
        return type(stack).forward(stack, *args, **kwargs)
    finally:
        modeling.create_causal_mask = original


def _attention_without_mask(attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(attn).forward(attn, *args, **{**kwargs, "attention_mask": None})


def _none_mask_in_attention(model: nn.Module) -> None:
    for attn in find_decoder(model).attentions:
        rebind_forward(attn, _attention_without_mask)


def _copied_hybrid(_: nn.Module, batch: Batch) -> Any:
    query, key, n = batch.query, batch.key, batch.query_length // 2
    return batch.render(batch.spread() & ((key <= query) | (query >= n) | (key >= n)))


def _windows_without_abs(stack: nn.Module, batch: Batch) -> dict[str, Any]:
    near = batch.query - batch.key < stack.config.sliding_window
    return {
        "full_attention": batch.render(batch.spread()),
        "sliding_attention": batch.render(batch.spread() & near),
    }


EXHIBITS = (
    Pitfall(
        name="patched-mask-builder",
        title="Exchanging the function that builds the mask",
        code="from transformers.masking_utils import create_bidirectional_mask\n"
        "import transformers.models.llama.modeling_llama as modeling\n"
        "modeling.create_causal_mask = create_bidirectional_mask",
        story="""The function that builds the causal mask now builds a bidirectional one, with the padding. When
            nothing has to be hidden it returns no mask at all. But SDPA combines "no mask" with the flag of the
            layer, which is unchanged: no mask and a causal layer give causal attention.""",
        takes_effect_when="""Under eager and FlexAttention always, under SDPA only when some row of the batch is
            padded; an unpadded batch is causal. In Gemma 2 and 3 another function builds the mask of the local
            layers, which stay causal on every backend.""",
        symptom="padding-flips-mask",
        install=lambda model: rebind_forward(find_decoder(model).stack, _forward_with_patched_builder),
    ),
    Pitfall(
        name="none-mask-in-attention",
        title="attention_mask = None inside every attention layer",
        code="def forward(self, hidden_states, attention_mask=None, **kwargs):\n"
        "    return original_forward(self, hidden_states, attention_mask=None, **kwargs)",
        story="""The mask is what forbids, so removing it just before the attention should allow everything. Under
            eager it does, and everything includes the pads and all tokens outside the window. Under SDPA no mask
            means "use the flag", and the flag is causal: the wrapper removes the padding and keeps the triangle.""",
        takes_effect_when="""Under eager and FlexAttention for an unpadded batch in models without local layers.
            Under SDPA never: causal, with or without padding, and every token attends to left pads. In Gemma 2 and 3
            the local layers lose their window.""",
        symptom="pad-leak",
        install=_none_mask_in_attention,
    ),
    Pitfall(
        name="copied-hybrid-mask",
        title="The hybrid mask whose square is too small",
        code="mask = torch.zeros(batch, 1, length, length)\n"
        'mask[:, :, :n, :n] = torch.full((n, n), float("-inf")).triu(1)',
        story="""The plan: the first n tokens attend only to the left, the rest to everything. The code writes its
            triangle into the square of the first n queries and first n *keys*, and leaves the columns from n on open.
            So the first n tokens cannot attend to their next neighbour but can attend to the end of the text. With
            two layers every token passes on what it received, so only a measurement of each layer shows the hole.""",
        takes_effect_when="""Never as meant, on any backend: the rows of the first n tokens need the whole width,
            `mask[:, :, :n, :]`. The part for later tokens is right, except that local layers of Gemma 2 and 3
            become global.""",
        symptom="other",
        install=replace_mask(_copied_hybrid),
    ),
    Pitfall(
        name="window-without-abs",
        title="A window that only ends on the left",
        code="near = (q[:, None] - k[None, :]) < window   # |q - k| was meant\n"
        "masks = {'full_attention': full, 'sliding_attention': full & near}",
        story="""In a causal model `q - k < W` is the whole definition of a window, because keys to the right are
            excluded anyway. Without the triangle the same line has no end on the right: local layers attend to W-1
            tokens on the left and to everything on the right. For texts that fit into the window the conversion is
            correct.""",
        takes_effect_when="""On every backend and with any padding, if the text is no longer than the window. In
            longer texts the local layers are one-sided, and because of the global layers no test of the whole model
            shows it.""",
        symptom="one-sided-window",
        install=replace_mask(_windows_without_abs),
        families=WINDOWED_FAMILIES,
    ),
)
