"""What a training step with Future Attention costs: time and peak memory against the plain GPT of the same shape.

    python benchmarks/future_speed.py --threads 1 [--device cuda --dtype bfloat16]
    python benchmarks/future_speed.py --quick                       (a tiny model, seconds, nothing is written)

seconds: of a training step (forward, losses, backward, AdamW) after warm-up; all arms take turns within every round, so
a slow moment of the machine hits all of them. ratio: over the plain GPT's of the same round (torch's fused attention),
median with the bootstrap interval of the median, below 1.5 is the aim. peak_mb: how far the resident memory of a
process that only trains this arm rises above what it held before the first step (on a GPU: torch's highest count);
memory_ratio: of the medians, below 2 is the aim.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from benchmarks import machine  # noqa: E402
from labkit.future_attention.arms import arm  # noqa: E402
from labkit.gpt import GPTConfig  # noqa: E402

SHAPE = {"vocab_size": 4096, "context": 256, "width": 256, "layers": 6, "heads": 4}
DIM, ROWS, ROUNDS = 50, 8, 10  # future_dim, rows per step
QUICK = {"vocab_size": 64, "context": 32, "width": 32, "layers": 1, "heads": 2}
ARMS = ("smaller", "future:none:{dim}", "future:cosine:{dim}", "future:kl:{dim}", "tokens:cosine:{dim}", "memory:{dim}")


def trainer(name: str, shape: dict, rows: int, dtype: str, device: str) -> machine.Trainer:
    one = arm(name)

    def loss(model, ids, targets):
        nats, extra = one.losses(model, ids, targets)
        return nats if extra is None else nats + extra

    model = one.build(GPTConfig(**shape), 0)
    return machine.Trainer(model, loss, shape["vocab_size"], rows, shape["context"], dtype, device)


def compare(names: list[str], shape: dict, rows: int, dtype: str, device: str, rounds: int) -> dict:
    """{arm: {seconds, ratio}}; the first arm is the plain one."""
    steps = {name: trainer(name, shape, rows, dtype, device).step for name in names}
    seconds = machine.in_turn(steps, rounds, 2, device)
    plain = seconds[names[0]]
    return {
        name: {"seconds": machine.spread(values, 4), "ratio": machine.paired(values, plain)}
        for name, values in seconds.items()
    }


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    machine.use(options)
    names = [name.format(dim=8 if options.quick else DIM) for name in ARMS]
    if options.quick:
        results = compare(names, QUICK, 2, "float32", "cpu", 5)
        if options.output:
            machine.write("future_speed_quick", {"setting": QUICK, "arms": results}, __doc__, target=options.output)
        print(json.dumps(results, indent=1))
        return
    training = (SHAPE, ROWS, options.dtype, options.device)
    results = compare(names, *training, ROUNDS)
    for name, result in results.items():
        result["peak_mb"] = machine.peak_mb(options, trainer, name, *training)
        result["memory_ratio"] = round(result["peak_mb"]["median"] / results[names[0]]["peak_mb"]["median"], 3)
        ratio = result["ratio"]
        print(
            f"{name}: {result['seconds']['median']:.3f} s, {ratio['median']:.2f} times the plain one "
            f"[{ratio['low']:.2f}, {ratio['high']:.2f}]; {result['peak_mb']['median']:,.0f} MB, "
            f"{result['memory_ratio']:.2f} times"
        )
    suffix = "_gpu" if options.device.startswith("cuda") else ""
    setting = {"shape": SHAPE, "dim": DIM, "rows": ROWS, "dtype": options.dtype}
    machine.write(f"future_speed{suffix}", {"setting": setting, "arms": results}, __doc__, target=options.output)


if __name__ == "__main__":
    main()
