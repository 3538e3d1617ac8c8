"""What a training step costs: time, tokens per second, peak memory, and the share of the machine's arithmetic it uses.

    python benchmarks/cost.py --models gpt2-mini,gemma3-270m --batch-sizes 1,2 --lengths 128,512 --output runs/cost.json
    python benchmarks/cost.py --models random:gemma-2-9b --method lora --dtypes bfloat16 --attn eager,flex_attention
    python benchmarks/cost.py --quick             (a tiny model, seconds, nothing is written)

A step: forward pass under autocast, cross-entropy of one of 9 labels per token, backward pass, fused AdamW, on random
tokens without padding. Full training keeps its weights in float32; LoRA keeps the frozen backbone in the row's dtype.
Models are names that `labkit.load` takes, or a published shape with random weights: the cost of a step does not depend
on the values of the weights.

Each row is measured in a process of its own; if it does not fit, or its attention backend cannot run the model, it is
stored with the reason. seconds_per_step: spread of the timed steps after warm-up; tokens_per_second is that of the
median. peak_memory_bytes: of the GPU, or resident, of the process of this row. flops_per_token: of the matrix products
of forward and backward pass, counted by torch.utils.flop_counter with eager attention, which computes every pair of
tokens. mfu: their rate over matmul_flops_per_second, the best rate of a large square matrix product in the same dtype,
process and threads. The file is written after each row.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from itertools import product
from pathlib import Path
from textwrap import shorten
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import torch  # noqa: E402
import transformers  # noqa: E402
from torch.utils.benchmark import Timer  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from benchmarks import machine  # noqa: E402
from benchmarks.study.runner import listed  # noqa: E402
from labkit import convert, models, training  # noqa: E402
from labkit.decoder import limits  # noqa: E402
from labkit.errors import LabkitError, ModelError, is_out_of_memory  # noqa: E402
from labkit.models import adapters, folders, precision  # noqa: E402
from labkit.models.heads import Head  # noqa: E402

LABELS = tuple("ABCDEFGHI")  # as many as CoNLL-2003 has
RANK = 16  # of LoRA
SIDES = {"cpu": 1024, "cuda": 8192}  # of the square matrices whose product measures the machine's rate
RANDOM = "random:"
GEMMA_2_9B = {"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {  # table 1 of the report on Gemma 2 (arXiv 2408.00118)
    "gpt2": ("GPT2Config", {}),
    "gemma-2-2b": ("Gemma2Config", {}),  # the defaults of transformers
    "gemma-2-9b": ("Gemma2Config", GEMMA_2_9B | {"num_key_value_heads": 8}),
}


def measure(row: dict[str, Any], seconds: float = 5.0) -> dict[str, Any]:
    """The numbers of one row, or {"reason": why it could not be measured}."""
    try:
        return {"reason": None} | _measured(row, seconds)
    except Exception as error:  # an attention backend or a kernel may raise anything, and the other rows must go on
        kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
        message = str(error) if isinstance(error, LabkitError) else f"{kind}: {error}"
        return {"reason": shorten(message, 300)}


def _measured(row: dict[str, Any], seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    backbone_dtype = "float32" if row["method"] == "full" else row["dtype"]
    model, backend = load(row["model"], row["attn"], backbone_dtype, row["device"])
    kind, config = type(model), copy.deepcopy(model.config)
    if row["mask"] == "bidirectional":
        convert.to_bidirectional(model)
    model = adapters.trained_part(model, row["method"], rank=RANK, dtype=row["dtype"]).train()
    text = config.get_text_config()
    step = training_step(model, batch(row, text.vocab_size), row)
    card = precision.here() if row["device"] == "cuda" else None
    chosen = precision.choose(text.model_type, card, row["dtype"])
    with precision.kernels(chosen.tf32):
        times = timed(step, seconds)
        peak = training.peak_memory()  # before the matrices of the matmul rate are made
        rate = matmul_rate(row["dtype"], row["device"])
    trained, parameters = adapters.trainable(model)
    steps = machine.spread(times, 6)
    tokens = row["batch_size"] * row["length"] / steps["median"]
    flops = flops_per_token(kind, config, row["method"], row["length"])
    return {
        "backend": backend,
        "parameters": parameters,
        "trained_parameters": trained,
        "tf32": chosen.tf32,
        "seconds_per_step": steps,
        "samples_per_second": row["batch_size"] / steps["median"],
        "tokens_per_second": tokens,
        "peak_memory_bytes": peak,
        "flops_per_token": flops,
        "matmul_flops_per_second": rate,
        "mfu": tokens * flops / rate,
    }


def load(name: str, attn: str | None, dtype: str, device: str) -> tuple[Any, str]:
    """A causal model with a head that classifies tokens, and the attention backend that it uses."""
    head = Head("token-classification", labels=LABELS)
    if name.startswith(RANDOM):
        kind, config = folders.class_for(shape(name), head, name)
        attn, _ = folders.choose_attention(kind, config, attn, name)
        limits.require_memory_for_model(name, limits.configured_parameters(config, kind), getattr(torch, dtype), device)
        with torch.device(device):
            model = kind._from_config(config, attn_implementation=attn, dtype=getattr(torch, dtype))
    else:
        model = models.load(name, task=head, attn=attn, dtype=dtype, device=device).model
    return model, str(model.config.get_text_config()._attn_implementation)


def shape(name: str) -> Any:
    """The configuration of a published shape. Raises ModelError if there is none of this name."""
    if name.removeprefix(RANDOM) not in SHAPES:
        raise ModelError(f"there is no shape {name!r}; choose one of {', '.join(RANDOM + shape for shape in SHAPES)}")
    kind, sizes = SHAPES[name.removeprefix(RANDOM)]
    return getattr(transformers, kind)(**sizes)


def flops_per_token(kind: type, config: Any, method: str, length: int) -> float:
    """Floating-point operations of a forward and a backward pass over one row, per token, counted without computing."""
    with torch.device("meta"):
        model = adapters.trained_part(kind._from_config(config, attn_implementation="eager"), method, rank=RANK)
        ids = torch.zeros(1, length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    return counter.get_total_flops() / length


def batch(row: dict[str, Any], vocabulary: int) -> dict[str, torch.Tensor]:
    """Random token ids and labels, each (batch, seq), without padding."""
    size = (row["batch_size"], row["length"])
    ids, labels = torch.randint(8, vocabulary, size), torch.randint(len(LABELS), size)
    tensors = {"input_ids": ids, "attention_mask": torch.ones(size, dtype=torch.long), "labels": labels}
    return {name: tensor.to(row["device"]) for name, tensor in tensors.items()}


def training_step(model: Any, inputs: dict[str, torch.Tensor], row: dict[str, Any]) -> Callable[[], None]:
    """One step of training on `inputs`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def step() -> None:
        with torch.autocast(row["device"], getattr(torch, row["dtype"]), enabled=row["dtype"] != "float32"):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(call: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of each call, after warm-up; as many calls as fit into `seconds`, and at least one."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    timer.timeit(1)  # two warm-up calls and one more: lazily made buffers and compiled kernels do not count
    return timer.blocked_autorange(min_run_time=seconds).times


def matmul_rate(dtype: str, device: str, seconds: float = 1.0) -> float:
    """FLOPs per second of a large square matrix product: the best of as many as fit into `seconds`."""
    side = SIDES[device]
    a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * side**3 / min(timed(lambda: a @ b, seconds))


def in_words(row: dict[str, Any]) -> str:
    """One row in a line."""
    facts = [row["model"], f"{row['batch_size']} x {row['length']}", row["dtype"], row["attn"] or "default attention"]
    name = ", ".join([*facts, row["method"], row["mask"]])
    if row["reason"] is not None:
        return f"{name}: not measured: {row['reason']}"
    step = row["seconds_per_step"]
    return (
        f"{name}: {row['tokens_per_second']:,.0f} tokens/s, {step['median']:.3f} s per step ({step['min']:.3f} to "
        f"{step['max']:.3f}, n = {step['n']}), peak {row['peak_memory_bytes'] / 1e9:.2f} GB, MFU {row['mfu']:.1%}"
    )


def main() -> int:
    cuda, several, numbers = torch.cuda.is_available(), listed(), listed(int)
    parser = machine.parser(__doc__)
    parser.set_defaults(device="cuda" if cuda else "cpu")
    on_gpu = ["random:gemma-2-2b", "random:gemma-2-9b"]
    parser.add_argument("--models", type=several, default=on_gpu if cuda else ["gpt2-mini"], help="separated by commas")
    parser.add_argument("--batch-sizes", type=numbers, default=[4, 8] if cuda else [1, 4], help="rows per step")
    parser.add_argument("--lengths", type=numbers, default=[512, 1024] if cuda else [128, 512], help="tokens per row")
    parser.add_argument("--dtypes", type=several, default=["bfloat16" if cuda else "float32"])
    parser.add_argument("--attn", type=several, default=["default"], help="eager, sdpa, flex_attention, ... or default")
    parser.add_argument("--method", choices=["full", "lora"], default="full")
    parser.add_argument("--masks", type=several, default=["bidirectional"], help="bidirectional, causal (unchanged)")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for the steps of a row (default 10)")
    within = "seconds: begin no row that would end later (default: no limit)"
    parser.add_argument("--within", type=float, default=math.inf, help=within)
    options = parser.parse_args()
    machine.use(options)
    if options.quick:
        options.models, options.batch_sizes, options.lengths, options.seconds = ["tiny-gpt2"], [2], [16], 0.1
    began, longest = time.perf_counter(), 0.0
    axes = product(options.models, options.dtypes, options.lengths, options.batch_sizes, options.attn, options.masks)
    common = {"method": options.method, "device": options.device}
    rows = []
    for model, dtype, length, size, attn, mask in axes:
        row = {"model": model, "batch_size": size, "length": length, "dtype": dtype, "mask": mask}
        row |= {"attn": None if attn == "default" else attn} | common
        start = time.perf_counter()
        if start - began + longest > options.within:
            print("left out:", ", ".join(map(str, row.values())), flush=True)
            continue
        try:
            rows.append(row | machine.apart(options, measure, row, options.seconds))
        except BrokenProcessPool:
            rows.append(row | {"reason": "its process was killed, probably because memory ran out"})
        longest = max(longest, time.perf_counter() - start)
        print(in_words(rows[-1]), flush=True)
        if options.output or not options.quick:
            name = f"cost_{'cpu' if options.device == 'cpu' else 'gpu'}"
            machine.write(name, rows, __doc__, key="rows", target=options.output)
    return 0 if any(row["reason"] is None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
