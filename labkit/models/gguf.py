"""Turn a quantised GGUF file into an ordinary model folder: bfloat16 safetensors, clean configuration, fast tokenizer.

Supported are the two architectures that labkit's packages carry (gemma3 text, llama). The weights are dequantised by
the `gguf` package; names and layouts are translated here, because a model that transformers loads from a GGUF file
cannot be saved again and costs more than ten times as long. The translation follows llama.cpp's
`convert_hf_to_gguf.py`, backwards: Gemma's norms are stored with one added, and Llama's query and key rows are
interleaved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import MissingPackageError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_ROWS_AT_ONCE = 16_384  # rows dequantised in one go, so that the float32 copy of a large embedding never exists whole


def convert_gguf(gguf_file: Path, folder: Path, progress: Progress = lambda done, total: None) -> dict[str, int]:
    """Write the model in `gguf_file` into `folder` (which exists) as transformers would have saved it, in bfloat16.

    Returns how many parameters the file stores in each quantisation type. Raises MissingPackageError without the
    `gguf` package and UnsupportedModelError if the file's tensors are not exactly those of a model that labkit knows.
    """
    from safetensors.torch import save_file

    from labkit.models.gguf_tokenizers import build_tokenizer

    fields, tensors = _read(gguf_file)
    config, generation, model_class = _configure(fields, tied="output.weight" not in {t.name for t in tensors})
    weights, stored_as = _dequantise(tensors, config, progress)
    _require_exact_weights(model_class, config, weights, gguf_file)

    build_tokenizer(fields, max_length=config.max_position_embeddings).save_pretrained(folder)
    _without_blanks(folder / "tokenizer.json")
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return stored_as


def _without_blanks(file: Path) -> None:
    """Rewrite a JSON file without indentation: a quarter of a million tokens then load in half the time."""
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def _read(gguf_file: Path) -> tuple[dict[str, Any], list]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingPackageError(
            "the weights are in a GGUF file, which needs the package gguf to read: pip install gguf"
        ) from error
    reader = GGUFReader(gguf_file)
    return {key: field.contents() for key, field in reader.fields.items()}, reader.tensors


def _configure(fields: dict[str, Any], tied: bool) -> tuple[PreTrainedConfig, Any, type]:
    """The configuration that the file's metadata describes, its generation defaults, and the model class."""
    import torch
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    architecture = fields["general.architecture"]
    if architecture not in ("gemma3", "llama"):
        raise UnsupportedModelError(f"the GGUF file holds a {architecture!r} model; labkit converts gemma3 and llama")

    def field(name: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{name}", default)

    heads, width = field("attention.head_count"), field("embedding_length")
    special = {
        f"{ours}_token_id": fields[f"tokenizer.ggml.{theirs}_token_id"]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"tokenizer.ggml.{theirs}_token_id" in fields
    }
    shared = dict(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=width,
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("attention.head_count_kv", heads),
        head_dim=field("attention.key_length", width // heads),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=_as_written(field("attention.layer_norm_rms_epsilon")),
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
        **special,
    )
    theta = _as_written(field("rope.freq_base", 10_000.0))
    if architecture == "gemma3":
        model_class = Gemma3ForCausalLM
        config = Gemma3TextConfig(
            **shared,
            sliding_window=field("attention.sliding_window"),
            query_pre_attn_scalar=shared["head_dim"],
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        )
    else:
        model_class = LlamaForCausalLM
        config = LlamaConfig(**shared, rope_parameters={"rope_type": "default", "rope_theta": theta})
    config.architectures = [model_class.__name__]
    return config, GenerationConfig(**special), model_class


def _as_written(value: float) -> float:
    """1e-06 for the float32 9.999999974752427e-07 that the file stores."""
    return float(f"{value:.6g}")


def _dequantise(
    tensors: list, config: PreTrainedConfig, progress: Progress
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """All weights under transformers' names, bfloat16, and how many parameters each storage type held."""
    import torch
    from gguf import dequantize

    total, done = sum(int(t.n_bytes) for t in tensors), 0
    weights: dict[str, torch.Tensor] = {}
    stored_as: dict[str, int] = {}
    for tensor in tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))  # ggml writes the fastest-moving dimension first
        name = _transformers_name(tensor.name, config.model_type)
        weight = torch.empty(shape, dtype=torch.bfloat16)
        for start in range(0, shape[0], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            values = torch.tensor(dequantize(tensor.data[rows], tensor.tensor_type))
            weight[rows] = _undo_layout(
                values, name, config
            )  # float32 until here: 1 + w is rounded only after the 1 is gone
        weights[name] = weight
        kind = tensor.tensor_type.name
        stored_as[kind] = stored_as.get(kind, 0) + int(tensor.n_elements)
        done += int(tensor.n_bytes)
        progress(done, total)
    return weights, stored_as


_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FAMILY_NAMES = {
    "gemma3_text": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "llama": {"ffn_norm": "post_attention_layernorm"},
}


def _transformers_name(gguf_name: str, model_type: str) -> str:
    """model.layers.3.self_attn.q_proj.weight for blk.3.attn_q.weight."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _OUTER_NAMES:
        return f"{_OUTER_NAMES[stem]}.{kind}"
    names = _LAYER_NAMES | _FAMILY_NAMES[model_type]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in names:
        raise UnsupportedModelError(
            f"the GGUF file holds a tensor {gguf_name!r} that a {model_type} model does not have"
        )
    return f"model.layers.{match[1]}.{names[match[2]]}.{kind}"


def _undo_layout(values: torch.Tensor, name: str, config: PreTrainedConfig) -> torch.Tensor:
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return values - 1  # llama.cpp stores 1 + w, transformers stores w
    if config.model_type == "llama" and re.search(r"[qk]_proj\.weight$", name):
        heads = config.num_attention_heads if name.endswith("q_proj.weight") else config.num_key_value_heads
        pairs = values.reshape(heads, -1, 2, values.shape[-1])  # (heads, head_dim / 2, 2, width)
        return pairs.transpose(1, 2).reshape(values.shape)
    return values


def _require_exact_weights(
    model_class: type, config: PreTrainedConfig, weights: dict[str, torch.Tensor], gguf_file: Path
) -> None:
    """Every parameter of the model is there with its shape, and nothing else is."""
    import torch

    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in model_class(config).named_parameters()}  # tied ones appear once
    found = {name: tuple(w.shape) for name, w in weights.items()}
    if wrong := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        raise UnsupportedModelError(
            f"{gguf_file.name} does not hold the weights of a {config.model_type} model: "
            f"{len(wrong)} tensors are missing, unknown or of the wrong shape, the first is {wrong[0]}"
        )
