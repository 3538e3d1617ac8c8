"""The report of a comparison of Future Attention, rebuilt from its folders: numbers, table, figures, and plain words.

    found = report(["runs/future"])
    written(found, Path("runs/future"))          # report.md, report.json, and the figures

Losses are in nats per token, so a negative difference is the better model. A verdict needs at least
`future_words.ARMS` arms and `SEEDS` seeds, and an interval no wider than `CLEAR` to each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from labkit.bench import folders, future_words
from labkit.bench.future_arms import COLUMNS, NO_LOSS, REFERENCE, SHUFFLED
from labkit.bench.future_study import read_study, run_folder
from labkit.bench.future_words import ARMS, CLEAR, SEEDS
from labkit.bench.paired import Counted, difference
from labkit.errors import TrainingError
from labkit.run_folder import read_json, write_whole
from labkit.viz.intervals import mean_interval

NEIGHBOURS = 4  # held-out rows side by side in the text make one group of the bootstrap
THIRDS = {  # the parts of a row, and what is made of the mean losses of its thirds
    "first third of the positions": (1, 0, 0), "middle third": (0, 1, 0), "last third": (0, 0, 1),
    "first less last third": (1, 0, -1),
}  # fmt: skip


def report(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Everything that is known of the studies in these folders, as plain values; unfinished ones too.

    {"conditions": [...], "curves": [...], "unfinished": [...], "words": [...]}. A condition is a study: its shape,
    budget and texts, and its arms.

    Raises:
        TrainingError: no study, none in which a run of the baseline has ended, or runs that cannot be compared.
    """
    found: dict[str, Any] = {"conditions": [], "curves": [], "unfinished": []}
    names: list[str] = []
    for path in (Path(each).expanduser().absolute() for each in paths):
        whole = read_study(path)
        same = sum(name.partition(", study")[0] == path.name for name in names)  # another folder of that name
        names.append(path.name + (f", study {same + 1}" if same else ""))
        runs = {name: _runs(path, name, whole["study"]["seeds"]) for name in whole["study"]["arms"]}
        planned = len(runs) * len(whole["study"]["seeds"])
        done = sum(map(len, runs.values()))
        if done < planned:
            without = [name for name, each in runs.items() if not each]
            found["unfinished"].append({"name": names[-1], "done": done, "planned": planned, "without": without})
        if runs.get(REFERENCE):
            _require_same_rows(runs, path)
            found["conditions"].append(_condition(names[-1], whole, {name: r for name, r in runs.items() if r}))
            found["curves"] += _curves(names[-1], runs)
    if not found["conditions"]:
        raise TrainingError(f"{', '.join(map(str, paths))}: no run of the arm {REFERENCE} has ended yet")
    return found | {"words": future_words.paragraphs(found)}


def written(found: dict[str, Any], folder: Path, name: str = "report") -> list[Path]:
    """Write the report as Markdown and JSON, and its figures as SVG; returns their paths, the Markdown first."""
    from labkit.viz.effects import effect_curves_svg, effects_svg
    from labkit.viz.saving import save

    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    forest = differences(found["conditions"])
    figures = {}
    if forest:
        marks = (-CLEAR, CLEAR)
        figures[f"{name}.svg"] = effects_svg(forest, unit="nats per token", reference=REFERENCE, marks=marks)
    for number, curve in enumerate(found["curves"], 1):
        lines = {arm: {float(x): scores for x, scores in points} for arm, points in curve["lines"].items()}
        figures[f"{name}-curve-{number}.svg"] = effect_curves_svg(lines, curve["x"], curve["y"], curve["title"])
    for file, figure in figures.items():
        save(figure, folder / file)
    write_whole(folder / f"{name}.md", future_words.markdown(found, list(figures)))
    folders.write_json(folder / f"{name}.json", found)
    return [folder / f"{name}.md", folder / f"{name}.json", *(folder / file for file in figures)]


def differences(conditions: Sequence[dict[str, Any]]) -> dict[str, dict[str, tuple]]:
    """{condition: {arm: (difference to the baseline, low, high)}} in nats per token, as `effects_svg` draws it."""
    rows = {}
    for each in conditions:
        gaps = {one["name"]: one["difference"] for one in each["arms"] if "difference" in one}
        if gaps:
            rows[each["name"]] = {name: (gap["mean"], gap["low"], gap["high"]) for name, gap in gaps.items()}
    return rows


