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
- under several conditions: with an attention mask of ones, with right and with left padding, with pad tokens and no
  mask, with options that add outputs, in train mode;
- with a key-value cache, in chunks and token by token: the outputs must be those of one pass;
- with attention scores multiplied by up to a million, which a mask that is a finite number does not withstand;
- with labels: the model's own loss must compare position i with token i + 1, and no output may depend on a label.

A difference that is as small as rounding counts only if it is also there in float64. Experts that gather their tokens
round differently when other tokens join them, and this is not a leak.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from labkit.auditing.leak_probe import PADS, STRESS, Condition, LeakProbe, scores_times
from labkit.auditing.probe import measured_influence, relative_change
from labkit.auditing.report import Leak, LeakReport, layer_list
from labkit.decoder.anatomy import CACHE
from labkit.decoder.running import BODY_MEASURED, in_precision, random_state_kept, without_mlps
from labkit.errors import AuditError
from labkit.files import quiet_libraries

__all__ = ["Leak", "LeakReport", "find_leaks"]

TOKENS = 16
TRIES = 192  # random changes of several tokens
# Every second length is not a multiple of a power of two, because a last block that is not full may have its own code.
LENGTHS = (39, 64, 135, 256, 519, 1024)
BUDGET = {"cpu": 2e11, "cuda": 2e13}  # tokens times weights (embeddings not counted) that longer texts may cost
OPTION = re.compile(r"(output|return|need)_\w+|use_cache")
REPEATED, CACHED = 0.01, 1e-3  # relative differences that two runs, or a cache and one pass, may show by rounding


def find_leaks(model: nn.Module, *, tokens: int = TOKENS, vocab_size: int | None = None, seed: int = 0) -> LeakReport:
    """Measure whether an output of `model` depends on later tokens, in all the ways listed at the top of this module.

    Args:
        model: maps `input_ids` (batch, seq) to logits or states (batch, seq, ...); a transformers model, a
            `labkit.gpt.GPT`, or your own. It is left as it was.
        tokens: length of the text whose tokens are changed one by one; at most the model's context is used.
        vocab_size: number of token ids, if the model has no `nn.Embedding` to read it from.
        seed: of the texts, and of the dropout in train mode, which is the same in every run.

    Raises:
        AuditError: fewer than two tokens or a vocabulary of one, so that there is nothing to change; or a model that
            cannot be called on token ids, or gives no output per position, or no numbers.
    """
    probe = LeakProbe(model, tokens, vocab_size, seed)
    with _left_as_it_was(model), random_state_kept(), quiet_libraries():
        model.eval()
        leaks = _from_earlier_calls(probe)
        influence = probe.influence()
        leaks = leaks or _all_others(probe, influence)  # what else leaks cannot be measured if runs differ by chance
    if probe.runner.pooled:
        probe.note(BODY_MEASURED)
    if not probe.attentions:
        probe.note("no attention modules were found: leaks were not located in layers, and scores were not raised")
    return LeakReport(type(model).__name__, leaks, influence, probe.tries, probe.longest, probe.notes)


def _all_others(probe: LeakProbe, influence: Tensor) -> list[Leak]:
    n, rng = probe.ids.size(1), torch.Generator().manual_seed(probe.seed)
    cuts = (torch.randperm(TRIES, generator=rng) % (n - 1) + 1).tolist()
    probe.measure_masks()
    leaks = _between_rows(probe)
    if not bool(influence.tril(-1).any()):
        text = "no token influences any other, not even a later one: nothing was tested (are some weights 0?)"
        leaks.append(Leak("no-influence", text))
    if future := probe.leaks_in(influence):
        leaks += future + _under_conditions(probe, influence)
    elif rare := probe.leaks_in_tails(n, cuts) or _in_long_texts(probe):
        finite = all(leak.layers and probe.finite.keys() >= set(leak.layers) for leak in rare)
        leaks += (_under_stress(probe) if finite else []) or rare
        probe.note("other ways of calling the model were not tried, because this leak may show there, too")
    else:
        leaks += _under_stress(probe) + _with_cache(probe) + _under_conditions(probe, influence)
    return leaks + _with_labels(probe)


