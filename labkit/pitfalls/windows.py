"""Windows: the direction is right, how far the local layers reach (or where a packed text ends) is not."""

from torch import nn

from labkit.decoder.anatomy import find_decoder
from labkit.pitfalls.exhibit import Pitfall
from labkit.pitfalls.interventions import TEXT_FAMILIES, config_with, rebuild_in_place


def _config_flag_alone(model: nn.Module) -> None:
    find_decoder(model).config.is_causal = False


def _gemma3_flag_set_late(model: nn.Module) -> None:
    find_decoder(model).config.use_bidirectional_attention = True


def _gemma3_flag_at_construction(model: nn.Module) -> None:
    rebuild_in_place(model, config_with(model, use_bidirectional_attention=True))


EXHIBITS = (
    Pitfall(
        name="config-flag-alone",
        title="config.is_causal = False, and nothing else: nearly right",
        code="model.config.is_causal = False",
        story="""This is the supported switch, and it does convert: mask and flag both follow it, padded or not. Two
            things come along that nobody asked for. The bidirectional window counts its edge differently from the
            causal one, so local layers see one token further than they were trained to. And the bidirectional mask
            is built without position_ids, so texts packed into one row, which the causal model kept apart, now read
            each other.""",
        takes_effect_when="""On every backend, with any padding. Exact for texts that are not packed, in models
            without local layers, or no longer than the window; otherwise the window is off by one, and packed texts
            leak in every architecture.""",
        families=TEXT_FAMILIES,
        symptom="packing-leak",
        install=_config_flag_alone,
    ),
    Pitfall(
        name="gemma3-flag-set-late",
        title="Gemma 3's own switch, set on a finished model",
        code="model.config.use_bidirectional_attention = True",
        story="""The line that does nothing in Gemma 1 and 2 works in Gemma 3, whose stack reads the switch on every
            call and opens the mask of global and local layers alike, the window kept at its trained reach. But the
            layers were built before the switch was set and still carry `is_causal = True`: whoever goes by the flag
            and not by the mask, such as a flash-attention kernel, has a causal model. Which window you get depends
            on *when* you set it.""",
        takes_effect_when="""Where the mask decides: eager, SDPA, FlexAttention, any padding. Not where the layer's
            flag decides (flash attention). The same switch given at construction halves the window instead.""",
        families=("gemma3_text",),
        symptom="bidirectional",
        install=_gemma3_flag_set_late,
    ),
    Pitfall(
        name="gemma3-flag-at-construction",
        title="Gemma 3's own switch, set in time: half a window",
        code="model = AutoModel.from_pretrained(name, use_bidirectional_attention=True)",
        story="""Mask and flag agree now, and the whole model is bidirectional on every backend. The constructor
            also read the window as a *total* width and halved it, as EmbeddingGemma was trained to have it. For a
            model that was trained with the full window this is a change of architecture, made in silence, and texts
            shorter than half a window cannot show it.""",
        takes_effect_when="""On every backend, with any padding. Local layers reach half as far to the left as in
            training. If that is what you want, say so; labkit calls it window="halve".""",
        families=("gemma3_text",),
        symptom="window-differs",
        install=_gemma3_flag_at_construction,
    ),
)
