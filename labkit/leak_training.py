"""The leak meter: train a model as it is, and its unmasked twin, and see whose loss is too good to be true.

A model that sees the token it must name learns to copy it. Its loss falls below what is possible: below ln V on
uniformly random tokens, where nothing can be known of the next one. The same model is lost as soon as the future is
really absent, which is when a text is generated.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labkit import masks
from labkit.anatomy import decoder_or_none
from labkit.errors import LeakageError
from labkit.objectives import generator
from labkit.probe import evaluating, first_tensor

AS_BUILT, UNMASKED = "as built", "unmasked"


@dataclass(frozen=True)
class Arm:
    """One way of training, over the seeds. Losses in nats per token; lists hold one number per seed.

    Attributes:
        steps: after how many steps the curves were measured.
        curves: teacher-forced loss on held-out text, per seed, one number per entry of `steps`.
        truncated: the loss when the future is really absent: each token named from the tokens before it and no more.
        in_sight: on the very rows of `truncated`, the loss with the later tokens in the input. An honest model has the
            same loss, to rounding.
        free_running: the honest model's loss on text that this one generates; empty where there is no honest model.
        copy_rate: a token is replaced by a random one: how often the position before it names exactly that.
        reported: what the training itself said at its end: its own loss, in train mode.
    """

    name: str
    steps: list[int]
    curves: list[list[float]]
    truncated: list[float]
    in_sight: list[float]
    copy_rate: list[float]
    reported: list[float]
    free_running: list[float] = field(default_factory=list)

    @property
    def teacher_forced(self) -> list[float]:
        return [curve[-1] for curve in self.curves]


@dataclass(frozen=True)
class LeakMeter:
    """What `leak_meter` measured. `floor` is ln V on random tokens, None on real text; `leaks` the arms that leak."""

    arms: dict[str, Arm]
    floor: float | None
    leaks: dict[str, str]
    seeds: tuple[int, ...]

    @property
    def clean(self) -> bool:
        """Whether the model as it was built passes."""
        return AS_BUILT not in self.leaks

    def __str__(self) -> str:
        rows = [("", "teacher-forced", "truncated", "generated text", "copies")]
        for arm in self.arms.values():
            cells = (arm.teacher_forced, arm.truncated, arm.free_running, arm.copy_rate)
            rows.append((arm.name, *(_mean_and_interval(values) for values in cells)))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        floor = "" if self.floor is None else f"; floor ln V = {self.floor:.3f}"
        lines.append(f"nats per token, mean and 95 % interval over {len(self.seeds)} seeds{floor}")
        return "\n".join(lines + [f"leak: {name}: {why}" for name, why in self.leaks.items()])


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
    measure_every: int = 0,
) -> LeakMeter:
    """Train `model` as it is and its unmasked twin, from the same weights, in the same order, once per seed.

    Args:
        model: a model, whose weights each run starts from, or a factory `seed -> model`. It maps ids (batch, seq) to
            logits (batch, seq, vocab): a `labkit.gpt.GPT`, a transformers model, or your own. The first two get an
            unmasked twin; your own is measured as it is.
        data: token ids of a text, one line (tokens,), of which the last tenth is held out; or a whole number V:
            uniformly random tokens, V of them.
        loss: `loss(logits, ids)` that is trained on; by default the cross entropy of the next token. Give your own to
            find out whether its labels are right.
        measure_every: steps between two points of the curves; 0 = a twentieth of the run.

    Raises:
        LeakageError: fewer than two seeds, text shorter than two rows, or ids that the model has no embedding for.
    """
    seeds = tuple(seeds)
    if len(seeds) < 2:
        raise LeakageError(f"an interval needs at least two seeds, and {len(seeds)} was given")
    source = _RandomTokens(data, length) if isinstance(data, int) else _Text(data, length)
    plan = _Plan(
        source, loss or next_token_loss, steps, batch_size, learning_rate, measure_every or max(1, steps // 20)
    )
    trained: dict[str, list[_Trained]] = {}
    for seed in seeds:
        start = _start(model, seed)
        _require_vocabulary(start, source)
        for name, twin in _twins(start).items():
            trained.setdefault(name, []).append(plan.run(twin, seed))
    arms = {name: _arm(name, runs, plan) for name, runs in trained.items()}
    floor = math.log(data) if isinstance(data, int) else None
    leaks = {name: why for name, arm in arms.items() if (why := _verdict(arm, floor))}
    if floor is None and AS_BUILT not in leaks:
        judges = [run.model for run in trained[AS_BUILT]]
        for name, runs in trained.items():
            arms[name].free_running.extend(
                plan.free_running(run, judges[(i + 1) % len(judges)]) for i, run in enumerate(runs)
            )
    return LeakMeter(arms, floor, leaks, seeds)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean nats: the logits at position i against the token at i + 1. Shapes (batch, seq, vocab), (batch, seq)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Unmasked(nn.Module):
    """A `labkit.gpt.GPT` in which every position sees every other."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, masks.bidirectional())


