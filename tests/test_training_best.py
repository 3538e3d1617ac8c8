"""The best model by a metric: it is kept and loaded, patience ends a run, a kill changes neither; and full disks."""

from __future__ import annotations

import errno
import shutil

import pytest
import torch
from transformers import Trainer

from labkit.errors import ModelError, TrainingError
from labkit.run_folder import RunFolder
from labkit.training import Settings
from tests.test_training import (
    Killed,
    broken_off,
    contents,
    fresh_model,
    losses,
    same_weights,
    trained,
)

pytestmark = pytest.mark.end_to_end


class Scripted:
    """An evaluation that gives the numbers of a list, one after the other, and remembers the weights it saw."""

    def __init__(self, *scores: float, skip: int = 0):
        self.scores, self.seen = list(scores)[skip:], []

    def __call__(self, model) -> dict[str, float]:
        self.seen.append([p.detach().clone() for p in model.parameters()])
        return {"f1": self.scores[len(self.seen) - 1]}


def by_f1(folder, evaluate, **settings):
    return trained(folder, evaluate=evaluate, **{"metric": "f1", "evaluate_every": 2, "max_steps": 12} | settings)


def test_the_model_at_the_end_is_the_one_of_the_best_evaluation(tmp_path):
    evaluate = Scripted(0.1, 0.5, 0.9, 0.3, 0.2, 0.4)
    outcome, model = by_f1(tmp_path / "run", evaluate)
    assert outcome["best_step"] == 6 and outcome["steps"] == 12
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), evaluate.seen[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), evaluate.seen[-1], strict=True))
    kept = {folder.name for folder in RunFolder(tmp_path / "run").checkpoints.iterdir()}
    assert kept == {"checkpoint-6", "checkpoint-10", "checkpoint-12"}  # the best, and the newest two


def test_without_a_metric_the_model_at_the_end_is_the_last(tmp_path):
    evaluate = Scripted(0.1, 0.5, 0.9, 0.3, 0.2, 0.4)
    outcome, model = trained(tmp_path / "run", evaluate=evaluate, evaluate_every=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), evaluate.seen[-1], strict=True))
    assert "best_step" not in outcome


def test_of_equal_evaluations_the_first_is_the_best(tmp_path):
    outcome, _ = by_f1(tmp_path / "run", Scripted(0.5, 0.5, 0.5, 0.5, 0.5, 0.5), keep=1)
    assert outcome["best_step"] == 2


def test_patience_ends_the_run(tmp_path):
    said = []
    evaluate = Scripted(0.5, 0.9, 0.2, 0.8, 0.95, 1.0)  # 0.2 and 0.8 are no better than 0.9
    outcome, model = by_f1(tmp_path / "run", evaluate, patience=2, say=said.append)
    assert len(evaluate.seen) == 4 and outcome["steps"] == 8 and outcome["best_step"] == 4
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), evaluate.seen[1], strict=True))
    assert list(losses(outcome)) == list(range(1, 9))
    assert said[-1].startswith("step 8 of 12: loss ")


SCORES = (0.5, 0.9, 0.2, 0.8, 0.3, 0.4)


@pytest.mark.parametrize("step", [3, 6, 8])
def test_a_killed_run_counts_its_patience_on_and_ends_the_same(tmp_path, step):
    expected, model = by_f1(tmp_path / "whole", Scripted(*SCORES), patience=3)
    assert expected["steps"] == 10
    broken_off(tmp_path / "run", step, evaluate=Scripted(*SCORES), metric="f1", evaluate_every=2, patience=3)
    moved = shutil.move(tmp_path / "run", tmp_path / "moved")  # the best checkpoint is found in the folder's new place
    outcome, twin = by_f1(moved, Scripted(*SCORES, skip=(step - 1) // 2), patience=3)
    assert outcome["history"] == expected["history"]
    assert (outcome["best_step"], outcome["steps"]) == (expected["best_step"], expected["steps"])
    assert same_weights(model, twin)


def test_a_run_that_had_stopped_and_was_killed_before_its_model_was_written_trains_no_further(tmp_path):
    expected, model = by_f1(tmp_path / "run", Scripted(*SCORES), patience=3)

    def not_again(*_):
        pytest.fail("a step was taken")

    outcome, twin = by_f1(tmp_path / "run", not_again, patience=3, loss=not_again)
    assert same_weights(model, twin) and not same_weights(twin, fresh_model())
    assert outcome["history"] == expected["history"]
    assert (outcome["best_step"], outcome["steps"]) == (4, 10)


def test_a_best_checkpoint_that_was_altered_is_not_loaded(tmp_path):
    by_f1(tmp_path / "run", Scripted(*SCORES), patience=3)
    file = tmp_path / "run" / "checkpoints" / "checkpoint-4" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(TrainingError, match=r"model.safetensors is not what was saved"):
        by_f1(tmp_path / "run", Scripted(*SCORES), patience=3)


def test_a_metric_that_is_not_measured_is_one_clear_error(tmp_path):
    with pytest.raises(TrainingError, match="the best model by f1 is wanted; measured are accuracy"):
        by_f1(tmp_path / "run", lambda model: {"accuracy": 1.0})
    with pytest.raises(TrainingError, match="the best model by f1 is wanted, and there is no evaluation"):
        by_f1(tmp_path / "other", None)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"patience": 3}, "patience is 3 evaluations; it must be 0 or more, and needs a metric"),
        ({"patience": -1, "metric": "f1"}, "patience is -1"),
        ({"metric": "f1", "save_every": 3, "evaluate_every": 2}, "give save every 3 and evaluate every 2 the same"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"schedule": "constant"}, "schedule is 'constant'; choose one of cosine, linear"),
    ],
)
def test_settings_of_the_best_model_without_a_meaning_are_refused(wrong, complaint):
    with pytest.raises(TrainingError, match=complaint):
        Settings(**{"max_steps": 10} | wrong)


