"""The training loop: resumable bit for bit, every loss logged once, the best model loaded, no NaN in a checkpoint."""

from __future__ import annotations

import json
import math
import random
import shutil
from itertools import count

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from labkit import training
from labkit.errors import TrainingError
from labkit.objectives import Collator, generator, loss
from labkit.pretrain import Shape, new_model
from labkit.run_folder import RunFolder, read_json
from labkit.tasks.finetune import default_preset
from labkit.training import PRESETS, draw, preset, settled, steps, train

pytestmark = pytest.mark.end_to_end

VOCAB, CONTEXT = 300, 16


def row(k: int, length: int = CONTEXT) -> dict:
    """Row k: tokens that go up by one, from a few of the vocabulary, so that there is something to learn."""
    start = 10 + int(torch.randint(30, (), generator=generator(7, k)))
    return {"row": k, "ids": torch.arange(start, start + length)}


def uneven(k: int) -> dict:
    """A row whose length depends on k."""
    return row(k, length=2 + 7 * k % 15)


def next_token_loss(model, batch):
    return loss(model, batch, "next")


def trained(folder, dropout=0.1, loss=next_token_loss, make=row, log=None, evaluate=None, metric=None, **changes):
    """(outcome, model) of a run of 12 steps of 4 rows, continued if it was begun."""
    changes = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 5e-3} | changes
    settings = settled(preset("lm", **changes), "gpt2", print)
    rows = settings["max_steps"] * settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    items = type(
        "Items", (), {"__len__": lambda _: rows * training.process_count(), "__getitem__": lambda _, k: make(k)}
    )
    model = new_model(Shape(VOCAB, CONTEXT, 64, 1, dropout), seed=0)
    with RunFolder.alone(folder, {}, resume=True) as run:
        outcome = train(
            model,
            items(),
            collate=Collator("next", pad_id=1),
            loss=loss,
            settings=settings,
            run=run,
            tokens=lambda k: CONTEXT,
            evaluate=evaluate,
            metric=metric,
            log=log or (lambda text: None),
        )
    return outcome | {"history": read_json(run.path / "trainer_state.json")["log_history"]}, model


def losses(outcome) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in outcome["history"] if "loss" in entry}


def without_seconds(outcome) -> list[dict]:
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in outcome["history"]]


def same_weights(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def checkpoints(folder) -> set[int]:
    return {int(path.name.removeprefix("checkpoint-")) for path in (folder / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run that others are compared with: (outcome, model, folder)."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return *trained(folder), folder


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("large", {}, "large.*gemma, mini, quick, lm"),
        ("mini", {"batch_size": 3}, "batch_size.*TrainingArguments"),
        ("mini", {"learning_rate": math.nan}, "learning_rate is nan"),
        ("lm", {"max_steps": 0}, "max_steps is 0"),
        ("mini", {"lr_scheduler_type": "zigzag"}, "zigzag.*cosine"),
        ("mini", {"dtype": "fp8"}, "fp8.*bfloat16"),
        ("mini", {"dtype": "float16"}, "float16 needs a GPU"),
        ("mini", {"report_to": "none,no_such_tracker"}, "'no_such_tracker' is not installed"),
    ],
)
def test_hyperparameters_without_a_meaning_are_refused(monkeypatch, name, changes, complaint):
    monkeypatch.setattr(training.precision, "here", lambda: None)
    with pytest.raises(TrainingError, match=complaint):
        settled(preset(name, **changes), "gpt2", print)


def test_a_preset_is_changed_by_what_is_given_and_by_nothing_else():
    changes = {"learning_rate": 1e-3, "warmup_steps": 0.0}
    assert preset("mini", **changes, seed=None) == PRESETS["mini"] | changes
    names = {"gpt2-mini": "mini", "tiny-gpt2": "mini", "gemma3-270m": "gemma", "some/model": "gemma"}
    assert {model: default_preset(model) for model in names} == names


def test_the_steps_are_those_of_the_epochs_and_max_steps_ends_them_earlier(monkeypatch):
    assert steps(1600, PRESETS["gemma"]) == 5 * 1600 // (4 * 4)
    assert (steps(1600, preset("gemma", max_steps=7)), steps(16, preset("gemma", max_steps=700))) == (7, 5)
    assert steps(3, preset("gemma", num_train_epochs=0.1)) == 1
    monkeypatch.setattr(training, "process_count", lambda: 2)
    assert steps(1600, PRESETS["gemma"]) == 250


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=200),
    batch=st.integers(1, 33),
    epochs=st.integers(1, 4),
    packed=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_pass_has_every_row_once_and_the_order_depends_on_the_seed_alone(lengths, batch, epochs, packed, seed):
    changes = {"num_train_epochs": epochs, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 1}
    settings = preset("gemma", seed=seed, **changes)
    items = draw(lengths, settings, packed=packed)
    assert items == draw(lengths, settings, packed=packed) and len(items) == steps(len(lengths), settings) * batch
    rows = [row for (row,) in items]
    passes = [rows[start : start + len(lengths)] for start in range(0, epochs * len(lengths), len(lengths))]
    assert all(sorted(one_pass) == list(range(len(lengths))) for one_pass in passes)
    if len(lengths) > 20:
        assert items != draw(lengths, settings | {"seed": 9}, packed=packed)
        assert all(one_pass != passes[0] for one_pass in passes[1:])


