"""What the browser tests start on this machine, and stop: JupyterLab and Jupyter Notebook."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60_000  # milliseconds, for anything that a loaded machine may take its time over
# What is run before the kernel is connected is lost, so ask the application itself.
KERNEL_READY = """() => { const s = window.jupyterapp?.shell?.currentWidget?.sessionContext;
  return s?.isReady && s.session?.kernel?.connectionStatus === 'connected' && s.session.kernel.status === 'idle' }"""


@dataclass(frozen=True)
class Jupyter:
    """A server that runs: what it is, the folder of its notebooks, and how it is reached."""

    app: str
    folder: Path
    address: str
    token: str

    def page_of(self, name: str) -> str:
        """The address of a notebook, with none of the tabs that were open before."""
        if self.app == "notebook":
            return f"{self.address}notebooks/{name}?token={self.token}"
        return f"{self.address}lab/tree/{name}?token={self.token}&reset"


@contextmanager
def jupyter(app: str, folder: Path) -> Iterator[Jupyter]:
    """JupyterLab ("lab") or Jupyter Notebook ("notebook") on `folder / "notebooks"`, with settings of its own.

    The notebooks there are trusted, as those of a checkout are by `make lab`.
    """
    (folder / "labconfig").mkdir()
    off = '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}'
    (folder / "labconfig" / "page_config.json").write_text(off)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    token, address = secrets.token_hex(16), f"http://127.0.0.1:{port}/"
    env = os.environ | {"PYTHONPATH": paths, "LABKIT_PROFILE": "ci", "JUPYTER_TOKEN": token}
    env |= {"JUPYTER_CONFIG_DIR": str(folder), "IPYTHONDIR": str(folder / "ipython")}
    env |= {"JUPYTER_DATA_DIR": str(folder / "data")}  # where the signatures of trusted notebooks are kept
    env |= {f"JUPYTERLAB_{name}_DIR": str(folder / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    trait = {"lab": "LabApp", "notebook": "JupyterNotebookApp"}[app]
    options = ["--no-browser", "--allow-root", f"--{trait}.expose_app_in_browser=True", f"--port={port}"]
    options += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0"]
    options += [f"--ServerApp.root_dir={folder / 'notebooks'}"]
    if app == "lab":
        options += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command, trusted = [sys.executable, "-m", "jupyter"], list((folder / "notebooks").glob("*.ipynb"))
    subprocess.run([*command, "trust", *trusted], env=env, check=True)
    log = folder / "server.log"
    with open(log, "w") as file:
        process = subprocess.Popen([*command, app, *options], stdout=file, stderr=subprocess.STDOUT, env=env)
    try:
        end = time.monotonic() + PATIENCE / 1000
        while address not in log.read_text():
            if time.monotonic() > end or process.poll() is not None:
                pytest.fail(f"{app} did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield Jupyter(app, folder / "notebooks", address, token)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_notebook(path: Path, *cells: str) -> None:
    """A notebook of code cells that have not been run."""
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    new = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=python)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new, path)


class Notebook:
    """A notebook that is open in a page of Jupyter, run cell by cell as a user would who presses Ctrl+Enter."""

    def __init__(self, page, server: Jupyter, name: str):
        self.page, self.address = page, server.page_of(name)
        page.set_default_timeout(PATIENCE)
        self.open()

    def open(self) -> None:
        self.page.goto(self.address, wait_until="load")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.wait_for_function(KERNEL_READY)
        self.page.failures.clear()  # what Jupyter complains of before any cell has been run is not ours

    def cell(self, index: int):
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(index)

    def run(self, index: int) -> str:
        """Click into a cell, run it by keyboard, wait for it to end; gives the text that it printed."""
        cell = self.cell(index)
        before = cell.locator(".jp-InputPrompt").inner_text()
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        self.page.wait_for_function(
            """([index, before]) => {
              const cell = document.querySelectorAll(".jp-Notebook .jp-CodeCell")[index];
              const now = cell.querySelector(".jp-InputPrompt").innerText;
              return now !== before && /\\[\\d+\\]/.test(now);
            }""",
            arg=[index, before],
        )
        printed = "\n".join(cell.locator(".jp-OutputArea-output").all_inner_texts())
        assert "Traceback (most recent call last)" not in printed, printed
        return printed

    def run_until(self, index: int, expected: str, seconds: float = 15) -> None:
        """Run a cell until it prints this: what is changed in a widget reaches Python a moment later."""
        end = time.monotonic() + seconds
        while (printed := self.run(index).strip()) != expected:
            assert time.monotonic() < end, f"{printed!r} instead of {expected!r}"

    def save(self) -> None:
        self.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
        self.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")

    def complaints(self) -> list[str]:
        """What the cells on show have written to standard error."""
        return self.page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
