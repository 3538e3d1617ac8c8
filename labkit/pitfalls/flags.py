"""Flags: a field is set that the model never reads, or reads under some conditions only."""

import tempfile
from types import MethodType

import torch
from torch import nn

from labkit.decoder.anatomy import find_decoder
from labkit.pitfalls.exhibit import Pitfall
from labkit.pitfalls.interventions import build_with, rebuild_in_place, set_in_config


def _layer_flag_off(model: nn.Module) -> None:
    for attn in find_decoder(model).attentions:
        attn.is_causal = False


def _config_keyword_dropped(model: nn.Module) -> None:
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        config = AutoConfig.from_pretrained(folder, is_causal=False)
    rebuild_in_place(model, config)


def _multimodal_top_switch(model: nn.Module) -> None:
    model.config.is_causal = False


def _dead_update_causal_mask(model: nn.Module) -> None:
    def return_it_unchanged(stack: nn.Module, attention_mask, *args, **kwargs):
        return attention_mask

    stack = find_decoder(model).stack
    stack._update_causal_mask = MethodType(return_it_unchanged, stack)


def _dead_bias_buffer(model: nn.Module) -> None:
    length = find_decoder(model).config.n_positions
    for attn in find_decoder(model).attentions:
        ones = torch.ones(1, 1, length, length, dtype=torch.bool, device=attn.c_attn.weight.device)
        attn.register_buffer("bias", ones, persistent=False)


