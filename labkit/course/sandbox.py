"""A process of its own in which a submission runs, with limits; the checks stay in ours and judge what comes back.

    with Sandbox("a1", Limits()) as sandbox:
        sandbox.run("def causal_mask(n): ...")      # a cell; returns its error, or None
        sandbox.answer("causal_mask")(4)            # an Answer, as checks want one

bubblewrap isolates it: docs/instructors.md states what is protected and what is not. With `trusted` there is no
bubblewrap, and the code can do what you can do.
"""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Event
from typing import IO, Any

import psutil

from labkit import files
from labkit.course import CHECKS
from labkit.course.answers import MOST_BYTES, NOT_BEGUN, Answer, Reply, Request
from labkit.course.mistakes import clean
from labkit.course.predictions import GRADING, file_name
from labkit.errors import CourseError
from labkit.models.cache import cache_dir

HOME = "/home/student"  # where a submission runs
KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "LABKIT_PROFILE")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
ISOLATION = (
    "--unshare-all --unshare-user --disable-userns --die-with-parent --new-session --cap-drop ALL --uid 1000 "
    "--gid 1000 --hostname grader --proc /proc --dev /dev --tmpfs /tmp --tmpfs /run --tmpfs /home"
)
# By processor: its number, then the numbers of the system calls fcntl, socket, flock, add_key, request_key, keyctl,
# io_uring_setup, memfd_create and shmget. All but the first are refused, and leases, which fcntl makes. The last two
# would give memory that belongs to no process, which nobody counts.
CALLS = {
    "x86_64": (0xC000003E, 72, 41, 73, 248, 249, 250, 425, 319, 29),
    "aarch64": (0xC00000B7, 25, 198, 32, 217, 218, 219, 425, 279, 194),
}
F_SETLEASE = 1024
SERVE = "import json, sys; from labkit.course.answers import serve; serve(json.loads(sys.argv[1]))"
TICK = 0.1  # seconds between looks at memory, processes, processor time and Ctrl-C
CORES, SPARE_SECONDS = 1.5, 5.0  # processor time: that many cores on average, and some seconds more
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


class OutOfTime(Stopped):
    """A time limit was reached, which may depend on what else the machine does."""


