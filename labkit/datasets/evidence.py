"""Evidence: first-person posts, a criterion, and the sentence that supports it, or none; found in the original text.

A sentence that somebody copied out of a post is often not there letter for letter: white space was squeezed, quotes
were straightened, a word was mistyped. `locate` finds it exactly, then without regard to white space, then by fuzzy
alignment (rapidfuzz), and always answers in offsets of the text as it was given; what cannot be found is reported.

The prompt puts post and criterion into one text with marks of its own, `[INST] .. [/INST] [POST] .. [/POST]
[CRITERION] .. [/CRITERION]`. Their order is a choice that matters: with the criterion last, a causal model reads the
whole post without knowing what is asked, and the scores of its tokens cannot depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.errors import DataError, MissingPackageError

CRITERIA = {  # what each criterion asks; the posts are invented, and nothing here is a diagnosis
    "low_mood": "feeling sad, empty or close to tears",
    "loss_of_interest": "things that used to please no longer do",
    "sleep": "sleeping badly, or far too much",
    "appetite": "eating clearly more or less than usual without meaning to",
    "tiredness": "having no energy",
    "concentration": "finding it hard to think, to read, to follow or to decide",
    "self_worth": "thinking little of oneself, or feeling guilty beyond reason",
    "restlessness": "being unable to sit still, or slowed down so that others notice",
}
INSTRUCTION = "Find the sentence of the post that supports the criterion, or say that there is none."
PARTS = ("INST", "POST", "CRITERION")
MARKS = tuple(f"[{slash}{part}]" for part in PARTS for slash in ("", "/"))
ORDERS = ("criterion-last", "criterion-first")
LEAST_LIKE = 80  # of 100, as rapidfuzz counts


@dataclass(frozen=True)
class Found:
    """Where a piece of evidence stands: text[start:end]. `how` is "exact", "spaces" or "fuzzy"; `alike` is 0 to 100."""

    start: int
    end: int
    how: str
    alike: float = 100.0


@dataclass(frozen=True)
class Prompt:
    """A post and a criterion as one text. The post stands, unchanged, at text[post_start:post_end]."""

    text: str
    post_start: int
    post_end: int


def locate(text: str, evidence: str) -> Found | None:
    """Where `evidence` stands in `text`, in offsets of `text` as it is; None if nothing there is like it.

    Exact match first; then with any white space for white space; then the best alignment of rapidfuzz
    (`partial_ratio_alignment`, at least 80), grown to whole words. Of several places the first is taken.

    Raises:
        DataError: the evidence is empty. MissingPackageError: rapidfuzz is needed and not installed.
    """
    wanted = evidence.strip()
    if not wanted:
        raise DataError("the evidence is empty; an example without evidence has None")
    if (at := text.find(wanted)) >= 0:
        return Found(at, at + len(wanted), "exact")
    loose = re.compile(r"\s+".join(re.escape(part) for part in wanted.split()))
    if match := loose.search(text):
        return Found(match.start(), match.end(), "spaces")
    try:
        from rapidfuzz import fuzz
    except ImportError:
        raise MissingPackageError(
            'evidence that is not there to the letter is found by rapidfuzz: pip install "labkit-bidirectional[train]"'
        ) from None
    squeezed, places = _squeezed(text)
    best = fuzz.partial_ratio_alignment(" ".join(wanted.split()), squeezed, score_cutoff=LEAST_LIKE)
    if best is None or best.dest_start == best.dest_end or len(wanted) > 1.5 * max(len(squeezed), 1):
        return None
    start, end = places[best.dest_start], places[best.dest_end - 1] + 1
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return Found(*_whole_words(text, start, end), "fuzzy", best.score)


def locate_all(text: str, evidence: Sequence[str]) -> tuple[list[Found], list[str]]:
    """The places of those that are found, and those that are not."""
    found = [(each, locate(text, each)) for each in evidence]
    return [place for _, place in found if place], [each for each, place in found if place is None]


def prompt(post: str, criterion: str, order: str = "criterion-last", instruction: str = INSTRUCTION) -> Prompt:
    """The text that a model reads. `criterion` is a key of `CRITERIA`, or any words.

    Raises:
        DataError: an unknown order, an empty post or criterion, or one that holds one of the marks.
    """
    if order not in ORDERS:
        raise DataError(f"the order is {order!r}; choose one of {', '.join(ORDERS)}")
    if not post.strip():
        raise DataError("the post is empty")
    if not criterion.strip():
        raise DataError("the criterion is empty")
    if held := [mark for mark in MARKS if any(mark in each for each in (post, criterion, instruction))]:
        raise DataError(f"the post, criterion or instruction holds {held[0]}, a mark that the prompt keeps for itself")
    pieces = {"POST": post, "CRITERION": CRITERIA.get(criterion, criterion)}
    names = ("POST", "CRITERION") if order == "criterion-last" else ("CRITERION", "POST")
    text, start = f"[INST] {instruction} [/INST]", 0
    for name in names:
        text += f" [{name}] "
        if name == "POST":
            start = len(text)
        text += f"{pieces[name]} [/{name}]"
    return Prompt(text, start, start + len(post))


def _squeezed(text: str) -> tuple[str, list[int]]:
    """The text with single spaces, and for each of its characters where it stands in the original."""
    letters, places = [], []
    for place, letter in enumerate(text):
        if letter.isspace():
            if letters and letters[-1] != " ":
                letters.append(" ")
                places.append(place)
        else:
            letters.append(letter)
            places.append(place)
    return "".join(letters), places


def _whole_words(text: str, start: int, end: int) -> tuple[int, int]:
    """The span grown by the rest of a word that it cuts through."""
    while 0 < start < len(text) and text[start - 1].isalnum() and text[start].isalnum():
        start -= 1
    while 0 < end < len(text) and text[end - 1].isalnum() and text[end].isalnum():
        end += 1
    return start, end
