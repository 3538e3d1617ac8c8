"""The notebooks that come with labkit: set one up, list them, copy them out, execute them without a browser.

Every notebook begins with the setup cell, and with no other boilerplate: `FIRST_CELL`, or `first_cell(requirement)`
where scripts/notebook_heads.py is told to let Colab get labkit from elsewhere.
"""

from __future__ import annotations

import filecmp
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import __version__, resources
from labkit.errors import LabkitError, NotebookError
from labkit.files import require_writable, write_files, write_whole
from labkit.profile import VARIABLE, by_name, current, in_colab

if TYPE_CHECKING:
    from nbformat import NotebookNode

# In Colab this cell installs the lab, and holds torch and numpy at the versions that Colab brought: pip stops with a
# clear message rather than replace them. The extra "colab" asks for nothing that Colab's own kernel is built on.
_SETUP_CELL = """\
import sys
from importlib import metadata, util

if "google.colab" in sys.modules and util.find_spec("labkit") is None:
    keep = " ".join(f"{name}=={metadata.version(name)}" for name in ("torch", "numpy"))
    %pip install -q "REQUIREMENT" {keep}

import labkit.colab

labkit.colab.setup()"""
_OWN_WHEEL = """\
    wheel = max(Path().glob("labkit_bidirectional-*.whl"), default=None)
    assert wheel, "Upload labkit's wheel (the folder button on the left), then run this cell again."
"""
_IS_SETUP_CELL = re.compile(r"^import labkit\.(colab|notebooks)\n+labkit\.\1\.setup\(.*\)\Z", re.M)


def first_cell(requirement: str | None = None) -> str:
    """The setup cell; Colab's pip gets labkit as `requirement`, or, if None, from a wheel that the reader uploads."""
    if requirement is not None:
        return _SETUP_CELL.replace("REQUIREMENT", requirement)
    cell = _SETUP_CELL.replace("REQUIREMENT", "{wheel}[colab]")
    cell = cell.replace("metadata, util\n", "metadata, util\nfrom pathlib import Path\n", 1)
    return cell.replace("    keep =", f"{_OWN_WHEEL}    keep =", 1)


def is_setup_cell(source: str) -> bool:
    """Whether this is the setup cell of a notebook, of whatever source and of whatever age."""
    return _IS_SETUP_CELL.search(source.strip()) is not None


FIRST_CELL = first_cell()
DISTRIBUTION = "labkit-bidirectional"
SKIP_TAG = "nbval-skip"  # cells that the tests leave out, each with its reason in tests/notebooks/SKIPPED.md
_NOT_COPIED = {".ipynb_checkpoints", "__pycache__"}


@dataclass(frozen=True)
class NotebookRun:
    """One notebook that was executed to its end."""

    path: Path  # the notebook
    cells: int  # code cells executed
    seconds: float  # wall clock, kernel start included
    output: Path | None  # where the executed copy was written


def make_ready() -> str:
    """Make the running notebook ready. Returns "labkit <version>, profile <name>".

    Raises LabkitError where the environment is older than labkit allows, with the command that mends it.
    """
    _refuse_outdated_packages()
    active = current()
    if in_colab():
        from google.colab import output  # type: ignore[import-not-found]  # exists in Colab only

        output.enable_custom_widget_manager()
    _choose_plotly_renderer()
    return f"labkit {__version__}, profile {active.name}"


def list_notebooks() -> list[Path]:
    """The notebooks of the tour, in order (`NN_title.ipynb`)."""
    return sorted(resources.folder("notebooks").glob("[0-9][0-9]_*.ipynb"))


