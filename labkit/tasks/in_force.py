"""What a model sees while a task is trained on it: its mask, how often it reads its input, and the proof of both.

bidirectional    the causal mask removed, in all layers or some
causal           the model as it is
right-to-left    a control: every token sees itself and what follows. As much context as causal, from the other side,
                 and as foreign to the pretrained weights as bidirectional
encoder          another model, bidirectional as it comes: it is measured, and nothing is changed in it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from labkit.auditing.measure import audit
from labkit.convert import to_bidirectional
from labkit.decoder.anatomy import SLIDING, backend_of, decoder_or_none, find_decoder
from labkit.decoder.hooks import masked
from labkit.decoder.packing import packed
from labkit.decoder.repetition import repeated
from labkit.errors import TrainingError
from labkit.masks import Mask, causal, sliding_window
from labkit.models.export import choose_layers

MASKS = ("bidirectional", "causal", "right-to-left", "encoder")
LASTING = ("bidirectional", "causal", "encoder")  # a saved model can have these; others end with their block
MEASURED = 12  # tokens on which a mask that has no name is compared, cell by cell


def require_mask(mask: str, layers: str, readings: int, *, kept: bool) -> None:
    """Raise TrainingError unless such a mask can be put in force, and be saved with the model where that is kept."""
    if mask not in MASKS:
        raise TrainingError(f"the mask is {mask!r}; choose one of {', '.join(MASKS)}")
    if layers != "all" and mask != "bidirectional":
        raise TrainingError(f"layers are chosen for the bidirectional mask, and the mask is {mask}")
    if readings < 1:
        raise TrainingError(f"the input is read {readings} times; it must be at least once")
    if kept and (mask not in LASTING or readings > 1):
        what = "a right-to-left mask" if mask not in LASTING else "a repeated input"
        raise TrainingError(f"{what} is a control for comparisons: a saved model does not have it, so none can be kept")


def put_mask_in_force(model: Any, mask: str, window: str = "keep", layers: str = "all") -> dict[str, Any]:
    """Make `model` bidirectional, or leave it causal, and measure it; returns what was measured.

    Raises:
        TrainingError: the measured mask is not the one asked for.
    """
    chosen = choose_layers(layers, model.config.get_text_config().num_hidden_layers)
    if mask == "bidirectional" and decoder_or_none(model) is None:
        raise TrainingError(
            f"{type(model).__name__} is no decoder, so it has no mask to remove; an encoder, bidirectional "
            "as it comes, is trained with the mask 'encoder'"
        )
    with _as_its_kernel_computes(model):
        if mask == "bidirectional":
            to_bidirectional(model, window=window, layers=chosen)
        report = audit(model, quick=True)
    if chosen is None and report.verdict != ("bidirectional" if mask == "encoder" else mask):
        raise TrainingError(f"the mask was to be {mask}, and the one measured is {report.verdict}: nothing was trained")
    opened = [layer.index for layer in report.layers if layer.verdict == "bidirectional"]
    if chosen is not None and opened != sorted(chosen):
        raise TrainingError(
            f"the mask was to be removed in layers {sorted(chosen)}, and it measures so in {opened}: nothing trained"
        )
    return {"asked": mask, "measured": report.verdict, "window": window, "layers": layers, "opened": opened}


@contextmanager
def in_force(
    model: Any, mask: str, *, window: str = "keep", layers: str = "all", readings: int = 1, packing: bool = False
) -> Iterator[dict[str, Any]]:
    """For the block, `model` has this mask, reads its input so often and computes no padding; yields what was measured.

    A bidirectional model stays so after the block.

    Raises:
        TrainingError: the measured mask is not the one asked for.
    """
    with ExitStack() as stack:
        if mask in LASTING:
            measured = put_mask_in_force(model, mask, window, layers)
        else:
            stack.enter_context(masked(model, right_to_left(model)))
            measured = {"asked": mask, "measured": _measured_right_to_left(model), "window": window, "layers": layers}
        if packing:
            stack.enter_context(packed(model))
        if readings > 1:  # inside, as what is packed are the repeated rows
            stack.enter_context(repeated(model, readings))
        yield measured | {"readings": readings}


def _as_its_kernel_computes(model: Any) -> torch.autocast:
    """Flash attention knows 16-bit numbers only; weights of 32 bits are computed with as they will be in training."""
    weight = next(model.parameters())
    flash = backend_of(model.config.get_text_config()) == "flash" and weight.dtype == torch.float32
    return torch.autocast(weight.device.type, torch.bfloat16, enabled=flash)


def right_to_left(model: Any) -> list[Mask]:
    """One mask per layer: itself and what follows, in a local layer as far as its window."""
    decoder = find_decoder(model)
    behind = ~causal() | sliding_window(1)  # a window of one token: itself
    local = behind
    if decoder.config.get_text_config().__dict__.get("sliding_window"):
        local = behind & sliding_window(decoder.config.sliding_window, causal=False)
    return [local if kind == SLIDING else behind for kind in decoder.layer_types]


def _measured_right_to_left(model: Any) -> str:
    behind = ~causal() | sliding_window(1)
    report = audit(model, quick=True)
    window = getattr(find_decoder(model).config, "sliding_window", None) or MEASURED
    n = min(MEASURED, window, *(layer.mask.limit or MEASURED for layer in report.layers))
    if wrong := [layer.index for layer in report.layers if not layer.mask.agrees_with(behind, n)]:
        raise TrainingError(
            f"the mask was to be right-to-left, and layer {wrong[0]} measures otherwise: nothing trained"
        )
    return "right-to-left"
