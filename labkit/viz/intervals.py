"""Means over seeds and their 95 % intervals by Student's t."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats


def student_t(degrees: int, certainty: float = 0.95) -> float:
    """The t within which Student's distribution lies with this certainty, such as 4.303 for 2 degrees and 0.95."""
    return float(stats.t.ppf((1 + certainty) / 2, degrees))


def mean_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean over the first axis, the seeds, and half of its 95 % interval; None of a single seed, which has none."""
    n, mean = len(values), np.asarray(values.mean(0))
    if n == 1:
        return mean, None
    return mean, np.asarray(student_t(n - 1) * values.std(0, ddof=1) / math.sqrt(n))
