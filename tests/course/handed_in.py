"""Notebooks as students hand them in, and the mark of tests that need bubblewrap."""

import json

import pytest

from labkit.course.sandbox import Limits, Sandbox
from labkit.errors import CourseError

TIGHT = Limits(cell_seconds=4.0, call_seconds=3.0, total_seconds=120.0, memory_bytes=2 * 2**30, file_bytes=32 * 2**20)
RIGHT = "import torch\ndef causal_mask(n):\n    return torch.ones(n, n).tril().bool()"
UPPER = RIGHT.replace("tril", "triu")

try:
    with Sandbox("a1", TIGHT) as running:
        running.start()
    REASON = ""
except CourseError as error:
    REASON = str(error)
isolated = pytest.mark.skipif(REASON != "", reason=REASON)


def notebook(*cells, **about):
    """A submission to A1 with these code cells, as the text of its file."""
    code = [{"cell_type": "code", "metadata": {}, "source": source, "outputs": []} for source in cells]
    return json.dumps({"cells": code, "metadata": {"labkit": {"assignment": "a1", **about}}, "nbformat": 4})


def hand_in(folder, **cells):
    """`folder` with one notebook per student, {student: its only cell}."""
    folder.mkdir(parents=True, exist_ok=True)
    for student, cell in cells.items():
        (folder / f"{student}.ipynb").write_text(notebook(cell))
    return folder
