"""The measured results that come with labkit, as pandas DataFrames.

    from labkit import results

    rows = results.load("mask_effect")  # one row for each condition, arm and part of the test set
    rows.query("task == 'ner' and part == 'all'")[["label", "arm", "n_seeds", "mean", "difference"]]

The files are the JSON files of benchmarks/results/, which an installed wheel contains too. `difference` is the arm
minus its reference, with a 95 % interval from `difference_low` to `difference_high`; the reference has none.
"""

from __future__ import annotations

import json
from typing import Any

from labkit.errors import DataError, needs_extra
from labkit.files import folder

with needs_extra():
    import pandas as pd


def load(name: str) -> pd.DataFrame:
    """The result called `name`, one row for each measurement. Columns that all studies have:

    condition, label (condition, model, steps and n: unique for each group of rows that belong together), arm, part
    ("all", a part of the test set, or "100 training examples"), n, mean, low, high, difference, difference_low,
    difference_high. all_low to all_high, where given, is the wider interval that holds for all differences of the
    condition at once (Bonferroni).

    "mask_effect" also has task, model, method, steps, n_train, n_seeds, scores (of each seed), baseline (the best score
    without a model), learned (whether the arm is significantly better than that), and half the width that the interval
    would have from the texts alone and from the seeds alone: of_texts, of_seeds. "fusion_quality" also has model,
    method, paraphrases, templates and to_average, the difference to logit averaging. "future_attention" also has
    n_seeds, scores, parameters and flops_per_token. Raises DataError if there is no such table.
    """
    data = read(name)
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
    return pd.DataFrame(read(name)["pairs"])


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
        names = sorted(file.stem for file in path.parent.glob("*.json"))
        raise DataError(f"there is no stored result {name!r}; there are {', '.join(names)}")
    return json.loads(path.read_text(encoding="utf-8"))
