"""The measured results that come with labkit: what benchmarks/results/ holds, also in an installed wheel."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from labkit.bench.arms import REFERENCE
from labkit.bench.effect_names import settings_apart
from labkit.errors import DataError
from labkit.resources import folder


def stored(name: str) -> dict[str, Any]:
    """The result called `name`, such as "mask_effect"; DataError, listing what there is, if there is none."""
    path = folder("results") / f"{name}.json"
    if not path.is_file():
        raise DataError(f"there is no stored result {name!r}; there are {', '.join(names())}")
    return json.loads(path.read_text(encoding="utf-8"))


def mask_effects(task: str | None = None) -> list[dict[str, Any]]:
    """The conditions of all stored comparisons (`labkit.bench.effect_report`), of one task or of all."""
    found = [each for name in names() if name.startswith("mask_effect") for each in stored(name)["conditions"]]
    return [each for each in found if task in (None, each["task"])]


def effect_curves(*kinds: str) -> list[dict[str, Any]]:
    """The curves of all stored comparisons: "learning", "adaptation", "layers", "size", "budget"; of these, or all.

    `labkit.bench.effect_series.picture` draws one.
    """
    found = [each for name in names() if name.startswith("mask_effect") for each in stored(name)["curves"]]
    return [each for each in found if not kinds or each["kind"] in kinds]


def differences(conditions: Sequence[dict[str, Any]]) -> dict[str, dict[str, tuple]]:
    """{condition: {arm: (difference to causal, low, high)}} in points, as `labkit.viz.effects_svg` draws it.

    The two halves of Which way round follow the whole of it. Who has not learned the task is marked, also causal.
    """
    named = [
        Counter(key for key in keys) for keys in zip(*((e["model"], e.get("method")) for e in conditions), strict=True)
    ]
    rows: dict[str, dict[str, tuple]] = {}
    seen: Counter[str] = Counter()
    for each, apart in zip(conditions, settings_apart(conditions), strict=True):
        label = f"{each['name']} (n = {each['n_test']:,})"
        label += "".join(
            f", {key}" for key, of in zip((each["model"], each.get("method")), named, strict=True) if len(of) > 1
        )
        label += apart
        label += "".join(
            f", {REFERENCE} unlearned"
            for one in each["arms"]
            if one["name"] == REFERENCE and not one.get("learned", True)
        )
        seen[label] += 1
        label += f", study {seen[label]}" if seen[label] > 1 else ""
        halves = [part for part in each.get("parts", ()) if part["name"].endswith(" decides")]  # two sets in one
        found = {label: _gaps({one["name"]: one for one in each["arms"]})}
        found |= {f"{label}: where {part['name']} (n = {part['n']:,})": _gaps(part["arms"]) for part in halves}
        rows |= {name: gaps for name, gaps in found.items() if gaps}
    return rows


def _gaps(arms: dict[str, dict[str, Any]]) -> dict[str, tuple]:
    """{arm: (difference, low, high)} of those that have one; the name says so where an arm has not learned the task."""
    with_one = {
        name if one.get("learned", True) else f"{name} (unlearned)": one["difference"]
        for name, one in arms.items()
        if "difference" in one
    }
    return {name: tuple(gap[key] for key in ("mean", "low", "high")) for name, gap in with_one.items()}


def effect_lines(conditions: Sequence[dict[str, Any]]) -> list[str]:
    """Of stored comparisons, to be printed: every arm with its seeds, and what the arms say to each other.

    An arm that is not shown to be better than a baseline which needs no model is marked: it has not learned the task.
    """
    from labkit.bench.effect_gaps import points

    told = []
    for each, apart in zip(conditions, settings_apart(conditions), strict=True):
        baseline = f", best baseline {max(each['baselines'].values()):.1f}" if each["baselines"] else ""
        told.append(f"{each['name']}, {each['model']}{apart}, n = {each['n_test']:,}{baseline}")
        for one in each["arms"]:
            seeds = f"{one['n_seeds']} seed" + ("" if one["n_seeds"] == 1 else "s")
            mark = "" if one["learned"] else "   not shown to be better than a baseline"
            told.append(f"    {one['name']:22}{one['mean']:5.1f}   {seeds}{mark}")
        for pair in each["pairs"]:
            beyond = f", of which {points(pair['beyond'])} beyond the mask alone" if "beyond" in pair else ""
            told.append(f"    {pair['one']} less {pair['other']}: {points(pair['difference'])}{beyond}")
    return told


def fusion_qualities(model: str | None = None) -> list[dict[str, Any]]:
    """The conditions of all stored comparisons of fusion (`labkit.bench.fusion_report`), of one model or of all."""
    found = [each for name in names() if name.startswith("fusion_quality") for each in stored(name)["conditions"]]
    return [each for each in found if model in (None, each["model"])]


def fusion_differences(conditions: Sequence[dict[str, Any]]) -> dict[str, dict[str, tuple]]:
    """{condition: {"fuse, N = 5": (difference to the mean of single prompts, low, high)}}, in points."""
    rows: dict[str, dict[str, tuple]] = {}
    for each in conditions:
        compared = sorted((row for row in each["rows"] if "to_single" in row), key=lambda row: row["method"])
        gaps = {
            f"{row['method']}, N = {row['paraphrases']}": tuple(row["to_single"][k] for k in ("mean", "low", "high"))
            for row in compared
        }
        sizes = sorted({row["n"] for row in compared})
        n = " to ".join(f"{size:,}" for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]))
        label = f"{each['name']}, {each['model']} (n = {n})"
        same = sum(known.startswith(label) for known in rows)  # another study of the same condition
        if gaps:
            rows[label + (f", study {same + 1}" if same else "")] = gaps
    return rows


def future_attentions() -> list[dict[str, Any]]:
    """The conditions of all stored comparisons of Future Attention (`labkit.bench.future_report`)."""
    return [each for name in names() if name.startswith("future_attention") for each in stored(name)["conditions"]]


def names() -> list[str]:
    """The results there are."""
    return sorted(path.stem for path in folder("results").glob("*.json"))
