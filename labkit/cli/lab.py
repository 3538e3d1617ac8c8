"""`labkit doctor`, `models`, `cache` and `notebooks`. Registered in labkit/cli/root.py."""

from __future__ import annotations

from typing import Annotated

import typer

from labkit.cli.console import Json, report, table
from labkit.errors import LabkitError

cache_app = typer.Typer(help="List or delete the converted models.")
notebooks_app = typer.Typer(help="Run or copy the notebooks.")


def doctor(as_json: Json = False) -> None:
    """Check that this machine is ready for labkit.

    Reports versions, GPU, memory, cache, models and widgets, with a fix for each problem. Exit code 1 if a check fails.

    Example: labkit doctor --json
    """
    from labkit.doctor import diagnose

    findings = diagnose()
    cells = [(finding.status, finding.name, finding.detail, finding.cure) for finding in findings]
    report(as_json, [vars(finding) for finding in findings], table(("", "what", "found", "cure"), cells))
    raise typer.Exit(1 if any(finding.status == "fail" for finding in findings) else 0)


def models(as_json: Json = False) -> None:
    """List the registered models, and whether they are ready for offline use.

    Example: labkit models
    """
    from labkit.models import available

    rows = available()
    shortened = [
        row | {
            "parameters": f"{row['parameters'] / 1e6:,.1f} M",
            "window": row["window"] or "-",
            "licence": row["licence"].partition(" (")[0],
            "ready": "yes" if row["ready"] else "no",
        }
        for row in rows
    ]  # fmt: skip
    header = ("name", "family", "parameters", "layers", "window", "licence", "from", "offline", "")
    report(as_json, rows, table(header, [tuple(row.values()) for row in shortened]))


@cache_app.command("list")
def cache_list(as_json: Json = False) -> None:
    """List the converted models in the cache.

    The files of each model are checked against their sha256.

    Example: labkit cache list
    """
    from labkit.models.cache import cache_dir, entries

    models = entries()
    cells = [(entry["name"], f"{entry['bytes'] / 1e6:,.0f} MB", entry["problem"] or "ready") for entry in models]
    folder = {"folder": cache_dir(), "entries": models}
    report(as_json, folder, table((f"in {cache_dir()}", "size", ""), cells))


@cache_app.command("clear")
def cache_clear(
    name: Annotated[str | None, typer.Argument(help="Name of one model. Default: all.")] = None, as_json: Json = False
) -> None:
    """Delete converted models from the cache.

    The next load of such a model converts it again.

    Example: labkit cache clear gemma3-270m
    """
    from labkit.models.cache import clear

    deleted = clear(name)
    if name is not None and not deleted:
        raise LabkitError(f"there is no converted model {name!r}; labkit cache list shows them")
    names, size = ", ".join(entry["name"] for entry in deleted), sum(entry["bytes"] for entry in deleted)
    text = f"deleted {names or 'nothing'} ({size / 1e6:,.0f} MB)"
    report(as_json, {"deleted": deleted}, text)


@notebooks_app.command("run")
def notebooks_run(
    paths: Annotated[list[str] | None, typer.Argument(help="Notebooks, folders or names. Default: all.")] = None,
    output_dir: Annotated[str | None, typer.Option(help="Folder for the executed copies.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit for a cell, in seconds.", min=1)] = 600,
    profile: Annotated[str | None, typer.Option(help="Profile: ci, laptop, colab or gpu.")] = None,
    as_json: Json = False,
) -> None:
    """Execute notebooks without a browser.

    Stops at the first notebook that fails.

    Example: labkit notebooks run 00_start_here --profile ci
    """
    from labkit import notebooks

    runs = notebooks.run(paths or None, output_dir=output_dir, timeout=timeout, profile=profile)
    cells = [(run.path.name, run.cells, f"{run.seconds:.1f}") for run in runs]
    report(as_json, [run._asdict() for run in runs], table(("notebook", "cells", "seconds"), cells))


@notebooks_app.command("copy")
def notebooks_copy(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder for the copies.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite notebooks that differ.")] = False,
    as_json: Json = False,
) -> None:
    """Copy the notebooks to a folder.

    Example: labkit notebooks copy my-lab
    """
    from labkit import notebooks

    written = notebooks.copy(folder, force=force)
    report(as_json, written, f"{len(written)} files written to {folder}")
