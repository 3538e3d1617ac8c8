"""Change one position and compare the outputs: the primitives under the audit and under the proof of a conversion.

**The rule for influence.** A module is run twice on the same batch, in the same shape, with only position j changed. If
the output at position i differs, j influences i. Repeated identical runs give the noise of the machine (0 with
deterministic kernels); a difference counts if it exceeds 8 times that noise. Since a blocked key contributes exactly
nothing, no tolerance for the dtype is needed: in bfloat16, too, a single changed bit is an influence.

One cell cannot be told from outside: a token's own state also forms its query, so it influences its own output whether
or not its own key is open. The diagonal of a measured mask is therefore (nearly) always True.

To make even a weak connection visible, attention is measured on random hidden states (no attention sinks), and position
j is replaced by a vector and by its negative, both 64 times as large as a typical one: whatever the weights, one of the
two raises the score of key j in each head.

**Sharp attention.** Where queries and keys are normalised and scores are large (Gemma 4), a softmax is nearly one-hot
whatever the perturbation, and an open key can have a weight too small to change a bit. So if the changed cells are
neither those of a causal mask nor all cells, the cells without a difference are decided by derivatives: forward-mode
automatic differentiation in float64, at hidden states that are nearly alike at all positions and with scores scaled
down, so that no weight is small unless its key is blocked. The derivative of a blocked key is exactly 0.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from labkit.decoder.running import computing_in, first_tensor, replaced
from labkit.errors import AuditError

STRENGTH = 64.0  # size of a perturbation, in typical sizes of a hidden state
NOISE_FACTOR = 8.0
SPREAD = 0.1  # how far the nearly alike hidden states, at which derivatives are taken, lie apart
FLAT = 1e-3  # factor on attention scores there
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
REPRODUCED = 0.01  # of the largest output: by how much a replay of the same may differ
HIDDEN = re.compile(r"hidden(_states?)?|x|h|inputs?|quer(y|ies)|q")
KEY_OR_VALUE = re.compile(r"(k|v|keys?|values?)(_states?|_value_states|_tensors?)?|memory|encoder_hidden_states")
# the names of the projection from the heads to the output of an attention module
PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense", "wo", "Wo")


@dataclass
class AttentionCall:
    """One call of one attention module, as its layer made it: replayable with other hidden states.

    What a call may change, such as a cache of keys and values, is kept as it was before, and each replay has its own.
    """

    module: nn.Module
    args: tuple
    kwargs: dict
    output: Tensor | None = None  # what it gave, (batch, seq, dim); a copy, as `hidden`
    index: int = 0  # of the module among those that were watched
    hidden: Tensor | None = None  # what it was given, (batch, seq, dim), before anybody added to it in place
    oracle: str = "perturbations"  # what decided in `attention_influence`: also "derivatives" or "small changes"

    @classmethod
    def before(cls, module: nn.Module, args: tuple, kwargs: dict, index: int) -> AttentionCall:
        """The call that is about to be made."""
        kwargs = {name: _own(value) for name, value in kwargs.items()}
        call = cls(module, tuple(map(_own, args)), kwargs, index=index)
        call.hidden = _copy(call.given)
        return call

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
        """Whether states (batch, n, dim) are what it reads, and what it gave comes of them again.

        Not if its keys or values come from elsewhere, or the mask is not among its arguments but gone by now.
        """
        shapes = [
            tuple(x.shape[:2]) if isinstance(x, Tensor) and x.ndim == 3 else None for x in (self.hidden, self.output)
        ]
        if shapes != [(batch, n)] * 2 or any(value is not self.given for value in self._keys_and_values()):
            return False
        gap = _difference(self.replay(self.hidden), self.output).max()
        return float(gap) <= REPRODUCED * float(self.output.float().abs().nan_to_num(0.0).max())

    def _keys_and_values(self) -> list[Tensor]:
        return [value for name, value in self._named() if KEY_OR_VALUE.fullmatch(name) and isinstance(value, Tensor)]


@contextmanager
def recorded_calls(modules: Sequence[nn.Module], every: bool = False) -> Iterator[list[AttentionCall]]:
    """Collect the first call of each module; in order of `modules` once the block has run a forward pass.

    With `every` all calls of a module that is used several times, one after the other.
    """
    calls: list[list[AttentionCall]] = [[] for _ in modules]
    collected: list[AttentionCall] = []

    def before(index: int):
        def hook(module, args, kwargs):
            if every or not calls[index]:
                calls[index].append(AttentionCall.before(module, args, kwargs, index))

        return hook

    def after(index: int):
        def hook(module, args, output):
            if calls[index][-1].output is None:
                calls[index][-1].output = _copy(first_tensor(output))

        return hook

    with ExitStack() as stack:
        for i, module in enumerate(modules):  # prepended: a replay passes through the other hooks once more, not twice
            handle = module.register_forward_pre_hook(before(i), with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(after(i)).remove)
        yield collected
    collected.extend(call for made in calls for call in made)


@torch.no_grad()
def attention_influence_by_row(call: AttentionCall, columns: Sequence[int], seed: int = 0) -> Tensor:
    """One replay instead of many: row b of the batch is perturbed at position columns[b]. Bool (batch, seq).

    For rows that hold the same text. One perturbation can miss a weak connection (its absence is to be confirmed with
    `attention_influence`), and noise of the machine would show as influence.
    """
    hidden = call.hidden.clone()
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(hidden.shape[0], hidden.shape[2], generator=generator).to(hidden)
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
    confirm: bool = True,
) -> Tensor:
    """Which output of this attention module each of the input positions `columns` influences.

    Args:
        draws: number of perturbations per column; every second one is the negative of the one before.
        outcome: what is compared, (batch, seq, ..., dim) for the call and other hidden states, such as `by_head`.
        real: (batch, seq) bool, False = padding: cells that perturbations leave open there are not looked at again.
        confirm: decide by derivatives what perturbations leave in doubt (see the module); `call.oracle` records it.

    Returns:
        bool (batch, seq, ..., len(columns)): [b, i, c] = position columns[c] of row b influences output i of row b.
    """
    shape = call.hidden.shape
    generator = torch.Generator().manual_seed(seed)
    size = call.hidden.float().pow(2).mean().sqrt().nan_to_num(1.0).clamp(min=1e-3)

    def random(*dims: int) -> Tensor:
        return (torch.randn(*dims, generator=generator).to(size) * size).to(call.hidden)

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
    if confirm and (doubtful := doubtful_columns(influence, columns, real)):

        def exactly(hidden: Tensor) -> Tensor:
            with computing_in(torch.float64, call.module, *FLOATS):
                return outcome(_in_float64(call), hidden.double())

        alike = random(1, 1, shape[2]) + SPREAD * random(*shape)
        with _flat_scores(call.module):
            call.oracle = confirmed(influence, columns, doubtful, alike, exactly, lambda hidden: outcome(call, hidden))
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
        seen: list[Tensor] = []
        handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            call.replay(hidden)
        finally:
            handle.remove()
        return seen[-1]

    first = projected(call, call.hidden)
    if first.shape[:2] != call.hidden.shape[:2] or first.ndim != 3 or first.shape[-1] % heads:
        return None
    return lambda call, hidden: projected(call, hidden).unflatten(-1, (heads, -1))


def token_influence(
    run: Callable[[Tensor], Tensor],
    ids: Tensor,
    columns: Sequence[int],
    vocab_size: int,
    draws: int = 2,
    base: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """Which outputs of the model each of the input positions `columns` influences: bool (batch, seq, len(columns)).

    And whether other tokens in one row of the batch, the middle one, change the outputs of other rows.

    `draws` other tokens are put at each position (never the token itself, however small the vocabulary), so that one
    chance agreement does not hide a connection. `base` is `run(ids)` if it is known already.
    """
    base = run(ids) if base is None else base
    middle, rows = torch.arange(len(ids)) == (len(ids) - 1) // 2, False
    if len(ids) > 1:  # one row is changed in the run that shows the noise, so that it shows both
        noise = _difference(run(exchanged(ids, middle[:, None], vocab_size)), base)
        noise[middle.to(noise.device)] = 0.0
        if bool(noise.any()):
            gap, noise = noise, _difference(run(ids), base)
            rows = bool((gap > NOISE_FACTOR * noise).any())
    else:
        noise = _difference(run(ids), base)
    influence = torch.zeros(*ids.shape, len(columns), dtype=torch.bool, device=base.device)
    for c, j in enumerate(columns):
        for step in range(1, draws + 1):
            other = exchanged(ids, torch.arange(ids.shape[1]) == j, vocab_size, step)
            influence[:, :, c] |= _difference(run(other), base) > NOISE_FACTOR * noise
    return influence.cpu(), rows


def exchanged(ids: Tensor, which: Tensor, vocab_size: int, step: int = 1) -> Tensor:
    """`ids` (batch, seq) with other tokens where `which`, bool of a shape that broadcasts; each step gives others."""
    return torch.where(which.to(ids.device), (ids + 1 + (step * 7 - 1) % max(1, vocab_size - 1)) % vocab_size, ids)


def changed_outputs(run: Callable[[Tensor], Tensor], ids: Tensor, which: Tensor, vocab_size: int) -> Tensor:
    """The other outputs, bool (batch, seq), that change when the tokens `which`, bool (batch, seq), are exchanged."""
    base = run(ids)
    gap = _difference(run(exchanged(ids, which, vocab_size)), base).masked_fill(which.to(base.device), 0.0)
    noise = _difference(run(ids), base) if bool(gap.any()) else 0.0
    return (gap > NOISE_FACTOR * noise).cpu()


def embedding_influence(
    influence: Tensor,
    run: Callable[[Tensor], Tensor],
    model: nn.Module,
    ids: Tensor,
    columns: Sequence[int],
    doubtful: Sequence[int],
) -> str:
    """`confirmed` for what `token_influence` found, by derivatives with respect to the token embeddings.

    The embeddings are replaced by vectors that are nearly alike, so that attention is not sharp in any layer. Without
    an `nn.Embedding` that is called with `ids`, "perturbations" decide.
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

    def exactly(embeddings: Tensor) -> Tensor:
        with computing_in(torch.float32, model, torch.float16):  # the smallest weights are 0 in float16
            return outcome(embeddings.float() if embeddings.dtype == torch.float16 else embeddings)

    with _flat_scores(model), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(hook).remove)
        run(ids)
        if not outputs:
            return "perturbations"
        generator, output = torch.Generator().manual_seed(0), outputs[0]
        alike = torch.randn(1, 1, output.shape[-1], generator=generator)
        alike = alike + SPREAD * torch.randn(output.shape, generator=generator)
        alike = 8.0 * alike.to(output) * output.float().pow(2).mean().sqrt().to(output)  # beside learned positions
        return confirmed(influence, columns, doubtful, alike, exactly, outcome)


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
    cells = (
        influence.flatten(2, -2) if influence.ndim > 3 else influence[:, :, None]
    )  # (batch, seq, heads or 1, columns)
    missing, present = (where & ~cells).any(2), (where & cells).any(2)
    if not bool((missing & ~ahead).any()) and not bool((present & ahead).any()):
        return []
    return missing.any(0).any(0).nonzero()[:, 0].tolist()


