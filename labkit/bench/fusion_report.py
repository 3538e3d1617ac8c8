"""The report of a comparison of fusion methods, rebuilt from its folders: numbers, tables, figures, and plain words.

    found = report(["runs/fusion"])
    written(found, Path("runs/fusion"))          # report.md, report.json, and the figures

Accuracies and their differences are in points, from 0 to 100. Whatever is compared is compared on the questions that
both sides were asked, and says how many these are; sets with natural paraphrases and sets with those that templates
made stay apart. Where questions have relations, "low" and "high" draw relations and then questions within them, and
"these_templates" holds the interval over questions alone: that of the relations and wordings which were asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labkit.bench import folders, fusion_words
from labkit.bench.fusion_quality import AVERAGE, SINGLE, UNMOVED, Cell, read_study
from labkit.bench.stored import fusion_differences
from labkit.errors import TrainingError
from labkit.fusion import scores
from labkit.fusion.answers import Answers, read_answers
from labkit.fusion.intervals import Estimate
from labkit.fusion.journal import journal_of, read_journal
from labkit.fusion.scores import Scored
from labkit.run_folder import read_json, write_whole

PAIRS = (
    ("isolate+restart", "concat"),
    ("fuse", "isolate+restart"),
    ("fuse", "concat"),
)  # beside those to the baselines
REFERENCE = "the mean of single prompts"


def report(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Everything that is known of the studies in these folders, as plain values; unfinished ones too.

    {"conditions": [...], "unfinished": [...], "words": [...], "template_words": [...]}; see benchmarks/README.md.

    Raises:
        TrainingError: no study, or none with a finished cell. DataError: a damaged file of answers.
    """
    conditions, unfinished = [], []
    for path in (Path(each).expanduser() for each in paths):
        study, cells = read_study(path)
        failed = read_json(path / "failures.json") or {}
        for model, data in dict.fromkeys((cell.model, cell.data) for cell in cells):
            own = [cell for cell in cells if (cell.model, cell.data) == (model, data)]
            done = {cell: read_answers(path / cell.file) for cell in own if (path / cell.file).exists()}
            unfinished += [_unfinished(cell, path, failed) for cell in own if cell not in done]
            if done:
                conditions.append(_condition(study, own, done))
    if not conditions:
        raise TrainingError(f"{', '.join(map(str, paths))}: no cell is finished yet")
    conditions.sort(key=lambda each: each["templates"])  # natural ones first, else as they came
    found = {"conditions": conditions, "unfinished": unfinished}
    return found | fusion_words.words(found)


def written(found: dict[str, Any], folder: Path, name: str = "report") -> list[Path]:
    """Write the report as Markdown and JSON, and its figures as SVG; returns their paths, the Markdown first."""
    from labkit.viz.effects import effect_curves_svg, effects_svg
    from labkit.viz.saving import save

    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    forests: dict[bool, str] = {}
    for templates in (False, True):
        rows = fusion_differences([each for each in found["conditions"] if each["templates"] is templates])
        if rows:
            forests[templates] = f"{name}{'-templates' if templates else ''}.svg"
            figures[forests[templates]] = effects_svg(rows, unit="points of accuracy", reference=REFERENCE)
    curves: list[list[str]] = []
    for each in found["conditions"]:
        curves.append([])
        for curve in each["curves"]:
            lines, title = curve["lines"], f"{each['name']}, {each['model']} (n = {curve['n']:,})"
            curves[-1].append(f"{name}-curve-{sum(map(len, curves)) + 1}.svg")
            figures[curves[-1][-1]] = effect_curves_svg(
                {line: {float(x): [mean] for x, mean, _, _ in points} for line, points in lines.items()},
                "paraphrases", "accuracy in points", title,
                intervals={line: {float(x): ends for x, _, *ends in points} for line, points in lines.items()},
            )  # fmt: skip
    for file, figure in figures.items():
        save(figure, folder / file)
    write_whole(folder / f"{name}.md", fusion_words.markdown(found, forests, curves))
    folders.write_json(folder / f"{name}.json", found)
    return [folder / f"{name}.md", folder / f"{name}.json", *(folder / file for file in figures)]


def _unfinished(cell: Cell, path: Path, failed: dict[str, str]) -> dict[str, Any]:
    kept = len(read_journal(journal_of(path / cell.file))[1])
    return {
        "model": cell.model, "name": cell.data, "method": cell.method, "reads": cell.reads, "kept": kept,
        "reason": failed.get(cell.file.as_posix()),
    }  # fmt: skip


