"""The report of a comparison in words: what the numbers say, and what they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.bench.arms import REFERENCE

CLAIM = 5.0  # points: "bidirectional attention gives +5 to 10 %", found in many READMEs, and without a source


def paragraphs(found: dict[str, Any]) -> list[str]:
    """When the mask helps and by how much, what the controls say, what is not known; from the numbers alone."""
    conditions = found["conditions"]
    told = [_removed(conditions), *_unlearned(conditions)]
    told += [text for text in (_repeated(conditions), _adapted(conditions), _others(conditions)) if text]
    told += [text for text in (_diagnostic(conditions), _claim(conditions)) if text]
    return [*told, _unknown(conditions), *_unfinished(found.get("unfinished", ()))]


def markdown(found: dict[str, Any], figure: str | None, curves: Sequence[str]) -> str:
    """The whole report as one Markdown file: `figure` is that of all differences, `curves` one file for each curve."""
    parts = ["# What the mask buys", "", *[f"{text}\n" for text in found["words"]]]
    parts += [f"![all differences]({figure})", ""] if figure else []
    parts += [
        "Scores are test F1 in points (accuracy where it says so): mean over the seeds with Student's 95 % interval. "
        f"Differences are to {REFERENCE}, paired by seed and example: 95 % by a bootstrap over groups of examples and "
        "Student's t over the seeds. The learning rate of each arm was chosen on dev, with another seed, before the "
        "test set was read.",
        "",
    ]
    for each in found["conditions"]:
        parts += _table(each)
    parts += ["## Curves", ""] if curves else []
    parts += [f"![{curve['title']}]({file})\n" for curve, file in zip(found["curves"], curves, strict=True)]
    return "\n".join(parts).rstrip() + "\n"


def points(gap: dict[str, Any]) -> str:
    """+3.2 [1.1, 5.3], without an interval if there is none."""
    if gap["low"] is None:
        return f"{gap['mean']:+.1f} (one seed)"
    return f"{gap['mean']:+.1f} [{gap['low']:.1f}, {gap['high']:.1f}]"


def verdict(gap: dict[str, Any]) -> str:
    """ "helps", "harms", or "open": the interval has zero in it, or there is none."""
    if gap["low"] is None or gap["low"] <= 0 <= gap["high"]:
        return "open"
    return "helps" if gap["mean"] > 0 else "harms"


def _removed(conditions: Sequence[dict]) -> str:
    gaps = _differences(conditions, "bidirectional")
    if not gaps:
        return "**Removing the mask** was not measured: the arm bidirectional has no finished run."
    return f"**Removing the mask, and nothing else,** {sorted_out(gaps)}."


def learned(condition: dict[str, Any]) -> bool:
    """Whether some arm is better than everything that needs no model; True where there is no such baseline."""
    best = max(one["mean"] for one in condition["arms"])
    return not condition["baselines"] or best > max(condition["baselines"].values())


def _unlearned(conditions: Sequence[dict]) -> list[str]:
    names = [each["name"] for each in conditions if not learned(each)]
    if not names:
        return []
    return [
        f"**Not learned:** in {', '.join(names)} no arm is better than a baseline that needs no model. Differences "
        "there are between models that fail, and say nothing of the mask."
    ]


def _unfinished(found: Sequence[dict]) -> list[str]:
    told = []
    for each in found:
        text = f"{each['name']}, {each['done']} of {each['planned']} runs"
        if each["without"]:
            text += f" (none of {', '.join(each['without'])}"
            text += "; so nothing of it can be compared)" if REFERENCE in each["without"] else ")"
        told.append(text)
    return [f"**Unfinished:** {'; '.join(told)}."] if told else []


def _repeated(conditions: Sequence[dict]) -> str:
    gaps = _differences(conditions, "repeated")
    if not gaps:
        return ""
    text = f"**The control: mask left in place, input read twice.** It {sorted_out(gaps)}."
    against = [
        (each, pair["difference"])
        for each in conditions
        for pair in each["pairs"]
        if (pair["one"], pair["other"]) == ("bidirectional", "repeated")
    ]
    if against:
        text += f" Against it, the unmasked model {sorted_out(against, 'is better', 'is worse')}."
    return text


def _adapted(conditions: Sequence[dict]) -> str:
    names = {one["name"] for each in conditions for one in each["arms"] if one["name"].startswith(("mntp:", "mlm:"))}
    told = []
    for name in sorted(names, key=lambda each: (each.partition(":")[0], int(each.partition(":")[2]))):
        objective, _, steps = name.partition(":")
        text = f"**After {steps} steps of {objective.upper()}** the unmasked model "
        text += sorted_out(_differences(conditions, name))
        against = [
            (each, pair["difference"])
            for each in conditions
            for pair in each["pairs"]
            if pair["one"] == name and pair["other"] == f"next:{steps}"
        ]
        if against:
            told_apart = sorted_out(against, "is better", "is worse")
            text += f"; against the causal model with as many steps of next-token prediction it {told_apart}"
        told.append(text + ".")
    return " ".join(told)


def _others(conditions: Sequence[dict]) -> str:
    told = []
    names = dict.fromkeys(one["name"] for each in conditions for one in each["arms"])
    for name in names:
        if name.startswith(("unmask:", "encoder:")) or name == "right-to-left":
            told.append(f"{name} {sorted_out(_differences(conditions, name))}")
    return f"**Other arms.** {'; '.join(told)}." if told else ""


def _diagnostic(conditions: Sequence[dict]) -> str:
    told = []
    for each in conditions:
        if "diagnostic" not in each:
            continue
        for name, halves in each["diagnostic"].items():
            after = halves["after"]
            right = ", ".join(str(n) for n in after["right"])
            over = (
                f"over the ceiling in {after['triples_over']} triples"
                if after["triples_over"]
                else "never over the ceiling"
            )
            told.append(f"{name} {right} of {after['of']} ({over})")
    if not told:
        return ""
    return (
        "**Sanity check** (Which way round, the names that only what follows can tell; a model that has not seen it is "
        f"right on one of three at most), right by seed: {'; '.join(told)}."
    )


def _claim(conditions: Sequence[dict]) -> str:
    known = [each for each in conditions if learned(each)]
    gaps = [gap for _, gap in _differences(known, "bidirectional") if gap["low"] is not None]
    if not gaps:
        return ""
    below, above = sum(gap["high"] < CLAIM for gap in gaps), sum(gap["low"] >= CLAIM for gap in gaps)
    return (
        f"**The common claim, +{CLAIM:.0f} to {2 * CLAIM:.0f} points from removing the mask:** of {len(gaps)} "
        f"conditions with an interval it is ruled out in {below}, borne out in {above}, and open in "
        f"{len(gaps) - below - above}."
    )


def _unknown(conditions: Sequence[dict]) -> str:
    models = sorted({f"{each['model']} ({each['method']})" for each in conditions})
    count = sum("difference" in one for each in conditions for one in each["arms"])
    seeds = sorted({one["n_seeds"] for each in conditions for one in each["arms"]})
    steps = sorted({int(one["steps"]) for each in conditions for one in each["arms"]})
    return (
        f"**Not known:** other models than {', '.join(models)}; larger budgets than {_range(steps)} steps; other grids "
        f"of learning rates. Seeds per arm: {_range(seeds)}. Of {count} comparisons with {REFERENCE}, about "
        f"{0.05 * count:.1f} would leave out zero by chance alone if nothing differed."
    )


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _differences(conditions: Sequence[dict], name: str) -> list[tuple[dict, dict]]:
    """(condition, difference to the reference) wherever the arm has one."""
    return [
        (each, one["difference"])
        for each in conditions
        for one in each["arms"]
        if one["name"] == name and "difference" in one
    ]


def sorted_out(gaps: Sequence[tuple[dict, dict]], helps: str = "helps", harms: str = "harms") -> str:
    """helps in 1 of 3 conditions (a: +3.0 [1.0, 5.0]), harms in 1 (...), shows no difference in 1 (...)"""
    if not gaps:
        return "has no finished run"
    told, said = [], False
    for kind, word in (("helps", helps), ("harms", harms), ("open", "shows no clear difference")):
        those = [(each, gap) for each, gap in gaps if verdict(gap) == kind]
        if those:
            listed = "; ".join(f"{each['name']} {points(gap)}" for each, gap in those)
            told.append(f"{word} in {len(those)}{'' if said else f' of {len(gaps)}'} ({listed})")
            said = True
    return ", ".join(told)


def _table(each: dict[str, Any]) -> list[str]:
    budget = {key: value for key, value in each["budget"].items() if value is not None}
    head = [
        f"## {each['name']}: {each['model']}, {each['method']}",
        "",
        f"{each['n_train']:,} / {each['n_dev']:,} / {each['n_test']:,} examples to train on, to choose by, to test on "
        f"({each['groups']:,} groups in the test set); "
        + ", ".join(
            f"{key.replace('_', ' ')} {value:g}" if not isinstance(value, str) else f"{value}"
            for key, value in budget.items()
        )
        + "; grid "
        + ", ".join(f"{rate:g}" for rate in each["learning_rates"])
        + (
            "; baselines " + ", ".join(f"{k.replace('_', ' ')} {v:.1f}" for k, v in each["baselines"].items())
            if each["baselines"]
            else ""
        )
        + ".",
        "",
        f"| arm | seeds | rate | {each['metric']} | difference | s per run |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in each["arms"]:
        mean = f"{one['mean']:.1f}" + ("" if one["low"] is None else f" [{one['low']:.1f}, {one['high']:.1f}]")
        gap = points(one["difference"]) if "difference" in one else ""
        head.append(f"| {one['name']} | {one['n_seeds']} | {one['rate']:g} | {mean} | {gap} | {one['seconds']:,.0f} |")
    if each["pairs"]:
        listed = "; ".join(f"{p['one']} less {p['other']}: {points(p['difference'])}" for p in each["pairs"])
        head += ["", f"Pairs: {listed}."]
    if each["parts"]:
        names = [one["name"] for one in each["arms"]]
        head += ["", "| part | n | " + " | ".join(names) + " |", "|---|---:|" + "---:|" * len(names)]
        for part in each["parts"]:
            cells = [f"{part['arms'][name]['mean']:.1f}" for name in names]
            head.append(f"| {part['name']} | {part['n']:,} | " + " | ".join(cells) + " |")
    return [*head, ""]
