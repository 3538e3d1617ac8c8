"""How many entities of each sentence were found: counts that add up to the scores of `labkit.tasks.ner.scores`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from labkit.datasets.examples import Sentence
from labkit.datasets.tags import entities_in


def judged(sentences: Sequence[Sentence], tagged: Sequence[Any]) -> list[dict[str, Any]]:
    """One line per sentence: `found` (right ones), `said` and `there`, each {kind: count}, with its `id` and `group`.

    An entity is right if its span and its kind are. Added up over sentences and kinds, 2 found / (said + there) is the
    strict F1 of the legal tags.
    """
    lines = []
    for sentence, each in zip(sentences, tagged, strict=True):
        there = {(e.start, e.end, e.label) for e in entities_in(sentence.spans, list(sentence.tags))}
        said = {(e.start, e.end, e.label) for e in each.entities}
        counted = {"found": there & said, "said": said, "there": there}
        counts = {name: dict(sorted(Counter(e[2] for e in some).items())) for name, some in counted.items()}
        lines.append({"id": sentence.id, "group": sentence.group} | counts)
    return lines
