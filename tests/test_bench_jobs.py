"""Runs side by side: what each process is given, what comes back, and what is left when one of them dies."""

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch

from labkit import memory
from labkit.bench import arms, jobs
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


def _on_a_full_disk(item):
    raise OSError(errno.ENOSPC if item == "full" else errno.EACCES, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_one_run_and_another_fault_of_it_the_study():
    first, second = side_by_side(_on_a_full_disk, ["full", "full"])
    assert "the disk is full" in str(first.error) and "--resume" in str(second.error)
    with pytest.raises(OSError):
        list(side_by_side(_on_a_full_disk, ["other"]))


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


def test_a_run_that_is_done_holds_nothing_either():
    held = []

    def work(item):
        if item == "last":
            return held[0]()
        model = _Model()
        model.itself = model  # as a Trainer has its callbacks, and they have it
        held.append(weakref.ref(model))
        return None

    gc.disable()
    try:
        ended = list(side_by_side(work, ["first", "last"]))
    finally:
        gc.enable()
    assert ended[1].result is None


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_full_gpu_is_known_by_whatever_library_says_it(error, is_one):
    assert memory.is_out_of_memory(error) is is_one
    runs = side_by_side(_raise, [error])
    if is_one:
        assert "the memory is full" in str(next(runs).error)
    else:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            next(runs)


def _raise(error):
    raise error


@pytest.mark.parametrize(("n_gpus", "n_jobs", "share"), [(1, 2, 0.475), (2, 3, 0.475), (2, 2, None)])
def test_processes_that_share_a_gpu_have_an_equal_part_of_its_memory(monkeypatch, n_gpus, n_jobs, share):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(jobs, "_gpus", lambda: [str(number) for number in range(n_gpus)])
    monkeypatch.setattr(jobs, "end_with", lambda parent: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(jobs.SHARE, "")

    def begins_here(n_jobs, context, begin, arguments):
        begin(*arguments)
        raise _Begun

    monkeypatch.setattr(jobs, "ProcessPoolExecutor", begins_here)
    with pytest.raises(_Begun):
        list(side_by_side(str, range(n_jobs), n_jobs))
    assert not taken  # within a run, where a full GPU ends that run alone
    assert jobs._timed(str, 1)[0] == "1" and taken == ([] if share is None else [share])


class _Begun(Exception):
    """What a process does first has been done."""


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