def _from_earlier_calls(probe: LeakProbe) -> list[Leak]:
    first, _, again = (probe.run(ids) for ids in (probe.ids, probe.ids.flip(1), probe.ids))
    if (change := float(relative_change(again, first).max())) <= REPEATED:
        return []
    text = (
        f"the same tokens gave other outputs in a later call, by {change:.2g} of their size: the model keeps something "
        "from earlier calls, or draws random numbers; nothing else was measured"
    )
    return [Leak("not-repeatable", text)]


def _between_rows(probe: LeakProbe) -> list[Leak]:
    """Exchange every second row of a batch: do the others change? Then later runs have one row."""

    rows, turns, rng = torch.arange(8), torch.arange(4), torch.Generator().manual_seed(probe.seed)
    ids = probe.ids[0, torch.rand(8, probe.ids.size(1), generator=rng).argsort(1)]  # (8, n)
    exchanged = rows[:, None] % 2 == turns % 2  # (8, 4)

    def changed(turn: int, draw: int) -> Tensor:
        return torch.where(exchanged[:, [turn]], ids.flip(0, 1).roll(turn, 1), ids)

    def exchange_rows() -> Tensor:
        return measured_influence(probe.run, ids, changed, turns.tolist()).masked_fill(
            exchanged[:, None], 0.0
        )  # (8, n, 4)

    try:
        largest = float(probe.confirmed(exchange_rows(), exchange_rows).max())
    except AuditError as error:
        probe.note(f"only one text at a time was run: {error}")
        probe.batch = 1
        return []
    if largest == 0:
        return []
    probe.batch = 1
    return [Leak("batch", f"rows of a batch influence each other: a row changes by {largest:.2g} when others do")]


