"""Check labelled files before training on them: `check_files("qa", ["train.json", "dev.json"])`.

A fault makes a score wrong: a row that cannot be read, contradictory labels, an example that is in two splits. A
warning is often a mistake but may be intended: invisible characters, one label in twenty, a label that occurs once.
Each finding shows how often it occurs and names two examples by their ids.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
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
UNEVEN = 20  # warn if the most frequent label is that many times as frequent as the rarest
BY_CHANCE = 20  # a text of fewer characters ("Wednesday .", "Thanks!") may be in two splits by chance
SHOWN = 2  # examples of each finding
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # except tab and line ends
_SURROGATES = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class Report:
    """The result of checking one file.

    `n` examples can be read, `counts` are per label or kind of question, and `notes` describe how the file was read.
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
        if any(path.samefile(earlier) for earlier in paths[:i]):
            raise DataError(f"{path} is given twice; give each split once")
    reports: list[Report] = []
    readable: list[tuple[Path, list[Any]]] = []
    for path in paths:
        try:
            reading = scan(task, path, tag_column)
        except DataError as error:
            reading = Reading(str(path), faults=[str(error)])
        if not reading.examples and not reading.faults:
            reading.faults.append(f"{path} holds no example")
        examples, findings = reading.examples, _Findings()
        check = {"qa": _questions, "ner": _sentences, "classify": _labelled, "embed": _pairs}[task]
        counts = check(examples, findings) if examples else {}
        for example in examples:
            _characters(example, findings)
        if task == "ner" and scheme_of(reading.tags) == "BIO":
            _repairs(reading.tags, examples, findings)
        for other, earlier in readable:
            _leaks(examples, earlier, other, findings)
        readable.append((path, examples))
        faults = (*map(printable, reading.faults), *findings.lines("fault"))
        notes = tuple(map(printable, filter(None, [reading.layout, *reading.notes])))
        reports.append(Report(str(path), task, len(examples), counts, faults, findings.lines("warning"), notes))
    return reports


def require_characters(task: str, examples: Sequence[Any]) -> None:
    """Raise DataError if a text holds half of a surrogate pair, which cannot be tokenized or written to a file."""
    for example in examples:
        if any(map(_SURROGATES.search, (*_texts(example), *_labels(example)))):
            raise DataError(
                f"{example.id!r} holds half of a surrogate pair, which is not a character; see labkit data check"
            )


