"""The differences in the docs, README and lesson 14 are those of the stored results, rounded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from labkit import results

ROOT = Path(__file__).resolve().parent.parent
MASK_EFFECT = "docs/mask_effect_results.md"
LESSON = "notebooks/14_what_the_mask_buys.ipynb"
CLAIMS = "docs/claims.md"
NUMBER = r"([-+]?\d[\d.]*)"
TRIPLE = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]")
IN_WORDS = re.compile(rf"{NUMBER} points \(95 % CI {NUMBER} to {NUMBER}, \d seeds\)")
LINE_BREAK = re.compile(r"(?<=\d)\n *(?=\[)|(?<=\d,)\n *(?=[-+\d][\d.]*\])")  # a line may end within a triple


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-")


def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def is_rounded(figure: str, measured: float) -> bool:
    """Whether a number, as a text shows it, is the measured one at the precision of the text."""
    return abs(measured - float(figure)) <= 0.5 * 10.0 ** -len(figure.partition(".")[2]) + 1e-9


def intervals(stored: Any):
    """(mean, low, high) of everything with an interval, and the same from the other side: (-mean, -high, -low)."""
    if isinstance(stored, dict):
        others = [(name, f"{name}_low", f"{name}_high") for name in ("difference", "growth", "beyond", "over_baseline")]
        for name, low, high in [("mean", "low", "high"), *others]:
            if stored.get(name) is not None and stored.get(low) is not None:
                yield stored[name], stored[low], stored[high]
                yield -stored[name], -stored[high], -stored[low]
        stored = list(stored.values())
    if isinstance(stored, list):
        for value in stored:
            yield from intervals(value)


def prose(name: str) -> str:
    """The page, or the Markdown cells of the notebook."""
    if not name.endswith(".ipynb"):
        return page(name)
    return "\n".join("".join(cell["source"]) for cell in read(name)["cells"] if cell["cell_type"] == "markdown")


@pytest.mark.parametrize(
    ("name", "form"), [(MASK_EFFECT, TRIPLE), ("README.md", TRIPLE), (CLAIMS, TRIPLE), (LESSON, IN_WORDS)]
)
def test_every_difference_of_the_page_is_stored(name, form):
    stored = [*intervals(results.read("mask_effect")), *intervals(read("benchmarks/results/gpu/mask_effect.json"))]
    triples = form.findall(LINE_BREAK.sub(" ", prose(name)))
    missing = {triple for triple in triples if not any(all(map(is_rounded, triple, values)) for values in stored)}
    assert triples and not missing


def test_every_claim_names_a_cell_that_exists():
    cells = re.findall(r"\(\.\./(notebooks/\w+\.ipynb)\), `([\w-]+)`", page(CLAIMS))
    assert len(cells) == sum(line.startswith("| ") for line in page(CLAIMS).splitlines()) - 1  # and a heading
    for lesson, cell in cells:
        assert cell in {known["id"] for known in read(lesson)["cells"]}, f"{lesson}: {cell}"


def test_in_its_tables_a_significant_difference_is_bold_and_no_other():
    lines = [line for line in page(MASK_EFFECT).splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in lines for cell in line.strip("|").split("|") if TRIPLE.search(cell)]
    cells = [cell for cell in cells if cell.lstrip("*")[0] in "+-0"]  # differences, not scores
    assert len(cells) > 90
    for cell in cells:
        _, low, high = map(float, TRIPLE.search(cell).groups())
        assert cell.startswith("**") == (low > 0 or high < 0), cell
