"""Which cells of the tour have run: a hook on the running kernel, set by the setup cell of each notebook."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from labkit.learner import record

_seen: set[tuple[str, str]] = set()
_watched: Any = None  # the shell that has the hook


def watch() -> None:
    """Keep which cells run to their end, if this is a Jupyter kernel and anything is kept. Safe to call again."""
    global _watched
    shell = _kernel_shell()
    if shell is None or shell is _watched or record.place() is None:
        return
    shell.events.register("post_run_cell", _ran)
    _watched = shell


def in_a_kernel() -> bool:
    """Whether a person may be at work here: a Jupyter kernel that no grader has started."""
    return _kernel_shell() is not None and "NBGRADER_EXECUTION" not in os.environ


def _kernel_shell() -> Any:
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def _ran(result: Any) -> None:
    if not result.success:
        return
    found = cell_of(result.info.raw_cell, getattr(result.info, "cell_id", None), _open_notebook())
    if found is not None and found not in _seen and record.try_to_change(lambda kept: kept.ran(*found)) is None:
        _seen.add(found)


def cell_of(source: str, cell: str | None, notebook: str | None) -> tuple[str, str] | None:
    """(notebook, cell id) of a cell of the tour, by what the front end says of it or else by its source."""
    if notebook is not None and cell in code_cells().get(notebook, ()):
        return notebook, str(cell)
    return _by_source().get(source.strip())


def _open_notebook() -> str | None:
    """The notebook of this kernel, where the front end says so: Jupyter and VS Code do."""
    named = os.environ.get("JPY_SESSION_NAME") or getattr(_kernel_shell(), "user_ns", {}).get("__vsc_ipynb_file__")
    return Path(named).stem if named else None


@cache
def code_cells() -> dict[str, dict[str, str]]:
    """Notebook of the tour -> id -> source of its code cells, without the setup cell and those that nobody runs."""
    from labkit.notebooks import SKIP_TAG, is_setup_cell, list_notebooks

    found: dict[str, dict[str, str]] = {}
    for path in list_notebooks():
        cells = found.setdefault(path.stem, {})
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            skipped = is_setup_cell(source) or SKIP_TAG in cell["metadata"].get("tags", [])
            if cell["cell_type"] == "code" and source.strip() and not skipped:
                cells[cell["id"]] = source
    return found


@cache
def _by_source() -> dict[str, tuple[str, str]]:
    """Cells whose source stands nowhere else in the tour."""
    places = [(source.strip(), (name, cell)) for name, cells in code_cells().items() for cell, source in cells.items()]
    count = Counter(source for source, _ in places)
    return {source: at for source, at in places if count[source] == 1}
