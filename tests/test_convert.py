"""to_bidirectional and to_causal, held against a perturbation oracle and against transformers' own outputs."""

import copy
import pickle

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import labkit
from labkit import convert
from labkit.decoder.anatomy import CACHE
from labkit.decoder.packing import packed
from labkit.errors import ConversionError, ModelError
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
    with pytest.raises(ConversionError, match="not trained to predict the next token"):
        model.generate(IDS, max_new_tokens=2)
    assert model.generate(IDS, max_new_tokens=2, allow_bidirectional=True).shape == (1, N + 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("layers", [None, [1]])
def test_a_copy_is_converted_on_its_own(tiny, copied, layers):
    model = labkit.to_bidirectional(tiny("tiny-gemma3").model, layers=layers)
    expected, twin = logits(model), copied(model)
    causal = logits(labkit.to_causal(model))
    assert torch.equal(logits(twin), expected)
    with pytest.raises(ConversionError):
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


def packed_row(pads):
    """One row of two documents, 9 and 8 tokens, and its positions; `pads` more on the left or on the right."""
    before = {"left": 3, "right": 0}.get(pads, 0)
    row, positions = torch.full((1, N), 7), torch.ones(1, N, dtype=torch.long)
    row[:, before : before + 17] = IDS[:, :17]
    positions[:, before : before + 17] = torch.cat([torch.arange(9), torch.arange(8)])
    if pads in (None, "ones"):
        row, positions = row[:, :17], positions[:, :17]
    real = torch.zeros(1, N, dtype=torch.long)
    real[:, before : before + 17] = 1
    mask = {None: None, "ones": torch.ones(1, 17, dtype=torch.long)}.get(pads, real)
    return row, positions, mask, slice(before, before + 9), slice(before + 9, before + 17)


def assert_documents_are_apart(model, pads, **tolerance):
    row, positions, mask, first, second = packed_row(pads)
    packed = logits(model, row, position_ids=positions, attention_mask=mask, use_cache=False)
    tolerance = tolerance or {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(packed[:, first], logits(model, IDS[:, :9]), **tolerance)
    torch.testing.assert_close(packed[:, second], logits(model, IDS[:, 9:17]), **tolerance)


@pytest.mark.parametrize("pads", [None, "ones", "right", "left"])
@pytest.mark.parametrize(("name", "attn"), CASES)
@pytest.mark.parametrize("layers", [None, [1]])
def test_packed_documents_do_not_leak_into_each_other_whatever_2d_mask_comes_with_them(tiny, name, attn, layers, pads):
    assert_documents_are_apart(labkit.to_bidirectional(tiny(name, attn).model, layers=layers), pads)


def test_rows_of_a_packed_batch_may_hold_different_documents(tiny):
    model = labkit.to_bidirectional(tiny("tiny-gemma3").model)
    positions = torch.stack([torch.cat([torch.arange(m), torch.arange(N - m)]) for m in (4, 13, N)])
    ids, alone = IDS.expand(3, N), [logits(model, IDS[:, :m]) for m in (4, 13, N)]
    packed = logits(model, ids, position_ids=positions, attention_mask=torch.ones(3, N), use_cache=False)
    for row, m in enumerate((4, 13, N)):
        torch.testing.assert_close(packed[row : row + 1, :m], alone[row], atol=2e-5, rtol=1e-4)


def test_a_text_with_padding_is_not_taken_for_packed_documents(tiny):
    """Its positions jump where the padding is: pads may be counted or not, and have any number of their own."""
    model = labkit.to_bidirectional(tiny("tiny-llama").model)
    text, pads = torch.nn.functional.pad(IDS, (3, 2)), torch.nn.functional.pad(torch.ones_like(IDS), (3, 2))
    pads[0, 8] = 0  # a hole in the text
    real = pads[0].bool()
    for positions in ((pads.cumsum(-1) - 1).masked_fill(pads == 0, 1), torch.arange(N + 5)[None]):
        got = logits(model, text, attention_mask=pads, position_ids=positions)
        changed = text.clone()
        changed[0, 3] = 60
        moved = (logits(model, changed, attention_mask=pads, position_ids=positions) - got).abs().amax(-1)[0]
        assert bool((moved[real] > 0).all()), "a token of the text does not reach all of it"


def test_packed_documents_with_a_cache_are_refused(tiny):
    from transformers import DynamicCache

    model = labkit.to_bidirectional(tiny("tiny-llama").model)
    row, positions, *_ = packed_row(None)
    with pytest.raises(ConversionError, match="cache"):
        model(row, position_ids=positions, **{CACHE: DynamicCache()})


@pytest.mark.parametrize(("rows", "masked"), [(2, False), (1, True)])
def test_flash_attention_which_would_let_packed_documents_mix_is_refused(tiny, monkeypatch, rows, masked):
    model = labkit.to_bidirectional(tiny("tiny-llama").model)
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", lambda m, q, *_, **__: (q.transpose(1, 2), None)
    )
    model.config._attn_implementation = "flash_attention_2"
    row, positions, mask, *_ = packed_row("right")
    given = {"position_ids": positions.expand(rows, -1), "attention_mask": mask if masked else None}
    with pytest.raises(ConversionError, match="one row without padding"):
        logits(model, row.expand(rows, -1), use_cache=False, **given)


def tiny_config(family):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "gpt2":
        return transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 64}
    if family == "llama":
        return transformers.LlamaConfig(**sizes)
    local = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return transformers.Gemma3TextConfig(**sizes, head_dim=16, **local)


