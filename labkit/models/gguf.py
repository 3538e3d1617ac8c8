"""Turn a GGUF file into an ordinary model folder: bfloat16 safetensors, configuration, fast tokenizer.

Two architectures are supported, those of labkit's packages: gemma3 (text) and llama. The `gguf` package dequantises the
weights and maps their names, transformers reads the configuration. The rest is done here, because transformers' own
tokenizers of GGUF files are not those of the original releases (other ids in 1 % of texts for SmolLM2, and in all of
them before 5.20), and because its reader of weights needs nearly twice as much memory for the same bits. The original
releases define the two kinds of vocabulary: SentencePiece-style BPE with byte fallback (Gemma 3), and byte-level BPE
with single digits (SmolLM2).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import ModelError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # llama.cpp's token types
_ROWS_AT_ONCE = 16_384  # rows dequantised in one go, so that no float32 copy of a whole embedding is made


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the model in `gguf_file` into `folder` (which exists) as `save_pretrained` would, in bfloat16.

    Raises ModelError if the file does not hold exactly the weights of its model, or has a vocabulary of another kind.
    """
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    reader = GGUFReader(gguf_file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config.tie_word_embeddings = "output.weight" not in tensors
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # 1e-06; as float32 it is 9.999999974752427e-07
    config.dtype = torch.bfloat16
    if config.model_type == "gemma3_text":  # not in the file
        config.query_pre_attn_scalar = config.head_dim
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    weights = dequantised(tensors, model, gguf_file.name)

    fields = {name: field.contents() for name, field in reader.fields.items()}
    build_tokenizer(fields, max_length=config.max_position_embeddings).save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    compact = json.dumps(content, ensure_ascii=False, separators=(",", ":"))  # is parsed in half the time
    (folder / "tokenizer.json").write_text(compact, encoding="utf-8")
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def dequantised(tensors: dict[str, Any], model: Any, file_name: str) -> dict[str, torch.Tensor]:
    """All weights of `model` in bfloat16, by name. Raises ModelError unless they correspond to `tensors`."""
    import torch
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    config = model.config
    architecture = {"gemma3_text": MODEL_ARCH.GEMMA3, "llama": MODEL_ARCH.LLAMA}[config.model_type]
    names, weights = get_tensor_name_map(architecture, config.num_hidden_layers), {}
    for name, parameter in model.named_parameters():
        tensor = tensors.get(str(names.get_name(name, try_suffixes=(".weight",))))
        if tensor is None or tuple(reversed(tensor.shape.tolist())) != parameter.shape:  # ggml reverses dimensions
            raise ModelError(f"{file_name} does not hold the weight {name} of a {config.model_type} model in its shape")
        weights[name] = torch.empty(parameter.shape, dtype=torch.bfloat16)
        for start in range(0, len(parameter), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            values = torch.tensor(dequantize(tensor.data[rows], tensor.tensor_type))
            weights[name][rows] = _undo_layout(values, name, config)  # rounded once, after the float32 arithmetic
    if len(weights) < len(tensors):
        raise ModelError(f"{file_name} holds {len(tensors) - len(weights)} tensors that no {config.model_type} has")
    return weights


def _undo_layout(values: torch.Tensor, name: str, config: PreTrainedConfig) -> torch.Tensor:
    """llama.cpp stores 1 + w for Gemma's norms, and interleaves the halves of each head in Llama's queries and keys."""
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return values - 1
    if config.model_type == "llama" and re.search(r"[qk]_proj\.weight$", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        pairs = values.reshape(heads, -1, 2, values.shape[-1])  # (heads, head_dim / 2, 2, width)
        return pairs.transpose(1, 2).reshape(values.shape)
    return values


def build_tokenizer(fields: dict[str, Any], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file's metadata `fields` describe, padding on the right, without a mask token.

    `max_length` is the model's context in tokens. Raises ModelError for a vocabulary of another kind.
    """
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    builders = {("llama", "default"): _sentencepiece_bpe, ("gpt2", "smollm"): _byte_level_bpe}
    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind not in builders:
        raise ModelError(
            f"the GGUF file has a tokenizer of kind {kind}; labkit reads {' and '.join(map(str, builders))}"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = builders[kind](fields)

    # control tokens (<bos>, <start_of_turn>) and those added by hand (<table>) are never cut into pieces
    types = fields["tokenizer.ggml.token_type"]
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        whole = [_spelled(token) for token, token_type in zip(tokens, types, strict=True) if token_type == kind]
        add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token in whole])

    names = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    ids = {f"{ours}_token": fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names}
    special = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    if fields.get("tokenizer.ggml.add_bos_token"):
        bos = special["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, padding_side="right",
        clean_up_tokenization_spaces=False, chat_template=fields.get("tokenizer.chat_template"), **special,
    )  # fmt: skip


def _sentencepiece_bpe(fields: dict[str, Any]) -> Tokenizer:
    """Gemma: a space is ▁, unknown characters fall back to bytes, and the order of the vocabulary gives the merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = [_spelled(token) for token in fields["tokenizer.ggml.tokens"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [  # every way to join two tokens into a third; earlier tokens were learned earlier, so they merge first
        (token[:cut], token[cut:])
        for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if token_type not in (_CONTROL, _BYTE)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _byte_level_bpe(fields: dict[str, Any]) -> Tokenizer:
    """SmolLM2: GPT-2's byte-level BPE, except that every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spelled(token: str) -> str:
    """The file spells runs of spaces as spaces; the tokenizer applies its normaliser first, which writes ▁."""
    return "▁" * len(token) if token and not token.strip(" ") else token
