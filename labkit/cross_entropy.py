"""Cross entropy straight from the hidden states: all logits of a batch are never in memory at once.

With a vocabulary of some thousands, logits and their gradient are by far the largest tensors of a training step, and
moving them costs more than computing them. Here some rows at a time are turned into logits, loss and gradient, and
forgotten; the backward pass only scales what is there. The idea: Hsu et al. 2024, "Liger Kernel". torch 2.13 has a
`linear_cross_entropy` too, which adds up in bfloat16 what is computed in it, and slows down with wide vocabularies.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

FEW = 2**20  # logits that may be in memory at once
ROWS_ON_CPU, ROWS = 256, 4096  # else: rows at a time, of a size for a CPU's cache, and to keep a GPU busy,
MOST = 2**28  # as long as they make no more logits than these
NOT_COUNTED = -100


def linear_cross_entropy(
    hidden: Float[Tensor, "*rows width"], head: Float[Tensor, "vocab width"], targets: Int[Tensor, "*rows"]
) -> Float[Tensor, ""]:
    """`F.cross_entropy(hidden @ head.T, targets)`: the mean in nats; a target of -100 is not counted.

    Under autocast the products are computed in its dtype, all else in float32. It can be differentiated once.
    Within `torch.compile` it is torch's own: torch 2.11 would compile this one to gradients of zero, without a word.
    """
    if targets.numel() * len(head) <= FEW or torch.compiler.is_compiling():
        return F.cross_entropy((hidden @ head.T).flatten(0, -2).float(), targets.flatten())
    return _LinearCrossEntropy.apply(hidden.flatten(0, -2), head, targets.flatten())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        weight, rows = head.to(dtype), max(1, min(ROWS_ON_CPU if kind == "cpu" else ROWS, MOST // len(head)))
        exact = torch.promote_types(dtype, torch.float32)
        share = (targets != NOT_COUNTED).to(exact)
        share /= share.sum()  # of each row in the mean; nan where nothing is counted, as in torch
        loss = share.new_zeros(())
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=exact) if ctx.needs_input_grad[1] else None
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                states, wanted = hidden[part].to(dtype), targets[part, None].clamp(min=0)
                scores = (states @ weight.T).to(exact).log_softmax(1)  # (some rows, vocab)
                loss -= share[part] @ scores.gather(1, wanted)[:, 0]
                if not any(ctx.needs_input_grad):
                    continue
                grad = scores.exp_()  # the softmax; less one at the target, it is the gradient
                grad.scatter_add_(1, wanted, grad.new_full((1, 1), -1.0).expand_as(wanted))
                grad = grad.mul_(share[part, None]).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad @ weight
                if grad_head is not None and dtype == exact:
                    grad_head.addmm_(grad.T, states)
                elif grad_head is not None:
                    grad_head += grad.T @ states
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.dtype = head.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        by_hidden = grad_hidden * grad if grad_hidden is not None else None
        by_head = (grad_head * grad).to(ctx.dtype) if grad_head is not None else None
        return by_hidden, by_head, None
