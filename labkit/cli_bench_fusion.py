"""`labkit bench fusion` and `labkit bench fusion-report`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.cli_bench import parts, whole_numbers
from labkit.cli_effect import show
from labkit.cli_fuse import LEMMATIZER
from labkit.cli_train import OutputDir, Resume
from labkit.console import Dtype, Json


def fusion(
    output_dir: OutputDir,
    model: Annotated[str, typer.Option(help="Registered names, hub ids or folders, separated by commas.")],
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="[NAME=]known-facts, webqa:FILE, lama:FOLDER, or a file; may be repeated."),
    ] = None,
    pairs: Annotated[
        str | None, typer.Option(help="Folder of subject-object pairs, if lama:FOLDER contains none.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods of labkit fuse; single is always included.")
    ] = "single,concat,fuse,logit-average",
    num_paraphrases: Annotated[str, typer.Option(help="Values of N; with N = 1 every method equals single.")] = "1,2,5",
    few_methods: Annotated[str, typer.Option(help="Slow methods, which answer only --few-questions.")] = "",
    few_questions: Annotated[int, typer.Option(help="Number of questions for --few-methods.", min=1)] = 150,
    repeat_control: Annotated[
        bool, typer.Option("--repeat-control", help="Control: also read one paraphrase as often as the largest N.")
    ] = False,
    at_least: Annotated[
        int | None,
        typer.Option(help="Use only questions with at least this many paraphrases. Default: the largest N.", min=1),
    ] = None,
    few_shot: Annotated[int, typer.Option(help="Number of answered examples in the prompt.", min=0)] = 5,
    max_questions: Annotated[
        int | None, typer.Option(help="Size of a random sample of the questions. Default: all.", min=1)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of an answer.", min=1)] = 12,
    lemmatize: Annotated[
        bool, typer.Option("--lemmatize", help="Also count an answer that matches after lemmatisation.")
    ] = False,
    lemmatizer: Annotated[str | None, typer.Option(help="simplemma or spacy:MODEL; implies --lemmatize.")] = None,
    engine: Annotated[
        str, typer.Option(help="fast, reference, dense or cacheless: they give the same answers.")
    ] = "fast",
    device: Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu or cuda.")] = "auto",
    dtype: Dtype = None,
    batch_size: Annotated[int, typer.Option(help="Questions per batch.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Seed for drawing examples, questions and the order of paraphrases.")] = 0,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Compare fusion methods on the same questions.

    Each method is compared with the mean of its single prompts and with logit averaging. The command also writes the
    report of labkit bench fusion-report. The order of the paraphrases is random for each question. The confidence
    intervals resample relations, if the set has them, and then questions. --resume continues an interrupted run; it can
    also add models, data sets, methods, and values of N up to --at-least. Exit code 1 if a part failed.

    Example: labkit bench fusion --model gemma3-270m --num-paraphrases 1,2,5 --repeat-control --output-dir runs/fusion
    """
    from labkit.bench.fusion_quality import Study, data_named, run_study
    from labkit.bench.fusion_report import report, written
    from labkit.datasets.paraphrases import KNOWN_FACTS

    study = Study(
        tuple(parts(model)), tuple(data_named(each, pairs) for each in dataset or [KNOWN_FACTS]),
        methods=tuple(parts(methods)), num_paraphrases=tuple(whole_numbers("--num-paraphrases", num_paraphrases)),
        few_methods=tuple(parts(few_methods)), few_questions=few_questions, repeat_control=repeat_control,
        at_least=at_least, few_shot=few_shot, max_questions=max_questions, max_new_tokens=max_new_tokens,
        batch_size=batch_size, engine=engine, device=device, dtype=dtype, seed=seed,
        lemmatizer=lemmatizer or (LEMMATIZER if lemmatize else None),
    )  # fmt: skip
    failures = run_study(study, output_dir, resume=resume)
    show(report([output_dir]), Path(output_dir), as_json, written)
    raise typer.Exit(1 if failures else 0)


def fusion_report(
    folders: Annotated[list[str], typer.Argument(metavar="FOLDERS...", help="Output folders of labkit bench fusion.")],
    output_dir: Annotated[str | None, typer.Option(help="Folder for the report. Default: the first folder.")] = None,
    name: Annotated[str, typer.Option(help="Name of the report files, without ending.")] = "report",
    as_json: Json = False,
) -> None:
    """Write the report of bench fusion.

    Makes text, tables and figures from the folders of a comparison, which may be unfinished.

    Example: labkit bench fusion-report runs/fusion
    """
    from labkit.bench.fusion_report import report, written

    found: Any = report(folders)
    show(found, Path(output_dir or folders[0]), as_json, written, name)
