"""attention_maps() and neuron_maps(): the weights are those of the computation, and the model is left alone."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import labkit
from labkit import masks
from labkit.attention.maps import attention_maps
from labkit.attention.neurons import neuron_maps
from labkit.errors import MaskError, ModelError
from labkit.gpt import GPT
from labkit.models.tiny import TINY_NAMES
from tests.perturbation import CASES, rule_of

N = 20
IDS = list(range(40, 40 + N))
FUTURE = np.triu(np.ones((N, N), dtype=bool), 1)
MASKS = [
    masks.causal(),
    masks.bidirectional(),
    masks.hybrid(4),
    masks.sliding_window(3, causal=False),
    masks.segments([0] * 8 + [1] * 12, inside="bidirectional"),
    ~masks.bidirectional(),  # no query may attend to anything
]


def state_of(lm):
    """Logits, config, modes, hooks and attention functions: all that a capture might change."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([IDS])).logits
    modules = list(lm.model.modules())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]
    config = copy.deepcopy(vars(lm.model.config))
    return logits.tolist(), config, [m.training for m in modules], hooks, sorted(ALL_ATTENTION_FUNCTIONS)


@pytest.mark.parametrize(("name", "attn"), CASES)
def test_weights_are_a_distribution_over_exactly_the_allowed_keys(tiny, name, attn):
    lm = tiny(name, attn)
    for mask in MASKS:
        maps = attention_maps(lm, IDS, mask)
        assert (maps.mask, maps.name, maps.layers) == (repr(mask), name, (0, 1))
        assert maps.weights.dtype == np.float16 and maps.weights.shape == (2, 4, N, N)
        assert np.abs(maps.weights.astype(np.float64).sum(-1) - 1).max() < 2e-3
        allowed = rule_of(mask)(N).numpy()
        assert (maps.weights[..., ~allowed] == 0).all(), f"{mask}: weight where it forbids"
        assert (maps.weights.max(axis=(0, 1))[allowed] > 0).all(), f"{mask}: no weight where it allows"


@pytest.mark.parametrize("mask", [masks.causal(), masks.hybrid(4), ~masks.bidirectional()])
def test_gpt2_mini_gives_the_weights_of_gpt2_from_scratch(mask):
    lm = labkit.load("gpt2-mini", device="cpu")
    text = "The old man said, and the king looked at the sea."
    other = GPT.from_transformers(lm.model).attentions(torch.tensor([lm.tokenizer(text)["input_ids"]]), mask)
    assert np.abs(attention_maps(lm, text, mask).weights.astype(np.float32) - other[:, 0].numpy()).max() < 1e-3


@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("state", ["causal", "converted", "partly converted", "training"])
def test_a_conversion_opens_the_future_and_the_model_is_left_as_it_was(tiny, name, attn, state):
    lm = tiny(name, attn)
    assert (attention_maps(lm, IDS).weights[..., FUTURE] == 0).all()
    if "converted" in state:
        labkit.to_bidirectional(lm.model, layers=[1] if state.startswith("partly") else None)
    if state == "training":
        lm.model.train()
        lm.model.get_input_embeddings().eval()  # a mixed state, as when a part is frozen
    before = state_of(lm)
    maps = attention_maps(lm, IDS)
    attention_maps(lm, IDS, masks.hybrid(3))
    if name != "tiny-gemma2":
        neuron_maps(lm, IDS)
    assert state_of(lm) == before
    opened = (maps.weights[..., FUTURE].astype(np.float32).sum(-1) / N > 0.05).all(1)
    assert opened.tolist() == [state == "converted", "converted" in state] and maps.mask == "the model's own"


def test_dropout_is_off_and_the_model_is_left_as_it_was_when_the_capture_fails(tiny):
    lm = tiny("tiny-gpt2", "sdpa")
    expected = attention_maps(lm, IDS).weights
    for module in lm.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.9
    assert np.array_equal(attention_maps(lm, IDS).weights, expected)
    before = state_of(lm)

    def fail(*_):
        raise RuntimeError("out of memory")

    broken = lm.model.transformer.h[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        attention_maps(lm, IDS, masks.bidirectional())
    broken.remove()
    assert state_of(lm) == before


def test_layers_texts_and_tokens_are_those_that_were_given(tiny):
    lm = tiny("tiny-gpt2")
    whole, turned = (attention_maps(lm, IDS, layers=layers) for layers in (None, np.array([1, 0])))
    assert turned.layers == (1, 0) and np.array_equal(turned.weights, whole.weights[::-1])
    for ids in (torch.tensor(IDS), torch.tensor([IDS]), tuple(IDS)):
        assert np.array_equal(attention_maps(lm, ids).weights, whole.weights)
    tokens = attention_maps(lm, "The cat\n\tsat <b>").tokens
    assert tokens == ["The", "cat", "⏎", "⇥", "s", "a", "t", "␣", "<", "b", ">"]
    mixed = attention_maps(lm, IDS, {1: masks.bidirectional()})
    assert (mixed.weights[0][:, FUTURE] == 0).all() and (mixed.weights[1][:, FUTURE] > 0).any()
    lm.tokenizer = None
    assert attention_maps(lm, IDS).tokens == [str(i) for i in IDS]


@pytest.mark.parametrize("name", [name for name in TINY_NAMES if name != "tiny-gemma2"])
@pytest.mark.parametrize("mask", [masks.causal(), masks.bidirectional(), masks.hybrid(2)], ids=repr)
def test_the_products_of_queries_and_keys_give_the_weights(tiny, name, mask):
    maps, queries, keys = neuron_maps(tiny(name), IDS, mask)
    scores = np.einsum("lhqd,lhkd->lhqk", queries, keys) / queries.shape[-1] ** 0.5
    scores = np.where(rule_of(mask)(N).numpy(), scores, -np.inf)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert np.abs(expected - maps.weights).max() < 2e-3


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "not empty"),
        ([40] * 1025, {}, "1,025 tokens, and the model has 1,024 positions"),
        ([[40], [41]], {}, "of one text"),
        ([40, 10**6], {}, "the token ids of tiny-gpt2 are 0 to"),
        (IDS, {"layers": [2]}, "a list of layers from 0 to 1"),
        (IDS, {"layers": []}, "a list of layers from 0 to 1"),
        (IDS, {"mask": "causal"}, "expected a Mask"),
        (IDS, {"mask": masks.padding([3, 20])}, "batch of 2 rows"),
        (IDS, {"mask": masks.from_dense(np.eye(4, dtype=bool))}, "defined for 4 positions"),
    ],
)
def test_what_cannot_be_captured_is_refused_and_changes_nothing(tiny, text, options, words):
    lm = tiny("tiny-gpt2")
    before = state_of(lm)
    with pytest.raises(MaskError, match=words):
        attention_maps(lm, text, **options)
    assert state_of(lm) == before


def test_a_model_without_attention_maps_is_named(tiny):
    with pytest.raises(ModelError, match="softcap.*head view"):
        neuron_maps(tiny("tiny-gemma2"), IDS, masks.bidirectional())
    lm = tiny("tiny-llama")
    lm.model.model.layers[1].self_attn.register_forward_hook(lambda module, args, output: (output[0], None))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn .* got none"):
        attention_maps(lm, IDS)
