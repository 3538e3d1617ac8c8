"""How the results of a benchmark are written: no number without machine and spread."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import labkit
from labkit.files import write_whole

RESULTS = Path(__file__).parent / "results"
DRAWS = 4000
FEWEST = 5  # rounds; the whole range of fewer holds the median in less than 90 % of cases


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that most programs share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds; writes nothing without --output")
    parser.add_argument("--output", type=Path, help="file of the results (default: in benchmarks/results)")
    return parser


def use(options: argparse.Namespace) -> None:
    """Set the number of threads; what torch waits for and counts is on `options.device` from now on."""
    if options.device.startswith("cuda:"):
        torch.cuda.set_device(options.device)
    torch.set_num_threads(options.threads)


def write(name: str, results: Any, notes: str, key: str = "results", target: Path | None = None) -> Path:
    """Write `results`, machine, date and `notes` (the text of the program) to results/<name>.json, whole."""
    target = target or RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).date().isoformat()
    content = {"benchmark": name, "date": date, "notes": notes, "machine": describe(), key: results}
    write_whole(target, json.dumps(content, indent=1) + "\n")
    return target


def describe() -> dict[str, Any]:
    """Processor, cores, memory, GPU, and the versions that matter."""
    available = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")}
    return {
        "cpu": _cpu_name(),
        # those that this process may use: on a shared machine fewer than there are
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(number) for number in available],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions | {"labkit": labkit.__version__},
    }


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", file.read_text() if file.exists() else "", re.MULTILINE)
    return named[1] if named else platform.processor() or "unknown"


def spread(values: Sequence[float], digits: int | None = None) -> dict[str, Any]:
    """n, median, smallest, largest, and every value in the order in which it was measured, rounded to `digits`."""
    values = list(values) if digits is None else [round(value, digits) for value in values]
    middle = statistics.median(values)
    return {"n": len(values), "median": middle, "min": min(values), "max": max(values), "each": values}


def wait(device: str) -> None:
    """Wait until the GPU has finished what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def apart(options: argparse.Namespace, function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)` in a new process, whose memory is its own. Raises BrokenProcessPool if it is killed."""
    with ProcessPoolExecutor(1, get_context("spawn"), use, (options,)) as process:
        return process.submit(function, *arguments).result()


def peak_mb(options: argparse.Namespace, trainer: Callable[..., Trainer], *arguments: Any) -> dict[str, Any]:
    """`spread` of the peak memory of three processes that only train `trainer(*arguments)`."""
    return spread([apart(options, _peak_mb, trainer, *arguments) for _ in range(3)])


def _peak_mb(trainer: Callable[..., Trainer], *arguments: Any) -> float:
    return trainer(*arguments).peak_mb()


def in_turn(calls: dict[str, Callable[[int], Any]], rounds: int, warmup: int, device: str) -> dict[str, list[float]]:
    """Seconds of each call in each round. All run once in each round, so a slow moment of the machine hits all."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warmup + rounds):
        for name, call in calls.items():
            wait(device)
            began = time.perf_counter()
            call(number)
            wait(device)
            if number >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """`spread` of one / other, round by round."""
    return spread([a / b for a, b in zip(one, other, strict=True)], 4)


class Trainer:
    """A model, its fused AdamW, and batches of random tokens: `step(number)` trains on batch `number`."""

    def __init__(self, model: Any, loss: Callable, vocabulary: int, rows: int, length: int, dtype: str, device: str):
        self.loss, self.model = loss, model.to(device).train()
        self.highest, self.size, self.device = vocabulary, (rows, length + 1), device
        self.dtype = getattr(torch, dtype)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(self, number: int) -> float:
        rng = torch.Generator().manual_seed(number)
        ids = torch.randint(self.highest, self.size, generator=rng).to(self.device)
        cast = self.dtype != torch.float32
        with torch.autocast(self.device.partition(":")[0], self.dtype, enabled=cast):
            loss = self.loss(self.model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def peak_mb(self) -> float:
        """The highest memory of three steps above that before the first."""
        memory = Memory(self.device)
        return max(memory.of(self.step, number) for number in range(3))


def paired(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """`spread` of one / other, round by round, and `low` and `high`, the bootstrap interval of its median."""
    by_round = np.array(one) / np.array(other)
    return ratios(one, other) | interval(lambda chosen: np.median(by_round[chosen], axis=1), len(one))


def interval(statistic: Callable[[np.ndarray], np.ndarray], rounds: int) -> dict[str, float | None]:
    """The 95 % bootstrap interval of a statistic of rounds; None of both below FEWEST rounds.

    `statistic` maps the rounds of each bootstrap sample, (DRAWS, rounds), to numbers, (DRAWS,).
    """
    if rounds < FEWEST:
        return {"low": None, "high": None}
    chosen = np.random.default_rng(0).integers(rounds, size=(DRAWS, rounds))
    low, high = np.quantile(statistic(chosen), [0.025, 0.975])
    return {"low": round(float(low), 4), "high": round(float(high), 4)}


class Memory:
    """The highest resident memory of this process since `Memory` was made, in MB above that at its making.

    Sampled every millisecond: ru_maxrss would show the peak of loading. Freed memory may stay resident, so several
    calls are to be measured from small to large. On a GPU torch counts, exactly.
    """

    def __init__(self, device: str):
        self.cuda = torch.cuda if device.startswith("cuda") else None
        process = psutil.Process()
        self.read = self.cuda.memory_allocated if self.cuda else lambda: process.memory_info().rss
        self.before = self.read()

    def of(self, call, *args) -> float:
        """Run `call(*args)`; the highest memory while it ran."""
        if self.cuda:
            self.cuda.reset_peak_memory_stats()
            call(*args)
            return round((self.cuda.max_memory_allocated() - self.before) / 1e6, 1)
        self.highest, self.running = self.read(), True
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        call(*args)
        self.running = False
        sampler.join()
        return round((max(self.highest, self.read()) - self.before) / 1e6, 1)

    def _sample(self) -> None:
        while self.running:
            self.highest = max(self.highest, self.read())
            time.sleep(0.001)
