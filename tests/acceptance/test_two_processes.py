"""Two processes have the loss curve of one process with the same global batch, under torchrun and accelerate."""

from __future__ import annotations

import pytest

from labkit.tasks.finetune import numbers
from tests.acceptance.command_line import TORCHRUN, call, losses, read, start

pytest.importorskip("resource", reason="several processes with gloo are for POSIX systems")
pytestmark = pytest.mark.end_to_end

# with --cpu accelerate starts one process, whatever --num_processes says
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2")
# the rows have different numbers of labels
TRAIN = "train ner --preset mini --dropout 0 --max-train 16 --max-eval 6 --max-length 96 --max-steps 4 --model".split()


@pytest.mark.parametrize("launcher", [TORCHRUN, pytest.param(ACCELERATE, marks=pytest.mark.slow)])
def test_two_processes_have_the_loss_curve_and_scores_of_one_with_the_same_global_batch(
    without_dropout, tmp_path, launcher
):
    call(*TRAIN, without_dropout, "--batch-size", 4, "--output-dir", tmp_path / "one")
    command = [*TRAIN, without_dropout, "--batch-size", 2, "--output-dir", tmp_path / "two"]
    process = start(*command, launcher=launcher, log=tmp_path / "log")
    assert process.wait(timeout=240) == 0, (tmp_path / "log").read_text()[-3000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    one, two = (numbers(read(tmp_path / name / "metrics.json")["dev"]) for name in ("one", "two"))
    assert two == pytest.approx(one, abs=0.02, nan_ok=True)
