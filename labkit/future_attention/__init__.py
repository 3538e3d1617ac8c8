"""Future Attention: a decoder that predicts what attention to the future would have given it, and never attends to it.

    model = FutureGPT(GPTConfig(...), Future(dim=50))
    objective = FutureLoss("cosine")
    with model.watched() as seen:                          # one Seen for each layer that has future columns
        loss = model.loss(ids, targets)                    # of the next token, as in labkit.gpt
        loss = loss + objective.weight * objective(seen)

A query at position i scores the keys of positions 0..i as always, and beside them up to `dim` learned columns that
stand for the positions i+1..i+dim. One softmax runs over both, and the output is the sum of both contributions. No
column is made of a later token, so the model stays causal.

The columns of a position end with the context, not with the text: how long a text is would tell a position about its
future, and a cached state would depend on what came later.

`FutureLoss` compares the predicted contribution of the future with the true one: that of attention with the same
queries, keys and values, without the mask for `dim` positions ahead. It is a target: no gradient flows into it. There
are two definitions of it:

    "joint"        the future's part of one softmax over past and future; predicted: the columns' part of the softmax.
    "difference"   full attention minus causal attention; predicted: the block's output minus causal attention.

The arms of a comparison are in `labkit.future_attention.arms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from labkit import masks
from labkit.errors import MaskError, ModelError
from labkit.gpt import CAUSAL, GPT, Attention, GPTConfig
from labkit.masks import Mask

SOURCES = ("position", "tokens", "memory")
LOSSES = ("mse", "cosine", "infonce", "kl")
TARGETS = ("joint", "difference")
RANK = 16  # channels of the columns from "tokens"
TEMPERATURE = 0.1  # of "infonce", on cosine similarities

Contribution = Float[Tensor, "batch heads seq width"]


@dataclass(frozen=True)
class Future:
    """Which columns there are beside the past, and where their keys and values come from. Raises ModelError.

    Attributes:
        dim: how many positions ahead have a column; of `memory`: how many slots there are.
        source: "position": free keys and values for every absolute position, as the idea was first tried.
            "tokens": made from the state of the position that asks, times a free vector for each distance ahead, in
            RANK channels. "memory": slots that every position attends to, which stand for nothing: a control, known
            as persistent-memory attention (Sukhbaatar et al. 2019).
        layers: which layers have columns; None: all.
    """

    dim: int = 50
    source: str = "position"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ModelError(f"future_dim is {self.dim}: give a whole number from 1")
        if self.source not in SOURCES:
            raise ModelError(f"there are no columns from {self.source!r}; there are {', '.join(SOURCES)}")


@dataclass(frozen=True)
class Seen:
    """What one layer computed: contributions (batch, heads, seq, head width) before the heads are joined.

    Attributes:
        query, key, value: of the layer, (batch, heads, seq, head width); the query is divided by sqrt(head width).
        past, future: the two parts of the output; `past + future` is what goes on.
        past_weights: (batch, heads, seq, past). future_weights: (batch, heads, seq, columns), the rest of the softmax.
        causal: what causal attention alone would have given: `past`, its weights scaled to sum to 1.
        dim, source: as in `Future`.
    """

    query: Contribution
    key: Float[Tensor, "batch heads past width"]
    value: Float[Tensor, "batch heads past width"]
    past: Contribution
    future: Contribution
    past_weights: Float[Tensor, "batch heads seq past"]
    future_weights: Float[Tensor, "batch heads seq columns"]
    dim: int
    source: str

    @property
    def scores(self) -> Float[Tensor, "batch heads seq past"]:
        """Of every query with every key, before any mask; no gradient flows through it."""
        return self.query.detach() @ self.key.detach().transpose(-2, -1)

    @property
    def causal(self) -> Contribution:
        return self.past / self.past_weights.sum(-1, keepdim=True)


def predicted(dim: int) -> Mask:
    """The cells (i, j) with i < j <= i + dim."""
    cells = masks.sliding_window(dim + 1, causal=False) & ~masks.causal()
    return replace(cells, name=f"predicted({dim})", meaning=f"the next {dim} after itself, and nothing else")


def true_weights(scores: Float[Tensor, "batch heads seq seq"], dim: int) -> Float[Tensor, "batch heads seq seq"]:
    """The weights of attention to the past and to `dim` positions ahead: one softmax over both."""
    open_cells = (masks.causal() | predicted(dim)).dense(scores.size(-1), device=scores.device)
    return scores.masked_fill(~open_cells, -torch.inf).softmax(-1)


# -- the columns: `visible` gives bool (seq, columns), which columns the positions from `start` have; `scores` takes
# -- queries (divided by sqrt(head width) already) to (batch, heads, seq, columns); `mix` takes such weights to
# -- (batch, heads, seq, head width)


class Free(nn.Module):
    """A free key and value for each column: the positions of the context, or the slots of a memory."""

    def __init__(self, config: GPTConfig, future: Future):
        super().__init__()
        self.heads, self.context, self.dim = config.heads, config.context, future.dim
        self.by_position = future.source == "position"
        count = config.context if self.by_position else future.dim
        self.key, self.value = (nn.Parameter(0.02 * torch.randn(count, config.width)) for _ in range(2))

    def visible(self, start: int, seq: int, device) -> Tensor:
        if not self.by_position:
            return torch.ones(seq, self.dim, dtype=torch.bool, device=device)
        ahead = torch.arange(self.context, device=device) - torch.arange(start, start + seq, device=device)[:, None]
        return (ahead > 0) & (ahead <= self.dim)  # (seq, context)

    def scores(self, query: Tensor, x: Tensor) -> Tensor:
        return query @ self.key.unflatten(1, (self.heads, -1)).permute(1, 2, 0)  # @ (heads, head width, columns)

    def mix(self, weights: Tensor, x: Tensor) -> Tensor:
        return weights @ self.value.unflatten(1, (self.heads, -1)).transpose(0, 1)  # @ (heads, columns, head width)


class FromTokens(nn.Module):
    """Key and value of (i, i + d): W (e_d * c_i), with c_i = 1 + A x_i of the position that asks, e_d of the distance.

    So the columns cost RANK numbers per distance, and no tensor of size seq x dim x width is ever made: a score is
    (W^T q_i * c_i) . e_d.
    """

    def __init__(self, config: GPTConfig, future: Future):
        super().__init__()
        self.heads, self.context, self.dim = config.heads, config.context, future.dim
        self.content = nn.Linear(config.width, RANK, bias=False)
        nn.init.normal_(self.content.weight, std=0.02)
        self.key, self.value = (nn.Parameter(0.02 * torch.randn(config.width, RANK)) for _ in range(2))
        # not as small as GPT-2's weights are at the beginning: with all factors small, none would learn
        self.key_ahead, self.value_ahead = (nn.Parameter(torch.randn(future.dim, RANK)) for _ in range(2))

    def visible(self, start: int, seq: int, device) -> Tensor:
        at = torch.arange(start, start + seq, device=device)[:, None]
        return at + torch.arange(1, self.dim + 1, device=device) < self.context  # (seq, dim)

    def scores(self, query: Tensor, x: Tensor) -> Tensor:
        return (query @ self.key.unflatten(0, (self.heads, -1)) * self._content(x)) @ self.key_ahead.T

    def mix(self, weights: Tensor, x: Tensor) -> Tensor:
        value = self.value.unflatten(0, (self.heads, -1))  # (heads, head width, rank)
        return (weights @ self.value_ahead * self._content(x)) @ value.transpose(-2, -1)

    def _content(self, x: Tensor) -> Float[Tensor, "batch 1 seq rank"]:
        return 1 + self.content(x)[:, None]


# -- the block and the model -------------------------------------------------------------------------------------------


class FutureAttention(Attention):
    """Multi-head causal attention with columns beside the past: one softmax over both, their contributions added.

    `watching` is a list that gets a `Seen` per call, or None.
    """

    def __init__(self, config: GPTConfig, future: Future):
        super().__init__(config)
        self.future = future
        self.columns = FromTokens(config, future) if future.source == "tokens" else Free(config, future)
        self.watching = None

    def forward(self, x: Tensor, may_attend, attend, cache: DynamicCache | None, layer: int) -> Tensor:
        return super().forward(x, may_attend, partial(self._attend, x), cache, layer)

    def _attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, may_attend, dropout: float) -> Contribution:
        seq, total = query.size(2), key.size(2)
        past_cells = torch.ones(seq, total, dtype=torch.bool, device=x.device).tril(total - seq)
        cells = torch.cat([past_cells, self.columns.visible(total - seq, seq, x.device)], dim=-1)
        query = query / math.sqrt(query.size(-1))
        scores = torch.cat([query @ key.transpose(-2, -1), self.columns.scores(query, x)], dim=-1)
        scores.masked_fill_(~cells, -torch.inf)  # (batch, heads, seq, total + columns)
        weights = scores.softmax(-1)  # over both at once
        used = F.dropout(weights, dropout)
        past, future = used[..., :total] @ value, self.columns.mix(used[..., total:], x)
        if self.watching is not None:
            parts = (weights[..., :total], weights[..., total:])
            self.watching.append(Seen(query, key, value, past, future, *parts, self.future.dim, self.future.source))
        return past + future


class FutureGPT(GPT):
    """`labkit.gpt.GPT` with Future Attention in some or all of its layers. It is causal, and takes no other mask."""

    def __init__(self, config: GPTConfig, future: Future | None = None):
        future = future or Future()
        if future.source != "memory" and future.dim >= config.context:
            most = config.context - 1
            raise ModelError(f"future_dim is {future.dim}: in this context a position has at most {most} others ahead")
        layers = _checked_layers(future.layers, config.layers)
        super().__init__(config)
        self.future, self.future_layers, self.watching = future, layers, None
        for block in (self.h[layer] for layer in layers):
            attention = FutureAttention(config, future)
            attention.load_state_dict(block.attn.state_dict(), strict=False)  # as a GPT of this seed begins
            block.attn = attention

    def hidden(self, ids: Int[Tensor, "batch seq"], mask: Mask = CAUSAL, cache: DynamicCache | None = None) -> Tensor:
        if self.watching is not None:
            self.watching.clear()
        if mask != CAUSAL:
            raise MaskError(f"Future Attention is causal by definition; it cannot be run under {mask}")
        return super().hidden(ids, mask, cache)

    def attentions(self, ids: Int[Tensor, "batch seq"], mask: Mask = CAUSAL) -> Tensor:
        """Raises ModelError: layers differ in their columns, so there is no one tensor; see `watched`."""
        raise ModelError("use `with model.watched() as seen: model(ids)`; each layer's weights are in `seen`")

    @contextmanager
    def watched(self) -> Iterator[list[Seen]]:
        """A list that holds, after a forward pass, a `Seen` of each layer with columns, from the lowest up."""
        watchers = [self, *(self.h[layer].attn for layer in self.future_layers)]
        layers: list[Seen] = []
        try:
            for watcher in watchers:
                watcher.watching = layers
            yield layers
        finally:
            for watcher in watchers:
                watcher.watching = None

    @classmethod
    def from_gpt(cls, model: nn.Module, future: Future | None = None) -> FutureGPT:
        """Begin with the weights of a `labkit.gpt.GPT` or of transformers' GPT-2; only the columns are new."""
        plain = model if isinstance(model, GPT) else GPT.from_transformers(model)
        made = cls(plain.config, future)
        made.load_state_dict(plain.state_dict(), strict=False)  # all but the columns
        return made.to(device=plain.wte.weight.device, dtype=plain.wte.weight.dtype).train(plain.training)

    from_transformers = from_gpt


