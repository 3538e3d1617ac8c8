"""Named entities: tagged words over tokens, windows of long sentences, decoding to spans of the text, entity F1.

A word may be several tokens, and one of them carries its label. The default is the last one, because it is the only one
from which a causal model attends to the whole word. Devlin et al. 2019, whose model is bidirectional, take the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from labkit.datasets.examples import NO_TAG, Sentence, entities_in, parts, to_bio, words_of
from labkit.errors import DataError, needs_extra, require_one_of
from labkit.run_folder import Log, silent
from labkit.tasks.base import IGNORED, Task, pad_rows, padded, row_frame, tokens_of, tokens_over, window_starts
from labkit.tasks.options import NerOptions

LABEL_ON = ("last", "first")  # the token of a word that carries its label


@dataclass(frozen=True)
class Row:
    """A sentence, or a window of a long one.

    Attributes:
        targets: one per token: the number of the word's tag on the token that carries it, -100 elsewhere.
        words: (index in `ids`, word) of each word that is labelled here. No word is labelled in two rows.
    """

    ids: list[int]
    targets: list[int]
    example: int
    words: list[tuple[int, int]]


@dataclass(frozen=True)
class Tagged:
    """The prediction for a sentence.

    Attributes:
        entities: {"start", "end", "label", "text"} of each; text == sentence.text[start:end].
        tags: the most probable tag of each word. An I that continues no entity of its kind begins one, and is B here.
        probabilities: of these tags; None for a word without a token, which is predicted as O.
    """

    id: str
    entities: list[dict[str, Any]]
    tags: list[str]
    probabilities: list[float | None]


@dataclass(frozen=True)
class NamedEntities(NerOptions, Task):
    name = "ner"

    def __post_init__(self) -> None:
        require_one_of("label_on", self.label_on, LABEL_ON)

    def labels(self, examples: Sequence[Sentence]) -> Sequence[str]:
        """O, then B and I of every kind that occurs, kinds in alphabetical order: ("O", "B-LOC", "I-LOC", ...)."""
        kinds = {parts(tag)[1] for sentence in examples for tag in sentence.tags} - {""}
        if not kinds:
            raise DataError("no sentence has an entity, so there is nothing to learn")
        return (NO_TAG, *(f"{letter}-{kind}" for kind in sorted(kinds) for letter in "BI"))

    def rows(self, tokenizer: Any, examples: Sequence[Sentence], labels: Sequence[str], log: Log = silent) -> list[Row]:
        """As in `Task.rows`. A word has the tokens that its characters are in.

        Two words may share a token (full stop and quotation mark in GPT-2's `."`), which carries the label of one. A
        word without a token of its own is in no row and is predicted as O.

        Of the tokens that two windows of a long sentence share, the first half is labelled in the first and the rest in
        the second. A window without a labelled word is left out.
        """
        begin, end, room = row_frame(tokenizer, self.max_length)
        number = {label: k for k, label in enumerate(labels)}
        rows, lost = [], 0
        tokens = tokens_of(tokenizer, [sentence.text for sentence in examples])
        for example, (sentence, (ids, offsets)) in enumerate(zip(examples, tokens, strict=True)):
            places = _places(sentence, offsets, self.label_on)
            lost += len(sentence.words) - len(places)
            starts = window_starts(len(ids), room, self.doc_stride)
            shared = room - starts.step
            windows: dict[int, list[tuple[int, int]]] = defaultdict(list)  # {first token: (place, word)}
            for word, place in sorted(places.items()):
                window = max(place - shared // 2, 0) // starts.step
                start = starts[min(window, len(starts) - 1)]
                windows[start].append((len(begin) + place - start, word))
            for start, words in windows.items():
                row = [*begin, *ids[start : start + room], *end]
                targets = [IGNORED] * len(row)
                for place, word in words:
                    targets[place] = number.get(sentence.tags[word], IGNORED)
                rows.append(Row(row, targets, example, words))
        if lost:
            log(f"{lost:,} words have no token of their own and cannot be labelled; they are predicted as O")
        return rows

    def collate(self, rows: Sequence[Row], pad_id: int) -> dict[str, Tensor]:
        """As in `Task.collate`; `labels` (batch, seq) are the numbers of the tags, -100 where there is none."""
        return padded([row.ids for row in rows], pad_id) | {"labels": pad_rows([row.targets for row in rows], IGNORED)}

    def decode(self, examples, rows, outputs, labels) -> list[Tagged]:
        """`outputs`: (tokens, labels) each."""
        raw = [[NO_TAG] * len(sentence.words) for sentence in examples]
        probabilities: list[list[float | None]] = [[None] * len(sentence.words) for sentence in examples]
        for row, logits in zip(rows, outputs, strict=True):
            best = logits[[place for place, _ in row.words]].softmax(-1).max(-1)
            for (_, word), p, k in zip(row.words, best.values.tolist(), best.indices.tolist(), strict=True):
                raw[row.example][word], probabilities[row.example][word] = labels[k], p
        predictions = []
        for sentence, tags, of_words in zip(examples, map(to_bio, raw), probabilities, strict=True):
            entities = [
                asdict(entity) | {"text": sentence.text[entity.start : entity.end]}
                for entity in entities_in(sentence.spans, tags)
            ]
            predictions.append(Tagged(sentence.id, entities, tags, of_words))
        return predictions

    def score(self, examples: Sequence[Sentence], predictions: Sequence[Tagged]) -> dict[str, Any]:
        return scores(examples, [tagged.tags for tagged in predictions])

    def baselines(self, train: Sequence[Sentence], examples: Sequence[Sentence]) -> dict[str, float]:
        return {name: scores(examples, tags)["f1"] for name, tags in majority_baseline(train, examples).items()}

    def judge(self, examples: Sequence[Sentence], predictions: Sequence[Tagged]) -> list[dict[str, Any]]:
        """How many entities are `correct`, `predicted` and `gold`, each {kind: count}.

        Summed over sentences and kinds, 2 correct / (predicted + gold) is the F1.
        """
        lines = []
        for sentence, tagged in zip(examples, predictions, strict=True):
            gold, predicted = (set(entities_in(sentence.spans, tags)) for tags in (sentence.tags, tagged.tags))
            entities = {"correct": gold & predicted, "predicted": predicted, "gold": gold}
            counts = {name: Counter(sorted(entity.label for entity in some)) for name, some in entities.items()}
            lines.append({"id": sentence.id, "group": sentence.group} | counts)
        return lines

    def example(self, id: str, texts: dict[str, str], labels: Sequence[str]) -> Sentence:
        text = texts["text"]
        spans = tuple(words_of(text))
        return Sentence(id, text, tuple(text[start:end] for start, end in spans), spans, (NO_TAG,) * len(spans))


def scores(sentences: Sequence[Sentence], predicted_tags: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Scores of legal BIO tags over all entities of the sentences (micro average), counted by seqeval.

    `f1`, `precision`, `recall`; `token_accuracy`, the share of words with the correct tag; `by_kind`, {kind: precision,
    recall, f1, support}; `n_sentences`, `n_words`, `n_entities`. A ratio whose denominator is 0 is 0.
    """
    with needs_extra():
        from seqeval.metrics import accuracy_score
        from seqeval.metrics.v1 import precision_recall_fscore_support, unique_labels
        from seqeval.scheme import IOB2

    gold, predicted = [list(sentence.tags) for sentence in sentences], [list(tags) for tags in predicted_tags]
    strict = {"scheme": IOB2, "zero_division": 0}  # seqeval calls this function for mode="strict"
    precision, recall, f1, support = precision_recall_fscore_support(gold, predicted, average="micro", **strict)
    kinds = unique_labels(gold, predicted, IOB2)
    by_kind = zip(kinds, *precision_recall_fscore_support(gold, predicted, average=None, **strict), strict=True)
    return {
        "f1": float(f1),
        "precision": float(precision),
        "recall": float(recall),
        "token_accuracy": float(accuracy_score(gold, predicted)),
        "by_kind": {
            kind: {"precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
            for kind, p, r, f, n in by_kind
        },
        "n_sentences": len(sentences),
        "n_words": sum(map(len, gold)),
        "n_entities": int(support),
    }


def majority_baseline(train: Sequence[Sentence], sentences: Sequence[Sentence]) -> dict[str, list[list[str]]]:
    """Tags without a model: "outside" makes every word O; "most_frequent" gives it its usual tag in `train`.

    Of two equally frequent tags O comes first, then the alphabet decides. A word that is not in `train` is O.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for sentence in train:
        for word, tag in zip(sentence.words, sentence.tags, strict=True):
            counts[word][tag] += 1
    usual = {word: min(tags, key=lambda tag: (-tags[tag], tag != NO_TAG, tag)) for word, tags in counts.items()}
    return {
        "outside": [[NO_TAG] * len(sentence.words) for sentence in sentences],
        "most_frequent": [to_bio([usual.get(word, NO_TAG) for word in sentence.words]) for sentence in sentences],
    }


def _places(sentence: Sentence, offsets: Sequence[tuple[int, int]], label_on: str) -> dict[int, int]:
    """{word: the token that carries its label}: its first or last one that no other word has; lost words have none."""
    places: dict[int, int] = {}
    taken: set[int] = set()
    words, end = range(len(sentence.spans)), 0 if label_on == "first" else -1
    for word in words if end == 0 else reversed(words):
        if free := [token for token in tokens_over(offsets, *sentence.spans[word]) if token not in taken]:
            places[word] = free[end]
            taken.add(free[end])
    return places
