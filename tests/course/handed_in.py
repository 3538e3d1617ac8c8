"""Notebooks as students hand them in, and the mark of tests that need bubblewrap."""

import json
from functools import cache

import pytest

from labkit.course.sandbox import Limits, require_isolation
from labkit.errors import CourseError

TIGHT = Limits(cell_seconds=4.0, call_seconds=3.0, total_seconds=120.0, memory_bytes=2 * 2**30, file_bytes=32 * 2**20)
RIGHT = "import torch\ndef causal_mask(n):\n    return torch.ones(n, n).tril().bool()"
UPPER = "import torch\ndef causal_mask(n):\n    return torch.ones(n, n).triu().bool()"


@cache
def no_isolation():
    try:
        require_isolation()
    except CourseError as error:
        return str(error)


isolated = pytest.mark.skipif(no_isolation() is not None, reason=no_isolation() or "")


def notebook(*cells, **about):
    """A submission to A1 with these code cells, as the text of its file."""
    made = [{"cell_type": "code", "metadata": {}, "source": source, "outputs": []} for source in cells]
    return json.dumps({"cells": made, "metadata": {"labkit": {"assignment": "a1", **about}}, "nbformat": 4})
