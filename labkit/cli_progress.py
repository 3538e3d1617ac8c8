"""`labkit progress`: how far the reader is in the lab, from the record on this machine. Registered in labkit/cli.py."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from labkit.console import Json, print_json, print_table
from labkit.errors import LearnerError

BAR = 20  # characters


def progress(
    export: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the record: .json to back it up or move it, .md to read it."),
    ] = None,
    import_from: Annotated[
        str | None, typer.Option("--import", metavar="FILE", help="Merge a record that was exported as .json.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the record, after a confirmation.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --clear: do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Show your progress in the notebooks.

    Counts cells run, predictions written and explained, and points in assignments. The record is one file on this
    machine and is not sent anywhere. LABKIT_PROGRESS=off disables it; LABKIT_PROGRESS=FILE stores it in another file.

    Example: labkit progress --export journal.md
    """
    from labkit.learner import record, summary

    path = record.place()
    if (export is not None) + (import_from is not None) + clear > 1:
        raise LearnerError("give one of --export, --import and --clear at a time")
    if yes and not clear:
        raise LearnerError("--yes answers the question of --clear, which was not given")
    if import_from is not None:
        _import(Path(import_from).expanduser())
    if clear:
        _clear(path, yes)
    kept = record.read()
    if export is not None:
        _export(kept, Path(export).expanduser())
    rows, graded = summary.notebooks(kept), summary.assignments(kept)
    after = summary.going_on(rows)
    if as_json:
        print_json(
            {"file": str(path) if path else None, "notebooks": [asdict(each) for each in rows],
             "assignments": [asdict(each) for each in graded], "next": after.name if after else None}
        )  # fmt: skip
        return
    print_table(
        ("notebook", "", "cells run", "predicted", "explained"),
        [
            (each.name, _bar(each.share), f"{each.cells_run} of {each.cells}", _of(each.predicted, each.boxes),
             _of(each.explained, each.boxes))
            for each in rows
        ],
    )  # fmt: skip
    if graded:
        print()
        points = [(each.name, each.title, _bar(each.share), f"{each.points} of {each.out_of}") for each in graded]
        print_table(("assignment", "", "", "points"), points)
    print()
    print(f"Next: notebooks/{after.name}.ipynb" if after else "You have run every cell of the tour.")
    print(f"Kept in {path}, and nowhere else." if path else "Progress is switched off here: nothing is kept.")


def _bar(share: float) -> str:
    done = int(share * BAR)
    return "█" * done + "·" * (BAR - done)


def _of(done: int, boxes: int) -> str:
    return f"{done} of {boxes}" if boxes else "-"


def _import(path: Path) -> None:
    from labkit.learner import record

    if not path.is_file():
        raise LearnerError(f"{path} is no file; give one that `labkit progress --export FILE.json` has written")
    if record.place() is None:
        raise LearnerError(f"progress is switched off here: unset {record.VARIABLE}, then import again")
    other = record.read(path)
    record.change(lambda kept: kept.merge(other))


def _export(kept, path: Path) -> None:
    from labkit.learner import summary
    from labkit.writing import write_whole

    if path.suffix not in (".json", ".md"):
        raise LearnerError(f"{path.name} must end in .json, to keep or move the record, or in .md, to read it")
    try:
        write_whole(path.absolute(), kept.to_json() if path.suffix == ".json" else summary.as_markdown(kept))
    except OSError as error:
        raise LearnerError(f"{path} could not be written: {error.strerror or error}") from error


def _clear(path: Path | None, yes: bool) -> None:
    if path is None or not path.exists():
        return
    if not yes:
        typer.confirm(f"Forget everything in {path}?", abort=True)
    try:
        path.unlink()
    except OSError as error:
        raise LearnerError(f"{path} could not be removed: {error.strerror or error}") from error
