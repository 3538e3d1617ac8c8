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
    later,
    recorded_calls,
    token_influence,
)
from labkit.auditing.report import AuditReport, LayerReport, Problem, Scenario
from labkit.decoder.anatomy import Decoder, attention_modules, decoder_or_none
from labkit.decoder.running import BODY_MEASURED, Runner, evaluating
from labkit.errors import AuditError
from labkit.masks import Mask, from_dense, recognise

__all__ = ["AuditReport", "assert_bidirectional", "assert_causal", "audit"]

QUICK_TOKENS, FULL_TOKENS, PADS = 6, 12, 3
# With these problems, the layers by themselves do not show what the model does.
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
        views = _measured_views(runner, modules, quick, seed)
        layers = _layer_reports(decoder, modules, views)
        whole = {kind: view.scenario for kind, view in views.items()}
        problems = _mask_problems(layers, views)
        notes = _rows_of_a_batch(runner, views, seed, problems)
        if not layers:
            which = "could be measured by themselves" if views["unpadded"].unmeasured else "were found"
            notes.append(f"no attention modules {which}, so the model was measured only as a whole")
        notes += _oracle_notes(views)
        if runner.pooled:
            notes.append(BODY_MEASURED)
        if len(views) == 1:
            notes.append("the model takes no attention_mask, or ignores it, so padding was not measured")
        verdicts = {verdict for layer in layers for verdict in layer.scenarios.values()}
        verdicts = verdicts or {scenario.verdict for scenario in whole.values()}
        if any(problem.kind in DECISIVE for problem in problems):
            verdict = "other"
        elif len(verdicts) == 1:
            (verdict,) = verdicts
        else:
            verdict = "mixed" if verdicts == {"causal", "bidirectional"} else "other"
        subject = checks.Subject(model, decoder, runner, layers, verdict, max_tokens, seed, notes)
        if reference is not None:
            problems += checks.computation(subject, reference)
        if quick:
            notes.append(
                "quick audit: windows, left padding, packing, cache, other backends and train mode not measured"
            )
        else:
            problems += checks.all_of_them(subject, reference, {problem.kind for problem in problems})
    return AuditReport(
        model=type(model).__name__,
        backend=decoder.backend if decoder else None,
        dtype=next((str(p.dtype).removeprefix("torch.") for p in model.parameters()), "no weights"),
        verdict=verdict,
        layers=subject.layers,
        whole=whole,
        problems=problems,
        notes=notes,
        seconds=time.perf_counter() - began,
    )


def assert_bidirectional(model: nn.Module, *, allow: Sequence[str] | None = None, **kwargs) -> AuditReport:
    """Raise `AuditError`, which is an AssertionError, unless every layer is bidirectional and there are no problems.

    Args:
        allow: kinds of problem that do not count. None: "left-padding-position-shift", which concerns positions and not
            the mask. Add "packing-leak" for a model that you never give packed documents.
        kwargs: passed on to `audit` (`quick=True`, `reference=original`, ...).
    """
    return _assert_verdict(model, "bidirectional", allow, kwargs)


def assert_causal(model: nn.Module, *, allow: Sequence[str] | None = None, **kwargs) -> AuditReport:
    """Raise `AuditError` unless every layer is causal and there are no problems. Arguments as above.

    By default "packing-leak" does not count here: a causal mask lets a later document attend to an earlier one.
    """
    return _assert_verdict(model, "causal", allow, kwargs)


def _assert_verdict(model: nn.Module, expected: str, allow: Sequence[str] | None, kwargs: dict) -> AuditReport:
    report = audit(model, **kwargs)
    if why := report.failure(expected, allow):
        raise AuditError(f"expected a {expected} model, and this one {why}\n{report}")
    return report


@dataclass
class _View:
    """What one kind of batch showed for one of its rows: cells of each layer (queries x keys, pads included)."""

    real: Tensor  # (seq,) bool
    cells: list[Tensor]
    scenario: Scenario
    mixed_rows: bool  # whether one row of the batch influences another
    oracles: tuple[str, ...]  # what decided the cells of each layer, and last those of `scenario`
    modules: tuple[int, ...]  # of which attention module each of `cells` is
    unmeasured: tuple[int, ...]  # attention modules that ran, and could not be measured by themselves

    @property
    def real_cells(self) -> list[Tensor]:
        return [cells[self.real][:, self.real] for cells in self.cells]

    def attends_to_pads(self, layer: int) -> bool:
        return layer < len(self.cells) and bool(self.cells[layer][self.real][:, ~self.real].any())


