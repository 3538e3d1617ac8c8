"""The notebooks that come with labkit: list them, copy them out, execute them without a browser.

Every notebook begins with the setup cell, folded: `FIRST_CELL`, or `first_cell(requirement)` where `install-from` in
pyproject.toml is set (see scripts/notebook_heads.py).
"""

from __future__ import annotations

import filecmp
import math
import os
import re
import sys
import time
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path

from labkit import files
from labkit.errors import DataError, LabkitError, needs_extra
from labkit.profile import VARIABLE, by_name

DISTRIBUTION = "labkit-bidirectional"
STRAY = {".ipynb_checkpoints", "__pycache__"}
FOR_INSTRUCTORS = {"src", "checks", "solution", "nbgrader"}  # folders of the assignments
SKIP_TAG = "nbval-skip"  # cells that the tests leave out, each with its reason in tests/notebooks/SKIPPED.md

FIRST_CELL = """\
import importlib.util

if importlib.util.find_spec("labkit") is None:
    raise ModuleNotFoundError("Install labkit first; docs/colab.md says how.")
import labkit.colab

labkit.colab.setup()"""


def first_cell(requirement: str) -> str:
    """The setup cell that installs `requirement` where labkit is missing; pip keeps a torch and numpy that fit."""
    return re.sub("raise .*", f'%pip install -q "{requirement}"', FIRST_CELL)


def is_setup_cell(source: str) -> bool:
    """Whether this is the setup cell of a notebook, wherever it installs labkit from."""
    return "import labkit.colab\n" in source and source.strip().split("\n")[-1].startswith("labkit.colab.setup(")


# One notebook that was executed to its end: code cells, wall-clock seconds, and where the executed copy is, or None.
NotebookRun = namedtuple("NotebookRun", "path cells seconds output")


def list_notebooks() -> list[Path]:
    """The notebooks of the tour, in order (`NN_title.ipynb`)."""
    return sorted(files.folder("notebooks").glob("[0-9][0-9]_*.ipynb"))


def copy(dest: str | Path, force: bool = False) -> list[Path]:
    """Copy the lessons and the students' assignments to the folder `dest`; returns the files written.

    Files that exist already and are equal stay as they are. If any file differs, nothing is written and DataError names
    it; with `force` it is replaced.
    """
    source, dest = files.folder("notebooks"), Path(dest).expanduser()
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest} is a file; give a folder to copy the notebooks to.")
    left_out = STRAY | FOR_INSTRUCTORS
    files_there = [file for file in sorted(source.rglob("*")) if file.is_file()]
    originals = [file for file in files_there if not left_out.intersection(file.relative_to(source).parts)]
    targets = {file: dest / file.relative_to(source) for file in originals}
    changed = {f: t for f, t in targets.items() if not (t.is_file() and filecmp.cmp(f, t, shallow=False))}
    if blocked := [t for t in changed.values() if os.path.lexists(t) and not (force and t.is_file())]:
        names = ", ".join(str(target.relative_to(dest)) for target in blocked)
        raise DataError(f"Nothing was copied: {dest} has {names} already, different from labkit's; --force overwrites")
    for file, target in changed.items():
        files.write_whole(target, file.read_bytes())
    return list(changed.values())


def run(
    paths: Iterable[str | Path] | None = None,
    output_dir: str | Path | None = None,
    timeout: int | float = 600,
    profile: str | None = None,
) -> list[NotebookRun]:
    """Execute notebooks in order, without a browser, and stop at the first that fails.

    `paths`: notebook files, folders, or names such as "00_start_here"; None is the whole tour. `output_dir`: folder for
    the executed copies; None writes nothing. `timeout`: seconds per cell. `profile`: LABKIT_PROFILE for the kernels.
    One line per notebook goes to stderr. Cells tagged "nbval-skip" are not executed. The kernel is this Python.
    Raises DataError for a path without a notebook, and LabkitError with notebook, cell and exception if one fails.
    """
    environment = os.environ | ({} if profile is None else {VARIABLE: by_name(profile).name})
    notebooks = list_notebooks() if paths is None else [file for path in paths for file in _find(Path(path))]
    outputs = [output_dir and Path(output_dir).expanduser() / path.name for path in notebooks]
    for output in filter(None, outputs):
        files.require_writable(output)
    runs = []
    for path, output in zip(notebooks, outputs, strict=True):
        print(f"[{len(runs) + 1}/{len(notebooks)}] {path.name}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        text, cells = _execute(path, timeout, environment)
        runs.append(NotebookRun(path, cells, time.perf_counter() - began, output))
        if output:
            files.write_whole(output, text)
    return runs


def _find(path: Path) -> list[Path]:
    """The notebooks that a file, a folder, or the name of one of labkit's own stands for; DataError if none."""
    if path.is_file() and path.suffix == ".ipynb":
        return [path]
    tour = list_notebooks()
    matching = sorted(path.glob("*.ipynb")) if path.is_dir() else [n for n in tour if str(path) in (n.name, n.stem)]
    if not matching:
        names = ", ".join(notebook.stem for notebook in tour)
        raise DataError(f"{path} is neither a notebook, nor a folder with notebooks, nor one of labkit's ({names}).")
    return matching


def _execute(path: Path, timeout: int | float, environment: dict[str, str]) -> tuple[str, int]:
    """The text of the executed notebook, and how many code cells ran."""
    with needs_extra("lab"):
        import ipykernel  # noqa: F401  (the kernel)
        import nbclient
        import nbformat
        from jupyter_client import AsyncKernelManager
        from jupyter_client.kernelspec import KernelSpecManager
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises its own, json's and traitlets' errors
        raise DataError(f"{path.name} cannot be read as a notebook: {error}") from error
    notebook.metadata.pop("widgets", None)  # the widgets of an earlier run, which nbclient would keep
    ran = []
    specs = KernelSpecManager(kernel_dirs=[])  # the kernel of this Python, not a "python3" that is installed elsewhere
    client = nbclient.NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs),
        extra_arguments=["--log-level=ERROR"],
        timeout=math.ceil(timeout),  # nbclient takes whole seconds only
        startup_timeout=120,
        coalesce_streams=True,  # printed lines in one piece, however they arrived
        record_timing=False,  # timestamps would change the file on every run
        skip_cells_with_tag=SKIP_TAG,
        resources={"metadata": {"path": str(path.resolve().parent)}},
        on_cell_execute=lambda cell, cell_index: ran.append(cell_index),
    )
    try:
        client.execute(env=environment, cleanup_kc=True)  # without cleanup_kc the kernel of a given manager stays
        return nbformat.writes(notebook), len(ran)
    except nbclient.exceptions.CellExecutionError as error:
        cause = f"{error.ename}: {error.evalue}"
    except nbclient.exceptions.CellTimeoutError:
        cause = f"TimeoutError: no answer within {timeout:g} s"
    except nbclient.exceptions.DeadKernelError:
        cause = "DeadKernelError: the kernel died (often: out of memory)"
    source = notebook.cells[ran[-1]].source.strip() if ran else ""
    raise LabkitError(f"{path.name}, cell {ran[-1] + 1 if ran else 0} (`{source.partition(chr(10))[0]}`): {cause}")
