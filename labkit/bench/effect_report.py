"""The report of a comparison, rebuilt from its folders: numbers, tables, figures, and what they mean in plain words.

    found = report(["runs/effect"])
    written(found, Path("runs/effect"))          # report.json, report.md, and a figure per question

All scores are in points, from 0 to 100.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from labkit.bench import effect_tables, effect_words, folders
from labkit.bench.arms import REFERENCE
from labkit.bench.effect_data import Cell, Measured, estimate_in_points, in_points, measured, unfinished
from labkit.bench.effect_pairs import pairs
from labkit.bench.effect_series import curves, orders, picture, sizes, titled
from labkit.bench.paired import MANY_DRAWS, Counted, difference, mean
from labkit.bench.stored import differences
from labkit.errors import TrainingError
from labkit.run_folder import write_whole

DIAGNOSTIC = re.compile(r"(after|before)-\d+-[A-Z]+")  # the ids of Which way round
HALVES = {"after": "what follows decides", "before": "what precedes decides"}
SETTINGS = ("rank", "attn", "window", "max_length", "adaptation_rate", "adaptation_batch", "adaptation_length")


def report(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Everything that is known of the studies in these folders, as plain values; unfinished ones too.

    {"conditions": [...], "curves": [...], "unfinished": [...], "orders": [...], "words": [...]}, all plain values.

    A path may also be the JSON file of an earlier report, made elsewhere: its conditions come first, as they stand, but
    for those that a folder given here holds too. The words are made anew, of everything together.

    Raises:
        TrainingError: no study and no report, or none that has a finished run of the reference arm.
    """
    files = [path for path in paths if Path(path).suffix == ".json"]
    studies = [path for path in paths if path not in files]
    each = [one for path in studies for one in measured(path)]
    here: dict[str, Any] = {
        "conditions": [_condition(one) for one in each],
        "curves": [curve for one in each for curve in curves(one)],
        "unfinished": [one for path in studies for one in unfinished(path)],
    }
    found = _together(here, [folders.read_report(path) for path in files])
    if not found["conditions"]:
        raise TrainingError(f"{', '.join(map(str, paths))}: no run of the arm {REFERENCE} has been scored on test yet")
    found["orders"] = orders(found["conditions"])
    return found | {"words": effect_words.paragraphs(found)}


