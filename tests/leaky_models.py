"""Planted leaks: small models in which the future gets in, each in its own way; and honest ones, of random shape."""

from __future__ import annotations

import random
from types import MethodType

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
)

from labkit import gpt, masks
from labkit.gpt import GPT, GPTConfig

VOCABULARY, CONTEXT = 61, 32


def small_config(**changes) -> GPTConfig:
    usual = {"vocab_size": VOCABULARY, "context": CONTEXT, "width": 32, "layers": 2, "heads": 2}
    return GPTConfig(**usual | changes)


class OwnMask(GPT):
    """A mistake in the mask: this GPT puts `wrong` in force, whatever mask its caller asks for."""

    def __init__(self, config: GPTConfig, wrong: masks.Mask):
        super().__init__(config)
        self.wrong = wrong

    def forward(self, ids, mask=None, cache=None):
        return super().forward(ids, self.wrong, cache)


def no_mask(**changes) -> GPT:
    """Somebody forgot the mask."""
    return OwnMask(small_config(**changes), masks.bidirectional())


def one_to_the_right(**changes) -> GPT:
    """`k < q + 2` for `k < q + 1`: a window of two back that reaches one token ahead."""
    return OwnMask(small_config(**changes), masks.sliding_window(2, causal=False))


def one_cell(**changes) -> GPT:
    """One wrong entry in a mask that was written by hand: position 3 sees token 5."""
    cells = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
    cells[3, 5] = True
    return OwnMask(small_config(**changes), masks.from_dense(cells))


class OneLayer(GPT):
    """A layer that was copied from an encoder: causal but for one of its layers, which looks at everything."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config)
        attention = self.h[layer].attn
        attention.forward = MethodType(_without_mask, attention)


def _without_mask(attention, x, may_attend, *rest):
    return type(attention).forward(attention, x, None, *rest)


class FiniteMask(GPT):
    """The future's scores are lowered by a number, in attention written out by hand: `scores + value` for -inf."""

    def __init__(self, config: GPTConfig, value: float):
        super().__init__(config)
        self.value = value

    def _may_attend(self, mask, ids, past, as_cells=False):
        n = ids.size(1)
        return torch.zeros(n, n, dtype=self.wte.weight.dtype).masked_fill(torch.ones(n, n).bool().triu(1), self.value)


class ForgetfulInTraining(GPT):
    """Two code paths: the one with dropout, which only training takes, was written without the mask."""

    def forward(self, ids, mask=gpt.CAUSAL, cache=None):
        dropping = self.training and self.config.dropout > 0
        return super().forward(ids, masks.bidirectional() if dropping else mask, cache)


class MeanOfTheText(GPT):
    """A "summary" of the whole text is added to every embedding; no attention is at fault."""

    def _embed(self, ids, past):
        x = super()._embed(ids, past)
        return x + x.mean(1, keepdim=True)


class HintOfTheNext(GPT):
    """A feature computed from the labels by mistake: each position is told its next token's id modulo 7."""

    def _embed(self, ids, past):
        hint = F.pad(ids[:, 1:] % 7, (0, 1))
        return super()._embed(ids, past) + F.one_hot(hint, self.config.width)


class NormOverTime(GPT):
    """A norm over the wrong axis: each feature is standardised over the positions, future ones included."""

    def _embed(self, ids, past):
        x = super()._embed(ids, past)
        return F.layer_norm(x.transpose(1, 2), (x.size(1),)).transpose(1, 2)


class BatchNormOverTime(GPT):
    """Batch norm over the positions: in evaluation it uses running averages, in training the text's own."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.width)

    def _embed(self, ids, past):
        return self.norm(super()._embed(ids, past).transpose(1, 2)).transpose(1, 2)


class UnshiftedLabels(GPT2LMHeadModel):
    """Its loss compares position i with token i: the shift, which transformers does inside the loss, is missing."""

    shift = 0

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if labels is not None:
            named = out.logits[:, : labels.size(1) - self.shift]
            out.loss = F.cross_entropy(named.flatten(0, 1).float(), labels[:, self.shift :].flatten())
        return out


class TwiceShiftedLabels(UnshiftedLabels):
    """The data loader shifts the labels, and the loss shifts them again."""

    shift = 2


class LaterLabels(UnshiftedLabels):
    """Shifted the wrong way: position i must name token i - 1, which it has already seen."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = GPT2LMHeadModel.forward(self, input_ids, **kwargs)
        if labels is not None:
            out.loss = F.cross_entropy(out.logits[:, 1:].flatten(0, 1).float(), labels[:, :-1].flatten())
        return out


