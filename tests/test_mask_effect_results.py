"""docs/mask_effect_results.md, and what README tells of it: every difference with its interval stands in the report.

What a page rounds is compared as it was rounded; a difference may be told from either side (3.5 [0.7, 6.4] of the one
is -3.5 [-6.4, -0.7] of the other). Figures of first runs, which no report holds any more, are listed here.
"""

import json
import re
from collections.abc import Iterator
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
    "+7.8 [-3.1, 18.2]", "+14.7 [4.0, 25.2]", "+6.6 [-4.6, 16.6]", "-10.7 [-20.9, -0.7]",  # Which way round
}  # fmt: skip


def told(text: str) -> list[str]:
    """All differences with their intervals, as they stand in a text."""
    return [found[0] for found in TRIPLE.finditer(MAY_BREAK.sub(" ", text))]


def measured(report: object) -> Iterator[tuple[float, float, float]]:
    """(mean, low, high) of everything in a report that has an interval."""
    if isinstance(report, dict):
        if {"mean", "low", "high"} <= set(report) and report["low"] is not None:
            yield report["mean"], report["low"], report["high"]
        report = list(report.values())
    if isinstance(report, list):
        for each in report:
            yield from measured(each)


def unknown(text: str, values: list[tuple[float, float, float]]) -> list[str]:
    """Those of a text that no value of the report rounds to, from neither side."""
    values = [*values, *((-mean, -high, -low) for mean, low, high in values)]
    return [
        each
        for each in told(text)
        if not any(all(f.is_of(v) for f, v in zip(figures_of(each), value, strict=True)) for value in values)
    ]


@pytest.fixture(scope="module")
def values():
    report = json.loads((ROOT / "benchmarks" / "results" / "mask_effect.json").read_text(encoding="utf-8"))
    return list(measured(report))


def test_every_difference_of_the_page_stands_in_the_report(values):
    text = PAGE.read_text(encoding="utf-8")
    assert len(told(text)) > 100
    assert set(unknown(text, values)) == OF_FIRST_RUNS


def test_so_does_every_one_that_readme_tells_of_the_mask(values):
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## On a fresh machine")[0]
    assert told(text)
    assert unknown(text, values) == []


def test_in_its_tables_what_leaves_out_zero_is_bold_and_nothing_else():
    cells = [
        cell.strip()
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
        for cell in line.strip("|").split("|")
        if TRIPLE.search(cell)
    ]
    assert len(cells) > 60
    for cell in cells:
        _, low, high = (float(figure.text) for figure in figures_of(TRIPLE.search(cell)[0]))
        assert cell.startswith("**") == (low > 0 or high < 0), cell


def test_a_figure_that_was_not_measured_and_one_of_two_others_are_found():
    values = [(3.46, 0.71, 6.44), (9.5, 6.52, 12.98)]
    assert unknown("gains 3.5 [0.7, 6.4], or -3 [-6,\n-1], and +9.5 [6.5,\n  13.0]", values) == []
    assert unknown("gains 3.5 [0.7, 13.0], or 3.6 [0.7, 6.4]", values) == ["3.5 [0.7, 13.0]", "3.6 [0.7, 6.4]"]
