"""The numbers in docs/claims.md, docs/mask_effect_results.md and README are those of the stored results, rounded.

Every result file, path and notebook cell that docs/claims.md names exists.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from labkit import results

ROOT = Path(__file__).resolve().parent.parent
MASK_EFFECT = "docs/mask_effect_results.md"
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w,.]?\d)(?!\w)(?:\s?%)?")
TRIPLE = re.compile(r"([-+]?\d[\d.]*) \[([-+]?\d[\d.]*), ([-+]?\d[\d.]*)\]")
LINE_BREAK = re.compile(r"(?<=\d)\n *(?=\[)|(?<=\d,)\n *(?=[-+\d][\d.]*\])")  # a line may end within a triple


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-")


@cache
def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def is_rounded(figure: str, measured: float) -> bool:
    """Whether a number, as a text shows it, is the measured one at the precision of the text."""
    digits = figure.rstrip(" %").replace(",", "")
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2]) + 1e-9
    return any(abs(scale * measured - float(digits)) <= half for scale in ((1, 100) if "%" in figure else (1,)))


def values_at(data: Any, path: str) -> list[Any]:
    """What a path such as `arms[name=fuse, paraphrases=5] > mean` leads to; LookupError if that is nothing.

    A selector picks the one item of a list that has these fields, with any name if it gives none (`[fuse]`), and all
    such items if it has a `*`; `a.b=1` is a field of a field, and `a~b` a field that contains b.
    """
    values = [data]
    for step in path.split(" > "):
        key, selectors = re.fullmatch(r"([^\[\]]*)((?:\[[^\]]*\])*)", step).groups()
        values = [value[key] for value in values] if key else values
        for selector in re.findall(r"\[([^\]]*)\]", selectors):
            parts = selector.split(", ")
            values = [item for items in values for item in items if all(fits(item, part) for part in parts)]
            if not values or (len(values) > 1 and "*" not in path):
                raise LookupError(f"[{selector}] selects {len(values)} items")
    return values


def fits(item: dict[str, Any], part: str) -> bool:
    key, how, expected = re.fullmatch(r"(?:([^=~]+)([=~]))?(.+)", part).groups()
    if key is None:
        return part == "*" or part in [str(value) for value in item.values() if not isinstance(value, dict | list)]
    value: Any = item
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return expected in str(value) if how == "~" else expected == str(value)


def numbers_in(data: Any) -> list[float]:
    if isinstance(data, dict | list):
        return [number for value in (data.values() if isinstance(data, dict) else data) for number in numbers_in(value)]
    return [float(data)] if isinstance(data, int | float) and not isinstance(data, bool) else []


CLAIMS = [
    line.strip("| ").split(" | ") for line in page("docs/claims.md").splitlines() if re.match(r"\| (?!claim )", line)
]


@pytest.mark.parametrize(("claim", "shown", "measured"), CLAIMS, ids=[claim[0][:40] for claim in CLAIMS])
def test_a_claim_has_the_figures_of_what_it_names(claim, shown, measured):
    for notebook, cell in re.findall(r"\(\.\./(notebooks/\w+\.ipynb)#[^)]*\), cell `([\w-]+)`", shown):
        assert cell in [cell["id"] for cell in read(notebook)["cells"]], f"{notebook} has no cell {cell}"
    figures, everywhere = NUMBER.findall(re.sub(r'`[^`]*`|"[^"]*"', "_", claim)), []
    for file, extreme, path in re.findall(r"`([\w.]+\.json): (?:(min|max) of )?([^`]+)`", measured):
        values = values_at(read(f"benchmarks/results/{file}"), path)
        numbers = numbers_in(values)
        if extreme:
            numbers = [{"min": min, "max": max}[extreme](numbers)]
        quoted = [value for value in values if isinstance(value, str) and f'"{value}"' in claim]
        everywhere += numbers + [float(number) for number in re.findall(r"=(\d+)\b", path)]
        assert quoted or any(is_rounded(figure, n) for figure in figures for n in numbers), f"{file}: {path}"
    if "the cell" not in measured:
        assert everywhere, "a claim names a result file, or the cell"
        missing = [figure for figure in figures if not any(is_rounded(figure, number) for number in everywhere)]
        assert not missing, f"not in the result files: {missing}"


# ---- the results of the study on the mask ----------------------------------------------------------------------------


def intervals(stored: Any):
    """(mean, low, high) of everything with an interval, and the same from the other side: (-mean, -high, -low)."""
    if isinstance(stored, dict):
        for name, low, high in (("mean", "low", "high"), ("difference", "difference_low", "difference_high")):
            if stored.get(name) is not None and stored.get(low) is not None:
                yield stored[name], stored[low], stored[high]
                yield -stored[name], -stored[high], -stored[low]
        stored = list(stored.values())
    if isinstance(stored, list):
        for value in stored:
            yield from intervals(value)


# 18 differences are of runs that were repeated; their results are no longer stored
@pytest.mark.parametrize(("name", "absent"), [(MASK_EFFECT, 18), ("README.md", 0)])
def test_every_difference_of_the_page_is_stored(name, absent):
    stored = [*intervals(results.read("mask_effect")), *intervals(read("benchmarks/results/gpu/mask_effect.json"))]
    triples = TRIPLE.findall(LINE_BREAK.sub(" ", page(name)))
    missing = {triple for triple in triples if not any(all(map(is_rounded, triple, values)) for values in stored)}
    assert triples and len(missing) == absent, missing


def test_in_its_tables_a_significant_difference_is_bold_and_no_other():
    lines = [line for line in page(MASK_EFFECT).splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in lines for cell in line.strip("|").split("|") if TRIPLE.search(cell)]
    cells = [cell for cell in cells if cell.lstrip("*")[0] in "+-0"]  # differences, not scores
    assert len(cells) > 90
    for cell in cells:
        _, low, high = map(float, TRIPLE.search(cell).groups())
        assert cell.startswith("**") == (low > 0 or high < 0), cell
