"""The leak meter: train a model as it is, and its unmasked twin, and find out whose loss is too good to be true.

A model that attends to the token that it has to predict learns to copy it. Its loss falls below what is possible: below
ln V on uniformly random tokens, where nothing can be known of the next one. The same model fails as soon as the future
is really absent, which is when a text is generated.

Chance raises no alarm. The likelihood of random tokens under an honest model, divided by that of guessing, is 1 on
average, so a mean loss over N tokens lies more than s/N below ln V with probability e^-s at most (Markov's inequality;
in training, where the model changes on the way, Ville's). Here s is 14: once in a million.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from labkit import masks
from labkit.auditing.report import table
from labkit.convert import to_bidirectional
from labkit.decoder.anatomy import decoder_or_none
from labkit.decoder.running import evaluating, first_tensor, random_state_kept
from labkit.errors import ConversionError, DataError, ModelError, TrainingError, needs_extra
from labkit.gpt import GPT
from labkit.objectives import generator

AS_BUILT, UNMASKED = "as built", "unmasked"
CERTAINTY = 14.0  # e^-14: the chance of a false alarm, about one in a million
MEASURING = 10**9  # the row numbers from here on are for measuring, and are never trained on
MEASURED_ROWS, FEW_ROWS = 64, 16


@dataclass
class Arm:
    """One way of training, over the seeds. Losses in nats per token; lists hold one number per seed.

    Attributes:
        steps: after how many steps the curves were measured.
        curves: teacher-forced loss on held-out text, per seed, one number per entry of `steps`.
        truncated: the loss when the future is really absent: each token is predicted from the tokens before it alone.
        in_sight: the loss on the same rows with the later tokens in the input. For an honest model it is the same.
        copy_rate: how often a position predicts the random token that is put after it. In train mode, with dropout:
            copy_rate_training.
        reported: the training loss at the end. next_token: the loss of the next token on the same logits.
        free_running: the honest model's loss on text that this one generates; empty where there is no honest model.
    """

    name: str
    steps: list[int]
    curves: list[list[float]]
    truncated: list[float]
    in_sight: list[float]
    copy_rate: list[float]
    copy_rate_training: list[float]
    reported: list[float]
    next_token: list[float]
    free_running: list[float] = field(default_factory=list)

    @property
    def teacher_forced(self) -> list[float]:
        return [curve[-1] for curve in self.curves]


@dataclass(frozen=True)
class LeakMeter:
    """What `leak_meter` measured. `floor` is ln V, None on real text; `leaks` says which arms leak and why."""

    arms: dict[str, Arm]
    floor: float | None
    leaks: dict[str, str]
    seeds: tuple[int, ...]

    @property
    def clean(self) -> bool:
        return AS_BUILT not in self.leaks

    def __str__(self) -> str:
        columns = {
            "teacher-forced": [arm.teacher_forced for arm in self.arms.values()],
            "truncated": [arm.truncated for arm in self.arms.values()],
            "generated text": [arm.free_running for arm in self.arms.values()],
            "copies": [arm.copy_rate for arm in self.arms.values()],
        }
        columns = {name: values for name, values in columns.items() if any(values)}  # random tokens: no generated text
        rows = [("", *columns)]
        for arm, *cells in zip(self.arms, *columns.values(), strict=True):
            rows.append((arm, *map(_mean_and_interval, cells)))
        floor = "" if self.floor is None else f"; floor ln V = {self.floor:.3f}"
        lines = [table(rows), f"nats per token, mean and 95 % interval over {len(self.seeds)} seeds{floor}"]
        return "\n".join(lines + [f"leak: {name}: {why}" for name, why in self.leaks.items()])

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps({"clean": self.clean} | asdict(self), indent=1)


def leak_meter(
    model: nn.Module | Callable[[int], nn.Module],
    data: Tensor | int,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 300,
    batch_size: int = 16,
    length: int = 32,
    learning_rate: float = 3e-3,
) -> LeakMeter:
    """Train `model` as it is and its unmasked twin, from the same weights, in the same order, once per seed.

    Args:
        model: maps ids (batch, seq) to logits (batch, seq, vocab); or a factory `seed -> model`. Copies are trained, in
            float32. A `labkit.gpt.GPT` or a transformers model gets an unmasked twin; your own is measured as it is.
        data: token ids of a text, one line (tokens,), of which the last tenth is held out; or a whole number V:
            uniformly random tokens, V of them.
        loss: `loss(logits, ids)` that is trained on, in nats per token; by default the cross entropy of the next token.
            Give your own to find out whether its labels are right.
        seeds: of the factory, the order of the rows and dropout; two or more, all different.
    """
    seeds = tuple(seeds)
    if len(seeds) < 2 or len(set(seeds)) < len(seeds):
        raise DataError(f"an interval needs at least two seeds, all different, and {list(seeds)} were given")
    if min(steps, batch_size, length - 1) < 1:
        numbers = f"steps={steps}, batch_size={batch_size}, length={length}"
        raise DataError(f"{numbers}: give whole numbers from 1, and a length from 2")
    study = _Study(data, length, loss or next_token_loss, steps, batch_size, learning_rate)
    trained: dict[str, list[nn.Module]] = defaultdict(list)
    measured: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for seed in tqdm(seeds, unit="seed", disable=None, leave=False):  # disable=None: on a terminal only
        for name, twin in _twins(model, seed, study).items():
            trained[name].append(twin)
            for key, number in (study.train(twin, seed) | study.measure(twin, seed)).items():
                measured[name][key].append(number)
    arms = {name: Arm(name, study.measured_at, **numbers) for name, numbers in measured.items()}
    floor = math.log(data) if isinstance(data, int) else None
    leaks = {name: why for name, arm in arms.items() if (why := _verdict(arm, floor, study))}
    if floor is None and AS_BUILT not in leaks:
        honest = trained[AS_BUILT]
        judges = honest[1:] + honest[:1]  # the judge is the honest model of another seed
        for name, models in trained.items():
            arms[name].free_running += map(study.free_running, models, judges, seeds)
    return LeakMeter(arms, floor, leaks, seeds)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean nats: the logits at position i against the token at i + 1. Shapes (batch, seq, vocab), (batch, seq)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """(batch, seq, vocab) from any model that maps ids to logits."""
    known = decoder_or_none(model) is not None
    return first_tensor(model(input_ids=ids, use_cache=False) if known else model(ids))


class _Study:
    """The rows, and how every twin is trained and measured.

    The rows are uniformly random, never the same twice, or lie at random places in a text, which is trained on in its
    first nine tenths and measured in its last. `alphabet`: the token ids that occur.
    """

    def __init__(self, data: Tensor | int, length: int, loss, steps: int, batch_size: int, rate: float):
        self.length, self.loss, self.steps, self.batch_size, self.rate = length, loss, steps, batch_size, rate
        self.measured_at = sorted({*range(0, steps + 1, max(1, steps // 20)), steps})
        self.last_steps = max(1, steps // 10)  # over which `Arm.reported` is averaged
        if isinstance(data, int):
            if data < 2:
                raise DataError(f"random tokens need a vocabulary of at least 2, not {data}")
            self.text, self.alphabet = None, torch.arange(data)
            return
        if data.ndim != 1 or data.is_floating_point() or int(data.min()) < 0:
            shape = f"{data.dtype} {tuple(data.shape)} from {data.min().item()}"
            raise DataError(f"a text is one line of token ids from 0, (tokens,), not {shape}")
        if len(data) <= 10 * length:
            raise DataError(f"a text of {len(data)} tokens is too short: to hold out a row, take {10 * length + 1}")
        self.text = data.long().cpu()
        self.alphabet = self.text.unique()

    def draw(self, count: int, seed: int, number: int, model: nn.Module) -> Tensor:
        """(count, length), where the model is; `number` counts the batches, from MEASURING on those to measure on."""
        rng, device = generator(seed, number), next(model.parameters()).device
        if self.text is None:
            return torch.randint(len(self.alphabet), (count, self.length), generator=rng).to(device)
        cut = len(self.text) * 9 // 10
        ids = self.text[cut:] if number >= MEASURING else self.text[:cut]
        starts = torch.randint(len(ids) - self.length, (count,), generator=rng)
        return ids.unfold(0, self.length, 1)[starts].to(device)

    def train(self, model: nn.Module, seed: int) -> dict[str, Any]:
        """Train on the same batches for every twin of a seed; `curves`, `reported` and `next_token`."""
        held_out = self.draw(MEASURED_ROWS, seed, MEASURING, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.0)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=self.last_steps)
        curve, losses = [], []
        with random_state_kept(seed):  # dropout
            for step in range(self.steps + 1):
                if step in self.measured_at:
                    with evaluating(model):
                        curve.append(float(next_token_loss(logits_of(model, held_out), held_out)))
                if step == self.steps:
                    break
                ids = self.draw(self.batch_size, seed, step, model)
                logits = logits_of(model.train(), ids)
                loss = self.loss(logits, ids)
                loss.backward()
                losses.append((float(loss.detach()), float(next_token_loss(logits.detach(), ids))))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                warmup.step()
        reported, next_token = map(statistics.mean, zip(*losses[-self.last_steps :], strict=True))
        if not math.isfinite(sum(curve) + reported):
            raise TrainingError(f"training diverged, from {curve[0]:.3f} to {curve[-1]:.3f}: lower the learning rate")
        return {"curves": curve, "reported": reported, "next_token": next_token}

    @torch.no_grad()
    def measure(self, model: nn.Module, seed: int) -> dict[str, float]:
        """The other numbers of an `Arm`; the model is left in evaluation mode."""
        ids = self.draw(FEW_ROWS, seed, MEASURING, model)
        copying = self.copy_rate(model.train(), ids, seed)
        model.eval()
        prefixes = [logits_of(model, ids[:, :i])[:, -1:] for i in range(1, ids.size(1) + 1)]
        return {
            "truncated": float(next_token_loss(torch.cat(prefixes, dim=1), ids)),
            "in_sight": float(next_token_loss(logits_of(model, ids), ids)),
            "copy_rate": self.copy_rate(model, ids, seed),
            "copy_rate_training": copying,
        }

    def copy_rate(self, model: nn.Module, ids: Tensor, seed: int) -> float:
        """Share of positions that predict the token put after them, drawn evenly from all: 1 in V if honest."""
        alphabet, rng, hits = self.alphabet, generator(seed, MEASURING + 1), []
        with random_state_kept(seed):
            for i in range(1, ids.size(1)):
                replaced = ids.clone()
                replaced[:, i] = alphabet[torch.randint(len(alphabet), (len(ids),), generator=rng)]
                hits.append(logits_of(model, replaced)[:, i - 1].argmax(-1) == replaced[:, i])
        return float(torch.stack(hits).float().mean())

    @torch.no_grad()
    def free_running(self, model: nn.Module, judge: nn.Module, seed: int) -> float:
        """The judge's mean nats on what this model generates, drawn token by token after a held-out quarter row."""
        ids = self.draw(FEW_ROWS, seed, MEASURING, model)
        text = ids[:, : (prompt := max(1, ids.size(1) // 4))]
        with random_state_kept(seed):
            while text.size(1) < ids.size(1):
                probabilities = logits_of(model, text)[:, -1].float().softmax(-1)
                text = torch.cat([text, torch.multinomial(probabilities, 1)], dim=1)
        return float(next_token_loss(logits_of(judge, text)[:, prompt - 1 :], text[:, prompt - 1 :]))


def _twins(model: nn.Module | Callable[[int], nn.Module], seed: int, study: _Study) -> dict[str, nn.Module]:
    """The model, or what the factory makes of this seed, and an unmasked copy where labkit can make one; in float32."""
    with random_state_kept(seed):
        as_built = copy.deepcopy(model if isinstance(model, nn.Module) else model(seed)).float()
    name, length, top = type(as_built).__name__, study.length, int(study.alphabet.max())
    ids = study.draw(1, 0, MEASURING, as_built)
    ids[0, 0] = top  # one row is tried, so that a model that does not fit the data is an error before training
    try:
        with evaluating(as_built):
            shape = tuple(logits_of(as_built, ids).shape)
    except (TypeError, ValueError, IndexError, RuntimeError, AttributeError) as error:
        raise DataError(f"{name} cannot be called on {length} token ids of up to {top}: {error}") from error
    if len(shape) != 3 or shape[:2] != (1, length) or shape[2] <= top:
        raise DataError(f"{name} gave {shape} for ids (1, {length}): expected (1, {length}, {top + 1} or more)")
    twin = copy.deepcopy(as_built)
    if type(twin) is GPT:
        twin.forward = functools.partial(twin.forward, mask=masks.bidirectional())
        return {AS_BUILT: as_built, UNMASKED: twin}
    try:
        return {AS_BUILT: as_built, UNMASKED: to_bidirectional(twin)}
    except (ModelError, ConversionError):  # no decoder that labkit knows, or not to be converted
        return {AS_BUILT: as_built}


def _verdict(arm: Arm, floor: float | None, study: _Study) -> str:
    """Why this arm leaks, or "". Chance is allowed for as the module's text says."""
    mean, row, limit = statistics.mean, study.length - 1, -math.inf if floor is None else floor
    if low := [loss for loss in arm.teacher_forced if loss < limit - CERTAINTY / (MEASURED_ROWS * row)]:
        return f"its loss on random tokens is {mean(low):.3f}; no causal model gets below the floor of {floor:.3f}"
    if any(abs(b - s) > 1e-3 * max(1.0, b) for s, b in zip(arm.in_sight, arm.truncated, strict=True)):
        full, short = mean(arm.in_sight), mean(arm.truncated)
        return f"its loss is {full:.3f} with the later tokens in sight, and {short:.3f} on the same text without them"
    chance, trials = 1 / len(study.alphabet), FEW_ROWS * row
    with needs_extra():
        from scipy import stats
    likelihoods = stats.binom.logsf([rate * trials - 0.5 for rate in arm.copy_rate_training], trials, chance)
    if bool((likelihoods < -CERTAINTY).any()):
        rates = f"{mean(arm.copy_rate_training):.0%} of random tokens ahead, in evaluation {mean(arm.copy_rate):.0%}"
        return f"in train mode it copies {rates}, by chance {chance:.0%}: train mode drops the mask"
    if mean(arm.reported) < 0.5 * mean(arm.next_token):
        due = f"on the same logits the loss of the next token is {mean(arm.next_token):.3f}"
        return f"its training reports {mean(arm.reported):.3f}, and {due}: the labels are misplaced (not shifted?)"
    tokens = study.last_steps * study.batch_size * row
    if low := [loss for loss in arm.reported if loss < limit - CERTAINTY / tokens]:
        cause = "train mode drops the mask, or the labels are misplaced"
        return f"its training reports {mean(low):.3f} on random tokens, below the floor of {floor:.3f}: {cause}"
    return ""


def _mean_and_interval(values: list[float]) -> str:
    """Mean and half of its 95 % interval, by Student's t."""
    with needs_extra():
        from scipy import stats
    return f"{statistics.mean(values):.3f} ± {stats.t.ppf(0.975, len(values) - 1) * stats.sem(values):.3f}"
