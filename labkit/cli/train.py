"""The commands that train: `labkit pretrain` and `labkit train ...`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from labkit.cli.console import REQUIRED, Json, Options, Real, Text, Whole, add_command, flag, option, print_json
from labkit.errors import DataError, LabkitError

train_app = typer.Typer(help="Train a model on a task or on text.")

OutputDir = Annotated[str, typer.Option(help="Folder of the run. It must not contain another run.")]
MaxSteps = Annotated[int | None, typer.Option(help="Number of optimiser steps.", min=1)]
BatchSize = Annotated[int | None, typer.Option(help="Rows per device in one forward pass.", min=1)]
Accumulation = Annotated[int, typer.Option(help="Forward passes per optimiser step.", min=1)]
Checkpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Needs less memory, is about a third slower.")
]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.")]
Warmup = Annotated[float, typer.Option(help="Fraction of the steps for warm-up.", min=0, max=0.99)]
TrainDtype = Annotated[str, typer.Option(help="auto (depends on GPU and model), float32, bfloat16 or float16.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, data order and dropout.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --output-dir.")]
ReportTo = Annotated[str, typer.Option(help="Experiment tracker that transformers supports, or none.")]
SETTINGS = (
    "max_steps", "batch_size", "gradient_accumulation", "gradient_checkpointing", "learning_rate", "warmup", "dtype",
    "seed", "report_to",
)  # fmt: skip
PRETRAIN: Options = {
    "texts": (
        Annotated[list[str], typer.Argument(metavar="TEXTS...", help="Text files, or folders of text files.")],
        REQUIRED,
    ),
    "output_dir": (OutputDir, REQUIRED),
    "max_steps": (MaxSteps, 2000),
    "batch_size": (BatchSize, 8),
    "gradient_accumulation": (Accumulation, 1),
    "gradient_checkpointing": (Checkpointing, False),
    "learning_rate": (LearningRate, 1e-3),
    "warmup": (Warmup, 0.05),
    "vocab_size": option(int, "Vocabulary size of the byte-level BPE.", default=4096, max=2**20),
    "context": option(int, "Context length: tokens per row.", default=512, min=2),
    "width": option(int, "Hidden size, a multiple of 64.", default=256, min=64),
    "layers": option(int, "Number of layers.", default=6, min=1, max=1000),
    "dropout": option(float, "Dropout probability.", default=0.1, min=0, max=0.99),
    "held_out": option(float, "Last fraction of each text, held out for validation.", default=0.1, min=0, max=0.99),
    "repeats": option(float, "Initial fraction of rows that repeat a passage.", default=0.0, min=0, max=1),
    "first_length": option(Whole, "Initial length, in tokens, of the pieces of a row.", min=2),
    "dtype": (TrainDtype, "auto"),
    "evaluate_every": option(int, "Steps between evaluations; 0 is a tenth of the run.", default=0, min=0),
    "save_every": option(int, "Steps between checkpoints; 0 is a tenth of the run.", default=0, min=0),
    "seed": (Seed, 0),
    "resume": (Resume, False),
    "report_to": (ReportTo, "none"),
    "as_json": (Json, False),
}
PRETRAIN_HELP = """Train a tokenizer and a small GPT-2.

--resume continues an interrupted run.

Example: labkit pretrain my-texts --output-dir my-gpt2 --max-steps 2000"""
LM: Options = {
    "output_dir": (OutputDir, REQUIRED),
    "objective": option(str, "mlm, mntp, prefix, hybrid or next.", default=REQUIRED),
    "model": option(str, "A registered name, a hub id or a local folder.", default="gpt2-mini"),
    "train_file": option(list[str] | None, "Text file or folder; may be repeated. Default: Field Notes."),
    "eval_file": option(list[str] | None, "Text file or folder for evaluation; may be repeated."),
    "epochs": option(Real, "Passes over the text, instead of --max-steps."),
    "max_steps": (MaxSteps, None),
    "batch_size": (BatchSize, None),
    "gradient_accumulation": (Accumulation, 1),
    "gradient_checkpointing": (Checkpointing, False),
    "learning_rate": (LearningRate, 5e-4),
    "warmup": (Warmup, 0.05),
    "max_length": option(Whole, "Tokens per row.", min=2),
    "mask_rate": option(float, "Fraction of the tokens to mask.", default=0.15),
    "whole_words": flag("--whole-words", "Mask whole words."),
    "window": option(str, "Window of unmasked local layers: keep, halve or global.", default="keep"),
    "layers": option(str, "Layers to unmask: all, middle-third, or 0,1,2.", default="all"),
    "lora": flag("--lora", "Train LoRA adapters, and merge them at the end."),
    "dropout": option(Real, "Dropout probability. Default: that of the model.", min=0, max=0.99),
    "dtype": (TrainDtype, "auto"),
    "attn_implementation": option(Text, "Attention backend: eager or sdpa."),
    "seed": (Seed, 0),
    "resume": (Resume, False),
    "report_to": (ReportTo, "none"),
    "profile": option(Text, "ci, laptop, colab or gpu: steps, batch size and length that you do not give."),
    "as_json": (Json, False),
}
LM_HELP = """Adapt a language model to text.

