"""Sequence classification: a text in, one class out, and the cheap baselines that a model has to beat.

    labels = label_names([each.label for each in examples])
    lm = labkit.load("gpt2-mini", task=Head("sequence-classification", labels=labels))
    rows = features(lm.tokenizer, examples, labels)
    train(lm.model, shuffled(rows, seed), collate=Collator(pad_id(lm.tokenizer)), loss=loss, ...)
    scores(held_out, predict(lm.model, lm.tokenizer, held_out, labels))

A row is [bos] text [eos], with those of the two that the tokenizer has: the last token of a causal model is the one
that has seen everything, so it is always the same token, also where the text was cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.datasets.examples import Labelled
from labkit.decoder.anatomy import decoder_or_none
from labkit.decoder.running import evaluating
from labkit.errors import DataError, ModelError
from labkit.models.heads import head_in
from labkit.tasks.lm import pad_id
from labkit.tasks.special_tokens import row_ends


@dataclass(frozen=True)
class Feature:
    """One text as the model reads it.

    Attributes:
        ids: tokens, with bos and eos.
        target: the number of the class.
        example: which of the examples it is.
        cut: how many tokens of the text were left out, at its end.
    """

    ids: list[int]
    target: int
    example: int
    cut: int = 0


@dataclass(frozen=True)
class Classified:
    """What a model says of a text: the likeliest class, how likely, and all classes in the order of the labels.

    `cut`: how many tokens at the end of the text it did not see.
    """

    id: str
    label: str
    probability: float
    probabilities: dict[str, float]
    cut: int = 0


def features(
    tokenizer: Any, examples: Sequence[Labelled], labels: Sequence[str], *, max_length: int = 256
) -> list[Feature]:
    """The rows of `examples`, none longer than `max_length` tokens. `cut_texts` counts those that were cut.

    Raises:
        DataError: an empty text, a label that is not among `labels` (each names the example), or a `max_length` without
            room for a token of text.
    """
    numbers = {label: i for i, label in enumerate(labels)}
    for each in examples:
        if each.label not in numbers:
            raise DataError(f"example {each.id} has the label {each.label!r}; the labels are {', '.join(labels)}")
    framed = _framed(tokenizer, examples, max_length)
    targets = [numbers[each.label] for each in examples]
    return [Feature(ids, target, i, cut) for i, ((ids, cut), target) in enumerate(zip(framed, targets, strict=True))]


def cut_texts(found: Sequence[Any]) -> int:
    """How many of these features, or predictions, stand for a text that was cut."""
    return sum(each.cut > 0 for each in found)


class Collator:
    """Features as the training hands them over, {"row": k, "ids": Feature}, to one batch, padded on the right.

    input_ids and attention_mask (batch, seq); labels (batch,).
    """

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        found = [item["ids"] for item in items]
        input_ids, attention_mask = padded([each.ids for each in found], self.pad_id)
        labels = torch.tensor([each.target for each in found])
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the head computes: the mean cross-entropy of the right classes, in nats."""
    return model(**batch).loss


def predict(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Labelled],
    labels: Sequence[str],
    *,
    batch_size: int = 32,
    max_length: int = 256,
) -> list[Classified]:
    """The class of every text, in the order of the examples; what label they carry plays no part.

    Raises:
        DataError: an empty text, other labels than the model was trained with, or a text longer than its positions.
    """
    head = head_in(model.config)
    if head is not None and head.labels and list(head.labels) != list(labels):
        raise DataError(
            f"the labels are {', '.join(labels)}, but the model has {', '.join(head.labels)}, in this order"
        )
    framed = _framed(tokenizer, examples, max_length)
    rows = [ids for ids, _ in framed]
    found = run_by_length(model, rows, _probabilities, pad_id=pad_id(tokenizer), batch_size=batch_size, what="classify")
    predictions = []
    for example, (_, cut), row in zip(examples, framed, found, strict=True):
        if len(row) != len(labels):
            raise DataError(f"the model knows {len(row)} classes, and {len(labels)} labels are given")
        predictions.append(_classified(example.id, labels, row.tolist(), cut))
    return predictions


def judged(examples: Sequence[Labelled], predictions: Sequence[Classified]) -> list[dict[str, Any]]:
    """One line per text: `correct`, 1 or 0, whose mean is the accuracy; with its `id`, `group` and `label`."""
    return [
        {"id": each.id, "group": each.group, "label": each.label, "correct": int(each.label == said.label)}
        for each, said in zip(examples, predictions, strict=True)
    ]


