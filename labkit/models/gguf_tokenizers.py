"""Build a fast tokenizer from the vocabulary that a GGUF file carries.

Two kinds are known: SentencePiece-style BPE with byte fallback as Gemma 3 uses it, and byte-level BPE with single
digits as SmolLM2 uses it. Both are put together from the `tokenizers` package's own parts, in the form in which the
original releases ship them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # llama.cpp's token types


def build_tokenizer(fields: dict[str, Any], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer described by a GGUF file's metadata `fields`, padding on the right, without a mask token.

    `max_length` is the model's context in tokens. Raises UnsupportedModelError for any other kind of vocabulary.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind not in _BUILDERS:
        known = " and ".join("/".join(each) for each in _BUILDERS)
        raise UnsupportedModelError(
            f"the GGUF file has a tokenizer of kind {'/'.join(map(str, kind))}; labkit reads {known}"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = _BUILDERS[kind](fields)
    _add_whole_tokens(tokenizer, tokens, fields["tokenizer.ggml.token_type"])

    special = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            special[f"{ours}_token"] = tokens[token_id]
    if fields.get("tokenizer.ggml.add_bos_token"):
        bos = special["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, padding_side="right",
        clean_up_tokenization_spaces=False, **special,
    )  # fmt: skip
    built.chat_template = fields.get("tokenizer.chat_template")
    return built


def _sentencepiece_bpe(fields: dict[str, Any]) -> Tokenizer:
    """Gemma: a space is ▁, unknown characters fall back to bytes, and the vocabulary's order gives the merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = [_spelled(token) for token in fields["tokenizer.ggml.tokens"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges_in_vocabulary_order(vocabulary, fields["tokenizer.ggml.token_type"])
    unknown = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _byte_level_bpe(fields: dict[str, Any]) -> Tokenizer:
    """SmolLM: GPT-2's byte-level BPE, except that every digit stands alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_BUILDERS = {("llama", "default"): _sentencepiece_bpe, ("gpt2", "smollm"): _byte_level_bpe}


def _spelled(token: str) -> str:
    """The file spells runs of spaces as spaces; the tokenizer sees them after its normaliser, as ▁."""
    return "▁" * len(token) if token and not token.strip(" ") else token


def _merges_in_vocabulary_order(vocabulary: dict[str, int], token_types: list[int]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third; earlier tokens were learned earlier, so they merge first."""
    merges = []
    for token, token_type in zip(vocabulary, token_types, strict=True):
        if token_type in (_CONTROL, _BYTE):
            continue
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                merges.append((token[:cut], token[cut:]))
    return merges


def _add_whole_tokens(tokenizer: Tokenizer, tokens: list[str], token_types: list[int]) -> None:
    """Control tokens (<bos>, <start_of_turn>, ...) and those added by hand (<table>, ...) are never cut into pieces."""
    from tokenizers import AddedToken

    by_type = {_CONTROL: [], _USER_DEFINED: []}
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type in by_type:
            by_type[token_type].append(AddedToken(_spelled(token), normalized=False, special=token_type == _CONTROL))
    tokenizer.add_special_tokens(by_type[_CONTROL])
    tokenizer.add_tokens(by_type[_USER_DEFINED])
