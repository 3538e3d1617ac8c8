"""The self-check of the capstone: runs that are in order, each fault by itself, and the interval."""

import json
import shutil
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from labkit.course.capstone import check_runs
from labkit.datasets import embedded
from labkit.datasets.readers import read
from labkit.run_folder import silent
from labkit.tasks.base import json_lines
from labkit.tasks.finetune import finetune
from labkit.training import preset

pytestmark = pytest.mark.end_to_end
ARMS = {"causal": "causal", "unmasked": "bidirectional", "MNTP": "bidirectional", "read twice": "causal"}
FILES = ("train.jsonl", "dev.jsonl", "test.jsonl")


@pytest.fixture
def capstone(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "capstone")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Data files, and the runs of four arms with three seeds: one was trained, the others are edited copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    for file in FILES:
        examples = embedded.read("classify", "which-way-round", file.partition(".")[0])[:60]
        (folder / file).write_text(json_lines(map(asdict, examples)))
    train, dev, test = (read("classify", folder / file) for file in FILES)
    choices = {"settings": preset("quick", max_steps=1), "mask": "causal", "keep_model": False, "log": silent}
    finetune("classify", "tiny-gpt2", train, folder / "run", dev=dev, test=test, **choices)
    for arm, mask in ARMS.items():
        for seed in range(3):
            run = shutil.copytree(folder / "run", folder / "runs" / arm / f"seed-{seed}")
            edit(run / "config.json", model=arm)
            edit(run / "config.json", "settings", seed=seed)
            edit(run / "metrics.json", "mask", measured=mask)
    return folder


def edit(file, *path, **changes):
    content = json.loads(file.read_text())
    reduce(getitem, path, content).update(changes)
    file.write_text(json.dumps(content))


def check(folder):
    return check_runs(folder / "runs", ARMS, "classify", [folder / file for file in FILES])


def test_runs_in_order_have_no_fault(trained):
    runs, differences, faults = check(trained)
    metrics = json.loads((trained / "run" / "metrics.json").read_text())
    assert faults == [] and len(runs) == 12 and set(runs.n_train) == {60}
    assert runs.score[0] == pytest.approx(100 * metrics["test"]["accuracy"])
    assert len(differences) == 3 and not differences.difference.any()  # all runs are copies, so there is no interval
    assert differences[["low", "high"]].isna().all(axis=None) and not differences.significant.any()


UNMASKED = Path("runs/unmasked/seed-0/config.json")
CONFIG, METRICS, TRAIN = "runs/MNTP/seed-1/config.json", "runs/MNTP/seed-1/metrics.json", "train.jsonl"
FAULTS = {  # what a fault is called, and how it comes about
    "MNTP: seed 1 is missing": lambda f: shutil.rmtree((f / CONFIG).parent),
    "MNTP/seed-1: metrics.json is missing": lambda f: (f / METRICS).unlink(),
    "but the measured mask is causal": lambda f: edit(f / METRICS, "mask", measured="causal"),
    "its test examples are not those of test.jsonl": lambda f: edit(f / CONFIG, test="others"),
    "seed-1: it differs from the first run of MNTP: settings.learning_rate": lambda f: edit(
        f / CONFIG, "settings", learning_rate=1.0
    ),
    "its dev examples are not those of dev.jsonl": lambda f: edit(f / CONFIG, dev="others"),
    "unmasked: 2 runs have the seed 0": lambda f: shutil.copytree(f / UNMASKED.parent, f / "runs/unmasked/again"),
    "MNTP/seed-0: it differs from the first run of causal: settings.max_steps was 1, now 400": lambda f: [
        edit(file, "settings", max_steps=400) for file in f.glob("runs/MNTP/*/config.json")
    ],
    "read twice/seed-0: it differs from the first run of causal: method was 'full', now 'lora'": lambda f: [
        edit(file, method="lora") for file in f.glob("runs/read twice/*/config.json")
    ],
    "unmasked has the mask, readings and model of causal": lambda f: edit(f / UNMASKED, model="causal"),
    "at least 4 and 3 are required": lambda f: [shutil.rmtree(run) for run in f.glob("runs/*/seed-0")],
    "there is no folder": lambda f: (f / "runs" / "read twice").rename(f / "runs" / "twice"),
    "the text is also in": lambda f: shutil.copy(f / "test.jsonl", f / TRAIN),
}


@pytest.mark.parametrize("words", FAULTS)
def test_each_fault_is_one_line(capstone, words):
    FAULTS[words](capstone)
    faults = check(capstone)[2]
    assert sum(words in fault for fault in faults) == 1 and not any("\n" in fault for fault in faults)
    assert words != "there is no folder" or len(faults) == 1  # its seeds are not missing one by one, too


def test_with_equal_seeds_the_interval_is_that_of_student_over_the_test_groups(capstone):
    right = np.random.default_rng(0).random((2, 20)) < [[0.3], [0.7]]
    for correct, arm in zip(right, ("causal", "unmasked"), strict=True):
        lines = [{"id": f"{i}", "group": "", "correct": int(value)} for i, value in enumerate(correct)]
        for run in (capstone / "runs" / arm).iterdir():
            (run / "judged.test.jsonl").write_text(json_lines(lines))
    found = check(capstone)[1].iloc[0]
    expected = stats.ttest_rel(100.0 * right[1], 100.0 * right[0]).confidence_interval()
    assert found.difference == pytest.approx(sum(expected) / 2) and found.significant == (expected[0] > 0)
    assert [found.low, found.high] == pytest.approx(list(expected), abs=3)
