"""find_leaks: every planted leak is reported and named, and no honest model is accused.

The planted models are in leaky_models.py; what they let through is worked out here by hand, cell by cell.
"""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForTokenClassification, GPT2Config, GPT2LMHeadModel

import labkit
from labkit import masks
from labkit.auditing import leaks as leakage
from labkit.auditing.leaks import find_leaks
from labkit.errors import AuditError
from labkit.gpt import GPT
from tests import leaky_models as planted
from tests.model_fixtures import load_or_skip

N = 16
FUTURE = {(i, j) for i in range(N) for j in range(i + 1, N)}
NAMES = ("tiny-gpt2", "tiny-gemma2", "tiny-gemma3")


@pytest.fixture(autouse=True)
def same_weights_every_time():
    torch.manual_seed(0)


def only_leak(model, kind):
    """The one leak of this kind that is reported, and nothing else."""
    report = find_leaks(model)
    assert [leak.kind for leak in report.leaks] == [kind], str(report)
    assert not report.clean
    return report.leaks[0]


def within(distance):
    return {(i, j) for i, j in FUTURE if j - i <= distance}


def small_gpt2(maker=GPT2LMHeadModel, **changes):
    return maker(GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=2, **changes))


@pytest.fixture
def short(tiny):
    """Factory: a tiny model in eager attention whose config states a context of 64 tokens, so that no text is long."""

    def load(name):
        model = tiny(name, "eager").model
        model.config.max_position_embeddings = 64
        return model

    return load


# -- the future, in evaluation mode and without a mask -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "cells", "layers"),
    [
        (lambda: planted.no_mask(layers=3), FUTURE, (0, 1, 2)),
        # a window that reaches one too far reaches one further with each layer
        (lambda: planted.one_to_the_right(layers=3), within(3), (0, 1, 2)),
        (lambda: planted.one_layer(2, layers=3), None, (2,)),
        # 4 attends to what 3 has from 5; 3 has from 5 what 5 has from 4
        (lambda: planted.one_cell(layers=2), {(3, 5), (4, 5), (3, 4)}, (0, 1)),
        (lambda: planted.one_to_the_right().bfloat16(), within(2), (0, 1)),
        (lambda: planted.one_to_the_right().half(), within(2), (0, 1)),
        (planted.mean_of_the_text, FUTURE, ()),
        # a leak that one exchange of a token would not show
        (lambda: planted.HintOfTheNext(vocab_size=63), within(1), ()),
    ],
)
def test_the_cells_and_the_layers_that_leak_are_named(make, cells, layers):
    leak = only_leak(make(), "future-token")
    assert cells is None or set(leak.cells) == cells
    assert leak.layers == layers
    assert ("not in the attention" in leak.text) == (not layers)


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_a_leak_put_into_a_transformers_model_is_named_there(short, name):
    model = short(name)
    with labkit.masked(model, masks.sliding_window(2, causal=False)):
        leak = only_leak(model, "future-token")
    assert set(leak.cells) == within(2) and leak.layers == (0, 1)
    assert find_leaks(model).clean
    assert only_leak(planted.clamp_masks(model, 0.0, (1,)), "future-token").layers == (1,)


@pytest.mark.matrix
@pytest.mark.parametrize("vocabulary", [2, 7, 8, 14])
def test_a_small_vocabulary_hides_nothing(vocabulary):
    assert not find_leaks(planted.no_mask(vocab_size=vocabulary)).clean
    assert find_leaks(planted.Small(vocab_size=vocabulary)).clean


def test_two_leaks_at_once_are_reported_separately():
    class Both(planted.OwnMask):
        def _embed(self, ids, past):
            x = super()._embed(ids, past)
            return x + torch.cat([torch.zeros_like(x[:, :-2]), x[:, -1:], torch.zeros_like(x[:, -1:])], dim=1)

    report = find_leaks(Both(planted.one_cell().wrong, layers=1))
    assert [(leak.cells, leak.layers) for leak in report.leaks] == [(((3, 5),), (0,)), (((N - 2, N - 1),), ())]


# -- long texts, rare leaks, other rows and other calls ----------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("size", [32, 256])
@pytest.mark.parametrize("kind", planted.BLOCK_LEAKS)
def test_a_leak_between_blocks_is_found_in_long_texts(kind, size):
    feature = planted.BLOCK_LEAKS[kind]
    leak = only_leak(planted.WithFeature(lambda x: feature(x, size), context=600, layers=1), "future-token")
    assert leak.layers == () and all(i < j for i, j in leak.cells)


@pytest.mark.parametrize("size", [17, 60])
def test_leaks_at_the_borders_of_blocks_of_any_size_are_found_in_small_models(size):
    model = planted.WithFeature(lambda x: planted.first_of_the_next_block(x, size), context=64, layers=1)
    only_leak(model, "future-token")