EXHIBITS = (
    Pitfall(
        name="use-cache-off",
        title="Switching off the cache",
        code="model.config.use_cache = False",
        story="""A key-value cache is only useful when tokens are generated from left to right, so a model without a
            cache must be an encoder. The first half is true. But the cache only stores intermediate results: without
            it the model computes the same causal attention again at every step.""",
        takes_effect_when="""Never, on any backend, padding or architecture: the setting decides what is returned
            beside the hidden states, not how they are computed.""",
        symptom="causal",
        install=set_in_config(use_cache=False),
    ),
    Pitfall(
        name="is-decoder-off",
        title="Telling the config that it is no decoder",
        code="model.config.is_decoder = False",
        story="""BERT and its relatives read this very field: with `is_decoder=True` they put on a causal mask. So
            the other value should take one off. Decoder-only models were never written to ask; the field is stored,
            saved, reloaded and read by nobody.""",
        takes_effect_when="""Never in the architectures shown here, on any backend: their mask is built without
            looking at the field. In BERT-like models it is a real switch, which is where the habit comes from.""",
        symptom="causal",
        install=set_in_config(is_decoder=False),
    ),
    Pitfall(
        name="layer-flag-off",
        title="Setting is_causal = False on every attention layer",
        code="for layer in model.model.layers:\n    layer.self_attn.is_causal = False",
        story="""The attribute has the right name and is in the right place, and a quick test on one sentence under
            SDPA shows a bidirectional model. But the attribute is only read when the layer receives *no* mask. As
            soon as one row of the batch is padded, the stack builds a causal mask for every row, and the flag is
            ignored.""",
        takes_effect_when="""Under SDPA, in layers that receive no mask: no padded row in the batch, and for local
            layers a text that fits into the window. With one padded row, under eager attention or under
            FlexAttention, the model is causal again, without a warning.""",
        symptom="padding-flips-mask",
        install=_layer_flag_off,
    ),
    Pitfall(
        name="config-flag-none",
        title="config.is_causal = None",
        code="model.config.is_causal = None   # neither causal nor not: let the model decide",
        story="""None is falsy, so it ought to work like False, and the part of the library that builds masks treats
            it so. The part that chooses the kernel tests `is not None` instead, and falls back to the flag of each
            layer, which is still causal. One field is read in two places, with two results.""",
        takes_effect_when="""Wherever the mask decides: eager, FlexAttention, SDPA with a padded row. Under SDPA
            without padding, a layer that receives no mask stays causal, so the unpadded batch is the one that
            fails.""",
        symptom="padding-flips-mask",
        install=set_in_config(is_causal=None),
    ),
    Pitfall(
        name="config-keyword-dropped",
        title="Passing is_causal=False as a loading keyword",
        code="config = AutoConfig.from_pretrained(name, is_causal=False)\n"
        "model = AutoModelForCausalLM.from_pretrained(name, config=config)",
        story="""Loading keywords override fields of the config; people set `attention_dropout` like this. But only
            fields that the config class declares are overridden, and `is_causal` is not among them, so the keyword
            is dropped without a warning. Passed to the model itself, it raises a TypeError.""",
        takes_effect_when="""Only where the config class declares the field. Elsewhere the loaded model is causal on
            every backend. Assigning `config.is_causal` afterwards is a different recipe and does work.""",
        symptom="causal",
        install=_config_keyword_dropped,
    ),
    Pitfall(
        name="gemma-flag-set-late",
        title="Gemma's own switch, set on a finished model",
        code="model.config.use_bidirectional_attention = True",
        story="""Gemma's config documents this switch, and EmbeddingGemma was made with it. In Gemma 1 and 2,
            however, it is read only once, while the attention layers are built, to set their flag. On a finished
            model it is never read again.""",
        takes_effect_when="""Never on an existing Gemma 1 or 2. (Gemma 3 reads the switch on every call: see
            gemma3-flag-set-late.)""",
        symptom="causal",
        install=set_in_config(use_bidirectional_attention=True),
        families=("gemma", "gemma2"),
    ),
    Pitfall(
        name="gemma-flag-at-construction",
        title="Gemma's own switch, set in time",
        code="model = AutoModel.from_pretrained(name, use_bidirectional_attention=True)",
        story="""Now the switch is set when the layers are built, and each of them starts with `is_causal = False`.
            Only this flag changes: the function that builds the mask does not read it. The recipe is therefore
            exactly as strong as setting the flag layer by layer.""",
        takes_effect_when="""In Gemma 1 under SDPA with an unpadded batch. With one padded row, or under eager or
            FlexAttention, the model is causal. Gemma 2 does not run under SDPA because of its softcap, so there the
            recipe never takes effect.""",
        symptom="padding-flips-mask",
        install=build_with(use_bidirectional_attention=True),
        families=("gemma", "gemma2"),
    ),
    Pitfall(
        name="multimodal-top-switch",
        title="The right switch, one config too high",
        code="model = Gemma3ForConditionalGeneration.from_pretrained(name)\nmodel.config.is_causal = False",
        story="""`config.is_causal = False` is the supported switch, and `model.config` is the usual place for such
            settings. But the config of a model that reads images contains other configs: the language model inside
            reads `config.text_config`, and a field of the outer config is not passed down.""",
        takes_effect_when="""Never on the multimodal model, on any backend. The same line on
            `model.config.text_config` reaches the language model.""",
        symptom="causal",
        install=_multimodal_top_switch,
        families=("gemma3",),
    ),
    Pitfall(
        name="dead-update-causal-mask",
        title="Overriding _update_causal_mask",
        code="def no_causal_mask(self, attention_mask, *args, **kwargs):\n"
        "    return attention_mask\n"
        "LlamaModel._update_causal_mask = no_causal_mask",
        story="""For years a model built its causal mask in this method, and published bidirectional models override
            it. The library has since moved mask building into functions outside the models. Python accepts a method
            that is never called, so the override loads, runs and passes review.""",
        takes_effect_when="""Only with a version of the library whose models still call the method; a measurement
            shows whether yours does. Elsewhere the model is causal on every backend and with any padding.""",
        symptom="causal",
        install=_dead_update_causal_mask,
    ),
    Pitfall(
        name="dead-bias-buffer",
        title="Filling GPT-2's triangular buffer with ones",
        code="for block in model.transformer.h:\n"
        '    block.attn.register_buffer("bias", torch.ones(1, 1, 1024, 1024, dtype=torch.bool))',
        story="""GPT-2 used to store its mask in every block, in a lower-triangular buffer called `bias`. Filling it
            with ones was the standard conversion, and old answers still recommend it. Today a block receives its
            mask as an argument and does not read the buffer.""",
        takes_effect_when="""Only where the block still uses this buffer in its forward pass. Elsewhere GPT-2 stays
            causal, under eager and SDPA, padded or not.""",
        symptom="causal",
        install=_dead_bias_buffer,
        families=("gpt2",),
    ),
)
