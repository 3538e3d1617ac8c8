"""Perturb one position, see who notices: the primitives under the audit and under the proof of a conversion.

**The rule for influence.** A module is run twice on the same batch, in the same shape, with only position j changed. If
position i came out different, j influences i. Repeated identical runs give the noise of the machine (0 with
deterministic kernels); a difference counts if it exceeds 8 times that noise. Since a blocked key contributes exactly
nothing, no tolerance for the dtype is needed: in bfloat16, too, a single changed bit is an influence.

One cell cannot be told from outside: a token's own state also forms its query, so it influences its own output whether
or not its own key is open. The diagonal of a measured mask is therefore (nearly) always True.

To make even a weak connection visible, attention is measured on random hidden states (no attention sinks), and position
j is replaced by a vector and by its negative, both 64 times as large as a typical one: whatever the weights, one of the
two raises the score of key j in each head.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.running import first_tensor

STRENGTH = 64.0  # size of a perturbation, in typical sizes of a hidden state
NOISE_FACTOR = 8.0
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

    @classmethod
    def before(cls, module: nn.Module, args: tuple, kwargs: dict, index: int) -> AttentionCall:
        """The call that is about to be made."""
        kwargs = {name: _own(value) for name, value in kwargs.items()}
        call = cls(module, tuple(map(_own, args)), kwargs, index=index)
        call.hidden = _copy(call._given)
        return call

    @property
    def _given(self) -> Tensor | None:
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
        given = self._given
        args = [hidden if value is given else _own(value) for value in self.args]
        kwargs = {name: hidden if value is given else _own(value) for name, value in self.kwargs.items()}
        return first_tensor(self.module(*args, **kwargs))

    @torch.no_grad()
    def can_be_replayed(self, batch: int, n: int) -> bool:
        """Whether states (batch, n, dim) are what it reads, and what it gave comes of them again.

        Not if its keys or values come from elsewhere, or the mask is not among its arguments but gone by now.
        """
        shapes = [
            tuple(x.shape[:2]) if isinstance(x, Tensor) and x.ndim == 3 else None for x in (self.hidden, self.output)
        ]
        if shapes != [(batch, n)] * 2 or any(value is not self._given for value in self._keys_and_values()):
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
    outcome: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Which output of this attention module each of the input positions `columns` influences.

    Returns bool (batch, seq, len(columns)): [b, i, c] = position columns[c] of row b influences output i of row b.
    `draws` = number of perturbations per column; every second one is the negative of the one before. `outcome`: what is
    looked at in place of the module's output, (batch, seq, ..., dim) for hidden states; such as `by_head`, and then the
    result is (batch, seq, ..., len(columns)).
    """
    outcome = outcome or call.replay
    shape = call.hidden.shape
    generator = torch.Generator().manual_seed(seed)
    size = call.hidden.float().pow(2).mean().sqrt().nan_to_num(1.0).clamp(min=1e-3)

    def random(*dims: int) -> Tensor:
        return (torch.randn(*dims, generator=generator).to(size) * size).to(call.hidden)

    base_hidden = random(*shape)
    base, again = outcome(base_hidden), outcome(base_hidden)
    noise = _difference(base, again)
    found = torch.zeros(*noise.shape, len(columns), dtype=torch.bool, device=base.device)
    for c, j in enumerate(columns):
        for draw in range(draws):
            if draw % 2 == 0:
                vector = _strength(call.hidden.dtype) * random(shape[0], shape[2])
            hidden = base_hidden.clone()
            hidden[:, j] = -vector if draw % 2 else vector
            found[..., c] |= _difference(outcome(hidden), base) > NOISE_FACTOR * noise
    return found.cpu()


@torch.no_grad()
def by_head(call: AttentionCall, heads: int) -> Callable[[Tensor], Tensor] | None:
    """(batch, seq, heads, dim) of this call for other hidden states: what goes into the output projection.

    None where no such projection is known, or it is not given the heads side by side.
    """
    projection = next((p for name in PROJECTIONS if isinstance(p := getattr(call.module, name, None), nn.Module)), None)
    if projection is None:
        return None

    def given(hidden: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            call.replay(hidden)
        finally:
            handle.remove()
        return seen[-1]

    first = given(call.hidden)
    if first.shape[:2] != call.hidden.shape[:2] or first.ndim != 3 or first.shape[-1] % heads:
        return None
    return lambda hidden: given(hidden).unflatten(-1, (heads, -1))


def token_influence(
    run: Callable[[Tensor], Tensor],
    ids: Tensor,
    columns: Sequence[int],
    vocab_size: int,
    draws: int = 2,
    base: Tensor | None = None,
) -> Tensor:
    """Which outputs of the model each of the input positions `columns` influences: bool (batch, seq, len(columns)).

    `draws` other tokens are put at each position (never the token itself, however small the vocabulary), so that one
    chance agreement does not hide a connection. `base` is `run(ids)` if it is known already.
    """
    again = run(ids)
    base = run(ids) if base is None else base
    noise = _difference(base, again)
    found = torch.zeros(*ids.shape, len(columns), dtype=torch.bool, device=base.device)
    for c, j in enumerate(columns):
        for step in range(1, draws + 1):
            changed = ids.clone()
            changed[:, j] = (changed[:, j] + 1 + (step * 7 - 1) % max(1, vocab_size - 1)) % vocab_size
            found[:, :, c] |= _difference(run(changed), base) > NOISE_FACTOR * noise
    return found.cpu()


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
    is_cache = any(each.__name__.endswith("Cache") for each in type(value).__mro__)
    return copy.deepcopy(value) if is_cache or isinstance(value, list) else value
