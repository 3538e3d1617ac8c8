"""Does a causal language model see what it is asked to predict? By perturbation, to the last bit; and by training.

    print(find_leaks(model))          # which position sees which later one, by how much, in which layer
    print(leak_meter(factory, ids))   # what a leak does to training: labkit.leak_training

A decoder's output at position i must not change, not by one bit, when a token after i changes. Four ways of hiding a
leak are opened: a mask that is dropped in train mode, a mask that is a number which large scores outweigh, a leak in one
layer only, and labels that were not shifted, so that each position is asked for the token it was given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labkit.anatomy import attention_modules, decoder_or_none
from labkit.leak_training import LeakMeter, leak_meter
from labkit.measure import layer_list
from labkit.probe import AttentionCall, Runner, attention_influence, evaluating, recorded_calls

__all__ = ["Leak", "LeakMeter", "LeakReport", "find_leaks", "leak_meter"]

TOKENS = 16
STRESS = (10.0, 1e2, 1e3, 1e4, 1e5, 1e6)  # factors on attention scores that a finite mask value must withstand


@dataclass(frozen=True)
class Leak:
    """One way in which the future gets in.

    Attributes:
        kind: "future-token", "train-mode", "finite-mask" or "labels-not-shifted".
        text: what was seen, in plain words.
        cells: (position, later position that it sees), most affected first.
        layers: attention layers in which it happens, where that could be measured.
    """

    kind: str
    text: str
    cells: tuple[tuple[int, int], ...] = ()
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class LeakReport:
    """What `find_leaks` found. `print(report)` tells it; `report.clean` is True if nothing leaks.

    `influence` (positions, positions): how much the output at i changes when token j does, relative to its size.
    """

    model: str
    leaks: list[Leak]
    influence: Tensor
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.leaks

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {'no leak' if self.clean else 'LEAKS'}, {len(self.influence)} tokens perturbed one by one"
        ]
        lines += [f"leak: {leak.text}" for leak in self.leaks]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def to_json(self) -> str:
        leaks = [
            {"kind": leak.kind, "text": leak.text, "cells": leak.cells, "layers": leak.layers} for leak in self.leaks
        ]
        return json.dumps(
            {"model": self.model, "clean": self.clean, "leaks": leaks, "notes": self.notes,
             "influence": self.influence.tolist()}, indent=1
        )  # fmt: skip


def find_leaks(model: nn.Module, *, tokens: int = TOKENS, vocab_size: int | None = None, seed: int = 0) -> LeakReport:
    """Perturb each token and see whether any position before it notices: in eval mode, in train mode, under stress.

    Args:
        model: maps `input_ids` (batch, seq) to logits or states (batch, seq, ...); a transformers model, a
            `labkit.gpt.GPT`, or your own. It is left as it was.
        tokens: length of the text that is perturbed.
        vocab_size: number of token ids, if the model has no `nn.Embedding` to tell it.

    Raises:
        AuditError: the model cannot be called on token ids, or gives no output per position.
    """
    decoder = decoder_or_none(model)
    runner = Runner(model, decoder, vocab_size)
    tokens = min(tokens, _context_of(model))
    ids = runner.tokens(1, tokens, seed)
    attentions = decoder.attentions if decoder else attention_modules(model)
    leaks, notes = [], []
    with evaluating(model):
        influence = _influence(runner, ids)
        if cells := _future_cells(influence):
            layers = _leaking_layers(runner, attentions, ids, seed)
            leaks.append(Leak("future-token", _in_words(cells, influence, layers), cells, layers))
        else:
            leaks += _under_stress(runner, attentions, ids, notes)
        leaks += _misplaced_labels(model, runner, ids)
    if not leaks:
        leaks += _in_train_mode(model, runner, ids, seed)
    if not attentions:
        notes.append("no attention modules were found: layers were not told apart, and scores not raised")
    return LeakReport(type(model).__name__, leaks, influence, notes)


@torch.no_grad()
def _influence(runner: Runner, ids: Tensor, seed: int | None = None) -> Tensor:
    """(positions, positions) relative change of the output at i when token j changes; a seed fixes the dropout."""

    def run(x: Tensor) -> Tensor:
        if seed is None:
            return runner.run(x)[0].float()  # (positions, dim)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return runner.run(x)[0].float()

    base = run(ids)
    noise = (run(ids) - base).abs().amax(-1)  # 0 with deterministic kernels
    size = base.abs().amax(-1).clamp(min=1e-12)
    columns = []
    for j in range(ids.size(1)):
        changed = ids.clone()
        changed[:, j] = (changed[:, j] + 7) % runner.vocab_size
        gap = (run(changed) - base).abs().amax(-1)
        columns.append(torch.where(gap > 8 * noise, gap / size, 0.0))
    return torch.stack(columns, dim=1).cpu()


def _future_cells(influence: Tensor) -> tuple[tuple[int, int], ...]:
    """Cells above the diagonal in which anything changed, the strongest first."""
    cells = influence.nan_to_num(torch.inf).triu(1)
    order = cells.flatten().argsort(descending=True, stable=True)[: int((cells > 0).sum())].tolist()
    return tuple(divmod(index, len(cells)) for index in order)


def _in_words(cells: tuple[tuple[int, int], ...], influence: Tensor, layers: tuple[int, ...]) -> str:
    n = len(influence)
    i, j = cells[0]
    share = len(cells) / (n * (n - 1) / 2)
    ahead = sorted({later - earlier for earlier, later in cells})
    reach = f"{ahead[0]}" if len(ahead) == 1 else f"{ahead[0]} to {ahead[-1]}"
    where = f", in {layer_list(layers)}" if layers else ""
    return (
        f"{len({c[0] for c in cells})} of {n} positions see {reach} tokens ahead ({share:.0%} of what a causal mask hides)"
        f"{where}; the most: position {i} changes by {float(influence[i, j]):.2g} of its size when token {j} does"
    )


def _leaking_layers(runner: Runner, attentions, ids: Tensor, seed: int) -> tuple[int, ...]:
    if not attentions:
        return ()
    with recorded_calls(attentions) as calls:
        runner.run(ids)
    return tuple(i for i, call in enumerate(calls) if _attends_ahead(call, ids.size(1), seed))


def _attends_ahead(call: AttentionCall, n: int, seed: int) -> bool:
    seen = attention_influence(call, range(n), 2, seed)[0]  # (query, key)
    return bool(seen.triu(1).any())


def _under_stress(runner: Runner, attentions, ids: Tensor, notes: list[str]) -> list[Leak]:
    """Raise every attention score by growing factors: a mask that is merely a large number gives way at one of them."""
    if not attentions:
        return []
    for factor in STRESS:
        with _scores_raised(attentions, factor):
            influence = _influence(runner, ids)
        if not bool(influence.isfinite().all()):
            notes.append(f"with scores {factor:g} times as large the outputs are no numbers: not tested beyond")
            return []
        if cells := _future_cells(influence):
            text = (
                f"the future is hidden by a finite number only: with attention scores {factor:g} times as large, "
                f"{len({c[0] for c in cells})} of {len(influence)} positions see ahead"
            )
            return [Leak("finite-mask", text, cells)]
    return []


@contextmanager
def _scores_raised(attentions, factor: float) -> Iterator[None]:
    """Attention scores times `factor`: by the module's own scaling where it has one, else by its input's size."""
    changed, handles = [], []
    for module in attentions:
        if isinstance(getattr(module, "scaling", None), float):
            changed.append((module, module.scaling))
            module.scaling *= factor
        else:
            handles.append(module.register_forward_pre_hook(_Enlarge(factor**0.5), with_kwargs=True))
    try:
        yield
    finally:
        for module, scaling in changed:
            module.scaling = scaling
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Enlarge:
    """A pre-hook that multiplies the hidden states by a factor; query and key both grow with it."""

    factor: float

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict):
        if args:
            return (args[0] * self.factor, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * self.factor}


def _in_train_mode(model: nn.Module, runner: Runner, ids: Tensor, seed: int) -> list[Leak]:
    """With the same dropout in both runs, train mode must hide the future as eval mode does."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        influence = _influence(runner, ids, seed=seed)
    finally:
        for module, mode in modes:
            module.training = mode
    cells = _future_cells(influence)
    return [Leak("train-mode", "only in train mode: " + _in_words(cells, influence, ()), cells)] if cells else []


@torch.no_grad()
def _misplaced_labels(model: nn.Module, runner: Runner, ids: Tensor) -> list[Leak]:
    """Which logits does the model's own loss hold against the label at j? It should be those of position j - 1."""
    if not runner.takes("labels") or not hasattr(model, "get_output_embeddings"):
        return []
    j = ids.size(1) // 2
    labels = torch.full_like(ids, -100)
    labels[0, j] = ids[0, j]
    out = model(input_ids=ids.to(runner.device), labels=labels.to(runner.device))
    if getattr(out, "loss", None) is None or out.logits.shape[:2] != ids.shape:
        return []
    costs = -out.logits[0].float().log_softmax(-1)[:, ids[0, j]]  # (positions,)
    at = int((costs - float(out.loss)).abs().argmin())
    if at == j - 1:
        return []
    given = "the token it was given" if at == j else f"the token {at - j:+d} positions from it"
    text = (
        f"the model's loss compares the logits at a position with {given}, not with the next one (labels not shifted)"
    )
    return [Leak("labels-not-shifted", text, ((at, j),))]


def _context_of(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    return getattr(config, "max_position_embeddings", None) or getattr(config, "context", None) or TOKENS
