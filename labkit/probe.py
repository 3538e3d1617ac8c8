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

from labkit.anatomy import Decoder
from labkit.errors import AuditError, LabkitError

STRENGTH = 64.0  # size of a perturbation, in typical sizes of a hidden state
NOISE_FACTOR = 8.0
REPRODUCED = 0.01  # of the largest output: by how much a replay of the same may differ
KEY_OR_VALUE = re.compile(r"(k|v|keys?|values?)(_states?|_value_states|_tensors?)?|memory|encoder_hidden_states")
APART = "batched_mm"  # how transformers calls a computation of experts in which no token changes another's rounding
# the names of the projection from the heads to the output of an attention module
PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense", "wo", "Wo")
GATHERED = 2e9  # bytes: the most that the weights of experts may take, once for each token


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
        if self.args or "hidden_states" in self.kwargs:
            return self.args[0] if self.args else self.kwargs["hidden_states"]
        return next((v for v in self.kwargs.values() if isinstance(v, Tensor) and v.ndim == 3), None)

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
        try:
            given = inspect.signature(self.module.forward).bind_partial(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            return []
        return [value for name, value in given.items() if KEY_OR_VALUE.fullmatch(name) and isinstance(value, Tensor)]


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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the block; afterwards every submodule is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def in_float32(model: nn.Module, *instead_of: torch.dtype) -> Iterator[None]:
    """For the block the model computes in float32 where its weights are of these types; the weights are kept beside."""
    kept = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in instead_of]
    try:
        for tensor, data in kept:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


@contextmanager
def without_mlps(decoder: Decoder) -> Iterator[None]:
    """Skip the feed-forward blocks: attention measured in isolation does not depend on them, and they cost the most."""
    skipped = []
    for layer in decoder.layers:
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module) or hasattr(mlp, "experts"):  # those may give more than the states
            continue
        if type(mlp).__name__.endswith("MLP") and "forward" not in vars(mlp):
            mlp.forward = _as_it_came
            skipped.append(mlp)
    try:
        yield
    finally:
        for mlp in skipped:
            del mlp.forward


def _as_it_came(hidden: Tensor, *_, **__) -> Tensor:
    return hidden


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


