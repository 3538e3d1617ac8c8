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
from dataclasses import dataclass

from labkit.errors import DataError, ModelError

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
    (`partial_ratio_alignment`), its ends moved to the words that make the span most like the evidence (`ratio`). Both
    are at least 80, or nothing is found. Of several places the first is taken.

    Raises:
        DataError: the evidence is empty. ModelError: rapidfuzz is needed and not installed.
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
        raise ModelError(
            'evidence that is not there to the letter is found by rapidfuzz: pip install "labkit-bidirectional[train]"'
        ) from None
    (squeezed, places), wanted = _squeezed(text), " ".join(wanted.split())
    best = fuzz.partial_ratio_alignment(wanted, squeezed, score_cutoff=LEAST_LIKE)
    if best is None or best.dest_start == best.dest_end or len(wanted) > 1.5 * max(len(squeezed), 1):
        return None
    start, end = best.dest_start, best.dest_end  # as long as the evidence, and so a word lost in copying is missing
    slack = 10 + len(wanted) // 4
    starts = [at for at in range(max(0, start - slack), min(start + slack, len(squeezed))) if _begins(squeezed, at)]
    ends = [at + 1 for at in range(max(0, end - slack), min(end + slack, len(squeezed))) if _ends(squeezed, at)]
    for _ in range(2):
        near = (at for at in starts if at < end)
        start = max(near, key=lambda at: fuzz.ratio(wanted, squeezed[at:end]), default=start)  # none in a word of 1,000
        near = (at for at in ends if at > start)
        end = max(near, key=lambda at: fuzz.ratio(wanted, squeezed[start:at]), default=end)
    alike = fuzz.ratio(wanted, squeezed[start:end])
    return Found(places[start], places[end - 1] + 1, "fuzzy", alike) if alike >= LEAST_LIKE else None


def prompt(post: str, criterion: str, order: str = "criterion-last", instruction: str = INSTRUCTION) -> Prompt:
    """The text that a model reads. `criterion` is a key of `CRITERIA`, or any words.

    Raises:
        DataError: an unknown order, or a text that holds one of the marks.
    """
    if order not in ORDERS:
        raise DataError(f"the order is {order!r}; choose one of {', '.join(ORDERS)}")

    if held := [mark for mark in MARKS if any(mark in each for each in (post, criterion, instruction))]:
        raise DataError(f"the post, criterion or instruction holds {held[0]}, a mark that the prompt keeps for itself")
    parts = [("POST", post), ("CRITERION", CRITERIA.get(criterion, criterion))]
    parts = [("INST", instruction), *(parts if order == "criterion-last" else parts[::-1])]
    text = " ".join(f"[{name}] {content} [/{name}]" for name, content in parts)
    start = text.index("[POST] ") + len("[POST] ")
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


def _begins(text: str, at: int) -> bool:
    """Whether a word begins at this place, or another sign stands there."""
    return not text[at].isspace() and not (at > 0 and text[at - 1].isalnum() and text[at].isalnum())


def _ends(text: str, at: int) -> bool:
    """Whether a word ends with this place, or another sign stands there."""
    return not text[at].isspace() and not (text[at].isalnum() and text[at + 1 : at + 2].isalnum())
