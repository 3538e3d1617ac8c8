"""Which paraphrase does each generated token look at? Attention weights of a fused answer, one row per token.

    seen = looks(lm, ["Where is Paris?", "Paris is in which country?"], cue="Answer:")
    seen.share                                           # (generated, paraphrases), of all attention
    seen.figure()

Only eager attention ever holds these weights, so it is put in force for the reading; mask, positions and biases are
those of the reference engine. Attention is where a token looks, which is not the same as what decides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from labkit.decoder.anatomy import Decoder
from labkit.decoder.running import evaluating
from labkit.errors import FusionError
from labkit.fusion.engine import fusable_decoder, require_room
from labkit.fusion.generation import generate
from labkit.fusion.layout import Prompts, prompts, token_ids
from labkit.fusion.methods import METHODS, method_named
from labkit.fusion.reference import ReferenceEngine, RowState, attention_backend
from labkit.models import Loaded
from labkit.viz.heat import fusion_figure
from labkit.viz.labels import visible

if TYPE_CHECKING:
    import plotly.graph_objects as go

CUE = "cue"  # in `Looks.segments`
NAMES = {None: "prefix", CUE: "cue"}  # of what is no paraphrase, in a figure


@dataclass(frozen=True, eq=False, repr=False)
class Looks:
    """Where the generated tokens of one answer look; row i is the query that chose token i, the last token before it.

    Attributes:
        weights: (generated, context), attention on the prompt, a mean over `layers` and `heads`.
        before: (generated,), attention on the tokens generated before; with its row of `weights` it sums to 1.
        context_tokens, generated_tokens: as they are shown.
        segments: of each context token: None in the prefix, CUE in the cue, else the number of its paraphrase.
        generated_ids: the ids of the generated tokens.
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
        """(generated, paraphrases): of all its attention, what a token gives each paraphrase; not normalised.

        What a row lacks to 1 goes to the prefix, the cue and the tokens generated before.
        """
        return np.stack([self.weights[:, self._of(n)].sum(1) for n in self._paraphrases], 1)

    @property
    def share_among_paraphrases(self) -> np.ndarray:
        """(generated, paraphrases): `share`, normalised: of what a token gives the paraphrases; rows sum to 1.

        Raises:
            FusionError: a token that looks at no paraphrase at all, as in a layer whose window is too short.
        """
        return self.share / self._given_paraphrases()

    def figure(self, title: str | None = None) -> go.Figure:
        """The whole prompt: a map of generated tokens and context, and the share of each piece (`fusion_figure`)."""
        title = title or self._title()
        pieces = (self.context_tokens, self.segments, self.generated_tokens)
        return fusion_figure(self.weights, *pieces, NAMES, title, "the attention")

    def figure_of_paraphrases(self, title: str | None = None) -> go.Figure:
        """The same for the paraphrases alone: of what a token gives them, how much each gets. FusionError as above."""
        kept = np.array([number not in NAMES for number in self.segments])
        tokens = [token for token, keep in zip(self.context_tokens, kept, strict=True) if keep]
        numbers = [number for number in self.segments if number not in NAMES]
        title = title or f"{self._title()}, of the attention on paraphrases"
        weights = self.weights[:, kept] / self._given_paraphrases()
        return fusion_figure(
            weights, tokens, numbers, self.generated_tokens, {}, title, "the attention on the paraphrases"
        )

    def __repr__(self) -> str:
        generated, context = self.weights.shape
        return (
            f"Looks({self.model!r}, {self.method!r}: {generated} generated tokens, {context} tokens of context, "
            f"{len(self._paraphrases)} paraphrases; mean of {len(self.layers)} layers and {len(self.heads)} heads)"
        )

    @property
    def _paraphrases(self) -> list[int]:
        return sorted({number for number in self.segments if isinstance(number, int)})

    def _of(self, number: int) -> list[int]:
        return [place for place, each in enumerate(self.segments) if each == number]

    def _given_paraphrases(self) -> np.ndarray:
        total = self.share.sum(1, keepdims=True)  # (generated, 1)
        if not total.all():
            token = self.generated_tokens[int(total[:, 0].argmin())]
            raise FusionError(
                f"{token!r} gives no paraphrase any attention in these layers and heads: take more of them"
            )
        return total

    def _title(self) -> str:
        return f"{self.model}, {self.method}"


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
    """Where each token of an answer looks; the model is as it was afterwards, also after an exception.

    Args:
        paraphrases: of one question. method: a joined one, which reads all in one row. prefix, cue, separator, weights:
            as in `generate`, the weights of this question's paraphrases.
        tokens: the generated tokens, such as `result.tokens[0]`; None: `max_new_tokens` are generated greedily.
        layer, head: a number, several, or None for all; counted from 0.

    Raises:
        FusionError: a method that reads each paraphrase in a row of its own; tokens, layers or heads that the model
            does not have; what `generate` raises.
    """
    chosen = method_named(method)
    if not chosen.joined:
        joined = ", ".join(name for name, each in METHODS.items() if each.joined)
        raise FusionError(
            f"the method {method!r} reads each paraphrase in a row of its own, where no token looks at another "
            f"paraphrase; choose one of {joined}"
        )
    decoder = fusable_decoder(lm.model)
    layers = _numbers("layer", layer, len(decoder.layers))
    heads = _numbers("head", head, decoder.config.num_attention_heads)
    begins, (ids,), ends = token_ids(lm.tokenizer, [paraphrases], prefix, cue, separator)
    given = None if weights is None else [weights]
    prompt = prompts(chosen, begins, [ids], ends, given)
    if tokens is None:
        pieces = {"prefix": prefix, "cue": cue, "separator": separator}
        answer = generate(lm, [paraphrases], method, weights=given, max_new_tokens=max_new_tokens, **pieces)
        tokens = answer.tokens[0]
    tokens = _known(tokens, lm.model.get_input_embeddings().num_embeddings)
    found = _read(lm, decoder, prompt, tokens, layers, heads)  # (generated, context + generated before)
    context = found.shape[1] - len(tokens) + 1
    read = ids[:1] if method == "single" else ids
    numbers = [number for number, each in enumerate(read) for _ in each]

    def shown(row: Sequence[int]) -> list[str]:
        return [visible(lm.tokenizer.decode([token])) for token in row]

    return Looks(
        weights=found[:, :context],
        before=found[:, context:].sum(1),
        context_tokens=shown(
            [*begins, *(token for segment in prompt.rows[0].segments for token in segment.ids), *ends]
        ),
        segments=[None] * len(begins) + numbers + [CUE] * len(ends),
        generated_tokens=shown(tokens),
        generated_ids=tokens,
        method=method,
        model=lm.name,
        layers=layers,
        heads=heads,
    )


