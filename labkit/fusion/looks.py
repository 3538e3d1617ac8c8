"""Attention of the generated tokens of a fused answer to each paraphrase.

    seen = looks(lm, ["Where is Paris?", "Paris is in which country?"], cue="Answer:")
    seen.share                                           # (generated, paraphrases), of all attention
    seen.figure()

The weights are those of the dense reference engine under eager attention. A high weight does not show that a paraphrase
decides the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from labkit.attention.plain import visible
from labkit.decoder.anatomy import Decoder
from labkit.decoder.running import evaluating
from labkit.errors import DataError
from labkit.fusion.engine import fusable_decoder, require_room
from labkit.fusion.generation import generate
from labkit.fusion.layout import prompts, token_ids
from labkit.fusion.methods import METHODS, method_named
from labkit.fusion.reference import ReferenceEngine, RowState, attention_backend
from labkit.models import Loaded
from labkit.viz.heat import fusion_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

NAMES = {None: "prefix", "cue": "cue"}  # of the segments that are no paraphrase, in a figure


@dataclass(frozen=True, eq=False, repr=False)
class Looks:
    """Attention of one answer; row i is the query that predicted token i, the last token before it.

    Attributes:
        weights: (generated, context), attention on the prompt, a mean over `layers` and `heads`.
        before: (generated,), attention on earlier generated tokens; with its row of `weights` it sums to 1.
        context_tokens, generated_tokens: as they are shown. generated_ids: their ids.
        segments: of each context token: None in the prefix, "cue" in the cue, else the number of its paraphrase.
        method, model: their names. layers, heads: which were averaged.
    """

    weights: np.ndarray
    before: np.ndarray
    context_tokens: list[str]
    segments: list[int | str | None]
    generated_tokens: list[str]
    generated_ids: list[int]
    method: str
    model: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]

    @property
    def share(self) -> np.ndarray:
        """(generated, paraphrases): the part of all attention that goes to each paraphrase."""
        numbers = [number for number in dict.fromkeys(self.segments) if isinstance(number, int)]
        segments = np.array([number if isinstance(number, int) else -1 for number in self.segments])
        return np.stack([self.weights[:, segments == number].sum(1) for number in numbers], 1)

    @property
    def share_among_paraphrases(self) -> np.ndarray:
        """(generated, paraphrases): `share`, normalised: rows sum to 1. DataError if a row is all 0."""
        return self.share / self._total()

    def figure(self, title: str | None = None) -> go.Figure:
        """Generated tokens by context tokens, and the share of each segment (`fusion_figure`)."""
        parts = (self.weights, self.context_tokens, self.segments, self.generated_tokens)
        return fusion_figure(*parts, NAMES, title or f"{self.model}, {self.method}", "the attention")

    def figure_of_paraphrases(self, title: str | None = None) -> go.Figure:
        """The same for the attention on paraphrases alone, normalised. DataError if a row of `share` is all 0."""
        kept = [place for place, number in enumerate(self.segments) if number not in NAMES]
        tokens, numbers = [self.context_tokens[i] for i in kept], [self.segments[i] for i in kept]
        title = title or f"{self.model}, {self.method}, of the attention on paraphrases"
        weights = self.weights[:, kept] / self._total()
        return fusion_figure(
            weights, tokens, numbers, self.generated_tokens, {}, title, "the attention on the paraphrases"
        )

    def _total(self) -> np.ndarray:
        """(generated, 1): attention on all paraphrases."""
        total = self.share.sum(1, keepdims=True)
        if not total.all():  # as in a layer whose window is shorter than the cue
            token = self.generated_tokens[int(total[:, 0].argmin())]
            raise DataError(f"{token!r} gives no paraphrase any attention in these layers and heads: use more")
        return total

    def __repr__(self) -> str:
        generated, context = self.weights.shape
        return (
            f"Looks({self.model!r}, {self.method!r}: {generated} generated tokens, {context} tokens of context, "
            f"{self.share.shape[1]} paraphrases; mean of {len(self.layers)} layers and {len(self.heads)} heads)"
        )


def looks(
    lm: Loaded,
    paraphrases: Sequence[str],
    method: str = "fuse",
    *,
    prefix: str = "",
    cue: str = "Answer:",
    separator: str = "\n",
    weights: Sequence[float] | None = None,
    tokens: Sequence[int] | None = None,
    max_new_tokens: int = 12,
    layer: int | Sequence[int] | None = None,
    head: int | Sequence[int] | None = None,
) -> Looks:
    """The attention of each token of an answer. The model is not changed.

    Args:
        paraphrases: of one question. method: a joined one. prefix, cue, separator, weights: as in `generate`, the
            weights of this question's paraphrases.
        tokens: the generated tokens, such as `result.tokens[0]`; None: `max_new_tokens` are generated greedily.
        layer, head: a number, several, or None for all; counted from 0.

    Raises:
        DataError: a method that reads each paraphrase in its own row; tokens, layers or heads that the model does not
            have; what `generate` raises.
    """
    chosen, given = method_named(method), None if weights is None else [weights]
    if not chosen.joined:
        joined = ", ".join(name for name, other in METHODS.items() if other.joined)
        raise DataError(f"the method {method!r} reads each paraphrase in a row of its own; choose one of {joined}")
    model, decoder = lm.model, fusable_decoder(lm.model)
    layers = _numbers("layer", layer, len(decoder.layers))
    heads = _numbers("head", head, decoder.config.num_attention_heads)
    prefix_ids, (segments,), cue_ids = token_ids(lm.tokenizer, [paraphrases], prefix, cue, separator)
    prompt = prompts(chosen, prefix_ids, [segments], cue_ids, given)
    if tokens is None:
        pieces = {"prefix": prefix, "cue": cue, "separator": separator}
        tokens = generate(lm, [paraphrases], method, weights=given, max_new_tokens=max_new_tokens, **pieces).tokens[0]
    tokens, vocabulary = [int(token) for token in tokens], model.get_input_embeddings().num_embeddings
    if not tokens:
        raise DataError("there is no generated token: give those of a result (result.tokens[0]), or None")
    if foreign := [token for token in tokens if not 0 <= token < vocabulary]:
        raise DataError(f"the model has the tokens 0 to {vocabulary - 1}; {foreign[0]} is not among them")
    require_room(model, prompt, 1, len(tokens))
    with evaluating(model), attention_backend(model, "eager"):
        engine, row = ReferenceEngine(model, prompt, rendering="dense"), RowState(prompt.rows[0], prompt, cached=True)
        model(**engine.inputs_of(row, []))  # first the prompt, because its weights are large and not needed
        inputs = engine.inputs_of(row, [*prompt.cue, *tokens[:-1]])
        with _attention_of(decoder, layers) as maps:
            model(**inputs)
    attention = torch.stack([maps[number][0, list(heads), -len(tokens) :].double() for number in layers])
    attention = attention.mean((0, 1)).cpu().numpy()  # (layers, heads, generated, keys) -> (generated, keys)
    ids = [*prefix_ids, *(token for segment in prompt.rows[0].segments for token in segment.ids), *cue_ids]
    pieces = segments[:1] if method == "single" else segments
    numbers = [number for number, piece in enumerate(pieces) for _ in piece]

    def shown(ids: Sequence[int]) -> list[str]:
        return [visible(lm.tokenizer.decode([token])) for token in ids]

    return Looks(
        weights=attention[:, : len(ids)],
        before=attention[:, len(ids) :].sum(1),
        context_tokens=shown(ids),
        segments=[None] * len(prefix_ids) + numbers + ["cue"] * len(cue_ids),
        generated_tokens=shown(tokens),
        generated_ids=tokens,
        method=method,
        model=lm.name,
        layers=layers,
        heads=heads,
    )


@contextmanager
def _attention_of(decoder: Decoder, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """For the block, collect the weights of each layer, (1, heads, q, keys).

    `output_attentions=True` would leave transformers' own hooks on the model.
    """
    maps: dict[int, Tensor] = {}
    hooks = [
        decoder.attentions[number].register_forward_hook(lambda _, args, out, n=number: maps.update({n: out[1]}))
        for number in layers
    ]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def _numbers(kind: str, chosen: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    numbers = range(count) if chosen is None else (chosen,) if isinstance(chosen, int) else chosen
    if not numbers:
        raise DataError(f"no {kind} was chosen; give a number, several, or None for all {count}")
    if wrong := [number for number in numbers if number not in range(count)]:
        raise DataError(f"there is no {kind} {wrong[0]}: the model has {kind}s 0 to {count - 1}")
    return tuple(numbers)
