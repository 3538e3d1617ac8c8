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

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.anatomy import Decoder
from labkit.errors import AuditError

STRENGTH = 64.0  # size of a perturbation, in typical sizes of a hidden state
NOISE_FACTOR = 8.0


@dataclass
class AttentionCall:
    """One call of one attention module, as its layer made it: replayable with other hidden states."""

    module: nn.Module
    args: tuple
    kwargs: dict
    output: Tensor | None = None  # what it gave, (batch, seq, dim)

    @property
    def hidden(self) -> Tensor:
        """What the module was given, (batch, seq, dim)."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def replay(self, hidden: Tensor) -> Tensor:
        """The module's output, (batch, seq, dim), for these hidden states and everything else as it was."""
        if self.args:
            out = self.module(hidden, *self.args[1:], **self.kwargs)
        else:
            out = self.module(**{**self.kwargs, "hidden_states": hidden})
        return first_tensor(out)


@contextmanager
def recorded_calls(modules: Sequence[nn.Module]) -> Iterator[list[AttentionCall]]:
    """Collect the first call of each module; in order of `modules` once the block has run a forward pass."""
    calls: dict[int, AttentionCall] = {}
    collected: list[AttentionCall] = []

    def before(index: int):
        def hook(module, args, kwargs):
            calls.setdefault(index, AttentionCall(module, tuple(args), dict(kwargs)))

        return hook

    def after(index: int):
        def hook(module, args, output):
            if calls[index].output is None:
                calls[index].output = first_tensor(output)

        return hook

    with ExitStack() as stack:
        for i, module in enumerate(modules):  # prepended: a replay passes through the other hooks once more, not twice
            handle = module.register_forward_pre_hook(before(i), with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(after(i)).remove)
        yield collected
    collected.extend(calls[i] for i in sorted(calls))


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
def without_mlps(decoder: Decoder) -> Iterator[None]:
    """Skip the feed-forward blocks: attention measured in isolation does not depend on them, and they cost the most."""
    skipped = []
    for layer in decoder.layers:
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, nn.Module) and type(mlp).__name__.endswith("MLP") and "forward" not in vars(mlp):
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
def attention_influence(call: AttentionCall, columns: Sequence[int], draws: int = 2, seed: int = 0) -> Tensor:
    """Which output of this attention module each of the input positions `columns` influences.

    Returns bool (batch, seq, len(columns)): [b, i, c] = position columns[c] of row b influences output i of row b.
    `draws` = number of perturbations per column; every second one is the negative of the one before.
    """
    shape = call.hidden.shape
    generator = torch.Generator().manual_seed(seed)
    size = call.hidden.float().pow(2).mean().sqrt().nan_to_num(1.0).clamp(min=1e-3)

    def random(*dims: int) -> Tensor:
        return (torch.randn(*dims, generator=generator).to(size) * size).to(call.hidden)

    base_hidden = random(*shape)
    base, again = call.replay(base_hidden), call.replay(base_hidden)
    noise = _difference(base, again)
    found = torch.zeros(shape[0], shape[1], len(columns), dtype=torch.bool, device=base.device)
    for c, j in enumerate(columns):
        for draw in range(draws):
            if draw % 2 == 0:
                vector = _strength(call.hidden.dtype) * random(shape[0], shape[2])
            hidden = base_hidden.clone()
            hidden[:, j] = -vector if draw % 2 else vector
            found[:, :, c] |= _difference(call.replay(hidden), base) > NOISE_FACTOR * noise
    return found.cpu()


def _strength(dtype: torch.dtype) -> float:
    return 8.0 if dtype == torch.float16 else STRENGTH  # float16 ends at 65504


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference per position, (batch, seq); NaN against NaN is none, NaN against a number is infinite."""
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
        import inspect

        self.model, self.decoder = model, decoder
        parameters = inspect.signature(model.forward).parameters
        self.takes_anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.parameters = set(parameters)
        inside = decoder.stack if decoder is not None else model  # a multimodal model has other embeddings, too
        embedding = next((m for m in inside.modules() if isinstance(m, nn.Embedding)), None)
        if vocab_size is None and embedding is None:
            raise AuditError(
                f"{type(model).__name__} has no nn.Embedding: say how many token ids there are (vocab_size=)"
            )
        self.vocab_size = vocab_size or embedding.num_embeddings
        tensor = next(iter(model.parameters()), None)
        self.device = embedding.weight.device if embedding is not None else tensor.device

    def takes(self, name: str) -> bool:
        """Whether the model can be called with this argument."""
        return name in self.parameters or (self.takes_anything and self.decoder is not None)

    @torch.no_grad()
    def run(self, ids: Tensor, real: Tensor | None = None, **more) -> Tensor:
        """Output per position, (batch, seq, dim), for ids (batch, seq) and real (batch, seq) bool, None = no mask."""
        kwargs = {"input_ids": ids.to(self.device)}
        if real is not None:
            kwargs["attention_mask"] = real.long().to(self.device)
        kwargs |= {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in more.items()}
        if self.decoder is not None:
            kwargs.setdefault("use_cache", False)
            if "logits_to_keep" in self.parameters:
                kwargs["logits_to_keep"] = 1
        elif "input_ids" not in self.parameters:
            return self._checked(self.model(kwargs.pop("input_ids"), **kwargs), ids)
        seen: list = []
        hook = self.decoder.stack.register_forward_hook(lambda m, a, out: seen.append(out)) if self.decoder else None
        try:
            out = self.model(**kwargs)
        finally:
            if hook is not None:
                hook.remove()
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

    `draws` other tokens are put at each position, so that one chance agreement does not hide a connection. `base` is
    `run(ids)` if it is known already.
    """
    again = run(ids)
    base = run(ids) if base is None else base
    noise = _difference(base, again)
    found = torch.zeros(*ids.shape, len(columns), dtype=torch.bool, device=base.device)
    for c, j in enumerate(columns):
        for step in range(1, draws + 1):
            changed = ids.clone()
            changed[:, j] = (changed[:, j] + step * 7) % vocab_size
            found[:, :, c] |= _difference(run(changed), base) > NOISE_FACTOR * noise
    return found.cpu()


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
