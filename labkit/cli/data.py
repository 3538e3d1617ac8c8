"""`labkit data`: the embedded data sets, and checks of a user's own. Registered in labkit/cli/root.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.console import Json, print_json, print_table

app = typer.Typer(help="List and check data sets.")

SHOWN = 20  # faults of a file that are printed
TagColumn = Annotated[
    int | None, typer.Option(help="Number of the tag column in a CoNLL file, counted from 1. Default: the last column.")
]


@app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the data sets that come with labkit.

    Shows content, number of records, licence and path.

    Example: labkit data list
    """
    from labkit.datasets.catalogue import CATALOGUE

    if as_json:
        fields = ("name", "what", "licence", "path", "count")
        print_json([{field: getattr(data, field) for field in fields} for data in CATALOGUE])
    else:
        counts = ["-" if data.count is None else f"{data.count:,}" for data in CATALOGUE]
        rows = [(d.name, d.what, n, d.licence, str(d.path)) for d, n in zip(CATALOGUE, counts, strict=True)]
        print_table(("name", "what", "records", "licence", "path"), rows)


@app.command("check")
def data_check(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Your own files: the splits of one data set.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task of the files: qa, ner, classify or embed.")] = None,
    tag_column: TagColumn = None,
    as_json: Json = False,
) -> None:
    """Check your labelled files for errors.

    Reports rows that cannot be read, duplicates, contradictions, invisible characters, and examples that occur in two
    splits. Without FILE, compares the sha256 of the data sets that come with labkit with their cards. Exit code 1 if
    there is a fault.

    Example: labkit data check train.json dev.json --task qa
    """
    if files and task:
        _check_files(files, task, tag_column, as_json)
    if files or task or tag_column is not None:
        raise typer.BadParameter("FILE and --task go together: labkit data check train.json dev.json --task qa")
    from labkit.datasets.catalogue import CATALOGUE, check

    faults = {data.name: check(data) for data in CATALOGUE}
    if as_json:
        print_json([{"name": name, "ok": not messages, "faults": messages} for name, messages in faults.items()])
    else:
        for name, messages in faults.items():
            print("\n".join(messages) or f"{name}: in order")
    raise typer.Exit(1 if any(faults.values()) else 0)


def _check_files(files: list[Path], task: str, tag_column: int | None, as_json: bool) -> None:
    """Check the files together, print, and exit."""
    from labkit.datasets.checks import check_files
    from labkit.datasets.files import printable

    reports = check_files(task, files, tag_column)
    if as_json:
        print_json([report.to_dict() for report in reports])
    else:
        cells = [(r.path, f"{r.n:,}", f"{len(r.faults):,}", f"{len(r.warnings):,}") for r in reports]
        print_table(("file", "examples", "faults", "warnings"), cells)
        for report in reports:
            counts = ", ".join(f"{printable(name)} {count:,}" for name, count in report.counts.items())
            print(f"\n{report.path}: {counts or 'nothing counted'}")
            for kind, findings in (("note", report.notes), ("fault", report.faults), ("warning", report.warnings)):
                for finding in findings[:SHOWN]:
                    print(f"{kind}: {finding}")
                if len(findings) > SHOWN:
                    print(f"{kind}: and {len(findings) - SHOWN:,} more, which --json prints")
    raise typer.Exit(0 if all(report.ok for report in reports) else 1)
