"""The report of a comparison as Markdown: its words, then a table for each condition, then its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.bench.arms import ADAPTED, REFERENCE, arm
from labkit.bench.effect_gaps import points, verdict
from labkit.bench.effect_names import settings_apart

HEADER = (
    "Scores are test F1 in points (accuracy where it says so): mean over the seeds with Student's 95 % interval, "
    f"which knows of other seeds on these very texts only. Differences are to {REFERENCE}, paired by seed and "
    "example: 95 % by a bootstrap over groups of examples, widened where groups are few, and Student's t over the "
    "seeds, so for new seeds **and** new test texts, with this training set, this split and these rates; 'of "
    "texts, seeds' is half the width that it had if only the one or the other were new. 'Dev by rate': the score "
    "on dev of every learning rate, tried once with another seed, before the test set was read; the best one was "
    "taken. † not shown to be better than a baseline that needs no model (by such a difference too). Same labelled "
    "rows and steps for all arms, not the same compute: a repeated input is twice as long, an adaptation comes "
    "before. Differences by part are in bold where they leave out zero by themselves; there are many of them, and "
    "they are not corrected for that."
)


def markdown(found: dict[str, Any], figure: str | None, curves: Sequence[str]) -> str:
    """The whole report as one Markdown file: `figure` is that of all differences, `curves` one file for each curve."""
    opening, *words = found["words"]
    parts = ["# What the mask buys", "", f"{opening}\n", *_summary(found["conditions"]), ""]
    parts += [f"{text}\n" for text in words]
    parts += [f"![all differences]({figure})", ""] if figure else []
    parts += [HEADER, ""]
    for each, apart in zip(found["conditions"], settings_apart(found["conditions"]), strict=True):
        parts += [f"## {each['name']}: {each['model']}, {each['method']}{apart}", "", _setting(each), "", *_table(each)]
        if each["pairs"]:
            parts += ["", f"Pairs: {_listed(each['pairs'])}."]
        parts += ["", *_parts(each), ""] if each["parts"] else [""]
        parts += [*_sizes(each), ""] if each.get("sizes") else []
    parts += ["## Curves", ""] if curves else []
    parts += [f"![{curve['title']}]({file})\n" for curve, file in zip(found["curves"], curves, strict=True)]
    return "\n".join(parts).rstrip() + "\n"


def _summary(conditions: Sequence[dict[str, Any]]) -> list[str]:
    """What most readers want: the differences to the reference, a line for each condition, its halves and sizes."""
    lines = [
        f"| | {REFERENCE} | mask removed | mask kept, read twice | mask removed after filling gaps |",
        "|---|---:|---:|---:|---:|",
    ]
    for each, apart in zip(conditions, settings_apart(conditions), strict=True):
        arms = {one["name"]: one for one in each["arms"]}
        lines.append(_summary_line(f"{each['name']}, {each['model']}, {each['method']}{apart}", arms))
        for part in each["parts"]:
            if part["name"].endswith(" decides"):
                marked = {name: one | {"learned": arms[name]["learned"]} for name, one in part["arms"].items()}
                lines.append(_summary_line(f"- where {part['name']}", marked))
        for size in each.get("sizes", ())[:-1]:
            lines.append(
                _summary_line(f"- with {size['size']:,} of {each['n_train']:,} training examples", size["arms"])
            )
    return [
        *lines,
        "",
        "Bold: the interval leaves out zero. † not shown to be better than a baseline that needs no model.",
    ]


def _summary_line(name: str, arms: dict[str, dict[str, Any]]) -> str:
    cells = [f"{arms[REFERENCE]['mean']:.1f}" + ("" if arms[REFERENCE]["learned"] else " †")]
    for wanted in ("bidirectional", "repeated"):
        cells.append(_told(arms[wanted]) if "difference" in arms.get(wanted, {}) else "")
    adapted = [one for one in arms if one.partition(":")[0] in ADAPTED and "difference" in arms[one]]
    most = max(adapted, key=lambda one: arm(one).steps, default=None)
    cells.append(f"{_told(arms[most])} ({most})" if most else "")
    return f"| {name} | " + " | ".join(cells) + " |"


def _told(one: dict[str, Any]) -> str:
    text = points(one["difference"]) + ("" if one["learned"] else " †")
    return text if verdict(one["difference"]) == "open" else f"**{text}**"


def _listed(pairs: Sequence[dict[str, Any]]) -> str:
    return "; ".join(_pair(pair) for pair in pairs)


def _pair(pair: dict[str, Any]) -> str:
    text = f"{pair['one']} less {pair['other']}: {points(pair['difference'])}"
    return text + (f", of which {points(pair['beyond'])} beyond the mask alone" if "beyond" in pair else "")


def _setting(each: dict[str, Any]) -> str:
    """One line: the data, the budget, the baselines."""
    budget = {key: value for key, value in each["budget"].items() if value is not None}
    told = [
        f"{key.replace('_', ' ')} {value:g}" if not isinstance(value, str) else value for key, value in budget.items()
    ]
    text = (
        f"{each['n_train']:,} / {each['n_dev']:,} / {each['n_test']:,} examples to train on, to choose by, to test on "
        f"({each['groups']:,} groups in the test set); at most {', '.join(told)}, which is {each['passes']:.1f} passes"
    )
    if most := each.get("settings", {}).get("max_length"):
        text += f"; {most:,} tokens per row at most"
    read = {one["name"]: one["tokens_before"] for one in each["arms"] if one.get("tokens_before")}
    if read:
        of = each["settings"]
        text += (
            f"; before the task rate {of['adaptation_rate']:g}, {of['adaptation_batch']} rows a step of at most "
            f"{of['adaptation_length']} tokens, a text each if it is not longer ("
            + ", ".join(f"{name} {tokens:,} tokens" for name, tokens in read.items())
            + ")"
        )
    if each["baselines"]:
        named = ", ".join(f"{name.replace('_', ' ')} {score:.1f}" for name, score in each["baselines"].items())
        text += f"; baselines {named}"
    return text + "."


def _table(each: dict[str, Any]) -> list[str]:
    rates = ", ".join(f"{rate:g}" for rate in each["learning_rates"])
    lines = [
        f"| arm | seeds | dev by rate ({rates}) | {each['metric']} | difference | of texts, seeds | s per run |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in each["arms"]:
        mean = f"{one['mean']:.1f}" + ("" if one["low"] is None else f" [{one['low']:.1f}, {one['high']:.1f}]")
        mean += "" if one["learned"] else " †"
        gap = one.get("difference")
        halves = f"{gap['of_texts']:.1f}, {gap['of_seeds']:.1f}" if gap and "of_texts" in gap else ""
        seconds = f"{one['seconds']:,.0f}"
        if one["seconds_before"] is not None:
            seconds = f"{one['seconds_before']:,.0f} + {seconds}"
        lines.append(
            f"| {one['name']} | {one['n_seeds']} | {_dev(one, each['learning_rates'])} | {mean} "
            f"| {points(gap) if gap else ''} | {halves} | {seconds} |"
        )
    return lines


def _dev(one: dict[str, Any], rates: Sequence[float]) -> str:
    """28.1, **33.0**, 31.2: in the order of the rates, the chosen one in bold; a rate that failed is a dash."""
    if not one["dev_by_rate"]:
        return f"{one['rate']:g}"
    scores = {float(rate): f"{score:.1f}" for rate, score in one["dev_by_rate"].items()}
    return ", ".join(f"**{scores[rate]}**" if rate == one["rate"] else scores.get(rate, "-") for rate in rates)


def _parts(each: dict[str, Any]) -> list[str]:
    """An arm a line, a part of the test set a column; what leaves out zero is in bold."""
    parts = each["parts"]
    lines = ["| difference in | " + " | ".join(f"{part['name']} (n = {part['n']:,})" for part in parts) + " |"]
    lines.append("|---|" + "---:|" * len(parts))
    for one in each["arms"]:
        cells = []
        for part in parts:
            here = part["arms"][one["name"]]
            text = f"{here['mean']:.1f}"
            if gap := here.get("difference"):
                text += f" ({points(gap)})"
                text = text if verdict(gap) == "open" else f"**{text}**"
            cells.append(text)
        lines.append(f"| {one['name']} | " + " | ".join(cells) + " |")
    return lines


def _sizes(each: dict[str, Any]) -> list[str]:
    """An arm a line, a number of training examples a column; what leaves out zero is in bold."""
    sizes = each["sizes"]
    lines = [
        "| training examples | "
        + " | ".join(f"{one['size']:,} ({one['steps']:.0f} steps, {_seeds(one)})" for one in sizes)
        + " |"
    ]
    lines.append("|---|" + "---:|" * len(sizes))
    for name in dict.fromkeys(name for one in sizes for name in one["arms"]):
        cells = [_of_size(one["arms"][name]) if name in one["arms"] else "" for one in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for one in sizes[:-1]:
        if one.get("pairs"):
            lines += ["", f"Pairs with {one['size']:,}: {_listed(one['pairs'])}."]
    return lines


def _seeds(size: dict[str, Any]) -> str:
    return " to ".join(str(n) for n in sorted({one["n_seeds"] for one in size["arms"].values()})) + " seeds"


def _of_size(one: dict[str, Any]) -> str:
    text = f"{one['mean']:.1f}" + ("" if one["learned"] else " †")
    if gap := one.get("difference"):
        text += f" ({points(gap)})"
        return text if verdict(gap) == "open" else f"**{text}**"
    return text