def test_a_linear_schedule_ends_at_zero(tmp_path):
    outcome, _ = trained(tmp_path / "run", schedule="linear", warmup=0.25, learning_rate=1.0e-3, max_steps=8)
    rates = [entry["learning_rate"] for entry in outcome["history"] if "loss" in entry]
    assert rates == pytest.approx([1e-3 * min(k / 2, (8 - k) / 6) for k in range(8)], abs=1e-9)


def test_gradient_checkpointing_changes_nothing_but_the_memory(tmp_path):
    plain, model = trained(tmp_path / "plain", dropout=0.0)
    outcome, twin = trained(tmp_path / "run", dropout=0.0, gradient_checkpointing=True)
    assert losses(outcome) == pytest.approx(losses(plain), abs=1e-5)


@pytest.mark.parametrize(
    ("of", "part"),
    [
        (Trainer, "save_model"),
        (Trainer, "_save_optimizer_and_scheduler"),
        (Trainer, "_save_rng_state"),
        (RunFolder, "seal"),
    ],
)
def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_when_there_is_room(tmp_path, monkeypatch, of, part):
    expected, model = trained(tmp_path / "whole", save_every=4)
    calls, write = [], getattr(of, part)

    def no_room_at_the_second(self, folder, *rest, **options):
        calls.append(folder)
        if len(calls) == 2:
            write(self, folder, *rest, **options)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, folder, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(of, part, no_room_at_the_second)
        with pytest.raises(
            TrainingError,
            match=r"checkpoint-8 could not be written: No space left .*--resume \(.* whole checkpoint is of step 4\)",
        ):
            trained(tmp_path / "run", save_every=4)
    assert [folder.name for folder in RunFolder(tmp_path / "run").checkpoints.iterdir()] == ["checkpoint-4"]
    outcome, twin = trained(tmp_path / "run", save_every=4)
    assert outcome["history"] == expected["history"] and same_weights(model, twin)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_too_little_memory_is_one_clear_error_with_advice(tmp_path, error):
    def too_much(model, batch):
        raise error

    advice = r"--resume .* with gradient checkpointing; .* batch size 2 and gradient accumulation 2 .*LoRA"
    with pytest.raises(TrainingError, match=f"memory is full; {advice}"):
        trained(tmp_path / "run", loss=too_much)
    with pytest.raises(TrainingError, match=r"checkpoint where there is more; .* fewer tokens to a batch"):
        trained(tmp_path / "run", loss=too_much, gradient_checkpointing=True, batch_size=1)


def test_other_errors_of_torch_are_not_taken_for_full_memory(tmp_path):
    def wrong(model, batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trained(tmp_path / "run", loss=wrong)


def test_several_trackers_at_once_each_write_to_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    trained(tmp_path / "run", report_to="tensorboard")
    assert [name for name in contents(tmp_path / "run") if "tfevents" in name]


def test_one_of_several_trackers_that_is_missing_is_named(tmp_path):
    with pytest.raises(ModelError, match="'no_such_tracker' is not installed"):
        trained(tmp_path / "run", report_to="none,no_such_tracker")


def test_killed_is_not_an_error_that_is_explained_away(tmp_path):
    def killed(model, batch):
        raise Killed

    with pytest.raises(Killed):
        trained(tmp_path / "run", loss=killed)
