"""attention_maps(): the weights are those of the computation, the mask shows in them, and the model is left alone."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import labkit
from labkit import masks
from labkit.attention.maps import attention_maps
from labkit.errors import MaskError, ModelError
from labkit.gpt import GPT
from labkit.models.tiny import TINY_NAMES, WINDOW

CASES = [(name, attn) for name in TINY_NAMES for attn in ("eager", "sdpa") if (name, attn) != ("tiny-gemma2", "sdpa")]
N = 20
IDS = list(range(40, 40 + N))
MASKS = [
    masks.causal(),
    masks.bidirectional(),
    masks.prefix(3),
    masks.hybrid(4),
    masks.sliding_window(3, causal=False),
    masks.segments([0] * 8 + [1] * 12, inside="bidirectional"),
    ~masks.bidirectional(),  # no query may look at anything
]


def cells_with_rule(mask, n=N):
    """The mask's cells, a row without a key attending to itself: plain Python."""
    cells = mask.dense(n).tolist()
    return np.array([[cells[q][k] or (q == k and not any(cells[q])) for k in range(n)] for q in range(n)])


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


@pytest.mark.parametrize(("name", "attn"), CASES)
def test_weights_are_a_distribution_over_exactly_the_allowed_keys(tiny, name, attn):
    lm = tiny(name, attn)
    for mask in MASKS:
        maps = attention_maps(lm, IDS, mask)
        assert (maps.mask, maps.name, maps.layers) == (repr(mask), name, (0, 1))
        assert maps.weights.dtype == np.float16 and maps.weights.shape == (2, 4, N, N)
        assert np.abs(maps.weights.astype(np.float64).sum(-1) - 1).max() < 2e-3
        allowed = cells_with_rule(mask)
        assert (maps.weights[..., ~allowed] == 0).all(), f"{mask}: weight where it forbids"
        assert (maps.weights.max(axis=(0, 1))[allowed] > 0).all(), f"{mask}: no weight where it allows"


@pytest.mark.parametrize("mask", [masks.causal(), masks.bidirectional(), masks.hybrid(4), ~masks.bidirectional()])
def test_gpt2_mini_gives_the_weights_of_gpt2_from_scratch(mask):
    lm = labkit.load("gpt2-mini", device="cpu")
    maps = attention_maps(lm, "The old man said, and the king looked at the sea.", mask)
    ids = torch.tensor([lm.tokenizer("The old man said, and the king looked at the sea.")["input_ids"]])
    other = GPT.from_transformers(lm.model).attentions(ids, mask)[:, 0].numpy()
    assert np.abs(maps.weights.astype(np.float32) - other).max() < 1e-3


@pytest.mark.parametrize(("name", "attn"), CASES)
def test_conversion_opens_the_future_which_was_closed(tiny, name, attn):
    lm = tiny(name, attn)
    future = np.triu(np.ones((N, N), dtype=bool), 1)
    before = attention_maps(lm, IDS)
    assert (before.weights[..., future] == 0).all()
    labkit.to_bidirectional(lm.model)
    after = attention_maps(lm, IDS)
    assert (after.weights[..., future].astype(np.float32).sum(-1) / N > 0.05).all()
    assert after.mask == before.mask == "the model's own"


@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-gemma3"])
@pytest.mark.parametrize("converted", [False, True])
def test_a_local_layer_shows_its_window(tiny, name, converted):
    lm = tiny(name)
    if converted:
        labkit.to_bidirectional(lm.model)
    local, wide = attention_maps(lm, IDS).weights
    distance = np.arange(N)[:, None] - np.arange(N)[None]  # query - key
    reached = (distance < WINDOW) & (distance > (-WINDOW if converted else -1))
    assert (local[:, ~reached] == 0).all() and (local.max(0)[reached] > 0).all()
    assert (wide.max(0)[distance >= 0] > 0).all()


@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("state", ["causal", "converted", "partly converted", "training"])
def test_the_model_is_left_as_it_was(tiny, name, attn, state):
    lm = tiny(name, attn)
    if "converted" in state:
        labkit.to_bidirectional(lm.model, layers=[1] if state.startswith("partly") else None)
    if state == "training":
        lm.model.train()
        lm.model.get_input_embeddings().eval()  # a mixed state, as when a part is frozen
    before = logits(lm.model)
    config = copy.deepcopy(lm.model.config)
    modes = [module.training for module in lm.model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in lm.model.modules()]
    for mask in (None, masks.hybrid(3)):
        attention_maps(lm, IDS, mask)
        assert torch.equal(logits(lm.model), before)
        assert lm.model.config._attn_implementation == attn
        assert vars(lm.model.config) == vars(config)
        assert [module.training for module in lm.model.modules()] == modes
        assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in lm.model.modules()] == hooks