def test_rows_of_similar_length_share_a_batch_and_long_and_short_batches_are_mixed():
    lengths, batch = [(37 * k) % 300 + 10 for k in range(1000)], 7
    settings = preset("gemma", num_train_epochs=3, per_device_train_batch_size=batch, gradient_accumulation_steps=1)

    def batches(packed: bool) -> list[list[int]]:
        order = [lengths[row] for (row,) in draw(lengths, settings, packed=packed)]
        return [order[start : start + batch] for start in range(0, len(order), batch)]

    grouped, shuffled = ([max(b) * len(b) - sum(b) for b in batches(packed)] for packed in (False, True))
    assert sum(grouped) < 0.15 * sum(shuffled)  # tokens of padding
    longest = [max(b) for b in batches(False)][: 250 // batch]
    assert longest != sorted(longest) and min(longest) < 100 < 200 < max(longest)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 100), st.integers(0, 5))
def test_batches_of_tokens_have_every_row_once_per_pass_and_are_full(lengths, tokens, seed):
    changes = {"num_train_epochs": 2, "gradient_accumulation_steps": 1}
    batches = draw(lengths, preset("gemma", batch_tokens=tokens, seed=seed, **changes), packed=True)
    first = batches[: len(batches) // 2]
    assert sorted(row for batch in first for row in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[row] for row in batch) <= tokens for batch in batches)
    for batch, following in zip(first, first[1:], strict=False):  # one more row would not have fitted
        assert sum(lengths[row] for row in batch) + lengths[following[0]] > tokens


def test_the_loss_falls_and_what_the_run_cost_is_returned(plain):
    outcome, _, folder = plain
    curve = losses(outcome)
    assert list(curve) == list(range(1, 13))
    assert curve[1] == pytest.approx(math.log(VOCAB), rel=0.05)  # a new model predicts nothing yet
    assert curve[12] < curve[1] - 0.3
    assert (outcome["seed"], outcome["steps"]) == (0, 12) and "best_step" not in outcome
    assert outcome["tokens_per_second"] * outcome["seconds"] == pytest.approx(12 * 4 * CONTEXT)
    assert json.loads(json.dumps(outcome)) == outcome
    assert checkpoints(folder) == {10, 11, 12}


