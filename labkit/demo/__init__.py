"""`labkit demo`: the mask playground and the attention explorer as a small web app, for a lecture without notebooks.

Voila runs a notebook of one cell and shows what comes out, never the code. Each visitor has a kernel, and a model, of
their own.
Everything the page needs comes from this machine.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError
from labkit.notebooks import DISTRIBUTION

PORT = 8866
MODEL = "gpt2-mini"
VARIABLE = "LABKIT_DEMO_MODEL"  # how the kernels hear of the model
HERE = Path(__file__).parent
# what of JupyterLab the page needs; others on this machine may ask for parts that only JupyterLab has
EXTENSIONS = ["anywidget", "@jupyter-widgets/jupyterlab-manager", "@voila-dashboards/widgets-manager8"]
IDLE = 1200  # seconds after which the kernel of a page that somebody has left without closing it is ended


def serve(
    model: str = MODEL,
    port: int | None = None,
    host: str = "127.0.0.1",
    open_browser: bool = True,
    check: bool = False,
) -> str:
    """Serve the app until Ctrl-C; returns the address at which it was served.

    Args:
        model: a registered name, a hub id or a folder; loaded once beforehand, so that visitors wait for no download.
        port: None for 8866, or the next free one; a port that was asked for is taken, or refused.
        host: 127.0.0.1 is this machine only; 0.0.0.0 every machine that can reach it.
        check: fetch the page once, as a visitor would, and end.

    Raises:
        LabkitError: Voila is not installed, the port is taken, the model cannot be loaded, or the check failed.
    """
    Server = _server()
    _require_loads(model)  # first: a port that is free now may be taken by the time the model is there
    chosen = _free_port(host, port)
    with tempfile.TemporaryDirectory(prefix="labkit-demo-") as scratch:
        _announce_to_jupyter(Path(scratch), model)
        server = Server(host, chosen, open_browser and not check, check)
        server.initialize([str(_notebook_in(Path(scratch)))])
        server.start()  # until Ctrl-C, SIGTERM, or the end of the check
    if server.fault:
        raise LabkitError(server.fault)
    return server.address


def _server() -> type:
    """Voila with the settings of the demo. A function, so that importing this module does not ask for Voila."""
    try:
        from voila.app import Voila
    except ImportError as error:
        raise LabkitError(f"labkit demo needs voila. Install it with: pip install '{DISTRIBUTION}[viz]'") from error
    from tornado.ioloop import IOLoop
    from traitlets.config import Config

    class Server(Voila):
        def __init__(self, host: str, port: int, open_browser: bool, check: bool) -> None:
            settings = Config()
            settings.VoilaConfiguration.template = "labkit"
            settings.VoilaConfiguration.extension_allowlist = EXTENSIONS
            settings.MappingKernelManager.cull_idle_timeout = IDLE
            settings.MappingKernelManager.cull_interval = 60
            settings.KernelManager.shutdown_wait_time = 1.0  # nothing is lost with a kernel that is busy at the end
            # of the default of Jupyter, tornado complains on every connection
            settings.Voila.tornado_settings = {"ws_ping_timeout": 30_000}
            # config files of this machine or of the folder that labkit was started in have no say
            quiet = {"log_level": "ERROR", "config_file_paths": []}
            super().__init__(config=settings, **quiet)
            self.ip, self.port, self.port_retries, self.open_browser = host, port, 0, open_browser
            self.check, self.fault = check, ""

        @property
        def address(self) -> str:
            return f"http://{'127.0.0.1' if self.ip in ('', '0.0.0.0') else self.ip}:{self.port}/"

        def listen(self) -> None:
            IOLoop.current().add_callback(self.begun)  # once the loop runs, the port is open
            super().listen()

        async def begun(self) -> None:
            if not self.check:
                print(f"labkit demo: {self.address}  (Ctrl-C ends it)", file=sys.stderr, flush=True)
                return
            loop = IOLoop.current()
            self.fault = await loop.run_in_executor(None, _fault_of_page, self.address)
            loop.stop()

    return Server


def _fault_of_page(address: str) -> str:
    """What is wrong with the page that is served at `address`; nothing if it is in order. Waits for the kernel."""
    from urllib.request import ProxyHandler, build_opener

    try:
        with build_opener(ProxyHandler({})).open(address, timeout=300) as answer:  # no proxy between us and ourselves
            page = answer.read().decode()
    except OSError as error:
        return f"the page could not be fetched from {address}: {error}"
    outputs = [json.loads(part.partition("</script>")[0]) for part in page.split(OUTPUT)[1:]]
    for output in outputs:
        if output["output_type"] == "error":
            return f"the app failed: {output['ename']}: {output['evalue']}"
    if not any(WIDGET in output.get("data", {}) for output in outputs):
        return "the page came without its widgets"
    return ""


OUTPUT = '<script type="application/vnd.voila.cell-output+json">'
WIDGET = "application/vnd.jupyter.widget-view+json"


def _free_port(host: str, asked: int | None) -> int:
    """The port that was asked for, or the first free one from 8866 on; LabkitError says why there is none."""
    for port in [asked] if asked is not None else range(PORT, PORT + 20):
        try:
            with socket.create_server((host, port)):
                pass
        except OSError as error:
            cause = error.strerror or error
            continue
        if asked is None and port != PORT:
            print(f"labkit demo: port {PORT} is taken, {port} is used instead", file=sys.stderr, flush=True)
        return port
    which = f"port {asked}" if asked is not None else f"any port from {PORT} to {PORT + 19}"
    raise LabkitError(f"{which} of {host} cannot be used: {cause}; choose another with --port")


def _require_loads(model: str) -> None:
    """Load the model and let it go: what is wrong with it is said here, and not to each visitor."""
    from labkit.models import load

    if load(model).tokenizer is None:
        raise LabkitError(f"{model} has no tokenizer, and the demo reads sentences; choose another --model")


def _notebook_in(folder: Path) -> Path:
    """The notebook that each visitor's kernel runs; written for the occasion, as it holds nothing but a call."""
    import nbformat

    cells = [nbformat.v4.new_markdown_cell("# Who may look at whom?")]
    cells.append(nbformat.v4.new_code_cell("from labkit.demo.app import app\n\napp()"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "title": "labkit demo"}
    path = folder / "app.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


def _announce_to_jupyter(folder: Path, model: str) -> None:
    """Let Jupyter find our template, and this very Python as its kernel; let the kernels know the model."""
    from ipykernel.kernelspec import write_kernel_spec

    write_kernel_spec(str(folder / "kernels" / "python3"), extra_arguments=["--log-level=ERROR"])
    paths: list[Any] = [folder, HERE / "share", *filter(None, [os.environ.get("JUPYTER_PATH")])]
    os.environ["JUPYTER_PATH"] = os.pathsep.join(map(str, paths))
    place = Path(model).expanduser()
    os.environ[VARIABLE] = str(place.resolve()) if place.is_dir() else model  # the kernels run in a folder of their own
