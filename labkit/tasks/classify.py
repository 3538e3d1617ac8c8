"""Text classification: one class for each text, and two baselines.

    task = get("classify", pooling="mean")
    labels = task.labels(train)
    lm = labkit.load("gpt2-mini", task=task.head(labels))
    predictions = task.predict(lm.model, lm.tokenizer, test, labels)
    task.score(test, predictions)["accuracy"]

A row is [bos] text [eos], with those of the two that the tokenizer has. In a causal model only the last token attends
to the whole text; eos makes it the same token in every row, also where the text was cut.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.datasets.examples import Labelled
from labkit.errors import DataError
from labkit.models.heads import Head, label_names
from labkit.models.special_tokens import row_ends
from labkit.tasks.base import Task, needs_train_extra, pad_id, padded, require_labels, run_by_length
from labkit.tasks.options import ClassifyOptions


@dataclass(frozen=True)
class Row:
    """One text for the model.

    Attributes:
        ids: tokens, with bos and eos.
        target: the number of the class.
        example: the number of the example.
        cut: how many tokens of the text were left out, at its end.
    """

    ids: list[int]
    target: int
    example: int
    cut: int = 0


@dataclass(frozen=True)
class Classified:
    """The predicted class of a text, its probability, and those of all classes in the order of the labels.

    `cut`: how many tokens at the end of the text were left out.
    """

    id: str
    label: str
    probability: float
    probabilities: dict[str, float]
    cut: int = 0


@dataclass(frozen=True)
class Classification(ClassifyOptions, Task):
    name, head_task = "classify", "sequence-classification"

    def labels(self, examples: Sequence[Labelled]) -> Sequence[str]:
        return label_names([example.label for example in examples])

    def head(self, labels: Sequence[str], **changes: Any) -> Head:
        return super().head(labels, **{"pooling": self.pooling} | changes)

    def metric(self, examples: Sequence[Labelled]) -> str:
        return "accuracy"

    def rows(
        self,
        tokenizer: Any,
        examples: Sequence[Labelled],
        labels: Sequence[str],
        say: Callable[[str], None] = lambda text: None,
    ) -> list[Row]:
        targets = {label: number for number, label in enumerate(labels)}
        for example in examples:
            if example.label not in targets:
                raise DataError(
                    f"example {example.id} has the label {example.label!r}; the labels are {', '.join(labels)}"
                )
        names = [f"example {example.id}" for example in examples]
        framed = frame(tokenizer, [example.text for example in examples], names, self.max_length, say)
        return [Row(ids, targets[examples[number].label], number, cut) for number, (ids, cut) in enumerate(framed)]

    def collate(self, rows: Sequence[Row], pad_id: int) -> dict[str, Tensor]:
        """As in `Task.collate`; `labels` (batch,) are the numbers of the classes."""
        return padded([row.ids for row in rows], pad_id) | {"labels": torch.tensor([row.target for row in rows])}

    def predict(
        self,
        model: nn.Module,
        tokenizer: Any,
        examples: Sequence[Labelled],
        labels: Sequence[str],
        *,
        rows: Sequence[Row] | None = None,
        batch_size: int = 16,
    ) -> list[Classified]:
        """As in `Task.predict`; the labels of the examples are not used."""
        require_labels(model, labels)
        if rows is None:
            rows = self.rows(tokenizer, [replace(example, label=labels[0]) for example in examples], labels)
        ids = [row.ids for row in rows]
        logits = run_by_length(
            model, ids, lambda output: output.logits.float(), pad_id=pad_id(tokenizer), batch_size=batch_size
        )
        return [
            _classified(examples[row.example].id, labels, of_row.softmax(-1).tolist(), row.cut)
            for row, of_row in zip(rows, logits, strict=True)
        ]

    def score(self, examples: Sequence[Labelled], predictions: Sequence[Classified]) -> dict[str, Any]:
        """`accuracy`; `f1`, the macro mean over the classes that occur among labels or predictions; `n`.

        `by_label`: precision, recall, f1 and support of each class; a ratio whose denominator is 0 is 0. `confusion`:
        rows are the true classes, columns the predicted ones, both in the order of `labels`.
        """
        with needs_train_extra():
            from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support

        true = [example.label for example in examples]
        predicted = [prediction.label for prediction in predictions]
        labels = list(predictions[0].probabilities)  # in the order of the logits, then the labels without a logit
        labels += sorted({*true, *predicted} - set(labels))
        columns = precision_recall_fscore_support(true, predicted, labels=labels, zero_division=0)  # each (labels,)
        return {
            "accuracy": float(accuracy_score(true, predicted)),
            "f1": float(f1_score(true, predicted, average="macro", zero_division=0)),
            "by_label": {
                label: {"precision": float(p), "recall": float(r), "f1": float(f1), "support": int(n)}
                for label, p, r, f1, n in zip(labels, *columns, strict=True)
            },
            "labels": labels,
            "confusion": confusion_matrix(true, predicted, labels=labels).tolist(),
            "n": len(examples),
        }

    def baselines(self, train: Sequence[Labelled], examples: Sequence[Labelled]) -> dict[str, float]:
        """`majority`, the most frequent class of `train` (of equals the first by name), and `bag_of_words`."""
        counts = Counter(example.label for example in train)
        majority = min(counts, key=lambda label: (-counts[label], label))
        accuracy = {"majority": sum(example.label == majority for example in examples) / len(examples)}
        if any(re.search(r"\w", example.text) for example in train):  # there may be only emoji
            accuracy["bag_of_words"] = self.score(examples, bag_of_words(train, examples))["accuracy"]
        return accuracy

    def record(self, prediction: Classified) -> dict[str, Any]:
        return asdict(prediction)

    def judge(self, examples: Sequence[Labelled], predictions: Sequence[Classified]) -> list[dict[str, Any]]:
        """`correct`, 1 or 0, whose mean is the accuracy, with the example's `id`, `group` and `label`."""
        return [
            {
                "id": example.id,
                "group": example.group,
                "label": example.label,
                "correct": int(example.label == prediction.label),
            }
            for example, prediction in zip(examples, predictions, strict=True)
        ]

    def example(self, id: str, texts: dict[str, str], labels: Sequence[str]) -> Labelled:
        return Labelled(id, texts["text"], labels[0])