def _checked_layers(layers: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
    """The layers themselves, or all of `count` for None."""
    if layers is None:
        return tuple(range(count))
    if not 0 < len(set(layers)) == len(layers) or not set(layers) <= set(range(count)):
        raise ModelError(f"the layers are {layers!r}: give some of 0 to {count - 1}, and none twice")
    return layers


# -- the auxiliary losses ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FutureLoss:
    """The auxiliary loss of the layers with columns, a mean over layers and over positions that have a future.

    Attributes:
        kind: "mse", mean squared error. "cosine", (1 - cosine) / 2, from 0 to 1. "infonce": which of the positions of
            its text does a predicted contribution belong to, in nats; a prediction that is the same everywhere cannot
            win it, which the first two reward. "kl": of the attention weights over the past as a whole and each
            position ahead, in nats; it teaches the keys directly, as the first three only do through the outputs.
        target: "joint" or "difference"; "kl" has weights, so the target is joint.
        weight: what it is multiplied with beside the loss of the next token, by the caller.
        layers: which of the layers with columns, counted among them from 0; None: all.
        shuffled: a control: the target is that of another text of the batch, so it tells nothing of this one.

    Raises:
        ModelError: an unknown loss or target, a weight below 0, "kl" with "difference".
    """

    kind: str = "cosine"
    target: str = "joint"
    weight: float = 1.0
    layers: tuple[int, ...] | None = None
    shuffled: bool = False

    def __post_init__(self) -> None:
        if self.kind not in LOSSES or self.target not in TARGETS:
            choices = f"{', '.join(LOSSES)} for {', '.join(TARGETS)}"
            raise ModelError(f"there is no future loss {self.kind!r} for {self.target!r}; there are {choices}")
        if self.kind == "kl" and self.target != "joint":
            raise ModelError('"kl" compares weights of one softmax: it has no target "difference"')
        if not 0 <= self.weight < math.inf:
            raise ModelError(f"the weight of the future loss is {self.weight!r}: give a number from 0")

    def __call__(self, seen: Sequence[Seen]) -> Float[Tensor, ""]:
        """The mean over the chosen layers of what `FutureGPT.watched` gives.

        Raises:
            ModelError: nothing was watched, no such layer, texts of one token, or nothing to shuffle.
        """
        if not seen or seen[0].query.size(-2) != seen[0].key.size(-2) or seen[0].query.size(-2) < 2:
            how = "inside `with model.watched() as seen:`, without a cache, on whole texts of 2 or more tokens"
            raise ModelError(f"no layer was watched that has a future: run the model {how}")
        if self.shuffled and len(seen[0].query) < 2:
            raise ModelError("one text alone cannot be given the future of another: take 2 or more in a batch")
        if self.kind == "kl" and seen[0].source == "memory":
            raise ModelError("slots of a memory stand for no position: their weights have no true counterpart")
        loss, losses = {"mse": F.mse_loss, "cosine": cosine, "infonce": infonce, "kl": kl}[self.kind], []
        for layer in [seen[number] for number in _checked_layers(self.layers, len(seen))]:
            if self.kind == "kl":
                guess, truth = _weights_by_distance(layer)
            else:
                guess, truth = predicted_contribution(layer, self.target), true_contribution(layer, self.target)
            truth = truth.roll(1, dims=0) if self.shuffled else truth
            losses.append(loss(guess[:, :, :-1], truth[:, :, :-1]))  # the last position has no future
        return torch.stack(losses).mean()


def true_contribution(seen: Seen, target: str = "joint") -> Contribution:
    """What the next `dim` positions really contribute, per head, detached; 0 at the last position."""
    with torch.no_grad():
        weights = true_weights(seen.scores, seen.dim)
        if target == "difference":
            return weights @ seen.value - seen.causal
        return weights.triu(1) @ seen.value


def predicted_contribution(seen: Seen, target: str = "joint") -> Contribution:
    """What the columns contribute instead, with its gradient."""
    return seen.future if target == "joint" else seen.past + seen.future - seen.causal


def cosine(guess: Contribution, truth: Contribution) -> Float[Tensor, ""]:
    """(1 - cosine) / 2 of each head at each position: 0 the same direction, 1 the opposite one."""
    return ((1 - F.cosine_similarity(guess, truth, dim=-1)) / 2).mean()


def infonce(guess: Contribution, truth: Contribution) -> Float[Tensor, ""]:
    """Nats to tell, by cosine similarity, the true contribution of a position from those of all others of its text.

    Source: van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding". Chance: ln(seq - 1).
    """
    similar = F.normalize(guess, dim=-1) @ F.normalize(truth, dim=-1).transpose(-2, -1)  # (batch, heads, seq, seq)
    own = torch.arange(similar.size(-1), device=similar.device).expand(similar.shape[:-1])
    return F.cross_entropy((similar / TEMPERATURE).flatten(0, -2), own.flatten())


def kl(guess: Contribution, truth: Contribution) -> Float[Tensor, ""]:
    """KL(truth || guess) of weights that sum to 1 over the last dimension, in nats."""
    log_guess = guess.clamp_min(torch.finfo(guess.dtype).tiny).log()
    return F.kl_div(log_guess, truth, reduction="none").sum(-1).mean()


def _weights_by_distance(seen: Seen) -> tuple[Tensor, Tensor]:
    """Predicted and true weights of [the past as a whole, 1 ahead, 2 ahead, ...]: 2 x (batch, heads, seq, 1 + dim)."""
    true = true_weights(seen.scores, seen.dim)
    future = _ahead(seen.future_weights, seen.dim) if seen.source == "position" else seen.future_weights
    pairs = ((seen.past_weights, future), (true.tril(), _ahead(true, seen.dim)))
    return tuple(torch.cat([past.sum(-1, keepdim=True), ahead], dim=-1) for past, ahead in pairs)


def _ahead(weights: Tensor, dim: int) -> Float[Tensor, "batch heads seq dim"]:
    """What 1, 2, ... `dim` positions ahead weigh, of weights by absolute position."""
    seq = weights.size(-2)
    at = torch.arange(seq, device=weights.device)[:, None] + torch.arange(1, dim + 1, device=weights.device)
    return F.pad(weights, (0, dim)).gather(-1, at.expand(*weights.shape[:-1], dim))
