"""The page around a bertviz view: HTML for a notebook or a browser, with d3 and jQuery in it, so without a network."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import uuid4

from labkit.attention.plain import clean
from labkit.files import write_whole
from labkit.viz.page import joined

FOLDER = Path(str(files("labkit"))) / "_browser"  # filled by scripts/fetch_browser_libraries.py, packed into the wheel
NAMES = ("d3.min.js", "jquery.min.js")
CURE = (
    "d3 and jQuery were not fetched when labkit was set up (is npm, of Node.js, installed?). Run `python "
    "scripts/fetch_browser_libraries.py` in the checkout, or install labkit again with npm at hand. Until then a "
    "bertviz view needs a network"
)
# bertviz draws black on nothing: in a dark notebook, too, it needs a light ground.
CARD = (
    "background:#FFFFFF;color:#222222;color-scheme:light;padding:8px;overflow-x:auto;"
    "font-family:sans-serif;font-size:13px"
)
NOT_DRAWN = "The interactive view needs a notebook that was run here or is trusted: run this cell again."
ONLINE = "This view fetches d3 and jQuery from cdnjs.cloudflare.com, because labkit was set up without them."
REQUIRE = '<script src="https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js"></script>'
# Neither library becomes a global of the page: other scripts that use a `d3`, a `$` or a module loader keep their own.
LIBRARIES = """const shared = (window.labkitBrowser = window.labkitBrowser || { count: 0 });
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
}"""


@dataclass(frozen=True)
class Panel:
    """One drawing: bertviz's own HTML and JavaScript, what labkit writes above it, and the numbers that it shows."""

    html: str  # its choosers and the empty place of its drawing
    javascript: str
    heading: str
    note: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]


class BertvizView:
    """A bertviz view. A notebook draws it; `save(file)` writes a page; `alt` is its text equivalent.

    Args:
        panels: its drawings, beside each other.
        alt: what the view shows, for readers who do not see it.
        fill: pixels, the width that a drawing needs.
    """

    def __init__(self, panels: Sequence[Panel], alt: str, fill: int) -> None:
        self.panels, self.alt, self._fill = list(panels), clean(alt), fill

    def html(self) -> str:
        """The view as HTML that brings d3 and jQuery along."""
        if not all((FOLDER / name).is_file() for name in NAMES):  # bertviz's ordinary page, which fetches them
            warnings.warn(CURE, stacklevel=2)
            views = [
                f"<b>{escape(panel.heading)}</b> {escape(panel.note)}\n{REQUIRE}{panel.html}{element(panel.javascript)}"
                for panel in self.panels
            ]
            return f'<div style="{CARD}"><p>{ONLINE}</p>{"".join(views)}</div>'
        name, alt = uuid4().hex, escape(self.alt)
        panels = ",\n".join(self._drawing(panel) for panel in self.panels)
        d3, jquery = ((FOLDER / library).read_text(encoding="utf-8") for library in NAMES)
        libraries = LIBRARIES.replace("/*D3*/", d3).replace("/*JQUERY*/", jquery)
        call = f"labkitView({literal(name)}, [{panels}], {self._fill});"
        script = element(f"(() => {{\n{libraries}\n{joined('bertviz.js')}\n{call}\n}})();")
        still = f"<div data-labkit-still><p data-labkit-why>{NOT_DRAWN}</p><p>{alt}</p></div>"
        card = f'<div data-labkit-view="{name}" role="group" aria-label="{alt}" style="{CARD}">{still}</div>'
        return f"{card}\n{script}"

    def _drawing(self, panel: Panel) -> str:
        """What bertviz.js needs to know. bertviz's script asks a module loader for d3 and jQuery: here, this one."""
        script = re.sub(r'"root_div_id":\s*"[^"]+"', '"root_div_id": root.id', panel.javascript, count=1)
        fields = {"heading": panel.heading, "note": panel.note, "alt": self.alt, "html": panel.html}
        fields |= {"layers": panel.layers, "heads": panel.heads}
        return (
            f"{{...{literal(fields)}, draw(root, d3, jquery) {{\n"
            "const require = { config() {} }, requirejs = (names, use) => use(jquery, d3);\n"
            f"{script}\n}}}}"
        )

    def save(self, file: str | Path) -> None:
        """Write the view as an HTML page of its own, which needs no network."""
        page = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.alt)}</title></head>'
        write_whole(file, f"{page}<body>\n{self.html()}\n</body></html>\n")

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, Any]:
        return {"text/html": self.html(), "text/plain": f"bertviz view: {self.alt}"}


def element(javascript: str) -> str:
    """A script element with this JavaScript; nothing in its strings can end the element early."""
    safe = re.sub(r"<(?=!--|/script)", lambda _: "\\x3c", javascript, flags=re.IGNORECASE)
    return f"<script>\n{safe}\n</script>"


def literal(value: Any) -> str:
    """`value` as JavaScript."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