def test_the_model_is_left_as_it_was_when_the_capture_fails(tiny):
    def fail(*_):
        raise RuntimeError("out of memory")

    lm = tiny("tiny-llama", "sdpa")
    before = logits(lm.model)
    broken = lm.model.model.layers[1].mlp.register_forward_hook(fail)
    lm.model.train()
    with pytest.raises(RuntimeError, match="out of memory"):
        attention_maps(lm, IDS, masks.bidirectional())
    broken.remove()
    assert lm.model.config._attn_implementation == "sdpa" and all(m.training for m in lm.model.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in lm.model.modules())
    assert torch.equal(logits(lm.model.eval()), before)


def test_dropout_is_off_during_the_capture(tiny):
    lm = tiny("tiny-gpt2")
    expected = attention_maps(lm, IDS).weights
    for module in lm.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.9
    lm.model.train()
    assert np.array_equal(attention_maps(lm, IDS).weights, expected)


def test_layers_are_kept_in_the_order_asked_for(tiny):
    lm = tiny("tiny-gemma3")
    whole, turned = (attention_maps(lm, IDS, layers=layers) for layers in (None, np.array([1, 0])))
    assert turned.layers == (1, 0) and np.array_equal(turned.weights, whole.weights[::-1])


def test_the_mask_in_words_follows_what_is_in_force(tiny):
    lm = tiny("tiny-llama")
    with labkit.masked(lm.model, masks.prefix(2)):
        assert attention_maps(lm, IDS).mask == "prefix(2)"
        assert attention_maps(lm, IDS, masks.causal()).mask == "causal()"
    mixed = attention_maps(lm, IDS, {1: masks.bidirectional()})
    assert mixed.mask == "layer 0: the model's own; layer 1: bidirectional()"
    future = np.triu(np.ones((N, N), dtype=bool), 1)
    assert (mixed.weights[0][:, future] == 0).all() and (mixed.weights[1][:, future] > 0).any()
    assert attention_maps(lm, IDS, {1: masks.bidirectional()}, layers=[1]).mask == "bidirectional()"


def test_tokens_are_shown_as_in_the_figures_and_never_cut(tiny):
    lm = tiny("tiny-gpt2")
    maps = attention_maps(lm, "The cat\n\tsat <b>")
    assert maps.tokens == ["The", "cat", "⏎", "⇥", "s", "a", "t", "␣", "<", "b", ">"]
    assert "11 tokens" in repr(maps) and "tiny-gpt2" in repr(maps)
    lm.tokenizer.add_tokens(["aratherlongtoken"])
    lm.model.resize_token_embeddings(len(lm.tokenizer))
    assert attention_maps(lm, "aratherlongtoken").tokens == ["aratherlongtoken"]


def test_ids_come_as_a_list_or_as_a_tensor_of_one_row(tiny):
    lm = tiny("tiny-llama")
    expected = attention_maps(lm, IDS)
    for ids in (torch.tensor(IDS), torch.tensor([IDS]), [IDS], tuple(IDS)):
        assert np.array_equal(attention_maps(lm, ids).weights, expected.weights)
    lm.tokenizer = None
    assert attention_maps(lm, IDS).tokens == [str(i) for i in IDS]
    with pytest.raises(MaskError, match="without a tokenizer"):
        attention_maps(lm, "The cat")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "empty text"),
        ([], {}, "empty text"),
        ([40] * 1025, {}, "1,025 tokens, and the model has 1,024 positions"),
        ([[40], [41]], {}, "of one text"),
        ([40, -1], {}, "the token ids of tiny-gpt2 are 0 to"),
        ([40, 10**6], {}, "the token ids of tiny-gpt2 are 0 to"),
        (IDS, {"layers": [2]}, "a list of layers from 0 to 1"),
        (IDS, {"layers": [-1]}, "a list of layers from 0 to 1"),
        (IDS, {"layers": []}, "a list of layers from 0 to 1"),
        (IDS, {"mask": "causal"}, "expected a Mask"),
        (IDS, {"mask": masks.padding([3, 20])}, "batch of 2 rows"),
        (IDS, {"mask": masks.from_dense(np.eye(4, dtype=bool))}, "defined for 4 positions"),
    ],
)
def test_what_cannot_be_captured_is_refused_in_a_sentence(tiny, text, options, words):
    lm = tiny("tiny-gpt2")
    before = logits(lm.model)
    with pytest.raises(MaskError, match=words):
        attention_maps(lm, text, **options)
    assert torch.equal(logits(lm.model), before) and not any(m._forward_pre_hooks for m in lm.model.modules())


def test_a_model_without_attention_maps_is_named(tiny):
    lm = tiny("tiny-llama")
    lm.model.model.layers[1].self_attn.register_forward_hook(lambda module, args, output: (output[0], None))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn .* got none"):
        attention_maps(lm, IDS)
    lm.model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="no decoder"):
        attention_maps(lm, IDS)
