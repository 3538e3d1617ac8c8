"""Loss curves of several ways of training, beside a floor below which no honest model gets: picture and slider."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, DISAGREES
from labkit.viz.svg import INK, LETTER, Svg, _svg
from labkit.viz.tokens import GREY, LINE, WRONG_INK, clean, mono, words

if TYPE_CHECKING:
    from labkit.viz.frames import Frames

# (line, letters): Okabe and Ito's palette; the letters are darker where the colour is too light to read on white
COLOURS = ((ALLOWED, "#00629B"), (DISAGREES, WRONG_INK), ("#009E73", "#00704F"), ("#CC79A7", "#96487A"))
COLOURS += (("#E69F00", "#875C00"), ("#56B4E9", "#1B6C9C"))
GRID, BELOW = "#E1E6EA", "#F3F5F7"
LEFT, TOP, HIGH, PAGE = 44, 44, 270, 800  # pixels
SAMPLE_LINES, SAMPLE_SIZE = 5, 12


def leak_curves_svg(
    steps: Sequence,
    arms: Mapping[str, Sequence],
    floor: float | int | None = None,
    floor_name: str = "ln V",
    at: int | None = None,
    samples: Mapping[str, Sequence[str]] | None = None,
) -> Svg:
    """The loss of several arms over training: the mean of the seeds as a line, their range as a band.

    Args:
        steps: the training steps at which the loss was measured, ascending.
        arms: `{name: one list of losses for each seed}`, nats per token, one number for each step.
        floor: what no honest model gets below; a dashed line, called `floor_name`.
        at: one of `steps`: marked, with the mean loss of each arm there.
        samples: `{name: one text for each step}`, what the arm wrote then: shown below, at `at` or at the last step.

    Raises:
        MaskError: lists whose lengths do not match, a loss that is no finite number, or an `at` that was not measured.
    """
    steps, means, lows, highs, seeds = _checked(steps, arms, floor, at)
    samples = _checked_samples(samples, list(means), len(steps))
    plot = _Plot(steps, means, highs, floor)
    body = plot.below_the_floor(floor) + plot.frame()
    body += plot.bands(lows, highs) + plot.lines(means) + plot.floor(floor)
    body += plot.end_labels(means, floor, floor_name, values=at is None)
    body.append(words(f"loss, nats per token · {_seeds_in_words(seeds)}", LEFT - 36, 20, GREY))
    index = len(steps) - 1 if at is None else steps.index(at)
    if at is not None:
        body += plot.marker(means, index)
    below, high = _samples(samples, index, TOP + HIGH + 60) if samples else ([], 0)
    alt = _in_words(steps, means, floor, floor_name, seeds)
    alt += f" At {_at_step(at, index, means)}." if at is not None else ""
    alt += "".join(f' {name} writes at step {steps[index]}: "{texts[index]}".' for name, texts in samples.items())
    return _svg(body + below, PAGE, TOP + HIGH + 52 + high, clean(alt))


def leak_curves_slider(
    steps: Sequence,
    arms: Mapping[str, Sequence],
    floor: float | int | None = None,
    floor_name: str = "ln V",
    samples: Mapping[str, Sequence[str]] | None = None,
    at: int | None = None,
) -> Frames:
    """`leak_curves_svg` with a slider over the measured steps, beginning at `at`, or else at the last step.

    The slider moves the marker, and with `samples` the texts below. Raises MaskError as the picture does.
    """
    from labkit.viz.frames import Frames

    steps, means, *_ = _checked(steps, arms, floor, at)
    pictures = [leak_curves_svg(steps, arms, floor, floor_name, step, samples) for step in steps]
    sentences = [f"{_at_step(step, i, means)}." for i, step in enumerate(steps)]
    index = len(steps) - 1 if at is None else steps.index(at)
    return Frames(pictures, "training step", [f"step {step}" for step in steps], sentences, index)


# ---------------------------------------------------------------------------------------------------- what is given
def _checked(steps: Sequence, arms: Mapping[str, Sequence], floor: float | int | None, at: int | None):
    """The steps as a list, and for each arm the mean, least and largest loss at each; with the numbers of seeds."""
    steps = [int(step) for step in steps]
    if len(steps) < 2 or any(b <= a for a, b in zip(steps, steps[1:], strict=False)):
        raise MaskError(f"a curve needs at least two steps in ascending order, and got {steps}")
    if not isinstance(arms, Mapping) or not arms:
        raise MaskError("leak_curves takes a dictionary {name: one list of losses for each seed} with at least one arm")
    if at is not None and at not in steps:
        raise MaskError(f"nothing was measured at step {at}: choose one of {', '.join(map(str, steps))}")
    if floor is not None and not math.isfinite(floor):
        raise MaskError(f"the floor must be a finite number of nats, not {floor}")
    means, lows, highs, seeds = {}, {}, {}, set()
    for name, curves in arms.items():
        lengths = [len(curve) if hasattr(curve, "__len__") else None for curve in curves]
        if not lengths or any(length != len(steps) for length in lengths):
            raise MaskError(
                f"arm {name!r} needs one list of {len(steps)} losses (one for each step) for each seed, and has "
                f"{len(lengths)} of lengths {lengths}"
            )
        losses = np.asarray([[float(loss) for loss in curve] for curve in curves])
        if not np.isfinite(losses).all():
            raise MaskError(f"arm {name!r} holds a loss that is no finite number: did the training diverge?")
        name = clean(str(name))
        means[name], lows[name], highs[name] = losses.mean(0), losses.min(0), losses.max(0)
        seeds.add(len(losses))
    return steps, means, lows, highs, seeds


def _checked_samples(samples: Mapping[str, Sequence[str]] | None, arms: list[str], n: int) -> dict[str, list[str]]:
    if samples is None:
        return {}
    for name, texts in samples.items():
        if clean(name) not in arms:
            raise MaskError(f"there are samples of {name!r}, which is none of the arms {', '.join(map(repr, arms))}")
        if isinstance(texts, str) or len(texts) != n:
            raise MaskError(f"the samples of {name!r} must be {n} texts, one for each step, not {len(texts)}")
    return {clean(name): [clean(text) for text in texts] for name, texts in samples.items()}


# --------------------------------------------------------------------------------------------------------- the plot
class _Plot:
    """The axes: knows where a step and a loss lie, and draws what is laid over them."""

    def __init__(self, steps: list[int], means: dict, highs: dict, floor: float | int | None) -> None:
        self.steps = steps
        longest = max([len(_cut(name)) + 6 for name in means] + [16 * (floor is not None)])
        self.wide = PAGE - LEFT - longest * (LETTER + 1) - 30
        self.top = max(float(max(high.max() for high in highs.values())), floor or 0, 1e-3) * 1.04
        self.colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(means)}

    def x(self, step: float | int) -> float:
        first, last = self.steps[0], self.steps[-1]
        return round(LEFT + (step - first) / (last - first) * self.wide, 1)

    def y(self, loss: float | int) -> float:
        return round(TOP + (1 - max(loss, 0) / self.top) * HIGH, 1)

    def frame(self) -> list[str]:
        body = []
        for loss in round_ticks(0.0, self.top, 6):
            y = self.y(loss)
            body.append(f'<path d="M{LEFT} {y}h{self.wide}" stroke="{GREY if loss == 0 else GRID}"/>')
            body.append(words(f"{loss:g}", LEFT - 8, round(y + 4), GREY, "end"))
        for step in round_ticks(float(self.steps[0]), float(self.steps[-1]), 7):
            body.append(words(f"{step:g}", round(self.x(step)), TOP + HIGH + 18, GREY, "middle"))
        body.append(words("training step", LEFT + self.wide // 2, TOP + HIGH + 40, GREY, "middle"))
        return body

    def below_the_floor(self, floor: float | int | None) -> list[str]:
        if floor is None:
            return []
        y = self.y(floor)
        return [f'<rect x="{LEFT}" y="{y}" width="{self.wide}" height="{TOP + HIGH - y:.1f}" fill="{BELOW}"/>']

    def floor(self, floor: float | int | None) -> list[str]:
        """The floor itself, over the curves, so that one which lies on it does not hide it."""
        if floor is None:
            return []
        y, halo = self.y(floor), f'stroke="{BELOW}" stroke-width="4" paint-order="stroke"'
        body = [f'<path d="M{LEFT} {y}h{self.wide}" stroke="{INK}" stroke-width="1.5" stroke-dasharray="6 4"/>']
        if TOP + HIGH - y > 60:
            note = words(
                "below the floor: only with the answer in sight", LEFT + self.wide - 10, round(y + 30), GREY, "end"
            )
            body.append(f"<g {halo}>{note}</g>")
        return body

    def bands(self, lows: dict, highs: dict) -> list[str]:
        body = []
        for name, (colour, _) in self.colours.items():
            there = [f"{self.x(step)} {self.y(loss)}" for step, loss in zip(self.steps, highs[name], strict=True)]
            back = [f"{self.x(step)} {self.y(loss)}" for step, loss in zip(self.steps, lows[name], strict=True)]
            body.append(f'<path d="M{"L".join(there + back[::-1])}z" fill="{colour}" fill-opacity=".22"/>')
        return body

    def lines(self, means: dict) -> list[str]:
        body = []
        for name, (colour, _) in self.colours.items():
            points = [f"{self.x(step)} {self.y(loss)}" for step, loss in zip(self.steps, means[name], strict=True)]
            last = f"{name}: {means[name][0]:.2f} at step {self.steps[0]}, {means[name][-1]:.2f} at {self.steps[-1]}"
            body.append(
                f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="2.5" '
                f'stroke-linejoin="round"><title>{escape(last)}</title></path>'
            )
        return body

    def end_labels(self, means: dict, floor: float | int | None, floor_name: str, values: bool) -> list[str]:
        """The names at the ends of the lines, moved apart where lines end close together."""
        labels = [
            (self.y(mean[-1]), self.colours[name], _cut(name), f"{mean[-1]:.2f}" if values else "")
            for name, mean in means.items()
        ]
        if floor is not None:
            labels.append((self.y(floor), (INK, INK), "", f"{_cut(clean(floor_name))} = {floor:.2f}"))
        body, x = [], LEFT + self.wide
        for (y, (colour, ink), name, value), level in zip(labels, apart([y for y, *_ in labels], 18), strict=True):
            body.append(f'<path d="M{x + 2} {y}L{x + 16} {level}" stroke="{colour}" fill="none"/>')
            value = f" {value}" if name and value else value
            body.append(
                f'<text x="{x + 20}" y="{round(level + 4)}" font-size="13" fill="{ink}">'
                f'<tspan font-weight="bold">{escape(name)}</tspan>{escape(value)}</text>'
            )
        return body

    def marker(self, means: dict, index: int) -> list[str]:
        """A line at one step, a dot on each curve, and each arm's loss beside its dot."""
        x, step = self.x(self.steps[index]), f"step {self.steps[index]}"
        wide = len(step) * LETTER + 14
        left = max(round(x - wide / 2), LEFT - 6)  # clear of the 0 of the other axis
        body = [
            f'<path d="M{x} {TOP}V{TOP + HIGH}" stroke="{INK}"/>',
            f'<rect x="{left}" y="{TOP + HIGH + 4}" width="{wide}" height="20" rx="5" fill="{INK}"/>',
            words(step, left + wide // 2, TOP + HIGH + 18, "#FFFFFF", "middle", bold=True),
        ]
        beside = 10 if x + 60 < LEFT + self.wide else -56
        heights = [self.y(mean[index]) for mean in means.values()]
        dots = zip(means.items(), heights, apart(heights, 21), strict=True)
        for (name, mean), y, level in dots:
            colour, ink = self.colours[name]
            body.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}" stroke="#FFFFFF" stroke-width="2"/>')
            body.append(
                f'<rect x="{x + beside}" y="{level - 10}" width="46" height="19" rx="5" fill="#FFFFFF" '
                f'stroke="{colour}"/>'
            )
            body.append(words(f"{mean[index]:.2f}", round(x + beside + 23), round(level + 4), ink, "middle", 13, True))
        return body


