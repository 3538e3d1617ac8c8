"""The commands that train: `labkit pretrain` and `labkit train ...`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from labkit.console import Json, print_json
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
Profile = Annotated[
    str | None, typer.Option(help="ci, laptop, colab or gpu: steps, batch size and length that you do not give.")
]


def pretrain(
    texts: Annotated[list[str], typer.Argument(metavar="TEXTS...", help="Text files, or folders of text files.")],
    output_dir: OutputDir,
    max_steps: MaxSteps = 2000,
    batch_size: BatchSize = 8,
    gradient_accumulation: Accumulation = 1,
    gradient_checkpointing: Checkpointing = False,
    learning_rate: LearningRate = 1e-3,
    warmup: Warmup = 0.05,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size of the byte-level BPE.", max=2**20)] = 4096,
    context: Annotated[int, typer.Option(help="Context length: tokens per row.", min=2)] = 512,
    width: Annotated[int, typer.Option(help="Hidden size, a multiple of 64.", min=64)] = 256,
    layers: Annotated[int, typer.Option(help="Number of layers.", min=1, max=1000)] = 6,
    dropout: Annotated[float, typer.Option(help="Dropout probability.", min=0, max=0.99)] = 0.1,
    held_out: Annotated[
        float, typer.Option(help="Last fraction of each text, held out for validation.", min=0, max=0.99)
    ] = 0.1,
    repeats: Annotated[float, typer.Option(help="Initial fraction of rows that repeat a passage.", min=0, max=1)] = 0.0,
    first_length: Annotated[
        int | None, typer.Option(help="Initial length, in tokens, of the pieces of a row.", min=2)
    ] = None,
    dtype: TrainDtype = "auto",
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations; 0 is a tenth of the run.", min=0)] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0 is a tenth of the run.", min=0)] = 0,
    seed: Seed = 0,
    resume: Resume = False,
    report_to: ReportTo = "none",
    as_json: Json = False,
) -> None:
    """Train a tokenizer and a small GPT-2.

    --resume continues an interrupted run.

    Example: labkit pretrain my-texts --output-dir my-gpt2 --max-steps 2000
    """
    from labkit import pretraining
    from labkit.training import Settings

    metrics = pretraining.pretrain(
        texts,
        output_dir,
        shape=pretraining.Shape(vocab_size, context, width, layers, dropout),
        settings=Settings(
            max_steps=max_steps, batch_size=batch_size, gradient_accumulation=gradient_accumulation,
            learning_rate=learning_rate, warmup=warmup, dtype=dtype, seed=seed, evaluate_every=evaluate_every,
            save_every=save_every, report_to=report_to, gradient_checkpointing=gradient_checkpointing,
        ),
        held_out=held_out,
        repeats=repeats,
        first_length=first_length,
        resume=resume,
    )  # fmt: skip
    if as_json:
        print_json(metrics)
        return
    print(f"{output_dir}/model: {metrics['parameters'] / 1e6:.1f} M parameters, {metrics['seconds']:,.0f} s")
    for name, bits in metrics["bits_per_byte"].items():
        print(f"  {name}: {bits:.3f} bits per byte on the part held out")


@train_app.command("lm")
def train_lm(
    output_dir: OutputDir,
    objective: Annotated[str, typer.Option(help="mlm, mntp, prefix, hybrid or next.")],
    model: Annotated[str, typer.Option(help="A registered name, a hub id or a local folder.")] = "gpt2-mini",
    train_file: Annotated[
        list[str] | None, typer.Option(help="Text file or folder; may be repeated. Default: Field Notes.")
    ] = None,
    eval_file: Annotated[
        list[str] | None, typer.Option(help="Text file or folder for evaluation; may be repeated.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the text, instead of --max-steps.")] = None,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = None,
    gradient_accumulation: Accumulation = 1,
    gradient_checkpointing: Checkpointing = False,
    learning_rate: LearningRate = 5e-4,
    warmup: Warmup = 0.05,
    max_length: Annotated[int | None, typer.Option(help="Tokens per row.", min=2)] = None,
    mask_rate: Annotated[float, typer.Option(help="Fraction of the tokens to mask.")] = 0.15,
    whole_words: Annotated[bool, typer.Option("--whole-words", help="Mask whole words.")] = False,
    window: Annotated[str, typer.Option(help="Window of unmasked local layers: keep, halve or global.")] = "keep",
    layers: Annotated[str, typer.Option(help="Layers to unmask: all, middle-third, or 0,1,2.")] = "all",
    lora: Annotated[bool, typer.Option("--lora", help="Train LoRA adapters, and merge them at the end.")] = False,
    dropout: Annotated[
        float | None, typer.Option(help="Dropout probability. Default: that of the model.", min=0, max=0.99)
    ] = None,
    dtype: TrainDtype = "auto",
    attn_implementation: Annotated[str | None, typer.Option(help="Attention backend: eager or sdpa.")] = None,
    seed: Seed = 0,
    resume: Resume = False,
    report_to: ReportTo = "none",
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Adapt a language model to text.

    Objectives: mlm and mntp make the model bidirectional and predict masked tokens; prefix is bidirectional in a prefix
    of each row; hybrid predicts next tokens first and masked tokens after them; next is next-token prediction.

    Example: labkit train lm --objective mlm --model gpt2-mini --output-dir encoder --max-steps 500
    """
    from labkit.profile import by_name, current
    from labkit.tasks import lm
    from labkit.training import Settings

    sizes = by_name(profile) if profile else current()
    train_texts, eval_texts = _texts(train_file, eval_file)
    batch_size, max_length = batch_size or sizes.batch_size, max_length or sizes.max_length
    if epochs is not None and max_steps is not None:
        raise LabkitError("--epochs and --max-steps say the same thing twice; give one of them")
    if epochs is not None:
        max_steps = lm.steps_of(model, train_texts, max_length, batch_size * gradient_accumulation, epochs)
    metrics = lm.train_lm(
        model,
        train_texts,
        output_dir,
        objective=objective,
        settings=Settings(
            max_steps=max_steps or sizes.max_steps, batch_size=batch_size, gradient_accumulation=gradient_accumulation,
            learning_rate=learning_rate, warmup=warmup, weight_decay=0.01, dtype=dtype, seed=seed, report_to=report_to,
            gradient_checkpointing=gradient_checkpointing,
        ),
        eval_texts=eval_texts,
        max_length=max_length,
        mask_rate=mask_rate,
        whole_words=whole_words,
        window=window,
        layers=layers,
        lora=lora,
        dropout=dropout,
        attn=attn_implementation,
        resume=resume,
    )  # fmt: skip
    if as_json:
        print_json(metrics)
        return
    print(f"{output_dir}/model: {objective}, {metrics['steps']:,} steps, {metrics['seconds']:,.0f} s")
    for state, scores in metrics["scores"].items():
        shown = (f"{name.replace('_', ' ')} {value:,.3f}" for name, value in scores.items() if name != "n")
        print(f"  {state:9} {', '.join(shown)}")


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
