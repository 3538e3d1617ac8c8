"""Does a causal language model use tokens that it has to predict? `find_leaks` measures it, without training.

    print(find_leaks(model))          # which position depends on which later token, how strongly, in which layer
    print(leak_meter(factory, ids))   # what a leak does to training: labkit.leak_meter

The output of a decoder at position i must not change, not by one bit, when a later token changes. `find_leaks` changes
tokens and compares, in these ways:

- each token of a short text, one by one;
- all tokens from a random position on, `TRIES` times. A leak that shows in 3 % of such changes, as a router's can, is
  missed with probability 0.97^192 = 0.3 %;
- the ends of texts of growing length, up to the model's context or until `BUDGET` is spent: leaks between blocks of 32
  to 512 tokens, and code that only long texts reach. Long texts are changed from four positions on, which reveal blocks
  whose size is a power of two; for others set `tokens` to twice their size. The report states the longest text;
- a batch, of which some rows are exchanged: the other rows must not change;
- with an attention mask of ones, with right and with left padding, with pad tokens and no mask, with options that add
  outputs, in train mode;
- with a key-value cache, in chunks and token by token: the outputs must be those of one pass;
- with attention scores multiplied by up to a million, which a mask that is a finite number does not withstand;
- with labels: the model's own loss must compare position i with token i + 1, and no output may depend on a label.

A difference that is as small as rounding counts only if it is also there in float64. Experts that gather their tokens
round differently when other tokens join them, and this is not a leak.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from labkit.auditing import probe
from labkit.auditing.measure import composed, layer_list
from labkit.auditing.probe import AttentionCall
from labkit.decoder import limits, running
from labkit.decoder.anatomy import attention_modules, decoder_or_none
from labkit.decoder.running import BODY_MEASURED, Runner
from labkit.errors import AuditError, LeakageError
from labkit.leak_meter import LeakMeter, context_of, leak_meter
from labkit.progress import transformers_errors_only

__all__ = ["Leak", "LeakMeter", "LeakReport", "find_leaks", "leak_meter"]

TOKENS = 16
TRIES, BATCH = 192, 16  # random changes of several tokens, and how many texts run in one pass
# Every second length is not a multiple of a power of two, because a last block that is not full may have its own code.
LENGTHS = (39, 64, 135, 256, 519, 1024)
BUDGET = {"cpu": 2e11, "cuda": 2e13}  # tokens times weights (embeddings not counted) that longer texts may cost
PADS = 3
OPTION = re.compile(r"(output|return|need)_\w+|use_cache")
ROUNDING = 1000  # up to how many units of the dtype's precision a difference is confirmed in float64
REPEATED, CACHED = 0.01, 1e-3  # relative differences that two runs, or a cache and one pass, may show by rounding
STRESS = (10.0, 1e2, 1e3, 1e4, 1e5, 1e6)  # factors on attention scores that a finite mask value must withstand
CALM, CHANGE = 1e-20, 1e9  # scores as good as 0, and a change that shows through a mask of down to about -30
A_MASK = -0.7  # a future key that counts for less than half of one's own (ln 1/2) is masked, if by a finite number

Cells = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Leak:
    """One way in which an output depends on what it must not depend on.

    Attributes:
        kind: one of
            "future-token": on later tokens, in evaluation mode and without a mask;
            "finite-mask": the same, because the mask is only a finite number;
            "attention-mask": only if an attention mask is given, of ones or with padding, or if there are pad tokens;
            "option": only with an option such as `output_attentions=True`;
            "train-mode": only in train mode;
            "cache": outputs computed with a cache differ from those of one pass;
            "batch": on other rows of the batch;
            "not-repeatable": on earlier calls, or on chance: the same tokens gave another output;
            "no-influence": no token influences any other, not even a later one, so that nothing could leak and nothing
            was tested;
            "labels-not-shifted": a position has to predict a token that it was given;
            "labels-misplaced": it has to predict a token after the next one;
            "labels-in-output": an output depends on the label of the same or a later position.
        text: what was measured, in words.
        cells: (position, later position that it depends on), most affected first. If the leak shows only when several
            tokens change, the later position is the first of them.
        layers: attention layers in which it happens; empty if it is not in the attention, or could not be located.
        factor: for a finite mask, how many times as large the attention scores were when it failed; 1 = as they are.
    """

    kind: str
    text: str
    cells: Cells = ()
    layers: tuple[int, ...] = ()
    factor: float | None = None


@dataclass(frozen=True)
class LeakReport:
    """The result of `find_leaks`. `report.clean` is True if nothing leaks.

    Attributes:
        influence: (positions, positions): how much the output at i changes when token j does, relative to its size.
        tries: how many times several tokens were changed at once, at random.
        longest: length of the longest text that was run.
        notes: what was not tried, and why.
    """

    model: str
    leaks: list[Leak]
    influence: Tensor
    tries: int
    longest: int
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.leaks

    def __str__(self) -> str:
        verdict = "no leak" if self.clean else "LEAKS"
        tried = f"{len(self.influence)} tokens changed one by one, {self.tries} random changes of several tokens"
        lines = [f"{self.model}: {verdict} ({tried}, texts of up to {self.longest} tokens)"]
        lines += [f"leak: {leak.text}" for leak in self.leaks]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def to_json(self) -> str:
        influence = self.influence.nan_to_num().tolist()  # JSON has no infinity
        return json.dumps({"clean": self.clean} | asdict(self) | {"influence": influence}, indent=1)


def find_leaks(model: nn.Module, *, tokens: int = TOKENS, vocab_size: int | None = None, seed: int = 0) -> LeakReport:
    """Measure whether an output of `model` depends on later tokens, in all the ways listed at the top of this module.

    Args:
        model: maps `input_ids` (batch, seq) to logits or states (batch, seq, ...); a transformers model, a
            `labkit.gpt.GPT`, or your own. It is left as it was.
        tokens: length of the text whose tokens are changed one by one; at most the model's context is used.
        vocab_size: number of token ids, if the model has no `nn.Embedding` to tell it.
        seed: of the texts, and of the dropout in train mode, which is the same in every run.

    Raises:
        LeakageError: fewer than two tokens, or a vocabulary of one: there is nothing to change.
        AuditError: the model cannot be called on token ids, gives no output per position, or no numbers.
    """
    subject = _Subject(model, tokens, vocab_size, seed)
    with _left_as_it_was(model, subject.runner.device), transformers_errors_only():
        model.eval()
        leaks = _from_earlier_calls(subject)
        influence = subject.influence()
        leaks = leaks or _all_others(subject, influence)  # what else leaks cannot be measured if runs differ by chance
    if subject.unconfirmed:
        subject.notes.append(subject.unconfirmed)
    if subject.not_tried:
        subject.notes.append(f"not tried, because the model does not take it: {', '.join(subject.not_tried)}")
    if subject.runner.pooled:
        subject.notes.append(BODY_MEASURED)
    if not subject.attentions:
        subject.notes.append("no attention modules were found: layers were not told apart, and scores not raised")
    return LeakReport(type(model).__name__, leaks, influence, subject.tries, subject.longest, subject.notes)


def _all_others(subject: _Subject, influence: Tensor) -> list[Leak]:
    subject.measure_masks()
    leaks = _between_rows(subject)
    if not bool(influence.tril(-1).any()):
        text = "no token influences any other, not even a later one: nothing was tested (are some weights 0?)"
        leaks.append(Leak("no-influence", text))
    if future := subject.leaks_in(influence):
        leaks += future + _in_other_ways(subject, influence)
    elif rare := _in_rare_cases(subject) or _in_long_texts(subject):
        finite = all(leak.layers and subject.finite.keys() >= set(leak.layers) for leak in rare)
        leaks += (_under_stress(subject) if finite else []) or rare
        subject.notes.append("other ways of calling the model were not tried, because this leak may show there, too")
    else:
        leaks += _under_stress(subject) + _with_cache(subject) + _in_other_ways(subject, influence)
    return leaks + _misplaced_labels(subject)


@dataclass(frozen=True)
class _Way:
    """One way of calling the model: in which mode, with which options, and with which mask.

    The mask has "ones" only, pads on the "right" or "left", or is left out although the text ends in "pad tokens".
    """

    kind: str = "future-token"
    words: str = ""
    mask: str | None = None
    options: dict = field(default_factory=dict)
    train: bool = False

    @property
    def prefix(self) -> str:
        return f"{self.words}: " if self.words else ""


class _Subject:
    """The model under test, one text, and what can be measured with them. Every run begins from the same seed."""

    def __init__(self, model: nn.Module, tokens: int, vocab_size: int | None, seed: int):
        self.model, self.seed, self.notes, self.not_tried = model, seed, [], []
        self.decoder = decoder_or_none(model)
        self.runner = Runner(model, self.decoder, vocab_size)
        self.context = context_of(model)
        length = min(tokens, self.context or tokens)
        if length < 2 or self.runner.vocab_size < 2:
            given = f"{length} token(s) of a vocabulary of {self.runner.vocab_size}"
            raise LeakageError(f"a leak shows when one of several tokens is exchanged for another; {given} will not do")
        self.ids = self.runner.tokens(1, length, seed)
        pad = getattr(self.decoder.config if self.decoder else None, "pad_token_id", None)
        tables = [m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]
        self.pad = next((i for i in (pad, *tables) if i is not None and 0 <= i < self.runner.vocab_size), 0)
        self.attentions = list(self.decoder.attentions) if self.decoder else attention_modules(model)
        weight = next((w for w in model.parameters() if w.is_floating_point()), torch.zeros(()))
        self.eps = torch.finfo(weight.dtype).eps
        self.way, self.batch, self.tries, self.longest, self.unconfirmed = _Way(), BATCH, 0, length, None
        self.replayable: set[int] | None = None  # attention modules that can be replayed by themselves
        self.levers: dict[int, str] = {}  # by what each layer's scores can be raised
        self.finite: dict[int, float] = {}  # what the mask adds to a score, where that is a number

    def real(self, rows: int, n: int, turn: int = 0) -> Tensor:
        """(rows, n): where the present way of calling has tokens. Every second row is padded, from the first on.

        The number of pads on the right changes with `turn`: how many tokens follow is also part of the future.
        """
        real, pads = torch.ones(rows, n, dtype=torch.bool), min(PADS, n // 4)
        for row in range(0, rows, 2):
            if self.way.mask in ("right", "pad tokens") and pads:
                real[row, n - 1 - (row + turn) % pads :] = False
            elif self.way.mask == "left":
                real[row, :pads] = False
        return real

    def run(self, ids: Tensor, real: Tensor | None = None, **more) -> Tensor:
        """Output per position, (batch, seq, dim)."""
        torch.manual_seed(self.seed)
        if self.way.mask == "pad tokens":
            ids = ids.masked_fill(~real, self.pad)
        real = real if self.way.mask in ("ones", "right", "left") else None
        out = self.runner.run(ids, real, **self.way.options, **more)
        return out if out.dtype == torch.float64 else out.float()

    def influence(self, columns: Sequence[int] | None = None) -> Tensor:
        """(positions, positions) relative change of the output at i when token j does; 0 in columns not asked for."""
        columns = range(self.ids.size(1)) if columns is None else columns
        changes = self._influence(columns)
        return changes.tril() + self.confirmed(changes.triu(1), lambda: self._influence(columns))

    @torch.no_grad()
    def _influence(self, columns: Sequence[int]) -> Tensor:
        n, vocabulary = self.ids.size(1), self.runner.vocab_size
        real = self.real(1, n)
        base = self.run(self.ids, real)[0]
        if not bool(base[real[0]].isfinite().all()):
            raise AuditError(f"{type(self.model).__name__} gave NaN or infinite outputs, whose causes cannot be told")
        noise = (self.run(self.ids, real)[0] - base).abs().amax(-1)  # 0 with deterministic kernels
        changes = torch.zeros(n, n)
        for j in columns:
            for step in (7, 12):  # two other tokens that have no period in common; never the token itself
                changed = self.ids.clone()
                changed[:, j] = (changed[:, j] + 1 + (step - 1) % (vocabulary - 1)) % vocabulary
                gap = _relative(self.run(changed, real)[0], base, noise).masked_fill(~real[0], 0.0)
                changes[:, j] = changes[:, j].maximum(gap)
        return changes

    @torch.no_grad()
    def tails(self, n: int, cuts: Sequence[int]) -> Tensor:
        """(tries, n): how much each position before cuts[t] changes when all tokens from there on do, in try t.

        One pass makes `self.batch` tries. Its texts are those of the pass before, changed from the cut on.
        """
        rng = torch.Generator().manual_seed(self.seed)
        low = min(8, max(0, self.runner.vocab_size - 2 * n))  # the lowest ids are left out, being special
        span = min(self.runner.vocab_size - low, 50_000)
        rows = min(self.batch, max(1, len(cuts) // 2))
        ids = torch.randint(span, (rows, n), generator=rng)
        real = self.real(rows, n)
        before = self.run(ids + low, real)
        changes = []
        for turn, start in enumerate(range(0, len(cuts), rows), 1):
            cut = torch.full((rows, 1), n)  # in the last pass some rows may stay as they are
            cut[: len(cuts) - start, 0] = torch.tensor(cuts[start : start + rows])
            moved = torch.randint(1, span, (rows, n), generator=rng)
            ids = torch.where(torch.arange(n) < cut, ids, (ids + moved) % span)
            still_real = self.real(rows, n, turn)
            after = self.run(ids + low, still_real)
            earlier = (torch.arange(n) < cut) & real & still_real
            if not bool(before[earlier].isfinite().all()):
                raise AuditError("outputs are NaN or infinite")
            gap = _relative(after, before).masked_fill(~earlier, 0.0)
            if bool(gap.any()):
                noise = (self.run(ids + low, still_real) - after).abs().amax(-1)
                gap = _relative(after, before, noise).masked_fill(~earlier, 0.0)
            changes.append(gap[: len(cuts) - start])
            before, real = after, still_real
        return torch.cat(changes)

    def leaks_in_tails(self, n: int, cuts: Sequence[int]) -> list[Leak]:
        """Positions before the cut that change with the tokens after it, in texts of n tokens."""
        changes = self.confirmed(self.tails(n, cuts), lambda: self.tails(n, cuts))
        self.tries, self.longest = self.tries + len(cuts), max(self.longest, n)
        hits = changes.any(-1)
        if not bool(hits.any()):
            return []
        t, i = divmod(int(changes.argmax()), n)
        cells = {(position, cuts[at]): None for at, position in changes.nonzero().tolist()}
        columns = sorted({cuts[t], (cuts[t] + n) // 2, n - 1})
        layers = _that_depend_on_later(self.cells_by_layer(self.runner.tokens(1, n, self.seed), columns), columns)
        text = f"{int(hits.sum())} of {len(cuts)} random changes of the end of a text of {n} tokens change an earlier "
        text += (
            f"position (the largest effect: position {i} changes by {float(changes[t, i]):.2g} of its size when the "
        )
        text += f"tokens from {cuts[t]} on change)" + (f", in {layer_list(layers)}" if layers else "")
        return [Leak(self.way.kind, self.way.prefix + text, tuple(cells), layers)]

    def confirmed(self, changes: Tensor, measure: Callable[[], Tensor], limit: float | None = None) -> Tensor:
        """`changes`, but if none exceeds `limit` (what rounding can do), only those that float64 shows, too."""
        if not bool(changes.any()) or float(changes.max()) > (limit or min(0.3, ROUNDING * self.eps)):
            return changes
        try:
            if 8 * sum(w.numel() for w in self.model.parameters()) > limits.available_bytes(str(self.runner.device)):
                raise AuditError("the weights in float64 do not fit into memory")
            with _in_float64(self.model):
                return torch.where(measure() > 0.1 * changes, changes, 0.0)
        except AuditError as error:
            self.unconfirmed = f"differences as small as rounding were not confirmed in float64: {error}"
            return changes

    def calls(self, ids: Tensor) -> dict[int, AttentionCall]:
        """The calls of the attention modules that can be replayed with other hidden states, by layer."""
        with probe.recorded_calls(self.attentions) as calls:
            self.run(ids, self.real(1, ids.size(1)))
        if self.replayable is None:  # measured once, in eval mode: a replay has the dropout of another seed
            self.replayable = {call.index for call in calls if call.can_be_replayed(*ids.shape)}
        return {call.index: call for call in calls if call.index in self.replayable}

    def measure_masks(self) -> None:
        """Fill `levers` and `finite`."""
        with running.in_float32(self.model, torch.float16):
            for i, call in self.calls(self.ids).items():
                if lever := _lever(call):
                    self.levers[i] = lever
                    if -torch.inf < (worth := _worth_of_mask(call, lever)) < A_MASK:
                        self.finite[i] = worth

    def leaks_in(self, influence: Tensor) -> list[Leak]:
        """The future cells of `influence`: one leak for those that attention layers explain, one for the others."""
        if not (cells := _future_cells(influence)):
            return []
        columns = range(len(influence))
        layer_cells, leaks = self.cells_by_layer(self.ids, columns), []
        layers = _that_depend_on_later(layer_cells, columns)
        if layers and self.finite.keys() >= set(layers) and self.way == _Way():
            return [self.finite_mask(influence, 1.0)]
        reach = composed(list(layer_cells.values()), len(influence))
        if through := tuple(cell for cell in cells if bool(reach[cell])):
            text = f"{self.way.prefix}{_in_words(through, influence)}, in {layer_list(layers)}"
            leaks.append(Leak(self.way.kind, text, through, layers))
        if elsewhere := tuple(cell for cell in cells if not bool(reach[cell])):
            text = self.way.prefix + _in_words(elsewhere, influence)
            foreign = any(isinstance(module, nn.MultiheadAttention) for module in self.model.modules())
            if layer_cells and len(layer_cells) == len(self.attentions) and not foreign and not self.finite:
                text += f", not in the attention: no mask of its {len(layer_cells)} layers allows it"
            leaks.append(Leak(self.way.kind, text, elsewhere))
        return leaks

    def finite_mask(self, influence: Tensor, factor: float) -> Leak:
        """The leak of a mask that failed with scores `factor` times as large."""
        cells, columns = _future_cells(influence), range(len(influence))
        opened = _that_depend_on_later(self.cells_by_layer(self.ids, columns), columns)
        layers = tuple(sorted({*self.finite, *opened}))
        number = f" (about {max(self.finite.values()):.0f})" if self.finite else ""
        scores = "as they are" if factor == 1 else f"{factor:,.0f} times as large"
        text = f"the mask is only a finite number{number}: with attention scores {scores}, "
        text += _in_words(cells, influence) + (f", in {layer_list(layers)}" if layers else "")
        return Leak("finite-mask", text, cells, layers, factor)

    def cells_by_layer(self, ids: Tensor, columns: Sequence[int]) -> dict[int, Tensor]:
        """Which query's output each key in `columns` influences, bool (query, column), layer by layer."""
        real = self.real(1, ids.size(1))[0][:, None]  # an output at a pad is of no consequence
        cells = {}
        for i, call in self.calls(ids).items():
            handle = call.module.register_forward_pre_hook(self.same_dropout)
            cells[i] = probe.attention_influence(call, columns, 2, self.seed)[0] & real
            handle.remove()
        return cells

    def same_dropout(self, *_) -> None:
        torch.manual_seed(self.seed)


