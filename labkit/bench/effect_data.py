"""What lies in the folder of a study, read back: every reported run with its scores, example by example.

Nothing is taken from the process that ran the study, so a report can be made of a folder anywhere, at any time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.bench import folders
from labkit.bench.arms import REFERENCE, Arm, arm
from labkit.bench.paired import Counted, Estimate, counted, difference
from labkit.errors import TrainingError
from labkit.run_folder import read_json

BUDGET = ("epochs", "max_steps", "batch_size", "gradient_accumulation", "dtype")
SETTINGS = ("rank", "attn", "window", "max_length", "adaptation_rate", "adaptation_batch", "adaptation_length")


@dataclass(frozen=True)
class Cell:
    """One arm on one condition, with training sets of one size: its finished runs.

    Attributes:
        rate: the learning rate that dev chose. tried: the score on dev of every rate, {} where there was one only.
        failed: why a rate has none, {rate: reason}. metrics, judged, history: by seed.
        baselines: the lines of what needs no model, by its name; {} of studies that left none.
        before: what the training before the task left as its metrics, by seed; of arms that have one.
    """

    arm: Arm
    size: int | None
    rate: float
    tried: dict[float, float]
    failed: dict[float, str]
    task: str
    metrics: dict[int, dict[str, Any]]
    judged: dict[int, list[dict[str, Any]]]
    history: dict[int, list[dict[str, Any]]]
    before: dict[int, dict[str, Any]]
    baselines: dict[str, list[dict[str, Any]]]

    def counted(self, kind: str | None = None) -> Counted:
        """The runs, ready to be compared; of one entity kind, or all."""
        if kind not in self._counted:
            self._counted[kind] = counted(self.judged, self.task, kind)
        return self._counted[kind]

    @cached_property
    def _counted(self) -> dict[str | None, Counted]:
        return {}


@dataclass(frozen=True)
class Measured:
    """A condition of a study with all of its arms that have at least one finished run at full size.

    Attributes:
        study: as in study.json. facts: of the condition. cells: by arm, at full size. smaller: those of other sizes.
    """

    study: dict[str, Any]
    facts: dict[str, Any]
    cells: dict[str, Cell]
    smaller: list[Cell]

    @property
    def name(self) -> str:
        return self.facts["name"]

    @property
    def reference(self) -> Cell:
        return self.cells[REFERENCE]

    @property
    def made_with(self) -> dict[str, dict[str, Any]]:
        return made_with(self.study)


def made_with(study: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{"budget", "settings"}, which reports hold: what makes it another condition with the same data and model."""
    plan = study["plan"]
    settings = {key: study.get(key) for key in SETTINGS} | {"evaluate_every": plan.get("evaluate_every")}
    return {"budget": {key: plan[key] for key in BUDGET}, "settings": settings}


def measured(folder: str | Path) -> list[Measured]:
    """The conditions of the study in `folder` of which the reference arm has a run.

    Raises:
        TrainingError: no study there, or runs that cannot be compared: arms of one seed that were trained on the same
            examples in another order, or with different weights of the head.
    """
    path = Path(folder).expanduser().absolute()
    whole = folders.read_study(path)
    study, frozen, found = whole["study"], folders.frozen(path), []
    for facts in whole["conditions"]:
        rates = frozen.get(facts["name"], {})
        cells = [
            cell
            for one in _in_order(study["arms"])
            for size in folders.sizes(study["sizes"], facts["n_train"])
            if one.name in rates and (cell := _cell(path, study, facts, one, size, rates[one.name]))
        ]
        full = {cell.arm.name: cell for cell in cells if cell.size is None}
        if REFERENCE in full:
            _require_same_start(cells, facts["name"])
            found.append(Measured(study, facts, full, [cell for cell in cells if cell.size is not None]))
    return found


def _in_order(names: Sequence[str]) -> list[Arm]:
    """As they were asked for, but adaptations of one kind beside each other, the fewest steps first."""
    kinds = list(dict.fromkeys(name.partition(":")[0] for name in names))
    return sorted(map(arm, names), key=lambda one: (kinds.index(one.name.partition(":")[0]), one.steps))


def unfinished(folder: str | Path) -> list[dict[str, Any]]:
    """What the study in `folder` was to run and has not: per condition {name, model, method, budget, settings, done,
    planned, without}.

    `without` lists the arms that have no finished run at all. Conditions of which all is done are left out.
    """
    path = Path(folder).expanduser().absolute()
    whole = folders.read_study(path)
    study, found = whole["study"], []
    for facts in whole["conditions"]:
        sizes = folders.sizes(study["sizes"], facts["n_train"])
        done = {
            name: sum(
                (folders.run_folder(path, facts["name"], name, size, seed) / "metrics.json").exists()
                for size in sizes
                for seed in study["seeds"]
            )
            for name in study["arms"]
        }
        planned = len(study["arms"]) * len(sizes) * len(study["seeds"])
        if sum(done.values()) < planned:
            without = [name for name, runs in done.items() if not runs]
            of = {"name": facts["name"], "model": study["model"], "method": study["method"], **made_with(study)}
            found.append(of | {"done": sum(done.values()), "planned": planned, "without": without})
    return found


