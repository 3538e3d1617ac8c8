"""The report of a comparison, rebuilt from its folders: numbers, tables, figures, and what they mean in plain words.

    found = report(["runs/effect"])
    written(found, Path("runs/effect"))          # report.json, report.md, and a figure per question

All scores are in points, from 0 to 100.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from labkit.bench import effect_tables, effect_words, folders
from labkit.bench.arms import REFERENCE
from labkit.bench.effect_across import budgets, curve_over_steps, orders
from labkit.bench.effect_data import (
    Cell,
    Measured,
    baselines_of,
    estimate_in_points,
    gap_in_points,
    in_points,
    measured,
    over_baseline,
    unfinished,
)
from labkit.bench.effect_gaps import has_learned
from labkit.bench.effect_names import agree, methods_apart, of
from labkit.bench.effect_pairs import pairs
from labkit.bench.effect_series import curves, is_drawn, over_adaptation, picture, sizes, titled
from labkit.bench.paired import Counted, mean, where_counted
from labkit.bench.stored import differences
from labkit.errors import TrainingError
from labkit.run_folder import write_whole

DIAGNOSTIC = re.compile(r"(after|before)-\d+-[A-Z]+")  # the ids of Which way round
HALVES = {"after": "what follows decides", "before": "what precedes decides"}


def report(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Everything that is known of the studies in these folders, as plain values; unfinished ones too.

    {"conditions": [...], "curves": [...], "unfinished": [...], "orders": [...], "budgets": [...], "words": [...]}.

    A path may also be the JSON file of an earlier report, made elsewhere: its conditions come first, as they stand, but
    for those that a folder given here holds too. The words are made anew, of everything together.

    Raises:
        TrainingError: no study and no report, none that has a finished run of the reference arm, or two folders that
            hold the same condition.
    """
    files = [path for path in paths if Path(path).suffix == ".json" and not Path(path).expanduser().is_dir()]
    studies = [path for path in paths if path not in files]
    each = [one for path in studies for one in measured(path)]
    conditions = [_condition(one) for one in each]
    _require_one_of_each(conditions)
    here: dict[str, Any] = {
        "conditions": conditions,
        "curves": [curve for one in each for curve in curves(one)],
        "unfinished": [one for path in studies for one in unfinished(path)],
    }
    found = _together(here, [folders.read_report(path) for path in files])
    if not found["conditions"]:
        raise TrainingError(f"{', '.join(map(str, paths))}: no run of the arm {REFERENCE} has been scored on test yet")
    found |= {"orders": orders(found["conditions"]), "budgets": budgets(found["conditions"])}
    found["curves"] = _titled(found)
    return found | {"words": effect_words.paragraphs(found)}


