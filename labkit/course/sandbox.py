"""A process apart in which a submission runs, with limits; the check stays in ours and judges what comes back.

What isolates: a process of its own without our environment variables, in an empty folder that is removed; seconds per
cell and per call, and in all; memory; file size; on Linux, where the system allows it, no network, no sight of other
processes and submissions, and nothing to write outside its folder (`in_force` says what is). What does not: it runs as
the same user and can read what else that user can. docs/instructors.md has a container for those who need more.

    with Sandbox("a1", Limits()) as sandbox:
        sandbox.run("def causal_mask(n): ...")      # a cell; returns its error, or None
        SandboxAnswer(sandbox, "causal_mask")(4)    # an Answer, as checks want one
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from labkit.course import wire
from labkit.course.answers import Answer
from labkit.course.mistakes import Mistake, NotBegun
from labkit.errors import CourseError
from labkit.models.cache import cache_dir

KEPT_VARIABLES = (
    "PATH", "LANG", "LC_ALL", "PYTHONPATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "LABKIT_CACHE", "LABKIT_PROFILE",
    "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
MOST_REPLY = 2 * wire.MOST_BYTES
TICK = 0.1  # seconds between looks at memory
START_SECONDS = 120.0


@dataclass(frozen=True)
class Limits:
    """What one submission may use."""

    cell_seconds: float = 60.0
    call_seconds: float = 10.0
    total_seconds: float = 600.0
    memory_bytes: int = 4 * 2**30
    file_bytes: int = 256 * 2**20


class Stopped(Exception):
    """The process had to be ended, or ended itself; the message says why."""


class Sandbox:
    """The process, begun anew when it had to be stopped: cells that ran before run again, but for the one that hung."""

    def __init__(self, of_assignment: str, limits: Limits | None = None, hidden: tuple[Path, ...] = ()):
        self.assignment, self.limits = of_assignment, limits or Limits()
        self._hidden = [str(path.resolve()) for path in hidden if path.is_dir() and not _needed_in(path.resolve())]
        self.in_force: list[str] = []
        self._done: list[str] = []  # cells that came back
        self._process: subprocess.Popen | None = None
        self._deadline = time.monotonic() + self.limits.total_seconds

    def __enter__(self) -> Sandbox:
        self._begin()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()

    def run(self, source: str) -> str | None:
        """Runs a cell; what went wrong in it, or None. A stub's NotImplementedError is nothing wrong."""
        try:
            reply = self._asked({"do": "cell", "source": source}, self.limits.cell_seconds)
        except Stopped as stopped:
            return str(stopped)
        self._done.append(source)
        if mistake := reply.get("mistake"):
            return mistake[1]
        return None if reply.get("not_begun") else reply.get("error")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a call. Raises Stopped."""
        return self._asked(request, self.limits.call_seconds)

    def _asked(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        if time.monotonic() > self._deadline:
            raise Stopped(f"the submission's {self.limits.total_seconds:g} seconds were used up")
        try:
            if self._process is None:
                self._begin()
                for source in self._done:
                    self._exchange({"do": "cell", "source": source}, self.limits.cell_seconds)
            return self._exchange(request, seconds)
        except Stopped:
            self._end()
            raise

    def _begin(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="labkit-submission-"))  # a new one each time: nothing is left in it
        self._said = tempfile.TemporaryFile()  # no file that a submission could replace
        ours, theirs = os.pipe(), os.pipe()  # requests, replies
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        environment |= {"HOME": str(self._folder), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"TMPDIR": str(self._folder)}
        environment |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "IPYTHONDIR": str(self._folder / ".ipython")}
        environment.setdefault("LABKIT_CACHE", str(cache_dir()))
        paths = [str(Path(__file__).parents[2]), *environment.get("PYTHONPATH", "").split(os.pathsep)]  # labkit as ours
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
        environment |= {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}  # no import from the submission's folder
        command = [
            sys.executable,
            "-m",
            "labkit.course.child",
            str(ours[0]),
            str(theirs[1]),
            json.dumps(asdict(self.limits) | {"hidden": self._hidden}),
        ]
        try:
            self._process = subprocess.Popen(
                command, cwd=self._folder, env=environment, pass_fds=(ours[0], theirs[1]), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
            )  # fmt: skip
        except BaseException:
            for pipe in (*ours, *theirs):
                os.close(pipe)
            self._leave_folder()
            raise
        os.close(ours[0])
        os.close(theirs[1])
        self._requests, self._replies, self._rest = ours[1], theirs[0], b""
        try:
            self.in_force = self._received(START_SECONDS)["ready"]
        except (Stopped, KeyError) as error:
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip()[-500:]
            self._end()
            raise CourseError(f"the process for a submission did not start: {error}; {said}") from None

    def _end(self) -> None:
        if self._process is None:
            return
        for process in _family(self._process.pid):
            with contextlib.suppress(Exception):
                process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._requests, self._replies):
            os.close(pipe)
        self._process = None
        self._leave_folder()

    def _leave_folder(self) -> None:
        self._said.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        data = memoryview((json.dumps(request) + "\n").encode())
        end = time.monotonic() + seconds
        os.set_blocking(self._requests, False)
        while data:
            if not _ready(self._requests, selectors.EVENT_WRITE, max(0.0, end - time.monotonic())):
                raise Stopped(f"no answer within {seconds:g} seconds: a loop that does not end?")
            try:
                data = data[os.write(self._requests, data) :]
            except BrokenPipeError:
                raise Stopped(self._last_words()) from None
        return self._received(seconds)

    def _received(self, seconds: float) -> dict[str, Any]:
        end = min(time.monotonic() + seconds, self._deadline)
        while b"\n" not in self._rest:
            if time.monotonic() > end:
                raise Stopped(f"no answer within {seconds:g} seconds: a loop that does not end?")
            if _memory_of(self._process.pid) > self.limits.memory_bytes:
                raise Stopped(f"more than {self.limits.memory_bytes / 2**30:.1f} GB of memory were used")
            if not _ready(self._replies, selectors.EVENT_READ, TICK):
                continue
            if not (piece := os.read(self._replies, 2**20)):
                raise Stopped(self._last_words())
            self._rest += piece
            if len(self._rest) > MOST_REPLY:
                raise Stopped("the answer was too large to be judged")
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or not _well_formed(reply):
            raise Stopped("the process answered in a way that labkit does not (was something written into its pipe?)")
        return reply

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "the process closed its pipe"
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"the process ended {how}" + (" (often: out of memory)" if code in (-9, 137) else "")


class SandboxAnswer(Answer):
    """What the submission in a sandbox has defined under `name`."""

    def __init__(self, sandbox: Sandbox, name: str):
        self.name, self._sandbox = name, sandbox

    def value(self) -> Any:
        return self._read({"do": "value", "name": self.name})

    def _ask(self, arguments: tuple, named: dict[str, Any], observer: str | None) -> Any:
        sent = wire.dumps([list(arguments), named])
        request = {"do": "call", "name": self.name, "sent": sent, "observer": observer}
        return self._read(request | {"assignment": self._sandbox.assignment})

    def _read(self, request: dict[str, Any]) -> Any:
        try:
            reply = self._sandbox.ask(request)
        except Stopped as stopped:
            raise Mistake(f"{self.name} to return", str(stopped)) from None
        if reply.get("not_begun"):
            raise NotBegun(self.name)
        if mistake := reply.get("mistake"):
            raise Mistake(*(words if words is None else str(words) for words in mistake[:3]))
        try:
            return wire.loads(reply["answer"])
        except (CourseError, KeyError) as error:
            raise Mistake(f"{self.name} to return something that can be judged", str(error)) from None


def _ready(pipe: int, event: int, seconds: float) -> bool:
    """Whether the pipe can be read or written within the time; also where its number is above 1,023."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(pipe, event)
        return bool(waiting.select(seconds))


def _well_formed(reply: dict[str, Any]) -> bool:
    mistake, error = reply.get("mistake"), reply.get("error")
    words = mistake if isinstance(mistake, list) and 2 <= len(mistake) <= 3 else [0] if mistake is not None else []
    texts = [*words, error, reply.get("answer")]
    return all(each is None or isinstance(each, str) for each in texts) and isinstance(reply.get("ready", []), list)


def _needed_in(folder: Path) -> bool:
    """True if Python, labkit or the models lie in this folder, which can then not be hidden."""
    needed = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__), cache_dir(), Path(tempfile.gettempdir()))
    return any(path.resolve().is_relative_to(folder) for path in needed)


def _family(pid: int) -> list[Any]:
    try:
        process = psutil.Process(pid)
        return [*process.children(recursive=True), process]
    except psutil.Error:
        return []


def _memory_of(pid: int) -> int:
    """Resident bytes of the process and its children."""
    total = 0
    for process in _family(pid):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total
