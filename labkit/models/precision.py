"""The dtype to train in: a rule per device and model family, with the reason.

float16 ends at 65,504. The activations of Gemma exceed that (its embeddings are scaled by the root of the width, and
its residual stream grows), so that the loss becomes NaN in float16. GPUs before Ampere (a T4 has compute capability
7.5) have no bfloat16 in hardware, and torch emulates it slowly without a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from labkit.errors import TrainingError

OVERFLOWS_IN_FLOAT16 = ("gemma", "t5gemma", "t5", "umt5")  # model types that begin so
AMPERE = (8, 0)
AS_ASKED = "as asked"


@dataclass(frozen=True)
class Precision:
    """`dtype` of the computation (the trained weights stay float32), whether to allow TF32, and why."""

    dtype: str
    tf32: bool
    why: str


def choose(model_type: str, capability: tuple[int, int] | None, dtype: str = "auto") -> Precision:
    """The precision to train a model of `model_type` (as in its config: "gemma3_text") with.

    `capability` is that of the GPU as (major, minor), None without one. `dtype` is "auto" for the rule, else "float32",
    "bfloat16" or "float16". Raises TrainingError for float16 where that cannot work.
    """
    overflows = model_type.lower().startswith(OVERFLOWS_IN_FLOAT16)
    ampere = capability is not None and tuple(capability) >= AMPERE
    gpu = f"a GPU of compute capability {'.'.join(map(str, capability or ()))}"
    if dtype == "float16" and capability is None:
        raise TrainingError("float16 needs a GPU, and there is none here; choose auto, bfloat16 or float32")
    if dtype == "float16" and overflows:
        safe = "bfloat16" if ampere else "float32"
        raise TrainingError(f"{model_type} overflows in float16, so the loss becomes NaN; choose {safe}")
    if dtype == "bfloat16" and capability is not None and not ampere:
        return Precision("bfloat16", False, f"{gpu} has no bfloat16 in hardware: torch emulates it, slowly")
    if dtype != "auto":
        return Precision(dtype, ampere and dtype == "float32", AS_ASKED)
    if capability is None:
        return Precision("float32", False, "no GPU")
    if ampere:
        return Precision("bfloat16", True, f"{gpu} has bfloat16, whose range is that of float32")
    if overflows:
        return Precision("float32", False, f"{gpu} has no bfloat16, and {model_type} overflows in float16")
    return Precision("float16", False, f"{gpu} has no bfloat16; {model_type} stays within float16, with scaling")


def here() -> tuple[int, int] | None:
    """The compute capability of this machine's GPU, None without a CUDA GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


@contextmanager
def kernels(tf32: bool) -> Iterator[None]:
    """In the block: float32 matrix products in TF32 if `tf32`, and no attention by cuDNN; restored afterwards.

    cuDNN's attention is torch's first choice on an H100. It builds a plan for every new shape of a batch, and with a
    mask some of its gradients are NaN (pytorch issue 196678).
    """
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    attention, before = torch.backends.cuda.cudnn_sdp_enabled(), [backend.fp32_precision for backend in backends]
    torch.backends.cuda.enable_cudnn_sdp(False)
    if tf32:  # by torch's older setting, because the compiler of flex attention reads it and refuses a mix of both
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(attention)
        if tf32:
            torch.set_float32_matmul_precision("highest")
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value
