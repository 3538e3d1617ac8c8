"""Change one position and compare the outputs: the primitives under the audit and under the proof of a conversion.

**The rule for influence.** A module is run twice on the same batch, in the same shape, with only position j changed. If
the output at position i differs, j influences i. Repeated identical runs give the noise of the machine (0 with
deterministic kernels); a difference counts if it exceeds 8 times that noise. Since a blocked key contributes exactly
nothing, no tolerance for the dtype is needed: in bfloat16, too, a single changed bit is an influence.

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

from labkit.decoder import limits
from labkit.decoder.running import computing_in, configs_of, first_tensor, replaced
from labkit.errors import AuditError

STRENGTH = 64.0  # size of a large change, in typical sizes of a hidden state
NOISE_FACTOR = 8.0
SPREAD, SHORT_SPREAD = 1e-3, 0.1  # size of a small change, and of the distance of states, in float64 and without it
FLAT = 1e-3  # factor on attention scores there
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ROOM = 0.8  # share of the free memory that weights of a higher precision may take for a moment
REPRODUCED = 0.01  # of the largest output: by how much a replay of the same may differ
HIDDEN = re.compile(r"hidden(_states?)?|x|h|inputs?|quer(y|ies)|q")
KEY_OR_VALUE = re.compile(r"(k|v|keys?|values?)(_states?|_value_states|_tensors?)?|memory|encoder_hidden_states")
# the names of the projection from the heads to the output of an attention module
PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense", "wo", "Wo")


@dataclass
class AttentionCall:
    """One call of one attention module, as its layer made it: replayable with other hidden states.

    Attributes:
        args, kwargs: what the module was given; of a cache or list, which a call may change, a copy for each replay.
        index: of the module among those that were watched.
        hidden: the hidden states that it was given, (batch, seq, dim), before anything was added to them in place.
        output: what it gave, (batch, seq, dim).
        refined: whether small changes added to what large ones showed, in the last `attention_influence`.
    """

    module: nn.Module
    args: tuple
    kwargs: dict
    index: int
    hidden: Tensor | None = None
    output: Tensor | None = None
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
        args = [hidden if value is given else _own(value) for value in self.args]
        kwargs = {name: hidden if value is given else _own(value) for name, value in self.kwargs.items()}
        kwargs |= {name: self._moved(v, hidden) for name, v in kwargs.items() if isinstance(v, UserDict)}
        return first_tensor(self.module(*args, **kwargs))

    def _moved(self, shared: UserDict, hidden: Tensor) -> UserDict:
        """The keys and values that another layer shares with this one (Gemma 3n and 4), for other hidden states.

        They are moved with the hidden states, at random, as if they came from these: only their positions matter.
        """
        generator, change = torch.Generator().manual_seed(0), hidden - self.hidden  # (batch, seq, dim)

        def moved(states: Tensor) -> Tensor:  # (batch, heads, seq, head_dim)
            _, heads, _, dim = states.shape
            weight = torch.randn(change.shape[-1], heads * dim, generator=generator) / change.shape[-1] ** 0.5
            return states + (change @ weight.to(change)).unflatten(-1, (heads, dim)).transpose(1, 2)

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
        gap = _difference(self.replay(self.hidden), self.output).max()
        return float(gap) <= REPRODUCED * float(self.output.float().abs().nan_to_num(0.0).max())

    def in_float64(self) -> AttentionCall:
        """The same call with its numbers in float64; a tensor that is passed several times stays one tensor.

        The lowest number of a dtype becomes that of float64, since a module may look for it to see what a mask hides.
        """
        converted: dict[int, Tensor] = {}

        def double(value):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if id(value) not in converted:
                lowest = value == torch.finfo(value.dtype).min
                converted[id(value)] = value.double().masked_fill(lowest, torch.finfo(torch.float64).min)
            return converted[id(value)]

        return replace(self, args=tree_map(double, self.args), kwargs=tree_map(double, self.kwargs))


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
            handle = module.register_forward_pre_hook(
                functools.partial(before, index=i), with_kwargs=True, prepend=True
            )
            stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(functools.partial(after, index=i)).remove)
        yield calls
    calls.sort(key=lambda call: call.index)


@torch.no_grad()
def attention_influence_by_row(call: AttentionCall, columns: Sequence[int]) -> Tensor:
    """One replay instead of many: row b of the batch is perturbed at position columns[b]. Bool (batch, seq).

    For rows that hold the same text. One perturbation can miss a weak connection (its absence is to be confirmed with
    `attention_influence`), and noise of the machine would show as influence.
    """
    hidden = call.hidden.clone()
    vectors = torch.randn(hidden.shape[0], hidden.shape[2], generator=torch.Generator().manual_seed(0)).to(hidden)
    size = hidden.float().pow(2).mean().sqrt().clamp(min=1e-3)
    hidden[torch.arange(hidden.shape[0]), list(columns)] = (_strength(hidden.dtype) * size).to(hidden) * vectors
    return (_difference(call.replay(hidden), call.output) > 0).cpu()


@torch.no_grad()
def attention_influence(
    call: AttentionCall,
    columns: Sequence[int],
    draws: int = 2,
    seed: int = 0,
    outcome: Callable[[AttentionCall, Tensor], Tensor] = AttentionCall.replay,
    real: Tensor | None = None,
    refine: bool = True,
) -> Tensor:
    """Which output of this attention module each of the input positions `columns` influences.

    Args:
        draws: number of large changes per column; every second one is the negative of the one before.
        outcome: what is compared, (batch, seq, ..., dim) for the call and other hidden states, such as `by_head`.
        real: (batch, seq) bool, False = padding: cells that are left open there are not looked at again.
        refine: decide by small changes what large ones leave in doubt (see the module); `call.refined` records it.

    Returns:
        bool (batch, seq, ..., len(columns)): [b, i, c] = position columns[c] of row b influences output i of row b.
    """
    shape = call.hidden.shape
    generator = torch.Generator().manual_seed(seed)
    size = call.hidden.float().pow(2).mean().sqrt().nan_to_num(1.0).clamp(min=1e-3)

    def random(*dims: int) -> Tensor:
        return (torch.randn(*dims, generator=generator).to(size) * size).to(call.hidden)

    def outcome_of(hidden: Tensor) -> Tensor:
        return outcome(call.in_float64() if hidden.dtype == torch.float64 else call, hidden)

    base_hidden = random(*shape)
    base, again = outcome(call, base_hidden), outcome(call, base_hidden)
    noise = _difference(base, again)
    influence = torch.zeros(*noise.shape, len(columns), dtype=torch.bool, device=base.device)
    for c, j in enumerate(columns):
        for draw in range(draws):
            if draw % 2 == 0:
                vector = _strength(call.hidden.dtype) * random(shape[0], shape[2])
            hidden = base_hidden.clone()
            hidden[:, j] = -vector if draw % 2 else vector
            influence[..., c] |= _difference(outcome(call, hidden), base) > NOISE_FACTOR * noise
    influence = influence.cpu()
    if refine and (doubtful := doubtful_columns(influence, columns, real)):
        alike, apart = random(1, 1, shape[2]), random(*shape)
        with _flat_scores(call.module):
            call.refined = _add_small_changes(influence, columns, doubtful, call.module, outcome_of, alike, apart)
    return influence


@torch.no_grad()
def by_head(call: AttentionCall, heads: int) -> Callable[[AttentionCall, Tensor], Tensor] | None:
    """(batch, seq, heads, dim) of such a call for other hidden states: the input of its output projection.

    None where no such projection is known, or its input does not hold the heads side by side.
    """
    projection = next((p for name in PROJECTIONS if isinstance(p := getattr(call.module, name, None), nn.Module)), None)
    if projection is None:
        return None

    def projected(call: AttentionCall, hidden: Tensor) -> Tensor:
        inputs: list[Tensor] = []
        handle = projection.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        try:
            call.replay(hidden)
        finally:
            handle.remove()
        return inputs[-1]

    first = projected(call, call.hidden)
    if first.shape[:2] != call.hidden.shape[:2] or first.ndim != 3 or first.shape[-1] % heads:
        return None
    return lambda call, hidden: projected(call, hidden).unflatten(-1, (heads, -1))


def token_influence(
    run: Callable[[Tensor], Tensor],
    ids: Tensor,
    columns: Sequence[int],
    vocab_size: int,
    draws: int,
    base: Tensor,
) -> Tensor:
    """Which outputs of the model each of the input positions `columns` influences: bool (batch, seq, len(columns)).

    `draws` other tokens are put at each position, so that one chance agreement does not hide a connection. `base` is
    `run(ids)`.
    """
    noise = _difference(run(ids), base)
    influence = torch.zeros(*ids.shape, len(columns), dtype=torch.bool, device=base.device)
    for c, j in enumerate(columns):
        for step in range(1, draws + 1):
            other = exchanged(ids, torch.arange(ids.shape[1]) == j, vocab_size, step)
            influence[:, :, c] |= _difference(run(other), base) > NOISE_FACTOR * noise
    return influence.cpu()


def refine_by_embeddings(
    influence: Tensor,
    run: Callable[[Tensor], Tensor],
    model: nn.Module,
    ids: Tensor,
    columns: Sequence[int],
    doubtful: Sequence[int],
) -> bool:
    """Add to the `doubtful` columns of what `token_influence` found what small changes of the embeddings show.

    The embeddings are replaced by vectors that are nearly alike, so that attention is not sharp in any layer. Returns
    whether anything was added. Without an `nn.Embedding` that is called with `ids`, nothing is.
    """
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

    with _flat_scores(model), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(hook).remove)
        run(ids)
        if not outputs:
            return False
        generator, output = torch.Generator().manual_seed(0), outputs[0]
        size = 1000.0 * output.float().pow(2).mean().sqrt().to(output)  # large beside learned positions
        alike = size * torch.randn(1, 1, output.shape[-1], generator=generator).to(output)
        apart = size * torch.randn(output.shape, generator=generator).to(output)
        return _add_small_changes(influence, columns, doubtful, model, outcome, alike, apart)


def exchanged(ids: Tensor, which: Tensor, vocab_size: int, step: int = 1) -> Tensor:
    """`ids` (batch, seq) with other tokens where `which`, bool of a shape that broadcasts; each step gives others.

    A token is never exchanged for itself, however small the vocabulary. The first two steps, by 7 and by 12 ids, have
    no period in common, so that a model that uses ids modulo some number shows a change in one of them.
    """
    step_by = 1 + (5 * step + 1) % max(1, vocab_size - 1)
    return torch.where(which.to(ids.device), (ids + step_by) % vocab_size, ids)


def changed_outputs(run: Callable[[Tensor], Tensor], ids: Tensor, which: Tensor, vocab_size: int) -> Tensor:
    """The other outputs, bool (batch, seq), that change when the tokens `which`, bool (batch, seq), are exchanged."""
    base = run(ids)
    gap = _difference(run(exchanged(ids, which, vocab_size)), base).masked_fill(which.to(base.device), 0.0)
    noise = _difference(run(ids), base) if bool(gap.any()) else 0.0
    return (gap > NOISE_FACTOR * noise).cpu()


def later(n: int, columns: Sequence[int], or_same: bool = False) -> Tensor:
    """Bool (n, len(columns)): whether columns[c] is later than the position of the row, or the same."""
    return torch.arange(n)[:, None] < torch.tensor(list(columns)) + int(or_same)


def doubtful_columns(influence: Tensor, columns: Sequence[int], real: Tensor | None = None) -> list[int]:
    """Which of `columns`, by index, have a cell that may be a connection too weak to show.

    None if the cells of `influence`, (batch, seq, ..., len(columns)), are those of a causal mask, or all of them.
    Cells of padding, where `real` is False, do not count.
    """
    ahead = later(influence.shape[1], columns)
    real = torch.ones(influence.shape[:2], dtype=torch.bool) if real is None else real
    where = (real[:, :, None] & real[:, None, list(columns)])[:, :, None]  # (batch, seq, 1, columns)
    cells = influence.flatten(2, -2) if influence.ndim > 3 else influence[:, :, None]  # (batch, seq, heads or 1, cols)
    missing, present = (where & ~cells).any(2), (where & cells).any(2)
    if not bool((missing & ~ahead).any()) and not bool((present & ahead).any()):
        return []
    return missing.any(0).any(0).nonzero()[:, 0].tolist()


@contextmanager
def in_precision(dtype: torch.dtype, model: nn.Module) -> Iterator[None]:
    """For the block the model computes in float32 or float64. Raises AuditError if its weights would not fit."""
    shorter = [short for short in FLOATS if torch.finfo(short).bits < torch.finfo(dtype).bits]
    weights = [weight for weight in (*model.parameters(), *model.buffers()) if weight.dtype in shorter]
    device = next((str(weight.device) for weight in weights), "cpu")
    if dtype.itemsize * sum(weight.numel() for weight in weights) > ROOM * limits.available_bytes(device):
        raise AuditError(f"the weights do not fit into memory in {str(dtype).removeprefix('torch.')}")
    with ExitStack() as stack:
        if dtype == torch.float64:
            for config in configs_of(model):  # only the simplest code for experts allows float64
                if getattr(config, "_experts_implementation", None):
                    stack.enter_context(replaced(config, _experts_implementation="eager"))
        stack.enter_context(computing_in(dtype, model, *shorter))
        yield


@torch.no_grad()
def _add_small_changes(
    influence: Tensor,
    columns: Sequence[int],
    doubtful: Sequence[int],
    model: nn.Module,
    outcome: Callable[[Tensor], Tensor],
    alike: Tensor,
    apart: Tensor,
) -> bool:
    """Add to the `doubtful` columns which outputs differ after a small change of the input.

    The input is the vector `alike` (1, 1, dim) at all positions, moved a little by `apart` (batch, seq, dim). Returns
    whether anything was added.
    """

    def moved(alike: Tensor, apart: Tensor, spread: float) -> Tensor:
        states = alike + spread * apart
        before = outcome(states)
        noise, changes = _difference(outcome(states), before), []
        for c in doubtful:
            j, changed = columns[c], states.clone()
            changed[:, j] += spread * states[:, j].roll(1, -1)
            changes.append((_difference(outcome(changed), before) > NOISE_FACTOR * noise).cpu())
        return torch.stack(changes, -1)

    try:
        with in_precision(torch.float64, model):
            more = moved(alike.double(), apart.double(), SPREAD)
    except (AuditError, RuntimeError, TypeError, ValueError):  # a kernel without float64, or too little memory
        more = moved(alike, apart, SHORT_SPREAD)
    added = bool((more & ~influence[..., doubtful]).any())
    influence[..., doubtful] |= more
    return added


@contextmanager
def _flat_scores(model: nn.Module) -> Iterator[None]:
    """For the block attention scores are nearly 0 in modules that keep a factor on them, as those of transformers."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), float):
                stack.enter_context(replaced(module, scaling=FLAT * module.scaling))
        yield


def _strength(dtype: torch.dtype) -> float:
    return 8.0 if dtype == torch.float16 else STRENGTH  # float16 ends at 65504


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference over the last dimension, (batch, seq, ...).

    NaN against NaN is none, NaN against a number is infinite.
    """
    exact = torch.promote_types(a.dtype, torch.float32)
    gap = (a.to(exact) - b.to(exact)).abs().amax(-1)
    one_sided = a.isnan().any(-1) ^ b.isnan().any(-1)
    return gap.nan_to_num(0.0, posinf=torch.inf).masked_fill(one_sided, torch.inf)


def _own(value):
    """A copy of what a call may change, a cache or a list of states; anything else as it is."""
    if isinstance(value, UserDict):  # a layer puts other tensors into it, and changes none
        return copy.copy(value)
    is_cache = any(base.__name__.endswith("Cache") for base in type(value).__mro__)
    return copy.deepcopy(value) if is_cache or isinstance(value, list) else value
