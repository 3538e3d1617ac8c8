"""find_leaks: every planted leak is caught and named, and no honest model is accused.

The planted models are in leaky_models.py; what they let through is worked out here by hand, cell by cell.
"""

import json

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GPT2Config, GPT2LMHeadModel

import labkit
from labkit import masks
from labkit.auditing import leaks as leakage
from labkit.auditing.leaks import find_leaks
from labkit.decoder import running
from labkit.errors import AuditError
from labkit.gpt import GPT
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
    assert "15 of 16 positions depend on tokens 1 to 15 places later (100% of the pairs" in leak.text


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
    assert "position 3 depends on tokens 2 places later" in leak.text


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
    assert "not in the attention" in leak.text


def test_a_leak_that_one_exchange_of_a_token_would_not_show_is_found():
    leak = only_leak(planted.HintOfTheNext(planted.small_config(vocab_size=63)), "future-token")
    assert set(leak.cells) == {(i, i + 1) for i in range(N - 1)}


def test_batch_norm_over_the_positions_leaks_in_training_only():
    leak = only_leak(planted.BatchNormOverTime(planted.small_config()), "train-mode")
    assert leak.layers == ()
    assert leak.text.startswith("in train mode: ")
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


# -- long texts, rare leaks, other rows and other calls ----------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("kind", planted.BLOCK_LEAKS)
def test_a_leak_between_blocks_is_found_in_long_texts(kind, size):
    feature = planted.BLOCK_LEAKS[kind]
    model = planted.WithFeature(lambda x: feature(x, size), context=600, layers=1)
    leak = only_leak(model, "future-token")
    assert leak.layers == ()
    assert all(i < j for i, j in leak.cells)


@pytest.mark.parametrize("size", [17, 24, 30, 48, 60])
def test_leaks_at_the_borders_of_blocks_of_any_size_are_found_in_small_models(size):
    model = planted.WithFeature(lambda x: planted.first_of_the_next_block(x, size), context=64, layers=1)
    only_leak(model, "future-token")


def test_the_layer_that_leaks_in_long_texts_only_is_named():
    cells = torch.ones(128, 128, dtype=torch.bool).tril()
    cells[32:64, 32:64] = True
    leak = only_leak(planted.OwnMask(planted.small_config(context=128), masks.from_dense(cells)), "future-token")
    assert leak.layers == (0, 1)


@pytest.mark.parametrize(("weights", "context", "longest"), [(1e6, 600, 600), (1e9, 600, 16), (1e8, 100, 100)])
def test_the_longest_text_is_within_the_context_and_the_budget(monkeypatch, weights, context, longest):
    model = GPT(planted.small_config(context=context))
    own = sum(w.numel() for name, w in model.named_parameters() if "wte" not in name and "wpe" not in name)
    monkeypatch.setitem(leakage.BUDGET, "cpu", leakage.BUDGET["cpu"] * own / weights)
    report = find_leaks(model)
    assert report.longest == longest
    assert f"texts of up to {longest} tokens" in str(report)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("router", [planted.SequenceRouter, planted.ExpertChoice, planted.CapacityByScore])
def test_routers_that_depend_on_the_whole_text_are_found(router, seed):
    torch.manual_seed(seed)
    assert "future-token" in {leak.kind for leak in find_leaks(planted.Routed(router)).leaks}


@pytest.mark.parametrize("seed", range(10))
def test_a_leak_that_shows_in_three_of_a_hundred_changes_is_found(seed):
    class OneTokenGivesItAway(planted.OwnMask):  # the last token: one of 61 is changed to 7, and one from it
        def _embed(self, ids, past):
            return super()._embed(ids, past) + (ids[:, -1:] == 20)[..., None] * self.wte.weight[20]

    torch.manual_seed(seed)
    model = OneTokenGivesItAway(planted.small_config(), masks.causal())
    assert [leak.kind for leak in find_leaks(model, seed=seed).leaks] == ["future-token"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("router", [planted.CapacityByPosition, planted.GatheredExperts])
@pytest.mark.parametrize("seed", range(3))
def test_causal_routers_are_clean_although_their_rounding_depends_on_later_tokens(router, dtype, seed):
    torch.manual_seed(seed)
    report = find_leaks(planted.Routed(router).to(dtype), seed=seed)
    assert report.clean, str(report)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_mixtures_of_experts_of_transformers_are_clean(family, monkeypatch):
    monkeypatch.setattr(running, "GATHERED", 0)  # as if the experts were large: they gather their tokens
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{family}Config")(vocab_size=61, num_key_value_heads=2, **shape, **experts)
    report = find_leaks(AutoModelForCausalLM.from_config(config))
    assert report.clean, str(report)


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (planted.SoftmaxOverTheBatch, ["batch"]),
        (planted.BatchFirstForgotten, ["batch", "no-influence"]),
        (lambda: planted.Routed(planted.CapacityOfTheBatch), ["batch"]),
        (lambda: nn.Embedding(50, 8), ["no-influence"]),
        (lambda: planted.Remembers(planted.small_config()), ["not-repeatable"]),
    ],
    ids=["softmax", "batch first", "capacity", "bigram", "memory"],
)
def test_what_an_output_depends_on_beside_its_text_is_reported(make, kinds):
    assert [leak.kind for leak in find_leaks(make()).leaks] == kinds


