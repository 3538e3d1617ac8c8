"""The measured results that come with labkit, as pandas DataFrames.

    from labkit import results

    rows = results.load("mask_effect")  # one row for each condition, arm and part of the test set
    rows.query("task == 'ner' and part == 'all'")[["label", "arm", "n_seeds", "mean", "difference"]]

The files are the JSON files of benchmarks/results/, which an installed wheel contains too. `difference` is the arm
minus its reference, with a 95 % interval from `difference_low` to `difference_high`; the reference has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from labkit.errors import DataError
from labkit.files import folder


def load(name: str) -> pd.DataFrame:
    """The result called `name`, one row for each measurement. Columns that all studies have:

    condition, label (condition, model, steps and n: unique for each group of rows that belong together), arm, part
    ("all", a part of the test set, or "100 training examples"), n, mean, low, high, difference, difference_low,
    difference_high.

    "mask_effect" also has task, model, method, steps, n_train, n_seeds, baseline (the best score without a model),
    learned (whether the arm is significantly better than that), and half the width that the interval would have from
    the texts alone and from the seeds alone: of_texts, of_seeds. "fusion_quality" also has model, method,
    paraphrases, templates and to_average, the difference to logit averaging. "future_attention" also has n_seeds,
    parameters and flops_per_token. Other files have one row for each of their "rows" or "results".

    Raises:
        DataError: there is no such result, or it is not a table (`read` returns what the file holds).
    """
    data = read(name)
    if name in _TABLES:
        return pd.DataFrame([row for condition in data["conditions"] for row in _TABLES[name](condition)])
    rows = data.get("rows", data.get("results"))
    if not isinstance(rows, list):
        raise DataError(f"the result {name!r} is not a table: use labkit.results.read({name!r})")
    return pd.json_normalize(rows)


def curves(name: str) -> pd.DataFrame:
    """The curves of a study, one row for each seed of each point.

    Columns: condition, model, title, kind, x_name, y_name, line, x, seed (counted from 0) and score.
    """
    return pd.DataFrame(
        {"condition": curve["condition"], "model": curve.get("model"), "kind": curve["kind"], "title": curve["title"]}
        | {"x_name": curve["x"], "y_name": curve["y"], "line": line, "x": x, "seed": seed, "score": score}
        for curve in read(name)["curves"]
        for line, points in curve["lines"].items()
        for x, scores in points
        for seed, score in enumerate(scores)
    )


def pairs(name: str) -> pd.DataFrame:
    """Arms or methods compared directly, one row for each pair.

    Columns: label, condition, model, one, other, and the difference `one` minus `other`, as in `load`.
    """
    return pd.DataFrame(
        _about(condition)
        | {"one": pair["one"], "other": pair["other"], "paraphrases": pair.get("paraphrases")}
        | _difference(pair["difference"])
        for condition in read(name)["conditions"]
        for pair in condition["pairs"]
    ).dropna(axis="columns", how="all")


def by_label(rows: pd.DataFrame) -> dict[str, dict[str, tuple[float, float, float]]]:
    """{label: {arm: (difference, low, high)}}, as `labkit.viz.forest_figure` draws it.

    An arm that is not significantly better than the best baseline is marked "(unlearned)", the reference in the label.
    """
    groups: dict[str, dict[str, tuple[float, float, float]]] = {}
    for (label, part), arms in rows.groupby(["label", "part"], sort=False):
        label += "" if part == "all" else f": {part} (n = {arms.n.max():,})"
        reference, others = arms[arms.difference.isna()], arms[arms.difference.notna()]
        if "learned" in arms and not reference.learned.all():
            label += f", {', '.join(reference.arm)} unlearned"
        for row in others.to_dict("records"):
            arm = row["arm"] if row.get("learned", True) else f"{row['arm']} (unlearned)"
            groups.setdefault(label, {})[arm] = (row["difference"], row["difference_low"], row["difference_high"])
    return groups


def read(name: str) -> dict[str, Any]:
    """What the file of the result called `name` holds."""
    path = folder("results") / f"{name}.json"
    if not path.is_file():
        raise DataError(f"there is no stored result {name!r}; there are {', '.join(names())}")
    return json.loads(path.read_text(encoding="utf-8"))


def names() -> list[str]:
    """The names of all results."""
    return sorted(path.stem for path in folder("results").glob("*.json"))


def _by_arm(condition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arms on the whole test set, on its parts, and after training on fewer examples."""
    whole = {arm["name"]: arm | {"n_seeds": len(arm["seeds"])} for arm in condition["arms"]}
    for part in [{"name": "all", "arms": whole}, *condition.get("parts", ())]:
        for name, arm in part["arms"].items():
            # a part of the test set has no interval of its own, and perhaps no difference
            of_part = whole[name] | {"low": None, "high": None, "difference": None, "n": part.get("n")} | arm
            yield _about(condition) | {"part": part["name"]} | _arm(name, of_part, condition)
    for size in condition.get("sizes", ()):
        if size["size"] < condition["n_train"]:
            smaller = {"n_train": size["size"], "part": f"{size['size']} training examples"}
            for name, arm in size["arms"].items():
                yield _about(condition, size["steps"]) | smaller | _arm(name, arm, condition)


def _by_method(condition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in condition["rows"]:
        settings = {key: row[key] for key in ("method", "paraphrases", "n")}
        settings |= {"part": "all", "arm": f"{row['method']}, N = {row['paraphrases']}"}
        measured = _score(row["accuracy"]) | _difference(row.get("to_single"))
        yield _about(condition) | settings | measured | _difference(row.get("to_average"), "to_average")


_TABLES = {"mask_effect": _by_arm, "future_attention": _by_arm, "fusion_quality": _by_method}
_OF_CONDITION = ("model", "task", "metric", "method", "n_train", "templates")
_OF_ARM = ("n_seeds", "learned", "measured_mask", "parameters", "flops_per_token")


def _about(condition: dict[str, Any], steps: int | None = None) -> dict[str, Any]:
    steps = steps or condition.get("arms", [{}])[0].get("steps")
    facts = [condition["name"], condition.get("model"), f"{steps} steps" if steps else None]
    n = condition.get("n_test") or _rows(condition) or max(row["n"] for row in condition["rows"])
    about = {"label": f"{', '.join(filter(None, facts))} (n = {n:,})", "condition": condition["name"]}
    about |= {key: condition[key] for key in _OF_CONDITION if condition.get(key) is not None}
    if steps:
        about["steps"] = steps
    if "baselines" in condition:
        about["baseline"] = max(condition["baselines"].values())
    return about


def _rows(condition: dict[str, Any]) -> int | None:
    return condition.get("tokens", {}).get("rows")


def _arm(name: str, arm: dict[str, Any], condition: dict[str, Any]) -> dict[str, Any]:
    difference = arm.get("difference") or {}
    row = {"arm": name, "n": arm.get("n") or _rows(condition)} | {key: arm[key] for key in _OF_ARM if key in arm}
    row |= _score(arm) | _difference(difference)
    return row | {key: difference.get(key) for key in ("of_texts", "of_seeds")}


def _score(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: measured.get(key) for key in ("mean", "low", "high")}


def _difference(measured: dict[str, Any] | None, name: str = "difference") -> dict[str, Any]:
    mean, low, high = _score(measured or {}).values()
    return {name: mean, f"{name}_low": low, f"{name}_high": high}
