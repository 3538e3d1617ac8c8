"""Tiny random models: two layers, made in code, for lessons on mechanism and for tests.

They are untrained, but built like the large models of their families (grouped queries, local and global layers,
softcap, learned or rotary positions). They load in a fraction of a second, need no network, and are the same on every
machine that draws the same random numbers. The weights have a large spread (standard deviation 0.2), so that attention
is far from uniform and a wrong mask changes the output visibly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

TINY_NAMES = ("tiny-gpt2", "tiny-gemma", "tiny-gemma2", "tiny-gemma3", "tiny-llama")
SEED = 20_240_607
CONTEXT = 1024  # longest sequence, in tokens
WINDOW = 8  # local layers of tiny-gemma2 and tiny-gemma3 reach back over this many tokens, themselves included

_SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>")
_WHOLE_WORDS = (
    "the of and to in is a that it was for on as with by at from are this be not or an have but they his her you all "
    "one we can there their will no if so up out who which when what were had has more about into than other some time "
    "could see look model token word mask query key future past left right attends sat cat mat bank river money city "
    "capital France Paris"
).split()


def build_tiny_model(
    name: str, *, attn: str, dtype: torch.dtype | None = None, kind: Any = None, config: Any = None
) -> PreTrainedModel:
    """The tiny model called `name`, in eval mode, on the CPU; the global random state does not change.

    The weights are drawn in float32 and then cast, so bfloat16 holds the same model, rounded. `kind` is the model's
    class (by default the language model's), `config` its configuration (by default `tiny_config`).
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = config or tiny_config(name)
    kind = kind or AutoModelForCausalLM._model_mapping[type(config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = kind._from_config(config, attn_implementation=attn, dtype=torch.float32)
    return model.to(dtype or torch.float32).eval()


def tiny_config(name: str) -> PreTrainedConfig:
    """The configuration of a tiny model: 2 layers, 64 dimensions, 4 heads of 16 (2 key-value heads if grouped)."""
    from transformers import Gemma2Config, Gemma3TextConfig, GemmaConfig, GPT2Config, LlamaConfig

    shared = {
        "vocab_size": len(_vocabulary()[0]), "initializer_range": 0.2,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    if name == "tiny-gpt2":
        return GPT2Config(
            n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            summary_first_dropout=0.0, **shared,
        )  # fmt: skip
    layers = ["sliding_attention", "full_attention"]
    local_and_global = {"layer_types": layers, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
    kind, own = {
        "tiny-gemma": (GemmaConfig, {}),
        "tiny-gemma2": (Gemma2Config, local_and_global),
        "tiny-gemma3": (Gemma3TextConfig, local_and_global),
        "tiny-llama": (LlamaConfig, {"tie_word_embeddings": True}),
    }[name]
    return kind(
        max_position_embeddings=CONTEXT, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_dropout=0.0, **shared, **own,
    )  # fmt: skip


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a fixed vocabulary: any text can be encoded and decoded without a change.

    Common English words are one token (with the space before them), everything else is single bytes. There are pad,
    eos and bos tokens and, as in GPT-2 and Gemma, no mask token; none is added around a text. Pads go on the right.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary, merges = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    pad, eos, bos = _SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, bos_token=bos, padding_side="right",
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens in id order, and the merges that build each whole word from left to right (" the" = Ġ+t, Ġt+h, Ġth+e)."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = dict.fromkeys([*_SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())])  # in order, without repeats
    merges: list[tuple[str, str]] = []
    for word in ["The", *(f"Ġ{word}" for word in _WHOLE_WORDS)]:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens[word[:end]] = None
                merges.append((word[: end - 1], word[end - 1]))
    return list(tokens), merges