def confirmed(
    influence: Tensor,
    columns: Sequence[int],
    doubtful: Sequence[int],
    alike: Tensor,
    exactly: Callable[[Tensor], Tensor],
    outcome: Callable[[Tensor], Tensor],
) -> str:
    """Add to the `doubtful` columns of `influence` what derivatives at the states `alike` (batch, seq, dim) show.

    Of `exactly`, the output for other states. Small changes of the input of `outcome` are made as well: some kernels
    have no derivatives, and flex attention on a CPU leaves them out without an error. Returns which of the two decided,
    or "perturbations" if neither added anything; "small changes" wherever there are no derivatives at all.
    """
    asked = [columns[c] for c in doubtful]
    known, exact = influence[..., doubtful], _derivatives(exactly, alike, asked)
    moved = _small_changes(outcome, alike, asked)
    influence[..., doubtful] |= moved if exact is None else moved | exact
    if exact is not None and bool((exact & ~known).any()):
        return "derivatives"
    return "small changes" if exact is None or bool((moved & ~known).any()) else "perturbations"


def _derivatives(outcome: Callable[[Tensor], Tensor], base: Tensor, columns: Sequence[int]) -> Tensor | None:
    """Which outputs have a derivative other than 0 with respect to the input at each column; None if it has none.

    base: (batch, seq, dim). Returns bool (batch, seq, ..., len(columns)).
    """
    moved, direction = [], torch.randn(base.shape[-1], generator=torch.Generator().manual_seed(1)).to(base)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused kernel of nn.TransformerEncoder has no derivative
    try:
        for j in columns:
            tangent = torch.zeros_like(base)
            tangent[:, j] = direction
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
                moves = forward_ad.unpack_dual(outcome(forward_ad.make_dual(base, tangent))).tangent
            if moves is None:  # it detaches its output
                return None
            moved.append((moves.nan_to_num(0.0) != 0).any(-1).cpu())
    except (AuditError, RuntimeError, TypeError, ValueError):  # a kernel without derivatives, or without float64
        return None
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return torch.stack(moved, -1)


