"""One row of `labkit bench cost`, measured in a process of its own: python -m labkit.bench.cost_row, the row on stdin.

Two arms take turns within every step, on the same weights and the same batch. *labkit*: the model as labkit loads it,
converts it and prepares it for training. *plain*: the same backbone with a linear head, written with transformers alone
(and peft for LoRA); bidirectional, where asked, by transformers' own switch `config.is_causal = False`.

A step is what `labkit train` does with a batch, less clipping and schedule: forward pass under autocast, cross-entropy
of one of 9 labels per token, backward pass, fused AdamW. Full training keeps its weights in float32; LoRA keeps the
frozen backbone in the row's dtype.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.bench.flops import flops_per_token, matmul_rate, wait
from labkit.bench.jobs import end_with
from labkit.bench.machine import spread
from labkit.errors import LabkitError, NotEnoughMemoryError
from labkit.memory import is_out_of_memory
from labkit.peft_library import peft_for

WARM_UP = 2  # steps of each arm that are not counted
LABELS = tuple("ABCDEFGHI")  # as many as CoNLL-2003 has
RANK = 16
FOR_MEMORY = ("does not fit", "ran out of memory")
TRIAL = 2  # rows from which the memory of a whole batch is foretold


@dataclass(frozen=True)
class Row:
    """What one row measures. `attn` None: the backend that labkit chooses for the model; `note`: why it is so."""

    model: str
    batch_size: int
    length: int
    dtype: str
    attn: str | None
    method: str
    mask: str
    device: str
    steps: int
    note: str = ""

    @property
    def name(self) -> str:
        """gpt2-mini, 8 x 128, float32, sdpa, full, bidirectional"""
        attn = self.attn or "default attention"
        return f"{self.model}, {self.batch_size} x {self.length}, {self.dtype}, {attn}, {self.method}, {self.mask}"


def measure(row: Row) -> dict[str, Any]:
    """The numbers of a row, or, where it cannot be measured, {"reason": why}; `FOR_MEMORY` begin those of memory."""
    try:
        return {"reason": None} | _measured(row)
    except NotEnoughMemoryError as error:
        return {"reason": _one_line(f"{FOR_MEMORY[0]}: {error}")}
    except LabkitError as error:
        return {"reason": _one_line(error)}
    except Exception as error:  # of a backend or a kernel: whatever it is, it is this row's answer and not the others'
        what = FOR_MEMORY[1] if is_out_of_memory(error) else type(error).__name__
        return {"reason": _one_line(f"{what}: {error}")}


def _measured(row: Row) -> dict[str, Any]:
    from labkit import precision
    from labkit.tasks import adapters

    torch.manual_seed(0)
    ours, plain, backend = _both(row)
    config = ours.config.get_text_config()
    chosen = precision.choose(config.model_type, precision.here() if row.device != "cpu" else None, row.dtype)
    batch = _batch(row, config.vocab_size)
    with precision.kernels(chosen.tf32):  # both arms, and the rate that they are held against
        numbers = _in_turns(row, ours, plain, batch)
    trained, parameters = adapters.trainable(ours)
    facts = {"backend": backend, "parameters": parameters, "trained_parameters": trained, "tf32": chosen.tf32}
    return facts | numbers


def _in_turns(row: Row, ours: nn.Module, plain: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    _require_room(row, ours, batch)
    gap = _gap(row, ours, plain, batch)
    optimizer = _adamw(ours)
    arms = {"labkit": _Arm(row, ours, optimizer)}
    # full training: the weights of both arms are the same tensors, and so are their moments
    arms["plain"] = _Arm(row, plain, optimizer if row.method == "full" else _adamw(plain))
    peaks = {name: _warmed_up(row, arm, batch) for name, arm in arms.items()}
    rate = matmul_rate(row.dtype, row.device)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for step in range(row.steps):
        for name in sorted(arms, reverse=bool(step % 2)):
            seconds[name].append(arms[name].step(batch))
    rate = max(rate, matmul_rate(row.dtype, row.device))  # its best: the machine may have been busy once
    return _numbers(row, seconds, flops_per_token(ours, row.length, mask=row.mask), rate, peaks, gap)


def _numbers(
    row: Row, seconds: dict[str, list[float]], flops: float, rate: float, peaks: dict[str, int], gap: float
) -> dict[str, Any]:
    each = {name: spread([round(s, 6) for s in values]) for name, values in seconds.items()}
    step = each["labkit"]["median"]
    tokens = row.batch_size * row.length / step
    ratios = [round(plain / own, 4) for own, plain in zip(seconds["labkit"], seconds["plain"], strict=True)]
    return {
        "seconds_per_step": each["labkit"],
        "samples_per_second": row.batch_size / step,
        "tokens_per_second": tokens,
        # on a CPU it is that of the process, which both arms share: taken before the plain one has run
        "peak_memory_bytes": peaks["labkit"],
        "flops_per_token": flops,
        "flops_per_second": tokens * flops,
        "matmul_flops_per_second": rate,
        "mfu": tokens * flops / rate,
        "plain_seconds_per_step": each["plain"],
        "plain_tokens_per_second": row.batch_size * row.length / each["plain"]["median"],
        "plain_peak_memory_bytes": peaks["plain"] if row.device != "cpu" else None,
        "speed_over_plain": spread(ratios),
        "logits_gap": gap,
    }


# ---- the two arms --------------------------------------------------------------------------------------------------


def _both(row: Row) -> tuple[Any, nn.Module, str]:
    """labkit's model, the plain one on the same weights, and the attention backend that both run."""
    import labkit
    from labkit.bench import shapes
    from labkit.heads import Head
    from labkit.tasks import adapters

    head = Head("token-classification", labels=LABELS)
    dtype = "float32" if row.method == "full" else row.dtype
    if shapes.is_random(row.model):
        ours = shapes.build(row.model, head, attn=row.attn, dtype=dtype, device=row.device)
    else:
        ours = labkit.load(row.model, task=head, attn=row.attn, dtype=dtype, device=row.device).model
    _require_positions(row, ours)
    shared = {id(tensor): tensor for tensor in [*ours.parameters(), *ours.buffers()]}
    backbone = copy.deepcopy(ours.backbone, shared)  # before labkit touches it
    if row.mask == "bidirectional":
        backbone.config.is_causal = False
        labkit.to_bidirectional(ours)
    backend = str(ours.config.get_text_config()._attn_implementation)
    if row.method == "lora":
        backbone = _plain_lora(backbone)
    ours = adapters.trained_part(ours, row.method, rank=RANK, dtype=row.dtype)
    (head_layer,) = (  # under LoRA the copy that PEFT trains, not the one it keeps
        module
        for name, module in ours.named_modules()
        if isinstance(module, nn.Linear) and (name == "head" or name.endswith("head.modules_to_save.default"))
    )
    return ours, PlainTokenClassifier(backbone, head_layer), backend


