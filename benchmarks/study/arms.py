"""The arms of `mask_effect`: what a model may attend to while it learns a task, and the weights it starts from.

causal            the model as it is: the reference
bidirectional     the causal mask removed in every layer, no other change
mntp:STEPS        the mask removed, then STEPS of masked next-token prediction on the training texts of the task, then
                  the task (mlm:STEPS: the same with masked-language modelling)
next:STEPS        causal, and STEPS of next-token prediction on the same texts: the control for mntp and mlm
repeated          causal, and every input is read twice (repeated:3: three times): the control for right context
right-to-left     a control: as much context as causal, from the other side, as unfamiliar as bidirectional
unmask:LAYERS     the mask removed in some layers: unmask:middle-third, unmask:below-1/3, unmask:above-2/3, unmask:0,1,2
encoder:MODEL     another model, which is bidirectional by itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.errors import DataError

REFERENCE = "causal"
DEFAULT = ("causal", "bidirectional", "mntp:200", "next:200", "unmask:middle-third", "repeated", "right-to-left")
OBJECTIVES = ("mntp", "mlm", "next")
DEFAULT_STEPS = 200


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Attributes:
        mask, layers, readings: as in `labkit.tasks.finetune.finetune`.
        objective, steps: of the training on texts before the task; None and 0 without one.
        model: instead of the model of the study.
    """

    name: str
    mask: str = "causal"
    layers: str = "all"
    readings: int = 1
    objective: str | None = None
    steps: int = 0
    model: str | None = None


def arm(name: str) -> Arm:
    """The arm called `name`. Raises DataError if there is none."""
    kind, _, detail = name.partition(":")
    if kind in ("causal", "bidirectional", "right-to-left") and not detail:
        return Arm(name, mask=kind)
    if kind == "repeated" and (not detail or detail.isdecimal() and int(detail) > 1):
        readings = int(detail or 2)
        return Arm(kind if readings == 2 else f"{kind}:{readings}", readings=readings)
    if kind in OBJECTIVES and (not detail or detail.isdecimal() and int(detail) > 0):
        steps = int(detail or DEFAULT_STEPS)
        return Arm(f"{kind}:{steps}", "causal" if kind == "next" else "bidirectional", objective=kind, steps=steps)
    if kind == "unmask" and detail:
        return Arm(name, "bidirectional", detail)
    if kind == "encoder" and detail:
        return Arm(name, "encoder", model=detail)
    raise DataError(f"there is no arm {name!r}; benchmarks/study/arms.py lists them")


def arms(names: Sequence[str]) -> list[Arm]:
    """The arms of these names. DataError if one is named twice, or the reference is missing."""
    chosen = {one.name: one for one in map(arm, names)}
    if len(chosen) < len(names) or REFERENCE not in chosen:
        raise DataError(f"the arms are {', '.join(names)}; name each once, and {REFERENCE} among them")
    return list(chosen.values())


def named(text: str) -> list[str]:
    """causal,unmask:0,1 as ["causal", "unmask:0,1"]: a number belongs to the arm before it."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part.isdecimal() and names and names[-1].startswith("unmask:"):
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names
