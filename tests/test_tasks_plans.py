"""From epochs to steps: the presets, and what a small or a large data set makes of them."""

from __future__ import annotations

import pytest

from labkit.errors import TrainingError
from labkit.tasks.plans import PRESETS, Plan, default_preset, preset


def settings(rows: int, plan: Plan | None = None, processes: int = 1):
    return (plan or Plan()).settings(rows, "f1", dtype="float32", tf32=False, processes=processes)


def test_the_gemma_preset_is_the_recipe_people_know():
    plan = PRESETS["gemma"]
    assert (plan.epochs, plan.batch_size, plan.eval_batch_size, plan.gradient_accumulation) == (5, 4, 8, 4)
    assert (plan.learning_rate, plan.warmup, plan.weight_decay, plan.schedule) == (2e-5, 0.1, 0.01, "linear")
    assert (plan.keep, plan.patience) == (3, 20)
    made = settings(88_000)
    assert made.max_steps == 5 * 5500 and made.evaluating_steps == made.saving_steps == 500
    assert (made.metric, made.keep, made.patience) == ("f1", 3, 20)


def test_a_small_data_set_is_evaluated_once_per_pass():
    made = settings(472)
    assert (made.max_steps, made.evaluating_steps) == (148, 30)  # 472 rows are 29.5 steps of 16
    assert settings(472, Plan(evaluate_every=90)).evaluating_steps == 90  # what is asked for is done
    assert settings(472, Plan(evaluate_every=9000)).evaluating_steps == 148
    assert settings(3).max_steps == 1 and settings(3).evaluating_steps == 1


def test_two_processes_take_half_the_steps():
    assert settings(1600).max_steps == 500 and settings(1600, processes=2).max_steps == 250


def test_max_steps_ends_a_run_earlier_and_never_later():
    assert settings(1600, Plan(max_steps=7)).max_steps == 7
    assert settings(1600, Plan(max_steps=7)).evaluating_steps == 7
    assert settings(16, Plan(max_steps=700)).max_steps == 5


@pytest.mark.parametrize("wrong", [{"epochs": 0.0}, {"epochs": -1.0}, {"max_steps": 0}])
def test_a_plan_without_a_step_is_refused(wrong):
    with pytest.raises(TrainingError, match="both must be positive"):
        settings(10, Plan(**wrong))


def test_a_preset_is_changed_by_what_is_given_and_by_nothing_else():
    assert preset("mini", learning_rate=None) == PRESETS["mini"]
    assert preset("mini", learning_rate=1e-3, seed=4).seed == 4
    with pytest.raises(TrainingError, match="preset is 'large'; choose one of gemma, mini, quick"):
        preset("large")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt2-mini", "mini"),
        ("tiny-gpt2", "mini"),
        ("gemma3-270m", "gemma"),
        ("some/model", "gemma"),
        ("gpt2", "gemma"),
    ],
)
def test_small_models_have_a_preset_of_their_own(model, name):
    assert default_preset(model) == name