def _condition(study: dict[str, Any], asked: Sequence[Cell], done: dict[Cell, Answers]) -> dict[str, Any]:
    """A model on a set: what each method reached, and how it compares."""
    facts = study["data"][asked[0].data]
    numbers = sorted({1, *(cell.first for cell in asked if cell.first is not None)})
    singles, joined = _sorted(done)
    about = [answers.about for answers in done.values()]
    return {
        "name": asked[0].data, "model": asked[0].model, **facts, "settings": study["settings"],
        "versions": _distinct(each["versions"] for each in about),
        "loaded": _distinct({k: each["model"][k] for k in ("dtype", "device", "attention")} for each in about),
        "relations": len({row["relation"] for answers in done.values() for row in answers.rows} - {None}),
        "places": [
            {"place": place, **_scores([singles[place]]), "seconds": _seconds([singles[place]])}
            for place in sorted(singles)
        ],
        "rows": _all_rows(numbers, singles, joined), "pairs": _pairs(numbers, joined),
        "answer_in_wording": _answer_in_wording(numbers, done),
        "control": [_control(cell, done[cell], singles) for cell in asked if cell.repeat is not None and cell in done],
        "curves": _curves(numbers, singles, joined),
    }  # fmt: skip


def _sorted(done: dict[Cell, Answers]) -> tuple[dict[int, Answers], dict[tuple[str, int], Answers]]:
    """({place: answers to the single prompt}, {(method, N): answers}); copies are in neither."""
    singles = {cell.place: answers for cell, answers in done.items() if cell.place is not None}
    return singles, {(cell.method, cell.first): answers for cell, answers in done.items() if cell.first is not None}


def _answer_in_wording(numbers: Sequence[int], done: dict[Cell, Answers]) -> dict[str, Any]:
    """The questions of which a wording that is read contains an accepted answer, and the results without them.

    {"ids", "of": all questions}, and "rows" and "pairs" as of the condition where there are such questions and others.
    """
    asked = {row["id"] for answers in done.values() for row in answers.rows}
    ids = {
        row["id"]
        for answers in done.values()
        for row in answers.rows
        if any(scores.holds_answer(text, row["answers"]) for text in row["paraphrases"])
    }
    found: dict[str, Any] = {"ids": sorted(ids), "of": len(asked)}
    if not 0 < len(ids) < len(asked):
        return found
    others = {
        cell: Answers(answers.path, [row for row in answers.rows if row["id"] not in ids], answers.about)
        for cell, answers in done.items()
    }
    singles, joined = _sorted({cell: answers for cell, answers in others.items() if answers.rows})
    return found | {"rows": _all_rows(numbers, singles, joined), "pairs": _pairs(numbers, joined)}


def _all_rows(
    numbers: Sequence[int], singles: dict[int, Answers], joined: dict[tuple[str, int], Answers]
) -> list[dict[str, Any]]:
    return [row for n in numbers for row in _rows(n, singles, joined)]


def _rows(n: int, singles: dict[int, Answers], joined: dict[tuple[str, int], Answers]) -> list[dict[str, Any]]:
    """Of each method what it reached with `n` paraphrases; first the single prompts, if each of them was asked."""
    alone = [singles[place] for place in range(n)] if all(place in singles for place in range(n)) else []
    found = []
    if alone:
        each = scores.shared([answers.scored() for answers in alone])
        found.append(
            {"method": SINGLE, "paraphrases": n, **_scores(alone), "seconds": _seconds(alone)}
            | {"in_all": _accuracy([_right(each, all)]), "in_any": _accuracy([_right(each, any)])}
        )
    for (method, _), answers in ((key, answers) for key, answers in joined.items() if key[1] == n):
        row = {"method": method, "paraphrases": n, **_scores([answers]), "seconds": _seconds([answers])}
        if alone:
            one, *others = scores.shared([answers.scored(), *(each.scored() for each in alone)])
            row["to_single"] = _difference(one, others)
            if _has_relations(one):
                row["macro_to_single"] = _points(scores.macro_difference_to_mean(one, others))
        if method != AVERAGE and (AVERAGE, n) in joined:
            row["to_average"] = _compared(answers, joined[AVERAGE, n])
        found.append(row)
    return found


def _right(many: Sequence[Scored], when: Callable[[Iterable[bool]], bool]) -> Scored:
    """The same questions, right when `all` or `any` of these are; all list them in one order."""
    correct = tuple(when(each) for each in zip(*(one.correct for one in many), strict=True))
    return Scored(many[0].ids, correct, many[0].relations)


def _scores(files: Sequence[Answers]) -> dict[str, Any]:
    """Accuracy of a method; of several, the mean of theirs on the questions that all answered."""
    scored = scores.shared([each.scored() for each in files])
    found: dict[str, Any] = {"n": len(scored[0].ids), "accuracy": _accuracy(scored)}
    if _has_relations(scored[0]):
        found["macro"] = _points(scores.macro_mean_accuracy(scored))
    if all(row.get("correct_lemmatised") is not None for each in files for row in each.rows):
        found["lemmatised"] = _accuracy(scores.shared([each.scored(lemmatised=True) for each in files]))
    return found


