"""`labkit fuse`: answer questions from several paraphrases each, score what was answered, prove the engine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from labkit.cli.console import (
    Dtype,
    Json,
    Options,
    Text,
    Whole,
    aside,
    flag,
    option,
    parts,
    print_json,
    print_table,
    waiting,
    whole_numbers,
)
from labkit.errors import DataError

RESCORING = {"rescore", "compare", "lemmatize", "lemmatizer", "output", "as_json"}
PROVING = {"prove", "model", "engine", "device", "dtype", "as_json"}
INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended


OPTIONS: Options = {
    "dataset": option(
        str, "known-facts, webqa:FILE, lama:FOLDER, or a .jsonl, .json or .csv file.", default="known-facts"
    ),
    "pairs": option(Text, "Folder of subject-object pairs, if lama:FOLDER contains none."),
    "model": option(Text, "A registered name, a hub id or a local folder."),
    "method": option(str, "One of the methods above.", default="fuse"),
    "engine": option(str, "fast, reference, dense or cacheless: they give the same answers.", default="fast"),
    "num_paraphrases": option(Whole, "Use the first N paraphrases of each question. Default: all.", min=1),
    "indexes": option(Text, "Use the paraphrases at these positions, from 0, instead: 0,2,4."),
    "repeat": option(Whole, "Control: read the first chosen paraphrase this many times.", min=1),
    "at_least": option(Whole, "Leave out questions with fewer paraphrases. Default: as many as are used.", min=1),
    "weights": option(Text, "For --method weighted: one weight per paraphrase, such as 2,1,1."),
    "layer": option(Whole, "For --method hidden-average: layer number, from 0. Default: the middle layer."),
    "few_shot": option(int, "Number of answered examples in the prompt.", default=5, min=0),
    "few_shot_from_data": flag(
        "--few-shot-from-data", "Draw the examples from the data set itself, and leave them out of the questions."
    ),
    "max_questions": option(Whole, "Size of a random sample of the questions. Default: all.", min=1),
    "max_new_tokens": option(int, "Maximum number of tokens of an answer.", default=12, min=1),
    "stop": option(
        list[str] | None,
        "Text that ends an answer, \\n for a line break; may be repeated. Default: the end of the first line.",
    ),
    "lemmatize": flag("--lemmatize", "Also count an answer that matches after lemmatisation."),
    "lemmatizer": option(Text, "simplemma or spacy:MODEL; implies --lemmatize."),
    "device": option(str, "auto (the GPU if there is one), cpu or cuda.", default="auto"),
    "dtype": (Dtype, None),
    "batch_size": option(int, "Questions per batch.", default=16, min=1),
    "seed": option(int, "Seed for drawing examples and questions.", default=0),
    "output": option(
        Text, "Feather file; - is standard output. Default: a file in runs/fuse that is named after the settings."
    ),
    "resume": flag("--resume", "Continue the run in --output."),
    "rescore": option(Text, "Score the answers in this file, without a model.", metavar="FILE"),
    "compare": option(Text, "With --rescore: compare with the answers in this file.", metavar="FILE"),
    "prove": flag("--prove", "Prove on --model that the engine is correct."),
    "as_json": (Json, False),
}
HELP = """Answer a question from several paraphrases.

With the default method the paraphrases do not attend to each other, and the answer attends to all of them.

Methods: single, concat, isolate, isolate+restart, fuse (default: isolate+restart with weights of 1/N), weighted,
logit-average, logit-max, hidden-average, confidence-average, confidence-max, majority-vote.

All questions share one prefix of few-shot examples, drawn with --seed. For known-facts and for your own file, the
examples come from a separate set of facts; for other sets they come from all relations of the set and are left out
of the questions. Questions with too few paraphrases are left out and counted. Rows without an answer are answered
but not scored. --resume continues an interrupted run.

--rescore FILE [--lemmatize] [--compare OTHER] [--output COPY] scores stored answers; FILE does not change. --prove
computes in float32 by default, whatever the dtype of the stored weights; the exit code is 1 if a proof fails.