def _strength(dtype: torch.dtype) -> float:
    return 8.0 if dtype == torch.float16 else STRENGTH  # float16 ends at 65504


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference over the last dimension, (batch, seq, ...).

    NaN against NaN is none, NaN against a number is infinite.
    """
    gap = (a.float() - b.float()).abs().amax(-1)
    one_sided = a.isnan().any(-1) ^ b.isnan().any(-1)
    return gap.nan_to_num(0.0, posinf=torch.inf).masked_fill(one_sided, torch.inf)


class Runner:
    """Calls any model on token ids, and finds its output per position.

    Works on a transformers model (its last hidden state is read, so a large head costs nothing) and on any other module
    that maps `input_ids` and, if it takes one, `attention_mask` to a tensor, or a structure holding one, of shape
    (batch, seq, ...).
    """

    def __init__(self, model: nn.Module, decoder: Decoder | None, vocab_size: int | None = None):
        self.model, self.decoder = model, decoder
        self.tried: dict[str, bool] = {}
        parameters = inspect.signature(model.forward).parameters
        self.takes_anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.parameters = set(parameters)
        placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.by_name = "input_ids" in parameters or not any(p.kind in placed for p in parameters.values())
        inside = decoder.stack if decoder is not None else model  # a multimodal model has other embeddings, too
        embedding = next((m for m in inside.modules() if isinstance(m, nn.Embedding)), None)
        if vocab_size is None and embedding is None:
            raise AuditError(
                f"{type(model).__name__} has no nn.Embedding: say how many token ids there are (vocab_size=)"
            )
        self.vocab_size = vocab_size or embedding.num_embeddings
        tensor = next(iter(model.parameters()), None)
        known = embedding.weight if embedding is not None else tensor
        self.device = torch.device("cpu") if known is None else known.device

    def takes(self, name: str) -> bool:
        """Whether the model can be called with this argument: "attention_mask", "position_ids" or "use_cache".

        One that takes any keyword and is no decoder that we know is tried: it may hand the argument on, or ignore it.
        """
        if name in self.parameters or (self.takes_anything and self.decoder is not None):
            return True
        if self.takes_anything and name != "use_cache" and name not in self.tried:
            ids = self.tokens(1, 4)
            hidden_first = torch.tensor(
                [[False, True, True, True]]
            )  # a last one would change nothing under a causal mask
            value = hidden_first if name == "attention_mask" else torch.tensor([[0, 1, 0, 1]])
            more = {"real": value} if name == "attention_mask" else {name: value}
            try:
                self.tried[name] = not torch.equal(self.run(ids, **more), self.run(ids))
            except AuditError:
                self.tried[name] = False
        return self.tried.get(name, False)

    @torch.no_grad()
    def run(self, ids: Tensor, real: Tensor | None = None, **more) -> Tensor:
        """Output per position, (batch, seq, dim), for ids (batch, seq) and real (batch, seq) bool, None = no mask."""
        kwargs = {"input_ids": ids.to(self.device)}
        if real is not None:
            kwargs["attention_mask"] = real.long().to(self.device)
        kwargs |= {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in more.items()}
        if "use_cache" in self.parameters or (self.takes_anything and self.decoder is not None):
            kwargs.setdefault("use_cache", False)
        if self.decoder is not None and "logits_to_keep" in self.parameters:
            kwargs["logits_to_keep"] = 1
        first = () if self.by_name else (kwargs.pop("input_ids"),)
        seen: list = []
        with ExitStack() as stack:
            if self.decoder is not None:
                hook = self.decoder.stack.register_forward_hook(lambda m, a, out: seen.append(out))
                stack.callback(hook.remove)
            stack.enter_context(_told_apart(self.model, ids.numel(), kwargs.get("use_cache", False)))
            try:
                out = self.model(*first, **kwargs)
            except (LabkitError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                said = " ".join(str(error).split())[:200]
                raise AuditError(
                    f"{type(self.model).__name__} could not be called on token ids of shape {tuple(ids.shape)}"
                    f"{''.join(f', {name}' for name in kwargs if name != 'input_ids')}: {type(error).__name__}: {said}"
                ) from error
        return self._checked(seen[-1] if seen else out, ids)

    def _checked(self, out, ids: Tensor) -> Tensor:
        states = first_tensor(out)
        if states is None or states.shape[:2] != ids.shape:
            shape = None if states is None else tuple(states.shape)
            raise AuditError(
                f"{type(self.model).__name__} gave {shape} for token ids of shape {tuple(ids.shape)}: the audit "
                "needs one output per position, (batch, sequence, ...)"
            )
        return states.reshape(*states.shape[:2], -1)

    def tokens(self, batch: int, n: int, seed: int = 0) -> Tensor:
        """Distinct random token ids, the same in every row, (batch, n); the lowest ids are left out, being special."""
        low = min(8, max(0, self.vocab_size - 2 * n))
        generator = torch.Generator().manual_seed(seed)
        span = min(self.vocab_size - low, 50_000)
        drawn = torch.randperm(span, generator=generator)[:n] if span >= n else torch.arange(n) % span
        return (drawn + low).expand(batch, n).clone()


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


@contextmanager
def _told_apart(model: nn.Module, tokens: int, use_cache: bool) -> Iterator[None]:
    """For the block no token can be heard by another but through the model's own connections.

    No part of the model keeps keys and values, unless asked to. And where experts are chosen token by token, each token
    is computed with its own copy of their weights: taken together, as they are otherwise, the tokens of one expert
    change each other's rounding, which is no influence. (Not where these copies would take more than `GATHERED` bytes.)
    """
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}.values()
    with ExitStack() as stack:
        for config in configs:
            if not use_cache and getattr(config, "use_cache", False) is True:
                stack.callback(setattr, config, "use_cache", True)
                config.use_cache = False
            way = getattr(config, "_experts_implementation", None)
            if way not in (None, APART) and tokens * _bytes_of_experts(model, config) <= GATHERED:
                stack.callback(setattr, config, "_experts_implementation", way)
                config._experts_implementation = APART
        yield


def _bytes_of_experts(model: nn.Module, config) -> int:
    """What the weights of one token's experts take, in the layer where they take the most."""
    chosen = max(
        getattr(config, name, 0) or 0 for name in ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_topk")
    )
    each = [
        sum(p.numel() * p.element_size() // len(p) for p in m.parameters(recurse=False) if p.ndim == 3)
        for m in model.modules()
        if "Experts" in type(m).__name__
    ]
    return max(1, chosen) * max(each, default=0)


def _copy(value):
    return value.detach().clone() if isinstance(value, Tensor) else value


def _own(value):
    """A copy of what a call may change, a cache or a list of states; anything else as it is."""
    is_cache = any(each.__name__.endswith("Cache") for each in type(value).__mro__)
    return copy.deepcopy(value) if is_cache or isinstance(value, list) else value


def first_tensor(out) -> Tensor | None:
    """The output per position inside a tensor, tuple, dict or ModelOutput."""
    if isinstance(out, Tensor):
        return out
    for name in ("last_hidden_state", "logits"):
        value = out.get(name) if isinstance(out, dict) else getattr(out, name, None)
        if isinstance(value, Tensor):
            return value
    values = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return next((v for v in values if isinstance(v, Tensor) and v.ndim >= 3), None)
