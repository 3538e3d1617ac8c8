"""What packing saves: real tokens per second of a training step, padded, grouped by length, and packed.

    python benchmarks/packing.py [--model gpt2-mini] [--dtype float32] [--batch-size 16] [--steps 8] [--rounds 5]
                                 [--data DIR] [--threads N]
    python benchmarks/packing.py --model gemma3-270m --dtype bfloat16 --steps 2 --rounds 3    (with LoRA)
    python benchmarks/packing.py --quick          (a tiny model, seconds, nothing is written)

Arms, of one bidirectional model: `grouped`, batches of nearly one length, as `labkit.training.draw` makes them of the
whole data set; `plain`, the same rows shuffled over the batches, padded to their longest; `packed`, the batches of
`plain` under `labkit.decoder.packing.packed`; `full`, packed too, but with as many of these rows in each batch as fit
into the slots that a batch of shuffled rows takes, real or not: about the same memory, more texts and fewer steps
(`labkit train --packing --batch-tokens`).

Length mixes: short texts (NER: WNUT 17) and long ones (QA: XQuAD) from DIR, which holds `wnut17/wnut17train.conll` and
`xquad_en/xquad.en.json`; without it, those of Field Notes.

tokens_per_second: real tokens (no padding) in `steps` training steps (forward, backward, AdamW), over their seconds,
once per round; in a round all arms compute the very same rows, step by step in turn, and one round warms up. ratios: of
two arms in one round, above 1 = the first was faster. model_ratios: the same without the seconds of AdamW, which costs
a step the same however few tokens it has. slots_per_token: token slots that the layers computed per real token, in the
first round, which does not depend on the machine. Trust the ratios rather than the tokens per second.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import torch  # noqa: E402

import labkit  # noqa: E402
from benchmarks import machine  # noqa: E402
from labkit.datasets import embedded, readers  # noqa: E402
from labkit.decoder.anatomy import find_decoder  # noqa: E402
from labkit.decoder.packing import packed  # noqa: E402
from labkit.models import adapters  # noqa: E402
from labkit.tasks.base import get, pad_id  # noqa: E402
from labkit.training import draw, preset  # noqa: E402

ARMS = ("plain", "grouped", "packed", "full")
FILES = {"ner": "wnut17/wnut17train.conll", "qa": "xquad_en/xquad.en.json"}
SEED = 0
LORA = ("gemma3-270m",)  # too large here to be trained whole


class Mix:
    """The rows of one task, a model with the task's head, and batches in two orders."""

    def __init__(self, task: str, options: argparse.Namespace):
        self.task, self.options, self.device = get(task), options, options.device
        if options.data:
            examples = readers.read(task, options.data / FILES[task])
        else:
            examples = embedded.read(task, "field-notes", "train")
        labels = self.task.labels(examples)
        head = self.task.head(labels, dropout=0.0, backbone_dropout=0.0)
        method = options.method or ("lora" if options.model in LORA else "full")
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            dtype = "float32" if method == "full" else options.dtype
            lm = labkit.load(options.model, task=head, dtype=dtype, device=options.device)
            labkit.to_bidirectional(lm.model)
            self.model = adapters.trained_part(lm.model, method, rank=16, dtype=options.dtype)
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):  # that of the attention weights, too
                module.p = 0.0
        self.rows, self.padding = self.task.rows(lm.tokenizer, examples, labels), pad_id(lm.tokenizer)
        self.lengths_of = lengths = [len(row.ids) for row in self.rows]
        size = options.batch_size
        steps = max(50, (options.rounds + 1) * options.steps)
        run = {"max_steps": steps, "per_device_train_batch_size": size, "gradient_accumulation_steps": 1}
        settings = preset("lm", **run, seed=SEED)
        self.grouped = [row for (row,) in draw(lengths, settings)]
        shuffled = [row for (row,) in draw(lengths, settings, packed=True)]
        batches = [[lengths[row] for row in shuffled[at * size : (at + 1) * size]] for at in range(50)]
        self.slots = sum(map(max, batches)) * size // len(batches)  # of a shuffled batch
        ordered = sorted(lengths)
        self.lengths = {"rows": len(ordered), "median": ordered[len(ordered) // 2], "max": ordered[-1]}
        self.optimiser = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)
        self.model.train()

    def batches(self, arm: str, round_: int) -> list[list[int]]:
        """The rows of every step of a round: the same rows in all arms, in other batches."""
        size, steps = self.options.batch_size, self.options.steps
        first = round_ * steps * size
        grouped = [self.grouped[first + step * size :][:size] for step in range(steps)]
        if arm == "grouped":
            return grouped
        rows = [row for batch in grouped for row in batch]
        random.Random(f"{SEED} {round_}").shuffle(rows)
        if arm in ("plain", "packed"):
            return [rows[at : at + size] for at in range(0, len(rows), size)]
        full: list[list[int]] = [[]]
        for row in rows:
            if full[-1] and sum(self.lengths_of[other] for other in [*full[-1], row]) > self.slots:
                full.append([])
            full[-1].append(row)
        return full

    def batch(self, rows: list[int]) -> dict:
        batch = self.task.collate([self.rows[row] for row in rows], self.padding)
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def step(self, arm: str, batch: dict) -> tuple[float, float]:
        """Seconds of the model, forward and backward, and of AdamW."""
        began = self.now()
        with self.running(arm), self.autocast():
            self.task.loss(self.model, batch).backward()
        between = self.now()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return between - began, self.now() - between

    def now(self) -> float:
        """Seconds, once the GPU has done what it was given."""
        machine.wait(self.device)
        return time.perf_counter()

    def running(self, arm: str):
        return packed(self.model) if arm in ("packed", "full") else nullcontext()

    def autocast(self):
        """As the training does it (`labkit.training`)."""
        bfloat16 = self.options.dtype == "bfloat16"
        return torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=bfloat16)

    def slots_per_token(self, arm: str) -> float:
        """Of the rows of the first timed round."""
        shapes, real = [], 0
        layer = find_decoder(self.model).layers[0]
        hook = layer.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(args[0].shape), with_kwargs=True)
        for rows in self.batches(arm, 1):
            batch = self.batch(rows)
            real += int(batch["attention_mask"].sum())
            with self.running(arm), self.autocast(), torch.no_grad():
                self.task.loss(self.model, batch)
        hook.remove()
        return round(sum(shape[0] * shape[1] for shape in shapes) / real, 4)


