"""The `labkit` command for the acceptance tests, in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PATHS = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "OMP_NUM_THREADS": "1"}


def call(*arguments: object) -> None:
    """Run the command in this process; it must succeed."""
    from labkit import cli

    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        assert exit_.code == 0


def start(*arguments: object, launcher: tuple[str, ...] = (), log: Path) -> subprocess.Popen:
    """Start `python -m labkit` with these arguments; `log` receives its standard error."""
    command = [sys.executable, *launcher, "-m", "labkit", *map(str, arguments)]
    with log.open("w") as stderr:
        return subprocess.Popen(command, env=os.environ | PATHS, stdout=subprocess.DEVNULL, stderr=stderr)


def losses(folder: Path) -> dict[int, float]:
    """{step: loss} of a run folder, with a loss for every step."""
    history = read(folder / "trainer_state.json")["log_history"]
    curve = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    assert sorted(curve) == list(range(1, len(curve) + 1))
    return curve


def read(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows: list[dict]) -> Path:
    """Write a JSONL file, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
