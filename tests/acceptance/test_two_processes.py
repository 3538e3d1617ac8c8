"""Two processes have the loss curve of one process with the same global batch, under torchrun and accelerate."""

from __future__ import annotations

import pytest

from labkit.tasks.finetune import numbers
from tests.acceptance.command_line import TORCHRUN, losses, read, run

pytest.importorskip("resource", reason="several processes with gloo are for POSIX systems")
pytestmark = pytest.mark.end_to_end

# with --cpu accelerate starts one process, whatever --num_processes says
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2")


@pytest.mark.parametrize(
    ("task", "launcher"),
    [("classify", TORCHRUN), ("ner", TORCHRUN), pytest.param("classify", ACCELERATE, marks=pytest.mark.slow)],
)
def test_two_processes_have_the_loss_curve_and_scores_of_one_with_the_same_global_batch(
    labkit_command, without_dropout, tmp_path, task, launcher
):
    train = ["train", task, "--model", without_dropout, "--dropout", 0, "--preset", "mini", "--max-train", 24]
    train += ["--max-eval", 6, "--max-length", 96, "--max-steps", 8]
    code, _, err = labkit_command(*train, "--batch-size", 4, "--output-dir", tmp_path / "one")
    assert code == 0, err
    run(*train, "--batch-size", 2, "--output-dir", tmp_path / "two", launcher=launcher, log=tmp_path / "log")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    one, two = (numbers(read(tmp_path / name / "metrics.json")["dev"]) for name in ("one", "two"))
    assert two == pytest.approx(one, abs=0.02, nan_ok=True)
