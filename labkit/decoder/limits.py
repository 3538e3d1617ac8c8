"""What fits: tokens within a model's positions, and bytes within this machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from labkit.errors import LabkitError, ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig

GB = 10**9
CGROUP = Path("/sys/fs/cgroup")  # of the container that this process runs in
LOADING = 1.2  # memory for loading, in sizes of the model: one more copy of the largest tensors, a short forward pass


def position_limit(config: PreTrainedConfig) -> int | None:
    """The longest row, in tokens, that the configuration of a model (or of its text part) allows; None: not stated."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    stated = (getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    return next((limit for limit in stated if limit), None)


def context_of(model: nn.Module) -> int | None:
    """The longest row that a config inside the model states, or None."""
    for module in model.modules():
        config = getattr(module, "config", None)
        limits = (position_limit(config), *(getattr(config, name, None) for name in ("context", "block_size")))
        if limit := next((limit for limit in limits if isinstance(limit, int)), None):
            return limit
    return None


def require_positions(
    tokens: int, config: PreTrainedConfig, *, refusal: type[LabkitError] = ModelError, cure: str | None = None
) -> None:
    """Raise `refusal` if a row of `tokens` is longer than the model allows; `cure` replaces the advice."""
    if (limit := position_limit(config)) is not None and tokens > limit:
        cure = cure or f"give a shorter text, or --max-length {limit}"
        raise refusal(f"a row has {tokens:,} tokens, and the model has {limit:,} positions: {cure}")


def available_bytes(device: str = "cpu") -> int:
    """Bytes that can still be allocated: free GPU memory, or main memory within this process's container limit."""
    if device.startswith("cuda"):
        import torch

        at = torch.device(device).index
        at = torch.cuda.current_device() if at is None else at
        free, whole = torch.cuda.mem_get_info(at)
        kept = torch.cuda.memory_reserved(at) - torch.cuda.memory_allocated(at)  # by torch, for its next tensors
        share = torch.cuda.get_per_process_memory_fraction(at)
        return min(free + kept, int(share * whole) - torch.cuda.memory_allocated(at))
    import psutil

    available = psutil.virtual_memory().available
    try:
        left = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return available
    return min(available, left + int(statistics["inactive_file"]))  # the kernel frees idle pages of files when it must


def configured_parameters(config: PreTrainedConfig, kind: type) -> int:
    """How many parameters a model with this configuration has, counted without allocating any."""
    import torch

    with torch.device("meta"):
        return sum(p.numel() for p in kind(config).parameters())


def require_memory_for_model(name: str, parameters: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Raise ModelError if a model of `parameters` weights in `dtype` cannot be loaded and run on `device`."""
    needed = parameters * dtype.itemsize * LOADING
    if needed <= (free := available_bytes(device)):
        return
    cure = "close other programs or take a smaller model (labkit models lists them)"
    if dtype.itemsize > 2:
        cure = f"ask for half of it with dtype='bfloat16', {cure}"
    what = f"{name} in {str(dtype).removeprefix('torch.')} ({parameters / 1e6:,.0f} M parameters)"
    place = "the GPU" if device.startswith("cuda") else "this machine"
    raise ModelError(f"{what} needs about {needed / GB:.1f} GB, and {place} has {free / GB:.1f} GB free: {cure}")
