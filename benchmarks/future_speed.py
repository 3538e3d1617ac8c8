"""What a training step with Future Attention costs: time and peak memory against the plain GPT of the same shape.

    python benchmarks/future_speed.py --threads 1 [--device cuda --dtype bfloat16]
    python benchmarks/future_speed.py --quick                       (a tiny model, seconds, nothing is written)

A step is forward, losses, backward and an AdamW update. All arms take turns within every round, so a slow moment of the
machine hits all of them; the ratios are of times within one round. Memory is that of a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from benchmarks import machine  # noqa: E402

SHAPE = {"vocab_size": 4096, "context": 256, "width": 256, "layers": 6, "heads": 4}
QUICK = {"vocab_size": 64, "context": 32, "width": 32, "layers": 1, "heads": 2}
ARMS = ("smaller", "future:none:{dim}", "future:cosine:{dim}", "future:kl:{dim}", "tokens:cosine:{dim}", "memory:{dim}")
NOTES = (
    "seconds: of a training step (forward, losses, backward, AdamW) after warm-up; ratio: over the plain GPT's of the "
    "same round (torch's fused attention), median with the bootstrap interval of the median, below 1.5 is the aim. "
    "peak_mb: how far the resident memory of a process that only trains this arm rises above what it held before the "
    "first step (on a GPU: torch's highest count); memory_ratio: of the medians, below 2 is the aim."
)


class Arm:
    """A model of an arm and its optimizer."""

    def __init__(self, name: str, shape: dict, dtype: str, device: str):
        import torch

        from labkit.future_arms import arm
        from labkit.gpt import GPTConfig

        self.torch, self.arm, self.dtype = torch, arm(name), getattr(torch, dtype)
        self.kind = device.partition(":")[0]
        self.model = self.arm.build(GPTConfig(**shape), 0).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, ids) -> None:
        cast = (
            self.torch.autocast(self.kind, self.dtype) if self.dtype != self.torch.float32 else contextlib.nullcontext()
        )
        with cast:
            nats, extra = self.arm.losses(self.model, ids[:, :-1], ids[:, 1:])
        (nats if extra is None else nats + extra).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        machine.wait(self.kind)


def batch(shape: dict, rows: int, number: int, device: str):
    import torch

    rng = torch.Generator().manual_seed(number)
    return torch.randint(shape["vocab_size"], (rows, shape["context"] + 1), generator=rng).to(device)


def compare(names: list[str], shape: dict, rows: int, dtype: str, device: str, rounds: int, warmup: int = 2) -> dict:
    """{arm: {seconds, ratio}}; the first arm is the plain one."""
    arms = {name: Arm(name, shape, dtype, device) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        ids = batch(shape, rows, number, device)
        for name in names if number % 2 else reversed(names):
            began = time.perf_counter()
            arms[name].step(ids)
            if number >= warmup:
                seconds[name].append(time.perf_counter() - began)
    plain = seconds[names[0]]
    return {
        name: {"seconds": machine.spread([round(s, 4) for s in each]), "ratio": machine.paired(each, plain)}
        for name, each in seconds.items()
    }


def one_arm(options: argparse.Namespace) -> None:
    arm = Arm(options.arm, SHAPE, options.dtype, options.device)
    memory = machine.Memory(options.device)
    print(json.dumps(max(memory.of(arm.step, batch(SHAPE, options.rows, n, options.device)) for n in range(3))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=50, help="future_dim")
    parser.add_argument("--rows", type=int, default=8, help="rows per step")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    machine.use(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.arm:
        return one_arm(options)
    names = [name.format(dim=8 if options.quick else options.dim) for name in ARMS]
    if options.quick:
        print(json.dumps(compare(names, QUICK, 2, "float32", "cpu", 5), indent=1))
        return None
    results = compare(names, SHAPE, options.rows, options.dtype, options.device, options.rounds)
    for name, found in results.items():
        common = [__file__, "--arm", name, "--rows", str(options.rows), "--dtype", options.dtype]
        common += ["--device", options.device, *(["--threads", str(options.threads)] if options.threads else [])]
        found["peak_mb"] = machine.spread([machine.in_a_process(common) for _ in range(3)])
        found["memory_ratio"] = round(found["peak_mb"]["median"] / results[names[0]]["peak_mb"]["median"], 3)
        ratio = found["ratio"]
        print(
            f"{name}: {found['seconds']['median']:.3f} s, {ratio['median']:.2f} times the plain one "
            f"[{ratio['low']:.2f}, {ratio['high']:.2f}]; {found['peak_mb']['median']:,.0f} MB, "
            f"{found['memory_ratio']:.2f} times"
        )
    suffix = "_gpu" if options.device.startswith("cuda") else ""
    setting = {"shape": SHAPE, "dim": options.dim, "rows": options.rows, "dtype": options.dtype}
    machine.write(f"future_speed{suffix}", {"setting": setting, "arms": results}, NOTES)
    return None


if __name__ == "__main__":
    main()
