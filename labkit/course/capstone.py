"""The self-check of the capstone (A6): are its runs what the assignment asks for, and how do the arms differ?

runs, differences, faults = check_runs("runs", {"causal": "causal", "unmasked": "bidirectional"}, "ner", files)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from labkit.datasets import readers
from labkit.datasets.checks import check_files
from labkit.run_folder import changes, read_json
from labkit.tasks.finetune import digest

VARIED = ("mask", "window", "layers", "readings", "model")  # what may differ between two arms, and at least one does


def check_runs(
    folder: str | Path, arms: Mapping[str, str], task: str, files: Sequence[str | Path]
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The runs, the difference of each arm to the first arm, and the faults, one line each.

    Args:
        folder: contains a folder for each arm, and in it a run folder of `labkit train` or `finetune` for each seed.
        arms: the mask that each arm should have, "causal" or "bidirectional".
        task: qa, ner or classify.
        files: what was trained on and scored: train, dev (if there is one) and test, in this order.

    Scores are F1 (qa, ner) or accuracy (classify) on test, in points from 0 to 100. The interval is the one of lesson
    14: for other seeds and other test groups. A group is a passage or a document, or an example without one.
    """
    sides = {"train": Path(files[0]), "test": Path(files[-1])} | ({"dev": Path(files[1])} if files[2:] else {})
    digests = {side: digest(readers.scan(task, path).examples) for side, path in sides.items()}
    faults = [f"{Path(of['path']).name}: {fault}" for of in check_files(task, files) for fault in of["faults"]]
    there = [arm for arm in arms if Path(folder, arm).is_dir()]
    faults += [f"there is no folder {Path(folder, arm)}" for arm in arms if arm not in there]
    rows, firsts = [], {}  # firsts: {arm: configuration of its first run}
    judged: dict[str, dict[int, pd.DataFrame]] = {arm: {} for arm in arms}
    for arm, mask in arms.items():
        for run in sorted(file.parent for file in Path(folder, arm).glob("*/config.json")):
            where, config, metrics = f"{arm}/{run.name}", *map(read_json, (run / "config.json", run / "metrics.json"))
            if metrics is None:
                faults.append(f"{where}: metrics.json is missing, so the run is not finished")
                continue
            settings, measured = config["settings"], metrics["mask"]["measured"]
            if measured != mask:
                faults.append(f"{where}: the arm should be {mask}, but the measured mask is {measured}")
            for side in (foreign := [side for side in sides if config[side] != digests[side]]):
                faults.append(f"{where}: its {side} examples are not those of {sides[side].name}")
            other = arm if arm in firsts else next(iter(firsts), arm)  # a new arm is compared with the reference
            free, tuned = (sides, ["seed"]) if other == arm else ((*sides, *VARIED), ["seed", "learning_rate"])
            firsts.setdefault(arm, config)
            same = {name: firsts[other][name] for name in free}
            same["settings"] = settings | {name: firsts[other]["settings"][name] for name in tuned}
            if changed := changes(firsts[other], config | same):
                faults.append(f"{where}: it differs from the first run of {other}: {changed}")
            row = {"arm": arm, "seed": settings["seed"], "mask": measured, "readings": config["readings"]}
            row |= {"model": "/".join(Path(config["model"]).parts[-2:]), "rate": settings["learning_rate"]}
            row |= {name: metrics[name] for name in ("n_train", "steps")}
            if "test" not in foreign:
                groups = judged[arm][settings["seed"]] = _judged(run / "judged.test.jsonl")
                best = max(metrics["baselines"]["test"].values())
                row |= {"score": _score(groups.to_numpy()), "baseline": best if task == "qa" else 100 * best}
            rows.append(row)
    seeds = {arm: Counter(row["seed"] for row in rows if row["arm"] == arm) for arm in arms}
    every = sorted(set().union(*seeds.values()))
    faults += [f"{arm}: seed {seed} is missing" for arm in there for seed in every if seed not in seeds[arm]]
    faults += [f"{arm}: {n} runs have the seed {s}" for arm in arms for s, n in seeds[arm].items() if n > 1]
    what = {arm: [config[name] for name in VARIED] for arm, config in firsts.items()}
    faults += [f"{b} has the mask, readings and model of {a}" for a, b in combinations(what, 2) if what[a] == what[b]]
    if len(arms) < 4 or len(every) < 3:
        faults.append(f"there are {len(arms)} arms and {len(every)} seeds; at least 4 and 3 are required")
    return pd.DataFrame(rows), _differences(judged), faults


def _judged(file: Path) -> pd.DataFrame:
    """For each test group the two numbers whose ratio is the score, such as 2 correct and predicted + gold for F1."""
    numbers = {}
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if "gold" in line:  # entities
            correct, predicted, gold = (sum(line[name].values()) for name in ("correct", "predicted", "gold"))
            ratio = (2 * correct, predicted + gold)
        else:
            ratio = (line["f1"] / 100 if "f1" in line else line["correct"], 1)
        group = line["group"] or f"example {line['id']}"
        numbers[group] = np.add(numbers.get(group, 0.0), ratio)
    return pd.DataFrame.from_dict(numbers, orient="index", columns=["above", "below"])


def _score(groups: np.ndarray) -> Any:
    """The score in points of (..., groups, 2); 0 where nothing could be found."""
    above, below = np.moveaxis(groups.sum(-2), -1, 0)
    return 100 * np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _differences(judged: Mapping[str, Mapping[int, pd.DataFrame]]) -> pd.DataFrame:
    """Each arm minus the first one, paired by seed and by test group, over the seeds that both have."""
    first, *others = judged
    rows = []
    for arm in others:
        seeds = sorted(judged[first].keys() & judged[arm].keys())
        if len(seeds) > 1:
            pair = np.array([[judged[name][seed] for seed in seeds] for name in (arm, first)])
            rows.append({"arm": f"{arm} minus {first}", "seeds": len(seeds)} | _interval(pair))
    return pd.DataFrame(rows)


def _interval(pair: np.ndarray) -> dict[str, float | bool]:
    """The mean difference of (2, seeds, groups, 2) and its 95 % interval; one group, or equal results, have none."""

    def difference(drawn: np.ndarray, axis: int) -> np.ndarray:  # scipy gives the numbers of groups, (..., groups)
        return np.subtract(*_score(pair[:, :, drawn.astype(int)])).mean(0)

    by_seed, n, low, high = np.subtract(*_score(pair)), pair.shape[2], math.nan, math.nan
    if n > 1 and not np.array_equal(*pair):
        options = {"n_resamples": 5000, "batch": 100, "method": "percentile", "random_state": 0}
        drawn = stats.bootstrap((np.arange(n),), difference, **options).bootstrap_distribution
        widen = math.sqrt(n / (n - 1)) * stats.t.ppf(0.975, n - 1) / stats.norm.ppf(0.975)
        error = stats.sem(by_seed) * np.random.default_rng(1).standard_t(len(by_seed) - 1, len(drawn))
        low, high = np.quantile(by_seed.mean() + widen * (drawn - by_seed.mean()) + error, [0.025, 0.975])
    return {"difference": by_seed.mean(), "low": low, "high": high, "significant": bool(low > 0 or high < 0)}