def is_guarded(model):
    try:
        model.generate(IDS[:, :4] % 64, max_new_tokens=1, do_sample=False)
    except ConversionError:
        return True
    return False


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("layers", [None, [1]])
def test_converting_one_model_leaves_every_other_of_the_same_config_alone(family, layers):
    config = tiny_config(family)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    first, second = model_class(config).eval(), model_class(config).eval()
    assert first.config is second.config
    before, cells = config.to_dict(), layer_cells(second, 8)
    labkit.to_bidirectional(first, layers=layers)
    third = model_class(config).eval()
    assert config.to_dict() == before
    for other in (second, third):
        assert torch.equal(layer_cells(other, 8), cells) and not is_guarded(other)
    labkit.to_causal(second)
    assert layer_cells(first, 8)[1].all() and is_guarded(first)
    labkit.to_bidirectional(second, window="halve")
    labkit.to_causal(first)
    assert torch.equal(layer_cells(first, 8), cells) and not is_guarded(first)
    assert layer_cells(second, 8)[1].all() and is_guarded(second)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("layers", [None, [1]])
def test_a_model_built_from_the_config_of_a_converted_one_is_converted_and_its_own(family, layers, tmp_path):
    model = labkit.to_bidirectional(AutoModelForCausalLM.from_config(tiny_config(family)).eval(), layers=layers)
    model.save_pretrained(tmp_path)
    built = [
        type(model)(model.config).eval(),
        AutoModelForCausalLM.from_config(model.config).eval(),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ]
    cells = layer_cells(model, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    ids = IDS[:, :12] % 64
    for other in built:
        assert torch.equal(layer_cells(other, 12), cells) and is_guarded(other)
        packed = logits(other, ids, position_ids=positions, attention_mask=torch.ones(1, 12), use_cache=False)
        torch.testing.assert_close(packed[:, :5], logits(other, ids[:, :5]), atol=2e-5, rtol=1e-4)
        labkit.to_causal(other)
        assert not layer_cells(other, 12).triu(1).any() and not is_guarded(other)
    assert torch.equal(layer_cells(model, 12), cells) and is_guarded(model)


def test_a_record_for_layers_that_the_model_does_not_have_is_refused():
    model = labkit.to_bidirectional(AutoModelForCausalLM.from_config(tiny_config("llama")), layers=[1])
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    with pytest.raises(ConversionError, match="1 layers"):
        type(model)(config)


@pytest.mark.parametrize("layers", [None, [0]])
def test_a_conversion_inside_a_context_is_made_and_stays_when_the_context_ends(tiny, tmp_path, layers):
    """Also of a model whose config says that it is converted, while no hook of the conversion is there."""
    model = labkit.to_bidirectional(tiny("tiny-llama").model, layers=layers)
    cells = layer_cells(model, N)
    mark = copy.deepcopy(convert.conversion_of(model))
    labkit.to_causal(model)
    for recorded in (False, True):
        if recorded:
            setattr(model.config, convert.MARK, mark)
        with labkit.masked(model, {1: labkit.masks.causal()}), packed(model):
            labkit.to_bidirectional(model, layers=layers)
            assert not layer_cells(model, N)[1].triu(1).any()
        assert torch.equal(layer_cells(model, N), cells) and is_guarded(model)
        labkit.to_causal(model)


def test_a_lora_wrapped_model_converts_and_its_generate_is_guarded(tiny):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(tiny("tiny-llama").model, peft.LoraConfig(target_modules=["q_proj"]))
    labkit.to_bidirectional(wrapped)
    assert layer_cells(wrapped.base_model.model, N).all()
    with pytest.raises(ConversionError):
        wrapped.generate(input_ids=IDS)
    labkit.to_causal(wrapped)
    assert wrapped.generate(input_ids=IDS, max_new_tokens=2).shape == (1, N + 2)


@pytest.mark.parametrize("layers", [None, [0]])
def test_the_text_part_of_a_multimodal_gemma3_is_converted_padded_and_packed_or_not(layers):
    model = multimodal_gemma3()
    causal = layer_cells(model, N)
    labkit.to_bidirectional(model, layers=layers)
    cells = layer_cells(model, N)
    assert torch.equal(cells[0, 0], window_cells(N, W - 1, W - 1))
    assert cells[1].all() if layers is None else torch.equal(cells[1], causal[1])
    real = mixed_batch()
    for row, padded in zip(real, layer_cells(model, N, real)[0], strict=True):
        assert torch.equal(padded[row][:, row], window_cells(int(row.sum()), W - 1, W - 1))
        assert not padded[row][:, ~row].any()
    for pads in (None, "ones", "right", "left"):
        assert_documents_are_apart(model, pads)


def test_a_mask_reaches_the_text_part_of_a_multimodal_gemma3():
    model = multimodal_gemma3()
    real = mixed_batch()
    with labkit.masked(model, {1: labkit.masks.prefix(3)}):
        for row, cells in zip(real, layer_cells(model, N, real)[1], strict=True):
            assert torch.equal(cells[row][:, row], labkit.masks.prefix(3).dense(int(row.sum())))
            assert not cells[row][:, ~row].any()


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


def test_to_causal_refuses_a_model_that_was_made_bidirectional_by_hand_and_claims_no_more(tiny):
    model = tiny("tiny-llama").model
    model.config.is_causal = False
    with pytest.raises(ConversionError, match="did not become causal") as error:
        labkit.to_causal(model)
    assert "put back" not in str(error.value)


def test_a_failed_change_of_choices_puts_the_earlier_conversion_back(tiny, monkeypatch):
    model = labkit.to_bidirectional(tiny("tiny-gemma3").model)
    before = logits(model)
    prove = convert.proof.prove

    def fails_for_layer_0(decoder, intended, what):
        prove(decoder, intended, what)
        if what == "bidirectional":
            raise ConversionError("planted.")

    monkeypatch.setattr(convert.proof, "prove", fails_for_layer_0)
    with pytest.raises(ConversionError, match=r"planted\. The model was put back as it was\."):
        labkit.to_bidirectional(model, layers=[0])
    assert torch.equal(logits(model), before) and is_guarded(model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"window": "wide"}, "'keep'"),
        ({"layers": [2]}, "0 to 1"),
        ({"layers": []}, "at least one"),
        ({"layers": [-1]}, "0 to 1"),
        ({"layers": 1}, "0 to 1"),
        ({"layers": "all"}, "0 to 1"),
        ({"layers": [0.9]}, "0 to 1"),
        ({"layers": [True]}, "0 to 1"),
        ({"layers": [1, 1]}, "each once"),
    ],
)
def test_wrong_arguments_are_refused(tiny, arguments, said):
    with pytest.raises(ConversionError, match=said):
        labkit.to_bidirectional(tiny("tiny-llama").model, **arguments)


