"""The audit: on any module, in any dtype, cheap when quick, and an error for other people's CI.

The whole catalogue of false conversions is held against an oracle in test_pitfalls_matrix.py.
"""

import json

import pytest
import torch
from torch import nn

import labkit
from labkit import masks
from labkit.errors import AuditError, MaskAssertionError

N = 12


def test_measured_masks_and_verdict_of_gemma3_before_and_after(tiny):
    model = tiny("tiny-gemma3").model
    report = labkit.audit(model)
    assert (report.verdict, report.problems) == ("causal", [])
    assert [layer.mask for layer in report.layers] == [masks.sliding_window(8), masks.causal()]
    assert report.layers[0].reach == (7, 0)
    report = labkit.audit(labkit.to_bidirectional(model))
    assert (report.verdict, report.problems) == ("bidirectional", [])
    assert report.layers[0].mask.agrees_with(masks.sliding_window(8, causal=False), N)
    assert report.layers[0].reach == (7, 7)


PAINTED = masks.from_dense(torch.rand(30, 30, generator=torch.Generator().manual_seed(1)) > 0.5)


@pytest.mark.parametrize("mask", [masks.prefix(3), masks.hybrid(4), PAINTED], ids=repr)
def test_a_mask_that_was_said_is_the_mask_that_is_measured(tiny, mask):
    model = tiny("tiny-llama").model
    with labkit.masked(model, mask):
        report = labkit.audit(model, quick=True)
    n = report.layers[0].mask.dense(6).shape[0]
    assert report.verdict == "other"
    for layer in report.layers:
        measured, said = layer.mask.dense(n), mask.dense(n)
        assert torch.equal(measured | torch.eye(n).bool(), said | torch.eye(n).bool())


def test_a_converted_subset_is_mixed_without_being_a_problem(tiny):
    report = labkit.audit(labkit.to_bidirectional(tiny("tiny-llama").model, layers=[1]))
    assert report.verdict == "mixed"
    assert [layer.verdict for layer in report.layers] == ["causal", "bidirectional"]
    assert report.problems == []


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
def test_rounding_is_no_influence_and_no_problem_in_any_dtype(tiny, name, dtype):
    model = tiny(name).model.to(dtype)
    assert labkit.audit(model, quick=True).verdict == "causal"
    report = labkit.audit(labkit.to_bidirectional(model), reference=tiny(name).model.to(dtype))
    assert (report.verdict, report.problems) == ("bidirectional", [])


def test_an_audit_leaves_the_model_as_it_was(tiny):
    model = tiny("tiny-gemma3").model
    model.model.layers[0].train()
    ids = torch.arange(40, 60)[None]
    config, modes = model.config.to_dict(), [m.training for m in model.modules()]
    before, random_state = model(ids).logits, torch.get_rng_state()
    labkit.audit(model)
    assert torch.equal(model(ids).logits, before)
    assert model.config.to_dict() == config
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_reference_with_other_weights_is_a_changed_computation(tiny):
    model, reference = tiny("tiny-llama").model, tiny("tiny-llama").model
    assert "computation-changed" not in labkit.audit(model, reference=reference, quick=True).problem_kinds()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    assert "computation-changed" in labkit.audit(model, reference=reference, quick=True).problem_kinds()


class Recurrent(nn.Module):
    """No attention at all: an LSTM reads from left to right, a bidirectional one both ways."""

    def __init__(self, both_ways):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.read = nn.LSTM(16, 16, batch_first=True, bidirectional=both_ways)

    def forward(self, input_ids):
        return self.read(self.embed(input_ids))[0]


@pytest.mark.parametrize(("both_ways", "verdict"), [(False, "causal"), (True, "bidirectional")])
def test_any_module_that_reads_token_ids_can_be_measured(both_ways, verdict):
    torch.manual_seed(0)
    report = labkit.audit(Recurrent(both_ways))
    assert report.verdict == verdict
    assert report.layers == []
    assert any("only as a whole" in note for note in report.notes)


class ByHand(nn.Module):
    """An engineer's own transformer, unknown to transformers: attention in a module that is called so."""

    class OwnAttention(nn.Module):
        def __init__(self, causal):
            super().__init__()
            self.qkv, self.causal = nn.Linear(16, 48), causal

        def forward(self, x, attention_mask=None):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(1, 2) / 4
            if self.causal:
                scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
            if attention_mask is not None:
                scores = scores.masked_fill(~attention_mask.bool()[:, None, :], torch.finfo(scores.dtype).min)
            return scores.softmax(-1) @ v

    def __init__(self, *causal):
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(self.OwnAttention(c) for c in causal)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids) + self.place.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + layer(x, attention_mask)
        return {"logits": x}


