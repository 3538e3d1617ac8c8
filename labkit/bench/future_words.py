"""The report of Future Attention in words and as Markdown: what the numbers say, and what they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.bench.future_arms import REFERENCE

ARMS, SEEDS = 5, 3  # without so many there is no verdict
CLEAR = 0.02  # nats per token: a difference that would matter, and the widest half of an interval that gets a verdict

HEADER = (
    "Losses are nats per token on held-out text: mean over the seeds with Student's 95 % interval. Differences are to "
    f"{REFERENCE}, paired by seed and row, for new seeds and new rows of such text; below zero is better. 'Together': "
    "the wider interval that holds for all differences of the table at once. 'Future loss': (1 - cosine) / 2 to the "
    "joint target on held-out rows, whatever the arm was trained on. FLOPs are those of a training step, forward and "
    "backward, counted; attention as it is written, over all pairs of a row. Seconds may hold other work."
)


def paragraphs(found: dict[str, Any]) -> list[str]:
    """Whether Future Attention helps, what its controls say, what is not known; from the numbers alone."""
    told = []
    for each in found["conditions"]:
        told.append(_main(each))
        told += [text for text in (_controls(each), _imbalance(each)) if text]
    told.append(_unknown(found["conditions"]))
    for each in found["unfinished"]:
        lacking = f" (none of {', '.join(each['without'])})" if each["without"] else ""
        told.append(f"**Unfinished:** {each['name']}, {each['done']} of {each['planned']} runs{lacking}.")
    return told


def nats(gap: dict[str, Any]) -> str:
    """-0.012 [-0.020, -0.004]"""
    if gap["low"] is None:
        return f"{gap['mean']:+.4f} (one seed)"
    return f"{gap['mean']:+.4f} [{gap['low']:+.4f}, {gap['high']:+.4f}]"


def verdict(gap: dict[str, Any], enough: bool = True) -> str:
    """ "better", "worse", "the same to within 0.02 nats", or why there is none.

    "barely": the interval alone leaves out zero, and the one that holds for all differences of the study at once does
    not.
    """
    if not enough or gap["low"] is None or gap.get("n_seeds", SEEDS) < SEEDS:
        return "no verdict: too few arms or seeds"
    if (gap["high"] - gap["low"]) / 2 > CLEAR:
        return f"no verdict: the interval is wider than {CLEAR} nats to each side"
    if gap["high"] < 0 or gap["low"] > 0:
        side = "better" if gap["high"] < 0 else "worse"
        small = max(abs(gap["low"]), abs(gap["high"])) < CLEAR
        alone = gap.get("low_together", gap["low"]) <= 0 <= gap.get("high_together", gap["high"])
        return side + (f", by less than {CLEAR} nats" if small else "") + (", barely" if alone else "")
    if max(abs(gap["low"]), abs(gap["high"])) <= CLEAR:
        return f"the same to within {CLEAR} nats"
    return "open: zero is in the interval, and so is more than would matter"


def _main(each: dict[str, Any]) -> str:
    compared = [one for one in each["arms"] if _is_claim(one) and "difference" in one]
    if not compared:
        return f"**{each['name']}:** no arm of Future Attention has ended."
    (reference,) = (one for one in each["arms"] if one["name"] == REFERENCE)
    size = f"{reference['parameters'] / 1e6:.2f} M parameters"
    return f"**{each['name']}, against {REFERENCE} ({size}):** {'; '.join(_told(one, each) for one in compared)}."


def _is_claim(one: dict[str, Any]) -> bool:
    return one["name"].startswith(("future:", "tokens:"))


def _told(one: dict[str, Any], each: dict[str, Any]) -> str:
    size = f"{one['parameters'] / 1e6:.2f} M"
    return f"{one['name']} ({size}) {nats(one['difference'])}: {verdict(one['difference'], each['enough'])}"


def _controls(each: dict[str, Any]) -> str:
    told = [_told(one, each) for one in each["arms"] if not _is_claim(one) and "difference" in one]
    text = f"**Controls, against the same:** {'; '.join(told)}." if told else ""
    if each["pairs"]:
        listed = "; ".join(f"{p['one']} less {p['other']}: {nats(p['difference'])}" for p in each["pairs"])
        text += f" **Against each other:** {listed}."
    return text.strip()


def _imbalance(each: dict[str, Any]) -> str:
    """The argument that early positions, which see little, gain the most from columns."""
    arms = [one["name"] for one in each["arms"] if one["name"].startswith(("future:", "tokens:", "memory"))]
    told = []
    for arm in arms:
        gaps = [part["arms"].get(arm, {}).get("difference") for part in each["parts"]]
        if all(gap is not None for gap in gaps):
            told.append(f"{arm} {', '.join(nats(gap) for gap in gaps)}")
    if not told:
        return ""
    where = f"Difference to {REFERENCE} in the first, middle and last third of a row, and first less last (new seeds)"
    return (
        "**Does it help where little is to be seen?** Early positions have few keys, so columns should matter most "
        f"there. {where}: {'; '.join(told)}."
    )


def _unknown(conditions: Sequence[dict[str, Any]]) -> str:
    shapes = "; ".join(
        f"{each['name']}: {_shape(each)}, {each['budget']['steps']:,} steps, {each['passes']:.1f} passes over "
        f"{each['tokens']['train']:,} tokens of {', '.join(each['texts'])}"
        for each in conditions
    )
    count = sum("difference" in one for each in conditions for one in each["arms"])
    count += sum(len(each["pairs"]) for each in conditions)
    count += sum("difference" in one for each in conditions for part in each["parts"] for one in part["arms"].values())
    return (
        f"**Not known:** other sizes, texts and budgets than these ({shapes}). Every arm has one learning rate and one "
        "weight of its loss, which were not tuned, and the losses differ in scale: two kinds of loss are not compared "
        "by this, each is compared with what has none. multi-token takes more arithmetic than columns do; the table "
        f"counts it. Of {count} differences told here about {0.05 * count:.1f} would leave out zero by chance alone if "
        "nothing differed; 'barely' marks what does so only by itself."
    )


def _shape(each: dict[str, Any]) -> str:
    budget = each["budget"]
    return f"{budget['layers']} layers of {budget['width']}, context {budget['context']}"


def markdown(found: dict[str, Any], figures: Sequence[str]) -> str:
    """The whole report as one Markdown file: words, tables, figures."""
    forest = [file for file in figures if "-curve-" not in file]
    parts = ["# Future Attention", "", *[f"{text}\n" for text in found["words"]]]
    parts += [f"![differences to the baseline]({file})\n" for file in forest]
    parts += [HEADER, ""]
    for each in found["conditions"]:
        parts += [f"## {each['name']}: {_shape(each)}", "", *_table(each), "", *_thirds(each), ""]
    curves = [file for file in figures if file not in forest]
    parts += ["## Curves", ""] if curves else []
    parts += [f"![{curve['title']}]({file})\n" for curve, file in zip(found["curves"], curves, strict=True)]
    return "\n".join(parts).rstrip() + "\n"


def _table(each: dict[str, Any]) -> list[str]:
    lines = [
        "| arm | seeds | parameters | MFLOP per token | train | held out | difference | together | future loss | s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in each["arms"]:
        gap = one.get("difference")
        wide = f"[{gap['low_together']:+.4f}, {gap['high_together']:+.4f}]" if gap and gap["low"] is not None else ""
        future = f"{one['future_loss']['mean']:.3f}" if "future_loss" in one else ""
        lines.append(
            f"| {one['name']} | {len(one['seeds'])} | {one['parameters']:,} | {one['flops_per_token'] / 1e6:.2f} "
            f"| {one['train_loss']['mean']:.4f} | {_interval(one)} | {nats(gap) if gap else ''} | {wide} | {future} "
            f"| {one['seconds']:,.0f} |"
        )
    return lines


def _thirds(each: dict[str, Any]) -> list[str]:
    lines = ["| held out, by position | " + " | ".join(part["name"] for part in each["parts"]) + " |"]
    lines.append("|---|" + "---:|" * len(each["parts"]))
    for one in each["arms"]:
        cells = []
        for part in each["parts"]:
            here = part["arms"][one["name"]]
            cells.append(f"{here['mean']:.4f}" + (f" ({nats(here['difference'])})" if "difference" in here else ""))
        lines.append(f"| {one['name']} | " + " | ".join(cells) + " |")
    return lines


def _interval(one: dict[str, Any]) -> str:
    return f"{one['mean']:.4f}" + ("" if one["low"] is None else f" [{one['low']:.4f}, {one['high']:.4f}]")
