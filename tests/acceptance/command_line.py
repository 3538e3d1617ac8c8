"""The `labkit` command in a process of its own, for the acceptance tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(*arguments: object, launcher: tuple[str, ...] = (), log: Path) -> subprocess.Popen:
    """Start `python -m labkit` with these arguments; `log` receives its standard error."""
    paths = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-m", "labkit", *map(str, arguments)]
    with log.open("w") as stderr:
        return subprocess.Popen(command, env=os.environ | paths, stdout=subprocess.DEVNULL, stderr=stderr)


def run(*arguments: object, launcher: tuple[str, ...] = (), log: Path) -> None:
    """The same, and wait until the command has succeeded."""
    assert start(*arguments, launcher=launcher, log=log).wait(timeout=240) == 0, log.read_text()[-3000:]


def losses(folder: Path) -> dict[int, float]:
    """{step: loss} of a run folder, with a loss for every step."""
    history = read(folder / "trainer_state.json")["log_history"]
    curve = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    assert sorted(curve) == list(range(1, len(curve) + 1))
    return curve


def read(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