def _together(here: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is here and what earlier reports hold; of a condition in both, with its curves, what is here."""
    known = {_of(each) for each in here["conditions"]}
    names = {each["name"] for part in ("conditions", "unfinished") for each in here[part]}
    kept = {part: [each for one in earlier for each in one[part] if _of(each) not in known]
            for part in ("conditions", "curves")}  # fmt: skip
    kept["curves"] = [titled(curve) for curve in kept["curves"]]  # as titles are made now
    kept["unfinished"] = [each for one in earlier for each in one["unfinished"] if each["name"] not in names]
    return {part: [*kept[part], *here[part]] for part in here}


def _of(each: dict[str, Any]) -> tuple[str, str, str]:
    """Which condition it is, or which a curve belongs to."""
    return each["condition"] if "condition" in each else each["name"], each["model"], each["method"]


def written(found: dict[str, Any], folder: Path, name: str = "report") -> list[Path]:
    """Write the report as Markdown and JSON, and its figures as SVG; returns their paths, the Markdown first."""
    from labkit.viz.effects import effects_svg
    from labkit.viz.saving import save

    folder.mkdir(parents=True, exist_ok=True)
    forest, unit = differences(found["conditions"]), effect_words.unit(found["conditions"])
    figures = {f"{name}.svg": effects_svg(forest, unit, marks=(5.0, 10.0))} if forest else {}
    for number, curve in enumerate(found["curves"], 1):
        figures[f"{name}-curve-{number}.svg"] = picture(curve)
    for file, figure in figures.items():
        save(figure, folder / file)
    series = [file for file in figures if file != f"{name}.svg"]
    write_whole(folder / f"{name}.md", effect_tables.markdown(found, f"{name}.svg" if forest else None, series))
    folders.write_json(folder / f"{name}.json", found)
    return [folder / f"{name}.md", folder / f"{name}.json", *(folder / file for file in figures)]


def _condition(one: Measured) -> dict[str, Any]:
    plan, facts = one.study["plan"], one.facts
    some = next(iter(one.reference.metrics.values()))
    baselines = {key: in_points(value, facts["task"]) for key, value in some["baselines"].get("test", {}).items()}
    arms = [_arm(cell, one, max(baselines.values(), default=None)) for cell in one.cells.values()]
    found = {
        "name": one.name, "task": facts["task"], "metric": "accuracy" if facts["task"] == "classify" else "f1",
        "model": one.study["model"], "method": one.study["method"], "learning_rates": one.study["learning_rates"],
        "budget": {key: plan[key] for key in ("epochs", "max_steps", "batch_size", "gradient_accumulation", "dtype")},
        "settings": {key: one.study.get(key) for key in SETTINGS} | {"evaluate_every": plan.get("evaluate_every")},
        "n_train": facts["n_train"], "n_dev": facts["n_dev"], "n_test": facts["n_test"],
        "groups": int(one.reference.counted().groups.max()) + 1,
        "passes": some["steps"] * plan["batch_size"] * plan["gradient_accumulation"] / some["n_rows"],
        "baselines": baselines, "arms": arms, "pairs": pairs(one.cells), "parts": _parts(one),
        "sizes": sizes(one),
    }  # fmt: skip
    if facts["task"] == "ner" and DIAGNOSTIC.fullmatch(one.reference.counted().ids[0]):
        found["diagnostic"] = _diagnostic(one)
    return found


def _arm(cell: Cell, one: Measured, baseline: float | None) -> dict[str, Any]:
    """`learned`: whether it is better than what needs no model; `edge`: whether no rate beyond the best was tried."""
    runs, tried = cell.counted(), cell.tried
    found = {
        "name": cell.arm.name, "rate": cell.rate, "seeds": list(runs.seeds),
        "dev_by_rate": {f"{rate:g}": in_points(tried[rate], one.facts["task"]) for rate in sorted(tried)},
        "edge": bool(tried) and cell.rate in (min(tried), max(tried)), "failed_rates": cell.failed,
        "scores": [100.0 * float(score) for score in runs.scores], **estimate_in_points(mean(runs)),
        "measured_mask": sorted({m["mask"]["measured"] for m in cell.metrics.values()}),
        "seconds": median(m["seconds"] for m in cell.metrics.values()),
        "seconds_before": median(cell.seconds_before.values()) if cell.seconds_before else None,
        "steps": median(m["steps"] for m in cell.metrics.values()),
    }  # fmt: skip
    found["learned"] = baseline is None or found["mean"] > baseline
    if cell.arm.name != REFERENCE and set(cell.judged) & set(one.reference.judged):
        together = len(one.cells) - 1
        gap = difference(runs, one.reference.counted(), together=together, draws=MANY_DRAWS)
        found["difference"] = estimate_in_points(gap) | {"together": together}
    return found


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
            found.append(_part(name, int(chosen.sum()), runs))
    return found


def _part(name: str, n: int, runs: dict[str, Counted]) -> dict[str, Any]:
    reference = runs[REFERENCE]
    found = {}
    for each, counts in runs.items():
        found[each] = {"mean": 100.0 * float(counts.scores.mean())}
        if each != REFERENCE and set(counts.seeds) & set(reference.seeds):
            found[each]["difference"] = estimate_in_points(difference(counts, reference))
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
                for line in lines:
                    if line["id"].startswith(half):
                        right[line["group"]] += bool(line["found"])
                by_seed.append(sum(right.values()))
                over += sum(count > 1 for count in right.values())
            halves[half] = {"right": by_seed, "of": 3 * len(right), "ceiling": len(right), "triples_over": over}
        found[name] = halves
    return found
