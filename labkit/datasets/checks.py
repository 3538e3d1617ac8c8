"""Check labelled files before training on them: `check_files("qa", ["train.json", "dev.json"])`.

A fault makes a score wrong: a row that cannot be read, contradictory labels, an example that is in two splits. A
warning names what is often a slip but may be meant: invisible characters, one label in twenty, a label that occurs
once. Each finding shows how often it occurs and names two examples by their ids.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.datasets.examples import Labelled, Pair, Question, Sentence
from labkit.datasets.files import Reading, path_of, printable
from labkit.datasets.readers import TASKS, scan
from labkit.datasets.splits import has_name
from labkit.datasets.tags import entities_of, scheme_of, to_bio
from labkit.errors import DataError

LONG = 100_000  # characters of a text
UNEVEN = 20  # warn if the commonest label is that many times as frequent as the rarest
BY_CHANCE = 20  # a text of fewer characters ("Wednesday .", "Thanks!") may be in two splits by chance
SHOWN = 2  # examples of each finding
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # control characters except tab and line ends
_REPLACED, _SURROGATES = "\ufffd", re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class Report:
    """The result of checking one file: `n` examples can be read, `counts` is per label or kind of question, and `notes`
    say how the file was read.
    """

    path: str
    task: str
    n: int
    counts: dict[str, int]
    faults: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def check_files(task: str, paths: Sequence[str | Path], tag_column: int | None = None) -> list[Report]:
    """A report on each file, alone and together with the others as the splits of one data set.

    A group or a text that is in two files (case and white space do not matter) is a fault of the later file; for a text
    of fewer than 20 characters it is a warning. A row that cannot be read is a fault; the other rows are checked.

    Raises:
        DataError: an unknown task, a path that is no file, or one given twice.
    """
    if task not in TASKS:
        raise DataError(f"the task is {task!r}; choose one of {', '.join(TASKS)}")
    paths = [path_of(path) for path in paths]
    for i, path in enumerate(paths):
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise DataError(f"{path} {what}; give files of labelled examples")
        if path.resolve() in {earlier.resolve() for earlier in paths[:i]}:
            raise DataError(f"{path} is given twice; give each split once")
    reports: list[Report] = []
    readable: list[tuple[Path, list[Any]]] = []
    for path in paths:
        try:
            reading = scan(task, path, tag_column)
        except DataError as error:
            reading = Reading(str(path), faults=[str(error)])
        examples, faults, warnings = reading.examples, Findings(), Findings()
        if not examples and not reading.faults:
            reading.faults.append(f"{path} holds no example")
        counts = _CHECKS[task](examples, faults, warnings) if examples else {}
        _check_characters(task, examples, faults, warnings)
        if task == "ner":
            _check_scheme(reading.tags, [sentence.id for sentence in examples], warnings)
        for other, earlier in readable:
            _check_leakage(task, examples, earlier, other, faults, warnings)
        readable.append((path, examples))
        unread = tuple(map(printable, reading.faults))
        notes = tuple(map(printable, filter(None, [reading.layout, *reading.notes])))
        reports.append(Report(str(path), task, len(examples), counts, unread + faults.lines(), warnings.lines(), notes))
    return reports


class Findings:
    """Findings by kind, and where each occurs."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = defaultdict(list)

    def add(self, what: str, where: str) -> None:
        self._places[what].append(where)

    def lines(self) -> tuple[str, ...]:
        """One line per kind, such as "an answer has white space around it, 3 times: q7, q9, ..."."""
        return tuple(
            printable(f"{what}{_times(len(places))}: {', '.join(places[:SHOWN])}{', ...' if places[SHOWN:] else ''}")
            for what, places in self._places.items()
        )


# ---- one file --------------------------------------------------------------------------------------------------------


