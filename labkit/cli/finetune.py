"""`labkit train qa|ner|classify|embed` and `labkit predict`: parse, call, print.

The four training commands share their options; each adds those of its task. The shared ones are written once, here,
and put together to one signature per command.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from labkit.cli.console import REQUIRED, Json, Options, Real, Text, Whole, add_command, aside, flag, option, print_json
from labkit.cli.data import TagColumn
from labkit.cli.train import Accumulation, BatchSize, Checkpointing, MaxSteps, OutputDir, Resume, Seed, train_app
from labkit.errors import DataError

predict_app = typer.Typer(help="Use a fine-tuned model on your texts.")

DATA: Options = {
    "data": option(Text, "Embedded data set, hub name, or local folder in the layout of the hub."),
    "train_file": option(Text, "Training file, instead of --data: JSON, CoNLL, JSONL or CSV."),
    "dev_file": option(Text, "File that selects the best checkpoint. Default: a tenth of the training examples."),
    "test_file": option(Text, "File that is scored once, after training."),
    "skip_bad_rows": flag("--skip-bad-rows", "Skip and count rows that cannot be read."),
    "max_train": option(Whole, "Maximum number of training examples.", min=1),
    "max_eval": option(Whole, "Maximum number of dev and of test examples.", min=1),
}
MODEL: Options = {
    "model": option(str, "A registered name, a hub id or a local folder.", default="gpt2-mini"),
    "mask": option(
        str, "bidirectional, causal (a decoder, unchanged) or encoder (an encoder, unchanged).", default="bidirectional"
    ),
    "window": option(str, "Window of unmasked local layers: keep, halve or global.", default="keep"),
    "layers": option(str, "Layers to unmask: all, middle-third, below-1/3, above-2/3, or 0,1,2.", default="all"),
    "method": option(str, "full, lora, or frozen (trains only the head).", default="full"),
    "rank": option(int, "Rank of the LoRA adapters.", default=16, min=1),
    "dropout": option(Real, "Dropout before the head.", min=0, max=0.99),
    "backbone_dropout": option(Real, "Dropout in every layer.", min=0, max=0.99),
    "head_init": option(Text, "Initialisation of the head: normal, zeros or xavier."),
    "packing": flag("--packing", "Pack the rows of a batch without padding: same batches, less computation."),
    "attn_implementation": option(Text, "Attention backend: eager, sdpa, flex_attention or flash_attention_2."),
}
PLAN: Options = {
    "preset": option(Text, "gemma, mini or quick. Default: depends on the model."),
    "epochs": option(Real, "Passes over the training rows."),
    "max_steps": (MaxSteps, None),
    "batch_size": (BatchSize, None),
    "batch_tokens": option(
        Whole, "With --packing: maximum number of tokens per batch, instead of --batch-size.", min=1
    ),
    "eval_batch_size": option(Whole, "Rows per forward pass in evaluation.", min=1),
    "gradient_accumulation": (Annotated[Whole, Accumulation.__metadata__[0]], None),
    "learning_rate": option(Real, "Peak learning rate."),
    "schedule": option(Text, "Learning-rate schedule: linear or cosine."),
    "warmup": option(Real, "Fraction of the steps for warm-up."),
    "weight_decay": option(Real, "Weight decay of AdamW."),
    "evaluate_every": option(Whole, "Steps between evaluations. Default: 500, or one epoch if that is shorter.", min=1),
    "keep": option(Whole, "Number of checkpoints to keep, in addition to the best.", min=1),
    "patience": option(Whole, "Stop after this many evaluations without improvement; 0 is never.", min=0),
    "gradient_checkpointing": (Checkpointing, False),
    "dtype": option(Text, "auto, float32, bfloat16 or float16."),
    "seed": (Seed, 0),
    "report_to": option(Text, "Experiment trackers, separated by commas: tensorboard, mlflow, trackio."),
}
RUN: Options = {
    "folds": option(int, "Number of folds of a cross-validation over train, dev and test together.", default=0, min=0),
    "resume": (Resume, False),
    "as_json": (Json, False),
}
MAX_LENGTH = {"max_length": option(Whole, "Tokens per row.", min=8)}
POOLING = {"pooling": option(Text, "Pooling: first, last, mean, weighted_mean, attention_query or attention_kv.")}
TASKS: dict[str, Options] = {
    "qa": MAX_LENGTH
    | {
        "doc_stride": option(Whole, "Tokens from the start of one window to the start of the next.", min=1),
        "order": option(Text, "Position of the question: question-first or question-last."),
        "prompt": option(Text, "Prompt format: plain, or evidence ([INST] [POST] [CRITERION])."),
        "max_answer_tokens": option(Whole, "Maximum number of tokens of an answer.", min=1),
        "null_threshold": option(Real, "Threshold for no answer. Default: chosen on the dev set."),
    },
    "ner": MAX_LENGTH
    | {
        "doc_stride": option(Whole, "Tokens that two consecutive windows share.", min=0),
        "label_on": option(Text, "Token of a word that carries its label: last or first."),
    },
    "classify": MAX_LENGTH | POOLING,
    "embed": MAX_LENGTH | POOLING,
}
HELP = {
    "qa": "Fine-tune for question answering.\n\n"
    "The model predicts the span of the context that answers the question, or that there is no answer.\n\n"
    "Example: labkit train qa --model gpt2-mini --output-dir runs/qa",
    "ner": "Fine-tune for named-entity recognition.\n\n"
    "The entity types are those of the training data.\n\n"
    "Example: labkit train ner --model gemma3-270m --method lora --output-dir runs/ner",
    "classify": "Fine-tune for text classification.\n\n"
    "Each text has one label.\n\n"
    "Example: labkit train classify --train-file reviews.csv --pooling mean --output-dir runs/classify",
    "embed": "Fine-tune for sentence embeddings.\n\n"
    "The model learns one vector for each text, from pairs of texts.\n\n"
    "Example: labkit train embed --train-file pairs.jsonl --output-dir runs/embed",
}


def _train(task: str, given: dict[str, Any]) -> None:
    from labkit.datasets.sources import sides
    from labkit.tasks.crossvalidate import crossvalidate
    from labkit.tasks.finetune import finetune
    from labkit.tasks.plans import default_preset, preset
    from labkit.tasks.recipes import Options

    model = given["model"]
    skipped = {} if given["skip_bad_rows"] else None
    train, dev, test = sides(
        task,
        **{name: given[name] for name in DATA if name != "skip_bad_rows"},
        seed=given["seed"],
        tag_column=given.get("tag_column"),
        skipped=skipped,
    )
    plan = preset(given["preset"] or default_preset(model), **{name: given[name] for name in PLAN if name != "preset"})
    head = {"dropout": given["dropout"], "backbone_dropout": given["backbone_dropout"], "init": given["head_init"]}
    choices = {name: given[name] for name in ("mask", "window", "layers", "method", "rank", "packing")} | {
        "attn": given["attn_implementation"],
        "head": {name: value for name, value in head.items() if value is not None},
        "skipped": skipped,
        "options": Options(**{name: given[name] for name in TASKS[task]}),
    }
    output_dir, resume = given["output_dir"], given["resume"]
    if given["folds"]:
        found = crossvalidate(
            task,
            model,
            _together(train=train, dev=dev, test=test),
            output_dir,
            k=given["folds"],
            plan=plan,
            resume=resume,
            **choices,
        )
    else:
        found = finetune(task, model, train, output_dir, dev=dev, test=test, plan=plan, resume=resume, **choices)
    if given["as_json"]:
        print_json(found)
    elif given["folds"]:
        _print_folds(found)
    else:
        _print_run(output_dir, found)


def _together(**sides: list[Any]) -> list[Any]:
    """The examples of all sides. Where two have one id, as rows that are only numbered have, it tells the side."""
    ids = Counter(each.id for side in sides.values() for each in side)
    return [
        each if ids[each.id] == 1 else replace(each, id=f"{name}-{each.id}")
        for name, side in sides.items()
        for each in side
    ]


def _print_run(output_dir: str, metrics: dict[str, Any]) -> None:
    from labkit.tasks.finetune import numbers

    print(
        f"{output_dir}/model: {metrics['task']}, {metrics['mask']['measured']}, {metrics['steps']:,} steps, "
        f"{metrics['seconds']:,.0f} s; best at step {metrics['best_step']:,}"
    )
    for side in ("dev", "test"):
        if side in metrics:
            shown = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in numbers(metrics[side]).items())
            print(f"  {side:5} (n = {metrics[f'n_{side}']:,}) {shown}")
            for name, value in metrics["baselines"].get(side, {}).items():
                print(f"        baseline {name.replace('_', ' ')}: {value:.3f}")


def _print_folds(metrics: dict[str, Any]) -> None:
    print(f"{metrics['task']}: {metrics['folds']} folds, n = {metrics['n']:,}; mean and 95 % interval over the folds")
    for name, each in metrics["scores"].items():
        print(f"  {name.replace('_', ' ')} {each['mean']:.3f} ± {each['half_width_95']:.3f}")


FIELDS = {  # what `predict` takes in place of --input
    "qa": {
        "question": option(Text, "One question, instead of --input."),
        "context": option(Text, "The text in which to find the answer."),
    },
    "ner": {"text": option(Text, "One text, instead of --input.")},
    "classify": {"text": option(Text, "One text, instead of --input.")},
    "embed": {
        "first": option(Text, "One text, instead of --input."),
        "second": option(Text, "The text to compare it with."),
    },
}
PREDICT_HELP = {
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
    "input_file": option(Text, "JSONL file: on each line an object with the fields of the task.", "--input"),
    "output_file": option(Text, "JSONL file for the predictions. Default: standard output (-).", "--output"),
}
BATCH: Options = {"batch_size": option(int, "Rows per forward pass.", default=8, min=1), "as_json": (Json, False)}


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
        print_json(pipe(fields))
    elif (count := predict_file(pipe, input_file, output_file)) and output_file:
        with aside(output_file):
            summary = {"output": output_file, "lines": count}
            print_json(summary) if given["as_json"] else print(f"{output_file}: {count:,} lines")


for _task in TASKS:
    _columns = {"tag_column": (TagColumn, None)} if _task == "ner" else {}
    _options = {"output_dir": (OutputDir, REQUIRED)} | MODEL | DATA | _columns | PLAN | TASKS[_task] | RUN
    add_command(train_app, _task, HELP[_task], _options, partial(_train, _task))
    add_command(predict_app, _task, PREDICT_HELP[_task], FILES | FIELDS[_task] | BATCH, partial(_predict, _task))
