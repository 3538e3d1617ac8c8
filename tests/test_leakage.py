"""find_leaks: every planted leak is caught and named, and no honest model is accused.

The planted models are in leaky_models.py; what they let through is worked out here by hand, cell by cell.
"""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForTokenClassification, GPT2Config, GPT2LMHeadModel

import labkit
from labkit import masks
from labkit.errors import AuditError, LeakageError
from labkit.gpt import GPT
from labkit.leakage import find_leaks
from tests import leaky_models as planted
from tests.model_fixtures import load_or_skip

N = 16
FUTURE = {(i, j) for i in range(N) for j in range(i + 1, N)}
GROUPED = ("tiny-gemma", "tiny-gemma2", "tiny-gemma3", "tiny-llama")
SPECIAL = {"bos_token_id": 1, "eos_token_id": 1}


@pytest.fixture(autouse=True)
def same_weights_every_time():
    torch.manual_seed(0)


def only_leak(model, kind):
    """The one leak of this kind that is found, and nothing else."""
    report = find_leaks(model)
    assert [leak.kind for leak in report.leaks] == [kind], str(report)
    assert not report.clean
    return report.leaks[0]


def small_gpt2(maker=GPT2LMHeadModel, **changes):
    return maker(GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=2, **SPECIAL, **changes))


# -- the future in sight -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
def test_an_unmasked_gpt_sees_all_that_is_to_come(layers):
    leak = only_leak(planted.no_mask(layers=layers), "future-token")
    assert set(leak.cells) == FUTURE
    assert leak.layers == tuple(range(layers))
    assert "15 of 16 positions see 1 to 15 tokens ahead (100% of what a causal mask hides" in leak.text


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_window_that_reaches_one_too_far_reaches_one_further_with_each_layer(layers):
    leak = only_leak(planted.one_to_the_right(layers=layers), "future-token")
    assert set(leak.cells) == {(i, j) for i, j in FUTURE if j - i <= layers}
    assert leak.layers == tuple(range(layers))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", *GROUPED])
def test_the_same_window_put_into_a_transformers_model_is_found_there(tiny, name):
    model = tiny(name).model
    with labkit.masked(model, masks.sliding_window(2, causal=False)):
        leak = only_leak(model, "future-token")
    assert set(leak.cells) == {(i, j) for i, j in FUTURE if j - i <= 2}
    assert leak.layers == (0, 1)
    assert find_leaks(model).clean


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_layer_that_leaks_is_named(layer):
    leak = only_leak(planted.OneLayer(planted.small_config(layers=3), layer), "future-token")
    assert leak.layers == (layer,)
    assert f"in layer {layer}" in leak.text


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", *GROUPED])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_of_a_transformers_model_that_leaks_is_named(tiny, name, layer):
    leak = only_leak(planted.unmask_layer(tiny(name, "eager").model, layer), "future-token")
    assert leak.layers == (layer,)


def test_one_wrong_cell_of_a_mask_is_found_and_is_the_only_one():
    leak = only_leak(planted.one_cell(layers=1), "future-token")
    assert leak.cells == ((3, 5),)
    assert "position 3 sees 2 token(s) ahead" in leak.text


def test_what_one_wrong_cell_brings_about_in_a_deeper_model_is_followed_through_it():
    leak = only_leak(planted.one_cell(layers=2), "future-token")
    assert set(leak.cells) == {(3, 5), (4, 5), (3, 4)}  # 4 sees what 3 saw; 3 sees what 5 knows of 4


@pytest.mark.parametrize("vocabulary", [2, 7, 8, 14])
def test_a_small_vocabulary_hides_nothing(vocabulary):
    assert not find_leaks(planted.no_mask(vocab_size=vocabulary)).clean
    assert find_leaks(GPT(planted.small_config(vocab_size=vocabulary))).clean


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_leak_is_seen_in_half_precision_too(dtype):
    leak = only_leak(planted.one_to_the_right().to(dtype), "future-token")
    assert {j - i for i, j in leak.cells} == {1, 2}


# -- not in the attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaky", [planted.MeanOfTheText, planted.NormOverTime])
def test_a_leak_outside_the_attention_is_not_put_down_to_a_layer(leaky):
    leak = only_leak(leaky(planted.small_config()), "future-token")
    assert set(leak.cells) == FUTURE
    assert leak.layers == ()
    assert "not in the attention: none of its 2 layers" in leak.text


def test_a_leak_that_one_exchange_of_a_token_would_not_show_is_found():
    leak = only_leak(planted.HintOfTheNext(planted.small_config(vocab_size=63)), "future-token")
    assert set(leak.cells) == {(i, i + 1) for i in range(N - 1)}


def test_batch_norm_over_the_positions_leaks_in_training_only():
    leak = only_leak(planted.BatchNormOverTime(planted.small_config()), "train-mode")
    assert leak.layers == ()
    assert leak.text.startswith("only in train mode")
    assert "not in the attention" in leak.text