@dataclass
class _Trained:
    model: nn.Module
    curve: list[float]
    reported: float
    seed: int


class _RandomTokens:
    """Batches of uniformly random tokens, never the same twice."""

    def __init__(self, vocabulary: int, length: int):
        if vocabulary < 2:
            raise LeakageError(f"random tokens need a vocabulary of at least 2, not {vocabulary}")
        self.vocabulary, self.length = vocabulary, length

    def batch(self, rows: int, seed: int, number: int) -> Tensor:
        return torch.randint(self.vocabulary, (rows, self.length), generator=generator(seed, number))

    held_out = batch  # as fresh as any other


class _Text:
    """Rows of a text at random places: from its first nine tenths to train, from its last to measure."""

    def __init__(self, ids: Tensor, length: int):
        cut = int(len(ids) * 0.9)
        self.train, self.rest, self.length = ids[:cut], ids[cut:], length
        if min(len(self.train), len(self.rest)) <= length:
            raise LeakageError(f"a text of {len(ids)} tokens is too short: its last tenth must hold a row of {length}")
        self.vocabulary = int(ids.max()) + 1

    def batch(self, rows: int, seed: int, number: int) -> Tensor:
        return self._rows(self.train, rows, seed, number)

    def held_out(self, rows: int, seed: int, number: int) -> Tensor:
        return self._rows(self.rest, rows, seed, number)

    def _rows(self, ids: Tensor, rows: int, seed: int, number: int) -> Tensor:
        starts = torch.randint(len(ids) - self.length, (rows,), generator=generator(seed, number))
        return torch.stack([ids[start : start + self.length] for start in starts.tolist()])


MEASURING = 10**9  # the row numbers from here on are for measuring, and are never trained on


