"""The `labkit` command. Thin: each command parses, calls the library, prints, and chooses the exit code.

Exit codes: 0 done; 1 the check failed (an expectation, a leak, the doctor); 2 bad input; 70 a fault of labkit. The last
two come with one line on standard error, and with a traceback before it if LABKIT_TRACEBACK=1. An interrupted command
ends with 130, one whose reader has gone (`labkit models | head -1`) with 141. No torch is loaded before a command needs
it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer

from labkit import __version__
from labkit.cli import course as cli_course
from labkit.cli import data as cli_data
from labkit.cli import finetune as cli_finetune
from labkit.cli import fuse as cli_fuse
from labkit.cli import train as cli_train
from labkit.cli.console import Attn, Dtype, Json, Name, add_command, plain, print_json, print_table, waiting
from labkit.errors import LabkitError, is_out_of_memory
from labkit.files import os_error_in

ORDER = (  # of the commands in --help; a new command needs a place here
    "doctor", "models", "audit", "convert", "leakage", "train", "predict", "fuse", "pretrain", "notebooks", "data",
    "course", "cache",
)  # fmt: skip
EPILOG = """\
The --help of every command contains an example, and every command takes --json. The option --output - writes to
standard output.

Exit codes: 0 success; 1 a check or a run failed; 2 invalid input, or a lack of memory or disk space, with a one-line
message that says what to do; 70 an error inside labkit. LABKIT_TRACEBACK=1 prints the traceback of an error."""


class _InOrder(typer.core.TyperGroup):
    """Lists the commands in ORDER; typer would list all groups after all single commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.index)


app = typer.Typer(
    cls=_InOrder,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Learn and verify attention masks: load a model, convert it, measure the mask that each layer uses.",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(help="List or delete the converted models.")
notebooks_app = typer.Typer(help="Run or copy the notebooks.")
app.add_typer(cache_app, name="cache")
app.add_typer(notebooks_app, name="notebooks")
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_train.train_app, name="train")
app.add_typer(cli_finetune.predict_app, name="predict")
app.add_typer(cli_course.app, name="course")
add_command(app, "pretrain", cli_train.PRETRAIN_HELP, cli_train.PRETRAIN, cli_train.pretrain)
add_command(app, "fuse", cli_fuse.HELP, cli_fuse.OPTIONS, cli_fuse.fuse)

LEAKAGE_VOCABULARY = 64  # few tokens: what chance can do is seen early
FAULT, INTERRUPTED, READER_GONE = 70, 130, 141  # exit codes: of sysexits.h, and of a shell for SIGINT and SIGPIPE
LARGEST = 2**32  # beyond what any option can mean
TRACEBACK = "LABKIT_TRACEBACK"  # the variable that asks for the traceback of an error
_UsageError: Any = typer.BadParameter.__base__  # click's, or the one in typer's own copy of click


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process; `arguments` default to those of the process, none means --help."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    warnings.showwarning = _one_line_warning
    command = typer.main.get_command(app)
    _require_numbers(command)
    try:
        code = command.main(arguments, prog_name="labkit", standalone_mode=False)
        print(end="", flush=True)  # a full disk, or a reader that has gone, shows here and not after the end
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            error = error.__context__  # which typer has made an exit with 1, as if a check had failed
        if isinstance(error, SystemExit):
            raise
        code = _explain(error, arguments)
        try:
            print(end="", flush=True)
        except OSError:  # what is left can go nowhere, and must not fail once more when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: BaseException, arguments: list[str]) -> int:
    """Print one line on standard error that says what to do about `error`; returns the exit code."""
    if os.environ.get(TRACEBACK) and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    code, cause = 2, os_error_in(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and error.filename is None:
        return READER_GONE
    if isinstance(error, _UsageError):
        where = f" (see {error.ctx.command_path} --help)" if getattr(error, "ctx", None) else ""
        message = error.format_message().rstrip(".") + where
    elif isinstance(error, LabkitError):
        message = str(error)
    elif isinstance(error, typer.Abort):
        message = "interrupted"
    elif cause is not None:
        message = f"{cause.filename or 'a file, or standard output,'} could not be read or written: {cause.strerror}"
    elif "Could not determine home directory" in str(error):  # pathlib's words
        paths = [argument for argument in arguments if argument.startswith("~")]
        message = f"{' or '.join(paths) or 'a path'} begins with ~, and this machine has no such user; write it in full"
    elif re.search("surrogates not allowed|not valid UTF-8|embedded null byte", str(error)):
        message = f"a name or a text holds half of a surrogate pair, a NUL, or bytes that are not UTF-8 ({error})"
    elif is_out_of_memory(error):
        message = "the memory is full: choose a smaller model, fewer rows at once or shorter ones"
    else:
        code, command = FAULT, " ".join(itertools.takewhile(str.isalpha, arguments))
        message = (
            f"{type(error).__name__} in `labkit {command}`: {error}. This is a fault of labkit: please report it; "
            f"{TRACEBACK}=1 shows where"
        )
    line = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))  # a file name may clear the screen
    print(f"labkit: {line}", file=sys.stderr)
    return code


