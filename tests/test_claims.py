"""docs/claims.md: every result file, path and cell that it names exists, and its figures round from what is there."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| (?!claim )", line)]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w,.]?\d)(?!\w)(?:\s?%)?")


@dataclass(frozen=True)
class Figure:
    """A number as a text shows it, rounded to the digits that it has."""

    text: str

    def is_of(self, measured: float) -> bool:
        digits = self.text.rstrip(" %").replace(",", "")
        half = 0.5 * 10.0 ** -len(digits.partition(".")[2]) * (1 + 1e-9) + 1e-12
        scales = (1, 100) if "%" in self.text else (1,)
        return any(abs(scale * measured - float(digits)) <= half for scale in scales)


def figures_of(text: str) -> list[Figure]:
    return [Figure(number) for number in NUMBER.findall(text)]


@cache
def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def values_at(data: Any, path: str) -> list[Any]:
    """What a path such as `arms[name=fuse, paraphrases=5] > mean` leads to; LookupError if that is nothing.

    A selector picks the one item of a list that has these fields, with any name if it gives none (`[fuse]`), and all
    such items if it has a `*`; `a.b=1` is a field of a field, and `a~b` a field that contains b.
    """
    found = [data]
    for step in path.split(" > "):
        key, picks = re.fullmatch(r"([^\[\]]*)((?:\[[^\]]*\])*)", step).groups()
        found = [item[key] for item in found] if key else found
        for pick in re.findall(r"\[([^\]]*)\]", picks):
            parts = pick.split(", ")
            found = [item for items in found for item in items if all(fits(item, part) for part in parts)]
            if not found or (len(found) > 1 and "*" not in path):
                raise LookupError(f"[{pick}] finds {len(found)} items")
    return found


def fits(item: dict[str, Any], part: str) -> bool:
    key, how, wanted = re.fullmatch(r"(?:([^=~]+)([=~]))?(.+)", part).groups()
    if key is None:
        return part == "*" or part in [str(value) for value in item.values() if not isinstance(value, dict | list)]
    value: Any = item
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return wanted in str(value) if how == "~" else wanted == str(value)


def numbers_in(data: Any) -> list[float]:
    if isinstance(data, dict | list):
        return [number for value in (data.values() if isinstance(data, dict) else data) for number in numbers_in(value)]
    return [float(data)] if isinstance(data, int | float) and not isinstance(data, bool) else []


@pytest.mark.parametrize(("claim", "shown", "measured"), ROWS, ids=[row[0][:40] for row in ROWS])
def test_a_claim_has_the_figures_of_what_it_names(claim, shown, measured):
    for notebook, cell in re.findall(r"\(\.\./(notebooks/\w+\.ipynb)#[^)]*\), cell `([\w-]+)`", shown):
        assert cell in [each["id"] for each in read(notebook)["cells"]], f"{notebook} has no cell {cell}"
    figures, everywhere = figures_of(re.sub(r'`[^`]*`|"[^"]*"', "_", claim)), []
    for file, extreme, path in re.findall(r"`([\w.]+\.json): (?:(min|max) of )?([^`]+)`", measured):
        values = values_at(read(f"benchmarks/results/{file}"), path)
        numbers = numbers_in(values)
        if extreme:
            numbers = [{"min": min, "max": max}[extreme](numbers)]
        quoted = [value for value in values if isinstance(value, str) and f'"{value}"' in claim]
        everywhere += numbers + [float(number) for number in re.findall(r"=(\d+)\b", path)]
        assert quoted or any(figure.is_of(number) for figure in figures for number in numbers), f"{file}: {path}"
    if "the cell" not in measured:
        assert everywhere, "a claim names a result file, or the cell"
        missing = [each.text for each in figures if not any(each.is_of(number) for number in everywhere)]
        assert not missing, f"not in the result files: {missing}"


def test_a_figure_is_compared_at_its_own_precision():
    figures = figures_of("1,287 tokens, -2.7 [-4.8, +0.7], 15.6 % and 3.")
    assert [each.text for each in figures] == ["1,287", "-2.7", "-4.8", "+0.7", "15.6 %", "3"]
    assert Figure("-2.7").is_of(-2.7499) and not Figure("-2.7").is_of(-2.76) and Figure("15.6 %").is_of(0.1563)
