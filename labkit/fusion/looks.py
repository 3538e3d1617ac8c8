"""Attention of the generated tokens of a fused answer to each paraphrase.

    seen = looks(lm, ["Where is Paris?", "Paris is in which country?"], tokens=result.tokens[0])
    seen.share                                           # (generated, paraphrases), of all attention
    seen.figure("The attention of the answer")

The weights are those of the dense reference engine under eager attention. A high weight does not show that a paraphrase
decides the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from labkit.attention.plain import visible
from labkit.decoder.running import evaluating, replaced
from labkit.errors import DataError
from labkit.fusion.engine import ReferenceEngine, fusable_decoder, require_positions_for
from labkit.fusion.layout import prompts, token_ids
from labkit.fusion.methods import METHODS
from labkit.models import Loaded
from labkit.viz.heat import fusion_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

NAMES = {None: "prefix", "cue": "cue"}  # of the segments that are no paraphrase, in a figure


@dataclass(frozen=True, eq=False)
class Looks:
    """Attention of one answer; row i is the query that predicted token i, the last token before it.

    Attributes:
        weights: (generated, context), attention on the prompt, a mean over the chosen layers and heads. What is missing
            to 1 in a row is attention on earlier generated tokens.
        context_tokens, generated_tokens: as they are shown.
        segments: of each context token: None in the prefix, "cue" in the cue, else the number of its paraphrase.
    """

    weights: np.ndarray
    context_tokens: list[str]
    segments: list[int | str | None]
    generated_tokens: list[str]

    @property
    def share(self) -> np.ndarray:
        """(generated, paraphrases): the part of all attention that goes to each paraphrase."""
        segments = np.array([-1 if segment in NAMES else segment for segment in self.segments])
        return np.stack([self.weights[:, segments == number].sum(1) for number in range(segments.max() + 1)], 1)

    def among_paraphrases(self) -> Looks:
        """The attention on the paraphrases alone, normalised: rows of `weights` and of `share` sum to 1."""
        places = [place for place, segment in enumerate(self.segments) if segment not in NAMES]
        weights = self.weights[:, places] / self.share.sum(1, keepdims=True)
        tokens, segments = [self.context_tokens[i] for i in places], [self.segments[i] for i in places]
        return Looks(weights, tokens, segments, self.generated_tokens)

    def figure(self, title: str) -> go.Figure:
        """Generated tokens by context tokens, and the share of each segment (`fusion_figure`)."""
        whole = "the attention" if "cue" in self.segments else "the attention on the paraphrases"
        return fusion_figure(
            self.weights, self.context_tokens, self.segments, self.generated_tokens, NAMES, title, whole
        )


def looks(
    lm: Loaded,
    paraphrases: Sequence[str],
    *,
    tokens: Sequence[int],
    prefix: str = "",
    cue: str = "Answer:",
    layer: int | None = None,
    head: int | None = None,
) -> Looks:
    """The attention of each token of an answer under the method "fuse". The model is not changed.

    Args:
        paraphrases: of one question. tokens: of its answer, `result.tokens[0]`. prefix, cue: as in `generate`.
        layer, head: counted from 0; None: the mean over all.

    Raises DataError for no tokens, a layer or a head that the model does not have, and what `generate` raises.
    """
    decoder = fusable_decoder(lm.model)
    layers, heads = len(decoder.layers), decoder.config.num_attention_heads
    if not tokens or (layer or 0) not in range(layers) or (head or 0) not in range(heads):
        raise DataError(f"give at least one generated token, a layer from 0 to {layers - 1}, a head to {heads - 1}")
    prefix_ids, segments, cue_ids = token_ids(lm.tokenizer, [paraphrases], prefix, cue, "\n")
    prompt = prompts(METHODS["fuse"], prefix_ids, segments, [*cue_ids, *tokens[:-1]])  # read in one pass
    require_positions_for(lm.model, prompt, 0)
    maps: list[Tensor] = []

    def keep(attention: nn.Module, args: tuple, output: tuple) -> None:
        maps.append(output[1][0, :, -len(tokens) :].double())  # (heads, generated, keys)

    with ExitStack() as stack:
        for attention in decoder.attentions if layer is None else decoder.attentions[layer : layer + 1]:
            stack.callback(attention.register_forward_hook(keep).remove)
        stack.enter_context(evaluating(lm.model))
        stack.enter_context(replaced(decoder.config, _attn_implementation="eager"))
        ReferenceEngine(lm.model, prompt, rendering="dense").start()
    weights = torch.stack(maps).mean(0)
    weights = weights.mean(0) if head is None else weights[head]
    owners = prompt.rows[0].owners.tolist()
    shown = [visible(lm.tokenizer.decode([token])) for token in (*prompt.rows[0].ids.tolist(), *cue_ids, *tokens)]
    segments = [owner - 1 if owner else None for owner in owners] + ["cue"] * len(cue_ids)
    end = len(segments)
    return Looks(weights[:, :end].cpu().numpy(), shown[:end], segments, shown[end:])
