"""The training loop: rows in order, every loss logged once, no trace of an evaluation, no NaN in a checkpoint."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy
import pytest
import torch

from labkit import training, training_settings
from labkit.decoder.running import evaluating
from labkit.errors import DivergedError, LabkitError, ModelError, TrainingError
from labkit.objectives import Collator, generator, loss
from labkit.pretrain import Shape, new_model
from labkit.run_folder import SEAL, RunFolder, read_json
from labkit.training import Settings, train
from labkit.training_settings import settled

pytestmark = pytest.mark.end_to_end

VOCAB, CONTEXT = 300, 16


def row(k: int) -> torch.Tensor:
    """Row k: tokens that go up by one, from a few of the vocabulary, so that there is something to learn."""
    start = 10 + int(torch.randint(30, (), generator=generator(7, k)))
    return torch.arange(start, start + CONTEXT)


def next_token_loss(model, batch):
    return loss(model, batch, "next")


def fresh_model(dropout: float = 0.1):
    return new_model(Shape(VOCAB, CONTEXT, 64, 1, dropout), seed=0)


def trained(folder, dropout: float = 0.1, loss=next_token_loss, evaluate=None, make_row=row, say=None, **settings):
    """A run of 12 steps with dropout: (outcome, model)."""
    run = RunFolder.open(folder, {"test": 1}, resume=True)
    model = fresh_model(dropout)
    outcome = train(
        model,
        make_row,
        collate=Collator("next", pad_id=1),
        loss=loss,
        settings=Settings(**{"max_steps": 12, "batch_size": 4, "learning_rate": 5e-3, "log_every": 1} | settings),
        run=run,
        evaluate=evaluate,
        say=say or (lambda text: None),
    )
    return outcome, model


def losses(outcome) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in outcome["history"] if "loss" in entry}


def contents(folder) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def same_weights(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run of 12 steps that others are compared with."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return *trained(folder), folder


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"max_steps": 0}, "max steps must be at least 1, not 0"),
        ({"batch_size": 0}, "batch size must be at least 1, not 0"),
        ({"gradient_accumulation": -2}, "gradient accumulation must be at least 1, not -2"),
        ({"learning_rate": 0.0}, "learning rate 0.0 must be positive"),
        ({"learning_rate": -1e-3}, "learning rate -0.001 must be positive"),
        ({"learning_rate": math.nan}, "learning rate nan must be positive"),
        ({"warmup": 1.0}, r"warm-up 1.0 in \[0, 1\)"),
        ({"warmup": -0.1}, r"warm-up -0.1 in \[0, 1\)"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; choose one of auto, float32, bfloat16, float16"),
        ({"evaluate_every": -1}, "evaluate every is -1 steps"),
        ({"save_every": -1}, "save every is -1 steps"),
        ({"log_every": -1}, "log every is -1 steps"),
    ],
)
def test_settings_without_a_meaning_are_refused_with_what_was_given(wrong, complaint):
    with pytest.raises(TrainingError, match=complaint):
        Settings(**{"max_steps": 10} | wrong)


def test_a_checkpoint_never_falls_between_two_logs_of_the_loss():
    for max_steps in (1, 7, 99, 250, 4000):
        for save_every in (0, 1, 10, 33):
            for log_every in (0, 1, 4, 10):
                settings = Settings(max_steps, save_every=save_every, log_every=log_every)
                assert settings.saving_steps % settings.logging_steps == 0
                assert settings.saving_steps >= 1


def test_the_loss_falls_and_what_it_cost_is_returned(plain):
    outcome, _, _ = plain
    curve = losses(outcome)
    assert list(curve) == list(range(1, 13))
    assert curve[1] == pytest.approx(math.log(VOCAB), rel=0.05)  # an untrained model knows nothing
    assert curve[12] < curve[1] - 0.3
    assert outcome["seed"] == 0
    tokens = 12 * 4 * CONTEXT
    assert outcome["tokens_per_second"] * outcome["seconds"] == pytest.approx(tokens)
    assert json.loads(json.dumps(outcome)) == outcome


def test_peak_memory_is_bytes_and_no_less_than_what_is_held_now():
    import psutil

    if torch.cuda.is_available():
        pytest.skip("on a GPU its own memory is counted")
    assert psutil.Process().memory_info().rss <= training.peak_memory() * 1.01 < psutil.virtual_memory().total


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="about Linux's way of counting")
def test_peak_memory_is_not_what_the_parent_process_held():
    held = torch.ones(200_000_000)  # 800 MB
    code = "from labkit.training import peak_memory; print(peak_memory())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(child.stdout) < held.nbytes <= training.peak_memory()


def test_the_same_seed_trains_the_same_model_and_another_seed_another(plain, tmp_path):
    outcome, model, _ = plain
    again, twin = trained(tmp_path / "again")
    assert losses(again) == losses(outcome)
    assert same_weights(twin, model)
    other, _ = trained(tmp_path / "other", seed=1)  # the same weights at first, but other units drop out
    assert losses(other) != losses(outcome)


def test_tf32_and_the_kernels_of_a_training_are_its_own(tmp_path):
    seen = set()

    def kernels():
        return torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()

    def loss(model, batch):
        seen.add(kernels())
        return next_token_loss(model, batch)

    trained(tmp_path / "run", loss=loss, max_steps=1, tf32=True)
    assert seen == {("high", False)} and kernels() == ("highest", True)
    assert torch.backends.cuda.matmul.allow_tf32 is False  # and it can still be read


def test_rows_are_asked_for_once_and_in_order(tmp_path):
    asked = []

    def noted(k):
        asked.append(k)
        return row(k)

    trained(tmp_path / "run", make_row=noted, max_steps=5, gradient_accumulation=2, batch_size=3)
    assert asked == list(range(5 * 2 * 3))


def test_two_passes_of_four_rows_are_one_step_of_eight(tmp_path):
    whole, _ = trained(tmp_path / "whole", dropout=0.0, batch_size=8)
    halves, _ = trained(tmp_path / "halves", dropout=0.0, batch_size=4, gradient_accumulation=2)
    assert losses(halves) == pytest.approx(losses(whole), abs=1e-5)
    for one, two in zip(
        whole["history"], halves["history"], strict=True
    ):  # Adam would hide a gradient of half the size
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert halves["tokens_per_second"] * halves["seconds"] == pytest.approx(
        whole["tokens_per_second"] * whole["seconds"]
    )


def test_the_learning_rate_rises_to_its_peak_and_falls_along_a_cosine_to_its_last_share(tmp_path):
    outcome, _ = trained(tmp_path / "run", max_steps=20, warmup=0.25, learning_rate=1e-3, final_share=0.2)
    rates = {entry["step"]: entry["learning_rate"] for entry in outcome["history"] if "loss" in entry}
    for step, rate in rates.items():
        done = step - 1  # the rate with which the step was taken
        share = done / 5 if done < 5 else 0.2 + 0.8 * (1 + math.cos(math.pi * (done - 5) / 15)) / 2
        assert rate == pytest.approx(1e-3 * share, abs=1e-9), step


def draws_and_scores(model) -> dict[str, float]:
    """An evaluation that uses up random numbers of every kind, and the model."""
    torch.manual_seed(3)
    random.random(), numpy.random.rand(), torch.rand(5)
    assert not model.training and not torch.is_grad_enabled()
    return {"val_loss": float(next_token_loss(model, Collator("next", pad_id=1)([{"row": 0, "ids": row(0)}])))}


@pytest.mark.parametrize("evaluate_every", [1, 5])
def test_evaluation_leaves_no_trace_in_the_training(plain, tmp_path, evaluate_every):
    outcome, model, _ = plain
    watched, twin = trained(tmp_path / "run", evaluate=draws_and_scores, evaluate_every=evaluate_every)
    scores = {entry["step"]: entry["val_loss"] for entry in watched["history"] if "val_loss" in entry}
    assert list(scores) == [step for step in range(1, 13) if step % evaluate_every == 0 or step == 12]
    assert len(set(scores.values())) == len(scores)  # another model each time
    assert losses(watched) == losses(outcome)
    assert same_weights(twin, model)


@pytest.mark.parametrize("evaluate", [None, draws_and_scores])
def test_every_step_is_in_exactly_one_logged_mean(plain, tmp_path, evaluate):
    each = losses(plain[0])
    outcome, _ = trained(tmp_path / "run", log_every=3, evaluate_every=4, max_steps=12, evaluate=evaluate)
    logged, before = losses(outcome), 0
    assert list(logged) == [3, 4, 6, 8, 9, 12]  # with the evaluations, whose line names the loss
    for step, mean in logged.items():
        assert mean == pytest.approx(sum(each[s] for s in range(before + 1, step + 1)) / (step - before), abs=1e-5)
        before = step


def test_the_last_steps_are_logged_though_they_are_fewer_than_an_interval(tmp_path):
    outcome, _ = trained(tmp_path / "run", max_steps=5, log_every=4, evaluate_every=100)
    assert list(losses(outcome)) == [4, 5]


def test_an_evaluation_without_numbers_is_said_without_them(tmp_path):
    said = []
    outcome, _ = trained(tmp_path / "run", evaluate=lambda model: {}, max_steps=2, say=said.append)
    assert len(said) == 2 and all("loss" in line for line in said)
    assert [list(entry) for entry in outcome["history"] if "loss" not in entry] == []


def test_evaluating_puts_the_model_back_even_after_an_error():
    model = fresh_model()
    for training_mode in (True, False):
        model.train(training_mode)
        with pytest.raises(ZeroDivisionError), evaluating(model):
            assert not any(module.training for module in model.modules())
            raise ZeroDivisionError
        assert all(module.training is training_mode for module in model.modules())
        assert torch.is_grad_enabled()


def test_what_draws_random_numbers_in_a_block_that_keeps_them_uses_none_up():
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(ZeroDivisionError), training.random_state_kept():
        torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
        raise ZeroDivisionError
    after = random.getstate()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert after == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_the_random_state_outside_is_left_as_it_was(tmp_path, ends):
    def broken(model, batch):
        raise KeyError("a mistake in the loss")

    expected = torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    after = []
    for seed in (1, 2):
        random.seed(seed)
        if ends == "well":
            trained(tmp_path / f"run{seed}", max_steps=1, evaluate=draws_and_scores)
        else:
            with pytest.raises(KeyError):
                trained(tmp_path / f"run{seed}", loss=broken)
        after.append(random.getstate())
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert numpy.random.get_state()[1].tolist() == expected[1]
    assert after[0] != after[1]  # not set by training; beartype, which checks our types, draws from it meanwhile


class NotANumberAt:
    """The loss of a run that breaks down at one step."""

    def __init__(self, step: int, value: float = math.nan):
        self.step, self.value, self.calls = step, value, 0

    def __call__(self, model, batch):
        self.calls += 1
        return next_token_loss(model, batch) * (self.value if self.calls == self.step else 1.0)


def assert_only_numbers_are_sealed(run: RunFolder) -> None:
    from safetensors.torch import load_file

    for folder in run.checkpoints.glob("checkpoint-*"):
        assert (folder / SEAL).exists()
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize(
    ("value", "step", "log_every", "noticed"),
    [
        (math.nan, 6, 1, 6),
        (math.inf, 6, 1, 6),
        (math.nan, 1, 4, 4),
        (math.nan, 6, 4, 8),
        (math.nan, 12, 5, 12),  # logged only because it is the last step
    ],
)
def test_a_loss_that_is_no_number_stops_the_run_before_it_is_saved(tmp_path, value, step, log_every, noticed):
    with pytest.raises(
        DivergedError,
        match=rf"loss is no number .* at step {noticed}: lower the learning rate \(0.005\) \(.*whole.*\)$",
    ):
        trained(tmp_path / "run", loss=NotANumberAt(step, value), log_every=log_every, save_every=1, evaluate_every=100)
    run = RunFolder(tmp_path / "run")
    assert_only_numbers_are_sealed(run)
    folder, seal = run.latest_checkpoint() or (None, {"step": 0})
    assert seal["step"] == (step - 1) // log_every * log_every


def test_weights_that_are_no_numbers_stop_the_run_before_they_are_saved(tmp_path):
    calls = []

    def smooth_until_derived(model, batch):
        calls.append(1)
        value = next_token_loss(model, batch)
        return value + torch.where(value > 0, 0.0, 0.0 if len(calls) < 4 else value.sub(value).sqrt())

    with pytest.raises(TrainingError, match="some weights are no number .* at step 4"):
        trained(tmp_path / "run", loss=smooth_until_derived, save_every=1)
    assert_only_numbers_are_sealed(RunFolder(tmp_path / "run"))
    assert RunFolder(tmp_path / "run").latest_checkpoint()[1]["step"] == 3


def test_a_learning_rate_far_too_high_is_one_clear_error(tmp_path):
    with pytest.raises(DivergedError, match=r"lower the learning rate \(1e\+38\), or use float32 instead of bfloat16"):
        trained(tmp_path / "run", learning_rate=1e38, warmup=0.0, save_every=1, dtype="bfloat16")
    assert_only_numbers_are_sealed(RunFolder(tmp_path / "run"))


def test_bfloat16_trains_almost_the_same_and_leaves_no_trace_in_the_next_run(plain, tmp_path):
    expected = losses(plain[0])
    half, model = trained(tmp_path / "half", dtype="bfloat16")
    assert losses(half) != expected
    assert losses(half) == pytest.approx(expected, abs=0.05)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses(trained(tmp_path / "single")[0]) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_float16_without_a_gpu_is_one_clear_error(tmp_path):
    with pytest.raises(TrainingError, match="float16 needs a GPU.*choose bfloat16"):
        trained(tmp_path / "run", dtype="float16")


def test_an_unknown_tracker_is_one_clear_error_that_lists_those_here(tmp_path):
    with pytest.raises(ModelError, match="'notebook_of_mine' is not installed, or no tracker.*here: none"):
        trained(tmp_path / "run", report_to="notebook_of_mine")


def test_without_accelerate_the_error_holds_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModelError, match=r'pip install "labkit-bidirectional\[train\]"'):
        trained(tmp_path / "run")


def test_two_whole_checkpoints_are_kept_and_each_file_is_under_its_seal(plain):
    _, model, folder = plain
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["checkpoint-11", "checkpoint-12"]
    for name in kept:
        seal = read_json(folder / "checkpoints" / name / SEAL)
        assert set(seal["files"]) | {SEAL} == set(contents(folder / "checkpoints" / name))
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= set(
            seal["files"]
        )


class Killed(BaseException):
    pass


def broken_off(folder, step: int, **settings):
    """A run that ends in the midst of `step`."""

    def breaks_off(model, batch, calls=[0]):  # noqa: B006 (one run, one list)
        calls[0] += 1
        if calls[0] == step:
            raise Killed
        return next_token_loss(model, batch)

    with pytest.raises(Killed):
        trained(folder, loss=breaks_off, **settings)


@pytest.mark.parametrize("settings", [{}, {"log_every": 3, "save_every": 4, "evaluate_every": 2}])
def test_a_run_that_broke_off_twice_ends_as_if_it_had_not(tmp_path, settings):
    settings = {"evaluate": draws_and_scores, "save_every": 2} | settings
    expected, model = trained(tmp_path / "whole", **settings)
    broken_off(tmp_path / "run", 7, **settings)
    broken_off(tmp_path / "run", 4, **settings)  # of the resumed run's own steps
    said = []
    outcome, twin = trained(tmp_path / "run", say=said.append, **settings)
    assert said[0].startswith("resuming from step ") and "resuming from step 0 " not in said[0]
    assert outcome["history"] == expected["history"]
    assert same_weights(twin, model)
    tokens = 12 * 4 * CONTEXT
    assert outcome["tokens_per_second"] * outcome["seconds"] == pytest.approx(tokens)


def test_a_run_that_broke_off_after_its_last_checkpoint_takes_no_further_step(plain, tmp_path):
    expected, model, folder = plain
    shutil.copytree(folder, tmp_path / "run")

    def not_again(model, batch):
        pytest.fail("a step was taken")

    outcome, twin = trained(tmp_path / "run", loss=not_again)
    assert outcome["history"] == expected["history"]
    assert same_weights(twin, model)


def test_an_altered_checkpoint_is_not_resumed_from_and_nothing_is_touched(plain, tmp_path):
    shutil.copytree(plain[2], tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "checkpoint-12" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    before = contents(tmp_path)
    with pytest.raises(TrainingError, match="optimizer.pt is not what was saved"):
        trained(tmp_path / "run")
    assert contents(tmp_path) == before


def test_a_run_begun_on_two_processes_is_not_continued_on_one(plain, tmp_path):
    shutil.copytree(plain[2], tmp_path / "run")
    seal = tmp_path / "run" / "checkpoints" / "checkpoint-12" / SEAL
    seal.write_text(json.dumps(read_json(seal) | {"processes": 2}))
    before = contents(tmp_path)
    with pytest.raises(TrainingError, match="begun on 2 processes, now it is 1"):
        trained(tmp_path / "run")
    assert contents(tmp_path) == before


def test_a_run_begun_in_other_numbers_is_not_continued(plain, tmp_path):
    shutil.copytree(plain[2], tmp_path / "run")
    assert RunFolder(tmp_path / "run").begun_in == "float32" and RunFolder(tmp_path / "none").begun_in is None
    before = contents(tmp_path)
    with pytest.raises(TrainingError, match="begun in float32, now it is bfloat16"):
        trained(tmp_path / "run", dtype="bfloat16")
    assert contents(tmp_path) == before


def test_what_accelerate_was_configured_with_does_not_change_the_numbers_of_a_run(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` sets it
    outcome, model = trained(tmp_path / "run")
    assert losses(outcome) == losses(plain[0]) and same_weights(model, plain[1])


def test_off_a_terminal_there_are_lines_and_no_bar(tmp_path, capfd):
    trained(
        tmp_path / "run", evaluate=draws_and_scores, evaluate_every=6, say=lambda text: print(text, file=sys.stderr)
    )
    out, err = capfd.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("step 6 of 12: loss ") and ", val_loss " in first
    assert second.startswith("step 12 of 12: loss ")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_on_a_terminal_a_bar_shows_steps_loss_and_speed_and_is_closed(tmp_path, monkeypatch, ends):
    monkeypatch.setattr(sys, "stderr", Terminal())
    if ends == "well":
        trained(tmp_path / "run")
        last = sys.stderr.getvalue().rstrip("\n").split("\r")[-1]
        assert "12/12" in last and "loss " in last and "tokens/s" in last
    else:
        with pytest.raises(TrainingError):
            trained(tmp_path / "run", loss=NotANumberAt(3))
    assert sys.stderr.getvalue().endswith("\n")  # what is printed next begins on a line of its own


def test_train_says_nothing_of_transformers_own(tmp_path, capfd, recwarn):
    trained(tmp_path / "run", save_every=1)
    broken_off(tmp_path / "again", 6, save_every=2)
    trained(tmp_path / "again", save_every=2)
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_an_error_of_training_is_one_of_labkit():
    assert issubclass(TrainingError, LabkitError) and issubclass(ModelError, LabkitError)


_RUN = """
    import json, os, signal, sys
    from pathlib import Path
    from tests.test_training import losses, next_token_loss, trained

    folder, batch_size, killed_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_token_loss(model, batch)

    outcome, _ = trained(folder, dropout=0.0, batch_size=batch_size, loss=loss, save_every=3)
    if os.environ.get("RANK", "0") == "0":
        tokens = outcome["tokens_per_second"] * outcome["seconds"]
        print(json.dumps({"losses": losses(outcome), "tokens": round(tokens)}))
