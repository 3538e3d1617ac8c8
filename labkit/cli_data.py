"""`labkit data`: the embedded data sets. Registered in labkit/cli.py."""

from __future__ import annotations

import typer

from labkit.console import Json, print_json, print_table

app = typer.Typer(help="The data sets that come with labkit.")


@app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the data sets that come with labkit: what each is, its records, its licence, where it lies.

    Example: labkit data list
    """
    from labkit.datasets.catalogue import CATALOGUE

    if as_json:
        fields = ("name", "what", "licence", "path", "count")
        print_json([{field: getattr(data, field) for field in fields} for data in CATALOGUE])
    else:
        cells = [(data.name, data.what, _counted(data.count), data.licence, str(data.path)) for data in CATALOGUE]
        print_table(("name", "what", "records", "licence", "path"), cells)


def _counted(records: int | None) -> str:
    return "-" if records is None else f"{records:,}"


@app.command("check")
def data_check(as_json: Json = False) -> None:
    """Check that every data set has the form it should have and is the file of its card (sha256).

    Exit code 1 if something is wrong.   Example: labkit data check --json
    """
    from labkit.datasets.catalogue import CATALOGUE, check

    faults = {data.name: check(data) for data in CATALOGUE}
    if as_json:
        print_json([{"name": name, "ok": not found, "faults": found} for name, found in faults.items()])
    else:
        for name, found in faults.items():
            print("\n".join(found) if found else f"{name}: in order")
    raise typer.Exit(1 if any(faults.values()) else 0)
