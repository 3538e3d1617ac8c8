"""Build the site: the tour as it was executed, the playground, the guides and the API reference, as static pages.

    python scripts/build_site.py [--output-dir build/site]

Nothing is executed, and nothing comes from the network, neither while the site is built nor while it is read. The site
is written whole or not at all.
Needs: pip install -c constraints.txt -e ".[site]"
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import nbformat  # noqa: E402
from plotly.offline import get_plotlyjs  # noqa: E402
from sphinx.cmd.build import build_main  # noqa: E402

from labkit import masks  # noqa: E402
from labkit.files import write_folder  # noqa: E402
from labkit.notebooks import is_setup_cell  # noqa: E402
from labkit.viz import playground  # noqa: E402
from labkit.viz.page import embedded  # noqa: E402

TEXTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "benchmarks/README.md"]
STATIC = "_static"
PLACE = "<!-- playground -->"  # in docs/site/playground.md
MARKS_OF_A_SITE = {"objects.inv", "searchindex.js", "index.html"}  # nothing else is ever replaced
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=ROOT / "build" / "site", help="replaced if it is a site")
    began = time.monotonic()
    try:
        site = build(parser.parse_args(arguments).output_dir)
    except SiteError as error:
        print(f"labkit: the site was not built: {error}", file=sys.stderr)
        return 1
    sizes = [path.stat().st_size for path in site.rglob("*") if path.is_file()]
    print(f"labkit: {site}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB, {time.monotonic() - began:.0f} s")
    return 0


class SiteError(Exception):
    """The site cannot be built; the message says why."""


def build(output: Path) -> Path:
    """Write the site to the folder `output` and return it. A site that is there already is replaced, nothing else."""
    output = output.expanduser().resolve()
    if output.exists() and not (output.is_dir() and _is_empty_or_a_site(output)):
        raise SiteError(f"{output} holds something else than a site; give --output-dir a folder of its own")
    with tempfile.TemporaryDirectory() as scratch:
        gather(Path(scratch, "source"))
        write_folder(output, lambda site: run_sphinx(Path(scratch, "source"), site, Path(scratch, "doctrees")))
    return output


def gather(source: Path) -> None:
    """Everything that Sphinx is to read, in one folder, laid out as in the repository so that links hold."""
    shutil.copytree(ROOT / "docs" / "site", source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", source / "docs", ignore=shutil.ignore_patterns("site"))
    cards = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "data").rglob("README.md"))]
    for name in [*TEXTS, *cards]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    write_glossary(source)
    write_plotly(source / STATIC / "plotly.min.js")
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        write_notebook(path, source)
    write_playground(source / "playground.md")
    write_front_page(source)
    write_assignments(source)


def run_sphinx(source: Path, made: Path, doctrees: Path) -> None:
    """Call Sphinx. A warning is a broken link or a page that does not say what it should: no site then."""
    options = ["-b", "html", "-q", "-W", "--keep-going", "-d", str(doctrees)]
    if build_main([*options, str(source), str(made)]):
        raise SiteError("Sphinx found faults, listed above")
    shutil.rmtree(made / "_sources", ignore_errors=True)
    (made / ".buildinfo").unlink(missing_ok=True)


def _is_empty_or_a_site(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    return not names or names >= MARKS_OF_A_SITE


# ------------------------------------------------------------------------------------------------------- notebooks
def write_notebook(path: Path, source: Path) -> None:
    """A notebook for myst-nb, which shows everything but figures and widgets by itself."""
    notebook = nbformat.read(path, as_version=4)
    state = notebook.metadata.pop("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    live = {model: widget for model, widget in state.items() if "_esm" in widget["state"]}  # anywidgets
    if live:
        notebook.metadata["widgets"] = {WIDGET_STATE: {"state": live}}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, path)
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            if html := html_of(output.get("data", {}), live):
                output.data = {"text/html": html}
        folded = cell.metadata.get("jupyter", {})
        hidden = ["hide-input"] if is_setup_cell(cell.source) or folded.get("source_hidden") else []
        hidden += ["hide-output"] if folded.get("outputs_hidden") else []
        cell.metadata["tags"] = [*cell.metadata.get("tags", []), *hidden]
    download = f"{{download}}`This page as a notebook, {path.name} <../files/{path.name}>`"
    notebook.cells.append(nbformat.v4.new_markdown_cell(download))
    for folder in ("notebooks", "files"):
        (source / folder).mkdir(exist_ok=True)
    nbformat.write(notebook, source / "notebooks" / path.name)
    shutil.copyfile(path, source / "files" / path.name)


def html_of(data: dict[str, Any], live: dict[str, Any]) -> str | None:
    """The HTML of a figure or a widget; None for all other outputs.

    docs/site/_static/figures.js draws plotly figures, and labkit/viz/page.js draws anywidgets. Other widgets need a
    kernel, so what the notebook holds beside them is shown.
    """
    if WIDGET in data and data[WIDGET]["model_id"] in live:
        return f'<div data-widget="{data[WIDGET]["model_id"]}"></div>'
    if PLOTLY in data:
        text = json.dumps(data[PLOTLY], ensure_ascii=False).replace("<", "\\u003c")
        drawing = '<div class="drawing" role="img"></div>'
        return f'<figure class="plotly">{drawing}<script type="application/json">{text}</script></figure>'
    if WIDGET in data:
        return data.get("text/html", "<p><em>This control needs a kernel: open the notebook to use it.</em></p>")
    return None


def linked(prose: str, path: Path) -> str:
    """`NN_title` names a notebook of the tour; here it leads there. Lines of HTML are left as they are."""

    def link(found: re.Match) -> str:
        there = path.with_name(f"{found[1]}.ipynb")
        return f"[{found[0]}]({there.name})" if there != path and there.is_file() else found[0]

    lines = prose.split("\n")
    return "\n".join(x if x.startswith("<") else re.sub(r"(?<!\[)`(\d\d_\w+)`", link, x) for x in lines)


# ------------------------------------------------------------------------------------------- pages made from others
def write_playground(page: Path) -> None:
    """Put the playground into its page."""
    text = page.read_text(encoding="utf-8")
    if PLACE not in text:
        raise SiteError(f"docs/site/{page.name} has no line {PLACE}, the place of the playground")
    widget = playground(mask=masks.prefix(3))
    page.write_text(text.replace(PLACE, embedded(widget)), encoding="utf-8")
    widget.close()


def write_plotly(file: Path) -> None:
    """plotly.js: the bundle of cartesian charts if it was fetched, else plotly's own library (4.8 MB)."""
    small = ROOT / "labkit" / "_browser" / "plotly-cartesian.min.js"
    file.write_text(small.read_text("utf-8") if small.is_file() else get_plotlyjs(), encoding="utf-8")