@pytest.mark.parametrize(("weights", "context", "longest"), [(1e6, 600, 600), (1e9, 600, 16), (1e8, 100, 100)])
def test_the_longest_text_is_within_the_context_and_the_budget(monkeypatch, weights, context, longest):
    model = planted.Small(context=context)
    own = sum(w.numel() for name, w in model.named_parameters() if "wte" not in name and "wpe" not in name)
    monkeypatch.setitem(leakage.BUDGET, "cpu", leakage.BUDGET["cpu"] * own / weights)
    report = find_leaks(model)
    assert report.longest == longest and f"texts of up to {longest} tokens" in str(report)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("router", [planted.SequenceRouter, planted.CapacityByScore])
def test_routers_that_depend_on_the_whole_text_are_found(router, seed):
    torch.manual_seed(seed)
    assert "future-token" in {leak.kind for leak in find_leaks(planted.Routed(router)).leaks}


@pytest.mark.parametrize("seed", range(4))
def test_a_leak_that_shows_in_three_of_a_hundred_changes_is_found(seed):
    class OneTokenGivesItAway(planted.Small):  # the last token: one of 61 is changed to 20, and one from it
        def _embed(self, ids, past):
            return super()._embed(ids, past) + (ids[:, -1:] == 20)[..., None] * self.wte.weight[20]

    torch.manual_seed(seed)
    assert [leak.kind for leak in find_leaks(OneTokenGivesItAway(), seed=seed).leaks] == ["future-token"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("make", "kinds", "problems"),
    [
        (planted.SoftmaxOverTheBatch, ["batch"], {"depends-on-batch"}),
        (planted.BatchFirstForgotten, ["batch", "no-influence"], {"depends-on-batch", "no-influence"}),
        (lambda: nn.Embedding(50, 8), ["no-influence"], {"no-influence"}),
        (planted.projections_of_zeros, ["no-influence"], {"no-influence"}),
        (planted.mean_of_the_text, ["future-token"], {"influence-outside-attention"}),
        (planted.Remembers, ["not-repeatable"], set()),
    ],
)
def test_what_an_output_depends_on_beside_its_text_is_reported(make, kinds, problems):
    assert [leak.kind for leak in find_leaks(make()).leaks] == kinds
    for quick in (True, False):
        report = labkit.audit(make(), quick=quick)
        assert problems <= report.problem_kinds()
        assert report.verdict == "other" or problems == {"depends-on-batch"}


@pytest.mark.parametrize("mask", [masks.causal(), masks.bidirectional()], ids=repr)
def test_a_model_that_takes_one_text_at_a_time_is_measured_all_the_same(mask):
    class OneRow(planted.OwnMask):
        def forward(self, ids):
            assert len(ids) == 1, "one row, please"
            return super().forward(ids)

    report, audited = find_leaks(OneRow(mask)), labkit.audit(OneRow(mask))
    assert report.clean == (mask == masks.causal()) and audited.verdict in repr(mask) and not audited.problems
    assert all(any("one row, please" in note for note in notes) for notes in (report.notes, audited.notes))


# -- other ways of calling the model -----------------------------------------------------------------------------------


def causal_if(condition):
    return lambda: planted.MaskArgument(condition)


class MaskFromTheTokens(planted.Small):
    def forward(self, ids):
        return super().forward(ids, masks.bidirectional() if bool((ids == 0).any()) else masks.causal())


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("make", "kind", "words", "layers"),
    [
        (causal_if(lambda model, mask: mask is None), "attention-mask", "mask of ones", (0, 1)),
        (causal_if(lambda model, mask: mask is None or bool(mask.all())), "attention-mask", "right padding", (0, 1)),
        (causal_if(lambda _, mask: mask is None or bool(mask[:, 0].all())), "attention-mask", "left padding", (0, 1)),
        (causal_if(lambda model, mask: mask is None or not model.training), "train-mode", "mask of ones", (0, 1)),
        (causal_if(lambda model, mask: not model.training), "train-mode", "in train mode:", (0, 1)),
        (planted.PositionsFromTheEnd, "attention-mask", "", None),  # which layers show it depends on the text
        (lambda: MaskFromTheTokens(vocab_size=99), "attention-mask", "with pad tokens", (0, 1)),
        (planted.ReturnsWeights, "option", "return_weights=True", (0, 1)),
        (planted.BatchNormOverTime, "train-mode", "not in the attention", ()),
        (lambda: planted.ForgetfulInTraining(dropout=0.1), "train-mode", "in train mode:", (0, 1)),
    ],
)
def test_a_mask_that_is_lost_on_one_way_through_the_code_is_found(make, kind, words, layers):
    leak = only_leak(make(), kind)
    assert words in leak.text and layers in (None, leak.layers)


