"""What bidirectional attention costs: the converted model against the causal one and against the full-mask recipe.

    python benchmarks/attention.py [--model gemma3-270m] [--device cuda] [--threads N]
    python benchmarks/attention.py --quick          (a tiny model, seconds, nothing is written)

Three arms run the same weights: `causal`, the model as it was; `converted`, after `labkit.to_bidirectional`; `recipe`,
the common way to the same end, an explicit float mask (batch, 1, S, S) handed to every layer: 0 everywhere, the most
negative number at padded keys, built once per call (that is part of its time). The recipe lets local layers attend past
their window, so beyond it the two compute different things.

Measured is the layer stack without the vocabulary head, on a batch of 2, the second row one quarter padding where
padded. seconds: one forward pass (step=forward, no gradients), or forward, backward and an SGD update of all but the
embedding (step=train), after one warm-up, the arms in turn within each round. ratios: of the times of one round, below
1 = the converted model was faster. peak_mb: the highest memory (1 MB = 1e6 bytes) above that after loading and a call
of 8 tokens: resident memory, sampled, in a process of its own for each arm, step and kind of padding, from the shortest
length to the longest (on a GPU: torch's own count).
"""

from __future__ import annotations

import argparse
import copy
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import torch  # noqa: E402

import labkit  # noqa: E402
from benchmarks import machine  # noqa: E402

ARMS = ("causal", "converted", "recipe")
LENGTHS = {"forward": (128, 512, 1024), "train": (128, 512)}
QUICK = {"forward": (32, 96), "train": (32,)}
ROUNDS = 5
PADDED_SHARE = 0.75  # of the second row of a padded batch is real


class Bench:
    """One model three times over, the weights shared, and the batch to run."""

    def __init__(self, name: str, device: str, arms=ARMS):
        stack = labkit.load(name, device=device).model.base_model
        self.device, self.stack = device, stack
        stack.get_input_embeddings().weight.requires_grad_(False)
        self.dtype = next(stack.parameters()).dtype
        self.converted = stack
        if "converted" in arms:
            shared = {id(t): t for t in [*stack.parameters(), *stack.buffers()]}
            self.converted = labkit.to_bidirectional(copy.deepcopy(stack, shared))

    def batch(self, length: int, padded: bool):
        """ids (2, length) and the 2-D padding mask, or None."""
        generator = torch.Generator().manual_seed(length)
        vocabulary = self.stack.get_input_embeddings().num_embeddings
        ids = torch.randint(8, vocabulary, (2, length), generator=generator).to(self.device)
        if not padded:
            return ids, None
        real = torch.ones(2, length, dtype=torch.long, device=self.device)
        real[1, int(PADDED_SHARE * length) :] = 0
        return ids, real

    def states(self, arm: str, ids, real):
        """Last hidden states, (2, length, dim)."""
        if arm == "recipe":
            real = self.full_mask(ids, real)
        stack = self.converted if arm == "converted" else self.stack
        return stack(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state

    def full_mask(self, ids, real):
        """The recipe's mask, (2, 1, S, S), float."""
        batch, length = ids.shape
        mask = torch.zeros(batch, 1, length, length, dtype=self.dtype, device=self.device)
        if real is not None:
            mask.masked_fill_(real[:, None, None, :] == 0, torch.finfo(self.dtype).min)
        return mask

    def forward(self, arm: str, ids, real) -> None:
        with torch.no_grad():
            self.states(arm, ids, real)

    def train(self, arm: str, ids, real) -> None:
        parameters = [p for p in self.stack.parameters() if p.requires_grad]
        loss = self.states(arm, ids, real).float().pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 1e-9 * parameter.grad
                parameter.grad = None

    def check(self, length: int) -> None:
        """The arms compute what their names say, or there is nothing to compare."""
        for padded in (False, True):
            ids, real = self.batch(length, padded)
            with torch.no_grad():
                causal, converted, recipe = (self.states(arm, ids, real)[1, 0].float() for arm in ARMS)
            cosine = torch.nn.functional.cosine_similarity
            window = getattr(self.stack.config, "sliding_window", None)
            if length <= (window or length) and cosine(converted, recipe, dim=0) < 0.99:
                sys.exit("the converted model and the recipe differ on a text shorter than the window")
            if cosine(converted, causal, dim=0) > 0.9999:
                sys.exit("the converted model and the causal one compute the same")

    def timed(self, step: str, length: int, padded: bool) -> dict:
        """Seconds of each arm, and their ratios in each round."""
        ids, real = self.batch(length, padded)
        calls = {arm: lambda _, arm=arm: getattr(self, step)(arm, ids, real) for arm in ARMS}
        seconds = machine.in_turn(calls, ROUNDS, 1, self.device)
        pairs = {f"converted/{arm}": machine.ratios(seconds["converted"], seconds[arm]) for arm in ("causal", "recipe")}
        return {"seconds": {arm: machine.spread(values, 5) for arm, values in seconds.items()}, "ratios": pairs}


def memory_of(options: argparse.Namespace, arm: str, step: str, padded: bool, lengths: tuple[int, ...]) -> list[float]:
    """The peak memory of one arm and step in this process at every length."""
    bench = Bench(options.model, options.device, [arm])
    call = getattr(bench, step)
    call(arm, *bench.batch(8, padded))  # what is made lazily, once, is not counted
    memory = machine.Memory(bench.device)
    return [memory.of(call, arm, *bench.batch(length, padded)) for length in lengths]


def measure(options: argparse.Namespace) -> list[dict]:
    bench, rows = None, []
    for (step, lengths), padded in product((QUICK if options.quick else LENGTHS).items(), (False, True)):
        memory = {arm: machine.apart(options, memory_of, options, arm, step, padded, lengths) for arm in ARMS}
        if bench is None:
            bench = Bench(options.model, options.device)
            bench.check(lengths[0])
        for length, *peaks in zip(lengths, *memory.values(), strict=True):
            row = {"step": step, "length": length, "padded": padded} | bench.timed(step, length, padded)
            rows.append(row | {"peak_mb": dict(zip(ARMS, peaks, strict=True))})
            print(sentence(rows[-1]), flush=True)
    return rows


def sentence(row: dict) -> str:
    words = [f"{row['step']:7} S={row['length']:<5} {'padded  ' if row['padded'] else 'unpadded'}"]
    words += [f"{arm} {row['seconds'][arm]['median'] * 1e3:.0f} ms, {row['peak_mb'][arm]:.0f} MB" for arm in ARMS]
    ratio = row["ratios"]["converted/recipe"]
    words.append(f"converted/recipe {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")
    return "; ".join(words)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--model", default="gemma3-270m")
    options = parser.parse_args()
    if options.quick:
        options.model = "tiny-gemma3"
    machine.use(options)
    rows = measure(options)
    if not options.quick:
        settings = {"model": options.model, "dtype": "as stored", "device": options.device, "batch": 2}
        name = "attention" if options.device == "cpu" else "attention_gpu"
        print(machine.write(name, settings | {"cases": rows}, __doc__))


if __name__ == "__main__":
    main()