def test_a_model_without_a_decoder_is_refused():
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ModelError, match="BertModel"):
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


def test_converting_a_part_converts_every_model_around_it(tmp_path):
    model = transformers.LlamaForCausalLM(tiny_config("llama")).eval()
    other_head = transformers.LlamaForCausalLM(model.config).eval()
    other_head.model = model.model
    labkit.to_bidirectional(model.model)
    assert is_guarded(model) and is_guarded(other_head)
    model.save_pretrained(tmp_path)
    assert is_guarded(AutoModelForCausalLM.from_pretrained(tmp_path))
    labkit.to_causal(other_head)
    assert not is_guarded(model) and not is_guarded(other_head) and convert.conversion_of(model) is None


def test_an_interrupted_change_of_choices_puts_the_earlier_conversion_back(tiny):
    model = tiny("tiny-gemma3", "sdpa").model
    before = logits(labkit.to_bidirectional(model, layers=[1]))

    def interrupt(*_):
        handle.remove()
        raise KeyboardInterrupt

    handle = model.model.layers[1].self_attn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        labkit.to_bidirectional(model, window="halve")
    assert torch.equal(logits(model), before)


def test_learned_positions_count_real_tokens_with_an_empty_cache_too(tiny):
    model = labkit.to_bidirectional(tiny("tiny-gpt2", "sdpa").model)
    padded = logits(model, attention_mask=(torch.arange(N) >= 5).long()[None], **{CACHE: transformers.DynamicCache()})
    torch.testing.assert_close(padded[:, 5:], logits(model, IDS[:, 5:]), rtol=1e-4, atol=1e-4)


def test_token_type_ids_do_not_change_the_window_of_a_multimodal_gemma3():
    model = labkit.to_bidirectional(multimodal_gemma3())
    with torch.no_grad():
        typed = model(input_ids=IDS % 64, token_type_ids=torch.zeros_like(IDS)).logits
        torch.testing.assert_close(typed, model(input_ids=IDS % 64).logits, rtol=1e-4, atol=1e-4)
