"""Places: a conversion that works, made in only some of the places where it is needed."""

from typing import Any

from torch import Tensor, nn

from labkit.decoder.anatomy import find_decoder
from labkit.errors import ConversionError
from labkit.pitfalls.exhibit import Pitfall
from labkit.pitfalls.interventions import (
    TEXT_FAMILIES,
    both_directions,
    rebind_forward,
)


def _attention_both_ways(attn: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    kwargs["attention_mask"] = both_directions(attn, hidden_states, kwargs.get("attention_mask"))
    return type(attn).forward(attn, hidden_states, *args, **kwargs)


def _first_layer_only(model: nn.Module) -> None:
    rebind_forward(find_decoder(model).attentions[0], _attention_both_ways)


def _last_layer_only(model: nn.Module) -> None:
    rebind_forward(find_decoder(model).attentions[-1], _attention_both_ways)


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
        name="first-layer-only",
        title="Unmasking the first layer and stopping there",
        code="convert(model.model.layers[0].self_attn)   # a loop was meant",
        story="""One layer is enough for the future to get in: what the first layer let through, every layer above
            carries upwards at its own position. So changing a later word changes every earlier output, and a
            whole-model test is satisfied. All other layers are as causal as ever.""",
        takes_effect_when="""On every backend and with any padding, for this one layer. Measured from outside the
            model looks bidirectional (as far as the layer's window reaches); measured layer by layer it is mixed.""",
        families=TEXT_FAMILIES,
        symptom="mixed",
        install=_first_layer_only,
    ),
    Pitfall(
        name="last-layer-only",
        title="Unmasking the last layer and stopping there",
        code="convert(model.model.layers[-1].self_attn)",
        story="""A cheap trick with a good excuse, since only the last layer feeds the head. It mixes the future in
            at the end, where every output sees every position. But what it sees was computed left to right: each
            word was understood from its left context alone, and no ambiguity was ever resolved by what follows.""",
        takes_effect_when="""On every backend and with any padding, for this one layer. From outside it cannot be
            told from a full conversion; layer by layer it is mixed.""",
        families=TEXT_FAMILIES,
        symptom="mixed",
        install=_last_layer_only,
    ),
    Pitfall(
        name="top-forward-only",
        title="Wrapping only the outermost forward",
        code="original = model.forward\nmodel.forward = lambda *a, **k: original(*a, is_causal=False, **k)",
        story="""Whoever calls `model(...)` gets a bidirectional model, so the test written next to the wrapper
            passes. An encoder is usually called one level lower: an embedding or token-classification head takes
            `model.model`, because it wants hidden states and not logits over the vocabulary. That object was never
            touched.""",
        takes_effect_when="""On every backend and with any padding, through the outer `forward` only. Through
            `model.model`, `model.transformer`, `model.base_model`, or after saving and loading, the model is
            causal.""",
        families=TEXT_FAMILIES,
        symptom="depends-on-entry",
        install=_top_forward_only,
    ),
    Pitfall(
        name="training-only",
        title="Converted in the training loop, evaluated as it came",
        code="class Trainer(transformers.Trainer):\n"
        "    def compute_loss(self, model, inputs, **kwargs):\n"
        "        return super().compute_loss(model, {**inputs, 'is_causal': False}, **kwargs)",
        story="""The keyword is the right one, and training really is bidirectional. Evaluation, prediction and the
            deployed model go through other lines of code and do not pass it. The weights learn to read both ways
            and are then asked to read one way: the loss is fine, the scores are poor, and the data get the blame.""",
        takes_effect_when="""In training mode, on every backend and with any padding. In evaluation mode the model
            is causal.""",
        families=TEXT_FAMILIES,
        symptom="train-eval-mismatch",
        install=_training_only,
    ),
)
