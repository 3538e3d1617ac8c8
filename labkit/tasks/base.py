"""What every task has: rows, batches, a loss, predictions and scores. One subclass per task, in a file of its own.

task = get("ner", max_length=128)
labels = task.labels(train)
rows = task.rows(tokenizer, train, labels)            # what the model is trained on
batch = task.collate(rows[:8], pad_id)                # input_ids, attention_mask (batch, seq), labels
task.loss(model, batch)                               # the mean over the labels that are not -100
predictions = task.predict(model, tokenizer, test, labels)
task.score(test, predictions)                         # {"f1": ..., ...}
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from operator import itemgetter
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from labkit.decoder.limits import require_positions
from labkit.decoder.running import evaluating
from labkit.errors import DataError, require_one_of
from labkit.models.heads import Head
from labkit.models.special_tokens import row_ends
from labkit.run_folder import Log, silent

IGNORED = -100  # the label of what does not count in a loss
NAMES = {"qa": "QuestionAnswering", "ner": "NamedEntities", "classify": "Classification", "embed": "Embedding"}


@dataclass(frozen=True)
class Task:
    """A task to fine-tune on. Its fields are the options in `labkit.tasks.options`.

    A row is any object with `ids` (token ids) and `example` (the number of its example). A label that is not among
    `labels` has the target -100: it is not trained on.
    """

    name: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]] = ("text",)  # the fields of an example to predict
    split_by_tokens: ClassVar[bool] = True  # a batch may have any number of rows

    def labels(self, examples: Sequence[Any]) -> Sequence[str]:
        """The classes of the training examples, in the order of the logits; empty if the task has none."""
        return ()

    def head(self, labels: Sequence[str], **changes: Any) -> Head:
        """The head to train; `changes` are fields of `Head`, such as `dropout`."""
        if hasattr(self, "pooling"):
            changes = {"pooling": self.pooling} | changes
        return Head(self.name, labels=labels, **changes)

    def metric(self, examples: Sequence[Any]) -> str:
        """The name of the score that chooses the best checkpoint; higher is better."""
        return "f1"

    def rows(self, tokenizer: Any, examples: Sequence[Any], labels: Sequence[str], log: Log = silent) -> list[Any]:
        """The rows of the examples, in their order. `log` receives what was cut or lost."""
        raise NotImplementedError

    def sequences(self, row: Any) -> Sequence[Sequence[int]]:
        """The token ids of a row, one sequence for each text that the model reads by itself."""
        return [row.ids]

    def collate(self, rows: Sequence[Any], pad_id: int) -> dict[str, Tensor]:
        """A batch: input_ids and attention_mask (batch, seq), padded on the right, and `labels`."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss over the labels of the batch that are not -100, in nats."""
        return model(**batch).loss

    def predict(
        self,
        model: nn.Module,
        tokenizer: Any,
        examples: Sequence[Any],
        labels: Sequence[str],
        *,
        rows: Sequence[Any] | None = None,
        batch_size: int = 16,
    ) -> list[Any]:
        """One prediction per example, in their order. `rows`: those of `self.rows`, if they exist already."""
        rows = self.rows(tokenizer, examples, labels) if rows is None else rows
        sequences = [ids for row in rows for ids in self.sequences(row)]
        outputs = run_by_length(model, sequences, self.read, pad_id=pad_id(tokenizer), batch_size=batch_size)
        return self.decode(examples, rows, outputs, labels)

    def read(self, output: Any) -> Tensor:
        """What a prediction is made from, in the output of a model: (batch, ...), float32."""
        return output.logits.float()

    def decode(self, examples: Sequence[Any], rows: Sequence[Any], outputs: Sequence[Tensor], labels: Any) -> list[Any]:
        """One prediction per example, from what `read` gave for each sequence of each row."""
        raise NotImplementedError

    def score(self, examples: Sequence[Any], predictions: Sequence[Any]) -> dict[str, Any]:
        """The scores of the predictions; `self.metric(examples)` is among them."""
        raise NotImplementedError

    def tuned(self, scores: dict[str, Any]) -> Task:
        """The task with what is chosen on the dev set, whose scores these are."""
        return self

    def baselines(self, train: Sequence[Any], examples: Sequence[Any]) -> dict[str, float]:
        """What methods without a model reach on `examples`, by name, in the metric."""
        raise NotImplementedError

    def record(self, prediction: Any) -> dict[str, Any]:
        """A prediction as one line of JSONL."""
        return asdict(prediction)

    def judge(self, examples: Sequence[Any], predictions: Sequence[Any]) -> list[dict[str, Any]] | None:
        """One line per example, whose sums or means give the scores; None if these are not made of single examples."""
        return None

    def example(self, id: str, texts: dict[str, str], labels: Sequence[str]) -> Any:
        """An example to predict, from the fields named in `inputs`."""
        raise NotImplementedError