def write_front_page(source: Path) -> None:
    """README, then docs/site/front.md."""
    readme, more = ((source / name).read_text(encoding="utf-8") for name in ("README.md", "front.md"))
    for name in ("README.md", "front.md"):
        (source / name).unlink()
    (source / "index.md").write_text(f"{readme}\n{more}", encoding="utf-8")


def write_glossary(source: Path) -> None:
    """A target before each entry, for the cards that docs/site/cards.py puts where other pages use its word."""
    sys.path.insert(0, str(source))
    from cards import GLOSSARY, with_anchors

    page = source / f"{GLOSSARY}.md"
    page.write_text(with_anchors(page.read_text(encoding="utf-8")), encoding="utf-8")


def write_assignments(source: Path) -> None:
    """Links to the assignments as files, student's version and solution, and to the capstone."""
    page = source / "assignments.md"
    lines = [page.read_text(encoding="utf-8")]
    folder = ROOT / "notebooks" / "assignments"
    for student in [*sorted((folder / "student").glob("*.ipynb")), *(folder / "capstone").glob("*.ipynb")]:
        cells = json.loads(student.read_text(encoding="utf-8"))["cells"]
        title = next(re.finditer(r"^# (.+)$", "\n".join("".join(cell["source"]) for cell in cells), re.MULTILINE))[1]
        lines.append(f"## {escape(title)}\n")
        for kind, words in ((student.parent.name, "the notebook to work in"), ("solution", "the solution")):
            file = folder / kind / student.name
            if file.is_file():
                (source / "files" / kind).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, source / "files" / kind / file.name)
                lines.append(f"- {{download}}`{words}, {file.name} <files/{kind}/{file.name}>`")
        lines.append("")
    page.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
