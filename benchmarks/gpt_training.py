"""Training throughput of labkit.gpt against the model.py of karpathy/nanoGPT: same shape, same weights, same batches.

    python benchmarks/gpt_training.py --nanogpt path/to/nanoGPT/model.py [--dtype float32 bfloat16] [--device cuda]
    python benchmarks/gpt_training.py --nanogpt path/to/model.py --quick          (seconds, nothing is written)

nanoGPT is not part of this project: fetch it yourself (github.com/karpathy/nanoGPT) and give the path. A step is
forward, loss, backward and a fused AdamW update. The two take turns within every round, so a slow moment of the machine
hits both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from benchmarks import machine  # noqa: E402

SHAPES = {  # vocabulary, context, width, layers, heads, rows per step
    "gpt2-mini": (4096, 512, 256, 6, 4, 8),
    "shakespeare-char": (65, 256, 384, 6, 6, 8),
    "wide-vocabulary": (50257, 256, 256, 4, 4, 4),
}
QUICK = (65, 32, 64, 1, 1, 2)
NOTES = (
    "tokens_per_second: of one training step (forward, loss over the whole vocabulary, backward, fused AdamW), "
    "after warm-up steps, both models in turn within each round; ratio: labkit's over nanoGPT's of the same "
    "round, above 1 = labkit is faster. Both compute the exact GELU, as nanoGPT does; ratio_gelu_new: the same with "
    "GPT-2's tanh form in labkit, which torch computes more slowly in bfloat16 on a CPU. loss_gap: of the two losses "
    "on the first batch, from the same weights. peak_mb: how far the resident memory "
    "of a process that only trains one of the two rises above what it held before the first step (on a GPU: torch's "
    "highest count), three processes each."
)


def nanogpt_model(path: str, shape: tuple):
    """nanoGPT's GPT, biases on as in GPT-2, without dropout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    vocabulary, context, width, layers, heads, _ = shape
    fields = {"block_size": context, "vocab_size": vocabulary, "n_layer": layers, "n_head": heads, "n_embd": width}
    fields |= {"dropout": 0.0, "bias": True}
    known = getattr(module.GPTConfig, "__dataclass_fields__", {})
    fields |= {"use_rmsnorm": False} if "use_rmsnorm" in known else {}
    with contextlib.redirect_stdout(io.StringIO()):
        return module.GPT(module.GPTConfig(**fields))


def labkit_model(shape: tuple, activation: str = "gelu"):
    """labkit's GPT; with nanoGPT's exact GELU unless GPT-2's own is asked for."""
    from labkit.gpt import GPT, GPTConfig

    vocabulary, context, width, layers, heads, _ = shape
    sizes = {"vocab_size": vocabulary, "context": context, "width": width, "layers": layers, "heads": heads}
    return GPT(GPTConfig(**sizes, activation=activation))