def _measured_views(runner: Runner, modules: Sequence[nn.Module], quick: bool, seed: int) -> dict[str, _View]:
    """An unpadded row and, if the model takes a mask, a batch of a full row and padded ones: {kind of batch: view}."""
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
    ids, mask = runner.tokens(batch, n, seed), None if bool(real.all()) else real

    def run(ids: Tensor) -> Tensor:
        return runner.run(ids, mask)

    with recorded_calls(modules, every=True) as recorded:
        base = run(ids)
    calls = [call for call in recorded if call.can_be_replayed(batch, n)]
    modules_measured = tuple(call.index for call in calls)
    unmeasured = tuple(sorted({call.index for call in recorded} - set(modules_measured)))
    edges = sorted({0, int(real.sum(1).min()) - 1, n - 1})  # first, last real one of the shortest row, last
    columns, draws = (edges, 1) if quick else (list(range(n)), 2)
    influence, mixed_rows = token_influence(run, ids, columns, runner.vocab_size, draws, base)  # (batch, n, columns)
    oracle = "perturbations"
    if doubtful := doubtful_columns(influence, columns, real):
        oracle = embedding_influence(influence, run, runner.model, ids, columns, doubtful)
    cells = [attention_influence(call, range(n), draws, seed, real=real) for call in calls]  # each (batch, n, n)
    oracles = (*(call.oracle for call in calls), oracle)
    views = {}
    for row, kind in enumerate(kinds):
        here, kept = real[row], real[row, columns]
        position = torch.cumsum(here, 0) - 1  # of each real token within its text
        asked = position[columns][kept].tolist()
        layer_cells, of_row = [c[row] for c in cells], influence[row][here]
        scenario = Scenario(
            verdict=_whole_verdict(of_row[:, kept], asked, [c[here][:, here] for c in layer_cells]),
            influence=of_row[:, kept],
            columns=tuple(asked),
            pad_leak=bool(of_row[:, ~kept].any()),
            nan=not bool(base[row].isfinite().all()),
        )
        views[kind] = _View(here, layer_cells, scenario, mixed_rows, oracles, modules_measured, unmeasured)
    return views


def _oracle_notes(views: dict[str, _View]) -> list[str]:
    """Where something other than perturbations decided."""
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
        verdicts = {kind: mask_verdict(view.real_cells[i]) for kind, view in views.items() if i < len(view.cells)}
        mask = recognise(cells)
        mask = from_dense(cells) if mask is None else mask
        reports.append(LayerReport(i, name, mask, verdicts["unpadded"], verdicts))
    return reports


def mask_verdict(cells: Tensor) -> str:
    """ "causal" or "bidirectional" (a window allowed), or "other", from the measured cells of one layer."""
    mask: Mask | None = recognise(cells)
    kind, *details = mask.identity if mask is not None else ("other",)
    if kind == "sliding_window":
        window, causal = details
        if window == 1:
            return "other"  # every token attends to itself alone
        return "causal" if causal else "bidirectional"
    return kind if kind in ("causal", "bidirectional") else "other"


def _whole_verdict(influence: Tensor, columns: list[int], layer_cells: list[Tensor]) -> str:
    """Verdict on the whole model from bool (real tokens, columns), and from the cells of its layers where known.

    Only the cells that the layers can bridge through depth are expected: small windows leave the rest empty.
    """
    n = influence.shape[0]
    ahead, behind = later(n, columns), ~later(n, columns, or_same=True)
    expected = composed(layer_cells, n)[:, columns] if layer_cells else torch.ones_like(influence)
    missing = expected & ~influence
    if not bool((influence & ahead).any()):  # tokens that do not interact at all are not causal
        reads_past = bool((influence & behind).any())
        return "causal" if reads_past and not bool((missing & ~ahead).any()) else "other"
    if bool(missing.any()) or not bool(expected[ahead].any()):
        return "other"
    if bool(influence.all()):
        return "bidirectional"
    two_sided = all(mask_verdict(cells) == "bidirectional" for cells in layer_cells)
    return "bidirectional" if two_sided and torch.equal(influence, expected) else "other"