def _read(
    lm: Loaded, decoder: Decoder, prompt: Prompts, tokens: list[int], layers: tuple[int, ...], heads: tuple[int, ...]
) -> np.ndarray:
    """(generated, keys): the mean attention of the queries that chose `tokens`, in two passes of the reference engine.

    The first reads prefix and paraphrases, so that the weights of the second, (heads, cue and answer, keys), are few.
    """
    require_room(lm.model, prompt, 1, len(tokens))
    with evaluating(lm.model), attention_backend(lm.model, "eager"):
        engine = ReferenceEngine(lm.model, prompt, rendering="dense")
        row = RowState(prompt.rows[0], prompt, cached=True)
        lm.model(**engine.inputs_of(row, []))
        inputs = engine.inputs_of(row, [*prompt.cue, *tokens[:-1]])
        with _kept(decoder, layers, heads, len(tokens)) as found:
            lm.model(**inputs)
    if missing := sorted(set(layers) - set(found)):
        raise FusionError(f"layer {missing[0]} of {lm.name} gives no attention weights under eager attention")
    return torch.stack([found[number] for number in layers]).mean(0).numpy()


@contextmanager
def _kept(decoder: Decoder, layers: Sequence[int], heads: Sequence[int], last: int) -> Iterator[dict[int, Tensor]]:
    """For the block, {layer: (last queries, keys)}: the weights of each layer, a mean over `heads`."""
    found: dict[int, Tensor] = {}

    def keep(number: int):
        def hook(module, args, output) -> None:
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None  # (1, heads, q, keys)
            if isinstance(weights, Tensor):
                found[number] = weights[0, list(heads), -last:].double().mean(0).cpu()

        return hook

    hooks = [decoder.attentions[number].register_forward_hook(keep(number)) for number in layers]
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()


def _known(tokens: Sequence[int], vocabulary: int) -> list[int]:
    known = [int(token) for token in tokens]
    if not known:
        raise FusionError("no generated token was given: give those of a result (result.tokens[0]), or None")
    if foreign := [token for token in known if not 0 <= token < vocabulary]:
        raise FusionError(f"the model has the tokens 0 to {vocabulary - 1}, and {foreign[0]} is not among them")
    return known


def _numbers(kind: str, asked: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    found = range(count) if asked is None else (asked,) if isinstance(asked, int) else asked
    if not found:
        raise FusionError(f"no {kind} was asked for; give a number, several, or None for all {count}")
    if wrong := [each for each in found if each not in range(count)]:
        raise FusionError(f"there is no {kind} {wrong[0]}: the model has {kind}s 0 to {count - 1}")
    return tuple(found)
