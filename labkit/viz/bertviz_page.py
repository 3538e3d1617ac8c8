"""The page around a bertviz view: its HTML for a notebook or a browser, and its libraries."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from labkit.attention.plain import clean
from labkit.files import write_whole
from labkit.viz import browser_libraries
from labkit.viz.page import joined

# bertviz draws black on nothing: in a dark notebook, too, it needs a light ground.
CARD = (
    "background:#FFFFFF;color:#222222;color-scheme:light;padding:8px;overflow-x:auto;"
    "font-family:sans-serif;font-size:13px"
)
NOT_DRAWN = (
    "The interactive view needs a notebook that was run here or is trusted, and the output that "
    "brings d3 and jQuery: the first bertviz view of this notebook, or labkit.viz.bertviz_setup(). Run that cell "
    "again, or this one after a restart."
)
ONLINE = "This view fetches d3 and jQuery from cdnjs.cloudflare.com, because labkit was set up without them."
REQUIRE = '<script src="https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js"></script>'


def split(data: str) -> tuple[str, str]:
    """bertviz's HTML without its scripts, and its JavaScript; tokens are in it, so its end is searched from behind."""
    html, _, rest = data.partition('<script type="text/javascript">\n')
    return re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL), rest.rsplit("</script>", 1)[0]


@dataclass(frozen=True)
class Panel:
    """One drawing: bertviz's own HTML and JavaScript, what labkit writes above it, and the numbers that it shows."""

    html: str  # its choosers and the empty place of its drawing
    javascript: str
    heading: str
    note: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]

    def drawing(self, alt: str) -> str:
        """What bertviz.js needs to know, as JavaScript. bertviz asks a module loader for d3 and jQuery: this one."""
        script = re.sub(r'"root_div_id":\s*"[^"]+"', '"root_div_id": root.id', self.javascript, count=1)
        fields = {"heading": self.heading, "note": self.note, "alt": alt, "html": self.html}
        fields |= {"layers": self.layers, "heads": self.heads}
        return (
            f"{{...{browser_libraries.literal(fields)}, draw(root, d3, jquery) {{\n"
            "const require = { config() {} }, requirejs = (names, use) => use(jquery, d3);\n"
            f"{script}\n}}}}"
        )


class BertvizView:
    """A bertviz view. A notebook draws it; `save(file)` writes a page; `alt` is its text equivalent.

    Args:
        panels: its drawings, beside each other.
        alt: what the view shows, for readers who do not see it.
        fill: pixels, the width that a drawing needs.
    """

    def __init__(self, panels: Sequence[Panel], alt: str, fill: int) -> None:
        self.panels, self.alt, self._fill = list(panels), clean(alt), fill

    def __repr__(self) -> str:
        return f"bertviz view: {self.alt}"

    def html(self, libraries: bool = True) -> str:
        """The view as HTML. `libraries`: bring d3 and jQuery too, or rely on the page to have them, now or later."""
        if not browser_libraries.are_installed():  # bertviz's ordinary page, which fetches them from a CDN
            warnings.warn(f"{browser_libraries.CURE}. Until then a bertviz view needs a network", stacklevel=3)
            views = [
                f"<b>{escape(panel.heading)}</b> {escape(panel.note)}\n{REQUIRE}{panel.html}"
                + browser_libraries.element(panel.javascript)
                for panel in self.panels
            ]
            return f'<div style="{CARD}"><p>{ONLINE}</p>{"".join(views)}</div>'
        name, alt = uuid4().hex, escape(self.alt)
        panels = ",\n".join(panel.drawing(self.alt) for panel in self.panels)
        call = f"labkitView({browser_libraries.literal(name)}, [{panels}], {self._fill});"
        script = browser_libraries.element(f"(() => {{\n{joined('bertviz.js')}\n{call}\n}})();")
        still = f"<div data-labkit-still><p data-labkit-why>{NOT_DRAWN}</p><p>{alt}</p></div>"
        card = f'<div data-labkit-view="{name}" role="group" aria-label="{alt}" style="{CARD}">{still}</div>'
        return "\n".join([card, *([browser_libraries.script()] if libraries else []), script])

    def save(self, file: str | Path) -> None:
        """Write the view as an HTML page of its own, which needs no network."""
        page = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.alt)}</title></head>'
        write_whole(file, f"{page}<body>\n{self.html()}\n</body></html>\n")

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, Any]:
        libraries = browser_libraries.are_installed() and browser_libraries.CARRIER.must_bring()
        return {"text/html": self.html(libraries), "text/plain": repr(self)}
