"""What the full audit measures beyond the mask: windows, positions, packing, cache, backends, train mode, computation.

Each check is a function of the `Subject`: it yields the problems that it measured, and adds what it could not measure
to the notes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from labkit.auditing.probe import attention_influence, changed_outputs, recorded_calls
from labkit.auditing.report import LayerReport, Problem
from labkit.decoder import limits
from labkit.decoder.anatomy import SLIDING, Decoder, decoder_or_none, find_decoder
from labkit.decoder.hooks import ATTRIBUTE as LAYER_MASKS
from labkit.decoder.hooks import NO_WINDOW, masked, shrunken_windows
from labkit.decoder.packing import packed, why_not
from labkit.decoder.running import Runner, first_tensor, in_precision, replaced
from labkit.errors import AuditError, ConversionError, ModelError
from labkit.masks import causal

TOKENS, PADS = 12, 3
FEW_TOKENS = 8  # for the cells of all layers, which are measured again and again
MAX_TOKENS = 1100  # that are run in order to measure past a window; for a longer window, it is shrunk
LONG = 66  # tokens, for a mask that changes with the length, such as one in blocks of 64
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")  # what modules call the number of theirs
SHORT = (torch.float16, torch.bfloat16)
MARGIN = 8  # tokens run beyond a window, in order to measure where it ends
SMALL_WINDOW = 8  # what a window too long to run past is shrunk to
Reach = dict[int, tuple[int | None, int | None]]  # local layer -> tokens that it attends to on the left and right


@dataclass
class Subject:
    """The model under audit, with what is known of it so far."""

    model: nn.Module
    decoder: Decoder | None
    runner: Runner
    layers: list[LayerReport]
    verdict: str
    notes: list[str]
    reference: nn.Module | None = None

    @property
    def tolerance(self) -> float:
        """Relative difference of two outputs that counts as rounding: 0.1 %, or 5 % for 16-bit weights."""
        weight = next(self.model.parameters(), None)
        return 5e-2 if weight is not None and weight.element_size() < 4 else 1e-3

    def ids(self, batch: int = 1, n: int = TOKENS) -> Tensor:
        return self.runner.tokens(batch, n)

    def compared(self, kind: str, states: Tensor, expected: Tensor, text: str, times: float = 1.0) -> Iterator[Problem]:
        """A problem if the states differ by more than rounding, `times` as much as usual; `text` has a {gap}."""
        if (gap := difference(states, expected)) > times * self.tolerance:
            yield Problem(kind, text.format(gap=gap))


def run_all(subject: Subject, known: set[str]) -> list[Problem]:
    """Run every check that the model allows, after problems of the kinds `known`; fills in the reach of the layers."""
    decoder, takes = subject.decoder is not None, subject.runner.takes
    # else it is reported already that a text alone and a padded batch differ
    padding_is_right = not known & {"padding-flips-mask", "nan-rows", "pad-leak", "depends-on-batch"}
    checks = {
        windows: decoder,
        batch_and_positions: takes("attention_mask") and padding_is_right,
        packing: True,
        packed_batch: padding_is_right,
        word_order: subject.verdict == "bidirectional",
        heads: True,
        length_and_mode: subject.verdict in ("causal", "bidirectional"),
        entry_and_cache: decoder,
        backends_and_train_mode: decoder,
    }
    compare_outputs = (batch_and_positions, packed_batch, entry_and_cache)
    problems = []
    for check in (check for check, applies in checks.items() if applies):
        problems += _confirmed(subject, check) if check in compare_outputs else check(subject)
    return problems


def _confirmed(subject: Subject, check: Callable[[Subject], Iterator[Problem]]) -> list[Problem]:
    """The problems of a check; with 16-bit weights those that are also there in float32, if they can be run there.

    In some models the rounding of 16 bits grows to a fifth of their states, whatever their mask is.
    """
    problems = list(check(subject))
    if not problems or not any(weight.dtype in SHORT for weight in subject.model.parameters()):
        return problems
    kinds = {problem.kind for problem in problems}
    try:
        with in_precision(torch.float32, subject.model):
            problems = list(check(subject))
    except (AuditError, RuntimeError, ValueError) as error:  # too little memory, or flash attention
        subject.notes.append(f"{', '.join(sorted(kinds))}: not confirmed in float32: {error}")
        return problems
    if gone := kinds - {problem.kind for problem in problems}:
        subject.notes.append(f"{', '.join(sorted(gone))} in 16 bits is rounding: it is not there in float32")
    return problems


# -- windows -----------------------------------------------------------------------------------------------------------


def windows(subject: Subject) -> list[Problem]:
    """How far local layers attend to either side, measured on a sequence longer than the window."""
    decoder = subject.decoder
    if SLIDING not in decoder.layer_types or not subject.layers:
        return []
    configured = decoder.config.sliding_window
    limit = min(MAX_TOKENS, limits.position_limit(decoder.config) or MAX_TOKENS)
    shrink = 0 if configured + 2 * MARGIN <= limit else configured - SMALL_WINDOW
    if shrink and configured < NO_WINDOW:
        subject.notes.append(f"windows were measured shrunk by {shrink} tokens, not to run a sequence longer than them")
    for refine in (False, True):  # small changes on a long sequence are slow: only to confirm a finding
        reach = _measured_reach(subject, configured - shrink + 2 * MARGIN, shrink, refine)
        if not (problems := _window_problems(subject, reach)):
            break
    subject.layers = [replace(layer, reach=reach.get(layer.index)) for layer in subject.layers]
    return problems


def _measured_reach(subject: Subject, n: int, shrink: int, refine: bool) -> Reach:
    """The reach of the local layers, None = no limit met, in n tokens and with windows shrunk by so many."""
    decoder = subject.decoder
    local = [i for i, kind in enumerate(decoder.layer_types) if kind == SLIDING]
    with shrunken_windows(decoder, shrink), recorded_calls([decoder.attentions[i] for i in local]) as calls:
        subject.runner.run(subject.ids(1, n))
    early, late, reach = MARGIN // 2, n - 1 - MARGIN // 2, {}
    for i, call in zip(local, calls, strict=True):
        cells = attention_influence(call, [early, late], refine=refine)[0]  # (n, 2)
        left = max([int(q) - early for q in cells[:, 0].nonzero()], default=0)  # last query that attends to `early`
        right = max([late - int(q) for q in cells[:, 1].nonzero()], default=0)
        reach[i] = tuple(None if r >= n - 1 - early else r + (shrink if r else 0) for r in (left, right))
    return reach


def _declared_reach(subject: Subject) -> int | None:
    """Tokens that a local layer should reach to a side: by the recorded conversion, else by the config's window.

    By the config of the reference, if there is one, because a change of the window need not be meant.
    """
    decoder, local = subject.decoder, subject.decoder.layer_types.index(SLIDING)
    if decoder.conversion is not None:
        window = decoder.converted_window(local)
        return None if window is None else window - 1
    if subject.verdict != "causal" and (both_sides := getattr(decoder.config, "local_attention", None)):  # ModernBERT
        return both_sides // 2
    original = None if subject.reference is None else decoder_or_none(subject.reference)
    window = None if original is None else original.causal_window(local)
    return (decoder.causal_window(local) if window is None else window) - 1


def _window_problems(subject: Subject, reach: Reach) -> list[Problem]:
    """One problem per kind, with its layers and the reach of the first of them."""
    declared, layers_of = _declared_reach(subject), {}
    for i, (left, right) in reach.items():
        bidirectional = subject.layers[i].verdict == "bidirectional"
        if right not in (0, left):
            layers_of.setdefault("one-sided-window", []).append(i)
        sides = (left, right) if bidirectional else (left,)
        if (wrong := next((side for side in sides if side != declared), declared)) == declared:
            continue
        kind = "window-differs"
        if None in (wrong, declared):
            kind = "window-lost"
        elif bidirectional and abs(wrong - declared) == 1:
            kind = "window-off-by-one"
        layers_of.setdefault(kind, []).append(i)
    problems = []
    for kind, layers in layers_of.items():
        left, right = map(_tokens, reach[layers[0]])
        text = f"local layers attend to {left} on the left and {right} on the right; declared is a reach of {declared}"
        problems.append(Problem(kind, text, layers))
    return problems


def _tokens(reach: int | None) -> str:
    return "all tokens" if reach is None else f"{reach} tokens"


# -- batches, positions and packing ------------------------------------------------------------------------------------


def batch_and_positions(subject: Subject) -> Iterator[Problem]:
    """The same text alone, in a batch, beside padded rows, and padded left or right, must give the same states."""
    run, ids, short = subject.runner.run, subject.ids(3), TOKENS - PADS
    real = torch.ones(3, TOKENS, dtype=torch.bool)
    alone, alone_short = (run(ids[:1, :n], real[:1, :n]) for n in (TOKENS, short))
    many = run(ids, real)
    real[1, short:], real[2, :PADS] = False, False
    ids[2] = ids[2].roll(PADS)  # the text of row 2 stands behind its pads
    padded = run(ids, real)
    text = "the states of a text differ by {{gap:.1%}} {} from those it has alone"
    problems = [
        *subject.compared("depends-on-batch", many[:1], alone, text.format("in a batch of equal rows")),
        *subject.compared("depends-on-batch", padded[:1], alone, text.format("beside padded rows")),
        *subject.compared("depends-on-batch", padded[1:2, :short], alone_short, text.format("padded on the right")),
    ]
    yield from problems[:1]
    # four times the tolerance, because in 16 bits a rotary angle is rounded differently at another position
    text = "padded on the left, the states of a text differ by {gap:.1%}: pads count as positions"
    yield from subject.compared("left-padding-position-shift", padded[2:, PADS:], alone_short, text, times=4)


def packing(subject: Subject) -> Iterator[Problem]:
    """Two documents in one row, positions restarting, with and without a 2-D mask: neither may influence the other.

    A leak is a problem where the documents are meant to be apart: in a model that labkit has converted, and in a causal
    language model of transformers, which isolates them where no mask is given. Of any other model it is a note.
    """
    runner, notes = subject.runner, subject.notes
    if not runner.takes("position_ids"):
        notes.append("the model takes no position_ids, so packed documents were not measured")
        return
    positions, second = torch.arange(TOKENS)[None] % (TOKENS // 2), torch.arange(TOKENS) >= TOKENS // 2
    masks = {"no attention_mask": None}
    if runner.takes("attention_mask"):
        masks["an attention_mask of ones"] = torch.ones(1, TOKENS, dtype=torch.bool)
        masks["an attention_mask of trailing pads"] = torch.arange(TOKENS)[None] < TOKENS - 2
    leaks = {}
    for title, real in masks.items():
        run = functools.partial(runner.run, real=real, position_ids=positions)
        later = second if real is None else second & real[0]
        try:
            forward = changed_outputs(run, subject.ids(), ~second, runner.vocab_size)[0, later].any()
            backward = changed_outputs(run, subject.ids(), later, runner.vocab_size)[0, ~second].any()
        except (AuditError, ConversionError) as error:
            notes.append(f"documents packed into one row with {title} were not measured: {error}")
            continue
        if forward or backward:
            leaks[title] = "both ways" if forward and backward else "forwards" if forward else "backwards"
    if not leaks:
        return
    where = ", ".join(f"{title} ({direction})" for title, direction in leaks.items())
    text = f"documents packed into one row (restarting position_ids) leak into each other with {where}"
    decoder = subject.decoder
    isolating = decoder is not None and type(decoder.config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if decoder is not None and hasattr(decoder.stack, LAYER_MASKS) or (isolating and "no attention_mask" in leaks):
        yield Problem("packing-leak", text)
    elif isolating:
        why = "transformers keeps them apart only without one"
        notes.append(f"packed documents leak into each other if the batch has an attention_mask: {why}")
    else:
        notes.append(f"{text}: the model does not keep them apart, so give each document its own row")


def packed_batch(subject: Subject) -> Iterator[Problem]:
    """A padded batch, packed: no text may influence another, and each must have the states that it has alone."""
    runner, lengths, name = subject.runner, (TOKENS, 5, 7, 3), "labkit.decoder.packing.packed"  # two texts in each row
    reason = why_not(subject.model) if runner.takes("attention_mask") else "it takes no attention_mask"
    ids, real = subject.ids(len(lengths)), torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    run, influenced = functools.partial(runner.run, real=real), False
    try:
        if reason:
            raise ConversionError(reason)
        with packed(subject.model):
            states = run(ids)[real]
            for text in torch.eye(len(lengths), dtype=torch.bool)[:, :, None]:  # an influence may be within rounding
                influenced |= bool(changed_outputs(run, ids, text & real, runner.vocab_size)[~text[:, 0]].any())
    except ConversionError as error:  # prefix tuning brings a cache
        subject.notes.append(f"{name} was not measured: {error}")
        return
    if influenced:
        yield Problem("packing-leak", f"under {name} texts influence each other")
        return
    alone = torch.cat([runner.run(ids[:1, :length])[0] for length in lengths])
    text = f"under {name} the states of texts differ by {{gap:.1%}} from those that they have alone"
    yield from subject.compared("packing-leak", states, alone, text)


# -- words, heads, lengths ---------------------------------------------------------------------------------------------


def word_order(subject: Subject) -> Iterator[Problem]:
    """If two tokens change places, the states of the others must change, or word order is ignored (a lost RoPE)."""
    ids, places = subject.ids(), [2, TOKENS - 2]
    swapped = ids.clone()
    swapped[:, places] = ids[:, places[::-1]]
    others = [i for i in range(TOKENS) if i not in places]
    gap = difference(subject.runner.run(swapped)[:, others], subject.runner.run(ids)[:, others])
    if gap < subject.tolerance / 10:
        text = f"two tokens changed places, and the states of the others moved by {gap:.2g}: word order is ignored"
        yield Problem("blind-to-word-order", text)


def heads(subject: Subject) -> Iterator[Problem]:
    """In a bidirectional layer every head must attend to later tokens: the others hide a head with its own mask."""
    decoder = subject.decoder
    with recorded_calls(subject.runner.attentions) as calls:
        subject.runner.run(subject.ids())
    if len(calls) != len(subject.layers):
        return
    columns, causal_heads, unknown = [TOKENS // 2, TOKENS - 1], {}, 0
    ahead = (torch.arange(TOKENS)[:, None] < torch.tensor(columns))[:, None]  # (seq, 1, columns)
    for layer, call in zip(subject.layers, calls, strict=True):
        if layer.verdict != "bidirectional":
            continue
        counts = [count for name in HEADS if isinstance(count := getattr(call.module, name, None), int)]
        count = next(iter(counts), decoder.config.num_attention_heads if decoder else None)
        if count is None or (by_head := call.by_head(count)) is None:
            unknown += 1
            continue
        cells = attention_influence(by_head, columns)[0]  # (seq, heads, columns)
        if blind := int((~(cells & ahead).any(0).any(-1)).sum()):
            causal_heads[layer.index] = f"{blind} of {count} heads of layer {layer.index}"
    if unknown:
        why = "their number or their output projection is not known"
        subject.notes.append(f"heads were not measured one by one in {unknown} layers: {why}")
    if causal_heads:
        text = f"{', '.join(causal_heads.values())} attend to no later token, while the others do"
        yield Problem("heads-differ", text, tuple(causal_heads))


def length_and_mode(subject: Subject) -> Iterator[Problem]:
    """Tokens must influence earlier ones if and only if the model is bidirectional, in a longer text, too.

    The same holds in train mode, where the layers of a known decoder are measured by `backends_and_train_mode`.
    """
    runner, bidirectional = subject.runner, subject.verdict == "bidirectional"
    tables = [m.num_embeddings for m in subject.model.modules() if isinstance(m, nn.Embedding)]  # some of positions
    longest = min([LONG, *(size for size in tables if TOKENS < size != runner.vocab_size)])
    modes = [("depends-on-length", longest, f"with {longest} tokens", nullcontext())]
    if subject.decoder is None:
        modes.append(("train-eval-mismatch", TOKENS, "in train mode", _training_without_dropout(subject.model)))
    for kind, n, where, mode in modes:
        late = (torch.arange(n) >= n // 2)[None]
        try:
            with mode:
                changed = changed_outputs(runner.run, subject.ids(1, n), late, runner.vocab_size)
        except AuditError as error:
            subject.notes.append(f"the model was not measured {where}: {error}")
            continue
        if bool(changed.any()) != bidirectional:
            influence = "do not influence" if bidirectional else "influence"
            yield Problem(kind, f"{where}, tokens {influence} earlier ones")


# -- ways of running a decoder -----------------------------------------------------------------------------------------


def entry_and_cache(subject: Subject) -> Iterator[Problem]:
    """Through its head, as the bare layer stack and with the KV cache on, the model must compute the same states."""
    stack, ids = subject.decoder.stack, subject.ids()
    states = subject.runner.run(ids)
    with torch.no_grad():
        bare = first_tensor(stack(input_ids=ids.to(subject.runner.device), use_cache=False))
    text = f"called directly, the layer stack {type(stack).__name__} gives states that differ by {{gap:.1%}}"
    yield from subject.compared("depends-on-entry", bare, states, text)
    if subject.runner.takes("use_cache"):
        text = "with use_cache=True the states differ by {gap:.1%}"
        yield from subject.compared("depends-on-cache", subject.runner.run(ids, use_cache=True), states, text)


def backends_and_train_mode(subject: Subject) -> Iterator[Problem]:
    """The layers must attend to the same under eager, under sdpa and in train mode, without and with padding."""
    stack, here = subject.decoder.stack, subject.decoder.backend
    own, finite = _all_cells(subject)

    def differing(cells: list[Tensor]) -> list[int]:
        return [i for i, (a, b) in enumerate(zip(own, cells, strict=True)) if not torch.equal(a, b)]

    for other in [name for name in ("eager", "sdpa") if name != here]:
        try:
            if other == "sdpa" and not getattr(stack, "_supports_sdpa", True):
                raise ValueError(f"{type(stack).__name__} has none")
            with replaced(stack.config, _attn_implementation=other):
                theirs, finite_there = _all_cells(subject)
        except (ValueError, NotImplementedError, ConversionError, AuditError) as error:
            cause = str(error).splitlines()[0]
            subject.notes.append(f"the attention backend {other!r} does not run this model ({cause})")
            continue
        if layers := differing(theirs):
            text = f"in {len(layers)} layers the mask depends on the attention backend: {here!r} and {other!r} differ"
            yield Problem("depends-on-backend", text, layers)
        elif finite and not finite_there:
            text = f"under the attention backend {other!r} a padded batch gives NaN or infinite numbers"
            yield Problem("depends-on-backend", text)
    with _training_without_dropout(subject.model):
        in_training, _ = _all_cells(subject)
    if layers := differing(in_training):
        text = f"{len(layers)} layers attend to something else in train mode than in evaluation mode"
        yield Problem("train-eval-mismatch", text, layers)


def computation(subject: Subject) -> Iterator[Problem]:
    """With the causal mask put into both, the model must compute what the reference computes."""
    reference = subject.reference
    try:
        ids, theirs = subject.ids(2), Runner(reference, find_decoder(reference))
        with masked(subject.model, causal()), masked(reference, causal()):
            states, expected = subject.runner.run(ids), theirs.run(ids)
    except (ModelError, ConversionError) as error:
        subject.notes.append(f"the computation was not compared with the reference: {error}")
        return
    text = "with the causal mask put back, the states differ from the reference's by {gap:.1%}: more has changed"
    yield from subject.compared("computation-changed", states, expected, text)


def difference(a: Tensor, b: Tensor) -> float:
    """Size of a - b relative to b, over all positions (0 = equal); infinite if their shapes or their NaNs differ."""
    a, b = a.float().cpu(), b.float().cpu()
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return torch.inf
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def _all_cells(subject: Subject) -> tuple[list[Tensor], bool]:
    """Measured cells of each layer, (4, n, n): a full, a right-padded and a left-padded row, and an unpadded one.

    And whether the outputs were finite.
    """
    finite, cells = True, []
    padded = torch.ones(3, FEW_TOKENS, dtype=torch.bool)
    padded[1, -2:], padded[2, :2] = False, False
    for real in (padded, torch.ones(1, FEW_TOKENS, dtype=torch.bool)):
        with recorded_calls(subject.decoder.attentions) as calls:
            out = subject.runner.run(subject.ids(len(real), FEW_TOKENS), None if bool(real.all()) else real)
        finite = finite and bool(out[real.to(out.device)].isfinite().all())
        inside = real[:, :, None]  # what padded queries attend to is of no consequence
        cells.append([attention_influence(call, range(FEW_TOKENS), real=real) & inside for call in calls])
    return [torch.cat(pair) for pair in zip(*cells, strict=True)], finite


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
