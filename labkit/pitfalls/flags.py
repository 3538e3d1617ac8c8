"""Flags: an attribute is set, the model obeys it nowhere, or only here and there."""

import tempfile
from types import MethodType

import torch
from torch import nn

from labkit.decoder.anatomy import find_decoder
from labkit.pitfalls.exhibit import Pitfall
from labkit.pitfalls.interventions import TEXT_FAMILIES, config_with, rebuild_in_place


def _use_cache_off(model: nn.Module) -> None:
    find_decoder(model).config.use_cache = False


def _is_decoder_off(model: nn.Module) -> None:
    find_decoder(model).config.is_decoder = False


def _layer_flag_off(model: nn.Module) -> None:
    for attn in find_decoder(model).attentions:
        attn.is_causal = False


def _config_flag_none(model: nn.Module) -> None:
    find_decoder(model).config.is_causal = None


def _config_keyword_dropped(model: nn.Module) -> None:
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        config = AutoConfig.from_pretrained(folder, is_causal=False)
    rebuild_in_place(model, config)


def _gemma_flag_set_late(model: nn.Module) -> None:
    find_decoder(model).config.use_bidirectional_attention = True


def _gemma_flag_at_construction(model: nn.Module) -> None:
    rebuild_in_place(model, config_with(model, use_bidirectional_attention=True))


def _multimodal_top_switch(model: nn.Module) -> None:
    model.config.is_causal = False


