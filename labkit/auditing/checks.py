"""What the full audit asks beyond the mask: windows, positions, packing, cache, backends, train mode, computation.

Each check takes the `Subject`, returns the problems that it measured, and adds what it could not measure to the notes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from labkit.auditing.probe import attention_influence, by_head, changed_outputs, recorded_calls
from labkit.auditing.report import LayerReport, Problem
from labkit.decoder import limits
from labkit.decoder.anatomy import SLIDING, Decoder, attention_modules, find_decoder
from labkit.decoder.hooks import ATTRIBUTE as LAYER_MASKS
from labkit.decoder.hooks import masked, shrunken_windows
from labkit.decoder.packing import packed, why_not
from labkit.decoder.running import Runner, first_tensor, in_float32, replaced
from labkit.errors import AuditError, ConversionError, ModelError
from labkit.masks import causal

MARK = "labkit_attention"  # where a conversion is recorded in the config (labkit.convert)
TOKENS = 12
LONG = 66  # tokens, for a mask that changes with the length, such as one in blocks of 64
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")  # what modules call the number of theirs
SHORT = (torch.float16, torch.bfloat16)
ROOM = 0.8  # share of the free memory that weights in float32 may take for a moment
MARGIN = 8  # tokens run beyond a window in order to see where it ends
SMALL_WINDOW = 8  # what a window too long to run past is shrunk to


@dataclass
class Subject:
    """The model under audit, with what is known of it so far."""

    model: nn.Module
    decoder: Decoder | None
    runner: Runner
    layers: list[LayerReport]
    verdict: str
    max_tokens: int
    seed: int
    notes: list[str]

    @property
    def tolerance(self) -> float:
        """Relative difference of two outputs that counts as rounding: 0.1 %, or 5 % for 16-bit weights."""
        some = next(self.model.parameters(), None)
        return 5e-2 if some is not None and some.element_size() < 4 else 1e-3

    def ids(self, batch: int = 1, n: int = TOKENS) -> Tensor:
        return self.runner.tokens(batch, n, self.seed)


def all_of_them(subject: Subject, reference: nn.Module | None, known: set[str]) -> list[Problem]:
    """Run every check that the model allows, after problems of the kinds `known`; fills in the reach of the layers."""
    problems = windows(subject, reference) if subject.decoder else []
    padding_is_right = not known & {"padding-flips-mask", "nan-rows", "pad-leak", "depends-on-batch"}
    if subject.runner.takes("attention_mask") and padding_is_right:
        problems += _confirmed(subject, batch_and_positions)
    problems += packing(subject)
    if padding_is_right:  # else it is reported already that a text alone and a padded batch differ
        problems += _confirmed(subject, packed_batch)
    if subject.verdict == "bidirectional":
        problems += word_order(subject)
    problems += heads(subject)
    if subject.verdict in ("causal", "bidirectional"):
        problems += elsewhere(subject)
    if subject.decoder:
        problems += _confirmed(subject, entry)
        if subject.runner.takes("use_cache"):
            problems += _confirmed(subject, cache)
        else:
            subject.notes.append("the model takes no use_cache, so it was measured without a cache")
        problems += backends(subject) + train_mode(subject)
    return problems


def _confirmed(subject: Subject, check: Callable[[Subject], list[Problem]]) -> list[Problem]:
    """What the check finds; of a model with 16-bit weights, what it finds in float32, too, as far as there is memory.

    Some models blow the rounding of 16 bits up to a fifth of their states, and that says nothing of their mask.
    """
    problems = check(subject)
    halves = [p for p in (*subject.model.parameters(), *subject.model.buffers()) if p.dtype in SHORT]
    if not problems or not halves:
        return problems
    dtype = str(halves[0].dtype).removeprefix("torch.")
    flash = subject.decoder is not None and subject.decoder.backend == "flash"  # which has no float32
    if flash or 4 * sum(p.numel() for p in halves) > ROOM * limits.available_bytes(str(halves[0].device)):
        why = "which flash attention does not have" if flash else "for want of memory"
        subject.notes.append(f"differences were found in {dtype}, and not confirmed in float32, {why}")
        return problems
    with in_float32(subject.model, *SHORT):
        confirmed = check(subject)
    if gone := {p.kind for p in problems} - {p.kind for p in confirmed}:
        subject.notes.append(f"{', '.join(sorted(gone))} in {dtype} is rounding: it is not there in float32")
    return confirmed


def windows(subject: Subject, reference: nn.Module | None) -> list[Problem]:
    """How far local layers see to either side, measured on a sequence longer than the window."""
    decoder = subject.decoder
    if SLIDING not in decoder.layer_types or not subject.layers:
        return []
    declared = _declared_reach(decoder, causal=subject.verdict == "causal")
    for confirm in (False, True):  # derivatives on a long sequence are slow: only to confirm a finding
        reach, shrink = _measured_reach(decoder, subject.runner, subject.max_tokens, subject.seed, confirm)
        findings = _window_findings(subject.layers, reach, declared)
        if not findings:
            break
    if shrink:
        subject.notes.append(
            f"windows were measured shrunk by {shrink} tokens, so as not to run a sequence longer than them"
        )
    if reference is not None and getattr(decoder.config, MARK, None) is None and not findings:
        theirs = find_decoder(reference)
        if SLIDING in theirs.layer_types:
            original, _ = _measured_reach(theirs, Runner(reference, theirs), subject.max_tokens, subject.seed, True)
            changed = [i for i in reach if i in original and reach[i][0] != original[i][0]]
            if changed:
                now, then = reach[changed[0]][0], original[changed[0]][0]
                text = f"local layers see {_tokens(now)} to the left, where the reference sees {_tokens(then)}"
                findings["window-differs"] = (text, changed)
    subject.layers = [replace(layer, reach=reach.get(layer.index)) for layer in subject.layers]
    return [Problem(kind, text, tuple(indices)) for kind, (text, indices) in findings.items()]


def _measured_reach(decoder: Decoder, runner: Runner, max_tokens: int, seed: int, confirm: bool) -> tuple[dict, int]:
    """({local layer: (left, right) tokens seen, None = no limit met}, tokens by which windows were shrunk for it)."""
    configured = decoder.config.sliding_window
    limit = min(max_tokens, limits.position_limit(decoder.config) or max_tokens)
    shrink = 0 if configured + 2 * MARGIN <= limit else configured - SMALL_WINDOW
    n = configured - shrink + 2 * MARGIN
    local = [i for i, kind in enumerate(decoder.layer_types) if kind == SLIDING]
    with shrunken_windows(decoder, shrink), recorded_calls([decoder.attentions[i] for i in local]) as calls:
        runner.run(runner.tokens(1, n, seed))
    early, late = MARGIN // 2, n - 1 - MARGIN // 2
    reach = {}
    for i, call in zip(local, calls, strict=True):
        seen = attention_influence(call, [early, late], 2, seed, confirm=confirm)[0]  # (n, 2)
        left = max(
            [int(q) - early for q in seen[:, 0].nonzero()], default=0
        )  # to the last query that sees an early key
        right = max([late - int(q) for q in seen[:, 1].nonzero()], default=0)
        reach[i] = tuple(None if r >= n - 1 - early else r + (shrink if r else 0) for r in (left, right))
    return reach, shrink


def _declared_reach(decoder: Decoder, causal: bool) -> int | None:
    """Tokens a local layer should see to a side: as the conversion declared it, else as the config's window says."""
    mark = getattr(decoder.config, MARK, None)
    if mark is None:
        both_sides = None if causal else getattr(decoder.config, "local_attention", None)  # as ModernBERT says it
        return decoder.config.sliding_window - 1 if both_sides is None else both_sides // 2
    window, choice = mark["sliding_window"], mark["window"]
    return {"keep": window - 1, "halve": window // 2, "global": None}[choice]


def _window_findings(layers, reach, declared) -> dict[str, tuple[str, list[int]]]:
    findings: dict[str, tuple[str, list[int]]] = {}

    def add(kind: str, i: int, text: str) -> None:
        findings.setdefault(kind, (text, []))[1].append(i)

    for i, (left, right) in reach.items():
        if right != 0 and left != right:
            add(
                "one-sided-window",
                i,
                f"local layers see {_tokens(left)} to the left and {_tokens(right)} to the right",
            )
        sides = (left, right) if layers[i].verdict == "bidirectional" else (left,)
        for side in sides:
            if side == declared:
                continue
            if side is None or declared is None:
                add(
                    "window-lost",
                    i,
                    f"local layers see {_tokens(side)} to a side; declared were {_tokens(declared)}",
                )
            elif layers[i].verdict == "bidirectional" and abs(side - declared) == 1:
                than = f"one {'more' if side > declared else 'fewer'} than the {declared}"
                text = f"local layers see {side} tokens to a side, {than} that a window of {declared + 1} tokens means"
                add("window-off-by-one", i, text)
            else:
                add(
                    "window-differs",
                    i,
                    f"local layers see {_tokens(side)} to a side; declared were {_tokens(declared)}",
                )
            break
    return findings


def _tokens(reach: int | None) -> str:
    return "all tokens" if reach is None else f"{reach} tokens"


def batch_and_positions(subject: Subject) -> list[Problem]:
    """The same text alone, in a batch, beside padded rows, and padded left or right, must give the same states."""
    runner, n, pads = subject.runner, TOKENS, 3
    ids = subject.ids(3)
    alone = runner.run(ids[:1], torch.ones(1, n, dtype=torch.bool))
    real = torch.ones(3, n, dtype=torch.bool)
    real[1, n - pads :], real[2, :pads] = False, False
    ids[2] = ids[2].roll(pads)  # the text of row 2 stands behind its pads
    together = runner.run(ids, real)
    short = runner.run(ids[:1, : n - pads], torch.ones(1, n - pads, dtype=torch.bool))
    many = runner.run(subject.ids(3), torch.ones(3, n, dtype=torch.bool))
    problems = []
    for title, got, expected in (
        ("in a batch of equal rows", many[:1], alone),
        ("beside padded rows", together[:1], alone),
        ("with padding on the right", together[1:2, : n - pads], short),
    ):
        gap = difference(got, expected)
        if gap > subject.tolerance:
            text = f"the states of a text differ by {gap:.1%} {title} from those it has alone"
            problems.append(Problem("depends-on-batch", text))
            break
    gap = difference(together[2:, pads:], short)
    if gap > 4 * subject.tolerance:  # in 16 bits a rotary angle is rounded differently at another position
        text = f"padded on the left, the states of a text differ by {gap:.1%}: pads count as positions"
        problems.append(Problem("left-padding-position-shift", text))
    return problems


def packing(subject: Subject) -> list[Problem]:
    """Two documents in one row, positions restarting, with and without a 2-D mask: neither may influence the other.

    A leak is a problem where the documents are meant to be apart: in a model that labkit has converted, and in a causal
    language model of transformers, which isolates them where no mask is given. Of any other model it is a note.
    """
    runner = subject.runner
    if not runner.takes("position_ids"):
        subject.notes.append("the model takes no position_ids, so packed documents were not measured")
        return []
    positions, second = torch.arange(TOKENS)[None] % (TOKENS // 2), torch.arange(TOKENS) >= TOKENS // 2
    ones = torch.ones(1, TOKENS, dtype=torch.bool)
    masks = {"no attention_mask": None}
    if runner.takes("attention_mask"):
        masks |= {"an attention_mask of ones": ones, "an attention_mask of trailing pads": ones.clone()}
        masks["an attention_mask of trailing pads"][:, -2:] = False
    leaks = {}
    for title, real in masks.items():
        run = functools.partial(runner.run, real=real, position_ids=positions)
        counted = ones[0] if real is None else real[0]
        try:
            forward = changed_outputs(run, subject.ids(), ~second, runner.vocab_size)[0, second & counted].any()
            backward = changed_outputs(run, subject.ids(), second & counted, runner.vocab_size)[0, ~second].any()
        except (AuditError, ConversionError) as error:
            subject.notes.append(f"documents packed into one row with {title} were not measured: {error}")
            continue
        if forward or backward:
            leaks[title] = "both ways" if forward and backward else "forwards" if forward else "backwards"
    if not leaks:
        return []
    where = ", ".join(f"{title} ({which})" for title, which in leaks.items())
    text = f"documents packed into one row (restarting position_ids) leak into each other with {where}"
    decoder = subject.decoder
    converted = decoder is not None and hasattr(decoder.stack, LAYER_MASKS)
    isolating = decoder is not None and type(decoder.config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if converted or (isolating and "no attention_mask" in leaks):
        return [Problem("packing-leak", text)]
    if isolating and "no attention_mask" not in leaks:
        subject.notes.append(
            "packed documents leak into each other beside an attention_mask: transformers isolates them only without"
        )
    else:
        subject.notes.append(f"{text}: the model does not keep them apart, so give each document its own row")
    return []


def packed_batch(subject: Subject) -> list[Problem]:
    """A padded batch, packed: no text may influence another, and each has the states that it has alone.

    Once in rows of two or three texts, and once as it is packed by default.
    """
    runner, lengths = subject.runner, (TOKENS, 5, 7, 3)
    reason = why_not(subject.model) if runner.takes("attention_mask") else "it takes no attention_mask"
    if reason is not None:
        subject.notes.append(f"labkit.decoder.packing.packed was not measured: {reason}")
        return []
    ids, real = subject.ids(len(lengths)), torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    alone = [runner.run(ids[:1, :length])[0] for length in lengths]
    leaks, gap = set(), 0.0
    for row_length in (2 * TOKENS, None):
        with packed(subject.model, row_length):
            try:
                base, again = runner.run(ids, real), runner.run(ids, real)
            except ConversionError as error:  # prefix tuning brings a cache
                subject.notes.append(f"labkit.decoder.packing.packed was not measured: {error}")
                return []
            for text, length in enumerate(lengths):
                changed = ids.clone()
                changed[text, length // 2] = (changed[text, length // 2] + 7) % runner.vocab_size
                seen = (runner.run(changed, real) - base).abs().amax((1, 2)) > 8 * (again - base).abs().amax((1, 2))
                leaks |= {(text, other) for other in seen.nonzero()[:, 0].tolist() if other != text}
                gap = max(gap, difference(base[text, :length], alone[text]))
    if leaks:
        text = f"under labkit.decoder.packing.packed texts influence each other: of 4 texts, {len(leaks)} of 12 pairs"
        return [Problem("packing-leak", text)]
    if not gap <= subject.tolerance:
        text = f"under labkit.decoder.packing.packed the states of a text differ by {gap:.1%} from those it has alone"
        return [Problem("packing-leak", text)]
    return []


def word_order(subject: Subject) -> list[Problem]:
    """Two tokens change places: the others must notice, or the model is blind to word order (say, without its RoPE)."""
    ids = subject.ids()
    swapped = ids.clone()
    swapped[:, [2, TOKENS - 2]] = ids[:, [TOKENS - 2, 2]]
    before, after = subject.runner.run(ids), subject.runner.run(swapped)
    others = [i for i in range(TOKENS) if i not in (2, TOKENS - 2)]
    gap = difference(after[:, others], before[:, others])
    if gap < subject.tolerance / 10:
        text = f"two tokens changed places, and the states of the others moved by {gap:.2g}: word order is ignored"
        return [Problem("blind-to-word-order", text)]
    return []


def heads(subject: Subject) -> list[Problem]:
    """In a layer that sees ahead every head must; one that does not has a mask of its own, which the others hide."""
    decoder = subject.decoder
    with recorded_calls(decoder.attentions if decoder else attention_modules(subject.model)) as calls:
        subject.runner.run(subject.ids())
    if len(calls) != len(subject.layers):
        return []
    columns, blind, unknown = [TOKENS // 2, TOKENS - 1], {}, []
    ahead = (torch.arange(TOKENS)[:, None] < torch.tensor(columns))[:, None]  # (seq, 1, columns)
    for layer, call in zip(subject.layers, calls, strict=True):
        if layer.verdict != "bidirectional":
            continue
        counts = [count for name in HEADS if isinstance(count := getattr(call.module, name, None), int)]
        count = next(iter(counts), decoder.config.num_attention_heads if decoder else None)
        if count is None or (outcome := by_head(call, count)) is None:
            unknown.append(layer.index)
            continue
        sees = (attention_influence(call, columns, 2, subject.seed, outcome)[0] & ahead).any(0).any(-1)  # (heads,)
        if not bool(sees.all()):
            blind[layer.index] = f"{int((~sees).sum())} of {count} heads of layer {layer.index}"
    if unknown:
        what = "their number or their output projection is not known"
        subject.notes.append(f"heads were not measured one by one in {len(unknown)} layers: {what}")
    if blind:
        text = f"{', '.join(blind.values())} attend to no later token, while the others do"
        return [Problem("heads-differ", text, tuple(blind))]
    return []


def elsewhere(subject: Subject) -> list[Problem]:
    """Tokens must influence earlier ones if and only if the model is bidirectional, in a longer text, too.

    And in train mode; of a decoder that we know, each layer is measured there (`train_mode`).
    """
    runner, bidirectional, problems = subject.runner, subject.verdict == "bidirectional", []
    tables = [m.num_embeddings for m in subject.model.modules() if isinstance(m, nn.Embedding)]  # some of positions
    longest = min(LONG, subject.max_tokens, *(size for size in tables if TOKENS < size != runner.vocab_size))
    modes = [("depends-on-length", longest, f"with {longest} tokens", nullcontext())]
    if subject.decoder is None:
        modes.append(("train-eval-mismatch", TOKENS, "in train mode", _training_without_dropout(subject.model)))
    for kind, n, where, mode in modes:
        late = torch.arange(n) >= n // 2
        try:
            with mode:
                changed = changed_outputs(runner.run, subject.ids(1, n), late, runner.vocab_size)[0]
        except AuditError as error:
            subject.notes.append(f"the model was not measured {where}: {error}")
            continue
        if bool(changed[~late].any()) != bidirectional:
            influence = "do not influence" if bidirectional else "influence"
            problems.append(Problem(kind, f"{where}, tokens {influence} earlier ones"))
    return problems


def entry(subject: Subject) -> list[Problem]:
    """Called through its head or as the bare layer stack, the model must compute the same states."""
    stack = subject.decoder.stack
    if stack is subject.model:
        return []
    ids = subject.ids().to(subject.runner.device)
    with torch.no_grad():
        bare = first_tensor(stack(input_ids=ids, use_cache=False))
    gap = difference(bare, subject.runner.run(ids))
    if gap > subject.tolerance:
        text = f"called directly, the layer stack {type(stack).__name__} gives states that differ by {gap:.1%}"
        return [Problem("depends-on-entry", text)]
    return []


def cache(subject: Subject) -> list[Problem]:
    """With the KV cache on, one pass over a text must give what it gives with the cache off."""
    gap = difference(subject.runner.run(subject.ids(), use_cache=True), subject.runner.run(subject.ids()))
    if gap > subject.tolerance:
        return [Problem("depends-on-cache", f"with use_cache=True the states differ by {gap:.1%}")]
    return []


def backends(subject: Subject) -> list[Problem]:
    """The layers must see the same under eager and under sdpa, without and with padding."""
    config, here = subject.decoder.config, subject.decoder.backend
    own, finite, problems = _all_cells(subject), _is_finite(subject), []
    for other in ("eager", "sdpa"):
        if other == here:
            continue
        if other == "sdpa" and not getattr(subject.decoder.stack, "_supports_sdpa", True):
            subject.notes.append(f"{type(subject.decoder.stack).__name__} has no attention backend 'sdpa'")
            continue
        try:
            with replaced(config, _attn_implementation=other):
                theirs, finite_there = _all_cells(subject), _is_finite(subject)
        except (ValueError, NotImplementedError, ConversionError, AuditError) as error:
            subject.notes.append(
                f"the attention backend {other!r} does not run this model ({str(error).splitlines()[0]})"
            )
            continue
        differing = _differing(own, theirs)
        if differing:
            text = f"what {len(differing)} layers see depends on the attention backend: {here!r} and {other!r} disagree"
            problems.append(Problem("depends-on-backend", text, differing))
        elif finite and not finite_there:
            text = f"under the attention backend {other!r} a padded batch gives NaN or infinite numbers"
            problems.append(Problem("depends-on-backend", text))
    return problems


def train_mode(subject: Subject) -> list[Problem]:
    """In train mode, dropout set to 0, every layer must see what it sees in evaluation mode."""
    own = _all_cells(subject)
    with _training_without_dropout(subject.model):
        differing = _differing(own, _all_cells(subject))
    if differing:
        text = f"{len(differing)} layers attend to something else in train mode than in evaluation mode"
        return [Problem("train-eval-mismatch", text, differing)]
    return []


def computation(subject: Subject, reference: nn.Module) -> list[Problem]:
    """With the causal mask put into both, the model must compute what the reference computes."""
    try:
        theirs = Runner(reference, find_decoder(reference))
        ids = subject.ids(2)
        with masked(subject.model, causal()):
            mine = subject.runner.run(ids)
        with masked(reference, causal()):
            expected = theirs.run(ids)
    except (ModelError, ConversionError) as error:
        subject.notes.append(f"the computation was not compared with the reference: {error}")
        return []
    if mine.shape != expected.shape:
        text = f"its states have shape {tuple(mine.shape)}, the reference's {tuple(expected.shape)}"
        return [Problem("computation-changed", text)]
    gap = difference(mine, expected)
    if not gap <= subject.tolerance:
        text = f"with the causal mask put back, the states differ from the reference's by {gap:.1%}: more has changed"
        return [Problem("computation-changed", text)]
    return []


def difference(a: Tensor, b: Tensor) -> float:
    """Size of a - b relative to b, over all positions (0 = equal)."""
    a, b = a.float().cpu(), b.float().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def _all_cells(subject: Subject) -> list[Tensor]:
    """Measured cells of each layer, (4, n, n): a full, a right-padded and a left-padded row, and an unpadded one."""
    n = 8
    real = torch.ones(3, n, dtype=torch.bool)
    real[1, -2:], real[2, :2] = False, False
    collected = []
    for mask in (real, None):
        with recorded_calls(subject.decoder.attentions) as calls:
            subject.runner.run(subject.ids(3 if mask is not None else 1, n), mask)
        rows = real if mask is not None else torch.ones(1, n, dtype=torch.bool)
        inside = rows[:, :, None]  # what padded queries see is of no consequence
        collected.append([attention_influence(call, range(n), 2, subject.seed, real=rows) & inside for call in calls])
    return [torch.cat(pair) for pair in zip(*collected, strict=True)]


def _is_finite(subject: Subject) -> bool:
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, -3:] = False
    return bool(subject.runner.run(subject.ids(2), real).isfinite().all())


def _differing(a: list[Tensor], b: list[Tensor]) -> tuple[int, ...]:
    return tuple(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y))


@contextmanager
def _training_without_dropout(model: nn.Module) -> Iterator[None]:
    """For the block the model is in train mode; afterwards its running averages (BatchNorm) are what they were."""
    with ExitStack() as stack:
        for module in model.modules():
            for name, value in list(vars(module).items()):
                is_dropout = "dropout" in name or (name == "p" and isinstance(module, nn.Dropout))
                if isinstance(value, float) and value and is_dropout:
                    stack.enter_context(replaced(module, **{name: 0.0}))
        for buffer in model.buffers():
            stack.callback(buffer.copy_, buffer.clone())
        stack.callback(model.eval)
        model.train()
        yield
