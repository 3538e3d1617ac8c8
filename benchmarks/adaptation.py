"""What it costs, and what it gives, to adapt an unmasked model with MLM or MNTP.

    python benchmarks/adaptation.py [--model gpt2-mini] [--steps 1000] [--seeds 0 1 2]
    python benchmarks/adaptation.py --model gemma3-270m --steps 100 --lora --objectives mntp
    python benchmarks/adaptation.py --quick          (a tiny model, seconds, nothing is written)

Arms, each with the same texts of Field Notes (train to train, dev to measure; rows of at most max_length tokens),
steps, rate and seeds: `mlm` and `mntp` after unmasking; `next`, the control: the causal model trained on the same text
with next-token, read from the left context alone. What `next` gains comes from the text, so the effect of seeing both
sides is the difference to it.

curve: by steps, on the same hidden tokens for every arm and seed (positions of them, each hidden alone): nats (mean;
its exponential is the pseudo-perplexity), accuracy and top_5 of the right token. states: before = causal, left context
only; unmasked = bidirectional, not trained; after = trained. seconds and tokens_per_second: of training alone.
difference: accuracy of an arm minus that of `next` at the end, per seed, over the same hidden tokens; interval: 95 %
paired bootstrap over the hidden tokens, seeds pooled.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import numpy as np  # noqa: E402
from scipy.stats import bootstrap  # noqa: E402

import labkit  # noqa: E402
from benchmarks import machine  # noqa: E402
from labkit.datasets.embedded import passages  # noqa: E402
from labkit.objectives import Collator, corruption_for, loss  # noqa: E402
from labkit.run_folder import RunFolder, read_json  # noqa: E402
from labkit.tasks import lm as task  # noqa: E402
from labkit.tasks.base import pad_id  # noqa: E402
from labkit.training import draw, preset, settled, train  # noqa: E402

MAX_LENGTH, LEARNING_RATE = 128, 5e-4
DRAWS = 2000


def one_run(model: str, objective: str, options: argparse.Namespace, seed: int, texts: tuple) -> dict:
    """Train one arm; the curve of its scores, its last answers, and what it cost."""
    lm = labkit.load(model, dtype=options.dtype if options.lora else "float32")
    task.ensure_mask_token(lm.model, lm.tokenizer)
    rows, held = (task.cut_into_rows(lm.tokenizer, part, MAX_LENGTH) for part in texts)
    answers = {}

    def score(net, state: str) -> dict[str, float]:
        reads = task.reads_of(objective) if state == "after" else "before"
        scores = task.fill_in_scores(net, lm.tokenizer, held, reads=reads, positions=options.positions)
        answers["ranks"] = scores.ranks
        return {"nats": sum(scores.nats) / len(scores.nats), "accuracy": scores.accuracy, "top_5": scores.top_5}

    states = {"before": score(lm.model, "before")}
    if objective != "next":
        labkit.to_bidirectional(lm.model)
        states["unmasked"] = score(lm.model, "unmasked")
    net = task.with_lora(lm.model, seed) if options.lora else lm.model
    every = max(1, options.steps // options.evaluations)
    settings = preset(
        "lm", max_steps=options.steps, per_device_train_batch_size=options.batch_size, weight_decay=0.01,
        learning_rate=LEARNING_RATE, dtype=options.dtype, seed=seed, eval_steps=every,
    )  # fmt: skip
    settings = settled(settings, lm.model.config.model_type, lambda text: None)
    order = [row for (row,) in draw([len(row) for row in rows], settings, packed=True)]
    collate = Collator(objective, pad_id(lm.tokenizer), corruption_for(lm.tokenizer), seed)
    with tempfile.TemporaryDirectory() as folder, RunFolder.alone(Path(folder, "run"), {}, resume=False) as run:
        outcome = train(
            net,
            [{"row": number, "ids": rows[row]} for number, row in enumerate(order)],
            collate=collate,
            loss=lambda net, batch: loss(net, batch, objective),
            settings=settings,
            run=run,
            tokens=lambda k: len(rows[order[k]]),
            evaluate=lambda net: score(net, "after"),
            log=lambda text: None,
        )
        history = read_json(run.path / "trainer_state.json")["log_history"]
    print(f"{objective}, seed {seed}: {outcome['seconds']:,.0f} s of training", file=sys.stderr, flush=True)
    scored = [entry for entry in history if "accuracy" in entry]
    curve = [{key: entry[key] for key in ("step", "nats", "accuracy", "top_5")} for entry in scored]
    states["after"] = {key: curve[-1][key] for key in ("nats", "accuracy", "top_5")}
    cost = {key: outcome[key] for key in ("seconds", "tokens_per_second", "peak_memory_bytes")}
    return {"seed": seed, "states": states, "curve": curve, **cost, "ranks": answers["ranks"]}


def differences(runs: dict[str, list[dict]]) -> dict:
    """Accuracy of each arm minus the control's, with a paired bootstrap over the hidden tokens."""
    control = np.array([run["ranks"] for run in runs["next"]]) == 1  # (seeds, tokens)
    result = {}
    for arm in [arm for arm in runs if arm != "next"]:
        gaps = (np.array([run["ranks"] for run in runs[arm]]) == 1).astype(float) - control  # (seeds, tokens)
        gap = gaps.mean(0)
        interval = bootstrap((gap,), np.mean, n_resamples=DRAWS, method="percentile", rng=0).confidence_interval
        result[arm] = {"mean": float(gap.mean()), "interval": list(map(float, interval)), "n": len(gap)}
        result[arm]["per_seed"] = gaps.mean(1).tolist()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-mini")
    parser.add_argument("--objectives", nargs="+", default=["mlm", "mntp"], choices=["mlm", "mntp"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--positions", type=int, default=500)
    parser.add_argument("--evaluations", type=int, default=10, help="points of the curve")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--name", default="adaptation", help="of the result file")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.model, options.steps, options.seeds, options.positions = "tiny-gpt2", 10, [0, 1], 40
    texts = tuple([passage.text for passage in passages(side)] for side in ("train", "dev"))
    runs = {
        arm: [one_run(options.model, arm, options, seed, texts) for seed in options.seeds]
        for arm in ("next", *options.objectives)
    }
    gaps = differences(runs)
    for arm, its_runs in runs.items():
        for state in its_runs[0]["states"]:
            values = [run["states"][state]["accuracy"] for run in its_runs]
            print(f"{arm:5} {state:9} accuracy {sum(values) / len(values):.3f}  {[round(v, 3) for v in values]}")
    for arm, gap in gaps.items():
        print(f"{arm} - next: {gap['mean']:+.3f} [{gap['interval'][0]:+.3f}, {gap['interval'][1]:+.3f}]")
    if not options.quick:
        for run in [run for its_runs in runs.values() for run in its_runs]:
            del run["ranks"]
        results = {
            "options": vars(options) | {"max_length": MAX_LENGTH, "learning_rate": LEARNING_RATE},
            "arms": runs,
            "difference": gaps,
        }
        print(machine.write(options.name, results, __doc__))


if __name__ == "__main__":
    main()
