"""to_bidirectional and to_causal: exact inverses, saved and loaded, wrapped, shared, interrupted and refused.

Which layer attends to what after a conversion is measured in test_layer_masks.py.
"""

import copy
import pickle

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, BertConfig, BertModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import labkit
from labkit import convert, masks
from labkit.decoder.packing import packed
from labkit.errors import ConversionError, ModelError
from tests.perturbation import (
    CASES,
    IDS,
    N,
    W,
    assert_layers_attend,
    assert_without_hooks,
    causal_rules,
    layer_cells,
    logits,
    window,
)

OPEN = window(None, None)
NAMES = ["tiny-gpt2", "tiny-llama", "tiny-gemma2", "tiny-gemma3"]


def mixed_batch():
    """Three rows, one full, one padded on the right, one on the left: ids and attention_mask."""
    real = torch.ones(3, N).long()
    real[1, -4:], real[2, :3] = 0, 0
    return {"input_ids": IDS.expand(3, N), "attention_mask": real}


def is_guarded(model):
    try:
        model.generate(input_ids=IDS[:, :4], max_new_tokens=1, do_sample=False)
    except ConversionError:
        return True
    return False


# ---- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("layers", [None, [1]])
def test_to_causal_restores_the_same_bits_and_generation(tiny, name, attn, layers):
    model = tiny(name, attn).model
    before, config = logits(model), model.config.to_dict()
    continued = model.generate(IDS, max_new_tokens=6, do_sample=False)
    labkit.to_bidirectional(model, layers=layers)
    assert not torch.equal(logits(model), before)
    labkit.to_causal(model)
    assert torch.equal(logits(model), before) and model.config.to_dict() == config
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), continued)
    assert_without_hooks(model)


def test_converting_again_changes_nothing_and_other_choices_replace_the_first(tiny):
    model = labkit.to_bidirectional(tiny("tiny-gemma3").model)
    once = logits(model)
    assert torch.equal(logits(labkit.to_bidirectional(model)), once)
    labkit.to_bidirectional(model, window="halve")
    assert_layers_attend(model, [window(W // 2, W // 2), OPEN])
    assert torch.equal(logits(labkit.to_bidirectional(model)), once)


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("how", "layers"), [("keep", None), ("halve", None), ("global", None), ("halve", [0])])
def test_a_saved_conversion_comes_back_however_often_and_in_plain_transformers(tiny, tmp_path, name, how, layers):
    lm = tiny(name)
    before, attn = logits(lm.model), lm.model.config._attn_implementation
    expected = logits(labkit.to_bidirectional(lm.model, window=how, layers=layers))
    model = lm.model
    for round_trip in range(2):
        folder = tmp_path / str(round_trip)
        model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
        model = labkit.load(folder).model
        assert torch.equal(logits(model), expected)
    if layers is None:
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attn)
        assert torch.equal(layer_cells(plain, N), layer_cells(lm.model, N))
    assert torch.equal(logits(labkit.to_causal(model)), before)


def test_generate_is_refused_with_the_reason_unless_asked_for(tiny):
    model = labkit.to_bidirectional(tiny("tiny-gemma3").model)
    with pytest.raises(ConversionError, match="not trained to predict the next token"):
        model.generate(IDS, max_new_tokens=2)
    assert model.generate(IDS, max_new_tokens=2, allow_bidirectional=True).shape == (1, N + 2)


# ---- how a converted model is run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
@pytest.mark.parametrize("layers", [None, [1]])
def test_gradient_checkpointing_gives_the_same_gradients(tiny, name, layers):
    gradients = []
    for checkpointing in (False, True):
        model = labkit.to_bidirectional(tiny(name).model, layers=layers).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        padded = model(**mixed_batch(), labels=IDS.expand(3, N)).loss
        (model(IDS, labels=IDS).loss + padded).backward()  # two forwards before one backward
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for without, with_checkpointing in zip(*gradients, strict=True):
        torch.testing.assert_close(with_checkpointing, without)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_compiled_model_agrees_with_the_eager_one(tiny, name):
    model = labkit.to_bidirectional(tiny(name).model)
    compiled, batch = torch.compile(model, backend="aot_eager"), mixed_batch()
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(logits(compiled), logits(model))
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch).logits[real], model(**batch).logits[real])


@pytest.fixture
def flash_kernel(monkeypatch):
    """Flash attention needs a GPU; what reaches its kernel can be read: the list of (is_causal, window, mask)."""
    handed = []

    def kernel(module, query, key, value, attention_mask, is_causal=None, sliding_window=None, **_):
        handed.append((is_causal, sliding_window, attention_mask))
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", kernel)
    return handed


