"""Use a fine-tuned model: `pipe = labkit.pipeline("runs/qa/model")`, texts in, answers with character offsets out.

pipe(question="Who lost the bolt?", context="...")      one answer
pipe(["Dessin went bankrupt in May."])                  a list in, a list out
predict_file(pipe, "texts.jsonl", "entities.jsonl")     the same for files
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_type_hints

from labkit.datasets.examples import NO_TAG, Labelled, Question, Sentence
from labkit.datasets.files import fault, json_lines
from labkit.datasets.tags import words_of
from labkit.errors import DataError, ModelError, reading
from labkit.files import require_writable, write_whole
from labkit.models.adapters import TASK
from labkit.models.heads import head_in
from labkit.tasks.recipes import Options, by_name

FIELDS = {"qa": ("question", "context"), "ner": ("text",), "classify": ("text",), "embed": ("first", "second")}
PART = 500  # rows of a file that are predicted together


class Pipeline:
    """A model with a head, its tokenizer, and the options that it was trained with. Made by `pipeline`.

    Attributes:
        task: "qa", "ner", "classify" or "embed". lm: the `labkit.Loaded` model. options: of the task.
    """

    def __init__(self, lm: Any, task: str, options: Options, batch_size: int = 8):
        self.lm, self.task, self.options, self.batch_size = lm, task, options, batch_size
        self.recipe, self.labels = by_name(task), list(head_in(lm.model.config).labels)

    def __repr__(self) -> str:
        return f"Pipeline({self.task!r}, {self.lm.name!r}: {type(self.lm.model).__name__})"

    def __call__(self, inputs: Any = None, **fields: str) -> Any:
        """What the model says of one input (a text, a dict, or its fields by name) or of a list of them.

        Gives a dict per input. qa: text, start, end (text == context[start:end], "" for no answer), probability,
        n_best. ner: entities with start, end, label and text; tags; probabilities. classify: label, probability,
        probabilities. embed: the similarity of first and second.

        Raises:
            DataError: a field is missing, not a text, or empty.
        """
        if inputs is None:
            inputs = fields
        if isinstance(inputs, (str, dict)):
            return self([inputs])[0]
        rows = [each if isinstance(each, dict) else {"text": each} for each in inputs]
        examples = [self._example(row, number) for number, row in enumerate(rows, 1)]
        if not examples:
            return []
        said = self.recipe.predict(
            self.lm.model, self.lm.tokenizer, examples, self.labels, self.options, self.batch_size
        )
        return [self.recipe.record(each) for each in said]

    def _example(self, row: dict[str, Any], number: int) -> Any:
        needed = FIELDS[self.task]
        for name in needed:
            if not isinstance(row.get(name), str) or not row[name].strip():
                shown = "is missing" if name not in row else f"is {row[name]!r}"
                raise DataError(f"input {number}: {name} {shown}; {self.task} needs {' and '.join(needed)}, as text")
        id = str(number if row.get("id") is None else row["id"])
        for name, text in {"id": id, **{name: row[name] for name in needed}}.items():
            if not text.isascii() and re.search("[\ud800-\udfff]", text):
                raise DataError(f"input {number}: {name} holds half of a surrogate pair, which is not a character")
        if self.task == "qa":
            return Question(id, row["question"], row["context"])
        if self.task == "ner":
            spans = tuple(words_of(row["text"]))
            words = tuple(row["text"][start:end] for start, end in spans)
            return Sentence(id, row["text"], words, spans, (NO_TAG,) * len(words))
        if self.task == "classify":
            return Labelled(id, row["text"], self.labels[0])
        from labkit.datasets.examples import Pair

        return Pair(id, row["first"], row["second"])


def pipeline(
    model: str | Path, *, task: str | None = None, batch_size: int = 8, device: Any = None, attn: str | None = None
) -> Pipeline:
    """Load what `labkit train` left behind: a run's folder or its `model` folder, or a hub id of such a folder.

    Args:
        task: only needed to check that the model is for it.

    Raises:
        ModelError: the model was not fine-tuned by labkit, or for another task. ModelError: it cannot be loaded.
    """
    import labkit

    folder = Path(model).expanduser()
    if (folder / "metrics.json").is_file() and (folder / "model").is_dir():
        model = folder / "model"
    elif (folder / "checkpoints").is_dir():
        raise ModelError(f"the run in {folder} is not finished: go on with it by labkit train ... --resume")
    lm = labkit.load(model, device=device, attn=attn)
    record = getattr(lm.model.config, TASK, None)
    if record is None or head_in(lm.model.config) is None:
        raise ModelError(
            f"{model} was not fine-tuned for a task by labkit; labkit train qa|ner|classify|embed does that"
        )
    with reading(f"what labkit recorded in {model}", ModelError):
        if task not in (None, record["task"]):
            raise ModelError(f"{model} was fine-tuned for {record['task']}, not for {task}")
        options = Options(**record["options"])
        for name, kind in get_type_hints(Options).items():
            if not isinstance(value := getattr(options, name), kind):
                raise TypeError(f"{name} is {value!r}")
        return Pipeline(lm, record["task"], options, batch_size)


def predict_file(pipe: Pipeline, source: str | Path, target: str | Path | None) -> int:
    """JSONL in, JSONL out, line by line, the input's `id` kept (else the line's number); returns how many.

    All lines are read and checked first; `target` (None: standard output) is written whole or not at all
    (`labkit.files`). A progress bar on terminals.

    Raises:
        DataError: a line that is not a JSON object or lacks a field, with file and line number; `target` is a folder,
            or the input itself. OSError: `target` cannot be written; this is checked before the first prediction.
    """
    from tqdm import tqdm

    source = Path(source).expanduser()
    target = Path("-" if target is None else target).expanduser()
    require_writable(target)
    if target.is_dir() or (target.is_file() and target.resolve() == source.resolve()):
        raise DataError(f"{target} is a folder, or the input itself; give --output a file of its own")
    rows = []
    for line, row in json_lines(source):
        try:
            pipe._example(row, line)
        except DataError as error:
            raise fault(source, line, str(error).partition(": ")[2]) from error
        rows.append(row if row.get("id") is not None else row | {"id": line})
    if not rows:
        raise DataError(f"{source} holds no line")
    lines: list[str] = []
    with tqdm(total=len(rows), unit="text", disable=None, leave=False) as bar:
        for first in range(0, len(rows), PART):
            said = pipe(rows[first : first + PART])
            lines += [json.dumps(each, ensure_ascii=False) + "\n" for each in said]
            bar.update(len(said))
    write_whole(target, "".join(lines))
    return len(lines)
