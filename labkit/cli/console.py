"""What the commands of `labkit` share: options by the same name, and how results are printed."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from labkit.errors import LabkitError
from labkit.files import is_standard_output

Options = dict[str, tuple[Any, Any, str]]  # by name: annotation, default, and what it needs
REQUIRED = inspect.Parameter.empty  # in place of a default
Text, Whole, Real = str | None, int | None, float | None


def option(kind: Any, text: str, *names: str, default: Any = None, needs: str = "", **settings: Any) -> Any:
    """An entry of `Options`, with `text` as its help.

    `needs`: the option without which it has no effect, and the values of that with which it has, such as
    "--method lora".
    """
    return Annotated[kind, typer.Option(*names, help=text, **settings)], default, needs


def flag(name: str, text: str, **settings: Any) -> Any:
    return option(bool, text, name, default=False, **settings)


JSON = flag("--json", "Print JSON to standard output.")
Json = JSON[0]
Name = Annotated[str, typer.Argument(metavar="NAME_OR_PATH", help="A registered name, a hub id or a local folder.")]
Attn = Annotated[str | None, typer.Option(help="Attention backend: eager, sdpa or flex_attention.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: as stored.")]


def options_of(settings: type, *, typed: dict[str, Any] | None = None, defaults: bool = True) -> Options:
    """The options that a dataclass declares: its fields with a `text` in their metadata, and the limits there.

    `typed`: the types of fields that are typed in another form. Without `defaults`, the default of all is None.
    """
    kinds, options = get_type_hints(settings) | (typed or {}), {}
    for field in [field for field in fields(settings) if field.metadata]:
        kind, default = (kinds[field.name], field.default) if defaults else (kinds[field.name] | None, None)
        names = [_dashed(field.name)] if kind is bool else []  # or typer adds --no-...
        limits = dict(field.metadata)
        options[field.name] = option(kind, limits.pop("text"), *names, default=default, **limits)
    return options


def add_command(
    app: typer.Typer, name: str, text: str, options: Options, run: Callable[[dict[str, Any]], None]
) -> None:
    """Add a command with this help and these options. It calls `run` with a dict of what was given.

    An option that was given without the one that it needs is refused.
    """

    def command(**given: Any) -> None:
        for dependent, (_, default, needs) in options.items():
            other, *values = needs.split() or [""]
            value = given.get(other.removeprefix("--").replace("-", "_"))
            if given[dependent] != default and needs and not (value in values if values else value):
                what = " ".join([other, " or ".join(values)]).strip()
                raise LabkitError(f"{_dashed(dependent)} has an effect only with {what}; leave it out, or give both")
        try:
            run(given)
        except KeyboardInterrupt:
            if "resume" in given and given.get("output") != "-":  # standard output cannot be resumed
                print("labkit: interrupted; the same command with --resume continues", file=sys.stderr)
            raise

    kind = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, kind, default=default, annotation=note)
            for name, (note, default, _) in options.items()
        ]
    )
    command.__annotations__ = {name: note for name, (note, *_) in options.items()}
    app.command(name, help=text)(command)


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def aside(output: Any) -> AbstractContextManager[Any]:
    """What is printed in the block goes to standard error if the file `output` is standard output itself."""
    return redirect_stdout(sys.stderr) if output and is_standard_output(output) else nullcontext()


def waiting(what: str) -> Any:
    """A spinner on a terminal, nothing elsewhere."""
    from rich.console import Console

    return Console(stderr=True).status(what) if sys.stderr.isatty() else nullcontext()


def report(as_json: bool, value: Any, *lines: str) -> None:
    """Print `value` as JSON, with paths as text, or the lines."""
    print(*([json.dumps(value, indent=1, default=str)] if as_json else lines), sep="\n")


def table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A table as text: on a terminal fitted to its width; elsewhere each row stays on one line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(*header, box=None, pad_edge=False, header_style="bold")
    for column in grid.columns:
        column.overflow = "fold"
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 1000)
    with console.capture() as rendered:
        console.print(grid)
    return rendered.get().rstrip("\n")  # rich itself would end the process with 1 if the reader has gone