def test_two_leaks_at_once_are_told_apart():
    class Both(planted.OwnMask):
        def _embed(self, ids, past):
            x = super()._embed(ids, past)
            return x + torch.cat([torch.zeros_like(x[:, :-2]), x[:, -1:], torch.zeros_like(x[:, -1:])], dim=1)

    cells = torch.ones(N, N).tril().bool()
    cells[3, 5] = True
    report = find_leaks(Both(planted.small_config(layers=1), masks.from_dense(cells)))
    assert [(leak.cells, leak.layers) for leak in report.leaks] == [(((3, 5),), (0,)), (((N - 2, N - 1),), ())]
    assert "not in the attention" not in report.leaks[0].text
    assert "not in the attention" in report.leaks[1].text


# -- a mask that is a number -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-10.0, -30.0, -1e4])
def test_a_finite_mask_of_a_gpt_gives_way(value):
    leak = only_leak(planted.FiniteMask(planted.small_config(), value), "finite-mask")
    assert leak.layers == (0, 1)
    assert set(leak.cells) <= FUTURE
    assert (leak.factor == 1) == (value == -10)
    assert (f"(about {value:.0f})" in leak.text) == (value >= -30)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", *GROUPED])
@pytest.mark.parametrize("value", [-10.0, -30.0, -1e4])
def test_a_clamped_mask_of_a_transformers_model_gives_way(tiny, name, value):
    model = planted.clamp_masks(tiny(name, "eager").model, value)
    if name == "tiny-gemma2" and value == -1e4:  # its scores are capped at 50: no training takes them to 10,000
        assert find_leaks(model).clean
        return
    leak = only_leak(model, "finite-mask")
    assert leak.layers == (0, 1)
    assert (f"(about {value:.0f})" in leak.text) == (value >= -30)


def test_the_one_layer_with_a_finite_mask_is_named(tiny):
    model = planted.clamp_masks(tiny("tiny-llama", "eager").model, -30.0, (1,))
    assert only_leak(model, "finite-mask").layers == (1,)


@pytest.mark.parametrize("value", [-30.0, -1e3, -1e4])
def test_the_factor_is_the_first_power_of_ten_at_which_the_future_shows(tiny, value):
    model = planted.clamp_masks(tiny("tiny-gemma", "eager").model, value)
    factor = only_leak(model, "finite-mask").factor
    ids = torch.arange(40, 56)[None]
    changed = ids.clone()
    changed[0, -1] = 99

    def future_shows(factor):
        for attention in planted.attentions_of(model):
            attention.scaling *= factor
        with torch.no_grad():
            gap = model.model(changed).last_hidden_state - model.model(ids).last_hidden_state
        for attention in planted.attentions_of(model):
            attention.scaling /= factor
        return bool(gap[0, :-1].any())

    assert not future_shows(factor / 10)
    assert future_shows(factor)


def scores_of_normed_queries(q, k):
    return nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).transpose(1, 2)


def softmax_without_care(scores):
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "notes"),
    [
        (lambda: planted.ByHand(), []),
        (lambda: planted.ByHand(scores=scores_of_normed_queries), ["layers 0-1: scores cannot be raised"]),
        (lambda: planted.ByHand(weights=softmax_without_care), ["times as large the outputs are no numbers"]),
    ],
    ids=["plain", "normed queries", "overflowing softmax"],
)
def test_a_mask_that_could_not_be_put_under_stress_is_reported_as_such(model, notes):
    report = find_leaks(model())
    assert report.clean
    assert len(report.notes) == len(notes)
    assert all(expected in found for expected, found in zip(notes, report.notes, strict=True))


# -- train mode and labels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_a_dropout_path_without_the_mask_is_found_where_there_is_dropout(dropout):
    leak = only_leak(planted.ForgetfulInTraining(planted.small_config(dropout=dropout)), "train-mode")
    assert set(leak.cells) == FUTURE
    assert leak.layers == (0, 1)
    assert leak.text.startswith("only in train mode")


def test_a_dropout_path_that_is_never_taken_is_no_leak():
    assert find_leaks(planted.ForgetfulInTraining(planted.small_config(dropout=0.0))).clean


@pytest.mark.parametrize(
    ("leaky", "kind", "words"),
    [
        (planted.UnshiftedLabels, "labels-not-shifted", "with the token it was given, not with the next one"),
        (planted.LaterLabels, "labels-not-shifted", "with the token 1 place(s) before it"),
        (planted.TwiceShiftedLabels, "labels-misplaced", "with the token 2 place(s) after it"),
    ],
)
def test_labels_in_the_wrong_place_are_found_by_the_loss_they_make(leaky, kind, words):
    leak = only_leak(small_gpt2(leaky), kind)
    assert words in leak.text
    assert leak.layers == ()


def test_equal_logits_everywhere_are_no_misplaced_labels():
    model = small_gpt2(tie_word_embeddings=False)
    nn.init.zeros_(model.lm_head.weight)
    assert find_leaks(model).clean


def test_a_loss_that_is_no_cross_entropy_is_a_note_and_no_leak():
    class Scaled(GPT2LMHeadModel):
        def forward(self, input_ids=None, labels=None, **kwargs):
            out = super().forward(input_ids, labels=labels, **kwargs)
            out.loss = None if out.loss is None else 0.37 * out.loss
            return out

    report = find_leaks(small_gpt2(Scaled))
    assert report.clean
    assert any("its labels were not checked" in note for note in report.notes)


