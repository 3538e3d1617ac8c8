"""`labkit train qa|ner|classify|embed|lm` and `labkit pretrain`: parse, call, print."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from labkit.cli.console import JSON, REQUIRED, Options, Real, Text, Whole, add_command, flag, option, options_of, report
from labkit.cli.data import TagColumn
from labkit.errors import LabkitError, require_one_of
from labkit.tasks.options import OPTIONS

train_app = typer.Typer(help="Train a model on a task or on text.")

EVALUATE = "Steps between evaluations. Default: 500 or one epoch, whichever is less; on text a tenth of the run."
PACKED = "With --packing: maximum number of tokens per batch."
HYPERPARAMETERS: dict[str, tuple[str, Any]] = {  # option -> field of labkit.training.preset, its option
    "epochs": ("num_train_epochs", option(Real, "Passes over the training rows.")),
    "max_steps": ("max_steps", option(Whole, "Maximum number of optimiser steps.", min=1)),
    "batch_size": ("per_device_train_batch_size", option(Whole, "Rows per device in one forward pass.", min=1)),
    "batch_tokens": ("batch_tokens", option(Whole, PACKED, min=1, needs="--packing")),
    "eval_batch_size": ("per_device_eval_batch_size", option(Whole, "Rows per forward pass in evaluation.", min=1)),
    "gradient_accumulation": ("gradient_accumulation_steps", option(Whole, "Forward passes per step.", min=1)),
    "gradient_checkpointing": ("gradient_checkpointing", flag("--gradient-checkpointing", "Less memory, but slower.")),
    "learning_rate": ("learning_rate", option(Real, "Peak learning rate.")),
    "schedule": ("lr_scheduler_type", option(Text, "Learning-rate schedule: linear or cosine.")),
    "warmup": ("warmup_steps", option(Real, "Fraction of the steps for warm-up.", min=0, max=0.99)),
    "weight_decay": ("weight_decay", option(Real, "Weight decay of AdamW.")),
    "evaluate_every": ("eval_steps", option(Whole, EVALUATE, min=1)),
    "save_every": ("save_steps", option(Whole, "Steps between checkpoints.", min=1)),
    "keep": ("save_total_limit", option(Whole, "Number of checkpoints to keep, the best one included.", min=1)),
    "patience": ("patience", option(Whole, "Stop after this many evaluations without improvement; 0 is never.", min=0)),
    "dtype": ("dtype", option(Text, "auto (depends on GPU and model), float32, bfloat16 or float16.")),
    "seed": ("seed", option(int, "Seed of weights, data order and dropout.", default=0)),
    "report_to": ("report_to", option(Text, "Experiment trackers, separated by commas: tensorboard, mlflow, trackio.")),
}
OF_TASKS = [name for name in HYPERPARAMETERS if name != "save_every"]
OF_LM = ["epochs", "max_steps", "batch_size", "gradient_accumulation", "gradient_checkpointing", "learning_rate"]
OF_LM += ["warmup", "dtype", "seed", "report_to"]
OF_PRETRAINING = [*OF_LM[1:], "evaluate_every", "save_every"]

OF_TASK = {task: options_of(options, defaults=False) for task, options in OPTIONS.items()}
OUTPUT: Options = {"output_dir": option(str, "Folder of the run. It must not contain another run.", default=REQUIRED)}
RUN: Options = {"resume": flag("--resume", "Continue the run in --output-dir."), "as_json": JSON}
MODEL_NAME = option(str, "A registered name, a hub id or a local folder.", default="gpt2-mini")
WINDOW = partial(option, str, "Window of unmasked local layers: keep, halve or global.", default="keep")
LAYERS = partial(option, str, "Layers to unmask: all, middle-third, below-1/3, above-2/3, or 0,1,2.", default="all")
RANK = partial(option, int, "Rank of the LoRA adapters.", default=16, min=1)
ATTENTION = option(Text, "Attention backend: eager, sdpa, flex_attention or flash_attention_2.")
TASK: Options = {
    "model": MODEL_NAME,
    "mask": option(
        str, "bidirectional, causal (a decoder, unchanged) or encoder (an encoder, unchanged).", default="bidirectional"
    ),
    "window": WINDOW(needs="--mask bidirectional"),
    "layers": LAYERS(needs="--mask bidirectional"),
    "method": option(str, "full, lora, or frozen (trains only the head).", default="full"),
    "rank": RANK(needs="--method lora"),
    "dropout": option(Real, "Dropout before the head.", min=0, max=0.99),
    "backbone_dropout": option(Real, "Dropout in every layer.", min=0, max=0.99),
    "head_init": option(Text, "Initialisation of the head: normal, zeros or xavier."),
    "packing": flag("--packing", "Pack the rows of a batch without padding: same batches, less computation."),
    "attn_implementation": ATTENTION,
}
DATA: Options = {
    "data": option(Text, "Embedded data set, hub name, or local folder in the layout of the hub."),
    "train_file": option(Text, "Training file, instead of --data: JSON, CoNLL, JSONL or CSV."),
    "dev_file": option(Text, "File that selects the best checkpoint. Default: a tenth of the training examples."),
    "test_file": option(Text, "File that is scored once, after training."),
    "skip_bad_rows": flag("--skip-bad-rows", "Skip and count rows that cannot be read."),
    "max_train": option(Whole, "Maximum number of training examples.", min=1),
    "max_eval": option(Whole, "Maximum number of dev and of test examples.", min=1),
    "folds": option(int, "Number of folds of a cross-validation over train, dev and test together.", default=0, min=0),
    "preset": option(Text, "gemma, mini or quick: hyperparameters. Default: depends on the model."),
}
PRESETS = ("gemma", "mini", "quick")
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
UNMASKS, HIDES = "--objective mlm mntp", "--objective mlm mntp hybrid"
LM: Options = {
    "objective": option(str, "mlm, mntp, prefix, hybrid or next.", default=REQUIRED),
    "model": MODEL_NAME,
    "train_file": option(list[str] | None, "Text file or folder; may be repeated. Default: Field Notes."),
    "eval_file": option(list[str] | None, "Text file or folder for evaluation; may be repeated.", needs="--train-file"),
    "max_length": option(Whole, "Tokens per row.", min=2),
    "mask_rate": option(float, "Fraction of the tokens to mask.", default=0.15, needs=HIDES),
    "whole_words": flag("--whole-words", "Mask whole words.", needs=HIDES),
    "window": WINDOW(needs=UNMASKS),
    "layers": LAYERS(needs=UNMASKS),
    "lora": flag("--lora", "Train LoRA adapters, and merge them at the end."),
    "rank": RANK(needs="--lora"),
    "dropout": option(Real, "Dropout probability. Default: that of the model.", min=0, max=0.99),
    "profile": option(Text, "ci, laptop, colab or gpu: steps, batch size and length that you do not give."),
    "attn_implementation": ATTENTION,
}
LM_HELP = """Adapt a language model to text.

