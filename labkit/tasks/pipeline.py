"""Use a fine-tuned model: `pipe = labkit.pipeline("runs/qa")`, texts in, answers with character offsets out.

pipe(question="Who lost the bolt?", context="...")      one answer
pipe(["Dessin went bankrupt in May."])                  a list in, a list out
predict_file(pipe, "texts.jsonl", "entities.jsonl")     the same for files
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.datasets.files import HALF_A_PAIR, csv_rows, json_lines
from labkit.errors import DataError, ModelError, reading
from labkit.files import require_writable, write_whole
from labkit.models import load
from labkit.models.adapters import TASK
from labkit.models.heads import head_in
from labkit.tasks.base import Task, get


class Pipeline:
    """A model with a head, its tokenizer, and its task with the options of the training; made by `pipeline`."""

    def __init__(self, lm: Any, task: Task, batch_size: int = 8):
        self.lm, self.task, self.batch_size = lm, task, batch_size
        self.labels = list(head_in(lm.model.config).labels)

    def __call__(self, inputs: Any = None, **fields: str) -> Any:
        """The prediction for one input (a text, a dict, or its fields by name), or for a list of them.

        Gives a dict per input. qa: text, start, end (text == context[start:end], "" for no answer), probability,
        n_best. ner: entities with start, end, label and text; tags; probabilities. classify: label, probability,
        probabilities. embed: the similarity of first and second.

        Raises:
            DataError: a field is missing, is not a text, or is empty.
        """
        inputs = fields if inputs is None else inputs
        if isinstance(inputs, (str, dict)):
            return self([inputs])[0]
        rows = [row if isinstance(row, dict) else {"text": row} for row in inputs]
        return self.predict([self.example(row, f"input {number}", number) for number, row in enumerate(rows, 1)])

    def predict(self, examples: Sequence[Any]) -> list[dict[str, Any]]:
        """The predictions for examples of the task, as dicts."""
        if not examples:
            return []
        model, tokenizer = self.lm.model, self.lm.tokenizer
        predictions = self.task.predict(model, tokenizer, examples, self.labels, batch_size=self.batch_size)
        return [self.task.record(prediction) for prediction in predictions]

    def example(self, row: dict[str, Any], where: str, number: int) -> Any:
        """The example of a row; `where` names it in an error, and `number` is its id if it has none."""
        names = self.task.inputs
        for name in names:
            if not isinstance(row.get(name), str) or not row[name].strip() or HALF_A_PAIR.search(row[name]):
                problem = "is missing" if name not in row else f"is {row[name]!r}"
                raise DataError(f"{where}: {name} {problem}; {self.task.name} needs {' and '.join(names)}")
        id = str(number if row.get("id") is None else row["id"])
        return self.task.example(id, {name: row[name] for name in names}, self.labels)


def pipeline(
    model: str | Path, *, task: str | None = None, batch_size: int = 8, device: Any = None, attn: str | None = None,
    dtype: Any = None,
) -> Pipeline:  # fmt: skip
    """Load what `labkit train` left: a run's folder, its `model` or a checkpoint, or a hub id of such a folder.

    Args:
        task: only needed to check that the model is for it.
        device, attn, dtype: as in `labkit.load`.

    Raises:
        ModelError: the model was not fine-tuned by labkit, or for another task, or cannot be loaded.
    """
    folder = Path(model).expanduser()
    if (folder / "metrics.json").is_file() and (folder / "model").is_dir():
        model = folder / "model"
    elif (folder / "checkpoints").is_dir():
        raise ModelError(f"the run in {folder} is not finished: continue it with labkit train ... --resume")
    lm = load(model, device=device, attn=attn, dtype=dtype)
    record = getattr(lm.model.config, TASK, None)
    if record is None or head_in(lm.model.config) is None:
        raise ModelError(f"{model} was not fine-tuned for a task: labkit train qa|ner|classify|embed does that")
    with reading(f"the task recorded in {model}"):
        if task not in (None, record["task"]):
            raise ModelError(f"{model} was fine-tuned for {record['task']}, not for {task}")
        return Pipeline(lm, get(record["task"], **record["options"]), batch_size)


def predict_file(pipe: Pipeline, source: str | Path, target: str | Path | None) -> int:
    """JSONL or CSV in, JSONL out, row by row, with the input's `id` or else the line's number; returns their number.

    All lines are checked first. `target` (None: standard output) is written whole or not at all.

    Raises:
        DataError: a line that is not a JSON object or lacks a field, with file and line number; `target` is a folder,
            or the input itself. OSError: `target` cannot be written; this is checked before the first prediction.
    """
    source = Path(source).expanduser()
    target = Path("-" if target is None else target).expanduser()
    require_writable(target)
    if target.is_dir() or (target.is_file() and target.resolve() == source.resolve()):
        raise DataError(f"{target} is a folder, or the input itself; give --output another file")
    read = csv_rows if source.suffix.lower() in (".csv", ".tsv") else json_lines
    examples = [pipe.example(row, f"{source}, line {line}", line) for line, row in read(source)]
    if not examples:
        raise DataError(f"{source} has no line")
    predictions = pipe.predict(examples)
    write_whole(target, "".join(json.dumps(prediction, ensure_ascii=False) + "\n" for prediction in predictions))
    return len(predictions)
