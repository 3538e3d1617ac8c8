"""What a report tells of a condition along a quantity: training steps, steps of adaptation, layers, examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from labkit.bench.arms import REFERENCE, arm
from labkit.bench.effect_data import (
    Cell,
    Measured,
    baselines_of,
    estimate_in_points,
    gap_in_points,
    in_points,
    over_baseline,
)
from labkit.bench.effect_gaps import has_learned
from labkit.bench.effect_pairs import pairs
from labkit.bench.paired import contrast, mean

OF_ARMS = ("mean", "low", "high", "n_seeds", "n", "over_baseline", "learned", "difference")
TITLES = {
    "learning": "learning curves", "adaptation": "how many steps of adaptation", "size": "how many training examples",
    "layers": "how many layers are unmasked", "budget": "how many steps of the task",
}  # fmt: skip


def titled(curve: dict[str, Any], apart: str = "") -> dict[str, Any]:
    """The curve with its title: the task, the model, what tells it `apart` from others of these, and what it runs
    along.
    """
    fewer = f" ({curve['size']:,} examples)" if "size" in curve else ""
    return curve | {"title": f"{curve['condition']}, {curve['model']}{apart}: {TITLES[curve['kind']]}{fewer}"}


def curves(one: Measured) -> list[dict[str, Any]]:
    """Scores over the steps of training, and where arms or sizes form a series, over that; none of one point, and none
    with its title, which depends on what else there is.
    """
    metric = "accuracy" if one.facts["task"] == "classify" else "F1"
    common = {
        "condition": one.name, "model": one.study["model"], "method": one.study["method"], "y": f"test {metric}",
        "log_x": False, **one.made_with,
    }  # fmt: skip
    scores = {name: _scores(cell) for name, cell in one.cells.items()}
    learning = {"kind": "learning", "x": "steps", "lines": _learning(one)}
    found = [common | learning | {"y": f"dev {metric}"}]
    for size, cells in _by_size(one).items():
        if lines := over_adaptation({name: _scores(cell) for name, cell in cells.items()}):
            fewer = {} if size == one.facts["n_train"] else {"size": size}
            found.append(common | {"kind": "adaptation", "x": "steps before the task", "lines": lines} | fewer)
    if one.smaller:
        sizes: dict[str, list] = defaultdict(list)
        for cell in one.smaller:
            sizes[cell.arm.name].append((cell.size, _scores(cell)))
        for name, points in sizes.items():
            points.extend([(one.facts["n_train"], scores[name])] if name in scores else [])
        lines = {name: sorted(sizes[name]) for name in _one_of_each_objective(sizes)}
        found.append(common | {"kind": "size", "x": "training examples", "log_x": True, "lines": lines})
    shares: dict[str, list] = defaultdict(list)
    for name, cell in one.cells.items():
        if cell.arm.share is not None:
            side, share = cell.arm.share
            shares[side].append((share, scores[name]))
    if any(side != "middle" or len(points) > 1 for side, points in shares.items()):
        ends = [(0.0, scores[REFERENCE])] + ([(1.0, scores["bidirectional"])] if "bidirectional" in scores else [])
        lines = {
            f"from {side}" if side != "middle" else "in the middle": sorted(ends + p) for side, p in shares.items()
        }
        found.append(common | {"kind": "layers", "x": "share of the layers", "lines": lines})
    return [curve for curve in found if is_drawn(curve)]


def is_drawn(curve: dict[str, Any]) -> bool:
    """Whether there is a line in it: a run that was scored on dev but once is a point."""
    return any(len({x for x, _ in points}) > 1 for points in curve["lines"].values())


def over_adaptation(scores: Mapping[str, list[float]]) -> dict[str, list[tuple[int, list[float]]]]:
    """{arm: [(steps before the task, scores), ...]} of {arm: scores}, if an objective has several numbers of steps.

    The reference without any comes first and stands at both ends, as what the others are to reach.
    """
    adapted: dict[str, list] = defaultdict(list)
    for name in scores:
        if objective := arm(name).objective:
            adapted[objective].append((arm(name).steps, scores[name]))
    if all(len(points) < 2 for points in adapted.values()):
        return {}
    most = max(steps for points in adapted.values() for steps, _ in points)
    lines = {REFERENCE: [(0, scores[REFERENCE]), (most, scores[REFERENCE])]}
    for objective, points in adapted.items():
        start = REFERENCE if objective == "next" else "bidirectional"
        points.extend([(0, scores[start])] if start in scores else [])
        lines[f"{start} after {objective}"] = sorted(points)
    return lines


def _one_of_each_objective(sizes: Mapping[str, list]) -> list[str]:
    """The arms to draw over the sizes: of several numbers of steps the one with most sizes, or else with most steps."""
    most: dict[str, str] = {}
    for name in sizes:
        of = arm(name).objective or name
        if of not in most or (len(sizes[name]), arm(name).steps) > (len(sizes[most[of]]), arm(most[of]).steps):
            most[of] = name
    return list(most.values())


def _scores(cell: Cell) -> list[float]:
    return [100.0 * float(score) for score in cell.counted().scores]


def picture(curve: dict[str, Any]) -> Any:
    """A curve of a report as a still picture, a `labkit.viz.svg.Svg`."""
    from labkit.viz.effects import effect_curves_svg

    lines = {arm: {float(x): scores for x, scores in points} for arm, points in curve["lines"].items()}
    return effect_curves_svg(lines, curve["x"], curve["y"], curve["title"], log_x=curve["log_x"])


def _learning(one: Measured) -> dict[str, list[tuple[int, list[float]]]]:
    """{arm: [(step, dev scores of the seeds), ...]} of the metric that chose the checkpoints."""
    found = {}
    for name, cell in one.cells.items():
        by_step: dict[int, list[float]] = defaultdict(list)
        for seed, history in cell.history.items():
            metric = cell.metrics[seed]["metric"]
            for entry in history:
                if metric in entry:
                    by_step[entry["step"]].append(in_points(entry[metric], one.facts["task"]))
        found[name] = sorted(by_step.items())
    return found


def sizes(one: Measured, whole: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every arm by the number of training examples, the full set last; [] if there is only that.

    [{"size", "steps", "arms": {arm: {"mean", "low", ..., "difference"}}, "pairs": [...]}, ...], the full set
    without pairs. An arm that was trained on the full set too has `growth` at the smaller: by how much its difference
    to the reference is larger with all. `whole`: the arms of the full set, as the report has them.
    """
    if not one.smaller:
        return []
    *smaller, _ = _by_size(one).items()
    found = [
        {"size": size, "steps": _steps_of(cells), "arms": _with_this_many(one, cells), "pairs": pairs(cells)}
        for size, cells in smaller
    ]
    arms = {arm["name"]: {key: arm[key] for key in OF_ARMS if key in arm} for arm in whole}
    return [*found, {"size": one.facts["n_train"], "steps": _steps_of(one.cells), "arms": arms}]


