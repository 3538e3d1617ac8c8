"""masked(): any Mask in force in any layer, on any backend, padded, packed or cached, and nothing left behind."""

import pytest
import torch
from transformers import DynamicCache

import labkit
from labkit import masks
from labkit.decoder.anatomy import CACHE
from labkit.errors import ConversionError, MaskError
from tests.perturbation import layer_cells

CASES = [
    (name, attn)
    for name in ("tiny-gpt2", "tiny-llama", "tiny-gemma", "tiny-gemma2", "tiny-gemma3")
    for attn in ("eager", "sdpa")
    if (name, attn) != ("tiny-gemma2", "sdpa")
]
N = 12
IDS = torch.arange(40, 40 + N)[None]
SAID = [
    masks.causal(),
    masks.bidirectional(),
    masks.prefix(3),
    masks.hybrid(4),
    masks.sliding_window(3, causal=False),
    masks.segments([0] * 4 + [1] * 5, inside="bidirectional", fuse_from=9),
    masks.causal() & ~masks.sliding_window(2) | masks.prefix(1),
    ~masks.bidirectional(),
]


def with_rule(mask, n):
    """The mask's cells, a row without a key attending to itself: plain Python."""
    cells = mask.dense(n).tolist()
    return torch.tensor([[cells[q][k] or (q == k and not any(cells[q])) for k in range(n)] for q in range(n)])


def logits(model, ids=IDS, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("mask", SAID, ids=repr)
def test_what_is_said_is_what_is_measured_in_every_layer(tiny, name, attn, mask):
    model = tiny(name, attn).model
    before = logits(model)
    with labkit.masked(model, mask):
        cells = layer_cells(model, N)
    assert all(torch.equal(layer[0], with_rule(mask, N)) for layer in cells)
    assert torch.equal(logits(model), before)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(("name", "attn"), CASES)
def test_positions_count_real_tokens_on_either_side_of_the_padding(tiny, name, attn):
    model = tiny(name, attn).model
    real = torch.ones(3, N, dtype=torch.bool)
    real[1, -3:], real[2, :2] = False, False
    with labkit.masked(model, masks.prefix(3)):
        for row, cells in zip(real, layer_cells(model, N, real).transpose(0, 1), strict=True):
            expected = masks.prefix(3).dense(int(row.sum()))
            assert all(torch.equal(layer[row][:, row], expected) for layer in cells)
            assert not cells[:, row][:, :, ~row].any()


def test_each_layer_can_have_its_own_mask(tiny):
    model = tiny("tiny-gemma3").model
    own = layer_cells(model, N)
    with labkit.masked(model, [masks.prefix(2), None]):
        cells = layer_cells(model, N)
    assert torch.equal(cells[0, 0], masks.prefix(2).dense(N))
    assert torch.equal(cells[1], own[1])
    with labkit.masked(model, {1: masks.hybrid(5)}):
        cells = layer_cells(model, N)
    assert torch.equal(cells[0], own[0])
    assert torch.equal(cells[1, 0], masks.hybrid(5).dense(N))


def test_contexts_nest_and_an_exception_restores(tiny):
    model = labkit.to_bidirectional(tiny("tiny-llama").model)
    converted = logits(model)
    with labkit.masked(model, masks.causal()):
        causal = logits(model)
        with pytest.raises(RuntimeError, match="on purpose"), labkit.masked(model, masks.prefix(5)):
            assert not torch.equal(logits(model), causal)
            raise RuntimeError("on purpose")
        assert torch.equal(logits(model), causal)
    assert torch.equal(logits(model), converted)
    torch.testing.assert_close(causal, logits(labkit.to_causal(model)))


@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.sliding_window(4), masks.segments([0, 0, 0, 1, 1], fuse_from=5)], ids=repr
)
def test_decoding_with_a_cache_equals_one_pass(tiny, name, attn, mask):
    model = tiny(name, attn).model
    with labkit.masked(model, mask):
        whole = logits(model, use_cache=False)
        torch.testing.assert_close(decoded(model, DynamicCache()), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "attn"), [case for case in CASES if case[0] in ("tiny-gemma2", "tiny-gemma3")])
