"""Masks of their own: the caller passes a mask with the batch, or the recipe replaces the code that builds one."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.pitfalls.exhibit import WINDOWED_FAMILIES, Pitfall
from labkit.pitfalls.interventions import Batch, rebind_forward, replace_mask


def _query_rows_masked(_: nn.Module, batch: Batch) -> Tensor:
    real_queries = batch.real_keys[:, None, -batch.query_length :, None]  # (batch, 1, q_len, 1)
    may_attend = batch.spread() & real_queries
    return torch.zeros_like(may_attend, dtype=batch.dtype).masked_fill(~may_attend, float("-inf"))


def _drop_position_ids(stack: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return args, {**kwargs, "position_ids": None}


def _left_padding_without_positions(model: nn.Module) -> None:
    stack = find_decoder(model).stack
    stack.config.is_causal = False
    stack.register_forward_pre_hook(_drop_position_ids, with_kwargs=True)


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
        name="all-ones-mask-2d",
        title="An attention mask full of ones",
        code="model(input_ids, attention_mask=torch.ones_like(input_ids))",
        story="""A one means "attend to this token", so a mask of ones should mean "attend to everything". But the 2-D
            mask only marks which tokens are *real*. The causal mask is built separately, and the two are combined.
            Ones everywhere declare the pads to be words and leave the direction unchanged.""",
        takes_effect_when="""Never as a conversion, on any backend or architecture. On a padded batch it also does
            harm: left pads come first in their row, and every real token attends to them.""",
        symptom="causal",
        install=replace_mask(lambda _, batch: torch.ones_like(batch.real_keys, dtype=torch.long)),
    ),
    Pitfall(
        name="all-ones-mask-4d",
        title="A full mask of shape (batch, 1, S, S)",
        code="mask = torch.ones(batch, 1, length, length, dtype=model.dtype)\nmodel(input_ids, attention_mask=mask)",
        story="""A 4-D mask is used as it is, so this one does remove the triangle in every layer, and a test on one
            sentence passes. It also removes the padding, which the causal mask contained, and the window of local
            layers, which become global. A float mask is *added* to the scores, so its ones have no meaning: any
            constant has the same effect.""",
        takes_effect_when="""On every backend, for an unpadded batch, in models without local layers (GPT-2, Gemma 1,
            Llama). With padding, real tokens attend to the pads; in Gemma 2 and 3 local layers become global, which
            a text shorter than the window cannot show. (FlexAttention on a CPU crashes on a 4-D tensor.)""",
        symptom="pad-leak",
        install=replace_mask(lambda _, batch: torch.ones_like(batch.spread(), dtype=batch.dtype)),
    ),
    Pitfall(
        name="inverted-bool-mask",
        title="A bool mask the wrong way round",
        code="mask = (attention_mask == 0)[:, None, None, :].expand(-1, 1, length, length)\n"
        "model(input_ids, attention_mask=mask)   # True = ignore this key",
        story="""In `nn.MultiheadAttention` True means "leave this key out"; in `scaled_dot_product_attention` True
            means "this key takes part". Both conventions are in one library and both masks have the same shape, so
            nothing can raise an error. The model attends to the padding and to nothing else.""",
        takes_effect_when="""Never as meant. Under SDPA an unpadded batch has no key left, so its tokens do not
            interact; in a padded row, real tokens attend to pads only. Under eager the bools are added as zeros and
            ones: every token attends to every other and to the pads, with a preference for the pads.""",
        symptom="pad-leak",
        install=replace_mask(lambda _, batch: ~batch.spread()),
    ),
    Pitfall(
        name="bool-mask-under-eager",
        title="A correct bool mask, handed to a backend that adds",
        code="mask = attention_mask.bool()[:, None, None, :].expand(-1, 1, length, length)\n"
        "model(input_ids, attention_mask=mask)   # True = attend",
        story="""The PyTorch documentation shows this form, and under SDPA it is correct. Eager attention computes
            `scores + mask`, and PyTorch adds a bool to a float without an error: True is 1, False is 0, and a
            forbidden key is only a little less likely. People who choose "eager" to look at attention maps meet this
            fault.""",
        takes_effect_when="""Under SDPA in models without local layers (GPT-2, Gemma 1, Llama), padded or not. Under
            eager the triangle is gone too, but pads leak into every token; in Gemma 2 and 3 the one mask for all
            layers also makes local layers global.""",
        symptom="pad-leak",
        install=replace_mask(lambda _, batch: batch.spread()),
    ),
    Pitfall(
        name="query-rows-masked",
        title="Masking the rows of the pads as well",
        code="real = attention_mask.bool()\npair = real[:, None, :, None] & real[:, None, None, :]\n"
        'mask = torch.zeros(pair.shape).masked_fill(~pair, float("-inf"))',
        story="""A pad should neither attend nor be attended to, so its column and its row are both masked. But the
            softmax of a row of only -inf is 0/0. The NaN appears in a row whose output is not used, becomes a key and
            a value of the next layer, and there -inf + NaN is NaN for every query.""",
        takes_effect_when="""In models without local layers: with no padding on every backend, and under SDPA also
            with padding, because the kernel returns zeros for an empty row. Under eager one padded row makes its real
            tokens NaN from the second layer on. Local layers of Gemma 2 and 3 become global as well.""",
        symptom="nan-rows",
        install=replace_mask(_query_rows_masked),
    ),
    Pitfall(
        name="first-row-mask",
        title="One mask for the whole batch, taken from its first row",
        code="real = attention_mask[0].bool()\n"
        "mask = torch.zeros(1, 1, length, length).masked_fill(~real, torch.finfo(model.dtype).min)\n"
        "model(input_ids, attention_mask=mask)",
        story="""This was written and tested with a batch of one. With more rows, broadcasting applies the mask of the
            first row to all of them. A short first row hides the last words of the others, a long first row exposes
            their pads, and the result for a sentence depends on its batch.""",
        takes_effect_when="""On every backend when all rows have the length of the first, in models without local
            layers. In a mixed batch the mask of a row depends on the first row; in Gemma 2 and 3 the windows are lost
            too.""",
        symptom="pad-leak",
        install=replace_mask(lambda _, batch: batch.render(batch.spread()[:1])),
    ),
    Pitfall(
        name="small-negative-mask",
        title="A mask that forgets its big number",
        code="mask = (1.0 - attention_mask[:, None, None, :]) * -1.0   # where is the -10000?\n"
        "model(input_ids, attention_mask=mask.expand(-1, 1, length, length))",
        story="""An additive mask does not forbid a key, it multiplies its weight by e to the power of the mask. With
            -1 the factor is about a third, so the pads still take part. The usual -10000 only hides the fault better:
            it works until scores grow to that size, and training can increase them if attending to the forbidden
            key lowers the loss.""",
        takes_effect_when="""For an unpadded batch, on every backend, in models without local layers, because nothing
            has to be hidden. With padding the pads leak on every backend; local layers of Gemma 2 and 3 become
            global.""",
        symptom="pad-leak",
        install=replace_mask(lambda _, batch: batch.spread().to(batch.dtype) - 1.0),
    ),
    Pitfall(
        name="left-padding-without-positions",
        title="Left padding without position_ids",
        code='tokenizer.padding_side = "left"\n'
        "model.config.is_causal = False\n"
        "model(input_ids, attention_mask=attention_mask)   # no position_ids",
        story="""The mask is right and hides the pads from every token, so padding on the left should be as good as on
            the right. But GPT-2 adds a learned vector for every absolute position, and counts the pads: after three
            of them the first word is at position 3. Every influence matrix is full, and the result depends on the
            longest row of the batch.""",
        takes_effect_when="""The mask is bidirectional on every backend and with any padding. The hidden states equal
            those of the sentence alone without padding and with right padding, but not with left padding, unless
            position_ids are computed from the mask. Rotary models only use distances and are not affected.""",
        symptom="left-padding-position-shift",
        install=_left_padding_without_positions,
        families=("gpt2",),
    ),
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
