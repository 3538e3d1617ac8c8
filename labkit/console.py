"""What the commands of `labkit` share: options by the same name, tables, JSON, a spinner."""

from __future__ import annotations

import json
import re
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Annotated, Any

import typer

from labkit.errors import LabkitError

Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
Name = Annotated[str, typer.Argument(metavar="NAME_OR_PATH", help="A registered name, a hub id or a local folder.")]
Attn = Annotated[str | None, typer.Option(help="Attention backend: eager, sdpa or flex_attention.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: as stored.")]


def aside(output: Any) -> AbstractContextManager[Any]:
    """What is printed in the block goes to standard error if the file `output` is standard output itself."""
    from labkit.writing import is_standard_output

    return redirect_stdout(sys.stderr) if output and is_standard_output(output) else nullcontext()


def waiting(what: str) -> Any:
    """A spinner on a terminal, nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status(what) if console.is_terminal else nullcontext()


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """On a terminal fitted to its width; elsewhere each row stays on one line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in header:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    console = console if console.is_terminal else Console(width=1000)
    with console.capture() as rendered:
        console.print(table)
    print(rendered.get(), end="")  # rich itself would end the process with 1 if the reader has gone


def parts(text: str) -> list[str]:
    """a,b as ["a", "b"]"""
    return [part.strip() for part in text.split(",") if part.strip()]


def whole_numbers(option: str, text: str) -> list[int]:
    """0,2 as [0, 2]. Raises LabkitError, which names the option, for anything else."""
    given = parts(text)
    if wrong := [part for part in given if not re.fullmatch(r"-?\d+", part, re.ASCII)]:
        raise LabkitError(f"{option} is {text!r}, and {wrong[0]!r} is not a whole number; give numbers such as 0,2,4")
    return [int(part) for part in given]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))


def plain(value: Any) -> Any:
    """What JSON has a word for, as it is; the rest as text."""
    return value if isinstance(value, int | float | str | None) else str(value)
