"""Planted leaks: small models whose outputs depend on later tokens, each in its own way; and models without leaks."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from labkit import gpt, masks
from labkit.gpt import GPT, GPTConfig
from labkit.models.tiny import TINY_NAMES, tiny_config

VOCABULARY, CONTEXT = 61, 32


def small_config(**changes) -> GPTConfig:
    usual = {"vocab_size": VOCABULARY, "context": CONTEXT, "width": 32, "layers": 2, "heads": 2}
    return GPTConfig(**usual | changes)


class Small(GPT):
    """A GPT of two layers, which the planted models change."""

    def __init__(self, **changes):
        super().__init__(small_config(**changes))


class OwnMask(Small):
    """A mistake in the mask: this GPT puts `wrong` in force, whatever mask its caller asks for."""

    def __init__(self, wrong: masks.Mask, **changes):
        super().__init__(**changes)
        self.wrong = wrong

    def forward(self, ids, mask=None, cache=None):
        return super().forward(ids, self.wrong, cache)


def no_mask(**changes) -> GPT:
    """The mask was forgotten."""
    return OwnMask(masks.bidirectional(), **changes)


def one_to_the_right(**changes) -> GPT:
    """`k < q + 2` for `k < q + 1`: a window of two back that reaches one token ahead."""
    return OwnMask(masks.sliding_window(2, causal=False), **changes)


def one_cell(**changes) -> GPT:
    """One wrong entry in a mask that was written by hand: position 3 attends to token 5."""
    cells = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
    cells[3, 5] = True
    return OwnMask(masks.from_dense(cells), **changes)


def one_layer(layer: int, **changes) -> GPT:
    """One layer was copied from an encoder and attends to everything; the others are causal."""
    model = Small(**changes)
    model.h[layer].attn.register_forward_pre_hook(lambda attention, args: (args[0], None, *args[2:]))
    return model


class FiniteMask(Small):
    """The future's scores are lowered by a number, in attention written out by hand: `scores + value` for -inf."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def _may_attend(self, mask, ids, past, as_cells=False):
        n = ids.size(1)
        return torch.zeros(n, n, dtype=self.wte.weight.dtype).masked_fill(torch.ones(n, n).bool().triu(1), self.value)


class ForgetfulInTraining(Small):
    """Two code paths: the one with dropout, which only training takes, was written without the mask."""

    def forward(self, ids, mask=gpt.CAUSAL, cache=None):
        dropping = self.training and self.config.dropout > 0
        return super().forward(ids, masks.bidirectional() if dropping else mask, cache)


class HintOfTheNext(Small):
    """A feature computed from the labels by mistake: each position gets the id of its next token modulo 7."""

    def _embed(self, ids, past):
        hint = F.pad(ids[:, 1:] % 7, (0, 1))
        return super()._embed(ids, past) + F.one_hot(hint, self.config.width)


class BatchNormOverTime(Small):
    """Batch norm over the positions: in evaluation it uses running averages, in training the text's own."""

    def __init__(self, **changes):
        super().__init__(**changes)
        self.norm = nn.BatchNorm1d(self.config.width)

    def _embed(self, ids, past):
        return self.norm(super()._embed(ids, past).transpose(1, 2)).transpose(1, 2)


class ShiftedLabels(GPT2LMHeadModel):
    """Its loss compares position i with token i + `shift`, which is 1 in transformers' own loss."""

    shift = 1

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if labels is not None:
            n, ahead, back = labels.size(1), max(0, self.shift), max(0, -self.shift)
            out.loss = F.cross_entropy(
                out.logits[:, back : n - ahead].flatten(0, 1), labels[:, ahead : n - back].flatten()
            )
        return out


def shifted_labels(by: int) -> type:
    """0: the shift is missing. 2: the data loader shifts, and the loss again. -1: shifted the wrong way."""
    return type("ShiftedLabels", (ShiftedLabels,), {"shift": by})


class LabelsInTheInput(GPT2LMHeadModel):
    """The labels are embedded and added to the input, as if they were known when the model is used."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        if labels is None:
            return super().forward(input_ids, **kwargs)
        table = self.transformer.wte
        embeds = table(input_ids) + table(labels.clamp(min=0)) * (labels >= 0)[..., None]
        return super().forward(inputs_embeds=embeds, labels=labels, **kwargs)


def unshifted_loss(logits, ids):
    """A training loop's loss that forgot the shift."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def change_masks(model: nn.Module, change, layers: tuple[int, ...] | None = None) -> nn.Module:
    """Eager attention of a transformers model gets `change(mask)` for its mask, in these layers or in all."""

    def hook(module, args, kwargs):
        mask = kwargs["attention_mask"]
        return args, kwargs | {"attention_mask": None if mask is None else change(mask)}

    for i, attention in enumerate(attentions_of(model)):
        if layers is None or i in layers:
            attention.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def clamp_masks(model: nn.Module, value: float, layers: tuple[int, ...] | None = None) -> nn.Module:
    """A "numerically safe" mask: no entry below `value`."""
    return change_masks(model, lambda mask: mask.clamp(min=value), layers)