@pytest.mark.parametrize(("how", "reach"), [("keep", W - 1), ("halve", W // 2)])
@pytest.mark.parametrize("model_name", ["tiny-gemma3", "mistral"])
def test_flash_attention_would_be_handed_the_declared_window(tiny, flash_kernel, how, reach, model_name):
    model = tiny(model_name).model if model_name.startswith("tiny") else every_layer_local(model_name)
    labkit.to_bidirectional(model, window=how)
    model.config._attn_implementation = "flash_attention_2"
    with torch.no_grad():
        model(**mixed_batch())
    assert all(is_causal is False for is_causal, _, _ in flash_kernel)
    assert flash_kernel[0][1] == reach + 1  # w means w-1 tokens to a side
    assert flash_kernel[0][2].ndim == 2  # the padding mask as flash takes it


@pytest.mark.parametrize(("rows", "padded"), [(2, False), (1, True)])
def test_flash_attention_which_would_let_packed_documents_mix_is_refused(tiny, flash_kernel, rows, padded):
    model = labkit.to_bidirectional(tiny("tiny-llama").model)
    model.config._attn_implementation = "flash_attention_2"
    given = {"position_ids": (torch.arange(N) % 10).expand(rows, N)}
    given |= {"attention_mask": (torch.arange(N) < 18).long()[None]} if padded else {}
    with pytest.raises(ConversionError, match="one row without padding"):
        logits(model, IDS.expand(rows, N), use_cache=False, **given)


# ---- models that share something ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
@pytest.mark.parametrize("layers", [None, [1]])
def test_converting_one_model_leaves_every_other_of_the_same_config_alone(tiny, name, layers):
    first = tiny(name).model
    config, second = first.config, type(first)(first.config).eval()
    before, cells = config.to_dict(), layer_cells(second, N)
    labkit.to_bidirectional(first, layers=layers)
    assert config.to_dict() == before
    for other in (second, type(first)(config).eval()):
        assert torch.equal(layer_cells(other, N), cells) and not is_guarded(other)
    labkit.to_causal(second)
    assert layer_cells(first, N)[1].all() and is_guarded(first)
    labkit.to_bidirectional(second, window="halve")
    labkit.to_causal(first)
    assert torch.equal(layer_cells(first, N), cells) and not is_guarded(first)
    assert layer_cells(second, N)[1].all() and is_guarded(second)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
@pytest.mark.parametrize("layers", [None, [1]])
def test_a_model_built_from_the_config_of_a_converted_one_is_converted_and_its_own(tiny, name, layers, tmp_path):
    model = labkit.to_bidirectional(tiny(name).model, layers=layers)
    model.save_pretrained(tmp_path)
    reach = W - 1 if name == "tiny-gemma3" else None
    converted = [window(reach, reach if layers is None else 0), OPEN]
    for other in (type(model)(model.config).eval(), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert_layers_attend(other, converted)
        assert is_guarded(other)
        labkit.to_causal(other)
        assert not layer_cells(other, N).triu(1).any() and not is_guarded(other)
    assert_layers_attend(model, converted)
    assert is_guarded(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("layers", [None, [1]])
def test_a_copy_is_converted_on_its_own(tiny, copied, layers):
    model = labkit.to_bidirectional(tiny("tiny-gemma3").model, layers=layers)
    expected, twin = logits(model), copied(model)
    causal = logits(labkit.to_causal(model))
    assert torch.equal(logits(twin), expected) and is_guarded(twin)
    assert torch.equal(logits(labkit.to_causal(twin)), causal)
    assert_without_hooks(twin)


def test_converting_a_part_converts_every_model_around_it(tiny, tmp_path):
    model = tiny("tiny-llama").model
    other_head = type(model)(model.config).eval()
    other_head.model = model.model
    labkit.to_bidirectional(model.model)
    assert is_guarded(model) and is_guarded(other_head)
    model.save_pretrained(tmp_path)
    assert is_guarded(AutoModelForCausalLM.from_pretrained(tmp_path))
    labkit.to_causal(other_head)
    assert not is_guarded(model) and not is_guarded(other_head) and convert.conversion_of(model) is None


@pytest.mark.parametrize("layers", [None, [0]])
def test_a_conversion_inside_a_context_is_made_and_stays_when_the_context_ends(tiny, layers):
    model = labkit.to_bidirectional(tiny("tiny-llama").model, layers=layers)
    cells = layer_cells(model, N)
    labkit.to_causal(model)
    with labkit.masked(model, {1: masks.causal()}), packed(model):
        labkit.to_bidirectional(model, layers=layers)
        assert not layer_cells(model, N)[1].triu(1).any()
    assert torch.equal(layer_cells(model, N), cells) and is_guarded(model)


# ---- models inside others --------------------------------------------------------------------------------------------


def test_a_lora_wrapped_model_converts_and_its_generate_is_guarded(tiny):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(tiny("tiny-llama").model, peft.LoraConfig(target_modules=["q_proj"]))
    labkit.to_bidirectional(wrapped)
    assert layer_cells(wrapped.base_model.model, N).all() and is_guarded(wrapped)
    labkit.to_causal(wrapped)
    assert not is_guarded(wrapped)


@pytest.mark.parametrize("layers", [None, [0]])
def test_the_text_part_of_a_multimodal_gemma3_is_converted(multimodal, layers):
    labkit.to_bidirectional(multimodal, layers=layers)
    assert_layers_attend(multimodal, [window(W - 1, W - 1), OPEN if layers is None else window(None, 0)])
    if layers is None:
        with torch.no_grad():
            typed = multimodal(input_ids=IDS, token_type_ids=torch.zeros_like(IDS)).logits
        torch.testing.assert_close(typed, logits(multimodal), rtol=1e-4, atol=1e-4)


def test_a_mask_reaches_the_text_part_of_a_multimodal_gemma3(multimodal):
    with labkit.masked(multimodal, {1: masks.prefix(3)}):
        assert_layers_attend(multimodal, [causal_rules(multimodal)[0], lambda n: masks.prefix(3).dense(n)])


def every_layer_local(family):
    config = transformers.CONFIG_MAPPING[family](
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=W, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_window_that_the_config_alone_holds_is_exact_too(family):
    model = labkit.to_bidirectional(every_layer_local(family))
    assert_layers_attend(model, [window(W - 1, W - 1)] * 2)


# ---- what fails leaves the model as it was ---------------------------------------------------------------------------


def test_a_model_on_which_the_switch_does_nothing_is_refused_by_layer_and_left_as_it_was(tiny, monkeypatch):
    model = tiny("tiny-llama", "eager").model
    before = logits(model)
    real_forward = type(model.model).forward

    def always_causal(self, *args, **kwargs):  # a fork that builds its own causal mask, whatever the config says
        batch, n = kwargs["input_ids"].shape
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)
        return real_forward(self, **{**kwargs, "attention_mask": mask.expand(batch, 1, n, n)})

    monkeypatch.setattr(type(model.model), "forward", always_causal)
    with pytest.raises(ConversionError, match=r"layers\.0\.self_attn.*no padding.*does not attend"):
        labkit.to_bidirectional(model)
    monkeypatch.undo()
    assert torch.equal(logits(model), before) and convert.conversion_of(model) is None and not is_guarded(model)


def test_to_causal_refuses_a_model_that_was_made_bidirectional_by_hand(tiny):
    model = tiny("tiny-llama").model
    model.config.is_causal = False
    with pytest.raises(ConversionError, match="did not become causal"):
        labkit.to_causal(model)


@pytest.mark.parametrize("failure", [ConversionError("planted."), KeyboardInterrupt()], ids=["refused", "interrupted"])
def test_a_failed_change_of_choices_puts_the_earlier_conversion_back(tiny, failure):
    model = labkit.to_bidirectional(tiny("tiny-gemma3", "sdpa").model, layers=[1])
    before = logits(model)

    def fail(*_):
        handle.remove()
        raise failure

    handle = model.model.layers[1].self_attn.register_forward_pre_hook(fail)
    with pytest.raises(type(failure)):
        labkit.to_bidirectional(model, window="halve")
    assert torch.equal(logits(model), before) and is_guarded(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": "wide"}, "'keep'"),
        *(({"layers": wrong}, "0 to 1") for wrong in ([2], [], [-1], 1, "all", [0.9], [1, 1])),
    ],
)
def test_wrong_arguments_are_refused(tiny, arguments, message):
    with pytest.raises(ConversionError, match=message):
        labkit.to_bidirectional(tiny("tiny-llama").model, **arguments)


def test_a_model_without_a_decoder_is_refused():
    config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ModelError, match="BertModel"):
        labkit.to_bidirectional(BertModel(config))


def test_other_choices_are_possible_for_a_model_that_was_open_before(tiny):
    model = tiny("tiny-gemma3", "sdpa").model
    model.config.is_causal = False
    for choice in ("keep", "halve"):
        labkit.to_bidirectional(model, window=choice)
        assert convert.conversion_of(model)["window"] == choice


def test_a_single_cell_that_is_closed_beside_padding_only_is_a_failed_conversion(tiny):
    model = tiny("tiny-llama", "sdpa").model

    def close(attention, args, kwargs):
        mask = kwargs["attention_mask"]  # (batch, 1, query, key) beside padding, else None
        if mask is not None:
            kwargs["attention_mask"] = mask.clone()
            kwargs["attention_mask"][:, :, 0, 2] = False
        return args, kwargs

    model.model.layers[1].self_attn.register_forward_pre_hook(close, with_kwargs=True)
    with pytest.raises(ConversionError, match="padded batch.*token 0 does not attend to token 2"):
        labkit.to_bidirectional(model)
