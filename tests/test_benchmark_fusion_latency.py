"""benchmarks/fusion_latency.py: the statistics find what was planted, the arms compute what their names say."""

import argparse
import json
import random

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


def noisy(seconds, rounds, noise, seed):
    """(rounds, counts): `seconds` with errors in proportion to them."""
    return np.array(seconds) * np.exp(np.random.default_rng(seed).normal(0, noise, (rounds, len(seconds))))


def growths(fast, concat, rounds=9, noise=0.01):
    """What `growths` finds where the two arms take `fast(N)` and `concat(N)` seconds."""
    measured = {
        arm: noisy([law(n) for n in COUNTS], rounds, noise, seed)
        for seed, (arm, law) in enumerate({"fast": fast, "concat": concat}.items())
    }
    return fusion_latency.growths(
        {n: {arm: {1: list(each[:, k])} for arm, each in measured.items()} for k, n in enumerate(COUNTS)}
    )


def linear(n):
    return 0.1 + 0.05 * n


def quadratic(n):
    return 0.1 + 0.02 * n + 0.004 * n**2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("law", "share"), [(linear, 0.0), (quadratic, 1.6 / 2.1)])
def test_the_fit_of_the_growth_finds_the_planted_quadratic_share(law, share, seed):
    found = fusion_latency.growth(COUNTS, noisy([law(n) for n in COUNTS], 9, 0.01, seed))["curved"]
    assert found["share"] == pytest.approx(share, abs=0.05)
    assert found["low"] - 0.02 < share < found["high"] + 0.02
    assert 0 < found["high"] - found["low"] < 0.15


def test_without_noise_the_fit_is_the_law():
    found = fusion_latency.growth(COUNTS, np.array([[quadratic(n) for n in COUNTS]] * 5))
    assert found["fit"] == pytest.approx({"a": 0.1, "b": 0.02, "c": 0.004}, abs=1e-6)
    assert found["curved"] == pytest.approx({"share": 1.6 / 2.1, "low": 1.6 / 2.1, "high": 1.6 / 2.1}, abs=1e-4)


def test_growth_is_not_fitted_to_three_counts_and_has_no_interval_from_two_rounds():
    assert fusion_latency.growths({n: {arm: {1: [0.1] * 9} for arm in ("fast", "concat")} for n in (1, 2, 3)}) == {}
    assert growths(linear, quadratic, rounds=2)["fast"]["curved"]["low"] is None


def test_the_interval_of_a_paired_ratio_holds_the_planted_ratio():
    held, rng = 0, np.random.default_rng(0)
    for _ in range(100):
        moment = rng.lognormal(0, 0.5, 9)  # slow moments of the machine hit both arms of a round
        one, other = (moment * rng.lognormal(0, 0.02, 9) * factor for factor in (3.0, 1.0))
        found = machine.paired(one, other)
        assert found["low"] <= found["median"] <= found["high"] < 3.0 * 1.1 and found["low"] > 3.0 / 1.1
        held += found["low"] <= 3.0 <= found["high"]
    assert held >= 85


def test_fewer_than_five_rounds_have_no_interval():
    assert machine.paired([2.0] * 4, [1.0] * 4) | {"each": None} == {
        "n": 4, "median": 2.0, "min": 2.0, "max": 2.0, "each": None, "low": None, "high": None
    }  # fmt: skip
    assert machine.paired([2.0] * 5, [1.0] * 5)["low"] == 2.0


def test_mixed_segments_have_as_many_tokens_as_equal_ones_and_lie_between_8_and_40():
    for count in range(1, 21):
        equal, mixed = (fusion_latency.lengths_of(setting, count) for setting in ("equal", "mixed"))
        assert len(equal) == len(mixed) == count and sum(equal) == sum(mixed)
        assert count == 1 or (min(mixed), max(mixed)) == (8, 40)


