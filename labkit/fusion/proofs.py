"""Prove on a model that a fusion engine does what it says, by experiments on its output alone.

    print(prove(lm))

Each proof is a sentence and a number: how far apart two computations are that must agree, or how much changes that must
change. `labkit.fusion.faults` holds engines that fail them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.anatomy import find_decoder
from labkit.errors import FusionError
from labkit.fusion.engine import Engine
from labkit.fusion.fast import FastEngine
from labkit.fusion.layout import Prompts, prompts, token_ids
from labkit.fusion.methods import method_named
from labkit.fusion.reference import ReferenceEngine
from labkit.models import Loaded
from labkit.probe import evaluating

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}  # of the largest logit
HALF = (
    1e-1  # in half precision, where sums in another order differ by some hundredths: load in float32 for a strict proof
)
PARAPHRASES = (
    "In which country does the river that the old town stands on begin?",
    "Name the country where the old town's river has its source.",
    "The river of the old town: which country is its source in?",
)
PREFIX = "Answer in one word.\n"
CUE = "Answer:"
MORE_TOKENS = 3  # read one by one behind the prompt
COPIES = 4


@dataclass(frozen=True)
class Proof:
    """One property: whether it holds, and the number that says so. `limit` is what it was compared with."""

    name: str
    holds: bool
    value: float
    limit: str

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}  {self.name:<44} {self.value:.1e} ({self.limit})"


@dataclass(frozen=True)
class Proofs:
    """All proofs of one engine on one model."""

    model: str
    engine: str
    proofs: tuple[Proof, ...]

    @property
    def holds(self) -> bool:
        return all(proof.holds for proof in self.proofs)

    @property
    def failed(self) -> list[str]:
        return [proof.name for proof in self.proofs if not proof.holds]

    def __str__(self) -> str:
        return "\n".join([f"{self.model}, engine {self.engine}", *map(str, self.proofs)])


def prove(
    lm: Loaded,
    make: Callable[[nn.Module, Prompts], Engine] = FastEngine,
    paraphrases: Sequence[str] = PARAPHRASES,
    *,
    prefix: str = PREFIX,
    cue: str = CUE,
    separator: str = "\n",
) -> Proofs:
    """Run all proofs of the method "fuse" on `lm`, with an engine made by `make`.

    Numbers are differences of first-token logits relative to the largest logit, unless the sentence says otherwise.

    Raises:
        FusionError: a model that cannot be fused, or fewer than two paraphrases.
    """
    begins, (ids,), ends = token_ids(lm.tokenizer, [list(paraphrases)], prefix, cue, separator)
    if len(ids) < 2:
        raise FusionError("give at least two paraphrases: there is nothing to keep apart otherwise")
    bench = _Bench(lm.model, make, begins, ends)
    limit = TOLERANCE.get(lm.model.dtype, HALF)
    if find_decoder(lm.model).backend == "eager":  # its softmax is in single precision, whatever the model's is
        limit = max(limit, TOLERANCE[torch.float32])
    before = _state(lm.model)
    with evaluating(lm.model), torch.no_grad():
        proofs = _agreeing(bench, ids, limit) + _isolation(bench, ids) + _reading(bench, ids, limit)
    changed = float(len(before ^ _state(lm.model)))
    proofs.append(Proof("the model is left as it was", changed == 0, changed, "hooks and settings that differ"))
    return Proofs(lm.name, bench.engine([ids[0]]).name, tuple(proofs))


class _Bench:
    """Makes engines for segments that are given as ids."""

    def __init__(self, model: nn.Module, make: Callable, prefix: tuple[int, ...], cue: tuple[int, ...]):
        self.model, self.make, self.prefix, self.cue = model, make, prefix, cue

    def engine(self, segments: Sequence[tuple[int, ...]], more: Sequence[int] = ()) -> Engine:
        fuse = method_named("fuse")
        return self.make(self.model, prompts(fuse, self.prefix, [segments], (*self.cue, *more)))

    def logits(self, segments: Sequence[tuple[int, ...]], more: Sequence[int] = ()) -> Tensor:
        return self.engine(segments, more).start()[0]

    def plain(self, segment: tuple[int, ...]) -> Tensor:
        """The model's own answer to the prompt with one paraphrase, without any of labkit."""
        ids = torch.tensor([[*self.prefix, *segment, *self.cue]], device=next(self.model.parameters()).device)
        return self.model(input_ids=ids).logits[0, -1]


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def _agreeing(bench: _Bench, ids: list[tuple[int, ...]], limit: float) -> list[Proof]:
    all_of_them = bench.logits(ids)
    gaps = {
        "one paraphrase is the plain prompt": max(_gap(bench.logits([each]), bench.plain(each)) for each in ids),
        "copies are one": max(_gap(bench.logits([each] * COPIES), bench.plain(each)) for each in ids[:2]),
        "order does not matter": _gap(bench.logits(ids[::-1]), all_of_them),
    }
    return [Proof(name, gap <= limit, gap, f"at most {limit:.0e}") for name, gap in gaps.items()]