def test_train_mode_is_tried_beside_another_leak_and_a_path_that_is_never_taken_is_none():
    class HintAndTrainMode(planted.HintOfTheNext, planted.MaskArgument):
        pass

    model = HintAndTrainMode(lambda model, mask: not model.training)
    assert [leak.kind for leak in find_leaks(model).leaks] == ["future-token", "train-mode"]
    assert find_leaks(planted.ForgetfulInTraining(dropout=0.0)).clean


def top_left(mask):
    """The mask of q queries and k keys as if the queries were the first ones."""
    return torch.zeros_like(mask).masked_fill(torch.ones(mask.shape[-2:]).triu(1).bool(), torch.finfo(mask.dtype).min)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
@pytest.mark.parametrize(
    ("change", "ways"),
    [
        (top_left, ["in chunks", "token by token"]),
        (torch.zeros_like, ["in chunks"]),
        (lambda mask: top_left(mask) if mask.size(-2) == 1 else mask, ["token by token"]),
    ],
)
def test_a_mask_that_is_wrong_after_a_cache_is_found(short, name, change, ways):
    report = find_leaks(planted.misalign_after_a_cache(short(name), change))
    assert [leak.kind for leak in report.leaks] == ["cache"] * len(ways), str(report)
    assert all(way in leak.text for way, leak in zip(ways, report.leaks, strict=True))


CALLS = {
    "positional": lambda attention, x: attention(x),
    "three keywords": lambda attention, x: attention(value=x, key=x, query=x),
    "mixed": lambda attention, x: attention(x, value=x, key=x),
    "another tensor first": lambda attention, x: attention(bias=torch.zeros(1, x.size(1), 3), query=x),
}


@pytest.mark.matrix
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("mask", "kind"), [(-1e9, None), (-10.0, "finite-mask"), (0.0, "future-token")])
def test_how_attention_is_called_does_not_matter(call, mask, kind):
    model = planted.ByHand(mask=mask, call=call)
    assert [(leak.kind, leak.layers) for leak in find_leaks(model).leaks] == ([(kind, (0, 1))] if kind else [])
    verdict = "causal" if mask == -1e9 else "bidirectional"
    assert [layer.verdict for layer in labkit.audit(model).layers] == [verdict] * 2


# -- a mask that is a number -------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("value", [-10.0, -30.0, -1e4])
def test_a_finite_mask_gives_way(short, name, value):
    model = planted.FiniteMask(value) if name is None else planted.clamp_masks(short(name), value)
    if name == "tiny-gemma2" and value == -1e4:  # its scores are capped at 50: no training takes them to 10,000
        assert find_leaks(model).clean
        return
    leak = only_leak(model, "finite-mask")
    assert leak.layers == (0, 1) and set(leak.cells) <= FUTURE
    assert (f"(about {value:.0f})" in leak.text) == (value >= -30)
    assert name or (leak.factor == 1) == (value == -10)


@pytest.mark.parametrize("value", [-30.0, -1e4])
def test_the_factor_is_the_first_power_of_ten_at_which_the_future_shows(short, value):
    model = planted.clamp_masks(short("tiny-gemma"), value)
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

    assert future_shows(factor) and not future_shows(factor / 10)


def scores_of_normed_queries(q, k):
    return nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).mT


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"mask": -torch.inf}, None),
        ({"scores": scores_of_normed_queries}, "layers 0-1: scores cannot be raised"),
        ({"weights": lambda x: x.exp() / x.exp().sum(-1, keepdim=True)}, "times as large the outputs are NaN"),
    ],
)
def test_a_mask_that_could_not_be_put_under_stress_is_reported_as_such(options, note):
    report = find_leaks(planted.ByHand(**options))
    about_scores = [text for text in report.notes if "scores" in text]
    assert report.clean and len(about_scores) == (note is not None)
    assert note is None or note in about_scores[0]


# -- labels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaky", "kind", "words"),
    [
        (planted.shifted_labels(0), "labels-not-shifted", "with the token it was given, not with the next one"),
        (planted.shifted_labels(-1), "labels-not-shifted", "with the token 1 place(s) before it"),
        (planted.shifted_labels(2), "labels-misplaced", "with the token 2 place(s) after it"),
        (planted.LabelsInTheInput, "labels-in-output", "the outputs depend on the labels"),
    ],
)
def test_labels_in_the_wrong_place_are_found_by_the_loss_they_make(leaky, kind, words):
    leak = only_leak(small_gpt2(leaky), kind)
    assert words in leak.text and leak.layers == ()


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_targets_that_are_added_to_the_input_are_found(share):
    class WithTargets(planted.Small):
        def forward(self, ids, targets=None):
            return super().forward(ids) + (0 if targets is None else share * self.wte(targets) @ self.wte.weight.T)

    assert [leak.kind for leak in find_leaks(WithTargets()).leaks] == ["labels-in-output"] * (share > 0)


