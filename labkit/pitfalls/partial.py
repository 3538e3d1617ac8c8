"""Partial conversions: the mask is open, but a window or a packed text ends elsewhere, or some place is left out."""

from typing import Any

from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.errors import ConversionError
from labkit.pitfalls.exhibit import Pitfall
from labkit.pitfalls.interventions import both_directions, build_with, rebind_forward, set_in_config


def _attention_both_ways(attn: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    kwargs["attention_mask"] = both_directions(hidden_states, kwargs.get("attention_mask"))
    return type(attn).forward(attn, hidden_states, *args, **kwargs)


def _forward_not_causal(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(model).forward(model, *args, **{**kwargs, "is_causal": False})


def _top_forward_only(model: nn.Module) -> None:
    if find_decoder(model).stack is model:
        raise ConversionError(
            "pitfall 'top-forward-only' needs a model with a head around its decoder stack; "
            f"this {type(model).__name__} is a bare stack"
        )
    rebind_forward(model, _forward_not_causal)


def _not_causal_in_training(stack: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    return (args, {**kwargs, "is_causal": False}) if stack.training else None


def _training_only(model: nn.Module) -> None:
    find_decoder(model).stack.register_forward_pre_hook(_not_causal_in_training, with_kwargs=True)


EXHIBITS = (
    Pitfall(
        name="config-flag-alone",
        title="config.is_causal = False, and nothing else: nearly right",
        code="model.config.is_causal = False",
        story="""This is the supported switch, and it does convert: mask and flag both follow it, padded or not. It
            has two side effects. The bidirectional window counts its edge differently from the causal one, so local
            layers reach one token further than they were trained to. And the bidirectional mask is built without
            position_ids, so texts packed into one row, which the causal model kept apart, attend to each other.""",
        takes_effect_when="""On every backend, with any padding. Exact for texts that are not packed, in models
            without local layers, or no longer than the window. Otherwise the window is off by one, and packed texts
            leak in every architecture.""",
        symptom="packing-leak",
        install=set_in_config(is_causal=False),
    ),
    Pitfall(
        name="gemma3-flag-set-late",
        title="Gemma 3's own switch, set on a finished model",
        code="model.config.use_bidirectional_attention = True",
        story="""The line that does nothing in Gemma 1 and 2 works in Gemma 3, which reads the switch on every call
            and opens the mask of global and local layers, with the window at its trained reach. But the layers were
            built before the switch was set and still have `is_causal = True`. Code that reads the flag and not the
            mask, such as a flash-attention kernel, is causal. The window depends on *when* you set the switch.""",
        takes_effect_when="""Where the mask decides: eager, SDPA, FlexAttention, any padding. Not where the layer's
            flag decides (flash attention). The same switch given at construction halves the window instead.""",
        symptom="bidirectional",
        install=set_in_config(use_bidirectional_attention=True),
        families=("gemma3_text",),
    ),
    Pitfall(
        name="gemma3-flag-at-construction",
        title="Gemma 3's own switch, set in time: half a window",
        code="model = AutoModel.from_pretrained(name, use_bidirectional_attention=True)",
        story="""Mask and flag now agree, and the whole model is bidirectional on every backend. But the constructor
            reads the window as a *total* width and halves it, as EmbeddingGemma was trained. For a model trained with
            the full window this changes the architecture without a warning, and texts shorter than half a window
            cannot show it.""",
        takes_effect_when="""On every backend, with any padding. Local layers reach half as far to the left as in
            training. If that is what you want, state it: in labkit it is window="halve".""",
        symptom="window-differs",
        install=build_with(use_bidirectional_attention=True),
        families=("gemma3_text",),
    ),
    Pitfall(
        name="first-layer-only",
        title="Unmasking the first layer and stopping there",
        code="convert(model.model.layers[0].self_attn)   # a loop was meant",
        story="""One layer is enough to let the future in: every layer above passes on, at each position, what the
            first layer mixed. So changing a later word changes every earlier output, and a test of the whole model
            passes. All other layers are still causal.""",
        takes_effect_when="""On every backend and with any padding, for this one layer. Measured as a whole the model
            looks bidirectional (as far as the layer's window reaches); measured layer by layer it is mixed.""",
        symptom="mixed",
        install=lambda model: rebind_forward(find_decoder(model).attentions[0], _attention_both_ways),
    ),
    Pitfall(
        name="last-layer-only",
        title="Unmasking the last layer and stopping there",
        code="convert(model.model.layers[-1].self_attn)",
        story="""Only the last layer feeds the head, so unmasking it seems enough. It mixes the future in at the end,
            where every output attends to every position. But those states were computed from left to right: each
            depends on its left context alone, so no ambiguity was resolved by later words.""",
        takes_effect_when="""On every backend and with any padding, for this one layer. Measured as a whole the model
            looks fully converted; measured layer by layer it is mixed.""",
        symptom="mixed",
        install=lambda model: rebind_forward(find_decoder(model).attentions[-1], _attention_both_ways),
    ),
    Pitfall(
        name="top-forward-only",
        title="Wrapping only the outermost forward",
        code="original = model.forward\nmodel.forward = lambda *a, **k: original(*a, is_causal=False, **k)",
        story="""A call of `model(...)` is bidirectional, so the test next to the wrapper passes. But an encoder is
            usually called one level lower: an embedding or token-classification head uses `model.model`, because it
            needs hidden states and not logits. That object is unchanged.""",
        takes_effect_when="""On every backend and with any padding, through the outer `forward` only. Through
            `model.model`, `model.transformer`, `model.base_model`, or after saving and loading, the model is
            causal.""",
        symptom="depends-on-entry",
        install=_top_forward_only,
    ),
    Pitfall(
        name="training-only",
        title="Converted in the training loop, evaluated as it came",
        code="class Trainer(transformers.Trainer):\n"
        "    def compute_loss(self, model, inputs, **kwargs):\n"
        "        return super().compute_loss(model, {**inputs, 'is_causal': False}, **kwargs)",
        story="""The keyword is right, and training is bidirectional. Evaluation, prediction and the deployed model
            run other code, which does not pass it. The weights are trained with both directions and used with one:
            the loss is good, the scores are poor, and people suspect the data.""",
        takes_effect_when="""In training mode, on every backend and with any padding. In evaluation mode the model
            is causal.""",
        symptom="train-eval-mismatch",
        install=_training_only,
    ),
)
