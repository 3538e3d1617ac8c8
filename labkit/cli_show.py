"""`labkit export` and `labkit demo`: for people who only look. Registered in labkit/cli.py."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from labkit.console import Json, plain, print_json, print_table


def export(
    paths: Annotated[list[str], typer.Argument(metavar="NOTEBOOK...", help="Notebooks, folders or names.")],
    output_dir: Annotated[str, typer.Option(help="Folder for the pages.")] = ".",
    execute: Annotated[
        bool, typer.Option("--execute", help="Execute the notebooks first. The notebook files do not change.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="With --execute: time limit for a cell, in seconds.", min=1)] = 600,
    profile: Annotated[str | None, typer.Option(help="With --execute: ci, laptop, colab or gpu.")] = None,
    as_json: Json = False,
) -> None:
    """Make one HTML page of each notebook.

    The page opens from disk, needs no network, and its figures stay interactive.

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
    port: Annotated[int | None, typer.Option(help="Default: 8866, or the next free port.", min=1, max=65535)] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. The default is this machine only; 0.0.0.0 is every network interface."
        ),
    ] = "127.0.0.1",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser window.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Request the page once, then exit.")] = False,
    as_json: Json = False,
) -> None:
    """Serve playground and explorer as a web app.

    The app shows the mask playground and the attention explorer without notebooks, for example in a lecture. Ctrl-C
    stops it.

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
