"""Write small GGUF files as llama.cpp's `convert_hf_to_gguf.py` would: the other half of `labkit.models.gguf`."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

_NORMAL, _CONTROL, _BYTE = 1, 3, 6


def random_llama() -> LlamaForCausalLM:
    vocabulary = len(_byte_level_tokens())
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rms_norm_eps=1e-5,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _random(LlamaForCausalLM, config)


def random_gemma3() -> Gemma3ForCausalLM:
    config = Gemma3TextConfig(
        vocab_size=len(_sentencepiece_tokens()[0]), hidden_size=64, intermediate_size=96, num_hidden_layers=7,
        num_attention_heads=4, num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, sliding_window=4,
        max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    return _random(Gemma3ForCausalLM, config)


def write_llama(path: Path, model: LlamaForCausalLM) -> None:
    """Query and key rows go out interleaved, as llama.cpp rotates neighbouring pairs."""
    config = model.config
    writer = _writer(path, "llama", config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = _byte_level_tokens()
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL] * 3 + [_NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_unk_token_id(0)
    for name, weight in model.state_dict().items():
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if f"{part}.weight" in name:
                rows = weight.shape[0]
                weight = weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(rows, -1)
        writer.add_tensor(_gguf_name(name, MODEL_ARCH.LLAMA), weight.contiguous().numpy())
    _finish(writer)


def write_gemma3(path: Path, model: Gemma3ForCausalLM) -> None:
    """Norms go out with one added, the output matrix, being the embedding, not at all."""
    config = model.config
    writer = _writer(path, "gemma3", config)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_key_length(config.head_dim)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    tokens, types = _sentencepiece_tokens()
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            stored = weight + 1 if name.endswith("norm.weight") else weight
            writer.add_tensor(_gguf_name(name, MODEL_ARCH.GEMMA3), stored.contiguous().numpy())
    _finish(writer)


def _random(model_class, config):
    """Random weights that are exact in bfloat16; norms too, or a lost or added one would go unseen."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(torch.randint(-8, 8, weight.shape) / 16)
            weight.copy_(weight.bfloat16())
    return model


def _writer(path: Path, architecture: str, config) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    return writer


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str, architecture: MODEL_ARCH) -> str:
    return get_tensor_name_map(architecture, 8).get_name(name, try_suffixes=(".weight",))


def _byte_level_tokens() -> list[str]:
    return ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]


def _sentencepiece_tokens() -> tuple[list[str], list[int]]:
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    spaces = ["  ", "   "]  # the file spells runs of spaces with spaces
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁t", "he", "▁the", "▁c", "at", "▁cat", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    types = [_CONTROL] * len(control) + [4] * len(spaces) + [_BYTE] * len(raw) + [_NORMAL] * len(words)
    return control + spaces + raw + words, types