def _samples(samples: dict[str, list[str]], index: int, y: int) -> tuple[list[str], int]:
    """The texts of one step beside each other, as high as the longest of any step; and that height."""
    wide = (PAGE - 16 - 12 * (len(samples) - 1)) // len(samples)
    letters = (wide - 24) * 100 // (61 * SAMPLE_SIZE)
    lines = min(SAMPLE_LINES, max(-(-len(text) // letters) + 1 for texts in samples.values() for text in texts))
    high, body = 34 + lines * 17, []
    for i, (name, texts) in enumerate(samples.items()):
        x = 8 + i * (wide + 12)
        body.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="6" fill="#F6F8FA" stroke="{LINE}"/>')
        body.append(words(f"{_cut(name)} writes", x + 12, y + 20, bold=True))
        for line, text in enumerate(_lines(texts[index], letters, lines)):
            body.append(mono(text, x + 12, y + 41 + line * 17, anchor="start", size=SAMPLE_SIZE))
    return body, high + 18


def _lines(text: str, letters: int, most: int) -> list[str]:
    from textwrap import wrap

    lines = wrap(text, letters) or ["(nothing)"]
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1][: letters - 1] + "…"]


# ---------------------------------------------------------------------------------------------- numbers and places
def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` of them."""
    rough = (high - low) / (most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * k for k in (1, 2, 5, 10) if size * k >= rough * 0.999)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def apart(heights: Sequence[float], gap: int, bottom: float = TOP + HIGH - 2.0) -> list[float]:
    """`heights` in pixels, moved as little as keeps them in order, `gap` apart, and above the `bottom` of the plot."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    levels = list(heights)
    for before, i in zip(order, order[1:], strict=False):
        levels[i] = max(levels[i], levels[before] + gap)
    limit = bottom
    for i in reversed(order):
        levels[i] = min(levels[i], limit)
        limit = levels[i] - gap
    return [round(level, 1) for level in levels]


def _cut(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "…"


def _seeds_in_words(seeds: set[int]) -> str:
    if seeds == {1}:
        return "one seed"
    return f"mean of {f'{max(seeds)} seeds' if len(seeds) == 1 else 'the seeds'}, band from the lowest to the highest"


def _at_step(step: int, index: int, means: dict) -> str:
    return f"step {step}: " + ", ".join(f"{name} {mean[index]:.2f}" for name, mean in means.items())


def _in_words(steps: list[int], means: dict, floor: float | int | None, floor_name: str, seeds: set[int]) -> str:
    text = f"Loss in nats per token from training step {steps[0]} to {steps[-1]}, {_seeds_in_words(seeds)}."
    for name, mean in means.items():
        text += f" {name}: {mean[0]:.2f} at first, {mean[-1]:.2f} at the end."
    return text + (f" The floor, {floor_name}, is {floor:.2f}." if floor is not None else "")
