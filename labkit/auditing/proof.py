"""A conversion proves itself: every layer's mask is measured, without and with padding, against the intended one.

Cheap by construction: five tokens, feed-forward blocks skipped, one replay per layer and batch layout, and the windows
of local layers shrunk to three for the moment, so that five tokens reach past them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.auditing.probe import AttentionCall, attention_influence, attention_influence_by_row, recorded_calls
from labkit.decoder.anatomy import Decoder
from labkit.decoder.running import evaluating, without_mlps
from labkit.errors import ConversionError, is_out_of_memory
from labkit.masks import Mask

TOKENS = 5
WINDOW = 3  # the shrunken window: W-1 = 2 tokens on either side when kept, W//2 = 1 when halved


def prove(decoder: Decoder, intended: Sequence[Mask], target: str) -> None:
    """Measure the mask of every layer and compare.

    Args:
        intended: the mask that each layer should have, windows shrunk to `WINDOW`.
        target: "bidirectional" or "causal", for the message.

    Raises:
        ConversionError: naming the layer, the kind of batch and the first cell that is wrong.
    """
    layouts = torch.ones(3, TOKENS, dtype=torch.bool)  # a full row, and one padded on the right and on the left
    layouts[1, -1], layouts[2, 0] = False, False
    with evaluating(decoder.stack):
        for title, chosen in (("no padding", layouts[:1]), ("padded batch", layouts)):
            real = chosen.repeat_interleave(TOKENS, 0)  # each layout once for each token that is perturbed in it
            rows, columns = torch.arange(len(real)), list(range(TOKENS)) * len(chosen)
            for i, call in enumerate(_calls(decoder, real)):
                expected = torch.stack([_expected_cells(intended[i], row) for row in real])
                reached = attention_influence_by_row(call, columns)
                if torch.equal(reached & real, expected[rows, :, columns]):
                    continue
                cells = attention_influence(call, range(TOKENS), draws=4)  # more perturbations, and the noise known
                wrong = ((cells & real[:, :, None]) != expected).nonzero().tolist()
                if wrong:
                    row, q, k = wrong[0]
                    does, should = ("does not attend", "should") if expected[row, q, k] else ("attends", "must not")
                    key = f"{'' if real[row, k] else 'padded '}token {k}"
                    raise ConversionError(
                        f"the model did not become {target}: {decoder.names[i]} (attention backend "
                        f"{decoder.backend!r}, {title}): row {row}: token {q} {does} to {key} but {should} "
                        f"({len(wrong)} wrong cells); intended was {intended[i]}."
                    )


def _expected_cells(mask: Mask, real: Tensor) -> Tensor:
    """Bool (TOKENS, TOKENS): the cells of `mask` among the real positions; nothing from or to padding."""
    cells = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    at = real.nonzero()[:, 0]
    cells[at[:, None], at] = mask.dense(len(at))
    return cells


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
            f"{len(calls)} attention modules ran, and the model has {len(decoder.layers)} layers: it cannot be measured"
        )
    return calls
