"""Prove on a model that a fusion engine does what it says, by experiments: what goes in is changed, and what comes out
of the layers and of the model is compared. Nothing is asked of the engine itself.

    print(prove(lm))

Each proof is a sentence and a number: how far apart two computations are that must agree, or how much changes that must
change. `labkit.fusion.faults` holds engines that fail them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from labkit.auditing.measure import audit
from labkit.decoder.anatomy import find_decoder
from labkit.decoder.running import evaluating
from labkit.errors import FusionError
from labkit.fusion.engine import Engine
from labkit.fusion.fast import FastEngine
from labkit.fusion.layout import Prompts, prompts, token_ids
from labkit.fusion.methods import method_named
from labkit.models import Loaded

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}  # of the largest logit
HALF = 1e-1  # in half precision, where sums in another order differ by some hundredths
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
    """All proofs of one engine on one model. Not `strict`: in half precision, where faulty engines can pass as well."""

    model: str
    engine: str
    proofs: tuple[Proof, ...]
    strict: bool = True

    @property
    def holds(self) -> bool:
        return all(proof.holds for proof in self.proofs)

    @property
    def failed(self) -> list[str]:
        return [proof.name for proof in self.proofs if not proof.holds]

    def __str__(self) -> str:
        weak = [] if self.strict else ["in half precision this is a trial and no proof: load the model in float32"]
        return "\n".join([f"{self.model}, engine {self.engine}", *map(str, self.proofs), *weak])


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
    before, masks = _state(lm.model), _measured(lm.model)
    with evaluating(lm.model):
        plain = bench.plain(ids[0])
        proofs = _agreeing(bench, ids, limit) + _isolation(bench, ids) + _reading(bench, ids, limit)
        name = bench.engine([ids[0]]).name
        changed = len(before ^ _state(lm.model)) + int(not torch.equal(plain, bench.plain(ids[0])))
    changed += len([one for one, other in zip_longest(masks, _measured(lm.model)) if one != other])
    said = "differences in audit, settings and bits"
    proofs.append(Proof("the model is left as it was", changed == 0, float(changed), said))
    return Proofs(lm.name, name, tuple(proofs), strict=lm.model.dtype in TOLERANCE)


class _Bench:
    """Makes engines for segments that are given as ids."""

    def __init__(self, model: nn.Module, make: Callable, prefix: tuple[int, ...], cue: tuple[int, ...]):
        self.model, self.make, self.prefix, self.cue = model, make, prefix, cue

    def engine(self, segments: Sequence[tuple[int, ...]], more: Sequence[int] = ()) -> Engine:
        fuse = method_named("fuse")
        return self.make(self.model, prompts(fuse, self.prefix, [segments], (*self.cue, *more)))

    def logits(self, segments: Sequence[tuple[int, ...]], more: Sequence[int] = ()) -> Tensor:
        return self.engine(segments, more).start()[0]

    def watched(self, segments: Sequence[tuple[int, ...]]) -> tuple[Tensor, _Watched]:
        """The logits, and what the layers were given and gave on the way."""
        watched = _Watched(self.model)
        try:
            return self.logits(segments), watched
        finally:
            watched.remove()

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
    """Change the tokens of each paraphrase in turn: the others' states stay, the first new token does not.

    Where the paraphrases stand in what an engine hands to the model is found by the same experiment: these are the
    positions whose input changes. So it does not matter how an engine lays them out, or whether it keeps anything.
    """
    vocabulary = bench.model.get_input_embeddings().num_embeddings
    logits, states = bench.watched(ids)
    felt, runs = float("inf"), []
    for number, changed in enumerate(ids):
        other = tuple((token + 1) % vocabulary for token in changed)
        now, watched = bench.watched([*ids[:number], other, *ids[number + 1 :]])
        felt = min(felt, _gap(now, logits))
        runs.append(watched)
    proofs = [Proof("the first token sees every paraphrase", felt > 0, felt, "more than 0")]
    if any([each.shape for each in run.states] != [each.shape for each in states.states] for run in runs):
        return [*proofs, Proof("no paraphrase sees another", False, float("nan"), "calls of other shapes: unknown")]
    own = [run.changed_inputs(states) for run in runs]  # for each paraphrase, bool (all tokens that were read)
    if not all(bool(each.any()) for each in own):
        return [*proofs, Proof("no paraphrase sees another", False, float("nan"), "one was not found in the calls")]
    seen = 0.0
    for number, run in enumerate(runs):
        moved = run.changed_states(states)  # (all tokens,)
        others = torch.stack([each for k, each in enumerate(own) if k != number]).any(0) & ~own[number]
        seen = max(seen, float(moved[others].max()))
    return [*proofs, Proof("no paraphrase sees another", seen == 0, seen, "0: bit for bit")]


class _Watched:
    """What went into the first layer and came out of every layer, call by call: each (rows, tokens, dim)."""

    def __init__(self, model: nn.Module):
        self.inputs: list[Tensor] = []
        self.states: list[Tensor] = []
        layers = find_decoder(model).layers
        self.handles = [layers[0].register_forward_pre_hook(self._read, with_kwargs=True)]
        self.handles += [layer.register_forward_hook(self._keep) for layer in layers]

    def _read(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        self.inputs.append((args[0] if args else kwargs["hidden_states"]).detach().clone())

    def _keep(self, layer: nn.Module, args: tuple, output: Any) -> None:
        self.states.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def changed_inputs(self, before: _Watched) -> Tensor:
        """bool (all tokens of all calls,)"""
        return _moved(before.inputs, self.inputs) > 0

    def changed_states(self, before: _Watched) -> Tensor:
        """(all tokens of all calls,): the largest change in any layer."""
        layers = len(self.states) // len(self.inputs)
        per_layer = [_moved(before.states[layer::layers], self.states[layer::layers]) for layer in range(layers)]
        return torch.stack(per_layer).amax(0)


def _moved(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    pairs = zip(before, after, strict=True)
    return torch.cat([(one - other).abs().amax(-1).flatten().float() for one, other in pairs])


def _reading(bench: _Bench, ids: list[tuple[int, ...]], limit: float) -> list[Proof]:
    """Go on token by token: the same as reading them with the cue, and one token is read for each."""
    watched = _Watched(bench.model)
    more, gap, read = [], 0.0, 0
    try:
        engine = bench.engine(ids)
        scores = engine.start()
        for _ in range(MORE_TOKENS):
            more.append(int(scores[0].argmax()))
            watched.inputs.clear()
            scores = engine.step(torch.tensor([more[-1]]))
            read = max(read, sum(each.shape[0] * each.shape[1] for each in watched.inputs))
            gap = max(gap, _gap(scores[0], bench.logits(ids, more)))
    finally:
        watched.remove()
    return [
        Proof("token by token is all at once", gap <= limit, gap, f"at most {limit:.0e}"),
        Proof("what has been read is not read again", read == 1, float(read), "tokens read for a new one: 1"),
    ]


def _state(model: nn.Module) -> set[str]:
    """Hooks, methods and settings by which something left behind would show."""
    settings = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    writing = getattr(model, "generation_config", None)
    found = {f"attention: {model.config._attn_implementation}", f"config: {settings}"}
    found |= {f"generation: {json.dumps(writing.to_dict(), sort_keys=True, default=str)}"} if writing else set()
    for path, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        found |= {f"{path}: hook {id(hook)}" for hook in hooks}
        found |= {f"{path}: training {module.training}", f"{path}: forward {id(type(module).forward)}"}
        found |= {f"{path}: own {name} {id(value)}" for name, value in vars(module).items() if callable(value)}
    return found


def _measured(model: nn.Module) -> list[str]:
    """The mask that is in force in each layer, by labkit's audit."""
    report = audit(model, quick=True)
    return [report.verdict, *(str(layer.mask) for layer in report.layers), *report.problems]
