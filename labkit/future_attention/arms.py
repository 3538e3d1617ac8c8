"""The arms of a comparison of Future Attention: how each is built, and what it is trained on.

    model = arm("future:cosine:50").build(config, seed=0)
    loss, extra = arm("future:cosine:50").losses(model, ids, targets)
    (loss if extra is None else loss + extra).backward()

    baseline             a plain GPT with as many parameters as one with columns by position: its MLPs are wider
    smaller              a plain GPT of the same width and depth
    dropout:0.1          the baseline with dropout, also of the attention weights
    memory, memory:SLOTS slots that every position sees and that stand for nothing; default: as many as positions
    future:LOSS:DIM      free keys and values for the DIM positions ahead; LOSS is none, mse, cosine, infonce or kl
    tokens:LOSS:DIM      the same with keys and values that are computed from the tokens
    shuffled:LOSS:DIM, shuffled-tokens:LOSS:DIM   as the two above, with the future of another text as the target
    multi-token:AHEAD    the smaller GPT, which also predicts the AHEAD tokens after the next (Gloeckle et al. 2024)

`mse-difference` and `cosine-difference` use the other definition of the target; `mse@1000` sets the weight to 1000.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labkit.errors import ModelError
from labkit.future_attention import Future, FutureGPT, FutureLoss
from labkit.gpt import GPT, GPTConfig

COLUMNS = {"future": "position", "shuffled": "position", "tokens": "tokens", "shuffled-tokens": "tokens"}
WHOLE, NUMBER = r"([1-9]\d*)", r"(\d+(?:\.\d+)?(?:e-?\d+)?)"


def arm(name: str, weight: float = 1.0, layers: tuple[int, ...] | None = None) -> Arm:
    """The arm called `name`; `weight` and `layers` are those of an auxiliary loss whose name sets no weight."""
    if name in ("baseline", "smaller", "memory"):
        return Arm(name, name)
    if match := re.fullmatch(r"dropout:(0?\.\d*[1-9])", name):
        return Arm(name, "dropout", value=float(match[1]))
    if match := re.fullmatch(rf"(memory|multi-token):{WHOLE}", name):
        return Arm(name, match[1], value=int(match[2]))
    if match := re.fullmatch(rf"({'|'.join(COLUMNS)}):([a-z]+)(?:-([a-z]+))?(?:@{NUMBER})?:{WHOLE}", name):
        kind, loss, target, own_weight, dim = match.groups()
        shuffled = kind.startswith("shuffled")
        if (loss, target, own_weight, shuffled) == ("none", None, None, False):
            return Arm(name, kind, value=int(dim))
        weight = float(own_weight or weight)
        return Arm(name, kind, FutureLoss(loss, target or "joint", weight, layers, shuffled), int(dim))
    raise ModelError(f"there is no arm {name!r}; the text of labkit.future_attention.arms lists them")


@dataclass(frozen=True)
class Arm:
    """One way of training: the first word of its name, the loss of its columns, and the number at its end."""

    name: str
    kind: str
    loss: FutureLoss | None = None
    value: float | int | None = None

    def build(self, config: GPTConfig, seed: int) -> GPT:
        """The untrained model. All arms of a seed start with the weights of `smaller`, as far as they have them."""
        if self.kind == "multi-token" and self.value >= config.context:
            raise ModelError(f"{self.name}: the context has only {config.context} tokens")
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
            model, weights = GPT(wider), plain.state_dict()
            with torch.no_grad():
                for name, own in model.state_dict().items():  # the corner of each matrix is that of the smaller model
                    own[tuple(slice(n) for n in weights[name].shape)] = weights[name]
            return model

    def losses(self, model: GPT, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """(nats of the next token, auxiliary loss times its weight, or None): their sum is what is minimised."""
        if self.kind == "multi-token":
            return model.loss_ahead(ids, targets)
        if self.loss is None:
            return model.loss(ids, targets), None
        with model.watched() as seen:
            loss = model.loss(ids, targets)
            return loss, self.loss.weight * self.loss(seen)


class MultiTokenGPT(GPT):
    """A GPT that, in training, also predicts the tokens after the next, each through a matrix of its own."""

    def __init__(self, config: GPTConfig, ahead: int):
        super().__init__(config)
        self.ahead = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(ahead))
        for layer in self.ahead:
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def loss_ahead(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean nats of the next token, and of the tokens after it; `targets` as for `loss`."""
        hidden = self.hidden(ids)

        def nats(states: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy((states @ self.wte.weight.T).flatten(0, 1).float(), targets.flatten())

        later = [nats(hidden[:, :-k] + layer(hidden[:, :-k]), targets[:, k:]) for k, layer in enumerate(self.ahead, 1)]
        return nats(hidden, targets), torch.stack(later).mean()


def matched_inner(config: GPTConfig) -> int:
    """The MLP width that gives a plain block as many parameters as a block with columns by position.

    A hidden unit has 2 width + 1 parameters, and the columns have 2 width for each position of the context.
    """
    return (config.inner or 4 * config.width) + round(config.context * 2 * config.width / (2 * config.width + 1))


@torch.no_grad()
def token_losses(model: GPT, rows: Tensor, batch_size: int = 16) -> Tensor:
    """Nats of every token but the first of each row: (rows, length) -> (rows, length - 1), on the CPU."""
    losses = []
    for part in rows.to(model.wte.weight.device).split(batch_size):
        logits = model(part[:, :-1]).float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none").cpu())
    return torch.cat(losses)
