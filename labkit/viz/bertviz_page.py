"""The page around a bertviz view: its HTML for a notebook or a browser, and its libraries."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, ClassVar
from uuid import uuid4

from labkit.attention.plain import clean
from labkit.viz import browser_libraries

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


@dataclass(frozen=True)
class Panel:
    """One drawing: bertviz's own HTML and JavaScript, as it gives them out, and what labkit says above and about it."""

    data: str
    heading: str
    note: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    alt: str = ""

    ROOT: ClassVar[str] = "bertviz-root"
    SCRIPT: ClassVar[str] = '<script type="text/javascript">\n'

    @classmethod
    def neuron(cls, params: dict, note: str, layers: tuple[int, ...], heads: tuple[int, ...]) -> Panel:
        """bertviz's neuron view; its Python side takes only models of its own, its JavaScript takes any vectors."""
        javascript = files("bertviz").joinpath("neuron_view.js").read_text(encoding="utf-8")
        given = f"window.bertviz_params = {browser_libraries.literal(params)};"
        return cls(f"{NEURON_HTML}{cls.SCRIPT}{given}\n{javascript}\n</script>", "", note, layers, heads)

    def html(self) -> str:
        """Its choosers and the empty place of its drawing."""
        before = self.data.split(self.SCRIPT, 1)[0]
        return re.sub(r"<script.*?</script>", "", before, flags=re.DOTALL)  # require.js from a CDN

    def javascript(self) -> str:
        """bertviz's script; tokens are in it, so its end is looked for from behind."""
        return self.data.split(self.SCRIPT, 1)[1].rsplit("</script>", 1)[0]

    def online(self) -> str:
        """bertviz's ordinary page, which fetches d3 and jQuery from a CDN."""
        loader = '<script src="https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js"></script>'
        return f"{loader}{self.html()}{browser_libraries.element(self.javascript())}"

    def drawing(self) -> str:
        """What bertviz.js needs to know, as JavaScript. bertviz asks a module loader for d3 and jQuery: this one."""
        root = re.search(r'"root_div_id":\s*"([^"]+)"', self.javascript())
        script = self.javascript().replace(root[0], '"root_div_id": root.id')
        said = {"heading": self.heading, "note": self.note, "alt": self.alt, "html": self.html()}
        said |= {"layers": self.layers, "heads": self.heads}
        return (
            f"{{...{browser_libraries.literal(said)}, draw(root, d3, jquery) {{\n"
            "const require = { config() {} }, requirejs = (names, use) => use(jquery, d3);\n"
            f"{script}\n}}}}"
        )


NEURON_HTML = f"""<div id="{Panel.ROOT}" style="padding:8px">
<span class="dropdown-label">Layer: </span><select id="layer"></select>
<span class="dropdown-label">Head: </span><select id="att_head"></select>
<div id="vis"></div></div>
"""


class BertvizView:
    """A bertviz view. A notebook draws it; `save(file)` writes a page; `alt` is its text equivalent.

    Args:
        panels: its drawings, beside each other.
        alt: what the view shows, for readers who do not see it.
        fill: pixels that a drawing wants to be wide.
    """

    def __init__(self, panels: Sequence[Panel], alt: str, fill: int) -> None:
        self.alt = clean(alt)
        self._fill = fill
        self.panels = [Panel(p.data, p.heading, p.note, p.layers, p.heads, self.alt) for p in panels]

    def __repr__(self) -> str:
        return f"bertviz view: {self.alt}"

    def html(self, libraries: bool = True) -> str:
        """The view as HTML. `libraries`: bring d3 and jQuery too, or rely on the page to have them, now or later."""
        if not browser_libraries.are_there():
            return self._online()
        name = uuid4().hex
        still = f"<div data-labkit-still><p data-labkit-why>{NOT_DRAWN}</p><p>{escape(self.alt)}</p></div>"
        loader = files(__package__).joinpath("bertviz.js").read_text(encoding="utf-8")
        panels = ",\n".join(panel.drawing() for panel in self.panels)
        script = (
            f"(() => {{\n{loader}\nlabkitView({browser_libraries.literal(name)}, [{panels}], {self._fill});\n}})();"
        )
        brought = browser_libraries.script() + "\n" if libraries else ""
        card = (
            f'<div data-labkit-view="{name}" role="group" aria-label="{escape(self.alt)}" style="{CARD}">{still}</div>'
        )
        return f"{card}\n{brought}{browser_libraries.element(script)}"

    def save(self, file) -> None:
        """Write the view as an HTML page of its own, which needs no network."""
        from labkit.files import write_whole

        page = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.alt)}</title></head>'
        write_whole(file, f"{page}<body>\n{self.html()}\n</body></html>\n")

    def _online(self) -> str:
        warnings.warn(
            f"{browser_libraries.CURE}. Until then a bertviz view is bertviz's ordinary page, which needs a network",
            stacklevel=4,
        )
        body = "\n".join(f"<b>{escape(p.heading)}</b> {escape(p.note)}\n{p.online()}" for p in self.panels)
        return f'<div style="{CARD}"><p>{ONLINE}</p>{body}</div>'

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, Any]:
        libraries = browser_libraries.are_there() and browser_libraries.CARRIER.is_next()
        return {"text/html": self.html(libraries), "text/plain": repr(self)}


ONLINE = "This view fetches d3 and jQuery from cdnjs.cloudflare.com, because labkit was set up without them."


class Carrying:
    """The output of a cell that brings d3 and jQuery for the views of its notebook."""

    def __repr__(self) -> str:
        return "d3 and jQuery for the bertviz views of this notebook"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, Any]:
        if not browser_libraries.are_there():
            warnings.warn(browser_libraries.CURE, stacklevel=3)
            return {"text/plain": f"No libraries for bertviz views: {browser_libraries.CURE}."}
        browser_libraries.CARRIER.is_next(always=True)
        return {"text/html": f"<small>{self!r}</small>\n{browser_libraries.script()}", "text/plain": repr(self)}