Objectives: mlm and mntp make the model bidirectional and predict masked tokens; prefix is bidirectional in a prefix
of each row; hybrid predicts next tokens first and masked tokens after them; next is next-token prediction.

Example: labkit train lm --objective mlm --model gpt2-mini --output-dir encoder --max-steps 500"""
TEXTS = Annotated[list[str], typer.Argument(metavar="TEXTS...", help="Text files, or folders of text files.")]
PRETRAIN: Options = {
    "texts": (TEXTS, REQUIRED, ""),
    "vocab_size": option(int, "Vocabulary size of the byte-level BPE.", default=4096, min=259, max=2**20),
    "context": option(int, "Context length: tokens per row.", default=512, min=2),
    "width": option(int, "Hidden size, a multiple of 64.", default=256, min=64),
    "layers": option(int, "Number of layers.", default=6, min=1, max=1000),
    "dropout": option(float, "Dropout probability.", default=0.1, min=0, max=0.99),
    "held_out": option(float, "Last fraction of each text, held out for validation.", default=0.1, min=0, max=0.99),
    "repeats": option(float, "Initial fraction of rows that repeat a passage.", default=0.0, min=0, max=1),
    "first_length": option(Whole, "Initial length, in tokens, of the pieces of a row.", min=2),
}
PRETRAIN_HELP = """Train a tokenizer and a small GPT-2.

--resume continues an interrupted run.

Example: labkit pretrain my-texts --output-dir my-gpt2 --max-steps 2000"""


def hyperparameters(names: list[str]) -> Options:
    return {name: HYPERPARAMETERS[name][1] for name in names}


def settings(name: str, given: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The preset `name` with the hyperparameters that were given."""
    from labkit.training import preset

    asked = {field: given.get(option) for option, (field, _) in HYPERPARAMETERS.items()}
    return preset(name, **defaults | {field: value for field, value in asked.items() if value is not None})


def chosen(given: dict[str, Any], names: str) -> dict[str, Any]:
    """The options with these names, which are separated by spaces."""
    return {name: given[name] for name in names.split()}


