"""`audit(model)`: measure, from behaviour alone, the mask that is really in force.

Nothing is read from the configuration to reach a verdict. Each attention module is replayed with one position changed
at a time (the module `probe` states the rule for "influence"), on an unpadded row, on a padded one, and on a full row
beside padded ones; then the whole model is, token by token. An `AuditReport` holds both results together.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.auditing import checks, probe
from labkit.auditing.probe import AttentionCall, later
from labkit.auditing.report import AuditReport, LayerReport, Problem, Scenario, layer_list
from labkit.decoder.anatomy import decoder_or_none
from labkit.decoder.running import BODY_MEASURED, Runner, evaluating
from labkit.errors import AuditError
from labkit.files import quiet_libraries
from labkit.masks import from_dense, recognise

__all__ = ["AuditReport", "assert_bidirectional", "assert_causal", "audit"]

QUICK_TOKENS, FULL_TOKENS = 6, 12
# With these problems, the layers by themselves do not show what the model does.
DECISIVE = {"nan-rows", "no-influence", "influence-outside-attention", "influence-missing"}


def audit(
    model: nn.Module,
    *,
    reference: nn.Module | None = None,
    quick: bool = False,
    vocab_size: int | None = None,
) -> AuditReport:
    """Measure which positions influence which in `model`, layer by layer and as a whole.

    Args:
        model: any module that maps `input_ids` (and, if it takes one, `attention_mask`) to hidden states or logits,
            (batch, sequence, ...). It is left as it was.
        reference: the model before it was changed. With it the audit also asks whether anything *but* the mask has
            changed: with the causal mask put back into both, both must compute the same.
        quick: only the masks, on unpadded and right-padded batches (about a second for 270 M parameters on a CPU). The
            full audit adds left padding, real windows, packing, cache, other backends, train mode and word order.
        vocab_size: number of token ids, if the model has no `nn.Embedding` to read it from.

    Raises:
        AuditError: the model cannot be called or gives no output per position.
    """
    began = time.perf_counter()
    decoder = decoder_or_none(model)
    runner = Runner(model, decoder, vocab_size)
    with evaluating(model), quiet_libraries():
        names = decoder.names if decoder else [type(module).__name__ for module in runner.attentions]
        views = _measured_views(runner, quick)
        layers = _layer_reports(names, views)
        notes = list(_notes(runner, views, quick))
        problems = [*_mask_problems(layers, views), *_between_rows(runner, notes)]
        verdicts = {verdict for layer in layers for verdict in layer.verdicts.values()}
        verdicts = verdicts or {view.scenario.verdict for view in views.values()}
        if DECISIVE & {problem.kind for problem in problems}:
            verdict = "other"
        elif len(verdicts) == 1:
            (verdict,) = verdicts
        else:
            verdict = "mixed" if verdicts == {"causal", "bidirectional"} else "other"
        if decoder is None and verdict == "causal":
            rare = "a dependence on later tokens that few texts show, such as a router's, is not excluded"
            notes.append(f"{rare}: labkit.find_leaks tries many texts")
        subject = checks.Subject(model, decoder, runner, layers, verdict, notes, reference)
        if reference is not None:
            problems += checks.computation(subject)
        if not quick:
            problems += checks.run_all(subject, {problem.kind for problem in problems})
    return AuditReport(
        model=type(model).__name__,
        backend=decoder.backend if decoder else None,
        dtype=next((str(p.dtype).removeprefix("torch.") for p in model.parameters()), "no weights"),
        verdict=verdict,
        layers=subject.layers,
        whole={kind: view.scenario for kind, view in views.items()},
        problems=problems,
        notes=notes,
        seconds=round(time.perf_counter() - began, 3),
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
    """What one kind of batch showed for one of its rows, and for its real tokens only.

    calls: those of the attention modules that can be measured by themselves. unmeasured: the other modules that ran.
    cells: what each call attends to, (tokens, tokens). with_pads: the calls in which a token attends to padding.
    refined: whether small changes added to `scenario`. contradiction: what its influence has against the cells.
    """

    calls: list[AttentionCall]
    unmeasured: list[int]
    cells: list[Tensor]
    with_pads: list[int]
    scenario: Scenario
    refined: bool
    contradiction: Problem | None


def _measured_views(runner: Runner, quick: bool) -> dict[str, _View]:
    """An unpadded row and, if the model takes a mask, a batch of a full row and padded ones: {kind of batch: view}."""
    n, pads = (QUICK_TOKENS, 2) if quick else (FULL_TOKENS, 3)
    views = _view_batch(runner, torch.ones(1, n, dtype=torch.bool), ["unpadded"], quick)
    if runner.takes("attention_mask"):
        kinds = ["beside padding", "right-padded", "left-padded"][: 2 if quick else 3]
        real = torch.ones(len(kinds), n, dtype=torch.bool)
        real[1, n - pads :] = False
        real[2:, :pads] = False
        views |= _view_batch(runner, real, kinds, quick)
    return views


def _view_batch(runner: Runner, real: Tensor, kinds: list[str], quick: bool) -> dict[str, _View]:
    batch, n = real.shape
    ids = runner.tokens(batch, n)
    run = functools.partial(runner.run, real=None if bool(real.all()) else real)
    with probe.recorded_calls(runner.attentions) as recorded:
        base = run(ids)
    calls = [call for call in recorded if call.can_be_replayed(batch, n)]
    unmeasured = sorted({call.index for call in recorded} - {call.index for call in calls})
    edges = sorted({0, int(real.sum(1).min()) - 1, n - 1})  # first, last real one of the shortest row, last
    columns, draws = (edges, 1) if quick else (list(range(n)), 2)
    influence = probe.token_influence(run, ids, columns, runner.vocab_size, draws) > 0  # (batch, n, columns)
    refined = probe.refine_by_embeddings(influence, run, runner.model, ids, columns, real)
    cells = [probe.attention_influence(call, range(n), draws, real=real) for call in calls]  # each (batch, n, n)
    views = {}
    for row, kind in enumerate(kinds):
        here, kept = real[row], real[row, columns]
        asked = (torch.cumsum(here, 0) - 1)[columns][kept].tolist()  # the columns within the text of this row
        of_row, of_tokens = influence[row][here], [call_cells[row][here] for call_cells in cells]
        inside, nan = [call_cells[:, here] for call_cells in of_tokens], not bool(base[row].isfinite().all())
        verdict, contradiction = _as_a_whole(of_row[:, kept], asked, inside, kind)
        scenario = Scenario(verdict, of_row[:, kept], tuple(asked), bool(of_row[:, ~kept].any()), nan)
        with_pads = [i for i, call_cells in enumerate(of_tokens) if bool(call_cells[:, ~here].any())]
        views[kind] = _View(calls, unmeasured, inside, with_pads, scenario, refined, None if nan else contradiction)
    return views


def _notes(runner: Runner, views: dict[str, _View], quick: bool) -> Iterator[str]:
    plain = views["unpadded"]
    if not plain.calls:
        which = "could be measured by themselves" if plain.unmeasured else "were found"
        yield f"no attention modules {which}, so the model was measured only as a whole"
    refined = {i for view in views.values() for i, call in enumerate(view.calls) if call.refined}
    where = [layer_list(sorted(refined))] if refined else []
    where += ["the model as a whole"] if any(view.refined for view in views.values()) else []
    if where:
        why = "a change of one token need not show (nearly one-hot attention, or rounding)"
        yield f"in {' and '.join(where)}, {why}: small changes decided"
    if runner.pooled:
        yield BODY_MEASURED
    if len(views) == 1:
        yield "the model takes no attention_mask, or ignores it, so padding was not measured"
    if quick:
        yield "quick audit: windows, left padding, packing, cache, other backends and train mode not measured"


def _layer_reports(names: Sequence[str], views: dict[str, _View]) -> list[LayerReport]:
    plain = views["unpadded"]
    reports = []
    for i, (call, cells) in enumerate(zip(plain.calls, plain.cells, strict=True)):
        verdicts = {kind: mask_verdict(view.cells[i]) for kind, view in views.items() if i < len(view.cells)}
        mask = recognise(cells)
        mask = from_dense(cells) if mask is None else mask
        reports.append(LayerReport(i, names[call.index], mask, verdicts["unpadded"], verdicts))
    return reports


def mask_verdict(cells: Tensor) -> str:
    """ "causal" or "bidirectional" (a window allowed), or "other", from the measured cells of one layer."""
    mask = recognise(cells)
    kind, *details = mask.identity if mask is not None else ("other",)
    if kind == "sliding_window":
        window, causal = details
        if window == 1:
            return "other"  # every token attends to itself alone
        return "causal" if causal else "bidirectional"
    return kind if kind in ("causal", "bidirectional") else "other"


def _as_a_whole(
    influence: Tensor, columns: list[int], layer_cells: list[Tensor], kind: str
) -> tuple[str, Problem | None]:
    """Verdict on the whole model from its influence, (tokens, columns), and how that contradicts its layers, or None.

    Small windows leave cells empty that the layers do not bridge through depth.
    """
    n, ahead = len(influence), later(len(influence), columns)
    allowed = composed(layer_cells, n)[:, columns] if layer_cells else torch.ones_like(influence)
    missing, extra, problem = allowed & ~influence, int((influence & ~allowed).sum()), None
    if extra:
        text = f"{extra} pairs of tokens influence each other ({kind}) past every attention mask"
        problem = Problem("influence-outside-attention", text)
    if not bool((influence & ahead).any()):
        if layer_cells and not extra and bool((allowed & ahead).any()):
            text = f"no token influences an earlier one ({kind}), though the attention layers by themselves allow it"
            problem = Problem("influence-missing", text)
        # tokens that do not interact at all are not causal
        reads_past = bool((influence & (torch.arange(n)[:, None] > torch.tensor(columns))).any())
        return "causal" if reads_past and not bool((missing & ~ahead).any()) else "other", problem
    if bool(missing.any()) or not bool(allowed[ahead].any()):
        return "other", problem
    two_sided = not extra and all(mask_verdict(cells) == "bidirectional" for cells in layer_cells)
    return "bidirectional" if bool(influence.all()) or two_sided else "other", problem


def composed(layer_cells: list[Tensor], n: int) -> Tensor:
    """What the layers' masks allow through depth, residual stream included: bool (n, n), output by input."""
    reach = torch.eye(n)
    for cells in layer_cells:
        reach = ((cells.float() + torch.eye(n)) @ reach > 0).float()
    return reach.bool()


