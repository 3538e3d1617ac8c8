"""What a training step costs here: speed, memory and utilisation by model, batch, length, dtype and attention backend.

    labkit bench cost --models gpt2-mini --batch-sizes 1,8 --lengths 128,512 --output-dir runs/cost

Each row of the grid is measured in a process of its own (`labkit.bench.cost_row`), so that its peak memory is its own
and its end is not the end of the others: a row that does not fit, or whose backend cannot run the model, says why. A
row is in the folder once it is whole, so that a run that was killed goes on with the next one.

    config.json            what was asked for, and of which machine
    rows/000.json ...      one per row
    cost.json              all of them with the machine, written last; cost.md and cost.svg show it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from labkit.bench import cost_report, shapes
from labkit.bench.cost_row import FOR_MEMORY, WARM_UP, Row
from labkit.bench.machine import describe
from labkit.errors import TrainingError
from labkit.memory import GB
from labkit.models import ATTENTION_BACKENDS, REGISTRY, require_possible_hub_id
from labkit.run_folder import RunFolder, read_json, write_whole

DTYPES = ("float32", "bfloat16")
METHODS = ("full", "lora")
MASKS = ("bidirectional", "causal")
DIED = "its process"
DEFAULT = "default"  # the attention backend that labkit chooses for the model
FULL_UP_TO = 4 * 10**9  # parameters; beyond, LoRA is the default
BYTES_PER_WEIGHT = 16  # in full training: the weight, its gradient and AdamW's two moments, each in float32
DEFAULTS: dict[str, dict[str, tuple]] = {
    "cpu": {
        "models": ("gpt2-mini",), "batch_sizes": (1, 4), "lengths": (128, 512), "dtypes": ("float32",),
        "attn": ("sdpa", "eager"),
    },
    "cuda": {
        "models": ("random:gemma-2-2b", "random:gemma-2-9b"), "batch_sizes": (4, 8), "lengths": (512, 1024),
        "dtypes": ("bfloat16",), "attn": ("flex_attention", "eager"),  # Gemma 2 caps its scores, which sdpa cannot do
    },
}  # fmt: skip
NOTES = (
    "A step: forward pass under autocast, cross-entropy of one of 9 labels per token, backward pass, fused AdamW; "
    f"random tokens without padding; {WARM_UP} steps of warm-up are not counted. Full training keeps weights in "
    "float32; LoRA (rank 16 on every matrix of the layers) keeps the frozen backbone in the dtype of the row. "
    "seconds_per_step: median, min, max and each; tokens and samples per second are those of the median. plain: the "
    "same step on the same weights, written with transformers alone (bidirectional by config.is_causal = False), in "
    "turn with labkit's step by step; speed_over_plain: its seconds over labkit's of the same step, above 1 = labkit "
    "is faster. peak_memory_bytes: of the GPU, or resident, of a process that measures this row only. flops_per_token: "
    "6 per trained and 4 per frozen weight of a matrix product, and 12 x heads x head width x keys for every layer "
    "(PaLM, appendix B); mfu: its rate over matmul_flops_per_second, the best rate of a large square matrix product "
    "in the same dtype, process and threads. logits_gap: largest difference of the two arms' logits over the largest "
    "logit; not 0 past the window of a local layer, which plain transformers makes one token wider."
)


def cost(
    output_dir: str | Path,
    *,
    models: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
    lengths: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    attn: Sequence[str] = (),
    method: str | None = None,
    mask: str = "bidirectional",
    steps: int = 6,
    device: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Measure every combination and return what `cost.json` in `output_dir` holds; its "rows" are in the grid's order.

    Args:
        models: names that `labkit.load` takes, or "random:gemma-2-2b" (`labkit.bench.shapes`). Whatever is left empty
            is as in `DEFAULTS` for the device.
        attn: backends, or "default" for the one that labkit chooses for the model.
        method: "full" or "lora"; None: full, or LoRA for a model of more than 4 billion parameters, where their number
            is known beforehand: of a hub id it is not.
        steps: that are timed, of each arm; which of the two is first changes from step to step.
        device: "cpu" or "cuda"; None: the GPU if there is one.
        resume: go on with the folder's run; rows that were not measured for want of memory are tried again.

    Raises:
        TrainingError, UnknownModelError: an argument that means nothing, or a folder in use; nothing is written then.
    """
    import torch
    from tqdm import tqdm

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in DEFAULTS or (device == "cuda" and not torch.cuda.is_available()):
        raise TrainingError(f"the device is {device!r}; choose cpu, or cuda where there is a CUDA GPU")
    asked = {"models": models, "batch_sizes": batch_sizes, "lengths": lengths, "dtypes": dtypes, "attn": attn}
    axes = {name: tuple(dict.fromkeys(given)) or DEFAULTS[device][name] for name, given in asked.items()}
    rows = grid(**axes, method=method, mask=mask, steps=steps, device=device)
    machine = describe()
    config = {"command": "bench cost", **axes, "method": method, "mask": mask, "steps": steps, "device": device}
    same = {name: machine[name] for name in ("cpu", "gpus", "torch_threads", "versions")}
    with RunFolder.alone(output_dir, config | {"machine": same}, resume=resume) as run:
        done = [_unless_for_memory(read_json(_file(run, number))) for number in range(len(rows))]
        initial = sum(row is not None for row in done)
        with tqdm(total=len(rows), initial=initial, unit="row", disable=None) as bar:  # None: on a terminal only
            for number, row in enumerate(rows):
                if done[number] is None:
                    bar.set_postfix_str(row.name)
                    done[number] = _in_its_own_process(row)
                    write_whole(_file(run, number), json.dumps(done[number], indent=1) + "\n")
                    tqdm.write(f"{row.name}: {cost_report.in_words(done[number])}", file=sys.stderr)
                    bar.update()
        return _finish(run, config, machine, done)


