"""One vector for a sequence: the ways to pool the states of its tokens. Padding never enters.

first, last       the state of the first or the last real token. Under a causal mask the first has seen nothing.
mean              the mean over the real tokens
weighted_mean     the mean weighted by position, 1 for the first real token, 2 for the next, ...: later tokens of a
                  causal model have seen more (Muennighoff 2022, SGPT)
attention_query   one learned probe per head looks at the states: probe = query (Lee et al. 2019, pooling by
                  multi-head attention; "Attention-Q" of the Gemma Encoder, arXiv 2503.02656)
attention_kv      the states look at learned probes: probe = keys and values; then the mean (the latent attention of
                  NV-Embed, arXiv 2405.17428; "Attention-KV" of the Gemma Encoder)
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.errors import HeadError

POOLINGS = ("first", "last", "mean", "weighted_mean", "attention_query", "attention_kv")
PROBES = 64  # learned keys and values of attention_kv


def make_pooling(name: str, width: int, heads: int = 1) -> nn.Module:
    """A module `(states (batch, seq, width), attention_mask (batch, seq)) -> (batch, width)`.

    Raises:
        HeadError: a width that the heads do not divide.
    """
    if not name.startswith("attention"):
        return PlainPooling(name)
    if width % heads:
        raise HeadError(f"{heads} pooling heads do not divide the width {width}")
    return AttentionPooling(width, heads, probe="query" if name == "attention_query" else "kv")


class PlainPooling(nn.Module):
    """A fixed weighted mean of the states; nothing is learned."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(
        self, states: Float[Tensor, "batch seq width"], attention_mask: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch width"]:
        real = attention_mask.to(torch.long)
        order = real.cumsum(-1) * real  # 1 for the first real token, 2 for the next; 0 for padding; either side
        weights = {
            "first": order == 1,
            "last": (order == order.amax(-1, keepdim=True)) & (order > 0),
            "mean": order > 0,
            "weighted_mean": order,
        }[self.name].to(torch.float32)  # in float16 the sum of positions overflows at 362 tokens
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1)
        return torch.einsum("bs,bsw->bw", weights, states.float()).to(states.dtype)


class AttentionPooling(nn.Module):
    """Multi-head attention between the states and learned probes, with an output projection.

    `probe="query"`: one probe asks, the states answer: (batch, 1, width). `probe="kv"`: every state asks, `PROBES`
    probes answer, and the answers are averaged over the real tokens.
    """

    def __init__(self, width: int, heads: int, probe: str):
        super().__init__()
        self.heads, self.asks = heads, probe == "query"
        self.probe = nn.Parameter(torch.randn(1 if self.asks else PROBES, width))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(
        self, states: Float[Tensor, "batch seq width"], attention_mask: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch width"]:
        probes = self.probe.to(states.dtype).expand(len(states), -1, -1)  # (batch, probes, width)
        asking, answering = (probes, states) if self.asks else (states, probes)
        q, k, v = self._split(self.query(asking)), self._split(self.key(answering)), self._split(self.value(answering))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).float()  # (batch, head, asking, answering)
        if self.asks:
            scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(scores.dtype).min)
        mixed = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)  # (batch, asking, width)
        if self.asks:
            return self.out(mixed[:, 0])
        return PlainPooling("mean")(self.out(mixed), attention_mask)

    def _split(self, x: Float[Tensor, "batch seq width"]) -> Float[Tensor, "batch head seq part"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