def _by_size(one: Measured) -> dict[int, dict[str, Cell]]:
    """{training examples: {arm: its cell}} where the reference has run, the fewest first and the full set last."""
    found: dict[int, dict[str, Cell]] = defaultdict(dict)
    for cell in one.smaller:
        found[cell.size][cell.arm.name] = cell
    smaller = {size: cells for size, cells in sorted(found.items()) if REFERENCE in cells}
    return smaller | {one.facts["n_train"]: one.cells}


def _steps_of(cells: dict[str, Cell]) -> float | int:
    return median(m["steps"] for m in cells[REFERENCE].metrics.values())


def _with_this_many(one: Measured, cells: dict[str, Cell]) -> dict[str, dict[str, Any]]:
    runs, whole = {name: cell.counted() for name, cell in cells.items()}, one.reference.counted()
    found = {}
    for name, cell in cells.items():
        found[name] = estimate_in_points(mean(runs[name])) | over_baseline(cell)
        found[name]["learned"] = has_learned(found[name], baselines_of(cell))
    compared = [name for name in runs if name != REFERENCE and set(runs[name].seeds) & set(runs[REFERENCE].seeds)]
    for name in compared:
        found[name]["difference"] = gap_in_points(runs[name], runs[REFERENCE], together=len(compared))
    terms = {
        name: [(1, one.cells[name].counted()), (-1, whole), (-1, runs[name]), (1, runs[REFERENCE])]
        for name in compared
        if name in one.cells
    }
    grown = {name: four for name, four in terms.items() if set.intersection(*(set(each.seeds) for _, each in four))}
    for name, four in grown.items():
        gap = estimate_in_points(contrast(four, together=len(grown)))
        found[name]["growth"] = gap | {"together": len(grown)}
    return found