def _small_changes(outcome: Callable[[Tensor], Tensor], base: Tensor, columns: Sequence[int]) -> Tensor:
    """As `_derivatives`, for kernels without them: which outputs differ after a small change of the input."""
    before = outcome(base)
    noise, moved = _difference(outcome(base), before), []
    for j in columns:
        changed = base.clone()
        changed[:, j] += SPREAD * base[:, j].roll(1, -1)
        moved.append((_difference(outcome(changed), before) > NOISE_FACTOR * noise).cpu())
    return torch.stack(moved, -1)


@contextmanager
def _flat_scores(model: nn.Module) -> Iterator[None]:
    """For the block attention scores are nearly 0 in modules that keep a factor on them, as those of transformers."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), float):
                stack.enter_context(replaced(module, scaling=FLAT * module.scaling))
        yield


def _in_float64(call: AttentionCall) -> AttentionCall:
    """The call with its numbers in float64; a tensor that is passed several times stays one tensor.

    The lowest number of a dtype becomes that of float64, since a module may look for it to see what a mask hides.
    """
    known: dict[int, Tensor] = {}

    def exact(value):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in known:
            lowest = value == torch.finfo(value.dtype).min
            known[id(value)] = value.double().masked_fill(lowest, torch.finfo(torch.float64).min)
        return known[id(value)]

    return replace(call, args=tree_map(exact, call.args), kwargs=tree_map(exact, call.kwargs))


def _strength(dtype: torch.dtype) -> float:
    return 8.0 if dtype == torch.float16 else STRENGTH  # float16 ends at 65504


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference over the last dimension, (batch, seq, ...).

    NaN against NaN is none, NaN against a number is infinite.
    """
    gap = (a.float() - b.float()).abs().amax(-1)
    one_sided = a.isnan().any(-1) ^ b.isnan().any(-1)
    return gap.nan_to_num(0.0, posinf=torch.inf).masked_fill(one_sided, torch.inf)


def _copy(value):
    return value.detach().clone() if isinstance(value, Tensor) else value


def _own(value):
    """A copy of what a call may change, a cache or a list of states; anything else as it is."""
    if isinstance(value, UserDict):  # a layer puts other tensors into it, and changes none
        return copy.copy(value)
    is_cache = any(base.__name__.endswith("Cache") for base in type(value).__mro__)
    return copy.deepcopy(value) if is_cache or isinstance(value, list) else value
