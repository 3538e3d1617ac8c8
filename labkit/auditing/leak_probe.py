"""The runs behind `find_leaks`: one model and one text, and which outputs change when later tokens do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labkit.auditing import probe
from labkit.auditing.measure import composed
from labkit.auditing.probe import AttentionCall
from labkit.auditing.report import Cells, Leak, layer_list
from labkit.decoder.anatomy import decoder_or_none
from labkit.decoder.limits import position_limit
from labkit.decoder.running import Runner, configs_of, in_precision, replaced
from labkit.errors import AuditError

PADS = 3
ROUNDING = 1000  # up to how many units of the dtype's precision a difference is confirmed in float64
STRESS = (10.0, 1e2, 1e3, 1e4, 1e5, 1e6)  # factors on attention scores that a finite mask value must withstand
CALM, CHANGE = 1e-20, 1e9  # scores as good as 0, and a change that shows through a mask of down to about -30
A_MASK = -0.7  # a future key that counts for less than half of one's own (ln 1/2) is masked, if by a finite number


@dataclass(frozen=True)
class Condition:
    """One way of calling the model: in which mode, with which options, and with which mask.

    The mask has "ones" only, pads on the "right" or "left", or is left out although the text ends in "pad tokens".
    """

    kind: str = "future-token"
    words: str = ""
    mask: str | None = None
    options: dict = field(default_factory=dict)
    train: bool = False

    def leak(self, text: str, cells: Cells, layers: tuple[int, ...] = ()) -> Leak:
        where = f", in {layer_list(layers)}" if layers else ""
        return Leak(self.kind, (f"{self.words}: " if self.words else "") + text + where, cells, layers)


class LeakProbe:
    """The model under test, one text, and what can be measured with them. Every run begins from the same seed.

    Attributes:
        condition: how the model is called at present.
        batch: how many texts are run at once.
        levers: how the scores of each layer can be raised. finite: what the mask of a layer adds to a score, if that
            is a number.
        tries, longest, notes: what the report states about the measurement.
    """

    def __init__(self, model: nn.Module, tokens: int, vocab_size: int | None, seed: int):
        self.model, self.seed, self.notes = model, seed, []
        self.decoder = decoder_or_none(model)
        self.runner = Runner(model, self.decoder, vocab_size)
        self.context = next(filter(None, map(position_limit, configs_of(model))), None)
        length = min(tokens, self.context or tokens)
        if length < 2 or self.runner.vocab_size < 2:
            raise AuditError(
                f"the text has {length} token(s) of a vocabulary of {self.runner.vocab_size}: a leak shows when one of "
                "several tokens is exchanged for another, so give 2 tokens or more of a vocabulary of 2 or more"
            )
        self.ids = self.runner.tokens(1, length, seed)
        pads = (module.padding_idx for module in model.modules() if isinstance(module, nn.Embedding))
        self.pad = next((pad for pad in pads if pad is not None), 0)
        self.attentions = self.runner.attentions
        weight = next((w for w in model.parameters() if w.is_floating_point()), torch.zeros(()))
        self.rounding = ROUNDING * torch.finfo(weight.dtype).eps
        self.condition, self.batch, self.tries, self.longest = Condition(), 16, 0, length
        self.replayable: set[int] | None = None  # attention modules that can be replayed by themselves
        self.levers: dict[int, str] = {}
        self.finite: dict[int, float] = {}

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def real(self, rows: int, n: int, turn: int = 0) -> Tensor:
        """(rows, n): where the present condition has tokens. Every second row is padded, from the first on.

        The number of pads on the right changes with `turn`: how many tokens follow is also part of the future.
        """
        real, pads = torch.ones(rows, n, dtype=torch.bool), min(PADS, n // 4)
        for row in range(0, rows, 2):
            if self.condition.mask in ("right", "pad tokens") and pads:
                real[row, n - 1 - (row + turn) % pads :] = False
            elif self.condition.mask == "left":
                real[row, :pads] = False
        return real

    def run(self, ids: Tensor, real: Tensor | None = None, **more) -> Tensor:
        """Output per position, (batch, seq, dim)."""
        torch.manual_seed(self.seed)
        if self.condition.mask == "pad tokens":
            ids = ids.masked_fill(~real, self.pad)
        real = real if self.condition.mask in ("ones", "right", "left") else None
        out = self.runner.run(ids, real, **self.condition.options, **more)
        return out if out.dtype == torch.float64 else out.float()

    def require_finite(self, outputs: Tensor) -> None:
        if not bool(outputs.isfinite().all()):
            raise AuditError(f"{type(self.model).__name__} gave NaN or infinite outputs, in which no change shows")

    def influence(self, columns: Sequence[int] | None = None) -> Tensor:
        """(positions, positions) relative change of the output at i when token j does; 0 in columns not asked for."""
        n = self.ids.size(1)
        columns, real = list(range(n) if columns is None else columns), self.real(1, n)
        run = functools.partial(self.run, real=real)

        def measure() -> Tensor:
            self.require_finite(run(self.ids)[real])
            changes = torch.zeros(n, n)
            changes[:, columns] = probe.token_influence(run, self.ids, columns, self.runner.vocab_size)[0].float()
            return changes.masked_fill(~real[0][:, None], 0.0)

        changes = measure()
        return changes.tril() + self.confirmed(changes.triu(1), measure)

    @torch.no_grad()
    def tails(self, n: int, cuts: Sequence[int]) -> Tensor:
        """(tries, n): how much each position before cuts[t] changes when all tokens from there on do, in try t."""
        rng = torch.Generator().manual_seed(self.seed)
        low = min(8, max(0, self.runner.vocab_size - 2 * n))  # the lowest ids are left out, being special
        span, changes = min(self.runner.vocab_size - low, 50_000), []
        for turn, cut in enumerate(torch.tensor(cuts)[:, None].split(self.batch)):  # (rows, 1)
            ids, moved = (torch.randint(least, span, (len(cut), n), generator=rng) for least in (0, 1))
            changed = torch.where(torch.arange(n) < cut, ids, (ids + moved) % span)
            real, still_real = (self.real(len(cut), n, turn + more) for more in (0, 1))
            before, after = self.run(ids + low, real), self.run(changed + low, still_real)
            earlier = (torch.arange(n) < cut) & real & still_real
            self.require_finite(before[earlier])
            gap = probe.relative_change(after, before).cpu().masked_fill(~earlier, 0.0)
            if bool(gap.any()):
                noise = probe.relative_change(self.run(changed + low, still_real), after).cpu()
                gap = gap.masked_fill(gap <= probe.NOISE_FACTOR * noise, 0.0)
            changes.append(gap)
        return torch.cat(changes)

    def confirmed(self, changes: Tensor, measure: Callable[[], Tensor], limit: float | None = None) -> Tensor:
        """`changes`, but if none exceeds `limit` (what rounding can do), only those that float64 shows, too."""
        if not bool(changes.any()) or float(changes.max()) > (limit or min(0.3, self.rounding)):
            return changes
        try:
            with in_precision(torch.float64, self.model):
                return torch.where(measure() > 0.1 * changes, changes, 0.0)
        except AuditError as error:
            self.note(f"differences as small as rounding were not confirmed in float64: {error}")
            return changes

    # -- from changed outputs to leaks ---------------------------------------------------------------------------------

    def leaks_in_tails(self, n: int, cuts: Sequence[int]) -> list[Leak]:
        """Positions before the cut that change with the tokens after it, in texts of n tokens."""
        measure = functools.partial(self.tails, n, cuts)
        changes = self.confirmed(measure(), measure)
        self.tries, self.longest = self.tries + len(cuts), max(self.longest, n)
        hits = int(changes.any(-1).sum())
        if not hits:
            return []
        t, i = divmod(int(changes.argmax()), n)
        cells = dict.fromkeys((position, cuts[at]) for at, position in changes.nonzero().tolist())
        columns = sorted({cuts[t], (cuts[t] + n) // 2, n - 1})
        layers = _open_layers(self.cells_by_layer(self.runner.tokens(1, n, self.seed), columns), columns)
        text = (
            f"{hits} of {len(cuts)} random changes of the end of a text of {n} tokens change an earlier position "
            f"(position {i} by {float(changes[t, i]):.2g} of its size)"
        )
        return [self.condition.leak(text, tuple(cells), layers)]

    def leaks_in(self, influence: Tensor) -> list[Leak]:
        """The future cells of `influence`: one leak for those that attention layers explain, one for the others."""
        if not (cells := _future_cells(influence)):
            return []
        columns = range(len(influence))
        layer_cells, leaks = self.cells_by_layer(self.ids, columns), []
        layers = _open_layers(layer_cells, columns)
        if layers and self.finite.keys() >= set(layers) and self.condition == Condition():
            return [self.finite_mask(influence, 1.0)]
        reach = composed(list(layer_cells.values()), len(influence))
        if through := tuple(cell for cell in cells if bool(reach[cell])):
            leaks.append(self.condition.leak(_in_words(through, influence), through, layers))
        if past_attention := tuple(cell for cell in cells if not bool(reach[cell])):
            text = _in_words(past_attention, influence)
            foreign = any(isinstance(module, nn.MultiheadAttention) for module in self.model.modules())
            if layer_cells and len(layer_cells) == len(self.attentions) and not foreign and not self.finite:
                text += f", not in the attention: no mask of its {len(layer_cells)} layers allows it"
            leaks.append(self.condition.leak(text, past_attention))
        return leaks

    def finite_mask(self, influence: Tensor, factor: float) -> Leak:
        """The leak of a mask that failed with scores `factor` times as large."""
        cells, columns = _future_cells(influence), range(len(influence))
        layers = tuple(sorted({*self.finite, *_open_layers(self.cells_by_layer(self.ids, columns), columns)}))
        number = f" (about {max(self.finite.values()):.0f})" if self.finite else ""
        text = f"the mask is only a finite number{number}: with attention scores {factor:,.0f} times as large, "
        where = f", in {layer_list(layers)}" if layers else ""
        return Leak("finite-mask", text + _in_words(cells, influence) + where, cells, layers, factor)

    # -- attention, layer by layer -------------------------------------------------------------------------------------

    def calls(self, ids: Tensor) -> dict[int, AttentionCall]:
        """The first call of each attention module that can be replayed with other hidden states, by layer."""
        with probe.recorded_calls(self.attentions) as recorded:
            self.run(ids, self.real(1, ids.size(1)))
        calls = {call.index: call for call in reversed(recorded)}
        if self.replayable is None:  # measured once, in eval mode: a replay has the dropout of another seed
            self.replayable = {index for index, call in calls.items() if call.can_be_replayed(*ids.shape)}
        return {index: calls[index] for index in sorted(calls.keys() & self.replayable)}

    def cells_by_layer(self, ids: Tensor, columns: Sequence[int]) -> dict[int, Tensor]:
        """Which query's output each key in `columns` influences, bool (query, column), layer by layer."""
        real = self.real(1, ids.size(1))[0][:, None]  # an output at a pad is of no consequence
        cells = {}

        def same_dropout(*_) -> None:
            torch.manual_seed(self.seed)

        for i, call in self.calls(ids).items():
            handle = call.module.register_forward_pre_hook(same_dropout)
            cells[i] = probe.attention_influence(call, columns)[0] & real
            handle.remove()
        return cells

    def measure_masks(self) -> None:
        """Fill `levers` and `finite`."""
        with in_precision(torch.float32, self.model, [torch.float16]):
            for i, call in self.calls(self.ids).items():
                if lever := _lever(call):
                    self.levers[i] = lever
                    if -torch.inf < (addend := _mask_addend(call, lever)) < A_MASK:
                        self.finite[i] = addend


