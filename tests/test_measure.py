"""The audit: its verdicts and problems on models of any kind, in any dtype, and an error for other people's CI.

The whole catalogue of false conversions is compared with an oracle in test_pitfalls_matrix.py.
"""

import json

import pytest
import torch
import transformers
from torch import nn

import labkit
from labkit import masks
from labkit.auditing import checks
from labkit.errors import AuditError
from tests.leaky_models import HomeMade, Recurrent, SelfAttention

N = 12
SHIFT = "left-padding-position-shift"


PAINTED = masks.from_dense(torch.rand(30, 30, generator=torch.Generator().manual_seed(1)) > 0.5)


@pytest.mark.parametrize("mask", [masks.prefix(3), masks.hybrid(4), PAINTED], ids=repr)
def test_the_mask_put_in_force_is_the_mask_that_is_measured(tiny, mask):
    model = tiny("tiny-llama").model
    with labkit.masked(model, mask):
        report = labkit.audit(model, quick=True)
    assert report.verdict == "other"
    itself = torch.eye(6).bool()  # a token's own state also forms its query
    for layer in report.layers:
        assert torch.equal(layer.mask.dense(6) | itself, mask.dense(6) | itself)


def test_a_converted_subset_is_mixed_without_being_a_problem(tiny):
    report = labkit.audit(labkit.to_bidirectional(tiny("tiny-llama").model, layers=[1]))
    assert (report.verdict, report.problems) == ("mixed", [])
    assert [layer.verdict for layer in report.layers] == ["causal", "bidirectional"]


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
def test_rounding_is_no_influence_and_no_problem_in_any_dtype(tiny, name, dtype):
    model = tiny(name).model.to(dtype)
    assert labkit.audit(model, quick=True).verdict == "causal"
    report = labkit.audit(labkit.to_bidirectional(model), reference=tiny(name).model.to(dtype))
    assert (report.verdict, report.problems) == ("bidirectional", [])


def test_a_reference_with_other_weights_is_a_changed_computation(tiny):
    model, reference = tiny("tiny-llama").model, tiny("tiny-llama").model
    assert "computation-changed" not in labkit.audit(model, reference=reference, quick=True).problem_kinds()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    assert "computation-changed" in labkit.audit(model, reference=reference, quick=True).problem_kinds()


# -- an engineer's own models, unknown to transformers -----------------------------------------------------------------


class Own(HomeMade):
    """Two layers with four heads; `cells(layer, n, training)` is the mask, (n, n) or (4, n, n)."""

    def __init__(self, cells):
        super().__init__(self.layers_under_cells, SelfAttention(), SelfAttention())
        self.cells, self.dropout = cells, nn.Dropout(0.1)

    def layers_under_cells(self, attentions, x, mask):
        for i, attention in enumerate(attentions):
            x = x + attention(self.dropout(x), mask & self.cells(i, x.shape[1], self.training))
        return x


def causal_unless(n, condition):
    return torch.ones(n, n, dtype=torch.bool).tril(n if condition else 0)


@pytest.mark.parametrize(
    ("cells", "verdict", "kind"),
    [
        (lambda layer, n, training: causal_unless(n, False), "causal", None),
        (lambda layer, n, training: causal_unless(n, True), "bidirectional", None),
        (lambda layer, n, training: causal_unless(n, layer == 1), "mixed", None),
        (lambda layer, n, training: causal_unless(n, training), "causal", "train-eval-mismatch"),
        (lambda layer, n, training: causal_unless(n, not training), "bidirectional", "train-eval-mismatch"),
        (lambda layer, n, training: causal_unless(n, n > 64), "causal", "depends-on-length"),
        (lambda layer, n, training: causal_unless(n, n < 64), "bidirectional", "depends-on-length"),
        (
            lambda layer, n, training: torch.stack([causal_unless(n, head > 0) for head in range(4)]),
            "bidirectional",
            "heads-differ",
        ),
    ],
)
def test_a_model_written_by_hand_is_measured_by_layer_and_head_in_train_mode_and_in_long_texts(cells, verdict, kind):
    report = labkit.audit(Own(cells))
    assert (report.verdict, len(report.layers)) == (verdict, 2)
    assert report.problem_kinds() == {SHIFT} | ({kind} if kind else set())  # its positions count pads
    if verdict == "mixed":
        assert [layer.verdict for layer in report.layers] == ["causal", "bidirectional"]


class LastPosition(Recurrent):
    """As nanoGPT: the logits of the last position only, unless there are targets to compute a loss from."""

    def forward(self, idx, targets=None):
        states = super().forward(idx)
        return (states if targets is not None else states[:, [-1]]), None


@pytest.mark.parametrize("model", [Recurrent, LastPosition])
@pytest.mark.parametrize(("both_ways", "verdict"), [(False, "causal"), (True, "bidirectional")])
def test_any_module_that_reads_token_ids_can_be_measured(model, both_ways, verdict):
    report = labkit.audit(model(both_ways))
    assert (report.verdict, report.layers) == (verdict, [])
    assert any("only as a whole" in note for note in report.notes)
    assert any("such as a router's, is not excluded" in note for note in report.notes) == (verdict == "causal")
    assert labkit.find_leaks(model(both_ways)).clean == (not both_ways)


# -- attention so sharp that a change of one token need not show -------------------------------------------------------