def unshifted_loss(logits, ids):
    """A training loop's loss that forgot the shift."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def clamp_masks(model: nn.Module, value: float, layers: tuple[int, ...] | None = None) -> nn.Module:
    """A "numerically safe" mask in a transformers model on eager attention: no entry below `value`."""
    for i, attention in enumerate(attentions_of(model)):
        if layers is None or i in layers:
            attention.register_forward_pre_hook(_Clamp(value), with_kwargs=True)
    return model


class _Clamp:
    def __init__(self, value: float):
        self.value = value

    def __call__(self, module, args, kwargs):
        mask = kwargs["attention_mask"]
        return args, kwargs | {"attention_mask": None if mask is None else mask.clamp(min=self.value)}


def unmask_layer(model: nn.Module, layer: int) -> nn.Module:
    """One layer of a transformers model on eager attention drops the mask that it is handed."""
    return clamp_masks(model, 0.0, (layer,))


def attentions_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


# -- honest ones -------------------------------------------------------------------------------------------------------

FAMILIES = ("GPT", "gpt2", "gemma", "gemma2", "gemma3", "llama")


def honest_model(seed: int) -> nn.Module:
    """A causal model in eval mode: its family goes round with the seed, all the rest is drawn from it."""
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    heads, layers = rng.choice((1, 2, 4)), rng.randint(1, 4)
    attention_dropout, dropout = rng.choice((0.0, 0.1)), rng.choice((0.0, 0.1, 0.5))
    torch.manual_seed(seed)
    if family == "GPT":
        config = small_config(layers=layers, heads=heads, dropout=dropout, attention_dropout=attention_dropout)
        honest_mask = rng.choice((masks.causal(), masks.prefix(0), masks.sliding_window(rng.randint(2, 8))))
        return rng.choice((OwnMask(config, honest_mask), GPT(config), GPT(config, naive=True))).eval()
    spread, special = rng.choice((0.02, 0.2)), {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=layers, n_head=heads, resid_pdrop=dropout,
            embd_pdrop=dropout, attn_pdrop=attention_dropout, initializer_range=spread, **special,
        )  # fmt: skip
    else:
        shape = {
            "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "hidden_size": 32, "intermediate_size": 48,
            "head_dim": 8, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": rng.choice((1, heads)), "attention_dropout": attention_dropout,
            "initializer_range": spread,
        }  # fmt: skip
        if family in ("gemma2", "gemma3"):
            kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
            shape |= {"layer_types": kinds, "sliding_window": rng.randint(2, 8), "query_pre_attn_scalar": 8}
        makers = {"gemma": GemmaConfig, "gemma2": Gemma2Config, "gemma3": Gemma3TextConfig, "llama": LlamaConfig}
        config = makers[family](**shape, **special)
    attn = "eager" if family == "gemma2" else rng.choice(("eager", "sdpa"))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32).eval()


class ByHand(nn.Module):
    """Two layers of attention of one's own: `scores(q, k)`, a mask of -1e9 as many have it, and `weights(scores)`."""

    class OwnAttention(nn.Module):
        def __init__(self, scores, weights):
            super().__init__()
            self.qkv, self.scores, self.weights = nn.Linear(16, 48), scores, weights

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            future = torch.ones(x.size(1), x.size(1)).triu(1).bool()
            return self.weights(self.scores(q, k).masked_fill(future, -1e9)) @ v

    def __init__(self, scores=lambda q, k: q @ k.transpose(1, 2) / 4, weights=lambda scores: scores.softmax(-1)):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(self.OwnAttention(scores, weights) for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x
