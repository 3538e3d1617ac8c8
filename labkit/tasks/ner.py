"""Named entities: tagged words laid over tokens, windows of long sentences, decoding to spans of the text, entity F1.

    labels = labels_of(train)
    lm = labkit.load("gemma3-270m", task=Head("token-classification", labels=labels))
    rows = features(lm.tokenizer, train, labels)                  # what is trained on, batched by Collator(pad_id)
    tagged = predict(lm.model, lm.tokenizer, test, labels)        # tags and entities, with character offsets
    scores(test, [each.tags for each in tagged])["f1"]

A word may be several tokens, and is labelled on one of them: the last by default, since a causal model has seen the
whole word only there (Devlin et al. 2019, whose model sees everything everywhere, take the first).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.datasets.examples import NO_TAG, Entity, Sentence
from labkit.datasets.tags import entities_in, parts, to_bio
from labkit.errors import DataError, ModelError
from labkit.models.heads import IGNORED, head_in
from labkit.tasks.classify import run_by_length
from labkit.tasks.lm import pad_id
from labkit.tasks.special_tokens import row_ends

LABEL_ON = ("last", "first")  # which of a word's tokens its label stands on


@dataclass(frozen=True)
class Feature:
    """One row for the model: a sentence, or a window of one that is longer than a row.

    Attributes:
        ids: tokens, between bos and eos where the tokenizer has them.
        targets: one per token: the number of the word's tag where a word is labelled, -100 elsewhere.
        example: which sentence.
        words: (place in `ids`, word) of each word that is labelled here; over all rows of a sentence, each word once.
        lost: words of the sentence that have no token of their own, listed in its first row only.
    """

    ids: list[int]
    targets: list[int]
    example: int
    words: list[tuple[int, int]]
    lost: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Tagged:
    """What a model says of a sentence.

    Attributes:
        tags: one per word, in BIO: an I that goes on with nothing of its kind begins an entity, and reads B here.
        raw_tags: the likeliest tag of each word as the model gave it, which need not be legal BIO.
        probabilities: of the raw tags; None for a word that has no token, of which the model says nothing ("O").
        entities: spans of the text; `texts` holds text[start:end] of each.
    """

    id: str
    tags: tuple[str, ...]
    raw_tags: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    entities: tuple[Entity, ...]
    texts: tuple[str, ...]


def labels_of(sentences: Iterable[Sentence]) -> tuple[str, ...]:
    """O, then B and I of every kind that occurs, kinds in alphabetical order: ("O", "B-LOC", "I-LOC", "B-PER", ...).

    Raises:
        DataError: no entity at all, so that there is nothing to learn.
    """
    kinds = {parts(tag)[1] for each in sentences for tag in each.tags} - {""}
    if not kinds:
        raise DataError("no sentence has an entity in it: there is nothing to learn")
    return (NO_TAG, *(f"{letter}-{kind}" for kind in sorted(kinds) for letter in "BI"))


def features(
    tokenizer: Any,
    sentences: Sequence[Sentence],
    labels: Sequence[str],
    *,
    max_length: int = 256,
    stride: int = 64,
    label_on: str = "last",
) -> list[Feature]:
    """The rows of these sentences, in their order; each sentence has at least one.

    The text is tokenised as it stands, and a word has the tokens that its characters are in. Two words may share a
    token (full stop and quotation mark in GPT-2's `."`): then it is the label of one only, the other takes another of
    its tokens, and if it has no other it is lost: not trained on, predicted as O, and listed in `Feature.lost`.

    A long sentence is cut into windows that overlap by `stride` tokens; a word is labelled in the window in which the
    shorter side of its context is longest. A further window with no word to label is left out.

    Args:
        labels: of the model, in the order of its logits (`labels_of`).
        max_length: tokens per row, bos and eos included.
        label_on: "last" or "first": the token of a word on which its label stands.

    Raises:
        DataError: a tag that is not among the labels; a tokenizer that knows no offsets; a stride that leaves no room
            in a row.
    """
    number = {label: i for i, label in enumerate(labels)}
    begin, end, room = _frame(tokenizer, max_length, stride, label_on)
    for each in sentences:
        if unknown := [tag for tag in each.tags if tag not in number]:
            raise DataError(f"the sentence {each.id} has the tag {unknown[0]!r}; the labels are {', '.join(labels)}")
    found = []
    for example, (each, (ids, offsets)) in enumerate(zip(sentences, _tokenised(tokenizer, sentences), strict=True)):
        ranges = _tokens_of_words(each.spans, offsets)
        places = _places(ranges, label_on)
        lost = [word for word in range(len(ranges)) if word not in places]
        for start, words in _windows(len(ids), room, stride, ranges, places):
            row = [*begin, *ids[start : start + room], *end]
            targets = [IGNORED] * len(row)
            placed = [(len(begin) + places[word] - start, word) for word in words]
            for place, word in placed:
                targets[place] = number[each.tags[word]]
            found.append(Feature(row, targets, example, placed, lost))
            lost = []
    return found


class Collator:
    """Batches of features, padded on the right, from items {"row": number, "ids": Feature}."""

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Int[Tensor, "batch seq"]]:
        rows: list[Feature] = [item["ids"] for item in items]
        return {
            "input_ids": _padded([row.ids for row in rows], self.pad_id),
            "attention_mask": _padded([[1] * len(row.ids) for row in rows], 0),
            "labels": _padded([row.targets for row in rows], IGNORED),
        }


def predict(
    model: nn.Module,
    tokenizer: Any,
    sentences: Sequence[Sentence],
    labels: Sequence[str],
    *,
    batch_size: int = 16,
    max_length: int = 256,
    stride: int = 64,
    label_on: str = "last",
) -> list[Tagged]:
    """Tag sentences, whose own tags are not looked at. `label_on` must be what the model was trained with.

    Raises:
        DataError: as `features`; labels that are not the model's; rows longer than the model has positions.
    """
    head = head_in(model.config)
    if head is not None and head.labels and list(head.labels) != list(labels):
        raise DataError(f"the labels are {', '.join(labels)}; the model has {', '.join(head.labels)}")
    untagged = [replace(each, tags=(NO_TAG,) * len(each.words)) for each in sentences]
    rows = features(tokenizer, untagged, labels, max_length=max_length, stride=stride, label_on=label_on)
    rows = [row for row in rows if row.words]
    logits = run_by_length(
        model, [row.ids for row in rows], lambda output: output.logits.float(),
        pad_id=pad_id(tokenizer), batch_size=batch_size, what="tag",
    )  # fmt: skip
    return decode(sentences, rows, logits, labels)


def decode(
    sentences: Sequence[Sentence],
    rows: Sequence[Feature],
    logits: Sequence[Float[Tensor, "_ n_labels"]],
    labels: Sequence[str],
) -> list[Tagged]:
    """Tags and entities from the logits of each row of `features`, (tokens, labels): the likeliest tag of each word.

    Logits beyond a row's tokens are padding and are not used.
    """
    raw = [[NO_TAG] * len(each.words) for each in sentences]
    sure: list[list[float | None]] = [[None] * len(each.words) for each in sentences]
    for row, scored in zip(rows, logits, strict=True):
        best = scored[[place for place, _ in row.words]].float().softmax(-1).max(-1)
        for (_, word), p, k in zip(row.words, best.values.tolist(), best.indices.tolist(), strict=True):
            raw[row.example][word], sure[row.example][word] = labels[k], p
    found = []
    for each, said, probabilities in zip(sentences, raw, sure, strict=True):
        tags = to_bio(said, "BIO")
        entities = tuple(entities_in(each.spans, tags))
        texts = tuple(each.text[entity.start : entity.end] for entity in entities)
        found.append(Tagged(each.id, tuple(tags), tuple(said), tuple(probabilities), entities, texts))
    return found


def scores(sentences: Sequence[Sentence], predicted_tags: Sequence[Sequence[str]]) -> dict[str, Any]:
    """How well tags name the entities of the sentences, over all of them (micro average), counted by seqeval.

    `f1`, `precision`, `recall`: strict, only entities in legal BIO count; `f1_lenient`: as conlleval, an entity may
    begin with I. The two agree on `Tagged.tags`, which are legal, and need not on `Tagged.raw_tags`. `token_accuracy`:
    the share of words with the right tag. `by_kind`: {kind: precision, recall, f1, support}, strict, of every kind that
    is there or predicted. `n_sentences`, `n_words`, `n_entities`. What is divided by nothing is 0.

    Raises:
        ModelError: seqeval is not installed.
    """
    try:
        from seqeval.metrics import f1_score
        from seqeval.metrics.v1 import precision_recall_fscore_support, unique_labels
        from seqeval.scheme import IOB2
    except ImportError:
        raise ModelError('entity scores need seqeval: pip install "labkit-bidirectional[train]"') from None

    gold, predicted = [list(each.tags) for each in sentences], [list(tags) for tags in predicted_tags]
    strict = {"scheme": IOB2, "zero_division": 0}  # this function is what seqeval calls for mode="strict"
    precision, recall, f1, support = precision_recall_fscore_support(gold, predicted, average="micro", **strict)
    kinds = unique_labels(gold, predicted, IOB2)
    by_kind = zip(kinds, *precision_recall_fscore_support(gold, predicted, average=None, **strict), strict=True)
    right = [a == b for pair in zip(gold, predicted, strict=True) for a, b in zip(*pair, strict=True)]
    return {
        "f1": float(f1),
        "precision": float(precision),
        "recall": float(recall),
        "f1_lenient": float(f1_score(gold, predicted, zero_division=0)),
        "token_accuracy": sum(right) / len(right),
        "by_kind": {
            kind: {"precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
            for kind, p, r, f, n in by_kind
        },
        "n_sentences": len(sentences),
        "n_words": len(right),
        "n_entities": int(support),
    }


def majority_baseline(train: Sequence[Sentence], sentences: Sequence[Sentence]) -> dict[str, list[list[str]]]:
    """Tags from no model, to judge models by.

    "outside": every word is O. "most_frequent": each word has the tag that it has most often in `train` (of two equally
    frequent O, then the first in the alphabet; a word that is not there: O), made legal BIO as a model's tags are.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in train:
        for word, tag in zip(each.words, each.tags, strict=True):
            counts[word][tag] += 1
    usual = {word: min(tags, key=lambda tag: (-tags[tag], tag != NO_TAG, tag)) for word, tags in counts.items()}
    return {
        "outside": [[NO_TAG] * len(each.words) for each in sentences],
        "most_frequent": [to_bio([usual.get(word, NO_TAG) for word in each.words], "BIO") for each in sentences],
    }


def _frame(tokenizer: Any, max_length: int, stride: int, label_on: str) -> tuple[list[int], list[int], int]:
    """(what stands before the text, after it, how many tokens of the text go between)."""
    if label_on not in LABEL_ON:
        raise DataError(f"the label is on {label_on!r}; choose one of {', '.join(LABEL_ON)}")
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{type(tokenizer).__name__} gives no character offsets; take a fast tokenizer")
    begin, end = row_ends(tokenizer)
    room = max_length - len(begin) - len(end)
    if not 0 <= stride < room:
        raise DataError(f"the stride is {stride}; it must be 0 or more, and smaller than the {room} tokens in a row")
    return begin, end, room


def _tokenised(tokenizer: Any, sentences: Sequence[Sentence]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """(ids, offsets) of each text. A text that spells out a special token ("<eos>") is text all the same."""
    if not sentences:
        return []
    encoded = tokenizer(
        [each.text for each in sentences], add_special_tokens=False, return_offsets_mapping=True,
        return_attention_mask=False, split_special_tokens=True, verbose=False,
    )  # fmt: skip
    return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))


