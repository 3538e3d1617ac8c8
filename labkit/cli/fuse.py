"""`labkit fuse`: answer questions from several paraphrases each, score what was answered, prove the engine."""

from __future__ import annotations

import sys
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
from labkit.errors import FusionError

RESCORING = {"rescore", "compare", "lemmatize", "lemmatizer", "output", "as_json"}
PROVING = {"prove", "model", "engine", "device", "dtype", "as_json"}
LEMMATIZER = "simplemma"
PROVED_IN = "float32"  # in which the proofs are strict
HALF = ("bfloat16", "float16")
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
SAME = (  # options that are a setting of the run as they are
    "dataset", "model", "method", "engine", "num_paraphrases", "repeat", "at_least", "layer", "few_shot", "seed",
    "max_questions", "max_new_tokens", "batch_size", "device", "dtype", "pairs",
)  # fmt: skip


def fuse(given: dict[str, Any]) -> None:
    lemmatizer = given["lemmatizer"] or (LEMMATIZER if given["lemmatize"] else None)
    output, as_json = given["output"], given["as_json"]
    if given["rescore"] is not None:
        _require_only(given, RESCORING, "--rescore")
        _rescore(given["rescore"], given["compare"], lemmatizer, output, as_json)
    elif given["compare"] is not None:
        raise FusionError("--compare needs --rescore FILE, the other file of answers")
    elif given["model"] is None:
        raise FusionError("--model is missing; give a registered name, a hub id or a local folder")
    elif given["prove"]:
        _require_only(given, PROVING, "--prove")
        _prove(given["model"], given["engine"], given["device"], given["dtype"], as_json)
    else:
        from labkit.fusion.few_shot import examples_for
        from labkit.fusion.runs import Settings

        settings = Settings(
            indexes=None if given["indexes"] is None else tuple(whole_numbers("--indexes", given["indexes"])),
            weights=None if given["weights"] is None else _weights(given["weights"]),
            stop=tuple(each.replace("\\n", "\n") for each in given["stop"] or ()),
            lemmatizer=lemmatizer,
            examples=None if given["few_shot_from_data"] else examples_for(given["dataset"]),
            **{name: given[name] for name in SAME},
        )
        _run(settings, output, given["resume"], as_json)


