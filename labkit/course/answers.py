"""A student's answer as a check uses it: something to call, in this process or in the process of a submission.

An `Answer` turns a call into a request, and the reply into a value or a `Mistake`. `respond` answers requests: in a
notebook (`local_answer`), or in the process that labkit.course.sandbox starts for a submission (`serve`). Arguments and
values travel as JSON in both cases, so a check that passes in the notebook passes in the grader.
"""

from __future__ import annotations

import io
import json
import linecache
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.course.mistakes import Mistake, NotBegun
from labkit.course.predictions import read_beside
from labkit.errors import CourseError

STUB = re.compile(r"(a\d_\w+|the exercise above)?")  # the message of a stub's NotImplementedError
NOT_BEGUN = "not begun"  # in place of an error
MOST_BYTES = 4 * 2**20  # of a value

Request = dict[str, Any]  # {"source": a cell}, or {"assignment", "name", "function", "arguments"} that call an answer
Reply = dict[str, str]  # {"answer": text}, {"error": text}, or {} of a cell that ran


@dataclass(frozen=True)
class Answer:
    """The object that a student has defined under `name`. Calling it sends a request to `ask`.

    `predictions`: the file of predictions beside the notebook, or None if it is missing. It is a stranger's.

    Raises NotBegun for a missing answer or a stub, Mistake for one that raises, takes too long, or cannot be judged.
    """

    name: str
    assignment: str
    ask: Callable[[Request], Reply]
    predictions: Callable[[], bytes | None]

    def __call__(self, *arguments: Any, function: str | None = None) -> Any:
        """What the answer returns, or what `function` of the assignment's module returns for (the answer, *arguments).

        That is called where the answer is, for arguments and results that cannot travel, such as a model.
        """
        about = {"assignment": self.assignment, "name": self.name, "function": function}
        reply = self.ask(about | {"arguments": dumps(list(arguments))})
        if reply.get("error") == NOT_BEGUN:
            raise NotBegun(self.name)
        if "answer" not in reply:
            raise Mistake(f"`{self.name}` to return without an error", reply.get("error", "nothing"))
        try:
            return loads(reply["answer"])
        except CourseError as error:
            raise Mistake(f"{self.name} to return something that can be judged", str(error)) from None


def local_answer(name: str, value: Any, assignment: str, seconds: float = 10.0) -> Answer:
    """The answer `value`, an object of this process."""

    def ask(request: Request) -> Reply:
        try:
            # What the answer prints or draws changes neither the check's message nor the notebook's next draws.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), torch.random.fork_rng([]):
                with time_limit(seconds):
                    return respond({name: value}, request)
        except TooSlow:
            return {"error": f"no answer within {seconds:g} seconds: a loop that does not end?"}

    return Answer(name, assignment, ask, partial(read_beside, Path(), assignment))


def respond(names: Mapping[str, Any], request: Request) -> Reply:
    """The reply to a request that calls an answer, where the answers are the values of `names`."""
    answer = names.get(request["name"])
    if answer is None or answer is ...:
        return {"error": NOT_BEGUN}
    if not callable(answer):
        return {"error": f"it is not a function but a {type(answer).__name__}"}
    try:
        arguments = loads(request["arguments"])
        if request["function"]:
            module = import_module(f"labkit.course.{request['assignment']}")
            return {"answer": dumps(getattr(module, request["function"])(answer, *arguments))}
        return {"answer": dumps(answer(*arguments))}
    except (Exception, SystemExit) as error:
        return {"error": described(error)}


def serve(limits: dict[str, int]) -> None:
    """Run a submission in this process: limit it, then answer one request per line, for ever.

    A request runs a cell, as a notebook's kernel would (IPython), or calls what the cells have defined. Only this
    function has standard input and output. Each reply repeats the nonce of its request, so nothing that was written
    ahead counts.
    """
    import resource

    from IPython.core.interactiveshell import InteractiveShell

    for name, value in limits.items():
        with suppress(ValueError, OSError):  # macOS has no limit of memory: the grader's watch remains
            resource.setrlimit(getattr(resource, name), (value, value))
    warnings.filterwarnings("ignore")
    InteractiveShell.xmode = "Minimal"
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    shell.colors = "nocolor"
    sys.path.append(os.getcwd())  # the last place: a student's json.py replaces nothing
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    for number in (0, 1, 2):  # standard error is needed until here: it says why a process did not start
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    for line in requests:
        request = json.loads(line)
        if "source" in request:
            result = shell.run_cell(request["source"])
            error = result.error_before_exec or result.error_in_exec
            reply = {"error": described(error)} if error else {}
        else:
            reply = respond(shell.user_ns, request)
        print(json.dumps(reply | {"nonce": request["nonce"]}), file=replies, flush=True)


def described(error: BaseException) -> str:
    """The type and the message of an exception, and the last of the student's own lines in its traceback.

    NOT_BEGUN for the NotImplementedError of a stub; torch raises some of its own.
    """
    if isinstance(error, NotImplementedError) and STUB.fullmatch(str(error)):
        return NOT_BEGUN
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: line {error.lineno}: {error.msg}"
    words, line = " ".join(str(error).split()), ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "ipykernel" in frame.filename or frame.filename.startswith("<ipython"):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip() or (frame.line or "")
    text = f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__
    return f"{text} (in your line `{line}`)" if line else text


class TooSlow(BaseException):
    """Raised inside a call that takes too long; a student's `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TooSlow in the block after that many seconds; there is no limit off the main thread and on Windows."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # again and again: a bare `except:` may swallow one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def dumps(value: Any) -> str:
    """The JSON text of plain values and tensors, which keep their type; an array becomes a tensor. It is never pickle.

    An object with the key "$" stands for what JSON has no notation for. Raises CourseError for a value of another type
    or one that is too large.
    """
    try:
        text = json.dumps(_encoded(value))
    except RecursionError:
        raise CourseError("a value that is nested too deep cannot be judged") from None
    if len(text) > MOST_BYTES:
        raise CourseError(f"a value of {len(text) / 2**20:.0f} MB is too large to be judged")
    return text


def loads(text: str) -> Any:
    """The value of a text that `dumps` wrote. Raises CourseError for any other text."""
    try:
        return json.loads(text, object_hook=_decoded)
    except Exception as error:  # also those of torch.tensor
        raise CourseError(f"not a value as labkit writes it: {error}") from error


def _encoded(value: Any) -> Any:
    match value:
        case None | bool() | str() | int() | float():
            return value
        case list():
            return [_encoded(item) for item in value]
        case tuple() | range():
            return {"$": "tuple", "items": _encoded(list(value))}
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _encoded(item) for key, item in value.items()}
        case np.ndarray() | np.generic() if value.dtype.kind in "biuf":
            return _encoded(torch.from_numpy(np.array(value)))
        case Tensor() if not value.is_complex():
            return {"$": str(value.dtype).removeprefix("torch."), "items": value.tolist()}
    raise CourseError(f"a {type(value).__name__} cannot be judged; give a list, plain values or tensors of numbers")


def _decoded(value: dict[str, Any]) -> Any:
    match value:
        case {"$": "tuple", "items": items}:
            return tuple(items)
        case {"$": dtype, "items": items}:
            return torch.tensor(items, dtype=getattr(torch, dtype))
    return value
