"""The commands that measure this machine: `labkit bench ...`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from labkit.cli_train import OutputDir, Resume
from labkit.console import Json, print_json, print_table
from labkit.errors import TrainingError

bench_app = typer.Typer(help="Measure costs and compare methods.")


@bench_app.command("cost")
def cost(
    output_dir: OutputDir,
    models: Annotated[
        str,
        typer.Option(help="Registered names, hub ids, folders, or random:gemma-2-2b, random:gemma-2-9b, random:gpt2."),
    ] = "",
    batch_sizes: Annotated[str, typer.Option(help="Rows per step.")] = "",
    lengths: Annotated[str, typer.Option(help="Tokens per row.")] = "",
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16.")] = "",
    attn: Annotated[
        str,
        typer.Option(help="Attention backends: eager, sdpa, flex_attention, ..., or default (the choice of labkit)."),
    ] = "",
    method: Annotated[
        str | None,
        typer.Option(help="full or lora. Default: lora for models known to have over 4 billion weights, else full."),
    ] = None,
    mask: Annotated[str, typer.Option(help="bidirectional or causal.")] = "bidirectional",
    steps: Annotated[
        int,
        typer.Option(
            help="Number of timed steps. With an even number, labkit and plain transformers go first equally often.",
            min=1,
        ),
    ] = 6,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Measure the cost of a training step.

    Measures speed, peak memory and model FLOPs utilisation, next to the same step in plain transformers. Lists are
    separated by commas. A row that cannot be measured reports the reason; exit code 1 if no row could be measured. By
    default, a CPU measures gpt2-mini in a few minutes; a GPU measures the shapes of Gemma 2 2B and 9B, with random
    weights, at 512 and 1024 tokens.

    Example: labkit bench cost --models gpt2-mini,gemma3-270m --lengths 128,512 --output-dir runs/cost
    """
    from labkit.bench import cost as bench
    from labkit.bench import cost_report

    found = bench.cost(
        output_dir,
        models=parts(models),
        batch_sizes=whole_numbers("--batch-sizes", batch_sizes),
        lengths=whole_numbers("--lengths", lengths),
        dtypes=parts(dtypes),
        attn=parts(attn),
        method=method,
        mask=mask,
        steps=steps,
        device=device,
        resume=resume,
    )
    measured = [row for row in found["rows"] if row["reason"] is None]
    if as_json:
        print_json(found)
    else:
        if measured:
            print_table(cost_report.COLUMNS, [cost_report.cells(row) for row in measured])
        for row in found["rows"]:
            if row["reason"] is not None:
                print(f"{row['model']}, {row['batch_size']} x {row['length']}, {row['dtype']}: {row['reason']}")
        print(f"{output_dir}: cost.md, cost.svg, cost.json")
    raise typer.Exit(0 if measured else 1)


def parts(text: str) -> list[str]:
    """a,b as ["a", "b"]"""
    return [part.strip() for part in text.split(",") if part.strip()]


def whole_numbers(option: str, text: str) -> list[int]:
    """128,512 as [128, 512]. Raises TrainingError, naming the option, for anything else."""
    given = parts(text)
    if wrong := [part for part in given if not re.fullmatch(r"-?\d+", part, re.ASCII)]:
        raise TrainingError(f"{option} is {text!r}, and {wrong[0]!r} is no whole number; give numbers such as 128,512")
    return [int(part) for part in given]