def _relative(after: Tensor, before: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """(..., positions) on the CPU: largest change of an output relative to its size; 0 if it does not exceed noise."""
    gap = (after - before).abs().amax(-1).nan_to_num(torch.inf)
    size = before.abs().amax(-1).clamp(min=1e-12)
    return torch.where(gap > probe.NOISE_FACTOR * noise, gap / size, 0.0).cpu().float()


def _that_depend_on_later(layer_cells: dict[int, Tensor], columns: Sequence[int]) -> tuple[int, ...]:
    later = torch.tensor(list(columns))
    return tuple(i for i, c in layer_cells.items() if bool((c & (torch.arange(len(c))[:, None] < later)).any()))


def _future_cells(influence: Tensor) -> Cells:
    """Cells above the diagonal in which anything changed, the strongest first."""
    cells = influence.triu(1)
    order = cells.flatten().argsort(descending=True, stable=True)[: int((cells > 0).sum())].tolist()
    return tuple(divmod(index, len(cells)) for index in order)


def _in_words(cells: Cells, influence: Tensor) -> str:
    n, (i, j) = len(influence), cells[0]
    ahead = sorted({later - earlier for earlier, later in cells})
    reach = f"{ahead[0]}" if len(ahead) == 1 else f"{ahead[0]} to {ahead[-1]}"
    positions = sorted({position for position, _ in cells})
    who = f"position {positions[0]} depends" if len(positions) == 1 else f"{len(positions)} of {n} positions depend"
    share = len(cells) / (n * (n - 1) / 2)
    return (
        f"{who} on tokens {reach} places later ({share:.0%} of the pairs that a causal mask hides; the largest effect: "
        f"position {i} changes by {float(influence[i, j]):.2g} of its size when token {j} changes)"
    )


# -- other texts, other ways of calling the model ----------------------------------------------------------------------


def _from_earlier_calls(subject: _Subject) -> list[Leak]:
    first, _, again = (subject.run(ids) for ids in (subject.ids, subject.ids.flip(1), subject.ids))
    if (change := float(_relative(again, first).max())) <= REPEATED:
        return []
    text = (
        f"the same tokens gave other outputs in a later call, by {change:.2g} of their size: the model keeps something "
    )
    return [Leak("not-repeatable", text + "from earlier calls, or draws random numbers; nothing else was measured")]


def _between_rows(subject: _Subject) -> list[Leak]:
    """Exchange every second row of a batch: do the others change? Then later runs have one row."""

    @torch.no_grad()
    def exchange_rows() -> Tensor:
        rng = torch.Generator().manual_seed(subject.seed)
        ids = subject.ids[0, torch.rand(8, subject.ids.size(1), generator=rng).argsort(1)]  # (8, n)
        before, changes = subject.run(ids), []
        for turn in range(4):
            exchanged = torch.arange(8) % 2 == turn % 2
            ids = torch.where(exchanged[:, None], ids.flip(0, 1).roll(turn, 1), ids)
            after = subject.run(ids)
            changes.append(_relative(after, before).masked_fill(exchanged[:, None], 0.0))
            before = after
        return torch.stack(changes)

    try:
        change = float(subject.confirmed(exchange_rows(), exchange_rows).max())
    except AuditError as error:
        subject.notes.append(f"only one text at a time was run: {error}")
        subject.batch = 1
        return []
    if change == 0:
        return []
    subject.batch = 1
    text = f"rows of a batch influence each other: a row changes by {change:.2g} of its size when others do"
    return [Leak("batch", text)]


def _in_rare_cases(subject: _Subject) -> list[Leak]:
    n, rng = subject.ids.size(1), torch.Generator().manual_seed(subject.seed)
    return subject.leaks_in_tails(n, (torch.randperm(TRIES, generator=rng) % (n - 1) + 1).tolist())


def _in_long_texts(subject: _Subject) -> list[Leak]:
    """The cuts lie in the last block, which may not be full, on a border between blocks, and inside full blocks."""
    model, device, spent = subject.model, subject.runner.device.type, 0
    if subject.context is None and device != "cpu":
        subject.notes.append("longer texts were not tried: the model's config states no context length")
        return []
    embeddings = {w for m in model.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    weights = sum(w.numel() for w in model.parameters() if w not in embeddings)
    longest = min(subject.context or LENGTHS[-1], LENGTHS[-1])
    for n in sorted(n for n in {*LENGTHS, longest} if subject.ids.size(1) < n <= longest):
        spent += 6 * n * weights  # four changes take three passes of two texts
        if spent > BUDGET.get(device, BUDGET["cuda"]):
            break
        border = 1 << (n - 1).bit_length() - 1  # of blocks whose size is any power of two
        cuts = (n - 1, border, border - 1, n // 3)
        if n <= 64 and n * n * weights < BUDGET["cpu"] / 20:  # cheap enough to try the borders of all blocks
            cuts = range(1, n)
        try:
            if leaks := subject.leaks_in_tails(n, cuts):
                return leaks
        except AuditError as error:
            subject.notes.append(f"longer texts were not tried: {error}")
            break
    return []


def _in_other_ways(subject: _Subject, influence: Tensor) -> list[Leak]:
    """Leaks that show only with an attention mask, with an option, or in train mode."""
    runner, leaks, n = subject.runner, [], subject.ids.size(1)
    masks = {None: "", "pad tokens": "with pad tokens and no attention mask"}
    if runner.takes("attention_mask"):
        masks |= {"ones": "with an attention mask of ones", "right": "with right padding of changing length"}
        masks |= {"left": "with left padding"}
    else:
        subject.not_tried.append("attention_mask")
    parameters = inspect.signature(subject.model.forward).parameters
    options = {name: p.default is not True for name, p in parameters.items() if OPTION.fullmatch(name)}
    if runner.takes_anything and subject.decoder:
        options |= {"output_attentions": True, "use_cache": True}
    if not options:
        subject.not_tried.append("output_attentions")
    ways = [_Way("attention-mask", words, mask) for mask, words in masks.items() if mask]
    ways += [_Way("option", f"with {name}={value}", options={name: value}) for name, value in options.items()]
    ways += [_Way("train-mode", f"in train mode {words}".strip(), mask, train=True) for mask, words in masks.items()]
    known, rare_with = influence.triu(1), set()

    def new_cells(columns: Sequence[int] | None = None) -> Tensor:
        """What this way adds to the known leaks, apart from changes so small that rounding may have hidden them."""
        changes, least = subject.influence(columns).triu(1), min(0.01 * float(known.max()), ROUNDING * subject.eps)
        return torch.where((known == 0) & (changes > least), changes, 0.0)

    for way in ways:
        subject.way = way
        subject.model.train(way.train)
        pads = 0 if way.mask in (None, "ones") else min(PADS, n // 4)
        cuts, rare = [1 + pads + k * (n - 1 - 2 * pads) // 8 for k in range(8)], []
        try:
            if bool(known.any()):
                if not bool(new_cells(sorted({1, n // 2, n - 1})).any()):
                    continue
            elif not (rare := subject.leaks_in_tails(n, cuts)):
                continue
            new = new_cells()
        except AuditError as error:
            subject.notes.append(f"{way.words}: not tried: {error}")
            continue
        leaks += subject.leaks_in(new)
        if not bool(new.any()) and way.mask not in rare_with:
            leaks += rare
            rare_with.add(way.mask)
        known = known + new
    subject.way = _Way()
    subject.model.eval()
    return leaks


def _with_cache(subject: _Subject) -> list[Leak]:
    """Outputs computed with a key-value cache, in chunks and token by token, must be those of one pass."""
    runner, ids, kept = subject.runner, subject.ids, []
    n, leaks = ids.size(1), []
    if not ("past_key_values" in runner.parameters or (runner.takes_anything and subject.decoder)):
        subject.not_tried.append("past_key_values")
        return []

    def change(parts: Sequence[Tensor]) -> Tensor:
        whole, outputs = subject.run(ids), []
        for part in parts:
            cache = {"past_key_values": kept[-1]} if outputs else {}
            outputs.append(subject.run(part, use_cache=True, **cache))
            if not kept or kept[-1] is None:
                raise AuditError("the model returned no past_key_values")
            if subject.decoder and cache and kept[-1] is not cache["past_key_values"]:
                raise AuditError("the model puts another cache in place of the one it is given, as prefix tuning does")
        gap = _relative(torch.cat(outputs, 1), whole)
        return gap * (gap > CACHED)

    ways = {
        "in chunks": [part for part in ids.tensor_split(3, 1) if part.size(1)],
        "token by token": [ids[:, : n // 2], *ids[:, n // 2 :].split(1, 1)],
    }
    handle = subject.model.register_forward_hook(
        lambda m, args, out: kept.append(getattr(out, "past_key_values", None))
    )
    try:
        for words, parts in ways.items():
            changes = subject.confirmed(change(parts), lambda parts=parts: change(parts), torch.inf)[0]
            if bool(changes.any()):
                i = int(changes.argmax())
                text = (
                    f"with a key-value cache, {words}, outputs differ from those of one pass (the most: position {i}, "
                )
                leaks.append(Leak("cache", text + f"by {float(changes[i]):.2g} of its size)"))
    except AuditError as error:
        subject.notes.append(f"with a key-value cache: not tried: {error}")
    finally:
        handle.remove()
    return leaks


# -- a mask that is a number -------------------------------------------------------------------------------------------


def _under_stress(subject: _Subject) -> list[Leak]:
    """Multiply every attention score by growing factors: a mask that is only a large number fails at one of them."""
    if dead := [i for i in range(len(subject.attentions)) if i not in subject.levers]:
        cause = "no `scaling`, and no effect of the size of the input, or no call that can be replayed"
        subject.notes.append(f"{layer_list(dead)}: scores cannot be raised ({cause}); finite masks were not looked for")
    n, levers = subject.ids.size(1), {subject.attentions[i]: lever for i, lever in subject.levers.items()}
    with (
        running.in_float32(subject.model, torch.float16),
        running.without_mlps(subject.decoder) if subject.decoder else nullcontext(),
    ):
        for factor in STRESS if levers else ():
            with _scores_times(factor, levers):
                try:
                    if bool(subject.influence(sorted({1, n // 2, n - 1})).triu(1).any()):
                        return [subject.finite_mask(subject.influence(), factor)]
                except AuditError:
                    note = f"with attention scores {factor:,.0f} times as large the outputs are NaN or infinite"
                    subject.notes.append(note + ": finite masks were looked for with smaller factors only")
                    break
    return []


@torch.no_grad()
def _lever(call: AttentionCall) -> str | None:
    """What multiplies this module's scores: its "scaling", the size of its "input", or None."""
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
    """Hooks that multiply the hidden states, so that query and key grow, and divide the output of the grown values."""

    factor: float

    def before(self, module: nn.Module, args: tuple, kwargs: dict):
        given = AttentionCall(module, args, kwargs)._given
        larger = given * self.factor
        args = tuple(larger if value is given else value for value in args)
        return args, {name: larger if value is given else value for name, value in kwargs.items()}

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


# -- labels, precision, and leaving no trace ---------------------------------------------------------------------------


@torch.no_grad()
def _misplaced_labels(subject: _Subject) -> list[Leak]:
    """Which logits does the model's own loss compare with the label at j? They should be those of position j - 1.

    Two labels are tried at j; the difference of the losses is that of two logits, whatever else enters the loss. No
    logit at or before j may depend on the label.
    """
    model, ids, j = subject.model, subject.ids.to(subject.runner.device), subject.ids.size(1) // 2

    def in_output(change: Tensor) -> list[Leak]:
        if (largest := float(change[0, : j + 1].max())) <= REPEATED:
            return []
        text = f"the outputs depend on the labels of the same or a later position, by {largest:.2g} of their size"
        return [Leak("labels-in-output", text)]

    if "targets" in subject.runner.parameters:  # a model written by hand; whether its caller shifts them is not known
        later = torch.arange(ids.size(1), device=ids.device) >= j
        targets = [ids, torch.where(later, ids.flip(1), ids)]
        return in_output(_relative(*(subject.run(subject.ids, targets=labels) for labels in targets)))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or "labels" not in subject.runner.parameters:
        return []

    def answer(label: int):
        labels = torch.full_like(ids, -100)
        labels[0, j] = label
        torch.manual_seed(subject.seed)
        return model(input_ids=ids, labels=labels)

    out = answer(int(ids[0, j]))
    if not isinstance(getattr(out, "loss", None), Tensor) or out.loss.ndim or out.logits.shape[:2] != ids.shape:
        return []
    logits = out.logits[0].float()
    contrast = logits[j - 1] - logits[j]  # the two labels that tell these positions apart best
    one, other = int(contrast.argmax()), int(contrast.argmin())
    with_one, with_other = answer(one), answer(other)
    if leaks := in_output(_relative(with_other.logits.float(), with_one.logits.float())):
        return leaks
    difference = float(with_other.loss) - float(with_one.loss)
    errors = (logits[:, one] - logits[:, other] - difference).abs()  # (positions,)
    at, tolerance = int(errors.argmin()), 1e-3 * (1 + abs(difference))
    if at == j - 1 or errors[j - 1] <= tolerance:
        return []
    if errors[at] > tolerance:
        subject.notes.append("the model's own loss is not the cross entropy of its logits: its labels were not checked")
        return []
    kind = "labels-misplaced" if at < j else "labels-not-shifted"
    which = f"{j - at} place(s) after it" if at < j else f"{at - j} place(s) before it" if at > j else "it was given"
    text = f"the model's loss compares the logits at a position with the token {which}, not with the next one"
    return [Leak(kind, text + (" (labels not shifted)" if at == j else ""), ((at, j),))]


@contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    """For the block the model computes in float64, which only the simplest code for experts allows."""
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}.values()
    ways = [(c, c._experts_implementation) for c in configs if getattr(c, "_experts_implementation", None)]
    kept = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    try:
        for tensor, data in kept:
            tensor.data = data.double()
        for config, _ in ways:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, way in ways:
            config._experts_implementation = way
        for tensor, data in kept:
            tensor.data = data


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards attributes (such as the mode), hooks, buffers (running averages) and random state are as before."""
    modules = [(module, vars(module).copy(), module._forward_hooks.copy()) for module in model.modules()]
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            yield
    finally:
        for module, attributes, hooks in modules:
            vars(module).clear()
            vars(module).update(attributes)
            module._forward_hooks.clear()  # transformers leaves some where attention weights were asked for
            module._forward_hooks.update(hooks)
        for module, name, buffer, content in buffers:
            module._buffers[name] = buffer.copy_(content)
