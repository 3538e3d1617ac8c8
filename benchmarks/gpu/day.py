"""What labkit says about GPUs, measured in the few minutes that one has: stages in order of value, each with its limit.

    python benchmarks/gpu/day.py --output-dir runs/gpu --model gemma-cut --corpora gemma-cut/corpora
    python benchmarks/gpu/day.py --output-dir runs/day --device cpu --budget 3            (tiny models, no corpora)

Every stage is one of the programs beside this one. It writes its results as it goes and is told how many seconds it
has, so it begins nothing that would end later; when they are over it is stopped. day.json says what was done, what was
left out, and why. The same command again, with --resume, runs the stages that were stopped or left out; a study goes on
where it was.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

import torch  # noqa: E402

from benchmarks import machine  # noqa: E402
from benchmarks.gpu.pack import CORPORA, TEXTS  # noqa: E402
from benchmarks.study.runner import write_json  # noqa: E402
from labkit.run_folder import read_json  # noqa: E402

BENCHMARKS = Path(__file__).parents[1]
LEAST = 10.0  # seconds: a stage with less is not begun
STOPPING = 5.0  # seconds between asking a program to end and killing it


@dataclass(frozen=True)
class Stage:
    """One program, its limit in seconds, and how many processes of it work together in one folder.

    {within} in the command is the number of seconds that it has.
    """

    name: str
    seconds: float
    command: tuple[str, ...]
    processes: int = 1


def run(stages: Sequence[Stage], folder: Path, budget: float, resume: bool = False) -> dict[str, dict[str, Any]]:
    """Run the stages one after the other within `budget` seconds. Returns {stage: {"state", "seconds", "left_out"}}.

    state: done, stopped (its time was over), failed (exit code), or left out (no time). day.json has the same after
    each stage.
    """
    ends = time.perf_counter() + budget
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    states = (read_json(folder / "day.json") or {}) if resume else {}
    for stage in stages:
        before = states.get(stage.name, {})
        if before.get("state") == "done" and not before["left_out"]:
            continue
        within = min(stage.seconds, ends - time.perf_counter())
        if within < min(LEAST, stage.seconds):
            states[stage.name] = {"state": "left out", "seconds": 0.0, "left_out": [f"{within:.0f} s were left"]}
        else:
            print(f"{stage.name}: at most {within:.0f} s", flush=True)
            states[stage.name] = _run(stage, folder, within)
        print(f"{stage.name}: {states[stage.name]}", flush=True)
        write_json(folder / "day.json", states)
    return states


def _run(stage: Stage, folder: Path, within: float) -> dict[str, Any]:
    began = time.perf_counter()
    command = [sys.executable, *(part.format(within=f"{within:.0f}") for part in stage.command)]
    logs = [folder / "logs" / f"{stage.name}-{number}.log" for number in range(stage.processes)]
    env, running = os.environ | {"PYTHONUNBUFFERED": "1"}, []
    for log in logs:
        with log.open("w", encoding="utf-8") as out:
            running.append(
                subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env)
            )
    state = "done"
    for process in running:
        try:
            process.wait(max(0.0, began + within - time.perf_counter()))
        except subprocess.TimeoutExpired:
            state = "stopped"
            _stop(process)
    if state == "done" and (codes := [process.returncode for process in running if process.returncode]):
        state = f"failed with exit code {codes[0]}, see {logs[0].parent.name}"
    lines = [line for log in logs for line in log.read_text(encoding="utf-8", errors="replace").split("\n")]
    left_out = sorted({line.partition("left out: ")[2] for line in lines if line.startswith("left out: ")})
    return {"state": state, "seconds": round(time.perf_counter() - began, 1), "left_out": left_out}


def _stop(process: subprocess.Popen) -> None:
    """End a program and all that it began."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING)


