"""`labkit bench future-attention` and `labkit bench future-report`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.cli_bench import parts, whole_numbers
from labkit.cli_effect import show
from labkit.cli_train import OutputDir, Resume
from labkit.console import Json


def future_attention(
    output_dir: OutputDir,
    arms: Annotated[str | None, typer.Option(help="Arms from the list above. Default: eleven of them.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of weights, data order and dropout.")] = "0,1,2",
    text: Annotated[
        list[str] | None, typer.Option(help="Text file or folder; may be repeated. Default: Field Notes.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="small (minutes on a CPU) or origin (15 M parameters, for a GPU).")
    ] = "small",
    steps: Annotated[int | None, typer.Option(help="Number of optimiser steps.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per step.", min=1)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate, the same for all arms.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per row.", min=2)] = None,
    width: Annotated[int | None, typer.Option(help="Hidden size.", min=1)] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", min=1)] = None,
    heads: Annotated[
        int | None, typer.Option(help="Number of attention heads, a divisor of the hidden size.", min=1)
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary size of the tokenizer, which is trained on the text.", min=259)
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(help="Weight of auxiliary losses whose name does not set one (mse@1000 does)."),
    ] = None,
    loss_layers: Annotated[str, typer.Option(help="Layers with the auxiliary loss, such as 0,1. Default: all.")] = "",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Compare Future Attention with its controls.

    Trains a small GPT for each arm and seed, and writes the report of labkit bench future-report.

    Arms: baseline (as many parameters), smaller, dropout:0.1, memory, memory:SLOTS, future:LOSS:DIM, tokens:LOSS:DIM,
    shuffled:LOSS:DIM, shuffled-tokens:LOSS:DIM, multi-token:AHEAD. Losses: none, mse, cosine, infonce, kl,
    mse-difference, cosine-difference; mse@1000 sets the weight of the loss to 1000. --resume continues an interrupted
    run; it can also add arms and seeds. Exit code 1 if a run failed.

    Example: labkit bench future-attention --arms baseline,future:cosine:50,memory --output-dir runs/future
    """
    from labkit.bench.future_report import report, written
    from labkit.bench.future_study import PROFILES, Study, run_study
    from labkit.errors import DataError

    if profile not in PROFILES:
        raise DataError(f"there is no profile {profile!r}; there are {', '.join(PROFILES)}")
    if profile == "origin" and not text:
        raise DataError(
            "the profile origin is for millions of tokens: give --text files or folders; labkit ships too little"
        )
    given = {
        "arms": tuple(parts(arms)) if arms else None, "steps": steps, "batch_size": batch_size, "context": context,
        "learning_rate": learning_rate, "width": width, "layers": layers, "heads": heads, "vocab_size": vocab_size,
        "weight": weight, "dtype": dtype, "loss_layers": tuple(whole_numbers("--loss-layers", loss_layers)) or None,
    }  # fmt: skip
    chosen: dict[str, Any] = PROFILES[profile] | {name: value for name, value in given.items() if value is not None}
    study = Study(seeds=tuple(whole_numbers("--seeds", seeds)), texts=tuple(text or ()), **chosen)
    failures = run_study(study, output_dir, resume=resume)
    show(report([output_dir]), Path(output_dir), as_json, written)
    raise typer.Exit(1 if failures else 0)


def future_report(
    folders: Annotated[
        list[str], typer.Argument(metavar="FOLDERS...", help="Output folders of labkit bench future-attention.")
    ],
    output_dir: Annotated[str | None, typer.Option(help="Folder for the report. Default: the first folder.")] = None,
    name: Annotated[str, typer.Option(help="Name of the report files, without ending.")] = "report",
    as_json: Json = False,
) -> None:
    """Write the report of bench future-attention.

    Makes text, a table and figures from the folders of a comparison, which may be unfinished.

    Example: labkit bench future-report runs/future
    """
    from labkit.bench.future_report import report, written

    show(report(folders), Path(output_dir or folders[0]), as_json, written, name)
