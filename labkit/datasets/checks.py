"""Is this labelled file fit to learn from, and to be judged by? `check_files("qa", ["train.json", "dev.json"])`.

A fault makes a figure wrong: a line that cannot be read, contradictory labels, an example that stands in two splits. A
warning names what is often a slip and may be meant: characters that cannot be seen, one label in twenty, a kind that
occurs once. Each finding says how often, and shows two examples by their id.
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
from labkit.datasets.files import Reading
from labkit.datasets.readers import TASKS, scan
from labkit.datasets.splits import has_name
from labkit.datasets.tags import entities_of, scheme_of, to_bio
from labkit.errors import DataError

LONG = 100_000  # characters of a text
UNEVEN = 20  # the commonest label is that many times as frequent as the rarest
BY_CHANCE = 20  # a text of fewer characters ("Wednesday .", "Thanks!") recurs without having been copied
SHOWN = 2  # examples of each finding
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # control characters but tab and line ends
_REPLACED, _SURROGATES = "\ufffd", re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class Report:
    """What a check of one file found. `n` examples can be read; `counts` is per label, per kind of entity, or of what a
    question can be. `notes` say how the file was read.
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


def check_file(task: str, path: str | Path, others: Sequence[str | Path] = ()) -> Report:
    """What is wrong with one file, and what of it stands in the `others` as well; raises as `check_files` does."""
    return check_files(task, [*others, path])[-1]


def check_files(task: str, paths: Sequence[str | Path], tag_column: int | None = None) -> list[Report]:
    """What is wrong with each file, and with them as the splits of one data set.

    A group, or a text (but for case and white space), that stands in two files is a fault of the later one; a text of
    fewer than 20 characters is a warning. A row that cannot be read is a fault, and the others are checked.

    Raises:
        DataError: an unknown task, a path that is no file, or one given twice.
    """
    if task not in TASKS:
        raise DataError(f"the task is {task!r}; choose one of {', '.join(TASKS)}")
    paths = [Path(path).expanduser() for path in paths]
    for i, path in enumerate(paths):
        if not path.is_file():
            what = "a folder" if path.is_dir() else "not there"
            raise DataError(f"{path} is {what}; give files of labelled examples")
        if path.resolve() in {each.resolve() for each in paths[:i]}:
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
    """What was found, by kind: how often, and where."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)

    def add(self, what: str, where: str) -> None:
        self._found[what].append(where)

    def lines(self) -> tuple[str, ...]:
        """One line per kind, such as "an answer has white space around it, 3 times: q7, q9, ..."."""
        return tuple(printable(f"{what}{_times(len(where))}: {_some(where)}") for what, where in self._found.items())


def printable(text: str) -> str:
    """The text with an escape for each character that a terminal would obey, or could not be sent."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


# ---- one file --------------------------------------------------------------------------------------------------------


def _check_questions(questions: Sequence[Question], faults: Findings, warnings: Findings) -> dict[str, int]:
    asked: dict[tuple[str, str], str] = {}
    for each in questions:
        for answer in each.answers:
            if answer.text != answer.text.strip():
                faults.add("an answer has white space around it", f"{each.id} ({answer.text!r})")
            elif _cuts_a_word(each.context, answer.start) or _cuts_a_word(each.context, answer.end):
                warnings.add("an answer begins or ends within a word", f"{each.id} ({answer.text!r})")
        first = asked.setdefault((_loosely(each.question), each.context), each.id)
        if first != each.id:
            faults.add("the question was asked of this context before", f"{each.id} (as {first})")
    unanswerable = sum(not each.answers for each in questions)
    contexts = len({each.context for each in questions})
    return {"answerable": len(questions) - unanswerable, "unanswerable": unanswerable, "contexts": contexts}


def _check_sentences(sentences: Sequence[Sentence], faults: Findings, warnings: Findings) -> dict[str, int]:
    seen: dict[str, Sentence] = {}
    places: dict[str, list[str]] = defaultdict(list)
    for each in sentences:
        if not each.words or not all(word.strip() for word in each.words):
            faults.add("there is no word, or a blank one", each.id)
        if spaced := [word for word in each.words if re.search(r"\s", word)]:
            warnings.add("a word contains white space; columns are separated by tabs", f"{each.id} ({spaced[0]!r})")
        first = seen.setdefault(" ".join(each.words), each)
        if first is not each and first.tags != each.tags:
            faults.add("the same words have other tags before", f"{each.id} (as {first.id}: {_short(each.text)!r})")
        elif first is not each:
            warnings.add("the sentence stands there before", f"{each.id} (as {first.id}: {_short(each.text)!r})")
        for start, end, kind in entities_of(each.tags):
            entity = each.text[each.spans[start][0] : each.spans[end - 1][1]]
            places[kind].append(f"{each.id} ({entity!r})")
            if len(entity) == 1:
                warnings.add("an entity is one character", f"{each.id} ({entity!r}, {kind})")
    for kind, where in places.items():
        if len(where) == 1:
            warnings.add(f"the kind {kind} has one entity only", where[0])
    return dict(Counter({kind: len(where) for kind, where in places.items()}).most_common())


def _check_labelled(examples: Sequence[Labelled], faults: Findings, warnings: Findings) -> dict[str, int]:
    seen: dict[str, Labelled] = {}
    for each in examples:
        first = seen.setdefault(_loosely(each.text), each)
        if first is not each and first.label != each.label:
            where = f"{each.id} {each.label!r} ({first.id} {first.label!r})"
            faults.add("the same text has another label before", where)
        elif first is not each:
            faults.add("the text stands there before", f"{each.id} (as {first.id})")
    counts = dict(Counter(each.label for each in examples).most_common())
    if len(counts) == 1:
        warnings.add("there is one label only", repr(next(iter(counts))))
    elif max(counts.values()) >= UNEVEN * min(counts.values()):
        listed = ", ".join(f"{label!r} {count}" for label, count in counts.items())
        warnings.add(f"one label is {UNEVEN} times as frequent as another, or more", listed)
    return counts


