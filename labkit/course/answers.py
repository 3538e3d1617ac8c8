"""A student's answer as a check uses it: something to call, in this process or in the process of a submission.

An `Answer` turns a call into a request, and the reply into a value or a `Mistake`. `respond` answers requests: in a
notebook (`local_answer`), or in the process that labkit.course.sandbox starts for a submission (`serve`). Arguments and
values travel as JSON in both cases, so a check that passes in the notebook passes in the grader.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import linecache
import os
import random
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from labkit.course.exercises import assignment
from labkit.course.mistakes import Mistake, NotBegun
from labkit.errors import CourseError

STUB = re.compile(r"(a\d_\w+|the exercise above)?")  # the message of a stub's NotImplementedError
Reply = dict[str, Any]  # one of {"answer": text}, {"mistake": [expected, came, likely]}, {"not_begun": True}
TYPE = "$"  # the key that marks what JSON has no notation for
MOST_BYTES = 4 * 2**20
MOST_ITEMS = 10_000  # of a set or a dictionary: hashes that collide would keep the grader busy for hours


@dataclass(frozen=True)
class Answer:
    """The object that a student has defined under `name`.

    `respond` takes {"name", "assignment", "sent", "observer"}; `sent`: the arguments as text. Both methods raise
    NotBegun for a missing answer or a stub, and Mistake for one that raises, takes too long, or cannot be judged.
    """

    name: str
    assignment: str
    respond: Callable[[dict[str, Any]], Reply]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the answer returns for these arguments."""
        return self.observed(None, *arguments, **named)

    def observed(self, observer: str | None, *arguments: Any, **named: Any) -> Any:
        """What the assignment's observer makes of what the answer returns: for results that cannot travel."""
        sent = dumps([list(arguments), named])
        reply = self.respond({"name": self.name, "assignment": self.assignment, "sent": sent, "observer": observer})
        if reply.get("not_begun"):
            raise NotBegun(self.name)
        if "mistake" in reply:
            raise Mistake(*reply["mistake"])
        try:
            return loads(reply["answer"])
        except (CourseError, KeyError) as error:
            raise Mistake(f"{self.name} to return something that can be judged", str(error)) from None


@dataclass(frozen=True)
class Given:
    """An argument that cannot travel: the assignment's `given` function `name` makes it where the answer is."""

    assignment: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def local_answer(name: str, value: Any, of_assignment: str, seconds: float = 5.0) -> Answer:
    """The answer `value`, an object of this process."""

    def respond_here(request: dict[str, Any]) -> Reply:
        try:
            with time_limit(seconds), _without_side_effects():
                return respond({name: value}, request)
        except TooSlow:
            return {"mistake": [f"{name} to answer within {seconds:g} seconds", "no answer", "a loop without an end?"]}

    return Answer(name, of_assignment, respond_here)


def respond(names: Mapping[str, Any], request: dict[str, Any]) -> Reply:
    """The reply to a request, where the answers are the values of `names`."""
    name = request["name"]
    if (answer := names.get(name)) is None or answer is ...:
        return {"not_begun": True}
    try:
        if not callable(answer):
            raise Mistake(f"{name} to be a function", f"a {type(answer).__name__}")
        arguments, named = loads(request["sent"])
        arguments, named = [_made(value) for value in arguments], {key: _made(value) for key, value in named.items()}
        result = answer(*arguments, **named)
        if request["observer"]:
            result = assignment(request["assignment"]).observers[request["observer"]](result, *arguments)
        return {"answer": dumps(result)}
    except Mistake as mistake:
        return {"mistake": [mistake.expected, mistake.came, mistake.likely]}
    except (Exception, SystemExit) as error:
        return {"not_begun": True} if is_stub(error) else {"mistake": [f"{name} to return", described(error), None]}


