"""The mask of a model in training, how often its input is repeated, and the measurement of both.

bidirectional    the causal mask removed, in all layers or some
causal           the model as it is
right-to-left    a control: each token attends to itself and to later tokens. As much context as causal, from the
                 other side, and as foreign to the pretrained weights as bidirectional
encoder          another model, bidirectional as it comes: it is measured, and nothing is changed in it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from labkit.auditing.measure import audit
from labkit.convert import WINDOWS, choose_layers, to_bidirectional
from labkit.decoder.anatomy import SLIDING, backend_of, decoder_or_none, find_decoder
from labkit.decoder.hooks import masked
from labkit.decoder.packing import packed
from labkit.decoder.repetition import repeated
from labkit.errors import TrainingError, require_one_of
from labkit.masks import causal, sliding_window

MASKS = ("bidirectional", "causal", "encoder")
RIGHT_TO_LEFT = "right-to-left"
MEASURED = 12  # tokens on which the right-to-left mask is compared, cell by cell
BEHIND = ~causal() | sliding_window(1)  # a window of one token: itself


def require_window(model: Any, window: str) -> None:
    """Raise TrainingError unless there is such a window, and the model has local layers if one is chosen."""
    require_one_of("the window", window, WINDOWS, TrainingError)
    decoder = decoder_or_none(model)
    if window != "keep" and (decoder is None or SLIDING not in decoder.layer_types):
        raise TrainingError(f"the window is {window!r}, but {type(model).__name__} has no local layers; leave it out")


@contextmanager
def in_force(
    model: Any, mask: str, *, window: str = "keep", layers: str = "all", readings: int = 1, packing: bool = False
) -> Iterator[dict[str, Any]]:
    """The mask put in force for the block, with packing and repeated reading; yields what was measured, as a record.

    Raises TrainingError if there is no such mask to remove, or the measured mask is not the one asked for.
    """
    with ExitStack() as stack:
        measured = _right_to_left(model, stack) if mask == RIGHT_TO_LEFT else _chosen(model, mask, window, layers)
        if packing:
            stack.enter_context(packed(model))
        if readings > 1:  # inside, as what is packed are the repeated rows
            stack.enter_context(repeated(model, readings))
        yield {"asked": mask, "window": window, "layers": layers, "readings": readings} | measured


def _chosen(model: Any, mask: str, window: str, layers: str) -> dict[str, Any]:
    """`mask` of `MASKS`: make the model bidirectional, or leave it as it is, and measure it."""
    name = type(model).__name__
    if mask == "bidirectional" and decoder_or_none(model) is None:
        raise TrainingError(f"{name} is not a decoder, so it has no mask to remove; give mask encoder")
    require_window(model, window)
    config = model.config.get_text_config()
    chosen = choose_layers(layers, config.num_hidden_layers)
    weight = next(model.parameters())
    needs_16_bits = backend_of(config) == "flash" and weight.dtype == torch.float32
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=needs_16_bits):  # as in training
        if mask == "bidirectional":
            to_bidirectional(model, window=window, layers=chosen)
        report = audit(model, quick=True)
    opened = [layer.index for layer in report.layers if layer.verdict == "bidirectional"]
    if mask == "encoder" and report.verdict != "bidirectional":
        raise TrainingError(f"the mask of {name} is {report.verdict}, so it is no encoder; give mask bidirectional")
    if not (mask in ("encoder", report.verdict) if chosen is None else opened == sorted(chosen)):
        raise TrainingError(
            f"the mask was to be {mask} in layers {layers}; measured: {report.verdict}, bidirectional in {opened}"
        )
    return {"measured": report.verdict, "opened": opened}


def _right_to_left(model: Any, stack: ExitStack) -> dict[str, str]:
    """Every token attends to itself and to later tokens, in a local layer within its window; measured cell by cell."""
    decoder = find_decoder(model)
    window = getattr(decoder.config, "sliding_window", None) if SLIDING in decoder.layer_types else None
    local = BEHIND & sliding_window(window, causal=False) if window else BEHIND
    stack.enter_context(masked(model, [local if kind == SLIDING else BEHIND for kind in decoder.layer_types]))
    for layer in audit(model, quick=True).layers:
        if not layer.mask.agrees_with(BEHIND, min(MEASURED, window or MEASURED, layer.mask.limit or MEASURED)):
            raise TrainingError(f"the mask was to be right-to-left, and layer {layer.index} measures otherwise")
    return {"measured": RIGHT_TO_LEFT}
