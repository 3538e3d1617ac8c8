"""Prove by experiments on a model that a fusion engine is correct, and six faulty engines that do not pass.

    print(prove(lm))

The experiments change the input of an engine and compare the outputs of the layers and of the model. `FAULTS` are those
of the public experiment behind the idea: each looks like fusion and raises no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit import masks
from labkit.decoder.anatomy import find_decoder
from labkit.decoder.running import evaluating
from labkit.errors import DataError
from labkit.fusion.engine import Engine, FastEngine
from labkit.fusion.layout import Ids, Prompts, prompts, token_ids
from labkit.fusion.methods import METHODS
from labkit.fusion.reference import ReferenceEngine, RowState
from labkit.models import Loaded

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}  # relative to the largest logit
HALF = 1e-1  # in half precision, where the order of a sum changes its second digit
PARAPHRASES = (
    "In which country does the river that the old town stands on begin?",
    "Name the country where the old town's river has its source.",
    "The river of the old town: which country is its source in?",
)
MORE_TOKENS = 3  # read one by one behind the prompt

Make = Callable[[nn.Module, Prompts], Engine]


@dataclass(frozen=True)
class Proof:
    """One property: whether it holds, the measured number, and what it was compared with."""

    name: str
    holds: bool
    value: float
    limit: str

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}  {self.name:<44} {self.value:.1e} ({self.limit})"


@dataclass(frozen=True)
class Proofs:
    """All proofs of one engine on one model. `strict` is False in half precision, where faulty engines can pass."""

    model: str
    engine: str
    proofs: tuple[Proof, ...]
    strict: bool

    @property
    def holds(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[str]:
        return [proof.name for proof in self.proofs if not proof.holds]

    def __str__(self) -> str:
        weak = [] if self.strict else ["in half precision this is no proof: load the model in float32"]
        return "\n".join([f"{self.model}, engine {self.engine}", *map(str, self.proofs), *weak])


def prove(lm: Loaded, make: Make = FastEngine, paraphrases: Sequence[str] = PARAPHRASES) -> Proofs:
    """Run all proofs of the method "fuse" on `lm`, with the engine `make(model, prompts)`.

    Unless the limit states otherwise, a value is the difference of the first token's logits, relative to the largest.

    Raises:
        DataError: a model that cannot be fused, or fewer than two paraphrases.
    """
    prefix, (segments,), cue = token_ids(lm.tokenizer, [paraphrases], "Answer in one word.\n", "Answer:", "\n")
    if len(segments) < 2:
        raise DataError("give at least two paraphrases: one alone cannot be isolated from others")
    model, limit = lm.model, TOLERANCE.get(lm.model.dtype, HALF)
    if find_decoder(model).backend == "eager":  # its softmax is in single precision in any dtype
        limit = max(limit, TOLERANCE[torch.float32])

    def engine(segments: Sequence[Ids], more: Sequence[int] = ()) -> Engine:
        return make(model, prompts(METHODS["fuse"], prefix, [segments], (*cue, *more)))

    def plain(segment: Ids) -> Tensor:
        """The logits of the unchanged model after the prompt with one paraphrase, (vocab,)."""
        return model(input_ids=torch.tensor([[*prefix, *segment, *cue]], device=model.device)).logits[0, -1]

    state = _state(model)
    with evaluating(model):
        before = plain(segments[0])
        fused = engine(segments).start()[0]  # (vocab,)
        gaps = {
            "one paraphrase is the plain prompt": max(_gap(engine([s]).start()[0], plain(s)) for s in segments),
            "copies are one": max(_gap(engine([s] * 4).start()[0], plain(s)) for s in segments[:2]),
            "order does not matter": _gap(engine(segments[::-1]).start()[0], fused),
        }
        proofs = [Proof(name, gap <= limit, gap, f"at most {limit:.0e}") for name, gap in gaps.items()]
        proofs += _isolation(model, engine, segments) + _continuation(model, engine, segments, limit)
        changed = len(state ^ _state(model)) + int(not torch.equal(before, plain(segments[0])))
        proofs.append(Proof("the model is left as it was", not changed, float(changed), "differences: 0"))
        return Proofs(lm.name, engine(segments).name, tuple(proofs), model.dtype in TOLERANCE)


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def _isolation(model: nn.Module, engine: Callable[..., Engine], segments: list[Ids]) -> list[Proof]:
    """Change all tokens of each paraphrase in turn: the states of the others stay equal, the first token's logits not.

    The positions of a paraphrase in the calls of the model are those where the input of the first layer changes, so the
    experiment works with any layout.
    """
    vocabulary = model.get_input_embeddings().num_embeddings

    def read(segments: list[Ids]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        with _watched(model) as (inputs, states):
            return engine(segments).start()[0], inputs, states

    logits, inputs, states = read(segments)
    effects, own, moved = [], [], []
    for number, ids in enumerate(segments):
        other = tuple((token + 1) % vocabulary for token in ids)
        new, new_inputs, new_states = read([*segments[:number], other, *segments[number + 1 :]])
        effects.append(_gap(new, logits))
        if [call.shape for call in new_inputs] == [call.shape for call in inputs]:
            own.append(_moved(inputs, new_inputs) > 0)  # (tokens of all calls,)
            layers = len(states) // len(inputs)
            moved.append(torch.stack([_moved(states[n::layers], new_states[n::layers]) for n in range(layers)]).amax(0))
    leak = float("nan")
    if len(own) == len(segments) and all(positions.any() for positions in own):
        others = [torch.stack([*own[:n], *own[n + 1 :]]).any(0) & ~own[n] for n in range(len(own))]
        leak = max(float(changes[where].max()) for changes, where in zip(moved, others, strict=True))
    return [
        Proof("the first token sees every paraphrase", min(effects) > 0, min(effects), "more than 0"),
        Proof("no paraphrase sees another", leak == 0, leak, "0: bit for bit"),
    ]


def _continuation(model: nn.Module, engine: Callable[..., Engine], segments: list[Ids], limit: float) -> list[Proof]:
    """Continue token by token: the logits are those of reading the tokens with the cue, and each is read once."""
    reader, more, gaps, tokens_read = engine(segments), [], [], []
    scores = reader.start()
    for _ in range(MORE_TOKENS):
        more.append(int(scores[0].argmax()))
        with _watched(model) as (inputs, _):
            scores = reader.step(torch.tensor([more[-1]]))
        tokens_read.append(sum(call.shape[0] * call.shape[1] for call in inputs))
        gaps.append(_gap(scores[0], engine(segments, more).start()[0]))
    most = max(tokens_read)
    return [
        Proof("token by token is all at once", max(gaps) <= limit, max(gaps), f"at most {limit:.0e}"),
        Proof("what has been read is not read again", most == 1, float(most), "tokens read for a new one: 1"),
    ]


@contextmanager
def _watched(model: nn.Module) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """For the block, collect the inputs of the first layer and the outputs of all layers, (rows, tokens, dim) each."""
    inputs: list[Tensor] = []
    states: list[Tensor] = []

    def before(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs.append((args[0] if args else kwargs["hidden_states"]).clone())

    def after(layer: nn.Module, args: tuple, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).clone())

    layers = find_decoder(model).layers
    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield inputs, states
    finally:
        for hook in hooks:
            hook.remove()


def _moved(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """The largest change of each token, (tokens of all calls,)."""
    pairs = zip(before, after, strict=True)
    return torch.cat([(one - other).abs().amax(-1).flatten().float() for one, other in pairs])


def _state(model: nn.Module) -> set[str]:
    """Settings, modes, hooks and replaced methods."""
    configs = (model.config, getattr(model, "generation_config", None))
    state = {repr(config and config.to_dict()) for config in configs} | {model.config._attn_implementation}
    for path, module in model.named_modules():
        own = [value for value in vars(module).values() if callable(value)]
        parts = [type(module).forward, *module._forward_hooks.values(), *module._forward_pre_hooks.values(), *own]
        state.add(f"{path} {module.training} {[id(part) for part in parts]}")
    return state


# ---- faulty engines ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A faulty engine: its name, what it does, and the proof that must fail."""

    name: str
    story: str
    engine: Make
    caught_by: str


