"""`labkit bench mask-effect` and `labkit bench report`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.bench.arms import DEFAULT as ARMS
from labkit.cli_bench import parts, whole_numbers
from labkit.cli_train import BatchSize, MaxSteps, OutputDir, Resume
from labkit.console import Json, print_json
from labkit.errors import DataError, TrainingError
from labkit.tasks.qa_frames import ORDERS

DATA = ("ner:field-notes", "ner:which-way-round")


def mask_effect(
    output_dir: OutputDir,
    model: Annotated[str, typer.Option(help="A registered name, a hub id or a local folder.")] = "gpt2-mini",
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="[NAME=]TASK:DATA, where DATA is an embedded data set, a hub name, one file or three; may be repeated."
        ),
    ] = None,
    arms: Annotated[str, typer.Option(help="Arms from the list above.")] = ",".join(ARMS),
    learning_rates: Annotated[
        str, typer.Option(help="Grid of learning rates, the same for all arms.")
    ] = "2e-4,5e-4,1e-3",
    seeds: Annotated[str, typer.Option(help="Seeds of the reported runs.")] = "0,1,2,3,4",
    sizes: Annotated[
        str, typer.Option(help="Numbers of training examples, for a learning curve: 100,300,all.")
    ] = "all",
    orders: Annotated[str, typer.Option(help="Positions of the question (qa).")] = ",".join(ORDERS),
    preset: Annotated[str | None, typer.Option(help="gemma, mini or quick. Default: depends on the model.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training rows.")] = None,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = None,
    gradient_accumulation: Annotated[int | None, typer.Option(help="Forward passes per optimiser step.", min=1)] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between evaluations on the dev set.", min=1)] = None,
    method: Annotated[str, typer.Option(help="full, lora, or frozen (trains only the head).")] = "full",
    rank: Annotated[int, typer.Option(help="Rank of the LoRA adapters.", min=1)] = 16,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    attn_implementation: Annotated[
        str | None, typer.Option(help="Attention backend: eager, sdpa or flex_attention.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens per row. The arm repeated reads twice as many.", min=8)
    ] = None,
    max_train: Annotated[int | None, typer.Option(help="Maximum number of training examples.", min=1)] = None,
    max_eval: Annotated[int | None, typer.Option(help="Maximum number of dev and of test examples.", min=1)] = None,
    adaptation_rate: Annotated[
        float, typer.Option(help="Learning rate of the adaptation before the task (mntp, mlm, next).")
    ] = 5e-4,
    adaptation_batch: Annotated[int, typer.Option(help="Rows per step of the adaptation.", min=1)] = 8,
    jobs: Annotated[
        int, typer.Option(help="Number of parallel runs. They share the cores and take the GPUs in turn.", min=1)
    ] = 1,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Measure the effect of the mask on a task.

    Trains and tests each arm with several seeds, and writes the report of labkit bench report.

    Arms: causal, bidirectional, mntp:STEPS, mlm:STEPS, next:STEPS, repeated, right-to-left, unmask:middle-third,
    unmask:below-1/3, unmask:above-2/3, encoder:MODEL. The learning rate of each arm is chosen on the dev set, from the
    same grid, before the test set is used. --resume continues an interrupted run; it can also add arms and seeds. Exit
    code 1 if a run failed.

    Example: labkit bench mask-effect --data ner:field-notes --arms causal,bidirectional,repeated --output-dir runs/fx
    """
    from labkit.bench.conditions import conditions
    from labkit.bench.effect_report import report, written
    from labkit.bench.mask_effect import Study, run_study
    from labkit.tasks.plans import default_preset
    from labkit.tasks.plans import preset as plan_of

    plan = plan_of(
        preset or default_preset(model), epochs=epochs, max_steps=max_steps, batch_size=batch_size, dtype=dtype,
        gradient_accumulation=gradient_accumulation, evaluate_every=evaluate_every, patience=0,
    )  # fmt: skip
    study = Study(
        model, arms=tuple(_arms(arms)), learning_rates=tuple(_rates(learning_rates)),
        seeds=tuple(whole_numbers("--seeds", seeds)), sizes=tuple(_sizes(sizes)), plan=plan, method=method, rank=rank,
        attn=attn_implementation, max_length=max_length, adaptation_rate=adaptation_rate,
        adaptation_batch=adaptation_batch,
    )  # fmt: skip
    found = conditions(data or DATA, orders=parts(orders), max_train=max_train, max_eval=max_eval)
    failures = run_study(study, found, output_dir, resume=resume, jobs=jobs)
    try:
        made = report([output_dir])
    except TrainingError as error:
        if not failures:
            raise
        print(
            f"labkit: {len(failures)} runs failed, and there is no report yet ({error}); --resume tries them again",
            file=sys.stderr,
        )
    else:
        show(made, Path(output_dir), as_json, written)
    raise typer.Exit(1 if failures else 0)


def report(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="FOLDERS...", help="Output folders of labkit bench mask-effect, or report.json files."),
    ],
    output_dir: Annotated[
        str | None, typer.Option(help="Folder for the report. Default: the first of FOLDERS.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the report files, without ending.")] = "report",
    as_json: Json = False,
) -> None:
    """Write the report of bench mask-effect.

    Makes text, a table and figures from the folders of a comparison, which may be unfinished. The report.json of
    another machine can be one of FOLDERS: its conditions are included.

    Example: labkit bench report runs/fx report-of-the-gpu.json --output-dir runs/all
    """
    from labkit.bench.effect_report import report as made
    from labkit.bench.effect_report import written

    if output_dir is None and not Path(folders[0]).expanduser().is_dir():
        raise DataError(f"{folders[0]} is no folder: say with --output-dir where the report is to be written")
    show(made(folders), Path(output_dir or folders[0]), as_json, written, name)


def show(found: Any, folder: Path, as_json: bool, written: Any, name: str = "report") -> None:
    """Write a report with `written`, and print it: as Markdown with the names of its files, or as JSON."""
    files = written(found, folder, name)
    if as_json:
        print_json(found)
    else:
        print(files[0].read_text(encoding="utf-8"))
        print(", ".join(str(each) for each in files))


def _arms(text: str) -> list[str]:
    """causal,unmask:0,1 as ["causal", "unmask:0,1"]: a number goes on with the arm before it."""
    found: list[str] = []
    for part in parts(text):
        if part.isdecimal() and found and found[-1].startswith("unmask:"):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in parts(text)]
    except ValueError:
        raise DataError(f"--learning-rates is {text!r}; give numbers such as 2e-4,5e-4") from None


def _sizes(text: str) -> list[int | None]:
    return [None if part == "all" else whole_numbers("--sizes", part)[0] for part in parts(text)]
