"""Build the site: the tour as it was executed, the playground, the guides and the API reference, as static pages.

    python scripts/build_site.py [--output-dir build/site]

Nothing is executed and nothing comes from the network, neither while the site is built nor while it is read. What the
pages have in common (plotly, the widgets' modules) is a file of its own. The site is written whole or not at all.
Needs: pip install -c constraints.txt -e ".[site]"
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TEXTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "benchmarks/README.md"]
STATIC = "_static"
PLACE = "<!-- playground -->"  # in docs/site/playground.md
MARKS_OF_A_SITE = {"objects.inv", "searchindex.js", "index.html"}  # nothing else is ever replaced


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=ROOT / "build" / "site", help="replaced if it is a site")
    began = time.monotonic()
    try:
        site = build(parser.parse_args(arguments).output_dir)
    except (SiteError, ImportError) as error:
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
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".labkit-site-", dir=output.parent) as scratch:
        source, made = Path(scratch, "source"), Path(scratch, "site")
        gather(source)
        run_sphinx(source, made, Path(scratch, "doctrees"))
        made.chmod(0o755)
        if output.exists():
            output.rename(Path(scratch, "before"))
        made.rename(output)
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
    shared = Shared(source / STATIC)
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        write_notebook(path, source, shared)
    write_playground(source / "playground.md", shared)
    write_front_page(source)
    write_assignments(source)


def run_sphinx(source: Path, made: Path, doctrees: Path) -> None:
    """Call Sphinx. A warning is a broken link or a page that does not say what it should: no site then."""
    from sphinx.cmd.build import build_main

    options = ["-b", "html", "-q", "-W", "--keep-going", "-d", str(doctrees)]
    if build_main([*options, str(source), str(made)]):
        raise SiteError("Sphinx found faults, listed above")
    shutil.rmtree(made / "_sources", ignore_errors=True)
    (made / ".buildinfo").unlink(missing_ok=True)


def _is_empty_or_a_site(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    return not names or names >= MARKS_OF_A_SITE


# ------------------------------------------------------------------------------------------------------- notebooks
def write_notebook(path: Path, source: Path, shared: Shared) -> None:
    """A notebook for myst-nb, which shows prose, code and printed text; labkit.pages draws the outputs."""
    import nbformat

    from labkit.notebooks import is_setup_cell

    notebook = nbformat.read(path, as_version=4)
    drawn = Drawn(notebook, path)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, path)
        if cell.cell_type != "code":
            continue
        cell.outputs = [drawn.output(output) for output in cell.outputs]
        folded = cell.metadata.get("jupyter", {})
        hidden = ["hide-input"] if is_setup_cell(cell.source) or folded.get("source_hidden") else []
        hidden += ["hide-output"] if folded.get("outputs_hidden") else []
        cell.metadata["tags"] = [*cell.metadata.get("tags", []), *hidden]
    scripts = shared.scripts(drawn, path.stem, up="../")
    end = f"{scripts}\n\n{{download}}`This page as a notebook, {path.name} <../files/{path.name}>`"
    notebook.cells.append(nbformat.v4.new_markdown_cell(end))
    notebook.metadata.pop("widgets", None)
    for folder in ("notebooks", "files"):
        (source / folder).mkdir(exist_ok=True)
    nbformat.write(notebook, source / "notebooks" / path.name)
    shutil.copyfile(path, source / "files" / path.name)


def linked(prose: str, path: Path) -> str:
    """`NN_title` names a notebook of the tour; here it leads there. Lines of HTML are left as they are."""

    def link(found: re.Match) -> str:
        there = path.with_name(f"{found[1]}.ipynb")
        return f"[{found[0]}]({there.name})" if there != path and there.is_file() else found[0]

    lines = prose.split("\n")
    return "\n".join(x if x.startswith("<") else re.sub(r"(?<!\[)`(\d\d_\w+)`", link, x) for x in lines)


class Drawn:
    """The outputs of a notebook as HTML that needs no kernel; which scripts they need is known when all are drawn."""

    def __init__(self, notebook: Any, path: Path) -> None:
        from labkit.pages import page
        from labkit.pages.markdown import Prose

        self.name, self._page = path.name, page
        self._body = page._Body(notebook, Prose(str(path.parent), {}))

    def output(self, output: Any) -> Any:
        """Printed text, text and Markdown stay as they are: they are searched, and Sphinx colours them."""
        data = output.get("data", {})
        rich = [kind for kind in data if kind not in ("text/plain", "text/markdown", "text/latex")]
        if not rich:
            return output
        html = f'<div class="labkit">{self.html(output)}</div>'
        return type(output)(output_type="display_data", data={"text/html": html}, metadata={})

    def html(self, output: Any) -> str:
        drawn = self._body.data(output.data, output.get("metadata", {}))
        if self._body.problems:
            raise SiteError(f"{self.name}: {self._body.problems[0]}")
        words = output.data.get("text/plain", "")
        if (
            drawn.startswith('<div class="picture"><svg')
            and "aria-label" not in drawn.partition(">")[2].partition(">")[0]
        ):
            drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{escape(words.removeprefix("Picture: "))}"', 1)
        return drawn

    @property
    def has_figures(self) -> bool:
        return self._body.figures > 0

    @property
    def widgets(self) -> dict[str, Any]:
        return self._page._carried(self._body.live)


@dataclass
class Shared:
    """What pages have in common, each written once into the folder of static files."""

    folder: Path
    written: set[str] = field(default_factory=set)

    def scripts(self, drawn: Drawn, name: str, up: str = "") -> str:
        """The script elements that bring a page's figures and widgets to life; `up` leads to the top of the site."""
        files = []
        if drawn.has_figures:
            from plotly.offline import get_plotlyjs

            files.append(self._write("plotly.min.js", get_plotlyjs))
        widgets = drawn.widgets
        if widgets["models"]:
            modules = []
            for module in widgets["modules"]:
                said = _script(module)
                modules.append(hashlib.sha256(said.encode()).hexdigest()[:12])
                line = f'(window.labkitModules ??= {{}})["{modules[-1]}"] = {said};\n'
                files.append(self._write(f"widgets/module-{modules[-1]}.js", lambda line=line: line))
            line = f"window.labkitWidgets = {_script(widgets | {'modules': modules})};\n"
            files.append(self._write(f"widgets/{name}.js", lambda: line))
        if files:
            files += ["widgets.js", self._write("page.js", (ROOT / "labkit" / "pages" / "page.js").read_text)]
        return "\n".join(f'<script src="{up}{STATIC}/{file}"></script>' for file in files)

    def _write(self, name: str, content) -> str:
        if name not in self.written:
            self.written.add(name)
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(content(), encoding="utf-8")
        return name


