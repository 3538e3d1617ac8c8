"""How the rows of a question agree on its next token: (rows, vocab) logits -> (questions, vocab) scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _sure(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (rows, vocab), and the logarithm of how probable each row finds its best token (rows, 1)."""
    log_probs = logits.log_softmax(-1)
    return log_probs, log_probs.max(-1, keepdim=True).values


def _confidence_average(logits: Tensor) -> Tensor:
    log_probs, sure = _sure(logits)
    return (sure.softmax(0) * log_probs).sum(0)


def _confidence_max(logits: Tensor) -> Tensor:
    log_probs, sure = _sure(logits)
    return (log_probs + sure).max(0).values


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda logits: logits.mean(0),
    "max": lambda logits: logits.amax(0),
    "confidence-average": _confidence_average,
    "confidence-max": _confidence_max,
}


def combine(rule: str | None, logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Scores (questions, vocab) by `rule` from logits (rows, vocab); counts[i] rows each. None: a row each."""
    if rule is None:
        return logits
    return torch.stack([RULES[rule](rows) for rows in logits.split(list(counts))])
