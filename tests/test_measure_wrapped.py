"""The audit of what it was not made for: wrappers, unusual attention, shared layers, caches, experts, errors."""

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import labkit
from labkit import masks
from labkit.errors import AuditError
from tests.leaky_models import HomeMade, SelfAttention, change_masks

pytestmark = pytest.mark.matrix

SHIFT = "left-padding-position-shift"
SMALL = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}


def made(config, of=AutoModelForCausalLM):
    torch.manual_seed(0)
    return of.from_config(config).eval()


# -- wrappers ----------------------------------------------------------------------------------------------------------


class OnlyMask(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class Anything(OnlyMask):
    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Pooling(OnlyMask):  # the cache is left on, and the first output is not one per position
    def forward(self, input_ids, attention_mask=None, **kwargs):
        states = self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return {"sentence_embedding": states.mean(1), "token_embeddings": states}


class OtherNames(OnlyMask):
    def forward(self, x, attention_mask=None, **more):
        return self.inner(x, attention_mask=attention_mask, **more)


class Keywords(OnlyMask):
    def forward(self, **kwargs):
        return self.inner(**kwargs)


@pytest.mark.parametrize("wrapper", [OnlyMask, Anything, OtherNames, Keywords, Pooling, nn.DataParallel])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_a_wrapper_hides_neither_a_conversion_nor_one_that_fails_beside_padding(tiny, name, wrapper):
    stack = tiny(name).model.base_model
    assert labkit.assert_causal(wrapper(stack)).verdict == "causal"
    for module in stack.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    with pytest.raises(AuditError, match="is mixed"):
        labkit.assert_bidirectional(wrapper(stack))
    stack = tiny(name).model.base_model
    labkit.to_bidirectional(wrapper(stack))
    assert labkit.assert_bidirectional(wrapper(stack)).verdict == "bidirectional"


def test_of_two_models_behind_one_front_both_are_measured(tiny):
    class Two(nn.Module):
        def __init__(self, *models):
            super().__init__()
            self.models = nn.ModuleList(models)

        def forward(self, input_ids, attention_mask=None):
            return sum(m(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state for m in self.models)

    one, other = tiny("tiny-gpt2").model.base_model, tiny("tiny-llama").model.base_model
    assert labkit.assert_causal(Two(one, other)).verdict == "causal"
    labkit.to_bidirectional(one)
    report = labkit.audit(Two(one, other))
    assert report.verdict == "mixed" and len(report.layers) == 4


# -- attention that is built otherwise ---------------------------------------------------------------------------------


class TimeMajorAttention(SelfAttention):
    def forward(self, x, mask=None):
        return super().forward(x.transpose(0, 1), mask).transpose(0, 1)


def mask_as_state(attentions, x, mask):  # gone when the model has run, which does not count as none
    for attention in attentions:
        attention.mask = mask.tril()
        x = x + attention(x)
        attention.mask = None
    return x


def kept_from_the_output(attentions, x, mask):
    return x + 0.0 * attentions[0](x, mask) + attentions[1](x, mask.tril())


def time_major_but_for_the_first(attentions, x, mask):
    x = (x + attentions[0](x, mask)).transpose(0, 1)
    for attention in attentions[1:]:
        x = x + attention(x, mask.tril())
    return x.transpose(0, 1)


def added_to_in_place(attentions, x, mask):
    for attention in attentions:
        x += attention(x, mask)
        more = attention(x, mask)
        more += x
    return more


def shared(attentions, x, mask):
    for call in range(4):
        x = x + attentions[0](x, mask if call == 0 else mask.tril())
    return x


@pytest.mark.parametrize(
    ("through", "attentions", "verdict", "layers", "kinds"),
    [
        (mask_as_state, (SelfAttention, SelfAttention), "causal", [], set()),
        (kept_from_the_output, (SelfAttention,) * 2, "other", ["bidirectional", "causal"], {"influence-missing"}),
        (
            time_major_but_for_the_first,
            (SelfAttention, *[TimeMajorAttention] * 5),
            "bidirectional",
            ["bidirectional"],
            {"attention-unmeasured"},
        ),
        (added_to_in_place, (SelfAttention, SelfAttention), "bidirectional", ["bidirectional"] * 4, set()),
        (shared, (SelfAttention,), "mixed", ["bidirectional"] + ["causal"] * 3, set()),
    ],
)
def test_each_call_of_attention_that_can_be_measured_counts(through, attentions, verdict, layers, kinds):
    report = labkit.audit(HomeMade(through, *(attention() for attention in attentions)))
    assert (report.verdict, [layer.verdict for layer in report.layers]) == (verdict, layers)
    assert kinds <= report.problem_kinds()
    assert "attention-unmeasured" in kinds or "attention-unmeasured" not in report.problem_kinds()


def test_a_mask_argument_that_is_swallowed_is_not_measured():
    class Swallows(HomeMade):
        def forward(self, input_ids, **ignored):
            return super().forward(input_ids)

    report = labkit.audit(Swallows(lambda attentions, x, mask: x + attentions[0](x, mask), SelfAttention()))
    assert report.verdict == "bidirectional" and "pad-leak" not in report.problem_kinds()
    assert any("takes no attention_mask, or ignores it" in note for note in report.notes)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
def test_heads_that_keep_a_causal_mask_are_reported_however_open_the_others_are(tiny, name):
    model = tiny(name, attn="eager").model
    heads = model.config.num_attention_heads

    def all_but_one_causal(mask):
        mask = mask.repeat(1, heads, 1, 1)
        mask[:, 1:] += torch.full(mask.shape[-2:], -1e9).triu(1)
        return mask

    message = rf"{heads - 1} of {heads} heads of layer 0 attend to no later token"
    with labkit.masked(change_masks(model, all_but_one_causal, (0,)), masks.bidirectional()):
        with pytest.raises(AuditError, match=message):
            labkit.assert_bidirectional(model)


# -- caches, experts, and other architectures --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}),
        ("Rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}),
        ("GPTJ", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}),
    ],
)
def test_causal_models_that_keep_a_state_of_their_own_are_measured_as_causal(family, config):
    model = made(getattr(transformers, f"{family}Config")(vocab_size=200, **config, pad_token_id=0))
    report = labkit.audit(model)
    assert report.verdict == "causal" and "depends-on-backend" not in report.problem_kinds()
    assert labkit.find_leaks(model).clean


