"""GGUF in, an ordinary model folder out. Oracles: the model that was written, and transformers' own GGUF loader."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from labkit.errors import UnsupportedModelError
from labkit.models.gguf import convert_gguf
from tests.gguf_files import random_gemma3, random_llama, write_gemma3, write_llama

FAMILIES = {"llama": (random_llama, write_llama), "gemma3": (random_gemma3, write_gemma3)}


@pytest.fixture(scope="module", params=FAMILIES)
def converted(request, tmp_path_factory):
    """(the original model, the folder made from its GGUF file)"""
    make, write = FAMILIES[request.param]
    model, folder = make(), tmp_path_factory.mktemp(request.param)
    write(folder / "m.gguf", model)
    out = folder / "out"
    out.mkdir()
    convert_gguf(folder / "m.gguf", out)
    return model, out


def test_plain_transformers_reproduces_the_original_logits_from_the_converted_folder(converted):
    original, folder = converted
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, original.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_converted_configuration_is_the_original_one(converted):
    original, folder = converted
    found = json.loads((folder / "config.json").read_text())
    for key in (
        "vocab_size",
        "sliding_window",
        "layer_types",
        "rope_parameters",
        "rms_norm_eps",
        "tie_word_embeddings",
    ):
        assert found.get(key) == original.config.to_dict().get(key), key
    assert "quantization_config" not in found


def test_the_converted_model_can_be_saved_and_loaded_again_with_tied_weights_still_tied(converted, tmp_path):
    original, folder = converted
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    tied = again.get_input_embeddings().weight.data_ptr() == again.get_output_embeddings().weight.data_ptr()
    assert tied == original.config.tie_word_embeddings
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("text", ["the cat", "  the   cat", "hät 42 🎉\n\nthe", "a</s>b"])
def test_any_text_survives_the_converted_tokenizer(converted, text):
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_the_converted_tokenizer_pads_right_and_has_no_mask_token(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert tokenizer.padding_side == "right"
    assert tokenizer.mask_token is None


def test_digits_stand_alone_and_known_words_are_one_token_in_a_smollm_vocabulary(tmp_path):
    write_llama(tmp_path / "m.gguf", random_llama())
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize("a the 42") == ["a", "Ġthe", "Ġ", "4", "2"]


def test_gemma_merges_follow_the_vocabulary_and_unknown_characters_become_bytes(tmp_path):
    write_gemma3(tmp_path / "m.gguf", random_gemma3())
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("a the  cät") == ["a", "▁the", "▁▁", "c", "<0xC3>", "<0xA4>", "t"]
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id


def test_a_file_that_lacks_a_tensor_is_refused_by_the_name_of_the_tensor(tmp_path, monkeypatch):
    model = random_llama()
    state = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    monkeypatch.setattr(model, "state_dict", lambda: state)
    write_llama(tmp_path / "m.gguf", model)
    with pytest.raises(UnsupportedModelError, match=r"1 tensors.*model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.gemma
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m"])
def test_weights_are_bit_equal_to_those_of_transformers_own_gguf_loader(name, tmp_path):
    from labkit.models.embedded import _joined
    from labkit.models.registry import REGISTRY
    from tests.model_fixtures import load_or_skip

    ours = load_or_skip(name).model
    with _joined(REGISTRY[name].package.part_paths(), tmp_path) as file:
        theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    for (key, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.gemma
@pytest.mark.slow
def test_gemma_tokenizes_as_transformers_own_gguf_loader_does(gemma, tmp_path):
    from labkit.models.embedded import _joined
    from labkit.models.registry import REGISTRY

    with _joined(REGISTRY["gemma3-270m"].package.part_paths(), tmp_path) as file:
        theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = [
        "The capital of France is", "Ünïcödé, 日本語 and 🎉", "  two   three\n\nlines\t", "2024-01-31",
        "<table><b>x</b>",
        "<start_of_turn>user", "def f(x):\n    return x  # y", "antidisestablishmentarianism", "", "‚‘’“”—…",
    ]  # fmt: skip
    for text in texts:
        assert gemma.tokenizer(text).input_ids == theirs(text).input_ids, text
