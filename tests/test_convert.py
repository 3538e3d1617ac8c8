"""to_bidirectional and to_causal, held against a perturbation oracle and against transformers' own outputs."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import labkit
from labkit import convert
from labkit.errors import BidirectionalGenerationError, ConversionError, UnsupportedModelError
from tests.perturbation import layer_cells, window_cells

CASES = [
    (name, attn)
    for name in ("tiny-gpt2", "tiny-llama", "tiny-gemma", "tiny-gemma2", "tiny-gemma3")
    for attn in ("eager", "sdpa")
    if (name, attn) != ("tiny-gemma2", "sdpa")  # sdpa has no softcap
]
LOCAL = [case for case in CASES if case[0] in ("tiny-gemma2", "tiny-gemma3")]
N, W = 20, 8  # tokens; window of the local layer (layer 0) of the tiny Gemmas
IDS = torch.arange(40, 40 + N)[None]


def mixed_batch(n=N):
    """Bool (3, n): a full row, one padded on the right, one on the left."""
    real = torch.ones(3, n, dtype=torch.bool)
    real[1, -4:], real[2, :3] = False, False
    return real


def logits(model, ids=IDS, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.mark.parametrize(("name", "attn"), CASES)
def test_every_layer_sees_both_ways_without_and_with_padding(tiny, name, attn):
    model = labkit.to_bidirectional(tiny(name, attn).model, window="global")
    assert layer_cells(model, N).all()
    real = mixed_batch()
    for row, cells in zip(real, layer_cells(model, N, real).transpose(0, 1), strict=True):
        assert cells[:, row][:, :, row].all(), "a real token does not see a real token"
        assert not cells[:, row][:, :, ~row].any(), "a real token sees a pad"


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "attn"), LOCAL)
@pytest.mark.parametrize(("window", "reach"), [("keep", W - 1), ("halve", W // 2), ("global", None)])
@pytest.mark.parametrize("layers", [None, [0]])
def test_local_window_is_exactly_the_declared_one_beyond_it(tiny, name, attn, window, reach, layers):
    model = labkit.to_bidirectional(tiny(name, attn).model, window=window, layers=layers)
    assert torch.equal(layer_cells(model, N)[0, 0], window_cells(N, reach, reach))
    real = mixed_batch()
    for row, cells in zip(real, layer_cells(model, N, real)[0], strict=True):
        n = int(row.sum())
        assert torch.equal(cells[row][:, row], window_cells(n, reach, reach))


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("chosen", [0, 1])
def test_a_chosen_layer_is_converted_and_the_other_stays_causal(tiny, name, attn, chosen):
    model = tiny(name, attn).model
    causal = layer_cells(model, N)[1 - chosen, 0]
    labkit.to_bidirectional(model, layers=[chosen], window="global")
    real = mixed_batch()
    for cells in (layer_cells(model, N), layer_cells(model, N, real)[:, :1]):
        assert cells[chosen, 0].all()
        assert torch.equal(cells[1 - chosen, 0], causal)


@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("layers", [None, [1]])
def test_to_causal_restores_the_same_bits_and_generation(tiny, name, attn, layers):
    model = tiny(name, attn).model
    before, config = logits(model), model.config.to_dict()
    continued = model.generate(IDS, max_new_tokens=6, do_sample=False)
    labkit.to_bidirectional(model, layers=layers)
    assert not torch.equal(logits(model), before)
    labkit.to_causal(model)
    assert torch.equal(logits(model), before)
    assert model.config.to_dict() == config
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), continued)
    assert not any(m._forward_pre_hooks for m in model.modules()), "a hook was left behind"


def test_converting_again_changes_nothing_and_other_choices_replace_the_first(tiny):
    model = labkit.to_bidirectional(tiny("tiny-gemma3").model)
    once = logits(model)
    assert torch.equal(logits(labkit.to_bidirectional(model)), once)
    labkit.to_bidirectional(model, window="halve")
    assert torch.equal(layer_cells(model, N)[0, 0], window_cells(N, W // 2, W // 2))
    labkit.to_bidirectional(model)
    assert torch.equal(logits(model), once)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma", "tiny-gemma2", "tiny-gemma3"])
@pytest.mark.parametrize(("window", "layers"), [("keep", None), ("halve", None), ("global", None), ("halve", [0])])
def test_a_saved_conversion_comes_back_however_often(tiny, tmp_path, name, window, layers):
    lm = tiny(name)
    before = logits(lm.model)
    expected = logits(labkit.to_bidirectional(lm.model, window=window, layers=layers))
    model = lm.model
    for round_trip in range(3):
        folder = tmp_path / str(round_trip)
        model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
        model = labkit.load(folder).model
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(labkit.to_causal(model)), before)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma2", "tiny-gemma3"])
@pytest.mark.parametrize("window", ["keep", "halve", "global"])
def test_a_saved_conversion_holds_in_plain_transformers(tiny, tmp_path, name, window):
    lm = tiny(name)
    labkit.to_bidirectional(lm.model, window=window).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=lm.model.config._attn_implementation)
    assert torch.equal(layer_cells(plain, N), layer_cells(lm.model, N))


def test_generate_is_refused_with_the_reason_unless_asked_for(tiny):
    model = labkit.to_bidirectional(tiny("tiny-gemma3").model)
    with pytest.raises(BidirectionalGenerationError, match="not trained to predict the next token"):
        model.generate(IDS, max_new_tokens=2)
    assert model.generate(IDS, max_new_tokens=2, allow_bidirectional=True).shape == (1, N + 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("layers", [None, [1]])
def test_a_copy_is_converted_on_its_own(tiny, copied, layers):
    model = labkit.to_bidirectional(tiny("tiny-gemma3").model, layers=layers)
    expected, twin = logits(model), copied(model)
    causal = logits(labkit.to_causal(model))
    assert torch.equal(logits(twin), expected)
    with pytest.raises(BidirectionalGenerationError):
        twin.generate(IDS)
    assert torch.equal(logits(labkit.to_causal(twin)), causal)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in twin.modules())


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
@pytest.mark.parametrize("layers", [None, [1]])
def test_gradient_checkpointing_gives_the_same_gradients(tiny, name, layers):
    gradients = []
    for checkpointing in (False, True):
        model = labkit.to_bidirectional(tiny(name).model, layers=layers).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        padded = model(IDS.expand(3, N), attention_mask=mixed_batch().long(), labels=IDS.expand(3, N)).loss
        (model(IDS, labels=IDS).loss + padded).backward()  # two forwards before one backward
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for without, with_checkpointing in zip(*gradients, strict=True):
        torch.testing.assert_close(with_checkpointing, without)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
def test_compiled_model_agrees_with_the_eager_one(tiny, name):
    model = labkit.to_bidirectional(tiny(name).model)
    compiled = torch.compile(model, backend="aot_eager")
    real = mixed_batch()
    torch.testing.assert_close(logits(compiled), logits(model))
    inputs = {"ids": IDS.expand(3, N), "attention_mask": real.long()}
    torch.testing.assert_close(logits(compiled, **inputs)[real], logits(model, **inputs)[real])


@pytest.mark.parametrize(("name", "attn"), CASES)
def test_left_and_right_padding_give_the_states_of_the_unpadded_text(tiny, name, attn):
    model = labkit.to_bidirectional(tiny(name, attn).model)
    n, pads = 12, 3
    expected = logits(model, IDS[:, :n])[0]
    real = torch.ones(2, n + pads, dtype=torch.bool)
    real[0, n:], real[1, :pads] = False, False
    ids = torch.full((2, n + pads), 7)
    ids[real] = IDS[0, :n].repeat(2)
    got = logits(model, ids, attention_mask=real.long())
    torch.testing.assert_close(got[0, :n], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got[1, pads:], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("layers", [None, [1]])
def test_packed_documents_do_not_leak_into_each_other(tiny, name, attn, layers):
    model = labkit.to_bidirectional(tiny(name, attn).model, layers=layers)
    first, second = IDS[:, :11], IDS[:, 11:]
    positions = torch.cat([torch.arange(11), torch.arange(N - 11)])[None]
    with torch.no_grad():
        packed = model(IDS, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, :11], logits(model, first), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(packed[:, 11:], logits(model, second), atol=2e-5, rtol=1e-4)


def test_a_lora_wrapped_model_converts_and_its_generate_is_guarded(tiny):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(tiny("tiny-llama").model, peft.LoraConfig(target_modules=["q_proj"]))
    labkit.to_bidirectional(wrapped)
    assert layer_cells(wrapped.base_model.model, N).all()
    with pytest.raises(BidirectionalGenerationError):
        wrapped.generate(input_ids=IDS)
    labkit.to_causal(wrapped)
    assert wrapped.generate(input_ids=IDS, max_new_tokens=2).shape == (1, N + 2)


def test_the_text_part_of_a_multimodal_gemma3_is_converted():
    model = multimodal_gemma3()
    labkit.to_bidirectional(model)
    cells = layer_cells(model, N)
    assert torch.equal(cells[0, 0], window_cells(N, W - 1, W - 1))
    assert cells[1].all()


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_a_window_that_the_config_alone_holds_is_exact_too(name):
    model = every_layer_local(name)
    labkit.to_bidirectional(model)
    for cells in layer_cells(model, N):
        assert torch.equal(cells[0], window_cells(N, W - 1, W - 1))


@pytest.mark.parametrize(("window", "reach"), [("keep", W - 1), ("halve", W // 2)])
@pytest.mark.parametrize("model_name", ["tiny-gemma3", "mistral"])
def test_flash_attention_would_be_handed_the_declared_window(tiny, monkeypatch, window, reach, model_name):
    """Flash attention needs a GPU; what reaches its kernel can be read: is_causal, and w for w-1 tokens to a side."""
    model = tiny(model_name).model if model_name.startswith("tiny") else every_layer_local(model_name)
    labkit.to_bidirectional(model, window=window)
    handed = []

    def kernel(module, query, key, value, attention_mask, is_causal=None, sliding_window=None, **_):
        handed.append((is_causal, sliding_window, attention_mask))
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", kernel)
    model.config._attn_implementation = "flash_attention_2"
    logits(model, IDS.expand(3, N), attention_mask=mixed_batch().long())
    assert all(is_causal is False for is_causal, _, _ in handed)
    assert handed[0][1] == reach + 1
    assert handed[0][2].ndim == 2  # the padding mask as flash takes it


def test_a_model_on_which_the_switch_does_nothing_is_refused_by_layer_and_left_as_it_was(tiny, monkeypatch):
    model = tiny("tiny-llama", "eager").model
    before = logits(model)
    real_forward = type(model.model).forward

    def always_causal(self, *args, **kwargs):  # a fork that builds its own causal mask, whatever the config says
        ids = kwargs["input_ids"]
        n = ids.shape[1]
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        return real_forward(self, **{**kwargs, "attention_mask": mask.expand(len(ids), 1, n, n)})

    monkeypatch.setattr(type(model.model), "forward", always_causal)
    with pytest.raises(ConversionError, match=r"layers\.0\.self_attn.*no padding.*does not see"):
        labkit.to_bidirectional(model)
    monkeypatch.undo()
    assert torch.equal(logits(model), before)
    assert convert.conversion_of(model) is None
    assert model.generate(IDS, max_new_tokens=1).shape == (1, N + 1)


def test_to_causal_refuses_a_model_that_was_made_bidirectional_by_hand(tiny):
    model = tiny("tiny-llama").model
    model.config.is_causal = False
    with pytest.raises(ConversionError, match="did not become causal"):
        labkit.to_causal(model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"window": "wide"}, "'keep'"),
        ({"layers": [2]}, "0 to 1"),
        ({"layers": []}, "at least one"),
        ({"layers": [-1]}, "0 to 1"),
    ],
)
def test_wrong_arguments_are_refused(tiny, arguments, said):
    with pytest.raises(ConversionError, match=said):
        labkit.to_bidirectional(tiny("tiny-llama").model, **arguments)


def test_a_model_without_a_decoder_is_refused():
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(UnsupportedModelError, match="BertModel"):
        labkit.to_bidirectional(BertModel(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2", "tiny-gemma3"])
@pytest.mark.parametrize("layers", [None, [0]])
def test_flex_attention_has_the_declared_window_padded_or_not(tiny, name, layers):
    model = labkit.to_bidirectional(tiny(name, "flex_attention").model, layers=layers)
    reach = W - 1 if name != "tiny-llama" else None
    real = mixed_batch()
    assert torch.equal(layer_cells(model, N)[0, 0], window_cells(N, reach, reach))
    for row, cells in zip(real, layer_cells(model, N, real)[0], strict=True):
        assert torch.equal(cells[row][:, row], window_cells(int(row.sum()), reach, reach))
        assert not cells[row][:, ~row].any()


def multimodal_gemma3():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 400, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "sliding_window": W, "initializer_range": 0.2,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=399)
    torch.manual_seed(0)
    return Gemma3ForConditionalGeneration(config).eval()


def every_layer_local(name):
    from transformers import MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM

    config_class, model_class = {
        "mistral": (MistralConfig, MistralForCausalLM),
        "phi3": (Phi3Config, Phi3ForCausalLM),
    }[name]
    config = config_class(
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=W, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return model_class(config).eval()
