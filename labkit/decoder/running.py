"""Run a model of any kind on token ids: its output at each position, and the state it is in while it runs.

The probes run a model twice and compare, so here nothing may pass from token to token except through the model's own
connections.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from labkit.decoder import limits
from labkit.decoder.anatomy import Decoder, attention_modules
from labkit.errors import AuditError, LabkitError, is_out_of_memory

APART = "batched_mm"  # how transformers calls a computation of experts in which no token changes another's rounding
BODY_MEASURED = "its output is one per text, so the states of its body were measured"
TARGETS = ("targets", "labels", "target", "y")  # nanoGPT and similar models give all logits only if called with these
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ROOM = 0.8  # share of the free memory that weights of a higher precision may take for a moment
GATHERED = 2e9  # bytes: the most that the weights of experts may take, once for each token


class Runner:
    """Calls any model on token ids, and finds its output per position.

    Works on a transformers model (its last hidden state is read, so a large head costs nothing) and on any other module
    that maps `input_ids` and, if it takes one, `attention_mask` to a tensor of shape (batch, seq, ...), or a structure
    that holds one. If the output is one per text, the states of the model's body are read, and `pooled` is True.
    """

    def __init__(self, model: nn.Module, decoder: Decoder | None, vocab_size: int | None = None):
        self.model, self.decoder = model, decoder
        self.body = decoder.stack if decoder is not None else _body(model)
        self.attentions = attention_modules(model) if decoder is None else list(decoder.attentions)
        self.pooled = False
        self.tried: dict[str, bool] = {}
        parameters = inspect.signature(model.forward).parameters
        self.takes_anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.parameters = set(parameters)
        placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.by_name = "input_ids" in parameters or not any(p.kind in placed for p in parameters.values())
        inside = decoder.stack if decoder is not None else model  # a multimodal model has other embeddings, too
        embedding = next((m for m in inside.modules() if isinstance(m, nn.Embedding)), None)
        if vocab_size is None and embedding is None:
            raise AuditError(f"{type(model).__name__} has no nn.Embedding: give the number of token ids (vocab_size=)")
        self.vocab_size = vocab_size or embedding.num_embeddings
        weight = next(iter(model.parameters()), None) if embedding is None else embedding.weight
        self.device = torch.device("cpu") if weight is None else weight.device
        self.targets: str | None = None  # the argument without which the model gives its last position only
        targets = next((name for name in TARGETS if name in parameters), None)
        if targets and decoder is None:
            try:
                with evaluating(model):
                    self.run(self.tokens(1, 4))
            except AuditError:
                self.targets = targets

    def takes(self, name: str) -> bool:
        """Whether the model can be called with this argument: "attention_mask", "position_ids" or "use_cache".

        A model that takes any keyword may pass it on or ignore it, which is tried. A decoder that labkit knows passes a
        mask and `use_cache` on.
        """
        if name in self.parameters:
            return True
        if not self.takes_anything or (name == "use_cache" and self.decoder is None):
            return False
        if self.decoder is not None and name != "position_ids":
            return True
        if name not in self.tried:
            given = {"position_ids": torch.tensor([[0, 1, 0, 1]])}
            if name == "attention_mask":  # hides the first: hiding the last changes nothing under a causal mask
                given = {"real": torch.tensor([[False, True, True, True]])}
            ids = self.tokens(1, 4)
            try:
                self.tried[name] = not torch.equal(self.run(ids, **given), self.run(ids))
            except LabkitError:
                self.tried[name] = False
        return self.tried[name]

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
            # Gemma 4 with shared keys and values computes its last layers at these positions only.
            if not getattr(self.decoder.config, "num_kv_shared_layers", 0):
                kwargs["logits_to_keep"] = 1
        if self.targets:
            kwargs[self.targets] = torch.zeros_like(kwargs["input_ids"])  # the same for all texts: it connects nothing
        first = () if self.by_name else (kwargs.pop("input_ids"),)
        outputs: list = []  # of the body
        with ExitStack() as stack:
            if self.body is not self.model or self.decoder is not None:
                hook = self.body.register_forward_hook(lambda m, a, out: outputs.append(out))
                stack.callback(hook.remove)
            stack.enter_context(_isolated_tokens(self.model, ids.numel(), kwargs.get("use_cache", False)))
            try:
                out = self.model(*first, **kwargs)
            except LabkitError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                cause = " ".join(str(error).split())[:200]
                raise AuditError(
                    f"{type(self.model).__name__} could not be called on token ids of shape {tuple(ids.shape)}"
                    f"{''.join(f', {name}' for name in kwargs if name != 'input_ids')}: {type(error).__name__}: {cause}"
                ) from error
        if outputs and self.decoder is None:  # a text may have as many classes as tokens: compare with three axes only
            own = first_tensor(out)
            self.pooled = own is None or own.ndim < 3 or own.shape[:2] != ids.shape
        states = first_tensor(outputs[-1] if outputs and (self.pooled or self.decoder is not None) else out)
        if states is not None and states.shape[:2] == ids.shape:
            return states.reshape(*states.shape[:2], -1)
        raise AuditError(
            f"{type(self.model).__name__} gave {None if states is None else tuple(states.shape)} for ids of shape "
            f"{tuple(ids.shape)}: the audit needs one output per position, (batch, sequence, ...). Wrap the model:\n"
            "    every = torch.nn.Module(); every.model = model\n"
            "    every.forward = lambda input_ids: model(input_ids, ...)  # a call that gives all positions\n"
            "and measure `every`"
        )

    def tokens(self, batch: int, n: int, seed: int = 0) -> Tensor:
        """Distinct random token ids, the same in every row, (batch, n); the lowest ids are left out, being special."""
        low = min(8, max(0, self.vocab_size - 2 * n))
        generator = torch.Generator().manual_seed(seed)
        span = min(self.vocab_size - low, 50_000)
        drawn = torch.randperm(span, generator=generator)[:n] if span >= n else torch.arange(n) % span
        return (drawn + low).expand(batch, n).clone()


def _body(model: nn.Module) -> nn.Module:
    """The base model of a transformers model, inside its heads and adapters; the model itself if there is none."""
    while isinstance(inner := getattr(model, "base_model", None), nn.Module) and inner is not model:
        model = inner
    return model


@contextmanager
def _isolated_tokens(model: nn.Module, tokens: int, use_cache: bool) -> Iterator[None]:
    """For the block no token influences another except through the model's own connections.

    No part of the model keeps keys and values, unless asked to. Where experts are chosen per token, each token is
    computed with its own copy of their weights (unless these take more than `GATHERED` bytes): computed together, the
    tokens of one expert change each other's rounding, which is no influence.
    """
    with ExitStack() as stack:
        for config in configs_of(model):
            if not use_cache and getattr(config, "use_cache", False) is True:
                stack.enter_context(replaced(config, use_cache=False))
            implementation = getattr(config, "_experts_implementation", None)
            if implementation not in (None, APART) and tokens * _bytes_of_experts(model, config) <= GATHERED:
                stack.enter_context(replaced(config, _experts_implementation=APART))
        yield


@contextmanager
def replaced(target: object, **values) -> Iterator[None]:
    """For the block, attributes of `target` have these values."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def configs_of(model: nn.Module) -> list:
    """The different config objects of a model and its modules."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if hasattr(config, "__dict__")}.values())


def _bytes_of_experts(model: nn.Module, config) -> int:
    """Bytes of the weights of one token's experts, in the layer where they take the most."""
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_topk")
    chosen = max(getattr(config, name, 0) or 0 for name in names)
    of_layers = [
        sum(p.numel() * p.element_size() // len(p) for p in m.parameters(recurse=False) if p.ndim == 3)
        for m in model.modules()
        if "Experts" in type(m).__name__
    ]
    return max(1, chosen) * max(of_layers, default=0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """`model` in evaluation mode and without gradients; afterwards every submodule is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        for module in training:
            module.training = True


@contextmanager
def random_state_kept(seed: int | None = None) -> Iterator[None]:
    """Restore the random state of torch, numpy and Python after the block; with `seed` torch starts from it."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


@contextmanager
def in_precision(dtype: torch.dtype, model: nn.Module, instead_of: Sequence[torch.dtype] = FLOATS) -> Iterator[None]:
    """For the block the weights of these types are of type `dtype`; afterwards they are the same tensors as before.

    Raises AuditError if they would not fit into memory.
    """
    shorter = {short for short in instead_of if short.itemsize < dtype.itemsize}
    weights = [weight for weight in (*model.parameters(), *model.buffers()) if weight.dtype in shorter]
    device = next((str(weight.device) for weight in weights), "cpu")
    if dtype.itemsize * sum(weight.numel() for weight in weights) > ROOM * limits.available_bytes(device):
        raise AuditError(f"the weights do not fit into memory in {str(dtype).removeprefix('torch.')}")
    with ExitStack() as stack:
        for config in configs_of(model) if dtype == torch.float64 else ():
            if getattr(config, "_experts_implementation", None):  # only the simplest code for experts allows float64
                stack.enter_context(replaced(config, _experts_implementation="eager"))
        for weight in weights:
            stack.enter_context(replaced(weight, data=weight.data.to(dtype)))
        yield


@contextmanager
def without_mlps(decoder: Decoder) -> Iterator[None]:
    """Skip the feed-forward blocks: attention measured in isolation does not depend on them, and they cost the most."""

    class Unchanged(nn.Module):
        def forward(self, hidden: Tensor, *_, **__) -> Tensor:
            return hidden

    with ExitStack() as stack:
        for layer in decoder.layers:
            mlp = getattr(layer, "mlp", None)
            if type(mlp).__name__.endswith("MLP") and not hasattr(mlp, "experts"):  # those may give more than states
                stack.enter_context(replaced(layer, mlp=Unchanged()))
        yield


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
