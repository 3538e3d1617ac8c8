"""benchmarks/fusion_latency.py: the statistics recover what was planted, the arms compute what their names say."""

import argparse
import json

import numpy as np
import pytest
import torch

from benchmarks import fusion_latency, machine

COUNTS = [1, 2, 5, 10, 20]


def options(**changed):
    settings = {
        "model": "tiny-gemma3", "dtype": None, "device": "cpu", "seed": 0, "arms": list(fusion_latency.ARMS),
        "counts": [1, 2, 3], "new_tokens": [1, 6], "quick": False,
    }  # fmt: skip
    return argparse.Namespace(**settings | changed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("linear", "square"), [(0.05, 0.0), (0.02, 0.004)])
def test_the_fit_of_the_growth_recovers_the_planted_quadratic_share(linear, square, seed):
    counts, share = np.array(COUNTS), square * 400 / (0.1 + linear * 20 + square * 400)
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.01, (9, len(counts))))  # in proportion to the seconds
    curved = fusion_latency.growth(COUNTS, (0.1 + linear * counts + square * counts**2) * noise)["curved"]
    assert curved["share"] == pytest.approx(share, abs=0.05)
    assert curved["low"] - 0.02 < share < curved["high"] + 0.02
    assert 0 < curved["high"] - curved["low"] < 0.15


def test_the_interval_of_a_paired_ratio_contains_the_planted_ratio():
    contained, rng = 0, np.random.default_rng(0)
    for _ in range(100):
        moment = rng.lognormal(0, 0.5, 9)  # slow moments of the machine hit both arms of a round
        one, other = (moment * rng.lognormal(0, 0.02, 9) * factor for factor in (3.0, 1.0))
        ratio = machine.paired(one, other)
        assert 3.0 / 1.1 < ratio["low"] <= ratio["median"] <= ratio["high"] < 3.0 * 1.1
        contained += ratio["low"] <= 3.0 <= ratio["high"]
    assert contained >= 85


@pytest.mark.end_to_end
def test_the_arms_that_fuse_compute_the_same_and_so_do_those_that_average():
    bench, logits, last = fusion_latency.Bench(options(dtype="float32")), [], {}
    bench.lm.model.register_forward_hook(lambda module, args, output: logits.extend(output.logits[:, -1]))
    for arm in (*fusion_latency.ARMS, "concat"):
        logits.clear()
        stamps, tokens = bench.run(arm, ("mixed", 3), 3)
        assert len(stamps) == len(tokens) == 3 and 0 < stamps[0] and stamps == sorted(stamps)
        rows = 3 if arm in ("logit-average", "apart") else 1
        assert len(logits) == 3 * rows
        last[arm] = torch.stack(logits[-rows:]).mean(0)

    def gap(one, other):
        return float((last[one] - last[other]).abs().max() / last[one].abs().max())

    assert max(gap("fast", arm) for arm in ("dense", "flex", "cacheless")) < 2e-5
    assert gap("logit-average", "apart") < 2e-5
    assert min(gap("fast", "apart"), gap("fast", "concat"), gap("apart", "concat")) > 2e-3
    assert bench.names["flex"] == "reference (flex)" and bench.names["cacheless"] == "reference (dense, without cache)"


@pytest.mark.end_to_end
def test_a_run_writes_every_time_with_its_spread_and_every_ratio_with_its_interval(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    arguments = "--threads 1 --model tiny-gemma3 --arms fast logit-average --counts 1 2 3 5 --new-tokens 1 2 --rounds 5"
    fusion_latency.main(arguments.split())
    results = json.loads((tmp_path / "fusion_latency_tiny_gemma3.json").read_text())["results"]
    assert [(case["setting"], case["paraphrases"]) for case in results["cases"]] == [
        *(("equal", n) for n in (1, 2, 3, 5)), *(("mixed", n) for n in (2, 3, 5))
    ]  # fmt: skip
    for case in results["cases"]:
        one, two = (case["seconds"]["fast"][n]["each"] for n in ("1", "2"))
        assert len(one) == 5 and all(first < second for first, second in zip(one, two, strict=True))
        ratio = case["ratios"]["logit-average/fast"]["2"]
        assert ratio["min"] <= ratio["low"] <= ratio["median"] <= ratio["high"] <= ratio["max"]
    assert set(results["growth"]) == {"fast", "concat"} and results["engines"]["logit-average"] == "fast"
