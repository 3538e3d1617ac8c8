"""How the results of a benchmark are written: no number without machine and spread."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from labkit.bench.machine import describe, spread

__all__ = ["RESULTS", "Memory", "describe", "drawn", "interval", "paired", "spread", "write"]

RESULTS = Path(__file__).parent / "results"
DRAWS = 4000
FEWEST = 5  # rounds; the whole range of fewer holds the median in less than 90 % of cases


def write(name: str, results: Any, notes: str) -> Path:
    """Write `results`, machine, date and `notes` (what was measured, in which unit) to results/<name>.json, whole."""
    RESULTS.mkdir(exist_ok=True)
    date = datetime.now(UTC).date().isoformat()
    content = {"benchmark": name, "date": date, "notes": notes, "machine": describe(), "results": results}
    handle, temporary = tempfile.mkstemp(dir=RESULTS, suffix=".json")
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(content, out, indent=1)
        out.write("\n")
    Path(temporary).chmod(0o644)
    target = RESULTS / f"{name}.json"
    os.replace(temporary, target)
    return target


def use(device: str) -> None:
    """From now on what torch waits for and counts is on this device, "cpu" or a GPU such as "cuda:1"."""
    if device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(device)


def paired(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """`spread` of one / other, round by round, and `low` and `high`, the bootstrap interval of its median."""
    ratios = np.array(one) / np.array(other)
    return spread([round(float(each), 4) for each in ratios]) | interval(
        np.median(ratios[drawn(len(ratios))], axis=1), len(ratios)
    )


def drawn(rounds: int) -> np.ndarray:
    """(DRAWS, rounds): which rounds each bootstrap sample has."""
    return np.random.default_rng(0).integers(rounds, size=(DRAWS, rounds))


def interval(values: np.ndarray, rounds: int) -> dict[str, float | None]:
    """The middle 95 % of what bootstrap samples of `rounds` rounds gave; None of both below FEWEST rounds."""
    if rounds < FEWEST:
        return {"low": None, "high": None}
    low, high = np.quantile(values, [0.025, 0.975])
    return {"low": round(float(low), 4), "high": round(float(high), 4)}


class Memory:
    """The highest resident memory of this process since `Memory` was made, in MB above that at its making.

    Sampled every millisecond: ru_maxrss would show the peak of loading. Freed memory may stay resident, so several
    calls are to be measured from small to large. On a GPU torch counts, exactly.
    """

    def __init__(self, device: str):
        import psutil
        import torch

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
