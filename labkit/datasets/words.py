"""Words of a raw text with their offsets, and tags laid over them: the bridge between spans and column files."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from labkit.datasets.examples import NO_TAG, Entity
from labkit.datasets.files import shown
from labkit.datasets.tags import entities_of

# A possessive 's stands alone, as the name before it may be an entity. Zero-width characters, variation selectors and
# skin tones stay with the sign before them, so that an emoji is one word; combining marks stay with their letter.
_JOINERS = "\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff\u00ad"
_SKIN_TONES = "\U0001f3fb-\U0001f3ff"
_MARKS = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M") + _SKIN_TONES
_LETTERS = rf"[^\W_]+(?:[{_MARKS}]+[^\W_]*)*"
_WORD = re.compile(
    rf"""
      (?:[A-Z]\.){{2,}}                                               # U.S., J.S.
    | (?<=[\w{_MARKS}])['’][sS]\b                                     # Brill's
    | \d+(?:[.,:]\d+)+                                                # 1,200 and 3.5 and 14:30
    | {_LETTERS}(?:(?:[-\u200c\u200d]|['’](?![sS]\b)){_LETTERS})*     # O'Neil-Smith
    | [\U0001f1e6-\U0001f1ff]{{2}}                                    # a flag
    | [^\s{_JOINERS}][{_MARKS}]*(?:[{_JOINERS}]+[^\s\w{_JOINERS}][{_MARKS}]*)*[{_JOINERS}]*  # any other sign
    """,
    re.VERBOSE,
)


def words_of(text: str) -> list[tuple[int, int]]:
    """(start, end) of each word of a text, in order; what lies between two is white space and joiners alone."""
    return [match.span() for match in _WORD.finditer(text)]


def tags_over(words: Sequence[tuple[int, int]], entities: Sequence[Entity], text: str) -> list[str]:
    """BIO tags of the words of a text, from its entities.

    Raises:
        ValueError: two entities overlap, one has no word in it, or a word belongs to it only in part.
    """
    tags, owner = [NO_TAG] * len(words), [-1] * len(words)
    for number, entity in enumerate(sorted(entities, key=lambda e: e.start)):
        if not 0 <= entity.start < entity.end <= len(text):
            raise ValueError(f"has an entity from {entity.start} to {entity.end} in a text of {len(text)} characters")
        what = f"has the entity {shown(text[entity.start : entity.end])} at {entity.start}, which"
        inside = [i for i, (start, end) in enumerate(words) if start < entity.end and end > entity.start]
        if not inside:
            raise ValueError(f"{what} contains no word")
        if words[inside[0]][0] < entity.start or words[inside[-1]][1] > entity.end:
            whole = text[words[inside[0]][0] : words[inside[-1]][1]]
            raise ValueError(f"{what} cuts through {shown(whole)}")
        if any(owner[i] >= 0 for i in inside):
            raise ValueError(f"{what} overlaps another")
        for i in inside:
            owner[i] = number
            tags[i] = f"{'B' if i == inside[0] else 'I'}-{entity.label}"
    return tags


def entities_in(words: Sequence[tuple[int, int]], tags: Sequence[str]) -> list[Entity]:
    """The entities of tagged words, as spans of the text."""
    return [Entity(words[first][0], words[end - 1][1], kind) for first, end, kind in entities_of(tags)]
