"""How far the predicted contribution of the future is from the true one: the auxiliary losses of Future Attention.

    objective = FutureLoss("cosine", target="joint")
    with model.watched() as seen:
        loss = model.loss(ids, targets)
        loss = loss + objective.weight * objective(seen)

The true contribution is that of attention with the same queries, keys and values, without the mask for `dim` positions
ahead. It is a target: no gradient flows into it. There are two definitions of it about, and they differ:

    "joint"        the future's part of one softmax over past and future; predicted: the columns' part of the softmax.
    "difference"   full attention less causal attention; predicted: the block's output less causal attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from labkit import masks
from labkit.errors import FutureAttentionError
from labkit.future_attention import Seen, chosen_layers, predicted, true_weights

TARGETS = ("joint", "difference")
TEMPERATURE = 0.1  # of "infonce", on cosine similarities

Contribution = Float[Tensor, "batch heads seq width"]


@dataclass(frozen=True)
class FutureLoss:
    """The auxiliary loss of the layers with columns, a mean over layers and over positions that have a future.

    Attributes:
        kind: "mse", mean squared error. "cosine", (1 - cosine) / 2, from 0 to 1. "infonce": which of the positions of
            its text does a predicted contribution belong to, in nats; a prediction that is the same everywhere cannot
            win it, which the first two reward. "kl": of the attention weights over the past as a whole and each
            position ahead, in nats; it teaches the keys directly, as the first three only do through the outputs.
        target: "joint" or "difference"; "kl" has weights, so the target is joint.
        weight: what it is multiplied with beside the loss of the next token, by who adds them.
        layers: which of the layers with columns, counted among them from 0; None: all.
        shuffled: a control: the target is that of another text of the batch, so it tells nothing of this one.

    Raises:
        FutureAttentionError: an unknown loss or target, a weight below 0, "kl" with "difference".
    """

    kind: str = "cosine"
    target: str = "joint"
    weight: float = 1.0
    layers: tuple[int, ...] | None = None
    shuffled: bool = False

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise FutureAttentionError(f"there is no future loss {self.kind!r}; there are {', '.join(LOSSES)}")
        if self.target not in TARGETS:
            raise FutureAttentionError(f"there is no target {self.target!r}; there are {', '.join(TARGETS)}")
        if self.kind == "kl" and self.target != "joint":
            raise FutureAttentionError('"kl" compares weights of one softmax: it has no target "difference"')
        if self.layers is not None:
            object.__setattr__(self, "layers", chosen_layers(self.layers))
        if not 0 <= self.weight < math.inf:
            raise FutureAttentionError(f"the weight of the future loss is {self.weight!r}: give a number from 0")

    def __call__(self, seen: Sequence[Seen]) -> Float[Tensor, ""]:
        """The mean over the chosen layers of what `FutureGPT.watched` gives.

        Raises:
            FutureAttentionError: nothing was seen, no such layer, texts of one token, or nothing to shuffle.
        """
        if not seen:
            raise FutureAttentionError("no layer was watched: run the model inside `with model.watched() as seen:`")
        wrong = [layer for layer in self.layers or () if layer not in range(len(seen))]
        if wrong:
            raise FutureAttentionError(f"the loss has no layers {wrong}; there are 0 to {len(seen) - 1} with columns")
        chosen = seen if self.layers is None else [seen[layer] for layer in self.layers]
        return torch.stack([self._of(each) for each in chosen]).mean()

    def _of(self, seen: Seen) -> Float[Tensor, ""]:
        batch, _, seq, _ = seen.query.shape
        if seen.key.size(-2) != seq:
            raise FutureAttentionError("what was seen with a cache has no loss: run the model on the whole text")
        if seq < 2:
            raise FutureAttentionError("a text of one token has no future to compare with")
        if self.shuffled and batch < 2:
            raise FutureAttentionError(
                "one text alone cannot be given the future of another: take 2 or more in a batch"
            )
        if self.kind == "kl":
            return _kl(seen, self.shuffled)
        guess, truth = predicted_contribution(seen, self.target), true_contribution(seen, self.target)
        truth = truth.roll(1, dims=0) if self.shuffled else truth
        return LOSSES[self.kind](guess[:, :, :-1], truth[:, :, :-1])  # the last position has no future


def true_contribution(seen: Seen, target: str = "joint") -> Contribution:
    """What the next `dim` positions really contribute, per head, detached; 0 at the last position."""
    with torch.no_grad():
        weights, seq = true_weights(seen.scores, seen.dim), seen.query.size(-2)
        if target == "difference":
            return weights @ seen.value - seen.causal
        ahead = predicted(seen.dim).dense(seq, device=weights.device)
        return weights.masked_fill(~ahead, 0) @ seen.value


def predicted_contribution(seen: Seen, target: str = "joint") -> Contribution:
    """What the columns contribute instead, with its gradient."""
    return seen.future if target == "joint" else seen.past + seen.future - seen.causal


def mse(guess: Contribution, truth: Contribution) -> Float[Tensor, ""]:
    """Mean squared error, over all numbers."""
    return F.mse_loss(guess, truth)


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


def _kl(seen: Seen, shuffled: bool) -> Float[Tensor, ""]:
    """KL(true || predicted) of the weights over [the past as a whole, 1 ahead, 2 ahead, ...], in nats."""
    if seen.source == "memory":
        raise FutureAttentionError("slots of a memory stand for no position: their weights have no true counterpart")
    with torch.no_grad():
        true = true_weights(seen.scores, seen.dim)
        truth = _by_distance(true, true, seen.dim)
        truth = truth.roll(1, dims=0) if shuffled else truth
    if seen.source == "position":
        guess = _by_distance(seen.past_weights, seen.future_weights, seen.dim)
    else:
        guess = torch.cat([seen.past_weights.sum(-1, keepdim=True), seen.future_weights], dim=-1)
    guess, truth = guess[:, :, :-1], truth[:, :, :-1]
    tiny = torch.finfo(guess.dtype).tiny
    there = truth.clamp_min(tiny).log() - guess.clamp_min(tiny).log()
    return (truth * there).sum(-1).mean()


def _by_distance(past: Tensor, weights: Tensor, dim: int) -> Float[Tensor, "batch heads seq buckets"]:
    """[all that the past weighs, what 1, 2, ... `dim` ahead weigh], of weights by absolute position."""
    seq, columns = past.size(-2), weights.size(-1)
    at = torch.arange(seq, device=weights.device)[:, None] + torch.arange(1, dim + 1, device=weights.device)
    ahead = weights.gather(-1, at.clamp_max(columns - 1).expand(*weights.shape[:-1], dim))
    seen = masks.causal().dense(seq, device=past.device)
    whole = past[..., :seq].masked_fill(~seen, 0).sum(-1, keepdim=True)
    return torch.cat([whole, ahead.masked_fill(at >= columns, 0)], dim=-1)


LOSSES: dict[str, Callable | None] = {"mse": mse, "cosine": cosine, "infonce": infonce, "kl": None}
