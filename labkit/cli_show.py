"""`labkit export` and `labkit demo`: for people who only look. Registered in labkit/cli.py."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from labkit.console import Json, plain, print_json, print_table


def export(
    paths: Annotated[list[str], typer.Argument(metavar="NOTEBOOK...", help="Notebooks, folders or names.")],
    output_dir: Annotated[str, typer.Option(help="Where the pages go; this folder by default.")] = ".",
    execute: Annotated[bool, typer.Option("--execute", help="Run the notebooks first, without changing them.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds per cell, with --execute.", min=1)] = 600,
    profile: Annotated[str | None, typer.Option(help="ci, laptop, colab or gpu, with --execute.")] = None,
    as_json: Json = False,
) -> None:
    """Make one HTML page of each notebook: it opens from disk, needs no network, and its figures stay interactive.

    Example: labkit export notebooks/01_attention_and_masks.ipynb --output-dir pages
    """
    from labkit import pages

    written = pages.export(paths, output_dir=output_dir, execute=execute, timeout=timeout, profile=profile)
    for page in written:
        for problem in page.problems:
            print(f"labkit: warning: {page.notebook.name}: {problem}", file=sys.stderr)
    if as_json:
        fields = ("notebook", "path", "bytes", "figures", "widgets", "live")
        print_json([{f: plain(getattr(page, f)) for f in fields} | {"problems": page.problems} for page in written])
    else:
        rows = [(str(p.path), _size(p.bytes), str(p.figures), f"{p.live} of {p.widgets}") for p in written]
        print_table(("page", "size", "interactive figures", "interactive widgets"), rows)


def demo(
    model: Annotated[str, typer.Option(help="A registered name, a hub id or a local folder.")] = "gpt2-mini",
    port: Annotated[int | None, typer.Option(help="8866 or the next free one by default.", min=1, max=65535)] = None,
    host: Annotated[str, typer.Option(help="This machine only by default; 0.0.0.0 for a lecture room.")] = "127.0.0.1",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser window.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Fetch the page once, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Serve the mask playground and the attention explorer as a small web app, without notebooks; Ctrl-C ends it.

    Example: labkit demo --model gpt2-mini
    """
    from labkit.demo import serve

    address = serve(model=model, port=port, host=host, open_browser=not no_browser, check=check)
    if as_json:
        print_json({"address": address, "model": model, "checked": check})
    elif check:
        print(f"labkit demo: the page at {address} is in order")


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} KB"