def scores(examples: Sequence[Labelled], predictions: Sequence[Classified]) -> dict[str, Any]:
    """How well the predictions, in the order of the examples, agree with the labels.

    `accuracy`; `f1`, the macro mean over the classes that occur among labels or predictions; `by_label`: precision,
    recall, f1 and support of each (0 where nothing is to be divided by); `confusion`: rows are the true classes,
    columns the predicted ones, both in the order of `labels`; `n`.

    Raises:
        DataError: no examples, or predictions of others. ModelError: scikit-learn is not installed.
    """
    try:
        from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support
    except ImportError:
        raise _needs_sklearn("classification scores need") from None
    if not examples or [each.id for each in examples] != [each.id for each in predictions]:
        raise DataError(f"{len(examples)} examples and {len(predictions)} predictions: give one for each, in one order")
    true, said = [each.label for each in examples], [each.label for each in predictions]
    known = list(predictions[0].probabilities)  # in the model's order; labels that it does not know come after them
    labels = known + sorted({*true, *said} - set(known))
    each = precision_recall_fscore_support(true, said, labels=labels, zero_division=0)  # four arrays (labels,)
    return {
        "accuracy": float(accuracy_score(true, said)),
        "f1": float(f1_score(true, said, average="macro", zero_division=0)),
        "by_label": {
            label: {"precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
            for label, p, r, f, n in zip(labels, *each, strict=True)
        },
        "labels": labels,
        "confusion": confusion_matrix(true, said, labels=labels).tolist(),
        "n": len(examples),
    }


def majority_baseline(train: Sequence[Labelled], examples: Sequence[Labelled]) -> float:
    """The accuracy of the most frequent label of `train`; of two equally frequent ones, the first by name."""
    counts = Counter(each.label for each in train)
    most = min(counts, key=lambda label: (-counts[label], label))
    return sum(each.label == most for each in examples) / len(examples)


def bag_of_words(train: Sequence[Labelled], examples: Sequence[Labelled]) -> list[Classified]:
    """What a logistic regression on word counts says: no order, no pretraining, a second of work. For `scores`.

    Raises:
        DataError: no words, or fewer than two classes, to train on. ModelError: scikit-learn is not installed.
    """
    try:
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise _needs_sklearn("the bag of words needs") from None
    if len({each.label for each in train}) < 2:
        raise DataError(f"the {len(train)} training texts are of fewer than two classes: there is nothing to learn")
    counter = CountVectorizer(token_pattern=r"(?u)\b\w+\b")  # words of one letter count too
    try:
        counts = counter.fit_transform([each.text for each in train])
    except ValueError as error:
        raise DataError(f"the {len(train)} training texts hold no word") from error
    if not examples:
        return []
    model = LogisticRegression(max_iter=1000).fit(counts, [each.label for each in train])
    found = model.predict_proba(counter.transform([each.text for each in examples]))
    labels = [str(label) for label in model.classes_]
    return [_classified(each.id, labels, row.tolist()) for each, row in zip(examples, found, strict=True)]


def frame(tokenizer: Any, texts: Sequence[str], names: Sequence[str], max_length: int) -> list[tuple[list[int], int]]:
    """Each text as [bos] tokens [eos], and how many tokens were cut at the end of the text to fit `max_length`.

    Raises:
        DataError: an empty text, called by its name, or no room for one token between bos and eos.
    """
    first, last = row_ends(tokenizer)
    room = max_length - len(first) - len(last)
    if room < 1:
        raise DataError(f"max_length is {max_length}; a row needs {len(first + last) + 1} tokens at least")
    if not texts:
        return []
    framed = []
    tokens = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    for name, text, row in zip(names, texts, tokens, strict=True):
        if not text.strip() or not row:
            raise DataError(f"{name} is empty: {text!r}")
        framed.append((first + row[:room] + last, max(0, len(row) - room)))
    return framed


def _framed(tokenizer: Any, examples: Sequence[Labelled], max_length: int) -> list[tuple[list[int], int]]:
    return frame(tokenizer, [e.text for e in examples], [f"example {e.id}" for e in examples], max_length)


def padded(rows: Sequence[list[int]], pad_id: int) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Rows padded on the right to the longest, and the mask that is 1 on real tokens."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def run_by_length(
    model: Any,
    rows: Sequence[list[int]],
    read: Callable[[Any], Tensor],
    *,
    pad_id: int,
    batch_size: int,
    what: str,
) -> list[Tensor]:
    """`read(model(...))` of every row, in the rows' order, on the CPU, in eval mode and without gradients.

    Rows of like length share a batch, the longest first: what does not fit into memory shows at once. A bar is drawn on
    a terminal only.
    """
    from tqdm import tqdm

    if batch_size < 1:
        raise DataError(f"the batch size is {batch_size}; it must be at least 1")
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    if order:
        _require_positions(model, len(rows[order[0]]))
    parts = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    found: dict[int, Tensor] = {}
    with evaluating(model):
        for part in tqdm(parts, desc=what, unit="batch", disable=None, leave=False):  # None: on a terminal only
            ids, mask = padded([rows[i] for i in part], pad_id)
            output = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
            found.update(zip(part, read(output).cpu(), strict=True))
    return [found[i] for i in range(len(rows))]


def _probabilities(output: Any) -> Float[Tensor, "batch labels"]:
    return output.logits.float().softmax(-1)


def _require_positions(model: Any, longest: int) -> None:
    """A model that looks its positions up in a table (GPT-2) ends with an index error beyond it; say so instead."""
    decoder = decoder_or_none(model)
    if decoder is not None and (limit := decoder.most_positions) is not None and longest > limit:
        raise DataError(
            f"a text has {longest:,} tokens, and the model has {limit:,} positions: set max_length to {limit}"
        )


def _classified(id: str, labels: Sequence[str], probabilities: list[float], cut: int = 0) -> Classified:
    best = max(range(len(labels)), key=lambda i: probabilities[i])
    return Classified(id, labels[best], probabilities[best], dict(zip(labels, probabilities, strict=True)), cut)


def _needs_sklearn(what: str) -> ModelError:
    return ModelError(f'{what} scikit-learn: pip install "labkit-bidirectional[train]"')
