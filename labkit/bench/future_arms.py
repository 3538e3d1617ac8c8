"""The arms of a comparison of Future Attention: what is claimed, and what else could explain it.

    baseline             a plain GPT with as many parameters as one with free columns by position: its MLPs are wider
    smaller              a plain GPT of the same width and depth
    dropout:0.1          the baseline with dropout, of the attention weights too
    memory, memory:SLOTS slots that every position sees and that stand for nothing; by default as many as positions, and
                         so as many parameters; memory:50 dilutes the past no more than 50 columns do
    future:LOSS:DIM      free keys and values by position, DIM ahead, trained with LOSS (none, mse, cosine, infonce, kl)
    tokens:LOSS:DIM      the same with keys and values made from the tokens
    shuffled:LOSS:DIM    as future, with the future of another text for a target; shuffled-tokens:LOSS:DIM as tokens
    multi-token:AHEAD    the smaller GPT, which also names the AHEAD tokens after the next (Gloeckle et al. 2024); one
                         more product with the vocabulary, so more arithmetic than columns take

`mse-difference` and `cosine-difference` are the losses with the other definition of the target; `mse@1000` has a weight
of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from labkit.cross_entropy import linear_cross_entropy
from labkit.errors import FutureAttentionError
from labkit.future_attention import Future, FutureGPT
from labkit.future_losses import FutureLoss
from labkit.gpt import CAUSAL, GPT, GPTConfig
from labkit.masks import Mask

REFERENCE = "baseline"
DEFAULT = (  # in the order of what they decide
    "baseline", "future:cosine:50", "future:none:50", "memory", "smaller", "shuffled:cosine:50", "tokens:cosine:50",
    "memory:50", "dropout:0.1", "dropout:0.2", "multi-token:1",
)  # fmt: skip
COLUMNS = {"future": "position", "shuffled": "position", "tokens": "tokens", "shuffled-tokens": "tokens"}
SHUFFLED = {"future": "shuffled", "tokens": "shuffled-tokens"}  # the control of each
NO_LOSS = "none"


class MultiTokenGPT(GPT):
    """A GPT that, while it is trained, also names the tokens after the next, each through a matrix of its own."""

    def __init__(self, config: GPTConfig, ahead: int):
        super().__init__(config)
        self.ahead = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(ahead))
        for layer in self.ahead:
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def loss_ahead(self, ids: Tensor, targets: Tensor, mask: Mask = CAUSAL) -> tuple[Tensor, Tensor]:
        """Mean nats of the next token, and of those after it; `targets` as for `loss`."""
        hidden = self.hidden(ids, mask)
        later = [
            linear_cross_entropy(hidden[:, :-k] + layer(hidden[:, :-k]), self.wte.weight, targets[:, k:])
            for k, layer in enumerate(self.ahead, 1)
        ]
        return linear_cross_entropy(hidden, self.wte.weight, targets), torch.stack(later).mean()


@dataclass(frozen=True)
class Arm:
    """One way of training: `kind` is the first word of its name, `loss` that of its columns, `value` its number."""

    name: str
    kind: str
    loss: FutureLoss | None = None
    value: float | int | None = None

    def build(self, config: GPTConfig, seed: int) -> GPT:
        """The model as it begins. What an arm has in common with the smaller GPT is the same in all arms of a seed.

        Raises:
            FutureAttentionError: more columns, or tokens ahead, than the context has.
        """
        if self.kind == "multi-token" and self.value >= config.context:
            raise FutureAttentionError(f"{self.name} looks {self.value} tokens ahead, in a context of {config.context}")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if self.kind in COLUMNS:
                return FutureGPT(config, Future(int(self.value), COLUMNS[self.kind]))
            if self.kind == "memory":
                return FutureGPT(config, Future(int(self.value or config.context), "memory"))
            if self.kind == "multi-token":
                return MultiTokenGPT(config, int(self.value))
            plain = GPT(config)
            if self.kind == "smaller":
                return plain
            wider = replace(config, inner=matched_inner(config))
            if self.kind == "dropout":
                wider = replace(wider, dropout=self.value, attention_dropout=self.value)
            return _grown(plain, GPT(wider))

    def losses(self, model: GPT, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """(nats of the next token, auxiliary loss times its weight or None) of a batch, to be added and trained on."""
        if self.kind == "multi-token":
            return model.loss_ahead(ids, targets)
        if self.loss is None:
            return model.loss(ids, targets), None
        with model.watched() as seen:
            loss = model.loss(ids, targets)
            return loss, self.loss.weight * self.loss(seen)


def matched_inner(config: GPTConfig) -> int:
    """The width of an MLP that gives a plain block as many parameters as one with free columns by position.

    A hidden unit has 2 width + 1 of them, and the columns 2 width for each position of the context.
    """
    return (config.inner or 4 * config.width) + round(config.context * 2 * config.width / (2 * config.width + 1))


def _grown(plain: GPT, wider: GPT) -> GPT:
    """`wider` with the weights of `plain` in the corner of each of its own; what is beyond stays as it was drawn."""
    weights = plain.state_dict()
    with torch.no_grad():
        for name, own in wider.state_dict().items():
            own[tuple(slice(n) for n in weights[name].shape)] = weights[name]
    return wider


def arm(name: str, weight: float = 1.0, layers: tuple[int, ...] | None = None) -> Arm:
    """An arm by its name; `weight` is that of an auxiliary loss that names none, `layers` are those of the loss.

    Raises:
        FutureAttentionError: no such arm.
    """
    kind, *rest = name.split(":")
    if kind in ("baseline", "smaller") and not rest:
        return Arm(name, kind)
    if kind == "dropout" and len(rest) == 1 and 0 < (share := _number(rest[0], name)) < 1:
        return Arm(name, kind, value=share)
    if kind == "memory" and len(rest) <= 1:
        return Arm(name, kind, value=_whole(rest[0], name) if rest else None)
    if kind == "multi-token" and len(rest) == 1:
        return Arm(name, kind, value=_whole(rest[0], name))
    if kind in COLUMNS and len(rest) == 2:
        (what, _, target), own = rest[0].partition("@")[0].partition("-"), rest[0].partition("@")[2]
        weight = _number(own, name) if own else weight
        dim = _whole(rest[1], name)
        shuffled = kind in SHUFFLED.values()
        if rest[0] == NO_LOSS and not shuffled:
            return Arm(name, kind, value=dim)
        return Arm(name, kind, FutureLoss(what, target or "joint", weight, layers, shuffled), dim)
    raise FutureAttentionError(
        f"there is no arm {name!r}; there are baseline, smaller, dropout:0.1, memory, memory:SLOTS, future:LOSS:DIM, "
        "tokens:LOSS:DIM, shuffled:LOSS:DIM, shuffled-tokens:LOSS:DIM, multi-token:AHEAD"
    )


def arms(names: Sequence[str], weight: float = 1.0, layers: tuple[int, ...] | None = None) -> list[Arm]:
    """These arms. FutureAttentionError if one is unknown or named twice, or the baseline is not among them."""
    if len(set(names)) < len(names) or REFERENCE not in names:
        raise FutureAttentionError(
            f"the arms are {', '.join(names) or 'none'}: give each once, and {REFERENCE} among them, as the others are "
            "compared with it"
        )
    return [arm(name, weight, layers) for name in names]


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FutureAttentionError(f"{text!r} in the arm {name!r} is no number")
    return value


def _whole(text: str, name: str) -> int:
    value = _number(text, name)
    if value != int(value) or value < 1:
        raise FutureAttentionError(f"{text!r} in the arm {name!r}: give a whole number from 1")
    return int(value)
