"""The mask in force in every layer: family x backend x mask x padding x packing, against a perturbation oracle."""

import pytest
import torch
from transformers import DynamicCache

import labkit
from labkit import masks
from labkit.decoder.anatomy import CACHE, find_decoder
from labkit.errors import ConversionError, MaskError
from tests.perturbation import (
    CASES,
    IDS,
    N,
    W,
    assert_layers_attend,
    assert_without_hooks,
    causal_rules,
    layer_cells,
    logits,
    positions_of,
    rule_of,
    window,
)

MASKS = [
    masks.causal(),
    masks.bidirectional(),
    masks.prefix(3),
    masks.hybrid(4),
    masks.sliding_window(3, causal=False),
    masks.segments([0] * 4 + [1] * 5, inside="bidirectional", fuse_from=9),
    masks.causal() & ~masks.sliding_window(2) | masks.prefix(1),
    ~masks.bidirectional(),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "attn"), CASES)
def test_a_mask_is_in_force_in_every_layer_and_gone_after_its_block(tiny, name, attn):
    model = tiny(name, attn).model
    before = logits(model)
    for mask in MASKS:
        with labkit.masked(model, mask):
            assert_layers_attend(model, [rule_of(mask)] * 2)
        assert torch.equal(logits(model), before)
        assert_without_hooks(model)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
