"""docs/mask_effect_results.md, and what README tells of it: every difference with its interval stands in the report.

What a page rounds is compared as it was rounded; a difference may be told from either side (3.5 [0.7, 6.4] of the one
is -3.5 [-6.4, -0.7] of the other). Figures of first runs, which no report holds any more, are listed here.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_claims import figures_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mask_effect_results.md"
TRIPLE = re.compile(r"([-+]?\d[\d.]*) \[([-+]?\d[\d.]*), ([-+]?\d[\d.]*)\]")
MAY_BREAK = re.compile(r"(?<=\d)\n *(?=\[)|(?<=\d,)\n *(?=[-+\d][\d.]*\])")  # a line may end within one
OF_FIRST_RUNS = {
    "-38.7 [-44.6, -33.9]", "+9.0 [1.7, 16.3]",  # XQuAD
    "-12.6 [-16.5, -9.1]", "+0.0 [-4.0, 4.0]", "-0.6 [-3.2, 2.2]", "-13.3 [-16.8, -9.7]",  # Wikigold
    "-15.2 [-20.5, -9.9]",
    "+7.8 [-3.1, 18.2]", "+14.7 [4.0, 25.2]", "+6.6 [-4.6, 17.6]", "+6.8 [-4.6, 17.8]",  # Which way round
    "-10.7 [-20.9, -0.7]",
    "-17.5 [-23.0, -12.2]", "+1.6 [-3.4, 6.3]", "+2.6 [-1.5, 6.7]", "-17.4 [-23.5, -11.3]",  # Field Notes
    "-25.1 [-30.6, -19.8]",
    "2.7 [0.7, 4.8]",  # WNUT 17, three seeds
}  # fmt: skip
BARELY_OF_FIRST_RUNS = {"+14.7 [4.0, 25.2]", "-10.7 [-20.9, -0.7]"}  # by their own report


def told(text: str) -> list[str]:
    """All differences with their intervals, as they stand in a text."""
    return [found[0] for found in TRIPLE.finditer(MAY_BREAK.sub(" ", text))]


@dataclass(frozen=True)
class Value:
    """Something with an interval; barely: it leaves out zero, and the wider one for all of its kind does not."""

    mean: float
    low: float
    high: float
    barely: bool = False

    def is_told_by(self, text: str) -> bool:
        """Whether the three figures of a text are rounded from it, or from what it is seen from the other side."""
        figures = figures_of(text)
        sides = (self.mean, self.low, self.high), (-self.mean, -self.high, -self.low)
        return any(all(figure.is_of(value) for figure, value in zip(figures, side, strict=True)) for side in sides)


def measured(report: object) -> Iterator[Value]:
    """Everything in a report that has an interval."""
    if isinstance(report, dict):
        if {"mean", "low", "high"} <= set(report) and report["low"] is not None:
            low, high = report["low"], report["high"]
            together = report.get("low_together"), report.get("high_together")
            open_together = None not in together and together[0] <= 0 <= together[1]
            yield Value(report["mean"], low, high, open_together and not low <= 0 <= high)
        report = list(report.values())
    if isinstance(report, list):
        for each in report:
            yield from measured(each)


def unknown(text: str, values: list[Value]) -> list[str]:
    """Those of a text that no value of the report rounds to."""
    return [each for each in told(text) if not any(value.is_told_by(each) for value in values)]


@pytest.fixture(scope="module")
def values():
    report = json.loads((ROOT / "benchmarks" / "results" / "mask_effect.json").read_text(encoding="utf-8"))
    return list(measured(report))


def test_every_difference_of_the_page_stands_in_the_report(values):
    text = PAGE.read_text(encoding="utf-8")
    assert len(told(text)) > 100
    assert set(unknown(text, values)) == OF_FIRST_RUNS


def test_so_does_every_one_that_readme_tells_of_the_mask(values):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert told(text)
    assert unknown(text, values) == []


def cells_of_tables():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in lines for cell in line.strip("|").split("|") if TRIPLE.search(cell)]
    assert len(cells) > 90
    return cells


def test_in_its_tables_what_leaves_out_zero_is_bold_and_nothing_else():
    for cell in cells_of_tables():
        _, low, high = (float(figure.text) for figure in figures_of(TRIPLE.search(cell)[0]))
        assert cell.startswith("**") == (low > 0 or high < 0), cell


def test_in_its_tables_what_is_barely_shown_is_marked_and_nothing_else(values):
    for cell in cells_of_tables():
        figures = TRIPLE.search(cell)[0]
        found = {value.barely for value in values if value.is_told_by(figures)}
        assert ("°" in cell) in (found or {figures in BARELY_OF_FIRST_RUNS}), cell


def test_a_figure_that_was_not_measured_and_one_of_two_others_are_found():
    values = [Value(3.46, 0.71, 6.44), Value(9.5, 6.52, 12.98)]
    assert unknown("gains 3.5 [0.7, 6.4], or -3 [-6,\n-1], and +9.5 [6.5,\n  13.0]", values) == []
    assert unknown("gains 3.5 [0.7, 13.0], or 3.6 [0.7, 6.4]", values) == ["3.5 [0.7, 13.0]", "3.6 [0.7, 6.4]"]