def timed(mix: Mix, rounds: int) -> dict:
    """Tokens per second of every arm, round by round, the arms in turn at each step."""
    whole: dict[str, list[float]] = {arm: [] for arm in ARMS}
    model_only: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(rounds + 1):
        rows = {arm: mix.batches(arm, number) for arm in ARMS}
        seconds = {arm: [0.0, 0.0] for arm in ARMS}
        tokens = dict.fromkeys(ARMS, 0)
        for step in range(max(map(len, rows.values())) if number else 1):
            for arm in ARMS:
                if step < len(rows[arm]):
                    batch = mix.batch(rows[arm][step])
                    seconds[arm] = [a + b for a, b in zip(seconds[arm], mix.step(arm, batch), strict=True)]
                    tokens[arm] += int(batch["attention_mask"].sum())
        if number:  # the first round warms up
            assert len(set(tokens.values())) == 1, "all arms compute the same rows"
            for arm in ARMS:
                whole[arm].append(tokens[arm] / sum(seconds[arm]))
                model_only[arm].append(tokens[arm] / seconds[arm][0])
    rates = {arm: machine.spread(values, 1) for arm, values in whole.items()}
    return {"tokens_per_second": rates, "ratios": ratios(whole), "model_ratios": ratios(model_only)}


def ratios(rates: dict[str, list[float]]) -> dict[str, dict]:
    """Of two arms within a round: how many times the tokens per second."""
    pairs = (("packed", "plain"), ("grouped", "plain"), ("packed", "grouped"), ("full", "plain"), ("full", "grouped"))
    return {f"{a}/{b}": machine.ratios(rates[a], rates[b]) for a, b in pairs}


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--model", default="gpt2-mini")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--method", choices=("full", "lora"), help="default: LoRA for Gemma")
    parser.add_argument("--tasks", nargs="+", choices=tuple(FILES), default=list(FILES))
    parser.add_argument("--data", type=Path, help="a folder with the two data sets (default: those of Field Notes)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step (default 16)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each arm in a round (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    options = parser.parse_args()
    if options.quick:
        options.model, options.batch_size, options.steps, options.rounds = "tiny-gemma3", 8, 2, 2
    machine.use(options)
    results = {}
    for task in options.tasks:
        mix = Mix(task, options)
        result = {"lengths": mix.lengths, **timed(mix, options.rounds), "slots_per_batch": mix.slots}
        result["slots_per_token"] = slots = {arm: mix.slots_per_token(arm) for arm in ARMS}
        medians = ", ".join(f"{pair} {ratio['median']:.2f}" for pair, ratio in result["ratios"].items())
        print(f"{options.model} {options.dtype} {task}: {medians}; slots per token {slots}", flush=True)
        results[task] = result
        if options.output or not options.quick:
            kept = ("model", "dtype", "method", "batch_size", "steps", "rounds")
            settings = {name: getattr(options, name) for name in kept} | {"seed": SEED}
            settings["data"] = "WNUT 17 train, XQuAD en" if options.data else "Field Notes"
            name = f"packing_{options.model.rpartition('/')[2]}_{options.dtype}".replace("-", "_")
            print(machine.write(name, settings | results, __doc__, target=options.output))


if __name__ == "__main__":
    main()
