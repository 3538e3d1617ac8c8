"""Named entities: tagged words over tokens, windows of long sentences, decoding to spans of the text, entity F1.

    task = get("ner", label_on="last")
    labels = task.labels(train)
    lm = labkit.load("gemma3-270m", task=task.head(labels))
    tagged = task.predict(lm.model, lm.tokenizer, test, labels)   # tags and entities, with character offsets
    task.score(test, tagged)["f1"]

A word may be several tokens, and one of them carries its label. The default is the last one, because it is the only one
from which a causal model attends to the whole word. Devlin et al. 2019, whose model is bidirectional, take the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from labkit.datasets.examples import NO_TAG, Entity, Sentence
from labkit.datasets.tags import entities_in, parts, to_bio, words_of
from labkit.errors import DataError
from labkit.models.special_tokens import row_ends
from labkit.tasks.base import IGNORED, Task, needs_train_extra, pad_id, pad_rows, padded, require_labels, run_by_length
from labkit.tasks.options import NerOptions

LABEL_ON = ("last", "first")  # the token of a word that carries its label


@dataclass(frozen=True)
class Row:
    """A sentence, or a window of a long one, for the model.

    Attributes:
        ids: tokens, between bos and eos where the tokenizer has them.
        targets: one per token: the number of the word's tag on the token that carries it, -100 elsewhere.
        example: the number of the sentence.
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
        tags: one per word, in BIO. An I that continues no entity of its kind begins one, and is B here.
        raw_tags: the most probable tag of each word, which need not be legal BIO.
        probabilities: of the raw tags; None for a word without a token, which is predicted as O.
        entities: spans of the text; `texts` holds text[start:end] of each.
    """

    id: str
    tags: tuple[str, ...]
    raw_tags: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    entities: tuple[Entity, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class NamedEntities(NerOptions, Task):
    name, head_task = "ner", "token-classification"

    def labels(self, examples: Sequence[Sentence]) -> Sequence[str]:
        return labels_of(examples)

    def metric(self, examples: Sequence[Sentence]) -> str:
        return "f1"

    def rows(
        self,
        tokenizer: Any,
        examples: Sequence[Sentence],
        labels: Sequence[str],
        say: Callable[[str], None] = lambda text: None,
    ) -> list[Row]:
        choices = {"max_length": self.max_length, "stride": self.doc_stride, "label_on": self.label_on}
        rows = features(tokenizer, examples, labels, **choices)
        lost = sum(len(sentence.words) for sentence in examples) - sum(len(row.words) for row in rows)
        if lost:
            say(f"{lost:,} words have no token of their own and cannot be labelled; they are predicted as O")
        return rows

    def collate(self, rows: Sequence[Row], pad_id: int) -> dict[str, Tensor]:
        """As in `Task.collate`; `labels` (batch, seq) are the numbers of the tags, -100 where there is none."""
        return padded([row.ids for row in rows], pad_id) | {"labels": pad_rows([row.targets for row in rows], IGNORED)}

    def predict(
        self,
        model: nn.Module,
        tokenizer: Any,
        examples: Sequence[Sentence],
        labels: Sequence[str],
        *,
        rows: Sequence[Row] | None = None,
        batch_size: int = 16,
    ) -> list[Tagged]:
        """As in `Task.predict`; the tags of the sentences are not used."""
        require_labels(model, labels)
        if rows is None:
            untagged = [replace(sentence, tags=(NO_TAG,) * len(sentence.words)) for sentence in examples]
            rows = self.rows(tokenizer, untagged, labels)
        ids = [row.ids for row in rows]
        logits = run_by_length(
            model, ids, lambda output: output.logits.float(), pad_id=pad_id(tokenizer), batch_size=batch_size
        )
        return decode(examples, rows, logits, labels)

    def score(self, examples: Sequence[Sentence], predictions: Sequence[Tagged]) -> dict[str, Any]:
        """`scores` of the legal tags, and `f1_raw`, the strict F1 of the raw ones."""
        raw = scores(examples, [tagged.raw_tags for tagged in predictions])["f1"]
        return scores(examples, [tagged.tags for tagged in predictions]) | {"f1_raw": raw}

    def baselines(self, train: Sequence[Sentence], examples: Sequence[Sentence]) -> dict[str, float]:
        return {name: scores(examples, tags)["f1"] for name, tags in majority_baseline(train, examples).items()}

    def record(self, prediction: Tagged) -> dict[str, Any]:
        return {
            "id": prediction.id,
            "entities": [
                asdict(entity) | {"text": text}
                for entity, text in zip(prediction.entities, prediction.texts, strict=True)
            ],
            "tags": list(prediction.tags),
            "probabilities": list(prediction.probabilities),
        }

    def judge(self, examples: Sequence[Sentence], predictions: Sequence[Tagged]) -> list[dict[str, Any]]:
        """How many entities are correct (`found`), predicted (`said`) and gold (`there`), each {kind: count}.

        Summed over sentences and kinds, 2 found / (said + there) is the strict F1 of the legal tags.
        """
        lines = []
        for sentence, tagged in zip(examples, predictions, strict=True):
            gold, predicted = set(entities_in(sentence.spans, sentence.tags)), set(tagged.entities)
            entities = {"found": gold & predicted, "said": predicted, "there": gold}
            counts = {name: Counter(sorted(entity.label for entity in some)) for name, some in entities.items()}
            lines.append({"id": sentence.id, "group": sentence.group} | counts)
        return lines

    def example(self, id: str, texts: dict[str, str], labels: Sequence[str]) -> Sentence:
        text = texts["text"]
        spans = tuple(words_of(text))
        return Sentence(id, text, tuple(text[start:end] for start, end in spans), spans, (NO_TAG,) * len(spans))


def labels_of(sentences: Iterable[Sentence]) -> tuple[str, ...]:
    """O, then B and I of every kind that occurs, kinds in alphabetical order: ("O", "B-LOC", "I-LOC", "B-PER", ...).

    Raises:
        DataError: no sentence has an entity.
    """
    kinds = {parts(tag)[1] for sentence in sentences for tag in sentence.tags} - {""}
    if not kinds:
        raise DataError("no sentence has an entity, so there is nothing to learn")
    return (NO_TAG, *(f"{letter}-{kind}" for kind in sorted(kinds) for letter in "BI"))


def features(
    tokenizer: Any,
    sentences: Sequence[Sentence],
    labels: Sequence[str],
    *,
    max_length: int = 256,
    stride: int = 64,
    label_on: str = "last",
) -> list[Row]:
    """The rows of these sentences, in their order.

    The text is tokenised as it is, and a word has the tokens that its characters are in. Two words may share a token
    (full stop and quotation mark in GPT-2's `."`). Then it carries the label of one of them, and the other word takes
    another of its tokens. A word that has no other token is lost: it is in no row and is predicted as O.

    A long sentence is cut into windows that overlap by `stride` tokens. A word is labelled in the window in which the
    shorter side of its context is longest. A window without a labelled word is left out.

    Args:
        labels: of the model, in the order of its logits (`labels_of`).
        max_length: tokens per row, bos and eos included.
        label_on: "last" or "first": the token of a word that carries its label.

    Raises:
        DataError: a tag that is not among the labels; a tokenizer without character offsets; a stride that leaves no
            room in a row.
    """
    begin, end = row_ends(tokenizer)
    room = max_length - len(begin) - len(end)
    if label_on not in LABEL_ON:
        raise DataError(f"the label is on {label_on!r}; choose one of {', '.join(LABEL_ON)}")
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{type(tokenizer).__name__} gives no character offsets; use a fast tokenizer")
    if not 0 <= stride < room:
        raise DataError(f"the stride is {stride}; it must be 0 or more, and less than the {room} tokens in a row")
    number = {label: k for k, label in enumerate(labels)}
    rows = []
    for example, sentence in enumerate(sentences):
        if unknown := [tag for tag in sentence.tags if tag not in number]:
            raise DataError(f"sentence {sentence.id} has the tag {unknown[0]!r}; the labels are {', '.join(labels)}")
        # With split_special_tokens, a text that contains "<eos>" is text like any other.
        encoded = tokenizer(
            sentence.text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            split_special_tokens=True,
            verbose=False,
        )
        ids, ranges = encoded["input_ids"], _tokens_of_words(sentence.spans, encoded["offset_mapping"])
        places = _places(ranges, label_on)
        for start, words in _windows(len(ids), room, stride, ranges, places):
            row = [*begin, *ids[start : start + room], *end]
            targets = [IGNORED] * len(row)
            placed = [(len(begin) + places[word] - start, word) for word in words]
            for place, word in placed:
                targets[place] = number[sentence.tags[word]]
            rows.append(Row(row, targets, example, placed))
    return rows


def decode(
    sentences: Sequence[Sentence],
    rows: Sequence[Row],
    logits: Sequence[Float[Tensor, "_ n_labels"]],
    labels: Sequence[str],
) -> list[Tagged]:
    """Tags and entities from the logits of each row, (tokens, labels): the most probable tag of each word.

    Logits beyond a row's tokens are padding and are not used.
    """
    raw = [[NO_TAG] * len(sentence.words) for sentence in sentences]
    probabilities: list[list[float | None]] = [[None] * len(sentence.words) for sentence in sentences]
    for row, of_row in zip(rows, logits, strict=True):
        best = of_row[[place for place, _ in row.words]].float().softmax(-1).max(-1)
        for (_, word), p, k in zip(row.words, best.values.tolist(), best.indices.tolist(), strict=True):
            raw[row.example][word], probabilities[row.example][word] = labels[k], p
    predictions = []
    for sentence, raw_tags, of_words in zip(sentences, raw, probabilities, strict=True):
        tags = to_bio(raw_tags, "BIO")
        entities = tuple(entities_in(sentence.spans, tags))
        texts = tuple(sentence.text[entity.start : entity.end] for entity in entities)
        predictions.append(Tagged(sentence.id, tuple(tags), tuple(raw_tags), tuple(of_words), entities, texts))
    return predictions


def scores(sentences: Sequence[Sentence], predicted_tags: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Scores of tags over all entities of the sentences (micro average), counted by seqeval.

    `f1`, `precision`, `recall`: strict, only entities in legal BIO count. `f1_lenient`: as conlleval, an entity may
    begin with I; it differs from `f1` only for tags that are not legal. `token_accuracy`: the share of words with the
    correct tag. `by_kind`: {kind: precision, recall, f1, support}, strict, of every kind that is gold or predicted.
    `n_sentences`, `n_words`, `n_entities`. A ratio whose denominator is 0 is 0.

    Raises:
        ModelError: seqeval is not installed.
    """
    with needs_train_extra():
        from seqeval.metrics import f1_score
        from seqeval.metrics.v1 import precision_recall_fscore_support, unique_labels
        from seqeval.scheme import IOB2

    gold, predicted = [list(sentence.tags) for sentence in sentences], [list(tags) for tags in predicted_tags]
    strict = {"scheme": IOB2, "zero_division": 0}  # seqeval calls this function for mode="strict"
    precision, recall, f1, support = precision_recall_fscore_support(gold, predicted, average="micro", **strict)
    kinds = unique_labels(gold, predicted, IOB2)
    by_kind = zip(kinds, *precision_recall_fscore_support(gold, predicted, average=None, **strict), strict=True)
    correct = [a == b for pair in zip(gold, predicted, strict=True) for a, b in zip(*pair, strict=True)]
    return {
        "f1": float(f1),
        "precision": float(precision),
        "recall": float(recall),
        "f1_lenient": float(f1_score(gold, predicted, zero_division=0)),
        "token_accuracy": sum(correct) / len(correct),
        "by_kind": {
            kind: {"precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
            for kind, p, r, f, n in by_kind
        },
        "n_sentences": len(sentences),
        "n_words": len(correct),
        "n_entities": int(support),
    }


def majority_baseline(train: Sequence[Sentence], sentences: Sequence[Sentence]) -> dict[str, list[list[str]]]:
    """Tags without a model: "outside" makes every word O; "most_frequent" takes the most frequent tag of the word.

    The frequencies are those in `train`; of two equally frequent tags O comes first, then the alphabet decides. A word
    that is not in `train` is O. The tags are made legal BIO, as a model's are.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for sentence in train:
        for word, tag in zip(sentence.words, sentence.tags, strict=True):
            counts[word][tag] += 1
    usual = {word: min(tags, key=lambda tag: (-tags[tag], tag != NO_TAG, tag)) for word, tags in counts.items()}
    return {
        "outside": [[NO_TAG] * len(sentence.words) for sentence in sentences],
        "most_frequent": [
            to_bio([usual.get(word, NO_TAG) for word in sentence.words], "BIO") for sentence in sentences
        ],
    }


def _tokens_of_words(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> list[range]:
    """The tokens that overlap each word; an empty range if there are none, as for a word of no width."""
    ranges, first = [], 0
    for start, end in spans:
        while first < len(offsets) and offsets[first][1] <= start:
            first += 1
        last = first
        while start < end and last < len(offsets) and offsets[last][0] < end:
            last += 1
        ranges.append(range(first, last))
    return ranges


def _places(ranges: Sequence[range], label_on: str) -> dict[int, int]:
    """{word: the token that carries its label}. No two words have one token; a lost word is not in it.

    Each word takes its first token that the words before it leave, which loses the fewest words. For "last", the words
    that have one then take, from the end, the last token that is free, which is never before the one they had.
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
    """(first token, words labelled there) of each window of `length` tokens that has a word."""
    step = room - stride
    starts = range(0, max(length - stride, 1), step)
    words: dict[int, list[int]] = {start: [] for start in starts}
    for word, place in places.items():
        within = starts[max(0, (place - room) // step + 1) : place // step + 1]
        left, right = ranges[word].start, ranges[word].stop
        shorter = [min(left - start, min(start + room, length) - right) for start in within]
        words[within[shorter.index(max(shorter))]].append(word)
    return [(start, labelled) for start, labelled in words.items() if labelled]