def _require_numbers(command: Any) -> None:
    """Let no command run with a number that no option can mean: NaN, infinite, or LARGEST and beyond."""
    for each in getattr(command, "commands", {}).values():
        _require_numbers(each)
    if (run := command.callback) is not None:

        @functools.wraps(run)
        def checked(**given: Any) -> Any:
            for name, value in given.items():
                if isinstance(value, int | float) and not abs(value) < LARGEST:
                    option = f"--{name.replace('_', '-')}"
                    raise LabkitError(f"{option} is {value:g}; give a number between -{LARGEST:,} and {LARGEST:,}")
            return run(**given)

        command.callback = checked


def _print_version(asked: bool) -> bool:
    if asked:
        print(__version__)
        raise typer.Exit()
    return asked


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check that this machine is ready for labkit.

    Reports versions, GPU, memory, cache, models and widgets, with a fix for each problem. Exit code 1 if a check fails.

    Example: labkit doctor --json
    """
    from labkit.doctor import diagnose, healthy

    findings = diagnose()
    if as_json:
        print_json([finding.to_dict() for finding in findings])
    else:
        print_table(("", "what", "found", "cure"), [(f.status, f.name, f.detail, f.cure) for f in findings])
    raise typer.Exit(0 if healthy(findings) else 1)


@app.command()
def models(as_json: Json = False) -> None:
    """List the registered models.

    Shows family, parameters, layers, window, licence, origin, and whether the model is ready for offline use.

    Example: labkit models
    """
    from labkit.models import available

    rows = available()
    if as_json:
        print_json(rows)
        return
    header = ("name", "family", "parameters", "layers", "window", "licence", "from", "ready offline")
    cells = [
        (
            row["name"],
            row["family"],
            _in_millions(row["parameters"]),
            str(row["layers"] or "-"),
            str(row["window"] or "-"),
            row["licence"].partition(" (")[0],
            row["origin"],
            f"{'yes' if row['ready'] else 'no'}, {row['note']}",
        )
        for row in rows
    ]
    print_table(header, cells)


@app.command()
def audit(
    name: Name,
    attn: Attn = None,
    dtype: Dtype = None,
    expect: Annotated[
        str | None, typer.Option(help="causal or bidirectional: exit with 1 if the model is not, or has problems.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer kinds of input, which is faster.")] = False,
    reference: Annotated[str | None, typer.Option(help="Original model: check that only the mask differs.")] = None,
    as_json: Json = False,
) -> None:
    """Measure which mask each layer uses.

    The mask is measured from the behaviour of the model, not read from its configuration. Of an encoder, the body is
    measured.

    Example: labkit audit ./my-encoder --expect bidirectional
    """
    if expect not in (None, "causal", "bidirectional"):
        raise LabkitError(f"--expect is {expect!r}; give causal or bidirectional")
    model = _any_model(name, attn, dtype)
    original = _any_model(reference, attn, dtype) if reference else None
    from labkit.auditing import measure

    with waiting(f"measuring {name}"):
        report = measure.audit(model, reference=original, quick=quick)
    print(report.to_json() if as_json else str(report))
    if expect and (why := report.failure(expect)):
        print(f"labkit: {name} was expected to be {expect} and {why}", file=sys.stderr)
        raise typer.Exit(1)


def _any_model(name: str, attn: str | None, dtype: str | None) -> Any:
    """A language model, or the body of an encoder, which is reported."""
    from labkit.errors import ModelError
    from labkit.models import load

    try:
        return load(name, attn=attn, dtype=dtype).model
    except ModelError as error:
        if error.kind != "encoder":
            raise
        body = load(name, attn=attn, dtype=dtype, task="base").model
        print(f"labkit: {name} is an encoder: its body, {type(body).__name__}, is measured", file=sys.stderr)
        return body


@app.command()
def convert(
    name: Name,
    output_dir: Annotated[str, typer.Option(help="A new or empty folder.")],
    window: Annotated[str, typer.Option(help="Window of the local layers: keep, halve or global.")] = "keep",
    layers: Annotated[str, typer.Option(help="Layers to unmask: all, middle-third, or numbers such as 0,1,2.")] = "all",
    attn: Attn = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Make a model bidirectional and save it.

    The folder contains a model card. Plain transformers loads it, except where it cannot express the masks: after a
    choice of --layers, and for a few families. The command reports this; labkit.load then loads the folder.

    Example: labkit convert gemma3-270m --output-dir gemma-encoder --window keep
    """
    from labkit.models import export, load

    export.require_free(output_dir)
    if window not in export.WINDOWS:
        raise LabkitError(f"--window is {window!r}; give {', '.join(export.WINDOWS)}")
    lm = load(name, attn=attn, dtype=dtype)
    from labkit.convert import to_bidirectional

    chosen = export.choose_layers(layers, lm.model.config.get_text_config().num_hidden_layers)
    to_bidirectional(lm.model, window=window, layers=chosen)
    folder = export.export(lm, output_dir, window=window, layers=chosen)
    for_all = export.is_for_all(lm.model, chosen)
    if as_json:
        done = {"folder": str(folder), "name": name, "window": window, "layers": chosen or "all"}
        print_json(done | {"plain_transformers": for_all, "licence": lm.licence})
    else:
        print(f"{folder}: {name}, bidirectional in {'all layers' if chosen is None else f'layers {chosen}'}")
        if not for_all:
            what = "this choice of layers" if chosen is not None else "the masks of this family"
            print(f"plain transformers cannot express {what}; load the folder with labkit.load")


