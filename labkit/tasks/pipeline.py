"""Use a fine-tuned model: `pipe = labkit.pipeline("runs/qa")`, texts in, answers with character offsets out.

pipe(question="Who lost the bolt?", context="...")      one answer
pipe(["Dessin went bankrupt in May."])                  a list in, a list out
predict_file(pipe, "texts.jsonl", "entities.jsonl")     the same for files
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.datasets import files
from labkit.errors import DataError, ModelError, reading
from labkit.files import require_writable, write_whole
from labkit.models import load
from labkit.models.adapters import TASK
from labkit.models.heads import head_in
from labkit.tasks.base import Task, get, json_lines


class Pipeline:
    """A model with a head, its tokenizer, and its task with the options of the training; made by `pipeline`."""

    def __init__(self, lm: Any, task: Task, batch_size: int = 8):
        self.lm, self.task, self.batch_size = lm, task, batch_size
        self.labels = list(head_in(lm.model.config).labels)

    def __call__(self, inputs: Any = None, **fields: str) -> Any:
        """The prediction for one input (a text, a dict, or its fields by name), or for a list of them, as dicts.

        qa: text, start, end (text == context[start:end], "" for no answer), probability, n_best. ner: entities with
        start, end, label and text; tags; probabilities. classify: label, probability, probabilities. embed: similarity.
        """
        inputs = fields if inputs is None else inputs
        if isinstance(inputs, (str, dict)):
            return self([inputs])[0]
        rows = [row if isinstance(row, dict) else {"text": row} for row in inputs]
        return self.predict([self.example(row, f"input {number}", number) for number, row in enumerate(rows, 1)])

    def predict(self, examples: Sequence[Any]) -> list[dict[str, Any]]:
        """The predictions for examples of the task, as dicts."""
        given = (self.lm.model, self.lm.tokenizer, examples, self.labels)
        predictions = self.task.predict(*given, batch_size=self.batch_size) if examples else []
        return [self.task.record(prediction) for prediction in predictions]

    def example(self, row: dict[str, Any], where: str, number: int) -> Any:
        """The example of a row; `where` names it in an error, and `number` is its id if it has none."""
        names = self.task.inputs
        for name in names:
            if not isinstance(row.get(name), str) or not row[name].strip() or files.HALF_A_PAIR.search(row[name]):
                problem = "is missing" if name not in row else f"is {row[name]!r}"
                raise DataError(f"{where}: {name} {problem}; {self.task.name} needs {' and '.join(names)}")
        id = str(number if row.get("id") is None else row["id"])
        return self.task.example(id, {name: row[name] for name in names}, self.labels)


def pipeline(
    model: str | Path, *, task: str | None = None, batch_size: int = 8, device: Any = None, attn: str | None = None,
    dtype: Any = None,
) -> Pipeline:  # fmt: skip
    """Load what `labkit train` left: a run's folder, its `model` or `adapter`, or a hub id of such a folder.

    `task`: only needed to check that the model is for it. `device`, `attn`, `dtype`: as in `labkit.load`. Raises
    ModelError if the model was not fine-tuned by labkit, or for another task, or cannot be loaded.
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

    All lines are checked first, and that `target` (None: standard output) can be written, whole or not at all.
    """
    source = Path(source).expanduser()
    target = Path("-" if target is None else target).expanduser()
    require_writable(target)
    if target.is_dir() or (target.is_file() and target.resolve() == source.resolve()):
        raise DataError(f"{target} is a folder, or the input itself; give --output another file")
    read = files.csv_rows if source.suffix.lower() in (".csv", ".tsv") else files.json_lines
    examples = [pipe.example(row, f"{source}, line {line}", line) for line, row in read(source)]
    if not examples:
        raise DataError(f"{source} has no line")
    write_whole(target, json_lines(pipe.predict(examples)))
    return len(examples)
