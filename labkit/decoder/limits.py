"""What fits: tokens within a model's positions, and bytes within this machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LabkitError, ModelError, TrainingError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig

GB = 10**9
POSITIONS = ("max_position_embeddings", "max_target_positions", "context", "block_size")  # or GPT's, nanoGPT's
CGROUP = Path("/sys/fs/cgroup")  # of the container that this process runs in
LOADING = 1.2  # memory for loading, in sizes of the model: one more copy of the largest tensors, a short forward pass
PROCESS = 0.8 * GB  # torch and its libraries
SLACK = 1.2  # in training: short-lived copies in the backward pass and in the optimiser's step


def position_limit(config: PreTrainedConfig) -> int | None:
    """The longest row, in tokens, that the configuration of a model (or of its text part) allows; None: not stated."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    stated = (getattr(config, name, None) for name in POSITIONS)
    return next((limit for limit in stated if limit and isinstance(limit, int)), None)


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

        at = torch.device(device)
        free, _ = torch.cuda.mem_get_info(at)
        return free + torch.cuda.memory_reserved(at) - torch.cuda.memory_allocated(at)  # torch keeps some to use again
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


def training_bytes(model: nn.Module, settings: dict[str, Any], length: int, processes: int = 1) -> dict[str, int]:
    """Bytes of the weights, of what training keeps per weight, and of the activations of one batch.

    Args:
        settings: as for `labkit.training.train`. length: tokens in the longest row. processes: that train together.

    Activations: what the backward pass of each layer needs, as in Korthikanti et al. 2022, equation 2, for the widths
    of this model. With gradient checkpointing: the states between the layers, and one layer.
    """
    config, parameters = model.config.get_text_config(), list(model.parameters())
    size = 4 if settings["dtype"] == "float32" else 2
    tokens = settings["batch_tokens"] or settings["per_device_train_batch_size"] * length
    width, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or width // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    hidden = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width
    of_mlp = 4 if any(name.endswith("gate_proj") for name, _ in model.named_modules()) else 2
    keeps_scores = config._attn_implementation == "eager" or parameters[0].device.type == "cpu"
    attention = 2 * (heads + key_heads) * head_width + 2 * heads * length * keeps_scores
    layer = tokens * size * (12 * width + attention + of_mlp * hidden)
    states = tokens * size * width * layers
    trained = sum(weight.numel() for weight in parameters if weight.requires_grad)
    copies = 0 if size == 4 else 2 * sum(weight.numel() for weight in parameters if weight.element_size() == 4)
    return {
        "weights": sum(weight.numel() * weight.element_size() for weight in parameters),
        # gradient, two moments of AdamW, DDP's buckets; the weights in 16 bits
        "training": (12 if processes == 1 else 16) * trained + copies,
        "activations": layer + states if settings["gradient_checkpointing"] else layer * layers,
    }


def require_memory_for_training(model: nn.Module, settings: dict[str, Any], length: int, processes: int = 1) -> str:
    """What the training needs and what is free, in one sentence; the model is in memory already.

    Raises:
        TrainingError: it will not fit on a CPU, where a process that takes too much is killed. A GPU that is full
            raises an error that a run can be resumed from, so there it is tried.
    """
    device = str(next(model.parameters()).device)
    need = training_bytes(model, settings, length, processes)
    total = PROCESS + SLACK * sum(need.values())
    free = available_bytes(device) + need["weights"] + PROCESS
    rows, tokens = settings["per_device_train_batch_size"], settings["batch_tokens"]
    batch = f"batches of {tokens:,} tokens" if tokens else f"batches of {rows} x {length}"
    sentence = f"training needs about {total / GB:.1f} GB for {batch}, {free / GB:.1f} GB are free"
    if total > free and device == "cpu":
        smaller = "--batch-tokens" if tokens else "--batch-size"
        raise TrainingError(f"{sentence}; try a smaller {smaller}, --gradient-checkpointing, or --method lora")
    return sentence
