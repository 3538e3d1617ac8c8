"""`audit(model)`: measure, from behaviour alone, the mask that is really in force.

Nothing is read from the configuration to reach a verdict. Each attention module is replayed with one position changed
at a time (the module `probe` states the rule for "influence"), on an unpadded row, on a padded one, and on a full row
beside padded ones; then the whole model is, token by token. What both say is held together in an `AuditReport`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.auditing import checks
from labkit.auditing.probe import (
    attention_influence,
    doubtful_columns,
    embedding_influence,
    recorded_calls,
    token_influence,
)
from labkit.auditing.report import AuditReport, LayerReport, Problem, Scenario
from labkit.decoder.anatomy import Decoder, attention_modules, decoder_or_none
from labkit.decoder.running import BODY_MEASURED, Runner, evaluating
from labkit.errors import AuditError, MaskAssertionError
from labkit.masks import Mask, from_dense, recognise

__all__ = ["AuditReport", "assert_bidirectional", "assert_causal", "audit"]

QUICK_TOKENS, FULL_TOKENS, PADS = 6, 12, 3
# Problems that leave the verdict standing: they concern inputs that not everybody uses.
TOLERATED = ("packing-leak", "left-padding-position-shift")
# The layers by themselves do not show what the model does.
DECISIVE = ("nan-rows", "no-influence", "influence-outside-attention", "influence-missing")


def audit(
    model: nn.Module,
    *,
    reference: nn.Module | None = None,
    quick: bool = False,
    vocab_size: int | None = None,
    max_tokens: int = 1100,
    seed: int = 0,
) -> AuditReport:
    """Measure which positions influence which in `model`, layer by layer and as a whole.

    Args:
        model: any module that maps `input_ids` (and, if it takes one, `attention_mask`) to hidden states or logits,
            (batch, sequence, ...). It is left as it was.
        reference: the model before it was changed. With it the audit also asks whether anything *but* the mask has
            changed: with the causal mask put back into both, both must compute the same.
        quick: only the masks, on unpadded and right-padded batches (about a second for 270 M parameters on a CPU). The
            full audit adds left padding, real windows, packing, cache, other backends, train mode and word order.
        vocab_size: number of token ids, if the model has no `nn.Embedding` to tell it.
        max_tokens: longest sequence to run in order to see past a window; beyond it, windows are shrunk to be measured.
        seed: of the token ids and of the perturbations.

    Raises:
        AuditError: the model cannot be called or gives no output per position.
    """
    began = time.perf_counter()
    decoder = decoder_or_none(model)
    runner = Runner(model, decoder, vocab_size)
    with evaluating(model):
        modules = decoder.attentions if decoder else attention_modules(model)
        views = _look(runner, modules, quick, seed)
        layers = _layer_reports(decoder, modules, views)
        whole = {kind: view.scenario for kind, view in views.items()}
        problems = _mask_problems(layers, views)
        notes = _rows_of_a_batch(runner, views, seed, problems)
        which = "modules could be measured by themselves" if views["unpadded"].unmeasured else "modules were found"
        notes += [] if layers else [f"no attention {which}, so the model was measured only as a whole"]
        notes += _oracle_notes(views)
        if runner.pooled:
            notes.append(BODY_MEASURED)
        if len(views) == 1:
            notes.append("the model takes no attention_mask, or ignores it, so padding was not measured")
        verdict = _overall(
            [v for layer in layers for v in layer.scenarios.values()] or [s.verdict for s in whole.values()]
        )
        if any(p.kind in DECISIVE for p in problems):
            verdict = "other"
        subject = checks.Subject(model, decoder, runner, layers, verdict, max_tokens, seed)
        if reference is not None:
            checks.computation(subject, reference, problems, notes)
        if quick:
            notes.append(
                "quick audit: windows, left padding, packing, cache, other backends and train mode not measured"
            )
        else:
            layers = checks.all_of_them(subject, reference, problems, notes)
    return AuditReport(
        model=type(model).__name__,
        backend=decoder.backend if decoder else None,
        dtype=next((str(p.dtype).removeprefix("torch.") for p in model.parameters()), "no weights"),
        verdict=verdict,
        layers=layers,
        whole=whole,
        problems=problems,
        notes=notes,
        seconds=time.perf_counter() - began,
    )


def assert_bidirectional(model: nn.Module, *, allow: Sequence[str] = TOLERATED, **kwargs) -> AuditReport:
    """Raise `MaskAssertionError` unless every layer is measured as bidirectional, without problems.

    Args:
        allow: kinds of problem to let pass; by default those that concern packed and left-padded input only.
        kwargs: passed on to `audit` (`quick=True`, `reference=original`, ...).
    """
    return _assert_verdict(model, "bidirectional", allow, kwargs)


def assert_causal(model: nn.Module, *, allow: Sequence[str] = TOLERATED, **kwargs) -> AuditReport:
    """Raise `MaskAssertionError` unless every layer is measured as causal, without problems. Arguments as above."""
    return _assert_verdict(model, "causal", allow, kwargs)


def _assert_verdict(model: nn.Module, wanted: str, allow: Sequence[str], kwargs: dict) -> AuditReport:
    report = audit(model, **kwargs)
    objections = [p for p in report.problems if p.kind not in allow]
    if report.verdict != wanted or objections:
        why = f"measured as {report.verdict}" if report.verdict != wanted else f"with problems: {'; '.join(objections)}"
        raise MaskAssertionError(f"expected a {wanted} model, {why}\n{report}")
    return report


@dataclass
class _View:
    """What one kind of batch showed for one of its rows: cells of each layer (queries x keys, pads included)."""

    real: Tensor  # (seq,) bool
    cells: list[Tensor]
    scenario: Scenario
    rows: bool  # whether one row of the batch influences another
    oracles: tuple[str, ...]  # by what the cells of each layer were decided, and last those of `scenario`
    modules: tuple[int, ...] = ()  # of which attention module each of `cells` is
    unmeasured: tuple[int, ...] = ()  # attention modules that ran, and could not be measured by themselves

    def real_cells(self, layer: int) -> Tensor:
        return self.cells[layer][self.real][:, self.real]

    def pads_seen(self, layer: int) -> bool:
        return bool(self.cells[layer][self.real][:, ~self.real].any())


def _look(runner: Runner, modules: Sequence[nn.Module], quick: bool, seed: int) -> dict[str, _View]:
    n = QUICK_TOKENS if quick else FULL_TOKENS
    views = _view_batch(runner, modules, torch.ones(1, n, dtype=torch.bool), ["unpadded"], quick, seed)
    if runner.takes("attention_mask"):
        pads = 2 if quick else PADS
        kinds = ["beside padding", "right-padded", "left-padded"][: 2 if quick else 3]
        real = torch.ones(len(kinds), n, dtype=torch.bool)
        real[1, n - pads :] = False
        real[2:, :pads] = False
        views |= _view_batch(runner, modules, real, kinds, quick, seed)
    return views


def _view_batch(runner, modules, real: Tensor, kinds: list[str], quick: bool, seed: int) -> dict[str, _View]:
    batch, n = real.shape
    ids = runner.tokens(batch, n, seed)
    mask = None if bool(real.all()) else real
    with recorded_calls(modules, every=True) as made:
        base = runner.run(ids, mask)
    calls = [call for call in made if call.can_be_replayed(batch, n)]
    unmeasured = tuple(sorted({call.index for call in made} - {call.index for call in calls}))
    edges = sorted({0, int(real.sum(1).min()) - 1, n - 1})  # first, last real one of the shortest row, last
    columns, draws = (edges, 1) if quick else (list(range(n)), 2)
    # (batch, n, columns)
    seen, rows = token_influence(lambda x: runner.run(x, mask), ids, columns, runner.vocab_size, draws, base)
    oracle = "perturbations"
    if doubtful := doubtful_columns(seen, columns, real):
        oracle = embedding_influence(seen, lambda x: runner.run(x, mask), runner.model, ids, columns, doubtful)
    cells = [attention_influence(call, range(n), draws, seed, real=real) for call in calls]  # each (batch, n, n)
    views = {}
    for row, kind in enumerate(kinds):
        here, kept = real[row], [c for c, j in enumerate(columns) if bool(real[row, j])]
        layer_cells = [c[row] for c in cells]
        influence = seen[row][here][:, kept]
        position = torch.cumsum(here, 0) - 1  # of each real token within its text
        asked = [int(position[columns[c]]) for c in kept]
        pads = [c for c in range(len(columns)) if c not in kept]
        scenario = Scenario(
            verdict=_whole_verdict(influence, asked, [c[here][:, here] for c in layer_cells]),
            influence=influence,
            columns=tuple(asked),
            pad_leak=bool(seen[row][here][:, pads].any()),
            nan=not bool(base[row].isfinite().all()),
        )
        oracles = (*(call.oracle for call in calls), oracle)
        views[kind] = _View(here, layer_cells, scenario, rows, oracles, tuple(call.index for call in calls), unmeasured)
    return views


def _oracle_notes(views: dict[str, _View]) -> list[str]:
    """Where something else than perturbations decided."""
    notes = []
    for oracle, why in (
        ("derivatives", "a change of one token need not show (nearly one-hot attention, or rounding)"),
        ("small changes", "large changes of one token left cells in doubt, and there are no derivatives"),
    ):
        layers = {i for view in views.values() for i, by in enumerate(view.oracles[:-1]) if by == oracle}
        where = [layer_list(tuple(layers))] if layers else []
        where += ["the model as a whole"] if any(view.oracles[-1] == oracle for view in views.values()) else []
        if where:
            notes.append(f"in {' and '.join(where)}, {why}: {oracle} decided")
    return notes


def _layer_reports(decoder: Decoder | None, modules: Sequence[nn.Module], views: dict[str, _View]) -> list[LayerReport]:
    plain = views["unpadded"]
    reports = []
    for i, (module, cells) in enumerate(zip(plain.modules, plain.cells, strict=True)):
        name = decoder.names[module] if decoder else type(modules[module]).__name__
        verdicts = {kind: mask_verdict(view.real_cells(i)) for kind, view in views.items() if i < len(view.cells)}
        mask = recognise(cells)
        mask = from_dense(cells) if mask is None else mask
        reports.append(LayerReport(i, name, mask, verdicts["unpadded"], verdicts))
    return reports


def mask_verdict(cells: Tensor) -> str:
    """ "causal" or "bidirectional" (a window allowed), or "other", from the measured cells of one layer."""
    mask: Mask | None = recognise(cells)
    if mask is None:
        return "other"
    kind = mask.identity[0]
    if kind == "sliding_window" and mask.identity[1] == 1:
        return "other"  # every token sees itself alone: neither reads anything
    if kind == "sliding_window":
        return "causal" if mask.identity[2] else "bidirectional"
    return kind if kind in ("causal", "bidirectional") else "other"


def _whole_verdict(influence: Tensor, columns: list[int], layer_cells: list[Tensor]) -> str:
    """Verdict on the whole model, (real tokens, columns); windows that depth does not bridge are allowed for."""
    n = influence.shape[0]
    future = torch.arange(n)[:, None] < torch.tensor(columns)[None, :]
    expected = composed(layer_cells, n)[:, columns] if layer_cells else torch.ones_like(influence)
    if bool((influence | ~expected).all()) and bool((influence & future).any()) and bool(expected[future].any()):
        reaches_all = bool((influence == expected).all()) or bool(influence.all())
        symmetric = all(mask_verdict(c) == "bidirectional" for c in layer_cells)
        return "bidirectional" if reaches_all and (symmetric or bool(influence.all())) else "other"
    past = expected & ~future
    earlier = torch.arange(n)[:, None] > torch.tensor(columns)[None, :]
    reads_past = bool((influence & earlier).any())  # tokens that do not interact at all are not causal
    return (
        "causal" if reads_past and not bool((influence & future).any()) and bool((influence | ~past).all()) else "other"
    )


def composed(layer_cells: list[Tensor], n: int) -> Tensor:
    """What the layers' masks allow through depth, residual stream included: bool (n, n), output by input."""
    reach = torch.eye(n)
    for cells in layer_cells:
        reach = ((cells.float() + torch.eye(n)) @ reach > 0).float()
    return reach.bool()