def attentions_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


class WithFeature(Small):
    """A feature computed from all embeddings, (batch, seq, width), is added to them."""

    def __init__(self, feature, **changes):
        super().__init__(**changes)
        self.feature = feature

    def _embed(self, ids, past):
        x = super()._embed(ids, past)
        return x + self.feature(x)


def mean_of_the_text(**changes) -> GPT:
    """A "summary" of the whole text is added to every embedding; no attention is at fault."""
    return WithFeature(lambda x: x.mean(1, keepdim=True), **changes)


def block_means(x: torch.Tensor, size: int) -> torch.Tensor:
    """(batch, seq, width): the mean of the block that a position is in, 0 in a last block that is not full."""
    full = x.size(1) // size * size
    means = x[:, :full].unflatten(1, (-1, size)).mean(2, keepdim=True).expand(-1, -1, size, -1).flatten(1, 2)
    return F.pad(means, (0, 0, 0, x.size(1) - full))


def first_of_the_next_block(x: torch.Tensor, size: int) -> torch.Tensor:
    """Only the last position of a block depends on a later token, the first of the next block."""
    at_the_end = torch.arange(x.size(1)) % size == size - 1
    return F.pad(x[:, 1:], (0, 0, 0, 1)) * at_the_end[:, None]


def mean_of_the_rest(x: torch.Tensor, size: int) -> torch.Tensor:
    """Full blocks are right; the positions after them depend on all of those."""
    full = x.size(1) // size * size
    rest = x[:, full:]
    return torch.cat([torch.zeros_like(x[:, :full]), rest.mean(1, keepdim=True).expand_as(rest)], dim=1)


BLOCK_LEAKS = {
    "own block, if it is full": block_means,
    "first token of the next block": first_of_the_next_block,
    "last block, if it is not full": mean_of_the_rest,
    "texts of whole blocks": lambda x, size: x.mean(1, keepdim=True) * (x.size(1) % size == 0),
}


class MaskArgument(Small):
    """Causal only if `is_causal(attention_mask)`: one of the ways through the code has lost the mask."""

    def __init__(self, is_causal, **changes):
        super().__init__(**changes)
        self.is_causal = is_causal

    def forward(self, ids, attention_mask=None):
        causal = self.is_causal(self, attention_mask)
        return super().forward(ids, masks.causal() if causal else masks.bidirectional())


class PositionsFromTheEnd(Small):
    """Positions are counted from the last real token, so that the first position depends on how many follow."""

    def forward(self, ids, attention_mask=None):
        self.real = torch.ones_like(ids) if attention_mask is None else attention_mask
        return super().forward(ids)

    def _embed(self, ids, past):
        return self.wte(ids) + self.wpe((self.real.sum(1, keepdim=True) - torch.arange(ids.size(1))).clamp(min=0))


class ReturnsWeights(Small):
    """The way through the code that also returns the weights was written without the mask."""

    def forward(self, ids, return_weights: bool = False):
        if not return_weights:
            return super().forward(ids)
        return super().forward(ids, masks.bidirectional()), self.attentions(ids)


class Remembers(Small):
    """What was computed in the last call is added to the embeddings of this one."""

    last = 0.0

    def _embed(self, ids, past):
        x, last = super()._embed(ids, past), self.last
        self.last = x.mean((0, 1))
        return x + last


class Routed(Small):
    """A GPT whose MLPs are routers, each with four linear experts."""

    def __init__(self, router, **changes):
        super().__init__(**changes)
        for block in self.h:
            block.mlp = router(self.config.width)


class SequenceRouter(nn.Module):
    """The mean of all states of a text selects one expert for the whole text."""

    def __init__(self, width: int):
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 4), nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        chosen = self.gate(x.mean(1)).argmax(-1).tolist()
        return torch.stack([self.experts[k](row) for k, row in zip(chosen, x, strict=True)])


