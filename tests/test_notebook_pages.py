"""Pages of notebooks: complete, without a network, written whole or not at all."""

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

pytest.importorskip("nbconvert")
pytest.importorskip("latex2mathml")

import numpy as np  # noqa: E402

from labkit import cli, notebooks, pages, viz  # noqa: E402
from labkit.errors import LabkitError, NotebookError  # noqa: E402
from labkit.pages.outside import addresses  # noqa: E402
from labkit.pages.page import PLOTLY, WIDGET, WIDGET_STATE, render  # noqa: E402

PICTURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="three cells"><rect width="9" height="9"/></svg>'
)
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


def shown(**data):
    """A code cell that was executed, with one output: `shown(text_html="<b>hi</b>")`."""
    data = {name.replace("__", "/", 1).replace("_", "-"): value for name, value in data.items()}
    return executed("show()", new_output("execute_result", data, execution_count=1))


def of_kind(data):
    return executed("show()", new_output("display_data", data))


def executed(source, *outputs):
    return new_code_cell(source, execution_count=1, outputs=list(outputs))


def page(*cells, metadata=None, name="lesson.ipynb", folder=".", links=None):
    return render(new_notebook(cells=list(cells), metadata=metadata or {}), Path(folder) / name, links or {})


def write(path, *cells):
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=list(cells)), path)
    return path


def figure():
    return json.loads(viz.mask_figure(np.tril(np.ones((3, 3), bool)), ["<b>a", "&", '"c"']).to_json())


# ---- what a page shows ---------------------------------------------------------------------------------------------


def test_page_has_the_notebooks_title_language_text_and_contents():
    made = page(
        new_markdown_cell("# Masks & more"), new_markdown_cell("## One `x`\n\n*text*"), new_markdown_cell("## Two")
    )
    assert '<html lang="en">' in made.html and "<title>Masks &amp; more</title>" in made.html
    assert '<h2 id="One-x">One <code>x</code></h2>' in made.html and "<em>text</em>" in made.html
    assert '<a href="#One-x">One x</a>' in made.html and '<a href="#Two">Two</a>' in made.html


def test_headings_of_one_name_get_anchors_of_their_own():
    made = page(*(new_markdown_cell("## Your turn") for _ in range(3)))
    assert [f'id="{name}"' in made.html for name in ("Your-turn", "Your-turn-2", "Your-turn-3")] == [True] * 3


def test_plotly_figure_is_carried_as_data_with_one_copy_of_the_library():
    made = page(*(of_kind({PLOTLY: figure(), "text/html": "<p>not me</p>"}) for _ in range(2)))
    assert made.figures == 2 and made.html.count('<figure class="plotly sized">') == 2
    assert made.html.count("* plotly.js v") == 1 and "not me" not in made.html
    data = made.html.split('<script type="application/json">')[1].split("</script>")[0]
    assert json.loads(data) == figure()
    assert 'aria-label="Attention mask: 3 queries and 3 keys, 6 of 9 cells allowed' in made.html


def test_page_without_figures_does_not_carry_the_library():
    assert len(page(new_markdown_cell("# Short")).html) < 60_000


def test_widget_is_replaced_by_the_picture_beside_it():
    made = page(of_kind({WIDGET: {"model_id": "m"}, "image/svg+xml": PICTURE, "text/plain": "Picture: three"}))
    assert PICTURE in made.html and "in the running notebook it can be moved" in made.html
    assert (made.widgets, made.live, made.problems) == (1, 0, [])
    assert "widget-view" not in made.html


def test_widget_without_a_picture_becomes_a_sentence_and_is_reported():
    made = page(of_kind({WIDGET: {"model_id": "m"}, "text/plain": "IntSlider(value=3)"}))
    assert "left no picture" in made.html and "IntSlider(value=3)" in made.html
    assert made.problems == ["a widget left no picture of itself: IntSlider"]


@pytest.fixture
def alive():
    """A page with a labkit widget that needs no kernel, as the notebook stores it."""
    svg = viz.svg.Svg(PICTURE, "three cells")
    widget = viz.frames.Frames([svg, svg], "step", ["one", "two"], ["</script><b>", "2"])
    state = {"state": widget.get_state(), "model_name": "AnyModel", "model_module": "anywidget"}
    metadata = {"widgets": {WIDGET_STATE: {"state": {"m": state}, "version_major": 2, "version_minor": 0}}}
    return page(of_kind({WIDGET: {"model_id": "m"}, "image/svg+xml": PICTURE}), metadata=metadata)


