"""What makes a condition of a comparison another one, and what each is called, so that no two are called the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, TypeVar

Each = TypeVar("Each")
HARMLESS = "evaluate_every"  # differs where budgets do; it is named only where nothing else tells two apart
COUNTS = {"n_train": "training examples", "n_dev": "dev examples", "n_test": "test examples"}


def of(each: dict[str, Any]) -> tuple[str, str, str]:
    """(name, model, method): which set was learned by what, or which of these a curve or an unfinished study is of."""
    if "set" in each:
        return each["set"]
    return each["condition"] if "condition" in each else each["name"], each.get("model", ""), each.get("method", "")


def settings(each: dict[str, Any]) -> dict[str, Any]:
    """Its budget and its other settings, as far as its report has written them down; without what was not in use."""
    found = {**each.get("budget", {}), **each.get("settings", {})}
    if of(each)[2] != "lora":
        found.pop("rank", None)
    return found


def are_as_many(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both conditions have as many examples to learn from, to choose by and to be tested on."""
    return all(one[key] == other[key] for key in COUNTS)


def agree(one: dict[str, Any], other: dict[str, Any], but: Collection[str] = ()) -> bool:
    """Whether what both have written down of their budget and settings is the same, apart from these keys."""
    mine, theirs = settings(one), settings(other)
    return all(mine[key] == theirs[key] for key in (mine.keys() & theirs.keys()) - set(but))


def shared(together: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all of them have written down of their budget and settings, and have the same."""
    first, *others = map(settings, together)
    return {k: value for k, value in first.items() if all(k in each and each[k] == value for each in others)}


def grouped(those: Sequence[Each], are_alike: Callable[[Each, Each], bool]) -> list[list[Each]]:
    """Those of which all are alike together, in the order of the first of each group.

    Likeness is not transitive: what an older report has not written down is like either of two that differ in it.
    """
    found: list[list[Each]] = []
    for each in those:
        if group := next((group for group in found if all(are_alike(each, one) for one in group)), None):
            group.append(each)
        else:
            found.append([each])
    return found


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
    for each, apart in zip(conditions, settings_apart(conditions), strict=True):
        several = len(learners[each["name"]]) > 1
        learner = f" ({each['model']}, {each['method']})" if several else ""
        found.append(each | {"name": f"{each['name']}{learner}{apart}", "set": of(each)})
    return found


def settings_apart(conditions: Sequence[dict[str, Any]]) -> list[str]:
    """ ", at most 600 steps, rank 4" of each: in what it differs from others of its set, model and method."""
    return _apart([of(each) for each in conditions], [_facts(each) for each in conditions])


def methods_apart(series: Sequence[dict[str, Any]]) -> list[str]:
    """ ", lora, rank 4" of each: in what, its method included, it differs from others of its set and model."""
    found = [of(each) for each in series]
    made_with = [{"method": method, **_facts(each)} for (*_, method), each in zip(found, series, strict=True)]
    return _apart([(name, model) for name, model, _ in found], made_with)


def _facts(each: dict[str, Any]) -> dict[str, Any]:
    return settings(each) | {key: each[key] for key in COUNTS if key in each}


def _apart(groups: Sequence[Hashable], made_with: Sequence[dict[str, Any]]) -> list[str]:
    together: dict[Hashable, list[dict[str, Any]]] = defaultdict(list)
    for group, each in zip(groups, made_with, strict=True):
        together[group].append(each)
    return [_what_differs(each, together[group]) for group, each in zip(groups, made_with, strict=True)]


def _what_differs(mine: dict[str, Any], together: Sequence[dict[str, Any]]) -> str:
    keys = dict.fromkeys(key for each in together for key in each)
    differing = [key for key in keys if _differs([each[key] for each in together if key in each])]
    if HARMLESS in differing:
        others = [key for key in differing if key != HARMLESS]
        if sum(_told_of(each, others) == _told_of(mine, others) for each in together) == 1:
            differing = others
    return _told_of(mine, differing)


def _differs(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _told_of(mine: dict[str, Any], keys: Sequence[str]) -> str:
    """What it has written down of these; what an older report has not, cannot be told."""
    return "".join(f", {_told(key, mine[key])}" for key in keys if key in mine)


def _told(key: str, value: Any) -> str:
    if key == "method":
        return value
    if key in COUNTS:
        return f"{value:,} {COUNTS[key]}"
    return f"at most {value:,} steps" if key == "max_steps" and value else f"{key.replace('_', ' ')} {value}"
