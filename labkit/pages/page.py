"""One notebook as one HTML document that asks the network for nothing: its own policy forbids it to.

Own markup instead of nbconvert's template, which takes its scripts for mathematics, widgets and diagrams from the
network; nbconvert's Markdown, highlighting and terminal colours are used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbconvert.filters.ansi import ansi2html
from nbconvert.filters.highlight import Highlight2HTML

from labkit import __version__
from labkit.notebooks import is_setup_cell
from labkit.pages.markdown import Prose
from labkit.pages.outside import addresses

if TYPE_CHECKING:
    from nbformat import NotebookNode

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
# widgets that need no kernel: the module that they bring does everything
STANDALONE = {
    "labkit.viz.frames.Frames",
    "labkit.viz.mask_playground.Playground",
    "labkit.viz.explorer.Explorer",
    "labkit.learner.boxes.Box",
}
# Pictures and fonts from inside the page only, and no request by a script: the page cannot fetch even what it names.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' blob: data:; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; media-src data:; worker-src blob:; connect-src data: blob:; frame-src data:"
)
STILL = "A picture of the control; in the running notebook it can be moved."
NO_WIDGET = "Here stands a control that needs the running notebook, and it left no picture."


@dataclass(frozen=True)
class RenderedPage:
    """The document, and what is in it."""

    html: str
    figures: int  # plotly figures, interactive
    widgets: int
    live: int  # of the widgets, those that answer without a kernel
    problems: list[str]


def render(notebook: NotebookNode, path: Path, pages: dict[str, str]) -> RenderedPage:
    """The page of `notebook`, which lies at `path`; `pages` maps notebooks that it may link to, to their pages."""
    body = _Body(notebook, Prose(str(path.resolve().parent), pages))
    content = "\n".join(body.cells())
    headings = body.prose.headings
    first = next((heading for heading in headings if heading.level == 1), None)
    title = _without_tags(first.html) if first else escape(path.stem)
    problems = [*body.problems, *body.prose.problems]
    problems += [f"something from {address} is not in the page" for address in addresses(content)]
    document = _DOCUMENT.format(
        language=escape(notebook.metadata.get("language", "en")),
        policy=POLICY,
        title=title,
        style=_style(),
        contents=_contents(headings),
        content=content,
        source=escape(path.name),
        version=__version__,
        scripts=body.scripts(),
    )
    return RenderedPage(document, body.figures, body.widgets, len(body.live), problems)


@dataclass
class _Body:
    notebook: NotebookNode
    prose: Prose
    figures: int = 0
    widgets: int = 0
    live: dict[str, dict] = field(default_factory=dict)  # model id -> the widget as the notebook keeps it
    problems: list[str] = field(default_factory=list)

    def cells(self) -> Iterator[str]:
        for cell in self.notebook.cells:
            if cell.cell_type == "markdown":
                yield f'<section class="prose">\n{self.prose.html(cell.source, cell.get("attachments"))}</section>'
            elif cell.cell_type == "code" and cell.source.strip():
                outputs = "\n".join(self.output(output) for output in cell.outputs)
                if outputs and cell.metadata.get("jupyter", {}).get("outputs_hidden"):
                    outputs = f"<details class='result'><summary>The result</summary>\n{outputs}</details>"
                yield f'<section class="cell">\n{self.code(cell)}\n{outputs}</section>'

    def code(self, cell: NotebookNode) -> str:
        # a long line scrolls sideways: so that a keyboard can, too, it takes the focus
        code = self.highlight(cell.source).replace("<pre>", '<pre tabindex="0">', 1)
        if is_setup_cell(cell.source):
            return f"<details><summary>Setting up the notebook</summary>{code}</details>"
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            return f"<details><summary>Code</summary>{code}</details>"
        return code

    @cached_property
    def highlight(self) -> Highlight2HTML:
        language = self.notebook.metadata.get("language_info", {})
        return Highlight2HTML(pygments_lexer=language.get("pygments_lexer", language.get("name", "ipython3")))

    def output(self, output: NotebookNode) -> str:
        if output.output_type == "stream":
            return _text(output.text, output.name)
        if output.output_type == "error":
            return _text("\n".join(output.traceback), "error")
        return f'<div class="output">{self.data(output.data, output.get("metadata", {}))}</div>'

    def data(self, data: dict[str, Any], metadata: dict[str, Any]) -> str:
        """The richest form of an output that a page without a kernel and without a network can show."""
        if PLOTLY in data:
            return self.figure(data[PLOTLY])
        if WIDGET in data:
            return self.widget(data, metadata)
        if "text/html" in data:
            return f'<div class="html">{data["text/html"]}</div>'
        if "text/markdown" in data:
            return f'<div class="prose">{self.prose.html(data["text/markdown"])}</div>'
        return self.picture(data, metadata) or self.words(data)

    def picture(self, data: dict[str, Any], metadata: dict[str, Any]) -> str | None:
        words = data.get("text/plain", "").removeprefix("Picture: ")
        if "image/svg+xml" in data:
            drawn = data["image/svg+xml"]
            return f'<div class="picture">{drawn[max(drawn.find("<svg"), 0) :]}</div>'  # without an XML declaration
        for kind in ("image/png", "image/jpeg", "image/gif", "image/webp"):
            if kind in data:
                said = metadata.get(kind, {})
                words = words if words and not words.startswith("<") else "Picture made by the code above"
                size = "".join(f' {name}="{int(said[name])}"' for name in ("width", "height") if name in said)
                source = f"data:{kind};base64,{''.join(data[kind].split())}"
                return f'<div class="picture"><img src="{source}" alt="{escape(said.get("alt", words))}"{size}></div>'
        return None

    def words(self, data: dict[str, Any]) -> str:
        if "text/latex" in data:
            return f'<div class="prose">{self.prose.html(data["text/latex"])}</div>'
        if "text/plain" in data:
            return _text(data["text/plain"], "stdout")
        self.problems.append(f"an output of kind {', '.join(sorted(data)) or 'nothing'} is left out")
        return f"<p><em>An output of kind {escape(', '.join(sorted(data)))} cannot be shown in a page.</em></p>"

    def figure(self, figure: dict[str, Any]) -> str:
        self.figures += 1
        layout = figure.get("layout", {})
        meta, title = layout.get("meta"), layout.get("title")
        words = meta.get("alt") if isinstance(meta, dict) else None
        words = words or (title.get("text") if isinstance(title, dict) else title) or "Interactive figure"
        sized = " sized" if layout.get("width") else ""
        return (
            f'<figure class="plotly{sized}"><div class="drawing" role="img" aria-label="{escape(words)}"></div>'
            f"<noscript><p>{escape(words)}</p></noscript>{_json(figure)}</figure>"
        )

    def widget(self, data: dict[str, Any], metadata: dict[str, Any]) -> str:
        """A widget that needs no kernel lives on; of any other, the picture that it left beside itself."""
        self.widgets += 1
        picture = self.picture(data, metadata)
        if picture is None and "text/html" in data:
            picture = f'<div class="html">{data["text/html"]}</div>'
        model = data[WIDGET].get("model_id", "")
        states = self.notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
        state = states.get(model, {}).get("state", {})
        if state.get("_anywidget_id") in STANDALONE and "_esm" in state:
            self.live[model] = states[model]
            return f'<div class="widget" data-widget="{escape(model)}">{picture or self.words(data)}</div>'
        if picture:
            return f'<div class="widget">{picture}<p class="note">{STILL}</p></div>'
        words = data.get("text/plain", "")
        self.problems.append(f"a widget left no picture of itself: {words.partition('(')[0] or model}")
        return f'<div class="widget"><p class="note">{NO_WIDGET}</p>{_text(words, "stdout") if words else ""}</div>'

    def scripts(self) -> str:
        """Plotly's library and the widgets' modules, each once, and only where the page has use for them."""
        parts = []
        if self.figures:
            from plotly.offline import get_plotlyjs

            parts.append(f"<script>{_closed(get_plotlyjs())}</script>")
        if self.live:
            parts.append(_json(_carried(self.live), "labkit-widgets"))
        if parts:
            parts.append(f"<script>{_closed(_asset('page.js'))}</script>")
        return "\n".join(parts)


def _carried(widgets: dict[str, dict]) -> dict[str, Any]:
    """What page.js brings to life: the modules, each once, and the values of each widget, with those that are bytes."""
    modules: dict[tuple[str, str], int] = {}
    models = {}
    for model, widget in widgets.items():
        state = widget["state"]
        number = modules.setdefault((state["_esm"], state.get("_css", "")), len(modules))
        values = {name: value for name, value in state.items() if not name.startswith("_")}
        if "live" in values:
            values["live"] = False  # labkit's way to tell a widget that no Python will answer it
        models[model] = {"module": number, "values": values, "buffers": widget.get("buffers", [])}
    return {"modules": [{"esm": esm, "css": css} for esm, css in modules], "models": models}


def _contents(headings) -> str:
    """The list of headings below the title; nothing for a page that has hardly any."""
    listed = [heading for heading in headings if heading.level in (2, 3)]
    if len(listed) < 2:
        return ""
    items = "\n".join(
        f'<li class="level{heading.level}"><a href="#{escape(heading.anchor)}">{_without_tags(heading.html)}</a></li>'
        for heading in listed
    )
    return f'<nav aria-label="Contents"><details open><summary>Contents</summary><ol>\n{items}\n</ol></details></nav>'


def _style() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n{_asset('page.css')}"


def _text(text: str, kind: str) -> str:
    return f'<pre class="output {kind}" tabindex="0">{ansi2html(text.rstrip())}</pre>'


def _json(value: Any, name: str | None = None) -> str:
    """JSON inside HTML; no `<` can end the element before its time."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json"{f" id={name!r}" if name else ""}>{text}</script>'


def _closed(script: str) -> str:
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _without_tags(html: str) -> str:
    return re.sub(r"<[^>]*>", "", html)


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


_DOCUMENT = """<!DOCTYPE html>
<html lang="{language}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="labkit {version}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<a class="skip" href="#content">Skip to the text</a>
{contents}
<main id="content">
{content}
<footer>Exported from <code>{source}</code> by labkit {version}. This page is complete: nothing in it comes from the
network.</footer>
</main>
{scripts}
</body>
</html>
"""
