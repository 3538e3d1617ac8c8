"""Draw docs/mask_effect.svg from the stored comparison: python scripts/draw_headline.py"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit.bench.arms import REFERENCE
from labkit.bench.effect_across import steps_of
from labkit.bench.stored import mask_effects
from labkit.run_folder import write_whole
from labkit.viz import effects_svg

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "mask_effect.svg"
MODEL, METHOD = "gemma3-270m", "lora"
ARMS = {
    "bidirectional": "mask removed",
    "repeated": "mask kept, read twice",
}
SETS = {  # condition: (how the picture calls it, the part of it that is drawn, or None for all)
    "which-way-round/ner": ("Names, where what follows decides", "what follows decides"),
    "wikigold/ner": ("Entities in an encyclopedia, Wikigold", None),
    "field-notes/ner": ("Entities in short prose, Field Notes", None),
    "wnut17/ner": ("Entities in posts, WNUT 17", None),
    "xquad/question-first": ("Questions before their text, XQuAD", None),
    "xquad/question-last": ("Questions after their text, XQuAD", None),
    "field-notes/question-first": ("Questions before their text, Field Notes", None),
}


def drawn() -> str:
    found = [each for each in mask_effects() if (each["model"], each["method"]) == (MODEL, METHOD)]
    by_steps = {(each["name"], steps_of(each)): each for each in found}
    if len(by_steps) < len(found):
        sys.exit(f"a set was measured twice with {MODEL}, {METHOD} and as many steps: which of the two is to be drawn?")
    if strange := sorted({name for name, _ in by_steps} - SETS.keys()):
        sys.exit(f"{', '.join(strange)}: measured, and without a name in SETS of {Path(__file__).name}")
    rows: dict[str, dict[str, tuple]] = {}
    for name in SETS:
        for label, arms in _groups([by_steps[key] for key in sorted(by_steps) if key[0] == name]):
            if label in rows:
                sys.exit(f"{label}: measured twice; which of the two is to be drawn?")
            rows[label] = _row(arms)
    return str(effects_svg(rows, unit="points of F1"))


def _row(arms: dict[str, Any]) -> dict[str, tuple]:
    return {
        each + ("" if arm.get("learned", True) else ", unlearned"): tuple(
            arm["difference"][key] for key in ("mean", "low", "high")
        )
        for arm_name, arm in arms.items()
        if (each := _called(arm_name, arms)) and "difference" in arm
    }


def _called(name: str, arms: dict[str, Any]) -> str:
    """How the picture calls an arm, "" if it is not drawn; of several numbers of MNTP steps before it, the most."""
    steps = [int(each.removeprefix("mntp:")) for each in arms if each.startswith("mntp:")]
    if steps and name == f"mntp:{max(steps)}":
        return f"removed + {max(steps)} MNTP"
    return ARMS.get(name, "")


def _groups(conditions: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, arms) of a set, with its steps where it was learned for several numbers of them."""
    for each in conditions:
        for label, steps, arms in _sized(each):
            failed = "" if arms[REFERENCE].get("learned", True) else f" ({REFERENCE}: unlearned)"
            yield label + (f", {steps:,.0f} steps" if len(conditions) > 1 else "") + failed, arms


def _sized(condition: dict[str, Any]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(label, steps, arms) of one condition: where its training set was cut, also with the fewest examples."""
    label, part = SETS[condition["name"]]
    if part is not None:
        half = next(each for each in condition["parts"] if each["name"] == part)
        yield f"{label} (n = {half['n']:,})", steps_of(condition), half["arms"]
        return
    sizes = sorted(condition.get("sizes", ()), key=lambda each: each["size"])
    if len(sizes) > 1:
        yield f"{label}: {sizes[0]['size']:,} examples to learn from", sizes[0]["steps"], sizes[0]["arms"]
    arms = {each["name"]: each for each in condition["arms"]}
    yield f"{label}: {condition['n_train']:,} examples to learn from", steps_of(condition), arms


def main() -> None:
    if sys.argv[1:]:
        sys.exit(__doc__)
    write_whole(PICTURE, drawn())


if __name__ == "__main__":
    main()