def test_widget_that_needs_no_kernel_lives_on_with_its_picture_until_then(alive):
    assert (alive.widgets, alive.live) == (1, 1)
    assert f'<div class="widget" data-widget="m"><div class="picture">{PICTURE}</div></div>' in alive.html
    carried = json.loads(alive.html.split("id='labkit-widgets'>")[1].split("</script>")[0])
    assert carried["models"]["m"]["values"]["sentences"] == ["</script><b>", "2"]
    assert "export default" in carried["modules"][0]["esm"] and ".labkit-frames" in carried["modules"][0]["css"]


def test_widget_is_told_that_no_python_will_answer():
    from labkit.viz.mask_playground import Playground, playground

    widget = playground("the cat sat")
    state = {"state": widget.get_state(), "model_name": "AnyModel", "model_module": "anywidget"}
    assert state["state"]["_anywidget_id"] == f"{Playground.__module__}.{Playground.__qualname__}"
    made = page(of_kind({WIDGET: {"model_id": "m"}}), metadata={"widgets": {WIDGET_STATE: {"state": {"m": state}}}})
    carried = json.loads(made.html.split("id='labkit-widgets'>")[1].split("</script>")[0])
    assert made.live == 1 and carried["models"]["m"]["values"]["live"] is False


def test_bytes_of_a_widget_travel_with_it():
    from ipywidgets import embed

    from labkit.viz.explorer import attention_explorer

    widget = attention_explorer(np.full((1, 2, 3, 3), 1 / 3))
    kept = embed.embed_data([widget], drop_defaults=False)["manager_state"]
    made = page(of_kind({WIDGET: {"model_id": widget.model_id}}), metadata={"widgets": {WIDGET_STATE: kept}})
    carried = json.loads(made.html.split("id='labkit-widgets'>")[1].split("</script>")[0])
    buffers = carried["models"][widget.model_id]["buffers"]
    assert made.live == 1 and ["pictures", "bytes"] in [buffer["path"] for buffer in buffers]


def test_html_with_scripts_stays_as_it_is():
    view = '<div id="v"></div><script>document.getElementById("v").textContent = "drawn" && 1 < 2;</script>'
    assert view in page(shown(text__html=view)).html


def test_raster_pictures_are_inside_and_have_words():
    made = page(of_kind({"image/png": PNG, "text/plain": "<Figure size 640x480>"}))
    assert f'<img src="data:image/png;base64,{PNG}" alt="Picture made by the code above">' in made.html


def test_text_is_escaped_and_terminal_colours_become_styles():
    made = page(
        executed(
            "x < 1",
            new_output("stream", name="stdout", text="<b>&\n"),
            new_output("error", ename="E", evalue="v", traceback=["\x1b[31mE\x1b[0m: <v>"]),
        )
    )
    assert "&lt;b&gt;&amp;</pre>" in made.html and '<span class="ansi-red-fg">E</span>: &lt;v&gt;' in made.html


def test_formulas_become_mathml_and_unknown_ones_stay_readable():
    made = page(new_markdown_cell(r"Say $p_k$, then $$\frac1V\sum_k p_k \ge 0$$ and $\nosuchmacro{1}$."))
    assert "<msub><mi>p</mi><mi>k</mi></msub>" in made.html and 'display="block"' in made.html
    assert r"<code>\nosuchmacro{1}</code>" in made.html and "$" not in made.html.split("<main")[1].split("<footer")[0]
    assert made.problems == [r"the formula \nosuchmacro{1} is shown as LaTeX"]


def test_code_that_mentions_dollars_is_no_formula():
    made = page(new_markdown_cell("`$HOME` and `$x$`"))
    assert "<code>$HOME</code>" in made.html and "<math" not in made.html


def test_setup_cell_is_folded():
    made = page(executed(notebooks.FIRST_CELL), executed("1 + 1"))
    assert made.html.count("<details><summary>Setting up the notebook") == 1


