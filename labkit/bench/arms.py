"""The arms of a comparison: what a model may see while it learns a task, and from what weights it starts.

causal            the model as it is: what all others are compared with
bidirectional     the causal mask removed in every layer, no other change
mntp:STEPS        the mask removed and STEPS of masked next-token prediction on the task's own training texts, then the
                  task (mlm:STEPS: the same with masked-language modelling)
next:STEPS        causal, and STEPS of next-token prediction on the same texts: the control for mntp and mlm
repeated          causal, and every input read twice (repeated:3: three times): the control for all that see the
                  right-hand side
right-to-left     a control: as much context as causal, from the other side, as foreign to the weights as bidirectional
unmask:WHICH      the mask removed in some layers: unmask:middle-third, unmask:below-1/3, unmask:above-2/3, unmask:0,1,2
encoder:MODEL     another model, which is bidirectional as it comes
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from labkit.errors import DataError

OBJECTIVES = ("mntp", "mlm", "next")
ADAPTED = ("mntp", "mlm")  # those after which the mask is removed
DEFAULT_STEPS = 200  # of an adaptation, where none are named
DEFAULT = (
    "causal", "bidirectional", f"mntp:{DEFAULT_STEPS}", f"next:{DEFAULT_STEPS}", "unmask:middle-third", "repeated",
    "right-to-left",
)  # fmt: skip
REFERENCE = "causal"


@dataclass(frozen=True)
class Arm:
    """One way of seeing.

    Attributes:
        name: as above. mask, layers, readings: as in `labkit.tasks.finetune.finetune`.
        objective, steps: of the training before the task; None and 0 without one.
        model: instead of the study's, None for that.
    """

    name: str
    mask: str = "causal"
    layers: str = "all"
    readings: int = 1
    objective: str | None = None
    steps: int = 0
    model: str | None = None

    @property
    def seeing(self) -> dict[str, Any]:
        """What `finetune` is told of it."""
        return {"mask": self.mask, "layers": self.layers, "readings": self.readings}

    @property
    def share(self) -> tuple[str, float] | None:
        """(from which side, how many of all layers) are unmasked, if that is how they were chosen."""
        found = re.fullmatch(r"(below|middle|above)-(\d+)/(\d+)", self.layers.replace("middle-third", "middle-1/3"))
        return (found[1], int(found[2]) / int(found[3])) if found else None


def arm(name: str) -> Arm:
    """The arm called `name`. Raises DataError, listing the forms, if there is none."""
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
    forms = (
        "causal, bidirectional, mntp:STEPS, mlm:STEPS, next:STEPS, repeated (or repeated:3), right-to-left, "
        "unmask:WHICH, encoder:MODEL"
    )
    raise DataError(f"the arm is {name!r}; give {forms}")


def arms(names: list[str] | tuple[str, ...]) -> list[Arm]:
    """The arms of these names, each once, "causal" among them: DataError otherwise."""
    found = [arm(name) for name in names]
    if len({each.name for each in found}) < len(found):
        raise DataError(f"the arms are {', '.join(names)}: one is there twice")
    if REFERENCE not in {each.name for each in found}:
        raise DataError(f"the arms are {', '.join(names)}; {REFERENCE} must be among them, all are compared with it")
    return found