Example: labkit fuse --model gemma3-270m --method fuse --num-paraphrases 5"""
SAME = (  # options that are settings of the run, unchanged
    "dataset", "model", "method", "engine", "num_paraphrases", "repeat", "at_least", "layer", "few_shot", "seed",
    "max_questions", "max_new_tokens", "batch_size", "device", "dtype", "pairs",
)  # fmt: skip


def fuse(given: dict[str, Any]) -> None:
    lemmatizer = given["lemmatizer"] or ("simplemma" if given["lemmatize"] else None)
    if given["rescore"] is not None:
        _require_only(given, RESCORING, "--rescore")
        _rescore(given["rescore"], given["compare"], lemmatizer, given["output"], given["as_json"])
    elif given["compare"] is not None:
        raise DataError("--compare needs --rescore FILE, the other file of answers")
    elif given["model"] is None:
        raise DataError("--model is missing; give a registered name, a hub id or a local folder")
    elif given["prove"]:
        _require_only(given, PROVING, "--prove")
        _prove(given["model"], given["engine"], given["device"], given["dtype"], given["as_json"])
    else:
        _run(given, lemmatizer)


def _run(given: dict[str, Any], lemmatizer: str | None) -> None:
    from labkit.fusion.few_shot import examples_for
    from labkit.fusion.runs import Settings, default_output, journal_of, read_journal, run

    settings = Settings(
        indexes=None if given["indexes"] is None else tuple(whole_numbers("--indexes", given["indexes"])),
        weights=None if given["weights"] is None else _weights(given["weights"]),
        stop=tuple(text.replace("\\n", "\n") for text in given["stop"] or ()),
        lemmatizer=lemmatizer,
        examples=None if given["few_shot_from_data"] else examples_for(given["dataset"]),
        **{name: given[name] for name in SAME},
    )
    output = given["output"] or str(default_output(settings))
    try:
        answers = run(settings, output, resume=given["resume"], unanswered=True)
    except KeyboardInterrupt:
        kept, journal = len(read_journal(journal_of(output))[1]), journal_of(output)
        message = f"{kept:,} answers are in {journal}: continue with --resume" if kept else "nothing was written"
        print(f"labkit: interrupted; {message}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    about = answers.about
    source = "known facts" if settings.examples else settings.dataset
    notes = {
        f"questions were taken out, because they are few-shot examples from {source} or share a text with one": (
            about["taken_out"]
        ),
        "questions have too few paraphrases and were left out": about["left_out"],
        "questions have paraphrases made by templates, which differ less than natural ones": (
            about["questions"] - about["natural"]
        ),
    }
    for note, count in notes.items():
        if count:
            print(f"labkit: {count:,} {note}", file=sys.stderr)
    with aside(output):
        _show(answers, lemmatizer is not None, given["as_json"])


def _rescore(path: str, other: str | None, lemmatizer: str | None, output: str | None, as_json: bool) -> None:
    from labkit.files import is_standard_output
    from labkit.fusion.answers import comparison, judged, read_answers, write_answers
    from labkit.fusion.scores import load_lemmatizer

    lemmas = load_lemmatizer(lemmatizer) if lemmatizer else None
    answers = judged(read_answers(path), lemmas)
    compared = comparison(answers, judged(read_answers(other), lemmas), lemmas is not None) if other else {}
    if output is not None:
        if Path(output).expanduser().is_file() and not is_standard_output(output):
            raise DataError(f"{output} exists already; give another --output")
        write_answers(answers, output)
    with aside(output):
        _show(answers, lemmas is not None, as_json, other, compared)


def _prove(model: str, engine: str, device: str, dtype: str | None, as_json: bool) -> None:
    from labkit.fusion.generation import make_engine, require_engine
    from labkit.fusion.proofs import prove
    from labkit.fusion.runs import device_named
    from labkit.models import load

    require_engine(engine)
    lm = load(model, dtype=dtype or "float32", device=device_named(device))
    with waiting(f"proving {engine} on {model}"):
        proofs = prove(lm, lambda *read: make_engine(engine, *read))
    if not proofs.strict:
        print(f"labkit: in {dtype} this is no proof, because correct engines differ too much too", file=sys.stderr)
    if as_json:
        print_json(asdict(proofs) | {"holds": proofs.holds})
    else:
        print(proofs)
    raise typer.Exit(0 if proofs.holds else 1)


def _show(answers: Any, lemmatised: bool, as_json: bool, other: str | None = None, compared: Any = None) -> None:
    """The scores of a file as a table or as JSON: exact match and, if it was requested, lemmatised."""
    from labkit.fusion.answers import summary

    scores = {"exact": summary(answers)} | ({"lemmatised": summary(answers, True)} if lemmatised else {})
    if as_json:
        about = {name: value for name, value in answers.about.items() if name != "prefix"}
        print_json({"file": str(answers.path), "scores": scores, "compared_with": other, **(compared or {}), **about})
        return
    settings = answers.about.get("settings")
    engines = ", ".join(sorted({row["engine"] for row in answers.rows if row.get("engine")}))
    how = f"{settings['method']} ({engines}), {settings['model']} on {settings['dataset']}" if settings else "unknown"
    print(f"{answers.path}: {how}")
    columns = [_estimates(score) for score in scores.values()]
    if columns[0]:
        header = ("", "n", *(part for kind in scores for part in (f"accuracy, {kind}", "95 % interval")))
        cells = [[(f"{e['value']:.3f}", f"{e['low']:.3f} to {e['high']:.3f}") for e in c.values()] for c in columns]
        names = [(name, str(estimate["n"])) for name, estimate in columns[0].items()]
        print_table(header, [sum(row, ()) for row in zip(names, *cells, strict=True)])
    if without := scores["exact"]["without_answers"]:
        print(f"{without:,} of {len(answers.rows):,} questions have no accepted answer and are not scored")
    if (seconds := scores["exact"]["seconds_per_question"]) is not None:
        print(f"{seconds:.3f} s per question")
    if compared:
        gap, test = compared["difference"], compared["mcnemar"]
        print(
            f"accuracy minus that of {other}: {gap['value']:+.3f} "
            f"(95 % interval {gap['low']:+.3f} to {gap['high']:+.3f}); McNemar: {test['only_one']} correct in the "
            f"first only, {test['only_other']} in the other only, p = {test['p']:.3g}"
        )


def _estimates(score: dict[str, Any]) -> dict[str, Any]:
    """{row of the table: estimate}"""
    if score["accuracy"] is None:
        return {}
    macro = {"mean of relations": score["macro_accuracy"]} if "macro_accuracy" in score else {}
    return {"all": score["accuracy"]} | macro | score.get("by_relation", {})


def _require_only(given: dict[str, Any], allowed: set[str], mode: str) -> None:
    """Raise DataError if an option was given that does not apply with `mode`."""
    extra = [name for name, value in given.items() if name not in allowed and value != OPTIONS[name][1]]
    if extra:
        raise DataError(f"--{extra[0].replace('_', '-')} does not apply with {mode}; leave it out")


def _weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in parts(text))
    except ValueError:
        raise DataError(f"--weights is {text!r}; give numbers such as 2,1,1") from None