def test_experts_pass_on_no_rounding_from_one_token_to_another():
    model = made(transformers.MixtralConfig(**EXPERTS))
    way = model.config._experts_implementation
    assert labkit.assert_causal(model).verdict == "causal" and labkit.find_leaks(model).clean
    assert labkit.assert_bidirectional(labkit.to_bidirectional(model)).verdict == "bidirectional"
    assert model.config._experts_implementation == way and model.config.use_cache is True


def test_experts_that_give_more_than_states_do_not_stop_a_conversion():
    more = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    model = made(transformers.GptOssConfig(**EXPERTS, **more))
    assert labkit.assert_bidirectional(labkit.to_bidirectional(model)).verdict == "bidirectional"
    assert labkit.assert_causal(labkit.to_causal(model)).verdict == "causal"


@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_layers_that_share_keys_and_values_are_measured_each_by_itself(family):
    config = getattr(transformers, f"{family}TextConfig")(
        **SMALL | {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 4, "num_kv_shared_layers": 2},
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=200,
    )  # fmt: skip
    model = made(config)
    for verdict in ("causal", "bidirectional"):
        if verdict == "bidirectional":
            labkit.to_bidirectional(model)
        report = labkit.audit(model)
        assert (report.verdict, report.problems) == (verdict, [])
        window = masks.sliding_window(4, causal=verdict == "causal")
        assert [layer.mask for layer in report.layers] == [window, getattr(masks, verdict)()] * 2
    labkit.assert_causal(labkit.to_causal(model), quick=True)


def test_an_encoder_that_counts_its_window_to_both_sides_is_right():
    config = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    config |= {"local_attention": 8, "global_attn_every_n_layers": 2}
    model = made(transformers.ModernBertConfig(**config), of=AutoModel)
    assert labkit.assert_bidirectional(model).layers[1].reach == (4, 4)


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-gemma3"])
def test_virtual_tokens_are_measured_or_refused_with_one_error(tiny, kind, name):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny(name).model, config).eval()
    if kind == "PromptTuningConfig":  # its outputs are longer than its inputs
        for verb in (labkit.audit, labkit.find_leaks, labkit.assert_causal):
            with pytest.raises(AuditError, match="one output per position"):
                verb(model)
        return
    allow = (SHIFT, "depends-on-entry", "packing-leak")  # the stack alone has no virtual tokens; they are a cache
    assert labkit.assert_causal(model, allow=allow).verdict == "causal"
    assert labkit.find_leaks(model).clean
    labkit.to_bidirectional(model)
    assert labkit.assert_bidirectional(model, allow=allow).verdict == "bidirectional"
    labkit.to_causal(model)


# -- small models, precision, and what cannot be measured --------------------------------------------------------------


class NeedsMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 8)

    def forward(self, input_ids, weights):
        return self.tokens(input_ids) * weights


class NoWeights(nn.Module):
    def forward(self, input_ids):
        return input_ids[..., None].float().cumsum(1)


class Pooled(NoWeights):
    def forward(self, input_ids):
        return super().forward(input_ids).mean(1)


def short_gpt2():
    return made(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NeedsMore, r"NeedsMore could not be called .*\(1, 12\): TypeError: .*'weights'"),
        (short_gpt2, r"could not be called on token ids of shape \(1, 12\).*IndexError"),
        (Pooled, "needs one output per position"),
    ],
)
def test_a_model_that_cannot_be_measured_is_one_clear_error(make, message):
    with pytest.raises(AuditError, match=message):
        labkit.audit(make(), vocab_size=50)


def test_a_model_without_weights_with_few_words_or_few_positions_is_measured():
    assert labkit.audit(NoWeights(), vocab_size=50).verdict == "causal"
    assert labkit.audit(short_gpt2(), quick=True).verdict == "causal"
    few = made(transformers.LlamaConfig(**SMALL | {"vocab_size": 6}))
    assert labkit.assert_bidirectional(labkit.to_bidirectional(few)).verdict == "bidirectional"


def test_a_difference_that_is_rounding_is_confirmed_in_float32_if_memory_allows(tiny, monkeypatch):
    """A rotary angle is rounded differently where a text begins later, behind its pads."""
    monkeypatch.setattr("labkit.auditing.checks.Subject.tolerance", 1e-4)  # as if rounding were larger
    model = tiny("tiny-llama").model.bfloat16()
    report = labkit.audit(model)
    assert SHIFT not in report.problem_kinds() and model.dtype == torch.bfloat16
    assert any(SHIFT in note and "is rounding" in note for note in report.notes)
    assert SHIFT in labkit.audit(tiny("tiny-gpt2").model.bfloat16()).problem_kinds()  # there it is true
    monkeypatch.setattr("labkit.decoder.limits.available_bytes", lambda device: 100)
    report = labkit.audit(model)
    assert SHIFT in report.problem_kinds()
    assert any("not confirmed in float32" in note for note in report.notes)
