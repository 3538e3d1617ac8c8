"""A training run that SIGKILL or a full disk interrupts can be resumed, and ends like an uninterrupted run.

A run whose loss becomes NaN stops, and its last checkpoint is good.
"""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

import labkit
from tests.acceptance.command_line import call, losses, read, start

resource = pytest.importorskip("resource", reason="SIGKILL and limits on files are for POSIX systems")
pytestmark = pytest.mark.end_to_end

TRAIN = (
    "train ner --model gpt2-mini --max-train 24 --max-eval 12 --max-length 96 --max-steps 10 --batch-size 4 "
    "--evaluate-every 2 --keep 5 --patience 0 --learning-rate 3e-4 --dropout 0.1 --backbone-dropout 0.1"
).split()  # five checkpoints, which are all kept; with dropout, so that a resumed run needs the random state, too
FIRST = Path("checkpoints", "checkpoint-2", "model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread, as the started processes do: another order of summation changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, one_thread) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    call(*TRAIN, "--output-dir", folder)
    return folder


def wait_for_checkpoints(process: subprocess.Popen, folder: Path, count: int) -> None:
    """Return once checkpoint number `count` exists. It may be half written; those before it are whole."""
    while len(list((folder / "checkpoints").glob("checkpoint-*"))) < count:
        assert process.poll() is None, f"the run ended before checkpoint number {count}"
        time.sleep(0.001)


def assert_ended_alike(folder: Path, whole: Path) -> None:
    metrics, expected = read(folder / "metrics.json"), read(whole / "metrics.json")
    for name in ("dev", "test", "n_train", "seed"):
        assert metrics[name] == expected[name]
    assert losses(folder) == losses(whole)
    for file in ("model/model.safetensors", "checkpoints/checkpoint-10/model.safetensors"):  # the best, and the last
        weights, expected = load_file(folder / file), load_file(whole / file)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights), file


def resumed(folder: Path, written: int) -> None:
    """Resume the run; `written` is the time at which its first checkpoint was written, and it must not be again."""
    call(*TRAIN, "--output-dir", folder, "--resume")
    assert (folder / FIRST).stat().st_mtime_ns == written


def test_a_run_that_is_killed_resumes_and_ends_with_the_same_metrics_and_weights(whole, tmp_path):
    folder = tmp_path / "run"
    process = start(*TRAIN, "--output-dir", folder, log=tmp_path / "log")
    wait_for_checkpoints(process, folder, 3)  # the third is half written
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (folder / "metrics.json").exists()
    resumed(folder, (folder / FIRST).stat().st_mtime_ns)
    assert_ended_alike(folder, whole)


def assert_one_line(code: int, err: str, *words: str) -> None:
    """The exit code is 2, and the last line of standard error, and no other, is a message with these words."""
    lines = err.splitlines()
    assert code == 2 and [line for line in lines if line.startswith("labkit: ")] == lines[-1:], err[-3000:]
    assert "Traceback" not in err and all(word in lines[-1] for word in words), err[-3000:]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limiting another process is for Linux")
def test_a_full_disk_stops_a_run_with_one_line_and_the_run_resumes_when_there_is_room(whole, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start(*TRAIN, "--output-dir", folder, log=log)
    wait_for_checkpoints(process, folder, 3)
    _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1_000_000, most))  # no file grows beyond 1 MB from here on
    assert_one_line(process.wait(timeout=120), log.read_text(), "could not be written", "--resume")
    resumed(folder, (folder / FIRST).stat().st_mtime_ns)
    assert_ended_alike(folder, whole)


def test_a_loss_that_becomes_nan_stops_a_run_with_one_line_and_the_last_checkpoint_is_good(
    whole, labkit_command, tmp_path, monkeypatch
):
    """A weight becomes NaN after step 4. Resumed without that fault, the run ends like the uninterrupted one."""
    folder, step = tmp_path / "run", Trainer.training_step

    def poisoned(trainer, model, *rest):
        if trainer.state.global_step == 4:
            next(model.parameters()).data.fill_(float("nan"))
        return step(trainer, model, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "training_step", poisoned)
        code, _, err = labkit_command(*TRAIN, "--output-dir", folder)
    assert_one_line(code, err, "NaN", "learning rate")
    assert not (folder / "metrics.json").exists() and not (folder / "model").exists()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert all(p.isfinite().all() for p in labkit.load(folder / "checkpoints" / "checkpoint-4").model.parameters())
    resumed(folder, (folder / FIRST).stat().st_mtime_ns)
    assert_ended_alike(folder, whole)
