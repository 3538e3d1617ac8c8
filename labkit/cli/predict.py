"""`labkit predict qa|ner|classify|embed`."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer

from labkit.cli.console import JSON, REQUIRED, Options, Text, add_command, aside, option, report
from labkit.errors import DataError

predict_app = typer.Typer(help="Use a fine-tuned model on your texts.")

FIELDS = {  # what `predict` takes in place of --input
    "qa": {"question": "One question, instead of --input.", "context": "The text in which to find the answer."},
    "ner": {"text": "One text, instead of --input."},
    "classify": {"text": "One text, instead of --input."},
    "embed": {"first": "One text, instead of --input.", "second": "The text to compare it with."},
}
HELP = {
    "qa": "Answer questions about a context.\n\n"
    'Input: {"question": .., "context": ..}. Output: text, start, end and probability.\n\n'
    "Example: labkit predict qa --model runs/qa --input questions.jsonl --output answers.jsonl",
    "ner": "Find the named entities in a text.\n\n"
    'Input: {"text": ..}. Output: entities with label, start and end.\n\n'
    'Example: labkit predict ner --model runs/ner --text "Dessin went bankrupt in May."',
    "classify": "Classify a text.\n\n"
    'Input: {"text": ..}. Output: label and probabilities.\n\n'
    "Example: labkit predict classify --model runs/classify --input texts.jsonl",
    "embed": "Compute the similarity of two texts.\n\n"
    'Input: {"first": .., "second": ..}. Output: their similarity.\n\n'
    'Example: labkit predict embed --model runs/embed --first "The ferry left." --second "The boat has gone."',
}
FILES: Options = {
    "model": option(str, "A run folder of labkit train, its model folder, or a hub id.", default=REQUIRED),
    "input_file": option(Text, "JSONL or CSV file whose rows have the fields of the task.", "--input"),
    "output_file": option(Text, "JSONL file for the predictions. Default: standard output (-).", "--output"),
}
BATCH: Options = {"batch_size": option(int, "Rows per forward pass.", default=8, min=1), "as_json": JSON}


def _predict(task: str, given: dict[str, Any]) -> None:
    """One input gives one JSON object in either case; with --json, a file gives a summary for programs."""
    from labkit.tasks.pipeline import pipeline, predict_file

    fields = {name: given[name] for name in FIELDS[task] if given[name] is not None}
    input_file, output_file = given["input_file"], given["output_file"]
    if bool(fields) == (input_file is not None):
        names = " and ".join(f"--{name}" for name in FIELDS[task])
        raise DataError(f"give --input with a file, or {names}")
    pipe = pipeline(given["model"], task=task, batch_size=given["batch_size"])
    if input_file is None:
        report(True, pipe(fields))
    elif (count := predict_file(pipe, input_file, output_file)) and output_file:
        with aside(output_file):
            report(given["as_json"], {"output": output_file, "lines": count}, f"{output_file}: {count:,} lines")


for _task, _fields in FIELDS.items():
    _texts = {name: option(Text, text) for name, text in _fields.items()}
    add_command(predict_app, _task, HELP[_task], FILES | _texts | BATCH, partial(_predict, _task))