def _mask_problems(layers: list[LayerReport], views: dict[str, _View]) -> Iterator[Problem]:
    flipped = [layer.index for layer in layers if len(set(layer.verdicts.values())) > 1]
    verdicts = {kind: view.scenario.verdict for kind, view in views.items()}
    if flipped or len(set(verdicts.values())) > 1:
        verdicts = layers[flipped[0]].verdicts if flipped else verdicts
        kinds = {v: ", ".join(kind for kind in verdicts if verdicts[kind] == v) for v in verdicts.values()}
        text = ", but ".join(f"{verdict} ({where})" for verdict, where in kinds.items())
        yield Problem("padding-flips-mask", f"{_where(flipped)}: {text}", flipped)
    leaking = sorted({i for view in views.values() for i in view.with_pads})
    if leaking or any(view.scenario.pad_leak for view in views.values()):
        yield Problem("pad-leak", f"{_where(leaking)}: real tokens attend to padded positions", leaking)
    if broken := [kind for kind, view in views.items() if view.scenario.nan]:
        yield Problem("nan-rows", f"the output holds NaN or infinite numbers ({', '.join(broken)})")
    yield from [view.contradiction for view in views.values() if view.contradiction is not None][:1]
    plain = views["unpadded"]
    influence, columns = plain.scenario.influence, torch.tensor(plain.scenario.columns)
    of_others = influence & (torch.arange(len(influence))[:, None] != columns)
    if not plain.scenario.nan and not bool(of_others.any()):
        text = "no token influences any other: the model reads each token alone, or its influence could not be measured"
        yield Problem("no-influence", text)
    if plain.unmeasured and plain.scenario.verdict != "causal":  # a model that is causal as a whole is so in all layers
        count = len({*plain.unmeasured, *(call.index for call in plain.calls)})
        text = "attention modules could not be measured by themselves, and may attend to less than the others"
        yield Problem("attention-unmeasured", f"{len(plain.unmeasured)} of {count} {text}", plain.unmeasured)


def _where(layers: list[int]) -> str:
    return layer_list(layers) if layers else "the model as a whole"


def _between_rows(runner: Runner, notes: list[str]) -> list[Problem]:
    """Other tokens in the middle one of three rows must not change the outputs of the other rows."""
    real = torch.ones(3, QUICK_TOKENS, dtype=torch.bool) if runner.takes("attention_mask") else None
    run, ids = functools.partial(runner.run, real=real), runner.tokens(3, QUICK_TOKENS)
    middle = (torch.arange(3) == 1)[:, None].expand(3, QUICK_TOKENS)
    try:
        if bool(probe.changed_outputs(run, ids, middle, runner.vocab_size).any()):
            text = "other tokens in one row of a batch change the outputs of the other rows"
            return [Problem("depends-on-batch", text)]
    except AuditError as error:
        notes.append(f"whether rows of a batch influence each other was not measured: {error}")
    return []