def _accuracy(many: Sequence[Scored]) -> dict[str, Any]:
    alone = scores.mean_accuracy(many)
    if not _has_relations(many[0]):
        return _points(alone)
    return _points(scores.clustered_mean_accuracy(many)) | {"these_templates": _ends(alone)}


def _difference(one: Scored, many: Sequence[Scored]) -> dict[str, Any]:
    """Accuracy of `one` minus the mean of the others' accuracies on the same questions."""
    alone = scores.difference_to_mean(one, many)
    if not _has_relations(one):
        return _points(alone)
    return _points(scores.clustered_difference_to_mean(one, many)) | {"these_templates": _ends(alone)}


def _compared(one: Answers, other: Answers) -> dict[str, Any]:
    """Accuracy of `one` minus that of `other` on the questions of both, with McNemar's test."""
    pair = scores.shared([one.scored(), other.scored()])
    test = scores.mcnemar(*pair)
    return _difference(pair[0], pair[1:]) | {"only_one": test.only_one, "only_other": test.only_other, "p": test.p}


def _points(found: Estimate) -> dict[str, Any]:
    return {"mean": 100 * found.value, **_ends(found), "n": found.n}


def _ends(found: Estimate) -> dict[str, float]:
    return {"low": 100 * found.low, "high": 100 * found.high}


def _has_relations(scored: Scored) -> bool:
    return bool(scored.relations) and None not in scored.relations


def _seconds(files: Sequence[Answers]) -> dict[str, float]:
    """Per question and prompt, or fused prompt: median and quartiles; a question counts its share of its batch."""
    each = [row["seconds"] for answers in files for row in answers.rows]
    low, median, high = np.quantile(each, [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def _pairs(numbers: Sequence[int], joined: dict[tuple[str, int], Answers]) -> list[dict[str, Any]]:
    return [
        {"one": one, "other": other, "paraphrases": n, "difference": _compared(joined[one, n], joined[other, n])}
        for n in numbers
        for one, other in PAIRS
        if (one, n) in joined and (other, n) in joined
    ]


def _control(cell: Cell, answers: Answers, singles: dict[int, Answers]) -> dict[str, Any]:
    """Copies of the first paraphrase against that paraphrase alone.

    Of the methods that they cannot move, "check" is True: the answers must be the same, up to rounding.
    """
    found = {"method": cell.method, "times": cell.repeat, "check": cell.method in UNMOVED, **_scores([answers])}
    if 0 not in singles:
        return found
    alone = {row["id"]: row["prediction"] for row in singles[0].rows}
    both = [row for row in answers.rows if row["id"] in alone]
    alike = sum(row["prediction"] == alone[row["id"]] for row in both)
    return found | {"alike": alike, "of": len(both), "to_first": _compared(answers, singles[0])}


def _curves(
    numbers: Sequence[int], singles: dict[int, Answers], joined: dict[tuple[str, int], Answers]
) -> list[dict[str, Any]]:
    """Accuracy over N, one picture for each sample of questions: its methods, and those they are compared with.

    [{"n": questions, "lines": {method: [[N, accuracy, low, high], ...]}}]; each line begins with the first prompt.
    """
    sizes = sorted({len(answers.rows) for answers in joined.values()}, reverse=True)
    pictures = []
    for size in sizes:
        own = [method for (method, _), answers in joined.items() if len(answers.rows) == size]
        sample = next(answers for answers in joined.values() if len(answers.rows) == size)
        first = [each for each in ("fuse", AVERAGE) if each in own or size < sizes[0]]  # alike coloured in all pictures
        methods = dict.fromkeys([*first, *own])
        lines = {"mean of single": {n: [singles.get(place) for place in range(n)] for n in numbers}}
        for method in methods:
            lines[method] = {1: [singles.get(0)]} | {n: [joined.get((method, n))] for n in numbers if n > 1}
        drawn = {name: _line(sample, files) for name, files in lines.items()}
        pictures.append({"n": size, "lines": {name: line for name, line in drawn.items() if len(line) > 1}})
    return [each for each in pictures if each["lines"]]


def _line(sample: Answers, files: dict[int, list[Answers | None]]) -> list[list[float | int]]:
    """[N, accuracy, low, high] of the mean of these files on the sample, for each N of which all answered all of it."""
    points: list[list[float | int]] = []
    for n, each in files.items():
        if None in each:
            continue
        found = _accuracy(scores.shared([one.scored() for one in (sample, *each)])[1:])
        if found["n"] == len(sample.rows):
            points.append([n, found["mean"], found["low"], found["high"]])
    return points


def _distinct(found: Any) -> list[dict[str, Any]]:
    """Each once, in the order in which they come."""
    unlike: list[dict[str, Any]] = []
    for each in found:
        if each not in unlike:
            unlike.append(each)
    return unlike