@dataclass(frozen=True)
class _Plan:
    source: _RandomTokens | _Text
    loss: Callable[[Tensor, Tensor], Tensor]
    steps: int
    batch_size: int
    learning_rate: float
    measure_every: int

    @property
    def measured_at(self) -> list[int]:
        return sorted({*range(0, self.steps + 1, self.measure_every), self.steps})

    def run(self, model: nn.Module, seed: int) -> _Trained:
        """Train, with the same batches for every twin of a seed, and measure the curve on the same held-out rows."""
        held_out = self._held_out(seed).to(_device(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.0)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, self.steps // 10))
        curve, reported = [], []
        model.train()
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # dropout
            for step in range(self.steps + 1):
                if step in self.measured_at:
                    with evaluating(model), torch.no_grad():
                        curve.append(float(next_token_loss(logits_of(model, held_out), held_out).cpu()))
                if step == self.steps:
                    break
                ids = self.source.batch(self.batch_size, seed, step).to(_device(model))
                loss = self.loss(logits_of(model, ids), ids)
                loss.backward()
                reported.append(float(loss.detach()))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                warmup.step()
        return _Trained(model.eval(), curve, statistics.mean(reported[-self.measure_every :]), seed)

    @torch.no_grad()
    def truncated_loss(self, run: _Trained) -> float:
        """Each token named from the tokens before it, and nothing after: one pass per position."""
        ids = self._few(run)
        costs = [
            F.cross_entropy(logits_of(run.model, ids[:, :i])[:, -1].float(), ids[:, i]) for i in range(1, ids.size(1))
        ]
        return float(torch.stack(costs).mean())

    @torch.no_grad()
    def loss_in_sight(self, run: _Trained) -> float:
        """The same tokens named with the whole row in the input."""
        ids = self._few(run)
        return float(next_token_loss(logits_of(run.model, ids), ids))

    @torch.no_grad()
    def copy_rate(self, run: _Trained) -> float:
        """Share of positions that name the random token which was put after them."""
        ids = self._few(run)
        hits = []
        for i in range(1, ids.size(1)):
            replaced = ids.clone()
            rng = generator(run.seed, MEASURING + i)
            replaced[:, i] = torch.randint(self.source.vocabulary, (len(ids),), generator=rng)
            named = logits_of(run.model, replaced)[:, i - 1].argmax(-1)
            hits.append((named == replaced[:, i]).float())
        return float(torch.stack(hits).mean())

    @torch.no_grad()
    def free_running(self, run: _Trained, judge: nn.Module) -> float:
        """The judge's mean nats on what this model generates, drawn token by token after a held-out quarter row."""
        ids = self._few(run)
        prompt = max(1, ids.size(1) // 4)
        text = ids[:, :prompt]
        with torch.random.fork_rng():
            torch.manual_seed(run.seed)
            while text.size(1) < ids.size(1):
                probabilities = logits_of(run.model, text)[:, -1].float().softmax(-1)
                text = torch.cat([text, torch.multinomial(probabilities, 1)], dim=1)
        logits = logits_of(judge, text)[:, prompt - 1 : -1]
        return float(F.cross_entropy(logits.flatten(0, 1).float(), text[:, prompt:].flatten()))

    def _few(self, run: _Trained) -> Tensor:
        return self._held_out(run.seed)[:16].to(_device(run.model))

    def _held_out(self, seed: int) -> Tensor:
        return self.source.held_out(64, seed, MEASURING)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """(batch, seq, vocab) from any model that maps ids to logits."""
    known = decoder_or_none(model) is not None
    return first_tensor(model(input_ids=ids, use_cache=False) if known else model(ids))


def _start(model: nn.Module | Callable[[int], nn.Module], seed: int) -> nn.Module:
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).float()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model(seed)
    if not isinstance(made, nn.Module):
        raise LeakageError(f"the factory gave {type(made).__name__} for seed {seed}, not a model")
    return made


def _twins(model: nn.Module) -> dict[str, nn.Module]:
    from labkit.convert import to_bidirectional
    from labkit.gpt import GPT

    if type(model) is GPT:
        return {AS_BUILT: copy.deepcopy(model), UNMASKED: Unmasked(copy.deepcopy(model))}
    if decoder_or_none(model) is not None:
        return {AS_BUILT: copy.deepcopy(model), UNMASKED: to_bidirectional(copy.deepcopy(model))}
    return {AS_BUILT: model}


def _require_vocabulary(model: nn.Module, source: _RandomTokens | _Text) -> None:
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is not None and embedding.num_embeddings < source.vocabulary:
        raise LeakageError(
            f"the data have token ids up to {source.vocabulary - 1}, and the model knows {embedding.num_embeddings} tokens"
        )


def _arm(name: str, runs: list[_Trained], plan: _Plan) -> Arm:
    return Arm(
        name,
        plan.measured_at,
        [run.curve for run in runs],
        [plan.truncated_loss(run) for run in runs],
        [plan.loss_in_sight(run) for run in runs],
        [plan.copy_rate(run) for run in runs],
        [run.reported for run in runs],
    )


def _verdict(arm: Arm, floor: float | None) -> str:
    """Why this arm leaks, or "". An honest model is on the right side of each threshold by construction."""
    seen, blind = statistics.mean(arm.in_sight), statistics.mean(arm.truncated)
    reported = statistics.mean(arm.reported)
    if floor is not None and statistics.mean(arm.teacher_forced) < floor - _margin(arm.teacher_forced):
        found = statistics.mean(arm.teacher_forced)
        return f"its loss on random tokens is {found:.3f}, below the floor of {floor:.3f} that no honest model passes"
    if any(abs(b - s) > 1e-3 * max(1.0, b) for s, b in zip(arm.in_sight, arm.truncated, strict=True)):
        return f"its loss is {seen:.3f} with the later tokens in sight, and {blind:.3f} on the same text without them"
    if floor is not None and reported < floor - _margin(arm.reported):
        return (
            f"its training reports {reported:.3f} on random tokens, below the floor of {floor:.3f}, though in evaluation "
            "it does not know the next token: the labels are misplaced, or train mode drops the mask"
        )
    return ""


def _margin(values: list[float]) -> float:
    """What chance may do: three standard errors over the seeds, and never less than 0.02 nats."""
    return max(0.02, 3 * statistics.stdev(values) / math.sqrt(len(values)))


def _mean_and_interval(values: list[float]) -> str:
    if not values:
        return "-"
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(values), 2.0)
    return f"{statistics.mean(values):.3f} ± {t * statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