class Arm:
    """One model and its optimizer; `step(ids, targets)` trains on one batch and returns the loss."""

    def __init__(self, name: str, model, dtype: str, device: str):
        import torch

        self.torch, self.name, self.device, self.dtype = torch, name, device, getattr(torch, dtype)
        self.model = model.to(device).train()
        self.ours = getattr(self.model, "loss", None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def loss(self, ids, targets):
        if self.name == "nanogpt":
            return self.model(ids, targets)[1]
        return self.ours(ids, targets)

    def step(self, ids, targets) -> float:
        kind = self.device.partition(":")[0]
        with self.torch.autocast(kind, self.dtype, enabled=self.dtype != self.torch.float32):
            loss = self.loss(ids, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        machine.wait(self.device)
        return loss.item()


def batch(shape: tuple, number: int, device: str):
    import torch

    ids = torch.randint(shape[0], (shape[5], shape[1] + 1), generator=torch.Generator().manual_seed(number)).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def same_weights(ours, theirs) -> None:
    """Copy labkit's weights into nanoGPT's model: the names are GPT-2's in both."""
    target = dict(theirs.transformer.named_parameters())
    for name, weight in ours.named_parameters():
        target[name].data.copy_(weight.data)


def compare(path: str, shape: tuple, dtype: str, device: str, rounds: int, warmup: int = 3) -> dict:
    import torch

    torch.manual_seed(0)
    ours, theirs = labkit_model(shape), nanogpt_model(path, shape)
    same_weights(ours, theirs)
    as_gpt2 = labkit_model(shape, "gelu_new")
    as_gpt2.load_state_dict(ours.state_dict())
    models = {"labkit": ours, "labkit_gelu_new": as_gpt2, "nanogpt": theirs}
    arms = [Arm(name, model, dtype, device) for name, model in models.items()]
    tokens, speeds, first = shape[1] * shape[5], {name: [] for name in models}, {}
    for number in range(warmup + rounds):
        ids, targets = batch(shape, number, device)
        for arm in arms if number % 2 else reversed(arms):
            began = time.perf_counter()
            loss = arm.step(ids, targets)
            first.setdefault(arm.name, loss)
            if number >= warmup:
                speeds[arm.name].append(round(tokens / (time.perf_counter() - began), 1))

    def ratios(name: str) -> dict:
        return machine.spread([round(a / b, 4) for a, b in zip(speeds[name], speeds["nanogpt"], strict=True)])

    return {
        "tokens_per_second": {name: machine.spread(each) for name, each in speeds.items()},
        "ratio": ratios("labkit"),
        "ratio_gelu_new": ratios("labkit_gelu_new"),
        "loss_gap": abs(first["labkit"] - first["nanogpt"]),
    }


def one_arm(options: argparse.Namespace) -> None:
    import psutil

    from labkit.training import peak_memory

    shape = SHAPES[options.shapes[0]]
    model = labkit_model(shape) if options.arm == "labkit" else nanogpt_model(options.nanogpt, shape)
    arm = Arm(options.arm, model, options.dtype[0], options.device)
    before = 0 if options.device.startswith("cuda") else psutil.Process().memory_info().rss
    for number in range(3):
        arm.step(*batch(shape, number, options.device))
    print(json.dumps(round((peak_memory() - before) / 1e6, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="path of nanoGPT's model.py")
    parser.add_argument(
        "--shapes", nargs="+", default=["gpt2-mini", "shakespeare-char", "wide-vocabulary"], choices=SHAPES
    )
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--arm", choices=["labkit", "nanogpt"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    machine.use(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.arm:
        return one_arm(options)
    suffix = "_gpu" if options.device.startswith("cuda") else ""
    if not options.nanogpt or not Path(options.nanogpt).is_file():
        sys.exit("give --nanogpt the path of nanoGPT's model.py (github.com/karpathy/nanoGPT)")
    if options.quick:
        print(json.dumps(compare(options.nanogpt, QUICK, "float32", "cpu", 5), indent=1))
        return None
    results = {}
    for shape in options.shapes:
        for dtype in options.dtype:
            found = compare(options.nanogpt, SHAPES[shape], dtype, options.device, options.rounds)
            common = ["--nanogpt", options.nanogpt, "--shapes", shape, "--dtype", dtype, "--device", options.device]
            found["peak_mb"] = {arm: [] for arm in ("labkit", "nanogpt")}
            for _ in range(3):
                for arm, each in found["peak_mb"].items():
                    each.append(machine.in_a_process([__file__, *common, "--arm", arm]))
            found["peak_mb"] = {arm: machine.spread(each) for arm, each in found["peak_mb"].items()}
            results[f"{shape} {dtype}"] = found
            speeds = ", ".join(f"{k} {v['median']:,.0f}" for k, v in found["tokens_per_second"].items())
            ratios = ", ".join(f"{found[key]['median']:.3f}" for key in ("ratio", "ratio_gelu_new"))
            memory = ", ".join(f"{k} {v['median']:,.0f}" for k, v in found["peak_mb"].items())
            print(f"{shape} {dtype}: {speeds} tokens/s; ratio {ratios}; MB {memory}")
    machine.write(f"gpt_training{suffix}", results, NOTES)
    return None


if __name__ == "__main__":
    main()
