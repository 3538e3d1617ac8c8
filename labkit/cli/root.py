"""The `labkit` command: its groups, and how it ends.

The commands are thin: each parses, calls the library, prints, and chooses the exit code. Exit codes: 0 done; 1 the
check failed (an expectation, a leak, the doctor); 2 bad input; 70 a fault of labkit. The last two come with one line on
standard error, and with a traceback before it if LABKIT_TRACEBACK=1. An interrupted command ends with 130, one whose
reader has gone (`labkit models | head -1`) with 141. No torch is loaded before a command needs it.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer

from labkit import __version__
from labkit.cli import course, data, fuse, lab, measuring, predict, train
from labkit.cli.console import add_command
from labkit.errors import LabkitError, is_out_of_memory
from labkit.files import os_error_in

EPILOG = """\
The --help of every command contains an example, and every command takes --json. The option --output - writes to
standard output.

Exit codes: 0 success; 1 a check or a run failed; 2 invalid input, or a lack of memory or disk space, with a one-line
message that says what to do; 70 an error inside labkit; 130 interrupted. LABKIT_TRACEBACK=1 prints the traceback of an
error."""


FIRST_STEPS = """\
Five things to do:
  labkit doctor                              is this machine ready?
  labkit notebooks copy lessons              copy the lessons into the folder lessons/
  labkit audit tiny-gpt2                     measure the mask of each layer of a model
  labkit convert tiny-gpt2 --output-dir enc  make a model bidirectional, and prove it
  labkit train ner --output-dir run          fine-tune a model to tag entities
All commands: labkit --help"""

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Learn and verify attention masks: load a model, convert it, measure the mask that each layer uses.",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (lab.doctor, lab.models, measuring.audit, measuring.convert, measuring.leakage):
    app.command()(command)
app.add_typer(train.train_app, name="train")
app.add_typer(predict.predict_app, name="predict")
app.add_typer(lab.notebooks_app, name="notebooks")
app.add_typer(data.app, name="data")
app.add_typer(course.app, name="course")
app.add_typer(lab.cache_app, name="cache")
add_command(app, "pretrain", train.PRETRAIN_HELP, train.PRETRAINING, train.pretrain)
add_command(app, "fuse", fuse.HELP, fuse.OPTIONS, fuse.fuse)

FAULT, INTERRUPTED, READER_GONE = 70, 130, 141  # exit codes: of sysexits.h, and of a shell for SIGINT and SIGPIPE
TRACEBACK = "LABKIT_TRACEBACK"  # the variable that asks for the traceback of an error
BAD_INPUT = (  # in the messages of Python and torch about input that no command checks
    "Could not determine home directory|surrogates not allowed|not valid UTF-8|embedded null byte"
    "|cannot convert float|too large|[Oo]verflow"
)
_UsageError: Any = typer.BadParameter.__base__  # click's, or the one in typer's own copy of click


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process; `arguments` default to those of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        print(FIRST_STEPS)
        sys.exit(0)
    warnings.showwarning = lambda message, *_, **__: print(_on_one_line(f"warning: {message}"), file=sys.stderr)
    try:
        code = app(arguments, prog_name="labkit", standalone_mode=False)
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
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and error.filename is None:
        return READER_GONE
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    code, cause = 2, os_error_in(error)
    if isinstance(error, _UsageError):
        where = f" (see {error.ctx.command_path} --help)" if getattr(error, "ctx", None) else ""
        message = error.format_message().rstrip(".") + where
    elif isinstance(error, LabkitError):
        message = str(error)
    elif cause is not None:
        message = f"{cause.filename or 'a file, or standard output,'} could not be read or written: {cause.strerror}"
    elif is_out_of_memory(error):
        message = "the memory is full: choose a smaller model, fewer rows at once or shorter ones"
    elif re.search(BAD_INPUT, str(error)):
        message = f"an argument or an input file cannot be used: {error}"
    else:
        code, command = FAULT, " ".join(itertools.takewhile(str.isalpha, arguments))
        message = (
            f"{type(error).__name__} in `labkit {command}`: {error}. This is a fault of labkit: please report it; "
            f"{TRACEBACK}=1 shows where"
        )
    print(_on_one_line(message), file=sys.stderr)
    return code


def _on_one_line(message: str) -> str:
    """The message without control characters, because a file name may contain any."""
    return "labkit: " + "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))


def _print_version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass
