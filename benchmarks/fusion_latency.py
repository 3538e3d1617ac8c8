"""What fusing N paraphrases costs: seconds and memory against N and the length of the answer, engine by engine.

    python benchmarks/fusion_latency.py --model smollm2-135m --threads 1     (about 25 minutes on a quiet core)
    python benchmarks/fusion_latency.py --quick          (a tiny model, seconds, nothing is written)

One question at a time: a prefix of 96 tokens, N segments, a cue of 3, random token ids, the same for all arms; greedy,
with no end token, so that each arm writes as much as it is asked to. `fast`, `flex` and `dense` fuse with the engines
of those names (`labkit.fusion`; on a CPU flex is FlexAttention uncompiled, which does not measure the compiled kernel);
`cacheless` fuses as the public experiment does, without a cache; `logit-average` is the batch of N rows whose logits
the fast engine averages; `apart` is the same average from plain transformers: N sequences, each with a cache of its
own, one after the other. engines: what the runs say that they used.

Settings: `equal`, segments of 24 tokens; `mixed` (from N = 2), evenly spread from 8 to 40, as many tokens in all;
`long`, segments of 128, prefill only, with `fast` and, as the control that must be found quadratic, `concat`: the same
tokens as one long text. left_out: what was not run because it is slow, or beyond the model's positions.

seconds[arm][n]: from the start to the n-th new token of one answer (1: the prefill), one value per round. In every
round all cases come, in random order, and in each its arms, in random order; a short round before warms up. ratios: of
two arms within one round, above 1 = the first took longer; low and high: 95 % bootstrap interval of the median over
rounds, which is nearly the range where there are five, and missing where there are fewer. growth: seconds of the
prefill in the setting long, medians fitted by a + b N + c N^2 with relative errors; curved: the share of c N^2 in the
fitted seconds at the largest N, low and high as before. peak_mb: highest memory above that after loading, setting
equal, each arm and N in a process of its own; resident memory on a CPU, which is coarse.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import labkit  # noqa: E402
from benchmarks import machine  # noqa: E402
from labkit.decoder.anatomy import CACHE  # noqa: E402
from labkit.decoder.limits import position_limit  # noqa: E402
from labkit.fusion.decoding import decode  # noqa: E402
from labkit.fusion.engine import fusable_decoder  # noqa: E402
from labkit.fusion.generation import make_engine  # noqa: E402
from labkit.fusion.layout import prompts  # noqa: E402
from labkit.fusion.methods import METHODS  # noqa: E402

ARMS = ("fast", "logit-average", "apart", "dense", "flex", "cacheless")
GROWTH = ("fast", "concat")
PREFIX, CUE = 96, 3  # tokens: five examples, "Answer:"
LONG = 128

Case = tuple[str, int]  # a setting, and how many paraphrases
Plan = dict[Case, dict[str, list[int]]]  # for each arm of a case the lengths of the answers


class Bench:
    """One model, and the arms on it.

    Attributes:
        names: for each arm that has run, what its engine calls itself. positions: how many the model has, or None.
    """

    def __init__(self, options: argparse.Namespace):
        self.device = options.device
        self.lm = labkit.load(options.model, dtype=options.dtype, device=options.device)
        self.positions = position_limit(fusable_decoder(self.lm.model).config)
        self.names: dict[str, str] = {}
        generator = torch.Generator().manual_seed(options.seed)
        highest = self.lm.model.get_input_embeddings().num_embeddings
        size = PREFIX + CUE + LONG * max(options.counts)
        ids = torch.randint(10, highest, (size,), generator=generator).tolist()
        self.prefix, self.cue, self.ids = tuple(ids[:PREFIX]), tuple(ids[PREFIX : PREFIX + CUE]), ids[PREFIX + CUE :]

    def run(self, arm: str, case: Case, new_tokens: int) -> tuple[list[float], list[int]]:
        """Write `new_tokens` tokens: how many seconds after the start each was there, and the tokens."""
        segments, at = [], 0
        for length in lengths_of(*case):
            segments.append(tuple(self.ids[at : at + length]))
            at += length
        stamps: list[float] = []
        machine.wait(self.device)
        began = time.perf_counter()
        with torch.no_grad():
            write = self._apart if arm == "apart" else self._engine
            tokens = write(arm, segments, new_tokens, stamps)
        machine.wait(self.device)
        stamps.append(time.perf_counter())
        return [stamp - began for stamp in stamps], tokens

    def _engine(self, arm: str, segments: list, new_tokens: int, stamps: list[float]) -> list[int]:
        method = METHODS[arm if arm in ("logit-average", "concat") else "fuse"]
        batch = prompts(method, self.prefix, [segments], self.cue)
        name = "reference" if arm == "flex" else arm if arm in ("dense", "cacheless") else "fast"
        engine = make_engine(name, self.lm.model, batch)
        self.names[arm] = engine.name
        read = engine.step

        def step(tokens: Any) -> Any:
            stamps.append(time.perf_counter())  # `tokens` have been chosen
            return read(tokens)

        engine.step = step
        answers, _ = decode(engine, method.combine, self.lm.tokenizer, set(), new_tokens)
        return list(answers[0].tokens)

    def _apart(self, arm: str, segments: list, new_tokens: int, stamps: list[float]) -> list[int]:
        self.names[arm] = "plain transformers, a cache for each sequence"
        model, device = self.lm.model, next(self.lm.model.parameters()).device
        new = [torch.tensor([[*self.prefix, *segment, *self.cue]], device=device) for segment in segments]
        caches, written = [DynamicCache() for _ in new], []
        for length in range(1, new_tokens + 1):
            logits = [
                model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1].float()
                for ids, cache in zip(new, caches, strict=True)
            ]
            token = torch.stack(logits).mean(0).argmax(-1)
            written += token.tolist()
            if length < new_tokens:
                stamps.append(time.perf_counter())
            new = [token[:, None]] * len(segments)
        return written


def lengths_of(setting: str, count: int) -> list[int]:
    """How many tokens each of `count` segments has; `mixed` has as many in all as `equal`."""
    if setting == "long":
        return [LONG] * count
    if setting == "equal" or count == 1:
        return [24] * count
    return [round(8 + 32 * place / (count - 1)) for place in range(count)]


def planned(options: argparse.Namespace, positions: int | None) -> tuple[Plan, list[str]]:
    """What is run, and what is left out because it is slow on a CPU or beyond the model's positions."""
    plan: Plan = {}
    left_out = []
    for setting, count in itertools.product(("equal", "mixed"), options.counts):
        if (setting, count) == ("mixed", 1):
            continue
        most = {}  # tokens that an arm writes
        if options.device == "cpu":
            most = {"flex": 20, "apart": 400 // count, "cacheless": 400 // count}
            most |= {"flex": 0, "apart": 0} if setting == "mixed" else {}
        arms = {arm: [n for n in options.new_tokens if n <= most.get(arm, n)] for arm in options.arms}
        plan[setting, count] = {arm: lengths for arm, lengths in arms.items() if lengths}
        short = [arm for arm, lengths in arms.items() if lengths != options.new_tokens]
        left_out += [f"{setting}, N = {count}: {arm}, more than {most[arm]} tokens" for arm in short]
    for count in options.counts:
        if positions is not None and PREFIX + LONG * count + CUE > positions:
            left_out.append(f"long, N = {count}: beyond the model's {positions:,} positions")
        else:
            plan["long", count] = {arm: [1] for arm in GROWTH}
    return plan, left_out


def turns(plan: Plan, rng: random.Random) -> Iterator[tuple[Case, str]]:
    """One round: the cases in random order, and in each its arms in random order, so that they are close in time."""
    for case in rng.sample(list(plan), len(plan)):
        for arm in rng.sample(list(plan[case]), len(plan[case])):
            yield case, arm


def measure(options: argparse.Namespace) -> dict:
    bench = Bench(options)
    plan, left_out = planned(options, bench.positions)
    seconds = {case: {arm: {n: [] for n in lengths} for arm, lengths in arms.items()} for case, arms in plan.items()}
    rng, began = random.Random(options.seed), time.perf_counter()
    for case, arm in turns(plan, rng):  # on a GPU anything may be compiled, whatever the length
        bench.run(arm, case, min(2, max(plan[case][arm])) if options.device == "cpu" else max(plan[case][arm]))
    for number in range(options.rounds):
        for case, arm in turns(plan, rng):
            stamps, _ = bench.run(arm, case, max(plan[case][arm]))
            for length, values in seconds[case][arm].items():
                values.append(stamps[length - 1])
        passed = time.perf_counter() - began
        print(f"round {number + 1} of {options.rounds}, {passed:.0f} s since the beginning", flush=True)
    cases = [_case(case, arms) for case, arms in seconds.items() if case[0] != "long"]
    grown = growths({case[1]: arms for case, arms in seconds.items() if case[0] == "long"})
    return {
        "model_dtype": str(bench.lm.model.dtype).removeprefix("torch."), "engines": bench.names, "cases": cases,
        "growth": grown, "left_out": left_out,
    }  # fmt: skip


def _case(case: Case, seconds: dict[str, dict[int, list[float]]]) -> dict:
    fast = seconds.get("fast", {})
    return {
        "setting": case[0],
        "paraphrases": case[1],
        "segment_tokens": lengths_of(*case),
        "seconds": {
            arm: {str(n): machine.spread(values, 5) for n, values in by_length.items()}
            for arm, by_length in seconds.items()
        },
        "ratios": {
            f"{arm}/fast": {str(n): machine.paired(values, fast[n]) for n, values in by_length.items() if n in fast}
            for arm, by_length in seconds.items()
            if fast and arm != "fast"
        },
    }


def growths(seconds: dict[int, dict[str, dict[int, list[float]]]]) -> dict:
    """`growth` of each arm, from seconds[count][arm][1]; empty with fewer than four counts."""
    counts = sorted(seconds)
    if len(counts) < 4:
        return {}
    return {
        arm: {"seconds": {str(count): machine.spread(seconds[count][arm][1], 5) for count in counts}}
        | growth(counts, np.array([seconds[count][arm][1] for count in counts]).T)
        for arm in seconds[counts[0]]
    }


def growth(counts: Sequence[int], seconds: np.ndarray) -> dict:
    """How the prefill grows with N, from seconds (rounds, counts): a + b N + c N^2, and the share of its last term.

    The fit goes through the medians over rounds and weighs relative errors; the interval draws rounds.
    """
    middle = np.median(seconds, axis=0)
    top = float(max(counts))

    def fitted(medians: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        terms = np.polyfit(counts, medians.T, 2, w=1 / middle)[::-1]  # (3, fits)
        return terms, terms[2] * top**2 / (terms[0] + terms[1] * top + terms[2] * top**2)

    terms, share = fitted(middle[None])
    interval = machine.interval(lambda chosen: fitted(np.median(seconds[chosen], axis=1))[1], len(seconds))
    fit = {name: round(float(value), 8) for name, value in zip("abc", terms[:, 0], strict=True)}
    return {"fit": fit, "curved": {"share": round(float(share[0]), 4)} | interval}


def memory_of_all(options: argparse.Namespace) -> list[dict]:
    """Each arm and N in a process of its own, setting equal, the longest answer that is also timed."""
    plan, _ = planned(options, None)
    return [
        {
            "paraphrases": count,
            "peak_mb": {
                arm: machine.apart(options, memory_of, options, arm, count, max(lengths))
                for arm, lengths in plan["equal", count].items()
            },
        }
        for count in options.counts
    ]


def memory_of(options: argparse.Namespace, arm: str, count: int, new_tokens: int) -> float:
    bench = Bench(options)
    bench.run(arm, ("equal", 1), 2)  # what is made lazily, once, is not counted
    return machine.Memory(options.device).of(bench.run, arm, ("equal", count), new_tokens)


def summary(results: dict) -> Iterator[str]:
    """What is printed: the cases, the growth of the prefill, and what was left out."""
    for case in results["cases"]:
        for pair, ratios in case["ratios"].items():
            for tokens, ratio in ratios.items():
                interval = "" if ratio["low"] is None else f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
                name = f"{case['setting']}, N = {case['paraphrases']}, {tokens} tokens"
                yield f"{name}: {pair} {ratio['median']:.3f}{interval}"
    for arm, growth_of_arm in results["growth"].items():
        curved = growth_of_arm["curved"]
        interval = "" if curved["low"] is None else f" [{curved['low']:.2f}, {curved['high']:.2f}]"
        yield f"prefill, quadratic share of {arm}: {curved['share']:.2f}{interval}"
    yield from (f"left out: {name}" for name in results["left_out"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--dtype", default=None, help="a torch dtype (default: as stored)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 5, 10, 20], help="paraphrases")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[1, 5, 20, 50], help="lengths of the answers")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--memory", action="store_true", help="also the memory of each arm, in processes of their own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.counts, options.new_tokens, options.rounds = "tiny-gemma3", [1, 2, 3, 5], [1, 5, 20], 2
    options.counts, options.new_tokens = sorted({*options.counts}), sorted({*options.new_tokens})
    if min(*options.counts, *options.new_tokens, options.rounds, options.threads) < 1:
        parser.error("--counts, --new-tokens, --rounds and --threads must be at least 1")
    machine.use(options)
    warnings.filterwarnings("ignore", message="flex_attention called without")  # the summary says so
    memory = {"memory": memory_of_all(options)} if options.memory else {}
    results = measure(options) | memory
    for line in summary(results):
        print(line)
    if options.quick and not options.output:
        print("quick: a tiny model shows that the program works, not how fast labkit is; nothing is written")
        return
    kept = ("model", "device", "threads", "new_tokens", "rounds", "seed")
    settings = {name: getattr(options, name) for name in kept} | {"dtype": results.pop("model_dtype")}
    parts = (options.model.rpartition("/")[2], options.dtype, None if options.device == "cpu" else "gpu")
    name = "_".join(["fusion_latency", *(part.replace("-", "_") for part in parts if part)])
    print(machine.write(name, settings | results, __doc__, target=options.output))


if __name__ == "__main__":
    main()
