"""A conversion proves itself: the mask of every layer is measured, without and with padding, and held against the intended one.

Cheap by construction: six tokens, feed-forward blocks skipped, and the windows of local layers shrunk to four for the
moment, so that six tokens reach past them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.anatomy import Decoder
from labkit.errors import ConversionError
from labkit.masks import Mask
from labkit.probe import AttentionCall, attention_influence, evaluating, recorded_calls, without_mlps

TOKENS = 6
WINDOW = 4  # the shrunken window: W-1 = 3 tokens on either side when kept, W//2 = 2 when halved


def prove(decoder: Decoder, intended: Sequence[Mask], what: str) -> None:
    """Measure the mask of every layer and compare.

    Args:
        intended: the mask that each layer should have, windows shrunk to `WINDOW`.
        what: "bidirectional" or "causal", for the message.

    Raises:
        ConversionError: naming the layer, the kind of batch and the first cell that is wrong.
    """
    with evaluating(decoder.stack):
        for title, real in _batches().items():
            for i, call in enumerate(_calls(decoder, real)):
                for draws in (1, 4):  # a cell that one perturbation did not light up is looked at harder
                    wrong = _first_wrong_cell(attention_influence(call, range(TOKENS), draws), intended[i], real)
                    if wrong is None:
                        break
                else:
                    raise ConversionError(
                    f"the model did not become {what}: {decoder.names[i]} (attention backend {decoder.backend!r}, {title}): "
                    f"{wrong}; intended was {intended[i]}. The model was put back as it was."
                )


def _batches() -> dict[str, Tensor]:
    """Which positions are real, (batch, TOKENS), for each kind of batch."""
    mixed = torch.ones(3, TOKENS, dtype=torch.bool)
    mixed[1, -2:] = False
    mixed[2, :2] = False
    return {"no padding": torch.ones(1, TOKENS, dtype=torch.bool), "padded batch": mixed}


@torch.no_grad()
def _calls(decoder: Decoder, real: Tensor) -> list[AttentionCall]:
    device = next(decoder.stack.parameters()).device
    ids = torch.arange(TOKENS, device=device).expand(real.shape[0], TOKENS)
    mask = None if bool(real.all()) else real.long().to(device)
    with without_mlps(decoder), recorded_calls(decoder.attentions) as calls:
        decoder.stack(input_ids=ids, attention_mask=mask, use_cache=False)
    if len(calls) != len(decoder.layers):
        raise ConversionError(
            f"only {len(calls)} of {len(decoder.layers)} attention modules ran: the mask cannot be measured layer by layer"
        )
    return calls


def _first_wrong_cell(found: Tensor, mask: Mask, real: Tensor) -> str | None:
    for row, here in enumerate(real):
        cells = found[row][here]  # real queries, all keys
        pads = cells[:, ~here]
        if bool(pads.any()):
            return f"row {row}: a padded position is seen by real tokens"
        measured, wanted = cells[:, here], mask.dense(int(here.sum()))
        wrong = (measured != wanted).nonzero()
        if len(wrong):
            q, k = wrong[0].tolist()
            does, should = ("sees", "must not") if measured[q, k] else ("does not see", "should")
            return f"row {row}: token {q} {does} token {k}, and {should} ({len(wrong)} wrong cells)"
    return None
