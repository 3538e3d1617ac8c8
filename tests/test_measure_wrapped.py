"""The audit of what it was not made for: wrappers, models built otherwise, shared layers, caches, experts, errors."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM

import labkit
from labkit import masks
from labkit.auditing.leaks import find_leaks
from labkit.decoder import running
from labkit.errors import AuditError

pytestmark = pytest.mark.matrix

SMALL = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}


def made(config, seed=0, of=AutoModelForCausalLM, **choices):
    torch.manual_seed(seed)
    return of.from_config(config, **choices).eval()


class OnlyMask(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class Anything(OnlyMask):
    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Pooling(OnlyMask):  # the cache is left on, and the first output is none per position
    def forward(self, input_ids, attention_mask=None, **kwargs):
        states = self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return {"sentence_embedding": states.mean(1), "token_embeddings": states}


class OtherNames(OnlyMask):
    def forward(self, x, attention_mask=None, **more):
        return self.inner(x, attention_mask=attention_mask, **more)


class Keywords(OnlyMask):
    def forward(self, **kwargs):
        return self.inner(**kwargs)


WRAPPERS = (OnlyMask, Anything, OtherNames, Keywords, Pooling, nn.DataParallel)


@pytest.mark.parametrize("wrapper", WRAPPERS)
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
        def __init__(self, one, other):
            super().__init__()
            self.one, self.other = one, other

        def forward(self, input_ids, attention_mask=None):
            both = [m(input_ids=input_ids, attention_mask=attention_mask) for m in (self.one, self.other)]
            return both[0].last_hidden_state + both[1].last_hidden_state

    one, other = tiny("tiny-gpt2").model.base_model, tiny("tiny-llama").model.base_model
    assert labkit.assert_causal(Two(one, other)).verdict == "causal"
    labkit.to_bidirectional(one)
    report = labkit.audit(Two(one, other))
    assert report.verdict == "mixed" and len(report.layers) == 4


# -- attention that is built otherwise ---------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Its mask is an argument, or its state for as long as the model runs."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads, self.mask = heads, None
        self.inner, self.outer = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        batch, n, dim = x.shape
        q, k, v = (t.view(batch, n, self.heads, -1).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask if mask is None else mask)
        return self.outer(mixed.transpose(1, 2).reshape(batch, n, dim))


class QueryKeyValueAttention(SelfAttention):
    def forward(self, query, key, value, mask=None):
        batch, n, dim = query.shape
        inner = zip((query, key, value), self.inner.weight.chunk(3), self.inner.bias.chunk(3), strict=True)
        q, k, v = ((x @ w.T + b).view(batch, -1, self.heads, dim // self.heads).transpose(1, 2) for x, w, b in inner)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.outer(mixed.transpose(1, 2).reshape(batch, n, dim))


class TimeMajorAttention(SelfAttention):
    def forward(self, x, mask=None):
        return super().forward(x.transpose(0, 1), mask).transpose(0, 1)


class HomeMade(nn.Module):
    """`through(x, mask)` runs the attention; `is_open` for each of its calls."""

    def __init__(self, attentions, vocabulary=100):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(vocabulary, 32), nn.Embedding(64, 32)
        self.attentions = nn.ModuleList(attentions)

    def forward(self, input_ids, attention_mask=None):
        batch, n = input_ids.shape
        mask = torch.ones(batch, 1, n, n, dtype=torch.bool)
        if attention_mask is not None:
            mask = (mask & attention_mask.bool()[:, None, None, :]) | torch.eye(n, dtype=torch.bool)
        return self.through(self.tokens(input_ids) + self.positions(torch.arange(n)), mask)


class AsState(HomeMade):
    def through(self, x, mask):
        for attention in self.attentions:
            attention.mask = mask.tril()
            x = x + attention(x)
            attention.mask = None
        return x


def test_a_mask_that_is_gone_when_the_model_has_run_does_not_count_as_none():
    model = AsState([SelfAttention(), SelfAttention()])
    report = labkit.assert_causal(model)
    assert "no attention modules could be measured by themselves" in report.notes[0]
    with pytest.raises(AuditError, match="is causal"):
        labkit.assert_bidirectional(model)


def test_layers_that_open_what_the_model_keeps_shut_are_a_problem():
    class Undone(HomeMade):
        def through(self, x, mask):
            return x + 0.0 * self.attentions[0](x, mask) + self.attentions[1](x, mask.tril())

    model = Undone([SelfAttention(), SelfAttention()])
    report = labkit.audit(model)
    assert report.verdict == "other" and "influence-missing" in report.problem_kinds()


def test_attention_that_cannot_be_measured_is_told_and_passes_for_nothing():
    class Mixed(HomeMade):
        def through(self, x, mask):
            x = (x + self.attentions[0](x, mask)).transpose(0, 1)
            for attention in self.attentions[1:]:
                x = x + attention(x, mask.tril())
            return x.transpose(0, 1)

    model = Mixed([SelfAttention(), *(TimeMajorAttention() for _ in range(5))])
    with pytest.raises(AuditError, match="5 of 6 attention modules could not be measured by themselves"):
        labkit.assert_bidirectional(model)


def test_states_that_are_added_to_in_place_are_measured_as_they_were_given():
    class InPlace(HomeMade):
        def through(self, x, mask):
            for attention in self.attentions:
                x += attention(x, mask)
                more = attention(x, mask)
                more += x
            return more

    report = labkit.assert_bidirectional(InPlace([SelfAttention(), SelfAttention()]))
    assert len(report.layers) == 4 and "attention-unmeasured" not in report.problem_kinds()


def test_each_call_of_a_shared_layer_counts():
    class Shared(HomeMade):
        def through(self, x, mask):
            for call in range(4):
                x = x + self.attentions[0](x, mask if call == 0 else mask.tril())
            return x

    report = labkit.audit(Shared([SelfAttention()]))
    assert [layer.verdict for layer in report.layers] == ["bidirectional"] + ["causal"] * 3
    assert report.verdict == "mixed"


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("verdict", ["causal", "bidirectional"])
def test_query_key_and_value_given_one_by_one_are_one_text(verdict, by_name):
    class Annotated(HomeMade):
        def through(self, x, mask):
            mask = mask.tril() if verdict == "causal" else mask
            for attention in self.attentions:
                given = {"query": x, "key": x, "value": x} if by_name else {}
                x = x + (attention(**given, mask=mask) if by_name else attention(x, x, x, mask))
            return x

    report = labkit.audit(Annotated([QueryKeyValueAttention(), QueryKeyValueAttention()]))
    assert (report.verdict, len(report.layers)) == (verdict, 2)
    assert report.problem_kinds() == {"left-padding-position-shift"}  # its positions count pads


@pytest.mark.parametrize("vocabulary", [7, 14, 50])
def test_a_token_is_never_exchanged_for_itself(vocabulary):
    class Ahead(HomeMade):
        def forward(self, input_ids, attention_mask=None):
            return super().forward(input_ids, attention_mask) + self.tokens(input_ids).roll(-1, 1)

        def through(self, x, mask):
            return x + self.attentions[0](x, mask.tril())

    with pytest.raises(AuditError, match="past every attention mask"):
        labkit.assert_causal(Ahead([SelfAttention()], vocabulary), quick=True)


# -- caches, experts, and other architectures --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Bloom", {"vocab_size": 200, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}),
        ("CodeGen", {"vocab_size": 200, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}),
        ("Rwkv", {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}),
        ("GPTJ", {"vocab_size": 200, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}),
    ],
)
def test_causal_models_that_keep_a_state_of_their_own_are_measured_as_causal(family, config):
    model = made(getattr(transformers, f"{family}Config")(**config, pad_token_id=0))
    report = labkit.audit(model)
    assert report.verdict == "causal" and "depends-on-backend" not in report.problem_kinds()
    with pytest.raises(AuditError):
        labkit.assert_bidirectional(model, quick=True)
    assert find_leaks(model).clean


@pytest.mark.parametrize("seed", range(3))
def test_experts_pass_on_no_rounding_from_one_token_to_another(seed):
    model = made(transformers.MixtralConfig(**EXPERTS), seed)
    way = model.config._experts_implementation
    assert labkit.assert_causal(model).verdict == "causal" and find_leaks(model).clean
    assert labkit.assert_bidirectional(labkit.to_bidirectional(model)).verdict == "bidirectional"
    assert model.config._experts_implementation == way and model.config.use_cache is True


def test_experts_too_large_to_be_copied_for_each_token_are_left_alone(monkeypatch):
    model, ways = made(transformers.MixtralConfig(**EXPERTS)), set()
    model.register_forward_pre_hook(lambda module, _: ways.add(module.config._experts_implementation))
    labkit.audit(model, quick=True)
    monkeypatch.setattr(running, "GATHERED", 1e3)
    labkit.audit(model, quick=True)
    assert ways == {running.APART, model.config._experts_implementation}


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
    report = labkit.audit(model)
    assert (report.verdict, report.problems) == ("causal", [])
    assert [layer.mask for layer in report.layers] == [masks.sliding_window(4), masks.causal()] * 2
    report = labkit.audit(labkit.to_bidirectional(model))
    assert (report.verdict, report.problems) == ("bidirectional", [])
    window = masks.sliding_window(4, causal=False)
    assert [layer.mask for layer in report.layers] == [window, masks.bidirectional()] * 2
    labkit.assert_causal(labkit.to_causal(model), quick=True)


def test_an_encoder_that_counts_its_window_to_both_sides_is_right():
    config = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    config |= {"local_attention": 8, "global_attn_every_n_layers": 2}
    model = made(transformers.ModernBertConfig(**config), of=AutoModel)
    assert labkit.assert_bidirectional(model).layers[1].reach == (4, 4)


@pytest.mark.parametrize("cached", [None, True, False])
def test_texts_in_one_row_stay_apart_where_only_some_layers_were_converted(tiny, cached):
    for name in ("tiny-llama", "tiny-gpt2", "tiny-gemma3"):
        model = tiny(name).model
        labkit.to_bidirectional(model, layers=[0])
        ids, positions = torch.arange(10, 20)[None], torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
        given = {"position_ids": positions} | ({} if cached is None else {"use_cache": cached})
        changed = ids.clone()
        changed[0, 2] = 99
        with torch.no_grad():
            one, other = (model(input_ids=each, **given).logits[0] for each in (ids, changed))
        assert torch.equal(one[6:], other[6:]) and not torch.equal(one[:6], other[:6])


# -- what cannot be measured -------------------------------------------------------------------------------------------


class NeedsMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 8)

    def forward(self, input_ids, weights):
        return self.tokens(input_ids) * weights


class NoWeights(nn.Module):
    def forward(self, input_ids):
        return input_ids[..., None].float().cumsum(1)


def test_what_a_model_raises_is_one_clear_error():
    with pytest.raises(AuditError, match=r"NeedsMore could not be called .*\(1, 12\): TypeError: .*'weights'"):
        labkit.audit(NeedsMore())
    short = made(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=10))
    with pytest.raises(AuditError, match=r"could not be called on token ids of shape \(1, 12\).*IndexError"):
        labkit.audit(short)
    assert labkit.audit(short, quick=True).verdict == "causal"


def test_the_first_argument_may_have_any_name_beside_keywords_of_any():
    class Named(HomeMade):
        def forward(self, tokens, **options):
            return super().forward(tokens, options.get("attention_mask"))

        def through(self, x, mask):
            return x + self.attentions[0](x, mask.tril())

    assert labkit.assert_causal(Named([SelfAttention()])).whole.keys() > {"beside padding"}


def test_a_model_without_weights_or_with_few_words_is_measured():
    assert labkit.audit(NoWeights(), vocab_size=50).verdict == "causal"
    few = made(transformers.LlamaConfig(**SMALL | {"vocab_size": 6}))
    assert labkit.assert_bidirectional(labkit.to_bidirectional(few)).verdict == "bidirectional"


def test_a_mask_argument_that_is_swallowed_is_not_measured(tiny):
    class Deaf(HomeMade):
        def forward(self, input_ids, **ignored):
            return super().forward(input_ids)

        def through(self, x, mask):
            return x + self.attentions[0](x, mask)

    report = labkit.audit(Deaf([SelfAttention()]))
    assert report.verdict == "bidirectional" and "pad-leak" not in report.problem_kinds()
    assert any("takes no attention_mask, or ignores it" in note for note in report.notes)
    with labkit.masked(tiny("tiny-llama").model, masks.prefix(3)) as model:
        assert labkit.audit(Anything(model.base_model), quick=True).verdict == "other"


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
def test_heads_that_keep_a_causal_mask_are_told_however_open_the_others_are(tiny, name):
    model = tiny(name, attn="eager").model
    labkit.to_bidirectional(model)
    assert labkit.assert_bidirectional(model).problem_kinds() <= {"left-padding-position-shift"}
    heads = model.config.num_attention_heads

    def some_shut(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        n = hidden.shape[1]
        shut = torch.full((n, n), torch.finfo(hidden.dtype).min).triu(1)
        mask = kwargs["attention_mask"]
        mask = torch.zeros(hidden.shape[0], 1, n, n) if mask is None else mask
        mask = mask.expand(-1, heads, -1, -1).clone()
        mask[:, 1:] = torch.minimum(mask[:, 1:], shut)
        return args, {**kwargs, "attention_mask": mask}

    first = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))
    first.register_forward_pre_hook(some_shut, with_kwargs=True)
    with pytest.raises(AuditError, match=rf"{heads - 1} of {heads} heads of layer 0 attend to no later token"):
        labkit.assert_bidirectional(model)


def test_a_difference_that_is_rounding_is_found_out_in_float32(tiny, monkeypatch):
    """A rotary angle is rounded differently where a text begins later, behind its pads."""
    monkeypatch.setattr(
        "labkit.auditing.checks.Subject.tolerance", property(lambda subject: 1e-4)
    )  # as if it were blown up
    shift = "left-padding-position-shift"
    model = tiny("tiny-llama").model.bfloat16()
    report = labkit.audit(model)
    assert shift not in report.problem_kinds() and model.dtype == torch.bfloat16
    assert f"{shift} in bfloat16 is rounding: it is not there in float32" in report.notes
    assert shift in labkit.audit(tiny("tiny-gpt2").model.bfloat16()).problem_kinds()  # there it is true
    monkeypatch.setattr("labkit.decoder.limits.available_bytes", lambda device: 100)
    report = labkit.audit(model)
    assert shift in report.problem_kinds()
    assert any("not confirmed in float32, for want of memory" in note for note in report.notes)


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
    allow = (
        "left-padding-position-shift",
        "depends-on-entry",
        "packing-leak",
    )  # the stack alone has no virtual tokens; they are a cache
    assert labkit.assert_causal(model, allow=allow).verdict == "causal"
    assert labkit.find_leaks(model).clean
    labkit.to_bidirectional(model)
    assert labkit.assert_bidirectional(model, allow=allow).verdict == "bidirectional"
    labkit.to_causal(model)