def get(name: str, **options: Any) -> Task:
    """The task of this name with these options; an option that is None has its default.

    The default of `doc_stride` is at most half of `max_length`.
    """
    require_one_of("the task", name, NAMES)
    kind = getattr(import_module(f"labkit.tasks.{name}"), NAMES[name])
    defaults = {field.name: field.default for field in fields(kind)}
    given = {option: value for option, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - defaults):
        raise DataError(f"{name} has no {', '.join(unknown)}; it has {', '.join(defaults)}")
    chosen = defaults | given
    if "doc_stride" in defaults.keys() - given:
        chosen["doc_stride"] = min(chosen["doc_stride"], chosen["max_length"] // 2)
    return kind(**chosen)


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """The token ids of each text, and the (start, end) of each token in it. A "<eos>" in a text is not special."""
    if not tokenizer.is_fast:
        raise DataError(f"{type(tokenizer).__name__} is a slow tokenizer, which has no offsets; use a fast one")
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    encoded = tokenizer(list(texts), return_offsets_mapping=True, **options)
    return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))


def row_frame(tokenizer: Any, max_length: int) -> tuple[list[int], list[int], int]:
    """The ids before and after a text in its row, and the room between them in tokens; DataError if there is none."""
    begin, end = row_ends(tokenizer)
    room = max_length - len(begin) - len(end)
    if room < 1:
        raise DataError(f"max_length is {max_length}; a row needs at least {len(begin + end) + 1} tokens")
    return begin, end, room


def window_starts(length: int, room: int, stride: int) -> range:
    """Where the windows of `room` tokens start in a text of `length`, `stride` apart; the last one reaches its end."""
    step = min(stride, room)
    return range(0, max(length - room, 0) + step, step)


def tokens_over(offsets: Sequence[tuple[int, int]], start: int, end: int) -> range:
    """The tokens that have a character of text[start:end]; `offsets` are the (start, end) of each token."""
    return range(bisect_right(offsets, start, key=itemgetter(1)), bisect_left(offsets, end, key=itemgetter(0)))


def pad_rows(rows: Sequence[Sequence[int]], value: int) -> Int[Tensor, "batch seq"]:
    """Rows of numbers as one tensor, padded on the right with `value`."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> dict[str, Int[Tensor, "batch seq"]]:
    """input_ids, and the attention_mask that is 1 on real tokens."""
    return {"input_ids": pad_rows(rows, pad_id), "attention_mask": pad_rows([[1] * len(row) for row in rows], 0)}


def pad_id(tokenizer: Any) -> int:
    """The pad token, or any id where there is none: padding is hidden by the attention mask."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


def json_lines(records: Iterable[dict[str, Any]]) -> str:
    """Records as JSONL."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def run_by_length(
    model: nn.Module, rows: Sequence[Sequence[int]], read: Callable[[Any], Tensor], *, pad_id: int, batch_size: int
) -> list[Tensor]:
    """`read(model(...))` for every row, in the rows' order, on the CPU, in eval mode and without gradients.

    Rows of similar length share a batch. The longest come first, so that too little memory shows at once.
    """
    from tqdm import tqdm

    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    require_positions(max(map(len, rows), default=0), model.config, refusal=DataError)
    outputs: dict[int, Tensor] = {}
    device = next(model.parameters()).device
    with evaluating(model):
        for numbers in tqdm(batches, desc="predict", unit="batch", disable=None, leave=False):
            batch = padded([rows[number] for number in numbers], pad_id)
            output = model(**{name: tensor.to(device) for name, tensor in batch.items()})
            outputs.update(zip(numbers, read(output).cpu(), strict=True))
    return [outputs[number] for number in range(len(rows))]
