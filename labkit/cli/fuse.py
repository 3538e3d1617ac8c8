"""`labkit fuse`: answer questions from several paraphrases each, and score what was answered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.cli.console import JSON, Options, Text, aside, flag, option, options_of, report, table
from labkit.errors import DataError
from labkit.fusion.methods import Settings

SETTINGS = options_of(Settings, typed={"indexes": Text, "weights": Text, "stop": list[str] | None})
OPTIONS: Options = SETTINGS | {
    "lemmatize": flag("--lemmatize", "Also count an answer that matches after lemmatisation."),
    "output": option(
        Text, "Feather file; - is standard output. Default: a file in runs/fuse that is named after the settings."
    ),
    "resume": flag("--resume", "Continue the run in --output."),
    "rescore": option(Text, "Score the answers in this file, without a model.", metavar="FILE"),
    "compare": option(
        Text, "With --rescore: compare with the answers in this file.", metavar="FILE", needs="--rescore"
    ),
    "as_json": JSON,
}
HELP = """Answer a question from several paraphrases.

With the default method the paraphrases do not attend to each other, and the answer attends to all of them.

Methods: single, concat, isolate, isolate+restart, fuse (default: isolate+restart with weights of 1/N), weighted,
logit-average, logit-max, hidden-average, confidence-average, confidence-max, majority-vote.

All questions share one prefix of few-shot examples, drawn with --seed. For known-facts and for your own file, the
examples come from a separate set of facts; for other sets they come from all relations of the set and are left out
of the questions. Questions with too few paraphrases are left out and counted. Rows without an answer are answered
but not scored. --resume continues an interrupted run.

--rescore FILE [--lemmatize] [--compare OTHER] [--output COPY] scores stored answers; FILE does not change.

Example: labkit fuse --model gemma3-270m --method fuse --num-paraphrases 5"""


def fuse(given: dict[str, Any]) -> None:
    from labkit.fusion.scores import summary

    if given["lemmatize"] and given["lemmatizer"] is None:
        given["lemmatizer"] = "simplemma"
    if given["model"] is None and given["rescore"] is None:
        raise DataError("--model is missing; give a registered name, a hub id or a local folder")
    answers, compared = (_run(given), {}) if given["rescore"] is None else _rescore(given)
    scores = {"exact": summary(answers)} | ({"lemmatised": summary(answers, True)} if given["lemmatizer"] else {})
    value = {"file": str(answers.path), "scores": scores, "compared_with": given["compare"]} | compared
    value |= {name: fact for name, fact in answers.about.items() if name != "prefix"}
    with aside(given["output"]):
        report(given["as_json"], value, *_lines(value, len(answers.rows)))


def _run(given: dict[str, Any]) -> Any:
    """The answers of a run."""
    lists = {
        "indexes": _numbers("--indexes", given["indexes"], int),
        "weights": _numbers("--weights", given["weights"], float),
        "stop": tuple(text.replace("\\n", "\n") for text in given["stop"] or ()) or None,
    }
    settings = Settings(**{name: given[name] for name in SETTINGS} | lists)
    from labkit.fusion.runs import run

    answers = run(settings, given["output"] or str(settings.default_output), resume=given["resume"])
    about = answers.about
    for count, note in (
        (about["taken_out"], "were taken out, because they are few-shot examples or share a text with one"),
        (about["left_out"], "have too few paraphrases and were left out"),
        (
            about["questions"] - about["natural"],
            "have paraphrases made by templates, which differ less than natural ones",
        ),
    ):
        if count:
            print(f"labkit: {count:,} questions {note}", file=sys.stderr)
    return answers


def _rescore(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The answers with new scores, and their comparison with those of --compare."""
    from labkit.files import is_standard_output
    from labkit.fusion.scores import comparison, judged, load_lemmatizer, read_answers, write_answers

    of_a_run = (SETTINGS | {"resume": OPTIONS["resume"]}).items()
    if extra := [name for name, (_, default, _) in of_a_run if given[name] != default and name != "lemmatizer"]:
        raise DataError(f"--{extra[0].replace('_', '-')} does not apply with --rescore; leave it out")
    lemmas = load_lemmatizer(given["lemmatizer"]) if given["lemmatizer"] else None
    output, compared = given["output"], {}
    answers = judged(read_answers(given["rescore"]), lemmas)
    if given["compare"] is not None:
        compared = comparison(answers, judged(read_answers(given["compare"]), lemmas), lemmas is not None)
    if output is not None:
        if Path(output).expanduser().is_file() and not is_standard_output(output):
            raise DataError(f"{output} exists already; give another --output")
        write_answers(answers, output)
    return answers, compared


def _lines(value: dict[str, Any], n: int) -> Iterator[str]:
    """The scores as a table: exact match and, if it was requested, lemmatised."""
    scores, settings = value["scores"], value.get("settings")
    exact = scores["exact"]
    how = "{method} ({engine}), {model} on {dataset}".format(**settings) if settings else "unknown"
    yield f"{value['file']}: {how}"
    if exact["accuracy"] is not None:
        rows: dict[str, list[Any]] = {}
        for score in scores.values():
            for name, e in {"all": score["accuracy"], **score.get("by_relation", {})}.items():
                rows.setdefault(name, [name, e["n"]])
                rows[name] += [f"{e['value']:.3f}", f"{e['low']:.3f} to {e['high']:.3f}"]
        header = [title for kind in scores for title in (f"accuracy, {kind}", "95 % interval")]
        yield table(("", "n", *header), list(rows.values()))
    if exact["without_answers"]:
        yield f"{exact['without_answers']:,} of {n:,} questions have no accepted answer: not scored"
    if exact["seconds_per_question"] is not None:
        yield f"{exact['seconds_per_question']:.3f} s per question"
    if "mcnemar" in value:
        gap, test = value["difference"], value["mcnemar"]
        yield (
            f"accuracy minus that of {value['compared_with']}: {gap['value']:+.3f} "
            f"(95 % interval {gap['low']:+.3f} to {gap['high']:+.3f}); McNemar: {test['only_one']} correct in the "
            f"first only, {test['only_other']} in the other only, p = {test['p']:.3g}"
        )


def _numbers(option: str, text: str | None, kind: type) -> tuple[Any, ...] | None:
    try:
        return None if text is None else tuple(map(kind, text.split(",")))
    except ValueError:
        raise DataError(f"{option} is {text!r}; give numbers such as 2,1,1") from None