class PlainTokenClassifier(nn.Module):
    """A backbone of transformers, dropout, a linear layer: (batch, seq) token ids to (batch, seq, labels) logits."""

    def __init__(self, backbone: nn.Module, like: nn.Linear):
        super().__init__()
        self.backbone, self.dropout = backbone, nn.Dropout(0.1)
        self.head = nn.Linear(like.in_features, like.out_features, device="meta")
        self.head.weight, self.head.bias = like.weight, like.bias

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self.head(self.dropout(states.to(self.head.weight.dtype)))


def _plain_lora(backbone: nn.Module) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    matrices = {name: m for name, m in backbone.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    transposed = any(isinstance(m, Conv1D) for m in matrices.values())
    with peft_for("LoRA needs") as peft:
        settings = peft.LoraConfig(
            r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=list(matrices), fan_in_fan_out=transposed
        )
        return peft.get_peft_model(backbone, settings)


class _Arm:
    """A model and its optimizer; `step(batch)` trains on it and returns the seconds."""

    def __init__(self, row: Row, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.row, self.model, self.optimizer = row, model.train(), optimizer

    def step(self, batch: dict[str, Tensor]) -> float:
        wait(self.row.device)
        began = time.perf_counter()
        with _autocast(self.row):
            loss = loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        wait(self.row.device)
        return time.perf_counter() - began


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy over all tokens of the batch."""
    if not isinstance(model, PlainTokenClassifier):
        return model(**batch).loss
    logits = model(batch["input_ids"], batch["attention_mask"])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)


def _autocast(row: Row) -> Any:
    return torch.autocast(row.device.partition(":")[0], getattr(torch, row.dtype), enabled=row.dtype != "float32")


def _batch(row: Row, vocabulary: int) -> dict[str, Tensor]:
    """Random token ids and labels, each (batch, seq); no padding, so every token is a real one."""
    generator = torch.Generator().manual_seed(0)
    shape = (row.batch_size, row.length)
    batch = {
        "input_ids": torch.randint(8, vocabulary, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.randint(len(LABELS), shape, generator=generator),
    }
    return {name: each.to(row.device) for name, each in batch.items()}


# ---- what is checked before, and the memory ------------------------------------------------------------------------


def _require_positions(row: Row, model: Any) -> None:
    from labkit.anatomy import find_decoder

    limit = find_decoder(model).most_positions
    if limit is not None and row.length > limit:
        raise LabkitError(f"too long: {row.model} has {limit:,} positions")


def _require_room(row: Row, model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Raise NotEnoughMemoryError if the training is foreseen not to fit; measured on a row or two."""
    from labkit import memory
    from labkit.tasks.needs import measured_need

    rows = min(TRIAL, row.batch_size)
    trial = {name: each[:rows] for name, each in batch.items()}
    need = measured_need(model, loss_of, trial, share=row.batch_size / rows, dtype=row.dtype)
    torch.compiler.reset()  # what flex attention compiled for the trial and for the proof of the mask
    free = memory.available_bytes(row.device) + need.weights + need.base  # the weights are there already
    if need.to_try(row.device) > free:
        raise NotEnoughMemoryError(need.sentence(free))


def _gap(row: Row, ours: nn.Module, plain: nn.Module, batch: dict[str, Tensor]) -> float:
    """How far the logits of the two arms are apart on the first row, as a share of the largest: they should agree."""
    ours.eval()
    plain.eval()
    with torch.no_grad(), _autocast(row):
        own = ours(batch["input_ids"][:1], attention_mask=batch["attention_mask"][:1]).logits.float()
        other = plain(batch["input_ids"][:1], batch["attention_mask"][:1]).float()
    return float((own - other).abs().max() / other.abs().max().clamp(min=1e-9))


def _warmed_up(row: Row, arm: _Arm, batch: dict[str, Tensor]) -> int:
    """Run the steps that do not count; the most bytes that were held in them, of the GPU or of this process."""
    from labkit.training import peak_memory

    if row.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        arm.step(batch)
    return peak_memory()


def _one_line(message: Any) -> str:
    return " ".join(str(message).split())[:300]


def main(report: Callable[[str], Any] = print) -> None:
    """Read a row from standard input, print its numbers as the last line of standard output; end with the parent."""
    end_with(os.getppid())
    row = Row(**json.loads(sys.stdin.read()))
    report(json.dumps(asdict(row) | measure(row)))


if __name__ == "__main__":
    main()
