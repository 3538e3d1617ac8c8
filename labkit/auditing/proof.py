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
from labkit.decoder.running import Runner, evaluating, without_mlps
from labkit.errors import AuditError, ConversionError
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


def _calls(decoder: Decoder, real: Tensor) -> list[AttentionCall]:
    runner = Runner(decoder.stack, decoder)
    ids = runner.tokens(len(real), TOKENS)
    try:
        with without_mlps(decoder), recorded_calls(decoder.attentions) as calls:
            runner.run(ids, None if bool(real.all()) else real)
    except AuditError as error:
        cause = error.__cause__ or error
        raise ConversionError(
            f"{type(decoder.stack).__name__} (attention backend {decoder.backend!r}) could not be run to measure its "
            f"masks: {type(cause).__name__}: {' '.join(str(cause).split())[:200]}."
        ) from error
    if len(calls) != len(decoder.layers):
        raise ConversionError(
            f"{len(calls)} attention modules ran, and the model has {len(decoder.layers)} layers: it cannot be measured"
        )
    return calls
