"""Change one position and compare the outputs: the primitives under the audit and under the proof of a conversion.

**The rule for influence.** A module is run twice on the same batch, in the same shape, with only position j changed. If
the output at position i differs, j influences i. Two identical runs give the noise of the machine (0 with deterministic
kernels); a difference counts if it exceeds 8 times that noise. Since a blocked key contributes exactly nothing, no
tolerance for the dtype is needed: in bfloat16, too, a single changed bit is an influence. `measured_influence` is this
rule; the tokens of a model, the states of an attention module and small changes of either are measured with it.

One cell cannot be measured from outside: a token's own state also forms its query, so it influences its own output
whether or not its own key is open. The diagonal of a measured mask is therefore (nearly) always True.

**Large changes** show even a weak connection: attention is measured on random hidden states (no attention sinks), and
position j is replaced by a vector and by its negative, both 64 times as large as a typical one. Whatever the weights,
one of the two raises the score of key j in each head.

**Small changes** decide where attention is so sharp that a large change need not show. Where queries and keys are
normalised and scores are large (Gemma 4), a softmax is nearly one-hot, and an open key can have a weight too small to
change a bit. So if the changed cells are neither those of a causal mask nor all cells, the columns with missing cells
are measured again: in float64, at hidden states that are nearly alike at all positions and with scores scaled down, so
that no weight is small unless its key is blocked. The difference that a blocked key makes is exactly 0 here, too.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from labkit.decoder.running import first_tensor, in_precision, replaced
from labkit.errors import AuditError

STRENGTH = 64.0  # size of a large change, in typical sizes of a hidden state; 8 in float16, which ends at 65504
NOISE_FACTOR = 8.0
SPREAD, SHORT_SPREAD = 1e-3, 0.1  # size of a small change, and of the distance of states, in float64 and without it
FLAT = 1e-3  # factor on attention scores there
REPRODUCED = 0.01  # of the largest output: by how much a replay of the same may differ
HIDDEN = re.compile(r"hidden(_states?)?|x|h|inputs?|quer(y|ies)|q")
KEY_OR_VALUE = re.compile(r"(k|v|keys?|values?)(_states?|_value_states|_tensors?)?|memory|encoder_hidden_states")
# the names of the projection from the heads to the output of an attention module
PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense", "wo", "Wo")


# -- the rule ----------------------------------------------------------------------------------------------------------


def relative_change(after: Tensor, before: Tensor) -> Tensor:
    """(batch, seq, ...): the largest difference over the last dimension, relative to the size of `before` there.

    NaN against NaN is no difference, NaN against a number an infinite one.
    """
    exact = torch.promote_types(after.dtype, torch.float32)
    after, before = after.to(exact), before.to(exact)
    gap = (after - before).abs().amax(-1).nan_to_num(0.0, posinf=torch.inf)
    gap = gap.masked_fill(after.isnan().any(-1) ^ before.isnan().any(-1), torch.inf)
    return gap / before.abs().amax(-1).nan_to_num(1.0).clamp(min=1e-12)


@torch.no_grad()
def measured_influence(outcome: Callable, given, changed: Callable, columns: Sequence, draws: int = 1) -> Tensor:
    """How much each output changes with the position j, for every j in `columns`; 0 if not beyond the noise.

    Args:
        outcome: the outputs (batch, seq, ..., dim) for an input such as `given`.
        changed: `changed(j, draw)` is the input with another content at j; of several draws the largest change counts,
            so that one chance agreement does not hide a connection.

    Returns:
        (batch, seq, ..., len(columns)) on the CPU: [b, i, c] = relative change of output i of row b.
    """
    base = outcome(given)
    noise = NOISE_FACTOR * relative_change(outcome(given), base)
    largest = []
    for j in columns:
        gap = torch.stack([relative_change(outcome(changed(j, draw)), base) for draw in range(draws)]).amax(0)
        largest.append(gap.masked_fill(gap <= noise, 0.0))
    return torch.stack(largest, -1).cpu()


def later(n: int, columns: Sequence[int]) -> Tensor:
    """Bool (n, len(columns)): whether columns[c] is later than the position of the row."""
    return torch.arange(n)[:, None] < torch.tensor(list(columns))


# -- the tokens of a model ---------------------------------------------------------------------------------------------


def exchanged(ids: Tensor, which: Tensor, vocab_size: int, step: int = 1) -> Tensor:
    """`ids` (batch, seq) with other tokens where `which`, bool of a shape that broadcasts; each step gives others.

    A token is never exchanged for itself, however small the vocabulary. The first two steps, by 7 and by 12 ids, have
    no period in common, so that a model that uses ids modulo some number shows a change in one of them.
    """
    step_by = 1 + (5 * step + 1) % max(1, vocab_size - 1)
    return torch.where(which.to(ids.device), (ids + step_by) % vocab_size, ids)


def token_influence(run: Callable, ids: Tensor, columns: Sequence[int], vocab_size: int, draws: int = 2) -> Tensor:
    """`measured_influence` of the tokens at `columns` on the outputs of `run`: (batch, seq, len(columns))."""

    def changed(j: int, draw: int) -> Tensor:
        return exchanged(ids, torch.arange(ids.shape[1]) == j, vocab_size, draw + 1)

    return measured_influence(run, ids, changed, columns, draws)


def changed_outputs(run: Callable, ids: Tensor, which: Tensor, vocab_size: int) -> Tensor:
    """The other outputs, bool (batch, seq), that change when the tokens `which`, bool (batch, seq), are exchanged."""
    changes = measured_influence(run, ids, lambda which, draw: exchanged(ids, which, vocab_size), [which])
    return (changes[..., 0] > 0) & ~which


def refine_by_embeddings(
    cells: Tensor, run: Callable, model: nn.Module, ids: Tensor, columns: Sequence[int], real: Tensor
) -> bool:
    """Add to `cells`, bool (batch, seq, len(columns)), what small changes of the embeddings show; whether that is more.

    The embeddings are replaced by vectors that are nearly alike, so that attention is not sharp in any layer. Without
    an `nn.Embedding` that is called with `ids`, nothing is added.
    """
    if not (doubtful := doubtful_columns(cells, columns, real)):
        return False
    outputs: list[Tensor] = []  # of the embeddings that are called with `ids`
    substitute: Tensor | None = None

    def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        if not args or not isinstance(args[0], Tensor) or not torch.equal(args[0], ids.to(args[0].device)):
            return None
        outputs.append(output)
        return substitute if substitute is not None and substitute.shape == output.shape else None

    def outcome(embeddings: Tensor) -> Tensor:
        nonlocal substitute
        substitute = embeddings
        return run(ids)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(hook).remove)
        run(ids)
        if not outputs:
            return False
        # so large that learned positions, which are added to them, make no difference
        return _add_small_changes(cells, columns, doubtful, model, outcome, outputs[0], times=1000.0)


# -- the hidden states of an attention module --------------------------------------------------------------------------


@dataclass
class AttentionCall:
    """One call of one attention module, as its layer made it: replayable with other hidden states.

    Attributes:
        args, kwargs: what the module was given; of a cache or list, which a call may change, a copy for each replay.
        index: of the module among those that were watched.
        hidden: the hidden states that it was given, (batch, seq, dim), before anything was added to them in place.
        output: what it gave, (batch, seq, dim).
        projection, heads: if set, a replay gives what each head puts into this projection, (batch, seq, heads, dim).
        refined: whether small changes added to what large ones showed, in the last `attention_influence`.
    """

    module: nn.Module
    args: tuple
    kwargs: dict
    index: int
    hidden: Tensor | None = None
    output: Tensor | None = None
    projection: nn.Module | None = None
    heads: int = 1
    refined: bool = False

    @property
    def given(self) -> Tensor | None:
        """The hidden states among the arguments: by their name, else the first of three dimensions."""
        states = {k: v for k, v in self._named() if isinstance(v, Tensor) and v.ndim == 3 and v.is_floating_point()}
        return next((states[name] for name in states if HIDDEN.fullmatch(name)), next(iter(states.values()), None))

    def _named(self) -> list[tuple[str, object]]:
        """All arguments with their names; those that `*args` collects have only a number."""
        parameters = inspect.signature(self.module.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names += [str(i) for i in range(len(names), len(self.args))]
        return [*zip(names, self.args, strict=False), *self.kwargs.items()]

    def replay(self, hidden: Tensor) -> Tensor:
        """The module's output, (batch, seq, dim), for these hidden states and everything else as it was.

        A module that was given the same states several times, as query, key and value, gets the new ones as often.
        """
        given = self.given

        def argument(value):
            if value is given:
                return hidden
            if isinstance(value, UserDict):
                return self._moved(value, hidden)
            return tree_map(_double, _own(value)) if hidden.dtype == torch.float64 else _own(value)

        args, kwargs = map(argument, self.args), {name: argument(value) for name, value in self.kwargs.items()}
        if self.projection is None:
            return first_tensor(self.module(*args, **kwargs))
        inputs: list[Tensor] = []
        handle = self.projection.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        try:
            self.module(*args, **kwargs)
        finally:
            handle.remove()
        return inputs[-1].unflatten(-1, (self.heads, -1))

    def _moved(self, shared: UserDict, hidden: Tensor) -> UserDict:
        """The keys and values that another layer shares with this one (Gemma 3n and 4), for other hidden states.

        They are moved with the hidden states, at random, as if they came from these: only their positions matter.
        """
        generator, shift = torch.Generator().manual_seed(0), hidden - self.hidden  # (batch, seq, dim)

        def moved(states: Tensor) -> Tensor:  # (batch, heads, seq, head_dim)
            _, heads, _, dim = states.shape
            weight = torch.randn(shift.shape[-1], heads * dim, generator=generator) / shift.shape[-1] ** 0.5
            return states + (shift @ weight.to(shift)).unflatten(-1, (heads, dim)).transpose(1, 2)

        return type(shared)({kind: tuple(map(moved, states)) for kind, states in shared.items()})

    @torch.no_grad()
    def can_be_replayed(self, batch: int, n: int) -> bool:
        """Whether states (batch, n, dim) are what it reads, and a replay of them gives its output again.

        Not if its keys or values come from elsewhere, or the mask is not among its arguments but gone by now.
        """
        given = self.given
        for states in (self.hidden, self.output):
            if not isinstance(states, Tensor) or states.ndim != 3 or states.shape[:2] != (batch, n):
                return False
        for name, value in self._named():
            if isinstance(value, Tensor) and value is not given and KEY_OR_VALUE.fullmatch(name):
                return False
        gap = (self.replay(self.hidden).float() - self.output.float()).abs().nan_to_num(0.0).max()
        return float(gap) <= REPRODUCED * float(self.output.float().abs().nan_to_num(0.0).max())

    @torch.no_grad()
    def by_head(self, heads: int) -> AttentionCall | None:
        """The same call, whose replays are (batch, seq, heads, dim): the input of its output projection.

        None where no such projection is known, or its input does not hold the heads side by side.
        """
        candidates = (getattr(self.module, name, None) for name in PROJECTIONS)
        projection = next((candidate for candidate in candidates if isinstance(candidate, nn.Module)), None)
        if projection is None:
            return None
        whole = replace(self, projection=projection)
        shape = whole.replay(self.hidden).shape  # (batch, seq, 1, heads * dim)
        if len(shape) != 4 or shape[:2] != self.hidden.shape[:2] or shape[-1] % heads:
            return None
        return replace(whole, heads=heads)


@contextmanager
def recorded_calls(modules: Sequence[nn.Module]) -> Iterator[list[AttentionCall]]:
    """Collect the calls of each module; in order of `modules` once the block has run a forward pass."""
    calls: list[AttentionCall] = []
    running: dict[int, AttentionCall] = {}

    def before(module, args, kwargs, index):
        kwargs = {name: _own(value) for name, value in kwargs.items()}
        call = AttentionCall(module, tuple(map(_own, args)), kwargs, index)
        call.hidden = None if call.given is None else call.given.detach().clone()
        running[index] = call
        calls.append(call)

    def after(module, args, output, index):
        states = first_tensor(output)
        running[index].output = None if states is None else states.detach().clone()

    with ExitStack() as stack:
        for i, module in enumerate(modules):  # prepended: a replay passes through the other hooks once more, not twice
            hook = functools.partial(before, index=i)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(functools.partial(after, index=i)).remove)
        yield calls
    calls.sort(key=lambda call: call.index)


@torch.no_grad()
def attention_influence_by_row(call: AttentionCall, columns: Sequence[int]) -> Tensor:
    """One replay instead of many: row b of the batch is perturbed at position columns[b]. Bool (batch, seq).

    For rows that hold the same text. One perturbation can miss a weak connection (its absence is to be confirmed with
    `attention_influence`), and noise of the machine would show as influence.
    """
    hidden, rows = call.hidden.clone(), torch.arange(len(call.hidden))
    size = _strength(hidden) * _typical(hidden)
    hidden[rows, list(columns)] = _random(hidden[:, 0].shape, size, torch.Generator().manual_seed(0))
    return (relative_change(call.replay(hidden), call.output) > 0).cpu()


def attention_influence(
    call: AttentionCall, columns: Sequence[int], draws: int = 2, real: Tensor | None = None, refine: bool = True
) -> Tensor:
    """Which outputs of this attention module each of the input positions `columns` influences.

    Args:
        draws: number of large changes per column; every second one is the negative of the one before.
        real: (batch, seq) bool, False = padding: cells that are left open there are not looked at again.
        refine: decide by small changes what large ones leave in doubt (see the module); `call.refined` records it.

    Returns:
        bool (batch, seq, len(columns)): [b, i, c] = position columns[c] of row b influences output i of row b; for a
        call `by_head`, (batch, seq, heads, len(columns)).
    """
    size, generator = _typical(call.hidden), torch.Generator().manual_seed(0)
    states = _random(call.hidden.shape, size, generator)
    vectors = [_random(states[:, 0].shape, _strength(states) * size, generator) for _ in range(0, draws, 2)]

    def changed(j: int, draw: int) -> Tensor:
        hidden = states.clone()
        hidden[:, j] = -vectors[draw // 2] if draw % 2 else vectors[draw // 2]
        return hidden

    cells = measured_influence(call.replay, states, changed, columns, draws) > 0
    if refine and (doubtful := doubtful_columns(cells, columns, real)):
        call.refined = _add_small_changes(cells, columns, doubtful, call.module, call.replay, call.hidden)
    return cells


def _typical(states: Tensor) -> Tensor:
    """The root mean square of states, a tensor of no dimension in their dtype."""
    return states.float().pow(2).mean().sqrt().nan_to_num(1.0).clamp(min=1e-3).to(states)


def _strength(states: Tensor) -> float:
    return 8.0 if states.dtype == torch.float16 else STRENGTH


def _random(shape: Sequence[int], size: Tensor, generator: torch.Generator) -> Tensor:
    return size * torch.randn(shape, generator=generator).to(size)


def _own(value):
    """A copy of what a call may change, a cache or a list of states; anything else as it is."""
    if isinstance(value, UserDict):  # a layer puts other tensors into it, and changes none
        return copy.copy(value)
    is_cache = any(base.__name__.endswith("Cache") for base in type(value).__mro__)
    return copy.deepcopy(value) if is_cache or isinstance(value, list) else value


def _double(value):
    """A float tensor in float64. Its dtype's lowest number, by which a module may see what a mask hides, stays that."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.double().masked_fill(value == torch.finfo(value.dtype).min, torch.finfo(torch.float64).min)


