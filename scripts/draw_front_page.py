"""Record docs/playground.gif, the picture of the README: a mask is painted, and Gemma's prediction changes.

    python scripts/draw_front_page.py

It opens the playground in JupyterLab, in Chromium (scripts/install_debian_packages.sh), and uses the mouse. Needs the
real Gemma weights and pillow, which nothing else in the project does: pip install pillow
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser.servers import Notebook, jupyter, write_notebook  # noqa: E402

PICTURE = ROOT / "docs" / "playground.gif"
LARGEST = 1.5e6  # bytes
SENTENCE = "The opposite of hot is"
QUERY, KEY = 5, 4  # the cell that is closed: "is" attends to "hot" (the first token is <bos>)
CELL = f"""import labkit
labkit.viz.playground({SENTENCE!r}).attach(labkit.load("gemma3-270m"))"""
LAYOUT = """
.labkit-playground { position: relative; width: 820px; height: 366px; padding: 16px 20px; }
.labkit-playground > :not(.pg-mask, .pg-grid, .pg-panel), .pg-sign, .pg-not, .pg-panel > *,
.pg-column:first-child, .pg-column > :not(.pg-answers) { display: none !important; }
.labkit-playground .pg-mask { position: absolute; top: 64px; left: 440px; margin: 0; padding: 0; background: none; }
.labkit-playground .pg-grid { position: absolute; top: 44px; left: 20px; margin: 0; }
.labkit-playground .pg-panel { position: absolute; top: 120px; left: 440px; right: 24px; margin: 0; padding: 0; }
.labkit-playground .pg-panel { border: 0; }
.labkit-playground .pg-panel > :is(.pg-columns, #title) { display: block !important; }
.labkit-playground > #caption { display: block !important; font: bold 18px sans-serif; }
#title { font: 17px sans-serif; margin: 0 0 12px !important; }
.labkit-playground .pg-answer { font-size: 16px; margin: 7px 0; }
.labkit-playground .pg-token { font-size: 16px; }
#pointer { position: fixed; z-index: 9999; pointer-events: none; }
"""
ARRANGE = """([layout, sentence]) => {
  const add = (place, tag, id, text = "") => {
    const element = Object.assign(document.createElement(tag), { id, textContent: text });
    place.prepend(element);
    return element;
  };
  document.head.append(add(document.head, "style", "layout", layout)); // the last one wins
  add(document.querySelector(".labkit-playground"), "p", "caption");
  add(document.querySelector(".pg-panel"), "p", "title", `Gemma 3: \u201c${sentence} ...\u201d`);
  const pointer = add(document.body, "div", "pointer");
  pointer.innerHTML = `<svg width="22" height="30">
    <path d="M2 2v22l6-5 4 9 4-2-4-8.5h8z" fill="#fff" stroke="#000" stroke-width="2"/></svg>`;
  const follow = (event) => Object.assign(pointer.style, { left: `${event.clientX}px`, top: `${event.clientY}px` });
  addEventListener("mousemove", follow, true);
}"""


class Film:
    """Pictures of the playground, each with how long it is shown."""

    def __init__(self, page):
        self.page, self.playground = page, page.locator(".labkit-playground").first
        self.cells = page.locator(".pg-cells").first.bounding_box()
        self.size = self.cells["width"] / (len(SENTENCE.split()) + 1)
        self.pictures: list[Image.Image] = []
        self.milliseconds: list[int] = []

    def show(self, milliseconds: int) -> None:
        picture = Image.open(io.BytesIO(self.playground.screenshot())).convert("RGB")
        self.pictures.append(picture.quantize(64, dither=Image.Dither.NONE))
        self.milliseconds.append(milliseconds)

    def point(self, row: float, column: float, milliseconds: int = 120) -> None:
        x, y = self.cells["x"] + (column + 0.5) * self.size, self.cells["y"] + (row + 0.5) * self.size
        self.page.mouse.move(x, y)
        self.show(milliseconds)

    def caption(self, text: str) -> None:
        self.page.evaluate("(text) => { document.getElementById('caption').textContent = text; }", text)

    def answered(self, milliseconds: int) -> None:
        """Show the picture once the model has answered under the mask on show."""
        self.page.wait_for_timeout(300)
        self.page.wait_for_function("!document.querySelector('.pg-panel').classList.contains('pg-stale')")
        self.show(milliseconds)

    def save(self, path: Path) -> None:
        first, *others = self.pictures
        first.save(path, save_all=True, append_images=others, duration=self.milliseconds, loop=0, optimize=True)


def record(page) -> Film:
    """Close one cell of the causal mask, open it again, and remove the mask."""
    film = Film(page)
    film.caption("A causal mask: each token attends to itself and to earlier tokens.")
    page.mouse.move(film.cells["x"] + 9 * film.size, film.cells["y"] + 7 * film.size)
    film.answered(2800)
    for step in (3, 2, 1):
        film.point(QUERY + step / 3, KEY + step)
    film.point(QUERY, KEY, 500)
    page.mouse.down()
    page.mouse.up()
    film.caption("One cell closed: \u201cis\u201d no longer attends to \u201chot\u201d.")
    film.answered(3200)
    page.mouse.down()
    page.mouse.up()
    film.caption("The cell is open again.")
    film.answered(1600)
    film.point(-1.35, 11.6, 400)
    page.get_by_role("combobox", name="mask A").select_option("bidirectional")
    film.caption("A bidirectional mask. Gemma was not trained with it and is less certain.")
    film.answered(3200)
    return film


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write_notebook(Path(folder, "notebooks", "playground.ipynb"), CELL)
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1300})
        page.failures = []
        with jupyter("lab", Path(folder)) as server:
            Notebook(page, server, "playground.ipynb").run(0)
            page.locator(".pg-answer").first.wait_for()
            page.evaluate(ARRANGE, [LAYOUT, SENTENCE])
            film = record(page)
        browser.close()
    film.save(PICTURE)
    size = PICTURE.stat().st_size
    seconds = sum(film.milliseconds) / 1000
    print(f"{PICTURE.relative_to(ROOT)}: {len(film.pictures)} pictures, {seconds:.1f} s, {size / 1e3:.0f} kB")
    if size > LARGEST:
        sys.exit(f"that is more than {LARGEST / 1e6} MB")


if __name__ == "__main__":
    main()