class Sandbox(AbstractContextManager):
    """The process, started again if it had to be stopped: the cells that had run run again, without the one that hung.

    `cancelled`: an event that ends it with KeyboardInterrupt. `predictions`: the file that was handed in beside the
    notebook, which the process can read. `timed_out`: whether a time limit was reached. Raises CourseError if the
    process does not start.
    """

    timed_out = False

    def __init__(
        self,
        assignment: str,
        limits: Limits,
        *,
        trusted: bool = False,
        cancelled: Event | None = None,
        predictions: bytes | None = None,
    ):
        self.assignment, self.limits, self.trusted, self._cancelled = assignment, limits, trusted, cancelled or Event()
        self.predictions = predictions
        self._done: list[str] = []  # cells that came back
        self._began, self._next_look = time.monotonic(), 0.0
        self._deadline = self._began + limits.total_seconds
        self._earlier_cpu = self._cpu = 0.0  # processor seconds, of processes that have ended and of those that run
        self._process: psutil.Popen | None = None
        self._talker = ThreadPoolExecutor(1)

    def __exit__(self, *_: Any) -> None:
        """End the process and all that it has started."""
        if self._process is None:
            return
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()
        self._process.stderr.close()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends what the other thread waits for
        self._socket.close()
        self._process = None
        self._earlier_cpu, self._cpu = self._earlier_cpu + self._cpu, 0.0
        self._folder.cleanup()

    def run(self, source: str) -> str | None:
        """Run a cell; returns what went wrong in it, or None. A stub's NotImplementedError is not an error."""
        error = self._ask({"source": source}, self.limits.cell_seconds).get("error")
        if self._process is not None:
            self._done.append(source)
        return None if error in (None, NOT_BEGUN) else clean(error)  # a forged error may have many MB

    def answer(self, name: str) -> Answer:
        """What the submission has defined under `name`."""
        ask = partial(self._ask, seconds=self.limits.call_seconds)
        return Answer(name, self.assignment, ask, lambda: self.predictions)

    def _ask(self, request: Request, seconds: float) -> Reply:
        try:
            if self._process is None and time.monotonic() < self._deadline:
                self.start()
                for source in self._done:
                    self._exchange({"source": source}, self.limits.cell_seconds, self._deadline)
            return self._exchange(request, seconds, self._deadline)
        except Stopped as stopped:
            self.__exit__()
            self.timed_out |= isinstance(stopped, OutOfTime)
            return {"error": str(stopped)}

    def start(self) -> None:
        """Start the process; `run` and `answer` do so where there is none."""
        self._folder = TemporaryDirectory(prefix="labkit-submission-", ignore_cleanup_errors=True)
        if self.predictions is not None:
            Path(self._folder.name, file_name(self.assignment)).write_bytes(self.predictions)
        rlimits = {"RLIMIT_DATA": self.limits.memory_bytes, "RLIMIT_FSIZE": self.limits.file_bytes, "RLIMIT_CORE": 0}
        if not self.trusted:  # there it would count all processes of the user
            rlimits["RLIMIT_NPROC"] = 2 * self.limits.processes  # threads included
        command = [sys.executable, "-c", SERVE, json.dumps(rlimits)]
        environment = _environment(self._folder.name if self.trusted else HOME)
        self._socket, theirs = socket.socketpair()
        with theirs, TemporaryFile() as calls:
            if not self.trusted:
                command = [*bubblewrap(self.limits, calls, Path(self._folder.name)), *command]
            self._process = psutil.Popen(
                command, cwd=self._folder.name, env=environment, start_new_session=True,
                stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, pass_fds=[calls.fileno()],
            )  # fmt: skip
        self._replies = self._socket.makefile("rb")
        try:
            self._exchange({"source": ""}, START_SECONDS)
        except Stopped as stopped:
            self._process.kill()
            words = self._process.stderr.read(2**16).decode(errors="replace").strip()[-500:]
            raise CourseError(f"the process for a submission did not start: {stopped}; {words}. {ADVICE}") from None

    def _exchange(self, request: Request, seconds: float, deadline: float = math.inf) -> Reply:
        """The reply, if it carries the nonce: a line written ahead, or by another request's answer, does not."""
        if time.monotonic() > deadline:
            raise OutOfTime("no answer: the time limit of the submission was used up")
        nonce, end = secrets.token_hex(8), min(time.monotonic() + seconds, deadline)
        line = self._talker.submit(self._talk, json.dumps(request | {"nonce": nonce}) + "\n")
        while not line.done():
            if self._cancelled.is_set():
                raise KeyboardInterrupt
            if time.monotonic() > end:
                raise OutOfTime("no answer within the time limit: a loop that does not end?")
            if time.monotonic() > self._next_look:
                self._next_look = time.monotonic() + TICK
                self._require_limits()
            wait([line], TICK)
        if not line.result():
            raise Stopped("the process ended: an exit, a crash, or out of memory?")
        with suppress(ValueError, RecursionError):
            reply = json.loads(line.result())
            if isinstance(reply, dict) and all(isinstance(text, str) for text in reply.values()):
                if reply.get("nonce") == nonce:
                    return reply
        raise Stopped("the process sent a reply that is not labkit's (was something written into its pipe?)")

    def _talk(self, line: str) -> bytes:
        """In a thread of its own, as both may wait for ever: send a line, and return the next one that comes back."""
        with suppress(OSError):
            self._socket.sendall(line.encode())
            return self._replies.readline(2 * MOST_BYTES)
        return b""

    def _require_limits(self) -> None:
        processes, memory, self._cpu = self._processes(), 0, 0.0
        for process in processes:
            with suppress(psutil.Error):
                memory += process.memory_info().rss
                self._cpu += sum(process.cpu_times()[:4])  # its own, and that of its children that have ended
        if memory > self.limits.memory_bytes:
            raise Stopped(f"more than {self.limits.memory_bytes / 2**30:.1f} GB of memory were used")
        if len(processes) > self.limits.processes:
            raise Stopped(f"more than {self.limits.processes} processes were running")
        if self._earlier_cpu + self._cpu > CORES * (time.monotonic() - self._began) + SPARE_SECONDS:
            self._deadline = 0.0  # a new process would use as much
            raise OutOfTime(f"more than {CORES:g} processor cores were used, which others need")

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [self._process, *self._process.children(recursive=True)]
        return [self._process]