def test_links_between_exported_notebooks_lead_to_their_pages():
    made = page(
        new_markdown_cell("[next](02_b.ipynb#part) [other](03_c.ipynb) [web](https://example.org/02_b.ipynb)"),
        links={"02_b.ipynb": "02_b.html"},
    )
    assert 'href="02_b.html#part"' in made.html and 'href="03_c.ipynb"' in made.html
    assert 'href="https://example.org/02_b.ipynb"' in made.html and made.problems == []


# ---- without a network ---------------------------------------------------------------------------------------------


def test_nothing_in_a_page_is_fetched_and_its_policy_forbids_it(alive):
    made = page(of_kind({PLOTLY: figure()}), new_markdown_cell("[a link](https://example.org) is not fetched"))
    for html in (made.html, alive.html):
        assert addresses(html.split("<main")[0]) == addresses(html.split("<main")[1].split("<script>")[0]) == []
        policy = html.split('Content-Security-Policy" content="')[1].split('"')[0]
        assert "default-src 'none'" in policy and "http" not in policy and "*" not in policy


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//cdn.example/x.js">',
        "<IMG SRC=' http://cdn.example/x.js'>",
        "<style>@import 'https://cdn.example/x.js';</style>",
        '<p style="background: url(https://cdn.example/x.js)">',
        '<script type="module">import "https://cdn.example/x.js"</script>',
        '<svg><image xlink:href="https://cdn.example/x.js"/></svg>',
    ],
)
def test_what_would_be_fetched_is_found_and_reported(html):
    found = addresses(html)
    assert len(found) == 1 and found[0].endswith("//cdn.example/x.js")
    problems = page(shown(text__html=html)).problems
    assert problems == [f"something from {found[0]} is not in the page"]


def test_links_and_namespaces_are_not_fetched():
    assert (
        addresses(f'<a href="https://example.org">x</a>{PICTURE}<script>const u = "https://example.org"</script>') == []
    )


def test_pictures_of_markdown_come_into_the_page_or_are_reported(tmp_path):
    (tmp_path / "dot.svg").write_text(PICTURE)
    text = '![a dot](dot.svg) ![gone](gone.png) ![far](https://example.org/f.png) <img src="dot.svg" alt="again">'
    made = page(new_markdown_cell(text), folder=tmp_path)
    assert made.html.count('src="data:image/svg+xml;base64,') == 2
    assert '<a href="https://example.org/f.png">Picture: far</a>' in made.html
    assert [problem.split(" ")[2] for problem in made.problems] == ["gone.png", "https://example.org/f.png"]


def test_attachments_come_into_the_page():
    cell = new_markdown_cell("![dot](attachment:dot.png)", attachments={"dot.png": {"image/png": PNG}})
    assert f'<img src="data:image/png;base64,{PNG}" alt="dot"' in page(cell).html


# ---- files ---------------------------------------------------------------------------------------------------------


