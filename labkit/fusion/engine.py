"""What both engines share: which models can be fused, how far each kind of layer sees, and how a model takes masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from labkit.decoder.anatomy import FULL, SLIDING, Decoder, decoder_or_none
from labkit.decoder.limits import require_memory, require_positions
from labkit.decoder.packing import MARK
from labkit.errors import FusionError
from labkit.fusion.layout import Prompts

BIDIRECTIONAL = (("is_causal", False), ("use_bidirectional_attention", True))  # settings of transformers


@runtime_checkable
class Engine(Protocol):
    """Prompts that have been read, and what comes after them.

    Attributes:
        name: what the result says was used.
        counts: how many rows each question has; rows of one question stand together.
    """

    name: str
    counts: list[int]

    def start(self) -> Tensor:
        """Read the prompts, cue included; returns the logits of the first token that comes after, (rows, vocab)."""

    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, (rows,); returns the logits of the next, (rows, vocab)."""

    def select(self, questions: Sequence[int]) -> None:
        """Go on with these questions, in this order, each as often as it is named (beams)."""


def rows_of(questions: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The numbers of the rows of `questions`, one question after the other."""
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return [starts[number] + row for number in questions for row in range(counts[number])]


def fusable_decoder(model: nn.Module) -> Decoder:
    """The decoder of a causal model whose segments can stand side by side.

    Raises:
        FusionError: what keeps the model from being fused.
    """
    decoder, reason = decoder_or_none(model), None
    parameters = inspect.signature(decoder.stack.forward).parameters if decoder else {}
    if decoder is None:
        reason = "it holds no decoder that labkit knows"
    elif foreign := sorted(set(decoder.layer_types) - {FULL, SLIDING}):
        reason = f"it has layers of the type {foreign[0]!r}, which keep no keys that could be laid side by side"
    elif getattr(decoder.config, "alibi", False) or "position_ids" not in parameters:
        reason = "its positions are counted along the row, so no segment can begin where another one does"
    elif getattr(decoder.config, MARK, None) is not None:
        reason = "it has been made bidirectional, and such a model does not write: call labkit.to_causal first"
    elif any(getattr(decoder.config, name, None) is value for name, value in BIDIRECTIONAL):
        reason = "its configuration says that it is bidirectional, and such a model does not write"
    elif not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        reason = "it has no language-model head"
    if reason is not None:
        raise FusionError(f"{type(model).__name__} cannot be fused: {reason}")
    return decoder


def require_room(model: nn.Module, prompts: Prompts, batch_size: int, new_tokens: int, beams: int = 1) -> None:
    """Raise FusionError if a position is beyond the model's, or the keys and values of a batch beyond the memory."""
    decoder, parameter = fusable_decoder(model), next(model.parameters())
    config, dtype = decoder.config, parameter.dtype
    rows = max(prompts.counts) * min(batch_size, len(prompts.counts)) * beams
    cached_tokens = rows * (prompts.longest_row + new_tokens)
    cure = "give fewer or shorter paraphrases, fewer examples or fewer new tokens, or a method that restarts positions"
    require_positions(prompts.last_position + new_tokens, config, refusal=FusionError, cure=cure)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    needed = 2 * len(decoder.layers) * heads * size * dtype.itemsize * cached_tokens
    what, cure = f"the cache of {cached_tokens:,} tokens", "take a smaller batch_size, or fewer paraphrases"
    require_memory(what, needed, str(parameter.device), cure=cure, refusal=FusionError)


def windows(decoder: Decoder) -> dict[str, int | None]:
    """How many positions each kind of layer reaches back over, itself included; None: all."""
    reach = getattr(decoder.config, "sliding_window", None)
    return {kind: reach if kind == SLIDING else None for kind in sorted(set(decoder.layer_types))}


def handed_over(decoder: Decoder, make: Callable[[int | None], Any]) -> Any:
    """The masks that `make(window)` gives, as the layer stack takes them: one, or one for each kind of layer.

    Gemma and its like measure a window along the cache, where segments stand side by side. Here it is measured in
    positions, so each kind of layer gets a mask of its own.
    """
    made = {kind: make(window) for kind, window in windows(decoder).items()}
    return made if len(made) > 1 else next(iter(made.values()))


def additive(allowed: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, q, k) bool and what is added to the scores, as the mask that eager and sdpa take: (rows, 1, q, k)."""
    mask = bias.to(dtype).expand(allowed.shape).masked_fill(~allowed, torch.finfo(dtype).min)
    return mask[:, None]


@contextmanager
def states_changed(decoder: Decoder, layer: int | None, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """For the block, what `layer` gives, (rows, q, dim), goes through `change`; None: nothing does."""
    if layer is None:
        yield
        return

    def changed(module: nn.Module, args: tuple, output: Any):
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    handle = decoder.layers[layer].register_forward_hook(changed)
    try:
        yield
    finally:
        handle.remove()


def averaged(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """(rows, q, dim): each row the mean over the rows of its question."""
    return torch.cat([rows.mean(0, keepdim=True).expand_as(rows) for rows in hidden.split(list(counts))])


def in_float(logits: Tensor) -> Tensor:
    """Half precision is too coarse to add up log-probabilities in."""
    return logits.float() if logits.dtype.itemsize < 4 else logits