def _run(settings: Any, output: str | None, resume: bool, as_json: bool) -> None:
    from labkit.fusion.journal import journal_of, read_journal
    from labkit.fusion.runs import default_output, run

    output = output or str(default_output(settings))
    try:
        answers = run(settings, output, resume=resume, unanswered=True)
    except KeyboardInterrupt:
        kept = len(read_journal(journal_of(output))[1])
        kept_in = f"{kept:,} answers are kept in {journal_of(output)}: the same command with --resume goes on"
        print(f"labkit: interrupted; {kept_in if kept else 'nothing was written'}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    taken_out = answers.about["taken_out"]
    if settings.examples and settings.few_shot:
        what = f"the {settings.few_shot} few-shot examples are known facts; questions of {settings.dataset} taken out"
        print(f"labkit: {what} for sharing a text with one: {taken_out:,}", file=sys.stderr)
    elif taken_out:
        what = f"questions of {settings.dataset} taken out as few-shot examples, or for sharing a text with one"
        print(f"labkit: {what}: {taken_out:,}", file=sys.stderr)
    if left_out := answers.about["left_out"]:
        print(f"labkit: {left_out:,} questions have too few paraphrases and were left out", file=sys.stderr)
    if made := answers.about["questions"] - answers.about["natural"]:
        what = f"the paraphrases of {made:,} questions were made by templates"
        print(f"labkit: {what}; they say little about natural ones", file=sys.stderr)
    with aside(output):
        _show(answers, settings.lemmatizer is not None, as_json)


def _rescore(path: str, other: str | None, lemmatizer: str | None, output: str | None, as_json: bool) -> None:
    from pathlib import Path

    from labkit.files import is_standard_output
    from labkit.fusion.answers import comparison, judged, read_answers, write_answers
    from labkit.fusion.scores import load_lemmatizer

    lemmas = load_lemmatizer(lemmatizer) if lemmatizer else None
    stored = read_answers(path)
    answers = judged(stored, lemmas)
    if any(
        was.get("correct") not in (None, now["correct"]) for was, now in zip(stored.rows, answers.rows, strict=True)
    ):
        print(f"labkit: {path} says otherwise of some answers: it was scored by another rule", file=sys.stderr)
    against = comparison(answers, judged(read_answers(other), lemmas), lemmas is not None) if other else None
    if output is not None:
        if Path(output).expanduser().is_file() and not is_standard_output(output):
            raise FusionError(f"{output} exists already; give another --output")
        write_answers(answers, output)
    with aside(output):
        _show(answers, lemmas is not None, as_json, other, against)


def _prove(model: str, engine: str, device: str, dtype: str | None, as_json: bool) -> None:
    from labkit.fusion import proofs
    from labkit.fusion.generation import ENGINES, engine_named
    from labkit.fusion.runs import device_named
    from labkit.models import load

    if engine not in ENGINES:
        raise FusionError(f"the fusion engine is {engine!r}; choose one of {', '.join(ENGINES)}")
    if dtype in HALF:
        what = "sums in another order differ too much to tell a right engine from a faulty one; leave --dtype out"
        print(f"labkit: in {dtype} this is no proof, only a smoke test: {what}", file=sys.stderr)
    lm = load(model, dtype=dtype or PROVED_IN, device=device_named(device))
    with waiting(f"proving {engine} on {model}"):
        found = proofs.prove(lm, lambda *read: engine_named(engine, *read, None))
    if as_json:
        rows = [{"name": p.name, "holds": p.holds, "value": p.value, "limit": p.limit} for p in found.proofs]
        print_json({"model": found.model, "engine": found.engine, "holds": found.holds, "proofs": rows})
    else:
        print(found)
    raise typer.Exit(0 if found.holds else 1)


def _show(answers: Any, lemmatised: bool, as_json: bool, other: str | None = None, against: Any = None) -> None:
    """The scores of a file as a table, or as JSON: exact match, then in dictionary form where that was asked for."""
    from labkit.fusion.answers import summary

    kinds = {"exact": summary(answers)} | ({"lemmatised": summary(answers, True)} if lemmatised else {})
    if as_json:
        stated = {name: value for name, value in answers.about.items() if name != "prefix"}
        print_json({"file": str(answers.path), "scores": kinds, "compared_with": other, **(against or {}), **stated})
        return
    exact = kinds["exact"]
    named = [*(["mean of relations"] if "macro_accuracy" in exact else []), *exact.get("by_relation", {})]
    named = ["all", *named] if exact["n"] else []
    columns = [_estimates(found) for found in kinds.values()]
    header = ("", "n", *(part for kind in kinds for part in (f"accuracy, {kind}", "95 % interval")))
    rows = []
    for name in named:
        cells = [part for column in columns for part in _cells(column[name])]
        rows.append((name, str(columns[0][name]["n"]), *cells))
    print(f"{answers.path}: {_in_words(answers)}")
    if rows:
        print_table(header, rows)
    if without := exact["without_answers"]:
        print(f"{without:,} of {len(answers.rows):,} questions have no answer to compare with, and are in no score")
    if exact["seconds_per_question"] is not None:
        print(f"{exact['seconds_per_question']:.3f} s per question")
    if against is not None:
        gap, test = against["difference"], against["mcnemar"]
        print(
            f"accuracy minus that of {other}: {gap['value']:+.3f} "
            f"(95 % interval {gap['low']:+.3f} to {gap['high']:+.3f}); "
            f"McNemar: {test['only_one']} right in the first only, {test['only_other']} in the other only, "
            f"p = {test['p']:.3g}"
        )


def _estimates(found: dict[str, Any]) -> dict[str, Any]:
    """{row of the table: estimate}"""
    macro = {"mean of relations": found["macro_accuracy"]} if "macro_accuracy" in found else {}
    return {"all": found["accuracy"]} | macro | found.get("by_relation", {})


def _cells(estimate: dict[str, Any]) -> tuple[str, str]:
    return f"{estimate['value']:.3f}", f"{estimate['low']:.3f} to {estimate['high']:.3f}"


def _in_words(answers: Any) -> str:
    """Method, engine, model and set of a file that says so."""
    settings = answers.about.get("settings")
    if not settings:
        return "answers of unknown origin"
    engines = ", ".join(sorted({row["engine"] for row in answers.rows}))
    return f"{settings['method']} ({engines}), {settings['model']} on {settings['dataset']}"


def _require_only(given: dict[str, Any], allowed: set[str], what: str) -> None:
    """FusionError if an option was given that means nothing together with `what`."""
    strange = [name for name, value in given.items() if name not in allowed and value != OPTIONS[name][1]]
    if strange:
        raise FusionError(f"--{strange[0].replace('_', '-')} means nothing together with {what}; leave it out")


def _weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in parts(text))
    except ValueError:
        raise FusionError(f"--weights is {text!r}; give numbers such as 2,1,1") from None
