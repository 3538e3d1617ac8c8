"""Runs of a study side by side, each in a process of its own; they share the cores, and take the GPUs in turn.

for ended in side_by_side(train, runs, jobs=4):
    print(ended.item, ended.result or ended.error, ended.seconds)
"""

from __future__ import annotations

import errno
import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from labkit.bench.machine import cores
from labkit.errors import DataError, LabkitError, TrainingError

VISIBLE, THREADS, SHARE = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LABKIT_SHARE_OF_GPU"
GPU_FOR_TENSORS = 0.95  # of a GPU's memory that processes divide among them; CUDA itself takes some for each
WATCHED_EVERY = 1.0  # seconds: how soon a process notices that the study's own is gone


class Ended(NamedTuple):
    """What came of one item: the result, or the error that labkit raised; and the seconds that it took."""

    item: Any
    result: Any
    error: LabkitError | None
    seconds: float


def side_by_side(work: Callable[[Any], Any], items: Sequence[Any], jobs: int = 1) -> Iterator[Ended]:
    """`work(item)` for every item, up to `jobs` of them at a time; yields them as they end.

    One job is done here, in order. More are processes that start anew, so `work` and the items must pickle. Each gets
    its share of the cores, unless OMP_NUM_THREADS says how many, and one of the GPUs that CUDA_VISIBLE_DEVICES names,
    or that there are. They end with this process, however that ends.

    Raises:
        DataError: less than one job.
        TrainingError: one of the processes was killed, as happens when the memory is short.
    """
    if jobs < 1:
        raise DataError(f"there are to be {jobs} jobs at a time; give at least 1")
    if jobs == 1 or len(items) < 2:
        for item in items:
            yield Ended(item, *_timed(work, item))
        return
    jobs = min(jobs, len(items))
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA, nor torch's threads
    gpus, turns = _gpus(), context.SimpleQueue()
    for number in range(jobs):
        turns.put(number)
    threads = max(1, cores() // jobs)
    sharing = math.ceil(jobs / len(gpus)) if gpus else 0
    pool = ProcessPoolExecutor(jobs, context, _begin, (turns, threads, gpus, sharing, os.getpid()))
    try:
        of = {pool.submit(_timed, work, item): item for item in items}
        for future in as_completed(of):
            yield Ended(of[future], *future.result())
        pool.shutdown()  # they end by themselves and clean up behind them
    except BrokenProcessPool as error:
        raise TrainingError(
            f"one of {jobs} processes was killed, perhaps for want of memory; go on with fewer at a time"
        ) from error
    finally:
        _stop(pool)


def _timed(work: Callable[[Any], Any], item: Any) -> tuple[Any, LabkitError | None, float]:
    _free()  # a Trainer refers to itself: what the last run held goes only with this
    began = time.perf_counter()
    try:
        _take_share()
        result, error = work(item), None
    except LabkitError as raised:
        result, error = None, _freed(raised)
    except OSError as raised:
        if raised.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
            raise
        result, error = None, TrainingError(f"the disk is full ({_freed(raised)}); make room, then --resume")
    except (RuntimeError, MemoryError) as raised:
        from labkit.memory import is_out_of_memory

        if not is_out_of_memory(raised):
            raise
        why = str(_freed(raised)).partition("\n")[0] or "MemoryError"
        told = f"the memory is full ({why}); --resume tries it again, with fewer at a time"
        result, error = None, TrainingError(told)
    return result, error, time.perf_counter() - began


def _take_share() -> None:
    """Of a GPU that others use, too; or each of them would see room that the others have not taken yet."""
    if share := os.environ.get(SHARE):
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(float(share))


def _freed(error: Any) -> Any:
    """The error without the frames that it was raised through, which hold the model of the run that failed."""
    error.__cause__ = error.__context__ = error.__traceback__ = None
    _free()
    return error


def _free() -> None:
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _gpus() -> list[str]:
    """The GPUs to hand out, as CUDA_VISIBLE_DEVICES names them."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return [each.strip() for each in given.split(",") if each.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _begin(turns: Any, threads: int, gpus: Sequence[str], sharing: int, parent: int) -> None:
    """What a process does first: takes its GPU, which at most `sharing` have together, and its share of the cores.

    It leaves Ctrl-C to the study's own process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)
    number = turns.get()
    if gpus:
        os.environ[VISIBLE] = gpus[number % len(gpus)]
    if sharing > 1:
        os.environ[SHARE] = str(GPU_FOR_TENSORS / sharing)
    if THREADS not in os.environ:
        import torch

        torch.set_num_threads(threads)


def end_with(parent: int) -> None:
    """From now on this process ends when `parent`, by its number, has ended, also if that was killed."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCHED_EVERY)
    os._exit(1)


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the processes now, whatever they are at: a run that is cut short is gone on with by --resume."""
    running = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in running:
        process.terminate()
    for process in running:
        process.join()
