"""What `audit` and `find_leaks` measured, as values that print as a table and convert to JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby

from torch import Tensor

from labkit.masks import Mask

# Problems that do not contradict a verdict: a shift concerns positions and not the mask, and a causal mask itself lets
# a later document of a packed row attend to an earlier one.
ALLOWED = {
    "causal": ("left-padding-position-shift", "packing-leak"),
    "bidirectional": ("left-padding-position-shift",),
}


class Problem(str):
    """A problem in plain words; `.kind` names it for programs, `.layers` lists the layers it was measured in."""

    kind: str
    layers: tuple[int, ...]

    def __new__(cls, kind: str, text: str, layers: Sequence[int] = ()):
        self = super().__new__(cls, text)
        self.kind, self.layers = kind, tuple(layers)
        return self

    def __getnewargs__(self):  # so that it can be copied and pickled
        return self.kind, str(self), self.layers


@dataclass(frozen=True)
class LayerReport:
    """One attention layer, measured in isolation.

    Attributes:
        name: path of the attention module in the model.
        mask: the measured mask on an unpadded row of 12 tokens (6 in a quick audit), in which a longer window does
            not show; a named expression if one has exactly these cells.
        verdict: the verdict without padding.
        verdicts: verdict by kind of batch ("unpadded", "beside padding", "right-padded", "left-padded").
        reach: (left, right) tokens that a query attends to on either side, measured past the window; None = not
            measured; within the pair, None = no limit was met.
    """

    index: int
    name: str
    mask: Mask
    verdict: str
    verdicts: dict[str, str]
    reach: tuple[int | None, int | None] | None = None


@dataclass(frozen=True)
class Scenario:
    """The whole model on one kind of batch.

    Attributes:
        verdict: from the influence between real tokens.
        influence: bool (real tokens, columns): does changing token columns[c] change the output at a token?
        columns: which tokens were changed (all, or a few in a quick audit).
        pad_leak: a padded position influences a real one.
        nan: some output is not a finite number.
    """

    verdict: str
    influence: Tensor
    columns: tuple[int, ...]
    pad_leak: bool = False
    nan: bool = False


@dataclass(frozen=True)
class AuditReport:
    """The mask that is really in force in a model. `print(report)` is a table.

    Attributes:
        verdict: "causal", "bidirectional", "mixed" (some layers or some kinds of batch are the one, some the other) or
            "other" (a mask that is neither).
        layers: one `LayerReport` per attention layer; empty if the model shows no attention modules.
        whole: one `Scenario` per kind of batch.
        problems: what is wrong, in plain words; each has a `.kind`.
        notes: what was not measured, and why.
    """

    model: str
    backend: str | None
    dtype: str
    verdict: str
    layers: list[LayerReport]
    whole: dict[str, Scenario]
    problems: list[Problem]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.backend or 'no known backend'}, {self.dtype}): {self.verdict.upper()}"]
        if self.layers:
            tokens = len(self.whole["unpadded"].influence)  # a longer window does not show in the mask of so many
            rows = [["layer", f"mask on {tokens} tokens", "reach left, right", *self.layers[0].verdicts]]
            for (mask, reach, verdicts), alike in groupby(self.layers, key=_row):
                indices = [layer.index for layer in alike]
                rows.append([index_list(indices), mask, reach, *verdicts])
            if not any(row[2] for row in rows[1:]):  # no layer with a window
                rows = [row[:2] + row[3:] for row in rows]
            lines.append(table(rows, indent="  "))
        else:
            lines += [f"  {kind}: {scenario.verdict}" for kind, scenario in self.whole.items()]
        lines += [f"problem: {problem}" for problem in self.problems]
        if not self.problems and self.verdict in ALLOWED:
            lines.append("no problems found")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def failure(self, expected: str, allow: Sequence[str] | None = None) -> str | None:
        """Why the model does not have the `expected` verdict without problems, `allow` apart; None if it does."""
        allow = ALLOWED[expected] if allow is None else allow
        if self.verdict != expected:
            return f"is {self.verdict}"
        objections = [problem for problem in self.problems if problem.kind not in allow]
        return f"has problems: {'; '.join(objections)}" if objections else None

    def problem_kinds(self) -> set[str]:
        """The kinds of problem that were measured."""
        return {problem.kind for problem in self.problems}

    def to_json(self) -> str:
        """Everything as JSON text; masks as their expressions."""
        data = vars(self) | {
            "layers": [vars(layer) for layer in self.layers],
            "whole": {kind: vars(scenario) for kind, scenario in self.whole.items()},
            "problems": [{"kind": p.kind, "text": str(p), "layers": p.layers} for p in self.problems],
        }
        return json.dumps(data, default=_plain)


Cells = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Leak:
    """One way in which an output depends on what it must not depend on.

    Attributes:
        kind: one of
            "future-token": on later tokens, in evaluation mode and without a mask;
            "finite-mask": the same, because the mask is only a finite number;
            "attention-mask": only if an attention mask is given, of ones or with padding, or if there are pad tokens;
            "option": only with an option such as `output_attentions=True`;
            "train-mode": only in train mode;
            "cache": outputs computed with a cache differ from those of one pass;
            "batch": on other rows of the batch;
            "not-repeatable": on earlier calls, or on chance: the same tokens gave another output;
            "no-influence": no token influences any other, not even a later one, so that nothing could leak and nothing
            was tested;
            "labels-not-shifted": a position has to predict a token that it was given;
            "labels-misplaced": it has to predict a token after the next one;
            "labels-in-output": an output depends on the label of the same or a later position.
        text: what was measured, in words.
        cells: (position, later position that it depends on), most affected first. If the leak shows only when several
            tokens change, the later position is the first of them.
        layers: attention layers in which it happens; empty if it is not in the attention, or could not be located.
        factor: for a finite mask, how many times as large the attention scores were when it failed; 1 = as they are.
    """

    kind: str
    text: str
    cells: Cells = ()
    layers: tuple[int, ...] = ()
    factor: float | None = None


@dataclass(frozen=True)
class LeakReport:
    """The result of `find_leaks`. `report.clean` is True if nothing leaks.

    Attributes:
        influence: (positions, positions): how much the output at i changes when token j does, relative to its size.
        tries: how many times several tokens were changed at once, at random.
        longest: length of the longest text that was run.
        notes: what was not tried, and why.
    """

    model: str
    leaks: list[Leak]
    influence: Tensor
    tries: int
    longest: int
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.leaks

    def __str__(self) -> str:
        verdict = "no leak" if self.clean else "LEAKS"
        tried = f"{len(self.influence)} tokens changed one by one, {self.tries} random changes of several tokens"
        lines = [f"{self.model}: {verdict} ({tried}, texts of up to {self.longest} tokens)"]
        lines += [f"leak: {leak.text}" for leak in self.leaks]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def to_json(self) -> str:
        """Everything as JSON text; JSON has no infinity, so the largest float stands for it."""
        influence = self.influence.nan_to_num().tolist()
        return json.dumps({"clean": self.clean} | asdict(self) | {"influence": influence}, indent=1)


def table(rows: list[Sequence[str]], indent: str = "") -> str:
    """Rows of cells as lines of text, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(indent + line.rstrip() for line in lines)


def layer_list(indices: Sequence[int]) -> str:
    """ "layer 3", "layers 0-4", "layers 0, 2-5"."""
    return f"layer{'s' if len(indices) > 1 else ''} {index_list(indices)}"


def index_list(indices: Sequence[int]) -> str:
    """ "3", "0-4", "0, 2-5"."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(sorted(indices)), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _row(layer: LayerReport) -> tuple[str, str, tuple[str, ...]]:
    sides = ["all" if side is None else str(side) for side in layer.reach or ()]
    return repr(layer.mask), ", ".join(sides), tuple(layer.verdicts.values())


def _plain(value):
    return value.int().tolist() if isinstance(value, Tensor) else repr(value)