"""


def run_script(tmp_path, processes: int, *arguments: object, fails: bool = False) -> dict | None:
    """What _RUN printed, on so many processes under torchrun."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(_RUN))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode != 0) is fails, done.stderr
    if fails:
        return None
    assert "find_unused_parameters" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL, and torchrun with gloo, are for POSIX systems")
def test_two_processes_train_as_one_with_twice_the_batch_even_when_killed_and_resumed(tmp_path):
    one = run_script(tmp_path, 1, tmp_path / "one", 8, 0)
    two = run_script(tmp_path, 2, tmp_path / "two", 4, 0)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["tokens"] == one["tokens"] == 12 * 8 * CONTEXT
    run_script(tmp_path, 2, tmp_path / "killed", 4, 8, fails=True)
    assert RunFolder(tmp_path / "killed").latest_checkpoint()[1]["step"] == 6
    assert run_script(tmp_path, 2, tmp_path / "killed", 4, 0) == two


@pytest.mark.parametrize(
    ("capability", "family", "dtype", "tf32"),
    [
        (None, "gpt2", "float32", False),
        ((9, 0), "gpt2", "bfloat16", True),
        ((7, 5), "gpt2", "float16", False),
        ((7, 5), "gemma3_text", "float32", False),
    ],
)
def test_what_to_compute_with_is_chosen_for_the_model_and_the_gpu(monkeypatch, capability, family, dtype, tf32):
    monkeypatch.setattr(training_settings.precision, "here", lambda: capability)
    model, said = fresh_model(), []
    model.config = SimpleNamespace(model_type=family)
    found = settled(Settings(max_steps=1, dtype="auto"), model, said.append)
    assert (found.dtype, found.tf32) == (dtype, tf32)
    assert len(said) == (capability is not None) and all(text.startswith(f"computing in {dtype}: ") for text in said)
    asked = Settings(max_steps=1, dtype="bfloat16", tf32=True)
    assert settled(asked, model, said.append) is asked