def _together(here: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is here and what earlier reports hold; of a condition in several, with its curves, what is here, or first.

    Conditions are the same if their data, model and budget are; arms and seeds may have come to one of them.
    """
    known = list(here["conditions"])
    found: dict[str, list] = {"conditions": [], "curves": [], "unfinished": []}
    for one in earlier:
        gone = [*known, *here["unfinished"], *found["unfinished"]]
        new = [each for each in one["conditions"] if not any(_is_same(each, other) for other in known)]
        known += new
        found["conditions"] += [_as_now(each) for each in new]
        drawn = [_drawn_now(curve, each) for curve in one["curves"] if (each := _condition_of(curve, new))]
        found["curves"] += [each for each in drawn if is_drawn(each) and each not in found["curves"]]
        found["unfinished"] += [each for each in one["unfinished"] if not any(_may_be(each, other) for other in gone)]
    return {part: [*found[part], *here[part]] for part in here}


def _require_one_of_each(conditions: Sequence[dict[str, Any]]) -> None:
    """TrainingError if two studies hold one condition: it would be counted twice, and which of them is meant?"""
    for number, each in enumerate(conditions):
        if any(_is_same(each, other) for other in conditions[:number]):
            raise TrainingError(
                f"{each['name']} ({each['model']}, {each['method']}) is in two of these folders; name one, or give the "
                "studies' reports as JSON files, of which the first counts"
            )


def _may_be(entry: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether this is said of that condition; reports once gave its name alone, or did not say what it is made with."""
    name, model, method = of(other)
    return (entry["name"], entry.get("model", model), entry.get("method", method)) == of(other) and agree(entry, other)


def _identity(condition: dict[str, Any]) -> tuple:
    """What makes it another condition, as far as every report has held it."""
    counts = (condition[key] for key in ("n_train", "n_dev", "n_test"))
    return *of(condition), *counts, tuple(sorted(condition["budget"].items(), key=repr))


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether these are one condition: by its identity, and by the settings that both reports have written down."""
    return _identity(one) == _identity(other) and agree(one, other)


def _condition_of(curve: dict[str, Any], conditions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The condition that a curve is of; None if it is not among these, or if the curve is of several."""
    if curve["kind"] == "budget":
        return None
    return next((each for each in conditions if of(each) == of(curve) and agree(each, curve)), None)


def _as_now(condition: dict[str, Any]) -> dict[str, Any]:
    """A condition of an earlier report, its arms marked as they are now."""
    arms = [one | {"learned": has_learned(one, condition["baselines"])} for one in condition["arms"]]
    return condition | {"arms": arms}


def _drawn_now(curve: dict[str, Any], each: dict[str, Any]) -> dict[str, Any]:
    """A curve of an earlier report, of this condition, with what that was made with; and one over the steps of
    adaptation with the causal model in it.
    """
    if curve["kind"] == "adaptation" and "size" not in curve:
        curve = curve | {"lines": over_adaptation({arm["name"]: arm["scores"] for arm in each["arms"]})}
    return curve | {"budget": each["budget"], "settings": each.get("settings", {})}


def _titled(found: dict[str, Any]) -> list[dict[str, Any]]:
    """All curves with their titles, which tell them apart; those over the steps of the task come last."""
    conditions = found["conditions"]
    apart = dict(zip(map(id, conditions), methods_apart(conditions), strict=True))
    drawn = [titled(curve, apart.get(id(_condition_of(curve, conditions)), "")) for curve in found["curves"]]
    last = zip(found["budgets"], methods_apart(found["budgets"]), strict=True)
    return drawn + [titled(curve_over_steps(each), apart) for each, apart in last]


def written(found: dict[str, Any], folder: Path, name: str = "report") -> list[Path]:
    """Write the report as Markdown and JSON, and its figures as SVG; returns their paths, the Markdown first."""
    from labkit.viz.effects import effects_svg
    from labkit.viz.saving import save

    folder = folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written to: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise TrainingError(f"{folder} cannot be written to")
    forest, unit = differences(found["conditions"]), effect_words.unit(found["conditions"])
    figures = {f"{name}.svg": effects_svg(forest, unit, marks=(5.0, 10.0))} if forest else {}
    for number, curve in enumerate(found["curves"], 1):
        figures[f"{name}-curve-{number}.svg"] = picture(curve)
    for file, figure in figures.items():
        save(figure, folder / file)
    series = [file for file in figures if file != f"{name}.svg"]
    write_whole(folder / f"{name}.md", effect_tables.markdown(found, f"{name}.svg" if forest else None, series))
    folders.write_json(folder / f"{name}.json", found)
    for old in folder.glob(f"{name}-curve-*.svg"):  # of an earlier report with more curves
        if old.name not in figures and re.fullmatch(r"\d+", old.stem.removeprefix(f"{name}-curve-")):
            old.unlink()
    return [folder / f"{name}.md", folder / f"{name}.json", *(folder / file for file in figures)]


def _condition(one: Measured) -> dict[str, Any]:
    plan, facts = one.study["plan"], one.facts
    some = next(iter(one.reference.metrics.values()))
    baselines = baselines_of(one.reference)
    arms = [_arm(cell, one, baselines) for cell in one.cells.values()]
    found = {
        "name": one.name, "task": facts["task"], "metric": "accuracy" if facts["task"] == "classify" else "f1",
        "model": one.study["model"], "method": one.study["method"], "learning_rates": one.study["learning_rates"],
        **one.made_with,
        "n_train": facts["n_train"], "n_dev": facts["n_dev"], "n_test": facts["n_test"],
        "groups": int(one.reference.counted().groups.max()) + 1,
        "passes": some["steps"] * plan["batch_size"] * plan["gradient_accumulation"] / some["n_rows"],
        "baselines": baselines, "arms": arms, "pairs": pairs(one.cells), "parts": _parts(one), "intervals": "widened",
        "sizes": sizes(one, arms),
    }  # fmt: skip
    if facts["task"] == "ner" and DIAGNOSTIC.fullmatch(one.reference.counted().ids[0]):
        found["diagnostic"] = _diagnostic(one)
    return found


def _arm(cell: Cell, one: Measured, baselines: dict[str, float]) -> dict[str, Any]:
    """`learned`: whether it is shown to be better than what needs no model; `edge`: none beyond its rate was tried."""
    runs, tried = cell.counted(), cell.tried
    found = {
        "name": cell.arm.name, "rate": cell.rate, "seeds": list(runs.seeds),
        "dev_by_rate": {repr(rate): in_points(tried[rate], one.facts["task"]) for rate in sorted(tried)},
        "edge": bool(tried) and cell.rate in (min(tried), max(tried)), "failed_rates": cell.failed,
        "scores": [100.0 * float(score) for score in runs.scores], **estimate_in_points(mean(runs)),
        "measured_mask": sorted({m["mask"]["measured"] for m in cell.metrics.values()}),
        "seconds": median(m["seconds"] for m in cell.metrics.values()),
        "seconds_before": median(b["seconds"] for b in cell.before.values()) if cell.before else None,
        "tokens_before": median(map(_tokens, cell.before.values())) if cell.before else None,
        "best_was_last": _best_was_last(cell),
        "steps": median(m["steps"] for m in cell.metrics.values()),
    }  # fmt: skip
    found |= over_baseline(cell)
    found["learned"] = has_learned(found, baselines)
    if cell.arm.name != REFERENCE and set(cell.judged) & set(one.reference.judged):
        found["difference"] = gap_in_points(runs, one.reference.counted(), together=len(one.cells) - 1)
    return found


def _tokens(before: dict[str, Any]) -> int:
    """Read in the training before the task, each as often as it was read."""
    return round(before["tokens_per_second"] * before["seconds"])


def _best_was_last(cell: Cell) -> list[int]:
    """[in how many runs the best evaluation on dev was the last, of how many that had several]."""
    evaluated = {
        seed: [entry["step"] for entry in history if cell.metrics[seed]["metric"] in entry]
        for seed, history in cell.history.items()
    }
    several = [seed for seed, steps in evaluated.items() if len(steps) > 1]
    last = [seed for seed in several if cell.metrics[seed].get("best_step") == evaluated[seed][-1]]
    return [len(last), len(several)]


def _parts(one: Measured) -> list[dict[str, Any]]:
    """Scores by kind of entity, or by where in the context the answer begins; each with the difference."""
    cells, reference = one.cells, one.reference
    lines = next(iter(reference.judged.values()))
    if one.facts["task"] == "ner":
        there: dict[str, int] = defaultdict(int)
        for line in lines:
            for kind, count in line["there"].items():
                there[kind] += count
        kinds = [
            _part(kind, there[kind], {name: cell.counted(kind) for name, cell in cells.items()})
            for kind in sorted(there)
        ]  # fmt: skip
        return [*_halves(one), *kinds]
    if one.facts["task"] == "qa":
        at = np.array([-1.0 if line["position"] is None else line["position"] for line in lines])
        parts = {
            "no answer": at < 0,
            "answer in the first half": (at >= 0) & (at < 0.5),
            "in the second half": at >= 0.5,
        }
        return [
            _part(name, int(chosen.sum()), {arm: cell.counted().only(chosen) for arm, cell in cells.items()})
            for name, chosen in parts.items()
            if chosen.any()
        ]
    return []


def _halves(one: Measured) -> list[dict[str, Any]]:
    """Which way round is two sets in one, and in one of them the right-hand side is of no use: each by itself."""
    ids = one.reference.counted().ids
    if not all(DIAGNOSTIC.fullmatch(each) for each in ids):
        return []
    found = []
    for half, name in HALVES.items():
        chosen = np.array([each.startswith(half) for each in ids])
        if chosen.any():
            runs = {arm: cell.counted().only(chosen) for arm, cell in one.cells.items()}
            found.append(_part(name, int(chosen.sum()), runs, together=len(HALVES) * (len(runs) - 1)))
    return found


def _part(name: str, n: int, runs: dict[str, Counted], *, together: int | None = None) -> dict[str, Any]:
    reference = runs[REFERENCE]
    found = {}
    for each, counts in runs.items():
        found[each] = {"mean": 100.0 * float(counts.scores.mean())}
        if each != REFERENCE and set(counts.seeds) & set(reference.seeds):
            found[each]["difference"] = gap_in_points(*where_counted([counts, reference]), together=together)
    return {"name": name, "n": n, "arms": found}


def _diagnostic(one: Measured) -> dict[str, Any]:
    """On Which way round: how many names of the "after" half are told right, and by how much the ceiling is passed.

    A model that has read only as far as the name gives the three sentences of a triple the same answer, so it is right
    on one of three at most; on the "before" half nothing holds it back.
    """
    found: dict[str, Any] = {}
    for name, cell in one.cells.items():
        halves = {}
        for half in ("after", "before"):
            by_seed, over = [], 0
            for lines in cell.judged.values():
                right: dict[str, int] = defaultdict(int)
                asked = [line for line in lines if line["id"].startswith(half)]
                for line in asked:
                    right[line["group"]] += bool(line["found"])
                by_seed.append(sum(right.values()))
                over += sum(count > 1 for count in right.values())
            halves[half] = {"right": by_seed, "of": len(asked), "ceiling": len(right), "triples_over": over}
        found[name] = halves
    return found
