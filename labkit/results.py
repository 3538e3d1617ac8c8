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
    """Arms or methods compared directly, one row for each pair: label, condition, model, one, other, and the difference
    `one` minus `other`, as in `load`."""
    return pd.DataFrame(
        _about(condition)
        | {"one": pair["one"], "other": pair["other"], "paraphrases": pair.get("paraphrases")}
        | _interval(pair["difference"], "difference")
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


def _mask_effect(condition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    about = _about(condition) | {key: condition[key] for key in ("task", "metric", "method", "n_train")}
    about["baseline"] = max(condition["baselines"].values())
    whole = {arm["name"]: arm for arm in condition["arms"]}
    for name, arm in whole.items():
        yield about | {"part": "all"} | _arm(name, arm)
    for part in condition.get("parts", ()):
        for name, arm in part["arms"].items():
            yield about | {"part": part["name"]} | _arm(name, whole[name] | _OF_THE_WHOLE | arm, part["n"])
    for size in condition["sizes"]:
        if size["size"] < condition["n_train"]:
            smaller = {"n_train": size["size"], "part": f"{size['size']} training examples"}
            for name, arm in size["arms"].items():
                yield about | _about(condition, size["steps"]) | smaller | _arm(name, arm)


def _fusion_quality(condition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    about = _about(condition) | {"templates": condition["templates"], "part": "all"}
    for row in condition["rows"]:
        settings = {key: row[key] for key in ("method", "paraphrases", "n")}
        measured = _interval(row["accuracy"], "mean", "") | _interval(row.get("to_single"), "difference")
        about["arm"] = f"{row['method']}, N = {row['paraphrases']}"
        yield about | settings | measured | _interval(row.get("to_average"), "to_average")


def _future_attention(condition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    n = condition["tokens"]["rows"]
    whole = {arm["name"]: arm | {"n_seeds": len(arm["seeds"])} for arm in condition["arms"]}
    for part in [{"name": "all", "arms": whole}, *condition["parts"]]:
        for name, arm in part["arms"].items():
            size = {key: whole[name][key] for key in ("parameters", "flops_per_token")}
            about = _about(condition) | {"part": part["name"]}
            yield about | size | _arm(name, whole[name] | _OF_THE_WHOLE | arm, n)


_TABLES = {"mask_effect": _mask_effect, "fusion_quality": _fusion_quality, "future_attention": _future_attention}
_OF_THE_WHOLE = {"low": None, "high": None, "difference": None}  # a part of the test set does not take these over


def _about(condition: dict[str, Any], steps: int | None = None) -> dict[str, Any]:
    steps = steps or condition.get("arms", [{}])[0].get("steps")
    facts = [condition["name"], condition.get("model"), f"{steps} steps" if steps else None]
    n = condition.get("n_test") or condition.get("tokens", {}).get("rows") or max(r["n"] for r in condition["rows"])
    about = {"label": f"{', '.join(filter(None, facts))} (n = {n:,})", "condition": condition["name"]}
    return about | {key: value for key, value in (("model", condition.get("model")), ("steps", steps)) if value}


def _arm(name: str, arm: dict[str, Any], n: int | None = None) -> dict[str, Any]:
    row = {"arm": name, "n": n or arm["n"], "n_seeds": arm["n_seeds"], **_interval(arm, "mean", "")}
    difference = arm.get("difference") or {}
    row |= _interval(difference, "difference") | {key: difference.get(key) for key in ("of_texts", "of_seeds")}
    return row | {key: arm[key] for key in ("learned", "measured_mask") if key in arm}


def _interval(measured: dict[str, Any] | None, name: str, prefix: str | None = None) -> dict[str, Any]:
    prefix = f"{name}_" if prefix is None else prefix
    values = measured or {}
    return {name: values.get("mean"), f"{prefix}low": values.get("low"), f"{prefix}high": values.get("high")}