@pytest.mark.parametrize("given", [[masks.prefix(2), None], {0: masks.prefix(2)}])
def test_each_layer_can_have_its_own_mask(tiny, name, given):
    model = tiny(name).model
    with labkit.masked(model, given):
        assert_layers_attend(model, [rule_of(masks.prefix(2)), causal_rules(model)[1]])


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("layers", [None, [0], [1]])
def test_a_conversion_opens_the_chosen_layers_as_far_as_their_windows(tiny, name, attn, layers):
    model = tiny(name, attn).model
    causal, local = causal_rules(model), name in ("tiny-gemma2", "tiny-gemma3")
    for how, reach in (("keep", W - 1), ("halve", W // 2), ("global", None)) if local else [("keep", None)]:
        labkit.to_bidirectional(model, window=how, layers=layers)
        opened = [window(reach, reach), window(None, None)]
        chosen = range(2) if layers is None else layers
        assert_layers_attend(model, [opened[i] if i in chosen else causal[i] for i in range(2)])
    labkit.to_causal(model)
    assert_without_hooks(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2", "tiny-gemma3"])
def test_flex_attention_has_the_same_masks(tiny, name):
    model = tiny(name, "flex_attention").model
    for mask in (masks.prefix(3), masks.hybrid(4), ~masks.bidirectional()):
        with labkit.masked(model, mask):
            assert_layers_attend(model, [rule_of(mask)] * 2)
    reach = W - 1 if name != "tiny-llama" else None
    for layers, last in ((None, window(None, None)), ([0], window(None, 0))):
        labkit.to_bidirectional(model, layers=layers)
        assert_layers_attend(model, [window(reach, reach), last])


TEXTS = [IDS[0, :7], IDS[0, 3:14], IDS[0]]


def padded(texts, side):
    """ids and attention_mask (texts, 20 + 2), padded with the token 7."""
    ids, mask = torch.full((len(texts), N + 2), 7), torch.zeros(len(texts), N + 2).long()
    for row, text in enumerate(texts):
        place = slice(len(text)) if side == "right" else slice(N + 2 - len(text), None)
        ids[row, place], mask[row, place] = text, 1
    return ids, {"attention_mask": mask}


def side_by_side(texts, mask):
    """One row of all texts, with positions that restart, without a mask, with one of ones, or with pads on the left."""
    pads = 3 if mask == "padded" else 0
    numbers = torch.tensor([-1] * pads + [i for i, text in enumerate(texts) for _ in text])[None]
    given = {"position_ids": positions_of(numbers), "use_cache": False}
    if mask is not None:
        given["attention_mask"] = (numbers >= 0).long()
    return torch.cat([torch.full((pads,), 7), *texts])[None], given


@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("layers", [None, [1]])
def test_a_text_has_the_logits_it_has_alone_padded_or_packed(tiny, name, attn, layers):
    """Also where positions are learned (GPT-2), which the cells of attention do not show."""
    model = labkit.to_bidirectional(tiny(name, attn).model, layers=layers)
    alone = torch.cat([logits(model, text[None])[0] for text in TEXTS])
    for side in ("right", "left"):
        ids, given = padded(TEXTS, side)
        got = logits(model, ids, **given)[given["attention_mask"].bool()]
        torch.testing.assert_close(got, alone, atol=2e-5, rtol=1e-4)
    for mask in (None, "ones", "padded"):
        ids, given = side_by_side(TEXTS, mask)
        got = logits(model, ids, **given)[0, -len(alone) :]
        torch.testing.assert_close(got, alone, atol=2e-5, rtol=1e-4)


def test_a_text_with_padding_is_not_taken_for_packed_documents(tiny):
    """Its positions jump where the padding is: pads may be counted or not, and have any number of their own."""
    model = labkit.to_bidirectional(tiny("tiny-llama").model)
    real = torch.nn.functional.pad(torch.ones_like(IDS), (3, 2))
    real[0, 8] = 0  # a hole in the text
    text = real[0].bool()
    for positions in ((real.cumsum(-1) - 1).masked_fill(real == 0, 1), torch.arange(N + 5)[None]):
        cells = layer_cells(model, N + 5, real, position_ids=positions)[:, 0]
        assert cells[:, text][:, :, text].all() and not cells[:, text][:, :, ~text].any()


def test_packed_documents_are_recognised_by_positions_on_three_axes():
    from labkit.decoder.hooks import _documents

    text = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert _documents(text.expand(3, 1, -1), None).tolist() == [[0, 0, 0, 1, 1, 1]]
    assert _documents(torch.stack([text, text, text, text]), None).tolist() == [[0, 0, 0, 1, 1, 1]]
    image = torch.tensor([[[0, 1, 1, 1, 1, 3]], [[0, 1, 1, 2, 2, 3]], [[0, 1, 2, 1, 2, 3]]])  # 2 x 2 patches in a text
    assert _documents(image, None) is None
    both = torch.cat([image, text.expand(3, 1, -1)], dim=-1)
    assert _documents(both, None).tolist() == [[0] * 6 + [1] * 3 + [2] * 3]


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


def decoded(model, cache):
    """Logits of five tokens at once, then of one after the other, with this cache."""
    with torch.no_grad():
        steps = [model(IDS[:, :5], use_cache=True, **{CACHE: cache}).logits]
        steps += [model(IDS[:, t : t + 1], use_cache=True, **{CACHE: cache}).logits for t in range(5, N)]
    return torch.cat(steps, 1)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "attn"), CASES)
def test_decoding_with_a_cache_equals_one_pass_or_is_refused(tiny, name, attn):
    model = tiny(name, attn).model
    for mask in (masks.causal(), masks.sliding_window(4), masks.segments([0, 0, 0, 1, 1], fuse_from=5)):
        with labkit.masked(model, mask):
            whole = logits(model, use_cache=False)
            torch.testing.assert_close(decoded(model, DynamicCache()), whole, atol=2e-5, rtol=1e-4)
    if name not in ("tiny-gemma2", "tiny-gemma3"):
        return
    with labkit.masked(model, masks.sliding_window(W)):  # all that the default cache of a local layer keeps
        whole = logits(model, use_cache=False)
        torch.testing.assert_close(decoded(model, DynamicCache(config=model.config)), whole, atol=2e-5, rtol=1e-4)
    with labkit.masked(model, masks.causal()), pytest.raises(ConversionError, match=r"kept 8 of 9.*DynamicCache\(\)"):
        decoded(model, DynamicCache(config=model.config))


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_a_batched_mask_applies_row_by_row(tiny, attn):
    model = tiny("tiny-llama", attn).model
    mask = masks.from_dense(torch.stack([masks.causal().dense(N), masks.bidirectional().dense(N)]))
    with labkit.masked(model, mask):
        got = logits(model, IDS.expand(2, N))
        with pytest.raises(MaskError, match="batch of 2"):
            logits(model, IDS.expand(3, N), attention_mask=(torch.arange(N) < N - 1).long().expand(3, N))
    torch.testing.assert_close(got[:1], logits(model))
    torch.testing.assert_close(got[1:], logits(labkit.to_bidirectional(model)))


NOT_A_MASK = {
    "a name": ("causal", "expected a Mask"),
    "too few": ([masks.causal()], "a list of 2"),
    "no such layer": ({7: masks.causal()}, "layers 0 to 1"),
    "a tensor": ([masks.causal(), torch.ones(3, 3)], "layer 1: expected a labkit Mask"),
}


@pytest.mark.parametrize(("mask", "message"), NOT_A_MASK.values(), ids=list(NOT_A_MASK))
def test_what_is_no_mask_is_refused(tiny, mask, message):
    model = tiny("tiny-llama").model
    with pytest.raises(MaskError, match=message), labkit.masked(model, mask):
        pass
    assert_without_hooks(model)


def test_calls_that_cannot_carry_the_mask_are_refused(tiny):
    model = tiny("tiny-llama").model
    packed, given = side_by_side(TEXTS[:2], None)
    with labkit.masked(model, masks.prefix(2)):
        with pytest.raises(ConversionError, match="brings masks of its own"):
            model(IDS, attention_mask=torch.zeros(1, 1, N, N))
        with pytest.raises(ConversionError, match="key-value cache"):
            model(packed, position_ids=given["position_ids"], **{CACHE: DynamicCache()})
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(ConversionError, match="flash attention takes no mask"):
            model(IDS)
    assert find_decoder(model).backend == "flash"