def sharp_gemma4(global_head_dim, seed, attn):
    torch.manual_seed(seed)
    config = transformers.Gemma4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, global_head_dim=global_head_dim, sliding_window=4, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=64,
    )  # fmt: skip
    return transformers.Gemma4ForCausalLM._from_config(config, attn_implementation=attn).eval()


def jacobian_cells(model, n):
    """Bool (n, n): the derivative of output i with respect to embedding j is not 0, in float64."""
    inputs = torch.randn(1, n, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    direction = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def outputs(embeddings):
        return model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state[0] @ direction

    with torch.random.fork_rng():
        model.double()
        jacobian = torch.autograd.functional.jacobian(outputs, inputs)  # (n, 1, n, 32)
        model.float()
    return (jacobian[:, 0] != 0).any(-1)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])  # blocked keys are hidden by a bool, or by a number
@pytest.mark.parametrize(("global_head_dim", "seed"), [(16, 0), (512, 1)])
def test_the_audit_of_sharp_attention_agrees_with_exact_derivatives(global_head_dim, seed, attn):
    model = sharp_gemma4(global_head_dim, seed, attn)
    for verdict, layer_masks in (
        ("causal", [masks.sliding_window(4), masks.causal()]),
        ("bidirectional", [masks.sliding_window(4, causal=False), masks.bidirectional()]),
    ):
        if verdict == "bidirectional":
            labkit.to_bidirectional(model)
        report = labkit.audit(model, quick=True)
        assert (report.verdict, report.problems) == (verdict, [])
        assert [layer.mask for layer in report.layers] == layer_masks
        whole = report.whole["unpadded"]
        assert torch.equal(whole.influence, jacobian_cells(model, len(whole.influence))[:, list(whole.columns)])
        sharp = global_head_dim >= 256
        assert any("small changes decided" in note for note in report.notes) or not (sharp and verdict == "causal")


# -- reports and assertions --------------------------------------------------------------------------------------------


def test_the_report_prints_a_table_and_serialises(tiny):
    model = tiny("tiny-gemma3").model
    model.config.is_causal = False
    report = labkit.audit(model)
    assert "mask on 12 tokens" in str(report) and "mask on 6 tokens" in str(labkit.audit(model, quick=True))
    assert "BIDIRECTIONAL" in str(report) and "attend to 8 tokens on the left and 8 tokens on the right" in str(report)
    data = json.loads(report.to_json())
    assert {p["kind"] for p in data["problems"]} == {"window-off-by-one", "packing-leak"}
    assert (data["layers"][0]["reach"], data["layers"][1]["mask"]) == ([8, 8], "bidirectional()")


def test_an_assertion_fails_on_the_verdict_and_on_every_problem_that_is_not_allowed(tiny):
    model = tiny("tiny-llama").model
    assert labkit.assert_causal(model).verdict == "causal"
    with pytest.raises(AssertionError, match="expected a bidirectional model, and this one is causal"):
        labkit.assert_bidirectional(model)
    model.config.is_causal = False  # the mask is open, and so are documents in a packed row to each other
    with pytest.raises(AuditError, match="leak into each other"):
        labkit.assert_bidirectional(model)
    assert labkit.assert_bidirectional(model, allow=["packing-leak"]).problem_kinds() == {"packing-leak"}
    learned = tiny("tiny-gpt2").model  # its positions count pads
    assert labkit.assert_causal(learned).problem_kinds() == {SHIFT}
    with pytest.raises(AuditError, match="pads count as positions"):
        labkit.assert_causal(learned, allow=())


@pytest.mark.matrix
@pytest.mark.parametrize("most", [200, 1000])
def test_a_long_window_is_measured_without_a_long_sequence(tiny, monkeypatch, most):
    monkeypatch.setattr(checks, "MAX_TOKENS", most)
    model = tiny("tiny-gemma3").model
    model.config.sliding_window = 600
    model.model.layers[0].self_attn.sliding_window = 600
    assert labkit.audit(model).layers[0].reach == (599, 0)
    for choice, reach in (("halve", (300, 300)), ("global", (None, None))) if most == 200 else ():
        labkit.to_bidirectional(model, window=choice)
        assert labkit.audit(model).layers[0].reach == reach


def test_packed_documents_beside_a_padding_mask_are_a_note_of_plain_models_and_a_problem_of_converted_ones(tiny):
    model = tiny("tiny-llama").model
    report = labkit.audit(model)
    assert report.problems == []
    assert any("leak into each other" in note for note in report.notes)
    labkit.to_bidirectional(model)
    assert labkit.audit(model).problems == []

    def forget_positions(module, args, kwargs):  # as if they were lost wherever there is a mask
        return args, kwargs | ({} if kwargs.get("attention_mask") is None else {"position_ids": None})

    model.model.register_forward_pre_hook(forget_positions, with_kwargs=True, prepend=True)
    report = labkit.audit(model)
    assert report.problem_kinds() == {"packing-leak"}
    assert "with an attention_mask of ones (both ways)" in str(report)


@pytest.mark.gemma
@pytest.mark.slow
def test_real_gemma_is_measured_causal_then_bidirectional_with_its_window_then_causal_again(gemma):
    model = gemma.model
    ids = gemma.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before = model(ids).logits
        assert labkit.audit(model, quick=True).verdict == "causal"
        try:
            report = labkit.audit(labkit.to_bidirectional(model))
            assert (report.verdict, report.problems) == ("bidirectional", [])
            assert {layer.reach for layer in report.layers} == {(511, 511), None}
        finally:
            labkit.to_causal(model)
        assert torch.equal(model(ids).logits, before)
