"""docs/mask_effect_results.md and README: every difference with its interval stands in the stored results."""

import json
import re
from pathlib import Path

import pytest

from labkit import results

ROOT = Path(__file__).resolve().parent.parent
TRIPLE = re.compile(r"([-+]?\d[\d.]*) \[([-+]?\d[\d.]*), ([-+]?\d[\d.]*)\]")
LINE_BREAK = re.compile(r"(?<=\d)\n *(?=\[)|(?<=\d,)\n *(?=[-+\d][\d.]*\])")  # a line may end within a triple
FIRST_RUNS = 18  # differences of runs that were repeated; their results are no longer stored


def triples(name: str) -> list[tuple[str, ...]]:
    return [match.groups() for match in TRIPLE.finditer(LINE_BREAK.sub(" ", (ROOT / name).read_text()))]


def intervals(stored: object):
    """(mean, low, high) of everything with an interval, and the same from the other side: (-mean, -high, -low)."""
    if isinstance(stored, dict):
        if stored.get("low") is not None and "mean" in stored:
            yield stored["mean"], stored["low"], stored["high"]
            yield -stored["mean"], -stored["high"], -stored["low"]
        stored = list(stored.values())
    if isinstance(stored, list):
        for value in stored:
            yield from intervals(value)


def is_rounded(text: str, value: float) -> bool:
    return abs(float(text) - value) <= 0.5 * 10 ** -len(text.partition(".")[2]) + 1e-9


@pytest.mark.parametrize(("name", "absent"), [("docs/mask_effect_results.md", FIRST_RUNS), ("README.md", 0)])
def test_every_difference_of_the_page_is_stored(name, absent):
    stored = list(intervals(results.read("mask_effect")))
    for row in json.loads((ROOT / "benchmarks/results/gpu/mask_effect.json").read_text())["rows"]:
        stored.append((row["mean"], row["low"], row["high"]))
        if row["difference"] is not None:
            stored.append((row["difference"], row["difference_low"], row["difference_high"]))
    missing = {triple for triple in triples(name) if not any(all(map(is_rounded, triple, values)) for values in stored)}
    assert triples(name) and len(missing) == absent, missing


def test_in_its_tables_a_significant_difference_is_bold_and_no_other():
    lines = [line for line in (ROOT / "docs/mask_effect_results.md").read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in lines for cell in line.strip("|").split("|") if TRIPLE.search(cell)]
    cells = [cell for cell in cells if cell.lstrip("*")[0] in "+-0"]  # differences, not scores
    assert len(cells) > 90
    for cell in cells:
        _, low, high = map(float, TRIPLE.search(cell).groups())
        assert cell.startswith("**") == (low > 0 or high < 0), cell