def grid(
    *,
    models: Sequence[str],
    batch_sizes: Sequence[int],
    lengths: Sequence[int],
    dtypes: Sequence[str],
    attn: Sequence[str],
    method: str | None,
    mask: str,
    steps: int,
    device: str,
) -> list[Row]:
    """The rows of all combinations. Raises TrainingError or UnknownModelError for a value that means nothing."""
    for what, given in (("batch size", batch_sizes), ("length", lengths), ("number of steps", (steps,))):
        if wrong := [number for number in given if number < 1]:
            raise TrainingError(f"a {what} is {wrong[0]}; it must be at least 1")
    choices = (
        ("dtype", dtypes, DTYPES),
        ("attention backend", attn, (DEFAULT, *ATTENTION_BACKENDS)),
        ("method", () if method is None else (method,), METHODS),
        ("mask", (mask,), MASKS),
    )
    for what, given, known in choices:
        if wrong := [name for name in given if name not in known]:
            raise TrainingError(f"the {what} is {wrong[0]!r}; choose one of {', '.join(known)}")
    methods = {model: _method(model, method) for model in models}
    return [
        Row(model, batch, length, dtype, None if backend == DEFAULT else backend, methods[model][0], mask, device,
            steps, note=methods[model][1])
        for model, dtype, length, batch, backend in product(models, dtypes, lengths, batch_sizes, attn)
    ]  # fmt: skip


def _method(model: str, asked: str | None) -> tuple[str, str]:
    """How to train this model, and a note where that was not asked for."""
    parameters = _parameters(model)
    if asked is not None or parameters is None or parameters <= FULL_UP_TO:
        return asked or "full", ""
    needed = BYTES_PER_WEIGHT * parameters / GB
    return "lora", f"LoRA by default: full training of {parameters / 1e9:.1f} B weights takes over {needed:.0f} GB"


def _parameters(model: str) -> int | None:
    """How many weights the model has, None if only its files on the hub know. Raises UnknownModelError."""
    if shapes.is_random(model):
        return shapes.PARAMETERS[model.removeprefix(shapes.PREFIX)]
    if model in REGISTRY:
        return REGISTRY[model].parameters
    if (folder := Path(model).expanduser()).is_dir():
        from labkit.memory import stored_parameters

        return sum(stored_parameters(folder).values())
    require_possible_hub_id(model)
    return None


def _file(run: RunFolder, number: int) -> Path:
    return run.path / "rows" / f"{number:03}.json"


def _unless_for_memory(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """The row, but None if it was not measured for want of memory, or its process died: that depends on the moment."""
    reason = (row or {}).get("reason") or ""
    return None if reason.startswith((*FOR_MEMORY, DIED)) else row


def _in_its_own_process(row: Row) -> dict[str, Any]:
    """What `cost_row` prints; a process that ends without a word is a row with a reason, too."""
    command = [sys.executable, "-m", "labkit.bench.cost_row"]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if row.device == "cpu" else {})
    done = subprocess.run(
        command, input=json.dumps(asdict(row)), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode == -9:  # SIGKILL
        why = f"{DIED} was killed, most likely as memory ran out"
    else:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        why = f"{DIED} ended with code {done.returncode}: {last}"
    return asdict(row) | {"reason": why}


def _finish(run: RunFolder, config: dict, machine: dict, rows: list[dict]) -> dict[str, Any]:
    """Write what is made of all rows; a finished run that is resumed keeps its date."""
    from labkit.viz.saving import save

    before = read_json(run.path / "cost.json") or {}
    rates: dict[str, float] = {}
    for row in rows:
        if row["reason"] is None:
            rates[row["dtype"]] = max(row["matmul_flops_per_second"], rates.get(row["dtype"], 0.0))
    found = {
        "benchmark": "cost", "date": before.get("date") or datetime.now(UTC).date().isoformat(), "notes": NOTES,
        "machine": machine, "config": config, "matmul_flops_per_second": rates, "rows": rows,
    }  # fmt: skip
    write_whole(run.path / "cost.md", cost_report.table(found))
    save(cost_report.figure(rows), run.path / "cost.svg")
    run.write_json("cost.json", found)
    return read_json(run.path / "cost.json")
