"""How long `labkit.load` takes, and how much memory: each run in a process of its own.

    python benchmarks/load.py [--cold 3] [--warm 5]

Cold: no converted copy in the cache, so the GGUF file is joined, checked, dequantised and written. Warm: the copy is
there and is checked against its sha256. Files may be in the operating system's page cache in both cases. Needs the
packages that carry the weights, and about 1.5 GB of disk for the temporary cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from benchmarks import machine  # noqa: E402

MODELS = ("gemma3-270m", "smollm2-135m", "tiny-gemma3")
NOTES = (
    "seconds: process = start of Python to a model ready to use; imports = torch and transformers alone; load = "
    "labkit.load after those imports, sha256 check and tokenizer included. peak_gb: highest resident memory of the "
    "process (1 GB = 1e9 bytes), after loading and after one forward pass of a short sentence, touching all weights."
)

_ONE_RUN = """
import json, resource, sys, time
import torch, transformers
imported = time.time()
import labkit
lm = labkit.load(sys.argv[1], device="cpu")
loaded = time.time()
peak_gb = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
after_load = peak_gb()
with torch.no_grad():
    lm.model(**lm.tokenizer("The capital of France is", return_tensors="pt"))
print(json.dumps([imported, loaded, after_load, peak_gb()]))
"""


def one_run(model: str, cache: Path) -> dict[str, float]:
    """Load `model` once in a new process that keeps its converted models in `cache`."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    start = time.time()
    times = machine.in_a_process(["-c", _ONE_RUN, model], LABKIT_CACHE=str(cache), PYTHONPATH=path)
    imported, loaded, after_load, after_forward = times
    return {
        "process": loaded - start,
        "imports": imported - start,
        "load": loaded - imported,
        "peak_gb_after_load": after_load,
        "peak_gb_after_forward": after_forward,
    }


def measure(model: str, cold: int, warm: int) -> list[dict]:
    """Rows for one model: cold (only where there is something to convert) and warm."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        embedded = not model.startswith("tiny")
        first = [one_run(model, Path(temporary) / str(i)) for i in range(cold if embedded else 1)]
        if embedded:
            rows.append({"model": model, "case": "cold"} | _summary(first))
        later = [one_run(model, Path(temporary) / "0") for _ in range(warm)]
        rows.append({"model": model, "case": "warm"} | _summary(later))
    return rows


def _summary(runs: list[dict[str, float]]) -> dict:
    return {key: machine.spread([round(run[key], 3) for run in runs]) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", type=int, default=3, help="runs that convert (default 3)")
    parser.add_argument("--warm", type=int, default=5, help="runs that find the converted copy (default 5)")
    options = parser.parse_args()
    rows = [row for model in MODELS for row in measure(model, options.cold, options.warm)]
    for row in rows:
        process, load = row["process"], row["load"]
        print(
            f"{row['model']:14s} {row['case']:5s} n={process['n']}  process {process['median']:.1f} s "
            f"({process['min']:.1f} to {process['max']:.1f}), load {load['median']:.1f} s, "
            f"peak {row['peak_gb_after_forward']['max']:.2f} GB"
        )
    print(machine.write("load", rows, NOTES))


if __name__ == "__main__":
    main()
