"""The process in which a submission runs: `python -m labkit.course.child REQUESTS REPLIES LIMITS`.

The sandbox begins it. It limits itself before it runs anything of the student's, then answers one request per line: run
a cell, as a notebook's kernel would (IPython), or call what the cells have defined. Who grades sits at the other end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from typing import Any

# <linux/sched.h>, CLONE_NEW...
NEW_NS, NEW_USER, NEW_PID, NEW_NET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
# <sys/mount.h>, MS_...; <linux/mount.h>, MOUNT_ATTR_RDONLY; the number of the system call mount_setattr (Linux 5.12)
PRIVATE, BIND, RECURSIVE = 0x40000, 0x1000, 0x4000
READ_ONLY, SET_ATTRIBUTES, HERE, ALL_BELOW = 1, 442, -100, 0x8000
DIE_WITH_PARENT = 1  # <linux/prctl.h>, PR_SET_PDEATHSIG


def limit(limits: dict[str, Any]) -> list[str]:
    """Puts the limits in force on this process; returns those that this system knows and allows."""
    in_force = []
    if sys.platform == "linux":
        in_force += _apart(limits["hidden"])
    try:
        import resource
    except ImportError:  # Windows
        return in_force
    wanted = {
        "memory": ("RLIMIT_DATA", limits["memory_bytes"]),
        "file size": ("RLIMIT_FSIZE", limits["file_bytes"]),
        "no core dumps": ("RLIMIT_CORE", 0),
    }
    for name, (which, value) in wanted.items():
        try:
            resource.setrlimit(getattr(resource, which), (value, value))
        except (AttributeError, ValueError, OSError):
            continue
        in_force.append(name)
    return in_force


def _apart(hidden: list[str]) -> list[str]:
    """On Linux, where the system allows it: no network, no processes but its own, nothing to write outside its folder.

    `hidden`: folders that look empty from here. Returns what is in force.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(DIE_WITH_PARENT, 9)
    if libc.unshare(NEW_USER | NEW_NET) != 0:
        return []
    if libc.unshare(NEW_PID | NEW_NS) != 0:
        return ["no network"]
    if inner := os.fork():  # this one waits: the first process of a new namespace is its child
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(DIE_WITH_PARENT, 9)
    libc.mount(b"none", b"/", None, PRIVATE | RECURSIVE, None)
    in_force = ["no network", "own processes"]
    if libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0:
        in_force.append("other processes hidden")
    own = os.getcwd().encode()
    if hidden and all(libc.mount(b"none", path.encode(), b"tmpfs", READ_ONLY, None) == 0 for path in hidden):
        in_force.append("other submissions hidden")
    if libc.mount(own, own, None, BIND, None) == 0 and _read_only(libc, b"/", ALL_BELOW, True):
        if _read_only(libc, own, 0, False):
            in_force.append("read-only outside its folder")
        libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=256m")  # memory that its own processes share
    os.chdir(own)  # into the mount that may be written
    return in_force


def _read_only(libc: ctypes.CDLL, path: bytes, flags: int, wanted: bool) -> bool:
    """Sets, or clears, a mount's being read-only."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY if wanted else 0, 0 if wanted else READ_ONLY, 0, 0)
    return libc.syscall(SET_ATTRIBUTES, HERE, path, flags, attributes, ctypes.sizeof(attributes)) == 0


def serve(requests: Any, replies: Any, in_force: list[str]) -> None:
    """Answers each request by one line, until there are no more."""
    import warnings

    from IPython.core.interactiveshell import InteractiveShell

    from labkit.course.answers import answered, described, is_stub
    from labkit.course.mistakes import Mistake
    from labkit.errors import CourseError

    warnings.filterwarnings("ignore")
    InteractiveShell.xmode = "Minimal"
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False  # its database would be one more file, in the student's name
    shell.colors = "nocolor"

    def ran(source: str) -> dict[str, Any]:
        result = shell.run_cell(source, store_history=False, silent=False)
        error = result.error_before_exec or result.error_in_exec
        return {"error": None if error is None else described(error), "not_begun": is_stub(error)}

    def asked(request: dict[str, Any]) -> dict[str, Any]:
        found = shell.user_ns.get(request["name"])
        if found is None or found is ...:
            return {"not_begun": True}
        if request["do"] == "value":
            from labkit.course import wire

            return {"answer": wire.dumps(found)}
        if not callable(found):
            return {"mistake": [f"{request['name']} to be a function", f"a {type(found).__name__}"]}
        return {"answer": answered(found, request["sent"], request["assignment"], request["observer"])}

    replies({"ready": in_force})
    for line in requests:
        request = json.loads(line)
        try:
            replies(ran(request["source"]) if request["do"] == "cell" else asked(request))
        except Mistake as mistake:  # an observer's
            replies({"mistake": [mistake.expected, mistake.came, mistake.likely]})
        except CourseError as error:
            replies({"mistake": [f"{request['name']} to return something that can be judged", str(error)]})
        except BaseException as error:  # SystemExit and KeyboardInterrupt of the student's too
            if is_stub(error):
                replies({"not_begun": True})
                continue
            replies({"mistake": [f"{request.get('name', 'a cell')} to return", described(error)]})


def main() -> None:
    requests, replies = (int(number) for number in sys.argv[1:3])
    in_force = limit(json.loads(sys.argv[3]))
    sys.path.append(os.getcwd())  # last, and not before the limits hold: a student's json.py is nobody's else

    def reply(what: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # closed by the student, or full
            sys.stdout.flush()
        data = (json.dumps(what) + "\n").encode()
        while data:
            data = data[os.write(replies, data) :]

    with os.fdopen(requests, encoding="utf-8") as lines:
        serve(lines, reply, in_force)


if __name__ == "__main__":
    main()
