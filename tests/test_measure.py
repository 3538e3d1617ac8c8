"""The audit: on any module, in any dtype, cheap when quick, and an error for other people's CI.

The whole catalogue of false conversions is held against an oracle in test_pitfalls_matrix.py.
"""

import json

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import labkit
from labkit import masks
from labkit.errors import AuditError

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
    assert "no problems found" not in str(report)  # that is for models of one mask


# -- attention so sharp that a change of one token need not show -------------------------------------------------------


def sharp_gemma4(global_head_dim, seed):
    torch.manual_seed(seed)
    config = transformers.Gemma4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, global_head_dim=global_head_dim, sliding_window=4, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=64,
    )  # fmt: skip
    return transformers.Gemma4ForCausalLM(config).eval()


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


@pytest.mark.parametrize("global_head_dim", [16, 64, 256, 512])
@pytest.mark.parametrize("seed", range(2))
def test_the_audit_of_sharp_attention_agrees_with_exact_derivatives(global_head_dim, seed):
    model = sharp_gemma4(global_head_dim, seed)
    for verdict, layer_masks in (
        ("causal", [masks.sliding_window(4), masks.causal()]),
        ("bidirectional", [masks.sliding_window(4, causal=False), masks.bidirectional()]),
    ):
        if verdict == "bidirectional":
            labkit.to_bidirectional(model)
        report = labkit.audit(model, quick=True)
        assert (report.verdict, report.problems) == (verdict, [])
        assert [layer.mask for layer in report.layers] == layer_masks
        seen = report.whole["unpadded"]
        assert torch.equal(seen.influence, jacobian_cells(model, len(seen.influence))[:, list(seen.columns)])
        sharp = global_head_dim >= 256
        assert any("derivatives decided" in note for note in report.notes) or not (sharp and verdict == "causal")


@pytest.mark.parametrize("window", [2, 5])
def test_a_window_in_sharp_attention_is_measured_as_exact_derivatives_have_it(window):
    model = sharp_gemma4(512, 0)
    with labkit.masked(model, masks.sliding_window(window)):
        report = labkit.audit(model)
        seen = report.whole["unpadded"]
        assert torch.equal(seen.influence, jacobian_cells(model, N))
    assert report.verdict == "causal"
    assert [layer.mask for layer in report.layers] == [masks.sliding_window(window)] * 2


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


class SharpAttention(nn.Module):
    """Scores of up to +-400; keys are hidden by a number that is added, or by the bool mask of sdpa."""

    def __init__(self, mask, hidden_by, mix=torch.matmul):
        super().__init__()
        self.qkv, self.mask, self.hidden_by, self.mix = nn.Linear(16, 48), mask, hidden_by, mix
        self.scaling = 400.0 if mix is not torch.matmul else None

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, n = F.normalize(q, dim=-1), F.normalize(k, dim=-1), x.shape[1]
        cells = self.mask.dense(n).expand(len(x), n, n)
        if attention_mask is not None:
            cells = (cells & attention_mask.bool()[:, None]) | torch.eye(n, dtype=torch.bool)
        if self.hidden_by is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=cells, scale=400.0)
        scores = (self.scaling or 400.0) * q @ k.transpose(1, 2)
        return self.mix(scores.masked_fill(~cells, self.hidden_by).softmax(-1), v)


class WithoutDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, values):
        return weights @ values


def sharp_by_hand(*attention):
    torch.manual_seed(0)
    model = ByHand(True, True)
    model.layers = nn.ModuleList(SharpAttention(*attention) for _ in range(2))
    return model


FOUR_MASKS = [
    (masks.causal(), "causal"),
    (masks.bidirectional(), "bidirectional"),
    (masks.sliding_window(4), "causal"),
    (masks.sliding_window(4, causal=False), "bidirectional"),
]