def serve(limits: dict[str, int]) -> None:
    """Run a submission in this process: limit it, then answer one request per line, for ever.

    A request runs a cell, as a notebook's kernel would (IPython), or calls what the cells have defined. Only this
    function has standard input and output. Each reply repeats the nonce of its request, so nothing that was written
    ahead counts.
    """
    import resource

    from IPython.core.interactiveshell import InteractiveShell

    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of memory: the grader's watch remains
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
    print(json.dumps({"nonce": "start"}), file=replies, flush=True)
    for line in requests:
        request = json.loads(line)
        if "source" in request:
            result = shell.run_cell(request["source"])
            error = result.error_before_exec or result.error_in_exec
            reply = {"error": None if error is None or is_stub(error) else described(error)}
        else:
            reply = respond(shell.user_ns, request)
        print(json.dumps(reply | {"nonce": request["nonce"]}), file=replies, flush=True)


def is_stub(error: BaseException) -> bool:
    """Whether this is the NotImplementedError of an exercise that is not begun; torch raises some of its own."""
    return isinstance(error, NotImplementedError) and STUB.fullmatch(str(error)) is not None


def described(error: BaseException) -> str:
    """The type and the message of an exception, and the last of the student's own lines in its traceback."""
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


@contextlib.contextmanager
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

    Raises:
        CourseError: a value of another type, which is named, or one that is too large.
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
    except Exception as error:  # also safetensors' own
        raise CourseError(f"not a value as labkit writes it: {error}") from error


def _encoded(value: Any) -> Any:
    if isinstance(value, set | frozenset | dict) and len(value) > MOST_ITEMS:
        raise CourseError(f"a {type(value).__name__} of {len(value):,} items is too large to be judged")
    match value:
        case None | bool() | str():
            return value
        case float():
            return float(value)  # of a subclass, such as numpy's
        case int():
            return int(value)
        case list():
            return [_encoded(item) for item in value]
        case tuple() | range():
            return {TYPE: "tuple", "items": _encoded(list(value))}
        case set() | frozenset():
            return {TYPE: "set", "items": _encoded(list(value))}
        case dict():
            return {TYPE: "dict", "items": _encoded([list(pair) for pair in value.items()])}
        case Given():
            return {TYPE: "given", "of": [value.assignment, value.name], "items": _encoded(value.arguments)}
        case np.ndarray() | np.generic() if value.dtype.kind in "biuf":
            return _encoded(torch.from_numpy(np.array(value)))
        case Tensor() if not value.is_complex():
            data = safetensors.torch.save({"": value.detach().cpu().contiguous()})
            return {TYPE: "tensor", "items": base64.b64encode(data).decode()}
    raise CourseError(f"a {type(value).__name__} cannot be judged; give plain values or tensors of numbers or booleans")


def _decoded(value: dict[str, Any]) -> Any:
    kind, items = value[TYPE], value["items"]
    if kind in ("set", "dict") and len(items) > MOST_ITEMS:
        raise ValueError("too many items")
    match kind:
        case "tuple":
            return tuple(items)
        case "set":
            return set(items)
        case "dict":
            return dict(items)
        case "given":
            return Given(*value["of"], items)
        case "tensor":
            return safetensors.torch.load(base64.b64decode(items))[""]
    raise ValueError(f"unknown kind {kind!r}")


def _made(argument: Any) -> Any:
    """A Given made, also inside lists; anything else as it is."""
    if isinstance(argument, Given):
        return assignment(argument.assignment).givens[argument.name](**argument.arguments)
    return [_made(item) for item in argument] if isinstance(argument, list) else argument


@contextlib.contextmanager
def _without_side_effects() -> Iterator[None]:
    """Keeps an answer's prints out of the check's message, and its random draws out of the notebook's generators."""
    python, numpy, dtype, noise = random.getstate(), np.random.get_state(), torch.get_default_dtype(), io.StringIO()
    try:
        with torch.random.fork_rng([]), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_default_dtype(dtype)
