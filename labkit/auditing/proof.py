"""A conversion proves itself: every layer's mask is measured, without and with padding, against the intended one.

Cheap by construction: five tokens, feed-forward blocks skipped, one replay per layer, and the windows of local layers
shrunk to three for the moment, so that five tokens reach past them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.auditing.probe import AttentionCall, attention_influence, attention_influence_by_row, recorded_calls
from labkit.decoder.anatomy import Decoder
from labkit.decoder.running import evaluating, without_mlps
from labkit.errors import ConversionError, is_out_of_memory
from labkit.masks import Mask

TOKENS = 5
WINDOW = 3  # the shrunken window: W-1 = 2 tokens on either side when kept, W//2 = 1 when halved


def prove(decoder: Decoder, intended: Sequence[Mask], what: str) -> None:
    """Measure the mask of every layer and compare.

    Args:
        intended: the mask that each layer should have, windows shrunk to `WINDOW`.
        what: "bidirectional" or "causal", for the message.

    Raises:
        ConversionError: naming the layer, the kind of batch and the first cell that is wrong.
    """
    with evaluating(decoder.stack):
        for batch in (_unpadded(), _padded()):
            for i, call in enumerate(_calls(decoder, batch.real)):
                seen = attention_influence_by_row(call, batch.columns)
                if batch.agrees(seen, intended[i]):
                    continue
                cells = attention_influence(
                    call, range(TOKENS), draws=4
                )  # with more perturbations, and the noise known
                wrong = _first_wrong_cell(cells, intended[i], batch.real)
                if wrong is not None:
                    raise ConversionError(
                        f"the model did not become {what}: {decoder.names[i]} (attention backend {decoder.backend!r}, "
                        f"{batch.title}): {wrong}; intended was {intended[i]}."
                    )


@dataclass(frozen=True)
class _Batch:
    """Rows of one text; row b is perturbed at `columns[b]`. real: (batch, TOKENS) bool."""

    title: str
    real: Tensor
    columns: list[int]

    def agrees(self, seen: Tensor, mask: Mask) -> bool:
        """Whether what was seen, bool (batch, TOKENS), is what the mask says, at the real queries of every row."""
        for row, column in enumerate(self.columns):
            here = self.real[row]
            position = int(here[:column].sum())
            cells = mask.dense(int(here.sum()))
            expected = cells[:, position] if here[column] else torch.zeros(len(cells), dtype=torch.bool)
            if not torch.equal(seen[row][here], expected):
                return False
        return True


def _unpadded() -> _Batch:
    return _Batch("no padding", torch.ones(TOKENS, TOKENS, dtype=torch.bool), list(range(TOKENS)))


def _padded() -> _Batch:
    real = torch.ones(6, TOKENS, dtype=torch.bool)
    real[1:4, -1], real[4:, 0] = False, False  # a full row, three padded on the right, two on the left
    return _Batch("padded batch", real, [TOKENS - 1, 0, TOKENS - 2, TOKENS - 1, 0, TOKENS - 1])


@torch.no_grad()
def _calls(decoder: Decoder, real: Tensor) -> list[AttentionCall]:
    device = next(decoder.stack.parameters()).device
    vocabulary = decoder.stack.get_input_embeddings().num_embeddings
    ids = torch.arange(8, 8 + TOKENS, device=device).expand(real.shape[0], TOKENS) % vocabulary  # not the special ones
    mask = None if bool(real.all()) else real.long().to(device)
    try:
        with without_mlps(decoder), recorded_calls(decoder.attentions) as calls:
            decoder.stack(input_ids=ids, attention_mask=mask, use_cache=False)
    except ConversionError:
        raise
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        cause = " ".join(str(error).split())[:200]
        raise ConversionError(
            f"{type(decoder.stack).__name__} (attention backend {decoder.backend!r}) could not be run to measure its "
            f"masks: {type(error).__name__}: {cause}."
        ) from error
    if len(calls) != len(decoder.layers):
        raise ConversionError(
            f"only {len(calls)} of {len(decoder.layers)} attention modules ran: the others cannot be measured."
        )
    return calls


def _first_wrong_cell(measured_cells: Tensor, mask: Mask, real: Tensor) -> str | None:
    for row, here in enumerate(real):
        cells = measured_cells[row][here]  # real queries, all keys
        pads = cells[:, ~here]
        if bool(pads.any()):
            return f"row {row}: a padded position is seen by real tokens"
        measured, intended = cells[:, here], mask.dense(int(here.sum()))
        wrong = (measured != intended).nonzero()
        if len(wrong):
            q, k = wrong[0].tolist()
            does, should = ("sees", "must not") if measured[q, k] else ("does not see", "should")
            return f"row {row}: token {q} {does} token {k}, and {should} ({len(wrong)} wrong cells)"
    return None