def title_of(path: Path) -> str:
    """The first heading of a notebook, or its file name."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    heading = re.search(r"^# (.+)$", prose, re.MULTILINE)
    return heading[1].strip() if heading else path.stem


def copy(dest: str | Path, force: bool = False) -> list[Path]:
    """Copy the notebooks, with what lies beside them, to the folder `dest`; returns the files written.

    Files that are there already and equal are left alone. A file that differs is somebody's work: without `force`
    nothing at all is written and NotebookError names it. With `force` it is replaced.
    """
    source, dest = resources.folder("notebooks"), Path(dest).expanduser()
    if dest.exists() and not dest.is_dir():
        raise NotebookError(f"{dest} is a file; give a folder to copy the notebooks to.")
    files = [f for f in sorted(source.rglob("*")) if f.is_file() and not _NOT_COPIED.intersection(f.parts)]
    if not files:
        raise NotebookError(f"{source} holds no notebooks: the installation is incomplete. Reinstall labkit.")
    targets = {f: dest / f.relative_to(source) for f in files}
    todo = {f: t for f, t in targets.items() if not (t.is_file() and filecmp.cmp(f, t, shallow=False))}
    blocked = [t for t in todo.values() if os.path.lexists(t) and not (force and t.is_file())]
    if blocked:
        names = ", ".join(str(t.relative_to(dest)) for t in blocked)
        raise NotebookError(
            f"Nothing was copied: {dest} already has {names}, different from labkit's. "
            "Choose another folder, move your work away, or replace it with force=True (on the command line: --force)."
        )
    write_files(dest, {target.relative_to(dest): source.read_bytes() for source, target in todo.items()})
    return list(todo.values())


def run(
    paths: Iterable[str | Path] | None = None,
    output_dir: str | Path | None = None,
    timeout: int | float = 600,
    profile: str | None = None,
) -> list[NotebookRun]:
    """Execute notebooks in order, without a browser, and stop at the first that fails.

    `paths`: notebook files, folders, or names such as "00_start_here"; None is the whole tour. `output_dir`: the
    executed copies are written there; None leaves no trace. `timeout`: seconds per cell. `profile`: LABKIT_PROFILE for
    the kernels.
    One line per notebook goes to stderr. Cells tagged "nbval-skip" are not executed. The kernel is this very Python.
    Raises NotebookError with notebook, cell and exception.
    """
    nbformat = _require("nbformat")
    environment = dict(os.environ)
    if profile is not None:
        environment[VARIABLE] = by_name(profile).name
    notebooks = list_notebooks() if paths is None else [f for p in paths for f in find_notebooks(p)]
    if not notebooks:
        raise NotebookError("There is no notebook to run.")
    outputs = [None if output_dir is None else Path(output_dir).expanduser() / path.name for path in notebooks]
    for output in filter(None, outputs):
        require_writable(output)
    finished = []
    for number, (path, output) in enumerate(zip(notebooks, outputs, strict=True), 1):
        print(f"[{number}/{len(notebooks)}] {path.name} ...", end=" ", file=sys.stderr, flush=True)
        began = time.perf_counter()
        try:
            notebook = _execute(path, timeout, environment)
        except NotebookError:
            print("failed", file=sys.stderr, flush=True)
            raise
        seconds = time.perf_counter() - began
        if output is not None:
            write_whole(output, nbformat.writes(notebook))
        cells = sum(_runs(cell) for cell in notebook.cells)
        print(f"{cells} cells, {seconds:.1f} s", file=sys.stderr, flush=True)
        finished.append(NotebookRun(path, cells, seconds, output))
    return finished


# ---- setup ---------------------------------------------------------------------------------------------------------


def _refuse_outdated_packages() -> None:
    """Colab comes with its own packages: an `import` that works says nothing about the version."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:  # a bare checkout on sys.path: whoever made it chose the versions
        return
    wrong = []
    for need in (n for n in needed if n.marker is None or n.marker.evaluate({"extra": ""})):
        try:
            found = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            found = "nothing"
        if found == "nothing" or not need.specifier.contains(found, prereleases=True):
            wrong.append((f"{need.name}{need.specifier}", f"{need.name}: found {found}, needed {need.specifier}"))
    if wrong:
        install = " ".join(f"'{spec}'" for spec, _ in wrong)
        raise LabkitError(
            f"{'; '.join(text for _, text in wrong)}. Run `%pip install {install}` in a cell, then restart the kernel."
        )