@pytest.mark.parametrize(
    ("begun", "capability", "dtype", "tf32", "said"),
    [
        ("float16", (8, 9), "float16", False, "computing in float16, as this run was begun; on this machine a new one"),
        ("bfloat16", (8, 0), "bfloat16", True, "computing in bfloat16: a GPU of compute capability 8.0"),
        ("bfloat16", (7, 5), "bfloat16", False, "computing in bfloat16, as this run was begun"),
        ("float32", (8, 0), "float32", False, "computing in float32, as this run was begun"),
        ("float32", None, "float32", False, None),
    ],
)
def test_a_run_goes_on_in_the_numbers_it_was_begun_in(monkeypatch, begun, capability, dtype, tf32, said):
    monkeypatch.setattr(training_settings.precision, "here", lambda: capability)
    model, lines = fresh_model(), []
    model.config = SimpleNamespace(model_type="gpt2")
    found = settled(Settings(max_steps=1, dtype="auto"), model, lines.append, begun=begun)
    assert (found.dtype, found.tf32) == (dtype, tf32)
    assert [line.startswith(said or "nothing") for line in lines] == [True] * (said is not None)


def test_a_run_begun_in_float16_does_not_go_on_without_a_gpu(monkeypatch):
    monkeypatch.setattr(training_settings.precision, "here", lambda: None)
    with pytest.raises(TrainingError, match="begun in float16, which needs a GPU, and there is none"):
        settled(Settings(max_steps=1, dtype="auto"), fresh_model(), print, begun="float16")


def test_numbers_in_which_a_family_overflows_are_refused(monkeypatch):
    monkeypatch.setattr(training_settings.precision, "here", lambda: (7, 5))
    model = fresh_model()
    model.config = SimpleNamespace(model_type="gemma2")
    with pytest.raises(TrainingError, match="gemma2 overflows in float16"):
        settled(Settings(max_steps=1, dtype="float16"), model, print)