def _script(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# ------------------------------------------------------------------------------------------- pages made from others
def write_playground(page: Path, shared: Shared) -> None:
    """The playground into its page, as a notebook's output would be."""
    from ipywidgets import embed
    from nbformat.v4 import new_notebook, new_output

    from labkit import masks
    from labkit.pages.page import WIDGET_STATE
    from labkit.viz import playground

    widget = playground(mask=masks.prefix(3))
    bundle, _ = widget._repr_mimebundle_()
    state = embed.embed_data([widget], drop_defaults=False)["manager_state"]
    drawn = Drawn(new_notebook(metadata={"widgets": {WIDGET_STATE: state}}), page)
    html = drawn.html(new_output("display_data", bundle))
    widget.close()
    scripts = shared.scripts(drawn, "playground")
    text = page.read_text(encoding="utf-8")
    if PLACE not in text:
        raise SiteError(f"docs/site/{page.name} does not say where the playground stands: {PLACE}")
    page.write_text(text.replace(PLACE, f'<div class="labkit">{html}</div>\n{scripts}'), encoding="utf-8")


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
    """Links to the assignments as files, student's version and solution, below docs/site/assignments.md."""
    from labkit.notebooks import title_of

    page = source / "assignments.md"
    lines = [page.read_text(encoding="utf-8")]
    for student in sorted((ROOT / "notebooks" / "assignments" / "student").glob("*.ipynb")):
        lines.append(f"## {escape(title_of(student))}\n")
        for kind, words in (("student", "the notebook to work in"), ("solution", "the solution")):
            file = ROOT / "notebooks" / "assignments" / kind / student.name
            if file.is_file():
                (source / "files" / kind).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, source / "files" / kind / file.name)
                lines.append(f"- {{download}}`{words}, {file.name} <files/{kind}/{file.name}>`")
        lines.append("")
    page.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
