"""GGUF in, an ordinary model folder out. Oracles: the model that was written, and transformers' own GGUF loader."""

from __future__ import annotations

import json
import random

import pytest
import torch
from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
from transformers import AutoModelForCausalLM, AutoTokenizer

from labkit.models.gguf import convert_gguf
from labkit.models.registry import REGISTRY
from tests.gguf_files import random_gemma3, random_llama, write_gemma3, write_llama
from tests.model_fixtures import load_or_skip

FAMILIES = {"llama": (random_llama, write_llama), "gemma3": (random_gemma3, write_gemma3)}
TEXTS = ["the cat", "  the   cat", "hät 42 🎉\n\nthe", "a</s>b"]


@pytest.fixture(scope="module", params=FAMILIES)
def converted(request, tmp_path_factory):
    """(the original model, the folder made from its GGUF file)"""
    make, write = FAMILIES[request.param]
    model, folder = make(), tmp_path_factory.mktemp(request.param)
    write(folder / "m.gguf", model)
    convert_gguf(folder / "m.gguf", folder)
    return model, folder


def test_plain_transformers_computes_the_original_logits_from_the_converted_folder(converted, tmp_path):
    original, folder = converted
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, original.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    tied = again.get_input_embeddings().weight.data_ptr() == again.get_output_embeddings().weight.data_ptr()
    assert tied == original.config.tie_word_embeddings
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))


def test_the_converted_configuration_is_the_original_one(converted):
    original, folder = converted
    config, expected = json.loads((folder / "config.json").read_text()), original.config.to_dict()
    names = "vocab_size sliding_window layer_types rope_parameters rms_norm_eps tie_word_embeddings".split()
    assert {name: config.get(name) for name in names} == {name: expected.get(name) for name in names}
    assert "quantization_config" not in config


def test_the_converted_tokenizer_keeps_any_text_pads_right_and_has_no_mask_token(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert tokenizer.padding_side == "right" and tokenizer.mask_token is None
    if converted[0].config.model_type == "llama":  # digits alone, known words one token
        assert tokenizer.tokenize("a the 42") == ["a", "Ġthe", "Ġ", "4", "2"]
    else:  # merges in the order of the vocabulary, unknown characters as bytes
        assert tokenizer.tokenize("a the  cät") == ["a", "▁the", "▁▁", "c", "<0xC3>", "<0xA4>", "t"]
        assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id


@pytest.mark.gemma
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m"])
def test_a_real_file_has_the_weights_and_tokens_of_transformers_own_gguf_loader(name, tmp_path):
    lm = load_or_skip(name)
    (tmp_path / "whole.gguf").write_bytes(b"".join(part.read_bytes() for part in REGISTRY[name].origin.paths()))
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "whole.gguf").tensors}
    kind = {"gemma3_text": MODEL_ARCH.GEMMA3, "llama": MODEL_ARCH.LLAMA}[lm.model.config.model_type]
    names = get_tensor_name_map(kind, lm.model.config.num_hidden_layers)
    for key, weight in lm.model.named_parameters():
        stored = tensors[names.get_name(key, try_suffixes=(".weight",))]
        values = torch.tensor(dequantize(stored.data, stored.tensor_type))
        if kind == MODEL_ARCH.GEMMA3 and key.endswith("norm.weight"):
            values -= 1  # llama.cpp stores 1 + w
        if kind == MODEL_ARCH.LLAMA and ("q_proj" in key or "k_proj" in key):  # halves of each head are interleaved
            values, weight = values.sort(0).values, weight.float().sort(0).values
        assert torch.equal(values.bfloat16(), weight.bfloat16()), key
    if name == "smollm2-135m":
        return  # transformers splits the digits of its vocabulary after the spaces, unlike the original release
    tokenizer, rng = AutoTokenizer.from_pretrained(tmp_path, gguf_file="whole.gguf"), random.Random(0)
    parts = [
        "The capital", "Ünïcödé", "日本語", "🎉", "  two   three", "\n\n", "\t", "2024-01-31", "<table><b>x</b>",
        "<start_of_turn>user", "def f(x):\n    return x  # y", "antidisestablishmentarianism", "‚‘’“”—…",
    ]  # fmt: skip
    for text in ["", *("".join(rng.choices(parts, k=5)) for _ in range(500))]:
        assert lm.tokenizer(text).input_ids == tokenizer(text).input_ids, text
