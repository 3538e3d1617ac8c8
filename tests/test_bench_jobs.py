"""Runs side by side: what each process is given, what comes back, and what is left when one of them dies."""

import os
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch

from labkit.bench import arms
from labkit.bench.jobs import side_by_side
from labkit.errors import DataError, TrainingError

both = pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.end_to_end)])


@both
def test_every_item_comes_back_with_its_result_or_its_error(jobs):
    ended = {each.item: each for each in side_by_side(arms.arm, ["causal", "sideways", "repeated"], jobs)}
    assert ended["causal"].result == arms.arm("causal") and ended["repeated"].result.readings == 2
    assert isinstance(ended["sideways"].error, DataError) and ended["sideways"].result is None
    assert "the arm is 'sideways'" in str(ended["sideways"].error)
    assert ended["causal"].error is None and ended["causal"].seconds >= 0


def test_one_job_is_done_here_and_in_order():
    assert [each.result for each in side_by_side(lambda item: (item, os.getpid()), "cab")] == [
        (item, os.getpid()) for item in "cab"
    ]


def test_less_than_one_job_is_refused():
    with pytest.raises(DataError, match="there are to be 0 jobs at a time; give at least 1"):
        list(side_by_side(str, "ab", 0))


@both
def test_an_error_that_is_not_labkits_stops_the_study(jobs):
    with pytest.raises(ValueError, match="invalid literal"):
        list(side_by_side(int, ["1", "one", "2"], jobs))


class _Model:
    """Something large that a run holds."""


def test_a_run_that_failed_holds_nothing_while_the_next_one_works():
    held = []

    def work(item):
        if item == "last":
            return [each() for each in held]
        model = _Model()
        held.append(weakref.ref(model))
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            if item == "told":
                raise TrainingError("the memory is full") from error
            raise

    ended = list(side_by_side(work, ["told", "bare", "last"]))
    assert [type(each.error) for each in ended] == [TrainingError, TrainingError, type(None)]
    assert str(ended[1].error).startswith("the memory is full (CUDA out of memory); --resume")
    assert ended[2].result == [None, None]


@pytest.mark.end_to_end
def test_processes_take_the_gpus_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    found = [each.result for each in side_by_side(_gpu_after_a_while, [0.5] * 8, 2)]
    assert set(found) == {"4", "6"}


def _gpu_after_a_while(seconds):
    time.sleep(seconds)  # so that the other process has begun
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.end_to_end
def test_a_process_that_is_killed_is_an_error_that_says_what_to_do():
    with pytest.raises(TrainingError, match="one of 2 processes was killed.* go on with fewer at a time"):
        list(side_by_side(os._exit, [1, 1, 1], 2))


@pytest.mark.end_to_end
@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell a process that its parent has gone")
def test_no_process_outlives_a_study_that_is_killed(tmp_path):
    script = tmp_path / "study.py"
    script.write_text(
        "import time\nfrom labkit.bench.jobs import side_by_side\n"
        "if __name__ == '__main__':\n    list(side_by_side(time.sleep, [0.0, 0.0, 600.0, 600.0], 2))\n"
    )
    study = subprocess.Popen([sys.executable, str(script)])
    try:
        children = _until(lambda: found if len(found := _children(study.pid)) >= 2 else None)
        time.sleep(8)  # the processes have begun to sleep
    finally:
        study.send_signal(signal.SIGKILL)
        study.wait()
    assert _until(lambda: not any(_is_alive(each) for each in children))


def _children(pid: int) -> list[int]:
    """The processes that it has started, but for the one that only tracks shared memory."""
    found = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if "spawn_main" in line]


def _is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def _until(found, seconds=60):
    for _ in range(seconds * 10):
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError(f"nothing after {seconds} s")
