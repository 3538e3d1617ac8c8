"""d3 and jQuery for the views of a notebook: brought once into each page, without a network.

The first view that a kernel shows carries both libraries (336 KB), later views find them in the page; a view that comes
before them in the document waits for them. Which cell carries them is remembered: run again, or after that cell was
deleted, the next view carries them, so that a saved notebook holds them once and still draws when it is opened again.
In Colab every output is a page of its own, and so is a view shown outside a notebook: there each carries its own.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

FOLDER = Path(str(files("labkit"))) / "_browser"  # filled by scripts/fetch_browser_libraries.py, packed into the wheel
NAMES = ("d3.min.js", "jquery.min.js")
CURE = (
    "d3 and jQuery were not fetched when labkit was set up (is npm, of Node.js, installed?). Run `python "
    "scripts/fetch_browser_libraries.py` in the checkout, or install labkit again with npm at hand"
)


def are_installed() -> bool:
    return all((FOLDER / name).is_file() for name in NAMES)


def script() -> str:
    """The script element that brings both into a page, unless they are there, and lets the waiting views draw.

    Neither becomes a global of the page: other scripts that use a `d3`, a `$` or a module loader keep their own.
    """
    d3, jquery = ((FOLDER / name).read_text(encoding="utf-8") for name in NAMES)
    return element(_BRING.replace("/*D3*/", d3).replace("/*JQUERY*/", jquery))


def element(javascript: str) -> str:
    """A script element with this JavaScript; nothing in its strings can end the element early."""
    safe = re.sub(r"<(?=!--|/script)", lambda _: "\\x3c", javascript, flags=re.IGNORECASE)
    return f"<script>\n{safe}\n</script>"


def literal(value: Any) -> str:
    """`value` as JavaScript."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


_BRING = """(() => {
  const shared = (window.labkitBrowser = window.labkitBrowser || { waiting: [], count: 0 });
  if (!shared.d3) {
    const d3 = {}, jquery = { exports: {} };
    (function (exports, module, define) {
/*D3*/
    }).call(window, d3, {}, undefined);
    (function (exports, module, define) {
/*JQUERY*/
    }).call(window, jquery.exports, jquery, undefined);
    shared.jquery = jquery.exports;
    shared.d3 = d3;
  }
  shared.waiting.splice(0).forEach((show) => show());
})();"""


# ---------------------------------------------------------------------------------------- who carries the libraries
class Carrier:
    """Remembers which cell of the notebook behind this kernel has brought the libraries."""

    def __init__(self) -> None:
        self._cell: str | None = None  # "" if the front end does not name its cells, None if no cell has brought them
        self._shell: Any = None

    def must_bring(self, always: bool = False) -> bool:
        """Whether the output that is shown now has to bring the libraries; it is then taken to do so."""
        shell = _shell()
        if shell is None or "google.colab" in sys.modules:
            return True
        if self._shell is not shell:
            shell.events.register("pre_run_cell", self._before_cell)
            self._shell = shell
        if self._cell is not None and not always:
            return False
        self._cell = _request(shell).get("cellId", "")
        return True

    def _before_cell(self, info: Any = None) -> None:
        """Running the carrying cell again replaces its output; a deleted one has none."""
        request = _request(self._shell)
        if self._cell and self._cell in (request.get("cellId"), *request.get("deletedCells", ())):
            self._cell = None


CARRIER = Carrier()


def _shell() -> Any:
    """The IPython shell of a kernel, or None outside a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if hasattr(shell, "get_parent") else None


def _request(shell: Any) -> dict:
    """The front end's data on the cell that runs: JupyterLab names it, and the cells deleted since the last run."""
    return (shell.get_parent() or {}).get("metadata") or {}
