"""Turn a GGUF file into an ordinary model folder: bfloat16 safetensors, configuration, fast tokenizer.

transformers reads the configuration and the weights (they stay packed when a whole model is loaded from a GGUF file, so
the tensors are read one by one). The tokenizers are made here, because those that transformers makes from GGUF files
are not those of the original releases: other ids in 1 % of texts for SmolLM2, and in all of them before 5.20. Two kinds
of vocabulary are supported: SentencePiece-style BPE with byte fallback (Gemma 3), and byte-level BPE with single digits
(SmolLM2).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # llama.cpp's token types


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the model in `gguf_file` into `folder` (which exists) as `save_pretrained` would, in bfloat16."""
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # reading 260,000 tokens takes seconds, and transformers would do it for the configuration and for the weights
    with mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)):
        config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # 1e-06; as float32 it is 9.999999974752427e-07
        config.dtype = torch.bfloat16
        if config.model_type == "gemma3_text":  # not in the file
            config.query_pre_attn_scalar = config.head_dim
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        config.architectures = [type(model).__name__]
        tensors = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]
        fields = {name: field.contents() for name, field in gguf.GGUFReader(str(gguf_file)).fields.items()}
    weights = {name: tensors.pop(name).bfloat16().contiguous() for name, _ in model.named_parameters()}

    build_tokenizer(fields, max_length=config.max_position_embeddings).save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    # transformers parses a compact file in half the time, and only once if the settings hold its added tokens
    compact = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact, encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["added_tokens_decoder"] = {token.pop("id"): token for token in content["added_tokens"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def build_tokenizer(fields: dict[str, Any], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file's metadata `fields` describe, padding on the right, without a mask token.

    `max_length` is the model's context in tokens.
    """
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = {"llama": _sentencepiece_bpe, "gpt2": _byte_level_bpe}[fields["tokenizer.ggml.model"]](fields)

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