def bubblewrap(limits: Limits, calls: IO[bytes], files_in: Path) -> list[str]:
    """The command that runs the command after it in isolation, in HOME. It reads the filter of calls from the file.

    The files in the folder `files_in` can be read in HOME.

    Raises CourseError without bubblewrap, and on a processor whose system calls are not known.
    """
    if (program := shutil.which("bwrap")) is None:
        raise CourseError(f"submissions run in bubblewrap, and this machine has none. {ADVICE}")
    calls.write(_call_filter())
    calls.seek(0)
    command = [program, *ISOLATION.split(), "--seccomp", str(calls.fileno())]
    for path in SYSTEM:
        link = os.path.islink(path)
        command += ["--symlink", os.readlink(path), path] if link else ["--ro-bind-try", path, path]
    for folder in _visible():
        command += ["--ro-bind", str(folder), str(folder)]
    solutions = Path(__file__).parents[1] / "_notebooks"  # in an installed wheel
    if solutions.is_dir():
        command += ["--tmpfs", str(solutions)]
    command += ["--ro-bind", str(CHECKS), str(CHECKS)]
    if solutions.is_dir():
        command += ["--remount-ro", str(solutions)]
    command += ["--size", str(limits.file_bytes), "--tmpfs", HOME, "--chdir", HOME]
    for file in files_in.iterdir():
        command += ["--ro-bind", str(file), f"{HOME}/{file.name}"]
    for folder in ("/proc", "/dev", "/tmp", "/run", "/home", "/"):  # root could write to /proc/sys
        command += ["--remount-ro", folder]
    return command


def _call_filter() -> bytes:
    """A seccomp program (BPF) that refuses CALLS and leases of files."""
    if platform.machine() not in CALLS:
        raise CourseError(f"labkit isolates on {' and '.join(CALLS)}; this is {platform.machine()}. {ADVICE}")
    processor, fcntl, *refused = CALLS[platform.machine()]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06  # a jump skips as many instructions if it is true, if false
    refuse, allow = (end, 0, 0, 0x50001), (end, 0, 0, 0x7FFF0000)  # with EPERM
    program = [(load, 0, 0, 4), (equal, 1, 0, processor), refuse]  # a 32-bit call has another number
    program += [(load, 0, 0, 0), (at_least, 0, 1, 2**30), refuse]  # and so has one of x32
    for call in refused:
        program += [(equal, 0, 1, call), refuse]
    program += [(equal, 0, 3, fcntl), (load, 0, 0, 24), (equal, 0, 1, F_SETLEASE), refuse, allow]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def require_hidden(*paths: Path) -> None:
    """Raise CourseError for a file or folder that submissions could read."""
    for path in (path.expanduser().resolve() for path in paths):
        for folder in (*_visible(), *map(Path, SYSTEM)):
            if path.is_relative_to(folder.resolve()):
                raise CourseError(f"{path} lies in {folder}, which submissions can read; move it somewhere else")


def _visible() -> list[Path]:
    """What a submission needs beside the system: Python, labkit with its data, and the converted models."""
    package, shipped = Path(__file__).parents[1], [files.folder("data"), files.folder("results")]
    checkout = package.parent / "pyproject.toml"  # by which labkit.files knows a checkout
    paths = [Path(sys.base_prefix), Path(sys.prefix), package, *shipped, cache_dir(), checkout]
    return [path for path in dict.fromkeys(paths) if path.exists()]


def _environment(home: str) -> dict[str, str]:
    """The variables of a submission, and of bubblewrap, whose own can be read inside (/proc/1/environ)."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]), "HOME": home, "TMPDIR": home,
        "USER": "student", "IPYTHONDIR": f"{home}/.ipython", "MPLBACKEND": "agg", "LABKIT_CACHE": str(cache_dir()),
        "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1", GRADING: "1",
    }  # fmt: skip
