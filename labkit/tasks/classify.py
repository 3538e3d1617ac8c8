"""Text classification: one class for each text, and two baselines.

A row is [bos] text [eos], with those of the two that the tokenizer has. In a causal model only the last token attends
to the whole text; eos makes it the same token in every row, also where the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.datasets.examples import Labelled
from labkit.errors import DataError, needs_extra
from labkit.run_folder import Log, silent
from labkit.tasks.base import IGNORED, Task, padded, row_frame
from labkit.tasks.options import ClassifyOptions


@dataclass(frozen=True)
class Row:
    """A text with bos and eos, and the number of its class."""

    ids: list[int]
    target: int
    example: int


@dataclass(frozen=True)
class Classified:
    """The probabilities of the classes of a text."""

    id: str
    probabilities: dict[str, float]

    @property
    def label(self) -> str:
        """The most probable class."""
        return max(self.probabilities, key=self.probabilities.__getitem__)


@dataclass(frozen=True)
class Classification(ClassifyOptions, Task):
    name = "classify"

    def labels(self, examples: Sequence[Labelled]) -> Sequence[str]:
        return sorted({example.label for example in examples})

    def metric(self, examples: Sequence[Labelled]) -> str:
        return "accuracy"

    def rows(self, tokenizer: Any, examples: Sequence[Labelled], labels: Sequence[str], log: Log = silent) -> list[Row]:
        targets = {label: number for number, label in enumerate(labels)}
        names = [f"example {example.id}" for example in examples]
        framed = frame(tokenizer, [example.text for example in examples], names, self.max_length, log)
        return [Row(ids, targets.get(examples[k].label, IGNORED), k) for k, ids in enumerate(framed)]

    def collate(self, rows: Sequence[Row], pad_id: int) -> dict[str, Tensor]:
        """As in `Task.collate`; `labels` (batch,) are the numbers of the classes."""
        return padded([row.ids for row in rows], pad_id) | {"labels": torch.tensor([row.target for row in rows])}

    def decode(self, examples, rows, outputs, labels) -> list[Classified]:
        return [
            Classified(examples[row.example].id, dict(zip(labels, logits.softmax(-1).tolist(), strict=True)))
            for row, logits in zip(rows, outputs, strict=True)
        ]

    def score(self, examples: Sequence[Labelled], predictions: Sequence[Classified]) -> dict[str, Any]:
        """`accuracy`; `f1`, the macro mean over the classes that occur among labels or predictions; `n`.

        `by_label`: precision, recall, f1 and support of each of these classes; a ratio whose denominator is 0 is 0.
        """
        with needs_extra():
            from sklearn.metrics import precision_recall_fscore_support

        true, predicted = [e.label for e in examples], [prediction.label for prediction in predictions]
        names = sorted({*true, *predicted})
        columns = np.array(precision_recall_fscore_support(true, predicted, labels=names, zero_division=0))
        by_label = [dict(zip(("precision", "recall", "f1", "support"), row, strict=True)) for row in columns.T.tolist()]
        return {
            "accuracy": float(np.mean(np.equal(true, predicted))),
            "f1": float(columns[2].mean()),
            "by_label": dict(zip(names, by_label, strict=True)),
            "n": len(examples),
        }

    def baselines(self, train: Sequence[Labelled], examples: Sequence[Labelled]) -> dict[str, float]:
        """`majority`, the most frequent class of `train` (of equals the first by name), and `bag_of_words`.

        The latter is a logistic regression on word counts, which ignores the order of the words.
        """
        with needs_extra():
            from sklearn.feature_extraction.text import HashingVectorizer
            from sklearn.linear_model import LogisticRegression
            from sklearn.pipeline import make_pipeline

        # hashed, so that texts without a word are no special case; words of one letter count too
        counter = HashingVectorizer(n_features=2**16, alternate_sign=False, norm=None, token_pattern=r"\w+")
        model = make_pipeline(counter, LogisticRegression(max_iter=1000))
        model.fit([example.text for example in train], [example.label for example in train])
        classes, counts = np.unique([example.label for example in train], return_counts=True)
        true = [example.label for example in examples]
        return {
            "majority": float(np.mean(np.equal(true, classes[counts.argmax()]))),
            "bag_of_words": float(model.score([example.text for example in examples], true)),
        }

    def record(self, prediction: Classified) -> dict[str, Any]:
        label = prediction.label
        return {"label": label, "probability": prediction.probabilities[label]} | asdict(prediction)

    def judge(self, examples: Sequence[Labelled], predictions: Sequence[Classified]) -> list[dict[str, Any]]:
        """`correct`, 1 or 0, whose mean is the accuracy, with the example's `id`, `group` and `label`."""
        return [
            {"id": e.id, "group": e.group, "label": e.label, "correct": int(e.label == prediction.label)}
            for e, prediction in zip(examples, predictions, strict=True)
        ]

    def example(self, id: str, texts: dict[str, str], labels: Sequence[str]) -> Labelled:
        return Labelled(id, texts["text"], labels[0])


def frame(
    tokenizer: Any, texts: Sequence[str], names: Sequence[str], max_length: int, log: Log = silent
) -> list[list[int]]:
    """Each text as [bos] tokens [eos], cut at its end to fit `max_length`; DataError for an empty one, by its name."""
    first, last, room = row_frame(tokenizer, max_length)
    framed, cut = [], 0
    for name, text in zip(names, texts, strict=True):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not text.strip() or not ids:
            raise DataError(f"{name} is empty: {text!r}")
        framed.append(first + ids[:room] + last)
        cut += len(ids) > room
    if cut:
        log(f"{cut:,} of {len(framed):,} texts were cut to {max_length} tokens")
    return framed