def test_the_seed_alone_decides_the_model_and_rows_are_made_once_and_in_order(plain, tmp_path, monkeypatch):
    made = []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` sets it; it changes nothing
    outcome, model = trained(tmp_path / "again", make=lambda k: made.append(k) or row(k))
    assert losses(outcome) == losses(plain[0]) and same_weights(model, plain[1]) and made == list(range(48))
    other, _ = trained(tmp_path / "other", seed=1)  # the same weights at first, but other units drop out
    assert losses(other) != losses(outcome)


def test_accumulated_batches_with_uneven_numbers_of_labels_are_one_large_batch(tmp_path):
    how = {"dropout": 0.0, "make": uneven}
    large, _ = trained(tmp_path / "large", per_device_train_batch_size=8, **how)
    small, _ = trained(tmp_path / "small", gradient_accumulation_steps=2, gradient_checkpointing=True, **how)
    for name in ("loss", "grad_norm"):  # AdamW hides a gradient of half the size
        assert [entry[name] for entry in small["history"]] == pytest.approx(
            [entry[name] for entry in large["history"]], rel=1e-4
        )


def test_bfloat16_trains_almost_the_same_and_leaves_no_trace_in_the_next_run(plain, tmp_path):
    half, model = trained(tmp_path / "half", dtype="bfloat16")
    assert losses(half) != losses(plain[0]) and losses(half) == pytest.approx(losses(plain[0]), abs=0.05)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses(trained(tmp_path / "single")[0]) == losses(plain[0])


def draws_and_scores(model) -> dict[str, float]:
    """An evaluation that draws random numbers of every kind."""
    torch.manual_seed(3)
    random.random(), numpy.random.rand(), torch.rand(5)
    assert not model.training and not torch.is_grad_enabled()
    return {"val_loss": float(next_token_loss(model, Collator("next", pad_id=1)([row(0)])))}


def test_evaluation_leaves_no_trace_in_the_training_nor_the_training_outside(plain, tmp_path):
    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    outcome, model = trained(tmp_path / "run", evaluate=draws_and_scores, eval_steps=5)
    scores = {entry["step"]: entry["val_loss"] for entry in outcome["history"] if "val_loss" in entry}
    assert list(scores) == [5, 10, 12] and len(set(scores.values())) == 3  # another model each time
    assert losses(outcome) == losses(plain[0]) and same_weights(model, plain[1])

    def broken(model, batch):
        torch.rand(1), numpy.random.rand()
        raise KeyError("a mistake in the loss")

    with pytest.raises(KeyError):
        trained(tmp_path / "broken", loss=broken)
    assert torch.equal(torch.get_rng_state(), before[0]) and numpy.random.get_state()[1].tolist() == before[1]


class Scripted:
    """An evaluation that returns the numbers of a list in turn, and keeps the weights that it evaluated."""

    def __init__(self, *scores: float, skip: int = 0):
        self.scores, self.weights = list(scores)[skip:], []

    def __call__(self, model) -> dict[str, float]:
        self.weights.append([parameter.detach().clone() for parameter in model.parameters()])
        return {"f1": self.scores[len(self.weights) - 1]}

    def evaluated(self, model) -> list[int]:
        """The numbers of the evaluations at which the model had its weights of now."""
        pairs = (zip(model.parameters(), weights, strict=True) for weights in self.weights)
        return [number for number, pair in enumerate(pairs) if all(torch.equal(a, b) for a, b in pair)]


def by_f1(folder, evaluate, **changes):
    return trained(folder, evaluate=evaluate, **{"metric": "f1", "eval_steps": 2} | changes)


@pytest.mark.parametrize(
    ("scores", "changes", "best", "kept"),
    [
        ((math.nan, 0.5, 0.9, 0.3, 0.9, 0.4), {}, 3, {6, 10, 12}),  # of equal ones the first; NaN is the worst
        ((0.1, 0.5, 0.9, 0.3, 0.2, 0.4), {"metric": None}, 6, {8, 10, 12}),
    ],
)
def test_the_model_at_the_end_is_that_of_the_best_evaluation_or_without_a_metric_the_last(
    tmp_path, scores, changes, best, kept
):
    evaluate = Scripted(*scores)
    outcome, model = by_f1(tmp_path / "run", evaluate, **changes)
    assert evaluate.evaluated(model) == [best - 1] and outcome["steps"] == 12
    assert outcome.get("best_step") == (None if changes else 2 * best)
    assert checkpoints(tmp_path / "run") == kept


SCORES = (0.5, 0.9, 0.2, 0.8, 0.3, 0.4)


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A run that ends by patience at step 10: (outcome, model, folder)."""
    folder = tmp_path_factory.mktemp("patient") / "run"
    evaluate = Scripted(*SCORES)
    outcome, model = by_f1(folder, evaluate, patience=3)
    assert (outcome["steps"], outcome["best_step"]) == (10, 4) and len(evaluate.weights) == 5
    assert evaluate.evaluated(model) == [1] and list(losses(outcome)) == list(range(1, 11))
    assert outcome["tokens_per_second"] * outcome["seconds"] == pytest.approx(10 * 4 * CONTEXT)
    return outcome, model, folder


class Killed(BaseException):
    pass


def killed_at(folder, step: int, run=trained, **how):
    """A run that ends in the middle of `step`, counted from where it begins."""
    calls = count(1)

    def loss(model, batch):
        if next(calls) == step:
            raise Killed
        return next_token_loss(model, batch)

    with pytest.raises(Killed):
        run(folder, loss=loss, **how)


def test_a_killed_run_counts_its_patience_on_even_in_another_folder(patient, tmp_path):
    killed_at(tmp_path / "run", 8, by_f1, evaluate=Scripted(*SCORES), patience=3)
    moved = shutil.move(tmp_path / "run", tmp_path / "moved")
    outcome, model = by_f1(moved, Scripted(*SCORES, skip=3), patience=3)
    assert without_seconds(outcome) == without_seconds(patient[0])
    assert (outcome["best_step"], outcome["steps"]) == (4, 10) and same_weights(model, patient[1])
    seconds = [entry["seconds"] for entry in outcome["history"]]
    assert seconds == sorted(seconds) and outcome["seconds"] == seconds[-1]


def test_a_run_killed_after_patience_ended_it_takes_no_further_step(patient, tmp_path):
    def no_step(*_):
        pytest.fail("a step was taken")

    expected, model, folder = patient
    shutil.copytree(folder, tmp_path / "run")
    outcome, same = by_f1(tmp_path / "run", no_step, loss=no_step, patience=3)
    assert (outcome["history"], outcome["steps"]) == (expected["history"], expected["steps"])
    assert outcome["best_step"] == expected["best_step"] and same_weights(same, model)


def times(value: float, at: int):
    """The loss, multiplied by `value` at one step."""
    calls = count(1)

    def loss(model, batch):
        return next_token_loss(model, batch) * (value if next(calls) == at else 1.0)

    return loss


def smooth_until_derived(model, batch):
    """A finite loss whose gradient is NaN."""
    value = next_token_loss(model, batch)
    return value + value.sub(value.detach()).sqrt()


LONG = {"max_steps": 299, "save_steps": 10, "per_device_train_batch_size": 1}  # logs a loss every second step


@pytest.mark.parametrize(
    ("loss", "complaint", "saved", "changes"),
    [
        (times(math.inf, 6), "loss is NaN or infinite at step 6: lower the learning rate", 5, {"save_steps": 1}),
        (times(math.nan, 15), "loss .* at step 16", 10, LONG),
        (smooth_until_derived, "grad_norm .* at step 1", 0, {"save_steps": 1}),
    ],
)
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run_before_a_checkpoint(
    tmp_path, loss, complaint, saved, changes
):
    with pytest.raises(TrainingError, match=complaint) as error:
        trained(tmp_path / "run", loss=loss, **changes)
    assert error.value.diverged
    folders = list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))
    assert max((int(folder.name.split("-")[1]) for folder in folders), default=0) == saved
    for folder in folders:
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(folder / "model.safetensors").values())


def test_too_little_memory_is_one_clear_error_with_advice(tmp_path):
    def loss(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(TrainingError, match="--resume --gradient-checkpointing"):
        trained(tmp_path / "run", loss=loss)


def test_off_a_terminal_there_is_one_line_per_evaluation_and_nothing_else(tmp_path, capfd, recwarn):
    lines = []
    how = {"evaluate": draws_and_scores, "eval_steps": 6, "save_steps": 2, "log": lines.append}
    killed_at(tmp_path / "run", 6, **how)
    trained(tmp_path / "run", **how)
    assert capfd.readouterr() == ("", "") and [str(warning.message) for warning in recwarn] == []
    starts = ("resuming from step 4 of 12", "step 6 of 12: loss ", "step 12 of 12: loss ")
    assert len(lines) == 3 and all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_tensorboard_writes_into_the_folder_of_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    trained(tmp_path / "run", report_to="tensorboard")
    assert list((tmp_path / "run").rglob("*tfevents*"))
