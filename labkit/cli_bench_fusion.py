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
    model: Annotated[str, typer.Option(help="Registered names, hub ids or folders, with commas between.")],
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="[NAME=]known-facts, webqa:FILE, lama:FOLDER, or a file; may be repeated."),
    ] = None,
    pairs: Annotated[str | None, typer.Option(help="The folder of pairs, where lama:FOLDER holds none.")] = None,
    methods: Annotated[
        str, typer.Option(help="As for labkit fuse; single is always asked.")
    ] = "single,concat,fuse,logit-average",
    num_paraphrases: Annotated[str, typer.Option(help="The N; of 1 all methods are single.")] = "1,2,5",
    few_methods: Annotated[str, typer.Option(help="Dear ones, asked fewer questions.")] = "",
    few_questions: Annotated[int, typer.Option(help="So many, among those of the others.", min=1)] = 150,
    repeat_control: Annotated[
        bool, typer.Option("--repeat-control", help="Also one paraphrase, as often as the largest N: more text.")
    ] = False,
    at_least: Annotated[
        int | None, typer.Option(help="Only questions with so many paraphrases; by default the largest N.", min=1)
    ] = None,
    few_shot: Annotated[int, typer.Option(help="Answered examples before each question.", min=0)] = 5,
    max_questions: Annotated[int | None, typer.Option(help="A draw of so many; all by default.", min=1)] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.", min=1)] = 12,
    lemmatize: Annotated[bool, typer.Option("--lemmatize", help="Count an answer in another form too.")] = False,
    lemmatizer: Annotated[str | None, typer.Option(help="simplemma, or spacy:MODEL; implies --lemmatize.")] = None,
    engine: Annotated[str, typer.Option(help="fast, reference, dense or cacheless: the same answers.")] = "fast",
    device: Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu or cuda.")] = "auto",
    dtype: Dtype = None,
    batch_size: Annotated[int, typer.Option(help="Questions at once.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Of the draws of examples, questions, and the order of paraphrases.")] = 0,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """How good the fusion methods are on the same questions, against single prompts; then the report of fusion-report.

    What a method is compared with is the mean of the single prompts it is made of, and logit averaging. The paraphrases
    of each question stand in an order drawn for it. Intervals draw relations where there are any, and then questions.
    Killed at any moment it goes on with --resume, which may also add models, sets, methods and N up to --at-least. Exit
    code 1 if a part failed.

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
    folders: Annotated[list[str], typer.Argument(metavar="FOLDERS...", help="Of labkit bench fusion.")],
    output_dir: Annotated[str | None, typer.Option(help="Where to write; by default the first folder.")] = None,
    name: Annotated[str, typer.Option(help="Of the files that are written.")] = "report",
    as_json: Json = False,
) -> None:
    """Words, tables and figures, from the folders of a comparison alone; of an unfinished one too.

    Example: labkit bench fusion-report runs/fusion
    """
    from labkit.bench.fusion_report import report, written

    found: Any = report(folders)
    show(found, Path(output_dir or folders[0]), as_json, written, name)