def test_an_auxiliary_loss_beside_the_labels_is_no_leak():
    class WithPenalty(GPT2LMHeadModel):
        def forward(self, input_ids=None, labels=None, **kwargs):
            out = super().forward(input_ids, labels=labels, **kwargs)
            out.loss = None if out.loss is None else out.loss + 3.0
            return out

    assert find_leaks(small_gpt2(WithPenalty)).clean


def test_labels_of_a_token_classifier_stand_where_they_should(tiny):
    config = tiny("tiny-llama").model.config
    assert find_leaks(AutoModelForTokenClassification.from_config(config)).clean


# -- honest models -----------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(24))
def test_an_honest_model_of_any_shape_is_clean(seed, dtype):
    report = find_leaks(planted.honest_model(seed).to(dtype), seed=seed)
    assert report.clean, str(report)
    assert report.notes == []
    assert not report.influence.triu(1).any()
    assert report.influence.diagonal().all()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", *GROUPED, "scores of up to 65,504"])
def test_float16_whose_own_smallest_number_is_a_finite_mask_is_clean(tiny, name):
    model = tiny(name, "eager").model if name.startswith("tiny") else planted.honest_model(50)
    report = find_leaks(model.half())
    assert (report.leaks, report.notes) == ([], [])
    assert {p.dtype for p in model.parameters()} == {torch.float16}


class Recurrent(nn.Module):
    """No attention at all: an LSTM reads from left to right, a bidirectional one both ways."""

    def __init__(self, both_ways):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.read = nn.LSTM(16, 16, batch_first=True, bidirectional=both_ways)

    def forward(self, input_ids):
        return self.read(self.embed(input_ids))[0]


@pytest.mark.parametrize("both_ways", [False, True])
def test_a_model_without_attention_is_measured_as_a_whole(both_ways):
    report = find_leaks(Recurrent(both_ways))
    assert report.clean is not both_ways
    assert all("attention" not in leak.text and leak.layers == () for leak in report.leaks)
    assert any("no attention modules were found" in note for note in report.notes)


@pytest.mark.gemma
@pytest.mark.parametrize(
    ("name", "dtype"),  # in bfloat16 minutes on a processor that emulates it
    [
        ("gemma3-270m", "float32"),
        pytest.param("gemma3-270m", "bfloat16", marks=pytest.mark.slow),
        pytest.param("smollm2-135m", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_real_model_is_clean_until_its_mask_is_opened(name, dtype):
    model = load_or_skip(name, dtype=dtype).model
    assert find_leaks(model).clean
    with labkit.masked(model, {3: masks.sliding_window(2, causal=False)}):
        leak = only_leak(model, "future-token")
    assert leak.layers == (3,)


# -- what goes in and what is left behind ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: planted.BatchNormOverTime(planted.small_config(dropout=0.1)).half().float(),
        lambda: small_gpt2().half(),
        lambda: planted.honest_model(4),
    ],
    ids=["batch norm", "float16", "gemma3"],
)
def test_the_model_is_left_as_it_was(make):
    model = make().train()
    model.get_submodule("h.0" if isinstance(model, GPT) else "lm_head").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, random_state = [m.training for m in model.modules()], torch.get_rng_state()
    scaling = [getattr(m, "scaling", None) for m in model.modules()]
    find_leaks(model)
    after = model.state_dict()
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: t.dtype for name, t in before.items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert [m.training for m in model.modules()] == modes
    assert [getattr(m, "scaling", None) for m in model.modules()] == scaling
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_context_shorter_than_the_text_is_respected():
    report = find_leaks(planted.no_mask(context=5))
    assert report.influence.shape == (5, 5)
    assert "5 tokens perturbed one by one" in str(report)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 61), (0, 61), (16, 1)])
def test_too_little_to_perturb_is_refused_with_what_was_given(tokens, vocabulary):
    with pytest.raises(LeakageError, match=rf"{tokens} token\(s\) of a vocabulary of {vocabulary}"):
        find_leaks(GPT(planted.small_config(vocab_size=vocabulary)), tokens=tokens)


def test_a_model_whose_outputs_are_no_numbers_is_not_called_clean():
    model = GPT(planted.small_config())
    nn.init.constant_(model.ln_f.bias, torch.nan)
    with pytest.raises(AuditError, match="gave NaN or infinite outputs"):
        find_leaks(model)


def test_the_report_prints_and_serialises():
    report = find_leaks(planted.one_cell(layers=1))
    assert str(report).splitlines()[0] == "OwnMask: LEAKS, 16 tokens perturbed one by one"
    data = json.loads(report.to_json())
    assert (data["clean"], data["leaks"][0]["cells"], data["leaks"][0]["layers"]) == (False, [[3, 5]], [0])
    assert torch.allclose(torch.tensor(data["influence"]), report.influence)
    assert str(find_leaks(GPT(planted.small_config()))) == "GPT: no leak, 16 tokens perturbed one by one"
