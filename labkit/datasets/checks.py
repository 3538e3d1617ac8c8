"""Check labelled files before training on them: `check_files("qa", ["train.json", "dev.json"])`.

A fault makes a score wrong: a row that cannot be read, contradictory labels, an example that is in two splits. A
warning is often a mistake but may be intended: invisible characters, white space, a label that occurs once.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.datasets import readers
from labkit.datasets.examples import Labelled, Pair, Question, Sentence, entities_of
from labkit.datasets.files import Scan, path_of, printable, shown
from labkit.datasets.splits import named_groups
from labkit.errors import DataError, require_one_of

BY_CHANCE = 20  # a text of fewer characters ("Wednesday .", "Thanks!") may be in two splits by chance
SHOWN = 2  # examples of each finding
LABELS = {"ner": 1, "classify": 2}  # different labels that training needs
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")  # control characters, and lost ones

Findings = dict[str, list[str]]  # what is wrong -> where, in the order of the file


def check_files(task: str, paths: Sequence[str | Path], tag_column: int | None = None) -> list[dict[str, Any]]:
    """A report on each file, alone and together with the others as the splits of one data set; ready for JSON.

    Its keys are path, task, n (readable examples), counts (per label or kind of question), faults, warnings and ok.

    The first file is the one to train on: too few different labels in it are a fault. A group or a text that is in two
    files (case and white space do not matter) is a fault of the later file; for a text of fewer than 20 characters it
    is a warning. A row that cannot be read is a fault; the other rows are checked.

    Raises:
        DataError: an unknown task, or a path that is no file.
    """
    require_one_of("the task", task, readers.TASKS)
    for path in paths:
        if not path_of(path).is_file():
            raise DataError(f"{path} does not exist, or is a folder; give files of labelled examples")
    reports: list[dict[str, Any]] = []
    scans: list[Scan] = []
    for path in paths:
        try:
            scan = readers.scan(task, path, tag_column)
            if not scan.examples and not scan.faults:
                scan.faults.append(f"{path} holds no example")
        except DataError as error:
            scan = Scan(str(path), faults=[str(error)])
        faults, warnings = defaultdict(list), defaultdict(list)
        counts = _check(scan.examples, faults, warnings)
        for earlier in scans:
            _compare(scan.examples, earlier, faults, warnings)
        scans.append(scan)
        fault_lines = [*map(printable, _of_rows(scan)), *_lines(faults)]
        if not reports and scan.examples and len(counts) < LABELS.get(task, 0):
            fault_lines.append(f"training needs at least {LABELS[task]} different labels, and there are {len(counts)}")
        report = {"path": str(path), "task": task, "n": len(scan.examples), "counts": counts, "faults": fault_lines}
        reports.append(report | {"warnings": _lines(warnings), "ok": not fault_lines})
    return reports


def _of_rows(scan: Scan) -> list[str]:
    """The faults of single rows, or one for the file if all rows have the same, as where a column is missing."""
    different = {fault.removeprefix(scan.path).partition(": ")[2] for fault in scan.faults}
    if scan.examples or len(different) != 1 or len(scan.faults) < 2:
        return scan.faults
    return [f"{scan.path}, all {len(scan.faults):,} rows: {different.pop()}"]


def _check(examples: Sequence[Any], faults: Findings, warnings: Findings) -> dict[str, int]:
    """Collect the findings in the examples of one file, and count their labels."""
    seen: dict[Any, tuple[str, Any]] = {}  # by input: the id and the target of the first example
    counts: Counter[str] = Counter()
    for example in examples:
        texts, rest, target, labels = _parts(example)
        counts.update(labels)
        if (texts, rest) not in seen:
            seen[texts, rest] = example.id, target
        elif seen[texts, rest][1] != target:
            faults["the same text has different labels"].append(f"{example.id} (as {seen[texts, rest][0]})")
        else:  # short sentences repeat in running text
            findings = warnings if isinstance(example, Sentence) else faults
            findings["the same example occurs twice"].append(f"{example.id} (as {seen[texts, rest][0]})")
        for text in [value for value in vars(example).values() if isinstance(value, str)]:
            if match := _INVISIBLE.search(text):
                warnings["there is an invisible or a lost character"].append(f"{example.id} ({match[0]!r})")
        for answer in target if isinstance(example, Question) else ():
            if answer.text != answer.text.strip():
                faults["an answer has white space around it"].append(f"{example.id} ({answer.text!r})")
            elif re.fullmatch(r"[^\W_]{2}", example.context[answer.end - 1 : answer.end + 1]):
                warnings["an answer ends within a word"].append(f"{example.id} ({answer.text!r})")
        for word in example.words if isinstance(example, Sentence) else ():
            if re.search(r"\s", word):
                warnings["a word contains white space"].append(f"{example.id} ({word!r})")
    if examples and isinstance(examples[0], Sentence | Labelled):
        for label in [label for label, count in counts.items() if count == 1]:
            warnings["a label occurs only once"].append(repr(label))
    return dict(counts.most_common())


def _compare(examples: Sequence[Any], earlier: Scan, faults: Findings, warnings: Findings) -> None:
    """Collect the groups and texts of `examples` that are also in an earlier file."""
    where, groups = f"is also in {earlier.path}", named_groups(earlier.examples)
    for group in dict.fromkeys(example.group for example in examples if example.group in groups):
        faults[f"the group {where}"].append(repr(group))
    earlier_inputs = {_parts(example)[0] for example in earlier.examples}
    known_texts = set().union(*earlier_inputs)
    example_of: dict[str, Any] = {}
    for example in examples:
        texts = _parts(example)[0]
        if isinstance(example, Pair) and texts in earlier_inputs:
            faults[f"the pair {where}"].append(example.id)
        example_of |= dict.fromkeys(sorted(texts & known_texts), example)
    for text, example in example_of.items():  # two pairs may share a query or an answer
        is_meant = isinstance(example, Pair) or len(text) < BY_CHANCE
        (warnings if is_meant else faults)[f"the text {where}"].append(shown(text))


def _parts(example: Any) -> tuple[frozenset[str], str, Any, list[str]]:
    """(the texts by which splits are compared, the rest of the input, the target, the labels to count); texts folded"""
    texts, rest, target = [getattr(example, "text", "")], "", None
    match example:
        case Question():
            texts, rest, target = [example.context], example.question, example.answers
            labels = ["answerable" if example.answers else "unanswerable"]
        case Sentence():
            target, labels = example.tags, [kind for _, _, kind in entities_of(example.tags)]
        case Pair():
            texts, target = [example.first, example.second], example.score
            labels = ["without a score" if example.score is None else "scored"]
        case Labelled():
            target, labels = example.label, [example.label]
    return frozenset(map(_folded, texts)), _folded(rest), target, labels


def _folded(text: str) -> str:
    """The text without differences of case, white space and Unicode form."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _lines(findings: Findings) -> list[str]:
    """One line per finding, such as "an answer has white space around it, 3 times: q7, q9, ..."."""
    lines = []
    for what, places in findings.items():
        times = f", {len(places):,} times" if len(places) > 1 else ""
        lines.append(printable(f"{what}{times}: {', '.join(places[:SHOWN])}{', ...' if len(places) > SHOWN else ''}"))
    return lines