def _in_long_texts(probe: LeakProbe) -> list[Leak]:
    """The cuts lie in the last block, which may not be full, on a border between blocks, and inside full blocks."""
    model, device, spent = probe.model, probe.runner.device.type, 0
    if probe.context is None and device != "cpu":
        probe.note("longer texts were not tried: the model's config states no context length")
        return []
    embeddings = {w for m in model.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    weights = sum(w.numel() for w in model.parameters() if w not in embeddings)
    longest = min(probe.context or LENGTHS[-1], LENGTHS[-1])
    for n in sorted(n for n in {*LENGTHS, longest} if probe.ids.size(1) < n <= longest):
        spent += 8 * n * weights  # two passes of four texts
        if spent > BUDGET.get(device, BUDGET["cuda"]):
            break
        border = 1 << (n - 1).bit_length() - 1  # of blocks whose size is any power of two
        cuts = (n - 1, border, border - 1, n // 3)
        if n <= 64 and n * n * weights < BUDGET["cpu"] / 20:  # cheap enough to try the borders of all blocks
            cuts = range(1, n)
        try:
            if leaks := probe.leaks_in_tails(n, cuts):
                return leaks
        except AuditError as error:
            probe.note(f"longer texts were not tried: {error}")
            break
    return []


def _conditions(probe: LeakProbe) -> list[Condition]:
    """The ways of calling this model beside the plain one, in which its mask may be another."""
    masks = {"pad tokens": "with pad tokens and no attention mask"}
    if probe.runner.takes("attention_mask"):
        masks |= {"ones": "with an attention mask of ones", "right": "with right padding of changing length"}
        masks["left"] = "with left padding"
    else:
        probe.note("not tried, because the model does not take it: attention_mask")
    parameters = inspect.signature(probe.model.forward).parameters
    options = {name: p.default is not True for name, p in parameters.items() if OPTION.fullmatch(name)}
    if probe.runner.takes_anything and probe.decoder:
        options |= {"output_attentions": True, "use_cache": True}
    if not options:
        probe.note("not tried, because the model does not take it: output_attentions")
    ways = [Condition("attention-mask", words, mask) for mask, words in masks.items()]
    ways += [Condition("option", f"with {name}={value}", options={name: value}) for name, value in options.items()]
    ways.append(Condition("train-mode", "in train mode", train=True))
    return ways + [Condition("train-mode", f"in train mode {masks[mask]}", mask, train=True) for mask in masks]


def _under_conditions(probe: LeakProbe, influence: Tensor) -> list[Leak]:
    """Leaks that show only under one of the `_conditions`."""
    n, known, leaks, rare_with = probe.ids.size(1), influence.triu(1), [], set()

    def new_cells(columns: Sequence[int] | None = None) -> Tensor:
        """What this condition adds to the known leaks, apart from changes that rounding may have hidden in them."""
        changes, least = probe.influence(columns).triu(1), min(0.01 * float(known.max()), probe.rounding)
        return torch.where((known == 0) & (changes > least), changes, 0.0)

    for condition in _conditions(probe):
        probe.condition = condition
        probe.model.train(condition.train)
        pads = 0 if condition.mask in (None, "ones") else min(PADS, n // 4)
        cuts, rare = [1 + pads + k * (n - 1 - 2 * pads) // 8 for k in range(8)], []
        try:  # a cheap measurement first, and all cells only if it shows something
            if bool(known.any()):
                if not bool(new_cells(sorted({1, n // 2, n - 1})).any()):
                    continue
            elif not (rare := probe.leaks_in_tails(n, cuts)):
                continue
            new = new_cells()
        except AuditError as error:
            probe.note(f"{condition.words}: not tried: {error}")
            continue
        leaks += probe.leaks_in(new)
        if not bool(new.any()) and condition.mask not in rare_with:
            leaks += rare
            rare_with.add(condition.mask)
        known = known + new
    probe.condition = Condition()
    probe.model.eval()
    return leaks


def _with_cache(probe: LeakProbe) -> list[Leak]:
    """Outputs computed with a key-value cache, in chunks and token by token, must be those of one pass."""
    runner, ids, leaks = probe.runner, probe.ids, []
    n, caches = ids.size(1), []
    if not ({CACHE, "use_cache"} <= runner.parameters or (runner.takes_anything and probe.decoder)):
        probe.note("not tried, because the model does not take it: a key-value cache")
        return []

    def change(parts: Sequence[Tensor]) -> Tensor:
        whole, outputs = probe.run(ids), []
        for part in parts:
            given = {CACHE: caches[-1]} if outputs else {}
            outputs.append(probe.run(part, use_cache=True, **given))
            if not caches or caches[-1] is None:
                raise AuditError("the model returned no cache")
            if probe.decoder and given and caches[-1] is not given[CACHE]:
                raise AuditError("the model puts another cache in place of the one it is given, as prefix tuning does")
        gap = relative_change(torch.cat(outputs, 1), whole).cpu()
        return gap.masked_fill(gap <= CACHED, 0.0)

    ways = {
        "in chunks": [part for part in ids.tensor_split(3, 1) if part.size(1)],
        "token by token": [ids[:, : n // 2], *ids[:, n // 2 :].split(1, 1)],
    }
    handle = probe.model.register_forward_hook(lambda m, args, out: caches.append(getattr(out, CACHE, None)))
    try:
        for words, parts in ways.items():
            changes = probe.confirmed(change(parts), functools.partial(change, parts), torch.inf)[0]
            if bool(changes.any()):
                i = int(changes.argmax())
                text = f"with a key-value cache, {words}, outputs differ from those of one pass"
                leaks.append(Leak("cache", f"{text} (the most: position {i}, by {float(changes[i]):.2g} of its size)"))
    except AuditError as error:
        probe.note(f"with a key-value cache: not tried: {error}")
    finally:
        handle.remove()
    return leaks


def _under_stress(probe: LeakProbe) -> list[Leak]:
    """Multiply every attention score by growing factors: a mask that is only a large number fails at one of them."""
    if fixed := [i for i in range(len(probe.attentions)) if i not in probe.levers]:
        why = "no `scaling`, and no effect of the size of the input, or no call that can be replayed"
        probe.note(f"{layer_list(fixed)}: scores cannot be raised ({why}); finite masks were not looked for")
    n, levers = probe.ids.size(1), {probe.attentions[i]: lever for i, lever in probe.levers.items()}
    skipping = without_mlps(probe.decoder) if probe.decoder else nullcontext()
    with in_precision(torch.float32, probe.model, [torch.float16]), skipping:
        for factor in STRESS if levers else ():
            with scores_times(factor, levers):
                try:
                    if bool(probe.influence(sorted({1, n // 2, n - 1})).triu(1).any()):
                        return [probe.finite_mask(probe.influence(), factor)]
                except AuditError:
                    probe.note(f"with attention scores {factor:,.0f} times as large the outputs are NaN or infinite")
                    break
    return []


@torch.no_grad()
def _with_labels(probe: LeakProbe) -> list[Leak]:
    """Which logits does the model's own loss compare with the label at j? They should be those of position j - 1.

    Two labels are tried at j; the difference of the losses is that of two logits, whatever else enters the loss. No
    logit at or before j may depend on the label.
    """
    model, ids, j = probe.model, probe.ids.to(probe.runner.device), probe.ids.size(1) // 2

    def in_output(with_other: Tensor, with_one: Tensor) -> list[Leak]:
        if (largest := float(relative_change(with_other, with_one)[0, : j + 1].max())) <= REPEATED:
            return []
        text = f"the outputs depend on the labels of the same or a later position, by {largest:.2g} of their size"
        return [Leak("labels-in-output", text)]

    if "targets" in probe.runner.parameters:  # a model written by hand; whether its caller shifts them is not known
        other = torch.cat([ids[:, :j], ids.flip(1)[:, j:]], dim=1)
        return in_output(probe.run(probe.ids, targets=other), probe.run(probe.ids, targets=ids))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or "labels" not in probe.runner.parameters:
        return []

    def answer(label: int):
        labels = torch.full_like(ids, -100)
        labels[0, j] = label
        torch.manual_seed(probe.seed)
        return model(input_ids=ids, labels=labels)

    out = answer(int(ids[0, j]))
    if not isinstance(getattr(out, "loss", None), Tensor) or out.loss.ndim or out.logits.shape[:2] != ids.shape:
        return []
    logits = out.logits[0].float()
    contrast = logits[j - 1] - logits[j]  # the two labels whose logits differ most between these positions
    one, other = int(contrast.argmax()), int(contrast.argmin())
    with_one, with_other = answer(one), answer(other)
    if leaks := in_output(with_other.logits, with_one.logits):
        return leaks
    difference = float(with_other.loss) - float(with_one.loss)
    errors = (logits[:, one] - logits[:, other] - difference).abs()  # (positions,)
    at, tolerance = int(errors.argmin()), 1e-3 * (1 + abs(difference))
    if at == j - 1 or errors[j - 1] <= tolerance:
        return []
    if errors[at] > tolerance:
        probe.note("the model's own loss is not the cross entropy of its logits: its labels were not checked")
        return []
    place = f"{j - at} place(s) after it" if at < j else f"{at - j} place(s) before it" if at > j else "it was given"
    text = f"the model's loss compares the logits at a position with the token {place}, not with the next one"
    return [Leak("labels-misplaced" if at < j else "labels-not-shifted", text, ((at, j),))]


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards attributes (such as the mode), hooks and buffers (running averages) are as before."""
    modules = [(module, vars(module).copy(), module._forward_hooks.copy()) for module in model.modules()]
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        for module, attributes, hooks in modules:
            vars(module).clear()
            vars(module).update(attributes)
            module._forward_hooks.clear()  # transformers leaves some where attention weights were asked for
            module._forward_hooks.update(hooks)
        for module, name, buffer, content in buffers:
            module._buffers[name] = buffer.copy_(content)
