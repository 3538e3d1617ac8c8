"""A student's answer as a check sees it: something to call, wherever it lives.

An `Answer` turns a call into a request and the reply into a value or a `Mistake`. `respond` answers requests, in this
process (`local_answer`: the checks in a notebook) or in the process of a submission (labkit.course.child). Arguments
and values travel as text in both cases, so a check that passes in the notebook passes in the grader.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import random
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from labkit.course import wire
from labkit.course.exercises import assignment
from labkit.course.mistakes import Mistake, NotBegun
from labkit.errors import CourseError

CALL_SECONDS = 5.0
STUB = re.compile(r"(a\d_\w+|the exercise above)?")  # the message of a stub's NotImplementedError
Reply = dict[str, Any]  # one of {"answer": text}, {"mistake": [expected, came, likely]}, {"not_begun": True}


@dataclass(frozen=True)
class Answer:
    """The object that a student has defined under `name`.

    `respond` takes {"name", "assignment", "sent", "observer"}; `sent`: the arguments as text, None to read a value.
    """

    name: str
    assignment: str
    respond: Callable[[dict[str, Any]], Reply]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the answer returns for these arguments.

        Raises:
            NotBegun: it is missing, or raises NotImplementedError.
            Mistake: it raises anything else, takes too long, or returns what cannot be judged.
        """
        return self._read(wire.dumps([list(arguments), named]), None)

    def observed(self, observer: str, *arguments: Any) -> Any:
        """What the assignment's observer makes of what the answer returns: for results that cannot travel."""
        return self._read(wire.dumps([list(arguments), {}]), observer)

    def value(self) -> Any:
        """The object itself, where it is a value and not a function."""
        return self._read(None, None)

    def _read(self, sent: str | None, observer: str | None) -> Any:
        request = {"name": self.name, "assignment": self.assignment, "sent": sent, "observer": observer}
        reply = self.respond(request)
        if reply.get("not_begun"):
            raise NotBegun(self.name)
        if "mistake" in reply:
            raise Mistake(*reply["mistake"])
        try:
            return wire.loads(reply["answer"])
        except (CourseError, KeyError) as error:
            raise Mistake(f"{self.name} to return something that can be judged", str(error)) from None


class TooSlow(BaseException):
    """Raised inside a call that takes too long; a student's `except Exception` does not catch it."""


def local_answer(name: str, value: Any, of_assignment: str, seconds: float = CALL_SECONDS) -> Answer:
    """The answer `value`, an object of this process."""

    def respond_here(request: dict[str, Any]) -> Reply:
        try:
            with time_limit(seconds), _without_side_effects():
                return respond({name: value}, request)
        except TooSlow:
            expected = f"{name} to answer within {seconds:g} seconds"
            return {"mistake": [expected, "no answer", "a loop that does not end?"]}

    return Answer(name, of_assignment, respond_here)


def respond(names: Mapping[str, Any], request: dict[str, Any]) -> Reply:
    """The reply to a request, where the answers are the values of `names`."""
    name = request["name"]
    if (answer := names.get(name)) is None or answer is ...:
        return {"not_begun": True}
    try:
        if request["sent"] is None:
            return {"answer": wire.dumps(answer)}
        if not callable(answer):
            return {"mistake": [f"{name} to be a function", f"a {type(answer).__name__}", None]}
        of = assignment(request["assignment"])
        arguments, named = wire.loads(request["sent"])
        made = [_made(argument) for argument in arguments]
        result = answer(*made, **{key: _made(argument) for key, argument in named.items()})
        if request["observer"]:
            result = of.observers[request["observer"]](result, *made)
        return {"answer": wire.dumps(result)}
    except Mistake as mistake:  # an observer's
        return {"mistake": [mistake.expected, mistake.came, mistake.likely]}
    except CourseError as error:
        return {"mistake": [f"{name} to return something that can be judged", str(error), None]}
    except (Exception, SystemExit) as error:
        if is_stub(error):
            return {"not_begun": True}
        return {"mistake": [f"{name} to return", described(error), None]}


def is_stub(error: BaseException | None) -> bool:
    """Whether this is the NotImplementedError of an exercise that is not begun; torch raises some of its own."""
    return isinstance(error, NotImplementedError) and STUB.fullmatch(str(error)) is not None


def described(error: BaseException) -> str:
    """An exception in a line or two: its type, its message, and the last line of the student's own on the way to it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: line {error.lineno}: {error.msg}"
    words, line = " ".join(str(error).split()), ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "ipykernel" in frame.filename or frame.filename.startswith("<ipython"):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip() or (frame.line or "")
    text = f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__
    return f"{text} (in your line `{line}`)" if line else text


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


def _made(argument: Any) -> Any:
    """A Given made, also inside lists; anything else as it is."""
    if isinstance(argument, wire.Given):
        return assignment(argument.assignment).givens[argument.name](**argument.arguments)
    return [_made(item) for item in argument] if isinstance(argument, list) else argument


@contextlib.contextmanager
def _without_side_effects() -> Iterator[None]:
    """Keeps an answer's prints out of the check's message, and its random draws out of the notebook's generators."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.get_default_dtype()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_default_dtype(states[3])