@pytest.mark.parametrize(
    ("causal", "verdict"), [((True, True), "causal"), ((False, False), "bidirectional"), ((True, False), "mixed")]
)
def test_a_hand_written_transformer_is_measured_layer_by_layer(causal, verdict):
    torch.manual_seed(0)
    report = labkit.audit(ByHand(*causal))
    assert report.verdict == verdict
    assert [layer.verdict for layer in report.layers] == ["causal" if c else "bidirectional" for c in causal]


class Leaking(ByHand):
    """Causal attention, and a mean over the sequence that carries the future past every mask."""

    def forward(self, input_ids, attention_mask=None):
        out = super().forward(input_ids, attention_mask)["logits"]
        return {"logits": out + out.mean(1, keepdim=True)}


def test_influence_that_no_attention_explains_is_reported():
    torch.manual_seed(0)
    report = labkit.audit(Leaking(True, True))
    assert "influence-outside-attention" in report.problem_kinds()
    assert report.verdict == "other"


def test_a_model_without_an_output_per_position_is_refused():
    class Pooled(Recurrent):
        def forward(self, input_ids):
            return super().forward(input_ids).mean(1)

    with pytest.raises(AuditError, match="needs one output per position"):
        labkit.audit(Pooled(False))


def test_the_report_prints_a_table_and_serialises(tiny):
    model = tiny("tiny-gemma3").model
    model.config.is_causal = False
    report = labkit.audit(model)
    assert "BIDIRECTIONAL" in str(report)
    assert "one more than the 7" in str(report)
    data = json.loads(report.to_json())
    assert {p["kind"] for p in data["problems"]} == {"window-off-by-one", "packing-leak"}
    assert data["layers"][0]["reach"] == [8, 8]
    frame = report.to_dataframe()
    assert list(frame["left"])[0] == 8
    assert len(frame) == 2


def test_assertions_for_other_peoples_tests(tiny):
    model = tiny("tiny-llama").model
    assert labkit.assert_causal(model).verdict == "causal"
    with pytest.raises(MaskAssertionError, match="expected a bidirectional model, measured as causal"):
        labkit.assert_bidirectional(model)
    labkit.assert_bidirectional(labkit.to_bidirectional(model))
    with pytest.raises(AssertionError):
        labkit.assert_causal(model)


def test_the_popular_recipe_fails_the_assertion_with_the_reason(tiny):
    model = tiny("tiny-llama", "sdpa").model
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(MaskAssertionError, match="measured as mixed"):
        labkit.assert_bidirectional(model, quick=True)
    assert "bidirectional (unpadded), but causal (beside padding" in str(labkit.audit(model, quick=True).problems[0])


def test_a_long_window_is_measured_without_a_long_sequence(tiny):
    model = tiny("tiny-gemma3").model
    model.config.sliding_window = 600
    model.model.layers[0].self_attn.sliding_window = 600
    assert labkit.audit(model, max_tokens=200).layers[0].reach == (599, 0)
    assert labkit.audit(model, max_tokens=1000).layers[0].reach == (599, 0)
    labkit.to_bidirectional(model, window="halve")
    assert labkit.audit(model, max_tokens=200).layers[0].reach == (300, 300)
    labkit.to_bidirectional(model, window="global")
    assert labkit.audit(model, max_tokens=200).layers[0].reach == (None, None)


@pytest.mark.gemma
def test_real_gemma_is_measured_causal_then_bidirectional_then_causal_again(gemma):
    model = gemma.model
    ids = gemma.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before = model(ids).logits
        assert labkit.audit(model, quick=True).verdict == "causal"
        try:
            labkit.to_bidirectional(model)
            report = labkit.audit(model, quick=True)
            assert (report.verdict, report.problems) == ("bidirectional", [])
        finally:
            labkit.to_causal(model)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.gemma
@pytest.mark.slow
def test_full_audit_of_real_gemma_sees_its_window_of_512(gemma):
    model = gemma.model
    try:
        report = labkit.audit(labkit.to_bidirectional(model))
        assert (report.verdict, report.problems) == ("bidirectional", [])
        assert {layer.reach for layer in report.layers} == {(511, 511), None}
    finally:
        labkit.to_causal(model)
