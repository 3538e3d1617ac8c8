"""A student's answer as a check sees it: something to call, wherever it lives.

`LocalAnswer` calls an object of this very process: what `check.a1_causal_mask(causal_mask)` does in a notebook.
`labkit.course.sandbox` has the other one, which asks a process apart. Both hand over copies and return copies, so that
a check that passes in the notebook passes in the grader.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from labkit.course import wire
from labkit.course.exercises import assignment
from labkit.course.mistakes import Mistake, NotBegun
from labkit.errors import CourseError

CALL_SECONDS = 5.0
STUB = re.compile(r"(a\d_\w+|the exercise above)?")  # what a stub says


class Answer(ABC):
    """The object that a student has defined under `name`."""

    name: str

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the answer returns for these arguments.

        Raises:
            NotBegun: it raises NotImplementedError.
            Mistake: it raises anything else, takes too long, or returns what cannot be judged.
        """
        return self._ask(arguments, named, None)

    def observed(self, observer: str, *arguments: Any, **named: Any) -> Any:
        """What the assignment's observer says of what the answer returns: for answers that cannot travel."""
        return self._ask(arguments, named, observer)

    @abstractmethod
    def value(self) -> Any:
        """The object itself, where it is a value and no function. Raises NotBegun for None and ..."""

    @abstractmethod
    def _ask(self, arguments: tuple, named: dict[str, Any], observer: str | None) -> Any: ...


class LocalAnswer(Answer):
    """An object of this process."""

    def __init__(self, name: str, found: Any, of_assignment: str, seconds: float = CALL_SECONDS):
        self.name, self._found, self._assignment, self._seconds = name, found, of_assignment, seconds

    def value(self) -> Any:
        if self._found is None or self._found is ...:
            raise NotBegun(self.name)
        return wire.loads(wire.dumps(self._found))

    def _ask(self, arguments: tuple, named: dict[str, Any], observer: str | None) -> Any:
        if self._found is None or self._found is ...:
            raise NotBegun(self.name)
        if not callable(self._found):
            raise Mistake(f"{self.name} to be a function", f"a {type(self._found).__name__}")
        sent = wire.dumps([list(arguments), named])
        try:
            with time_limit(self._seconds), _quiet():
                text = answered(self._found, sent, self._assignment, observer)
        except TooSlow:
            raise Mistake(
                f"{self.name} to answer within {self._seconds:g} seconds", "no answer", "a loop that does not end?"
            ) from None
        except Mistake:  # an observer's
            raise
        except CourseError as error:
            raise Mistake(f"{self.name} to return something that can be judged", str(error)) from None
        except (Exception, SystemExit) as error:
            if is_stub(error):
                raise NotBegun(self.name) from error
            raise Mistake(f"{self.name} to return", described(error)) from error
        return wire.loads(text)


class TooSlow(BaseException):
    """Raised inside a call that takes too long; no `except Exception` of a student swallows it."""


def is_stub(error: BaseException | None) -> bool:
    """The NotImplementedError of an exercise that is not begun; torch raises some of its own, which are mistakes."""
    return isinstance(error, NotImplementedError) and STUB.fullmatch(str(error)) is not None


def answered(function: Callable, sent: str, of_assignment: str, observer: str | None) -> str:
    """The answer to arguments that have travelled, ready to travel back. In the process of the answer."""
    arguments, named = wire.loads(sent)
    del sent  # what was asked, and how, is not for the function to look up
    made_arguments = [made(each) for each in arguments]
    result = function(*made_arguments, **{name: made(each) for name, each in named.items()})
    if observer is not None:
        result = assignment(of_assignment).observers[observer](result, *made_arguments)
    return wire.dumps(result)


def made(value: Any) -> Any:
    """A Given made, also inside lists; anything else as it is."""
    if isinstance(value, wire.Given):
        return assignment(value.assignment).givens[value.name](**value.arguments)
    return [made(each) for each in value] if isinstance(value, list) else value


def described(error: BaseException, source_of: Callable[[str, int], str] = linecache.getline) -> str:
    """An exception in a line or two: kind, words, and the student's own last line on the way to it."""
    words = " ".join(str(error).split())
    text = f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__
    line = _own_line(error.__traceback__, source_of)
    return f"{text} (in your line `{line}`)" if line else text


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TooSlow in the block after that many seconds; no limit off the main thread and on Windows."""
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Prints of the answer stay out of the check's words, and its draws out of the notebook's generators."""
    import random

    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.get_default_dtype()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_default_dtype(states[3])


def _own_line(trace: TracebackType | None, source_of: Callable[[str, int], str]) -> str:
    line = ""
    for frame in traceback.extract_tb(trace):
        if "ipykernel" in frame.filename or frame.filename.startswith("<ipython"):
            line = source_of(frame.filename, frame.lineno or 0).strip() or (frame.line or "")
    return line