# -- small changes -----------------------------------------------------------------------------------------------------


def doubtful_columns(cells: Tensor, columns: Sequence[int], real: Tensor | None = None) -> list[int]:
    """Which of `columns`, by index, have a cell that may be a connection too weak to show.

    None if the cells, (batch, seq, ..., len(columns)), are those of a causal mask, or all of them. Cells of padding,
    where `real` is False, do not count.
    """
    ahead = later(cells.shape[1], columns)
    real = torch.ones(cells.shape[:2], dtype=torch.bool) if real is None else real
    where = (real[:, :, None] & real[:, None, list(columns)])[:, :, None]  # (batch, seq, 1, columns)
    cells = cells.flatten(2, -2) if cells.ndim > 3 else cells[:, :, None]  # (batch, seq, heads or 1, columns)
    missing, present = (where & ~cells).any(2), (where & cells).any(2)
    if not bool((missing & ~ahead).any()) and not bool((present & ahead).any()):
        return []
    return missing.any(0).any(0).nonzero()[:, 0].tolist()


def _add_small_changes(cells, columns, doubtful, model: nn.Module, outcome, given: Tensor, times: float = 1.0) -> bool:
    """Add to the `doubtful` columns of `cells` which outputs differ after a small change; whether that is more.

    The input is one vector at all positions, moved a little at each, `times` as large as the states `given`.
    """
    size, generator = times * _typical(given), torch.Generator().manual_seed(0)
    alike, apart = (_random(shape, size, generator) for shape in ((1, 1, given.shape[-1]), given.shape))

    def measured(alike: Tensor, apart: Tensor, spread: float) -> Tensor:
        states = alike + spread * apart

        def changed(j: int, draw: int) -> Tensor:
            hidden = states.clone()
            hidden[:, j] += spread * states[:, j].roll(1, -1)
            return hidden

        return measured_influence(outcome, states, changed, [columns[c] for c in doubtful]) > 0

    with ExitStack() as stack:
        for module in model.modules():  # attention scores are nearly 0 in modules that keep a factor on them
            if isinstance(getattr(module, "scaling", None), float):
                stack.enter_context(replaced(module, scaling=FLAT * module.scaling))
        try:
            with in_precision(torch.float64, model):
                more = measured(alike.double(), apart.double(), SPREAD)
        except (AuditError, RuntimeError, TypeError, ValueError):  # a kernel without float64, or too little memory
            more = measured(alike, apart, SHORT_SPREAD)
    added = bool((more & ~cells[..., doubtful]).any())
    cells[..., doubtful] |= more
    return added
