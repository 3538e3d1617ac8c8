"""How long `labkit.load` takes, and how much memory: each run in a process of its own.

    python benchmarks/load.py

Cold: no converted copy in the cache, so the GGUF file is joined, checked, dequantised and written. Warm: the copy is
there and is checked against its sha256. Files may be in the operating system's page cache in both cases. Needs the
packages that carry the weights, and about 1.5 GB of disk for the temporary cache.

seconds: process = start of Python to a model ready to use; imports = torch and transformers alone; load = labkit.load
after those imports, sha256 check and tokenizer included. peak_gb: highest resident memory of the process (1 GB = 1e9
bytes), after loading and after one forward pass of a short sentence, touching all weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from benchmarks import machine  # noqa: E402

MODELS = ("gemma3-270m", "smollm2-135m", "tiny-gemma3")
COLD, WARM = 3, 5  # runs

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
    environment = os.environ | {"LABKIT_CACHE": str(cache), "PYTHONPATH": path}
    start = time.time()
    out = subprocess.check_output([sys.executable, "-c", _ONE_RUN, model], env=environment, text=True)
    imported, loaded, after_load, after_forward = json.loads(out.splitlines()[-1])
    return {
        "process": loaded - start,
        "imports": imported - start,
        "load": loaded - imported,
        "peak_gb_after_load": after_load,
        "peak_gb_after_forward": after_forward,
    }


def measure(model: str) -> list[dict]:
    """Rows for one model: cold (only where there is something to convert) and warm."""
    with tempfile.TemporaryDirectory() as temporary:
        runs = {"cold": [one_run(model, Path(temporary) / str(number)) for number in range(COLD)]}
        runs["warm"] = [one_run(model, Path(temporary) / "0") for _ in range(WARM)]
    return [
        {"model": model, "case": case} | {key: machine.spread([run[key] for run in its_runs], 3) for key in its_runs[0]}
        for case, its_runs in runs.items()
        if case == "warm" or not model.startswith("tiny")
    ]


def main() -> None:
    rows = [row for model in MODELS for row in measure(model)]
    for row in rows:
        process, load = row["process"], row["load"]
        print(
            f"{row['model']:14s} {row['case']:5s} n={process['n']}  process {process['median']:.1f} s "
            f"({process['min']:.1f} to {process['max']:.1f}), load {load['median']:.1f} s, "
            f"peak {row['peak_gb_after_forward']['max']:.2f} GB"
        )
    print(machine.write("load", rows, __doc__))


if __name__ == "__main__":
    main()