def train_task(task: str, given: dict[str, Any]) -> None:
    from labkit.datasets.splits import sides
    from labkit.tasks.base import get
    from labkit.tasks.finetune import crossvalidate, default_preset, finetune, numbers

    if given["preset"] is not None:
        require_one_of("the preset", given["preset"], PRESETS, LabkitError)
    skipped = {} if given["skip_bad_rows"] else None
    files = chosen(given, "data train_file dev_file test_file max_train max_eval seed")
    train, dev, test = sides(task, **files, tag_column=given.get("tag_column"), skipped=skipped)
    head = {"dropout": given["dropout"], "backbone_dropout": given["backbone_dropout"], "init": given["head_init"]}
    choices = chosen(given, "mask window layers method rank packing resume") | {
        "attn": given["attn_implementation"],
        "head": {name: value for name, value in head.items() if value is not None},
        "skipped": skipped,
        "settings": settings(given["preset"] or default_preset(given["model"]), given),
    }
    where = (get(task, **{name: given[name] for name in OF_TASK[task]}), given["model"])
    if given["folds"]:
        examples = _together(train=train, dev=dev, test=test)
        metrics = crossvalidate(*where, examples, given["output_dir"], k=given["folds"], **choices)
        lines = [f"{task}: {metrics['folds']} folds, n = {metrics['n']:,}; mean and 95 % interval over the folds"]
        for name, score in metrics["scores"].items():
            lines.append(f"  {name.replace('_', ' ')} {score['mean']:.3f} ± {score['half_width_95']:.3f}")
    else:
        metrics = finetune(*where, train, given["output_dir"], dev=dev, test=test, **choices)
        what = f"{task}, {metrics['mask']['measured']}, {metrics['steps']:,} steps, {metrics['seconds']:,.0f} s"
        lines = [f"{given['output_dir']}/model: {what}; best at step {metrics['best_step']:,}"]
        for side, baselines in metrics["baselines"].items():
            lines.append(f"  {side:5} (n = {metrics[f'n_{side}']:,}) {_shown(numbers(metrics[side]))}")
            lines.append(f"        baselines: {_shown(baselines)}")
    report(given["as_json"], metrics, *lines)


def _shown(scores: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:,.3f}" for name, value in scores.items())


def _together(**sides: list[Any]) -> list[Any]:
    """The examples of all sides; ids that two of them share, as numbered rows do, get the side's name."""
    ids = Counter(example.id for side in sides.values() for example in side)
    return [
        example if ids[example.id] == 1 else replace(example, id=f"{name}-{example.id}")
        for name, side in sides.items()
        for example in side
    ]


def train_lm(given: dict[str, Any]) -> None:
    from labkit.datasets.embedded import passages
    from labkit.datasets.text import read_documents
    from labkit.profile import by_name, current
    from labkit.tasks import lm

    if given["epochs"] is not None and given["max_steps"] is not None:
        raise LabkitError("--epochs and --max-steps both set the number of steps; give one of them")
    sizes = by_name(given["profile"], "--profile") if given["profile"] else current()
    defaults = {"per_device_train_batch_size": sizes.batch_size, "weight_decay": 0.01}
    defaults["max_steps"] = sizes.max_steps if given["epochs"] is None else -1
    if given["train_file"]:
        train, dev = (read_documents(files) if files else [] for files in (given["train_file"], given["eval_file"]))
    else:
        train, dev = passages("train"), passages("dev")
    metrics = lm.train_lm(
        given["model"],
        [document.text for document in train],
        given["output_dir"],
        settings=settings("lm", given, **defaults),
        eval_texts=[document.text for document in dev],
        max_length=given["max_length"] or sizes.max_length,
        attn=given["attn_implementation"],
        **chosen(given, "objective mask_rate whole_words window layers lora rank dropout resume"),
    )
    what = f"{given['objective']}, {metrics['steps']:,} steps, {metrics['seconds']:,.0f} s"
    lines = [f"{given['output_dir']}/model: {what}"]
    for state, scores in metrics["scores"].items():
        lines.append(f"  {state:9} {_shown({name: value for name, value in scores.items() if name != 'n'})}")
    report(given["as_json"], metrics, *lines)


def pretrain(given: dict[str, Any]) -> None:
    from labkit import pretrain as pretraining

    metrics = pretraining.pretrain(
        given["texts"],
        given["output_dir"],
        shape=pretraining.Shape(**chosen(given, "vocab_size context width layers dropout")),
        settings=settings("lm", given, learning_rate=1e-3),
        **chosen(given, "held_out repeats first_length resume"),
    )
    what = f"{metrics['parameters'] / 1e6:.1f} M parameters, {metrics['seconds']:,.0f} s"
    scores = [
        f"  {name}: {bits:.3f} bits per byte on the part held out" for name, bits in metrics["bits_per_byte"].items()
    ]
    report(given["as_json"], metrics, f"{given['output_dir']}/model: {what}", *scores)


for _task in OPTIONS:
    _columns = {"tag_column": (TagColumn, None, "")} if _task == "ner" else {}
    _options = OUTPUT | TASK | DATA | _columns | hyperparameters(OF_TASKS) | OF_TASK[_task] | RUN
    add_command(train_app, _task, HELP[_task], _options, partial(train_task, _task))
add_command(train_app, "lm", LM_HELP, OUTPUT | LM | hyperparameters(OF_LM) | RUN, train_lm)
PRETRAINING = PRETRAIN | OUTPUT | hyperparameters(OF_PRETRAINING) | RUN
