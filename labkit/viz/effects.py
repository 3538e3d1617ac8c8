"""What an arm changes: differences to a reference with their intervals, and scores along a quantity, as still pictures.

Plain numbers in, an `Svg` out. What is said by colour is also said by shape. An interval far longer than the others
does not set the scale: it is cut at the frame, and an arrow says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from labkit.errors import MaskError
from labkit.viz.curves import BELOW, COLOURS, GRID, PAGE, apart
from labkit.viz.intervals import mean_interval
from labkit.viz.scales import Axis, alike, cut, drawn_mark, finite, fixed, plain, reach
from labkit.viz.svg import INK, LETTER, Svg, _svg
from labkit.viz.tokens import GREY, MONO, clean, width, words

ROW, HEADER = 19, 21  # pixels, the height of an arm's row and of a group's name
NAME_LETTERS, CURVE_LETTERS = 32, 26  # longer names of arms are cut, except on hovering and in the text equivalent
NUMBERS = 12  # font size of the numbers on the right
KINDS = {  # what an interval says: (colour of the line and the mark, of the numbers, shape, in the key, in words)
    "above": (*COLOURS[0], "circle", "interval above zero", "above zero"),
    "below": (*COLOURS[1], "diamond", "interval below zero", "below zero"),
    "both": ("#8A949D", GREY, "square", "interval includes zero", "may be zero"),
    "none": (GREY, GREY, "hollow", "no interval (one seed)", "no interval"),
}
LEFT, HIGH, LABEL = 56, 300, 18  # pixels; of a curve's axis, its plot, and from one name at a line's end to the next
SHAPES = ("circle", "square", "diamond", "triangle", "turned", "bar", "upright")
ARROWS = "; arrow: it goes on"
DODGE = 8.0  # pixels at most between arms measured at the same x


def effects_svg(
    groups: Mapping[str, Mapping[str, Sequence[float | int | None]]],
    unit: str = "points of F1",
    reference: str = "causal",
    marks: Sequence[float | int] = (),
) -> Svg:
    """A forest plot: in each group one row per arm, its difference to `reference` as a mark on its 95 % interval.

    Args:
        groups: `{condition: {arm: (difference, low, high)}}` in `unit`; low and high are None where one seed ran.
        unit: of the differences, as it is written at the axis.
        reference: the arm that all are compared to; it has no row of its own.
        marks: differences to look out for, such as a claim of +5: dashed lines.

    Raises:
        MaskError: no group, a group without arms, numbers that are not finite, or an interval from high to low.
    """
    rows = _checked_effects(groups, clean(reference))
    marks = [finite(mark, "a mark") for mark in marks]
    unit, reference = clean(unit), clean(reference)
    every = [row for arms in rows.values() for row in arms]
    low, high = reach([row.value for row in every] + [0.0, *marks], [row.ends for row in every if row.ends])
    digits = _digits([row.value for row in every], max(abs(low), abs(high)))
    intervals = [width(_interval(row, digits), NUMBERS) for row in every]
    values = max(width(_signed(row.value, digits), NUMBERS) for row in every)
    left = 30 + max(len(cut(row.arm, NAME_LETTERS)) for row in every) * LETTER
    wide = PAGE - left - 38 - values - max(intervals)
    axis = Axis(low, high, left, left + wide)
    ends = (left + wide + 20 + values, PAGE - 8)  # where the two columns of numbers end

    arrows = any(axis.cuts(row.ends) for row in every)
    heading = f"Difference to {reference}, {unit}, with 95 % intervals" + ARROWS * arrows
    body, y = [words(heading, 8, 20, bold=True, size=13), *_key(every, marks)], 60
    if len(every) > 20:  # in a tall picture the numbers stand above, too
        y += 16
        body += _tick_numbers(axis, y - 6)
    for group, arms in rows.items():
        body.append(f'<rect x="0" y="{y}" width="{PAGE}" height="{HEADER}" fill="{BELOW}"/>')
        body.append(words(cut(group, 100), 8, y + 15, bold=True))
        y += HEADER
        body += _vertical_lines(axis, marks, y, y + len(arms) * ROW + 8)
        for row in arms:
            body += _row(row, group, y + ROW // 2 + 4, axis, ends, digits, unit)
            y += ROW
        y += 8
    body += _tick_numbers(axis, y + 16)
    body.append(words(f"difference to {reference}, {unit}", left + wide // 2, y + 36, GREY, "middle"))
    return _svg(body, PAGE, y + 48, _effects_in_words(rows, digits, unit, reference, marks))


def effect_curves_svg(
    curves: Mapping[str, Mapping[float | int, Sequence[float | int]]],
    x_name: str,
    y_name: str,
    title: str = "",
    log_x: bool = False,
    intervals: Mapping[str, Mapping[float | int, Sequence[float | int]]] | None = None,
) -> Svg:
    """Scores of several arms along a quantity: the mean of the seeds as a line, each seed a point, and 95 % intervals.

    Args:
        curves: `{arm: {x: one score for each seed}}`; arms need not share their x, nor their number of seeds.
        x_name, y_name: of the axes, with their units.
        title: above the picture.
        log_x: equal factors of x are equally far apart.
        intervals: `{arm: {x: (low, high)}}` of points with one score, whose interval does not come from seeds.

    Raises:
        MaskError: no arm, an arm without points, a point without scores, a number that is not finite, an x of 0 or
            less where `log_x`, or an interval that no point with one score has.
    """
    arms = _with_intervals(_checked_curves(curves, log_x), intervals or {})
    x_name, y_name, title = clean(x_name), clean(y_name), clean(title)
    points = [point for arm in arms.values() for point in arm]
    low, high = reach([s for p in points for s in p.scores], [p.ends for p in points if p.ends])
    digits = max(0, 1 - math.floor(math.log10((high - low) / 4)))
    labels = [f"{cut(name, CURVE_LETTERS)} {fixed(arm[-1].mean, digits)}" for name, arm in arms.items()]
    right = PAGE - 34 - round(max(map(len, labels)) * LETTER * 1.1)
    top = 62 if title else 40
    tall = max(HIGH, LABEL * len(arms) + 10)
    xs = sorted({point.x for point in points})
    x_axis, y_axis = _x_axis(xs, right, len(arms), log_x), Axis(low, high, top + tall, top)

    body = [words(title, 8, 20, bold=True, size=13)] if title else []
    arrows = any(y_axis.cuts(point.ends) for point in points)
    body.append(words(f"{y_name} · {_seeds_in_words(points)}{ARROWS * arrows}", 8, top - 18, GREY))
    body += _frame(x_axis, y_axis, xs, x_name, log_x)
    step = _dodge(x_axis, xs, len(arms))
    asides = [round((i - (len(arms) - 1) / 2) * step, 2) for i in range(len(arms))]
    for i, (name, arm) in enumerate(arms.items()):
        body += _curve(i, name, arm, x_axis, y_axis, asides[i], step / 2, digits)
    body += _names_at_ends(arms, x_axis, y_axis, asides, digits, right)
    return _svg(body, PAGE, top + tall + 52, _curves_in_words(arms, digits, x_name, y_name, title, points))


# ---------------------------------------------------------------------------------------------------- what is given
class _Row(NamedTuple):
    """A difference in a forest plot, and its interval."""

    arm: str
    value: float
    ends: tuple[float, float] | None

    @property
    def kind(self) -> str:
        if self.ends is None:
            return "none"
        return "above" if self.ends[0] > 0 else "below" if self.ends[1] < 0 else "both"


class _Point(NamedTuple):
    """An arm at one x."""

    x: float
    scores: list[float]
    mean: float
    ends: tuple[float, float] | None


def _checked_effects(groups: Mapping, reference: str) -> dict[str, list[_Row]]:
    if not isinstance(groups, Mapping) or not groups:
        raise MaskError("effects come as {condition: {arm: (difference, low, high)}} with at least one condition")
    checked = {}
    for group, arms in groups.items():
        if not isinstance(arms, Mapping) or not arms:
            raise MaskError(f"condition {str(group)!r} needs {{arm: (difference, low, high)}}, with at least one arm")
        checked[clean(group)] = [_checked_row(str(arm), given, str(group), reference) for arm, given in arms.items()]
    return checked


def _checked_row(arm: str, given: Sequence, group: str, reference: str) -> _Row:
    who = f"arm {arm!r} of {group!r}"
    if clean(arm) == reference:
        raise MaskError(f"{who} is the reference, which has no difference to itself: leave it out")
    if isinstance(given, str) or not hasattr(given, "__len__") or len(given) != 3:
        raise MaskError(f"{who} must be (difference, low, high), with None for both ends of no interval, not {given!r}")
    value, low, high = given
    value = finite(value, who)
    if (low is None) != (high is None):
        raise MaskError(f"{who} has one end of an interval without the other: give both, or None for both")
    if low is None:
        return _Row(clean(arm), value, None)
    low, high = finite(low, who), finite(high, who)
    if low > high:
        raise MaskError(f"the interval of {who} goes from {low:g} to {high:g}: the lower end comes first")
    return _Row(clean(arm), value, (low, high))


def _checked_curves(curves: Mapping, log_x: bool) -> dict[str, list[_Point]]:
    if not isinstance(curves, Mapping) or not curves:
        raise MaskError("curves come as {arm: {x: one score for each seed}} with at least one arm")
    checked = {}
    for arm, points in curves.items():
        who = f"arm {str(arm)!r}"
        if not isinstance(points, Mapping) or not points:
            raise MaskError(f"{who} has no points: give {{x: one score for each seed}}, or leave it out")
        found = [_checked_point(who, finite(x, f"an x of {who}"), scores) for x, scores in points.items()]
        checked[clean(arm)] = sorted(found, key=lambda point: point.x)
        if log_x and checked[clean(arm)][0].x <= 0:
            lowest = checked[clean(arm)][0].x
            raise MaskError(f"{who} has a point at x = {lowest:g}, where a logarithmic axis has none: use log_x=False")
    return checked


def _checked_point(who: str, x: float, scores: Sequence) -> _Point:
    if isinstance(scores, str) or not hasattr(scores, "__len__") or not len(scores):
        raise MaskError(f"{who} needs a list of scores at x = {x:g}, one for each seed, and has {scores!r}")
    seeds = [finite(score, f"a score of {who} at x = {x:g}") for score in scores]
    mean, half = (None if part is None else float(part) for part in mean_interval(np.array(seeds)))
    return _Point(x, seeds, mean, None if half is None else (mean - half, mean + half))


def _with_intervals(arms: dict[str, list[_Point]], intervals: Mapping) -> dict[str, list[_Point]]:
    """The points with the intervals that are given for them."""
    found = {name: {point.x: point for point in arm} for name, arm in arms.items()}
    for arm, given in intervals.items():
        for x, ends in given.items():
            who, name = f"arm {str(arm)!r} at x = {x:g}", clean(arm)
            point = found.get(name, {}).get(float(x))
            if point is None or len(point.scores) > 1:
                raise MaskError(f"{who} has no point with one score to give an interval to")
            low, high = (finite(end, f"an end of the interval of {who}") for end in ends)
            if low > high:
                raise MaskError(f"the interval of {who} goes from {low:g} to {high:g}: the lower end comes first")
            found[name][float(x)] = point._replace(ends=(low, high))
    return {name: list(points.values()) for name, points in found.items()}


def _x_axis(xs: Sequence[float], right: int, arms: int, log: bool) -> Axis:
    """The axis of x with room beside its first and last point for what is drawn around them."""
    first, last, room = xs[0], xs[-1], 14 + round(DODGE * arms / 2)
    if first == last:
        first, last = (first / 2, last * 2) if log else (first - 1, last + 1)
    return Axis(first, last, LEFT + room, right - room, log)


def _dodge(axis: Axis, xs: Sequence[float], arms: int) -> float:
    """How far neighbouring arms stand apart at the same x, so that their intervals do not hide each other."""
    nearest = min([b - a for a, b in pairwise(map(axis, xs))], default=math.inf)
    return min(DODGE, 0.6 * nearest / arms)


# --------------------------------------------------------------------------------------------------- a forest plot
def _row(row: _Row, group: str, y: int, axis: Axis, ends: tuple[int, int], digits: int, unit: str) -> list[str]:
    colour, ink, shape, _, said = KINDS[row.kind]
    body = [f"<g><title>{escape(f'{group}, {row.arm}: {_numbers(row, digits)} {unit}, {said}')}</title>"]
    body.append(words(cut(row.arm, NAME_LETTERS), 20, y + 4))
    if row.ends:
        body.append(
            _whiskers(axis(axis.within(row.ends[0])), axis(axis.within(row.ends[1])), y, colour, row.ends, axis)
        )
    body.append(drawn_mark(shape, axis(row.value), y, colour, 4.5))
    interval = f'<tspan x="{ends[1]}"> {escape(_interval(row, digits))}</tspan>' if row.ends else ""
    body.append(
        f'<text y="{y + 4}" font-family="{MONO}" font-size="{NUMBERS}" text-anchor="end" fill="{ink}">'
        f'<tspan x="{ends[0]}">{_signed(row.value, digits)}</tspan>{interval}</text></g>'
    )
    return body


def _vertical_lines(axis: Axis, marks: Sequence[float], top: int, bottom: int) -> list[str]:
    """The lines of the ticks, the marks, and zero, the thickest, behind the rows of one group."""
    body = [f'<path d="M{axis(tick)} {top}V{bottom}" stroke="{GRID}"/>' for tick in axis.ticks(8)]
    body += [f'<path d="M{axis(mark)} {top}V{bottom}" stroke="{GREY}" stroke-dasharray="4 4"/>' for mark in marks]
    return [*body, f'<path d="M{axis(0.0)} {top}V{bottom}" stroke="{INK}" stroke-width="2"/>']


def _tick_numbers(axis: Axis, y: int) -> list[str]:
    ticks = axis.ticks(8)
    numbers = [f"+{text}" if tick > 0 else text for tick, text in zip(ticks, alike(ticks), strict=True)]
    return [words(text, round(axis(tick)), y, GREY, "middle") for tick, text in zip(ticks, numbers, strict=True)]


def _key(rows: Sequence[_Row], marks: Sequence[float]) -> list[str]:
    """What the shapes that occur mean, in one line."""
    body, x = [], 14
    for kind, (colour, _, shape, text, _) in KINDS.items():
        if any(row.kind == kind for row in rows):
            line = "" if kind == "none" else f'<path d="M{x - 6} 40h20" stroke="{colour}" stroke-width="2"/>'
            body += [line, drawn_mark(shape, x + 4, 40, colour, 4.5), words(text, x + 20, 44, GREY)]
            x += 38 + round(len(text) * LETTER * 0.88)
    if marks:
        body.append(f'<path d="M{x + 4} 33v14" stroke="{GREY}" stroke-dasharray="4 4"/>')
        body.append(words(_listed(marks), x + 14, 44, GREY))
    return body


def _whiskers(x0: float, x1: float, y: int, colour: str, ends: tuple[float, float], axis: Axis) -> str:
    """A horizontal interval with a cap at each end, or an arrow where it goes on beyond the frame."""
    left = f"M{x0} {y - 4}v8" if ends[0] >= axis.low else f"M{x0 + 5} {y - 4}l-5 4l5 4"
    right = f"M{x1} {y - 4}v8" if ends[1] <= axis.high else f"M{x1 - 5} {y - 4}l5 4l-5 4"
    return f'<path d="M{x0} {y}H{x1}{left}{right}" stroke="{colour}" stroke-width="2" fill="none"/>'


def _effects_in_words(rows: Mapping, digits: int, unit: str, reference: str, marks: Sequence[float]) -> str:
    said = f"Difference to {reference} in {unit}, with 95 % intervals."
    for group, arms in rows.items():
        said += f" {group}: " + "; ".join(f"{r.arm} {_numbers(r, digits)} ({KINDS[r.kind][4]})" for r in arms) + "."
    return said + (f" Dashed lines at {_listed(marks)}." if marks else "")


# ----------------------------------------------------------------------------------------------------- curves
def _frame(x_axis: Axis, y_axis: Axis, xs: Sequence[float], x_name: str, log: bool) -> list[str]:
    body, right, bottom = [], x_axis.last + x_axis.first - LEFT, y_axis.first
    ticks = y_axis.ticks(7)
    for tick, number in zip(ticks, alike(ticks), strict=True):
        body.append(f'<path d="M{LEFT} {y_axis(tick)}H{right}" stroke="{GRID}"/>')
        body.append(words(number, LEFT - 8, round(y_axis(tick) + 4), GREY, "end"))
    body.append(f'<path d="M{LEFT} {bottom}H{right}" stroke="{GREY}"/>')
    free = 0.0
    few = len(xs) <= 12 or log
    for x in xs if few else x_axis.ticks(8):
        at, number = x_axis(x), plain(x)
        body.append(f'<path d="M{at} {bottom}v5" stroke="{GREY}"/>')
        if at - len(number) * LETTER / 2 > free:  # the x that were measured, as far as their numbers have room
            body.append(words(number, round(at), bottom + 19, GREY, "middle"))
            free = at + len(number) * LETTER / 2 + 4
    scale = ", logarithmic scale" if log else ""
    body.append(words(f"{x_name}{scale}", (LEFT + right) // 2, bottom + 40, GREY, "middle"))
    return body


def _curve(
    i: int, name: str, arm: list[_Point], x_axis: Axis, y_axis: Axis, aside: float, beside: float, digits: int
) -> list[str]:
    """The i-th arm, `aside` of its x; its seeds another few pixels `beside` their interval."""
    colour = COLOURS[i % len(COLOURS)][0]
    at = [(round(x_axis(point.x) + aside, 2), y_axis(point.mean)) for point in arm]
    dash = ' stroke-dasharray="7 4"' * (i // len(COLOURS) % 2)
    body = [f"<g><title>{escape(_arm_in_words(name, arm, digits))}</title>"]
    body.append(
        f'<path d="M{"L".join(f"{x} {y}" for x, y in at)}" fill="none" stroke="{colour}" stroke-width="2.5" '
        f'stroke-linejoin="round"{dash}/>'
    )
    for point, (x, y) in zip(arm, at, strict=True):
        if point.ends:
            low, high = (y_axis(y_axis.within(end)) for end in point.ends)
            lower = f"M{x - 3} {low}h6" if point.ends[0] >= y_axis.low else f"M{x - 4} {low - 5}l4 5l4 -5"
            upper = f"M{x - 3} {high}h6" if point.ends[1] <= y_axis.high else f"M{x - 4} {high + 5}l4 -5l4 5"
            body.append(f'<path d="M{x} {low}V{high}{lower}{upper}" stroke="{colour}" stroke-width="1.5" fill="none"/>')
        if len(point.scores) > 1:
            seeds = "".join(f"M{x + beside:.2f} {y_axis(score)}h0" for score in point.scores)
            body.append(f'<path d="{seeds}" stroke="{colour}" stroke-width="4" stroke-linecap="round" opacity=".6"/>')
        body.append(drawn_mark(SHAPES[i % len(SHAPES)] if point.ends else "hollow", x, y, colour, 5))
    return [*body, "</g>"]


def _names_at_ends(
    arms: Mapping, x_axis: Axis, y_axis: Axis, asides: list[float], digits: int, right: int
) -> list[str]:
    """The names and last means at the right, moved apart where lines end close together."""
    body, last = [], [arm[-1] for arm in arms.values()]
    levels = apart([y_axis(point.mean) for point in last], LABEL, y_axis.first - 2.0)
    for i, (name, point, level) in enumerate(zip(arms, last, levels, strict=True)):
        (colour, ink), y = COLOURS[i % len(COLOURS)], y_axis(point.mean)
        body.append(
            f'<path d="M{x_axis(point.x) + asides[i] + 8:.2f} {y}H{right}L{right + 12} {level}" stroke="{colour}" '
            'stroke-dasharray="1 3" fill="none"/>'
        )
        body.append(
            f'<text x="{right + 18}" y="{round(level + 4)}" font-size="13" fill="{ink}"><tspan font-weight="bold">'
            f"{escape(cut(name, CURVE_LETTERS))}</tspan> {fixed(point.mean, digits)}</text>"
        )
    return body


def _seeds_in_words(points: Sequence[_Point]) -> str:
    counts = sorted({len(point.scores) for point in points})
    if counts == [1]:
        if not (given := sum(point.ends is not None for point in points)):
            return "one seed, no interval"
        return "whiskers: 95 % interval" + ("; hollow: no interval" if given < len(points) else "")
    seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    hollow = "; hollow: one seed" if counts[0] == 1 else ""
    return f"mean of {seeds}, dots: single seeds, whiskers: 95 % interval{hollow}"


def _curves_in_words(arms: Mapping, digits: int, x_name: str, y_name: str, title: str, points: Sequence[_Point]) -> str:
    said = f"{title}: " if title else ""
    said += f"{y_name} against {x_name}, {_seeds_in_words(points)}."
    return " ".join([said, *(_arm_in_words(name, arm, digits) for name, arm in arms.items())])


def _arm_in_words(name: str, arm: Sequence[_Point], digits: int) -> str:
    def at(point: _Point) -> str:
        ends = f" [{', '.join(fixed(end, digits) for end in point.ends)}]" if point.ends else ""
        return f"{fixed(point.mean, digits)}{ends} at {plain(point.x)}"

    return f"{name}: {', '.join(map(at, arm))}."


# ------------------------------------------------------------------------------------------------------- numbers
def _digits(values: Sequence[float], largest: float) -> int:
    """Digits behind the point: one, or where all are below 1 as many as show two that mean something of a usual one."""
    if largest >= 1:
        return 1
    usual = median(abs(value) for value in values if value) if any(values) else largest
    return max(1, 1 - math.floor(math.log10(usual)))


def _rounded(number: float, digits: int) -> str:
    """A difference with a real minus; with up to two digits more where it would round to a zero that it is not."""
    for more in range(3 if number else 0):
        if float(f"{number:.{digits + more}f}"):
            return fixed(number, digits + more)
    return f"{0:.{digits}f}"


def _signed(number: float, digits: int) -> str:
    text = _rounded(number, digits)
    return f"+{text}" if number > 0 and text.strip("0.") else text


def _interval(row: _Row, digits: int) -> str:
    return f"[{_rounded(row.ends[0], digits)}, {_rounded(row.ends[1], digits)}]" if row.ends else ""


def _numbers(row: _Row, digits: int) -> str:
    return f"{_signed(row.value, digits)} {_interval(row, digits)}".strip()


def _listed(marks: Sequence[float]) -> str:
    return ", ".join(f"{mark:+g}" for mark in marks).replace("-", "−")
