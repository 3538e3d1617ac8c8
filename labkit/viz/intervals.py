"""Means over seeds and what is known of them: 95 % intervals by Student's t."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from labkit.errors import MaskError


@lru_cache(maxsize=1024)
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


def student_below(t: np.ndarray, degrees: int) -> np.ndarray:
    """The probability that Student's T of so many whole degrees of freedom is below each of these values."""
    angles = np.arctan(np.asarray(t, dtype=float) / math.sqrt(degrees))
    return (1.0 + _within(angles, degrees)) / 2.0


def mean_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean over the first axis, the seeds, and half of its 95 % interval; None of a single seed, which has none."""
    n, mean = len(values), np.asarray(values.mean(0))
    if n == 1:
        return mean, None
    return mean, np.asarray(student_t(n - 1) * values.std(0, ddof=1) / math.sqrt(n))


def _within(angle: float | np.ndarray, degrees: int) -> Any:
    """The probability that |T| is below tan(angle) * sqrt(degrees); with a minus sign if the angle has one."""
    odd, cosine, sine = degrees % 2, np.cos(angle), np.sin(angle)
    term = cosine if odd else np.ones_like(cosine)
    total = term if degrees > 1 or not odd else np.zeros_like(cosine)
    for k in range(3 if odd else 2, degrees - 1, 2):
        term = term * (k - 1) / k * cosine**2
        total = total + term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