def _check_questions(questions: Sequence[Question], faults: Findings, warnings: Findings) -> dict[str, int]:
    asked: dict[tuple[str, str], str] = {}
    for question in questions:
        for answer in question.answers:
            if answer.text != answer.text.strip():
                faults.add("an answer has white space around it", f"{question.id} ({answer.text!r})")
            elif _cuts_a_word(question.context, answer.start) or _cuts_a_word(question.context, answer.end):
                warnings.add("an answer begins or ends within a word", f"{question.id} ({answer.text!r})")
        first = asked.setdefault((_loosely(question.question), question.context), question.id)
        if first != question.id:
            faults.add("the same question is asked twice about one context", f"{question.id} (as {first})")
    unanswerable = sum(not question.answers for question in questions)
    contexts = len({question.context for question in questions})
    return {"answerable": len(questions) - unanswerable, "unanswerable": unanswerable, "contexts": contexts}


def _check_sentences(sentences: Sequence[Sentence], faults: Findings, warnings: Findings) -> dict[str, int]:
    seen: dict[str, Sentence] = {}
    places: dict[str, list[str]] = defaultdict(list)
    for sentence in sentences:
        if not sentence.words or not all(word.strip() for word in sentence.words):
            faults.add("there is no word, or a blank one", sentence.id)
        if spaced := [word for word in sentence.words if re.search(r"\s", word)]:
            warnings.add("a word contains white space; columns are separated by tabs", f"{sentence.id} ({spaced[0]!r})")
        first = seen.setdefault(" ".join(sentence.words), sentence)
        if first is not sentence and first.tags != sentence.tags:
            faults.add(
                "the same words have different tags", f"{sentence.id} (as {first.id}: {_short(sentence.text)!r})"
            )
        elif first is not sentence:
            warnings.add("the same sentence occurs twice", f"{sentence.id} (as {first.id}: {_short(sentence.text)!r})")
        for start, end, kind in entities_of(sentence.tags):
            entity = sentence.text[sentence.spans[start][0] : sentence.spans[end - 1][1]]
            places[kind].append(f"{sentence.id} ({entity!r})")
            if len(entity) == 1:
                warnings.add("an entity is one character", f"{sentence.id} ({entity!r}, {kind})")
    for kind, where in places.items():
        if len(where) == 1:
            warnings.add(f"the label {kind} has only one entity", where[0])
    return dict(Counter({kind: len(where) for kind, where in places.items()}).most_common())


def _check_labelled(examples: Sequence[Labelled], faults: Findings, warnings: Findings) -> dict[str, int]:
    seen: dict[str, Labelled] = {}
    for example in examples:
        first = seen.setdefault(_loosely(example.text), example)
        if first is not example and first.label != example.label:
            where = f"{example.id} {example.label!r} ({first.id} {first.label!r})"
            faults.add("the same text has different labels", where)
        elif first is not example:
            faults.add("the same text occurs twice", f"{example.id} (as {first.id})")
    counts = dict(Counter(example.label for example in examples).most_common())
    if len(counts) == 1:
        warnings.add("there is only one label", repr(next(iter(counts))))
    elif max(counts.values()) >= UNEVEN * min(counts.values()):
        listed = ", ".join(f"{label!r} {count}" for label, count in counts.items())
        warnings.add(f"one label is {UNEVEN} times as frequent as another, or more", listed)
    return counts


def _check_pairs(pairs: Sequence[Pair], faults: Findings, warnings: Findings) -> dict[str, int]:
    seen: dict[frozenset[str], Pair] = {}
    for pair in pairs:
        if len(both := _both(pair)) == 1:
            warnings.add("both texts are the same", pair.id)
        first = seen.setdefault(both, pair)
        if first is not pair and first.score != pair.score:
            faults.add("the same pair has different scores", f"{pair.id} {pair.score} ({first.id} {first.score})")
        elif first is not pair:
            faults.add("the same pair occurs twice", f"{pair.id} (as {first.id})")
    scored = sum(pair.score is not None for pair in pairs)
    if 0 < scored < len(pairs):
        for pair in (pair for pair in pairs if pair.score is None):
            warnings.add("the score is missing, but other pairs have one", pair.id)
    return {"scored": scored, "without a score": len(pairs) - scored}