@pytest.mark.parametrize(
    ("hidden_by", "dtype"),
    [
        (None, torch.float32),
        (-torch.inf, torch.bfloat16),
        (torch.finfo(torch.float32).min, torch.float32),
        (-1e4, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("mask", "verdict"), FOUR_MASKS, ids=repr)
def test_sharp_attention_by_hand_shows_its_mask_and_no_blocked_key(mask, verdict, hidden_by, dtype):
    report = labkit.audit(sharp_by_hand(mask, hidden_by).to(dtype))
    assert [layer.mask for layer in report.layers] == [mask, mask]
    assert report.verdict == verdict and not report.problem_kinds() - {"left-padding-position-shift"}
    assert any("derivatives decided" in note for note in report.notes)


@pytest.mark.parametrize(("mask", "verdict"), FOUR_MASKS, ids=repr)
def test_sharp_attention_without_derivatives_is_measured_by_small_changes_and_says_so(mask, verdict):
    report = labkit.audit(sharp_by_hand(mask, -torch.inf, WithoutDerivative.apply))
    assert [layer.mask for layer in report.layers] == [mask, mask]
    assert report.verdict == verdict
    assert any("small changes decided" in note for note in report.notes)


class Changing(nn.Module):
    """Four heads in each of two layers; `cells(n, training)` is the mask, (n, n) or (4, n, n)."""

    class OwnAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_head, self.qkv, self.c_proj = 4, nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x, cells):
            q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return self.c_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=cells).transpose(1, 2).flatten(2))

    def __init__(self, cells):
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 16), nn.ModuleList(self.OwnAttention() for _ in range(2))
        self.dropout, self.cells = nn.Dropout(0.1), cells

    def forward(self, input_ids):
        x, n = self.dropout(self.embed(input_ids)), input_ids.shape[1]
        for layer in self.layers:
            x = x + layer(x, self.cells(n, self.training))
        return x


def open_to(n, condition):
    return torch.ones(n, n, dtype=torch.bool).tril(n if condition else 0)


@pytest.mark.parametrize(
    ("cells", "verdict", "kind"),
    [
        (lambda n, training: open_to(n, training), "causal", "train-eval-mismatch"),
        (lambda n, training: open_to(n, not training), "bidirectional", "train-eval-mismatch"),
        (lambda n, training: open_to(n, n > 64), "causal", "depends-on-length"),
        (lambda n, training: open_to(n, n < 64), "bidirectional", "depends-on-length"),
        (lambda n, training: torch.stack([open_to(n, head > 0) for head in range(4)]), "bidirectional", "heads-differ"),
        (lambda n, training: open_to(n, False), "causal", None),
        (lambda n, training: open_to(n, True), "bidirectional", None),
    ],
)
def test_a_mask_that_is_another_in_train_mode_in_long_texts_or_in_some_heads_is_a_problem(cells, verdict, kind):
    torch.manual_seed(0)
    model = Changing(cells)
    report = labkit.audit(model)
    assert report.verdict == verdict
    assert report.problem_kinds() - {"blind-to-word-order"} == ({kind} if kind else set())  # it has no positions


def test_running_averages_of_train_mode_are_put_back():
    torch.manual_seed(0)
    model = Recurrent(False)
    model.norm = nn.BatchNorm1d(16)
    model.register_forward_hook(lambda module, args, out: module.norm(out.transpose(1, 2)).transpose(1, 2))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert "train-eval-mismatch" in labkit.audit(model).problem_kinds()  # its averages are over all tokens there
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


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


class LastPosition(Recurrent):
    """As nanoGPT: the logits of the last position only, unless there are targets to compute a loss from."""

    def forward(self, idx, targets=None, everywhere=False):
        states = super().forward(idx)
        return (states if everywhere or targets is not None else states[:, [-1]]), None


class LastPositionOfLabels(LastPosition):
    def forward(self, input_ids, labels=None):
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("model", [LastPosition, LastPositionOfLabels])
@pytest.mark.parametrize(("both_ways", "verdict"), [(False, "causal"), (True, "bidirectional")])
def test_a_model_of_the_last_position_only_is_given_targets(model, both_ways, verdict):
    torch.manual_seed(0)
    assert labkit.audit(model(both_ways)).verdict == verdict
    assert labkit.find_leaks(model(both_ways)).clean == (not both_ways)


def test_the_wrapper_that_the_error_shows_makes_such_a_model_measurable():
    class NoTargets(LastPosition):
        def forward(self, idx, everywhere=False):
            return super().forward(idx, None, everywhere)

    model = NoTargets(True)
    with pytest.raises(AuditError) as error:
        labkit.audit(model)
    wrapper = "\n".join(line.strip() for line in str(error.value).splitlines() if line.startswith("    "))
    names = {"torch": torch, "model": model}
    exec(wrapper.replace("...", "everywhere=True"), names)
    assert labkit.audit(names["every"]).verdict == "bidirectional"


# -- rows of a batch, and tokens that do not interact ------------------------------------------------------------------


class OverTheBatch(Recurrent):
    """`batch_first` was forgotten: the network reads along the batch."""

    def __init__(self, both_ways=False):
        super().__init__(both_ways)
        self.read.batch_first = False