def composed(layer_cells: list[Tensor], n: int) -> Tensor:
    """What the layers' masks allow through depth, residual stream included: bool (n, n), output by input."""
    reach = torch.eye(n)
    for cells in layer_cells:
        reach = ((cells.float() + torch.eye(n)) @ reach > 0).float()
    return reach.bool()


def _mask_problems(layers: list[LayerReport], views: dict[str, _View]) -> list[Problem]:
    problems = [_padding_flips_mask(layers, views)]
    leaking = tuple(i for i in range(len(layers)) if any(view.attends_to_pads(i) for view in views.values()))
    if leaking or any(view.scenario.pad_leak for view in views.values()):
        where = layer_list(leaking) if leaking else "the model as a whole"
        problems.append(Problem("pad-leak", f"{where}: real tokens attend to padded positions", leaking))
    if broken := [kind for kind, view in views.items() if view.scenario.nan]:
        problems.append(Problem("nan-rows", f"the output holds NaN or infinite numbers ({', '.join(broken)})"))
    problems.append(next(filter(None, map(_layers_contradicted, views, views.values())), None))
    plain = views["unpadded"].scenario
    n, columns = len(plain.influence), list(plain.columns)
    of_others = torch.arange(n)[:, None] != torch.tensor(columns)
    if not plain.nan and not bool((plain.influence & of_others).any()):
        text = "no token influences any other: the model reads each token alone, or its influence could not be measured"
        problems.append(Problem("no-influence", text))
    modules, unmeasured = views["unpadded"].modules, views["unpadded"].unmeasured
    if unmeasured and plain.verdict != "causal":  # a model that is causal as a whole is so in all layers
        count = f"{len(unmeasured)} of {len({*modules, *unmeasured})} attention modules"
        text = f"{count} could not be measured by themselves, and may attend to less than the others"
        problems.append(Problem("attention-unmeasured", text, unmeasured))
    return [problem for problem in problems if problem is not None]


def _padding_flips_mask(layers: list[LayerReport], views: dict[str, _View]) -> Problem | None:
    flipped = tuple(layer.index for layer in layers if len(set(layer.scenarios.values())) > 1)
    if flipped:
        kinds_by_verdict: dict[str, list[str]] = {}
        for kind, verdict in layers[flipped[0]].scenarios.items():
            kinds_by_verdict.setdefault(verdict, []).append(kind)
        text = ", but ".join(f"{verdict} ({', '.join(kinds)})" for verdict, kinds in kinds_by_verdict.items())
        return Problem("padding-flips-mask", f"{layer_list(flipped)}: {text}", flipped)
    if len({view.scenario.verdict for view in views.values()}) == 1:
        return None
    text = ", ".join(f"{view.scenario.verdict} ({kind})" for kind, view in views.items())
    return Problem("padding-flips-mask", f"what the model attends to depends on the padding: {text}")


def _layers_contradicted(kind: str, view: _View) -> Problem | None:
    """The model as a whole lets through more, or much less, than its layers by themselves."""
    scenario = view.scenario
    if not view.cells or scenario.nan:
        return None
    n, columns = len(scenario.influence), list(scenario.columns)
    allowed, ahead = composed(view.real_cells, n)[:, columns], later(n, columns)
    if extra := int((scenario.influence & ~allowed).sum()):
        text = f"{extra} pairs of tokens influence each other ({kind}) past every attention mask"
        return Problem("influence-outside-attention", text)
    if bool((allowed & ahead).any()) and not bool((scenario.influence & ahead).any()):
        text = f"no token influences an earlier one ({kind}), though the attention layers by themselves let it"
        return Problem("influence-missing", text)
    return None


def _rows_of_a_batch(runner: Runner, views: dict[str, _View], seed: int, problems: list[Problem]) -> list[str]:
    """Add a problem if one row of a batch influences another; returns a note if that cannot be measured."""
    mixed = any(view.mixed_rows for view in views.values())
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
