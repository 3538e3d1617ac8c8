"""Does a causal language model see what it is asked to predict? By perturbation, to the last bit; and by training.

    print(find_leaks(model))          # which position sees which later one, by how much, in which layer
    print(leak_meter(factory, ids))   # what a leak does to training: labkit.leak_training

A decoder's output at position i must not change, not by one bit, when a token after i changes. Four ways of hiding a
leak are opened: a mask that is dropped in train mode, a mask that is a number which large scores outweigh, a leak in
one layer only, and labels that were not shifted, so that each position is asked for the token it was given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from labkit import probe, running
from labkit.anatomy import attention_modules, decoder_or_none
from labkit.errors import AuditError, LeakageError
from labkit.leak_training import LeakMeter, context_of, leak_meter
from labkit.measure import composed, layer_list
from labkit.probe import AttentionCall
from labkit.progress import transformers_errors_only
from labkit.running import BODY_MEASURED, Runner

__all__ = ["Leak", "LeakMeter", "LeakReport", "find_leaks", "leak_meter"]

TOKENS = 16
STRESS = (10.0, 1e2, 1e3, 1e4, 1e5, 1e6)  # factors on attention scores that a finite mask value must withstand
CALM, CHANGE = 1e-20, 1e9  # scores as good as 0, and a change that shows through a mask of down to about -30
A_MASK = -0.7  # a future key that counts for less than half of one's own (ln 1/2) is masked, if by a finite number

Cells = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Leak:
    """One way in which the future gets in.

    Attributes:
        kind: "future-token", "train-mode", "finite-mask", "labels-not-shifted" (a position is asked for a token it was
            given) or "labels-misplaced" (for a later one than the next).
        text: what was seen, in plain words.
        cells: (position, later position that it sees), most affected first.
        layers: attention layers in which it happens; empty if it is not in the attention, or could not be told.
        factor: of a finite mask: how many times as large the attention scores were when it gave way, 1 = as they are.
    """

    kind: str
    text: str
    cells: Cells = ()
    layers: tuple[int, ...] = ()
    factor: float | None = None


@dataclass(frozen=True)
class LeakReport:
    """What `find_leaks` found. `print(report)` tells it; `report.clean` is True if nothing leaks.

    `influence` (positions, positions): how much the output at i changes when token j does, relative to its size.
    """

    model: str
    leaks: list[Leak]
    influence: Tensor
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.leaks

    def __str__(self) -> str:
        verdict = "no leak" if self.clean else "LEAKS"
        lines = [f"{self.model}: {verdict}, {len(self.influence)} tokens perturbed one by one"]
        lines += [f"leak: {leak.text}" for leak in self.leaks]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def to_json(self) -> str:
        influence = self.influence.nan_to_num().tolist()  # JSON knows no infinity
        return json.dumps({"clean": self.clean} | asdict(self) | {"influence": influence}, indent=1)


def find_leaks(model: nn.Module, *, tokens: int = TOKENS, vocab_size: int | None = None, seed: int = 0) -> LeakReport:
    """Perturb each token and see whether any position before it notices: in eval mode, in train mode, under stress.

    Args:
        model: maps `input_ids` (batch, seq) to logits or states (batch, seq, ...); a transformers model, a
            `labkit.gpt.GPT`, or your own. It is left as it was.
        tokens: length of the text that is perturbed; at most the model's context is used.
        vocab_size: number of token ids, if the model has no `nn.Embedding` to tell it.
        seed: of the text, and of the dropout in train mode, which is the same in every run.

    Raises:
        LeakageError: fewer than two tokens, or a vocabulary of one: there is nothing to perturb.
        AuditError: the model cannot be called on token ids, gives no output per position, or no numbers.
    """
    subject = _Subject(model, tokens, vocab_size, seed)
    with _left_as_it_was(model, subject.runner.device):
        model.eval()
        influence = subject.influence()
        subject.measure_masks()
        leaks = subject.leaks_in(influence, "future-token") or _under_stress(subject)
        if not leaks:
            model.train()  # with the same dropout in every run
            leaks = subject.leaks_in(subject.influence(), "train-mode", "only in train mode: ")
            model.eval()
        leaks += _misplaced_labels(subject)
    if subject.runner.pooled:
        subject.notes.append(BODY_MEASURED)
    if not subject.attentions:
        subject.notes.append("no attention modules were found: layers were not told apart, and scores not raised")
    return LeakReport(type(model).__name__, leaks, influence, subject.notes)


class _Subject:
    """The model under test, one text, and what can be measured with them. Every run begins from the same seed."""

    def __init__(self, model: nn.Module, tokens: int, vocab_size: int | None, seed: int):
        self.model, self.seed, self.notes = model, seed, []
        self.decoder = decoder_or_none(model)
        self.runner = Runner(model, self.decoder, vocab_size)
        length = min(tokens, context_of(model) or tokens)
        if length < 2 or self.runner.vocab_size < 2:
            given = f"{length} token(s) of a vocabulary of {self.runner.vocab_size}"
            raise LeakageError(f"a leak shows when one of several tokens is exchanged for another; {given} will not do")
        self.ids = self.runner.tokens(1, length, seed)
        self.attentions = list(self.decoder.attentions) if self.decoder else attention_modules(model)
        self.levers: dict[int, str] = {}  # by what each layer's scores can be raised
        self.finite: dict[int, float] = {}  # what the mask adds to a score, where that is a number

    def run(self, ids: Tensor) -> Tensor:
        """Output per position, (seq, dim)."""
        torch.manual_seed(self.seed)
        return self.runner.run(ids)[0].float()

    @torch.no_grad()
    def influence(self, columns: Sequence[int] | None = None) -> Tensor:
        """(positions, positions) relative change of the output at i when token j does; 0 in columns not asked for."""
        n, vocabulary = self.ids.size(1), self.runner.vocab_size
        base = self.run(self.ids)
        if not bool(base.isfinite().all()):
            raise AuditError(f"{type(self.model).__name__} gave NaN or infinite outputs, whose causes cannot be told")
        noise = (self.run(self.ids) - base).abs().amax(-1)  # 0 with deterministic kernels
        size = base.abs().amax(-1).clamp(min=1e-12)
        found = torch.zeros(n, n)
        for j in range(n) if columns is None else columns:
            for step in (7, 12):  # two other tokens that have no period in common; never the token itself
                changed = self.ids.clone()
                changed[:, j] = (changed[:, j] + 1 + (step - 1) % (vocabulary - 1)) % vocabulary
                gap = (self.run(changed) - base).abs().amax(-1).nan_to_num(torch.inf)
                found[:, j] = found[:, j].maximum(torch.where(gap > probe.NOISE_FACTOR * noise, gap / size, 0.0).cpu())
        return found

    def calls(self) -> dict[int, _SeededCall]:
        """The calls of the attention modules that can be replayed with other hidden states, by layer."""
        with probe.recorded_calls(self.attentions) as calls:
            self.run(self.ids)
        calls = [call for call in calls if _is_replayable(call, self.ids.size(1))]
        return {self.attentions.index(call.module): _SeededCall(**vars(call), seed=self.seed) for call in calls}

    def measure_masks(self) -> None:
        """Fill `levers` and `finite`."""
        with running.in_float32(self.model, torch.float16):
            for i, call in self.calls().items():
                if lever := _lever(call):
                    self.levers[i] = lever
                    if -torch.inf < (worth := _worth_of_mask(call, lever)) < A_MASK:
                        self.finite[i] = worth

    def leaks_in(self, influence: Tensor, kind: str, preamble: str = "") -> list[Leak]:
        """The future cells of `influence`, apart: what attention layers let through, and what comes in elsewhere."""
        if not (cells := _future_cells(influence)):
            return []
        layer_cells, leaks = self.cells_by_layer(), []
        layers = _that_see_ahead(layer_cells)
        if layers and self.finite.keys() >= set(layers) and kind == "future-token":
            return [self.finite_mask(influence, 1.0)]
        reach = composed(list(layer_cells.values()), len(influence))
        if through := tuple(cell for cell in cells if bool(reach[cell])):
            text = f"{preamble}{_in_words(through, influence)}, in {layer_list(layers)}"
            leaks.append(Leak(kind, text, through, layers))
        if elsewhere := tuple(cell for cell in cells if not bool(reach[cell])):
            text = preamble + _in_words(elsewhere, influence)
            foreign = any(isinstance(module, nn.MultiheadAttention) for module in self.model.modules())
            if layer_cells and len(layer_cells) == len(self.attentions) and not foreign and not self.finite:
                text += f", not in the attention: none of its {len(layer_cells)} layers lets that through"
            leaks.append(Leak(kind, text, elsewhere))
        return leaks

    def finite_mask(self, influence: Tensor, factor: float) -> Leak:
        """The leak of a mask that gave way with scores `factor` times as large."""
        cells = _future_cells(influence)
        layers = tuple(sorted({*self.finite, *_that_see_ahead(self.cells_by_layer())}))
        number = f" (about {max(self.finite.values()):.0f})" if self.finite else ""
        scores = "as they are" if factor == 1 else f"{factor:,.0f} times as large"
        text = f"the future is hidden by a finite number only{number}: with attention scores {scores} "
        text += _in_words(cells, influence) + (f", in {layer_list(layers)}" if layers else "")
        return Leak("finite-mask", text, cells, layers, factor)

    def cells_by_layer(self) -> dict[int, Tensor]:
        """Which query's output each key influences, bool (query, key), layer by layer."""
        columns = range(self.ids.size(1))
        return {i: probe.attention_influence(call, columns, 2, self.seed)[0] for i, call in self.calls().items()}