class _Dense(ReferenceEngine):
    def __init__(self, model: nn.Module, prompts: Prompts):
        super().__init__(model, prompts, rendering="dense")
        self.name = "faulty"


class _FirstTokenUnfused(_Dense):
    """The cue is part of the last paraphrase, whose last token predicts the first new one."""

    def __init__(self, model: nn.Module, prompts: Prompts):
        rows = []
        for row in prompts.rows:
            last = replace(row.segments[-1], ids=row.segments[-1].ids + prompts.cue)
            rows.append(replace(row, segments=(*row.segments[:-1], last), cue_start=row.cue_start + len(prompts.cue)))
        super().__init__(model, replace(prompts, rows=tuple(rows), cue=()))


class _Retokenised(_Dense):
    """One more token at the beginning, as a tokenizer would add it, and the mask and positions of the old ids."""

    def start(self) -> Tensor:
        self.sequences = [RowState(row, self.prompts, cached=True) for row in self.prompts.rows]
        new = []
        for sequence in self.sequences:
            *sequence.ids, pushed_out = [sequence.ids[0], *sequence.ids]
            new.append([pushed_out, *self.prompts.cue])
        return self._logits(new)


class _SilentlyCausal(_Dense):
    def mask(self, sequence: RowState) -> masks.Mask:
        return masks.causal()


