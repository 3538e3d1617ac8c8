"""Start JupyterLab without a browser, ask it for one notebook as a browser would, and stop it.

    python scripts/check_jupyterlab.py notebooks/00_start_here.ipynb

Exits 1 with the server's log if the page, the notebook or the Python kernel is not there within a minute.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

LIMIT = 60  # seconds


def main(notebook: str) -> int:
    if not Path(notebook).is_file():
        print(f"labkit: there is no {notebook}")
        return 1
    with tempfile.TemporaryFile() as log:
        port, token = free_port(), secrets.token_hex(16)
        options = [
            f"--port={port}",
            "--no-browser",
            "--ServerApp.ip=127.0.0.1",
            "--ServerApp.port_retries=0",
            "--allow-root",
        ]
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JUPYTER_TOKEN": token},  # not on the command line, where every user could read it
        )
        try:
            problem = ask(server, f"http://127.0.0.1:{port}", token, notebook)
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        if problem:
            log.seek(0)
            print(log.read().decode(errors="replace"))
            print(f"labkit: JupyterLab does not work here: {problem}")
            return 1
    print(f"labkit: JupyterLab serves {notebook}")
    return 0


def ask(server: subprocess.Popen, base: str, token: str, notebook: str) -> str:
    """What is wrong, or an empty string."""
    quoted = urllib.parse.quote(Path(notebook).as_posix())
    if not answers(server, f"{base}/api/status", token):
        return f"no answer within {LIMIT} s"
    try:
        if b"jupyter-config-data" not in get(f"{base}/lab/tree/{quoted}", token):
            return "the page of the notebook is not JupyterLab's"
        if json.loads(get(f"{base}/api/contents/{quoted}?content=0", token))["type"] != "notebook":
            return f"{notebook} is not served as a notebook"
        if "python3" not in json.loads(get(f"{base}/api/kernelspecs", token))["kernelspecs"]:
            return "it offers no Python kernel"
    except urllib.error.HTTPError as error:
        return f"{error.url} answers {error.code}"
    return ""


def answers(server: subprocess.Popen, url: str, token: str) -> bool:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and server.poll() is None:
        try:
            get(url, token)
            return True
        except OSError:  # not listening yet
            time.sleep(0.3)
    return False


def get(url: str, token: str) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"})
    no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with no_proxy.open(request, timeout=30) as answer:
        return answer.read()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