def test_a_model_whose_output_projections_are_zero_is_not_called_clean():
    model = planted.no_mask()
    for block in model.h:
        nn.init.zeros_(block.attn.c_proj.weight)
    assert only_leak(model, "no-influence")


def test_a_model_that_takes_one_text_at_a_time_is_measured_all_the_same():
    class OneRow(planted.OwnMask):
        def forward(self, ids):
            assert len(ids) == 1, "one row, please"
            return super().forward(ids)

    causal = find_leaks(OneRow(planted.small_config(), masks.causal()))
    assert causal.clean
    assert any("one row, please" in note for note in causal.notes)
    torch.manual_seed(0)
    assert not find_leaks(OneRow(planted.small_config(), masks.bidirectional())).clean


# -- other ways of calling the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_causal", "kind", "words"),
    [
        (lambda model, mask: mask is None, "attention-mask", "an attention mask of ones"),
        (lambda model, mask: mask is None or bool(mask.all()), "attention-mask", "right padding"),
        (lambda model, mask: mask is None or bool(mask[:, 0].all()), "attention-mask", "left padding"),
        (lambda model, mask: mask is None or not model.training, "train-mode", "an attention mask of ones"),
        (lambda model, mask: not model.training, "train-mode", "in train mode:"),
    ],
)
def test_a_mask_that_is_lost_on_one_way_through_the_code_is_found(is_causal, kind, words):
    leak = only_leak(planted.MaskArgument(is_causal), kind)
    assert words in leak.text
    assert leak.layers == (0, 1)


def test_positions_counted_from_the_end_of_a_padded_text_are_found():
    only_leak(planted.PositionsFromTheEnd(planted.small_config()), "attention-mask")


def test_a_mask_that_is_lost_where_the_text_has_pad_tokens_is_found():
    class MaskFromTheTokens(GPT):
        def forward(self, ids):
            return super().forward(ids, masks.bidirectional() if bool((ids == 0).any()) else masks.causal())

    assert "with pad tokens" in only_leak(MaskFromTheTokens(planted.small_config(vocab_size=99)), "attention-mask").text


def test_an_option_that_drops_the_mask_is_found():
    leak = only_leak(planted.ReturnsWeights(planted.small_config()), "option")
    assert "return_weights=True" in leak.text
    assert set(leak.cells) == FUTURE


def test_falcon_loses_its_mask_with_output_attentions_in_the_versions_in_which_it_does():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(transformers.FalconConfig(vocab_size=61, **shape)).eval()
    ids = torch.arange(10, 20)[None].repeat(2, 1)
    ids[1, -1] = 50
    with torch.no_grad():
        states = model.transformer(ids, output_attentions=True).last_hidden_state
    leaks = not torch.equal(states[0, :-1], states[1, :-1])
    assert [leak.kind for leak in find_leaks(model).leaks] == ["option"] * leaks


def test_train_mode_is_tried_beside_another_leak():
    class Both(planted.HintOfTheNext, planted.MaskArgument):
        pass

    model = Both(lambda model, mask: not model.training)
    assert [leak.kind for leak in find_leaks(model).leaks] == ["future-token", "train-mode"]


def top_left(mask):
    """The mask of q queries and k keys as if the queries were the first ones."""
    return torch.zeros_like(mask).masked_fill(torch.ones(mask.shape[-2:]).triu(1).bool(), torch.finfo(mask.dtype).min)


def only_tokens(mask):
    return top_left(mask) if mask.size(-2) == 1 else mask


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
@pytest.mark.parametrize(
    ("change", "ways"),
    [
        (top_left, ["in chunks", "token by token"]),
        (torch.zeros_like, ["in chunks"]),
        (only_tokens, ["token by token"]),
    ],
    ids=["top-left", "no mask", "top-left for one token"],
)
def test_a_mask_that_is_wrong_after_a_cache_is_found(tiny, name, change, ways):
    report = find_leaks(planted.misalign_after_a_cache(tiny(name, "eager").model, change))
    assert [leak.kind for leak in report.leaks] == ["cache"] * len(ways), str(report)
    assert all(way in leak.text for way, leak in zip(ways, report.leaks, strict=True))


