"""What the conditions of a comparison are called, so that no two of them are called the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

HARMLESS = "evaluate_every"  # differs where budgets do; it is named only where nothing else tells two apart


def of(each: dict[str, Any]) -> tuple[str, str, str]:
    """(name, model, method): which set was learned by what, or which of these a curve or an unfinished study is of."""
    if "set" in each:
        return each["set"]
    return each["condition"] if "condition" in each else each["name"], each["model"], each.get("method", "")


def named_apart(conditions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conditions, with what tells them apart in their names; as `set` what each was `of` before.

    The model and method, where several have learned a set; the settings, where one of them has learned it several
    times.
    """
    learners: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for each in conditions:
        name, *learner = of(each)
        learners[name].add(tuple(learner))
    found = []
    for each, settings in zip(conditions, settings_apart(conditions), strict=True):
        several = len(learners[each["name"]]) > 1
        learner = f" ({each['model']}, {each['method']})" if several else ""
        found.append(each | {"name": f"{each['name']}{learner}{settings}", "set": of(each)})
    return found


def settings_apart(conditions: Sequence[dict[str, Any]]) -> list[str]:
    """ ", at most 600 steps, rank 4" of each: in which settings it differs from others of its set and model."""
    alike: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for each in conditions:
        alike[of(each)].append(_settings(each))
    return [_what_differs(_settings(each), alike[of(each)]) for each in conditions]


def _settings(condition: dict[str, Any]) -> dict[str, Any]:
    return {**condition.get("budget", {}), **condition.get("settings", {})}


def _what_differs(mine: dict[str, Any], all_settings: Sequence[dict[str, Any]]) -> str:
    keys = dict.fromkeys(key for settings in all_settings for key in settings)
    differing = [key for key in keys if len({repr(settings.get(key)) for settings in all_settings}) > 1]
    if len(differing) > 1 and HARMLESS in differing:
        differing.remove(HARMLESS)
    return "".join(f", {_told(key, mine.get(key))}" for key in differing)


def _told(key: str, value: Any) -> str:
    return f"at most {value:,} steps" if key == "max_steps" and value else f"{key.replace('_', ' ')} {value}"
