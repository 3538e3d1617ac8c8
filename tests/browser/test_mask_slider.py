"""The mask slider of notebook 01, moved by keyboard in real JupyterLab, in a real browser, with the network blocked.

Needs Chromium and `pip install playwright jupyterlab`. With LABKIT_SCREENSHOTS=FOLDER the pictures are kept.
"""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlparse

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "01_attention_and_masks.ipynb"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
# A Run All that is clicked before the kernel is connected is lost, so ask the application itself.
KERNEL_READY = """() => { const s = window.jupyterapp?.shell?.currentWidget?.sessionContext;
  return s?.isReady && s.session?.kernel?.connectionStatus === 'connected' && s.session.kernel.status === 'idle' }"""
PATIENCE = 120_000  # milliseconds


@pytest.fixture(scope="module")
def chromium() -> str:
    pytest.importorskip("playwright", reason="playwright is not installed: scripts/install_browser.sh")
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed: pip install jupyterlab")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: scripts/install_browser.sh")
    return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on a copy of the notebook, with settings folders of its own; yields the address of the notebook."""
    folder = tmp_path_factory.mktemp("lab")
    for name in ("notebooks", "labconfig"):
        (folder / name).mkdir()
    shutil.copy(NOTEBOOK, folder / "notebooks")
    (folder / "labconfig" / "page_config.json").write_text(
        '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}'
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    settings = {"JUPYTER_CONFIG_DIR": str(folder), "IPYTHONDIR": str(folder / "ipython")}
    settings |= {f"JUPYTERLAB_{name}_DIR": str(folder / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    options = [
        "--no-browser",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--allow-root",
        f"--ServerApp.root_dir={folder / 'notebooks'}",
    ]
    options += ["--ServerApp.port_retries=0", "--LabApp.expose_app_in_browser=True"]
    options += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with open(folder / "server.log", "w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | settings | {"PYTHONPATH": paths, "JUPYTER_TOKEN": token, "LABKIT_PROFILE": "ci"},
        )
        try:
            _wait_until_it_answers(f"http://127.0.0.1:{port}/api/status?token={token}", server, folder / "server.log")
            yield f"http://127.0.0.1:{port}/lab/tree/{NOTEBOOK.name}?token={token}"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@pytest.fixture
def page(chromium, lab):
    """The notebook, opened. Requests to anywhere but this machine are refused and remembered in `page.outside`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=QUIET)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.outside, page.failures = [], []

        def only_this_machine(route):
            if urlparse(route.request.url).hostname == "127.0.0.1":
                return route.continue_()
            page.outside.append(route.request.url)
            return route.abort()

        page.route(re.compile("^https?://"), only_this_machine)
        page.on("pageerror", lambda error: page.failures.append(str(error)))
        page.goto(lab, wait_until="load", timeout=PATIENCE)
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=PATIENCE)
        page.wait_for_function(KERNEL_READY, timeout=PATIENCE)
        yield page
        browser.close()


def test_arrow_keys_on_the_slider_redraw_the_mask(page):
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
    widget = page.locator(".widget-vbox").first
    _bring_into_view(page, widget)
    picture = widget.locator("svg[role=img]")
    handle = widget.locator(".noUi-handle")

    assert picture.get_attribute("aria-label").startswith("sliding_window(3): 6 queries and 6 keys, 15 of 36 cells")
    _screenshot(page, "slider_before")
    handle.focus()
    handle.press("ArrowRight")
    handle.press("ArrowRight")
    widget.locator("svg[aria-label^='sliding_window(5): 6 queries and 6 keys, 20 of 36']").wait_for(timeout=10_000)
    assert _squares(picture) == {"#0072B2": 20, "#E6E6E6": 16}
    assert "itself and the 4 tokens before it" in widget.inner_text()

    widget.locator("select").select_option("hybrid")
    widget.locator("svg[aria-label^='hybrid(5): 6 queries and 6 keys, 21 of 36']").wait_for(timeout=10_000)
    handle.focus()
    for _ in range(3):
        handle.press("ArrowLeft")
    widget.locator("svg[aria-label^='hybrid(2): 6 queries and 6 keys, 27 of 36']").wait_for(timeout=10_000)
    assert _squares(picture) == {"#0072B2": 27, "#E6E6E6": 9}
    _screenshot(page, "slider_after")

    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert page.outside == []
    assert page.failures == []


def _squares(picture) -> dict[str, int]:
    """How many cells are drawn in which colour."""
    counts = "svg => [...svg.querySelectorAll('g[fill]')].map(g => [g.getAttribute('fill'), g.children.length])"
    return dict(picture.evaluate(counts))


def _bring_into_view(page, widget) -> None:
    """JupyterLab draws a cell only once it is near the screen: scroll down until the last cells are there."""
    for _ in range(60):
        if widget.locator("svg[role=img]").count() and widget.locator(".noUi-handle").count():
            break
        page.locator(".jp-WindowedPanel-outer").first.evaluate("panel => panel.scrollBy(0, 1500)")
        page.wait_for_timeout(500)
    widget.locator(".noUi-handle").scroll_into_view_if_needed(timeout=PATIENCE)


def _screenshot(page, name: str) -> None:
    if folder := os.environ.get("LABKIT_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def _wait_until_it_answers(url: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + PATIENCE / 1000
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")
