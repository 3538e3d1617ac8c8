"""Means over seeds and what is known of them: 95 % intervals by Student's t."""

from __future__ import annotations

import math

import numpy as np

from labkit.errors import MaskError


def student_t(degrees: int, certainty: float = 0.95) -> float:
    """The t within which Student's distribution lies with this certainty, such as 4.303 for 2 degrees and 0.95.

    Of whole degrees of freedom the distribution has a closed form (Abramowitz and Stegun, 26.7.3 and 26.7.4) in the
    angle whose tangent is t / sqrt(degrees); its inverse is found by halving.
    """
    if degrees < 1:
        raise MaskError(f"an interval needs at least two values, and {degrees + 1} were given")
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < certainty else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def mean_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean over the first axis, the seeds, and half of its 95 % interval; None of a single seed, which has none."""
    n, mean = len(values), np.asarray(values.mean(0))
    if n == 1:
        return mean, None
    return mean, np.asarray(student_t(n - 1) * values.std(0, ddof=1) / math.sqrt(n))


def _within(angle: float, degrees: int) -> float:
    """The probability that |T| is below tan(angle) * sqrt(degrees)."""
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 or not odd else 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