@app.command()
def leakage(
    name: Name,
    train: Annotated[
        bool, typer.Option("--train", help="Also train the model and an unmasked copy on random tokens.")
    ] = False,
    tokens: Annotated[int, typer.Option(help="Length of the text in which each token is changed in turn.", min=2)] = 16,
    steps: Annotated[int, typer.Option(help="Training steps of --train.", min=1)] = 300,
    attn: Attn = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Test a causal model for leaks.

    Reports which positions depend on a later token, by how much, and in which layer. Exit code 1 if there is a leak.

    Example: labkit leakage gpt2-mini --train
    """
    from labkit.auditing.leaks import find_leaks
    from labkit.leak_meter import leak_meter
    from labkit.models import load

    model = load(name, attn=attn, dtype=dtype).model
    with waiting(f"looking for leaks in {name}"):
        report = find_leaks(model, tokens=tokens)
    meter = leak_meter(model, LEAKAGE_VOCABULARY, steps=steps) if train else None
    if as_json:
        found = {"perturbation": report, "training": meter}
        print_json({name: json.loads(each.to_json()) if each else None for name, each in found.items()})
    else:
        print("\n".join(str(each) for each in (report, meter) if each is not None))
    raise typer.Exit(0 if report.clean and (meter is None or meter.clean) else 1)


@cache_app.command("list")
def cache_list(as_json: Json = False) -> None:
    """List the converted models in the cache.

    The files of each model are checked against their sha256.

    Example: labkit cache list
    """
    from labkit.models.cache import cache_dir, entries

    found = entries()
    if as_json:
        print_json({"folder": str(cache_dir()), "entries": [_entry_as_dict(entry) for entry in found]})
    elif not found:
        print(f"no converted models in {cache_dir()}")
    else:
        print(cache_dir())
        cells = [(e.name, f"{e.bytes / 1e6:,.0f} MB", e.state, e.problem or "") for e in found]
        print_table(("name", "size", "state", ""), cells)


@cache_app.command("clear")
def cache_clear(
    name: Annotated[str | None, typer.Argument(help="Name of one model. Default: all.")] = None, as_json: Json = False
) -> None:
    """Delete converted models from the cache.

    The next load of such a model converts it again.

    Example: labkit cache clear gemma3-270m
    """
    from labkit.models.cache import clear, entries

    if name is not None and name not in (known := [entry.name for entry in entries()]):
        raise LabkitError(f"there is no converted model {name!r}; there is {', '.join(known) or 'none'}")
    gone = clear(name)
    if as_json:
        print_json({"deleted": [_entry_as_dict(entry) for entry in gone]})
    else:
        names, size = ", ".join(entry.name for entry in gone), sum(entry.bytes for entry in gone)
        print(f"deleted {names or 'nothing'} ({size / 1e6:,.0f} MB)")


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
    if as_json:
        fields = ("path", "cells", "seconds", "output")
        print_json([{field: plain(getattr(run, field)) for field in fields} for run in runs])
    else:
        print_table(("notebook", "cells", "seconds"), [(r.path.name, str(r.cells), f"{r.seconds:.1f}") for r in runs])


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
    if as_json:
        print_json([str(path) for path in written])
    else:
        print(f"{len(written)} files written to {folder}")


def _one_line_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"labkit: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _entry_as_dict(entry: Any) -> dict[str, Any]:
    return {field: plain(getattr(entry, field)) for field in ("name", "path", "bytes", "state", "problem")}


def _in_millions(parameters: int) -> str:
    return "-" if not parameters else f"{parameters / 1e6:,.1f} M"
