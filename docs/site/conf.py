"""Sphinx's settings for the site of the project. scripts/build_site.py gathers the pages and calls Sphinx."""

import re
import sys
from html import escape
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.util.logging import getLogger

import labkit

sys.path.insert(0, str(Path(__file__).parent))  # cards.py
logger = getLogger(__name__)

project = "labkit"
author = "labkit contributors"
copyright = author
release = version = labkit.__version__
language = "en"
smartquotes = False  # they change the options of commands: --json would be shown with a dash

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "cards"]
exclude_patterns = ["files"]

# ------------------------------------------------------------------------------------------------ notebooks, Markdown
nb_execution_mode = "off"  # what was committed is shown
nb_merge_streams = True
nb_render_markdown_format = "myst"  # outputs have tables
nb_ipywidgets_js = {}  # they would come from the network; page.js draws the widgets
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

# -------------------------------------------------------------------------------------------------------------- theme
html_theme = "furo"
html_title = "labkit"
html_static_path = ["_static", str(Path(labkit.__file__).parent / "viz" / "page.js")]
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_js_files = [(name, {"defer": "defer"}) for name in ("page.js", "figures.js", "keyboard.js", "search.js")]
html_copy_source = False
html_math_renderer = "mathml"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {
    f"{theme}_css_variables": {
        "color-brand-primary": colour,
        "color-brand-content": colour,
        "color-brand-visited": colour,
        "color-link-underline": colour,
        "color-link-underline--visited": colour,
        "color-foreground-muted": muted,
        "labkit-words": words,  # over colours of their own
        "color-sidebar-caption-text": muted,
        "color-sidebar-search-text": "var(--color-foreground-primary)",
    }
    for theme, colour, muted, words in (
        ("light", "#0550ae", "#57606a", "#000000"),
        ("dark", "#79c0ff", "#a2abb5", "#ffffff"),
    )
} | {"footer_icons": []}

# ---------------------------------------------------------------------------------------------------------- reference
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
toc_object_entries = False
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "code"  # docstrings write `names` as Markdown does

SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Notes|Raises|Returns|Yields):$")
COLUMNS = re.compile(r"\S.*[^\s.!?:] {2,}\S")
ENTRY = re.compile(r"[\w, *]+: ")


def plain_text_as_markup(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are written to be read as they are; reStructuredText wants some of it said in its own way.

    What is indented by four is code, columns stay columns, and entries `name: words` become a list.
    """
    blocks = "\n".join(lines).strip("\n").split("\n\n")
    written: list[str] = []
    kind = "prose"
    for block in blocks:
        rows = block.strip("\n").split("\n")
        if SECTION.match(rows[0]):
            kind = "section"
        elif not rows[0].startswith("    "):
            kind = "prose"
        elif kind == "prose":
            kind = "code"
            written += ["::", ""]
        if kind == "prose" and not rows[0].startswith(">>>") and any(map(COLUMNS.match, rows)):
            rows = ["::", "", *("    " + row for row in rows)]
        elif kind != "code":
            rows = [_escaped(row) for row in rows]
            if kind == "prose" and ENTRY.match(rows[0]) and any(row.startswith("    ") for row in rows):
                rows = [row if row.startswith(" ") else f"* {row}" for row in rows]
                rows = [re.sub(r"^ +", "  ", row) for row in rows]
        written += [*rows, ""]
    lines[:] = written


def _escaped(row: str) -> str:
    """What means something in reStructuredText and nothing in a docstring, outside of backticks."""
    parts = re.split(r"(`+[^`]+`+)", row)
    alone = r"\||(?<=\w)_(?!\w)|(?<![*\w])\*(?![*\s])(?![^*]*[^*\s]\*)"  # |, a last _, a * that nothing closes
    parts[::2] = [re.sub(alone, r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def mathml(self, node) -> None:
    """A formula as MathML, which browsers draw without a library; its source is its text equivalent."""
    latex = node.astext().strip()
    display = "inline" if node.tagname == "math" else "block"
    formula = convert(latex, display=display)
    if "\\" in formula:
        logger.warning("a formula cannot be drawn: %s", latex, location=node)
    self.body.append(formula.replace("<math ", f'<math alttext="{escape(latex)}" ', 1))
    raise SkipNode


def setup(app) -> None:
    app.add_html_math_renderer("mathml", inline_renderers=(mathml, None), block_renderers=(mathml, None))
    app.connect("autodoc-process-docstring", plain_text_as_markup, priority=100)  # before napoleon