def test_a_cache_that_let_go_of_keys_the_mask_opens_is_refused_rather_than_wrong(tiny, name, attn):
    model = tiny(name, attn).model
    with labkit.masked(model, masks.sliding_window(8)):
        whole = logits(model, use_cache=False)
        own_cache = DynamicCache(config=model.config)
        torch.testing.assert_close(decoded(model, own_cache), whole, atol=2e-5, rtol=1e-4)
    with labkit.masked(model, masks.causal()), pytest.raises(ConversionError, match=r"kept 8 of 9.*DynamicCache\(\)"):
        decoded(model, DynamicCache(config=model.config))


def decoded(model, cache):
    """Logits of five tokens at once, then of one after the other, with this cache."""
    with torch.no_grad():
        steps = [model(IDS[:, :5], use_cache=True, **{CACHE: cache}).logits]
        steps += [model(IDS[:, t : t + 1], use_cache=True, **{CACHE: cache}).logits for t in range(5, N)]
    return torch.cat(steps, 1)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_a_batched_mask_applies_row_by_row(tiny, attn):
    model = tiny("tiny-llama", attn).model
    mask = masks.from_dense(torch.stack([masks.causal().dense(N), masks.bidirectional().dense(N)]))
    with labkit.masked(model, mask):
        got = logits(model, IDS.expand(2, N))
        with pytest.raises(MaskError, match="batch of 2"):
            logits(model, IDS.expand(3, N), attention_mask=torch.ones(3, N).long().index_fill(1, torch.tensor([11]), 0))
    torch.testing.assert_close(got[:1], logits(model))
    torch.testing.assert_close(got[1:], logits(labkit.to_bidirectional(model)))


def test_packed_documents_stay_apart_under_a_mask(tiny):
    model = tiny("tiny-gemma3").model
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with labkit.masked(model, masks.prefix(2)):
        packed = logits(model, position_ids=positions, use_cache=False)
        first, second = logits(model, IDS[:, :5]), logits(model, IDS[:, 5:])
    torch.testing.assert_close(packed[:, :5], first, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(packed[:, 5:], second, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ("causal", "expected a Mask"),
        ([masks.causal()], "2 layers and 1 masks"),
        ({7: masks.causal()}, "layers 0 to 1"),
        ([masks.causal(), torch.ones(3, 3)], "layer 1: expected a labkit Mask"),
    ],
)
def test_what_is_no_mask_is_refused(tiny, mask, said):
    model = tiny("tiny-llama").model
    with pytest.raises(MaskError, match=said), labkit.masked(model, mask):
        pass
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_ready_made_mask_in_the_call_is_refused_rather_than_overruled(tiny):
    model = tiny("tiny-llama").model
    with labkit.masked(model, masks.causal()), pytest.raises(ConversionError, match="brings masks of its own"):
        model(IDS, attention_mask=torch.zeros(1, 1, N, N))


def test_flash_attention_is_refused(tiny):
    model = tiny("tiny-llama").model
    with labkit.masked(model, masks.prefix(2)), pytest.raises(ConversionError, match="flash attention takes no mask"):
        model.config._attn_implementation = "flash_attention_2"
        model(IDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3"])
@pytest.mark.parametrize("mask", [masks.prefix(3), masks.hybrid(4), ~masks.bidirectional()], ids=repr)
def test_flex_attention_carries_the_mask(tiny, name, mask):
    model = tiny(name, "flex_attention").model
    with labkit.masked(model, mask):
        assert all(torch.equal(layer[0], with_rule(mask, N)) for layer in layer_cells(model, N))


def test_packed_documents_are_recognised_by_positions_on_three_axes():
    from labkit.decoder.hooks import _documents

    text = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert _documents(text.expand(3, 1, -1), None).tolist() == [[0, 0, 0, 1, 1, 1]]
    assert _documents(torch.stack([text, text, text, text]), None).tolist() == [[0, 0, 0, 1, 1, 1]]
    image = torch.tensor([[[0, 1, 1, 1, 1, 3]], [[0, 1, 1, 2, 2, 3]], [[0, 1, 2, 1, 2, 3]]])  # 2 x 2 patches in a text
    assert _documents(image, None) is None
