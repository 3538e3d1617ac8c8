"""Markdown as HTML, as a page without a network needs it: formulas as MathML, pictures inside, links between pages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape, unescape

from latex2mathml.converter import convert
from nbconvert.filters.markdown_mistune import InvalidNotebook, IPythonRenderer, MarkdownWithMath

ELSEWHERE = re.compile(r"(?i)(https?:)?//")


@dataclass(frozen=True)
class Heading:
    level: int
    html: str
    anchor: str


@dataclass
class Prose:
    """All Markdown of one notebook: it keeps the headings, each with an anchor of its own, and what went wrong.

    `folder` is where the notebook lies (for its pictures), `pages` the page of each notebook that may be linked to.
    """

    folder: str
    pages: dict[str, str]
    headings: list[Heading] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def html(self, source: str, attachments: dict | None = None) -> str:
        return MarkdownWithMath(renderer=_Renderer(self, attachments or {})).render(source)

    def anchor(self, text: str) -> str:
        """A name for a heading, by the rule of JupyterLab's own links: spaces become hyphens."""
        name = re.sub(r"\s+", "-", unescape(re.sub(r"<[^>]*>", "", text)).strip()) or "section"
        taken = {heading.anchor for heading in self.headings}
        return next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(taken) + 3))) if n not in taken)


class _Renderer(IPythonRenderer):
    def __init__(self, prose: Prose, attachments: dict) -> None:
        super().__init__(escape=False, embed_images=True, path=prose.folder, attachments=attachments)
        self.prose = prose

    def heading(self, text: str, level: int, **attrs) -> str:
        anchor = self.prose.anchor(text)
        self.prose.headings.append(Heading(level, text, anchor))
        return f'<h{level} id="{escape(anchor)}">{text}</h{level}>\n'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        file, mark, anchor = url.partition("#")
        # only beside each other: the pages of one export lie in one folder
        target = self.prose.pages.get(file.rpartition("/")[2]) if not ELSEWHERE.match(file) else None
        return super().link(text, target + mark + anchor if target else url, title)

    def image(self, text: str, url: str, title: str | None = None) -> str:
        if ELSEWHERE.match(url):
            self.prose.problems.append(f"the picture {url} lies in the network and became a link")
            return super().link(f"Picture: {text or escape(url)}", url, title)
        try:
            return super().image(text, url, title)
        except InvalidNotebook:
            self.prose.problems.append(f"the picture {url} is not in the notebook")
            return f"<p>(Picture: {escape(text)})</p>"

    def _embed_image_or_attachment(self, src: str) -> str:
        inside = super()._embed_image_or_attachment(src)
        if not inside.startswith("data:"):
            self.prose.problems.append(f"the picture {src} was not found in {self.prose.folder}")
        return inside

    def block_html(self, html: str) -> str:
        # without a picture to put inside, HTML is left as it was written
        return super().block_html(html) if "<img" in html.lower() else html + "\n"

    def inline_html(self, html: str) -> str:
        return super().inline_html(html) if "<img" in html.lower() else html

    def block_mermaidjs(self, code: str) -> str:
        return f'<pre><code class="language-mermaid">{escape(code.strip())}</code></pre>\n'

    def block_math(self, body: str) -> str:
        return self._formula(body, "block")

    def inline_math(self, body: str) -> str:
        return self._formula(body, "inline")

    def latex_environment(self, name: str, body: str) -> str:
        return self._formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")

    def _formula(self, latex: str, display: str) -> str:
        """MathML, which browsers draw themselves. What cannot be said in it stays as it was written."""
        try:
            drawn = convert(latex, display=display)
        except Exception:  # the converter has many exceptions of its own, and lets IndexError and the like through
            drawn = "\\"
        if "\\" in drawn:  # a macro that it does not know comes out as it went in
            self.prose.problems.append(f"the formula {latex.strip()} is shown as LaTeX")
            return f"<code>{escape(latex.strip())}</code>"
        return drawn.replace("<math ", f'<math alttext="{escape(latex.strip())}" ', 1)
