"""Does a training run fit into memory? An estimate from the model's shape, before the first step."""

from __future__ import annotations

from typing import Any

from torch import nn

from labkit.decoder import limits
from labkit.errors import TrainingError
from labkit.run_folder import process_count

PROCESS = 0.8 * limits.GB  # torch and its libraries
SLACK = 1.2  # short-lived copies in the backward pass and in the optimiser's step


def training_bytes(model: nn.Module, settings: dict[str, Any], length: int) -> dict[str, int]:
    """Bytes of the weights, of what training keeps per weight, and of the activations of one batch.

    Args:
        settings: as for `labkit.training.train`. length: tokens in the longest row.

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
        "training": (12 if process_count() == 1 else 16) * trained + copies,
        "activations": layer + states if settings["gradient_checkpointing"] else layer * layers,
    }


def require_memory(model: nn.Module, settings: dict[str, Any], length: int) -> str:
    """What the training needs and what is free, in one sentence; the model is in memory already.

    Raises:
        TrainingError: it will not fit on a CPU, where a process that takes too much is killed. A GPU that is full
            raises an error that a run can be resumed from, so there it is tried.
    """
    device = str(next(model.parameters()).device)
    need = training_bytes(model, settings, length)
    total = PROCESS + SLACK * sum(need.values())
    free = limits.available_bytes(device) + need["weights"] + PROCESS
    rows, tokens = settings["per_device_train_batch_size"], settings["batch_tokens"]
    batch = f"batches of {tokens:,} tokens" if tokens else f"batches of {rows} x {length}"
    sentence = f"training needs about {total / limits.GB:.1f} GB for {batch}, {free / limits.GB:.1f} GB are free"
    if total > free and device == "cpu":
        smaller = "--batch-tokens" if tokens else "--batch-size"
        raise TrainingError(f"{sentence}; try a smaller {smaller}, --gradient-checkpointing, or --method lora")
    return sentence
