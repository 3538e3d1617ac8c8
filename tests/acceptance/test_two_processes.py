"""Two processes under torchrun have the loss curve of one process with the same global batch."""

from __future__ import annotations

import pytest

from tests.acceptance.command_line import TORCHRUN, losses, run

pytest.importorskip("resource", reason="torchrun with gloo is for POSIX systems")
pytestmark = pytest.mark.end_to_end


@pytest.mark.parametrize("task", ["classify", "ner"])
def test_two_processes_have_the_loss_curve_of_one_with_the_same_global_batch(
    labkit_command, without_dropout, tmp_path, task
):
    train = ["train", task, "--model", without_dropout, "--dropout", 0, "--preset", "mini", "--max-train", 24]
    train += ["--max-eval", 6, "--max-length", 96, "--max-steps", 8]
    code, _, err = labkit_command(*train, "--batch-size", 4, "--output-dir", tmp_path / "one")
    assert code == 0, err
    run(*train, "--batch-size", 2, "--output-dir", tmp_path / "two", launcher=TORCHRUN, log=tmp_path / "log")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