def _overall(verdicts: list[str]) -> str:
    found = set(verdicts)
    if len(found) == 1:
        return found.pop()
    return "mixed" if found == {"causal", "bidirectional"} else "other"


def _mask_problems(layers: list[LayerReport], views: dict[str, _View]) -> list[Problem]:
    problems = []
    flipped = [r.index for r in layers if len(set(r.scenarios.values())) > 1]
    if flipped:
        first = layers[flipped[0]]
        by_verdict: dict[str, list[str]] = {}
        for kind, verdict in first.scenarios.items():
            by_verdict.setdefault(verdict, []).append(kind)
        said = ", but ".join(f"{verdict} ({', '.join(kinds)})" for verdict, kinds in by_verdict.items())
        problems.append(Problem("padding-flips-mask", f"{layer_list(flipped)}: {said}", tuple(flipped)))
    elif len({view.scenario.verdict for view in views.values()}) > 1:
        said = ", ".join(f"{view.scenario.verdict} ({kind})" for kind, view in views.items())
        problems.append(Problem("padding-flips-mask", f"what the model can see depends on the padding: {said}"))
    leaking = [i for i in range(len(layers)) if any(v.pads_seen(i) for v in views.values() if i < len(v.cells))]
    if leaking or any(view.scenario.pad_leak for view in views.values()):
        where = layer_list(leaking) if leaking else "the model as a whole"
        problems.append(Problem("pad-leak", f"{where}: padded positions are seen by real tokens", tuple(leaking)))
    broken = [kind for kind, view in views.items() if view.scenario.nan]
    if broken:
        problems.append(Problem("nan-rows", f"the output holds NaN or infinite numbers ({', '.join(broken)})"))
    for kind, view in views.items():
        if view.cells and not view.scenario.nan:
            s = view.scenario
            allowed = composed([view.real_cells(i) for i in range(len(view.cells))], s.influence.shape[0])
            extra = s.influence & ~allowed[:, list(s.columns)]
            if bool(extra.any()):
                text = f"{int(extra.sum())} pairs of tokens influence each other ({kind}) past every attention mask"
                problems.append(Problem("influence-outside-attention", text))
                break
            ahead = torch.arange(len(allowed))[:, None] < torch.tensor(s.columns)[None, :]
            if bool((allowed[:, list(s.columns)] & ahead).any()) and not bool((s.influence & ahead).any()):
                text = f"no token influences an earlier one ({kind}), though the attention layers by themselves let it"
                problems.append(Problem("influence-missing", text))
                break
    plain = views["unpadded"]
    others = torch.arange(len(plain.scenario.influence))[:, None] != torch.tensor(plain.scenario.columns)[None]
    if not plain.scenario.nan and not bool((plain.scenario.influence & others).any()):
        text = "no token influences any other: the model reads each token alone, or its influence could not be measured"
        problems.append(Problem("no-influence", text))
    if plain.unmeasured and plain.scenario.verdict != "causal":  # a model that is causal as a whole is so in all layers
        n, of = len(plain.unmeasured), len({*plain.modules, *plain.unmeasured})
        text = f"{n} of {of} attention modules could not be measured by themselves, and may see less than the others"
        problems.append(Problem("attention-unmeasured", text, plain.unmeasured))
    return problems


def _rows_of_a_batch(runner: Runner, views: dict[str, _View], seed: int, problems: list[Problem]) -> list[str]:
    """Add a problem if one row of a batch influences another; returns a note if that cannot be measured."""
    mixed = any(view.rows for view in views.values())
    if len(views) == 1:  # of a single row
        try:
            mixed = token_influence(runner.run, runner.tokens(3, QUICK_TOKENS, seed), [], runner.vocab_size)[1]
        except AuditError as error:
            return [f"whether rows of a batch influence each other was not measured: {error}"]
    if mixed:
        text = "other tokens in one row of a batch change the outputs of the other rows"
        problems.append(Problem("depends-on-batch", text))
    return []


def layer_list(indices: Sequence[int]) -> str:
    """ "layer 3", "layers 0-4", "layers 0, 2-5"."""
    runs: list[list[int]] = []
    for i in sorted(indices):
        if runs and i == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], i]
        else:
            runs.append([i])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"layer {text}" if len(indices) == 1 else f"layers {text}"
