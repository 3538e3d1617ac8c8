from dataclasses import replace

import pytest

from labkit.course.sandbox import Sandbox
from tests.course.handed_in import RIGHT, TIGHT


@pytest.fixture(scope="module")
def trusted():
    """A process without bubblewrap, in which `causal_mask` is defined."""
    with Sandbox("a1", replace(TIGHT, total_seconds=3600.0), trusted=True) as running:
        assert running.run(RIGHT) is None
        yield running