def test_every_round_has_every_arm_in_another_order_and_the_arms_of_a_case_together():
    plan, _ = fusion_latency.planned(options(counts=COUNTS), None)
    rng = random.Random(0)
    rounds = [list(fusion_latency.turns(plan, rng)) for _ in range(3)]
    wanted = sorted((case, arm) for case, arms in plan.items() for arm in arms)
    assert all(sorted(each) == wanted for each in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    orders = [[arm for case, arm in each if case == ("equal", 5)] for each in rounds]
    assert orders[0] != orders[1] or orders[1] != orders[2]
    assert rounds[0] == list(fusion_latency.turns(plan, random.Random(0)))
    for each in rounds:
        changes = sum(one[0] != other[0] for one, other in zip(each, each[1:], strict=False))
        assert changes == len(plan) - 1


def test_what_is_left_out_on_a_cpu_is_said_and_what_is_judged_is_not_left_out():
    plan, left_out = fusion_latency.planned(options(counts=COUNTS, new_tokens=[1, 5, 20, 50]), 1024)
    assert plan["equal", 20]["cacheless"] == [1, 5, 20] and plan["equal", 5]["cacheless"] == [1, 5, 20, 50]
    assert "equal, N = 20: cacheless, 50 tokens" in left_out and "mixed: flex" in left_out
    assert ("long", 5) in plan and ("long", 10) not in plan and any("1,024 positions" in each for each in left_out)
    for setting in ("equal", "mixed"):
        assert all(20 in plan[setting, 5][arm] for arm in ("fast", "cacheless", "logit-average"))
    everything, left_out = fusion_latency.planned(options(device="cuda", counts=COUNTS), None)
    assert left_out == [] and set(everything["mixed", 20]) == set(fusion_latency.ARMS)


@pytest.mark.end_to_end
def test_the_arms_that_fuse_compute_the_same_and_so_do_those_that_average():
    bench, case = fusion_latency.Bench(options(dtype="float32")), ("mixed", 3)
    logits, last = [], {}
    bench.lm.model.register_forward_hook(lambda module, args, output: logits.extend(output.logits[:, -1]))
    for arm in (*fusion_latency.ARMS, "concat"):
        logits.clear()
        stamps, tokens = bench.run(arm, case, 3)
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


def test_a_process_that_fails_ends_the_benchmark_with_its_message():
    with pytest.raises(SystemExit, match=r"(?s)exit code 1.*no model of that name"):
        machine.in_a_process(["-c", "import sys; print('noise'); sys.exit('no model of that name')"])
    assert machine.in_a_process(["-c", "print('noise'); print(1.5)"]) == 1.5


def run(monkeypatch, tmp_path, *arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "results")
    fusion_latency.main(["--threads", "1", *arguments])


@pytest.mark.end_to_end
def test_quick_runs_every_arm_and_writes_nothing(monkeypatch, tmp_path, capsys):
    run(monkeypatch, tmp_path, "--quick")
    printed = capsys.readouterr().out
    assert all(f"{arm}/fast" in printed for arm in fusion_latency.ARMS[1:]) and "left out: mixed: apart" in printed
    assert "quadratic share of concat" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.end_to_end
def test_a_run_writes_every_time_with_its_spread_and_every_ratio_with_its_interval(monkeypatch, tmp_path):
    arms = ("fast", "logit-average")
    run(
        monkeypatch, tmp_path, "--model", "tiny-gemma3", "--arms", *arms, "--counts", "1", "2", "3", "5",
        "--new-tokens", "1", "2", "--rounds", "5",
    )  # fmt: skip
    (path,) = (tmp_path / "results").iterdir()
    assert path.name == "fusion_latency_tiny_gemma3.json"
    results = json.loads(path.read_text())["results"]
    assert [(case["setting"], case["paraphrases"]) for case in results["cases"]] == [
        *(("equal", n) for n in (1, 2, 3, 5)), *(("mixed", n) for n in (2, 3, 5))
    ]  # fmt: skip
    for case in results["cases"]:
        for arm in arms:
            one, two = (case["seconds"][arm][n] for n in ("1", "2"))
            assert one["n"] == 5 and one["min"] <= one["median"] <= one["max"]
            assert all(first < second for first, second in zip(one["each"], two["each"], strict=True))
        for n in ("1", "2"):
            ratio = case["ratios"]["logit-average/fast"][n]
            assert ratio["min"] <= ratio["low"] <= ratio["median"] <= ratio["high"] <= ratio["max"]
    for arm in ("fast", "concat"):
        curved = results["growth"][arm]["curved"]
        assert curved["low"] <= curved["high"] and list(results["growth"][arm]["seconds"]) == ["1", "2", "3", "5"]
    assert results["dtype"] == "float32" and results["engines"]["logit-average"] == "fast"