@dataclass
class _SeededCall(AttentionCall):
    """An attention call whose dropout is the same in every replay."""

    seed: int = 0

    def replay(self, hidden: Tensor) -> Tensor:
        torch.manual_seed(self.seed)
        return super().replay(hidden)


def _is_replayable(call: AttentionCall, n: int) -> bool:
    """Whether states (1, n, dim) are its first argument, and no other: not query, key and value, one argument each."""
    first = call.args[0] if call.args else call.kwargs.get("hidden_states")
    alike = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor) and x.shape == first.shape]
    return isinstance(first, Tensor) and first.ndim == 3 and first.shape[:2] == (1, n) and len(alike) == 1


def _that_see_ahead(layer_cells: dict[int, Tensor]) -> tuple[int, ...]:
    return tuple(i for i, seen in layer_cells.items() if bool(seen.triu(1).any()))


def _future_cells(influence: Tensor) -> Cells:
    """Cells above the diagonal in which anything changed, the strongest first."""
    cells = influence.triu(1)
    order = cells.flatten().argsort(descending=True, stable=True)[: int((cells > 0).sum())].tolist()
    return tuple(divmod(index, len(cells)) for index in order)


def _in_words(cells: Cells, influence: Tensor) -> str:
    n, (i, j) = len(influence), cells[0]
    ahead = sorted({later - earlier for earlier, later in cells})
    reach = f"{ahead[0]} token(s)" if len(ahead) == 1 else f"{ahead[0]} to {ahead[-1]} tokens"
    positions = sorted({position for position, _ in cells})
    who = f"position {positions[0]} sees" if len(positions) == 1 else f"{len(positions)} of {n} positions see"
    share = len(cells) / (n * (n - 1) / 2)
    return (
        f"{who} {reach} ahead ({share:.0%} of what a causal mask hides; the most: position {i} changes by "
        f"{float(influence[i, j]):.2g} of its size when token {j} does)"
    )


