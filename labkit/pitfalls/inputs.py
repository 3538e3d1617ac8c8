"""Inputs: the model is left alone, and a mask of the caller's own making goes in with the batch.

Each exhibit is a forward pre-hook on the decoder stack: it hands over what the recipe's author would have passed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.pitfalls.exhibit import Pitfall
from labkit.pitfalls.interventions import TEXT_FAMILIES, Batch, replace_mask


def _all_ones_2d(batch: Batch) -> Tensor:
    return torch.ones_like(batch.real_keys, dtype=torch.long)


def _all_ones_4d(batch: Batch) -> Tensor:
    return torch.ones(batch.shape_4d, dtype=batch.dtype, device=batch.real_keys.device)


def _inverted_bool(batch: Batch) -> Tensor:
    return ~batch.spread()


def _bool_4d(batch: Batch) -> Tensor:
    return batch.spread()


def _query_rows_masked(batch: Batch) -> Tensor:
    keys = batch.real_keys[:, None, None, :]  # (batch, 1, 1, kv_len)
    queries = batch.real_keys[:, None, -batch.query_length :, None]  # (batch, 1, q_len, 1)
    zeros = torch.zeros(batch.shape_4d, dtype=batch.dtype, device=keys.device)
    return zeros.masked_fill(~(queries & keys), float("-inf"))


def _first_row_for_all(batch: Batch) -> Any:
    first_row = batch.real_keys[0]
    return batch.mask(lambda row, head, q, kv: first_row[kv])


def _small_negative(batch: Batch) -> Tensor:
    padding = 1.0 - batch.real_keys.to(batch.dtype)
    return (padding * -1.0)[:, None, None, :].expand(batch.shape_4d)


def _drop_position_ids(stack: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return args, {**kwargs, "position_ids": None}


def _left_padding_without_positions(model: nn.Module) -> None:
    stack = find_decoder(model).stack
    stack.config.is_causal = False
    stack.register_forward_pre_hook(_drop_position_ids, with_kwargs=True)


EXHIBITS = (
    Pitfall(
        name="all-ones-mask-2d",
        title="An attention mask full of ones",
        code="model(input_ids, attention_mask=torch.ones_like(input_ids))",
        story="""A one means "attend to this token", so a mask of ones should mean "attend to everything". The 2-D
            mask only says which tokens are *real*, however; the causal mask is made separately and the two are
            combined. Ones everywhere declare the pads to be words and change nothing about direction.""",
        takes_effect_when="""Never as a conversion, on any backend or architecture. On a padded batch it does harm
            besides: left pads now come first in every sentence, and each real token sees them.""",
        families=TEXT_FAMILIES,
        symptom="causal",
        install=lambda model: replace_mask(model, _all_ones_2d),
    ),
    Pitfall(
        name="all-ones-mask-4d",
        title="A full mask of shape (batch, 1, S, S)",
        code="mask = torch.ones(batch, 1, length, length, dtype=model.dtype)\nmodel(input_ids, attention_mask=mask)",
        story="""A 4-D mask is passed through untouched, so this one does remove the triangle, in every layer, and a
            test on one sentence is convinced. What went with the triangle: the padding, which the causal mask used
            to carry, and the window of local layers, which now reach as far as the global ones. And since a float
            mask is *added* to the scores, its ones mean nothing: zeros, or sevens, would do the same.""",
        takes_effect_when="""On every backend, for an unpadded batch, in models without local layers (GPT-2, Gemma
            1, Llama). With padding real tokens read the pads; in Gemma 2 and 3 local layers become global, which no
            text shorter than the window shows. (FlexAttention on a CPU does not survive a 4-D tensor at all.)""",
        families=TEXT_FAMILIES,
        symptom="pad-leak",
        install=lambda model: replace_mask(model, _all_ones_4d),
    ),
    Pitfall(
        name="inverted-bool-mask",
        title="A bool mask the wrong way round",
        code="mask = (attention_mask == 0)[:, None, None, :].expand(-1, 1, length, length)\n"
        "model(input_ids, attention_mask=mask)   # True = ignore this key",
        story="""In `nn.MultiheadAttention` True means "leave this key out"; in `scaled_dot_product_attention` True
            means "this key takes part". Both conventions live in one library, both masks have one shape, and
            nothing can complain. The model ends up listening to the padding alone.""",
        takes_effect_when="""Nowhere as meant. Under SDPA an unpadded batch has no key left and its tokens stop
            interacting; in a padded row real tokens read pads only. Under eager the bools are added as zeros and
            ones, so every token sees every other and the pads, the pads favoured.""",
        families=TEXT_FAMILIES,
        symptom="pad-leak",
        install=lambda model: replace_mask(model, _inverted_bool),
    ),
    Pitfall(
        name="bool-mask-under-eager",
        title="A correct bool mask, handed to a backend that adds",
        code="mask = attention_mask.bool()[:, None, None, :].expand(-1, 1, length, length)\n"
        "model(input_ids, attention_mask=mask)   # True = attend",
        story="""This is the form the PyTorch documentation shows, and under SDPA it does just what it says. Eager
            attention is one line, `scores + mask`, and PyTorch will gladly add a bool to a float: True is 1, False
            is 0, and a forbidden key is merely a little less likely. Choosing "eager" to look at attention maps is
            how one gets here.""",
        takes_effect_when="""Under SDPA in models without local layers (GPT-2, Gemma 1, Llama), padded or not. Under
            eager the triangle is gone as well, but pads leak into every token; in Gemma 2 and 3 the one mask for
            all layers also turns local layers into global ones.""",
        families=TEXT_FAMILIES,
        symptom="pad-leak",
        install=lambda model: replace_mask(model, _bool_4d),
    ),
    Pitfall(
        name="query-rows-masked",
        title="Masking the rows of the pads as well",
        code="real = attention_mask.bool()\npair = real[:, None, :, None] & real[:, None, None, :]\n"
        'mask = torch.zeros(pair.shape).masked_fill(~pair, float("-inf"))',
        story="""A pad should neither be seen nor see, so both its column and its row are masked: symmetric and
            tidy. But the softmax of a row of -inf alone is 0/0. The NaN is born in a row nobody reads, becomes a
            key and a value of the next layer, and there -inf + NaN is NaN for everybody.""",
        takes_effect_when="""In models without local layers: with no padding on every backend, and under SDPA also
            with padding, where the kernel returns zeros for an empty row. Under eager one padded row turns the real
            tokens of that row into NaN from the second layer on. Local layers of Gemma 2 and 3 become global as
            well.""",
        families=TEXT_FAMILIES,
        symptom="nan-rows",
        install=lambda model: replace_mask(model, _query_rows_masked),
    ),
    Pitfall(
        name="first-row-mask",
        title="One mask for the whole batch, taken from its first row",
        code="real = attention_mask[0].bool()\n"
        "mask = torch.zeros(1, 1, length, length).masked_fill(~real, torch.finfo(model.dtype).min)\n"
        "model(input_ids, attention_mask=mask)",
        story="""Written and tried with a batch of one, where the first row is every row; then broadcasting quietly
            stretches it over the rest. A short first row blinds the others to their last words, a long first row
            shows them their pads, and the same sentence gets another answer in other company.""",
        takes_effect_when="""On every backend when all rows have the length of the first, in models without local
            layers. In a mixed batch what a row can see depends on its neighbour; in Gemma 2 and 3 the windows are
            lost too.""",
        families=TEXT_FAMILIES,
        symptom="pad-leak",
        install=lambda model: replace_mask(model, _first_row_for_all),
    ),
    Pitfall(
        name="small-negative-mask",
        title="A mask that forgets its big number",
        code="mask = (1.0 - attention_mask[:, None, None, :]) * -1.0   # where is the -10000?\n"
        "model(input_ids, attention_mask=mask.expand(-1, 1, length, length))",
        story="""An additive mask forbids nothing: it makes a key less likely, by a factor of e to the mask. With -1
            that is about a third, and the pads go on being heard. The usual -10000 only hides the fault better: it
            holds until scores grow to that size, which training can make them do whenever a look at the forbidden
            key pays.""",
        takes_effect_when="""For an unpadded batch, on every backend, in models without local layers: nothing is to
            be hidden then. With padding the pads leak on every backend; local layers of Gemma 2 and 3 become
            global.""",
        families=TEXT_FAMILIES,
        symptom="pad-leak",
        install=lambda model: replace_mask(model, _small_negative),
    ),
    Pitfall(
        name="left-padding-without-positions",
        title="Left padding without position_ids",
        code='tokenizer.padding_side = "left"\n'
        "model.config.is_causal = False\n"
        "model(input_ids, attention_mask=attention_mask)   # no position_ids",
        story="""The mask is right and hides the pads from everyone, so padding on the left should be as good as on
            the right. GPT-2 adds a learned vector for every absolute position, though, and counts the pads: behind
            three of them the first word sits at position 3. Every influence matrix is full, and the answer depends
            on the longest neighbour.""",
        takes_effect_when="""The mask is bidirectional on every backend and with any padding. The hidden states are
            those of the unpadded sentence without padding and with right padding, not with left padding, unless
            position_ids are computed from the mask. Rotary models only look at distances and do not mind.""",
        families=("gpt2",),
        symptom="left-padding-position-shift",
        install=_left_padding_without_positions,
    ),
)
