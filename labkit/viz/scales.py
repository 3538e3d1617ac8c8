"""Scales, marks and numbers that small still pictures of measurements share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from labkit.errors import MaskError
from labkit.viz.curves import round_ticks

LONG = 4  # times the median interval: a longer one does not set the scale


class Axis:
    """Where a value lies, in pixels from the `first` at `low` to the `last` at `high`."""

    def __init__(self, low: float, high: float, first: int, last: int, log: bool = False) -> None:
        self.low, self.high, self.first, self.last, self.log = low, high, first, last, log

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(value) if self.log else value) - low) / (high - low)
        return round(self.first + share * (self.last - self.first), 2)

    def within(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def cuts(self, ends: tuple[float, float] | None) -> bool:
        return ends is not None and (ends[0] < self.low or ends[1] > self.high)

    def ticks(self, most: int) -> list[float]:
        return round_ticks(self.low, self.high, most)


def reach(values: Sequence[float], intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """From the least to the largest of the values and of the intervals of ordinary length, and a margin around."""
    limit = LONG * median(high - low for low, high in intervals) if intervals else 0.0
    ends = [end for low, high in intervals if not limit or high - low <= limit for end in (low, high)]
    low, high = min([*values, *ends]), max([*values, *ends])
    margin = 0.05 * (high - low) or max(abs(low), 1.0) * 0.05
    return low - margin, high + margin


def drawn_mark(shape: str, x: float | int, y: float | int, colour: str, r: float | int) -> str:
    """A mark around (x, y) with a white edge, so that it stands out from its line; "hollow" is an empty circle."""
    if shape in ("circle", "hollow"):
        fill, edge, thick = (colour, "#FFFFFF", 1) if shape == "circle" else ("#FFFFFF", colour, 1.8)
        return f'<circle cx="{x}" cy="{y}" r="{r}" fill="{fill}" stroke="{edge}" stroke-width="{thick}"/>'
    a, b, c = round(r * 0.9, 2), round(r * 1.3, 2), round(r * 0.6, 2)
    path = {
        "square": f"m{-a} {-a}h{2 * a}v{2 * a}h{-2 * a}z",
        "diamond": f"m0 {-b}l{b} {b}l{-b} {b}l{-b} {-b}z",
        "triangle": f"m0 {-b}l{b} {round(b * 1.8, 2)}h{-2 * b}z",
        "turned": f"m0 {b}l{b} {-round(b * 1.8, 2)}h{-2 * b}z",
        "bar": f"m{-b} {-c}h{2 * b}v{2 * c}h{-2 * b}z",
        "upright": f"m{-c} {-b}h{2 * c}v{2 * b}h{-2 * c}z",
    }[shape]
    return f'<path d="M{x} {y}{path}" fill="{colour}" stroke="#FFFFFF"/>'


def fixed(number: float, digits: int) -> str:
    return f"{number:.{digits}f}".replace("-", "−")


def alike(ticks: Sequence[float]) -> list[str]:
    """The numbers of an axis, all with as many digits behind the point; 0 is 0."""
    digits = max(len(f"{tick:.10f}".rstrip("0").partition(".")[2]) for tick in ticks)
    return [fixed(tick, digits) if tick else "0" for tick in ticks]


def plain(x: float) -> str:
    return f"{x:.0f}" if x == round(x) and abs(x) < 1e7 else f"{x:.3g}"


def cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def finite(number, who: str) -> float:
    try:
        value = float(number)
    except (TypeError, ValueError):
        raise MaskError(f"{who} must be a number, not {number!r}") from None
    if not math.isfinite(value):
        raise MaskError(f"{who} must be a finite number, not {value}: was every run scored?")
    return value