def stages(folder: Path, device: str, model: str, corpora: Path | None) -> list[Stage]:
    """The stages of a day, the most valuable first."""
    gpu = device == "cuda"  # a T4 has no bfloat16 arithmetic
    dtype = "bfloat16" if gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"

    def stage(name: str, seconds: float, program: str, *options: str, processes: int = 1) -> Stage:
        return Stage(name, seconds if gpu else 4 * seconds, (str(BENCHMARKS / program), *options), processes)

    def output(name: str) -> tuple[str, str, str, str]:
        return "--device", device, "--output", str(folder / f"{name}.json")

    data = ["ner:field-notes", "qa:field-notes"]
    if corpora:
        sources = [CORPORA[name].split(":") for name in ("wikigold", "xquad")]
        data = [f"{task}:{corpora / file}" for task, file in sources]
    study = [part for source in data for part in ("--data", source)]
    study += ["--model", model, "--orders", "question-first", "--within", "{within}"]
    study += ["--output-dir", str(folder / "mask_effect")]
    if gpu:
        study += ["--arms", "causal,bidirectional,mntp:1000,repeated", "--seeds", "0,1,2", "--preset", "gemma"]
        study += ["--rates", str(Path(__file__).with_name("rates.json")), "--batch-size", "16", "--max-steps", "250"]
        study += ["--evaluate-every", "125", "--dtype", dtype, "--adaptation-rate", "1e-4"]
        study += ["--adaptation-batch", "16"]
    else:
        study += ["--arms", "causal,mntp:2", "--seeds", "0", "--learning-rates", "1e-3", "--max-steps", "2"]
        study += ["--max-train", "20", "--max-eval", "10"]
    if corpora:
        study += ["--adaptation-texts", ",".join(str(corpora / file) for file in TEXTS)]
    cost = ["--within", "{within}", "--dtypes", dtype, "--seconds", "4" if gpu else "0.1"]
    cost += ["--masks", "bidirectional,causal"] if gpu else []
    two = ["--models", "random:gemma-2-2b", "--lengths", "512,1024", "--batch-sizes", "32"]
    nine = ["--models", "random:gemma-2-9b", "--lengths", "512", "--batch-sizes", "8", "--method", "lora"]
    flex = ["--attn", "flex_attention,eager"]
    tiny = ["--models", "tiny-gemma2", "--lengths", "16", "--batch-sizes", "2"]
    packing = ["--model", model, *(["--steps", "4"] if gpu else ["--tasks", "ner", "--steps", "1", "--rounds", "1"])]
    packing += ["--data", str(corpora)] if corpora else []
    packing += ["--method", "full", "--dtype", dtype]
    fusion = ["--model", model, "--arms", "fast", "logit-average", *(["flex"] if gpu else [])]
    fusion += ["--counts", "1", "5", "--new-tokens", "1", "20", "--rounds", "5" if gpu else "1"]
    steps = ["--dtype", dtype] if gpu else ["--quick"]
    future = ["--arms", "baseline,future:none:50" if gpu else "baseline", "--within", "{within}", "--seeds", "0"]
    future += ["--profile", "origin", "--dtype", dtype] if gpu else ["--steps", "2", "--vocab-size", "300"]
    future += [part for file in TEXTS if corpora for part in ("--text", str(corpora / file))]
    return [
        stage("sanity", 90, "gpu/sanity.py", *output("sanity")),
        stage("mask_effect", 300, "study/mask_effect.py", *study, processes=8 if gpu else 1),
        stage("cost_2b", 150, "cost.py", *(two + flex if gpu else tiny), *cost, *output("cost_2b")),
        stage("cost_9b", 150, "cost.py", *(nine + flex if gpu else tiny), *cost, *output("cost_9b")),
        stage("packing", 90, "packing.py", *packing, *output("packing")),
        stage("fusion_latency", 120, "fusion_latency.py", *fusion, *output("fusion_latency")),
        stage("future_speed", 60, "future_speed.py", *steps, *output("future_speed")),
        stage("future_attention", 600, "study/future.py", *future, "--output-dir", str(folder / "future_attention")),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=15.0, help="minutes for all stages (default 15)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", help="gemma3-270m, or the folder that pack.py unpack wrote (default: gemma3-270m)")
    parser.add_argument("--corpora", type=Path, help="folder with the corpora, as pack.py takes and unpacks it")
    parser.add_argument("--stages", help="names of the stages to run, separated by commas (default: all)")
    parser.add_argument("--resume", action="store_true", help="run what an earlier day stopped or left out")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; --device cpu tries all stages with tiny models")
    if not options.resume and (options.output_dir / "day.json").exists():
        parser.error(f"{options.output_dir} contains a day; continue it with --resume, or choose another folder")
    model = options.model or ("gemma3-270m" if options.device == "cuda" else "tiny-gemma3")
    chosen = stages(options.output_dir.absolute(), options.device, model, options.corpora)
    if options.stages:
        names = options.stages.split(",")
        if unknown := set(names) - {stage.name for stage in chosen}:
            parser.error(
                f"there is no stage {', '.join(sorted(unknown))}; choose from {', '.join(s.name for s in chosen)}"
            )
        chosen = [stage for stage in chosen if stage.name in names]
    write_json(options.output_dir / "machine.json", machine.describe())
    states = run(chosen, options.output_dir, options.budget * 60, options.resume)
    return 1 if any(state["state"].startswith("failed") for state in states.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