class BatchMean(Recurrent):
    """Takes a padding mask, and subtracts from each state the mean over the batch."""

    def __init__(self):
        super().__init__(False)

    def forward(self, input_ids, attention_mask=None):
        states = super().forward(input_ids)
        return states - states.mean(0, keepdim=True) / 2


class NotOnBatches(Recurrent):
    def forward(self, input_ids):
        if len(input_ids) > 1:
            raise ValueError("one text at a time")
        return super().forward(input_ids)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("model", [OverTheBatch, BatchMean])
def test_rows_of_a_batch_that_influence_each_other_are_a_problem(model, quick):
    torch.manual_seed(0)
    report = labkit.audit(model(), quick=quick)
    assert "depends-on-batch" in report.problem_kinds()
    for check in (labkit.assert_causal, labkit.assert_bidirectional):
        with pytest.raises(AuditError):
            check(model(), quick=quick)


def test_a_model_that_takes_one_row_only_is_measured_and_the_note_says_so():
    report = labkit.audit(NotOnBatches(False))
    assert (report.verdict, report.problems) == ("causal", [])
    assert any("rows of a batch" in note and "one text at a time" in note for note in report.notes)


@pytest.mark.parametrize("zero", [True, False])
def test_a_model_whose_tokens_do_not_interact_is_not_passed(zero):
    model = ByHand(True, True) if zero else nn.Embedding(50, 16)
    if zero:  # nothing comes out of its attention, though the layers' masks are causal
        for layer in model.layers:
            nn.init.zeros_(layer.qkv.weight), nn.init.zeros_(layer.qkv.bias)
    report = labkit.audit(model)
    assert report.verdict == "other" and "no-influence" in report.problem_kinds()
    with pytest.raises(AuditError):
        labkit.assert_causal(model)


def test_the_report_prints_a_table_and_serialises(tiny):
    model = tiny("tiny-gemma3").model
    model.config.is_causal = False
    report = labkit.audit(model)
    assert "BIDIRECTIONAL" in str(report)
    assert "one more than the 7" in str(report)
    data = json.loads(report.to_json())
    assert {p["kind"] for p in data["problems"]} == {"window-off-by-one", "packing-leak"}
    assert data["layers"][0]["reach"] == [8, 8]


def test_assertions_for_other_peoples_tests(tiny):
    model = tiny("tiny-llama").model
    assert labkit.assert_causal(model).verdict == "causal"
    with pytest.raises(AuditError, match="expected a bidirectional model, and this one is causal"):
        labkit.assert_bidirectional(model)
    labkit.assert_bidirectional(labkit.to_bidirectional(model))
    with pytest.raises(AssertionError):
        labkit.assert_causal(model)


def test_an_assertion_fails_on_every_problem_that_is_not_allowed(tiny):
    model = tiny("tiny-llama").model
    model.config.is_causal = False  # the mask is open, and so are documents in a packed row to each other
    with pytest.raises(AuditError, match="leak into each other"):
        labkit.assert_bidirectional(model)
    assert labkit.assert_bidirectional(model, allow=["packing-leak"]).problem_kinds() == {"packing-leak"}
    learned = tiny("tiny-gpt2").model  # its positions count pads
    assert labkit.assert_causal(learned).problem_kinds() == {"left-padding-position-shift"}
    with pytest.raises(AuditError, match="pads count as positions"):
        labkit.assert_causal(learned, allow=())


def test_the_popular_recipe_fails_the_assertion_with_the_reason(tiny):
    model = tiny("tiny-llama", "sdpa").model
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(AuditError, match="is mixed"):
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


def test_packed_documents_beside_a_padding_mask_are_a_note_of_plain_models_and_a_problem_of_converted_ones(tiny):
    model = tiny("tiny-llama").model
    report = labkit.audit(model)
    assert report.problems == []
    assert any("leak into each other beside an attention_mask" in note for note in report.notes)
    labkit.to_bidirectional(model)
    assert labkit.audit(model).problems == []

    def forget_positions(module, args, kwargs):  # as if they were lost wherever there is a mask
        return args, kwargs | ({} if kwargs.get("attention_mask") is None else {"position_ids": None})

    model.model.register_forward_pre_hook(forget_positions, with_kwargs=True, prepend=True)
    report = labkit.audit(model)
    assert report.problem_kinds() == {"packing-leak"}
    assert "with an attention_mask of ones (both ways), an attention_mask of trailing pads (both" in str(report)
    with pytest.raises(AuditError, match="leak into each other"):
        labkit.assert_bidirectional(model)
    assert labkit.assert_bidirectional(model, allow=["packing-leak"]).problems == report.problems


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
