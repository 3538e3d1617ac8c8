"""`labkit data`: the embedded data sets, and checks of a user's own. Registered in labkit/cli/root.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.console import Json, report, table

app = typer.Typer(help="List and check data sets.")

SHOWN = 20  # faults of a file that are printed
TagColumn = Annotated[
    int | None,
    typer.Option(help="Number of the tag column in a CoNLL file, from 1. Default: the column with entity tags."),
]


@app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the data sets that come with labkit.

    Example: labkit data list
    """
    from labkit.datasets.embedded import SHIPPED

    fields = ("name", "what", "count", "licence", "path")
    rows = [{field: getattr(data, field) for field in fields} for data in SHIPPED]
    cells = [tuple("-" if cell is None else cell for cell in row.values()) for row in rows]
    report(as_json, rows, table(("name", "what", "records", "licence", "path"), cells))


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
    from labkit.datasets.checks import check_files
    from labkit.datasets.embedded import SHIPPED, check
    from labkit.datasets.files import printable

    if bool(files) != bool(task) or (tag_column is not None and not files):
        raise typer.BadParameter("FILE and --task go together: labkit data check train.json dev.json --task qa")
    if files:
        reports = check_files(task, files, tag_column)
    else:
        faults_of = {data.name: check(data) for data in SHIPPED}
        reports = [{"name": name, "ok": not faults, "faults": faults} for name, faults in faults_of.items()]
    lines = []
    for found in reports:
        if files:
            counts = ", ".join(f"{printable(label)} {count:,}" for label, count in found["counts"].items())
            lines.append(f"{found['path']}: {found['n']:,} examples{f' ({counts})' if counts else ''}")
        else:
            lines.append(f"{found['name']}: {'in order' if found['ok'] else 'damaged'}")
        for kind in ("fault", "warning"):
            findings = found.get(f"{kind}s", [])
            lines += [f"{kind}: {finding}" for finding in findings[:SHOWN]]
            if len(findings) > SHOWN:
                lines.append(f"{kind}: and {len(findings) - SHOWN:,} more, which --json prints")
    report(as_json, reports, *lines)
    raise typer.Exit(0 if all(found["ok"] for found in reports) else 1)