def test_every_notebook_becomes_a_page_in_the_folder(tmp_path):
    write(tmp_path / "in/01_a.ipynb", new_markdown_cell("# A\n\n[b](02_b.ipynb)"))
    write(tmp_path / "in/02_b.ipynb", executed("1"))
    made = pages.export([tmp_path / "in"], tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["01_a.html", "02_b.html"]
    assert [p.path.stat().st_size for p in made] == [p.bytes for p in made]
    assert 'href="02_b.html"' in (tmp_path / "out/01_a.html").read_text()


@pytest.mark.parametrize("execute", [False, True])
def test_unusable_notebooks_are_refused_before_anything_is_written(tmp_path, execute):
    good = write(tmp_path / "good.ipynb", executed("1"))
    (tmp_path / "broken.ipynb").write_text("{not json")
    (tmp_path / "notes.txt").write_text("hello")
    twin = write(tmp_path / "twin/good.ipynb", executed("1"))
    (tmp_path / "file").write_text("")
    cases = [
        ([good, tmp_path / "gone.ipynb"], NotebookError, "gone.ipynb is neither"),
        ([good, tmp_path / "notes.txt"], NotebookError, "notes.txt is neither"),
        ([good, tmp_path / "broken.ipynb"], NotebookError, "broken.ipynb cannot be read as a notebook"),
        ([good, twin], NotebookError, "would both become good.html"),
        ([], NotebookError, "no notebook to export"),
    ]
    for given, kind, message in cases:
        with pytest.raises(kind, match=message):
            pages.export(given, tmp_path / "out", execute=execute)
    with pytest.raises(LabkitError, match="file is a file"):
        pages.export([good], tmp_path / "file", execute=execute)
    assert not (tmp_path / "out").exists()


def test_notebook_that_was_never_executed_is_refused_unless_there_is_nothing_to_execute(tmp_path):
    cleared = write(tmp_path / "cleared.ipynb", new_markdown_cell("# A"), new_code_cell("1 + 1"))
    with pytest.raises(NotebookError, match="cleared.ipynb has no outputs.*--execute"):
        pages.export([cleared], tmp_path)
    prose = write(tmp_path / "prose.ipynb", new_markdown_cell("# A"), new_code_cell("  "))
    assert pages.export([prose], tmp_path)[0].path == tmp_path / "prose.html"


@pytest.mark.end_to_end
def test_execute_runs_the_notebook_and_leaves_the_file_alone(tmp_path, capfd):
    notebook = write(tmp_path / "sum.ipynb", new_code_cell("print(40 + 2)"))
    before = notebook.read_bytes()
    [made] = pages.export([notebook], tmp_path / "out", execute=True)
    assert ">42</pre>" in made.path.read_text() and made.notebook == notebook
    assert notebook.read_bytes() == before

    write(notebook, new_code_cell("1 / 0"))
    with pytest.raises(NotebookError, match="sum.ipynb, cell 1 .*ZeroDivisionError"):
        pages.export([notebook], tmp_path / "failed", execute=True)
    assert not (tmp_path / "failed").exists()


def test_page_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    notebook = write(tmp_path / "a.ipynb", new_markdown_cell("# New"))
    (tmp_path / "a.html").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LabkitError, match="a.html could not be written: No space left"):
        pages.export([notebook], tmp_path)
    assert (tmp_path / "a.html").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.html", "a.ipynb"]


def test_missing_package_is_named_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nbconvert", None)
    with pytest.raises(LabkitError, match=r"need nbconvert. Install .*: pip install 'labkit-bidirectional\[viz\]'"):
        pages.export([write(tmp_path / "a.ipynb", new_markdown_cell("# A"))], tmp_path)


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(capfd):
    def run(*arguments):
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        return exit_.value.code, *capfd.readouterr()

    return run


@pytest.mark.parametrize("name", [["export"], ["notebooks", "export"]], ids=" ".join)
def test_command_writes_pages_and_says_so(command, tmp_path, name):
    notebook = write(tmp_path / "a.ipynb", shown(text__html='<img src="https://cdn.example/x.png">'))
    code, out, err = command(*name, notebook, "--output-dir", tmp_path / "site", "--json")
    [made] = json.loads(out)
    assert code == 0 and made["path"] == str(tmp_path / "site" / "a.html") and made["figures"] == 0
    assert err == "labkit: warning: a.ipynb: something from https://cdn.example/x.png is not in the page\n"
    code, out, _ = command(*name, notebook, "--output-dir", tmp_path / "site")
    assert code == 0 and str(tmp_path / "site" / "a.html") in out


def test_command_refuses_with_one_line_and_code_2(command, tmp_path):
    code, out, err = command("export", tmp_path / "gone.ipynb")
    assert (code, out) == (2, "") and err.startswith("labkit: ") and err.count("\n") == 1
    cleared = write(tmp_path / "cleared.ipynb", new_code_cell("1"))
    code, _, err = command("export", cleared, "--output-dir", tmp_path)
    assert code == 2 and "--execute" in err


@pytest.mark.parametrize("name", [["export"], ["notebooks", "export"], ["demo"]], ids=" ".join)
def test_help_has_an_example(command, name):
    code, out, _ = command(*name, "--help")
    assert code == 0 and "Example: labkit" in out and "--json" in out


@pytest.mark.end_to_end
@pytest.mark.parametrize("path", notebooks.list_notebooks(), ids=lambda path: path.stem)
def test_every_notebook_of_the_tour_becomes_a_page_without_a_problem(path, tmp_path):
    [made] = pages.export([path], tmp_path)
    assert made.problems == []
    assert made.bytes < 12_000_000