def _isolation(bench: _Bench, ids: list[tuple[int, ...]]) -> list[Proof]:
    """Change the tokens of each paraphrase in turn: the others' keys and values stay, the first new token does not."""
    engine = bench.engine(ids)
    logits, vocabulary = engine.start()[0], bench.model.get_input_embeddings().num_embeddings
    before = _keys_and_values(engine)
    seen, felt = 0.0, float("inf")
    for number, changed in enumerate(ids):
        other = tuple((token + 1) % vocabulary for token in changed)
        engine = bench.engine([*ids[:number], other, *ids[number + 1 :]])
        felt = min(felt, _gap(engine.start()[0], logits))
        if before is not None:
            after = _keys_and_values(engine)
            seen = max(seen, _most_changed(before, after, ids, number, len(bench.prefix)))
    proofs = [Proof("the first token sees every paraphrase", felt > 0, felt, "more than 0")]
    if before is not None:
        proofs.append(Proof("no paraphrase sees another", seen == 0, seen, "0: bit for bit"))
    return proofs


def _keys_and_values(engine: Any) -> list[Tensor] | None:
    """Keys and values of the first row of all layers, each (heads, tokens, dim); None where an engine keeps none."""
    if isinstance(engine, FastEngine):
        cache = engine.joined.cache if hasattr(engine, "joined") else None
    elif isinstance(engine, ReferenceEngine):
        cache = engine.sequences[0].cache if hasattr(engine, "sequences") else None
    else:
        cache = None
    if cache is None:
        return None
    return [part[0].clone() for layer in cache.layers for part in (layer.keys, layer.values)]


def _most_changed(before: list, after: list, ids: list[tuple[int, ...]], number: int, begin: int) -> float:
    """The largest change of a key or value in the segments other than `number`."""
    most, at = 0.0, begin
    for place, segment in enumerate(ids):
        if place != number:
            for one, other in zip(before, after, strict=True):
                end = at + len(segment)
                most = max(most, float((one[:, at:end] - other[:, at:end]).abs().max()))
        at += len(segment)
    return most


def _reading(bench: _Bench, ids: list[tuple[int, ...]], limit: float) -> list[Proof]:
    """Go on token by token: the same as reading them with the cue, and one token is read for each."""
    counter = _Counter(bench.model)
    more, gap = [], 0.0
    try:
        engine = bench.engine(ids)
        scores, counter.tokens = engine.start(), 0
        for _ in range(MORE_TOKENS):
            more.append(int(scores[0].argmax()))
            scores = engine.step(torch.tensor([more[-1]]))
            read, counter.tokens = counter.tokens, 0
            gap = max(gap, _gap(scores[0], bench.logits(ids, more)))
            counter.tokens = 0
    finally:
        counter.handle.remove()
    return [
        Proof("token by token is all at once", gap <= limit, gap, f"at most {limit:.0e}"),
        Proof("what has been read is not read again", read == 1, float(read), "tokens read for a new one: 1"),
    ]


class _Counter:
    """Tokens that go through the layer stack."""

    def __init__(self, model: nn.Module):
        self.tokens = 0
        self.handle = find_decoder(model).layers[0].register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.tokens += hidden.shape[0] * hidden.shape[1]


def _state(model: nn.Module) -> set[str]:
    """Hooks, own methods and settings by which something left behind would show."""
    found = {f"attention: {model.config._attn_implementation}"}
    for path, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        found |= {f"{path}: hook {id(hook)}" for hook in hooks}
        found |= {f"{path}: training {module.training}"}
        found |= {
            f"{path}: own {name}" for name, value in vars(module).items() if callable(value) and name == "forward"
        }
    return found