def _cell(path: Path, study: dict, facts: dict, one: Arm, size: int | None, frozen: dict[str, Any]) -> Cell | None:
    """The finished runs of one arm; None if there is none."""
    metrics, judged, history, before = {}, {}, {}, {}
    for seed in study["seeds"]:
        run = folders.run_folder(path, facts["name"], one.name, size, seed)
        if (done := read_json(run / "metrics.json")) is None:
            continue
        metrics[seed] = done
        judged[seed] = _lines(run / "judged.test.jsonl")
        history[seed] = (read_json(run / "trainer_state.json") or {"log_history": []})["log_history"]
        if one.objective:
            adapted = folders.adapted_folder(path, facts["task"], facts["name"], one.name, seed)
            if spent := read_json(adapted / "metrics.json"):
                before[seed] = spent
    if not metrics:
        return None
    tried, failed = ({float(rate): it for rate, it in frozen.get(key, {}).items()} for key in ("dev", "failed"))
    lines = read_json(folders.baselines_file(path, facts["name"], size)) or {}
    rate, task = frozen["learning_rate"], facts["task"]
    return Cell(one, size, rate, tried, failed, task, metrics, judged, history, before, lines)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        # not splitlines(): a name may hold a line separator of Unicode, which JSON leaves as it is
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} could not be read ({error}); delete its run's folder and --resume") from error


def _require_same_start(cells: Sequence[Cell], name: str) -> None:
    """All arms of one seed and size must have seen the same rows in the same order, and begun with the same head."""
    for key, what in (
        ("data_order", "did not see the same rows in the same order"),
        ("head_start", "did not begin with the same weights of the head"),
        ("adapters_start", "did not begin with the same adapters"),
        ("dtype", "did not compute in the same numbers"),
    ):
        found: dict[tuple, dict[str, str]] = {}
        for cell in cells:
            if cell.arm.model is not None:  # another tokenizer cuts other rows, another width has another head
                continue
            for seed, metrics in cell.metrics.items():
                if metrics.get(key) is not None:  # older runs did not write down their head, or their adapters
                    found.setdefault((seed, cell.size), {})[cell.arm.name] = metrics[key]
        for (seed, _), by_arm in found.items():
            if len(set(by_arm.values())) > 1:
                raise TrainingError(
                    f"{name}, seed {seed}: {' and '.join(sorted(by_arm))} {what}, so their difference means nothing; "
                    f"where some were run on another machine, delete those in runs/{folders.slug(name)} and --resume"
                )


def in_points(score: float, task: str) -> float:
    """A score on dev or a baseline, from 0 to 100; those of questions are in percent already."""
    return float(score) if task == "qa" else 100.0 * float(score)


def baselines_of(cell: Cell) -> dict[str, float]:
    """What needs no model, in points on test: made of as many training examples as the arm had."""
    some = next(iter(cell.metrics.values()))
    return {name: in_points(value, cell.task) for name, value in some["baselines"].get("test", {}).items()}


def over_baseline(cell: Cell) -> dict[str, Any]:
    """The arm less what needs no model, paired by example; {} where that was not judged by example.

    Of several such baselines the one that it is least shown to be better than: the lower end decides.
    """
    runs = cell.counted()
    others = {name: counted(dict.fromkeys(runs.seeds, lines), cell.task) for name, lines in cell.baselines.items()}
    gaps = [gap_in_points(runs, other) | {"baseline": name} for name, other in others.items()]
    return {"over_baseline": min(gaps, key=_shown)} if gaps else {}


def _shown(gap: dict[str, Any]) -> float:
    return gap["mean"] if gap["low"] is None else gap["low"]


def estimate_in_points(each: Estimate) -> dict[str, Any]:
    """An estimate in points, as reports hold it; what is not known is left out, but for the interval itself."""
    values = {key: value for key, value in asdict(each).items() if key not in ("seeds", "n")}
    points = {key: None if value is None else 100.0 * value for key, value in values.items()}
    found = {key: value for key, value in points.items() if value is not None or key in ("low", "high")}
    return found | {"n_seeds": each.seeds, "n": each.n}


def gap_in_points(one: Counted, other: Counted, *, together: int | None = None) -> dict[str, Any]:
    """`one` less `other`, as reports hold it. `together`: how many such differences are told beside each other, itself
    counted; None: it is not corrected for their number.
    """
    found = estimate_in_points(difference(one, other, together=together or 1))
    return found if together is None else found | {"together": together}
