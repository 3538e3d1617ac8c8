"""labkit.gpt: the numbers and the text of transformers' GPT-2 under every mask, and an error where they'd differ."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, GPT2Model

import labkit
from labkit import masks
from labkit.auditing.measure import audit
from labkit.errors import ConversionError, MaskError, ModelError
from labkit.gpt import GPT, GPTConfig
from tests.perturbation import rule_of

VOCAB, CONTEXT, N, P = 61, 32, 12, 5  # vocabulary, positions; length of a text, and of a prompt
IDS = torch.randint(VOCAB, (3, N), generator=torch.Generator().manual_seed(1))
PROMPTS = IDS[:, :P]
WIDE = {"n_layer": 3, "n_embd": 40, "n_head": 4}
SHAPES = [{}, {"n_inner": 40, "n_head": 1}, {"layer_norm_epsilon": 0.1}, {"activation_function": "gelu"}, WIDE]
MASKS = [
    masks.causal(),
    masks.bidirectional(),
    masks.prefix([1, 4, 9]),
    masks.hybrid(5),
    masks.sliding_window(3, causal=False),
    masks.segments([0] * 5 + [1] * 4, inside="bidirectional", fuse_from=9),
    masks.causal() & masks.padding([12, 9, 5]),
    masks.padding([3, 12, 7], side="left"),
    ~masks.bidirectional(),
]
SETTLED = [masks.causal(), masks.prefix(P), masks.prefix(2), masks.prefix([0, 3, 5]), masks.sliding_window(3)]
UNSETTLED = [masks.bidirectional(), masks.prefix(P + 2), masks.hybrid(3), masks.sliding_window(3, causal=False)]
UNSETTLED += [masks.causal() & masks.padding([3, 5, 5], side="left")]  # the pads move along with the last token


def gpt2(attn="eager", **config) -> GPT2LMHeadModel:
    """A random GPT-2 in eval mode. Large weights: attention is far from uniform, no bias is 0 and no gain is 1."""
    settings = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    settings |= {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": 24, "n_layer": 2, "n_head": 3}
    settings |= {"bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = GPT2LMHeadModel._from_config(GPT2Config(**settings | config), attn_implementation=attn)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.4)
    return model.eval()


@pytest.fixture
def model() -> GPT2LMHeadModel:
    return gpt2()


@pytest.fixture
def g(model) -> GPT:
    return GPT.from_transformers(model)


def assert_same(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)


# ---- the numbers of transformers -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_are_those_of_transformers_and_the_weights_a_copy(shape):
    model = gpt2(**shape)
    logits, g = model(IDS).logits, GPT.from_transformers(model)
    assert logits.std() > 1
    assert_same(g(IDS), logits)
    for weight in g.parameters():
        weight.zero_()
    assert torch.equal(model(IDS).logits, logits)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_logits_and_gradients_are_those_of_transformers_under_the_same_mask(mask):
    model = gpt2(attn="sdpa")
    g = GPT.from_transformers(model)
    with labkit.masked(model, mask):
        expected = model(IDS).logits
        nn.functional.cross_entropy(expected.flatten(0, 1), IDS.roll(-1, 1).flatten()).backward()
    assert_same(g(IDS, mask), expected)
    g.loss(IDS, IDS.roll(-1, 1), mask).backward()
    assert_same(g.wte.weight.grad, model.transformer.wte.weight.grad)
    assert_same(g.h[0].attn.c_attn.weight.grad, model.transformer.h[0].attn.c_attn.weight.grad.T)
    assert_same(g.h[1].mlp.c_proj.bias.grad, model.transformer.h[1].mlp.c_proj.bias.grad)
    assert mask == masks.causal() or not torch.allclose(expected, model(IDS).logits, atol=0.1)


@torch.no_grad()
@pytest.mark.parametrize("mask", [m for m in MASKS if m.batch_size is None], ids=repr)
def test_attentions_are_those_of_transformers_and_every_query_spends_one(model, g, mask):
    weights = g.attentions(IDS, mask)
    with labkit.masked(model, mask):
        assert_same(weights, torch.stack(model(IDS, output_attentions=True).attentions))
    assert_same(weights.sum(-1), torch.ones(2, 3, 3, N))
    assert torch.equal((weights > 0).any((0, 1, 2)), rule_of(mask)(N))


def test_bfloat16_stays_bfloat16(model):
    g = GPT.from_transformers(model.bfloat16())
    assert {p.dtype for p in g.parameters()} == {torch.bfloat16}
    for mask in (masks.causal(), masks.prefix([1, 4, 9])):
        assert g(IDS, mask).dtype == g.attentions(IDS, mask).dtype == torch.bfloat16
    assert g.loss(IDS, IDS).dtype == torch.float32
    assert g.generate(PROMPTS, 3).shape == (3, P + 3)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: gpt2(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (lambda: gpt2(activation_function="relu"), "activation_function='relu'"),
        (lambda: labkit.load("tiny-llama").model, "LlamaForCausalLM has model_type='llama'"),
        (lambda: GPT2Model(gpt2().config), "not a GPT2Model without its head"),
    ],
)
def test_a_model_with_another_computation_is_refused_by_name(other, named):
    with pytest.raises(ModelError, match=named):
        GPT.from_transformers(other())


def test_a_new_gpt_is_initialised_as_openai_initialised_it():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        g = GPT(GPTConfig(vocab_size=200, context=64, width=128, layers=4, heads=4))
    assert g.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert g.h[3].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert g.h[3].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)


# ---- the mask that is in force -------------------------------------------------------------------------------------


class Under(nn.Module):
    """A GPT that always reads under one mask."""

    def __init__(self, g: GPT, mask: masks.Mask):
        super().__init__()
        self.g, self.mask = g, mask

    def forward(self, ids):
        return self.g(ids, mask=self.mask)


def test_the_audit_measures_a_gpt_as_causal_and_under_the_other_mask_as_bidirectional(g):
    for verdict, module in {"causal": g, "bidirectional": Under(g, masks.bidirectional())}.items():
        report = audit(module)
        assert report.verdict == verdict and len(report.layers) == 2 and not report.problems
    assert audit(Under(g, masks.prefix(4)), quick=True).layers[1].mask.agrees_with(masks.prefix(4), 6)


def test_more_positions_than_the_model_has_and_a_mask_for_another_batch_are_refused(g):
    whole = torch.zeros(1, CONTEXT, dtype=torch.long)
    assert g(whole).shape == (1, CONTEXT, VOCAB)
    assert g.generate(whole[:, :-2], 3).shape == (1, CONTEXT + 1)  # the last token is written, never read
    for use_cache in (True, False):
        with pytest.raises(MaskError, match="33 tokens, and this model has positions for 32"):
            g.generate(whole[:, :-2], 4, use_cache=use_cache)
    with pytest.raises(MaskError, match="batch of 2, and the batch has 3 rows"):
        g(IDS, masks.prefix([1, 2]))


@pytest.mark.parametrize("drop", [{"resid_pdrop": 0.3}, {"embd_pdrop": 0.1}, {"attn_pdrop": 0.3}])
def test_dropout_is_for_training_only_and_is_kept(drop):
    g = GPT.from_transformers(gpt2(**drop).train())
    assert g.training and not torch.equal(g(IDS), g(IDS))
    assert torch.equal(g.eval()(IDS), GPT.from_transformers(gpt2(**drop))(IDS))


# ---- generation ----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("mask", SETTLED, ids=repr)
def test_logits_read_piece_by_piece_with_a_cache_are_those_of_one_pass(g, mask):
    cache = DynamicCache()
    pieces = [g(IDS[:, a:b], mask, cache) for a, b in ((0, P), (P, P + 1), (P + 1, N - 1), (N - 1, N))]
    assert_same(torch.cat(pieces, 1), g(IDS, mask))
    assert cache.get_seq_length() == N


@pytest.mark.parametrize("mask", SETTLED, ids=repr)
def test_generation_with_the_cache_is_generation_without_and_that_of_transformers(model, g, mask):
    text = g.generate(PROMPTS, 20, mask=mask)
    assert torch.equal(text, g.generate(PROMPTS, 20, mask=mask, use_cache=False))
    assert torch.equal(text[:, :P], PROMPTS) and text.shape == (3, P + 20)
    if mask == masks.causal():
        ones = torch.ones_like(PROMPTS)
        theirs = model.generate(PROMPTS, attention_mask=ones, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert torch.equal(text, theirs)


@pytest.mark.parametrize("mask", UNSETTLED, ids=repr)
def test_where_a_new_token_changes_earlier_states_the_cache_is_refused_and_none_is_needed(g, mask):
    with pytest.raises(ConversionError, match="use_cache=False"):
        g.generate(PROMPTS, 6, mask=mask)
    text = g.generate(PROMPTS, 6, mask=mask, use_cache=False)
    for t in range(P, P + 6):
        assert torch.equal(text[:, t], g(text[:, :t], mask)[:, -1].argmax(-1))
    assert torch.equal(g.generate(PROMPTS, 1, mask=mask), text[:, : P + 1])  # nothing is read after the prompt