class _Findings:
    """The places of each finding, in the order of the first."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = defaultdict(list)

    def fault(self, what: str, where: str) -> None:
        self._places["fault", what].append(where)

    def warning(self, what: str, where: str) -> None:
        self._places["warning", what].append(where)

    def lines(self, severity: str) -> tuple[str, ...]:
        """One line per finding, such as "an answer has white space around it, 3 times: q7, q9, ..."."""
        lines = []
        for (its, what), places in self._places.items():
            if its == severity:
                times = {1: "", 2: ", twice"}.get(len(places), f", {len(places):,} times")
                more = ", ..." if len(places) > SHOWN else ""
                lines.append(printable(f"{what}{times}: {', '.join(places[:SHOWN])}{more}"))
        return tuple(lines)


# ---- one file --------------------------------------------------------------------------------------------------------


def _questions(questions: Sequence[Question], findings: _Findings) -> dict[str, int]:
    ids: dict[tuple[str, str], str] = {}
    for question in questions:
        for answer in question.answers:
            where = f"{question.id} ({answer.text!r})"
            if answer.text != answer.text.strip():
                findings.fault("an answer has white space around it", where)
            elif any(_is_inside_word(question.context, i) for i in (answer.start, answer.end)):
                findings.warning("an answer begins or ends within a word", where)
        first = ids.setdefault((_folded(question.question), question.context), question.id)
        if first != question.id:
            findings.fault("the same question is asked twice about one context", f"{question.id} (as {first})")
    unanswerable = sum(not question.answers for question in questions)
    contexts = len({question.context for question in questions})
    return {"answerable": len(questions) - unanswerable, "unanswerable": unanswerable, "contexts": contexts}


def _sentences(sentences: Sequence[Sentence], findings: _Findings) -> dict[str, int]:
    seen: dict[tuple[str, ...], Sentence] = {}
    places: dict[str, list[str]] = defaultdict(list)
    for sentence in sentences:
        if not sentence.words or not all(word.strip() for word in sentence.words):
            findings.fault("there is no word, or a blank one", sentence.id)
        if spaced := [word for word in sentence.words if re.search(r"\s", word)]:
            findings.warning(
                "a word contains white space; columns are separated by tabs", f"{sentence.id} ({spaced[0]!r})"
            )
        first = seen.setdefault(sentence.words, sentence)
        where = f"{sentence.id} (as {first.id}: {_short(sentence.text)!r})"
        if first.tags != sentence.tags:
            findings.fault("the same words have different tags", where)
        elif first is not sentence:
            findings.warning("the same sentence occurs twice", where)
        for start, end, kind in entities_of(sentence.tags):
            entity = sentence.text[sentence.spans[start][0] : sentence.spans[end - 1][1]]
            places[kind].append(f"{sentence.id} ({entity!r})")
            if len(entity) == 1:
                findings.warning("an entity is one character", f"{sentence.id} ({entity!r}, {kind})")
    for kind, where in places.items():
        if len(where) == 1:
            findings.warning(f"the label {kind} has only one entity", where[0])
    return dict(Counter({kind: len(where) for kind, where in places.items()}).most_common())


def _repairs(tags: Sequence[Sequence[str]], sentences: Sequence[Sentence], findings: _Findings) -> None:
    """Entities of a BIO file that begin with I-."""
    for given, sentence in zip(tags, sentences, strict=True):
        for before, tag, repaired in zip(("the beginning", *given), given, to_bio(given, "BIO"), strict=False):
            if tag != repaired:
                what = "an entity begins with I- and was read as if it began with B-"
                findings.warning(what, f"{sentence.id} ({tag} after {before})")


def _labelled(examples: Sequence[Labelled], findings: _Findings) -> dict[str, int]:
    seen: dict[str, Labelled] = {}
    for example in examples:
        first = seen.setdefault(_folded(example.text), example)
        if first.label != example.label:
            where = f"{example.id} {example.label!r} ({first.id} {first.label!r})"
            findings.fault("the same text has different labels", where)
        elif first is not example:
            findings.fault("the same text occurs twice", f"{example.id} (as {first.id})")
    counts = dict(Counter(example.label for example in examples).most_common())
    if len(counts) == 1:
        findings.warning("there is only one label", repr(examples[0].label))
    elif max(counts.values()) >= UNEVEN * min(counts.values()):
        listed = ", ".join(f"{label!r} {count}" for label, count in counts.items())
        findings.warning(f"one label is {UNEVEN} times as frequent as another, or more", listed)
    return counts


def _pairs(pairs: Sequence[Pair], findings: _Findings) -> dict[str, int]:
    seen: dict[frozenset[str], Pair] = {}
    scored = sum(pair.score is not None for pair in pairs)
    for pair in pairs:
        both = frozenset(map(_folded, _texts(pair)))
        first = seen.setdefault(both, pair)
        if len(both) == 1:
            findings.warning("both texts are the same", pair.id)
        if first.score != pair.score:
            findings.fault("the same pair has different scores", f"{pair.id} {pair.score} ({first.id} {first.score})")
        elif first is not pair:
            findings.fault("the same pair occurs twice", f"{pair.id} (as {first.id})")
        if scored and pair.score is None:
            findings.warning("the score is missing, but other pairs have one", pair.id)
    return {"scored": scored, "without a score": len(pairs) - scored}


def _characters(example: Any, findings: _Findings) -> None:
    texts = (*_texts(example), *_labels(example))
    if any(map(_SURROGATES.search, texts)):
        findings.fault("half of a surrogate pair, which is not a character (\\ud800 to \\udfff)", example.id)
    for text in texts:
        if control := _CONTROL.search(text):
            findings.warning("there is a control character", f"{example.id} ({control[0]!r})")
        if (i := text.find("\ufffd")) >= 0:
            where = f"{example.id} ({text[max(0, i - 10) : i + 10]!r})"
            findings.warning("U+FFFD replaces a character that was lost in decoding", where)
        if not unicodedata.is_normalized("NFC", text):
            findings.warning("the text is not in Unicode's normal form NFC", example.id)
        if len(text) > LONG:
            findings.warning(f"the text is longer than {LONG:,} characters", f"{example.id} ({len(text):,})")


# ---- several files ---------------------------------------------------------------------------------------------------


def _leaks(examples: Sequence[Any], earlier: Sequence[Any], other: Path, findings: _Findings) -> None:
    """What of `examples` is also in the file `other`, which holds the examples `earlier`."""
    groups = {example.group for example in earlier if has_name(example)}
    for group in dict.fromkeys(example.group for example in examples if example.group in groups):
        findings.fault(f"the group is also in {other}", repr(group))
    pairs, known_pairs = (
        {frozenset(map(_folded, _texts(pair))): _texts(pair) for pair in side if isinstance(pair, Pair)}
        for side in (examples, earlier)
    )
    for both in pairs:
        if both in known_pairs:
            findings.fault(f"the pair is also in {other}", " / ".join(repr(_short(text)) for text in sorted(both)))
    known = {_folded(text) for example in earlier for text in _texts(example)}
    kinds = {Question: "context", Sentence: "sentence"}
    texts = {_folded(text): (example, text) for example in examples for text in _texts(example)}
    for folded, (example, text) in texts.items():
        if folded in known:
            what = f"the {kinds.get(type(example), 'text')} is also in {other}"
            is_meant = isinstance(example, Pair) or len(folded) < BY_CHANCE  # two pairs may share a query or an answer
            (findings.warning if is_meant else findings.fault)(what, repr(_short(text)))


def _texts(example: Any) -> tuple[str, ...]:
    """The texts by which splits are compared."""
    if isinstance(example, Pair):
        return example.first, example.second
    return (example.context if isinstance(example, Question) else example.text,)


def _labels(example: Any) -> tuple[str, ...]:
    """The other texts of an example: its question, or its labels."""
    if isinstance(example, Question):
        return (example.question,)
    if isinstance(example, Sentence):
        return tuple(dict.fromkeys(example.tags))
    return (example.label,) if isinstance(example, Labelled) else ()


def _folded(text: str) -> str:
    """The text without differences of case, white space and Unicode form."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _is_inside_word(text: str, i: int) -> bool:
    return 0 < i < len(text) and text[i - 1 : i + 1].isalnum()


def _short(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