class CapacityByScore(SequenceRouter):
    """Each token selects an expert; a full expert keeps the tokens with the highest scores, wherever they are."""

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).max(-1)
        return sum(
            ((chosen == k) & self.kept(chosen == k, scores))[..., None] * scores[..., None] * expert(x)
            for k, expert in enumerate(self.experts)
        )

    def kept(self, mine, scores):
        best = scores.masked_fill(~mine, -1.0).topk(max(1, mine.size(1) // 2), dim=1).indices
        return torch.zeros_like(mine).scatter(1, best, True)


class CapacityByPosition(CapacityByScore):
    """Causal: a full expert keeps the tokens that come first."""

    def kept(self, mine, scores):
        return mine.cumsum(1) <= max(1, mine.size(1) // 2)


class GatheredExperts(SequenceRouter):
    """Causal: an expert computes only the tokens that selected it, so that its rounding depends on their number."""

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            out[chosen == k] = expert(x[chosen == k])
        return scores[..., None] * out


class SoftmaxOverTheBatch(nn.Module):
    """`softmax(0)` for `softmax(-1)`: attention weights are shared out among the rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48)

    def forward(self, input_ids):
        q, k, v = self.qkv(self.embed(input_ids)).chunk(3, -1)
        future = torch.ones(input_ids.size(1), input_ids.size(1)).triu(1).bool()
        return (q @ k.transpose(1, 2)).masked_fill(future, -torch.inf).softmax(0).nan_to_num() @ v


class BatchFirstForgotten(nn.Module):
    """The encoder takes (seq, batch, width) and is given (batch, seq, width): each column attends to itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.encode = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 1)

    def forward(self, input_ids):
        return self.encode(self.embed(input_ids))


def misalign_after_a_cache(model: nn.Module, change) -> nn.Module:
    """The mask is `change(mask)` where there are more keys than queries."""
    return change_masks(model, lambda mask: change(mask) if mask.size(-1) > mask.size(-2) else mask)


def projections_of_zeros() -> GPT:
    """Nothing comes out of its attention, whatever its mask."""
    model = no_mask()
    for block in model.h:
        nn.init.zeros_(block.attn.c_proj.weight)
    return model


class Recurrent(nn.Module):
    """No attention at all: an LSTM reads from left to right, a bidirectional one both ways."""

    def __init__(self, both_ways: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.read = nn.LSTM(16, 16, batch_first=True, bidirectional=both_ways)

    def forward(self, input_ids):
        return self.read(self.embed(input_ids))[0]


# -- honest ones -------------------------------------------------------------------------------------------------------


def honest_model(seed: int) -> nn.Module:
    """A causal model in eval mode: its family goes round with the seed; depth, windows and dropout are random."""
    rng, name = random.Random(seed), (None, *TINY_NAMES)[seed % 6]
    layers, dropout = rng.randint(1, 4), rng.choice((0.0, 0.1, 0.5))
    torch.manual_seed(seed)
    if name is None:
        shape = {"layers": layers, "heads": rng.choice((1, 2, 4)), "dropout": dropout, "attention_dropout": dropout}
        honest_mask = rng.choice((masks.causal(), masks.prefix(0), masks.sliding_window(rng.randint(2, 8))))
        return rng.choice((OwnMask(honest_mask, **shape), GPT(small_config(**shape)))).eval()
    config = tiny_config(name)
    config.update({"num_hidden_layers": layers, "max_position_embeddings": CONTEXT, "initializer_range": 0.05})
    dropouts = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")
    config.update({field: dropout for field in dropouts if hasattr(config, field)})
    if name in ("tiny-gemma2", "tiny-gemma3"):
        config.layer_types = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
        config.sliding_window = rng.randint(2, 8)
    attn = "eager" if name == "tiny-gemma2" else rng.choice(("eager", "sdpa"))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32).eval()


class SelfAttention(nn.Module):
    """Its mask is an argument, or its state for as long as the model runs."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.n_head, self.mask = heads, None
        self.qkv, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask if mask is None else mask)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class HomeMade(nn.Module):
    """`through(attentions, x, mask)` runs the attention modules; `mask`, (batch, 1, n, n), hides padding alone."""

    def __init__(self, through, *attentions):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(100, 32), nn.Embedding(70, 32)
        self.through, self.attentions = through, nn.ModuleList(attentions)

    def forward(self, input_ids, attention_mask=None):
        batch, n = input_ids.shape
        mask = torch.ones(batch, 1, n, n, dtype=torch.bool)
        if attention_mask is not None:
            mask = (mask & attention_mask.bool()[:, None, None, :]) | torch.eye(n, dtype=torch.bool)
        return self.through(self.attentions, self.tokens(input_ids) + self.positions(torch.arange(n)), mask)


class OwnAttention(nn.Module):
    """Attention of one's own: `scores(q, k)`, a finite mask as many have it, and `weights(scores)`."""

    def __init__(self, mask=-1e9, scores=lambda q, k: q @ k.mT / 4, weights=lambda scores: scores.softmax(-1)):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.mask, self.scores, self.weights = mask, scores, weights

    def forward(self, query, key=None, value=None, bias=None):
        q, k, v = self.q(query), self.k(query if key is None else key), self.v(query if value is None else value)
        future = torch.ones(q.size(1), q.size(1)).triu(1).bool()
        return self.weights(self.scores(q, k).masked_fill(future, self.mask)) @ v


class ByHand(nn.Sequential):
    """Two layers of `OwnAttention`; `call(attention, x)` is how a layer calls its attention."""

    def __init__(self, call=lambda attention, x: attention(x), **options):
        super().__init__(nn.Embedding(50, 16), OwnAttention(**options), OwnAttention(**options))
        self.call = call

    def forward(self, input_ids):
        embed, *layers = self
        x = embed(input_ids)
        for layer in layers:
            x = x + self.call(layer, x)
        return x