class _SeparatorsApart(_Dense):
    """No key is allowed for the last token of each paraphrase: all scores are equal, so it attends to every key."""

    def inputs_of(self, sequence: RowState, new: Sequence[int]) -> dict[str, Any]:
        inputs = super().inputs_of(sequence, new)
        cached, at, separators = len(sequence.positions) - inputs["input_ids"].shape[1], len(self.prompts.prefix), []
        for segment in sequence.row.segments:
            at += len(segment.ids)
            separators += [at - 1 - cached] if at > cached else []
        given = inputs["attention_mask"]
        for mask in given.values() if isinstance(given, dict) else [given]:
            mask[:, :, separators] = torch.finfo(mask.dtype).min
        return inputs


def _cacheless(model: nn.Module, prompts: Prompts) -> Engine:
    return ReferenceEngine(model, prompts, rendering="dense", cached=False)


def _sequential(model: nn.Module, prompts: Prompts) -> Engine:
    rows = []
    for row in prompts.rows:
        start, moved = len(prompts.prefix), []
        for segment in row.segments:
            moved.append(replace(segment, start=start))
            start += len(segment.ids)
        rows.append(replace(row, segments=tuple(moved), cue_start=start))
    return _Dense(model, replace(prompts, rows=tuple(rows)))


FAULTS = (
    Fault(
        "first token not fused",
        "the answer's first token is predicted by the last token of the prompt, which attended to the last paraphrase",
        _FirstTokenUnfused,
        "the first token sees every paraphrase",
    ),
    Fault(
        "decoded and read again",
        "the ids are decoded and tokenised again, which puts a token in front: mask and positions are off by one",
        _Retokenised,
        "one paraphrase is the plain prompt",
    ),
    Fault(
        "silently causal",
        "where the mask cannot be built, an `except:` uses the plain causal one",
        _SilentlyCausal,
        "no paraphrase sees another",
    ),
    Fault(
        "separators in no segment",
        "the separators belong to no paraphrase: no key is allowed for them, so they attend to all keys equally",
        _SeparatorsApart,
        "no paraphrase sees another",
    ),
    Fault(
        "no cache",
        "everything is read again for each new token",
        _cacheless,
        "what has been read is not read again",
    ),
    Fault(
        "positions go on",
        "positions are counted along the row, so each paraphrase has other positions",
        _sequential,
        "copies are one",
    ),
)
