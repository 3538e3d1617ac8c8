"""Run what is missing of a study: one folder for each run, and a folder that has metrics.json is done.

    folder = begun("runs/fx", settings, growing=("arms", "seeds"))
    failures = run_all(runs, train, folder, score=lambda run, metrics: f"{metrics['f1']:.3f}")

The same command again continues a study that was stopped, and may add arms and seeds. Several processes, on
one GPU or on several, may work in one folder: each takes the runs that no other process is at.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock, Timeout

from benchmarks.study import report
from labkit.errors import LabkitError, TrainingError, is_out_of_memory
from labkit.files import write_whole
from labkit.run_folder import Log, read_json, to_stderr

WAIT = 2.0  # seconds until the runs of other processes are tried again, if there was nothing else to do


def run_all(
    runs: Sequence[Any],
    train: Callable[[Any], dict[str, Any]],
    folder: Path,
    *,
    score: Callable[[Any, dict[str, Any]], str],
    until: float = math.inf,
    log: Log = to_stderr,
) -> dict[str, str]:
    """Call `train(run)` for every run that is not done. Returns {run: reason} of the runs that failed.

    A run has a `folder`, relative to that of the study, and `str(run)` is its name in the log.
    A run that raises a LabkitError, or runs out of memory, has failed, and the others go on. `train` writes
    metrics.json; `score` gives the result of a run for the log. A run that raises filelock.Timeout needs something that
    another process is making; it is tried again later. `until`: on the clock of time.perf_counter; a run that would end
    later, if it took as long as the longest so far, is left out.
    """
    todo = [run for run in runs if not is_done(run, folder)]
    total, number, began = len(todo), 0, time.perf_counter()
    failures: dict[str, str] = {}
    longest = 0.0  # seconds of training
    log(f"{len(runs):,} runs, {len(runs) - total:,} of them done")
    while todo:
        held = []
        for run in todo:
            if time.perf_counter() + longest > until:
                log(f"left out: {run}")
                continue
            try:
                with alone(run.folder, folder, timeout=0):
                    outcome = "done by another process"
                    if not is_done(run, folder):
                        metrics = _tried(train, run, failures)
                        outcome = f"failed: {failures[str(run)]}" if metrics is None else score(run, metrics)
                        longest = max(longest, (metrics or {}).get("seconds", 0.0))
            except Timeout:
                held.append(run)
                continue
            number += 1
            left = (time.perf_counter() - began) / number * (total - number)
            log(f"{number} of {total}: {run}: {outcome} (about {left / 60:.0f} min left)")
        if len(held) == len(todo):
            time.sleep(WAIT)
        todo = held
    return failures


def is_done(run: Any, folder: Path) -> bool:
    return (folder / run.folder / "metrics.json").exists()


def alone(part: Path, folder: Path, timeout: float = -1) -> FileLock:
    """The lock of a part of the study, for `with`. It is not in the folder of the run, which must begin empty."""
    locks = folder / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"{part.as_posix().replace('/', '+')[-200:]}.lock", timeout=timeout)


def begun(folder: str | Path, settings: dict[str, Any], growing: Sequence[str]) -> Path:
    """The folder of the study with these settings, which study.json keeps. Lists and dicts in `growing` may get longer.

    Raises:
        TrainingError: the folder contains something else, or a study with other settings. Nothing is written then.
    """
    path = Path(folder).expanduser().absolute()
    now = json.loads(json.dumps(settings))
    if not (path / "study.json").exists() and path.exists() and any(path.iterdir()):
        raise TrainingError(f"{path} is not empty and contains no study; give --output-dir a new folder")
    with alone(Path("study"), path):
        if before := read_json(path / "study.json"):
            for key in growing:
                if isinstance(now[key], dict):
                    now |= {f"{key} {name}": value for name, value in now[key].items()}
                    before |= {f"{key} {name}": value for name, value in before[key].items()}
                    now[key] = before[key] | now[key]
                else:
                    now[key] = before[key] + [value for value in now[key] if value not in before[key]]
            settled = [key for key in now if key not in growing and key in before]
            if changed := [key for key in settled if before[key] != now[key]]:
                differences = "; ".join(f"{key} was {before[key]!r}, now {now[key]!r}" for key in changed)
                raise TrainingError(f"{path} contains a study with other settings: {differences}")
        write_json(path / "study.json", {key: now[key] for key in settings})
    return path


def read_study(folder: str | Path) -> dict[str, Any]:
    """The settings of the study in `folder`. Raises TrainingError if there is none."""
    settings = read_json(Path(folder).expanduser() / "study.json")
    if settings is None:
        raise TrainingError(f"{folder} contains no study")
    return settings


def slug(name: str) -> str:
    """A name as one folder: mntp-200 of mntp:200, xquad--question-last of xquad/question-last."""
    return re.sub(r"[^\w.=-]", "-", name.replace("/", "--"))


def write_json(path: Path, value: Any) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=1) + "\n")


def option(default: Any, text: str, kind: Callable[[str], Any] | None = None, **settings: Any) -> Any:
    """A field of a Study that is also an option of its program, with `text` as its help.

    `kind` makes the value of what is typed; by default it is the type of the default. `settings` are those of argparse;
    `name` is that of the option, where it is not that of the field.
    """
    settings |= {} if "action" in settings else {"type": kind or type(default)}
    return field(default=default, metadata={"help": text} | settings)


def given(options: argparse.Namespace, study: type) -> dict[str, Any]:
    """The fields of the study that were given as options."""
    return {field.name: getattr(options, field.name) for field in fields(study) if hasattr(options, field.name)}


def parser(description: str, reference: str, study: type) -> argparse.ArgumentParser:
    """A parser with the options of every study and those that the fields of this one declare."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", required=True, help="folder of the study")
    parser.add_argument("--reference", default=reference, help="the arm that the table compares the others with")
    within = "seconds: begin no run that would end later (default: no limit)"
    parser.add_argument("--within", type=float, default=math.inf, help=within)
    parser.add_argument("--report-only", action="store_true", help="compare what is finished; run nothing")
    for one in [one for one in fields(study) if one.metadata]:
        settings = {"name": f"--{one.name.replace('_', '-')}"} | one.metadata
        if one.default not in (None, (), (None,), False):
            default = ",".join(map(str, one.default)) if isinstance(one.default, tuple) else one.default
            settings["help"] += f" (default: {default})"
        parser.add_argument(settings.pop("name"), dest=one.name, default=argparse.SUPPRESS, **settings)
    return parser


def main(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], dict[str, str]],
    tables: Callable[[argparse.Namespace], pd.DataFrame],
    **units: Any,
) -> None:
    """Parse the command line, run and report a study, exit: 0 done, 1 a run failed, 2 invalid input."""
    options = parser.parse_args()
    options.until = time.perf_counter() + options.within
    try:
        failures = {} if options.report_only else run(options)
        folder = Path(options.output_dir).expanduser()
        report.write(tables(options), folder, reference=options.reference, **units)
        sys.exit(1 if failures else 0)
    except LabkitError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(2)


def listed(kind: Callable[[str], Any] = str) -> Callable[[str], tuple[Any, ...]]:
    """An argparse type: 1,2,3 as (1, 2, 3)."""
    return lambda text: tuple(kind(part.strip()) for part in text.split(",") if part.strip())


def _tried(train: Callable[[Any], dict[str, Any]], run: Any, failures: dict[str, str]) -> dict[str, Any] | None:
    gc.collect()  # a Trainer refers to itself: what the last run held is freed only here
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        return train(run)
    except LabkitError as error:
        failures[str(run)] = str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failures[str(run)] = f"out of memory ({str(error).partition(chr(10))[0]})"
    return None
