"""benchmarks/study/future.py: the same rows for all arms, resuming within a run, and the table of differences."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from benchmarks.study import future
from benchmarks.study.future import Run, Study, flops_per_token, run_study, tables
from labkit.errors import DataError, ModelError, TrainingError
from labkit.future_attention.arms import arm

SHAPE = {"vocab_size": 300, "context": 16, "width": 16, "layers": 1, "heads": 2}
STUDY = Study(
    arms=("baseline", "memory:4", "tokens:kl:5", "future:infonce:9"), seeds=(0, 1), steps=4, batch_size=4, eval_rows=8,
    evaluations=2, **SHAPE,
)  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("future") / "study"
    assert run_study(STUDY, folder) == {}
    return folder


@pytest.mark.end_to_end
def test_all_arms_of_a_seed_read_the_same_rows_and_leave_only_their_numbers(done):
    orders = {seed: set() for seed in STUDY.seeds}
    for name in STUDY.arms:
        for seed in STUDY.seeds:
            folder = done / Run(name, seed).folder
            files = sorted(file.name for file in folder.iterdir() if file.name != ".lock")
            assert files == ["config.json", "losses.json", "metrics.json", "trainer_state.json"]
            metrics, losses = (json.loads((folder / f"{kind}.json").read_text()) for kind in ("metrics", "losses"))
            assert metrics["val_loss"] == pytest.approx(sum(losses["rows"]) / 8) and len(losses["positions"]) == 16
            assert ("future_loss" in metrics) == name.startswith(("future", "tokens"))
            orders[seed].add(metrics["data_order"])
    assert all(len(order) == 1 for order in orders.values()) and orders[0] != orders[1]


@pytest.mark.end_to_end
def test_a_study_that_is_killed_within_a_run_ends_with_the_same_table(done, tmp_path, monkeypatch):
    evaluated, calls = future._evaluated, []

    def dies(*args):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return evaluated(*args)

    monkeypatch.setattr(future, "_evaluated", dies)
    with pytest.raises(KeyboardInterrupt):
        run_study(STUDY, tmp_path / "study")
    assert list((tmp_path / "study").rglob("checkpoint-*"))
    assert run_study(STUDY, tmp_path / "study") == {}
    assert tables(tmp_path / "study").drop(columns="seconds").equals(tables(done).drop(columns="seconds"))


@pytest.mark.end_to_end
def test_arms_that_read_other_rows_are_not_compared(done, tmp_path):
    copy = shutil.copytree(done, tmp_path / "s")
    file = copy / Run("memory:4", 0).folder / "metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data_order": "another"}))
    with pytest.raises(TrainingError, match="seed 0 did not read the same rows"):
        tables(copy)


def test_invalid_studies_are_refused_before_anything_is_written(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("A few words, and no more.")
    with pytest.raises(DataError, match="add text, or choose a shorter context"):
        run_study(replace(STUDY, texts=(str(text),)), tmp_path / "s")
    assert not (tmp_path / "s").exists()
    for change in ({"heads": 3}, {"vocab_size": 100}, {"arms": ("smaller",)}, {"arms": ("baseline", "future:mse:16")}):
        with pytest.raises((DataError, ModelError)):
            replace(STUDY, **change)


def test_arithmetic_is_counted():
    """By hand: 6 per weight of a product and token, and 12 per pair and channel of attention."""
    one, weights = arm("smaller"), 12 * 16 * 16 + 300 * 16
    model = one.build(STUDY.config, 0)
    batch = {"input_ids": torch.randint(300, (2, 16)), "labels": torch.randint(300, (2, 16))}
    assert flops_per_token(one, model, batch) == pytest.approx(6 * weights + 12 * 16 * 16, rel=0.02)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.end_to_end
def test_the_table_compares_the_losses_of_the_runs_with_the_reference(done):
    rows, against = tables(done).set_index("arm"), tables(done, "memory:4").set_index("arm")
    means = {}
    for name in STUDY.arms:
        losses = [json.loads((done / Run(name, seed).folder / "losses.json").read_text())["rows"] for seed in (0, 1)]
        means[name] = sum(map(sum, losses)) / 16
        assert rows.loc[name, "mean"] == pytest.approx(means[name])
        assert rows.loc[name, "parameters"] == sum(
            p.numel() for p in STUDY.arm(name).build(STUDY.config, 0).parameters()
        )
    for name in set(STUDY.arms) - {"baseline", "memory:4"}:
        for table, reference in ((rows, "baseline"), (against, "memory:4")):
            row = table.loc[name]
            assert row["difference"] == pytest.approx(means[name] - means[reference], abs=1e-9)
            assert row["difference_low"] < row["difference"] < row["difference_high"]
