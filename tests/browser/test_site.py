"""The site of scripts/build_site.py, built once and read in a real browser that reaches this machine and no other."""

import functools
import http.server
import importlib.util
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("myst_nb", reason="the packages of the extra site are missing: make setup")
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "scripts" / "build_site.py"
TOUR = [path.stem for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))]
# Faults for readers who cannot see the page, or read it on a phone.
FAULTS = """() => {
  const faults = [];
  const levels = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map((heading) => Number(heading.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1 || levels[0] !== 1) faults.push(`no single h1: ${levels}`);
  levels.forEach((level, i) => {
    if (i && level > levels[i - 1] + 1) faults.push(`h${level} follows h${levels[i - 1]}`);
  });
  for (const image of document.images) if (!image.alt.trim()) faults.push(`no alt: ${image.src.slice(0, 80)}`);
  const named = ["img", "figure", "group", "grid"].map((role) => `[role=${role}][aria-label]`) + ", [aria-hidden=true]";
  for (const svg of document.querySelectorAll("article svg"))
    if (!svg.closest(named) && !svg.querySelector("title")) faults.push(`no words: ${svg.outerHTML.slice(0, 120)}`);
  for (const field of document.querySelectorAll("input:not([type=hidden]), select, button"))
    if (!field.ariaLabel && !field.labels?.length && !field.textContent.trim() && !field.title)
      faults.push(`no name: ${field.outerHTML.slice(0, 120)}`);
  const ids = [...document.querySelectorAll("article [id]:not([data-labkit-view] *)")].map((part) => part.id);
  const twice = ids.filter((id, i) => ids.indexOf(id) !== i);
  if (twice.length) faults.push(`ids used twice: ${twice.slice(0, 5)}`);
  if (!document.documentElement.lang || !document.title) faults.push("no language or no title");
  const { scrollWidth, clientWidth } = document.documentElement;
  if (scrollWidth > clientWidth) faults.push(`${scrollWidth} wide in a window of ${clientWidth}`);
  return faults;
}"""
DRAWN = """() => !document.querySelector("[data-widget]:not([data-drawn])") &&
  [...document.querySelectorAll("figure.plotly")].every((figure) => figure.querySelector(".main-svg"))"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The site as files."""
    folder = tmp_path_factory.mktemp("built") / "site"
    run = subprocess.run([sys.executable, BUILD, "--output-dir", folder], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-5000:]
    assert [path.name for path in folder.parent.iterdir()] == ["site"]  # nothing else is left behind
    return folder


@pytest.fixture(scope="session")
def site(folder):
    """The address at which this machine serves the site."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_every_page_opens_on_a_phone_without_error_or_request_and_says_its_pictures(open_page, folder, site):
    page = open_page(width=390, height=844)
    pages = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html"))
    assert len(pages) > len(TOUR) + 20
    faults = {}
    for name in pages:
        page.goto(site + name)
        page.wait_for_function(DRAWN)
        faults[name] = page.evaluate(FAULTS)
        page.shoot(f"site_{name.replace('/', '_')}")
    # the theme's page gets its heading with the first search
    assert {name: lines for name, lines in faults.items() if lines} == {"search.html": ["no single h1: "]}


def test_pages_share_files_forbid_other_hosts_and_hold_the_notebooks(folder):
    """Pages are small because they share plotly.js, and no page names a path of the machine that built it."""
    from plotly.offline import get_plotlyjs_version

    (library,) = folder.rglob("plotly*.js")
    assert f"v{get_plotlyjs_version()}" in library.read_text(encoding="utf-8")[:200]
    html = {path.name: _html(path) for path in folder.rglob("*.html")}
    assert max(map(len, html.values())) < 1_500_000
    assert not [name for name, text in html.items() if "default-src 'self'" not in text or str(ROOT) in text]
    for stem in TOUR:  # as they were executed
        html = _html(folder / "notebooks" / f"{stem}.html")
        cells = json.loads(_html(ROOT / "notebooks" / f"{stem}.ipynb"))["cells"]
        assert html.count('class="highlight-ipython3') == sum(cell["cell_type"] == "code" for cell in cells)
        assert f"/{stem}.ipynb" in html  # the notebook itself, to download


@pytest.mark.parametrize("how", ["served", "from disk"])
def test_playground_is_painted_and_composed_without_a_kernel(open_page, folder, site, how):
    page = open_page(width=1280)
    page.goto(f"{site}playground.html" if how == "served" else (folder / "playground.html").as_uri())
    page.get_by_text("24 of 36 cells are open").wait_for()
    page.get_by_role("grid").click()
    page.get_by_role("button", name="Clear 1 painted").wait_for()
    page.get_by_role("combobox", name="mask A").select_option("bidirectional")
    page.get_by_text("masks.bidirectional()", exact=True).wait_for()


def test_widgets_and_figures_of_notebooks_answer(open_page, site):
    page = open_page(width=1280)
    page.goto(f"{site}notebooks/15_paraphrase_fusion.html")
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    page.locator(".js-plotly-plot .nsewdrag").first.hover(force=True)
    page.locator(".hoverlayer .hovertext").first.wait_for(timeout=10_000)
    page.goto(f"{site}notebooks/08_attention_maps.html")
    explorer = page.locator(".labkit-explorer")
    explorer.get_by_role("slider", name="head").press("Home")
    explorer.get_by_text(re.compile(r"layer \d+ head 0, causal")).first.wait_for()


def test_search_finds_prose_and_code_names(open_page, site):
    page = open_page(width=1280)
    page.goto(site)
    field = page.get_by_role("textbox", name="Search")
    for word, expected in (("packing-leak", "engineers"), ("sliding_window", "masks")):
        field.fill(word)
        field.press("Enter")
        page.locator(f"#search-results li a[href*='{expected}.html']").first.wait_for()
        field = page.get_by_role("textbox", name="Search").first
    page.shoot("site_search")


def test_words_of_the_glossary_show_their_entry_once_a_page(open_page, site):
    page = open_page(width=390, height=844)
    page.goto(f"{site}notebooks/00_start_here.html")
    word, card = page.get_by_role("link", name="causal", exact=True).first, page.locator("#card-term-causal")
    assert page.locator("a[href$='#term-causal']").count() == 1 and not card.is_visible()
    word.focus()
    assert card.is_visible() and card.inner_text().startswith("Causal. A token may attend to itself")
    where = card.bounding_box()
    assert where["x"] >= 0 and where["x"] + where["width"] <= 390 and where["y"] + where["height"] <= 844
    word.press("Enter")
    page.wait_for_url("**/docs/glossary.html#term-causal")
    assert page.locator("#term-causal").first.is_visible()
    assert page.locator(".labkit-card").count() == 0  # the glossary needs no cards


def test_the_keyboard_opens_the_contents_on_a_phone_and_scrolls_code(open_page, site):
    page = open_page(width=390, height=844)
    page.goto(f"{site}notebooks/00_start_here.html")
    link = page.locator(".sidebar-tree").get_by_role("link", name="01 · Attention and masks")
    assert not link.is_visible()
    page.get_by_role("checkbox", name="navigation").focus()
    page.keyboard.press("Space")
    link.wait_for()
    page.keyboard.press("Space")
    link.wait_for(state="hidden")
    code = page.locator("article pre").filter(has_text="labkit.load").first
    assert code.get_attribute("tabindex") == "0"  # a long line is scrolled by keyboard


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path):
    spec = importlib.util.spec_from_file_location("build_site", BUILD)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(module.SiteError, match="something else"):
        module.build(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def _html(path: Path) -> str:
    return path.read_text(encoding="utf-8")