Objectives: mlm and mntp make the model bidirectional and predict masked tokens; prefix is bidirectional in a prefix
of each row; hybrid predicts next tokens first and masked tokens after them; next is next-token prediction.

Example: labkit train lm --objective mlm --model gpt2-mini --output-dir encoder --max-steps 500"""


def pretrain(given: dict[str, Any]) -> None:
    from labkit import pretrain as pretraining
    from labkit.training import Settings

    shape = pretraining.Shape(*(given[name] for name in ("vocab_size", "context", "width", "layers", "dropout")))
    settings = Settings(**{name: given[name] for name in (*SETTINGS, "evaluate_every", "save_every")})
    choices = {name: given[name] for name in ("held_out", "repeats", "first_length", "resume")}
    metrics = pretraining.pretrain(given["texts"], given["output_dir"], shape=shape, settings=settings, **choices)
    if given["as_json"]:
        print_json(metrics)
        return
    print(f"{given['output_dir']}/model: {metrics['parameters'] / 1e6:.1f} M parameters, {metrics['seconds']:,.0f} s")
    for name, bits in metrics["bits_per_byte"].items():
        print(f"  {name}: {bits:.3f} bits per byte on the part held out")


def train_lm(given: dict[str, Any]) -> None:
    from labkit.profile import by_name, current
    from labkit.tasks import lm
    from labkit.training import Settings

    sizes = by_name(given["profile"]) if given["profile"] else current()
    train_texts, eval_texts = _texts(given["train_file"], given["eval_file"])
    batch_size, max_length = given["batch_size"] or sizes.batch_size, given["max_length"] or sizes.max_length
    max_steps, model, output_dir = given["max_steps"], given["model"], given["output_dir"]
    if given["epochs"] is not None:
        if max_steps is not None:
            raise LabkitError("--epochs and --max-steps say the same thing twice; give one of them")
        rows = batch_size * given["gradient_accumulation"]
        max_steps = lm.steps_of(model, train_texts, max_length, rows, given["epochs"])
    settings = {name: given[name] for name in SETTINGS} | {"weight_decay": 0.01}
    settings |= {"max_steps": max_steps or sizes.max_steps, "batch_size": batch_size}
    kept = ("objective", "mask_rate", "whole_words", "window", "layers", "lora", "dropout", "resume")
    metrics = lm.train_lm(
        model,
        train_texts,
        output_dir,
        settings=Settings(**settings),
        eval_texts=eval_texts,
        max_length=max_length,
        attn=given["attn_implementation"],
        **{name: given[name] for name in kept},
    )
    if given["as_json"]:
        print_json(metrics)
        return
    print(f"{output_dir}/model: {given['objective']}, {metrics['steps']:,} steps, {metrics['seconds']:,.0f} s")
    for state, scores in metrics["scores"].items():
        shown = (f"{name.replace('_', ' ')} {value:,.3f}" for name, value in scores.items() if name != "n")
        print(f"  {state:9} {', '.join(shown)}")


add_command(train_app, "lm", LM_HELP, LM, train_lm)


def _texts(train_file: list[str] | None, eval_file: list[str] | None) -> tuple[list[str], list[str]]:
    from labkit.datasets.text import read_documents

    def read(paths: Any) -> list[str]:
        return [document.text for document in read_documents(paths)]

    if train_file:
        return read(train_file), read(eval_file) if eval_file else []
    if eval_file:
        raise DataError("--eval-file without --train-file: give both, or neither to train on Field Notes")
    from labkit.datasets.field_notes import passages

    return [p.text for p in passages("train")], [p.text for p in passages("dev")]