def _runs(path: Path, name: str, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
    """{seed: metrics, with "losses" and "history"} of the finished runs of an arm."""
    found = {}
    for seed in seeds:
        where = path / run_folder(name, seed)
        if (metrics := read_json(where / "metrics.json")) is not None:
            history = (read_json(where / "trainer_state.json") or {"log_history": []})["log_history"]
            found[seed] = metrics | {"losses": read_json(where / "losses.json"), "history": history}
    return found


def _require_same_rows(runs: dict[str, dict[int, dict]], path: Path) -> None:
    """All arms of a seed must have been trained on the same rows in the same order."""
    orders: dict[int, set[str]] = {}
    for each in runs.values():
        for seed, metrics in each.items():
            orders.setdefault(seed, set()).add(metrics["data_order"])
    if uneven := [seed for seed, found in orders.items() if len(found) > 1]:
        raise TrainingError(f"{path}: the arms of seed {uneven[0]} did not see the same rows in the same order")


def _condition(name: str, whole: dict[str, Any], runs: dict[str, dict[int, dict]]) -> dict[str, Any]:
    study, reference = whole["study"], runs[REFERENCE]
    together = len(runs) - 1
    arms = [_arm(arm, each, reference, together) for arm, each in runs.items()]
    keys = ("context", "width", "layers", "heads", "steps", "batch_size", "learning_rate", "dtype", "weight")
    return {
        "name": name, "texts": list(whole["texts"]), "tokens": whole["tokens"],
        "budget": {key: study[key] for key in keys}, "passes": _passes(study, whole), "arms": arms,
        "pairs": _pairs(runs), "parts": _parts(runs),
        "enough": len(runs) >= ARMS and min(map(len, runs.values())) >= SEEDS,
    }  # fmt: skip


def _passes(study: dict[str, Any], whole: dict[str, Any]) -> float:
    return study["steps"] * study["batch_size"] * study["context"] / whole["tokens"]["train"]


def _arm(name: str, runs: dict[int, dict], reference: dict[int, dict], together: int) -> dict[str, Any]:
    some = next(iter(runs.values()))
    found = {
        "name": name, "seeds": sorted(runs), "scores": [runs[seed]["val_loss"] for seed in sorted(runs)],
        **_mean([run["val_loss"] for run in runs.values()]),
        "train_loss": _mean([run["train_loss"] for run in runs.values()]), "parameters": some["parameters"],
        "flops_per_token": some["flops_per_token"], "seconds": median(run["seconds"] for run in runs.values()),
    }  # fmt: skip
    if "future_loss" in some:
        found["future_loss"] = _mean([run["future_loss"] for run in runs.values()])
    if name != REFERENCE and set(runs) & set(reference):
        found["difference"] = _gap(runs, reference, together)
    return found


def _mean(values: Sequence[float]) -> dict[str, Any]:
    middle, half = mean_interval(np.array(values, dtype=float))
    low, high = (None, None) if half is None else (float(middle - half), float(middle + half))
    return {"mean": float(middle), "low": low, "high": high}


def _counted(runs: dict[int, dict]) -> Counted:
    """The held-out rows as examples, their mean loss out of 1; rows that are neighbours in the text are one group."""
    above = np.array([runs[seed]["losses"]["rows"] for seed in sorted(runs)])
    numbers = np.arange(above.shape[1])
    return Counted(tuple(sorted(runs)), above, np.ones_like(above), numbers // NEIGHBOURS, tuple(map(str, numbers)))


def _gap(one: dict[int, dict], other: dict[int, dict], together: int = 1) -> dict[str, Any]:
    """Loss of `one` minus that of `other`, for new seeds and new rows of such text; negative: `one` is better."""
    gap = difference(_counted(one), _counted(other), together=together)
    return {
        "mean": gap.mean, "low": gap.low, "high": gap.high, "low_together": gap.low_together,
        "high_together": gap.high_together, "together": together, "of_texts": gap.of_texts, "of_seeds": gap.of_seeds,
        "n_seeds": gap.seeds, "n": gap.n,
    }  # fmt: skip


def _pairs(runs: dict[str, dict[int, dict]]) -> list[dict[str, Any]]:
    """What the controls say: columns against no loss, a shuffled target, a memory, fewer weights; and sources."""
    found = []
    for one in runs:
        kind, *rest = one.split(":")
        if kind not in SHUFFLED or rest[0] == NO_LOSS:
            continue
        others = [f"{kind}:{NO_LOSS}:{rest[1]}", f"{SHUFFLED[kind]}:{':'.join(rest)}", "memory", "smaller"]
        others += [f"future:{':'.join(rest)}"] if kind == "tokens" else []
        for other in others:
            if other in runs and set(runs[one]) & set(runs[other]):
                found.append({"one": one, "other": other, "difference": _gap(runs[one], runs[other])})
    return found


def _parts(runs: dict[str, dict[int, dict]]) -> list[dict[str, Any]]:
    """Losses by where in the row a token stands, and how much more they differ at its beginning than at its end."""
    return [_part(name, runs, weights) for name, weights in THIRDS.items()]


def _part(name: str, runs: dict[str, dict[int, dict]], weights: tuple[int, int, int]) -> dict[str, Any]:
    by_arm = {arm: {seed: _of_thirds(run, weights) for seed, run in each.items()} for arm, each in runs.items()}
    found = {}
    for arm, by_seed in by_arm.items():
        found[arm] = {"mean": float(np.mean(list(by_seed.values())))}
        shared = sorted(set(by_seed) & set(by_arm[REFERENCE]))
        if arm != REFERENCE and shared:
            found[arm]["difference"] = _mean([by_seed[seed] - by_arm[REFERENCE][seed] for seed in shared])
    return {"name": name, "arms": found}


def _of_thirds(run: dict[str, Any], weights: tuple[int, int, int]) -> float:
    thirds = np.array_split(np.array(run["losses"]["positions"]), 3)
    return float(sum(weight * third.mean() for weight, third in zip(weights, thirds, strict=True)))


def _curves(name: str, runs: dict[str, dict[int, dict]]) -> list[dict[str, Any]]:
    """Held-out loss against tokens read and against arithmetic, and how well the future is predicted."""
    found = []
    wanted = (
        ("val_loss", "tokens", "held-out loss, nats per token", "held-out loss by tokens read", "million tokens read"),
        ("val_loss", "flops", "held-out loss, nats per token", "held-out loss by arithmetic", "TFLOP of training"),
        ("future_loss", "tokens", "(1 - cosine) / 2", "how far off the predicted future is", "million tokens read"),
    )
    for value, along, y, title, x in wanted:
        lines = {}
        for arm, each in runs.items():
            points: dict[float, list[float]] = {}
            for metrics in each.values():
                unit = metrics["tokens"] / metrics["steps"] / 1e6
                unit *= metrics["flops_per_token"] / 1e6 if along == "flops" else 1
                for entry in metrics["history"]:
                    if value in entry:
                        points.setdefault(round(entry["step"] * unit, 6), []).append(entry[value])
            if points:
                lines[arm] = sorted(points.items())
        if lines:
            found.append({"condition": name, "kind": f"{value} by {along}", "title": f"{name}: {title}", "x": x, "y": y,
                          "lines": lines})  # fmt: skip
    return [*found, *_sweep(name, runs)]


def _sweep(name: str, runs: dict[str, dict[int, dict]]) -> list[dict[str, Any]]:
    """Held-out loss over how many positions ahead have a column, of arms that differ in nothing else."""
    lines: dict[str, list] = {}
    for arm, each in runs.items():
        kind, *rest = arm.split(":")
        if kind in COLUMNS and each:
            lines.setdefault(f"{kind}:{rest[0]}", []).append((int(rest[1]), [m["val_loss"] for m in each.values()]))
    lines = {series: sorted(points) for series, points in lines.items() if len(points) > 1}
    common = {"condition": name, "kind": "val_loss by future_dim", "title": f"{name}: how far ahead", "x": "future_dim"}
    return [common | {"y": "held-out loss, nats per token", "lines": lines}] if lines else []
