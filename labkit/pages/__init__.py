"""Notebooks as pages: one HTML file each, for people who only read. It opens from disk and needs no network.

What was executed is shown as it is in the file. Plotly figures stay interactive, and so do labkit's widgets that need
no kernel; every other widget is shown as the picture that it left beside itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import notebooks
from labkit.errors import LabkitError, NotebookError
from labkit.writing import write_whole

if TYPE_CHECKING:
    from nbformat import NotebookNode

__all__ = ["ExportedPage", "export"]


@dataclass(frozen=True)
class ExportedPage:
    """One notebook that became a page."""

    notebook: Path
    path: Path  # the page
    bytes: int
    figures: int  # plotly figures, interactive
    widgets: int  # widgets, of which ...
    live: int  # ... so many answer without a kernel; the others are pictures, or a sentence
    problems: list[str]  # what could not be shown as in the notebook, one sentence each


def export(
    paths: Iterable[str | Path],
    output_dir: str | Path = ".",
    execute: bool = False,
    timeout: int | float = 600,
    profile: str | None = None,
) -> list[ExportedPage]:
    """Write each notebook as NAME.html into `output_dir`; a page that is there already is replaced.

    `paths`: notebook files, folders, or names such as "00_start_here". `execute`: run them first (`timeout` seconds per
    cell, `profile` as LABKIT_PROFILE), without touching the files; else the outputs in the files are shown. Links
    between the notebooks of one call lead to their pages. A page is written whole or not at all, and nothing is
    written if one of the notebooks cannot be used.

    Raises:
        NotebookError: no such notebook, not a notebook, never executed, two of one name, or a cell that fails.
        LabkitError: the packages for pages are not installed, or a page cannot be written.
    """
    nbformat = _require("nbformat")
    found = [file for path in paths for file in notebooks.find_notebooks(path)]
    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise LabkitError(f"{folder} is a file; give a folder for the pages (on the command line: --output-dir)")
    _refuse_namesakes(found)
    before = {file: _read(nbformat, file) for file in found}
    if not execute:
        _refuse_never_executed(before)
    with tempfile.TemporaryDirectory(prefix="labkit-pages-") as scratch:
        if execute:
            runs = notebooks.run(found, output_dir=scratch, timeout=timeout, profile=profile)
            before = {run.path: _read(nbformat, run.output) for run in runs}
    return _write_all(before, folder)


def _write_all(contents: dict[Path, NotebookNode], folder: Path) -> list[ExportedPage]:
    from tqdm import tqdm

    _require("nbconvert")
    _require("latex2mathml")
    from labkit.pages.page import render

    pages = {file.name: file.stem + ".html" for file in contents}
    written = []
    # None: a bar on terminals only, as everywhere in labkit
    for file, content in tqdm(contents.items(), desc="pages", unit="page", disable=None, leave=False):
        page, path = render(content, file, pages), folder / pages[file.name]
        try:
            write_whole(path, page.html)
        except OSError as error:
            raise LabkitError(f"{path} could not be written: {error.strerror or error}") from error
        counts = (path.stat().st_size, page.figures, page.widgets, page.live)
        written.append(ExportedPage(file, path, *counts, page.problems))
    return written


def _refuse_namesakes(files: Sequence[Path]) -> None:
    if not files:
        raise NotebookError("There is no notebook to export.")
    first: dict[str, Path] = {}
    for file in files:
        if (other := first.setdefault(file.stem, file)) is not file:
            raise NotebookError(f"{other} and {file} would both become {file.stem}.html; export them separately.")


def _refuse_never_executed(contents: dict[Path, NotebookNode]) -> None:
    for file, content in contents.items():
        code = [cell for cell in content.cells if cell.cell_type == "code" and cell.source.strip()]
        if code and not any(cell.outputs or cell.execution_count for cell in code):
            raise NotebookError(
                f"{file} has no outputs: it was never executed, or they were cleared. Run it first, or export it with "
                "execute=True (on the command line: --execute)."
            )


def _read(nbformat, path: Path) -> NotebookNode:
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises its own, json's and traitlets' errors
        raise NotebookError(f"{path} cannot be read as a notebook: {error}") from error


def _require(module: str):
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise LabkitError(
            f"Pages of notebooks need {module}. Install it with: pip install '{notebooks.DISTRIBUTION}[viz]'"
        ) from error
