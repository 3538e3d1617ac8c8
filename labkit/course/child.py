"""The process in which a submission runs: `python -m labkit.course.child LIMITS`, started by labkit.course.sandbox.

It limits itself, then answers one request per line: run a cell, as a notebook's kernel would (IPython), or call what
the cells have defined. Requests come on standard input and replies go to standard output; the student's code has
neither. Each reply repeats the nonce of its request, so nothing that was written ahead counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import warnings
from typing import Any


def main() -> None:
    limits = json.loads(sys.argv[1])
    for kind, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of memory: the grader's watch remains
            resource.setrlimit(getattr(resource, kind), (value, value))
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    empty = os.open(os.devnull, os.O_RDWR)
    from IPython.core.interactiveshell import InteractiveShell

    from labkit.course.answers import described, is_stub, respond

    warnings.filterwarnings("ignore")
    InteractiveShell.xmode = "Minimal"
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    shell.colors = "nocolor"
    sys.path.append(os.getcwd())  # the last place: a student's json.py replaces nothing
    for number in (0, 1, 2):  # standard error is needed until here: it says why a process did not start
        os.dup2(empty, number)

    def run(source: str) -> dict[str, Any]:
        result = shell.run_cell(source, store_history=False, silent=False)
        error = result.error_before_exec or result.error_in_exec
        return {"error": None if error is None or is_stub(error) else described(error)}

    _write(replies, {"nonce": "start"})
    for line in requests:
        request = json.loads(line)
        reply = run(request["source"]) if "source" in request else respond(shell.user_ns, request)
        _write(replies, reply | {"nonce": request["nonce"]})


def _write(pipe: int, reply: dict[str, Any]) -> None:
    data = (json.dumps(reply) + "\n").encode()
    while data:
        data = data[os.write(pipe, data) :]


if __name__ == "__main__":
    main()