def _open_layers(layer_cells: dict[int, Tensor], columns: Sequence[int]) -> tuple[int, ...]:
    """The layers in which a query depends on a later key."""
    return tuple(i for i, cells in layer_cells.items() if bool((cells & probe.later(len(cells), columns)).any()))


def _future_cells(influence: Tensor) -> Cells:
    """Cells above the diagonal in which anything changed, the strongest first."""
    cells = influence.triu(1)
    order = cells.flatten().argsort(descending=True, stable=True)[: int((cells > 0).sum())].tolist()
    return tuple(divmod(index, len(cells)) for index in order)


def _in_words(cells: Cells, influence: Tensor) -> str:
    n, (i, j), distances = len(influence), cells[0], [later - earlier for earlier, later in cells]
    share = len(cells) / (n * (n - 1) / 2)
    return (
        f"{len({position for position, _ in cells})} of {n} positions depend on tokens {min(distances)} to "
        f"{max(distances)} places later ({share:.0%} of the pairs that a causal mask hides; the largest effect: "
        f"position {i} changes by {float(influence[i, j]):.2g} of its size when token {j} changes)"
    )


# -- a mask that is a number -------------------------------------------------------------------------------------------


@torch.no_grad()
def _lever(call: AttentionCall) -> str | None:
    """What multiplies this module's scores: its "scaling", the size of its "input", or None."""
    hidden = torch.randn(call.hidden.shape, generator=torch.Generator().manual_seed(0)).to(call.hidden)

    def without_biases() -> Tensor:
        return (call.replay(hidden) - call.replay(torch.zeros_like(hidden)))[0].float()  # (seq, dim)

    plain = without_biases()
    for lever in ("scaling", "input") if isinstance(getattr(call.module, "scaling", None), float) else ("input",):
        with scores_times(STRESS[-1], {call.module: lever}):
            raised = without_biases()
        size = raised.norm(dim=-1)  # that of one value where a query attends to one key; of an average, it is smaller
        one_key_each = lever == "scaling" or not bool(size[len(size) // 2 :].mean() < 0.6 * size[0])
        if one_key_each and not bool((torch.cosine_similarity(plain, raised, dim=-1) > 0.999).all()):
            return lever
    return None


@torch.no_grad()
def _mask_addend(call: AttentionCall, lever: str) -> float:
    """What this layer's mask adds to the score of the next token's key: 0 = nothing, -inf = it hides it altogether.

    With all scores as good as 0, a key's weight is exp(what the mask adds). It shows in how far the output moves when
    the last position changes: that of the position before it, relative to its own.
    """
    rng = torch.Generator().manual_seed(1)
    hidden = torch.randn(call.hidden.shape, generator=rng).to(call.hidden)
    changed = hidden.clone()
    changed[:, -1] += CHANGE * torch.randn(hidden.size(2), generator=rng).to(hidden)
    with scores_times(CALM, {call.module: lever}):
        moved = (call.replay(changed) - call.replay(hidden))[0].float().norm(dim=-1)  # (seq,)
    return float((moved[-2] / moved[-1]).log())


@contextmanager
def scores_times(factor: float, levers: dict[nn.Module, str]) -> Iterator[None]:
    """The attention scores of these modules times `factor`, by the lever of each.

    The lever "input" multiplies the hidden states by sqrt(factor), so that query and key grow, and divides the output,
    because the values have grown, too.
    """
    grown = factor**0.5

    def enlarge(module: nn.Module, args: tuple, kwargs: dict):
        hidden = AttentionCall(module, args, kwargs, 0).given
        larger = hidden * grown
        args = tuple(larger if value is hidden else value for value in args)
        return args, {name: larger if value is hidden else value for name, value in kwargs.items()}

    def shrink(module: nn.Module, args: tuple, output):
        return (output[0] / grown, *output[1:]) if isinstance(output, tuple) else output / grown

    with ExitStack() as stack:
        for module, lever in levers.items():
            if lever == "scaling":
                stack.enter_context(replaced(module, scaling=module.scaling * factor))
            else:
                stack.callback(module.register_forward_pre_hook(enlarge, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(shrink).remove)
        yield