def _tokens_of_words(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> list[range]:
    """The tokens that overlap each word; an empty range where there are none, as for a word of no width."""
    found, first = [], 0
    for start, end in spans:
        while first < len(offsets) and offsets[first][1] <= start:
            first += 1
        last = first
        while start < end and last < len(offsets) and offsets[last][0] < end:
            last += 1
        found.append(range(first, last))
    return found


def _places(ranges: Sequence[range], label_on: str) -> dict[int, int]:
    """{word: the token that its label stands on}, each token for one word; a word that is left none is not in it.

    Each word takes its first token that the words before it leave, which leaves the fewest words without one. Those
    that have one then take, from the end, the last token that is free: always one at or after the one they had.
    """
    places, free = {}, 0
    for word, tokens in enumerate(ranges):
        if (free := max(free, tokens.start)) < tokens.stop:
            places[word] = free
            free += 1
    if label_on == "last":
        free = max((tokens.stop for tokens in ranges), default=0)
        for word in reversed(places):
            free = min(free, ranges[word].stop) - 1
            places[word] = free
    return places


def _windows(length: int, room: int, stride: int, ranges: list[range], places: dict[int, int]) -> list[tuple]:
    """(first token, words labelled there) of each window of `length` tokens that has a word, or else of the first."""
    step = room - stride
    starts = range(0, max(length - stride, 1), step)
    words: dict[int, list[int]] = {start: [] for start in starts}
    for word, place in places.items():
        within = starts[max(0, (place - room) // step + 1) : place // step + 1]
        left, right = ranges[word].start, ranges[word].stop
        shorter = [min(left - start, min(start + room, length) - right) for start in within]
        words[within[shorter.index(max(shorter))]].append(word)
    return [(start, each) for start, each in words.items() if each] or [(0, [])]


def _padded(rows: list[list[int]], value: int) -> Tensor:
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