def _dead_update_causal_mask(model: nn.Module) -> None:
    def no_mask(stack: nn.Module, attention_mask, *args, **kwargs):
        """What the old hook was overridden with: the 2-D mask, nothing causal about it."""
        return attention_mask

    stack = find_decoder(model).stack
    stack._update_causal_mask = MethodType(no_mask, stack)


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
        story="""A key-value cache only makes sense when tokens are produced from left to right, so a model without
            a cache must be an encoder. The first half is true. But the cache stores what the mask has already
            decided: without it the model computes the same causal attention, all of it again at every step.""",
        takes_effect_when="""Never, on no backend, with no padding and no architecture: the setting decides what is
            returned beside the hidden states, not how they are computed.""",
        families=TEXT_FAMILIES,
        symptom="causal",
        install=_use_cache_off,
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
        families=TEXT_FAMILIES,
        symptom="causal",
        install=_is_decoder_off,
    ),
    Pitfall(
        name="layer-flag-off",
        title="Setting is_causal = False on every attention layer",
        code="for layer in model.model.layers:\n    layer.self_attn.is_causal = False",
        story="""The attribute has the right name, it sits in the right place, and a quick test on one sentence
            under SDPA shows a bidirectional model. Yet the attribute is only a tie-breaker: it is consulted when
            the layer receives *no* mask. As soon as one row of the batch is padded the stack builds a causal mask,
            every row gets it, and the flag is not asked any more.""",
        takes_effect_when="""Under SDPA, in layers that are handed no mask: no padded row in the batch, and for
            local layers a text that fits into the window. With a single padded row, under eager attention or under
            FlexAttention, the model is causal again and says nothing.""",
        families=TEXT_FAMILIES,
        symptom="padding-flips-mask",
        install=_layer_flag_off,
    ),
    Pitfall(
        name="config-flag-none",
        title="config.is_causal = None",
        code="model.config.is_causal = None   # neither causal nor not: let the model decide",
        story="""None is falsy, so it ought to be as good as False, and the part of the library that builds masks
            agrees. The part that picks the kernel asks `is not None` instead, finds no opinion, and falls back to
            each layer's own flag, which still says causal. Two readers of one field, two answers.""",
        takes_effect_when="""Wherever the mask decides: eager, FlexAttention, SDPA with a padded row. Under SDPA
            without padding a layer that is handed no mask stays causal, so the unpadded batch is the one that
            fails.""",
        families=TEXT_FAMILIES,
        symptom="padding-flips-mask",
        install=_config_flag_none,
    ),
    Pitfall(
        name="config-keyword-dropped",
        title="Passing is_causal=False as a loading keyword",
        code="config = AutoConfig.from_pretrained(name, is_causal=False)\n"
        "model = AutoModelForCausalLM.from_pretrained(name, config=config)",
        story="""Loading keywords override fields of the config: that is how everyone sets `attention_dropout`. But
            only fields that the config class already knows are overridden, and `is_causal` is not among them; the
            keyword is put aside without a word. Handed straight to the model it is at least refused aloud with a
            TypeError.""",
        takes_effect_when="""Only where the config class declares the field. Where it does not, the loaded model is
            the causal one you had, on every backend. Assigning `config.is_causal` afterwards is not affected by
            this.""",
        families=TEXT_FAMILIES,
        symptom="causal",
        install=_config_keyword_dropped,
    ),
    Pitfall(
        name="gemma-flag-set-late",
        title="Gemma's own switch, set on a finished model",
        code="model.config.use_bidirectional_attention = True",
        story="""Gemma's config documents this very switch, and EmbeddingGemma was made with it. In Gemma 1 and 2,
            however, it is read once, while the attention layers are being built, to set their flag; by the time you
            have a model in your hands nobody looks at it again.""",
        takes_effect_when="""Never on a Gemma 1 or 2 that already exists. (Gemma 3 reads the switch on every call:
            see gemma3-flag-set-late.)""",
        families=("gemma", "gemma2"),
        symptom="causal",
        install=_gemma_flag_set_late,
    ),
    Pitfall(
        name="gemma-flag-at-construction",
        title="Gemma's own switch, set in time",
        code="model = AutoModel.from_pretrained(name, use_bidirectional_attention=True)",
        story="""Now the switch is there when the layers are built, and each of them is born with `is_causal =
            False`. That is the flag, and only the flag: the function that builds the mask knows nothing of it, so
            this has exactly the strength of setting the flag layer by layer.""",
        takes_effect_when="""In Gemma 1 under SDPA with an unpadded batch. With one padded row, or under eager or
            FlexAttention, it is causal. Gemma 2 does not run under SDPA at all because of its softcap, so there it
            never takes effect.""",
        families=("gemma", "gemma2"),
        symptom="padding-flips-mask",
        install=_gemma_flag_at_construction,
    ),
    Pitfall(
        name="multimodal-top-switch",
        title="The right switch, one config too high",
        code="model = Gemma3ForConditionalGeneration.from_pretrained(name)\nmodel.config.is_causal = False",
        story="""`config.is_causal = False` is the supported switch, and `model.config` is where one sets such
            things. A model that reads images has a config of configs, though: the language model inside is ruled by
            `config.text_config`, and what is written above it is not passed down.""",
        takes_effect_when="""Never on the multimodal model, on any backend. The same line on
            `model.config.text_config` reaches the language model.""",
        families=("gemma3",),
        symptom="causal",
        install=_multimodal_top_switch,
    ),
    Pitfall(
        name="dead-update-causal-mask",
        title="Overriding _update_causal_mask",
        code="def no_causal_mask(self, attention_mask, *args, **kwargs):\n"
        "    return attention_mask\n"
        "LlamaModel._update_causal_mask = no_causal_mask",
        story="""For years this method was where a model made its causal mask, and published bidirectional models
            override it. The library has since moved mask building into functions of its own. Python lets you define
            a method that nobody calls, so the override loads, runs and passes review.""",
        takes_effect_when="""Only with a version of the library whose models still call the method; measure to see
            whether the one you have does. Where they do not, the model is causal on every backend and with any
            padding.""",
        families=TEXT_FAMILIES,
        symptom="causal",
        install=_dead_update_causal_mask,
    ),
    Pitfall(
        name="dead-bias-buffer",
        title="Filling GPT-2's triangular buffer with ones",
        code="for block in model.transformer.h:\n"
        '    block.attn.register_buffer("bias", torch.ones(1, 1, 1024, 1024, dtype=torch.bool))',
        story="""GPT-2 used to carry its mask with it: a lower-triangular buffer called `bias` in every block.
            Filling it with ones was the textbook conversion and is still what old answers say. A block that is
            handed its mask from above reads no such buffer; it is put back on the shelf, full of ones, and nobody
            takes it down.""",
        takes_effect_when="""Only where the block still slices this buffer inside its forward pass. Otherwise GPT-2
            stays causal, eager and SDPA alike, padded or not.""",
        families=("gpt2",),
        symptom="causal",
        install=_dead_bias_buffer,
    ),
)
