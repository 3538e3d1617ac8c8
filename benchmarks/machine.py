"""How the results of a benchmark are written: no number without machine and spread."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
DRAWS = 4000
FEWEST = 5  # rounds; the whole range of fewer holds the median in less than 90 % of cases


def write(name: str, results: Any, notes: str, key: str = "results", target: Path | None = None) -> Path:
    """Write `results`, machine, date and `notes` (what was measured, in which unit) to results/<name>.json, whole."""
    target = target or RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).date().isoformat()
    content = {"benchmark": name, "date": date, "notes": notes, "machine": describe(), key: results}
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".json")
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(content, out, indent=1)
        out.write("\n")
    Path(temporary).chmod(0o644)
    os.replace(temporary, target)
    return target


def describe() -> dict[str, Any]:
    """Processor, cores, memory, GPU, and the versions that matter."""
    import psutil
    import torch

    import labkit

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
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def spread(values: list[float]) -> dict[str, Any]:
    """n, median, smallest, largest, and every value in the order in which it was measured."""
    return {
        "n": len(values),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "each": values,
    }


def wait(device: str) -> None:
    """Wait until the GPU has finished what it was given."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def in_a_process(arguments: Sequence[str], **environment: str) -> Any:
    """The JSON that `python ARGUMENTS` prints in its last line. Exits with its message if it fails."""
    command, environment = [sys.executable, *arguments], os.environ | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip() or "no message; killed because memory ran out?"
        sys.exit(f"{' '.join(arguments)} ended with exit code {done.returncode}:\n{message}")
    return json.loads(done.stdout.splitlines()[-1])


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