def _choose_plotly_renderer() -> None:
    """Figures as data for the front end: drawn offline in JupyterLab, Notebook 7 and VS Code, without a 5 MB script.

    PLOTLY_RENDERER wins where it is set (for a static HTML export: `plotly_mimetype+notebook`).
    """
    renderer = os.environ.setdefault("PLOTLY_RENDERER", "colab" if in_colab() else "plotly_mimetype")
    if "plotly.io" in sys.modules:  # imported before this call: it has read the variable already
        sys.modules["plotly.io"].renderers.default = renderer


# ---- run -----------------------------------------------------------------------------------------------------------


def find_notebooks(path: str | Path) -> list[Path]:
    """The notebooks that a file, a folder, or the name of one of labkit's own stands for; NotebookError if none."""
    given = Path(path)
    if given.is_dir():
        found = sorted(given.glob("*.ipynb"))
        if not found:
            raise NotebookError(f"{given} holds no notebook.")
        return found
    if given.is_file() and given.suffix == ".ipynb":
        return [given]
    named = [n for n in list_notebooks() if str(path) in (n.name, n.stem)]
    if named:
        return named
    known = ", ".join(n.stem for n in list_notebooks()) or "none"
    raise NotebookError(f"{path} is neither a notebook file, nor a folder, nor one of labkit's notebooks ({known}).")


def _execute(path: Path, timeout: int | float, environment: dict[str, str]) -> NotebookNode:
    nbclient, nbformat = _require("nbclient"), _require("nbformat")
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises its own, json's and traitlets' errors
        raise NotebookError(f"{path.name} cannot be read as a notebook: {error}") from error
    at = {"cell": 0}
    with tempfile.TemporaryDirectory(prefix="labkit-kernel-") as kernels:
        client = nbclient.NotebookClient(
            notebook,
            km=_kernel_of_this_python(Path(kernels)),
            timeout=math.ceil(timeout),  # nbclient takes whole seconds only
            startup_timeout=120,
            coalesce_streams=True,  # printed lines in one piece, however they arrived
            record_timing=False,  # timestamps would change the file on every run
            skip_cells_with_tag=SKIP_TAG,
            resources={"metadata": {"path": str(path.resolve().parent)}},
            on_cell_start=lambda cell, cell_index: at.update(cell=cell_index + 1),
        )
        try:
            # nbclient leaves a kernel running whose manager it was handed, unless told otherwise
            return client.execute(env=environment, cleanup_kc=True)
        except nbclient.exceptions.CellExecutionError as error:
            cause = f"{error.ename}: {error.evalue}"
        except nbclient.exceptions.CellTimeoutError:
            cause = f"TimeoutError: no answer within {timeout:g} s"
        except nbclient.exceptions.DeadKernelError:
            cause = "DeadKernelError: the kernel died (often: out of memory)"
    source = notebook.cells[at["cell"] - 1].source.strip() if at["cell"] else ""
    first_line = next(iter(source.splitlines()), "")
    raise NotebookError(f"{path.name}, cell {at['cell']} (`{first_line}`): {cause}")


def _kernel_of_this_python(folder: Path):
    """A kernel manager for `sys.executable`: a "python3" kernel installed elsewhere on the machine cannot slip in."""
    _require("ipykernel")
    from ipykernel.kernelspec import write_kernel_spec
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager

    write_kernel_spec(str(folder / "labkit"), extra_arguments=["--log-level=ERROR"])
    specs = KernelSpecManager(kernel_dirs=[str(folder)], ensure_native_kernel=False)
    return AsyncKernelManager(kernel_name="labkit", kernel_spec_manager=specs)


def _runs(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and bool(cell.source.strip()) and SKIP_TAG not in cell.metadata.get("tags", [])


def _require(module: str):
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise LabkitError(
            f"Executing notebooks needs {module}. Install it with: pip install '{DISTRIBUTION}[viz]'"
        ) from error
