"""A process of its own in which a submission runs, with limits; the checks stay in ours and judge what comes back.

    with Sandbox("a1", Limits()) as sandbox:
        sandbox.run("def causal_mask(n): ...")      # a cell; returns its error, or None
        sandbox.answer("causal_mask")(4)            # an Answer, as checks want one

bubblewrap isolates it: a submission sees Python, labkit and the system's libraries, read-only, and one empty folder of
its own in memory; no network, no socket, no other process, no variable of ours. `trusted` leaves that out, and then the
code can do what you can do. docs/instructors.md states what is protected and what is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from labkit import files
from labkit.course import wire
from labkit.course.answers import Answer, Reply
from labkit.errors import CourseError
from labkit.models.cache import cache_dir

HOME = "/home/student"  # where a submission runs
KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "LABKIT_PROFILE")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
MOST_REPLY = 2 * wire.MOST_BYTES
TICK = 0.1  # seconds between looks at memory, processes and Ctrl-C
START_SECONDS = 120.0
ADVICE = (
    "Install bubblewrap 0.8 or newer (sudo apt-get install bubblewrap), use the container in deploy/grader, or let the "
    "students' code run as you, with --trust-submissions"
)


@dataclass(frozen=True)
class Limits:
    """What one submission may use. `file_bytes`: all its files together; with `trusted`, each of them."""

    cell_seconds: float = 60.0
    call_seconds: float = 10.0
    total_seconds: float = 600.0
    memory_bytes: int = 4 * 2**30
    file_bytes: int = 256 * 2**20
    processes: int = 64


class Stopped(Exception):
    """The process had to be ended, or ended itself; the message says why."""


class Sandbox:
    """The process, started again if it had to be stopped: the cells that had run run again, without the one that hung.

    `cancelled`: an event that ends it with KeyboardInterrupt.

    Raises:
        CourseError: the process does not start.
    """

    def __init__(
        self,
        of_assignment: str,
        limits: Limits | None = None,
        *,
        trusted: bool = False,
        cancelled: threading.Event | None = None,
    ):
        self.assignment, self.limits, self.trusted = of_assignment, limits or Limits(), trusted
        self._cancelled = cancelled or threading.Event()
        self._done: list[str] = []  # cells that came back
        self._process: subprocess.Popen | None = None
        self._deadline = time.monotonic() + self.limits.total_seconds
        self._next_look = 0.0

    def __enter__(self) -> Sandbox:
        self._start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()

    def run(self, source: str) -> str | None:
        """Run a cell; returns what went wrong in it, or None. A stub's NotImplementedError is not an error."""
        try:
            error = self._ask({"source": source}, self.limits.cell_seconds).get("error")
        except Stopped as stopped:
            return str(stopped)
        self._done.append(source)
        return None if error is None else str(error)

    def answer(self, name: str) -> Answer:
        """What the submission has defined under `name`."""

        def respond(request: dict[str, Any]) -> Reply:
            try:
                return self._ask(request, self.limits.call_seconds)
            except Stopped as stopped:
                return {"mistake": [f"{name} to return", str(stopped), None]}

        return Answer(name, self.assignment, respond)

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        if time.monotonic() > self._deadline:
            raise Stopped(f"the submission's {self.limits.total_seconds:g} seconds were used up")
        try:
            if self._process is None:
                self._start()
                for source in self._done:
                    self._exchange({"source": source}, self.limits.cell_seconds)
            return self._exchange(request, seconds)
        except Stopped:
            self._end()
            raise

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="labkit-submission-", ignore_cleanup_errors=True)
        self._rest = b""
        rlimits = {"DATA": self.limits.memory_bytes, "FSIZE": self.limits.file_bytes, "CORE": 0}
        if not self.trusted:  # elsewhere it would count all processes of the user
            rlimits["NPROC"] = 2 * self.limits.processes  # threads included
        command = [sys.executable, "-m", "labkit.course.child"]
        command.append(json.dumps({f"RLIMIT_{name}": value for name, value in rlimits.items()}))
        if self.trusted:
            environment = _environment(self._folder.name)
        else:
            # bubblewrap's own variables can be read inside, in /proc/1/environ: it gets those of systemd-run only.
            environment = {k: os.environ[k] for k in ("DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR") if k in os.environ}
            environment["PATH"] = os.defpath
            command = [*_scope(self.limits), *bubblewrap(self.limits), *command]
        self._process = subprocess.Popen(
            command, cwd=self._folder.name, env=environment, start_new_session=True, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self._receive("start", START_SECONDS)
        except Stopped as stopped:
            self._process.kill()
            words = (self._process.stderr.read(2**16) or b"").decode(errors="replace").strip()[-500:]
            self._end()
            raise CourseError(f"the process for a submission did not start: {stopped}; {words}. {ADVICE}") from None
        except BaseException:
            self._end()
            raise
        self._process.stderr.close()  # it was needed for the reason of a failed start only

    def _end(self) -> None:
        if self._process is None:
            return
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            file.close()
        self._process = None
        self._folder.cleanup()

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        nonce, end = secrets.token_hex(8), time.monotonic() + seconds
        data = memoryview((json.dumps(request | {"nonce": nonce}) + "\n").encode())
        pipe = self._process.stdin.fileno()
        while data:
            self._wait_for(pipe, selectors.EVENT_WRITE, end, seconds)
            try:
                data = data[os.write(pipe, data) :]
            except BrokenPipeError:
                raise Stopped(self._last_words()) from None
        return self._receive(nonce, seconds)

    def _receive(self, nonce: str, seconds: float) -> dict[str, Any]:
        """The next reply, if it carries the nonce: a line written ahead, or by another request's answer, does not."""
        end, pipe = min(time.monotonic() + seconds, self._deadline), self._process.stdout.fileno()
        while b"\n" not in self._rest:
            self._wait_for(pipe, selectors.EVENT_READ, end, seconds)
            if not (piece := os.read(pipe, 2**20)):
                raise Stopped(self._last_words())
            self._rest += piece
            if len(self._rest) > MOST_REPLY:
                raise Stopped("the answer was too large to be judged")
        line, _, self._rest = self._rest.partition(b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            reply = json.loads(line)
            if isinstance(reply, dict) and reply.get("nonce") == nonce and _is_well_formed(reply):
                return reply
        raise Stopped("the process sent a reply that is not labkit's (was something written into its pipe?)")

    def _wait_for(self, pipe: int, event: int, end: float, seconds: float) -> None:
        """Wait until the pipe is ready, while the submission keeps its limits."""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            ready = False
            while not ready:
                ready = bool(selector.select(TICK))
                self._watch()
                if time.monotonic() > end:  # also where something is ready: one byte after the other may come for ever
                    raise Stopped(f"no answer within {seconds:g} seconds: a loop that does not end?")

    def _watch(self) -> None:
        if self._cancelled.is_set():
            raise KeyboardInterrupt
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + TICK
        processes, memory = self._family(), 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
        if memory > self.limits.memory_bytes:
            raise Stopped(f"more than {self.limits.memory_bytes / 2**30:.1f} GB of memory were used")
        if len(processes) > self.limits.processes:
            raise Stopped(f"more than {self.limits.processes} processes were running")

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "the process closed its pipe"
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"the process ended {how}" + (" (often: out of memory)" if code in (-9, 137) else "")


def bubblewrap(limits: Limits) -> list[str]:
    """The command that runs the command after it in isolation, in HOME. Raises CourseError without bubblewrap."""
    if (program := shutil.which("bwrap")) is None:
        raise CourseError(f"submissions run in bubblewrap, and this machine has none. {ADVICE}")
    command = [program, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "grader", "--clearenv"]
    for name, value in _environment(HOME).items():
        command += ["--setenv", name, value]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run", "--tmpfs", "/home"]
    for path in SYSTEM:
        link = os.path.islink(path)
        command += ["--symlink", os.readlink(path), path] if link else ["--ro-bind-try", path, path]
    for folder in _visible():
        command += ["--ro-bind", str(folder), str(folder)]
    solutions = Path(__file__).parents[1] / "_notebooks"  # in an installed wheel
    if solutions.is_dir():
        command += ["--tmpfs", str(solutions), "--remount-ro", str(solutions)]
    command += ["--size", str(limits.file_bytes), "--tmpfs", HOME, "--chdir", HOME]
    for folder in ("/proc", "/dev", "/tmp", "/run", "/home", "/"):  # root could write to /proc/sys
        command += ["--remount-ro", folder]
    return command


def require_isolation(private: Sequence[Path] = ()) -> None:
    """Raise CourseError unless bubblewrap works here and hides the files and folders `private` from submissions."""
    for path in (Path(path).expanduser().resolve() for path in private):
        for folder in (*_visible(), *map(Path, SYSTEM)):
            if path.is_relative_to(folder.resolve()):
                raise CourseError(f"{path} lies in {folder}, which submissions can read; move it somewhere else")
    command = [*bubblewrap(Limits()), sys.executable, "-c", ""]
    done = subprocess.run(command, env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise CourseError(f"bubblewrap does not work on this machine: {done.stderr.strip()[-300:]}. {ADVICE}")


def _visible() -> list[Path]:
    """What a submission needs beside the system: Python, labkit with its data, and the converted models."""
    package, shipped = Path(__file__).parents[1], [files.folder("data"), files.folder("results")]
    checkout = package.parent / "pyproject.toml"  # by which labkit.files knows a checkout
    paths = [Path(sys.base_prefix), Path(sys.prefix), package, *shipped, cache_dir(), checkout]
    return [path for path in dict.fromkeys(paths) if path.exists()]


def _environment(home: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]), "HOME": home, "TMPDIR": home,
        "USER": "student", "IPYTHONDIR": f"{home}/.ipython", "MPLBACKEND": "agg", "LABKIT_CACHE": str(cache_dir()),
        "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


@cache
def _scope(limits: Limits) -> list[str]:
    """The command for a control group with these limits, where systemd runs; elsewhere nothing, and `_watch` remains.

    A control group also counts memory that belongs to no process.
    """
    command = ["systemd-run", "--scope", "--quiet", "--collect", "-p", f"MemoryMax={limits.memory_bytes}"]
    command += ["-p", "MemorySwapMax=0", "-p", f"TasksMax={2 * limits.processes}"]
    command += [] if os.geteuid() == 0 else ["--user"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run([*command, "true"], capture_output=True, timeout=10).returncode == 0:
            return command
    return []


def _is_well_formed(reply: dict[str, Any]) -> bool:
    mistake = reply.get("mistake", ["", "", None])
    if not isinstance(mistake, list) or len(mistake) != 3 or None in mistake[:2]:
        return False
    return all(text is None or isinstance(text, str) for text in [*mistake, reply.get("error"), reply.get("answer")])
