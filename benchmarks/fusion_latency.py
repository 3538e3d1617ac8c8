"""What fusing N paraphrases costs: seconds and memory against N and the length of the answer, engine by engine.

    python benchmarks/fusion_latency.py [--model gemma3-270m] [--dtype float32] [--counts 1 2 5 10 20] [--rounds 5]
    python benchmarks/fusion_latency.py --quick          (a tiny model, seconds, nothing is written)

Arms, all on the same token ids, greedy, with no end token, so that each writes as much as it is asked to:
`fast`, `flex` and `dense` fuse with the engines of those names (`labkit.fusion`); `cacheless` fuses as the public
experiment does, reading all again for each token; `logit-average` is the batch of N rows that the fast engine averages;
`apart` is the same average from plain transformers: N sequences, each with a cache of its own, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from benchmarks import machine  # noqa: E402

ARMS = ("fast", "logit-average", "apart", "dense", "flex", "cacheless")
PREFIX, SEGMENT, CUE = 96, 24, 3  # tokens: five examples, a question, "Answer:"
NOTES = (
    "One question at a time: a prefix of 96 tokens, N segments of 24, a cue of 3, random token ids. seconds[arm]: "
    "prefill (the prompt and one token) and answer (the prompt and `new_tokens`), one value per round; the arms take "
    "turns within a round, and one round warms up (compilation among it). ratios: of two arms within one round, above "
    "1 = the first took longer. growth: prefill seconds fitted by a + b N + c N^2 through the medians; curved = the "
    "share of c N^2 in the fitted seconds at the largest N. peak_mb: highest memory above that after loading, each arm "
    "and N in a process of its own; resident memory on a CPU, which is coarse."
)


class Bench:
    """One model, and the arms on it."""

    def __init__(self, options: argparse.Namespace):
        import torch

        import labkit

        self.torch, self.options = torch, options
        self.lm = labkit.load(options.model, dtype=options.dtype, device=options.device)
        generator = torch.Generator().manual_seed(options.seed)
        highest = self.lm.model.get_input_embeddings().num_embeddings

        def ids(n: int) -> tuple[int, ...]:
            return tuple(torch.randint(10, highest, (n,), generator=generator).tolist())

        self.prefix, self.cue = ids(PREFIX), ids(CUE)
        self.segments = [ids(SEGMENT) for _ in range(max(options.counts))]

    def run(self, arm: str, count: int, new_tokens: int) -> float:
        """Seconds of an answer of `new_tokens` to `count` paraphrases."""
        self._synchronize()
        began = time.perf_counter()
        with self.torch.no_grad():
            self._apart(count, new_tokens) if arm == "apart" else self._engine(arm, count, new_tokens)
        self._synchronize()
        return time.perf_counter() - began

    def _engine(self, arm: str, count: int, new_tokens: int) -> None:
        from labkit.fusion.decoding import Decoding, decode
        from labkit.fusion.fast import FastEngine
        from labkit.fusion.layout import prompts
        from labkit.fusion.methods import method_named
        from labkit.fusion.reference import ReferenceEngine

        method = method_named("logit-average" if arm == "logit-average" else "fuse")
        made = prompts(method, self.prefix, [self.segments[:count]], self.cue)
        if arm in ("fast", "logit-average"):
            engine = FastEngine(self.lm.model, made)
        else:
            rendering = "flex" if arm == "flex" else "dense"
            engine = ReferenceEngine(self.lm.model, made, rendering=rendering, cached=arm != "cacheless")
        decode(engine, method.combine, self.lm.tokenizer, set(), Decoding(new_tokens), [0])

    def _apart(self, count: int, new_tokens: int) -> None:
        from transformers import DynamicCache

        model, device = self.lm.model, next(self.lm.model.parameters()).device
        new = [self.torch.tensor([[*self.prefix, *each, *self.cue]], device=device) for each in self.segments[:count]]
        caches = [DynamicCache() for _ in new]
        for _ in range(new_tokens):
            logits = [
                model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
                for ids, cache in zip(new, caches, strict=True)
            ]
            token = self.torch.stack(logits).mean(0).argmax(-1)
            new = [token[:, None]] * count

    def _synchronize(self) -> None:
        if self.options.device.startswith("cuda"):
            self.torch.cuda.synchronize()


def measure(options: argparse.Namespace) -> dict:
    bench, cases = Bench(options), []
    for count in options.counts:
        seconds = {arm: {"prefill": [], "answer": []} for arm in options.arms}
        for number in range(options.rounds + 1):
            for arm in options.arms:
                for what, length in (("prefill", 1), ("answer", options.new_tokens)):
                    took = bench.run(arm, count, length)
                    if number:  # the first round warms up
                        seconds[arm][what].append(took)
        cases.append(_case(count, seconds, options))
        print(_line(cases[-1]), flush=True)
    return {"cases": cases, "growth": {arm: _growth(cases, arm) for arm in options.arms if len(cases) > 3}}


def _case(count: int, seconds: dict, options: argparse.Namespace) -> dict:
    def ratio(one: str, other: str, what: str) -> dict:
        pairs = zip(seconds[one][what], seconds[other][what], strict=True)
        return machine.spread([round(a / b, 4) for a, b in pairs])

    wanted = [("cacheless", "fast"), ("logit-average", "fast"), ("apart", "fast"), ("dense", "flex")]
    return {
        "paraphrases": count,
        "seconds": {
            arm: {what: machine.spread([round(s, 5) for s in values]) for what, values in each.items()}
            for arm, each in seconds.items()
        },
        "ratios": {
            f"{one}/{other}, {what}": ratio(one, other, what)
            for one, other in wanted
            if {one, other} <= set(options.arms)
            for what in ("prefill", "answer")
        },
    }


def _growth(cases: list[dict], arm: str) -> dict:
    import numpy as np

    counts = np.array([case["paraphrases"] for case in cases], dtype=float)
    seconds = np.array([case["seconds"][arm]["prefill"]["median"] for case in cases])
    c, b, a = np.polyfit(counts, seconds, 2)
    top = float(counts.max())
    share = c * top**2 / (a + b * top + c * top**2)
    return {"seconds": {"a": round(a, 5), "b": round(b, 6), "c": round(c, 8)}, "curved": round(float(share), 4)}


def _line(case: dict) -> str:
    answers = ", ".join(f"{arm} {each['answer']['median']:.3f}" for arm, each in case["seconds"].items())
    return f"N = {case['paraphrases']}: seconds {answers}"


def memory_of_all(options: argparse.Namespace) -> list[dict]:
    """Each arm and N in a process of its own."""
    rows = []
    for count in options.counts:
        row: dict = {"paraphrases": count, "peak_mb": {}}
        for arm in options.arms:
            command = [
                sys.executable, __file__, "--model", options.model, "--device", options.device, "--memory-of", arm,
                "--counts", str(count), "--new-tokens", str(options.new_tokens), "--threads", str(options.threads),
                "--seed", str(options.seed), *(["--dtype", options.dtype] if options.dtype else []),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row["peak_mb"][arm] = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--dtype", default=None, help="a torch dtype (default: as stored)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 5, 10, 20], help="paraphrases")
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads (default: all cores)")
    parser.add_argument("--memory", action="store_true", help="also the memory of each arm, in processes of their own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny-gemma3, few paraphrases; writes nothing")
    parser.add_argument("--memory-of", choices=ARMS, help=argparse.SUPPRESS)  # one arm, measured in this process
    options = parser.parse_args()
    if options.quick:
        options.model, options.counts, options.new_tokens, options.rounds = "tiny-gemma3", [1, 2, 3, 4], 4, 2

    import torch

    torch.set_num_threads(options.threads)
    if options.memory_of:
        bench = Bench(options)
        bench.run(options.memory_of, 1, 2)  # what is made lazily, once, is not counted
        memory = machine.Memory(options.device)
        print(json.dumps(memory.of(bench.run, options.memory_of, options.counts[0], options.new_tokens)))
        return
    results = measure(options)
    if options.memory:
        results["memory"] = memory_of_all(options)
    if not options.quick:
        kept = ("model", "dtype", "device", "threads", "new_tokens", "rounds", "seed")
        settings = {name: getattr(options, name) for name in kept}
        place = "" if options.device == "cpu" else "_gpu"
        name = f"fusion_latency_{options.model.rpartition('/')[2].replace('-', '_')}{place}"
        print(machine.write(name, settings | results, NOTES))


if __name__ == "__main__":
    main()