@pytest.mark.parametrize(("change", "checked"), [(lambda loss: loss + 3.0, True), (lambda loss: 0.37 * loss, False)])
def test_an_auxiliary_loss_is_not_a_leak_and_a_loss_that_is_not_cross_entropy_is_a_note(change, checked):
    class OtherLoss(GPT2LMHeadModel):
        def forward(self, input_ids=None, labels=None, **kwargs):
            out = super().forward(input_ids, labels=labels, **kwargs)
            out.loss = None if out.loss is None else change(out.loss)
            return out

    report = find_leaks(small_gpt2(OtherLoss))
    assert report.clean
    assert any("its labels were not checked" in note for note in report.notes) is not checked


def test_equal_logits_everywhere_and_labels_of_a_token_classifier_are_not_misplaced_labels(tiny):
    model = small_gpt2(tie_word_embeddings=False)
    nn.init.zeros_(model.lm_head.weight)
    assert find_leaks(model).clean
    assert find_leaks(AutoModelForTokenClassification.from_config(tiny("tiny-llama").model.config)).clean


# -- honest models -----------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(24))  # six families, each in the three dtypes
def test_an_honest_model_of_any_shape_and_dtype_is_clean(seed):
    """In float16 the mask of the tiny models is a finite number, the smallest one, and no leak."""
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed // 6 % 3]
    report = find_leaks(planted.honest_model(seed).to(dtype), seed=seed)
    assert report.clean, str(report)
    assert not report.influence.triu(1).any()
    assert report.influence.diagonal().all()


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", [planted.CapacityByPosition, planted.GatheredExperts])
def test_causal_routers_are_clean_although_their_rounding_depends_on_later_tokens(router, dtype):
    for seed in range(2):
        torch.manual_seed(seed)
        report = find_leaks(planted.Routed(router).to(dtype), seed=seed)
        assert report.clean, str(report)


@pytest.mark.gemma
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("gemma3-270m", "float32"), ("gemma3-270m", "bfloat16"), ("smollm2-135m", "bfloat16")]
)
def test_a_real_model_leaks_where_its_mask_is_opened_and_nowhere_else(name, dtype):
    model = load_or_skip(name, dtype=dtype).model
    with labkit.masked(model, {3: masks.sliding_window(2, causal=False)}):
        leak = only_leak(model, "future-token")
    assert leak.layers == (3,)


# -- what goes in and what is left behind ------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(
    "make",
    [
        lambda: planted.BatchNormOverTime(dropout=0.1).half().float(),
        lambda: small_gpt2().half(),
        lambda: planted.honest_model(4),
    ],
    ids=["batch norm", "float16", "gemma3"],
)
@pytest.mark.parametrize("measure", [find_leaks, labkit.audit])
def test_the_model_is_left_as_it_was(make, measure):
    model = make().train()
    model.get_submodule("h.0" if isinstance(model, GPT) else "lm_head").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    attributes = [(m.training, getattr(m, "scaling", None)) for m in model.modules()]
    config = vars(model.config).copy()
    measure(model)
    assert vars(model.config) == config
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])
    assert [(m.training, getattr(m, "scaling", None)) for m in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_the_report_prints_and_serialises_and_keeps_to_the_context():
    report = find_leaks(planted.one_cell(layers=1))
    assert str(report).startswith("OwnMask: LEAKS (16 tokens changed one by one, ")
    data = json.loads(report.to_json())
    assert (data["clean"], data["leaks"][0]["cells"], data["leaks"][0]["layers"]) == (False, [[3, 5]], [0])
    assert torch.allclose(torch.tensor(data["influence"]), report.influence)
    assert find_leaks(planted.no_mask(context=5)).influence.shape == (5, 5)


def gpt_of_nan():
    model = planted.Small()
    nn.init.constant_(model.ln_f.bias, torch.nan)
    return model


@pytest.mark.parametrize(
    ("make", "tokens", "message"),
    [
        (planted.Small, 1, r"1 token\(s\) of a vocabulary of 61"),
        (lambda: planted.Small(vocab_size=1), 16, r"16 token\(s\) of a vocabulary of 1"),
        (gpt_of_nan, 16, "gave NaN or infinite outputs"),
    ],
)
def test_what_cannot_be_measured_is_refused(make, tokens, message):
    with pytest.raises(AuditError, match=message):
        find_leaks(make(), tokens=tokens)
