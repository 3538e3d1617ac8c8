"""Evidence: first-person posts, a criterion, and the sentence of the post that supports it, or none.

A sentence that was copied out of a post often differs from it: white space was squeezed, quotes were straightened, a
word was mistyped. `locate` finds it exactly, then without regard to white space, then by fuzzy alignment (rapidfuzz),
and returns offsets of the unchanged text.

`labkit.tasks.qa` joins post and criterion with the marks `[INST] [/INST] [POST] [/POST] [CRITERION] [/CRITERION]`.
"""

from __future__ import annotations

import re

from labkit.errors import DataError, needs_extra

CRITERIA = {  # the posts are invented, and nothing here is a diagnosis
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
LEAST_SIMILARITY = 80  # of 100, as rapidfuzz counts
_INSIDE_WORD = re.compile(r"(?<=[^\W_])(?=[^\W_])")


def locate(text: str, evidence: str) -> tuple[int, int] | None:
    """(start, end) of the first place of `evidence` in `text`, or None if nothing in it is similar.

    An exact match; else one up to white space; else the best alignment of rapidfuzz (`partial_ratio_alignment`), whose
    ends are moved to the words that make the span most similar to the evidence (`ratio`). Both must be at least 80.

    Raises:
        DataError: the evidence is empty. ModelError: rapidfuzz is needed and not installed.
    """
    evidence = evidence.strip()
    if not evidence:
        raise DataError("the evidence is empty; an example without evidence has None")
    if (start := text.find(evidence)) >= 0:
        return start, start + len(evidence)
    if match := re.search(r"\s+".join(map(re.escape, evidence.split())), text):
        return match.span()
    with needs_extra():
        from rapidfuzz import fuzz
    evidence = " ".join(evidence.split())
    # The text with single spaces, and the place of each of its characters in the original.
    places = [i for i, sign in enumerate(text) if not sign.isspace() or (i and not text[i - 1].isspace())]
    squeezed = "".join(" " if text[i].isspace() else text[i] for i in places)
    best = fuzz.partial_ratio_alignment(evidence, squeezed, score_cutoff=LEAST_SIMILARITY)
    if best is None or best.dest_start == best.dest_end or len(evidence) > 1.5 * len(squeezed):
        return None
    start, end = best.dest_start, best.dest_end  # as long as the evidence, so too long if the copy lost a word
    slack = 10 + len(evidence) // 4
    borders = [i for i in range(len(squeezed) + 1) if not _INSIDE_WORD.match(squeezed, i)]
    starts = [i for i in borders if abs(i - start) <= slack and not squeezed[i : i + 1].isspace()]
    ends = [i for i in borders if abs(i - end) <= slack and i and not squeezed[i - 1].isspace()]
    spans = [(a, b) for a in starts for b in ends if a < b] or [(start, end)]  # a word of 1,000 letters has no border
    start, end = max(spans, key=lambda span: fuzz.ratio(evidence, squeezed[span[0] : span[1]]))
    is_similar = fuzz.ratio(evidence, squeezed[start:end]) >= LEAST_SIMILARITY
    return (places[start], places[end - 1] + 1) if is_similar else None
