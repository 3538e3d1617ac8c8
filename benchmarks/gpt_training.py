"""Training throughput of labkit.gpt against the model.py of karpathy/nanoGPT: same shape, same weights, same batches.

    python benchmarks/gpt_training.py --nanogpt path/to/nanoGPT/model.py [--dtype float32 bfloat16] [--device cuda]
    python benchmarks/gpt_training.py --nanogpt path/to/model.py --quick          (seconds, nothing is written)

nanoGPT is not part of this project: fetch it yourself (github.com/karpathy/nanoGPT) and give the path.

tokens_per_second: of one training step (forward, loss over the whole vocabulary, backward, fused AdamW), after warm-up
steps, both models in turn within each round, so a slow moment of the machine hits both; ratio: labkit's over nanoGPT's
of the same round, above 1 = labkit is faster. Both compute the exact GELU, as nanoGPT does; ratio_gelu_new: the same
with GPT-2's tanh form in labkit, which torch computes more slowly in bfloat16 on a CPU. loss_gap: of the two losses on
the first batch, from the same weights. peak_mb: how far the resident memory of a process that only trains one of the
two rises above what it held before the first step (on a GPU: torch's highest count), three processes each.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import torch  # noqa: E402

from benchmarks import machine  # noqa: E402
from labkit.gpt import GPT, GPTConfig  # noqa: E402

ARMS = ("labkit", "labkit_gelu_new", "nanogpt")
SHAPES = {  # vocabulary, context, width, layers, heads, rows per step
    "gpt2-mini": (4096, 512, 256, 6, 4, 8),
    "shakespeare-char": (65, 256, 384, 6, 6, 8),
    "wide-vocabulary": (50257, 256, 256, 4, 4, 4),
}
QUICK = (65, 32, 64, 1, 1, 2)
ROUNDS = 15


def nanogpt_model(path: str, shape: tuple):
    """nanoGPT's GPT, biases on as in GPT-2, without dropout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    vocabulary, context, width, layers, heads, _ = shape
    fields = {"block_size": context, "vocab_size": vocabulary, "n_layer": layers, "n_head": heads, "n_embd": width}
    fields |= {"dropout": 0.0, "bias": True}
    if "use_rmsnorm" in getattr(module.GPTConfig, "__dataclass_fields__", {}):
        fields["use_rmsnorm"] = False
    with contextlib.redirect_stdout(io.StringIO()):
        return module.GPT(module.GPTConfig(**fields))


def trainer(arm: str, path: str, shape: tuple, dtype: str, device: str) -> machine.Trainer:
    """labkit's GPT, with nanoGPT's exact GELU or GPT-2's own, or nanoGPT's; all start from the same weights."""
    vocabulary, context, width, layers, heads, rows = shape
    config = GPTConfig(vocabulary, context, width, layers, heads)
    torch.manual_seed(0)
    model = GPT(replace(config, activation="gelu_new" if arm == "labkit_gelu_new" else "gelu"))
    if arm == "nanogpt":
        ours, model = model, nanogpt_model(path, shape)
        target = dict(model.transformer.named_parameters())  # the names are GPT-2's in both
        for name, weight in ours.named_parameters():
            target[name].data.copy_(weight.data)

    def loss(model, ids, targets):
        return model(ids, targets)[1] if arm == "nanogpt" else model.loss(ids, targets)

    return machine.Trainer(model, loss, vocabulary, rows, context, dtype, device)


def compare(path: str, shape: tuple, dtype: str, device: str, rounds: int) -> dict:
    trainers = {arm: trainer(arm, path, shape, dtype, device) for arm in ARMS}
    losses = {arm: trainer.step(0) for arm, trainer in trainers.items()}
    seconds = machine.in_turn({arm: trainer.step for arm, trainer in trainers.items()}, rounds, 3, device)
    tokens = shape[1] * shape[5]
    return {
        "tokens_per_second": {arm: machine.spread([tokens / s for s in values], 1) for arm, values in seconds.items()},
        "ratio": machine.ratios(seconds["nanogpt"], seconds["labkit"]),
        "ratio_gelu_new": machine.ratios(seconds["nanogpt"], seconds["labkit_gelu_new"]),
        "loss_gap": abs(losses["labkit"] - losses["nanogpt"]),
    }


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--nanogpt", help="path of nanoGPT's model.py")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    options = parser.parse_args()
    if not options.nanogpt or not Path(options.nanogpt).is_file():
        sys.exit("give --nanogpt the path of nanoGPT's model.py (github.com/karpathy/nanoGPT)")
    machine.use(options)
    if options.quick:
        print(json.dumps(compare(options.nanogpt, QUICK, "float32", "cpu", 5), indent=1))
        return
    results = {}
    for shape, dtype in itertools.product(options.shapes, options.dtype):
        training = (options.nanogpt, SHAPES[shape], dtype, options.device)
        result = compare(*training, ROUNDS)
        result["peak_mb"] = {arm: machine.peak_mb(options, trainer, arm, *training) for arm in ("labkit", "nanogpt")}
        speeds = ", ".join(f"{arm} {rate['median']:,.0f}" for arm, rate in result["tokens_per_second"].items())
        ratios = ", ".join(f"{result[key]['median']:.3f}" for key in ("ratio", "ratio_gelu_new"))
        memory = ", ".join(f"{arm} {peak['median']:,.0f}" for arm, peak in result["peak_mb"].items())
        print(f"{shape} {dtype}: {speeds} tokens/s; ratio {ratios}; MB {memory}")
        results[f"{shape} {dtype}"] = result
    name = "gpt_training_gpu" if options.device.startswith("cuda") else "gpt_training"
    machine.write(name, results, __doc__, target=options.output)


if __name__ == "__main__":
    main()
