"""Tag schemes: BIO is the house's own; IO, IOB1 and BIOES are recognised and rewritten. Spans from tags.

Ramshaw and Marcus 1995 (IOB1: B only where two entities of one kind touch), Tjong Kim Sang and Veenstra 1999 (IOB2,
here called BIO), Ratinov and Roth 2009 (BILOU, which is BIOES by other letters).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from labkit.datasets.examples import NO_TAG, Sentence

TAG_FORM = "expected O, or B-, I-, E-, L-, S-, U- and a kind, as in B-PER"
_SINGLE, _END = ("S", "U"), ("E", "L")


def scheme_of(sentences: Iterable[Sequence[str]]) -> str:
    """The scheme of a whole file: what no sentence in it contradicts. ValueError, in words, for a foreign tag."""
    letters, after_outside = set(), False
    begins = False
    for tags in sentences:
        before = NO_TAG
        for tag in tags:
            letter, kind = parts(tag)
            letters.add(letter)
            after_outside |= letter == "I" and parts(before)[1] != kind  # an entity that begins with I
            begins |= letter == "B" and parts(before)[1] != kind  # B where IOB1 would have I
            before = tag
    if letters & {*_SINGLE, *_END}:
        return "BIOES"
    if "B" not in letters:
        return "IO" if "I" in letters else "BIO"
    return "IOB1" if after_outside and not begins else "BIO"


def to_bio(tags: Sequence[str], scheme: str) -> list[str]:
    """The same entities in BIO. Under "BIO" an entity that begins with I (a slip, or a model's) is begun with B."""
    found, before = [], NO_TAG
    for tag in tags:
        letter, kind = parts(tag)
        if letter == NO_TAG:
            found.append(NO_TAG)
        elif letter in ("B", *_SINGLE) or parts(before)[1] != kind:
            found.append(f"B-{kind}")
        elif scheme == "BIOES" and parts(before)[0] in (*_SINGLE, *_END):
            found.append(f"B-{kind}")
        else:
            found.append(f"I-{kind}")
        before = tag
    return found


def in_bio(sentences: Sequence[Sentence]) -> list[Sentence]:
    """The sentences of a whole file with their tags in BIO. The tag scheme is recognised from all tags."""
    scheme = scheme_of(sentence.tags for sentence in sentences)
    return [replace(sentence, tags=tuple(to_bio(sentence.tags, scheme))) for sentence in sentences]


def entities_of(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first word, word after the last, kind) of each entity in BIO tags.

    The rule for tags that no BIO file has, as a model may give them: an I that does not go on with an entity of its own
    kind begins one (as seqeval's and conlleval's default reading).
    """
    found: list[tuple[int, int, str]] = []
    for i, tag in enumerate(to_bio(tags, "BIO")):
        letter, kind = parts(tag)
        if letter == "B":
            found.append((i, i + 1, kind))
        elif letter == "I":
            found[-1] = (found[-1][0], i + 1, kind)
    return found


@lru_cache(maxsize=1024)  # asked for every word of a set, and a set has few tags
def parts(tag: str) -> tuple[str, str]:
    """("B", "PER") of "B-PER"; ("O", "") of "O". Raises ValueError for anything else."""
    letter, dash, kind = tag.partition("-")
    if tag == NO_TAG:
        return NO_TAG, ""
    if letter not in ("B", "I", *_SINGLE, *_END) or not dash or not kind:
        raise ValueError(f"has the tag {tag[:60]!r}; {TAG_FORM}")
    return letter, kind
