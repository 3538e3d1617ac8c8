"""Widen the intervals of an old report of the mask's effect, whose runs are gone, for few groups of texts.

    git show 67c3830:benchmarks/results/mask_effect.json > old.json
    python scripts/widen_report.py old.json base.json which-way-round/ner:gpt2-mini xquad/question-first:gemma3-270m

`base.json` then holds these conditions alone, marked, and `labkit bench report base.json FOLDERS` takes them over.
Reports made before intervals were widened for few groups (`labkit.bench.paired.difference`) were too narrow there. Each
end is stretched about the mean by sqrt((f t)^2 + s^2) / sqrt(t^2 + s^2): t and s are the half-widths of texts and of
seeds that the report holds, f the factor by which the part of the texts was too narrow. Of kept runs the report makes
them exactly.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from labkit.bench.effect_limits import NEARLY
from labkit.bench.paired import expansion
from labkit.run_folder import write_whole

ENDS = ("low", "high", "low_together", "high_together")


def widened(gap: dict[str, Any], groups: int) -> dict[str, Any]:
    """A difference as a report stores it, with the interval that `groups` groups of texts give."""
    if gap.get("low") is None or gap.get("of_texts") is None:
        return gap
    factor, texts, seeds = expansion(groups), gap["of_texts"], gap["of_seeds"]
    before = math.hypot(texts, seeds)
    by = math.hypot(factor * texts, seeds) / before if before else 1.0
    ends = {end: gap["mean"] + (gap[end] - gap["mean"]) * by for end in ENDS if gap.get(end) is not None}
    return {**gap, **ends, "of_texts": factor * texts}


def condition(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored condition, all its differences widened, and marked."""

    def each(holder: dict[str, Any]) -> dict[str, Any]:
        gap = holder.get("difference")
        return {**holder, "difference": widened(gap, stored["groups"])} if gap else holder

    parts = [{**part, "arms": {name: each(arm) for name, arm in part["arms"].items()}} for part in stored["parts"]]
    arms, pairs = ([each(one) for one in stored[key]] for key in ("arms", "pairs"))
    return {**stored, "arms": arms, "pairs": pairs, "parts": parts, "intervals": NEARLY}


def widen(report: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Of a report, the conditions called NAME:MODEL in `names`."""
    known = {f"{one['name']}:{one['model']}" for one in report["conditions"]}
    if missing := sorted(names - known):
        sys.exit(f"the report has no {', '.join(missing)}; it has {', '.join(sorted(known))}")
    if twice := [one["name"] for one in report["conditions"] if one.get("intervals") == NEARLY]:
        sys.exit(f"already widened: {', '.join(twice)}")
    kept = [condition(one) for one in report["conditions"] if f"{one['name']}:{one['model']}" in names]
    curves = [one for one in report["curves"] if f"{one['condition']}:{one['model']}" in names]
    return {**report, "conditions": kept, "curves": curves, "unfinished": []}


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    made = widen(json.loads(Path(sys.argv[1]).read_text("utf-8")), set(sys.argv[3:]))
    write_whole(Path(sys.argv[2]), json.dumps(made, indent=1))
    print(f"{sys.argv[2]}: {len(made['conditions'])} conditions")
