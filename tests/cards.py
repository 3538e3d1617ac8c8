"""The shipped data sets as their tests read them: rows of a file, and tables of numbers in a card."""

import json
import re
from collections import Counter

from labkit.files import folder

DATA = folder("data")
SPLITS = ("train", "dev", "test")


def rows_of(file: str) -> list[dict]:
    """The rows of a JSONL file, read without labkit's readers."""
    return [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").split("\n") if line]


def table(place: str, section: str, splits: tuple[str, ...] = SPLITS) -> dict[str, dict[str, float]]:
    """{row: {split: number}} of the tables of one section of a card; their last column, the sum, is checked here."""
    text = (DATA / place / "README.md").read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = {}
    for name, cells in re.findall(r"^\| ([^|]+) \| ([\d.,| ]+) \|$", text, re.M):
        numbers = [float(cell.replace(",", "")) for cell in cells.split("|")]
        if len(numbers) > len(splits):
            assert numbers.pop() == sum(numbers), name
        found[name] = dict(zip(splits, numbers, strict=False))
    return found


def counts(counted: dict[str, Counter], splits: tuple[str, ...] = SPLITS) -> dict[str, dict[str, float]]:
    """Counters by split in the form of `table`."""
    return {name: {split: count[split] for split in splits} for name, count in counted.items()}
