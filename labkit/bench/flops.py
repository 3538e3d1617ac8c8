"""How much arithmetic a training step is, and how much of it the machine can do in a second.

Model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B) is the share of the one in the other: the arithmetic
that the model asks for, whatever the program does besides, over the rate of a large matrix product.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from labkit.anatomy import SLIDING, find_decoder
from labkit.errors import LabkitError

TRAINED, FROZEN, SCORES = 6, 4, 12
SIDES = {"cpu": 2048, "cuda": 8192}  # of the square matrices
SMALLEST_SIDE = 256


def flops_per_token(model: Any, length: int, *, mask: str) -> float:
    """Floating-point operations of one training step, per token, of rows of `length` tokens.

        6 N_trained + 4 N_frozen + 12 x sum over the layers of (heads x head width x keys)

    N counts the weights of matrix products: those of the layers and of the head. Such a weight multiplies and adds once
    in the forward pass (2), once for the gradient of its input (2) and, if it is trained, once for its own (2): the
    6 N of Kaplan et al. 2020, of which a weight frozen under LoRA saves a third. An embedding is looked up, which is
    no arithmetic. Attention multiplies each query with its keys and the weights with the values, 4 in the forward pass
    and 12 in all (PaLM, appendix B).

    `keys` is the row's length, under either mask, as in PaLM: a causal kernel that skips the future is not asked to do
    less. A local layer counts no more keys than its window holds: W under a causal mask, 2 W - 1 once it is
    bidirectional and its window kept.
    """
    decoder = find_decoder(model)
    config = decoder.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = _causal_window(config)
    held = length if window is None else min(length, window if mask == "causal" else 2 * window - 1)
    keys = sum(held if kind == SLIDING else length for kind in decoder.layer_types)
    products = 0
    for weight in _matrices(model):
        products += (TRAINED if weight.requires_grad else FROZEN) * weight.numel()
    return float(products + SCORES * config.num_attention_heads * width * keys)


def matmul_rate(dtype: str, device: str, seconds: float = 1.0) -> float:
    """FLOPs per second of a large square matrix product in `dtype`: the best of as many as fit into `seconds`.

    Large is a side of `SIDES`; where one such product would take longer than `seconds` (bfloat16 on a processor that
    has none), the largest power of two below it that does not, and 256 at least.
    """
    largest = SIDES["cuda" if device.startswith("cuda") else "cpu"]
    side = min(SMALLEST_SIDE, largest)
    a, b = _squares(side, dtype, device)
    while side < largest and 8 * _seconds(a, b, device) <= seconds:
        side *= 2
        a, b = _squares(side, dtype, device)
    best, began = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - began < seconds:
        best = min(best, _seconds(a, b, device))
    return 2 * side**3 / best


def _squares(side: int, dtype: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random square matrices that have been multiplied once, as the first product also sets up the library."""
    a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    a @ b
    wait(device)
    return a, b


def _seconds(a: torch.Tensor, b: torch.Tensor, device: str) -> float:
    """What one product takes."""
    start = time.perf_counter()
    a @ b
    wait(device)
    return time.perf_counter() - start


def wait(device: str) -> None:
    """Until the GPU has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _matrices(model: Any) -> list[torch.Tensor]:
    """The weights of the matrix products. PEFT keeps an unused copy of a head that it trains.

    Raises LabkitError for a mixture of experts, whose weights are stacked, and of which a token uses some only.
    """
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        stacked = [kind for kind, each in module.named_parameters(recurse=False) if each.dim() == 3]
        if stacked and not isinstance(module, torch.nn.Conv1d):
            raise LabkitError(f"the arithmetic of experts is not counted, and {name}.{stacked[0]} holds several")
    return [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and "original_module" not in name
    ]


def _causal_window(config: Any) -> int | None:
    """Tokens of a local layer's window before any conversion."""
    record = getattr(config, "labkit_attention", None)
    return record["sliding_window"] if record else getattr(config, "sliding_window", None)
