"""What the browser tests share: one Chromium per file, pages that reach no other machine, pictures kept on request.

They need Chromium (scripts/install_debian_packages.sh) and skip without it; with LABKIT_BROWSER=required, as in `make
test-browser`, that is a failure. With LABKIT_SCREENSHOTS=FOLDER the pictures of the pages are kept there.
"""

import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlparse

import pytest

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, driven by Playwright."""
    give_up = pytest.fail if os.environ.get("LABKIT_BROWSER") == "required" else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        give_up("playwright is not installed: pip install playwright")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        give_up("no Chromium on this machine: scripts/install_debian_packages.sh")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """`open_page(width=1000, height=900, theme="light")`: an empty page that can reach this machine and no other.

    What it asks other machines for is in `page.outside`; uncaught exceptions and errors in the console
    in `page.failures`. Both must be empty when the test ends: a test that expects some empties the list itself.
    `page.shoot(name)` keeps a picture as NAME.png if LABKIT_SCREENSHOTS names a folder.
    """
    pages = []

    def open_page(width=1000, height=900, theme="light"):
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        page.outside, page.failures = [], []

        def only_this_machine(route):
            if urlparse(route.request.url).hostname in ("127.0.0.1", "localhost"):
                return route.continue_()
            page.outside.append(route.request.url)
            return route.abort()

        def shoot(name, full_page=True):
            if folder := os.environ.get("LABKIT_SCREENSHOTS"):
                Path(folder).mkdir(parents=True, exist_ok=True)
                page.screenshot(path=Path(folder) / f"{name}.png", full_page=full_page)

        def remember(message):
            if message.type == "error":
                page.failures.append(f"{page.url}: {message.text}")

        page.route(re.compile("^https?://"), only_this_machine)
        page.on("pageerror", lambda error: page.failures.append(error.stack or str(error)))
        page.on("console", remember)
        page.shoot = shoot
        pages.append(page)
        return page

    yield open_page
    faults = [fault for page in pages for fault in (*page.outside, *page.failures)]
    for page in pages:
        page.close()
    assert faults == []


@pytest.fixture
def page(open_page):
    return open_page()