def _check_scheme(given: Sequence[Sequence[str]], ids: Sequence[str], warnings: Findings) -> None:
    """In a BIO file, warn of entities that begin with I-."""
    if scheme_of(given) != "BIO":
        return
    for tags, id in zip(given, ids, strict=True):
        for i, (was, now) in enumerate(zip(tags, to_bio(tags, "BIO"), strict=True)):
            if was != now:
                before = tags[i - 1] if i else "the beginning"
                where = f"{id} ({was} after {before})"
                warnings.add("an entity begins with I- and was read as if it began with B-", where)


def require_characters(task: str, examples: Sequence[Any]) -> None:
    """Raise DataError if a text holds half of a surrogate pair, which cannot be tokenized or written to a file."""
    for example in examples:
        if any(_SURROGATES.search(text) for text in (*_texts(task, example), *_labels(task, example))):
            raise DataError(
                f"{example.id!r} holds half of a surrogate pair, which is not a character; see labkit data check"
            )


def _check_characters(task: str, examples: Sequence[Any], faults: Findings, warnings: Findings) -> None:
    for example in examples:
        texts = (*_texts(task, example), *_labels(task, example))
        if any(_SURROGATES.search(text) for text in texts):
            faults.add("half of a surrogate pair, which is not a character (\\ud800 to \\udfff)", example.id)
        for text in texts:
            if unseen := _UNSEEN.search(text):
                warnings.add("there is a control character", f"{example.id} ({unseen[0]!r})")
            if (at := text.find(_REPLACED)) >= 0:
                shown = repr(text[max(0, at - 10) : at + 10])
                warnings.add("U+FFFD replaces a character that was lost in decoding", f"{example.id} ({shown})")
            if not unicodedata.is_normalized("NFC", text):
                warnings.add("the text is not in Unicode's normal form NFC", example.id)
            if len(text) > LONG:
                warnings.add(f"the text is longer than {LONG:,} characters", f"{example.id} ({len(text):,})")


# ---- several files ---------------------------------------------------------------------------------------------------


def _check_leakage(
    task: str, examples: Sequence[Any], earlier: Sequence[Any], other: Path, faults: Findings, warnings: Findings
) -> None:
    """Find what of `examples` is also in the file `other`."""
    groups = {example.group for example in earlier if has_name(example)}
    for group in dict.fromkeys(example.group for example in examples if example.group in groups):
        faults.add(f"the group is also in {other}", repr(group))
    if task == "embed":
        known = {_both(example) for example in earlier}
        for both in dict.fromkeys(_both(example) for example in examples):
            if both in known:
                faults.add(f"the pair is also in {other}", " / ".join(repr(_short(text)) for text in sorted(both)))
    known = {_loosely(text) for example in earlier for text in _texts(task, example)}
    mine = {_loosely(text): text for example in examples for text in _texts(task, example)}
    what = {"qa": "context", "ner": "sentence"}.get(task, "text")
    for loosely, text in mine.items():
        if loosely in known:
            meant = task == "embed" or len(loosely) < BY_CHANCE  # two pairs may well share a query, or an answer
            (warnings if meant else faults).add(f"the {what} is also in {other}", repr(_short(text)))


def _texts(task: str, example: Any) -> tuple[str, ...]:
    """The texts by which splits are compared."""
    if task == "embed":
        return example.first, example.second
    return (example.context if task == "qa" else example.text,)


def _labels(task: str, example: Any) -> tuple[str, ...]:
    """The other texts of an example: its question, or its labels."""
    if task == "qa":
        return (example.question,)
    if task == "ner":
        return tuple(dict.fromkeys(example.tags))
    return (example.label,) if task == "classify" else ()


def _loosely(text: str) -> str:
    """The text without differences of case, white space and Unicode form."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _both(pair: Pair) -> frozenset[str]:
    return frozenset({_loosely(pair.first), _loosely(pair.second)})


def _cuts_a_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()


def _times(count: int) -> str:
    return {1: "", 2: ", twice"}.get(count, f", {count:,} times")


def _short(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


_CHECKS: dict[str, Callable[..., dict[str, int]]] = {
    "qa": _check_questions,
    "ner": _check_sentences,
    "classify": _check_labelled,
    "embed": _check_pairs,
}