# -- a mask that is a number -------------------------------------------------------------------------------------------


def _under_stress(subject: _Subject) -> list[Leak]:
    """Raise every attention score by growing factors: a mask that is merely a large number gives way at one of them."""
    if dead := [i for i in range(len(subject.attentions)) if i not in subject.levers]:
        cause = "no `scaling`, and the size of the input does not set theirs"
        subject.notes.append(f"{layer_list(dead)}: scores cannot be raised ({cause}); a finite mask would go unseen")
    n, levers = subject.ids.size(1), {subject.attentions[i]: lever for i, lever in subject.levers.items()}
    with (
        running.in_float32(subject.model, torch.float16),
        running.without_mlps(subject.decoder) if subject.decoder else nullcontext(),
    ):
        for factor in STRESS if levers else ():
            with _scores_times(factor, levers):
                try:
                    if _future_cells(subject.influence(sorted({1, n // 2, n - 1}))):
                        return [subject.finite_mask(subject.influence(), factor)]
                except AuditError:
                    note = f"with attention scores {factor:,.0f} times as large the outputs are no numbers"
                    subject.notes.append(note + ": a finite mask was looked for up to there only")
                    break
    return []


@torch.no_grad()
def _lever(call: AttentionCall) -> str | None:
    """By what this module's scores can be raised: its "scaling", the size of its "input", or None."""
    hidden = torch.randn(call.hidden.shape, generator=torch.Generator().manual_seed(0)).to(call.hidden)

    def without_biases() -> Tensor:
        return (call.replay(hidden) - call.replay(torch.zeros_like(hidden)))[0].float()  # (seq, dim)

    plain = without_biases()
    for lever in ("scaling", "input") if isinstance(getattr(call.module, "scaling", None), float) else ("input",):
        with _scores_times(STRESS[-1], {call.module: lever}):
            raised = without_biases()
        size = raised.norm(dim=-1)  # that of one value where a query sees one key; of an average, it is smaller
        one_key_each = lever == "scaling" or not bool(size[len(size) // 2 :].mean() < 0.6 * size[0])
        if one_key_each and not bool((torch.cosine_similarity(plain, raised, dim=-1) > 0.999).all()):
            return lever
    return None


@contextmanager
def _scores_times(factor: float, levers: dict[nn.Module, str]) -> Iterator[None]:
    """The attention scores of these modules times `factor`, by the lever of each."""
    with ExitStack() as stack:
        for module, lever in levers.items():
            if lever == "scaling":
                stack.callback(setattr, module, "scaling", module.scaling)
                module.scaling *= factor
            else:
                enlarge = _Enlarge(factor**0.5)
                stack.callback(module.register_forward_pre_hook(enlarge.before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(enlarge.after).remove)
        yield


@dataclass(frozen=True)
class _Enlarge:
    """Hooks that multiply the hidden states, so that query and key grow, and divide what comes of the grown values."""

    factor: float

    def before(self, module: nn.Module, args: tuple, kwargs: dict):
        if args:
            return (args[0] * self.factor, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * self.factor}

    def after(self, module: nn.Module, args: tuple, output):
        return (output[0] / self.factor, *output[1:]) if isinstance(output, tuple) else output / self.factor


@torch.no_grad()
def _worth_of_mask(call: AttentionCall, lever: str) -> float:
    """What this layer's mask adds to the score of the next token's key: 0 = nothing, -inf = it hides it altogether.

    With all scores as good as 0, a key's weight is exp(what the mask adds), and shows in how far the output moves when
    the last position changes: that of the position before it, relative to its own.
    """
    rng = torch.Generator().manual_seed(1)
    hidden = torch.randn(call.hidden.shape, generator=rng).to(call.hidden)
    changed = hidden.clone()
    changed[:, -1] += CHANGE * torch.randn(hidden.size(2), generator=rng).to(hidden)
    with _scores_times(CALM, {call.module: lever}):
        moved = (call.replay(changed) - call.replay(hidden))[0].float().norm(dim=-1)  # (seq,)
    return float((moved[-2] / moved[-1]).log())


# -- labels, and leaving no trace --------------------------------------------------------------------------------------


@torch.no_grad()
def _misplaced_labels(subject: _Subject) -> list[Leak]:
    """Which logits does the model's own loss hold against the label at j? It should be those of position j - 1.

    Two labels are tried at j; the difference of the losses is that of two logits, whatever else enters the loss.
    """
    model, ids, j = subject.model, subject.ids.to(subject.runner.device), subject.ids.size(1) // 2
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or "labels" not in subject.runner.parameters:
        return []

    def answer(label: int):
        labels = torch.full_like(ids, -100)
        labels[0, j] = label
        torch.manual_seed(subject.seed)
        with transformers_errors_only():  # a GPT-2 made in code names no loss of its own, and it says so
            return model(input_ids=ids, labels=labels)

    out = answer(int(ids[0, j]))
    if not isinstance(getattr(out, "loss", None), Tensor) or out.loss.ndim or out.logits.shape[:2] != ids.shape:
        return []
    logits = out.logits[0].float()
    contrast = logits[j - 1] - logits[j]  # the two labels that tell these positions apart best
    one, other = int(contrast.argmax()), int(contrast.argmin())
    found = float(answer(other).loss) - float(answer(one).loss)
    errors = (logits[:, one] - logits[:, other] - found).abs()  # (positions,)
    at, tolerance = int(errors.argmin()), 1e-3 * (1 + abs(found))
    if at == j - 1 or errors[j - 1] <= tolerance:
        return []
    if errors[at] > tolerance:
        subject.notes.append("the model's own loss is no cross entropy of its logits: its labels were not checked")
        return []
    kind = "labels-misplaced" if at < j else "labels-not-shifted"
    which = f"{j - at} place(s) after it" if at < j else f"{at - j} place(s) before it" if at > j else "it was given"
    text = f"the model's loss compares the logits at a position with the token {which}, not with the next one"
    return [Leak(kind, text + (" (labels not shifted)" if at == j else ""), ((at, j),))]


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards modes, buffers (the running averages of train mode) and the random state are what they were."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, content in kept:
            module._buffers[name] = buffer.copy_(content)
