"""`labkit train qa|ner|classify|embed` and `labkit predict`: parse, call, print.

The four training commands share their options; each adds those of its task. The shared ones are written once, here,
and put together to one signature per command.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from labkit.cli_data import TagColumn
from labkit.cli_train import Accumulation, BatchSize, Checkpointing, MaxSteps, OutputDir, Resume, Seed, train_app
from labkit.console import Json, aside, print_json
from labkit.errors import DataError

predict_app = typer.Typer(help="Use a fine-tuned model on your texts.")

DATA: dict[str, tuple[Any, Any]] = {
    "data": (
        Annotated[
            str | None, typer.Option(help="Embedded data set, hub name, or local folder in the layout of the hub.")
        ],
        None,
    ),
    "train_file": (
        Annotated[str | None, typer.Option(help="Training file, instead of --data: JSON, CoNLL, JSONL or CSV.")],
        None,
    ),
    "dev_file": (
        Annotated[
            str | None,
            typer.Option(help="File that selects the best checkpoint. Default: a tenth of the training examples."),
        ],
        None,
    ),
    "test_file": (Annotated[str | None, typer.Option(help="File that is scored once, after training.")], None),
    "skip_bad_rows": (
        Annotated[bool, typer.Option("--skip-bad-rows", help="Skip and count rows that cannot be read.")],
        False,
    ),
    "max_train": (Annotated[int | None, typer.Option(help="Maximum number of training examples.", min=1)], None),
    "max_eval": (Annotated[int | None, typer.Option(help="Maximum number of dev and of test examples.", min=1)], None),
}
MODEL: dict[str, tuple[Any, Any]] = {
    "model": (Annotated[str, typer.Option(help="A registered name, a hub id or a local folder.")], "gpt2-mini"),
    "mask": (
        Annotated[
            str, typer.Option(help="bidirectional, causal (a decoder, unchanged) or encoder (an encoder, unchanged).")
        ],
        "bidirectional",
    ),
    "window": (Annotated[str, typer.Option(help="Window of unmasked local layers: keep, halve or global.")], "keep"),
    "layers": (
        Annotated[str, typer.Option(help="Layers to unmask: all, middle-third, below-1/3, above-2/3, or 0,1,2.")],
        "all",
    ),
    "method": (Annotated[str, typer.Option(help="full, lora, or frozen (trains only the head).")], "full"),
    "rank": (Annotated[int, typer.Option(help="Rank of the LoRA adapters.", min=1)], 16),
    "dropout": (Annotated[float | None, typer.Option(help="Dropout before the head.", min=0, max=0.99)], None),
    "backbone_dropout": (Annotated[float | None, typer.Option(help="Dropout in every layer.", min=0, max=0.99)], None),
    "head_init": (
        Annotated[str | None, typer.Option(help="Initialisation of the head: normal, zeros or xavier.")],
        None,
    ),
    "packing": (
        Annotated[
            bool,
            typer.Option("--packing", help="Pack the rows of a batch without padding: same batches, less computation."),
        ],
        False,
    ),
    "attn_implementation": (
        Annotated[
            str | None, typer.Option(help="Attention backend: eager, sdpa, flex_attention or flash_attention_2.")
        ],
        None,
    ),
}
PLAN: dict[str, tuple[Any, Any]] = {
    "preset": (Annotated[str | None, typer.Option(help="gemma, mini or quick. Default: depends on the model.")], None),
    "epochs": (Annotated[float | None, typer.Option(help="Passes over the training rows.")], None),
    "max_steps": (MaxSteps, None),
    "batch_size": (BatchSize, None),
    "batch_tokens": (
        Annotated[
            int | None,
            typer.Option(help="With --packing: maximum number of tokens per batch, instead of --batch-size.", min=1),
        ],
        None,
    ),
    "eval_batch_size": (Annotated[int | None, typer.Option(help="Rows per forward pass in evaluation.", min=1)], None),
    "gradient_accumulation": (Annotated[int | None, Accumulation.__metadata__[0]], None),
    "learning_rate": (Annotated[float | None, typer.Option(help="Peak learning rate.")], None),
    "schedule": (Annotated[str | None, typer.Option(help="Learning-rate schedule: linear or cosine.")], None),
    "warmup": (Annotated[float | None, typer.Option(help="Fraction of the steps for warm-up.")], None),
    "weight_decay": (Annotated[float | None, typer.Option(help="Weight decay of AdamW.")], None),
    "evaluate_every": (
        Annotated[
            int | None,
            typer.Option(help="Steps between evaluations. Default: 500, or one epoch if that is shorter.", min=1),
        ],
        None,
    ),
    "keep": (
        Annotated[int | None, typer.Option(help="Number of checkpoints to keep, in addition to the best.", min=1)],
        None,
    ),
    "patience": (
        Annotated[
            int | None, typer.Option(help="Stop after this many evaluations without improvement; 0 is never.", min=0)
        ],
        None,
    ),
    "gradient_checkpointing": (Checkpointing, False),
    "dtype": (Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")], None),
    "seed": (Seed, 0),
    "report_to": (
        Annotated[
            str | None, typer.Option(help="Experiment trackers, separated by commas: tensorboard, mlflow, trackio.")
        ],
        None,
    ),
}
RUN: dict[str, tuple[Any, Any]] = {
    "folds": (
        Annotated[
            int, typer.Option(help="Number of folds of a cross-validation over train, dev and test together.", min=0)
        ],
        0,
    ),
    "resume": (Resume, False),
    "as_json": (Json, False),
}
MAX_LENGTH = {"max_length": (Annotated[int | None, typer.Option(help="Tokens per row.", min=8)], None)}
POOLING = {
    "pooling": (
        Annotated[
            str | None, typer.Option(help="Pooling: first, last, mean, weighted_mean, attention_query or attention_kv.")
        ],
        None,
    )
}
TASKS: dict[str, dict[str, tuple[Any, Any]]] = {
    "qa": MAX_LENGTH
    | {
        "doc_stride": (
            Annotated[
                int | None, typer.Option(help="Tokens from the start of one window to the start of the next.", min=1)
            ],
            None,
        ),
        "order": (
            Annotated[str | None, typer.Option(help="Position of the question: question-first or question-last.")],
            None,
        ),
        "prompt": (
            Annotated[str | None, typer.Option(help="Prompt format: plain, or evidence ([INST] [POST] [CRITERION]).")],
            None,
        ),
        "max_answer_tokens": (
            Annotated[int | None, typer.Option(help="Maximum number of tokens of an answer.", min=1)],
            None,
        ),
        "null_threshold": (
            Annotated[float | None, typer.Option(help="Threshold for no answer. Default: chosen on the dev set.")],
            None,
        ),
    },
    "ner": MAX_LENGTH
    | {
        "doc_stride": (
            Annotated[int | None, typer.Option(help="Tokens that two consecutive windows share.", min=0)],
            None,
        ),
        "label_on": (
            Annotated[str | None, typer.Option(help="Token of a word that carries its label: last or first.")],
            None,
        ),
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
    plan = preset(
        given["preset"] or default_preset(model),
        **{name: given[name] for name in PLAN if name != "preset"},
    )
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


def _command(task: str) -> Callable[..., None]:
    """The function behind `labkit train TASK`, with the options of all and of the task as its signature."""
    columns = {"tag_column": (TagColumn, None)} if task == "ner" else {}
    options = {"output_dir": (OutputDir, inspect.Parameter.empty)} | MODEL | DATA | columns | PLAN | TASKS[task] | RUN

    def command(**given: Any) -> None:
        _train(task, given)

    command.__name__, command.__doc__ = f"train_{task}", HELP[task]
    kind = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, kind, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
    )
    command.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    return command


for _task in TASKS:
    train_app.command(_task)(_command(_task))


Model = Annotated[str, typer.Option(help="A run folder of labkit train, its model folder, or a hub id.")]
Input = Annotated[
    str | None, typer.Option("--input", help="JSONL file: on each line an object with the fields of the task.")
]
Output = Annotated[
    str | None, typer.Option("--output", help="JSONL file for the predictions. Default: standard output (-).")
]
PredictBatch = Annotated[int, typer.Option(help="Rows per forward pass.", min=1)]


@predict_app.command("qa")
def predict_qa(
    model: Model,
    input_file: Input = None,
    output_file: Output = None,
    question: Annotated[str | None, typer.Option(help="One question, instead of --input.")] = None,
    context: Annotated[str | None, typer.Option(help="The text in which to find the answer.")] = None,
    batch_size: PredictBatch = 8,
    as_json: Json = False,
) -> None:
    """Answer questions about a context.

    Input: {"question": .., "context": ..}. Output: text, start, end and probability.

    Example: labkit predict qa --model runs/qa --input questions.jsonl --output answers.jsonl
    """
    _predict("qa", model, input_file, output_file, {"question": question, "context": context}, batch_size, as_json)


@predict_app.command("ner")
def predict_ner(
    model: Model,
    input_file: Input = None,
    output_file: Output = None,
    text: Annotated[str | None, typer.Option(help="One text, instead of --input.")] = None,
    batch_size: PredictBatch = 8,
    as_json: Json = False,
) -> None:
    """Find the named entities in a text.

    Input: {"text": ..}. Output: entities with label, start and end.

    Example: labkit predict ner --model runs/ner --text "Dessin went bankrupt in May."
    """
    _predict("ner", model, input_file, output_file, {"text": text}, batch_size, as_json)


@predict_app.command("classify")
def predict_classify(
    model: Model,
    input_file: Input = None,
    output_file: Output = None,
    text: Annotated[str | None, typer.Option(help="One text, instead of --input.")] = None,
    batch_size: PredictBatch = 8,
    as_json: Json = False,
) -> None:
    """Classify a text.

    Input: {"text": ..}. Output: label and probabilities.

    Example: labkit predict classify --model runs/classify --input texts.jsonl
    """
    _predict("classify", model, input_file, output_file, {"text": text}, batch_size, as_json)


@predict_app.command("embed")
def predict_embed(
    model: Model,
    input_file: Input = None,
    output_file: Output = None,
    first: Annotated[str | None, typer.Option(help="One text, instead of --input.")] = None,
    second: Annotated[str | None, typer.Option(help="The text to compare it with.")] = None,
    batch_size: PredictBatch = 8,
    as_json: Json = False,
) -> None:
    """Compute the similarity of two texts.

    Input: {"first": .., "second": ..}. Output: their similarity.

    Example: labkit predict embed --model runs/embed --first "The ferry left." --second "The boat has gone."
    """
    _predict("embed", model, input_file, output_file, {"first": first, "second": second}, batch_size, as_json)


def _predict(
    task: str,
    model: str,
    input_file: str | None,
    output_file: str | None,
    fields: dict[str, Any],
    batch_size: int,
    as_json: bool,
) -> None:
    """One input gives one JSON object in either case; with --json, a file gives a summary for programs."""
    from labkit.tasks.pipeline import pipeline, predict_file

    given = {name: value for name, value in fields.items() if value is not None}
    if bool(given) == (input_file is not None):
        names = " and ".join(f"--{name}" for name in fields)
        raise DataError(f"give --input with a file, or {names}")
    pipe = pipeline(model, task=task, batch_size=batch_size)
    if input_file is None:
        print_json(pipe(given))
    elif (count := predict_file(pipe, input_file, output_file)) and output_file:
        with aside(output_file):
            print_json({"output": output_file, "lines": count}) if as_json else print(f"{output_file}: {count:,} lines")