CALLS = {
    "positional": lambda attention, x: attention(x),
    "keyword": lambda attention, x: attention(query=x),
    "three keywords": lambda attention, x: attention(value=x, key=x, query=x),
    "three positional": lambda attention, x: attention(x, x, x),
    "mixed": lambda attention, x: attention(x, value=x, key=x),
    "another tensor first": lambda attention, x: attention(bias=torch.zeros(1, x.size(1), 3), query=x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("mask", "kind"), [(-1e9, None), (-10.0, "finite-mask"), (0.0, "future-token")])
def test_how_attention_is_called_does_not_matter(call, mask, kind):
    model = planted.ByHand(mask=mask, call=call)
    report = find_leaks(model)
    assert [(leak.kind, leak.layers) for leak in report.leaks] == ([(kind, (0, 1))] if kind else [])
    assert [layer.verdict for layer in labkit.audit(model).layers] == [
        "causal" if mask == -1e9 else "bidirectional"
    ] * 2


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
        (lambda: planted.ByHand(mask=-torch.inf), []),
        (lambda: planted.ByHand(scores=scores_of_normed_queries), ["layers 0-1: scores cannot be raised"]),
        (lambda: planted.ByHand(weights=softmax_without_care), ["times as large the outputs are NaN or infinite"]),
    ],
    ids=["plain", "normed queries", "overflowing softmax"],
)
def test_a_mask_that_could_not_be_put_under_stress_is_reported_as_such(model, notes):
    report = find_leaks(model())
    assert report.clean
    about_scores = [note for note in report.notes if "scores" in note]
    assert len(about_scores) == len(notes)
    assert all(expected in note for expected, note in zip(notes, about_scores, strict=True))


# -- train mode and labels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_a_dropout_path_without_the_mask_is_found_where_there_is_dropout(dropout):
    leak = only_leak(planted.ForgetfulInTraining(planted.small_config(dropout=dropout)), "train-mode")
    assert set(leak.cells) == FUTURE
    assert leak.layers == (0, 1)
    assert leak.text.startswith("in train mode: ")


def test_a_dropout_path_that_is_never_taken_is_no_leak():
    assert find_leaks(planted.ForgetfulInTraining(planted.small_config(dropout=0.0))).clean


@pytest.mark.parametrize(
    ("leaky", "kind", "words"),
    [
        (planted.UnshiftedLabels, "labels-not-shifted", "with the token it was given, not with the next one"),
        (planted.LaterLabels, "labels-not-shifted", "with the token 1 place(s) before it"),
        (planted.LabelsInTheInput, "labels-in-output", "the outputs depend on the labels"),
        (planted.TwiceShiftedLabels, "labels-misplaced", "with the token 2 place(s) after it"),
    ],
)
def test_labels_in_the_wrong_place_are_found_by_the_loss_they_make(leaky, kind, words):
    leak = only_leak(small_gpt2(leaky), kind)
    assert words in leak.text
    assert leak.layers == ()


@pytest.mark.parametrize("leaks", [True, False])
def test_targets_that_are_added_to_the_input_are_found(leaks):
    class WithTargets(GPT):
        def forward(self, ids, targets=None):
            x = super().forward(ids)
            return x if targets is None or not leaks else x + self.wte(targets) @ self.wte.weight.T

    assert [leak.kind for leak in find_leaks(WithTargets(planted.small_config())).leaks] == ["labels-in-output"] * leaks


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
    assert not report.influence.triu(1).any()
    assert report.influence.diagonal().all()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", *GROUPED, "scores of up to 65,504"])
def test_float16_whose_own_smallest_number_is_a_finite_mask_is_clean(tiny, name):
    model = tiny(name, "eager").model if name.startswith("tiny") else planted.honest_model(50)
    report = find_leaks(model.half())
    assert report.clean, str(report)
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
    assert "5 tokens changed one by one" in str(report)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 61), (0, 61), (16, 1)])
def test_too_little_to_perturb_is_refused_with_what_was_given(tokens, vocabulary):
    with pytest.raises(AuditError, match=rf"{tokens} token\(s\) of a vocabulary of {vocabulary}"):
        find_leaks(GPT(planted.small_config(vocab_size=vocabulary)), tokens=tokens)


def test_a_model_whose_outputs_are_no_numbers_is_not_called_clean():
    model = GPT(planted.small_config())
    nn.init.constant_(model.ln_f.bias, torch.nan)
    with pytest.raises(AuditError, match="gave NaN or infinite outputs"):
        find_leaks(model)


def test_the_report_prints_and_serialises():
    report = find_leaks(planted.one_cell(layers=1))
    assert str(report).startswith("OwnMask: LEAKS (16 tokens changed one by one, ")
    data = json.loads(report.to_json())
    assert (data["clean"], data["leaks"][0]["cells"], data["leaks"][0]["layers"]) == (False, [[3, 5]], [0])
    assert torch.allclose(torch.tensor(data["influence"]), report.influence)
    assert (data["tries"], data["longest"]) == (report.tries, report.longest)