def bag_of_words(train: Sequence[Labelled], examples: Sequence[Labelled]) -> list[Classified]:
    """Predictions of a logistic regression on word counts, which ignores the order of the words.

    Raises:
        DataError: `train` has no words, or fewer than two classes. ModelError: scikit-learn is not installed.
    """
    with needs_train_extra():
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression

    counter = CountVectorizer(token_pattern=r"(?u)\b\w+\b")  # words of one letter count too
    try:
        counts = counter.fit_transform([example.text for example in train])
        model = LogisticRegression(max_iter=1000).fit(counts, [example.label for example in train])
    except ValueError as error:
        raise DataError(f"a bag of words cannot be learned from these {len(train)} texts: {error}") from error
    probabilities = model.predict_proba(counter.transform([example.text for example in examples]))
    labels = model.classes_.tolist()
    return [
        _classified(example.id, labels, of_text.tolist())
        for example, of_text in zip(examples, probabilities, strict=True)
    ]


def frame(
    tokenizer: Any,
    texts: Sequence[str],
    names: Sequence[str],
    max_length: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[tuple[list[int], int]]:
    """Each text as [bos] tokens [eos], and how many tokens were cut at the end of the text to fit `max_length`.

    Raises:
        DataError: an empty text, called by its name, or no room for one token between bos and eos.
    """
    first, last = row_ends(tokenizer)
    room = max_length - len(first) - len(last)
    if room < 1:
        raise DataError(f"max_length is {max_length}; a row needs at least {len(first + last) + 1} tokens")
    framed = []
    for name, text in zip(names, texts, strict=True):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not text.strip() or not ids:
            raise DataError(f"{name} is empty: {text!r}")
        framed.append((first + ids[:room] + last, max(0, len(ids) - room)))
    if cut := sum(tokens > 0 for _, tokens in framed):
        say(f"{cut:,} of {len(framed):,} texts have more than {max_length} tokens and were cut at their end")
    return framed


def _classified(id: str, labels: Sequence[str], probabilities: list[float], cut: int = 0) -> Classified:
    by_label = dict(zip(labels, probabilities, strict=True))
    label = max(by_label, key=by_label.__getitem__)
    return Classified(id, label, by_label[label], by_label, cut)