def _check_pairs(pairs: Sequence[Pair], faults: Findings, warnings: Findings) -> dict[str, int]:
    seen: dict[frozenset[str], Pair] = {}
    for each in pairs:
        if len(both := _both(each)) == 1:
            warnings.add("both texts are the same", each.id)
        first = seen.setdefault(both, each)
        if first is not each and first.score != each.score:
            faults.add("the same pair has another score before", f"{each.id} {each.score} ({first.id} {first.score})")
        elif first is not each:
            faults.add("the pair stands there before", f"{each.id} (as {first.id})")
    scored = sum(each.score is not None for each in pairs)
    if 0 < scored < len(pairs):
        for each in (each for each in pairs if each.score is None):
            warnings.add("there is no score, and others have one", each.id)
    return {"scored": scored, "without a score": len(pairs) - scored}


def _check_scheme(given: Sequence[Sequence[str]], ids: Sequence[str], warnings: Findings) -> None:
    """Tags that are not BIO in a file that is: an entity that begins with I- was read as if it began with B-."""
    if scheme_of(given) != "BIO":
        return
    for tags, id in zip(given, ids, strict=True):
        for i, (was, now) in enumerate(zip(tags, to_bio(tags, "BIO"), strict=True)):
            if was != now:
                before = tags[i - 1] if i else "the beginning"
                where = f"{id} ({was} after {before})"
                warnings.add("an entity begins with I- and was read as beginning with B-", where)


def require_characters(task: str, examples: Sequence[Any]) -> None:
    """DataError if a text holds half of a surrogate pair, which no tokenizer takes and no file."""
    for each in examples:
        if any(_SURROGATES.search(text) for text in (*_texts(task, each), *_labels(task, each))):
            raise DataError(
                f"{each.id!r} holds half of a surrogate pair, which is no character (labkit data check finds all)"
            )


def _check_characters(task: str, examples: Sequence[Any], faults: Findings, warnings: Findings) -> None:
    for each in examples:
        texts = (*_texts(task, each), *_labels(task, each))
        if any(_SURROGATES.search(text) for text in texts):
            faults.add("half of a surrogate pair, which is no character (\\ud800 to \\udfff)", each.id)
        for text in texts:
            if unseen := _UNSEEN.search(text):
                warnings.add("there is a control character", f"{each.id} ({unseen[0]!r})")
            if (at := text.find(_REPLACED)) >= 0:
                shown = repr(text[max(0, at - 10) : at + 10])
                warnings.add("U+FFFD stands where a character was lost in decoding", f"{each.id} ({shown})")
            if not unicodedata.is_normalized("NFC", text):
                warnings.add("the text is not in Unicode's normal form NFC", each.id)
            if len(text) > LONG:
                warnings.add(f"the text is longer than {LONG:,} characters", f"{each.id} ({len(text):,})")


# ---- several files ---------------------------------------------------------------------------------------------------


def _check_leakage(
    task: str, examples: Sequence[Any], earlier: Sequence[Any], other: Path, faults: Findings, warnings: Findings
) -> None:
    """What of `examples` stands in the file `other` too."""
    groups = {each.group for each in earlier if has_name(each)}
    for group in dict.fromkeys(each.group for each in examples if each.group in groups):
        faults.add(f"the group stands in {other} too", repr(group))
    if task == "embed":
        known = {_both(each) for each in earlier}
        for both in dict.fromkeys(_both(each) for each in examples):
            if both in known:
                faults.add(f"the pair stands in {other} too", " / ".join(repr(_short(text)) for text in sorted(both)))
    known = {_loosely(text) for each in earlier for text in _texts(task, each)}
    mine = {_loosely(text): text for each in examples for text in _texts(task, each)}
    what = {"qa": "context", "ner": "sentence"}.get(task, "text")
    for loosely, text in mine.items():
        if loosely in known:
            meant = task == "embed" or len(loosely) < BY_CHANCE  # two pairs may well share a query, or an answer
            (warnings if meant else faults).add(f"the {what} stands in {other} too", repr(_short(text)))


def _texts(task: str, example: Any) -> tuple[str, ...]:
    """The texts by which two splits are compared."""
    if task == "embed":
        return example.first, example.second
    return (example.context if task == "qa" else example.text,)


def _labels(task: str, example: Any) -> tuple[str, ...]:
    """What else of an example is read: its question, or its labels."""
    if task == "qa":
        return (example.question,)
    if task == "ner":
        return tuple(dict.fromkeys(example.tags))
    return (example.label,) if task == "classify" else ()


def _loosely(text: str) -> str:
    """Without regard to case, white space and Unicode's form."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _both(pair: Pair) -> frozenset[str]:
    return frozenset({_loosely(pair.first), _loosely(pair.second)})


def _cuts_a_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()


def _times(count: int) -> str:
    return {1: "", 2: ", twice"}.get(count, f", {count:,} times")


def _some(where: Sequence[str]) -> str:
    return ", ".join(where[:SHOWN]) + (", ..." if len(where) > SHOWN else "")


def _short(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


_CHECKS: dict[str, Callable[..., dict[str, int]]] = {
    "qa": _check_questions,
    "ner": _check_sentences,
    "classify": _check_labelled,
    "embed": _check_pairs,
}
